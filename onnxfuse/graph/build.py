"""The loaded model as a ``Graph``: imported by onnx-graphsurgeon, then linked into the view of ``model.py``.

onnx-graphsurgeon is given a skeleton: the nodes, the names, and no contents of any tensor.  So weights are never
copied or read, element types that it does not know cost nothing, and string attributes that hold binary data do not
stop it.  What it leaves out (tensor attributes, captured names, element types) is taken from the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx_graphsurgeon.logger import G_LOGGER

from onnxfuse.graph.constants import SMALL_ELEMENTS, read
from onnxfuse.graph.dims import Dim, dim, parse, symbol
from onnxfuse.graph.load import LoadedModel, from_proto
from onnxfuse.graph.model import Graph, Node, Shape, Value
from onnxfuse.graph.order import captured_names, subgraphs

_PLAIN = (
    onnx.AttributeProto.FLOAT, onnx.AttributeProto.INT, onnx.AttributeProto.STRING,
    onnx.AttributeProto.FLOATS, onnx.AttributeProto.INTS, onnx.AttributeProto.STRINGS,
)
_STRINGS = (onnx.AttributeProto.STRING, onnx.AttributeProto.STRINGS)
_UNKNOWN_SIZES = ("", "?", "None", "none", "-1", "unk", "unknown")


def build_graph(model: LoadedModel | onnx.ModelProto) -> Graph:
    """The model's main graph, linked, with declared types; shapes are not inferred yet.

    Raises:
        ModelError: the model is invalid (given as a proto), or a small constant cannot be read.
    """
    if isinstance(model, onnx.ModelProto):
        model = from_proto(model)
    proto = model.proto
    graph = proto.graph
    domains = {function.domain for function in proto.functions}
    values = _values(proto, model.folder)
    nodes = []
    for index, (imported, original) in enumerate(zip(_import(proto).nodes, graph.node, strict=True)):
        has_subgraph = any(True for _ in subgraphs(original))
        captures = captured_names(original) if has_subgraph else []
        node = Node(
            index=index,
            name=original.name,
            op=imported.op,
            domain="" if original.domain == "ai.onnx" else original.domain,
            attributes=_attributes(original, imported.attrs, model.folder),
            inputs=tuple(None if not tensor.name else values[tensor.name] for tensor in imported.inputs),
            outputs=tuple(
                None if not tensor.name else values.setdefault(tensor.name, Value(tensor.name))
                for tensor in imported.outputs
            ),
            captures=tuple(values[name] for name in captures if name in values),
            has_subgraph=has_subgraph,
        )
        nodes.append(node)
        for value in node.outputs:
            if value is not None:
                value.producer = node
        for value in node.reads():
            value.consumers.append(node)
        if node.op == "Constant" and not node.domain:
            _set_constant(node, original)
    for output in graph.output:
        values[output.name].is_output = True
    _declare(graph, values)
    stored = {tensor.name for tensor in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
    result = Graph(
        nodes=tuple(nodes),
        values=values,
        inputs=tuple(values[value.name] for value in graph.input if value.name not in stored),
        outputs=tuple(values[value.name] for value in graph.output),
        opsets={"" if entry.domain == "ai.onnx" else entry.domain: entry.version for entry in proto.opset_import},
        functions=frozenset((function.domain, function.name) for function in proto.functions),
    )
    if any(node.has_subgraph or node.domain in domains for node in nodes):
        _declare_from_onnx(proto, values)
    return result


def _import(proto: onnx.ModelProto) -> gs.Graph:
    skeleton = onnx.ModelProto(ir_version=proto.ir_version)
    skeleton.opset_import.extend(proto.opset_import)
    for name in dict.fromkeys(value.name for value in proto.graph.input):
        skeleton.graph.input.add(name=name)
    for value in proto.graph.output:
        skeleton.graph.output.add(name=value.name)
    for node in proto.graph.node:
        copy = skeleton.graph.node.add(
            name=node.name, op_type=node.op_type, domain=node.domain, input=node.input, output=node.output,
        )
        copy.attribute.extend(attribute for attribute in node.attribute if _importable(attribute))
    severity = G_LOGGER.severity
    G_LOGGER.severity = G_LOGGER.CRITICAL
    try:
        return gs.import_onnx(skeleton)
    finally:
        G_LOGGER.severity = severity


def _importable(attribute: onnx.AttributeProto) -> bool:
    if attribute.type not in _PLAIN:
        return False
    if attribute.type in _STRINGS:
        try:
            for text in (attribute.s, *attribute.strings):
                text.decode()
        except UnicodeDecodeError:
            return False
    return True


def _attributes(node: onnx.NodeProto, plain: Mapping[str, Any], folder: Path | None) -> Mapping[str, Any]:
    """All attributes: those that onnx-graphsurgeon decoded, tensors as arrays where small, binary strings as bytes."""
    result = dict(plain)
    for attribute in node.attribute:
        if attribute.name in result:
            continue
        match attribute.type:
            case onnx.AttributeProto.TENSOR:
                result[attribute.name] = Tensor(attribute.t, folder).contents()
            case onnx.AttributeProto.TENSORS:
                result[attribute.name] = [Tensor(tensor, folder).contents() for tensor in attribute.tensors]
            case onnx.AttributeProto.STRING:
                result[attribute.name] = attribute.s
            case onnx.AttributeProto.STRINGS:
                result[attribute.name] = list(attribute.strings)
            case onnx.AttributeProto.SPARSE_TENSOR:
                result[attribute.name] = attribute.sparse_tensor
            case onnx.AttributeProto.TYPE_PROTO:
                result[attribute.name] = attribute.tp
    return result


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor attribute that is not read, because it is large: its type and sizes."""

    tensor: onnx.TensorProto
    folder: Path | None

    @property
    def dtype(self) -> int:
        """Element type, a number of ``onnx.TensorProto.DataType``."""
        return self.tensor.data_type

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes."""
        return tuple(self.tensor.dims)

    def contents(self) -> np.ndarray | Tensor:
        """The array where the tensor is small, else itself."""
        return read(self.tensor, self.folder) if prod(self.shape) <= SMALL_ELEMENTS else self


def _values(proto: onnx.ModelProto, folder: Path | None) -> dict[str, Value]:
    """The values that no node computes: inputs and initialisers."""
    graph = proto.graph
    values = {value.name: Value(value.name, is_input=True) for value in graph.input}
    # From IR version 4 on, an initialiser among the inputs is a default that the caller may replace.
    overridable = set(values) if proto.ir_version >= 4 else set()
    for tensor in graph.initializer:
        value = values.setdefault(tensor.name, Value(tensor.name))
        value.dtype = tensor.data_type
        if tensor.name in overridable:
            continue
        value.is_input = False
        value.is_constant = True
        value.shape = tuple(dim(size) for size in tensor.dims)
        if prod(tensor.dims) <= SMALL_ELEMENTS:
            value.constant = read(tensor, folder)
    for sparse in graph.sparse_initializer:
        name = sparse.values.name
        values[name] = Value(
            name, dtype=sparse.values.data_type, shape=tuple(dim(size) for size in sparse.dims), is_constant=True,
        )
    return values


_CONSTANT_TYPES: Mapping[str, tuple[int, type]] = {
    "value_int": (onnx.TensorProto.INT64, np.int64),
    "value_ints": (onnx.TensorProto.INT64, np.int64),
    "value_float": (onnx.TensorProto.FLOAT, np.float32),
    "value_floats": (onnx.TensorProto.FLOAT, np.float32),
    "value_string": (onnx.TensorProto.STRING, np.object_),
    "value_strings": (onnx.TensorProto.STRING, np.object_),
}


def _set_constant(node: Node, original: onnx.NodeProto) -> None:
    """Type, sizes and, where small, contents of a Constant node's output."""
    (value,) = node.outputs
    if value is None:
        return
    value.is_constant = True
    for name, content in node.attributes.items():
        if isinstance(content, Tensor):
            value.dtype, value.shape = content.dtype, tuple(dim(size) for size in content.shape)
        elif isinstance(content, np.ndarray):
            value.dtype = next(attribute.t.data_type for attribute in original.attribute if attribute.name == name)
            value.shape, value.constant = tuple(dim(size) for size in content.shape), content
        elif isinstance(content, onnx.SparseTensorProto):
            value.dtype, value.shape = content.values.data_type, tuple(dim(size) for size in content.dims)
        elif name in _CONSTANT_TYPES:
            value.dtype, kind = _CONSTANT_TYPES[name]
            array: np.ndarray = np.array(content, dtype=kind)
            array.flags.writeable = False
            value.shape = tuple(dim(size) for size in array.shape)
            if array.size <= SMALL_ELEMENTS:
                value.constant = array


