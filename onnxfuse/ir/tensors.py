"""The region IR: a small DAG of tensor operations.

A region of the graph becomes tensors over its inputs.  Elementwise work is ``Map``, a sum or maximum over axes is
``Reduce``, running totals along an axis are ``Scan``, and everything that only moves elements is a view with an index
map: reading an element of a view means reading an element of its operand somewhere else, which costs nothing until a
schedule decides where.  What a matrix product, an attention's scores or a convolution sums up is a ``Contract``, a
convolution's over a ``Window``; the maximum, or the sum, of each window by itself is a ``Pool``; what a recurrent layer
gives is a ``Recurrence``.  A schedule turns the DAG into loops and scalars; the IR itself says nothing about threads.

Shapes are sizes over the graph's symbols (``graph.dims``); a ``Map`` broadcasts as NumPy does.  Ranks and axes that do
not fit raise a ValueError: a model may say that they do.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod

from onnxfuse.graph.dims import Dim, dim
from onnxfuse.graph.model import Shape
from onnxfuse.ir.scalars import TYPES

Number = int | float | bool


@dataclass(frozen=True, eq=False)
class Tensor:
    """A value of the region: element type (``onnx.TensorProto.DataType``) and sizes."""

    dtype: int
    shape: Shape

    def _require(self, *conditions: bool) -> None:
        if not all(conditions):
            raise ValueError(f"the operands' ranks or axes do not fit a {type(self).__name__} of rank {self.rank}")

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def has(self, *axes: int) -> bool:
        """Whether all of these are its axes."""
        return all(0 <= axis < self.rank for axis in axes)


@dataclass(frozen=True, eq=False)
class Input(Tensor):
    """Tensor input ``index`` of the fused node, contiguous in row-major order."""

    index: int


@dataclass(frozen=True, eq=False)
class Fill(Tensor):
    """One number everywhere."""

    number: Number


@dataclass(frozen=True, eq=False)
class Size(Tensor):
    """A size, the same everywhere: what a Shape node's elements are when they are computed with."""

    size: Dim


@dataclass(frozen=True, eq=False)
class Iota(Tensor):
    """The coordinate along ``axis``, as an integer."""

    axis: int

    def __post_init__(self) -> None:
        self._require(self.has(self.axis))


@dataclass(frozen=True, eq=False)
class Map(Tensor):
    """``function`` (a name of ``scalars.FUNCTIONS``) of each element of the operands, broadcast together."""

    function: str
    operands: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        self._require(*(operand.rank <= self.rank for operand in self.operands))


@dataclass(frozen=True, eq=False)
class Reduce(Tensor):
    """``kind`` (a name of ``scalars.REDUCTIONS``) over ``axes`` of the operand; the reduced axes stay with size one."""

    kind: str
    operand: Tensor
    axes: tuple[int, ...]

    def __post_init__(self) -> None:
        self._require(self.rank == self.operand.rank, self.has(*self.axes))


@dataclass(frozen=True, eq=False)
class Scan(Tensor):
    """Running totals of ``kind`` (a name of ``scalars.REDUCTIONS``) along ``axis``: each element is what comes of those
    up to it, itself included unless ``exclusive``, counted from the end where ``reverse``."""

    kind: str
    operand: Tensor
    axis: int
    exclusive: bool = False
    reverse: bool = False

    def __post_init__(self) -> None:
        self._require(self.shape == self.operand.shape, self.has(self.axis))

    @property
    def axes(self) -> tuple[int, ...]:
        """The axis, as a reduction has them."""
        return (self.axis,)


@dataclass(frozen=True, eq=False)
class Reshape(Tensor):
    """The same elements in the same row-major order under other sizes."""

    operand: Tensor


@dataclass(frozen=True, eq=False)
class Permute(Tensor):
    """Axis ``i`` of the result is axis ``axes[i]`` of the operand."""

    operand: Tensor
    axes: tuple[int, ...]

    def __post_init__(self) -> None:
        self._require(sorted(self.axes) == list(range(self.rank)), self.rank == self.operand.rank)


@dataclass(frozen=True, eq=False)
class Expand(Tensor):
    """The operand broadcast to the shape."""

    operand: Tensor

    def __post_init__(self) -> None:
        self._require(self.operand.rank <= self.rank)


