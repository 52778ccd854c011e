"""The body of a fused node: the nodes it replaces, as an ONNX function with canonical names.

Formal names say what a value is: ``h0``.. host inputs (always all of them), ``x0``.. tensor inputs, ``c0``..
constants, ``t0``.. inner values, ``y0``.. outputs.  Nodes stand in the order in which a walk from the outputs meets
them, so that regions of one structure have one body wherever an exporter put their nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnxfuse.graph.constants import is_external
from onnxfuse.graph.order import STANDARD_DOMAINS
from onnxfuse.graph.store import resolved
from onnxfuse.lowering import launch
from onnxfuse.rewriting.index import ModelIndex
from onnxfuse.rewriting.invariants import require
from onnxfuse.rewriting.located import LocatedRegion
from onnxfuse.rewriting.metadata import ConstantRecord, NodeRecord, ValueRecord, packed, unpacked

_SPELLED_OUT = "ai.onnx"
"""ONNX Runtime takes this for "" in a graph, and not in a function."""


@dataclass(frozen=True)
class Body:
    """A region's function, still without a name, and what it does not say of the nodes it replaces.

    ``constants`` says where each constant stood in the model, as if it left it.
    """

    function: onnx.FunctionProto
    nodes: tuple[NodeRecord, ...]
    values: Mapping[str, ValueRecord]
    constants: Mapping[str, ConstantRecord]


def make_body(index: ModelIndex, region: LocatedRegion) -> Body:
    """The body of a region."""
    order = _walk(index, region.nodes, region.outputs)
    formals = {name: f"h{place}" for place, name in enumerate(region.hosts)}
    formals |= {name: f"x{place}" for place, name in enumerate(region.tensors)}
    formals |= {name: f"y{place}" for place, name in enumerate(region.outputs)}
    function = onnx.FunctionProto(domain=launch.DOMAIN)
    function.input.extend(f"h{place}" for place in range(launch.HOST_INPUTS))
    function.input.extend(f"x{place}" for place in range(len(region.tensors)))
    function.output.extend(f"y{place}" for place in range(len(region.outputs)))

    constants: dict[str, ConstantRecord] = {}
    for position in order:
        for name in index.nodes[position].input:
            if name in region.inlined and name not in formals:
                formals[name] = formal = f"c{len(constants)}"
                node, constants[formal] = _constant(index, region, name)
                node.output[:] = [formal]
                function.node.append(node)
    records: list[NodeRecord] = []
    values: dict[str, ValueRecord] = {}
    for position in order:
        node, record = strip(index.nodes[position], position, index.twins)
        for name in node.output:
            if name and name not in formals:
                formals[name] = f"t{len(values)}"
                values[formals[name]] = value_record(index, name)
        node.input[:] = [formals[name] if name else "" for name in node.input]
        node.output[:] = [formals[name] if name else "" for name in node.output]
        function.node.append(node)
        records.append(record)
    function.opset_import.extend(_opsets(index.model, function.node))
    return Body(function, tuple(records), values, constants)


def strip(
    original: onnx.NodeProto, position: int, twins: Collection[str] = ()
) -> tuple[onnx.NodeProto, NodeRecord]:
    """A copy of a node without what names it, and the record of that; ``twins`` are names that several nodes have."""
    node = onnx.NodeProto()
    node.CopyFrom(original)
    tensors = {}
    for attribute in node.attribute:
        if attribute.HasField("t"):
            notes = take_notes(attribute.t)
            if notes:
                tensors[attribute.name] = notes
    devices: Any = onnx.NodeProto()
    devices.device_configurations.extend(node.device_configurations)
    properties = {entry.key: entry.value for entry in node.metadata_props}
    if not all(entry.HasField("key") and entry.HasField("value") for entry in node.metadata_props) or (
            len(properties) < len(node.metadata_props)):
        # No mapping: a key twice, or an entry that lacks a part.
        devices.metadata_props.extend(node.metadata_props)
        properties = {}
    record = NodeRecord(
        node.name if node.HasField("name") else None,
        position,
        node.doc_string if node.HasField("doc_string") else None,
        properties,
        tensors,
        packed(devices),
        twins=original.name in twins,
        domain=node.domain if node.domain == _SPELLED_OUT else "",
    )
    if record.domain:
        node.ClearField("domain")
    for field in ("name", "doc_string", "metadata_props", "device_configurations"):
        node.ClearField(field)
    return node, record


def dress(node: onnx.NodeProto, record: NodeRecord) -> None:
    """Give a node back what ``strip`` took; its inputs and outputs stay."""
    if record.domain:
        node.domain = record.domain
    if record.name is not None:
        node.name = record.name
    if record.doc_string is not None:
        node.doc_string = record.doc_string
    for key, value in record.metadata_props.items():
        node.metadata_props.add(key=key, value=value)
    for attribute in node.attribute:
        if attribute.name in record.tensors:
            give_notes(attribute.t, record.tensors[attribute.name])
    if record.devices:
        give_notes(node, record.devices)


def take_notes(tensor: onnx.TensorProto) -> str:
    """Clear a tensor's name and notes; returns them packed."""
    notes = onnx.TensorProto()
    for field in ("name", "doc_string"):
        if tensor.HasField(field):
            setattr(notes, field, getattr(tensor, field))
    notes.metadata_props.extend(tensor.metadata_props)
    for field in ("name", "doc_string", "metadata_props"):
        tensor.ClearField(field)
    return packed(notes)


