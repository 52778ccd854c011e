"""What benchmarks of single regions share: every way to run one, timed, PyTorch's time beside it, their command lines'
options, and how they end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import click
from common import RESULTS, ApartError, Environment, apart, environment, measured_on, timing, write_results
from onnx import ModelProto, parser

from onnxfuse import tuning
from onnxfuse.compiling import source_of
from onnxfuse.measuring import driver
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.costs.hardware import Profile, resolve_profile
from onnxfuse.region import Region
from onnxfuse.schedules import Kernel
from onnxfuse.tuning.subjects import Subject, subjects_of

Case = TypeVar("Case")
Found = TypeVar("Found")
Command = Callable[..., None]

NAMED = {"float16": "float16", "float": "float32"}
"""What PyTorch calls the types of the graphs."""

RUNS = 24
"""Runs of PyTorch's that are timed."""


@dataclass(frozen=True)
class RegionResult(Generic[Case]):
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


@dataclass(frozen=True)
class TorchResult(RegionResult[Case]):
    """The same, and the microseconds of PyTorch's own."""

    torch: float | None = None

    @property
    def share(self) -> float | None:
        """How many times as long as PyTorch's the best way takes; None where either was not timed."""
        best = self.ways[self.best]
        return best / self.torch if best and self.torch else None


Compared = TypeVar("Compared", bound=RegionResult[Any])

HEAD = ("case", "ways", "ONNX Runtime µs", "predicted µs", "own µs", "best µs", "best way", "TFLOP/s", "PyTorch µs",
        "best / PyTorch")
"""Columns of a table of such, whose cases have a name and ``flops``."""


def compared(one: TorchResult[Any]) -> list[str]:
    """A row of it."""
    best = one.ways[one.best]
    return [one.case.name, str(len(one.ways)), figure(one.runtime), figure(one.predicted), figure(one.ways[one.own]),
            figure(best), one.best if best else one.own, f"{one.case.flops / best / 1e6:.0f}" if best else "",
            figure(one.torch), f"{one.share:.2f}" if one.share else ""]


def graph(text: str, opset: int = 17) -> ModelProto:
    """A model of a graph's text."""
    return parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> g {text}')


def timed(case: Case, subject: Subject, predicted: float, dry_run: bool,
          named: Callable[[Kernel], str] = attrgetter("entry"), most: int | None = None) -> RegionResult[Case]:
    """All ways to run a region, timed, or of those that are generated the first ``most``; ``predicted``: seconds;
    ``named``: what tells them apart."""
    kernels = {named(kernel): kernel for kernel in subject.kernels.values()}
    generated = [name for name, kernel in kernels.items() if not kernel.plan.variants[0].calls]
    left_out = [] if most is None else generated[most:]
    kernels = {name: kernel for name, kernel in kernels.items() if name not in left_out}
    times: dict[str, float | None] = dict.fromkeys(kernels)
    runtime = None
    if not dry_run:
        tuning.find_timer().compile([source_of(kernel.source, kernel.plan) for kernel in kernels.values()])
        with timing(subject) as time_of:
            times = {name: time_of(kernel) for name, kernel in kernels.items()}
            runtime = time_of(None)
    return RegionResult(case, predicted * 1e6, runtime, times)


def timed_fusion(
    case: Any, is_meant: Callable[[Region], bool], profile: Profile, dry_run: bool, most: int | None = None
) -> RegionResult[Any]:
    """All ways to run the largest fusion that is meant of a case's graph, ``text``, timed, or as many as ``timed``
    says."""
    plan = optimise(graph(case.text), Options(target=profile, verify=False, database=False, eager=True))
    subject = max((each for each in subjects_of(plan)[0] if is_meant(each.fusion)),
                  key=lambda subject: len(subject.fusion.nodes))
    return timed(case, subject, plan.costs.kernel_seconds(subject.fusion), dry_run, most=most)


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
            click.echo(f"  {time.perf_counter() - start:4.0f} s  {name(case)}{_told(found[-1])}", err=True)
    return found


def _told(found: object) -> str:
    """What is known of a case while others are measured, which may be stopped."""
    if not isinstance(found, RegionResult) or not found.ways[found.best]:
        return ""
    return f": {found.best} {figure(found.ways[found.best])} µs, ONNX Runtime {figure(found.runtime)}"


def copy_rate() -> float:
    """Bytes a second of a large copy, read and written; on the GPU, in a process of its own."""
    return driver.device().copy_rate()


