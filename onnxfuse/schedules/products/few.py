"""Products of few rows: what reads a weight once, as fast as memory gives it.

One new token multiplies each weight by one row, 16 sequences' by 16; the weight's bytes are what takes the time.  On an
H200, whose memory gives 4.0 TB/s or 17 bytes a cycle and multiprocessor, 16 elements of 64 columns, 2,048 bytes, come
every 118 cycles.  On tensor cores they take a warp 4 loads, 16 permutations of halves, 4 or 8 products (of up to 8, or
up to 16 rows) and some ten instructions around: of four schedulers, less than a tenth.  Multiplied by themselves, with
their conversion, they take (1 + rows) x 32 instructions: up to four rows that is less than the memory's time too, and
any lane may have any neighbours.  So each lane of those asks for 16 bytes at a time, however few columns a block has:
a row times 2048 x 2048 takes 6.1 us so, by pieces of 4 bytes 9.3 (benchmarks/results, few-rows).

What counts is how many bytes are on their way: some 64 KiB a multiprocessor, so that warps share what is summed over,
each asks for several steps at once, and a block's sums meet in shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from onnxfuse.ir.scalars import TYPES
from onnxfuse.lowering.pull import Load, Scalar
from onnxfuse.schedules.attentions.shape import REGISTERS
from onnxfuse.schedules.choice import Choice
from onnxfuse.schedules.products.parts import ProductParts, Side, side_along
from onnxfuse.schedules.products.shape import FLOATS, ProductShape
from onnxfuse.schedules.reductions.split import MULTIPROCESSORS
from onnxfuse.schedules.reductions.streaming import MOST_SHARED

MOST_ROWS, MOST_PLAIN = 16, 4
"""Rows that are few, and those of them that tensor cores have no part in."""

GROUPS = 8
"""Columns of a tile of products that lanes have side by side, or of half a tile, one below the other."""

DEPTH, ALONG = 16, 8
"""Elements that are summed over in a step across; neighbours of them that a lane reads of a column, of which a step
along has four."""

LANES, VECTOR = 32, 8
"""Lanes of a warp, and neighbours that each reads at a time where tensor cores have no part."""

OWN = {64: 1.0, 32: 0.95, 16: 0.85}
"""Columns of each product that a block may have, and the share of the bandwidth that pieces so long reach."""

OWN_ALONG = {16: 1.0, 8: 1.0}
"""The same where lanes without tensor cores read along what is summed over, and each has all columns; no less than a
vector of results has."""

SHARERS = (8, 16, 32)
"""Warps of a block."""

WARPS, LINE = 16, 128
"""Of a multiprocessor, and bytes that each lane of these asks for at once."""

MOST_SHAPES = 6
"""Those that are worth a measurement."""


@dataclass(frozen=True)
class FewShape(ProductShape):
    """A block of ``sharers`` warps that share what is summed over of ``columns`` columns of all products together;
    ``stages``: steps of it that a warp asks for at once; ``across``: whether columns lie side by side; ``products``:
    how many they are."""

    sharers: int = 8
    across: bool = True
    products: int = 1

    @property
    def plain(self) -> bool:
        """Whether tensor cores have no part in it."""
        return self.rows <= MOST_PLAIN

    @property
    def own(self) -> int:
        """Columns of each product."""
        return self.columns // self.products

    @property
    def depth(self) -> int:
        """Elements of what is summed over in a step."""
        if self.plain:
            return LANES // self.side_lanes if self.across else LANES * VECTOR
        return DEPTH if self.across else 4 * ALONG

    @property
    def side_lanes(self) -> int:
        """Lanes whose vectors lie side by side where it is plain."""
        return self.own // VECTOR if self.across else LANES

    @property
    def asked(self) -> int:
        """Elements of the weights that a lane asks for in a step."""
        return self.columns * self.depth // LANES

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return f"product_few_{self.rows}x{self.columns}x{self.stages}_{self.sharers}{'across' if self.across else ''}"

    @property
    def choice(self) -> Choice:
        """As tuning writes it down."""
        return Choice.of("product", rows=self.rows, columns=self.columns, stages=self.stages, group=1,
                         sharers=self.sharers)

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.sharers

    @property
    def shared(self) -> int:
        """Bytes of shared memory: each warp's sums."""
        return 4 * self.sharers * self.rows * (self.columns + FLOATS)

    @property
    def registers(self) -> int:
        """Of a thread, about: the sums, what is on its way, and all else."""
        asked = self.asked * self.stages // 2
        if not self.plain:
            return self.columns * self.rows // 32 + asked + 32
        few = self.rows * (1 if self.across else VECTOR // 2) * self.stages
        sums = self.rows * self.products
        return sums * (VECTOR if self.across else self.own) + asked + few + 12 + 2 * sums

    @property
    def beside(self) -> int:
        """Blocks that a multiprocessor is to hold at least."""
        return max(1, 16 // self.sharers)


@dataclass(frozen=True)
class Few:
    """How a product of few rows reads its operands.

    Attributes:
        parts: the product; planned: sizes by symbol.
        rows: 1, 2 or 4, or 8 or 16, as many as a tile of products on tensor cores has.
        across: whether neighbours along the weights' columns lie side by side, not those that are summed over.
    """

    parts: ProductParts
    planned: Mapping[str, int]
    rows: int
    across: bool

    def sides(self, shape: FewShape) -> list[Side]:
        """The few rows and the weights, each by vectors that a lane reads of it, at most."""
        parts = self.parts
        most = VECTOR if shape.plain else shape.own // GROUPS if self.across else ALONG
        weights = _weights(parts, self.across, most, self.planned)
        few = VECTOR if not self.across else 1 if shape.plain else DEPTH // 4
        left = _side(parts, parts.left, "@m", "@k", few, self.planned) if few > 1 else None
        return [left or _side_of_one(parts), *weights]

    def shapes(self, batch: int, columns: int, depth: int) -> list[FewShape]:
        """Blocks that may be quickest, those first that are expected to be."""
        shares = OWN if self.across or self.rows > MOST_PLAIN else OWN_ALONG
        ranked = sorted(shares, key=lambda own: -_rate(shares[own], batch * -(-columns // own)))
        found = [shape for own in ranked for shape in self._shared(own, batch * -(-columns // own), depth)]
        return found[:MOST_SHAPES]

    def _shared(self, own: int, tiles: int, depth: int) -> list[FewShape]:
        """Those of so many columns of each product, as many warps as keep a multiprocessor's memory busy first."""
        products = len(self.parts.rights)
        least = FewShape(self.rows, own * products, 1, across=self.across, products=products)
        steps, busiest = -(-depth // least.depth), -(-tiles // MULTIPROCESSORS)
        shapes = []
        for sharers in sorted(SHARERS, key=lambda sharers: _waits(sharers, busiest, least.plain)):
            if sharers > max(steps, SHARERS[0]):
                continue
            most = -(-steps // sharers)
            stages = max(1, min(LINE * WARPS // (max(sharers, WARPS) * 2 * least.asked), most))
            # Alone on its multiprocessor a large block does better with more on its way.
            deeper = [min(2 * stages, most)] if least.plain and sharers > WARPS else []
            for count in [*deeper, stages]:
                shape = replace(least, stages=count, sharers=sharers)
                room = REGISTERS // (LANES * sharers * shape.beside)
                while shape.plain and shape.registers > room and shape.stages > 1:
                    shape = replace(shape, stages=shape.stages // 2)
                if shape.shared <= MOST_SHARED and shape.registers <= room and shape not in shapes:
                    shapes.append(shape)
        return shapes[:3 if least.plain else 2]


def _waits(sharers: int, busiest: int, plain: bool) -> tuple[bool, int]:
    """What orders counts of warps by how little memory waits for them."""
    return plain and sharers < WARPS, abs(sharers * (1 if plain else busiest) - WARPS)


def _rate(share: float, tiles: int) -> float:
    """Of the memory's bandwidth, the share that so many blocks reach, each of which could reach that share: a
    multiprocessor alone can ask for twice its own part."""
    busiest = -(-tiles // MULTIPROCESSORS)
    balance = tiles / (busiest * MULTIPROCESSORS)
    return min(1.0, balance * 2 if busiest == 1 else balance) * share


def few_of(parts: ProductParts, rows: int, planned: Mapping[str, int]) -> Few | None:
    """A product of so many rows; None where these are many, floats have 32 bits, or no neighbours of a weight lie side
    by side."""
    if not 0 < rows <= MOST_ROWS or not TYPES[parts.left.dtype].is_narrow:
        return None
    widths = {across: next((side.width for side in _weights(parts, across, ALONG, planned)), 0)
              for across in (True, False)}
    if not any(widths.values()):
        return None
    heights = (1, 2, MOST_PLAIN, 8, MOST_ROWS)
    return Few(parts, planned, next(height for height in heights if height >= rows), widths[True] >= widths[False])


def _weights(parts: ProductParts, across: bool, most: int, planned: Mapping[str, int]) -> list[Side]:
    """All weights, by vectors along their columns or along what is summed over; none where one does not lie so."""
    width = most
    while width:
        sides = [_side(parts, right, "@n", "@n" if across else "@k", width, planned) for right in parts.rights]
        found = [side for side in sides if side is not None]
        width = min((side.width for side in found), default=0)
        if len(found) < len(sides):
            return []
        if all(side.width == width for side in found):
            return found
    return []


def _side(
    parts: ProductParts, scalar: Scalar, loop: str, along: str, most: int, planned: Mapping[str, int]
) -> Side | None:
    """An operand by vectors of ``most`` elements or fewer along a loop; None where none are neighbours in memory."""
    width = most
    while width:
        side = side_along(parts, scalar, loop, parts.lanes(along, width), planned)
        if side is not None:
            return side
        width //= 2
    return None


def _side_of_one(parts: ProductParts) -> Side:
    """The few rows element by element."""
    return Side(parts.left, "@m", False, parts.lanes("@k", 1), 1, isinstance(parts.left, Load))
