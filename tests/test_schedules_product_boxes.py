"""Convolutions whose windows are copied in boxes: every form of windows, boxes that images do not fill, choices."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from emulator import variants_that_hold
from kernel_harness import Made, arguments, check, make, only, random_inputs, short_inputs, told

from onnxfuse.schedules.choice import Choice
from onnxfuse.schedules.kernel import Pace
from onnxfuse.schedules.products.boxes import Box, box_of
from onnxfuse.schedules.products.maps import line_of
from onnxfuse.schedules.products.windows import WindowAxis, Windows

LAST = "x = Transpose<perm = [0,3,1,2]>(t) w = Transpose<perm = [0,3,1,2]>(v)"
PLAIN = ("g (T[2,9,11,64] t, T[72,3,3,64] v, T[72] b) => (T[2,9,11,72] y) "
         f"{{ {LAST} c = Conv<pads = [1,1,1,1]>(x, w, b) r = Relu(c) y = Transpose<perm = [0,2,3,1]>(r) }}")

DEEP = "x = Transpose<perm = [0,4,1,2,3]>(t) w = Transpose<perm = [0,4,1,2,3]>(v)"
THREE = ("g (T[2,3,5,7,64] t, T[24,3,3,3,64] v, T[24] b) => (T[2,3,5,7,24] y) "
         f"{{ {DEEP} c = Conv<pads = [1,1,1,1,1,1]>(x, w, b) r = Relu(c) y = Transpose<perm = [0,2,3,4,1]>(r) }}")
PLANES = ("g (T[3,12,5,8,64] t, T[40,2,1,2,64] v) => (T[3,11,5,7,40] y) "
          f"{{ {DEEP} c = Conv(x, w) y = Transpose<perm = [0,2,3,4,1]>(c) }}")

CASES: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "a window, bias and activation": (PLAIN, {}),
    "strides": (PLAIN.replace("pads", "strides = [2,2], pads").replace("9,11,72", "5,6,72"), {}),
    "any size, dilated, uneven": (
        "g (T[N,H,W,128] t, T[72,5,3,128] v) => (T[N,P,Q,72] y) { "
        f"{LAST} c = Conv<pads = [4,0,1,2], dilations = [2,1], strides = [1,2]>(x, w) y = Transpose<perm = [0,2,3,1]>(c) }}",
        {"N": 3, "H": 11, "W": 14, "P": 8, "Q": 7}),
    "one axis, a residual": (
        "g (T[2,L,64] t, T[40,9,64] v, T[2,P,40] z) => (T[2,P,40] y) { x = Transpose<perm = [0,2,1]>(t) "
        "w = Transpose<perm = [0,2,1]>(v) c = Conv<strides = [2]>(x, w) d = Transpose<perm = [0,2,1]>(c) y = Add(d, z) }",
        {"L": 301, "P": 147}),
    "windows of one line": (
        "g (T[1,3,40,64] t, T[16,1,3,64] v) => (T[1,3,38,16] y) { "
        f"{LAST} c = Conv(x, w) y = Transpose<perm = [0,2,3,1]>(c) }}", {}),
    "windows of one column": (
        "g (T[2,9,5,64] t, T[16,7,1,64] v) => (T[2,9,5,16] y) { "
        f"{LAST} c = Conv<pads = [3,0,3,0]>(x, w) y = Transpose<perm = [0,2,3,1]>(c) }}", {}),
    "every second place alone": (
        "g (T[3,14,14,64] t, T[24,1,1,64] v) => (T[3,7,7,24] y) { "
        f"{LAST} c = Conv<strides = [2,2]>(x, w) y = Transpose<perm = [0,2,3,1]>(c) }}", {}),
    "channels that fill no stage": (PLAIN.replace(",64]", ",40]"), {}),
    "a part of one, strides, dilated, uneven": (
        "g (T[3,11,14,72] t, T[72,5,3,72] v) => (T[3,8,7,72] y) { "
        f"{LAST} c = Conv<pads = [4,0,1,2], dilations = [2,1], strides = [1,2]>(x, w) y = Transpose<perm = [0,2,3,1]>(c) }}", {}),
    "a part of one, weights with their sums in the second place": (
        "g (T[2,6,6,80] t, T[3,3,80,64] v) => (T[2,6,6,64] y) { x = Transpose<perm = [0,3,1,2]>(t) "
        "w = Transpose<perm = [3,2,0,1]>(v) c = Conv<pads = [1,1,1,1]>(x, w) y = Transpose<perm = [0,2,3,1]>(c) }", {}),
    "weights with their sums in the second place": (
        "g (T[2,6,6,64] t, T[3,3,64,64] v) => (T[2,6,6,64] y) { x = Transpose<perm = [0,3,1,2]>(t) "
        "w = Transpose<perm = [3,2,0,1]>(v) c = Conv<pads = [1,1,1,1]>(x, w) y = Transpose<perm = [0,2,3,1]>(c) }", {}),
    "three axes, bias and activation": (THREE, {}),
    "three axes, a part of a stage": (THREE.replace(",64]", ",40]"), {}),
    "three axes, any size, strides, dilated, uneven, a residual": (
        "g (T[N,D,H,W,64] t, T[24,4,3,2,64] v, T[N,O,P,Q,24] z) => (T[N,O,P,Q,24] y) { "
        f"{DEEP} c = Conv<pads = [2,0,1,1,2,0], dilations = [1,2,3], strides = [3,1,2]>(x, w) "
        "l = Transpose<perm = [0,2,3,4,1]>(c) y = Add(l, z) }",
        {"N": 2, "D": 10, "H": 7, "W": 9, "O": 4, "P": 5, "Q": 4}),
    "three axes, windows of several planes alone": (
        "g (T[2,7,3,5,64] t, T[24,3,1,1,64] v) => (T[2,4,3,5,24] y) { "
        f"{DEEP} c = Conv<pads = [1,0,0,1,0,0], strides = [2,1,1]>(x, w) y = Transpose<perm = [0,2,3,4,1]>(c) }}", {}),
    "three axes, windows within a plane alone": (
        "g (T[2,3,6,5,64] t, T[24,1,3,2,64] v) => (T[2,3,4,6,24] y) { "
        f"{DEEP} c = Conv<pads = [0,0,1,0,0,1]>(x, w) y = Transpose<perm = [0,2,3,4,1]>(c) }}", {}),
    "three axes, every second place alone": (
        "g (T[2,5,6,8,64] t, T[24,1,1,1,64] v) => (T[2,3,3,4,24] y) { "
        f"{DEEP} c = Conv<strides = [2,2,2]>(x, w) y = Transpose<perm = [0,2,3,4,1]>(c) }}", {}),
    "three axes, a part of a stage, weights with their sums in the second place": (
        "g (T[2,3,4,5,80] t, T[2,3,2,80,64] v) => (T[2,2,4,4,64] y) { x = Transpose<perm = [0,4,1,2,3]>(t) "
        "w = Transpose<perm = [4,3,0,1,2]>(v) c = Conv<pads = [0,1,0,0,1,0]>(x, w) y = Transpose<perm = [0,2,3,4,1]>(c) }", {}),
}

CASES = {
    **CASES,
    "channels that fill half a stage, strides": (
        PLAIN.replace(",64]", ",32]").replace("pads", "strides = [2,2], pads").replace("9,11,72", "5,6,72"), {}),
    "channels that fill a quarter": (PLAIN.replace(",64]", ",16]"), {}),
    "a stage and a half, any size, a residual": (
        "g (T[N,H,W,96] t, T[40,3,5,96] v, T[N,H,W,40] z) => (T[N,H,W,40] y) { "
        f"{LAST} c = Conv<pads = [1,2,1,2]>(x, w) l = Transpose<perm = [0,2,3,1]>(c) y = Add(l, z) }}",
        {"N": 2, "H": 7, "W": 13}),
    "half a stage, weights with their sums in the second place": (
        "g (T[2,6,6,32] t, T[3,3,32,64] v) => (T[2,6,6,64] y) { x = Transpose<perm = [0,3,1,2]>(t) "
        "w = Transpose<perm = [3,2,0,1]>(v) c = Conv<pads = [1,1,1,1]>(x, w) y = Transpose<perm = [0,2,3,1]>(c) }", {}),
    "three axes, half a stage": (THREE.replace(",64]", ",32]"), {}),
}

PLAINEST = ("channels that fill half a stage, strides", "channels that fill a quarter", "a window, bias and activation", "channels that fill no stage", "three axes, bias and activation",
            "three axes, a part of a stage")


def boxed(text: str, kind: str = "float16", planned: Mapping[str, int] | None = None) -> list[Made]:
    """The kernel in each way that copies boxes, with the variant that does alone."""
    made = make(text.replace("T[", f"{kind}["), planned=planned)
    found = [told(made, choice, planned or {}) for choice in made.kernel.choices if "taps" in dict(choice.settings)]
    assert found
    return [only(way, [replace(way.kernel.plan.variants[0], guards=())]) for way in found]


@pytest.mark.parametrize("case", CASES)
def test_windows(case: str) -> None:
    text, sizes = CASES[case]
    for kind in ("float16", "bfloat16", "float") if case in PLAINEST else ("float16",):
        for made in boxed(text, kind, sizes):
            check(made, short_inputs(made, sizes), length=600, misalign=False)


def test_sizes_that_a_box_was_not_chosen_for() -> None:
    """A box is as right for other images as for those that it suits."""
    text, _ = CASES["any size, dilated, uneven"]
    for made in boxed(text, planned={"N": 32, "H": 33, "W": 14, "P": 30, "Q": 7}):
        sizes = {"N": 4, "H": 12, "W": 24, "P": 9, "Q": 12}  # of seven places side by side the last two are none
        check(made, random_inputs(made, sizes), length=600, misalign=False)
    text, planned = CASES["three axes, any size, strides, dilated, uneven, a residual"]
    sizes = {"N": 1, "D": 16, "H": 9, "W": 15, "O": 6, "P": 7, "Q": 7}
    for made in boxed(text, planned=planned):
        check(made, random_inputs(made, sizes), length=600, misalign=False)


def test_blocks_in_any_order_go_through_many_tiles() -> None:
    """Rows behind a box's last are none, though the next image has them: a block writes its own results alone."""
    for made in (*boxed(PLAIN.replace("2,9,11", "3,20,23")), *boxed(PLAIN.replace("2,9,11", "37,7,7")), *boxed(PLANES)):
        for order, multiprocessors in (("backward", 132), (3, 1)):
            check(made, random_inputs(made, {}), length=600, misalign=False, orders=[order],
                  multiprocessors=multiprocessors)


