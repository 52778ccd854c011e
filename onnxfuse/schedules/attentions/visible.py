"""Which keys a query sees, where a mask compares places: causal masks, sliding windows, and both.

    score = f(test, ...)      test fails ─▶ the score is minus infinity, or a mask's lowest number
    test  = k < e(m, b)       ─▶ no query of a block from ``first`` to ``last`` sees a key from max e on

A comparison of places is one of two integer expressions over the places m and k of query and key, and sizes, that are
linear; in it may be a number of each batch that is read, where it is limited to between zero and a size, as that of the
keys that a sequence has.  What a score becomes where one fails is found by putting false in its place: however tests
are joined with others, with masks that are read, or made to numbers that are added.  A comparison that decides nothing
by itself, or is of something else, is computed like everything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from onnx import helper

from onnxfuse.graph.dims import Dim, symbol
from onnxfuse.ir.scalars import BOOL, DOUBLE, FUNCTIONS, INT32, INT64, TYPES, Sort
from onnxfuse.ir.tensors import Number
from onnxfuse.lowering.index import Digit
from onnxfuse.lowering.pull import Apply, Constant, Puller, Scalar, Select, affine
from onnxfuse.schedules.kernel import walk
from onnxfuse.schedules.lanes import Lanes

LOWEST = -1e4
"""A finite number from which on down a mask's is one: far below every score that it is meant for."""

FAR = 2**30
"""Places that a bound is not farther off, so that it fits every kernel's indices."""

_NEGATED = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le"}


@dataclass(frozen=True)
class Bound:
    """Keys that a query sees are below ``index``, or, where not ``upper``, none below it.

    Attributes:
        index: over the query's place "@m", or one digit of it, the batch and sizes.
        digit: that digit, or the place as its own only one; None where all queries of a batch have one bound.
        rising: whether it grows with it.
        read: whether a number that is read is in it.
    """

    index: Dim
    upper: bool
    digit: Digit | None
    rising: bool
    read: bool


@dataclass(frozen=True)
class Visible:
    """Attributes:
        bounds: of the keys that a query sees; every other score is masked.
        score: what a score is inside of all of them.
        least: where masks are finite, the number that a row's maximum must be above so that masked scores add nothing;
            None where they are minus infinity.
    """

    bounds: tuple[Bound, ...]
    score: Scalar
    least: float | None

    @property
    def is_read(self) -> bool:
        """Whether keys that no query sees may lie behind what anybody has written: they may hold no numbers."""
        return any(bound.upper and bound.read for bound in self.bounds)

    @property
    def is_growing(self) -> bool:
        """Whether later queries may see more keys."""
        return any(bound.upper and bound.rising and bound.digit is not None for bound in self.bounds)


def visible_keys(score: Scalar, puller: Puller, exact: bool) -> Visible | None:
    """Which keys a query sees by the places of both alone; None where no comparison of these masks a score; ``exact``:
    as ``simplified`` has it."""
    bounds: list[Bound] = []
    passed: dict[Scalar, bool] = {}
    lowest = -np.inf
    for test in walk([score]):
        if not isinstance(test, Apply) or test.function not in _NEGATED:
            continue
        for truth in (True, False):
            masked = _masked(simplified(score, {test: not truth}))
            bound = None if masked is None else _bound(test, truth, puller)
            if bound is not None and masked is not None:
                bounds.append(bound)
                passed[test], lowest = truth, max(lowest, masked)
    if not bounds:
        return None
    least = None if lowest == -np.inf else lowest / 2
    return Visible(tuple(dict.fromkeys(bounds)), simplified(score, passed, exact), least)


# ---- Bounds. ----


def _bound(test: Apply, truth: bool, puller: Puller) -> Bound | None:
    """Which keys a query sees where a comparison is what it must be."""
    left, right = (_linear(operand, puller) for operand in test.operands)
    if left is None or right is None:
        return None
    key, difference = symbol("@k"), left - right
    function = test.function if truth else _NEGATED[test.function]
    sign = next((factor for monomial, factor in difference.terms.items() if Dim({monomial: 1}) == key), 0)
    if abs(sign) != 1:
        return None
    rest = (difference - key * sign) * -sign
    if sign < 0:  # rest - k compared with 0
        function = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}[function]
    index = rest + 1 if function in ("le", "gt") else rest
    found = _query(index, puller)
    read = any(name in puller.gathered for name in index.symbols)
    return None if found is None else Bound(index, function in ("lt", "le"), *found, read)


