"""Index arithmetic against brute force: views of views, read where the arithmetic says, give what NumPy gives.

Each example is a random chain of views over one tensor whose elements are numbered.  For every place of the result the
pulled expression is evaluated as the kernel would: which element it loads, and under which conditions.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product as product_of
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto

from onnxfuse.graph.dims import Dim, dim, product, symbol
from onnxfuse.ir.contractions import Slide, window
from onnxfuse.ir.tensors import Concat, Expand, Fill, Input, Map, Permute, Reshape, Slice, Tensor, Window, postorder
from onnxfuse.lowering.index import IndexSpace, strides
from onnxfuse.lowering.pull import Condition, Constant, Load, Puller, Scalar, Select
from onnxfuse.schedules.kernel import is_vector, load_of, walk
from onnxfuse.schedules.lanes import Lanes

Numbers = NDArray[np.int64]
SYMBOLS = ("A", "B", "C")


class Situation(dict[str, int]):
    """Values of sizes and bases; those of digits and derived bases follow."""

    def __init__(self, space: IndexSpace, values: dict[str, int]) -> None:
        super().__init__(values)
        self.space = space

    def __missing__(self, name: str) -> int:
        if name in self.space.derived:
            return self.space.derived[name].evaluate(self)
        digit = self.space.digits[name]
        value = symbol(digit.base).evaluate(self) // digit.step.evaluate(self)
        if digit.top:
            assert value < digit.size.evaluate(self), f"{name} is not the highest digit"
            return value
        return value % digit.size.evaluate(self)


def holds(condition: Condition, at: Situation) -> bool:
    index = condition.index.evaluate(at)
    return (condition.low is None or index >= condition.low.evaluate(at)) and (
        condition.high is None or index < condition.high.evaluate(at)
    )


def read(scalar: Scalar, at: Situation, size: int) -> int:
    """The number of the element that an expression loads; -1 where no load is made, as outside a window's operand."""
    if isinstance(scalar, Constant):
        return -1
    if isinstance(scalar, Select):
        return read(scalar.operands[0 if holds(scalar.condition, at) else 1], at, size)
    assert isinstance(scalar, Load)
    if not all(holds(condition, at) for condition in scalar.conditions):
        return -1
    offset = scalar.offset.evaluate(at)
    assert 0 <= offset < size, "a load out of bounds"
    return offset


@dataclass
class View:
    """A tensor, its contents for the sizes at hand, and those sizes."""

    tensor: Tensor
    contents: Numbers
    sizes: dict[str, int]

    def with_tensor(self, tensor: Tensor, contents: Numbers) -> View:
        expected = tuple(size.evaluate(self.sizes) for size in tensor.shape)
        assert contents.shape == expected
        return View(tensor, contents, self.sizes)


@st.composite
def inputs(draw: st.DrawFn) -> View:
    sizes = {name: draw(st.integers(1, 4), label=name) for name in SYMBOLS}
    shape = tuple(
        symbol(draw(st.sampled_from(SYMBOLS))) * draw(st.sampled_from((1, 1, 2, 4)))
        if draw(st.booleans())
        else dim(draw(st.sampled_from((1, 2, 3, 4, 6, 8))))
        for _ in range(draw(st.integers(1, 4)))
    )
    actual = tuple(size.evaluate(sizes) for size in shape)
    return View(Input(TensorProto.FLOAT, shape, 0), np.arange(prod(actual)).reshape(actual), sizes)


def permuted(view: View, draw: st.DrawFn) -> View:
    axes = tuple(draw(st.permutations(range(view.contents.ndim))))
    shape = tuple(view.tensor.shape[axis] for axis in axes)
    return view.with_tensor(Permute(1, shape, view.tensor, axes), view.contents.transpose(axes))


def merged(view: View, draw: st.DrawFn) -> View:
    if view.contents.ndim < 2:
        return view
    first = draw(st.integers(0, view.contents.ndim - 2))
    last = draw(st.integers(first + 2, view.contents.ndim))
    shape = (*view.tensor.shape[:first], product(view.tensor.shape[first:last]), *view.tensor.shape[last:])
    return reshaped(view, shape)


