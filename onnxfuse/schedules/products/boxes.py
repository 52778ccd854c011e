"""Convolutions whose windows the GPU copies by tensor maps: an element of many windows at a time.

A tile's rows are windows that lie in a box: side by side, below one another, behind one another where there are three
axes, and of several images.  What these windows see at one of their places lies in a box of the image too, ``stride``
elements apart, which one copy brings, with zeros where it is outside.  So a stage is 128 bytes of channels of one place
of the windows, or 64 or 32 of few, or zeros behind the last, and the place moves on when all channels were there: the
implicit product of Chetlur et al., "cuDNN: Efficient Primitives for Deep Learning" (2014), with the addresses left to
the copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod

from onnxfuse.graph.dims import dim
from onnxfuse.ir.tensors import Contract
from onnxfuse.lowering.pull import Load
from onnxfuse.lowering.tensor_map import MOST_BOX, MOST_ELEMENT_STRIDE, TensorMap
from onnxfuse.schedules.attentions.shape import PANEL
from onnxfuse.schedules.choice import Choice
from onnxfuse.schedules.lanes import Lanes
from onnxfuse.schedules.products.asides import Aside
from onnxfuse.schedules.products.maps import KINDS, PIECE_BYTES, Mapped, line_of, steps_of
from onnxfuse.schedules.products.parts import ProductParts
from onnxfuse.schedules.products.shape import STAGE_BYTES, SpecialisedShape
from onnxfuse.schedules.products.specialised import SpecialisedText
from onnxfuse.schedules.products.windows import SPATIAL, WindowAxis, Windows, windows_of
from onnxfuse.schedules.text import Writer

SIDES = {"x": "box_wide", "y": "box_high", "z": "box_thick", "image": "box_deep"}
"""What a kernel's text calls how many windows a box has along each axis."""

BOXES = {"x": "across", "y": "down", "z": "behind"}
"""The same of how many boxes there are."""


