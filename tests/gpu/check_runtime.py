"""The runtime on a real GPU: dispatch, CUDA graphs, threads, host inputs, scratch, messages, images, cold start.

    python tests/gpu/check_runtime.py [--seconds 20] [--only NAME ...]

Needs ONNX Runtime with its CUDA provider, CuPy with NVRTC, onnx and g++ (it builds the native library where that is
missing or older than its sources).  Prints a table and exits with 1 where a check failed.  ``--rehearse fake_cuda.so``
runs what can be run without a GPU, over the stand-in of tests/native, in ONNX Runtime's CPU provider.
References are NumPy's float32 sums of the same order, compared bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from building import ROOT, build

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
build()

import fused_models as make  # noqa: E402
import numpy as np  # noqa: E402
import onnx  # noqa: E402
import onnxruntime  # noqa: E402
import quantized_models  # noqa: E402
from native.stand_in import ptx  # noqa: E402
from onnx import helper  # noqa: E402
from runtime_sessions import (  # noqa: E402
    IMAGES,
    REHEARSAL,
    Bound,
    child,
    expect,
    failed,
    plus,
    provider,
    session,
    with_images,
)
from runtime_speed import cold_start, creation, cuda_graph, dispatch, watched_dispatch  # noqa: E402

import onnxfuse.runtime as runtime  # noqa: E402
from onnxfuse.lowering.launch import LaunchPlan, Output, Step, Variant  # noqa: E402
from onnxfuse.pipeline import Options, optimise  # noqa: E402
from onnxfuse.runtime import compile, library  # noqa: E402
from onnxfuse.runtime.figures import KernelFigures, read_log  # noqa: E402

SECONDS = 20.0


def cuda_graph_scratch() -> str:
    """Scratch memory inside a captured graph."""
    if REHEARSAL:
        return "not in a rehearsal"
    x = np.arange(1000, dtype=np.float32)
    bound = Bound(session(make.chain(make.add_two(), 5, size=1000), enable_cuda_graph="1"), x)
    for factor in range(1, 20):
        expect(np.array_equal(bound.result(x * factor), plus(x * factor, 10)), "wrong at replay", factor)
    return "20 replays right"


def sizes() -> str:
    """Sizes from 0 to millions, all from one session."""
    made = session(make.chain(with_images(make.add_one()), 3))
    random = np.random.default_rng(0)
    for size in (0, 1, 2, 127, 128, 129, 4099, 1 << 22):
        x = random.standard_normal(size, np.float32)
        expect(np.array_equal(made.run(None, {"x": x})[0], plus(x, 3)), "size", size)
    return "0 to 4194304 elements right"


def host_inputs() -> str:
    """Host inputs are read at each run, and a failing check ends it with its message."""
    made = session(make.chain(with_images(make.add_host()), 2, ["shape"]))
    x = np.arange(1000, dtype=np.float32)
    for by in (0, 3, -7):
        expect(np.array_equal(made.run(None, {"x": x, "shape": np.array([1000, by])})[0], x + 2 * by), by)
    try:
        made.run(None, {"x": x, "shape": np.array([6, 1])})
    except Exception as error:
        expect(str(error).endswith(
            "onnxfuse: node 'node0' (Region0, add-host): x has not the size that was promised"), error)
    else:
        raise AssertionError("the check did not fail")
    expect(np.array_equal(made.run(None, {"x": x, "shape": np.array([1000, 1])})[0], x + 2), "after a failed run")
    return "values and message right"


def scratch() -> str:
    """Scratch buffers are right and do not leak."""
    made = session(make.chain(with_images(make.add_two()), 4))
    x = np.random.default_rng(0).standard_normal(1 << (16 if REHEARSAL else 20), np.float32)
    free = []
    for number in range(300):
        y = made.run(None, {"x": x})[0]
        if number in (99, 299):
            expect(np.array_equal(y, plus(x, 8)), "run", number)
            free.append(free_memory())
    lost = free[0] - free[1]
    expect(lost < 64 << 20, f"{lost >> 20} MiB lost in 200 runs")
    return f"{lost >> 20} MiB lost in 200 runs of {4 * x.nbytes >> 20} MiB scratch"


def free_memory() -> int:
    """Free device memory in bytes; 0 in a rehearsal."""
    if REHEARSAL:
        return 0
    import cupy

    free: int = cupy.cuda.runtime.memGetInfo()[0]
    return free


def large_shared_memory() -> str:
    """A block with 100 KB of dynamic shared memory."""
    if REHEARSAL:
        return "not in a rehearsal"
    source = r"""
