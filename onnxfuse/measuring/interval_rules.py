"""How each operator's results lie between numbers, from between which its operands lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil, exp, floor, inf, isfinite, isnan, sqrt, tanh, trunc

import numpy as np
from onnx import TensorProto

from onnxfuse.graph import Node
from onnxfuse.graph.constants import numpy_type
from onnxfuse.measuring.intervals import EVERY, TRUTH, Interval, Step, interval_of, is_whole

Rule = Callable[[Step], "Interval | None"]


def rule(node: Node) -> Rule | None:
    """What says between which numbers the node's results lie."""
    return _RULES.get(node.op) if node.domain == "" else None


def _same(step: Step) -> Interval | None:
    """Elements of the first operand."""
    return step.operand(0)


def _joined(*operands: Interval | None) -> Interval | None:
    found = [operand for operand in operands if operand is not None]
    if len(found) < len(operands) or not found:
        return None
    return Interval(min(each.low for each in found), max(each.high for each in found))


def _any(step: Step) -> Interval | None:
    """Elements of any operand."""
    return _joined(*step.operands)


def _where(step: Step) -> Interval | None:
    condition = step.operand(0)
    if condition is not None and condition.low == condition.high:
        return step.operand(1 if condition.low else 2)
    return _joined(step.operand(1), step.operand(2))


def _corners(step: Step, compute: Callable[[float, float], float]) -> Interval | None:
    """Of an operation that is monotonic in each of two operands."""
    a, b = step.operand(0), step.operand(1)
    if a is None or b is None:
        return None
    # Zero times infinity is zero here: infinity stands for numbers of any size.
    numbers = [0.0 if isnan(found) else found for x in a for y in b for found in [compute(x, y)]]
    return Interval(min(numbers), max(numbers))


def _add(step: Step) -> Interval | None:
    a, b = step.operand(0), step.operand(1)
    return None if a is None or b is None else Interval(a.low + b.low, a.high + b.high)


def _subtract(step: Step) -> Interval | None:
    a, b = step.operand(0), step.operand(1)
    return None if a is None or b is None else Interval(a.low - b.high, a.high - b.low)


def _multiply(step: Step) -> Interval | None:
    found = _corners(step, lambda a, b: 0 if not a or not b else a * b)
    if found is not None and step.node.inputs[0] is step.node.inputs[1]:
        return Interval(max(found.low, 0), found.high)
    return found


def _divide(step: Step) -> Interval | None:
    divisor = step.operand(1)
    if divisor is None or divisor.low <= 0 <= divisor.high:
        return None
    found = _corners(step, lambda a, b: a / b)
    if found is None or not is_whole(step.value.dtype):
        return found
    return Interval(_whole(found.low, floor), _whole(found.high, ceil))


def _remainder(step: Step) -> Interval | None:
    a, divisor = step.operand(0), step.operand(1)
    if divisor is None or divisor.low <= 0:
        return None
    if a is not None and a.within(0, divisor.low - 1):
        return a
    below = 0 if a is None or a.low >= 0 or not step.node.attributes.get("fmod", 0) else -divisor.high
    most = divisor.high - 1 if is_whole(step.value.dtype) else divisor.high
    return Interval(below, most if a is None or a.low < 0 else min(most, a.high))


def _compared(decide: Callable[[Interval, Interval], tuple[bool, bool]]) -> Rule:
    """Of a comparison; ``decide`` says whether it holds for all numbers, and whether it holds for none."""

    def step_of(step: Step) -> Interval:
        a, b = step.operand(0), step.operand(1)
        always, never = (False, False) if a is None or b is None else decide(a, b)
        return Interval(1, 1) if always else Interval(0, 0) if never else TRUTH

    return step_of


def _not(step: Step) -> Interval:
    a = step.operand(0) or TRUTH
    return Interval(1 - a.high, 1 - a.low)


def _logical(compute: Callable[[float, float], float]) -> Rule:
    def step_of(step: Step) -> Interval:
        a, b = step.operand(0) or TRUTH, step.operand(1) or TRUTH
        return Interval(compute(a.low, b.low), compute(a.high, b.high))

    return step_of


def _extreme(choose: Callable[[Sequence[float]], float]) -> Rule:
    """Of the largest or the smallest of operands."""

    def step_of(step: Step) -> Interval | None:
        largest = choose((0.0, 1.0)) == 1.0
        found = [operand for operand in step.operands if operand is not None]
        if len(found) == len(step.operands) and found:
            return Interval(choose([each.low for each in found]), choose([each.high for each in found]))
        if not found:
            return None
        return Interval(max(each.low for each in found), inf) if largest else Interval(
            -inf, min(each.high for each in found))

    return step_of


def _clip(step: Step) -> Interval | None:
    low, high = (step.operand(place) for place in (1, 2))
    least = float(step.node.attributes.get("min", -inf)) if low is None else low.low
    most = float(step.node.attributes.get("max", inf)) if high is None else high.high
    if any(step.operand(place) is None and place < len(step.node.inputs) and step.node.inputs[place] is not None
           for place in (1, 2)):
        return None
    x = step.operand(0) or EVERY
    found = Interval(min(max(x.low, least), most), max(min(x.high, most), least))
    return None if found == EVERY else found


