"""What `onnxfuse optimize` takes, verification included, and what of that.

    python benchmarks/optimising.py [--rows bert,vit] [--models FOLDER] [--quick] [--jobs N] [--dry-run]

Each model is read, optimised and written in a process of its own, with an empty kernel cache, then with the cache that
this left, then as ``--no-verify`` has it, with nothing compiled or run; with ``--quick`` the first way alone.  No
database, and no measurement: their time is an option's.  At most 15 s are allowed for a row of the zoo with an empty
cache and 5 s with ``--no-verify``, 20 s for a file of ``--models``, such as those that `make test-models` fetches;
several beside one another (``--jobs``) take longer than each alone.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from common import RESULTS, ZOO, Environment, environment, hydrate, measured_on, table, write_results
from processes import ApartError, apart
from zoo_rows import choose

from onnxfuse.pipeline import Options, optimise
from onnxfuse.rewriting import save

ALLOWED, ALLOWED_FILES = 15.0, 20.0
"""Seconds, with an empty cache."""

ALLOWED_PLAIN = 5.0
"""Seconds of a row of the zoo with ``--no-verify``."""

WAYS = ("empty cache", "warm cache", "--no-verify")

STAGES = ("reading", "planning", "compiling", "rewriting", "checking", "comparing", "verifying", "writing")
"""What stages begin with, in their order; whatever begins otherwise counts as "else"."""


@dataclass(frozen=True)
class Subject:
    """A model to optimise: a row of the zoo, or a file."""

    name: str
    path: str
    dims: Mapping[str, int]
    allowed: float


@dataclass(frozen=True)
class Taken:
    """Seconds of one optimisation, of its stages, and what came of it."""

    seconds: float
    stages: dict[str, float]
    nodes: int
    summary: str
    taken_back: int = 0
    """Nodes whose kernels failed: with them goes the time that others would take."""


def optimised(subject: Subject, cache: str, target: str | None, verify: bool) -> Taken:
    """Optimise in this process, which has optimised none before."""
    os.environ["ONNXFUSE_CACHE_DIR"] = cache
    Path(cache).mkdir(exist_ok=True)
    stages: dict[str, float] = defaultdict(float)
    start = now = time.perf_counter()
    stage = STAGES[0]

    def tell(what: str, _done: int, _count: int) -> None:
        nonlocal now, stage
        stages[stage] += time.perf_counter() - now
        now, stage = time.perf_counter(), next((name for name in STAGES if what.startswith(name)), "else")

    options = Options(dims=subject.dims, target=target, verify=verify, database=False)
    done = optimise(subject.path, options, tell)
    tell("writing", 0, 0)
    save(done.lean, Path(cache) / "fused.onnx", source=done.loaded)
    tell("", 0, 0)
    summary = "skipped" if done.verification is None else done.verification.summary
    return Taken(time.perf_counter() - start, dict(stages), len(done.rewritten.placed), summary,
                 len(done.taken_back))


def subjects(names: str | None, models: Path | None, folder: str) -> Iterator[Subject]:
    """Rows of the zoo, hydrated into a folder one by one, or the models in a folder of the user's."""
    if models is not None:
        for path in sorted(models.rglob("*.onnx")):
            yield Subject(str(path.relative_to(models)), str(path), {}, ALLOWED_FILES)
        return
    for row in choose(names):
        path = Path(folder) / f"{row.model}.onnx"
        if not path.exists():
            path.write_bytes(hydrate().hydrate(ZOO / f"{row.model}.onnx.xz").SerializeToString())
        yield Subject(row.name, str(path), row.dims, ALLOWED)


def measure(subject: Subject, folder: str, target: str | None, quick: bool) -> dict[str, Taken]:
    """One model, every way or the first."""
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        return {way: apart(optimised, subject, cache, target, way != WAYS[-1]) for way in WAYS[:1 if quick else None]}


