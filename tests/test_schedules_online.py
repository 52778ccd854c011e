"""A softmax that streams: its maximum and its sum in one pass, over rows, columns, tiles and chunks of long rows."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from emulator import run_plan, variants_that_hold
from kernel_harness import Made, arguments, failures, make, only, random_inputs
from reference import evaluate

SOFTMAX = "g (T[B,L] x) => (T[B,L] y) { y = Softmax(x) }"
LOG_SOFTMAX = "g (T[B,L] x) => (T[B,L] y) { y = LogSoftmax(x) }"
SPELLED = ("g (T[B,L] x) => (T[B,L] y) <int64[1] a = {1}> "
           "{ m = ReduceMax(x, a) d = Sub(x, m) e = Exp(d) s = ReduceSum(e, a) y = Div(e, s) }")
COLUMNS = "g (T[B,L,C] x) => (T[B,L,C] y) { y = Softmax<axis=1>(x) }"
TURNED = "g (T[B,L,C] x) => (T[B,C,L] y) { s = Softmax<axis=1>(x) y = Transpose<perm=[0,2,1]>(s) }"
KINDS = ("float", "float16", "bfloat16", "double")


def made(text: str, kind: str, **planned: int) -> Made:
    return make(text.replace("T[", f"{kind}["), planned=planned)


def of_variants(one: Made, inputs: dict[str, np.ndarray], word: str, order: str | int = "forward") -> list[np.ndarray]:
    """What the variants with a word in their names give, those for longer rows too."""
    given = arguments(one, inputs)
    kernel = only(one, [
        replace(each, guards=tuple(guard for guard in each.guards if "<" not in guard))
        for each in one.kernel.plan.variants if word in each.name]).kernel
    names = variants_that_hold(kernel.plan, given, [])
    assert names
    return [run_plan(kernel.plan, kernel.source, given, variant=name, order=order)[0] for name in names]


WAYS = [
    (SOFTMAX, "stream", {"B": 8, "L": 1024}), (LOG_SOFTMAX, "stream", {"B": 8, "L": 1024}),
    (SPELLED, "stream", {"B": 8, "L": 1024}), (COLUMNS, "stream", {"B": 8, "L": 64, "C": 64}),
    (TURNED, "stream", {"B": 8, "L": 64, "C": 64}), (SOFTMAX, "split", {"B": 2, "L": 1_000_000}),
    (LOG_SOFTMAX, "split", {"B": 2, "L": 1_000_000}), (COLUMNS, "split", {"B": 2, "L": 100_000, "C": 16}),
]


def rows_of_edges(length: int, kind: str) -> np.ndarray:
    """Rows with NaN, infinities, huge numbers and rising ones, a row each."""
    x = np.random.default_rng(0).standard_normal((16, length)) * 4
    x[1, length // 2], x[2, length // 3] = np.nan, np.inf
    x[3], x[4, ::2], x[5, :-1] = -np.inf, -np.inf, -np.inf
    x[6], x[6, -1] = -np.inf, np.nan
    most = {"float16": 6e4, "bfloat16": 3e38, "float": 3e38, "double": 1e300}[kind]
    x[7], x[8, 0], x[9, -1] = -most, -most, most
    x[10] = np.linspace(-most / 2, most / 2, length)
    x[11] = 1000 + np.arange(length) % 7
    return x


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("text", "word", "planned"), WAYS)
def test_edges(text: str, word: str, planned: dict[str, int], kind: str) -> None:
    """NaN, infinities of either sign in part of a row and in all of it, numbers that differ by more than exp can say,
    maxima that come last, and those under which rounded offsets differ most: as numpy has it in float64."""
    one, length = made(text, kind, **planned), 208
    rows = rows_of_edges(length, kind)
    dtype = {"float": np.float32, "float16": np.float16, "double": np.float64}.get(kind)
    if dtype is None:
        import ml_dtypes
        dtype = ml_dtypes.bfloat16
    x = rows.astype(dtype)
    if "C" in planned:
        x = np.ascontiguousarray(x.T.reshape(1, length, len(rows)))
    (expected,) = (evaluate(one.model, {"x": x})[name] for name in ("y",))
    for got in of_variants(one, {"x": x}, word):
        wide, want = got.astype(np.float64), np.asarray(expected, np.float64)
        assert (np.isnan(wide) == np.isnan(want)).all()
        np.testing.assert_allclose(wide, want, atol={"float16": 2e-3, "bfloat16": 2e-2}.get(kind, 2e-6),
                                   rtol={"float16": 2e-3, "bfloat16": 1e-2}.get(kind, 2e-5))


@pytest.mark.parametrize(("text", "word", "planned"), WAYS)
def test_any_length_and_any_order_of_threads(text: str, word: str, planned: dict[str, int]) -> None:
    """Fewer elements than threads too: those without any have no maximum."""
    one = made(text, "float", **planned)
    for length in (1, 3, 40, 2100):
        inputs = random_inputs(one, {"B": 2, "L": length, "C": 9}, seed=length)
        inputs["x"] *= 30
        expected = evaluate(one.model, inputs)["y"]
        for order in ("forward", 7):
            for got in of_variants(one, inputs, word, order):
                np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("text", [SOFTMAX, LOG_SOFTMAX, SPELLED, COLUMNS, TURNED])
def test_rows_that_stream_are_read_twice(text: str) -> None:
    one = made(text, "float", B=8, L=64, C=64)
    assert one.kernel.phases == 2
    before, streaming = re.split(r"_streaming(?:_peeled)?\(", one.kernel.source.partition("\nextern")[0])
    assert "Phase 2 of 2" in streaming and "Phase 3" not in streaming
    # What stays in registers costs no read, and an exponential an element less.
    assert "Phase 3 of 3" in before


def test_few_long_rows_take_two_steps() -> None:
    one = made(SOFTMAX, "float16", B=2, L=1_000_000)
    split = next(each for each in one.kernel.plan.variants if each.name.startswith("split"))
    assert len(split.steps) == 2


@pytest.mark.parametrize(("text", "phases"), [
    # Another reduction over the powers, or over what the maximum is not of, takes a pass of its own.
    ("g (T[B,L] x) => (T[B,L] y) <int64[1] a = {1}> { m = ReduceMax(x, a) d = Sub(x, m) q = Mul(d, d) s = ReduceSum(q, a) y = Div(x, s) }", 3),
    ("g (T[B,L] x, T[B,L] z) => (T[B,L] y) <int64[1] a = {1}> { m = ReduceMax(z, a) d = Sub(x, m) e = Exp(d) s = ReduceSum(e, a) y = Div(e, s) }", 3),
    ("g (T[B,L] x) => (T[B,L] y) <int64[1] a = {1}> { p = Softmax(x) s = ReduceSum(p, a) y = Mul(p, s) }", 3),
    ("g (T[B,L] x) => (T[B,L] y) <int64[1] a = {1}> { m = ReduceMin(x, a) d = Sub(x, m) e = Exp(d) s = ReduceSum(e, a) y = Div(e, s) }", 3),
])
def test_other_reductions_keep_their_passes(text: str, phases: int) -> None:
    one = made(text, "float", B=8, L=1024)
    assert one.kernel.phases == phases
    inputs = random_inputs(one, {"B": 2, "L": 100})
    expected = evaluate(one.model, inputs)["y"]
    for got in of_variants(one, inputs, "stream"):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-6)


def test_a_sum_over_an_empty_row_is_zero_and_over_one_without_a_number_none() -> None:
    one = made("g (T[B,L] x) => (T[B,1] y) <int64[1] a = {1}> { m = ReduceMax(x, a) d = Sub(x, m) e = Exp(d) y = ReduceSum(e, a) }",
               "float", B=8, L=1024)
    for got in of_variants(one, {"x": np.zeros((3, 0), np.float32)}, "stream"):
        assert (got == 0).all()
    for got in of_variants(one, {"x": np.full((3, 40), -np.inf, np.float32)}, "stream"):
        assert np.isnan(got).all()
    assert not failures(one, random_inputs(one, {"B": 3, "L": 50}), length=50)


def test_a_sum_that_is_not_scaled_to_the_row_s_maximum_is_found() -> None:
    one = made(SOFTMAX, "float", B=8, L=1024)
    faulty = re.sub(r"\* of::Exp<true>::scale\(my_max0, of::Exp<true>::offset\(max0\)\)", "", one.kernel.source)
    assert faulty != one.kernel.source
    x = rows_of_edges(208, "float").astype(np.float32)
    expected = evaluate(one.model, {"x": x})["y"]
    name = next(each.name for each in one.kernel.plan.variants if "stream" in each.name)
    (got,) = run_plan(one.kernel.plan, faulty, [x], variant=name)
    assert not np.allclose(got, expected, rtol=1e-4, equal_nan=True)
