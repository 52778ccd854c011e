"""Fused nodes as the nodes that they stand for, under the names that these had: what ``unfusing`` puts into a model."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field

import onnx
from onnx import helper

from onnxfuse.graph.constants import is_external
from onnxfuse.graph.order import NOTHING, Scope
from onnxfuse.graph.store import resolved
from onnxfuse.rewriting.body import dress, give_notes, strip, take_notes
from onnxfuse.rewriting.index import ModelIndex
from onnxfuse.rewriting.metadata import ConstantRecord, FusedRecord, NodeRecord, ValueRecord, unpacked, unreadable
from onnxfuse.rewriting.names import Names
from onnxfuse.rewriting.origin import first_output


@dataclass
class Restored:
    """What fused nodes turn into, gathered before the model is changed; ``None`` is an unknown place."""

    nodes: list[tuple[int, int | None, onnx.NodeProto]] = field(default_factory=list)
    initializers: list[tuple[int | None, onnx.TensorProto]] = field(default_factory=list)
    infos: list[tuple[int | None, onnx.ValueInfoProto]] = field(default_factory=list)
    constants: set[str] = field(default_factory=set)
    """Names of constants that are in the model again."""
    shared: dict[str, str] = field(default_factory=dict)
    """Values that other fused nodes compute too, by their names in the original: what they are called in the model."""

    def state(self, entry: ValueRecord, name: str) -> None:
        """Put what the file said of a value back, under the name that it has now."""
        if entry.info:
            info = unpacked(entry.info, onnx.ValueInfoProto())
            info.name = name
            self.infos.append((entry.position, info))


def expand(
    index: ModelIndex, fused: Mapping[int, FusedRecord], records: Iterable[FusedRecord], coming: Scope
) -> Restored:
    """What the fused nodes turn into.

    Args:
        records: those of all fused nodes of the graph.
        coming: names of constants that come back into the graphs around it.
    """
    records = list(records)
    common = {record.values[formal].name for record in records for formal in record.again if formal in record.values}
    expansion = _Expansion(index, _Names(index, coming), takers(records), common)
    for position, record in fused.items():
        expansion.add(position, record)
    return expansion.restored


def takers(records: Iterable[FusedRecord]) -> dict[str, tuple[ConstantRecord, ValueRecord | None]]:
    """By name, the record of each constant that knows where it stood: several bodies may hold one constant, and it
    left the model when the last of them was made."""
    return {
        constant.name: (constant, record.values.get(formal))
        for record in records
        for formal, constant in record.constants.items()
        if constant.position is not None or (constant.node is not None and constant.node.position is not None)
    }


class _Names:
    """Names of values that are taken, and constants that a body has given back already."""

    def __init__(self, index: ModelIndex, coming: Scope = NOTHING) -> None:
        """``coming``: constants that come back into the graphs around."""
        self.coming = coming
        layers: list[Container[str]] = [coming]
        here: ModelIndex | None = index
        while here is not None:
            layers += [here.producer, here.inputs, here.outputs, here.initializers]
            layers.append({sparse.values.name for sparse in here.graph.sparse_initializer})
            here = here.around
        self.values = Names(*layers)
        self.nodes = Names({node.name for node in index.nodes})
        self.constants: dict[str, bytes] = {}
        self.shared: dict[tuple[str, bytes], str] = {}
        """Names of values that several fused nodes compute, by their names in the original and what computes them."""


@dataclass(frozen=True)
class _Call:
    """A fused node, its position and what it remembers; ``actuals``: names in the model of the values of its body, by
    the formal ones, as far as they have some."""

    node: onnx.NodeProto
    position: int
    record: FusedRecord
    actuals: dict[str, str]

    def inner(self, formal: str) -> ValueRecord | None:
        """What is remembered of a value that the body computes for itself."""
        return self.record.values.get(formal) if formal not in self.record.constants else None


@dataclass(frozen=True)
class _Expansion:
    """Fused nodes of one graph turned into nodes one after another.

    Attributes:
        takers: the constants that know where they stood: see ``takers``.
        common: values that several fused nodes compute, by their names in the original.
    """

    index: ModelIndex
    names: _Names
    takers: Mapping[str, tuple[ConstantRecord, ValueRecord | None]]
    common: Collection[str]
    restored: Restored = field(default_factory=Restored)

    def add(self, position: int, record: FusedRecord) -> None:
        """Turn one more into its nodes.

        Raises:
            ModelError: its record is not of the function that it calls.
        """
        node = self.index.nodes[position]
        function = self.index.functions[node.op_type]
        _check_fits(node, function, record)
        actuals = dict(zip(function.input, (*node.input, *[""] * len(function.input)), strict=False))
        actuals |= dict(zip(function.output, node.output, strict=False))
        call = _Call(node, position, record, actuals)
        # Without its record a body is nodes alone; with it, the constants that were inlined come first.
        first = len(function.node) - len(record.nodes) if record.nodes else 0
        for place, original in enumerate(function.node):
            notes: NodeRecord | None
            if place >= first:
                notes = record.nodes[place - first] if record.nodes else NodeRecord()
            else:
                notes = self._give_back(call, original)
            if notes is not None:
                self._put(call, original, notes)

    def _give_back(self, call: _Call, held: onnx.NodeProto) -> NodeRecord | None:
        """Name an inlined constant, and put it back where it was an initialiser that left; what is remembered of one
        that has to become a node again."""
        formal = held.output[0]
        own = call.record.constants[formal]
        constant, info = self.takers.get(own.name, (own, None))
        bare = onnx.NodeProto()
        bare.CopyFrom(held)
        bare.ClearField("output")
        contents = bare.SerializeToString(deterministic=True)
        there = constant.name in self.names.coming or _still_there(self.index, constant.name, contents)
        if there or self.names.constants.get(constant.name) == contents:
            call.actuals[formal] = constant.name
            return None
        call.actuals[formal] = name = self.names.values.give(constant.name)
        self.names.constants[name] = contents
        self.restored.constants.add(name)
        if info is not None:
            self.restored.state(info, name)
        if constant.node is None:
            tensor = onnx.TensorProto()
            tensor.CopyFrom(held.attribute[0].t)
            give_notes(tensor, constant.tensor)
            tensor.name = name
            self.restored.initializers.append((constant.position, tensor))
        return constant.node

    def _put(self, call: _Call, original: onnx.NodeProto, notes: NodeRecord) -> None:
        """Put a node of a body back, or, where another fused node computes the same or the model still does, name its
        value as that is called."""
        formal = first_output(original)
        inner = call.inner(formal)
        key = None
        if inner is not None and (notes.stands or inner.name in self.common):
            key = inner.name, _content(original, call.actuals)
            known = self.names.shared.get(key) or (_standing(self.index, *key) if notes.stands else None)
            if known is not None:
                call.actuals[formal] = known
                return
        node = self._named(call, original)
        if key is not None:
            self.names.shared[key] = self.restored.shared[key[0]] = call.actuals[formal]
        dress(node, notes)
        if node.name and not notes.twins:
            node.name = self.names.nodes.give(node.name)
        self.restored.nodes.append((call.position, notes.position, node))

    def _named(self, call: _Call, original: onnx.NodeProto) -> onnx.NodeProto:
        """A node of the body under the names that its values have, or get, in the model."""
        record, actuals = call.record, call.actuals
        node = onnx.NodeProto()
        node.CopyFrom(original)
        for formal in node.output:
            if formal and not actuals.get(formal):
                known = record.values.get(formal)
                stem = f"{call.node.name or call.node.op_type}.{formal}" if known is None else known.name
                actuals[formal] = self.names.values.give(stem)
            inner = call.inner(formal)
            if inner is not None:
                self.restored.state(inner, actuals[formal])
        node.input[:] = [actuals[formal] if formal else "" for formal in node.input]
        node.output[:] = [actuals[formal] if formal else "" for formal in node.output]
        return node


def _check_fits(call: onnx.NodeProto, function: onnx.FunctionProto, record: FusedRecord) -> None:
    """Check that a record is of this body: what follows takes that for granted.

    Raises:
        ModelError: somebody changed one of them since.
    """
    inlined = function.node[:len(function.node) - len(record.nodes)] if record.nodes else ()
    constants = [record.constants.get(node.output[0]) if len(node.output) == 1 else None for node in inlined]
    fits = (
        len(record.nodes) <= len(function.node)
        and len(call.input) <= len(function.input) and len(call.output) <= len(function.output)
        and all(
            node.op_type == "Constant" and entry is not None and (
                entry.node is not None or [each.type for each in node.attribute] == [onnx.AttributeProto.TENSOR])
            for node, entry in zip(inlined, constants, strict=True)
        )
    )
    if not fits:
        raise unreadable(f"node {call.name!r}", "it does not fit the function that the node calls")


def _content(node: onnx.NodeProto, actuals: Mapping[str, str]) -> bytes:
    """What a node of a body computes: the same for two nodes that give the same result."""
    bare, _ = strip(node, 0)
    bare.ClearField("output")
    bare.input[:] = [actuals.get(formal, formal) if formal else "" for formal in bare.input]
    return bytes(bare.SerializeToString(deterministic=True))


def _standing(index: ModelIndex, name: str, content: bytes) -> str | None:
    """The name, where the model still has a node that computes just that under it."""
    position = index.producer.get(name)
    if position is None or _content(index.nodes[position], {}) != content:
        return None
    return name


def _still_there(index: ModelIndex, name: str, contents: bytes) -> bool:
    """Whether the model still has a constant of this name and contents; what lies in another file is not read."""
    node = index.constant_node(name)
    if node is not None:
        bare, _ = strip(node, 0)
        bare.ClearField("output")
        return bool(bare.SerializeToString(deterministic=True) == contents)
    holder = index.holder(name)
    if name not in holder.initializers:
        return False
    stored = resolved(holder.graph.initializer[holder.initializers[name]])
    if is_external(stored):
        return True
    tensor = onnx.TensorProto()
    tensor.CopyFrom(stored)
    take_notes(tensor)
    same = helper.make_node("Constant", [], [], value=tensor)
    return bool(same.SerializeToString(deterministic=True) == contents)
