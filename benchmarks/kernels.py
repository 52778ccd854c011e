"""Single kernels against what the machine's memory allows.

    python benchmarks/kernels.py [--only rms-norm,rotary] [--dtype float16] [--megabytes 1,64,1024]

A kernel passes where its time is at most 1.5 µs + bytes / (0.9 x copy rate): bytes are each input once and each output
once, the copy rate is that of a large copy on this GPU, reads plus writes.  Inputs are taken in turn from so many sets
that the L2 cache holds none of them when its turn comes again.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
from common import RESULTS, measured_on, table, write_results
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper, parser
from processes import ApartError, apart

from onnxfuse.graph import build_graph, load_model
from onnxfuse.measuring import KernelTimer, driver, make_inputs
from onnxfuse.measuring.cupti import Activity
from onnxfuse.measuring.machine import Machine, find_machine
from onnxfuse.measuring.runner import Runner
from onnxfuse.pipeline import Options, optimise
from onnxfuse.rewriting import save

LAUNCH_SECONDS = 1.5e-6
SHARE = 0.9
"""Of the copy rate."""

L2_TURNS = 4
"""How many times the L2's size the sets of inputs have together."""

CYCLES = 3
"""How often each set is timed, at least; kernels of few sets are timed ``RUNS`` times."""
RUNS = 24

DRAWN = 64
"""Values of the axis ``n`` that are drawn at random; more repeat them."""

DTYPES = ("float16", "float32")
MEGABYTES = (1, 4, 16, 64, 256, 1024)


@dataclass(frozen=True)
class KernelCase:
    """A kernel to be.

    Attributes:
        text: the model's graph in ONNX's textual syntax, ``$t`` for the type, ``$to`` for its
            number, and ``n`` for the size that varies.
        elements_per_n: elements read and written for one more ``n``.
        constants: initialisers of that type, by name.
    """

    name: str
    text: str
    elements_per_n: int
    constants: Mapping[str, NDArray[Any] | float]


def _weights(width: int) -> dict[str, NDArray[Any] | float]:
    return {"weight": np.linspace(-1.5, 1.5, width), "bias": np.linspace(-0.5, 0.5, width)}


# Layer norm as it was exported before it was an operator; RMS norm and rotary embedding as Llama's export writes them.
CASES = (
    KernelCase("layer-norm", """layer_norm ($t[n, 1024] x) => ($t[n, 1024] y) {
        m = ReduceMean <axes = [-1], keepdims = 1> (x)
        d = Sub(x, m)
        s = Pow(d, two)
        v = ReduceMean <axes = [-1], keepdims = 1> (s)
        e = Add(v, epsilon)
        r = Sqrt(e)
        q = Div(d, r)
        w = Mul(q, weight)
        y = Add(w, bias)
    }""", 2 * 1024, {**_weights(1024), "two": 2.0, "epsilon": 1e-5}),
    KernelCase("rms-norm", """rms_norm ($t[n, 2048] x) => ($t[n, 2048] y)
    <float two = {2.0}, float epsilon = {0.00001}> {
        x32 = Cast <to = 1> (x)
        s = Pow(x32, two)
        m = ReduceMean <axes = [-1], keepdims = 1> (s)
        e = Add(m, epsilon)
        r = Sqrt(e)
        i = Reciprocal(r)
        p = Mul(x32, i)
        c = Cast <to = $to> (p)
        y = Mul(weight, c)
    }""", 2 * 2048, {"weight": np.linspace(-1.5, 1.5, 2048)}),
    KernelCase("masked-softmax", """masked_softmax ($t[n, 4, 64, 256] scores, bool[n, 1, 1, 256] mask)
    => ($t[n, 4, 64, 256] y) {
        s = Mul(scores, scale)
        w = Where(mask, s, low)
        y = Softmax <axis = -1> (w)
    }""", 2 * 4 * 64 * 256, {"scale": 0.125, "low": -60000.0}),
    KernelCase("residual-norm", """residual_norm ($t[n, 1024] x, $t[n, 1024] residual)
      => ($t[n, 1024] sum, $t[n, 1024] y) {
        sum = Add(x, residual)
        y = LayerNormalization <axis = -1, epsilon = 0.00001> (sum, weight, bias)
    }""", 4 * 1024, _weights(1024)),
    KernelCase("gelu", """gelu ($t[n, 4096] x) => ($t[n, 4096] y) {
        b = Add(x, bias)
        d = Div(b, root)
        e = Erf(d)
        a = Add(e, one)
        m = Mul(b, a)
        y = Mul(m, half)
    }""", 2 * 4096, {"bias": np.linspace(-0.5, 0.5, 4096), "root": 2**0.5, "one": 1.0, "half": 0.5}),
    KernelCase("rotary", """rotary ($t[n, 8, 64, 128] x, $t[1, 1, 64, 128] cos, $t[1, 1, 64, 128] sin)
    => ($t[n, 8, 64, 128] y)
    <int64[1] zero = {0}, int64[1] half = {64}, int64[1] end = {9223372036854775807}, int64[1] axis = {3},
     int64[1] one = {1}> {
        a = Mul(x, cos)
        low = Slice(x, zero, half, axis, one)
        high = Slice(x, half, end, axis, one)
        m = Neg(high)
        t = Concat <axis = -1> (m, low)
        c = Mul(t, sin)
        y = Add(a, c)
    }""", 2 * 8 * 64 * 128, {}),
)


