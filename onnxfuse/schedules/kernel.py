"""What a schedule makes of a region, and the parts that all schedules share."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from onnxfuse.graph.dims import Dim, cofactor, dim, product
from onnxfuse.ir.scalars import BOOL, TYPES
from onnxfuse.ir.tensors import Contract, Input, Pool, Reduce, Reshape, Scan
from onnxfuse.lowering.launch import Check, LaunchPlan, Output, Situation, Step, Variant, expression
from onnxfuse.lowering.lower import Lowered
from onnxfuse.lowering.pull import Condition, Constant, Load, Puller, Scalar, Select, children
from onnxfuse.lowering.routines import LibraryCall
from onnxfuse.schedules.choice import Choice
from onnxfuse.schedules.lanes import Lanes
from onnxfuse.schedules.source import Given, Source

INDEX_LIMIT = 2**31 - 2**22
"""Tensors of fewer elements are indexed with 32 bits; the rest of the range is for threads past the end."""

VECTOR_BYTES = 16

SECTOR_BYTES = 32
"""What device memory is read in."""

STREAM = "stream"
"""In the names of variants that read their rows anew in every phase."""

USER = "user"
"""The schedule of kernels that come with a rule."""


HOPPER_HAS = 132
"""Multiprocessors: of the GPUs that are the only ones where four warps multiply together, most have so many."""


TILE_BEGINS, TILE_ENDS = 2.5e-6, 0.6e-6
"""Seconds of kernels whose tiles a warp copies: until the first is multiplied, and of each to store it (H100, 745
products and convolutions)."""

STAGE_WAITS = 0.2e-6
"""Seconds of a stage of such kernels at least (H100, likewise)."""


@dataclass(frozen=True)
class Launched:
    """Bytes that a launch of several moves, the share of the bandwidth at which it does, and its arithmetic, as so much
    more as it takes longer than the float32 cores could."""

    bytes: int
    share: float
    flops: int = 0


@dataclass(frozen=True)
class Pace:
    """What the busiest multiprocessor does of a kernel with products, at the sizes that it was made for.

    Attributes:
        tiles: it computes so many; stages: each goes through so many; flops: arithmetic of one.
        share: of the rate that large tiles reach; waits: seconds that a stage is waited for at least.
        results: TFLOP/s at which what follows the products is computed; None where that hardly counts; meanwhile:
            whether the next tile is multiplied while that is.
        whole: seconds of all that behind ``TILE_BEGINS``, where it follows from other things than arithmetic; ends:
            seconds that a tile takes beside to be stored; behind: bytes that further launches move.
        launches: what each launch moves of a node, or of a part, that multiplies no tiles; ``ends`` are seconds beside
            that.
        parts: of a node with several such kernels, those of each.
    """

    tiles: int
    stages: int
    flops: int
    share: float = 1.0
    waits: float = 0.0
    results: float | None = None
    meanwhile: bool = False
    whole: float | None = None
    ends: float = 0.0
    behind: int = 0
    launches: tuple[Launched, ...] = ()
    parts: tuple[Pace, ...] = ()

    def tiled(self, rate: float) -> float:
        """Seconds in which a multiprocessor that reaches so many FLOP/s in large tiles goes through those that it has,
        with what follows ``TILE_BEGINS``."""
        stage = max(self.flops / (rate * self.share), STAGE_WAITS, self.waits)
        return self.tiles * (self.stages * stage + TILE_ENDS + self.ends) if self.whole is None else self.whole


@dataclass(frozen=True)
class Kernel:
    """A region as a kernel.

    Attributes:
        schedule: name of the schedule that made it.
        code: its text, as data or as a rule gives it.
        plan: how it is launched.
        scattered: inputs (by place) that neighbouring threads read far apart, so that most of every memory
            transaction is wasted.
        choice: what its first variant was told to be, or None where the schedule chose by itself.
        choices: what it could be told instead, for tuning.
        phases: how often it reads its elements where they do not stay in registers.
        heavy: whether its functions hold more than some hundred bytes of shared memory: of such a launch that several
            kernels share has room for one.
        hides: whether it leaves out what its structure shows to be masked.
        rounds: whether operands of its products are rounded: float32 to TF32.
        pace: what its time follows from on Hopper; None of kernels that nobody knows so well.
    """

    schedule: str
    code: Source | Given
    plan: LaunchPlan
    scattered: tuple[int, ...] = ()
    choice: Choice | None = None
    choices: tuple[Choice, ...] = ()
    phases: int = 1
    heavy: bool = False
    hides: bool = False
    rounds: bool = False
    pace: Pace | None = None

    @property
    def source(self) -> str:
        """CUDA text, whole."""
        return self.code.text

    @property
    def entry(self) -> str:
        """What its first variant begins with: a kernel's name, or a library's routine and the rank of its algorithm."""
        step = self.plan.variants[0].steps[0]
        return f"{step.routine}_{step.sizes[-1]}" if isinstance(step, LibraryCall) else step.kernel

    def runs_like(self, other: Kernel) -> bool:
        """Whether another kernel has the same functions and launches; its headers may be others."""
        if isinstance(self.code, Given) or isinstance(other.code, Given):
            return self == other
        return self.plan == other.plan and replace(self.code, headers=()) == replace(other.code, headers=())


def named(kernel: Kernel) -> Kernel:
    """The kernel with entry names that show in a profile: the rule, then what tells one text from another.  A kernel
    of the user's own keeps its name."""
    if isinstance(kernel.code, Given):
        return kernel
    region = re.sub(r"[^A-Za-z0-9]+", "_", kernel.plan.region)
    prefix = f"{region}_{hashlib.sha256(kernel.source.encode()).hexdigest()[:6]}"

    def renamed(step: Step | LibraryCall) -> Step | LibraryCall:
        return replace(step, kernel=f"{prefix}_{step.kernel}") if isinstance(step, Step) else step

    variants = tuple(
        replace(variant, steps=tuple(map(renamed, variant.steps))) for variant in kernel.plan.variants)
    return replace(kernel, code=kernel.code.prefixed(prefix), plan=replace(kernel.plan, variants=variants))