def test_what_is_infinite_shows_in_its_windows_alone() -> None:
    """What rows that no window has hold shows nowhere; outside of an image lies zero, which infinity makes NaN."""
    for made in boxed(PLAIN):
        inputs = random_inputs(made, {})
        inputs["t"][0, 0, [0, 7], 5], inputs["t"][1, 8, 10, 63] = np.inf, np.nan
        check(made, inputs, length=600, misalign=False)


@pytest.mark.parametrize("text", [
    PLAIN.replace("64", "36"),  # places 72 bytes apart
    PLAIN.replace("t)", "s)").replace("{ x", "{ s = Sigmoid(t) x"),  # computed
    *(PLAIN.replace("T[2,9,11,64] t", f"T[{once},64] t").replace("t)", "e)").replace(
        "y) {", "y) <int64[4] s = {2,9,11,64}> {").replace("{ x", "{ e = Expand(t, s) x")
      for once in ("1,9,11", "2,1,11", "2,9,1")),  # one line, say, for all
    PLAIN.replace("T[2,9,11,64] t", "T[2,9,11,68] t").replace("t)", "s)").replace(
        "y) {", "y) <int64[1] f = {0}, int64[1] l = {64}, int64[1] a = {3}> {").replace(
        "{ x", "{ s = Slice(t, f, l, a) x"),  # places 136 bytes apart
    PLAIN.replace("T[2,9,11,64] t", "T[2,9,11,128] t").replace("t)", "s)").replace(
        "y) {", "y) <int64[1] f = {0}, int64[1] l = {128}, int64[1] a = {3}, int64[1] e = {2}> {").replace(
        "{ x", "{ s = Slice(t, f, l, a, e) x"),  # every second channel
    PLAIN.replace("T[2,9,11,64] t", "T[2,9,11,128] t").replace("pads", "group = 2, pads"),
    PLAIN.replace("T[72,3,3,64] v", "T[72,64,3,3] w").replace("w = Transpose<perm = [0,3,1,2]>(v) ", ""),  # places last
    PLAIN.replace("T[72,3,3,64] v", "T[72,5,3,64] v").replace("[0,3,1,2]>(v)", "[0,3,2,1]>(v)").replace(
        "[1,1,1,1]", "[1,2,1,2]"),  # columns of windows before their lines
    PLAIN.replace("pads", "strides = [1,9], pads").replace("9,11,72", "9,2,72"),  # no copy leaves so many out
    PLAIN.replace("T[2,9,11,64] t", "T[2,64,9,11] x").replace("x = Transpose<perm = [0,3,1,2]>(t) ", ""),  # channels first
    THREE.replace("T[2,3,5,7,64] t", "T[2,1,5,7,64] t").replace("t)", "e)").replace(
        "y) {", "y) <int64[5] s = {2,3,5,7,64}> {").replace("{ x", "{ e = Expand(t, s) x"),  # one plane for all
    THREE.replace("pads", "strides = [9,1,1], pads").replace("2,3,5,7,24", "2,1,5,7,24"),  # as above
    "g (T[2,2,3,4,5,64] t, T[24,1,2,2,2,64] v) => (T[2,2,2,3,4,24] y) { x = Transpose<perm = [0,5,1,2,3,4]>(t) "
    "w = Transpose<perm = [0,5,1,2,3,4]>(v) c = Conv(x, w) y = Transpose<perm = [0,2,3,4,5,1]>(c) }",  # four axes
    THREE.replace("pads", "group = 2, pads").replace("T[2,3,5,7,64]", "T[2,3,5,7,128]"),
])
def test_others_are_not_copied_so(text: str) -> None:
    made = make(text.replace("T[", "float16["))
    assert not any("taps" in dict(choice.settings) for choice in made.kernel.choices)


