"""The GPU in the machine."""

from __future__ import annotations

from collections.abc import Sequence

from onnxfuse.errors import KernelError, RuntimeLibraryError
from onnxfuse.planning.hardware import Profile, profile_for_device
from onnxfuse.runtime.library import gpus


def present_profile(device: int = 0, profiles: Sequence[Profile] | None = None) -> Profile | None:
    """The profile of a GPU that is present, or None where there is none, or no driver to ask.

    ``profiles`` are those to look among, the shipped ones where None.
    """
    try:
        if device >= len(gpus()):
            return None
    except (KernelError, RuntimeLibraryError):
        return None
    try:
        import cupy

        return profile_for_device(cupy.cuda.runtime.getDeviceProperties(device), profiles)
    except ImportError:
        return None
