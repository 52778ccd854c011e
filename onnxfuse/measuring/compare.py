"""How far the outputs of one model are from another's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxfuse.measuring.results import OutputError


def compare(original: Mapping[str, NDArray[Any]], fused: Mapping[str, NDArray[Any]]) -> tuple[OutputError, ...]:
    """The error of each output that the original has; see ``OutputError``."""
    return tuple(
        OutputError(name, _error(array, fused[name]) if name in fused else float("inf"))
        for name, array in original.items()
    )


def _error(wanted: NDArray[Any], found: NDArray[Any]) -> float:
    if wanted.shape != found.shape or wanted.dtype != found.dtype:
        return float("inf")
    # Extension types (bfloat16, float8) have no kind of their own; everything that is not complex fits in float64.
    wide = np.complex128 if wanted.dtype.kind == "c" else np.float64
    a, b = wanted.astype(wide), found.astype(wide)
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)) or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return float("inf")
    a, b = a[finite], b[finite]
    if a.size == 0:
        return 0.0
    difference, scale = float(np.abs(a - b).max()), float(np.abs(a).max())
    return difference / scale if scale else (0.0 if difference == 0 else float("inf"))