def measured(subjects: Iterable[Subject], folder: str, target: str | None, how: tuple[bool, int]
             ) -> tuple[list[tuple[Subject, dict[str, Taken]]], list[str]]:
    """All models in their order, and what went wrong; ``how``: whether the first way alone, and how many at a time."""
    quick, jobs = how
    found: list[tuple[Subject, dict[str, Taken]]] = []
    errors: list[str] = []
    with ThreadPoolExecutor(jobs) as pool:
        for subject, future in [(each, pool.submit(measure, each, folder, target, quick)) for each in subjects]:
            try:
                found.append((subject, future.result()))
            except ApartError as error:
                errors.append(f"{subject.name}: {error.brief}")
                click.echo(f"  {errors[-1]}", err=True)
            else:
                click.echo(f"  {subject.name}: {found[-1][1][WAYS[0]].seconds:.1f} s", err=True)
    return found, errors


def faults(subject: Subject, taken: Mapping[str, Taken]) -> list[str]:
    """What a model misses."""
    first, plain = taken[WAYS[0]], taken.get(WAYS[-1])
    slow = plain is not None and subject.allowed == ALLOWED and plain.seconds > ALLOWED_PLAIN
    back = f"FAIL: {first.taken_back} nodes taken back" if first.taken_back else ""
    return list(filter(None, ("FAIL" if first.seconds > subject.allowed else "", "FAIL: --no-verify" if slow else "",
                               back)))


def show(found: Sequence[tuple[Subject, dict[str, Taken]]], errors: Sequence[str]) -> str:
    """The table."""
    rows = [[
        subject.name, str(taken[WAYS[0]].nodes), *(f"{taken[way].seconds:.1f}" if way in taken else "" for way in WAYS),
        ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in taken[WAYS[0]].stages.items() if seconds >= 0.05),
        taken[WAYS[0]].summary, ", ".join(faults(subject, taken)) or "pass",
    ] for subject, taken in found]
    head = ["model", "fused nodes", *(f"{way} s" for way in WAYS), "of the first", "verification", ""]
    allowed = (f"Allowed with an empty cache: {ALLOWED:g} s, {ALLOWED_FILES:g} s for a file of one's own; with "
               f"--no-verify {ALLOWED_PLAIN:g} s.")
    return "\n".join([allowed, "", table(head, rows), *(f"\n- {error}" for error in errors)])


@click.command(help=__doc__.split("\n")[0])
@click.option("--rows", "names", metavar="NAME,...", help="Rows of the zoo whose names begin so; all by default.")
@click.option("--models", type=click.Path(path_type=Path, exists=True, file_okay=False), metavar="FOLDER",
              help="All models in a folder, at the sizes that are assumed for them, in place of the zoo.")
@click.option("--target", help="GPU to plan for; by default the one at hand.")
@click.option("--quick", is_flag=True, help="With an empty kernel cache alone.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, help="Models at a time.  [default: 1]")
@click.option("--dry-run", is_flag=True, help="Where there is no GPU: kernels are not run, and no bar counts.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS,
              help="Folder for the results; benchmarks/results by default.")
def main(names: str | None, models: Path | None, target: str | None, quick: bool, jobs: int, dry_run: bool, out: Path
         ) -> None:
    where: Environment = apart(environment) if dry_run else measured_on("--dry-run")
    with tempfile.TemporaryDirectory(prefix="onnxfuse-optimising-") as folder:
        found, errors = measured(subjects(names, models, folder), folder, target or where.gpu, (quick, jobs))
    text = show(found, errors)
    click.echo(text)
    if found:
        content = {"errors": errors, "models": [
            {"model": subject.name, "allowed": subject.allowed,
             "taken": {way: asdict(one) for way, one in taken.items()}}
            for subject, taken in found]}
        path = write_results(out, "optimising", where, content, text)
        click.echo(f"written: {path} and .json", err=True)
    missed = [subject for subject, taken in found if faults(subject, taken)]
    sys.exit(bool(errors) or (bool(missed) and not dry_run))


if __name__ == "__main__":
    main()