def split(view: View, draw: st.DrawFn) -> View:
    """One axis becomes two (or a one is added): a factor that provably divides it, inside or outside."""
    axis = draw(st.integers(0, view.contents.ndim - 1))
    size = view.tensor.shape[axis]
    factors = (
        [dim(1)]
        + [dim(n) for n in (2, 3, 4, 8) if size.multiple_of() % n == 0]
        + [symbol(name) for name in SYMBOLS if size.divide(symbol(name)) is not None]
    )
    factor = draw(st.sampled_from(factors))
    rest = size.divide(factor)
    assert rest is not None
    pair = (factor, rest) if draw(st.booleans()) else (rest, factor)
    return reshaped(view, view.tensor.shape[:axis] + pair + view.tensor.shape[axis + 1 :])


def reshaped(view: View, shape: tuple[Dim, ...]) -> View:
    return view.with_tensor(
        Reshape(1, shape, view.tensor), view.contents.reshape([size.evaluate(view.sizes) for size in shape])
    )


def sliced(view: View, draw: st.DrawFn) -> View:
    axis = draw(st.integers(0, view.contents.ndim - 1))
    size, actual = view.tensor.shape[axis], view.contents.shape[axis]
    step = draw(st.sampled_from((1, 1, 2, -1, -2)))
    if size.value is None:
        # What is cut off must be known not to be more than there is.
        first = size.multiple_of() - 1 if draw(st.booleans()) else 0
        start, length = (dim(first), size - first) if step > 0 else (size - 1 - first, size - first)
        step = 1 if step > 0 else -1
    else:
        begin = draw(st.integers(0, actual - 1))
        most = (actual - begin + step - 1) // step if step > 0 else begin // -step + 1
        start, length = dim(begin), dim(draw(st.integers(1, most)))
    begin, count = start.evaluate(view.sizes), length.evaluate(view.sizes)
    indices = begin + step * np.arange(count)
    rank = view.contents.ndim
    tensor = Slice(
        1,
        (*view.tensor.shape[:axis], length, *view.tensor.shape[axis + 1 :]),
        view.tensor,
        tuple(start if place == axis else dim(0) for place in range(rank)),
        tuple(step if place == axis else 1 for place in range(rank)),
    )
    return view.with_tensor(tensor, view.contents.take(indices, axis))


def joined(view: View, draw: st.DrawFn) -> View:
    """The view beside a cut or turned copy of itself."""
    other = sliced(view, draw)
    different = [
        place for place, (a, b) in enumerate(zip(view.tensor.shape, other.tensor.shape, strict=True)) if a != b
    ]
    axis = different[0] if different else draw(st.integers(0, view.contents.ndim - 1))
    parts = (view, other) if draw(st.booleans()) else (other, view)
    length = parts[0].tensor.shape[axis] + parts[1].tensor.shape[axis]
    tensor = Concat(
        1,
        (*view.tensor.shape[:axis], length, *view.tensor.shape[axis + 1 :]),
        tuple(part.tensor for part in parts),
        axis,
    )
    return view.with_tensor(tensor, np.concatenate([part.contents for part in parts], axis))


def expanded(view: View, draw: st.DrawFn) -> View:
    whole = draw(st.sampled_from((dim(2), dim(4), symbol("A"))))
    shape = (whole, *(whole if size == 1 else size for size in view.tensor.shape))
    actual = tuple(size.evaluate(view.sizes) for size in shape)
    return view.with_tensor(Expand(1, shape, view.tensor), np.broadcast_to(view.contents, actual))


def windowed(view: View, draw: st.DrawFn) -> View:
    """A window over one or two axes, which may reach past both ends."""
    axes = draw(st.permutations(range(view.contents.ndim)))[:draw(st.integers(1, 2))]
    slides, contents = {}, view.contents
    for axis in sorted(axes, reverse=True):
        extent, inside = view.tensor.shape[axis], contents.shape[axis]
        before, length, stride, dilation = (draw(st.integers(*limits)) for limits in ((-1, 2), (1, 3), (1, 2), (1, 2)))
        count = extent if draw(st.booleans()) else dim(draw(st.integers(1, 4)))
        slides[axis] = Slide(count, dim(length), dim(-before), stride, dilation)
        index = stride * np.arange(count.evaluate(view.sizes))[:, None] + dilation * np.arange(length) - before
        outside = np.full_like(contents, -1, shape=(*contents.shape[:axis], 1, *contents.shape[axis + 1:]))
        place = np.where((index >= 0) & (index < inside), index, inside)
        contents = np.concatenate([contents, outside], axis).take(place, axis)
        if slides[axis].is_plain(extent):
            contents = contents.squeeze(axis + 1)
    return view.with_tensor(window(view.tensor, slides), contents)


