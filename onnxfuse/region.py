"""A region: nodes that are to be one fused node.

It begins as nodes with what they read and write, which is all that counting needs, and gains the rest on its way into
the model: tensor operations, a cost, a kernel, what was measured of that and what the compiler made of it, compiled
images.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from onnxfuse.graph.dims import Dim, dim
from onnxfuse.graph.model import Node, Place, Value
from onnxfuse.lowering.lower import Lowered
from onnxfuse.schedules import Choice, Kernel, Request


@dataclass(frozen=True)
class RegionCost:
    """A region before and after fusion: bytes through device memory, kernels, predicted seconds of GPU time.

    ``seconds_before`` and ``kernels_before`` are ONNX Runtime's with its own fusions; ``bytes_before`` counts node by
    node, as the report defines it.  ``memory_saved``: bytes of tensors that are no longer made.
    ``seconds_after`` includes what is left of a runtime fusion that the region breaks, beyond what that takes anyway.
    ``executions``: how often the region runs in one run of the model, in both times; 0 where a profile shows that it
    never does.  Bytes, kernels, memory and ``flops``, the arithmetic of the fused node, are those of one time.
    """

    bytes_before: int
    bytes_after: int
    kernels_before: int
    kernels_after: int
    seconds_before: float
    seconds_after: float
    memory_saved: int
    executions: float = 1.0
    flops: int = 0

    @property
    def estimated_speedup(self) -> float:
        """Predicted time before over time after."""
        return self.seconds_before / self.seconds_after if self.seconds_after else 1.0

    @property
    def seconds_saved(self) -> float:
        """Predicted seconds of GPU time that the fusion saves in one run."""
        return self.seconds_before - self.seconds_after


@dataclass(frozen=True)
class Times:
    """Measured GPU time of a region, in microseconds.

    Attributes:
        fused: of its kernel; runtime: of the nodes as ONNX Runtime runs them, None where only the kernel was measured.
        gpu: name of the GPU; date: when, as ISO 8601.
        source: "tune", or "statistics" for what the library recorded in production.
    """

    fused: float
    runtime: float | None
    gpu: str
    date: str
    source: str = "tune"

    def as_json(self) -> dict[str, Any]:
        """As a fused node, and the report, have it."""
        return {
            "microseconds": round(self.fused, 3),
            "runtime_microseconds": None if self.runtime is None else round(self.runtime, 3),
            "speedup": None if self.runtime is None else round(self.runtime / self.fused, 4),
            "gpu": self.gpu, "date": self.date, "source": self.source,
        }


@dataclass(frozen=True)
class Built:
    """What the compiler made of a region's kernel, of that of its kernels that spills the most.

    Attributes:
        architecture: what it was compiled for, as "sm_90".
        registers: of a thread; spilled_bytes, local_bytes: of a thread's local memory; shared_bytes: of a block.
    """

    architecture: str
    registers: int
    spilled_bytes: int
    local_bytes: int
    shared_bytes: int

    def as_json(self) -> dict[str, Any]:
        """As a fused node, and the report, have it."""
        return asdict(self)


@dataclass(frozen=True)
class Region:
    """Nodes that are, or could be, one fused node.

    Attributes:
        nodes: the original nodes of one graph, the main one or a body, in graph order; a convex set.  Constant nodes
            among them leave the model only where nothing else reads them.
        tensors, outputs: values of that graph that a kernel of theirs reads, one at least, and writes, in the order of
            its plan's ``i0``, ``i1`` and so on, ``o0`` and so on.
        rule: id of the rule it is due to; view: the nodes of the canonical view.
        hosts: values that it reads in host memory, which decide sizes, at most ``launch.HOST_INPUTS``.
        inlined: small constants that its body holds and its kernel does not read.
        folded: those of its tensors that its body does not read: weights into which other constants are folded;
            folding: which, in words; collapses: whether products that follow one another are one in its kernel
            (``planning.weights.collapsing``).
        again: original nodes that another region holds too, and that count there before fusion (``recompute``).
        beside: those of its original nodes that others may hold too, and that stand beside it where something else
            needs their results (``masks``).
        read_again: bytes that its kernel reads more than once, which take time and are not part of the count.
        steps, scratch: kernels that it launches at the planned sizes, and bytes that pass through scratch.
        lowered: its tensor operations, of which schedules make kernels; None for joined regions, and where a rule
            brings the kernel.
        counted: what it gains; made: its kernel.  None until they are known.
        measured, compiled: what was measured of it on the GPU to plan for, and what the compiler made of its kernel for
            that GPU.
        images: its kernel compiled, by architecture ("sm_90"), where embedding was asked for.
        parts: the regions that it is joined of; none of most.
    """

    nodes: tuple[Node, ...]
    tensors: tuple[Value, ...]
    outputs: tuple[Value, ...]
    rule: str = ""
    view: tuple[Node, ...] = ()
    hosts: tuple[Value, ...] = ()
    inlined: tuple[Value, ...] = ()
    folded: tuple[Value, ...] = ()
    folding: str = ""
    collapses: bool = False
    again: tuple[Node, ...] = ()
    beside: tuple[Node, ...] = ()
    read_again: Dim = field(default_factory=lambda: dim(0))
    steps: int = 1
    scratch: int = 0
    lowered: Lowered | None = field(default=None, compare=False, repr=False)
    counted: RegionCost | None = None
    made: Kernel | None = None
    measured: Times | None = None
    compiled: Built | None = None
    images: Mapping[str, bytes] = field(default_factory=dict, hash=False, repr=False)
    parts: tuple[Region, ...] = field(default=(), compare=False, repr=False)

    @property
    def own(self) -> tuple[Node, ...]:
        """Its nodes that count for it before fusion."""
        return tuple(node for node in self.nodes if node not in self.again) if self.again else self.nodes

    @property
    def leaves(self) -> tuple[Region, ...]:
        """The regions that it is joined of which are joined of none themselves; itself where there is none."""
        return tuple(leaf for part in self.parts for leaf in part.leaves) or (self,)

    @property
    def label(self) -> str:
        """Label of its first node, one that computes where that is known."""
        return (self.view or self.nodes)[0].label

    @property
    def place(self) -> Place:
        """Where the graph is in the model that its nodes are of."""
        return self.nodes[0].place if self.nodes else ()

    @property
    def cost(self) -> RegionCost:
        """What it gains, which must be known."""
        assert self.counted is not None, self.label
        return self.counted

    @property
    def kernel(self) -> Kernel:
        """Its kernel, which must be made."""
        assert self.made is not None, self.label
        return self.made

    def figures(self) -> dict[str, Any]:
        """What is kept of it with its fused node, as JSON."""
        cost = self.cost
        return {
            "bytes_before": cost.bytes_before,
            "bytes_after": cost.bytes_after,
            "kernels_before": cost.kernels_before,
            "kernels_after": cost.kernels_after,
            "estimated_speedup": round(cost.estimated_speedup, 4),
            "memory_saved": cost.memory_saved,
            **({} if self.measured is None else {"measured": self.measured.as_json()}),
            **({} if self.compiled is None else {"compiled": self.compiled.as_json()}),
        }

    def request(
        self, sizes: Mapping[str, int], choice: Choice | None = None, nearby: Sequence[Mapping[str, int]] = ()
    ) -> Request:
        """What schedules are asked to make its kernel of; the arguments are as ``Request`` has them."""
        assert self.lowered is not None, self.label
        return Request(self.lowered, self.rule, sizes, choice, nearby)


def decides_sizes(value: Value) -> bool:
    """Whether a plan may ask what a host operand holds; else it is for the body alone, as weights are for which a
    kernel reads others."""
    return value.elements is not None or not value.is_constant


def united(regions: Sequence[Region]) -> Region:
    """Regions of one graph as one, of which there is no cost and no kernel yet."""
    return Region(
        _in_order(region.nodes for region in regions),
        _each_once(region.tensors for region in regions), _each_once(region.outputs for region in regions),
        "+".join(dict.fromkeys(rule for region in regions for rule in region.rule.split("+"))),
        _in_order(region.view for region in regions),
        _each_once(region.hosts for region in regions), _each_once(region.inlined for region in regions),
        _each_once(region.folded for region in regions),
        "; ".join(region.folding for region in regions if region.folding),
        any(region.collapses for region in regions), _again_in(regions), parts=tuple(regions),
    )


def _again_in(regions: Sequence[Region]) -> tuple[Node, ...]:
    """What regions joined to one compute again that none of them counts before fusion, in graph order."""
    own = {node for region in regions for node in region.own}
    return _in_order([[node for region in regions for node in region.again if node not in own]])


def _in_order(groups: Iterable[Iterable[Node]]) -> tuple[Node, ...]:
    """Nodes of several regions in graph order; regions may have constants in common."""
    return tuple(sorted({node for group in groups for node in group}, key=lambda node: node.index))


def _each_once(groups: Iterable[Iterable[Value]]) -> tuple[Value, ...]:
    return tuple(dict.fromkeys(value for group in groups for value in group))
