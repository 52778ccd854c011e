"""What ways.py and attention.py share: every way to run one region, timed, and their command lines' options."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Generic, TypeVar

import click
from common import RESULTS, entry, timing
from onnx import ModelProto, parser

from onnxfuse import tuning
from onnxfuse.compiling import source_of
from onnxfuse.optimised import Optimised
from onnxfuse.tuning.subjects import Subject

Case = TypeVar("Case")
Found = TypeVar("Found")
Command = Callable[..., None]


@dataclass(frozen=True)
class Result(Generic[Case]):
    """A case: what is predicted, what ONNX Runtime's own nodes take, and every way by its kernel's name, the schedule's
    own first; all in microseconds."""

    case: Case
    predicted: float
    runtime: float | None
    ways: dict[str, float | None]

    @property
    def own(self) -> str:
        """The schedule's own way."""
        return next(iter(self.ways))

    @property
    def best(self) -> str:
        """The quickest of those that were timed."""
        return min(self.ways, key=lambda way: self.ways[way] or inf)


def graph(text: str) -> ModelProto:
    """A model of a graph's text."""
    return parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g {text}')


def timed(case: Case, subject: Subject, plan: Optimised, predicted: float, dry_run: bool) -> Result[Case]:
    """All ways to run a region, timed; ``predicted``: seconds."""
    kernels = {entry(kernel): kernel for kernel in subject.kernels(plan.ledger.sizes).values()}
    times: dict[str, float | None] = dict.fromkeys(kernels)
    runtime = None
    if not dry_run:
        tuning.find_timer().compile([source_of(kernel.source, kernel.plan) for kernel in kernels.values()])
        with timing(subject, plan) as time_of:
            times = {name: time_of(kernel) for name, kernel in kernels.items()}
            runtime = time_of(None)
    return Result(case, predicted * 1e6, runtime, times)


def figure(microseconds: float | None) -> str:
    """For a table; nothing where nothing was timed."""
    return f"{microseconds:.2f}" if microseconds else ""


def chosen(
    names: str | None, cases: Iterable[Case], name: Callable[[Case], str], measure: Callable[[Case], Found]
) -> list[Found]:
    """Measure the cases whose names begin as one of those given, separated by commas; all where none is."""
    wanted, start = tuple(each for each in (names or "").split(",") if each), time.perf_counter()
    found = []
    for case in cases:
        if not wanted or name(case).startswith(wanted):
            found.append(measure(case))
            click.echo(f"  {time.perf_counter() - start:4.0f} s  {name(case)}", err=True)
    return found


def options(command: Command) -> Command:
    """``--cases``, ``--target``, ``--dry-run`` and ``--out``."""
    for option in (
        click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS,
                     help="Folder for the results; benchmarks/results by default."),
        click.option("--dry-run", is_flag=True, help="Only name the ways; no GPU is needed."),
        click.option("--target", help="GPU to plan for; by default the one at hand."),
        click.option("--cases", "names", metavar="NAME,...", help="Cases whose names begin so; all by default."),
    ):
        command = option(command)
    return command
