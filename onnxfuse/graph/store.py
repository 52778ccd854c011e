"""Larger weights of a model, in one place while copies of the model are made and changed.

Every step from a loaded model to a fused one makes a copy of it.  In copies, large initialisers refer to the tensors of
the model that they were made of, so that a copy takes neither the weights' memory nor their time.  ``whole`` puts them
back; files, sessions and records of what was there get them as they are written.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable
from math import prod
from weakref import WeakValueDictionary

import onnx
from google.protobuf.unknown_fields import UnknownFieldSet

from onnxfuse.graph.fields import has_unknown, without_initializers

LEAST = 1 << 15
"""Elements from which on a tensor lies in a store."""

_PREFIX = f"/{secrets.token_hex(16)}/"
"""What locations of tensors in stores begin with: no file may ask for one, and none can be called so."""

_STORES: WeakValueDictionary[int, WeightStore] = WeakValueDictionary()
_NUMBERS = itertools.count()


class WeightStore:
    """Tensors that references of copies stand for; these can be read as long as the store is there."""

    def __init__(self) -> None:
        self._number = next(_NUMBERS)
        self._tensors: list[onnx.TensorProto] = []
        _STORES[self._number] = self

    def keep(self, tensor: onnx.TensorProto) -> onnx.TensorProto:
        """A reference to a tensor, which is not to be changed any more; the tensor itself where little is gained."""
        if prod(tensor.dims) < LEAST or not tensor.HasField("raw_data") or len(UnknownFieldSet(tensor)):
            return tensor
        reference = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims,
                                     data_location=onnx.TensorProto.EXTERNAL)
        if tensor.HasField("doc_string"):
            reference.doc_string = tensor.doc_string
        reference.metadata_props.extend(tensor.metadata_props)
        reference.external_data.add(key="location", value=f"{_PREFIX}{self._number}/{len(self._tensors)}")
        self._tensors.append(tensor)
        return reference

    def at(self, place: int) -> onnx.TensorProto:
        """The tensor that was kept as the one of this number."""
        return self._tensors[place]


def is_stored(tensor: onnx.TensorProto) -> bool:
    """Whether a tensor's contents lie in a store."""
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return False
    return len(tensor.external_data) == 1 and tensor.external_data[0].value.startswith(_PREFIX)


def resolved(tensor: onnx.TensorProto) -> onnx.TensorProto:
    """A tensor with its contents where they lie in a store, otherwise itself; not to be changed.

    Raises:
        ReferenceError: the store is there no more.
    """
    if not is_stored(tensor):
        return tensor
    number, place = map(int, tensor.external_data[0].value.removeprefix(_PREFIX).split("/"))
    store = _STORES.get(number)
    if store is None:
        raise ReferenceError(f"the contents of tensor {tensor.name!r} outlived the model that they were loaded with")
    kept = store.at(place)
    if _about(kept) == _about(tensor):
        return kept
    changed = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, raw_data=kept.raw_data)
    if tensor.HasField("doc_string"):
        changed.doc_string = tensor.doc_string
    changed.metadata_props.extend(tensor.metadata_props)
    return changed


def _about(tensor: onnx.TensorProto) -> tuple[object, ...]:
    """What a reference may say otherwise than the tensor that it was made of: copies of it are renamed and reshaped."""
    notes = [(entry.key, entry.value) for entry in tensor.metadata_props]
    return tensor.name, tensor.data_type, list(tensor.dims), tensor.HasField("doc_string"), tensor.doc_string, notes


def apart(model: onnx.ModelProto, store: WeightStore) -> onnx.ModelProto:
    """A copy of a model with its larger weights kept in a store; the model itself where a copy would lose something."""
    return model if has_unknown(model) else _with_initializers(model, map(store.keep, model.graph.initializer))


def whole(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a model that holds all weights of its itself; the model where it does already."""
    if not any(map(is_stored, model.graph.initializer)):
        return model
    return _with_initializers(model, map(resolved, model.graph.initializer))


def _with_initializers(model: onnx.ModelProto, tensors: Iterable[onnx.TensorProto]) -> onnx.ModelProto:
    result = without_initializers(model)
    result.graph.initializer.extend(tensors)
    return result
