"""Where what is placed in a tensor lies, by places that are read from memory."""

from __future__ import annotations

from onnxfuse.ir.scalars import INT64
from onnxfuse.ir.tensors import Placed
from onnxfuse.lowering.index import Coordinates
from onnxfuse.lowering.pull import Puller


def around(tensor: Placed, at: Coordinates, puller: Puller) -> Coordinates:
    """Where in the whole a place of the operand is; what is placed must have room there, which the plan checks."""
    axis = tensor.axis
    for place, (whole, own) in enumerate(zip(tensor.shape, tensor.operand.shape, strict=True)):
        if own != whole:
            puller.relations["<=" if place == axis else "==", own, whole] = None
    starts = tuple(at[place] if size != 1 else at[place] * 0 for place, size in enumerate(tensor.starts.shape))
    start = puller.apply("cast", INT64, puller.element(tensor.starts, starts))
    return (*at[:axis], puller.gather(start, tensor.shape[axis]) + at[axis], *at[axis + 1:])
