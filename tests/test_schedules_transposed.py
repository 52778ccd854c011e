"""The transposed schedule: reductions between tensors that lie along the rows and tensors that lie across.

Norms and softmax beside a transpose, in both directions, with operands and results of either layout.  All variants that
hold, aligned and not, over poisoned outputs, threads in several orders.  The reference is the region in float64:
float32 within the tolerance of its reductions' length, float16 and bfloat16 within two units in the last place of the
largest output; what is only moved exactly.
"""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

import re

import numpy as np
import pytest
from emulator import variants_that_hold
from kernel_harness import Made, arguments, attempt, check, fails, make, parse, random_inputs
from zoo_models import compile_failures

from onnxfuse.lowering.launch import Situation
from onnxfuse.refusal import Refusal
from onnxfuse.schedules import Request
from onnxfuse.schedules.reductions.transposed import refuses_transposing
from onnxfuse.schedules.tiled import SHARED_BYTES

ORDERS = ("forward", "backward", 7)

LAST = ("g (T[N,C,P] x, T[C] w, T[C] b) => (T[N,P,C] y) "
        "{ t = Transpose<perm=[0,2,1]>(x) y = LayerNormalization(t, w, b) }")
FIRST = ("g (T[N,P,C] x, T[C] w, T[C] b) => (T[N,C,P] y) "
         "{ t = LayerNormalization(x, w, b) y = Transpose<perm=[0,2,1]>(t) }")
SOFTMAX = "g (T[N,C,P] x) => (T[N,P,C] y) { t = Softmax<axis=1>(x) y = Transpose<perm=[0,2,1]>(t) }"
WAYS = {"channels last": LAST, "channels first": FIRST, "softmax": SOFTMAX}

PLANNED = {"N": 32, "C": 96, "P": 3136}


def typed(text: str, kind: str, channels: int | str = "C") -> str:
    return re.sub(r"\bC\b(?=[,\]])", str(channels), re.sub(r"\bT\b(?=\[| )", kind, text))


def transposed(text: str, kind: str = "float", channels: int | str = "C", **planned: int) -> Made:
    made = make(typed(text, kind, channels), planned=PLANNED | planned)
    assert made.kernel.schedule == "transposed" and made.kernel.scattered == (), made.kernel.plan
    return made


@pytest.mark.parametrize("channels", [2, 31, 33, 96, 97, 768, 4097])
@pytest.mark.parametrize("kind", ["float", "float16", "bfloat16"])
@pytest.mark.parametrize("text", WAYS.values(), ids=list(WAYS))
def test_known_channels(text: str, kind: str, channels: int) -> None:
    """In registers where columns are short, in chunks where they are long; a kernel for these channels alone."""
    made = transposed(text, kind, channels)
    for seed, (batch, pixels) in enumerate([(2, 49), (3, 8), (1, 13), (2, 1)]):
        if channels * batch * pixels <= 80_000:
            check(made, random_inputs(made, {"N": batch, "P": pixels}, seed), length=channels, orders=("forward", 7))


@pytest.mark.parametrize("kind", ["float", "float16", "bfloat16", "double"])
@pytest.mark.parametrize("text", WAYS.values(), ids=list(WAYS))
def test_sizes_known_only_when_running(text: str, kind: str) -> None:
    made = transposed(text, kind)
    for seed, (batch, channels, pixels) in enumerate(
        [(1, 1, 1), (2, 96, 8), (2, 95, 8), (1, 96, 9), (3, 1, 16), (3, 4, 1), (1, 768, 13), (1, 4097, 3), (2, 33, 64)]
    ):
        sizes = {"N": batch, "C": channels, "P": pixels}
        check(made, random_inputs(made, sizes, seed), length=channels, orders=("forward", 7))


