"""Products by cuBLASLt as steps of launch plans, on a real GPU, and what each algorithm takes beside the kernels.

    python tests/gpu/check_library_steps.py [--only NAME ...] [--cases bert,llama] [--types float16,float32]

Every type with every epilogue, every rank of an algorithm, captured CUDA graphs and a fused model are right; then times
are told of products of transformers.  Needs what check_runtime.py needs, and cuBLASLt; PyTorch is timed too where it is
installed.  Results are compared with NumPy's of the same rounded operands in float64, by the error of the output's
scale.  Prints a table and exits with 1
where a check failed.  ``--rehearse FOLDER`` runs what can be run without a GPU over the stand-ins of tests/native that
lie there, ``fake_cuda.so`` and ``fake_cublaslt.so``.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from building import ROOT, build

sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]
build()

import launch_models as launches  # noqa: E402
import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
import onnx  # noqa: E402
import onnxruntime  # noqa: E402
from runtime_sessions import DEVICE, REHEARSAL, begin, expect, failed, session  # noqa: E402

from onnxfuse.lowering.routines import ACTIVATIONS, TF32  # noqa: E402
from onnxfuse.schedules.products.library import RANKS, WORKSPACE  # noqa: E402

TOLERANCES = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-5, TF32: 2e-3}
"""Of the output's largest element: two units in the last place of it, and the order of sums."""

GELU = 1e-3
"""What the library's tanh may add."""

SIZES = [(1, 5, 7, 3), (3, 17, 33, 65), (2, 16, 24, 8), (1, 1, 64, 40), (2, 31, 1, 129)]
LARGE = [(1, 512, 768, 1024), (4, 128, 256, 4096), (1, 4097, 1000, 64)]
"""A batch of so many, rows, columns, and what is summed over."""

STORED = [(False, False, False), (True, False, True), (False, True, True), (True, True, False)]
"""Whether a and b are stored transposed, and b is one for all."""

NO_ALGORITHM = "has no algorithm"

REPLAYS = 10


def fed(product: launches.Product, sizes: Sequence[int], seed: int = 0) -> dict[str, np.ndarray]:
    """Random inputs of a product's model."""
    random, (batch, m, n, k) = np.random.default_rng(seed), sizes
    inner = (n, k) if product.transpose_b else (k, n)
    found = {"x": random.standard_normal((batch, k, m) if product.transpose_a else (batch, m, k), np.float32),
             "w": random.standard_normal(inner if product.one_b else (batch, *inner), np.float32)}
    found |= {"v": random.standard_normal(n, np.float32)} if product.bias else {}
    return found | ({"u": random.standard_normal((batch, m, n), np.float32)} if product.added else {})


def wanted(product: launches.Product, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """The result in float64, of operands as the type holds them."""
    kind: Any = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}.get(product.dtype, np.float32)
    x, w, *added = (array.astype(kind).astype(np.float64) for array in inputs.values())
    out = (x.swapaxes(1, 2) if product.transpose_a else x) @ (w.swapaxes(-1, -2) if product.transpose_b else w)
    out = sum(added, out)
    if product.activation == "relu":
        return np.maximum(out, 0)
    return out * (0.5 + 0.5 * np.tanh(np.sqrt(2 / np.pi) * (out + 0.044715 * out**3))) if product.activation else out


def error_of(product: launches.Product, made: Any, sizes: Sequence[int]) -> float | None:
    """The largest error by the output's scale; None where the library has no algorithm.

    Raises:
        AssertionError: it is too large.
    """
    inputs = fed(product, sizes)
    try:
        (got,) = made.run(None, inputs)
    except Exception as error:  # ONNX Runtime has an exception type per status, all of them plain
        if NO_ALGORITHM in str(error):
            return None
        raise
    right = wanted(product, inputs)
    error = float(np.max(np.abs(got - right)) / max(float(np.max(np.abs(right))), 1e-3))
    least = TOLERANCES[product.dtype] + (GELU if product.activation == "gelu_tanh" else 0.0)
    expect(error <= least, product, tuple(sizes), "error", error)
    return error


