"""Products of whose results rows are reduced: in clusters, in one block, in two launches, and what is refused."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from kernel_harness import Made, check, make, only, random_inputs, refused, short_inputs, told

from onnxfuse.lowering.launch import Variant

SIZES = ({"M": 1, "K": 8}, {"M": 150, "K": 200})
"""A row, and two tiles and a part of one of rows, some stages and a part of one."""

FORMS: Mapping[str, str] = {
    "residual and norm": "g (T[M,K] a, T[K,N] b, T[N] c, T[M,N] r, T[N] s, T[N] t) => (T[M,N] y) "
                         "{ p = MatMul(a, b) q = Add(p, c) z = Add(q, r) y = LayerNormalization(z, s, t) }",
    "the sum as well": "g (T[2,M,K] a, T[K,N] b, T[2,M,N] r, T[N] s) => (T[2,M,N] y, T[2,M,N] z) "
                       "{ p = MatMul(a, b) z = Add(p, r) y = com.microsoft.SimplifiedLayerNormalization(z, s) }",
    "the same of both biases": "g (T[M,K] a, T[K,N] b, T[N] c, T[M,N] r, T[N] s) => (T[M,N] y) "
                               "{ p = MatMul(a, b) q = Add(c, p) z = Add(q, r) y = LayerNormalization(z, s, c) }",
    "the residual again": "g (T[M,K] a, T[K,N] b, T[M,N] r, T[N] s) => (T[M,N] y) "
                          "{ p = MatMul(a, b) z = Add(p, r) n = LayerNormalization(z, s) y = Add(n, r) }",
    "softmax": "g (T[M,K] a, T[N,K] b, T[N] c) => (T[M,N] y) { p = Gemm<transB = 1>(a, b, c) y = Softmax(p) }",
    "spelled out, of rows that are kept by two": "g (T[M,K] a, T[K,N] b) => (T[M,N] y, T[M,N] u) "
        "{ p = MatMul(a, b) x = Constant<value = int64[1] {-1}>() m = ReduceMax(p, x) d = Sub(p, m) e = Exp(d) "
        "s = ReduceSum(e, x) y = Div(e, s) l = Log(s) u = Sub(d, l) }",
}

COLUMNS = {"residual and norm": 256, "the same of both biases": 128, "the residual again": 128, "the sum as well": 192, "softmax": 200, "spelled out, of rows that are kept by two": 136}


def made_of(form: str, columns: int, kind: str = "float16") -> Made:
    """A form with rows of so many elements."""
    return make(FORMS[form].replace("N]", f"{columns}]").replace("[N,", f"[{columns},").replace("T[", f"{kind}["), 21)


def first(made: Made) -> Made:
    """The variant of one launch alone."""
    return only(made, [replace(made.kernel.plan.variants[0], guards=())])


def ways(made: Made) -> list[Made]:
    """The kernel in each of its ways."""
    return [made, *(told(made, choice, {}) for choice in made.kernel.choices)]


def blocks(variant: Variant) -> int:
    """Of a cluster."""
    (step,) = variant.launches
    return 1 if step.cluster is None else int(step.cluster[0])


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    """In as many blocks as there are ways: parts of tiles, of stages and of pieces."""
    kinds = ("float16", "bfloat16") if form == "residual and norm" else ("float16",)
    for kind in kinds:
        made = made_of(form, COLUMNS[form], kind)
        assert made.kernel.schedule == "product_rows"
        for way in {blocks(each.kernel.plan.variants[0]): each for each in ways(made)}.values():
            for sizes in SIZES:
                check(first(way), random_inputs(way, sizes), length=sizes["K"], misalign=False)


@pytest.mark.parametrize("columns", [64, 96, 1000])
def test_rows_of_one_block_and_of_eight(columns: int) -> None:
    made = made_of("residual and norm", columns)
    found = {blocks(each.kernel.plan.variants[0]): each for each in ways(made)}
    assert (1 in found) == (columns <= 256) and (8 in found or columns < 1000)
    way = found[max(found)]
    check(first(way), random_inputs(way, {"M": 70, "K": 72}), length=72, misalign=False)


@pytest.mark.parametrize("form", ["residual and norm", "softmax", "softmax of bare sums"])
def test_float32(form: str) -> None:
    """Weights lie along the sum: others are not copied."""
    forms = {**FORMS, "softmax of bare sums": FORMS["softmax"].replace("(a, b, c)", "(a, b)")}
    text = forms[form].replace("T[K,N] b", "T[N,K] w").replace("p = MatMul(a, b)", "p = Gemm<transB = 1>(a, w)")
    made = make(text.replace("N]", "136]").replace("[N,", "[136,").replace("T[", "float["), 21)
    check(first(made), short_inputs(made, {"M": 70, "K": 72}), length=72, misalign=False, slack=4.0)


def test_more_stages_than_there_is_room_for() -> None:
    """What a stage brings next is asked for when all blocks have multiplied what was there, and what is last no more."""
    made = made_of("residual and norm", 256)
    way = {blocks(each.kernel.plan.variants[0]): each for each in ways(made)}[4]
    check(first(way), random_inputs(way, {"M": 40, "K": 1104}), length=1104, misalign=False, orders=["forward", "backward", 3])


def test_blocks_in_any_order() -> None:
    """Nobody reads what the others find before it is there."""
    made = made_of("residual and norm", 256)
    way = {blocks(each.kernel.plan.variants[0]): each for each in ways(made)}[4]
    for order in ("backward", 3, 4):
        check(first(way), random_inputs(way, {"M": 70, "K": 136}), length=136, misalign=False, orders=[order])


def test_two_launches() -> None:
    """Everywhere else, by vectors and one by one; what is between is a result, or in scratch memory."""
    for form, scratch in (("residual and norm", 1), ("the sum as well", 0)):
        made = made_of(form, 96)
        plan = made.kernel.plan
        assert len(plan.scratch) == scratch and all(len(each.launches) == 2 for each in plan.variants[1:])
        chosen = [each for each in plan.variants[1:] if "one copies" not in each.name]
        for variant in (chosen[0], chosen[-1]):
            check(only(made, [replace(variant, guards=())]), random_inputs(made, {"M": 70, "K": 40}), length=40, misalign=False)


def test_without_rows_or_without_a_sum() -> None:
    made = made_of("residual and norm", 128)
    for sizes in ({"M": 0, "K": 16}, {"M": 5, "K": 0}):
        check(made, random_inputs(made, sizes), limit=1)


def test_what_is_infinite_shows_in_its_row_alone() -> None:
    made = made_of("softmax", 200)
    inputs = random_inputs(made, {"M": 40, "K": 72})
    inputs["a"][7, 71], inputs["a"][33, 0] = np.inf, np.nan
    check(first(made), inputs, length=72, misalign=False)


def test_rows_that_no_cluster_holds_are_refused() -> None:
    text = FORMS["residual and norm"].replace("T[", "float16[")
    assert "1536 at most" in refused(text.replace("N]", "1544]")).message
    assert "elements" in refused(text).message


def test_reductions_of_other_rows_are_refused() -> None:
    """Over half a row, and over rows of several."""
    head = "g (float16[M,K] a, float16[K,128] b) => "
    halves = head + ("(float16[M,2,64] y) { p = MatMul(a, b) h = Constant<value = int64[3] {-1,2,64}>() "
                     "q = Reshape(p, h) y = Softmax(q) }")
    down = head + "(float16[M,128] y) { p = MatMul(a, b) y = Softmax<axis = 0>(p) }"
    for text in (halves, down):
        assert refused(text, 21).code in ("product-structure", "reduction-structure")


def test_what_rows_amount_to_is_no_result() -> None:
    text = ("g (float16[M,K] a, float16[K,128] b) => (float16[M,128] y, float16[M,1] m) { p = MatMul(a, b) "
            "x = Constant<value = int64[1] {-1}>() m = ReduceMax(p, x) y = Sub(p, m) }")
    assert refused(text, 21).code == "product-structure"


def test_what_all_rows_have_is_not_kept() -> None:
    """A bias that is added again behind the norm is at hand; of a residual each row has another."""
    made = made_of("the same of both biases", 1024)
    assert {choice["columns"] for choice in made.kernel.choices} == {128}
    text = FORMS["the residual again"].replace("N]", "1024]").replace("[N,", "[1024,").replace("T[", "float16[")
    assert "fills the registers" in refused(text, 21).message


def test_a_variance_of_what_is_not_kept() -> None:
    """Squares are of differences from a mean that all blocks agree on first, where the block's own is not at hand."""
    text = ("g (float16[M,K] a, float16[K,256] b, float16[M,256] r, float16[256] w) => (float16[M,256] y) "
            "{ p = MatMul(a, b) x = Constant<value = int64[1] {-1}>() z = Add(p, r) l = ReduceMax(z, x) q = Mul(p, w) "
            "m = ReduceMean(q, x) d = Sub(q, m) k = Mul(d, d) v = ReduceMean(k, x) e = Add(z, l) y = Mul(e, v) }")
    made = make(text, 21)
    assert "take_squares" not in made.kernel.source
    check(first(made), random_inputs(made, {"M": 70, "K": 72}), length=72, misalign=False, slack=4.0)


