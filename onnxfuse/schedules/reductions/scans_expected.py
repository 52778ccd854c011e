"""How many kernels regions with running totals will take, before these are made.

One, but where several blocks share a row (``scans_split``): then one for each phase, and one more for what the chunks
of a row amount to.
"""

from __future__ import annotations

from collections.abc import Mapping

from onnxfuse.ir.tensors import Reduce, Scan, operands
from onnxfuse.lowering.arrangement import arrangement
from onnxfuse.lowering.lower import Lowered
from onnxfuse.schedules.reductions.online import joins_maximum
from onnxfuse.schedules.reductions.reduction import KEPT_LIMIT
from onnxfuse.schedules.schedule import Expected

MAX_THREADS = 1024

SIDE_BY_SIDE = 32
"""Rows side by side that a block has: whole sectors of memory."""

LONG_ROW, LONG_COLUMN = 8192, 512
"""Elements of a row from which on sharing it among blocks can pay for more launches, and of one of several side by
side."""


def is_split(length: int, count: int, across: bool, multiprocessors: int) -> bool:
    """Whether rows are few and long on a GPU with so many multiprocessors."""
    blocks, longest = (2 * -(-count // SIDE_BY_SIDE), LONG_COLUMN) if across else (count, LONG_ROW)
    return 0 < blocks <= multiprocessors and length > longest


def scans_expected(lowered: Lowered, sizes: Mapping[str, int], multiprocessors: int) -> Expected:
    """Of a region with totals at these sizes, on a GPU with so many multiprocessors."""
    tensors = lowered.program.tensors
    first = next(tensor for tensor in tensors if isinstance(tensor, Reduce | Scan))
    rows = arrangement(first.operand.shape, first.axes).substitute(lowered.binding.names)
    if not (rows.count.symbols | rows.length.symbols) <= sizes.keys():
        return Expected()
    count, length = rows.count.evaluate(sizes), rows.length.evaluate(sizes)
    phases: dict[int, int] = {}
    levels: dict[int, int] = {}
    for tensor in tensors:
        below = [id(operand) for operand in operands(tensor)]
        reduces = isinstance(tensor, Reduce) and not joins_maximum(tensor)
        phases[id(tensor)] = max((phases[each] for each in below), default=0) + reduces
        levels[id(tensor)] = max((levels[each] for each in below), default=0) + isinstance(tensor, Scan)
    steps, totals = 1 + max(phases.values()), max(levels.values())
    few = is_split(length, count, rows.across, multiprocessors) and (rows.across or length > _held(totals))
    return Expected(steps + totals if few else 1)


def _held(totals: int) -> int:
    """Elements of a row that the registers of a block hold with so many totals of each, at least."""
    return MAX_THREADS * KEPT_LIMIT // (totals + 1)
