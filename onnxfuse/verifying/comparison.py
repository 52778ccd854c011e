"""Whether a kernel's output is as near to its reference as ``tolerances`` says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxfuse.verifying.blocks import parts
from onnxfuse.verifying.device_arrays import Values, on_host
from onnxfuse.verifying.extents import Extents, Measure, extents
from onnxfuse.verifying.tolerances import (
    CANCELS,
    DIGITS,
    EXACT,
    LARGEST,
    NEAR,
    TABLE,
    own_limit,
    reduction_factor,
)

Array = NDArray[Any]


@dataclass(frozen=True)
class Comparison:
    """One output for one set of inputs.

    Attributes:
        error: the largest error; limit: what it may be at most there; both as shares of the output's largest
            magnitude.  For integers and booleans: the share of wrong elements, and 0.
        ratio: the worst of error over limit, the root mean square's too; at most 1 passes.
        wrong: number of elements outside their limit; count: of all.
        where: the worst element; got, wanted: there.
        steady: False where elements passed because they hang on a rounded number.
    """

    error: float
    limit: float
    ratio: float
    wrong: int
    count: int
    where: tuple[int, ...] = ()
    got: str = ""
    wanted: str = ""
    steady: bool = True

    @property
    def passed(self) -> bool:
        """Whether the output is within its limits."""
        return self.wrong == 0 and self.ratio <= 1.0


def near(single: Array, exact: Array, own: Array) -> float:
    """The relative error that passes where the original overflowed.

    Args:
        single: the body's result in float32; exact: in float64; own: the original's.
    """
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        share = np.abs(single.astype(np.float64) - exact) / np.abs(exact)
    counts = ~np.isfinite(own.astype(np.float64)) & np.isfinite(share)
    return max(NEAR, CANCELS * float(np.max(share, where=counts, initial=0.0)))


def replace_unowed(got: Array, single: Array, exact: Array, own: Array) -> Array:
    """A kernel's result with the reference's numbers where nothing is owed.

    That is where the original overflows to no number at all, float32 does too, and float64 alone knows better, as of
    the norm of a row of the largest numbers: ONNX Runtime's own kernels give NaN or 0, by the order they sum in.  Where
    float32 is infinite, as of a quotient whose parts only the original's narrow type has both as infinite, the kernel
    may be that too, or no number.

    Args:
        got, single, exact, own: see ``compared`` and ``near``.
    """
    ours, alone = got.astype(np.float64), single.astype(np.float64)
    lost = np.isnan(alone) | (np.isinf(alone) & ((ours == alone) | np.isnan(ours)))
    unowed = np.isnan(own.astype(np.float64)) & lost & np.isfinite(exact)
    with np.errstate(over="ignore"):
        result: Array = np.where(unowed, exact.astype(got.dtype), got)
    return result


@dataclass(frozen=True)
class Leeway:
    """What lets an output be farther off than one operator's would be.

    Attributes:
        length: of the longest sum on the way to it.
        nearness: the relative error that passes where the original overflowed and the reference did not.
    """

    length: int = 1
    nearness: float = NEAR


def compared(
    got: Values, wanted: Sequence[Values], own: Array | None, types: tuple[int, int | None], leeway: Leeway = Leeway(),
    measure: Measure = extents,
) -> Comparison:
    """Compare one output of a kernel.

    Args:
        got: the kernel's, in its own type; it may be on a GPU.
        wanted: the reference (float64, float32, integer or boolean); then, where the body decides by computed
            numbers, references with these numbers a little larger and smaller.  They may be on a GPU.
        own: the original's own result in the output's type, or None where it is not known.
        types: the output's element type, and the narrowest float type computed on the way to it, None where nothing
            is.
        measure: what goes through all elements once.
    """
    reference, (dtype, _) = wanted[0], types
    if got.shape != reference.shape:
        return Comparison(float("inf"), 0.0, float("inf"), max(got.size, 1), got.size,
                         got=f"shape {got.shape}", wanted=f"shape {reference.shape}")
    if not got.size:
        return Comparison(0.0, 0.0, 0.0, 0, 0)
    if not got.ndim:
        # NumPy makes plain numbers of what it computes from arrays without axes.
        rows = [array.reshape(1) for array in wanted]
        ours = None if own is None else own.reshape(1)
        return replace(compared(got.reshape(1), rows, ours, types, leeway), where=())
    if dtype not in TABLE:
        # The original's own answer is right too: it may have rounded a quotient on the other side of a tie.
        return _exact(on_host(got), [on_host(each) for each in (*wanted, *([] if own is None else [own]))])
    return _close(got, wanted, own, types, leeway, measure)


def _exact(got: Array, wanted: Sequence[Array]) -> Comparison:
    """Integers and booleans."""
    bytes_got = got.view(np.uint8) if got.dtype == np.bool_ else got
    wrong = np.ones(got.shape, np.bool_)
    steady = True
    for number, reference in enumerate(wanted):
        if number and wrong.any():
            steady = False
        wrong &= bytes_got != reference.astype(got.dtype).view(bytes_got.dtype)
    count = int(wrong.sum())
    place = np.unravel_index(int(wrong.argmax()), wrong.shape) if count else ()
    return Comparison(count / max(got.size, 1), 0.0, float("inf") if count else 0.0, count, got.size,
                     tuple(int(axis) for axis in place), _text(got, place) if count else "",
                     _text(wanted[0], place) if count else "", steady)


def _close(
    got: Values, wanted: Sequence[Values], own: Array | None, types: tuple[int, int | None], leeway: Leeway,
    measure: Measure,
) -> Comparison:
    """Numbers of float types, in arrays with axes; as ``compared``."""
    (_, arithmetic), shape = types, got.shape
    limits = EXACT if arithmetic is None else TABLE[arithmetic]
    got, wanted = got.reshape(-1), [array.reshape(-1) for array in wanted]
    own = None if own is None else own.reshape(-1)
    reference = wanted[0]
    blocks = measure(got, reference, own, types)
    whole = blocks.joined()
    floor = limits.scale * reduction_factor(leeway.length) * whole.scale
    mine = max(floor, limits.own * whole.own)
    for sides in range(1, len(wanted) + 1):
        worst = _farthest(got, wanted[:sides], own, types, (mine, leeway.nearness), blocks)
        if not worst.wrong:
            break
    ratio, steady = worst.ratio, sides == 1
    if not worst.wrong and steady:
        ratio = max(ratio, whole.spread(floor, limits))
    place = np.unravel_index(worst.place, shape)
    share = 1 / whole.scale if whole.scale else 1.0
    theirs, exact = (f"{number:.9g}" for number in worst.numbers)
    return Comparison(
        whole.error * share, whole.error * share / ratio if 0 < ratio < np.inf else mine * share, ratio, worst.wrong,
        got.size, tuple(int(axis) for axis in place), theirs, exact, steady,
    )


LOOKED = 1
"""Blocks without a wrong element in which the worst element is looked for: results rounded to 16 bits are half a unit
off somewhere in almost every block, and each would be copied from the GPU for a second look."""


@dataclass(frozen=True)
class _Farthest:
    """Of some elements: the largest error over limit and the first place that has it, how many are wrong, and the
    kernel's and the reference's numbers at the place."""

    ratio: float
    place: int
    wrong: int
    numbers: tuple[float, float] = (0.0, 0.0)


def _farthest(got: Values, wanted: Sequence[Values], own: Array | None, types: tuple[int, int | None],
              common: tuple[float, float], blocks: Extents) -> _Farthest:
    """The same of whole arrays without axes; an element is compared by the one of ``wanted`` that it is nearest to.

    Args:
        blocks: what is known of each block of ``over_blocks``.  One in which no error may be as large a part of its
            limit as another's is, is not looked at again; nor, where none is wrong, are more than ``LOOKED``, of which
            one has the worst or nearly so.
    """
    bounds, places = blocks.bounds(common[0]), parts(got.size)
    worst, wrong = _Farthest(-1.0, 0, 0), 0
    for looked, block in enumerate(np.argsort(-bounds, kind="stable").tolist()):
        bound, part = float(bounds[block]), places[block]
        if bound < min(worst.ratio, 1.0) or (bound <= 1.0 and looked >= LOOKED):
            break
        wide = got[part].astype(np.float64)
        other = None if own is None else own[part].astype(np.float64)
        exact = wanted[0][part].astype(np.float64)
        sides = [_compare(wide, exact if side is wanted[0] else side[part].astype(np.float64), other, types, common)
                 for side in wanted]
        best = sides[0] if len(sides) == 1 else np.minimum.reduce(sides)
        place = int(best.argmax())
        found = _Farthest(float(best[place]), part.start + place, 0, (float(wide[place]), float(exact[place])))
        if (found.ratio, -found.place) > (worst.ratio, -worst.place):
            worst = found
        wrong += int(np.count_nonzero(best > 1))
    return replace(worst, wrong=wrong)


def _compare(
    wide: Array, exact: Array, own: Array | None, types: tuple[int, int | None], common: tuple[float, float]
) -> Array:
    """Error over limit of each element, all in float64; ``common``: the limit that all have in common, and the relative
    one of those that only the original has no number for."""
    dtype, (mine, nearness) = types[0], common
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        error = np.abs(wide - exact)
        allowed = own_limit(exact, types)
        ratio: Array = error / (mine if allowed is None else np.maximum(allowed, mine))
        ratio[error == 0] = 0.0
    finite = np.isfinite(error)
    if own is not None:
        finite &= np.isfinite(own)
    if not finite.all():
        rest = ~finite
        theirs = None if own is None else own[rest]
        ratio[rest] = _unfinished(wide[rest], exact[rest], theirs, ratio[rest], (dtype, mine, nearness))
    return ratio


def _unfinished(
    wide: Array, exact: Array, own: Array | None, ratio: Array, limit: tuple[int, float, float]
) -> Array:
    """Error over limit of elements of which the kernel's, the reference's or the original's number is not finite.

    ``limit``: the output's type, the limit that all elements have in common, and the relative one where the original's
    alone is not finite.
    """
    dtype, mine, nearness = limit
    finite = np.isfinite(wide) & np.isfinite(exact)
    # Infinite where the reference rounds to that, or comes as near to it as the common limit allows.
    brink = LARGEST[dtype] * (1 + 2.0 ** -(DIGITS[dtype] + 1)) - mine
    agrees = (np.isinf(wide) & (np.sign(wide) == np.sign(exact)) & (np.abs(exact) >= brink)) | (
        np.isnan(wide) & np.isnan(exact))
    if own is not None:
        agrees |= ~np.isfinite(own) & ((wide == own) | (np.isnan(wide) & np.isnan(own)))
        # Where the original has no number at all, a near one is better than what it gives.
        with np.errstate(invalid="ignore", over="ignore"):
            agrees |= ~np.isfinite(own) & finite & (np.abs(wide - exact) <= nearness * np.abs(exact))
    result: Array = np.where(agrees, 0.0, np.where(finite, ratio, np.inf))
    return result


def _text(values: Array, place: tuple[Any, ...]) -> str:
    return str(values[place]) if values.dtype.kind in "iub" else f"{float(values[place]):.9g}"