@dataclass(frozen=True, eq=False)
class Slice(Tensor):
    """Coordinate c of each axis reads the operand at ``starts + c * steps``."""

    operand: Tensor
    starts: tuple[Dim, ...]
    steps: tuple[int, ...]

    def __post_init__(self) -> None:
        self._require(self.rank == self.operand.rank == len(self.starts) == len(self.steps))

    def within(self, at: tuple[Dim, ...]) -> tuple[Dim, ...]:
        """Where in the operand a place of the result is."""
        return tuple(start + each * step for start, each, step in zip(self.starts, at, self.steps, strict=True))


@dataclass(frozen=True, eq=False)
class Concat(Tensor):
    """The operands one after the other along ``axis``."""

    operands: tuple[Tensor, ...]
    axis: int

    def __post_init__(self) -> None:
        self._require(self.has(self.axis), *(operand.rank == self.rank for operand in self.operands))


@dataclass(frozen=True, eq=False)
class Part(Tensor):
    """The operand as a part of a tensor, along ``axis`` from ``start`` on; the rest is somebody else's to write, and
    nobody reads it."""

    operand: Tensor
    axis: int
    start: Dim

    def __post_init__(self) -> None:
        self._require(self.has(self.axis), self.operand.rank == self.rank)

    def within(self, at: tuple[Dim, ...]) -> tuple[Dim, ...]:
        """Where in the operand a place of the whole is."""
        return tuple(each - self.start if axis == self.axis else each for axis, each in enumerate(at))

    def around(self, at: tuple[Dim, ...]) -> tuple[Dim, ...]:
        """Where in the whole a place of the operand is."""
        return tuple(each + self.start if axis == self.axis else each for axis, each in enumerate(at))


@dataclass(frozen=True, eq=False)
class Update(Tensor):
    """The operand with ``rows`` in the place of some of its own along ``axis``: those from ``starts`` on, integers that
    leave no row outside, of size one along that axis and all behind it, and of the result's along those before or one;
    no row ends past ``limit``.  A schedule that holds it writes what is new behind what stays."""

    operand: Tensor
    rows: Tensor
    starts: Tensor
    axis: int
    limit: Dim

    def __post_init__(self) -> None:
        self._require(self.has(self.axis), self.rank == self.operand.rank == self.rows.rank == self.starts.rank)
        _agree(self, *zip(self.shape, self.operand.shape, strict=True),
               *((size, own) for axis, (size, own) in enumerate(zip(self.shape, self.rows.shape, strict=True))
                 if axis != self.axis))


@dataclass(frozen=True, eq=False)
class Placed(Tensor):
    """The operand as a part of a tensor, as a ``Part`` is, from places on that are read: ``starts`` as those of an
    ``Update``."""

    operand: Tensor
    starts: Tensor
    axis: int

    def __post_init__(self) -> None:
        self._require(self.has(self.axis), self.rank == self.operand.rank == self.starts.rank)


@dataclass(frozen=True, eq=False)
class Take(Tensor):
    """Along ``axis`` the coordinate is ``indices`` at this place (negative ones count from the end), the other
    axes read the operand at the same place.  ``indices`` has the shape of the result."""

    operand: Tensor
    indices: Tensor
    axis: int

    def __post_init__(self) -> None:
        self._require(self.has(self.axis), self.rank == self.operand.rank == self.indices.rank)


