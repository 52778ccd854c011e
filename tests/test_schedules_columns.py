"""The column schedule: reductions over axes that are not the last, lengths and numbers of columns of every kind.

All variants that hold, aligned and not, over poisoned outputs; where threads meet at barriers, in several orders.  The
reference is the region in float64: float32 within the tolerance of its reductions' length, float16 and bfloat16 within
two units in the last place of the largest output, integers exactly.
"""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

import numpy as np
import pytest
from emulator import variants_that_hold
from kernel_harness import Made, arguments, check, fails, make, random_inputs, sweep
from zoo_models import compile_failures

from onnxfuse.graph.dims import dim, symbol
from onnxfuse.lowering.arrangement import arrangement
from onnxfuse.lowering.index import IndexSpace

ORDERS = ("forward", "backward", 7)

SOFTMAX = "g (T[N,C,I] x) => (T[N,C,I] y) { y = Softmax<axis=1>(x) }"
MEAN = "g (T[N,C,I] x) => (T[N,1,I] y) <int64[1] a = {1}> { y = ReduceMean(x, a) }"
SUM = "g (T[N,C] x) => (T[C] y) <int64[1] a = {0}> { y = ReduceSum<keepdims=0>(x, a) }"
NORM = ("g (T[N,C,H,W] x, T[C,1,1] w, T[C,1,1] b) => (T[N,C,H,W] y) <int64[1] a = {1}> "
        "{ u = ReduceMean(x, a) d = Sub(x, u) q = Mul(d, d) v = ReduceMean(q, a) e = Exp(v) r = Sqrt(e) n = Div(d, r) "
        "s = Mul(w, n) y = Add(s, b) }")
BOTH = ("g (T[N,C,I] x, T[I] b) => (T[N,C,I] y, T[N,1,I] m, T[N,I] t) <int64[1] a = {1}> "
        "{ z = Add(x, b) m = ReduceMax(z, a) d = Sub(z, m) e = Exp(d) t = ReduceSum<keepdims=0>(e, a) u = Unsqueeze(t, a) y = Div(e, u) }")


def typed(text: str, kind: str = "float") -> str:
    return text.replace("T[", f"{kind}[")


def columns(text: str, kind: str = "float", **planned: int) -> Made:
    made = make(typed(text, kind), planned=planned)
    assert any(variant.name.startswith("columns") for variant in made.kernel.plan.variants), made.kernel.plan
    return made


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 31, 32, 33, 64, 100, 257, 1000, 4097])
@pytest.mark.parametrize("text", [SOFTMAX, MEAN], ids=["softmax", "mean"])
def test_known_lengths(text: str, length: int) -> None:
    """In registers where the columns are short, streaming else; a kernel for this length alone."""
    for inner in (1, 5, 8, 64):
        if length * inner <= 70_000:
            text_here = typed(text).replace("C,", f"{length},").replace("I]", f"{inner}]")
            sweep(text_here, {"N": 1}, {"N": 3}, length=length)


@pytest.mark.parametrize("kind", ["float", "float16", "bfloat16", "double"])
@pytest.mark.parametrize("text", [SOFTMAX, MEAN, BOTH], ids=["softmax", "mean", "both"])
def test_sizes_known_only_when_running(text: str, kind: str) -> None:
    made = columns(text, kind, N=32, C=64, I=3136)
    for seed, (rows, length, inner) in enumerate(
        [(1, 1, 1), (2, 64, 8), (2, 63, 9), (3, 65, 16), (2, 1000, 3), (1, 4097, 2), (7, 2, 31), (5, 33, 128)]
    ):
        check(made, random_inputs(made, {"N": rows, "C": length, "I": inner}, seed), length=length)


@pytest.mark.parametrize("kind", ["float", "float16"])
@pytest.mark.parametrize("sizes", [(2, 8, 8), (1, 7, 7), (3, 1, 5), (1, 1, 1)])
def test_a_norm_over_channels(kind: str, sizes: tuple[int, int, int]) -> None:
    """Parameters along the reduced axis, two reductions one after the other, sizes that vary."""
    n, h, w = sizes
    for channels in (3, 32, 96, 384):
        made = columns(NORM.replace("C,", f"{channels},"), kind, N=32, H=56, W=56)
        check(made, random_inputs(made, {"N": n, "H": h, "W": w}), length=channels)


def test_no_barrier_is_missing() -> None:
    for planned, sizes in (({"N": 4, "C": 512, "I": 64}, {"N": 2, "C": 512, "I": 64}),
                           ({"N": 64, "C": 40, "I": 4096}, {"N": 2, "C": 40, "I": 40})):
        for text in (SOFTMAX, BOTH, MEAN):
            made = columns(text, **planned)
            inputs = random_inputs(made, sizes)
            check(made, inputs, length=sizes["C"], orders=ORDERS, misalign=False)
        made = columns(BOTH, **planned)
        faulty = made.kernel.source.replace("__syncthreads();", "")
        assert fails(made, random_inputs(made, sizes), length=sizes["C"], orders=ORDERS, misalign=False, source=faulty)


