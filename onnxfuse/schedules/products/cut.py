"""Results that are cut from one product's sums, each from columns of its own: one expression for all of them.

    relu(sum + b), of columns below 64      relu(sum + c), of those from 64 on
    ─▶ relu(sum + (b below 64, else c)), of all

So each sum has the one result computed that it belongs to, and what warps lay out of results is as much as of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onnxfuse.lowering.pull import Apply, Condition, Scalar, Select

Kept = tuple[Condition, ...]
"""Under which conditions a place is one of a result's."""


def in_one(results: Sequence[Scalar], kept: Sequence[Kept]) -> tuple[Scalar, ...]:
    """Results, those of one type of which none has a place that another has as one expression, which is each one's
    where its conditions hold."""
    groups: list[list[int]] = []
    for number, result in enumerate(results):
        group = next((group for group in groups if results[group[0]].dtype == result.dtype and all(
            _are_apart(kept[number], kept[other]) for other in group)), None)
        if group is None:
            groups.append([number])
        else:
            group.append(number)
    found = list(results)
    for group in groups:
        whole = found[group[-1]]
        for number in reversed(group[:-1]):
            whole = _either(kept[number][0], results[number], whole, {})
        found = [whole if number in group else each for number, each in enumerate(found)]
    return tuple(found)


def _are_apart(one: Kept, other: Kept) -> bool:
    """Whether one condition each says that a place is not both results'."""
    if len(one) != 1 or len(other) != 1:
        return False
    (mine,), (theirs,) = one, other
    return any(_ends_before(*pair) for pair in ((mine, theirs), (theirs, mine)))


def _ends_before(first: Condition, second: Condition) -> bool:
    """Whether what one condition holds for lies below all that another one does."""
    if first.high is None or second.low is None:
        return False
    return ((first.index - first.high) - (second.index - second.low)).non_negative()


def _either(
    condition: Condition, one: Scalar, other: Scalar, known: dict[tuple[Scalar, Scalar], Scalar]
) -> Scalar:
    """One expression where a condition holds, else another; what both compute the same way is computed once of what
    they compute it of."""
    if one is other:
        return one
    if (one, other) not in known:
        exact = one.exact and other.exact
        alike = isinstance(one, Apply) and isinstance(other, Apply) and (
            (one.function, one.dtype, one.exact) == (other.function, other.dtype, other.exact)) and (
            [each.dtype for each in one.operands] == [each.dtype for each in other.operands])
        if alike:
            assert isinstance(one, Apply) and isinstance(other, Apply)
            known[one, other] = replace(one, operands=tuple(
                _either(condition, *pair, known) for pair in zip(one.operands, other.operands, strict=True)))
        else:
            known[one, other] = Select(one.dtype, exact, condition, (one, other))
    return known[one, other]
