"""Where a measurement runs: a GPU through ONNX Runtime's CUDA provider, or the CPU."""

from __future__ import annotations

import ctypes
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxfuse.errors import KernelError, RuntimeLibraryError
from onnxfuse.measuring import driver
from onnxfuse.runtime.words import runtime_words

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


ALIGNMENT = 256
"""Bytes that addresses of arrays are multiples of, as the driver's own are."""


@dataclass(frozen=True)
class Placed:
    """An array in a machine's memory, whose owner keeps it there."""

    address: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Memory(Protocol):
    """Memory that inputs and outputs live in."""

    def place(self, array: NDArray[Any]) -> int:
        """Address of a copy of a contiguous array; it stays until the memory object goes."""

    def repeat(self, array: NDArray[Any], times: int) -> list[int]:
        """Addresses of several copies of a contiguous array, as ``place`` gives one."""

    def read(self, address: int, size: int) -> bytes | bytearray:
        """Bytes at an address, once everything is computed."""

    def gather(self, addresses: Sequence[int], size: int) -> bytes | bytearray:
        """So many bytes at each of some addresses, one behind the other, once everything is computed."""


@dataclass
class HostMemory:
    """Plain memory; arrays are used where they are."""

    kept: list[NDArray[Any]] = field(default_factory=list)

    def place(self, array: NDArray[Any]) -> int:
        self.kept.append(array)
        return int(array.ctypes.data)

    def repeat(self, array: NDArray[Any], times: int) -> list[int]:
        return [self.place(array if not number else array.copy()) for number in range(times)]

    def read(self, address: int, size: int) -> bytes:
        return ctypes.string_at(address, size) if size else b""

    def gather(self, addresses: Sequence[int], size: int) -> bytes:
        return b"".join(self.read(address, size) for address in addresses)


class DeviceMemory:
    """Memory of a GPU."""

    def __init__(self, device: driver.Device) -> None:
        self._device = device
        self._addresses: list[int] = []

    def place(self, array: NDArray[Any]) -> int:
        address = self._device.allocate(array.nbytes)
        self._addresses.append(address)
        self._device.upload(address, int(array.ctypes.data), array.nbytes)
        return address

    def repeat(self, array: NDArray[Any], times: int) -> list[int]:
        # One allocation, and what went over the bus once is copied where it is.
        step = -(-max(array.nbytes, 1) // ALIGNMENT) * ALIGNMENT
        first = self._device.allocate(step * times)
        self._addresses.append(first)
        self._device.upload(first, int(array.ctypes.data), array.nbytes)
        found = [first + step * number for number in range(times)]
        for address in found[1:]:
            self._device.copy(address, first, array.nbytes)
        self._device.synchronise()
        return found

    def read(self, address: int, size: int) -> bytearray:
        return self._device.download(address, size)

    def gather(self, addresses: Sequence[int], size: int) -> bytearray:
        return self._device.gather(addresses, size)

    def __del__(self) -> None:
        for address in self._addresses:
            self._device.free(address)


@dataclass(frozen=True)
class Machine:
    """What sessions are made for.

    Attributes:
        name: of the GPU, or "CPU".
        provider: execution provider; kind: what I/O binding calls the device, "cuda" or "cpu".
        ordinal: of the GPU; gpu: the GPU, or None.
    """

    name: str
    provider: str
    kind: str
    ordinal: int = 0
    gpu: driver.Device | None = None

    def memory(self) -> Memory:
        """Fresh memory for inputs."""
        return HostMemory() if self.gpu is None or self.kind == "cpu" else DeviceMemory(self.gpu)

    @property
    def synchronise(self) -> Callable[[], None] | None:
        """Waits for the GPU."""
        return None if self.gpu is None else self.gpu.synchronise

    def providers(self, options: Mapping[str, str]) -> list[Any]:
        """As ``onnxruntime.InferenceSession`` takes them."""
        return [CPU] if self.provider == CPU else [(self.provider, dict(options)), CPU]


def find_machine(ordinal: int = 0) -> Machine:
    """The GPU of that ordinal where ONNX Runtime can use one, else the CPU."""
    if CUDA in onnxruntime.get_available_providers():
        try:
            gpu = driver.device(ordinal)
        except KernelError:
            return Machine("CPU", CPU, "cpu")
        _find_libraries()
        return Machine(gpu.name, CUDA, "cuda", ordinal, gpu)
    return Machine("CPU", CPU, "cpu")


def start_provider(machine: Machine, options: Mapping[str, str]) -> None:
    """Bring up CUDA and its libraries with a model of one node, so that no session that is timed pays for it.

    Raises:
        RuntimeLibraryError: ONNX Runtime cannot, as where an option is none of the provider's.
    """
    try:
        _start(machine, options)
    except Exception as error:  # ONNX Runtime has an exception type per status
        given = ", ".join(f"{name}={value}" for name, value in options.items())
        raise RuntimeLibraryError(
            f"ONNX Runtime cannot start {machine.provider}: {runtime_words(error)}", place=given or None,
            remedy="Check these options against ONNX Runtime's own." if given else
                   "`onnxfuse doctor` says what is missing on this machine.",
        ) from error


def started_provider(machine: Machine) -> bool:
    """Whether the machine's provider starts and runs a model of one node; all that ONNX Runtime does without its
    libraries is to warn, and to run on the CPU."""
    try:
        return str(_start(machine, {}).get_providers()[0]) == machine.provider != CPU
    except Exception:  # ONNX Runtime has an exception type per status
        return False


def _start(machine: Machine, options: Mapping[str, str]) -> Any:
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "start", value[:1], value[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4  # whatever goes wrong here goes wrong again, with the message, in the real session
    plain = {name: value for name, value in options.items() if name != "enable_cuda_graph"}
    session = onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=machine.providers(plain))
    session.run(None, {"x": np.ones(1, np.float32)})
    return session


def _find_libraries() -> None:
    """Load cuBLAS and cuDNN from NVIDIA's wheels; ONNX Runtime does not look there by itself."""
    has_wheels = importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.cudnn") is not None
    if has_wheels and hasattr(onnxruntime, "preload_dlls"):  # since 1.21
        onnxruntime.preload_dlls()


def as_array(value: Any, memory: Memory) -> NDArray[Any] | None:
    """Contents of an ``OrtValue`` that lives in ``memory``; None where it is no tensor of numbers."""
    if not value.is_tensor() or value.data_type() == "tensor(string)":
        return None
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(value.element_type()))
    shape = tuple(value.shape())
    raw = memory.read(value.data_ptr(), int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
    return np.frombuffer(raw, dtype).reshape(shape)
