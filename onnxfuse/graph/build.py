"""The loaded model as a ``Graph``: imported by onnx-graphsurgeon, then linked into the view of ``model.py``.

onnx-graphsurgeon is given a skeleton: the nodes, the names, and no contents of any tensor.  So weights are never
copied or read, element types that it does not know cost nothing, and string attributes that hold binary data do not
stop it.  What it leaves out (tensor attributes, captured names, element types) is taken from the model.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx_graphsurgeon.logger import G_LOGGER

from onnxfuse.graph.bodies import handed_in
from onnxfuse.graph.constants import SMALL_ELEMENTS, is_external, read
from onnxfuse.graph.context import MOST_AXES
from onnxfuse.graph.dims import Dim, dim, symbol
from onnxfuse.graph.inference import infer_model
from onnxfuse.graph.load import LoadedModel, from_proto
from onnxfuse.graph.model import Body, Graph, Node, Shape, Value
from onnxfuse.graph.order import OWNERS, Scope, bodies_in, bodies_of, graphs_of, local_names, subgraphs
from onnxfuse.graph.sequence import captures, sequence
from onnxfuse.graph.stated import parse
from onnxfuse.graph.store import kept

_PLAIN = (
    onnx.AttributeProto.FLOAT, onnx.AttributeProto.INT, onnx.AttributeProto.STRING,
    onnx.AttributeProto.FLOATS, onnx.AttributeProto.INTS, onnx.AttributeProto.STRINGS,
)
_STRINGS = (onnx.AttributeProto.STRING, onnx.AttributeProto.STRINGS)
OVERRIDABLE = 4
"""From this IR version on, an initialiser among the inputs is a default that the caller may replace."""

MOST_FUNCTIONS = 4096
"""Functions that onnx infers a model with: its time grows with their square."""

MOST_SEEN = 1 << 25
"""Bodies times nodes of the main graph up to which onnx infers a model: for each body it copies all that is known."""

_UNKNOWN_SIZES = ("", "?", "None", "none", "-1", "unk", "unknown")


def build_graph(model: LoadedModel | onnx.ModelProto) -> Graph:
    """The model's main graph and the bodies in it, linked, with declared types; shapes are not inferred yet.

    Raises:
        ModelError: the model is invalid (given as a proto), or a small constant cannot be read.
    """
    if isinstance(model, onnx.ModelProto):
        model = from_proto(model)
    proto = model.proto
    result = _build(proto.graph, _Source(proto, model.folder))
    domains = {function.domain for function in proto.functions}
    if any(node.has_subgraph or node.domain in domains for node in result.nodes):
        _declare_from_onnx(proto, result.values)
    return result


@dataclass(frozen=True)
class _Source:
    """The model that a graph is of."""

    proto: onnx.ModelProto
    folder: Path | None


@dataclass(frozen=True)
class _Links:
    """What the nodes of one graph are linked by.

    Attributes:
        folder: where the model's external data is looked for; body: which body the graph is, None for the main one.
        values: those of the graph by name; known: those, and those of the graphs around.
    """

    folder: Path | None
    body: Body | None
    values: dict[str, Value]
    known: ChainMap[str, Value]

    def node(self, index: int, imported: gs.Node, original: onnx.NodeProto) -> Node:
        """A node, linked with what it reads and computes."""
        values = self.values
        has_subgraph = any(True for _ in subgraphs(original))
        node = Node(
            index=index,
            name=original.name,
            op=imported.op,
            domain="" if original.domain == "ai.onnx" else original.domain,
            attributes=_attributes(original, imported.attrs, self.folder),
            inputs=tuple(None if not tensor.name else values[tensor.name] for tensor in imported.inputs),
            outputs=tuple(
                None if not tensor.name else values.setdefault(tensor.name, Value(tensor.name))
                for tensor in imported.outputs
            ),
            captures=tuple(values[name] for name in captures(original) if name in values) if has_subgraph else (),
            has_subgraph=has_subgraph,
            body=self.body,
        )
        for value in node.outputs:
            if value is not None:
                value.producer = node
                self.known[value.name] = value
        for value in node.reads():
            value.consumers.append(node)
        if node.op == "Constant" and not node.domain:
            _set_constant(node, original)
        return node


def _build(graph: onnx.GraphProto, source: _Source, around: ChainMap[str, Value] | None = None,
           body: Body | None = None, owner: Node | None = None) -> Graph:
    """One graph and the bodies in it.

    Args:
        around: for a body: values that it may read by name.
        body, owner: which body it is, and of which node.
    """
    proto = source.proto
    values = _values(graph, proto.ir_version if body is None else OVERRIDABLE, source.folder)
    if around:
        values |= _captured(graph, values, around)
    # What is known around stays where it is: a copy for each body would be work of the bodies times the names.
    known = around.new_child(dict(values)) if around is not None else ChainMap(dict(values))
    taken = Scope({name for node in graph.node for name in node.output if name}, known)
    links = _Links(source.folder, body, values, known)
    nodes: list[Node] = []
    bodies: list[Graph] = []
    inside: dict[int, list[tuple[Body, onnx.GraphProto]]] = {}
    for position, found, inner in bodies_in(body, graph):
        inside.setdefault(position, []).append((found, inner))
    pairs = list(zip(_import(graph, proto).nodes, graph.node, strict=True))
    for index, position in enumerate(sequence(graph)):
        imported, original = pairs[position]
        node = links.node(index, imported, original)
        nodes.append(node)
        if (node.domain, node.op) in OWNERS and not any(_hides(inner, taken) for _, inner in bodies_of(original)):
            own = [_build(inner, source, known, found, node) for found, inner in inside.get(position, ())]
            bodies += own
            for outer, value in (pair for inner in own for pair in handed_in(inner)):
                outer.inner.append(value)
    for output in graph.output:
        values[output.name].is_output = True
    _declare(graph, values, owner)
    stored = {tensor.name for tensor in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
    return Graph(
        nodes=tuple(nodes),
        values=values,
        inputs=tuple(values[info.name] for info in graph.input if body is not None or info.name not in stored),
        outputs=tuple(values[value.name] for value in graph.output),
        opsets={"" if entry.domain == "ai.onnx" else entry.domain: entry.version for entry in proto.opset_import},
        functions=frozenset((function.domain, function.name) for function in proto.functions),
        body=body,
        owner=owner,
        bodies=tuple(bodies),
    )


def _hides(graph: onnx.GraphProto, around: Container[str]) -> bool:
    """Whether a body gives a name of the graphs around to a value of its own, which ONNX forbids: it stays closed."""
    own = local_names(graph).union(*(node.output for node in graph.node))
    return any(name in around for name in own) or any(
        _hides(inner, around) for node in graph.node for _, inner in bodies_of(node)
    )


def _captured(graph: onnx.GraphProto, own: Mapping[str, Value], around: Mapping[str, Value]) -> dict[str, Value]:
    """Values of the graphs around that a body reads by name, itself or in bodies of its own."""
    made = {name for node in graph.node for name in node.output}
    ordered = [graph.node[position] for position in sequence(graph)]
    names = dict.fromkeys(name for node in ordered for name in (*node.input, *captures(node)))
    names |= dict.fromkeys(output.name for output in graph.output)
    found = {
        name: Value(name, outer=around[name])
        for name in names if name in around and name not in own and name not in made
    }
    for name, value in found.items():
        around[name].inner.append(value)
    return found


def _import(graph: onnx.GraphProto, proto: onnx.ModelProto) -> gs.Graph:
    skeleton = onnx.ModelProto(ir_version=proto.ir_version)
    skeleton.opset_import.extend(proto.opset_import)
    for name in dict.fromkeys(value.name for value in graph.input):
        skeleton.graph.input.add(name=name)
    for value in graph.output:
        skeleton.graph.output.add(name=value.name)
    for node in graph.node:
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


def _read(tensor: Callable[[], onnx.TensorProto], folder: Path | None) -> np.ndarray:
    return read(tensor(), folder)


def _values(graph: onnx.GraphProto, ir_version: int, folder: Path | None) -> dict[str, Value]:
    """The values that no node computes: inputs and initialisers."""
    values = {value.name: Value(value.name, is_input=True) for value in graph.input}
    overridable = set(values) if ir_version >= OVERRIDABLE else set()
    for tensor in graph.initializer:
        value = values.setdefault(tensor.name, Value(tensor.name))
        value.dtype = tensor.data_type
        if tensor.name in overridable:
            continue
        value.is_input = False
        value.is_constant, value.external = True, is_external(tensor)
        value.shape = tuple(dim(size) for size in tensor.dims)
        if prod(tensor.dims) <= SMALL_ELEMENTS:
            value.constant = read(tensor, folder)
        else:
            value.contents = partial(_read, kept(tensor), folder)
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
            value.contents = partial(read, content.tensor, content.folder)
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


def _declare(graph: onnx.GraphProto, values: Mapping[str, Value], owner: Node | None) -> None:
    """What the file says of inputs, outputs and values between; inputs' unnamed sizes get symbols of their own.

    A body that runs again and again has its sizes from what runs it: what the file says of its inputs is a hint, and a
    name that the file gives a size there may stand for another number in every run.
    """
    for info in (*graph.value_info, *graph.output, *(graph.input if owner is not None else ())):
        value = values.get(info.name)
        if value is not None and not value.is_constant and value.outer is None:
            value.dtype = _element_type(info.type) or value.dtype
            value.declared = _declared_shape(info, info.name, owner is None or owner.op == "If") or value.declared
    if owner is not None:
        return
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


def _declared_shape(info: onnx.ValueInfoProto, name: str, named: bool = True) -> Shape | None:
    """Sizes as the file states them; ``named`` tells whether those that it names are taken by these names."""
    if not info.type.HasField("tensor_type") or not info.type.tensor_type.HasField("shape"):
        return None
    if len(info.type.tensor_type.shape.dim) > MOST_AXES:
        return None
    return tuple(_size(entry, f"{name}.{axis}", named) for axis, entry in enumerate(info.type.tensor_type.shape.dim))


def _size(entry: onnx.TensorShapeProto.Dimension, fresh: str, named: bool) -> Dim:
    if entry.HasField("dim_value") and entry.dim_value >= 0:
        return dim(entry.dim_value)
    text = entry.dim_param.strip() if named else ""
    if text in _UNKNOWN_SIZES:
        return symbol(fresh)
    size = parse(text)
    return size if size.value is None or 0 <= size.value < 1 << 63 else symbol(fresh)


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
    """onnx's whole-model inference, on a copy whose large initialisers have turned into inputs; nothing of a model with
    so many functions or bodies that it would take long."""
    bodies = sum(1 for _ in graphs_of(proto)) - 1
    if len(proto.functions) > MOST_FUNCTIONS or bodies * len(proto.graph.node) > MOST_SEEN:
        return []
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
    inferred = infer_model(copy)
    return [] if inferred is None else [*inferred.graph.value_info, *inferred.graph.output]
