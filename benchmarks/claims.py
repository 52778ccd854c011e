"""What a transformer's blocks gain when each is fused: time and memory beside what is often claimed for such fusions.

    python benchmarks/claims.py [--cases attention] [--budget 6] [--target GPU] [--dry-run]

The four blocks of an encoder's layer, as exporters write them, in float16: projections to queries, keys and values
(claimed: 2 to 3 times), attention (4 to 5), what follows it (projection, residual and norm: 1.5 to 2) and the
feed-forward layer (3 to 4).  Each is tuned, optimised and measured beside ONNX Runtime with its own optimisations off,
which runs every node by itself, and on.  The floor is what the products take at the GPU's rate: no fusion gains more
than the unfused time over that.  ``--dry-run`` plans and times nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
from common import abreast_option, environment, measured_on, table, telling
from processes import ApartError, Ready, Turn, Turns, apart
from region_times import conclude, graph, meant, options

from onnxfuse.measuring import bench
from onnxfuse.measuring.results import BenchResult, Side
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.costs.hardware import Profile, resolve_profile
from onnxfuse.rewriting import save

WIDTH, INNER, HEADS = 768, 3072, 12
"""Of BERT's layer."""

GELU = ("{ root = Constant <value = float16 {15784}> () half = Constant <value = float16 {14336}> () "
        "one = Constant <value = float16 {15360}> () ")
"""The constants of a GELU as float16's bits: 1.4142, 0.5 and 1."""


