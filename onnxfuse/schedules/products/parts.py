"""What a product with what surrounds it is made of: expressions over four loops.

    b  batches: of what both operands differ by      m  rows of the left operand      n  columns of the right one
    k  what is summed over
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnxfuse.graph.dims import Dim, dim, product
from onnxfuse.ir.context import Unlowerable
from onnxfuse.ir.integers import Numbers, numbers_of
from onnxfuse.ir.scalars import FUNCTIONS
from onnxfuse.ir.tensors import Contract, Expand, Reduce, Tensor
from onnxfuse.lowering.arrangement import arrangement
from onnxfuse.lowering.index import Coordinates, IndexSpace
from onnxfuse.lowering.lower import Lowered
from onnxfuse.lowering.pull import Apply, Condition, Load, Puller, Rows, Scalar
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.kernel import (
    divides,
    is_vector,
    load_of,
    moving_loads,
    sources,
    targets,
    vector_guards,
    vector_loads,
    walk,
)
from onnxfuse.schedules.lanes import Lanes
from onnxfuse.schedules.layouts import Place, reached_in_part
from onnxfuse.schedules.multiplied import Multiplied, unmultiplied
from onnxfuse.schedules.products.cut import in_one

MOST_BESIDE = 4
"""Products of one left operand that a kernel computes side by side, as a gate and what it is for, or queries, keys and
values."""


LEAST_COPIED = 4
"""Bytes that are copied at once at least while threads go on."""

MOST_WIDE = 8
"""Elements of a vector of results: of float32, and of what is read beside them, a thread has no room for more."""


@dataclass(frozen=True)
class Side:
    """How tiles of an operand are filled.

    Attributes:
        scalar: its element; loop: the base of its rows, ``@m`` or ``@n``.
        across: whether neighbours along that loop lie side by side, and not those that are summed over.
        lanes: of its vectors; width: elements of one; copied: whether they are copied as they lie in memory.
        shifted: whether they begin between two of memory's own, and may end where rows do.
    """

    scalar: Scalar
    loop: str
    across: bool
    lanes: Lanes
    width: int
    copied: bool
    shifted: bool = False


@dataclass(frozen=True)
class ProductParts(Multiplied):
    """Products of one left operand over the loops b (batch), m (rows), n (columns) and k (what is summed over).

    Attributes:
        lowered: the region; puller: pulled its elements.
        batch, rows, columns, depth: extents of the loops.
        left, rights: the operands' elements.
        results: of the outputs at (b, m, n), over the products' sums, those that are parts of these one for all of
            them; places: where these lie.
        swapped: whether the left operand is the right one of the contractions.
        kept: for each result, under which conditions it is one: others are stored nowhere.
        zeros: of integers, for each product the zero points of the left operand and of the right one at (b, m, n), by
            which their elements are to be less; None where that is zero.
    """

    lowered: Lowered
    puller: Puller
    batch: Dim
    rows: Dim
    columns: Dim
    depth: Dim
    left: Scalar
    rights: tuple[Scalar, ...]
    results: tuple[Scalar, ...]
    places: tuple[Dim, ...]
    kept: tuple[tuple[Condition, ...], ...]
    swapped: bool = False
    zeros: tuple[tuple[Scalar | None, Scalar | None], ...] = ()

    @property
    def operand(self) -> int:
        """Their type; of integers the right operands may have another one of that size."""
        return self.left.dtype

    @property
    def integers(self) -> bool:
        """Whether they are 8-bit integers."""
        return bool(self.zeros)

    @property
    def of_matrices(self) -> bool:
        """Whether they are of floats and of no convolution, of which rows are windows, or few are multiplied."""
        return not self.integers and {"Conv", "ConvTranspose"}.isdisjoint(self.lowered.program.operators)

    @property
    def has_zeros(self) -> bool:
        """Whether any of them have a zero point."""
        return any(zero is not None for pair in self.zeros for zero in pair)

    def neighbours(self, loop: str) -> bool:
        """Whether every result's neighbours along a loop are so in memory, where sizes divide."""
        lanes = self.lanes(loop, 1)
        return all(lanes.stride(place) == 1 for place in self.places)

    @property
    def follows(self) -> int:
        """Instructions of what is computed of each sum, as ``Function`` counts them."""
        applied = [scalar for scalar in walk(self.results) if isinstance(scalar, Apply)]
        return sum(FUNCTIONS[each.function].instructions for each in applied if each.function in FUNCTIONS)

    def beside(self, lanes: Lanes) -> list[Load]:
        """Loads of an element for each result, rows of them where the results' are, such as a residual."""
        down = self.lanes("@m", 1)
        return [load for load in moving_loads(self.results, lanes) if down.moves_place(load.offset)]

    def lanes(self, loop: str, width: int) -> Lanes:
        """Lanes along a loop."""
        return Lanes(self.puller.space, self.puller, loop, "", width)


