"""What a plan by predictions alone takes in of products and attention, beside what the same regions were measured to
take.

    python benchmarks/foreseen.py --database benchmarks/zoo/measured-h100.sqlite.xz
    python benchmarks/foreseen.py --rows vit,resnet50 --database measured.sqlite.xz --target H100 --least 1.0

Each row of the zoo is planned as where nothing was measured (``onnxfuse optimize --no-database --target``).  Of every
region with products that is fused so, the database tells what the kernel took and what ONNX Runtime took for its nodes;
and of dense convolutions how much longer they took the runtime than is predicted at the least.  Needs no GPU.

Exit code 1 where a region was measured to gain less than ``--least``, or nothing is known of any.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import click
from common import packed, table
from zoo_rows import Row, choose

from onnxfuse.measurements import Measurements, find_measurements
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.costs.hardware import resolve_profile
from onnxfuse.planning.costs.library import convolution_seconds, is_dense, is_laid_anew
from onnxfuse.planning.identity import Identities
from onnxfuse.planning.regions.contractions import STAGE as ATTENTION
from onnxfuse.planning.regions.products import STAGE as PRODUCTS

RULES = (PRODUCTS, ATTENTION)


@dataclass(frozen=True)
class Foreseen:
    """A region that predictions take in: its row and operators; microseconds as predicted, before and after, and as
    measured; None where that was not."""

    row: str
    operators: tuple[str, ...]
    before: float
    after: float
    runtime: float | None
    fused: float | None

    @property
    def gain(self) -> float | None:
        """How many times as fast it was measured to be."""
        return None if self.runtime is None or self.fused is None else self.runtime / self.fused


def foreseen(row: str, made: Optimised, known: Measurements) -> Iterator[Foreseen]:
    """The regions of a row's plan with products; ``made``: planned where nothing was measured."""
    identities = Identities(made.graph, made.ledger.sizes)
    for region in made.plan.fusions:
        if region.rule in RULES:
            what = identities.of(region)
            times = None if what is None else known.times(what, region.kernel)
            yield Foreseen(
                row, tuple(node.op for node in region.view), 1e6 * region.cost.seconds_before,
                1e6 * region.cost.seconds_after, *((None, None) if times is None else (times.runtime, times.fused)))


def planned(row: Row, target: str, database: Path | Literal[False] = False) -> Optimised:
    """A row by what was measured, or by predictions alone."""
    return optimise(row.hydrated(), Options(
        dims=row.dims, target=target, database=database, verify=False, compile=False))


def convolutions(unmeasured: Optimised, measured: Optimised) -> Iterator[tuple[bool, float]]:
    """Of each dense convolution that was measured by itself: whether it has windows, and how many times as long as
    predicted it took the runtime, with its bias or without."""
    seconds: list[dict[tuple[str, int], float]] = []
    for made, known in ((unmeasured, partial(convolution_seconds, costs=unmeasured.costs)),
                        (measured, measured.costs.is_learned)):
        dense = {(node.label, len(node.inputs)): node for node in filter(is_dense, made.graph.nodes) if known(node)}
        seconds.append({key: made.costs.unfused([node])[0] for key, node in dense.items()})
    predicted, taken = seconds
    for key in predicted.keys() & taken.keys():
        yield is_laid_anew(dense[key]), taken[key] / predicted[key]


def spread(found: list[tuple[bool, float]]) -> str:
    """A line for those with windows, and one for those without."""
    lines = []
    for windows in (True, False):
        ratios = sorted(ratio for each, ratio in found if each is windows)
        if ratios:
            places = (min(len(ratios) - 1, int(share * len(ratios))) for share in (0, 0.05, 0.25, 0.5, 0.75, 1))
            lines.append(["with windows" if windows else "without", str(len(ratios)),
                          *(f"{ratios[place]:.2f}" for place in places)])
    return table(["dense convolutions", "measured", "least", "5%", "25%", "median", "75%", "most"], lines)


def shown(found: list[Foreseen]) -> str:
    """A line for each row."""
    lines = []
    for row in dict.fromkeys(each.row for each in found):
        known = [each for each in found if each.row == row and each.gain is not None]
        gains = sorted(each.gain or 0.0 for each in known)
        before, after, runtime, fused = (
            sum(getattr(each, name) for each in known) for name in ("before", "after", "runtime", "fused"))
        lines.append([
            row, f"{len(known)} of {sum(each.row == row for each in found)}", f"{before:.0f} → {after:.0f}",
            f"{runtime:.0f} → {fused:.0f}", *([f"{gains[0]:.2f}", f"{runtime / fused:.2f}"] if known else ["", ""])])
    return table(["row", "measured", "predicted µs", "measured µs", "least gain", "gain"], lines)


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--rows", "names", metavar="NAME,...", help="Rows whose names begin so; all by default.")
@click.option("--database", type=click.Path(path_type=Path, exists=True), required=True, metavar="FILE",
              help="Measurements, packed where it ends in .xz.")
@click.option("--target", default="H100", show_default=True, help="GPU to plan for, that they are of.")
@click.option("--least", default=0.98, show_default=True, help="Gain that every region has to have; 2% are noise.")
def main(names: str | None, database: Path, target: str, least: float) -> None:
    with packed(database) as path:
        measurements, notes = find_measurements(resolve_profile(target), path)
        if measurements is None:
            raise click.ClickException("; ".join(notes) or f"nothing was measured on {target}")
        found: list[Any] = []
        alone: list[Any] = []
        for row in choose(names):
            made = planned(row, target)
            found += foreseen(row.name, made, measurements)
            alone += convolutions(made, planned(row, target, path))
    click.echo(shown(found))
    if alone:
        click.echo(f"\nMeasured over predicted:\n\n{spread(alone)}")
    known = [each for each in found if each.gain is not None]
    slow = [each for each in known if (each.gain or 0.0) < least]
    for each in slow:
        click.echo(f"{each.row}: {' '.join(each.operators)}: {each.runtime:.1f} µs, {each.fused:.1f} fused", err=True)
    sys.exit(1 if slow or not known else 0)


if __name__ == "__main__":
    main()
