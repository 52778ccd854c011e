"""The table of tolerances: what passes and what does not, type by type.  References are float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto

from onnxfuse.verifying.comparison import Comparison, Leeway, compared, replace_unowed
from onnxfuse.verifying.tolerances import reduction_factor, ulp

FLOAT, HALF, BFLOAT, INT, BOOL = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.INT64,
                                  TensorProto.BOOL)
NUMPY: dict[int, Any] = {FLOAT: np.float32, HALF: np.float16, BFLOAT: ml_dtypes.bfloat16}


def samples(count: int = 4000, seed: int = 0) -> NDArray[np.float64]:
    return np.random.default_rng(seed).standard_normal(count)


def of(got: Any, wanted: NDArray[Any], dtype: int, arithmetic: int | None = FLOAT, own: Any = None,
           length: int = 1) -> Comparison:
    own = None if own is None else np.asarray(own).astype(NUMPY[dtype])
    return compared(np.asarray(got).astype(NUMPY[dtype]), [wanted], own, (dtype, arithmetic), Leeway(length))


@pytest.mark.parametrize("dtype", [FLOAT, HALF, BFLOAT])
def test_a_rounded_reference_passes_and_one_percent_does_not(dtype: int) -> None:
    wanted = samples()
    assert of(wanted, wanted, dtype, dtype).passed
    assert of(wanted, wanted, dtype, dtype).ratio < 0.6
    assert not of(wanted * 1.01, wanted, dtype, dtype).passed
    assert not of(wanted * 1.01, wanted, dtype, dtype, own=wanted).passed


def test_float32_is_judged_by_the_outputs_scale() -> None:
    wanted = samples()
    scale = np.abs(wanted).max()
    assert of(wanted + 0.9e-5 * scale, wanted, FLOAT).passed
    result = of(wanted + 1.2e-5 * scale, wanted, FLOAT)
    assert not result.passed
    assert result.error == pytest.approx(1.2e-5, rel=0.05)
    assert result.limit == pytest.approx(1e-5, rel=0.05)


def test_longer_sums_may_err_more() -> None:
    wanted = samples()
    off = wanted + 3e-5 * np.abs(wanted).max()
    assert reduction_factor(4096) == 1.0 and reduction_factor(2**20) == 16.0
    assert not of(off, wanted, FLOAT, length=4096).passed
    assert of(off, wanted, FLOAT, length=2**20).passed


def test_an_ill_conditioned_body_may_err_as_the_original_does() -> None:
    wanted = samples()
    own = wanted + 1e-3 * samples(seed=1)
    assert of(wanted + 1e-3 * samples(seed=2), wanted, FLOAT, own=own).passed
    assert not of(wanted + 1e-2 * samples(seed=2), wanted, FLOAT, own=own).passed


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
def test_narrow_types_have_two_units_in_the_last_place_or_the_originals_error(dtype: int) -> None:
    wanted = samples(20).astype(NUMPY[dtype]).astype(np.float64)
    step = ulp(wanted, dtype)
    one_off = wanted + 2 * step * (np.arange(20) == 3)
    assert of(one_off, wanted, dtype, dtype).passed
    assert not of(wanted + 3 * step * (np.arange(20) == 3), wanted, dtype, dtype).passed
    largest = float((3.2 * step).max())
    own = wanted + largest
    assert of(wanted + 3 * step * (np.arange(20) == 3), wanted, dtype, dtype, own=own).passed


@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
def test_a_small_fault_everywhere_shows_in_the_mean_square(dtype: int) -> None:
    wanted = samples().astype(NUMPY[dtype]).astype(np.float64)
    result = of(wanted + 1.5 * ulp(wanted, dtype), wanted, dtype, dtype)
    assert result.wrong == 0 and result.ratio > 1 and not result.passed


def test_float32_of_float16_arithmetic_is_judged_as_float16() -> None:
    wanted = samples()
    assert not of(wanted * (1 + 3e-4), wanted, FLOAT, FLOAT).passed
    assert of(wanted * (1 + 3e-4), wanted, FLOAT, HALF).passed


def test_what_is_only_moved_must_be_exact() -> None:
    wanted = samples().astype(np.float32).astype(np.float64)
    assert of(wanted, wanted, FLOAT, None).passed
    off = wanted.copy()
    off[7] *= 1 + 2e-7
    result = of(off, wanted, FLOAT, None)
    assert (result.passed, result.wrong, result.where) == (False, 1, (7,))


@pytest.mark.parametrize(("got", "wanted", "own", "passed"), [
    (np.nan, np.nan, None, True), (np.nan, 1.0, None, False), (1.0, np.nan, None, False),
    (np.inf, np.inf, None, True), (np.inf, -np.inf, None, False), (np.inf, 1.0, None, False),
    (np.inf, 70000.0, None, True), (65504.0, 70000.0, None, False), (-np.inf, 70000.0, None, False),
    (np.inf, 65504.0, None, False), (65504.0, 65504.0, None, True), (np.inf, 65519.5, None, True),
    (np.nan, 1.0, np.nan, True), (np.inf, 1.0, np.inf, True), (np.inf, 1.0, np.nan, False),
    (np.nan, 1.0, 1.0, False), (1.0, 1.0, np.nan, True), (2.0, 1.0, np.nan, False),
])
def test_what_is_not_finite_float16(got: float, wanted: float, own: float | None, passed: bool) -> None:
    """Infinite where the reference is, or rounds to it; else only what the original itself gives."""
    result = of([got], np.array([wanted]), HALF, HALF, None if own is None else [own])
    assert result.passed is passed


def test_where_bfloat16_ends() -> None:
    """Half a unit past its largest number, at 2**128 - 2**119, what is rounded to it becomes infinite."""
    edge = 2.0**128 - 2.0**119
    assert of([np.inf], np.array([edge * (1 + 2.0**-12)]), BFLOAT, BFLOAT).passed
    assert not of([np.inf], np.array([edge * (1 - 2.0**-6)]), BFLOAT, BFLOAT).passed


def test_integers_and_booleans_are_exact() -> None:
    wanted = np.array([[1, 2], [3, 4]])
    assert compared(wanted.copy(), [wanted], None, (INT, FLOAT)).passed
    result = compared(wanted + np.array([[0, 0], [1, 0]]), [wanted], None, (INT, FLOAT))
    assert (result.passed, result.wrong, result.where, result.got, result.wanted) == (False, 1, (1, 0), "4", "3")
    truth = np.array([True, False])
    poison = np.array([1, 255], np.uint8).view(np.bool_)
    assert compared(truth.copy(), [truth], None, (BOOL, None)).passed
    assert not compared(poison, [truth], None, (BOOL, None)).passed


def test_a_number_on_the_edge_may_fall_to_either_side() -> None:
    wanted, above, below = np.array([1, 2, 3]), np.array([1, 3, 3]), np.array([1, 2, 2])
    result = compared(np.array([1, 3, 2]), [wanted, above, below], None, (INT, FLOAT))
    assert result.passed and not result.steady
    assert not compared(np.array([0, 3, 2]), [wanted, above, below], None, (INT, FLOAT)).passed
    numbers = [array * 1.5 for array in (wanted, above, below)]
    assert compared(np.array([1.5, 4.5, 4.5], np.float32), numbers, None, (FLOAT, FLOAT)).passed
    assert compared(np.array([1.5, 3, 4.5], np.float32), numbers, None, (FLOAT, FLOAT)).steady


def test_another_shape_fails() -> None:
    result = compared(np.zeros((2, 3), np.float32), [np.zeros((3, 2))], None, (FLOAT, FLOAT))
    assert (result.passed, result.got, result.wanted) == (False, "shape (2, 3)", "shape (3, 2)")
    assert result.wrong == 6
    assert compared(np.zeros(0, np.float32), [np.zeros(2)], None, (FLOAT, FLOAT)).wrong == 1, "even where nothing is"


def test_empty_outputs_pass() -> None:
    for dtype, kind in ((FLOAT, np.float32), (INT, np.int64), (HALF, np.float16)):
        empty = np.zeros((0, 4), kind)
        assert compared(empty, [empty], empty, (dtype, FLOAT)).passed


@pytest.mark.parametrize(("dtype", "kind"), [(FLOAT, np.float32), (HALF, np.float16), (11, np.float64)])
def test_units_in_the_last_place(dtype: int, kind: Any) -> None:
    """Beside NumPy's own, which steps away from zero."""
    values = np.concatenate([samples(50), samples(50) * 1e-5, [1.0, 0.5, 2.0, 1024.0, 0.0]]).astype(kind)
    np.testing.assert_array_equal(ulp(values, dtype), np.abs(np.spacing(values)).astype(np.float64))


