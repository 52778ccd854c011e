"""The way back: bodies in the place of fused nodes, under the original names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches

import onnx
from onnx import helper

from onnxfuse.errors import ModelError
from onnxfuse.lowering import launch
from onnxfuse.rewriting.body import dress, give_notes, strip, take_notes
from onnxfuse.rewriting.index import ModelIndex, all_nodes, reads_of
from onnxfuse.rewriting.metadata import (
    IR_VERSION,
    KEY,
    ConstantRecord,
    FusedRecord,
    ModelRecord,
    NodeRecord,
    ValueRecord,
    to_json,
    unpacked,
)
from onnxfuse.rewriting.names import unlike
from onnxfuse.rewriting.order import Sortable, rearrange
from onnxfuse.rewriting.origin import Origin, first_output


@dataclass
class _Restored:
    """What fused nodes turn into, gathered before the model is changed; ``None`` is an unknown place."""

    nodes: list[tuple[int, int | None, onnx.NodeProto]] = field(default_factory=list)
    initializers: list[tuple[int | None, onnx.TensorProto]] = field(default_factory=list)
    infos: list[tuple[int | None, onnx.ValueInfoProto]] = field(default_factory=list)
    constants: set[str] = field(default_factory=set)
    """Names of constants that are in the model again."""


def unfuse(model: onnx.ModelProto, only: Collection[str] | None = None) -> onnx.ModelProto:
    """The model with fused nodes of its main graph replaced by the nodes they stand for.

    A model that was only fused comes back as it was, but for inlined constants that lay in another file: they are in
    the model now.  In a model that was edited since, what the edit left of the old names and places is kept.
    A model without fused nodes comes back unchanged.

    Args:
        only: names of the fused nodes to put back, all of them where None.  Their nodes come where the fused node
            stood; with the rest put back later, the whole original comes back as if it were in one go.

    Raises:
        ModelError: the records in the model were written by another release or are damaged; a name in ``only`` is
            not that of a fused node.
    """
    index = ModelIndex.of(model)
    origin = Origin.of(index)
    chosen = _chosen(index, origin, only)
    result = onnx.ModelProto()
    result.CopyFrom(model)
    if not chosen:
        return result
    restored = _expand(index, chosen, origin.fused.values())
    if len(chosen) < len(origin.fused):
        _forget(result, restored, {place: record for place, record in origin.fused.items() if place not in chosen})
    _place_nodes(result, index, origin, chosen, restored)
    _place_weights(result, origin, restored)
    _place_infos(result, index, origin, chosen, restored)
    _unmark(result, index, origin, chosen, restored)
    return result


def _chosen(index: ModelIndex, origin: Origin, only: Collection[str] | None) -> Mapping[int, FusedRecord]:
    """Records of the fused nodes to put back, by position."""
    if only is None:
        return origin.fused
    names = {index.nodes[position].name for position in origin.fused}
    for name in only:
        if name not in names:
            near = get_close_matches(name, sorted(names), 1)
            raise ModelError(
                f"No fused node is called {name!r}.",
                remedy=f"Did you mean {near[0]!r}?" if near else "`onnxfuse report FILE --json` lists the fused nodes.",
            )
    return {position: record for position, record in origin.fused.items() if index.nodes[position].name in only}


def _forget(result: onnx.ModelProto, restored: _Restored, left: Mapping[int, FusedRecord]) -> None:
    """Let the fused nodes that stay no longer claim the places of constants that are in the model again."""
    for position, record in left.items():
        back = {formal for formal, constant in record.constants.items() if constant.name in restored.constants}
        if not back:
            continue
        constants = {formal: _unplaced(entry) if formal in back else entry
                     for formal, entry in record.constants.items()}
        values = {formal: entry for formal, entry in record.values.items() if formal not in back}
        text = to_json(replace(record, constants=constants, values=values))
        attribute = next(entry for entry in result.graph.node[position].attribute if entry.name == KEY)
        attribute.s = text.encode()


def _unplaced(constant: ConstantRecord) -> ConstantRecord:
    node = None if constant.node is None else replace(constant.node, position=None)
    return replace(constant, position=None, node=node)


class _Names:
    """Names of values that are taken, and constants that a body has given back already."""

    def __init__(self, index: ModelIndex) -> None:
        graph = index.model.graph
        self.values = {*index.producer, *index.inputs, *index.outputs, *index.initializers}
        self.values |= {sparse.values.name for sparse in graph.sparse_initializer}
        self.nodes = {node.name for node in index.nodes}
        self.constants: dict[str, bytes] = {}

    def value(self, stem: str) -> str:
        name = unlike(stem, self.values)
        self.values.add(name)
        return name

    def node(self, stem: str) -> str:
        name = unlike(stem, self.nodes)
        self.nodes.add(name)
        return name


def _expand(index: ModelIndex, fused: Mapping[int, FusedRecord], records: Iterable[FusedRecord]) -> _Restored:
    """What the fused nodes turn into; ``records`` are those of all fused nodes of the model."""
    functions = {entry.name: entry for entry in index.model.functions if entry.domain == launch.DOMAIN}
    names = _Names(index)
    restored = _Restored()
    takers = _takers(records)
    for position, record in fused.items():
        call = index.nodes[position]
        function = functions[call.op_type]
        actuals = dict(zip(function.input, (*call.input, *[""] * len(function.input)), strict=False))
        actuals |= dict(zip(function.output, call.output, strict=False))
        # Without its record a body is nodes alone; with it, the constants that were inlined come first.
        first = len(function.node) - len(record.nodes) if record.nodes else 0
        for place, original in enumerate(function.node):
            if place >= first:
                notes = record.nodes[place - first] if record.nodes else NodeRecord()
            else:
                name = record.constants[original.output[0]].name
                constant, info = takers.get(name, (record.constants[original.output[0]], None))
                if _give_back(index, names, restored, constant, info, original, actuals):
                    continue
                if info is not None:
                    _restore_info(restored, info, actuals[original.output[0]])
                notes = constant.node or NodeRecord()
            node = _node(call, record, original, actuals, names, restored)
            dress(node, notes)
            if node.name:
                node.name = names.node(node.name)
            restored.nodes.append((position, notes.position, node))
    return restored


def _takers(records: Iterable[FusedRecord]) -> dict[str, tuple[ConstantRecord, ValueRecord | None]]:
    """By name, the record of each constant that knows where it stood: several bodies may hold one constant, and it
    left the model when the last of them was made."""
    return {
        constant.name: (constant, record.values.get(formal))
        for record in records
        for formal, constant in record.constants.items()
        if constant.position is not None or (constant.node is not None and constant.node.position is not None)
    }


def _give_back(
    index: ModelIndex,
    names: _Names,
    restored: _Restored,
    constant: ConstantRecord,
    info: ValueRecord | None,
    held: onnx.NodeProto,
    actuals: dict[str, str],
) -> bool:
    """Name an inlined constant, and put it back where it was an initialiser that left; False for one that has to
    become a node again."""
    formal = held.output[0]
    bare = onnx.NodeProto()
    bare.CopyFrom(held)
    bare.ClearField("output")
    contents = bare.SerializeToString(deterministic=True)
    if names.constants.get(constant.name) == contents or _still_there(index, constant.name, contents):
        actuals[formal] = constant.name
        return True
    actuals[formal] = name = names.value(constant.name)
    names.constants[name] = contents
    restored.constants.add(name)
    if constant.node is not None:
        return False
    tensor = onnx.TensorProto()
    tensor.CopyFrom(held.attribute[0].t)
    give_notes(tensor, constant.tensor)
    tensor.name = name
    restored.initializers.append((constant.position, tensor))
    if info is not None:
        _restore_info(restored, info, name)
    return True


def _still_there(index: ModelIndex, name: str, contents: bytes) -> bool:
    """Whether the model still has a constant of this name and contents; what lies in another file is not read."""
    node = index.constant_node(name)
    if node is not None:
        bare, _ = strip(node, 0)
        bare.ClearField("output")
        return bool(bare.SerializeToString(deterministic=True) == contents)
    if name not in index.initializers:
        return False
    stored = index.model.graph.initializer[index.initializers[name]]
    if stored.data_location == onnx.TensorProto.EXTERNAL:
        return True
    tensor = onnx.TensorProto()
    tensor.CopyFrom(stored)
    take_notes(tensor)
    same = helper.make_node("Constant", [], [], value=tensor)
    return bool(same.SerializeToString(deterministic=True) == contents)


def _node(
    call: onnx.NodeProto,
    record: FusedRecord,
    original: onnx.NodeProto,
    actuals: dict[str, str],
    names: _Names,
    restored: _Restored,
) -> onnx.NodeProto:
    """A node of the body under the names that its values have, or get, in the model."""
    node = onnx.NodeProto()
    node.CopyFrom(original)
    for formal in node.output:
        if formal and not actuals.get(formal):
            inner = record.values.get(formal)
            actuals[formal] = names.value(f"{call.name or call.op_type}.{formal}" if inner is None else inner.name)
        if formal in record.values and formal not in record.constants:
            _restore_info(restored, record.values[formal], actuals[formal])
    node.input[:] = [actuals[formal] if formal else "" for formal in node.input]
    node.output[:] = [actuals[formal] if formal else "" for formal in node.output]
    return node


def _restore_info(restored: _Restored, entry: ValueRecord, name: str) -> None:
    if entry.info:
        info = unpacked(entry.info, onnx.ValueInfoProto())
        info.name = name
        restored.infos.append((entry.position, info))


def _place_nodes(
    result: onnx.ModelProto, index: ModelIndex, origin: Origin, chosen: Collection[int], restored: _Restored
) -> None:
    """In the original order where that is known, of all nodes, and still sound, else each body where its fused node
    stood."""
    graph = result.graph
    places = [origin.nodes.get(position) for position in range(len(index.nodes))]  # None for fused nodes
    local: list[tuple[int, int]] = [(position, 0) for position in range(len(index.nodes))]
    for number, (position, place, node) in enumerate(restored.nodes):
        graph.node.append(node)
        places.append(place)
        local.append((position, number + 1))
    kept = [item for item in range(len(local)) if item not in chosen]
    last = len(local)
    old = {item: place for item in kept if (place := places[item]) is not None}
    nodes = list(graph.node)
    keys = [(last, 0)] * last
    if len(set(old.values())) == len(kept) and _sorted([nodes[item] for item in sorted(kept, key=old.__getitem__)]):
        for item in kept:
            keys[item] = (old[item], 0)
    else:
        for item in kept:
            keys[item] = local[item]
    rearrange(graph.node, keys)
    del graph.node[len(kept) :]


def _sorted(nodes: Sequence[onnx.NodeProto]) -> bool:
    """Whether every node comes after those that compute what it reads."""
    later = {name for node in nodes for name in node.output if name}
    for node in nodes:
        if any(name in later for name in reads_of(node)):
            return False
        later.difference_update(node.output)
    return True


def _place_weights(result: onnx.ModelProto, origin: Origin, restored: _Restored) -> None:
    places = [origin.initializers.get(place) for place in range(len(result.graph.initializer))]
    for place, tensor in restored.initializers:
        result.graph.initializer.append(tensor)
        places.append(place)
    _settle(result.graph.initializer, places)


def _place_infos(
    result: onnx.ModelProto, index: ModelIndex, origin: Origin, chosen: Mapping[int, FusedRecord], restored: _Restored
) -> None:
    """Those of the original in its order, then those of fused nodes that stay."""
    added = {name for record in chosen.values() for name in record.added}
    final: list[int | None] = []
    places = (*origin.infos.values(), *(place for place, _ in restored.infos))
    later = 1 + max((place for place in places if place is not None), default=0)
    for place, info in reversed(list(enumerate(index.model.graph.value_info))):
        if info.name in added:
            del result.graph.value_info[place]
        else:
            final.insert(0, origin.infos[place] if place in origin.infos else later + place)
    for wanted, info in restored.infos:
        result.graph.value_info.append(info)
        final.append(wanted)
    _settle(result.graph.value_info, final)


def _settle(items: Sortable, places: Sequence[int | None]) -> None:
    """Sort into the original places where all are known and distinct."""
    known = [place for place in places if place is not None]
    if len(set(known)) == len(places):
        rearrange(items, known)


def _unmark(
    result: onnx.ModelProto, index: ModelIndex, origin: Origin, chosen: Collection[int], restored: _Restored
) -> None:
    """Remove functions that nothing calls any more, our import of the domain, our record; restore the IR version.

    Where fused nodes stay, so do the import, the version and the record, which then says where the restored stood.
    """
    record = origin.record
    expanded = {index.nodes[position].op_type for position in chosen}
    for place in reversed(range(len(result.functions))):
        function = result.functions[place]
        others = [node for i, entry in enumerate(result.functions) if i != place for node in entry.node]
        if function.domain == launch.DOMAIN and function.name in expanded:
            calls = all_nodes(iter([*result.graph.node, *others]))
            if not any(node.domain == launch.DOMAIN and node.op_type == function.name for node in calls):
                del result.functions[place]
    nodes = all_nodes(iter([*result.graph.node, *(node for entry in result.functions for node in entry.node)]))
    left = any(node.domain == launch.DOMAIN for node in nodes)
    for place in reversed(range(len(result.opset_import))):
        if record.opset_added and not left and result.opset_import[place].domain == launch.DOMAIN:
            del result.opset_import[place]
    if result.ir_version == max(record.ir_version, IR_VERSION) and not result.functions:
        result.ir_version = record.ir_version
        held = {tensor.name for tensor in result.graph.initializer}
        for place, text in record.inputs:
            info = unpacked(text, onnx.ValueInfoProto())
            if info.name in held and place <= len(result.graph.input):
                result.graph.input.insert(place, info)
    for place in reversed(range(len(result.metadata_props))):
        if result.metadata_props[place].key == KEY:
            if len(chosen) < len(origin.fused):
                result.metadata_props[place].value = to_json(_with_places(record, restored))
            else:
                del result.metadata_props[place]


def _with_places(record: ModelRecord, restored: _Restored) -> ModelRecord:
    """The record with the places of the nodes that were put back, which may stand elsewhere now."""
    places = {first_output(node): place for _, place, node in restored.nodes}
    known = {name: place for name, place in places.items() if name and place is not None}
    return replace(record, moved={**record.moved, **known}, nodes=record.nodes if known == places else None)
