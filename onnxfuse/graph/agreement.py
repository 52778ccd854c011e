"""Sizes that operators ask to agree: which do not at given numbers, and which numbers would.

A position table of 77 rows fits sequences of 77; a Gemm of 25,088 columns behind a Flatten fits images of one size; a
mask over past and present is as long as both.  Where nobody gave a size, one is assumed at which they agree.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from onnxfuse.graph.dims import Dim
from onnxfuse.graph.model import Demand

MOST = 2048
"""The largest size that is looked for; a size that follows from others may be any."""

_WORDS = {
    "equal": "needs {left} and {right} to be equal", "broadcast": "joins axes of {left} and {right}",
    "multiple": "arranges {left} elements by {right}", "within": "looks up {left} rows in a table of {right}",
    "room": "has room for {right} rows, and {left} are asked for",
}

_AT_MOST = ("within", "room")
"""Kinds of demands whose left size may be less."""


def met(demand: Demand, sizes: Mapping[str, int]) -> bool | None:
    """Whether a demand is met at these sizes; None where that is not known."""
    left, right = evaluated(demand.left, sizes), evaluated(demand.right, sizes)
    if left is None or right is None:
        return None
    if demand.kind == "multiple":
        return None if right == 0 else left % right == 0
    if demand.kind in _AT_MOST:
        return left <= right
    return left == right or (demand.kind == "broadcast" and 1 in (left, right))


def unmet(demands: Collection[Demand], sizes: Mapping[str, int]) -> list[Demand]:
    """The demands that are not met."""
    return [each for each in demands if met(each, sizes) is False]


def agreed(demands: Sequence[Demand], sizes: Mapping[str, int], free: Collection[str]) -> dict[str, int]:
    """Other numbers for some of the ``free`` symbols, with which fewer demands are not met; {} where there are none.
    Every round mends one at least, so that there are no more rounds than demands."""
    changed: dict[str, int] = {}
    bad = unmet(demands, sizes)
    while bad:
        better = next((found for each in bad if (found := mended(each, demands, {**sizes, **changed}, free))), None)
        if better is None:
            break
        changed.update(better)
        bad = unmet(demands, {**sizes, **changed})
    return changed


def mended(
    wanted: Demand, demands: Sequence[Demand], sizes: Mapping[str, int], free: Collection[str]
) -> dict[str, int] | None:
    """The nearest numbers for one symbol, or one number for all of them, with which a demand is met and fewer of all
    are not."""
    names = [name for name in sizes if name in wanted.left.symbols | wanted.right.symbols and name in free]
    names.sort(key=lambda name: -sizes[name])  # what is 1 is a batch, which seldom has to be another
    before = len(unmet(demands, sizes))
    for exactly in (True, False):
        for chosen in [[name] for name in names] + ([names] if len(names) > 1 else []):
            for number in _numbers(wanted, sizes, chosen):
                trial = {**sizes, **dict.fromkeys(chosen, number)}
                if not met(wanted, trial) or (exactly and not _exactly(wanted, trial)):
                    continue
                if len(unmet(demands, trial)) < before:
                    return dict.fromkeys(chosen, number)
                break
    return None


def _exactly(demand: Demand, sizes: Mapping[str, int]) -> bool:
    """Whether a demand is met without an axis of 1 that is spread."""
    return demand.kind in ("multiple", *_AT_MOST) or evaluated(demand.left, sizes) == evaluated(demand.right, sizes)


def _numbers(demand: Demand, sizes: Mapping[str, int], names: Sequence[str]) -> Iterator[int]:
    """Numbers to try for symbols: what solves the demand where its sides grow evenly, then what is nearest."""
    now = max(sizes[name] for name in names)
    if demand.kind in ("equal", "broadcast"):
        zero, one = (_difference(demand, {**sizes, **dict.fromkeys(names, number)}) for number in (0, 1))
        if zero is not None and one is not None and one != zero and zero % (one - zero) == 0:
            solution = zero // (zero - one)
            if solution > 0:
                yield solution
    yield from sorted(range(1, MOST + 1), key=lambda number: (max(number, now) / min(number, now or 1), number))


def _difference(demand: Demand, sizes: Mapping[str, int]) -> int | None:
    left, right = evaluated(demand.left, sizes), evaluated(demand.right, sizes)
    return None if left is None or right is None else left - right


def told(demand: Demand, sizes: Mapping[str, int]) -> str:
    """What a demand that is not met comes to, as a sentence without its end."""
    left, right = (
        str(size) if size.value is not None else f"{evaluated(size, sizes)} ({size})"
        for size in (demand.left, demand.right)
    )
    return f"'{demand.node}' " + _WORDS[demand.kind].format(left=left, right=right)


def evaluated(size: Dim, sizes: Mapping[str, int]) -> int | None:
    """A size's number, None where it has none."""
    try:
        return size.evaluate(sizes)
    except (KeyError, ZeroDivisionError):
        return None