def torch_convolution(rank: int) -> tuple[Callable[..., Any], dict[str, Any]]:
    """PyTorch's convolution along so many axes, and what lays its tensors out channels-last where it has that."""
    import torch

    functions = (torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d)
    formats = {2: torch.channels_last, 3: torch.channels_last_3d}
    return functions[rank - 1], {"memory_format": formats.get(rank, torch.contiguous_format)}


def torch_microseconds(run: Callable[[int], object], sets: int) -> float:
    """GPU time of a run of PyTorch's, which is given the number of its set of inputs; these take turns.  In a process
    of its own.

    Raises:
        RuntimeError: PyTorch cannot run it.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    for turn in range(sets):
        run(turn)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for turn in range(RUNS):
            run(turn % sets)
        torch.cuda.synchronize()
    return float(sum(event.self_device_time_total for event in profiled.key_averages())) / RUNS


def torch_beside(
    results: Sequence[RegionResult[Case]], times: Callable[[Sequence[Case]], list[Found]]
) -> list[Found] | None:
    """What ``times`` says of PyTorch for each case, asked in a process of its own; None where PyTorch is not there."""
    try:
        return apart(times, [result.case for result in results])
    except ApartError as error:
        click.echo(f"  PyTorch: {error}", err=True)
        return None


def with_torch(results: list[Compared], times: Callable[[Sequence[Any]], list[float]]) -> list[Compared]:
    """The same with PyTorch's time of each case, if it is there."""
    found = torch_beside(results, times)
    return results if found is None else [
        replace(result, torch=time) for result, time in zip(results, found, strict=True)]


def conclude(
    shown: tuple[str, bool], what: str, where: Environment, content: dict[str, Any], out: Path | None
) -> NoReturn:
    """Show the table, write it down unless ``out`` is None, and exit by whether it passes."""
    text, passes = shown
    click.echo(text)
    if out is not None:
        path = write_results(out, what, where, content, text)
        click.echo(f"written: {path} and .json", err=True)
    sys.exit(not passes)


def typed_command(
    doc: str,
    what: str,
    cases: Callable[[str], Iterable[Any]],
    measure: Callable[[Any, Profile, bool, int | None], Compared],
    beside: Callable[[list[Compared]], list[Compared]],
    show: Callable[[list[Compared]], tuple[str, bool]],
) -> click.Command:
    """The command line of a benchmark whose cases come in each type of ``NAMED``.

    Args:
        doc: the benchmark's own; what: the name of its results.
        cases: those of a type; measure: one, for a GPU, or for a dry run, by so many ways; beside: PyTorch's times
            added.
        show: the table, and whether it passes.
    """
    @click.command(help=doc.split("\n\n")[0])
    @options
    @click.option("--torch/--no-torch", "compare", default=True, help="Whether to time PyTorch's too.")
    @click.option("--ways", type=click.IntRange(1), metavar="N",
                  help="Only the N generated ways of a case that come first, and what libraries have; all by default.")
    @click.option("--type", "named", type=click.Choice(list(NAMED.values())), default="float16", show_default=True,
                  help="Of inputs, weights and results.")
    def main(names: str | None, target: str | None, dry_run: bool, compare: bool, ways: int | None, named: str,
             out: Path) -> None:
        kind = next(kind for kind, each in NAMED.items() if each == named)
        where = apart(environment) if dry_run else measured_on("--dry-run")
        profile = resolve_profile(target or where.gpu or "H100")
        found = chosen(names, cases(kind), lambda case: case.name, lambda case: measure(case, profile, dry_run, ways))
        found = beside(found) if compare and not dry_run else found
        content = {"cases": [asdict(each) for each in found]}
        conclude(show(found), what if named == "float16" else f"{what}-{named}", where, content,
                 None if dry_run else out)

    return main


def options(command: Command) -> Command:
    """``--cases``, and what ``machine_options`` has."""
    cases = click.option("--cases", "names", metavar="NAME,...", help="Cases whose names begin so; all by default.")
    return cases(machine_options(command))


def machine_options(command: Command) -> Command:
    """``--target``, ``--dry-run`` and ``--out``."""
    for option in (
        click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS,
                     help="Folder for the results; benchmarks/results by default."),
        click.option("--dry-run", is_flag=True, help="Only name the ways; no GPU is needed."),
        click.option("--target", help="GPU to plan for; by default the one at hand."),
    ):
        command = option(command)
    return command
