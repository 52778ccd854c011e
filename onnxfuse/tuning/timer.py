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
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import onnx
from numpy.typing import NDArray

from onnxfuse.errors import KernelError, OnnxfuseError
from onnxfuse.measurements import environment_of
from onnxfuse.measuring import driver
from onnxfuse.measuring.cupti import Activity, KernelTimer, busy_nanoseconds
from onnxfuse.measuring.database import Environment
from onnxfuse.measuring.machine import Machine, Placed, find_machine, start_provider
from onnxfuse.measuring.runner import Runner
from onnxfuse.runtime.compile import KernelSource, default_compiler
from onnxfuse.runtime.library import gpus
from onnxfuse.tuning.samples import sampled

Array = NDArray[Any]

L2_TURNS = 4
"""How many times the L2's size the sets of inputs have together, so that it holds none when its turn comes again."""

MOST_SETS, FEW_SETS = 64, 12
"""Inputs so small that more sets than these would be needed lie in the L2 in any model; sets of inputs of which the L2
holds so many, so that further ones would show nothing."""

CYCLES, RUNS = 2, 24
"""How often each set is timed, and how many runs there are, at least."""


@dataclass(frozen=True)
class Timed:
    """A model's GPU time in kernels.

    Attributes:
        microseconds: median of a run; spread: distance of the quartiles; runs: how many.
        outputs: results by name, in one row: of large ones the elements that ``samples.pieces`` chooses.
    """

    microseconds: float
    spread: float
    runs: int
    outputs: Mapping[str, Array]


class Bench(Protocol):
    """Times models on one set of inputs."""

    def time(self, model: onnx.ModelProto, *, fused: bool) -> Timed:
        """Run a model, whose inputs are all among the bench's; ``fused``: its fused nodes run as kernels.

        Raises:
            OnnxfuseError: it cannot be compiled or run.
        """
        ...


class Timer(Protocol):
    """Times models on a GPU."""

    environment: Environment
    """Where it measures."""

    provider_options: Mapping[str, str]
    """Options of the CUDA provider that models are timed with."""

    def compile(self, kernels: Sequence[KernelSource]) -> None:
        """Compile kernels in parallel ahead of their turn, from any thread; one that does not compile is no error
        yet."""
        ...

    def bench(self, feeds: Mapping[str, Array], weights: Mapping[str, Array] | None = None,
              bound: Mapping[str, str] | None = None) -> AbstractContextManager[Bench]:
        """A bench with these inputs; ``weights`` are the same in every run, as a model's own are; outputs that are
        ``bound`` are written to the memory of the input beside them."""
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
        self.provider_options: Mapping[str, str] = {}

    def compile(self, kernels: Sequence[KernelSource]) -> None:
        """See ``Timer``."""
        with contextlib.suppress(KernelError):
            default_compiler().images(kernels, self._architecture)

    @contextlib.contextmanager
    def bench(self, feeds: Mapping[str, Array], weights: Mapping[str, Array] | None = None,
              bound: Mapping[str, str] | None = None) -> Iterator[Bench]:
        """See ``Timer``."""
        with tempfile.TemporaryDirectory(prefix="onnxfuse-tune-") as folder:
            path = Path(folder) / "model.onnx"
            bench = _GpuBench(self._machine, self._gpu, feeds, weights or {}, path, self.provider_options)
            bench.bound = bound or {}
            yield bench
        gc.collect()

    def alive(self) -> bool:
        """See ``Timer``."""
        try:
            self._gpu.synchronise()
        except KernelError:
            return False
        return True


