"""What a depthwise convolution of images with channels last is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from onnxfuse.graph.dims import Dim, dim
from onnxfuse.ir.scalars import TYPES
from onnxfuse.ir.tensors import Contract, Tensor, Window
from onnxfuse.lowering.index import IndexSpace
from onnxfuse.lowering.lower import Lowered
from onnxfuse.lowering.pull import Contracted, Load, Puller, Scalar
from onnxfuse.refusal import Refusal
from onnxfuse.schedules.kernel import moving_loads, vector_loads, walk
from onnxfuse.schedules.lanes import Lanes
from onnxfuse.schedules.layouts import reached
from onnxfuse.schedules.stencils.parts import ONE, StencilAxis

CHANNELS = "@c"
"""The base over channels."""

SPATIAL = "zyx"
"""Names of axes of space, of which a convolution has the last ones."""

GROUP, FEATURE, LEAD = 1, 2, 3
"""Loops of a convolution's result: which group, which channel that comes of it, and how many loops are before those of
space."""

MOST_TAPS = 128
"""Weights of a channel, at most: sums are unrolled over them."""


@dataclass(frozen=True)
class StencilLastParts:
    """A depthwise convolution of images with channels last.

    Attributes:
        lowered: the region; puller: pulled its elements.
        images, channels: how many; axes: z, y and x.
        image: its element at (``@image``, ``@c``, ``@z``, ``@y``, ``@x``); weight: at ``@c`` and ``@tz``, ``@ty``,
            ``@tx``.
        results: the outputs' elements at (``@image``, ``@c``, ``@oz``, ``@oy``, ``@ox``), over the convolution's sum
            there; places: where these lie.
    """

    lowered: Lowered
    puller: Puller
    images: Dim
    channels: Dim
    axes: tuple[StencilAxis, ...]
    image: Scalar
    weight: Scalar
    results: tuple[Scalar, ...]
    places: tuple[Dim, ...]

    def lanes(self, width: int) -> Lanes:
        """Lanes along channels."""
        return Lanes(self.puller.space, self.puller, CHANNELS, "", width)

    @property
    def size(self) -> int:
        """Bytes of an element of the images as they are read."""
        return max((TYPES[load.dtype].size for load in moving_loads([self.image], self.lanes(1))), default=4)

    @property
    def read(self) -> list[Scalar]:
        """What is read for the sums."""
        return [self.image, *self.puller.gathered.values()]

    def brought(self, lanes: Lanes) -> Load | None:
        """What of the image can wait in registers as it lies in memory, all else being computed of it later; None where
        nothing is read so."""
        loads = vector_loads(moving_loads([self.image], lanes), lanes)
        return next((load for load in loads if not load.conditions and TYPES[load.dtype].compute == "float"), None)

    @property
    def last(self) -> bool:
        """Whether images and results have neighbouring channels side by side."""
        lanes = self.lanes(1)
        loads = moving_loads([self.image], lanes)
        return bool(loads) and all(lanes.stride(place) == 1 for place in (
            *(load.offset for load in loads), *self.places))


def parts_of(lowered: Lowered, contract: Contract) -> StencilLastParts | Refusal | None:
    """The region as a depthwise convolution of images with channels last, or why it is none; None where it is no
    depthwise convolution.

    Raises:
        Unlowerable: something is used at other places than a convolution has it.
    """
    found = depthwise_of(contract)
    if found is None:
        return None
    if not 0 < found.taps <= MOST_TAPS:
        return _refused(
            f"windows of {found.taps} elements over images that lie so; kernels have those up to {MOST_TAPS}")
    space = IndexSpace()
    bases = {loop: _base(space, name, contract.loops[loop]) for loop, name in found.names.items()}
    start = {loop: _base(space, name, size) for loop, (name, size) in found.pixels.items()}
    place = tuple(bases.get(loop, dim(0)) for loop in range(contract.rank))
    puller = Puller(space, sums={contract: place})
    own = puller.rounded(puller.element(found.image, tuple(
        start.get(loop, bases.get(loop, dim(0))) for loop in found.loops)))
    weight = puller.rounded(puller.element(contract.operands[1], tuple(
        bases.get(loop, dim(0)) for loop in contract.axes[1])))
    out, outputs = reached(lowered.program, space, {contract: place}), lowered.program.outputs
    if any(id(output) not in out for output in outputs):
        return _refused("what follows the convolution changes the number of its elements")
    results = tuple(puller.element(output, out[id(output)]) for output in outputs)
    if not any(isinstance(scalar, Contracted) for scalar in walk(results)):
        return _refused("its outputs are not of the convolution")
    parts = StencilLastParts(lowered, puller, contract.shape[0], contract.shape[1], found.axes, own, weight, results,
                             tuple(space.linear(out[id(output)], output.shape) for output in outputs))
    return parts if parts.last else _refused("its images and results lie neither both channels first nor both last")


def _refused(message: str) -> Refusal:
    return Refusal("stencil-structure", message)


def _base(space: IndexSpace, name: str, size: Dim) -> Dim:
    """A new base; its only place where there is one."""
    return dim(0) if size == 1 else space.base(name, size)


@dataclass(frozen=True)
class Depthwise:
    """A contraction that is a depthwise convolution.

    Attributes:
        image: its images without their windows; loops: the loop of the result that each of their axes is along.
        names: of the bases, by loop; pixels: those of images' places, and their extents, by the loop of the result.
        axes: z, y and x.
    """

    image: Tensor
    loops: tuple[int, ...]
    names: Mapping[int, str]
    pixels: Mapping[int, tuple[str, Dim]]
    axes: tuple[StencilAxis, ...]

    @property
    def taps(self) -> int:
        """Weights of a channel."""
        return prod(axis.taps for axis in self.axes)


def depthwise_of(contract: Contract) -> Depthwise | None:
    """What a contraction convolves, whichever way its images lie: where each channel of its result, which has images,
    groups, channels of a group and places as its loops, sums over one of theirs."""
    windowed, along, rank = contract.operands[0], contract.axes[0], contract.rank
    image, sliding = (windowed.operand, windowed.axes) if isinstance(windowed, Window) else (windowed, ())
    if contract.batch != (GROUP,) or not 0 < rank - LEAD <= len(SPATIAL):
        return None
    places = [windowed.place_of(axis) if isinstance(windowed, Window) else axis for axis in range(image.rank)]
    loops = tuple(along[place] for place in places)
    # Beside the loops of the result that one is left that sums over the channels of a group.
    if sorted(loops)[:-1] != [0, GROUP, *range(LEAD, rank)] or {
            contract.shape[FEATURE], contract.loops[max(loops)]} != {dim(1)}:
        return None
    names, pixels = {0: "@image", GROUP: CHANNELS}, {}
    axes = [ONE] * len(SPATIAL)
    for place, loop in enumerate(loops):
        if not LEAD <= loop < rank:
            continue
        name = SPATIAL[loop - rank]
        names[loop], pixels[loop] = f"@o{name}", (f"@{name}", image.shape[place])
        axes[loop - rank] = StencilAxis(image.shape[place], contract.shape[loop])
        if place in sliding:
            assert isinstance(windowed, Window)
            number, tap = sliding.index(place), along[places[place] + 1]
            count = contract.loops[tap].value
            if count is None:
                return None
            names[tap] = f"@t{name}"
            axes[loop - rank] = StencilAxis(image.shape[place], contract.shape[loop], count, windowed.starts[number],
                                            windowed.strides[number], windowed.dilations[number])
    return Depthwise(image, loops, names, pixels, tuple(axes))
