"""What the benchmarks share: the checkout they measure, processes of their own, tables, and the files they leave."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import lzma
import os
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import click
from processes import Ready, apart

if TYPE_CHECKING:
    from onnxfuse.schedules import Kernel
    from onnxfuse.tuning.subjects import Subject

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results"
ZOO = HERE / "zoo"

# The benchmarks measure the checkout they lie in, installed or not.
sys.path.insert(0, str(ROOT))

Command = Callable[..., None]


@dataclass(frozen=True)
class Environment:
    """What was measured on; None where it cannot be told."""

    date: str
    gpu: str | None
    driver: str | None
    cuda: str | None
    versions: dict[str, str]
    commit: str | None

    def lines(self) -> list[str]:
        """For a table's head."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        gpu = f"{self.gpu}, driver {self.driver}, CUDA {self.cuda}" if self.gpu else "no GPU"
        return [f"{self.date}, {gpu}", f"{versions}, commit {self.commit or 'unknown'}"]


def environment() -> Environment:
    """The environment of this process.  It opens the GPU: call it through ``apart``."""
    from onnxfuse.errors import KernelError
    from onnxfuse.measuring import driver
    from onnxfuse.version import __version__

    try:
        gpu: driver.Device | None = driver.device()
    except KernelError:
        gpu = None
    versions = {"onnxfuse": __version__}
    for package in ("onnxruntime-gpu", "onnxruntime", "cupy-cuda13x", "cupy-cuda12x", "cupy", "onnx", "numpy"):
        name = package.split("-")[0]
        try:
            versions.setdefault(name, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            continue
    return Environment(
        date.today().isoformat(), gpu.name if gpu else None, driver.driver_version(), gpu.cuda if gpu else None,
        versions, _commit(),
    )


def measured_on(instead: str = "") -> Environment:
    """The environment, where there is a GPU to measure on.

    Args:
        instead: the option that does what needs none, or "".

    Raises:
        click.ClickException: there is no GPU.
    """
    where = apart(environment)
    if where.gpu is None:
        other = f"; {instead} does what needs none" if instead else ""
        raise click.ClickException(f"there is no GPU here, and this measures on one{other}")
    return where


def _commit() -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
                              capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


@contextmanager
def timing(subject: Subject) -> Iterator[Callable[[Kernel | None], float]]:
    """What tells the microseconds of a kernel of a region on the GPU at hand, or, for None, of ONNX Runtime on the same
    nodes.

    Raises:
        KernelError: there is no GPU, or a kernel does not run.
    """
    from onnxfuse import tuning
    from onnxfuse.tuning.models import bound_names, feeds_of, kernel_model, runtime_model, weights_of

    body = runtime_model(subject)
    with tuning.find_timer().bench(feeds_of(body, subject), weights_of(body), bound_names(subject)) as bench:
        def time_of(kernel: Kernel | None) -> float:
            model = body if kernel is None else kernel_model(body, subject, kernel)
            return bench.time(model, fused=kernel is not None).microseconds

        yield time_of


def telling(ready: Ready) -> Callable[[str], None]:
    """What ``bench`` may tell its progress, so that one is ``ready`` where its runs begin to be timed."""
    from onnxfuse.measuring.bench import TIMING

    return lambda stage: ready() if stage == TIMING else None


def hydrate() -> ModuleType:
    """The module zoo/hydrate.py, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("hydrate", ZOO / "hydrate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


networks_option = click.option(
    "--networks", type=click.Path(path_type=Path, exists=True, file_okay=False), default=ZOO, show_default=False,
    help="Folder of the models, such as benchmarks/convolutions; the zoo by default.")

abreast_option = click.option(
    "--abreast", type=click.IntRange(1), default=1, show_default=True, metavar="N",
    help="Processes that get ready at once, which takes memory of the GPU; one is timed at a time.")

quantised_option = click.option(
    "--quantised", "integers", is_flag=True, help="With products and convolutions of 8-bit integers.")


def row_options(dry_run: str, seconds: float) -> Callable[[Command], Command]:
    """Options of a benchmark that profiles rows of the zoo: its function takes ``names``, ``target``, ``dry_run``,
    ``jobs``, ``seconds`` and ``out``.

    Args:
        dry_run: help text of ``--dry-run``.
        seconds: default of ``--seconds``.
    """
    options = (
        click.option("--rows", "names", metavar="NAME,...", help="Rows whose names begin so; all by default."),
        click.option("--target", help="GPU to plan for; by default the one at hand."),
        click.option("--dry-run", is_flag=True, help=dry_run),
        click.option("--jobs", type=int, default=min(8, os.cpu_count() or 1), show_default=True,
                     help="Models prepared at once."),
        click.option("--seconds", type=float, default=seconds, show_default=True,
                     help="Most that one row may take under the profiler."),
        click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS,
                     help="Folder for the results; benchmarks/results by default."),
    )

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@contextmanager
def packed(database: Path, *, keep: bool = False) -> Iterator[Path]:
    """A database of measurements as a file that SQLite opens: itself, or, where its name ends in .xz, unpacked.

    Args:
        keep: pack what is in it in the end, in place of what was; a file that is not there is made.
    """
    if database.suffix != ".xz":
        yield database
        return
    with tempfile.TemporaryDirectory(prefix="onnxfuse-database-") as folder:
        path = Path(folder) / "measurements.sqlite"
        if database.exists() or not keep:
            path.write_bytes(lzma.decompress(database.read_bytes()))
        yield path
        if keep and path.exists():
            with closing(sqlite3.connect(path)) as connection:
                connection.execute("VACUUM")
            written = database.with_name(f"{database.name}.new")
            written.write_bytes(lzma.compress(path.read_bytes()))
            written.replace(database)


def find_tool(name: str) -> str:
    """A tool of the CUDA toolkit: on the path, or under ``CUDA_HOME`` or ``CUDA_PATH``.

    Raises:
        SystemExit: it is nowhere.
    """
    folders = [str(Path(os.environ[key]) / "bin") for key in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(key)]
    found = shutil.which(name) or shutil.which(name, path=os.pathsep.join(folders))
    if found is None:
        sys.exit(f"{name} was not found; put its folder on PATH, or set CUDA_HOME to the toolkit's")
    return found


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, aligned for the terminal as well; the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        others = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return "| " + " | ".join([cells[0].ljust(widths[0]), *others]) + " |"

    rule = "|" + "|".join([":" + "-" * (widths[0] + 1), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return "\n".join([line(head), rule, *map(line, rows)])


def _command() -> str | None:
    """The command line that measures the same again; None where no benchmark was started by one."""
    script = Path(sys.argv[0]).resolve()
    return shlex.join(["python", f"benchmarks/{script.name}", *sys.argv[1:]]) if script.parent == HERE else None


def write_results(folder: Path, what: str, where: Environment, content: dict[str, Any], text: str) -> Path:
    """Write ``<date>-<gpu>-<what>.json`` and ``.md``; returns the path of the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    gpu = re.sub(r"[^a-z0-9]+", "-", (where.gpu or "cpu").lower().removeprefix("nvidia ")).strip("-")
    stem = folder / f"{where.date}-{gpu}-{what}"
    command = _command()
    stem.with_suffix(".json").write_text(
        json.dumps({"environment": asdict(where), "command": command, **content}, indent=1) + "\n")
    head = "\n".join(f"{line}  " for line in [*where.lines(), *([f"`{command}`"] if command else [])])
    stem.with_suffix(".md").write_text(f"# {what.replace('-', ' ').capitalize()}\n\n{head}\n\n{text}\n")
    return stem.with_suffix(".md")
