"""Convolutions whose windows share pieces of the image: steps, dilations, weights that stay or come, layouts, choices."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from kernel_harness import Made, check, make, only, random_inputs, short_inputs, told
from test_schedules_product_boxes import LAST

from onnxfuse.compiling import source_of
from onnxfuse.runtime.compile import default_compiler
from onnxfuse.schedules import Kernel
from onnxfuse.schedules.choice import Choice
from onnxfuse.schedules.kernel import TILE_BEGINS, Pace
from onnxfuse.schedules.products.boxes import Box, BoxShape
from onnxfuse.schedules.products.pace import MULTIPLIED
from onnxfuse.schedules.products.shared import SharedShape, shared_shapes_of
from onnxfuse.schedules.products.windows import WindowAxis, Windows

PLAIN = ("g (T[N,H,W,64] t, T[72,3,3,64] v, T[72] b) => (T[N,H,W,72] y) "
         f"{{ {LAST} c = Conv<pads = [1,1,1,1]>(x, w, b) r = Relu(c) y = Transpose<perm = [0,2,3,1]>(r) }}")
LARGE, SMALL = {"N": 32, "H": 80, "W": 80}, {"N": 2, "H": 19, "W": 21}
"""Sizes that a kernel is planned for, and that it runs at: no box of windows fills such images."""


def plain(channels: int, results: int) -> str:
    return PLAIN.replace(",64]", f",{channels}]").replace("72", f"{results}")


CASES: Mapping[str, tuple[str, Mapping[str, int], Mapping[str, int]]] = {
    "weights stay": (plain(64, 64), {}, {}),
    "short lines": (plain(32, 64), {}, {}),
    "shorter lines": (plain(16, 64), {}, {}),
    "several pieces of channels, weights stay": (plain(128, 48), {}, {}),
    "weights come": (plain(128, 128), {}, {}),
    "weights come for several columns of tiles": (plain(192, 256), {}, {}),
    "channels that fill no line": (plain(72, 80), {}, {}),
    "steps": (
        "g (T[N,H,W,32] t, T[64,3,3,32] v, T[64] b) => (T[N,P,Q,64] y) { "
        f"{LAST} c = Conv<pads = [1,1,1,1], strides = [2,2]>(x, w, b) r = Relu(c) y = Transpose<perm = [0,2,3,1]>(r) }}",
        {"P": 40, "Q": 40}, {"P": 10, "Q": 11}),
    "steps, dilations, uneven, a residual": (
        "g (T[N,H,W,64] t, T[40,5,3,64] v, T[N,P,Q,40] z) => (T[N,P,Q,40] y) { "
        f"{LAST} c = Conv<pads = [4,0,1,2], dilations = [2,1], strides = [1,2]>(x, w) l = Transpose<perm = [0,2,3,1]>(c) y = Add(l, z) }}",
        {"P": 77, "Q": 40}, {"P": 16, "Q": 11}),
    "steps and dilations that meet": (
        "g (T[N,H,W,32] t, T[40,3,4,32] v) => (T[N,P,Q,40] y) { "
        f"{LAST} c = Conv<pads = [2,3,2,3], dilations = [2,2], strides = [2,3]>(x, w) y = Transpose<perm = [0,2,3,1]>(c) }}",
        {"P": 40, "Q": 27}, {"P": 10, "Q": 7}),
}


PLAINEST = ("short lines", "weights come", "steps")


def shared(text: str, kind: str = "float16", planned: Mapping[str, int] = LARGE) -> list[Made]:
    """The kernel in each way whose windows share pieces, with the variant that does alone."""
    made = make(text.replace("T[", f"{kind}["), planned=planned)
    found = [told(made, choice, planned) for choice in made.kernel.choices if dict(choice.settings).get("shared")]
    found += [made] if made.kernel.entry.partition("_shared")[1] else []
    assert found
    return [only(way, [replace(way.kernel.plan.variants[0], guards=())]) for way in found]


@pytest.mark.parametrize("case", CASES)
def test_windows(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of several tiles each, and in any order; in steps those of several strips too, which are never first."""
    text, planned, sizes = CASES[case]
    if case.startswith("steps"):
        monkeypatch.setattr("onnxfuse.schedules.products.product.MOST_TILES", 9)
    for kind in ("float16", "bfloat16", "float") if case in PLAINEST else ("float16",):
        for made in shared(text, kind, {**LARGE, **planned}):
            inputs = short_inputs(made, {**SMALL, **sizes})
            for order, multiprocessors in (("backward", 3), (3, 1)):
                check(made, inputs, length=600, misalign=False, orders=[order], multiprocessors=multiprocessors)


