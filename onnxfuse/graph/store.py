"""Larger weights of a model, in one place while copies of the model are made and changed.

Every step from a loaded model to a fused one makes a copy of it.  In copies, large initialisers refer to the tensors of
the model that they were made of, or to the bytes of its file, so that a copy takes neither the weights' memory nor
their time.  ``whole`` puts them back; files, sessions and records of what was there get them as they are written.
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from weakref import WeakValueDictionary, finalize

import onnx
from google.protobuf.unknown_fields import UnknownFieldSet

from onnxfuse.errors import ModelError
from onnxfuse.graph.fields import has_unknown, without_initializers

LEAST = 1 << 15
"""Elements from which on a tensor lies in a store."""

_PLAIN = {"name", "data_type", "dims", "doc_string", "metadata_props", "raw_data", "data_location"}

CHUNK = 1 << 20
"""Bytes that are read at a time: of so many the memory is used again, and stays in the processor's cache."""

_PREFIX = f"/{secrets.token_hex(16)}/"
"""What locations of tensors in stores begin with: no file may ask for one, and none can be called so."""

_STORES: WeakValueDictionary[int, WeightStore] = WeakValueDictionary()
_NUMBERS = itertools.count()


class OpenFile:
    """A file that stays open, whatever becomes of its name, until nothing refers to it any more; what is in it is to
    stay as it is."""

    def __init__(self, path: str) -> None:
        """Raises: OSError, ValueError: there is no such file, or it cannot be read."""
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        finalize(self, os.close, self.descriptor)
        self._before = self._now()

    @property
    def size(self) -> int:
        """Bytes in it."""
        return self._before[0]

    @property
    def is_changed(self) -> bool:
        """Whether it was written to since it was opened."""
        return self._now() != self._before

    def _now(self) -> tuple[int, int]:
        about = os.fstat(self.descriptor)
        return about.st_size, about.st_mtime_ns


@dataclass(frozen=True)
class Stretch:
    """Bytes of a model's own file, a tensor's raw data; ``explicit``: whether the tensor says that it has them itself.
    """

    file: OpenFile
    offset: int
    length: int
    explicit: bool = False

    def read(self) -> bytes:
        """All of them.

        Raises:
            ModelError: the file was written to meanwhile, or cannot be read any more.
        """
        return b"".join(self.chunks())

    def chunks(self) -> Iterator[bytes]:
        """The same, at most ``CHUNK`` at a time."""
        at, end = self.offset, self.offset + self.length
        while at < end:
            try:
                part, said = os.pread(self.file.descriptor, min(end - at, CHUNK), at), "it was changed meanwhile"
            except OSError as error:
                part, said = b"", error.strerror or str(error)
            if not part or self.file.is_changed:  # looked at behind each part: what was read before is as it was
                raise ModelError(f"The file's weights cannot be read: {said}.", place=self.file.path,
                                 remedy="Leave the file as it is while it is worked on, and start again.")
            at += len(part)
            yield part


class WeightStore:
    """Tensors, or where in a file their bytes are, that references of copies stand for; these can be read as long as
    the store is there."""

    def __init__(self, behind: WeightStore | None = None) -> None:
        """``behind``: another that stays as long as this one."""
        self.behind = behind
        self._number = next(_NUMBERS)
        self._kept: list[onnx.TensorProto | Stretch] = []
        _STORES[self._number] = self

    def keep(self, tensor: onnx.TensorProto) -> onnx.TensorProto:
        """A reference to a tensor, which is not to be changed any more; the tensor itself where little is gained."""
        if prod(tensor.dims) < LEAST or not tensor.HasField("raw_data") or not is_plain(tensor):
            return tensor
        return self.refer(tensor, tensor)

    def refer(self, tensor: onnx.TensorProto, contents: onnx.TensorProto | Stretch) -> onnx.TensorProto:
        """A reference of a tensor's name, type, sizes and notes to contents that are elsewhere."""
        reference = described(tensor)
        reference.data_location = onnx.TensorProto.EXTERNAL
        reference.external_data.add(key="location", value=f"{_PREFIX}{self._number}/{len(self._kept)}")
        self._kept.append(contents)
        return reference

    def __deepcopy__(self, _: object) -> WeightStore:
        """Itself: references are to it."""
        return self

    def at(self, place: int) -> onnx.TensorProto | Stretch:
        """What was kept as the one of this number."""
        return self._kept[place]


