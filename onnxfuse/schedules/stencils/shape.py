"""Tiles of a depthwise convolution: how large they are, and which may be best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product as each_of
from math import gcd, inf, prod

from onnxfuse.graph.dims import Dim
from onnxfuse.schedules.choice import Choice
from onnxfuse.schedules.stencils.parts import StencilAxis

SHARED = 48 * 1024
"""Shared memory of a block, at most: what every GPU has without being asked."""

MOST_TALL, STRIPS = 8, (14, 28)
"""Results along y that a thread sums up at once; of strips, which are summed up row by row."""

LEAST_ITEMS = 8
"""Threads of a block with something to sum up, at least, where there are other ways."""

LARGE, MOST_THREADS = 32 * 1024, 512
"""Bytes of a block's tiles, past which few blocks would share a multiprocessor; threads of a block at most."""

BLOCKS = 2 * 132
"""Blocks that a launch should have, at least."""

FOUR = 4.0
"""Instructions of warps that a multiprocessor begins in the cycle in which it hands a warp four bytes a lane of shared
memory."""

FIXED, EACH, VECTOR, APART = 50.0, 4.0, 20.0, 3.0
"""Instructions of a thread beside its sums; of each element that is moved, of each vector, and of each element that has
a place of its own in the tile.  These and what follows are such that of 240 kernels of 27 convolutions the first
choices take 1.04 times as long as the best ones in the mean (benchmarks/results, depthwise)."""

BLOCK = 4500.0
"""What a multiprocessor could begin, of a lane's instructions, while it begins a block."""

LONG_CODE, LONGER, ODD = 800, 1.2e-3, 0.2
"""Products of a thread whose instructions do not stay in their cache, how much longer each of them takes, and how much
longer sums take of what no vectors bring."""

WARPS, RESIDENT = (32, 1.5), (8, 0.4)
"""Warps, and blocks, that a multiprocessor should hold, and how much longer it takes with next to none."""

REGISTERS = 65536
"""Of a multiprocessor."""

ALIKE, OFFERED = 3, 14
"""Shapes offered with the same part for a thread, and in all."""

MANY_TAPS = 25
"""Taps of a layer from which on multiplying, not moving, takes the time."""