@pytest.mark.parametrize("channels, pixels", [(96, 56), (192, 28), (384, 14), (768, 7), (31, 13)])
@pytest.mark.parametrize("text", [
    "g (float16[N,C,P,P] x, float16[C] w, float16[C] b) => (float16[N,P,P,C] y) { t = Transpose<perm=[0,2,3,1]>(x) y = LayerNormalization(t, w, b) }",
    "g (float16[N,P,P,C] x, float16[C] w, float16[C] b) => (float16[N,C,P,P] y) { t = LayerNormalization(x, w, b) y = Transpose<perm=[0,3,1,2]>(t) }",
], ids=["channels last", "channels first"])
def test_images(text: str, channels: int, pixels: int) -> None:
    """As in ConvNeXt: channels and pixels are known, and the batch is not; blocks reach over several images."""
    made = make(typed(text, "float16", channels).replace("P", str(pixels)), planned={"N": 32})
    assert made.kernel.schedule == "transposed" and made.kernel.scattered == ()
    for batch in (1, 3) if channels * pixels * pixels < 50_000 else (1,):
        check(made, random_inputs(made, {"N": batch}, batch), length=channels)


def test_every_variant_is_run() -> None:
    made = transposed(LAST, "float16")
    seen: set[str] = set()
    for channels, pixels in ((96, 8), (96, 9), (95, 8), (95, 9), (800, 8), (800, 9), (801, 8), (801, 9)):
        inputs = random_inputs(made, {"N": 1, "C": channels, "P": pixels})
        seen |= set(variants_that_hold(made.kernel.plan, arguments(made, inputs)))
    names = [variant.name for variant in made.kernel.plan.variants]
    assert seen == set(names) and len(set(names)) == len(names) == 9 and made.kernel.plan.variants[-1].guards == ()


@pytest.mark.parametrize("text", WAYS.values(), ids=list(WAYS))
@pytest.mark.parametrize("channels", [96, 1000])
def test_no_barrier_is_missing(text: str, channels: int) -> None:
    """In chunks, too: float32 needs several for these channels."""
    made = transposed(text, "float", C=channels)
    inputs = random_inputs(made, {"N": 1, "C": channels, "P": 64})
    check(made, inputs, length=channels, orders=ORDERS, misalign=False)
    assert re.search(rf"_x\d+_c(?!{channels}_)", made.kernel.plan.variants[0].name)
    lines = made.kernel.source.split("\n")
    for place, line in enumerate(lines):
        if "__syncthreads();" in line and "threadIdx" not in line and "begin" not in line:
            faulty = "\n".join([*lines[:place], *lines[place + 1:]])
            inside = any("template <int width" in before for before in lines[:place])
            if inside and "_in_registers(" in next(x for x in reversed(lines[:place]) if "template <int width" in x):
                assert fails(made, inputs, length=channels, orders=ORDERS, misalign=False, source=faulty, limit=1), line


@pytest.mark.parametrize("text", WAYS.values(), ids=list(WAYS))
def test_a_chunk_waits_for_the_one_before(text: str) -> None:
    made = transposed(text, "float", C=1000)
    inputs = random_inputs(made, {"N": 1, "C": 1000, "P": 64})
    faulty = made.kernel.source.replace("if (begin > 0) __syncthreads();", "")
    assert faulty != made.kernel.source
    assert fails(made, inputs, length=1000, orders=ORDERS, misalign=False, source=faulty, limit=1)


