"""Schedules: a lowered region to one kernel.

pointwise.py   maps and views
rows.py        reductions over the last axes, with maps around them; rows_text.py its text
columns.py     reductions over other axes
turned.py      reductions between tensors that lie along the rows and others across; turned_text.py its text
split.py       few long rows, in several steps
reduction.py   what these four have in common; phases.py the phases that they run in
tiled.py       maps and views between tensors that lie transposed; tiled_text.py its text, layouts.py where outputs lie
text.py        scalar expressions as C++
together.py    several independent regions, each with its own schedule's kernel, in one launch
choice.py      what tuning may change
source.py      a kernel's text as data: functions, entries and their parameters
kernel.py      what schedules share
cuda/          headers that every kernel's text begins with
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from onnxfuse.lowering.binding import in_graph_terms
from onnxfuse.lowering.lower import Lowered
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.choice import Choice, parse_choice
from onnxfuse.schedules.kernel import USER, Kernel, named
from onnxfuse.schedules.pointwise import pointwise_kernel
from onnxfuse.schedules.rows import row_kernel
from onnxfuse.schedules.tiled import tiled_kernel

SCHEDULES: dict[str, Callable[[Lowered, str, Mapping[str, int], Choice | None], Kernel | Refusal]] = {
    "pointwise": pointwise_kernel,
    "rows": row_kernel, "columns": row_kernel, "split": row_kernel, "turned": row_kernel,
    "tiled": tiled_kernel,
}

__all__ = ["SCHEDULES", "USER", "Choice", "Kernel", "make_kernel", "named", "parse_choice"]


def make_kernel(
    lowered: Lowered, rule: str, schedule: str, sizes: Mapping[str, int] | None = None, choice: Choice | None = None,
    nearby: Sequence[Mapping[str, int]] = (),
) -> Kernel | Refusal:
    """The kernel that a schedule makes of a region, or why it makes none.

    Args:
        sizes: what symbols are planned to be: a variant made for them comes first, others follow.
        nearby: further sizes to make variants for, where the best way depends on the sizes.
        choice: what the first variant is to be, in place of the schedule's own choice, where the region admits it.
    """
    if nearby and SCHEDULES[schedule] is row_kernel:
        made = row_kernel(lowered, rule, sizes or {}, choice, nearby)
    else:
        made = SCHEDULES[schedule](lowered, rule, sizes or {}, choice)
    return in_graph_terms(made, lowered.binding.names) if isinstance(made, Refusal) else made
