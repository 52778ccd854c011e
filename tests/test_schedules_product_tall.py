"""Tall and skinny products: how operands lie and results are computed, rows that warps do not fill, choices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from kernel_harness import Made, check, make, only, random_inputs, short_inputs, told

from onnxfuse.compiling import source_of
from onnxfuse.runtime.compile import default_compiler
from onnxfuse.schedules import Kernel
from onnxfuse.schedules.products.tall import LEAST_ROWS

ROWS = {"N": 2 * LEAST_ROWS}
SILU = ("g (T[N,24] x, T[144,24] w, T[144] b) => (T[N,144] y) "
        "{ p = Gemm<transB = 1>(x, w, b) q = Sigmoid(p) y = Mul(p, q) }")
RESIDUAL = ("g (T[N,144] x, T[24,144] w, T[24] b, T[N,24] r) => (T[N,24] y) "
            "{ p = Gemm<transB = 1>(x, w, b) y = Add(p, r) }")

CASES: Mapping[str, str] = {
    "SiLU": SILU,
    "a residual": RESIDUAL,
    "one step": "g (T[N,16] x, T[96,16] w) => (T[N,96] y) { p = Gemm<transB = 1>(x, w) y = Relu(p) }",
    "less than a step": "g (T[N,8] x, T[16,8] w) => (T[N,16] y) { y = Gemm<transB = 1>(x, w) }",
    "a pair of steps and one, columns that vectors of eight do not divide": (
        "g (T[N,40] x, T[20,40] w, T[20] b) => (T[N,20] y) { y = Gemm<transB = 1>(x, w, b) }"),
    "columns lie side by side": "g (T[N,64] x, T[64,72] w) => (T[N,72] y) { p = MatMul(x, w) y = Tanh(p) }",
    "an operand that is computed": (
        "g (T[N,32] x, T[32] s, T[16,32] w) => (T[N,16] y) { a = Mul(x, s) c = Sigmoid(a) "
        "y = Gemm<transB = 1>(c, w) }"),
    "two results": (
        "g (T[N,24] x, T[48,24] w, T[48] b) => (T[N,48] y, T[N,48] z) "
        "{ y = Gemm<transB = 1>(x, w, b) z = Relu(y) }"),
    "two results, a residual": (
        "g (T[N,24] x, T[48,24] w, T[N,48] r) => (T[N,48] y, T[N,48] z) "
        "{ p = Gemm<transB = 1>(x, w) y = Add(p, r) z = Relu(y) }"),
    "parts": (
        "g (T[N,24] x, T[48,24] w) => (T[N,16] y, T[N,32] z) <int64[2] s = {16,32}> "
        "{ p = Gemm<transB = 1>(x, w) y, z = Split<axis = 1>(p, s) }"),
    "an image, channels last": (
        "g (T[N,7,9,24] t, T[40,24,1,1] w, T[40] b) => (T[N,7,9,40] y) { x = Transpose<perm = [0,3,1,2]>(t) "
        "c = Conv(x, w, b) r = Relu(c) y = Transpose<perm = [0,2,3,1]>(r) }"),
    "an image in steps of two": (
        "g (T[N,7,9,24] t, T[40,24,1,1] w) => (T[N,4,5,40] y) { x = Transpose<perm = [0,3,1,2]>(t) "
        "c = Conv<strides = [2,2]>(x, w) y = Transpose<perm = [0,2,3,1]>(c) }"),
}


def first(made: Made) -> Made:
    """The kernel whose first variant's warps go through rows alone, told so where another is expected to be quicker."""
    if made.kernel.plan.variants[0].steps[0].kernel.startswith("product_tall_"):
        return made
    return told(made, next(each for each in made.kernel.choices if "alone" in dict(each.settings)), ROWS)


def tall(text: str, kind: str = "float16") -> Made:
    """The same with that variant alone."""
    made = first(make(text.replace("T[", f"{kind}["), planned=ROWS))
    assert made.kernel.plan.variants[0].steps[0].kernel.startswith("product_tall_")
    return only(made, [replace(made.kernel.plan.variants[0], guards=())])


@pytest.mark.parametrize("case", CASES)
def test_products(case: str) -> None:
    for kind in ("float16", "bfloat16") if case == "SiLU" else ("float16",):
        made = tall(CASES[case], kind)
        for rows in (1, 3) if "image" in case else (1, 31, 4097):
            check(made, random_inputs(made, {"N": rows}), length=150, misalign=False)


