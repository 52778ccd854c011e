"""Read a model's file without the contents of its large initialisers, which stay in the file until they are wanted."""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterator
from math import prod
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from onnxfuse.graph.constants import element_bits, tensor_bytes
from onnxfuse.graph.fields import has_unknown
from onnxfuse.graph.store import LEAST, OpenFile, Stretch, WeightStore, is_plain
from onnxfuse.varint import Buffer, delimited, tag

LEAST_BYTES = 1 << 24
"""Files of fewer bytes than this are read whole."""

MOST_LEFT = 1 << 28
"""And those of which more is left without their large initialisers: what is left is in memory twice for a while."""

_GRAPH = onnx.ModelProto.DESCRIPTOR.fields_by_name["graph"].number
_INITIALIZER = onnx.GraphProto.DESCRIPTOR.fields_by_name["initializer"].number
_RAW_DATA = onnx.TensorProto.DESCRIPTOR.fields_by_name["raw_data"].number
_KNOWN = set(onnx.TensorProto.DataType.values()) - {onnx.TensorProto.UNDEFINED}


def read_lean(path: Path, largest: int) -> tuple[onnx.ModelProto, WeightStore] | None:
    """A model, its large initialisers references to their bytes in the file, and what these are kept in.

    None where it is to be read whole: a pipe, a file that is small or has more than ``largest`` bytes, or one that is
    not as exporters write them, damaged ones among these.
    """
    store = WeightStore()
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # to open a pipe is to take what is in it
            return None
        file = OpenFile(os.fspath(path))
        if not LEAST_BYTES <= file.size <= largest:
            return None
        with mmap.mmap(file.descriptor, 0, access=mmap.ACCESS_READ) as data:
            content = _without_contents(data, file, store)
        model = None if content is None else onnx.ModelProto.FromString(content)
    except (OSError, ValueError, DecodeError):
        return None
    return None if model is None or has_unknown(model) else (model, store)


def _without_contents(data: Buffer, file: OpenFile, store: WeightStore) -> bytes | None:
    """The model's bytes with references in the place of large initialisers; None where there is not one graph, or most
    of it is something else."""
    graphs = [place for number, *place in delimited(data, 0, len(data)) if number == _GRAPH]
    if len(graphs) != 1:
        return None
    begin, start, end = graphs[0]
    found = list(_references(data, start, end, file, store))
    if len(data) - sum(last - first for first, last, _ in found) > MOST_LEFT:
        return None
    parts, at = [], start
    for first, last, reference in found:
        parts += [data[at:first], _framed(_INITIALIZER, reference.SerializeToString())]
        at = last
    parts.append(data[at:end])
    return b"".join((data[:begin], _framed(_GRAPH, b"".join(parts)), data[end:]))


def _references(data: Buffer, start: int, end: int, file: OpenFile, store: WeightStore
                ) -> Iterator[tuple[int, int, onnx.TensorProto]]:
    """Where in a graph a large initialiser begins and ends, and a reference to its contents."""
    for number, begin, first, last in delimited(data, start, end):
        if number != _INITIALIZER or last - first < LEAST // 8:
            continue
        raw = [place for field, *place in delimited(data, first, last) if field == _RAW_DATA]
        if len(raw) != 1:
            continue
        outset, offset, until = raw[0]
        tensor = onnx.TensorProto.FromString(data[first:outset] + data[until:last])
        if _is_large(tensor, until - offset):
            contents = Stretch(file, offset, until - offset, tensor.HasField("data_location"))
            yield begin, last, store.refer(tensor, contents)


def _is_large(tensor: onnx.TensorProto, length: int) -> bool:
    """Whether a tensor, its raw data of so many bytes aside, is large and says nothing that a reference would not."""
    if not is_plain(tensor):
        return False
    if tensor.data_type not in _KNOWN or min(tensor.dims, default=0) < 0 or prod(tensor.dims) < LEAST:
        return False
    return element_bits(tensor.data_type) > 0 and tensor_bytes(tensor) == length


def _framed(field: int, content: bytes) -> bytes:
    return tag(field, len(content)) + content
