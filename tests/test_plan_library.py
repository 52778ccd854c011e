"""What ONNX Runtime's library is predicted to take for convolutions of which nothing was measured."""

from __future__ import annotations

import pytest
from kernel_harness import parse
from unmeasured import UNMEASURED

from onnxfuse.graph import build_graph
from onnxfuse.graph.load import from_proto
from onnxfuse.graph.model import Node
from onnxfuse.operators import infer
from onnxfuse.planning.costs.cost import CostModel, kernel_time
from onnxfuse.planning.costs.hardware import Profile, find_profile
from onnxfuse.planning.costs.library import (
    batched_seconds,
    convolution_seconds,
    is_dense,
    is_laid_anew,
    left_seconds,
    uneven_seconds,
)
from onnxfuse.planning.costs.traffic import Ledger
from onnxfuse.provider.kernels import Biased

H100 = find_profile("H100")
BANDWIDTH = 0.9 * 3352e9
FLOOR = 2e-6


def convolution(weights: str, image: str = "N,64,56,56", kind: str = "float16", options: str = "",
                profile: Profile = H100, images: int = 256, bias: bool = False) -> tuple[Node, CostModel]:
    """A convolution and the costs of its model."""
    more, third = (f", {kind}[64] c", ", c") if bias else ("", "")
    text = f"g ({kind}[{image}] x, {kind}[{weights}] w{more}) => (y) {{ y = Conv{options}(x, w{third}) }}"
    graph = infer(build_graph(from_proto(parse(text))))
    return graph.nodes[0], CostModel(Ledger(graph, {"N": images}), profile)


def seconds(*given: object, **named: object) -> float:
    found = convolution_seconds(*convolution(*given, **named))  # type: ignore[arg-type]
    assert found is not None
    return found


def test_with_windows_image_and_result_are_laid_anew() -> None:
    """6272 tiles in 48 rounds, and twice 103 MB read and written at half of the bandwidth; what was measured of 32
    images, 50.9 us, is more than what is predicted of these."""
    products = 0.9 * 48 * 2 * 128 * 128 * 576 * 132 / 820e12
    laying = 2 * (FLOOR + 2 * 2 * 256 * 64 * 56 * 56 / (0.5 * BANDWIDTH))
    assert seconds("64,64,3,3", options=" <pads = [1,1,1,1]>") == pytest.approx(FLOOR + products + laying)
    assert seconds("64,64,3,3", options=" <pads = [1,1,1,1]>", images=32) < 50.9e-6


def test_along_three_axes_too() -> None:
    """As many places as above, with three times as many elements of a window."""
    products = 0.9 * 48 * 2 * 128 * 128 * 3 * 576 * 132 / 820e12
    laying = 2 * (FLOOR + 2 * 2 * 256 * 64 * 56 * 56 / (0.5 * BANDWIDTH))
    found = seconds("64,64,3,3,3", "N,64,4,56,56", options=" <pads = [1,1,1,1,1,1]>", images=64)
    assert found == pytest.approx(FLOOR + products + laying)


def test_of_float32_tiles_take_twice_and_so_do_bytes() -> None:
    """As TF32, at the rate that the data sheet has beside that of 16 bits."""
    products = 0.9 * 48 * 2 * 128 * 128 * 576 * 132 / (820e12 * 494 / 989)
    laying = 2 * (FLOOR + 2 * 4 * 256 * 64 * 56 * 56 / (0.5 * BANDWIDTH))
    found = seconds("64,64,3,3", options=" <pads = [1,1,1,1]>", kind="float")
    assert found == pytest.approx(FLOOR + products + laying)
    volta = H100.model_copy(update={"peaks": H100.peaks.model_copy(update={"tf32_matrix": 0.0})})
    assert convolution_seconds(*convolution("64,64,3,3", kind="float", profile=volta)) is None


def as_it_lies(read: int, written: int) -> float:
    """What a kernel takes of which nothing is known but its bytes, of which the cache has none."""
    return FLOOR + (read + written) / BANDWIDTH


