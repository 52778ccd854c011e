"""Tune rows of the zoo, each for the seconds that are given, into one database of measurements.

    python benchmarks/tune.py vit=45 dit=80 llama_decode_fp16:1:=60
    python benchmarks/tune.py --networks benchmarks/convolutions --seconds 10 --database convolutions.sqlite.xz
    python benchmarks/tune.py --seconds 30 --database benchmarks/zoo/h200.sqlite.xz
    python benchmarks/tune.py tower=30 --no-tf32 --database benchmarks/zoo/h200.sqlite.xz

Rows are named by how they begin; all are tuned where none is.  What the database holds is not measured again, so that
the same command goes on where the last one ended.  A database that ends in .xz is unpacked, and packed again behind
each row.  A table tells how much is left of each row, and what a run spends in its regions.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
from common import ZOO, measured_on, networks_option, packed, quantised_option, table
from processes import ApartError, apart
from zoo_rows import Row, choose

from onnxfuse import tuning
from onnxfuse.measuring.database import open_database


@dataclass(frozen=True)
class Spent:
    """What tuning a row did: measurements, those that were there before, those that are left; faults as text."""

    measured: int
    known: int
    left: int
    seconds: float
    faults: tuple[str, ...]
    runtime: float
    best: float


def tune(row: Row, seconds: float, database: Path, force: bool, tf32: bool) -> Spent:
    """One row, on the GPU at hand."""
    with tempfile.TemporaryDirectory(prefix="onnxfuse-tune-") as folder:
        path = Path(folder) / f"{row.model}.onnx"
        path.write_bytes(row.hydrated().SerializeToString())
        options = tuning.TuneOptions(dims=row.dims, budget=seconds, force=force, tf32=tf32)
        with open_database(database) as kept:
            found = tuning.tune(path, tuning.find_timer(), kept, options)
    known = [region for region in found.regions if region.verdict != "unmeasured"]
    runtime, fused = (sum(region.count * (time or 0.0) for region, time in times) for times in (
        [(region, region.runtime) for region in known],
        [(region, region.best if region.verdict == "fused" else region.runtime) for region in known]))
    faults = tuple(f"{region.node}: {fault}" for region in found.regions for fault in region.faults)
    return Spent(found.measured, found.known, found.left, found.seconds, faults, runtime, fused)


def asked(texts: Sequence[str], seconds: float, folder: Path = ZOO) -> list[tuple[Row, float]]:
    """Rows with their seconds, from "vit=45" or "vit"; all rows where there are no texts.

    Raises:
        click.BadParameter: no row begins so, or the seconds are no number.
    """
    found: dict[str, tuple[Row, float]] = {}
    for text in texts or ("",):
        name, _, number = text.partition("=")
        try:
            each = float(number) if number else seconds
        except ValueError as error:
            raise click.BadParameter(f"'{number}' of '{text}' is no number of seconds") from error
        found |= {row.name: (row, each) for row in choose(name or None, folder)}
    return list(found.values())


@click.command(help=__doc__.split("\n")[0])
@click.argument("rows", nargs=-1, metavar="[ROW[=SECONDS]]...")
@networks_option
@quantised_option
@click.option("--seconds", type=float, default=30, show_default=True, help="For rows that name none.")
@click.option("--database", type=click.Path(path_type=Path, dir_okay=False), required=True,
              help="Where measurements are kept; packed where it ends in .xz.")
@click.option("--force", is_flag=True, help="Measure again what the database holds.")
@click.option("--no-tf32", "exact", is_flag=True, help="Do not round operands of float32 products.")
def main(rows: tuple[str, ...], networks: Path, integers: bool, seconds: float, database: Path, force: bool,
         exact: bool) -> None:
    wanted = asked(rows, seconds, networks)
    where = measured_on()
    lines, failed = [], False
    for row, budget in wanted:
        with packed(database, keep=True) as path:  # what was measured before a crash is kept too
            try:
                spent = apart(tune, replace(row, quantised=integers), budget, path, force, not exact)
            except ApartError as error:
                failed = True
                click.echo(f"  {row.name}: {error}", err=True)
                continue
        lines.append([row.name, f"{spent.seconds:.0f}", str(spent.measured), str(spent.known), str(spent.left),
                      f"{spent.runtime:.0f}", f"{spent.best:.0f}", str(len(spent.faults))])
        click.echo(f"  {row.name}: {spent.measured} measured, {spent.left} left  [{spent.seconds:.1f} s]", err=True)
        for fault in spent.faults:
            click.echo(f"    not used: {fault}", err=True)
    click.echo("\n".join([*(f"{line}  " for line in where.lines()), "", table(
        ["row", "s", "measured", "known before", "left", "runtime µs", "best µs", "faults"], lines)]))
    sys.exit(failed)


if __name__ == "__main__":
    main()
