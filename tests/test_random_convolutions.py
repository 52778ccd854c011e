"""Random convolutions in every way that a network may write them, against their nodes in float64.

One to three axes, strides, dilations, groups, odd sizes, pads that differ before and behind, ``auto_pad``, biases, what
follows, and either layout of the image, the weights and the result; float16, bfloat16 and float32; kernels in the
emulator.

    python -m pytest tests/test_random_convolutions.py --seed 1 --graphs 500
"""

from __future__ import annotations

import random
from collections.abc import Callable
from math import ceil
from typing import Any

from kernel_harness import attempt, check, parse, short_inputs, told

from onnxfuse.emulator import EmulatorError
from onnxfuse.refusal import Refusal

QUICK = 16
"""Convolutions that are tried where no more are asked for."""

LENGTHS = {1: (1, 5, 17, 33, 70), 2: (1, 3, 7, 14, 19), 3: (1, 2, 5, 6)}
"""Sizes of images by how many axes they have."""

MANY, SHORT = (16, 32, 64, 96, 128), {1: (1, 5, 17, 33), 2: (1, 3, 6, 11), 3: (1, 2, 4, 5)}
"""Channels of which windows may be copied in boxes, and sizes of images that have them, which the emulator is not long
with."""

BATCHES = (2, 2, 4096)
"""Images that kernels are planned for: of many, blocks have many tiles each, and weights may stay for all of them."""

ENOUGH = 200
"""Convolutions of which some are copied in boxes along each number of axes, some with weights that stay."""


