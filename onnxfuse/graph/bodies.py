"""Types and sizes across the border of a body: into an If's branches, a Loop's and a Scan's body, and out again.

What a body reads by name has the type and sizes that it has outside.  A value that a Loop or Scan carries from one run
of its body to the next has the sizes that hold in every run: those before the first, each axis kept where the body is
seen to keep it, and a symbol of the value's own where it is not (the widening of abstract interpretation).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count

import numpy as np

from onnxfuse.graph.context import BOOL, INT64, Type, TypeContext, elements_of
from onnxfuse.graph.dims import Dim, dim, symbol
from onnxfuse.graph.model import Graph, Node, Shape, Value, root

SHALLOW = 3
"""Bodies around one another in which each finds its sizes anew whenever the one around looks for its own."""

MOST_TURNS = 8
"""Times that a body is inferred until all sizes that it carries may differ from run to run; twice as many, and nothing
is known of them: each turn may show but one more that does."""

Infer = Callable[[Graph], Graph]
"""Fills in the types of a graph whose inputs have theirs."""


def enter(bodies: Sequence[Graph], infer: Infer) -> list[Graph]:
    """The bodies of one node with all types filled in, from the types that the node's operands have."""
    return [_entered(body, infer) for body in bodies]


def results(context: TypeContext, bodies: Sequence[Graph]) -> list[Type]:
    """Types of the outputs of the node that owns these bodies, once they are inferred.

    A size that only a body knows is unknown outside.  An If whose condition is known has the types of the branch that
    it takes; another one what both branches have in common.
    """
    node = context.node
    known = frozenset(
        name
        for value in node.reads()
        for size in (*(value.shape or ()), *(value.elements or ()))
        for name in size.symbols
    )

    def contents(elements: Shape | None) -> Shape | None:
        return elements if elements is not None and all(size.symbols <= known for size in elements) else None

    def outside(shape: Shape | None, output: int) -> Shape | None:
        if shape is None:
            return None
        sizes = enumerate(shape)
        return tuple(
            size if size.symbols <= known else context.unknown(axis, len(shape), output) for axis, size in sizes
        )

    found = []
    for place in range(len(node.outputs)):
        inside = _inside(node, bodies, place)
        found.append(Type(inside.dtype, outside(inside.shape, place), contents(inside.elements)))
    return found


def taken(node: Node) -> str | None:
    """The attribute that holds the branch which an If takes in every run, None where its condition is open."""
    condition = node.inputs[0] if node.inputs else None
    elements = None if condition is None else elements_of(condition)
    if elements is None or len(elements) != 1 or elements[0].value is None:
        return None
    return "then_branch" if elements[0].value else "else_branch"


def is_idle(body: Graph) -> bool:
    """Whether no run comes to the body: it is a branch of an If that always takes the other one."""
    owner = body.owner
    if owner is None or owner.op != "If" or body.body is None:
        return False
    return taken(owner) not in (None, body.body.place[-1][1])


def trips(body: Graph) -> Dim | None:
    """How often a Loop or Scan runs its body, None where that is not known before a run.

    A Loop's trip count holds where nothing can end it earlier: its condition is absent or a constant, and what the
    body gives on as the condition is that again, or a constant.
    """
    owner = body.owner
    if owner is None:
        return None
    if owner.op == "Scan":
        return next((outer.shape[axis] for outer, _, axis in _scanned(body) if outer is not None and outer.shape), None)
    count = most_trips(body)
    return count if count is not None and _runs_through(body) else None


def most_trips(body: Graph) -> Dim | None:
    """The trip count of a Loop, where it is known: the condition may end it earlier."""
    owner = body.owner
    value = owner.inputs[0] if owner is not None and owner.op == "Loop" and owner.inputs else None
    elements = None if value is None else elements_of(value)
    return elements[0] if elements is not None and len(elements) == 1 else None


def _entered(body: Graph, infer: Infer) -> Graph:
    owner = body.owner
    assert owner is not None, "a body has an owner"
    for value in body.values.values():
        if value.outer is not None:
            outer = value.outer
            value.dtype, value.shape, value.elements = outer.dtype, outer.shape, outer.elements
            value.constant, value.is_constant = outer.constant, outer.is_constant
    if owner.op == "Loop":
        for value, kind in zip(body.inputs, (INT64, BOOL), strict=False):
            value.dtype = kind
            value.shape = (dim(1),) if value.declared is not None and len(value.declared) == 1 else ()
    for whole, inner, axis in _scanned(body):
        inner.dtype = inner.dtype if whole is None or whole.dtype is None else whole.dtype
        shape = None if whole is None else whole.shape
        inner.shape = inner.declared if shape is None else (*shape[:axis], *shape[axis + 1:])
    return _fixed_point(body, infer)


def _fixed_point(body: Graph, infer: Infer) -> Graph:
    """The body with sizes of its carried values that hold in every run.

    Each turn infers the bodies inside anew, which take turns of their own: deep inside they begin with what they came
    to the last time, so that the work grows with the depth and not with its exponential.
    """
    carried = _carried(body)
    first: dict[str, Dim] = {}
    for before, inner, _ in carried:
        known = inner.shape if len(body.place) > SHALLOW else None
        start = None if before is None else before.shape
        inner.dtype = before.dtype if before is not None and before.dtype is not None else inner.dtype
        inner.shape = start if start is not None else inner.declared
        if known is not None and inner.shape is not None and len(known) == len(inner.shape):
            inner.shape = tuple(old if old == _own(inner, old) else new
                                for old, new in zip(known, inner.shape, strict=True))
            first |= _starts(inner, start)
    for turn in count():
        found = infer(body)
        steady = True
        for before, inner, after in carried:
            wider = _wider(inner, after.shape)
            if turn >= 2 * MOST_TURNS:
                wider = None
            elif turn == MOST_TURNS and wider is not None:
                wider = tuple(symbol(f"{inner.name}.{axis}") for axis in range(len(wider)))
            if wider != inner.shape:
                steady = False
                inner.shape = wider
                first |= _starts(inner, None if before is None else before.shape)
        if steady:
            return replace(found, first=first)
    raise AssertionError("values without sizes are steady")


