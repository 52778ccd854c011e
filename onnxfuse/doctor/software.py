"""ONNX Runtime, its CUDA provider, and onnxfuse's own library in it."""

from __future__ import annotations

import ctypes
import importlib
import re
from pathlib import Path
from typing import Any

from onnxfuse.doctor.findings import Finding
from onnxfuse.doctor.installed import clashing, releases
from onnxfuse.runtime import library
from onnxfuse.version import __version__

_PACKAGES = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-directml", "onnxruntime-openvino", "onnxruntime-training")
_LEAST_API = 20
_ANEW = "pip uninstall -y {} && pip install onnxruntime-gpu"
_LIBRARIES = "Install what it loads (cuBLAS, cuDNN): pip install 'onnxfuse[cuda]', or 'onnxfuse[cuda12]' for CUDA 12."


def runtime() -> Finding:
    """ONNX Runtime, and the version of its API, which is the second number of its release."""
    packages = releases(_PACKAGES)
    try:
        onnxruntime = importlib.import_module("onnxruntime")
        version = str(onnxruntime.__version__)
    except Exception as error:  # a wheel that another overwrote raises anything
        said = (str(error).splitlines() or [type(error).__name__])[0]
        return Finding("ONNX Runtime", "broken", message=f"It does not load: {said}.",
                       remedy=_ANEW.format(" ".join(packages)) if packages else "pip install onnxruntime-gpu")
    api = _api(version)
    told = f"{version}, API {'unknown' if api is None else api}"
    path = str(Path(str(onnxruntime.__file__)).parent)
    if clashing(packages):
        names = ", ".join(f"{name} {release}" for name, release in packages.items())
        return Finding("ONNX Runtime", "broken", told, path, f"Packages overwrite one another's files: {names}.",
                       _ANEW.format(" ".join(packages)))
    if api is not None and api < _LEAST_API:
        return Finding("ONNX Runtime", "broken", told, path, f"It is too old: onnxfuse needs 1.{_LEAST_API} or newer.",
                       "pip install --upgrade onnxruntime-gpu")
    return Finding("ONNX Runtime", "ok", told, path)


def _api(version: str) -> int | None:
    match = re.match(r"1\.(\d+)\.", version)
    return None if match is None else int(match[1])


def provider(has_gpu: bool) -> Finding:
    """The CUDA provider: whether it is in the package and, where there is a GPU, whether it starts."""
    import onnxruntime

    from onnxfuse.measuring.machine import CUDA, find_machine, started_provider

    if CUDA not in onnxruntime.get_available_providers():
        packages = " ".join(releases(_PACKAGES)) or "onnxruntime"
        return Finding("CUDA provider", "broken" if has_gpu else "absent", message="This ONNX Runtime is for the CPU "
                       "alone: models run there, and fused nodes as the original's nodes.",
                       remedy=_ANEW.format(packages))
    folder = Path(str(onnxruntime.__file__)).parent / "capi"
    path = folder / "libonnxruntime_providers_cuda.so"
    if not path.is_file():
        return Finding("CUDA provider", "broken" if has_gpu else "limited", path=str(path),
                       message="Its library is missing.",
                       remedy="pip install --force-reinstall --no-deps onnxruntime-gpu")
    if not has_gpu:
        return Finding("CUDA provider", "absent", path=str(path), message="It is installed, and not started: there is "
                       "no GPU.")
    if not started_provider(find_machine()):
        return Finding("CUDA provider", "broken", path=str(path), message=f"It does not start: {_reason(folder)}",
                       remedy=_LIBRARIES)
    return Finding("CUDA provider", "ok", path=str(path), message="ran a model on the GPU")


def _reason(folder: Path) -> str:
    """Why the provider's library does not load, in the loader's words."""
    try:
        ctypes.CDLL(str(folder / "libonnxruntime_providers_shared.so"), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(folder / "libonnxruntime_providers_cuda.so"))
    except OSError as error:
        return f"{error}."
    return "ONNX Runtime gives no reason; ONNXFUSE_DEBUG=1 shows its messages."


def native() -> Finding:
    """onnxfuse's library: built, of this release, and taken by ONNX Runtime.

    Raises:
        RuntimeLibraryError: it was not built or does not load.
    """
    path = library.library_path()
    loaded = library.load()
    version = str(loaded.onnxfuse_version().decode(errors="replace"))
    if version != __version__:
        return Finding("native library", "broken", version, str(path), f"It is of another release than onnxfuse "
                       f"{__version__}.", "Build it again: pip install --force-reinstall --no-deps onnxfuse")
    refused = _refused(path)
    if refused:
        return Finding("native library", "broken", version, str(path), f"ONNX Runtime refuses it: {refused}",
                       "pip install --upgrade onnxruntime-gpu, or install onnxfuse anew.")
    return Finding("native library", "ok", version, str(path), "registered with ONNX Runtime")


def _refused(path: Path) -> str:
    onnxruntime: Any = importlib.import_module("onnxruntime")
    try:
        onnxruntime.SessionOptions().register_custom_ops_library(str(path))
    except Exception as error:  # ONNX Runtime has an exception type per status
        return (str(error).splitlines() or [type(error).__name__])[0]
    return ""