def epilogues() -> str:
    """Every type with every epilogue and what is added, operands stored either way, a batch and one for all of it."""
    worst: dict[str, float] = defaultdict(float)
    without: Counter[str] = Counter()
    ways = itertools.product(TOLERANCES, ACTIVATIONS, (False, True), (False, True), STORED)
    for dtype, activation, bias, added, (transpose_a, transpose_b, one_b) in ways:
        product = launches.Product(
            dtype, transpose_a, transpose_b, one_b, 1 << 22, activation, bias, added=added)
        name = f"{dtype}{' bias' * bias}{' added' * added}{f' {activation}' if activation else ''}"
        made = session(product.model(product.fused()))
        plain = transpose_b and not transpose_a
        for sizes in (*SIZES, *(LARGE if plain and not REHEARSAL else ())):
            error = error_of(product, made, sizes)
            without[name] += error is None
            worst[name] = max(worst[name], error or 0.0)
    for name, error in worst.items():
        print(f"    {name:28} error at most {error:.1e}; no algorithm for {without[name]}", flush=True)
    return f"{len(worst)} kinds, error at most {max(worst.values()):.1e}; no algorithm in {without.total()} cases"


def algorithms() -> str:
    """Each rank, also where parts of a sum need a workspace."""
    worst = 0.0
    for dtype, rank in itertools.product(TOLERANCES, range(8)):
        product = launches.Product(dtype, one_b=True, workspace=WORKSPACE, bias=True, algorithm=rank)
        made = session(product.model(product.fused()))
        for sizes in SIZES[:3] if REHEARSAL else [*SIZES, (1, 64, 64, 16384), (1, 128, 4096, 4096)]:
            worst = max(worst, error_of(product, made, sizes) or 0.0)
    return f"8 ranks of {len(TOLERANCES)} types, error at most {worst:.1e}"


def numbers() -> str:
    """What comes of NaN and infinities; a result, not a bar."""
    told = []
    for activation in ACTIVATIONS:
        product = launches.Product("float16", activation=activation)
        made = session(product.model(product.fused()))
        x = np.array([np.nan, np.inf, -np.inf, -0.0, 60000.0, -3.0, 1.0, 2.0], np.float32).reshape(1, 8, 1)
        (got,) = made.run(None, {"x": x, "w": np.ones((1, 1, 8), np.float32)})
        told.append(f"{activation or 'nothing'}: {got[0, :, 0].tolist()}")
    return "of NaN, inf, -inf, -0, 60000, -3, 1, 2: " + "; ".join(told)


def captured() -> str:
    """Products in captured CUDA graphs, with workspaces that are wanted and that are not."""
    if REHEARSAL:
        return "not in a rehearsal"
    count = 0
    for dtype, rank, (batch, m, n, k) in itertools.product(
            ("float16", TF32), range(RANKS), ((2, 64, 32, 96), (1, 64, 64, 16384), (1, 33, 17, 65))):
        product = launches.Product(dtype, one_b=True, workspace=WORKSPACE, bias=True, activation="relu", algorithm=rank)
        inputs = fed(product, (batch, m, n, k))
        made = session(product.model(product.fused()), enable_cuda_graph="1")
        held = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array, DEVICE, 0) for name, array in inputs.items()}
        out = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros((batch, m, n), np.float32), DEVICE, 0)
        binding = made.io_binding()
        for name, value in held.items():
            binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output("z", out)
        for factor in range(1, REPLAYS):
            now = inputs | {"x": inputs["x"] / factor}
            held["x"].update_inplace(now["x"])
            made.run_with_iobinding(binding)
            right = wanted(product, now)
            error = float(np.max(np.abs(out.numpy() - right)) / np.max(np.abs(right)))
            expect(error <= TOLERANCES[dtype], "wrong at replay", factor, product, (batch, m, n, k), error)
            count += 1
    return f"{count} runs and replays right"


BLOCK = """g (float16[M,768] x) => (float16[M,768] y) {
  p = MatMul(x, w) s = Add(p, b) g = Gelu<approximate = "tanh">(s) q = MatMul(g, v) y = Add(q, c) }"""


def block() -> onnx.ModelProto:
    """A feed-forward layer."""
    from kernel_harness import parse

    random, model = np.random.default_rng(0), parse(BLOCK)
    shapes = {"w": (768, 3072), "b": (3072,), "v": (3072, 768), "c": (768,)}
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array((0.05 * random.standard_normal(shape)).astype(np.float16), name)
        for name, shape in shapes.items())
    return model