@pytest.mark.parametrize("case", ["weights stay", "weights come", "steps"])
def test_what_is_infinite_shows_in_its_windows_alone(case: str) -> None:
    text, planned, sizes = CASES[case]
    for made in shared(text, planned={**LARGE, **planned}):
        inputs = random_inputs(made, {**SMALL, **sizes})
        inputs["t"][0, 0, [0, 7], 5], inputs["t"][1, 18, 20, 31], inputs["v"][3, 2, 0, 7] = np.inf, np.nan, -np.inf
        check(made, inputs, length=600, misalign=False, multiprocessors=1)


@pytest.mark.parametrize("text", [
    PLAIN.replace("3,3", "1,1").replace("1,1,1,1", "0,0,0,0"),
    PLAIN.replace("T[72,3,3,64] v", "T[3,3,64,64] v").replace("[0,3,1,2]>(v)", "[3,2,0,1]>(v)").replace("72", "64"),
    "g (T[N,D,H,W,64] t, T[24,3,3,3,64] v) => (T[N,D,H,W,24] y) { x = Transpose<perm = [0,4,1,2,3]>(t) "
    "w = Transpose<perm = [0,4,1,2,3]>(v) c = Conv<pads = [1,1,1,1,1,1]>(x, w) y = Transpose<perm = [0,2,3,4,1]>(c) }",
])
def test_others_do_not(text: str) -> None:
    made = make(text.replace("T[", "float16["), planned={**LARGE, "D": 16})
    assert not any(dict(choice.settings).get("shared") for choice in made.kernel.choices)


def windows(*axes: WindowAxis, channels: int = 64) -> Windows:
    return Windows(None, None, channels, axes, ("y", "x", "c"), last=True)  # type: ignore[arg-type]


def axis(taps: int, stride: int = 1, dilation: int = 1) -> WindowAxis:
    return WindowAxis(None, None, taps, stride=stride, dilation=dilation)  # type: ignore[arg-type]


@pytest.mark.parametrize(("x", "y", "box", "parts", "pitch", "lines"), [
    (axis(3), axis(3), (16, 8, 1), 1, 18, 184), (axis(3, 2), axis(3, 2), (16, 8, 1), 2, 17, 296),
    (axis(1, 2), axis(3), (16, 8, 1), 1, 16, 160), (axis(4, 3, 2), axis(1), (16, 8, 1), 3, 18, 144)])
def test_pieces(x: WindowAxis, y: WindowAxis, box: tuple[int, ...], parts: int, pitch: int, lines: int) -> None:
    """Pixels of each remainder below 16 by 8 windows, filled up to groups of eight lines."""
    shape = BoxShape(128, 64, 1, stays=1, taps=x.taps * y.taps)
    found = next(each for each in shared_shapes_of(shape, windows(x, y)) if each.box == Box(box))
    assert (found.parts, found.pitch, found.lines) == (parts, pitch, lines)


def test_no_more_stages_are_under_way_than_places_and_one() -> None:
    """Else a piece would be filled that is still multiplied."""
    shape = BoxShape(128, 64, 1, taps=4)
    found = list(shared_shapes_of(shape, windows(axis(2), axis(2))))
    assert found and all(isinstance(each, SharedShape) and each.stages <= 5 for each in found)


@dataclass(frozen=True)
class Square:
    """A convolution of square images of one size, by square windows, with a bias and an activation behind it."""

    kind: str
    images: int
    side: int
    channels: int
    results: int
    taps: int = 3
    step: int = 1
    behind: str = "r = Relu(c)"

    def made(self) -> Made:
        pads, out = self.taps // 2, self.side // self.step
        return make((
            f"g (T[{self.images},{self.side},{self.side},{self.channels}] t, "
            f"T[{self.results},{self.taps},{self.taps},{self.channels}] v, T[{self.results}] b) => "
            f"(T[{self.images},{out},{out},{self.results}] y) {{ {LAST} "
            f"c = Conv<pads = [{pads},{pads},{pads},{pads}], strides = [{self.step},{self.step}]>(x, w, b) "
            f"{self.behind} y = Transpose<perm = [0,2,3,1]>(r) }}").replace("T[", f"{self.kind}["))


SILU = "q = Sigmoid(c) r = Mul(c, q)"

