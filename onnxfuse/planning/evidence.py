"""What measurements say of a plan: tuned schedules taken over, and regions that lose left to ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from onnxfuse.lowering.launch import LaunchPlan
from onnxfuse.planning.costs.cost import CostModel
from onnxfuse.planning.identity import Identities, Identity, Shape
from onnxfuse.planning.known import KnownKernels
from onnxfuse.provider.lacking import lacks_kernel
from onnxfuse.refusal import Refusal
from onnxfuse.region import Region, Times
from onnxfuse.schedules import Choice, Kernel


class Evidence(Protocol):
    """What was measured on the GPU to plan for."""

    def knows(self, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> bool:
        """Whether anything may be known of a region that reads and writes tensors of these shapes."""
        ...

    def choice(self, what: Identity) -> Choice | None:
        """The best way to run a kernel at these sizes, or near them; None for the schedule's own."""
        ...

    def times(self, what: Identity, kernel: Kernel) -> Times | None:
        """What a region takes at exactly these sizes with this kernel, where that was measured."""
        ...

    def runtime(self, what: Identity) -> float | None:
        """Microseconds of a region's nodes as the runtime runs them, at exactly these sizes, where that was
        measured."""
        ...


class Revising(Protocol):
    """What is known of fusions beside the costs: ``Measured``."""

    def revision(self, fusion: Region) -> Region | Refusal:
        """A region as what is known makes it, or why it is left to the runtime."""
        ...

    def runtime(self, fusion: Region) -> float | None:
        """Microseconds of a region's nodes as the runtime runs them, where that is known."""
        ...


@dataclass
class Measured:
    """What measurements make of fusions.  Kernels of a user's own are not weighed.

    Attributes:
        costs: of the model's graph; kernels: those known already.
        choices: whether tuned schedules are taken over.
    """

    costs: CostModel
    evidence: Evidence
    kernels: KnownKernels = field(default_factory=KnownKernels, repr=False)
    choices: bool = True

    def __post_init__(self) -> None:
        self.identities = Identities(self.costs.ledger.graph, self.costs.ledger.sizes, self.kernels)
        self._choices: dict[Identity, Choice | None] = {}
        self._times: dict[tuple[Identity, LaunchPlan], Times | None] = {}

    def revision(self, fusion: Region) -> Region | Refusal:
        """A region with its best kernel and its times, or why it is left to the runtime."""
        kernel, times = self._found(fusion)
        fusion = replace(fusion, made=kernel, measured=times)
        return fusion if times is None else _slower(fusion, times, self.costs) or fusion

    def runtime(self, fusion: Region) -> float | None:
        """Microseconds of a region's nodes as the runtime runs them, where that was measured."""
        what = self._identity(fusion)
        return None if what is None else self._whole(fusion, self.evidence.runtime(what))

    def _whole(self, fusion: Region, runtime: float | None) -> float | None:
        """What the runtime takes for a region's nodes, where a GPU's time was measured: of those that the CPU runs it
        has nothing, and what is predicted counts."""
        if runtime is None or not any(map(lacks_kernel, fusion.nodes)):
            return runtime
        return max(runtime, _predicted(fusion, self.costs))

    def _identity(self, fusion: Region) -> Identity | None:
        """What a region is, None where nothing is known of it: most regions were never measured, and to tell which they
        are takes a kernel's text."""
        shapes = self.identities.shapes(fusion)
        return self.identities.of(fusion) if shapes is not None and self.evidence.knows(*shapes) else None

    def _found(self, fusion: Region) -> tuple[Kernel, Times | None]:
        what = self._identity(fusion)
        if what is None:
            return fusion.kernel, None
        kernel = self._best(what, fusion)
        key = what, kernel.plan
        if key not in self._times:
            self._times[key] = self.evidence.times(what, kernel)
        times = self._times[key]
        return kernel, times and replace(times, runtime=self._whole(fusion, times.runtime))

    def _best(self, what: Identity, fusion: Region) -> Kernel:
        """The best kernel of a region as measured: its own where no other is known, or can be made after all."""
        if self.choices and what not in self._choices:
            self._choices[what] = self.evidence.choice(what)
        choice = self._choices.get(what)
        if choice is None:
            return fusion.kernel
        made = self.kernels.ask(fusion.request(self.identities.sizes, choice)).kernel(fusion.kernel.schedule)
        return made if isinstance(made, Kernel) else fusion.kernel


def _predicted(fusion: Region, costs: CostModel) -> float:
    """Microseconds of a region's own nodes as the runtime runs them, by costs."""
    seconds, _ = costs.unfused(set(fusion.nodes).difference(fusion.again))
    return 1e6 * seconds / (costs.ledger.executions(fusion.nodes) or 1)


SLOWER = "measured-slower"
"""Code of the refusal of what was measured and found slow."""

UNMEASURED, NOISE = 1.5, 10.0
"""Where only production tells what a kernel takes: how much longer than the runtime's nodes are predicted to that has
to be, and by how many microseconds beyond.  Predictions err by a quarter, and a time from production holds a few
microseconds in which the GPU waited for the host."""


def _slower(fusion: Region, times: Times, costs: CostModel) -> Refusal | None:
    """Why a region is left to the runtime: its kernel, and what it leaves of a broken runtime fusion, takes longer."""
    if times.runtime is None:
        return _slower_than_predicted(fusion, times, costs) if times.source == "statistics" else None
    whole, left = (1e6 * seconds / (fusion.cost.executions or 1) for seconds in costs.around(fusion.nodes))
    if times.fused + left <= times.runtime + whole:
        return None
    broken = f" (and {left - whole:.1f} µs more for a fusion of the runtime's that it breaks)" if left > whole else ""
    return Refusal(
        SLOWER,
        f"measured on {times.gpu}: {times.fused:.1f} µs fused{broken}, {times.runtime:.1f} µs as the runtime runs the "
        f"{_count(fusion)} nodes",
        fusion.nodes[0].label,
        fusion.rule,
    )


def _slower_than_predicted(fusion: Region, times: Times, costs: CostModel) -> Refusal | None:
    """Why a region is left to the runtime that production alone tells of: it took far longer than the runtime's nodes
    are predicted to."""
    predicted = _predicted(fusion, costs)
    if times.fused <= UNMEASURED * predicted + NOISE:
        return None
    return Refusal(
        SLOWER,
        f"recorded in production on {times.gpu}: {times.fused:.1f} µs a call, and {predicted:.1f} µs are predicted for "
        f"the {_count(fusion)} nodes as the runtime runs them",
        fusion.nodes[0].label,
        fusion.rule,
        "onnxfuse tune MODEL measures both on the GPU at hand",
    )


def _count(fusion: Region) -> int:
    return sum(node.op != "Constant" for node in fusion.nodes)
