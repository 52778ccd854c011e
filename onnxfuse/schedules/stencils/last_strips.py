"""The strips of windows that threads have, of images with channels last: which may be best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product as each_of
from math import ceil, prod

from onnxfuse.schedules.choice import Choice
from onnxfuse.schedules.stencils.parts import StencilAxis

WIDTHS = (2, 4, 8)
"""Channels of a thread's vectors."""

TALL, BROAD = (1, 2, 4, 7), (1, 2, 4, 7, 8)
"""Results that a thread may have along y and x; many images are multiples of seven on each side."""

THREADS, VECTORS = 256, 32
"""Of a block, at most; neighbouring threads with different channels of a pixel, at most."""

REGISTERS, OTHERS = 224, 28
"""Of a thread, at most; those that hold neither pixels nor sums nor weights."""

SHARED = 48 * 1024
"""Bytes of a block's weights, at most: what every GPU has without being asked."""

PIECE, BANKS = 4, 32
"""Weights of a thread that are read at once, at most; banks of shared memory."""

LONG_CODE, LONGER = 800, 1.2e-3
"""Products of a thread whose instructions do not stay in their cache, and how much longer each of them takes, as they
do in kernels of images whose channels lie apart (stencils/shape.py)."""

STRIP, ROW, COLUMN, RESULT, WEIGHT = 90.0, 36.0, 3.0, 2.0, 3.0
"""Instructions of a thread for a strip, for a row of its pixels, for a column of them that may be beside the image,
for each result, and for each weight that it brings, beside what is counted; as compiled kernels have them."""

BLOCK = 4500.0
"""What a multiprocessor could begin, of a lane's instructions, while it begins a block (as shape.py has it)."""

SLOTS, CACHED, BYTES = 4.0, 5.4, 11.4
"""Instructions that a multiprocessor begins while 128 bytes come from shared memory or the cache nearest to it; and,
for each lane, while a byte of its share comes from the cache of all, or from memory, or goes there (an H100's rates).
"""

TOGETHER = 4
"""How little what takes less time lengthens what takes the most: the power at which they are added up."""

WAITING = 40 * 1024
"""Bytes that are on their way to a multiprocessor while memory is busy."""

WARPS, SHORT = 12, 0.5
"""Warps that a multiprocessor should hold, and how much longer it takes with next to none."""

MULTIPROCESSORS, RESIDENT, HELD = 132, 65536, 16
"""Of the GPU for which the order of shapes is found; registers of a multiprocessor, and blocks that it holds at most.
"""

UNKNOWN = 64
"""What is taken for a size that is not known."""

OFFERED = 14
"""Shapes, at most."""


@dataclass(frozen=True)
class StencilLastShape:
    """A thread's strip of ``tall`` x ``broad`` results for ``width`` channels, and a block's threads: ``vectors`` of
    channels, ``across`` strips by ``down``; ``rows``: of pixels that are asked for at once, one or all; ``sums``:
    whether blocks tell the sums of their results too; ``bits``: of an index."""

    tall: int
    broad: int
    width: int
    vectors: int
    across: int
    down: int
    rows: int = 1
    sums: bool = False
    bits: int = 32

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return (f"stencil_last_t{self.tall}x{self.broad}_w{self.width}_r{self.rows}_"
                f"{self.vectors}x{self.across}x{self.down}{'_sums' * self.sums}_{self.bits}")

    @property
    def choice(self) -> Choice:
        """As tuning writes it down."""
        return Choice.of("stencil_last", tall=self.tall, broad=self.broad, width=self.width, vectors=self.vectors,
                         across=self.across, down=self.down, rows=self.rows)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.vectors * self.across * self.down

    @property
    def channels(self) -> int:
        """Channels of a block."""
        return self.vectors * self.width

    @property
    def pitch(self) -> int:
        """From a tap's weights to the next one's: those of eight taps of four channels lie in different banks."""
        return self.channels + (PIECE - self.channels) % BANKS

    def shared(self, taps: int) -> int:
        """Bytes of its weights, so many for each channel, and of what two turns' strips add up to."""
        return 4 * (taps * self.pitch + 2 * self.sums * self.threads * self.width)


