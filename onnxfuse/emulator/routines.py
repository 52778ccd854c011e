"""Runs a launch plan's library calls on the CPU, as ``onnxfuse.lowering.routines`` defines them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from onnxfuse.emulator.errors import EmulatorError
from onnxfuse.emulator.memory import Array, Buffer
from onnxfuse.lowering.routines import ACTIVATIONS, MOST_RANK, ROUTINES, TF32, LibraryCall

_TYPES: dict[str, np.dtype[Any]] = {
    "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32),
    TF32: np.dtype(np.float32),
}
_USED = 0x5A
"""What a library leaves in its workspace."""


def call(step: LibraryCall, buffers: Mapping[str, Buffer], sizes: Sequence[int]) -> None:
    """Compute a product: operands as they are stored, sums in float32.

    Raises:
        EmulatorError: the routine does not take these sizes, or an operand has fewer elements than these say.
    """
    size = dict(zip(ROUTINES[step.routine].sizes, sizes, strict=True))
    if not _fits(step, size):
        return
    taken = dict(zip(ROUTINES[step.routine].operands, step.arguments, strict=False))
    left, right, result = (buffers[taken[name]] for name in ("a", "b", "c"))
    a = _matrices(step, left, size, "a", ("m", "k"))
    b = _matrices(step, right, size, "b", ("k", "n"))
    if step.dtype == TF32:
        a, b = _rounded(a), _rounded(b)
    with np.errstate(all="ignore"):
        sums = np.matmul(a.astype(np.float32), b.astype(np.float32))
        if "bias" in taken:
            sums += _elements(step, buffers[taken["bias"]], size["n"])[:size["n"]].astype(np.float32)
        if "d" in taken:
            sums += _matrices(step, buffers[taken["d"]], size, "c", ("m", "n")).astype(np.float32)
        sums = _activated(sums, ACTIVATIONS[size["activation"]]).astype(_TYPES[step.dtype])
    for workspace in step.workspace:
        ctypes.memset(buffers[workspace].address, _USED, buffers[workspace].size)
    stride, own = size["stride_c"], size["m"] * size["n"]
    whole = _elements(step, result, (size["batch"] - 1) * stride + own)
    for place, matrix in enumerate(sums):
        whole[place * stride:place * stride + own] = matrix.reshape(-1)
    result.write(whole)


def _fits(step: LibraryCall, size: Mapping[str, int]) -> bool:
    """Whether there is something to compute.

    Raises:
        EmulatorError: the sizes are none of the routine's.
    """
    most = {"transpose_a": 1, "transpose_b": 1, "activation": len(ACTIVATIONS) - 1, "algorithm": MOST_RANK}
    if any(not 0 <= number <= most.get(name, number) for name, number in size.items()):
        raise EmulatorError(f"a {step.routine} of the launch plan has sizes that are none: {dict(size)}")
    if 0 in (size["m"], size["n"], size["batch"]):
        return False
    if size["k"] == 0 or (size["batch"] > 1 and size["stride_c"] < size["m"] * size["n"]):
        raise EmulatorError(f"a {step.routine} of the launch plan has sizes that are none: {dict(size)}")
    return True


def _elements(step: LibraryCall, buffer: Buffer, least: int) -> Array:
    """A buffer's elements, so many at least."""
    kind = _TYPES[step.dtype]
    found, rest = divmod(buffer.size, kind.itemsize)
    if found < least or rest:
        raise EmulatorError(f"a {step.routine} of the launch plan takes {least} elements of {step.dtype} of "
                            f"{buffer.name}, which has {buffer.size} bytes")
    return buffer.read(kind, (found,))


def _matrices(
    step: LibraryCall, buffer: Buffer, size: Mapping[str, int], name: str, axes: tuple[str, str]
) -> Array:
    """An operand as a batch of matrices, rows first."""
    rows, columns = (size[axis] for axis in axes)
    stride, transposed = size[f"stride_{name}"], size.get(f"transpose_{name}", 0)
    whole = _elements(step, buffer, (size["batch"] - 1) * stride + rows * columns)
    wide = whole.itemsize
    steps = (wide, rows * wide) if transposed else (columns * wide, wide)
    return np.lib.stride_tricks.as_strided(whole, (size["batch"], rows, columns), (stride * wide, *steps))


def _rounded(x: Array) -> Array:
    """float32 as TF32 holds it: ten bits behind the first, to the nearest."""
    bits = (np.ascontiguousarray(x).view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    out: Array = np.where(np.isfinite(x), bits.view(np.float32), x)
    return out


def _activated(x: Array, activation: str) -> Array:
    if activation == "relu":
        return np.fmax(x, np.float32(0))  # no number becomes 0, as an H100 showed
    if activation == "gelu_tanh":
        inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
        x = np.float32(0.5) * x * (1 + np.tanh(inner))
    return x
