"""What a graph of the standard's operators has at hand while it grows: every value is known by what ONNX Runtime gives
for it, at two sets of sizes, so that any node can simply be tried."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper
from plain_session import bytes_of

Array = NDArray[np.generic]

TENSORS = {
    f"tensor({name.lower()})": TensorProto.DataType.Value(name)
    for name in ("FLOAT", "DOUBLE", "FLOAT16", "BFLOAT16", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16",
                 "UINT32", "UINT64", "BOOL")
}
"""Element types that graphs are made of, by the names that schemas have for them."""

FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
INTEGERS = (TensorProto.INT64, TensorProto.INT32, TensorProto.INT8, TensorProto.INT16, TensorProto.UINT8,
            TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64)
BOOL, INT64, FLOAT = TensorProto.BOOL, TensorProto.INT64, TensorProto.FLOAT

MOST_ELEMENTS = 2000
"""The largest value that a graph goes on with."""

onnxruntime.set_default_logger_severity(4)  # RoiAlign says something about every session

Size = int | str
"""A number, or the name of a symbol."""


def numpy_type(dtype: int) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16) if dtype == TensorProto.BFLOAT16 else helper.tensor_dtype_to_np_dtype(dtype)


def element_type(array: Array) -> int:
    if array.dtype == ml_dtypes.bfloat16:
        return int(TensorProto.BFLOAT16)
    return helper.np_dtype_to_tensor_dtype(array.dtype)


@dataclass(frozen=True, eq=False)
class Known:
    """A value, and what it was in each of the two situations; ``constant`` ones are initializers or Constants."""

    name: str
    dtype: int
    arrays: tuple[Array, Array]
    constant: bool = False

    @property
    def rank(self) -> int:
        return self.arrays[0].ndim

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Sizes of every axis in the two situations."""
        return tuple(zip(self.arrays[0].shape, self.arrays[1].shape, strict=True))

    @property
    def least(self) -> tuple[int, ...]:
        """The smaller size of every axis."""
        return tuple(map(min, self.pairs))

    @property
    def size(self) -> int:
        return max(array.size for array in self.arrays)


def random_array(dtype: int, shape: Sequence[int], rng: np.random.Generator, low: int = -4, high: int = 5) -> Array:
    """Quarters, or integers of [low, high), negative ones only where the type has them."""
    if dtype == BOOL:
        return np.asarray(rng.random(shape) < 0.5)
    if dtype in FLOATS:
        return np.asarray(rng.integers(-12, 13, shape) / 4).astype(numpy_type(dtype))
    kind = numpy_type(dtype)
    return np.asarray(rng.integers(max(low, 0) if kind.kind == "u" else low, high, shape)).astype(kind)


@dataclass(frozen=True)
class Given:
    """An input of a graph: its declared sizes, and of which numbers it is drawn."""

    name: str
    dtype: int
    dims: tuple[Size, ...]
    low: int = -4
    high: int = 5
    def array(self, sizes: Mapping[str, int], seed: int) -> Array:
        shape = [sizes[size] if isinstance(size, str) else size for size in self.dims]
        own = int.from_bytes(self.name.encode(), "big") % 2**31
        return random_array(self.dtype, shape, np.random.default_rng([seed, own]), self.low, self.high)

    def info(self, told: str) -> onnx.ValueInfoProto:
        """As the file declares it: with the symbols' "names", each axis with one of its "own", with a "rank" and what
        is fixed, or with "nothing" but a type."""
        axes = [size if told == "names" or isinstance(size, int) else f"{self.name}_{place}" if told == "own" else None
                for place, size in enumerate(self.dims)]
        return helper.make_tensor_value_info(self.name, self.dtype, None if told == "nothing" else axes)


def ortvalue(array: Array) -> onnxruntime.OrtValue:
    if array.dtype == ml_dtypes.bfloat16:  # NumPy has no such type, and ONNX Runtime none of ml_dtypes
        bits = np.ascontiguousarray(array).view(np.uint16)
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, TensorProto.BFLOAT16)
    return onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array).reshape(array.shape))


def array_of(value: onnxruntime.OrtValue) -> Array | None:
    """A tensor's elements; None of a sequence, an optional or strings."""
    if not value.is_tensor() or value.element_type() not in TENSORS.values():
        return None
    return np.frombuffer(bytes_of(value), numpy_type(value.element_type())).reshape(value.shape())


class Runtime:
    """A session on the CPU with ONNX Runtime's own optimisations off."""

    def __init__(self, model: onnx.ModelProto) -> None:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(model.SerializeToString(), options,
                                                     providers=["CPUExecutionProvider"])
        self.names = [value.name for value in self._session.get_outputs()]

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array | None]:
        """Every output; None where it is no tensor.

        Raises:
            Exception: whatever ONNX Runtime says against the model or the sizes.
        """
        found = self._session.run_with_ort_values(None, {name: ortvalue(array) for name, array in feeds.items()})
        return {name: array_of(value) if value.has_value() else None
                for name, value in zip(self.names, found, strict=True)}


def reads_of(node: onnx.NodeProto) -> Iterator[str]:
    """Names that a node reads, those that its bodies read from around included."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        if attribute.HasField("g"):
            graph = attribute.g
            own = {value.name for value in (*graph.input, *graph.initializer)}
            own |= {name for inner in graph.node for name in inner.output}
            read = [name for inner in graph.node for name in reads_of(inner)] + [value.name for value in graph.output]
            yield from (name for name in read if name not in own)


def flip(rng: Random, share: float) -> bool:
    return rng.random() < share
