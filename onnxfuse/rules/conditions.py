"""Conditions over what a pattern bound: ``rank(weight) == 1``, ``dtype(x) in [float16, bfloat16]``.

A condition that does not hold gives a code and a sentence with the figures at hand.  A condition about a name that
the match left out (an optional node, an alternative not taken) holds: it has nothing to say.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnxfuse.graph.dims import Dim, dim, product
from onnxfuse.graph.model import Graph, Node, Value
from onnxfuse.rules.operators import DTYPE_NAMES, DTYPES, attribute, root
from onnxfuse.rules.pattern import suggestion
from onnxfuse.rules.syntax import Call, Name, Number, Sequence, String, TextError, Tree


class Dtype(int):
    """An element type, printed by name."""

    def __str__(self) -> str:
        return DTYPE_NAMES.get(int(self), str(int(self)))


@dataclass(frozen=True)
class Condition:
    """A test as a rule states it; empty ``code`` and ``message`` mean the built-in ones."""

    text: str
    tree: Tree
    code: str = ""
    message: str = ""
    remedy: str = ""


@dataclass
class Scope:
    """What names mean: bound values, captured attributes, holes' nodes; None for an input that is absent."""

    graph: Graph
    bindings: Mapping[str, Any]
    holes: Mapping[str, tuple[Node, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """Why a condition does not hold."""

    code: str
    message: str
    remedy: str = ""


class _UnknownError(Exception):
    """Something that the condition asks is not known."""

    def __init__(self, code: str, what: str) -> None:
        super().__init__(what)
        self.code, self.what = code, what


class _LeftOutError(Exception):
    """The condition speaks of a name that the match did not bind."""


def check(condition: Condition, scope: Scope) -> Failure | None:
    """None where the condition holds, else why not."""
    figures: dict[str, str] = {}
    try:
        if _evaluate(condition.tree, scope, figures):
            return None
    except _LeftOutError:
        return None
    except _UnknownError as unknown:
        return Failure(
            unknown.code,
            f"The rule needs {condition.text}, and {unknown.what}.",
            condition.remedy or "Give the model shapes and types, or a constant where the rule needs one.",
        )
    here = ", ".join(f"{text} is {value}" for text, value in figures.items())
    message = condition.message or f"The rule needs {condition.text}" + (f"; here {here}." if here else ".")
    return Failure(condition.code or _default_code(condition.tree), message, condition.remedy)


def evaluate(tree: Tree, scope: Scope) -> Any:
    """The value of an expression; a constant of one element counts as its number.

    Raises:
        ValueError: it speaks of something unknown or not bound.
    """
    try:
        found = _evaluate(tree, scope, {})
        return _number(found) if isinstance(found, Value) else found
    except (_UnknownError, _LeftOutError) as error:
        raise ValueError(str(error)) from error


def verify(tree: Tree, names: Collection[str]) -> None:
    """Check functions, their arguments' number, and names.

    Raises:
        TextError: one of them is unknown or wrong.
    """
    match tree:
        case Name(name=name):
            base = name.partition(".")[0]
            if base not in names and name not in DTYPES and name not in ("true", "false"):
                close = suggestion(base, [*names, *DTYPES])
                raise TextError(
                    f"Nothing in the pattern is called {base}.", tree.start, tree.start + len(base),
                    f"Did you mean {close}?" if close else f"It has {', '.join(sorted(names))}.",
                )
        case Sequence(items=items):
            for item in items:
                verify(item, names)
        case Call():
            if not tree.infix:
                if tree.name not in FUNCTIONS:
                    close = suggestion(tree.name, FUNCTIONS)
                    raise TextError(
                        f"Unknown condition {tree.name}.", tree.start, tree.start + len(tree.name),
                        f"Did you mean {close}?" if close else f"There are {', '.join(FUNCTIONS)}.",
                    )
                count = FUNCTIONS[tree.name].arguments
                if len(tree.arguments) != count:
                    raise TextError(
                        f"{tree.name}(...) takes {count} argument{'s' if count != 1 else ''}, "
                        f"not {len(tree.arguments)}.", tree.start, tree.end,
                    )
            for argument in tree.arguments:
                verify(argument, names)


def _default_code(tree: Tree) -> str:
    match tree:
        case Call(name=name, infix=False):
            return FUNCTIONS[name].code
        case Call(arguments=arguments):
            return next((code for code in map(_default_code, arguments) if code != "condition"), "condition")
        case Name(name=name) if "." in name:
            return "attribute"
        case _:
            return "condition"


def _evaluate(tree: Tree, scope: Scope, figures: dict[str, str]) -> Any:
    match tree:
        case Number(value=value):
            return int(value) if value.is_integer() else value
        case String(value=value):
            return value
        case Sequence(items=items):
            return [_evaluate(item, scope, figures) for item in items]
        case Name(name=name):
            return _name(name, scope, figures)
        case Call(infix=True):
            return _operator(tree, scope, figures)
        case Call(name="is_absent" | "is_present", arguments=(Name(name=name),)):
            absent = scope.bindings.get(name) is None
            return absent if tree.name == "is_absent" else not absent
        case Call(name="count", arguments=(Name(name=name),)):
            count = len(scope.holes.get(name, ()))
            figures[f"count({name})"] = str(count)
            return count
        case Call():
            arguments = [_evaluate(argument, scope, {}) for argument in tree.arguments]
            result = FUNCTIONS[tree.name].run(scope, *arguments)
            if not isinstance(result, bool):
                figures[_text(tree)] = _shown(result)
            elif not result:
                for argument, given in zip(tree.arguments, arguments, strict=True):
                    if isinstance(given, Value):
                        figures[_text(argument)] = _described(given)
            return result


def _name(name: str, scope: Scope, figures: dict[str, str]) -> Any:
    if name in ("true", "false"):
        return name == "true"
    base, _, attribute_name = name.partition(".")
    if base not in scope.bindings:
        if base in DTYPES and not attribute_name:
            return Dtype(DTYPES[base])
        raise _LeftOutError
    found = scope.bindings[base]
    if found is None:
        raise _LeftOutError
    if attribute_name:
        producer = root(found).producer if isinstance(found, Value) else None
        if producer is None:
            raise _UnknownError("attribute", f"no node computes {base}")
        found = attribute(producer, attribute_name, scope.graph)
        if found is None:
            raise _UnknownError("attribute", f"{producer.qualified_op} has no attribute {attribute_name}")
    if not isinstance(found, Value):
        figures[name] = _shown(found)
    return found


_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "<": lambda a, b: a < b, "<=": lambda a, b: a <= b, ">": lambda a, b: a > b, ">=": lambda a, b: a >= b,
}
_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b,
    "//": lambda a, b: a // b, "%": lambda a, b: a % b,
}