def test_guards() -> None:
    """Without an element, or at an address that no map may have, another variant runs."""
    text, sizes = CASES["any size, dilated, uneven"]
    made = make(text.replace("T[", "float16["), planned=sizes)
    choice = next(choice for choice in made.kernel.choices if "taps" in dict(choice.settings))
    made = told(made, choice, sizes)
    first = made.kernel.plan.variants[0].name
    for empty, place, holds in ((False, 0, True), (True, 0, False), (False, 1, False)):
        given = arguments(made, random_inputs(made, {**sizes, **({"N": 0, "P": 8} if empty else {})}))
        assert (first in variants_that_hold(made.kernel.plan, given, misalign={0: place})) == holds


@pytest.mark.parametrize(("results", "expected"), [
    (64, ["128 x 64", "128 x 64", "128 x 64", "256 x 64", "64 x 64", "64 x 64"]), (256, ["128 x 128", "128 x 256", "256 x 128"])])
def test_tiles_that_are_expected_to_take_least_are_tried_first(results: int, expected: list[str]) -> None:
    text = PLAIN.replace("72", f"{results}").replace("2,9,11", "N,H,W").replace("T[", "float16[")
    made = make(text, planned={"N": 32, "H": 56, "W": 56})
    own = made.kernel.plan.variants[0].name
    tried = [f"{choice['rows']} x {choice['columns']}" for choice in made.kernel.choices
             if "taps" in (settings := dict(choice.settings)) and "shared" not in settings]
    first = [] if "share" in own else [own.removeprefix("tiles of ").partition(",")[0]]
    assert "by one copy" in own and [*first, *tried] == expected


