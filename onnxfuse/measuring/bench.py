"""Two models by turns in one process: latency, GPU time, kernels, memory, and whether they agree."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxfuse.errors import OnnxfuseError
from onnxfuse.measuring.compare import compare
from onnxfuse.measuring.cupti import KernelTimer
from onnxfuse.measuring.feeds import Feeds, make_feeds
from onnxfuse.measuring.laps import Laps, gpu_ratio, has_kernels, side_of, take_laps
from onnxfuse.measuring.machine import Machine, find_machine, start_provider
from onnxfuse.measuring.memory import MemoryMeter
from onnxfuse.measuring.results import BenchResult, Throughput
from onnxfuse.measuring.runner import CUDA_GRAPH, Runner
from onnxfuse.measuring.statistics import ratio
from onnxfuse.measuring.threads import alone, together
from onnxfuse.runtime.sessions import planned_otherwise

BLOCKS = 10
"""How many turns each model gets."""

WARM_UP_SECONDS = 0.2
SECONDS = 1.0
"""Timed seconds of each model where the number of runs is not given; at least a run a block, at most 100."""

LAPS = 10
"""Runs of each model under the profiler."""

TIMING = "timing runs"
"""What progress is told when both models have run and times begin."""

Inputs = Mapping[str, NDArray[Any]]
Progress = Callable[[str], None]

_ON_CPU = ("ONNX Runtime has no CUDA provider that works here: both models ran on the CPU, fused nodes through their "
           "functions. This says nothing about a GPU.")


def bench(
    original: str | Path,
    fused: str | Path | None = None,
    dims: Mapping[str, int] | None = None,
    *,
    inputs: Inputs | None = None,
    cuda_graph: bool = False,
    runs: int | None = None,
    threads: int = 1,
    laps: int = LAPS,
    provider_options: Mapping[str, str] | None = None,
    memory: bool = True,
    progress: Progress | None = None,
) -> BenchResult:
    """Measure a model, or two of them by turns.

    Inputs and outputs stay on the device.  Latency is timed first, without a profiler: blocks of runs, A B A B; then
    some runs of each under CUPTI give GPU time and kernels; then several threads, where these were asked for, run on
    one session of each; then a session of each counts its memory.

    Args:
        original: path of a model; fused: of another one with the same inputs and outputs.
        dims: sizes of symbolic dimensions.
        inputs: arrays by input name; those missing are made up (``inputs.make_inputs``).
        cuda_graph: replay a CUDA graph; of a model that does not run on the GPU as a whole, the runs are plain ones.
        runs: timed runs of each model, and of each thread; by default as many as take a second.
        threads: that run each model at once, on one session, for its throughput; latency is that of one thread.
        laps: runs of each model under the profiler.
        provider_options: of the CUDA provider, for both models; "device_id" chooses the GPU.
        memory: whether to count device memory.
        progress: told what is done next.

    Raises:
        ModelError: a model cannot be read or run, or the inputs do not fit.
        OnnxfuseError: the fused model's kernels cannot be had, or a kernel failed.
    """
    say = progress or (lambda text: None)
    given = dict(provider_options or {})
    _check_threads(threads, cuda_graph)
    machine = find_machine(int(given.get("device_id", 0)))
    say("preparing inputs")
    setting = _Setting(machine, make_feeds(original, dims or {}, inputs), given)
    setting.replay_graphs(cuda_graph)
    start_provider(machine, setting.options)
    runners = setting.runners([original] if fused is None else [original, fused], say)
    errors = compare(runners[0].results(), runners[1].results()) if fused else ()
    say(TIMING)
    latencies = _latencies(runners, runs)
    say("timing kernels")
    activities = setting.activities(runners, laps)
    done = setting.throughputs(runners, latencies, (threads, runs), say)
    created, paths = [runner.creation_seconds for runner in runners], [runner.path for runner in runners]
    runners.clear()
    gc.collect()
    peaks = setting.peaks(paths, given, say) if memory else [None] * len(paths)
    sides = [side_of(*known) for known in zip(paths, created, latencies, activities, peaks, done, strict=True)]
    return BenchResult(
        machine.name, machine.provider, setting.options, cuda_graph and machine.gpu is not None,
        setting.shapes, sides[0], sides[1] if fused else None,
        ratio(latencies[0], latencies[1]) if fused else None, gpu_ratio(activities) if fused else None, errors,
        tuple(dict.fromkeys(setting.notes)), setting.made.dims, setting.made.items,
    )


def _check_threads(threads: int, cuda_graph: bool) -> None:
    if threads > 1 and cuda_graph:
        raise OnnxfuseError(
            "A CUDA graph writes the outputs that it was captured with, so that several threads cannot replay it.",
            remedy="Measure one thread under CUDA graphs, or several without.", usage=True,
        )


class _Setting:
    """What the models run on and with; ``notes`` are what the reader has to know of it."""

    def __init__(self, machine: Machine, made: Feeds, options: Mapping[str, str]) -> None:
        self.machine, self.made, self.feeds, self.options = machine, made, made.arrays, dict(options)
        self.shapes = {name: tuple(array.shape) for name, array in made.arrays.items()}
        self.notes = [*([] if machine.gpu else [_ON_CPU]), *made.notes]

    def replay_graphs(self, wanted: bool) -> None:
        """Have runs replay CUDA graphs where that is wanted and there are some."""
        if wanted and self.machine.gpu:
            self.options[CUDA_GRAPH] = "1"
        elif wanted:
            self.notes.append("There are no CUDA graphs on the CPU; the runs were plain ones.")

    def runners(self, paths: Sequence[str | Path], say: Progress) -> list[Runner]:
        """Sessions of the original and the fused model, warmed up."""
        say("creating sessions")
        runners = self._runners(paths)
        if self.machine.gpu is not None:
            self.notes += (note for path in paths[1:] for note in planned_otherwise(path, self.options))
        self.notes += [
            f"{Path(runner.path).name} has nodes that ONNX Runtime runs on the CPU, so that no CUDA graph holds it: "
            "its runs were plain ones." for runner in runners if runner.uncaptured]
        say("warming up")
        for runner in runners:
            _warm_up(runner)
        return runners

    def _runners(self, paths: Sequence[str | Path]) -> list[Runner]:
        return [Runner(path, self.machine, self.feeds, self.options, fused=place == 1, together=self.made.together)
                for place, path in enumerate(paths)]

    def activities(self, runners: Sequence[Runner], count: int) -> list[Laps]:
        """What the GPU did in each lap of each model, laps by turns; nothing, and a note, where that cannot be had."""
        nothing: list[Laps] = [[] for _ in runners]
        if self.machine.gpu is None:
            return nothing
        try:
            with KernelTimer(self.machine.synchronise) as timer:
                found = take_laps(timer, runners, count)
                if not all(map(has_kernels, found)):
                    # Of a graph that was made before CUPTI came, the kernels may stay unseen.
                    found = take_laps(timer, self._runners([runner.path for runner in runners]), count)
        except OnnxfuseError as error:
            self.notes.append(f"GPU time was not measured: {error}")
            return nothing
        if not all(map(has_kernels, found)):
            self.notes.append("GPU time was not measured: CUPTI saw no kernels.")
            return nothing
        return found

    def throughputs(
        self, runners: Sequence[Runner], latencies: Sequence[NDArray[np.float64]],
        wanted: tuple[int, int | None], say: Progress,
    ) -> list[Throughput]:
        """What as many threads as are ``wanted`` get done with each model, and so many runs of each; one thread's is
        known from its latencies."""
        (threads, runs), items = wanted, self.made.items
        if threads == 1:
            return [alone(latency, items) for latency in latencies]
        say(f"timing {threads} threads")
        return [together(runner, self.feeds, threads, runs, SECONDS, items) for runner in runners]

    def peaks(self, paths: Sequence[str], options: Mapping[str, str], say: Progress) -> list[int | None]:
        """The most device memory that a session of each model takes with these options; None where there is no GPU,
        or, with a note, where it cannot be had."""
        if self.machine.gpu is None:
            return [None] * len(paths)
        say("counting memory")
        try:
            return [self._peak(path, options, fused=place == 1) for place, path in enumerate(paths)]
        finally:  # later sessions of this process allocate as ever
            start_provider(self.machine, {"device_id": str(self.machine.ordinal)})

    def _peak(self, path: str, options: Mapping[str, str], *, fused: bool) -> int | None:
        assert self.machine.gpu is not None
        meter = MemoryMeter(self.machine.gpu)
        try:
            runner = Runner(path, self.machine, self.feeds, {**options, **meter.options}, fused=fused,
                            together=self.made.together)
            self.machine.gpu.synchronise()
            del runner
            gc.collect()
        except OnnxfuseError as error:
            self.notes.append(f"memory was not measured: {error}")
            return None
        return meter.peak


def _warm_up(runner: Runner) -> None:
    start = time.perf_counter()
    for _ in range(3):
        runner.run()
    while time.perf_counter() - start < WARM_UP_SECONDS:
        runner.run()


def _latencies(runners: Sequence[Runner], runs: int | None) -> list[NDArray[np.float64]]:
    """Milliseconds [blocks, runs of a block] of each model, blocks by turns."""
    if runs is None:
        runs = int(np.clip(SECONDS * 1e3 / max(runner.timed() for runner in runners), BLOCKS, 100 * BLOCKS))
    blocks = max(1, min(BLOCKS, runs))
    length = -(-runs // blocks)
    times = [np.empty((blocks, length)) for _ in runners]
    collecting = gc.isenabled()
    gc.disable()
    try:
        for block in range(blocks):
            for runner, rows in zip(runners, times, strict=True):
                runner.run()  # the first run after the other model's finds the caches in a state of its own
                rows[block] = [runner.timed() for _ in range(length)]
    finally:
        if collecting:
            gc.enable()
    return times
