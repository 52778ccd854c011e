"""A user's own kernel in a fuse rule: its launch sizes as expressions over the pattern's values."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from math import prod

from onnxfuse.rules import syntax
from onnxfuse.rules.pattern import suggestion
from onnxfuse.rules.syntax import Call, Name, Number, TextError, Tree

_FUNCTIONS = {"dim": 2, "size": 1, "ceil": 2, "min": 2, "max": 2}
_INFIX = ("+", "-", "*", "//", "%")
_COMPUTED: dict[str, Callable[[int, int], int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod,
    "ceil": lambda a, b: -(-a // b), "min": min, "max": max,
}
_DIVIDING = frozenset({"//", "%", "ceil"})

_COUNTED = {"grid": "blocks", "block": "threads of a block", "shared": "bytes of shared memory"}

MOST_THREADS = 1024
"""Threads of a block."""

_LIMITS = {"grid": (2**31 - 1, 65_535, 65_535), "block": (1024, 1024, 64), "shared": (227 * 1024,)}
"""The most of each axis; of shared memory what the largest GPU's blocks have."""


def parse_size(text: str, names: Collection[str]) -> Tree:
    """A size in a launch description, such as ``ceil(size(x), 256)``; ``names`` are the kernel's inputs and outputs.

    Raises:
        TextError: the text is no such size.
    """
    tree = syntax.parse_condition(text)
    _check(tree, names)
    return tree


def _check(tree: Tree, names: Collection[str]) -> None:
    match tree:
        case Number(value=value) if value.is_integer():
            return
        case Call(name=name, infix=True) if name in _INFIX:
            for argument in tree.arguments:
                _check(argument, names)
        case Call(name=name, infix=False) if name in _FUNCTIONS:
            if len(tree.arguments) != _FUNCTIONS[name]:
                raise TextError(
                    f"{name}(...) takes {_FUNCTIONS[name]} arguments, not {len(tree.arguments)}.", tree.start, tree.end
                )
            if name in ("dim", "size"):
                asked = tree.arguments[0]
                if not isinstance(asked, Name) or asked.name not in names:
                    raise TextError(
                        f"{name}(...) asks about one of the kernel's inputs and outputs.", asked.start, asked.end,
                        f"They are {', '.join(sorted(names))}.",
                    )
                if name == "dim" and not (
                    isinstance(tree.arguments[1], Number) and tree.arguments[1].value.is_integer()
                ):
                    raise TextError("An axis is an integer.", tree.arguments[1].start, tree.arguments[1].end)
            else:
                for argument in tree.arguments:
                    _check(argument, names)
        case Call(name=name, infix=False):
            close = suggestion(name, _FUNCTIONS)
            raise TextError(
                f"Unknown function {name} in a launch size.", tree.start, tree.start + len(name),
                f"Did you mean {close}?" if close else f"There are {', '.join(_FUNCTIONS)}.",
            )
        case _:
            raise TextError("A launch size is made of integers, dim(...), size(...), ceil(...), min, max and "
                            "+ - * // %.", tree.start, tree.end)


def check_limits(key: str, trees: Sequence[Tree]) -> None:
    """What of a launch is known before it is made, against what CUDA allows on every GPU.

    Args:
        key: "grid", "block" or "shared"; trees: its sizes, of which those that are constants are looked at.

    Raises:
        TextError: no launch can have a size, or blocks have too many threads.
    """
    sizes = [constant(tree) for tree in trees]
    for axis, (tree, size, most) in enumerate(zip(trees, sizes, _LIMITS[key], strict=False)):
        if size is not None and not (key != "shared") <= size <= most:
            along = "" if key == "shared" else f" along {'xyz'[axis]}"
            raise TextError(f"No launch has {size:,} {_COUNTED[key]}{along}.", tree.start, tree.end,
                            f"There may be {'0' if key == 'shared' else '1'} to {most:,}.")
    threads = prod(size for size in sizes if size is not None)
    if key == "block" and threads > MOST_THREADS:
        raise TextError(f"A block cannot have {threads:,} threads.", trees[0].start, trees[0].end,
                        f"It has {MOST_THREADS:,} at most, along all axes together.")


def constant(tree: Tree) -> int | None:
    """A size from ``parse_size`` that depends on no tensor; None where it does."""
    match tree:
        case Number(value=value):
            return int(value)
        case Call(name=name, arguments=(left, right)) if name in _COMPUTED:
            a, b = constant(left), constant(right)
            return None if a is None or b is None or (b == 0 and name in _DIVIDING) else _COMPUTED[name](a, b)
        case _:
            return None


def axes(tree: Tree) -> Iterator[tuple[str, int]]:
    """The values and axes that a size from ``parse_size`` asks about by ``dim``."""
    match tree:
        case Call(name="dim", arguments=(Name(name=name), Number(value=axis))):
            yield name, int(axis)
        case Call(arguments=arguments):
            for argument in arguments:
                yield from axes(argument)


def postfix(tree: Tree, atom: Callable[[str, int | None], str]) -> str:
    """The size in the notation of launch plans (``lowering.launch``).

    Args:
        tree: from ``parse_size``.
        atom: the plan's expression for one axis of a value of the pattern, or for all its elements (None).
    """
    match tree:
        case Number(value=value):
            return str(int(value))
        case Call(name="size", arguments=(Name(name=name),)):
            return atom(name, None)
        case Call(name="dim", arguments=(Name(name=name), Number(value=axis))):
            return atom(name, int(axis))
        case Call(name=name, arguments=(left, right)):
            return f"{postfix(left, atom)} {postfix(right, atom)} {name}"
        case _:
            raise AssertionError(f"not checked: {tree}")
