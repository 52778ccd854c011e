"""Schedules: a lowered region to one kernel.

pointwise.py   maps and views
rows.py        reductions over the last axes, with maps around them; phases.py its phases
text.py        scalar expressions as C++
kernel.py      what schedules share
cuda/          headers that every kernel's text begins with
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from onnxfuse.lowering.lower import Lowered
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.kernel import Kernel
from onnxfuse.schedules.pointwise import pointwise_kernel
from onnxfuse.schedules.rows import row_kernel

SCHEDULES: dict[str, Callable[[Lowered, str, Mapping[str, int]], Kernel | Refusal]] = {
    "pointwise": pointwise_kernel,
    "rows": row_kernel,
}

__all__ = ["SCHEDULES", "Kernel", "make_kernel"]


def make_kernel(lowered: Lowered, rule: str, schedule: str, sizes: Mapping[str, int] | None = None) -> Kernel | Refusal:
    """The kernel that a schedule makes of a region, or why it makes none.

    ``sizes`` are what symbols are planned to be: a variant made for them comes first, others follow.
    """
    return SCHEDULES[schedule](lowered, rule, sizes or {})
