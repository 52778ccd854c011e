"""Predicted against measured time of every fused node, over the rows of the zoo.

    python benchmarks/predictions.py --least 0.8
    python benchmarks/predictions.py --rows bert,unet --worst 40 --fit
    python benchmarks/predictions.py --fit --from benchmarks/results/2026-11-22-h200-predictions.json
    python benchmarks/predictions.py --dry-run --target H200

Each fused row runs in a process of its own under CUPTI.  A kernel belongs to the nodes whose launch plans hold its name
and, at the row's sizes, its grid; nodes that share both share the mean of their kernels' times.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import click
from common import ZOO, environment, hydrate, measured_on, row_options, table, write_results
from fitting import NEAR, fit_text
from processes import ApartError, Ready, apart
from zoo import fuse, prepare_all
from zoo_rows import Row, choose

from onnxfuse.graph.sizes import shape_of
from onnxfuse.lowering.launch import LaunchPlan, Step
from onnxfuse.lowering.routines import LibraryCall
from onnxfuse.measuring.cupti import Activity, KernelTimer
from onnxfuse.measuring.laps import take_laps
from onnxfuse.measuring.machine import find_machine, start_provider
from onnxfuse.measuring.runner import Runner
from onnxfuse.optimised import Optimised
from onnxfuse.planning.costs.cost import CostModel
from onnxfuse.planning.costs.traffic import chosen_variant

WARM_UP = 5
"""Runs before the profiler looks."""

LAPS = 10
"""Runs under the profiler."""

Grid = tuple[int, int, int]
Launch = tuple[str, Grid | None]
"""A kernel's name and its grid; None where the grid depends on what host tensors hold."""


@dataclass(frozen=True)
class Region:
    """A fused node as it was planned.

    Attributes:
        launches: its kernels at the row's sizes; names: all that its variants have.
        reads, writes, scratch: bytes; flops: arithmetic; kernels: how many it launches.
        executions: in one run of the model.
        predicted: microseconds.
    """

    node: str
    rule: str
    schedule: str
    launches: tuple[Launch, ...]
    names: tuple[str, ...]
    reads: int
    writes: int
    scratch: int
    flops: int
    kernels: int
    executions: float
    predicted: float

    @property
    def bytes(self) -> int:
        return self.reads + self.writes + self.scratch


@dataclass(frozen=True)
class Predicted:
    """A row's files, what was planned, and the GPU that it was planned for."""

    row: Row
    original: str
    fused: str
    target: str
    regions: tuple[Region, ...]


@dataclass(frozen=True)
class Compared:
    """A region beside its measured microseconds; None where they cannot be told, and ``note`` says why.  ``launches``:
    those of each of its launches."""

    row: str
    region: Region
    measured: float | None
    note: str = ""
    launches: tuple[float, ...] = ()

    @property
    def ratio(self) -> float | None:
        """Predicted over measured."""
        return self.region.predicted / self.measured if self.measured else None

    @property
    def near(self) -> bool:
        return self.ratio is not None and abs(self.ratio - 1) <= NEAR


Seen = Mapping[tuple[str, Grid], Sequence[float]]
"""Microseconds of each launch of one run, median of the laps, by kernel and grid."""


def regions_of(optimised: Optimised) -> tuple[Region, ...]:
    """Every fused node of a model."""
    profile, ledger = optimised.profile, optimised.ledger
    costs = CostModel(ledger, profile)
    found = []
    for placed in optimised.rewritten.placed:
        region = optimised.regions[placed.region]
        plan = region.kernel.plan
        traffic = ledger.region(region)
        found.append(Region(
            placed.node, region.rule, region.kernel.schedule,
            launches_of(plan, [shape_of(value, ledger.sizes) for value in region.tensors], profile.sm,
                        profile.multiprocessors),
            tuple(dict.fromkeys(named(step) for variant in plan.variants for step in variant.steps)),
            sum(traffic.reads.values()), sum(traffic.writes.values()), traffic.scratch, traffic.flops,
            traffic.kernels, ledger.executions(region.nodes), costs.kernel_seconds(region) * 1e6,
        ))
    return tuple(found)


def named(step: Step | LibraryCall) -> str:
    """A step's kernel, or the library's routine."""
    return step.routine if isinstance(step, LibraryCall) else step.kernel