def _operator(call: Call, scope: Scope, figures: dict[str, str]) -> Any:
    name = call.name
    if name in ("and", "or"):
        left = bool(_evaluate(call.arguments[0], scope, figures))
        return left if left == (name == "or") else bool(_evaluate(call.arguments[1], scope, figures))
    if name == "not":
        return not _evaluate(call.arguments[0], scope, figures)
    operands = [_evaluate(argument, scope, figures) for argument in call.arguments]
    if name == "neg":
        return -_plain(_number(operands[0]))
    left, right = operands
    if isinstance(left, Value) != isinstance(right, Value):
        # a constant beside a figure counts as its number, and the message shows it
        for position, operand in enumerate(operands):
            if isinstance(operand, Value):
                operands[position] = _number(operand)
                figures[_text(call.arguments[position])] = _shown(operands[position])
        left, right = operands
    if name in ("in", "not in"):
        return any(_equal(left, item) for item in right) == (name == "in")
    if name in ("==", "!="):
        return _equal(left, right) == (name == "==")
    left, right = (_number(operand) for operand in (left, right))
    if name in _ORDER:
        return bool(_ORDER[name](_plain(left), _plain(right)))
    if name == "/":
        divisor = _plain(right)
        if not divisor:
            raise _UnknownError("condition", "it divides by zero")
        return _plain(left) / divisor
    if name in ("//", "%") and isinstance(right, int) and right == 0:
        raise _UnknownError("condition", "it divides by zero")
    if isinstance(left, float) or isinstance(right, float):
        left, right = _plain(left), _plain(right)
    elif name in ("//", "%") and isinstance(right, Dim):
        left = dim(left)
    return _ARITHMETIC[name](left, right)


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, Value) and isinstance(right, Value):
        return root(left) is root(right)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_equal, left, right))
    if isinstance(left, float) or isinstance(right, float):
        return bool(np.isclose(float(_plain(left)), float(_plain(right)), rtol=1e-3, atol=0, equal_nan=True))
    return bool(left == right)