class _GpuBench:
    """Its inputs are on the GPU as long as it is: they get there once, whatever is timed on them."""

    def __init__(self, machine: Machine, gpu: driver.Device, feeds: Mapping[str, Array], weights: Mapping[str, Array],
                 path: Path, options: Mapping[str, str] = MappingProxyType({})) -> None:
        """``path``: a file for models; ``options``: of the CUDA provider."""
        self._machine, self._gpu, self._path, self._options = machine, gpu, path, options
        self.bound: Mapping[str, str] = {}
        self._memory = machine.memory()
        size = sum(array.nbytes for array in feeds.values())
        count = sets_of(size, gpu.l2_bytes)
        self._placed = {name: self._copies(array, count) for name, array in feeds.items()}
        same = {name: self._copies(array, 1)[0] for name, array in weights.items()}
        self._sets = [{**{name: each[number] for name, each in self._placed.items()}, **same}
                      for number in range(count)]
        self._near = size * MOST_SETS <= L2_TURNS * gpu.l2_bytes
        self._flushed = self._memory.repeat(np.zeros(gpu.l2_bytes, np.uint8), 2) if weights else []

    def _copies(self, array: Array, count: int) -> list[Placed]:
        array = np.asarray(array, order="C")
        return [Placed(address, array.dtype, array.shape) for address in self._memory.repeat(array, count)]

    def _flush(self, number: int) -> None:
        """Put the L2 cache into the state in which a model's nodes find it before a run on this set of inputs.

        Weights lie at one place in all runs, as initialisers or as inputs: sets by turns would leave them in the cache,
        and a model, which reads each once a run, finds them in memory.  What a copy drives out it does with inputs too,
        of which small ones are read again.  CUPTI counts no copy as a kernel.
        """
        if not self._flushed:
            return
        source, target = self._flushed
        self._gpu.copy(target, source, self._gpu.l2_bytes)
        for copies in self._placed.values() if self._near else ():
            self._gpu.copy(target, copies[number].address, copies[number].nbytes)
        self._gpu.synchronise()

    def time(self, model: onnx.ModelProto, *, fused: bool) -> Timed:
        """See ``Bench``."""
        onnx.save(model, self._path)
        names = [info.name for info in model.graph.input]
        first, *others = [{name: each[name] for name in names} for each in self._sets]
        sets = len(self._sets)
        runs = max(CYCLES, math.ceil(RUNS / sets)) * sets
        with KernelTimer(self._gpu.synchronise) as timer:
            runner = Runner(self._path, self._machine, first, self._options, fused=fused, together=self.bound)
            bindings = [runner.binding, *(runner.bind(each, runner.binding, run=False) for each in others)]
            timer.lap()
            for run in range(runs):
                self._flush(run % sets)
                runner.session.run_with_iobinding(bindings[run % sets])
            times = microseconds_per_run(timer.lap(), runs)
        values = zip(runner.outputs, runner.binding.get_outputs(), strict=True)
        outputs = {name: array for name, value in values if (array := sampled(value, self._memory)) is not None}
        del runner, bindings
        gc.collect()  # gives its memory back; what there was before is no garbage (``held``)
        low, middle, high = np.percentile(times, [25, 50, 75])
        return Timed(float(middle), float(high - low), runs, outputs)


def sets_of(size: int, l2_bytes: int) -> int:
    """How many sets of inputs of so many bytes take turns."""
    if size * MOST_SETS <= l2_bytes:
        return FEW_SETS
    return min(MOST_SETS, max(2, math.ceil(L2_TURNS * l2_bytes / size)))


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Everything there is now is looked at for garbage no more in the body: a large model takes long."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def microseconds_per_run(activities: Sequence[Activity], runs: int) -> NDArray[np.float64]:
    """Microseconds of each of several equal runs in which kernels ran; copies and fills do not count.

    Raises:
        KernelError: the runs did not all launch as many kernels.
    """
    kernels = [activity for activity in activities if activity.is_kernel]
    if not kernels or len(kernels) % runs:
        raise KernelError(f"{len(kernels)} kernels were recorded in {runs} runs")
    each = len(kernels) // runs
    return np.asarray([busy_nanoseconds(kernels[first:first + each]) / 1e3 for first in range(0, len(kernels), each)])


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
