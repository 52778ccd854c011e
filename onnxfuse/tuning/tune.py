"""Measuring what a model's regions take: every way to run each kernel, and ONNX Runtime's own nodes.

What is in the database already is not measured again, and every result is written at once, so that an interrupted run
goes on where it was.  Regions that take longest come first, so that a budget is spent where it counts.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from onnxfuse.compiling import source_of
from onnxfuse.errors import KernelError, OnnxfuseError, TargetError
from onnxfuse.graph import LoadedModel
from onnxfuse.measurements import Measurements
from onnxfuse.measuring.database import DEFAULT, RUNTIME, Database, Measurement
from onnxfuse.optimised import Optimised, Tell, silent
from onnxfuse.pipeline import Options, load, optimise
from onnxfuse.planning.context import Context
from onnxfuse.planning.contractions import STAGE as ATTENTION
from onnxfuse.planning.depthwise import STAGE as DEPTHWISE
from onnxfuse.planning.hardware import Profile, find_profile
from onnxfuse.planning.horizontal import STAGE
from onnxfuse.planning.passes import measured
from onnxfuse.planning.recompute import STAGE as RECOMPUTE
from onnxfuse.presence import present_profile
from onnxfuse.refusal import Refusal
from onnxfuse.schedules import Kernel, parse_choice, words
from onnxfuse.tuning.models import feeds_of, kernel_model, runtime_model
from onnxfuse.tuning.subjects import Subject, distinct
from onnxfuse.tuning.timer import Bench, Timed, Timer
from onnxfuse.verifying.tolerances import TABLE, judge

Array = NDArray[Any]


PRODUCTS = 2.0**-8
"""Share of the largest result by which ways to run an attention may differ: each rounds its powers to 16 bits under
maxima of its own.  All of them are verified when they are taken."""


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
    """

    rules: Sequence[str | Path] = ()
    disable: Sequence[str] = ()
    dims: Mapping[str, int] = field(default_factory=dict)
    budget: float | None = None
    force: bool = False
    stages: tuple[str, ...] = ()


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


@dataclass
class _Tally:
    measured: int = 0
    known: int = 0
    left: int = 0


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
    # Regions are measured apart, whatever shares a launch in the end; where values can be computed again, or an
    # attention be one kernel, or a depthwise convolution with what is around it, both ways.
    wanted = Options(options.rules, (*options.disable, STAGE), options.dims, profile, verify=False, database=False,
                     eager=True)
    loaded = load(source)
    optimised = optimise(loaded, wanted, tell)
    plans = [optimised]
    less = {RECOMPUTE: any(fusion.again for fusion in optimised.plan.fusions),
            **{stage: any(fusion.rule == stage for fusion in optimised.plan.fusions)
               for stage in (ATTENTION, DEPTHWISE)}}
    for stage in (stage for stage, found in less.items() if found and (not options.stages or stage in options.stages)):
        plans.append(optimise(loaded, replace(wanted, disable=(*wanted.disable, stage)), tell))
    subjects, refusals = distinct(plans)
    if options.stages:
        subjects = _of_stages(subjects, options.stages)
    if options.force:
        for subject in subjects:
            for key in (subject.what.kernel, subject.what.nodes):
                database.forget(timer.environment, key, subject.shapes)
    work = _Work(optimised, timer, database, None if options.budget is None else start + options.budget, tell)
    tallies = [work.measure(subject, place, len(subjects)) for place, subject in enumerate(subjects)]
    verdicts = {place: why for plan in plans for place, why in _verdicts(plan, work.found).items()}
    regions = [work.region(subject, tally, verdicts) for subject, tally in zip(subjects, tallies, strict=True)]
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