REGIONS = [
    ("channels of an image", "g (T[N,24,H,W] x) => (T[N,24,H,W] y, T[N,1,H,W] m) <int64[1] a = {1}> { m = ReduceMax(x, a) y = Sub(x, m) }"),
    ("two axes in the middle", "g (T[N,3,5,H] x) => (T[N,1,1,H] y) <int64[2] a = {1,2}> { y = ReduceMean(x, a) }"),
    ("two axes apart, the last kept", "g (T[N,3,H,8] x) => (T[1,3,1,8] y) <int64[2] a = {0,2}> { y = ReduceMean(x, a) }"),
    ("two axes apart, a whole output", "g (T[N,3,H,8] x) => (T[N,3,H,8] y) <int64[2] a = {0,2}> { m = ReduceMean(x, a) y = Sub(x, m) }"),
    ("the first axis", "g (T[N,6,H] x) => (T[6,H] y) <int64[1] a = {0}> { s = ReduceSum<keepdims=0>(x, a) y = Tanh(s) }"),
    ("through a reshape", "g (T[N,4,6,H] x) => (T[N,24,H] y) <int64[4] s = {0,4,6,-1}, int64[3] t = {0,24,-1}> "
     "{ r = Reshape(x, t) p = Softmax<axis=1>(r) q = Reshape(p, s) z = Mul(q, x) y = Reshape(z, t) }"),
    ("a mask and a guard", "g (T[N,5,H] x, bool[N,5,H] k, T zero, T low) => (T[N,5,H] y) "
     "{ s = Where(k, x, low) p = Softmax<axis=1>(s) n = IsNaN(p) y = Where(n, zero, p) }"),
    ("chunks side by side", "g (T[N,4,H] x, T[N,6,H] z) => (T[N,10,H] y) { c = Concat<axis=1>(x, z) y = Softmax<axis=1>(c) }"),
    ("gated", "g (T[N,2,9,H] x, T[N,1,9,H] z) => (T[N,1,9,H] y) <int64[1] a = {1}> { p = Softmax<axis=1>(x) s = ReduceSum(p, a) y = Mul(s, z) }"),
    ("a bias a channel, before and after", "g (T[N,9,H] x, T[9,1] b) => (T[N,9,H] y) "
     "{ a = Add(x, b) p = Softmax<axis=1>(a) y = Add(p, b) }"),
    ("log-softmax of classes", "g (T[N,9,H] x) => (T[N,9,H] y) { y = LogSoftmax<axis=1>(x) }"),
    ("a norm of vectors", "g (T[N,9,H] x) => (T[N,9,H] y) { p = Abs(x) q = Exp(p) y = LpNormalization<axis=1>(q) }"),
    ("statistics of channels", "g (T[N,7,H,W] x) => (T[7] m, T[N,7,H,W] y) <int64[3] a = {0,2,3}, int64[2] b = {1,2}> "
     "{ m = ReduceMean<keepdims=0>(x, a) u = Unsqueeze(m, b) y = Sub(x, u) }"),
    ("a transposed operand", "g (T[H,9,N] x) => (T[N,9,H] y) { t = Transpose<perm=[2,1,0]>(x) y = Softmax<axis=1>(t) }"),
]


@pytest.mark.parametrize("kind", ["float", "float16"])
@pytest.mark.parametrize("text", [text for _, text in REGIONS], ids=[name for name, _ in REGIONS])
def test_regions(text: str, kind: str) -> None:
    text = text.replace("T zero", f"{kind} zero").replace("T low", f"{kind} low")
    sweep(typed(text, kind), {"N": 1, "H": 1, "W": 1}, {"N": 3, "H": 8, "W": 4}, {"N": 2, "H": 33, "W": 5}, length=300,
          orders=("forward", "backward"))


GROUPS = ("g (T[N,CH,H,W] x, T[32] s, T[32] z, T[CH,1,1] u, T[CH,1,1] v) => (T[N,CH,H,W] y) "
          "<int64[3] a = {0,32,-1}> { h = Shape(x) r = Reshape(x, a) n = InstanceNormalization(r, s, z) k = Reshape(n, h) "
          "l = Mul(k, u) m = Add(l, v) g1 = Sigmoid(m) y = Mul(m, g1) }")


@pytest.mark.parametrize("kind", ["float", "float16"])
def test_group_norms_of_images_are_rows(kind: str) -> None:
    """As exporters write them, with SiLU: their groups lie in one piece, and parameters vary along them."""
    made = make(typed(GROUPS.replace("CH", "64"), kind), planned={"N": 2, "H": 64, "W": 64})
    assert made.kernel.schedule == "rows"
    for sizes in ({"N": 2, "H": 8, "W": 8}, {"N": 1, "H": 5, "W": 3}):
        check(made, random_inputs(made, sizes), length=128)


