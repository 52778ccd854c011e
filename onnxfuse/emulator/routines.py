"""Runs a launch plan's library calls on the CPU, as ``onnxfuse.lowering.routines`` defines them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from onnxfuse.emulator.convolving import axes_of, convolved
from onnxfuse.emulator.errors import EmulatorError
from onnxfuse.emulator.memory import Array, Buffer
from onnxfuse.lowering.routines import (
    ACTIVATIONS,
    AXES,
    CONVOLUTION_ACTIVATIONS,
    MOST_RANK,
    ROUTINES,
    TF32,
    LibraryCall,
)

_TYPES: dict[str, np.dtype[Any]] = {
    "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32),
    TF32: np.dtype(np.float32),
}
_USED = 0x5A
"""What a library leaves in its workspace."""


def call(step: LibraryCall, buffers: Mapping[str, Buffer], sizes: Sequence[int]) -> None:
    """Compute a product, or a convolution: operands as they are stored, sums in float32.

    Raises:
        EmulatorError: the routine does not take these sizes, or an operand has fewer elements than these say.
    """
    size = dict(zip(ROUTINES[step.routine].sizes, sizes, strict=True))
    computed = _convolution if step.routine.startswith("conv") else _product
    with np.errstate(all="ignore"):
        computed(step, {name: buffers[argument] for name, argument in zip(
            ROUTINES[step.routine].operands, step.arguments, strict=False)}, size)
    for workspace in step.workspace:
        ctypes.memset(buffers[workspace].address, _USED, buffers[workspace].size)


def _product(step: LibraryCall, taken: Mapping[str, Buffer], size: Mapping[str, int]) -> None:
    """A batch of products of matrices."""
    if not _fits(step, size):
        return
    a, b = _matrices(step, taken["a"], size, "a", ("m", "k")), _matrices(step, taken["b"], size, "b", ("k", "n"))
    if step.dtype == TF32:
        a, b = _rounded(a), _rounded(b)
    sums = np.matmul(a.astype(np.float32), b.astype(np.float32))
    if "bias" in taken:
        sums += _elements(step, taken["bias"], size["n"])[:size["n"]].astype(np.float32)
    if "d" in taken:
        sums += _matrices(step, taken["d"], size, "c", ("m", "n")).astype(np.float32)
    sums = _activated(sums, ACTIVATIONS[size["activation"]]).astype(_TYPES[step.dtype])
    stride, own = size["stride_c"], size["m"] * size["n"]
    whole = _elements(step, taken["c"], (size["batch"] - 1) * stride + own)
    for place, matrix in enumerate(sums):
        whole[place * stride:place * stride + own] = matrix.reshape(-1)
    taken["c"].write(whole)


def _convolution(step: LibraryCall, taken: Mapping[str, Buffer], size: Mapping[str, int]) -> None:
    """A convolution of images whose channels are last."""
    axes = axes_of(size)
    least = {"channels": 1, **{f"{name}_{axis}": 1 for name in ("size", "taps", "step", "apart") for axis in AXES}}
    most = {"activation": len(CONVOLUTION_ACTIVATIONS) - 1, "algorithm": MOST_RANK}
    if any(not 0 <= number <= most.get(name, number) for name, number in size.items()):
        raise EmulatorError(f"a {step.routine} of the launch plan has sizes that are none: {dict(size)}")
    if 0 in (size["images"], size["results"], *(axis.count for axis in axes)):
        return
    if any(size[name] < number for name, number in least.items()) or not all(axis.is_whole for axis in axes):
        raise EmulatorError(f"a {step.routine} of the launch plan has sizes that are none: {dict(size)}")
    shapes = {
        "x": (size["images"], *(axis.size for axis in axes), size["channels"]),
        "w": (size["results"], *(axis.taps for axis in axes), size["channels"]),
        "y": (size["images"], *(axis.count for axis in axes), size["results"])}
    image, weights = (_tensor(step, taken[name], shapes[name]) for name in "xw")
    image, weights = (_rounded(each) if step.dtype == TF32 else each.astype(np.float32) for each in (image, weights))
    sums = convolved(image, weights, axes)
    if "d" in taken:
        sums += _tensor(step, taken["d"], shapes["y"]).astype(np.float32)
    if "bias" in taken:
        sums += _tensor(step, taken["bias"], (size["results"],)).astype(np.float32)
    activation = CONVOLUTION_ACTIVATIONS[size["activation"]]  # of which ReLU is asked to keep what is no number
    found = (np.maximum(sums, 0) if activation == "relu" else _activated(sums, activation)).astype(_TYPES[step.dtype])
    whole = _elements(step, taken["y"], found.size)
    whole[:found.size] = found.reshape(-1)
    taken["y"].write(whole)


def _tensor(step: LibraryCall, buffer: Buffer, shape: tuple[int, ...]) -> Array:
    """A buffer's first elements, in this shape."""
    count = prod(shape)
    return _elements(step, buffer, count)[:count].reshape(shape)


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
    if activation == "silu":
        x = x / (1 + np.exp(-x))
    if activation == "gelu_tanh":
        inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
        x = np.float32(0.5) * x * (1 + np.tanh(inner))
    return x
