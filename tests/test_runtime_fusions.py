"""What ONNX Runtime fuses itself: each prediction is held against what a session on the CPU makes of the same model."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest
from insertions import INSERTIONS, STAY_BESIDE_INPUTS, STAY_FOR_FUSIONS, insert, reads_of
from plain_session import RELEASE

from onnxfuse.graph import Graph
from onnxfuse.graph.model import Node
from onnxfuse.operators import load_graph
from onnxfuse.planning.costs.cost import CostModel
from onnxfuse.planning.costs.hardware import find_profile
from onnxfuse.planning.costs.traffic import Ledger
from onnxfuse.provider.host import host
from onnxfuse.resources import rules_folder
from onnxfuse.rules import Example, example_model, load_rules, runtime_groups

WEIGHTS = "float[4,4] w = {" + ", ".join(["0.25"] * 16) + "}, float[4] b = {0.5, 0.5, 0.5, 0.5}"
ON_CUDA_ALONE = {"ort-bias-softmax"}
"""Rules of what no session on the CPU shows."""

RULES = {rule.id: rule for rule in load_rules([rules_folder()]).runtime}
EXAMPLES = [(rule.id, example.name) for rule in RULES.values() for example in rule.examples]
SEEN = [(rule, name) for rule, name in EXAMPLES if rule not in ON_CUDA_ALONE]


def example_of(rule: str, name: str) -> Example:
    return next(example for example in RULES[rule].examples if example.name == name)


def build(inputs: str, outputs: str, body: str, constants: str) -> onnx.ModelProto:
    held = f"<{constants}>" if constants else ""
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> g ({inputs}) => ({outputs}) {held} {{ {body} }}'
    )


modelled = pytest.mark.skipif(
    RELEASE < (1, 31), reason="the fusions of ONNX Runtime 1.31 are modelled"
)


def optimised(model: onnx.ModelProto, folder: Path) -> list[str]:
    """Operators of what a session makes of a model."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    options.log_severity_level = 3
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [node.op_type for node in onnx.load(folder / "optimised.onnx").graph.node]


@modelled
@pytest.mark.parametrize(("rule", "name"), SEEN)
def test_prediction_against_a_session(rule: str, name: str, tmp_path: Path) -> None:
    """What a session makes of a rule's example, but for what it folds from constants, and views."""
    example = example_of(rule, name)
    model = example_model(example)
    if name == "in float16":
        pytest.skip("the CPU provider has no such convolution")
    made = optimised(model, tmp_path)
    graph = load_graph(model)
    nodes = [node for node in graph.nodes if node not in host(graph).folded and node.op != "Reshape"]
    groups = runtime_groups(graph)
    assert len([op for op in made if op != "Reshape"]) == len(nodes) - sum(len(group.nodes) - 1 for group in groups)
    # A bias before an approximate GELU becomes FastGelu's own.
    assert example.refused is not None or {RULES[rule].becomes.op, "FastGelu"} & set(made)
    assert bool(groups) == (example.refused is None)


@modelled
@pytest.mark.parametrize(("rule", "name"), [case for case in SEEN if example_of(*case).refused is None])
def test_what_does_nothing_hides_no_fusion(rule: str, name: str, tmp_path: Path) -> None:
    """On each read in turn, and on all of one value's, what the runtime takes out before it fuses: the same groups."""
    made, plain = RULES[rule].becomes.op, example_model(example_of(rule, name))
    graph = load_graph(plain)
    types = {key: value.dtype for key, value in graph.values.items() if value.dtype is not None}
    wanted, before = groups_in(graph), optimised(plain, tmp_path).count(made)
    inputs = {value.name for value in plain.graph.input}
    reads = list(dict.fromkeys(read for node in plain.graph.node for read in node.input))
    turns = cycle(range(12))
    for read in reads:
        edges = reads_of(plain, read)
        kinds = [kind for kind in INSERTIONS if kind not in STAY_FOR_FUSIONS
                 and (kind not in STAY_BESIDE_INPUTS or (read not in inputs and types[read] != onnx.TensorProto.BOOL))
                 and (kind != "dropout" or types[read] in (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE))]
        for group in ([[edge] for edge in edges] if len(edges) == 1 else [*([edge] for edge in edges), edges]):
            model = onnx.ModelProto.FromString(plain.SerializeToString())
            kind = kinds[next(turns) % len(kinds)]
            insert(model, [(group, kind)], types)
            assert optimised(model, tmp_path).count(made) == before, (kind, group)
            assert groups_in(load_graph(model)) == wanted, (kind, group)


