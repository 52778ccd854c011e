"""Products of quantised numbers as products of the integers, against float64: types, zero points, scales, layouts."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product as combined

import numpy as np
import pytest
from emulator import run_plan
from kernel_harness import Made, arguments, check, make, random_inputs, refused, told
from numpy.typing import NDArray

from onnxfuse.compiling import source_of
from onnxfuse.graph.dims import dim
from onnxfuse.ir.integers import MOST, numbers_of
from onnxfuse.ir.scalars import INT8, INT32, UINT8
from onnxfuse.ir.tensors import Input, Map, Window
from onnxfuse.runtime.compile import architectures, default_compiler

TYPES = ("int8", "uint8")
BYTES = "of::multiply_own_bytes"
PAIR = ("x = DequantizeLinear(a, s, z) w = DequantizeLinear<axis = {axis}>(b, t, u) ")
GIVEN = "float s, A z, float[N] t, B[N] u"
FORMS = {
    "plain": f"g (A[M,64] a, B[64,N] b, {GIVEN}) => (float[M,N] y) {{ {PAIR.format(axis=1)} y = MatMul(x, w) }}",
    "k last of both": f"g (A[M,64] a, B[N,64] b, {GIVEN}) => (float[M,N] y) {{ {PAIR.format(axis=0)} y = Gemm<transB = 1>(x, w) }}",
    "k first of both": f"g (A[64,M] a, B[64,N] b, {GIVEN}) => (float[M,N] y) {{ {PAIR.format(axis=1)} y = Gemm<transA = 1>(x, w) }}",
    "k first and last": f"g (A[64,M] a, B[N,64] b, {GIVEN}) => (float[M,N] y) {{ {PAIR.format(axis=0)} y = Gemm<transA = 1, transB = 1>(x, w) }}",
    "results across": f"g (A[M,64] a, B[64,N] b, {GIVEN}) => (float[N,M] y) {{ {PAIR.format(axis=1)} p = MatMul(x, w) y = Transpose(p) }}",
    "a batch": f"g (A[3,M,64] a, B[64,N] b, {GIVEN}) => (float[3,M,N] y) {{ {PAIR.format(axis=1)} y = MatMul(x, w) }}",
}
TAIL = ("g (int8[M,K] a, int8[K,N] b, float s, float t, float[N] c, float[M,N] r) => (int8[M,N] y) <float v = {0.0625}, int8 o = {3}> "
        "{ x = DequantizeLinear(a, s) w = DequantizeLinear(b, t) p = MatMul(x, w) q = Add(p, c) e = Relu(q) f = Add(e, r) y = QuantizeLinear(f, v, o) }")
SIZES = ({"M": 1, "N": 1}, {"M": 31, "N": 33}, {"M": 96, "N": 144}, {"M": 130, "N": 208})


def made_of(text: str, planned: Mapping[str, int] | None = None, **kinds: str) -> Made:
    for name, kind in kinds.items():
        text = re.sub(rf"\b{name}\b", kind, text)
    made = make(text, planned=planned)
    assert made.kernel.schedule == "product"
    return made


def is_integer(made: Made) -> bool:
    return BYTES in made.kernel.source


def inputs_of(made: Made, sizes: Mapping[str, int], seed: int = 0, *, points: bool = True) -> dict[str, NDArray]:
    """All numbers that 8 bits have, their zero points too, and scales that are powers of two."""
    random, found = np.random.default_rng(seed), random_inputs(made, sizes, seed)
    for name, array in found.items():
        if array.dtype in (np.int8, np.uint8):
            limits = np.iinfo(array.dtype)
            found[name] = random.integers(limits.min, limits.max + 1, array.shape).astype(array.dtype)
            if name in ("z", "u") and not points:
                found[name] = np.zeros_like(found[name])
        elif name in ("s", "t"):
            found[name] = np.exp2(random.integers(-6, 0, array.shape)).astype(array.dtype)
        elif array.dtype != np.int32:
            found[name] = np.round(array * 64).astype(array.dtype) / 64
    return found


@pytest.mark.parametrize(("left", "right"), [*combined(TYPES, TYPES)])
def test_types_and_zero_points(left: str, right: str) -> None:
    """Of either sign; every result is exact, for float32 holds it."""
    made = made_of(FORMS["plain"], A=left, B=right)
    assert is_integer(made)
    for seed, sizes in enumerate(SIZES):
        inputs = inputs_of(made, sizes, seed)
        check(made, inputs)
        (got,) = run_plan(made.kernel.plan, made.kernel.source, arguments(made, inputs))
        a, b = (inputs[name].astype(np.float64) - inputs[zero].astype(np.float64) for name, zero in ("az", "bu"))
        wanted = a @ b * inputs["s"].astype(np.float64) * inputs["t"]
        np.testing.assert_array_equal(got, wanted.astype(np.float32))


def test_what_no_zero_points_cost() -> None:
    """No totals."""
    texts = [made_of(FORMS["plain"].replace("(a, s, z)", given).replace("(b, t, u)", weights), A="int8", B="int8").kernel.source
             for given, weights in (("(a, s)", "(b, t)"), ("(a, s, z)", "(b, t)"), ("(a, s)", "(b, t, u)"))]
    assert [["row_totals = " in text, "column_totals = " in text] for text in texts] == [[False, False], [False, True], [True, False]]


@pytest.mark.parametrize("case", FORMS)
@pytest.mark.parametrize("left", TYPES)
def test_forms(case: str, left: str) -> None:
    """However operands and results lie, copied as they do."""
    made = made_of(FORMS[case], {"M": 144, "N": 96}, A=left, B="int8")
    assert is_integer(made) and made.kernel.code.functions[0].body.count("of::copy_async") == 2
    for sizes in ({"M": 17, "N": 33}, {"M": 144, "N": 80}):
        check(made, inputs_of(made, sizes))


@pytest.mark.parametrize(("scale", "axis", "vectors"), [("float o", 0, True), ("float[N] o", 1, False), ("float[M] o", 0, True)])
def test_results_that_are_quantised(scale: str, axis: int, vectors: bool) -> None:
    """By one scale, and by one of each column or row; on ties too, where a vector's are computed one by one."""
    given = GIVEN.replace("float[N] t", "float t").replace("B[N] u", "B u")
    text = f"g (A[M,64] a, B[64,N] b, {given}, {scale}) => (uint8[M,N] y) {{ {PAIR.format(axis=0)} p = MatMul(x, w) "
    made = made_of(f"{text} y = QuantizeLinear<axis = {axis}>(p, o) }}", {"M": 144, "N": 96}, A="int8", B="int8")
    assert is_integer(made) and ("of::quantised<unsigned char>(" in made.kernel.source) == vectors
    for sizes in ({"M": 17, "N": 33}, {"M": 144, "N": 80}):
        inputs = inputs_of(made, sizes)
        inputs["o"] = np.exp2(np.random.default_rng(1).integers(-4, 6, inputs["o"].shape)).astype(np.float32)
        check(made, inputs)


