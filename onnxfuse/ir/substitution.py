"""Tensors with others in the place of some that they are computed from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from onnxfuse.ir.tensors import (
    Concat,
    Contract,
    Map,
    Placed,
    Recurrence,
    Take,
    Tensor,
    Update,
    Window,
    operands,
    postorder,
)


def substituted(roots: tuple[Tensor, ...], instead: Mapping[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The same tensors computed from others: each of ``instead``, wherever it is used, is what stands there for it."""
    found = {id(tensor): other for tensor, other in instead.items()}
    for tensor in postorder(roots):
        if id(tensor) not in found:
            below = operands(tensor)
            changed = tuple(found[id(operand)] for operand in below)
            same = all(one is other for one, other in zip(below, changed, strict=True))
            found[id(tensor)] = tensor if same else _of(tensor, changed)
    return tuple(found[id(root)] for root in roots)


def _of(tensor: Tensor, changed: tuple[Tensor, ...]) -> Tensor:
    """A tensor with other operands."""
    if isinstance(tensor, Map | Concat | Contract):
        return replace(tensor, operands=changed)  # type: ignore[arg-type]
    if isinstance(tensor, Take):
        return replace(tensor, operand=changed[0], indices=changed[1])
    if isinstance(tensor, Update):
        return replace(tensor, operand=changed[0], rows=changed[1], starts=changed[2])
    if isinstance(tensor, Placed):
        return replace(tensor, operand=changed[0], starts=changed[1])
    if isinstance(tensor, Window) and tensor.outside is not None:
        return replace(tensor, operand=changed[0], outside=changed[1])
    if isinstance(tensor, Recurrence):
        return replace(tensor, **dict(zip(tensor.reads, changed, strict=True)))  # type: ignore[arg-type]
    (operand,) = changed
    return replace(tensor, operand=operand)  # type: ignore[call-arg]