@pytest.mark.parametrize("dtype", [FLOAT, HALF, BFLOAT])
def test_a_tensor_without_axes_is_judged_like_one_element(dtype: int) -> None:
    right, wrong = of(3.0, np.array(3.0), dtype, dtype), of(3.3, np.array(3.0), dtype, dtype)
    assert right.passed and right.where == () and right.count == 1
    assert not wrong.passed and wrong.where == () and float(wrong.wanted) == 3
    assert not of(np.nan, np.array(3.0), dtype, dtype).passed
    assert of(np.nan, np.array(np.nan), dtype, dtype).passed


def test_nothing_is_owed_where_float64_alone_has_a_number() -> None:
    """An element that the original and float32 have no number for may be anything; one that either has, or float64 has
    not, may not."""
    nan = float("nan")
    exact = np.array([2.0, 2.0, 2.0, nan, 2.0])
    own, single = (np.array(values, np.float32) for values in ([nan, nan, 1, nan, np.inf], [nan, 2, nan, nan, nan]))
    got = np.full(5, 7, np.float32)
    assert replace_unowed(got, single, exact, own).tolist() == [2, 7, 7, 7, 7]
    (first, *rest) = replace_unowed(got.astype(ml_dtypes.bfloat16), single, exact, own).astype(np.float64)
    assert first == 2 and rest == [7] * 4


