"""Which tensors of a region are computed of which."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from onnxfuse.ir.tensors import Program, Tensor, operands


def computed_of(tensors: Iterable[Tensor], of: Callable[[Tensor], bool]) -> set[Tensor]:
    """Those that are computed of such, or are such; operands come first."""
    found: set[Tensor] = set()
    for each in tensors:
        if of(each) or any(operand in found for operand in operands(each)):
            found.add(each)
    return found


def above(program: Program, tensor: Tensor) -> list[Tensor]:
    """What is computed from a tensor, and it itself, operands first."""
    found = computed_of(program.tensors, lambda each: each is tensor)
    return [each for each in program.tensors if each in found]
