"""Inputs that a fused node is verified on: those of a run, and edges made of them."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from onnxfuse.verifying.blocks import over_blocks

Array = NDArray[Any]

LARGE, TINY = 2.0**9, 2.0**-12
"""Largest magnitude that the floats are scaled to: squares of the first overflow float16, its exponential is still a
number in float64; squares of the second vanish in float16."""

_HALVES = np.arange(1 << 16).astype(np.uint16).view(np.float16)
"""All numbers of float16, in the order of their bits."""
_ENDLESS_HALF = 0x7C00
"""Infinity's bits; those of finite numbers are less, but for the sign."""
_SIGN_HALF = 0x8000

MASKED = 3
"""Tensors of which rows are masked, one at a time, at most."""


@dataclass(frozen=True)
class Feeds:
    """Arrays by formal name (``h0`` for a host input, ``x0`` for a tensor), and what they are called in the report.

    Attributes:
        even: whether they differ from others of the same shapes everywhere, so that a sample of what comes of them
            shows what all would.
        finite: False where some are infinite, or no numbers, to show what comes of them.
    """

    label: str
    arrays: Mapping[str, Array]
    even: bool = False
    finite: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())


def edges(feeds: Mapping[str, Array], masked: Container[str], weights: Collection[str] = ()) -> Iterator[Feeds]:
    """Edge inputs of the same shapes and types as those of a run; the model's ``weights`` among them stay what they are
    in every run.

    - zeros: every float is zero; large, tiny: floats are scaled to 2^9 and 2^-12 at most;
    - negative: every float changes its sign;
    - false, true: every boolean is that, floats stay;
    - masked: two rows of one float tensor are minus infinity and the type's lowest number, tensor by tensor of those
      that ``masked`` names, as scores and their masks are;
    - not-a-number: one element of each float tensor is that, another is infinite.

    Integers stay what they were: they may be indices.
    """
    tensors = {name: array for name, array in feeds.items() if name.startswith("x") and name not in weights}
    floats = {name: array for name, array in tensors.items() if is_float(array)}
    truths = {name: array for name, array in tensors.items() if array.dtype == np.bool_}

    def changed(label: str, arrays: Mapping[str, Array], finite: bool = True) -> Feeds:
        return Feeds(label, {**feeds, **arrays}, finite, finite)

    if floats:
        yield changed("zeros", {name: np.zeros_like(array) for name, array in floats.items()})
        yield changed("large", {name: _scaled(array, LARGE) for name, array in floats.items()})
        yield changed("tiny", {name: _scaled(array, TINY) for name, array in floats.items()})
        yield changed("negative", {name: np.negative(array) for name, array in floats.items()})
    for label, value in (("false", False), ("true", True)):
        if truths:
            yield changed(label, {name: np.full_like(array, value) for name, array in truths.items()})
    wide = [name for name, array in floats.items()
            if name in masked and array.ndim > 1 and array.size and array.shape[-1] > 1]
    for name in sorted(wide, key=lambda name: -floats[name].size)[:MASKED]:
        yield changed(f"masked {name}", {name: _masked(floats[name])}, finite=False)
    if any(array.size for array in floats.values()):
        yield changed("not-a-number", {name: _poisoned(array) for name, array in floats.items()}, finite=False)


def is_float(array: Array) -> bool:
    """Whether the elements are floats, bfloat16 too."""
    return bool(array.dtype.kind == "f" or array.dtype == ml_dtypes.bfloat16)


def _scaled(array: Array, to: float) -> Array:
    """The floats with a largest magnitude of ``to``; what is not finite becomes that."""
    flat, result = array.reshape(-1), np.empty(array.shape, array.dtype)
    target = result.reshape(-1)
    if array.dtype == np.float16 and flat.size > _HALVES.size:
        _scale_halves(flat.view(np.uint16), to, target)
        return result
    most = max(over_blocks(lambda part: _largest(flat[part]), flat.size), default=0.0)

    def scale(part: slice) -> None:
        target[part] = _times(flat[part], to / most if most else 1.0, to)

    over_blocks(scale, flat.size)
    return result


def _scale_halves(bits: Array, to: float, target: Array) -> None:
    """The same of float16, given as bits: each number that there is once.  NumPy takes long to round to float16, and
    ten times as long below its normal numbers.  Without their signs bits are in the order of their numbers."""
    # No temporaries, so no blocks; quicker so: no index is out of range.
    np.take(_scaled_halves(_largest_half(bits), to), bits, out=target, mode="clip")


@lru_cache(maxsize=64)  # what one node computes is scaled for each of its readers
def _scaled_halves(largest: int, to: float) -> Array:
    """What each number of float16 becomes where the largest magnitude, given as bits, becomes ``to``."""
    most = float(_HALVES[largest])
    with np.errstate(over="ignore"):  # of numbers that there are none
        return _times(_HALVES, to / most if most else 1.0, to)


def _largest_half(bits: Array) -> int:
    """The same of the largest finite magnitude."""
    # The largest without a sign, and of those with one.
    positive, most = int(bits.view(np.int16).max()), int(bits.max())
    largest = max(positive, most & ~_SIGN_HALF if most & _SIGN_HALF else 0)
    if largest < _ENDLESS_HALF:
        return largest
    return max(over_blocks(lambda part: _largest_finite_half(bits[part]), bits.size))


def _largest_finite_half(bits: Array) -> int:
    sizes = bits & np.uint16(_SIGN_HALF - 1)
    return int(np.max(sizes, where=sizes < _ENDLESS_HALF, initial=0))


def _largest(floats: Array) -> float:
    """The largest finite magnitude."""
    sizes = np.abs(floats.astype(np.float64))
    return float(np.max(sizes, where=np.isfinite(sizes), initial=0.0))


def _times(floats: Array, factor: float, to: float) -> Array:
    """The floats times a factor; what is not finite as ``to``, with its sign."""
    wide = floats.astype(np.float64)
    endless = ~np.isfinite(wide)
    if endless.any():
        wide[endless] = np.copysign(to / factor, wide[endless])
    wide *= factor
    return wide.astype(floats.dtype)


def _masked(array: Array) -> Array:
    result = array.copy()
    rows = result.reshape(-1, array.shape[-1])
    rows[0] = -np.inf
    if len(rows) > 1:
        rows[-1] = ml_dtypes.finfo(array.dtype).min  # type: ignore[no-untyped-call]
    return result


def _poisoned(array: Array) -> Array:
    result = array.copy()
    if result.size:
        flat = result.reshape(-1)
        flat[flat.size // 2] = np.inf
        flat[flat.size // 3] = np.nan
    return result
