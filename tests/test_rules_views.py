"""The canonical view, prohibitions, growth, and a user's own kernel."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import onnx
import onnx.parser
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxfuse.errors import RuleError
from onnxfuse.graph.model import Graph
from onnxfuse.operators import load_graph, lowered
from onnxfuse.operators.record import CANONICAL
from onnxfuse.provider.removed import passes_on
from onnxfuse.resources import rules_folder
from onnxfuse.rules import (
    CanonicalGraph,
    FuseRule,
    RuleSet,
    canonicalise,
    check_examples,
    components,
    find_matches,
    load_rules,
    postfix,
    prohibitions,
)
from onnxfuse.rules.operators import CANONICAL_OPERATORS


@cache
def shipped() -> RuleSet:
    return load_rules([rules_folder()])


def graph(text: str, opset: int = 17) -> Graph:
    return load_graph(
        onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}, "com.microsoft" : 1]> {text}')
    )


def check_view(original: Graph, view: CanonicalGraph) -> None:
    """What must hold of every view: it stands for each original node once, but for what only gives its operand back and
    is read through, in topological order, linked both ways."""
    covered = [node for made in view.graph.nodes for node in made.originals]
    passed = {node for made in view.graph.nodes for node in made.passed}
    assert len(set(covered)) == len(covered)
    assert {*covered, *passed} == set(original.nodes)
    assert all(map(passes_on, passed))
    seen = set()
    for index, node in enumerate(view.graph.nodes):
        assert node.index == index
        for value in node.reads():
            assert view.graph.values[value.name] is value
            assert node in value.consumers
            assert value.producer is None or value.producer in seen
        assert all(value is None or value.producer is node for value in node.outputs)
        seen.add(node)
    assert [value.name for value in view.graph.inputs] == [value.name for value in original.inputs]
    assert [value.name for value in view.graph.outputs] == [value.name for value in original.outputs]
    for name, value in view.graph.values.items():
        assert (value.dtype, value.shape) == (original.values[name].dtype, original.values[name].shape)


MISH = """g (float[b, 64] x) => (float[b, 64] y) <float t = {20.0}, float one = {1.0}> {
    e = Exp(x) f = Add(e, one) s = Log(f) h = Tanh(s) z = Mul(x, h) y = Identity(z) }"""


def test_nested_canonical_nodes_keep_the_model_s_nodes() -> None:
    original = graph(MISH)
    before = [(node.op, node.outputs[0].name) for node in original.nodes if node.outputs[0]]
    view = canonicalise(original, shipped().canonical)
    check_view(original, view)
    assert [(node.op, node.rule, len(node.originals)) for node in view.graph.nodes] == [
        ("Mish", "mish", 5), ("Identity", "identity", 1)
    ]
    assert [(node.op, node.outputs[0].name) for node in original.nodes if node.outputs[0]] == before
    assert all(node.originals == (node,) for node in original.nodes)


def test_captured_constants_become_attributes_and_absent_inputs_go() -> None:
    original = graph("""g (float[b, 64] x, float[64] w) => (float[b, 64] y) <float eps = {1e-5}> {
        p = Mul(x, x) v = ReduceMean <axes = [-1]> (p) ve = Add(v, eps) sd = Sqrt(ve) n = Div(x, sd) y = Mul(n, w) }""",
        opset=13)
    (node,) = canonicalise(original, shipped().canonical).graph.nodes
    assert (node.op, node.domain) == ("RMSNormalization", "")
    assert node.attributes == {"axis": -1, "epsilon": pytest.approx(1e-5)}
    assert [value.name for value in node.inputs if value] == ["x", "w"]


def test_an_epsilon_for_each_column_is_no_attribute() -> None:
    view = canonicalise(graph("""g (float[b, 2] x) => (float[b, 2] y) <float[2] eps = {1e-5, 1e-4}> {
        p = Mul(x, x) v = ReduceMean <axes = [-1]> (p) ve = Add(v, eps) sd = Sqrt(ve) y = Div(x, sd) }""", opset=13),
        shipped().canonical)
    assert view.made == ()
    assert [(miss.rule, miss.code) for miss in view.refusals] == [("rms-norm", "not-scalar")]


def test_a_group_that_feeds_itself_from_outside_stays(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("""\
id: pair
kind: canonical
summary: s
why: w
pattern: |
  a = Neg(x)
  y = Abs(a) + z