REGIONS = [
    ("a residual that lies across", "g (T[N,C,P] x, T[N,C,P] r, T[C] w) => (T[N,P,C] y) "
     "{ a = Add(x, r) t = Transpose<perm=[0,2,1]>(a) y = LayerNormalization(t, w) }"),
    ("a residual that lies along", "g (T[N,C,P] x, T[N,P,C] r, T[C] w) => (T[N,P,C] y) "
     "{ t = Transpose<perm=[0,2,1]>(x) a = Add(t, r) y = LayerNormalization(a, w) }"),
    ("a residual after the norm", "g (T[N,C,P] x, T[N,P,C] r, T[C] w) => (T[N,P,C] y) "
     "{ t = Transpose<perm=[0,2,1]>(x) a = LayerNormalization(t, w) y = Add(a, r) }"),
    ("a norm along, its residual across", "g (T[N,P,C] x, T[N,C,P] r, T[C] w) => (T[N,C,P] y) "
     "{ a = LayerNormalization(x, w) t = Transpose<perm=[0,2,1]>(a) y = Add(t, r) }"),
    ("what the norm reads is a result too", "g (T[N,C,P] x, T[N,C,P] r, T[C] w) => (T[N,C,P] a, T[N,P,C] y) "
     "{ a = Add(x, r) t = Transpose<perm=[0,2,1]>(a) y = LayerNormalization(t, w) }"),
    ("both layouts are results", "g (T[N,C,P] x, T[C] w) => (T[N,P,C] t, T[N,P,C] y, T[N,C,P] z) "
     "{ t = Transpose<perm=[0,2,1]>(x) y = LayerNormalization(t, w) z = Transpose<perm=[0,2,1]>(y) }"),
    ("means and deviations", "g (T[N,C,P] x, T[C] w, T[C] b) => (T[N,P,C] y, float[N,P,1] m, float[N,P,1] d) "
     "{ t = Transpose<perm=[0,2,1]>(x) y, m, d = LayerNormalization(t, w, b) }"),
    ("the statistics of what is transposed", "g (T[N,C,P] x, T[N,P,C] z) => (T[N,P,1] m, T[N,P] s) <int64[1] a = {2}> "
     "{ t = Transpose<perm=[0,2,1]>(x) p = Mul(t, z) m = ReduceMean(p, a) q = Abs(p) s = ReduceSum<keepdims=0>(q, a) }"),
    ("a channels-first norm spelled out", "g (T[N,P,C] x, T[C,1] w, T[C,1] b, T e) => (T[N,C,P] y) <int64[1] a = {1}> "
     "{ t = Transpose<perm=[0,2,1]>(x) u = ReduceMean(t, a) d = Sub(t, u) q = Mul(d, d) v = ReduceMean(q, a) g1 = Abs(e) f = Exp(g1) "
     "s = Add(v, f) r = Sqrt(s) n = Div(d, r) k = Mul(n, w) y = Add(k, b) }"),
    ("a bias a channel, before and after", "g (T[N,C,P] x, T[C] w, T[C] b) => (T[N,P,C] y) "
     "{ t = Transpose<perm=[0,2,1]>(x) a = Add(t, b) y = LayerNormalization(a, w, b) }"),
    ("there and back, and beside it", "g (T[N,C,P] x, T[C] w, T[N,P,C] r) => (T[N,C,P] y) "
     "{ t = Transpose<perm=[0,2,1]>(x) n = LayerNormalization(t, w) m = Mul(n, r) y = Transpose<perm=[0,2,1]>(m) }"),
    ("a mask along", "g (T[N,C,P] x, bool[N,P,C] k, T low) => (T[N,P,C] y) "
     "{ t = Transpose<perm=[0,2,1]>(x) s = Where(k, t, low) y = Softmax(s) }"),
    ("rows of a table", "g (T[N,C,P] x, T[9,C] e, int64[N,P] i, T[C] w) => (T[N,P,C] y) "
     "{ t = Transpose<perm=[0,2,1]>(x) r = Gather(e, i) a = Add(t, r) y = LayerNormalization(a, w) }"),
    ("halves of the channels, gated", "g (T[N,C,P] x, T[N,P,C] z) => (T[N,P,C] y) "
     "{ s = Sigmoid(z) t = Transpose<perm=[0,2,1]>(x) p = Softmax(t) y = Mul(p, s) }"),
]


@pytest.mark.parametrize("kind", ["float", "float16", "bfloat16"])
@pytest.mark.parametrize("text", [text for _, text in REGIONS], ids=[name for name, _ in REGIONS])
def test_regions(text: str, kind: str) -> None:
    made = transposed(text, kind)
    for seed, (batch, channels, pixels) in enumerate([(2, 96, 8), (1, 33, 13), (3, 8, 49), (2, 1, 4), (2, 5, 1)]):
        sizes = {"N": batch, "C": channels, "P": pixels, "Q": pixels + 1}
        inputs = random_inputs(made, sizes, seed)
        if "i" in inputs:
            inputs["i"] = np.random.default_rng(seed).integers(-9, 9, inputs["i"].shape)
        check(made, inputs, length=300, orders=("forward", "backward"))