@dataclass(frozen=True)
class Strips:
    """What a choice of strips depends on.

    Attributes:
        axes: the convolution's; counts, images, channels: how many there are as it is planned, None where that is not
            known.
        widths: of vectors that there may be; size: bytes of an element of the images.
    """

    axes: tuple[StencilAxis, ...]
    counts: tuple[int | None, ...]
    images: int | None
    channels: int | None
    widths: tuple[int, ...]
    size: int

    @property
    def places(self) -> tuple[int, int, int]:
        """Places along z, y and x."""
        z, y, x = (UNKNOWN if count is None else max(count, 1) for count in self.counts)
        return z, y, x

    @property
    def taps(self) -> int:
        """Weights of a channel."""
        return prod(axis.taps for axis in self.axes)


@dataclass(frozen=True)
class Edges:
    """Which columns of the pixels under strips may be beside the image.

    Attributes:
        begin, end: those from the first on and up to the second are not, whichever strip it is.
        first_alone: whether those before are so exactly under the first strip of a row.
        last: the first place of a row's last strip, where those behind are so exactly under that; None elsewhere.
    """

    begin: int
    end: int
    first_alone: bool
    last: int | None

    @classmethod
    def of(cls, axis: StencilAxis, places: int) -> Edges:
        """Those of strips of so many places."""
        span, start, extent, count = axis.span(places), axis.start.value, axis.extent.value, axis.count.value
        if start is None:
            return cls(span, 0, False, None)
        begin, first_alone = min(max(0, -start), span), -start <= places * axis.stride
        if extent is None or not count:
            return cls(begin, 0, first_alone, None)
        last = (count - 1) // places * places
        end = min(max(0, extent - start - last * axis.stride), span)
        before = (last - places) * axis.stride + start + span  # where pixels under the strip before it end
        return cls(begin, end, first_alone, last if before <= extent else None)