@pytest.mark.parametrize("depth", [1, 31, 33, 128, 136, 400, 4097])
def test_tails(depth: int) -> None:
    """Of what is summed over, with bias, activation, residual and the rounding to the next layer's numbers behind."""
    made = made_of(TAIL.replace("K]", f"{depth}]").replace("[K", f"[{depth}"))
    assert is_integer(made)
    for sizes in ({"M": 5, "N": 17}, {"M": 40, "N": 48}) if depth < 1000 else ({"M": 3, "N": 16},):
        inputs = inputs_of(made, sizes)
        inputs["s"] = np.float32(2.0**-12)
        inputs["r"] = np.round(inputs["r"])
        check(made, inputs)


@pytest.mark.parametrize("sizes", [{"M": 0, "N": 5}, {"M": 5, "N": 0}])
def test_nothing(sizes: Mapping[str, int]) -> None:
    made = made_of(FORMS["plain"], A="uint8", B="int8")
    check(made, inputs_of(made, sizes))


@pytest.mark.parametrize("order", ["backward", 3])
@pytest.mark.parametrize("case", ["plain", "k last of both"])
def test_threads_in_any_order(case: str, order: str | int) -> None:
    """Nobody multiplies a stage that is not there, or reads totals that are not."""
    made = made_of(FORMS[case].replace("64", "528"), {"M": 4096, "N": 4096}, A="uint8", B="int8")
    assert ("together" in made.kernel.code.functions[0].name) == (case != "plain")
    check(made, inputs_of(made, {"M": 70, "N": 144}), orders=[order], limit=1)


