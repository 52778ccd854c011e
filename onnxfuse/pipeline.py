"""The way of the data, a stage a line: load, match, plan, rewrite.  Saving and reporting are the caller's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnx

from onnxfuse.graph import Graph, LoadedModel, build_graph, from_proto, infer, load_model
from onnxfuse.graph.binding import bind
from onnxfuse.planning.candidates import Fusion
from onnxfuse.planning.hardware import Profile, find_profile
from onnxfuse.planning.plan import LEAST_GAIN, Plan, make_plan
from onnxfuse.planning.traffic import Ledger
from onnxfuse.refusal import Refusal
from onnxfuse.rewriting import FusedRegion, Rewritten, rewrite
from onnxfuse.rules import CanonicalGraph, RuleSet, canonicalise, load_rules, shipped_folder

DEFAULT_TARGET = "H100"
"""The GPU that is planned for where none is named and none is present."""


@dataclass(frozen=True)
class Options:
    """How to optimise.

    Attributes:
        rules: further rule files or folders; disable: ids of rules to leave out.
        dims: sizes of symbolic dimensions to plan for.
        target: the GPU to plan for.
        architectures: kernels to embed, as "sm_90".
        least_gain: predicted speed-up that a region must pass to be fused.
    """

    rules: Sequence[str | Path] = ()
    disable: Sequence[str] = ()
    dims: Mapping[str, int] = field(default_factory=dict)
    target: str | Profile | None = None
    architectures: Sequence[str] = ()
    least_gain: float = LEAST_GAIN


@dataclass(frozen=True)
class Optimised:
    """A fused model, and all that led to it."""

    loaded: LoadedModel
    graph: Graph
    canonical: CanonicalGraph
    rules: RuleSet
    profile: Profile
    ledger: Ledger
    plan: Plan
    rewritten: Rewritten

    @property
    def model(self) -> onnx.ModelProto:
        """The fused model."""
        return self.rewritten.model

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """Everything that came near and was not fused."""
        return tuple(dict.fromkeys((*self.canonical.refusals, *self.plan.refusals, *self.rewritten.refusals)))


def optimise(source: str | Path | onnx.ModelProto | LoadedModel, options: Options | None = None) -> Optimised:
    """Fuse a model.

    Raises:
        ModelError: the model cannot be read or understood.
        RuleError: a rule file is wrong.
        TargetError: the target GPU is not known.
    """
    options = options or Options()
    loaded = load(source)
    rules = load_rules([shipped_folder(), *options.rules], options.disable)
    profile = options.target if isinstance(options.target, Profile) else find_profile(options.target or DEFAULT_TARGET)
    graph = infer(build_graph(loaded))
    canonical = canonicalise(graph, rules.canonical)
    ledger = Ledger(graph, bind(graph, options.dims))
    plan = make_plan(graph, canonical.graph, rules, ledger, profile, options.least_gain)
    rewritten = rewrite(loaded.proto, graph, [region_of(fusion) for fusion in plan.fusions])
    return Optimised(loaded, graph, canonical, rules, profile, ledger, plan, rewritten)


def load(source: str | Path | onnx.ModelProto | LoadedModel) -> LoadedModel:
    """A model from wherever it is."""
    if isinstance(source, LoadedModel):
        return source
    return from_proto(source) if isinstance(source, onnx.ModelProto) else load_model(source)


def region_of(fusion: Fusion) -> FusedRegion:
    """A chosen fusion as the rewriting wants it."""
    cost = fusion.cost
    figures = {
        "bytes_before": cost.bytes_before,
        "bytes_after": cost.bytes_after,
        "kernels_before": cost.kernels_before,
        "kernels_after": cost.kernels_after,
        "estimated_speedup": round(cost.estimated_speedup, 4),
        "memory_saved": cost.memory_saved,
    }
    return FusedRegion(
        fusion.rule,
        fusion.kernel.schedule,
        fusion.nodes,
        fusion.hosts,
        fusion.tensors,
        fusion.inlined,
        fusion.outputs,
        fusion.kernel.plan.to_json(),
        fusion.kernel.source,
        figures=figures,
    )
