"""What a region is, whatever model it is in: the key under which measurements of it are kept.

A kernel is known by its text with no sizes planned for and no rule named; the nodes that it replaces are known by
their operators, attributes, constants and wiring.  Neither has a name of the model in it, so that layers of one
model, and models of one exporter, share what was measured.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from onnxfuse.graph.model import Graph, Value
from onnxfuse.graph.sizes import Sizes, shapes_of
from onnxfuse.graph.spelling import attributes_of, spelled
from onnxfuse.lowering.launch import Check
from onnxfuse.lowering.lower import Lowered
from onnxfuse.planning.known import KnownKernels
from onnxfuse.refusal import Refusal
from onnxfuse.region import Region
from onnxfuse.schedules import Request

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Identity:
    """A region at sizes.

    Attributes:
        kernel: digest of its kernel; nodes: of the nodes that it replaces.
        inputs, outputs: shapes of the tensors that it reads and writes.
    """

    kernel: str
    nodes: str
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]


@dataclass
class Identities:
    """Tells what regions of a graph are at given sizes; regions of one structure are looked at once."""

    graph: Graph
    sizes: Sizes
    kernels: KnownKernels = field(default_factory=KnownKernels, repr=False)

    def of(self, region: Region) -> Identity | None:
        """What a region with a schedule's kernel is; None for others, where a size is not known, or where it has no
        kernel without planned sizes."""
        shapes = self.shapes(region)
        if region.lowered is None or shapes is None:
            return None
        key = region.lowered.structure, region.kernel.schedule
        if key not in self.kernels.digests:
            self.kernels.digests[key] = self._kernel(region.lowered, region.kernel.schedule)
        kernel = self.kernels.digests[key]
        return None if kernel is None else Identity(kernel, _nodes(region, self.graph), *shapes)

    def shapes(self, region: Region) -> tuple[tuple[Shape, ...], tuple[Shape, ...]] | None:
        """Shapes of what a region reads and writes; None where a size is not known."""
        inputs, outputs = (shapes_of(values, self.sizes) for values in (region.tensors, region.outputs))
        return None if inputs is None or outputs is None else (inputs, outputs)

    def _kernel(self, lowered: Lowered, schedule: str) -> str | None:
        """Digest of the text and plan that a schedule makes of a region with no sizes planned for, if it does."""
        plain = self.kernels.ask(Request(lowered)).kernel(schedule)
        if isinstance(plain, Refusal):
            return None
        checks = tuple(Check(check.condition, "") for check in plain.plan.checks)  # messages name the model's sizes
        return _digest([schedule, plain.source, replace(plain.plan, region="", checks=checks).to_json()])


def _nodes(region: Region, graph: Graph) -> str:
    """Digest of the original nodes: operators, attributes, types and how they are wired, in graph order; first those
    that only stand beside it, which may be anywhere in the graph."""
    names = {value: f"x{place}{':weight' if _is_weight(value) else ''}:{value.dtype}:{value.rank}"
             for place, value in enumerate(region.tensors)}
    names |= {value: f"h{place}" for place, value in enumerate(region.hosts)}
    parts = [f"{domain}={version}" for domain, version in sorted(graph.opsets.items())]
    if region.lowered is not None and region.lowered.exact:
        parts.append("float32")  # other kernels of the runtime's
    nodes = sorted(region.nodes, key=lambda node: node not in region.beside)
    for number, node in enumerate(node for node in nodes if node.op != "Constant"):
        for place, output in enumerate(node.outputs):
            if output is not None:
                names[output] = f"n{number}.{place}"
        reads = [_operand(value, names) for value in node.inputs]
        parts += [node.qualified_op, attributes_of(node), " ".join(reads)]
    parts.append(" ".join(names.get(value, "?") for value in region.outputs))
    return _digest(parts)


def _is_weight(value: Value) -> bool:
    """Whether a value is constant, or transposed when a session is created."""
    while not value.is_constant and value.producer is not None and value.producer.op == "Transpose":
        (before,) = value.producer.reads()
        value = before
    return value.is_constant


def _operand(value: Value | None, names: Mapping[Value, str]) -> str:
    if value is None:
        return "-"
    if value in names:
        return names[value]
    return f"c:{spelled(value.constant)}" if value.constant is not None else f"?:{value.dtype}:{value.rank}"


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
