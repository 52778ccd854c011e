"""Which fused nodes changed an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from onnxfuse.debugging.pair import Inputs, Pair, Progress, first_that_runs, with_results
from onnxfuse.debugging.results import AnswerResult, Culprit
from onnxfuse.debugging.search import Asked, Oracle, culprits
from onnxfuse.debugging.variants import Outputs, Variants, default_tolerance, paired
from onnxfuse.verifying import KernelRunner, NodeResult, verify
from onnxfuse.verifying.evaluate import CPU
from onnxfuse.verifying.runner import CUDA
from onnxfuse.verifying.runs import Run

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
            ``variants.default_tolerance``.
        oracle: what tells whether a model with kernels running differs; by default sessions of the CUDA provider,
            where the runner has it.

    Raises:
        ModelError: the files do not belong together, or ``inputs`` do not fit the model.
        VerificationError: ONNX Runtime cannot run the original.
    """
    step = progress or (lambda *_: None)
    variants = Variants(pair.loaded, pair.fused)
    kernels = {name: node.op for name, node in variants.nodes.items()}
    notes = [] if runner is not None else [NO_KERNELS]
    with paired(pair.loaded, pair.fused) as slims:
        step("running the original", 0, 0)
        plain = CPU if runner is None else first_that_runs(slims[0], pair, inputs, [CPU, list(runner.providers)])
        runs = with_results(slims[0], pair, inputs, plain)
        asked = Asked(Outputs(slims, variants, runs, tolerance, plain), _told(step, "comparing functions"))
        outside = asked(frozenset())
        if outside.differs:
            return AnswerResult(None if runner is None else runner.name, _labels(runs), tolerance, len(kernels),
                                len(asked.known), outside.detail, (), tuple(notes))
        found = list(culprits(kernels, asked, "function"))
        tried, limit = len(asked.known), tolerance
        if runner is not None:
            left = _without(kernels, found)
            alone, unrun = _alone(pair, variants, left, runner, inputs, step)
            found += alone
            notes += unrun
            left = _without(kernels, found)
            limit = default_tolerance(pair.graph) if tolerance is None else tolerance
            if oracle is None and CUDA in str(runner.providers):
                runs = with_results(slims[0], pair, inputs, runner.providers)
                oracle = Outputs(slims, variants, runs, limit, runner.providers, kernels=True)
            if oracle is not None:
                asked = Asked(oracle, _told(step, "running variants"))
                found += culprits(left, asked, "model")
                tried += len(asked.known)
    named = tuple(_named(culprit, variants) for culprit in found)
    return AnswerResult(None if runner is None else runner.name, _labels(runs), limit, len(kernels), tried, "", named,
                        tuple(notes))


def _alone(pair: Pair, variants: Variants, kernels: Mapping[str, str], runner: KernelRunner, inputs: Inputs | None,
           step: Progress) -> tuple[list[Culprit], list[str]]:
    """Kernels that differ from their own nodes; and which could not be run alone, in sentences."""
    subject = replace(pair, fused=replace(pair.fused, proto=variants.model(pair.fused.proto, kernels.keys())))
    results = verify(subject, runner, inputs, step).nodes
    groups: dict[str, list[NodeResult]] = {}
    for result in results:
        if result.verdict == "failed":
            groups.setdefault(result.op, []).append(result)
    unrun = [result for result in results if result.verdict == "not run"]
    notes = [f"{len(unrun)} fused nodes were not run alone: {unrun[0].message}"] if unrun else []
    found = [
        Culprit("kernel", (first.node,), (op,), tuple(other.node for other in group if other is not first),
                first.message)
        for op, group in groups.items()
        for first in [next((result for result in group if not result.message.startswith("the kernel that it shares")),
                           group[0])]
    ]
    return found, notes


def _without(kernels: Mapping[str, str], found: Sequence[Culprit]) -> dict[str, str]:
    gone = {name for culprit in found for name in (*culprit.nodes, *culprit.alike)}
    return {name: kernel for name, kernel in kernels.items() if name not in gone}


def _named(culprit: Culprit, variants: Variants) -> Culprit:
    rules = tuple(dict.fromkeys(variants.nodes[name].rule for name in culprit.nodes))
    return replace(culprit, rules=rules,
                   replaces=tuple(label for name in culprit.nodes for label in variants.labels(name)))


def _told(step: Progress, what: str) -> Callable[[int, int], None]:
    return lambda tried, left: step(f"{what}: {tried} variants tried, {left} fused nodes in the last", 0, 0)


def _labels(runs: Sequence[tuple[Run, Sequence[Any]]]) -> tuple[str, ...]:
    return tuple(str(run.about) for run, _ in runs)
