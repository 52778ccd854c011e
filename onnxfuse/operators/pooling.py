"""What pooling means as tensors: the maximum, or the mean, of each window of an image's channels.

A window that is all of an image is a reduction, as a global pooling is.
"""

from __future__ import annotations

from functools import reduce
from math import prod

from onnxfuse.graph.dims import Dim, dim
from onnxfuse.graph.model import Node, Shape
from onnxfuse.ir.context import LoweringContext, accumulate, apply, declare, mean, total
from onnxfuse.ir.contractions import Slide
from onnxfuse.ir.scalars import TYPES
from onnxfuse.ir.tensors import Fill, Pool, Tensor, scalar
from onnxfuse.operators.convolving import slides_of
from onnxfuse.operators.operands import integer_attribute, operand, result_shape

MOST_TAPS = 81
"""Elements of a window: each is a line of a kernel's text."""


def max_pool(node: Node, context: LoweringContext) -> Tensor:
    """The largest element of each window; NaN where one of them is."""
    source = operand(node, context, 0)
    windows = _windows(node, source.shape, context)
    gone = _whole(windows, source.shape)
    return total("max", source, gone) if gone else pooled("max", source, windows)


def average_pool(node: Node, context: LoweringContext) -> Tensor:
    """The mean of each window, of what lies in the image or, where the node says so, with the padding's zeros."""
    source = operand(node, context, 0)
    if not TYPES[source.dtype].is_floating:
        raise context.refuse("unsupported-type", f"{node.op} of {TYPES[source.dtype].name} has no kernel")
    windows, wide = _windows(node, source.shape, context), accumulate(source)
    gone = _whole(windows, source.shape)
    if gone:
        return declare(mean(wide, gone), source.dtype)
    # Where there is no padding what lies in the image is counted, of a window that is larger than it too.
    padding = _padding(node, len(windows))
    pads = _pads_itself(node) or any(map(any, padding))
    padded = pads and bool(integer_attribute(node, "count_include_pad", 0))
    if padded and not all(_fits(slide, source.shape[axis], behind) for (axis, slide), (_, behind) in zip(
            windows.items(), padding, strict=True)):
        # The runtime's providers divide by different numbers there.
        raise context.refuse("unsupported-mode", "an AveragePool whose last window may reach past its padding, which "
                             "counts, has no kernel")
    count = scalar(float(prod(_taps(windows))), wide.dtype) if padded else _counted(wide, windows)
    return declare(apply("div", pooled("sum", wide, windows), count), source.dtype)


def pooled(kind: str, source: Tensor, windows: dict[int, Slide]) -> Tensor:
    """A pooling by these windows; those of one element that move on by one are none."""
    moving = {axis: slide for axis, slide in windows.items() if not _is_plain(slide, source.shape[axis])}
    if not moving:
        return source
    shape = tuple(windows[axis].count if axis in windows else size for axis, size in enumerate(source.shape))
    return Pool(
        source.dtype, shape, kind, source, tuple(moving), _taps(moving),
        tuple(slide.start for slide in moving.values()), tuple(slide.stride for slide in moving.values()),
        tuple(slide.dilation for slide in moving.values()))


def _counted(source: Tensor, windows: dict[int, Slide]) -> Tensor:
    """How many elements of each window lie in the image: along each axis, as a factor."""
    factors = []
    for axis, slide in windows.items():
        lone = tuple(size if place == axis else dim(1) for place, size in enumerate(source.shape))
        factors.append(pooled("sum", Fill(source.dtype, lone, 1.0), {axis: slide}))
    return reduce(lambda one, other: apply("mul", one, other), factors)


def _taps(windows: dict[int, Slide]) -> tuple[int, ...]:
    return tuple(slide.size.value or 1 for slide in windows.values())


def _whole(windows: dict[int, Slide], shape: Shape) -> tuple[int, ...]:
    """The axes along which the one window is all of an image, where there is no other than such and plain ones."""
    whole = tuple(axis for axis, slide in windows.items() if slide.size == shape[axis] and slide.count == 1
                  and slide.start == 0 and slide.dilation == 1)
    return whole if all(axis in whole or _is_plain(slide, shape[axis]) for axis, slide in windows.items()) else ()


def _is_plain(slide: Slide, extent: Dim) -> bool:
    """Whether each element of an axis is a window."""
    return slide.size == 1 and slide.start == 0 and slide.stride == 1 and slide.count == extent


def _fits(slide: Slide, extent: Dim, behind: int) -> bool:
    """Whether no window reaches past so much padding."""
    last = slide.start + (slide.count - 1) * slide.stride + (slide.size - 1) * slide.dilation
    return (extent + behind - 1 - last).non_negative() or slide.count == (
        extent + behind - slide.start - (slide.size - 1) * slide.dilation - 1) // slide.stride + 1


def _windows(node: Node, shape: Shape, context: LoweringContext) -> dict[int, Slide]:
    """How the window slides, by axis of the image."""
    kernel = [int(size) for size in node.attributes["kernel_shape"]]
    if len(kernel) != len(shape) - 2 or not kernel:
        raise ValueError(f"a window of {len(kernel)} axes and an image of {len(shape)}")
    if min(kernel) < 1:
        raise ValueError("a window of no elements")
    found = slides_of(node, shape[2:], tuple(map(dim, kernel)), result_shape(node, context)[2:])
    windows = {axis + 2: slide for axis, slide in enumerate(found)}
    same = _pads_itself(node)
    for (axis, slide), around in zip(windows.items(), _padding(node, len(kernel)), strict=True):
        if min(around) < 0 or max(around) >= kernel[axis - 2]:
            raise context.refuse("unsupported-mode", f"{node.op} with a padding of {around[0]} and {around[1]} around "
                                 f"windows of {kernel[axis - 2]} has no kernel")
        if same and (slide.dilation > 1 or slide.stride > kernel[axis - 2]):
            # The runtime pads for windows that lie close and touch.
            raise context.refuse("unsupported-mode", f"{node.op} that pads for windows with gaps has no kernel")
        if slide.dilation > 1 and any(around) and not (shape[axis] - slide.dilation).non_negative():
            raise context.refuse(
                "unsupported-mode", f"{node.op} with windows that may lie beside the image has no kernel")
    if not _whole(windows, shape) and prod(kernel) > MOST_TAPS:
        raise context.refuse("pool-window", f"windows of {prod(kernel)} elements; kernels have those up to {MOST_TAPS}")
    return windows


def _pads_itself(node: Node) -> bool:
    """Whether the node chooses its padding."""
    return node.attributes.get("auto_pad", "NOTSET") in ("SAME_UPPER", "SAME_LOWER")


def _padding(node: Node, count: int) -> list[tuple[int, int]]:
    """The padding before and behind each spatial axis; none where the node chooses it."""
    pads = node.attributes.get("pads") if node.attributes.get("auto_pad", "NOTSET") == "NOTSET" else None
    pads = [int(pad) for pad in pads or [0] * (2 * count)]
    return list(zip(pads[:count], pads[count:], strict=True))