results: [y, a]
becomes: Sum(x, z)
""")
    view = canonicalise(
        graph("g (float[4] x) => (float[4] y) { a = Neg(x) z = Exp(a) c = Abs(a) y = Add(c, z) }"),
        load_rules([tmp_path / "r.yaml"]).canonical,
    )
    assert view.made == ()
    assert [(miss.code, miss.message) for miss in view.refusals] == [
        ("cycle", "What reads one of its results feeds it as well.")
    ]


def test_without_rules_the_view_is_the_graph() -> None:
    original = graph(MISH)
    view = canonicalise(original, ())
    check_view(original, view)
    assert [node.originals for node in view.graph.nodes] == [(node,) for node in original.nodes]


def test_results_that_nobody_asks_for_stay_left_out() -> None:
    original = graph("""g (float[b, 4] x, float[4] w) => (float[b, 4] y, float[b, 1] deviation) {
        y, , deviation = LayerNormalization(x, w) }""")
    view = canonicalise(original, shipped().canonical)
    check_view(original, view)
    (node,) = view.graph.nodes
    assert [value and value.name for value in node.outputs] == ["y", None, "deviation"] and not node.dead


def test_disabling_a_rule_leaves_its_spelling() -> None:
    rules = load_rules([rules_folder()], disable=["mish"])
    ops = [node.op for node in canonicalise(graph(MISH), rules.canonical).graph.nodes]
    assert ops == ["Softplus", "Tanh", "Mul", "Identity"]


def test_constants_behind_identities_are_constants() -> None:
    """TorchScript shares equal weights among layers through Identity nodes."""
    view = canonicalise(graph("""g (float[b, 4] x) => (float[b, 4] y)
        <float[4] shared = {1.0, 2.0, 3.0, 4.0}, float e = {1e-5}, float two = {2.0}> {
        w = Identity(shared) eps = Identity(e)
        m = ReduceMean <axes = [-1]> (x) d = Sub(x, m) p = Pow(d, two) v = ReduceMean <axes = [-1]> (p)
        ve = Add(v, eps) sd = Sqrt(ve) n = Div(d, sd) y = Mul(n, w) }""", opset=14), shipped().canonical)
    assert "LayerNormalization" in [node.op for node in view.graph.nodes]


UNARY = ["Relu", "Sigmoid", "Tanh", "Exp", "Neg", "Identity", "Softplus", "Erf", "Sqrt", "Reciprocal"]
BINARY = ["Add", "Mul", "Sub", "Div"]


@st.composite
def random_models(draw: st.DrawFn) -> str:
    """A graph of pointwise nodes and row means over three inputs and the constants that the rules look for."""
    values = ["x", "z", "w"]
    constants = ["half", "one", "two", "root"]
    body = []
    for number in range(draw(st.integers(1, 24))):
        recent = st.sampled_from(values[-4:] + values[:1])
        kind = draw(st.sampled_from(["unary", "binary", "binary", "mean"]))
        if kind == "unary":
            text = f"{draw(st.sampled_from(UNARY))}({draw(recent)})"
        elif kind == "mean":
            text = f"ReduceMean <axes = [-1]> ({draw(recent)})"
        else:
            pair = [draw(recent), draw(st.one_of(recent, st.sampled_from(constants)))]
            text = f"{draw(st.sampled_from(BINARY))}({', '.join(draw(st.permutations(pair)))})"
        values.append(f"v{number}")
        body.append(f"v{number} = {text}")
    outputs = draw(st.lists(st.sampled_from(values[3:]), min_size=1, max_size=3, unique=True))
    shown = ", ".join(f"float[?, ?] {name}" for name in dict.fromkeys([*outputs, values[-1]]))
    return (
        f"g (float[b, 8] x, float[b, 8] z, float[8] w) => ({shown}) "
        f"<float half = {{0.5}}, float one = {{1.0}}, float two = {{2.0}}, float root = {{0.70710678}}> "
        f"{{ {' '.join(body)} }}"
    )


@settings(max_examples=150, deadline=None)
@given(random_models())
def test_views_and_matches_of_random_graphs_hold_together(text: str) -> None:
    original = graph(text, opset=13)
    view = canonicalise(original, shipped().canonical)
    check_view(original, view)
    matches, _ = find_matches(view.graph, shipped())
    for found in matches:
        members = set(found.nodes)
        results = set(found.results)
        for node in found.nodes:
            for value in node.outputs:
                if value is not None and value not in results:
                    assert not value.is_output
                    assert members.issuperset(value.consumers)


# -- forbid -------------------------------------------------------------------------------------------------------

SCALED = """g (float[b, 8, 16] q, float[b, 8, 16] k) => (float[b, 8, 8] y) <float c = {0.25}> {
    r = Relu(q) s = Mul(r, c) t = Transpose <perm = [0, 2, 1]> (k) m = MatMul(s, t) y = Tanh(m) }"""


def test_what_the_runtime_folds_is_left_to_it() -> None:
    searched = graph(SCALED)
    relu, scale, transpose, product, tanh = searched.nodes
    said = prohibitions(searched, shipped())
    refusal = said.refuses([scale])
    assert refusal is not None
    assert (refusal.code, refusal.rule, refusal.message, refusal.remedy) == (
        "runtime-matmul-scale", "runtime-matmul-scale",
        "The runtime folds this factor into the matrix product that reads it, where it costs nothing.",
        "Disable the rule runtime-matmul-scale to join them all the same.",
    )
    assert said.refuses([transpose]) is not None
    assert said.refuses([relu]) is None
    assert said.refuses([tanh]) is None
    # a region that holds the product as well takes nothing from the runtime
    assert said.refuses([scale, transpose, product]) is None
    # and one that makes what is scaled scales it for nothing
    assert said.refuses([relu, scale]) is None
    refusal = said.refuses([relu, scale, transpose])
    assert refusal is not None and refusal.code == "runtime-matmul-transpose"


def test_an_input_is_made_by_no_region() -> None:
    searched = graph("""g (float[b, 8, 16] q, float[b, 16, 8] k) => (float[b, 8, 8] y, float[b, 8, 16] z)
        <float c = {0.25}> { z = Relu(q) s = Mul(q, c) y = MatMul(s, k) }""")
    scale, _, relu = searched.nodes  # as graph.sequence puts them
    refusal = prohibitions(searched, shipped()).refuses([relu, scale])
    assert refusal is not None and refusal.code == "runtime-matmul-scale"


def test_an_edge_is_refused_through_members_only() -> None:
    searched = graph("""g (float[b, 3, 8, 8] x, float[4, 3, 1, 1] w, float[b, 4, 8, 8] z) => (float[b, 4, 8, 8] y) {
        c = Conv(x, w) a = Add(c, z) y = Softmax <axis = -1> (a) }""")
    conv, add, softmax = searched.nodes
    said = prohibitions(searched, shipped())
    assert said.refuses([conv, add]) is None
    assert said.refuses([add, softmax]) is None
    refusal = said.refuses([conv, add, softmax])
    assert refusal is not None and refusal.code == "conv-softmax"


def test_a_forbidden_pattern_holds_all_of_its_nodes(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("""\
id: no-exp-log
kind: forbid
summary: s
why: w
reason: They cancel badly.
pattern: y = Log(Exp(x))
""")
    searched = graph("g (float[4] x) => (float[4] y, float[4] e) { e = Exp(x) y = Log(e) }")
    said = prohibitions(searched, load_rules([tmp_path / "r.yaml"]))
    refusal = said.refuses(searched.nodes)
    assert refusal is not None and refusal.message == "They cancel badly."
    assert said.refuses(searched.nodes[:1]) is None


# -- grow ---------------------------------------------------------------------------------------------------------


def test_groups_that_a_grow_rule_joins() -> None:
    searched = graph("""g (float[b, 8] x, float[8, 8] w) => (float[b, 8] y) {
        a = Exp(x) c = Tanh(a) m = MatMul(c, w) n = Neg(m) y = Add(n, x) }""")
    by_id = {rule.id: rule for rule in shipped().grow}
    found, refusals = components(by_id["grow-pointwise"], searched)
    assert [[node.op for node in group.nodes] for group in found] == [["Exp", "Tanh"], ["Neg", "Add"]]
    assert {refusal.message for refusal in refusals} == {"MatMul is none of the operators that grow-pointwise joins."}


def test_over_sixty_operators_are_pointwise() -> None:
    (rule,) = (rule for rule in shipped().grow if rule.id == "grow-pointwise")
    standard = {op for domain, op in rule.operators if domain == ""}
    assert len(standard) > 60
    assert {"Add", "Where", "Cast", "IsNaN", "Greater", "Gelu", "Erf"} <= standard
    assert {"BiasGelu", "QuickGelu", "FastGelu", "Gelu"} <= {op for d, op in rule.operators if d == "com.microsoft"}


def test_what_canonical_rules_make_can_be_fused() -> None:
    """Each operator of the view has a lowering and a class that rules grow over: a spelling that is recognised must not
    be worse off than its nodes."""
    for op in CANONICAL_OPERATORS:
        assert (CANONICAL, op) in lowered()
        assert any((CANONICAL, op) in rule.operators for rule in shipped().grow)


# -- a user's own kernel ------------------------------------------------------------------------------------------

KERNEL_RULE = """\
id: own-kernel
kind: fuse
summary: s
why: w
pattern: y = Relu(x + bias)
kernel:
  file: k.cu
  entry: bias_relu
  inputs: [x, bias]
  outputs: [y]
  arguments: [{i64: size(x)}, {i32: "dim(x, -1)"}]
  grid: "ceil(size(x), 256 * 4)"
  block: 256
