"""Products of whose results rows are reduced, in one kernel: a residual and a norm behind a projection, a classifier's
softmax.

    left x right ─ bias, residual ─ norm of each row ─▶

On Hopper, where the operands lie so that tensor maps copy them, the blocks of a cluster have the columns of some rows
between them and tell each other what they find of these (``rows_text``); so the results never reach memory
before they are whole.  Everywhere else, and for sizes at which that does not run, the same node launches two kernels:
the product with what follows it pointwise, and the rows' own, with the values between them in scratch memory, or where
they are a result of the region in that.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cached_property

from onnxfuse.graph.dims import Dim
from onnxfuse.ir.descent import above
from onnxfuse.ir.scalars import TYPES
from onnxfuse.ir.tensors import Contract, Reduce
from onnxfuse.lowering.launch import Variant, expression
from onnxfuse.lowering.lower import Lowered
from onnxfuse.lowering.pull import Contracted, Load, Reduced, Scalar, children
from onnxfuse.lowering.tensor_map import TensorMap
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.attentions.shape import ALL_SHARED, BLOCK_BYTES, PANEL
from onnxfuse.schedules.choice import told
from onnxfuse.schedules.headers import in_order
from onnxfuse.schedules.kernel import (
    HOPPER_HAS,
    TILE_BEGINS,
    Kernel,
    Pace,
    contractions,
    fits_narrow,
    make_plan,
    narrow_guards,
    walk,
)
from onnxfuse.schedules.products.blocks import CLUSTERS
from onnxfuse.schedules.products.in_two import ProductDivided, divided, in_two
from onnxfuse.schedules.products.maps import Mapped, all_mapped, map_parameter, mapped
from onnxfuse.schedules.products.pace import UNKNOWN
from onnxfuse.schedules.products.parts import ProductParts, parts_of, refused, result_lanes
from onnxfuse.schedules.products.product import MULTIPLYING, fitting
from onnxfuse.schedules.products.rows_text import ProductRowsShape, ProductRowsText, RoundedProductRowsText
from onnxfuse.schedules.products.shape import STAGE_BYTES
from onnxfuse.schedules.reductions.online import bare
from onnxfuse.schedules.reductions.phases import Output, Phases
from onnxfuse.schedules.reductions.rows import Rows
from onnxfuse.schedules.schedule import Expected, Request
from onnxfuse.schedules.source import Entry, Function, Signature, Source

ROWS, COLUMNS = (64, 128, 192), (64, 128, 192)
"""Of a block's tile; columns are whole pieces of what a warp lays out."""

MOST_BLOCKS = max(CLUSTERS)
"""Of a cluster."""

KEPT = {1: 96, 2: 96, 3: 64}
"""Registers of a thread for what stays from phase to phase, by groups that multiply: beside them are those of a piece's
sums that are not read yet, and of all else."""

LEAST_STAGES, MOST_STAGES = 3, 8
"""Of a block, in shared memory."""

MULTIPLIED, ALONE, NARROW = 1.71e-11, 1.17, 1.7
"""Seconds of an element of a tile in a stage, of 16 bits or of TF32: what the instruction takes; how many times as long
where one group multiplies alone, and where a tile is of 64 columns, for which rows are read too often."""

COPIED = 1.14e-6
"""Seconds that a stage's copies are on their way: where stages are few these are waited for."""

LAUNCHED, BEGUN = 0.8e-6, 1.2e-6
"""Seconds of a launch, and of a tile before its first stage is there."""

ENDS, WIDER = 1.4e-6, 1.7
"""Seconds of what follows the product in a tile of 64 x 128; by what power that grows with columns, and it is a half
more for each further group."""

BESIDE, NEAR, CACHED = 3e12, 8e12, 16 << 20
"""Bytes a second that all blocks together read beside their products, and write, while none multiplies; where that is
not more than so many in all, which the second-level cache holds, it is the second.  (All of these: H200, ten norms
behind products in 58 ways, of which nine of ten took 0.89 to 1.29 times what is predicted.)"""

MOST_TRIED = 6
"""Tiles that tuning tries."""


class ProductRows(ProductDivided):
    """Products of whose results rows are reduced."""

    name = "product_rows"
    settings = "tiles of {rows} x {columns}, {stages} stages, {blocks} blocks a row"

    def expected(self, lowered: Lowered, sizes: Mapping[str, int], multiprocessors: int) -> Expected | None:
        """One kernel."""
        return Expected() if _found(lowered) else None

    def kernel(self, request: Request) -> Kernel | Refusal | None:
        """The kernel of a region with one product and reductions of what it gives."""
        found = _found(request.lowered)
        if found is None:
            return None
        contract, reduction = found
        parts = parts_of(request.lowered, [contract], reduction)
        if isinstance(parts, Refusal):
            return parts
        work = _RowsWork(request, parts, contract)
        return work.refusal() or work.kernel()


