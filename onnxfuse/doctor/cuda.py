"""NVIDIA's parts: the driver, GPUs, CuPy, the compiler and its headers.

The driver is asked through ``ctypes`` and not through the native library, so that a fault of one is not taken for one
of the other.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxfuse.doctor.findings import Finding
from onnxfuse.doctor.installed import clashing, loaded_from, releases
from onnxfuse.runtime import nvrtc
from onnxfuse.runtime.compile import architectures, compile_cubin

USUAL = "sm_90"
"""What is compiled for where there is no GPU."""

_LEAST_CUDA = (12, 0)
_LEAST_CAPABILITY = 75
_NVIDIA, _DISPLAY = "0x10de", "0x03"
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_...
_SHOWN = 128

_INSTALL = "Install NVIDIA's driver, 525 or newer (580 for CUDA 13)."
_CONTAINER = "In a container, give it the GPU: docker run --gpus all, with the NVIDIA Container Toolkit on the host."
_REMEDIES = {
    100: f"See that nvidia-smi lists a GPU, and CUDA_VISIBLE_DEVICES does not hide it.  {_CONTAINER}",
    802: "The system is not ready yet: on a machine with NVSwitch, start nvidia-fabricmanager.",
    803: "The driver in the kernel and its library are of different releases: reboot after an update of the driver; "
         "in a container, remove its own libcuda.so (cuda-compat).",
    804: "The driver's library is for data-centre GPUs alone: remove cuda-compat, or install a newer driver.",
    999: "See dmesg; reload the driver (sudo rmmod nvidia_uvm && sudo modprobe nvidia_uvm), or reboot.",
}
"""By the code that ``cuInit`` gives."""
_NO_DEVICE = 100

_TEXT = """#include <cuda_fp16.h>
extern "C" __global__ void probe(__half* x) { x[threadIdx.x] = __hadd(x[threadIdx.x], x[threadIdx.x]); }
"""


@dataclass(frozen=True)
class Driven:
    """The driver, the GPUs that it shows, and what to compile for."""

    driver: Finding
    gpu: Finding
    architecture: str = USUAL


def driver() -> Driven:
    """Ask the driver, as the native library does: ``$ONNXFUSE_LIBCUDA``, else libcuda.so.1."""
    named = os.environ.get("ONNXFUSE_LIBCUDA", "")
    try:
        library = ctypes.CDLL(named or "libcuda.so.1")
    except OSError as error:
        return _without_library(named, str(error))
    path = named or loaded_from("libcuda.so")
    try:
        code = library.cuInit(0)
        number = ctypes.c_int()
        library.cuDriverGetVersion(ctypes.byref(number))
    except AttributeError as error:
        return _no_gpu(Finding("NVIDIA driver", "broken", path=path,
                               message=f"It lacks what every driver has: {error}.", remedy=_INSTALL))
    cuda = divmod(number.value, 1000)[0], number.value % 1000 // 10
    release = _release()
    version = f"{release}, CUDA {cuda[0]}.{cuda[1]}" if release else f"CUDA {cuda[0]}.{cuda[1]}"
    if code:
        return _no_gpu(Finding(
            "NVIDIA driver", "absent" if code == _NO_DEVICE else "broken", version, path,
            f"It does not start: {_words(library, code)} ({code}).", _REMEDIES.get(code, _REMEDIES[999])))
    if cuda < _LEAST_CUDA:
        return _no_gpu(Finding("NVIDIA driver", "broken", version, path,
                               f"It is too old: onnxfuse needs CUDA {_LEAST_CUDA[0]} or newer.", _INSTALL))
    return _gpus(library, Finding("NVIDIA driver", "ok", version, path))


def _release(file: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The driver's release, as "580.65.06"; "" where the kernel does not tell it."""
    try:
        match = re.search(r"Kernel Module\D*(\d+(?:\.\d+)+)", file.read_text(errors="replace"))
    except OSError:
        return ""
    return match[1] if match is not None else ""


def _without_library(named: str, said: str) -> Driven:
    """No library of the driver that loads."""
    missing = "No such file" in said
    if named:
        fault = Finding("NVIDIA driver", "broken", path=named, message=f"ONNXFUSE_LIBCUDA names what does not load: "
                        f"{said}.", remedy="Unset ONNXFUSE_LIBCUDA, or name the driver's libcuda.so.1.")
    elif not missing:
        fault = Finding("NVIDIA driver", "broken", message=f"Its library does not load: {said}.", remedy=_INSTALL)
    elif cards := nvidia_cards():
        fault = Finding("NVIDIA driver", "absent", message=f"There is no libcuda.so.1, and an NVIDIA GPU on the bus "
                        f"({', '.join(cards)}).", remedy=f"{_INSTALL}  {_CONTAINER}")
    else:
        fault = Finding("NVIDIA driver", "absent", message="There is no libcuda.so.1, and no NVIDIA GPU on the bus.",
                        remedy=f"Where there should be a GPU: {_INSTALL[0].lower()}{_INSTALL[1:]}  {_CONTAINER}")
    return _no_gpu(fault)