"""

KERNEL = """\
extern "C" __global__ void bias_relu(const float* x, const float* bias, float* y, long long count, int columns) {}
"""


def test_a_kernel_s_launch_sizes_become_the_plan_s_notation(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(KERNEL_RULE)
    (tmp_path / "k.cu").write_text(KERNEL)
    (rule,) = load_rules([tmp_path / "r.yaml"]).fuse
    assert isinstance(rule, FuseRule) and rule.kernel is not None
    kernel = rule.kernel

    def atom(name: str, axis: int | None) -> str:
        return f"{name}.{'n' if axis is None else axis}"

    assert [postfix(size, atom) for size in kernel.grid] == ["x.n 256 4 * ceil", "1", "1"]
    assert [postfix(size, atom) for size in kernel.block] == ["256", "1", "1"]
    assert [(kind, postfix(size, atom)) for kind, size in kernel.arguments] == [("i64", "x.n"), ("i32", "x.-1")]
    assert postfix(kernel.shared, atom) == "0"
    assert (kernel.entry, kernel.inputs, kernel.outputs) == ("bias_relu", ("x", "bias"), ("y",))
    assert "bias_relu" in kernel.source


@pytest.mark.parametrize(("old", "new", "message"), [
    ("file: k.cu", "file: q.cu", """\
