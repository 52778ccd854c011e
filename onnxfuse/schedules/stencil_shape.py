"""Tiles of a depthwise convolution: how large they are, and which may be best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product as each_of
from math import inf, prod

from onnxfuse.graph.dims import Dim
from onnxfuse.schedules.choice import Choice
from onnxfuse.schedules.stencil_parts import Axis

SHARED = 48 * 1024
"""Shared memory of a block, at most: what every GPU has without being asked."""

LEAST_ITEMS = 8
"""Threads of a block with something to sum up, at least, where there are other ways."""

LARGE, MOST_THREADS = 24 * 1024, 512
"""Bytes of a block's tiles, past which few blocks would share a multiprocessor; threads of a block at most."""

BLOCKS = 2 * 132
"""Blocks that a launch should have, at least."""

FOUR = 4.0
"""Cycles in which a multiprocessor hands a warp 16 bytes a lane of shared memory, or multiplies as many warps' numbers,
each of which takes one."""

ALIKE, OFFERED = 2, 12
"""Shapes offered with the same part for a thread, and in all."""

MANY_TAPS = 25
"""Taps of a layer from which on multiplying, not moving, takes the time."""


@dataclass(frozen=True)
class Shape:
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
    the first window begins in a row; all of it, or of the sums that take its place, and all weights behind it."""

    layers: int
    rows: int
    pitch: int
    lead: int
    room: int
    weights: int

    @property
    def shared(self) -> int:
        """Bytes."""
        return 4 * (self.room + self.weights)


def tile_of(shape: Shape, axes: Sequence[Axis]) -> Tile:
    """The tile of a shape.  Of whole planes it holds all elements, also those that no window has."""
    z, y, x = axes
    planes = max(shape.planes, 1)
    layers, rows, columns = (axis.span(count) for axis, count in zip(axes, (shape.deep, shape.high, shape.wide),
                                                                     strict=True))
    lead = (x.start.value or 0) % (min(shape.loads, 4) if shape.planes else shape.loads)
    if shape.planes:
        extents, starts, counts = (_numbers(sizes) or [] for sizes in (
            [axis.extent for axis in axes], [axis.start for axis in axes], [axis.count for axis in axes]))
        layers, rows, columns = (
            max(size, extent - start)
            for size, extent, start in zip((layers, rows, columns), extents, starts, strict=True))
        sums = planes * prod(counts)
    else:
        sums = shape.deep * shape.high * shape.wide
    pitch = _up(columns + lead, 4 if shape.planes else max(shape.loads, 4))
    room = _up(max(planes * layers * rows * pitch, sums), 4)
    return Tile(layers, rows, pitch, lead, room, planes * _up(z.taps * y.taps * x.taps, 4))


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
        loads, stores: widest vectors to read and to write, of numbers that follow one on another.
        row_loads, row_stores: the same within a row.
    """

    axes: tuple[Axis, ...]
    counts: tuple[int | None, ...]
    planes: int | None
    features: int
    loads: int
    stores: int
    row_loads: int
    row_stores: int


def shapes(planned: Planned) -> list[Shape]:
    """The shapes to choose from, the one first that is expected to be quickest."""
    found = sorted(dict.fromkeys((*_whole(planned), *_tiles(planned))), key=lambda shape: cost(shape, planned))
    alike: dict[tuple[bool, int, int], list[Shape]] = {}
    for shape in found:
        alike.setdefault((shape.planes > 0, shape.tall, shape.broad), []).append(shape)
    kept = {shape for each in alike.values() for shape in each[:ALIKE]}
    return [shape for shape in found if shape in kept][:OFFERED]


