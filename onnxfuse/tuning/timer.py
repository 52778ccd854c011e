"""Who times a region's models: the GPU here, a stand-in in the tests."""

from __future__ import annotations

import contextlib
import gc
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray

from onnxfuse.errors import KernelError, OnnxfuseError
from onnxfuse.measurements import environment_of
from onnxfuse.measuring import driver
from onnxfuse.measuring.cupti import Activity, KernelTimer
from onnxfuse.measuring.database import Environment
from onnxfuse.measuring.machine import Machine, find_machine, start_provider
from onnxfuse.measuring.runner import Runner
from onnxfuse.runtime.compile import KernelSource, default_compiler
from onnxfuse.runtime.library import gpus

Array = NDArray[Any]

L2_TURNS = 4
"""How many times the L2's size the sets of inputs have together, so that it holds none when its turn comes again."""

MOST_SETS = 64
"""Inputs so small that more sets than these would be needed lie in the L2 in any model."""

LARGE = 1 << 26
"""Bytes of inputs whose memory is given back before the next model is timed."""

CYCLES, RUNS = 3, 24
"""How often each set is timed, and how many runs there are, at least."""


@dataclass(frozen=True)
class Timed:
    """A model's GPU time in kernels.

    Attributes:
        microseconds: median of a run; spread: distance of the quartiles; runs: how many.
        outputs: results on the first set of inputs, by name.
    """

    microseconds: float
    spread: float
    runs: int
    outputs: Mapping[str, Array]


class Bench(Protocol):
    """Times models on one set of inputs."""

    def time(self, model: onnx.ModelProto, *, fused: bool) -> Timed:
        """Run a model; ``fused``: its fused nodes run as kernels.

        Raises:
            OnnxfuseError: it cannot be compiled or run.
        """
        ...


class Timer(Protocol):
    """Times models on a GPU."""

    environment: Environment
    """Where it measures."""

    def compile(self, kernels: Sequence[KernelSource]) -> None:
        """Compile kernels in parallel ahead of their turn; one that does not compile is no error yet."""
        ...

    def bench(self, feeds: Mapping[str, Array]) -> AbstractContextManager[Bench]:
        """A bench with these inputs."""
        ...

    def alive(self) -> bool:
        """Whether it can go on after a failed run: a kernel that broke its memory takes the GPU's context along."""
        ...


class GpuTimer:
    """Times models on the GPU through ONNX Runtime and CUPTI."""

    def __init__(self, machine: Machine, gpu: driver.Device) -> None:
        """``find_timer`` makes one."""
        self._machine, self._gpu = machine, gpu
        self._architecture = gpus()[machine.ordinal].architecture
        self.environment = environment_of(gpu.name)

    def compile(self, kernels: Sequence[KernelSource]) -> None:
        """See ``Timer``."""
        with contextlib.suppress(KernelError):
            default_compiler().images(kernels, self._architecture)

    @contextlib.contextmanager
    def bench(self, feeds: Mapping[str, Array]) -> Iterator[Bench]:
        """See ``Timer``."""
        with tempfile.TemporaryDirectory(prefix="onnxfuse-tune-") as folder:
            yield _GpuBench(self._machine, self._gpu, dict(feeds), Path(folder) / "model.onnx")
        gc.collect()

    def alive(self) -> bool:
        """See ``Timer``."""
        try:
            self._gpu.synchronise()
        except KernelError:
            return False
        return True


@dataclass
class _GpuBench:
    machine: Machine
    gpu: driver.Device
    feeds: dict[str, Array]
    path: Path

    def time(self, model: onnx.ModelProto, *, fused: bool) -> Timed:
        """See ``Bench``."""
        onnx.save(model, self.path)
        runner = Runner(self.path, self.machine, self.feeds, {}, fused=fused)
        outputs = {name: np.array(array) for name, array in runner.results().items()}
        size = sum(array.nbytes for array in self.feeds.values())
        sets = min(MOST_SETS, max(2, math.ceil(L2_TURNS * self.gpu.l2_bytes / max(size, 1))))
        bindings = [runner.binding, *(runner.bind(self.feeds, runner.binding) for _ in range(sets - 1))]
        runs = max(CYCLES, math.ceil(RUNS / sets)) * sets
        with KernelTimer(self.gpu.synchronise) as timer:
            for binding in bindings:
                runner.session.run_with_iobinding(binding)
            timer.lap()
            for run in range(runs):
                runner.session.run_with_iobinding(bindings[run % sets])
            times = microseconds_per_run(timer.lap(), runs)
        del runner, bindings
        if size > LARGE:
            gc.collect()
        low, middle, high = np.percentile(times, [25, 50, 75])
        return Timed(float(middle), float(high - low), runs, outputs)


def microseconds_per_run(activities: Sequence[Activity], runs: int) -> NDArray[np.float64]:
    """Microseconds in kernels of each of several equal runs; copies and fills do not count.

    Raises:
        KernelError: the runs did not all launch as many kernels.
    """
    times = np.asarray([activity.nanoseconds for activity in activities if activity.is_kernel], np.float64)
    if not len(times) or len(times) % runs:
        raise KernelError(f"{len(times)} kernels were recorded in {runs} runs")
    summed: NDArray[np.float64] = times.reshape(runs, -1).sum(axis=1) / 1e3
    return summed


def find_timer() -> Timer:
    """The timer of the GPU here.

    Raises:
        KernelError: there is no GPU that ONNX Runtime can use.
        RuntimeLibraryError: there is no CUPTI, or the native library was not built.
    """
    remedy = ("Run it on the machine that the model will run on; ONNX Runtime needs onnxruntime-gpu, NVIDIA's driver, "
              "and CUDA's libraries: pip install 'onnxfuse[cuda]'.")
    machine = find_machine()
    if machine.gpu is None:
        raise KernelError("There is no GPU here that ONNX Runtime can use: nothing can be measured.", remedy=remedy)
    try:
        start_provider(machine, {})
    except OnnxfuseError:
        raise
    except Exception as error:  # ONNX Runtime has an exception type per status, all of them plain
        raise KernelError(f"ONNX Runtime's CUDA provider does not start: {error}", remedy=remedy) from error
    with KernelTimer(machine.gpu.synchronise):
        pass  # says now whether CUPTI works
    return GpuTimer(machine, machine.gpu)
