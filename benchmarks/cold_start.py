"""What a fused model adds to creating a session.

    python benchmarks/cold_start.py [--rows tower,llama] [--repeats 3]

Each session is created in a process of its own, once CUDA and its libraries are up: the plain model; the fused one with
an empty kernel cache, with the cache that this left, and with embedded images and no cache.  The files are read once
before, so that the disk plays no part.  At most 10 s more than the plain model are allowed with an empty cache, 0.5 s
more with a warm one or with embedded images.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
from common import RESULTS, ZOO, hydrate, measured_on, table, write_results
from processes import ApartError, apart
from zoo_rows import Row, choose

from onnxfuse import runtime
from onnxfuse.measuring.machine import find_machine, start_provider
from onnxfuse.measuring.runner import create_session
from onnxfuse.pipeline import Options, optimise
from onnxfuse.rewriting import read_fused, save

ALLOWED = {"empty cache": 10.0, "warm cache": 0.5, "embedded": 0.5}
"""Seconds more than the plain model."""


@dataclass(frozen=True)
class Creation:
    """One session: seconds, and how many kernel images came from the model, from the cache, and from the compiler."""

    seconds: float
    embedded: int = 0
    cached: int = 0
    compiled: int = 0


@dataclass(frozen=True)
class ColdStart:
    """A model: the sessions of each way, and the kernels that it has."""

    row: str
    kernels: int
    creations: dict[str, list[Creation]] = field(default_factory=dict)

    def median(self, way: str) -> float:
        return statistics.median(creation.seconds for creation in self.creations[way])

    def more(self, way: str) -> float:
        """Seconds more than the plain model."""
        return self.median(way) - self.median("plain")

    @property
    def passes(self) -> bool:
        return all(self.more(way) <= most for way, most in ALLOWED.items())


def prepare(row: Row, folder: str, target: str | None, architecture: str | None) -> tuple[str, str, str, int]:
    """Paths of the plain, the fused and the embedded model, and the number of distinct kernels; in that folder."""
    paths = [str(Path(folder) / f"{way}.onnx") for way in ("plain", "fused", "embedded")]
    Path(paths[0]).write_bytes(hydrate().hydrate(ZOO / f"{row.model}.onnx.xz").SerializeToString())
    kernels = 0
    for path, embed in ((paths[1], ()), (paths[2], (architecture,) if architecture else ())):
        options = Options(dims=row.dims, target=target, architectures=embed, verify=False, compile=True)
        done = optimise(paths[0], options)
        save(done.model, path, source=done.loaded)
        nodes = read_fused(done.model)
        kernels = len({node.op for node in nodes})
        if embed and nodes and not all(node.architectures for node in nodes):
            raise RuntimeError(f"not all kernels of {row.name} were embedded for {architecture}")
    return paths[0], paths[1], paths[2], kernels


def create(path: str, cache: str, fused: bool) -> Creation:
    """Create a session in this process, which has created none before."""
    os.environ["ONNXFUSE_CACHE_DIR"] = cache
    Path(path).read_bytes()
    machine = find_machine()
    start_provider(machine, {})
    _, seconds = create_session(path, machine, {}, fused=fused)
    images = runtime.statistics()["images"] if fused and machine.gpu is not None else {}
    return Creation(seconds, images.get("embedded", 0), images.get("cached", 0), images.get("compiled", 0))


def measure(row: Row, folder: str, target: str | None, architecture: str | None, repeats: int) -> ColdStart:
    """One model, every way."""
    plain, fused, embedded, kernels = apart(prepare, row, folder, target, architecture)
    result = ColdStart(row.name, kernels, {way: [] for way in ("plain", *ALLOWED)})
    for repeat in range(repeats):
        cache, nothing = str(Path(folder) / f"cache{repeat}"), str(Path(folder) / f"nothing{repeat}")
        for way, path, place in (("plain", plain, nothing), ("empty cache", fused, cache),
                                 ("warm cache", fused, cache), ("embedded", embedded, nothing)):
            result.creations[way].append(apart(create, path, place, way != "plain"))
    return result


def show(found: Sequence[ColdStart], errors: Sequence[str]) -> str:
    """The table, medians."""
    rows = [[
        one.row, str(one.kernels), f"{one.median('plain'):.2f}",
        *(f"{one.median(way):.2f} ({one.more(way):+.2f})" for way in ALLOWED),
        " ".join(f"{c.embedded}/{c.cached}/{c.compiled}" for way in ALLOWED for c in one.creations[way][:1]),
        "pass" if one.passes else "FAIL",
    ] for one in found]
    head = ["model", "kernels", "plain s", *(f"{way} s" for way in ALLOWED), "embedded/cached/compiled", ""]
    bars = ", ".join(f"{way} {most:g} s" for way, most in ALLOWED.items())
    return "\n".join([f"Allowed beyond the plain model: {bars}.", "", table(head, rows),
                      *(f"\n- {error}" for error in errors)])


@click.command(help=__doc__.split("\n")[0])
@click.option("--rows", "names", metavar="NAME,...", help="Rows of the zoo whose names begin so; all by default.")
@click.option("--repeats", type=click.IntRange(1), default=2, show_default=True, help="Sessions of each way.")
@click.option("--target", help="GPU to plan for; by default the one at hand.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS,
              help="Folder for the results; benchmarks/results by default.")
def main(names: str | None, repeats: int, target: str | None, out: Path) -> None:
    rows = {row.model: row for row in reversed(choose(names))}.values()
    where = measured_on()
    architecture = apart(_architecture)
    found: list[ColdStart] = []
    errors: list[str] = []
    for row in sorted(rows, key=lambda row: row.name):
        with tempfile.TemporaryDirectory(prefix="onnxfuse-cold-") as folder:
            try:
                one = measure(row, folder, target or where.gpu, architecture, repeats)
            except ApartError as error:
                errors.append(f"{row.name}: {error.brief}")
                click.echo(f"  {row.name}: {error}", err=True)
                continue
        found.append(one)
        click.echo(f"  {row.name}: {'pass' if one.passes else 'FAIL'}", err=True)
    text = show(found, errors)
    content: dict[str, Any] = {"errors": errors, "models": [{**asdict(one), "passes": one.passes} for one in found]}
    click.echo(text)
    if found:
        path = write_results(out, "cold-start", where, content, text)
        click.echo(f"written: {path} and .json", err=True)
    sys.exit(bool(errors) or not all(one.passes for one in found))


def _architecture() -> str:
    return runtime.gpus()[0].architecture


if __name__ == "__main__":
    main()
