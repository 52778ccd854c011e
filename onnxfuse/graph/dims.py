"""Sizes of tensors as integer polynomials over named symbols.

A ``Dim`` is kept in one canonical form, so that two sizes are provably equal exactly when they compare equal:
``batch * 12 * 64 == batch * 768``.  What is no polynomial (a floor division that leaves a remainder, a minimum, the
size that two broadcast sizes have together) is an opaque ``Atom`` whose operands are again sizes.  Symbols stand
for sizes and are never negative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from math import gcd
from operator import mul
from typing import Union

MOST_TERMS, MOST_POWER, LONGEST = 64, 16, 1000
"""Terms, degree and letters of a size that is followed (``is_followed``): those of real models have a few of each."""

MOST_PRODUCTS = 1 << 14
"""Terms that one multiplication may have to add up."""


class SizeTooLargeError(ArithmeticError):
    """A size has more terms than could be followed in bounded time."""


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
            left, right = (_as_factor(operand) for operand in self.operands)
            key = f"({left} {self.kind} {right})"
        object.__setattr__(self, "key", key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Atom) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __str__(self) -> str:
        return self.key


def _as_factor(size: Dim) -> str:
    """The text of a size as an operand of ``//`` or ``%``, in parentheses unless it is one number or atom."""
    ((monomial, factor), *others) = size.terms.items() or [((), 0)]
    single = not others and (not monomial or (factor == 1 and len(monomial) == 1 and monomial[0][1] == 1))
    return str(size) if single else f"({size})"


Monomial = tuple[tuple[Atom, int], ...]
DimLike = Union["Dim", int]


def dim(value: DimLike) -> Dim:
    """A size from an integer, or the size itself."""
    return value if isinstance(value, Dim) else _number(int(value))


@lru_cache(4096)
def _number(value: int) -> Dim:
    return Dim({(): value})


@lru_cache(4096)
def symbol(name: str) -> Dim:
    """The size that ``name`` stands for."""
    return Dim({((Atom("symbol", name), 1),): 1})


def _apply(kind: str, a: Dim, b: Dim) -> Dim:
    if a.value is not None and b.value is not None and not (kind in "//%" and b.value == 0):
        return dim(OPERATIONS[kind](a.value, b.value))
    return Dim({((Atom(kind, operands=(a, b)), 1),): 1})


def minimum(a: DimLike, b: DimLike) -> Dim:
    """The smaller of two sizes."""
    return _extreme("min", dim(a), dim(b))


def maximum(a: DimLike, b: DimLike) -> Dim:
    """The larger of two sizes."""
    return _extreme("max", dim(a), dim(b))


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
    if _is_capped(a, b):
        return b
    if _is_capped(b, a):
        return a
    return _chain("bcast", (*_operands("bcast", a), *_operands("bcast", b)))


def _is_capped(a: Dim, b: Dim) -> bool:
    """Whether ``a`` is the smaller of ``b`` and a number from 1 up.

    The two broadcast to ``b`` then: where the number is the smaller, it is 1 or it does not broadcast.
    """
    parts = _operands("min", a)
    return b in parts and all(part == b or (part.value or 0) >= 1 for part in parts)


def _extreme(kind: str, a: Dim, b: Dim) -> Dim:
    """The minimum or maximum; one operand alone where it is provably the one."""
    candidates: list[Dim] = []
    for new in (*_operands(kind, a), *_operands(kind, b)):
        if any(_at_least(new, old) if kind == "min" else _at_least(old, new) for old in candidates):
            continue
        candidates = [old for old in candidates if not (_at_least(old, new) if kind == "min" else _at_least(new, old))]
        candidates.append(new)
    return _chain(kind, candidates)


def _at_least(a: Dim, b: Dim) -> bool:
    """Whether ``a`` is provably no smaller than ``b``."""
    return (a - b).non_negative()


def _operands(kind: str, size: Dim) -> tuple[Dim, ...]:
    """The sizes that a nest of atoms of one kind joins; the size itself where it is no such nest."""
    if len(size.terms) == 1:
        ((monomial, factor),) = size.terms.items()
        if factor == 1 and len(monomial) == 1 and monomial[0][1] == 1 and monomial[0][0].kind == kind:
            return tuple(part for operand in monomial[0][0].operands for part in _operands(kind, operand))
    return (size,)