def launches_of(plan: LaunchPlan, shapes: Sequence[tuple[int, ...] | None], sm: int,
                multiprocessors: int) -> tuple[Launch, ...]:
    """The kernels that a plan launches for aligned inputs of these shapes; an empty grid launches nothing, and of a
    library's kernels the routine is all that is known."""
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes):
        return tuple((named(step), None) for step in plan.variants[-1].steps)
    variant, value = chosen_variant(plan, known, sm, multiprocessors)
    found: list[Launch] = []
    for step in variant.steps:
        if isinstance(step, LibraryCall):
            found.append((step.routine, None))
            continue
        sizes = [value(size) for size in step.grid]
        if 0 not in sizes:
            x, y, z = sizes
            found.append((step.kernel, None if x is None or y is None or z is None else (x, y, z)))
    return tuple(found)


def predict(rows: Sequence[Row], folder: str, target: str | None) -> list[Predicted]:
    """Fuse a model for each of its rows, and say what its fused nodes should take."""
    return [Predicted(row, original, path, optimised.profile.name, regions_of(optimised))
            for row, original, path, optimised, _ in fuse(rows, folder, target)]


def measure(made: Predicted, laps: int, ready: Ready | None = None) -> Seen:
    """One fused row on the GPU; ``ready`` returns once it may be timed.

    Raises:
        RuntimeError: there is no GPU.
    """
    machine = find_machine()
    if machine.gpu is None:
        raise RuntimeError("there is no GPU that ONNX Runtime can use here")
    start_provider(machine, {})
    inputs = hydrate().feeds(json.loads((ZOO / "zoo.json").read_text())[made.row.model], made.row.sizes)
    runner = Runner(made.fused, machine, inputs, {}, fused=True)
    for _ in range(WARM_UP):
        runner.run()
    if ready is not None:
        ready()
    with KernelTimer(machine.synchronise) as timer:
        (found,) = take_laps(timer, [runner], laps)
    return seen(found)


def seen(laps: Sequence[Sequence[Activity]]) -> Seen:
    """Each launch's median: the n-th of a kernel and grid in one run is the n-th in every other.

    A kernel that was not launched equally often in all runs has the launches that they have in common.
    """
    by_lap: list[dict[tuple[str, Grid], list[float]]] = []
    for lap in laps:
        times: dict[tuple[str, Grid], list[float]] = defaultdict(list)
        for activity in lap:
            if activity.is_kernel:
                times[activity.name, activity.grid].append(activity.nanoseconds / 1e3)
        by_lap.append(times)
    keys = dict.fromkeys(key for times in by_lap for key in times)
    return {key: [median(each) for each in zip(*(times.get(key, []) for times in by_lap), strict=False)]
            for key in keys}


def compare(made: Predicted, found: Seen) -> list[Compared]:
    """The row's regions beside what was measured of them."""
    by_name: dict[str, dict[Grid, Sequence[float]]] = defaultdict(dict)
    for (name, grid), times in found.items():
        if times:
            by_name[name][grid] = times
    return [_compared(made.row.name, region, by_name) for region in made.regions]


def _compared(row: str, region: Region, found: Mapping[str, Mapping[Grid, Sequence[float]]]) -> Compared:
    times, note = list[float](), ""
    for name, grid in region.launches:
        grids = found.get(name, {})
        if grid is not None and grid in grids:
            times.append(fmean(grids[grid]))
        elif len(grids) == 1 or (grids and grid is None):
            times.append(fmean(time for each in grids.values() for time in each))
            note = f"{name} ran with grid {_grids(grids)} instead of {grid}" if grid is not None else note
        else:
            others = ", ".join(other for other in region.names if other in found)
            ran = f"with {_grids(grids)}" if grids else f"but {others}" if others else "and nothing else of the node"
            return Compared(row, region, None, f"{name} was not launched with grid {grid}, {ran}")
    return Compared(row, region, sum(times) if region.launches else None, note, tuple(times))


def _grids(grids: Iterable[Grid]) -> str:
    return ", ".join("x".join(map(str, grid)) for grid in grids)


# ---- What is shown. ----


