"""The examination: every part once, in an order in which each may know what those before it are."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable

from onnxfuse.doctor import cuda, places, software
from onnxfuse.doctor.findings import Diagnosis, Finding
from onnxfuse.errors import OnnxfuseError
from onnxfuse.version import __version__

_VARIABLES = ("CUDA_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "XDG_CACHE_HOME")
"""Variables besides ``ONNXFUSE_...`` that change what is found."""


def examine(*, needs_gpu: bool = False) -> Diagnosis:
    """Look at every part; no part that is broken, however, ends the examination.

    Args:
        needs_gpu: whether a machine without a GPU counts as broken.
    """
    driver, gpu, architecture = _driver_and_gpu()
    has_gpu = gpu.state not in ("absent", "broken")
    runtime = _seen("ONNX Runtime", software.runtime)
    findings = (
        driver, gpu, runtime,
        _with(runtime, "CUDA provider", lambda: software.provider(has_gpu)),
        _with(runtime, "native library", software.native),
        _seen("CuPy", lambda: cuda.cupy(has_gpu)),
        _seen("NVRTC", lambda: cuda.compiler(architecture)),
        _seen("CUDA headers", cuda.toolkit),
        _seen("compiler cache", places.cache),
        _with(runtime, "database", places.database),
    )
    system = {"onnxfuse": __version__, "python": platform.python_version(), "platform": platform.platform()}
    environment = {name: value for name, value in sorted(os.environ.items())
                   if name.startswith("ONNXFUSE_") or name in _VARIABLES}
    return Diagnosis(system, environment, findings, needs_gpu)


def _driver_and_gpu() -> tuple[Finding, Finding, str]:
    """The driver, the GPUs, and what to compile for."""
    try:
        found = cuda.driver()
        return found.driver, found.gpu, found.architecture
    except Exception as error:  # whatever is wrong with a driver, the other parts are looked at
        fault = _unforeseen("NVIDIA driver", error)
        return fault, Finding("GPU", "broken", message="The driver cannot be asked."), cuda.USUAL


def _seen(part: str, look: Callable[[], Finding]) -> Finding:
    """A part as it was found; broken where looking at it fails."""
    try:
        return look()
    except OnnxfuseError as error:
        place = "" if error.place is None else str(error.place)
        return Finding(part, "broken", path=place, message=error.message, remedy=error.remedy or "")
    except Exception as error:  # a broken installation raises anything
        return _unforeseen(part, error)


def _with(runtime: Finding, part: str, look: Callable[[], Finding]) -> Finding:
    """The same of a part that cannot be looked at where ONNX Runtime does not load."""
    if runtime.state == "broken" and not runtime.version:
        return Finding(part, "limited", message="Not looked at: ONNX Runtime does not load.")
    return _seen(part, look)


def _unforeseen(part: str, error: Exception) -> Finding:
    text = (str(error).splitlines() or [""])[0]
    return Finding(part, "broken", message=f"{type(error).__name__}: {text}" if text else type(error).__name__,
                   remedy="Install onnxfuse anew into an environment of its own: python -m venv, pip install onnxfuse.")