def _query(index: Dim, puller: Puller) -> tuple[Digit | None, bool] | None:
    """By which digit of a query's place an index moves, and whether it grows with it; None where it is not as simple.
    """
    space, digit, rising = puller.space, None, True
    for monomial, factor in index.terms.items():
        if abs(factor) > (1 if monomial else FAR):
            return None
        names = [name for name in Dim({monomial: 1}).symbols if space.is_variable(name)]
        found = [space.variable(name) for name in names]
        if any(each is None or name in space.derived or not (
                _is_of_batch(puller.gathered[each.base], puller) if each.base in puller.gathered else
                each.base in ("@m", "@b")) for name, each in zip(names, found, strict=True)):
            return None
        moving = [each for each in found if each is not None and each.base == "@m"]
        if moving and (digit is not None or len(names) > 1 or Dim({monomial: 1}) != symbol(names[0])):
            return None
        if moving:
            digit, rising = moving[0], factor > 0
    return digit, rising


def _linear(scalar: Scalar, puller: Puller) -> Dim | None:
    """An integer expression as places and sizes, and numbers of each batch; None where it is more than sums of these.
    """
    known = affine(scalar)
    if known is not None or not isinstance(scalar, Apply) or scalar.dtype not in (INT32, INT64):
        return known
    if scalar.function == "max" and _is_of_batch(scalar, puller):
        most = _limit(scalar)
        return None if most is None else puller.gather(scalar, most + 1)
    if scalar.function not in ("add", "sub"):
        return None
    one, other = (_linear(operand, puller) for operand in scalar.operands)
    if one is None or other is None:
        return None
    return one + other if scalar.function == "add" else one - other


def _limit(scalar: Apply) -> Dim | None:
    """A size that an integer is no more than, and 0, which it is no less than; None where it is not limited so."""
    for inner, zero in (scalar.operands, scalar.operands[::-1]):
        if isinstance(zero, Constant) and zero.number == 0 and isinstance(inner, Apply) and inner.function == "min":
            most = next((found for each in inner.operands if (found := affine(each)) is not None), None)
            if most is not None:
                return most
    return None


def _is_of_batch(scalar: Scalar, puller: Puller) -> bool:
    """Whether an expression is the same for all queries and keys of a batch."""
    return not any(Lanes(puller.space, puller, base, "", 1).moves(scalar) for base in ("@m", "@k"))


# ---- What a score is where a test's outcome is known. ----


def simplified(scalar: Scalar, known: Mapping[Scalar, bool], exact: bool = False) -> Scalar:
    """An expression with tests of which the outcome is known, what that decides, and what does nothing to numbers, left
    out: zeros that are added, and, unless it is to be ``exact``, roundings of what is computed on in a wider type."""
    return _Settling(known, exact).of(scalar)


class _Settling:
    """Leaves out roundings too, unless it is ``exact``, as what jumps asks for its operands."""

    def __init__(self, known: Mapping[Scalar, bool], exact: bool = False) -> None:
        self.found: dict[Scalar, Scalar] = {test: Constant(BOOL, True, truth) for test, truth in known.items()}
        self.exact: _Settling = self if exact else _Settling(known, exact=True)

    def of(self, scalar: Scalar) -> Scalar:
        """An expression, each once."""
        if scalar not in self.found:
            self.found[scalar] = self._settle(scalar)
        return self.found[scalar]

    def _settle(self, scalar: Scalar) -> Scalar:
        if not isinstance(scalar, Apply | Select):
            return scalar
        operands = tuple(map((self.exact if _jumps(scalar) else self).of, scalar.operands))
        if isinstance(scalar, Apply):
            decided = _decided(scalar, operands) or (None if self.exact is self else _unrounded(scalar, operands))
            if decided is not None:
                return decided
        if all(one is other for one, other in zip(operands, scalar.operands, strict=True)):
            return scalar
        if isinstance(scalar, Select):
            return Select(scalar.dtype, scalar.exact, scalar.condition, (operands[0], operands[1]))
        return Apply(scalar.dtype, scalar.exact, scalar.function, operands)