def rows_table(compared: Sequence[Compared]) -> str:
    """A row each, and all together: regions, those near, predicted and measured milliseconds of a run."""
    lines = []
    for name in [*dict.fromkeys(one.row for one in compared), None]:
        chosen = [one for one in compared if name is None or one.row == name]
        told = [one for one in chosen if one.measured is not None]
        predicted = sum(one.region.predicted * one.region.executions for one in told) / 1e3
        measured = sum((one.measured or 0.0) * one.region.executions for one in told) / 1e3
        lines.append([name or "all", str(len(chosen)), str(len(told)), *_share(told), f"{predicted:.3f}",
                      f"{measured:.3f}", f"{predicted / measured:.2f}" if measured else "-"])
    return table(["row", "regions", "measured", "within 25%", "share", "predicted ms", "measured ms", "ratio"], lines)


def planned_table(compared: Sequence[Compared]) -> str:
    """What is predicted, for a dry run: a line for each kernel and size of a row."""
    groups: dict[tuple[Any, ...], list[Region]] = defaultdict(list)
    for one in compared:
        groups[one.row, one.region.launches, one.region.bytes].append(one.region)
    lines = [[f"{row} {same[0].node}", same[0].schedule, str(len(same)), f"{same[0].bytes / 1e6:.2f}",
              " ".join(f"{name} {_grids([grid]) if grid else '?'}" for name, grid in launches),
              f"{same[0].predicted:.2f}"] for (row, launches, _), same in groups.items()]
    return table(["planned", "schedule", "nodes", "MB", "kernels", "predicted µs"], lines)


def schedules_table(compared: Sequence[Compared]) -> str:
    """The same by schedule, with the spread of predicted over measured."""
    told = [one for one in compared if one.ratio is not None]
    lines = []
    for schedule in sorted({one.region.schedule for one in told}):
        chosen = [one for one in told if one.region.schedule == schedule]
        ratios = sorted(one.ratio or 0.0 for one in chosen)
        lines.append([schedule, str(len(chosen)), *_share(chosen), f"{ratios[len(ratios) // 10]:.2f}",
                      f"{median(ratios):.2f}", f"{ratios[-1 - len(ratios) // 10]:.2f}"])
    return table(["schedule", "regions", "within 25%", "share", "lowest tenth", "median ratio", "highest tenth"], lines)


def _share(chosen: Sequence[Compared]) -> tuple[str, str]:
    near = sum(one.near for one in chosen)
    return str(near), f"{near / len(chosen):.0%}" if chosen else "-"


def share(compared: Sequence[Compared]) -> float:
    """Share of the regions whose prediction is near; those that could not be measured are not near."""
    return sum(one.near for one in compared) / len(compared) if compared else 0.0


def worst_table(compared: Sequence[Compared], count: int) -> str:
    """The predictions that are furthest off, nodes of the same kernel and size together."""
    groups: dict[tuple[Any, ...], list[Compared]] = defaultdict(list)
    for one in compared:
        if one.measured:
            groups[one.row, one.region.launches, one.region.bytes].append(one)
    far = sorted(groups.values(), key=lambda same: -max(same[0].ratio or 0.0, 1 / (same[0].ratio or 1.0)))
    lines = []
    for same in [same for same in far if not same[0].near][:count]:
        region, measured = same[0].region, same[0].measured or 0.0
        lines.append([
            f"{same[0].row} {region.node}", region.schedule, str(len(same)), f"{region.bytes / 1e6:.2f}",
            f"{region.flops / 1e6:.1f}", str(region.kernels), f"{region.predicted:.2f}", f"{measured:.2f}",
            f"{same[0].ratio:.2f}", f"{region.bytes / measured / 1e6:.2f}",
        ])
    return table(["furthest off", "schedule", "nodes", "MB", "MFLOP", "kernels", "predicted µs", "measured µs", "ratio",
                  "TB/s"], lines)


def show(compared: Sequence[Compared], errors: Mapping[str, str], worst: int) -> str:
    """Everything as Markdown."""
    parts = [rows_table(compared), "", f"Within {NEAR:.0%} of measured: {share(compared):.1%} of {len(compared)} "
             f"regions; {_distinct(compared):.1%} where nodes of one kernel and size count once."]
    parts += ["", schedules_table(compared), "", worst_table(compared, worst)]
    notes = Counter(f"{one.row}: {one.note}" for one in compared if one.note)
    parts += ["", *(f"- {name}: {error}" for name, error in errors.items())] if errors else []
    parts += ["", *(f"- {note} ({count} nodes)" for note, count in notes.items())] if notes else []
    return "\n".join(parts)


