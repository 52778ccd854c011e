"""The fused model beside the original, as a whole.

Without kernels every output must be the original's bit for bit: the functions hold the very nodes.  That is looked at
on the CPU, or on the GPU where the CPU provider lacks an operator or a type.  With kernels the differences are
reported and decide nothing: most faults of single nodes do not show in a model's outputs, and harmless roundings of a
float16 model do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from onnxfuse.errors import VerificationError
from onnxfuse.verifying.capture import run_model
from onnxfuse.verifying.feeds import is_float
from onnxfuse.verifying.results import OutputDifference
from onnxfuse.verifying.runs import Run
from onnxfuse.verifying.sharing import Slim, without_weights

Array = NDArray[Any]


def checker_message(model: onnx.ModelProto) -> str:
    """What ``onnx.checker`` says against a model; "" where it passes."""
    try:
        onnx.checker.check_model(without_weights(model))
    except onnx.checker.ValidationError as error:
        return str(error).strip()
    return ""


class Whole:
    """The original's and the fused model's sessions without kernels."""

    def __init__(self, original: Slim, fused: Slim, providers: Sequence[Any]) -> None:
        """Create them.

        Raises:
            VerificationError: ONNX Runtime refuses one of them.
        """
        self._models = original.model, fused.model
        self._sessions = original.session(providers), fused.session(providers)
        self.names = [info.name for info in original.model.graph.output]

    def original(self, run: Run) -> list[Any]:
        """The original's outputs.

        Raises:
            VerificationError: the run fails.
        """
        return run_model(self._sessions[0], self._models[0], run)

    def differences(self, run: Run, wanted: Sequence[Any]) -> tuple[OutputDifference, ...]:
        """Outputs of the fused model that are not bit for bit the original's, which are ``wanted``; all of them where
        the fused model does not run on these inputs."""
        try:
            got = run_model(self._sessions[1], self._models[1], run)
        except VerificationError:
            return tuple(OutputDifference(name, 0, float("inf")) for name in self.names)
        return compared(self.names, got, wanted)


def on_device(original: Slim, fused: Slim, run: Run, providers: Sequence[Any]) -> tuple[OutputDifference, ...]:
    """Every output with the kernels running beside the original's on the same device.

    Raises:
        VerificationError: a run fails.
        KernelError: a kernel cannot be had.
    """
    names = [info.name for info in original.model.graph.output]
    wanted = run_model(original.session(providers), original.model, run)
    got = run_model(fused.fused_session(providers), fused.model, run)
    return tuple(_difference(name, a, b) for name, a, b in zip(names, got, wanted, strict=True)
                 if isinstance(a, np.ndarray) and isinstance(b, np.ndarray))


def compared(names: Sequence[str], got: Sequence[Any], wanted: Sequence[Any]) -> tuple[OutputDifference, ...]:
    """Outputs that differ in a single bit; sequences, maps and text are compared by ``repr``."""
    found = []
    for name, a, b in zip(names, got, wanted, strict=True):
        if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.dtype != object:
            if a.dtype != b.dtype or a.shape != b.shape or a.tobytes() != b.tobytes():
                found.append(_difference(name, a, b))
        elif repr(a) != repr(b):
            found.append(OutputDifference(name, 1, float("inf")))
    return tuple(found)


def _difference(name: str, got: Array, wanted: Array) -> OutputDifference:
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return OutputDifference(name, max(got.size, wanted.size), float("inf"))
    if not is_float(got):
        wrong = int((got != wanted).sum())
        return OutputDifference(name, wrong, wrong / max(got.size, 1))
    a, b = got.astype(np.float64), wanted.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    finite = np.isfinite(a) & np.isfinite(b)
    if (~same & ~finite).any():
        return OutputDifference(name, int((~same).sum()), float("inf"))
    scale = float(np.abs(b[finite]).max(initial=0.0)) or 1.0
    return OutputDifference(name, int((~same).sum()),
                            float(np.abs(a[finite] - b[finite]).max(initial=0.0)) / scale)