def _jumps(scalar: Apply | Select) -> bool:
    """Whether a little more or less of an operand may make much of a result."""
    if isinstance(scalar, Select):
        return False
    known = FUNCTIONS.get(scalar.function)
    return not TYPES[scalar.dtype].is_floating if known is None else known.sort is Sort.JUMPING


def _unrounded(scalar: Apply, operands: tuple[Scalar, ...]) -> Scalar | None:
    """What a cast to a wider type gives of what is rounded to a narrow one, without that; None of anything else."""
    kind, inner = TYPES[scalar.dtype], operands[0]
    if scalar.function != "cast" or kind.is_narrow or not kind.is_floating or not isinstance(inner, Apply):
        return None
    return Apply(scalar.dtype, True, "narrow", inner.operands) if inner.function == "rounded" else None


def _decided(scalar: Apply, operands: tuple[Scalar, ...]) -> Scalar | None:
    """What a function gives by what is known of its operands; None where it has to be computed."""
    numbers = [each.number if isinstance(each, Constant) else None for each in operands]
    if scalar.function == "where":
        return None if numbers[0] is None else operands[1 if numbers[0] else 2]
    if scalar.function in ("and", "or"):
        deciding = scalar.function == "or"
        for number, other in zip(numbers, reversed(operands), strict=True):
            if number is not None:
                return Constant(BOOL, True, deciding) if bool(number) is deciding else other
        return None
    known = [number for number in numbers if number is not None]
    if len(known) == len(numbers):
        number = _computed(scalar, known)
        return None if number is None else Constant(scalar.dtype, True, number)
    neutral = {"add": 0, "mul": 1}.get(scalar.function)
    for number, other in zip(numbers, reversed(operands), strict=True):
        if number is not None and number == neutral and other.dtype == scalar.dtype:
            return other
    return None


def _computed(scalar: Apply, numbers: list[Number]) -> Number | None:
    """A function of numbers, as a kernel computes it."""
    first, *others = numbers
    if scalar.function == "not":
        return not first
    if scalar.dtype == BOOL or not TYPES[scalar.dtype].is_floating:
        return None
    wide = np.float64 if scalar.dtype == DOUBLE else np.float32
    with np.errstate(over="ignore", invalid="ignore"):
        match scalar.function:
            case "cast" | "rounded":
                rounded = np.array(float(first)).astype(helper.tensor_dtype_to_np_dtype(scalar.dtype))
                return float(rounded.astype(np.float64))
            case "narrow":
                return float(wide(first))
            case "neg":
                return -float(first)
            case "add":
                return float(wide(first) + wide(others[0]))
            case "sub":
                return float(wide(first) - wide(others[0]))
            case "mul":
                return float(wide(first) * wide(others[0]))
    return None


def _masked(score: Scalar) -> float | None:
    """The number of the mask in a score that is masked, minus infinity or low; None where a score may be any."""
    if isinstance(score, Constant):
        number = float(score.number)
        return number if TYPES[score.dtype].is_floating and number <= LOWEST else None
    if not isinstance(score, Apply) or not TYPES[score.dtype].is_floating:
        return None
    if score.function == "where":
        return _all_masked(score.operands[1:])
    found = [masked for operand in score.operands if (masked := _masked(operand)) is not None]
    match score.function:
        case "cast" | "narrow" | "rounded":
            return _masked(score.operands[0]) if TYPES[score.operands[0].dtype].is_floating else None
        case "add":
            return max(found, default=None)
        case "sub":
            return _masked(score.operands[0])
        case "max":
            return _all_masked(score.operands)
    return None


def _all_masked(operands: tuple[Scalar, ...]) -> float | None:
    found = [_masked(operand) for operand in operands]
    known = [masked for masked in found if masked is not None]
    return max(known) if len(known) == len(found) else None
