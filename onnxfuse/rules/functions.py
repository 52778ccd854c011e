"""The functions of the condition language, and what they work on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnxfuse.graph.dims import Dim, product
from onnxfuse.graph.model import Graph, Node, Value, root
from onnxfuse.rules.classes import CLASSES
from onnxfuse.rules.operators import DTYPE_NAMES


class Dtype(int):
    """An element type, printed by name."""

    def __str__(self) -> str:
        return DTYPE_NAMES.get(int(self), str(int(self)))


@dataclass
class Scope:
    """What names mean: bound values, captured attributes, holes' nodes; None for an input that is absent."""

    graph: Graph
    bindings: Mapping[str, Any]
    holes: Mapping[str, tuple[Node, ...]] = field(default_factory=dict)


class UnknownError(Exception):
    """Something that the condition asks is not known."""

    def __init__(self, code: str, what: str) -> None:
        super().__init__(what)
        self.code, self.what = code, what


def shown(value: Any) -> str:
    """A figure as messages print it."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def plain_number(value: Any) -> Any:
    """A number from a size; integers, floats and the rest as they are."""
    if isinstance(value, Dim):
        if value.value is None:
            raise UnknownError("unknown-size", f"the size {value} is not known before the model runs")
        return value.value
    if not isinstance(value, int | float):
        raise UnknownError("condition", f"{shown(value)} is no number")
    return value


def content_number(value: Any) -> Any:
    """The content of a constant of one element; anything else as it is."""
    if not isinstance(value, Value):
        return value
    content = _contents(value)
    if content.size != 1:
        raise UnknownError("not-scalar", f"{value.name} has {content.size} elements")
    return _plain(content[0])


def _contents(value: Value) -> np.ndarray:
    constant = root(value).constant
    if constant is None:
        raise UnknownError("not-constant", f"the contents of {value.name} are not known before the model runs")
    return constant.reshape(-1)


def _plain(item: Any) -> int | float:
    return int(item) if item.dtype.kind in "biu" else float(item)


@dataclass(frozen=True)
class Function:
    arguments: int
    code: str
    run: Callable[..., Any]


def _value(given: Any, what: str) -> Value:
    if not isinstance(given, Value):
        raise UnknownError("condition", f"{what} needs a tensor")
    return given


def _shape(scope: Scope, given: Any) -> tuple[Dim, ...]:
    value = _value(given, "shape")
    shape = value.shape if value.shape is not None else root(value).shape
    if shape is None:
        raise UnknownError("unknown-shape", f"the rank of {value.name} is unknown")
    return shape


def _dtype(scope: Scope, given: Any) -> Dtype:
    value = _value(given, "dtype")
    dtype = value.dtype or root(value).dtype
    if not dtype:
        raise UnknownError("unknown-type", f"the type of {value.name} is unknown")
    return Dtype(dtype)


def _dim(scope: Scope, given: Any, axis: int) -> Dim:
    shape = _shape(scope, given)
    if not isinstance(axis, int) or not -len(shape) <= axis < len(shape):
        raise UnknownError("rank", f"{given.name} has rank {len(shape)} and no axis {shown(axis)}")
    size: Dim = shape[axis]
    return size


def _content(scope: Scope, given: Any) -> Any:
    if not isinstance(given, Value):
        return given
    content = [_plain(item) for item in _contents(given)]
    return content[0] if len(content) == 1 else content


def _is_scalar(scope: Scope, given: Any) -> bool:
    return isinstance(given, int | float) or all(size == 1 for size in _shape(scope, given))


def _last_axis(scope: Scope, given: Any, axis: Any) -> bool:
    axes = axis if isinstance(axis, list | tuple) else [_content(scope, axis)]
    axes = axes[0] if len(axes) == 1 and isinstance(axes[0], list) else axes
    if list(axes) == [-1]:
        return True
    rank = len(_shape(scope, given))
    return [int(plain_number(number)) % max(rank, 1) for number in axes] == [rank - 1]


def _broadcastable(scope: Scope, given: Any, target: Any) -> bool:
    small, large = _shape(scope, given), _shape(scope, target)
    if len(small) > len(large):
        return False
    return all(a == 1 or a == b for a, b in zip(reversed(small), reversed(large), strict=False))


def _only_along(scope: Scope, given: Any, target: Any, axis: Any) -> bool:
    sizes, rank = _shape(scope, given), len(_shape(scope, target))
    _dim(scope, target, axis)
    padded = [*[1] * (rank - len(sizes)), *sizes]
    return len(padded) == rank and all(size == 1 for place, size in enumerate(padded) if place != axis % rank)


def _repeats(scope: Scope, given: Any, target: Any) -> bool:
    sizes, wanted = _shape(scope, given), _shape(scope, target)
    if not sizes or sizes[-1:] != wanted[-1:]:
        return False
    same = next((place for place, (a, b) in enumerate(zip(sizes, wanted, strict=False)) if a != b), len(sizes))
    return all(size == 1 for size in sizes[same if len(sizes) == len(wanted) else 0 : -1])


def _is_known(scope: Scope, given: Any) -> bool:
    sizes = _shape(scope, given) if isinstance(given, Value) else [given]
    return all(isinstance(size, int) or (isinstance(size, Dim) and size.value is not None) for size in sizes)


def _stated(scope: Scope, given: Any) -> bool:
    value = _value(given, "stated")
    return value.declared in (None, value.shape)


def _names(operators: Any) -> list[str]:
    if not isinstance(operators, list) or not all(isinstance(name, str) for name in operators):
        raise UnknownError("condition", f"{shown(operators)} is no list of operators")
    return operators


def _is_of(node: Node, names: Sequence[str]) -> bool:
    """Whether a node is of one of these operators, classes and sets."""
    return node.qualified_op in names or any((node.domain, node.op) in CLASSES.get(name, ()) for name in names)


def _read_by(scope: Scope, given: Any, operators: Any) -> bool:
    value, names = _value(given, "read_by"), _names(operators)
    return not value.is_output and all(_is_of(reader, names) for reader in value.consumers)


def _made_by(scope: Scope, given: Any, operators: Any) -> bool:
    producer, names = root(_value(given, "made_by")).producer, _names(operators)
    return producer is not None and _is_of(producer, names)


def _least(scope: Scope, given: Any) -> Any:
    content = _content(scope, given)
    return min((plain_number(number) for number in (content if isinstance(content, list) else [content])), default=0)


def _item(items: Any, position: int) -> Any:
    found = items if isinstance(items, list | tuple) else [items]
    position = plain_number(position)
    if not isinstance(position, int) or not -len(found) <= position < len(found):
        raise UnknownError("attribute", f"a list of {len(found)} has no item {shown(position)}")
    return found[position]


def _operator(scope: Scope, given: Any) -> str:
    producer = root(_value(given, "operator")).producer
    return "none" if producer is None else producer.qualified_op


def _widens(narrow: Dtype, wide: Dtype) -> bool:
    """Whether the type ``wide`` holds every value of the type ``narrow`` exactly."""
    if narrow == wide:
        return True
    if str(narrow) == "bfloat16":
        return str(wide) in ("float32", "float64")
    try:
        return bool(np.can_cast(np.dtype(str(narrow)), np.dtype(str(wide)), casting="safe"))
    except TypeError:
        return False


FUNCTIONS: dict[str, Function] = {
    "is_scalar": Function(1, "not-scalar", _is_scalar),
    "is_constant": Function(1, "not-constant", lambda scope, v: not isinstance(v, Value) or root(v).is_constant),
    "is_absent": Function(1, "present", lambda scope, v: v is None),
    "is_present": Function(1, "absent", lambda scope, v: v is not None),
    "is_output": Function(1, "not-output", lambda scope, v: _value(v, "is_output").is_output),
    "not_output": Function(1, "inner-value-is-output", lambda scope, v: not _value(v, "not_output").is_output),
    "is_float": Function(
        1, "type", lambda scope, v: str(_dtype(scope, v)) in ("float16", "bfloat16", "float32", "float64")
    ),
    "rank": Function(1, "rank", lambda scope, v: len(_shape(scope, v))),
    "dtype": Function(1, "type", _dtype),
    "shape": Function(1, "shape", _shape),
    "dim": Function(2, "size", _dim),
    "size": Function(1, "size", lambda scope, v: product(_shape(scope, v))),
    "value": Function(1, "constant-value", _content),
    "count": Function(1, "hole-size", lambda scope, nodes: len(nodes)),
    "operator": Function(1, "operator", _operator),
    "same_shape": Function(2, "shape", lambda scope, a, b: _shape(scope, a) == _shape(scope, b)),
    "same_type": Function(2, "type", lambda scope, a, b: _dtype(scope, a) == _dtype(scope, b)),
    "broadcastable": Function(2, "shape", _broadcastable),
    "last_axis": Function(2, "reduction-axis", _last_axis),
    "only_along": Function(3, "shape", _only_along),
    "repeats": Function(2, "shape", _repeats),
    "is_known": Function(1, "unknown-size", _is_known),
    "stated": Function(1, "unknown-size", _stated),
    "read_by": Function(2, "uses", _read_by),
    "made_by": Function(2, "operator", _made_by),
    "least": Function(1, "constant-value", _least),
    "item": Function(2, "attribute", lambda scope, items, position: _item(items, position)),
    "uses": Function(1, "uses", lambda scope, v: len(_value(v, "uses").consumers)),
    "widens": Function(2, "loses-precision", lambda scope, v, wide: _widens(_dtype(scope, v), _dtype(scope, wide))),
    "abs": Function(1, "condition", lambda scope, a: abs(plain_number(content_number(a)))),
    "min": Function(2, "condition", lambda scope, *pair: min(plain_number(content_number(a)) for a in pair)),
    "max": Function(2, "condition", lambda scope, *pair: max(plain_number(content_number(a)) for a in pair)),
}
"""Functions of the condition language, with the code of a condition that they fail."""
