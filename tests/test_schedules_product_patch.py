"""Convolutions of few channels over a piece of the image: every form of windows, tiles that images do not fill, choices."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from kernel_harness import Made, check, make, only, random_inputs, short_inputs, told

from onnxfuse.compiling import source_of
from onnxfuse.runtime.compile import default_compiler
from onnxfuse.schedules import Kernel

LAST = "y = Transpose<perm = [0,2,3,1]>"
FIRST = ("g (T[2,3,30,32] x, T[40,3,3,3] w, T[40] b) => (T[2,40,15,16] y) "
         "{ c = Conv<pads = [1,1,1,1], strides = [2,2]>(x, w, b) s = Sigmoid(c) y = Mul(c, s) }")
STEM = ("g (T[2,3,30,37] x, T[40,3,7,7] w, T[40] b) => (T[2,15,19,40] y) "
        f"{{ c = Conv<pads = [3,3,3,3], strides = [2,2]>(x, w, b) r = Relu(c) {LAST}(r) }}")

CASES: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "stem": (STEM, {}),
    "channels last": ("g (T[2,17,21,3] t, T[24,3,3,3] w) => (T[2,17,21,24] y) { x = Transpose<perm = [0,3,1,2]>(t) "
                      f"c = Conv<pads = [1,1,1,1]>(x, w) {LAST}(c) }}", {}),
    "any size, dilated, uneven": (
        "g (T[N,2,H,W] x, T[72,2,5,3] w) => (T[N,P,Q,72] y) "
        f"{{ c = Conv<pads = [4,0,1,2], dilations = [2,1], strides = [1,2]>(x, w) {LAST}(c) }}",
        {"N": 3, "H": 11, "W": 14, "P": 8, "Q": 7}),
    "one axis, computed, a residual": (
        "g (T[2,6,L] x, T[20,6,9] w, T[2,P,20] z) => (T[2,P,20] y) { s = Sigmoid(x) c = Conv<strides = [2]>(s, w) "
        "t = Transpose<perm = [0,2,1]>(c) y = Add(t, z) }", {"L": 301, "P": 147}),
    "channels first": (FIRST, {}),
    "channels first, no vectors": (FIRST.replace("30,32", "29,37").replace("15,16", "15,19").replace("40", "13"), {}),
    "channels first, lines that vectors do not divide, though they divide all places": (
        FIRST.replace("30,32", "23,24").replace("15,16", "12,12"), {}),
    "channels first, any size, lines that vectors do not divide": (
        "g (T[N,2,H,W] x, T[24,2,3,3] w) => (T[N,24,H,W] y) { y = Conv<pads = [1,1,1,1]>(x, w) }",
        {"N": 2, "H": 8, "W": 12}),
    "channels first, any size, numbers of channels and images": (
        "g (T[N,2,H,W] x, T[72,2,5,3] w, T[1,72,1,1] z, T[N,1,1,1] q) => (T[N,72,P,Q] y) "
        "{ c = Conv<pads = [4,0,1,2], dilations = [2,1], strides = [1,2]>(x, w) s = Add(c, z) y = Mul(s, q) }",
        {"N": 3, "H": 11, "W": 30, "P": 8, "Q": 16}),
    "channels first of an image that has them last": (
        "g (T[2,17,24,3] t, T[24,3,3,3] w) => (T[2,24,17,24] y) { x = Transpose<perm = [0,3,1,2]>(t) "
        "y = Conv<pads = [1,1,1,1]>(x, w) }", {}),
    "channels first, one axis": (
        "g (T[2,6,L] x, T[20,6,9] w, T[2,20,P] z) => (T[2,20,P] y) { s = Sigmoid(x) c = Conv<strides = [2]>(s, w) "
        "y = Add(c, z) }", {"L": 301, "P": 147}),
    "no vectors of results": ("g (T[1,3,9,40] x, T[13,3,4,4] w) => (T[1,2,13,13] y) "
                              f"{{ c = Conv<strides = [3,3]>(x, w) {LAST}(c) }}", {}),
}


def patched(text: str, kind: str = "float16", planned: Mapping[str, int] | None = None) -> Made:
    """The kernel, with the variant that reads a piece of the image alone."""
    made = make(text.replace("T[", f"{kind}["), planned=planned)
    assert made.kernel.plan.variants[0].steps[0].kernel.startswith("product_patch_")
    return only(made, [replace(made.kernel.plan.variants[0], guards=())])


@pytest.mark.parametrize("case", CASES)
def test_windows(case: str) -> None:
    text, sizes = CASES[case]
    for kind in ("float16", "bfloat16") if case == "stem" else ("float16",):
        made = patched(text, kind, sizes)
        check(made, random_inputs(made, sizes), length=150, misalign=False)


def test_vectors_of_windows_are_stored() -> None:
    made = patched(FIRST)
    assert "constexpr int width = 8;" in made.kernel.source and "- width)" in made.kernel.source
    check(made, random_inputs(made, {}), length=150)


@pytest.mark.parametrize("text", [STEM, FIRST], ids=["last", "first"])
def test_float32_is_rounded_to_what_tensor_cores_read(text: str) -> None:
    made = make(text.replace("T[", "float["))
    variant, *others = made.kernel.plan.variants
    assert variant.steps[0].kernel.startswith("product_patch_") and "80 sm <=" in variant.guards
    assert not any("80 sm <=" in other.guards for other in others)
    assert any("vectors" in other.name for other in others)
    made = only(made, [replace(variant, guards=())])
    check(made, short_inputs(made, {}), length=150, misalign=False)


def test_two_results_have_room_to_be_laid_out() -> None:
    """Two pieces of both, of 16 windows each, are no more than what a warp lays out sums in."""
    made = patched(STEM.replace("y) {", "y, T[2,15,19,40] z) {").replace(" }", " z = Transpose<perm = [0,2,3,1]>(c) }")
                   .replace("40", "24"))
    check(made, random_inputs(made, {}), length=150, misalign=False)


def test_blocks_in_any_order_go_through_many_tiles() -> None:
    """Nobody fills the piece of an image while another still reads the one before."""
    made = patched(STEM)
    for order in ("backward", 3):
        check(made, random_inputs(made, {}), length=150, misalign=False, orders=[order], multiprocessors=1)


def test_what_is_infinite_shows_in_its_windows_alone() -> None:
    """What fills up a window's last 16 elements is zero, whatever lies there."""
    made = patched(STEM)
    inputs = random_inputs(made, {})
    inputs["x"][0, 0, 0, [0, 21]], inputs["x"][1, 2, 29, 36] = np.inf, np.nan
    check(made, inputs, length=150, misalign=False)