def test_two_norms_of_one_sum() -> None:
    """Both means, and then both variances, are told at a time."""
    text = ("g (float16[M,K] a, float16[K,200] b, float16[M,200] r, float16[200] s, float16[200] t) => "
            "(float16[M,200] y, float16[M,200] z) { p = MatMul(a, b) q = Add(p, r) y = LayerNormalization(p, s, t) "
            "z = LayerNormalization(q, t) }")
    made = make(text, 21)
    assert made.kernel.source.count("float own_count") == 1
    check(first(made), random_inputs(made, {"M": 70, "K": 72}), length=72, misalign=False, slack=4.0)


@pytest.mark.parametrize("results", ["nzy", "zny"])
def test_two_launches_of_several_results(results: str) -> None:
    """One before the sum that rows are reduced of, which is a result itself, and one behind."""
    given = ", ".join(f"float16[M,96] {name}" for name in results)
    text = (f"g (float16[M,K] a, float16[K,96] b, float16[M,96] r, float16[96] s) => ({given}) "
            "{ p = MatMul(a, b) z = Add(p, r) n = Tanh(p) y = com.microsoft.SimplifiedLayerNormalization(z, s) }")
    made = make(text, 21)
    plan = made.kernel.plan
    assert not plan.scratch
    last = only(made, [replace(plan.variants[-1], guards=())])
    check(last, random_inputs(made, {"M": 70, "K": 40}), length=40, misalign=False)