@pytest.mark.parametrize(("channels", "microseconds"), [
    (64, 0.0), (128, 0.0), (48, 0.61), (24, 1.03), (40, 0.6)])
def test_stages_that_are_zeros_in_part_are_waited_for(channels: int, microseconds: float) -> None:
    """As an H100 was seen to copy them, of 128 and 64 lines."""
    made = make(PLAIN.replace(",64]", f",{channels}]").replace("72", "64").replace("9,11", "90,110").replace(
        "T[", "float16["))
    choice = Choice.of("product", rows=128, columns=64, stages=8, group=4, turns=1, taps=9)
    pace = told(made, choice, {}).kernel.pace
    assert isinstance(pace, Pace) and 0.9 * microseconds <= 1e6 * pace.waits <= 1.3 * microseconds


@pytest.mark.parametrize(("channels", "line", "stages"), [(32, 64, 9), (16, 32, 9), (96, 64, 27)])
def test_lines_are_as_short_as_channels_where_these_fill_no_stage(channels: int, line: int, stages: int) -> None:
    """No zeros are copied beside them, and each of them takes a while, as an H200 was seen to copy them."""
    made = make(PLAIN.replace(",64]", f",{channels}]").replace("72", "64").replace("9,11", "90,110").replace(
        "T[", "float16["))
    choices = [choice for choice in made.kernel.choices
               if dict(choice.settings).get("taps") and "shared" not in dict(choice.settings)]
    assert choices and all(choice["line"] == line for choice in choices)
    pace = told(made, choices[0], {}).kernel.pace
    assert isinstance(pace, Pace) and pace.stages == stages
    stays, rows = "stays" in dict(choices[0].settings), choices[0]["rows"]
    assert 1.2e-9 <= pace.waits / (rows if stays else rows + choices[0]["columns"]) <= 1.5e-9