def cost(shape: Shape, planned: Planned) -> float:
    """What a result costs: instructions of warps, of which a multiprocessor begins four a cycle, those of threads
    without work too.  Where multiplying takes no time to speak of, what a tile reads twice counts, and what is not
    moved by vectors."""
    z, y, x = planned.axes
    counts = [1 if count is None else max(count, 1) for count in planned.counts]
    tile = (shape.deep, shape.high, shape.wide)
    planes = max(shape.planes, 1)
    covered = planes * prod(
        _up(count, side) if not shape.planes else side for count, side in zip(counts, tile, strict=True))
    useful = planes * prod(counts)
    lanes = shape.threads / shape.items * covered / useful
    size = shape.tall * shape.broad
    reach = x.span(shape.broad)
    aligned = shape.broad * x.stride % 4 == 0
    crowded = 2 if aligned and shape.broad * x.stride % 8 == 0 else 1
    loads = z.taps * y.span(shape.tall) * (reach / 4 * FOUR * crowded if aligned else reach)
    sums = lanes * (max(z.taps * y.taps * x.taps * size, FOUR * loads) + 0.25 * FOUR * loads) / (32 * size)
    read = prod(axis.span(side) / (axis.stride * side) for axis, side in zip(planned.axes, tile, strict=True))
    moved = 0.3 * (1.0 if shape.planes else read) * (1 + 2 / shape.loads) + 0.2 * (1 + 2 / shape.stores)
    blocks = inf if planned.planes is None else planned.planes * planned.features / planes * (
        1 if shape.planes else prod(-(-count // side) for count, side in zip(counts, tile, strict=True)))
    empty = max(1.0, BLOCKS / max(blocks, 1))
    few = 1.0 + 0.2 * max(0.0, 96 / shape.threads - 1)
    return (sums + moved) * empty * few


def _of_thread(planned: Planned) -> Iterator[tuple[int, int]]:
    """Results that a thread may have along y and x."""
    _, y, x = planned.axes
    _, high, wide = planned.counts
    flat = y.taps == 1 and (high is None or high == 1)
    many = y.taps * x.taps >= MANY_TAPS
    talls = [1] if flat else [4, 7, 8] if many else [2, 4, 7]
    talls = [tall for tall in talls if high is None or tall < 2 * high] or [1]
    broads = [4, 8] if flat else [4]
    if wide is not None and wide % 7 == 0 and wide % 4:
        broads.append(7)
    broads = [broad for broad in broads if wide is None or broad < 2 * wide] or [1]
    yield from each_of(talls, broads)


def _whole(planned: Planned) -> Iterator[Shape]:
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
    # Rows of vectors where they can be; else few numbers at once, which are put apart.
    loads = next(each for each in (8, 4, 2, 1) if each <= planned.loads and (each <= 2 or width % each == 0))
    for tall, broad in _of_thread(planned):
        for planes in (1, 2, 4, 8, 16, 32, 64):
            fitting = [width for width in (8, 4, 2, 1) if width <= planned.stores and planes * written % width == 0]
            shape = Shape(planes, deep, _up(high, tall), _up(wide, broad), tall, broad, loads, fitting[0])
            tile = tile_of(shape, axes)
            if shape.items > MOST_THREADS or tile.shared > (SHARED if planes == 1 else LARGE):
                break
            if planes * read % loads == 0:
                yield shape


def _tiles(planned: Planned) -> Iterator[Shape]:
    """Blocks of a tile of a plane."""
    z, y, _ = planned.axes
    count_z, count_y, count_x = planned.counts
    flat = y.taps == 1 and count_y == 1
    widest = max(planned.row_loads, planned.row_stores)
    for tall, broad in _of_thread(planned):
        if broad % 4:
            continue
        for wide in (256, 1024, 2048) if flat else (32, 64, 128):
            wide = max(_up(min(wide, count_x or wide), max(widest, broad)), broad)
            for lines in (1,) if flat else (4, 8, 16, 32):
                high = tall if flat else _up(min(lines, count_y or lines), tall)
                deep = 1 if z.taps == 1 else min(4, count_z or 4)
                shape = Shape(0, deep, high, wide, tall, broad, planned.row_loads, planned.row_stores)
                if LEAST_ITEMS <= shape.items <= MOST_THREADS and tile_of(shape, planned.axes).shared <= LARGE:
                    yield shape


def smallest(axes: Sequence[Axis]) -> Shape | None:
    """The shape that any sizes admit, quick to compile; None where its window is too large for shared memory."""
    shape = Shape(0, 1, 1 if axes[1].taps == 1 else 4, 32, 1, 4, 1, 1)
    return shape if tile_of(shape, axes).shared <= SHARED else None


def without_vectors(planned: Planned) -> Shape | None:
    """The best shape for sizes that admit no vectors."""
    narrow = replace(planned, row_loads=1, row_stores=1)
    return min(_tiles(narrow), key=lambda shape: cost(shape, narrow), default=None)
