"""Kernels that do not end: no call into the driver returns then, and the end of the process alone ends them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Timer

from onnxfuse.measuring.database import Measurement

SECONDS = 300.0
"""For all runs of one candidate, its session among them: a thousand times what most take, and ten times what the
runtime's libraries take to try their own ways."""


@dataclass(frozen=True)
class Watch:
    """Sees when a candidate takes longer than any that ends.

    Attributes:
        hung: is called then, in a thread of its own, with what to remember of the candidate; that it ends the process
            is best.
        seconds: that one may take.
    """

    hung: Callable[[Measurement], None]
    seconds: float = SECONDS

    @contextmanager
    def over(self, candidate: Measurement) -> Iterator[None]:
        """Watch the body, which runs a candidate; ``candidate``: what to remember of it where it hangs."""
        timer = Timer(self.seconds, partial(self.hung, candidate))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
