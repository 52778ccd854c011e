"""Convexity, contraction, boundaries and refusals; random graphs are judged by sorting their quotient."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_session import session
from reachability import Reachability

from onnxfuse.graph import Graph
from onnxfuse.graph.model import Node, Value
from onnxfuse.operators import load_graph
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.legality import (
    Contraction,
    boundary,
    check_host_inputs,
    check_nodes,
    escapes,
    is_convex,
)
from onnxfuse.refusal import Refusal


def graph(inputs: str, outputs: str, body: str, constants: str = "") -> Graph:
    held = f"<{constants}>" if constants else ""
    return load_graph(onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> g ({inputs}) => ({outputs}) {held} {{ {body} }}'
    ))


DIAMOND = graph("float[4] x", "float[4] y", "a = Relu(x) b = Neg(a) c = Exp(a) y = Add(b, c)")


def pick(loaded: Graph, *outputs: str) -> list[Node]:
    found = [loaded.values[name].producer for name in outputs]
    return [node for node in found if node is not None]


def test_a_path_around_is_named() -> None:
    refusal = is_convex(pick(DIAMOND, "a", "b", "y"))
    assert refusal == Refusal(
        code="not-convex",
        message="fusing would make a cycle: Exp -> c (Exp) stays outside and lies on the path Relu -> a -> Exp -> c -> "
        "Add -> y",
        node="Exp -> c",
        remedy="include Exp -> c in the region, or leave Add -> y out",
    )
    assert Contraction(DIAMOND).check(pick(DIAMOND, "a", "b", "y")) == refusal


@pytest.mark.parametrize(("length", "names"), [
    (4, ["v0", "v1", "v2", "v3"]), (6, ["v0", "v1", "v2", "v3", "v4", "v5"]),
    (7, ["v0", "v1", "v2", "...", "v5", "v6"]), (9, ["v0", "v1", "v2", "...", "v7", "v8"]),
])
def test_a_long_path_around_is_named(length: int, names: list[str]) -> None:
    """Nodes far outside are found as well, and of many the first and the last are named."""
    body = " ".join(f"v{place} = Neg({f'v{place - 1}' if place else 'x'})" for place in range(length))
    loaded = graph("float[4] x", f"float[4] v{length - 1}", body)
    ends = [loaded.nodes[0], loaded.nodes[-1]]
    refusal = is_convex(ends)
    assert refusal is not None and refusal.message.endswith(
        "on the path " + " -> ".join(name if name == "..." else f"Neg -> {name}" for name in names))
    reachability, contraction = Reachability(loaded), Contraction(loaded)
    assert contraction.check(ends) == refusal
    assert reachability.between(ends) == tuple(loaded.nodes[1:-1])
    assert is_convex(ends[:1]) is None and reachability.between(ends[:1]) == ()


@pytest.mark.parametrize("members", [(), ("a",), ("a", "b"), ("b", "c"), ("a", "b", "c", "y"), ("b", "y")])
def test_convex_sets(members: tuple[str, ...]) -> None:
    nodes = pick(DIAMOND, *members)
    assert is_convex(nodes) is None
    assert Reachability(DIAMOND).between(nodes) == ()
    assert Contraction(DIAMOND).contract(nodes) is None


def test_boundary_in_order_of_use() -> None:
    loaded = graph(
        "float[4] x, float[4] z", "float[4] y, float[4] b",
        "a = Mul(z, k) b = Add(x, a) c = Neg(b) d = Exp(c) y = Add(d, z)", "float k = {2.0}",
    )
    edge = boundary(pick(loaded, "b", "a", "c"))
    assert [value.name for value in edge.inputs] == ["z", "k", "x"]
    assert [value.name for value in edge.outputs] == ["b", "c"]
    assert [value.name for value in edge.inner] == ["a"]


def test_reachability() -> None:
    found = Reachability(DIAMOND)
    a, b, c, y = pick(DIAMOND, "a", "b", "c", "y")
    assert found.reaches(a, y)
    assert not found.reaches(y, a)
    assert not found.reaches(b, c)
    assert found.between([a, y]) == (b, c)


CAPTURED = graph(
    "bool k, float[4] x", "float[4] y, float[4] p",
    "a = Relu(x) p = Neg(a) b = Exp(x) c = Abs(b) d = Sqrt(c) "
    "y = If (k) <then_branch = t () => (float[4] u) { u = Add(d, x) }, "
    "else_branch = e () => (float[4] v) { v = Neg(x) }>",
)


def test_inner_values_that_escape() -> None:
    nodes = pick(CAPTURED, "a", "p", "c", "d")
    values = CAPTURED.values
    assert escapes([values["a"]], nodes) is None
    assert escapes([values["p"]], nodes) == Refusal(
        "inner-value-is-output", "p is an output of the graph", node="Neg -> p"
    )
    assert escapes([values["d"]], nodes) == Refusal(
        "inner-value-captured", "d is captured by a subgraph of If -> y", node="Sqrt -> d"
    )
    assert escapes([values["b"]], nodes[:1]) == Refusal(
        "inner-value-used-outside", "b is also read by Abs -> c (Abs)", node="Exp -> b"
    )


def test_nodes_that_fuse_with_nothing() -> None:
    assert check_nodes(pick(CAPTURED, "a", "p"), 17) is None
    assert check_nodes(pick(CAPTURED, "a", "y"), 17) == Refusal(
        "subgraph", "If -> y (If) holds a subgraph", node="If -> y"
    )
    loaded = graph("float[4] x", "float[4] y", "r = RandomNormalLike(x) y = Add(x, r)")
    assert check_nodes(loaded.nodes, 17) == Refusal(
        "non-deterministic", "RandomNormalLike -> r (RandomNormalLike) draws random numbers",
        node="RandomNormalLike -> r",
    )
    loaded = graph("float[1,4,2] x, float[4] w", "float[1,4,2] y, float[4] m, float[4] v",
                   "y, m, v = BatchNormalization<training_mode = 1>(x, w, w, w, w)")
    assert check_nodes(loaded.nodes, 17) == Refusal(
        "non-deterministic", "BatchNormalization -> y (BatchNormalization) works as in training",
        node="BatchNormalization -> y",
    )


HOST = graph(
    "float[B,4] x, float[1] g, float16[1] half", "float[B,4] y, float[B,4] z",
    "s = Shape(x) f = Cast<to=1>(s) r = Relu(x) y = Add(r, x) n = Neg(x) z = Add(n, x) b = Cast<to=10>(s)",
    "float[2] small = {1.0, 2.0}",
)


def test_operators_that_the_standard_gets_later() -> None:
    """ONNX Runtime takes a LayerNormalization at opset 13, and ends with a fault where a function holds one."""
    text = "g (float[2, 8] x, float[8] w) => (float[2, 8] y) { a = Relu(x) b = Tanh(a) y = LayerNormalization(b, w) }"
    refusal = Refusal(
        "not-standard", "LayerNormalization is no operator of opset 13", "LayerNormalization -> y",
        remedy="raise the model's opset to one that has the operator",
    )
    for opset, operators in ((13, ["Relu", "Tanh"]), (17, ["Relu", "Tanh", "LayerNormalization"])):
        model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> {text}')
        made = optimise(model, Options(verify=False, least_gain=0.0, database=False))
        assert [[node.op for node in fusion.nodes] for fusion in made.plan.fusions] == [operators]
        assert (refusal in made.refusals) == (opset == 13)
        assert session(made.model) is not None


def values(loaded: Graph, *names: str) -> list[Value]:
    return [loaded.values[name] for name in names]


def test_inputs_in_host_memory() -> None:
    refused = Refusal(
        "host-inputs", "its inputs live in host memory (f): ONNX Runtime would run it on the CPU", node="Fused",
        remedy="include a node that reads a tensor in device memory",
    )
    assert check_host_inputs(values(HOST, "f"), HOST, "Fused") == refused
    assert check_host_inputs(values(HOST, "x", "f", "small"), HOST, "Fused") == refused
    # One tensor of a CUDA node, or a float16 one, and it stays on the GPU; so do graph inputs alone.
    assert check_host_inputs(values(HOST, "f", "r"), HOST) is None
    assert check_host_inputs(values(HOST, "f", "half"), HOST) is None
    assert check_host_inputs(values(HOST, "x", "g"), HOST) is None


def test_a_region_contracted_before_closes_a_cycle() -> None:
    loaded = graph("float[4] x, float[4] z", "float[4] p, float[4] q", "a = Relu(x) b = Neg(z) p = Exp(b) q = Abs(a)")
    contraction = Contraction(loaded)
    assert contraction.contract(pick(loaded, "a", "p")) is None
    refusal = contraction.contract(pick(loaded, "b", "q"))
    assert refusal == Refusal(
        "cycle-with-region",
        "fusing would make a cycle with the region of Exp -> p, which reads from this one and is read by it",
        node="Abs -> q",
        remedy="leave out the nodes on one side of that region",
    )
    assert contraction.contract(pick(loaded, "p", "q")) == Refusal(
        "already-fused", "Exp -> p is part of another region", node="Exp -> p"
    )
    contraction.release(pick(loaded, "a", "p"))
    assert contraction.contract(pick(loaded, "b", "q")) is None
    with pytest.raises(KeyError, match="not contracted together"):
        contraction.release(pick(loaded, "a", "p"))


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Graph, list[list[Node]]]:
    """A random graph of one- and two-operand nodes, and random sets of its nodes."""
    count = draw(st.integers(2, 14))
    names = ["x", "z"]
    body = []
    for place in range(count):
        first = draw(st.sampled_from(names[-6:]))
        second = draw(st.sampled_from(names[-6:]))
        body.append(f"v{place} = Add({first}, {second})" if draw(st.booleans()) else f"v{place} = Neg({first})")
        names.append(f"v{place}")
    loaded = graph("float[4] x, float[4] z", f"float[4] v{count - 1}", " ".join(body))
    chosen = [
        [loaded.nodes[place] for place in draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=5))]
        for _ in range(draw(st.integers(1, 5)))
    ]
    return loaded, chosen


def acyclic(loaded: Graph, groups: list[list[Node]]) -> bool:
    """Whether the graph with these groups contracted has no cycle."""
    unit = {node: node.index for node in loaded.nodes}
    for group in groups:
        unit |= dict.fromkeys(group, min(node.index for node in group))
    found: TopologicalSorter[int] = TopologicalSorter()
    for node in loaded.nodes:
        for value in node.reads():
            if value.producer is not None and unit[value.producer] != unit[node]:
                found.add(unit[node], unit[value.producer])
    try:
        found.prepare()
    except CycleError:
        return False
    return True


@settings(max_examples=150, deadline=None)
@given(graphs())
def test_random_sets_of_random_graphs(case: tuple[Graph, list[list[Node]]]) -> None:
    loaded, chosen = case
    reachability, contraction = Reachability(loaded), Contraction(loaded)
    accepted: list[list[Node]] = []
    for nodes in chosen:
        alone = acyclic(loaded, [nodes])
        assert (is_convex(nodes) is None) == alone
        assert (not reachability.between(nodes)) == alone
        overlaps = any(set(nodes) & set(other) for other in accepted)
        fits = not overlaps and acyclic(loaded, [*accepted, nodes])
        assert (contraction.contract(nodes) is None) == fits
        if fits:
            accepted.append(nodes)
        if len(accepted) == 3:
            contraction.release(accepted.pop(0))
    order = contraction.order()
    assert sorted(node.index for unit in order for node in unit) == list(range(len(loaded.nodes)))
    assert {frozenset(unit) for unit in order if len(unit) > 1} == {frozenset(a) for a in accepted if len(a) > 1}
    place = {node: number for number, unit in enumerate(order) for node in unit}
    for node in loaded.nodes:
        for value in node.reads():
            if value.producer is not None and place[value.producer] != place[node]:
                assert place[value.producer] < place[node]
