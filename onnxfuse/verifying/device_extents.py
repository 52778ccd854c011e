"""Extents of large outputs by the GPU that made them: NumPy goes through each element a dozen times.

Predicted for a block of 16 million elements of float16: 170 MB that are copied there in some 20 ms, and read in 0.1 ms;
NumPy takes 140 to 240 ms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from onnxfuse.errors import KernelError
from onnxfuse.runtime.compile import KernelSource, default_compiler, load_kernels
from onnxfuse.runtime.importing import import_cupy
from onnxfuse.verifying.blocks import BLOCK, parts
from onnxfuse.verifying.device_arrays import TURN, DeviceArray, Values, on_host
from onnxfuse.verifying.evaluate import array_type
from onnxfuse.verifying.extents import SQUARED, Extent, Extents, extents
from onnxfuse.verifying.tolerances import DIGITS, LEAST, TABLE, Tolerance, units_of

if TYPE_CHECKING:
    import cupy

Array = NDArray[Any]

LEAST_ELEMENTS = 1 << 16
"""Fewer are looked at sooner than they are copied."""

MOST_ELEMENTS = BLOCK << 11
"""Elements that are on the GPU at a time: 200 MB of float16 with their references."""

THREADS = 256
FIELDS = ("endless", "scale", "error", "own", "units", "unit", "error squares", "unit squares", "own squares")
"""What the kernel gives of each block, in its order."""
_MAGNITUDES = [FIELDS.index(name) for name in ("error", "unit", "own")]
"""Of which the last fields are sums of squares."""

_TYPES: dict[int, str] = {TensorProto.FLOAT16: "__half", TensorProto.BFLOAT16: "__nv_bfloat16",
                         TensorProto.FLOAT: "float", TensorProto.DOUBLE: "double"}
"""CUDA's types by element type."""

_ENTRY = """
extern "C" __global__ void __launch_bounds__(THREADS) {name}(
    const {type}* got, const double* reference, const {type}* own, int known, long long count, int block, int digits,
    int least, int output_digits, int output_least, double units, int rounds, double* result) {{
  const Limit limit{{{{digits, least}}, {{output_digits, output_least}}, units, rounds != 0}};
  extents(got, reference, known ? own : nullptr, count, block, limit, result);
}}
"""


@cache
def text() -> str:
    """The text of the kernels, one for each element type."""
    functions = files("onnxfuse.verifying").joinpath("cuda/extents.cu").read_text(encoding="utf-8")
    return functions + "".join(_ENTRY.format(name=entry(dtype), type=name) for dtype, name in _TYPES.items())


def entry(dtype: int) -> str:
    """The name of the kernel for results of a type."""
    return f"extents_{array_type(dtype).name}"


def source() -> KernelSource:
    """The kernels as the compiler takes them."""
    return KernelSource(text(), (), tuple(map(entry, _TYPES)))


def scalars(types: tuple[int, int]) -> tuple[np.generic, ...]:
    """What the kernel takes of an output's types: ``comparison.compared``'s, where something is computed."""
    dtype, arithmetic = types
    ulps, rounds = units_of(dtype, arithmetic)
    digits = (DIGITS[arithmetic], LEAST[arithmetic], DIGITS[dtype], LEAST[dtype])
    return *map(np.int32, digits), np.float64(ulps), np.int32(rounds)


def read(fields: Array, counts: Sequence[int], limits: Tolerance) -> tuple[Extents, list[int]]:
    """What the kernel gave of each block of so many elements, and the blocks at which the host has to look itself."""
    magnitudes = fields[:, _MAGNITUDES]
    looked = (fields[:, 0] != 0) | ((magnitudes != 0) & ~((magnitudes > 1 / SQUARED) & (magnitudes < SQUARED))).any(1)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):  # of blocks that the host looks at, and zeros
        shares = np.where(magnitudes != 0, fields[:, len(FIELDS) - len(_MAGNITUDES):] / magnitudes**2, 0.0)
    most, sums, numbers = magnitudes, shares, np.array(counts)
    if limits.spread is None:
        most, sums, numbers = (np.zeros_like(each) for each in (most, sums, numbers))
    scale = FIELDS.index("scale")
    rows = np.concatenate([fields[:, scale:FIELDS.index("units") + 1], most, sums], axis=1)
    return Extents(rows, numbers), np.flatnonzero(looked).tolist()


