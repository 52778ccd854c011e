"""Where everything stands in a graph of an ONNX model, by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import onnx

from onnxfuse.graph.model import Place
from onnxfuse.graph.order import STANDARD_DOMAINS, all_nodes, captured_names, subgraphs
from onnxfuse.lowering import launch


@dataclass(frozen=True)
class ModelIndex:
    """Positions in a model's main graph, or in a body.

    Attributes:
        model: the model itself, never changed; graph: the graph; place: where that is in the model.
        around: of a body, the index of the graph around it.
        nodes: its nodes; ``reads[i]`` names what node i depends on, captures of its subgraphs included.
        producer: position of the node that computes a value.
        initializers, infos: positions of initialisers and of ``value_info`` entries by name.
        inputs, outputs: names of the graph's inputs (initialisers among them too) and outputs.
        bound: names that training information or quantization annotations refer to.
        twins: names that several nodes have.
    """

    model: onnx.ModelProto
    graph: onnx.GraphProto
    place: Place
    around: ModelIndex | None
    nodes: tuple[onnx.NodeProto, ...]
    reads: tuple[tuple[str, ...], ...]
    producer: Mapping[str, int]
    initializers: Mapping[str, int]
    infos: Mapping[str, int]
    inputs: frozenset[str]
    outputs: frozenset[str]
    bound: frozenset[str]
    twins: frozenset[str]

    @staticmethod
    def of(model: onnx.ModelProto, place: Place = (), around: ModelIndex | None = None) -> ModelIndex:
        """The index of a graph of a model; reads no weights.  ``around`` is that of the graph around it, if known."""
        graph = graph_at(model, place)
        nodes = tuple(graph.node)
        return ModelIndex(
            model,
            graph,
            place,
            ModelIndex.of(model, place[:-1]) if place and around is None else around,
            nodes,
            tuple(tuple(dict.fromkeys(reads_of(node))) for node in nodes),
            {name: position for position, node in enumerate(nodes) for name in node.output if name},
            {tensor.name: position for position, tensor in enumerate(graph.initializer)},
            {info.name: position for position, info in enumerate(graph.value_info)},
            frozenset(info.name for info in graph.input),
            frozenset(info.name for info in graph.output),
            frozenset() if place else frozenset(_bound(model)),
            frozenset(name for name, count in Counter(node.name for node in nodes if node.name).items() if count > 1),
        )

    @staticmethod
    def each(model: onnx.ModelProto, places: Iterable[Place]) -> dict[Place, ModelIndex]:
        """The indexes of several graphs of a model, and of those around them."""
        found: dict[Place, ModelIndex] = {}
        for place in sorted({each[:depth] for each in places for depth in range(len(each) + 1)}, key=len):
            found[place] = ModelIndex.of(model, place, found.get(place[:-1]))
        return found

    @cached_property
    def functions(self) -> Mapping[str, onnx.FunctionProto]:
        """The model's functions that are bodies of fused nodes, by name, looked up once for all its graphs."""
        if self.around is not None:
            return self.around.functions
        return {entry.name: entry for entry in self.model.functions if entry.domain == launch.DOMAIN}

    def has_subgraph(self, position: int) -> bool:
        """Whether a node holds a graph in an attribute."""
        return any(True for _ in subgraphs(self.nodes[position]))

    def defines(self, name: str) -> bool:
        """Whether the value is of this graph, and not of one around it."""
        return name in self.producer or name in self.initializers or name in self.inputs

    def holder(self, name: str) -> ModelIndex:
        """The index of the graph that the value is of; this one where none defines it."""
        index: ModelIndex | None = self
        while index is not None and not index.defines(name):
            index = index.around
        return index if index is not None else self

    def constant_node(self, name: str) -> onnx.NodeProto | None:
        """The Constant node that computes the value, here or in a graph around, if it is one."""
        position = self.producer.get(name)
        if position is None:
            holder = self.holder(name)
            return None if holder is self else holder.constant_node(name)
        node = self.nodes[position]
        return node if node.op_type == "Constant" and node.domain in STANDARD_DOMAINS else None

    def is_constant(self, name: str) -> bool:
        """Whether the value is the output of a Constant node or an initialiser that no caller can override."""
        holder = self.holder(name)
        if holder is not self:
            return holder.is_constant(name)
        if name in self.initializers:
            return name not in self.inputs or self.model.ir_version < 4
        return self.constant_node(name) is not None


def graph_at(model: onnx.ModelProto, place: Place) -> onnx.GraphProto:
    """The main graph of a model, or a body in it."""
    graph = model.graph
    for position, name in place:
        graph = next(attribute.g for attribute in graph.node[position].attribute if attribute.name == name)
    return graph


def notes_of(model: onnx.ModelProto, place: Place) -> Any:
    """Where a graph keeps notes of its own, a list of keys and values: the model's for the main graph."""
    return graph_at(model, place).metadata_props if place else model.metadata_props


def users_of(reads: Sequence[Sequence[str]]) -> dict[str, list[int]]:
    """Positions of the nodes that read each value, given what each node reads."""
    result: dict[str, list[int]] = {}
    for position, names in enumerate(reads):
        for name in names:
            result.setdefault(name, []).append(position)
    return result


def reads_of(node: onnx.NodeProto) -> Iterator[str]:
    """Names of the values that a node depends on: inputs, then captures of its subgraphs; may repeat."""
    yield from (name for name in node.input if name)
    yield from captured_names(node)


def _bound(model: onnx.ModelProto) -> Iterator[str]:
    for annotation in model.graph.quantization_annotation:
        for entry in annotation.quant_parameter_tensor_names:
            yield entry.value
    for training in model.training_info:
        for part in (training.initialization, training.algorithm):
            for node in all_nodes(iter(part.node)):
                yield from node.input
            yield from (info.name for info in part.output)
        for binding in (*training.initialization_binding, *training.update_binding):
            yield from (binding.key, binding.value)