@pytest.mark.parametrize("text", [
    "g (T[N,8,H,W] x, T[8] s, T[8] b) => (T[N,8,H,W] y) { y = InstanceNormalization(x, s, b) }",
    "g (T[N,8,H,W] x, T[8] s, T[8] b) => (T[N,8,H,W] y) { n = GroupNormalization<num_groups=2>(x, s, b) g1 = Sigmoid(n) y = Mul(n, g1) }",
], ids=["instance", "group"])
def test_norms_over_images(text: str) -> None:
    sweep(typed(text, "float16"), {"N": 2, "H": 4, "W": 8}, {"N": 1, "H": 5, "W": 3}, opset=21, length=128)


@pytest.mark.parametrize("kind", ["int32", "int64", "uint32", "uint64"])
def test_integers_at_their_limits(kind: str) -> None:
    """Sums and products wrap; the largest and smallest are exact, with neutral elements that change nothing."""
    made = columns("g (T[C,I] x) => (T[1,I] s, T[1,I] p, T[1,I] a, T[1,I] b) <int64[1] k = {0}> "
                   "{ s = ReduceSum(x, k) p = ReduceProd(x, k) a = ReduceMax(x, k) b = ReduceMin(x, k) }", kind, C=40, I=4096)
    info = np.iinfo(kind)
    for fill in (info.min, info.max, -1 if info.min else 0, 3):
        check(made, {"x": np.full((40, 6), fill, kind)})
    check(made, {"x": np.random.default_rng(0).integers(info.min, info.max, (1000, 16), kind)})


@pytest.mark.parametrize("name", ["ReduceMax", "ReduceMin", "ReduceSum", "Softmax"])
@pytest.mark.parametrize("place", [0, 17, 39])
def test_nan_and_infinities_in_a_column(name: str, place: int) -> None:
    x = np.random.default_rng(0).standard_normal((2, 40, 8)).astype(np.float32)
    x[0, place, 1], x[1, place, 2], x[0, place, 3] = np.nan, np.inf, -np.inf
    x[1, :, 7] = -np.inf
    made = columns(SOFTMAX if name == "Softmax" else
                   f"g (T[N,C,I] x) => (T[N,1,I] y) <int64[1] a = {{1}}> {{ y = {name}(x, a) }}", N=32, C=40, I=3136)
    check(made, {"x": x}, length=40)


@pytest.mark.parametrize("sizes", [{"N": 0, "C": 5, "I": 4}, {"N": 3, "C": 0, "I": 4}, {"N": 3, "C": 5, "I": 0}], ids=str)
def test_empty_tensors(sizes: dict[str, int]) -> None:
    """The sum of nothing is 0, and there may be no columns."""
    made = columns("g (T[N,C,I] x) => (T[N,C,I] y, T[N,1,I] s) <int64[1] a = {1}> { s = ReduceSum(x, a) y = Sub(x, s) }",
                   N=32, C=64, I=3136)
    check(made, random_inputs(made, sizes))


def test_ways_for_the_planned_sizes() -> None:
    """Short columns stay in registers; long ones stream; both are still there for other sizes."""
    def names(**planned: int) -> list[str]:
        return [variant.name for variant in columns(SOFTMAX, "float16", **planned).kernel.plan.variants]

    assert names(N=32, C=64, I=3136)[0] == "columns_16x16_w8_x4_32"
    assert names(N=32, C=4000, I=3136)[0].startswith("columns_") and "stream" in names(N=32, C=4000, I=3136)[0]
    made = columns(SOFTMAX, "float16", N=32, C=64, I=3136)
    held = {variant.name for variant in made.kernel.plan.variants}
    seen = set()
    for sizes in ({"N": 2, "C": 64, "I": 8}, {"N": 2, "C": 64, "I": 9}, {"N": 2, "C": 100, "I": 8}):
        seen |= set(variants_that_hold(made.kernel.plan, arguments(made, random_inputs(made, sizes))))
    assert seen == held and made.kernel.plan.variants[-1].guards == ()


def test_arrangements() -> None:
    """Neighbouring axes of a sort are one segment, axes of size one none; places are those of the operand."""
    n, space = symbol("n"), IndexSpace()
    found = arrangement((n, dim(1), dim(3), dim(4), dim(5)), (1, 2, 3))
    assert str(found) == "[n, (12), 5]" and (found.count, found.length, found.inner) == (n * 5, dim(12), dim(5))
    assert found.across and not arrangement((n, dim(3)), (1,)).across and not arrangement((n, dim(3)), (0, 1)).across
    row, element = space.base("@row", found.count), space.base("@e", found.length)
    outer, inner = space.delinear(row, (n, dim(5)))
    assert found.place(row, element, space) == outer * 60 + element * 5 + inner
    assert arrangement((n, dim(3), dim(4)), (1,)) == arrangement((n, dim(3), dim(2), dim(2)), (1,))


def test_nvrtc_compiles_it() -> None:
    texts = [(BOTH, "float16"), (NORM.replace("C,", "96,"), "bfloat16"), (SUM, "int8")]
    made = {
        make(typed(text, kind), planned={"N": 32, "C": 64, "I": 3136, "H": 56, "W": 56}).kernel.source: f"{kind} {text}"
        for text, kind in texts
    }
    found = compile_failures({source: (name, ()) for source, name in made.items()})
    assert not found, "\n".join(found)
