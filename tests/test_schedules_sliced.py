"""Products that write parts of one result, also beside what is none: in the emulator against float64."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle, product

import numpy as np
import pytest
from emulator import EmulatorError, run_plan
from kernel_harness import (
    Made,
    Region,
    arguments,
    attempt,
    check,
    make,
    parse,
    random_inputs,
    region_of,
    short_inputs,
)

from onnxfuse.refusal import Refusal
from onnxfuse.schedules import SCHEDULES, Kernel, Request, make_kernel, sharing

LAST = "i = Transpose<perm = [0,3,1,2]>(x) k = Transpose<perm = [0,3,1,2]>(w) l = Transpose<perm = [0,3,1,2]>(v)"
BACK = "y = Transpose<perm = [0,2,3,1]>(z)"

REGIONS: Mapping[str, str] = {
    "SqueezeNet's": f"g (T[N,9,8,16] x, T[24,1,1,16] w, T[24] b, T[40,3,3,16] v, T[40] c) => (T[N,9,8,64] y) {{ {LAST} p = Conv(i, k, b) r = Relu(p) q = Conv<pads = [1,1,1,1]>(i, l, c) s = Relu(q) z = Concat<axis = 1>(r, s) {BACK} }}",
    "parts that no vector divides": f"g (T[N,9,8,16] x, T[7,1,1,16] w, T[5,3,3,16] v) => (T[N,9,8,12] y) {{ {LAST} p = Conv(i, k) q = Conv<pads = [1,1,1,1]>(i, l) z = Concat<axis = 1>(p, q) {BACK} }}",
    "channels first": "g (T[N,16,9,8] x, T[24,16,1,1] w, T[40,16,3,3] v) => (T[N,64,9,8] y) { p = Conv(x, w) q = Conv<pads = [1,1,1,1]>(x, v) y = Concat<axis = 1>(p, q) }",
    "products of two operands": "g (T[N,72] x, T[N,24] u, T[72,40] w, T[24,16] v) => (T[N,56] y) { p = MatMul(x, w) q = MatMul(u, v) g = Sigmoid(q) y = Concat<axis = 1>(p, g) }",
    "rows": "g (T[5,72] x, T[N,72] u, T[72,40] w) => (T[M,40] y) { p = MatMul(x, w) q = MatMul(u, w) y = Concat<axis = 0>(p, q) }",
    "three": "g (T[N,40] x, T[40,8] w, T[40,24] v, T[40,3] u) => (T[N,35] y) { p = MatMul(x, w) q = MatMul(x, v) r = MatMul(x, u) y = Concat<axis = 1>(p, q, r) }",
}
"""By what they are."""

BESIDE: Mapping[str, tuple[int, str]] = {
    "a reduction block's": (3, f"g (T[N,9,7,16] x, T[24,3,3,16] w, T[40,3,3,16] v) => (T[N,4,3,80] y) {{ {LAST} p = Conv<strides = [2,2]>(i, k) q = Conv<strides = [2,2]>(i, l) r = Relu(q) m = MaxPool<kernel_shape = [3,3], strides = [2,2]>(i) z = Concat<axis = 1>(p, m, r) {BACK} }}"),
    "means, channels first, of odd sizes": (2, "g (T[N,5,9,7] x, T[11,5,1,1] w) => (T[N,16,9,7] y) { m = AveragePool<kernel_shape = [3,3], pads = [1,1,1,1]>(x) p = Conv(x, w) y = Concat<axis = 1>(m, p) }"),
    "a window of computed numbers": (2, f"g (T[N,9,8,16] x, T[24,1,1,16] w) => (T[N,9,8,40] y) {{ i = Transpose<perm = [0,3,1,2]>(x) k = Transpose<perm = [0,3,1,2]>(w) r = Relu(i) m = MaxPool<kernel_shape = [3,3], pads = [1,1,1,1]>(r) n = Add(m, m) p = Conv(i, k) z = Concat<axis = 1>(p, n) {BACK} }}"),
    "scale and shift": (2, f"g (T[N,9,8,24] x, T[8,1,1,24] w, T[24] s, T[24] b, T[24] a, T[24] v) => (T[N,9,8,32] y) {{ i = Transpose<perm = [0,3,1,2]>(x) k = Transpose<perm = [0,3,1,2]>(w) e = Abs(v) n = BatchNormalization(i, s, b, a, e) q = Relu(n) p = Conv(i, k) z = Concat<axis = 1>(q, p) {BACK} }}"),
    "a larger image": (2, f"g (T[N,4,3,16] x, T[N,8,6,8] u, T[24,3,3,8] w) => (T[N,8,6,40] y) <float[4] t = {{1.0, 1.0, 2.0, 2.0}}> {{ i = Transpose<perm = [0,3,1,2]>(x) j = Transpose<perm = [0,3,1,2]>(u) k = Transpose<perm = [0,3,1,2]>(w) m = Resize<mode = \"nearest\", coordinate_transformation_mode = \"asymmetric\", nearest_mode = \"floor\">(i, , t) p = Conv<pads = [1,1,1,1]>(j, k) z = Concat<axis = 1>(m, p) {BACK} }}"),
    "passed on, two and one": (3, f"g (T[N,9,8,16] x, T[N,9,8,8] u, T[24,1,1,16] w) => (T[N,9,8,64] y) {{ i = Transpose<perm = [0,3,1,2]>(x) j = Transpose<perm = [0,3,1,2]>(u) k = Transpose<perm = [0,3,1,2]>(w) p = Conv(i, k) z = Concat<axis = 1>(i, j, p, i) {BACK} }}"),
    "passed on, channels first": (2, "g (T[N,8,9,8] x, T[24,8,1,1] w) => (T[N,32,9,8] y) { p = Conv(x, w) y = Concat<axis = 1>(x, p) }"),
    "passed on, what no vector divides": (2, f"g (T[N,9,8,7] x, T[N,9,8,9] u, T[5,3,3,7] w) => (T[N,9,8,21] y) {{ i = Transpose<perm = [0,3,1,2]>(x) j = Transpose<perm = [0,3,1,2]>(u) k = Transpose<perm = [0,3,1,2]>(w) p = Conv<pads = [1,1,1,1]>(i, k) z = Concat<axis = 1>(p, i, j) {BACK} }}"),
    "halves of an image": (2, f"g (T[N,9,8,32] x, T[16,3,3,16] w) => (T[N,9,8,48] y) {{ i = Transpose<perm = [0,3,1,2]>(x) k = Transpose<perm = [0,3,1,2]>(w) h, l = Split<axis = 1, num_outputs = 2>(i) c = Conv<pads = [1,1,1,1]>(l, k) p = Add(l, c) z = Concat<axis = 1>(h, l, p) {BACK} }}"),
    "rows passed on": (2, "g (T[3,72] x, T[72,40] w, T[N,40] u) => (T[M,40] y) { p = MatMul(x, w) y = Concat<axis = 0>(u, p) }"),
    "rows of as many as there are": (2, "g (T[N,72] x, T[N,24] u, T[72,40] w) => (T[N,64] y) { p = MatMul(x, w) g = Sigmoid(u) y = Concat<axis = 1>(p, g) }"),
    "something of another size": (2, "g (T[N,72] x, T[M,24] u, T[72,40] w) => (T[N,64] y) { p = MatMul(x, w) g = Sigmoid(u) y = Concat<axis = 1>(g, p) }"),
}
"""The same of products and of what is none, with the launches that they take."""


def made_of(name: str, kind: str = "float16") -> Made:
    made = make((BESIDE[name][1] if name in BESIDE else REGIONS[name]).replace("T[", f"{kind}["))
    assert made.kernel.schedule == "sliced"
    return made


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float"])
@pytest.mark.parametrize("name", REGIONS)
def test_regions(name: str, kind: str) -> None:
    """Every variant writes all of the result, and no more, in a launch for each product."""
    made = made_of(name, kind)
    count = sum(REGIONS[name].count(f"= {op}") for op in ("Conv", "MatMul"))
    assert all(len(variant.steps) == count for variant in made.kernel.plan.variants)
    for seed, rows in enumerate((1, 3, 37) if "MatMul" in REGIONS[name] else (1, 3)):
        check(made, inputs_of(made, rows, kind, seed), length=200)


KINDS = ("float16", "bfloat16", "float")

SOME = {*zip(BESIDE, cycle(KINDS)), *product(("a reduction block's", "passed on, two and one", "scale and shift"), KINDS)}


@pytest.mark.parametrize(("name", "kind"), sorted(SOME))
def test_what_is_no_product(name: str, kind: str) -> None:
    """The same in a launch for each window, and one for all neighbours that are copied."""
    made, (count, text) = made_of(name, kind), BESIDE[name]
    assert all(len(variant.steps) == count for variant in made.kernel.plan.variants)
    for seed, rows in enumerate((3, 37) if "MatMul" in text else (3,)):
        check(made, inputs_of(made, rows, kind, seed), length=200)


def inputs_of(made: Made, rows: int, kind: str, seed: int = 0) -> dict[str, np.ndarray]:
    return (short_inputs if kind == "float" else random_inputs)(made, {"N": rows, "M": rows}, seed)


BEHIND_ONE: Mapping[str, tuple[str, int]] = {
    "an inception block": (f"g (T[N,7,5,16] x, T[48,1,1,16] w, T[24] b, T[24,3,3,16] v, T[8,5,5,8] u, T[N,7,5,24] h, T[16,1,1,24] t) => (T[N,7,5,72] y) <int64[3] z = {{24,16,8}}, int64[2] one = {{1,2}}> {{ {LAST} p = Conv(i, k) c, d, e = Split<axis = 1>(p, z) a = Unsqueeze(b, one) q = Add(c, a) r = Relu(q) dd = Relu(d) dl = Transpose<perm = [0,2,3,1]>(dd) df = Transpose<perm = [0,3,1,2]>(dl) m = Conv<pads = [1,1,1,1]>(df, l) n = Transpose<perm = [0,3,1,2]>(u) o = Conv<pads = [2,2,2,2]>(e, n) oo = Relu(o) f = Transpose<perm = [0,3,1,2]>(h) g = Transpose<perm = [0,3,1,2]>(t) s = Conv(f, g) w2 = Concat<axis = 1>(r, m, oo, s) y = Transpose<perm = [0,2,3,1]>(w2) }}", 4),
    "channels first, and nothing of it alone": ("g (T[N,16,5,3] x, T[24,16,1,1] w, T[8,8,3,3] v, T[24,16,3,3] u) => (T[N,32,5,3] y) <int64[2] z = {8,16}> { p = Conv(x, w) c, d = Split<axis = 1>(p, z) m = Conv<pads = [1,1,1,1]>(c, v) o = Conv<pads = [1,1,1,1], dilations = [1,1]>(d, u) y = Concat<axis = 1>(m, o) }", 3),
    "steps, and two parts as they are": ("g (T[N,9,9,16] x, T[40,1,1,16] w, T[16,3,3,24] v) => (T[N,5,5,32] y) <int64[3] z = {8,8,24}> { i = Transpose<perm = [0,3,1,2]>(x) k = Transpose<perm = [0,3,1,2]>(w) l = Transpose<perm = [0,3,1,2]>(v) p = Conv<strides = [2,2]>(i, k) c, d, e = Split<axis = 1>(p, z) f = Sigmoid(d) g = Tanh(e) m = Conv<pads = [1,1,1,1]>(g, l) o = Concat<axis = 1>(f, m, c) y = Transpose<perm = [0,2,3,1]>(o) }", 2),
    "residuals of what lies between": ("g (T[N,24] x, T[24,40] w, T[16,16] v, T[N,8] h, T[8,24] u) => (T[N,40] y) <int64[2] z = {16,24}> { p = MatMul(x, w) c, d = Split<axis = 1>(p, z) e = Relu(c) m = MatMul(e, v) a = Add(m, e) q = MatMul(h, u) b = Add(q, d) y = Concat<axis = 1>(a, b) }", 3),
    "matrices": ("g (T[N,24] x, T[24,40] w, T[24,8] v) => (T[N,24] y) <int64[2] z = {16,24}> { p = MatMul(x, w) c, d = Split<axis = 1>(p, z) e = Relu(d) m = MatMul(e, v) y = Concat<axis = 1>(c, m) }", 2),
    "a copy and a window beside them": ("g (T[N,16,6,4] x, T[24,16,1,1] w, T[8,16,1,1] v, T[N,8,6,4] u, T[N,8,7,5] t) => (T[N,32,6,4] y) <int64[2] z = {8,16}> { p = Conv(x, w) c, d = Split<axis = 1>(p, z) e = Relu(d) m = Conv(e, v) s = Sigmoid(u) r = MaxPool<kernel_shape = [2,2]>(t) y = Concat<axis = 1>(s, c, r, m) }", 4),
}
"""Parts of which some are of one product that comes first, and in how many launches."""


@pytest.mark.parametrize(("name", "kind"), [
    *((name, "float16") for name in BEHIND_ONE), *(("an inception block", kind) for kind in ("bfloat16", "float"))])
def test_one_product_comes_first(name: str, kind: str) -> None:
    """What it leaves to others lies in scratch memory, rounded to its type, as tensor cores read it."""
    text, count = BEHIND_ONE[name]
    made = make(text.replace("T[", f"{kind}["))
    assert made.kernel.schedule == "sliced"
    assert all(len(variant.steps) == count for variant in made.kernel.plan.variants)
    for seed, rows in enumerate((0, 3)):
        inputs = (short_inputs if kind == "float" else random_inputs)(made, {"N": rows}, seed)
        # What the others read of it has no few digits: of float32 it is rounded to TF32.
        check(made, inputs, length=400, limit=2, misalign=False, slack=16.0 if kind == "float" else 1.0)


def test_tensor_maps_copy_what_lies_between() -> None:
    """From scratch memory, as they do from others; what is asked of its address holds there."""
    made = make("g (float16[N,64] x, float16[64,128] w, float16[64,64] v) => (float16[N,128] y) <int64[2] z = {64,64}> { p = MatMul(x, w) c, d = Split<axis = 1>(p, z) e = Relu(d) m = MatMul(e, v) y = Concat<axis = 1>(c, m) }")
    assert [each.base for each in made.kernel.plan.maps] == ["i0", "i1", "t0", "i2"]
    guards = [guard for each in made.kernel.plan.variants for guard in each.guards]
    assert "0 16 % 0 ==" in guards and not any("t0" in guard for guard in guards)


def test_nothing_beside_something() -> None:
    check(made_of("products of two operands"), random_inputs(made_of("products of two operands"), {"N": 0}), length=72)
    check(made_of("rows"), random_inputs(made_of("rows"), {"N": 0}), length=72)


def test_parts_of_nothing() -> None:
    """The values of new tokens behind those of earlier ones, of which there are none yet, or none come."""
    text = "g (float16[N,2,P,8] v, float16[N,S,24] x, float16[24,16] w) => (float16[N,2,K,8] y) <int64[4] s = {0, 0, 2, 8}> { p = MatMul(x, w) r = Reshape(p, s) t = Transpose<perm = [0,2,1,3]>(r) y = Concat<axis = 2>(v, t) }"
    made = make(text)
    assert made.kernel.schedule == "sliced"
    for images, before, new in ((2, 5, 3), (1, 0, 1), (2, 4, 0), (0, 1, 1)):
        check(made, random_inputs(made, {"N": images, "P": before, "S": new, "K": before + new}), length=24)


def test_vectors_begin_where_parts_do() -> None:
    """A part of which vectors would not be aligned in the whole is copied in narrower ones, and where sizes are open
    those that a run has decide."""
    text = "g (float16[N,C,4] x, float16[N,{0},4] u, float16[8,{0},1] w) => (float16[N,D,4] y) {{ p = Conv(u, w) y = Concat<axis = 1>({1}) }}"
    behind = {channels: make(text.format(channels, "p, x") if channels != 3 else text.format(channels, "x, p")) for channels in (3, 8)}
    for made in behind.values():
        for count in (2, 3):
            check(made, random_inputs(made, {"N": 2, "C": count, "D": 8 + count}), length=8)
    narrow = make("g (float16[N,3] x, float16[N,16] u, float16[16,6] w) => (float16[N,9] y) { p = MatMul(u, w) y = Concat<axis = 1>(p, x) }")
    assert all("width 1" in variant.name for variant in narrow.kernel.plan.variants)
    halved = make("g (float16[N,6] x, float16[N,16] u, float16[16,4] w) => (float16[N,10] y) { p = MatMul(u, w) y = Concat<axis = 1>(p, x) }")
    assert "width 2" in halved.kernel.plan.variants[0].name
    check(halved, random_inputs(halved, {"N": 5}), length=16)


def test_sizes_that_do_not_agree() -> None:
    text = "g (float16[\"s + 1\",8] x, float16[\"2*t\",24] u, float16[8,40] w) => (float16[N,64] y) { p = MatMul(x, w) g = Sigmoid(u) y = Concat<axis = 1>(p, g) }"
    made = make(text)
    assert made.kernel.schedule == "sliced"
    check(made, random_inputs(made, {"s": 5, "t": 3}), length=8)
    with pytest.raises(EmulatorError, match="does not hold between sizes"):
        run_plan(made.kernel.plan, made.kernel.source, arguments(made, random_inputs(made, {"s": 5, "t": 4})))


def test_what_a_copy_takes() -> None:
    """Bytes of each launch; what is read by a product and by copies counts for each of these once more."""
    text = f"g (float16[32,28,28,64] x, float16[96,1,1,64] w) => (float16[32,28,28,224] y) {{ i = Transpose<perm = [0,3,1,2]>(x) k = Transpose<perm = [0,3,1,2]>(w) p = Conv(i, k) m = MaxPool<kernel_shape = [3,3], pads = [1,1,1,1]>(i) z = Concat<axis = 1>(p, m, i) {BACK} }}"
    made = region_of(parse(text))
    assert isinstance(made, Region)
    expected = SCHEDULES["sliced"].expected(made.lowered, {}, 132)
    image = 2 * 32 * 28 * 28 * 64
    assert expected is not None and expected.steps == 3 and expected.read_again == 2 * image
    kernel = make_kernel(Request(made.lowered))
    assert isinstance(kernel, Kernel) and len(kernel.plan.variants[0].steps) == 3 and kernel.pace is not None
    copies = [launch for pace in kernel.pace.parts for launch in pace.launches]
    assert [launch.bytes for launch in copies] == [2 * image, 2 * image] and len(kernel.pace.parts) == 3
    assert [launch.flops > 0 for launch in copies] == [True, False]


def test_it_shares_no_launch() -> None:
    assert not sharing(made_of("three").kernel)


LEFT: Mapping[str, str] = {
    "nothing of a product": "g (T[N,72] x, T[N,24] u) => (T[N,96] y) { g = Sigmoid(u) y = Concat<axis = 1>(x, g) }",
    "a product twice": "g (T[N,72] x, T[72,40] w) => (T[N,80] y) { p = MatMul(x, w) y = Concat<axis = 1>(p, p) }",
    "a product and what is computed of it": "g (T[N,72] x, T[72,40] w) => (T[N,80] y) { p = MatMul(x, w) r = Relu(p) y = Concat<axis = 1>(p, r) }",
    "a window of a product": "g (T[N,8,9,7] x, T[8,8,1,1] w, T[8,8,1,1] v) => (T[N,16,9,7] y) { p = Conv(x, w) q = Conv(x, v) m = MaxPool<kernel_shape = [3,3], pads = [1,1,1,1]>(q) y = Concat<axis = 1>(p, m) }",
    "running totals in a part": "g (T[N,72] x, T[N,40] u, T[72,40] w) => (T[N,80] y) <int64 a = {1}> { p = MatMul(x, w) c = CumSum(u, a) y = Concat<axis = 1>(p, c) }",
    "two products in a part": "g (T[N,72] x, T[72,40] w, T[72,40] v, T[72,8] u) => (T[N,48] y) { p = MatMul(x, w) q = MatMul(x, v) r = Mul(p, q) s = MatMul(x, u) y = Concat<axis = 1>(r, s) }",
    "a norm in a part": "g (T[N,72] x, T[72,40] w, T[72,40] v, T[40] s) => (T[N,80] y) { p = MatMul(x, w) q = MatMul(x, v) n = LayerNormalization(q, s) y = Concat<axis = 1>(p, n) }",
    "two that come first": "g (T[N,72] x, T[N,72] h, T[72,40] w, T[72,40] v, T[16,8] u, T[16,8] t) => (T[N,64] y) <int64[2] z = {24,16}> { p = MatMul(x, w) a, b = Split<axis = 1>(p, z) q = MatMul(h, v) c, d = Split<axis = 1>(q, z) e = MatMul(b, u) f = MatMul(d, t) y = Concat<axis = 1>(a, e, c, f) }",
    "three one behind the other": "g (T[N,72] x, T[72,40] w, T[16,8] u, T[8,8] t) => (T[N,32] y) <int64[2] z = {24,16}> { p = MatMul(x, w) a, b = Split<axis = 1>(p, z) e = MatMul(b, u) f = MatMul(e, t) y = Concat<axis = 1>(a, f) }",
    "something behind": "g (T[N,72] x, T[72,40] w, T[72,40] v) => (T[N,80] y) { p = MatMul(x, w) q = MatMul(x, v) z = Concat<axis = 1>(p, q) y = Relu(z) }",
}


@pytest.mark.parametrize("name", LEFT)
def test_what_has_no_such_kernel(name: str) -> None:
    made = attempt(parse(LEFT[name].replace("T[", "float16["), 20))
    assert isinstance(made, Refusal) or made.kernel.schedule != "sliced"