def _monotonic(compute: Callable[[float], float], bounds: Interval = EVERY) -> Rule:
    """Of a function that rises; what is not known of the operand, the function's own bounds say."""

    def step_of(step: Step) -> Interval | None:
        x = step.operand(0)
        if x is None:
            return None if bounds == EVERY else bounds
        return Interval(_at(compute, x.low, bounds.low), _at(compute, x.high, bounds.high))

    return step_of


def _at(compute: Callable[[float], float], x: float, end: float) -> float:
    try:
        return compute(x) if isfinite(x) else end
    except (OverflowError, ValueError):
        return end


def _absolute(step: Step) -> Interval:
    x = step.operand(0) or EVERY
    inside = x.low <= 0 <= x.high
    return Interval(0 if inside else min(abs(x.low), abs(x.high)), max(abs(x.low), abs(x.high)))


def _negated(step: Step) -> Interval | None:
    x = step.operand(0)
    return None if x is None else Interval(-x.high, -x.low)


def _power(step: Step) -> Interval | None:
    x, power = step.operand(0), step.operand(1)
    if power is None or power.low != power.high:
        return None
    if power.low == 2:
        top = inf if x is None else max(abs(x.low), abs(x.high)) ** 2
        return Interval(0, top)
    return Interval(0, inf) if x is None or x.low >= 0 or power.low % 2 == 0 else None


def _cast(step: Step) -> Interval | None:
    x, kind = step.operand(0), step.value.dtype
    if kind is None or not is_whole(kind):
        return x
    if kind == TensorProto.BOOL:
        if x is None or x.low <= 0 <= x.high:
            return Interval(0, 0) if x is not None and x == (0, 0) else TRUTH
        return Interval(1, 1)
    info = np.iinfo(numpy_type(kind))
    every = Interval(int(info.min), int(info.max))
    if x is None:
        return every if info.bits <= 8 else None
    low, high = (_whole(end, trunc) for end in x)
    return Interval(low, high) if every.low <= low and high <= every.high else every


def _whole(number: float, rounded: Callable[[float], int]) -> float:
    return rounded(number) if isfinite(number) else number


def _range(step: Step) -> Interval | None:
    start, limit, delta = (step.operand(place) for place in range(3))
    if start is None or limit is None or delta is None:
        return None
    if delta.low > 0:
        end = limit.high - 1 if is_whole(step.value.dtype) else limit.high
        return Interval(start.low, max(end, start.low))
    return Interval(min(start.low, limit.low), max(start.high, limit.high))


def _cumulated(step: Step) -> Interval | None:
    """At most as many terms as there are elements along an axis, which may not be known: as along the longest."""
    x, most = step.operand(0), _longest(step)
    if x is None or most is None:
        return None
    axis = step.operand(1)
    if axis is not None and axis.low == axis.high:
        most = step.facts.axis(step.node.inputs[0], int(axis.low)) or most
    return Interval(min(x.low, x.low * most, 0), max(x.high, x.high * most, 0))


def _summed(step: Step) -> Interval | None:
    before, after = step.facts.count(step.node.inputs[0]), step.facts.count(step.value)
    x = step.operand(0)
    if x is None or not before or not after:
        return None
    terms = before // after
    return Interval(x.low * terms, x.high * terms)


def _positions(step: Step) -> Interval | None:
    """Of places along an axis."""
    size = step.facts.axis(step.node.inputs[0], int(step.node.attributes.get("axis", 0)))
    return None if not size else Interval(0, size - 1)


def _nonzero(step: Step) -> Interval | None:
    longest = _longest(step)
    return Interval(0, longest - 1) if longest else None


def _longest(step: Step) -> int | None:
    """The longest axis of the first operand; None where it has none, or one is not known."""
    data = step.node.inputs[0]
    sizes = [] if data is None or data.shape is None else [step.facts.size(size) for size in data.shape]
    known = [size for size in sizes if size is not None]
    return max(known) if known and len(known) == len(sizes) else None


def _top(step: Step) -> Interval | None:
    if step.place == 0:
        return step.operand(0)
    size = step.facts.axis(step.node.inputs[0], int(step.node.attributes.get("axis", -1)))
    return None if not size else Interval(0, size - 1)


def _filled(step: Step) -> Interval | None:
    tensor = step.node.attributes.get("value")
    return Interval(0, 0) if tensor is None else interval_of(np.asarray(tensor))


def _padded(step: Step) -> Interval | None:
    if step.node.attributes.get("mode", "constant") != "constant":
        return step.operand(0)
    given = len(step.node.inputs) > 2 and step.node.inputs[2] is not None
    value = float(step.node.attributes.get("value", 0))
    return _joined(step.operand(0), step.operand(2) if given else Interval(value, value))