def alone(kernel: Kernel, situation: Situation) -> Kernel:
    """The kernel with nothing but the variant that runs in a situation: it compiles several times as fast, and is good
    for that situation alone.  A kernel of the user's own stays whole.

    Raises:
        ValueError: a check of the plan does not hold.
    """
    if isinstance(kernel.code, Given):
        return kernel
    situation.bind(kernel.plan)
    variant = kernel.plan.variants[situation.place(kernel.plan)]
    code = kernel.code.keeping({step.kernel for step in variant.launches})
    used = {argument for step in variant.launches for argument in step.arguments}
    maps = kernel.plan.maps if any(f"m{place}" in used for place in range(len(kernel.plan.maps))) else ()
    return replace(kernel, code=code, plan=replace(kernel.plan, variants=(replace(variant, guards=()),), maps=maps))


def has_reductions(lowered: Lowered) -> bool:
    """Whether a region has reductions, or running totals: its elements are arranged in rows."""
    return has_scans(lowered) or any(isinstance(tensor, Reduce) for tensor in lowered.program.tensors)


def contractions(lowered: Lowered) -> list[Contract]:
    """The products and convolutions of a region, operands first."""
    return [tensor for tensor in lowered.program.tensors if isinstance(tensor, Contract)]


def pools(lowered: Lowered) -> list[Pool]:
    """The windows of a region whose elements' maximum, or sum, is taken, operands first."""
    return [tensor for tensor in lowered.program.tensors if isinstance(tensor, Pool)]


def has_scans(lowered: Lowered) -> bool:
    """Whether a region has running totals."""
    return any(isinstance(tensor, Scan) for tensor in lowered.program.tensors)


def make_plan(lowered: Lowered, rule: str, puller: Puller, variants: Sequence[Variant]) -> LaunchPlan:
    """The launch plan of a region: its symbols, checks and outputs around the schedule's variants, each once: what
    tuning tells a schedule to begin with may be what it ends with by itself."""
    binding = lowered.binding
    checks = list(binding.checks)
    for size, whole in puller.broadcasts:
        a, b = (expression(part, binding.symbols) for part in (size, whole))
        named = [part.substitute(binding.names) for part in (size, whole)]
        checks.append(Check(f"{a} 1 == {a} {b} == or", f"sizes {named[0]} and {named[1]} do not broadcast"))
    for operator, left, right in puller.relations:
        a, b = (expression(part, binding.symbols) for part in (left, right))
        named = [part.substitute(binding.names) for part in (left, right)]
        checks.append(Check(f"{a} {b} {operator}", f"{named[0]} {operator} {named[1]} does not hold between sizes"))
    once = tuple(dict.fromkeys(variants))
    return LaunchPlan(rule, len(lowered.tensors), binding.sources, tuple(checks), outputs_of(lowered), once)