def test_what_lies_behind_short_lines_begins_where_tiles_may() -> None:
    """A residual comes by tensor maps behind the stages, an odd number of whose 80 lines of 32 bytes would fit."""
    text = ("g (T[N,H,W,16] t, T[80,3,3,16] v, T[N,H,W,80] z) => (T[N,H,W,80] y) { "
            f"{LAST} c = Conv<pads = [1,1,1,1]>(x, w) l = Transpose<perm = [0,2,3,1]>(c) y = Add(l, z) }}")
    for made in boxed(text, planned={"N": 32, "H": 80, "W": 80}):
        sizes = {"N": 1, "H": 17, "W": 19}
        check(made, random_inputs(made, sizes), length=600, misalign=False)


@pytest.mark.parametrize(("length", "size", "line"), [
    (64, 2, 128), (32, 2, 64), (16, 2, 32), (96, 2, 64), (160, 2, 128), (48, 2, 128), (8, 2, 128), (24, 2, 128),
    (32, 4, 128), (16, 4, 64), (8, 4, 32), (48, 4, 64), (12, 4, 128), (1152, 2, 128), (1184, 2, 128)])
def test_lines_that_take_least(length: int, size: int, line: int) -> None:
    assert line_of(length, size) == line


STAYING = PLAIN.replace("2,9,11", "7,41,43")


def staying(text: str, kind: str = "float16", planned: Mapping[str, int] | None = None) -> list[Made]:
    """The ways of which the weights stay."""
    found = [way for way in boxed(text, kind, planned) if "_stays" in way.kernel.plan.variants[0].steps[0].kernel]
    assert found
    return found


@pytest.mark.parametrize(("channels", "kind"), [
    (16, "float16"), (32, "float16"), (64, "float16"), (32, "bfloat16"), (16, "float"), (8, "float")])
def test_weights_stay_where_blocks_have_several_tiles(channels: int, kind: str) -> None:
    """Each tile is multiplied with what came with the block's first one, in any order, by turns too."""
    text = STAYING.replace(",64]", f",{channels}]").replace("72", "64")
    for made in staying(text.replace("7,41,43", "N,H,W"), kind, {"N": 32, "H": 41, "W": 43}):
        for sizes, order, multiprocessors in (({"N": 3, "H": 20, "W": 23}, "backward", 3),
                                              ({"N": 1, "H": 9, "W": 70}, 3, 1), ({"N": 1, "H": 1, "W": 1}, 3, 132)):
            check(made, short_inputs(made, sizes), length=600, misalign=False, orders=[order],
                  multiprocessors=multiprocessors)


