"""Makes ONNX models faster on NVIDIA GPUs by fusing operators.

    import onnxfuse

    fused = onnxfuse.optimize("model.onnx")
    fused.save("model.fused.onnx")
    session = onnxfuse.session("model.fused.onnx")

Names are imported when they are first used: a deployment that only registers the native library needs ONNX Runtime
and nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnxfuse.api import (
        BenchResult,
        CheckResult,
        Lock,
        Result,
        VerifyResult,
        bench,
        check,
        optimize,
        report,
        unfuse,
        verify,
    )
    from onnxfuse.errors import (
        ExternalDataError,
        KernelError,
        LockError,
        ModelError,
        OnnxfuseError,
        OutputError,
        RuleError,
        RuntimeLibraryError,
        TargetError,
        VerificationError,
    )
    from onnxfuse.runtime import library_path, register, session
    from onnxfuse.scheduler import DynamicFusionScheduler, FusionPlanner, Hints
    from onnxfuse.version import __version__

_HOMES = {
    "onnxfuse.api": (
        "BenchResult", "CheckResult", "Lock", "Result", "VerifyResult", "bench", "check", "optimize", "report",
        "unfuse", "verify",
    ),
    "onnxfuse.errors": (
        "ExternalDataError", "KernelError", "LockError", "ModelError", "OnnxfuseError", "OutputError",
        "RuleError", "RuntimeLibraryError", "TargetError", "VerificationError",
    ),
    "onnxfuse.runtime": ("library_path", "register", "session"),
    "onnxfuse.scheduler": ("DynamicFusionScheduler", "FusionPlanner", "Hints"),
    "onnxfuse.version": ("__version__",),
}

__all__ = [
    "BenchResult",
    "CheckResult",
    "DynamicFusionScheduler",
    "ExternalDataError",
    "FusionPlanner",
    "Hints",
    "KernelError",
    "Lock",
    "LockError",
    "ModelError",
    "OnnxfuseError",
    "OutputError",
    "Result",
    "RuleError",
    "RuntimeLibraryError",
    "TargetError",
    "VerificationError",
    "VerifyResult",
    "__version__",
    "bench",
    "check",
    "library_path",
    "optimize",
    "register",
    "report",
    "session",
    "unfuse",
    "verify",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            found = getattr(import_module(module), name)
            globals()[name] = found
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
