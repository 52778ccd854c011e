"""Fused models under CUDA graphs beside the same networks by torch.compile, wall time.

    python benchmarks/compiled.py --database benchmarks/zoo/measured-h100.sqlite.xz
    python benchmarks/compiled.py --rows bert,tower --modes default,reduce-overhead,max-autotune

A row is model:sizes, as zoo.py has it; ``torch_models.py`` has its network.  Each side runs in a process of its own,
one run at a time, until the GPU is done, and, where several get ready ``--abreast``, while the others stand still;
torch.compile copies no input of its graphs.  It compiles ahead, all networks at once, into its cache on disk, while
models are fused.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
from common import RESULTS, abreast_option, hydrate, measured_on, packed, table, write_results
from processes import ApartError, Ready, Turn, Turns, apart
from zoo import PreparedRow, measure, prepare_all
from zoo_rows import Row, choose

from onnxfuse.measuring import BenchResult
from onnxfuse.measuring.database import VARIABLE

MODES = ("eager", "reduce-overhead")
"""As people write them; max-autotune tries its own products too, for minutes a network."""
OURS = "fused"
"""The way of a row that is no mode of PyTorch's."""

RUNS, WARM = 200, 20
PARAMETERS = 0.01
"""By how much a network's bytes may differ from the export's, which holds equal ones once."""


@dataclass(frozen=True)
class Beside:
    """Milliseconds of wall time of a row; by mode, or why there is none, of PyTorch."""

    row: str
    original: float | None
    fused: float | None
    torch: dict[str, float | str]

    @property
    def best(self) -> float | None:
        return min((time for time in self.torch.values() if isinstance(time, float)), default=None)

    @property
    def ratio(self) -> float | None:
        """How many times longer the best of PyTorch takes."""
        return self.best / self.fused if self.best and self.fused else None


def torch_wall(row: Row, mode: str, ready: Ready | None = None) -> float:
    """Median milliseconds of a run, in a process of its own; ``ready`` returns once it may be timed.

    Raises:
        ValueError: the network is not the export's.
        RuntimeError: PyTorch cannot run it.
    """
    import torch
    from torch_models import arguments, network

    torch.set_float32_matmul_precision("high")  # TF32, which the runtime's products use too
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    net = network(row.model)
    size = sum(weight.numel() * weight.element_size() for weight in net.parameters())
    if abs(size / row.size - 1) > PARAMETERS:
        raise ValueError(f"the network has {size} bytes of weights, the export {row.size}")
    inputs = arguments(hydrate().feeds({"inputs": row.inputs}, row.sizes), row.model)
    run: Any = net
    if mode != "eager":
        for each in inputs:
            torch._dynamo.mark_static_address(each)
        run = torch.compile(net, mode=mode, fullgraph=True)
    times = []
    with torch.inference_mode():
        for number in range(WARM + RUNS):
            if number == WARM and ready is not None:
                ready()
            start = time.perf_counter()
            run(*inputs)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) * 1e3)
    return median(times[WARM:])


def compile_ahead(rows: Sequence[Row], modes: Sequence[str], jobs: int, seconds: float) -> None:
    """Have PyTorch compile every network into its cache, whatever comes of it: the runs that count tell."""
    with ThreadPoolExecutor(jobs) as pool:
        for waiting in [pool.submit(apart, torch_wall, row, mode, seconds=seconds)
                        for row in rows for mode in modes if mode != "eager"]:
            if isinstance(error := waiting.exception(), ApartError):
                click.echo(f"  PyTorch, ahead: {error.brief}", err=True)