@pytest.mark.parametrize(("case", "groups"), [("plain", {1}), ("k last of both", {1, 4})])
def test_every_choice(case: str, groups: set[int]) -> None:
    """Tiles of all shapes, by four warps together where the instruction reads what lies so."""
    planned = {"M": 4096, "N": 4096}
    made = made_of(FORMS[case], planned, A="int8", B="uint8")
    assert len(made.kernel.choices) >= 5 and {choice["group"] for choice in made.kernel.choices} == groups
    for choice in made.kernel.choices:
        check(told(made, choice, planned), inputs_of(made, {"M": 140, "N": 272}), limit=1, misalign=False)


@pytest.mark.parametrize("text", [
    "g (A[M,64] a, int8[64,N] b, int8[64,N] c, float s, A z, float t, float v) => (float[M,N] y) "
    "{ x = DequantizeLinear(a, s, z) w = DequantizeLinear(b, t) e = DequantizeLinear(c, v) p = MatMul(x, w) q = MatMul(x, e) f = Sigmoid(p) y = Mul(f, q) }",
    "g (A[M,64] a, int8[64,N] b, int8[64,N] c, int8[64,N] d, float s, A z, float t, int8 u) => (float[M,N] k, float[M,N] l, float[M,N] y) "
    "{ x = DequantizeLinear(a, s, z) w = DequantizeLinear(b, t, u) e = DequantizeLinear(c, t) f = DequantizeLinear(d, t, u) k = MatMul(x, w) l = MatMul(x, e) y = MatMul(x, f) }",
], ids=["a gate", "queries, keys and values"])
@pytest.mark.parametrize("left", TYPES)
def test_products_side_by_side(text: str, left: str) -> None:
    """Each with the zero points that are its own."""
    made = made_of(text, {"M": 144, "N": 128}, A=left)
    assert is_integer(made)
    for sizes in ({"M": 33, "N": 17}, {"M": 70, "N": 144}):
        inputs = inputs_of(made, sizes) | {"t": np.float32(2.0**-8), "v": np.float32(2.0**-9)}
        check(made, inputs, slack=4)


@pytest.mark.parametrize("depth", [64, 528])
@pytest.mark.parametrize(("left", "right"), [("int8", "int8"), ("uint8", "int8")])
def test_a_warp_that_copies(left: str, right: str, depth: int) -> None:
    """Tiles by tensor maps, where there are no zero points: the schedule's own, and each way that tuning may take, one
    stage and several."""
    planned = {"M": 4096, "N": 4096}
    made = made_of(FORMS["k last of both"].replace("64", f"{depth}").replace(", z)", ")").replace("t, u)", "t)"), planned, A=left, B=right)
    ways = [None, *(each for each in made.kernel.choices if "turns" in dict(each.settings))]
    assert len(ways) == 3
    for choice in ways:
        own = told(made, choice, planned)
        assert "specialised" in own.kernel.plan.variants[0].launches[0].kernel and own.kernel.plan.maps
        check(own, inputs_of(own, {"M": 140, "N": 272}), limit=1, misalign=False)
    with_zeros = made_of(FORMS["k last of both"], planned, A=left, B=right)
    assert not any("turns" in dict(each.settings) for each in with_zeros.kernel.choices)


def test_no_blocks_share_integer_sums() -> None:
    """Those of a cluster add what others laid out as floats."""
    text = FORMS["k last of both"].replace("64", "8192").replace(", z)", ")").replace("t, u)", "t)")
    choices = made_of(text, {"M": 128, "N": 128}, A="int8", B="int8").kernel.choices
    assert choices and not any("split" in dict(each.settings) for each in choices)


