"""How far a model's outputs may be from another model's: what a user asks for, and what is no sign of a fault."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from onnxfuse.graph import Graph
from onnxfuse.rewriting import FusedNode
from onnxfuse.verifying.results import OutputDifference

Array = NDArray[Any]

TOLERANCES = {TensorProto.BFLOAT16: 5e-2, TensorProto.FLOAT16: 1e-2, TensorProto.FLOAT: 1e-3, TensorProto.DOUBLE: 1e-9}
"""Error of a model's output, over its largest magnitude, that is no sign of a fault when kernels run; by the narrowest
float type in the model.  Whole models amplify roundings: these are wide, and nodes are verified on their own first."""


def default_tolerance(graph: Graph, fused: Iterable[FusedNode] = ()) -> float:
    """The tolerance for a model, by the narrowest float type of its values; operands of products that its fused nodes
    round to TF32 have float16's digits."""
    kinds = {value.dtype for part in graph.walk() for value in part.values.values()}
    if any(node.rounds for node in fused):
        kinds.add(TensorProto.FLOAT16)
    return next((limit for kind, limit in TOLERANCES.items() if kind in kinds), 0.0)


@dataclass(frozen=True)
class Closeness:
    """An element may be off by ``atol + rtol * |original| + share * scale``, where the scale is the largest magnitude
    of its output; what is not finite must be the same."""

    rtol: float = 0.0
    atol: float = 0.0
    share: float = 0.0

    def __str__(self) -> str:
        if self == EXACT:
            return "bit for bit"
        if self.share:
            return f"within {self.share:g} of the output's largest magnitude"
        parts = {f"{self.atol:g}": self.atol, f"{self.rtol:g} * |original|": self.rtol}
        return f"within {' + '.join(text for text, number in parts.items() if number)}"


EXACT = Closeness()
"""Nothing may be off."""


def difference(name: str, got: Any, wanted: Any, closeness: Closeness = EXACT) -> OutputDifference | None:
    """How one output differs; None where every bit of it is the same.  Sequences, maps and text are compared by
    ``repr``."""
    if not isinstance(got, np.ndarray) or not isinstance(wanted, np.ndarray) or object in (got.dtype, wanted.dtype):
        same = repr(got) == repr(wanted)
        return None if same else OutputDifference(name, 1, float("inf"), beyond=1)
    if got.dtype == wanted.dtype and got.shape == wanted.shape and got.tobytes() == wanted.tobytes():
        return None
    return measured(name, got, wanted, closeness)


def measured(name: str, got: Array, wanted: Array, closeness: Closeness = EXACT) -> OutputDifference:
    """How far an array is from another, and where it is farthest.  Zeros of either sign are one number here."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        count = max(got.size, wanted.size)
        return OutputDifference(name, count, float("inf"), max(count, 1), got=_kind(got), wanted=_kind(wanted))
    if not got.size:
        return OutputDifference(name, 0, 0.0)
    wide = np.complex128 if got.dtype.kind == "c" else np.float64
    a, b = np.atleast_1d(got).astype(wide), np.atleast_1d(wanted).astype(wide)
    differs = np.atleast_1d(got != wanted) & ~(np.isnan(a) & np.isnan(b))
    finite = np.isfinite(a) & np.isfinite(b)
    largest = float(np.max(np.abs(b), where=finite, initial=0.0))
    # Outputs may have any size: what is not needed any more is written over.
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(np.subtract(a, b, out=a))
    error[~finite] = np.inf
    # Integers of 64 bits may differ where their float64 do not.
    np.maximum(error, np.finfo(np.float64).tiny, out=error)
    error[~differs] = 0.0
    limit: Array | float = closeness.atol + closeness.share * largest
    if closeness.rtol:
        limit = limit + closeness.rtol * np.where(finite, np.abs(b), 0.0)
    place = np.unravel_index(int(error.argmax()), error.shape)
    elements = int(np.count_nonzero(differs))
    counted = got.dtype.kind in "biu"
    share = elements / got.size if counted else float(error.max()) / (largest or 1.0)
    where = tuple(int(axis) for axis in place) if got.ndim else ()
    return OutputDifference(name, elements, share, int(np.count_nonzero(error > limit)), where,
                            str(np.atleast_1d(got)[place]), str(np.atleast_1d(wanted)[place]))


def _kind(array: Array) -> str:
    return f"{array.dtype} {list(array.shape)}"
