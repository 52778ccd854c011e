"""What fused nodes took in a run, beside what was predicted for them: ``onnxfuse report --profile``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import onnx

from onnxfuse.errors import MeasurementError, TargetError
from onnxfuse.graph import Graph, LoadedModel, Value, bind
from onnxfuse.measuring.database import Database
from onnxfuse.measuring.production import statistics_of
from onnxfuse.operators import load_graph
from onnxfuse.pipeline import load
from onnxfuse.planning.costs.cost import CostModel
from onnxfuse.planning.costs.hardware import Profile, find_profile, known_profiles, resolve_profile
from onnxfuse.planning.costs.placement import place
from onnxfuse.planning.costs.traffic import Ledger, plan_cost
from onnxfuse.planning.recorded import solved
from onnxfuse.region import Region
from onnxfuse.reporting.gather import name_of, replaced_nodes
from onnxfuse.rewriting import FusedNode, original, read_fused
from onnxfuse.rules import groups_of
from onnxfuse.runtime.cache import digest
from onnxfuse.runtime.run_statistics import RecordedGpu, RecordedNode, RecordedRun, RunStatistics, read_statistics

CLOSE = 0.25
"""How far a prediction may be from what was measured to count as right, as a share of the latter."""


@dataclass(frozen=True)
class ProfiledRun:
    """A fused node's calls of one variant at one set of shapes.

    Attributes:
        node, kernel, rule: as in ``FusionEntry``; variant: of the launch plan; gpu: its name.
        inputs, outputs: shapes of the tensors; None for an absent input.
        calls, timed, captured: see ``RecordedRun``.
        predicted_us: GPU time that the cost model predicts for a call at these shapes; None where it cannot.
        measured_us: median GPU time of a call; least_us: the least; None where none was timed.
        ratio: measured over predicted; None without either.
        total_us: the mean GPU time of a call, times the calls that were not captured; share: of the file's total.
    """

    node: str
    rule: str
    kernel: str
    variant: str
    gpu: str
    inputs: tuple[tuple[int, ...] | None, ...]
    outputs: tuple[tuple[int, ...], ...]
    calls: int
    timed: int
    captured: int
    predicted_us: float | None
    measured_us: float | None
    least_us: float | None
    ratio: float | None
    total_us: float
    share: float


@dataclass(frozen=True)
class Learned:
    """What went into a database of measurements: its name; kernels at shapes, and their calls with a time."""

    database: str
    kernels: int
    calls: int


@dataclass(frozen=True)
class RunProfile:
    """A recorded run of a fused model.

    Attributes:
        model: its path; file: the statistics.
        gpus: names; targets: the hardware profiles that predictions were made with, in the same order, None where
            no profile describes the GPU.
        total_us: GPU time of all calls of fused nodes.
        runs: the longest in total first.
        idle: fused nodes of the model that no call was recorded of.
        notes: what a reader should know.
        sizes: of the symbols in the original's inputs, at which most of the time was spent; as far as shapes tell.
        learned: what went into a database, or None.
    """

    model: str
    file: str
    gpus: tuple[str, ...]
    targets: tuple[str | None, ...]
    total_us: float
    runs: tuple[ProfiledRun, ...]
    idle: tuple[str, ...]
    notes: tuple[str, ...]
    sizes: Mapping[str, int] = field(default_factory=dict)
    learned: Learned | None = None

    @property
    def compared(self) -> tuple[ProfiledRun, ...]:
        """Runs with a prediction and a measurement."""
        return tuple(run for run in self.runs if run.ratio is not None)

    @property
    def close(self) -> tuple[ProfiledRun, ...]:
        """Those whose prediction is within ``CLOSE`` of what was measured."""
        return tuple(
            run for run in self.compared
            if run.predicted_us is not None and run.measured_us
            and abs(run.predicted_us / run.measured_us - 1) <= CLOSE
        )


def profile_of_run(
    model: str | Path | onnx.ModelProto | LoadedModel,
    file: Path,
    *,
    target: str | None = None,
    rules: Sequence[str | Path] = (),
    dims: Mapping[str, int] | None = None,
    learn: Database | None = None,
) -> RunProfile:
    """What the fused nodes of a model took in a recorded run.

    Args:
        model: the fused model that ran.
        file: what ``ONNXFUSE_STATISTICS`` named.
        target: GPU to predict for; by default the one that the run was on, by its name.
        rules: folders with further hardware profiles.
        dims: sizes of symbols that the recorded shapes do not tell.
        learn: database that times of the model's own kernels go into.

    Raises:
        MeasurementError: the file is no statistics file, the model is not fused, the file is of another model, or the
            database cannot be written.
        ModelError, TargetError, RuleError: as ``onnxfuse.report``.
    """
    loaded = load(model)
    nodes = {node.name: node for node in read_fused(loaded.proto)}
    if not nodes:
        raise MeasurementError(
            "The model holds no fused nodes, and statistics are of fused nodes.", place=name_of(loaded),
            remedy="Give the fused model that ran.",
        )
    recorded = read_statistics(file)
    own = _own(recorded, nodes, name_of(loaded), file)
    targets = {gpu.ordinal: _target(gpu, target, rules) for gpu in recorded.gpus}
    predictor = _Predictor(loaded, dims or {})
    total = sum(_total_us(run) for entry in own for run in entry.runs)
    runs = []
    for entry in own:
        node, profile = nodes[entry.node], targets[entry.gpu]
        for run in entry.runs:
            seconds = None if profile is None else predictor.seconds(node, run, profile)
            runs.append(_profiled(entry, node, run, recorded.gpu(entry.gpu).name, seconds, total))
    ran = {run.node for run in runs}
    return RunProfile(
        name_of(loaded), str(file),
        tuple(gpu.name for gpu in recorded.gpus),
        tuple(None if (found := targets[gpu.ordinal]) is None else found.name for gpu in recorded.gpus),
        round(total, 3),
        tuple(sorted(runs, key=lambda run: (-run.total_us, -run.calls, run.node))),
        tuple(name for name in nodes if name not in ran),
        (*recorded.notes, *_notes(recorded, own, targets)),
        predictor.heaviest([(nodes[entry.node], run) for entry in own for run in entry.runs]),
        None if learn is None else _learn(recorded, own, learn),
    )


def _learn(recorded: RunStatistics, own: Sequence[RecordedNode], database: Database) -> Learned:
    """Keep the times of a model's own nodes."""
    found = statistics_of(recorded.model_copy(update={"nodes": tuple(own)}))
    database.record_statistics(found)
    return Learned(database.name, len(found), sum(entry.calls for entry in found))


