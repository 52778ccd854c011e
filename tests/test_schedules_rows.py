"""The row schedule: rows of every length, several reductions and outputs, masks, norms through views.

All variants that hold, aligned and not; where threads meet at barriers, in several orders.  float32 is compared with
the tolerance of its reductions' length, float16 and bfloat16 with two units in the last place of the largest output.
"""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

import numpy as np
import pytest
from emulator import variants_that_hold
from kernel_harness import NAMES, arguments, check, make, random_inputs, sweep
from reference import FLOATS, evaluate

ORDERS = ("forward", "backward", 7)
LENGTHS = (1, 2, 3, 7, 8, 9, 31, 32, 33, 63, 64, 65, 100, 127, 128, 255, 256, 257, 768, 1000, 1023, 1024, 1025, 2048, 4096)

SOFTMAX = "g (T[R,C] x) => (T[R,C] y) { y = Softmax(x) }"
NORM = ("g (T[R,C] x, T[R,C] r, T[C] w, T[C] b) => (T[R,C] y, T[R,C] s) "
        "{ s = Add(x, r) y = LayerNormalization(s, w, b) }")
BOTH = ("g (T[R,C] x) => (T[R,C] y, T[R,1] m, T[R] t) <int64[1] a = {1}> "
        "{ m = ReduceMax(x, a) d = Sub(x, m) e = Exp(d) t = ReduceSum<keepdims=0>(e, a) u = Unsqueeze(t, a) y = Div(e, u) }")


def typed(text: str, kind: str) -> str:
    return text.replace("T[", f"{kind}[")


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("text", [SOFTMAX, NORM], ids=["softmax", "norm"])
def test_known_lengths(text: str, length: int) -> None:
    sweep(typed(text, "float").replace("C]", f"{length}]"), {"R": 1}, {"R": 5}, length=length)


@pytest.mark.parametrize("kind", ["float", "float16", "bfloat16", "double"])
@pytest.mark.parametrize("text", [SOFTMAX, NORM, BOTH], ids=["softmax", "norm", "both"])
def test_lengths_known_only_when_running(text: str, kind: str) -> None:
    made = make(typed(text, kind))
    for length in LENGTHS:
        check(made, random_inputs(made, {"R": 3, "C": length}), length=length, limit=None if length < 300 else 3)


@pytest.mark.parametrize("kind", ["float", "float16"])
def test_long_rows(kind: str) -> None:
    for length in (10_000, 100_000):
        for text in (SOFTMAX, NORM):
            sweep(typed(text, kind).replace("C]", f"{length}]"), {"R": 2}, length=length, misalign=False)


@pytest.mark.slow
def test_a_row_of_a_million() -> None:
    sweep(typed(NORM, "float").replace("C]", "1000000]"), {"R": 1}, length=1_000_000, misalign=False)


@pytest.mark.parametrize("length", [64, 100, 1000, 5000])
def test_no_barrier_is_missing(length: int) -> None:
    """Threads take turns in other orders, and a row is shared by a part of a warp, a warp, several, a block."""
    for text in (SOFTMAX, NORM, BOTH):
        sweep(typed(text, "float").replace("C]", f"{length}]"), {"R": 3}, length=length, orders=ORDERS, misalign=False)
        sweep(typed(text, "float"), {"R": 3, "C": length}, length=length, orders=ORDERS, misalign=False)


def test_every_way_to_share_a_row_is_run() -> None:
    """Lengths chosen above reach every variant of a kernel of unknown length."""
    made = make(typed(SOFTMAX, "float16"))
    seen = set()
    for length in LENGTHS:
        seen |= set(variants_that_hold(made.kernel.plan, arguments(made, random_inputs(made, {"R": 2, "C": length}))))
    assert seen == {variant.name for variant in made.kernel.plan.variants}


@pytest.mark.parametrize(("length", "name"), [
    (24, "rows_2_w4_x3_32"), (32, "rows_8_w4_x1_32"), (64, "rows_16_w4_x1_32"), (128, "rows_16_w4_x2_32"),
    (197, "rows_32_w1_x7_32"), (256, "rows_16_w4_x4_32"),
])
def test_many_short_rows_have_the_threads_that_were_measured_to_be_best(length: int, name: str) -> None:
    made = make(typed(SOFTMAX, "float").replace("C]", f"{length}]"), planned={"R": 65536})
    assert made.kernel.plan.variants[0].name == name