@dataclass(frozen=True)
class Measured:
    """A kernel at a size.

    Attributes:
        megabytes: traffic aimed at; bytes: the traffic itself.
        microseconds: median of a run; allowed: what the formula grants.
        kernels: launched for one run.
    """

    case: str
    dtype: str
    megabytes: int
    bytes: int
    microseconds: float
    allowed: float
    kernels: int

    @property
    def passes(self) -> bool:
        return self.kernels == 1 and self.microseconds <= self.allowed


def allowed(size: int, copy_rate: float) -> float:
    """Microseconds that a kernel may take.

    Args: size: bytes that it moves; copy_rate: bytes a second of a copy.
    """
    return (LAUNCH_SECONDS + size / (SHARE * copy_rate)) * 1e6


def model_of(case: KernelCase, dtype: str) -> onnx.ModelProto:
    """The case's model, at opset 17."""
    number = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    text = case.text.replace("$to", str(number)).replace("$t", TensorProto.DataType.Name(number).lower())
    graph = parser.parse_graph(text)
    graph.initializer.extend(
        numpy_helper.from_array(np.asarray(values, dtype), name) for name, values in case.constants.items()
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


def fuse(case: KernelCase, dtype: str, n: int, folder: Path, target: str | None) -> tuple[Path, int]:
    """The case as one fused node, whatever the cost model thinks of it: its file, and bytes of a run.

    Raises:
        RuntimeError: it did not become one node.
    """
    original, path = folder / "case.onnx", folder / f"{case.name}-{dtype}-{n}.onnx"
    onnx.save(model_of(case, dtype), original)
    done = optimise(original, Options(dims={"n": n}, target=target, least_gain=0.0, verify=False, compile=True))
    nodes = [node for node in done.model.graph.node if node.op_type != "Constant"]
    if len(nodes) != 1 or nodes[0].domain != "onnxfuse":
        reasons = "; ".join(f"{refusal.node}: {refusal.message}" for refusal in done.refusals[:3])
        raise RuntimeError(f"{case.name} in {dtype} became {len(nodes)} nodes, not one fused node: {reasons}")
    save(done.model, path, source=done.loaded)
    fusion = done.plan.fusions[0]
    return path, sum(done.ledger.bytes_of(value) or 0 for value in (*fusion.tensors, *fusion.outputs))


def rows_for(case: KernelCase, dtype: str, megabytes: int) -> int:
    """``n`` at which the case moves about so many megabytes (of a million bytes)."""
    return max(1, round(megabytes * 1e6 / (case.elements_per_n * np.dtype(dtype).itemsize)))


def measure(name: str, dtypes: Sequence[str], megabytes: Sequence[int],
            target: str | None) -> tuple[float, list[Measured]]:
    """A case at all sizes, and the copy rate in bytes a second; on the GPU."""
    case, machine = next(case for case in CASES if case.name == name), find_machine()
    if machine.gpu is None:
        raise RuntimeError("there is no GPU that ONNX Runtime can use here")
    rate, found = machine.gpu.copy_rate(), []
    with tempfile.TemporaryDirectory(prefix="onnxfuse-kernels-") as folder:
        for dtype in dtypes:
            for size in megabytes:
                n = rows_for(case, dtype, size)
                path, traffic = fuse(case, dtype, n, Path(folder), target)
                microseconds, kernels = time_alone(path, n, machine, machine.gpu)
                found.append(Measured(name, dtype, size, traffic, microseconds, allowed(traffic, rate), kernels))
    return rate, found


def time_alone(path: Path, n: int, machine: Machine, gpu: driver.Device) -> tuple[float, int]:
    """Median microseconds of a run's kernels, and how many they are; inputs in turn from sets that outgrow the L2."""
    few = make_inputs(build_graph(load_model(path)), {"n": min(n, DRAWN)})
    # Drawing a gigabyte takes longer than all else; repeating a megabyte does not change a time.
    inputs = {name: np.resize(array, (n if array.shape[0] == min(n, DRAWN) else array.shape[0], *array.shape[1:]))
              for name, array in few.items()}
    runner = Runner(path, machine, inputs, {}, fused=True)
    sets = max(2, math.ceil(L2_TURNS * gpu.l2_bytes / sum(array.nbytes for array in inputs.values())))
    bindings = [runner.binding, *(runner.bind(inputs, runner.binding) for _ in range(sets - 1))]
    with KernelTimer(gpu.synchronise) as timer:
        for binding in bindings:
            runner.session.run_with_iobinding(binding)
        timer.lap()
        runs = max(CYCLES, math.ceil(RUNS / sets)) * sets
        for run in range(runs):
            runner.session.run_with_iobinding(bindings[run % sets])
        return per_run(timer.lap(), runs)


def per_run(activities: Sequence[Activity], runs: int) -> tuple[float, int]:
    """Median microseconds of a run's kernels, and how many they are.

    Raises:
        RuntimeError: the runs did not all launch as many.
    """
    times = np.asarray([activity.nanoseconds for activity in activities if activity.is_kernel], np.float64)
    if not len(times) or len(times) % runs:
        raise RuntimeError(f"{len(times)} kernels were recorded in {runs} runs")
    return float(np.median(times.reshape(runs, -1).sum(axis=1))) / 1e3, len(times) // runs


def show(found: Sequence[Measured], rate: float, errors: Sequence[str]) -> str:
    """The table and what it rests on."""
    rows = [[f"{m.case} {m.dtype}", f"{m.bytes / 1e6:.1f}", f"{m.microseconds:.2f}", f"{m.allowed:.2f}",
             f"{m.allowed / m.microseconds:.2f}", f"{m.bytes / m.microseconds / 1e6:.2f}", str(m.kernels),
             "pass" if m.passes else "FAIL"] for m in found]
    passed = sum(m.passes for m in found)
    lines = [f"Copy rate: {rate / 1e12:.2f} TB/s, reads plus writes.  Allowed: {LAUNCH_SECONDS * 1e6:g} µs + bytes / "
             f"({SHARE:g} x copy rate).", "",
             table(["kernel", "MB", "µs", "allowed µs", "allowed / µs", "TB/s", "kernels", ""], rows), "",
             f"{passed} of {len(found)} pass."]
    return "\n".join([*lines, *(f"- {error}" for error in errors)])


@click.command(help=__doc__.split("\n")[0])
@click.option("--only", metavar="NAME,...", help=f"Some of {', '.join(case.name for case in CASES)}.")
@click.option("--dtype", "dtypes", type=click.Choice(DTYPES), multiple=True, default=DTYPES, help="By default both.")
@click.option("--megabytes", default=",".join(map(str, MEGABYTES)), show_default=True, metavar="N,...",
              help="Traffic of a run.")
@click.option("--target", help="GPU to plan for; by default the one at hand.")
@click.option("--dry-run", is_flag=True, help="Only fuse the models; no GPU is needed.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS,
              help="Folder for the results; benchmarks/results by default.")
def main(only: str | None, dtypes: tuple[str, ...], megabytes: str, target: str | None, dry_run: bool,
         out: Path) -> None:
    names = only.split(",") if only else [case.name for case in CASES]
    unknown = set(names) - {case.name for case in CASES}
    if unknown:
        raise click.BadParameter(f"unknown: {', '.join(sorted(unknown))}", param_hint="--only")
    sizes = [int(size) for size in megabytes.split(",")]
    if dry_run:
        _dry_run(names, dtypes, sizes, target)
        return
    where = measured_on("--dry-run")
    found: list[Measured] = []
    rates, errors = [0.0], []
    for name in names:
        try:
            rate, measured = apart(measure, name, dtypes, sizes, target or where.gpu)
        except ApartError as error:
            errors.append(f"{name}: {error.brief}")
            click.echo(f"  {name}: {error}", err=True)
            continue
        rates.append(rate)
        found += measured
        click.echo(f"  {name}: {sum(m.passes for m in measured)} of {len(measured)} pass", err=True)
    text = show(found, max(rates), errors)
    content: dict[str, Any] = {"copy_bytes_per_second": rates[1:], "errors": errors,
                               "kernels": [{**asdict(m), "passes": m.passes} for m in found]}
    click.echo(text)
    if found:
        path = write_results(out, "kernels", where, content, text)
        click.echo(f"written: {path} and .json", err=True)
    sys.exit(bool(errors) or not all(m.passes for m in found))


def _dry_run(names: Sequence[str], dtypes: Sequence[str], sizes: Sequence[int], target: str | None) -> None:
    with tempfile.TemporaryDirectory(prefix="onnxfuse-kernels-") as folder:
        for case in CASES:
            for dtype in dtypes if case.name in names else ():
                for size in sizes:
                    n = rows_for(case, dtype, size)
                    try:
                        _, traffic = fuse(case, dtype, n, Path(folder), target)
                    except RuntimeError as error:
                        raise click.ClickException(str(error)) from error
                    click.echo(f"{case.name} {dtype} n={n}: one node, {traffic / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
