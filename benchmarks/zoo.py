"""Original against fused, for every row of the zoo.

    python benchmarks/zoo.py --least 1.3 --least each=1.0 --least tower=3 --least llama=1.5
    python benchmarks/zoo.py --rows llama,tower --quick --list-kernels 15
    python benchmarks/zoo.py --report-only
    python benchmarks/zoo.py --networks benchmarks/convolutions --quick --least each=0.99
    python benchmarks/zoo.py --rows unet,vae --quick --measure-seconds 60

Each row runs in a process of its own, both models of it by turns.  A row is model:sizes of the symbolic axes.  With
``--measure-seconds`` regions with products are measured first, as `onnxfuse optimize` on the GPU does by itself; with
``--abreast`` several rows get ready at once, and stand still while one is timed.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
from common import (
    RESULTS,
    abreast_option,
    environment,
    hydrate,
    measured_on,
    networks_option,
    packed,
    quantised_option,
    table,
    telling,
    write_results,
)
from processes import ApartError, Ready, Turn, Turns, apart
from zoo_rows import Row, choose

from onnxfuse.measuring import BenchResult, KernelShare, Ratio, Side, bench
from onnxfuse.measuring.database import VARIABLE
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, load, optimise
from onnxfuse.reporting import Report, report_of
from onnxfuse.resources import rules_folder
from onnxfuse.rewriting import save
from onnxfuse.rules import load_rules
from onnxfuse.tuning.products import measure_products

SLACK = 0.01
"""What the lower end of a ratio's interval may lie under the bar for each row."""

NAME_WIDTH = 110

PLANNED = 300.0
"""Seconds for planning and starting, beside those that measuring may take."""


@dataclass(frozen=True)
class PreparedRow:
    """A row's two files, what was planned, and the seconds that it took."""

    row: Row
    original: str
    fused: str
    report: Report
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """What became of a row: a result, or why there is none."""

    row: Row
    report: Report | None
    seconds: float = 0.0
    result: BenchResult | None = None
    error: str | None = None

    def ratio(self, kind: str) -> Ratio | None:
        """Of "gpu" or "wall" time."""
        if self.result is None:
            return None
        return self.result.gpu_ratio if kind == "gpu" else self.result.latency_ratio


@dataclass(frozen=True)
class Bar:
    """A lower bound: of the geometric mean ("zoo"), of each row ("each"), or of the rows whose names begin so."""

    of: str
    kind: str
    least: float

    @classmethod
    def parse(cls, text: str) -> Bar:
        """From "1.3", "each=1.0", "llama=1.5" or "wall:unet=1.5"."""
        name, _, number = text.rpartition("=")
        kind, of = name.split(":", 1) if name.startswith(("wall:", "gpu:")) else ("gpu", name or "zoo")
        return cls(of or "zoo", kind, float(number))

    def __str__(self) -> str:
        return f"{self.of}, {self.kind} time, at least {self.least:g}"


def measure_first(row: Row, seconds: float, disable: Sequence[str] = (),
                  provider_options: Mapping[str, str] = MappingProxyType({})) -> str:
    """What `onnxfuse optimize` measures on the way to a plan, into the database that is the default one; and how much
    that was."""
    start = time.perf_counter()
    options = Options(dims=row.dims, disable=disable, provider_options=provider_options)
    found = measure_products(load(row.hydrated()), options, seconds)
    ways = "nothing" if found is None else f"{found.measured} ways, {found.left} left"
    return f"measured {row.name}: {ways}  [{time.perf_counter() - start:.1f} s]"


def fuse(rows: Sequence[Row], folder: str, target: str | None, disable: Sequence[str] = (),
         provider_options: Mapping[str, str] = MappingProxyType({})
         ) -> Iterator[tuple[Row, str, str, Optimised, float]]:
    """Hydrate a model and fuse it for each of its rows: the two files, what was planned, the seconds that it took."""
    original = Path(folder) / f"{rows[0].model}.onnx"
    original.write_bytes(rows[0].hydrated().SerializeToString())
    for row in rows:
        start = time.perf_counter()
        optimised = optimise(original, Options(dims=row.dims, target=target, verify=False, compile=True,
                                               disable=disable, provider_options=provider_options))
        seconds = time.perf_counter() - start
        path = Path(folder) / f"{row.name.replace(':', '_')}.fused.onnx"
        save(optimised.model, path, source=optimised.loaded)
        yield row, str(original), str(path), optimised, seconds


