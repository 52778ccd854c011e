"""What operators demand of the numbers that they are given: indices inside their tables, counts above zero.

    Gather(table[50, 8], ids)        -50 <= ids <= 49
    Reshape(x, shape) of rank 1           shape == -1
    Log(x)                                    x > 0
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import NamedTuple

from onnxfuse.graph import Node, Value
from onnxfuse.measuring.analysis import Analysis
from onnxfuse.measuring.intervals import Facts, Interval, is_whole

MICROSOFT, MACHINE_LEARNING = "com.microsoft", "ai.onnx.ml"

POSITIVE, ABOVE_ZERO = 0.0625, 1e-30
"""What is drawn at least where numbers must be above zero, and what passes for that."""

MOST_COUNT, MOST_SIZE, MOST_REPEATS = 4, 16, 2
"""Trips of a loop, elements along an axis, and copies of a tensor, that inputs ask for at most."""


class Demand(NamedTuple):
    """An operand that has to lie in an interval."""

    node: Node
    operand: Value
    interval: Interval


def demands(node: Node, facts: Facts, analysis: Analysis) -> list[Demand]:
    """What a node demands, as far as sizes are known; ``analysis`` says what is known of operands that decide it."""
    make = _DEMANDS.get((node.domain, node.op))
    if make is None:
        return []
    found = make(_Asked(node, facts, analysis))
    return [Demand(node, value, interval) for place, interval in found.items()
            if place < len(node.inputs) and (value := node.inputs[place]) is not None]


class _Asked(NamedTuple):
    node: Node
    facts: Facts
    analysis: Analysis

    def size(self, place: int, axis: int) -> int | None:
        """How long an axis of an operand is."""
        return self.facts.axis(self.operand(place), axis)

    def operand(self, place: int) -> Value | None:
        return self.node.inputs[place] if place < len(self.node.inputs) else None

    def attribute(self, name: str, default: int) -> int:
        return int(self.node.attributes.get(name, default))


_Demands = Mapping[int, Interval]


def _below(size: int | None, backwards: bool = True) -> Interval | None:
    """Places along an axis; counted from its end too, where that is allowed."""
    return None if not size else Interval(-size if backwards else 0, size - 1)


def _at(place: int, interval: Interval | None) -> _Demands:
    return {} if interval is None else {place: interval}


def _table(axis: str, default: int = 0) -> Callable[[_Asked], _Demands]:
    """Operand 1 counts along an axis of operand 0."""
    return lambda asked: _at(1, _below(asked.size(0, asked.attribute(axis, default))))


def _tuples(asked: _Asked) -> _Demands:
    """Operand 1 holds places in operand 0, an axis for each of its last axis's elements: the shortest decides."""
    depth, first = asked.size(1, -1), asked.attribute("batch_dims", 0)
    sizes = [asked.size(0, first + axis) for axis in range(depth or 0)]
    known = [size for size in sizes if size is not None]
    return _at(1, _below(min(known))) if known else {}


def _features(asked: _Asked) -> _Demands:
    return _at(1, _below(asked.size(0, -1), backwards=False))


def _one_hot(asked: _Asked) -> _Demands:
    depth = asked.operand(1)
    known = None if depth is None else asked.analysis.of(depth)
    found = {1: Interval(1, MOST_SIZE)}
    if known is not None and known.low >= 1:
        found[0] = Interval(-known.low, known.low - 1)
    return found


def _embedding(asked: _Asked) -> _Demands:
    """Ids, segments and, where they are given, positions; their tables are operands 2, 4 and 3."""
    tables = {0: 2, 1: 4} | ({8: 3} if asked.node.op == "EmbedLayerNormalization" else {})
    found: dict[int, Interval] = {}
    for place, table in tables.items():
        found |= _at(place, _below(asked.size(table, 0), backwards=False))
    return found


def _rotary(asked: _Asked) -> _Demands:
    """A place for each token, or the first token's, after which as many rows have to follow as there are tokens."""
    rows, data, places = asked.size(2, 0), asked.operand(0), asked.operand(1)
    if rows and data is not None and places is not None and asked.facts.count(places) == 1:
        tokens = asked.size(0, 1 if data.rank == 3 else 2)
        rows = None if tokens is None else rows - tokens + 1
    return _at(1, _below(rows, backwards=False))