def test_weights_that_stay_may_have_their_sums_in_the_second_place() -> None:
    text = STAYING.replace("T[72,3,3,64] v", "T[3,3,64,64] v").replace("[0,3,1,2]>(v)", "[3,2,0,1]>(v)").replace(
        "7,41,43", "N,H,W").replace("72", "64")
    for made in staying(text, planned={"N": 32, "H": 41, "W": 43}):
        check(made, short_inputs(made, {"N": 2, "H": 13, "W": 22}), length=600, misalign=False, multiprocessors=1)


def test_weights_that_stay_may_be_infinite() -> None:
    text = STAYING.replace(",64]", ",32]").replace("7,41,43", "N,H,W").replace("72", "64")
    for made in staying(text, planned={"N": 32, "H": 41, "W": 43}):
        inputs = random_inputs(made, {"N": 2, "H": 9, "W": 11})
        inputs["v"][3, 0, 1, 5], inputs["v"][40, 2, 2, 31], inputs["t"][0, 0, 0, 31] = np.inf, np.nan, -np.inf
        check(made, inputs, length=600, misalign=False, multiprocessors=1)


@pytest.mark.parametrize(("text", "stay"), [
    (STAYING.replace("7,41,43", "16,80,80").replace("72", "64"), True),
    (STAYING.replace("7,41,43", "2,17,21").replace("72", "64"), False),  # one tile a block
    (STAYING.replace("7,41,43", "16,80,80").replace("72", "64").replace(",64]", ",256]"), False),  # no room
])
def test_weights_stay_where_there_is_room_and_use(text: str, stay: bool) -> None:
    made = make(text.replace("T[", "float16["))
    assert ("_stays" in made.kernel.plan.variants[0].steps[0].kernel) == stay
    assert any(dict(choice.settings).get("stays") for choice in made.kernel.choices) == stay


def test_each_tile_has_all_columns_of_what_stays() -> None:
    made = make(STAYING.replace("7,41,43", "16,80,80").replace("72", "640").replace("T[", "float16["))
    assert not any(dict(choice.settings).get("stays") for choice in made.kernel.choices)


def windows(*strides: int) -> Windows:
    axes = tuple(WindowAxis(None, None, 3, stride=stride) for stride in strides)  # type: ignore[arg-type]
    return Windows(None, None, 64, axes, ("y", "x", "c"), last=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(("rows", "counts", "expected"), [
    (128, (16, 16, 2), (16, 8, 1)), (128, (56, 56, 32), (8, 8, 2)), (128, (7, 7, 32), (7, 1, 18)),
    (128, (1, 1, 1), (1, 1, 1)), (256, (256, 256, 4), (256, 1, 1)), (192, (64, 64, 2), (64, 3, 1)),
    (128, (7, 7, 2, 2), (7, 7, 2, 1)), (128, (14, 14, 4, 2), (14, 2, 4, 1)), (256, (4, 4, 4, 8), (4, 4, 4, 4)),
    (128, (56, 56, 8, 2), (8, 8, 2, 1)), (128, (3, 5, 7, 9), (3, 5, 7, 1)),
])
def test_boxes_that_the_fewest_are_needed_of(rows: int, counts: tuple[int, ...], expected: tuple[int, ...]) -> None:
    found = box_of(windows(*[1] * (len(counts) - 1)), rows, counts)
    assert found == Box(expected) and found.rows <= rows


def test_a_box_of_every_second_place_is_as_large_as_a_copy_may_be() -> None:
    assert box_of(windows(2, 2), 256, (4096, 1, 1)) == Box((128, 1, 1))
    assert box_of(windows(1, 1, 3), 256, (1, 1, 4096, 1)) == Box((1, 1, 86, 1))