@pytest.mark.parametrize("case", ["SiLU", "one step", "a residual"])
def test_float32_is_rounded_to_what_tensor_cores_read(case: str) -> None:
    text = CASES[case].replace("144", "72")
    made = first(make(text.replace("T[", "float["), planned=ROWS))
    variant, *others = made.kernel.plan.variants
    assert variant.steps[0].kernel.startswith("product_tall_") and "80 sm <=" in variant.guards
    assert any("80 sm <=" not in other.guards for other in others)
    made = only(made, [replace(variant, guards=())])
    for rows in (31, 257):
        check(made, short_inputs(made, {"N": rows}), length=150, misalign=False)


def test_results_that_are_too_many_to_be_computed_where_sums_are() -> None:
    """Of 12 bytes an element, a lane's of 16 columns are more than it lays out at a time."""
    text = ("g (T[N,24] x, T[48,24] w) => (T[N,48] y, T[N,48] z, T[N,48] u) "
            "{ y = Gemm<transB = 1>(x, w) z = Relu(y) u = Neg(y) }")
    made = first(make(text.replace("T[", "float["), planned=ROWS))
    made = only(made, [replace(made.kernel.plan.variants[0], guards=())])
    check(made, short_inputs(made, {"N": 31}), length=150, misalign=False)


@pytest.mark.parametrize("case", ["SiLU", "a residual"])
def test_blocks_in_any_order_go_through_many_rows(case: str) -> None:
    """No warp lays rows out over those that another of its lanes still stores."""
    made = tall(CASES[case])
    for order in ("backward", 3):
        check(made, random_inputs(made, {"N": 1100}), length=150, misalign=False, orders=[order], multiprocessors=1)


def test_what_is_infinite_shows_in_its_row_alone() -> None:
    """Rows past the last are the last one again, and what fills up steps is zero, whatever lies there."""
    made = tall(CASES["a pair of steps and one, columns that vectors of eight do not divide"])
    inputs = random_inputs(made, {"N": 37})
    inputs["x"][3, 7], inputs["x"][36, 39] = np.inf, np.nan
    check(made, inputs, length=150, misalign=False)


def test_what_has_other_forms_is_not_read_so() -> None:
    for text in (SILU.replace("24", "12"), SILU.replace("144", "264"), SILU.replace("24", "168"),
                 SILU.replace("144", "13"), SILU.replace("N", "4096")):
        made = make(text.replace("T[", "float16["), planned=ROWS)
        assert not any("tall" in each.steps[0].kernel for each in made.kernel.plan.variants), text


def test_what_is_expected_to_be_the_quickest() -> None:
    """Where one pair of steps is summed up, or columns are few; of others it is a choice."""
    for columns, depth, expected in ((256, 32, True), (32, 96, True), (40, 96, False), (64, 64, False)):
        made = make(SILU.replace("144", str(columns)).replace("24", str(depth)).replace("T[", "float16["), planned=ROWS)
        assert made.kernel.plan.variants[0].steps[0].kernel.startswith("product_tall_") == expected
        assert any("alone" in dict(choice.settings) for choice in made.kernel.choices) != expected


@pytest.mark.parametrize("architecture", ["sm_75", "sm_90"])
@pytest.mark.parametrize("text", [SILU, RESIDUAL, SILU.replace("24", "160").replace("144", "256"),
                                  CASES["an operand that is computed"]])
def test_it_fits_registers(architecture: str, text: str) -> None:
    kernel = first(make(text.replace("T[", "float16["), planned=ROWS)).kernel
    assert isinstance(kernel, Kernel)
    names = {name for name in kernel.plan.kernels if "tall" in name}
    code = kernel.code.keeping(names)  # type: ignore[union-attr]
    figures = default_compiler().figures(source_of(replace(kernel, code=code).source, kernel.plan), architecture)
    assert figures is not None and [each.spilled_bytes for each in figures.values()] == [0] * len(names)


def test_what_follows_and_what_is_summed_up_take_time() -> None:
    """More of either is predicted to take longer."""
    def predicted(text: str) -> float:
        pace = first(make(text.replace("[N,", "[401408,").replace("T[", "float16["))).kernel.pace
        assert pace is not None and pace.whole is not None
        return pace.whole

    plain = SILU.replace("q = Sigmoid(p) y = Mul(p, q)", "y = Relu(p)")
    assert predicted(plain) < predicted(SILU) and predicted(plain) < predicted(plain.replace("24", "48"))
    assert predicted(plain) < predicted(plain.replace("144", "192")) < 60e-6