def _cached(asked: _Asked) -> _Demands:
    """Grouped attention with what came before: the last place of each sequence, and how many tokens there are then."""
    total = asked.operand(6)
    known = None if total is None else asked.analysis.of(total)
    if known is not None and known.low == known.high:
        return {5: Interval(known.low - 1, known.high - 1)}
    past, fresh = asked.size(3, 2) if asked.operand(3) is not None else 0, asked.size(0, 1)
    if past is None or not fresh:
        return {}
    return {5: Interval(past + fresh - 1, past + fresh - 1), 6: Interval(past + fresh, past + fresh)}


def _axis(place: int, more: bool = False) -> Callable[[_Asked], _Demands]:
    """Operand ``place`` names an axis of operand 0; one of its result, where there is one ``more`` there.  Several
    would have to differ, which no interval says."""

    def demand(asked: _Asked) -> _Demands:
        data = asked.operand(0)
        if data is None or data.rank is None or asked.facts.count(asked.operand(place)) != 1:
            return {}
        return _at(place, _below(data.rank + more))

    return demand


def _squeezed(asked: _Asked) -> _Demands:
    """The first axis of length one."""
    data = asked.operand(0)
    ones = [axis for axis in range((data.rank or 0) if data is not None else 0) if asked.size(0, axis) == 1]
    return {1: Interval(ones[0], ones[0])} if ones and asked.facts.count(asked.operand(1)) == 1 else {}


