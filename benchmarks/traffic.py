"""Device-memory traffic that the plans leave, recounted from the files, and against the GPU's counters.

    python benchmarks/traffic.py --most 0.4
    python benchmarks/traffic.py --counters bert_base_fp16:512:512,tower_fp32:65536
    python benchmarks/traffic.py --counters tower_fp32:65536 --dry-run --target H200

The share is that of the original's bytes outside products, by recount.py, which reads nothing but the two files.  With
``--counters`` one run of each named row's fused model is profiled by NVIDIA's ncu: bytes read and written by the memory
itself, kernel by kernel.  The sizes may be any, as model:sizes; the counters agree with the count only where a kernel's
tensors are several times the second-level cache, which keeps what it can.
"""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import click
from common import ZOO, environment, find_tool, hydrate, row_options, table, write_results
from predictions import Predicted, Region, predict
from processes import apart
from recount import count, load
from zoo import prepare_all
from zoo_rows import Row, choose

from onnxfuse.measuring.cupti import demangled

AGREE = 0.10
"""Largest difference between the count and the counters, as a share of the counters."""

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
L2 = "bytes of the second-level cache: "
PRODUCT = re.compile(
    r"gemm|gemv|broadcast_?bias|cutlass|xmma|wgmma|nvjet|cudnn|conv|fprop|dgrad|wgrad|winograd|splitk|fmha|flash|implicit",
    re.IGNORECASE,
)
"""Kernels of matrix products and convolutions, and what the libraries launch around them."""


@dataclass(frozen=True)
class Recounted:
    """A row's bytes outside products, and its kernels, before and after."""

    row: str
    before: float
    after: float
    kernels_before: float
    kernels_after: float
    products: float
    unknown: tuple[str, ...]

    @property
    def share(self) -> float:
        """Of the original's traffic that is left."""
        return self.after / self.before if self.before else 1.0


@dataclass(frozen=True)
class PreparedTraffic:
    """A row, what was planned, and the count."""

    row: Row
    predicted: Predicted
    recounted: Recounted


@dataclass(frozen=True)
class Profiled:
    """One kernel of a run, as ncu saw it: its name and grid, bytes read from memory and written to it."""

    name: str
    grid: tuple[int, int, int]
    read: int
    written: int

    @property
    def bytes(self) -> int:
        return self.read + self.written


@dataclass(frozen=True)
class Counted:
    """Kernels of one name and grid: how many nodes they are, bytes that one is counted at, and that it moved."""

    name: str
    schedule: str
    nodes: int
    counted: int
    read: float
    written: float

    @property
    def ratio(self) -> float:
        """Counted over moved."""
        moved = self.read + self.written
        return self.counted / moved if moved else float("inf")


@dataclass(frozen=True)
class Comparison:
    """A row's count beside the counters.

    Attributes:
        fused: by kernel; other: bytes that kernels which are neither fused nor products moved, by name.
        counted: bytes of the whole row outside products, by recount; l2: bytes of the second-level cache.
        missing: fused kernels that did not run as planned.
    """

    row: str
    fused: tuple[Counted, ...]
    other: Mapping[str, int]
    products: int
    counted: float
    l2: int
    missing: tuple[str, ...]

    @property
    def fused_ratio(self) -> float:
        """Counted over moved, of all fused kernels."""
        moved = sum(one.nodes * (one.read + one.written) for one in self.fused)
        return sum(one.nodes * one.counted for one in self.fused) / moved if moved else float("inf")

    @property
    def ratio(self) -> float:
        """The same of all that is no product."""
        moved = sum(one.nodes * (one.read + one.written) for one in self.fused) + sum(self.other.values())
        return self.counted / moved if moved else float("inf")

    @property
    def agrees(self) -> bool:
        return not self.missing and all(abs(ratio - 1) <= AGREE for ratio in (self.fused_ratio, self.ratio))


# ---- The count. ----


def recount(made: Predicted) -> Recounted:
    """A row's two files, counted."""
    before, after = (count(load(Path(path)), made.row.dims) for path in (made.original, made.fused))
    return Recounted(made.row.name, before.other, after.other, before.kernels, after.kernels, before.products,
                     tuple(sorted(before.unknown | after.unknown)))


