"""Schedules: a lowered region to one kernel.

    pointwise.py   maps and views
    rows.py        reductions over the last axes, with maps around them; phases.py its phases
    text.py        scalar expressions as C++
    kernel.py      what schedules share
    cuda/          headers that every kernel's text begins with
"""

from __future__ import annotations

from collections.abc import Callable

from onnxfuse.lowering.lower import Lowered
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.kernel import Kernel
from onnxfuse.schedules.pointwise import pointwise
from onnxfuse.schedules.rows import rows

SCHEDULES: dict[str, Callable[[Lowered, str], Kernel | Refusal]] = {"pointwise": pointwise, "rows": rows}

__all__ = ["SCHEDULES", "Kernel", "make_kernel"]


def make_kernel(lowered: Lowered, rule: str, schedule: str) -> Kernel | Refusal:
    """The kernel that a schedule makes of a region, or why it makes none."""
    return SCHEDULES[schedule](lowered, rule)
