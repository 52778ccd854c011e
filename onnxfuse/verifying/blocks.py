"""Large arrays a block at a time, several at once: temporaries of a block stay in a core's cache, and NumPy's inner
loops leave Python's lock to other threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

Result = TypeVar("Result")

BLOCK = 1 << 13
"""Elements of a block.  In float64 it is half of what malloc gives back to the system when it is freed: page faults on
larger temporaries take longer than the arithmetic."""

_AT_ONCE = 16
"""Blocks that a worker takes at a time."""

_MOST_WORKERS = 8


def over_blocks(work: Callable[[slice], Result], size: int) -> list[Result]:
    """What ``work`` gives for each block of an array of so many elements along one axis, in their order."""
    parts = [slice(start, min(start + BLOCK, size)) for start in range(0, size, BLOCK)]
    if len(parts) <= _AT_ONCE:
        return [work(part) for part in parts]
    turns = [parts[start:start + _AT_ONCE] for start in range(0, len(parts), _AT_ONCE)]
    return [found for turn in _workers().map(lambda turn: [work(part) for part in turn], turns) for found in turn]


@cache
def _workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_MOST_WORKERS, os.cpu_count() or 1), "onnxfuse-verify")