extern "C" __global__ void turn(const float* x, float* y, int n) {
  extern __shared__ float row[];
  for (int i = threadIdx.x; i < n; i += blockDim.x) row[n - 1 - i] = x[i];
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = row[i];
}
"""
    one = ("1", "1", "1")
    step = Step("turn", one, ("256", "1", "1"), ("i0", "o0", "i32:i0.n"), "i0.n 4 *")
    plan = LaunchPlan("turn", 1, (), (), (Output(make.FLOAT, ("i0.0",)),), (Variant("only", (step,)),))
    body = [helper.make_node("Identity", ["x"], ["y"])]
    made = session(make.chain(make.Fused(plan, source, body), 1))
    x = np.arange(25_000, dtype=np.float32)
    for size in (10, 25_000):
        expect(np.array_equal(made.run(None, {"x": x[:size]})[0], x[:size][::-1]), size)
    return "100000 bytes right"


def threads() -> str:
    """16 threads run three sessions, one of them under ONNX Runtime's parallel executor."""
    made = [session(make.chain(with_images(make.add_two()), 5)),
            session(make.chain(with_images(make.add_one()), 20), parallel=True),
            session(make.chain(with_images(make.add_host()), 3, ["shape"]))]
    wrong: list[object] = []
    counts = [0] * 16
    end = time.monotonic() + SECONDS

    def work(number: int) -> None:
        random = np.random.default_rng(number)
        try:
            while time.monotonic() < end and not wrong:
                x = random.standard_normal(int(random.integers(0, 100_000)), np.float32)
                by = int(random.integers(-9, 9))
                results = (made[0].run(None, {"x": x})[0], made[1].run(None, {"x": x})[0],
                           made[2].run(None, {"x": x, "shape": np.array([len(x), by])})[0])
                third = x
                for _ in range(3):
                    third = third + np.float32(by)
                for index, (y, wanted) in enumerate(zip(results, (plus(x, 10), plus(x, 20), third), strict=True)):
                    if not np.array_equal(y, wanted):
                        wrong.append((index, len(x)))
                counts[number] += 3
        except Exception as error:
            wrong.append(error)

    pool = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    expect(not wrong, wrong)
    return f"{sum(counts)} runs in {SECONDS:.0f} s right"


def figures() -> str:
    """Registers, local and shared memory as the compiler says, against the driver's through cupy.RawModule."""
    if REHEARSAL:
        return "not in a rehearsal"
    gpu = library.gpus()[0]
    image, log = compile.compile_told(make.KERNELS, gpu.architecture)
    read = read_log(log)
    for name, kernel in compile.load_kernels(image, list(read)).items():
        loaded = KernelFigures(
            kernel.num_regs, read[name].spilled_bytes, kernel.local_size_bytes, kernel.shared_size_bytes)
        expect(read[name] == loaded, (name, read[name], loaded))
    expect(read["spilling"].spilled_bytes > 0, read)
    return f"{gpu.name}, {gpu.architecture}, CUDA {gpu.driver[0]}.{gpu.driver[1]}: {read['spilling']}"