def prepare(rows: Sequence[Row], folder: str, target: str | None) -> list[PreparedTraffic]:
    """Fuse a model for each of its rows, and count its bytes."""
    return [PreparedTraffic(made.row, made, recount(made)) for made in predict(rows, folder, target)]


def row_of(name: str) -> Row:
    """A row of any sizes: "model:sizes".

    Raises:
        click.BadParameter: there is no such model, or the sizes are not as many as its axes.
    """
    model, *sizes = name.split(":")
    zoo = json.loads((ZOO / "zoo.json").read_text())
    if model not in zoo:
        raise click.BadParameter(f"no model is called '{model}'; there are: {', '.join(zoo)}", param_hint="--counters")
    axes = len(zoo[model]["sizes"][0])
    if len(sizes) != axes or not all(size.isdigit() and int(size) for size in sizes):
        usual = ":".join(map(str, zoo[model]["sizes"][0]))
        raise click.BadParameter(f"'{name}' must have {axes} sizes, as {model}:{usual}", param_hint="--counters")
    return Row(model, tuple(map(int, sizes)), zoo[model]["inputs"])


def shares_table(found: Sequence[Recounted]) -> str:
    """A row each, and the mean of the shares."""
    lines = [[
        one.row, f"{one.before / 1e6:.1f}", f"{one.after / 1e6:.1f}", f"{one.share:.1%}",
        f"{one.kernels_before:.0f} → {one.kernels_after:.0f}", f"{one.products / 1e6:.1f}", str(len(one.unknown) or ""),
    ] for one in found]
    lines.append(["mean of rows", "", "", f"{fmean(one.share for one in found):.1%}" if found else "-", "", "", ""])
    return table(["row", "MB before", "MB after", "left", "kernels", "MB in products", "unknown sizes"], lines)


# ---- The counters. ----


