"""Operators that give an operand's elements another shape or order: each is an index map, at no cost of its own."""

from __future__ import annotations

from onnxfuse.graph.context import Type, TypeContext, flat
from onnxfuse.graph.dims import Dim, dim, product
from onnxfuse.graph.model import Node, Shape
from onnxfuse.ir.context import LoweringContext, expand, reshape
from onnxfuse.ir.tensors import Permute, Tensor
from onnxfuse.operators.arithmetic import none
from onnxfuse.operators.contents import spread
from onnxfuse.operators.operands import integer_attribute, operand, result_shape, shape_operands
from onnxfuse.operators.record import PLAIN, VIEW, RuntimeKernel, define


def reshape_types(context: TypeContext) -> list[Type]:
    target, shape = context.elements(1), context.shape()
    if target is None:
        rank = context.count(1)
        known = None if rank is None else context.unknown_shape(rank)
        return [Type(context.dtype(), known, context.elements(0))]
    keep_zero = bool(context.attribute("allowzero", 0))
    sizes: list[Dim | None] = []
    for axis, size in enumerate(target):
        if size == -1:
            sizes.append(None)
        elif size == 0 and not keep_zero:
            sizes.append(shape[axis] if shape is not None and axis < len(shape) else context.unknown(axis, len(target)))
        else:
            sizes.append(size)
    if None in sizes:
        rest = sizes.index(None)
        sizes[rest] = _remaining(context, shape, [size for size in sizes if size is not None], rest, len(sizes))
    elif shape is not None:
        context.demand_elements(shape, [size for size in sizes if size is not None], "equal")
    return [Type(context.dtype(), tuple(size for size in sizes if size is not None), context.elements(0))]


def _remaining(context: TypeContext, shape: Shape | None, sizes: list[Dim], axis: int, rank: int) -> Dim:
    """The size that -1 stands for: all elements over those of the other axes."""
    if shape is None:
        return context.unknown(axis, rank)
    # Sizes on both sides cancel first, so that sums and opaque sizes divide as well.
    rest, others = list(shape), []
    for size in sizes:
        if size in rest:
            rest.remove(size)
        else:
            others.append(size)
    context.demand_elements(rest, others, "multiple")
    return product(rest) // product(others)


def flatten_types(context: TypeContext) -> list[Type]:
    shape = context.shape()
    if shape is None:
        return [Type(context.dtype(), context.unknown_shape(2))]
    axis = context.axis(len(shape), 1)
    return [Type(context.dtype(), (product(shape[:axis]), product(shape[axis:])), context.elements(0))]


def transpose_types(context: TypeContext) -> list[Type]:
    shape = context.shape()
    if shape is None:
        return [Type(context.dtype())]
    order = context.attribute("perm") or list(reversed(range(len(shape))))
    contents = context.contents(0)
    moved = None if contents is None else contents.transpose(order)
    return [Type(context.dtype(), tuple(shape[axis] for axis in order), flat(moved))]


def axes_of(context: TypeContext, index: int = 1) -> list[int] | None:
    """Axes given as an attribute (old operator sets) or as an input; [] where neither is there."""
    given = context.attribute("axes")
    if given is not None:
        return [int(axis) for axis in given]
    return context.integers(index) if context.has(index) else []


def squeeze_types(context: TypeContext) -> list[Type]:
    shape, axes = context.shape(), axes_of(context)
    if shape is None or axes is None:
        return [Type(context.dtype(), None, context.elements(0))]
    if context.attribute("axes") is None and not context.has(1):
        if any(size.value is None for size in shape):
            # A symbolic size may be 1 and vanish: not even the rank is known.
            return [Type(context.dtype(), None, context.elements(0))]
        axes = [axis for axis, size in enumerate(shape) if size == 1]
    gone = {axis % len(shape) for axis in axes} if shape else set()
    left = tuple(size for axis, size in enumerate(shape) if axis not in gone)
    return [Type(context.dtype(), left, context.elements(0))]


def unsqueeze_types(context: TypeContext) -> list[Type]:
    shape, axes = context.shape(), axes_of(context)
    if shape is None or axes is None:
        return [Type(context.dtype(), None, context.elements(0))]
    rank = len(shape) + len(axes)
    new = {axis % rank for axis in axes}
    old = iter(shape)
    sizes = tuple(dim(1) if axis in new else next(old) for axis in range(rank))
    return [Type(context.dtype(), sizes, context.elements(0))]


