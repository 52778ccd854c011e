"""A launch plan's convolutions by a library, on the CPU: ``conv`` of ``onnxfuse.lowering.routines``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np

from onnxfuse.emulator.memory import Array
from onnxfuse.lowering.routines import AXES


@dataclass(frozen=True)
class Axis:
    """Sizes along one of the image's axes, as the routine names them."""

    size: int
    count: int
    taps: int
    step: int
    apart: int
    before: int

    @property
    def after(self) -> int:
        """Zeros behind the image, none where windows end before it does."""
        return max(0, (self.count - 1) * self.step + (self.taps - 1) * self.apart + 1 - self.before - self.size)

    @property
    def is_whole(self) -> bool:
        """Whether so many windows, and no more, lie in the image with its zeros."""
        span, held = (self.taps - 1) * self.apart + 1, self.size + self.before + self.after
        return held >= span and (held - span) // self.step + 1 == self.count

    def seen(self, tap: int) -> slice:
        """What the windows see at one of their places, of the image with its zeros."""
        first = tap * self.apart
        return slice(first, first + (self.count - 1) * self.step + 1, self.step)


def axes_of(size: Mapping[str, int]) -> tuple[Axis, Axis, Axis]:
    """A call's axes, the outermost first."""
    z, y, x = (Axis(*(size[f"{name}_{axis}"] for name in Axis.__dataclass_fields__)) for axis in AXES)
    return z, y, x


def convolved(image: Array, weights: Array, axes: tuple[Axis, Axis, Axis]) -> Array:
    """Images of shape (images, z, y, x, channels) by weights of shape (results, z, y, x, channels), summed in float32:
    (images, windows along z, y and x, results)."""
    padded = np.pad(image, [(0, 0), *((axis.before, axis.after) for axis in axes), (0, 0)])
    z, y, x = axes
    out = np.zeros((len(image), *(axis.count for axis in axes), len(weights)), np.float32)
    for k, j, i in product(range(z.taps), range(y.taps), range(x.taps)):
        out += np.matmul(padded[:, z.seen(k), y.seen(j), x.seen(i)], weights[:, k, j, i].T)
    return out
