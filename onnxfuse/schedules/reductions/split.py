"""Few long rows, shared by several blocks each, in as many steps as there are phases.

A step computes one phase.  Its blocks have a chunk of a row each (or of a block of columns), and write what they find
for each reduction into scratch memory.  Every block of a later step combines the chunks' numbers anew before it begins:
they are few, and a kernel between the steps would cost more.  What there is once a row is written in the last step.

No atomics: numbers are combined in an order that the sizes alone decide, so that every run gives the same bits, and
nothing in scratch needs a value before the first step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from onnxfuse.ir.tensors import Reduce, operands
from onnxfuse.lowering.arrangement import arrangement
from onnxfuse.lowering.launch import Variant
from onnxfuse.lowering.lower import Lowered
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.choice import Choice, told
from onnxfuse.schedules.kernel import STREAM, Kernel, fits_narrow, has_reductions
from onnxfuse.schedules.reductions.columns import WARP, Columns, longest_kept, side_by_side
from onnxfuse.schedules.reductions.online import joins_maximum
from onnxfuse.schedules.reductions.pieces_text import PieceSplit
from onnxfuse.schedules.reductions.reduction import Reduction, ReductionWork, Ways
from onnxfuse.schedules.reductions.rows import SHARED, Rows
from onnxfuse.schedules.reductions.split_text import UNROLLED, ColumnSplit, RowSplit, SplitParts, is_last, reductions_of
from onnxfuse.schedules.schedule import Expected
from onnxfuse.schedules.source import Function, Parameter, Signature


@dataclass(frozen=True)
class SplitShape:
    """Threads of a block, and blocks a multiprocessor."""

    threads: int
    blocks: int

    @property
    def choice(self) -> Choice:
        """As tuning writes it down."""
        return Choice.of("split", threads=self.threads, blocks=self.blocks)


OWN = SplitShape(256, 4)
"""With several vectors a thread on its way, these keep a multiprocessor's memory busy."""

OTHERS = tuple(SplitShape(threads, blocks) for threads in (128, 256, 512) for blocks in (1, 2, 4, 8)
               if 512 <= threads * blocks <= 2048 and SplitShape(threads, blocks) != OWN)
"""What tuning tries."""

MOST_THREADS = 1024
"""Of a multiprocessor, on every GPU: kernels are compiled so that these fit."""

MOST_CHUNKS = 1024
"""Chunks of a row: what every block of a later step reads of each."""

LONG_ROW, LONG_COLUMN = 32_768, 512
"""Elements of a row, or of a column, from which on splitting it can pay for a further launch."""

KEPT_ROW = 65_536
"""The same of rows that one block could keep in registers."""

MULTIPROCESSORS = 160
"""Of the largest GPUs: where fewer blocks than half of that are at work on some GPU, the plan has to ask."""


@dataclass(frozen=True)
class SplitWays:
    """Variants that split rows.

    Attributes:
        always: whether no other way is worth having; else guards let only few long rows in.
        planned: whether the planned rows are such.
    """

    ways: Ways
    always: bool
    planned: bool


@dataclass(frozen=True)
class SplitForm:
    """How blocks share rows.

    Attributes:
        across: threads side by side where rows are columns, else 0.
        width: elements of a vector.
        rows: rows that a block has at a time; whole: those it would have if rows were not split.
        unit: elements that chunks are multiples of.
        longest: length up to which rows are not split.
        shape: of its blocks.
        pieces: columns side by side that make up one row, whose mean and variance are found together; 0 where they
            are not.
    """

    shape: SplitShape
    across: int
    width: int
    rows: int
    whole: int
    unit: int
    longest: int
    pieces: int = 0

    @property
    def text(self) -> type[RowSplit] | type[ColumnSplit] | type[PieceSplit]:
        """What writes its steps."""
        return PieceSplit if self.pieces else ColumnSplit if self.across else RowSplit

    @property
    def name(self) -> str:
        """What stands in its kernels' names, with what tells those of pieces apart."""
        words = self.text.words
        told = f"{words}_{self.shape.threads}x{self.shape.blocks}_{self.rows}" if self.pieces else words
        return told and f"{told}_"


class Split(Reduction):
    """Few long rows; where they are not planned, the same kernel runs others as ``whole`` would.

    Attributes:
        whole: schedules of rows that are not split.
    """

    name = "split"
    settings = "blocks of {threads}, {blocks} a multiprocessor"

    def __init__(self, *whole: Rows | Columns) -> None:
        self.whole = whole

    def expected(self, lowered: Lowered, sizes: Mapping[str, int], multiprocessors: int) -> Expected | None:
        """A kernel a phase where the planned rows are few and long, else one."""
        steps = expected_steps(lowered, sizes, multiprocessors)
        return Expected(steps) if has_reductions(lowered) else None

    def of_rows(self, work: ReductionWork, rule: str) -> Kernel | None:
        """The kernel of rows that may be few and long when it runs; it is called after what runs the planned ones."""
        other = next((each for each in self.whole if each.applies(work)), None)
        split = None if other is None else split_ways(work)
        if other is None or split is None:
            return None
        if split.always:
            return self.made(work, split.ways, rule)
        ways = other.beside(work, split.planned)
        own = self if split.planned and ways.choice is None else other
        return own.made(work, joined(ways, split), rule)