def prepare(rows: Sequence[Row], folder: str, target: str | None, disable: Sequence[str] = (),
            provider_options: Mapping[str, str] = MappingProxyType({})) -> list[PreparedRow]:
    """Hydrate a model and fuse it for each of its rows."""
    return [PreparedRow(row, original, fused, report_of(optimised), seconds)
            for row, original, fused, optimised, seconds in fuse(rows, folder, target, disable, provider_options)]


def prepare_all(rows: Sequence[Row], folder: str, target: str | None, jobs: int,
                prepare: Callable[[Sequence[Row], str, str | None], list[Any]] = prepare) -> dict[str, Any]:
    """Every row by name, as ``prepare`` makes it, or why it is not, as text; models in parallel, the largest first."""
    models: dict[str, list[Row]] = {}
    for row in rows:
        models.setdefault(row.model, []).append(row)
    made: dict[str, Any] = {}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        order = sorted(models.values(), key=lambda same: -same[0].size)
        waiting = {pool.submit(prepare, same, folder, target): same for same in order}
        for future in as_completed(waiting):
            try:
                made |= {prepared.row.name: prepared for prepared in future.result()}
            except Exception as error:  # whatever it is, it is this model's outcome, and the others go on
                made |= {row.name: f"{type(error).__name__}: {error}" for row in waiting[future]}
            click.echo(f"  prepared {waiting[future][0].model}", err=True)
    return made


def measure(prepared: PreparedRow, settings: Mapping[str, Any], ready: Ready) -> BenchResult:
    """One row, on the GPU; ``ready`` returns once it may be timed."""
    inputs = hydrate().feeds({"inputs": prepared.row.inputs}, prepared.row.sizes)
    return bench(prepared.original, prepared.fused, prepared.row.dims, inputs=inputs,
                 progress=telling(ready), **settings)


def mean(outcomes: Sequence[Outcome], kind: str) -> float | None:
    """Geometric mean of the rows' ratios, each family one."""
    found = [(outcome.row.family, ratio.value) for outcome in outcomes
             if outcome.row.in_mean and (ratio := outcome.ratio(kind)) is not None]
    if not found:
        return None
    count = Counter(family for family, _ in found)
    return math.exp(sum(math.log(value) / count[family] for family, value in found) / len(count))


def check(bars: Sequence[Bar], outcomes: Sequence[Outcome]) -> list[tuple[Bar, bool, str]]:
    """For each bar whether it is met, and what was found.  A row without a result meets none."""
    checked = []
    for bar in bars:
        if bar.of == "zoo":
            value = mean(outcomes, bar.kind)
            missing = [o.row.name for o in outcomes if o.row.in_mean and o.ratio(bar.kind) is None]
            met = value is not None and value >= bar.least and not missing
            checked.append((bar, met, f"{value:.3f}" if value is not None and not missing else
                            f"not measured: {', '.join(missing)}"))
            continue
        chosen = [o for o in outcomes if bar.of == "each" or o.row.name.startswith(bar.of)]
        bad = []
        for outcome in chosen:
            ratio = outcome.ratio(bar.kind)
            if ratio is None:
                bad.append(f"{outcome.row.name} not measured")
            elif ratio.value < bar.least or (bar.of == "each" and ratio.low < bar.least - SLACK):
                bad.append(f"{outcome.row.name} {ratio}")
        checked.append((bar, bool(chosen) and not bad, "; ".join(bad) or ("met" if chosen else "no such row")))
    return checked


