"""Every kernel of a fused model against the nodes that it replaced, and the whole model with all of them running."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import onnx
from numpy.typing import NDArray

from onnxfuse.errors import KernelError, VerificationError
from onnxfuse.graph import Graph
from onnxfuse.graph.load import LoadedModel
from onnxfuse.planning.costs.traffic import Ledger
from onnxfuse.rewriting import FusedNode
from onnxfuse.verifying.bounds import Bounds, BoundsError, OutOfMemoryError, OutOfTimeError, run_bytes
from onnxfuse.verifying.capture import Captured, Source, capture
from onnxfuse.verifying.closeness import Closeness
from onnxfuse.verifying.evaluate import CPU
from onnxfuse.verifying.first_run import FirstRun
from onnxfuse.verifying.nodes import NodeVerifier, with_their_kernels
from onnxfuse.verifying.results import NodeResult, OutputDifference
from onnxfuse.verifying.runner import CUDA, KernelRunner
from onnxfuse.verifying.runs import Run
from onnxfuse.verifying.several import batches, passed
from onnxfuse.verifying.sharing import Slim, sharing, weight_bytes
from onnxfuse.verifying.whole import Begun, on_device, results_on_device

Array = NDArray[Any]
Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""

_UNREACHED = "its body did not run, and what it reads there cannot be made up"


class Subject(Protocol):
    """What is verified: ``optimised.Optimised``."""

    @property
    def loaded(self) -> LoadedModel: ...
    @property
    def graph(self) -> Graph: ...
    @property
    def ledger(self) -> Ledger: ...
    @property
    def lean(self) -> onnx.ModelProto: ...
    @property
    def folder(self) -> Path | None: ...
    @property
    def first_run(self) -> FirstRun | None: ...


@dataclass(frozen=True)
class Planned:
    """The model whose values fused nodes read, the same for sessions, which is made when it is asked for, and what its
    runs may take."""

    loaded: LoadedModel
    slim: Callable[[], Slim]
    bounds: Bounds


@dataclass
class Kernels:
    """Kernels under verification.

    Attributes:
        subject: what they are of; fused: its fused nodes; runner: what runs them.
        users: whether the runs are of the user's own inputs; compared_on: the providers that the model as a whole was
            compared on.
        notes: what the result will note, to be added to; step: is told how far it is.
    """

    subject: Subject
    fused: Sequence[FusedNode]
    runner: KernelRunner
    users: bool
    compared_on: Sequence[Any]
    notes: list[str]
    step: Progress

    def verified(self, planned: LoadedModel, original: Slim, runs: Sequence[Run], inner: Sequence[Mapping[str, Array]]
                 ) -> tuple[NodeResult, ...]:
        """Every kernel against the nodes that it replaced, on what they read in the runs.

        Args:
            planned: the ``planned_form`` of the model; original: as it was compared.
            inner: values of each run that are known.
        """
        with ExitStack() as stack:
            # Its weights are written to a file once more, which nobody reads where the runs gave all that nodes read.
            source = cache(lambda: original if planned is self.subject.loaded else stack.enter_context(
                sharing(planned, self.subject.lean, original.bounds))[0])
            return self._nodes(Planned(planned, source, original.bounds), runs, inner)

    def begin(self, pool: ThreadPoolExecutor, pair: tuple[Slim, Slim], runs: Sequence[Run]) -> Future[Begun] | None:
        """Let the original run on the device beside what kernels are compared with, for ``on_device``: the first run at
        any size takes a GPU's libraries seconds; then make the session with kernels.  None where the device may be
        short of memory then."""
        ledger, runs = self.subject.ledger, self._shown(runs)
        needed = run_bytes(ledger.at(runs[0].about.sizes)) + weight_bytes(self.subject.lean)
        if self.users or CUDA not in str(self.runner.providers) or not self.runner.has_room(needed):
            return None
        return pool.submit(self._begun, *pair, runs)

    def _begun(self, original: Slim, fused: Slim, runs: Sequence[Run]) -> Begun:
        wanted = self._wanted(original, runs)
        try:
            return Begun(wanted, fused.fused_session(self.runner.providers))
        except Exception:  # it is tried again behind the kernels, and told of then
            return Begun(wanted)

    def on_device(self, pair: tuple[Slim, Slim], runs: Sequence[Run], closeness: Closeness,
                  begun: Future[Begun] | None = None) -> tuple[OutputDifference, ...]:
        """The whole model with its kernels running, on the first of made inputs or on all of the user's; nothing where
        the runner's device is no GPU.  ``begun``: of ``begin``; what failed there is tried again."""
        if CUDA not in str(self.runner.providers):
            return ()
        (original, fused), runs, done = pair, self._shown(runs), None
        if begun is not None:
            with suppress(VerificationError, MemoryError):
                done = begun.result()
        try:
            if done is None:
                done = Begun(self._wanted(original, runs))
            return on_device(done, fused, runs, self.runner.providers, closeness)
        except (VerificationError, KernelError) as error:
            self.notes.append(f"The whole model was not run with kernels: {error.message}")
        except MemoryError:
            self.notes.append(f"The whole model was not run with kernels: {OutOfMemoryError().message}")
        return ()

    def _wanted(self, original: Slim, runs: Sequence[Run]) -> Sequence[Sequence[Any]]:
        """The original's outputs on the device, as they came beside planning if they did.

        Raises:
            VerificationError: a run fails.
        """
        first = self.subject.first_run
        known = None if first is None else first.on_device(original, runs)
        return known or results_on_device(original, runs, self.runner.providers)

    def _shown(self, runs: Sequence[Run]) -> Sequence[Run]:
        """Of these, those in which the whole model runs with kernels."""
        return runs if self.users else runs[:1]

    def _captured(self, source: Source, original: Callable[[], Slim], inner: Mapping[str, Array]) -> Iterator[Captured]:
        """``capture`` where the model ran before on inputs that are made up: they are few, and a GPU's libraries take
        seconds for the first run at any size.  The user's own run on the runner's device; what that does not give, on
        the CPU.  ``inner``: values of the run that are known.
        """
        nodes, runner = self.fused, self.runner
        sizes = {**self.subject.ledger.sizes, **source.run.about.sizes}
        done: set[str] = set()
        providers = runner.providers if self.users else self.compared_on
        try:
            for taken in capture(nodes, source, original, sizes, providers, inner):
                done.add(taken.node.name)
                yield taken
            return
        except BoundsError:
            raise
        except VerificationError as error:
            if list(providers) == CPU or not runner.alive():
                raise
            said = f"The original does not run on {runner.name}; what its nodes read is from the CPU: {error.message}"
            self.notes += [] if said in self.notes else [said]
        left = [node for node in nodes if node.name not in done]
        for taken in capture(left, source, original, sizes, CPU):
            yield replace(taken, how=f"{taken.how} on the CPU")

    def _nodes(self, planned: Planned, runs: Sequence[Run], inner: Sequence[Mapping[str, Array]]
               ) -> tuple[NodeResult, ...]:
        """``verified``."""
        nodes, runner, results = self.fused, self.runner, dict[str, NodeResult]()
        verifier = NodeVerifier(self.subject.lean, runner, planned.bounds)
        for number, run in enumerate(runs):
            turn = _Turn(self, verifier, planned.bounds, results, "" if len(runs) == 1 else f", run {number + 1}",
                         (number * len(nodes), len(nodes) * len(runs)))
            try:
                source = Source(planned.loaded, self.subject.graph, run)
                turn.verify(self._captured(source, planned.slim, inner[number]))
                planned.bounds.left()
            except (VerificationError, MemoryError) as problem:
                error = OutOfMemoryError() if isinstance(problem, MemoryError) else problem
                left = "Nodes, or some of their inputs," if isinstance(error, OutOfTimeError) else "Nodes"
                self.notes.append(f"{left} were left out in run {number + 1}: {error.message}")
                for node in nodes:
                    results.setdefault(node.name, not_run((node,), error.message)[0])
                if isinstance(error, OutOfTimeError) or not runner.alive():
                    break
        for node in nodes:
            results.setdefault(node.name, not_run((node,), _UNREACHED)[0])
        return tuple(with_their_kernels([results[node.name] for node in nodes]))


