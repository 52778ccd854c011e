"""What convolutions mean as tensors: a contraction over a window of the input.

Images stay channels-first here, as ONNX has them.  Which axis of memory is innermost is a matter of the index maps, and
so of whoever reads and writes the contraction.  The stencil schedule holds those of each channel by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnxfuse.graph.dims import Dim, dim, maximum, product
from onnxfuse.graph.model import Node, Shape
from onnxfuse.ir.context import LoweringContext, apply, declare, expand, like, reshape, wide
from onnxfuse.ir.contractions import Slide, contract, parted, transposed_last, window
from onnxfuse.ir.integers import less_zero
from onnxfuse.ir.tensors import Concat, Permute, Slice, Tensor
from onnxfuse.operators.multiplying import alone, requantized
from onnxfuse.operators.operands import integer_attribute, operand, optional, quantised_by, result_shape


def conv(node: Node, context: LoweringContext) -> Tensor:
    source, weight, bias = operand(node, context, 0), operand(node, context, 1), optional(node, context, 2)
    made = convolved(source, weight, node, context)
    if bias is not None:
        made = apply("add", made, _of_channels(wide(bias), made), shape=made.shape)
    return declare(made, source.dtype)


def conv_integer(node: Node, context: LoweringContext) -> Tensor:
    source, weight = operand(node, context, 0), operand(node, context, 1)
    zero, weight_zero = optional(node, context, 2), optional(node, context, 3)
    return _of_integers((source, zero), (weight, weight_zero), node, context)


def qlinear_conv(node: Node, context: LoweringContext) -> Tensor:
    """What the integers' convolution stands for, as the nearest quantised number."""
    source, weight = operand(node, context, 0), operand(node, context, 3)
    scale, zero, weight_scale, weight_zero, own_scale, own_zero = (
        quantised_by(node, context, place) for place in (1, 2, 4, 5, 6, 7))
    made, bias = _of_integers((source, zero), (weight, weight_zero), node, context), optional(node, context, 8)
    if bias is not None:
        made = apply("add", made, _of_channels(bias, made), shape=made.shape)
    factor = apply("div", apply("mul", wide(alone(scale)), wide(_of_channels(weight_scale, made))),
                   wide(alone(own_scale)))
    return requantized(made, factor, own_zero, node, context)


def _of_integers(
    source: tuple[Tensor, Tensor | None], weight: tuple[Tensor, Tensor | None], node: Node, context: LoweringContext
) -> Tensor:
    """The convolution of numbers less their zero points, which are what the padding holds."""
    image, zero = source
    kernel, kernel_zero = weight
    if kernel_zero is not None and kernel_zero.rank == 1:
        kernel_zero = reshape(kernel_zero, (*kernel_zero.shape, *(dim(1),) * (kernel.rank - 1)))
    return convolved(less_zero(image, zero), less_zero(kernel, kernel_zero), node, context)


def _of_channels(vector: Tensor, image: Tensor) -> Tensor:
    """A vector with a number a channel, as it is broadcast to an image; one number as a scalar."""
    vector = alone(vector)
    return reshape(vector, (*vector.shape, *(dim(1),) * (image.rank - 2))) if vector.rank == 1 else vector


def convolved(source: Tensor, weight: Tensor, node: Node, context: LoweringContext) -> Tensor:
    """The sums of a convolution, in the type of sums.

    Groups are a batch of contractions.  Along an axis where each place is one element of the image, as everywhere in a
    convolution by one pixel, there is no window: such a one is a matrix product.
    """
    spatial = range(_spatial(source, weight))
    channels, groups = weight.shape[1], integer_attribute(node, "group", 1)
    features = _per_group(weight.shape[0], groups)
    slides = slides_of(node, source.shape[2:], weight.shape[2:], result_shape(node, context)[2:])
    sliding = [axis for axis in spatial if not slides[axis].is_plain(source.shape[2 + axis])]
    kernel, inner = [weight.shape[2 + axis] for axis in sliding], [f"k{axis}" for axis in sliding]
    outer = [f"o{axis}" for axis in spatial]
    places = [label for axis in spatial for label in (f"o{axis}", f"k{axis}") if label in (*outer, *inner)]
    group = ["g"] * (groups != 1)
    source = _grouped(source, 1, groups, channels)
    source = window(source, {2 + len(group) + axis: slide for axis, slide in enumerate(slides)})
    weight = reshape(weight, (*((dim(groups),) * len(group)), features, channels, *kernel))
    made = contract((source, ["n", *group, "c", *places]), (weight, [*group, "m", "c", *inner]),
                    ["n", *group, "m", *outer])
    return reshape(made, (made.shape[0], features * groups, *(slide.count for slide in slides)))