@dataclass(frozen=True)
class Box:
    """Windows of a tile: so many along each axis, the innermost first, and of so many images."""

    sides: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Windows in it."""
        return prod(self.sides)

    def part(self, rows: int) -> Box | None:
        """The box of so many of its rows that follow one another from a multiple of as many on; None where these are
        none, or its rows are no multiple."""
        if self.rows % rows:
            return None
        sides = list[int]()
        for side in self.sides:
            own = min(side, rows)
            if rows % own or side % own:
                return None
            sides.append(own)
            rows //= own
        return Box(tuple(sides))

    def count(self, windows: Sequence[int]) -> int:
        """Boxes over so many windows along each axis, and images."""
        return prod(-(-count // side) for count, side in zip(windows, self.sides, strict=True))


@dataclass(frozen=True)
class Boxed(Mapped):
    """The image as a tensor in memory, its axes those of channels, of space from the innermost on, and of images; and
    its windows."""

    windows: Windows

    @property
    def staged(self) -> int:
        """Channels of a place as whole stages have them, of ``line`` bytes each."""
        wide = self.line // self.size
        return -(-self.windows.channels // wide) * wide

    @property
    def depth(self) -> int:
        """Elements of a window in whole stages."""
        return self.staged * self.windows.taps

    @property
    def pieces(self) -> int:
        """Stages of one place."""
        return self.staged * self.size // self.line

    def boxed(self, box: Box, symbols: Mapping[str, str]) -> TensorMap:
        """What copies one place of all windows of a box, a stage's channels of it."""
        strides = (*(axis.stride for axis in self.windows.axes), 1)
        held = ((side - 1) * stride + 1 for side, stride in zip(box.sides, strides, strict=True))
        return replace(
            self.map(1, symbols), element_strides=(1, *strides), box=(self.line // self.size, *held))


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

    box: Box = Box((1, 1, 1))
    taps: int = 1

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return f"{super().name}_{'x'.join(map(str, reversed(self.box.sides)))}"

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
    image, axes = windows.image, windows.axes
    if not isinstance(image, Load) or image.conditions or image.dtype not in KINDS or parts.has_zeros:
        return None
    steps = steps_of(parts.puller, image.offset) or {}
    names = ("@c", *(f"@{name}" for name in SPATIAL[:len(axes)]), "@image")
    sizes = (dim(windows.channels), *(axis.extent for axis in axes), windows.images)
    # An axis of one element has no step, and may have any; many that are the same element have none either.
    if any(name not in steps and size != 1 for name, size in zip(names, sizes, strict=True)):
        return None
    strides = tuple(steps.get(name, dim(windows.channels)) for name in names[1:])
    if set(steps) - set(names) or steps.get("@c") != 1 or any(axis.stride > MOST_ELEMENT_STRIDE for axis in axes):
        return None
    known = [stride.value for stride in strides if stride.value is not None]
    if any(stride * parts.size % PIECE_BYTES or stride <= 0 for stride in known):
        return None
    # Of integers, and beside panels of columns, lines are of one length.
    line = STAGE_BYTES if parts.integers or weights.across else line_of(windows.channels, parts.size)
    boxed = Boxed(image.input, image.dtype, names, strides, sizes, False, windows, line=line)
    weights = replace(weights, line=line)
    return boxed, weights if boxed.staged == windows.channels else _parted(weights, windows)


def _parted(weights: Mapped, windows: Windows) -> Parted:
    """A convolution's weights, whose places lie one behind the other, apart by these."""
    channels, taps = dim(windows.channels), dim(windows.taps)
    (step,), (first, second) = weights.strides, weights.sizes
    if weights.across:
        axes, sizes, strides = ("@n", "@c", "@tap"), (first, channels, taps), (step, step * channels)
    else:
        axes, sizes, strides = ("@c", "@tap", "@n"), (channels, taps, second), (channels, step)
    return Parted(weights.input, weights.dtype, axes, strides, sizes, weights.across, line=weights.line)


def box_of(windows: Windows, rows: int, counts: tuple[int, ...]) -> Box:
    """The box of at most so many windows of which the fewest are needed for so many along each axis, and images, and of
    those the broadest, whose windows have most in common."""
    return _box_of(tuple(axis.stride for axis in windows.axes), rows, counts)


@cache
def _box_of(strides: tuple[int, ...], rows: int, counts: tuple[int, ...]) -> Box:
    boxes = (Box(sides) for sides in _sides(strides, rows, counts))
    return min(boxes, key=lambda box: (box.count(counts), *(-side for side in box.sides[:-1]), box.rows))


def _sides(strides: Sequence[int], rows: int, counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """How many windows boxes may have along each axis, and of as many images as there is room for."""
    if not strides:
        yield (max(1, min(rows, counts[0], MOST_BOX)),)
        return
    for side in range(1, min(counts[0], rows, (MOST_BOX - 1) // strides[0] + 1) + 1):
        for others in _sides(strides[1:], rows // side, counts[1:]):
            yield side, *others


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
        self.axes = dict(zip(SPATIAL, self.windows.axes, strict=False))
        self.counts = dict(zip((*self.axes, "image"), map(size, self.windows.counts), strict=True))
        self.sides = {name: SIDES[name] for name in self.counts}

    def _aside(self, load: Load) -> Aside | None:
        """As windows follow one another, where 64 of a tile's rows are a box of these."""
        found = super()._aside(load)
        if found is None or found.axes != ("@n", "@m") or self._part() is None:
            return None
        strides = [found.strides[0]]
        for count in self.windows.counts[:-1]:
            strides.append(strides[-1] * count)
        names = tuple(f"@{name}" for name in self.counts)
        return replace(found, axes=("@n", *names), strides=tuple(strides), sizes=(found.sizes[0], *self.windows.counts))

    def aside_map(self, aside: Aside, symbols: Mapping[str, str]) -> TensorMap:
        """See ``SpecialisedText``."""
        part = self._part()
        assert part is not None
        return replace(aside.map(1, symbols), box=(PANEL, *part.sides))

    def _part(self) -> Box | None:
        """The box that 64 of a tile's rows are; None where they are none."""
        return self.box.part(PANEL)

    def _strip_at(self) -> list[str]:
        return [*self._window_at().values()]

    def _window_at(self) -> dict[str, str]:
        """Where along each axis the window is that has a place in the box."""
        sides = [*self.sides.values()][:-1]
        return {axis: f"first_{axis} + {_digit('place', each, sides)}" for each, axis in enumerate(self.sides)}

    def _constants(self) -> list[str]:
        names = [*reversed(self.sides.values())]
        sides = [f"{name} = {side}" for name, side in zip(names, reversed(self.box.sides), strict=True)]
        return [
            *super()._constants(), f"constexpr int {', '.join(sides)};",
            f"constexpr int box_rows = {' * '.join(names)};"]

    def _tiles(self) -> str:
        boxes = {name: f"({self.counts[name]} + {side} - 1) / {side}" for name, side in self.sides.items()}
        along = [f"{BOXES[name]} = {boxes[name]}, " for name in self.axes]
        return (f"const idx {''.join(along)}below = {' * '.join(self._boxes)} * ({boxes['image']}), "
                f"beyond = ({self.extents['n']} + own_columns - 1) / own_columns;")

    @property
    def _down(self) -> str:
        return "box"

    @property
    def _boxes(self) -> list[str]:
        """How many boxes there are along each axis."""
        return [BOXES[name] for name in self.axes]

    def _begins(self, down: str, right: str) -> list[str]:
        firsts = [f"first_{name} = {_digit('box', place, self._boxes)} * {self.sides[name]}"
                  for place, name in enumerate(self.sides)]
        return [
            f"const idx box = {down}, first_n = {right} * own_columns;",
            f"const idx {', '.join(firsts[:-1])};",
            f"const idx {firsts[-1]};",
        ]

    def _at(self, loop: str, operand: Mapped, writer: Writer) -> list[str]:
        if not isinstance(operand, Parted):
            return super()._at(loop, operand, writer)
        channel, tap = f"start % {self.staged}", f"start / {self.staged}"
        return [f"first_{loop} + panel", channel, tap] if operand.across else [channel, tap, f"first_{loop}"]

    def _copied(self, place: int, operand: Mapped, writer: Writer) -> list[str]:
        if place:
            return super()._copied(place, operand, writer)
        taps = [str(axis.taps) for axis in self.axes.values()]
        found = [f"tap_{name} = {_digit('tap', each, taps[:-1])}" for each, name in enumerate(self.axes)]
        at = [f"(int)(start % {self.staged})", *(self._along(*each) for each in self.axes.items()), "(int)first_image"]
        return [
            "{",
            f"  const int tap = (int)(start / {self.staged}), {', '.join(found)};",
            f"  const int at[] = {{{', '.join(at)}}};",
            f"  of::copy_tile(left_tiles + turn * rows * depth, m{self.first}, here + turn, at);",
            "}",
        ]

    def _along(self, name: str, axis: WindowAxis) -> str:
        """Where in the image the first window's place lies."""
        start = self._writer(self.lanes).size(axis.start)
        return f"(int)(first_{name} * {axis.stride} + {start}) + tap_{name} * {axis.dilation}"

    def _row_at(self, place: str, name: str, valid: str = "") -> list[str]:
        found = [f"{axis} = {place}" for axis, place in self._window_at().items()]
        within = " && ".join(f"{axis} < {count}" for axis, count in self.counts.items())
        row = "image"
        for axis in reversed(self.axes):
            row = f"{row if row == 'image' else f'({row})'} * {self.counts[axis]} + {axis}"
        return [
            f"const int place = {place};",
            f"const idx {', '.join(found)};",
            f"const idx {name} = {valid}place < box_rows && {within} ? {row} : (idx){self.extents['m']};",
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


def _digit(number: str, place: int, sizes: Sequence[str]) -> str:
    """A digit of a number, the lowest first, each of which but the last has so many values."""
    below = " * ".join(sizes[:place])
    digits = number if not place else f"{number} / {below}" if place == 1 else f"{number} / ({below})"
    return f"{digits} % {sizes[place]}" if place < len(sizes) else digits