def test_lines_are_more_than_threads() -> None:
    """Of three products' weights, whose totals a block's few threads take."""
    planned = {"M": 64, "N": 64}
    made = made_of("g (int8[M,64] a, int8[N,64] b, int8[N,64] c, int8[N,64] d, float s, int8 z) => (float[M,N] k, float[M,N] l, float[M,N] y) "
                   "{ x = DequantizeLinear(a, s, z) w = DequantizeLinear(b, s) e = DequantizeLinear(c, s) f = DequantizeLinear(d, s) "
                   "k = Gemm<transB = 1>(x, w) l = Gemm<transB = 1>(x, e) y = Gemm<transB = 1>(x, f) }", planned)
    choice = next(each for each in made.kernel.choices if (each["rows"], each["columns"], each["group"]) == (64, 192, 4))
    check(told(made, choice, planned), inputs_of(made, {"M": 70, "N": 80}), limit=1, misalign=False)


def test_heads() -> None:
    """Views between the rounding and the product, of both operands."""
    made = made_of("g (int8[2,S,64] a, uint8[2,T,64] b, float s, int8 z, float t, uint8 u) => (float[2,4,S,T] y) <int64[4] h = {2,-1,4,16}> "
                   "{ x = DequantizeLinear(a, s, z) w = DequantizeLinear(b, t, u) e = Reshape(x, h) f = Reshape(w, h) "
                   "q = Transpose<perm = [0,2,1,3]>(e) k = Transpose<perm = [0,2,3,1]>(f) y = MatMul(q, k) }")
    assert is_integer(made)
    check(made, inputs_of(made, {"S": 33, "T": 40}))


def test_an_operand_that_is_rounded_on_its_way() -> None:
    made = made_of("g (float[M,64] a, int8[64,N] b, float s, float t) => (float[M,N] y) <uint8 z = {128}> "
                   "{ q = QuantizeLinear(a, s, z) x = DequantizeLinear(q, s, z) w = DequantizeLinear(b, t) y = MatMul(x, w) }")
    assert is_integer(made)
    check(made, inputs_of(made, {"M": 33, "N": 48}))


@pytest.mark.parametrize("text", [
    "g (A[M,64] a, B[64,N] b, A[M,1] z, B[N] u) => (int32[M,N] y) { y = MatMulInteger(a, b, z, u) }",
    "g (A[2,M,64] a, B[2,64,N] b, A z, B u) => (int32[2,M,N] y) { y = MatMulInteger(a, b, z, u) }",
    "g (A[M,64] a, B[64,N] b, A z, float s, float[N] t) => (float[M,N] y) "
    "{ p = MatMulInteger(a, b, z) q = Cast<to = 1>(p) f = Mul(s, t) y = Mul(q, f) }",
    "g (A[M,64] a, B[64,N] b, A z, float s, float[N] t, B[N] u, A o) => (A[M,N] y) <float v = {40.7}> { y = QLinearMatMul(a, s, z, b, t, u, v, o) }",
    "g (A[M,64] a, B[64,N] b, A z, float s, float[N] t, float[N] c) => (float[M,N] y) { y = com.microsoft.MatMulIntegerToFloat(a, b, s, t, z, , c) }",
    "g (A[M,64] a, B[N,64] b, A z, float s, float[N] t, B[N] u, int32[N] c, A o) => (A[M,N] y) <float v = {40.7}> "
    "{ y = com.microsoft.QGemm<transB = 1>(a, s, z, b, t, u, c, v, o) }",
], ids=["by rows and columns", "a batch", "scaled", "rounded", "to floats", "with a bias of integers"])
@pytest.mark.parametrize(("left", "right"), [("uint8", "int8"), ("int8", "uint8")])
def test_operators_on_integers(text: str, left: str, right: str) -> None:
    made = made_of(text, A=left, B=right)
    assert is_integer(made)
    for sizes in SIZES[:3]:
        check(made, inputs_of(made, sizes))


IMAGES = {
    "one pixel": ("", (9, 8), (9, 8), (1, 1)),
    "steps": ("<strides = [2,3]>", (9, 8), (5, 3), (1, 1)),
    "nothing around it": ("", (9, 8), (7, 6), (3, 3)),
    "padded": ("<pads = [1,1,1,1], strides = [2,2]>", (9, 8), (5, 4), (3, 3)),
    "padded one pixel": ("<pads = [0,2,1,0]>", (9, 8), (10, 10), (1, 1)),
    "another padding on each side": ("<pads = [1,2,0,1], strides = [2,1], dilations = [1,2]>", (9, 8), (4, 7), (3, 3)),
    "nothing but padding": ("<pads = [4,4,4,4], dilations = [3,1]>", (3, 2), (8, 9), (2, 2)),
    "as many as there are": ('<auto_pad = "SAME_LOWER", strides = [2,2]>', (9, 8), (5, 4), (2, 2)),
}


