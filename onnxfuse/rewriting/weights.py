"""Weights that kernels read in the place of the model's own, in a copy of the model, and back.

    y = MatMul(x, w), z = Mul(y, g) ─ with_weights ─▶ the same, and w_folded, which nothing reads ─▶ fused as planned
          ▲                                                                                            │
          └───────── without_weights: what the model's record says was added goes ◀──── unfuse ────────┘

The nodes stay what they are.  The record is a metadata property of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import helper

from onnxfuse.graph.constants import tensor_bytes
from onnxfuse.graph.order import all_nodes
from onnxfuse.graph.store import WeightStore
from onnxfuse.rewriting.form_record import form_record, note_form
from onnxfuse.rewriting.index import ModelIndex, reads_of
from onnxfuse.rewriting.properties import forget_property

VERSION = 1
KEY = "onnxfuse.weights"
"""Name of the model's metadata property."""


@dataclass(frozen=True)
class Folded:
    """A constant that a kernel reads.

    Attributes:
        name: of the initialiser; dtype: its element type.
        what: what is folded into what, in words; node: the first node of the region that reads it.
    """

    name: str
    dtype: int
    what: str
    node: str


@dataclass(frozen=True)
class WeightsRecord:
    """The constants that a model was given."""

    folded: tuple[Folded, ...]


def with_weights(
    model: onnx.ModelProto, folded: Sequence[Folded], arrays: Mapping[str, NDArray[Any]],
    store: WeightStore | None = None,
) -> onnx.ModelProto:
    """A copy of a model with further constants, and a record of them; ``arrays``: their contents, by name; ``store``:
    of the model's larger weights."""
    tensors = [helper.make_tensor(each.name, each.dtype, arrays[each.name].shape, arrays[each.name].tobytes(), raw=True)
               for each in folded]
    return _with(model, folded, tensors if store is None else list(map(store.keep, tensors)))


def with_weights_again(model: onnx.ModelProto, fused: onnx.ModelProto) -> onnx.ModelProto:
    """A model with the further constants that a fused model of it has; the model itself where it has none.

    Raises:
        ModelError: the fused model's record cannot be read.
    """
    record = weights_record(fused)
    if record is None:
        return model
    index = ModelIndex.of(model)
    names = {each.name for each in record.folded if not index.defines(each.name)}
    return _with(model, record.folded, [tensor for tensor in fused.graph.initializer if tensor.name in names])


def _with(
    model: onnx.ModelProto, folded: Sequence[Folded], tensors: Sequence[onnx.TensorProto]
) -> onnx.ModelProto:
    """A copy with further constants beside those that it has, which fused nodes of an optimisation before may read."""
    result, record = onnx.ModelProto(), weights_record(model)
    result.CopyFrom(model)
    result.graph.initializer.extend(tensors)
    _note(result, (*(() if record is None else record.folded), *folded))
    return result


def _note(model: onnx.ModelProto, folded: Sequence[Folded]) -> None:
    every = {each.name: each for each in folded}
    note_form(model, KEY, VERSION, asdict(WeightsRecord(tuple(every.values()))))


def only_weights(model: onnx.ModelProto, names: Collection[str]) -> onnx.ModelProto:
    """A copy of a model that keeps of its further constants those of these names, and those that something reads; the
    model itself where it has no others."""
    record = weights_record(model)
    kept = {*names, *_read(model)}
    if record is None or all(each.name in kept for each in record.folded):
        return model
    result = onnx.ModelProto()
    result.CopyFrom(model)
    _take_out(result, {each.name for each in record.folded} - kept)
    forget_property(result, KEY)
    if left := [each for each in record.folded if each.name in kept]:
        _note(result, left)
    return result


def without_weights(model: onnx.ModelProto) -> None:
    """Take the further constants out of a model without fused nodes; nothing where it has none.

    In a model that was edited since, what something reads now stays.

    Raises:
        ModelError: the model's record cannot be read.
    """
    record = weights_record(model)
    if record is not None:
        forget_property(model, KEY)
        _take_out(model, {each.name for each in record.folded} - _read(model))


def _read(model: onnx.ModelProto) -> set[str]:
    """Names of what nodes read, and of what is given in or out."""
    read = {name for node in all_nodes(iter(model.graph.node)) for name in reads_of(node)}
    return read | {info.name for info in (*model.graph.output, *model.graph.input)}


def _take_out(model: onnx.ModelProto, names: Collection[str]) -> None:
    for place in reversed(range(len(model.graph.initializer))):
        if model.graph.initializer[place].name in names:
            del model.graph.initializer[place]


def bytes_of_weights(model: onnx.ModelProto) -> dict[str, int]:
    """By name, the bytes of the further constants that a model has.

    Raises:
        ModelError: the model's record cannot be read.
    """
    record = weights_record(model)
    names = set() if record is None else {each.name for each in record.folded}
    return {tensor.name: tensor_bytes(tensor) for tensor in model.graph.initializer if tensor.name in names}


def weights_record(model: onnx.ModelProto) -> WeightsRecord | None:
    """The record of a model with further constants, or None.

    Raises:
        ModelError: it is no record that this release can read.
    """
    return form_record(model, WeightsRecord, KEY, VERSION, "Weights were folded")
