"""Device memory of the emulator: buffers whose neighbours fault."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from onnxfuse.emulator.errors import EmulatorError
from onnxfuse.emulator.toolchain import runtime

Array = NDArray[Any]

PAGE = 4096
GUARD = 64 << 20
"""Bytes on either side of a buffer that fault; address space only."""
ALIGNMENT = 16
"""Bytes that a buffer's start is a multiple of, before any wanted misalignment: that of the widest access.  The less,
the closer the buffer's end is to the page that faults."""
CANARY = 0xFB

SPARE = 1 << 20
"""Bytes up to which a mapping is kept for the next buffer of its size: to map pages and touch them for the first time
takes longer than most launches."""
_KEPT = 16
_spare: defaultdict[int, list[int]] = defaultdict(list)
"""Mappings that no buffer uses, by their bytes; of each size a few."""


@dataclass(frozen=True)
class Placement:
    """Where a buffer of ``size`` bytes lies in its mapping of ``mapped`` bytes: as near to the end as its alignment
    lets it, ``misaligned`` bytes past a multiple of ``ALIGNMENT``."""

    size: int
    misaligned: int = 0

    @property
    def mapped(self) -> int:
        return max(-(-(self.size + self.misaligned) // PAGE), 1) * PAGE

    @property
    def offset(self) -> int:
        return (self.mapped - self.size - self.misaligned) // ALIGNMENT * ALIGNMENT + self.misaligned

    @property
    def address(self) -> int:
        """The start's address modulo 256, before anything is mapped."""
        return self.offset % 256


@dataclass
class Buffer:
    """A buffer in a mapping of its own between two stretches that fault.  Use it in a ``with`` statement.

    Args:
        name: for messages.
        size: in bytes.
        fill: the byte that it is filled with; None where it is written as a whole before anything reads it.
        misaligned: bytes that its start is past a multiple of ``ALIGNMENT``.
    """

    name: str
    size: int
    fill: int | None = CANARY
    misaligned: int = 0
    read_only: bool = False
    placement: Placement = field(init=False)
    mapping: int = field(init=False)

    def __post_init__(self) -> None:
        self.placement = Placement(self.size, self.misaligned)
        try:
            self.mapping = _spare[self.placement.mapped].pop()
        except IndexError:
            self.mapping = self._mapped()
        if self.fill is not None:
            ctypes.memset(self.address, self.fill, self.size)
        for start, count in self._around():
            ctypes.memset(start, CANARY, count)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        mapped = self.placement.mapped
        if mapped <= SPARE and len(_spare[mapped]) < _KEPT:
            if self.read_only:
                self._protect(False)
            _spare[mapped].append(self.mapping)
        else:
            runtime().onnxfuse_emulator_unmap(
                ctypes.c_void_p(self.mapping), ctypes.c_size_t(mapped), ctypes.c_size_t(GUARD)
            )

    def _mapped(self) -> int:
        """The start of a new mapping."""
        library = runtime()
        library.onnxfuse_emulator_map.restype = ctypes.c_void_p
        mapping = library.onnxfuse_emulator_map(ctypes.c_size_t(self.placement.mapped), ctypes.c_size_t(GUARD))
        if mapping is None:
            raise EmulatorError(f"no memory for the {self.size} bytes of {self.name}")
        return int(mapping)

    def _protect(self, read_only: bool) -> None:
        """Let it be read only, or written too."""
        self.read_only = read_only
        runtime().onnxfuse_emulator_protect(
            ctypes.c_void_p(self.mapping), ctypes.c_size_t(self.placement.mapped), ctypes.c_bool(read_only)
        )

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return self.mapping + self.placement.offset

    def _around(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Address and size of what lies before and after it, up to the pages that fault."""
        before = self.placement.offset
        return (self.mapping, before), (self.address + self.size, self.placement.mapped - before - self.size)

    def write(self, array: Array, read_only: bool = False) -> None:
        """Copy an array of this size in, and from then on let it be read only where asked."""
        data = np.ascontiguousarray(array)
        ctypes.memmove(self.address, data.ctypes.data, data.nbytes)
        if read_only:
            self._protect(True)

    def read(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """A copy of the contents."""
        array = np.empty(shape, dtype)
        ctypes.memmove(array.ctypes.data, self.address, array.nbytes)
        return array

    def check(self) -> None:
        """That nothing was written between the buffer and its pages that fault.

        Raises:
            EmulatorError: something was.
        """
        if self.read_only:
            return
        for (start, count), side in zip(self._around(), ("before", "after"), strict=True):
            found = ctypes.string_at(start, count)
            wrong = [at for at, byte in enumerate(found) if byte != CANARY] if found.strip(bytes([CANARY])) else []
            if wrong:
                distance = count - wrong[-1] if side == "before" else wrong[0]
                raise EmulatorError(f"a write {distance} bytes {side} {self.name} of {self.size} bytes")

    def describe(self, address: int) -> str | None:
        """Where an address lies, if in or next to this buffer."""
        if not self.mapping - GUARD <= address < self.mapping + self.placement.mapped + GUARD:
            return None
        offset = address - self.address
        if offset < 0:
            return f"{-offset} bytes before the start of {self.name} of {self.size} bytes"
        if offset >= self.size:
            return f"{offset - self.size} bytes past the end of {self.name} of {self.size} bytes"
        return f"at byte {offset} of {self.name} of {self.size} bytes"