def test_rows_of_open_length_have_few_ways() -> None:
    """Long rows that stream are read by vectors wherever they begin."""
    assert [variant.name for variant in make(typed(SOFTMAX, "float")).kernel.plan.variants] == [
        "rows_32_w4_x8_32", "rows_256_w4_x8_32", "rows_32_w1_x32_32", "rows_256_w4_stream_peeled_32", "rows_256_w1_stream_64"]


def test_what_the_last_phase_alone_reads_is_asked_for_before_the_first() -> None:
    assert "early ?" in make(typed(NORM, "float")).kernel.source
    assert "early ?" not in make(typed(SOFTMAX, "float")).kernel.source


def test_a_variant_for_the_planned_length_comes_first() -> None:
    made = make(typed(SOFTMAX, "float"), planned={"R": 64, "C": 384})
    plain = make(typed(SOFTMAX, "float"))
    assert len(made.kernel.plan.variants) >= len(plain.kernel.plan.variants)
    for length in (384, 383, 385, 1, 5000):
        check(made, random_inputs(made, {"R": 3, "C": length}), length=length)


MASKED = ("g (T[R,C] x, T[R,C] m) => (T[R,C] y, T[R,C] z, T[R,C] w) "
          "{ s = Add(x, m) y = Softmax(s) z = onnxfuse.canonical.SafeSoftmax(s) w = LogSoftmax(s) }")


@pytest.mark.parametrize("kind", ["float", "float16", "bfloat16"])
@pytest.mark.parametrize("mask", [-np.inf, -65504.0, -1e4])
@pytest.mark.parametrize("length", [5, 33, 300])
def test_masked_rows(kind: str, mask: float, length: int) -> None:
    """No, some and all elements masked; a row that is wholly -infinity is NaN, or 0 where NaN is guarded.

    The sum of -65504 and a score overflows float16, but not float32, in which the kernel computes.
    """
    made = make(typed(MASKED, kind))
    dtype = FLOATS[NAMES[kind]]
    rng = np.random.default_rng(length)
    # Multiples of 1/64 below 16, which float32 can add to the mask.
    x = (np.round(rng.standard_normal((4, length)) * 192) / 64).astype(dtype)
    m = np.zeros((4, length), dtype)
    m[1, ::2], m[2, : length - 1], m[3] = mask, mask, mask
    expected = evaluate(made.model, {"x": x, "m": m})
    assert np.isnan(expected["y"][3]).all() == np.isinf(mask) and np.isfinite(expected["z"]).all()
    check(made, {"x": x, "m": m}, length=length)


def test_nan_guard_as_exporters_write_it() -> None:
    text = ("g (float16[R,C] x, float16[R,C] m) => (float16[R,C] y) <float16 zero = {0}> "
            "{ s = Add(x, m) p = Softmax(s) n = IsNaN(p) y = Where(n, zero, p) }")
    made = make(text)
    x = np.random.default_rng(0).standard_normal((3, 40)).astype(np.float16)
    m = np.zeros((3, 40), np.float16)
    m[1], m[2, 20:] = -np.inf, -np.inf
    check(made, {"x": x, "m": m}, length=40)


@pytest.mark.parametrize("classes", [2, 9, 100, 1000])
def test_log_softmax_and_gather(classes: int) -> None:
    made = make("g (float[N,C] x, int64[N,1] l) => (float[N,1] y) "
                "{ p = LogSoftmax(x) q = GatherElements<axis=1>(p, l) y = Neg(q) }")
    rng = np.random.default_rng(classes)
    labels = rng.integers(-classes, classes, (7, 1))
    check(made, {"x": rng.standard_normal((7, classes)).astype(np.float32), "l": labels}, length=classes)


