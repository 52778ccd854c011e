"""Write a model part by part, so that beside the model only one weight's bytes are in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, BinaryIO

import onnx

from onnxfuse.graph.fields import copy_fields, has_unknown, without_initializers
from onnxfuse.varint import tag

LIMIT = 2**31 - 1
"""Bytes that a protobuf message may have."""

_GRAPH = onnx.ModelProto.DESCRIPTOR.fields_by_name["graph"].number
_INITIALIZER = onnx.GraphProto.DESCRIPTOR.fields_by_name["initializer"].number

Weight = tuple[int, Callable[[], Iterable[bytes]]]
"""A serialised tensor: its length in bytes, and the means to have it in parts."""


def skeleton(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """A copy of the model without the initialisers of its main graph.

    None for a model with fields that this release of onnx does not know: they have no place among the parts.
    """
    return None if has_unknown(model) else without_initializers(model)


class Layout:
    """The bytes around the weights, and the length of the whole."""

    def __init__(self, shell: onnx.ModelProto, weights: Sequence[Weight]) -> None:
        self.weights = weights
        inner = _split(shell.graph, _INITIALIZER)
        frames = [tag(_INITIALIZER, length) for length, _ in weights]
        graph = sum(map(len, inner)) + sum(map(len, frames)) + sum(length for length, _ in weights)
        outer = onnx.ModelProto()
        copy_fields(shell, outer, "graph")
        before, after = _split(outer, _GRAPH)
        self.frames = frames
        self.head = before + tag(_GRAPH, graph) + inner[0]
        self.tail = inner[1] + after
        self.size = len(before) + len(tag(_GRAPH, graph)) + graph + len(after)

    def write(self, file: BinaryIO) -> None:
        """Write the model, its fields in the order of their numbers."""
        file.write(self.head)
        for frame, (_, content) in zip(self.frames, self.weights, strict=True):
            file.write(frame)
            for part in content():
                file.write(part)
        file.write(self.tail)


def _split(message: Any, number: int) -> tuple[bytes, bytes]:
    """The serialised fields with numbers below and above the given one."""
    halves = []
    for below in (True, False):
        part = type(message)()
        part.CopyFrom(message)
        for descriptor, _ in message.ListFields():
            if (descriptor.number < number) != below or descriptor.number == number:
                part.ClearField(descriptor.name)
        halves.append(bytes(part.SerializePartialToString(deterministic=True)))
    return halves[0], halves[1]


def weight(tensor: onnx.TensorProto) -> Weight:
    """A tensor as it is."""
    return tensor.ByteSize(), lambda: (tensor.SerializeToString(),)


def raw_weight(tensor: onnx.TensorProto, length: int, chunks: Callable[[], Iterable[bytes]]) -> Weight:
    """A tensor with ``length`` bytes of raw data that are read when they are written."""
    number = onnx.TensorProto.DESCRIPTOR.fields_by_name["raw_data"].number
    around = tensor.SerializeToString(deterministic=True)
    frame = tag(number, length)
    return len(around) + len(frame) + length, lambda: chain((around, frame), chunks())
