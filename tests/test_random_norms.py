"""Random convolutions of whose results a norm over windows is taken: axes, windows, strides, groups of channels, what is
computed before and behind the norm, results and types, against float64, in the ways that tuning may run them.

    python -m pytest tests/test_random_norms.py --seed 1 --graphs 300
"""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

from kernel_harness import Made, check, only, random_inputs, short_inputs, told
from random_regions import Text, made_regions

QUICK = 4
"""Regions that are tried where no more are asked for."""

SPACES = ((8192,), (16384,), (128, 64), (64, 128), (32, 256), (256, 48), (16, 32, 16), (8, 16, 64))
"""Windows along each axis, outermost first."""

MOST_WITHOUT = 4
"""Of so many regions in a row one has a kernel at least: what tiles do not divide has none."""


class Drawn(Text):
    """One random region: its text, as images with channels last."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        rng = self.rng
        self.space, self.images = rng.choice(SPACES), rng.choice((1, 2))
        self.each = rng.choice((4, 5, 6, 8, 12, 16, 24))
        while self.each * prod(self.space) <= 32_768:  # shorter rows are read once
            self.each *= 2
        self.groups = rng.choice((1, 2, 3)) if self.each < 32 else 1
        self.channels = self.each * self.groups
        while self.channels * (2 if self.kind != "float" else 4) % 16:  # what is stored by vectors
            self.groups, self.channels = self.groups + 1, self.channels + self.each
        self.sizes = (self.images, *self.space, self.channels)
        self.shape = ",".join(map(str, self.sizes))
        value = self.convolution()
        if rng.random() < 0.5:
            value = self.residual(value)
        value = self.norm(value)
        for _ in range(rng.randint(0, 2)):
            value = self.say(rng.choice(("Relu", "Sigmoid", "Tanh")), value)
        self.results.append(self.last(value))

    @property
    def axes(self) -> int:
        """Of space."""
        return len(self.space)

    def first(self, value: str) -> str:
        """Channels first."""
        order = (0, self.axes + 1, *range(1, self.axes + 1))
        return self.say(f"Transpose<perm = [{','.join(map(str, order))}]>", value)

    def last(self, value: str) -> str:
        """Channels last."""
        order = (0, *range(2, self.axes + 2), 1)
        return self.say(f"Transpose<perm = [{','.join(map(str, order))}]>", value)

    def convolution(self) -> str:
        """Of windows of one to three places along each axis, with strides and padding."""
        taps = [self.rng.choice((1, 1, 3)) if self.axes > 1 else self.rng.choice((1, 3, 5)) for _ in self.space]
        strides = [self.rng.choice((1, 1, 2)) for _ in self.space]
        before = [self.rng.randint(0, tap - 1) for tap in taps]
        behind = [self.rng.randint(0, tap - 1) for tap in taps]
        sizes = [(count - 1) * stride + tap - one - other for count, stride, tap, one, other in zip(
            self.space, strides, taps, before, behind, strict=True)]
        depth = self.rng.choice((32, 64)) if self.kind != "float" else 32
        image = self.read(self.images, *sizes, depth)
        weights = self.read(self.channels, *taps, depth)
        more = [self.read(self.channels)] if self.rng.random() < 0.5 else []
        options = f"pads = [{','.join(map(str, before + behind))}], strides = [{','.join(map(str, strides))}]"
        return self.say(f"Conv<{options}>", self.first(image), self.first(weights), *more)

    def residual(self, value: str) -> str:
        """A sum, which may be a result."""
        found = self.say("Add", self.last(value), self.read(*self.sizes))
        if self.rng.random() < 0.5:
            self.results.append(found)
        return self.first(found)

    def norm(self, value: str) -> str:
        """Of groups, as an operator or as an instance norm of reshaped groups, with weights of channels or none."""
        if self.rng.random() < 0.3:
            scale, bias = self.read(self.groups), self.read(self.groups)
            return self.say(f"GroupNormalization<num_groups = {self.groups}>", value, scale, bias)
        groups = self.say(f"Constant<value = int64[3] {{0,{self.groups},-1}}>")
        flat = self.say("Reshape", value, groups)
        found = self.say("InstanceNormalization", flat, self.read(self.groups), self.read(self.groups))
        sizes = ",".join(map(str, (-1, self.channels, *self.space)))
        channels = self.say(f"Constant<value = int64[{self.axes + 2}] {{{sizes}}}>")
        found = self.say("Reshape", found, channels)
        for op in ("Mul", "Add"):
            if self.rng.random() < 0.6:
                found = self.say(op, found, self.read(self.channels, *[1] * self.axes))
        return found


def ways(made: Made, drawn: Drawn) -> list[Made]:
    """As its schedule would run it, and in another way."""
    others = [told(made, drawn.rng.choice(made.kernel.choices), {})] if made.kernel.choices else []
    return [only(each, [replace(each.kernel.plan.variants[0], guards=())]) for each in (made, *others)]


def test_regions(seeds: Callable[[int], range]) -> None:
    """Most have a kernel; what has one is right in all its ways, with several tiles a block."""
    codes = ("product-structure", "reduction-structure", "scattered-access")
    for seed, drawn, made in made_regions(seeds(QUICK), Drawn, 20, codes, MOST_WITHOUT):
        assert made.kernel.schedule == "product_norms"
        for way in ways(made, drawn):
            inputs = (short_inputs if drawn.kind == "float" else random_inputs)(way, {}, seed)
            try:
                check(way, inputs, length=576, misalign=False, slack=4.0, multiprocessors=drawn.rng.choice((5, 132)))
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {drawn.text}") from error
