"""The GPU in the machine."""

from __future__ import annotations

from collections.abc import Sequence

from onnxfuse.planning.costs.hardware import Profile, profile_for_device, profiles_called
from onnxfuse.runtime.importing import import_cupy
from onnxfuse.runtime.library import present_gpus

__all__ = ["present_gpus", "present_profile"]


def present_profile(device: int = 0, profiles: Sequence[Profile] | None = None) -> Profile | None:
    """The profile of a GPU that is present, or None where there is none, or no driver to ask.  Where CuPy cannot ask it
    for more, as where its CUDA is newer than the driver, a GPU whose name is known.

    ``profiles`` are those to look among, the shipped ones where None.
    """
    present = present_gpus()
    if device >= len(present):
        return None
    try:
        properties = import_cupy().cuda.runtime.getDeviceProperties(device)
    except (ImportError, RuntimeError):
        # CUDA's own errors are RuntimeErrors; the doctor says what to mend.
        (major, minor), name = present[device].capability, present[device].name
        return next(profiles_called(name, 10 * major + minor, profiles), None)
    return profile_for_device(properties, profiles)
