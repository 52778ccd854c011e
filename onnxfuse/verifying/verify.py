"""Verification of a fused model: as a whole without kernels, and kernel by kernel where something runs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from onnxfuse.errors import OnnxfuseError, VerificationError
from onnxfuse.rewriting import Placed, exact_form, read_fused
from onnxfuse.verifying.bounds import NONE, Bounds, OutOfTimeError
from onnxfuse.verifying.closeness import EXACT, Closeness
from onnxfuse.verifying.first_run import sharing_first
from onnxfuse.verifying.foreseen import Foreseeing
from onnxfuse.verifying.kernels import Kernels, Progress, Subject, not_run
from onnxfuse.verifying.locating import first_apart
from onnxfuse.verifying.results import OutputDifference, Verification, WholeResult
from onnxfuse.verifying.runner import CUDA, CudaRunner, KernelRunner
from onnxfuse.verifying.runs import Inputs, input_sets
from onnxfuse.verifying.sharing import Slim
from onnxfuse.verifying.whole_runs import WholeComparison, WholeRuns

Array = NDArray[Any]
NO_GPU = "no GPU that ONNX Runtime can use"
_SPELLED = "Fused nodes add biases of products, which come last then: the original was spelled so for comparison."


def find_runner(device: int = 0, settings: Mapping[str, str] | None = None) -> CudaRunner | None:
    """The GPU, where there is one, ONNX Runtime can use it and kernels can be compiled; runs have these options of the
    CUDA provider."""
    import onnxruntime

    if CUDA not in onnxruntime.get_available_providers():
        return None
    try:
        return CudaRunner(device, settings)
    except OnnxfuseError:
        return None


class Verifiable(Subject, Protocol):
    """What is verified, and what of that was begun before."""

    @property
    def foreseen(self) -> Foreseeing | None: ...


@dataclass(frozen=True)
class Allowed:
    """How far the model's outputs may be off, without kernels and with them."""

    plain: Closeness = EXACT
    kernels: Closeness = EXACT


def verify(subject: Verifiable, runner: KernelRunner | None = None, inputs: Inputs = None,
           progress: Progress | None = None, bounds: Bounds = NONE, allowed: Allowed | None = None) -> Verification:
    """Compare a fused model with the original, and every kernel with the nodes that it replaced.

    The model runs on the user's inputs, or on generated ones: of the sizes that were planned for, halved while a run of
    the original would take long; with every symbolic size one larger and masks with padding; and of small odd sizes.
    Where the original does not take them, other integers and other sizes are tried (``runs``).  What the bounds leave
    no time or memory for is left out, and the result says so.

    Args:
        runner: what runs kernels, such as ``find_runner()``; None leaves them unrun, and the result says so.
        inputs: the user's own, by name, or several sets of them.
        bounds: of the time and memory that all this may take.
        allowed: how far outputs may be off; nothing without kernels where None.  With kernels it decides nothing here:
            the differences say how many elements are further off.

    Raises:
        ModelError: ``inputs`` do not fit the model.
    """
    nodes = read_fused(subject.lean)
    step = progress or (lambda *_: None)
    allowed = allowed or Allowed()
    work = WholeRuns(subject, input_sets(inputs), nodes, runner, step, allowed.plain)
    notes = work.notes
    with ThreadPoolExecutor(1, "onnxfuse-prepare") as pool:
        preparing = work.preparing(pool, bounds)
        with (sharing_first(subject.first_run, subject.loaded, subject.lean, bounds, subject.folder) as (own, fused),
              ThreadPoolExecutor(1, "onnxfuse-beside") as beside):
            original = own.of(exact_form(own.model, fused.model))
            if original.model is not own.model:
                notes.append(_SPELLED)
            message, compared = _compared(work, subject.foreseen, (original, fused))
            if isinstance(compared, VerificationError):
                whole = WholeResult(not message, None, message=message or compared.message)
                return Verification(None, (), whole, not_run(nodes, compared.message), tuple(notes))
            runs, found = compared.runs, tuple(compared.differences.values())
            results = not_run(nodes, NO_GPU)
            device: tuple[OutputDifference, ...] = ()
            if runner is not None and nodes:
                kernels = Kernels(subject, nodes, runner, bool(work.sets), compared.providers, notes, step)
                begun = kernels.begin(beside, (original, fused), runs)
                results = kernels.verified(preparing.planned.result(), original, runs, compared.inner)
                preparing.kernels.result()
                if all(result.verdict != "failed" for result in results):
                    device = kernels.on_device((original, fused), runs, allowed.kernels, begun)
            first = "" if compared.apart is None else first_apart(
                subject.graph, nodes, (original, fused), compared.apart, compared.providers, allowed.plain)
    whole = WholeResult(not message, not found, found, device, message or compared.message,
                        tuple(compared.outputs.values()), first)
    return Verification(runner.name if runner else None, tuple(run.about for run in runs), whole, results, tuple(notes))


def _compared(work: WholeRuns, begun: Foreseeing | None, pair: tuple[Slim, Slim]
              ) -> tuple[str, WholeComparison | VerificationError]:
    """What ``onnx.checker`` says of the fused model, and its runs without kernels beside the original: as they were
    foreseen, if they were."""
    original, fused = pair
    with suppress(OutOfTimeError):  # it is said of what it was too long for
        seen = None if begun is None else begun.of(original.model, fused.model, fused.bounds)
        if seen is not None:
            work.notes += seen.notes
            return seen.message, seen.compared
        if work.subject.first_run is not None:
            work.subject.first_run.wait(fused.bounds)  # what is compared has a limit of memory, and a driver may not
    return work.checked(), work.first_that_runs(original, fused)


def failed_regions(verification: Verification, placed: Sequence[Placed]) -> frozenset[int]:
    """Positions, among the regions that were given to ``rewrite``, of those to leave out when it is done again."""
    names = {result.node for result in verification.failed}
    return frozenset(entry.region for entry in placed if entry.node in names)