@dataclass(frozen=True)
class StencilShape:
    """A block's part of the results, in whole planes or a tile of one, and a thread's part of that.

    Attributes:
        planes: whole planes a block; 0 where it has a tile of one.
        deep, high, wide: results of the tile along z, y and x.
        tall, broad: results of a thread along y and x.
        loads, stores: widths of vectors that are read and written; bits: of an index.
    """

    planes: int
    deep: int
    high: int
    wide: int
    tall: int
    broad: int
    loads: int
    stores: int
    bits: int = 32

    @property
    def name(self) -> str:
        """Name of the kernel."""
        planes = f"_p{self.planes}" if self.planes else ""
        tile = "x".join(map(str, (self.deep, self.high, self.wide)))
        return f"stencil{planes}_{tile}_t{self.tall}x{self.broad}_w{self.loads}x{self.stores}_{self.bits}"

    @property
    def choice(self) -> Choice:
        """As tuning writes it down."""
        return Choice.of("stencil", planes=self.planes, deep=self.deep, high=self.high, wide=self.wide, tall=self.tall,
                         broad=self.broad, loads=self.loads, stores=self.stores)

    @property
    def items(self) -> int:
        """Threads that sum up."""
        return max(self.planes, 1) * self.deep * (self.high // self.tall) * (self.wide // self.broad)

    @property
    def threads(self) -> int:
        """Threads of a block: whole warps."""
        return -(-self.items // 32) * 32


@dataclass(frozen=True)
class Tile:
    """How a shape's tile lies in shared memory, in numbers: layers, rows of a layer, from one row to the next; where
    the first window begins in a row; where sums are kept; all of it, and all weights behind it."""

    layers: int
    rows: int
    pitch: int
    lead: int
    kept: int
    room: int
    weights: int

    @property
    def shared(self) -> int:
        """Bytes."""
        return 4 * (self.room + self.weights)


def tile_of(shape: StencilShape, axes: Sequence[StencilAxis]) -> Tile:
    """The tile of a shape.  Of whole planes it holds all elements, also those that no window has."""
    z, y, x = axes
    planes = max(shape.planes, 1)
    layers, rows, columns = (axis.span(count) for axis, count in zip(axes, (shape.deep, shape.high, shape.wide),
                                                                     strict=True))
    lead = (x.start.value or 0) % (min(shape.loads, 4) if shape.planes else shape.loads)
    if shape.planes:
        extents, starts = (_numbers(sizes) or [] for sizes in (
            [axis.extent for axis in axes], [axis.start for axis in axes]))
        layers, rows, columns = (
            max(size, extent - start)
            for size, extent, start in zip((layers, rows, columns), extents, starts, strict=True))
    pitch = _up(columns + lead, 4 if shape.planes else max(shape.loads, 4))
    whole = planes * layers * rows * pitch
    # Elsewhere the sums, of which there are no more than elements, come when nobody reads the tile any more.
    kept, sums = (whole, shape.items * shape.tall * shape.broad) if shape.tall > MOST_TALL else (0, 0)
    return Tile(layers, rows, pitch, lead, kept, whole + sums, planes * _up(z.taps * y.taps * x.taps, 4))


def _numbers(sizes: Sequence[Dim]) -> list[int] | None:
    """Sizes that are all known."""
    found = [size.value for size in sizes if size.value is not None]
    return found if len(found) == len(sizes) else None


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


@dataclass(frozen=True)
class Planned:
    """What a choice depends on.

    Attributes:
        axes, features: the convolution's; counts, planes: places along each axis, and planes, as they are planned, None
            where that is not known.
        multiple: what divides the number of planes, whatever that is.
        loads, stores: widest vectors to read and to write, of numbers that follow one on another.
        row_loads, row_stores: the same within a row.
    """

    axes: tuple[StencilAxis, ...]
    counts: tuple[int | None, ...]
    planes: int | None
    multiple: int
    features: int
    loads: int
    stores: int
    row_loads: int
    row_stores: int


def shapes(planned: Planned) -> list[StencilShape]:
    """The shapes to choose from, the one first that is expected to be quickest."""
    found = sorted(dict.fromkeys((*_whole(planned), *_tiles(planned))), key=lambda shape: cost(shape, planned))
    alike: dict[tuple[bool, int, int], list[StencilShape]] = {}
    for shape in found:
        alike.setdefault((shape.planes > 0, shape.tall, shape.broad), []).append(shape)
    kept = {shape for each in alike.values() for shape in each[:ALIKE]}
    return [shape for shape in found if shape in kept][:OFFERED]


def cost(shape: StencilShape, planned: Planned) -> float:
    """What a result costs: instructions of a thread, also of those without work; more where few blocks share a
    multiprocessor, so that while one waits for memory none computes."""
    counts = [1 if count is None else max(count, 1) for count in planned.counts]
    z, y, x = planned.axes
    planes, sides = max(shape.planes, 1), sides_of(shape, planned.axes)
    covered = prod(sides) if shape.planes else prod(
        _up(count, side) for count, side in zip(counts, sides, strict=True))
    lanes = shape.threads / shape.items * covered / prod(counts)
    size, reach = shape.tall * shape.broad, x.span(shape.broad)
    aligned = shape.broad * x.stride % 4 == 0
    crowded = 2 if aligned and shape.broad * x.stride % 8 == 0 else 1
    asked = z.taps * y.span(shape.tall) * reach
    taps = y.taps * x.taps
    rows = shape.tall + y.taps - 1 if shape.tall > MOST_TALL else 0
    made = shape.broad * rows * (taps + y.taps / 2) if rows else taps * size
    longer = 1.0 + LONGER * max(0, 0 if rows else made - LONG_CODE) + (0.0 if aligned else ODD)
    sums = (max(z.taps * made, FOUR * crowded * asked) + asked / FOUR + FIXED) * longer
    read = prod(axis.span(side) / side for axis, side in zip(planned.axes, (shape.deep, shape.high, shape.wide),
                                                             strict=True))
    apart = APART if shape.planes and (x.extent.value or 0) % shape.loads else 0
    moved = read * (EACH + VECTOR / shape.loads + apart) + EACH + VECTOR / shape.stores
    blocks = inf if planned.planes is None else planned.planes * planned.features / planes * (
        1 if shape.planes else prod(-(-count // side) for count, side in zip(counts, sides, strict=True)))
    registers = taps + (y.taps * shape.broad if rows else size) + reach + 24
    resident = min(REGISTERS // (registers * shape.threads), 4 * SHARED // tile_of(shape, planned.axes).shared, 32)
    alone = _short(resident * shape.threads / 32, *WARPS) * _short(resident, *RESIDENT)
    begun = BLOCK / (planes * prod(counts) if shape.planes else prod(sides))
    return (lanes * sums / size + moved + begun) * max(1.0, BLOCKS / max(blocks, 1)) * alone


def _short(there: float, wanted: int, share: float) -> float:
    """How much longer it takes with fewer than are wanted."""
    return 1.0 + share * max(0.0, wanted - there) / wanted


def is_line(axes: Sequence[StencilAxis]) -> bool:
    """Whether images have one axis: the rows of a tile are pieces of a line then, one behind the other."""
    return all(axis.taps == 1 and axis.extent == 1 and axis.count == 1 and axis.start == 0 for axis in axes[:2])


def sides_of(shape: StencilShape, axes: Sequence[StencilAxis]) -> tuple[int, int, int]:
    """How far a tile goes along the axes."""
    return (1, 1, shape.high * shape.wide) if is_line(axes) and not shape.planes else (
        shape.deep, shape.high, shape.wide)


def _of_thread(planned: Planned) -> Iterator[tuple[int, int]]:
    """Results that a thread may have along y and x."""
    z, y, x = planned.axes
    _, high, wide = planned.counts
    flat = y.taps == 1 and high == 1
    many = y.taps * x.taps >= MANY_TAPS
    talls = [1] if flat else [4, 7] if many else [2, 4, 8]
    if many and z.taps == y.stride == y.dilation == 1:
        talls += STRIPS
    talls = [tall for tall in talls if high is None or tall <= max(high, min(2 * high - 1, MOST_TALL))] or [1]
    broads = [4, 8] if flat else [4]
    broads = [broad for broad in broads if wide is None or broad < 2 * wide] or [1]
    yield from each_of(talls, broads)


def _whole(planned: Planned) -> Iterator[StencilShape]:
    """Blocks of whole planes, where their sizes are known and small enough."""
    axes = planned.axes
    counts, extents, starts = (_numbers(sizes) for sizes in (
        [axis.count for axis in axes], [axis.extent for axis in axes], [axis.start for axis in axes]))
    if planned.features != 1 or not counts or not extents or not starts:
        return
    if min(*counts, *extents) < 1 or max(starts) > 0:
        return
    deep, high, wide = counts
    read, written, width = prod(extents), prod(counts), extents[-1]
    # Rows of vectors where they can be; else few numbers at once, which are put apart.  None begins in one block, or
    # image, and ends in another.
    loads = next(each for each in (8, 4, 2, 1) if each <= planned.loads and (
        (each <= 2 or width % each == 0) and planned.multiple * read % each == 0))
    for tall, broad in _of_thread(planned):
        for planes in (1, 2, 4, 8, 16, 32, 64):
            stores = next(each for each in (8, 4, 2, 1) if each <= planned.stores and (
                gcd(planes, planned.multiple) * written % each == 0))
            shape = StencilShape(planes, deep, _up(high, tall), _up(wide, broad), tall, broad, loads, stores)
            tile = tile_of(shape, axes)
            if shape.items > MOST_THREADS or tile.shared > (SHARED if planes == 1 or tall > MOST_TALL else LARGE):
                break
            if planes * read % loads == 0:
                yield shape


def _tiles(planned: Planned) -> Iterator[StencilShape]:
    """Blocks of a tile of a plane."""
    tiles = _pieces(planned) if is_line(planned.axes) else _squares(planned)
    for deep, high, wide, tall, broad in tiles:
        shape = StencilShape(0, deep, high, wide, tall, broad, planned.row_loads, planned.row_stores)
        if LEAST_ITEMS <= shape.items <= MOST_THREADS and tile_of(shape, planned.axes).shared <= LARGE:
            yield shape


def _squares(planned: Planned) -> Iterator[tuple[int, int, int, int, int]]:
    """Results of a tile along the axes, and of a thread along the last two."""
    z, _, _ = planned.axes
    count_z, count_y, count_x = planned.counts
    widest = max(planned.row_loads, planned.row_stores)
    deep = 1 if z.taps == 1 else min(4, count_z or 4)
    for tall, broad in _of_thread(planned):
        for wide, lines in each_of((32, 64, 128), (4, 8, 16, 32)) if broad % 4 == 0 else ():
            yield (deep, _up(min(lines, count_y or lines), tall),
                   max(_up(min(wide, count_x or wide), max(widest, broad)), broad), tall, broad)


def _pieces(planned: Planned) -> Iterator[tuple[int, int, int, int, int]]:
    """The same where there is a line: pieces of it, one behind the other."""
    count, widest = planned.counts[2], max(planned.row_loads, planned.row_stores)
    for tall, broad, wide, lines in each_of((1, 2, 4), (4, 8), (64, 128, 256, 512), (1, 2, 4, 8)):
        wide = _up(min(wide, count or wide), max(widest, broad))
        if count is None or lines * tall == 1 or (lines * tall - 1) * wide < count:
            yield 1, lines * tall, wide, tall, broad


def smallest(axes: Sequence[StencilAxis]) -> StencilShape | None:
    """The shape that any sizes admit, quick to compile; None where its window is too large for shared memory."""
    tried = (StencilShape(0, 1, high, wide, 1, 4, 1, 1)
             for high, wide in ((1 if axes[1].taps == 1 else 4, 32), (1, 32), (1, 4)))
    return next((shape for shape in tried if tile_of(shape, axes).shared <= SHARED), None)


def without_vectors(planned: Planned) -> StencilShape | None:
    """The best shape for sizes that admit no vectors."""
    narrow = replace(planned, row_loads=1, row_stores=1)
    return min(_tiles(narrow), key=lambda shape: cost(shape, narrow), default=None)
