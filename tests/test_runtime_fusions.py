"""What ONNX Runtime fuses itself: each prediction is held against what a session on the CPU makes of the same model."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest
from insertions import INSERTIONS, STAY_BESIDE_INPUTS, STAY_FOR_FUSIONS, insert, reads_of

from onnxfuse.graph import Graph
from onnxfuse.graph.model import Node
from onnxfuse.operators import load_graph
from onnxfuse.planning.cost import CostModel
from onnxfuse.planning.hardware import find_profile
from onnxfuse.planning.runtime_fusions import runtime_groups
from onnxfuse.planning.traffic import Ledger

X, Y = "float[B,S,4] x", "float[B,S,4] y"
XZ = f"{X}, float[B,S,4] z"
LEFT, RIGHT = "float[B,S,4] x, float[B,U,4] z", "float[B,S,4] x, float[B,4,U] z"
SCORES = "float[B,S,U] y"
NUMBERS = (
    "float half = {0.5}, float one = {1.0}, float two = {2.0}, float three = {3.0}, float root = {1.4142135}, "
    "float c = {0.044715}, float p = {0.7978846}, float eps = {1e-5}, double twod = {2.0}, double epsd = {1e-12}"
)
VECTORS = "float[4] b = {0.5, 0.5, 0.5, 0.5}, float[4] g = {0.5, 0.5, 0.5, 0.5}"
ALL = f"{NUMBERS}, {VECTORS}"
WEIGHTS = "float[4,4] w = {" + ", ".join(["0.25"] * 16) + f"}}, {VECTORS}"
KERNEL = f"float[4,1,1,1] k = {{1.0, 2.0, 3.0, 4.0}}, float[1,4,1,1] q = {{1.0, 2.0, 3.0, 4.0}}, {VECTORS}"
IMAGE, MAPS = "float[B,1,8,8] x", "float[B,4,8,8] y"

ERF = "d = Div(x, root) e = Erf(d) a = Add(e, one)"
TANH = "u = Mul(s, p) t = Tanh(u) a = Add(t, one) h = Mul(x, half) r = Mul(h, a) y = Relu(r)"
VARIANCE = "q = Pow(d, two) v = ReduceMean<axes = [-1]>(q) s0 = Add(v, eps) s = Sqrt(s0) n = Div(d, s)"
PLAIN = f"m = ReduceMean<axes = [-1]>(x) d = Sub(x, m) {VARIANCE}"
NORM = f"{PLAIN} w = Mul(n, g) y = Add(w, b)"
CASTS = (
    "m = ReduceMean<axes = [-1]>(x) d0 = Sub(x, m) d = Cast<to = 11>(d0) q = Pow(d, twod) "
    "v = ReduceMean<axes = [-1]>(q) s0 = Add(v, epsd) s = Sqrt(s0) n0 = Div(d, s) n = Cast<to = 1>(n0) w = Mul(g, n) "
    "y = Add(w, b)"
)
MEAN_SQUARE = "q = Pow(x, two) v = ReduceMean<axes = [-1]>(q) s0 = Add(v, eps) s = Sqrt(s0)"

CASES: dict[str, tuple[str, str, str, str, str]] = {
    # name: (the operator that the runtime makes, or "" where it makes none; inputs; outputs; body; constants)
    "gelu, half last": ("Gelu", X, Y, f"{ERF} m = Mul(x, a) y = Mul(m, half)", NUMBERS),
    "gelu, half first": ("Gelu", X, Y, f"h = Mul(x, half) {ERF} y = Mul(h, a)", NUMBERS),
    "gelu, operands swapped": (
        "Gelu", X, Y, "d = Div(x, root) e = Erf(d) a = Add(one, e) m = Mul(a, x) y = Mul(half, m)", NUMBERS,
    ),
    "gelu of a sum": (
        "BiasGelu", "float[B,S,4] i", Y, f"x = Add(i, b) {ERF} m = Mul(x, a) y = Mul(m, half)", ALL,
    ),
    "fast gelu, power": ("FastGelu", X, Y, f"q = Pow(x, three) k = Mul(c, q) s = Add(x, k) {TANH}", NUMBERS),
    "fast gelu, products": (
        "FastGelu", X, Y,
        "m = Mul(x, p) k = Mul(x, c) q = Mul(x, k) s = Add(q, one) u = Mul(m, s) t = Tanh(u) a = Add(t, one) "
        "h = Mul(x, half) r = Mul(h, a) y = Relu(r)", NUMBERS,
    ),
    "fast gelu, half last": (
        "", X, Y, "q = Pow(x, three) k = Mul(q, c) s = Add(x, k) u = Mul(s, p) t = Tanh(u) a = Add(t, one) "
        "h = Mul(x, a) r = Mul(h, half) y = Relu(r)", NUMBERS,
    ),
    "fast gelu, a graph output": (
        "", X, Y, "q = Pow(x, three) k = Mul(q, c) s = Add(x, k) u = Mul(s, p) t = Tanh(u) a = Add(t, one) "
        "h = Mul(x, half) y = Mul(h, a)", NUMBERS,
    ),
    "product and a bias by row": (
        "Gemm", "float[3,4] x, float[3,4] z", "float[3,4] y", "m = MatMul(x, w) y = Add(m, z)", WEIGHTS,
    ),
    "convolution and a factor by row": (
        "", IMAGE, MAPS, "c = Conv(x, k) y = Mul(c, e)", f"{KERNEL}, float[1,1,8,1] e = {{{', '.join(['2.0'] * 8)}}}",
    ),
    "swish": ("QuickGelu", X, Y, "s = Sigmoid(x) y = Mul(x, s)", ""),
    "quick gelu": ("QuickGelu", X, Y, "q = Mul(x, two) s = Sigmoid(q) y = Mul(x, s)", NUMBERS),
    "layer norm": ("LayerNormalization", X, Y, NORM, ALL),
    "layer norm, two differences": (
        "LayerNormalization", X, Y, NORM.replace("q = Pow(d", "d2 = Sub(x, m) q = Pow(d2"), ALL,
    ),
    "layer norm, through double": ("LayerNormalization", X, Y, CASTS, ALL),
    "layer norm, computed vectors": (
        "LayerNormalization", f"{X}, float[4] i", Y, f"j = Abs(i) {PLAIN} w = Mul(n, j) k = Neg(i) y = Add(w, k)", ALL,
    ),
    "layer norm, vectors of two lengths": (
        "SimplifiedLayerNormalization", X, Y, f"{PLAIN} w = Mul(n, l) y = Add(w, b)", f"{ALL}, float[1] l = {{2.0}}",
    ),
    "layer norm, no scale and no bias": ("", X, Y, f"{PLAIN} y = Relu(n)", ALL),
    "layer norm, no scale": ("", X, Y, f"{PLAIN} y = Add(n, b)", ALL),
    "layer norm, no bias": ("SimplifiedLayerNormalization", X, Y, f"{PLAIN} y = Mul(n, g)", ALL),
    "layer norm, modulated by the image": (
        "", f"{X}, float[B,1,4] j, float[B,1,4] k", Y, f"{PLAIN} w = Mul(n, j) y = Add(w, k)", ALL,
    ),
    "layer norm, scale and bias of three axes": (
        "", X, Y, f"{PLAIN} w = Mul(n, l) y = Add(w, l)", f"{ALL}, float[1,1,4] l = {{1.0, 2.0, 3.0, 4.0}}",
    ),
    "sum and layer norm, no scale": ("", XZ, Y, "i = Add(x, z) " + PLAIN.replace("(x", "(i") + " y = Relu(n)", ALL),
    "layer norm, square as a product": ("", X, Y, NORM.replace("Pow(d, two)", "Mul(d, d)"), ALL),
    "rms norm, quotient": (
        "SimplifiedLayerNormalization", X, Y, f"{MEAN_SQUARE} n = Div(x, s) y = Mul(n, g)", ALL,
    ),
    "rms norm, one over the root": (
        "SimplifiedLayerNormalization", X, Y, f"{MEAN_SQUARE} r = Div(one, s) n = Mul(x, r) y = Mul(g, n)", ALL,
    ),
    "rms norm, computed vector": (
        "SimplifiedLayerNormalization", f"{X}, float[U] i", Y, f"j = Abs(i) {MEAN_SQUARE} n = Div(x, s) y = Mul(n, j)",
        ALL,
    ),
    "rms norm, no scale": ("", X, Y, f"{MEAN_SQUARE} n = Div(x, s) y = Relu(n)", ALL),
    "rms norm, a bias": (
        "SimplifiedLayerNormalization", X, Y, f"{MEAN_SQUARE} n = Div(x, s) w = Mul(n, g) y = Add(w, b)", ALL,
    ),
    "rms norm, modulated by the image": (
        "", f"{X}, float[B,1,4] j", Y, f"{MEAN_SQUARE} n = Div(x, s) y = Mul(n, j)", ALL,
    ),
    "rms norm, reciprocal": ("", X, Y, f"{MEAN_SQUARE} r = Reciprocal(s) n = Mul(x, r) y = Mul(n, g)", ALL),
    "skip": ("SkipLayerNormalization", XZ, Y, "s = Add(x, z) y = LayerNormalization(s, g, b)", VECTORS),
    "skip with bias": (
        "SkipLayerNormalization", XZ, Y, "t = Add(x, b) s = Add(z, t) y = LayerNormalization(s, g, b)", VECTORS,
    ),
    "skip with bias on the left": (
        "SkipLayerNormalization", XZ, Y, "t = Add(b, x) s = Add(z, t) y = LayerNormalization(s, g, b)", VECTORS,
    ),
    "skip through double": (
        "SkipLayerNormalization", "float[B,S,4] i, float[B,S,4] z", Y, f"x = Add(i, z) {CASTS}", ALL,
    ),
    "sum read twice": (
        "", XZ, f"{Y}, float[B,S,4] u", "s = Add(x, z) y = LayerNormalization(s, g, b) u = Relu(s)", VECTORS,
    ),
    "sum a graph output": (
        "", XZ, f"{Y}, float[B,S,4] s", "s = Add(x, z) y = LayerNormalization(s, g, b)", VECTORS,
    ),
    "sum of two axes": (
        "", "float[B,4] x, float[B,4] z", "float[B,4] y", "s = Add(x, z) y = LayerNormalization(s, g, b)", VECTORS,
    ),
    "sum with broadcasting": (
        "", f"{X}, float[1,S,4] z", Y, "s = Add(x, z) y = LayerNormalization(s, g, b)", VECTORS,
    ),
    "linear": ("Gemm", "float[B,4] x", "float[B,4] y", "t = MatMul(x, w) y = Add(t, b)", WEIGHTS),
    "linear of three axes": ("", X, Y, "t = MatMul(x, w) y = Add(t, b)", WEIGHTS),
    "linear with a transpose": (
        "Gemm", "float[B,4] x, float[4,4] z", "float[B,4] y",
        "t = Transpose<perm = [1, 0]>(z) m = MatMul(x, t) y = Add(m, b)", VECTORS,
    ),
    "Gemm with a transpose": (
        "Gemm", "float[B,4] x, float[U,4] z", "float[B,U] y", "t = Transpose<perm = [1, 0]>(z) y = Gemm(x, t)", "",
    ),
    "Gemm and Sum": (
        "Gemm", "float[B,4] x, float[4,U] z, float[B,U] k", "float[B,U] y", "t = Gemm(x, z) y = Sum(t, k)", "",
    ),
    "Gemm and Add": (
        "", "float[B,4] x, float[4,U] z, float[B,U] k", "float[B,U] y", "t = Gemm(x, z) y = Add(t, k)", "",
    ),
    "transpose": ("FusedMatMul", LEFT, SCORES, "t = Transpose<perm = [0, 2, 1]>(z) y = MatMul(x, t)", ""),
    "transpose of the batch": (
        "FusedMatMul", "float[B,S,4] x, float[U,B,4] z", SCORES,
        "t = Transpose<perm = [1, 2, 0]>(z) y = MatMul(x, t)", "",
    ),
    "transpose of the first two": (
        "FusedMatMul", "float[B,S,U] x, float[U,B,T] z", "float[B,S,T] y",
        "t = Transpose<perm = [1, 0, 2]>(z) y = MatMul(x, t)", "",
    ),
    "transpose of heads": (
        "", "float[B,H,S,4] x, float[B,4,H,U] z", "float[B,H,S,U] y",
        "t = Transpose<perm = [0, 2, 1, 3]>(z) y = MatMul(x, t)", "",
    ),
    "transpose of everything": (
        "", "float[B,S,U] x, float[T,U,B] z", "float[B,S,T] y",
        "t = Transpose<perm = [2, 1, 0]>(z) y = MatMul(x, t)", "",
    ),
    "transpose that two products read": (
        "FusedMatMul", f"{LEFT}, float[B,R,4] k", f"{SCORES}, float[B,R,U] u",
        "t = Transpose<perm = [0, 2, 1]>(z) y = MatMul(x, t) u = MatMul(k, t)", "",
    ),
    "scale after": ("FusedMatMul", RIGHT, SCORES, "t = MatMul(x, z) y = Mul(t, half)", NUMBERS),
    "scale before": (
        "FusedMatMul", RIGHT, SCORES, "a = Mul(x, half) c1 = Mul(z, half) y = MatMul(a, c1)", NUMBERS,
    ),
    "transpose and scale": (
        "FusedMatMul", LEFT, SCORES, "t = Transpose<perm = [0, 2, 1]>(z) m = MatMul(x, t) y = Div(m, two)", NUMBERS,
    ),
    "scale before a transpose": (
        "FusedMatMul", LEFT, SCORES, "s = Mul(z, half) t = Transpose<perm = [0, 2, 1]>(s) y = MatMul(x, t)", NUMBERS,
    ),
    "scale after a transpose": (
        "FusedMatMul", LEFT, SCORES, "t = Transpose<perm = [0, 2, 1]>(z) s = Mul(t, half) y = MatMul(x, s)", NUMBERS,
    ),
    "product read twice": (
        "", RIGHT, f"{SCORES}, float[B,S,U] u", "t = MatMul(x, z) y = Div(t, half) u = Relu(t)", NUMBERS,
    ),
    "batch norm": ("Conv", IMAGE, MAPS, "t = Conv(x, k) y = BatchNormalization(t, g, b, g, g)", KERNEL),
    "batch norm, scale, shift": (
        "Conv", IMAGE, MAPS, "t = Conv(x, k) n = BatchNormalization(t, g, b, g, g) m = Mul(n, q) y = Add(m, q)", KERNEL,
    ),
    "convolution and Relu": ("FusedConv", IMAGE, MAPS, "t = Conv(x, k) y = Relu(t)", KERNEL),
    "padding": (
        "Conv", IMAGE, "float[B,4,10,10] y", "t = Pad(x, pads) y = Conv(t, k)",
        f"int64[8] pads = {{0, 0, 1, 1, 0, 0, 1, 1}}, {KERNEL}",
    ),
    "product and batch norm": (
        "Gemm", "float[B,4] x", "float[B,4] y", "t = MatMul(x, w) y = BatchNormalization(t, g, b, g, g)", WEIGHTS,
    ),
    "bias and Gelu": ("BiasGelu", X, Y, "t = Add(b, x) y = Gelu(t)", VECTORS),
    "bias and fast Gelu": ("FastGelu", X, Y, 't = Add(x, b) y = Gelu<approximate = "tanh">(t)', VECTORS),
    "Relu and Clip": ("Clip", X, Y, "t = Relu(x) y = Clip(t, half, one)", NUMBERS),
    "one over x, times": ("Div", XZ, Y, "t = Div(one, x) y = Mul(t, z)", NUMBERS),
    "Not and Where": ("Where", f"bool[B,S,4] k, {XZ}", Y, "n = Not(k) y = Where(n, x, z)", ""),
}


def build(inputs: str, outputs: str, body: str, constants: str) -> onnx.ModelProto:
    held = f"<{constants}>" if constants else ""
    opset = 20 if "Gelu" in body else 17
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}]> g ({inputs}) => ({outputs}) {held} {{ {body} }}'
    )


modelled = pytest.mark.skipif(
    tuple(map(int, ort.__version__.split(".")[:2])) < (1, 31), reason="the fusions of ONNX Runtime 1.31 are modelled"
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
@pytest.mark.parametrize("name", CASES)
def test_prediction_against_a_session(name: str, tmp_path: Path) -> None:
    made, *parts = CASES[name]
    model = build(*parts)
    left = optimised(model, tmp_path)
    groups = runtime_groups(load_graph(model))
    assert len(left) == len(model.graph.node) - sum(len(group.nodes) - 1 for group in groups)
    assert not made or made in left
    assert bool(groups) == bool(made)


@modelled
@pytest.mark.parametrize("name", CASES)
def test_what_does_nothing_hides_no_fusion(name: str, tmp_path: Path) -> None:
    """On each read in turn, and on all of one value's, what the runtime takes out before it fuses: the same groups."""
    made, *parts = CASES[name]
    plain = build(*parts)
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
    for _, *parts in CASES.values():
        groups = runtime_groups(load_graph(build(*parts)))
        nodes = [group.nodes for group in groups]
        assert len(frozenset().union(*nodes)) == sum(map(len, nodes))


