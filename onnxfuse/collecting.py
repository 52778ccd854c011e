"""Python's collector of cycles while a model is planned."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG, MIDDLE, OLD = 20_000, 20, 20
"""Objects of the youngest generation at which it is collected, and how often that is before the next one is."""


@contextmanager
def seldom() -> Iterator[None]:
    """Have it walk what there is more seldom.  Graphs, regions and kernels stay as long as they are planned: at
    Python's own pace an eighth of the time is spent on looking through them for what nobody reads any more.  A pace
    that a program set slower, or none, is left as it is."""
    before = gc.get_threshold()
    if not 0 < before[0] < YOUNG:
        yield
        return
    gc.set_threshold(YOUNG, MIDDLE, OLD)
    try:
        yield
    finally:
        gc.set_threshold(*before)