def test_what_float32_has_as_infinite_may_be_that() -> None:
    """Where the original has no number: of a quotient of two infinities, say."""
    nan, inf = float("nan"), float("inf")
    exact, own = np.full(5, 2.0), np.array([nan, nan, nan, nan, 1.0], np.float32)
    got, single = np.array([-inf, inf, nan, 7, -inf], np.float32), np.full(5, -inf, np.float32)
    assert replace_unowed(got, single, exact, own).tolist() == [2, inf, 2, 7, -inf]


@pytest.mark.parametrize("dtype", [FLOAT, HALF, BFLOAT])
@pytest.mark.parametrize("fault", ["none", "one element", "everywhere", "not finite", "to one side"])
def test_blocks_are_judged_as_the_whole_is(dtype: int, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = {FLOAT: np.float32, HALF: np.float16, BFLOAT: ml_dtypes.bfloat16}[dtype]
    exact = samples(300).reshape(15, 20)
    exact[3] *= 1e-3
    own, got = (exact * (1 + 2e-3)).astype(kind), exact.astype(kind)
    sides = [exact]
    if fault == "one element":
        got[12, 7] *= kind(1.1)
    elif fault == "everywhere":
        got = (exact * 1.004).astype(kind)
    elif fault == "not finite":
        exact[2, 3] = own[2, 3] = np.inf
        own[4, 4] = np.nan
    elif fault == "to one side":
        sides.append(exact + np.where(np.arange(20) == 7, 1.0, 0.0))
        got[12, 7] = sides[1][12, 7]
    known = [own, None]
    whole = [compared(got, sides, each, (dtype, dtype)) for each in known]
    monkeypatch.setattr("onnxfuse.verifying.blocks.BLOCK", 7)
    monkeypatch.setattr("onnxfuse.verifying.comparison.LOOKED", 300)
    for before, each in zip(whole, known, strict=True):
        apart = compared(got, sides, each, (dtype, dtype))
        assert replace(apart, ratio=0, limit=0) == replace(before, ratio=0, limit=0)
        assert (apart.ratio, apart.limit) == pytest.approx((before.ratio, before.limit), rel=1e-12)
    every = [compared(got, sides, each, (dtype, dtype)) for each in known]
    monkeypatch.setattr("onnxfuse.verifying.comparison.LOOKED", 1)
    for before, each in zip(every, known, strict=True):
        less = compared(got, sides, each, (dtype, dtype))
        assert (less.passed, less.wrong, less.error, less.steady) == (
            before.passed, before.wrong, before.error, before.steady)
        assert less.ratio <= before.ratio and (less.passed or less.ratio == before.ratio)