def _declare(graph: onnx.GraphProto, values: Mapping[str, Value]) -> None:
    """What the file says of inputs, outputs and values between; inputs' unnamed sizes get symbols of their own."""
    for info in (*graph.value_info, *graph.output):
        value = values.get(info.name)
        if value is not None and not value.is_constant:
            value.dtype = _element_type(info.type) or value.dtype
            value.declared = _declared_shape(info, info.name) or value.declared
    defaults = {tensor.name: tensor for tensor in graph.initializer}
    for info in graph.input:
        value = values[info.name]
        if value.is_input:
            value.dtype = _element_type(info.type) or value.dtype
            value.shape = _declared_shape(info, info.name)
            if value.shape is None and info.name in defaults and not info.type.HasField("tensor_type"):
                value.shape = tuple(dim(size) for size in defaults[info.name].dims)


def _element_type(kind: onnx.TypeProto) -> int | None:
    return kind.tensor_type.elem_type or None if kind.HasField("tensor_type") else None


def _declared_shape(info: onnx.ValueInfoProto, name: str) -> Shape | None:
    if not info.type.HasField("tensor_type") or not info.type.tensor_type.HasField("shape"):
        return None
    return tuple(_size(entry, f"{name}.{axis}") for axis, entry in enumerate(info.type.tensor_type.shape.dim))