def _plain(value: Any) -> Any:
    """A number from a size; integers, floats and the rest as they are."""
    if isinstance(value, Dim):
        if value.value is None:
            raise _UnknownError("unknown-size", f"the size {value} is not known before the model runs")
        return value.value
    if not isinstance(value, int | float):
        raise _UnknownError("condition", f"{_shown(value)} is no number")
    return value


def _number(value: Any) -> Any:
    """The content of a constant of one element; anything else as it is."""
    if not isinstance(value, Value):
        return value
    found = root(value)
    if found.constant is None:
        raise _UnknownError("not-constant", f"the contents of {value.name} are not known before the model runs")
    if found.constant.size != 1:
        raise _UnknownError("not-scalar", f"{value.name} has {found.constant.size} elements")
    content = found.constant.reshape(-1)[0]
    if content.dtype.kind in "biu":
        return int(content)
    return float(content)


def _text(tree: Tree) -> str:
    match tree:
        case Call(name=name, arguments=arguments, infix=False):
            return f"{name}({', '.join(map(_text, arguments))})"
        case Call(name=name, arguments=(left, right)):
            return f"{_text(left)} {name} {_text(right)}"
        case Call(name=name, arguments=(operand,)):
            return f"{'-' if name == 'neg' else name + ' '}{_text(operand)}"
        case Name(name=name):
            return name
        case Sequence(items=items):
            return f"[{', '.join(map(_text, items))}]"
        case Number(value=value):
            return f"{value:g}"
        case String(value=value):
            return repr(value)
        case _:
            return "?"


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def _described(value: Value) -> str:
    dtype = DTYPE_NAMES.get(value.dtype or 0, "unknown")
    shape = "of unknown shape" if value.shape is None else f"[{', '.join(map(str, value.shape))}]"
    return f"{dtype} {shape}"


@dataclass(frozen=True)
class _Function:
    arguments: int
    code: str
    run: Callable[..., Any]


def _value(given: Any, what: str) -> Value:
    if not isinstance(given, Value):
        raise _UnknownError("condition", f"{what} needs a tensor")
    return given


def _shape(scope: Scope, given: Any) -> tuple[Dim, ...]:
    value = _value(given, "shape")
    shape = value.shape if value.shape is not None else root(value).shape
    if shape is None:
        raise _UnknownError("unknown-shape", f"the rank of {value.name} is unknown")
    return shape


def _dtype(scope: Scope, given: Any) -> Dtype:
    value = _value(given, "dtype")
    dtype = value.dtype or root(value).dtype
    if not dtype:
        raise _UnknownError("unknown-type", f"the type of {value.name} is unknown")
    return Dtype(dtype)


def _dim(scope: Scope, given: Any, axis: int) -> Dim:
    shape = _shape(scope, given)
    if not -len(shape) <= axis < len(shape):
        raise _UnknownError("rank", f"{given.name} has rank {len(shape)} and no axis {axis}")
    size: Dim = shape[axis]
    return size


