"""Rows that begin between two vectors: in registers, shared memory, streaming and split among blocks.

Every variant that reads them so, in several orders of threads, also at lengths that it is not meant for: rows shorter
than a vector, those that vectors divide after all, and none.
"""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from emulator import EmulatorError, run_plan, variants_that_hold
from kernel_harness import Made, arguments, check, compile_all, fails, failures, make, only, random_inputs
from reference import FLOATS
from test_schedules_online import rows_of_edges
from test_schedules_split import taken

from onnxfuse.schedules import Kernel, Request, make_kernel
from onnxfuse.schedules.reductions.peel import LONG_ODD_ROW
from onnxfuse.schedules.reductions.rows import IN_SHARED, SHARED

TEXTS = {
    "softmax": "g (T[B,L] x) => (T[B,L] y) { s = Relu(x) y = Softmax(s) }",
    "log softmax": "g (T[B,L] x) => (T[B,L] y) { y = LogSoftmax(x) }",
    "a mask for each row": "g (T[B,L] x, bool[B,L] k, T[B,1] c) => (T[B,L] y, T[B,1] m) <int64[1] a = {1}, T none = {-4}> "
                           "{ s = Where(k, x, none) t = Mul(s, c) y = Softmax(t) m = ReduceMax(t, a) }",
    "a mask that rows share": "g (T[B,4,L] x, T[B,1,L] k) => (T[B,4,L] y) { s = Add(x, k) y = Softmax(s) }",
    "layer norm": "g (T[B,L] x, T[L] w, T[L] b) => (T[B,L] y) { y = LayerNormalization(x, w, b) }",
    "a norm of a sum": "g (T[B,L] x, T[B,L] r, T[L] w) => (T[B,L] y, T[B,L] s) { s = Add(x, r) y = SimplifiedLayerNormalization(s, w) }",
    "one number a row": "g (T[B,L] x, T[B,L] z) => (T[B,1] y) <int64[1] a = {1}> { p = Mul(x, z) y = ReduceSum(p, a) }",
    "a statistic that stays": "g (T[B,L] x) => (T[B,L] y, T[B,1] m) <int64[1] a = {1}> { m = ReduceMean(x, a) y = Sub(x, m) }",
}
KINDS = ("float", "float16", "bfloat16", "double")
WAYS = {"x": {"B": 4096, "L": 9001}, SHARED: {"B": 4096, "L": 40_001}, "stream": {"B": 4096, "L": 300_001},
        "split": {"B": 1, "L": 1_000_001}}
"""Sizes for which a kernel has rows in registers, in shared memory, streaming, and split."""

LENGTHS = (1, 2, 7, 9, 16, 31, 33, 1025, 4097, 8192)


@cache
def made(name: str, kind: str, way: str) -> Made:
    """A kernel with the variants alone that read rows from wherever they begin, without what keeps short ones out."""
    text = TEXTS[name].replace("T[", f"{kind}[").replace(", T none", f", {kind} none")
    planned = WAYS[way]
    one = make(text, planned=planned)
    if way == SHARED and not any(SHARED in each.name for each in one.kernel.plan.variants):
        told = next(each for each in one.kernel.choices if dict(each.settings).get("items") == IN_SHARED)
        kernel = make_kernel(Request(one.lowered, "test", planned, told))
        assert isinstance(kernel, Kernel)
        one = replace(one, kernel=kernel)
    plan = one.kernel.plan
    variants = tuple(
        replace(each, guards=tuple(guard for guard in each.guards if not meant_for(guard)))
        for each in plan.variants if "peeled" in each.name and (way in each.name or (way == "x" and "_x" in each.name)))
    return only(one, variants)


def meant_for(guard: str) -> bool:
    """Whether a guard only says where a variant is the quicker one."""
    return guard.startswith(f"{LONG_ODD_ROW - 1} ") or "sms" in guard or (
        guard.split()[0].isdigit() and guard.endswith("<"))


def cases(way: str) -> list[tuple[str, str]]:
    """Texts and types that have such a variant: of one number a row nothing is kept, of two tensors or doubles too
    much, where that is shared memory."""
    large = {"a mask for each row", "a norm of a sum"}
    every = [(name, kind) for name in TEXTS for kind in KINDS if kind != "double" or name in ("softmax", "layer norm")]
    return [(name, kind) for name, kind in every if way != SHARED or not (
        name == "one number a row" or kind == "double" or (kind == "float" and name in large))]


