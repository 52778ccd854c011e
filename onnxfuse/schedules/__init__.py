"""Schedules: a lowered region to one kernel.

pointwise.py   maps and views
tiled.py       maps and views between tensors that lie transposed; tiled_text.py its text, layouts.py where outputs lie
pooling.py     maxima and means of windows, as the pointwise schedule runs them
reductions/    rows and columns, and running totals, with maps around them
stencils/      depthwise convolutions
products/      matrix products and convolutions, with what is computed around them
attentions/    two products with a softmax between them
composed/      regions of which parts have kernels of their own, such as products behind a norm, and recurrent layers
together.py    several independent regions, each with its own schedule's kernel, in one launch

schedule.py    what a schedule is; choice.py what tuning may change
kernel.py      what schedules share, multiplied.py what those with products do, operand_text.py vectors of operands
text.py        scalar expressions as C++; lanes.py where they are known, packing.py how vectors are stored
source.py      a kernel's text as data: functions, entries and their parameters
headers.py     what of the headers in cuda/ a text uses, which it begins with
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from onnxfuse.lowering.binding import in_graph_terms
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.attentions.attention import Attention
from onnxfuse.schedules.choice import Choice
from onnxfuse.schedules.composed.cached import Cached
from onnxfuse.schedules.composed.gated import Gated
from onnxfuse.schedules.composed.normed import Normed
from onnxfuse.schedules.composed.projected import Projected
from onnxfuse.schedules.composed.recurrent import Recurrent
from onnxfuse.schedules.composed.sliced import Sliced
from onnxfuse.schedules.kernel import USER, Kernel, alone, named
from onnxfuse.schedules.pointwise import Pointwise
from onnxfuse.schedules.pooling import Pooling
from onnxfuse.schedules.products.norms import ProductNorms
from onnxfuse.schedules.products.product import Product
from onnxfuse.schedules.products.rows import ProductRows
from onnxfuse.schedules.reductions.columns import Columns
from onnxfuse.schedules.reductions.pieces import Pieces
from onnxfuse.schedules.reductions.rows import Rows
from onnxfuse.schedules.reductions.scans import Scans
from onnxfuse.schedules.reductions.split import Split
from onnxfuse.schedules.reductions.transposed import Transposed
from onnxfuse.schedules.schedule import Does, Expected, Request, Schedule
from onnxfuse.schedules.stencils.last import StencilLast
from onnxfuse.schedules.stencils.stencil import Stencil
from onnxfuse.schedules.tiled import Tiled

_COLUMNS, _ROWS = Columns(), Rows()

SCHEDULES: dict[str, Schedule] = {
    each.name: each for each in (
        Cached(), Recurrent(), Sliced(), Stencil(), StencilLast(), ProductNorms(), ProductRows(), Normed(), Gated(),
        Projected(), Attention(), Product(), Scans(), Pieces(_ROWS), Split(_COLUMNS, _ROWS), Transposed(), _COLUMNS,
        _ROWS, Pooling(), Pointwise(), Tiled())
}
"""All schedules by name, in the order in which they are asked for a region."""

__all__ = ["SCHEDULES", "USER", "Choice", "Does", "Expected", "Kernel", "Request", "Schedule", "alone", "asked",
           "family", "first_answer", "make_kernel", "named", "parse_choice", "running", "schedule_of", "sharing",
           "words"]


def running(does: Does) -> Schedule:
    """The schedule that runs nodes which do all this together."""
    return next(each for each in SCHEDULES.values() if each.runs(does))


def schedule_of(kernel: Kernel) -> Schedule | None:
    """What made a kernel; None where it came with a rule, or is a launch of several kernels."""
    return SCHEDULES.get(kernel.schedule)


def sharing(kernel: Kernel) -> tuple[int, ...]:
    """Variants of a kernel, by place, that may share a launch with other kernels', as its schedule says."""
    schedule = schedule_of(kernel)
    return () if schedule is None else schedule.sharing(kernel)


def asked(schedule: Schedule, request: Request) -> Kernel | Refusal | None:
    """What a schedule answers, in the graph's terms."""
    made = schedule.kernel(request)
    return in_graph_terms(made, request.lowered.binding.names) if isinstance(made, Refusal) else made


def make_kernel(request: Request, schedule: str | None = None) -> Kernel | Refusal:
    """The kernel of a region, or why there is none.

    Args:
        schedule: name of one to ask, with others of its family that may stand in for it; all schedules where None.
    """
    return first_answer(asked(each, request) for each in family(schedule))


def family(schedule: str | None) -> Iterator[Schedule]:
    """The schedule of a name, and those that may stand in for it, in the order in which they are asked; all where None.
    """
    own = None if schedule is None else SCHEDULES[schedule]
    return (each for each in SCHEDULES.values()
            if own is None or each is own or (own.family and each.family == own.family))


def first_answer(answers: Iterable[Kernel | Refusal | None]) -> Kernel | Refusal:
    """What the first schedule says that has a region, or that none has it."""
    none = Refusal("no-schedule", "no schedule has kernels for such a region")
    return next((each for each in answers if each is not None), none)


def words(choice: Choice) -> str:
    """A choice for people."""
    return SCHEDULES[choice.schedule].words(choice)


def parse_choice(text: str) -> Choice | None:
    """The choice that a text spells; None where it spells none of this release's."""
    try:
        raw = json.loads(text)
        choice = Choice.of(raw.pop("schedule"), **raw)
        told = SCHEDULES[choice.schedule].template(choice) if words(choice) else ""
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    # Its words name all that it must set, and nothing else.
    right = all(f"{{{name}}}" in told and type(number) is int for name, number in choice.settings)
    return choice if right else None
