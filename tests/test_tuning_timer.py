"""Times of runs, of inputs in turn, and what the cache holds of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from cli_models import CHAIN, write

from onnxfuse.errors import KernelError
from onnxfuse.measuring import runner
from onnxfuse.measuring.cupti import KERNEL, MEMCPY, Activity
from onnxfuse.measuring.machine import CPU, Machine
from onnxfuse.measuring.runner import create_session
from onnxfuse.tuning import timer as timer_module
from onnxfuse.tuning.timer import microseconds_per_run


def test_times_of_runs() -> None:
    activities = [Activity(kind, "k", start, start + nanoseconds) for start, nanoseconds, kind in
                  [(0, 1000, KERNEL), (2000, 500, KERNEL), (2500, 9999, MEMCPY), (20000, 3000, KERNEL),
                   (23000, 500, KERNEL)]]
    assert list(microseconds_per_run(activities, 2)) == [1.5, 3.5]
    beside = [activities[0], activities[1]._replace(start=500, end=1600), *activities[2:]]
    assert list(microseconds_per_run(beside, 2)) == [1.6, 3.5]
    with pytest.raises(KernelError, match=r"^4 kernels were recorded in 3 runs$"):
        microseconds_per_run(activities, 3)
    with pytest.raises(KernelError, match=r"^0 kernels were recorded in 3 runs$"):
        microseconds_per_run([], 3)


def recorded(monkeypatch: pytest.MonkeyPatch, told: Callable[[int], None] = lambda binding: None) -> list[list[int]]:
    """Sessions run on the CPU under a profiler that reports a kernel of 1 us, 2 us and so on for each run.

    Returns: by lap, what each run was bound to; each is told before it runs too.
    """
    bound: list[int] = []
    laps: list[list[int]] = []

    class Recorder:
        def __init__(self, synchronise: Any) -> None: ...
        def __enter__(self) -> Recorder:
            return self
        def __exit__(self, *_: Any) -> None: ...
        def lap(self) -> list[Activity]:
            laps.append(list(bound))
            bound.clear()
            return [Activity(KERNEL, "k", 0, 1000 * (number + 1)) for number in range(len(laps[-1]))]

    class Session:
        def __init__(self, session: Any) -> None:
            self.session = session
        def __getattr__(self, name: str) -> Any:
            return getattr(self.session, name)
        def run_with_iobinding(self, binding: Any) -> None:
            bound.append(id(binding))
            told(id(binding))
            self.session.run_with_iobinding(binding)

    def create(*arguments: Any, **options: Any) -> Any:
        session, seconds = create_session(*arguments, **options)
        return Session(session), seconds

    monkeypatch.setattr(timer_module, "KernelTimer", Recorder)
    monkeypatch.setattr(runner, "create_session", create)
    return laps


def test_a_bench_takes_inputs_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    laps = recorded(monkeypatch)
    feeds = {"x": np.full((8, 4096), 0.5, np.float32), "w": np.ones(4096, np.float32)}
    gpu = SimpleNamespace(synchronise=lambda: None, l2_bytes=100_000)
    bench = timer_module._GpuBench(Machine("CPU", CPU, "cpu"), gpu, feeds, {}, tmp_path / "model.onnx")
    timed = bench.time(onnx.load(write(tmp_path, CHAIN)), fused=False)
    # Three sets of 147 kB are the first to be over four times the cache; each is timed eight times, in turn.
    sets, runs = laps[1][:3], laps[1]
    assert len(set(sets)) == 3 and set(laps[0]) == {sets[0]} and runs == sets * 8
    assert (timed.runs, timed.microseconds, timed.spread) == (24, 12.5, 11.5)
    expected = np.full(8 * 4096, 0.5 / (1 + np.exp(-(np.tanh(0.5) + 0.5))))
    assert np.allclose(timed.outputs["y"], expected, rtol=1e-6)  # float32 against float64


@pytest.mark.parametrize(("size", "count"), [
    (0, 12), (1000, 12), (1001, 64), (4000, 64), (4100, 63), (100_000, 3), (10**9, 2)])
def test_the_cache_holds_no_inputs_when_their_turn_comes_but_for_small_ones(size: int, count: int) -> None:
    """64 sets of 1,000 bytes lie in a cache of 64,000 bytes at once, and so do 12."""
    assert timer_module.sets_of(size, 64_000) == count


@pytest.mark.parametrize(("rows", "again"), [(64, False), (1, True)])
def test_weights_are_read_from_memory_in_every_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, again: bool
) -> None:
    """A cache's size is copied before each run; inputs so small that a model has them in the cache are read again."""
    done: list[tuple[str, int]] = []
    laps = recorded(monkeypatch, lambda binding: done.append(("run", 0)))
    weights, feeds = {"w": np.ones(4096, np.float32)}, {"x": np.full((rows, 4096), 0.5, np.float32)}
    cache, own = 600_000, rows * 4096 * 4
    gpu = SimpleNamespace(synchronise=lambda: done.append(("wait", 0)), l2_bytes=cache,
                          copy=lambda target, source, size: done.append(("copy", size)))
    machine, path, model = Machine("CPU", CPU, "cpu"), tmp_path / "model.onnx", onnx.load(write(tmp_path, CHAIN))
    timer_module._GpuBench(machine, gpu, feeds, weights, path).time(model, fused=False)
    turn = [("copy", cache), *([("copy", own)] if again else []), ("wait", 0), ("run", 0)]
    timed = len(laps[1]) * len(turn)
    assert len(laps[1]) >= 24 and done[-timed:] == turn * len(laps[1])
    done.clear()
    timer_module._GpuBench(machine, gpu, {**feeds, **weights}, {}, path).time(model, fused=False)
    assert not any(kind == "copy" for kind, _ in done)