There is no file q.cu beside the rule file.
--> r.yaml:7:9
  |
7 |   file: q.cu
  |         ^^^^
help: Check the name."""),
    ("bias_relu", "bias_rleu", """\
k.cu has no function bias_rleu.
--> r.yaml:8:10
  |
8 |   entry: bias_rleu
  |          ^^^^^^^^^
help: Declare extern "C" __global__ void bias_rleu(...) in it, with a pointer for each input and output, in this \
order, and then the arguments."""),
    ("inputs: [x, bias]", "inputs: [x, bais]", """\
bais is none of the pattern's inputs.
--> r.yaml:9:15
  |
9 |   inputs: [x, bais]
  |               ^^^^
help: Did you mean bias?"""),
    ("ceil(size(x), 256 * 4)", "ceil(size(z), 256)", """\
size(...) asks about one of the kernel's inputs and outputs.
--> r.yaml:12:20
   |
12 |   grid: "ceil(size(z), 256)"
   |                    ^
help: They are bias, x, y."""),
    ("ceil(size(x), 256 * 4)", "cel(size(x), 256)", """\
Unknown function cel in a launch size.
--> r.yaml:12:10
   |
12 |   grid: "cel(size(x), 256)"
   |          ^^^
help: Did you mean ceil?"""),
    ("outputs: [y]", "outputs: []", """\
The kernel does not write the result y.
--> r.yaml:10:12
   |
10 |   outputs: []
   |            ^^
help: Add y to its outputs."""),
])
def test_what_is_wrong_with_a_kernel(tmp_path: Path, old: str, new: str, message: str) -> None:
    (tmp_path / "r.yaml").write_text(KERNEL_RULE.replace(old, new))
    (tmp_path / "k.cu").write_text(KERNEL)
    with pytest.raises(RuleError) as raised:
        load_rules([tmp_path / "r.yaml"])
    assert str(raised.value).replace(f"{tmp_path}/", "") == message


def test_what_an_example_holds(tmp_path: Path) -> None:
    onnx.save(
        onnx.parser.parse_model(
            '<ir_version: 8, opset_import: ["" : 17]> g (float[b] x) => (float[b] y) { y = Relu(x) }'
        ),
        tmp_path / "relu.onnx",
    )
    (tmp_path / "r.yaml").write_text("""\
id: relu
kind: fuse
summary: s
why: w
pattern: y = Relu(x)
examples:
  - {name: from a file, file: relu.onnx, expect: matched, dims: {b: 4}, inputs: {x: [-1, 1.5]}}
  - name: refused
    expect: {refused: operator}
    model: |
      g (float[b] x) => (float[b] y) { y = Abs(x) }
""")
    rules = load_rules([tmp_path / "r.yaml"])
    first, second = rules.by_id["relu"].examples
    assert (first.file, first.refused, first.dims, first.inputs) == (
        tmp_path / "relu.onnx", None, {"b": 4}, {"x": (-1.0, 1.5)}
    )
    assert second.place.line == 8
    assert [outcome.fault for outcome in check_examples(rules)] == [
        None, "It was refused with nothing; expected operator."
    ]