def _content(scope: Scope, given: Any) -> Any:
    if not isinstance(given, Value):
        return given
    found = root(given)
    if found.constant is None:
        raise _UnknownError("not-constant", f"the contents of {given.name} are not known before the model runs")
    if found.constant.size == 1:
        return _number(given)
    return [_shorten(item) for item in found.constant.reshape(-1)]


def _shorten(item: Any) -> Any:
    return int(item) if item.dtype.kind in "biu" else float(item)


def _is_scalar(scope: Scope, given: Any) -> bool:
    return isinstance(given, int | float) or all(size == 1 for size in _shape(scope, given))


def _last_axis(scope: Scope, given: Any, axis: Any) -> bool:
    axes = axis if isinstance(axis, list | tuple) else [_content(scope, axis)]
    axes = axes[0] if len(axes) == 1 and isinstance(axes[0], list) else axes
    if list(axes) == [-1]:
        return True
    rank = len(_shape(scope, given))
    return [int(number) % max(rank, 1) for number in axes] == [rank - 1]


def _broadcastable(scope: Scope, given: Any, target: Any) -> bool:
    small, large = _shape(scope, given), _shape(scope, target)
    if len(small) > len(large):
        return False
    return all(a == 1 or a == b for a, b in zip(reversed(small), reversed(large), strict=False))


def _item(items: Any, position: int) -> Any:
    found = items if isinstance(items, list | tuple) else [items]
    if not -len(found) <= position < len(found):
        raise _UnknownError("attribute", f"a list of {len(found)} has no item {position}")
    return found[position]


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


FUNCTIONS: dict[str, _Function] = {
    "is_scalar": _Function(1, "not-scalar", _is_scalar),
    "is_constant": _Function(1, "not-constant", lambda scope, v: not isinstance(v, Value) or root(v).is_constant),
    "is_absent": _Function(1, "present", lambda scope, v: v is None),
    "is_present": _Function(1, "absent", lambda scope, v: v is not None),
    "is_output": _Function(1, "not-output", lambda scope, v: _value(v, "is_output").is_output),
    "not_output": _Function(1, "inner-value-is-output", lambda scope, v: not _value(v, "not_output").is_output),
    "is_float": _Function(
        1, "type", lambda scope, v: str(_dtype(scope, v)) in ("float16", "bfloat16", "float32", "float64")
    ),
    "rank": _Function(1, "rank", lambda scope, v: len(_shape(scope, v))),
    "dtype": _Function(1, "type", _dtype),
    "shape": _Function(1, "shape", _shape),
    "dim": _Function(2, "size", _dim),
    "size": _Function(1, "size", lambda scope, v: product(_shape(scope, v))),
    "value": _Function(1, "constant-value", _content),
    "count": _Function(1, "hole-size", lambda scope, nodes: len(nodes)),
    "operator": _Function(1, "operator", lambda scope, v: getattr(root(v).producer, "qualified_op", "none")),
    "same_shape": _Function(2, "shape", lambda scope, a, b: _shape(scope, a) == _shape(scope, b)),
    "same_type": _Function(2, "type", lambda scope, a, b: _dtype(scope, a) == _dtype(scope, b)),
    "broadcastable": _Function(2, "shape", _broadcastable),
    "last_axis": _Function(2, "reduction-axis", _last_axis),
    "item": _Function(2, "attribute", lambda scope, items, position: _item(items, position)),
    "uses": _Function(1, "uses", lambda scope, v: len(_value(v, "uses").consumers)),
    "widens": _Function(2, "loses-precision", lambda scope, v, wide: _widens(_dtype(scope, v), _dtype(scope, wide))),
    "abs": _Function(1, "condition", lambda scope, a: abs(_plain(_number(a)))),
    "min": _Function(2, "condition", lambda scope, a, b: min(_plain(_number(a)), _plain(_number(b)))),
    "max": _Function(2, "condition", lambda scope, a, b: max(_plain(_number(a)), _plain(_number(b)))),
}
"""Functions of the condition language, with the code of a condition that they fail."""
