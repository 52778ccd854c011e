"""Every kernel of a fused model against the nodes that it replaced, and the whole model with all of them running."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from onnxfuse.errors import KernelError, VerificationError
from onnxfuse.graph import Graph
from onnxfuse.graph.load import LoadedModel
from onnxfuse.planning.traffic import Ledger
from onnxfuse.rewriting import FusedNode, Rewritten, planned_form
from onnxfuse.verifying.bounds import BoundsError, OutOfMemoryError, OutOfTimeError, run_bytes
from onnxfuse.verifying.capture import Captured, Source, capture
from onnxfuse.verifying.closeness import Closeness
from onnxfuse.verifying.evaluate import CPU
from onnxfuse.verifying.nodes import NodeVerifier, with_their_kernels
from onnxfuse.verifying.results import NodeResult, OutputDifference
from onnxfuse.verifying.runner import CUDA, KernelRunner
from onnxfuse.verifying.runs import Run
from onnxfuse.verifying.sharing import Slim, sharing
from onnxfuse.verifying.whole import on_device, results_on_device

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
    def rewritten(self) -> Rewritten: ...
    @property
    def folder(self) -> Path | None: ...


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

    def verified(self, pair: tuple[Slim, Slim], runs: Sequence[Run], inner: Sequence[Mapping[str, Array]]
                 ) -> tuple[NodeResult, ...]:
        """Every kernel against the nodes that it replaced, on what they read in the runs.

        Args:
            pair: the original and the fused model, as they were compared; inner: values of each run that are known.
        """
        original, fused = pair
        loaded, model = self.subject.loaded, self.subject.rewritten.model
        planned = planned_form(loaded, model)
        with nullcontext((original, fused)) if planned is loaded else sharing(
            planned, model, original.bounds
        ) as (source, _):
            return self._nodes(planned, source, runs, inner)

    def begin(self, pool: ThreadPoolExecutor, original: Slim, runs: Sequence[Run]) -> Future[list[list[Any]]] | None:
        """Let the original run on the device beside what kernels are compared with, for ``on_device``: the first run at
        any size takes a GPU's libraries seconds.  None where it may be short of memory then."""
        ledger, runs = self.subject.ledger, self._shown(runs)
        sizes = {**ledger.sizes, **runs[0].about.sizes}
        needed = run_bytes(Ledger(ledger.graph, sizes, ledger.placement))
        if self.users or CUDA not in str(self.runner.providers) or not self.runner.has_room(needed):
            return None
        return pool.submit(results_on_device, original, runs, self.runner.providers)

    def on_device(self, pair: tuple[Slim, Slim], runs: Sequence[Run], closeness: Closeness,
                  begun: Future[list[list[Any]]] | None = None) -> tuple[OutputDifference, ...]:
        """The whole model with its kernels running, on the first of made inputs or on all of the user's; nothing where
        the runner's device is no GPU.  ``begun``: of ``begin``; what failed there is tried again."""
        if CUDA not in str(self.runner.providers):
            return ()
        (original, fused), runs, wanted = pair, self._shown(runs), None
        if begun is not None:
            with suppress(VerificationError, MemoryError):
                wanted = begun.result()
        try:
            if wanted is None:
                wanted = results_on_device(original, runs, self.runner.providers)
            return on_device(wanted, fused, runs, self.runner.providers, closeness)
        except (VerificationError, KernelError) as error:
            self.notes.append(f"The whole model was not run with kernels: {error.message}")
        except MemoryError:
            self.notes.append(f"The whole model was not run with kernels: {OutOfMemoryError().message}")
        return ()

    def _shown(self, runs: Sequence[Run]) -> Sequence[Run]:
        """Of these, those in which the whole model runs with kernels."""
        return runs if self.users else runs[:1]

    def _captured(self, source: Source, original: Slim, inner: Mapping[str, Array]) -> Iterator[Captured]:
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

    def _nodes(self, planned: LoadedModel, original: Slim, runs: Sequence[Run], inner: Sequence[Mapping[str, Array]]
               ) -> tuple[NodeResult, ...]:
        """``verified``.

        Args:
            planned: the model whose values the fused nodes read; original: that for sessions.
        """
        subject, nodes, runner = self.subject, self.fused, self.runner
        verifier = NodeVerifier(subject.rewritten.model, runner, original.bounds)
        results: dict[str, NodeResult] = {}
        total = len(nodes) * len(runs)
        for number, run in enumerate(runs):
            turn = "" if len(runs) == 1 else f", run {number + 1}"
            done: set[str] = set()
            try:
                source = Source(planned, subject.graph, run)
                for taken in self._captured(source, original, inner[number]):
                    node = taken.node
                    original.bounds.left()
                    self.step(f"verifying {node.name}", number * len(nodes) + len(done), total)
                    done.add(node.name)
                    if (earlier := results.get(node.name)) is not None and earlier.verdict == "failed":
                        continue
                    # Inputs that are made up show nothing new of a kernel that was compared at these shapes.
                    if not self.users and (standing := verifier.standing(node, taken.feeds)) is not None:
                        results.setdefault(node.name, standing)
                        continue
                    results[node.name] = _joined(earlier, verifier.verify(node, taken.feeds, f"{taken.how}{turn}"))
                    if results[node.name].verdict == "failed" and not runner.alive():
                        raise VerificationError(f"the GPU stopped answering when {node.name} ran")
                original.bounds.left()
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