def _spatial(source: Tensor, weight: Tensor) -> int:
    if source.rank != weight.rank or source.rank < 3:
        raise ValueError(f"an image of {source.rank} axes and weights of {weight.rank}")
    return source.rank - 2


def _per_group(size: Dim, groups: int) -> Dim:
    share = size.divide(groups) if groups > 0 else None
    if share is None:
        raise ValueError(f"{size} channels in {groups} groups")
    return share


def _grouped(source: Tensor, axis: int, groups: int, share: Dim) -> Tensor:
    """Channels as groups of so many each."""
    if (source.shape[axis] - share * groups).value not in (None, 0):
        raise ValueError(f"{source.shape[axis]} channels in {groups} groups of {share}")
    return source if groups == 1 else parted(source, axis, dim(groups), share)


def slides_of(node: Node, sizes: Shape, kernel: Shape, counts: Shape) -> list[Slide]:
    """How the window slides along each spatial axis."""
    strides, dilations, pads = _steps(node, "strides", len(sizes)), _steps(node, "dilations", len(sizes)), _pads(node)
    automatic = node.attributes.get("auto_pad", "NOTSET")
    found = []
    for axis, size in enumerate(sizes):
        start = dim(0)
        if automatic in ("SAME_UPPER", "SAME_LOWER"):
            reach = (kernel[axis] - 1) * dilations[axis] + 1
            padding = maximum((counts[axis] - 1) * strides[axis] + reach - size, 0)
            start = -(padding // 2) if automatic == "SAME_UPPER" else padding // 2 - padding
        elif automatic == "NOTSET" and pads:
            start = dim(-pads[axis])
        found.append(Slide(counts[axis], kernel[axis], start, strides[axis], dilations[axis]))
    return found


def _steps(node: Node, name: str, count: int) -> list[int]:
    return [int(step) for step in node.attributes.get(name) or [1] * count]


def _pads(node: Node) -> list[int]:
    return [int(pad) for pad in node.attributes.get("pads") or ()]


def conv_transpose(node: Node, context: LoweringContext) -> Tensor:
    """A transposed convolution without what zeros between its input's elements would cost.

    Element s q + r of the result (s the stride) sums x[q - j] w[s j + r] over j: the weights, with zeros behind them up
    to a multiple of s, are s kernels of every s-th of them, turned around, and each gives every s-th element of the
    result.
    """
    source, weight, bias = operand(node, context, 0), operand(node, context, 1), optional(node, context, 2)
    if node.attributes.get("output_shape") or node.attributes.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise context.refuse("unsupported-mode", "a ConvTranspose that chooses its padding has no kernel")
    count, groups = _spatial(source, weight), integer_attribute(node, "group", 1)
    strides, dilations = _steps(node, "strides", count), _steps(node, "dilations", count)
    pads = (_pads(node) if node.attributes.get("auto_pad", "NOTSET") == "NOTSET" else []) or [0] * (2 * count)
    share, first = _per_group(weight.shape[0], groups), 2 + (groups != 1)
    source, weight = _grouped(source, 1, groups, share), _grouped(weight, 0, groups, share)
    counts, slides = result_shape(node, context)[2:], []
    for axis, stride in enumerate(strides):
        weight = _phases(_dilated(weight, first + 2 * axis, dilations[axis]), first + 2 * axis, stride)
        taps = weight.shape[first + 2 * axis]
        slides.append(Slide((counts[axis] + (pads[axis] + stride - 1)) // stride, taps, 1 - taps))
    made = _spread(source, weight, slides, first)
    if (*made.shape[2:], *pads[:count]) != (*counts, *[0] * count):
        made = Slice(made.dtype, (*made.shape[:2], *counts), made,
                     (dim(0), dim(0), *(dim(pad) for pad in pads[:count])), (1,) * made.rank)
    if bias is not None:
        made = apply("add", made, _of_channels(wide(bias), made), shape=made.shape)
    return declare(made, source.dtype)


def _spread(source: Tensor, weight: Tensor, slides: Sequence[Slide], first: int) -> Tensor:
    """The whole result, up to a multiple of the strides.

    Args:
        source: the image; weight: with two axes in place of each of its own from the ``first`` on, taps and phases.
        slides: of the taps along each axis.
    """
    spatial, group = range(len(slides)), ["g"] * (first == 3)
    plain = [slide.is_plain(source.shape[first + axis]) for axis, slide in enumerate(slides)]
    source = window(source, {first + axis: slide for axis, slide in enumerate(slides)})
    kept = [size for axis, size in enumerate(weight.shape)
            if axis < first or (axis - first) % 2 or not plain[(axis - first) // 2]]
    inner = [[f"k{axis}"] * (not plain[axis]) for axis in spatial]
    channels, places = [*group, "m"], [f"{part}{axis}" for axis in spatial for part in "qr"]
    # Neighbours of the result are those of the image.
    last = _has_last(source, first - 1)
    made: Tensor = contract(
        (source, ["n", *group, "c", *(label for axis in spatial for label in (f"q{axis}", *inner[axis]))]),
        (reshape(weight, tuple(kept)),
         [*group, "c", "m", *(label for axis in spatial for label in (*inner[axis], f"r{axis}"))]),
        ["n", *places, *channels] if last else ["n", *channels, *places],
    )
    features = product([weight.shape[0], weight.shape[2]]) if group else weight.shape[1]
    whole = tuple(slide.count * weight.shape[first + 2 * axis + 1] for axis, slide in enumerate(slides))
    if not last:
        return reshape(made, (made.shape[0], features, *whole))
    made, axes = reshape(made, (made.shape[0], *whole, features)), (0, 1 + len(whole), *(1 + axis for axis in spatial))
    return Permute(made.dtype, tuple(made.shape[axis] for axis in axes), made, axes)


def _has_last(tensor: Tensor, axis: int) -> bool:
    """Whether a tensor is a transposed one whose neighbours are those along an axis."""
    tensor = transposed_last(tensor)
    return isinstance(tensor, Permute) and tensor.axes[axis] == tensor.rank - 1


def _dilated(weight: Tensor, axis: int, dilation: int) -> Tensor:
    """With zeros between the elements along an axis."""
    if dilation == 1:
        return weight
    before, size, after = weight.shape[:axis], weight.shape[axis], weight.shape[axis + 1:]
    spread = _longer(reshape(weight, (*before, size, dim(1), *after)), axis + 1, dim(dilation))
    return reshape(spread, (*before, size * dilation, *after))


def _phases(weight: Tensor, axis: int, stride: int) -> Tensor:
    """An axis as two: every so-manieth element, the last of them first, and which of them; behind the end are zeros."""
    size = weight.shape[axis]
    taps = (size + (stride - 1)) // stride
    if stride == 1:
        weight = reshape(weight, (*weight.shape[:axis], taps, dim(1), *weight.shape[axis + 1:]))
    elif taps == 1:
        weight = reshape(_longer(weight, axis, dim(stride)),
                         (*weight.shape[:axis], taps, dim(stride), *weight.shape[axis + 1:]))
    else:
        weight = window(weight, {axis: Slide(taps, dim(stride), dim(0), stride)})
    if taps == 1:
        return weight
    starts = tuple(taps - 1 if place == axis else dim(0) for place in range(weight.rank))
    steps = tuple(-1 if place == axis else 1 for place in range(weight.rank))
    return Slice(weight.dtype, weight.shape, weight, starts, steps)


def _longer(tensor: Tensor, axis: int, size: Dim) -> Tensor:
    """With zeros behind the elements along an axis."""
    if tensor.shape[axis] == size:
        return tensor
    before, after = tensor.shape[:axis], tensor.shape[axis + 1:]
    zeros = expand(like(0, tensor), (*before, size - tensor.shape[axis], *after))
    return Concat(tensor.dtype, (*before, size, *after), (tensor, zeros), axis)