def parts_of(
    lowered: Lowered, products: Sequence[Contract], reduction: Reduce | None = None
) -> ProductParts | Refusal:
    """The region as products of one left operand; which operand is the left one is what stores results side by side.

    Args:
        reduction: one over the results' rows, where these are reduced.
    """
    if not are_bytes(products) and (named := unmultiplied(products)):
        return refused(f"a product of {named}; its kernels have those of float16, bfloat16, float32 or 8-bit integers")
    found: list[ProductParts | Refusal] = []
    for swapped in (False, True):
        try:
            placed = _placed(lowered, products, swapped, reduction)
        except Unlowerable as stopped:  # sums are used at other places than where they are taken, or other rows reduced
            placed = stopped.refusal
        if isinstance(placed, ProductParts) and placed.neighbours("@n"):
            return placed
        found.append(placed)
    return next((each for each in found if isinstance(each, ProductParts)), found[0])


def are_bytes(products: Sequence[Contract]) -> bool:
    """Whether products are of 8-bit integers, or these less zero points, all operands on one side of one type."""
    found = [[numbers_of(operand) for operand in each.operands] for each in products]
    kinds = [{None if side is None else side.numbers.dtype for side in sides} for sides in zip(*found, strict=True)]
    return all(len(types) == 1 and None not in types for types in kinds)


def other_way(parts: ProductParts, products: Sequence[Contract]) -> ProductParts | None:
    """The region with its operands' places changed; None where its products have no such operand in common."""
    found = _placed(parts.lowered, products, not parts.swapped)
    return found if isinstance(found, ProductParts) else None


def refused(message: str) -> Refusal:
    """Why a region with products has no kernel of a schedule's."""
    return Refusal("product-structure", message)


