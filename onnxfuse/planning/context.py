"""What every pass of the planner works with, made once a model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from onnxfuse.graph.model import Graph, Place
from onnxfuse.planning.candidates import Maker, makers_of
from onnxfuse.planning.costs.cost import CostModel
from onnxfuse.planning.evidence import Evidence, Measured, Revising
from onnxfuse.planning.known import KnownKernels
from onnxfuse.planning.objective import Objective
from onnxfuse.planning.spills import Compiled, Spills
from onnxfuse.rules import RuleSet


@dataclass(frozen=True)
class Context:
    """A model to plan for, and what is known beside it.

    Attributes:
        view: the canonical view of the costs' graph.
        rules: in force; costs: at the planned sizes, on the GPU to plan for; objective: what the plan is to be good at.
        eager: take also what is predicted to cost a little more, to measure it.
        measured: what measurements make of fusions; None where nothing was measured.
        spills: what the compiler makes of them; None where nothing is compiled.
        kernels: those known already, which other forms of the model may share.
        rounding: whether constants may be folded into weights where that rounds these anew.
    """

    view: Graph
    rules: RuleSet
    costs: CostModel
    objective: Objective = field(default_factory=Objective)
    eager: bool = False
    measured: Revising | None = None
    spills: Spills | None = None
    kernels: KnownKernels = field(default_factory=KnownKernels, repr=False)
    rounding: bool = False

    @property
    def graph(self) -> Graph:
        """The model's graph."""
        return self.costs.ledger.graph

    @property
    def measures(self) -> bool:
        """Whether something was measured on the GPU, or is to be."""
        return self.eager or self.measured is not None

    @cached_property
    def makers(self) -> dict[Place, Maker]:
        """Makes the fusions of each graph, by place; equal regions of all of them share their kernels."""
        return makers_of(self.view, self.costs, self.rules, self.kernels, self.objective.tf32, self.rounding)

    def knowing(self, evidence: Evidence | None) -> Context:
        """The same with what was measured on the GPU."""
        # A tuned choice holds near the planned sizes, and would be in the way of variants for others.
        choices = not self.objective.spread
        return replace(
            self, measured=None if evidence is None else Measured(self.costs, evidence, self.kernels, choices))

    def compiling(self, compiled: Compiled | None) -> Context:
        """The same with what the GPU's compiler makes of kernels."""
        return replace(
            self, spills=None if compiled is None else Spills(self.costs, self.objective, compiled, self.kernels))
