"""Launches kernels that were compiled for the CPU."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from onnxfuse.emulator.errors import EmulatorError
from onnxfuse.emulator.memory import Buffer
from onnxfuse.emulator.toolchain import build, runtime

Order = Literal["forward", "backward"] | int
"""In which order threads and blocks take turns: by number, from the last, or shuffled by a seed."""

Argument = NDArray[Any] | Buffer | int | float | np.generic | bytes

_STRUCTURE = 128
"""Bytes that a structure among the arguments is aligned to at least."""

MOST_THREADS = 1024
MOST_CLUSTER = 8
"""Blocks of a cluster that every GPU with clusters takes."""

MOST_SHARED = 227 * 1024
"""Dynamic shared memory of a block in bytes, that of sm_90."""

_LOCK = threading.Lock()
_KINDS = {"s": "a structure", "i": "an integer", "u": "an integer", "f": "a float"}
_CODES = {
    signal.SIGFPE: "an integer division by zero",
    signal.SIGILL: "an illegal instruction, or a check of alignment, bounds or a cast that does not fail again",
}


class _CheckError(EmulatorError):
    """A check failed that does not say which."""


class _Parameter(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_char), ("size", ctypes.c_ubyte), ("read_only", ctypes.c_bool))


class _Kernel(ctypes.Structure):
    _fields_ = (
        ("call", ctypes.c_void_p),
        ("parameters", ctypes.POINTER(_Parameter)),
        ("count", ctypes.c_int),
        ("threads_bound", ctypes.c_int),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.POINTER(_Kernel)),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("cluster", ctypes.c_uint),
        ("shared", ctypes.c_uint64),
        ("shared_alignment", ctypes.c_uint64),
        ("static_begin", ctypes.c_void_p),
        ("static_end", ctypes.c_void_p),
        ("order", ctypes.c_int),
        ("seed", ctypes.c_uint64),
        ("seconds", ctypes.c_double),
    )


class _Fault(ctypes.Structure):
    _fields_ = (
        ("signal", ctypes.c_int),
        ("write", ctypes.c_int),
        ("line", ctypes.c_int),
        ("in_thread", ctypes.c_int),
        ("address", ctypes.c_void_p),
        ("block", ctypes.c_uint * 3),
        ("thread", ctypes.c_uint * 3),
        ("message", ctypes.c_char * 1024),
    )


class _Values:
    """A launch's arguments in memory, and where each lies."""

    def __init__(self, count: int) -> None:
        self.numbers = (ctypes.c_uint64 * max(count, 1))()
        self.pointers = (ctypes.c_void_p * len(self.numbers))(
            *(ctypes.addressof(self.numbers) + 8 * number for number in range(len(self.numbers))))
        self._structures: list[ctypes.Array[ctypes.c_char]] = []

    def structure(self, number: int, content: bytes) -> None:
        """Take a structure as an argument."""
        held = ctypes.create_string_buffer(len(content) + _STRUCTURE)
        start = -(-ctypes.addressof(held) // _STRUCTURE) * _STRUCTURE
        ctypes.memmove(start, content, len(content))
        self._structures.append(held)
        self.pointers[number] = start


def _passed(
    kernel: str, entry: _Kernel, args: Sequence[Argument], values: _Values, stack: ExitStack
) -> tuple[list[Buffer], list[tuple[NDArray[Any], Buffer]]]:
    """Put arguments among the values; gives the buffers of all pointers, and those of arrays with these."""
    buffers: list[Buffer] = []
    arrays: list[tuple[NDArray[Any], Buffer]] = []
    for number, argument in enumerate(args):
        parameter = entry.parameters[number]
        if isinstance(argument, np.ndarray):
            buffer = stack.enter_context(Buffer(f"argument {number}", argument.nbytes, None))
            buffer.write(argument, parameter.read_only or not argument.flags.writeable)
            arrays.append((argument, buffer))
            argument = buffer
        if isinstance(argument, Buffer):
            buffers.append(argument)
        if isinstance(argument, bytes) and parameter.kind == b"s" and len(argument) <= parameter.size:
            values.structure(number, argument.ljust(parameter.size, b"\0"))
        else:
            values.numbers[number] = _encode(kernel, number, parameter, argument)
    return buffers, arrays


class Emulator:
    """The kernels of a text, compiled for the CPU.

    Args:
        source: CUDA C++ as NVRTC takes it; its kernels are ``extern "C" __global__``.
        includes: folders of the headers that it includes, if any.
        seconds: CPU time after which a launch is given up.
        telling: whether checks that fail say what they found. Others are run again so where one fails.

    Raises:
        EmulatorError: it does not compile; the text is the compiler's.
    """

    def __init__(
        self, source: str, includes: Sequence[Path] = (), seconds: float = 60.0, telling: bool = False
    ) -> None:
        self.seconds = seconds
        self._runtime = runtime()
        self._telling = None if telling else (lambda: Emulator(source, includes, seconds, telling=True))
        library, host = build(source, includes, telling)
        self._library = ctypes.CDLL(str(library))
        self._shared_alignment = host.shared_alignment
        self._kernels = {name: _Kernel.in_dll(self._library, f"onnxfuse_kernel_{name}") for name in host.kernels}
        self._static = [
            ctypes.c_void_p.in_dll(self._library, f"onnxfuse_shared_{end}").value for end in ("begin", "end")
        ]

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the text's kernels."""
        return tuple(self._kernels)

    def launch(
        self,
        kernel: str,
        grid: Sequence[int] | int,
        block: Sequence[int] | int,
        args: Sequence[Argument],
        shared: int = 0,
        order: Order = "forward",
        *,
        cluster: int = 1,
    ) -> None:
        """Run a kernel to its end.

        Args:
            kernel: its name.
            grid: blocks; up to three sizes.
            block: threads of a block; up to three sizes.
            args: arrays and buffers for pointers (an array is changed in place, one for a pointer to const cannot be),
                bytes for a structure, which may hold fewer than it, numbers for the rest; a NumPy number must have the
                parameter's size, a Python number takes it.
            shared: dynamic shared memory in bytes.
            order: see ``Order``.
            cluster: neighbouring blocks along the grid's first size that run together; they have shared memory of
                each other, and memory that is not dynamic each its own.

        Raises:
            EmulatorError: the launch does not fit the kernel or a GPU, or a thread did something wrong.
        """
        if kernel not in self._kernels:
            raise EmulatorError(f"no kernel {kernel!r} in the text; it has {', '.join(self._kernels) or 'none'}")
        entry = self._kernels[kernel]
        grids, blocks = _three(grid), _three(block)
        self._check_sizes(kernel, entry, grids, blocks, shared)
        if not 1 <= cluster <= MOST_CLUSTER or grids[0] % cluster:
            raise EmulatorError(f"kernel {kernel} cannot have clusters of {cluster} blocks in grid {grids}")
        if len(args) != entry.count:
            raise EmulatorError(f"kernel {kernel} has {entry.count} parameters, not {len(args)}")
        with ExitStack() as stack:
            values = _Values(entry.count)
            buffers, arrays = _passed(kernel, entry, args, values, stack)
            try:
                self._run(kernel, entry, grids, blocks, values, cluster=cluster, shared=shared, order=order,
                          buffers=buffers)
            except _CheckError:
                if self._telling is not None:
                    self._telling().launch(kernel, grid, block, args, shared, order, cluster=cluster)
                raise
            for array, buffer in arrays:
                if not buffer.read_only:
                    array[...] = buffer.read(array.dtype, array.shape)

    def _check_sizes(
        self, kernel: str, entry: _Kernel, grid: tuple[int, ...], block: tuple[int, ...], shared: int
    ) -> None:
        threads = block[0] * block[1] * block[2]
        if min(grid) < 1 or grid[0] >= 2**31 or max(grid[1:]) > 65535:
            raise EmulatorError(f"kernel {kernel} cannot have grid {grid}")
        if min(block) < 1 or threads > MOST_THREADS or block[2] > 64:
            raise EmulatorError(f"kernel {kernel} cannot have block {block}")
        if 0 < entry.threads_bound < threads:
            raise EmulatorError(f"kernel {kernel} is bound to {entry.threads_bound} threads, not {threads}")
        if not 0 <= shared <= MOST_SHARED:
            raise EmulatorError(f"kernel {kernel} cannot have {shared} bytes of dynamic shared memory")

    def _run(
        self,
        kernel: str,
        entry: _Kernel,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        values: _Values,
        *,
        cluster: int,
        shared: int,
        order: Order,
        buffers: list[Buffer],
    ) -> None:
        orders = {"forward": 0, "backward": 1}
        launch = _Launch(
            ctypes.pointer(entry), values.pointers, grid, block, cluster, shared, self._shared_alignment,
            *self._static, orders[order] if isinstance(order, str) else 2, order if isinstance(order, int) else 0,
            self.seconds,
        )
        fault = _Fault()
        with _LOCK:
            failed = self._runtime.onnxfuse_emulator_launch(ctypes.byref(launch), ctypes.byref(fault))
        where = f"kernel {kernel}, block {tuple(fault.block)}"
        if failed:
            if fault.in_thread:
                where += f", thread {tuple(fault.thread)}"
            if fault.line:
                where += f", line {fault.line}"
            error = _CheckError if fault.signal == signal.SIGILL else EmulatorError
            raise error(f"{where}: {self._explain(fault, buffers)}")
        for buffer in buffers:
            try:
                buffer.check()
            except EmulatorError as error:
                raise EmulatorError(f"kernel {kernel}: {error}") from None

    def _explain(self, fault: _Fault, buffers: list[Buffer]) -> str:
        if not fault.signal:
            return str(fault.message.decode(errors="replace"))
        if fault.signal == signal.SIGVTALRM:
            return f"the launch did not end within {self.seconds:g} s of CPU time"
        if fault.signal in _CODES:
            return _CODES[fault.signal]
        address = fault.address or 0
        access = "write" if fault.write else "read"
        for buffer in buffers:
            place = buffer.describe(address)
            if place is not None:
                return f"{access} {place}" + (", which is read-only" if place.startswith("at") else "")
        self._runtime.onnxfuse_emulator_place.restype = ctypes.c_char
        near = self._runtime.onnxfuse_emulator_place(ctypes.c_void_p(address))
        if near == b"s":
            return "the thread's stack overflows"
        if near == b"d":
            return f"{access} outside of dynamic shared memory"
        return f"{access} at address {address:#x}, which belongs to no argument"


def _three(sizes: Sequence[int] | int) -> tuple[int, int, int]:
    x, y, z = (*((sizes,) if isinstance(sizes, int) else sizes), 1, 1)[:3]
    return int(x), int(y), int(z)


def _encode(kernel: str, number: int, parameter: _Parameter, argument: Argument) -> int:
    """The eight bytes that hold an argument.

    Raises:
        EmulatorError: the parameter is of another kind or size.
    """
    kind, size = parameter.kind.decode(), int(parameter.size)
    wanted = "a pointer" if kind == "p" else f"{_KINDS[kind]} of {size} bytes"
    wrong = EmulatorError(f"kernel {kernel}, argument {number}: {argument!r} given for {wanted}")
    if isinstance(argument, Buffer):
        if kind != "p":
            raise wrong
        return argument.address
    if isinstance(argument, np.ndarray | bytes) or kind in "ps":
        raise wrong
    if isinstance(argument, np.generic) and argument.itemsize != size:
        raise wrong
    if kind == "f":
        if not isinstance(argument, (float, int, np.floating)):
            raise wrong
        data = np.array(argument, {4: np.float32, 8: np.float64}[size]).tobytes()
        return int.from_bytes(data, "little")
    if not isinstance(argument, (int, np.integer, np.bool_)):
        raise wrong
    value = int(argument)
    low, high = (-(1 << (8 * size - 1)), 1 << (8 * size - 1)) if kind == "i" else (0, 1 << 8 * size)
    if not low <= value < high:
        raise wrong
    return value & 0xFFFFFFFFFFFFFFFF
