"""Convolutions of whose results a norm over windows is taken: which norms, in three launches and in two, and refusals."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from kernel_harness import Made, attempt, check, make, only, parse, random_inputs, refused, short_inputs, told

from onnxfuse.ir.scalars import FLOAT
from onnxfuse.schedules.products.norms import ProductNorms

LAST = "x = Transpose<perm = [0,3,1,2]>(t) w = Transpose<perm = [0,3,1,2]>(v)"
NORM = ("r = Reshape(c, d) i = InstanceNormalization(r, o, u) j = Reshape(i, f) m = Mul(j, s) a = Add(m, e) "
        "h = Sigmoid(a) l = Mul(a, h)")
END = "y = Transpose<perm = [0,2,3,1]>(l)"

PIXELS = ("g (T[2,128,64,64] t, T[24,1,1,64] v, T[24] b, T[2] o, T[2] u, T[24,1,1] s, T[24,1,1] e) "
          "=> (T[2,128,64,24] y) <int64[3] d = {0,2,-1}, int64[4] f = {-1,24,128,64}> "
          f"{{ {LAST} c = Conv(x, w, b) {NORM} {END} }}")
"""Groups of 12 channels: what is known of them is told of each."""

FORMS: Mapping[str, str] = {
    "groups of channels, pixels": PIXELS,
    "windows, groups of eight": (
        "g (T[1,128,64,64] t, T[16,3,3,64] v, T[2] o, T[2] u, T[16,1,1] s, T[16,1,1] e) => (T[1,128,64,16] y) "
        "<int64[3] d = {0,2,-1}, int64[4] f = {-1,16,128,64}> "
        f"{{ {LAST} c = Conv<pads = [1,1,1,1]>(x, w) {NORM} {END} }}"),
    "a residual, whose sum is a result": (
        "g (T[2,128,64,64] t, T[72,1,1,64] v, T[72] b, T[2,128,64,72] z, T[4] o, T[4] u) => (T[2,128,64,72] y, T[2,128,64,72] q) "
        "<int64[3] d = {0,4,-1}, int64[4] f = {-1,72,128,64}> "
        f"{{ {LAST} k = Conv(x, w, b) n = Transpose<perm = [0,2,3,1]>(k) q = Add(n, z) c = Transpose<perm = [0,3,1,2]>(q) "
        "r = Reshape(c, d) i = InstanceNormalization(r, o, u) j = Reshape(i, f) l = Relu(j) " + END + " }"),
    "windows, a residual, two pieces of columns": (
        "g (T[1,128,64,64] t, T[128,3,3,64] v, T[128] b, T[1,128,64,128] z, T[4] o, T[4] u) => (T[1,128,64,128] y) "
        "<int64[3] d = {0,4,-1}, int64[4] f = {-1,128,128,64}> "
        f"{{ {LAST} k = Conv<pads = [1,1,1,1]>(x, w, b) n = Transpose<perm = [0,2,3,1]>(k) q = Add(n, z) "
        "c = Transpose<perm = [0,3,1,2]>(q) r = Reshape(c, d) i = InstanceNormalization(r, o, u) j = Reshape(i, f) "
        "l = Relu(j) " + END + " }"),
    "one axis, a scale for each group": (
        "g (T[2,8192,64] t, T[24,3,64] v, T[2] s, T[2] e) => (T[2,8192,24] y) { x = Transpose<perm = [0,2,1]>(t) "
        "w = Transpose<perm = [0,2,1]>(v) c = Conv<pads = [1,1]>(x, w) n = GroupNormalization<num_groups = 2>(c, s, e) "
        "y = Transpose<perm = [0,2,1]>(n) }"),
    "a scale of each group that is divided": (
        "g (T[1,128,64,64] t, T[24,1,1,64] v, float[2,1] s) => (T[1,128,64,24] y) "
        "<int64[3] d = {0,2,-1}, int64[4] f = {-1,24,128,64}> "
        f"{{ {LAST} c = Conv(x, w) r = Reshape(c, d) o = Cast<to = 1>(r) n = Constant<value = int64[1] {{2}}>() "
        "m = ReduceMean(o, n) k = Sub(o, m) q = Mul(k, k) p = ReduceMean(q, n) h = Constant<value_float = 0.00001>() "
        "e = Add(p, h) i = Sqrt(e) a = Div(s, i) b = Mul(k, a) u = CastLike(b, c) l = Reshape(u, f) " + END + " }"),
    "statistics of a batch": (
        "g (T[2,128,128,64] t, T[16,1,1,64] v, T[16] b) => (T[2,128,128,16] y) "
        f"{{ {LAST} c = Conv(x, w, b) n = Constant<value = int64[3] {{0,2,3}}>() f = Cast<to = 1>(c) m = ReduceMean(f, n) "
        "k = Sub(f, m) q = Mul(k, k) p = ReduceMean(q, n) h = Constant<value_float = 0.00001>() r = Add(p, h) "
        "i = Sqrt(r) a = Div(k, i) l = CastLike(a, c) " + END + " }"),
}


def made_of(form: str, kind: str = "float16") -> Made:
    return make(FORMS[form].replace("T[", f"{kind}["), 20)


def first(made: Made) -> Made:
    """The variant of three launches alone."""
    return only(made, [replace(made.kernel.plan.variants[0], guards=())])


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    """In all tiles: parts of tiles of columns, tiles that groups of warps share, and one each."""
    made = made_of(form)
    assert made.kernel.schedule == "product_norms" and len(made.kernel.plan.variants[0].launches) == 3
    ways = [made, *(told(made, choice, {}) for choice in made.kernel.choices)]
    assert len({way.kernel.source for way in ways}) == len(ways)
    for way in ways if form == "groups of channels, pixels" else ways[:1]:
        check(first(way), random_inputs(way, {}), length=576, misalign=False)


@pytest.mark.parametrize(("images", "kind", "rows"), [(1, "float16", 64), (16, "bfloat16", 128)])
def test_windows_may_share_pieces_of_the_image(images: int, kind: str, rows: int) -> None:
    """Of few images a group has one strip of 64 windows, of many two."""
    text = FORMS["windows, a residual, two pieces of columns"].replace("[1,128,64", "[N,128,64")
    made = make(text.replace("T[", f"{kind}["), 20, planned={"N": images})
    ways = [way for way in (made, *(told(made, choice, {"N": images}) for choice in made.kernel.choices))
            if "_shared" in way.kernel.plan.variants[0].launches[0].kernel]
    assert any(f"_{rows}x128x" in way.kernel.plan.variants[0].launches[0].kernel for way in ways)
    for way in ways:
        check(first(way), random_inputs(way, {"N": 1}), length=576, misalign=False, orders=["backward", 3, 4],
              multiprocessors=3)


def test_other_types() -> None:
    made = made_of("groups of channels, pixels", "bfloat16")
    check(first(made), random_inputs(made, {}), length=64, misalign=False)
    text = PIXELS.replace("T[", "float[")
    made = make(text, 20)
    assert made.kernel.rounds and made.kernel.schedule == "product_norms"
    check(first(made), short_inputs(made, {}), length=64, misalign=False, slack=4.0)


def test_any_number_of_images() -> None:
    made = make(PIXELS.replace("[2,128", "[N,128").replace("T[", "float16["), 20)
    for images in (1, 3):
        check(first(made), random_inputs(made, {"N": images}), length=64, misalign=False, limit=1)


def test_two_launches() -> None:
    """Everywhere else; what is between is a result, or in scratch memory."""
    for form in ("groups of channels, pixels", "a residual, whose sum is a result"):
        made = made_of(form)
        assert all(len(each.launches) == 3 for each in made.kernel.plan.variants[1:])
        check(only(made, [replace(made.kernel.plan.variants[-1], guards=())]), random_inputs(made, {}), length=64,
              misalign=False, limit=1)


def test_blocks_in_any_order() -> None:
    """Warps wait for what the others of their group know, and before they write over it."""
    for form in ("groups of channels, pixels", "a residual, whose sum is a result",
                 "windows, a residual, two pieces of columns"):
        made = made_of(form)
        for way in (made, *(told(made, choice, {}) for choice in made.kernel.choices)):
            check(first(way), random_inputs(way, {}), length=64, misalign=False, orders=["backward", 3, 4],
                  multiprocessors=3)


def test_blocks_in_any_order_where_sums_are_rows() -> None:
    """The same of float32, whose residuals no copies bring."""
    made = made_of("a residual, whose sum is a result", "float")
    check(first(made), short_inputs(made, {}), length=64, misalign=False, slack=4.0, orders=["backward", 3, 4],
          multiprocessors=3)


@pytest.mark.parametrize("residual", [False, True])
def test_a_group_goes_through_two_strips(residual: bool) -> None:
    """Of 64 rows each, what is known of both together."""
    text = FORMS["a residual, whose sum is a result"] if residual else PIXELS
    text = text.replace("72" if residual else "24", "128").replace("[2,128,64", "[N,128,64").replace("T[", "float16[")
    made = make(text, 20, planned={"N": 16})
    assert made.kernel.plan.variants[0].launches[0].kernel.startswith("product_128x128x6_specialised2_moments")
    check(first(made), random_inputs(made, {"N": 1}), length=64, misalign=False, limit=1)


def test_a_small_variance_about_a_large_mean() -> None:
    made = make(PIXELS.replace("T[", "float["), 20)
    inputs = short_inputs(made, {})
    inputs["b"] = inputs["b"] + np.float32(1000)
    check(first(made), inputs, length=64, misalign=False, slack=4.0)


def test_what_is_no_number_shows_in_its_image_alone() -> None:
    made = made_of("groups of channels, pixels")
    inputs = random_inputs(made, {})
    inputs["t"][1, 3, 5, 7] = np.nan
    check(first(made), inputs, length=64, misalign=False)


def test_norms_of_what_no_tiles_hold_are_refused() -> None:
    """Rows that a block reads once, windows that boxes do not fill, and images of unknown size."""
    small = PIXELS.replace("128,64", "8,64").replace("T[", "float16[")
    assert "once" in refused(small, 20).message
    odd = FORMS["windows, groups of eight"].replace("128,64", "127,63").replace("T[", "float16[")
    assert "whole" in refused(odd, 20).message


def test_other_reductions_are_none_of_its() -> None:
    """A mean alone, a largest number, and groups of which channels lie apart."""
    mean = PIXELS.replace(NORM, "k = Constant<value = int64[2] {2,3}>() m = ReduceMean(c, k) l = Sub(c, m)")
    largest = mean.replace("ReduceMean", "ReduceMax")
    apart = PIXELS.replace("r = Reshape(c, d)", "n = Constant<value = int64[5] {2,12,2,128,64}>() g = Reshape(c, n) "
                           "p = Transpose<perm = [0,2,1,3,4]>(g) r = Reshape(p, d)")
    for text in (mean, largest, apart):
        assert refused(text.replace("T[", "float16["), 20).code in ("product-structure", "reduction-structure")


def test_time_counts_what_follows() -> None:
    made = made_of("groups of channels, pixels")
    assert made.kernel.pace is not None and made.kernel.pace.behind == 2 * 2 * 2 * 128 * 64 * 24
    assert ProductNorms().sharing(made.kernel) == ()
    assert made.kernel.plan.outputs[0].dtype != FLOAT


def test_reductions_before_the_convolution_are_no_norm_of_it() -> None:
    text = ("g (float16[2,8,16,16] x, float16[8] o, float16[8] u, float16[8,8,1,1] w) => (float16[2,8,16,16] y) "
            "{ n = InstanceNormalization(x, o, u) y = Conv(n, w) }")
    made = attempt(parse(text, 20))
    assert not isinstance(made, Made) or made.kernel.schedule != "product_norms"
