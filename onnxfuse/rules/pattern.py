"""Patterns as the matcher walks them: a DAG of operators, names, literals, alternatives and holes."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from onnxfuse.rules.operators import COMMUTATIVE, OperatorKey


class TooWideError(Exception):
    """A pattern's alternatives are more than can be walked."""


@dataclass
class Budget:
    """Work on a pattern that is left: alternatives of alternatives make it grow without end."""

    left: int

    def spend(self) -> None:
        """One more step.

        Raises:
            TooWideError: none is left.
        """
        self.left -= 1
        if self.left < 0:
            raise TooWideError


@dataclass(frozen=True, eq=False)
class Free:
    """A value that the pattern takes in; ``optional`` where the input may be absent."""

    name: str
    optional: bool = False


@dataclass(frozen=True, eq=False)
class Literal:
    """A constant of one element of this value."""

    value: float


@dataclass(frozen=True, eq=False)
class Capture:
    """A keyword's value, kept under a name."""

    name: str
    optional: bool = False


@dataclass(frozen=True, eq=False)
class Given:
    """A keyword's value, stated: numbers, a list of numbers, a string, or an element type."""

    value: float | str | tuple[float, ...]
    text: str


@dataclass(frozen=True, eq=False)
class Op:
    """A node of one of ``keys``.  ``orders`` are the orders in which its inputs may stand; ``size`` counts nodes."""

    keys: frozenset[OperatorKey]
    label: str
    arguments: tuple[Pattern, ...]
    keywords: tuple[tuple[str, Capture | Given | Pattern], ...]
    rest: bool
    orders: tuple[tuple[int, ...], ...]
    size: int


@dataclass(frozen=True, eq=False)
class Output:
    """Output ``index`` of one node."""

    op: Op
    index: int


@dataclass(frozen=True, eq=False)
class Maybe:
    """The operator, or its first input where it is not there."""

    op: Pattern
    instead: Pattern


@dataclass(frozen=True, eq=False)
class AnyOf:
    alternatives: tuple[Pattern, ...]


@dataclass(frozen=True, eq=False)
class Hole:
    """A connected pointwise region that reads, among others, values matching ``arguments``."""

    name: str
    arguments: tuple[Pattern, ...]


@dataclass(frozen=True, eq=False)
class Named:
    """A statement's value: the same wherever the name stands."""

    name: str
    pattern: Pattern


Pattern = Free | Literal | Op | Output | Maybe | AnyOf | Hole | Named


@dataclass(frozen=True, eq=False)
class CompiledPattern:
    """A rule's pattern.

    Attributes:
        roots: statements' values that no other statement reads, the last statement's first: where matching starts.
        results: names of the values that others may read, in order; optional ones are results only where they are
            read outside.
        optional_results: which of them are optional.
        names: every name that a match binds: inputs, statements, captured keywords.
        inputs: the names among them that the pattern takes in.
        holes: names of holes.
        size: nodes of the largest match, optional ones left out.
    """

    roots: tuple[Named, ...]
    results: tuple[str, ...]
    optional_results: frozenset[str]
    names: frozenset[str]
    inputs: tuple[str, ...]
    holes: tuple[str, ...]
    size: int


def make_op(
    keys: frozenset[OperatorKey],
    label: str,
    arguments: tuple[Pattern, ...],
    keywords: tuple[tuple[str, Capture | Given | Pattern], ...] = (),
    rest: bool = False,
    budget: Budget | None = None,
) -> Op:
    """A node pattern; inputs of commutative operators may stand in any order.

    Raises:
        TooWideError: the budget does not suffice.
    """
    orders: tuple[tuple[int, ...], ...] = (tuple(range(len(arguments))),)
    if 1 < len(arguments) <= 3 and not rest and all(domain == "" and op in COMMUTATIVE for domain, op in keys):
        orders = tuple(itertools.permutations(range(len(arguments))))
        if all(argument is arguments[0] for argument in arguments):
            orders = orders[:1]
    op = Op(keys, label, arguments, keywords, rest, orders, 0)
    return Op(keys, label, arguments, keywords, rest, orders, required_nodes([op], budget))