def _starts(inner: Value, start: Shape | None) -> dict[str, Dim]:
    """Of symbols that a carried value has of its own, the sizes before the first run."""
    if inner.shape is None or start is None or len(start) != len(inner.shape):
        return {}
    return {str(new): old for new, old in zip(inner.shape, start, strict=True) if new == _own(inner, new)}


def _wider(inner: Value, after: Shape | None) -> Shape | None:
    """Sizes that hold of a carried value before and after a run; what the file states where the rank is open."""
    if inner.shape is None:
        return None
    if after is None or len(after) != len(inner.shape):
        stated = inner.declared
        same = stated is not None and len(stated) == len(inner.shape) and after is None
        return stated if same else None
    return tuple(
        size if size == new else symbol(f"{inner.name}.{axis}")
        for axis, (size, new) in enumerate(zip(inner.shape, after, strict=True))
    )


def _own(value: Value, size: Dim) -> Dim | None:
    """The size, where it is a symbol that the value alone has."""
    return size if any(size == symbol(f"{value.name}.{axis}") for axis in range(value.rank or 0)) else None


def _carried(body: Graph) -> list[tuple[Value | None, Value, Value]]:
    """Of each carried value: what it is before the first run, what the body reads, what it gives on."""
    owner = body.owner
    assert owner is not None
    if owner.op == "Loop":
        return list(zip(owner.inputs[2:], body.inputs[2:], body.outputs[1:], strict=False))
    if owner.op == "Scan":
        count = len(owner.inputs) - _scan_inputs(owner)
        return list(zip(owner.inputs[:count], body.inputs[:count], body.outputs[:count], strict=False))
    return []


def handed_in(body: Graph) -> list[tuple[Value, Value]]:
    """Of what a Loop or Scan hands to its body: the value outside, and the one inside."""
    pairs = [*((before, inner) for before, inner, _ in _carried(body)),
             *((whole, inner) for whole, inner, _ in _scanned(body))]
    return [(outer, inner) for outer, inner in pairs if outer is not None]


def _scan_inputs(owner: Node) -> int:
    return int(owner.attributes.get("num_scan_inputs", 0))


def _scanned(body: Graph) -> list[tuple[Value | None, Value, int]]:
    """Of each tensor that a Scan takes slice by slice: the whole, the slice that the body reads, and the axis.

    The whole is None where it is absent or has no such axis: ONNX Runtime says so only when the model runs.
    """
    owner = body.owner
    if owner is None or owner.op != "Scan":
        return []
    count = _scan_inputs(owner)
    start = len(owner.inputs) - count
    axes = _axes(owner.attributes, "scan_input_axes", count)
    found = []
    for outer, inner, axis in zip(owner.inputs[start:], body.inputs[start:], axes, strict=False):
        rank = outer.rank if outer is not None else None
        place = axis + rank if axis < 0 and rank is not None else axis
        found.append((outer if rank is None or 0 <= place < rank else None, inner, place))
    return found


def _axes(attributes: Mapping[str, object], name: str, count: int) -> list[int]:
    stated = attributes.get(name)
    return [int(axis) for axis in stated] if isinstance(stated, (list, tuple)) else [0] * count


def _inside(node: Node, bodies: Sequence[Graph], place: int) -> Type:
    """Type of one of a node's outputs, in sizes of its bodies."""
    if node.op == "If":
        return _either([body.outputs[place] for body in bodies if place < len(body.outputs) and not is_idle(body)])
    (body,) = bodies
    carried = _carried(body)
    if place < len(carried):
        inner = carried[place][1]
        return Type(inner.dtype, inner.shape)
    offset = 1 if node.op == "Loop" else 0
    if place + offset >= len(body.outputs):
        return Type()
    value = body.outputs[place + offset]
    if value.shape is None:
        return Type(value.dtype)
    count = trips(body)
    length = symbol(f"{value.name}.trips") if count is None else count  # a symbol that nothing outside has
    axis = _axes(node.attributes, "scan_output_axes", len(node.outputs))[place - len(carried)]
    axis += (len(value.shape) + 1) if axis < 0 else 0
    return Type(value.dtype, (*value.shape[:axis], length, *value.shape[axis:]))


def _either(values: Sequence[Value]) -> Type:
    """What the results of two branches have in common."""
    kinds = {value.dtype for value in values if value.dtype is not None}
    shapes = [value.shape for value in values]
    ranks = {None if shape is None else len(shape) for shape in shapes}
    dtype = kinds.pop() if len(kinds) == 1 else None
    if len(ranks) != 1 or None in ranks:
        return Type(dtype)
    first, second = shapes[0] or (), shapes[-1] or ()
    contents = values[0].elements if values[0].elements == values[-1].elements else None
    return Type(dtype, tuple(
        a if a == b else symbol(f"{values[0].name}.{axis}.either")
        for axis, (a, b) in enumerate(zip(first, second, strict=True))
    ), contents)


def _runs_through(body: Graph) -> bool:
    owner = body.owner
    assert owner is not None
    start = owner.inputs[1] if len(owner.inputs) > 1 else None
    if start is not None and not _is_true(start):
        return False
    value = root(body.outputs[0])
    return value is body.inputs[1] or _is_true(value)


def _is_true(value: Value | None) -> bool:
    return value is not None and value.constant is not None and bool(np.all(value.constant))
