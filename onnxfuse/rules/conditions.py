"""Conditions over what a pattern bound: ``rank(weight) == 1``, ``dtype(x) in [float16, bfloat16]``.

A condition that does not hold gives a code and a sentence with the figures at hand.  A condition about a name that
the match left out (an optional node, an alternative not taken) holds: it has nothing to say.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxfuse.graph.dims import Dim, dim
from onnxfuse.graph.model import Value, root
from onnxfuse.rules.classes import CLASSES
from onnxfuse.rules.functions import FUNCTIONS, Dtype, Scope, UnknownError, content_number, plain_number, shown
from onnxfuse.rules.operators import DTYPE_NAMES, DTYPES, attribute, operator_key, operator_names
from onnxfuse.rules.pattern import suggestion
from onnxfuse.rules.syntax import Call, Name, Number, Sequence, String, TextError, Tree


@dataclass(frozen=True)
class Condition:
    """A test as a rule states it; empty ``code`` and ``message`` mean the built-in ones."""

    text: str
    tree: Tree
    code: str = ""
    message: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Failure:
    """Why a condition does not hold."""

    code: str
    message: str
    remedy: str = ""


class _LeftOutError(Exception):
    """The condition speaks of a name that the match did not bind."""


def holds(condition: Condition, scope: Scope) -> bool:
    """Whether the condition holds."""
    try:
        return bool(_evaluate(condition.tree, scope, None))
    except _LeftOutError:
        return True
    except UnknownError:
        return False


def check(condition: Condition, scope: Scope) -> Failure | None:
    """None where the condition holds, else why not."""
    if holds(condition, scope):
        return None
    figures: dict[str, str] = {}
    try:
        _evaluate(condition.tree, scope, figures)
    except UnknownError as unknown:
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
        found = _evaluate(tree, scope, None)
        return content_number(found) if isinstance(found, Value) else found
    except (UnknownError, _LeftOutError) as error:
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
                if tree.name in ("is_absent", "is_present", "count") and not isinstance(tree.arguments[0], Name):
                    raise TextError(f"{tree.name}(...) takes a name.", tree.start, tree.end)
                if tree.name in ("read_by", "made_by"):
                    _verify_operators(tree.arguments[1])
            for argument in tree.arguments:
                verify(argument, names)


def _verify_operators(tree: Tree) -> None:
    """Check the names of a list of operators: one that is misspelled would be no node's."""
    for item in tree.items if isinstance(tree, Sequence) else ():
        if isinstance(item, String) and item.value not in CLASSES and operator_key(item.value) is None:
            close = suggestion(item.value, [*CLASSES, *operator_names()])
            raise TextError(
                f"Unknown operator or class {item.value}.", item.start, item.end,
                f"Did you mean {close}?" if close else f"The classes are {', '.join(CLASSES)}.",
            )


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


def _evaluate(tree: Tree, scope: Scope, figures: dict[str, str] | None) -> Any:
    match tree:
        case Number():
            return tree.figure
        case String(value=value):
            return value
        case Sequence(items=items):
            return tree.numbers or [_evaluate(item, scope, figures) for item in items]
        case Name(name=name):
            return _name(name, scope, figures)
        case Call(infix=True):
            return _operator(tree, scope, figures)
        case Call(name="is_absent" | "is_present", arguments=(Name(name=name),)):
            absent = scope.bindings.get(name) is None
            return absent if tree.name == "is_absent" else not absent
        case Call(name="count", arguments=(Name(name=name),)):
            count = len(scope.holes.get(name, ()))
            if figures is not None:
                figures[f"count({name})"] = str(count)
            return count
        case Call():
            arguments = [_evaluate(argument, scope, None) for argument in tree.arguments]
            result = FUNCTIONS[tree.name].run(scope, *arguments)
            if figures is None:
                return result
            if not isinstance(result, bool):
                figures[_text(tree)] = shown(result)
            elif not result:
                for argument, given in zip(tree.arguments, arguments, strict=True):
                    if isinstance(given, Value):
                        figures[_text(argument)] = _described(given)
            return result


def _name(name: str, scope: Scope, figures: dict[str, str] | None) -> Any:
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
            raise UnknownError("attribute", f"no node computes {base}")
        found = attribute(producer, attribute_name, scope.graph)
        if found is None:
            raise UnknownError("attribute", f"{producer.qualified_op} has no attribute {attribute_name}")
    if figures is not None and not isinstance(found, Value):
        figures[name] = shown(found)
    return found


_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "<": lambda a, b: a < b, "<=": lambda a, b: a <= b, ">": lambda a, b: a > b, ">=": lambda a, b: a >= b,
}
_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b,
    "//": lambda a, b: a // b, "%": lambda a, b: a % b,
}


def _operator(call: Call, scope: Scope, figures: dict[str, str] | None) -> Any:
    name = call.name
    if name in ("and", "or"):
        left = bool(_evaluate(call.arguments[0], scope, figures))
        return left if left == (name == "or") else bool(_evaluate(call.arguments[1], scope, figures))
    if name == "not":
        return not _evaluate(call.arguments[0], scope, figures)
    operands = [_evaluate(argument, scope, figures) for argument in call.arguments]
    if name == "neg":
        return -plain_number(content_number(operands[0]))
    left, right = operands
    if isinstance(left, Value) != isinstance(right, Value):
        # a constant beside a figure counts as its number, and the message shows it
        for position, operand in enumerate(operands):
            if isinstance(operand, Value):
                operands[position] = content_number(operand)
                if figures is not None:
                    figures[_text(call.arguments[position])] = shown(operands[position])
        left, right = operands
    if name in ("in", "not in"):
        if not isinstance(right, list | tuple):
            raise UnknownError("condition", f"{shown(right)} is no list")
        return any(_equal(left, item) for item in right) == (name == "in")
    if name in ("==", "!="):
        return _equal(left, right) == (name == "==")
    left, right = (content_number(operand) for operand in (left, right))
    if name in _ORDER:
        return bool(_ORDER[name](plain_number(left), plain_number(right)))
    if name == "/":
        divisor = plain_number(right)
        if not divisor:
            raise UnknownError("condition", "it divides by zero")
        return plain_number(left) / divisor
    if name in ("//", "%") and right == 0:
        raise UnknownError("condition", "it divides by zero")
    sizes = isinstance(left, Dim | int) and isinstance(right, Dim | int)
    a, b = (dim(left), dim(right)) if sizes else (plain_number(left), plain_number(right))
    return _ARITHMETIC[name](a, b)


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, Value) and isinstance(right, Value):
        return root(left) is root(right)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_equal, left, right))
    if isinstance(left, float) or isinstance(right, float):
        a, b = float(plain_number(left)), float(plain_number(right))
        return bool(np.isclose(a, b, rtol=1e-3, atol=0, equal_nan=True))
    return bool(left == right)


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


def _described(value: Value) -> str:
    dtype = DTYPE_NAMES.get(value.dtype or 0, "unknown")
    shape = "of unknown shape" if value.shape is None else f"[{', '.join(map(str, value.shape))}]"
    return f"{dtype} {shape}"
