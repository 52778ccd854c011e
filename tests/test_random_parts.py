"""Random branches that write parts of one result, results that are cut from one product, and norms ahead of products:
layouts, sizes and types, against float64, in every way that a kernel has.

    python -m pytest tests/test_random_parts.py --seed 1 --graphs 300
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from kernel_harness import Made, check, random_inputs, short_inputs
from random_regions import Text, made_regions

QUICK = 6
"""Regions of each kind that are tried where no more are asked for."""

SIZES = (1, 3, 8, 16, 24, 33, 64, 72)
"""Of channels, of columns and of what is summed over."""


class Part(Text):
    """A graph with something behind its products, or nothing; ``depth``: how many numbers are summed up at most."""

    depth = 1

    def follow(self, value: str) -> str:
        """With something behind it, or nothing."""
        return self.say(self.rng.choice(("Relu", "Sigmoid", "Tanh")), value) if self.rng.random() < 0.5 else value


class Branches(Part):
    """Convolutions of one image or of several, or products, side by side, also with what is none: windows, what is
    computed element by element, and what is passed on."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        rng, count = self.rng, self.rng.randint(2, 4)
        multiplied = {rng.randrange(count)} | {place for place in range(count) if rng.random() < 0.6}
        if rng.random() < 0.3:
            self.rows([place in multiplied for place in range(count)])
            return
        images, side, last = rng.randint(1, 3), (rng.randint(3, 9), rng.randint(3, 9)), rng.random() < 0.6
        shared = self.image(images, side, last) if rng.random() < 0.6 else None
        parts, widths = [], []
        for place in range(count):
            image, channels = shared or self.image(images, side, last)
            part = self.convolved(image, channels, last) if place in multiplied else (self.copied(image), channels)
            parts.append(part[0])
            widths.append(part[1])
        joined = self.say("Concat<axis = 1>", *parts)
        sizes = (images, *side, sum(widths)) if last else (images, sum(widths), *side)
        self.results.append(self.say("Transpose<perm = [0,2,3,1]>", joined) if last else joined)
        self.shape, self.depth = ",".join(map(str, sizes)), 9 * 72

    def rows(self, multiplied: Sequence[bool]) -> None:
        """Products, and others, of as many rows."""
        rows = self.rng.choice((1, 5, 33, 70))
        widths = [self.rng.choice(SIZES) for _ in multiplied]
        parts = [self.follow(self.say("MatMul", self.read(rows, depth), self.read(depth, width)) if own else
                             self.read(rows, width))
                 for width, own in zip(widths, multiplied, strict=True) for depth in [self.rng.choice(SIZES)]]
        self.results.append(self.say("Concat<axis = 1>", *parts))
        self.shape, self.depth = f"{rows},{sum(widths)}", 72

    def convolved(self, image: str, channels: int, last: bool) -> tuple[str, int]:
        """A convolution of an image, and its channels."""
        taps, width = self.rng.choice((1, 3)), self.rng.choice(SIZES)
        weights = self.read(width, taps, taps, channels) if last else self.read(width, channels, taps, taps)
        weights = self.say("Transpose<perm = [0,3,1,2]>", weights) if last else weights
        more = [self.read(width)] if self.rng.random() < 0.5 else []
        pads = f"Conv<pads = [{','.join([str(taps // 2)] * 4)}]>"
        return self.follow(self.say(pads, image, weights, *more)), width

    def copied(self, image: str) -> str:
        """An image, or what windows or arithmetic make of it."""
        kind = self.rng.choice(("", "MaxPool", "AveragePool"))
        return self.follow(self.say(f"{kind}<kernel_shape = [3,3], pads = [1,1,1,1]>", image) if kind else image)

    def image(self, images: int, side: tuple[int, int], last: bool) -> tuple[str, int]:
        """One to convolve, and its channels."""
        channels = self.rng.choice(SIZES)
        if last:
            return self.say("Transpose<perm = [0,3,1,2]>", self.read(images, *side, channels)), channels
        return self.read(images, channels, *side), channels