def run(one: Made, length: int, **options: object) -> None:
    inputs = random_inputs(one, {"B": 3, "L": length}, seed=length)
    assert variants_that_hold(one.kernel.plan, arguments(one, inputs))
    check(one, inputs, length=max(length, 1), slack=4.0, misalign=False, **options)


@pytest.mark.parametrize("way", WAYS)
def test_every_length(way: str) -> None:
    """Rows shorter than a vector, of a vector and one element, with more vectors than threads; ones that vectors divide
    have no edges, or every row has others."""
    every = {case: made(*case, way) for case in cases(way)}
    compile_all([*every.values()])
    for (_, kind), one in every.items():
        for length in LENGTHS if kind == "float16" else LENGTHS[::3]:
            run(one, length, orders=("forward", 7) if length < 2000 else ("forward",))


@pytest.mark.parametrize(("way", "length"), [("x", 9001), (SHARED, 50_257), ("stream", 50_257), ("split", 100_003)])
def test_long_rows(way: str, length: int) -> None:
    for name in ("softmax", "layer norm"):
        run(made(name, "float16", way), length)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_edges_of_values(way: str, kind: str) -> None:
    """NaN, infinities and numbers that no exponential spans, in every part of a row."""
    if way == SHARED and kind == "double":
        pytest.skip("no row of doubles is kept so")
    one = made("log softmax", kind, way)
    dtype = {"float": np.float32, "float16": np.float16, "double": np.float64, "bfloat16": FLOATS[16]}[kind]
    rows = rows_of_edges(1031, kind).astype(dtype)
    for x in (rows, rows[:, ::-1].copy()):
        assert not failures(one, {"x": x}, length=1031, slack=4.0, misalign=False)


@pytest.mark.parametrize("way", WAYS)
def test_empty_tensors(way: str) -> None:
    one = made("a statistic that stays" if way != SHARED else "softmax", "float16", way)
    for sizes in ({"B": 0, "L": 33}, {"B": 3, "L": 0}, {"B": 0, "L": 0}):
        check(one, random_inputs(one, sizes), length=1, misalign=False)


@pytest.mark.parametrize("kind", ["int8", "int32", "uint64"])
def test_integers(kind: str) -> None:
    one = make(f"g ({kind}[B,L] x, {kind}[B,L] z) => ({kind}[B,L] y, {kind}[B,1] m) <int64[1] a = {{1}}> "
               "{ s = Add(x, z) m = ReduceMax(s, a) y = Sub(s, m) }", planned={"B": 4096, "L": 9001})
    assert any("peeled" in each.name for each in one.kernel.plan.variants)
    for length in (1025, 4097, 9001):
        check(one, random_inputs(one, {"B": 3, "L": length}))


def test_a_whole_tensor_has_a_tail_alone() -> None:
    """It begins where vectors do."""
    one = make("g (float16[L] x) => (float16[L] y) <float16 z = {0}> { y = Softmax<axis=0>(x) }", planned={"L": 1_000_001})
    for length in (1, 7, 9, 100_003):
        check(one, random_inputs(one, {"L": length}), length=length)


def names(text: str, **planned: int) -> list[str]:
    return [each.name for each in make(text, planned=planned).kernel.plan.variants]


def test_long_rows_that_no_vector_divides_are_read_so() -> None:
    softmax = TEXTS["softmax"].replace("T[B,", "float16[B,")
    assert names(softmax.replace("L]", "50257]")) == [
        "rows_1024_w8_x7_peeled_32", "rows_1024_w8_stream_peeled_32", "rows_1024_w1_stream_64"]
    # Every other begins between two vectors of eight, but not of two.
    assert names(softmax.replace("L]", "50258]"))[0] == "rows_1024_w8_x7_peeled_32"
    assert not any("peeled" in name for length in (197, 50_264) for name in names(softmax.replace("L]", f"{length}]")))


def test_the_way_is_chosen_when_the_kernel_runs() -> None:
    softmax = make(TEXTS["softmax"].replace("T[", "float16["), planned={"B": 4096, "L": 512})
    assert [taken(softmax, (4096, length)) for length in (512, 513, 4096, 4097, 100_000, 100_001)] == [
        "rows_16_w8_x4_32", "rows_32_w1_x32_32", "rows_256_w8_x4_32", *["rows_32_w8_stream_peeled_32"] * 3]
    # Where not all is read by vectors then, rows that vectors divide keep their own.
    masked = make(TEXTS["a mask that rows share"].replace("T[", "float16["), planned={"B": 16, "L": 512})
    assert [variant.name for variant in masked.kernel.plan.variants if "stream" in variant.name] == [
        "rows_32_w8_stream_32", "rows_32_w8_stream_peeled_32", "rows_32_w1_stream_64"]
    split = make(TEXTS["softmax"].replace("T[", "float16["), planned={"B": 1, "L": 1_000_000})
    assert {taken(split, (1, length)) for length in (1_000_000, 1_000_001)} == {"split, width 8, peeled, 32-bit"}