def _distinct(compared: Sequence[Compared]) -> float:
    return share(list({(one.row, one.region.launches, one.region.bytes): one for one in compared}.values()))


def from_json(path: Path) -> tuple[str, list[Compared]]:
    """The target and the regions of a file that was written here.

    Raises:
        click.BadParameter: it is no such file.
    """
    try:
        content = json.loads(path.read_text())
        return content["target"], [_read(one) for one in content["regions"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise click.BadParameter(f"{path} holds no predictions: {error}", param_hint="--from") from error


def _read(raw: Mapping[str, Any]) -> Compared:
    region = dict(raw["region"])
    launches = tuple((name, None if grid is None else tuple(grid)) for name, grid in region["launches"])
    return Compared(raw["row"], Region(**{**region, "launches": launches, "names": tuple(region["names"])}),
                    raw["measured"], raw["note"])


@click.command(help=__doc__.split("\n")[0])
@row_options(dry_run="Only plan and predict; no GPU is needed.", seconds=180)
@click.option("--laps", default=LAPS, show_default=True, help="Runs under the profiler.")
@click.option("--worst", default=15, show_default=True, metavar="N", help="How many of the predictions furthest off.")
@click.option("--least", type=float, metavar="SHARE", help="Exit code 1 where fewer regions are within 25%, as 0.8.")
@click.option("--fit", is_flag=True, help="Suggest constants of the cost model that fit what was measured.")
@click.option("--from", "source", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="FILE.json",
              help="Show, and fit, what an earlier run measured; no GPU is needed.")
def main(names: str | None, laps: int, worst: int, least: float | None, fit: bool, source: Path | None,
         target: str | None, dry_run: bool, jobs: int, seconds: float, out: Path) -> None:
    if source is not None:
        planned, compared = from_json(source)
        text = show(compared, {}, worst)
        click.echo(f"{text}\n\n{fit_text(compared, target or planned)}" if fit else text)
        sys.exit(least is not None and share(compared) < least)
    rows = choose(names)
    where = apart(environment) if dry_run else measured_on("--dry-run")
    compared, errors = [], {}
    with tempfile.TemporaryDirectory(prefix="onnxfuse-predictions-") as folder:
        made = prepare_all(rows, folder, target or where.gpu, jobs, predict)
        planned = next((one.target for one in made.values() if not isinstance(one, str)), target or "")
        for row in rows:
            prepared = made[row.name]
            if isinstance(prepared, str):
                errors[row.name] = prepared
            elif dry_run:
                compared += [Compared(row.name, region, None) for region in prepared.regions]
            else:
                compared += _measured(prepared, laps, seconds, errors)
    if dry_run:
        click.echo("\n".join([planned_table(compared), *(f"- {name}: {error}" for name, error in errors.items())]))
        sys.exit(bool(errors))
    text = show(compared, errors, worst)
    if fit:
        text += f"\n\n{fit_text(compared, planned)}"
    click.echo(text)
    if compared:
        path = write_results(out, "predictions", where, _content(compared, errors, planned), text)
        click.echo(f"written: {path} and .json", err=True)
    sys.exit(bool(errors) or (least is not None and share(compared) < least))


def _measured(prepared: Predicted, laps: int, seconds: float, errors: dict[str, str]) -> list[Compared]:
    name = prepared.row.name
    try:
        compared = compare(prepared, apart(measure, prepared, laps, seconds=seconds))
    except ApartError as error:
        errors[name] = str(error).strip()
        click.echo(f"  {name}: {errors[name]}", err=True)
        return [Compared(name, region, None) for region in prepared.regions]
    click.echo(f"  {name}: {share(compared):.0%} of {len(compared)} within {NEAR:.0%}", err=True)
    return compared


def _content(compared: Sequence[Compared], errors: Mapping[str, str], target: str) -> dict[str, Any]:
    # A launch's names repeat in every layer; one list of names a row would be smaller, and harder to read back.
    kept = [replace(one, region=replace(one.region, predicted=round(one.region.predicted, 4)),
                    measured=None if one.measured is None else round(one.measured, 4)) for one in compared]
    return {"target": target, "near": NEAR, "share": share(compared), "errors": dict(errors),
            "regions": [asdict(one) for one in kept]}


if __name__ == "__main__":
    main()
