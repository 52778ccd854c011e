"""Sizes of tensors as integer polynomials over named symbols.

A ``Dim`` is kept in one canonical form, so that two sizes are provably equal exactly when they compare equal:
``batch * 12 * 64 == batch * 768``.  What is no polynomial (a floor division that leaves a remainder, a minimum, the
size that two broadcast sizes have together) is an opaque ``Atom`` whose operands are again sizes.  Symbols stand
for sizes and are never negative.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from math import gcd
from operator import mul
from typing import Union

OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "min": min,
    "max": max,
    "bcast": lambda a, b: b if a == 1 else a,
}
"""What an atom can compute; ``bcast`` is the size that two broadcast sizes have together."""


@dataclass(frozen=True, eq=False)
class Atom:
    """A symbol (``kind`` is "symbol", ``name`` its name) or one of ``OPERATIONS`` over two sizes."""

    kind: str
    name: str = ""
    operands: tuple[Dim, ...] = ()
    key: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.kind == "symbol":
            key = self.name
        elif self.kind in ("min", "max", "bcast"):
            key = f"{self.kind}({', '.join(map(str, self.operands))})"
        else:
            key = f"({self.operands[0]} {self.kind} {self.operands[1]})"
        object.__setattr__(self, "key", key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Atom) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __str__(self) -> str:
        return self.key


Monomial = tuple[tuple[Atom, int], ...]
DimLike = Union["Dim", int]


def dim(value: DimLike) -> Dim:
    """A size from an integer, or the size itself."""
    return value if isinstance(value, Dim) else Dim({(): int(value)})


def symbol(name: str) -> Dim:
    """The size that ``name`` stands for."""
    return Dim({((Atom("symbol", name), 1),): 1})


def _apply(kind: str, a: Dim, b: Dim) -> Dim:
    if a.value is not None and b.value is not None and not (kind in "//%" and b.value == 0):
        return dim(OPERATIONS[kind](a.value, b.value))
    return Dim({((Atom(kind, operands=(a, b)), 1),): 1})


def minimum(a: DimLike, b: DimLike) -> Dim:
    """The smaller of two sizes."""
    first, second = sorted((dim(a), dim(b)), key=str)
    return first if first == second else _apply("min", first, second)


def maximum(a: DimLike, b: DimLike) -> Dim:
    """The larger of two sizes."""
    first, second = sorted((dim(a), dim(b)), key=str)
    return first if first == second else _apply("max", first, second)


def broadcast(a: DimLike, b: DimLike) -> Dim:
    """The size of an axis where sizes ``a`` and ``b`` meet under NumPy's broadcasting."""
    a, b = dim(a), dim(b)
    if a == b or b.value == 1:
        return a
    if a.value == 1:
        return b
    if a.value is not None:
        return a
    if b.value is not None:
        return b
    first, second = sorted((a, b), key=str)
    return _apply("bcast", first, second)


def product(sizes: tuple[Dim, ...] | list[Dim]) -> Dim:
    """The number of elements of a tensor of these sizes."""
    return reduce(mul, sizes, dim(1))


