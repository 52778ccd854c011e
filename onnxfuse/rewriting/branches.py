"""The branch taken in the place of an If that sizes decide, and back.

Only Ifs of the main graph go, and those in the branches that come out of them.  What a branch computes keeps its name
where no other value of the model has it, and so does a node where no other of the main graph has its name; its results
get the names of the If's.  What computed the condition, or what only the other branch read, goes with the If.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx
from onnx import helper

from onnxfuse.folding.branches import Taken
from onnxfuse.graph.constants import is_external, tensor_bytes
from onnxfuse.graph.model import Place
from onnxfuse.graph.order import STANDARD_DOMAINS, local_names, subgraphs
from onnxfuse.rewriting.index import reads_of
from onnxfuse.rewriting.metadata import packed, unpacked
from onnxfuse.rewriting.names import Names
from onnxfuse.rewriting.order import put_back, sort_nodes
from onnxfuse.rewriting.origin import first_output

LARGEST = 1 << 18
"""Bytes of an If, its branches included, past which it stays: the record holds a copy of it."""

SMALL_BYTES = 4096
"""Larger initialisers stay in the model, read or not, rather than go into its record."""

Entry = tuple[int, str]
"""Where something stood, and what it was, as base64 protobuf."""


@dataclass(frozen=True)
class BranchRecord:
    """What a main graph had before branches took the places of Ifs.

    Attributes:
        counts: numbers of nodes, initialisers and ``value_info`` entries.
        nodes, initializers, infos: those that left.
        arrived: the nodes that came, by their first outputs; weights, stated: initialisers and entries that came.
    """

    counts: tuple[int, int, int]
    nodes: tuple[Entry, ...]
    initializers: tuple[Entry, ...]
    infos: tuple[Entry, ...]
    arrived: tuple[str, ...]
    weights: tuple[str, ...]
    stated: tuple[str, ...]


@dataclass
class _Arrivals:
    """What comes out of branches."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[onnx.TensorProto] = field(default_factory=list)
    infos: list[onnx.ValueInfoProto] = field(default_factory=list)


def with_branches(model: onnx.ModelProto, taken: Taken) -> tuple[onnx.ModelProto, BranchRecord] | None:
    """A copy of the model with branches in the place of the Ifs that are decided, and what was there.

    None where no such If can go.
    """
    graph = model.graph
    chosen = {position for position, node in enumerate(graph.node)
              if ((position, ""),) in taken and _can_go(node, taken[(position, ""),])}
    if not chosen:
        return None
    names = _Outside(model)
    coming = {position: _Arrivals() for position in chosen}
    for position in sorted(chosen):
        _unwrap(graph.node[position], ((position, ""),), taken, names, coming[position])
    exchange = _exchange(model, coming)
    return exchange.applied(model), exchange.record(graph)


