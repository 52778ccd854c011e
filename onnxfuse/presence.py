"""The GPU in the machine."""

from __future__ import annotations

from onnxfuse.errors import KernelError, RuntimeLibraryError
from onnxfuse.planning.hardware import Profile, profile_for_device
from onnxfuse.runtime.library import gpus


def present_profile(device: int = 0) -> Profile | None:
    """The profile of a GPU that is present, or None where there is none, or no driver to ask."""
    try:
        if device >= len(gpus()):
            return None
    except (KernelError, RuntimeLibraryError):
        return None
    try:
        import cupy

        return profile_for_device(cupy.cuda.runtime.getDeviceProperties(device))
    except ImportError:
        return None
