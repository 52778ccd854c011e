"""The windows of a convolution, where its product has places of windows as rows: what they see of images."""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.graph.dims import Dim, dim
from onnxfuse.ir.tensors import Contract, Window
from onnxfuse.lowering.pull import Scalar
from onnxfuse.schedules.product_parts import ProductParts


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
    """A convolution along one axis or two.

    Attributes:
        image: its element at (``@image``, ``@c``, ``@y``, ``@x``); images, channels: how many.
        y, x: the spatial axes, y of one place where there is one.
        order: what the summed loops are, outermost first: of "c", "y" and "x".
        last: whether neighbouring channels lie side by side.
    """

    image: Scalar
    images: Dim
    channels: int
    y: WindowAxis
    x: WindowAxis
    order: tuple[str, ...]
    last: bool

    @property
    def depth(self) -> int:
        """Elements of a window."""
        return self.channels * self.y.taps * self.x.taps


def has_windows(contract: Contract) -> bool:
    """Whether a product is of windows: a convolution over more than one pixel."""
    return any(isinstance(operand, Window) for operand in contract.operands)


def windows_of(contract: Contract, parts: ProductParts) -> Windows | None:
    """The windows that the left operand's rows are, of one element along axes on which none slides; None where rows are
    of something else than images with one axis or two."""
    side = int(parts.swapped)
    left, loops = contract.operands[side], contract.axes[side]
    window = left if isinstance(left, Window) else Window(left.dtype, left.shape, left, (), (), (), ())
    image = window.operand
    loop_of = {axis: loops[window.place_of(axis)] for axis in range(image.rank)}
    summed = [axis for axis, loop in loop_of.items() if loop >= contract.rank and axis not in window.axes]
    lone = [axis for axis in loop_of if axis not in summed]
    rows = contract.columns if side else contract.rows
    if contract.batch or len(summed) != 1 or not 2 <= len(lone) <= 3 or lone[0] in window.axes:
        return None
    images, *spatial = lone
    channels = image.shape[summed[0]].value
    axes = [_axis(window, axis) for axis in spatial]
    if channels is None or None in axes or rows != tuple(loop_of[axis] for axis in (images, *spatial)):
        return None
    names = {summed[0]: "c", **dict(zip(spatial, "yx"[-len(axes):], strict=True))}
    within = {loop_of[summed[0]]: "c", **{loops[window.place_of(axis) + 1]: names[axis] for axis in window.axes}}
    order = tuple(within[loop] for loop in range(contract.rank, len(contract.loops)))
    space = parts.puller.space
    at = tuple(space.base(f"@{names.get(axis, 'image')}", image.shape[axis]) for axis in range(image.rank))
    y, x = axes if len(axes) == 2 else (WindowAxis(dim(1), dim(1)), axes[0])
    assert y is not None and x is not None
    return Windows(parts.puller.element(image, at), image.shape[images], channels, y, x, order,
                   summed[0] == image.rank - 1)


def _axis(window: Window, axis: int) -> WindowAxis | None:
    """An axis of the image, along which windows slide or do not; None where these have no certain size."""
    extent, place = window.operand.shape[axis], window.place_of(axis)
    if axis not in window.axes:
        return WindowAxis(extent, extent)
    taps, number = window.shape[place + 1].value, window.axes.index(axis)
    return None if taps is None else WindowAxis(
        extent, window.shape[place], taps, window.starts[number], window.strides[number], window.dilations[number])