def groups_in(graph: Graph) -> list[tuple[list[str], list[str]]]:
    """What the nodes of each group compute, and those of its core."""
    return [(names(group.nodes), names(group.core)) for group in runtime_groups(graph)]


def names(nodes: Iterable[Node]) -> list[str]:
    return sorted(value.name for node in nodes for value in node.outputs if value is not None)


@modelled
@pytest.mark.parametrize(
    ("parts", "made"),
    [
        (("float[B,4] x", "float[B,4] y", "t = MatMul(x, w) {} y = Add(u, b)", WEIGHTS), "Gemm"),
        (("float[B,S,4] x", "float[B,S,4] y", "t = Abs(x) s = Sigmoid(t) {} y = Mul(u, s)", ""), "QuickGelu"),
    ],
)
def test_casts_there_and_back_hide_one(parts: tuple[str, str, str, str], made: str, tmp_path: Path) -> None:
    """They go after the fusions have been looked for; one to the same type goes before."""
    for between, found in (("u = Cast <to = 1> (t)", True), ("v = Cast <to = 11> (t) u = Cast <to = 1> (v)", False)):
        inputs, outputs, body, constants = parts
        model = build(inputs, outputs, body.format(between), constants)
        left = optimised(model, tmp_path)
        assert (made in left) is found and "Cast" not in left
        assert bool(runtime_groups(load_graph(model))) is found


def test_a_group_takes_as_long_with_them_between() -> None:
    """It reads and writes what it does without them, and what is left of it when others are gone is the same."""
    costs = []
    for scale, moved, out in (("s", "t", "m"), ("s1", "t1", "m1")):
        graph = load_graph(build(
            "float[2,4,8,16] q, float[2,4,8,16] k", "float[2,4,8,8] y, float[2,4,8,8] z",
            "s = Mul(k, c) s1 = Identity(s) t = Transpose<perm = [0, 1, 3, 2]>(" + scale + ") t1 = Mul(t, one) "
            f"m = MatMul(q, {moved}) m1 = Add(m, zero) d = Div({out}, c) d1 = Dropout(d) y = Abs(d1) z = Neg(d)",
            "float c = {8.0}, float one = {1.0}, float zero = {0.0}",
        ))
        (group,) = runtime_groups(graph)
        model = CostModel(Ledger(graph, {}), find_profile("H100"))
        gone = [node for node in graph.nodes if node.op == "Transpose"]
        costs.append((model.group_seconds(group.nodes), sorted(names(unit) for unit in group.without(gone)),
                      model.total()))
    assert costs[0] == costs[1]


def test_groups_share_no_node() -> None:
    for rule, name in EXAMPLES:
        nodes = [group.nodes for group in runtime_groups(load_graph(example_model(example_of(rule, name))))]
        assert len(frozenset().union(*nodes)) == sum(map(len, nodes))


@pytest.mark.parametrize(
    ("gone", "left"),
    [
        (["Mul"], [{"Transpose", "MatMul", "Div"}]),  # of the scaled and transposed operand the scale: the rest holds
        (["Transpose"], [{"MatMul", "Div"}, {"Mul"}]),  # what it joined to the product is alone
        (["Mul", "Transpose", "Div"], [{"MatMul"}]),
        (["MatMul"], [{"Mul"}, {"Transpose"}, {"Div"}]),
    ],
)
def test_what_is_left_of_a_product(gone: list[str], left: list[set[str]]) -> None:
    graph = load_graph(build(
        "float[B,4,8,16] q, float[B,4,8,16] k", "float[B,4,8,8] y",
        "s = Mul(k, c) t = Transpose<perm = [0, 1, 3, 2]>(s) m = MatMul(q, t) y = Div(m, c)", "float c = {8.0}",
    ))
    (group,) = runtime_groups(graph)
    units = group.without([node for node in graph.nodes if node.op in gone])
    assert sorted(sorted(node.op for node in unit) for unit in units) == sorted(map(sorted, left))


def test_a_norm_stands_without_the_sum_before_it_and_falls_with_a_step() -> None:
    """Its steps are one LayerNormalization: without the sum they still are, without one of them none is."""
    graph = load_graph(example_model(example_of("ort-skip-layer-norm", "spelled out, through double")))
    (group,) = runtime_groups(graph)
    sums = [node for node in graph.nodes if node.op == "Add" and node not in group.core]
    assert sums and [len(unit) for unit in group.without(sums)] == [len(group.core)]
    step = next(node for node in graph.nodes if node.op == "Sqrt")
    assert {len(unit) for unit in group.without([step])} == {1}