REGIONS = [
    ("mean and variance", "g (T[R,96] x) => (T[R,1] m, T[R,1] v) <int64[1] a = {1}> "
     "{ m = ReduceMean(x, a) d = Sub(x, m) q = Mul(d, d) v = ReduceMean(q, a) }"),
    ("independent reductions", "g (T[R,50] x, T[R,50] z) => (T[R,50] y, T[R] s) <int64[1] a = {1}> "
     "{ m = ReduceMax(x, a) n = ReduceMin(z, a) t = Sub(m, n) y = Mul(t, x) p = Mul(x, z) s = ReduceSum<keepdims=0>(p, a) }"),
    ("residual sums", "g (T[R,64] x, T[R,64] r, T[R,64] q, T[64] w) => (T[R,64] y, T[R,64] s, T[R,64] t) "
     "{ s = Add(x, r) t = Add(s, q) y = SimplifiedLayerNormalization(t, w) }"),
    ("norm of a norm", "g (T[R,64] x, T[64] w) => (T[R,64] y) "
     "{ a = LayerNormalization(x, w) b = Mul(a, x) c = Softmax(b) d = Add(c, a) y = LayerNormalization(d, w) }"),
    ("group norm through reshapes", "g (T[N,16,3,5] x, T[4] w, T[4] b, T[16,1,1] u, T[16,1,1] v) => (T[N,16,3,5] y) "
     "<int64[3] s = {0,4,-1}, int64[4] t = {-1,16,3,5}> { r = Reshape(x, s) n = InstanceNormalization(r, w, b) "
     "k = Reshape(n, t) l = Mul(k, u) m = Add(l, v) g1 = Sigmoid(m) y = Mul(m, g1) }"),
    ("trailing axes", "g (T[N,3,4,7] x) => (T[N,3,1,1] m, T[N,3] s, T[N,3,4,7] y) <int64[2] a = {-1,-2}> "
     "{ m = ReduceMean(x, a) s = ReduceMax<keepdims=0>(x, a) y = Sub(x, m) }"),
    ("axes with ones between", "g (T[N,1,4,1] x) => (T[N,1,1,1] y) <int64[1] a = {2}> { y = ReduceSum(x, a) }"),
    ("a transposed operand", "g (T[33,N] x) => (T[N,33] y) { t = Transpose(x) y = Softmax(t) }"),
    ("elements that repeat", "g (T[R,8,1] x) => (T[R,128] y) <int64[3] e = {1,1,16}, int64[2] s = {-1,128}> "
     "{ a = Expand(x, e) b = Reshape(a, s) m = LogSoftmax(b) y = Mul(m, b) }"),
    ("a statistic beside its row", "g (T[R,64] x, T[R,63] z) => (T[R,64] y) <int64[1] a = {1}> "
     "{ m = ReduceMean(x, a) y = Concat<axis=1>(m, z) }"),
    ("rows in parts", "g (T[R,24] x, T[R,40] z) => (T[R,64] y) { c = Concat<axis=1>(x, z) y = Softmax(c) }"),
    ("halves of a norm", "g (T[R,64] x, T[64] w) => (T[R,64] y) <int64[1] z = {0}, int64[1] h = {32}, int64[1] e = {64}, "
     "int64[1] a = {1}> { n = LayerNormalization(x, w) l = Slice(n, z, h, a) k = Slice(n, h, e, a) m = Neg(k) "
     "y = Concat<axis=1>(m, l) }"),
    ("a constant row", "g (T[R,1] x) => (T[R,1] y) <int64[1] a = {1}, int64[2] e = {1,20}> { b = Expand(x, e) y = ReduceSum(b, a) }"),
    ("a product of outer sizes", "g (T[N,1] x, T[1,M] z) => (T[N,1] y) <int64[1] a = {1}> { s = Add(x, z) y = ReduceMax(s, a) }"),
    ("everything", "g (T[N,7] x) => (T y) { q = Mul(x, x) y = ReduceMean<keepdims=0>(q) }"),
]


