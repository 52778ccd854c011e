"""How many processors the process may use: a container's share of a large machine is not what the machine has."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from pathlib import Path

_FOLDER = Path("/sys/fs/cgroup")


@cache
def processors() -> int:
    """Those that the system lets the process run on, as far as its control group gives it time on them."""
    allowed = len(os.sched_getaffinity(0))
    return max(1, min(allowed, round(share(_FOLDER) or allowed)))


def share(folder: Path) -> float | None:
    """Processors' time that a control group of version 2 or 1 gets; None where it has no limit."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with suppress(OSError, ValueError):  # "max" where there is no limit
            quota, period = map(int, " ".join((folder / name).read_text() for name in names).split())
            return quota / period if quota > 0 and period > 0 else None
    return None


def threads() -> int:
    """What a session of ONNX Runtime is to be told: 0, its own choice, where that counts right.  It takes a container's
    machine for its own, and threads that share too little time stop each other for tenths of a second."""
    return processors() if processors() < (os.cpu_count() or 1) else 0
