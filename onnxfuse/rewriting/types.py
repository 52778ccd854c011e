"""Types and sizes of values, as records and the model have them."""

from __future__ import annotations

from collections.abc import Collection

import onnx
from onnx import helper

from onnxfuse.graph.model import Value
from onnxfuse.graph.order import graphs_of
from onnxfuse.graph.sizes import type_name
from onnxfuse.region import Region
from onnxfuse.rewriting.invariants import InvariantError


def region_names(region: Region) -> list[tuple[str, Value]]:
    """The formal name in the body of each value that the region reads or computes for others."""
    groups = (("h", region.hosts), ("x", region.tensors), ("y", region.outputs))
    return [(f"{letter}{place}", value) for letter, values in groups for place, value in enumerate(values)]


def type_of(value: Value) -> tuple[str, tuple[str, ...] | None]:
    """A value's element type and sizes as text, as a record keeps them."""
    name = type_name(value.dtype or onnx.TensorProto.UNDEFINED).upper()
    return name, None if value.shape is None else tuple(map(str, value.shape))


def value_info(value: Value, symbols: Collection[str], label: str) -> onnx.ValueInfoProto:
    """Type and shape of an output; a size that is no number and no name of the model stays open."""
    if value.dtype is None:
        raise InvariantError(f"{label}: the type of output {value.name!r} is unknown")
    shape: list[int | str | None] | None = None
    if value.shape is not None:
        shape = [
            size.value if size.value is not None else str(size) if str(size) in symbols else None
            for size in value.shape
        ]
    return helper.make_tensor_value_info(value.name, value.dtype, shape)


def symbol_names(model: onnx.ModelProto) -> frozenset[str]:
    """Names of sizes in a model."""
    return frozenset(
        size.dim_param
        for _, graph in graphs_of(model)
        for info in (*graph.input, *graph.output, *graph.value_info)
        for size in info.type.tensor_type.shape.dim
        if size.dim_param
    )
