"""Generated kernels under NVIDIA's compute-sanitizer: those of two zoo models and of random graphs, every other of
which is a product, an attention or a convolution.

    python tests/gpu/check_sanitizer.py [--models bert_base_fp16:3:37,unet_fp16:1] [--graphs 40] [--seed 0]
        [--cases] [--only TEXT ...] [--tools memcheck,racecheck,initcheck,synccheck] [--emulate | --dry-run]

Models are planned for the sizes of their rows and for the small, odd ones at which all kernels run.  Each distinct
kernel runs in every variant whose guards hold, on tensors whose memory is as large as they are and not a byte larger,
then once more with all inputs one element past an aligned address.  Needs CuPy, hypothesis, and compute-sanitizer on
the path or under CUDA_HOME.  Prints kernels, launches, errors and seconds of each tool; exits with 1 where one found
anything, or a launch failed.  ``--emulate`` runs the same launches in the tests' CPU emulator, with no GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import pickle
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

import numpy as np  # noqa: E402
import onnx  # noqa: E402
from common import find_tool  # noqa: E402
from driver import encoded, launched  # noqa: E402
from region_cases import cases  # noqa: E402

from onnxfuse.lowering.launch import LaunchPlan, Situation, Step, Variant  # noqa: E402
from onnxfuse.lowering.tensor_map import TensorMap  # noqa: E402
from onnxfuse.region import Region  # noqa: E402

MODELS = "bert_base_fp16:3:37,unet_fp16:1"
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
LARGE = {"N": 67, "L": 45}
"""Sizes of random graphs' symbols at which kernels have several blocks."""

FOUND = 9
"""The sanitizer's exit code where it found an error."""

SHOWN = 60
"""Lines of a sanitizer's log that are shown."""

ALIGNMENT = 16
"""The widest access of a kernel, in bytes: what lies an element past it is not aligned."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Job:
    """A kernel text with all it needs to run: what it is of, its plan, and its inputs.

    Attributes:
        hosts: contents of the host inputs; None for an absent one.
    """

    name: str
    source: str
    plan: str
    inputs: tuple[Array, ...]
    hosts: tuple[tuple[int, ...] | None, ...]

    def situation(self, inputs: Sequence[int] = (), outputs: Sequence[int] = (), sm: int = 90,
                  multiprocessors: int = 132) -> tuple[LaunchPlan, Situation]:
        """The plan, and what its expressions mean for tensors at these addresses.

        Raises:
            ValueError: a check of the plan does not hold.
        """
        plan = LaunchPlan.from_json(self.plan)
        found = Situation([array.shape for array in self.inputs], [host or () for host in self.hosts], inputs, outputs,
                          sm=sm, multiprocessors=multiprocessors)
        found.bind(plan)
        return plan, found


# ---- What is run. ----


def jobs_of(name: str, regions: Iterable[Region], sizes: Mapping[str, int],
            arrays: Mapping[str, Array]) -> Iterator[Job | str]:
    """The kernels of fused regions, or what keeps one from being run.

    Args:
        sizes: of symbols, at which they run; arrays: contents of tensors by name, as far as they are known.
    """
    from onnxfuse.graph.sizes import shape_of

    for region in regions:
        inputs = []
        for value in region.tensors:
            shape = shape_of(value, sizes)
            known = arrays.get(value.name, value.constant)
            if known is None and (shape is None or value.dtype is None):
                yield f"{name}, {_label(region)}: the size of '{value.name}' is not known"
                break
            inputs.append(known if known is not None else filled(value.dtype, shape, len(inputs)))
        else:
            hosts = [_contents(value, sizes, arrays) for value in region.hosts]
            if None in hosts:
                yield f"{name}, {_label(region)}: the contents of a host input are not known"
                continue
            kernel = region.kernel
            yield Job(f"{name}, {_label(region)}", kernel.source, kernel.plan.to_json(), tuple(inputs), tuple(hosts))


def _label(region: Any) -> str:
    return region.nodes[0].name or " ".join(node.op for node in region.nodes[:6])


def _contents(value: Any, sizes: Mapping[str, int], arrays: Mapping[str, Array]) -> tuple[int, ...] | None:
    known = arrays.get(value.name, value.constant)
    if known is not None:
        return tuple(int(number) for number in np.asarray(known).reshape(-1))
    return None if value.elements is None else tuple(size.evaluate(sizes) for size in value.elements)


def filled(dtype: int | None, shape: tuple[int, ...] | None, seed: int) -> Array:
    """Normal floats, random truth values, and integers that are 0: an index that every tensor has."""
    from reference import numpy_type

    assert dtype is not None and shape is not None
    kind, rng = numpy_type(dtype), np.random.default_rng(seed)
    if kind == np.bool_:
        return rng.random(shape) < 0.5
    if dtype in (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16):
        return rng.standard_normal(shape, np.float32).astype(kind)
    return np.zeros(shape, kind)


def model_jobs(names: Sequence[str], target: str | None) -> Iterator[Job | str]:
    """Kernels of zoo models, "model:sizes"; planned for the row's sizes and for these."""
    from common import ZOO, hydrate
    from traffic import row_of
    from zoo_rows import Row

    from onnxfuse.graph.binding import bind
    from onnxfuse.pipeline import Options, optimise

    for name in names:
        row = row_of(name)
        usual = tuple(json.loads((ZOO / "zoo.json").read_text())[row.model]["sizes"][0])
        with tempfile.TemporaryDirectory(prefix="onnxfuse-sanitizer-") as folder:
            path = Path(folder) / f"{row.model}.onnx"
            path.write_bytes(hydrate().hydrate(ZOO / f"{row.model}.onnx.xz").SerializeToString())
            for planned in (row, Row(row.model, usual, row.inputs)):
                optimised = optimise(path, Options(dims=planned.dims, target=target, verify=False, compile=True))
                yield from jobs_of(f"{name} as planned for {planned.name}", optimised.regions,
                                   bind(optimised.graph, row.dims), {})