def callback() -> str:
    """Kernels are compiled one by one while the session is created, where register was not told the model."""
    if REHEARSAL:
        return "not in a rehearsal"
    options = onnxruntime.SessionOptions()
    runtime.register(options)
    before = runtime.statistics()["images"]["compiled"]
    raw = make.chain(make.add_one(source=f"// {time.time_ns()}\n{make.ADD_ONE}"), 5).SerializeToString()
    made = onnxruntime.InferenceSession(raw, options, providers=provider(), enable_fallback=0)
    expect(runtime.statistics()["images"]["compiled"] == before + 1, runtime.statistics()["images"])
    runtime.record_runs()
    x = np.arange(100, dtype=np.float32)
    expect(np.array_equal(made.run(None, {"x": x})[0], plus(x, 5)), "wrong result")
    runtime.record_runs(False)
    expect(sum(kernel["runs"] == [1] for kernel in runtime.statistics()["kernels"]) == 5, runtime.statistics())
    return "one compilation for five nodes, each ran once"


def broken_kernel() -> str:
    """A kernel that does not compile is one clear error, with and without the compilation that register does."""
    if REHEARSAL:
        return "not in a rehearsal"
    source = make.ADD_ONE.replace("1.0f", "nonsense")
    raw = make.chain(make.add_one(source=source), 1).SerializeToString()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        runtime.session(raw, session_options=options)
    except Exception as error:
        expect('identifier "nonsense" is undefined' in str(error), error)
    else:
        raise AssertionError("no error")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    runtime.register(options)
    try:
        onnxruntime.InferenceSession(raw, options, providers=provider(), enable_fallback=0)
    except Exception as error:
        expect("node 'node0' (Region0, add-one): a kernel does not compile for" in str(error), error)
        expect('identifier "nonsense" is undefined' in str(error), error)
    else:
        raise AssertionError("no error")
    return "message right"


def add_number() -> make.Fused:
    """y = x + n for a vector and a vector of one element."""
    source = make.ADD_ONE.replace("const float* x, ", "const float* x, const float* by, ").replace("1.0f", "*by")
    step = make.elementwise("add_one", ("i0", "i1", "o0", "i64:s0"))
    plan = LaunchPlan("add-number", 2, ("i0.0",), (), (Output(make.FLOAT, ("s0",)),), (Variant("plain", (step,)),))
    return make.Fused(plan, source, [helper.make_node("Add", ["x", "n"], ["y"])], ("x", "n"))


def host_only_node() -> str:
    """Fused nodes that read host values (Shape, then Cast): right results, or the message that says why not.

    ONNX Runtime may move such a node to the CPU, where a fused node has no kernel.
    """
    if REHEARSAL:
        return "not in a rehearsal"
    cases: list[tuple[str, make.Fused, list[str], list[str]]] = [
        ("alone", make.add_one(), [], ["size"]),
        ("beside a graph input", add_number(), [], ["x", "size"]),
        ("with all host inputs", make.add_one(), ["shape"] * make.HOST_INPUTS, ["size"]),
    ]
    outcomes = []
    for name, fused, hosts, tensors in cases:
        nodes = [helper.make_node("Shape", ["x"], ["shape"]),
                 helper.make_node("Cast", ["shape"], ["size"], to=make.FLOAT),
                 fused.node("node0", "Region0", hosts, tensors, "y")]
        graph = helper.make_graph(nodes, "host", [helper.make_tensor_value_info("x", make.FLOAT, ["n"])],
                                  [helper.make_tensor_value_info("y", make.FLOAT, [1] if len(tensors) == 1 else ["n"])])
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid(make.DOMAIN, 1)],
            functions=[fused.function("Region0")], ir_version=9)
        x = np.arange(5, dtype=np.float32)
        try:
            made = session(model)
        except Exception as error:
            expect("onnxfuse: node 'node0' (Region0) was given to the CPU" in str(error), name, error)
            outcomes.append(f"{name}: refused with our message")
            continue
        wanted = np.array([6], np.float32) if len(tensors) == 1 else x + 5
        expect(np.array_equal(made.run(None, {"x": x})[0], wanted), name, "wrong result")
        outcomes.append(f"{name}: runs, right")
    return "; ".join(outcomes)