def convolution(case: str, left: str, *, last: bool, channels: int = 16, features: int = 24, right: str = "int8",
                points: str = "zu", end: str = "") -> Made:
    """An image's convolution; ``last``: with channels last in image, weights and result; ``points``: which zero points
    there are."""
    attributes, (high, wide), (down, across), (tall, broad) = IMAGES[case]
    image, weights, result = f"2,{channels},{high},{wide}", f"{features},{channels},{tall},{broad}", f"2,{features},{down},{across}"
    before, behind, x, w, p = "", "", "x", "w", "p"
    if last:
        image, weights, result = (f"{n},{y},{z},{c}" for n, c, y, z in (each.split(",") for each in (image, weights, result)))
        before = "c = Transpose<perm = [0,3,1,2]>(x) d = Transpose<perm = [0,3,1,2]>(w)"
        behind, x, w, p = "p = Transpose<perm = [0,2,3,1]>(e)", "c", "d", "e"
    kind = "int8" if "QuantizeLinear" in end else "float"
    zero, point = (f", {name}" if name in points else "" for name in "zu")
    return made_of(
        f"g (A[{image}] a, B[{weights}] b, float s, A z, float[{features}] t, B[{features}] u) => ({kind}[{result}] y) "
        f"<float o = {{0.37}}, int8 i = {{-5}}> {{ x = DequantizeLinear(a, s{zero}) w = DequantizeLinear<axis = 0>(b, t{point}) "
        f"{before} {p} = Conv{attributes}({x}, {w}) {behind} {end or 'y = Identity(p)'} }}", A=left, B=right)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("left", TYPES)
@pytest.mark.parametrize("case", IMAGES)
def test_convolutions(case: str, left: str, last: bool) -> None:
    """What is around an image means zero, which its zero point says; exact, as products are."""
    for right, points in (("int8", "z"), ("uint8", "zu")):
        made = convolution(case, left, last=last, right=right, points=points)
        assert is_integer(made)
        check(made, inputs_of(made, {}))


def test_images_are_copied() -> None:
    """Vectors of channels, with the zero point where an image has none; without one, what is around it is zero."""
    for points, padded in (("z", 1), ("", 0)):
        body = convolution("padded", "uint8", last=True, points=points).kernel.code.functions[0].body
        assert (body.count("of::copy_async("), body.count("of::copy_padded(")) == (2 - padded, padded)


@pytest.mark.parametrize(("channels", "features"), [(2, 9), (3, 8), (17, 33), (20, 12), (48, 40)])
@pytest.mark.parametrize("last", [False, True])
def test_channels(channels: int, features: int, last: bool) -> None:
    """Those that no vector divides are read one by one; behind the sums is what there is behind those of products."""
    made = convolution("another padding on each side", "uint8", last=last, channels=channels, features=features,
                       end="r = Relu(p) y = QuantizeLinear(r, o, i)")
    assert is_integer(made) and ("of::copy_padded" in made.kernel.source) == (last and channels % 16 == 0)
    inputs = inputs_of(made, {})
    check(made, inputs | {"s": np.float32(2.0**-9)})