def graph_jobs(count: int, seed: int, most: int, target: str | None) -> Iterator[Job | str]:
    """Kernels of random graphs, at the sizes planned for and at ``LARGE`` ones; the same graphs for the same seed."""
    from graph_strategies import seeded
    from onnx import numpy_helper
    from reference import element_types, evaluate, numpy_type

    from onnxfuse.graph.binding import bind
    from onnxfuse.pipeline import Options, optimise

    for number in range(seed, seed + count):
        graph = seeded(number, most)
        constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.model.graph.initializer}
        types = element_types(graph.model)
        optimised = optimise(graph.model, Options(dims=graph.sizes, target=target or "H100", least_gain=0.0,
                                                  verify=False))
        for sizes in (graph.sizes, {name: LARGE[name] for name in graph.sizes}) if graph.sizes else ({},):
            values = constants | {name: np.asarray(array).astype(numpy_type(types[name])) for name, array
                                  in evaluate(graph.model, graph.arrays(sizes)).items() if name in types}
            yield from jobs_of(f"graph {number}", optimised.regions, bind(optimised.graph, sizes), values)


def drawn_jobs(count: int, seed: int, target: str | None) -> Iterator[Job | str]:
    """Kernels of random products, attentions and convolutions, by turns: the largest region of each as it runs by
    itself, and in one other way."""
    import test_random_attentions as attentions
    import test_random_convolutions as convolutions
    import test_random_products as products

    from onnxfuse.graph.binding import bind
    from onnxfuse.pipeline import Options, optimise, written
    from onnxfuse.tuning.subjects import subjects_of

    for number in range(seed, seed + count):
        one: Any = (products, attentions, convolutions)[number % 3].Drawn(number)
        model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> {one.text}')
        named = {size.dim_param for value in model.graph.input for size in value.type.tensor_type.shape.dim}
        drawn = {"N": 2} if isinstance(one, convolutions.Drawn) else one.sizes()
        sizes = {name: size for name, size in drawn.items() if name in named}
        plan = optimise(model, Options(
            dims=sizes, target=target or "H100", verify=False, database=False, eager=True))
        bound = bind(plan.graph, sizes)
        subjects = subjects_of(plan)[0]
        if not subjects:
            yield f"drawn {number}: nothing is fused"
            continue
        subject = max(subjects, key=lambda each: len(each.fusion.nodes))
        own, *others = subject.candidates
        for way in (own, *([one.choose(*others)] if others else [])):
            kernel = subject.kernel(way)
            if kernel is not None:
                region = written(replace(subject.fusion, made=kernel))
                yield from jobs_of(f"drawn {number}, {way}", [region], bound, {})


