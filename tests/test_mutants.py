"""The table of planted faults fits the tree; ``make test-mutants`` plants them."""

from __future__ import annotations

from collections import Counter

from mutate import mutants


def test_every_mutant_can_be_planted() -> None:
    """What it replaces stands once in its file, and its tests are there; no fault stands twice."""
    found = mutants()
    assert len(found) >= 300
    assert [name for name, count in Counter(mutant.name for mutant in found).items() if count > 1] == []
    assert sum(bool(mutant.lives) for mutant in found) <= 0.05 * len(found)