def as_json(profile: RunProfile) -> dict[str, Any]:
    """The profile as plain data."""
    return {**asdict(profile), "compared": len(profile.compared), "close": len(profile.close)}


def _own(recorded: RunStatistics, nodes: Mapping[str, FusedNode], model: str, file: Path) -> list[RecordedNode]:
    """What was recorded of the model's own nodes.

    Raises:
        MeasurementError: there is nothing.
    """
    own = [entry for entry in recorded.nodes if _is_of(entry, nodes.get(entry.node))]
    if not own:
        raise MeasurementError(
            f"The statistics are of another model: none of their {len(recorded.nodes)} fused nodes is in "
            f"{model} with the same kernel.", place=str(file),
            remedy="Give the very model that ran; a model that was fused again may have other kernels.",
        )
    return own


def _is_of(entry: RecordedNode, node: FusedNode | None) -> bool:
    return node is not None and digest(node.source, node.plan.options) == entry.kernel


def _target(gpu: RecordedGpu, target: str | None, rules: Sequence[str | Path]) -> Profile | None:
    """The hardware profile to predict with; None where none is called like the GPU."""
    if target is not None:
        return resolve_profile(target, rules)
    try:
        return find_profile(gpu.name, known_profiles(rules))
    except TargetError:
        return None


def _notes(
    recorded: RunStatistics, own: Sequence[RecordedNode], targets: Mapping[int, Profile | None]
) -> tuple[str, ...]:
    notes = [
        f"no hardware profile describes {gpu.name}, so nothing is predicted; name one with --target"
        for gpu in recorded.gpus if targets[gpu.ordinal] is None
    ]
    others = len(recorded.nodes) - len(own)
    if others:
        notes.append(f"{others} fused nodes in the file are of other models or kernels and are left out")
    unrecorded = sum(entry.unrecorded for entry in own)
    if unrecorded:
        notes.append(f"{unrecorded} calls had shapes past the most that are kept and are left out")
    return tuple(notes)