@pytest.mark.parametrize("text", [
    "g (A[2,16,9] a, B[24,16,3] b, float s, A z, float[24] t) => (float[2,24,9] y) "
    "{ x = DequantizeLinear(a, s, z) w = DequantizeLinear<axis = 0>(b, t) y = Conv<pads = [1,1]>(x, w) }",
    "g (A[1,4,3,5,4] a, B[6,4,2,3,3] b, float s, A z, float[6] t) => (float[1,6,4,5,4] y) "
    "{ x = DequantizeLinear(a, s, z) w = DequantizeLinear<axis = 0>(b, t) y = Conv<pads = [1,1,1,1,1,1]>(x, w) }",
    "g (A[B1,16,H,W] a, B[24,16,3,3] b, float s, A z, float t, int32[24] c) => (float[B1,24,H,W] y) "
    "{ x = DequantizeLinear(a, s, z) w = DequantizeLinear(b, t) f = Mul(s, t) d = DequantizeLinear(c, f) y = Conv<pads = [1,1,1,1]>(x, w, d) }",
    "g (A[2,12,7,5] a, B[8,6,3,3] b, float s, A z, float t) => (float[2,8,7,5] y) "
    "{ x = DequantizeLinear(a, s, z) w = DequantizeLinear(b, t) y = Conv<pads = [1,1,1,1], group = 2>(x, w) }",
    "g (float[2,16,7,5] f, B[24,16,3,3] b, float s, A z, float t) => (float[2,24,7,5] y) "
    "{ a = QuantizeLinear(f, s, z) x = DequantizeLinear(a, s, z) w = DequantizeLinear(b, t) y = Conv<pads = [1,1,1,1]>(x, w) }",
    "g (A[2,16,7,5] a, B[24,16,3,3] b, A z, B[24] u) => (int32[2,24,7,5] y) { y = ConvInteger<pads = [1,1,1,1]>(a, b, z, u) }",
    "g (A[2,7,5,16] a, B[24,16,3,3] b, A z, B u) => (int32[2,24,7,5] y) "
    "{ c = Transpose<perm = [0,3,1,2]>(a) y = ConvInteger<pads = [2,0,1,1]>(c, b, z, u) }",
    "g (A[2,16,7,5] a, B[24,16,3,3] b, float s, A z, float[24] t, B[24] u, int32[24] c, A i) => (A[2,24,4,3] y) <float o = {40.7}> "
    "{ y = QLinearConv<pads = [1,1,1,1], strides = [2,2]>(a, s, z, b, t, u, o, i, c) }",
], ids=["a line", "a volume", "any size, with a bias", "groups", "rounded on its way", "integers", "integers, channels last", "rounded"])
@pytest.mark.parametrize(("left", "right"), [("uint8", "int8"), ("int8", "uint8")])
def test_forms_of_convolutions(text: str, left: str, right: str) -> None:
    made = made_of(text, A=left, B=right)
    assert is_integer(made)
    for sizes in ({"B1": 1, "H": 1, "W": 1}, {"B1": 3, "H": 5, "W": 9}) if "B1" in text else ({},):
        inputs = inputs_of(made, sizes)
        if "c" in inputs:
            inputs["c"] = np.random.default_rng(0).integers(-9999, 9999, inputs["c"].shape).astype(np.int32)
        check(made, inputs, slack=4)


@pytest.mark.parametrize("case", ["padded", "another padding on each side", "steps"])
@pytest.mark.parametrize("left", TYPES)
def test_windows_in_boxes(case: str, left: str) -> None:
    """Copied by tensor maps, 128 channels at a time, where there are no zero points: what these put around an image is
    zero."""
    for channels in (256, 176):  # two stages, and one with a part of another
        made = convolution(case, left, last=True, channels=channels, features=72, points="")
        ways = [each for each in made.kernel.choices if "taps" in dict(each.settings)]
        assert len(ways) == 3
        for choice in ways:
            own = told(made, choice, {})
            assert "product_int8" in own.kernel.plan.variants[0].launches[0].kernel and own.kernel.plan.maps
            check(own, inputs_of(own, {}), limit=1, misalign=False)
    for channels, points in ((256, "z"), (256, "u"), (200, "")):
        other = convolution(case, left, last=True, channels=channels, features=72, points=points)
        assert not any("taps" in dict(each.settings) for each in other.kernel.choices)


def test_windows_of_a_volume_in_boxes() -> None:
    made = made_of("g (int8[2,3,5,6,128] a, int8[40,3,2,3,128] b, float s, float[40] t) => (float[2,3,4,6,40] y) { "
                   "x = DequantizeLinear(a, s) w = DequantizeLinear<axis = 0>(b, t) "
                   "c = Transpose<perm = [0,4,1,2,3]>(x) d = Transpose<perm = [0,4,1,2,3]>(w) "
                   "p = Conv<pads = [1,0,1,1,0,1]>(c, d) y = Transpose<perm = [0,2,3,4,1]>(p) }")
    ways = [each for each in made.kernel.choices if dict(each.settings).get("taps") == 18]
    assert ways
    for choice in ways:
        own = told(made, choice, {})
        check(own, inputs_of(own, {}), limit=1, misalign=False)