def _found(lowered: Lowered) -> tuple[Contract, Reduce] | None:
    """The one product of a region, and the first reduction of what comes of it; None where there is not both."""
    products = contractions(lowered)
    if len(products) != 1:
        return None
    reduction = next((each for each in above(lowered.program, products[0]) if isinstance(each, Reduce)), None)
    return None if reduction is None else (products[0], reduction)


class _RowsWork:
    """The kernels of one region as they come."""

    def __init__(self, request: Request, parts: ProductParts, contract: Contract) -> None:
        self.request, self.parts, self.contract, self.lowered = request, parts, contract, request.lowered
        planned = self.lowered.binding.planned(request.sizes)
        self.lanes, self.stored = result_lanes(parts, planned)
        found = [mapped(parts, parts.left, "@m"), mapped(parts, parts.rights[0], "@n")]
        self.mapped: list[Mapped] = all_mapped(parts, found, planned)
        outputs = [Output(index, tensor.dtype, scalar, True, place) for index, (tensor, scalar, place) in enumerate(
            zip(self.lowered.program.outputs, parts.results, parts.places, strict=True))]
        self.phases = Phases(outputs, self.lanes, length=parts.columns)
        # Squares are of differences from a mean that follows from what is kept.
        if not all(_is_kept(each.element, self.phases.kept) for each in self.phases.moments.values()):
            self.phases = Phases(outputs, self.lanes)
        self.symbols = self.lowered.binding.symbols

    def refusal(self) -> Refusal | None:
        """Why no cluster holds the rows."""
        parts, columns = self.parts, self.parts.columns.value
        if parts.exact:
            return refused("its operands are multiplied as TF32, and the option use_tf32=0 keeps float32")
        if not parts.of_matrices or not self.mapped:
            return refused("operands of a product whose results' rows are reduced are read as they lie")
        if columns is None or columns > MOST_BLOCKS * max(COLUMNS):
            return refused(f"its rows have {parts.columns} elements, and the blocks of a cluster hold "
                            f"{MOST_BLOCKS * max(COLUMNS)} at most")
        reductions = [scalar for scalar in walk(parts.results) if isinstance(scalar, Reduced)]
        if self.lanes.width < 2 or any(map(bool, parts.kept)) or parts.puller.gathered or any(
                TYPES[each.dtype].compute not in ("float", "int") for each in reductions):
            return refused("what follows the product is no rows of vectors")
        return None if self.tried else refused("what of its rows stays from phase to phase fills the registers")

    # ---- Which tiles. ----

    def planned(self, size: Dim) -> int:
        """A size as it is planned to be; large where that is not known."""
        found = self.lowered.binding.at(size, self.request.sizes)
        return UNKNOWN if found is None else found

    @property
    def length(self) -> int:
        """Elements of a row."""
        return self.parts.columns.value or 0

    @property
    def steps(self) -> int:
        """Stages that a tile goes through."""
        return -(-self.planned(self.parts.depth) * self.parts.size // STAGE_BYTES)

    @cached_property
    def tried(self) -> list[ProductRowsShape]:
        """Tiles that may be quickest, those first that are expected to take least."""
        length = self.length
        # Beside a part of a tile all others have conditions, and registers that these take.
        whole = [columns for columns in COLUMNS if length % columns == 0]
        shapes = [shape for rows in ROWS for columns in whole or COLUMNS for shape in self.shapes(rows, columns)]
        return sorted(shapes, key=self.seconds)[:MOST_TRIED]

    def shapes(self, rows: int, columns: int) -> list[ProductRowsShape]:
        """Blocks with a tile: with as many stages as there is room for in one that is alone, and in one of two."""
        blocks = -(-self.length // columns)
        held = self.live * columns // 2
        across = self.mapped[1].across and columns % PANEL
        if blocks > MOST_BLOCKS or across or held > KEPT[rows // 64] or (
                blocks > 1 and blocks * columns - self.length >= columns):
            return []
        reductions = sum(map(len, self.phases.reductions))
        least = ProductRowsShape(rows, columns, 1, blocks=blocks, reductions=reductions)
        one = replace(least, stages=2).shared - least.shared
        found = []
        for beside in (1, 2) if rows == 64 and columns <= 128 else (1,):
            room = ALL_SHARED // beside - BLOCK_BYTES - least.shared
            stages = min(1 + room // one, max(self.steps, LEAST_STAGES), MOST_STAGES)
            if stages >= LEAST_STAGES:
                found.append(replace(least, stages=stages))
        return list(dict.fromkeys(found))

    @property
    def live(self) -> int:
        """Elements of a result that are kept at a time: what all rows have in common is, a vector of each column."""
        down = self.parts.lanes("@m", 1)
        common = [each for each in self.phases.kept if isinstance(each, Load) and not down.moves_place(each.offset)]
        return max(self.phases.live - len(common), 1)

    def seconds(self, shape: ProductRowsShape) -> float:
        """Seconds that a kernel of such blocks takes."""
        blocks = min((count for count in CLUSTERS if count >= shape.blocks), default=1)
        clusters = HOPPER_HAS if shape.blocks == 1 else CLUSTERS[blocks]
        tiles = -(-self.planned(self.parts.rows) // shape.rows) * self.planned(self.parts.batch)
        turns = -(-tiles // clusters)
        beside = min(shape.beside, turns)
        element = MULTIPLIED * (ALONE if shape.groups == 1 else 1.0) * (NARROW if shape.columns == 64 else 1.0)
        stage = max(beside * shape.rows * shape.columns * element, COPIED / shape.stages)
        ends = beside * ENDS * math.pow(shape.columns / 128, WIDER) * (1 + (shape.groups - 1) / 2)
        tile, together = shape.rows * shape.columns * shape.blocks * self.moved, min(clusters * beside, tiles)
        moved = tile * together / (NEAR if tile * tiles <= CACHED else BESIDE)
        return LAUNCHED + -(-turns // beside) * (BEGUN + self.steps * stage + ends + moved)

    @property
    def moved(self) -> int:
        """Bytes of a result's element, and of what is read of the results' shape."""
        read = (load.dtype for load in self.parts.beside(self.lanes))
        return sum(TYPES[dtype].size for dtype in (*(each.dtype for each in self.lowered.program.outputs), *read))

    # ---- The kernels. ----

    def kernel(self) -> Kernel | Refusal:
        """All of it."""
        lowered, request = self.lowered, self.request
        two = in_two(divided(request, self.contract), (Rows(),))
        if isinstance(two, Refusal):
            return two
        offered = {shape.choice: shape for shape in self.tried}
        own = next(iter(offered.values()))
        choice, first = told(request.choice, offered)
        shape = own if first is None else first
        function, maps = self.function(shape, len(two.maps))
        entry = function.entry(shape.name, (), shape.bits, 32 * shape.warps, shape.beside)
        fits = fits_narrow(lowered, rows=False)
        used = {*two.headers, "onnxfuse", "mma", *MULTIPLYING[self.parts.size], "tensor_copies", "cluster"}
        source = Source(
            in_order(used), f"{request.rule}: {', '.join(lowered.program.operators)}",
            (function, *two.functions), (entry, *two.entries))
        plan = replace(
            make_plan(lowered, request.rule, self.parts.puller, [
                *([self.variant(entry, shape)] if fits else ()), *two.variants]),
            maps=(*two.maps, *maps), scratch=two.scratch)
        choices = tuple(each for each, other in offered.items() if other != own)
        return Kernel("product_rows", source, plan, (), choice, choices, heavy=True, rounds=self.parts.rounds,
                      pace=self.pace(shape))

    def pace(self, shape: ProductRowsShape) -> Pace | None:
        """What its time follows from, where no size is left open; of float32 nothing was measured."""
        sizes = (self.parts.batch, self.parts.rows, self.parts.depth)
        if self.parts.rounds or any(self.lowered.binding.at(size, self.request.sizes) is None for size in sizes):
            return None
        return Pace(1, 1, 0, whole=self.seconds(shape) - TILE_BEGINS)

    def function(self, shape: ProductRowsShape, first: int) -> tuple[Function, list[TensorMap]]:
        """What the blocks do, and the maps that they take, from the plan's ``first`` on."""
        left, right = self.mapped
        maps = [left.map(shape.rows, self.symbols), right.map(shape.columns, self.symbols)]
        signature = Signature(self.lowered)
        text = (RoundedProductRowsText if self.parts.rounds else ProductRowsText)(
            self.parts, self.mapped, self.phases, shape, signature.sizes, first)
        body = text.text()
        parameters = (*signature.parameters(body.sizes), *map(map_parameter, range(first, first + len(maps))))
        return Function(f"of_{shape.name}", (), parameters, body.text), maps

    def variant(self, entry: Entry, shape: ProductRowsShape) -> Variant:
        """A launch of a cluster for each tile's rows."""
        rows, batch = (expression(size, self.symbols) for size in (self.parts.rows, self.parts.batch))
        tiles = f"{rows} {shape.rows} ceil {batch} *"
        if shape.blocks == 1:
            step = entry.step(f"{tiles} sms {shape.beside} * min", shared=str(shape.shared))
        else:
            step = replace(entry.step(f"{tiles} {shape.blocks} *", shared=str(shape.shared)),
                           cluster=(str(shape.blocks), "1", "1"))
        guards = (*narrow_guards(self.lowered, rows=False), *(
            guard for operand in self.mapped for guard in operand.guards(self.symbols)), *self.stored, *fitting(shape))
        return Variant(ProductRows().words(shape.choice), (step,), tuple(dict.fromkeys(guards)))


def _is_kept(scalar: Scalar, kept: Collection[Scalar]) -> bool:
    """Whether an expression is kept, but for the type that it is declared in, or follows from what is."""
    return any(bare(each) is bare(scalar) for each in kept) or (
        not isinstance(scalar, Contracted) and all(_is_kept(each, kept) for each in children(scalar)))