def resident(shape: StencilLastShape, strips: Strips) -> int:
    """Blocks that a multiprocessor holds at once."""
    threads, registers = _up(shape.threads, 32), _up(_registers(shape, strips), 8)
    return max(1, min(RESIDENT // (threads * registers), HELD, 4 * SHARED // shape.shared(strips.taps)))


@lru_cache(maxsize=256)
def shapes(strips: Strips) -> tuple[StencilLastShape, ...]:
    """The shapes to choose from, the one first that is expected to be quickest; of those that differ by a block's
    threads alone the best, and the best of each width."""
    found: dict[tuple[int, ...], tuple[float, StencilLastShape]] = {}
    for shape in _all(strips):
        if _registers(shape, strips) > REGISTERS or shape.shared(strips.taps) > SHARED:
            continue
        key, cost = (shape.tall, shape.broad, shape.width, shape.rows), _cost(shape, strips)
        if key not in found or cost < found[key][0]:
            found[key] = cost, shape
    ordered = [shape for _, shape in sorted(found.values(), key=lambda each: each[0])]
    best = [next(shape for shape in ordered if shape.width == width) for width in {each.width for each in ordered}]
    kept = {*ordered[:OFFERED - len(best)], *best}
    return tuple(shape for shape in ordered if shape in kept)


def _all(strips: Strips) -> Iterator[StencilLastShape]:
    _, high, wide = strips.places
    _, y, _ = strips.axes
    for width, broad, tall in each_of(strips.widths, BROAD, TALL):
        if broad >= 2 * wide or tall >= 2 * high:
            continue
        for vectors, threads in each_of(_vectors(-(-(strips.channels or UNKNOWN) // width)), (THREADS, THREADS // 2)):
            most = max(1, threads // vectors)
            across = _even(-(-wide // broad), most)
            for down in range(1, _even(-(-high // tall), max(1, most // across)) + 1):
                for rows in dict.fromkeys((1, y.span(tall))):
                    yield StencilLastShape(tall, broad, width, vectors, across, down, rows)


def _vectors(count: int) -> list[int]:
    """Neighbouring threads with different channels, so that few of them have none; and half a warp of them, where so
    many there are."""
    most = min(count, VECTORS)
    even = min(range(max(1, most // 2), most + 1), key=lambda each: (-(-count // each) * each, -each))
    return list(dict.fromkeys((even, *((VECTORS // 2,) if count % (VECTORS // 2) == 0 else ()))))


def _even(count: int, most: int) -> int:
    """Up to so many at once, alike in number each time."""
    return -(-count // -(-count // most))


def _registers(shape: StencilLastShape, strips: Strips) -> int:
    """What a thread holds: pixels as they lie in memory, those of the row at hand, sums and weights."""
    columns = strips.axes[2].span(shape.broad)
    held = shape.rows * columns * -(-shape.width * strips.size // 4)
    return held + shape.width * (columns + shape.tall * shape.broad) + min(shape.width, PIECE) + OTHERS


def _cost(shape: StencilLastShape, strips: Strips) -> float:
    """What a channel's result takes, in instructions: the longest of those that are begun, of what comes from shared
    memory and the nearest cache, from the cache of all, and from memory; more where threads or multiprocessors idle."""
    _, high, wide = strips.places
    _, y, x = strips.axes
    read = strips.axes[0].taps * x.span(shape.broad) * y.span(shape.tall) / (shape.tall * shape.broad)
    near = SLOTS * (strips.taps / shape.broad + read * strips.size / 4)
    waiting = shape.threads * resident(shape, strips) * shape.rows * x.span(shape.broad) * shape.width * strips.size
    moved = BYTES * strips.size * (1 + y.stride * x.stride) * max(1.0, WAITING / waiting) ** 0.5
    rows = shape.tall * min(shape.down * ceil(_turns(shape, strips)), -(-high // shape.tall))
    cached = CACHED * strips.size * (1 + y.span(rows) / rows * x.stride)
    times = (_begun(shape, strips, read), near, cached, moved)
    longest = float(sum(each**TOGETHER for each in times) ** (1 / TOGETHER))
    idle = _up(shape.threads, 32) / shape.threads
    for count, side in ((wide, shape.broad * shape.across), (high, shape.tall * shape.down)):
        idle *= _up(count, side) / count
    blocks = _blocks(shape, strips)
    warps = min(blocks, resident(shape, strips)) * shape.threads / 32
    return longest * idle * ceil(blocks) / blocks * (1.0 + SHORT * max(0.0, WARPS - warps) / WARPS)


def _begun(shape: StencilLastShape, strips: Strips, read: float) -> float:
    """Instructions of a result, of which ``read`` pixels are read."""
    z, y, x = strips.axes
    results, edges = shape.tall * shape.broad, Edges.of(x, shape.broad)
    beside = edges.begin * (not edges.first_alone) + (x.span(shape.broad) - edges.end) * (edges.last is None)
    made = shape.width * (strips.taps * results if shape.rows > 1 else (
        min(shape.tall, y.taps) * x.taps * shape.broad))
    once = (WEIGHT * strips.taps * shape.channels + BLOCK) / shape.threads / _turns(shape, strips)
    alone = STRIP + once + z.taps * y.span(shape.tall) * (ROW + COLUMN * beside)
    return (strips.taps + read + strips.taps / shape.broad / min(shape.width, PIECE) + RESULT
            + (read + 1 + alone / results) / shape.width) * (1.0 + LONGER * max(0, made - LONG_CODE))


def _turns(shape: StencilLastShape, strips: Strips) -> float:
    """How many strips a thread goes through."""
    return max(1.0, _blocks(shape, strips) / resident(shape, strips))


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def _blocks(shape: StencilLastShape, strips: Strips) -> float:
    """Blocks for each multiprocessor, were each to have the strips of its threads alone."""
    deep, high, wide = strips.places
    slabs = -(-(strips.channels or UNKNOWN) // shape.channels)
    sides = -(-wide // (shape.broad * shape.across)) * -(-high // (shape.tall * shape.down))
    return deep * (strips.images or UNKNOWN) * slabs * sides / MULTIPROCESSORS
