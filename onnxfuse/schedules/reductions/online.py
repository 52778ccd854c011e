"""Softmax in one pass fewer: a row's maximum and the sum of exponentials of differences from it, found together.

While a row is read, the sum is of differences from the maximum so far, and is scaled down where that grows (Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018).  A row that does not stay in registers is read twice
then, not three times.  What the functors of ``cuda/reductions.cuh`` owe at the edges is in docs/edge-values.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from onnxfuse.ir.scalars import TYPES
from onnxfuse.ir.tensors import Map, Reduce, Tensor
from onnxfuse.lowering.pull import Apply, Reduced, Scalar

_MAXIMA = ("max", "max_number")
_SAME = ("narrow", "copy")


@dataclass(frozen=True)
class Online:
    """``largest``: the maximum that a sum of exponentials is taken with; ``functor``: what computes these."""

    largest: Reduced
    functor: str


def online_sums(reductions: Iterable[Reduced]) -> dict[Reduced, Online]:
    """Those that are sums of exp(x - the maximum of x), one for each maximum at most."""
    found: dict[Reduced, Online] = {}
    for reduction in reductions:
        online = _online(reduction)
        if online is not None and all(other.largest is not online.largest for other in found.values()):
            found[reduction] = online
    return found


def _online(reduction: Reduced) -> Online | None:
    power = bare(reduction.element)
    if reduction.kind != "sum" or not isinstance(power, Apply):
        return None
    if power.function == "exp_difference":
        operands, functor = power.operands, "of::ExpDifference"
    elif power.function in ("exp", "quick_exp"):
        difference = bare(power.operands[0])
        if not isinstance(difference, Apply) or difference.function != "sub":
            return None
        quick = power.function == "quick_exp" or (
            TYPES[power.dtype].is_narrow and TYPES[power.operands[0].dtype].is_narrow)
        operands, functor = difference.operands, f"of::Exp<{str(quick).lower()}>"
    else:
        return None
    x, largest = map(bare, operands)
    if isinstance(largest, Reduced) and largest.kind in _MAXIMA and bare(largest.element) is x and (
            TYPES[largest.dtype].compute == TYPES[reduction.dtype].compute):
        return Online(largest, functor)
    return None


def bare(scalar: Scalar, casts: bool = False) -> Scalar:
    """An expression without what only declares another type, or rounds to it where ``casts``."""
    while isinstance(scalar, Apply) and (scalar.function in _SAME or (casts and _is_rounding(scalar))):
        (scalar,) = scalar.operands
    return scalar


def _is_rounding(scalar: Apply) -> bool:
    """Whether it gives a float as another type of float holds it."""
    kinds = TYPES[scalar.dtype], TYPES[scalar.operands[0].dtype]
    return scalar.function in ("cast", "rounded") and all(kind.is_floating for kind in kinds)


def joins_maximum(reduction: Reduce) -> bool:
    """Whether a reduction is such a sum, so that it takes no step of its own; as tensors, before any is pulled."""
    power = _bare_tensor(reduction.operand)
    if reduction.kind != "sum" or not isinstance(power, Map):
        return False
    difference = power if power.function == "exp_difference" else _bare_tensor(power.operands[0])
    if power.function not in ("exp", "quick_exp", "exp_difference") or not isinstance(difference, Map) or (
            difference.function not in ("sub", "exp_difference")):
        return False
    x, largest = map(_bare_tensor, difference.operands)
    return isinstance(largest, Reduce) and largest.kind in _MAXIMA and _bare_tensor(largest.operand) is x


def _bare_tensor(tensor: Tensor) -> Tensor:
    while isinstance(tensor, Map) and tensor.function in _SAME:
        (tensor,) = tensor.operands
    return tensor
