"""Layers that are alike are lowered once, and get what they get by themselves."""

from __future__ import annotations

import pytest
from kernel_harness import parse

from onnxfuse.graph.model import Graph, Node, Value
from onnxfuse.lowering.alike import Lowerings
from onnxfuse.lowering.lower import Lowered, lower
from onnxfuse.operators.inference import load_graph
from onnxfuse.refusal import Refusal

ALIKE = {
    "layers": ("g (float[N,8] x, float[N,8] z) => (float[N,8] y, float[N,8] w) "
               "{ a = Mul(x, z) y = Exp(a) b = Mul(z, x) w = Exp(b) }"),
    "weights": ("g (float16[N,16] x) => (float16[N,16] y, float16[N,16] w) "
                f"<float16[16] p = {{{', '.join(map(str, range(16)))}}}, float16[16] q = {{{', '.join('2' * 16)}}}> "
                "{ a = Add(x, p) y = Relu(a) b = Add(x, q) w = Relu(b) }"),
    "targets": ("g (float[N,8] x, float[N,8] z) => (float[N,2,4] y, float[N,2,4] w) "
                "<int64[3] s = {0, 2, 4}, int64[3] t = {0, 2, 4}> "
                "{ a = Exp(x) y = Reshape(a, s) b = Exp(z) w = Reshape(b, t) }"),
}
"""Models of two layers that are alike."""

OTHERS = {
    "one operand twice": ("g (float[N,8] x, float[N,8] z) => (float[N,8] y, float[N,8] w) "
                          "{ a = Mul(x, z) y = Exp(a) b = Mul(x, x) w = Exp(b) }"),
    "order of operands": ("g (float[N,8] x, float[N,8] z) => (float[N,8] y, float[N,8] w) "
                          "{ a = Exp(x) y = Sub(a, z) b = Exp(x) w = Sub(z, b) }"),
    "number": ("g (float[N,8] x) => (float[N,8] y, float[N,8] w) <float p = {2}, float q = {3}> "
               "{ a = Mul(x, p) y = Exp(a) b = Mul(x, q) w = Exp(b) }"),
    "zero's sign": ("g (float[N,8] x) => (float[N,8] y, float[N,8] w) <float p = {0}, float q = {-0.0}> "
                    "{ a = Max(x, p) y = Exp(a) b = Max(x, q) w = Exp(b) }"),
    "weights that change nothing": (
        "g (float16[N,16,9] x) => (float16[N,16,9] y, float16[N,16,9] w) "
        f"<float16[16] p = {{{', '.join('1' * 16)}}}, float16[16] q = {{{', '.join('2' * 16)}}}, "
        f"float16[16] z = {{{', '.join('0' * 16)}}}> "
        "{ a = InstanceNormalization(x, p, z) y = Relu(a) b = InstanceNormalization(x, q, z) w = Relu(b) }"),
    "attribute": ("g (float[N,8] x) => (float[N,8] y, float[N,8] w) "
                  "{ a = Elu<alpha: float = 0.5>(x) y = Exp(a) b = Elu<alpha: float = 0.25>(x) w = Exp(b) }"),
    "operator": ("g (float[N,8] x) => (float[N,8] y, float[N,8] w) "
                 "{ a = Sin(x) y = Exp(a) b = Cos(x) w = Exp(b) }"),
    "size": ("g (float[N,8] x, float[M,8] z) => (float[N,8] y, float[M,8] w) "
             "{ a = Mul(x, x) y = Exp(a) b = Mul(z, z) w = Exp(b) }"),
    "type": ("g (float[N,8] x, float16[N,8] z) => (float[N,8] y, float16[N,8] w) "
             "{ a = Mul(x, x) y = Exp(a) b = Mul(z, z) w = Exp(b) }"),
    "target": ("g (float[N,8] x) => (float[N,2,4] y, float[N,4,2] w) <int64[3] s = {0, 2, 4}, int64[3] t = {0, 4, 2}> "
               "{ a = Exp(x) y = Reshape(a, s) b = Exp(x) w = Reshape(b, t) }"),
    "places": ("g (float[4,8] x, float[2,8] u) => (float[4,8] y, float[4,8] w) "
               "<int64[2,1] s = {0, 2}, int64[2,1] t = {1, 3}> "
               "{ a = Exp(x) y = ScatterND(a, s, u) b = Exp(x) w = ScatterND(b, t, u) }"),
    "places that are repeated": (
        "g (float[4,4096] x, float[2,4096] u) => (float[4,4096] y, float[4,4096] w) "
        "<int64[2,1] s = {0, 2}, int64[2,1] t = {1, 3}, int64[2] to = {2, 4096}> "
        "{ p = Expand(s, to) q = Expand(t, to) a = Exp(x) y = ScatterElements<axis = 0>(a, p, u) b = Exp(x) "
        "w = ScatterElements<axis = 0>(b, q, u) }"),
    "places that are counted": (
        "g (float[4,N] x, float[1,N] u) => (float[4,N] y, float[4,N] w) "
        "<int64[1,1] s = {0}, int64[1,1] t = {2}, int64 o = {0}, int64 one = {1}, int64[1] last = {-1}> "
        "{ to = Shape(u) n = Gather(to, one) r = Range(o, n, one) d = Expand(r, to) j = Unsqueeze(d, last) "
        "e = Expand(s, to) f = Expand(t, to) h = Unsqueeze(e, last) k = Unsqueeze(f, last) "
        "p = Concat<axis = -1>(h, j) q = Concat<axis = -1>(k, j) a = Exp(x) y = ScatterND(a, p, u) b = Exp(x) "
        "w = ScatterND(b, q, u) }"),
    "scales": ("g (float[1,2,8] x) => (float[1,2,16] y, float[1,2,24] w) "
               "<float[3] s = {1, 1, 2}, float[3] t = {1, 1, 3}> "
               '{ a = Exp(x) y = Resize<mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode '
               '= "floor">(a, , s) b = Exp(x) w = Resize<mode = "nearest", coordinate_transformation_mode = '
               '"asymmetric", nearest_mode = "floor">(b, , t) }'),
}
"""Models of two layers of which one thing differs."""


