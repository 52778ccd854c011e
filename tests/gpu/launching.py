"""What checks of single kernels on a GPU share: plans launched on CuPy arrays, timing, and the command line."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from math import prod
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, Protocol, Self, TypeVar

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import cupy as cp  # noqa: E402
import numpy as np  # noqa: E402
import onnx  # noqa: E402

from onnxfuse import schedules  # noqa: E402
from onnxfuse.lowering.launch import LaunchPlan, Situation, Variant  # noqa: E402
from onnxfuse.lowering.lower import lower  # noqa: E402
from onnxfuse.lowering.routines import LibraryCall  # noqa: E402
from onnxfuse.operators import load_graph  # noqa: E402
from onnxfuse.refusal import Refusal  # noqa: E402
from onnxfuse.runtime.compile import compile_cubin  # noqa: E402
from onnxfuse.schedules import Kernel, Request, make_kernel  # noqa: E402

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'
LEAST_MB = 16
"""Bytes of the largest tensor from which on ``--least`` is asked for."""

Compute = Callable[..., Sequence[cp.ndarray]]
Shapes = list[tuple[np.dtype[Any], tuple[int, ...]]]


class Named(Protocol):
    """A case."""

    @property
    def name(self) -> str: ...


Some = TypeVar("Some", bound=Named)


@dataclass(frozen=True)
class Subject:
    """A kernel, types and shapes of its inputs, types of its outputs, and which of its inputs the model's are."""

    kernel: Kernel
    inputs: Shapes
    outputs: list[np.dtype[Any]]
    places: list[int]


def made(text: str, sizes: Mapping[str, int], schedule: str) -> Subject:
    """A graph as one region, at these sizes of its symbols."""
    graph = load_graph(onnx.parser.parse_model(HEAD + text))
    lowered = lower([node for node in graph.nodes if node.op != "Constant"], graph.outputs, graph)
    kernel = lowered if isinstance(lowered, Refusal) else make_kernel(Request(lowered, "check", sizes), schedule)
    if isinstance(lowered, Refusal) or isinstance(kernel, Refusal):
        raise AssertionError(f"no kernel: {kernel}")
    numpy = onnx.helper.tensor_dtype_to_np_dtype
    inputs = [(np.dtype(numpy(value.dtype or 0)), tuple(size.evaluate(sizes) for size in value.shape or ()))
              for value in lowered.tensors]
    places = [lowered.tensors.index(value) for value in graph.inputs]
    return Subject(kernel, inputs, [np.dtype(numpy(output.dtype)) for output in kernel.plan.outputs], places)


def filled(dtype: np.dtype[Any], shape: tuple[int, ...], offset: int) -> cp.ndarray:
    """Random elements whose memory starts ``offset`` elements past an aligned address."""
    count = prod(shape)
    if dtype.kind == "f":
        whole = cp.random.standard_normal(count + offset, dtype=cp.float32).astype(dtype)
    else:
        whole = cp.random.randint(0, 2 if dtype.kind == "b" else 100, count + offset).astype(dtype)
    return whole[offset:].reshape(shape)


@dataclass(frozen=True)
class Launcher:
    """A compiled kernel's plan, on sets of arrays.  Scratch is a buffer a set, so that timing allocates nothing."""

    plan: LaunchPlan
    module: Any

    @classmethod
    def of(cls, kernel: Kernel) -> Self:
        capability = cp.cuda.Device().compute_capability
        module = cp.cuda.function.Module()
        module.load(compile_cubin(kernel.source, f"sm_{capability}", kernel.plan.options))
        return cls(kernel.plan, module)

    def situation(self, inputs: Sequence[cp.ndarray], outputs: Sequence[cp.ndarray] = ()) -> Situation:
        device = cp.cuda.Device()
        found = Situation(
            [array.shape for array in inputs], (), [array.data.ptr for array in inputs],
            [array.data.ptr for array in outputs], sm=int(device.compute_capability),
            multiprocessors=int(cp.cuda.runtime.getDeviceProperties(device.id)["multiProcessorCount"]))
        found.bind(self.plan)
        return found

    def outputs(self, inputs: Sequence[cp.ndarray], dtypes: Sequence[np.dtype[Any]]) -> list[cp.ndarray]:
        """Outputs, poisoned."""
        situation = self.situation(inputs)
        made = [cp.empty(tuple(situation.evaluate(size) for size in output.shape), dtype)
                for output, dtype in zip(self.plan.outputs, dtypes, strict=True)]
        for array in made:
            array.reshape(-1).view(cp.uint8).fill(0xFB)
        return made

    def scratch(self, inputs: Sequence[cp.ndarray]) -> list[cp.ndarray]:
        """Scratch memory, poisoned."""
        situation = self.situation(inputs)
        return [cp.full(situation.evaluate(text), 0xFF, cp.uint8) for text in self.plan.scratch]

    def variants(self, inputs: Sequence[cp.ndarray], outputs: Sequence[cp.ndarray]) -> list[Variant]:
        situation = self.situation(inputs, outputs)
        return [one for one in self.plan.variants if all(situation.evaluate(guard) for guard in one.guards)]

    def launch(self, variant: Variant, inputs: Sequence[cp.ndarray], outputs: Sequence[cp.ndarray],
               scratch: Sequence[cp.ndarray] = ()) -> None:
        situation = self.situation(inputs, outputs)
        for step in variant.steps:
            if isinstance(step, LibraryCall) or step.extended:
                raise AssertionError(f"check_launches.py runs what this does not: {step}")
            arguments: list[Any] = []
            for text in step.arguments:
                kind, colon, size = text.partition(":")
                if colon:
                    arguments.append((np.int32 if kind == "i32" else np.int64)(situation.evaluate(size)))
                else:
                    arguments.append({"i": inputs, "o": outputs, "t": scratch}[text[0]][int(text[1:])])
            grid, block = (tuple(situation.evaluate(size) for size in sizes) for sizes in (step.grid, step.block))
            if 0 not in grid:
                self.module.get_function(step.kernel)(grid, block, tuple(arguments), situation.evaluate(step.shared))


