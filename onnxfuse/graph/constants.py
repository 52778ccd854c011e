"""Contents of constants: which tensors are read at optimise time, how, and where their bytes are.

Weights are never read to see a graph.  A tensor of at most ``SMALL_ELEMENTS`` elements (shapes, axes, scales, norms'
weights) is; its array is read-only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnxfuse.errors import ExternalDataError, ModelError
from onnxfuse.graph.store import is_stored, resolved

SMALL_ELEMENTS = 4096
"""Tensors of no more elements than this are read when the graph is built."""

_PACKED_BITS: dict[int, int] = {
    onnx.TensorProto.DataType.Value(name): bits
    for name, bits in (("INT4", 4), ("UINT4", 4), ("FLOAT4E2M1", 4), ("INT2", 2), ("UINT2", 2))
    if name in dict(onnx.TensorProto.DataType.items())
}


_SMALL_FLOATS = {
    int(onnx.TensorProto.BFLOAT16): ml_dtypes.bfloat16,
    int(onnx.TensorProto.FLOAT8E4M3FN): ml_dtypes.float8_e4m3fn,
    int(onnx.TensorProto.FLOAT8E4M3FNUZ): ml_dtypes.float8_e4m3fnuz,
    int(onnx.TensorProto.FLOAT8E5M2): ml_dtypes.float8_e5m2,
    int(onnx.TensorProto.FLOAT8E5M2FNUZ): ml_dtypes.float8_e5m2fnuz,
}


def element_bits(dtype: int) -> int:
    """Bits that one element takes in a file; 0 where that depends on the element (strings)."""
    if dtype in _PACKED_BITS:
        return _PACKED_BITS[dtype]
    if dtype == onnx.TensorProto.STRING:
        return 0
    return 8 * numpy_type(dtype).itemsize


def numpy_type(dtype: int) -> np.dtype[Any]:
    """NumPy's type for an element type; bfloat16 and smaller floats are ``ml_dtypes`` types in every onnx."""
    return np.dtype(_SMALL_FLOATS.get(dtype) or helper.tensor_dtype_to_np_dtype(dtype))


def tensor_bytes(tensor: onnx.TensorProto) -> int:
    """Bytes of the tensor's contents as raw data, from its type and sizes alone."""
    count: int = prod(tensor.dims)
    return (count * element_bits(tensor.data_type) + 7) // 8


def tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Every tensor that the graph and its subgraphs hold: initialisers, sparse ones' parts, attributes."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from node_tensors(graph.node)


def node_tensors(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    """Every tensor in the attributes of the nodes and of their subgraphs."""
    for node in nodes:
        for attribute in node.attribute:
            kind = attribute.type
            if kind == onnx.AttributeProto.TENSOR:
                yield attribute.t
            elif kind == onnx.AttributeProto.TENSORS:
                yield from attribute.tensors
            elif kind == onnx.AttributeProto.GRAPH:
                yield from tensors(attribute.g)
            elif kind == onnx.AttributeProto.GRAPHS:
                for graph in attribute.graphs:
                    yield from tensors(graph)
            elif kind == onnx.AttributeProto.SPARSE_TENSOR:
                yield from (attribute.sparse_tensor.values, attribute.sparse_tensor.indices)


def is_external(tensor: onnx.TensorProto) -> bool:
    """Whether the contents lie in a file of their own."""
    return bool(tensor.data_location == onnx.TensorProto.EXTERNAL) and not is_stored(tensor)


def external_span(tensor: onnx.TensorProto) -> tuple[str, int, int]:
    """Location as written, offset and length in bytes of a tensor's external data.

    Raises:
        ExternalDataError: no location, or numbers that are none.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    place = f"tensor '{tensor.name}'"
    if not location:
        raise ExternalDataError(
            f"Tensor '{tensor.name}' keeps its data in a file of its own and names no file.", place=place,
            remedy="Export the model again.",
        )
    if "\0" in location:
        raise ExternalDataError(
            f"Tensor '{tensor.name}' keeps its data in {location!r}, which no file can be called.", place=place,
            remedy="Export the model again.",
        )
    try:
        offset = int(entries.get("offset", "0") or 0)
        length = int(entries["length"]) if entries.get("length") else tensor_bytes(tensor)
        if offset < 0 or length < 0:
            raise ValueError
    except ValueError:
        raise ExternalDataError(
            f"Tensor '{tensor.name}' states no valid offset and length in '{location}'.", place=place,
            remedy="Export the model again.",
        ) from None
    return location, offset, length


def external_path(tensor: onnx.TensorProto, location: str, folder: Path | None) -> Path:
    """The file that holds a tensor's external data.

    Raises:
        ExternalDataError: the path leaves the model's folder, by its text or by a link, or that is not known.
    """
    place = f"tensor '{tensor.name}'"
    if folder is None:
        raise ExternalDataError(
            f"Tensor '{tensor.name}' keeps its data in '{location}', and the model has no folder.", place=place,
            remedy="Give the folder that holds the file, or load the model by path.",
        )
    absolute = location.startswith(("/", "\\")) or (len(location) > 1 and location[1] == ":")
    if absolute or ".." in location.replace("\\", "/").split("/"):
        raise ExternalDataError(
            f"The external data path '{location}' leaves the model's folder.", place=place,
            remedy="Save the model again with its data beside it: onnx.save(model, path, save_as_external_data=True).",
        )
    path = folder / location
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
        raise ExternalDataError(
            f"The external data path '{location}' is a link that leaves the model's folder.", place=place,
            remedy=f"Put the data itself there: cp --remove-destination \"$(realpath '{path}')\" '{path}'.",
        )
    return path


def read(tensor: onnx.TensorProto, folder: Path | None) -> np.ndarray:
    """The tensor's contents, read-only; bfloat16 and smaller floats as ``ml_dtypes`` types.

    Raises:
        ExternalDataError: external data cannot be read.
        ModelError: the bytes do not fit type and sizes.
    """
    tensor = resolved(tensor)
    try:
        if not is_external(tensor):
            array = numpy_helper.to_array(tensor)
        else:
            array = numpy_helper.to_array(_with_external_data(tensor, folder))
    except (ValueError, TypeError) as error:
        raise ModelError(
            f"Tensor '{tensor.name}' cannot be read: {error}.", place=f"tensor '{tensor.name}'",
            remedy="Export the model again.",
        ) from error
    kind = numpy_type(tensor.data_type)
    if tensor.data_type in _SMALL_FLOATS and array.dtype != kind:
        # Older releases of onnx give the bits as integers, or the values as float32.
        array = array.view(kind) if array.dtype.itemsize == kind.itemsize else array.astype(kind)
    if array.flags.writeable:
        array.flags.writeable = False
    return array


def _with_external_data(tensor: onnx.TensorProto, folder: Path | None) -> onnx.TensorProto:
    location, offset, length = external_span(tensor)
    path = external_path(tensor, location, folder)
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(length)
    except OSError as error:
        raise ExternalDataError(
            f"The external data file '{location}' cannot be read: {error.strerror}.", place=f"tensor '{tensor.name}'",
            remedy=f"Put the file back beside the model, at {path}.",
        ) from error
    inline = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    inline.raw_data = data
    return inline
