"""What ONNX Runtime's libraries take for convolutions, dense and in groups, and for products of computed operands, of
16-bit floats and of float32, where nothing was measured of them.

Its kernels for tensor cores multiply tiles of images with channels last.  Around those with windows it lays out image
and result anew, a kernel each.  Those without are products as they lie, unless they leave out pixels, or no vector
divides a plane.  What is predicted is the least: of the 104 with windows and the 119 without that were measured of the
zoo, the former took 0.93 times as long and more, three of four 1.18 (H100; 0.97 and 1.22 on an H200), the latter 0.75
and more, three of four 1.01 (0.75 and 1.10; ``benchmarks/foreseen.py``).

Of convolutions in groups few channels fill a tile, and each element of image and result takes its time, which is little
less for 16 bits than for 32.  With bias and Relu the 44 that were measured took 0.70 times as long as is predicted and
more, three of four 1.08 (H100, ``benchmarks/results`` of 2026-11-28, float32).  Kernels of groups that run side by side
count once in that.

Of an attention with the product of its operands all that is known is what its kernels are.

Products of an attention's heads, each of operands of its own, pass the caches by, and where rows are no whole vectors
(197 keys, 77, 257) all is multiplied element by element: the twenty of the zoo took 0.82 to 1.55 times as long as
is predicted, half of them 1.07 and more (H100; 1.00 to 1.60 and 1.17 on an H200), and up to 4.6 times as long as what
their bytes would.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import fsum, prod

from onnxfuse.graph.model import Node
from onnxfuse.graph.sizes import bytes_of, shapes_of
from onnxfuse.ir.scalars import FLOAT, TYPES
from onnxfuse.operators.classes import (
    channels,
    is_convolution,
    is_in_groups,
    is_narrow,
    is_transposed_convolution,
    keeps_caches,
    multiplied,
    projects,
    recurs,
)
from onnxfuse.planning.costs.cost import CostModel, kernel_time, product_peak, tile_rate, uncached
from onnxfuse.provider.kernels import biased
from onnxfuse.provider.layouts import is_converted

LIBRARY = 0.9
"""Of what tiles of ours are predicted to take for a product alone, what is taken for the library's: three of four
products were measured to take more (H100)."""

TILE = 128
"""Results along either side of a tile of its."""

LEAST_ROWS = 64
"""Results of a channel under which tiles tell nothing: one pixel of each image, mostly."""

VECTOR_BYTES = 16
"""Of results side by side that its kernels read at once: of planes that these do not divide there is no product as they
lie."""

MOSTLY_MORE = 0.18
"""Share of what is predicted of a dense convolution with windows, at the least, that three of four took beyond that."""

LAYING = 0.5
"""Share of the bandwidth at which it lays out images."""

GROUPS_BEGIN, WINDOW_PIXEL, PIXEL = 8e-6, 3.7e-12, 3.0e-12
"""Seconds that its kernels for convolutions in groups take, and for each element of image and result beside what they
multiply: of those with windows, and of others (H100)."""

GROUP_TILE = 32
"""Channels to whose multiples those of a group's results are filled up."""

Shape = tuple[int, ...]
"""Sizes of a tensor's axes."""

UNALIGNED = 0.6
"""Of the float32 cores' peak, what its products reach of rows that are no whole vectors."""


RECURRENT_STEP = 3.4e-6
"""Seconds that a step of a recurrent layer takes at least in each direction, a product and the arithmetic of its gates:
fourteen layers were measured at 3.4 to 7 (H200, ``benchmarks/recurrent.py``)."""

UNEVEN = 2.3
"""The same share that its products of 16-bit floats reach by a matrix, of rows that are no whole vectors: fourteen that
were measured 0.5 to 2.3 (H200, ``benchmarks/products.py --cases uneven``)."""


def is_dense(node: Node) -> bool:
    """Whether a node is a convolution, or a transposed one, of 16-bit floats or float32 whose sums go over all
    channels."""
    image = node.inputs[0] if is_convolution(node) or is_transposed_convolution(node) else None
    return image is not None and node.attributes.get("group", 1) == 1 and (is_narrow(image) or image.dtype == FLOAT)


def is_laid_anew(node: Node) -> bool:
    """Whether the library lays out the image of a convolution, and its result, for a kernel that has channels last: of
    dense ones with windows; those without are products as they lie."""
    weights = node.inputs[1] if is_dense(node) and len(node.inputs) > 1 else None
    return weights is not None and weights.shape is not None and any(size.value != 1 for size in weights.shape[2:])


def has_few_channels(node: Node) -> bool:
    """Whether no vector of an image's channels is to be had: kernels bring such by elements, however they lie."""
    weights = node.inputs[1] if is_dense(node) and len(node.inputs) > 1 else None
    count = None if weights is None else channels(node)
    size = TYPES[FLOAT if weights is None or weights.dtype is None else weights.dtype].size
    return count is not None and count.value is not None and count.value * size < VECTOR_BYTES