@pytest.mark.parametrize("kind", ["float", "float16"])
@pytest.mark.parametrize("text", [text for _, text in REGIONS], ids=[name for name, _ in REGIONS])
def test_regions(text: str, kind: str) -> None:
    for name in ("T y)", "T y "):
        text = text.replace(name, f"{kind} {name[2:]}")
    sweep(typed(text, kind), {"N": 1, "R": 1, "M": 1}, {"N": 6, "R": 6, "M": 40}, {"N": 33, "R": 33, "M": 300},
          length=300, orders=("forward", "backward"))


@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("name", ["ReduceSum", "ReduceMax", "ReduceMin", "ReduceMean", "ReduceProd"])
def test_keepdims(name: str, keepdims: int) -> None:
    shape = "N,3,1,1" if keepdims else "N,3"
    sweep(f"g (float[N,3,4,5] x) => (float[{shape}] y) <int64[2] a = {{2,3}}> {{ y = {name}<keepdims={keepdims}>(x, a) }}",
          {"N": 1}, {"N": 50}, length=20)


@pytest.mark.parametrize("kind", ["int32", "int64", "uint32", "uint64"])
def test_integers_at_their_limits(kind: str) -> None:
    """Sums and products wrap; the largest and smallest are exact, with neutral elements that change nothing."""
    made = make(typed("g (T[R,C] x) => (T[R,1] s, T[R,1] p, T[R,1] a, T[R,1] b) <int64[1] k = {1}> "
                      "{ s = ReduceSum(x, k) p = ReduceProd(x, k) a = ReduceMax(x, k) b = ReduceMin(x, k) }", kind))
    info = np.iinfo(kind)
    for fill in (info.min, info.max, -1 if info.min else 0, 3):
        check(made, {"x": np.full((5, 40), fill, kind)})
    check(made, {"x": np.random.default_rng(0).integers(info.min, info.max, (5, 1000), kind)})


@pytest.mark.parametrize("name", ["ReduceMax", "ReduceMin", "ReduceSum", "Softmax"])
@pytest.mark.parametrize("place", [0, 17, 39])
def test_nan_and_infinities_in_a_row(name: str, place: int) -> None:
    """NaN anywhere gives NaN, of whichever thread it is; infinities are numbers like others."""
    x = np.random.default_rng(0).standard_normal((5, 40)).astype(np.float32)
    x[1, place], x[2, place], x[3, place] = np.nan, np.inf, -np.inf
    made = make("g (float[R,C] x) => (float[R,C] y) { y = Softmax(x) }" if name == "Softmax" else
                f"g (float[R,C] x) => (float[R,1] y) <int64[1] a = {{1}}> {{ y = {name}(x, a) }}")
    check(made, {"x": x}, length=40)


def test_many_rows() -> None:
    """More rows than a block has, in a number that is no multiple of anything."""
    sweep("g (float16[R,8] x) => (float16[R,8] y) { y = Softmax(x) }", {"R": 1021}, length=8)
    sweep("g (float[R,3] x) => (float[R,1] y) <int64[1] a = {1}> { y = ReduceSum(x, a) }", {"R": 4099}, length=3)


@pytest.mark.parametrize("count, length", [(8, 256), (16, 256), (8, 31), (12, 1000)])
def test_many_values_kept_take_narrower_vectors_and_no_idle_threads(count: int, length: int) -> None:
    """Where one vector of each value is more than a thread keeps; a thread that has no vector of a row does nothing."""
    outputs = ", ".join(f"float16[R,{length}] y{place}" for place in range(count))
    parts = ", ".join(f"p{place}" for place in range(count))
    each = " ".join(f"q{place} = Squeeze(p{place}, a) y{place} = Softmax(q{place})" for place in range(count))
    made = make(f"g (float16[{count},R,{length}] x) => ({outputs}) <int64[1] a = {{0}}> "
                f"{{ t = Tanh(x) {parts} = Split <axis = 0> (t) {each} }}", planned={"R": 64})
    first = made.kernel.plan.variants[0].name
    threads, width = (int(part.strip("w")) for part in first.split("_")[1:3])
    assert first.split("_")[3].startswith("x"), "the row stays in registers"
    assert threads < 2 * -(-length // width)
    check(made, random_inputs(made, {"R": 3}), length=length)
