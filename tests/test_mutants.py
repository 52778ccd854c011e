"""The table of planted faults fits the tree; ``make test-mutants`` plants them."""

from __future__ import annotations

from collections import Counter

from mutate import is_there, mutants


def test_every_mutant_can_be_planted() -> None:
    """What it replaces stands once in its file, and its tests are there; no fault stands twice."""
    found = mutants()
    assert len(found) >= 300
    assert [name for name, count in Counter(mutant.name for mutant in found).items() if count > 1] == []
    assert sum(bool(mutant.lives) for mutant in found) <= 0.05 * len(found)


def test_a_test_that_is_not_there_is_seen() -> None:
    own = "test_mutants.py::test_a_test_that_is_not_there_is_seen"
    assert is_there("test_mutants.py") and is_there(own) and is_there(f"{own}[one]")
    assert not is_there("test_nonesuch.py") and not is_there(f"{own}_too")
