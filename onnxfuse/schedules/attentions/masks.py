"""Masks and biases of scores that come while these are multiplied.

One along keys and queries is copied tile by tile, by a tensor map as keys are or by each warp.  Threads that read it
where its scores are read eight rows at once, 16 bytes of each: the cache takes a turn for every row, as many as a
score's power takes.  A tile in shared memory is read as products read theirs, four times eight by eight elements an
instruction, which leaves each thread with those that belong to its scores.  One that is the same for all queries, as
padding is, is read a tile ahead: by each thread, or once for all into shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onnxfuse.graph.dims import Dim
from onnxfuse.ir.scalars import TYPES
from onnxfuse.lowering.launch import expression
from onnxfuse.lowering.pull import Load
from onnxfuse.schedules.attentions.parts import AttentionParts
from onnxfuse.schedules.attentions.shape import GROUP_ROWS
from onnxfuse.schedules.kernel import vector_loads, walk
from onnxfuse.schedules.products.maps import FIRST, Mapped, is_of_batch, laid, steps_of

KEYS, QUERIES = "@k", "@m"


@dataclass(frozen=True)
class MaskTiles:
    """A mask that lies along keys and queries.

    Attributes:
        load: its element at a score.
        operand: the tensor; its second axis is that of queries.
        period: after so many of them it begins anew; None where they are all in a row.
    """

    load: Load
    operand: Mapped
    period: Dim | None

    def guards(self, symbols: Mapping[str, str]) -> tuple[str, ...]:
        """Under which it is copied, and no tile's queries begin anew."""
        anew = self.period is not None and self.period.multiple_of() % GROUP_ROWS
        return (*self.operand.guards(symbols),
                *((f"{expression(self.period, symbols)} {GROUP_ROWS} % 0 ==",) if anew and self.period else ()))


def mask_of(parts: AttentionParts, planned: Mapping[str, int]) -> MaskTiles | None:
    """The first mask of scores that can be copied so, at the planned sizes too; None where there is none.

    What is added in two places is read by threads in the second.
    """
    found = (_tiles(parts, load, planned) for load in _loads(parts))
    return next((tiles for tiles in found if tiles is not None), None)


def _tiles(parts: AttentionParts, load: Load, planned: Mapping[str, int]) -> MaskTiles | None:
    """A load as such a mask; None where it is of another type, on conditions, or lies otherwise."""
    puller, space = parts.puller, parts.puller.space
    steps = steps_of(puller, load.offset) if load.dtype == parts.operand else None
    if steps is None or FIRST in steps:
        return None
    digits = {name: digit for name in steps if (digit := space.variable(name)) is not None and digit.base == QUERIES}
    rows = [name for name, digit in digits.items() if digit.step == 1]
    operand = laid(puller, load, (KEYS, rows[0]), beside=digits) if len(rows) == 1 else None
    if operand is None or not operand.divides(planned):
        return None
    period = None if digits[rows[0]].top else digits[rows[0]].size
    if period is None and len(digits) > 1:
        return None  # something else changes with queries that are all in a row
    whole = period is None or not period.symbols <= planned.keys() or period.evaluate(planned) % GROUP_ROWS == 0
    return MaskTiles(load, operand, period) if whole else None


def mask_of_keys(parts: AttentionParts) -> Load | None:
    """The first mask of scores that is the same for all queries, and lies so that a thread reads that of two neighbours
    at once; None where there is none."""
    puller, along = parts.puller, parts.along_keys
    assert along is not None

    def is_such(load: Load) -> bool:
        steps = steps_of(puller, load.offset) if TYPES[load.dtype].is_floating and not load.conditions else None
        return steps is not None and bool(vector_loads([load], along)) and all(
            name in (KEYS, FIRST) or is_of_batch(puller, name) for name in steps)

    return next(filter(is_such, _loads(parts)), None)


def _loads(parts: AttentionParts) -> list[Load]:
    """What is read where scores are made, in no particular order, each once."""
    scores = [parts.softmax.score, *([] if parts.visible is None else [parts.visible.score])]
    return list(dict.fromkeys(each for each in walk(scores) if isinstance(each, Load)))
