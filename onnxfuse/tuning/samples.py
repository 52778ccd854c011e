"""Results of ways to run a kernel beside each other, by a sample of their elements where there are many.

What is taken in the end is verified in all elements; here a wrong way is only to be known as one, in milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import helper

from onnxfuse.measuring.machine import Memory
from onnxfuse.verifying.blocks import pieces
from onnxfuse.verifying.comparison import Leeway, compared
from onnxfuse.verifying.tolerances import TABLE

Array = NDArray[Any]

QUANTISED = 0.02
"""Share of a quantised result's elements that may be a step away: those that lie so near to the middle between two
steps that the order of a sum decides, or a probability's rounding to 16 bits."""


def sampled(value: Any, memory: Memory) -> Array | None:
    """What is compared of an ``OrtValue`` in ``memory``, in one row; None where it is no tensor of numbers."""
    if not value.is_tensor() or value.data_type() == "tensor(string)":
        return None
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(value.element_type()))
    size, address = dtype.itemsize, value.data_ptr()
    read = [memory.read(address + size * start, size * (end - start))
            for start, end in pieces(int(np.prod(value.shape(), dtype=np.int64)))]
    return np.frombuffer(b"".join(read), dtype)


def disagreement(
    got: Mapping[str, Array], right: Mapping[str, Array], length: int, share: float = 0.0, quantised: bool = False
) -> str:
    """How far a candidate's results are from another schedule's of the same kernel, "" where they agree.

    Both add in float32 and differ in the order at most: ``verifying.tolerances`` says by how much.

    Args:
        length: of the longest sum on the way to them.
        share: of the largest result that is allowed beyond that.
        quantised: whether results are, or were, rounded to steps.
    """
    for name, wanted in right.items():
        array = got.get(name)
        if array is None or array.shape != wanted.shape or array.dtype != wanted.dtype:
            return f"output {name} has another shape or type"
        if array.tobytes() == wanted.tobytes() or (share and _is_near(array, wanted, share)):
            continue
        if quantised:
            array = _less_steps(array, wanted)
        kind = int(helper.np_dtype_to_tensor_dtype(wanted.dtype))
        reference = wanted.astype(np.float64) if kind in TABLE else wanted
        comparison = compared(array, [reference], None, (kind, kind if kind in TABLE else None), Leeway(length))
        if not comparison.passed:
            return (f"output {name} is wrong in {comparison.wrong} of {comparison.count} elements; "
                    f"{comparison.got} instead of {comparison.wanted}")
    return ""


def _less_steps(array: Array, wanted: Array) -> Array:
    """An array with what is wanted in place of what is one step away, where that is few elements."""
    one, other = array.astype(np.float64), wanted.astype(np.float64)
    steps = np.diff(np.unique(other[np.isfinite(other)])).min(initial=np.inf)
    away = (one != other) & (np.abs(one - other) < 1.5 * steps)
    return np.where(away, wanted, array) if 0 < away.sum() <= max(QUANTISED * away.size, 1) else array


def _is_near(array: Array, wanted: Array, share: float) -> bool:
    """Whether arrays differ by no more than a share of the largest number, and are no numbers at the same places."""
    one, other = array.astype(np.float64), wanted.astype(np.float64)
    largest = float(np.abs(other[np.isfinite(other)]).max(initial=0.0))
    return bool(np.allclose(one, other, rtol=0.0, atol=share * largest, equal_nan=True))
