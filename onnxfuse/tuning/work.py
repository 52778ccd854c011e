"""One model's regions on one timer: what is known of each, and measuring what is not."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import onnx
from numpy.typing import NDArray

from onnxfuse.errors import KernelError, OnnxfuseError
from onnxfuse.measurements import is_of
from onnxfuse.measuring.database import DEFAULT, RUNTIME, Database, Measurement
from onnxfuse.operators.classes import QUANTIZE
from onnxfuse.optimised import Tell
from onnxfuse.planning.regions.products import STAGE as PRODUCTS
from onnxfuse.schedules import SCHEDULES, Kernel, alone, parse_choice, words
from onnxfuse.schedules.kernel import contractions
from onnxfuse.tuning.ahead import Ahead
from onnxfuse.tuning.models import bound_names, feeds_of, kernel_model, runtime_model, weights_of
from onnxfuse.tuning.order import FIRST, Known, urgency
from onnxfuse.tuning.samples import disagreement
from onnxfuse.tuning.subjects import Subject, labels_of
from onnxfuse.tuning.timer import Bench, Timer, held
from onnxfuse.tuning.watch import Watch

Array = NDArray[Any]

TOGETHER = 4
"""Ways to run a kernel that are measured before it is asked anew which region is worth most: their inputs are put on
the GPU once."""


class State:
    """A subject, and what is known of it so far.

    Attributes:
        rows: measurements by candidate, the runtime's nodes among them.
        known: how many of its candidates were known; measured: how many were measured now.
        body: its nodes as a model; right: results of the schedule's own choice; both where they were needed.
        failed: whether that does not run, so that there is nothing to compare others with.
    """

    def __init__(self, subject: Subject, rows: dict[str, Measurement], ranking: Sequence[str] = ()) -> None:
        """``ranking``: its candidates from the fastest on, as far as another environment tells."""
        # What was measured of the schedule's own choice counts where that is the same still.
        self.subject, self.rows = subject, {
            name: row for name, row in rows.items() if name != DEFAULT or is_of(row, subject.fusion.kernel)}
        own = (name for name in subject.candidates if name != DEFAULT)
        place = {name: number for number, name in enumerate(ranking)}
        self._names = (RUNTIME, DEFAULT, *sorted(own, key=lambda name: place.get(name, len(place))))
        self.known, self.measured = len(rows.keys() & {RUNTIME, *subject.candidates}), 0
        self.body: onnx.ModelProto | None = None
        self.right: Mapping[str, Array] | None = None
        self.failed = DEFAULT in rows and rows[DEFAULT].status == "failed"
        self._situation = subject.source.costs.situation(subject.fusion)
        self._kernels: dict[str, Kernel] = {}
        self._dropped: set[str] = set()
        fusion = subject.fusion
        products = 0 if fusion.lowered is None else len(contractions(fusion.lowered))
        self._first = labels_of(fusion)
        self._products, self._bare = products > 0, fusion.rule == PRODUCTS and products == len(self._first)
        self._parts: list[State] = []
        self._holder = 0.0

    def relate(self, states: Sequence[State]) -> None:
        """Find the regions of which it has all nodes and more, and the longest of those that have its own so."""
        self._parts = [other for other in states if other.is_part(self)]
        self._holder = max((other.time for other in states if self.is_part(other)), default=0.0)

    @property
    def time(self) -> float:
        """What the model's nodes that it stands for are predicted to take, in microseconds."""
        return self.subject.count * self._once[0]

    @property
    def _once(self) -> tuple[float, float]:
        """What one region's nodes and its kernel are predicted to take each time, in microseconds."""
        cost = self.subject.fusion.cost
        runs = cost.executions or 1.0
        return 1e6 * cost.seconds_before / runs, 1e6 * cost.seconds_after / runs

    def is_part(self, other: State) -> bool:
        """Whether another region has all its nodes and more."""
        return len(self._first) < len(other._first) and self._first <= other.subject.labels

    @property
    def missing(self) -> list[str]:
        """Candidates that are not known, the runtime's nodes first."""
        return [name for name in self._names if name not in self.rows and name not in self._dropped]

    def keys(self, names: Iterable[str]) -> Iterator[tuple[str, str, str]]:
        """What the database keeps its candidates of these names under, as other regions may have them too."""
        what, wanted = self.subject.what, {RUNTIME, *self.subject.candidates}
        for name in names:
            if name in wanted:
                yield (what.nodes if name == RUNTIME else what.kernel), self.subject.shapes, name

    @property
    def next(self) -> list[str]:
        """What to measure when it is its turn; nothing where there is no more."""
        missing = self.missing
        first = [name for name in missing if name == RUNTIME or (name == DEFAULT and not self._bare)]
        if first or self.failed:
            return first
        return missing[:1] if DEFAULT in missing else missing[:TOGETHER]

    @property
    def summary(self) -> Known:
        """What decides when that is."""
        before, after = self._once
        right = {name: row.microseconds for name, row in self.rows.items() if row.status == "ok"}
        ways = [microseconds for name, microseconds in right.items() if name != RUNTIME]
        opened = RUNTIME in self.rows and (self._bare or DEFAULT in self.rows)
        return Known(
            self.subject.count, before, right.get(RUNTIME), min(ways, default=None), opened, len(ways), self._products,
            self._bare, self._holder, after)

    @property
    def urgency(self) -> tuple[int, float]:
        """See ``order``."""
        return urgency(self.summary, [part.summary for part in self._parts])

    def kernel(self, name: str) -> Kernel | None:
        """A candidate's kernel with nothing in it but what runs here; None, and the candidate is dropped, where that is
        another candidate's, as where this GPU has not what it asks for."""
        if name != DEFAULT:
            self.kernel(DEFAULT)  # of two that run alike this one stays: all others are compared with it
        if name not in self._kernels and name not in self._dropped:
            made = self.subject.kernel(name)
            if made is not None and self._situation is not None:
                made = alone(made, self._situation)
            if made is None or any(map(made.runs_like, self._kernels.values())):
                self._dropped.add(name)
            else:
                self._kernels[name] = made
        return self._kernels.get(name)


