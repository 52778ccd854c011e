"""From tensors to scalars: what one element of an output is, as an expression over memory.

``Puller.element(tensor, coordinates)`` follows the DAG backwards from an element that is wanted.  A map pulls its
operands at the same place (at 0 where they are broadcast), a view pulls its operand elsewhere, an input becomes a
load at an offset.  Where a concatenation decides between operands, the loads of each carry the condition under which
they may be made; so do the loads of a window that reaches past its operand.  A pooling becomes an expression over all
elements of its window.  A reduction becomes a ``Reduced``, which the row schedule computes once a row; a scan becomes a
``Scanned``, which is one an element and takes the whole row.  A contraction has no elements by themselves: a schedule
that computes one of its sums at a time has that as a ``Contracted``.

Expressions are shared: pulling the same element twice gives the same object.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product as combined

from onnxfuse.graph.dims import Dim, dim, minimum, product
from onnxfuse.graph.model import Shape
from onnxfuse.ir.context import Unlowerable, like
from onnxfuse.ir.scalars import FUNCTIONS, INT32, INT64, TYPES, Sort, lowest
from onnxfuse.ir.tensors import (
    Concat,
    Contract,
    Expand,
    Fill,
    Input,
    Iota,
    Map,
    Number,
    Part,
    Permute,
    Pool,
    Reduce,
    Reshape,
    Scan,
    Size,
    Slice,
    Take,
    Tensor,
    Update,
    Window,
)
from onnxfuse.lowering.arrangement import Arrangement, arrangement, coordinates
from onnxfuse.lowering.index import Coordinates, Digit, IndexSpace
from onnxfuse.refusal import Refusal

NO_SCHEDULE = Refusal("no-schedule", "no schedule holds a contraction yet")
"""Why a region with a matrix product or a convolution has no kernel, or one with a cache."""


@dataclass(frozen=True)
class Condition:
    """``low <= index < high``; None leaves a side open."""

    index: Dim
    low: Dim | None
    high: Dim | None


@dataclass(frozen=True, eq=False)
class Scalar:
    """An expression; ``exact`` where its value is representable in its declared type."""

    dtype: int
    exact: bool


@dataclass(frozen=True, eq=False)
class Load(Scalar):
    """Element ``offset`` of an input, made only where all conditions hold (else it is zero)."""

    input: int
    offset: Dim
    conditions: tuple[Condition, ...]


@dataclass(frozen=True, eq=False)
class Constant(Scalar):
    """A number."""

    number: Number


@dataclass(frozen=True, eq=False)
class Index(Scalar):
    """An index or a size as a value."""

    index: Dim


@dataclass(frozen=True, eq=False)
class Apply(Scalar):
    """A function of ``scalars.FUNCTIONS``, or "cast", "narrow" or "rounded" (to the declared type)."""

    function: str
    operands: tuple[Scalar, ...]


@dataclass(frozen=True, eq=False)
class Select(Scalar):
    """``operands[0]`` where the condition holds, else ``operands[1]``."""

    condition: Condition
    operands: tuple[Scalar, Scalar]


@dataclass(frozen=True, eq=False)
class Reduced(Scalar):
    """The reduction of ``element`` over the places of a row."""

    kind: str
    element: Scalar


@dataclass(frozen=True, eq=False)
class Scanned(Scalar):
    """The running total of ``element`` at a place of a row, with what lies at that place unless ``exclusive``; from the
    row's end where ``reverse``."""

    kind: str
    element: Scalar
    exclusive: bool
    reverse: bool


@dataclass(frozen=True, eq=False)
class Contracted(Scalar):
    """The sum of a contraction that a schedule has at hand, under the contraction's number in ``Puller.sums``."""

    number: int


@dataclass
class Rows:
    """The row structure that reductions are pulled in: the row at hand, the place in it, and how rows lie.

    ``row`` is None where the first reduction tells it, by the place at which it is wanted.
    """

    row: Dim | None
    place: Dim
    arrangement: Arrangement


def indices(scalar: Scalar) -> tuple[Dim, ...]:
    """The places that an expression is read at, or that it is chosen by, those of its operands left out."""
    if isinstance(scalar, Load):
        return scalar.offset, *(condition.index for condition in scalar.conditions)
    if isinstance(scalar, Index):
        return (scalar.index,)
    return (scalar.condition.index,) if isinstance(scalar, Select) else ()


