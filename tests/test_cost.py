"""Predicted times against figures worked out by hand (relative tolerance 1e-9 unless said)."""

from __future__ import annotations

from dataclasses import replace

import onnx
import pytest
from conv_models import WEIGHTS, conv_model
from onnx import TensorProto

from onnxfuse.graph import Graph
from onnxfuse.operators import load_graph
from onnxfuse.planning.costs.cost import CostModel, effective_bandwidth, kernel_time, product_peak
from onnxfuse.planning.costs.hardware import find_profile
from onnxfuse.planning.costs.traffic import Ledger
from onnxfuse.planning.legality import boundary
from onnxfuse.provider.kernels import held_seconds, runtime_efficiency
from onnxfuse.region import Region, Times

H200 = find_profile("H200")
FLOOR = 1.7e-6


def graph(inputs: str, outputs: str, body: str, constants: str = "") -> Graph:
    held = f"<{constants}>" if constants else ""
    return load_graph(onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> g ({inputs}) => ({outputs}) {held} {{ {body} }}'
    ))


def fuse(loaded: Graph, *ops: str) -> Region:
    nodes = tuple(node for node in loaded.nodes if node.op in ops)
    edge = boundary(nodes)
    return Region(nodes, edge.inputs, edge.outputs)


def test_large_kernels_run_at_the_bandwidth_and_small_ones_at_the_floor() -> None:
    assert kernel_time(4.3e9, 0, 0, H200) == pytest.approx(FLOOR + 1e-3)
    assert kernel_time(0, 0, 0, H200) == pytest.approx(FLOOR)
    assert kernel_time(4.3e9, 0, 0, H200, efficiency=0.5) == pytest.approx(FLOOR + 2e-3)


def test_arithmetic_can_take_longer_than_traffic() -> None:
    assert kernel_time(4.3e9, 0, 66.9e12, H200) == pytest.approx(FLOOR + 1.0)
    assert kernel_time(4.3e9, 0, 790e12, H200, peak_tflops=790) == pytest.approx(FLOOR + 1.0)


def test_what_fits_the_cache_runs_faster() -> None:
    megabytes = 1024**2
    assert effective_bandwidth(30 * megabytes, H200) == pytest.approx(1.6 * 4.3e12)
    assert effective_bandwidth(60 * megabytes, H200) == pytest.approx(4.3e12)
    assert effective_bandwidth(1e12, H200) == pytest.approx(4.3e12)
    assert effective_bandwidth(45 * megabytes, H200) == pytest.approx(4.3e12 / (0.5 / 1.6 + 0.5))


SUMS: dict[str, tuple[float, str, list[tuple[int, int]]]] = {
    "EfficientNet, 32 images": (277.8 + 21.2, "float16", [
        (1024, 12_544), (3072, 3136), (4608, 3136), (4608, 784), (7680, 784), (7680, 196), *[(15_360, 196)] * 3,
        *[(21_504, 196)] * 2, (21_504, 49), *[(36_864, 49)] * 4]),
    "LLaMA, 1024 tokens": (128.4 / 17 + 1.3, "float", [(1024, 2048)]),
    "T5, 8 x 256 tokens": (71.4 / 17 + 1.3, "float", [(2048, 512)]),
}
"""Microseconds of means on the H200, and of the quotients behind them (benchmarks/results, zoo-quick); their rows, and
elements of a row."""


def sum_seconds(text: str) -> float:
    return CostModel(Ledger(graph(*text.split(" => ")[:2], text.split(" => ")[2]), {}), H200).total()


