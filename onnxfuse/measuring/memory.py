"""The most device memory that a session holds at once.

ONNX Runtime's arena takes memory in growing chunks and keeps what is free, so that the device's free memory says
little about a model.  Here the CUDA provider allocates through callbacks (provider options ``gpu_external_*``), which
count every tensor, weight and workspace that it asks for.  Such a session is slow, and is used for nothing else.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Protocol

from onnxfuse.errors import KernelError

_REMEMBERED: list[object] = []
"""All callbacks: ONNX Runtime's Python binding remembers those of the last session that named any, and gives them to
sessions without provider options, so that they have to live as long as the process."""

_Allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)
_Free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Empty = ctypes.CFUNCTYPE(None)


class Allocator(Protocol):
    """What device memory comes from."""

    def allocate(self, size: int) -> int:
        """Address of ``size`` bytes; raises KernelError where there is no room."""

    def free(self, address: int) -> None:
        """Give it back."""


class MemoryMeter:
    """Counts the device memory of one session.

    Afterwards a session whose options name no callbacks (``machine.start_provider`` with some option) makes ONNX
    Runtime forget these.

    Attributes:
        held: bytes now; peak: most bytes so far.
        options: options of the CUDA provider that make a session allocate here.
    """

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._sizes: dict[int, int] = {}
        self.held = 0
        self.peak = 0
        self._callbacks = (_Allocate(self._take), _Free(self._give), _Empty(self._empty))
        _REMEMBERED.append(self._callbacks)
        take, give, empty = (str(ctypes.cast(callback, ctypes.c_void_p).value) for callback in self._callbacks)
        self.options: Mapping[str, str] = {
            "gpu_external_alloc": take, "gpu_external_free": give, "gpu_external_empty_cache": empty,
        }

    def _take(self, size: int) -> int | None:
        try:
            address = self._allocator.allocate(size)
        except KernelError:
            return None  # ONNX Runtime reports that there is no memory left
        self._sizes[address] = size
        self.held += size
        self.peak = max(self.peak, self.held)
        return address

    def _give(self, address: int | None) -> None:
        if address is not None and address in self._sizes:
            self.held -= self._sizes.pop(address)
            self._allocator.free(address)

    def _empty(self) -> None:
        """Nothing is kept back."""