def joined(ways: Ways, split: SplitWays) -> Ways:
    """Both.  Behind what is told come those that split, where that is planned; else what keeps its rows in registers is
    before them.  Guards tell them apart."""
    first = 0 if ways.choice is None else 1
    streaming = (place for place in range(first, len(ways.variants))
                 if any(word in ways.variants[place].name for word in (STREAM, SHARED)))
    place = first if split.planned else next(streaming, len(ways.variants) - 1)
    return Ways(
        [*ways.functions, *split.ways.functions],
        [*ways.entries, *split.ways.entries],
        [*ways.variants[:place], *split.ways.variants, *ways.variants[place:]],
        split.ways.scratch,
        ways.choice or split.ways.choice,
        (*split.ways.choices, *ways.choices),
    )


def split_ways(work: ReductionWork) -> SplitWays | None:
    """The variants for few long rows, or None where there can be none of them or none are planned."""
    extent, offered = work.extent, {shape.choice: shape for shape in OTHERS}
    choice, shape = told(extent.choice, offered)
    form = _form(work, shape or OWN)
    count, length = extent.count.value, extent.length.value
    if (count is not None and count > _few(form)) or (length is not None and length <= form.longest):
        return None
    planned, *near = _planned(work, form)
    # Without a plan for it, what is known must point that way: a softmax over two sizes that vary has no such variants.
    known = count is not None or (length is not None and length > 16 * form.longest)
    if not (known or planned or any(near)):
        return None
    always = count is not None and length is not None and count <= form.whole * 8
    ways = ways_of(work, form, () if always else _guards(work, form))
    if planned or always:
        ways = replace(ways, choice=choice, choices=tuple(offered))
    return SplitWays(ways, always, planned or always)


def few_rows(work: ReductionWork) -> Refusal | None:
    """Few long rows want to be split, and then nothing goes through shared memory because it lies the other way."""
    if not next(_planned(work, _form(work, OWN))):
        return None
    names = work.lowered.binding.names
    count, length = (size.substitute(names) for size in (work.extent.count, work.extent.length))
    return Refusal(
        "few-rows",
        f"{count} rows of {length} elements are too few for blocks of their own, and tensors lie along them and across",
    )


def _few(form: SplitForm) -> int:
    """Rows up to which they are few."""
    return MULTIPROCESSORS // 2 * form.whole


def are_few_columns(count: int, width: int) -> bool:
    """Whether columns are too few for blocks of their own, which have vectors of so many."""
    return count <= MULTIPROCESSORS // 2 * side_by_side(32, count, width) * width


def _planned(work: ReductionWork, form: SplitForm) -> Iterator[bool]:
    """Whether the planned rows are few and long, and whether each of those nearby are."""
    for size, rows in ((work.extent.planned, work.extent.rows), *work.extent.nearby):
        yield size is not None and rows is not None and size > form.longest and rows <= _few(form)