def outputs_of(lowered: Lowered) -> tuple[Output, ...]:
    """A region's outputs, as its plan has them."""
    return tuple(Output(tensor.dtype, tuple(expression(size, lowered.binding.symbols) for size in tensor.shape))
                 for tensor in lowered.program.outputs)


def narrow_guards(lowered: Lowered, rows: bool = True) -> tuple[str, ...]:
    """Guards under which 32-bit indices suffice: no tensor that is indexed as a whole has too many elements.

    ``rows``: whether a kernel counts through all elements of the rows that it reduces, and not each row's alone.
    """
    program, symbols = lowered.program, lowered.binding.symbols
    guards = []
    for place, tensor in enumerate(program.inputs):
        if product(tensor.shape).value is None:
            guards.append(f"i{place}.n {INDEX_LIMIT} <")
    for size in dict.fromkeys((*_inner_sizes(lowered, rows), *(product(tensor.shape) for tensor in program.outputs))):
        if size.value is None:
            guards.append(f"{expression(size, symbols)} {INDEX_LIMIT} <")
    return tuple(guards)


def fits_narrow(lowered: Lowered, rows: bool = True) -> bool:
    """Whether no tensor of constant shape is too large for 32-bit indices; ``rows`` as ``narrow_guards`` takes it."""
    program = lowered.program
    sizes = [*_inner_sizes(lowered, rows), *(product(tensor.shape) for tensor in (*program.inputs, *program.outputs))]
    return all(size.value is None or size.value < INDEX_LIMIT for size in sizes)


def _inner_sizes(lowered: Lowered, rows: bool) -> list[Dim]:
    """Elements of what is never in memory, but counted through by a reshape or a reduction."""
    inner = lowered.program.tensors
    counting = (Reshape, Reduce, Scan) if rows else (Reshape, Scan)
    counted = [tensor.operand for tensor in inner if isinstance(tensor, counting)]
    return [product(tensor.shape) for tensor in counted if not isinstance(tensor, Input)]


