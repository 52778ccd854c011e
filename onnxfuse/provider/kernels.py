"""How good ONNX Runtime's own kernels are: the share of the GPU's copy rate that they reach.

Read off one NVIDIA H200 under ONNX Runtime 1.31.1, 2026-11-20: kernel times of twelve exported models against their
bytes (benchmarks/results).  The shares are a property of how the kernels are written (elements a thread, width of
loads) more than of the GPU, so they stand for other GPUs too until something is measured there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import pairwise
from math import prod
from typing import NamedTuple

from onnxfuse.graph.dims import product
from onnxfuse.graph.model import Node, Value
from onnxfuse.graph.sizes import shape_of
from onnxfuse.operators import flops_of, operator_of
from onnxfuse.operators.classes import is_narrow, pools, slides
from onnxfuse.operators.record import RuntimeKernel
from onnxfuse.provider.removed import source

DEFAULT = 0.75
"""Simple binary operators and whatever is not listed."""

NORM = 0.2
"""LayerNormalization and InstanceNormalization alone; joined with the sum before it the runtime has a better one."""

SKIP_NORM = 0.85
SOFTMAX = 0.5
REDUCTION = 0.3
BIAS_GELU = 0.57

NARROW_CURVE = 0.36
"""Sigmoid, tanh and their like on elements of two bytes: four elements a thread, each moved and computed alone."""

BROADCAST = 0.4
"""Binary and ternary operators whose operands differ in shape, a bias along the last axis aside."""

BIAS = 0.6
MOVED = 0.55
"""Transposes of the innermost axis."""

TILE = 32
"""Elements along either side of what Transpose3DKernel moves at once: of shorter axes that much less.  50 of a CaiT's,
of 4 x 38,416, take 1.43 ms where their bytes would take 0.17 (H100)."""

SCATTERED = 0.4
"""Transposes of more than four axes that lie apart, element by element: 25 windows of a TinyViT's take 0.31 ms, of 13
MB the most."""

PADDED = 0.3
"""Elements around a tensor: four of a MaxViT's, 385 MB in all, take 0.45 ms."""

PLANE_SECONDS = 80e-9
"""How long a multiprocessor takes for a plane of BatchNormalization's, however small, in bn_fw_inf_1C11_kernel_NCHW:
59 of a LeViT's, behind linear layers, take 17.0 ms of 28 million planes of one element (H100), twelve of an XCiT's 69
us of 6,144 planes of 14 x 14 each."""

OWN_BIAS = 0.2
"""A bias in a kernel of its own.  cuDNN adds one to what a convolution wrote (op_generic_tensor_kernel): 73 of a
U-Net's, 0.1 to 4 MB each, take 0.28 ms.  Before a product the runtime lays it down row by row (BroadcastBiasKernel),
for cuBLAS to add to: four of 34 MB take 0.14 ms."""

DEPTHWISE, WIDE_DEPTHWISE, DEPTHWISE_PRODUCTS = 0.25, 0.4, 0.125
"""Depthwise convolutions, of elements of two bytes and of four: what moves them, and products as a share of what the
float32 cores could make, whichever takes longer.  cuDNN has conv2d_c1_k1_nchw_shmem_tiling for those of two: 18 of a
ConvNeXt's take 0.89 ms, 16 of an EfficientNet's 0.46.  Of those of four nothing was measured."""

TAPS = 0.0115
"""Elements of windows that pooling looks at, as a share of what the float32 cores could make.  cuDNN has
pooling_fw_4d_kernel: 88 us for 58 million of a ResNet-50's (64 MB), 12 for 10 million of a detector's (2 MB)."""

ADDITIONS = 0.064
"""Additions of a CumSum, as a share of what the float32 cores could make: an element adds up all those before it, and
reads each of them (benchmarks/results, ways)."""

BLOCK_SECONDS = 2.5e-6
"""How long a block of reduce_matrix_columns_kernel holds its place: it loads one element at a time, four in all, and
adds them up across its warps.  The kernel has a block, or several, for each row, whatever these move: 16 of an
EfficientNet's take 278 us, 17 of a LLaMA's 128, 17 of a T5's 71 (benchmarks/results, zoo-quick)."""

_SUMS = frozenset({RuntimeKernel.SUM, RuntimeKernel.MEAN})
"""What it computes, of rows that lie together; cuDNN computes the other reductions."""

