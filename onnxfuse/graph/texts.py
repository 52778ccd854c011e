"""Check that every name and note in a model is text.

A protobuf file may hold any bytes where a name stands, and ONNX Runtime takes them as they come; protobuf gives Python
such a field as bytes.  Everything behind this check may take names to be strings that can be written again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

import onnx
from google.protobuf.message import Message

from onnxfuse.errors import ModelError

_Text = str | bytes


def check_texts(proto: onnx.ModelProto, place: str | None) -> None:
    """Check a model's graphs, functions and notes; contents of tensors and of string attributes are anyone's.

    Raises:
        ModelError: a field of text holds bytes that are no UTF-8.
    """
    try:
        found = next((text for text in _of_model(proto) if not isinstance(text, str)), None)
    except UnicodeDecodeError as error:  # as protobuf's other implementations have it
        found = error.object
    if found is not None:
        raise ModelError(
            f"A name or a note in the model is no UTF-8 text: {found[:100]!r}.", place=place,
            remedy="Rename it: write the model again with a tool that writes names as UTF-8.",
        )


def is_text(message: Message) -> bool:
    """Whether that is so of every field of a small message."""
    try:
        for field, value in message.ListFields():
            if field.type not in (field.TYPE_STRING, field.TYPE_MESSAGE):
                continue
            for each in (value,) if isinstance(value, str | bytes | Message) else value:
                if isinstance(each, bytes) or (isinstance(each, Message) and not is_text(each)):
                    return False
    except UnicodeDecodeError:
        return False
    return True


def _of_model(proto: onnx.ModelProto) -> Iterator[_Text]:
    yield from (proto.producer_name, proto.producer_version, proto.domain, proto.doc_string)
    for entry in chain(proto.opset_import, *(function.opset_import for function in proto.functions)):
        yield entry.domain
    yield from _of_notes(proto.metadata_props)
    yield from _of_graph(proto.graph)
    for training in proto.training_info:
        yield from chain(_of_graph(training.initialization), _of_graph(training.algorithm))
    for function in proto.functions:
        yield from (function.name, function.domain, function.doc_string)
        yield from chain(function.input, function.output, function.attribute)
        yield from _of_notes(getattr(function, "metadata_props", ()))
        yield from _of_attributes(getattr(function, "attribute_proto", ()))
        yield from _of_infos(getattr(function, "value_info", ()))
        yield from _of_nodes(function.node)


def _of_graph(graph: onnx.GraphProto) -> Iterator[_Text]:
    yield from (graph.name, graph.doc_string)
    yield from _of_notes(getattr(graph, "metadata_props", ()))
    yield from _of_infos(chain(graph.input, graph.output, graph.value_info))
    yield from _of_tensors(graph.initializer)
    for sparse in graph.sparse_initializer:
        yield from _of_tensors((sparse.values, sparse.indices))
    for note in graph.quantization_annotation:
        yield note.tensor_name
        yield from _of_notes(note.quant_parameter_tensor_names)
    yield from _of_nodes(graph.node)


def _of_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[_Text]:
    for node in nodes:
        yield from (node.name, node.op_type, node.domain, node.doc_string)
        yield from node.input
        yield from node.output
        yield from _of_notes(getattr(node, "metadata_props", ()))
        yield from _of_attributes(node.attribute)


def _of_attributes(attributes: Iterable[onnx.AttributeProto]) -> Iterator[_Text]:
    for attribute in attributes:
        yield from (attribute.name, attribute.ref_attr_name, attribute.doc_string)
        if attribute.HasField("g"):
            yield from _of_graph(attribute.g)
        for graph in attribute.graphs:
            yield from _of_graph(graph)
        if attribute.HasField("t"):
            yield from _of_tensors((attribute.t,))
        yield from _of_tensors(attribute.tensors)


def _of_infos(infos: Iterable[onnx.ValueInfoProto]) -> Iterator[_Text]:
    for info in infos:
        yield from (info.name, info.doc_string)
        yield from _of_notes(getattr(info, "metadata_props", ()))
        if info.type.HasField("tensor_type"):
            for size in info.type.tensor_type.shape.dim:
                yield from (size.dim_param, size.denotation)


def _of_tensors(tensors: Iterable[onnx.TensorProto]) -> Iterator[_Text]:
    for tensor in tensors:
        yield from (tensor.name, tensor.doc_string)
        yield from _of_notes(tensor.external_data)
        yield from _of_notes(getattr(tensor, "metadata_props", ()))


def _of_notes(entries: Iterable[onnx.StringStringEntryProto]) -> Iterator[_Text]:
    for entry in entries:
        yield from (entry.key, entry.value)