class Cut(Part):
    """Results that are columns of one product, or channels of one convolution, each laid out in its own way."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        rng = self.rng
        self.constants: list[str] = []
        self.uneven = rng.random() < 0.2
        kinds = (8, 16, 24, 72, 3) if self.uneven else (8, 16, 24, 72)
        widths = [rng.choice(kinds) for _ in range(rng.randint(2, 4))]
        self.depth = rng.choice(SIZES[1:])  # one channel is a stencil's
        self.last, self.rows = rng.random() < 0.5, (rng.randint(1, 3), rng.randint(1, 40))
        axis = 2 if rng.random() < 0.6 else 1
        if axis == 2:
            whole = self.say("MatMul", self.read(*self.rows, self.depth), self.read(self.depth, sum(widths)))
        else:
            whole = self.convolved(sum(widths))
        names = [f"c{place}" for place in range(len(widths))]
        self.lines.append(f"{', '.join(names)} = Split<axis = {axis}>({whole}, {self.constant(widths)})")
        for name, width in zip(names, widths, strict=True):
            (self.heads if axis == 2 else self.laid)(self.follow(name), width)

    def constant(self, numbers: list[int]) -> str:
        """Sizes that an operator reads."""
        name = f"k{len(self.constants)}"
        self.constants.append(f"int64[{len(numbers)}] {name} = {{{','.join(map(str, numbers))}}}")
        return name

    def convolved(self, width: int) -> str:
        """Images with their channels last, or first."""
        images, pixels = self.rows
        if not self.last:
            return self.say("Conv", self.read(images, self.depth, 3, pixels), self.read(width, self.depth, 1, 1))
        image, weights = self.read(images, 3, pixels, self.depth), self.read(width, 1, 1, self.depth)
        return self.say("Conv", *(self.say("Transpose<perm = [0,3,1,2]>", each) for each in (image, weights)))

    def heads(self, value: str, width: int) -> None:
        """With a bias or without, and its columns as heads or as they are."""
        value = self.say("Add", value, self.read(width)) if self.rng.random() < 0.5 else value
        sizes: tuple[int, ...] = (*self.rows, width)
        if not self.uneven and self.rng.random() < 0.5:
            value = self.say("Reshape", value, self.constant([0, 0, width // 8, 8]))
            value, sizes = self.say("Transpose<perm = [0,2,1,3]>", value), (self.rows[0], width // 8, self.rows[1], 8)
        self.give(value, *sizes)

    def laid(self, value: str, width: int) -> None:
        """With its channels last or first."""
        images, pixels = self.rows
        if self.last or self.rng.random() < 0.2:
            self.give(self.say("Transpose<perm = [0,2,3,1]>", value), images, 3, pixels, width)
        else:
            self.give(value, images, width, 3, pixels)

    def give(self, value: str, *sizes: int) -> None:
        """One more result, which a node of its own gives."""
        self.results.append(f"{self.kind}[{','.join(map(str, sizes))}] {self.say('Neg', value)}")

    @property
    def text(self) -> str:
        """See ``Drawn``."""
        inputs = ", ".join(f"{self.kind}[{shape}] {name}" for name, shape in self.inputs.items())
        return f"g ({inputs}) => ({', '.join(self.results)}) <{', '.join(self.constants)}> {{ {' '.join(self.lines)} }}"


class Norms(Part):
    """A norm of rows that one product or several read."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        rng = self.rng
        self.kind = rng.choice(("float16", "bfloat16"))
        batch, rows, depth, width = rng.randint(1, 3), rng.choice((1, 5, 33)), rng.choice(SIZES[2:]), rng.choice(SIZES)
        more = [self.read(depth)] if rng.random() < 0.5 else []
        normed = self.follow(self.say("LayerNormalization", self.read(batch, rows, depth), self.read(depth), *more))
        parts = [self.say("MatMul", normed, self.read(depth, width)) for _ in range(rng.randint(1, 2))]
        value = self.follow(self.say("Add", *parts) if len(parts) > 1 else parts[0])
        if rng.random() < 0.5:
            value = self.say("Add", value, self.read(width))
        self.results.append(value)
        self.shape, self.depth = f"{batch},{rows},{width}", depth


def test_branches(seeds: Callable[[int], range]) -> None:
    """All have a kernel, which writes all of the result."""
    for seed, drawn, made in made_regions(seeds(QUICK), Branches, 20, (), 1):
        assert made.kernel.schedule == "sliced", (seed, drawn.text)
        check(made, inputs_of(drawn, made, seed), length=drawn.depth, misalign=False, limit=4)


def test_cut(seeds: Callable[[int], range]) -> None:
    """All have a kernel, by which each result has its own columns."""
    for seed, drawn, made in made_regions(seeds(QUICK), Cut, 20, (), 1):
        assert made.kernel.schedule == "product", (seed, drawn.text)
        check(made, inputs_of(drawn, made, seed), length=drawn.depth, misalign=False, limit=3)


def test_norms(seeds: Callable[[int], range]) -> None:
    """All have a kernel, which scales what it loads."""
    for seed, drawn, made in made_regions(seeds(QUICK), Norms, 20, (), 1):
        assert made.kernel.schedule == "normed", (seed, drawn.text)
        # What is scaled is rounded once more than the product's own operands are.
        # Of two products that cancel each is rounded: a step of theirs is several of what is left.
        check(made, inputs_of(drawn, made, seed), length=drawn.depth, misalign=False, limit=4, slack=4.0)


def inputs_of(drawn: Part, made: Made, seed: int) -> dict[str, np.ndarray]:
    """Random ones, which no product rounds."""
    return (short_inputs if drawn.kind == "float" else random_inputs)(made, {}, seed)