@pytest.mark.parametrize("sizes", [{"N": 0}, {"P": 0}, {"C": 0}], ids=str)
@pytest.mark.parametrize("text", WAYS.values(), ids=list(WAYS))
def test_empty(text: str, sizes: dict[str, int]) -> None:
    made = transposed(text)
    inputs = random_inputs(made, {"N": 2, "C": 5, "P": 4} | sizes)
    check(made, inputs)
    if "C" not in sizes:
        situation = Situation([array.shape for array in arguments(made, inputs)])
        situation.bind(made.kernel.plan)
        assert situation.evaluate(made.kernel.plan.variants[-1].steps[0].grid[0]) == 0


@pytest.mark.parametrize("text", WAYS.values(), ids=list(WAYS))
@pytest.mark.parametrize("place", [0, 17, 39])
def test_nan_and_infinities_stay_in_their_column(text: str, place: int) -> None:
    made = transposed(text, C=40)
    inputs = random_inputs(made, {"N": 2, "C": 40, "P": 8})
    x = inputs["x"] if text != FIRST else inputs["x"].transpose(0, 2, 1)
    x[0, place, 1], x[1, place, 2], x[0, place, 3] = np.nan, np.inf, -np.inf
    check(made, inputs, length=40)


def test_what_is_only_moved_is_exact() -> None:
    for kind in ("int64", "int8", "uint16"):
        made = transposed("g (T[N,C,P] x) => (T[N,P,C] y, T[N,P,1] m) <int64[1] a = {2}> "
                      "{ y = Transpose<perm=[0,2,1]>(x) m = ReduceMax(y, a) }", kind)
        for sizes in ({"N": 2, "C": 33, "P": 16}, {"N": 1, "C": 96, "P": 8}):
            check(made, random_inputs(made, sizes), orders=ORDERS)


def test_layouts_that_agree_need_no_staging() -> None:
    """Transposed there and back: all tensors lie across the rows of a norm, or along the columns of a softmax."""
    made = make(typed("g (T[N,C,P] x, T[C] w) => (T[N,C,P] y) { t = Transpose<perm=[0,2,1]>(x) "
                      "n = LayerNormalization(t, w) y = Transpose<perm=[0,2,1]>(n) }", "float16"), planned=PLANNED)
    assert made.kernel.schedule == "columns" and made.kernel.scattered == ()
    other = make(typed("g (T[N,P,C] x) => (T[N,P,C] y) { t = Transpose<perm=[0,2,1]>(x) "
                       "s = Softmax<axis=1>(t) y = Transpose<perm=[0,2,1]>(s) }", "float16"), planned=PLANNED)
    assert other.kernel.schedule == "rows" and other.kernel.scattered == ()
    mean = make(typed("g (T[N,C,P] x) => (T[N,P] y) <int64[1] a = {2}> { t = Transpose<perm=[0,2,1]>(x) "
                      "y = ReduceMean<keepdims=0>(t, a) }", "float16"), planned=PLANNED)
    assert mean.kernel.schedule == "columns" and mean.kernel.scattered == ()
    for one in (made, other, mean):
        for seed, (batch, channels, pixels) in enumerate([(2, 96, 8), (1, 33, 13), (3, 1, 4), (2, 5, 1)]):
            sizes = {"N": batch, "C": channels, "P": pixels}
            check(one, random_inputs(one, sizes, seed), length=100, orders=("forward", 7))