_LOADS, _MOST_WARPS, _MOST_BLOCKS, _MOST_ROWS = 4 * 32, 8, 256, 32_768
"""Elements that a warp of it takes at a time; warps of a block, blocks of a row, and rows of the grid at most."""

_WARPS_HELD, _BLOCKS_HELD = 64, 32
"""Warps and blocks that a multiprocessor holds at a time."""

_REDUCTIONS = _SUMS | {RuntimeKernel.REDUCTION}
_CURVES = (RuntimeKernel.CURVE, RuntimeKernel.GELU)

_BEHIND = frozenset({RuntimeKernel.ADDITION, RuntimeKernel.AFFINE})
"""What becomes a bias of the convolution or product that the runtime folds it into."""

_FOLDED = frozenset({RuntimeKernel.BORDER, RuntimeKernel.FACTOR, RuntimeKernel.TRANSPOSE}) | _BEHIND
"""What it folds into one."""

_BIASED = frozenset({RuntimeKernel.CONVOLUTION, RuntimeKernel.GEMM, RuntimeKernel.PRODUCT})


class Biased(NamedTuple):
    """A bias that ONNX Runtime adds in a kernel of its own: to what, and whether that kernel reads it too."""

    result: Value
    reads: bool


def runtime_efficiency(nodes: Collection[Node]) -> float:
    """The share of the copy rate at which ONNX Runtime runs one node, or a group that it fuses itself."""
    kernels = set(map(_kernel, nodes))
    if RuntimeKernel.NORM in kernels:
        return SKIP_NORM if RuntimeKernel.ADDITION in kernels else NORM
    if RuntimeKernel.SOFTMAX in kernels:
        return SOFTMAX
    if kernels & _REDUCTIONS:
        return REDUCTION
    if RuntimeKernel.GELU in kernels and len(nodes) > 1:
        return BIAS_GELU
    if sliding := [node for node in nodes if slides(node)]:
        return DEPTHWISE if is_narrow(sliding[0].outputs[0]) else WIDE_DEPTHWISE
    node = max(nodes, key=lambda node: node.index)
    operands = [source(value) for value in node.inputs if value is not None]
    if _kernel(node) is RuntimeKernel.TRANSPOSE:
        return _moving(node)
    if _kernel(node) is RuntimeKernel.BORDER:
        return PADDED
    if len(nodes) > 1 or len(operands) == 1:
        return NARROW_CURVE if not kernels.isdisjoint(_CURVES) and is_narrow(node.outputs[0]) else DEFAULT
    shapes = {value.shape for value in operands if value.constant is None or value.constant.size > 1}
    if len(shapes) <= 1:
        return DEFAULT
    last = [value.shape[-1] if value.shape else None for value in operands]
    is_bias = any(value.rank == 1 for value in operands) and len(set(last)) == 1
    return BIAS if is_bias else BROADCAST


def biased(nodes: Collection[Node]) -> Biased | None:
    """The bias that takes a kernel of its own, of a convolution or a product that ONNX Runtime runs with other nodes as
    one: its own, or what comes of what is folded into it.  None where there is none, or where more than that is run
    with it, in one call."""
    kernels = {node: _kernel(node) for node in nodes}
    heavy = [node for node, kernel in kernels.items() if kernel in _BIASED]
    if len(heavy) != 1 or heavy[0].outputs[0] is None or any(
            kernel not in _FOLDED for node, kernel in kernels.items() if node is not heavy[0]):
        return None
    kernel = kernels[heavy[0]]
    own = kernel is not RuntimeKernel.PRODUCT and len(heavy[0].inputs) > 2 and heavy[0].inputs[2] is not None
    folded = not _BEHIND.isdisjoint(kernels.values())
    return Biased(heavy[0].outputs[0], kernel is RuntimeKernel.CONVOLUTION) if own or folded else None


def extra_arithmetic(node: Node, sizes: Mapping[str, int]) -> int:
    """Operations of the float32 cores that would take as long as what ONNX Runtime's kernel does beyond moving its
    tensors: for running totals, half the axis for every element; for a depthwise convolution, its products; for
    pooling, the elements of windows."""
    for takes, share in ((slides, DEPTHWISE_PRODUCTS), (pools, TAPS)):
        if takes(node):
            return round((flops_of(node, sizes) or 0) * (1 / share - 1))
    if _kernel(node) is not RuntimeKernel.TOTALS:
        return 0
    data, axis = node.inputs[:2]
    shape = None if data is None else shape_of(data, sizes)
    place = None if axis is None or axis.constant is None else int(axis.constant.reshape(-1)[0])
    if shape is None or place is None or not -len(shape) <= place < len(shape):
        return 0
    return round(prod(shape) * shape[place] / 2 / ADDITIONS)


