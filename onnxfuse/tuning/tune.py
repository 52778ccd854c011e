"""Measuring what a model's regions take: every way to run each kernel, and ONNX Runtime's own nodes.

What is in the database already is not measured again, and every result is written at once, so that an interrupted run
goes on where it was.  What is worth most comes first (``order``), so that a budget is spent where it counts.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

import onnx

from onnxfuse.cuda_options import TF32
from onnxfuse.errors import TargetError
from onnxfuse.folding import LAYOUTS
from onnxfuse.graph import LoadedModel
from onnxfuse.measurements import Measurements
from onnxfuse.measuring.database import DEFAULT, RUNTIME, Database, Measurement
from onnxfuse.optimised import Optimised, Tell, silent
from onnxfuse.pipeline import Options, load, optimise
from onnxfuse.planning.context import Context
from onnxfuse.planning.costs.hardware import Profile, find_profile
from onnxfuse.planning.known import KnownKernels
from onnxfuse.planning.passes import measured
from onnxfuse.planning.regions.contractions import STAGE as ATTENTION
from onnxfuse.planning.regions.depthwise import STAGE as DEPTHWISE
from onnxfuse.planning.regions.horizontal import STAGE
from onnxfuse.presence import present_profile
from onnxfuse.refusal import Refusal
from onnxfuse.rewriting import layout_record
from onnxfuse.schedules import words
from onnxfuse.tuning.ahead import Ahead
from onnxfuse.tuning.subjects import Subject, distinct
from onnxfuse.tuning.timer import Timer
from onnxfuse.tuning.watch import Watch
from onnxfuse.tuning.work import State, Work, candidate_words


@dataclass(frozen=True)
class TuneOptions:
    """What to measure.

    Attributes:
        rules: further rule files or folders; disable: ids of rules to leave out.
        dims: sizes of symbolic dimensions; measurements hold for these.
        budget: seconds after which no further measurement begins; None for no limit.
        force: measure again what the database holds.
        stages: measure only regions that these stages make, and those that hold the same nodes without them; all where
            there are none.
        tf32: whether the runtime may round operands of float32 products to TF32.
        fold_weights: as ``pipeline.Options`` has it.
        watch: sees kernels that do not end; None where nobody does.
        kernels: as ``pipeline.Options`` has it: a plan behind it that is given the same knows what was made for it.
    """

    rules: Sequence[str | Path] = ()
    disable: Sequence[str] = ()
    dims: Mapping[str, int] = field(default_factory=dict)
    budget: float | None = None
    force: bool = False
    stages: tuple[str, ...] = ()
    tf32: bool = True
    fold_weights: bool = False
    watch: Watch | None = None
    kernels: KnownKernels = field(default_factory=KnownKernels, repr=False, compare=False)


@dataclass(frozen=True)
class TunedRegion:
    """A distinct region of the model.

    Attributes:
        rule, schedule: ids; node: label of its first node; operators: of its nodes, without constants.
        shapes: of the tensors read and written; count: how often the model has it.
        runtime, default, best: microseconds of ONNX Runtime's own nodes, of the schedule's own choice and of the best
            one; None where not measured.
        choice: the best one in words, "" for the schedule's own.
        measured, known: candidates measured now, and before; left: those that were not reached, or have nothing to be
            compared with.
        faults: candidates that were wrong or did not run, and why.
        verdict: "fused", "left to ONNX Runtime", or "unmeasured"; reason: why it is left.
    """

    rule: str
    schedule: str
    node: str
    operators: tuple[str, ...]
    shapes: str
    count: int
    runtime: float | None
    default: float | None
    best: float | None
    choice: str
    measured: int
    known: int
    left: int
    faults: tuple[str, ...]
    verdict: str
    reason: str = ""


@dataclass(frozen=True)
class Tuned:
    """What tuning a model found: its regions, those that take longest first, and what could not be measured."""

    gpu: str
    database: str
    regions: tuple[TunedRegion, ...]
    refusals: tuple[Refusal, ...]
    seconds: float

    @property
    def measured(self) -> int:
        """Candidates that were measured."""
        return sum(region.measured for region in self.regions)

    @property
    def known(self) -> int:
        """Candidates that were in the database."""
        return sum(region.known for region in self.regions)

    @property
    def left(self) -> int:
        """Candidates that are left."""
        return sum(region.left for region in self.regions)


def tune(
    source: str | Path | onnx.ModelProto | LoadedModel, timer: Timer, database: Database,
    options: TuneOptions | None = None, tell: Tell = silent,
) -> Tuned:
    """Measure the regions that ``optimize`` would fuse in a model.

    Args:
        source: the model.
        timer: what measures.
        database: where results are looked up, and written as they come.

    Raises:
        ModelError, RuleError: as ``pipeline.optimise``.
        MeasurementError: the database is damaged or cannot be written.
        KernelError: the GPU stopped answering.
    """
    options = options or TuneOptions()
    start = time.monotonic()
    profile = _profile(timer)
    # Regions are measured apart, whatever shares a launch in the end; where an attention can be one kernel, or a
    # depthwise convolution with what is around it, or values lie channels-last, both ways.
    timer.provider_options = {} if options.tf32 else {TF32: "0"}
    wanted = Options(options.rules, (*options.disable, STAGE), options.dims, profile, verify=False, database=False,
                     provider_options=timer.provider_options, fold_weights=options.fold_weights, eager=True,
                     kernels=options.kernels)
    loaded = load(source)
    optimised = optimise(loaded, wanted, tell)
    plans = [optimised]
    made = {fusion.rule for fusion in optimised.plan.fusions}
    made |= set() if layout_record(optimised.folded.proto) is None else {LAYOUTS}
    without = [stage for stage in (ATTENTION, DEPTHWISE, LAYOUTS)
               if stage in made and (not options.stages or stage in (*options.stages, LAYOUTS))]
    deadline = inf if options.budget is None else start + options.budget
    work = Work(timer, database, tell, options.watch)

    def take_on() -> list[Refusal]:
        subjects, refusals = distinct(plans, wanted.kernels)
        work.add(_of_stages(subjects, options.stages) if options.stages else subjects, force=options.force)
        return refusals

    with Ahead(timer) as ahead:
        refusals = take_on()
        work.measure(ahead, deadline, opening=True)
        # What a budget does not reach even of the plan itself, it does not of what could stand in its place.
        if without and (time.monotonic() < deadline or options.budget == 0):
            plans += [optimise(loaded, replace(wanted, disable=(*wanted.disable, stage)), tell) for stage in without]
            refusals = take_on()
        work.measure(ahead, deadline)
    found = Measurements(database, timer.environment)
    verdicts = {place: why for plan in plans for place, why in _verdicts(plan, found, wanted.kernels).items()}
    regions = [_region(state, found, verdicts) for state in work.states]
    return Tuned(timer.environment.gpu, database.name, tuple(regions), tuple(refusals), time.monotonic() - start)


def _of_stages(subjects: Sequence[Subject], stages: Collection[str]) -> list[Subject]:
    """Those that stages make, and those that have nodes of these."""
    theirs = {node.label for subject in subjects if subject.fusion.rule in stages for node in subject.fusion.nodes}
    return [subject for subject in subjects if any(node.label in theirs for node in subject.fusion.nodes)]


def _profile(timer: Timer) -> Profile:
    """The profile of the timer's GPU."""
    present = present_profile()
    if present is not None and present.is_called(timer.environment.gpu):
        return present
    try:
        return find_profile(timer.environment.gpu)
    except TargetError:
        if present is None:
            raise
        return present


