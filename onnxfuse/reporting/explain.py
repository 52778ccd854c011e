"""Why a model was fused as it was: around one node, or where the traffic that remains comes from, as one value.

    optimised ─ subject ─▶ regions weighed around it, what stopped them, its neighbours      NodeExplanation
              ─ remaining ─▶ what still passes through device memory, and why                ModelExplanation

Bytes are those of ``planning.costs.traffic`` (docs/bytes.md), seconds those of ``planning.costs.cost``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from onnxfuse.refusal import Refusal
from onnxfuse.region import Built
from onnxfuse.reporting.findings import Assumed, LeftRegions, MatchEntry

Verdict = Literal["chosen", "lost", "no-gain", "refused"]
State = Literal["fused", "product", "view", "host", "folded", "control", "removed", "alone"]
"""Inside a fused node; a matrix product or convolution; memory under another shape; arithmetic on sizes, which the CPU
does; computed when the session is created; an If, a Loop or a Scan, whose bodies run; gone with the
arithmetic on sizes; a kernel of its own."""


@dataclass(frozen=True)
class Weighed:
    """A region that was weighed.

    Attributes:
        verdict: what became of it; reason: a sentence that says why.
        rule: id of the rule it is due to.
        nodes: labels of the original nodes; operators: their types; both without constants.
        lost_to: first node of the region that it lost to, or "".
        bytes_before, bytes_after, kernels_before, kernels_after, seconds_before, seconds_after: as ``RegionCost`` has
            them; None where they were not counted.
    """

    verdict: Verdict
    reason: str
    rule: str
    nodes: tuple[str, ...]
    operators: tuple[str, ...]
    lost_to: str = ""
    bytes_before: int | None = None
    bytes_after: int | None = None
    kernels_before: int | None = None
    kernels_after: int | None = None
    seconds_before: float | None = None
    seconds_after: float | None = None

    @property
    def seconds_saved(self) -> float | None:
        """Predicted seconds that it saves, or would have saved."""
        if self.seconds_before is None or self.seconds_after is None:
            return None
        return self.seconds_before - self.seconds_after


@dataclass(frozen=True)
class Neighbour:
    """A node on the other end of an edge.

    Attributes:
        value: what passes along the edge; bytes: its size, None where unknown.
        node, operator, state: of the neighbour; fused_node: the fused node that it is in, or "".
    """

    value: str
    bytes: int | None
    node: str
    operator: str
    state: State
    fused_node: str


@dataclass(frozen=True)
class NodeExplanation:
    """One node, or all nodes of a fused one.

    Attributes:
        subject: its label, or the fused node's name.
        nodes, operators: the original nodes that it stands for, constants left out.
        state: how it runs; fused_nodes: the fused nodes that hold it, by name.
        runtime: labels of the nodes that ONNX Runtime itself would run in one kernel with it, if any.
        summary: a sentence.
        bytes, seconds: of its nodes one by one.
        considered: regions weighed around it, the chosen ones first.
        refusals: what stopped regions at it or at what it reads.
        reads, read_by: its neighbours.
        compiled: what the compiler made of each fused node's kernel, None where not compiled.
    """

    subject: str
    nodes: tuple[str, ...]
    operators: tuple[str, ...]
    state: State
    fused_nodes: tuple[str, ...]
    runtime: tuple[str, ...]
    summary: str
    bytes: int
    seconds: float
    considered: tuple[Weighed, ...]
    refusals: tuple[Refusal, ...]
    reads: tuple[Neighbour, ...]
    read_by: tuple[Neighbour, ...]
    compiled: tuple[Built | None, ...] = ()


@dataclass(frozen=True)
class Remaining:
    """Nodes that are alike and still move bytes after fusion.

    Attributes:
        state: "fused", "product" or "alone".
        nodes: their labels, or names of fused nodes; operators: of one of them.
        rule: of fused nodes; of others, the canonical rule that takes several nodes as one operator, or "".
        shapes: what one of them reads and writes.
        times: how many of them there are.
        bytes, kernels, seconds: of all of them together, ONNX Runtime's own fusions counted in the last two.
        reason: why they are not fused, or why the fused node is not larger; None where nothing speaks against it.
    """

    state: State
    nodes: tuple[str, ...]
    operators: tuple[str, ...]
    rule: str
    shapes: str
    times: int
    bytes: int
    kernels: int
    seconds: float
    reason: Refusal | None


@dataclass(frozen=True)
class ModelExplanation:
    """The traffic that remains.

    Attributes:
        bytes_before, bytes_after: outside matrix products and convolutions; bytes_products: in them, after fusion.
        seconds_before, seconds_after: predicted, of one run.
        remaining: most bytes first.
        left: regions left to ONNX Runtime, as in the report; matches: of the user's own rules.
        advice: near misses that a user can mend; refusals: all of them.
    """

    bytes_before: int
    bytes_after: int
    bytes_products: int
    seconds_before: float
    seconds_after: float
    remaining: tuple[Remaining, ...]
    left: tuple[LeftRegions, ...] = ()
    matches: tuple[MatchEntry, ...] = ()
    advice: tuple[Refusal, ...] = ()
    refusals: tuple[Refusal, ...] = ()


@dataclass(frozen=True)
class Explained:
    """What ``onnxfuse explain`` shows.

    Attributes:
        model, target, dims, assumed: as in the report.
        notes: what the reader has to know, a sentence each.
        node: where a node was asked for; whole: where none was.
    """

    model: str
    target: str
    dims: Mapping[str, int]
    notes: tuple[str, ...]
    node: NodeExplanation | None
    whole: ModelExplanation | None
    assumed: Assumed = field(default_factory=Assumed)


def explanation_json(explanation: Explained) -> dict[str, Any]:
    """The explanation as plain data; seconds are rounded to nanoseconds."""
    content = asdict(explanation)
    for found in (content["node"] or {}).get("considered", ()):
        before, after = found["seconds_before"], found["seconds_after"]
        found["seconds_saved"] = None if before is None or after is None else before - after
    rounded: dict[str, Any] = _rounded(content)
    return rounded


def _rounded(part: Any) -> Any:
    if isinstance(part, float):
        return round(part, 9)
    if isinstance(part, Mapping):
        return {name: _rounded(item) for name, item in part.items()}
    return [_rounded(item) for item in part] if isinstance(part, (list, tuple)) else part
