"""The scan schedule: running totals in every variant, with what surrounds them, against float64."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from emulator import run_plan, variants_that_hold
from kernel_harness import (
    FLOATING,
    NAMES,
    Made,
    arguments,
    check,
    compile_all,
    failures,
    make,
    only,
    parse,
    random_inputs,
    refused,
    region_of,
)
from reference import FLOATS, evaluate

from onnxfuse.refusal import Refusal
from onnxfuse.schedules import SCHEDULES, Request, make_kernel, parse_choice
from onnxfuse.schedules.reductions.scans import LONG_COLUMN, LONG_ROW

LENGTHS = (0, 1, 31, 33, 64, 1025, 1032, 4097, 9000)

TOTALS = [f"CumSum<exclusive={exclusive}, reverse={reverse}>" for exclusive in (0, 1) for reverse in (0, 1)]


def rows(total: str, kind: str, sizes: str = "N,M", planned: Mapping[str, int] | None = None) -> Made:
    return make(f"g ({kind}[{sizes}] x, {kind}[{sizes}] z) => ({kind}[{sizes}] y) <int64 a = {{1}}> "
                f"{{ c = {total}(x, a) y = Add(c, z) }}", planned=planned)


@pytest.mark.parametrize("kind", [*FLOATING, "int32", "int64"])
@pytest.mark.parametrize("total", TOTALS)
def test_rows_of_lengths_known_only_when_running(total: str, kind: str) -> None:
    """Registers of a warp and of a block, and tiles; vectors where the length divides."""
    made = rows(total, kind)
    for length in LENGTHS if kind in ("float16", "int64") else (0, 33, 9000):
        check(made, random_inputs(made, {"N": 2, "M": length}), length=max(length, 1), limit=None)


@pytest.mark.parametrize("length", [1, 2, 5, 8, 16, 33, 100, 256, 1000, 1024, 4096, 5000, 40_000])
def test_rows_of_known_lengths(length: int) -> None:
    """From less than a warp a row, several rows of which share one, to a block that goes by tiles."""
    text = (f"g (float[N,{length}] x) => (float[N,{length}] y, float[N,{length}] n) <int64 a = {{1}}> "
            "{ e = Neg(x) y = CumSum(e, a) n = CumSum<exclusive=1>(y, a) }")
    made = make(text, planned={"N": 3})
    for count in (1, 3, 40 if length < 300 else 2):
        check(made, random_inputs(made, {"N": count}), length=length * length)


@pytest.mark.parametrize("kind", ["float", "float16", "int32"])
@pytest.mark.parametrize("total", TOTALS)
def test_rows_side_by_side(total: str, kind: str) -> None:
    made = rows(total, kind, "N,M,K", {"N": 64, "M": 16, "K": 64})
    assert made.kernel.plan.variants[0].name.startswith("scans_across_")
    for sizes in ({"N": 1, "M": 1, "K": 8}, {"N": 3, "M": 33, "K": 24}, {"N": 2, "M": 7, "K": 5}, {"N": 2, "M": 0, "K": 5},
                  {"N": 0, "M": 4, "K": 5}):
        check(made, random_inputs(made, sizes), length=33)


AROUND = {
    "softmax before": "g (T[N,M] x, T[N,M] z) => (T[N,M] y) <int64 a = {-1}> { p = Softmax(x) c = CumSum<reverse=1>(p, a) y = Mul(c, z) }",
    "norm behind": "g (T[N,M] x, T[M] w) => (T[N,M] y, T[N,M] c) <int64 a = {1}> { c = CumSum(x, a) y = LayerNormalization(c, w) }",
    "softmax behind": "g (T[N,M] x) => (T[N,M] y) <int64 a = {1}, T s = {2}> { h = Tanh(x) c = CumSum(h, a) d = Sub(c, s) y = Softmax(d) }",
    "reductions only": "g (T[N,M] x) => (T[N,1] m, T[N,1] l) <int64 a = {1}, int64[1] b = {1}> { c = CumSum(x, a) m = ReduceMax(c, b) l = ReduceMin(c, b) }",
    "totals of totals": "g (T[N,M] x) => (T[N,M] y) <int64 a = {1}> { c = CumSum(x, a) t = Tanh(c) d = CumSum<exclusive=1>(t, a) y = Add(c, d) }",
    "totals of what a mean leaves": "g (T[N,M] x) => (T[N,M] y, T[N,1] v) <int64 a = {1}, int64[1] b = {1}> "
                                    "{ m = ReduceMean(x, b) d = Sub(x, m) c = CumSum(d, a) v = ReduceMean(c, b) e = Sub(c, v) y = CumSum(e, a) }",
    "masks and casts": "g (T[N,M] x, bool[N,M] k) => (T[N,M] y, int64[N,M] p) <int64 a = {1}, int64 one = {1}, T none = {0}> "
                       "{ i = Cast<to=7>(k) c = CumSum(i, a) p = Sub(c, one) s = Where(k, x, none) t = CumSum(s, a) y = Where(k, t, x) }",
    "broadcasts": "g (T[N,1] x, T[M] w) => (T[N,M] y) <int64 a = {1}> { m = Mul(x, w) c = CumSum(m, a) y = Sub(c, w) }",
}


@pytest.mark.parametrize("kind", ["float", "float16"])
@pytest.mark.parametrize("case", AROUND)
def test_what_surrounds_totals(case: str, kind: str) -> None:
    made = make(AROUND[case].replace("T[", f"{kind}[").replace("T ", f"{kind} "), opset=18)
    assert made.kernel.schedule == "scans"
    for length in (1, 33, 2000):
        # A norm of what is almost no row of numbers is as exact as these.
        check(made, random_inputs(made, {"N": 2, "M": length}), length=length * 8, slack=8.0 if kind == "float16" else 4.0)


@pytest.mark.parametrize("case", ["softmax before", "softmax behind", "totals of totals", "masks and casts"])
def test_what_surrounds_totals_side_by_side(case: str) -> None:
    text = AROUND[case].replace("T[", "float[").replace("T ", "float ").replace("[N,M]", "[N,M,8]")
    text = text.replace("Softmax(", "Softmax<axis=1>(").replace("{-1}", "{1}")
    made = make(text, opset=18)
    for length in (1, 33, 200):
        check(made, random_inputs(made, {"N": 2, "M": length}), length=length * 8, slack=4.0)


@pytest.mark.parametrize("kind", FLOATING)
@pytest.mark.parametrize("total", TOTALS)
def test_what_is_no_number_reaches_none_before_it(total: str, kind: str) -> None:
    """NaN, infinities of both signs, and sums that overflow, at the ends and at borders of warps and tiles."""
    made = rows(total, kind)
    largest = float(np.finfo(np.float16).max) if kind == "float16" else 1e38 if kind in ("float", "bfloat16") else 1e308
    x = np.zeros((6, 2100), FLOATS[NAMES[kind]])
    for row, values in enumerate(([np.nan], [np.inf], [np.inf, -np.inf], [-0.0], [largest, largest, largest, largest], [1.0])):
        for place, value in zip((7, 31, 32, 2047), values * 4, strict=False):
            x[row, place] = value
    inputs = {"x": x, "z": np.zeros_like(x)}
    with np.errstate(all="ignore"):
        expected = evaluate(made.model, inputs)["y"]
        # float16 is summed in float32: what overflows on the way and comes back does not show.
        assert np.isnan(expected).any() and np.isinf(expected).any()
        check(made, inputs, length=2100)


@pytest.mark.parametrize("total", TOTALS[:2])
def test_threads_in_any_order_give_the_same_bits(total: str) -> None:
    made = rows(total, "float16")
    inputs = random_inputs(made, {"N": 3, "M": 700})
    given = arguments(made, inputs)
    for variant in variants_that_hold(made.kernel.plan, given, []):
        runs = [run_plan(made.kernel.plan, made.kernel.source, given, [], variant=variant, order=order)[0]
                for order in ("forward", "backward", 1, 2)]
        assert all(np.array_equal(runs[0], other) for other in runs[1:])


@pytest.mark.parametrize("text", [
    "g (float[N,M,8] x, float[8] w) => (float[N,M,8] y) <int64 a = {1}, int64[2] f = {0,-1}, int64[3] b = {0,-1,8}> "
    "{ s = Mul(x, w) r = Reshape(s, f) c = CumSum(r, a) t = Reshape(c, b) y = Mul(t, w) }",
    "g (float[N,M,8,4] x, float[8,4] w) => (float[N,M,8,4] y) <int64 a = {1}, int64[3] f = {0,-1,4}, int64[4] b = {0,-1,8,4}> "
    "{ s = Mul(x, w) r = Reshape(s, f) c = CumSum(r, a) t = Reshape(c, b) y = Mul(t, w) }",
], ids=["along", "across"])
def test_vectors_of_some_elements_are_asked_for_by_their_own_place(text: str) -> None:
    """What all groups of eight elements have in common is read in two stages: once, and before both."""
    made = make(text)
    assert made.kernel.schedule == "scans" and "ahead_digit0" in made.kernel.source
    for length in (1, 5, 33, 1025):
        check(made, random_inputs(made, {"N": 2, "M": length}), length=length * 64)


def test_integers_wrap() -> None:
    made = rows("CumSum", "int32")
    most = np.iinfo(np.int32).max
    x = np.full((1, 33), most, np.int32)
    assert not failures(made, {"x": x, "z": np.zeros_like(x)})


def test_an_axis_that_is_not_known_is_refused() -> None:
    refusal = refused("g (float[N,5] x, int64 a) => (float[N,5] y) { y = CumSum(x, a) }")
    assert refusal.code == "unknown-sizes"


REFUSALS = {
    "from either end": "g (float[N,M] x) => (float[N,M] y) <int64 a = {1}> { c = CumSum(x, a) d = CumSum<reverse=1>(x, a) y = Add(c, d) }",
    "at another place": "g (float[N,8] x) => (float[N,8] y) <int64 a = {1}, int64[1] f = {-1}, int64[1] t = {-9}, int64[1] o = {1}> "
                        "{ c = CumSum(x, a) s = Slice(c, f, t, o, f) y = Add(c, s) }",
    "over other rows": "g (float[N,N] x) => (float[N,N] y) <int64 a = {1}, int64 b = {0}> { c = CumSum(x, a) y = CumSum(c, b) }",
    "across and along": "g (float[N,64] x, float[64,N] z) => (float[N,64] y) <int64 a = {1}> { t = Transpose(z) s = Add(x, t) y = CumSum(s, a) }",
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_does_not_fit_one_kernel_is_refused(case: str) -> None:
    assert refused(REFUSALS[case]).code == "scan-structure"


SPLIT = {
    "along": ("N,M", {"N": 2, "M": 100_000}), "across": ("N,M,8", {"N": 1, "M": 8000}),
    "across, few": ("N,M,2", {"N": 1, "M": 5000}),
}
"""Few long rows: their sizes, and those that are planned."""


def of_any_length(made: Made, word: str = "split") -> Made:
    """The kernel's variants with a word in their names alone, for rows of any length and number."""
    plan = made.kernel.plan
    variants = tuple(replace(each, guards=tuple(guard for guard in each.guards if "sms" not in guard and (
        f"{LONG_ROW} " not in guard and f"{LONG_COLUMN} " not in guard))) for each in plan.variants if word in each.name)
    return only(made, variants)


