"""Large arrays a block at a time: temporaries of a block stay in a core's cache.

One after the other: NumPy's loops over a block are so short that threads would wait for Python's lock most of the time,
and be slower together than one alone (measured with 1 to 16).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Result = TypeVar("Result")

BLOCK = 1 << 13
"""Elements of a block.  In float64 it is half of what malloc gives back to the system when it is freed: page faults on
larger temporaries take longer than the arithmetic."""

MOST = 1 << 18
"""Elements up to which all are compared."""

PIECES, PIECE = 255, 1 << 10
"""How many pieces of neighbouring elements a sample has beside the first and the last ones, and how many elements."""

_GOLDEN = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio: multiples of it lie evenly below 2**64, and so do their remainders by sizes of rows,
tiles and matrices, so that faults at the borders of these show."""


def parts(size: int) -> list[slice]:
    """The blocks of an array of so many elements along one axis, in their order."""
    return [slice(start, min(start + BLOCK, size)) for start in range(0, size, BLOCK)]


def over_blocks(work: Callable[[slice], Result], size: int) -> list[Result]:
    """What ``work`` gives for each of these."""
    return [work(part) for part in parts(size)]


def pieces(count: int) -> list[tuple[int, int]]:
    """Begin and end of the pieces of so many elements that are compared, in no order."""
    if count <= MOST:
        return [(0, count)]
    last = count - PIECE
    starts = [0, last, *((place * _GOLDEN & (1 << 64) - 1) * last >> 64 for place in range(1, PIECES + 1))]
    return [(start, start + PIECE) for start in starts]


def sample(count: int) -> Array | None:
    """Which of so many elements ``pieces`` has; None where that is all."""
    if count <= MOST:
        return None
    return np.concatenate([np.arange(start, end) for start, end in pieces(count)])
