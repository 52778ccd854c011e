"""What follows from verification: nodes taken back, or a model that is not delivered."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

from onnxfuse.cuda_options import switches
from onnxfuse.errors import ModelError, VerificationError
from onnxfuse.graph import LoadedModel
from onnxfuse.optimised import Optimised, Tell
from onnxfuse.provider.words import is_lacking
from onnxfuse.refusal import Refusal
from onnxfuse.verifying import CudaRunner, Verification, failed_regions, find_runner, verify
from onnxfuse.verifying.bounds import NONE, Bounds, OutOfMemoryError
from onnxfuse.verifying.kernels import Subject
from onnxfuse.verifying.sharing import Slim, sharing

ROUNDS = 4
"""How often nodes may be taken back before the model as a whole is given up."""


def runner_for(provider_options: Mapping[str, str]) -> CudaRunner | None:
    """What runs kernels as a deployment with these options of the CUDA provider would; None where there is no GPU."""
    runner = find_runner(settings=switches(provider_options))
    if runner is not None:
        runner.begin()
    return runner


def verified(optimised: Optimised, inputs: Mapping[str, Any] | None, tell: Tell, bounds: Bounds = NONE,
             started: Future[CudaRunner | None] | None = None) -> Optimised:
    """Verify a fused model; fused nodes that fail are taken back, and what is left is verified again.

    Args:
        inputs: the user's own arrays by input name.
        bounds: of the time and memory that all this may take.
        started: ``runner_for`` the model's options, where it was started before.

    Raises:
        ModelError: ONNX Runtime refuses the original model, or ``inputs`` do not fit it.
        VerificationError: the fused model as a whole is wrong.
    """
    runner = runner_for(optimised.provider_options) if started is None else started.result()
    failed: list[Refusal] = []
    for _ in range(ROUNDS):
        verification = verify(optimised, runner, inputs, tell, bounds)
        if verification.whole.identical is None:
            check_sessions(optimised)
        if not verification.whole.passed:
            raise VerificationError(
                f"The {verification.summary}.", remedy="This is a fault of onnxfuse; please report it with the model.",
            )
        lost = optimised.together(failed_regions(verification, optimised.rewritten.placed))
        if not lost:
            return replace(optimised, verification=verification, taken_back=tuple(failed))
        failed += [_refusal(verification, placed.node) for placed in optimised.rewritten.placed
                   if placed.region in lost]
        optimised = optimised.without(lost)
    raise VerificationError(
        f"Fused nodes still fail after {ROUNDS} rounds of taking back: {verification.summary}.",
        remedy="This is a fault of onnxfuse; please report it with the model.",
    )


def check_sessions(subject: Subject) -> None:
    """Say whose fault it is that a model cannot be run: the original's, the fused one's, or nobody's.

    Raises:
        ModelError: ONNX Runtime refuses the original model.
        VerificationError: it takes the original and refuses the fused model.
    """
    with sharing(subject.loaded, subject.lean, folder=subject.folder) as (original, fused):
        if _takes(original, subject.loaded):
            with suppress(OutOfMemoryError):
                fused.session()


def check_original(loaded: LoadedModel) -> None:
    """Say so where ONNX Runtime refuses a model: what onnxfuse makes of it means nothing then.

    Raises:
        ModelError: it does.
    """
    with sharing(loaded, loaded.proto) as (original, _):
        _takes(original, loaded)


def _takes(original: Slim, loaded: LoadedModel) -> bool:
    """Whether ONNX Runtime can run the original on this machine's CPU.

    Raises:
        ModelError: the model is wrong.
    """
    try:
        original.session()
    except VerificationError as error:
        if is_lacking(error) or isinstance(error, OutOfMemoryError):
            return False
        reason = str(error.__cause__ or error.message)
        raise ModelError(
            f"ONNX Runtime refuses the model itself, before anything is fused: {_short(reason)}",
            place=None if loaded.path is None else str(loaded.path),
            remedy="Mend the model first; onnxruntime.InferenceSession(path) shows the same.",
        ) from error
    return True


def _refusal(verification: Verification, node: str) -> Refusal:
    result = next((result for result in verification.failed if result.node == node), None)
    if result is None:
        return Refusal("failed-verification", "it computes again what a fused node that failed computes", node)
    return Refusal("failed-verification", result.message, node, result.rule, "This is a fault of onnxfuse; report it.")


def _short(reason: str) -> str:
    """ONNX Runtime's words without its status."""
    _, _, text = reason.partition("[ONNXRuntimeError] : ")
    words = (text or reason).split(" : ", 2)[-1].strip()
    return words.splitlines()[0].rstrip(".") + "."