class DeviceExtents:
    """An ``extents.Measure`` on a GPU, for what is large and computed in floats; the rest is NumPy's.

    Args:
        device: its number; architecture: as "sm_90".
    """

    def __init__(self, device: int, architecture: str) -> None:
        self._device, self._architecture = device, architecture
        self._loaded: dict[str, cupy.RawKernel] = {}

    def __call__(self, got: Values, reference: Values, own: Array | None, types: tuple[int, int | None]) -> Extents:
        """See ``extents.Measure``."""
        dtype, arithmetic = types
        fields = None
        if arithmetic is not None and got.size >= LEAST_ELEMENTS:
            fields = self._fields(got, reference, own, (dtype, arithmetic))
        if fields is None or arithmetic is None:
            return extents(on_host(got), on_host(reference), own, types)
        blocks = parts(got.size)
        known, looked = read(fields, [part.stop - part.start for part in blocks], TABLE[arithmetic])
        for place in looked:
            part = blocks[place]
            known.put(place, Extent.of(got[part], reference[part], None if own is None else own[part], types))
        return known

    def _fields(self, got: Values, reference: Values, own: Array | None, types: tuple[int, int]) -> Array | None:
        """What the kernel says of each block; None where the GPU has no memory for it, or does not answer: that is no
        fault of the kernel that is compared, whose results are here."""
        cupy = import_cupy()
        try:
            return np.concatenate([*self._in_turns(got, reference, own, types)])
        except (MemoryError, KernelError, cupy.cuda.driver.CUDADriverError, cupy.cuda.runtime.CUDARuntimeError):
            return None

    def _in_turns(self, got: Values, reference: Values, own: Array | None, types: tuple[int, int]) -> Iterator[Array]:
        """The same of as many blocks as are on the GPU together.

        Raises:
            KernelError: the kernel does not compile, or the GPU does not take it.
        """
        cupy = import_cupy()
        kernel = self._kernels()[entry(types[0])]
        with cupy.cuda.Device(self._device):
            for start in range(0, got.size, MOST_ELEMENTS):
                part = slice(start, min(start + MOST_ELEMENTS, got.size))
                blocks = -(-(part.stop - start) // BLOCK)
                result = cupy.empty((blocks, len(FIELDS)), np.float64)
                mine, theirs = _bytes(got, part), None if own is None else _bytes(own, part)
                exact = _bytes(reference, part, np.dtype(np.float64))
                kernel((blocks,), (THREADS,), (
                    mine, exact, mine if theirs is None else theirs, np.int32(theirs is not None),
                    np.int64(part.stop - start), np.int32(BLOCK), *scalars(types), result))
                yield cupy.asnumpy(result)

    def compile(self) -> bytes:
        """The kernels' image.

        Raises:
            KernelError: the text does not compile.
        """
        return default_compiler().image(source(), self._architecture)

    def _kernels(self) -> dict[str, cupy.RawKernel]:
        image = b"" if self._loaded else self.compile()
        with TURN:
            if not self._loaded:
                self._loaded = load_kernels(image, source().kernels, self._device)
            return self._loaded


def _bytes(values: Values, part: slice, dtype: np.dtype[Any] | None = None) -> cupy.ndarray:
    """Elements on the GPU, where they may be already, as bytes: CuPy has no bfloat16.  ``dtype``: what those of the
    host are made of first."""
    cupy = import_cupy()
    if not isinstance(values, DeviceArray):
        return cupy.asarray(values[part].astype(dtype or values.dtype, copy=False).view(np.uint8))
    width = values.dtype.itemsize
    pointer = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(values.address, values.size * width, values), 0)
    return cupy.ndarray(values.size * width, np.uint8, pointer)[width * part.start:width * part.stop]
