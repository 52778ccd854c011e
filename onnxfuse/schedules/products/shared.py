"""Convolutions whose windows share in shared memory what they see of an image: each pixel comes there once.

Boxes of windows (``boxes``) bring each place of the windows by itself, nine times the image for windows of
3 x 3, and copies are what most of them wait for.  Here a tile is a box of eight by eight windows or several, and a
stage the piece of the image below it, by lines of a pixel's channels.  The instruction reads its left operand as groups
of eight lines: eight neighbouring windows, whose pixels at one place follow one another.  So each place is the same
piece read from another line on; pieces change places by the address, not by the line, so that any may be the first.  Of
windows in steps pixels are parted by their remainder, each part a piece of its own.

Weights stay in shared memory where there is room for them.  Else a stage is those of one place, and with the first
place comes the piece of the image for all: two of these are enough where no more stages are under way than there are
places, and one, for whoever fills a stage has seen that all before were multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Self

from onnxfuse.lowering.tensor_map import MOST_BOX, TensorMap
from onnxfuse.schedules.attentions.shape import PANEL, TILE_BYTES
from onnxfuse.schedules.choice import Choice
from onnxfuse.schedules.kernel import TILE_ENDS, Pace
from onnxfuse.schedules.lanes import Lanes
from onnxfuse.schedules.products.boxes import Box, Boxed, BoxShape, BoxText
from onnxfuse.schedules.products.maps import Mapped
from onnxfuse.schedules.products.parts import ProductParts
from onnxfuse.schedules.products.shape import STAGE_BYTES
from onnxfuse.schedules.products.tf32 import RoundedSpecialisedText
from onnxfuse.schedules.products.windows import Windows
from onnxfuse.schedules.reductions.streaming import MOST_SHARED
from onnxfuse.schedules.text import Writer, indented, unrolled

EIGHT = 8
"""Lines of a group, and windows side by side that are one."""

PIECES, MOST_PIECES = 2, 6
"""Of an image in shared memory: one that is multiplied, one that comes; and of those that are worth having."""

LEAST_PLACES = 4
"""Whose weights are in shared memory, where these do not stay."""

SHARED_RATE = 1.04
"""Times the rate of large tiles that copy each place at which they multiply (H200, six convolutions of 128 channels and
more)."""

SHARED_NARROW = 0.75
"""Share of that which float32 reaches in tiles of 64 columns and fewer (H200: of 32 and of 64 columns 2.4 and 2.5e12
FLOP/s, of 128 to 256 3.1 to 3.5e12)."""

LINE, LINE_ZEROS = {2: 1.2e-9, 4: 1.8e-9}, 6.5e-9
"""Seconds of a line that comes, by the bytes of an element, and beside that as many as zeros make up of it (H200: of
seven convolutions in steps, which wait for copies, 1.1 to 1.4e-9, of float32 1.9e-9; of 8 channels, of 24 and of 72
zeros took 6.1, 8 and 7.8e-9)."""

PLACE = 0.13e-6
"""Seconds of a place at least whose weights come (H200: 64 x 64 in four convolutions 0.13, 64 x 96 in three 0.135 to
0.143)."""

STRIP, BY_TURNS = 0.5e-6, 0.4
"""Seconds in which a group stores what it has of 64 windows, and the share of that that the other does not hide."""


@dataclass(frozen=True)
class SharedShape(BoxShape):
    """A block whose stages are pieces of an image: ``parts`` of ``lines`` lines each, ``pitch`` to the next pixels
    below."""

    parts: int = 1
    lines: int = 0
    pitch: int = 0

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return f"{super().name}_shared"

    @property
    def choice(self) -> Choice:
        """As tuning writes it down."""
        found = super().choice
        return Choice.of(found.schedule, **dict(found.settings), shared=1)

    @property
    def left(self) -> int:
        """Bytes of the pieces of an image; what lies behind them begins at a multiple of ``TILE_BYTES``."""
        pieces = self.stages if self.stays else PIECES
        return -(-pieces * self.parts * self.lines * self.line // TILE_BYTES) * TILE_BYTES

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        own = super().shared - self.stages * self.line * self.rows
        return own + self.left

    def filled(self) -> Self:
        """See ``SpecialisedShape``; 0 stages where there is no room for enough."""
        # What lies behind the stages begins at a multiple of 1,024 bytes, as one line of each of 16 columns does not.
        even = STAGE_BYTES // self.line
        least, most = (PIECES, MOST_PIECES) if self.stays else (LEAST_PLACES * even, self.taps + 1)
        ways = (replace(self, stages=stages) for stages in range(most - most % even, least - 1, -even))
        return next((way for way in ways if way.shared <= MOST_SHARED), replace(self, stages=0))


def shared_shapes_of(shape: BoxShape, windows: Windows) -> Iterator[SharedShape]:
    """The same block over shared pieces of the image, for each way to lay out its windows, with as many stages as there
    is room for."""
    if len(windows.axes) != 2 or windows.taps == 1 or shape.rows % PANEL:
        return
    x, y = windows.axes
    for wide in range(1, shape.rows // PANEL + 1):
        if shape.rows // PANEL % wide:
            continue
        box = Box((EIGHT * wide, EIGHT * (shape.rows // PANEL // wide), 1))
        # Pixels of one remainder under so many neighbouring windows, as many for each of them.
        pitch = -(-x.span(box.sides[0]) // x.stride)
        high = y.span(box.sides[1])
        if (pitch - 1) * x.stride + 1 > MOST_BOX or high > MOST_BOX:
            continue
        lines = -(-pitch * high // EIGHT) * EIGHT
        found = SharedShape(
            shape.rows, shape.columns, 1, turns=shape.turns, line=shape.line, stays=shape.stays, box=box,
            taps=shape.taps, parts=min(x.stride, (x.taps - 1) * x.dilation + 1), lines=lines, pitch=pitch)
        if (filled := found.filled()).stages:
            yield filled


def shared_pace(shape: SharedShape, windows: Windows, line: float, pace: Pace) -> Pace:
    """What the time of such a block follows from, whose ``pace`` counts steps of channels, each of one place, and what
    a tile takes beside, and whose lines take so many seconds: it goes through all places while the next piece comes,
    and stores strips of 64 windows one after the other."""
    x, y = windows.axes
    # Of windows in steps a copy passes by the pixels of other remainders.
    lines, weights = shape.parts * x.stride * shape.pitch * y.span(shape.box.sides[1]), shape.taps * shape.columns
    ends = pace.ends + shape.strips * STRIP * (BY_TURNS if shape.turns > 1 else 1.0)
    if shape.stays:  # before the first tile
        ends, waits = ends + pace.stages * weights * line / pace.tiles, lines * line
    else:
        waits = max((lines + weights) * line, shape.taps * PLACE)
    return replace(pace, flops=pace.flops * shape.taps, share=pace.share * SHARED_RATE, waits=waits,
                   ends=ends - TILE_ENDS)


class SharedText(BoxText):
    """Writes the body of a kernel whose weights stay.

    ``lines_by``: what multiplies lines; ``piece``, ``channel``: what of the text is the piece that a stage is of, and
    where its channels begin.
    """

    lines_by, piece, channel = "multiply_lines<Tensor, T, columns, depth>", "turn", "start"

    def __init__(
        self, parts: ProductParts, operands: tuple[Boxed, Mapped], results: Lanes, shape: SharedShape,
        sizes: Mapping[str, str], first: int
    ) -> None:
        super().__init__(parts, operands, results, shape, sizes, first)
        self.tile, self.pieces = shape, operands[0].pieces
        self.extents["k"] = self.end = str(self.staged if shape.stays else operands[0].depth)

    def _constants(self) -> list[str]:
        return [
            *super()._constants(),
            f"constexpr int parts = {self.tile.parts}, lines = {self.tile.lines}, pitch = {self.tile.pitch}, "
            f"seen = pitch * {self.windows.y.span(self.box.sides[1])};",
            f"constexpr int taps = {self.windows.taps}, staged = {self.staged};",
        ]

    def _right_tiles(self) -> str:
        return f"T* const right_tiles = left_tiles + {self.tile.left // self.parts.size};"

    def _window_at(self) -> dict[str, str]:
        wide, strip = self.box.sides[0] // EIGHT, f"place / {PANEL}"
        return {
            "x": f"first_x + {strip} % {wide} * {EIGHT} + place % {EIGHT}",
            "y": f"first_y + {strip} / {wide} * {EIGHT} + place / {EIGHT} % {EIGHT}",
            "image": "first_image",
        }

    def _part(self) -> Box | None:
        return Box((EIGHT, EIGHT, 1))

    # ---- The warp that copies. ----

    def _stage_bytes(self) -> str:
        return "(parts * seen + (first ? taps * columns : 0)) * depth * (int)sizeof(T)"

    def _copied(self, place: int, operand: Mapped, writer: Writer) -> list[str]:
        return self._weights_copied(operand) if place else self._piece_copied()

    def _piece_copied(self) -> list[str]:
        """Lines that ask for a piece of the image."""
        x, y = self.windows.axes
        starts = [self._writer(self.lanes).size(axis.start) for axis in (x, y)]
        return [
            "for (int part = 0; part < parts; ++part) {",
            f"  const int at[] = {{(int){self.channel}, (int)(first_x * {x.stride} + {starts[0]}) + part, "
            f"(int)(first_y * {y.stride} + {starts[1]}), (int)first_image}};",
            f"  of::copy_tile(left_tiles + ({self.piece} * parts + part) * lines * depth, "
            f"m{self.first}, here + turn, at);",
            "}",
        ]

    def _weights_copied(self, operand: Mapped) -> list[str]:
        """Lines that ask for the weights of all places."""
        return [
            "for (int tap = 0; tap < taps; ++tap) {",
            *indented(self._place_copied(operand, "right_tiles + (tap * staged + start) * columns")),
            "}",
        ]

    def _place_copied(self, operand: Mapped, to: str) -> list[str]:
        """Lines that ask for the weights of one."""
        at = [self.channel, "tap"] if len(operand.axes) > 2 else [f"tap * staged + {self.channel}"]
        return [
            f"const int at[] = {{{', '.join(f'(int)({each})' for each in (*at, 'first_n'))}}};",
            f"of::copy_tile({to}, m{self.first + 1}, here + turn, at);",
        ]

    # ---- The groups that multiply. ----

    def _left_stage(self) -> list[str]:
        return [f"const T* const stage = left_tiles + {self.piece} * parts * lines * depth;"]

    def _products(self) -> list[str]:
        y, wide = self.windows.y, self.box.sides[0] // EIGHT
        return [
            f"const int strip = own_row / {PANEL} + i;",
            f"const int first_line = strip / {wide} * {EIGHT} * {y.stride} * pitch + strip % {wide} * {EIGHT};",
            *self._places(),
        ]

    def _places(self) -> list[str]:
        """Lines that multiply the places that a stage has of 64 windows."""
        return unrolled("int tap = 0; tap < taps; ++tap", self._product(
            "right_tiles + (tap * staged + start) * columns", "start > 0 || tap > 0"))

    def _product(self, right: str, some: str) -> list[str]:
        """The same of one of them."""
        x, y = self.windows.axes
        across = f"tap % {x.taps} * {x.dilation}"
        line = f"{across} % {x.stride} * lines + tap / {x.taps} * {y.dilation} * pitch + {across} / {x.stride}"
        return [f"of::{self.lines_by}(", f"    sums[i], stage, {line} + first_line, {y.stride} * pitch, {right}, "
                f"own_row, {some});"]


class ByPlaceText(SharedText):
    """The same where weights come, those of one place with each stage."""

    piece, channel = "piece", "channel"

    def _stage_bytes(self) -> str:
        return "((tap == 0 ? parts * seen : 0) + columns) * depth * (int)sizeof(T)"

    def _step(self) -> list[str]:
        return ["const int tap = (int)(start / depth % taps), channel = (int)(start / depth / taps) * depth;"]

    def _others_begun(self) -> list[str]:
        return [f"int piece = {f'group == 1 ? {self.pieces} & 1 : 0' if self.apart else '0'};"]

    def _piece_copied(self) -> list[str]:
        return ["if (tap == 0) {", *indented([*super()._piece_copied(), "piece ^= 1;"]), "}"]

    def _weights_copied(self, operand: Mapped) -> list[str]:
        return ["{", *indented(self._place_copied(operand, self._right_stage())), "}"]

    def _summed(self) -> list[str]:
        other = ["// The other group's tile.", f"piece ^= {self.pieces} & 1;"] if self.apart else []
        return [*super()._summed(), *other]

    def _places(self) -> list[str]:
        return self._product(self._right_stage(), "start > 0")

    def _passed(self) -> list[str]:
        return ["if (tap == taps - 1) piece ^= 1;"]


class RoundedSharedText(SharedText, RoundedSpecialisedText):
    """Those of float32 operands whose weights stay."""

    lines_by = "multiply_lines_tf32<Tensor, columns, depth>"


class RoundedByPlaceText(ByPlaceText, RoundedSpecialisedText):
    """And whose weights come."""

    lines_by = "multiply_lines_tf32<Tensor, columns, depth>"


SHARED_TEXTS: Mapping[tuple[int, bool], type[SharedText]] = {
    (2, True): SharedText, (2, False): ByPlaceText, (4, True): RoundedSharedText, (4, False): RoundedByPlaceText}
"""What writes such kernels, by the bytes of an element and whether weights stay."""


def shared_map(boxed: Boxed, shape: SharedShape, symbols: Mapping[str, str]) -> TensorMap:
    """What copies a part of the piece of the image below a tile's windows, a stage's channels of it."""
    x, y = boxed.windows.axes
    wide, high = (shape.pitch - 1) * x.stride + 1, y.span(shape.box.sides[1])
    return replace(boxed.map(1, symbols), element_strides=(1, x.stride, 1, 1),
                   box=(shape.line // boxed.size, wide, high, 1))