@dataclass(frozen=True)
class _Exchange:
    """What leaves a main graph, and what comes.

    Attributes:
        nodes, weights, infos: places of the nodes, initialisers and ``value_info`` entries that leave.
        arriving: the nodes that come, by the place of the If whose place they take.
        tensors, stated: the initialisers and entries that come.
    """

    nodes: Sequence[int]
    weights: Sequence[int]
    infos: Sequence[int]
    arriving: Mapping[int, Sequence[onnx.NodeProto]]
    tensors: Sequence[onnx.TensorProto]
    stated: Sequence[onnx.ValueInfoProto]

    def record(self, graph: onnx.GraphProto) -> BranchRecord:
        """What is needed to put back into ``graph`` what it has before."""
        return BranchRecord(
            (len(graph.node), len(graph.initializer), len(graph.value_info)),
            tuple((place, packed(graph.node[place])) for place in self.nodes),
            tuple((place, packed(graph.initializer[place])) for place in self.weights),
            tuple((place, packed(graph.value_info[place])) for place in self.infos),
            tuple(first_output(node) for nodes in self.arriving.values() for node in nodes),
            tuple(tensor.name for tensor in self.tensors),
            tuple(info.name for info in self.stated),
        )

    def applied(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """A copy of the model after the exchange."""
        result = onnx.ModelProto()
        result.CopyFrom(model)
        del result.graph.node[:]
        gone = frozenset(self.nodes)
        for position, node in enumerate(model.graph.node):
            if position in self.arriving:
                result.graph.node.extend(self.arriving[position])
            elif position not in gone:
                result.graph.node.append(node)
        for items, places in ((result.graph.initializer, self.weights), (result.graph.value_info, self.infos)):
            for place in reversed(places):
                del items[place]
        result.graph.initializer.extend(self.tensors)
        result.graph.value_info.extend(self.stated)
        return result


def _exchange(model: onnx.ModelProto, coming: Mapping[int, _Arrivals]) -> _Exchange:
    """What goes with the Ifs that go, and what of what comes out of them is read."""
    graph = model.graph
    dead, lost = _unread(model, coming)
    left = sorted({*coming, *dead})
    weights = sorted(_unread_weights(model, coming, dead))
    gone = {name for position in left for name in graph.node[position].output} - {
        name for arrivals in coming.values() for node in arrivals.nodes for name in node.output}
    gone |= {graph.initializer[place].name for place in weights}
    return _Exchange(
        left, weights, [place for place, info in enumerate(graph.value_info) if info.name in gone],
        {position: [node for node in arrivals.nodes if first_output(node) not in lost]
         for position, arrivals in coming.items()},
        [tensor for arrivals in coming.values() for tensor in arrivals.weights],
        [info for arrivals in coming.values() for info in arrivals.infos],
    )


def without_branches(graph: onnx.GraphProto, record: BranchRecord) -> None:
    """Put back, in place, the Ifs that branches took the places of."""
    arrived, weights, stated = set(record.arrived), set(record.weights), set(record.stated)
    for items, gone in (
        (graph.node, [first_output(node) in arrived for node in graph.node]),
        (graph.initializer, [tensor.name in weights for tensor in graph.initializer]),
        (graph.value_info, [info.name in stated for info in graph.value_info]),
    ):
        for place in reversed([place for place, goes in enumerate(gone) if goes]):
            del items[place]
    put_back(graph.node, [(place, unpacked(text, onnx.NodeProto())) for place, text in record.nodes], record.counts[0])
    put_back(graph.initializer, [(place, unpacked(text, onnx.TensorProto())) for place, text in record.initializers],
             record.counts[1])
    put_back(graph.value_info, [(place, unpacked(text, onnx.ValueInfoProto())) for place, text in record.infos],
             record.counts[2])
    sort_nodes(graph)


class _Outside:
    """Names of the model's values and the main graph's nodes, and for what comes out of branches names of its own."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.defined: Counter[str] = Counter()
        self._define(model.graph)
        self.values = Names(frozenset(self.defined))
        self.nodes = Names({node.name for node in model.graph.node})
        self.outputs = {info.name for info in model.graph.output}
        self.stated = {info.name for info in model.graph.value_info}

    def _define(self, graph: onnx.GraphProto) -> None:
        self.defined.update(local_names(graph))
        for node in graph.node:
            self.defined.update(name for name in node.output if name)
            for inner in subgraphs(node):
                self._define(inner)

    def outside(self, name: str) -> str:
        """What a value of a branch is called outside."""
        return name if self.defined[name] == 1 else self.values.give(name)

    def rename(self, node: onnx.NodeProto) -> None:
        """Call a node outside as no other node of the main graph is called, whose names the runtime wants distinct."""
        if node.name:
            node.name = self.nodes.give(node.name)


def _can_go(node: onnx.NodeProto, branch: str) -> bool:
    """Whether an If is small enough, and its branch holds nothing but nodes, initialisers and statements."""
    body = next(attribute.g for attribute in node.attribute if attribute.name == branch)
    return (node.ByteSize() <= LARGEST and not body.sparse_initializer and not body.quantization_annotation
            and len(body.output) >= len(node.output))


def _unwrap(owner: onnx.NodeProto, place: Place, taken: Taken, names: _Outside, coming: _Arrivals) -> None:
    """Add what the branch taken holds, under the names that it has outside, and what is in it likewise."""
    branch = taken[place]
    body = onnx.GraphProto()
    body.CopyFrom(next(attribute.g for attribute in owner.attribute if attribute.name == branch))
    computed = {name for node in body.node for name in node.output if name}
    renamed: dict[str, str] = {}
    copies: list[tuple[str, str]] = []
    for inner, outer in zip(body.output, owner.output, strict=False):
        if outer and inner.name in computed and inner.name not in renamed:
            renamed[inner.name] = outer
        elif outer:
            copies.append((inner.name, outer))
    for name in (*(tensor.name for tensor in body.initializer), *(n for node in body.node for n in node.output if n)):
        if name not in renamed:
            renamed[name] = names.outside(name)
    for index, node in enumerate(body.node):
        _rename(node, renamed)
        inner_place = (*place[:-1], (place[-1][0], branch), (index, ""))
        if inner_place in taken and _can_go(node, taken[inner_place]):
            _unwrap(node, inner_place, taken, names, coming)
        else:
            names.rename(node)
            coming.nodes.append(node)
    for source, target in copies:
        coming.nodes.append(helper.make_node("Identity", [renamed.get(source, source)], [target]))
    for tensor in body.initializer:
        tensor.name = renamed[tensor.name]
        coming.weights.append(tensor)
    for info in body.value_info:
        name = renamed.get(info.name, "")
        if name and name not in names.stated and name not in names.outputs:
            names.stated.add(name)
            info.name = name
            coming.infos.append(info)


def _rename(node: onnx.NodeProto, renamed: Mapping[str, str]) -> None:
    """Give values their names outside, in a node and what its subgraphs read; inputs and initialisers of a subgraph
    hide them."""
    node.input[:] = [renamed.get(name, name) for name in node.input]
    node.output[:] = [renamed.get(name, name) for name in node.output]
    for graph in subgraphs(node):
        own = local_names(graph)
        seen = {old: new for old, new in renamed.items() if old not in own}
        for inner in graph.node:
            _rename(inner, seen)
        for info in graph.output:
            info.name = seen.get(info.name, info.name)


def _unread(model: onnx.ModelProto, coming: Mapping[int, _Arrivals]) -> tuple[set[int], set[str]]:
    """What only the Ifs that go read: nodes by position, and nodes that came by their first outputs."""
    graph = model.graph
    outputs = {info.name for info in graph.output}
    nodes: list[tuple[int | None, onnx.NodeProto]] = [
        (position, node) for position, node in enumerate(graph.node) if position not in coming]
    nodes += [(None, node) for arrivals in coming.values() for node in arrivals.nodes]
    producer = {name: place for place, (_, node) in enumerate(nodes) for name in node.output if name}
    readers = Counter(name for _, node in nodes for name in set(reads_of(node)))
    waiting = {name for position in coming for name in reads_of(graph.node[position])}
    waiting |= {name for arrivals in coming.values() for node in arrivals.nodes for name in node.output if name}
    gone: set[int] = set()
    while waiting:
        place = producer.get(waiting.pop())
        if place is None or place in gone:
            continue
        node = nodes[place][1]
        if not _is_plain(node) or any(name in outputs or readers[name] for name in node.output if name):
            continue
        gone.add(place)
        for name in set(reads_of(node)):
            readers[name] -= 1
            waiting.add(name)
    lost = {first_output(nodes[place][1]) for place in gone if nodes[place][0] is None}
    return {position for place in gone if (position := nodes[place][0]) is not None}, lost


_RANDOM = ("Random", "Bernoulli", "Multinomial", "Dropout", "BatchNormalization")


def _is_plain(node: onnx.NodeProto) -> bool:
    """Whether a node computes its results from its operands and does nothing else."""
    return node.domain in STANDARD_DOMAINS and not node.op_type.startswith(_RANDOM) and not any(
        True for _ in subgraphs(node))


def _unread_weights(model: onnx.ModelProto, coming: Mapping[int, _Arrivals], dead: set[int]) -> set[int]:
    """Small initialisers, by place, that only what goes read."""
    graph = model.graph
    before = {name for position in (*coming, *dead) for name in reads_of(graph.node[position])}
    after = {name for position, node in enumerate(graph.node) if position not in coming and position not in dead
             for name in reads_of(node)}
    after |= {name for arrivals in coming.values() for node in arrivals.nodes for name in reads_of(node)}
    after |= {info.name for info in (*graph.input, *graph.output)}
    after |= {entry.value for note in graph.quantization_annotation for entry in note.quant_parameter_tensor_names}
    return {
        place for place, tensor in enumerate(graph.initializer)
        if tensor.name in before and tensor.name not in after
        and not is_external(tensor) and tensor_bytes(tensor) <= SMALL_BYTES
    }
