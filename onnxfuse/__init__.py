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
        Explanation,
        Lock,
        Report,
        Result,
        VerifyResult,
        bench,
        check,
        explain,
        optimize,
        report,
        unfuse,
        verify,
    )
    from onnxfuse.cuda_options import PlannedOtherwiseWarning
    from onnxfuse.errors import (
        ExternalDataError,
        InternalError,
        KernelError,
        LockError,
        MeasurementError,
        ModelError,
        OnnxfuseError,
        OutputError,
        RuleError,
        RuntimeLibraryError,
        TargetError,
        VerificationError,
    )
    from onnxfuse.planning.costs.hardware import Profile
    from onnxfuse.planning.objective import Hints, Strategy
    from onnxfuse.runtime import library_path, register, session
    from onnxfuse.scheduler import Decision, DynamicFusionScheduler, FusionPlanner
    from onnxfuse.version import __version__

_HOMES = {
    "onnxfuse.api": (
        "BenchResult", "CheckResult", "Explanation", "Lock", "Report", "Result", "VerifyResult", "bench",
        "check", "explain", "optimize", "report", "unfuse", "verify",
    ),
    "onnxfuse.cuda_options": ("PlannedOtherwiseWarning",),
    "onnxfuse.errors": (
        "ExternalDataError", "InternalError", "KernelError", "LockError", "MeasurementError", "ModelError",
        "OnnxfuseError", "OutputError", "RuleError", "RuntimeLibraryError", "TargetError", "VerificationError",
    ),
    "onnxfuse.planning.costs.hardware": ("Profile",),
    "onnxfuse.planning.objective": ("Hints", "Strategy"),
    "onnxfuse.runtime": ("library_path", "register", "session"),
    "onnxfuse.scheduler": ("Decision", "DynamicFusionScheduler", "FusionPlanner"),
    "onnxfuse.version": ("__version__",),
}

__all__ = [
    "BenchResult",
    "CheckResult",
    "Decision",
    "DynamicFusionScheduler",
    "Explanation",
    "ExternalDataError",
    "FusionPlanner",
    "Hints",
    "InternalError",
    "KernelError",
    "Lock",
    "LockError",
    "MeasurementError",
    "ModelError",
    "OnnxfuseError",
    "OutputError",
    "PlannedOtherwiseWarning",
    "Profile",
    "Report",
    "Result",
    "RuleError",
    "RuntimeLibraryError",
    "Strategy",
    "TargetError",
    "VerificationError",
    "VerifyResult",
    "__version__",
    "bench",
    "check",
    "explain",
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
