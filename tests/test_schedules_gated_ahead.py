"""Depthwise convolutions ahead of images that their means scale: the convolution's kernel tells the sums."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from kernel_harness import Made, attempt, check, make, only, parse, random_inputs, told
from reference import Array

from onnxfuse.schedules import parse_choice, words
from onnxfuse.schedules.kernel import Kernel

GATE = "p = Conv(m, w, b) a = Relu(p) q = Conv(a, v, e) g = Sigmoid(q) "


def text_of(kind: str = "float16", channels: int = 24, few: int = 4, *, sizes: str = "H,W", out: str = "I,J", window: str = "3,3",
            convolution: str = "pads = [1,1,1,1]", behind: str = "h = Sigmoid(k) x = Mul(k, h)", mean: str = "m = GlobalAveragePool(x)",
            scale: str = "z = Mul(x, g)", more: str = "", others: str = "") -> str:
    """A convolution, what is computed of it, its mean, the gate and the scale, channels last."""
    axes = sizes.count(",") + 1
    ones, last = ",1" * axes, ",".join(map(str, range(1, axes + 1)))
    behind_last = ",".join(map(str, range(2, axes + 2)))
    return (f"g ({kind}[N,{sizes},{channels}] t, {kind}[{channels},1,{window}] d, {kind}[{channels}] f, {kind}[{few},{channels}{ones}] w, "
            f"{kind}[{few}] b, {kind}[{channels},{few}{ones}] v, {kind}[{channels}] e{more}) => ({kind}[N,{out},{channels}] y{others}) "
            f"<int64[{axes}] o = {{{behind_last}}}> {{ i = Transpose<perm = [0,{axes + 1},{last}]>(t) k = Conv<{convolution}, group = {channels}>(i, d, f) "
            f"{behind} {mean} {GATE}{scale} y = Transpose<perm = [0,{behind_last},1]>(z) }}")


def summed(made: Made) -> bool:
    """Whether there is no kernel for the mean."""
    steps = [step.kernel.partition("_stencil")[0] for step in made.kernel.plan.variants[0].launches]
    return made.kernel.schedule == "gated" and len(steps) == 3 and steps[0] == "of_convolution"


def inputs_of(made: Made, sizes: Mapping[str, int], seed: int = 0) -> dict[str, Array]:
    """Random inputs, weights so small that sums of many are no larger than what is summed."""
    return {name: (array / array.dtype.type(8)).astype(array.dtype) if name in "dwv" else array
            for name, array in random_inputs(made, sizes, seed).items()}


FORMS: Mapping[str, dict[str, str]] = {
    "bias and SiLU": {},
    "a mean of axes": {"mean": "m = ReduceMean<keepdims = 1>(x, o)"},
    "five by five, in steps of two": {"window": "5,5", "convolution": "pads = [2,2,2,2], strides = [2,2]", "behind": "x = HardSwish(k)"},
    "seven by seven, nothing around it": {"window": "7,7", "convolution": "pads = [3,3,3,3]", "behind": "x = Relu(k)"},
    "apart and lopsided": {"window": "3,2", "convolution": "pads = [2,0,1,3], dilations = [2,1]"},
    "one axis": {"sizes": "H", "out": "I", "window": "5", "convolution": "pads = [2,2]"},
    "three axes": {"sizes": "D,H,W", "out": "C,I,J", "window": "3,1,3", "convolution": "pads = [1,0,1,1,0,1]"},
    "a residual behind the scale": {"scale": "s = Mul(x, g) c = Transpose<perm = [0,3,1,2]>(u) r = Add(s, c) z = Relu(r)", "more": ", T[N,I,J,24] u"},
    "nothing but the convolution": {"behind": "x = Identity(k)"},
}
SIZES = {"N": 3, "H": 9, "W": 14, "D": 3}


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float"])
@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, kind: str) -> None:
    """Every way to run them."""
    made = make(text_of(kind, **{key: text.replace("T[", f"{kind}[") for key, text in FORMS[form].items()}), 22)
    assert summed(made)
    sizes = {name: size for name, size in SIZES.items() if name in str(made.model.graph.input)}
    if "u" in {value.name for value in made.graph.inputs}:
        sizes |= {"I": 9, "J": 14}
    check(made, inputs_of(made, sizes), length=49, misalign=False)


@pytest.mark.parametrize(("channels", "few"), [(2, 1), (33, 3), (40, 10), (260, 9), (320, 17)])
@pytest.mark.parametrize("kind", ["float16", "float"])
def test_numbers_of_channels(kind: str, channels: int, few: int) -> None:
    """Fewer than threads, whose sums several of these add up, and more."""
    made = make(text_of(kind, channels, few), 20)
    assert summed(made)
    check(made, inputs_of(made, {"N": 2, "H": 5, "W": 11}), length=channels, misalign=False)


@pytest.mark.parametrize("sizes", [{"N": 1, "H": 1, "W": 1}, {"N": 2, "H": 37, "W": 66}, {"N": 5, "H": 3, "W": 97}])
def test_images_of_one_part_and_of_many(sizes: Mapping[str, int]) -> None:
    """Blocks go through several of them, and through those of several images."""
    made = make(text_of(), 20, planned=sizes)
    check(made, inputs_of(made, sizes), length=81, misalign=False, multiprocessors=2)


def test_no_image() -> None:
    made = make(text_of(), 20)
    check(made, inputs_of(made, {"N": 0, "H": 5, "W": 4}), misalign=False)


def test_an_image_of_nothing_finite() -> None:
    """Its mean is no number, nor is what comes of it; the others are as they were."""
    made = make(text_of("float"), 20)
    inputs = inputs_of(made, {"N": 3, "H": 6, "W": 5})
    inputs["t"][1, 2, 3] = np.inf
    check(made, inputs, length=24, misalign=False)


def test_blocks_in_any_order() -> None:
    """Nobody reads what another block of the same launch tells."""
    made = make(text_of(channels=480, few=20), 20)
    first = made.kernel.plan.variants[0]
    assert first.launches[1].cluster == ("4", "1", "1")
    check(only(made, [first]), inputs_of(made, {"N": 2, "H": 9, "W": 8}), length=480, misalign=False, limit=1, orders=["backward", 3],
          multiprocessors=3)


def test_what_is_summed_is_what_is_stored() -> None:
    """Rounded, as the nodes read it."""
    assert "told[v] += of::round_to<__half>(y0[v]);" in make(text_of(), 20).kernel.source
    assert "told[v] += y0[v];" in make(text_of("float"), 20).kernel.source


def test_kernels_that_nothing_launches_are_left_out() -> None:
    kernel = make(text_of(), 20).kernel
    assert all(f" {name}(" in kernel.source.replace("\n", " ") for name in kernel.plan.kernels)
    assert kernel.source.count('extern "C"') == len(kernel.plan.kernels)


def test_choices_are_the_convolutions() -> None:
    """Each can be told, and spelled."""
    sizes = {"N": 2, "H": 12, "W": 10}
    made = make(text_of(channels=64), 20, planned=sizes)
    choices = made.kernel.choices
    assert len(choices) > 3 and all(parse_choice(str(choice)) == choice and "results a thread" in words(choice) for choice in choices)
    other = told(made, choices[1], sizes)
    assert other.kernel.choice == choices[1] and other.kernel.plan != made.kernel.plan
    check(other, inputs_of(other, sizes), length=64, misalign=False)


def test_weights_and_sums_fit_a_block() -> None:
    """Of large windows with fewer channels than where nothing is summed up."""
    sizes = {"N": 2, "H": 56, "W": 56}
    made = make(text_of(channels=96, few=8, window="11,11", convolution="pads = [5,5,5,5]"), 20, planned=sizes)
    for choice in (None, *made.kernel.choices):
        steps = [step for variant in told(made, choice, sizes).kernel.plan.variants for step in variant.launches]
        assert max(int(step.shared) for step in steps if "stencil" in step.kernel) <= 48 << 10


LEFT: Mapping[str, dict[str, str]] = {
    "a mean of what is computed of the image": {"mean": "j = Mul(x, x) m = GlobalAveragePool(j)"},
    "a mean of rows alone": {"mean": "m = ReduceMean<keepdims = 1>(x, o)", "out": "I,J"},
    "a maximum": {"mean": "m = GlobalMaxPool(x)"},
}


@pytest.mark.parametrize("kind", ["float16", "float"])
@pytest.mark.parametrize("name", LEFT)
def test_what_is_left(name: str, kind: str) -> None:
    """Regions of other sums have no such kernel."""
    text = text_of(kind, **LEFT[name])
    if "rows" in name:
        text = text.replace("<int64[2] o = {2,3}>", "<int64[1] o = {2}>")
    found = attempt(parse(text, 20))
    assert not isinstance(found, Made), found.kernel.schedule
    assert found.code == "product-structure"


def test_a_window_of_too_many_weights() -> None:
    found = attempt(parse(text_of(window="12,12", convolution="pads = [6,6,5,5]"), 20))
    assert not isinstance(found, Made) and "windows of 144 elements" in found.message


def test_the_image_is_read_by_nobody_else() -> None:
    """It lies in scratch memory."""
    text = text_of(others=", float16[N,24,I,J] x").replace("x = Mul(k, h)", "x = Mul(k, h)")
    found = attempt(parse(text, 20))
    assert not isinstance(found, Kernel) and not (isinstance(found, Made) and found.kernel.schedule == "gated")
