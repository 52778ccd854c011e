"""The few functions of the CUDA driver that measuring needs, by ctypes: memory, synchronisation, events.

All of them work in the device's primary context, which is the one ONNX Runtime uses.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

from onnxfuse.errors import KernelError

_L2_CACHE_SIZE = 38  # CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE
_SHOWN = 128


_SMALL = 1 << 17
"""Bytes that are copied in the time that a call takes."""


class Device:
    """A GPU.

    Attributes:
        ordinal: as the driver counts; name: as the driver says.
        l2_bytes: size of its L2 cache.
        cuda: the newest CUDA version that the driver supports, as "13.0".
    """

    def __init__(self, ordinal: int, library: Any, holding: Any) -> None:
        """Open the primary context of a GPU.

        Args:
            library: libcuda, as ``ctypes.CDLL`` loads it; holding: as ``ctypes.PyDLL`` does.

        Raises:
            KernelError: the driver does not start, or has no such GPU.
        """
        self.ordinal = ordinal
        self._library, self._holding = library, holding
        self._call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._context = context
        name, size, version = ctypes.create_string_buffer(_SHOWN), ctypes.c_int(), ctypes.c_int()
        self._call("cuDeviceGetName", name, _SHOWN, device)
        self._call("cuDeviceGetAttribute", ctypes.byref(size), _L2_CACHE_SIZE, device)
        self._call("cuDriverGetVersion", ctypes.byref(version))
        self.name = name.value.decode()
        self.l2_bytes = size.value
        self.cuda = f"{version.value // 1000}.{version.value % 1000 // 10}"

    def _call(self, function: str, *arguments: Any) -> None:
        self._check(function, getattr(self._library, function)(*arguments))

    def _check(self, function: str, code: int) -> None:
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise KernelError(f"{function} failed: {(text.value or b'unknown error').decode()} ({code})")

    def _hold(self, function: str, *arguments: Any) -> None:
        """A call that takes microseconds, in which Python's lock is kept: other threads that took it meanwhile would
        give it back milliseconds later."""
        self._check(function, getattr(self._holding, function)(*arguments))

    def _enter(self) -> None:
        self._hold("cuCtxSetCurrent", self._context)

    def synchronise(self) -> None:
        """Wait for all work of the device.

        Raises:
            KernelError: a kernel failed.
        """
        self._enter()
        self._call("cuCtxSynchronize")

    def allocate(self, size: int) -> int:
        """Address of ``size`` bytes of device memory, at least one; aligned to 256 bytes.

        Raises:
            KernelError: there is not so much.
        """
        self._enter()
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(size, 1)))
        return address.value

    def free_bytes(self) -> int:
        """Bytes of device memory that nobody has."""
        self._enter()
        free, whole = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(whole))
        return free.value

    def free(self, address: int) -> None:
        """Give memory of ``allocate`` back."""
        self._enter()
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def upload(self, address: int, host: int, size: int) -> None:
        """Copy ``size`` bytes from a host address to a device address; done on return."""
        self._enter()
        if size:
            self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), ctypes.c_void_p(host), ctypes.c_size_t(size))
            self._call("cuStreamSynchronize", None)

    def fill(self, address: int, byte: int, size: int) -> None:
        """Write the same byte to ``size`` bytes from a device address on; done on return."""
        self._enter()
        if size:
            self._hold("cuMemsetD8Async", ctypes.c_uint64(address), ctypes.c_ubyte(byte), ctypes.c_size_t(size), None)
            self._call("cuStreamSynchronize", None)

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy ``size`` bytes from one device address to another; done after ``synchronise``."""
        self._enter()
        if size:
            self._call("cuMemcpyDtoD_v2", ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(size))

    def download(self, address: int, size: int) -> bytearray:
        """``size`` bytes at a device address, after all work of the device."""
        self.synchronise()
        buffer = bytearray(size)
        if size:
            target = (ctypes.c_char * size).from_buffer(buffer)
            call = self._hold if size <= _SMALL else self._call
            call("cuMemcpyDtoH_v2", target, ctypes.c_uint64(address), ctypes.c_size_t(size))
        return buffer

    def gather(self, addresses: Sequence[int], size: int) -> bytearray:
        """``size`` bytes at each of some device addresses, after all work of the device: one download for all."""
        self.synchronise()
        found = self.allocate(size * len(addresses))
        try:
            for number, address in enumerate(addresses):
                self._hold("cuMemcpyDtoDAsync_v2", ctypes.c_uint64(found + size * number), ctypes.c_uint64(address),
                           ctypes.c_size_t(size), None)
            return self.download(found, size * len(addresses))
        finally:
            self.free(found)

    def copy_rate(self, size: int = 1 << 30, repeats: int = 10) -> float:
        """Bytes a second of a device-to-device copy, reads plus writes: the best of ``repeats`` copies of ``size``.

        Raises:
            KernelError: there is no room for two buffers of ``size`` bytes.
        """
        source, target = self.allocate(size), self.allocate(size)
        try:
            self._call("cuMemsetD8_v2", ctypes.c_uint64(source), 1, ctypes.c_size_t(size))
            copy = (ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(size), None)
            times = [self._timed(lambda: self._call("cuMemcpyDtoDAsync_v2", *copy)) for _ in range(repeats + 2)]
        finally:
            self.free(source)
            self.free(target)
        return 2 * size / min(times[2:])

    def _timed(self, work: Callable[[], None]) -> float:
        """Seconds of GPU work on the default stream, between two events."""
        start, end, milliseconds = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_float()
        for event in (start, end):
            self._call("cuEventCreate", ctypes.byref(event), 0)
        self._call("cuEventRecord", start, None)
        work()
        self._call("cuEventRecord", end, None)
        self._call("cuEventSynchronize", end)
        self._call("cuEventElapsedTime", ctypes.byref(milliseconds), start, end)
        for event in (start, end):
            self._call("cuEventDestroy_v2", event)
        return milliseconds.value / 1e3


@functools.cache
def device(ordinal: int = 0) -> Device:
    """A GPU of this machine.

    Raises:
        KernelError: there is no driver, it does not start, or it has no such GPU.
    """
    try:
        library, holding = (kind("libcuda.so.1") for kind in (ctypes.CDLL, ctypes.PyDLL))
    except OSError as error:
        raise KernelError("there is no NVIDIA driver on this machine (libcuda.so.1 was not found)") from error
    return Device(ordinal, library, holding)


def driver_version() -> str | None:
    """Version of the NVIDIA driver, as "580.65.06"; None where there is none."""
    text = ctypes.create_string_buffer(_SHOWN)
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if library.nvmlInit_v2() or library.nvmlSystemGetDriverVersion(text, _SHOWN):
        return None
    return text.value.decode()