def model() -> str:
    """A model that was planned as if the library were quickest, verified, and run in a captured CUDA graph beside the
    original; and by its generated kernels where there is no library."""
    if REHEARSAL:
        return "not in a rehearsal"
    from fake_timer import RUNTIME, FakeTimer

    from onnxfuse.measuring.database import open_database
    from onnxfuse.pipeline import Options, optimise
    from onnxfuse.tuning import TuneOptions, tune
    from onnxfuse.verifying import find_runner, verify

    original = block()
    times = {RUNTIME: 50.0, "gemm_bias 0": 10.0}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measurements.sqlite"
        with open_database(path) as kept:
            tune(original, FakeTimer(lambda kernel: times.get(kernel, 40.0)), kept, TuneOptions(dims={"M": 256}))
        made = optimise(original, Options(dims={"M": 256}, target="H100", database=path, least_gain=1.0, verify=False))
    called = [fusion for fusion in made.plan.fusions if fusion.kernel.plan.variants[0].calls]
    expect(len(called) == 2, "regions that the library runs:", len(called))
    verified = verify(made, find_runner())
    expect(verified.passed and verified.kernels_run, verified.summary, [node for node in verified.nodes
                                                                       if node.verdict != "passed"])
    x = np.random.default_rng(1).standard_normal((256, 768)).astype(np.float16)
    right = session(original, registered=False).run(None, {"x": x})[0].astype(np.float64)
    for settings in ({}, {"enable_cuda_graph": "1"}):
        found = session(made.model, **settings)
        held = onnxruntime.OrtValue.ortvalue_from_numpy(x, DEVICE, 0)
        out = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros((256, 768), np.float16), DEVICE, 0)
        binding = found.io_binding()
        binding.bind_ortvalue_input("x", held)
        binding.bind_ortvalue_output("y", out)
        for _ in range(REPLAYS):
            found.run_with_iobinding(binding)
            error = float(np.max(np.abs(out.numpy() - right)) / np.max(np.abs(right)))
            expect(error <= 2e-3, "error", error, settings)
    without = run_without_library(made.model, x)
    error = float(np.max(np.abs(without - right)) / np.max(np.abs(right)))
    expect(error <= 2e-3, "error without the library", error)
    return f"{len(called)} regions by the library, verified, and right in {REPLAYS} replays, and without the library"


WITHOUT = """
import sys, numpy, onnxruntime
sys.path.insert(0, sys.argv[2])
import onnxfuse.runtime
options = onnxruntime.SessionOptions()
path = sys.argv[1] + "/model.onnx"
onnxfuse.runtime.register(options, path)
session = onnxruntime.InferenceSession(
    path, options, providers=["CUDAExecutionProvider", "CPUExecutionProvider"], enable_fallback=0)
numpy.save(sys.argv[1] + "/y.npy", session.run(None, {"x": numpy.load(sys.argv[1] + "/x.npy")})[0])
"""


def run_without_library(fused: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    """The model's result in a process that is told of a cuBLASLt which is not there."""
    with tempfile.TemporaryDirectory() as folder:
        onnx.save(fused, f"{folder}/model.onnx")
        np.save(f"{folder}/x.npy", x)
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT, folder, str(ROOT)], capture_output=True, text=True, timeout=300,
            env=os.environ | {"ONNXFUSE_LIBCUBLASLT": "/nowhere/libcublasLt.so", "ONNXFUSE_VERBOSE": "1"})
        expect(done.returncode == 0 and done.stderr.count("a generated kernel runs") == 2, done.stdout, done.stderr)
        out: np.ndarray = np.load(f"{folder}/y.npy")
    return out


@dataclass(frozen=True)
class Timed:
    """A product that is timed, with what follows it: nothing, a bias, or a bias and an activation or a residual."""

    name: str
    rows: int
    columns: int
    depth: int
    follows: str
    kind: str = "float16"

    @property
    def model(self) -> onnx.ModelProto:
        """Its model, inputs and weights all given."""
        from kernel_harness import parse

        m, n, k, kind = self.rows, self.columns, self.depth, self.kind
        behind = {"": "y = MatMul(a, b)", "bias": "p = MatMul(a, b) y = Add(p, c)",
                  "residual": "p = MatMul(a, b) s = Add(p, c) y = Add(s, r)",
                  "gelu": "p = MatMul(a, b) s = Add(p, c) y = Gelu<approximate = \"tanh\">(s)"}[self.follows]
        more = f", {kind}[{n}] c" if self.follows else ""
        more += f", {kind}[{m},{n}] r" if self.follows == "residual" else ""
        return parse(f"g ({kind}[{m},{k}] a, {kind}[{k},{n}] b{more}) => ({kind}[{m},{n}] y) {{ {behind} }}")


def _layers(name: str, rows: int, width: int, inner: int, last: str = "bias") -> list[Timed]:
    return [Timed(f"{name} projection", rows, width, width, last), Timed(f"{name} up", rows, inner, width, "gelu"),
            Timed(f"{name} down", rows, width, inner, last)]


