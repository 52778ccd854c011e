"""What a depthwise convolution is made of: each channel's image, its weights, and what follows.

    q  elements of the images, all planes of them      k  weights, channel by channel      L  results

A *plane* is one channel of one image.  The first of three spatial axes, or the first two, have one place where the
convolution has fewer.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.graph.dims import Dim, dim, product
from onnxfuse.ir.scalars import FLOAT, TYPES
from onnxfuse.ir.tensors import Contract, Tensor, Window
from onnxfuse.lowering.index import IndexSpace
from onnxfuse.lowering.lower import Lowered
from onnxfuse.lowering.pull import Contracted, Puller, Scalar
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.kernel import walk

OTHER = "no-stencil"
"""Code of the refusal of a contraction that is no depthwise convolution."""

SPATIAL, ZERO = 3, dim(0)

MOST_TAPS = 4096
"""Weights of a channel, at most: they lie in shared memory."""


@dataclass(frozen=True)
class StencilAxis:
    """A spatial axis: ``extent`` elements of an image, ``count`` places of a window of ``taps`` elements, the first of
    which begins at ``start``."""

    extent: Dim
    count: Dim
    taps: int = 1
    start: Dim = ZERO
    stride: int = 1
    dilation: int = 1

    @property
    def reach(self) -> int:
        """From the first to the last element of a window."""
        return (self.taps - 1) * self.dilation + 1

    def span(self, places: int) -> int:
        """Elements under so many neighbouring places."""
        return (places - 1) * self.stride + self.reach


ONE = StencilAxis(dim(1), dim(1))


@dataclass(frozen=True)
class StencilParts:
    """A depthwise convolution.

    Attributes:
        lowered: the region; puller: pulled its elements.
        planes: of the images; features: planes of the result that each of them gives; channels: of the result.
        axes: z, y and x.
        image, weight: their elements, at q and k, as the products take them.
        results: the outputs' elements at L, over the convolution's sum there.
    """

    lowered: Lowered
    puller: Puller
    planes: Dim
    features: int
    channels: Dim
    axes: tuple[StencilAxis, ...]
    image: Scalar
    weight: Scalar
    results: tuple[Scalar, ...]

    @property
    def taps(self) -> int:
        """Weights of a channel."""
        z, y, x = (axis.taps for axis in self.axes)
        return z * y * x

    @property
    def loads(self) -> list[Scalar]:
        """What is read to fill a tile."""
        return [self.image, *self.puller.gathered.values()]


@dataclass(frozen=True)
class _Convolution:
    """A contraction that is a depthwise convolution: its images without their windows, and the axes of these."""

    image: Tensor
    planes: Dim
    features: Dim
    channels: Dim
    axes: tuple[StencilAxis, ...]


def _refused(message: str) -> Refusal:
    return Refusal("stencil-structure", message)


def _other(message: str) -> Refusal:
    return Refusal(OTHER, message)


def convolution_of(contract: Contract) -> _Convolution | Refusal:
    """What a contraction convolves, where each channel of its result sums over one of the images'."""
    windowed, weight = contract.operands
    image = windowed.operand if isinstance(windowed, Window) else windowed
    sliding = windowed.axes if isinstance(windowed, Window) else ()
    grouped = bool(contract.batch)
    lead, rank = 2 + grouped, contract.rank
    # Images have batch, group, channel and places; weights group, feature, channel and taps; the result batch, group,
    # feature and places.
    left, inner = [*range(1 + grouped), rank], rank + 1
    for axis in range(lead, rank):
        left.append(axis)
        if axis in sliding:
            left.append(inner)
            inner += 1
    right = [*range(1, lead), *range(rank, inner)]
    if not 0 < rank - lead <= SPATIAL or contract.axes != (tuple(left), tuple(right)) or contract.summed[0] != 1:
        return _other("its product is no convolution of each channel by itself")
    axes = [StencilAxis(image.shape[axis], contract.shape[axis]) for axis in range(lead, rank)]
    for place, axis in enumerate(sliding):
        assert isinstance(windowed, Window)
        taps = contract.summed[1 + place].value
        if taps is None:
            return _refused("the size of the window is known only when it runs")
        axes[axis - lead] = StencilAxis(image.shape[axis], contract.shape[axis], taps, windowed.starts[place],
                                        windowed.strides[place], windowed.dilations[place])
    axes = [ONE] * (SPATIAL - len(axes)) + axes
    features = contract.shape[lead - 1]
    return _Convolution(image, product(image.shape[:lead - 1]), features, product(weight.shape[:lead - 1]), tuple(axes))


def parts_of(lowered: Lowered, contract: Contract) -> StencilParts | Refusal:
    """The region as a depthwise convolution with what surrounds it.

    Raises:
        Unlowerable: something is used at other places than a convolution has it.
    """
    found = convolution_of(contract)
    if isinstance(found, Refusal):
        return found
    types = {operand.dtype for operand in contract.operands}
    if contract.dtype != FLOAT:
        named = " and ".join(sorted(TYPES[dtype].name for dtype in types))
        return _refused(f"a convolution of {named}; its kernels sum up in float32")
    features, taps = found.features.value, product(contract.summed).value
    if features is None or not features:
        return _refused("how many channels each one gives is known only when it runs")
    if taps is None or not 0 < taps <= MOST_TAPS:
        return _refused(f"windows of {taps} elements; its kernels have those up to {MOST_TAPS}")
    total = product(contract.shape)
    if any(product(output.shape) != total for output in lowered.program.outputs):
        return _refused("what follows the convolution changes the number of its elements")
    space = IndexSpace()
    puller = Puller(space, sums={})
    place = space.base("@L", total)
    assert puller.sums is not None
    puller.sums[contract] = space.delinear(place, contract.shape)
    results = tuple(puller.element(output, space.delinear(place, output.shape)) for output in lowered.program.outputs)
    if not any(isinstance(scalar, Contracted) for scalar in walk(results)):
        return _other("its outputs are not of the convolution")
    return StencilParts(
        lowered, puller, found.planes, features, found.channels, found.axes,
        _operand(puller, found.image, "@q"), _operand(puller, contract.operands[1], "@k"), results)


def _operand(puller: Puller, tensor: Tensor, name: str) -> Scalar:
    """An element of an operand as the product takes it, at a base over all of them."""
    base = puller.space.base(name, product(tensor.shape))
    return puller.rounded(puller.element(tensor, puller.space.delinear(base, tensor.shape)))
