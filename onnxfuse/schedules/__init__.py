"""Schedules: a lowered region to one kernel.

pointwise.py   maps and views
pooling.py     maxima and means of windows, as the pointwise schedule runs them
rows.py        reductions over the last axes, with maps around them; rows_text.py its text, streaming.py of long rows
columns.py     reductions over other axes
transposed.py  reductions between tensors that lie along the rows and others across; transposed_text.py its text
split.py       few long rows, in several steps; split_text.py their text, online.py sums that join their maximum
pieces.py      long rows that lie in short pieces, in several steps too; pieces_text.py their text, moments.py means and
               variances in one pass
scans.py       running totals, with maps and reductions around them; scans_text.py its text, scans_split.py of few rows
reduction.py   what these six have in common; phases.py the phases that they run in
peel.py        rows that begin between two vectors
stencil.py     depthwise convolutions; stencil_parts.py what they are of, stencil_shape.py tiles, stencil_text.py text
stencil_last.py  those of images with channels last; stencil_last_shape.py what they are of, stencil_last_strips.py
               strips, stencil_last_text.py text
attention.py   two products with a softmax between them; attention_parts.py what they are of, attention_text.py its text
product.py     matrix products and convolutions with maps around them; product_parts.py what they are of,
               product_shape.py their blocks, product_blocks.py which are tried, product_pace.py what their time follows
               from, product_text.py their text, product_specialised.py that of blocks with a warp that copies,
               product_maps.py what it can copy, product_boxes.py windows in boxes, product_shared.py windows that share
               pieces of an image, product_patch.py convolutions of few channels, product_pixels.py of pixels in
               vectors, product_tall.py many rows by few columns,
               product_library.py and product_cudnn.py what cuBLASLt and cuDNN run in its place,
               product_integers.py products of 8-bit integers
product_norms.py  convolutions of whose results a norm over windows is taken; norm_groups.py of which groups,
               column_moments.py the text that tells mean and squares with them
product_rows.py  products of whose results rows are reduced; product_rows_text.py its text, in_two.py what runs them as
               two kernels
gated.py       images scaled by products of their means; gated_text.py the text of these, gated_ahead.py depthwise
               convolutions that tell the sums of the means
in_parts.py    what regions have in common of which parts have kernels of their own, as the four that follow
normed.py      products and attentions of operands that norms of their rows scale, as two kernels
projected.py   attentions with the product of their operands
cached.py      attentions over caches that they put new rows into
sliced.py      products that write parts of one result, windows and copies beside them
recurrent.py   recurrent layers
operand_text.py  vectors of operands, for all three with products
tiled.py       maps and views between tensors that lie transposed; tiled_text.py its text, layouts.py where outputs lie
text.py        scalar expressions as C++; lanes.py where they are known, packing.py how vectors are stored
together.py    several independent regions, each with its own schedule's kernel, in one launch
schedule.py    what a schedule is; choice.py what tuning may change
source.py      a kernel's text as data: functions, entries and their parameters
headers.py     what of the headers in cuda/ a text uses, which it begins with
kernel.py      what schedules share, multiplied.py what those with products do
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from onnxfuse.lowering.binding import in_graph_terms
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.attention import Attention
from onnxfuse.schedules.cached import Cached
from onnxfuse.schedules.choice import Choice
from onnxfuse.schedules.columns import Columns
from onnxfuse.schedules.gated import Gated
from onnxfuse.schedules.kernel import USER, Kernel, alone, named
from onnxfuse.schedules.normed import Normed
from onnxfuse.schedules.pieces import Pieces
from onnxfuse.schedules.pointwise import Pointwise
from onnxfuse.schedules.pooling import Pooling
from onnxfuse.schedules.product import Product
from onnxfuse.schedules.product_norms import ProductNorms
from onnxfuse.schedules.product_rows import ProductRows
from onnxfuse.schedules.projected import Projected
from onnxfuse.schedules.recurrent import Recurrent
from onnxfuse.schedules.rows import Rows
from onnxfuse.schedules.scans import Scans
from onnxfuse.schedules.schedule import Does, Expected, Request, Schedule
from onnxfuse.schedules.sliced import Sliced
from onnxfuse.schedules.split import Split
from onnxfuse.schedules.stencil import Stencil
from onnxfuse.schedules.stencil_last import StencilLast
from onnxfuse.schedules.tiled import Tiled
from onnxfuse.schedules.transposed import Transposed

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