class Work:
    """A model's regions, and what measures them.

    Attributes:
        states: what is known of each region.
    """

    def __init__(self, timer: Timer, database: Database, tell: Tell, watch: Watch | None = None) -> None:
        self._timer, self._database, self._tell, self._watch = timer, database, tell, watch
        self.states: list[State] = []

    def add(self, subjects: Sequence[Subject], *, force: bool = False) -> None:
        """Take on regions, in their order, but for those that it has; ``force``: forget what is known of them."""
        had = {state.subject.what: state for state in self.states}
        new = [subject for subject in subjects if subject.what not in had]
        where = self._timer.environment
        if force:
            kept = {key for state in self.states for key in state.subject.places}
            for key in {key for subject in new for key in subject.places} - kept:
                self._database.forget(where, *key)
        for subject in new:
            rows = (self._database.measurements(where, *key) for key in subject.places)
            ranking = self._database.ranking(where, *subject.places[0])
            had[subject.what] = State(subject, {name: row for found in rows for name, row in found.items()}, ranking)
        self.states = sorted(had.values(), key=lambda state: -state.subject.seconds)
        for state in self.states:
            state.relate(self.states)

    def measure(self, ahead: Ahead, deadline: float, *, opening: bool = False) -> None:
        """Measure what is not known, what is worth most first; after the deadline, by ``time.monotonic``, nothing more
        begins.  ``opening``: no more than what tells whether regions are worth fusing."""
        with held():
            while time.monotonic() < deadline and (waiting := self._waiting()):
                if opening and waiting[0].urgency[0] < FIRST:
                    return
                _compile(waiting, ahead)
                self._visit(waiting[0], ahead, deadline)

    def _waiting(self) -> list[State]:
        return sorted((state for state in self.states if state.next), key=lambda state: state.urgency, reverse=True)

    def _visit(self, state: State, ahead: Ahead, deadline: float) -> None:
        """Measure a state's next candidates."""
        names = state.next
        body = state.body = state.body or runtime_model(state.subject)
        feeds = feeds_of(body, state.subject)
        with self._timer.bench(feeds, weights_of(body), bound_names(state.subject)) as bench:
            if DEFAULT in state.rows and names != [RUNTIME]:
                names = [DEFAULT, *names] if state.right is None else names
            for name in names:
                if time.monotonic() >= deadline:
                    return
                self._say(state)
                model = body
                if name != RUNTIME:
                    kernel = state.kernel(name)
                    if kernel is None or state.failed:
                        continue
                    ahead.finish(kernel)
                    model = kernel_model(body, state.subject, kernel)
                self._candidate(state, name, model, bench)

    def _candidate(self, state: State, name: str, model: onnx.ModelProto, bench: Bench) -> None:
        """Run a candidate and keep what came of it; a kernel must agree with the schedule's own choice."""
        subject = state.subject
        key = subject.what.nodes if name == RUNTIME else subject.what.kernel
        failed = Measurement(key, subject.shapes, name, 0.0, 0.0, 0, "failed", note="it did not end")
        try:
            with nullcontext() if self._watch is None or name == RUNTIME else self._watch.over(failed):
                timed = bench.time(model, fused=name != RUNTIME)
        except OnnxfuseError as error:
            alive = self._timer.alive()
            if alive or name != RUNTIME:  # else nothing is known of the runtime's nodes
                state.failed |= name == DEFAULT
                self._record(state, replace(failed, note=error.message))
            if not alive:
                raise KernelError(
                    f"The GPU stopped answering when a kernel of {subject.label} ran ({candidate_words(name)}).",
                    remedy="This is a fault of onnxfuse; report it. `onnxfuse tune` goes on behind it when it is run "
                           "again.",
                ) from error
            return
        wrong, entry = "", ""
        if name == DEFAULT:
            state.right, entry = timed.outputs, subject.fusion.kernel.entry
        elif name != RUNTIME:
            assert state.right is not None
            # All of them are verified when they are taken.
            kernel = state.kernel(name)
            share = 0.0 if kernel is None else SCHEDULES[subject.fusion.kernel.schedule].leeway(kernel)
            length = max((size for shape in subject.what.outputs for size in shape), default=1)
            quantised = any(node.op == QUANTIZE for node in subject.fusion.nodes)
            wrong = disagreement(timed.outputs, state.right, length, share, quantised)
        self._record(state, Measurement(key, subject.shapes, name, timed.microseconds, timed.spread, timed.runs,
                                        "wrong" if wrong else "ok", note=wrong or entry))

    def _record(self, state: State, row: Measurement) -> None:
        """Keep a measurement, for all regions that it is of."""
        self._database.record(self._timer.environment, row)
        state.measured += row.candidate not in state.rows
        for other in self.states:
            what = other.subject.what
            if row.subject in (what.kernel, what.nodes) and row.shapes == other.subject.shapes:
                other.known += other is not state and row.candidate in other.missing
                other.rows[row.candidate] = row

    def _say(self, state: State) -> None:
        done = {key for each in self.states for key in each.keys(each.rows)}
        left = {key for each in self.states for key in each.keys(each.missing)}
        self._tell(f"measuring {state.subject.fusion.rule}", len(done), len(done | left))


def _compile(waiting: Sequence[State], ahead: Ahead) -> None:
    """Have the kernels compiled whose turn is next, at least those of the first state."""
    for place, state in enumerate(waiting):
        for name in state.next:
            if place and ahead.full:
                return
            kernel = None if name == RUNTIME else state.kernel(name)
            if kernel is not None:
                ahead.add(kernel)


def candidate_words(candidate: str) -> str:
    """A candidate for people."""
    choice = parse_choice(candidate)
    return candidate if choice is None else words(choice)