def required_nodes(patterns: Iterable[Pattern], budget: Budget | None = None) -> int:
    """Nodes of the largest match of these patterns, optional nodes left out; a named part counts once.

    Raises:
        TooWideError: the budget does not suffice.
    """
    seen: set[int] = set()

    def count(pattern: Pattern) -> int:
        if budget is not None:
            budget.spend()
        match pattern:
            case Named(pattern=inner):
                if id(pattern) in seen:
                    return 0
                seen.add(id(pattern))
                return count(inner)
            case Op(arguments=arguments):
                return 1 + sum(count(argument) for argument in arguments)
            case Output(op=op):
                if id(op) in seen:
                    return 0
                seen.add(id(op))
                return count(op)
            case Maybe(instead=instead):
                return count(instead)
            case AnyOf(alternatives=alternatives):
                before = set(seen)
                counts = []
                for alternative in alternatives:
                    seen.clear()
                    seen.update(before)
                    counts.append(count(alternative))
                return max(counts)
            case Hole(arguments=arguments):
                return sum(count(argument) for argument in arguments)
            case _:
                return 0

    return sum(count(pattern) for pattern in patterns)


@lru_cache(maxsize=10_000)
def root_keys(pattern: Pattern) -> frozenset[OperatorKey] | None:
    """Operators that the node computing this pattern's value may have; None where it may be anything."""
    match pattern:
        case Named(pattern=inner):
            return root_keys(inner)
        case Op(keys=keys):
            return keys
        case Output(op=op):
            return op.keys
        case Maybe(op=inner, instead=instead):
            parts: tuple[Pattern, ...] = (inner, instead)
        case AnyOf(alternatives=alternatives):
            parts = alternatives
        case _:
            return None
    found = [root_keys(part) for part in parts]
    return None if any(keys is None for keys in found) else frozenset().union(*(keys for keys in found if keys))


NUMBER: OperatorKey = ("", "")
"""Stands for a constant of one element where operators are listed."""


@lru_cache(maxsize=1000)
def operands_of(pattern: Pattern) -> Mapping[OperatorKey, list[list[frozenset[OperatorKey]]]]:
    """By the operator that computes a pattern's value, for each way to compute it: sets of operators, one of each of
    which computes an operand (``NUMBER``: a constant of one element is one)."""
    found: dict[OperatorKey, list[list[frozenset[OperatorKey]]]] = {}
    waiting = [pattern]
    while waiting:
        match waiting.pop():
            case Named(pattern=inner) | Output(op=inner):
                waiting.append(inner)
            case Maybe(op=inner, instead=instead):
                waiting += [inner, instead]
            case AnyOf(alternatives=alternatives):
                waiting += alternatives
            case Op(keys=keys, arguments=arguments):
                needs = [frozenset([NUMBER]) if isinstance(each, Literal) else root_keys(each) for each in arguments]
                for key in keys:
                    found.setdefault(key, []).append([each for each in needs if each is not None])
    return found


@lru_cache(maxsize=1000)
def operators_in(pattern: CompiledPattern) -> frozenset[OperatorKey]:
    """Operators that a pattern's nodes may have."""
    found: set[OperatorKey] = set()
    waiting: list[Pattern] = list(pattern.roots)
    seen: set[int] = set()
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        match part:
            case Op(keys=keys, arguments=arguments, keywords=keywords):
                found |= keys
                waiting += [*arguments, *(given for _, given in keywords if not isinstance(given, Capture | Given))]
            case Named(pattern=inner):
                waiting.append(inner)
            case Output(op=op):
                waiting.append(op)
            case Maybe(op=inner, instead=instead):
                waiting += [inner, instead]
            case AnyOf(alternatives=parts) | Hole(arguments=parts):
                waiting += parts
    return frozenset(found)


_LONGEST = 200
"""Letters of a name that are compared with others."""


def suggestion(name: str, choices: Iterable[str]) -> str | None:
    """The choice that is written most like ``name``, or None where none is close."""
    name = name[:_LONGEST]
    by_lower = {choice.lower(): choice for choice in choices}
    if name.lower() in by_lower:
        return by_lower[name.lower()]
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[close[0]] if close else None