def activations_apart() -> str:
    """A Relu behind a float32 convolution is a kernel of its own, as plans take it: one call of both is for other
    providers (FusedConv)."""
    if REHEARSAL:
        return "not in a rehearsal"
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 17]> g (float[1,4,9,9] x, float[1,4,9,9] z) '
        "=> (float[1,4,9,9] y, float[1,4,9,9] u) <float[4,4,1,1] w = {" + ", ".join(["0.5"] * 16) + "}, "
        "float[4] b = {0.5, 0.5, 0.5, 0.5}> "
        "{ c = Conv(x, w, b) y = Relu(c) d = Conv(x, w, b) s = Add(d, z) u = Relu(s) }")
    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = f"{folder}/optimised.onnx"
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CUDAExecutionProvider"])
        operators = sorted(node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node)
    expect(operators.count("Relu") == 2 and "Conv" in operators and "FusedConv" not in operators, operators)
    return ", ".join(operators)


def quantized() -> str:
    """Quantised models load with the runtime's passes, which give outputs of fused nodes new names, and are right.

    The reference is the model as it was, on the same GPU; float32 on the way to a rounding may differ in its last
    digits, so that one element in fifty may differ.
    """
    if REHEARSAL:
        return "not in a rehearsal"
    found = []
    for name, written in quantized_models.MODELS.items():
        model = written()
        fused = optimise(model, Options(verify=False, dims={"batch": 2}, database=False)).model
        nodes = sum(node.domain == "onnxfuse" for node in fused.graph.node)
        expect(nodes >= 3, name, "fused nodes", nodes)
        own, kernels = session(model, registered=False), session(fused)
        for batch in (0, 1, 3, 64):
            feeds = quantized_models.inputs(batch)
            (wanted,), (got,) = own.run(None, feeds), kernels.run(None, feeds)
            expect(wanted.shape == got.shape and wanted.dtype == got.dtype, name, batch, got.shape)
            share = float(np.mean(np.abs(wanted - got) > 1e-4)) if got.size else 0.0
            expect(share < 0.02, name, batch, "share of elements that differ", share)
            found.append(share)
    return f"{len(found)} runs, at most {max(found):.2%} of the elements differ"


def embedded() -> str:
    """An embedded image runs where CuPy cannot be imported and the cache is empty."""
    names = ("sm_75", "sm_80", "sm_90", "sm_100")
    return _embeds(IMAGES or {name: compile.compile_cubin(make.ADD_ONE, name) for name in names})


def embedded_ptx() -> str:
    """So does PTX of the oldest architecture alone, which the driver compiles."""
    oldest = "compute_75"
    return _embeds({oldest: ptx(75, "add_one") if REHEARSAL else compile.compile_cubin(make.ADD_ONE, oldest)})