def case_jobs(target: str | None) -> Iterator[Job | str]:
    """Kernels of products, attention and stencils, in every way to run them."""
    for name, region in cases(target or "H100"):
        yield from jobs_of(name, [region], {}, {})


def distinct(jobs: Sequence[Job]) -> list[Job]:
    """One job for each kernel text and set of shapes."""
    found: dict[Any, Job] = {}
    for job in jobs:
        found.setdefault((job.source, job.plan, tuple(array.shape for array in job.inputs)), job)
    return list(found.values())


# ---- On the GPU, under a tool. ----


@dataclass(frozen=True)
class Tensor:
    """Device memory of exactly a tensor's size, or that and one element in front."""

    memory: Any
    address: int

    @staticmethod
    def of(size: int, offset: int = 0) -> Tensor:
        import cupy as cp

        memory = cp.cuda.alloc(size + offset) if size else None  # no pool: main() set no allocator
        return Tensor(memory, memory.ptr + offset if memory is not None else 0)

    @staticmethod
    def holding(array: Array, offset: int = 0) -> Tensor:
        import cupy as cp

        raw = np.ascontiguousarray(array)
        made = Tensor.of(raw.nbytes, offset)
        if raw.nbytes:
            cp.cuda.runtime.memcpy(made.address, raw.ctypes.data, raw.nbytes, cp.cuda.runtime.memcpyHostToDevice)
        return made


def run_all(folder: Path) -> int:
    """Launch every job; what a tool watches."""
    import cupy as cp

    from onnxfuse.runtime.compile import load_kernels

    cp.cuda.set_allocator(None)
    jobs: list[Job] = pickle.loads((folder / "jobs").read_bytes())
    device = cp.cuda.Device()
    sms = device.attributes["MultiProcessorCount"]
    kernels: dict[str, Any] = {}
    launches, failures = 0, []
    for number, job in enumerate(jobs):
        plan = LaunchPlan.from_json(job.plan)
        try:
            if job.source not in kernels:
                kernels[job.source] = load_kernels((folder / f"{number}.cubin").read_bytes(), plan.kernels)
            launches += run_job(job, kernels[job.source], int(device.compute_capability), sms)
        except Exception as error:  # whatever it is, it is this kernel's outcome, and the others go on
            traceback.print_exc()
            failures.append(f"{job.name}: {type(error).__name__}: {error}")
    print(json.dumps({"kernels": len(kernels), "launches": launches, "failures": failures}), flush=True)
    return 1 if failures else 0


def run_job(job: Job, kernels: Mapping[str, Any], sm: int, multiprocessors: int) -> int:
    """Every variant that holds, on aligned memory and not; how many kernels were launched."""
    count = 0
    for aligned in (True, False):
        inputs = [Tensor.holding(array, 0 if aligned else array.itemsize % ALIGNMENT) for array in job.inputs]
        plan, situation = job.situation([tensor.address for tensor in inputs], (), sm, multiprocessors)
        from emulator import element_type

        outputs = [Tensor.of(prod(situation.evaluate(size) for size in output.shape)
                             * element_type(output.dtype).itemsize) for output in plan.outputs]
        scratch = [Tensor.of(situation.evaluate(size)) for size in plan.scratch]
        plan, situation = job.situation([tensor.address for tensor in inputs], [t.address for t in outputs], sm,
                                        multiprocessors)
        buffers = {f"{kind}{place}": tensor for kind, tensors in (("i", inputs), ("o", outputs), ("t", scratch))
                   for place, tensor in enumerate(tensors)}
        for variant in holding(plan, situation):
            for step in variant.launches:
                count += launch(step, situation, buffers, plan.maps, kernels[step.kernel])
            if not aligned:
                break
    return count


def holding(plan: LaunchPlan, situation: Situation) -> list[Variant]:
    """The variants of generated kernels whose guards hold."""
    return [one for one in plan.variants if not one.calls and all(map(situation.evaluate, one.guards))]