MEASURED: Sequence[tuple[Square, Mapping[str, float]]] = [
    (Square("float16", 32, 56, 64, 64), {"64x64x6_specialised2_stays": 13.9}),
    (Square("float16", 16, 40, 64, 64, behind=SILU), {"64x64x6_specialised2_stays": 6.8, "128x64x10_specialised1": 7.6}),
    (Square("float16", 16, 80, 48, 96), {"64x96x6_specialised2_stays": 20.1, "128x96x3_specialised1_stays": 22.7}),
    (Square("float16", 16, 160, 32, 64, step=2), {"64x64x6_specialised2_lines64_stays": 14.4}),
    (Square("float16", 32, 112, 32, 64), {"64x64x6_specialised2_lines64_stays": 32.0}),
    (Square("float16", 16, 80, 32, 64, 5), {"64x64x6_specialised2_lines64_stays": 20.1}),
    (Square("float16", 4, 256, 128, 128), {"128x128x9_specialised2": 101.6}),
    (Square("float16", 4, 64, 512, 512), {"128x256x4_specialised1": 97.0, "128x128x9_specialised2": 96.5}),
    (Square("float16", 32, 56, 128, 128, step=2), {"64x128x7_specialised2": 19.8}),
    (Square("float", 32, 56, 64, 64), {"128x64x10_specialised1": 32.5, "128x128x9_specialised2": 51.3}),
    (Square("float", 32, 14, 256, 256), {"128x128x9_specialised2": 25.6}),
    (Square("float", 16, 160, 32, 32), {"256x32x10_specialised1": 40.8}),
]
"""Microseconds of blocks, on an H200."""


@pytest.mark.parametrize(("convolution", "microseconds"), MEASURED)
def test_time_follows_from_tiles(convolution: Square, microseconds: Mapping[str, float]) -> None:
    made = convolution.made()
    ways = [told(made, choice, {}) for choice in made.kernel.choices if dict(choice.settings).get("shared")]
    paces = {way.kernel.entry.rpartition("_shared")[0].rpartition("_")[0]: way.kernel.pace for way in (made, *ways)}
    for name, measured in microseconds.items():
        pace = paces[f"product_{name}"]
        assert isinstance(pace, Pace)
        expected = 1e6 * (TILE_BEGINS + pace.tiled(MULTIPLIED[2 if convolution.kind == "float16" else 4]))
        assert 0.85 * measured <= expected <= 1.2 * measured


@pytest.mark.parametrize(("convolution", "own"), [
    (Square("float16", 32, 56, 64, 64), "stays_1x8x8_shared"), (Square("float16", 16, 80, 48, 64), "shared"),
    (Square("float16", 16, 40, 64, 64, behind=SILU), "stays_1x8x8_shared"),
    (Square("float16", 4, 128, 256, 256), "shared"), (Square("float16", 16, 160, 32, 64, step=2), "shared"),
    (Square("float", 32, 56, 64, 64), "shared"), (Square("float", 16, 160, 32, 32), "shared"),
    # Boxes of four by four windows, of which more are full; pixels in steps, of which a copy passes by every second.
    (Square("float16", 32, 28, 128, 128), "4x4x4"), (Square("float16", 32, 56, 128, 128, step=2), "4x4x4"),
    (Square("float16", 16, 80, 64, 128, step=2), "2x8x8"), (Square("float", 16, 160, 32, 64, step=2), "1x8x16"),
    (Square("float16", 16, 80, 24, 48), "pixels2"), (Square("float16", 16, 80, 8, 64, 5), "pixels2"),
])
def test_what_took_least_comes_first(convolution: Square, own: str) -> None:
    """Of these convolutions an H200 took 0.23 to 0.96 times as long so as the best of the other ways."""
    assert convolution.made().kernel.entry.endswith(f"_{own}")


def test_it_fits_registers() -> None:
    made = make(plain(192, 256).replace("T[", "float16["), planned=LARGE)
    choices = [choice for choice in made.kernel.choices if dict(choice.settings).get("shared")]
    assert choices and all(isinstance(choice, Choice) for choice in choices)
    for choice in choices:
        kernel = told(made, choice, LARGE).kernel
        assert isinstance(kernel, Kernel)
        name = kernel.plan.variants[0].steps[0].kernel
        code = kernel.code.keeping({name})  # type: ignore[union-attr]
        figures = default_compiler().figures(source_of(replace(kernel, code=code).source, kernel.plan), "sm_90")
        assert figures is not None and [each.spilled_bytes for each in figures.values()] == [0]
