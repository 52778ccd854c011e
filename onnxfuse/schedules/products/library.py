"""Products that a library runs: those whose operands and results lie densely, and of whose results no more is made than
cuBLASLt's epilogues do.

    result = f(A B + bias + D)

The library proposes some algorithms for the sizes of a run, and which of them runs is a choice as a tile is: its
rank.  How long it takes nobody predicts, so that it is taken only where it was measured.  GELU is the library's where
the model has the approximation by tanh too; the other, by the error function, differs from that by up to 5e-4, and by
a tenth of its value where x is -3, and stays with the generated kernels; so does ReLU, of which the library makes 0
where there is no number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onnxfuse.graph.dims import Dim, dim
from onnxfuse.ir.scalars import TYPES
from onnxfuse.lowering.launch import Variant, expression
from onnxfuse.lowering.pull import Apply, Contracted, Load, Scalar
from onnxfuse.lowering.routines import ACTIVATIONS, TF32, LibraryCall
from onnxfuse.schedules.choice import Choice
from onnxfuse.schedules.products.maps import steps_of
from onnxfuse.schedules.products.parts import ProductParts
from onnxfuse.schedules.reductions.online import bare

RANKS = 5
"""Algorithms that are tried: what the library proposes first is seldom far from the quickest."""

WORKSPACE = 32 << 20
"""Bytes that it may take beside: what it takes by itself on Hopper.  A run allocates what its algorithm wants."""

WORDS = "by cuBLASLt, algorithm {library} of those that it proposes"


@dataclass(frozen=True)
class LibraryShape:
    """The algorithm of a rank among those that a library proposes; ``setting``: what choices call it."""

    rank: int
    setting: str = "library"

    @property
    def choice(self) -> Choice:
        """As tuning knows it."""
        return Choice.of("product", **{self.setting: self.rank})


@dataclass(frozen=True)
class _Matrix:
    """An operand in memory: the input, whether it lies transposed, elements from one of a batch to the next."""

    input: int
    transposed: bool
    stride: Dim


@dataclass(frozen=True)
class Result:
    """An output: which product it is of, the inputs that are added, to each row and element by element, and what is
    made of the sum."""

    product: int
    bias: int | None
    added: int | None
    activation: str


@dataclass(frozen=True)
class Library:
    """A region that a library can run, a call for each product."""

    parts: ProductParts
    left: _Matrix
    rights: tuple[_Matrix, ...]
    results: tuple[Result, ...]

    title, leads = "cuBLASLt", True

    @property
    def shapes(self) -> tuple[LibraryShape, ...]:
        """What tuning may choose."""
        return tuple(LibraryShape(rank) for rank in range(RANKS))

    def variant(self, shape: LibraryShape, symbols: Mapping[str, str]) -> Variant:
        """The variant of an algorithm, whose workspace is the plan's first scratch buffer.  An empty sum is none of the
        library's."""
        depth = self.parts.depth
        guards = () if depth.value else (f"1 {expression(depth, symbols)} <=",)
        calls = tuple(self._call(place, shape, symbols) for place in range(len(self.results)))
        return Variant(WORDS.format(library=shape.rank), calls, guards)

    def _call(self, place: int, shape: LibraryShape, symbols: Mapping[str, str]) -> LibraryCall:
        parts, result = self.parts, self.results[place]
        right = self.rights[result.product]
        sizes = (
            parts.rows, parts.columns, parts.depth, parts.batch, self.left.stride, right.stride,
            parts.rows * parts.columns, dim(int(self.left.transposed)), dim(int(right.transposed)),
            dim(ACTIVATIONS.index(result.activation)), dim(shape.rank))
        more = tuple(f"i{place}" for place in (result.bias, result.added) if place is not None)
        routine = f"gemm{'' if result.bias is None else '_bias'}{'' if result.added is None else '_add'}"
        dtype = TF32 if parts.rounds else TYPES[parts.operand].name
        return LibraryCall(
            routine, dtype, (f"i{self.left.input}", f"i{right.input}", *more, f"o{place}", "t0"),
            tuple(expression(size, symbols) for size in sizes))


def library_of(parts: ProductParts) -> Library | None:
    """How a library runs a region; None where it does not, as where an operand is computed, or lies otherwise."""
    if any(parts.kept):
        return None
    left, *rights = (_matrix(parts, scalar, loop) for scalar, loop in (
        (parts.left, "@m"), *((right, "@n") for right in parts.rights)))
    outputs = zip(parts.places, parts.lowered.program.outputs, strict=True)
    if not all(output.dtype == parts.operand and is_dense(parts, place) for place, output in outputs):
        return None
    results = tuple(result_of(parts, before, activation) for activation, before in map(_before, parts.results))
    if left is None or None in rights or None in results:
        return None
    found = tuple(each for each in results if each is not None)
    if sorted(each.product for each in found) != list(range(len(rights))):
        return None
    return Library(parts, left, tuple(each for each in rights if each is not None), found)


def lies(parts: ProductParts, place: Dim, wanted: Mapping[str, Dim]) -> bool:
    """Whether an offset grows by these steps along the loops; what has one place alone needs none."""
    steps = steps_of(parts.puller, place)
    extents = {"@b": parts.batch, "@m": parts.rows, "@n": parts.columns, "@k": parts.depth}
    return steps == {loop: step for loop, step in wanted.items() if extents[loop] != 1}


def is_dense(parts: ProductParts, place: Dim) -> bool:
    """Whether elements lie as those of a batch of results do, one behind the other."""
    return lies(parts, place, {"@b": parts.rows * parts.columns, "@m": parts.columns, "@n": dim(1)})


def _matrix(parts: ProductParts, scalar: Scalar, loop: str) -> _Matrix | None:
    """An operand whose rows, or columns, are those of a loop, ``@m`` or ``@n``."""
    if not isinstance(scalar, Load) or scalar.conditions:
        return None
    steps = steps_of(parts.puller, scalar.offset)
    stride = dim(0) if steps is None else steps.get("@b", dim(0))
    beside = parts.rows if loop == "@m" else parts.columns
    batch = {"@b": stride} if stride != 0 else {}
    # Rows of what is summed over are those of the left operand, and of the right one transposed.
    for transposed, along, wide in ((loop == "@n", "@k", parts.depth), (loop == "@m", loop, beside)):
        across = loop if along == "@k" else "@k"
        if lies(parts, scalar.offset, {along: dim(1), across: wide, **batch}):
            return _Matrix(scalar.input, transposed, stride)
    return None


def result_of(parts: ProductParts, scalar: Scalar, activation: str) -> Result | None:
    """What is made of a product's sum before an activation, where a library does it."""
    found: dict[str, int] = {}
    while isinstance(scalar, Apply) and scalar.function == "add":
        one, other = map(bare, scalar.operands)
        scalar, load = (other, one) if isinstance(one, Load) else (one, other)
        if not isinstance(load, Load) or load.conditions or load.dtype != parts.operand:
            return None
        # Of one row alone both lie alike.
        kind = "bias" if "bias" not in found and lies(parts, load.offset, {"@n": dim(1)}) else "added"
        if kind in found or (kind == "added" and not is_dense(parts, load.offset)):
            return None
        found[kind] = load.input
    return Result(scalar.number, found.get("bias"), found.get("added"), activation) if isinstance(
        scalar, Contracted) else None


def _before(scalar: Scalar) -> tuple[str, Scalar]:
    """An activation, "" for none, and what it is of."""
    scalar = bare(scalar)
    if isinstance(scalar, Apply) and scalar.function == "gelu_tanh":
        return scalar.function, bare(scalar.operands[0])
    return "", scalar
