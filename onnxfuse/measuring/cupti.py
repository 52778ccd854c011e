"""How long each GPU kernel of a stretch of a run took, from CUPTI's activity records, in this process.

CUPTI (NVIDIA's profiling library, "CUPTI Activity API") asks for buffers, fills them with a record for each kernel and
copy, and hands them back; ``cuptiActivityFlushAll`` after a synchronisation makes it hand back all of them.  Kernels
that a CUDA graph launches are recorded one by one as well.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from onnxfuse.errors import RuntimeLibraryError
from onnxfuse.measuring import driver

SONAMES = ("libcupti.so.13", "libcupti.so.12")

MEMCPY, MEMSET, KERNEL, CONCURRENT_KERNEL = 1, 2, 3, 10
"""Kinds of records (CUpti_ActivityKind) that are read."""

_KINDS = (CONCURRENT_KERNEL, MEMCPY, MEMSET)
_END_OF_BUFFER = 12  # CUPTI_ERROR_MAX_LIMIT_REACHED
_FORCED = 1  # CUPTI_ACTIVITY_FLAG_FLUSH_FORCED
_BUFFER_BYTES = 4 << 20

# CUpti_ActivityKernel4 to 13 have these fields at these places; memory records have the times alone.
_TIMES, _GRID, _NAME = struct.Struct("<QQ"), struct.Struct("<iii"), struct.Struct("<Q")
_TIMES_AT, _GRID_AT, _NAME_AT = 16, 52, 104

_Requested = ctypes.CFUNCTYPE(
    None, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)
)
_Completed = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t
)


class Activity(NamedTuple):
    """One thing that the GPU did; ``start`` and ``end`` in nanoseconds of CUPTI's clock, ``grid`` of a kernel."""

    kind: int
    name: str
    start: int
    end: int
    grid: tuple[int, int, int] = (0, 0, 0)

    @property
    def nanoseconds(self) -> int:
        """How long it took."""
        return self.end - self.start

    @property
    def is_kernel(self) -> bool:
        """Whether it is a kernel, not a copy or a fill."""
        return self.kind in (KERNEL, CONCURRENT_KERNEL)


def busy_nanoseconds(activities: Iterable[Activity]) -> int:
    """Nanoseconds in which at least one of these ran: of such as run at one time, as kernels that a library launches on
    streams of its own, none counts for another's time."""
    total, until = 0, 0
    for activity in sorted(activities, key=lambda activity: activity.start):
        total += max(0, activity.end - max(activity.start, until))
        until = max(until, activity.end)
    return total


def read_record(address: int) -> Activity | None:
    """The record at an address, or None where it is of a kind that is not asked for."""
    kind = ctypes.c_uint32.from_address(address).value
    if kind not in (*_KINDS, KERNEL):
        return None
    start, end = _TIMES.unpack(ctypes.string_at(address + _TIMES_AT, _TIMES.size))
    if kind in (MEMCPY, MEMSET):
        return Activity(kind, "copy" if kind == MEMCPY else "fill", start, end)
    (pointer,) = _NAME.unpack(ctypes.string_at(address + _NAME_AT, _NAME.size))
    name = ctypes.string_at(pointer).decode("utf-8", "replace") if pointer else "unnamed"
    return Activity(kind, name, start, end, _GRID.unpack(ctypes.string_at(address + _GRID_AT, _GRID.size)))


