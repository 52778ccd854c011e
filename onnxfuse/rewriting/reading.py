"""What a fused model file holds, read from the file itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx

from onnxfuse.errors import ModelError
from onnxfuse.graph.model import Body
from onnxfuse.graph.order import graphs_of
from onnxfuse.lowering import launch
from onnxfuse.rewriting.metadata import NodeRecord
from onnxfuse.rewriting.origin import fused_nodes

IMAGE = "image_"


@dataclass(frozen=True)
class FusedNode:
    """A fused node of a model.

    Attributes:
        name, op: its name and operator type (``Region0``...), which is also the name of its function.
        rule, schedule, figures: as the ``Region`` had them; "" and empty where the node's record was dropped.
        replaces: the original nodes with their names, positions and notes, in the order of the body.
        inputs: what it reads, host inputs first, "" where absent; outputs: what it computes.
        types: element type (as "FLOAT16") and sizes as text, by the function's formal names; sizes None where
            unknown.
        plan, source: launch plan and kernel text.
        images: bytes of its compiled kernels by architecture, as "sm_90"; of PTX by "compute_90".
        body: the body that it is in, or None for the main graph.
        again: inner values that other fused nodes compute too, by their names in the original.
        rounds, collapses: as in ``FusedRecord``.
    """

    name: str
    op: str
    rule: str
    schedule: str
    figures: Mapping[str, Any]
    replaces: tuple[NodeRecord, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    types: Mapping[str, tuple[str, tuple[str, ...] | None]]
    plan: launch.LaunchPlan
    source: str
    images: Mapping[str, int] = field(default_factory=dict)
    body: Body | None = None
    again: tuple[str, ...] = ()
    rounds: bool = False
    collapses: bool = False

    @property
    def architectures(self) -> tuple[str, ...]:
        """Those with a compiled kernel."""
        return tuple(self.images)

    @property
    def label(self) -> str:
        """How messages call it: its name, after its body's."""
        return self.name if self.body is None else f"{self.body.label}: {self.name}"

    @property
    def hosts(self) -> tuple[str, ...]:
        """Values read in host memory."""
        return tuple(name for name in self.inputs[: launch.HOST_INPUTS] if name)

    @property
    def tensors(self) -> tuple[str, ...]:
        """Values that the kernel reads, as the plan's ``i0``, ``i1`` and so on."""
        return self.inputs[launch.HOST_INPUTS :]


def read_fused(model: onnx.ModelProto) -> tuple[FusedNode, ...]:
    """The fused nodes of a model, of its main graph first and then of its bodies, in their order; none for a plain
    model.

    Raises:
        ModelError: a node's plan or record is damaged or of another release.
    """
    functions = {entry.name for entry in model.functions if entry.domain == launch.DOMAIN}
    return tuple(node for body, graph in graphs_of(model) for node in _of_graph(graph, functions, body))


def _of_graph(graph: onnx.GraphProto, functions: Collection[str], body: Body | None) -> list[FusedNode]:
    found = []
    for position, record in fused_nodes(graph, functions).items():
        node = graph.node[position]
        attributes = {entry.name: entry for entry in node.attribute}
        try:
            plan = launch.LaunchPlan.from_json(attributes["plan"].s.decode())
            source = attributes["source"].s.decode()
        except (KeyError, ValueError) as error:
            raise ModelError(
                f"The launch plan of a fused node cannot be read: {error}.",
                place=f"node '{node.name}'",
                remedy="Fuse the original model again.",
            ) from error
        found.append(
            FusedNode(
                node.name,
                node.op_type,
                record.rule,
                record.schedule,
                record.figures,
                record.nodes,
                tuple(node.input),
                tuple(node.output),
                record.types,
                plan,
                source,
                {name.removeprefix(IMAGE): len(attributes[name].t.raw_data)
                 for name in sorted(attributes) if name.startswith(IMAGE)},
                body,
                tuple(record.values[formal].name for formal in record.again if formal in record.values),
                record.rounds,
                record.collapses,
            )
        )
    return found