@pytest.mark.parametrize("kind", ["float16", "int64"])
@pytest.mark.parametrize("total", TOTALS)
@pytest.mark.parametrize("case", SPLIT)
def test_few_long_rows_are_shared_by_blocks(case: str, total: str, kind: str) -> None:
    """One chunk and several, whole ones and cut ones, and rows of nothing."""
    sizes, planned = SPLIT[case]
    made = rows(total, kind, sizes, planned)
    names = variants_that_hold(made.kernel.plan, arguments(made, random_inputs(made, planned)))
    assert "split" in names[0]
    several = of_any_length(made)
    for length in (0, 1, 31, 33, 4097, 9000):
        check(several, random_inputs(several, {"N": 2, "M": length}), length=max(length, 1))


@pytest.mark.parametrize("sizes", ["[N,M]", "[N,M,4]"])
@pytest.mark.parametrize("case", AROUND)
def test_what_surrounds_totals_of_few_long_rows(case: str, sizes: str) -> None:
    """A step for each phase, and one before those that need totals, or for each level of these."""
    text = AROUND[case].replace("T[", "float[").replace("T ", "float ")
    if sizes != "[N,M]":
        if "LayerNormalization" in text:
            return
        text = text.replace("[N,M]", sizes).replace("[N,1]", "[N,1,4]").replace("[M]", "[M,4]")
        text = text.replace("Softmax(", "Softmax<axis=1>(").replace("{-1}", "{1}")
    made = of_any_length(make(text, opset=18, planned={"N": 1, "M": 300_000}))
    for length in (1, 33, 5000):
        check(made, random_inputs(made, {"N": 2, "M": length}), length=length * 8, slack=8.0)