def _embeds(images: Mapping[str, bytes]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(make.chain(make.add_one(images), 3), path)
        took = child("embedded", path, 3, Path(folder) / "cache")
        expect(not (Path(folder) / "cache").exists(), "the cache was written")
    return f"session in {took:.2f} s"


def recorded_runs() -> str:
    """Statistics of a session that four threads run: every call, with times that a copy of that size takes; nothing of
    sessions that do not ask, and a captured call has no time."""
    runs, count, threads = 50, 5, 4
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "statistics.json"
        os.environ["ONNXFUSE_STATISTICS"] = str(path)
        try:
            watched = session(make.chain(with_images(make.add_one()), count))
        finally:
            del os.environ["ONNXFUSE_STATISTICS"]
        silent = session(make.chain(with_images(make.add_two()), count))
        sizes = (1 << 10, 1 << (18 if REHEARSAL else 24))
        wrong: list[object] = []

        def work(made: onnxruntime.InferenceSession) -> None:
            for number in range(runs):
                x = np.full(sizes[number % 2], number, np.float32)
                if not np.array_equal(made.run(None, {"x": x})[0], plus(x, count)):
                    wrong.append(number)

        pool = [threading.Thread(target=work, args=(watched,)) for _ in range(threads)]
        for thread in pool:
            thread.start()
        silent.run(None, {"x": np.zeros(7, np.float32)})
        for thread in pool:
            thread.join()
        expect(not wrong and not path.exists(), "wrong results", wrong)
        del watched, pool
        found = json.loads(path.read_text())
        expect(len(list(Path(folder).iterdir())) == 1, "more than the file")
    nodes = found["nodes"]
    expect(found["notes"] == [] and len(nodes) == count, found)
    expect({node["region"] for node in nodes} == {"add-one"}, "nodes that did not ask", found)
    medians: dict[int, list[int]] = {size: [] for size in sizes}
    for node in nodes:
        expect([run["inputs"] for run in node["runs"]] == [[[size]] for size in sizes], node)
        for size, run in zip(sizes, node["runs"], strict=True):
            calls = runs * threads // 2
            expect((run["calls"], run["timed"], run["captured"]) == (calls, calls, 0), run)
            expect(run["least_ns"] <= run["median_ns"] and calls * run["least_ns"] <= run["total_ns"], run)
            medians[size].append(run["median_ns"])
    small, large = (statistics.median(medians[size]) / 1e3 for size in sizes)
    # 128 MiB through device memory, at 0.2 to 20 TB/s; a small kernel within what a busy GPU may add to it.
    expect(REHEARSAL or (6 < large < 700 and 0.5 < small < 100), f"{small} us, {large} us")
    return f"{runs * threads} calls of each node; {small:.1f} us for {sizes[0]} elements, {large:.1f} us for {sizes[1]}"


def recorded_graph() -> str:
    """Calls that are captured into a CUDA graph are counted, break no capture, and have no time."""
    if REHEARSAL:
        return "not in a rehearsal"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "statistics.json"
        os.environ["ONNXFUSE_STATISTICS"] = str(path)
        try:
            x = np.arange(1000, dtype=np.float32)
            bound = Bound(session(make.chain(make.add_two(), 5, size=1000), enable_cuda_graph="1"), x)
        finally:
            del os.environ["ONNXFUSE_STATISTICS"]
        for factor in range(1, 20):
            expect(np.array_equal(bound.result(x * factor), plus(x * factor, 10)), "wrong at replay", factor)
        del bound
        found = json.loads(path.read_text())
    runs = [run for node in found["nodes"] for run in node["runs"]]
    expect(len(runs) == 5 and all(run["captured"] == 1 for run in runs), found)
    expect(all(run["timed"] == run["calls"] - 1 for run in runs) and len(found["notes"]) == 1, found)
    return f"{runs[0]['calls']} calls of each node, 1 of them captured"


CHECKS: list[Callable[[], str]] = [
    figures, sizes, host_inputs, scratch, large_shared_memory, dispatch, recorded_runs, recorded_graph,
    watched_dispatch, cuda_graph, cuda_graph_scratch, callback, broken_kernel, host_only_node, activations_apart,
    quantized, embedded, embedded_ptx, creation, cold_start, threads,
]


def main() -> int:
    """Run the checks and print the table."""
    global SECONDS
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long the threads run")
    parser.add_argument("--only", nargs="*", default=[], help="names of the checks to run")
    parser.add_argument("--rehearse", metavar="FAKE_CUDA", help="the stand-in of the driver, built")
    arguments = parser.parse_args()
    if arguments.rehearse and not REHEARSAL:
        os.environ.update(ONNXFUSE_REHEARSAL="1", ONNXFUSE_LIBCUDA=arguments.rehearse)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    SECONDS = arguments.seconds
    os.environ["ONNXFUSE_CACHE_DIR"] = tempfile.mkdtemp(prefix="onnxfuse-check-")
    print(f"ONNX Runtime {onnxruntime.__version__}, {onnxruntime.get_available_providers()}", flush=True)
    wanted = [check for check in CHECKS if not arguments.only or check.__name__ in arguments.only]
    faults = [check.__name__ for check in wanted if failed(check)]
    print(json.dumps({"failed": faults, "images": runtime.statistics()["images"]}))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