def expand_types(context: TypeContext) -> list[Type]:
    shape, target = context.shape(), context.elements(1)
    if shape is None or target is None:
        rank = context.count(1)
        known = None if rank is None or shape is None else context.unknown_shape(max(rank, len(shape)))
        return [Type(context.dtype(), known)]
    result = context.meet(shape, target)
    elements, wide = context.elements(0), None
    if elements is not None and result is not None:
        wide = spread(elements, shape, result)
    return [Type(context.dtype(), result, wide)]


def depth_space_types(context: TypeContext) -> list[Type]:
    shape = context.shape()
    if shape is None or len(shape) != 4:
        return [Type(context.dtype())]
    block = int(context.attribute("blocksize"))
    n, c, h, w = shape
    if context.node.op == "DepthToSpace":
        return [Type(context.dtype(), (n, c // block**2, h * block, w * block))]
    return [Type(context.dtype(), (n, c * block**2, h // block, w // block))]


def same_elements(node: Node, context: LoweringContext) -> Tensor:
    source = operand(node, context, 0)
    shape_operands(node, context, 1)
    return reshape(source, result_shape(node, context))


def broadcast(node: Node, context: LoweringContext) -> Tensor:
    source = operand(node, context, 0)
    shape_operands(node, context, 1)
    return expand(source, result_shape(node, context))


def transpose(node: Node, context: LoweringContext) -> Tensor:
    source = operand(node, context, 0)
    rank = len(source.shape)
    axes = tuple(node.attributes.get("perm") or range(rank - 1, -1, -1))
    return Permute(source.dtype, tuple(source.shape[axis] for axis in axes), source, axes)


def depth_to_space(node: Node, context: LoweringContext) -> Tensor:
    source, block = operand(node, context, 0), integer_attribute(node, "blocksize", 1)
    n, c, h, w = source.shape
    channels = c // (block * block)
    b = dim(block)
    column_row = node.attributes.get("mode", "DCR") == "CRD"
    inner = (n, channels, b, b, h, w) if column_row else (n, b, b, channels, h, w)
    axes = (0, 1, 4, 2, 5, 3) if column_row else (0, 3, 4, 1, 5, 2)
    parts = reshape(source, inner)
    moved = Permute(source.dtype, tuple(inner[axis] for axis in axes), parts, axes)
    return reshape(moved, (n, channels, h * block, w * block))


def space_to_depth(node: Node, context: LoweringContext) -> Tensor:
    source, block = operand(node, context, 0), integer_attribute(node, "blocksize", 1)
    n, c, h, w = source.shape
    b = dim(block)
    inner = (n, c, h // block, b, w // block, b)
    axes = (0, 3, 5, 1, 2, 4)
    moved = Permute(source.dtype, tuple(inner[axis] for axis in axes), reshape(source, inner), axes)
    return reshape(moved, (n, c * block * block, h // block, w // block))


define("Reshape", kind=VIEW, types=reshape_types, lowering=same_elements, arithmetic=none, host=(1,), runtime=PLAIN)
define("Squeeze", kind=VIEW, types=squeeze_types, lowering=same_elements, arithmetic=none, host=(1,), runtime=PLAIN)
define("Unsqueeze", kind=VIEW, types=unsqueeze_types, lowering=same_elements, arithmetic=none, host=(1,), runtime=PLAIN)
define("Flatten", kind=VIEW, types=flatten_types, lowering=same_elements, arithmetic=none, host=(), runtime=PLAIN)
define("Transpose", kind=VIEW, types=transpose_types, lowering=transpose, arithmetic=none, host=(),
       runtime=RuntimeKernel.TRANSPOSE)
define("Expand", kind=VIEW, types=expand_types, lowering=broadcast, arithmetic=none, host=(1,), runtime=PLAIN)
define("DepthToSpace", kind=VIEW, types=depth_space_types, lowering=depth_to_space, arithmetic=none, host=(),
       runtime=PLAIN)
define("SpaceToDepth", kind=VIEW, types=depth_space_types, lowering=space_to_depth, arithmetic=none, host=(),
       runtime=PLAIN)