@pytest.mark.parametrize("rows", ["[2,128,256]", "[2,N,256]", "[2,9,15,256]"])
def test_weights_that_lie_across_the_sum_have_no_boxes(rows: str) -> None:
    """The instruction would read what no tensor map brings: rows of several axes are windows of one place too."""
    made = made_of(f"g (int8{rows} a, int8[256,192] b, float s, float t) => (float{rows.replace('256', '192')} y) "
                   "{ x = DequantizeLinear(a, s) w = DequantizeLinear(b, t) y = MatMul(x, w) }", {"N": 128})
    assert is_integer(made) and not any("taps" in dict(each.settings) for each in made.kernel.choices)


def test_boxes_compile_and_spill_nothing() -> None:
    made = convolution("padded", "uint8", last=True, channels=256, features=256, points="")
    for choice in (each for each in made.kernel.choices if "taps" in dict(each.settings)):
        own = told(made, choice, {}).kernel
        figures = default_compiler().figures(source_of(own.source, own.plan), "sm_90a")
        assert all(each.spilled_bytes == 0 for name, each in figures.items() if "specialised" in name), figures


@pytest.mark.parametrize("kind", [INT8, UINT8])
def test_a_zero_point_of_another_type(kind: int) -> None:
    """Stands not for what is around an image's numbers, which is of their type."""
    image, zero = Input(INT8, (dim(9),), 0), Input(kind, (), 1)
    less = Map(INT32, image.shape, "sub", tuple(Map(INT32, each.shape, "cast", (each,)) for each in (image, zero)))
    found = numbers_of(Window(INT32, (dim(9), dim(3)), less, (0,), (dim(-1),), (1,), (1,)))
    assert (found is not None) == (kind == INT8)
    assert found is None or (isinstance(found.numbers, Window) and found.numbers.outside is found.zero is zero)


@pytest.mark.parametrize("points", ["z", "zu"])
def test_every_choice_of_a_convolution(points: str) -> None:
    """Tiles of all shapes, by four warps together too, whoever of the block is first."""
    made = convolution("another padding on each side", "uint8", last=True, channels=80, features=72, points=points)
    assert {choice["group"] for choice in made.kernel.choices} == {1, 4}
    for order, choice in zip(["backward", 3] * len(made.kernel.choices), made.kernel.choices, strict=False):
        check(told(made, choice, {}), inputs_of(made, {}), orders=[order], limit=1, misalign=False)


@pytest.mark.parametrize("seed", range(12))
def test_random_products(seed: int) -> None:
    """Of any types, layouts, zero points, scales, what is before and what is behind, at any sizes."""
    random = np.random.default_rng(seed)

    def one(*choices: str) -> str:
        return choices[random.integers(len(choices))]

    left, right, flips = one(*TYPES), one(*TYPES), random.integers(2, size=2)
    sizes = dict(zip("MNK", (int(one("1", "16", "17", "64", "80", "130", "144")) for _ in range(3)), strict=True))
    a, b = ("K,M" if flips[0] else "M,K"), ("N,K" if flips[1] else "K,N")
    zero, point = one("", ", z"), one("", ", u")
    scales, points = one("", "[N]"), "[N]"
    if not scales:
        points = ""
    before, x = one(("", "a"), ("r = Relu(f) a = QuantizeLinear(r, s, z)", "f"))  # type: ignore[arg-type]
    given = f"float[{a}] f" if x == "f" else f"{left}[{a}] a"
    end = one("y = Identity(p)", "q = Add(p, c) g = Sigmoid(q) y = Mul(q, g)", "q = Add(p, c) y = QuantizeLinear(q, o, e)")
    kind = "int8" if "QuantizeLinear" in end else "float"
    text = (f"g ({given}, {right}[{b}] b, float s, {left} z, float{scales} t, {right}{points} u, float[N] c) => ({kind}[M,N] y) "
            f"<float o = {{0.37}}, int8 e = {{-5}}> {{ {before} x = DequantizeLinear(a, s{zero}) "
            f"w = DequantizeLinear<axis = {0 if flips[1] else 1}>(b, t{point}) p = Gemm<transA = {flips[0]}, transB = {flips[1]}>(x, w) {end} }}")
    text = re.sub(r"(?<=[\[,])K(?=[,\]])", str(sizes.pop("K")), text)
    made = made_of(text, sizes if random.integers(2) else None)
    assert is_integer(made)
    check(made, inputs_of(made, sizes, seed), slack=4)