@dataclass(frozen=True)
class _Turn:
    """The nodes on what they read in one run.

    Attributes:
        results: of all runs so far, by node, to be added to; label: the run's, behind what inputs are called.
        counted: how many nodes there were before, and are in all runs.
    """

    kernels: Kernels
    verifier: NodeVerifier
    bounds: Bounds
    results: dict[str, NodeResult]
    label: str
    counted: tuple[int, int]

    def verify(self, captured: Iterable[Captured]) -> None:
        """All of them.

        Raises:
            VerificationError: the device does not answer any more, or the time is up.
        """
        runner, (before, total) = self.kernels.runner, self.counted
        done: set[str] = set()
        for batch in batches(captured, runner):
            self.kernels.step(f"verifying {batch[0].node.name}", before + len(done), total)
            known, ended = passed(batch, partial(self._verified, final=False), runner, self.bounds)
            self.results.update(known)
            if ended is not None:
                self.results[ended.node] = _joined(self.results.get(ended.node), ended)
                raise _stopped(ended.node)
            for name, taken in ((taken.node.name, taken) for taken in batch):
                self.bounds.left()
                self.kernels.step(f"verifying {name}", before + len(done), total)
                done.add(name)
                if name not in known:
                    self.results[name] = self._verified(taken)
                    if self.results[name].verdict == "failed" and not runner.alive():
                        raise _stopped(name)

    def _verified(self, taken: Captured, final: bool = True) -> NodeResult:
        """What this run and those before it say of a node; what this one says alone where it did not pass and that is
        not final."""
        node, earlier = taken.node, self.results.get(taken.node.name)
        if earlier is not None and earlier.verdict == "failed":
            return earlier
        # Inputs that are made up show nothing new of a kernel that was compared at these shapes.
        if not self.kernels.users and (standing := self.verifier.standing(node, taken.feeds)) is not None:
            return earlier or standing
        found = self.verifier.verify(node, taken.feeds, f"{taken.how}{self.label}", final)
        return _joined(earlier, found) if final or found.verdict == "passed" else found


def _stopped(name: str) -> VerificationError:
    return VerificationError(f"the GPU stopped answering when {name} ran")


def _joined(first: NodeResult | None, second: NodeResult) -> NodeResult:
    """What two runs together say of a node."""
    if first is None or first.verdict == "not run":
        return second
    if second.verdict == "not run":
        return first
    worst = second if second.verdict == "failed" or second.ratio > first.ratio else first
    return NodeResult(
        worst.node, worst.op, worst.rule, worst.verdict, worst.error, worst.tolerance, worst.ratio,
        tuple(dict.fromkeys((*first.inputs, *second.inputs))),
        tuple(dict.fromkeys((*first.variants, *second.variants))), first.shared and second.shared,
        first.rounded or second.rounded, worst.message, worst.where,
    )


def not_run(nodes: Sequence[FusedNode], message: str) -> tuple[NodeResult, ...]:
    """Nodes whose kernels were not run, and why."""
    return tuple(NodeResult(node.name, node.op, node.rule, "not run", message=message) for node in nodes)
