"""Arithmetic on symbolic sizes agrees with arithmetic on integers; exact, no tolerance."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from onnxfuse.graph.dims import OPERATIONS, Dim, broadcast, dim, maximum, minimum, product, symbol
from onnxfuse.graph.stated import parse

NAMES = ("a", "b", "c")
BINARY: dict[str, Callable[[Dim, Dim], Dim]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod,
    "min": minimum, "max": maximum,
}
INTEGER: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul, **OPERATIONS}

leaves = st.one_of(st.integers(-4, 9), st.sampled_from(NAMES))
expressions = st.recursive(leaves, lambda inner: st.tuples(st.sampled_from(list(BINARY)), inner, inner), max_leaves=7)
sizes = st.fixed_dictionaries({name: st.integers(0, 12) for name in NAMES})


class UndefinedError(Exception):
    """An expression that divides by a size that is zero has no value."""


def symbolic(tree: object) -> Dim:
    if isinstance(tree, tuple):
        kind, left, right = tree
        return BINARY[kind](symbolic(left), symbolic(right))
    return symbol(tree) if isinstance(tree, str) else dim(tree)  # type: ignore[arg-type]


def integer(tree: object, values: dict[str, int]) -> int:
    if isinstance(tree, tuple):
        kind, left, right = tree
        a, b = integer(left, values), integer(right, values)
        if kind in ("//", "%") and b == 0:
            raise UndefinedError
        return INTEGER[kind](a, b)
    return values[tree] if isinstance(tree, str) else tree  # type: ignore[return-value]


@given(expressions, sizes)
def test_an_expression_evaluates_as_integers_do(tree: object, values: dict[str, int]) -> None:
    try:
        expected = integer(tree, values)
    except UndefinedError:
        assume(False)
    assert symbolic(tree).evaluate(values) == expected


@given(expressions, sizes)
def test_substitution_of_numbers_evaluates(tree: object, values: dict[str, int]) -> None:
    try:
        expected = integer(tree, values)
    except UndefinedError:
        assume(False)
    assert symbolic(tree).substitute(values).value == expected


@given(expressions, expressions, sizes)
def test_equal_sizes_have_equal_values_and_hashes(one: object, other: object, values: dict[str, int]) -> None:
    try:
        numbers = integer(one, values), integer(other, values)
    except UndefinedError:
        assume(False)
    a, b = symbolic(one), symbolic(other)
    if a == b:
        assert numbers[0] == numbers[1]
        assert hash(a) == hash(b)
    if a.value is not None:
        assert hash(a) == hash(a.value), "a size is found where its number is looked for, too"
    assert a - b + b == a


@given(expressions, sizes)
def test_what_is_provably_not_negative_is_not(tree: object, values: dict[str, int]) -> None:
    try:
        expected = integer(tree, values)
    except UndefinedError:
        assume(False)
    if symbolic(tree).non_negative():
        assert expected >= 0


@given(expressions, sizes)
def test_multiple_of_divides(tree: object, values: dict[str, int]) -> None:
    size = symbolic(tree)
    try:
        expected = integer(tree, values)
    except UndefinedError:
        assume(False)
    factor = size.multiple_of()
    assert expected == 0 if factor == 0 else expected % factor == 0


@given(expressions, st.sampled_from([1, 2, 3, 5]), sizes)
def test_an_exact_quotient_multiplies_back(tree: object, divisor: int, values: dict[str, int]) -> None:
    try:
        integer(tree, values)
    except UndefinedError:
        assume(False)
    size = symbolic(tree)
    assert (size * divisor).divide(dim(divisor)) == size
    assert (size * divisor + 0) // divisor == size
    assert (size * divisor) % divisor == 0


capped = st.tuples(st.integers(1, 9), st.sampled_from(NAMES)).map(lambda pair: minimum(pair[0], symbol(pair[1])))
simple = st.one_of(st.integers(0, 5).map(dim), st.sampled_from(NAMES).map(symbol), capped)


@given(st.lists(simple, min_size=2, max_size=4), sizes)
def test_broadcasting_agrees_with_numpy_where_the_sizes_broadcast(operands: list[Dim], values: dict[str, int]) -> None:
    numbers = [operand.evaluate(values) for operand in operands]
    others = {number for number in numbers if number != 1}
    assume(len(others) <= 1)
    result = operands[0]
    for operand in operands[1:]:
        result = broadcast(result, operand)
    assert result.evaluate(values) == (others.pop() if others else 1)


@given(st.permutations([symbol(name) for name in "abcd"]))
def test_the_order_of_operands_does_not_matter(operands: list[Dim]) -> None:
    a, b, c, d = (symbol(name) for name in "abcd")
    for join in (broadcast, minimum, maximum):
        first, second, third, fourth = operands
        assert join(join(first, second), join(third, fourth)) == join(join(join(a, b), c), d)
        assert join(join(first, second), first) == join(first, second)


@given(expressions)
def test_the_text_of_a_size_reads_back(tree: object) -> None:
    size = symbolic(tree)
    assume("/ 0" not in str(size) and "% 0" not in str(size))
    assert parse(str(size)) == size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("batch", symbol("batch")),
        ("s50 + 1", symbol("s50") + 1),
        ("Min(512, s50)", minimum(512, symbol("s50"))),
        ("2*s0*s1 - 3", symbol("s0") * symbol("s1") * 2 - 3),
        ("(s0 // 2)**2", (symbol("s0") // 2) * (symbol("s0") // 2)),
        ("17", dim(17)),
        ("s0 / 2", symbol("s0 / 2")),
        ("unk__3", symbol("unk__3")),
        ("past sequence", symbol("past sequence")),
        ("/model/Add.0", symbol("/model/Add.0")),
        ("s0 // 0", symbol("s0 // 0")),
    ],
)
def test_an_exporters_text(text: str, expected: Dim) -> None:
    assert parse(text) == expected


def test_sizes_simplify() -> None:
    s, t = symbol("s"), symbol("t")
    assert str(s * 12 * 64) == "768*s"
    assert (s * t * 6) // (t * 2) == s * 3
    assert (s * 4 + 6) // 4 == s + 1
    assert (s * 4 + 6) % 4 == 2
    assert (s - 1) // 2 + 1 == (s + 1) // 2
    assert (s + t) // (s + t) == 1
    assert minimum(s, s + 1) == s
    assert maximum(s - t, s) == s
    assert maximum(s, 0) == s
    assert minimum(s + 1, minimum(1, s) + s) == minimum(1, s) + s
    assert broadcast(minimum(512, s), s) == s
    assert broadcast(minimum(s - 3, 0), s - 3).evaluate({"s": 4}) == 0
    assert str(broadcast(s, t)) == "bcast(s, t)"
    assert product([s, dim(0)]) == 0
    assert dim(7).value == 7 and s.value is None
    assert (s * t + 1).symbols == {"s", "t"}


def test_an_unbound_symbol_is_an_error() -> None:
    with pytest.raises(KeyError, match="s"):
        symbol("s").evaluate({"t": 1})
