"""Depthwise convolutions ahead of images that their means scale: the sums of the means come with the convolution.

    image ─ depthwise convolution ─ bias, activation ─┬─ sums of parts ─ mean ─ products ─ gate ─┐
                                                      └─────────────────────────────────── scale ─┴▶

By itself a mean's kernel reads all that the convolution wrote, for a number a channel.  Here the convolution's kernel
(``stencils.last``) tells the sums of each channel in parts of its images, a few thousandths of what it writes, and the
kernel of the products adds these up: there is no kernel for the mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from onnxfuse.graph.dims import dim, product
from onnxfuse.ir.context import Unlowerable
from onnxfuse.ir.scalars import FLOAT, TYPES
from onnxfuse.ir.substitution import substituted
from onnxfuse.ir.tensors import Input, Map, Permute, Program, Reduce, Tensor, postorder
from onnxfuse.lowering.index import IndexSpace
from onnxfuse.lowering.pull import Load, Puller, Scalar
from onnxfuse.schedules.kernel import Launched, contractions, walk
from onnxfuse.schedules.lanes import Lanes
from onnxfuse.schedules.layouts import reached
from onnxfuse.schedules.products.in_two import Divided, divided
from onnxfuse.schedules.reductions.online import bare
from onnxfuse.schedules.schedule import Request
from onnxfuse.schedules.stencils.last import StencilLast
from onnxfuse.schedules.stencils.last_shape import GROUP, depthwise_of


@dataclass(frozen=True)
class Mean:
    """What a row of means is computed of where their sums are known.

    Attributes:
        element: of the row, at (``@m``, ``@k``), over the sum there, an element of the input ``known``; lanes: along
            the row.
    """

    element: Scalar
    known: int
    lanes: Lanes

    def is_sum(self, scalar: Scalar) -> bool:
        """Whether an expression is the sum."""
        return isinstance(scalar, Load) and scalar.input == self.known


def convolution_ahead(request: Request) -> Divided | None:
    """A region divided between a depthwise convolution with what follows it, stored channels last, and what reduces
    that; None where it does not begin with one."""
    products = contractions(request.lowered)
    if not products or depthwise_of(products[0]) is None:
        return None
    (convolution, *_), program = products, request.lowered.program
    if not all(any(isinstance(each, Reduce) for each in postorder((output,))) for output in program.outputs):
        return None
    region = divided(request, convolution)
    space = IndexSpace()
    place = tuple(dim(0) if size == 1 else space.base(f"@{axis}", size) for axis, size in enumerate(convolution.shape))
    at = reached(program, space, {convolution: place}).get(id(region.whole))
    if at is None or at.count(place[GROUP]) != 1 or at[0] != place[0]:
        return None
    channel = at.index(place[GROUP])
    axes = (*(axis for axis in range(len(at)) if axis != channel), channel)
    if channel == len(at) - 1:
        return region
    whole = region.whole
    laid = Permute(whole.dtype, tuple(whole.shape[axis] for axis in axes), whole, axes)
    return replace(region, between=laid)


def mean_of(row: Tensor, image: Input, program: Program) -> Mean | None:
    """A row of means by the sums of an image's channels, which lie last; None where it is of anything else."""
    totals = [each for each in postorder((row,)) if isinstance(each, Reduce)]
    if len(totals) != 1 or totals[0].kind != "sum" or totals[0].dtype != FLOAT:
        return None
    (total,) = totals
    known = Input(FLOAT, total.shape, len(program.inputs))
    space, columns = IndexSpace(), image.shape[-1]
    place = tuple(dim(0) if size == 1 else space.base(f"@{axis}", size) for axis, size in enumerate(image.shape))
    at = reached(program, space, {image: place}).get(id(total.operand))
    kept = [axis for axis in range(total.rank) if axis not in total.axes]
    if at is None or space.linear(
            tuple(at[axis] for axis in kept), tuple(total.shape[axis] for axis in kept)) != (
            place[0] * columns + place[-1]):
        return None
    m, k = (dim(0) if size == 1 else space.base(name, size)
            for name, size in (("@m", image.shape[0]), ("@k", columns)))
    puller = Puller(space)
    try:
        given = bare(puller.element(total.operand, at), casts=True)
        (cut,) = substituted((row,), {total: known})
        element = puller.element(cut, space.delinear(m * columns + k, cut.shape))
    except Unlowerable:
        return None
    if not isinstance(given, Load) or given.input != image.index or given.offset != space.linear(place, image.shape):
        return None
    sums = [each for each in walk([element]) if isinstance(each, Load) and each.input == known.index]
    if [each.offset for each in sums] != [m * columns + k] or puller.gathered:
        return None
    return Mean(element, known.index, Lanes(space, puller, "@k", "", 1))


def paced(region: Divided, sizes: Mapping[str, int]) -> Launched | None:
    """What the convolution's kernel moves and computes; None where sizes are not known."""
    lowered, ahead = region.request.lowered, region.ahead
    elements = lowered.binding.at(product(region.between.shape), sizes)
    moved = [lowered.binding.at(product(each.shape) * TYPES[each.dtype].size, sizes) for each in (
        *(each for each in ahead.tensors if isinstance(each, Input)), region.between)]
    found = depthwise_of(contractions(lowered)[0])
    if elements is None or None in moved or found is None:
        return None
    maps = sum(isinstance(each, Map) and product(each.shape) == product(region.between.shape) for each in ahead.tensors)
    flops = round(elements * (2 * found.taps + maps) / StencilLast.arithmetic)
    return Launched(sum(each or 0 for each in moved), StencilLast.efficiency, flops)
