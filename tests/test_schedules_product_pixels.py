"""Convolutions over a piece of an image whose pixels are vectors of channels: every form of windows, ways, choices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from emulator import run_plan
from kernel_harness import Made, arguments, check, make, only, random_inputs, short_inputs, told
from reference import evaluate
from test_schedules_tf32 import tf32

from onnxfuse.compiling import source_of
from onnxfuse.runtime.compile import default_compiler
from onnxfuse.schedules import Kernel
from onnxfuse.schedules.kernel import Pace

X = "x = Transpose<perm = [0,3,1,2]>(t)"
W = "w = Transpose<perm = [0,3,1,2]>(v)"
Y = "y = Transpose<perm = [0,2,3,1]>"
PLAIN = ("g (T[2,17,21,32] t, T[24,3,3,32] v, T[24] b) => (T[2,17,21,24] y) "
         f"{{ {X} {W} c = Conv<pads = [1,1,1,1]>(x, w, b) r = Relu(c) {Y}(r) }}")
STRIDES = ("g (T[N,H,L,16] t, T[40,5,3,16] v) => (T[N,P,Q,40] y) "
           f"{{ {X} {W} c = Conv<pads = [4,0,1,2], dilations = [2,1], strides = [1,2]>(x, w) {Y}(c) }}")

CASES: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "plain": (PLAIN, {}),
    "any size, strides, dilated, uneven": (STRIDES, {"N": 3, "H": 11, "L": 14, "P": 8, "Q": 7}),
    "one pixel is one vector, a last half of sixteen": (
        "g (T[1,9,40,8] t, T[9,3,3,8] v) => (T[1,9,40,9] y) "
        f"{{ {X} {W} c = Conv<pads = [1,1,1,1]>(x, w) {Y}(c) }}", {}),
    "weights as models have them, results channels first": (
        "g (T[2,10,24,24] t, T[12,24,3,3] w, T[12] b) => (T[2,12,10,24] y) "
        f"{{ {X} y = Conv<pads = [1,1,1,1]>(x, w, b) }}", {}),
    "computed, a residual": (
        "g (T[1,12,19,16] t, T[16,3,3,16] v, T[1,6,10,16] z) => (T[1,6,10,16] y) "
        f"{{ {X} {W} s = Sigmoid(x) c = Conv<pads = [1,1,1,1], strides = [2,2]>(s, w) "
        f"l = {Y[4:]}(c) y = Add(l, z) }}", {}),
    "one axis": (
        "g (T[2,L,16] t, T[20,9,16] v) => (T[2,P,20] y) { x = Transpose<perm = [0,2,1]>(t) "
        "w = Transpose<perm = [0,2,1]>(v) c = Conv<strides = [2]>(x, w) y = Transpose<perm = [0,2,1]>(c) }",
        {"L": 301, "P": 147}),
}


def by_pixels(made: Made, planned: Mapping[str, int] | None = None) -> Made:
    """The kernel whose first variant reads a piece of the image: told to, where the schedule chooses otherwise."""
    if "pixels" in made.kernel.plan.variants[0].steps[0].kernel:
        return made
    choice = next(choice for choice in made.kernel.choices if "wide" in dict(choice.settings))
    return told(made, choice, planned or {})


def pixels(text: str, kind: str = "float16", planned: Mapping[str, int] | None = None) -> Made:
    """The kernel, with the variant that reads a piece of the image alone."""
    made = by_pixels(make(text.replace("T[", f"{kind}["), planned=planned), planned)
    name = made.kernel.plan.variants[0].steps[0].kernel
    assert name.startswith("product_patch_") and "pixels" in name
    return only(made, [replace(made.kernel.plan.variants[0], guards=())])


@pytest.mark.parametrize("case", CASES)
def test_windows(case: str) -> None:
    text, sizes = CASES[case]
    for kind in ("float16", "bfloat16") if case == "plain" else ("float16",):
        made = pixels(text, kind, sizes)
        check(made, random_inputs(made, sizes), length=150, misalign=False)


@pytest.mark.parametrize("case", [case for case in CASES if case != "computed, a residual"])
def test_windows_of_float32(case: str) -> None:
    text, sizes = CASES[case]
    for before, after in (("32]", "16]"), ("40,5,3", "24,5,3"), ("Q,40]", "Q,24]"), (",8]", ",4]")):
        text = text.replace(before, after)
    made = pixels(text, "float", sizes)
    check(made, short_inputs(made, sizes), length=150, misalign=False)


@pytest.mark.parametrize("case", ["plain", "computed, a residual"])
def test_float32_is_rounded_to_the_nearest(case: str) -> None:
    """Image and weights, what is computed of an image too: what is cut off instead would err twice as far."""
    made = pixels(CASES[case][0].replace("32]", "16]"), "float")
    inputs = random_inputs(made, {})
    rounded = {name: tf32(array) if name == "v" else array for name, array in inputs.items()}
    image = inputs["t"] if case == "plain" else (1 / (1 + np.exp(-inputs["t"].astype(np.float64)))).astype(np.float32)
    windows = PLAIN if case == "plain" else CASES[case][0].replace("s = Sigmoid(x)", "s = Identity(x)")
    expected = evaluate(make(windows.replace("32]", "16]").replace("T[", "float[")).model, rounded | {"t": tf32(image)})
    (result,) = run_plan(made.kernel.plan, made.kernel.source, arguments(made, inputs))
    np.testing.assert_allclose(result, expected["y"], rtol=0, atol=2e-4)
    exact = evaluate(made.model, inputs)["y"]
    assert np.abs(expected["y"] - exact).max() > 5e-4


def test_general_variants_stand_behind() -> None:
    """Sizes and addresses that no vectors are of are read otherwise."""
    made = make(STRIDES.replace("T[", "float16["), planned={"N": 3, "H": 11, "L": 14, "P": 8, "Q": 7})
    assert len(made.kernel.plan.variants) > 2 and made.kernel.plan.variants[0].guards
    check(made, random_inputs(made, {"N": 1, "H": 6, "L": 9, "P": 3, "Q": 5}), length=150)


LARGE = ("g (T[2,37,41,48] t, T[128,3,3,48] v) => (T[2,19,21,128] y) "
         f"{{ {X} {W} c = Conv<pads = [1,1,1,1], strides = [2,2]>(x, w) {Y}(c) }}")


@pytest.mark.parametrize(("text", "stages"), [(PLAIN.replace("2,17,21", "2,33,37"), 2), (LARGE, 1)], ids=["2", "1"])
def test_blocks_in_any_order_go_through_many_tiles(text: str, stages: int) -> None:
    """Nobody fills a piece of the image while another still reads what was there."""
    made = make(text.replace("T[", "float16["))
    choice = next(each for each in made.kernel.choices
                  if (settings := dict(each.settings)).get("wide") and settings["stages"] == stages)
    one = told(made, choice, {})
    one = only(one, [replace(one.kernel.plan.variants[0], guards=())])
    assert one.kernel.plan.variants[0].steps[0].kernel.endswith(f"_pixels{stages}")
    for order in ("backward", 3):
        check(one, random_inputs(one, {}), length=600, misalign=False, orders=[order], multiprocessors=1)


def test_what_is_infinite_shows_in_its_windows_alone() -> None:
    """Of a last half of sixteen elements the other half is zero, whatever lies there."""
    made = pixels(CASES["one pixel is one vector, a last half of sixteen"][0])
    inputs = random_inputs(made, {})
    inputs["t"][0, 0, [0, 21], 0], inputs["t"][0, 8, 39, 7] = np.inf, np.nan
    check(made, inputs, length=150, misalign=False)


def test_every_choice() -> None:
    made = make(PLAIN.replace("24", "40").replace("T[", "float16["))
    choices = [choice for choice in made.kernel.choices if "wide" in dict(choice.settings)]
    assert len(choices) == 4
    for choice in choices:
        one = told(made, choice, {})
        assert one.kernel.choice == choice
        check(only(one, one.kernel.plan.variants[:1]), random_inputs(made, {}), length=600, misalign=False)


@pytest.mark.parametrize(("channels", "own"), [(8, True), (24, True), (48, False), (64, False)])
def test_it_comes_first_where_channels_fill_no_stage_of_boxes(channels: int, own: bool) -> None:
    text = PLAIN.replace("32]", f"{channels}]").replace("2,17,21", "16,80,80")
    kernel = make(text.replace("T[", "float16[")).kernel
    assert ("pixels" in kernel.plan.variants[0].steps[0].kernel) == own
    assert any("wide" in dict(choice.settings) for choice in kernel.choices)


@pytest.mark.parametrize(("channels", "results", "own"), [
    (8, 16, True), (12, 32, True), (16, 24, False), (28, 32, False), (16, 40, False), (32, 24, False),
    (12, 40, False), (4, 64, False)])
def test_of_float32_it_comes_first_where_results_are_few_too(channels: int, results: int, own: bool) -> None:
    text = PLAIN.replace("32]", f"{channels}]").replace("24", f"{results}").replace("2,17,21", "16,80,80")
    kernel = make(text.replace("T[", "float[")).kernel
    assert ("pixels" in kernel.plan.variants[0].steps[0].kernel) == own
    assert any("wide" in dict(choice.settings) for choice in kernel.choices)
    behind = kernel.plan.variants[own:]
    assert behind and not any("80 sm <=" in variant.guards for variant in behind)


def test_windows_that_are_too_large_for_shared_memory_are_read_otherwise() -> None:
    text = PLAIN.replace("24,3,3,32", "24,7,7,32").replace("1,1,1,1", "3,3,3,3")
    kernel = make(text.replace("T[", "float16[")).kernel
    assert not any("pixels" in each.steps[0].kernel for each in kernel.plan.variants)


MEASURED = [
    ("float16", 32, 80, 32, 1, 13.8), ("float16", 16, 224, 16, 1, 27.2), ("float16", 16, 224, 32, 2, 23.2),
    ("float16", 8, 128, 8, 1, 8.3), ("float", 16, 224, 16, 1, 55.0), ("float", 16, 224, 32, 2, 48.6),
    ("float", 4, 128, 16, 1, 9.7)]
"""By type, channels, side, results and stride, what 16 images took on an H100, in microseconds."""


@pytest.mark.parametrize(("kind", "channels", "side", "results", "stride", "microseconds"), MEASURED)
def test_time_follows_from_tiles(
    kind: str, channels: int, side: int, results: int, stride: int, microseconds: float
) -> None:
    out = side // stride
    text = (f"g (T[16,{side},{side},{channels}] t, T[{results},3,3,{channels}] v) => "
            f"(T[16,{out},{out},{results}] y) "
            f"{{ {X} {W} c = Conv<pads = [1,1,1,1], strides = [{stride},{stride}]>(x, w) {Y}(c) }}")
    pace = by_pixels(make(text.replace("T[", f"{kind}["))).kernel.pace
    assert isinstance(pace, Pace) and pace.whole is not None
    assert 0.75 * microseconds <= 1e6 * pace.whole + 2.5 <= 1.3 * microseconds


def test_nothing_is_said_of_times_of_sizes_that_are_open() -> None:
    assert make(STRIDES.replace("T[", "float16[")).kernel.pace is None


@pytest.mark.parametrize("architecture", ["sm_75", "sm_90"])
def test_it_fits_registers(architecture: str) -> None:
    text = PLAIN.replace("2,17,21", "2,112,112").replace("T[", "float16[").replace("24", "128")
    kernel = by_pixels(make(text)).kernel
    assert isinstance(kernel, Kernel)
    names = {name for name in kernel.plan.kernels if "pixels" in name}
    code = kernel.code.keeping(names)  # type: ignore[union-attr]
    figures = default_compiler().figures(source_of(replace(kernel, code=code).source, kernel.plan), architecture)
    assert figures is not None and [each.spilled_bytes for each in figures.values()] == [0]


@pytest.mark.parametrize(("image", "channels", "own"), [
    ("2,17,21", 28, False), ("16,80,80", 28, False), ("2,17,21", 12, True), ("16,80,80", 12, True)])
def test_it_comes_first_where_tiles_take_less_than_those_of_boxes(image: str, channels: int, own: bool) -> None:
    """Of one tile a multiprocessor most is what weights take; of many, which boxes' weights stay for, what is read."""
    text = PLAIN.replace("32]", f"{channels}]").replace("24", "32").replace("2,17,21", image)
    kernel = make(text.replace("T[", "float[")).kernel
    assert ("pixels" in kernel.plan.variants[0].steps[0].kernel) == own