def _scattered(step: Step) -> Interval | None:
    if step.node.attributes.get("reduction", "none") != "none":
        return None
    return _joined(step.operand(0), step.operand(2))


def _with_zero(step: Step) -> Interval | None:
    return _joined(step.operand(0), Interval(0, 0))


def _bits_kept(step: Step) -> Interval | None:
    """Bits that both have: no more than either, where neither is negative."""
    known = [operand for operand in (step.operand(0), step.operand(1)) if operand is not None and operand.low >= 0]
    return Interval(0, min(operand.high for operand in known)) if known else None


def _shifted(step: Step) -> Interval | None:
    x, places = step.operand(0), step.operand(1)
    if x is None or places is None or x.low < 0 or places.low < 0:
        return None
    if step.node.attributes.get("direction") in (b"RIGHT", "RIGHT"):
        return Interval(x.low // 2 ** min(places.high, _LONGEST), x.high // 2 ** min(places.low, _LONGEST))
    kind = step.value.dtype
    most = inf if kind is None else float(np.iinfo(numpy_type(kind)).max)
    high = x.high * 2 ** min(places.high, _LONGEST)
    return Interval(0, most) if high > most else Interval(x.low * 2 ** min(places.low, _LONGEST), high)


def _totalled(step: Step) -> Interval | None:
    """The sum of all operands."""
    found = [operand for operand in step.operands if operand is not None]
    if len(found) < len(step.operands):
        return None
    return Interval(sum(each.low for each in found), sum(each.high for each in found))


def _first_only(step: Step) -> Interval | None:
    return step.operand(0) if step.place == 0 else None


_LONGEST = 64
"""Bits of the longest integer."""

_SIGMOID = Interval(0, 1)
_RULES: Mapping[str, Rule] = {
    **dict.fromkeys((
        "Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Expand", "Slice", "Split", "Tile",
        "Gather", "GatherElements", "GatherND", "DepthToSpace", "SpaceToDepth", "ReduceMax", "ReduceMin", "ReduceMean",
        "Compress", "ReverseSequence", "AveragePool", "GlobalAveragePool", "GlobalMaxPool",
    ), _same),
    **dict.fromkeys(("Dropout", "MaxPool", "Unique"), _first_only),
    **dict.fromkeys(("Concat", "Mean"), _any),
    **dict.fromkeys(("ScatterND", "ScatterElements", "Scatter"), _scattered),
    **dict.fromkeys(("ArgMax", "ArgMin"), _positions),
    **dict.fromkeys(("IsNaN", "IsInf"), lambda step: TRUTH),
    **dict.fromkeys(("Softmax", "Hardmax", "HardSigmoid"), lambda step: _SIGMOID),
    "BitwiseAnd": _bits_kept, "BitShift": _shifted, "Sum": _totalled,
    "Where": _where, "Add": _add, "Sub": _subtract, "Mul": _multiply, "Div": _divide, "Mod": _remainder,
    "Less": _compared(lambda a, b: (a.high < b.low, a.low >= b.high)),
    "LessOrEqual": _compared(lambda a, b: (a.high <= b.low, a.low > b.high)),
    "Greater": _compared(lambda a, b: (a.low > b.high, a.high <= b.low)),
    "GreaterOrEqual": _compared(lambda a, b: (a.low >= b.high, a.high < b.low)),
    "Equal": _compared(lambda a, b: (a.low == a.high == b.low == b.high, a.high < b.low or b.high < a.low)),
    "Not": _not, "And": _logical(min), "Or": _logical(max), "Xor": lambda step: TRUTH,
    "Max": _extreme(max), "Min": _extreme(min), "Clip": _clip, "Cast": _cast, "CastLike": _cast,
    "Relu": _monotonic(lambda x: max(x, 0), Interval(0, inf)), "Exp": _monotonic(exp, Interval(0, inf)),
    "Sqrt": _monotonic(lambda x: sqrt(max(x, 0.0)), Interval(0, inf)), "Abs": _absolute, "Neg": _negated,
    "Sigmoid": _monotonic(lambda x: 1 / (1 + exp(-x)), _SIGMOID), "Tanh": _monotonic(tanh, Interval(-1, 1)),
    "Floor": _monotonic(floor), "Ceil": _monotonic(ceil), "Round": _monotonic(round),
    "Sign": _monotonic(lambda x: (x > 0) - (x < 0), Interval(-1, 1)), "Softplus": lambda step: Interval(0, inf),
    "Pow": _power, "ReduceSumSquare": lambda step: Interval(0, inf), "ReduceL2": lambda step: Interval(0, inf),
    "ReduceL1": lambda step: Interval(0, inf), "Range": _range, "CumSum": _cumulated, "ReduceSum": _summed,
    "NonZero": _nonzero, "TopK": _top, "ConstantOfShape": _filled, "Pad": _padded, "Trilu": _with_zero,
}
"""By operator of the standard domain.

``_monotonic`` of a function without bounds gives the end itself where that is infinite.
"""
