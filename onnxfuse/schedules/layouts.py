"""Where the elements of a region's outputs lie, seen from one loop over them.

One element is wanted at a time, and the outputs of a region may have it at different places: x and its transpose, say.
Starting from the place in a tensor, every other that has the same elements is reached by walking the region up and
down: through maps of operands of the same shape, through permutations and reshapes.  Each of these steps is a
bijection, so an output that is reached is written whole, once.  A reduction leads on to the one element of a row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from onnxfuse.graph.dims import Dim, dim, product
from onnxfuse.ir.tensors import Map, Permute, Program, Reduce, Reshape, Scan, Tensor, operands
from onnxfuse.lowering.index import Coordinates, IndexSpace


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
    users: dict[int, list[Tensor]] = {}
    for tensor in program.tensors:
        for operand in operands(tensor):
            users.setdefault(id(operand), []).append(tensor)
    found = {id(tensor): coordinates for tensor, coordinates in start.items()}
    waiting = deque(start)
    while waiting:
        tensor = waiting.popleft()
        at = found[id(tensor)]
        steps = [(operand, _down(tensor, operand, at, space)) for operand in operands(tensor)]
        steps += [(user, _up(tensor, user, at, space)) for user in users.get(id(tensor), ())]
        for neighbour, coordinates in steps:
            if coordinates is not None and id(neighbour) not in found:
                found[id(neighbour)] = coordinates
                waiting.append(neighbour)
    return found


def _down(tensor: Tensor, operand: Tensor, at: Coordinates, space: IndexSpace) -> Coordinates | None:
    """Coordinates in an operand, where it has the elements of the tensor."""
    match tensor:
        case Map() | Scan() if operand.shape == tensor.shape:
            return at
        case Permute():
            moved = dict(zip(tensor.axes, at, strict=True))
            return tuple(moved[axis] for axis in range(len(at)))
        case Reshape():
            return _reshaped(tensor, operand, at, space)
    return None


def _up(tensor: Tensor, user: Tensor, at: Coordinates, space: IndexSpace) -> Coordinates | None:
    """Coordinates in what is computed from a tensor, where it has the tensor's elements."""
    match user:
        case Map() | Scan() if user.shape == tensor.shape:
            return at
        case Permute():
            return tuple(at[axis] for axis in user.axes)
        case Reshape():
            return _reshaped(tensor, user, at, space)
        case Reduce():
            return tuple(dim(0) if axis in user.axes else coordinate for axis, coordinate in enumerate(at))
    return None


def _reshaped(tensor: Tensor, other: Tensor, at: Coordinates, space: IndexSpace) -> Coordinates | None:
    if product(tensor.shape) != product(other.shape):
        return None
    return space.delinear(space.linear(at, tensor.shape), other.shape)