def test_results_in_another_order_of_rows() -> None:
    """Heads moved after a softmax, and what there is once a row: rows stay in one piece and go elsewhere."""
    made = make("g (float16[B,S,H,D] x) => (float16[B,H,S,D] y, float16[S,B,H] m) <int64[1] a = {3}> "
                "{ s = Softmax(x) y = Transpose<perm=[0,2,1,3]>(s) z = Abs(x) r = ReduceMax<keepdims=0>(z, a) "
                "m = Transpose<perm=[1,0,2]>(r) }", planned={"B": 2, "S": 64, "H": 12, "D": 64})
    assert made.kernel.schedule == "rows" and made.kernel.scattered == ()
    for sizes in ({"B": 2, "S": 5, "H": 3, "D": 64}, {"B": 1, "S": 4, "H": 2, "D": 33}):
        check(made, random_inputs(made, sizes), length=64)


@pytest.mark.parametrize("kind", ["float", "float16"])
def test_tokens_before_the_pixels(kind: str) -> None:
    """A concatenation decides what is read; columns of pixels and of the token are neighbours."""
    made = transposed("g (T[N,C,12] x, T[N,1,C] c, T[13,C] b, T[C] w) => (T[N,13,C] s, T[N,13,C] y) "
                  "{ t = Transpose<perm=[0,2,1]>(x) j = Concat<axis=1>(c, t) s = Add(j, b) y = LayerNormalization(s, w) }",
                  kind, 96)
    for batch in (1, 5):
        check(made, random_inputs(made, {"N": batch}), length=100, orders=ORDERS)


def test_a_third_layout_is_refused() -> None:
    """One block's columns lie side by side in one order only."""
    made = attempt(parse(typed("g (T[P,C,N] x, T[N,P,C] r, T[C] w) => (T[N,C,P] y) { t = Transpose<perm=[2,0,1]>(x) a = Add(t, r) "
                               "n = LayerNormalization(a, w) y = Transpose<perm=[0,2,1]>(n) }", "float")), PLANNED)
    assert isinstance(made, Made) and len(made.kernel.scattered) == 1
    refusal = refuses_transposing(Request(made.lowered, sizes=PLANNED))
    assert refusal is not None and refusal.message == "the rows would be read element by element"


def test_few_long_rows_are_refused() -> None:
    """Two columns are one block, and the blocks that would share them turn nothing."""
    made = attempt(parse("g (float[L,2] x) => (float[2,L] y) { t = Transpose(x) y = Softmax(t) }"), {"L": 1_000_000})
    assert isinstance(made, Refusal) and made.code == "few-rows"
    assert made.message == (
        "2 rows of L elements are too few for blocks of their own, and tensors lie along them and across"
    )


def test_too_many_tensors_for_shared_memory() -> None:
    count = 90
    inputs = ", ".join(f"double[N,P,C] x{place}" for place in range(count))
    sums = " ".join(f"a{place + 1} = Add(a{place}, x{place})" for place in range(count))
    made = attempt(parse(f"g (double[N,C,P] x, {inputs}) => (double[N,P,C] y) "
                         f"{{ a0 = Transpose<perm=[0,2,1]>(x) {sums} y = Softmax(a{count}) }}"), PLANNED)
    assert isinstance(made, Refusal) and made.code == "tile-memory"
    assert made.message == f"{count + 1} tensors that lie along the rows do not fit shared memory together"


def test_shared_memory_is_counted_as_the_text_has_it() -> None:
    """The largest chunks that shapes choose fit what every GPU has; the compiler has the last word."""
    made = [transposed(text, kind, channels, P=pixels) for text in (LAST, REGIONS[9][1]) for kind in ("double", "float")
            for channels, pixels in ((768, 49), (2000, 3136))]
    failed = compile_failures({one.kernel.source: (f"{place}", ()) for place, one in enumerate(made)})
    assert not failed, "\n".join(failed)
    assert SHARED_BYTES == 49152


def test_nvrtc_compiles_it() -> None:
    made = [transposed(LAST, "float16"), transposed(FIRST, "bfloat16", 96), transposed(SOFTMAX, "float", 97),
            transposed(REGIONS[3][1], "float16", 192, P=784), transposed(REGIONS[5][1], "float16", 768, P=49)]
    failed = compile_failures({one.kernel.source: (str(place), ()) for place, one in enumerate(made)})
    assert not failed, "\n".join(failed)
