"""What benchmarks of single regions share: every way to run one, timed, PyTorch's time beside it, their command lines'
options, and how they end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import click
import numpy as np
from common import RESULTS, Environment, environment, measured_on, timing, write_results
from onnx import ModelProto, helper, numpy_helper, parser
from processes import ApartError, apart

from onnxfuse import tuning
from onnxfuse.compiling import source_of
from onnxfuse.errors import OnnxfuseError
from onnxfuse.measuring import driver
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.costs.hardware import Profile, resolve_profile
from onnxfuse.region import Region
from onnxfuse.schedules import Kernel
from onnxfuse.tuning.subjects import Subject, subjects_of

Case = TypeVar("Case")
Found = TypeVar("Found")
Command = Callable[..., None]

NAMED = {"float16": "float16", "bfloat16": "bfloat16", "float": "float32"}
"""What PyTorch calls the types of the graphs."""

RUNS = 24
"""Runs of PyTorch's that are timed."""

STARTING, MOST = 60.0, 3600.0
"""Seconds that PyTorch may take to start, and to be timed where no fewer are asked."""

DRAWN, SCALE = 1 << 16, 0.02
"""How many numbers of constants are drawn, which repeat, and how large they are."""


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


def graph(text: str, opset: int = 17, weights: tuple[str, ...] = ()) -> ModelProto:
    """A model of a graph's text; inputs whose names begin as ``weights`` do are constants, of numbers that are
    drawn."""
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> g {text}')
    random = np.random.default_rng(0)
    for info in [info for info in model.graph.input if info.name.startswith(weights)]:
        kind = info.type.tensor_type
        drawn = (random.standard_normal(DRAWN) * SCALE).astype(helper.tensor_dtype_to_np_dtype(kind.elem_type))
        shape = [size.dim_value for size in kind.shape.dim]
        model.graph.initializer.append(numpy_helper.from_array(np.resize(drawn, shape), info.name))
        model.graph.input.remove(info)
    return model


@dataclass(frozen=True)
class Prepared(Generic[Case]):
    """A case's region, the seconds that are predicted of it, and the ways to run it, by the names of their kernels."""

    case: Case
    subject: Subject
    predicted: float
    kernels: Mapping[str, Kernel]

    @classmethod
    def of(cls, case: Case, subject: Subject, predicted: float, most: int | None = None,
           named: Callable[[Kernel], str] = attrgetter("entry")) -> Prepared[Case]:
        """All ways, or of those that are generated the first ``most``; ``named``: what tells them apart."""
        kernels = {named(kernel): kernel for kernel in subject.kernels.values()}
        generated = [name for name, kernel in kernels.items() if not kernel.plan.variants[0].calls]
        left_out = [] if most is None else generated[most:]
        return cls(case, subject, predicted, {
            name: kernel for name, kernel in kernels.items() if name not in left_out})

    @classmethod
    def fusion(cls, case: Any, is_meant: Callable[[Region], bool], profile: Profile, most: int | None = None
               ) -> Prepared[Any]:
        """The largest fusion that is meant of a case's graph, ``text`` with its ``weights``, where it has some."""
        model = graph(case.text, weights=getattr(case, "weights", ()))
        plan = optimise(model, Options(target=profile, verify=False, database=False, eager=True))
        subject = max((each for each in subjects_of(plan)[0] if is_meant(each.fusion)),
                      key=lambda subject: len(subject.fusion.nodes))
        return cls.of(case, subject, plan.costs.kernel_seconds(subject.fusion), most)

    def timed(self, dry_run: bool = False) -> RegionResult[Case]:
        """All of them timed."""
        times: dict[str, float | None] = dict.fromkeys(self.kernels)
        runtime = None
        if not dry_run:
            compile_all([self])
            with timing(self.subject) as time_of:
                times = {name: time_of(kernel) for name, kernel in self.kernels.items()}
                try:
                    runtime = time_of(None)
                except OnnxfuseError as error:  # it has no kernel for a node of this type
                    click.echo(f"  ONNX Runtime: {error}", err=True)
        return RegionResult(self.case, self.predicted * 1e6, runtime, times)


def compile_all(prepared: Iterable[Prepared[Any]]) -> None:
    """All kernels at once, on all processors."""
    tuning.find_timer().compile([
        source_of(kernel.source, kernel.plan) for each in prepared for kernel in each.kernels.values()])


def figure(microseconds: float | None) -> str:
    """For a table; nothing where nothing was timed."""
    return f"{microseconds:.2f}" if microseconds else ""