@pytest.mark.parametrize(
    ("mask", "fused"), [("B,1,1,U", True), ("1,1,1,U", True), ("U", True), ("B,H,S,U", True), ("B,1,S,U", False)],
)
def test_bias_softmax(mask: str, fused: bool) -> None:
    """A CUDA fusion that no CPU session shows: taken as made where a mask repeats over whole leading axes."""
    loaded = load_graph(build(
        f"float[B,H,S,U] x, float[{mask}] m", "float[B,H,S,U] y", "t = Add(x, m) y = Softmax<axis = -1>(t)", "",
    ))
    assert bool(runtime_groups(loaded)) == fused


@pytest.mark.parametrize(("dtype", "size"), [("float", 3), ("float16", 0)])
def test_convolution_add_relu_in_float32_alone(dtype: str, size: int) -> None:
    """Another CUDA fusion, of float32 alone."""
    loaded = load_graph(build(
        f"{dtype}[B,4,8,8] x, {dtype}[4,4,1,1] k, {dtype}[B,4,8,8] z", f"{dtype}[B,4,8,8] y",
        "t = Conv(x, k) s = Add(t, z) y = Relu(s)", "",
    ))
    assert sum(len(group.nodes) for group in runtime_groups(loaded)) == size


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
    _, *parts = CASES["skip through double"]
    graph = load_graph(build(*parts))
    (group,) = runtime_groups(graph)
    sums = [node for node in graph.nodes if node.op == "Add" and node not in group.core]
    assert sums and [len(unit) for unit in group.without(sums)] == [len(group.core)]
    step = next(node for node in graph.nodes if node.op == "Sqrt")
    assert {len(unit) for unit in group.without([step])} == {1}
