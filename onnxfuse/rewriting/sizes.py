"""Folded arithmetic on sizes into a copy of the model, and back.

    the model ─ fold ─▶ constants for operands, equal values read once, unread nodes gone ─▶ fused as if it were loaded
        ▲                                                                                          │
        └──────────────────── unfold: what the model's record says was there ◀──── unfuse ─────────┘

The record is a metadata property of its own, so that the records of fused nodes speak of the folded model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnxfuse.folding import Folding, decide, decided
from onnxfuse.graph import LoadedModel
from onnxfuse.graph.constants import is_external, tensor_bytes
from onnxfuse.rewriting.branches import SMALL_BYTES, BranchRecord, Entry, with_branches, without_branches
from onnxfuse.rewriting.form_record import form_record, may_change, note_form
from onnxfuse.rewriting.index import ModelIndex, reads_of
from onnxfuse.rewriting.metadata import packed, unpacked
from onnxfuse.rewriting.names import Names, value_names
from onnxfuse.rewriting.order import put_back, rearrange, sort_nodes
from onnxfuse.rewriting.origin import first_output
from onnxfuse.rewriting.properties import forget_property

VERSION = 1
KEY = "onnxfuse.sizes"
"""Name of the model's metadata property."""


@dataclass(frozen=True)
class SizesRecord:
    """What a model had before arithmetic on its sizes was folded.

    Attributes:
        counts: numbers of nodes, initialisers and ``value_info`` entries.
        nodes, initializers, infos: those that left.
        operands: node (by its first output), place, the name that was read and the one that is read now.
        attributes: node (by its first output), place, and an attribute that left, as base64 protobuf.
        changed: nodes (by their first output) that became others, as base64 protobuf.
        added: names of initialisers that are new.
        order: of the nodes that stayed, where each had stood among them; () where all stand as they did.
        branches: what went before all that with Ifs that sizes decide; None where none did.
    """

    counts: tuple[int, int, int]
    nodes: tuple[Entry, ...] = ()
    initializers: tuple[Entry, ...] = ()
    infos: tuple[Entry, ...] = ()
    operands: tuple[tuple[str, int, str, str], ...] = ()
    attributes: tuple[tuple[str, int, str], ...] = ()
    changed: tuple[tuple[str, str], ...] = ()
    added: tuple[str, ...] = ()
    order: tuple[int, ...] = ()
    branches: BranchRecord | None = None

    @property
    def replaced(self) -> int:
        """How many operands read something else now, and values became constants."""
        computed = {name for node in self.removed for name in node.output}
        return len(self.operands) + len(self.changed) + len(computed.intersection(self.added))

    @property
    def removed(self) -> tuple[onnx.NodeProto, ...]:
        """The nodes that left."""
        entries = (*(() if self.branches is None else self.branches.nodes), *self.nodes)
        return tuple(unpacked(text, onnx.NodeProto()) for _, text in entries)


def fold(loaded: LoadedModel) -> LoadedModel:
    """The model with its arithmetic on sizes folded, and the branch taken in the place of each If that sizes decide;
    the same where no node would go, or onnxfuse has been over it.

    Raises:
        ModelError: a small constant cannot be read.
    """
    if not _is_foldable(loaded.proto):
        return loaded
    found = with_branches(loaded.proto, decided(loaded))
    model, branches = (loaded.proto, None) if found is None else found
    folding = decide(replace(loaded, proto=model))
    if not folding.removed:
        folding = Folding()
    if branches is None and not folding.removed:
        return loaded
    return replace(loaded, proto=_folded(model, folding, branches))


def _is_foldable(model: onnx.ModelProto) -> bool:
    """Whether onnxfuse has not been over the model, and its initialisers are constants unless they are inputs."""
    return may_change(model) and sizes_record(model) is None


def _folded(model: onnx.ModelProto, folding: Folding, branches: BranchRecord | None) -> onnx.ModelProto:
    """A copy of the model with its arithmetic on sizes folded, and a record of what was there, and of its Ifs."""
    index = ModelIndex.of(model)
    result = onnx.ModelProto()
    result.CopyFrom(model)
    known = {first_output(node): node for node in result.graph.node}
    attributes = _without_attributes(known, folding)
    constants = _Constants(result.graph, value_names(index))
    reads = dict(folding.shared)
    reads.update((operand, constants.name(found.array)) for operand, found in folding.constants.items())
    changed = _joined(known, folding, constants)
    operands = []
    for (output, place), name in sorted(reads.items(), key=lambda read: (index.producer[read[0][0]], read[0][1])):
        node = known[output]
        operands.append((output, place, node.input[place], name))
        node.input[place] = name
    for name, array in folding.values.items():
        result.graph.initializer.append(numpy_helper.from_array(array, name))
    added = tuple(tensor.name for tensor in result.graph.initializer[len(model.graph.initializer):])
    gone = frozenset(index.producer[name] for name in folding.removed)
    unread = _unread(index, gone, result.graph)
    vanished = {name for position in gone for name in index.nodes[position].output} - folding.values.keys()
    removed = (
        sorted(gone),
        sorted(index.initializers[name] for name in unread),
        sorted(index.infos[name] for name in {*vanished, *unread} if name in index.infos),
    )
    before, after = _lists(model.graph), _lists(result.graph)
    nodes, weights, infos = (
        tuple((place, packed(items[place])) for place in places) for items, places in zip(before, removed, strict=True)
    )
    for items, places in zip(after, removed, strict=True):
        for place in reversed(places):
            del items[place]
    counts = (len(before[0]), len(before[1]), len(before[2]))
    record = SizesRecord(counts, nodes, weights, infos, tuple(operands), attributes, changed, added,
                         sort_nodes(result.graph), branches)
    fields = {name: part for name, part in asdict(record).items() if part is not None}
    note_form(result, KEY, VERSION, fields)
    return result