@pytest.mark.parametrize("name", SUMS)
def test_what_the_runtime_takes_for_means_is_predicted(name: str) -> None:
    """Within a tenth, however the rows are spelled."""
    measured, kind, shapes = SUMS[name]
    for spelling in ("[{0}, {1}] x => {2}[{0}, 1] y => y = ReduceMean <axes = [1]> (x)",
                     "[2, {3}, 1, {1}, 1] x => {2}[2, {3}, 1] y => y = ReduceMean <axes = [-2, 2], keepdims = 0> (x)"):
        total = sum(sum_seconds(kind + spelling.format(rows, length, kind, rows // 2)) for rows, length in shapes)
        assert 0.9 * measured < 1e6 * total < 1.1 * measured, total


def held(body: str, x: str = "float16[32, 1152, 7, 7] x") -> float:
    (node,) = graph(x, "float16[A, B, C, D] y", f"y = {body}").nodes
    return held_seconds(node, {}, H200.multiprocessors)


def test_few_rows_take_as_long_as_one_block() -> None:
    assert held("ReduceMean <axes = [3]> (x)", "float16[1, 1, 2, 64] x") == 2.5e-6
    assert held("ReduceSum <axes = [2, 3]> (x)") == pytest.approx(2.5e-6 * 32_768 / (32 * 132))


def test_batch_norms_take_their_time_for_every_plane() -> None:
    """59 of a LeViT's on an H100, behind linear layers: 28 million planes."""
    norm = "BatchNormalization(x, s, b, m, v)"
    vectors = ", float16[384] s, float16[384] b, float16[384] m, float16[384] v"
    assert held(norm, "float16[3136, 384] x" + vectors) == pytest.approx(3136 * 384 * 80e-9 / 132)
    assert held(norm, "float16[32, 384, 56, 56] x" + vectors) == pytest.approx(32 * 384 * 80e-9 / 132)
    assert pytest.approx(17.0e-3, rel=0.01) == 28e6 * 80e-9 / 132


@pytest.mark.parametrize(("body", "x", "share"), [
    ("Transpose <perm = [0, 2, 3, 1]> (x)", "16, 4, 196, 196", 4 / 32),
    ("Transpose <perm = [0, 3, 1, 2]> (x)", "16, 196, 196, 4", 4 / 32),
    ("Transpose <perm = [0, 2, 3, 1]> (x)", "16, 197, 4, 48", 0.55),
    ("Transpose <perm = [0, 2, 3, 1]> (x)", "16, 4, 1, 8", 4 / 32),
    ("Transpose <perm = [0, 2, 1]> (x)", "16, N, N", 0.55),
    ("Transpose (x)", "16, 8", 8 / 32),
    ("Transpose (x)", "16, 0", 1 / 32),
    ("Transpose <perm = [0, 2, 1, 3]> (x)", "16, 4, 196, 48", 0.9),
    ("Transpose <perm = [0, 1, 2]> (x)", "16, 4, 196", 0.9),
    ("Transpose <perm = [0, 1, 3, 2, 4, 5]> (x)", "16, 4, 7, 4, 7, 128", 0.9),
    ("Transpose <perm = [1, 0, 3, 2, 4]> (x)", "16, 4, 7, 4, 128", 0.4),
    ("Pad <mode = \"constant\"> (x, p)", "16, 64, 112, 112", 0.3),
])
def test_what_the_runtime_moves_by_tiles_and_element_by_element(body: str, x: str, share: float) -> None:
    (node,) = graph(f"float16[{x}] x, int64[8] p", "float16[] y", f"y = {body}").nodes
    assert runtime_efficiency([node]) == pytest.approx(share)


@pytest.mark.parametrize("other", [
    "ReduceMax <axes = [2, 3]> (x)", "ReduceSum <axes = [0, 1]> (x)", "ReduceSum <axes = [1, 3]> (x)",
    "ReduceSum (x)", "Neg(x)",
])
def test_other_kernels_of_the_runtime_do_not_wait_for_blocks(other: str) -> None:
    """Maxima, columns, axes apart, everything: what they move says what they take."""
    assert held(other) == 0.0


def test_the_cache_does_not_help_what_is_transposed() -> None:
    """A transpose of 20 MB takes what the device memory needs for it, an addition of as much less."""
    loaded = graph("float[N, 64] x", "float[64, N] y, float[N, 64] z", "a = Exp(x) y = Transpose(a) z = Neg(a)")
    costs = CostModel(Ledger(loaded, {"N": 40_000}), H200)
    size = 2 * 4 * 64 * 40_000
    assert costs.kernel_seconds(fuse(loaded, "Transpose")) == pytest.approx(FLOOR + size / (0.95 * 4.3e12))
    assert costs.kernel_seconds(fuse(loaded, "Neg")) == pytest.approx(FLOOR + size / (0.9 * 1.6 * 4.3e12))


def test_peaks_of_products() -> None:
    assert product_peak(TensorProto.FLOAT16, H200) == pytest.approx(790)
    assert product_peak(TensorProto.FLOAT, H200) == pytest.approx(790 * 494 / 989)
    assert product_peak(TensorProto.FLOAT16, find_profile("A100")) == pytest.approx(0.7 * 312)
    assert product_peak(TensorProto.FLOAT, find_profile("T4")) == pytest.approx(0.7 * 8.1)
    assert product_peak(TensorProto.DOUBLE, H200) == pytest.approx(0.7 * 33.5)


@pytest.mark.parametrize(("dtype", "tflops"), [("float16", 790), ("float", 790 * 494 / 989)])
def test_a_product_runs_at_the_peak_of_its_type(dtype: str, tflops: float) -> None:
    whole = f"{dtype}[8192,8192]"
    loaded = graph(f"{whole} x, {whole} w", f"{whole} y", "y = MatMul(x, w)")
    seconds, _ = CostModel(Ledger(loaded, {}), H200).unfused(loaded.nodes)
    assert seconds == pytest.approx(FLOOR + 2 * 8192**3 / (tflops * 1e12))


def test_a_region_of_three_kernels() -> None:
    # 2^28 float32 elements: 1 GiB a tensor, far past the cache.
    loaded = graph("float[268435456] x", "float[268435456] y", "a = Abs(x) b = Neg(a) y = Exp(b)")
    cost = CostModel(Ledger(loaded, {}), H200).region(fuse(loaded, "Abs", "Neg", "Exp"))
    gib = 2**30
    assert (cost.bytes_before, cost.bytes_after, cost.memory_saved) == (6 * gib, 2 * gib, 2 * gib)
    assert (cost.kernels_before, cost.kernels_after) == (3, 1)
    assert cost.seconds_before == pytest.approx(3 * (FLOOR + 2 * gib / (0.75 * 4.3e12)))
    assert cost.seconds_after == pytest.approx(FLOOR + 2 * gib / (0.9 * 4.3e12))
    assert cost.estimated_speedup == pytest.approx(3.6, rel=0.01)
    assert cost.seconds_saved == pytest.approx(cost.seconds_before - cost.seconds_after)


def test_one_kernel_for_one_kernel_is_not_worth_it() -> None:
    loaded = graph("float[268435456] x", "float[268435456] y", "y = Exp(x)")
    cost = CostModel(Ledger(loaded, {}), H200).region(fuse(loaded, "Exp"))
    assert cost.estimated_speedup < 1.2


@pytest.mark.parametrize(("reduction", "moved"), [("none", 2), ("add", 3)])
def test_a_scatter_over_what_nobody_else_needs_moves_its_updates_alone(reduction: str, moved: int) -> None:
    """A row of 2^20 float32 of 256 MiB, and one index; where the result of the Exp has another reader it is copied."""
    row, index = 2**22, 8
    scatter = f'a = Exp(x) y = ScatterND<reduction="{reduction}">(a, i, u)'
    inputs, outputs = "float[64, 1048576] x, float[1, 1048576] u", "float[64, 1048576] y"
    for more, kept in (("", False), (" z = Neg(a)", True)):
        loaded = load_graph(onnx.parser.parse_model(
            f'<ir_version: 8, opset_import: ["" : 18]> g ({inputs}) => ({outputs}{", float[64, 1048576] z" * kept}) '
            f"<int64[1, 1] i = {{3}}> {{ {scatter}{more} }}"))
        node = next(node for node in loaded.nodes if node.op == "ScatterND")
        seconds, _ = CostModel(Ledger(loaded, {}), H200).unfused([node])
        total = 2 * 64 * row + row + index if kept else moved * row + index
        rate = runtime_efficiency([node]) * effective_bandwidth(total, H200)
        assert seconds == pytest.approx(FLOOR + total / rate)


SKIP = (
    "float16[B,512,1024] x, float16[B,512,1024] z", "float16[B,512,1024] y",
    "s = Add(x, z) n = LayerNormalization(s, g) y = Relu(n)", "float16[1024] g = {" + ", ".join(["1"] * 1024) + "}",
)


def test_what_the_runtime_fuses_is_one_kernel_of_the_baseline() -> None:
    loaded = graph(*SKIP)
    model = CostModel(Ledger(loaded, {"B": 64}), H200)
    cost = model.region(fuse(loaded, "Add", "LayerNormalization"))
    assert cost.kernels_before == 1
    assert cost.estimated_speedup < 1.2
    assert model.region(fuse(loaded, "Add", "LayerNormalization", "Relu")).kernels_before == 2


def test_breaking_a_fusion_of_the_runtime_has_its_price() -> None:
    loaded = graph(*SKIP)
    model = CostModel(Ledger(loaded, {"B": 64}), H200)
    cost = model.region(fuse(loaded, "LayerNormalization", "Relu"))
    # Before: SkipLayerNorm and Relu.  After: Add, which the runtime had for nothing, and the fused node.
    assert (cost.kernels_before, cost.kernels_after) == (2, 2)
    assert cost.estimated_speedup < 1.2 < model.region(
        fuse(loaded, "Add", "LayerNormalization", "Relu")).estimated_speedup


def test_a_product_that_stays_counts_on_neither_side() -> None:
    loaded = graph(
        "float[B,512,64] x, float[B,64,512] k", "float[B,512,512] y", "a = Relu(x) s = Mul(a, c) y = MatMul(s, k)",
        "float c = {0.125}",
    )
    model = CostModel(Ledger(loaded, {"B": 64}), H200)
    one, both = model.region(fuse(loaded, "Relu")), model.region(fuse(loaded, "Relu", "Mul"))
    # The runtime scales inside of its product: the kernel that makes the operand does it for nothing as well.
    assert (both.kernels_before, both.kernels_after) == (one.kernels_before, one.kernels_after) == (1, 1)
    assert both.seconds_before == pytest.approx(one.seconds_before, rel=1e-5)
    assert both.seconds_after == pytest.approx(one.seconds_after, rel=1e-5)
    assert both.bytes_before == 2 * one.bytes_before + 4  # and the factor
    # Alone it would be a kernel where the runtime has none.
    alone = model.region(fuse(loaded, "Mul"))
    assert (alone.kernels_before, alone.kernels_after, alone.seconds_before) == (0, 1, pytest.approx(0.0))


def test_the_whole_graph_adds_up() -> None:
    loaded = graph("float[268435456] x", "float[268435456] y", "a = Abs(x) b = Neg(a) y = Exp(b)")
    model = CostModel(Ledger(loaded, {}), H200)
    region = fuse(loaded, "Neg", "Exp")
    cost = model.region(region)
    assert model.total() - model.total([region]) == pytest.approx(cost.seconds_saved)
    # What the plan has come to know of it counts, but for what was measured: the other side was not.
    slower = replace(region, counted=replace(cost, seconds_after=2 * cost.seconds_after))
    assert model.total([slower]) - model.total([region]) == pytest.approx(cost.seconds_after)
    assert model.total([replace(slower, measured=Times(1.0, 2.0, "H200", "2026-01-01"))]) == model.total([region])


def test_scratch_and_further_kernels_cost() -> None:
    loaded = graph("float[268435456] x", "float[268435456] y", "a = Abs(x) y = Neg(a)")
    model = CostModel(Ledger(loaded, {}), H200)
    one = fuse(loaded, "Abs", "Neg")
    two = replace(one, steps=2, scratch=2**30)
    assert model.region(two).seconds_after - model.region(one).seconds_after == pytest.approx(
        FLOOR + 2**30 / 4.3e12
    )


@pytest.mark.parametrize(("shape", "axis", "measured"), [
    ((4096, 1000), 1, 511e-6), ((1024, 4096), 1, 2004e-6), ((64, 50_257), 1, 18_680e-6), ((8, 128, 512), 1, 12e-6),
    ((64, 1000, 512), -2, 3870e-6), ((2, 8000, 512), 1, 8290e-6),
])
def test_the_runtime_adds_up_all_elements_before_each(shape: tuple[int, ...], axis: int, measured: float) -> None:
    """Within a quarter of what ONNX Runtime's CumSum took on an H200 (benchmarks/results, ways)."""
    of = f"float16[{','.join(map(str, shape))}]"
    graph = load_graph(onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> g ({of} x) => ({of} y) <int64 a = {{{axis}}}> '
        "{ y = CumSum(x, a) }"))
    costs = CostModel(Ledger(graph, {}), H200)
    (node,) = graph.nodes
    assert costs.group_seconds(frozenset([node])) == pytest.approx(measured, rel=0.3)



@pytest.mark.parametrize(("kind", "body", "shares"), [
    ("float16", "y = Conv(x, w)", []),
    ("float16", "y = Conv(x, w, b)", [0.2]),
    ("float", "y = Conv(x, w, b)", [0.2]),
    ("float16", "c = Conv(x, w, b) y = Relu(c)", [0.2, 0.75]),
    ("float", "c = Conv(x, w, b) y = Relu(c)", [0.2, 0.75]),  # which one call does on other providers alone
    ("float", "c = Conv(x, w) n = BatchNormalization(c, b, b, b, b) y = Relu(n)", [0.2, 0.75]),
    ("float", "c = Conv(x, w, b) y = Sigmoid(c)", [0.2, 0.75]),
    ("float16", "c = Conv(x, w) y = BatchNormalization(c, b, b, b, b)", [0.2]),  # folded into the weights and a bias
    ("float16", "c = Conv(x, w, b) y = BatchNormalization(c, b, b, b, b)", [0.2]),
    ("float16", "c = Conv(x, w) y = Mul(c, k)", []),  # folded into the weights alone
    ("float16", "c = Conv(x, w) y = Add(c, k)", [0.2]),
])
def test_the_runtime_adds_a_bias_to_a_convolution_in_a_kernel_of_its_own(
    kind: str, body: str, shares: list[float]
) -> None:
    """``shares``: of the copy rate, for each kernel beside the convolution's."""
    loaded, bare = (load_graph(conv_model(text, kind=kind, weights={**WEIGHTS, "k": (16, 1, 1)}))
                    for text in (body, "y = Conv(x, w)"))
    sizes = {"N": 32, "H": 130, "W": 130}
    seconds, kernels = CostModel(Ledger(loaded, sizes), H200).unfused(loaded.nodes)
    product, _ = CostModel(Ledger(bare, sizes), H200).unfused(bare.nodes)
    written = 32 * 16 * 128 * 128 * (2 if kind == "float16" else 4)
    others = [kernel_time(written, written, 0, H200, efficiency=share) for share in shares]
    assert kernels == 1 + len(others)
    assert seconds == pytest.approx(product + sum(others), rel=0.02)


def test_a_region_behind_a_convolution_saves_the_bias_that_it_adds() -> None:
    """What a BatchNormalization comes to is added either way; the Relu is free with it."""
    loaded = load_graph(conv_model("c = Conv(x, w) n = BatchNormalization(c, b, b, b, b) y = Relu(n)"))
    costs = CostModel(Ledger(loaded, {"N": 32, "H": 130, "W": 130}), H200)
    cost = costs.region(fuse(loaded, "BatchNormalization", "Relu"))
    assert (cost.kernels_before, cost.kernels_after) == (2, 1)
    written = 32 * 16 * 128 * 128 * 2
    own = [kernel_time(written, written, 0, H200, efficiency=share) for share in (0.2, 0.75, 0.9)]
    assert cost.seconds_before == pytest.approx(own[0] + own[1], rel=0.01)
    assert cost.seconds_after == pytest.approx(own[2], rel=0.01)


@pytest.mark.parametrize(("kind", "body", "biases"), [
    ("float", "y = Gemm(x, w)", 0),
    ("float", "y = Gemm(x, w, b)", 1),
    ("float16", "y = Gemm(x, w, b)", 1),
    ("float", "p = MatMul(x, w) y = Add(p, b)", 1),  # one Gemm
    ("float", "p = MatMul(x, w) y = Mul(p, k)", 0),  # one FusedMatMul
])
def test_the_runtime_lays_a_bias_down_before_a_product(kind: str, body: str, biases: int) -> None:
    weights = {"w": (1024, 1024), "b": (1024,), "k": ()}
    loaded, bare = (load_graph(conv_model(text, "T[N, 1024] x", "T[N, 1024] y", kind, weights))
                    for text in (body, "y = Gemm(x, w)"))
    (seconds, kernels), (product, _) = (
        CostModel(Ledger(each, {"N": 8192}), H200).unfused(each.nodes) for each in (loaded, bare))
    written = 8192 * 1024 * (2 if kind == "float16" else 4)
    assert kernels == 1 + biases
    assert seconds == pytest.approx(product + biases * kernel_time(0, written, 0, H200, efficiency=0.2), rel=0.02)


def test_a_bias_and_an_activation_behind_a_product_are_worth_a_kernel() -> None:
    loaded = load_graph(conv_model("p = MatMul(x, w) s = Add(p, b) y = Relu(s)", "T[N, 1024] x", "T[N, 1024] y",
                                   "float", {"w": (1024, 1024), "b": (1024,)}))
    cost = CostModel(Ledger(loaded, {"N": 8192}), H200).region(fuse(loaded, "Add", "Relu"))
    assert (cost.kernels_before, cost.kernels_after) == (2, 1) and cost.estimated_speedup > 2
