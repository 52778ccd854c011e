"""Operands of any operator: types by its schema's constraints.  Only what a schema cannot say (which sizes fit, which
numbers an index may be) stands in ``OPERANDS``, by operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from schema_builder import Builder, allowed
from schema_values import BOOL, FLOAT, FLOATS, INT64, INTEGERS, Known, numpy_type

Schema = onnx.defs.OpSchema
Option = onnx.defs.OpSchema.FormalParameterOption
Operands = list["Known | str | None"]
Named = dict[str, object]
Drawn = tuple[Operands, Named]
"""Leading operands, and others by the name of the input or attribute that the operator's version has for it."""


def by_schema(b: Builder, schema: Schema) -> Drawn | None:
    """The first operand as it comes; others of the right type that broadcast with it."""
    types = allowed(schema)
    bound: dict[str, Known] = {}
    operands: Operands = []
    for formal in schema.inputs:
        if formal.option == Option.Optional and b.flip():
            operands.append(None)
            continue
        for _ in range(b.rng.choice((1, 2, 2, 3)) if formal.option == Option.Variadic else 1):
            first = bound.get(formal.type_str)
            lead = next((value for value in operands if isinstance(value, Known)), None)
            kinds = types.get(formal.type_str, ())
            if first is not None and b.flip(0.15):
                value: Known | None = first  # op(x, x)
            elif first is not None:
                value = b.broadcast(first, first.dtype)
            elif lead is not None:
                value = b.broadcast(lead, b.rng.choice(kinds)) if kinds else None
            else:
                value = b.value(kinds)
            if value is None:
                return None
            bound.setdefault(formal.type_str, value)
            operands.append(value)
    while operands and operands[-1] is None:
        operands.pop()
    if len(operands) == 2 and b.flip() and None not in operands:
        operands.reverse()
    return operands, {}


OPERANDS: dict[str, Callable[[Builder, Schema], Drawn | None]] = {}


def operands(*names: str) -> Callable[[Callable[[Builder, Schema], Drawn | None]], Callable]:
    def register(choose: Callable[[Builder, Schema], Drawn | None]) -> Callable:
        for name in names:
            OPERANDS[name] = choose
        return choose

    return register


def types_of(schema: Schema, place: int = 0) -> tuple[int, ...]:
    return allowed(schema).get(schema.inputs[place].type_str, ())


def some_axes(b: Builder, rank: int) -> list[int]:
    """Axes, some counted from the end."""
    chosen = b.rng.sample(range(rank), b.rng.randint(1, rank)) if rank else []
    return [axis - rank if b.flip(0.3) else axis for axis in chosen]