def _no_gpu(driver: Finding) -> Driven:
    return Driven(driver, Finding("GPU", "absent", message="No driver that works shows one."))


def _words(library: Any, code: int) -> str:
    text = ctypes.c_char_p()
    library.cuGetErrorString(code, ctypes.byref(text))
    return (text.value or b"unknown error").decode(errors="replace")


def _gpus(library: Any, driver: Finding) -> Driven:
    """The GPUs of a driver that works."""
    count = ctypes.c_int()
    library.cuDeviceGetCount(ctypes.byref(count))
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not count.value:
        why = "" if hidden is None else f"  CUDA_VISIBLE_DEVICES is {hidden!r}."
        return Driven(driver, Finding("GPU", "absent", message=f"The driver shows none.{why}", remedy=_REMEDIES[100]))
    names, capabilities = [], []
    for ordinal in range(count.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(_SHOWN)
        numbers = [ctypes.c_int(), ctypes.c_int()]
        library.cuDeviceGet(ctypes.byref(device), ordinal)
        library.cuDeviceGetName(name, _SHOWN, device)
        for number, attribute in zip(numbers, (_CAPABILITY_MAJOR, _CAPABILITY_MINOR), strict=True):
            library.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
        capabilities.append(numbers[0].value * 10 + numbers[1].value)
        names.append(f"{name.value.decode(errors='replace')} (sm_{capabilities[-1]})")
    version = ", ".join(names)
    old = [name for name, capability in zip(names, capabilities, strict=True) if capability < _LEAST_CAPABILITY]
    if len(old) == len(names):
        return Driven(driver, Finding("GPU", "broken", version, message="onnxfuse needs sm_75 (T4) or newer.",
                                      remedy="Run on a newer GPU."))
    best = f"sm_{next(capability for capability in capabilities if capability >= _LEAST_CAPABILITY)}"
    message = f"Too old for onnxfuse, which needs sm_75 or newer: {', '.join(old)}." if old else ""
    remedy = "Choose another by CUDA_VISIBLE_DEVICES, or device_id of the CUDA provider." if old else ""
    return Driven(driver, Finding("GPU", "limited" if old else "ok", version, message=message, remedy=remedy), best)


def nvidia_cards(bus: Path = Path("/sys/bus/pci/devices")) -> list[str]:
    """Addresses of NVIDIA's display controllers, whether there is a driver or not."""
    found = []
    for device in sorted(bus.glob("*")):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        if vendor == _NVIDIA and kind.startswith(_DISPLAY):
            found.append(device.name)
    return found


def cupy(has_gpu: bool) -> Finding:
    """CuPy: its package, and whether it loads; on a machine with a GPU also whether it sees that."""
    packages = releases(("cupy", "cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x"))
    version = ", ".join(f"{name} {release}" for name, release in packages.items())
    if clashing(packages):
        return Finding("CuPy", "broken", version, message="Packages of CuPy overwrite one another's files.",
                       remedy=f"Keep one: pip uninstall -y {' '.join(packages)} && pip install cupy-cuda13x")
    spec = importlib.util.find_spec("cupy")
    if spec is None:
        return Finding("CuPy", "broken", message="It is not installed: no kernel can be compiled with it.",
                       remedy="pip install cupy-cuda13x, or cupy-cuda12x for drivers older than 580.")
    path = str(Path(spec.origin).parent) if spec.origin else ""
    remedy = f"pip install --force-reinstall {next(iter(packages), 'cupy-cuda13x')}"
    try:
        found = importlib.import_module("cupy")
        version = version or str(found.__version__)
        if has_gpu:
            remedy = ("Where the driver is older than CuPy's CUDA: pip install 'onnxfuse[cuda12]', or update the "
                      "driver.")
            found.cuda.runtime.getDeviceCount()
    except Exception as error:  # it raises what its loader met
        said = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        return Finding("CuPy", "broken", version, path, f"It does not load: {said}.", remedy)
    return Finding("CuPy", "ok", version, path)


def compiler(architecture: str) -> Finding:
    """NVRTC, by a small kernel that it compiles.

    Raises:
        KernelError: there is none, none for this driver, or it does not compile.
    """
    binding = nvrtc.binding()
    major, minor = binding.getVersion()
    compile_cubin(_TEXT, architecture)
    lacking = [number for number in architectures() if number not in binding.getSupportedArchs()]
    version = f"{major}.{minor} ({nvrtc.compiler()})"
    path = loaded_from("libnvrtc.so")
    if lacking:
        return Finding("NVRTC", "limited", version, path,
                       f"It does not know {', '.join(f'sm_{number}' for number in lacking)}.",
                       "Update it: pip install --upgrade nvidia-cuda-nvrtc")
    return Finding("NVRTC", "ok", version, path, f"compiled a kernel for {architecture}")


def toolkit() -> Finding:
    """The toolkit's headers.

    Raises:
        KernelError: they are missing, or there is no compiler that they are for.
    """
    folder = nvrtc.headers()[0]
    number = nvrtc.header_version(folder)
    return Finding("CUDA headers", "ok", "" if number is None else f"CUDA {number}", str(folder))