@st.composite
def views(draw: st.DrawFn) -> View:
    view = draw(inputs())
    for _ in range(draw(st.integers(1, 6))):
        step = draw(st.sampled_from((permuted, merged, split, sliced, joined, expanded, windowed)))
        following = step(view, draw)
        if following.contents.size <= 600 and following.contents.ndim <= 6:
            view = following
    return view


@settings(max_examples=400)
@given(views())
def test_views_of_views(view: View) -> None:
    space = IndexSpace()
    place = space.base("@L", product(view.tensor.shape))
    scalar = Puller(space).element(view.tensor, space.delinear(place, view.tensor.shape))
    size = int(view.contents.max()) + 1 if view.contents.size else 0
    whole = max(size, 10**6)
    found = [read(scalar, Situation(space, view.sizes | {"@L": number}), whole) for number in range(view.contents.size)]
    assert found == view.contents.reshape(-1).tolist()


@settings(max_examples=300)
@given(views(), st.sampled_from((2, 4, 8)))
def test_lanes_of_views(view: View, width: int) -> None:
    """What is called a vector is one: neighbours in memory from an aligned place, or one element for all lanes."""
    space = IndexSpace()
    total = product(view.tensor.shape)
    puller = Puller(space)
    scalar = puller.element(view.tensor, space.delinear(space.base("@L", total), view.tensor.shape))
    lanes = Lanes(space, puller, "@L", "", width)
    loads = [load for load in walk([scalar]) if isinstance(load, Load)]
    vectors = [(load, lanes.stride(load.offset)) for load in loads if is_vector(load, lanes)]
    uniform = [c for load in loads for c in load.conditions if lanes.uniform(c)]
    assert not lanes.multiples  # to ask is not to rely on it
    lanes.rely_on_loads(loads)
    guarded = all(size.evaluate(view.sizes) % width == 0 for size in lanes.multiples)
    if view.contents.size % width or not guarded:
        return
    for first in range(0, view.contents.size, width):
        at = [Situation(space, view.sizes | {"@L": first + lane}) for lane in range(width)]
        for condition in uniform:
            assert len({holds(condition, one) for one in at}) == 1
        for load, stride in vectors:
            if all(holds(condition, at[0]) for condition in load.conditions):
                offsets = [load.offset.evaluate(one) for one in at]
                assert stride is not None
                assert offsets == [offsets[0] + lane * (stride.value or 0) for lane in range(width)]
                assert stride == 0 or offsets[0] % width == 0


@settings(max_examples=200)
@given(inputs())
def test_linear_and_delinear_are_inverse(view: View) -> None:
    space = IndexSpace()
    shape = view.tensor.shape
    place = space.base("@L", product(shape))
    coordinates = space.delinear(place, shape)
    assert space.linear(coordinates, shape) == (place if product(shape) != 1 else 0)
    for number in range(view.contents.size):
        at = Situation(space, view.sizes | {"@L": number})
        assert tuple(c.evaluate(at) for c in coordinates) == np.unravel_index(number, view.contents.shape)


@settings(max_examples=200)
@given(inputs(), st.integers(-3, 3), st.sampled_from((2, 3, 4, 8)))
def test_divmod_of_shifted_digits(view: View, shift: int, size: int) -> None:
    """Quotient and remainder of an index that is not negative as a whole, though its parts may be."""
    space = IndexSpace()
    shape = view.tensor.shape
    coordinates = space.delinear(space.base("@L", product(shape)), shape)
    index = dim(shift)
    for number, coordinate in enumerate(coordinates):
        index = index + coordinate * (number + 1)
    quotient, remainder = space.divmod(index, dim(size))
    for number in range(view.contents.size):
        at = Situation(space, view.sizes | {"@L": number})
        value = index.evaluate(at)
        if value >= 0:
            assert (quotient.evaluate(at), remainder.evaluate(at)) == divmod(value, size)


