"""Operands of a product that the GPU copies by tensor maps: those that are read as they lie, along straight axes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from onnxfuse.graph.dims import Dim, dim, symbol
from onnxfuse.ir.scalars import BFLOAT16, FLOAT, FLOAT16, INT8, TYPES, UINT8
from onnxfuse.lowering.launch import expression
from onnxfuse.lowering.pull import Load, Puller, Scalar
from onnxfuse.lowering.tensor_map import MOST_RANK, TensorMap
from onnxfuse.schedules.products.parts import ProductParts
from onnxfuse.schedules.products.shape import STAGE_BYTES
from onnxfuse.schedules.source import Parameter
from onnxfuse.schedules.text import Writer

PIECE_BYTES = 16
"""What neighbours along all axes but the first lie at multiples of."""

KINDS: dict[int, str] = {FLOAT16: "float16", BFLOAT16: "bfloat16", INT8: "uint8", UINT8: "uint8", FLOAT: "tfloat32"}
"""What maps call the types of elements that are copied: of integers bits alone matter, float32 is rounded."""

PROMOTION = 256
"""Bytes that the second-level cache fetches together: what two stages copy of a row."""

LINES = (STAGE_BYTES, 64, 32)
"""Bytes of a row that a stage may have: what copies and products know how to lay out."""

COPIED, FILLED = 1.0e-9, 4.1e-9
"""Seconds of a line of a stage's tiles, and beside that as many as zeros make up of it: boxes with 16 channels of 64
took 0.79 microseconds for 192 lines, with 32 half (H100)."""

FEWER = 0.9
"""Of what long lines take, what short ones are to take at most."""

FIRST = ""
"""The axis of two whose second is where an operand begins that is a part of a tensor."""


@dataclass(frozen=True)
class Mapped:
    """An operand as a tensor in memory.

    Attributes:
        input: the tensor input that it is; dtype: its type.
        axes: loop variables by name, the one whose neighbours lie side by side first; then that of rows or of what is
            summed over, then those that follow from the batch.
        strides: elements from neighbour to neighbour along each axis but the first; sizes: along all.
        across: whether the first is that of rows.
        line: bytes that a stage has of each row.
    """

    input: int
    dtype: int
    axes: tuple[str, ...]
    strides: tuple[Dim, ...]
    sizes: tuple[Dim, ...]
    across: bool
    line: int = field(default=STAGE_BYTES, kw_only=True)

    def map(self, rows: int, symbols: Mapping[str, str]) -> TensorMap:
        """What copies panels of so many rows of it, or, across, of as many as are summed over."""
        axes, panel = len(self.axes), self.line // self.size
        return TensorMap(
            f"i{self.input}", KINDS[self.dtype],
            tuple(expression(size, symbols) for size in self.sizes),
            tuple(expression(stride * self.size, symbols) for stride in self.strides),
            (panel, panel if self.across else rows, *[1] * (axes - 2)), swizzle=self.line, promotion=PROMOTION)

    def others_at(self, writer: Writer, after: int = 2) -> list[str]:
        """Where along each axis a tile begins that lies behind the first ones: one further where the tensor does."""
        return [writer.index(dim(1) if axis == FIRST else symbol(axis)) for axis in self.axes[after:]]

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return TYPES[self.dtype].size

    def divides(self, planned: Mapping[str, int]) -> bool:
        """Whether rows begin at multiples of 16 bytes at the planned sizes, as far as these are known."""
        width = PIECE_BYTES // self.size
        return all(stride.evaluate(planned) % width == 0 for stride in self.strides if stride.symbols <= planned.keys())

    def guards(self, symbols: Mapping[str, str]) -> tuple[str, ...]:
        """Under which there is such a map: there are elements, and what has neighbours behind it, not before, has them
        at multiples of 16 bytes."""
        width = PIECE_BYTES // self.size
        return (
            *(f"0 {expression(size, symbols)} <" for size in self.sizes if not size.value),
            *(f"{expression(stride, symbols)} {width} % 0 ==" for stride in self.strides
              if stride.multiple_of() % width),
            *(f"0 {expression(stride, symbols)} {'<' if axis == FIRST else '<='}"
              for axis, stride in zip(self.axes[1:], self.strides, strict=True)
              if not stride.non_negative() or (axis == FIRST and stride.value is None)),
            f"i{self.input}.addr {PIECE_BYTES} % 0 ==")


def mapped(parts: ProductParts, scalar: Scalar, loop: str) -> Mapped | None:
    """An operand whose rows are those of a loop, ``@m`` or ``@n``, as a tensor in memory; None where it is computed, or
    lies otherwise."""
    steps = steps_of(parts.puller, scalar.offset) if isinstance(scalar, Load) else None
    if steps is None or not {loop, "@k"} <= steps.keys() or FIRST in steps:
        return None
    across = steps["@k"] != 1
    return laid(parts.puller, scalar, (loop, "@k") if across else ("@k", loop), across=across)


def line_of(length: int, size: int) -> int:
    """Bytes of the lines that ``length`` neighbouring elements are copied by in the least time."""
    whole = length * size
    seconds = {line: count * (COPIED + FILLED * (1 - whole / (count * line)))
               for line in LINES if (count := -(-whole // line)) and (line == STAGE_BYTES or whole % line == 0)}
    best = min(seconds, key=seconds.__getitem__)
    return best if seconds[best] < FEWER * seconds[STAGE_BYTES] else STAGE_BYTES


def all_mapped(parts: ProductParts, found: Sequence[Mapped | None], planned: Mapping[str, int]) -> list[Mapped]:
    """Operands that tensor maps copy; none where one is read otherwise, or right ones lie differently."""
    operands = [operand for operand in found if operand is not None and operand.divides(planned)]
    alike = len(operands) == len(found) and len({operand.across for operand in operands[1:]}) == 1
    # Of integers no totals are taken on the way, and what has no 16 bits is not transposed.
    transposed = parts.size != 2 and any(each.across for each in operands)
    return operands if alike and not transposed and not parts.has_zeros else []


def laid(puller: Puller, scalar: Scalar, loops: tuple[str, str], *, across: bool = False, beside: Collection[str] = ()
         ) -> Mapped | None:
    """What is read as it lies, as a tensor in memory: along the first of two loops side by side, by rows along the
    second, and by the batch ``@b`` and variables ``beside``; None where it lies otherwise, or is computed."""
    if not isinstance(scalar, Load) or scalar.conditions or scalar.dtype not in KINDS:
        return None
    steps = steps_of(puller, scalar.offset)
    if steps is None or not set(loops) <= steps.keys() or len(steps) > MOST_RANK or steps[loops[0]] != 1:
        return None
    others = sorted(steps.keys() - set(loops))
    if not all(name == FIRST or name in beside or is_of_batch(puller, name) for name in others):
        return None
    axes = (*loops, *others)
    sizes = [dim(2) if name == FIRST else _extent(puller, name) for name in axes]
    strides = tuple(steps[name] for name in axes[1:])
    width = PIECE_BYTES // TYPES[scalar.dtype].size
    if any((stride * -1).non_negative() or (stride.value or 0) % width for stride in strides):
        return None
    known = tuple(size for size in sizes if size is not None)
    return Mapped(scalar.input, scalar.dtype, axes, strides, known, across) if len(known) == len(axes) else None


def steps_of(puller: Puller, offset: Dim) -> dict[str, Dim] | None:
    """By how much an offset grows with each loop variable, and, as ``FIRST``, where it begins if that is not the
    tensor's first element; None where it does not grow by a constant step of each."""
    space, found = puller.space, dict[str, Dim]()
    for monomial, factor in offset.terms.items():
        term = Dim({monomial: factor})
        names = [name for name in term.symbols if space.is_variable(name) or name in puller.gathered]
        name = names[0] if names else FIRST
        step = term.divide(symbol(name)) if names else term
        if len(names) > 1 or step is None or name in step.symbols:
            return None
        found[name] = found.get(name, dim(0)) + step
    return found


def is_of_batch(puller: Puller, name: str) -> bool:
    """Whether a loop variable is the batch's, or a part of it."""
    digit = puller.space.variable(name)
    return digit is not None and digit.base == "@b"


def _extent(puller: Puller, name: str) -> Dim | None:
    """How many values a loop variable has."""
    space = puller.space
    if name in space.extents:
        return space.extents[name]
    digit = space.digits[name]
    extent = space.extents[digit.base]
    return digit.size if digit.size is not None or extent is None else extent.divide(digit.step)


def map_parameter(place: int) -> Parameter:
    """The parameter of a kernel that is the plan's tensor map at a place."""
    return Parameter("const __grid_constant__ of::TensorMap", f"m{place}", f"m{place}", "const of::TensorMap&")