def times_table(outcomes: Sequence[Outcome]) -> str:
    """A row each: times, ratios, kernels, memory, session creation and the largest error of an output."""
    rows = []
    for outcome in outcomes:
        result = outcome.result
        if result is None or result.fused is None:
            rows.append([outcome.row.name, *["-"] * 10])
            continue
        a, b = result.original, result.fused
        rows.append([
            outcome.row.name, _pair(_median(a), _median(b), 3), str(result.gpu_ratio or "-"),
            _pair(a.latency.median, b.latency.median, 3), str(result.latency_ratio or "-"), _pair(a.kernels, b.kernels),
            str(len(outcome.report.fusions)) if outcome.report else "-",
            _pair(_scaled(a.peak_bytes, 2**20), _scaled(b.peak_bytes, 2**20)),
            _pair(a.creation_seconds, b.creation_seconds, 1), f"{outcome.seconds:.1f}",
            f"{max((error.error for error in result.errors), default=0.0):.1e}",
        ])
    return table(["row", "GPU ms", "ratio (95%)", "wall ms", "ratio (95%)", "kernels", "fused", "peak MiB",
                  "session s", "optimize s", "error"], rows)


def bytes_table(reports: Sequence[tuple[Row, Report]]) -> str:
    """A row each: what the plan says, no GPU asked."""
    rows = []
    for row, report in reports:
        a, b = report.before, report.after
        rows.append([
            row.name, _pair(a.nodes, b.nodes), _pair(a.kernels, b.kernels), str(len(report.fusions)),
            f"{a.bytes_products / 1e6:.0f}", _pair(a.bytes / 1e6, b.bytes / 1e6), f"{a.bytes / max(b.bytes, 1):.2f}",
            _pair(a.peak_bytes / 1e6, b.peak_bytes / 1e6), _pair(a.seconds * 1e3, b.seconds * 1e3, 3),
            f"{report.estimated_speedup:.2f}",
        ])
    return table(["row", "nodes", "kernels", "fused", "products MB", "rest MB", "less", "peak MB", "predicted ms",
                  "ratio"], rows)


def kernel_tables(outcome: Outcome, most: int) -> str:
    """The most expensive kernels of both models of a row."""
    result = outcome.result
    if result is None or result.fused is None:
        return f"### {outcome.row.name}\n\n{outcome.error or 'not measured'}"
    parts = [f"### {outcome.row.name}"]
    for title, side, other in (("Original", result.original, result.fused), ("Fused", result.fused, result.original)):
        count = {share.name: share.count for share in other.kernel_shares}
        parts += ["", f"{title}: {_median(side) or 0:.3f} ms in {side.kernels or 0} kernels", "",
                  _kernel_table(side, side.kernel_shares[:most], count)]
    return "\n".join(parts)


def _kernel_table(side: Side, shares: Sequence[KernelShare], other: Mapping[str, float]) -> str:
    whole = _median(side) or math.inf
    rows = [[share.name if len(share.name) <= NAME_WIDTH else share.name[:NAME_WIDTH - 1] + "…",
             f"{share.milliseconds * 1e3:.1f}", f"{100 * share.milliseconds / whole:.1f}%", f"{share.count:g}",
             f"{share.milliseconds * 1e3 / share.count:.1f}", f"{other.get(share.name, 0):g}"] for share in shares]
    return table(["kernel", "µs", "share", "launches", "µs each", "launches in the other"],
                 [[cell.replace("|", "\\|") for cell in row] for row in rows])


def _median(side: Side) -> float | None:
    return None if side.gpu is None else side.gpu.median


def _scaled(number: int | None, by: int) -> float | None:
    return None if number is None else number / by


def _pair(before: float | None, after: float | None, digits: int = 0) -> str:
    if before is None or after is None:
        return "-"
    return f"{before:.{digits}f} → {after:.{digits}f}"


def show(outcomes: Sequence[Outcome], bars: Sequence[Bar], kernels: int) -> tuple[str, bool]:
    """Everything as Markdown, and whether all bars are met."""
    parts = [times_table(outcomes), ""]
    for kind, title in (("gpu", "GPU time"), ("wall", "wall time")):
        value = mean(outcomes, kind)
        parts.append(f"Geometric mean, {title}: {'not measured' if value is None else f'{value:.3f}'}  ")
    checked = check(bars, outcomes)
    parts += [f"{'PASS' if met else 'FAIL'}: {bar}: {found}  " for bar, met, found in checked]
    notes = dict.fromkeys(f"- {o.row.name}: {note}" for o in outcomes if o.result for note in o.result.notes)
    failures = [f"- {outcome.row.name}: {outcome.error}" for outcome in outcomes if outcome.error]
    if notes or failures:
        parts += ["", *failures, *notes]
    planned = [(outcome.row, outcome.report) for outcome in outcomes if outcome.report is not None]
    if planned:
        parts += ["", "## Planned", "", bytes_table(planned)]
    if kernels:
        parts += ["", "## Kernels", "", "\n\n".join(kernel_tables(outcome, kernels) for outcome in outcomes)]
    return "\n".join(parts), all(met for _, met, _ in checked)


