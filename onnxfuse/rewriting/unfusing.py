"""The way back: bodies in the place of fused nodes, under the original names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

import onnx

from onnxfuse.errors import ModelError
from onnxfuse.graph.model import Place
from onnxfuse.graph.order import Scope, all_nodes, graphs_of
from onnxfuse.lowering import launch
from onnxfuse.rewriting.biases import rejoin
from onnxfuse.rewriting.constants import narrow
from onnxfuse.rewriting.dequantised import rejoin_dequantised
from onnxfuse.rewriting.expanding import Restored, expand, takers
from onnxfuse.rewriting.index import ModelIndex, graph_at, notes_of
from onnxfuse.rewriting.layouts import put_straight
from onnxfuse.rewriting.mark import forget_optimised
from onnxfuse.rewriting.metadata import (
    IR_VERSION,
    KEY,
    ConstantRecord,
    FusedRecord,
    IdleRecord,
    ModelRecord,
    ValueRecord,
    to_json,
    unpacked,
)
from onnxfuse.rewriting.order import Sortable, in_order, is_sorted, rearrange
from onnxfuse.rewriting.origin import Origin, first_output
from onnxfuse.rewriting.provenance import forget_plan
from onnxfuse.rewriting.sizes import unfold
from onnxfuse.rewriting.weights import without_weights


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
        folded: leave arithmetic on sizes folded and biases behind their convolutions, as it was when the regions were
            planned; they are put back with the last fused node else.

    Raises:
        ModelError: the records in the model were written by another release or are damaged; a name in ``only`` is
            not that of a fused node.
    """
    parts = _parts(model, only)
    chosen = {place for place, part in parts.items() if part.chosen}
    around_chosen = {inner[:depth] for inner in chosen for depth in range(len(inner) + 1)}
    marked = {place for place in around_chosen if any(entry.key == KEY for entry in notes_of(model, place))}
    back = {place: frozenset(takers(part.chosen.values())).union(entry.name for entry in part.origin.record.idle)
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
        part.restored = restored = expand(index, wanted, origin.fused.values(), coming)
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
        forget_plan(result)
    if not folded and (only is None or (chosen and last)):
        for undo in (without_weights, put_straight, rejoin, rejoin_dequantised, narrow, unfold):
            undo(result)
    return result


def _above_fused(parts: Mapping[Place, _Part]) -> set[Place]:
    """Graphs with a body in them that still holds a fused node."""
    return {inner[:depth] for inner, part in parts.items() if len(part.chosen) < len(part.origin.fused)
            for depth in range(len(inner))}


def _wake(restored: Restored, idle: Sequence[IdleRecord]) -> None:
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
    restored: Restored = field(default_factory=Restored)


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
                usage=True,
            )
    return {
        index.place: _Part(index, origin, {
            position: record for position, record in origin.fused.items()
            if only is None or index.nodes[position].name in only
        })
        for index, origin in zip(indexes, origins, strict=True)
    }


def _forget(graph: onnx.GraphProto, restored: Restored, left: Mapping[int, FusedRecord],
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


def _place_nodes(
    graph: onnx.GraphProto, index: ModelIndex, origin: Origin, chosen: Collection[int], restored: Restored
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


def _place_weights(graph: onnx.GraphProto, origin: Origin, restored: Restored) -> None:
    places = [origin.initializers.get(place) for place in range(len(graph.initializer))]
    for place, tensor in restored.initializers:
        graph.initializer.append(tensor)
        places.append(place)
    _settle(graph.initializer, places)


def _place_infos(
    graph: onnx.GraphProto, index: ModelIndex, origin: Origin, chosen: Mapping[int, FusedRecord], restored: Restored
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


def _with_places(record: ModelRecord, restored: Restored) -> ModelRecord:
    """The record with the places of the nodes that were put back, which may stand elsewhere now."""
    places = {first_output(node): place for _, place, node in restored.nodes}
    known = {name: place for name, place in places.items() if name and place is not None}
    nodes = record.nodes if known == places else None
    return replace(record, moved={**record.moved, **known}, nodes=nodes, idle=())
