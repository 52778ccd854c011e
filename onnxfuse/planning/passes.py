"""The planner's passes, in their order: each makes a plan of the one before.

    matched      what rules name in each graph (``matching``)
    grown        candidates: groups that grow, and what may stand in their place (``regions.growing``)
    selected     the candidates that are worth most, and their kernels (``choosing``)
    bordered     views at their borders taken in (``regions.borders``)
    measured     tuned kernels; what was measured slower is left out (``evidence``)
    with_masks   attentions compute masks of places themselves (``regions.masks``)
    recomputed   values computed again where that costs less than to write and read them (``regions.recompute``)
    compiled     kernels that spill run another way (``spills``)
    joined       independent regions in one launch (``regions.horizontal``)

Of the forms of a model that are weighed against one another, only the one that is taken is compiled: all that comes
before is a ``drafted`` plan.
"""

from __future__ import annotations

from collections.abc import Callable

from onnxfuse.planning.choosing import selected
from onnxfuse.planning.context import Context
from onnxfuse.planning.matching import matched
from onnxfuse.planning.plan import Plan, revised
from onnxfuse.planning.regions.borders import bordered
from onnxfuse.planning.regions.growing import grown
from onnxfuse.planning.regions.horizontal import STAGE as HORIZONTAL_JOINS
from onnxfuse.planning.regions.horizontal import joined
from onnxfuse.planning.regions.masks import with_masks
from onnxfuse.planning.regions.recompute import STAGE as RECOMPUTE
from onnxfuse.planning.regions.recompute import recomputed

Pass = Callable[[Plan, Context], Plan]


def measured(plan: Plan, context: Context) -> Plan:
    """A plan after what was measured: a region that was measured slower than the runtime's own nodes is left out."""
    return plan if context.measured is None else revised(plan, context.measured.revision)


def compiled(plan: Plan, context: Context) -> Plan:
    """A plan after what the compiler made of its kernels, which are compiled all at once."""
    if context.spills is None:
        return plan
    context.spills.compile(plan.fusions)
    return revised(plan, context.spills.revision)


Passes = tuple[tuple[str, Pass], ...]
"""By the names under which ``--disable`` leaves them out, "" where it may not."""

SEARCHING: Passes = (("", matched), ("", grown), ("", selected), ("", bordered))
DRAFTING: Passes = (*SEARCHING, ("", measured), ("", with_masks), (RECOMPUTE, recomputed))
FINISHING: Passes = (("", compiled), (HORIZONTAL_JOINS, joined))


def searched(context: Context) -> Plan:
    """The regions that are worth most by what is predicted."""
    return _passed(SEARCHING, Plan(), context)


def drafted(context: Context) -> Plan:
    """The plan for a model before the compiler is asked."""
    return _passed(DRAFTING, Plan(), context)


def finished(plan: Plan, context: Context) -> Plan:
    """A drafted plan after what the compiler says, where it is asked, and with regions joined."""
    return _passed(FINISHING, plan, context)


def _passed(passes: Passes, plan: Plan, context: Context) -> Plan:
    for name, each in passes:
        if name not in context.rules.disabled:
            plan = each(plan, context)
    return plan