def _options(pairs: Sequence[str]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise click.BadParameter(f"'{pair}' is not KEY=VALUE", param_hint="--provider-option")
    return dict(pair.split("=", 1) for pair in pairs)


def _disabled(ids: Sequence[str]) -> list[str]:
    """Ids of rules, with those of all fuse rules for "fuse"."""
    named = [rule.id for rule in load_rules([rules_folder()]).fuse] if "fuse" in ids else []
    return [*(each for each in ids if each != "fuse"), *named]


def _bars(texts: Sequence[str]) -> list[Bar]:
    try:
        return [Bar.parse(text) for text in texts]
    except ValueError as error:
        raise click.BadParameter(f"{error}; write 1.3, each=1.0, llama=1.5 or wall:unet=1.5",
                                 param_hint="--least") from error


@click.command(help=__doc__.split("\n")[0])
@click.option("--rows", "names", metavar="NAME,...", help="Rows whose names begin so; all by default.")
@networks_option
@quantised_option
@click.option("--cuda-graph", is_flag=True, help="Replay CUDA graphs, both models.")
@click.option("--quick", is_flag=True, help="Few runs, and no memory.")
@click.option("--list-kernels", type=int, default=0, metavar="N",
              help="Show the N most expensive kernels of each model.")
@click.option("--provider-option", "pairs", multiple=True, metavar="KEY=VALUE",
              help="Of the CUDA provider, both models.")
@click.option("--disable", multiple=True, metavar="ID",
              help="Rule or stage to leave out; fuse for all rules that name a pattern to fuse.")
@click.option("--least", "least", multiple=True, metavar="[NAME=]RATIO",
              help="Bar: 1.3 for the mean, each=1.0, llama=1.5, wall:unet=1.5.  Exit code 1 where one is missed.")
@click.option("--target", help="GPU to plan for; by default the one at hand.")
@click.option("--database", type=click.Path(path_type=Path, exists=True, dir_okay=False),
              help="Measurements to plan by, packed where it ends in .xz; by default those of `onnxfuse tune`.")
@click.option("--measure-seconds", type=click.FloatRange(min=0), default=0, metavar="N",
              help="Measure each row's regions with products for so long first, as `onnxfuse optimize` does for 60.")
@click.option("--report-only", is_flag=True, help="Plan and print the bytes; no GPU is needed and nothing runs.")
@click.option("--jobs", type=int, default=min(8, os.cpu_count() or 1), show_default=True,
              help="Models prepared at once.")
@abreast_option
@click.option("--seconds", type=float, default=180, show_default=True,
              help="Most that one row may take to get ready, and to be timed.")
@click.option("--within", type=click.FloatRange(min=0), default=math.inf, show_default="no limit", metavar="SECONDS",
              help="Measure no row once so many are over; what was measured until then is written.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS, show_default=False,
              help="Folder for the results; benchmarks/results by default.")
def main(names: str | None, networks: Path, integers: bool, cuda_graph: bool, quick: bool, list_kernels: int,
         pairs: tuple[str, ...], disable: tuple[str, ...], least: tuple[str, ...], target: str | None,
         database: Path | None, measure_seconds: float, report_only: bool, jobs: int, abreast: int, seconds: float,
         within: float, out: Path) -> None:
    rows, bars = [replace(row, quantised=integers) for row in choose(names, networks)], _bars(least)
    where = apart(environment) if report_only else measured_on("--report-only")
    settings: dict[str, Any] = {"cuda_graph": cuda_graph, "provider_options": _options(pairs)}
    planning = {"disable": _disabled(disable), "provider_options": settings["provider_options"]}
    if quick:
        settings |= {"runs": 50, "laps": 5, "memory": False}
    until = time.monotonic() + within
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="onnxfuse-zoo-"))
        if database is not None:
            os.environ[VARIABLE] = str(stack.enter_context(packed(database)))
        elif measure_seconds:
            os.environ[VARIABLE] = str(Path(folder) / "measured.sqlite")
        if measure_seconds:
            _measure_each(rows, measure_seconds, **planning)
        made = prepare_all(rows, folder, target or where.gpu, jobs, partial(prepare, **planning))
        turns = Turns(abreast, seconds, until - time.monotonic())
        outcomes = [_unmeasured(row, made[row.name]) for row in rows] if report_only else sorted(
            _outcomes(rows, made, settings, turns), key=lambda outcome: rows.index(outcome.row))
    if report_only:
        _show_bytes(outcomes)
        sys.exit(any(outcome.error for outcome in outcomes))
    text, met = show(outcomes, bars, list_kernels)
    flags = {"quantised": integers, "cuda-graph": cuda_graph, "quick": quick, f"{measure_seconds:g}-s": measure_seconds}
    what = "-".join([
        networks.name, *(word for word, given in flags.items() if given),
        *(pair.replace("=", "-").replace("_", "-") for pair in pairs), *(f"no-{id}" for id in disable)])
    path = write_results(out, what, where, _content(outcomes, {**settings, "disabled": planning["disable"]}), text)
    click.echo(text)
    click.echo(f"written: {path} and .json", err=True)
    sys.exit(not met or any(outcome.error for outcome in outcomes))