@operands("Clip")
def _clip(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value(types_of(schema))
    if x is None:
        return None
    low, high = b.scalar(b.rng.randint(0, 1), x.dtype), b.scalar(b.rng.randint(1, 3), x.dtype)
    return [x, None if b.flip(0.2) else low, None if b.flip(0.2) else high], {}


@operands("Div", "Mod")
def _division(b: Builder, schema: Schema) -> Drawn | None:
    """Integers are divided by positive constants: ONNX Runtime's CPU provider ends with a signal otherwise."""
    x = b.value(types_of(schema))
    if x is None:
        return None
    if x.dtype in FLOATS:
        y = x if b.flip(0.1) else b.broadcast(x, x.dtype)
        return None if y is None else ([x, y], {"fmod": 1})
    shape = [b.rng.choice((1, a)) if a == c else 1 for a, c in x.pairs]
    divisors = np.random.default_rng(b.rng.randint(0, 999)).integers(1, 6, shape).astype(numpy_type(x.dtype))
    return [x, b.constant(divisors)], {}


@operands("Pow")
def _power(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value(types_of(schema))
    kinds = [kind for kind in types_of(schema, 1) if kind in (x and x.dtype, FLOAT, INT64)]
    if x is None or not kinds:
        return None
    return [x, b.scalar(b.rng.choice((0, 1, 2, 2, 3)), b.rng.choice(kinds))], {}


@operands("Where")
def _where(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value(types_of(schema, 1))
    y = x and b.broadcast(x, x.dtype)
    truth = x and b.broadcast(x, BOOL)
    return None if x is None or y is None or truth is None else ([truth, x, y] if b.flip() else [truth, y, x], {})


@operands("PRelu")
def _prelu(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value(types_of(schema))
    slope = x and b.broadcast(x, x.dtype, whole=True)
    return None if x is None or slope is None else ([x, slope], {})


@operands("BitShift")
def _shift(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value(types_of(schema))
    return None if x is None else ([x, b.scalar(b.rng.randint(0, 3), x.dtype)], {})


@operands("Cast", "BitCast")
def _cast(b: Builder, schema: Schema) -> Drawn | None:
    """What an integer type does not hold is nobody's to say."""
    x = b.value(types_of(schema))
    written = allowed(schema)[schema.outputs[0].type_str]
    targets = [dtype for dtype in (*FLOATS, *FLOATS, BOOL, *INTEGERS) if dtype in written]
    if x is None:
        return None
    if schema.name == "BitCast":
        width = numpy_type(x.dtype).itemsize
        return [x], {"to": b.rng.choice([t for t in targets if numpy_type(t).itemsize == width and t != BOOL])}
    return [x], {"to": b.rng.choice([t for t in targets if holds(x, t)])}


def holds(x: Known, dtype: int) -> bool:
    kind = numpy_type(dtype)
    if kind.kind not in "iu":
        return True
    limits = np.iinfo(kind)
    with np.errstate(invalid="ignore"):
        return all(bool(np.all((array.astype(np.float64) > max(limits.min, -2.0**62) - 0.5)
                               & (array.astype(np.float64) < min(limits.max, 2**62)))) for array in x.arrays)


@operands("CastLike")
def _cast_like(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value(types_of(schema))
    like = x and b.value(types_of(schema, 1), accept=lambda value: holds(x, value.dtype))
    return None if x is None or like is None else ([x, like], {})


@operands("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin",
          "ReduceProd", "ReduceSum", "ReduceSumSquare")
def _reduction(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value(types_of(schema))
    return None if x is None else ([x], {"axes": some_axes(b, x.rank) if x.rank and b.flip(0.8) else None})


@operands("MeanVarianceNormalization")
def _moments(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value(types_of(schema), 1)
    return None if x is None else ([x], {"axes": some_axes(b, x.rank)})


@operands("Squeeze")
def _squeeze(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value(types_of(schema), accept=lambda value: (1, 1) in value.pairs)
    if x is None:
        return None
    ones = [axis for axis, pair in enumerate(x.pairs) if pair == (1, 1)]
    return [x], {"axes": b.rng.sample(ones, b.rng.randint(1, len(ones))) if b.flip(0.8) else None}


@operands("Unsqueeze")
def _unsqueeze(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value(types_of(schema), most=4)
    if x is None:
        return None
    count = b.rng.randint(1, 2)
    return [x], {"axes": [axis - x.rank - count if b.flip(0.3) else axis
                          for axis in b.rng.sample(range(x.rank + count), count)]}


@operands("Transpose")
def _transpose(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value(types_of(schema), 1, 5)
    return None if x is None else ([x], {"perm": b.rng.sample(range(x.rank), x.rank) if b.flip(0.8) else None})


@operands("Reshape")
def _reshape(b: Builder, schema: Schema) -> Drawn | None:
    """Zeros for what stays, -1 for the rest, numbers, or sizes taken from a Shape."""
    x = b.value(types_of(schema), accept=lambda value: value.size > 0)
    if x is None:
        return None
    if b.flip(0.2):
        like = b.find(lambda value: [a.size for a in value.arrays] == [a.size for a in x.arrays])
        if like is not None:
            return [x, b.emit("Shape", [like])[0]], {"allowzero": None}
    kept = b.rng.randint(0, x.rank)
    target = [0 if b.flip(0.7) or m != n else m for m, n in x.pairs[:kept]]
    rest = x.pairs[kept:]
    if all(m == n for m, n in rest) and rest and b.flip():
        total = prod(m for m, _ in rest)
        part = b.rng.choice([n for n in range(1, total + 1) if total % n == 0] or [1])
        target += [part, total // part] if b.flip() else [-1, part]
    else:
        target += [-1, *[1] * (b.flip(0.2))] if rest or b.flip(0.3) else []
    return [x], {"shape": b.ints(*target), "allowzero": None if b.flip(0.8) else 0}


@operands("Expand")
def _expand(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value(types_of(schema))
    if x is None:
        return None
    like = b.find(lambda v: len(v.pairs) >= x.rank and v.size < 500 and all(
        a == c or (1, 1) in (a, c) for a, c in zip(reversed(v.pairs), reversed(x.pairs), strict=False)))
    if like is not None and b.flip(0.4):
        return [x, b.emit("Shape", [like])[0]], {}
    shape = [b.rng.choice((1, 2, 3)) for _ in range(b.rng.randint(0, 2) if x.rank < 3 else 0)]
    shape += [b.rng.choice((1, 2, 4)) if pair == (1, 1) else 1 for pair in x.pairs]
    return [x, b.ints(*shape)], {}


@operands("Tile")
def _tile(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value(types_of(schema), 1)
    return None if x is None else ([x, b.ints(*[b.rng.choice((1, 1, 2, 3)) for _ in range(x.rank)])], {})


@operands("Slice")
def _slice(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value(types_of(schema), 1)
    if x is None:
        return None
    axes = some_axes(b, x.rank)
    kind = b.rng.choice((INT64, INT64, TensorProto.INT32))
    onward = (0, 0, 1, -2, -100), (1, 2, 3, -1, 2**31 - 1), (1, 1, 1, 2)
    back = (-1, 100, 2), (-100, -2**31 + 1, 0), (-1, -2)
    bound = [[b.rng.choice(numbers) for numbers in (onward if b.flip(0.8) else back)] for _ in axes]
    starts, ends, steps = (b.ints(*part, dtype=kind) for part in zip(*bound, strict=True))
    if axes == list(range(x.rank)) and b.flip():
        return [x, starts, ends, None, steps] if b.flip() else [x, starts, ends], {}
    return [x, starts, ends, b.ints(*axes, dtype=kind), *([steps] if b.flip(0.8) else [])], {}


@operands("Split")
def _split(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value(types_of(schema), 1)
    if x is None:
        return None
    axis = b.rng.randrange(x.rank)
    m, n = x.pairs[axis]
    if m != n or m == 0 or b.flip(0.3):
        parts = b.rng.choice([k for k in (1, 2, 3, 4) if m % k == 0 and n % k == 0])
        return [x], {"axis": axis, "outputs": parts, "num_outputs": parts, "split": None}
    cuts = sorted(b.rng.randint(0 if b.flip(0.05) else 1, m) for _ in range(b.rng.randint(0, 2)))
    sizes = [end - start for start, end in zip([0, *cuts], [*cuts, m], strict=True)]
    return [x], {"axis": axis - x.rank if b.flip(0.3) else axis, "split": sizes, "outputs": len(sizes),
                 "num_outputs": None}


@operands("Concat")
def _concat(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value(types_of(schema), 1)
    if x is None:
        return None
    axis = b.rng.randrange(x.rank)
    found: Operands = [x]
    for _ in range(b.rng.choice((0, 1, 1, 2, 3))):
        other = b.find(lambda value: value.dtype == x.dtype and value.rank == x.rank and all(
            place == axis or a == c for place, (a, c) in enumerate(zip(value.pairs, x.pairs, strict=True))))
        found.append(other or x)
    b.rng.shuffle(found)
    return found, {"axis": axis - x.rank if b.flip(0.3) else axis}


@operands("Gather")
def _gather(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value(types_of(schema), 1)
    if x is None:
        return None
    axis = b.rng.randrange(x.rank)
    indices = index(b, x.least[axis], b.random_axes(b.rng.randint(0, 2)), types_of(schema, 1))
    return None if indices is None else ([x, indices], {"axis": axis})


def index(b: Builder, size: int, axes: Sequence[tuple[int, int]], kinds: Sequence[int]) -> Known | None:
    """Indices into an axis."""
    if not size:
        return None
    low = -size if b.flip(0.4) else 0
    return b.fill(b.rng.choice(sorted(set(kinds) & {INT64, TensorProto.INT32})), axes, low, size)


@operands("GatherElements")
def _gather_elements(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value(types_of(schema), 1)
    if x is None:
        return None
    axis = b.rng.randrange(x.rank)
    axes = [(b.rng.randint(1, 4),) * 2 if place == axis else pair for place, pair in enumerate(x.pairs)]
    indices = index(b, x.least[axis], axes, types_of(schema, 1))
    return None if indices is None else ([x, indices], {"axis": axis})


@operands("GatherND")
def _gather_nd(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value(types_of(schema), 1)
    if x is None or not all(x.least):
        return None
    depth = b.rng.randint(1, x.rank)
    rows = b.rng.randint(1, 3)
    numbers = [[b.rng.randrange(size) for size in x.least[:depth]] for _ in range(rows)]
    return [x, b.constant(np.array(numbers, np.int64))], {"batch_dims": None}


@operands("ScatterElements", "Scatter")
def _scatter_elements(b: Builder, schema: Schema) -> Drawn | None:
    """Every place is written at most once, for who writes last is not said."""
    x = b.value(types_of(schema), 1, accept=lambda value: all(value.least))
    if x is None:
        return None
    axis = b.rng.randrange(x.rank)
    count = b.rng.randint(1, x.least[axis])
    chosen = np.array(b.rng.sample(range(x.least[axis]), count), np.int64)
    shape = [count if place == axis else 1 for place in range(x.rank)]
    rows = [size if place != axis else count for place, size in enumerate(x.least)]
    indices = np.broadcast_to(chosen.reshape(shape), rows)
    updates = b.fill(x.dtype, [(n, n) for n in rows])
    return None if updates is None else ([x, b.constant(np.ascontiguousarray(indices)), updates], {"axis": axis})


@operands("ScatterND")
def _scatter_nd(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value(types_of(schema), 1, accept=lambda value: all(value.least))
    if x is None:
        return None
    count = b.rng.randint(1, x.least[0])
    updates = b.fill(x.dtype, [(count, count), *x.pairs[1:]])
    rows = np.array(b.rng.sample(range(x.least[0]), count), np.int64).reshape(-1, 1)
    return None if updates is None else ([x, b.constant(rows), updates], {})


@operands("TensorScatter")
def _tensor_scatter(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value(types_of(schema), 3, accept=lambda value: all(value.least))
    update = x and b.fill(x.dtype, [*x.pairs[:-2], (1, 1), x.pairs[-1]])
    return None if x is None or update is None else ([x, update], {"axis": -2})


@operands("Pad")
def _pad(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value(types_of(schema), 1)
    if x is None:
        return None
    axes = list(range(x.rank))
    named: Named = {}
    if "axes" in [formal.name for formal in schema.inputs] and b.flip(0.3):
        axes = [axis % x.rank for axis in some_axes(b, x.rank)]
        named["axes"] = axes
    named["pads"] = [b.rng.choice((0, 0, 1, 2, -1 if b.flip(0.3) else 0)) for _ in range(2 * len(axes))]
    if b.flip(0.4):
        named["constant_value"] = b.scalar(1, x.dtype)
    return [x], named


@operands("OneHot")
def _one_hot(b: Builder, schema: Schema) -> Drawn | None:
    kind = b.rng.choice((INT64, INT64, FLOAT, TensorProto.INT32))
    depth = b.rng.randint(1, 5)
    places = index(b, depth, b.random_axes(b.rng.randint(0, 2)), (INT64,))
    values = b.constant(np.array([0, 1]).astype(numpy_type(kind)))
    return None if places is None else ([places, b.scalar(depth, INT64), values], {})


@operands("CumSum", "CumProd")
def _running(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value(types_of(schema), 1)
    return None if x is None else ([x, b.scalar(b.rng.randint(-x.rank, x.rank - 1), INT64)], {})


@operands("TopK")
def _top(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value(types_of(schema), 1, accept=lambda value: all(value.least))
    if x is None:
        return None
    axis = b.rng.randrange(x.rank)
    return [x, b.ints(b.rng.randint(1, x.least[axis]))], {"axis": axis, "outputs": 2}


@operands("Range")
def _range(b: Builder, schema: Schema) -> Drawn | None:
    kind = b.rng.choice(types_of(schema))
    return [b.scalar(0, kind), b.scalar(b.rng.randint(0, 6), kind), b.scalar(b.rng.randint(1, 2), kind)], {}


@operands("Compress")
def _compress(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value(types_of(schema), 1)
    return None if x is None else ([x, b.constant(np.array([True, False, True]))], {})


@operands("Unique")
def _unique(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value(types_of(schema), 1)
    return None if x is None else ([x], {"axis": None if b.flip() else b.rng.randrange(x.rank)})


@operands("ReverseSequence")
def _reverse(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value(types_of(schema), 2, accept=lambda value: all(value.least))
    if x is None:
        return None
    time = b.rng.randint(0, 1)
    lengths = b.fill(INT64, [x.pairs[1 - time]], 1, x.least[time] + 1)
    return None if lengths is None else ([x, lengths], {"time_axis": time, "batch_axis": 1 - time})


@operands("Trilu")
def _trilu(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value(types_of(schema), 2)
    return None if x is None else ([x, b.scalar(b.rng.randint(-2, 2), INT64)] if b.flip() else [x], {})


@operands("Constant")
def _constant(b: Builder, schema: Schema) -> Drawn | None:
    array = np.arange(b.rng.randint(0, 4)).astype(numpy_type(b.rng.choice((b.kind, INT64, BOOL))))
    name, value = b.rng.choice((("value", numpy_helper.from_array(array)), ("value_float", 0.5), ("value_int", 3),
                                ("value_floats", [0.5, 1.0]), ("value_ints", [1, 2])))
    return [], {**dict.fromkeys(schema.attributes), name: value}


@operands("ConstantOfShape")
def _filled(b: Builder, schema: Schema) -> Drawn | None:
    like = b.find(lambda value: value.size < 500)
    sizes = b.emit("Shape", [like])[0] if like is not None and b.flip() else b.ints(2, b.rng.randint(0, 3))
    kind = b.rng.choice((b.kind, INT64, BOOL))
    return [sizes], {"value": numpy_helper.from_array(np.ones(1, numpy_type(kind))) if b.flip(0.7) else None}


@operands("Dropout")
def _dropout(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value(types_of(schema))
    ratio = [b.scalar(0.25, FLOAT)] if b.flip() and b.opset >= 12 else []
    return None if x is None else ([x, *ratio], {"seed": None})


@operands("IsInf", "Det", "NonZero")
def _plain(b: Builder, schema: Schema) -> Drawn | None:
    if schema.name != "Det":
        return by_schema(b, schema)
    x = b.fill(b.kind, [*b.random_axes(1), (3, 3), (3, 3)])
    return None if x is None else ([x], {})


@operands("EyeLike")
def _eye(b: Builder, schema: Schema) -> Drawn | None:
    x = b.value(types_of(schema), 2, 2)
    return None if x is None else ([x], {"dtype": b.rng.choice((FLOAT, INT64)) if b.flip() else None})


@operands("HannWindow", "HammingWindow", "BlackmanWindow")
def _window(b: Builder, schema: Schema) -> Drawn | None:
    return [b.scalar(b.rng.randint(1, 8), INT64)], {"output_datatype": FLOAT}


@operands("MelWeightMatrix")
def _mel(b: Builder, schema: Schema) -> Drawn | None:
    return [b.scalar(number, kind) for number, kind in ((4, INT64), (16, INT64), (8000, INT64), (0.0, FLOAT),
                                                        (4000.0, FLOAT))], {"output_datatype": FLOAT}