def test_views_that_cost_nothing() -> None:
    """Transposing there and back, with reshapes between, reads the place itself."""
    space = IndexSpace()
    batch = symbol("B")
    x = Input(1, (batch, dim(12), dim(64)), 0)
    heads = Permute(1, (dim(12), batch, dim(64)), x, (1, 0, 2))
    back = Permute(1, (batch, dim(12), dim(64)), heads, (1, 0, 2))
    flat = Reshape(1, (batch, dim(768)), back)
    place = space.base("@L", batch * 768)
    scalar = Puller(space).element(flat, space.delinear(place, flat.shape))
    assert isinstance(scalar, Load) and scalar.offset == place


def test_halves_that_change_places_stay_vectors() -> None:
    """Rotary embedding's rotated halves: each load is a vector whose condition all lanes share."""
    space = IndexSpace()
    shape = (symbol("S"), dim(64))
    x = Input(1, shape, 0)
    halves = [Slice(1, (shape[0], dim(32)), x, (dim(0), dim(start)), (1, 1)) for start in (32, 0)]
    turned = Concat(1, shape, tuple(halves), 1)
    puller = Puller(space)
    scalar = puller.element(turned, space.delinear(space.base("@L", product(shape)), shape))
    lanes = Lanes(space, puller, "@L", "", 8)
    loads = [load for load in walk([scalar]) if isinstance(load, Load)]
    lanes.rely_on_loads(loads)
    assert len(loads) == 2 and all(is_vector(load, lanes) for load in loads) and not lanes.multiples


@pytest.mark.parametrize(("step", "expected"), [(64, (0, 1)), (60, (None, None))])
def test_digits_of_a_sum_are_of_a_vector_where_the_sum_is(step: int, expected: tuple[int | None, ...]) -> None:
    """Heads of which one of two indices says which: the sum begins at whole vectors, or does not."""
    space = IndexSpace()
    one, other, column = (space.base(name, dim(64)) for name in ("@A", "@B", "@L"))
    places = space.divmod(one * step + other * step + column, dim(256))
    assert space.derived
    lanes = Lanes(space, Puller(space), "@L", "", 8)
    assert tuple(None if (stride := lanes.stride(place)) is None else stride.value for place in places) == expected
    assert not lanes.multiples


def test_a_digit_counted_from_behind_is_a_digit() -> None:
    """What turns the places of a row around needs no division to find the row."""
    space = IndexSpace()
    row, column = space.delinear(space.base("@L", symbol("S") * 4), (symbol("S"), dim(4)))
    assert space.divmod(row * 4 + (3 - column), dim(4)) == (row, 3 - column)
    assert not space.derived


def test_a_division_takes_in_no_more_than_it_must() -> None:
    space = IndexSpace()
    row, one, two = space.base("@R", symbol("S")), space.base("@A", dim(3)), space.base("@B", dim(3))
    quotient, remainder = space.divmod(row * 4 + one + two, dim(4))
    assert list(space.derived.values()) == [one + two]
    for numbers in product_of(range(3), range(3), range(3)):
        at = Situation(space, dict(zip(("@R", "@A", "@B"), numbers, strict=True)))
        assert (quotient.evaluate(at), remainder.evaluate(at)) == divmod(4 * numbers[0] + sum(numbers[1:]), 4)


def test_a_place_of_a_spread_axis_is_one_of_the_axis() -> None:
    """Whether or not the size is one: behind it no division is needed."""
    space, size, whole = IndexSpace(), symbol("B") * symbol("S"), symbol("S")
    spread = Expand(1, (dim(4), whole, dim(64)), Reshape(1, (dim(4), size, dim(64)), Input(1, (size * 256,), 0)))
    head, row = space.base("@H", dim(4)), space.base("@M", whole)
    load = Puller(space).element(spread, (head, row, dim(0)))
    assert isinstance(load, Load) and not space.derived and not space.digits
    for numbers in ({"B": 1, "S": 5, "@H": 3, "@M": 4}, {"B": 1, "S": 1, "@H": 2, "@M": 0}):
        row_read = numbers["@M"] if numbers["S"] > 1 else 0
        found = load.offset.evaluate(Situation(space, numbers))
        assert found == (numbers["@H"] * numbers["B"] * numbers["S"] + row_read) * 64


def test_each_tensor_comes_once_after_its_operands() -> None:
    x = Input(1, (dim(4),), 0)
    square = Map(1, x.shape, "mul", (x, x))
    both = Map(1, x.shape, "add", (square, x))
    assert postorder((both, square)) == [x, square, both]