def held_seconds(node: Node, sizes: Mapping[str, int], multiprocessors: int) -> float:
    """What ONNX Runtime's kernel takes beyond a kernel's least time, however little it moves: for sums over the last
    axes, the blocks that each multiprocessor has one after the other; for batch norms, the planes.  0 for other nodes.
    """
    if _kernel(node) is RuntimeKernel.AFFINE and node.inputs[0] is not None:
        planes = shape_of(node.inputs[0], sizes)
        return 0.0 if planes is None else PLANE_SECONDS * prod(planes[:2]) / multiprocessors
    shape = shape_of(node.inputs[0], sizes) if _kernel(node) in _SUMS and node.inputs[0] else None
    axes = None if shape is None else _reduced(node, len(shape))
    if shape is None or not axes:
        return 0.0
    # Sizes of one are none to it.
    gone = [place in axes for place, size in enumerate(shape) if size != 1]
    if not any(gone) or all(gone) or gone != sorted(gone):
        return 0.0
    length = prod(size for place, size in enumerate(shape) if place in axes)
    rows = prod(shape) // length if length else 0
    warps = min(_MOST_WARPS, max(1, length // _LOADS))
    blocks = min(_MOST_BLOCKS, max(1, length // (_LOADS * warps))) * min(rows, _MOST_ROWS)
    held = multiprocessors * min(_BLOCKS_HELD, _WARPS_HELD // warps)
    return BLOCK_SECONDS * max(1.0, blocks / held)


def divides_apart(node: Node) -> bool:
    """Whether a kernel of its own divides what a node has summed up."""
    return _kernel(node) is RuntimeKernel.MEAN


def _kernel(node: Node) -> RuntimeKernel | None:
    """The kernel that ONNX Runtime has for a node; None where nothing is known of its operator."""
    found = operator_of(node)
    return None if found is None else found.runtime


def _reduced(node: Node, rank: int) -> frozenset[int] | None:
    """The axes that a reduction is over, from the front; None where they are not known."""
    given = node.attributes.get("axes")
    operand = node.inputs[1] if len(node.inputs) > 1 else None
    if given is None and operand is not None:
        given = None if operand.constant is None else operand.constant.reshape(-1).tolist()
        if given is None:
            return None
    if not given:
        return frozenset() if node.attributes.get("noop_with_empty_axes") else frozenset(range(rank))
    return frozenset(axis % rank for axis in given) if rank else None


def overwrites(node: Node) -> bool:
    """Whether ONNX Runtime may write a node's result over its first operand, and then moves its updates alone: where
    it scatters them over what nobody else needs."""
    if _kernel(node) is not RuntimeKernel.SCATTER or None in node.inputs[:3]:
        return False
    data = node.inputs[0]
    return (
        data is not None and data.producer is not None and not data.is_constant and not data.is_output
        and data.consumers == [node] and data not in node.inputs[1:]
    )


def _moving(node: Node) -> float:
    """The share of the copy rate at which a transpose moves elements, axes that stay side by side taken as one."""
    shape = None if node.inputs[0] is None else node.inputs[0].shape
    axes = node.attributes.get("perm") or (None if shape is None else range(len(shape) - 1, -1, -1))
    if shape is None or axes is None or sorted(axes) != list(range(len(shape))):
        return MOVED
    axes = [axis for axis in axes if shape[axis] != 1]
    order = [sorted(axes).index(axis) for axis in axes]
    begins = [place for place, each in enumerate(order) if not place or each != order[place - 1] + 1]
    groups = [axes[begin:end] for begin, end in pairwise([*begins, len(axes)])]
    if len(groups) > 4:
        return SCATTERED
    if not groups or axes[-1] == max(axes):
        return 0.9
    sides = (product(shape[axis] for axis in group).value for group in (groups[-1], max(groups)))
    return min([MOVED, *(max(side, 1) / TILE for side in sides if side is not None)])
