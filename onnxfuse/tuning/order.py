"""What to measure next, so that a budget buys the most: a search over all of a model's regions at once.

First come the runtime's nodes and the schedule's own choice of every region, those that take longest first and those
that another holds as if they took less, and with each what the library takes for its product: that tells what is worth
fusing.  Then come other ways to run kernels, where they could save the model the most time; of one kernel those first
that were the fastest in another environment, where the database knows of one (``Database.ranking``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

HOPE, HOPE_OF_PRODUCTS = 0.1, 0.3
"""Share of a kernel's time that the best of all ways to run it may save; that of kernels with products
(benchmarks/results, tune and zoo-products)."""

FIRST, FURTHER, LAST = 2, 1, 0
"""Ranks: what is not known at all; what may change the plan or the kernel; what will hardly."""

WITHIN = 0.25
"""Share of its time by which a region that another holds is weighed against those that none does."""


@dataclass(frozen=True)
class Known:
    """What is known of a region, in microseconds of one run of it.

    Attributes:
        count: how often the model has it.
        predicted: what the runtime's nodes are predicted to take; runtime: what they do; best: what the best way to run
            the kernel does; None where that was not measured.
        opened: whether the first round is over for it; tried: how many ways were measured.
        products: whether the kernel has products; bare: whether it has nothing else.
        holder: the most that the model's time is of a region that has all that this one has, and more; 0 where there is
            none.
        after: what the kernel is predicted to take.
    """

    count: int
    predicted: float
    runtime: float | None = None
    best: float | None = None
    opened: bool = False
    tried: int = 0
    products: bool = False
    bare: bool = False
    holder: float = 0.0
    after: float = math.inf

    @property
    def before(self) -> float:
        """What the runtime takes."""
        return self.predicted if self.runtime is None else self.runtime

    @property
    def saved(self) -> float:
        """What the kernel saves: less than nothing where it is slower, nothing where that is not known."""
        return 0.0 if self.best is None else self.before - self.best


def urgency(known: Known, parts: Iterable[Known]) -> tuple[int, float]:
    """How much is to be had from measuring more of a region: the larger, the sooner.

    A way that is measured after others is worth less than these were, and nothing where the region would be no better
    for it than one of its parts, or than the runtime.  A product with nothing around it is hardly better than a
    library's, but where that takes longer than its bytes and operations are predicted to, as for few rows; what the
    library takes must be known where there is a region with more around it.
    """
    time = known.count * known.before
    if not known.opened and known.bare:  # a region around it is judged by what the library takes
        return (FIRST if known.holder else LAST), max(time, known.holder)
    if not known.opened:
        return FIRST, time * (WITHIN if known.holder else 1.0)
    if known.best is None:
        possible = known.count * (known.before - known.after)
        return (FURTHER, possible) if known.bare and possible > 0 else (LAST, time)
    hope = (HOPE_OF_PRODUCTS if known.products else HOPE) * known.best
    rival = max((part.saved for part in parts), default=0.0)
    possible = min(hope, known.saved + hope - max(rival, 0.0))
    return (FURTHER if possible > 0 else LAST), known.count * possible / (1 + known.tried)
