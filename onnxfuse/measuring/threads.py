"""Several threads on one session, each with inputs and outputs of its own: how many runs they get done."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxfuse.measuring.results import Throughput
from onnxfuse.measuring.runner import Runner
from onnxfuse.measuring.statistics import spread


def alone(latency: NDArray[np.float64], items: int | None) -> Throughput:
    """What one thread gets done whose runs took these milliseconds."""
    return _throughput([latency.reshape(-1)], float(latency.sum()) / 1e3, items)


def together(
    runner: Runner, inputs: Mapping[str, NDArray[Any]], threads: int, runs: int | None, seconds: float,
    items: int | None,
) -> Throughput:
    """What threads get done that all start at once.

    Args:
        inputs: of every thread, which copies them.
        runs: of each thread; where None, those that start within ``seconds``.

    Raises:
        OnnxfuseError: a run failed, or there is no memory for so many inputs and outputs.
    """
    bindings = [runner.bound(inputs) for _ in range(threads)]
    start = Barrier(threads)

    def work(binding: Any) -> tuple[float, float, list[float]]:
        start.wait()
        began, times = time.perf_counter(), [runner.timed(binding)]
        while len(times) < runs if runs is not None else time.perf_counter() - began < seconds:
            times.append(runner.timed(binding))
        return began, time.perf_counter(), times

    with ThreadPoolExecutor(threads) as pool:
        done = list(pool.map(work, bindings))
    wall = max(ended for _, ended, _ in done) - min(began for began, _, _ in done)
    return _throughput([np.asarray(times) for _, _, times in done], wall, items)


def _throughput(latencies: Sequence[NDArray[np.float64]], seconds: float, items: int | None) -> Throughput:
    rate = sum(times.size for times in latencies) / seconds
    return Throughput(len(latencies), rate, None if items is None else items * rate, tuple(map(spread, latencies)))