def _total_us(run: RecordedRun) -> float:
    """GPU time of all calls, where those that were not timed took what the others did."""
    mean = run.mean_seconds
    return 0.0 if mean is None else mean * 1e6 * (run.calls - run.captured)


def _profiled(
    entry: RecordedNode, node: FusedNode, run: RecordedRun, gpu: str, seconds: float | None, total: float
) -> ProfiledRun:
    predicted = None if seconds is None else seconds * 1e6
    measured = run.median_ns * 1e-3 if run.timed else None
    return ProfiledRun(
        node=entry.node, rule=node.rule or entry.region, kernel=entry.op, variant=run.variant, gpu=gpu,
        inputs=run.inputs, outputs=run.outputs, calls=run.calls, timed=run.timed, captured=run.captured,
        predicted_us=None if predicted is None else round(predicted, 3),
        measured_us=None if measured is None else round(measured, 3),
        least_us=round(run.least_ns * 1e-3, 3) if run.timed else None,
        ratio=round(measured / predicted, 4) if predicted and measured is not None else None,
        total_us=round(_total_us(run), 3),
        share=round(_total_us(run) / total, 6) if total else 0.0,
    )


class _Predictor:
    """The cost model of a fused model's original, at whatever sizes a run had."""

    def __init__(self, loaded: LoadedModel, dims: Mapping[str, int]) -> None:
        self._graph = load_graph(original(loaded, folded=True))
        self._defaults = bind(self._graph, dims)
        self._placement = place(self._graph)
        self._groups = groups_of(self._graph)
        self._ledgers: dict[tuple[tuple[str, int], ...], Ledger] = {}

    def _values(self, node: FusedNode) -> tuple[Graph, tuple[Value, ...], tuple[Value, ...]]:
        """The graph that a node's are in, what it reads and what it computes."""
        graph = self._graph.part(node.body)
        return (graph, tuple(graph.values[name] for name in node.tensors),
                tuple(graph.values[name] for name in node.outputs))

    def sizes(self, node: FusedNode, run: RecordedRun) -> dict[str, int] | None:
        """Sizes of symbols that a run's shapes tell; None where they are not the graph's."""
        _, tensors, outputs = self._values(node)
        if (len(run.inputs), len(run.outputs)) != (len(tensors), len(outputs)):
            return None
        return solved(zip((*tensors, *outputs), (*run.inputs, *run.outputs), strict=True))

    def heaviest(self, runs: Sequence[tuple[FusedNode, RecordedRun]]) -> dict[str, int]:
        """Of each symbol in the inputs' shapes the size at which most of the time was spent."""
        weights: defaultdict[tuple[str, int], float] = defaultdict(float)
        for node, run in runs:
            for solution in (self.sizes(node, run) or {}).items():
                weights[solution] += _total_us(run)
        names = {name for value in self._graph.inputs for size in value.shape or () for name in size.symbols}
        found: dict[str, int] = {}
        for (name, size), _ in sorted(weights.items(), key=lambda item: (-item[1], item[0])):
            if name in names:
                found.setdefault(name, size)
        return dict(sorted(found.items()))

    def seconds(self, node: FusedNode, run: RecordedRun, profile: Profile) -> float | None:
        """Predicted GPU time of a call; None where its sizes are not those of the graph, or one is not known."""
        sizes = self.sizes(node, run)
        if sizes is None:
            return None
        graph, tensors, outputs = self._values(node)
        known = {**self._defaults, **sizes}
        key = tuple(sorted(known.items()))
        if key not in self._ledgers:
            self._ledgers[key] = Ledger(self._graph, known, self._placement)
        ledger = self._ledgers[key]
        shapes = [shape for shape in run.inputs if shape is not None]
        kernels, scratch = (
            plan_cost(node.plan, shapes, profile.sm, profile.multiprocessors) if len(shapes) == len(tensors) else (1, 0)
        )
        region = Region(replaced_nodes(node, graph), tensors, outputs, steps=kernels, scratch=scratch)
        counted = ledger.region(region)
        return None if counted.unknown else CostModel(ledger, profile, self._groups).kernel_seconds(region)