@pytest.mark.parametrize("case", SPLIT)
def test_what_is_no_number_stays_in_its_row_and_behind_its_place(case: str) -> None:
    sizes, planned = SPLIT[case]
    for total in TOTALS:
        made = of_any_length(rows(total, "float", sizes, planned))
        inputs = random_inputs(made, {"N": 3, "M": 5000})
        x = inputs["x"].reshape(3, 5000, -1)
        x[0, 2047, 0], x[1, 2048, -1], x[2, 100, 0], x[2, 4500, 0] = np.nan, np.inf, np.inf, -np.inf
        check(made, inputs, length=5000)


@pytest.mark.parametrize("case", SPLIT)
def test_blocks_and_threads_in_any_order_give_the_same_bits(case: str) -> None:
    sizes, planned = SPLIT[case]
    made = of_any_length(rows("CumSum<reverse=1>", "float", sizes, planned))
    given = arguments(made, random_inputs(made, {"N": 2, "M": 9001}))
    for variant in variants_that_hold(made.kernel.plan, given, []):
        runs = [run_plan(made.kernel.plan, made.kernel.source, given, [], variant=variant, order=order)[0]
                for order in ("forward", "backward", 1)]
        assert all(np.array_equal(runs[0], other) for other in runs[1:])


@pytest.mark.parametrize(("text", "steps"), [
    ("(float16[64,50257] x) => (float16[64,50257] y) <int64 a = {1}> { e = Exp(x) y = CumSum(e, a) }", 2),
    ("(float16[4096,50257] x) => (float16[4096,50257] y) <int64 a = {1}> { e = Exp(x) y = CumSum(e, a) }", 1),
    ("(float16[64,4096] x) => (float16[64,4096] y) <int64 a = {1}> { e = Exp(x) y = CumSum(e, a) }", 1),
    ("(float[2,60000] x) => (float[2,60000] y) <int64 a = {1}> { p = Softmax(x) y = CumSum(p, a) }", 3),
    ("(float[2,60000] x) => (float[2,60000] y) <int64 a = {1}> { c = CumSum(x, a) t = Tanh(c) y = CumSum(t, a) }", 3),
    ("(float[2,8000,512] x) => (float[2,8000,512] y) <int64 a = {1}> { e = Exp(x) y = CumSum(e, a) }", 2),
    ("(float[64,1000,512] x) => (float[64,1000,512] y) <int64 a = {1}> { e = Exp(x) y = CumSum(e, a) }", 1),
])
def test_as_many_steps_are_expected_as_a_plan_has(text: str, steps: int) -> None:
    region = region_of(parse(f"g {text}"))
    assert not isinstance(region, Refusal)
    expected = SCHEDULES["scans"].expected(region.lowered, {}, 132)
    kernel = make_kernel(Request(region.lowered, "test"))
    assert expected is not None and not isinstance(kernel, Refusal)
    assert expected.steps == steps == len(kernel.plan.variants[0].steps)


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "scans"])
def test_no_other_schedule_holds_totals(schedule: str) -> None:
    region = region_of(parse("g (float[N,M] x) => (float[N,M] y) <int64 a = {1}> { y = CumSum(x, a) }"))
    assert not isinstance(region, Refusal)
    assert isinstance(make_kernel(Request(region.lowered, "test"), schedule), Refusal)


@pytest.mark.parametrize(("sizes", "planned"), [("N,M", {"N": 4000, "M": 768}), ("N,M,64", {"N": 16, "M": 64})])
def test_every_way_that_tuning_may_take(sizes: str, planned: Mapping[str, int]) -> None:
    made = rows("CumSum", "float16", sizes, planned)
    region = made.lowered
    own = made.kernel.plan.variants[0].name
    ways = []
    for choice in made.kernel.choices:
        assert parse_choice(str(choice)) == choice and SCHEDULES["scans"].words(choice)
        told = make_kernel(Request(region, "test", planned, choice))
        assert not isinstance(told, Refusal) and told.choice == choice
        ways.append(Made(**{**vars(made), "kernel": told}))
    assert len({own, *(way.kernel.plan.variants[0].name for way in ways)}) == 1 + len(ways) >= 2
    compile_all(ways)
    for way in ways:
        check(way, random_inputs(way, {"N": 2, "M": 64}), length=64, limit=1)