def _show_bytes(outcomes: Sequence[Outcome]) -> None:
    click.echo(bytes_table([(outcome.row, outcome.report) for outcome in outcomes if outcome.report]))
    for outcome in outcomes:
        if outcome.error:
            click.echo(f"{outcome.row.name}: {outcome.error}")


def _measure_each(rows: Sequence[Row], seconds: float, disable: Sequence[str],
                  provider_options: Mapping[str, str]) -> None:
    for row in rows:
        try:
            found = apart(measure_first, row, seconds, disable, provider_options, seconds=seconds + PLANNED)
        except ApartError as error:  # it is planned by what was measured until then
            found = f"{row.name}: {str(error).strip()}"
        click.echo(f"  {found}", err=True)


def _outcomes(rows: Sequence[Row], made: Mapping[str, PreparedRow | str], settings: Mapping[str, Any],
              turns: Turns) -> Iterator[Outcome]:
    """What becomes of each row, as they end."""
    prepared = [made[row.name] for row in rows]
    yield from (_unmeasured(row, each) for row, each in zip(rows, prepared, strict=True) if isinstance(each, str))
    for turn, answer, seconds in turns.taken([Turn(measure, (each, settings)) for each in prepared
                                              if isinstance(each, PreparedRow)]):
        outcome = _unmeasured(turn.arguments[0].row, turn.arguments[0])
        if isinstance(answer, ApartError):
            outcome = replace(outcome, error=str(answer).strip())
        else:
            outcome = replace(outcome, result=answer)
        ratio = outcome.ratio("gpu") or outcome.ratio("wall") or outcome.error
        click.echo(f"  {outcome.row.name}: {ratio}  [{seconds:.1f} s]", err=True)
        yield outcome


def _unmeasured(row: Row, prepared: PreparedRow | str) -> Outcome:
    if isinstance(prepared, str):
        return Outcome(row, None, error=prepared)
    return Outcome(row, prepared.report, prepared.seconds)


def _content(outcomes: Sequence[Outcome], settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "settings": settings,
        "geometric_mean": {kind: mean(outcomes, kind) for kind in ("gpu", "wall")},
        "rows": [
            {"row": outcome.row.name, "optimize_seconds": outcome.seconds, "error": outcome.error,
             "planned": _planned(outcome.report), "measured": outcome.result.to_json() if outcome.result else None}
            for outcome in outcomes
        ],
    }


def _planned(report: Report | None) -> dict[str, Any] | None:
    if report is None:
        return None
    return {"target": report.target, "before": asdict(report.before), "after": asdict(report.after),
            "fusions": len(report.fusions), "estimated_speedup": report.estimated_speedup}


if __name__ == "__main__":
    main()