def _chain(kind: str, sizes: Iterable[Dim]) -> Dim:
    """Join sizes by an associative, commutative, idempotent operation, in one fixed order."""
    first, *others = sorted(set(sizes), key=str)
    for other in others:
        first = _apply(kind, first, other)
    return first


def product(sizes: Iterable[Dim]) -> Dim:
    """The number of elements of a tensor of these sizes."""
    return _product(tuple(sizes))


@lru_cache(4096)
def _product(sizes: tuple[Dim, ...]) -> Dim:
    """Few shapes come again and again."""
    return reduce(mul, sizes, dim(1))


def cofactor(term: tuple[Monomial, int], name: str) -> Dim:
    """A term of a size over a symbol that is in it."""
    monomial, factor = term
    left = ((atom, power - (atom.key == name)) for atom, power in monomial)
    return Dim({tuple(part for part in left if part[1]): factor}, ordered=True)


class Dim:
    """A size: an integer, a symbol, or an expression over them.  Immutable and hashable."""

    __slots__ = ("_hash", "_symbols", "_text", "terms", "value")

    def __init__(self, terms: Mapping[Monomial, int], *, ordered: bool = False) -> None:
        if not ordered:  # else they are taken over as they are, none of them zero
            terms = {m: c for m, c in (terms.items() if len(terms) < 2 else sorted(terms.items(), key=_order)) if c}
        self.terms: Mapping[Monomial, int] = terms
        self.value: int | None = None if len(terms) > 1 else terms.get((), None if terms else 0)
        """The integer that this size is, or None where it depends on a symbol."""
        self._hash: int | None = None
        self._text: str | None = None
        self._symbols: frozenset[str] | None = None

    @property
    def symbols(self) -> frozenset[str]:
        """Names of all symbols in the expression."""
        if self._symbols is None:
            atoms = [atom for monomial in self.terms for atom, _ in monomial]
            own = (atom.name for atom in atoms if atom.kind == "symbol")
            self._symbols = frozenset(own).union(*(each.symbols for atom in atoms for each in atom.operands))
        return self._symbols

    def __add__(self, other: DimLike) -> Dim:
        other = dim(other)
        if not other.terms:
            return self
        if not self.terms:
            return other
        if other.value is not None:
            return self._plus(other.value) if self.value is None else dim(self.value + other.value)
        if self.value is not None:
            return other._plus(self.value)
        terms = dict(self.terms)
        for monomial, factor in other.terms.items():
            terms[monomial] = terms.get(monomial, 0) + factor
        return Dim(terms)

    def __sub__(self, other: DimLike) -> Dim:
        other = dim(other)
        if self.value is not None and other.value is not None:
            return _number(self.value - other.value)
        return self + -other if other.terms else self

    def __mul__(self, other: DimLike) -> Dim:
        """The product.

        Raises:
            SizeTooLargeError: it may have too many terms.
        """
        other = dim(other)
        if other.value is not None:
            return self._times(other.value)
        if self.value is not None:
            return other._times(self.value)
        if len(self.terms) * len(other.terms) > MOST_PRODUCTS:
            raise SizeTooLargeError(f"a product of sizes of {len(self.terms)} and {len(other.terms)} terms")
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
        whole, rest = self._split(other)
        return whole if not rest.terms else whole + _apply("//", rest, other)

    def __mod__(self, other: DimLike) -> Dim:
        other = dim(other)
        _, rest = self._split(other)
        return rest if not rest.terms else _apply("%", rest, other)

    def __neg__(self) -> Dim:
        return self._times(-1)

    def _plus(self, number: int) -> Dim:
        terms = dict(self.terms)
        number += terms.pop((), 0)
        return Dim({**terms, (): number} if number else terms, ordered=True)  # a number is the last of the terms

    def _times(self, factor: int) -> Dim:
        if factor == 1:
            return self
        if self.value is not None:
            return _number(self.value * factor)
        return Dim({m: c * factor for m, c in self.terms.items()} if factor else {}, ordered=True)

    def _split(self, other: Dim) -> tuple[Dim, Dim]:
        """Sizes (q, r) with ``self == q * other + r``, as much of it in q as provably divides."""
        if self == other and other.terms:
            return dim(1), dim(0)
        if len(other.terms) != 1:
            return dim(0), self
        if other.value is not None:
            parts = {monomial: divmod(factor, other.value) for monomial, factor in self.terms.items()}
            return Dim({m: part[0] for m, part in parts.items()}), Dim({m: part[1] for m, part in parts.items()})
        whole, rest = dim(0), dim(0)
        for monomial, factor in self.terms.items():
            term = Dim({monomial: factor})
            quotient = term.divide(other)
            whole, rest = (whole, rest + term) if quotient is None else (whole + quotient, rest)
        return whole, rest

    def non_negative(self) -> bool:
        """Whether the size is provably never below zero, symbols being sizes; False where that is not known."""
        if all(factor > 0 and _non_negative(monomial) for monomial, factor in self.terms.items()):
            return True
        # A minimum is at most, a maximum at least, each of its operands.
        for monomial, factor in self.terms.items():
            if len(monomial) == 1 and monomial[0][1] == 1 and monomial[0][0].kind == ("min" if factor < 0 else "max"):
                rest = self - Dim({monomial: factor})
                if any((rest + operand * factor).non_negative() for operand in monomial[0][0].operands):
                    return True
        return False

    def divide(self, other: DimLike) -> Dim | None:
        """The quotient where ``other`` provably divides this size without remainder."""
        other = dim(other)
        if self.value is not None and other.value:
            whole, left = divmod(self.value, other.value)
            return None if left else _number(whole)
        if len(other.terms) > 1:
            quotient, rest = self.long_division(other)
            return None if rest.terms else quotient
        if not other.terms:
            return None
        terms = [_quotient(term, *other.terms.items()) for term in self.terms.items()]
        return None if None in terms else Dim(dict(terms))  # type: ignore[arg-type]

    def long_division(self, other: Dim) -> tuple[Dim, Dim]:
        """Polynomials (q, r) with ``self == q * other + r``, where no term of r is a multiple of the leading one of
        ``other``, or too many steps would have been needed; r may be negative."""
        lead, whole, rest = next(iter(other.terms.items())), dim(0), self
        for _ in range(4 * len(self.terms) + 4):
            quotient = next((q for term in rest.terms.items() if (q := _quotient(term, lead)) is not None), None)
            if quotient is None:
                break
            part = Dim(dict([quotient]), ordered=True)
            whole, rest = whole + part, rest - part * other
        return whole, rest

    def is_followed(self) -> bool:
        """Whether the size is simple enough to go on with: else sizes made of it would grow without bound."""
        for monomial, factor in self.terms.items():
            if factor.bit_length() > 63 or sum(power for _, power in monomial) > MOST_POWER:
                return False
        plain = len(self.terms) < 2 and all(atom.kind == "symbol" for monomial in self.terms for atom, _ in monomial)
        return plain or (len(self.terms) <= MOST_TERMS and len(str(self)) <= LONGEST)

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

    def replace(self, whole: Dim, by: Dim) -> Dim:
        """The size with another one in place of a whole that it is a multiple of, or that quotients, remainders and
        the like in it are of."""
        quotient = self.divide(whole)
        if quotient is not None:
            return quotient * by
        total = dim(0)
        for monomial, factor in self.terms.items():
            term = dim(factor)
            for atom, power in monomial:
                part = symbol(atom.name) if atom.kind == "symbol" else _SYMBOLIC[atom.kind](
                    *(operand.replace(whole, by) for operand in atom.operands))
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

    def known(self, values: Mapping[str, int]) -> int | None:
        """The integer that this size is for given symbols, None where one has no value."""
        return self.evaluate(values) if self.symbols <= values.keys() else None

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int):
            return self.value == other
        return self is other or (isinstance(other, Dim) and self.terms == other.terms)

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


def _quotient(term: tuple[Monomial, int], divisor: tuple[Monomial, int]) -> tuple[Monomial, int] | None:
    """A term divided by another, where that leaves no remainder."""
    (monomial, factor), (over, coefficient) = term, divisor
    if factor % coefficient:
        return None
    powers = dict(monomial)
    for atom, power in over:
        if powers.get(atom, 0) < power:
            return None
        powers[atom] -= power
    return tuple((atom, power) for atom, power in powers.items() if power), factor // coefficient


def _non_negative(monomial: Monomial) -> bool:
    for atom, power in monomial:
        if atom.kind == "symbol" or power % 2 == 0:
            continue
        a, b = (operand.non_negative() for operand in atom.operands)
        if not (a or b if atom.kind == "max" else a and b):
            return False
    return True


def _order(item: tuple[Monomial, int]) -> tuple[int, str]:
    monomial, _ = item
    return -sum(power for _, power in monomial), "*".join(f"{atom.key}^{power}" for atom, power in monomial)