@dataclass(frozen=True)
class Claim:
    """A block of a layer: what is claimed for it, and its graph for so many sequences of so many tokens."""

    name: str
    least: float
    most: float
    text: str

    def at(self, batch: int, length: int) -> str:
        """The graph at a size."""
        sizes = {"B": batch, "S": length, "W": WIDTH, "I": INNER, "H": HEADS, "D": WIDTH // HEADS}
        text = self.text
        for symbol, size in sizes.items():
            text = text.replace(f"<{symbol}>", str(size))
        return text


def _head(name: str, perm: str) -> str:
    return (f"{name}0 = MatMul(x, w_{name}) {name}1 = Add({name}0, w_b{name}) "
            f"{name}2 = Reshape({name}1, heads) {name} = Transpose <perm = {perm}> ({name}2) ")


CLAIMS = (
    Claim("projections", 2.0, 3.0,
          "(float16[<B>,<S>,<W>] x, "
          + ", ".join(f"float16[<W>,<W>] w_{name}, float16[<W>] w_b{name}" for name in "qkv")
          + ") => (float16[<B>,<H>,<S>,<D>] q, float16[<B>,<H>,<D>,<S>] k, float16[<B>,<H>,<S>,<D>] v) "
          "{ heads = Constant <value = int64[4] {<B>, <S>, <H>, <D>}> () "
          + _head("q", "[0,2,1,3]") + _head("k", "[0,2,3,1]") + _head("v", "[0,2,1,3]") + "}"),
    Claim("attention", 4.0, 5.0,
          "(float16[<B>,<H>,<S>,<D>] q, float16[<B>,<H>,<D>,<S>] k, float16[<B>,<H>,<S>,<D>] v, "
          "float16[<B>,1,1,<S>] mask) => (float16[<B>,<S>,<W>] y) "
          "{ root = Constant <value = float16 {18432}> () joined = Constant <value = int64[3] {<B>, <S>, <W>}> () "
          "s = MatMul(q, k) t = Div(s, root) u = Add(t, mask) p = Softmax <axis = -1> (u) c = MatMul(p, v) "
          "d = Transpose <perm = [0,2,1,3]> (c) y = Reshape(d, joined) }"),
    Claim("what follows", 1.5, 2.0,
          "(float16[<B>,<S>,<W>] x, float16[<B>,<S>,<W>] r, float16[<W>,<W>] w, float16[<W>] w_b, float16[<W>] w_g, "
          "float16[<W>] w_c) => (float16[<B>,<S>,<W>] y) "
          "{ two = Constant <value = float16 {16384}> () eps = Constant <value = float16 {168}> () "
          "p = MatMul(x, w) a = Add(p, w_b) s = Add(a, r) m = ReduceMean <axes = [-1]> (s) d = Sub(s, m) "
          "q = Pow(d, two) n = ReduceMean <axes = [-1]> (q) e = Add(n, eps) f = Sqrt(e) g = Div(d, f) "
          "h = Mul(g, w_g) y = Add(h, w_c) }"),
    Claim("feed-forward", 3.0, 4.0,
          "(float16[<B>,<S>,<W>] x, float16[<W>,<I>] w_up, float16[<I>] w_b, float16[<I>,<W>] w_down, "
          "float16[<W>] w_c) => (float16[<B>,<S>,<W>] y) " + GELU
          + "u = MatMul(x, w_up) s = Add(u, w_b) h = Div(s, root) e = Erf(h) o = Add(e, one) g = Mul(s, o) "
          "l = Mul(g, half) p = MatMul(l, w_down) y = Add(p, w_c) }"),
)

RUNS = 50
"""Of each model, whose wall time is nothing that is claimed."""

SIZES = ((8, 128), (32, 384))
"""Sequences, and tokens of each."""


@dataclass(frozen=True)
class ClaimCase:
    """A block at a size."""

    claim: Claim
    batch: int
    length: int

    @property
    def name(self) -> str:
        """As the table has it."""
        return f"{self.claim.name} {self.batch}:{self.length}"

    def model(self) -> onnx.ModelProto:
        """The block with random weights."""
        return graph(self.claim.at(self.batch, self.length), weights=("w",))


@dataclass(frozen=True)
class ClaimResult:
    """A case: milliseconds of GPU time and peak bytes of every node by itself, as the runtime optimises it, and fused;
    kernels of each, and the milliseconds that its products take at the GPU's rate."""

    case: str
    claimed: tuple[float, float]
    times: tuple[float, float, float] | None = None
    kernels: tuple[int, int, int] | None = None
    peaks: tuple[int | None, int | None, int | None] | None = None
    floor: float | None = None

    @property
    def gain(self) -> float | None:
        """Over every node by itself."""
        return self.times[0] / self.times[2] if self.times else None

    @property
    def verdict(self) -> str:
        """Whether the claim is reproduced."""
        if self.gain is None:
            return ""
        return "reproduced" if self.gain >= self.claimed[0] else "refuted"


@contextmanager
def nothing_fused() -> Iterator[None]:
    """Sessions that are created within run every node by itself."""
    import onnxruntime

    own = onnxruntime.SessionOptions

    class Plain(own):  # type: ignore[valid-type, misc]
        def __init__(self) -> None:
            super().__init__()
            self.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL

    onnxruntime.SessionOptions = Plain
    try:
        yield
    finally:
        onnxruntime.SessionOptions = own


def unfused(path: str, ready: Ready) -> BenchResult:
    """Every node by itself; in a process of its own, as all that get ready."""
    with nothing_fused():
        return bench(path, runs=RUNS, progress=telling(ready))


def beside(path: str, fused: str, ready: Ready) -> BenchResult:
    """As the runtime optimises it, and fused."""
    return bench(path, fused, runs=RUNS, progress=telling(ready))


def tuned(path: str, fused: str, budget: float, profile: Profile, ready: Ready) -> float:
    """Tune and optimise a model, and give the seconds that its products take at the GPU's rate."""
    from onnxfuse import tuning
    from onnxfuse.measuring.database import open_database

    place, timer = Path(fused).with_suffix(".sqlite"), tuning.find_timer()
    ready()
    with open_database(place) as kept:
        tuning.tune(Path(path), timer, kept, tuning.TuneOptions(budget=budget))
    plan = optimise(Path(path), Options(target=profile, database=place, compile=True))
    save(plan.model, fused, source=plan.loaded)
    return flops(onnx.load(path)) / (1e12 * (profile.measured.product_tflops or profile.peaks.float16_matrix))


def flops(model: onnx.ModelProto) -> float:
    """Of a model's products."""
    shapes: Mapping[str, list[int]] = {
        info.name: [size.dim_value for size in info.type.tensor_type.shape.dim]
        for known in [onnx.shape_inference.infer_shapes(model).graph]
        for info in (*known.input, *known.value_info, *known.output)}
    weights = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    products = [node for node in model.graph.node if node.op_type == "MatMul"]
    return sum(2.0 * np.prod(shapes[node.output[0]]) * (shapes.get(node.input[0]) or weights[node.input[0]])[-1]
               for node in products)


def _milliseconds(side: Side) -> float:
    assert side.gpu is not None
    return side.gpu.median


def planned(case: ClaimCase, profile: Profile) -> ClaimResult:
    """A case that is optimised and not timed."""
    optimise(case.model(), Options(target=profile, verify=False, database=False))
    return ClaimResult(case.name, (case.claim.least, case.claim.most))


def measured(cases: Sequence[ClaimCase], profile: Profile, budget: float, turns: Turns) -> list[ClaimResult]:
    """All cases, timed.

    Raises:
        click.ClickException: one cannot be.
    """
    told: dict[tuple[str, Callable[..., Any]], Any] = {}
    with tempfile.TemporaryDirectory(prefix="onnxfuse-claims-") as folder:
        files = {str(Path(folder) / f"{place}.onnx"): case for place, case in enumerate(cases)}
        for path, case in files.items():
            onnx.save(case.model(), path)
        fused = {path: str(Path(path).with_suffix(".fused.onnx")) for path in files}
        for asked in ([Turn(tuned, (path, fused[path], budget, profile)) for path in files],
                      [Turn(*each) for path in files for each in ((unfused, (path,)), (beside, (path, fused[path])))]):
            for turn, answer, seconds in turns.taken(asked):
                name = files[turn.arguments[0]].name
                if isinstance(answer, ApartError):
                    raise click.ClickException(f"{name}: {answer}")
                told[name, turn.function] = answer
                click.echo(f"  {name}: {turn.function.__name__}  [{seconds:.1f} s]", err=True)
    return [_result(case, told[case.name, tuned], told[case.name, unfused].original, told[case.name, beside])
            for case in cases]


def _result(case: ClaimCase, floor: float, alone: Side, both: BenchResult) -> ClaimResult:
    assert both.fused is not None
    sides = (alone, both.original, both.fused)
    a, b, c = sides
    return ClaimResult(
        case.name, (case.claim.least, case.claim.most), (_milliseconds(a), _milliseconds(b), _milliseconds(c)),
        (int(a.kernels or 0), int(b.kernels or 0), int(c.kernels or 0)), (a.peak_bytes, b.peak_bytes, c.peak_bytes),
        floor * 1e3)


def show(found: list[ClaimResult]) -> tuple[str, bool]:
    """The table."""
    rows = []
    for one in found:
        claimed = f"{one.claimed[0]:g} to {one.claimed[1]:g}"
        if one.times is None or one.kernels is None or one.peaks is None or one.floor is None:
            rows.append([one.case, claimed, *[""] * 9])
            continue
        alone, runtime, fused = one.times
        rows.append([
            one.case, claimed, *(f"{taken * 1e3:.1f}" for taken in one.times), f"{one.floor * 1e3:.1f}",
            f"{alone / fused:.2f}", f"{runtime / fused:.2f}", " → ".join(map(str, one.kernels)),
            " → ".join("-" if peak is None else f"{peak / 2**20:.0f}" for peak in one.peaks), one.verdict])
    head = ["block", "claimed", "nodes alone µs", "ONNX Runtime µs", "fused µs", "products' floor µs",
            "over nodes alone", "over ONNX Runtime", "kernels", "peak MiB", ""]
    return table(head, rows), True


@click.command(help=__doc__.split("\n\n")[0])
@options
@click.option("--budget", type=float, default=6.0, show_default=True, help="Seconds to tune each block.")
@abreast_option
def main(names: str | None, target: str | None, dry_run: bool, budget: float, abreast: int, out: Path) -> None:
    where = apart(environment) if dry_run else measured_on("--dry-run")
    profile = resolve_profile(target or where.gpu or "H100")
    cases = meant(names, [ClaimCase(claim, *size) for claim in CLAIMS for size in SIZES], attrgetter("name"))
    found = [planned(case, profile) for case in cases] if dry_run else measured(cases, profile, budget, Turns(abreast))
    content = {"cases": [asdict(each) for each in found]}
    conclude(show(found), "claims", where, content, None if dry_run else out)


if __name__ == "__main__":
    main()
