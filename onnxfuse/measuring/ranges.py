"""Between which numbers each input of a model has to lie, so that the model runs and its numbers mean something.

    inputs ──▶ every operator that demands something of a value that follows from them   (``demands``)
           ◀── the widest range whose interval, carried forward (``intervals``), meets all of these

An input's range begins with what it may be at all; each demand that it does not meet narrows the ranges of the inputs
from which the demanding operand follows.  A demand that no range meets is left: nothing better is known, or what is
known is too coarse.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from onnx import TensorProto

from onnxfuse.graph import Node, Value
from onnxfuse.graph.constants import numpy_type
from onnxfuse.measuring.analysis import Analysis
from onnxfuse.measuring.demands import CARRIES, POSITIVE, Demand, demands
from onnxfuse.measuring.interval_rules import rule
from onnxfuse.measuring.intervals import EVERY, Facts, Interval, is_whole

INDICES = 900
"""Integers are drawn below this, or below the smallest table that they index."""

_LEASTS = (0, 1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024, -1)
"""Where the range of an input may begin, the preferred first."""

_FARTHEST = 2.0**31
"""No range begins further from zero."""

_FLOORS = (POSITIVE, 1.0, 2.0, 4.0, 16.0)
"""Where floats may begin that have to be above something, the preferred first."""

_MASKING = -1000.0
"""Scores that a mask rules out get this or less."""


@dataclass(frozen=True)
class Ranges:
    """What inputs are to be drawn from.

    Attributes:
        intervals: of each input; infinite ends leave a float as it is drawn.
        masks: inputs that say what counts and what does not: ones and zeros.
        lengths: inputs that say how much of each sequence counts, and how long the sequences are.
    """

    intervals: Mapping[Value, Interval]
    masks: frozenset[Value]
    lengths: Mapping[Value, int]


def find_ranges(inputs: Sequence[Value], sizes: Mapping[str, int],
                given: Mapping[Value, Interval] | None = None) -> Ranges:
    """Ranges of values that nothing is known of: a model's inputs, or what a part of it reads.

    Args:
        inputs: to be drawn.
        sizes: of symbols; one that is missing leaves what hangs on it unknown.
        given: intervals of further inputs, whose contents are the user's.
    """
    cone = _Cone(inputs)
    facts = Facts(sizes, cone.given)
    masks = frozenset(value for value in inputs if _is_mask(value))
    lengths = {value: size for value in inputs if (size := _length(value, inputs, facts)) is not None}
    intervals = {**(given or {}), **{value: _first(value, value in masks) for value in inputs}}
    intervals |= {value: Interval(1, size) for value, size in lengths.items()}
    known = Analysis(facts, intervals)
    sites = [(demand, cone.sources(demand.operand)) for node in cone.nodes for demand in demands(node, facts, known)]
    # What indexes a table is no mask, whatever else becomes of it.
    indexing = {value for demand, sources in sites if demand.interval.high < inf for value in sources}
    found = {value for value in inputs if not (value in masks or value in indexing or value in lengths)
             and _acts_as_mask(value)}
    masks |= found
    intervals |= {value: Interval(0, 1) for value in found}
    for _ in range(2):  # what meets one demand may break another
        for demand, sources in sites:
            free = [value for value in sources if value not in masks and value not in lengths]
            if free:
                _narrow(demand, free, intervals, facts)
    return Ranges({value: intervals[value] for value in inputs}, masks, lengths)


def index_bound(value: Value) -> int:
    """Size of the smallest table that the value indexes, at most ``INDICES``, sizes that have symbols left out."""
    found = find_ranges([value], {}).intervals[value]
    return INDICES if found.high == inf else max(1, int(min(found.high + 1, INDICES)))


def _first(value: Value, mask: bool) -> Interval:
    """What is drawn where nothing demands anything."""
    if value.dtype is None or not is_whole(value.dtype):
        return Interval(0, 1) if mask else EVERY
    if mask or value.dtype == TensorProto.BOOL:
        return Interval(0, 1)
    return Interval(0, min(INDICES - 1, int(np.iinfo(numpy_type(value.dtype)).max)))


def _narrow(demand: Demand, free: Sequence[Value], intervals: dict[Value, Interval], facts: Facts) -> None:
    """Narrow the ranges of these inputs until the demand is met; nothing changes where that cannot be."""

    def met(tried: Mapping[Value, Interval]) -> bool:
        found = Analysis(facts, {**intervals, **tried}).of(demand.operand)
        return found is not None and found.within(*demand.interval)

    if Analysis(facts, intervals).of(demand.operand) is None or met({}):
        return
    for least in _FLOORS:
        positive = {value: Interval(max(intervals[value].low, least), intervals[value].high) for value in free}
        if all(interval.high == inf for interval in positive.values()) and met(positive):
            intervals |= positive
            return
    if demand.interval.high == inf and not is_whole(demand.operand.dtype):
        return  # an interval that is too coarse must not flatten what a sum of exponentials is of
    for least in (*_LEASTS, *_starts(demand, free, intervals, facts)):
        lows = {value: _from(intervals[value], least, value) for value in free}
        ends = {value: _end(intervals[value], lows[value], value) for value in free}
        if not met({value: Interval(low, low) for value, low in lows.items()}):
            continue
        good, bad = min(lows.values()), max(ends.values()) + 1
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if met(_up_to(middle, lows, ends)) else (good, middle)
        intervals |= _up_to(good, lows, ends)
        return


def _starts(demand: Demand, free: Sequence[Value], intervals: Mapping[Value, Interval], facts: Facts
            ) -> list[float]:
    """Where a range may begin that none of ``_LEASTS`` does for: where the operand is zero, or the least that it may
    be, if it follows from the inputs by an offset; and what it must be at least."""
    at = Analysis(facts, {**intervals, **{value: Interval(0, 0) for value in free}}).of(demand.operand)
    known = [] if at is None or at.low != at.high else [-at.low, demand.interval.low - at.low]
    return [start for start in (*known, demand.interval.low) if -_FARTHEST < start < _FARTHEST]


def _end(present: Interval, low: float, value: Value) -> float:
    """Where a range that begins there may end: as many indices further on where it begins past the usual ones."""
    if low < INDICES:
        return max(low, min(present.high, INDICES - 1))
    whole = value.dtype is not None and is_whole(value.dtype)
    return min(low + INDICES, float(np.iinfo(numpy_type(value.dtype or 0)).max) if whole else inf)


def _from(present: Interval, least: float, value: Value) -> float:
    """Where a range begins: no lower than it does, but for signed integers, which begin at zero by default alone."""
    signed = value.dtype is None or not is_whole(value.dtype) or numpy_type(value.dtype).kind == "i"
    return least if present.low < 0 or (signed and least < 0) else max(present.low, least)


def _up_to(most: float, lows: Mapping[Value, float], ends: Mapping[Value, float]) -> dict[Value, Interval]:
    """Ranges that end at ``most``, or where the input's own or its beginning does."""
    return {value: Interval(low, max(low, min(ends[value], most))) for value, low in lows.items()}