@pytest.mark.parametrize("text", [STEM, FIRST], ids=["last", "first"])
def test_every_choice(text: str) -> None:
    made = make(text.replace("T[", "float16[").replace("40", "136"))
    choices = [choice for choice in made.kernel.choices if "wide" in dict(choice.settings)]
    assert len(choices) == 5
    for choice in choices:
        one = told(made, choice, {})
        assert one.kernel.choice == choice
        check(only(one, one.kernel.plan.variants[:1]), random_inputs(made, {}), length=150, misalign=False)


def test_all_is_asked_for_at_once_where_blocks_have_one_tile_each() -> None:
    """Of one that goes through many registers hold no more."""
    for text, lone in ((STEM, True), (LARGE.replace("T[2,", "T[64,"), False)):
        name = make(text.replace("T[", "float16[")).kernel.plan.variants[0].steps[0].kernel
        assert name.startswith("product_patch_") and name.endswith("_lone") == lone


@pytest.mark.parametrize("text", [
    FIRST.replace("[2,3,30,32] x", "[2,3,480] x").replace("[40,3,3,3]", "[40,3,1]").replace("15,16] y", "480] y").replace(
        "<pads = [1,1,1,1], strides = [2,2]>", ""),
    STEM.replace("7,7", "15,15").replace("15,19,40", "11,15,40"),
    "g (T[2,3,4,15,17] x, T[40,3,3,3,3] w) => (T[2,4,15,17,40] y) "
    "{ c = Conv<pads = [1,1,1,1,1,1]>(x, w) y = Transpose<perm = [0,2,3,4,1]>(c) }"],
    ids=["no windows", "large windows", "three axes"])
def test_where_nothing_is_read_so(text: str) -> None:
    made = make(text.replace("T[", "float16["))
    assert not any("patch" in each.steps[0].kernel for each in made.kernel.plan.variants)


LARGE = STEM.replace("30,37", "224,224").replace("15,19", "112,112")
LARGE_FIRST = FIRST.replace("30,32", "224,224").replace("15,16", "112,112")


@pytest.mark.parametrize("text", [LARGE, LARGE_FIRST], ids=["last", "first"])
@pytest.mark.parametrize("architecture", ["sm_75", "sm_90"])
def test_it_fits_registers(architecture: str, text: str) -> None:
    kernel = make(text.replace("T[", "float16[")).kernel
    assert isinstance(kernel, Kernel)
    names = {name for name in kernel.plan.kernels if "patch" in name}
    code = kernel.code.keeping(names)  # type: ignore[union-attr]
    figures = default_compiler().figures(source_of(replace(kernel, code=code).source, kernel.plan), architecture)
    assert figures is not None and [each.spilled_bytes for each in figures.values()] == [0]