class _Work:
    """One model's subjects on one timer."""

    def __init__(self, optimised: Optimised, timer: Timer, database: Database, deadline: float | None,
                 tell: Tell) -> None:
        self.optimised, self.timer, self.database = optimised, timer, database
        self.deadline, self.tell = deadline, tell
        self.found = Measurements(database, timer.environment)

    def measure(self, subject: Subject, place: int, of: int) -> _Tally:
        """Measure what is not known of a subject."""
        kernels = subject.kernels(self.optimised.ledger.sizes)
        rows = self._rows(subject)
        missing = [name for name in (*kernels, RUNTIME) if name not in rows]
        tally = _Tally(known=1 + len(kernels) - len(missing))
        if not missing:
            return tally
        if self._late():
            tally.left = len(missing)
            return tally
        words = f"measuring {subject.fusion.rule}, kernel {place + 1} of {of}"
        self.tell(words, tally.known, 1 + len(kernels))
        wanted = [name for name in missing if name != RUNTIME]
        made = [kernels[name] for name in dict.fromkeys((DEFAULT, *wanted))] if wanted else []
        self.timer.compile([source_of(kernel.source, kernel.plan) for kernel in made if kernel.plan.kernels])
        body = runtime_model(subject, self.optimised)
        with self.timer.bench(feeds_of(body, subject, self.optimised.ledger.sizes)) as bench:
            right: Mapping[str, Array] | None = None
            if wanted:
                right = self._own(subject, kernels[DEFAULT], body, bench)
                tally.measured += DEFAULT in wanted
            for name in missing:
                # What nothing can be compared with is not measured.
                if name == DEFAULT or (name != RUNTIME and right is None):
                    continue
                if self._late():
                    break
                model = body if name == RUNTIME else kernel_model(body, subject, kernels[name])
                self._candidate(subject, name, model, bench, right)
                tally.measured += 1
                self.tell(words, tally.known + tally.measured, 1 + len(kernels))
        tally.left = len(missing) - tally.measured
        return tally

    def region(self, subject: Subject, tally: _Tally, verdicts: Mapping[int, str]) -> TunedRegion:
        """What is known of a subject now."""
        rows = self._rows(subject)
        right = {name: row for name, row in rows.items() if row.status == "ok"}
        choice = self.found.choice(subject.what)
        best = right.get(DEFAULT if choice is None else str(choice))
        runtime, default = right.get(RUNTIME), right.get(DEFAULT)
        fusion = subject.fusion
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
            measured=tally.measured,
            known=tally.known,
            left=tally.left,
            faults=tuple(f"{_words(name)}: {row.note}" for name, row in rows.items() if row.status != "ok"),
            verdict=verdict,
            reason=reason,
        )

    def _own(self, subject: Subject, kernel: Kernel, body: onnx.ModelProto, bench: Bench) -> Mapping[str, Array] | None:
        """Run and keep the schedule's own choice; its results, or None where it does not run."""
        timed = self._candidate(subject, DEFAULT, kernel_model(body, subject, kernel), bench, None)
        return None if timed is None else timed.outputs

    def _candidate(self, subject: Subject, name: str, model: onnx.ModelProto, bench: Bench,
                   right: Mapping[str, Array] | None) -> Timed | None:
        """Run a candidate and keep what came of it; a kernel must agree with ``right``."""
        key = subject.what.nodes if name == RUNTIME else subject.what.kernel
        try:
            timed = bench.time(model, fused=name != RUNTIME)
        except OnnxfuseError as error:
            if not self.timer.alive():
                raise KernelError(
                    f"The GPU stopped answering when a kernel of {subject.label} ran ({_words(name)}).",
                    remedy="This is a fault of onnxfuse; report it. `onnxfuse tune` goes on behind it once it was "
                           "recorded.",
                ) from error
            failed = Measurement(key, subject.shapes, name, 0.0, 0.0, 0, "failed", note=error.message)
            self.database.record(self.timer.environment, failed)
            return None
        share = PRODUCTS if subject.fusion.kernel.schedule == ATTENTION else 0.0
        wrong = "" if right is None or name == RUNTIME else disagreement(timed.outputs, right, share)
        row = Measurement(key, subject.shapes, name, timed.microseconds, timed.spread, timed.runs,
                          "wrong" if wrong else "ok", note=wrong)
        self.database.record(self.timer.environment, row)
        return timed

    def _rows(self, subject: Subject) -> dict[str, Measurement]:
        """Every measurement of a subject, its nodes' among them."""
        read, where = self.database.measurements, self.timer.environment
        return {**read(where, subject.what.kernel, subject.shapes), **read(where, subject.what.nodes, subject.shapes)}

    def _late(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline


def _verdicts(optimised: Optimised, found: Measurements) -> dict[int, str]:
    """By the id of a fusion of the plan: why it is left to ONNX Runtime."""
    plan = optimised.plan
    plan = replace(plan, refusals=(), fusions=(*plan.fusions, *plan.with_products))
    context = Context(optimised.canonical.graph, optimised.rules, optimised.costs)
    after = measured(plan, context.knowing(found, None))
    reasons = {refusal.node: refusal.message for refusal in after.refusals}
    kept = {fusion.view for fusion in after.fusions}
    return {id(fusion): reasons[fusion.nodes[0].label] for fusion in plan.fusions if fusion.view not in kept}


def disagreement(got: Mapping[str, Array], right: Mapping[str, Array], share: float = 0.0) -> str:
    """How far a candidate's results are from another schedule's of the same kernel, "" where they agree.

    Both add in float32 and differ in the order at most: ``verifying.tolerances`` says by how much.  ``share`` of the
    largest result is allowed beyond that.
    """
    for name, wanted in right.items():
        array = got.get(name)
        if array is None or array.shape != wanted.shape or array.dtype != wanted.dtype:
            return f"output {name} has another shape or type"
        if array.tobytes() == wanted.tobytes() or (share and _is_near(array, wanted, share)):
            continue
        kind = int(onnx.helper.np_dtype_to_tensor_dtype(wanted.dtype))
        reference = wanted.astype(np.float64) if kind in TABLE else wanted
        length = max(wanted.shape, default=1)
        judgement = judge(array, [reference], None, (kind, kind if kind in TABLE else None), length)
        if not judgement.passed:
            return (f"output {name} is wrong in {judgement.wrong} of {judgement.count} elements; "
                    f"{judgement.got} instead of {judgement.wanted}")
    return ""


def _is_near(array: Array, wanted: Array, share: float) -> bool:
    """Whether arrays differ by no more than a share of the largest number, and are no numbers at the same places."""
    one, other = array.astype(np.float64), wanted.astype(np.float64)
    largest = float(np.abs(other[np.isfinite(other)]).max(initial=0.0))
    return bool(np.allclose(one, other, rtol=0.0, atol=share * largest, equal_nan=True))


def _microseconds(row: Measurement | None) -> float | None:
    return None if row is None else row.microseconds


def _words(candidate: str) -> str:
    choice = parse_choice(candidate)
    return candidate if choice is None else words(choice)
