"""Verification of a fused model: as a whole without kernels, and kernel by kernel where something runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from onnxfuse.errors import KernelError, ModelError, OnnxfuseError, VerificationError
from onnxfuse.graph import Graph
from onnxfuse.graph.load import LoadedModel
from onnxfuse.measuring.inputs import make_inputs
from onnxfuse.planning.traffic import Ledger
from onnxfuse.rewriting import FusedNode, Placed, Rewritten, read_fused
from onnxfuse.verifying.capture import capture
from onnxfuse.verifying.evaluate import CPU
from onnxfuse.verifying.nodes import NodeVerifier, condemned
from onnxfuse.verifying.results import NodeResult, OutputDifference, RunInputs, Verification, WholeResult
from onnxfuse.verifying.runner import CUDA, CudaRunner, KernelRunner
from onnxfuse.verifying.runs import Run, make_run, shrunk, uneven
from onnxfuse.verifying.sharing import Slim, sharing
from onnxfuse.verifying.whole import Whole, checker_message, on_device

Array = NDArray[Any]
Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


_UNREACHED = "its body did not run, and what it reads there cannot be made up"


class Subject(Protocol):
    """What is verified: ``pipeline.Optimised``."""

    @property
    def loaded(self) -> LoadedModel: ...
    @property
    def graph(self) -> Graph: ...
    @property
    def ledger(self) -> Ledger: ...
    @property
    def rewritten(self) -> Rewritten: ...


def find_runner(device: int = 0) -> CudaRunner | None:
    """The GPU, where there is one and ONNX Runtime can use it."""
    import onnxruntime

    if CUDA not in onnxruntime.get_available_providers():
        return None
    try:
        return CudaRunner(device)
    except OnnxfuseError:
        return None


def verify(subject: Subject, runner: KernelRunner | None = None, inputs: Mapping[str, Array] | None = None,
           progress: Progress | None = None) -> Verification:
    """Compare a fused model with the original, and every kernel with the nodes that it replaced.

    The model runs on the user's inputs, or on two sets of generated ones: of the sizes that were planned for, halved
    while a run of the original would take long; and with every symbolic size one larger and masks with padding.

    Args:
        runner: what runs kernels, such as ``find_runner()``; None leaves them unrun, and the result says so.
        inputs: the user's own, by name.

    Raises:
        ModelError: ``inputs`` do not fit the model.
    """
    rewritten = subject.rewritten
    nodes = read_fused(rewritten.model)
    step = progress or (lambda *_: None)
    notes: list[str] = []
    step("checking the fused model", 0, 1)
    message = checker_message(rewritten.model)
    if message and (own := checker_message(subject.loaded.proto)):
        notes.append(f"onnx.checker has something against the original model already: {own.splitlines()[0]}")
        message = ""
    with sharing(subject.loaded, rewritten.model) as (original, fused):
        compared = _first_that_runs(subject, original, fused, inputs, runner, notes, step)
        if isinstance(compared, VerificationError):
            whole = WholeResult(not message, None, message=message or compared.message)
            return Verification(None, (), whole, _not_run(nodes, compared.message), tuple(notes))
        runs, found = compared
        results = _not_run(nodes, "no GPU that ONNX Runtime can use")
        device: tuple[OutputDifference, ...] = ()
        if runner is not None and nodes:
            providers = runner.providers
            results = _verify_nodes(subject, original, runs, nodes, runner, notes, step)
            if CUDA in str(providers) and all(result.verdict != "failed" for result in results):
                try:
                    device = on_device(original, fused, runs[0], providers)
                except (VerificationError, KernelError) as error:
                    notes.append(f"The whole model was not run with kernels: {error.message}")
    whole = WholeResult(not message, not found, found, device, message)
    return Verification(runner.name if runner else None, tuple(run.about for run in runs), whole, results, tuple(notes))


def failed_regions(verification: Verification, placed: Sequence[Placed]) -> frozenset[int]:
    """Positions, among the regions that were given to ``rewrite``, of those to leave out when it is done again."""
    names = {result.node for result in verification.failed}
    return frozenset(entry.region for entry in placed if entry.node in names)


def _first_that_runs(
    subject: Subject, original: Slim, fused: Slim, inputs: Mapping[str, Array] | None, runner: KernelRunner | None,
    notes: list[str], step: Progress,
) -> VerificationError | tuple[list[Run], tuple[OutputDifference, ...]]:
    """``_compare_whole`` on the CPU; on the runner's device where the CPU provider lacks an operator or a type."""
    try:
        return _compare_whole(subject, original, fused, inputs, CPU, notes, step)
    except VerificationError as error:
        if runner is None or list(runner.providers) == CPU:
            return error
    try:
        result = _compare_whole(subject, original, fused, inputs, runner.providers, notes, step)
    except VerificationError as error:
        return error
    notes.append("The CPU provider cannot run the model; it was compared without kernels on the GPU.")
    return result