def profile(made: Predicted, folder: str, cache_control: str, seconds: float) -> tuple[list[Profiled], int]:
    """One run of the fused model under ncu: its kernels in order, and bytes of the second-level cache.

    Raises:
        click.ClickException: ncu failed.
    """
    job, log = Path(folder) / "job.json", Path(folder) / "counters.csv"
    job.write_text(json.dumps({"fused": made.fused, "model": made.row.model, "sizes": made.row.sizes}))
    command = [
        find_tool("ncu"), "--metrics", ",".join(METRICS), "--csv", "--print-units", "base", "--print-kernel-base",
        "mangled", "--profile-from-start", "off", "--target-processes", "application-only", "--cache-control",
        cache_control, "--clock-control", "none", "--log-file", str(log),
        sys.executable, str(Path(__file__).resolve()), "--run", str(job),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise click.ClickException(f"ncu took more than {seconds:.0f} s for {made.row.name}") from None
    text = log.read_text(errors="replace") if log.exists() else ""
    found = parse(text) or parse(done.stdout)
    if done.returncode or not found:
        output = "\n".join(part.strip()[-3000:] for part in (text if not found else "", done.stdout, done.stderr))
        raise click.ClickException(f"ncu failed for {made.row.name} (exit code {done.returncode}):\n{output}")
    (l2,) = re.findall(rf"^{L2}(\d+)$", done.stdout, re.MULTILINE)
    return found, int(l2)


def run_once(job: Path) -> None:
    """What ncu looks at: sessions and first runs pass unseen, then one run."""
    from cupy.cuda import runtime

    from onnxfuse.measuring.machine import find_machine, start_provider
    from onnxfuse.measuring.runner import Runner

    content = json.loads(job.read_text())
    machine = find_machine()
    if machine.gpu is None:
        raise click.ClickException("there is no GPU that ONNX Runtime can use here")
    start_provider(machine, {})
    inputs = hydrate().feeds(json.loads((ZOO / "zoo.json").read_text())[content["model"]], content["sizes"])
    runner = Runner(content["fused"], machine, inputs, {}, fused=True)
    runner.run()
    machine.gpu.synchronise()
    runtime.profilerStart()
    runner.run()
    machine.gpu.synchronise()
    runtime.profilerStop()
    click.echo(f"{L2}{machine.gpu.l2_bytes}")


def parse(text: str) -> list[Profiled]:
    """Kernels of ncu's CSV, which has a line for each metric of a kernel, or a line for each kernel."""
    lines = text.splitlines()
    head = next((place for place, line in enumerate(lines) if line.startswith('"ID"')), None)
    if head is None:
        return []
    kernels: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(lines[head:]):
        if not (row.get("ID") or "").isdigit():  # the line of units, or a message after the table
            continue
        kernel = kernels.setdefault(row["ID"], {"name": row["Kernel Name"], "grid": _grid(row.get("Grid Size", ""))})
        pairs = [(row["Metric Name"], row["Metric Value"])] if "Metric Name" in row else list(row.items())
        for name, value in pairs:
            if name in METRICS:
                kernel[name] = round(float(value.replace(",", "")))
    return [Profiled(kernel["name"], kernel["grid"], *(kernel[name] for name in METRICS))
            for kernel in kernels.values() if all(name in kernel for name in METRICS)]


def _grid(text: str) -> tuple[int, int, int]:
    found = [int(number) for number in re.findall(r"\d+", text)]
    x, y, z = (*found, 1, 1, 1)[:3]
    return x, y, z


def compare(made: Predicted, counted: float, kernels: Sequence[Profiled], l2: int) -> Comparison:
    """A row's regions beside what their kernels moved; a region of several kernels is looked at as one."""
    moved: dict[tuple[str, Any], list[Profiled]] = defaultdict(list)
    for kernel in kernels:
        moved[kernel.name, kernel.grid].append(kernel)
    ours = {name for region in made.regions for name in region.names}
    same: dict[tuple[Any, ...], list[Region]] = defaultdict(list)
    for region in made.regions:
        same[region.launches, region.bytes].append(region)
    found, missing = [], []
    for (launches, size), regions in same.items():
        ran = [[k for (name, grid), each in moved.items() if name == launch and wanted in (None, grid) for k in each]
               for launch, wanted in launches]
        if not all(ran):
            missing.append(f"{regions[0].node}: " + " ".join(name for name, _ in launches))
            continue
        read = sum(fmean(kernel.read for kernel in each) for each in ran)
        written = sum(fmean(kernel.written for kernel in each) for each in ran)
        found.append(Counted(f"{regions[0].node}", regions[0].schedule, len(regions), size, read, written))
    other: dict[str, int] = defaultdict(int)
    products = 0
    for kernel in kernels:
        if kernel.name in ours:
            continue
        if PRODUCT.search(kernel.name):
            products += kernel.bytes
        else:
            other[demangled(kernel.name)] += kernel.bytes
    return Comparison(made.row.name, tuple(found), dict(other), products, counted, l2, tuple(missing))


def counters_text(one: Comparison) -> str:
    """A row's comparison as Markdown."""
    lines = [[each.name, each.schedule, str(each.nodes), f"{each.counted / 1e6:.1f}", f"{each.counted / one.l2:.1f}",
              f"{each.read / 1e6:.1f}", f"{each.written / 1e6:.1f}", f"{each.ratio:.3f}"]
             for each in sorted(one.fused, key=lambda each: -each.nodes * each.counted)]
    parts = [f"### {one.row}", "",
             table(["region", "schedule", "nodes", "MB counted", "of the L2", "MB read", "MB written",
                    "counted / moved"], lines), ""]
    parts += [f"- not launched as planned: {text}" for text in one.missing]
    parts += [f"- {size / 1e6:.1f} MB outside fused nodes: {_cell(name)}"
              for name, size in sorted(one.other.items(), key=lambda item: -item[1])[:8]]
    moved = sum(each.nodes * (each.read + each.written) for each in one.fused)
    parts += [
        f"- {one.products / 1e6:.1f} MB in products, which are not compared", "",
        f"Fused kernels: {one.fused_ratio:.3f} of {moved / 1e6:.0f} MB moved.  All but products: counted "
        f"{one.counted / 1e6:.0f} MB, {one.ratio:.3f} of what was moved: "
        f"{'agrees' if one.agrees else 'DOES NOT AGREE'} within {AGREE:.0%}.",
    ]
    return "\n".join(parts)


def _cell(name: str) -> str:
    return name if len(name) <= 90 else f"{name[:87]}..."


def working_set(made: Predicted) -> str:
    """How large a row's fused kernels are, for a dry run."""
    sizes = sorted((region.bytes for region in made.regions), reverse=True)
    weighted = sum(size for size in sizes if size >= 4 * 60 << 20) / max(sum(sizes), 1)
    return (f"{made.row.name}: {len(sizes)} regions, the largest {sizes[0] / 1e6 if sizes else 0:.0f} MB; "
            f"{weighted:.0%} of their bytes in regions past 240 MiB")


def profile_all(
    ready: Sequence[PreparedTraffic], folder: str, cache_control: str, seconds: float
) -> tuple[list[Comparison], dict[str, str]]:
    """Rows under ncu, and why others could not be run so, by name."""
    compared, failed = [], {}
    for one in ready:
        name = one.predicted.row.name
        try:
            kernels, l2 = profile(one.predicted, folder, cache_control, seconds)
        except click.ClickException as error:
            failed[name] = error.message
            continue
        compared.append(compare(one.predicted, one.recounted.after, kernels, l2))
        click.echo(f"  profiled {name}: {len(kernels)} kernels", err=True)
    return compared, failed


def summary(found: Sequence[Recounted], compared: Sequence[Comparison], failures: Mapping[str, str],
            most: float | None) -> str:
    """All of it as Markdown; ``most``: the largest mean share that may be left, if one was asked for."""
    parts = [shares_table(found)] if found else []
    if found and most is not None:
        left = fmean(one.share for one in found)
        parts.append(f"\n{'PASS' if left <= most else 'FAIL'}: {left:.1%} left (mean of rows), at most {most:.0%}")
    parts += ["\n## The GPU's counters\n", "\n\n".join(map(counters_text, compared))] if compared else []
    parts += ["", *(f"- {name}: {error}" for name, error in failures.items())] if failures else []
    return "\n".join(parts)


@click.command(help=__doc__.split("\n")[0])
@row_options(dry_run="Count, and plan the rows of --counters, but do not run them.", seconds=300)
@click.option("--most", type=float, metavar="SHARE", help="Exit code 1 where the mean share left is larger, as 0.4.")
@click.option("--counters", metavar="MODEL:SIZES,...", help="Rows to run under ncu, of any sizes; needs a GPU.")
@click.option("--cache-control", type=click.Choice(["none", "all"]), default="none", show_default=True,
              help="all: ncu empties the caches before every kernel.")
@click.option("--run", "job", type=click.Path(path_type=Path, exists=True), hidden=True)
def main(names: str | None, most: float | None, counters: str | None, cache_control: str, target: str | None,
         dry_run: bool, jobs: int, seconds: float, out: Path, job: Path | None) -> None:
    if job is not None:
        run_once(job)
        return
    rows = choose(names) if names is not None or not counters else []
    profiled = [row_of(name) for name in (counters or "").split(",") if name]
    if profiled and not dry_run:
        find_tool("ncu")
    where = apart(environment)
    with tempfile.TemporaryDirectory(prefix="onnxfuse-traffic-") as folder:
        made = prepare_all([*rows, *profiled], folder, target or where.gpu, jobs, prepare)
        failures = {name: one for name, one in made.items() if isinstance(one, str)}
        found = [made[row.name].recounted for row in rows if row.name not in failures]
        ready = [made[row.name] for row in profiled if row.name not in failures]
        compared: list[Any] = []
        if dry_run:
            for one in ready:
                click.echo(working_set(one.predicted))
        else:
            compared, failed = profile_all(ready, folder, cache_control, seconds)
            failures |= failed
    left = fmean(one.share for one in found) if found else None
    text = summary(found, compared, failures, most)
    click.echo(text)
    if not dry_run and (found or compared):
        content = {"mean_share": left, "rows": [{**asdict(one), "share": one.share} for one in found],
                   "counters": [{**asdict(one), "fused_ratio": one.fused_ratio, "ratio": one.ratio}
                                for one in compared], "cache_control": cache_control, "errors": failures}
        path = write_results(out, "traffic", where, content, text)
        click.echo(f"written: {path} and .json", err=True)
    missed = left is not None and most is not None and left > most
    sys.exit(bool(failures) or missed or not all(one.agrees for one in compared))


if __name__ == "__main__":
    main()