@pytest.mark.parametrize("text", [
    # Slices of longer rows, whose vectors begin elsewhere; parts of a row; and what is gathered.
    "g (float16[B,50264] x) => (float16[B,50257] y) <int64[1] z = {0}, int64[1] e = {50257}, int64[1] a = {1}> { s = Slice(x, z, e, a) y = Softmax(s) }",
    "g (float16[B,25128] x, float16[B,25129] z) => (float16[B,50257] y) { c = Concat<axis=1>(x, z) y = Softmax(c) }",
    "g (float16[V,50257] x, int64[B] i) => (float16[B,50257] y) { g = Gather(x, i) y = Softmax(g) }",
])
def test_rows_that_lie_otherwise_are_read_element_by_element(text: str) -> None:
    assert not any("peeled" in name for name in names(text, B=64, V=100))


def test_digits_of_a_row_are_no_vectors() -> None:
    """Rows of channels and places: the weights of a channel change within a vector, wherever that begins."""
    one = make("g (float16[N,C,H] x, float16[C,1] w, float16[H] b) => (float16[N,C,H] y) "
               "<int64[2] a = {1,2}> { m = ReduceMean(x, a) d = Sub(x, m) e = Mul(d, w) y = Add(e, b) }",
               planned={"N": 512, "C": 33, "H": 33})
    odd = [each for each in one.kernel.plan.variants if "peeled" in each.name]
    assert odd and not any(guard.endswith("% 0 ==") and "addr" not in guard for each in odd for guard in each.guards)
    for sizes in ({"C": 33, "H": 33}, {"C": 64, "H": 33}, {"C": 33, "H": 64}, {"C": 5, "H": 3}):
        check(one, random_inputs(one, {"N": 3, **sizes}), length=sizes["C"] * sizes["H"])


def test_what_rows_share_is_no_vector_then() -> None:
    source = made("layer norm", "float16", "stream").kernel.source
    body = source.partition("rows_streaming_peeled(")[2].partition("\ntemplate")[0].partition("extern")[0]
    assert "of::load<width>(i0 " in body and "i1[" in body and "of::load<width>(i1" not in body


def test_tuning_may_read_short_rows_so() -> None:
    made = make(TEXTS["softmax"].replace("T[B,L]", "float16[B,197]"), planned={"B": 4096})
    told = [each for each in made.kernel.choices if each["width"] == 8]
    assert told and not any("peeled" in each.name for each in made.kernel.plan.variants)
    for choice in (told[0], told[-1]):
        kernel = make_kernel(Request(made.lowered, "test", {"B": 4096}, choice))
        assert isinstance(kernel, Kernel) and "peeled" in kernel.plan.variants[0].name and kernel.choice == choice
        one = replace(made, kernel=kernel)
        check(one, random_inputs(one, {"B": 40}), length=197, orders=("forward", "backward"))


@pytest.mark.parametrize(("right", "wrong"), [
    ("stop + (lane - first)", "stop + (lane - first) + 1"), ("if (lane < edges)", "if (lane < first)"),
    ("(vector - place) % vector", "place"), ("- first) % vector;", "- first) % vector + vector;"),
    ("? lane : stop", "? lane + 1 : stop"),
])
@pytest.mark.parametrize("way", ["x", "stream"])
def test_faults_are_found(way: str, right: str, wrong: str) -> None:
    one = made("softmax", "float16", way)
    faulty = one.kernel.source.replace(right, wrong)
    assert faulty != one.kernel.source
    inputs = random_inputs(one, {"B": 3, "L": 1029})
    try:
        assert fails(one, inputs, source=faulty, length=1029, misalign=False)
    except EmulatorError as error:
        assert any(word in str(error) for word in ("were not written", "misaligned", "after output", "read"))


@pytest.mark.parametrize("way", WAYS)
def test_every_order_of_threads_gives_the_same_bits(way: str) -> None:
    one = made("softmax", "float16", way)
    given, (variant, *_) = arguments(one, random_inputs(one, {"B": 2, "L": 4099})), one.kernel.plan.variants
    runs = [run_plan(one.kernel.plan, one.kernel.source, given, variant=variant.name, order=order)[0]
            for order in ("forward", "backward", 5)]
    assert all(np.array_equal(runs[0], other) for other in runs[1:])
