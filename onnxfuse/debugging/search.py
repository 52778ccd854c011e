"""The search for the smallest sets of fused nodes that change what an oracle looks at.

``smallest`` is delta debugging's ddmin (Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input",
IEEE Transactions on Software Engineering 28, 2002).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from onnxfuse.debugging.results import Culprit


@dataclass(frozen=True)
class Outcome:
    """What a run of the model with some fused nodes showed: whether it differs from the original, and in what."""

    differs: bool
    detail: str = ""


Oracle = Callable[[frozenset[str]], Outcome]
"""Told the names of the fused nodes that stay fused; all others are put back."""

Tried = Callable[[int, int], None]
"""Told how many variants were tried, and how many fused nodes are still suspected."""


class Asked:
    """An oracle that is asked once a set; counts the sets."""

    def __init__(self, oracle: Oracle, tried: Tried | None = None) -> None:
        self._oracle = oracle
        self._tried = tried
        self.known: dict[frozenset[str], Outcome] = {}

    def __call__(self, kept: frozenset[str]) -> Outcome:
        if kept not in self.known:
            self.known[kept] = self._oracle(kept)
            if self._tried is not None:
                self._tried(len(self.known), len(kept))
        return self.known[kept]


def smallest(items: Sequence[str], differs: Callable[[Sequence[str]], bool]) -> tuple[str, ...]:
    """A part of the items that differs, and none of which can be left out without it agreeing.

    ``differs`` must hold for all items together.  Where single items differ on their own, one of them is found in
    about twice the logarithm of their number; the worst case is quadratic.
    """
    left, parts = tuple(items), 2
    while len(left) > 1:
        cut = [left[len(left) * place // parts:len(left) * (place + 1) // parts] for place in range(parts)]
        found = next((part for part in cut if differs(part)), None)
        if found is not None:
            left, parts = found, 2
            continue
        rests = [tuple(item for item in left if item not in part) for part in cut] if parts > 2 else []
        found = next((rest for rest in rests if differs(rest)), None)
        if found is not None:
            left, parts = found, max(parts - 1, 2)
        elif parts < len(left):
            parts = min(2 * parts, len(left))
        else:
            break
    return left


def culprits(kernels: Mapping[str, str], asked: Asked, kind: str) -> tuple[Culprit, ...]:
    """Smallest sets of fused nodes that differ, one after another until what is left agrees.

    The search is for kernels first, then for nodes among those that run them.  What is found is put back, with all
    nodes of the same kernels, before the next is looked for: with all of them put back, nothing differs.

    Args:
        kernels: the kernel that each suspected fused node runs, in the order to search in.
        asked: agrees where no node is fused.
        kind: what the culprits are called in the result.
    """
    found: list[Culprit] = []
    left = dict(kernels)
    while left and asked(frozenset(left)).differs:
        nodes = _smallest_set(left, asked)
        same = {left[name] for name in nodes}
        alike = tuple(name for name, kernel in left.items() if kernel in same and name not in nodes)
        found.append(Culprit(kind, nodes, tuple(sorted(same)), alike, asked(frozenset(nodes)).detail))
        left = {name: kernel for name, kernel in left.items() if kernel not in same}
    return tuple(found)


def _smallest_set(kernels: Mapping[str, str], asked: Asked) -> tuple[str, ...]:
    kinds = smallest(tuple(dict.fromkeys(kernels.values())), lambda some: asked(frozenset(_of(kernels, some))).differs)
    return smallest(_of(kernels, kinds), lambda some: asked(frozenset(some)).differs)


def _of(kernels: Mapping[str, str], kinds: Collection[str]) -> tuple[str, ...]:
    """Fused nodes that run one of these kernels."""
    return tuple(name for name, kernel in kernels.items() if kernel in kinds)