def convolution_seconds(node: Node, costs: CostModel) -> float | None:
    """Seconds of one run of a convolution with its bias, dense or in groups, at the least; None where sizes are not
    known, or few, or nothing was measured of tiles on the GPU."""
    values = [value for value in (*node.inputs[:2], node.outputs[0]) if value is not None]
    shapes = shapes_of(values, costs.ledger.sizes)
    if shapes is None or len(shapes) < 3 or not all(map(prod, shapes)):
        return None
    image, weights, result = shapes
    if is_transposed_convolution(node):
        weights = _as_dense(node, weights)
    if prod(result) // weights[0] < LEAST_ROWS:
        return None
    seconds = (_in_groups if is_in_groups(node) else _dense)(node, costs, image, weights, result)
    bias = biased([node])
    return seconds if bias is None or seconds is None else seconds + costs.bias_seconds(bias)


def laying_seconds(nodes: Iterable[Node], costs: CostModel) -> float:
    """Seconds that the runtime takes to lay out images and results of dense convolutions with windows."""
    return _laying(filter(is_laid_anew, nodes), costs)


def converting_seconds(nodes: Iterable[Node], costs: CostModel) -> float:
    """Seconds that the runtime takes at most, with ``prefer_nhwc=1``, to lay out image and result of each of ``nodes``
    that it then runs channels-last, where nothing takes a conversion back."""
    return _laying((node for node in filter(is_converted, nodes) if costs.ledger.node(node).kernels), costs)


def _laying(nodes: Iterable[Node], costs: CostModel) -> float:
    """Seconds that kernels take to lay out the image and the result of each of ``nodes``."""
    values = (value for node in nodes for value in (node.inputs[0], node.outputs[0]) if value is not None)
    sizes = (bytes_of(value, costs.ledger.sizes) for value in values)
    return sum(kernel_time(size, size, 0, costs.profile, efficiency=LAYING) for size in sizes if size is not None)