def _form(work: ReductionWork, shape: SplitShape) -> SplitForm:
    width, extent = max(each.lanes.width for each in (work, work.peeled) if each is not None), work.extent
    if not work.way.across:
        longest = KEPT_ROW // max(work.phases.live, 1) if work.phases.live else LONG_ROW
        return SplitForm(shape, 0, width, 1, 1, shape.threads * width, longest)
    count = extent.count.value if extent.count.value is not None else extent.rows
    across, narrow = (side_by_side(deep, count, width) for deep in (8, 32))
    longest = max(LONG_COLUMN, longest_kept(work) if work.phases.live else 0)
    return SplitForm(shape, across, width, across * width, narrow * width, shape.threads // across * UNROLLED, longest)


def _guards(work: ReductionWork, form: SplitForm) -> tuple[str, ...]:
    """Few blocks for the GPU at hand, and long rows."""
    count, length = work.extent.count, work.extent.length
    guards = []
    if count.value is None or count.value > form.whole * 8:
        guards.append(f"{work.expression(count)} 2 * sms {form.whole} * <=")
    if length.value is None:
        guards.append(f"{form.longest} {work.expression(length)} <")
    return tuple(guards)


def ways_of(work: ReductionWork, form: SplitForm, guards: tuple[str, ...]) -> Ways:
    """The variants of a form, all under these guards and what their vectors and indices need."""
    extent, phases, words = work.extent, work.frame.streaming, form.text.words
    count, length = work.expression(extent.count), work.expression(extent.length)
    blocks = count if form.rows == 1 else f"{count} {form.rows} ceil"
    # Chunks are whole units, as many blocks as the GPU holds have one each.
    units, wanted = f"{length} {form.unit} ceil 1 max", f"sms {form.shape.blocks} * {blocks} {form.text.share}"
    chunk = f"{units} {wanted} {MOST_CHUNKS} min ceil {form.unit} *"
    chunks = f"{length} 1 max {chunk} ceil"
    parts = SplitParts(reductions_of(phases))
    signature = replace(work.signature, more=(
        Parameter("unsigned char* __restrict__", "t0", "t0"),
        Parameter("const {index}", "chunk", f"i{{bits}}:{chunk}"),
        Parameter("const {index}", "chunks", f"i{{bits}}:{chunks}"),
    ))
    rows = count if form.pieces <= 1 else f"{count} {form.pieces} //"
    ways = Ways(scratch=[f"{rows} {chunks} * {parts.bytes} *"])
    functions = {each.frame.peeled: _functions(each, form, parts, signature) for each in _readers(work)}
    for of, width, bits, needed in _ways_to_read(work):
        # A block's columns are as many as its vectors hold: chunks stay the same whatever the vectors are.
        across = form.across * form.width // width if form.across else 0
        peeled = "peeled_" if of.frame.peeled and width > 1 else ""
        steps = []
        for phase, function in enumerate(functions[of.frame.peeled]):
            name = f"split{phase}_{form.name}w{width}_{peeled}{bits}"
            deep = max(form.shape.threads // across, 1) if across else 0
            share = [deep, across] if across else [form.shape.threads]
            share += [form.rows, form.pieces] if form.pieces else []
            threads = deep * across or form.shape.threads
            least = max(min(form.shape.blocks, MOST_THREADS // threads), 1)
            entry = function.entry(name, (width, *share), bits, threads, least)
            ways.entries.append(entry)
            steps.append(entry.step(blocks if is_last(phases, phase) else f"{blocks} {chunks} *"))
        label = f"split, {words and f'{words}, '}width {width}, {'peeled, ' if peeled else ''}{bits}-bit"
        ways.variants.append(Variant(label, tuple(steps), (*guards, *needed)))
        if not needed:
            break
    ways.functions = [function for each in functions.values() for function in each]
    return ways


def _readers(work: ReductionWork) -> list[ReductionWork]:
    """The region as texts read it, fastest first; where vectors that begin anywhere in a row move as much as those that
    divide it, they take the place of these."""
    if work.peeled is None:
        return [work]
    return [work.peeled] if work.peels_all else [work, *([work.peeled] if fits_narrow(work.lowered) else [])]


def _ways_to_read(work: ReductionWork) -> Iterator[tuple[ReductionWork, int, int, tuple[str, ...]]]:
    """The same as variants do, each with its width, the bits of its indices and its guards."""
    first, *more = _readers(work)
    if fits_narrow(work.lowered):
        for each in (first, *more):
            yield each, each.lanes.width, 32, each.aligned
        if first.lanes.width > 1 and first.aligned != work.narrow:
            yield first, 1, 32, work.narrow
    yield first, 1, 64, ()


def _functions(work: ReductionWork, form: SplitForm, parts: SplitParts, signature: Signature) -> list[Function]:
    """The steps of a row."""
    peeled, (width, *more) = work.frame.peeled, form.text.template
    name = f"split_{'peeled_' if peeled else ''}"
    bodies = [form.text(work.frame, phase, parts).text() for phase in range(work.frame.streaming.count)]
    return [Function(f"{name}{phase}", ("vector" if peeled else width, *more), signature.parameters(body.sizes),
                     body.text) for phase, body in enumerate(bodies)]


def expected_steps(lowered: Lowered, sizes: Mapping[str, int], multiprocessors: int) -> int:
    """Kernels that a region will take at these sizes on a GPU with so many multiprocessors, before one is made."""
    depths: dict[int, int] = {}
    first: Reduce | None = None
    for tensor in lowered.program.tensors:
        below = max((depths[id(operand)] for operand in operands(tensor)), default=0)
        depths[id(tensor)] = below + (isinstance(tensor, Reduce) and not joins_maximum(tensor))
        first = tensor if first is None and isinstance(tensor, Reduce) else first
    if first is None:
        return 1
    found = arrangement(first.operand.shape, first.axes).substitute(lowered.binding.names)
    if not (found.count.symbols | found.length.symbols) <= sizes.keys():
        return 1
    count, length = found.count.evaluate(sizes), found.length.evaluate(sizes)
    blocks, longest = (count // WARP, LONG_COLUMN) if found.across else (count, KEPT_ROW)
    return 1 + max(depths.values()) if 2 * blocks <= multiprocessors and length > longest else 1