def halves(text: str) -> tuple[Graph, list[list[Node]]]:
    """A model's graph, and the nodes that each of its outputs is computed from; of indices the last one alone."""
    graph = load_graph(parse(text))
    found = []
    for output in graph.outputs:
        last = output.producer
        assert last is not None
        found.append([node for node in graph.nodes if node is last or (
            node.op != "Expand" and any(value in last.inputs for value in node.outputs))])
    return graph, found


def written(nodes: list[Node]) -> list[Value]:
    return [value for value in nodes[-1].outputs if value is not None]


def names(lowered: Lowered) -> list[list[str]]:
    """What it is made of, by name."""
    return [[value.name for value in values] for values in (lowered.tensors, lowered.sized, lowered.inlined)]


@pytest.mark.parametrize("name", [*ALIKE, *OTHERS])
def test_a_layer_is_what_it_is_by_itself(name: str) -> None:
    """Whichever was lowered before it."""
    graph, layers = halves((ALIKE | OTHERS)[name])
    for order in (layers, layers[::-1]):
        known = Lowerings()
        found = [known.lower(nodes, written(nodes), graph) for nodes in order]
        for nodes, lowered in zip(order, found, strict=True):
            alone = lower(nodes, written(nodes), graph)
            assert isinstance(alone, Lowered) and isinstance(lowered, Lowered), (alone, lowered)
            assert lowered.structure == alone.structure
            assert names(lowered) == names(alone)
        assert (found[0].program is found[1].program) == (name in ALIKE)


def test_results_that_are_used_tell_regions_apart() -> None:
    graph = load_graph(parse("g (float[N,8] x) => (float[N,8] a, float[N,8] y) { a = Neg(x) y = Exp(a) }"))
    known, (first, last) = Lowerings(), (graph.values[name] for name in ("a", "y"))
    found = [known.lower(graph.nodes, outputs, graph) for outputs in ([last], [first, last], [last, first])]
    assert [len(each.program.outputs) for each in found if isinstance(each, Lowered)] == [1, 2, 2]
    assert len({each.structure for each in found if isinstance(each, Lowered)}) == 3


def test_refusals_name_the_layer_that_is_refused() -> None:
    graph, layers = halves("g (float[N,8] x, int64[1] k, int64[1] l) => (float[N,M] y, float[N,L] w) "
                           "<int64[1] one = {1}> { y = Tile(x, k) w = Tile(x, l) }")
    known = Lowerings()
    found = [known.lower(nodes, written(nodes), graph) for nodes in layers]
    assert [isinstance(each, Refusal) and each.node for each in found] == ["Tile -> y", "Tile -> w"]