def vector_guards(lowered: Lowered, lanes: Lanes, vectors: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    """Guards of a variant with vectors: sizes divide, and pointers (name, bytes of an element) are aligned."""
    symbols = lowered.binding.symbols
    guards = [f"{expression(size, symbols)} {lanes.width} % 0 ==" for size in lanes.multiples]
    for name, size in dict.fromkeys(vectors):
        alignment = min(VECTOR_BYTES, size * lanes.width)
        if alignment > size:
            guards.append(f"{name}.addr {alignment} % 0 ==")
    return tuple(guards)


def walk(roots: Iterable[Scalar], leaf: Scalar | None = None) -> list[Scalar]:
    """Every expression under the roots once, but for those that only a ``leaf`` is made of."""
    seen: dict[Scalar, None] = {}
    stack = list(roots)
    while stack:
        scalar = stack.pop()
        if scalar not in seen:
            seen[scalar] = None
            stack += () if scalar is leaf else children(scalar)
    return list(seen)


def load_of(scalar: Scalar) -> tuple[Load, Scalar | None] | None:
    """An element of an input as its load, and the one number that stands where that is not made, None where it is zero:
    of 8-bit numbers a padded image may have another one around it.  None of any other expression."""
    chosen, other = set[Condition](), None
    while isinstance(scalar, Select):
        chosen.add(scalar.condition)
        scalar, beside = scalar.operands
        if other not in (None, beside):
            return None
        other = beside
    if not isinstance(scalar, Load) or other is None:
        return (scalar, None) if isinstance(scalar, Load) else None
    alone = isinstance(other, Constant) or (
        isinstance(other, Load) and other.offset.value is not None and not other.conditions)
    return (scalar, other) if alone and chosen == set(scalar.conditions) and TYPES[scalar.dtype].size == 1 else None


def moving_loads(roots: Iterable[Scalar], lanes: Lanes) -> list[Load]:
    """Loads that differ from element to element, in no particular order."""
    return [scalar for scalar in walk(roots) if isinstance(scalar, Load) and lanes.moves(scalar)]


def is_vector(load: Load, lanes: Lanes) -> bool:
    """Whether the lanes of a vector are one aligned piece of memory, or one element."""
    stride = lanes.stride(load.offset)
    return (stride == 0 or (stride == 1 and lanes.aligned(load.offset))) and all(
        lanes.uniform(condition) for condition in load.conditions
    )


def vector_loads(loads: Iterable[Load], lanes: Lanes) -> list[Load]:
    """Those of some loads that the lanes of a vector make at once, each its own element."""
    return [load for load in loads if lanes.stride(load.offset) == 1 and is_vector(load, lanes)]


def sources(loads: Iterable[Load]) -> list[tuple[str, int]]:
    """Pointers that loads read from, as ``vector_guards`` has them."""
    return [(f"i{load.input}", TYPES[load.dtype].size) for load in loads]


def targets(lowered: Lowered) -> list[tuple[str, int]]:
    """The same of all outputs."""
    return [(f"o{place}", TYPES[output.dtype].size) for place, output in enumerate(lowered.program.outputs)]


def staging_lanes(
    candidates: Iterable[Lanes], length: Dim, loads: Sequence[Load], places: Sequence[Dim], planned: Mapping[str, int],
) -> Lanes | None:
    """The first lanes whose vectors, along ``length`` elements, move all these loads and all that is stored at these
    places, at the planned sizes too; they rely on it."""
    for lanes in candidates:
        stored = all(lanes.stride(place) == 1 and lanes.aligned(place) for place in places)
        if not (stored and lanes.may_divide(length) and all(is_vector(load, lanes) for load in loads)):
            continue
        lanes.rely_on_size(length)
        lanes.rely_on_loads(loads)
        lanes.rely_on_vectors(places)
        if divides(lanes, planned):
            return lanes
    return None


def divides(lanes: Lanes, planned: Mapping[str, int]) -> bool:
    """Whether what lanes rely on to be multiples of the width is so at the planned sizes, as far as these are known."""
    return all(size.evaluate(planned) % lanes.width == 0 for size in lanes.multiples if size.symbols <= planned.keys())


def widest(widths: Iterable[int], dtypes: Iterable[int], extent: Dim | None = None) -> int:
    """The vector width to compute with.

    Loads that are no vectors under it do not count: what is broadcast over a size that no width divides, or begins
    between two vectors, is asked for element by element under every width, and all else in fewer pieces
    (benchmarks/results, ways).

    Args:
        widths: the candidates; 1 is one.
        dtypes: element types of the tensors that are moved in full.
        extent: how many neighbours there are in a row; the width must divide it.  None: vectors may be cut short.
    """
    smallest = min((TYPES[dtype].size for dtype in dtypes if dtype != BOOL), default=1)
    most = min(VECTOR_BYTES // smallest, 8)
    return max(width for width in widths if width <= most and (
        extent is None or extent.value is None or extent.value % width == 0))


def scattered_inputs(loads: Iterable[Load], lanes_of: dict[int, Lanes]) -> tuple[int, ...]:
    """Inputs that neighbouring elements read far apart; not those of which as many loads lie side by side as a step is
    wide, as windows read them."""
    lanes = lanes_of[2]
    apart = Counter((load.input, _usual_step(load.offset, lanes)) for load in loads if is_scattered(load.offset, lanes))
    return tuple(sorted({place for (place, step), count in apart.items() if step.value is None or abs(
        step.value) > count}))


def is_scattered(offset: Dim, lanes: Lanes) -> bool:
    """Whether neighbouring elements lie far apart: the step is neither 0 nor 1."""
    if lanes.stride(offset) in (0, 1):
        return False
    step = _usual_step(offset, lanes)
    return step.value is None or abs(step.value) > 1


def _usual_step(offset: Dim, lanes: Lanes) -> Dim:
    """By how much an offset grows from one element to the next, but where a digit turns over."""
    total = dim(0)
    for monomial, factor in offset.terms.items():
        for atom, power in monomial:
            pace = _pace(atom.name, lanes) if atom.kind == "symbol" else dim(0)
            if pace != 0 and power == 1:
                total = total + cofactor((monomial, factor), atom.name) * pace
    return total


def _pace(name: str, lanes: Lanes) -> Dim:
    """The same of a loop variable; what an index read from memory does is not known, and counts as nothing."""
    if name == lanes.element:
        return dim(1)
    if name in lanes.space.derived:
        return _usual_step(lanes.space.derived[name], lanes)
    digit = lanes.space.digits.get(name)
    return _pace(digit.base, lanes) if digit is not None and digit.step == 1 else dim(0)