def is_stored(tensor: onnx.TensorProto) -> bool:
    """Whether a tensor's contents lie in a store."""
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return False
    return len(tensor.external_data) == 1 and tensor.external_data[0].value.startswith(_PREFIX)


def _contents(tensor: onnx.TensorProto) -> onnx.TensorProto | Stretch:
    """What a reference stands for; anything else itself.

    Raises:
        ReferenceError: the store is there no more.
    """
    if not is_stored(tensor):
        return tensor
    number, place = map(int, tensor.external_data[0].value.removeprefix(_PREFIX).split("/"))
    store = _STORES.get(number)
    if store is None:
        raise ReferenceError(f"the contents of tensor {tensor.name!r} outlived the model that they were loaded with")
    return store.at(place)


def stretch(tensor: onnx.TensorProto) -> Stretch | None:
    """Where in the model's own file the contents of a reference are; None of anything else."""
    contents = _contents(tensor)
    return contents if isinstance(contents, Stretch) else None


def resolved(tensor: onnx.TensorProto) -> onnx.TensorProto:
    """A tensor with its contents where they lie in a store, otherwise itself; not to be changed.

    Raises:
        ModelError: they cannot be read any more.
        ReferenceError: the store is there no more.
    """
    return _filled(tensor, _contents(tensor))


def kept(tensor: onnx.TensorProto) -> Callable[[], onnx.TensorProto]:
    """What gives a tensor as ``resolved`` does, also when the store is there no more."""
    return partial(_filled, tensor, _contents(tensor))


def _filled(tensor: onnx.TensorProto, contents: onnx.TensorProto | Stretch) -> onnx.TensorProto:
    if isinstance(contents, Stretch):
        result = around(tensor, contents)
        result.raw_data = contents.read()
        return result
    if contents is tensor or _about(contents) == _about(tensor):
        return contents
    return described(tensor, contents.raw_data)


def are_same(one: onnx.TensorProto, other: onnx.TensorProto) -> bool:
    """Whether two tensors have the same raw data; not read where both stand for the same."""
    first, second = _contents(one), _contents(other)
    return first is second or bool(resolved(one).raw_data == resolved(other).raw_data)


def around(tensor: onnx.TensorProto, contents: Stretch) -> onnx.TensorProto:
    """All of a tensor but its contents, which are there."""
    result = described(tensor)
    if contents.explicit:
        result.data_location = onnx.TensorProto.DEFAULT
    return result


def is_plain(tensor: onnx.TensorProto) -> bool:
    """Whether a tensor holds its contents as bytes, if any, and says nothing that a reference would not."""
    said = {field.name for field, _ in tensor.ListFields()}
    return said <= _PLAIN and tensor.data_location == onnx.TensorProto.DEFAULT and not len(UnknownFieldSet(tensor))


def described(tensor: onnx.TensorProto, contents: bytes | None = None) -> onnx.TensorProto:
    """A tensor's name, type, sizes and notes, and these bytes."""
    result = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, raw_data=contents)
    if tensor.HasField("doc_string"):
        result.doc_string = tensor.doc_string
    result.metadata_props.extend(tensor.metadata_props)
    return result


def _about(tensor: onnx.TensorProto) -> tuple[object, ...]:
    """What a reference may say otherwise than the tensor that it was made of: copies of it are renamed and reshaped."""
    notes = [(entry.key, entry.value) for entry in tensor.metadata_props]
    return tensor.name, tensor.data_type, list(tensor.dims), tensor.HasField("doc_string"), tensor.doc_string, notes


def apart(model: onnx.ModelProto, store: WeightStore) -> onnx.ModelProto:
    """A copy of a model with its larger weights kept in a store; the model itself where a copy would lose something."""
    return model if has_unknown(model) else _with_initializers(model, map(store.keep, model.graph.initializer))


def whole(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a model that holds all weights of its itself; the model where it does already.

    Raises:
        ModelError, ReferenceError: as ``resolved``.
    """
    if not any(map(is_stored, model.graph.initializer)):
        return model
    return _with_initializers(model, map(resolved, model.graph.initializer))


def _with_initializers(model: onnx.ModelProto, tensors: Iterable[onnx.TensorProto]) -> onnx.ModelProto:
    if has_unknown(model):
        result = onnx.ModelProto()
        result.CopyFrom(model)
        del result.graph.initializer[:]
    else:
        result = without_initializers(model)
    result.graph.initializer.extend(tensors)
    return result
