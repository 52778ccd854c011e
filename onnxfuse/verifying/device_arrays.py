"""Arrays that stay in a GPU's memory, where results are compared with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from threading import RLock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxfuse.measuring.machine import Memory

Array = NDArray[Any]

TURN = RLock()
"""Held while something runs on a GPU that may end it: so it is known what did."""

_DOUBLE = np.dtype(np.float64)


@dataclass(frozen=True)
class DeviceArray:
    """Numbers in the memory of a GPU.

    Attributes:
        owner: what keeps them there; memory: which they lie in; address: of the first.
        dtype: NumPy's type of each.
    """

    owner: Any
    memory: Memory
    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any] = _DOUBLE

    @property
    def ndim(self) -> int:
        """How many axes there are."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many there are."""
        return math.prod(self.shape)

    def reshape(self, size: int) -> DeviceArray:
        """The same along one axis; ``size``: as NumPy has it, -1 or how many there are."""
        return replace(self, shape=(self.size if size < 0 else size,))

    def __getitem__(self, part: slice) -> Array:
        """Some of those along one axis, copied to the host."""
        start, stop, _ = part.indices(self.size)
        count, width = max(stop - start, 0), self.dtype.itemsize
        return np.frombuffer(self.memory.read(self.address + width * start, width * count), self.dtype)

    def gathered(self, pieces: Sequence[tuple[int, int]]) -> Array:
        """Pieces of one length of those along one axis, from begin to end, copied to the host."""
        width = self.dtype.itemsize
        (length,) = {end - start for start, end in pieces}
        addresses = [self.address + width * start for start, _ in pieces]
        return np.frombuffer(self.memory.gather(addresses, width * length), self.dtype)


Values = Array | DeviceArray


def on_host(values: Values) -> Array:
    """The array itself, or a copy of what is on a GPU."""
    return values.reshape(-1)[:].reshape(values.shape) if isinstance(values, DeviceArray) else values
