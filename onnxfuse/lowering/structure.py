"""What a lowered region is apart from where it stands: equal regions have equal kernels."""

from __future__ import annotations

from collections.abc import Hashable

from onnxfuse.ir.tensors import Program, Tensor, postorder
from onnxfuse.lowering.binding import Binding


class Structure:
    """A key that two regions share where their programs, and how their sizes are bound, are the same."""

    __slots__ = ("_hash", "parts")

    def __init__(self, program: Program, binding: Binding) -> None:
        self.parts = _parts(program, binding)
        self._hash = hash(self.parts)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Structure) and self.parts == other.parts)

    def __hash__(self) -> int:
        return self._hash


def _parts(program: Program, binding: Binding) -> Hashable:
    number: dict[int, int] = {}
    parts = []
    for tensor in postorder((*program.inputs, *program.outputs)):
        parts.append((type(tensor).__name__, *(_plain(value, number) for value in vars(tensor).values())))
        number[id(tensor)] = len(number)
    written = tuple(number[id(output)] for output in program.outputs)
    names = tuple(sorted((name, str(size)) for name, size in binding.names.items()))
    atoms = tuple(sorted(binding.symbols.items()))
    return (tuple(parts), written, program.operators, atoms, binding.sources, binding.checks, names)


def _plain(value: object, number: dict[int, int]) -> Hashable:
    if isinstance(value, Tensor):
        return number[id(value)]
    if isinstance(value, tuple):
        return tuple(_plain(each, number) for each in value)
    # 1, 1.0 and True are equal, as are the two zeros: their texts are not.
    return repr(value) if isinstance(value, (bool, int, float)) else value
