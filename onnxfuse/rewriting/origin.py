"""Positions in a graph of the model as it was before anything was fused."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx

from onnxfuse.lowering import launch
from onnxfuse.rewriting.index import ModelIndex, notes_of
from onnxfuse.rewriting.metadata import KEY, FusedRecord, ModelRecord, fused_record, model_record
from onnxfuse.rewriting.names import POOLED
from onnxfuse.rewriting.order import slots


@dataclass(frozen=True)
class Origin:
    """Original positions of what a model, fused or not, holds now.

    Attributes:
        record: what the graph knows of its original; one for itself where it is plain.  A number in it is None, and
            so are all positions of that kind, where the model was edited since it was fused.
        nodes, initializers, infos: original position by present position; fused nodes and their own ``value_info``
            are left out.
        fused: records of the fused nodes by their present position.
    """

    record: ModelRecord
    nodes: Mapping[int, int | None]
    initializers: Mapping[int, int | None]
    infos: Mapping[int, int | None]
    fused: Mapping[int, FusedRecord]

    @staticmethod
    def of(index: ModelIndex) -> Origin:
        """The origin of a model.

        Raises:
            ModelError: the records in the model cannot be read.
        """
        graph = index.graph
        fused = fused_nodes(graph, index.functions)
        record = model_record(notes_of(index.model, index.place))
        if record is None:
            known = not fused
            record = ModelRecord(
                index.model.ir_version,
                bool(fused),
                len(index.nodes) if known else None,
                len(graph.initializer) if known else None,
                len(graph.value_info) if known else None,
                functions=0 if index.place else sum(each.domain != launch.DOMAIN for each in index.model.functions),
            )
        records = list(fused.values())
        constants = [constant for entry in records for constant in entry.constants.values()]
        idle = record.idle
        # Several fused nodes may hold a node; it stands where one of them was put back.
        gone = list(dict.fromkeys(node.position for entry in records for node in entry.nodes if not node.stands))
        gone += [entry.position for entry in idle if entry.node]
        gone += _known(constant.node.position for constant in constants if constant.node is not None)
        plain = [position for position in range(len(index.nodes)) if position not in fused]
        pinned = {
            position: record.moved[name]
            for position in plain
            if (name := first_output(index.nodes[position])) in record.moved
        }
        nodes = _fill(record.nodes, gone, plain, pinned)
        weights = _known(constant.position for constant in constants if constant.node is None)
        weights += [entry.position for entry in idle if entry.tensor]
        initializers = _fill(record.initializers, weights, range(len(graph.initializer)))
        added = {name for entry in records for name in entry.added}
        values = _known(value.position for entry in records for value in entry.values.values())
        values += [entry.place for entry in idle if entry.place is not None]
        kept = [place for place, info in enumerate(graph.value_info) if info.name not in added]
        infos = _fill(record.value_infos, values, kept)
        return Origin(record, nodes, initializers, infos, fused)


def fused_nodes(graph: onnx.GraphProto, functions: Container[str]) -> dict[int, FusedRecord]:
    """Records of the nodes of a graph that stand for one of these functions of our domain, by position.

    A node whose record another tool dropped has an empty one.

    Raises:
        ModelError: a record cannot be read.
    """
    found = {}
    for position, node in enumerate(graph.node):
        if node.domain == launch.DOMAIN and node.op_type in functions and POOLED.fullmatch(node.op_type):
            text = next((entry.s.decode("utf-8", "replace") for entry in node.attribute if entry.name == KEY), None)
            found[position] = FusedRecord("", "") if text is None else fused_record(text, f"node {node.name!r}")
    return found


def first_output(node: onnx.NodeProto) -> str:
    """Name of a node's first output that has one, or ""."""
    return next((name for name in node.output if name), "")


def _known(places: Iterable[int | None]) -> list[int]:
    """Places that are known, each once: several bodies may hold one constant."""
    return sorted({place for place in places if place is not None})


def _fill(
    total: int | None,
    gone: Sequence[int | None],
    plain: Sequence[int],
    pinned: Mapping[int, int] | None = None,
) -> dict[int, int | None]:
    pinned = pinned or {}
    rest = [position for position in plain if position not in pinned]
    taken = [position for position in gone if position is not None]
    free = None if len(taken) != len(gone) else slots(total, [*taken, *pinned.values()], len(rest))
    if free is None:
        return dict.fromkeys(plain)
    return {**pinned, **dict(zip(rest, free, strict=True))}