def _placed(
    lowered: Lowered, products: Sequence[Contract], swapped: bool, reduction: Reduce | None = None
) -> ProductParts | Refusal:
    """The region's expressions over the loops; ``swapped``: with the right operand's columns as rows."""
    first = products[0]
    if not _is_beside(products, swapped):
        return refused("its products have no operand in common that all of their rows are of")
    space = IndexSpace()
    down, across = (first.columns, first.rows) if swapped else (first.rows, first.columns)
    inner = tuple(range(first.rank, len(first.loops)))
    groups = {"@b": first.batch, "@m": down, "@n": across, "@k": inner}
    extents: dict[str, Dim] = {}
    bases: dict[str, Dim] = {}
    at: dict[int, Dim] = {}
    for name, loops in groups.items():
        sizes = tuple(first.loops[loop] for loop in loops)
        extents[name] = product(sizes)
        bases[name] = space.base(name, extents[name]) if extents[name] != 1 else dim(0)
        at |= zip(loops, space.delinear(bases[name], sizes), strict=True)
    place = tuple(at[axis] for axis in range(first.rank))
    found = None if reduction is None else arrangement(reduction.operand.shape, reduction.axes)
    if found is not None and found.length != extents["@n"]:
        return refused("rows are reduced that are not those of its product's results")
    rows = None if found is None else Rows(None, bases["@n"], found)
    puller = Puller(space, rows, sums=dict.fromkeys(products, place))
    one, other = (1, 0) if swapped else (0, 1)
    left, *_ = _operand(first, one, at, puller)
    rights = tuple(_operand(each, other, at, puller)[0] for each in products)
    zeros = tuple((_operand(each, one, at, puller)[1], _operand(each, other, at, puller)[1]) for each in products)
    along = Lanes(space, puller, "@k", "", 1)
    if any(zero is not None and along.moves(zero) for pair in zeros for zero in pair):
        return refused("zero points change along what its product sums up")
    outputs = _outputs(lowered, dict.fromkeys(products, place), space)
    if outputs is None:
        return refused("what follows the product changes the number of its elements")
    kept = tuple(out.conditions for out in outputs.values())
    results = tuple(puller.element(output, out.at, out.conditions) for output, out in outputs.items())
    places = tuple(space.linear(out.at, output.shape) for output, out in outputs.items())
    return ProductParts(
        lowered, puller, extents["@b"], extents["@m"], extents["@n"], extents["@k"], left, rights,
        results if reduction else in_one(results, kept), places, kept, swapped, zeros if are_bytes(products) else ())


def _outputs(
    lowered: Lowered, start: Mapping[Tensor, Coordinates], space: IndexSpace
) -> dict[Tensor, Place] | None:
    """Where each output is written; None where one has more than the sums' elements."""
    found = reached_in_part(lowered.program, space, start)
    if any(id(output) not in found for output in lowered.program.outputs):
        return None
    return {output: found[id(output)] for output in lowered.program.outputs}


def _is_beside(products: Sequence[Contract], swapped: bool) -> bool:
    """Whether products have their left operand in common, and all loops."""
    first, own = products[0], int(swapped)
    return all(each.loops == first.loops and (each.batch, each.rows) == (first.batch, first.rows)
               and each.axes[own] == first.axes[own] and each.operands[own] is first.operands[own]
               for each in products)


def _operand(contract: Contract, side: int, at: Mapping[int, Dim], puller: Puller) -> tuple[Scalar, Scalar | None]:
    """An operand's element; of integers the numbers' and their zero point's."""
    operand, place = contract.operands[side], tuple(at[loop] for loop in contract.axes[side])
    found = numbers_of(operand) or Numbers(operand, None)
    zero = found.zero
    return puller.element(found.numbers, place), None if zero is None else puller.element(
        Expand(zero.dtype, operand.shape, zero), place)


# ---- How operands are read, and results stored. ----


def side_of(parts: ProductParts, scalar: Scalar, loop: str, planned: Mapping[str, int]) -> Side:
    """How tiles of an operand are filled: by vectors along what is summed over or along its rows, where it lies so at
    the planned sizes; else one by one."""
    ways = (side_along(parts, scalar, loop, parts.lanes(along, parts.width), planned) for along in ("@k", loop))
    return next((side for side in ways if side is not None), single(parts, scalar, loop))


def side_in_pieces(parts: ProductParts, scalar: Scalar, loop: str, planned: Mapping[str, int]) -> Side:
    """The same by as much as lies together in memory: shorter vectors where sizes divide these alone, and where none
    do, vectors that begin anywhere."""
    side = side_of(parts, scalar, loop, planned)
    if side.width > 1 or not parts.of_matrices:
        return side
    shorter = [parts.width >> step for step in (1, 2) if (parts.width >> step) * parts.size >= LEAST_COPIED]
    ways = (side_along(parts, scalar, loop, parts.lanes(along, width), planned)
            for width in shorter for along in ("@k", loop))
    shifted = (_shifted(parts, scalar, loop, parts.lanes(along, parts.width), planned) for along in ("@k", loop))
    return next((found for found in (*ways, *shifted) if found is not None), side)