def compare(made: Sequence[PreparedRow], modes: Sequence[str], turns: Turns) -> list[Beside]:
    """Rows on both sides."""
    settings = {"cuda_graph": True, "runs": RUNS, "laps": 5, "memory": False}
    told: dict[tuple[str, str], Any] = {}
    for turn, answer, seconds in turns.taken([turn for each in made for turn in (
            *(Turn(torch_wall, (each.row, mode)) for mode in modes), Turn(measure, (each, settings)))]):
        subject, mode = turn.arguments
        row, way = (subject.row, OURS) if turn.function is measure else (subject, mode)
        told[row.name, way] = answer
        words = answer.brief if isinstance(answer, ApartError) else "timed"
        click.echo(f"  {row.name}, {way}: {words}  [{seconds:.1f} s]", err=True)
    return [_beside(each.row, told[each.row.name, OURS], {mode: told[each.row.name, mode] for mode in modes})
            for each in made]


def _beside(row: Row, ours: BenchResult | ApartError, torch: Mapping[str, float | ApartError]) -> Beside:
    """From what a row's processes answered."""
    if isinstance(ours, ApartError):
        raise click.ClickException(f"{row.name}: {ours}")
    fused = None if ours.fused is None else ours.fused.latency.median
    return Beside(row.name, ours.original.latency.median, fused, {
        mode: told.brief if isinstance(told, ApartError) else told for mode, told in torch.items()})


def show(found: Sequence[Beside], modes: Sequence[str]) -> tuple[str, bool]:
    """As Markdown, and whether we are ahead on every row."""
    rows = [[one.row, _shown(one.original), _shown(one.fused), *(_shown(one.torch[mode]) for mode in modes),
             f"{one.ratio:.2f}" if one.ratio else "-"] for one in found]
    notes = [f"- {one.row}, {mode}: {text}" for one in found for mode, text in one.torch.items()
             if isinstance(text, str)]
    ahead = all(one.ratio is not None and one.ratio > 1 for one in found)
    return "\n".join([
        table(["row", "runtime ms", "fused ms", *(f"torch {mode} ms" for mode in modes), "torch's best / fused"], rows),
        "", f"{'PASS' if ahead else 'FAIL'}: fused ahead of PyTorch on every row", *notes]), ahead


def _shown(time: float | str | None) -> str:
    return f"{time:.3f}" if isinstance(time, float) else "-"


@click.command(help=__doc__.split("\n")[0])
@click.option("--rows", "names", metavar="NAME,...",
              help="Rows whose names begin so; all that have a network by default.")
@click.option("--modes", default=",".join(MODES), show_default=True, metavar="MODE,...",
              help="eager, or a mode of torch.compile.")
@click.option("--database", type=click.Path(path_type=Path, exists=True, dir_okay=False),
              help="Measurements to plan by, packed where it ends in .xz; by default those of `onnxfuse tune`.")
@click.option("--jobs", type=int, default=min(8, os.cpu_count() or 1), show_default=True,
              help="Models prepared at once.")
@abreast_option
@click.option("--seconds", type=float, default=180, show_default=True,
              help="Most that one side of a row may take to get ready, and to be timed.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS, show_default=False,
              help="Folder for the results; benchmarks/results by default.")
def main(names: str | None, modes: str, database: Path | None, jobs: int, abreast: int,
         seconds: float, out: Path) -> None:
    where, asked = measured_on(), modes.split(",")
    known = apart(_known)
    rows = [row for row in choose(names) if row.model in known]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="onnxfuse-compiled-"))
        if database is not None:
            os.environ[VARIABLE] = str(stack.enter_context(packed(database)))
        with ThreadPoolExecutor(1) as pool:
            compiling = pool.submit(compile_ahead, rows, asked, jobs, seconds)
            made = prepare_all(rows, folder, where.gpu, jobs)
            compiling.result()
        for row in rows:
            if isinstance(made[row.name], str):
                raise click.ClickException(f"{row.name}: {made[row.name]}")
        found = compare([made[row.name] for row in rows], asked, Turns(abreast, seconds))
    text, ahead = show(found, asked)
    path = write_results(out, "compiled", where, {"rows": [asdict(one) for one in found]}, text)
    click.echo(text)
    click.echo(f"written: {path} and .json", err=True)
    sys.exit(not ahead)


def _known() -> list[str]:
    from torch_models import NETWORKS

    return list(NETWORKS)


if __name__ == "__main__":
    main()