@pytest.mark.parametrize(("depth", "left", "zero", "held"), [
    (MOST // 128 // 128, "int8", "", True), (MOST // 128 // 128 + 1, "int8", "", False), (MOST // 255 // 128, "uint8", "", True),
    (MOST // 255 // 128 + 1, "int8", ", z", False), (80000, "uint8", ", o", True), (80000, "uint8", ", z", False)])
def test_sums_that_int32_holds(depth: int, left: str, zero: str, held: bool) -> None:
    """Others are of floats, as are those of nobody knows how many."""
    text = (f"g (A[M,D] a, int8[D,N] b, float s, float t, A z) => (float[M,N] y) <A o = {{{128 if left == 'uint8' else 0}}}> "
            f"{{ x = DequantizeLinear(a, s{zero}) w = DequantizeLinear(b, t) y = MatMul(x, w) }}")
    assert is_integer(made_of(text.replace("D]", f"{depth}]").replace("[D", f"[{depth}"), A=left)) == held
    assert not is_integer(made_of(text, A=left))


@pytest.mark.parametrize("text", [
    "g (int8[M,64] a, int8[64,N] b, float s, float[64] t) => (float[M,N] y) { x = DequantizeLinear(a, s) w = DequantizeLinear<axis = 0>(b, t) y = MatMul(x, w) }",
    "g (float[M,64] x, int8[64,N] b, float t) => (float[M,N] y) { w = DequantizeLinear(b, t) y = MatMul(x, w) }",
    "g (int8[M,64] a, int16[64,N] b, float s, float t) => (float[M,N] y) { x = DequantizeLinear(a, s) w = DequantizeLinear(b, t) y = MatMul(x, w) }",
    "g (int8[M,64] a, int8[64,N] b, float[64,N] c, float s, float t) => (float[M,N] y) "
    "{ x = DequantizeLinear(a, s) w = DequantizeLinear(b, t) p = MatMul(x, w) q = MatMul(x, c) y = Mul(p, q) }",
], ids=["a scale along the sum", "weights alone", "16 bits", "one of two"])
def test_what_stays_a_product_of_floats(text: str) -> None:
    assert not is_integer(made_of(text))


@pytest.mark.parametrize("text", [
    "g (int8[M,64] a, int8[64,N] b, int8[1,64] z) => (int32[M,N] y) { p = Cast<to = 6>(a) q = Cast<to = 6>(z) d = Sub(p, q) w = Cast<to = 6>(b) y = MatMul(d, w) }",
    "g (int32[M,64] a, int32[64,N] b) => (int32[M,N] y) { y = MatMul(a, b) }"])
def test_what_has_no_kernel(text: str) -> None:
    """Zero points that change along the sum, and integers that are not quantised."""
    assert refused(text).code == "product-structure"


@pytest.mark.parametrize("architecture", architectures())
def test_they_compile_and_spill_nothing(architecture: int) -> None:
    """What is planned for large products and images, all signs among it."""
    for left, right in combined(TYPES, TYPES):
        product = made_of(FORMS["k last of both" if left == right else "plain"], {"M": 4096, "N": 4096}, A=left, B=right)
        image = convolution("another padding on each side", left, last=True, channels=256, features=256, right=right)
        for made in (product, image):
            figures = default_compiler().figures(source_of(made.kernel.source, made.kernel.plan), f"sm_{architecture}")
            run = {name: each for name, each in figures.items()
                   if "_v" in name and (architecture == 90 or "together" not in name)}
            assert run and all(each.spilled_bytes == 0 for each in run.values()), figures
