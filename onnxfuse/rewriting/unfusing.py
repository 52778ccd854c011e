"""The way back: bodies in the place of fused nodes, under the original names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

import onnx
from onnx import helper

from onnxfuse.errors import ModelError
from onnxfuse.graph.model import Place
from onnxfuse.graph.order import NOTHING, Scope, all_nodes, graphs_of
from onnxfuse.lowering import launch
from onnxfuse.rewriting.body import dress, give_notes, strip, take_notes
from onnxfuse.rewriting.index import ModelIndex, graph_at, notes_of
from onnxfuse.rewriting.mark import forget_optimised
from onnxfuse.rewriting.metadata import (
    IR_VERSION,
    KEY,
    ConstantRecord,
    FusedRecord,
    IdleRecord,
    ModelRecord,
    NodeRecord,
    ValueRecord,
    to_json,
    unpacked,
    unreadable,
)
from onnxfuse.rewriting.names import Names
from onnxfuse.rewriting.order import Sortable, in_order, is_sorted, rearrange
from onnxfuse.rewriting.origin import Origin, first_output
from onnxfuse.rewriting.sizes import unfold


@dataclass
class _Restored:
    """What fused nodes turn into, gathered before the model is changed; ``None`` is an unknown place."""

    nodes: list[tuple[int, int | None, onnx.NodeProto]] = field(default_factory=list)
    initializers: list[tuple[int | None, onnx.TensorProto]] = field(default_factory=list)
    infos: list[tuple[int | None, onnx.ValueInfoProto]] = field(default_factory=list)
    constants: set[str] = field(default_factory=set)
    """Names of constants that are in the model again."""
    shared: dict[str, str] = field(default_factory=dict)
    """Values that other fused nodes compute too, by their names in the original: what they are called in the model."""


def unfuse(
    model: onnx.ModelProto, only: Collection[str] | None = None, *, folded: bool = False
) -> onnx.ModelProto:
    """The model with fused nodes replaced by the nodes they stand for, in its main graph and in bodies.

    A model that was only fused comes back as it was, but for inlined constants that lay in another file: they are in
    the model now.  In a model that was edited since, what the edit left of the old names and places is kept.
    A model without fused nodes comes back unchanged.

    Args:
        only: names of the fused nodes to put back, all of them where None.  Their nodes come where the fused node
            stood; with the rest put back later, the whole original comes back as if it were in one go.
        folded: leave arithmetic on sizes folded, as it was when the regions were planned; it is put back with the
            last fused node else.

    Raises:
        ModelError: the records in the model were written by another release or are damaged; a name in ``only`` is
            not that of a fused node.
    """
    parts = _parts(model, only)
    chosen = {place for place, part in parts.items() if part.chosen}
    around_chosen = {inner[:depth] for inner in chosen for depth in range(len(inner) + 1)}
    marked = {place for place in around_chosen if any(entry.key == KEY for entry in notes_of(model, place))}
    back = {place: frozenset(_takers(part.chosen.values())).union(entry.name for entry in part.origin.record.idle)
            for place, part in parts.items()}
    above = _above_fused(parts)
    result = onnx.ModelProto()
    result.CopyFrom(model)
    # To put nodes back moves others, and with them the bodies inside: the innermost first.
    for place in sorted(chosen | marked, key=lambda place: (-len(place), place)):
        index, origin, wanted = (part := parts[place]).index, part.origin, part.chosen
        idle = frozenset(entry.name for entry in origin.record.idle)
        coming = Scope(idle, *(back[place[:depth]] for depth in range(len(place))))
        graph = graph_at(result, place)
        part.restored = restored = _expand(index, wanted, origin.fused.values(), coming)
        _wake(restored, origin.record.idle)
        if len(wanted) < len(origin.fused):
            left = {place: record for place, record in origin.fused.items() if place not in wanted}
            _forget(graph, restored, left, index.functions)
        _place_nodes(graph, index, origin, wanted, restored)
        _place_weights(graph, origin, restored)
        _place_infos(graph, index, origin, wanted, restored)
        if place:
            _remember(graph.metadata_props, part, len(wanted) == len(origin.fused) and place not in above)
    if chosen:
        last = all(len(part.chosen) == len(part.origin.fused) for part in parts.values())
        _remember(result.metadata_props, parts[()], last)
        _unmark(result, parts)
        forget_optimised(result)
    if not folded and (only is None or (chosen and last)):
        unfold(result)
    return result


def _above_fused(parts: Mapping[Place, _Part]) -> set[Place]:
    """Graphs with a body in them that still holds a fused node."""
    return {inner[:depth] for inner, part in parts.items() if len(part.chosen) < len(part.origin.fused)
            for depth in range(len(inner))}


def _wake(restored: _Restored, idle: Sequence[IdleRecord]) -> None:
    """Constants that left the graph because only fused nodes in bodies held them."""
    for entry in idle:
        restored.constants.add(entry.name)
        if entry.node:
            restored.nodes.append((-1, entry.position, unpacked(entry.node, onnx.NodeProto())))
        else:
            restored.initializers.append((entry.position, unpacked(entry.tensor, onnx.TensorProto())))
        if entry.info:
            restored.infos.append((entry.place, unpacked(entry.info, onnx.ValueInfoProto())))


@dataclass
class _Part:
    """One graph of the model: where it came from, the fused nodes to put back by position, and what they turn into."""

    index: ModelIndex
    origin: Origin
    chosen: Mapping[int, FusedRecord]
    restored: _Restored = field(default_factory=_Restored)


def _parts(model: onnx.ModelProto, only: Collection[str] | None) -> dict[Place, _Part]:
    """Every graph of the model, with the records of the fused nodes to put back."""
    places = [() if body is None else body.place for body, _ in graphs_of(model)]
    known = ModelIndex.each(model, places)
    indexes = [known[place] for place in places]
    origins = [Origin.of(index) for index in indexes]
    names = {
        index.nodes[position].name
        for index, origin in zip(indexes, origins, strict=True) for position in origin.fused
    }
    for name in only or ():
        if name not in names:
            near = get_close_matches(name, sorted(names), 1)
            raise ModelError(
                f"No fused node is called {name!r}.",
                remedy=f"Did you mean {near[0]!r}?" if near else "`onnxfuse report FILE --json` lists the fused nodes.",
            )
    return {
        index.place: _Part(index, origin, {
            position: record for position, record in origin.fused.items()
            if only is None or index.nodes[position].name in only
        })
        for index, origin in zip(indexes, origins, strict=True)
    }


def _forget(graph: onnx.GraphProto, restored: _Restored, left: Mapping[int, FusedRecord],
            functions: Mapping[str, onnx.FunctionProto]) -> None:
    """Let the fused nodes that stay no longer claim the places of what is in the model again: constants, and nodes that
    others held too."""
    for position, record in left.items():
        back = {formal for formal, constant in record.constants.items() if constant.name in restored.constants}
        shared = {formal for formal, value in record.values.items()
                  if formal not in record.constants and value.name in restored.shared}
        if not back and not shared:
            continue
        constants = {formal: _unplaced(entry) if formal in back else entry
                     for formal, entry in record.constants.items()}
        values = {formal: ValueRecord(restored.shared[entry.name]) if formal in shared else entry
                  for formal, entry in record.values.items() if formal not in back}
        made = functions[graph.node[position].op_type].node[-len(record.nodes):]
        nodes = tuple(replace(notes, stands=notes.stands or not shared.isdisjoint(node.output))
                      for notes, node in zip(record.nodes, made, strict=True))
        text = to_json(replace(record, nodes=nodes, constants=constants, values=values))
        attribute = next(entry for entry in graph.node[position].attribute if entry.name == KEY)
        attribute.s = text.encode()


def _unplaced(constant: ConstantRecord) -> ConstantRecord:
    node = None if constant.node is None else replace(constant.node, position=None)
    return replace(constant, position=None, node=node)


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



def _expand(
    index: ModelIndex, fused: Mapping[int, FusedRecord], records: Iterable[FusedRecord], coming: Scope
) -> _Restored:
    """What the fused nodes turn into.

    Args:
        records: those of all fused nodes of the graph.
        coming: names of constants that come back into the graphs around it.
    """
    names = _Names(index, coming)
    restored = _Restored()
    records = list(records)
    takers = _takers(records)
    common = {record.values[formal].name for record in records for formal in record.again if formal in record.values}
    for position, record in fused.items():
        call = index.nodes[position]
        function = index.functions[call.op_type]
        _check_fits(call, function, record)
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
            formal = first_output(original)
            inner = record.values.get(formal) if formal not in record.constants else None
            key = None
            if inner is not None and (notes.stands or inner.name in common):
                key = inner.name, _content(original, actuals)
                known = names.shared.get(key) or (_standing(index, *key) if notes.stands else None)
                if known is not None:
                    actuals[formal] = known
                    continue
            node = _node(call, record, original, actuals, names, restored)
            if key is not None:
                names.shared[key] = restored.shared[key[0]] = actuals[formal]
            dress(node, notes)
            if node.name and not notes.twins:
                node.name = names.nodes.give(node.name)
            restored.nodes.append((position, notes.position, node))
    return restored


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
    there = constant.name in names.coming or _still_there(index, constant.name, contents)
    if there or names.constants.get(constant.name) == contents:
        actuals[formal] = constant.name
        return True
    actuals[formal] = name = names.values.give(constant.name)
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
    holder = index.holder(name)
    if name not in holder.initializers:
        return False
    stored = holder.graph.initializer[holder.initializers[name]]
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
            stem = f"{call.name or call.op_type}.{formal}" if inner is None else inner.name
            actuals[formal] = names.values.give(stem)
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
    graph: onnx.GraphProto, index: ModelIndex, origin: Origin, chosen: Collection[int], restored: _Restored
) -> None:
    """In the original order where that is known, of all nodes, and still sound, else each body where its fused node
    stood."""
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
    if len(set(old.values())) == len(kept) and is_sorted([nodes[item] for item in sorted(kept, key=old.__getitem__)]):
        for item in kept:
            keys[item] = (old[item], 0)
    else:
        # What several fused nodes held may come after a reader where the other one was put back first.
        for place, item in enumerate(in_order(nodes, sorted(kept, key=local.__getitem__))):
            keys[item] = (place, 0)
    rearrange(graph.node, keys)
    del graph.node[len(kept) :]


def _place_weights(graph: onnx.GraphProto, origin: Origin, restored: _Restored) -> None:
    places = [origin.initializers.get(place) for place in range(len(graph.initializer))]
    for place, tensor in restored.initializers:
        graph.initializer.append(tensor)
        places.append(place)
    _settle(graph.initializer, places)


def _place_infos(
    graph: onnx.GraphProto, index: ModelIndex, origin: Origin, chosen: Mapping[int, FusedRecord], restored: _Restored
) -> None:
    """Those of the original in its order, then those of fused nodes that stay."""
    added = {name for record in chosen.values() for name in record.added}
    final: list[int | None] = []
    places = (*origin.infos.values(), *(place for place, _ in restored.infos))
    later = 1 + max((place for place in places if place is not None), default=0)
    for place, info in reversed(list(enumerate(index.graph.value_info))):
        if info.name in added:
            del graph.value_info[place]
        else:
            final.append(origin.infos[place] if place in origin.infos else later + place)
    final.reverse()
    for wanted, info in restored.infos:
        graph.value_info.append(info)
        final.append(wanted)
    _settle(graph.value_info, final)


def _settle(items: Sortable, places: Sequence[int | None]) -> None:
    """Sort into the original places where all are known and distinct."""
    known = [place for place in places if place is not None]
    if len(set(known)) == len(places):
        rearrange(items, known)


def _remember(notes: Any, part: _Part, last: bool) -> None:
    """Remove our record of a graph with the ``last`` fused node, else note there where the restored nodes stood.

    The model's own record stays until the last fused node has left the bodies too.
    """
    for place in reversed(range(len(notes))):
        if notes[place].key == KEY:
            if last:
                del notes[place]
            else:
                notes[place].value = to_json(_with_places(part.origin.record, part.restored))


def _unmark(result: onnx.ModelProto, parts: Mapping[Place, _Part]) -> None:
    """Remove functions that nothing calls any more and our import of the domain; restore the IR version."""
    record = parts[()].origin.record
    expanded = {part.index.nodes[position].op_type for part in parts.values() for position in part.chosen}
    calls = _calls([*result.graph.node, *(node for entry in result.functions for node in entry.node)])
    for place in reversed(range(len(result.functions))):
        function = result.functions[place]
        if function.domain == launch.DOMAIN and function.name in expanded:
            own = _calls(function.node)
            if calls[function.name] == own[function.name]:
                calls.subtract(own)
                del result.functions[place]
    left = any(count > 0 for count in calls.values())
    for place in reversed(range(len(result.opset_import))):
        if record.opset_added and not left and result.opset_import[place].domain == launch.DOMAIN:
            del result.opset_import[place]
    if result.ir_version == max(record.ir_version, IR_VERSION) and len(result.functions) <= record.functions:
        result.ir_version = record.ir_version
        held = {tensor.name for tensor in result.graph.initializer}
        for place, text in record.inputs:
            info = unpacked(text, onnx.ValueInfoProto())
            if info.name in held and place <= len(result.graph.input):
                result.graph.input.insert(place, info)


def _calls(nodes: Iterable[onnx.NodeProto]) -> Counter[str]:
    """How often nodes, and those in their subgraphs, call each operator of our domain."""
    return Counter(node.op_type for node in all_nodes(nodes) if node.domain == launch.DOMAIN)


def _with_places(record: ModelRecord, restored: _Restored) -> ModelRecord:
    """The record with the places of the nodes that were put back, which may stand elsewhere now."""
    places = {first_output(node): place for _, place, node in restored.nodes}
    known = {name: place for name, place in places.items() if name and place is not None}
    nodes = record.nodes if known == places else None
    return replace(record, moved={**record.moved, **known}, nodes=nodes, idle=())
