"""A fused model and all that led to it: what the pipeline makes, and what reports, tuning and delivery look at."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import onnx

from onnxfuse.graph import Graph, LoadedModel
from onnxfuse.graph.store import whole
from onnxfuse.planning.costs.cost import CostModel
from onnxfuse.planning.costs.hardware import Profile
from onnxfuse.planning.costs.traffic import Ledger
from onnxfuse.planning.objective import Objective
from onnxfuse.planning.plan import Plan, together
from onnxfuse.refusal import Refusal
from onnxfuse.region import Region
from onnxfuse.rewriting import Rewritten, only_weights, rewrite
from onnxfuse.rules import CanonicalGraph, RuleSet
from onnxfuse.verifying import Verification
from onnxfuse.verifying.first_run import FirstRun
from onnxfuse.verifying.foreseen import Foreseeing

Tell = Callable[[str, int, int], None]
"""Told a stage's name, how much of it is done, and how much there is; 0 of 0 where that is not known."""


def silent(stage: str, done: int, of: int) -> None:
    """A ``Tell`` that says nothing."""


@dataclass(frozen=True)
class Optimised:
    """A fused model, and all that led to it.

    Attributes:
        folded: the loaded model in the form that was planned and rewritten: its arithmetic on sizes folded, biases
            behind what they belong to where fused nodes add them, values laid out where they lie channels-last.
        regions: the plan's fusions as they went into the model, their kernels by the names there, and compiled.
        verification: what it found, or None where it was not asked for; taken_back: fused nodes that failed it.
        notes: what a user should know of how the plan came about.
        objective: what the plan is to be good at; keeps_biases: whether convolutions were to keep their biases.
        provider_options: of the CUDA provider, that were planned for; fold_weights: whether weights may be rounded
            anew for what is folded into them.
        assumed: symbols of the inputs' shapes whose size nobody gave; assumed_target: whether nobody named the GPU to
            plan for, and there is none.
        first_run: the original's, and foreseen: the fused model's comparison with it, while it is verified.
    """

    loaded: LoadedModel
    folded: LoadedModel
    graph: Graph
    canonical: CanonicalGraph
    rules: RuleSet
    profile: Profile
    ledger: Ledger
    costs: CostModel
    plan: Plan
    regions: tuple[Region, ...]
    rewritten: Rewritten
    verification: Verification | None = None
    taken_back: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()
    objective: Objective = field(default_factory=Objective)
    assumed: tuple[str, ...] = ()
    assumed_target: bool = False
    keeps_biases: bool = False
    provider_options: Mapping[str, str] = field(default_factory=dict)
    fold_weights: bool = False
    first_run: FirstRun | None = field(default=None, repr=False, compare=False)
    foreseen: Foreseeing | None = field(default=None, repr=False, compare=False)

    @cached_property
    def model(self) -> onnx.ModelProto:
        """The fused model, all weights of its in it that the loaded model held."""
        return whole(self.rewritten.model)

    @property
    def lean(self) -> onnx.ModelProto:
        """The fused model as it is verified and saved: larger weights may be references to those of the loaded one,
        until ``model`` is asked for, which may be changed."""
        made: onnx.ModelProto = self.__dict__.get("model", self.rewritten.model)
        return made

    @property
    def folder(self) -> Path | None:
        """Where the fused model's weights are that are kept in files."""
        return self.loaded.folder

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """Everything that came near and was not fused."""
        stages = (*self.taken_back, *self.canonical.refusals, *self.plan.refusals, *self.rewritten.refusals)
        return tuple(dict.fromkeys(stages))

    def without(self, lost: Collection[int]) -> Optimised:
        """The same with some regions, and those that go ``together`` with them, left as they were."""
        lost = self.together(lost)
        fusions = tuple(fusion for place, fusion in enumerate(self.plan.fusions) if place not in lost)
        regions = tuple(region for place, region in enumerate(self.regions) if place not in lost)
        weights = {value.name for region in regions for value in region.folded}
        folded = replace(self.folded, proto=only_weights(self.folded.proto, weights))
        rewritten = rewrite(folded.proto, self.graph, regions)
        return replace(self, folded=folded, plan=replace(self.plan, fusions=fusions), regions=regions,
                       rewritten=rewritten)

    def together(self, lost: Collection[int]) -> set[int]:
        """See ``planning.plan.together``."""
        return together(self.plan.fusions, lost)