class Dim:
    """A size: an integer, a symbol, or an expression over them.  Immutable and hashable."""

    __slots__ = ("_hash", "_text", "terms")

    def __init__(self, terms: Mapping[Monomial, int]) -> None:
        self.terms: dict[Monomial, int] = {m: c for m, c in sorted(terms.items(), key=_order) if c}
        self._hash: int | None = None
        self._text: str | None = None

    @property
    def value(self) -> int | None:
        """The integer that this size is, or None where it depends on a symbol."""
        if not self.terms:
            return 0
        if len(self.terms) == 1 and () in self.terms:
            return self.terms[()]
        return None

    @property
    def symbols(self) -> frozenset[str]:
        """Names of all symbols in the expression."""
        names: set[str] = set()
        for monomial in self.terms:
            for atom, _ in monomial:
                if atom.kind == "symbol":
                    names.add(atom.name)
                for operand in atom.operands:
                    names |= operand.symbols
        return frozenset(names)

    def __add__(self, other: DimLike) -> Dim:
        terms = dict(self.terms)
        for monomial, factor in dim(other).terms.items():
            terms[monomial] = terms.get(monomial, 0) + factor
        return Dim(terms)

    def __sub__(self, other: DimLike) -> Dim:
        return self + dim(other) * -1

    def __mul__(self, other: DimLike) -> Dim:
        other = dim(other)
        terms: dict[Monomial, int] = {}
        for m1, c1 in self.terms.items():
            for m2, c2 in other.terms.items():
                powers = dict(m1)
                for atom, power in m2:
                    powers[atom] = powers.get(atom, 0) + power
                monomial = tuple(sorted(powers.items(), key=lambda item: item[0].key))
                terms[monomial] = terms.get(monomial, 0) + c1 * c2
        return Dim(terms)

    __radd__ = __add__
    __rmul__ = __mul__

    def __rsub__(self, other: DimLike) -> Dim:
        return dim(other) - self

    def __floordiv__(self, other: DimLike) -> Dim:
        other = dim(other)
        exact = self.divide(other)
        return exact if exact is not None else _apply("//", self, other)

    def __mod__(self, other: DimLike) -> Dim:
        other = dim(other)
        return dim(0) if self.divide(other) is not None else _apply("%", self, other)

    def divide(self, other: DimLike) -> Dim | None:
        """The quotient where ``other``, a single term, provably divides this size without remainder."""
        other = dim(other)
        if len(other.terms) != 1:
            return dim(1) if self == other and other.terms else None
        ((divisor, coefficient),) = other.terms.items()
        terms: dict[Monomial, int] = {}
        for monomial, factor in self.terms.items():
            powers = dict(monomial)
            if factor % coefficient:
                return None
            for atom, power in divisor:
                if powers.get(atom, 0) < power:
                    return None
                powers[atom] -= power
            terms[tuple((atom, power) for atom, power in powers.items() if power)] = factor // coefficient
        return Dim(terms)

    def multiple_of(self) -> int:
        """The largest integer that provably divides this size; 0 for the size 0."""
        return gcd(*self.terms.values()) if self.terms else 0

    def substitute(self, values: Mapping[str, DimLike]) -> Dim:
        """The size with symbols replaced by other sizes or integers."""
        if not self.symbols & values.keys():
            return self
        total = dim(0)
        for monomial, factor in self.terms.items():
            term = dim(factor)
            for atom, power in monomial:
                if atom.kind == "symbol":
                    part = dim(values.get(atom.name, symbol(atom.name)))
                else:
                    a, b = (operand.substitute(values) for operand in atom.operands)
                    part = _SYMBOLIC[atom.kind](a, b)
                for _ in range(power):
                    term = term * part
            total = total + term
        return total

    def evaluate(self, values: Mapping[str, int]) -> int:
        """The integer that this size is for given symbols.

        Raises:
            KeyError: a symbol has no value.
        """
        total = 0
        for monomial, factor in self.terms.items():
            for atom, power in monomial:
                if atom.kind == "symbol":
                    part = values[atom.name]
                else:
                    part = OPERATIONS[atom.kind](*(operand.evaluate(values) for operand in atom.operands))
                factor *= part**power
            total += factor
        return total

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int):
            return self.value == other
        return isinstance(other, Dim) and self.terms == other.terms

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(self.value) if self.value is not None else hash(str(self))
        return self._hash

    def __str__(self) -> str:
        if self._text is None:
            parts = []
            for monomial, factor in self.terms.items():
                factors = [atom.key if power == 1 else f"{atom.key}**{power}" for atom, power in monomial]
                if factor != 1 or not factors:
                    factors.insert(0, str(factor))
                parts.append("*".join(factors))
            self._text = " + ".join(parts).replace("+ -", "- ") or "0"
        return self._text

    def __repr__(self) -> str:
        return f"Dim({self})"


_SYMBOLIC: dict[str, Callable[[Dim, Dim], Dim]] = {
    "//": Dim.__floordiv__,
    "%": Dim.__mod__,
    "min": minimum,
    "max": maximum,
    "bcast": broadcast,
}


def _order(item: tuple[Monomial, int]) -> tuple[int, str]:
    monomial, _ = item
    return -sum(power for _, power in monomial), "*".join(f"{atom.key}^{power}" for atom, power in monomial)


def parse(text: str) -> Dim:
    """The size that an exporter wrote down: ``"batch"``, ``"s50 + 1"``, ``"Min(512, s50)"``.

    A text that is no arithmetic expression names one symbol.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        return _from_ast(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return symbol(text)


def _from_ast(tree: ast.expr) -> Dim:
    match tree:
        case ast.Constant(value=int(number)):
            return dim(number)
        case ast.Name(id=name):
            return symbol(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return dim(0) - _from_ast(operand)
        case ast.BinOp(left=left, op=operator, right=right):
            a, b = _from_ast(left), _from_ast(right)
            match operator:
                case ast.Add():
                    return a + b
                case ast.Sub():
                    return a - b
                case ast.Mult():
                    return a * b
                case ast.FloorDiv() if b != 0:
                    return a // b
                case ast.Mod() if b != 0:
                    return a % b
                case ast.Pow() if b.value is not None and 0 <= b.value <= 8:
                    return product([a] * b.value)
        case ast.Call(func=ast.Name(id="Min" | "min"), args=[left, right]):
            return minimum(_from_ast(left), _from_ast(right))
        case ast.Call(func=ast.Name(id="Max" | "max"), args=[left, right]):
            return maximum(_from_ast(left), _from_ast(right))
    raise ValueError(ast.dump(tree))