def _parts(asked: _Asked) -> _Demands:
    """Equal parts, where there are such."""
    size, count = asked.size(0, asked.attribute("axis", 0)), asked.facts.count(asked.operand(1))
    return {1: Interval(size // count, size // count)} if size and count and size % count == 0 else {}


def _unpooled(asked: _Asked) -> _Demands:
    count = asked.facts.count(asked.node.outputs[0])
    return _at(1, _below(count, backwards=False))


def _frames(asked: _Asked) -> _Demands:
    """Steps that leave a few frames, and frames as long as their window."""
    found = {1: Interval(1, MOST_SIZE)}
    return found | ({3: Interval(size, size)} if (size := asked.size(2, 0)) else {})


CARRIES = frozenset({"Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Expand", "Slice",
                     "Tile"})
"""What hands elements on as they are."""


def _compared(asked: _Asked) -> _Demands:
    """What places along an axis are compared with says how much of it counts."""
    for place in (0, 1):
        counted = asked.operand(place)
        while counted is not None and counted.producer is not None and counted.producer.op in CARRIES:
            counted = counted.producer.inputs[0]
        other = asked.operand(1 - place)
        if counted is None or other is None or counted.producer is None or counted.producer.op != "Range":
            continue
        known = asked.analysis.of(counted)
        if known is not None and known.low == 0 and 1 <= known.high < inf:
            return {1 - place: Interval(1, known.high + 1)}
    return {}


def _labels(asked: _Asked) -> _Demands:
    """Labels of a loss name a class, and classes lie along axis 1."""
    return _at(1, _below(asked.size(0, 1), backwards=False))


def _lengths(place: int, axis: Callable[[_Asked], int]) -> Callable[[_Asked], _Demands]:
    """Operand ``place`` says how much of an axis of operand 0 counts."""

    def demand(asked: _Asked) -> _Demands:
        size = asked.size(0, axis(asked))
        return {} if not size else {place: Interval(1, size)}

    return demand


def _within(place: int, low: float, high: float) -> Callable[[_Asked], _Demands]:
    return lambda asked: {place: Interval(low, high)}


def _shape(asked: _Asked) -> _Demands:
    """A shape that is an input: one axis of what there is, or every axis as it is."""
    target, data = asked.operand(1), asked.operand(0)
    count = None if target is None else asked.facts.count(target)
    if count == 1:
        return {1: Interval(-1, -1)}
    return {1: Interval(0, 0)} if data is not None and count == data.rank else {}


def _range_of(asked: _Asked) -> _Demands:
    whole = is_whole(asked.node.outputs[0].dtype if asked.node.outputs[0] is not None else None)
    return {1: Interval(1, MOST_SIZE), 2: Interval(1 if whole else ABOVE_ZERO, inf)}


def _divisor(asked: _Asked) -> _Demands:
    """An integer divided by zero ends the process; a float becomes infinite."""
    result = asked.node.outputs[0]
    whole = result is not None and is_whole(result.dtype)
    return {1: Interval(1, inf)} if whole else {}


def _power(asked: _Asked) -> _Demands:
    power = asked.operand(1)
    known = None if power is None else asked.analysis.of(power)
    if known is None or known.low != known.high or known.low == int(known.low):
        return {}
    return {0: Interval(ABOVE_ZERO, inf)}


def _resize(asked: _Asked) -> _Demands:
    return {2: Interval(1, MOST_REPEATS), 3: Interval(1, MOST_SIZE)}


def _kept_keys(asked: _Asked) -> _Demands:
    """How many keys of each sequence are no padding; they lie along the last axis but one."""
    size = asked.size(1, -2)
    return {6: Interval(1, size)} if size else {}


REDUCTIONS = ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2",
              "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp")

WHOLE_DIVISIONS = frozenset({"Div", "Mod"})
"""Operators of which an integer divisor of zero ends the process."""

_TIME = _lengths(4, lambda asked: 1 if asked.attribute("layout", 0) else 0)

_DEMANDS: Mapping[tuple[str, str], Callable[[_Asked], _Demands]] = {
    ("", "Gather"): _table("axis"), ("", "GatherElements"): _table("axis"), ("", "GatherND"): _tuples,
    ("", "ScatterElements"): _table("axis"), ("", "Scatter"): _table("axis"), ("", "ScatterND"): _tuples,
    ("", "TensorScatter"): _within(2, 0, 0),
    ("", "OneHot"): _one_hot, ("", "NegativeLogLikelihoodLoss"): _labels, ("", "SoftmaxCrossEntropyLoss"): _labels,
    ("", "RotaryEmbedding"): lambda asked: _at(3, _below(asked.size(1, 0), backwards=False)),
    (MACHINE_LEARNING, "ArrayFeatureExtractor"): _features, (MICROSOFT, "GatherND"): _tuples,
    (MICROSOFT, "GatherBlockQuantized"): _table("gather_axis"), (MICROSOFT, "RotaryEmbedding"): _rotary,
    (MICROSOFT, "EmbedLayerNormalization"): _embedding, (MICROSOFT, "QEmbedLayerNormalization"): _embedding,
    ("", "LSTM"): _TIME, ("", "GRU"): _TIME, ("", "RNN"): _TIME,
    ("", "ReverseSequence"): _lengths(1, lambda asked: asked.attribute("time_axis", 0)),
    ("", "TopK"): _lengths(1, lambda asked: asked.attribute("axis", -1)),
    ("", "Attention"): _kept_keys, (MICROSOFT, "GroupQueryAttention"): _cached,
    ("", "RoiAlign"): lambda asked: _at(2, _below(asked.size(0, 0), backwards=False)), ("", "MaxUnpool"): _unpooled,
    ("", "CumSum"): _axis(1), ("", "Unsqueeze"): _axis(1, more=True), ("", "Squeeze"): _squeezed,
    **{("", op): _axis(1) for op in REDUCTIONS if op != "ReduceLogSum"},
    ("", "ReduceLogSum"): lambda asked: {**_axis(1)(asked), 0: Interval(ABOVE_ZERO, inf)},
    ("", "Split"): _parts, ("", "STFT"): _frames, ("", "DFT"): _within(1, 1, MOST_SIZE),
    **{("", op): _within(0, 1, MOST_SIZE) for op in ("HannWindow", "HammingWindow", "BlackmanWindow")},
    **{("", op): _compared for op in ("Less", "LessOrEqual", "Greater", "GreaterOrEqual")},
    ("", "BatchNormalization"): _within(4, ABOVE_ZERO, inf), ("", "Bernoulli"): _within(0, 0, 1),
    ("", "Range"): _range_of, ("", "Tile"): _within(1, 1, MOST_REPEATS), ("", "Expand"): _within(1, 1, 1),
    ("", "ConstantOfShape"): _within(0, 1, MOST_SIZE),
    ("", "Reshape"): _shape, ("", "Loop"): _within(0, 1, MOST_COUNT), ("", "Pad"): _within(1, 0, MOST_REPEATS),
    ("", "Resize"): _resize, ("", "BitShift"): _within(1, 0, 7),
    **{("", op): _divisor for op in WHOLE_DIVISIONS},
    ("", "Log"): _within(0, ABOVE_ZERO, inf), ("", "Sqrt"): _within(0, 0, inf), ("", "Pow"): _power,
    ("", "Acosh"): _within(0, 1, inf), ("", "Acos"): _within(0, -1, 1), ("", "Asin"): _within(0, -1, 1),
    ("", "Atanh"): _within(0, -0.9375, 0.9375),
}
"""By domain and operator: which operands have to lie where."""