def give_notes(proto: Any, notes: str) -> None:
    """Put packed notes back into a tensor or a node."""
    if notes:
        unpacked(notes, proto)


def _walk(index: ModelIndex, nodes: Sequence[int], outputs: Sequence[str]) -> list[int]:
    """The region's nodes, producers first, as a walk back from the outputs finds them; unused ones last."""
    inside = set(nodes)
    starts = [index.producer[name] for name in outputs] + sorted(nodes)
    done: set[int] = set()
    order: list[int] = []
    for start in starts:
        stack = [(start, False)]
        while stack:
            position, expanded = stack.pop()
            if position in done:
                continue
            if expanded:
                done.add(position)
                order.append(position)
                continue
            stack.append((position, True))
            for name in reversed(index.reads[position]):
                producer = index.producer.get(name)
                if producer in inside and producer not in done:
                    stack.append((producer, False))
    return order


def _constant(index: ModelIndex, region: LocatedRegion, name: str) -> tuple[onnx.NodeProto, ConstantRecord]:
    """A Constant node that holds a constant of the model, without its output's name, and where it stood."""
    original = index.constant_node(name)
    holder = index.holder(name)
    if original is not None:
        node, record = strip(original, holder.producer[name], holder.twins)
        return node, ConstantRecord(name, None, record)
    place = holder.initializers[name]
    stored = resolved(holder.graph.initializer[place])
    tensor = onnx.TensorProto()
    if is_external(stored):
        contents = region.inlined[name]
        require(contents is not None, f"{region.label}: inlines {name!r}, which lies in another file and was not read")
        tensor.CopyFrom(numpy_helper.from_array(np.asarray(contents)))
        require(tensor.data_type == stored.data_type, f"{region.label}: {name!r} was read as another type than it has")
        if stored.HasField("doc_string"):
            tensor.doc_string = stored.doc_string
        tensor.metadata_props.extend(stored.metadata_props)
    else:
        tensor.CopyFrom(stored)
        tensor.ClearField("name")
    notes = take_notes(tensor)
    return helper.make_node("Constant", [], [""], value=tensor), ConstantRecord(name, place, None, notes)


def value_record(index: ModelIndex, name: str) -> ValueRecord:
    """A value's name and its ``value_info`` entry in the model."""
    if name not in index.infos:
        return ValueRecord(name)
    place = index.infos[name]
    return ValueRecord(name, place, packed(index.graph.value_info[place]))


def _opsets(model: onnx.ModelProto, nodes: Sequence[onnx.NodeProto]) -> list[onnx.OperatorSetIdProto]:
    """The model's versions of the domains that the nodes use; 1 for a domain that it forgot to import."""
    found = {"" if entry.domain in STANDARD_DOMAINS else entry.domain: entry.version for entry in model.opset_import}
    return [helper.make_opsetid(domain, found.get(domain, 1)) for domain in sorted({node.domain for node in nodes})]