def _region(state: State, found: Measurements, verdicts: Mapping[int, str]) -> TunedRegion:
    """What is known of a region now."""
    subject, fusion = state.subject, state.subject.fusion
    right = {name: row for name, row in state.rows.items() if row.status == "ok"}
    choice = found.choice(subject.what)
    best = right.get(DEFAULT if choice is None else str(choice))
    runtime, default = right.get(RUNTIME), right.get(DEFAULT)
    reason = verdicts.get(id(fusion), "")
    verdict = "unmeasured" if best is None or runtime is None else "left to ONNX Runtime" if reason else "fused"
    return TunedRegion(
        rule=fusion.rule,
        schedule=fusion.kernel.schedule,
        node=subject.label,
        operators=tuple(node.qualified_op for node in fusion.nodes if node.op != "Constant"),
        shapes=subject.shapes,
        count=subject.count,
        runtime=_microseconds(runtime),
        default=_microseconds(default),
        best=_microseconds(best),
        choice="" if choice is None else words(choice),
        measured=state.measured,
        known=state.known,
        left=len(state.missing),
        faults=tuple(f"{candidate_words(name)}: {row.note}" for name, row in state.rows.items() if row.status != "ok"),
        verdict=verdict,
        reason=reason,
    )


def _verdicts(optimised: Optimised, found: Measurements, kernels: KnownKernels) -> dict[int, str]:
    """By the id of a fusion of the plan: why it is left to ONNX Runtime."""
    plan = optimised.plan
    plan = replace(plan, refusals=(), fusions=(*plan.fusions, *plan.beside))
    context = Context(optimised.canonical.graph, optimised.rules, optimised.costs, kernels=kernels)
    after = measured(plan, context.knowing(found))
    reasons = {refusal.node: refusal.message for refusal in after.refusals}
    kept = {fusion.view for fusion in after.fusions}
    return {id(fusion): reasons[fusion.nodes[0].label] for fusion in plan.fusions if fusion.view not in kept}


def _microseconds(row: Measurement | None) -> float | None:
    return None if row is None else row.microseconds