CASES = (
    *_layers("bert 8:128", 1024, 768, 3072), *_layers("bert 32:384", 12_288, 768, 3072),
    *_layers("vit 32", 6304, 768, 3072, "residual"),
    *(Timed(f"llama {name}", 1024, columns, depth, "")
      for name, columns, depth in (("projection", 2048, 2048), ("up", 5632, 2048), ("down", 2048, 5632))),
    Timed("llama 8 rows", 8, 5632, 2048, ""), Timed("llama 1 row", 1, 2048, 5632, ""),
)


TORCH = {"float": "float32"}
"""What PyTorch calls types, where it is another name than the graphs'."""


def torch_times(cases: Sequence[Timed]) -> list[float]:
    """Microseconds of GPU time of PyTorch's; run in a process of its own."""
    import torch
    from region_times import torch_microseconds

    torch.backends.cuda.matmul.allow_tf32 = True

    def made(case: Timed) -> Callable[[], Any]:
        kind: dict[str, Any] = {"dtype": getattr(torch, TORCH.get(case.kind, case.kind)), "device": "cuda"}
        a, b = torch.randn(case.rows, case.depth, **kind), torch.randn(case.depth, case.columns, **kind)
        c = torch.randn(case.columns, **kind)
        if not case.follows:
            return lambda: torch.mm(a, b)
        if case.follows in ("bias", "residual"):  # without the residual
            return lambda: torch.addmm(c, a, b)
        return lambda: torch._addmm_activation(c, a, b, use_gelu=case.follows == "gelu")

    out = []
    for case in cases:
        runs = [made(case) for _ in range(3)]
        out.append(torch_microseconds(lambda turn, runs=runs: runs[turn](), 3))
    return out


def times_of(cases: Sequence[Timed]) -> None:
    """Time every way to run each case and print a line of each, the generated kernels' best and own beside."""
    from processes import ApartError, apart
    from region_times import Prepared

    from onnxfuse.pipeline import Options, optimise
    from onnxfuse.tuning.subjects import subjects_of

    try:
        torch: Sequence[float | None] = apart(torch_times, list(cases))
    except ApartError as error:
        print(f"    PyTorch: {error}", flush=True)
        torch = [None] * len(cases)
    head = ["ONNX Runtime", "own", "generated", *(f"rank {rank}" for rank in range(RANKS)), "PyTorch"]
    print(f"    {'microseconds':36}" + "".join(f"{each:>13}" for each in head) + "  generated by", flush=True)
    for case, beside in zip(cases, torch, strict=True):
        plan = optimise(case.model, Options(verify=False, database=False, eager=True))
        subjects = [each for each in subjects_of(plan)[0] if each.fusion.kernel.schedule == "product"]
        subject = max(subjects, key=lambda each: len(each.fusion.nodes))
        found = Prepared.of(case, subject, plan.costs.kernel_seconds(subject.fusion)).timed()
        library = {way: took for way, took in found.ways.items() if way.startswith("gemm")}
        generated = {way: took for way, took in found.ways.items() if way not in library and took}
        best = min(generated, key=lambda way: generated[way] or 0.0)
        figures = [found.runtime, found.ways[found.own], generated[best], *library.values(), beside]
        print(f"    {f'{case.name} {case.follows} {case.kind}':36}"
              + "".join(f"{took or 0:13.2f}" for took in figures) + f"  {best}", flush=True)


CHECKS: list[Callable[[], str]] = [epilogues, algorithms, numbers, captured, model]


def main() -> int:
    """Run the checks, print the table, then the times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = [*(check.__name__ for check in CHECKS), "times"]
    parser.add_argument("--only", nargs="*", default=names, choices=names, help="names of the checks to run")
    parser.add_argument("--cases", default="", help="what is timed: those whose names begin so; all by default")
    parser.add_argument("--types", default="float16", help="of what is timed: float16, bfloat16, float")
    parser.add_argument("--rehearse", metavar="FOLDER", type=Path, help="where the stand-ins are, built")
    arguments = parser.parse_args()
    begin(arguments.rehearse)
    faults = sum(failed(check) for check in CHECKS if check.__name__ in arguments.only)
    if "times" in arguments.only and not REHEARSAL:
        wanted_cases = tuple(each for each in arguments.cases.split(",") if each)
        cases = [replace(case, kind=kind) for kind in arguments.types.split(",") for case in CASES
                 if not wanted_cases or case.name.startswith(wanted_cases)]

        def times() -> str:
            times_of(cases)
            return f"{len(cases)} cases timed"

        faults += failed(times, "times")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