class Drawn:
    """One random convolution: its text, and batches to run it at."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.kind = self.choose("float16", "float16", "bfloat16", "float")
        self.many = False
        self.groups, self.channels, self.results = self._channels()
        many = self.many
        self.axes = self.choose(1, 2, 2, 3, 3) if many else self.choose(1, 2, 2, 2, 3)
        self.size = [self.choose(*(SHORT if many else LENGTHS)[self.axes]) for _ in range(self.axes)]
        self.kernel = [self.choose(1, 1, 2, 3, 3, 5) for _ in range(self.axes)]
        self.strides = [self.choose(1, 1, 2, 3) for _ in range(self.axes)]
        self.dilations = [self.choose(1, 1, 1, 2) for _ in range(self.axes)]
        self.padding, self.pads = self._padding()
        self.lasts = self.choose((False, False), (True, True), (True, False), (False, True), *3 * many * [(True, True)])
        self.weights_last = self.groups == 1 and self.choose(many, False, True)
        self.text = self._text()

    def choose(self, *what: Any) -> Any:
        return self.rng.choice(what)

    def _channels(self) -> tuple[int, int, int]:
        """Groups, and channels of the image and of the result."""
        match self.choose("dense", "dense", "many", "few", "depthwise", "depthwise", "several", "grouped"):
            case "dense":
                return 1, self.choose(8, 16, 24, 40), self.choose(8, 24, 33, 64)
            case "many":
                self.many = True
                return 1, self.choose(*MANY), self.choose(8, 24, 33)
            case "few":
                return 1, self.choose(1, 2, 3, 4), self.choose(8, 16, 24)
            case "depthwise":
                channels = self.choose(1, 8, 24, 33)
                return channels, channels, channels
            case "several":
                channels = self.choose(3, 8, 16)
                return channels, channels, channels * self.choose(2, 3)
        groups = self.choose(2, 3)
        return groups, groups * self.choose(4, 8), groups * self.choose(3, 8)

    def _padding(self) -> tuple[str, list[int]]:
        """The attribute, and the pads that it means: those before all axes, then those behind."""
        spans = [(size - 1) * step + 1 for size, step in zip(self.kernel, self.dilations, strict=True)]
        # A window has a place at least.
        most = [max(0, span - 1) for span in spans]
        short = [max(0, span - size) for span, size in zip(spans, self.size, strict=True)]
        way = self.choose("pads", "pads", "SAME_UPPER", "SAME_LOWER", "VALID")
        if way == "VALID" and not any(short):
            return 'auto_pad = "VALID"', [0] * 2 * self.axes
        if way.startswith("SAME"):
            counts = [ceil(size / stride) for size, stride in zip(self.size, self.strides, strict=True)]
            total = [max(0, (count - 1) * stride + span - size) for count, stride, span, size in zip(
                counts, self.strides, spans, self.size, strict=True)]
            less, more = [each // 2 for each in total], [each - each // 2 for each in total]
            return f'auto_pad = "{way}"', [*less, *more] if way == "SAME_UPPER" else [*more, *less]
        before = [self.rng.randint(0, each) for each in most]
        behind = [max(self.rng.randint(0, each), lack - first) for each, lack, first in zip(
            most, short, before, strict=True)]
        return f"pads = {[*before, *behind]}", [*before, *behind]

    def counts(self) -> list[int]:
        """The result's size along each axis."""
        padded = [sum(each) for each in zip(self.size, self.pads[:self.axes], self.pads[self.axes:], strict=True)]
        return [(size - (length - 1) * step - 1) // stride + 1 for size, length, step, stride in zip(
            padded, self.kernel, self.dilations, self.strides, strict=True)]

    def _text(self) -> str:
        counts = self.counts()
        first, last = [0, self.axes + 1, *range(1, self.axes + 1)], [0, *range(2, self.axes + 2), 1]
        image, result = [self.channels, *self.size], [self.results, *counts]
        shapes = {"x": [*self.size, self.channels] if self.lasts[0] else image,
                  "w": [self.results, *self.kernel, self.channels] if self.weights_last else
                  [self.results, self.channels // self.groups, *self.kernel]}
        out = [*counts, self.results] if self.lasts[1] else result
        lines, operands = [f"i = Transpose<perm = {first}>(x)" if self.lasts[0] else "i = Identity(x)"], "i, v"
        lines.append(f"v = Transpose<perm = {first}>(w)" if self.weights_last else "v = Identity(w)")
        if self.choose(True, False):
            shapes["b"], operands = [self.results], "i, v, b"
        lines.append(f"c = Conv<group = {self.groups}, kernel_shape = {self.kernel}, strides = {self.strides}, "
                     f"dilations = {self.dilations}, {self.padding}>({operands})")
        match self.choose("", "relu", "silu", "residual"):
            case "relu":
                lines.append("d = Relu(c)")
            case "silu":
                lines.append("s = Sigmoid(c) d = Mul(c, s)")
            case "residual":
                shapes["r"] = result
                lines.append("d = Add(c, r)")
            case _:
                lines.append("d = Identity(c)")
        lines.append(f"y = Transpose<perm = {last}>(d)" if self.lasts[1] else "y = Identity(d)")
        inputs = [f"{self.kind}[{', '.join(map(str, shape if name in 'wb' else ['N', *shape]))}] {name}"
                  for name, shape in shapes.items()]
        return (f"g ({', '.join(inputs)}) => ({self.kind}[N, {', '.join(map(str, out))}] y) "
                f"{{ {' '.join(lines)} }}")

    @property
    def length(self) -> int:
        """Terms of a sum."""
        length = self.channels // self.groups
        for each in self.kernel:
            length *= each
        return length


def test_convolutions(seeds: Callable[[int], range]) -> None:
    """Most of them have a kernel; why one has none is told."""
    schedules, copied, stayed = set[str](), set[int](), 0
    drawn, ran = seeds(QUICK), 0
    for seed in drawn:
        one = Drawn(seed)
        planned = {"N": one.choose(*BATCHES)}
        made = attempt(parse(one.text), planned)
        if isinstance(made, Refusal):
            assert made.code and made.message, one.text
            continue
        ran += 1
        schedules.add(made.kernel.schedule)
        boxes = [choice for choice in made.kernel.choices if "taps" in dict(choice.settings)]
        choice = one.choose(None, *made.kernel.choices, *len(made.kernel.choices) * boxes)
        copied |= {one.axes} if choice in boxes else set()
        ways = ((2, made), (one.choose(1, 3), told(made, choice, planned)))
        stayed += any("_stays" in name for _, run in ways for name in run.kernel.plan.kernels)
        for batch, run in ways:
            try:
                check(run, short_inputs(run, {"N": batch}, seed), length=one.length, misalign=False,
                      multiprocessors=132 if planned["N"] == 2 else 2)
            except (AssertionError, EmulatorError) as error:
                raise AssertionError(f"seed {seed}, N = {batch}, {choice}: {one.text}") from error
    assert ran >= len(drawn) // 2 and {"product", "stencil"} <= schedules
    assert len(drawn) < ENOUGH or (copied == {1, 2, 3} and stayed > 1)