@dataclass(frozen=True, eq=False)
class Window(Tensor):
    """A window that slides over ``axes`` of the operand, as a view ("im2col") that nobody need write out.

    Each of these axes becomes two, the place of the window and the place in it: (p, q) reads the operand at
    ``starts + p * strides + q * dilations``.  What lies before or behind the operand is zero, or ``outside``, one
    number of its type.
    """

    operand: Tensor
    axes: tuple[int, ...]
    starts: tuple[Dim, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    outside: Tensor | None = None

    def __post_init__(self) -> None:
        count = len(self.axes)
        self._require(self.outside is None or (self.outside.rank, self.outside.dtype) == (0, self.dtype))
        self._require(
            self.rank == self.operand.rank + count, list(self.axes) == sorted(set(self.axes)),
            all(0 <= axis < self.operand.rank for axis in self.axes),
            count == len(self.starts) == len(self.strides) == len(self.dilations),
        )
        if any(step < 1 for step in (*self.strides, *self.dilations)):
            raise ValueError("a Window whose strides or dilations are less than one")
        kept = [axis for axis in range(self.operand.rank) if axis not in self.axes]
        _agree(self, *((self.shape[self.place_of(axis)], self.operand.shape[axis]) for axis in kept))

    def place_of(self, axis: int) -> int:
        """The axis that an axis of the operand became, the first of two where the window slides over it."""
        return axis + sum(other < axis for other in self.axes)


@dataclass(frozen=True, eq=False)
class Pool(Tensor):
    """``kind`` ("max" or "sum") of each window that slides over ``axes`` of the operand.

    Along these axes place p takes in ``starts + p * strides + q * dilations`` for each q below ``sizes``; what lies
    before or behind the operand does not count: a window that lies there altogether gives -infinity, the lowest integer
    or 0.
    """

    kind: str
    operand: Tensor
    axes: tuple[int, ...]
    sizes: tuple[int, ...]
    starts: tuple[Dim, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]

    def __post_init__(self) -> None:
        self._require(
            self.rank == self.operand.rank, self.has(*self.axes), list(self.axes) == sorted(set(self.axes)),
            len(self.axes) == len(self.sizes) == len(self.starts) == len(self.strides) == len(self.dilations),
        )
        if any(step < 1 for step in (*self.sizes, *self.strides, *self.dilations)):
            raise ValueError("a Pool whose windows, strides or dilations are less than one")
        _agree(self, *((self.shape[axis], self.operand.shape[axis]) for axis in range(self.rank)
                       if axis not in self.axes))

    @property
    def taps(self) -> int:
        """Elements of a window."""
        return prod(self.sizes)

    @property
    def overlap(self) -> int:
        """Windows that an element is in, at most."""
        return prod(-(-size * gcd(stride, dilation) // stride) for size, stride, dilation in zip(
            self.sizes, self.strides, self.dilations, strict=True))


@dataclass(frozen=True, eq=False)
class Contract(Tensor):
    """Sums of products of two operands: a matrix product, a batch of them, a convolution over a ``Window``.

    Its *loops* are the axes of the result, then those that are summed over, which have the sizes ``summed``.  ``axes``
    says which loop each axis of either operand is; along a loop that it has no axis for an operand stays the same.  So
    a transposed operand, heads in another order and a batch that one operand lacks are index maps.  A loop of the
    result is of the *batch* where both operands have it, of the *rows* where only the left one does, of the *columns*
    where only the right one does; both have every loop that is summed over.

    Operands are taken as their declared types hold them: what a region computes in float32 and declares float16 is
    rounded first.  Products and sums have the type of the contraction, which is float32 for 16-bit floats and int32 for
    8-bit integers; nothing of it is rounded to less.  In which order sums are taken is left open.

    Operands of float32 may be rounded to TF32, as tensor cores read them, unless it is ``exact``.
    """

    operands: tuple[Tensor, Tensor]
    axes: tuple[tuple[int, ...], tuple[int, ...]]
    summed: Shape
    exact: bool = False

    def __post_init__(self) -> None:
        left, right = map(set, self.axes)
        inner = set(range(self.rank, self.rank + len(self.summed)))
        self._require(
            left | right == set(range(self.rank)) | inner, inner <= left & right,
            *(len(set(axes)) == len(axes) == operand.rank
              for operand, axes in zip(self.operands, self.axes, strict=True)),
        )
        _agree(self, *((self.loops[loop], size) for operand, axes in zip(self.operands, self.axes, strict=True)
                       for size, loop in zip(operand.shape, axes, strict=True)))
        if len({TYPES[tensor.dtype].is_floating for tensor in (self, *self.operands)}) > 1:
            raise ValueError("a Contract of floats and integers")

    @property
    def loops(self) -> Shape:
        """Sizes of all loops."""
        return self.shape + self.summed

    @property
    def batch(self) -> tuple[int, ...]:
        """Axes of the result that both operands have."""
        return tuple(axis for axis in range(self.rank) if all(axis in axes for axes in self.axes))

    @property
    def rows(self) -> tuple[int, ...]:
        """Axes of the result that only the left operand has."""
        return tuple(axis for axis in range(self.rank) if axis not in self.axes[1])

    @property
    def columns(self) -> tuple[int, ...]:
        """Axes of the result that only the right operand has."""
        return tuple(axis for axis in range(self.rank) if axis not in self.axes[0])

    @property
    def relations(self) -> tuple[tuple[Dim, Dim], ...]:
        """Pairs of sizes that are written differently and must be the same when a kernel runs."""
        pairs = ((size, self.loops[loop]) for operand, axes in zip(self.operands, self.axes, strict=True)
                 for size, loop in zip(operand.shape, axes, strict=True))
        return tuple(dict.fromkeys(pair for pair in pairs if pair[0] != pair[1]))


@dataclass(frozen=True, eq=False)
class Recurrence(Tensor):
    """What a recurrent layer gives: ``result`` is its state after each step ("steps": axes step, direction, sequence,
    unit), after the last ("state": direction, sequence, unit), or an LSTM's cell then ("cell").

    Gates stand as the standard has them (LSTM: input, output, forget, cell; GRU: update, reset, new), a GRU's reset
    behind the product of its state.  States are rounded to the layer's type after each step.

    Attributes:
        kind: "lstm" or "gru".
        given: what inputs add to the gates, without a bias: axes step, sequence, direction, gate and unit.
        weights: of states (direction, gate and unit, unit); bias: of inputs, then of states; None where there is none.
        state, cell: before the first step, zero where None.
        backwards: for each direction whether it begins with the last step.
    """

    kind: str
    given: Tensor
    weights: Tensor
    bias: Tensor | None
    state: Tensor | None
    cell: Tensor | None
    backwards: tuple[bool, ...]
    result: str

    def __post_init__(self) -> None:
        directions, rows, units = self.weights.shape
        self._require(self.given.rank == 4, self.rank == 4 if self.result == "steps" else self.rank == 3)
        _agree(self, (directions, dim(len(self.backwards))), (rows, units * self.gates), (self.given.shape[3], rows),
               (self.given.shape[2], directions), (self.shape[-1], units))

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of what it is computed from, where that is there."""
        names = ("given", "weights", "bias", "state", "cell")
        return tuple(name for name in names if getattr(self, name) is not None)

    @property
    def gates(self) -> int:
        """Of a unit."""
        return 3 if self.kind == "gru" else 4

    @property
    def units(self) -> Dim:
        """How many there are in each direction."""
        return self.weights.shape[2]


def _agree(tensor: Tensor, *pairs: tuple[Dim, Dim]) -> None:
    """Raise a ValueError where two sizes of an axis are known to differ."""
    for one, other in pairs:
        if (one - other).value not in (None, 0):
            raise ValueError(f"the sizes {one} and {other} of an axis of a {type(tensor).__name__} differ")


@dataclass(frozen=True)
class Program:
    """A region as tensors.

    Attributes:
        inputs: tensor inputs in the order of the kernel's arguments.
        outputs: what is written, in the order of the fused node's outputs.
        operators: types of the operators it came from, for the kernel's comment, and for what is known of such.
    """

    inputs: tuple[Input, ...]
    outputs: tuple[Tensor, ...]
    operators: tuple[str, ...]

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that outputs are computed from and they themselves, operands first."""
        return tuple(postorder(self.outputs))


def operands(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors that a tensor is computed from."""
    match tensor:
        case Map() | Concat() | Contract():
            return tensor.operands
        case Take():
            return (tensor.operand, tensor.indices)
        case Update():
            return (tensor.operand, tensor.rows, tensor.starts)
        case Placed():
            return (tensor.operand, tensor.starts)
        case Recurrence():
            return tuple(getattr(tensor, name) for name in tensor.reads)
        case Window() if tensor.outside is not None:
            return (tensor.operand, tensor.outside)
        case Reduce() | Scan() | Reshape() | Permute() | Expand() | Slice() | Part() | Window() | Pool():
            return (tensor.operand,)
    return ()


def postorder(roots: tuple[Tensor, ...], without: Tensor | None = None) -> list[Tensor]:
    """Every tensor of the DAG once, operands before what they are used for; ``without`` one, and without what only that
    is computed from."""
    seen: set[int] = set() if without is None else {id(without)}
    order: list[Tensor] = []
    stack: list[tuple[Tensor, bool]] = [(root, False) for root in reversed(roots)]
    while stack:
        tensor, ready = stack.pop()
        if ready:
            order.append(tensor)
        elif id(tensor) not in seen:
            seen.add(id(tensor))
            stack.append((tensor, True))
            stack += [(operand, False) for operand in reversed(operands(tensor)) if id(operand) not in seen]
    return order


def scalar(number: Number, dtype: int) -> Fill:
    """A rank-0 tensor of one number."""
    return Fill(dtype, (), number)


def reduced_shape(shape: Shape, axes: tuple[int, ...]) -> Shape:
    """``shape`` with the sizes of ``axes`` set to one."""
    return tuple(dim(1) if axis in axes else size for axis, size in enumerate(shape))