def _shifted(parts: ProductParts, scalar: Scalar, loop: str, lanes: Lanes, planned: Mapping[str, int]) -> Side | None:
    """An operand that is copied by vectors of these lanes that begin anywhere; None where neighbours lie apart."""
    if not isinstance(scalar, Load) or lanes.space.extents.get(lanes.element) is None:
        return None
    if lanes.stride(scalar.offset) != 1 or not all(map(lanes.uniform, scalar.conditions)):
        return None
    lanes.rely(scalar.offset)
    for condition in scalar.conditions:
        lanes.rely_on_condition(condition)
    if not divides(lanes, planned):
        return None
    return Side(scalar, loop, lanes.element != "@k", lanes, lanes.width, copied=True, shifted=True)


def side_along(
    parts: ProductParts, scalar: Scalar, loop: str, lanes: Lanes, planned: Mapping[str, int]
) -> Side | None:
    """An operand by vectors of these lanes; None where none of it are neighbours in memory, at the planned sizes too.
    """
    extent = lanes.space.extents.get(lanes.element)
    moving = moving_loads([scalar, *parts.puller.gathered.values()], lanes)
    neighbours = [load for load in moving if lanes.stride(load.offset) == 1]
    if extent is None or not neighbours or not lanes.may_divide(extent):
        return None
    if not all(is_vector(load, lanes) for load in moving):
        return None
    lanes.rely_on_size(extent)
    lanes.rely_on_loads(moving)
    if not divides(lanes, planned):
        return None
    return Side(scalar, loop, lanes.element != "@k", lanes, lanes.width, load_of(scalar) is not None)


def single(parts: ProductParts, scalar: Scalar, loop: str) -> Side:
    """Tiles that are filled element by element."""
    return Side(scalar, loop, False, parts.lanes("@k", 1), 1, False)


def side_guards(parts: ProductParts, side: Side) -> tuple[str, ...]:
    """Guards under which an operand can be read so."""
    moving = moving_loads([side.scalar, *parts.puller.gathered.values()], side.lanes)
    read = sources(load for load in moving if side.lanes.stride(load.offset) == 1)
    return vector_guards(parts.lowered, side.lanes, () if side.shifted else read)


def result_lanes(
    parts: ProductParts, planned: Mapping[str, int], line: Dim | None = None
) -> tuple[Lanes, tuple[str, ...]]:
    """Lanes of the results' vectors along their columns, or where rows are places of windows along a line of so many of
    these, and the guards under which they are so."""
    loop, extents = ("@n", [parts.columns]) if line is None else ("@m", [parts.rows, line])
    widest = min(parts.width, MOST_WIDE)
    shorter = widest.bit_length() - 2 if parts.of_matrices else 0
    found = (_results_by(parts, parts.lanes(loop, widest >> step), extents, planned) for step in range(shorter + 1))
    return next((each for each in found if each is not None), (parts.lanes(loop, 1), ()))


def _results_by(
    parts: ProductParts, lanes: Lanes, extents: Sequence[Dim], planned: Mapping[str, int]
) -> tuple[Lanes, tuple[str, ...]] | None:
    """These lanes and the guards under which they are the results'; None where these are no such vectors."""
    moving = moving_loads(parts.results, lanes)
    conditions = [condition for each in parts.kept for condition in each]
    stored = all(lanes.stride(place) == 1 and lanes.aligned(place) for place in parts.places)
    stored = stored and all(map(lanes.uniform, conditions))
    if not stored or not all(map(lanes.may_divide, extents)):
        return None
    vectors = vector_loads(moving, lanes)
    for extent in extents:
        lanes.rely_on_size(extent)
    lanes.rely_on_loads(vectors)
    lanes.rely_on_vectors(parts.places)
    for condition in conditions:
        lanes.rely_on_condition(condition)
    if not divides(lanes, planned):
        return None
    return lanes, vector_guards(parts.lowered, lanes, [*sources(vectors), *targets(parts.lowered)])


