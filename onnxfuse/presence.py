"""The GPU in the machine."""

from __future__ import annotations

from collections.abc import Sequence

from onnxfuse.planning.hardware import Profile, known_profiles, profile_for_device
from onnxfuse.runtime.library import present_gpus


def present_profile(device: int = 0, profiles: Sequence[Profile] | None = None) -> Profile | None:
    """The profile of a GPU that is present, or None where there is none, or no driver to ask.  Where CuPy cannot ask it
    for more, as where its CUDA is newer than the driver, a GPU whose name is known.

    ``profiles`` are those to look among, the shipped ones where None.
    """
    present = present_gpus()
    if device >= len(present):
        return None
    gpu = present[device]
    try:
        import cupy

        return profile_for_device(cupy.cuda.runtime.getDeviceProperties(device), profiles)
    except (ImportError, RuntimeError):
        # CUDA's own errors are RuntimeErrors; the doctor says what to mend.
        known = known_profiles() if profiles is None else profiles
        return next((
            each for each in known if divmod(each.sm, 10) == gpu.capability and each.is_called(gpu.name)), None)