@pytest.mark.parametrize(("shape", "expected"), [((), ()), ((5,), (1,)), ((2, 3, 4), (12, 4, 1))])
def test_strides(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert strides(tuple(map(dim, shape))) == expected


def test_a_size_called_like_a_loop_variable_is_a_size() -> None:
    space = IndexSpace()
    place = space.base("@L", symbol("L") * 4)
    row, column = space.delinear(place, (symbol("L"), dim(4)))
    at = Situation(space, {"L": 3, "@L": 7})
    assert (row.evaluate(at), column.evaluate(at)) == (1, 3)


def test_interleaved_pairs_are_read_side_by_side() -> None:
    """Every other element, stacked with the rest on a new last axis, as interleaved rotary embeddings do."""
    space = IndexSpace()
    size = symbol("S")
    x = Input(1, (size, dim(64)), 0)
    halves = [Slice(1, (size, dim(32)), x, (dim(0), dim(start)), (1, 2)) for start in (1, 0)]
    columns = tuple(Reshape(1, (size, dim(32), dim(1)), half) for half in halves)
    pairs = Reshape(1, (size, dim(64)), Concat(1, (size, dim(32), dim(2)), columns, 2))
    scalar = Puller(space).element(pairs, space.delinear(space.base("@L", size * 64), pairs.shape))
    offsets = {str(load.offset) for load in walk([scalar]) if isinstance(load, Load)}
    assert offsets == {"2*(@L / 2)", "2*(@L / 2) + 1"}


def test_a_tensor_that_is_gone_is_not_taken_for_another() -> None:
    """Tensors that nothing holds but the puller, of which the next would come to stand where the last stood."""
    puller = Puller(IndexSpace())
    found = [puller.element(Fill(TensorProto.FLOAT, (), number), ()) for number in range(20)]
    assert [scalar.number for scalar in found if isinstance(scalar, Constant)] == list(range(20))


@pytest.mark.parametrize("mapped", [False, True])
def test_what_a_window_has_around_its_operand(mapped: bool) -> None:
    """One number that the kernel reads, whatever is inside."""
    image, around = Input(TensorProto.INT8, (dim(5),), 0), Input(TensorProto.INT8, (), 1)
    inside: Tensor = Map(image.dtype, image.shape, "neg", (image,)) if mapped else image
    padded = Window(image.dtype, (dim(5), dim(3)), inside, (0,), (dim(-1),), (1,), (1,), around)
    assert postorder((padded,))[-2:] == [around, padded]
    space = IndexSpace()
    scalar = Puller(space).element(padded, (space.base("@p", dim(5)), space.base("@q", dim(3))))
    assert isinstance(scalar, Select) and scalar.condition.low == 0 and scalar.condition.high == 5
    assert isinstance(scalar.operands[1], Load) and scalar.operands[1].input == 1
    found = load_of(scalar)
    assert found is None if mapped else found == (scalar.operands[0], scalar.operands[1])


def test_what_else_is_chosen_between() -> None:
    """Elements of two inputs, numbers of two kinds, numbers beside one condition of two, and floats."""
    space = IndexSpace()
    place, other_place = space.base("@p", dim(9)), space.base("@q", dim(9))
    here, there = Condition(place, dim(0), None), Condition(other_place, None, dim(5))
    numbers = [Constant(TensorProto.INT8, True, number) for number in (3, 4)]

    def load(dtype: int, index: int, offset: Dim, *conditions: Condition) -> Load:
        return Load(dtype, True, index, offset, conditions)

    def chosen(condition: Condition, *operands: Scalar) -> Select:
        return Select(TensorProto.INT8, True, condition, (operands[0], operands[1]))

    both = load(TensorProto.INT8, 0, place, here, there)
    padded = chosen(there, chosen(here, both, numbers[0]), numbers[0])
    assert load_of(padded) == (both, numbers[0]) and load_of(both) == (both, None)
    others = [
        chosen(here, load(TensorProto.INT8, 0, place, here), load(TensorProto.INT8, 1, place)),
        chosen(here, load(TensorProto.INT8, 0, place, here), load(TensorProto.INT8, 1, dim(0), there)),
        chosen(there, chosen(here, both, numbers[0]), numbers[1]), chosen(here, both, numbers[0]),
        chosen(here, load(TensorProto.FLOAT, 0, place, here), Constant(TensorProto.FLOAT, True, 3.0)), numbers[0]]
    assert not any(map(load_of, others))
