"""Random images that products of their means scale: layouts, sizes, a depthwise convolution ahead, how many products,
what is computed between them and behind, and types, against float64, in every way that a kernel has.

    python -m pytest tests/test_random_gated.py --seed 1 --graphs 300
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from kernel_harness import Made, check, random_inputs
from random_regions import Text, made_regions
from reference import Array

from onnxfuse.schedules.products import tall

QUICK = 8
"""Regions that are tried where no more are asked for."""

SIZES = (1, 3, 7, 8, 20, 33, 64, 97, 128, 240)
"""Of channels, and of what they are squeezed to."""


class Drawn(Text):
    """One random region: its text; ``multiplies``: whether what is scaled is multiplied where it may be."""

    multiplies = False

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        rng = self.rng
        self.images, self.axes = rng.randint(1, 4), rng.choice((1, 2, 2, 3))
        self.space = [rng.randint(1, 9) for _ in range(self.axes)]
        self.last, self.linear = rng.random() < 0.5, rng.random() < 0.4
        self.widths = [rng.choice(SIZES)]
        self.widths += [*(rng.choice(SIZES) for _ in range(rng.choice((0, 1, 1, 1, 2)))), self.widths[0]]
        sizes = (self.images, *self.space, self.widths[0]) if self.last else (self.images, self.widths[0], *self.space)
        self.shape = ",".join(map(str, sizes))
        image = self.read(*sizes)
        first = self.moved(image, (0, self.axes + 1, *range(1, self.axes + 1))) if self.last else image
        self.ahead = self.last and self.widths[0] > 1 and rng.random() < 0.5
        first = self.convolved(first) if self.ahead else first
        scaled = self.say("Mul", *rng.sample([first, self.gate(first)], 2))
        self.multiplied = self.last and self.multiplies and self.widths[0] % 8 == 0 and self.widths[0] <= 144
        if self.multiplied:
            columns = rng.choice((2, 6, 16, 24, 40, 96))
            sizes = (*sizes[:-1], columns)
            scaled = self.say("Conv", scaled, self.read(columns, self.widths[0], *(1,) * self.axes), self.read(columns))
        result = self.moved(scaled, (0, *range(2, self.axes + 2), 1)) if self.last else scaled
        if rng.random() < 0.4:
            result = self.say("Add", result, self.read(*sizes))
        if rng.random() < 0.4:
            result = self.say("Relu", result)
        self.results.append(result)

    def moved(self, value: str, order: tuple[int, ...]) -> str:
        """Its axes in another order."""
        return self.say(f"Transpose<perm = [{','.join(map(str, order))}]>", value)

    def convolved(self, image: str) -> str:
        """A depthwise convolution of an image, as large as that, with what is computed of it."""
        taps = [self.rng.choice((1, 2, 3, 5)) for _ in range(self.axes)]
        begins = [self.rng.randint(0, each - 1) for each in taps]
        pads = ",".join(map(str, (*begins, *(each - 1 - begin for each, begin in zip(taps, begins, strict=True)))))
        channels = self.widths[0]
        value = self.say(f"Conv<group = {channels}, pads = [{pads}]>", image, self.read(channels, 1, *taps),
                         *([self.read(channels)] if self.rng.random() < 0.5 else []))
        for _ in range(self.rng.randint(0, 2)):
            value = self.say("Mul", value, self.say("Sigmoid", value)) if self.rng.random() < 0.5 else (
                self.say(self.rng.choice(("Relu", "HardSwish", "Tanh")), value))
        return value

    def gate(self, image: str) -> str:
        """What scales an image."""
        value, ones = self.say("GlobalAveragePool", image), () if self.linear else (1,) * self.axes
        if self.linear:
            value = self.say("Flatten", value)
        for before, behind in zip(self.widths[:-1], self.widths[1:], strict=True):
            weights = self.read(behind, before, *ones)
            more = [self.read(behind)] if self.rng.random() < 0.5 else []
            value = self.say("Gemm<transB = 1>" if self.linear else "Conv", value, weights, *more)
            for _ in range(self.rng.randint(0, 2)):
                value = self.say(self.rng.choice(("Relu", "Sigmoid", "HardSigmoid", "Tanh")), value)
        if not self.linear:
            return value
        self.lines.append(f"f = Constant<value = int64[{self.axes + 2}] {{0,-1{',1' * self.axes}}}>()")
        return self.say("Reshape", value, "f")


class Multiplied(Drawn):
    """The same with a product behind it."""

    multiplies = True


def smaller(made: Made, drawn: Drawn, seed: int) -> dict[str, Array]:
    """Random inputs, weights so small that sums are no larger than their terms."""
    inputs = random_inputs(made, {}, seed)
    for name, shape in drawn.inputs.items():
        if shape.count(",") and shape != drawn.shape:
            inputs[name] = (inputs[name] / inputs[name].dtype.type(np.float32(16))).astype(inputs[name].dtype)
    return inputs


def test_regions(seeds: Callable[[int], range]) -> None:
    """All have a kernel, which is right."""
    for seed, drawn, made in made_regions(seeds(QUICK), Drawn, 20, ("product-structure",), 3):
        # Of a single pixel nothing is reduced, and the product scales its own operand.
        assert made.kernel.schedule == "gated" or set(drawn.space) == {1}, (seed, drawn.text)
        assert ("told[v]" in made.kernel.source) == drawn.ahead or set(drawn.space) == {1}, (seed, drawn.text)
        # Float32 is rounded to TF32 where there is no gate; a chain's rows are rounded, and the next one's sums cancel.
        rounds = made.kernel.schedule != "gated" and made.kernel.rounds
        check(made, smaller(made, drawn, seed), length=max(drawn.widths), misalign=False,
              slack=2.0**13 if rounds else 4.0)


def test_what_is_scaled_may_be_multiplied(seeds: Callable[[int], range], monkeypatch: pytest.MonkeyPatch) -> None:
    """By warps that hold what they read, however few rows there are, and as parts of which each has a kernel."""
    monkeypatch.setattr(tall, "LEAST_ROWS", 0)
    ran = 0
    for seed, drawn, made in made_regions(seeds(2 * QUICK), Multiplied, 20, ("product-structure",), 12):
        if not drawn.multiplied or set(drawn.space) == {1}:
            continue
        ran += 1
        assert made.kernel.plan.variants[0].launches[-1].kernel.startswith("of_product_product_tall_"), drawn.text
        check(made, smaller(made, drawn, seed), length=2 * max(drawn.widths), misalign=False, slack=2.0)
    assert ran