COPY = cp.RawKernel("""extern "C" __global__ void copy(const uint4* from, uint4* to, long long count) {
  const long long at = blockIdx.x * 256ll + threadIdx.x;
  if (at < count) to[at] = from[at];
}""", "copy")


def seconds(run: Callable[[int], None], sets: int) -> float:
    """Time of one launch: graphs of a hundred, the sets by turns; the median of nine."""
    cp.cuda.Device().synchronize()
    stream = cp.cuda.Stream(non_blocking=True)
    count = max(100 // sets, 1) * sets
    with stream:
        run(0)
        stream.synchronize()
        stream.begin_capture()
        for turn in range(count):
            run(turn % sets)
        graph = stream.end_capture()
        found = []
        for _ in range(10):
            start, stop = cp.cuda.Event(), cp.cuda.Event()
            start.record(stream)
            graph.launch(stream)
            stop.record(stream)
            stop.synchronize()
            found.append(cp.cuda.get_elapsed_time(start, stop) / 1e3 / count)
    return float(np.median(found[1:]))


def copy_seconds(size: int, known: dict[int, float] = {}) -> float:  # noqa: B006 (a memory)
    """Time of a copy that moves ``size`` bytes, half of them read."""
    half = size // 2 // 16 * 16
    if half not in known:
        sets = sets_of(size)
        pairs = [(cp.zeros(half, cp.uint8), cp.empty(half, cp.uint8)) for _ in range(sets)]
        known[half] = seconds(
            lambda turn: COPY((-(-half // 16 // 256),), (256,), (*pairs[turn], np.int64(half // 16))), sets)
    return known[half]


def sets_of(size: int) -> int:
    """So many sets of tensors that none is left in the second-level cache when its turn comes again."""
    cache = cp.cuda.runtime.getDeviceProperties(cp.cuda.Device().id)["l2CacheSize"]
    return max(2, -(-4 * int(cache) // max(size, 1)))


def expect(what: str, found: cp.ndarray, wanted: cp.ndarray, exact: bool) -> None:
    if exact:
        if not bool((found == wanted).all()):
            raise AssertionError(f"{what}: {int((found != wanted).sum())} of {found.size} elements differ")
        return
    error = float(cp.max(cp.abs(found.astype(wanted.dtype) - wanted)) / cp.max(cp.abs(wanted)))
    if not error <= (2e-3 if found.dtype == cp.float16 else 1e-5):
        raise AssertionError(f"{what}: error {error:.2e} of the output's scale")


def run(doc: str | None, cases: Sequence[Some], check: Callable[[Some], tuple[str, float | None]]) -> int:
    """The command line of a check: ``check`` gives, for a case that is right, how quick it is, as text and, where that
    counts, as a share of a copy's rate.  ``--set`` changes constants of the schedules' modules."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="cases whose names hold one of these texts")
    parser.add_argument("--least", type=float, default=0.0, help="share of a copy's rate that large cases must reach")
    parser.add_argument("--set", nargs="*", default=[], metavar="MODULE.NAME=N",
                        help="other constants of the schedules")
    given = parser.parse_args()
    modules = [each.name for each in iter_modules(schedules.__path__)]
    for text in given.set:
        place, _, number = text.partition("=")
        home, _, name = place.partition(".")
        if home not in modules or not hasattr(module := import_module(f"{schedules.__name__}.{home}"), name):
            parser.error(f"no schedule has a constant {place}; modules are {', '.join(modules)}")
        setattr(module, name, int(number))
    failed = 0
    for case in cases:
        if given.only and not any(text in case.name for text in given.only):
            continue
        try:
            text, share = check(case)
            slow = share is not None and share < given.least
            failed += slow
            print(f"{case.name:<46} {'SLOW  ' if slow else 'ok    '} {text}", flush=True)
        except Exception as error:
            traceback.print_exc()
            failed += 1
            print(f"{case.name:<46} FAILED {type(error).__name__}: {str(error)[:2000]}", flush=True)
        cp.get_default_memory_pool().free_all_blocks()
    return 1 if failed else 0