def launch(
    step: Step, situation: Situation, buffers: Mapping[str, Tensor], maps: Sequence[TensorMap], kernel: Any
) -> int:
    """Launch one step and wait for it; 0 where its grid is empty."""
    grid, block = (tuple(situation.evaluate(size) for size in sizes) for sizes in (step.grid, step.block))
    if 0 in grid:
        return 0
    addresses = {name: tensor.address for name, tensor in buffers.items()}
    arguments: list[Any] = []
    for text in step.arguments:
        kind, colon, size = text.partition(":")
        if colon:
            arguments.append((ctypes.c_int32 if kind == "i32" else ctypes.c_int64)(situation.evaluate(size)))
        elif text in addresses:
            arguments.append(ctypes.c_uint64(addresses[text]))
        else:
            arguments.append(encoded(maps[int(text[1:])], addresses, situation))
    shared = situation.evaluate(step.shared)
    if shared + kernel.shared_size_bytes > 48 << 10:
        kernel.max_dynamic_shared_size_bytes = shared
    cluster = tuple(situation.evaluate(size) for size in step.cluster or ())
    launched(kernel.kernel.ptr, grid, block, shared, arguments, cluster)
    return 1


def emulate(jobs: Sequence[Job]) -> tuple[int, list[str]]:
    """The same launches in the CPU emulator: how many plans ran, and what it found."""
    from emulator import EmulatorError, prepare, run_plan, variants_that_hold

    prepare([job.source for job in jobs])
    launched, failures = 0, []
    for job in jobs:
        plan = LaunchPlan.from_json(job.plan)
        inputs, hosts = list(job.inputs), list(job.hosts)
        skewed = {place: 1 for place, array in enumerate(inputs) if array.size}
        try:
            for variant in variants_that_hold(plan, inputs, hosts):
                run_plan(plan, job.source, inputs, hosts, variant)
                launched += 1
            run_plan(plan, job.source, inputs, hosts, misalign=skewed)
            launched += 1
        except EmulatorError as error:
            failures.append(f"{job.name}: {error}")
    return launched, failures


# ---- The tools. ----


@dataclass(frozen=True)
class Outcome:
    """What a tool found: its summary, errors it printed, seconds; ``log`` is empty where it is clean."""

    tool: str
    clean: bool
    summary: str
    kernels: int
    launches: int
    seconds: float
    log: str = ""


def under(tool: str, folder: Path, seconds: float) -> Outcome:
    """All jobs under one tool, in a process of its own."""
    log = folder / f"{tool}.log"
    command = [find_tool("compute-sanitizer"), "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20",
               "--log-file", str(log), sys.executable, str(Path(__file__).resolve()), "--run", str(folder)]
    start = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return Outcome(tool, False, f"took more than {seconds:.0f} s", 0, 0, seconds)
    return outcome(tool, done.returncode, done.stdout, done.stderr, log.read_text(errors="replace")
                   if log.exists() else "", time.perf_counter() - start)


def outcome(tool: str, code: int, stdout: str, stderr: str, log: str, seconds: float) -> Outcome:
    """What a finished tool says; it is clean only where it says so and every job ran."""
    report = next((json.loads(line) for line in reversed(stdout.splitlines()) if line.startswith('{"kernels"')), None)
    summary = next(iter(re.findall(r"SUMMARY: (.*)", log + stdout)), "no summary")
    counts = [int(number) for number in re.findall(r"\d+", summary)]  # errors, of racecheck hazards and warnings too
    clean = code == 0 and report is not None and not report["failures"] and bool(counts) and not any(counts)
    shown = "" if clean else "\n".join([
        f"exit code {code}", *(report["failures"] if report else []), *log.splitlines()[:SHOWN],
        *stderr.splitlines()[-SHOWN:]])
    ran = report or {"kernels": 0, "launches": 0}
    return Outcome(tool, clean, summary, ran["kernels"], ran["launches"], seconds, shown)


def compile_all(jobs: Sequence[Job], folder: Path) -> None:
    """Images of all jobs for the GPU at hand, with line information, and the jobs themselves, into the folder."""
    from onnxfuse.runtime.compile import KernelSource, default_compiler
    from onnxfuse.runtime.dump import LINE_INFORMATION
    from onnxfuse.runtime.library import gpus

    plans = [LaunchPlan.from_json(job.plan) for job in jobs]
    sources = [KernelSource(job.source, (*plan.options, LINE_INFORMATION), plan.kernels)
               for job, plan in zip(jobs, plans, strict=True)]
    for number, image in enumerate(default_compiler().images(sources, gpus()[0].architecture)):
        (folder / f"{number}.cubin").write_bytes(image)
    (folder / "jobs").write_bytes(pickle.dumps(list(jobs)))