@dataclass
class Puller:
    """Pulls elements of a program.

    Attributes:
        space: the loop variables.
        rows: the row structure, or None where reductions are not allowed.
        gathered: bases of ``space`` that are indices read from memory, with the expression that reads them.
        broadcasts: pairs of sizes of which the first must be one or the second when the kernel runs.
        relations: (operator, size, size): what else must hold between sizes; the operator is the launch plan's.
        sums: contractions of which a sum is at hand, with the place of that: the first place that is asked for, where
            it is not known before.  None where the schedule has no contractions.
    """

    space: IndexSpace
    rows: Rows | None = None
    gathered: dict[str, Scalar] = field(default_factory=dict)
    broadcasts: dict[tuple[Dim, Dim], None] = field(default_factory=dict)
    relations: dict[tuple[str, Dim, Dim], None] = field(default_factory=dict)
    sums: dict[Contract, Coordinates] | None = None
    _memory: dict[object, Scalar] = field(default_factory=dict)
    _shared: dict[object, Scalar] = field(default_factory=dict)

    def element(self, tensor: Tensor, at: Coordinates, conditions: tuple[Condition, ...] = ()) -> Scalar:
        """The expression of the element of a tensor at a place.

        Raises:
            Unlowerable: a reduction does not fit the row structure, or a contraction is met.
        """
        # Tensors are told apart by identity: as keys they stay, so that no other one comes to have it.
        key = (tensor, at, conditions)
        if key not in self._memory:
            self._memory[key] = self._pull(tensor, at, conditions)
        return self._memory[key]

    def _pull(self, tensor: Tensor, at: Coordinates, conditions: tuple[Condition, ...]) -> Scalar:
        match tensor:
            case Input():
                offset = self.space.linear(at, tensor.shape)
                return self._share(Load(tensor.dtype, True, tensor.index, offset, conditions))
            case Fill():
                return self._share(Constant(tensor.dtype, True, tensor.number))
            case Size():
                return self._share(Index(tensor.dtype, True, tensor.size))
            case Iota():
                return self._share(Index(tensor.dtype, True, at[tensor.axis]))
            case Map():
                return self._map(tensor, at, conditions)
            case Reduce():
                return self._reduce(tensor, at, conditions)
            case Scan():
                return self._scan(tensor, at)
            case Reshape():
                return self._reshape(tensor, at, conditions)
            case Permute():
                places = dict(zip(tensor.axes, at, strict=True))
                return self.element(tensor.operand, tuple(places[axis] for axis in range(len(at))), conditions)
            case Expand():
                return self.element(tensor.operand, self._broadcast(at, tensor.shape, tensor.operand.shape), conditions)
            case Slice():
                return self.element(tensor.operand, tensor.within(at), conditions)
            case Part():
                self._agree(tensor.shape, tensor.operand.shape, tensor.axis)
                return self.element(tensor.operand, tensor.within(at), conditions)
            case Concat():
                return self._concat(tensor, at, conditions)
            case Take():
                return self._take(tensor, at, conditions)
            case Window():
                return self._window(tensor, at, conditions)
            case Pool():
                return self._pool(tensor, at, conditions)
            case Contract():
                return self._contract(tensor, at)
        raise Unlowerable(NO_SCHEDULE) if isinstance(tensor, Update) else AssertionError(tensor)

    def _map(self, tensor: Map, at: Coordinates, conditions: tuple[Condition, ...]) -> Scalar:
        pulled = [
            self.element(operand, self._broadcast(at, tensor.shape, operand.shape), conditions)
            for operand in tensor.operands
        ]
        return self.apply(tensor.function, tensor.dtype, *pulled)

    def _reshape(self, tensor: Reshape, at: Coordinates, conditions: tuple[Condition, ...]) -> Scalar:
        if product(tensor.operand.shape) != product(tensor.shape):
            self.relations["==", product(tensor.operand.shape), product(tensor.shape)] = None
        floors = tuple(c.index - c.low for c in conditions if c.low is not None)
        moved = self.space.reshaped(at, tensor.shape, tensor.operand.shape, floors)
        return self.element(tensor.operand, moved, conditions)

    def _broadcast(self, at: Coordinates, shape: Shape, narrow: Shape) -> Coordinates:
        """Where an operand of shape ``narrow`` is read for a place of ``shape``: trailing axes align, an axis of
        size one reads place 0.  An axis that may or may not be one is decided by its size at run time."""
        moved = []
        inner = len(shape) - len(narrow)
        for coordinate, whole, size in zip(at[inner:], shape[inner:], narrow, strict=True):
            if size == 1:
                moved.append(dim(0))
            elif size == whole:
                moved.append(coordinate)
            else:
                self.broadcasts[size, whole] = None
                moved.append(self.space.limited(coordinate * minimum(size - 1, 1), size))
        return tuple(moved)

    def apply(self, function: str, dtype: int, *operands: Scalar) -> Scalar:
        """A function of expressions, with the rounding that the region's rules ask for."""
        if function == "copy" or (function in ("cast", "narrow") and operands[0].dtype == dtype and operands[0].exact):
            return operands[0]
        if function == "narrow":
            exact = operands[0].exact and TYPES[dtype].size >= TYPES[operands[0].dtype].size
            return self._share(Apply(dtype, exact or not TYPES[dtype].is_narrow, function, operands))
        if function == "cast":
            return self._share(Apply(dtype, True, function, (self.rounded(operands[0]),)))
        sort = FUNCTIONS[function].sort
        if sort is Sort.JUMPING:
            operands = tuple(self.rounded(operand) for operand in operands)
        values = operands[1:] if function == "where" else operands
        exact = not TYPES[dtype].is_narrow or sort is Sort.JUMPING
        exact = exact or (sort is Sort.CHOOSING and all(value.exact for value in values))
        return self._share(Apply(dtype, exact, function, operands))

    def rounded(self, value: Scalar) -> Scalar:
        """The value as its declared type can hold it."""
        return value if value.exact else self._share(Apply(value.dtype, True, "rounded", (value,)))

    def _reduce(self, tensor: Reduce, at: Coordinates, conditions: tuple[Condition, ...]) -> Scalar:
        shape = tensor.operand.shape
        if self.rows is None:
            raise _refused("reduction-structure", "a reduction is used where elements are not arranged in its rows")
        kept = [axis for axis in range(len(shape)) if axis not in tensor.axes]
        row = self.space.linear(tuple(at[axis] for axis in kept), tuple(shape[axis] for axis in kept))
        if self.rows.row is None:
            self.rows = replace(self.rows, row=row)
        if row != self.rows.row or arrangement(shape, tensor.axes) != self.rows.arrangement:
            raise _refused("reduction-structure", "reductions over different rows meet in one region")
        # The loop over a row is the reduction's own: conditions on the place of what is wanted say nothing about it.
        places = coordinates(shape, tensor.axes, row, self.rows.place, self.space)
        element = self.element(tensor.operand, places)
        return self._share(
            Reduced(
                tensor.dtype,
                (tensor.kind in ("max", "min") and element.exact) or not TYPES[tensor.dtype].is_narrow,
                tensor.kind,
                element,
            )
        )

    def _contract(self, tensor: Contract, at: Coordinates) -> Scalar:
        if self.sums is None:
            raise Unlowerable(NO_SCHEDULE)
        if self.sums.setdefault(tensor, at) != at:
            message = "a product's sums are used at other places than where they are taken"
            raise _refused("contraction-structure", message)
        for one, other in tensor.relations:
            self.relations["==", one, other] = None
        return self._share(Contracted(tensor.dtype, True, list(self.sums).index(tensor)))

    def _scan(self, tensor: Scan, at: Coordinates) -> Scalar:
        if self.rows is None or self.rows.row is None:
            raise _refused("scan-structure", "running totals are used where elements are not arranged in their rows")
        places = coordinates(tensor.shape, tensor.axes, self.rows.row, self.rows.place, self.space)
        here = all(size == 1 or one == other for size, one, other in zip(tensor.shape, at, places, strict=True))
        if not here or arrangement(tensor.shape, tensor.axes) != self.rows.arrangement:
            raise _refused("scan-structure", "running totals are used at another place than where they are taken")
        element = self.element(tensor.operand, places)
        exact = not TYPES[tensor.dtype].is_narrow
        return self._share(Scanned(tensor.dtype, exact, tensor.kind, element, tensor.exclusive, tensor.reverse))

    def _agree(self, whole: Shape, part: Shape, along: int) -> None:
        """Note that a part of a tensor ``along`` an axis has the tensor's sizes along all others."""
        for axis, (size, own) in enumerate(zip(whole, part, strict=True)):
            if axis != along and own != size:
                self.relations["==", own, size] = None

    def _concat(self, tensor: Concat, at: Coordinates, conditions: tuple[Condition, ...]) -> Scalar:
        for operand in tensor.operands:
            self._agree(tensor.shape, operand.shape, tensor.axis)
        start, branches = dim(0), []
        for operand in tensor.operands:
            end = start + operand.shape[tensor.axis]
            branches.append((operand, start, end))
            start = end
        coordinate = at[tensor.axis]
        for operand, start, end in branches:
            if (coordinate - start).non_negative() and (end - 1 - coordinate).non_negative():
                return self.element(operand, (*at[:tensor.axis], coordinate - start, *at[tensor.axis + 1:]), conditions)
        result: Scalar | None = None
        for place, (operand, start, end) in reversed(list(enumerate(branches))):
            last = place == len(branches) - 1
            inside = Condition(coordinate, None if place == 0 else start, None if last else end)
            moved = (*at[:tensor.axis], coordinate - start, *at[tensor.axis + 1:])
            value = self.element(operand, moved, (*conditions, inside))
            if result is None:
                result = value
            else:
                below = Condition(coordinate, None, end)
                exact = value.exact and result.exact
                result = self._share(Select(tensor.dtype, exact, below, (value, result)))
        assert result is not None
        return result

    def _take(self, tensor: Take, at: Coordinates, conditions: tuple[Condition, ...]) -> Scalar:
        for axis, (size, whole) in enumerate(zip(tensor.shape, tensor.operand.shape, strict=True)):
            if axis != tensor.axis and not (whole - size).non_negative():
                self.relations["<=", size, whole] = None
        index = self.element(tensor.indices, at, conditions)
        size = tensor.operand.shape[tensor.axis]
        known = affine(index)
        if known is not None and not any(self.space.may_leave(known, size)):
            return self.element(tensor.operand, (*at[:tensor.axis], known, *at[tensor.axis + 1:]), conditions)
        end = self._share(Index(INT64, True, size))
        zero = self._share(Constant(INT64, True, 0))
        wide = self.apply("cast", INT64, index)
        wrapped = self.apply("where", INT64, self.apply("lt", 9, wide, zero), self.apply("add", INT64, wide, end), wide)
        place = self.gather(wrapped, size)
        inside = Condition(place, dim(0), size)
        moved = (*at[:tensor.axis], place, *at[tensor.axis + 1:])
        return self.element(tensor.operand, moved, (*conditions, inside))

    def gather(self, index: Scalar, size: Dim) -> Dim:
        """An index that is read from memory, as a loop variable under a size."""
        name = next((name for name, scalar in self.gathered.items() if scalar is index), None)
        if name is None:
            name = f"@g{len(self.gathered)}"
            self.gathered[name] = index
            self.space.base(name, size)
        return dim(0) if size == 1 else self.space.digit(name, dim(1), size)

    def _window(self, tensor: Window, at: Coordinates, conditions: tuple[Condition, ...]) -> Scalar:
        moved: list[Dim] = []
        inside: list[Condition] = []
        slides = dict(zip(tensor.axes, zip(tensor.starts, tensor.strides, tensor.dilations, strict=True), strict=True))
        for axis, size in enumerate(tensor.operand.shape):
            place = tensor.place_of(axis)
            index = at[place]
            if axis in slides:
                start, stride, dilation = slides[axis]
                index = start + index * stride + at[place + 1] * dilation
                inside += self._inside(index, size)
            moved.append(index)
        value = self.element(tensor.operand, tuple(moved), (*conditions, *inside))
        if tensor.outside is None and isinstance(value, Load):
            return value  # which is zero where it is not made
        other = self._share(Constant(tensor.dtype, True, like(0, tensor).number)) if tensor.outside is None else (
            self.element(tensor.outside, ()))
        for condition in inside:
            value = self._share(Select(tensor.dtype, value.exact and other.exact, condition, (value, other)))
        return value

    def _inside(self, index: Dim, size: Dim) -> list[Condition]:
        """The condition under which an index is of an axis, where it may be past either end."""
        below, past = self.space.may_leave(index, size)
        return [Condition(index, dim(0) if below else None, size if past else None)] if below or past else []

    def _pool(self, tensor: Pool, at: Coordinates, conditions: tuple[Condition, ...]) -> Scalar:
        """All elements of a window side by side, and what they amount to by pairs, so that few wait for others."""
        neutral = self._share(Constant(tensor.dtype, True, lowest(tensor.dtype) if tensor.kind == "max" else like(
            0, tensor).number))
        function, found = {"max": "max", "sum": "add"}[tensor.kind], []
        for window in combined(*map(range, tensor.sizes)):
            moved = list(at)
            inside: list[Condition] = []
            for axis, tap, start, stride, dilation in zip(
                    tensor.axes, window, tensor.starts, tensor.strides, tensor.dilations, strict=True):
                moved[axis] = start + at[axis] * stride + tap * dilation
                inside += self._inside(moved[axis], tensor.operand.shape[axis])
            value = self.element(tensor.operand, tuple(moved), (*conditions, *inside))
            # A sum takes a load as it is: it is zero where it is not made.
            for condition in () if tensor.kind == "sum" and isinstance(value, Load) else inside:
                value = self._share(Select(tensor.dtype, value.exact, condition, (value, neutral)))
            found.append(value)
        while len(found) > 1:
            pairs = [self.apply(function, tensor.dtype, *found[place:place + 2]) for place in range(
                0, len(found) - 1, 2)]
            found = [*pairs, *found[2 * len(pairs):]]
        return found[0]

    def digits(self) -> list[Digit]:
        """The digits that something lies at, is read at or is chosen by, those among them that others are made of."""
        names: dict[str, None] = {}
        places = [*self.space.places, *(index for scalar in self._shared.values() for index in indices(scalar))]
        waiting = [name for place in places for name in place.symbols]
        while waiting:
            name = waiting.pop()
            if name not in names:
                names[name] = None
                waiting += self.space.derived[name].symbols if name in self.space.derived else ()
                waiting += [self.space.digits[name].base] if name in self.space.digits else ()
        return [self.space.digits[name] for name in names if name in self.space.digits]

    def _share(self, scalar: Scalar) -> Scalar:
        fields = (_key(name, content) for name, content in vars(scalar).items())
        key = (type(scalar), *fields)
        return self._shared.setdefault(key, scalar)