class _Cone:
    """What follows from some values, as far as anything is known of it."""

    def __init__(self, inputs: Sequence[Value]) -> None:
        self.nodes: list[Node] = []
        self.given: dict[Value, Value] = {}
        """Values of bodies, and what they are outside."""
        self._inputs = frozenset(inputs)
        seen, waiting, visited = set(inputs), deque(inputs), set[Node]()
        while waiting:
            here = waiting.popleft()
            for inner in here.inner:
                if inner not in seen:
                    seen.add(inner)
                    self.given[inner] = here
                    waiting.append(inner)
            for node in here.consumers:
                if node in visited:
                    continue
                visited.add(node)
                self.nodes.append(node)
                if rule(node) is None:
                    continue
                for output in node.outputs:
                    if output is not None and output not in seen:
                        seen.add(output)
                        waiting.append(output)
        self._followers = seen

    def sources(self, value: Value) -> list[Value]:
        """Which of the inputs a value follows from."""
        found: dict[Value, None] = {}
        seen, waiting = {value}, [value]
        while waiting:
            here = waiting.pop()
            if here in self._inputs:
                found[here] = None
                continue
            around = here.outer or self.given.get(here)
            node = here.producer
            operands = [around] if around is not None else [] if node is None or rule(node) is None else [
                operand for operand in node.inputs if operand is not None]
            for operand in operands:
                if operand in self._followers and operand not in seen:
                    seen.add(operand)
                    waiting.append(operand)
        return list(found)


def _is_mask(value: Value) -> bool:
    return "mask" in value.name.lower()


_LENGTH = re.compile(r"(?P<of>.*?)[_.]?(lens?|lengths?)$", re.IGNORECASE)
_NO_LENGTH = re.compile(r"mask|max|min|past|total|num", re.IGNORECASE)


def _length(value: Value, inputs: Sequence[Value], facts: Facts) -> int | None:
    """How long the sequences are of which an input gives the lengths, going by its name: a number for each entry of a
    batch.  That is the first axis behind the batch of the input of the same name, or of the first with such a batch,
    that is not fixed.  None where it gives no lengths."""
    match = _LENGTH.fullmatch(value.name)
    if match is None or _NO_LENGTH.search(value.name) or value.dtype is None or not value.shape or (
            not is_whole(value.dtype) or value.dtype == TensorProto.BOOL or facts.count(value) != facts.axis(value, 0)):
        return None
    alike = [other for other in inputs if other is not value and other.shape and len(other.shape) > 1
             and str(other.shape[0]) == str(value.shape[0])]
    alike.sort(key=lambda other: not (match["of"] and other.name.startswith(match["of"])))
    sizes = (facts.size(size) for other in alike for size in (other.shape or ())[1:] if size.symbols)
    return next((size for size in sizes if size), None)


def _acts_as_mask(value: Value) -> bool:
    """Whether an input is turned into truths, or (1 - input) times a number far below zero is computed of it."""
    seen, waiting = {value}, [value]
    while waiting:
        here = waiting.pop()
        for node in here.consumers:
            if node.domain:
                continue
            result = node.outputs[0]
            if result is None:
                continue
            if node.op == "Cast" and result.dtype == TensorProto.BOOL and value.dtype is not None and (
                    numpy_type(value.dtype).kind in "iu"):
                return True
            if node.op == "Sub" and node.inputs[1] is here and _number(node.inputs[0]) == 1.0 and _rules_out(result):
                return True
            if node.op in CARRIES and node.inputs[0] is here and result not in seen:
                seen.add(result)
                waiting.append(result)
    return False


def _rules_out(value: Value) -> bool:
    """Whether a value is multiplied with a number far below zero, or decides where one stands."""
    for node in value.consumers:
        numbers = [_number(operand) for operand in node.inputs if operand is not None and operand is not value]
        result = node.outputs[0]
        if node.op == "Mul" and any(number is not None and number <= _MASKING for number in numbers):
            return True
        if node.op == "Cast" and result is not None and (result.dtype == TensorProto.BOOL or _rules_out(result)):
            return True
    return False


def _number(value: Value | None) -> float | None:
    """The number of a constant that holds one."""
    if value is None or value.constant is None or value.constant.size != 1:
        return None
    found = value.constant.reshape(())
    return float(found) if value.constant.dtype.kind in "biuf" else None
