"""Decisions about fusion for a program that runs models: made once, kept, and corrected by what it measures.

    scheduler = onnxfuse.DynamicFusionScheduler(target="H100")
    decision = scheduler.decide_fusion("model.onnx", {"memory-pressure": 0.9}, dims={"batch": 32})
    scheduler.record_execution_stats(decision.fusions[0].name, 12e-6, baseline=30e-6)
    scheduler.get_fusion_report().to_json()

A decision is kept under the model's structure (not its weights), the sizes, the target and the hints.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import onnx

from onnxfuse.given import Names, Paths, names, paths, sizes
from onnxfuse.given import hints as read_hints
from onnxfuse.graph import LoadedModel
from onnxfuse.graph.constants import is_external
from onnxfuse.graph.store import is_stored
from onnxfuse.pipeline import Options, load, optimise, profile_of
from onnxfuse.planning.costs.hardware import Profile
from onnxfuse.planning.objective import LEAST_GAIN, Hints, Objective, Strategy
from onnxfuse.refusal import Refusal

Source = str | Path | onnx.ModelProto | LoadedModel

CACHED = 128
"""Decisions that a planner keeps."""

FOLLOWED = 4096
"""Fusions whose measurements a scheduler keeps."""

ENOUGH_CALLS = 3
"""Measured calls, with and without a fusion, before a scheduler trusts that it loses."""

SMALL_BYTES = 1024
"""Constants up to this size are part of a model's structure: they may hold shapes and axes."""


@dataclass(frozen=True)
class PlannedFusion:
    """A region that is to be one node.

    Attributes:
        name: of the fused node, as ``optimize`` calls it.
        rule: id of the rule it is due to; nodes: labels of those it replaces.
        predicted_seconds: of one run; predicted_speedup: against the nodes as ONNX Runtime runs them.
        bytes_saved: through device memory; memory_saved: bytes of tensors that are no longer made.
    """

    name: str
    rule: str
    nodes: tuple[str, ...]
    predicted_seconds: float
    predicted_speedup: float
    bytes_saved: int
    memory_saved: int


@dataclass(frozen=True)
class Decision:
    """What to fuse in a model, for sizes, a target and hints.

    Attributes:
        key: what it is kept under; dims: sizes of the inputs' symbols.
        fusions: what to fuse; refusals: what came near, and what was measured to lose.
        cached: whether it was known already.
    """

    key: str
    target: str
    strategy: str
    hints: Hints
    dims: Mapping[str, int]
    fusions: tuple[PlannedFusion, ...]
    refusals: tuple[Refusal, ...]
    cached: bool = False


@dataclass(frozen=True)
class FollowedFusion:
    """What is known of one fusion.

    Attributes:
        predicted_speedup: None where no decision holds the fusion (any more).
        measured_seconds, baseline_seconds: means of the runs recorded, fused and not; None where there were none.
        calls: runs recorded; last_seen: when the last was, ISO 8601 in UTC.
    """

    name: str
    predicted_speedup: float | None
    measured_seconds: float | None
    baseline_seconds: float | None
    calls: int
    last_seen: str | None