def _key(name: str, content: object) -> object:
    """What of a field tells expressions apart."""
    if name == "operands":
        return tuple(map(id, content))  # type: ignore[call-overload]
    if name == "element":
        return id(content)
    # True == 1 == 1.0 as a key, but not as a number in a text.
    return (type(content), repr(content)) if name == "number" else content


def children(scalar: Scalar) -> tuple[Scalar, ...]:
    """The expressions that an expression is made of."""
    match scalar:
        case Apply() | Select():
            return scalar.operands
        case Reduced() | Scanned():
            return (scalar.element,)
    return ()


def affine(scalar: Scalar) -> Dim | None:
    """An integer expression as places and sizes; None where it is more than sums of these."""
    if scalar.dtype not in (INT32, INT64):
        return None
    if isinstance(scalar, Index):
        return scalar.index
    if isinstance(scalar, Constant):
        return dim(int(scalar.number))
    if not isinstance(scalar, Apply) or scalar.function not in ("cast", "add", "sub", "mul", "neg"):
        return None
    found = [each for operand in scalar.operands if (each := affine(operand)) is not None]
    if len(found) < len(scalar.operands):
        return None
    match scalar.function:
        case "cast":
            return found[0]
        case "add":
            return found[0] + found[1]
        case "sub":
            return found[0] - found[1]
        case "neg":
            return -found[0]
    return found[0] * found[1] if any(each.value is not None for each in found) else None


def _refused(code: str, message: str, remedy: str = "") -> Unlowerable:
    return Unlowerable(Refusal(code, message, remedy=remedy))
