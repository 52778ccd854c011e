"""Runs under the profiler: what the GPU did in each, and what that comes to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from onnxfuse.measuring.cupti import Activity, KernelTimer, busy_nanoseconds, demangled
from onnxfuse.measuring.results import KernelShare, Side, Throughput
from onnxfuse.measuring.runner import Runner
from onnxfuse.measuring.statistics import Ratio, ratio, spread

Laps = list[list[Activity]]
"""What the GPU did, run by run."""


def take_laps(timer: KernelTimer, runners: Sequence[Runner], count: int) -> list[Laps]:
    """``count`` runs of each model, by turns, under a timer that runs; none where ``count`` is 0.

    Raises:
        RuntimeLibraryError: CUPTI failed.
    """
    laps: list[Laps] = [[] for _ in runners]
    for turn in range(count + 1):
        for runner, found in zip(runners, laps, strict=True):
            timer.lap()
            runner.run()
            lap = timer.lap()
            if turn:  # in the first, the profiler prepares itself for each kernel
                found.append(lap)
    return laps


def has_kernels(laps: Laps) -> bool:
    """Whether each run launched one."""
    return all(any(activity.is_kernel for activity in lap) for lap in laps)


def side_of(path: str, seconds: float, latency: NDArray[np.float64], laps: Laps, peak: int | None,
            throughput: Throughput) -> Side:
    """A model's figures.

    Args:
        seconds: to create its session; latency: milliseconds of each run; laps: none where there is no GPU time.
        peak: bytes of device memory.
    """
    if not laps:
        return Side(path, seconds, spread(latency), peak_bytes=peak, throughput=throughput)
    kernels = [[activity for activity in lap if activity.is_kernel] for lap in laps]
    return Side(
        path, seconds, spread(latency), spread(_gpu_times(laps)),
        int(np.median([len(lap) for lap in kernels])),
        int(np.median([len(lap) - len(only) for lap, only in zip(laps, kernels, strict=True)])),
        _shares(kernels), peak, throughput,
    )


def _gpu_times(laps: Laps) -> NDArray[np.float64]:
    """Milliseconds [laps, 1] in which kernels ran."""
    times = [busy_nanoseconds(activity for activity in lap if activity.is_kernel) / 1e6 for lap in laps]
    return np.asarray(times, np.float64).reshape(-1, 1)


def gpu_ratio(laps: Sequence[Laps]) -> Ratio | None:
    """GPU time of the first model over that of the second, where both are known."""
    times = [_gpu_times(side) for side in laps]
    return ratio(times[0], times[1]) if all(map(len, times)) else None


def _shares(laps: Laps) -> tuple[KernelShare, ...]:
    """Kernels by name, most expensive first: launches of a lap, and their median milliseconds together."""
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(laps))
    counts: dict[str, int] = defaultdict(int)
    for place, lap in enumerate(laps):
        for activity in lap:
            spent[activity.name][place] += activity.nanoseconds / 1e6
            counts[activity.name] += 1
    shares = [KernelShare(demangled(name), counts[name] / len(laps), float(np.median(times)))
              for name, times in spent.items()]
    return tuple(sorted(shares, key=lambda share: -share.milliseconds))
