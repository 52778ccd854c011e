"""Depthwise convolutions of images with channels last: windows of every form, with what is around them, every choice."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from kernel_harness import Made, attempt, check, make, only, parse, random_inputs

from onnxfuse.compiling import source_of
from onnxfuse.graph.dims import dim, symbol
from onnxfuse.refusal import Refusal
from onnxfuse.runtime.compile import default_compiler
from onnxfuse.schedules import Kernel, Request, make_kernel, parse_choice
from onnxfuse.schedules.stencils.last_strips import BANKS, PIECE, Edges, StencilLastShape
from onnxfuse.schedules.stencils.parts import StencilAxis

FIRST, LAST = "t = Transpose<perm = [0,3,1,2]>(x)", "Transpose<perm = [0,2,3,1]>"
PLAIN = ("g (T[2,14,15,24] x, T[24,1,3,3] w, T[24] b) => (T[A,B,C,D] y) "
         f"{{ {FIRST} c = Conv<group = 24, pads = [1,1,1,1]>(t, w, b) y = {LAST}(c) }}")

CASES: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "three by three": (PLAIN, {}),
    "SiLU, of many channels": (
        "g (T[N,7,7,H] x, T[H,1,5,5] w, T[H] b) => (T[A,B,C,D] y) ".replace("H", "288") +
        f"{{ {FIRST} c = Conv<group = 288, pads = [2,2,2,2]>(t, w, b) s = Sigmoid(c) m = Mul(c, s) y = {LAST}(m) }}",
        {"N": 3}),
    "every other, uneven": (
        "g (T[2,15,33,16] x, T[16,1,3,5] w) => (T[A,B,C,D] y) "
        f"{{ {FIRST} c = Conv<group = 16, pads = [1,0,0,3], strides = [2,2]>(t, w) y = {LAST}(c) }}", {}),
    "spread": (
        "g (T[1,19,40,8] x, T[8,1,2,5] w) => (T[A,B,C,D] y) "
        f"{{ {FIRST} c = Conv<group = 8, pads = [0,5,2,1], strides = [3,1], dilations = [1,3]>(t, w) y = {LAST}(c) }}", {}),
    "spread rows": (
        "g (T[1,12,12,8] x, T[8,1,3,2] w) => (T[A,B,C,D] y) "
        f"{{ {FIRST} c = Conv<group = 8, pads = [3,0,3,1], dilations = [3,2]>(t, w) y = {LAST}(c) }}", {}),
    "any size": (
        "g (T[N,H,W,40] x, T[40,1,7,7] w, T[40] b) => (T[A,B,C,D] y) "
        f"{{ {FIRST} c = Conv<group = 40, pads = [3,3,3,3]>(t, w, b) y = {LAST}(c) }}", {"N": 2, "H": 9, "W": 12}),
    "six channels": (PLAIN.replace("24", "6"), {}),
    "seven channels": (PLAIN.replace("24", "7"), {}),
    "one pixel": (PLAIN.replace("14,15,", "1,1,"), {}),
    "a large window": (PLAIN.replace("24", "8").replace("3,3] w", "11,9] w").replace("1,1,1,1", "5,4,5,4"), {}),
    "residuals, scales, two results": (
        "g (T[2,9,8,16] x, T[16,1,3,3] w, T[2,9,8,16] r, T[16,1,1] s, T[2,16,1,1] q) => (T[A,B,C,D] y, T[A,B,C,D] z) "
        f"{{ {FIRST} c = Conv<group = 16, pads = [1,1,1,1]>(t, w) d = Mul(c, s) e = Add(d, q) f = {LAST}(e) "
        "y = Add(f, r) z = Neg(f) }", {}),
    "what is no zero at zero": (PLAIN.replace(FIRST, "i = Sigmoid(x) " + FIRST.replace("(x)", "(i)")), {}),
    "two images, a large window": (
        "g (T[2,9,15,16] x, T[2,9,15,16] z, T[16,1,7,7] w) => (T[A,B,C,D] y) "
        f"{{ i = Add(x, z) {FIRST.replace('(x)', '(i)')} c = Conv<group = 16, pads = [3,3,3,3]>(t, w) y = {LAST}(c) }}", {}),
    "integers": (
        "g (int32[2,9,8,16] x, T[16,1,3,3] w) => (T[A,B,C,D] y) "
        f"{{ two = Constant<value = int32[1] {{2}}>() h = Div(x, two) i = CastLike(h, w) {FIRST.replace('(x)', '(i)')} c = Conv<group = 16, pads = [1,1,1,1]>(t, w) y = {LAST}(c) }}", {}),
    "integers, a large window": (
        "g (int32[2,9,8,16] x, T[16,1,7,5] w) => (T[A,B,C,D] y) "
        f"{{ i = CastLike(x, w) {FIRST.replace('(x)', '(i)')} c = Conv<group = 16, pads = [3,2,3,2]>(t, w) y = {LAST}(c) }}", {}),
    "far beyond the image": (PLAIN.replace("24", "8").replace("1,1,1,1", "4,9,6,17"), {}),
    "a sequence": (
        "g (T[N,L,32] x, T[32,1,31] w) => (T[A,B,C] y) { t = Transpose<perm = [0,2,1]>(x) "
        "c = Conv<group = 32, pads = [15,15]>(t, w) y = Transpose<perm = [0,2,1]>(c) }", {"N": 2, "L": 61}),
    "layers beside the image": (
        "g (T[2,3,9,8,8] x, T[8,1,1,7,7] w) => (T[A,B,C,D,E] y) { t = Transpose<perm = [0,4,1,2,3]>(x) "
        "c = Conv<group = 8, pads = [1,3,3,1,3,3]>(t, w) y = Transpose<perm = [0,2,3,4,1]>(c) }", {}),
    "three axes": (
        "g (T[2,5,6,9,8] x, T[8,1,2,3,1] w) => (T[A,B,C,D,E] y) { t = Transpose<perm = [0,4,1,2,3]>(x) "
        "c = Conv<group = 8, strides = [2,1,2], dilations = [2,2,1], pads = [1,0,0,1,0,0]>(t, w) "
        "y = Transpose<perm = [0,2,3,4,1]>(c) }", {}),
}


def lasts(text: str, kind: str = "float16", planned: Mapping[str, int] | None = None) -> Made:
    """The kernel, which must be of this schedule."""
    made = make(text.replace("T[", f"{kind}["), planned=planned)
    assert made.kernel.schedule == "stencil_last"
    return made


@pytest.mark.parametrize("kind", ["int8", "uint8"])
@pytest.mark.parametrize("given", ["t = Transpose<perm = [0,3,1,2]>(x) i = DequantizeLinear(t, s, z)",
                                   "d = DequantizeLinear(x, s, z) i = Transpose<perm = [0,3,1,2]>(d)"])
def test_quantised(given: str, kind: str) -> None:
    """Image, weights and bias are dequantised on their way, around the image is zero, and results are rounded."""
    made = lasts(
        f"g (T[2,14,15,24] x, float s, {kind} z, int8[24,1,3,3] w, float[24] q, int32[24] b, float[24] p) => (T[2,14,15,24] y) <float o = {{0.37}}> "
        f"{{ {given} k = DequantizeLinear<axis = 0>(w, q) a = DequantizeLinear<axis = 0>(b, p) "
        f"c = Conv<group = 24, pads = [1,1,1,1]>(i, k, a) r = Relu(c) e = QuantizeLinear(r, o, z) y = {LAST}(e) }}", kind)
    inputs = random_inputs(made, {})
    scales = {name: np.exp2(np.random.default_rng(0).integers(-8, -4, inputs[name].shape)).astype(np.float32) for name in "sqp"}
    check(made, inputs | scales, length=100)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["float16", "float"])
def test_windows(case: str, kind: str) -> None:
    """Every variant."""
    text, sizes = CASES[case]
    made = lasts(text, kind, sizes)
    check(made, random_inputs(made, sizes), length=100)


def test_bfloat16() -> None:
    made = lasts(PLAIN, "bfloat16")
    check(made, random_inputs(made, {}), length=9)


@pytest.mark.parametrize("shape", ["1,31,33,8", "3,1,64,8", "1,2,2,8", "0,4,4,8"])
def test_sizes(shape: str) -> None:
    made = lasts(PLAIN.replace("2,14,15,24", "N,H,W,8").replace("24", "8"))
    sizes = dict(zip("NHW", map(int, shape.split(",")[:3]), strict=True))
    check(made, random_inputs(made, sizes), length=9)


@pytest.mark.parametrize("case", [
    "three by three", "every other, uneven", "any size", "what is no zero at zero", "two images, a large window", "integers",
    "far beyond the image", "three axes"])
def test_every_choice(case: str) -> None:
    """Rows of pixels all at once among them, and one ahead of the other."""
    text, sizes = CASES[case]
    made = lasts(text, planned=sizes)
    assert len(made.kernel.choices) >= 5 and len({choice["rows"] > 1 for choice in made.kernel.choices}) == 2
    for choice in made.kernel.choices:
        kernel = make_kernel(Request(made.lowered, "test", sizes, choice), "stencil_last")
        assert isinstance(kernel, Kernel) and kernel.choice == choice and parse_choice(str(choice)) == choice
        one = only(replace(made, kernel=kernel), kernel.plan.variants[:1])
        check(one, random_inputs(made, sizes), length=49)


def test_blocks_in_any_order_go_through_many_strips() -> None:
    """Some through one more than others."""
    made = lasts(PLAIN.replace("2,14,15,24", "13,33,31,24"))
    for order in ("backward", 3):
        check(made, random_inputs(made, {}), length=9, orders=[order], multiprocessors=1)


def test_what_is_infinite_shows_in_its_windows_alone() -> None:
    made = lasts(PLAIN)
    inputs = random_inputs(made, {})
    inputs["x"][0, 0, 0, [0, 21]], inputs["x"][1, 13, 14, 8] = np.inf, np.nan
    check(made, inputs, length=9)


@pytest.mark.parametrize(("text", "message"), [
    (PLAIN.replace(f"y = {LAST}(c)", "y = Neg(c)"), "its images and results lie neither both channels first nor both last"),
    (PLAIN.replace("3,3] w", "13,11] w").replace("1,1,1,1", "6,5,6,5"),
     "windows of 143 elements over images that lie so; kernels have those up to 128")])
def test_refusals(text: str, message: str) -> None:
    found = attempt(parse(text.replace("T[", "float16[")))
    assert isinstance(found, Refusal) and (found.code, found.message) == ("stencil-structure", message)


@pytest.mark.parametrize("text", [
    PLAIN.replace("24,1,3,3", "24,2,3,3").replace("group = 24", "group = 12"),
    PLAIN.replace("[24,1,3,3] w, T[24] b", "[48,1,3,3] w, T[48] b")], ids=["no channel by itself", "two of each"])
def test_other_convolutions_are_products(text: str) -> None:
    made = make(text.replace("T[", "float16["))
    assert made.kernel.schedule == "product"


@pytest.mark.parametrize("window", ["3,3", "11,11"])
def test_weights_of_a_block_fit_shared_memory(window: str) -> None:
    reach = int(window.split(",")[0]) // 2
    text = PLAIN.replace("24", "1024").replace("3,3] w", f"{window}] w").replace("1,1,1,1", ",".join([str(reach)] * 4))
    made = lasts(text)
    assert made.kernel.choices
    for choice in (None, *made.kernel.choices):
        kernel = make_kernel(Request(made.lowered, "test", {}, choice), "stencil_last")
        assert isinstance(kernel, Kernel)
        shared = [int(step.shared) for variant in kernel.plan.variants for step in variant.launches]
        assert max(shared) <= 48 * 1024


@pytest.mark.parametrize("places", [1, 2, 7])
@pytest.mark.parametrize(("extent", "taps", "start", "stride", "dilation"), [
    (56, 7, -3, 1, 1), (7, 7, -3, 1, 1), (15, 3, 0, 2, 1), (33, 5, -3, 2, 1), (40, 5, -5, 1, 3), (9, 3, -9, 1, 1),
    (12, 3, 2, 2, 1), (5, 9, -4, 1, 1), (14, 3, -1, 3, 2)])
def test_what_may_be_beside_an_image_is_told_exactly(
    extent: int, taps: int, start: int, stride: int, dilation: int, places: int
) -> None:
    """Of every pixel under every strip, whether or not sizes are known."""
    for behind in (0, 1, 17):
        count = max(1, (extent + behind - start - (taps - 1) * dilation - 1) // stride + 1)
        for size, number in ((dim(extent), dim(count)), (symbol("H"), symbol("A"))):
            axis = StencilAxis(size, number, taps, dim(start), stride, dilation)
            edges = Edges.of(axis, places)
            for first, column in product(range(0, count, places), range(axis.span(places))):
                x = first * stride + start + column
                left = column >= edges.begin or (first > 0 if edges.first_alone else x >= 0)
                right = column < edges.end or (x < extent if edges.last is None else first < edges.last)
                assert (left and right) == (0 <= x < extent), (first, column, edges)


def test_middle_columns_are_not_asked_about() -> None:
    """Of 56 pixels in strips of seven, under windows of seven: three on each side, of the first and the last strip."""
    assert Edges.of(StencilAxis(dim(56), dim(56), 7, dim(-3)), 7) == Edges(3, 10, True, 49)


def test_weights_that_come_together_lie_in_different_banks() -> None:
    for vectors, width in ((24, 2), (16, 2), (24, 4), (18, 8), (3, 2), (32, 1)):
        pitch = StencilLastShape(1, 1, width, vectors, 1, 1).pitch
        assert len({(tap * pitch + channel) % BANKS for tap, channel in product(range(8), range(PIECE))}) == BANKS
        assert vectors * width <= pitch < vectors * width + BANKS and pitch % PIECE == 0


@pytest.mark.parametrize("window", ["3,3", "7,7"])
def test_rows_of_pixels_are_a_loop_where_a_window_is_large(window: str) -> None:
    """Where instructions are run from has no room for all of their products; those of a small one are asked for at
    once."""
    reach = int(window[0]) // 2
    text = PLAIN.replace("2,14,15,24", "32,56,56,96").replace("24", "96").replace("3,3] w", f"{window}] w")
    made = lasts(text.replace("1,1,1,1", ",".join([str(reach)] * 4)))
    body = made.kernel.source[made.kernel.source.index("stencil_last"):]
    kept = body[:body.index('extern "C"')].split("template <typename idx>")[0]
    loops = re.findall(r"#pragma unroll( 1)?\n *for \(int row = 0", kept)
    assert loops == (["", ""] if window == "3,3" else [" 1"])


@pytest.mark.parametrize("architecture", ["sm_75", "sm_90"])
@pytest.mark.parametrize("window", ["3,3", "5,5", "7,7"])
def test_it_fits_registers(architecture: str, window: str) -> None:
    reach = int(window[0]) // 2
    text = PLAIN.replace("2,14,15,24", "32,56,56,96").replace("24", "96").replace("3,3] w", f"{window}] w")
    made = lasts(text.replace("1,1,1,1", ",".join([str(reach)] * 4)))
    for choice in (None, *made.kernel.choices):
        kernel = make_kernel(Request(made.lowered, "test", {}, choice), "stencil_last")
        assert isinstance(kernel, Kernel)
        (name,) = {step.kernel for step in kernel.plan.variants[0].launches}
        code = kernel.code.keeping({name})  # type: ignore[union-attr]
        figures = default_compiler().figures(source_of(replace(kernel, code=code).source, kernel.plan), architecture)
        assert figures is not None and figures[name].spilled_bytes == 0, name