def collect(makers: Sequence[Callable[[], Iterator[Job | str]]]) -> tuple[list[Job], list[str]]:
    """Distinct jobs, and what could not be one."""
    found = [one for maker in makers for one in maker()]
    return distinct([one for one in found if isinstance(one, Job)]), [one for one in found if isinstance(one, str)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS, help="zoo models and sizes to run at; empty for none")
    parser.add_argument("--graphs", type=int, default=40,
                        help="random graphs, of which every other is a product, an attention or a convolution; "
                             "40 by default")
    parser.add_argument("--most", type=int, default=25, help="nodes of a random graph, about; 25 by default")
    parser.add_argument("--cases", action="store_true", help="every way to run products, attention and stencils too")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT",
                        help="kernels whose first variant's name, or what it is of, has it; may be given several times")
    parser.add_argument("--seed", type=int, default=0, help="of the random graphs")
    parser.add_argument("--tools", default=",".join(TOOLS), help="of compute-sanitizer; all four by default")
    parser.add_argument("--target", help="GPU to plan for; by default the one at hand")
    parser.add_argument("--seconds", type=float, default=500, help="most that one tool may take")
    parser.add_argument("--dry-run", action="store_true", help="only plan, and say what would run")
    parser.add_argument("--emulate", action="store_true", help="run the same launches in the CPU emulator instead")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run is not None:
        return run_all(given.run)
    tools = [tool for tool in given.tools.split(",") if tool]
    unknown = set(tools) - set(TOOLS)
    if unknown:
        parser.error(f"no tool is called {', '.join(sorted(unknown))}; there are {', '.join(TOOLS)}")
    on_gpu = not (given.dry_run or given.emulate)
    if on_gpu:
        find_tool("compute-sanitizer")
        from building import build

        build()
    start = time.perf_counter()
    models, drawn = [name for name in given.models.split(",") if name], given.graphs // 2
    jobs, skipped = collect([lambda: model_jobs(models, given.target),
                             lambda: graph_jobs(given.graphs - drawn, given.seed, given.most, given.target),
                             lambda: drawn_jobs(drawn, given.seed, given.target),
                             lambda: case_jobs(given.target) if given.cases else iter(())])
    jobs = [job for job in jobs for first in [LaunchPlan.from_json(job.plan).variants[0]]
            if any(text in job.name or text in first.name for text in given.only or [""]) and not first.calls]
    kernels = len({job.source for job in jobs})
    print(f"{kernels} kernels, {len(jobs)} with their shapes, planned in {time.perf_counter() - start:.0f} s",
          flush=True)
    for text in skipped:
        print(f"  not run: {text}")
    if given.dry_run:
        for job in jobs:
            plan, situation = job.situation()
            names = ", ".join(variant.name for variant in holding(plan, situation))
            print(f"  {job.name}: {names}; {' '.join(str(array.shape) for array in job.inputs)}")
        return 0
    if given.emulate:
        launched, failures = emulate(jobs)
        print(f"emulator   {'FAILED' if failures else 'ok    '} {launched} runs; {time.perf_counter() - start:.0f} s")
        print("\n".join(failures))
        return 1 if failures else 0
    with tempfile.TemporaryDirectory(prefix="onnxfuse-sanitizer-") as name:
        folder = Path(name)
        begun = time.perf_counter()
        compile_all(jobs, folder)
        print(f"compiled in {time.perf_counter() - begun:.0f} s", flush=True)
        with ThreadPoolExecutor(len(tools)) as pool:
            outcomes = list(pool.map(lambda tool: under(tool, folder, given.seconds), tools))
    for one in outcomes:
        print(f"{one.tool:<10} {'ok    ' if one.clean else 'FAILED'} {one.summary}; {one.kernels} kernels, "
              f"{one.launches} launches, {one.seconds:.0f} s")
        if one.log:
            print(one.log)
    return 0 if all(one.clean for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