def _compare_whole(
    subject: Subject, original: Slim, fused: Slim, inputs: Mapping[str, Array] | None, providers: Sequence[Any],
    notes: list[str], step: Progress,
) -> tuple[list[Run], tuple[OutputDifference, ...]]:
    """The runs that were made, and the outputs that differed in them.

    Raises:
        VerificationError: no run can be made.
    """
    step("comparing with the original", 0, 2)
    whole = Whole(original, fused, providers)
    runs: list[Run] = []
    found: dict[str, OutputDifference] = {}
    for number, candidates in enumerate(_candidates(subject, inputs)):
        error: VerificationError | None = None
        for make in candidates:
            try:
                run = make()
                wanted = whole.original(run)
            except ModelError as problem:
                if inputs:
                    raise
                error = VerificationError(problem.message, place=problem.place, remedy=problem.remedy)
                break
            except VerificationError as problem:
                error = error or problem
                continue
            runs.append(run)
            found |= {entry.output: entry for entry in whole.differences(run, wanted)}
            error = None
            break
        if error is not None:
            if not runs:
                raise error
            notes.append(f"No second run was made: {error.message}")
        step("comparing with the original", number + 1, 2)
    return runs, tuple(found.values())


def _candidates(subject: Subject, inputs: Mapping[str, Array] | None) -> list[list[Callable[[], Run]]]:
    """For each run, ways to make its inputs, the preferred first."""
    graph = subject.graph
    if inputs:
        return [[lambda: Run(RunInputs("your inputs"), make_inputs(graph, {}, inputs))]]
    sizes = shrunk(subject.ledger, subject.ledger.sizes)[::-1]

    def made(chosen: Mapping[str, int], seed: int) -> Callable[[], Run]:
        return lambda: make_run(graph, chosen, seed)

    return [
        [made(chosen, 0) for chosen in sizes],
        [made(chosen, 1) for chosen in (*uneven(sizes[0], graph), *sizes)],
    ]


def _verify_nodes(subject: Subject, original: Slim, runs: Sequence[Run], nodes: Sequence[FusedNode],
                  runner: KernelRunner, notes: list[str], step: Progress) -> tuple[NodeResult, ...]:
    model = subject.rewritten.model
    runner.prepare(model)
    verifier = NodeVerifier(model, runner)
    results: dict[str, NodeResult] = {}
    total = len(nodes) * len(runs)
    for number, run in enumerate(runs):
        sizes = {**subject.ledger.sizes, **run.about.sizes}
        turn = "" if len(runs) == 1 else f", run {number + 1}"
        done: set[str] = set()
        try:
            for taken in capture(nodes, subject.loaded, subject.graph, original, run, sizes, runner.providers):
                node = taken.node
                step(f"verifying {node.name}", number * len(nodes) + len(done), total)
                done.add(node.name)
                earlier = results.get(node.name)
                if earlier is not None and earlier.verdict == "failed":
                    continue
                results[node.name] = _joined(earlier, verifier.verify(node, taken.feeds, f"{taken.how}{turn}"))
                if results[node.name].verdict == "failed" and not runner.alive():
                    raise VerificationError(f"the GPU stopped answering when {node.name} ran")
        except VerificationError as error:
            notes.append(f"Nodes were left out in run {number + 1}: {error.message}")
            for node in nodes:
                results.setdefault(node.name, _not_run((node,), error.message)[0])
            if not runner.alive():
                break
    for node in nodes:
        results.setdefault(node.name, _not_run((node,), _UNREACHED)[0])
    return tuple(condemned([results[node.name] for node in nodes]))


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
        first.rounded or second.rounded, worst.message,
    )


def _not_run(nodes: Sequence[FusedNode], message: str) -> tuple[NodeResult, ...]:
    return tuple(NodeResult(node.name, node.op, node.rule, "not run", message=message) for node in nodes)