def _size(entry: onnx.TensorShapeProto.Dimension, fresh: str) -> Dim:
    if entry.HasField("dim_value") and entry.dim_value >= 0:
        return dim(entry.dim_value)
    text = entry.dim_param.strip()
    if text in _UNKNOWN_SIZES:
        return symbol(fresh)
    size = parse(text)
    return size if size.value is None or size.value >= 0 else symbol(fresh)


def _declare_from_onnx(proto: onnx.ModelProto, values: Mapping[str, Value]) -> None:
    """Types that onnx itself infers for nodes with subgraphs and for the model's own functions.

    Only constants and sizes that an input names are taken over: onnx's own symbols hold within its run alone.
    """
    known = _input_symbols(proto.graph.input)
    for info in _infer(proto):
        value = values.get(info.name)
        if value is None or value.is_constant or value.is_input:
            continue
        value.dtype = value.dtype or _element_type(info.type)
        shape = _declared_shape(info, info.name)
        if value.declared is None and shape is not None:
            value.declared = tuple(
                size if size.symbols <= known else symbol(f"{info.name}.{axis}") for axis, size in enumerate(shape)
            )


def _input_symbols(inputs: Iterable[onnx.ValueInfoProto]) -> frozenset[str]:
    names: frozenset[str] = frozenset()
    for info in inputs:
        for size in _declared_shape(info, info.name) or ():
            names |= size.symbols
    return names


def _infer(proto: onnx.ModelProto) -> Iterable[onnx.ValueInfoProto]:
    """onnx's whole-model inference, on a copy whose large initialisers have turned into inputs."""
    copy = onnx.ModelProto(ir_version=max(proto.ir_version, 4))
    copy.opset_import.extend(proto.opset_import)
    copy.functions.extend(proto.functions)
    graph = copy.graph
    graph.name = proto.graph.name or "graph"
    graph.node.extend(proto.graph.node)
    graph.input.extend(proto.graph.input)
    graph.output.extend(proto.graph.output)
    graph.value_info.extend(proto.graph.value_info)
    listed = {value.name for value in graph.input}
    for tensor in proto.graph.initializer:
        if prod(tensor.dims) <= SMALL_ELEMENTS and tensor.data_location != onnx.TensorProto.EXTERNAL:
            graph.initializer.append(tensor)
        elif tensor.name not in listed:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    try:
        inferred = onnx.shape_inference.infer_shapes(copy, strict_mode=False, data_prop=True)
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError):
        # Nothing is lost but hints: what onnx cannot infer stays unknown, and is left alone.
        return []
    return [*inferred.graph.value_info, *inferred.graph.output]
