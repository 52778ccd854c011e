"""Convolutions whose windows the GPU copies by tensor maps: an element of many windows at a time.

A tile's rows are windows that lie in a box: side by side, below one another, and of several images.  What these windows
see at one of their places lies in a box of the image too, ``stride`` elements apart, which one copy brings, with zeros
where it is outside.  So a stage is 128 bytes of channels of one place of the windows, or zeros behind the last, and the
place moves on when all channels were there: the implicit product of Chetlur et al., "cuDNN: Efficient Primitives for
Deep Learning" (2014), with the addresses left to the copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from onnxfuse.graph.dims import dim
from onnxfuse.ir.tensors import Contract
from onnxfuse.lowering.pull import Load
from onnxfuse.lowering.tensor_map import MOST_BOX, MOST_ELEMENT_STRIDE, TensorMap
from onnxfuse.schedules.choice import Choice
from onnxfuse.schedules.lanes import Lanes
from onnxfuse.schedules.product_maps import KINDS, PIECE_BYTES, Mapped, steps_of
from onnxfuse.schedules.product_parts import ProductParts
from onnxfuse.schedules.product_shape import STAGE_BYTES, SpecialisedShape
from onnxfuse.schedules.product_specialised import SpecialisedText
from onnxfuse.schedules.product_windows import WindowAxis, Windows, windows_of
from onnxfuse.schedules.text import Writer

ORDER = ("c", "x", "y", "image")
"""The axes of an image in memory, the innermost first."""


@dataclass(frozen=True)
class Box:
    """Windows of a tile: so many images, lines of each, and windows of each line."""

    deep: int
    high: int
    wide: int

    @property
    def rows(self) -> int:
        """Windows in it."""
        return self.deep * self.high * self.wide

    def count(self, images: int, lines: int, places: int) -> int:
        """Boxes over so many windows."""
        return -(-images // self.deep) * -(-lines // self.high) * -(-places // self.wide)


@dataclass(frozen=True)
class Boxed(Mapped):
    """The image as a tensor in memory, its axes those of ``ORDER``, and its windows."""

    windows: Windows

    @property
    def staged(self) -> int:
        """Channels of a place as whole stages have them."""
        wide = STAGE_BYTES // self.size
        return -(-self.windows.channels // wide) * wide

    @property
    def depth(self) -> int:
        """Elements of a window in whole stages."""
        return self.staged * self.windows.y.taps * self.windows.x.taps

    def boxed(self, box: Box, symbols: Mapping[str, str]) -> TensorMap:
        """What copies one place of all windows of a box, a stage's channels of it."""
        x, y = self.windows.x, self.windows.y
        return replace(
            self.map(1, symbols), element_strides=(1, x.stride, y.stride, 1),
            box=(STAGE_BYTES // self.size, (box.wide - 1) * x.stride + 1, (box.high - 1) * y.stride + 1, box.deep))


@dataclass(frozen=True)
class Parted(Mapped):
    """Weights as a tensor of channels, places of windows, and rows (across: of rows, channels and places), where
    channels fill no whole stages: each has those of one place alone."""

    def map(self, rows: int, symbols: Mapping[str, str]) -> TensorMap:
        """See ``Mapped``."""
        found = super().map(rows, symbols)
        return found if self.across else replace(found, box=(found.box[0], 1, rows))


@dataclass(frozen=True)
class BoxShape(SpecialisedShape):
    """A block with a warp that copies, whose tiles are boxes of windows with so many ``taps``."""

    box: Box = Box(1, 1, 1)
    taps: int = 1

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return f"{super().name}_{self.box.deep}x{self.box.high}x{self.box.wide}"

    @property
    def choice(self) -> Choice:
        """As tuning writes it down."""
        return Choice.of("product", **self.settings, taps=self.taps)


def boxed_of(
    products: Sequence[Contract], parts: ProductParts, weights: Mapped | None
) -> tuple[Boxed, Mapped] | None:
    """A convolution's image that is read as it lies, channels last, and its weights; None of any other product."""
    windows = None if len(products) != 1 or weights is None else windows_of(products[0], parts)
    if windows is None or weights is None or not windows.channels or windows.order[-1] != "c":
        return None
    if parts.size != 2 and weights.across:  # the instruction takes those that lie along the sum alone
        return None
    image, axes = windows.image, (windows.y, windows.x)
    if not isinstance(image, Load) or image.conditions or image.dtype not in KINDS or parts.has_zeros:
        return None
    steps = steps_of(parts.puller, image.offset) or {}
    names = tuple(f"@{name}" for name in ORDER)
    sizes = (dim(windows.channels), windows.x.extent, windows.y.extent, windows.images)
    # An axis of one element has no step, and may have any; many that are the same element have none either.
    if any(name not in steps and size != 1 for name, size in zip(names, sizes, strict=True)):
        return None
    strides = tuple(steps.get(name, dim(windows.channels)) for name in names[1:])
    if set(steps) - set(names) or steps.get("@c") != 1 or any(axis.stride > MOST_ELEMENT_STRIDE for axis in axes):
        return None
    known = [stride.value for stride in strides if stride.value is not None]
    if any(stride * parts.size % PIECE_BYTES or stride <= 0 for stride in known):
        return None
    boxed = Boxed(image.input, image.dtype, names, strides, sizes, False, windows)
    return boxed, weights if boxed.staged == windows.channels else _parted(weights, windows)


def _parted(weights: Mapped, windows: Windows) -> Parted:
    """A convolution's weights, whose places lie one behind the other, apart by these."""
    channels, taps = dim(windows.channels), dim(windows.x.taps * windows.y.taps)
    (step,), (first, second) = weights.strides, weights.sizes
    if weights.across:
        axes, sizes, strides = ("@n", "@c", "@tap"), (first, channels, taps), (step, step * channels)
    else:
        axes, sizes, strides = ("@c", "@tap", "@n"), (channels, taps, second), (channels, step)
    return Parted(weights.input, weights.dtype, axes, strides, sizes, weights.across)


def box_of(windows: Windows, rows: int, sizes: tuple[int, int, int]) -> Box:
    """The box of at most so many windows of which the fewest are needed for these images, lines and places, and of
    those the broadest, whose windows have most in common."""
    images, lines, places = sizes
    boxes = [
        Box(max(1, min(rows // (high * wide), images, MOST_BOX)), high, wide)
        for wide in _widths(windows.x, places, rows) for high in _widths(windows.y, lines, rows // wide)]
    return min(boxes, key=lambda box: (box.count(images, lines, places), -box.wide, -box.high, box.rows))


def _widths(axis: WindowAxis, count: int, most: int) -> Iterable[int]:
    """How many windows along an axis a box may have."""
    return range(1, min(count, most, (MOST_BOX - 1) // axis.stride + 1) + 1)


class BoxText(SpecialisedText):
    """Writes the body of a kernel; the plan's tensor maps from ``first`` on are those of ``operands``."""

    past, copied = "continue", "box_rows"

    def __init__(
        self, parts: ProductParts, operands: tuple[Boxed, Mapped], results: Lanes, shape: BoxShape,
        sizes: Mapping[str, str], first: int
    ) -> None:
        super().__init__(parts, operands, results, shape, sizes, first)
        self.windows, self.box, self.staged = operands[0].windows, shape.box, operands[0].staged
        if self.staged != self.windows.channels:
            self.extents["k"] = str(operands[0].depth)
            self.end = self.end if self.split > 1 else self.extents["k"]
        size = self._writer(results).size
        self.counts = {"images": size(self.windows.images), "lines": size(self.windows.y.count),
                       "places": size(self.windows.x.count)}

    def _constants(self) -> list[str]:
        box = self.box
        return [
            *super()._constants(),
            f"constexpr int box_deep = {box.deep}, box_high = {box.high}, box_wide = {box.wide};",
            "constexpr int box_rows = box_deep * box_high * box_wide;"]

    def _tiles(self) -> str:
        counts = self.counts
        return (f"const idx across = ({counts['places']} + box_wide - 1) / box_wide, "
                f"down = ({counts['lines']} + box_high - 1) / box_high, "
                f"below = across * down * (({counts['images']} + box_deep - 1) / box_deep), "
                f"beyond = ({self.extents['n']} + own_columns - 1) / own_columns;")

    def _begins(self, down: str, right: str) -> list[str]:
        return [
            f"const idx box = {down}, first_n = {right} * own_columns;",
            "const idx first_x = box % across * box_wide, first_y = box / across % down * box_high;",
            "const idx first_image = box / (across * down) * box_deep;",
        ]

    def _at(self, loop: str, operand: Mapped, writer: Writer) -> list[str]:
        if not isinstance(operand, Parted):
            return super()._at(loop, operand, writer)
        channel, tap = f"start % {self.staged}", f"start / {self.staged}"
        return [f"first_{loop} + panel", channel, tap] if operand.across else [channel, tap, f"first_{loop}"]

    def _copied(self, place: int, operand: Mapped, writer: Writer) -> list[str]:
        if place:
            return super()._copied(place, operand, writer)
        x, y, staged = self.windows.x, self.windows.y, self.staged
        return [
            "{",
            f"  const int tap = (int)(start / {staged}), tap_x = tap % {x.taps}, tap_y = tap / {x.taps};",
            f"  const int at[] = {{(int)(start % {staged}), {self._along('x', x)}, {self._along('y', y)}, "
            "(int)first_image};",
            f"  of::copy_tile(left_tiles + turn * rows * depth, m{self.first}, here + turn, at);",
            "}",
        ]

    def _along(self, name: str, axis: WindowAxis) -> str:
        """Where in the image the first window's place lies."""
        start = self._writer(self.lanes).size(axis.start)
        return f"(int)(first_{name} * {axis.stride} + {start}) + tap_{name} * {axis.dilation}"

    def _row_at(self, place: str, name: str, valid: str = "") -> list[str]:
        counts = self.counts
        return [
            f"const int place = {place};",
            "const idx x = first_x + place % box_wide, y = first_y + place / box_wide % box_high, "
            "image = first_image + place / (box_wide * box_high);",
            f"const idx {name} = {valid}place < box_rows && x < {counts['places']} && y < {counts['lines']} && "
            f"image < {counts['images']} ? (image * {counts['lines']} + y) * {counts['places']} + x : "
            f"(idx){self.extents['m']};",
        ]

    def _near(self) -> list[str]:
        return [*self._row_at("own_row + i * 64 + lane % 16", "row"),
                f"const idx m = of::imin(row, (idx){self.extents['m']} - 1);"]

    @property
    def _past_row(self) -> str:
        return "box_rows"

    def _first_row(self, below: str) -> str:
        return f"const int first_row = own_row + {below};"

    def _row_of(self, name: str) -> list[str]:
        return self._row_at("first_row + line", name, "share < 16 && " if self.split > 1 else "")
