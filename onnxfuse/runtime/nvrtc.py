"""The CUDA compiler (NVRTC): CuPy's binding of it, or NVIDIA's CUDA 12 wheel for drivers older than CUDA 13.

CuPy comes in one package per CUDA version, and two of them cannot be installed side by side; an extra of a Python
package can add a requirement and never take one away.  So the extra ``cuda12`` adds NVIDIA's own wheels of NVRTC 12
and of its headers, which do live beside CuPy for CUDA 13, and this module takes them where the driver needs them.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from onnxfuse.errors import KernelError
from onnxfuse.runtime import library
from onnxfuse.runtime.importing import import_cupy
from onnxfuse.runtime.nvrtc_library import NvrtcLibrary

_WHEELS = {"nvidia-cuda-nvrtc": 13, "nvidia-cuda-nvrtc-cu12": 12}
_LOADED = re.compile(r"/\S*/libnvrtc(?:-[0-9a-f]+)?\.so[.\d]*$", re.MULTILINE)
"""Paths of this library among those that a process has mapped; its "builtins" are another."""

_CUPY = {"cupy-cuda13x": 13, "cupy-cuda12x": 12}


def wanted_major() -> int | None:
    """CUDA's major version that images must be made for: ``$ONNXFUSE_CUDA``, else the driver's; None without either.

    Images of an older CUDA run on a newer driver, not the other way round.

    Raises:
        KernelError: ``ONNXFUSE_CUDA`` is neither 12 nor 13.
    """
    if named := os.environ.get("ONNXFUSE_CUDA"):
        if named not in ("12", "13"):
            raise KernelError(f"ONNXFUSE_CUDA is '{named}'", remedy="set it to 12 or 13, or unset it")
        return int(named)
    present = library.present_gpus()
    return present[0].driver[0] if present else None


@functools.cache
def compiler() -> str | None:
    """The compiler at hand, as "nvrtc-13.0.88"; None where there is none.

    It is read from what is installed: importing CuPy would take longer than all else when a session is created from
    a warm cache.
    """
    if _direct():
        return f"nvrtc-{_installed('nvidia-cuda-nvrtc-cu12')}"
    if importlib.util.find_spec("cupy") is None:
        return None
    major = _cupy_major()
    for package, its_major in _WHEELS.items():
        if major == its_major and (version := _installed(package)) is not None:
            return f"nvrtc-{version}"
    return f"cupy-{importlib.metadata.version('cupy') if _installed('cupy') else major}"


@functools.cache
def binding() -> Any:
    """An object with the functions of ``cupy.cuda.nvrtc``.

    Raises:
        KernelError: there is no compiler, or none for this driver.
    """
    if _direct():
        try:
            return NvrtcLibrary(str(_wheel("cuda_nvrtc") / "lib" / "libnvrtc.so.12"))
        except OSError as error:
            raise KernelError(f"no CUDA compiler: {error}", remedy="pip install 'onnxfuse[cuda12]'") from error
    remedy = "install CuPy and NVRTC: pip install onnxfuse"
    if compiler() is None:
        raise KernelError("no CUDA compiler: CuPy is not installed", remedy=remedy)
    try:
        nvrtc = import_cupy().cuda.nvrtc
        major, minor = nvrtc.getVersion()
    except Exception as error:  # CuPy raises what its loader met: ImportError, RuntimeError, OSError
        raise KernelError(f"no CUDA compiler: {error}", remedy=remedy) from error
    wanted = wanted_major()
    if wanted is not None and major > wanted:
        raise KernelError(
            f"the compiler is NVRTC {major}.{minor}, and the driver runs CUDA {wanted} at most",
            remedy="update the driver (CUDA 13 needs 580 or newer) or pip install 'onnxfuse[cuda12]'",
        )
    return nvrtc


@functools.cache
def headers() -> tuple[Path, ...]:
    """Folders of the CUDA toolkit's headers (cuda_fp16.h) of the compiler's own major version.

    Raises:
        KernelError: there are none.
    """
    major, _ = binding().getVersion()
    candidates = [_wheel("cuda_runtime") / "include"] if major == 12 else [_wheel(f"cu{major}") / "include"]
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        if toolkit := os.environ.get(variable):
            candidates.append(Path(toolkit) / "include")
    candidates += [Path(f"/usr/local/cuda-{major}/include"), Path("/usr/local/cuda/include")]
    for folder in candidates:
        if (folder / "cuda_fp16.h").is_file() and header_version(folder) in (None, major):
            return tuple(path for path in (folder, folder / "cccl") if path.is_dir())
    package = "nvidia-cuda-runtime" if major >= 13 else f"nvidia-cuda-runtime-cu{major}"
    raise KernelError(
        f"the headers of CUDA {major} are missing", place=", ".join(map(str, candidates)),
        remedy=f"install them: pip install {package}",
    )


@functools.cache
def library_path() -> str | None:
    """The library that ``binding`` compiles with; None where several that are loaded may be it, or none.

    Raises:
        KernelError: as ``binding``.
    """
    nvrtc = binding()
    if isinstance(nvrtc, NvrtcLibrary):
        return nvrtc.path
    with suppress(OSError):
        loaded = set(_LOADED.findall(Path("/proc/self/maps").read_text()))
        same = [path for path in loaded if NvrtcLibrary(path).getVersion() == nvrtc.getVersion()]
        return same[0] if len(same) == 1 else None
    return None


def _direct() -> bool:
    """Whether NVIDIA's CUDA 12 wheel compiles: CUDA 12 is wanted, and CuPy is for a newer one or missing."""
    return wanted_major() == 12 and _cupy_major() != 12 and _installed("nvidia-cuda-nvrtc-cu12") is not None


def _cupy_major() -> int | None:
    """CUDA's major version of the CuPy package; None where it has no package or one without CUDA in its name."""
    return next((major for package, major in _CUPY.items() if _installed(package) is not None), None)


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _wheel(component: str) -> Path:
    """The folder that NVIDIA's wheels give a component; it may not exist."""
    spec = importlib.util.find_spec("nvidia")
    roots = [] if spec is None else list(spec.submodule_search_locations or ())
    return next((path for root in roots if (path := Path(root) / component).is_dir()), Path("nvidia") / component)


def header_version(folder: Path) -> int | None:
    """CUDA's major version as cuda.h states it."""
    header = folder / "cuda.h"
    if not header.is_file():
        return None
    match = re.search(r"#define CUDA_VERSION (\d+)", header.read_text(errors="replace"))
    return None if match is None else int(match[1]) // 1000
