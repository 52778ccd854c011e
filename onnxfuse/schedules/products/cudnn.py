"""Convolutions that cuDNN runs by its graph interface: those of images that lie densely with their channels last, by
weights that lie as these do, of whose results no more is made than its engines do.

    result = f(x * w + bias + D)

As with matrix products (``library``) the library proposes plans for the sizes of a run, of which the rank of
one is a choice that tuning measures, and nothing is taken unmeasured.  It comes behind all others: a plan takes some
tenths of a second to make, and 2 of 19 were quicker than kernels of ours.  ReLU is asked for so that what is no number
stays none; GELU is the library's where the model has the approximation by tanh too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnxfuse.graph.dims import Dim, dim
from onnxfuse.ir.scalars import TYPES
from onnxfuse.ir.tensors import Contract
from onnxfuse.lowering.launch import Variant, expression
from onnxfuse.lowering.pull import Apply, Load, Scalar
from onnxfuse.lowering.routines import AXES, CONVOLUTION_ACTIVATIONS, TF32, LibraryCall
from onnxfuse.schedules.products.library import LibraryShape, Result, is_dense, lies, result_of
from onnxfuse.schedules.products.maps import steps_of
from onnxfuse.schedules.products.parts import ProductParts
from onnxfuse.schedules.products.windows import SPATIAL, WindowAxis, Windows, windows_of
from onnxfuse.schedules.reductions.online import bare

RANKS = 3
"""Plans that are tried: each is made, some by compiling kernels, before it can be timed."""

WORDS = "by cuDNN, plan {cudnn} of those that it proposes"

NONE = WindowAxis(dim(1), dim(1))
"""An axis that an image does not have."""


@dataclass(frozen=True)
class Convolution:
    """A convolution that a library can run.

    Attributes:
        windows: what it sees of its images; image, weights: the inputs.
        result: what is made of its sums.
    """

    parts: ProductParts
    windows: Windows
    image: int
    weights: int
    result: Result

    title, leads = "cuDNN", False

    @property
    def shapes(self) -> tuple[LibraryShape, ...]:
        """What tuning may choose."""
        return tuple(LibraryShape(rank, "cudnn") for rank in range(RANKS))

    def variant(self, shape: LibraryShape, symbols: Mapping[str, str]) -> Variant:
        """The variant of a plan, whose workspace is the launch plan's first scratch buffer."""
        parts, result = self.parts, self.result
        axes = dict(zip(SPATIAL, self.windows.axes, strict=False))
        sizes = [
            self.windows.images, dim(self.windows.channels), parts.columns,
            *(size for name in AXES for size in _sizes(axes.get(name, NONE))),
            dim(CONVOLUTION_ACTIVATIONS.index(result.activation)), dim(shape.rank)]
        more = tuple(f"i{place}" for place in (result.bias, result.added) if place is not None)
        routine = f"conv{'' if result.bias is None else '_bias'}{'' if result.added is None else '_add'}"
        call = LibraryCall(
            routine, TF32 if parts.rounds else TYPES[parts.operand].name,
            (f"i{self.image}", f"i{self.weights}", *more, "o0", "t0"),
            tuple(expression(size, symbols) for size in sizes))
        return Variant(WORDS.format(cudnn=shape.rank), (call,))


def convolution_of(products: Sequence[Contract], parts: ProductParts) -> Convolution | None:
    """How cuDNN runs a region; None where it does not, as where channels are not last, or something is computed of the
    image first."""
    windows = None if len(products) != 1 or parts.of_matrices else windows_of(products[0], parts)
    if windows is None or any(parts.kept) or len(parts.results) != 1 or parts.exact:
        return None
    if windows.order != (*(axis for axis in AXES if axis in windows.order), "c"):  # weights lie otherwise
        return None
    image, weights = windows.image, parts.rights[0]
    if not isinstance(image, Load) or not isinstance(weights, Load) or image.conditions or weights.conditions:
        return None
    if not _is_image(parts, windows, image) or not lies(parts, weights.offset, {"@k": dim(1), "@n": parts.depth}):
        return None
    (output,), (place,), (scalar,) = parts.lowered.program.outputs, parts.places, parts.results
    activation, before = _before(scalar)
    result = result_of(parts, before, activation)
    if output.dtype != parts.operand or not is_dense(parts, place) or result is None:
        return None
    return Convolution(parts, windows, image.input, weights.input, result)


def _is_image(parts: ProductParts, windows: Windows, image: Load) -> bool:
    """Whether images lie densely, channels last, and windows begin where the library can have them begin."""
    if not windows.channels or any((axis.start.value or 0) > 0 or axis.start.value is None for axis in windows.axes):
        return False
    steps, step = steps_of(parts.puller, image.offset), dim(windows.channels)
    wanted = {"@c": dim(1)}
    extents = {"@c": dim(windows.channels)}
    for name, axis in zip(SPATIAL, windows.axes, strict=False):
        wanted[f"@{name}"], extents[f"@{name}"] = step, axis.extent
        step = step * axis.extent
    wanted["@image"], extents["@image"] = step, windows.images
    return steps == {loop: size for loop, size in wanted.items() if extents[loop] != 1}


def _sizes(axis: WindowAxis) -> tuple[Dim, ...]:
    """An axis's sizes as the routine has them."""
    return axis.extent, axis.count, dim(axis.taps), dim(axis.stride), dim(axis.dilation), dim(0) - axis.start


def _before(scalar: Scalar) -> tuple[str, Scalar]:
    """An activation, "" for none, and what it is of."""
    scalar = bare(scalar)
    if isinstance(scalar, Apply) and scalar.function in ("relu", "gelu_tanh"):
        return scalar.function, bare(scalar.operands[0])
    if isinstance(scalar, Apply) and scalar.function == "mul":
        for one, other in (scalar.operands, scalar.operands[::-1]):
            gate = bare(other)
            if isinstance(gate, Apply) and gate.function == "sigmoid" and bare(gate.operands[0]) == bare(one):
                return "silu", bare(one)
    return "", scalar