@dataclass(frozen=True)
class FusionReport:
    """What a scheduler has decided and seen.

    Attributes:
        decisions: how often one was asked for; hits: how often it was known already.
        entries: decisions that are kept; fusions: all that are part of one of these or were measured, by name.
    """

    decisions: int
    hits: int
    entries: int
    fusions: tuple[FollowedFusion, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


class FusionPlanner:
    """Decides what to fuse and keeps its decisions; safe to use from several threads.

    Args:
        target: the GPU to plan for, by name, file or profile; the one present by default, else the H100.
        rules: rule files, or folders of them, beside the shipped ones; disable: ids of rules to leave out.
        least_gain: predicted speed-up that a region must pass.
        capacity: decisions that are kept; those not asked for longest go first.

    Raises:
        TargetError, RuleError: there is no such target, or a file of profiles is wrong.
        ValueError: the capacity is less than one.
    """

    def __init__(
        self, target: str | Profile | None = None, *, rules: Paths = (), disable: Names = (),
        least_gain: float = LEAST_GAIN, capacity: int = CACHED,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"a planner keeps one decision at least, not {capacity}")
        rules, disable = paths("rules", rules), names("disable", disable)
        self.profile = profile_of(target, rules)
        self.capacity = capacity
        self.options = Options(rules=rules, disable=disable, target=self.profile, least_gain=least_gain, verify=False)
        self.decided = self.hits = 0
        self._cache: OrderedDict[str, Decision] = OrderedDict()
        self._lock = threading.Lock()

    def decide_fusion(
        self, graph: Source, hints: Hints | Mapping[str, float] | None = None, *, strategy: Strategy = "auto",
        dims: Mapping[str, int] | None = None,
    ) -> Decision:
        """What to fuse in a model.

        Args:
            graph: a file, or a model in memory.
            hints: of the machine's state, as ``Hints`` or by name: ``{"memory-pressure": 0.9}``.
            strategy: "auto", "all-in-one", "memory" or "dynamic".
            dims: sizes of symbolic dimensions, such as ``{"batch": 32}``; others have defaults.

        Raises:
            ModelError: the model cannot be read or understood, or has no such dimension.
            RuleError: a rule file is wrong.
            ValueError: there is no such hint or strategy.
        """
        wanted, objective = sizes(dims), Objective(strategy, read_hints(hints), self.options.least_gain)
        loaded = load(graph)
        key = decision_key(loaded.proto, self.profile, objective, wanted)
        with self._lock:
            self.decided += 1
            found = self._cache.get(key)
            if found is not None:
                self.hits += 1
                self._cache.move_to_end(key)
                return replace(found, cached=True)
        # Planned outside the lock: two threads may plan the same model at once, and decide the same.
        decision = self._decide(loaded, key, objective, wanted)
        with self._lock:
            self._cache[key] = decision
            self._cache.move_to_end(key)
            while len(self._cache) > self.capacity:
                self._cache.popitem(last=False)
        return decision

    def kept(self) -> tuple[Decision, ...]:
        """The decisions that are kept, the one asked for longest ago first."""
        with self._lock:
            return tuple(self._cache.values())

    def clear(self) -> None:
        """Forget all decisions."""
        with self._lock:
            self._cache.clear()

    def _decide(self, loaded: LoadedModel, key: str, objective: Objective, dims: dict[str, int]) -> Decision:
        made = optimise(
            loaded, replace(self.options, dims=dims, strategy=objective.strategy, hints=objective.hints)
        )
        fusions = []
        for placed in made.rewritten.placed:
            fusion = made.plan.fusions[placed.region]
            cost = fusion.cost
            fusions.append(PlannedFusion(
                placed.node, fusion.rule, tuple(node.label for node in fusion.nodes),
                cost.seconds_after / (cost.executions or 1),
                cost.estimated_speedup, cost.bytes_before - cost.bytes_after, cost.memory_saved,
            ))
        symbols = {name for value in made.graph.inputs for size in value.shape or () for name in size.symbols}
        sizes = {name: size for name, size in made.ledger.sizes.items() if name in symbols}
        return Decision(
            key, self.profile.name, objective.strategy, objective.hints, sizes, tuple(fusions), made.refusals
        )


@dataclass
class _Runs:
    """Sums of measured seconds."""

    seconds: float = 0.0
    calls: int = 0
    baseline_seconds: float = 0.0
    baseline_calls: int = 0
    last_seen: str | None = None

    @property
    def mean(self) -> float | None:
        return self.seconds / self.calls if self.calls else None

    @property
    def baseline(self) -> float | None:
        return self.baseline_seconds / self.baseline_calls if self.baseline_calls else None


class DynamicFusionScheduler:
    """A planner that learns: fusions that were measured slower than what they replace drop out of its decisions.

    Safe to use from several threads.

    Args:
        planner: what decides; a ``FusionPlanner`` of the further arguments where None.
    """

    def __init__(self, planner: FusionPlanner | None = None, **arguments: Any) -> None:
        if planner is not None and arguments:
            raise TypeError("a scheduler takes a planner or the arguments of one, not both")
        self.planner = planner or FusionPlanner(**arguments)
        self._runs: OrderedDict[str, _Runs] = OrderedDict()
        self._lock = threading.Lock()

    def decide_fusion(
        self, graph: Source, hints: Hints | Mapping[str, float] | None = None, *, strategy: Strategy = "auto",
        dims: Mapping[str, int] | None = None,
    ) -> Decision:
        """As ``FusionPlanner.decide_fusion``, without the fusions that were measured to lose."""
        decision = self.planner.decide_fusion(graph, hints, strategy=strategy, dims=dims)
        with self._lock:
            losing = {fusion.name: loss for fusion in decision.fusions if (loss := self._loss(fusion)) is not None}
        return replace(
            decision,
            fusions=tuple(fusion for fusion in decision.fusions if fusion.name not in losing),
            refusals=(*losing.values(), *decision.refusals),
        )

    def record_execution_stats(
        self, fusion: str, seconds: float, *, calls: int = 1, baseline: float | None = None
    ) -> None:
        """Keep what a run took.

        Args:
            fusion: name of the fused node.
            seconds: of one call; calls: how many took so long.
            baseline: seconds of the nodes that it replaces, as ONNX Runtime runs them, where that was measured too.

        Raises:
            ValueError: a time is negative or not finite, or ``calls`` is less than one.
        """
        for name, value in (("seconds", seconds), ("baseline", baseline)):
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be finite and not negative, not {value:g}")
        if calls < 1:
            raise ValueError(f"calls must be one or more, not {calls}")
        with self._lock:
            runs = self._runs.setdefault(fusion, _Runs())
            runs.seconds += seconds * calls
            runs.calls += calls
            if baseline is not None:
                runs.baseline_seconds += baseline * calls
                runs.baseline_calls += calls
            runs.last_seen = datetime.now(UTC).isoformat(timespec="seconds")
            self._runs.move_to_end(fusion)
            while len(self._runs) > FOLLOWED:
                self._runs.popitem(last=False)

    def get_fusion_report(self) -> FusionReport:
        """What was decided and seen so far."""
        kept = self.planner.kept()
        predicted = {fusion.name: fusion.predicted_speedup for decision in kept for fusion in decision.fusions}
        with self._lock:
            fusions = tuple(
                FollowedFusion(
                    name, predicted.get(name), runs.mean, runs.baseline, runs.calls, runs.last_seen
                )
                for name in sorted(predicted.keys() | self._runs.keys())
                for runs in [self._runs.get(name, _Runs())]
            )
        return FusionReport(self.planner.decided, self.planner.hits, len(kept), fusions)

    def _loss(self, fusion: PlannedFusion) -> Refusal | None:
        runs = self._runs.get(fusion.name)
        if runs is None or min(runs.calls, runs.baseline_calls) < ENOUGH_CALLS:
            return None
        mean, baseline = runs.seconds / runs.calls, runs.baseline_seconds / runs.baseline_calls
        if mean <= baseline:
            return None
        return Refusal(
            "measured-slower",
            f"{fusion.name} took {mean * 1e6:.1f} µs fused and {baseline * 1e6:.1f} µs as ONNX Runtime runs it, "
            f"in {runs.calls} calls",
            fusion.nodes[0], fusion.rule, f"disable the rule {fusion.rule}, or tune the model",
        )


def decision_key(model: onnx.ModelProto, profile: Profile, objective: Objective, dims: Mapping[str, int]) -> str:
    """What a decision is kept under: the model's structure and declared shapes, the sizes, the target, the objective.

    Weights are not part of it, nor is anything in other files.
    """
    digest = hashlib.sha256()
    for part in (*model.graph.node, *model.graph.input, *model.graph.output, *model.graph.value_info,
                 *model.opset_import, *model.functions):
        digest.update(part.SerializeToString(deterministic=True) + b"\0")
    for tensor in model.graph.initializer:
        digest.update(f"{tensor.name} {tensor.data_type} {list(tensor.dims)} {int(is_external(tensor))}\0".encode())
        if not is_stored(tensor) and tensor.ByteSize() <= SMALL_BYTES:
            digest.update(tensor.SerializeToString(deterministic=True))
    rest = {"profile": profile.model_dump(), "objective": asdict(objective), "dims": dict(dims)}
    digest.update(json.dumps(rest, sort_keys=True).encode())
    return digest.hexdigest()


__all__ = [
    "Decision", "DynamicFusionScheduler", "FollowedFusion", "FusionPlanner", "FusionReport", "Hints", "PlannedFusion",
]
