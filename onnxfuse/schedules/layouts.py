"""Where the elements of a region's outputs lie, seen from one loop over them.

One element is wanted at a time, and the outputs of a region may have it at different places: x and its transpose, say.
Starting from the place in a tensor, every other that has the same elements is reached by walking the region up and
down: through maps of operands of the same shape, through permutations and reshapes.  Each of these steps is a
bijection, so an output that is reached is written whole, once.  A reduction leads on to the one element of a row.  Who
asks for it is led into parts of a tensor too: some elements are not among theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from onnxfuse.graph.dims import Dim, dim, product
from onnxfuse.ir.tensors import Map, Part, Permute, Program, Reduce, Reshape, Scan, Slice, Tensor, operands
from onnxfuse.lowering.index import Coordinates, IndexSpace
from onnxfuse.lowering.pull import Condition


def output_coordinates(program: Program, space: IndexSpace, place: Dim) -> list[Coordinates]:
    """Coordinates of the element at hand in every output.

    Args:
        place: its row-major place in the first output, and in those that share no elements with it.
    """
    first = program.outputs[0]
    found = reached(program, space, {first: space.delinear(place, first.shape)})
    return [found.get(id(output)) or space.delinear(place, output.shape) for output in program.outputs]


def reached(program: Program, space: IndexSpace, start: Mapping[Tensor, Coordinates]) -> dict[int, Coordinates]:
    """Coordinates of the element at hand in every tensor that is reached from those given, by ``id`` of the tensor."""
    return {tensor: place.at for tensor, place in _reached(program, space, start, False).items()}


@dataclass(frozen=True)
class Place:
    """Coordinates of the element at hand, which is one of a tensor's where all conditions hold."""

    at: Coordinates
    conditions: tuple[Condition, ...] = ()


def reached_in_part(program: Program, space: IndexSpace, start: Mapping[Tensor, Coordinates]) -> dict[int, Place]:
    """The same, where tensors may have but a part of the elements."""
    return _reached(program, space, start, True)


def _reached(
    program: Program, space: IndexSpace, start: Mapping[Tensor, Coordinates], in_part: bool
) -> dict[int, Place]:
    users: dict[int, list[Tensor]] = {}
    for tensor in program.tensors:
        for operand in operands(tensor):
            users.setdefault(id(operand), []).append(tensor)
    found = {id(tensor): Place(coordinates) for tensor, coordinates in start.items()}
    waiting = deque(start)
    while waiting:
        tensor = waiting.popleft()
        place = found[id(tensor)]
        steps = [(operand, _down(tensor, operand, place, space)) for operand in operands(tensor)]
        steps += [(user, _up(tensor, user, place, space, in_part)) for user in users.get(id(tensor), ())]
        for neighbour, there in steps:
            if there is not None and id(neighbour) not in found:
                found[id(neighbour)] = there
                waiting.append(neighbour)
    return found


def _down(tensor: Tensor, operand: Tensor, place: Place, space: IndexSpace) -> Place | None:
    """The place in an operand, where it has the elements of the tensor."""
    match tensor:
        case Map() | Scan() if operand.shape == tensor.shape:
            return place
        case Permute():
            moved = dict(zip(tensor.axes, place.at, strict=True))
            return replace(place, at=tuple(moved[axis] for axis in range(len(place.at))))
        case Reshape():
            return _reshaped(tensor, operand, place, space)
    return None


def _up(tensor: Tensor, user: Tensor, place: Place, space: IndexSpace, in_part: bool) -> Place | None:
    """The place in what is computed from a tensor, where it has the tensor's elements."""
    match user:
        case Map() | Scan() if user.shape == tensor.shape:
            return place
        case Permute():
            return replace(place, at=tuple(place.at[axis] for axis in user.axes))
        case Reshape():
            return _reshaped(tensor, user, place, space)
        case Reduce():
            return replace(place, at=tuple(
                dim(0) if axis in user.axes else coordinate for axis, coordinate in enumerate(place.at)))
        case Part() if in_part:
            return replace(place, at=user.around(place.at))
        case Slice() if in_part and all(step == 1 for step in user.steps):
            return _sliced(tensor, user, place, space)
    return None


def _sliced(tensor: Tensor, part: Slice, place: Place, space: IndexSpace) -> Place:
    """The place in a part of a tensor, of which the conditions tell whether it is one of its elements."""
    coordinates, conditions = [], [*place.conditions]
    for at, start, size, whole in zip(place.at, part.starts, part.shape, tensor.shape, strict=True):
        index = at - start
        coordinates.append(index)
        if start != 0 or size != whole:
            below, past = space.may_leave(index, size)
            conditions.append(Condition(index, dim(0) if below else None, size if past else None))
    return Place(tuple(coordinates), tuple(conditions))


def _reshaped(tensor: Tensor, other: Tensor, place: Place, space: IndexSpace) -> Place | None:
    if product(tensor.shape) != product(other.shape):
        return None
    floors = tuple(each.index - each.low for each in place.conditions if each.low is not None)
    return replace(place, at=space.reshaped(place.at, tensor.shape, other.shape, floors))
