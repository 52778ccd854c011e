"""Which fused nodes changed an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from onnxfuse.debugging.pair import Inputs, Progress, first_that_runs, with_results
from onnxfuse.debugging.results import AnswerResult, Culprit
from onnxfuse.debugging.search import Asked, Oracle, Outcome, culprits
from onnxfuse.debugging.variants import Outputs, Variants
from onnxfuse.rewriting import exact_form, read_fused
from onnxfuse.verifying import KernelRunner, NodeResult, verify
from onnxfuse.verifying.closeness import default_tolerance
from onnxfuse.verifying.evaluate import CPU
from onnxfuse.verifying.pair import Pair
from onnxfuse.verifying.runner import CUDA
from onnxfuse.verifying.runs import Run
from onnxfuse.verifying.sharing import Slim, sharing

NO_KERNELS = ("There is no GPU here that ONNX Runtime can use: the functions of the fused nodes were compared, and "
              "their kernels were not run.")


def bisect_answers(
    pair: Pair,
    runner: KernelRunner | None = None,
    *,
    inputs: Inputs | None = None,
    tolerance: float | None = None,
    oracle: Oracle | None = None,
    progress: Progress | None = None,
) -> AnswerResult:
    """Find the fused nodes that change an answer.

    First the functions: without kernels every output must be the original's bit for bit.  Then, with a runner, every
    kernel against its own nodes; then the model with kernels running against the original, what was found so far put
    back.

    Args:
        runner: what runs kernels, such as ``verifying.find_runner()``.
        inputs: the user's own, by name; made ones where None.
        tolerance: error of an output over its largest magnitude; by default none without kernels, and with them
            ``closeness.default_tolerance``.
        oracle: what tells whether a model with kernels running differs; by default sessions of the CUDA provider,
            where the runner has it.

    Raises:
        ModelError: the files do not belong together, or ``inputs`` do not fit the model.
        VerificationError: ONNX Runtime cannot run the original.
    """
    hunt = _Hunt(pair, Variants(pair.loaded, pair.fused), inputs, progress or (lambda *_: None))
    limit = tolerance
    with sharing(pair.loaded, pair.fused.proto, folder=pair.folder) as (original, other):
        slims = original.of(exact_form(original.model, pair.fused.proto)), other
        outside = hunt.without_kernels(slims, runner, tolerance)
        if runner is None:
            hunt.notes.append(NO_KERNELS)
        elif not outside.differs:
            hunt.kernels_alone(runner)
            fused = read_fused(pair.fused.proto)
            limit = default_tolerance(pair.graph, fused) if tolerance is None else tolerance
            hunt.with_kernels(hunt.sessions(slims, runner, limit) if oracle is None else oracle)
    named = tuple(_named(culprit, hunt.variants) for culprit in hunt.found)
    return AnswerResult(None if runner is None else runner.name, hunt.labels, limit, len(hunt.kernels), hunt.tried,
                        outside.detail if outside.differs else "", named, tuple(hunt.notes))


@dataclass
class _Hunt:
    """What is searched for culprits, and what came of it so far.

    Attributes:
        found: culprits; notes: what a reader should know; tried: variants that were compared.
        labels: of the inputs of the runs that told.
    """

    pair: Pair
    variants: Variants
    inputs: Inputs | None
    step: Progress
    found: list[Culprit] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tried: int = 0
    labels: tuple[str, ...] = ()

    @property
    def kernels(self) -> dict[str, str]:
        """The kernels of all fused nodes, by the nodes' names."""
        return {name: node.op for name, node in self.variants.nodes.items()}

    @property
    def left(self) -> dict[str, str]:
        """Those of nodes that nothing was found of."""
        gone = {name for culprit in self.found for name in (*culprit.nodes, *culprit.alike)}
        return {name: kernel for name, kernel in self.kernels.items() if name not in gone}

    def without_kernels(
        self, slims: tuple[Slim, Slim], runner: KernelRunner | None, tolerance: float | None
    ) -> Outcome:
        """Find functions that differ, unless the model does with every fused node put back, of which this tells."""
        self.step("running the original", 0, 0)
        plain = CPU if runner is None else first_that_runs(slims[0], self.pair, self.inputs,
                                                           [CPU, list(runner.providers)])
        runs = with_results(slims[0], self.pair, self.inputs, plain)
        self.labels = _labels(runs)
        asked = Asked(Outputs(slims, self.variants, runs, tolerance, plain), _told(self.step, "comparing functions"))
        outside = asked(frozenset())
        if not outside.differs:
            self.found += culprits(self.kernels, asked, "function")
        self.tried += len(asked.known)
        return outside

    def kernels_alone(self, runner: KernelRunner) -> None:
        """Find kernels that differ from their own nodes; note which could not be run alone."""
        pair = self.pair
        model = self.variants.model(pair.fused.proto, self.left.keys())
        subject = replace(pair, fused=replace(pair.fused, proto=model))
        results = verify(subject, runner, self.inputs, self.step).nodes
        groups: dict[str, list[NodeResult]] = {}
        for result in results:
            if result.verdict == "failed":
                groups.setdefault(result.op, []).append(result)
        unrun = [result for result in results if result.verdict == "not run"]
        if unrun:
            self.notes.append(f"{len(unrun)} fused nodes were not run alone: {unrun[0].message}")
        self.found += [_same_kernel(group) for group in groups.values()]

    def sessions(self, slims: tuple[Slim, Slim], runner: KernelRunner, limit: float) -> Oracle | None:
        """What tells whether a model differs with kernels running: sessions of the runner's providers, where the CUDA
        provider is among them."""
        if CUDA not in str(runner.providers):
            return None
        runs = with_results(slims[0], self.pair, self.inputs, runner.providers)
        self.labels = _labels(runs)
        return Outputs(slims, self.variants, runs, limit, runner.providers, kernels=True)

    def with_kernels(self, oracle: Oracle | None) -> None:
        """Find what differs with kernels running, where there is something to tell."""
        if oracle is not None:
            asked = Asked(oracle, _told(self.step, "running variants"))
            self.found += culprits(self.left, asked, "model")
            self.tried += len(asked.known)


def _same_kernel(group: Sequence[NodeResult]) -> Culprit:
    """The culprit of failed nodes with one kernel: the one of them that it failed at."""
    first = next((result for result in group if not result.message.startswith("the kernel that it shares")), group[0])
    return Culprit("kernel", (first.node,), (first.op,), tuple(other.node for other in group if other is not first),
                   first.message)


def _named(culprit: Culprit, variants: Variants) -> Culprit:
    rules = tuple(dict.fromkeys(variants.nodes[name].rule for name in culprit.nodes))
    return replace(culprit, rules=rules,
                   replaces=tuple(label for name in culprit.nodes for label in variants.labels(name)))


def _told(step: Progress, what: str) -> Callable[[int, int], None]:
    return lambda tried, left: step(f"{what}: {tried} variants tried, {left} fused nodes in the last", 0, 0)


def _labels(runs: Sequence[tuple[Run, Sequence[Any]]]) -> tuple[str, ...]:
    return tuple(str(run.about) for run, _ in runs)