def meant(names: str | None, cases: Iterable[Case], name: Callable[[Case], str]) -> list[Case]:
    """The cases whose names begin as one of those given, separated by commas; all where none is."""
    wanted = tuple(each for each in (names or "").split(",") if each)
    return [case for case in cases if not wanted or name(case).startswith(wanted)]


def chosen(
    names: str | None, cases: Iterable[Case], name: Callable[[Case], str], measure: Callable[[Case], Found]
) -> list[Found]:
    """Measure the cases that are ``meant``."""
    start, found = time.perf_counter(), []
    for case in meant(names, cases, name):
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
    results: Sequence[RegionResult[Case]], times: Callable[[Sequence[Case], float], list[Found]], seconds: float = inf
) -> list[Found] | None:
    """What ``times`` says of PyTorch for each case within so many seconds, asked in a process of its own; None where
    PyTorch is not there."""
    try:
        return apart(times, [result.case for result in results], seconds, seconds=min(seconds, MOST) + STARTING)
    except ApartError as error:
        click.echo(f"  PyTorch: {error}", err=True)
        return None


def each_within(cases: Iterable[Case], time_of: Callable[[Case], Found], seconds: float, nothing: Found) -> list[Found]:
    """What is timed of each case; ``nothing`` of those that come once so many seconds are over."""
    until = time.monotonic() + seconds
    return [time_of(case) if time.monotonic() < until else nothing for case in cases]


def with_torch(
    results: Sequence[RegionResult[Any]], seconds: float, times: Callable[[Sequence[Any], float], list[float | None]]
) -> list[TorchResult[Any]]:
    """The same with PyTorch's time of each case, if it is there and there are ``seconds`` for it."""
    found = torch_beside(results, times, seconds) if seconds > 0 else None
    return [TorchResult(**vars(result), torch=time)
            for result, time in zip(results, found or [None for _ in results], strict=True)]


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
    cases: Callable[[str], Sequence[Any]],
    prepare: Callable[[Any, Profile, int | None], Prepared[Any]],
    beside: Callable[[list[RegionResult[Any]], float], list[Compared]],
    show: Callable[[list[Compared]], tuple[str, bool]],
) -> click.Command:
    """The command line of a benchmark whose cases come in types of ``NAMED``.

    Args:
        doc: the benchmark's own; what: the name of its results.
        cases: those of a type, if any; prepare: one, for a GPU, by so many ways.
        beside: results with PyTorch's times as far as there are seconds for them, none where these are 0.
        show: the table, and whether it passes.
    """
    @click.command(help=doc.split("\n\n")[0])
    @options
    @click.option("--torch/--no-torch", "compare", default=True, help="Whether to time PyTorch's too.")
    @ways_option
    @click.option("--type", "named", type=click.Choice([name for kind, name in NAMED.items() if cases(kind)]),
                  default="float16", show_default=True, help="Of inputs, weights and results.")
    @click.option("--within", type=click.FloatRange(min=0), default=inf, show_default="no limit", metavar="SECONDS",
                  help="Time no case once so many are over, nor PyTorch's; what was timed until then is written.")
    def main(names: str | None, target: str | None, dry_run: bool, compare: bool, ways: int | None, named: str,
             within: float, out: Path) -> None:
        until = time.monotonic() + within
        kind = next(kind for kind, each in NAMED.items() if each == named)
        where = apart(environment) if dry_run else measured_on("--dry-run")
        profile = resolve_profile(target or where.gpu or "H100")
        prepared = [prepare(case, profile, ways) for case in meant(names, cases(kind), attrgetter("name"))]
        if not dry_run:
            compile_all(prepared)
        timed = chosen(None, prepared, lambda each: each.case.name,
                       lambda each: each.timed(dry_run) if time.monotonic() < until else None)
        found = beside([each for each in timed if each is not None],
                       until - time.monotonic() if compare and not dry_run else 0.0)
        content = {"cases": [asdict(each) for each in found]}
        conclude(show(found), what if named == "float16" else f"{what}-{named}", where, content,
                 None if dry_run else out)

    return main


def options(command: Command) -> Command:
    """``--cases``, and what ``machine_options`` has."""
    cases = click.option("--cases", "names", metavar="NAME,...", help="Cases whose names begin so; all by default.")
    return cases(machine_options(command))


def ways_option(command: Command) -> Command:
    """``--ways``."""
    return click.option(
        "--ways", type=click.IntRange(1), metavar="N",
        help="Only the N generated ways of a case that come first, and what libraries have; all by default.")(command)


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
