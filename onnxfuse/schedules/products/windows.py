"""The windows of a convolution, where its product has places of windows as rows: what they see of images."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from onnxfuse.graph.dims import Dim, dim
from onnxfuse.ir.tensors import Contract, Window
from onnxfuse.lowering.pull import Scalar
from onnxfuse.schedules.products.parts import ProductParts

SPATIAL = ("x", "y", "z")
"""The spatial axes of an image, the innermost first."""


@dataclass(frozen=True)
class WindowAxis:
    """A spatial axis: of the image's ``extent``, ``count`` windows of ``taps`` elements."""

    extent: Dim
    count: Dim
    taps: int = 1
    start: Dim = dim(0)  # noqa: RUF009
    stride: int = 1
    dilation: int = 1

    def span(self, places: int) -> int:
        """Elements under so many neighbouring windows."""
        return (places - 1) * self.stride + (self.taps - 1) * self.dilation + 1


@dataclass(frozen=True)
class Windows:
    """A convolution along one to three axes.

    Attributes:
        image: its element at ``@image``, ``@c`` and, by their names in ``SPATIAL``, all axes; images, channels: how
            many.
        axes: the spatial axes, two at least, x first: y of one place where there is one.
        order: what the summed loops are, outermost first: of "c" and those of ``SPATIAL``.
        last: whether neighbouring channels lie side by side.
    """

    image: Scalar
    images: Dim
    channels: int
    axes: tuple[WindowAxis, ...]
    order: tuple[str, ...]
    last: bool

    @property
    def x(self) -> WindowAxis:
        """The innermost axis."""
        return self.axes[0]

    @property
    def y(self) -> WindowAxis:
        """That around it."""
        return self.axes[1]

    @property
    def taps(self) -> int:
        """Places of a window."""
        return prod(axis.taps for axis in self.axes)

    @property
    def depth(self) -> int:
        """Elements of a window."""
        return self.channels * self.taps

    @property
    def counts(self) -> tuple[Dim, ...]:
        """Windows along each axis, and images."""
        return (*(axis.count for axis in self.axes), self.images)


def has_windows(contract: Contract) -> bool:
    """Whether a product is of windows: a convolution over more than one pixel."""
    return any(isinstance(operand, Window) for operand in contract.operands)


def windows_of(contract: Contract, parts: ProductParts) -> Windows | None:
    """The windows that the left operand's rows are, of one element along axes on which none slides; None where rows are
    of something else than images with one axis to three."""
    side = int(parts.swapped)
    left, loops = contract.operands[side], contract.axes[side]
    window = left if isinstance(left, Window) else Window(left.dtype, left.shape, left, (), (), (), ())
    image = window.operand
    loop_of = {axis: loops[window.place_of(axis)] for axis in range(image.rank)}
    summed = [axis for axis, loop in loop_of.items() if loop >= contract.rank and axis not in window.axes]
    lone = [axis for axis in loop_of if axis not in summed]
    rows = contract.columns if side else contract.rows
    if contract.batch or len(summed) != 1 or not 2 <= len(lone) <= 1 + len(SPATIAL) or lone[0] in window.axes:
        return None
    images, *spatial = lone
    channels = image.shape[summed[0]].value
    axes = [axis for place in reversed(spatial) if (axis := _axis(window, place)) is not None]
    if channels is None or len(axes) < len(spatial) or rows != tuple(loop_of[axis] for axis in (images, *spatial)):
        return None
    names = {summed[0]: "c", **dict(zip(reversed(spatial), SPATIAL, strict=False))}
    within = {loop_of[summed[0]]: "c", **{loops[window.place_of(axis) + 1]: names[axis] for axis in window.axes}}
    order = tuple(within[loop] for loop in range(contract.rank, len(contract.loops)))
    space = parts.puller.space
    at = tuple(space.base(f"@{names.get(axis, 'image')}", image.shape[axis]) for axis in range(image.rank))
    flat = () if len(axes) > 1 else (WindowAxis(dim(1), dim(1)),)
    return Windows(parts.puller.element(image, at), image.shape[images], channels, (*axes, *flat), order,
                   summed[0] == image.rank - 1)


def _axis(window: Window, axis: int) -> WindowAxis | None:
    """An axis of the image, along which windows slide or do not; None where these have no certain size."""
    extent, place = window.operand.shape[axis], window.place_of(axis)
    if axis not in window.axes:
        return WindowAxis(extent, extent)
    taps, number = window.shape[place + 1].value, window.axes.index(axis)
    return None if taps is None else WindowAxis(
        extent, window.shape[place], taps, window.starts[number], window.strides[number], window.dilations[number])