class Cupti:
    """The activity API of a loaded libcupti, with this process's buffers.  There is one per process: CUPTI keeps one
    pair of callbacks."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._callbacks = (_Requested(self._requested), _Completed(self._completed))  # CUPTI keeps their addresses
        self._lent: dict[int, Any] = {}
        self._free: list[Any] = []
        self._done: list[Activity] = []
        self._failure: Exception | None = None
        self.busy = False

    def start(self) -> None:
        """Record from now on.

        Raises:
            RuntimeLibraryError: CUPTI refuses; on most machines because the driver is older than the library.
        """
        self._call("cuptiActivityRegisterCallbacks", *self._callbacks)
        for kind in _KINDS:
            self._call("cuptiActivityEnable", kind)
        self._done.clear()

    def collect(self) -> list[Activity]:
        """What was recorded since the last time, by start time; the device must have been synchronised.

        Raises:
            RuntimeLibraryError: CUPTI failed, or had to drop records.
        """
        self._call("cuptiActivityFlushAll", _FORCED)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise RuntimeLibraryError(f"CUPTI's records could not be read: {failure}") from failure
        done, self._done = self._done, []
        return sorted(done, key=lambda activity: activity.start)

    def stop(self) -> None:
        """Record no more, and take all buffers back.

        Raises:
            RuntimeLibraryError: CUPTI failed.
        """
        for kind in _KINDS:
            self._call("cuptiActivityDisable", kind)
        # A buffer that CUPTI still held would come back while the interpreter shuts down.
        self._call("cuptiActivityFlushAll", _FORCED)

    def _call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._library, function)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuptiGetResultString(code, ctypes.byref(text))
            raise RuntimeLibraryError(
                f"{function} failed: {(text.value or b'CUPTI does not say why').decode()} ({code})",
                remedy="GPU times need a CUPTI that is no newer than the driver, and the right to profile.",
            )

    def _requested(self, buffer: Any, size: Any, most: Any) -> None:
        memory = self._free.pop() if self._free else ctypes.create_string_buffer(_BUFFER_BYTES)
        address = ctypes.addressof(memory)
        self._lent[address] = memory
        buffer[0], size[0], most[0] = address, _BUFFER_BYTES, 0

    def _completed(self, context: int | None, stream: int, buffer: int, size: int, valid: int) -> None:
        # An exception cannot leave a callback: it is kept for collect().
        try:
            self._done += self._records(buffer, valid)
            dropped = ctypes.c_size_t()
            self._call("cuptiActivityGetNumDroppedRecords", ctypes.c_void_p(context), stream, ctypes.byref(dropped))
            if dropped.value:
                raise RuntimeError(f"{dropped.value} were dropped")
        except Exception as error:
            self._failure = error
        finally:
            self._free.append(self._lent.pop(buffer))

    def _records(self, buffer: int, valid: int) -> Iterator[Activity]:
        record = ctypes.c_void_p()
        arguments = (ctypes.c_void_p(buffer), ctypes.c_size_t(valid), ctypes.byref(record))
        while valid:
            code = self._library.cuptiActivityGetNextRecord(*arguments)
            if code == _END_OF_BUFFER:
                return
            if code or record.value is None:
                raise RuntimeError(f"cuptiActivityGetNextRecord failed ({code})")
            activity = read_record(record.value)
            if activity is not None:
                yield activity


class KernelTimer:
    """Times the GPU kernels of a stretch of a run::

        with KernelTimer() as timer:
            session.run_with_iobinding(binding)
        timer.kernels  # [(name, nanoseconds), ...] in the order they started

    Attributes:
        activities: kernels, copies and fills of the stretch, or of the laps so far.

    Raises:
        RuntimeLibraryError: on entering, there is no CUPTI or it refuses.
        KernelError: there is no driver.
    """

    def __init__(self, synchronise: Callable[[], None] | None = None, library: Cupti | None = None) -> None:
        """Args: synchronise: waits for the GPU, by default for GPU 0; library: CUPTI, by default the one installed."""
        self._synchronise = synchronise
        self._library = library
        self.activities: list[Activity] = []

    def __enter__(self) -> KernelTimer:
        self._synchronise = self._synchronise or driver.device(0).synchronise
        self._library = self._library or cupti()
        if self._library.busy:
            raise RuntimeError("kernel timers cannot be nested")
        self._synchronise()
        self._library.start()
        self._library.busy = True
        self.activities = []
        return self

    def lap(self) -> list[Activity]:
        """What the GPU did since the stretch or the last lap began; waits for it to finish.

        Raises:
            RuntimeLibraryError: CUPTI failed, or had to drop records.
        """
        if self._library is None or self._synchronise is None or not self._library.busy:
            raise RuntimeError("the timer is not running")
        self._synchronise()
        lap = self._library.collect()
        self.activities += lap
        return lap

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        assert self._library is not None
        try:
            if error is None:
                self.lap()
        finally:
            self._library.busy = False
            self._library.stop()

    @property
    def kernels(self) -> list[tuple[str, int]]:
        """Name and nanoseconds of each kernel, in the order they started."""
        return [(activity.name, activity.nanoseconds) for activity in self.activities if activity.is_kernel]


@functools.cache
def cupti() -> Cupti:
    """The CUPTI of this process.

    Raises:
        RuntimeLibraryError: none is installed, or what there is does not load.
    """
    failures = []
    for path in candidates():
        try:
            return Cupti(ctypes.CDLL(path))
        except OSError as error:
            failures.append(f"{path}: {error}")
    raise RuntimeLibraryError(
        "GPU times need CUPTI, and no libcupti.so.13 or libcupti.so.12 was found."
        if not failures else "CUPTI does not load: " + "; ".join(failures),
        remedy="Install it: pip install nvidia-cuda-cupti (CUDA 13) or nvidia-cuda-cupti-cu12 (CUDA 12).",
    )


def candidates() -> list[str]:
    """Where a libcupti lies, newest first: folders of LD_LIBRARY_PATH, NVIDIA's wheels, the CUDA toolkit."""
    folders = [Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    wheels = importlib.util.find_spec("nvidia")
    for root in wheels.submodule_search_locations or [] if wheels else []:
        folders += [Path(root) / "cu13" / "lib", Path(root) / "cuda_cupti" / "lib"]
    for toolkit in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if toolkit:
            folders += [Path(toolkit) / "extras/CUPTI/lib64", Path(toolkit) / "lib64"]
    found = [str(folder / name) for name in SONAMES for folder in folders if (folder / name).exists()]
    return list(dict.fromkeys(found))


@functools.cache
def demangled(name: str) -> str:
    """A C++ kernel's name as source shows it, without argument list; names that are not mangled stay."""
    if not name.startswith("_Z"):
        return name
    try:
        demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    except OSError:
        return name
    demangle.restype, status = ctypes.c_void_p, ctypes.c_int()
    text = demangle(name.encode(), None, None, ctypes.byref(status))
    if status.value or not text:
        return name
    readable = ctypes.string_at(text).decode()
    ctypes.CDLL(None).free(ctypes.c_void_p(text))
    return _without_arguments(readable).removeprefix("void ")


def _without_arguments(signature: str) -> str:
    """A function's signature up to its last top-level parenthesis group."""
    if not signature.endswith(")"):
        return signature
    depth = 0
    for place in range(len(signature) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(signature[place], 0)
        if depth == 0:
            return signature[:place]
    return signature