def unfold(model: onnx.ModelProto) -> None:
    """Put back, in a model without fused nodes, what was folded; nothing where nothing was.

    In a model that was edited since, what the edit left of the old names and places is put back.

    Raises:
        ModelError: the model's record cannot be read.
    """
    record = sizes_record(model)
    if record is None:
        return
    forget_property(model, KEY)
    graph = model.graph
    known = {first_output(node): node for node in graph.node}
    for output, place, old, new in record.operands:
        node = known.get(output)
        if node is not None and place < len(node.input) and node.input[place] == new:
            node.input[place] = old
    for output, place, text in record.attributes:
        attribute = unpacked(text, onnx.AttributeProto())
        node = known.get(output)
        if node is not None and all(other.name != attribute.name for other in node.attribute):
            node.attribute.insert(place, attribute)
    for output, text in record.changed:
        node = known.get(output)
        if node is not None and node.op_type == "Concat":
            node.CopyFrom(unpacked(text, onnx.NodeProto()))
    if len(record.order) == len(graph.node):
        rearrange(graph.node, record.order)
    nodes = [(place, unpacked(text, onnx.NodeProto())) for place, text in record.nodes]
    read = {name for node in (*graph.node, *(node for _, node in nodes)) for name in reads_of(node)}
    computed = {name for _, node in nodes for name in node.output}
    for place in reversed(range(len(graph.initializer))):
        name = graph.initializer[place].name
        if name in record.added and (name in computed or name not in read):
            del graph.initializer[place]
    weights = [(place, unpacked(text, onnx.TensorProto())) for place, text in record.initializers]
    infos = [(place, unpacked(text, onnx.ValueInfoProto())) for place, text in record.infos]
    for items, entries, count in zip(_lists(graph), (nodes, weights, infos), record.counts, strict=True):
        put_back(items, entries, count)
    sort_nodes(graph)
    if record.branches is not None:
        without_branches(graph, record.branches)


def _lists(graph: onnx.GraphProto) -> tuple[Any, Any, Any]:
    return graph.node, graph.initializer, graph.value_info


def _without_attributes(
    nodes: Mapping[str, onnx.NodeProto], folding: Folding
) -> tuple[tuple[str, int, str], ...]:
    """Remove the attributes that constants do not go with, from nodes given by their first output."""
    found = []
    for (output, _), constant in folding.constants.items():
        node = nodes[output]
        for place, attribute in enumerate(node.attribute):
            if attribute.name == constant.without:
                found.append((output, place, packed(attribute)))
                del node.attribute[place]
                break
    return tuple(found)


class _Constants:
    """An initialiser for each distinct constant."""

    def __init__(self, graph: onnx.GraphProto, taken: set[str]) -> None:
        self.graph, self.values = graph, Names(taken)
        self.names: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    def name(self, array: np.ndarray) -> str:
        """Name of the constant with these contents."""
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self.names:
            name = self.names[key] = self.values.give(f"sizes_{'_'.join(map(str, array.reshape(-1)))}")
            self.graph.initializer.append(numpy_helper.from_array(array, name))
        return self.names[key]


def _joined(
    nodes: Mapping[str, onnx.NodeProto], folding: Folding, constants: _Constants
) -> tuple[tuple[str, str], ...]:
    """Make a Concat of each Shape node that is to be one, of nodes given by their first output; returns what they
    were."""
    found = []
    for output, parts in folding.joined.items():
        node = nodes[output]
        found.append((output, packed(node)))
        node.op_type = "Concat"
        node.input[:] = [part if isinstance(part, str) else constants.name(part) for part in parts]
        del node.attribute[:]
        node.attribute.append(helper.make_attribute("axis", 0))
    return tuple(found)


def _unread(index: ModelIndex, removed: Collection[int], graph: onnx.GraphProto) -> set[str]:
    """Initialisers that only removed nodes, by position, and replaced operands read."""
    read = {name for place, node in enumerate(graph.node) if place not in removed for name in reads_of(node)}
    before = {name for names in index.reads for name in names}
    return {
        name for name, place in index.initializers.items()
        if name in before - read and name not in index.inputs | index.outputs | index.bound
        and not is_external(tensor := index.model.graph.initializer[place]) and tensor_bytes(tensor) <= SMALL_BYTES
    }


def sizes_record(model: onnx.ModelProto) -> SizesRecord | None:
    """The record of a model whose arithmetic on sizes was folded, or None.

    Raises:
        ModelError: it is no record that this release can read.
    """
    return form_record(model, SizesRecord, KEY, VERSION, "Sizes were folded")