def test_without_they_are_products_as_they_lie() -> None:
    """Whose bytes take longest here, however few they are, or whose tiles there."""
    for images in (256, 16):
        image = 2 * images * 64 * 56 * 56
        assert seconds("64,64,1,1", images=images) == pytest.approx(as_it_lies(image + 2 * 64 * 64, image))
    tiles = 0.9 * 1 * 2 * 128 * 128 * 2048 * 132 / 820e12
    assert seconds("64,2048,1,1", "N,2048,8,8", images=32) == pytest.approx(FLOOR + tiles)


@pytest.mark.parametrize(("side", "places", "options"), [
    (14, 14 * 14, ""), (56, 28 * 28, " <strides = [2, 2]>"), (56, 56 * 14, " <strides = [1, 4]>")],
    ids=["planes that no vector divides", "every other pixel", "every fourth of a row"])
def test_others_than_products_as_they_lie_are_laid_anew_too(side: int, places: int, options: str) -> None:
    read, written = 2 * 256 * 64 * side * side, 2 * 256 * 64 * places
    laying = sum(kernel_time(size, size, 0, H100) for size in (read, written))
    plain = max(as_it_lies(read + 2 * 64 * 64, written),
                FLOOR + 0.9 * -(-256 * places // 128 // 132) * 2 * 128**2 * 64 * 132 / 820e12)
    assert seconds("64,64,1,1", f"N,64,{side},{side}", options=options) == pytest.approx(plain + laying)
    assert laying > plain - FLOOR


def test_a_bias_has_a_kernel_of_its_own() -> None:
    node, costs = convolution("64,64,1,1", bias=True)
    assert node.outputs[0] is not None
    added = costs.bias_seconds(Biased(node.outputs[0], True))
    assert added > FLOOR and seconds("64,64,1,1", bias=True) == pytest.approx(seconds("64,64,1,1") + added)


@pytest.mark.parametrize(("text", "named"), [
    ("64,64,3,3", {"profile": UNMEASURED}), ("64,64,3,3", {"profile": UNMEASURED, "bias": True}),
    ("64,64,3,3", {"image": "N,64,H,H"}), ("64,64,3,3", {"images": 0}),
    ("64,64,1,1", {"image": "N,64,1,1", "images": 63})],
    ids=["no rate", "nor with a bias", "open sizes", "nothing to do", "few rows"])
def test_what_is_not_known(text: str, named: dict[str, object]) -> None:
    assert convolution_seconds(*convolution(text, **named)) is None  # type: ignore[arg-type]


def batched(left: str, right: str, op: str = "MatMul", kind: str = "float16", **named: object) -> float | None:
    """What a product of two computed operands is predicted to take."""
    text = f"g ({kind}[{left}] x, {kind}[{right}] w) => (y) {{ y = {op}(x, w) }}"
    graph = infer(build_graph(from_proto(parse(text))))
    return batched_seconds(graph.nodes[0], CostModel(Ledger(graph, {"N": 32}), H100, **named))  # type: ignore[arg-type]


@pytest.mark.parametrize(("left", "right", "measured"), [
    ("N,12,384,64", "N,12,64,384", 55.8), ("8,12,128,64", "8,12,64,128", 3.9), ("8,12,128,128", "8,12,128,64", 4.2),
    ("2,8,1024,32", "2,8,32,1024", 13.4), ("N,12,197,64", "N,12,64,197", 49.7), ("N,12,197,197", "N,12,197,64", 52.2)])
def test_products_of_heads_pass_the_caches_by(left: str, right: str, measured: float) -> None:
    """And take thrice the time where rows are no whole vectors: microseconds as an H100 measured them."""
    found = batched(left, right)
    assert found is not None and 0.85 * measured < 1e6 * found < 1.1 * measured


@pytest.mark.parametrize(("left", "right", "measured"), [
    ("8,12,128,64", "8,12,64,128", 5.4), ("N,12,197,64", "N,12,64,197", 59.0), ("N,12,197,197", "N,12,197,64", 48.7),
    ("4,12,1500,64", "4,12,64,1500", 188.0), ("4,12,1500,1500", "4,12,1500,64", 235.0)])
def test_of_float32_by_their_bytes_and_vectors_of_four(left: str, right: str, measured: float) -> None:
    found = batched(left, right, kind="float")
    assert found is not None and 0.6 * measured < 1e6 * found < 1.15 * measured


@pytest.mark.parametrize(("left", "right", "named"), [
    ("N,12,63,64", "N,12,64,64", {}), ("N,12,H,64", "N,12,64,64", {}), ("64,64", "64,64", {}),
    ("N,12,64,64", "N,12,64,64", {"kind": "double"})], ids=["few rows", "open sizes", "one product", "float64"])
def test_products_that_are_not_known(left: str, right: str, named: dict[str, object]) -> None:
    assert batched(left, right, **named) is None  # type: ignore[arg-type]


def uneven(left: str, right: str, op: str = "MatMul", kind: str = "float16") -> float | None:
    """What a product by a matrix is predicted to take, of rows that are no whole vectors."""
    text = f"g ({kind}[{left}] x, {kind}[{right}] w) => (y) {{ y = {op}(x, w) }}"
    graph = infer(build_graph(from_proto(parse(text))))
    return uneven_seconds(graph.nodes[0], CostModel(Ledger(graph, {"N": 32}), H100))


@pytest.mark.parametrize(("left", "right", "op", "measured"), [
    ("8192,180", "180,540", "MatMul", 18.4), ("8192,360", "360,180", "MatMul", 12.8),
    ("4096,770", "770,770", "MatMul", 31.8), ("65536,319", "256,319", "Gemm <transB = 1>", 108.0),
    ("2048,429", "1024,429", "Gemm <transB = 1>", 27.0),
    ("2048,768", "50257,768", "Gemm <transB = 1>", 1879.0), ("8,256,768", "768,50257", "MatMul", 1237.0)])
def test_products_of_uneven_rows_take_longer(left: str, right: str, op: str, measured: float) -> None:
    """At the least; microseconds as PyTorch's took them on an H200."""
    found = uneven(left, right, op)
    assert found is not None and 0.3 * measured < 1e6 * found < 1.1 * measured


@pytest.mark.parametrize(("left", "right", "kind"), [
    ("8192,184", "184,544", "float16"), ("63,181", "181,540", "float16"), ("H,181", "181,540", "float16"),
    ("8192,181", "181,540", "float"), ("4,64,181", "4,181,64", "float16")],
    ids=["whole vectors", "few rows", "open sizes", "float32", "a matrix each"])
def test_other_products_are_not_of_uneven_rows(left: str, right: str, kind: str) -> None:
    assert uneven(left, right, kind=kind) is None


@pytest.mark.parametrize(("weights", "named", "dense", "laid"), [
    ("64,64,3,3", {}, True, True), ("64,64,1,1", {}, True, False), ("64,64,3,3", {"kind": "float"}, True, True),
    ("64,64,3,3", {"kind": "double"}, False, False), ("64,64,1,1,3", {"image": "N,64,8,8,8"}, True, True),
    ("64,1,3,3", {"options": " <group = 64>"}, False, False)])
def test_which_these_are(weights: str, named: dict[str, object], dense: bool, laid: bool) -> None:
    node, _ = convolution(weights, **named)  # type: ignore[arg-type]
    assert (is_dense(node), is_laid_anew(node)) == (dense, laid)


@pytest.mark.parametrize(("weights", "learned", "more"), [
    ("64,64,3,3", None, True), ("64,64,3,3", False, True), ("64,64,3,3", True, False), ("64,64,1,1", None, False)])
def test_what_is_left_to_the_runtime_mostly_takes_more_than_the_least(
    weights: str, learned: bool | None, more: bool
) -> None:
    """Of what was measured it is known."""
    node, costs = convolution(weights)
    if learned is not None:
        costs.learn(node, 1e-3, measured=learned)
    whole, _ = costs.unfused([node])
    assert left_seconds([node], costs) == pytest.approx(0.18 * whole if more else 0.0)
    assert left_seconds([], costs) == 0
