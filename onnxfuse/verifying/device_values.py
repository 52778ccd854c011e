"""ONNX Runtime's tensors on a GPU, filled without Python's lock: its own binding keeps it while it copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from onnxfuse.measuring import driver

Array = NDArray[Any]

HOST = "cpu"
"""Host memory, in ONNX Runtime's words."""


def copied(array: Array, where: str, device: int) -> Any:
    """A tensor with the numbers of an array in one piece; in host memory the array itself, which has to stay.

    Args:
        where: it is to lie, in ONNX Runtime's words; device: the GPU's number.

    Raises:
        KernelError: the GPU does not answer.
    """
    if where == HOST:
        return onnxruntime.OrtValue.ortvalue_from_numpy(array, where, device)
    value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(array.shape, array.dtype.type, where, device)
    if array.size:
        driver.device(device).upload(value.data_ptr(), int(array.ctypes.data), array.nbytes)
    return value


def filled(shape: Sequence[int], dtype: np.dtype[Any], byte: int, device: int) -> Any:
    """A tensor on a GPU, all of whose bytes are one.

    Raises:
        KernelError: the GPU does not answer.
    """
    value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, dtype.type, "cuda", device)
    driver.device(device).fill(value.data_ptr(), byte, int(np.prod(shape)) * dtype.itemsize)
    return value