def _as_dense(node: Node, weights: Shape) -> Shape:
    """The weights of the convolution without strides that computes what a transposed one does: for each element of the
    image as many results as its strides have places, each of every so-manieth weight."""
    strides = node.attributes.get("strides") or [1] * len(weights[2:])
    taps = (-(-size // stride) for size, stride in zip(weights[2:], strides, strict=True))
    return (weights[1] * prod(strides), weights[0], *taps)


def left_seconds(nodes: Iterable[Node], costs: CostModel) -> float:
    """What the runtime mostly takes for those of ``nodes`` that are dense convolutions with windows, beyond what is
    predicted of them at the least: where they are weighed against leaving none to it."""
    left = (node for node in nodes if is_laid_anew(node) and not costs.is_learned(node))
    return MOSTLY_MORE * fsum(costs.group_seconds(frozenset([node])) for node in left)


def _in_groups(node: Node, costs: CostModel, image: Shape, weights: Shape, result: Shape) -> float | None:
    """Seconds of a convolution in groups without its bias."""
    profile = costs.profile
    groups: int = node.attributes["group"]
    rate = tile_rate(profile, rounds=True)  # 16-bit floats gain nothing over float32
    if rate is None:
        return None
    depth, rows, own = prod(weights[1:]), prod(result) // weights[0], weights[0] // groups
    columns = -(-own // GROUP_TILE) * GROUP_TILE
    windows = any(size != 1 for size in weights[2:])
    seconds = GROUPS_BEGIN + (WINDOW_PIXEL if windows else PIXEL) * (prod(image) + prod(result))
    tiles = -(-rows // TILE) * groups * -(-columns // TILE)
    rounds, flops = -(-tiles // profile.multiprocessors), 2 * TILE * min(columns, TILE) * depth
    return seconds + LIBRARY * rounds * flops * profile.multiprocessors / (1e12 * rate)


def _dense(node: Node, costs: CostModel, image: Shape, weights: Shape, result: Shape) -> float | None:
    """The same of a dense one."""
    profile, dtype = costs.profile, None if node.inputs[0] is None else node.inputs[0].dtype
    rate, element = tile_rate(profile, rounds=dtype == FLOAT), TYPES[dtype or FLOAT].size
    if rate is None:
        return None
    depth, columns = prod(weights[1:]), weights[0]
    tiles = -(-(prod(result) // columns) // TILE) * -(-columns // TILE)
    rounds = -(-tiles // profile.multiprocessors)
    seconds = LIBRARY * rounds * 2 * TILE**2 * depth * profile.multiprocessors / (1e12 * rate)
    floor = kernel_time(0, 0, 0, profile)
    moved = [element * prod(image), element * prod(result)]
    if is_laid_anew(node):
        seconds += floor + sum(kernel_time(size, size, 0, profile, efficiency=LAYING) for size in moved)
    else:
        read, written = moved[0] + element * prod(weights), moved[1]
        own = uncached(read + written, profile)
        seconds = max(floor + seconds, kernel_time(read, written, 0, profile, efficiency=own))
        apart = any(stride != 1 for stride in node.attributes.get("strides", ()))
        if apart or prod(result[2:]) * element % VECTOR_BYTES:
            seconds += sum(kernel_time(size, size, 0, profile) for size in moved)
    return seconds


def batched_seconds(node: Node, costs: CostModel) -> float | None:
    """Seconds of one run of matrix products of floats that are computed, each of two matrices of its own; None of
    others, of few rows, and where sizes are not known."""
    operands = [value for value in multiplied(node) if value is not None and not value.is_constant]
    if node.op not in ("MatMul", "FusedMatMul") or len(operands) < 2:
        return None
    if not (all(map(is_narrow, operands)) or all(value.dtype == FLOAT for value in operands)):
        return None
    values = [*operands, *(value for value in node.outputs if value is not None)]
    shapes, profile = shapes_of(values, costs.ledger.sizes), costs.profile
    if shapes is None or any(len(shape) < 3 for shape in shapes) or shapes[2][-2] < LEAST_ROWS:
        return None
    element = TYPES[operands[0].dtype or FLOAT].size
    aligned = all(element * shape[-1] % VECTOR_BYTES == 0 for shape in shapes)
    return _reaching(
        product_peak(operands[0].dtype, profile) if aligned else UNALIGNED * profile.peaks.float32, node, costs)


def uneven_seconds(node: Node, costs: CostModel) -> float | None:
    """Seconds of one run of a product of 16-bit floats by a matrix, at the least, where rows of an operand or of the
    result are no whole vectors; None of others, of few rows, and where sizes are not known."""
    operands = [value for value in multiplied(node) if value is not None]
    if node.op not in ("MatMul", "FusedMatMul", "Gemm") or len(operands) < 2 or not all(map(is_narrow, operands)):
        return None
    shapes = shapes_of([*operands, *(value for value in node.outputs if value is not None)], costs.ledger.sizes)
    if shapes is None or any(len(shape) < 2 for shape in shapes) or len(shapes[1]) > 2:
        return None
    element = TYPES[operands[0].dtype or FLOAT].size
    if prod(shapes[2][:-1]) < LEAST_ROWS or all(element * shape[-1] % VECTOR_BYTES == 0 for shape in shapes):
        return None
    return _reaching(UNEVEN * costs.profile.peaks.float32, node, costs)


def _reaching(peak: float, node: Node, costs: CostModel) -> float:
    """Seconds of a product that reaches so many TFLOP/s, and passes the caches by."""
    counted, profile = costs.ledger.node(node), costs.profile
    reads, writes = sum(counted.reads.values()), sum(counted.writes.values())
    return kernel_time(reads, writes, counted.flops, profile, peak, uncached(reads + writes, profile))


def recurrent_seconds(node: Node, costs: CostModel) -> float | None:
    """Seconds of one run of a recurrent layer, at the least: cuDNN goes through steps and directions one by one.  None
    of others, and where sizes are not known."""
    if not recurs(node) or node.inputs[0] is None or node.inputs[2] is None:
        return None
    shapes = shapes_of([node.inputs[0], node.inputs[2]], costs.ledger.sizes)
    if shapes is None or len(shapes[0]) != 3:
        return None
    (length, batch, inputs), (directions, rows, _) = shapes
    dtype = node.inputs[0].dtype
    before = 2 * length * batch * inputs * directions * rows / (1e12 * product_peak(dtype, costs.profile))
    return length * directions * RECURRENT_STEP + before if batch else None


def projected_seconds(node: Node, costs: CostModel) -> float | None:
    """Seconds of one run of an attention with the product of its operands, at the least: that product, a kernel that
    adds their bias and lays out their heads, and the attention.  None of others, and where sizes are not known."""
    values = [value for value in node.inputs[:2] if value is not None] if projects(node) else []
    shapes, profile = shapes_of(values, costs.ledger.sizes), costs.profile
    if shapes is None or [len(shape) for shape in shapes] != [3, 2] or not all(map(prod, shapes)):
        return None
    counted, dtype = costs.ledger.node(node), values[0].dtype
    (batch, length, depth), (_, columns) = shapes
    element, peak = TYPES[dtype or FLOAT].size, product_peak(dtype, profile)
    made, flops = element * batch * length * columns, 2 * batch * length * depth * columns
    read, written = element * sum(map(prod, shapes)), sum(counted.writes.values())
    product = kernel_time(read, made, flops, profile, peak)
    attended = kernel_time(made, written, counted.flops - flops, profile, peak)
    return product + kernel_time(made, made, 0, profile) + attended


def cached_seconds(node: Node, costs: CostModel) -> float | None:
    """Seconds of one run of an attention over caches, at the least: a kernel that rotates queries and keys and puts
    what is new into the caches, and the attention.  None of others, and where sizes are not known."""
    values = [value for value in node.inputs[:3] if value is not None] if keeps_caches(node) else []
    shapes, profile = shapes_of(values, costs.ledger.sizes), costs.profile
    if not values or shapes is None:
        return None
    counted, dtype = costs.ledger.node(node), values[0].dtype
    new = TYPES[dtype or FLOAT].size * sum(map(prod, shapes))
    reads, writes = sum(counted.reads.values()), sum(counted.writes.values())
    attended = kernel_time(reads, writes, counted.flops, profile, product_peak(dtype, profile))
    return kernel_time(new, new, 0, profile) + attended
