"""Rows that are too long for registers: every way to run them, and the one that is taken for what the compiler says.

    python benchmarks/spills.py [--lengths 40960,65536] [--cases softmax] [--target GPU] [--dry-run]
                                [--from RESULTS.json]

Softmax and layer norm over long rows, of one tensor and of the sum of two.  Where the schedule's own way spills, all
ways are timed.  Passes where what is taken (``planning.spills``) takes no longer than the schedule's own way, but for
noise, and in the mean no more than 5% longer than the best.  ``--dry-run`` compiles and times nothing; ``--from`` takes
the times of an earlier run, and judges what would be taken now.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import geometric_mean

import click
import onnx
from common import RESULTS, Environment, environment, measured_on, table, timing, write_results
from onnx import parser
from processes import apart

from onnxfuse.compiling import ReadBack
from onnxfuse.errors import KernelError
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.costs.hardware import Profile, resolve_profile
from onnxfuse.runtime.figures import KernelFigures
from onnxfuse.schedules import Kernel
from onnxfuse.tuning.subjects import subjects_of

LENGTHS = (32768, 40960, 49152, 65536)
TYPES = ("float16", "float")
ELEMENTS = 1 << 24
"""Of a tensor, about: blocks enough for every GPU, two at least for each multiprocessor of a large one."""

NOISE, MEAN = 1.03, 1.05
"""What is taken may take so many times as long as the schedule's own way, and in the mean as the best."""

NORMS = {"softmax": "y = Softmax <axis = -1> (s)", "layer-norm": "y = LayerNormalization <axis = -1> (s, w, b)"}


@dataclass(frozen=True)
class Way:
    """A way to run a case: the kernel's name, what the compiler made of it, and its time."""

    kernel: str
    registers: int
    spilled_bytes: int
    microseconds: float | None


@dataclass(frozen=True)
class SpillResult:
    """A case: the schedule's own way, the one that is taken, and all that were timed."""

    case: str
    own: Way
    taken: Way
    ways: tuple[Way, ...]

    @property
    def best(self) -> Way:
        """The quickest."""
        return min(self.ways, key=lambda way: way.microseconds or 0.0)


@dataclass(frozen=True)
class SpillCase:
    """A norm over rows of a length, of the sum of ``tensors`` tensors."""

    norm: str
    kind: str
    tensors: int
    length: int

    @property
    def name(self) -> str:
        return f"{self.norm} {self.kind}, {self.tensors} x {self.length}"


def cases(lengths: Sequence[int]) -> Iterator[SpillCase]:
    """All of these lengths."""
    return (SpillCase(*each) for each in product(NORMS, TYPES, (1, 2), lengths))


def model_of(case: SpillCase) -> onnx.ModelProto:
    """A case as a model."""
    kind, length = case.kind, case.length
    rows = max(ELEMENTS // length, 264)
    reads = [f"{kind}[{rows},{length}] x{number}" for number in range(case.tensors)]
    weights = [f"{kind}[{length}] {name}" for name in ("w", "b")] if "w" in NORMS[case.norm] else []
    total = "s = Identity(x0)" if case.tensors == 1 else "s = Add(x0, x1)"
    return parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> g ({", ".join(reads + weights)}) => ({kind}[{rows},{length}] y) '
        f"{{ {total} {NORMS[case.norm]} }}")


def measure(case: SpillCase, profile: Profile, dry_run: bool) -> SpillResult:
    """All ways to run a case, timed where the schedule's own spills."""
    model = model_of(case)
    plain, compiled = (
        optimise(model, Options(target=profile, least_gain=0.0, verify=False, database=False, compile=compile))
        for compile in (False, True)
    )
    (subject,), _ = subjects_of(plain)
    (taken,) = compiled.plan.fusions
    reading, kernels = ReadBack(profile.architecture), [subject.fusion.kernel]
    times: list[float | None] = [None]
    if _figures(reading, kernels)[0].spilled_bytes:
        kernels = list(subject.kernels.values())
        times = [None] * len(kernels)
        if not dry_run:
            with timing(subject) as time_of:
                times = [time_of(each) for each in kernels]
    ways = [Way(kernel.entry, found.registers, found.spilled_bytes, microseconds)
            for kernel, found, microseconds in zip(kernels, _figures(reading, kernels), times, strict=True)]
    place = next(place for place, kernel in enumerate(kernels) if kernel.choice == taken.kernel.choice)
    return SpillResult(case.name, ways[0], ways[place], tuple(ways))


def timed(result: SpillResult, times: Mapping[str, float | None]) -> SpillResult:
    """A case with times of its kernels."""
    def way(each: Way) -> Way:
        return replace(each, microseconds=times.get(each.kernel))

    return SpillResult(result.case, way(result.own), way(result.taken), tuple(
        each for each in map(way, result.ways) if each.microseconds is not None))


def _figures(reading: ReadBack, kernels: Sequence[Kernel]) -> list[KernelFigures]:
    """Of the kernels that run first.

    Raises:
        KernelError: one does not compile, or the compiler does not say what it made.
    """
    found = []
    for kernel, read in zip(kernels, reading.figures(kernels), strict=True):
        if isinstance(read, KernelError):
            raise read
        if read is None:
            raise KernelError(f"the compiler does not say what it made of {kernel.entry}")
        found.append(read[kernel.entry])
    return found


def show(found: Sequence[SpillResult]) -> tuple[str, bool]:
    """The table, and whether it passes."""
    rows, over, slower = [], [], 0
    for result in found:
        own, taken = result.own, result.taken
        best = result.best if result.ways else own
        cells = [result.case, own.kernel, str(own.spilled_bytes), taken.kernel, str(taken.spilled_bytes)]
        if own.microseconds and taken.microseconds and best.microseconds:
            over.append(taken.microseconds / best.microseconds)
            slower += taken.microseconds > NOISE * own.microseconds
            cells += [f"{own.microseconds:.2f}", f"{taken.microseconds:.2f}", f"{best.microseconds:.2f}", best.kernel]
        else:
            cells += ["", "", "", ""]
        rows.append(cells)
    head = ["case", "own way", "bytes", "taken", "bytes", "own µs", "taken µs", "best µs", "best way"]
    text = table(head, rows) + "\n\nBytes: that a thread writes and reads because registers do not hold its values."
    if not over:
        return text, True
    near = sum(each <= MEAN for each in over)
    return (f"{text}\nWhat is taken takes {geometric_mean(over):.3f} times as long as the best way in the mean, is "
            f"within {MEAN - 1:.0%} of it in {near} of {len(over)} cases, and slower than the own way in {slower}."
            ), geometric_mean(over) <= MEAN and not slower


@click.command(help=__doc__.split("\n")[0])
@click.option("--lengths", default=",".join(map(str, LENGTHS)), show_default=True, metavar="N,...",
              help="Elements of a row.")
@click.option("--cases", "names", default="", metavar="NAME,...", help="Cases whose names begin so; all by default.")
@click.option("--target", help="GPU to plan for; by default the one at hand.")
@click.option("--dry-run", is_flag=True, help="Only compile; no GPU is needed.")
@click.option("--from", "source", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="FILE",
              help="An earlier run's JSON: its times, and what is taken now.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS,
              help="Folder for the results; benchmarks/results by default.")
def main(lengths: str, names: str, target: str | None, dry_run: bool, source: Path | None, out: Path) -> None:
    earlier = None if source is None else json.loads(source.read_text())
    if earlier is None:
        where = apart(environment) if dry_run else measured_on("--dry-run")
    else:
        where = Environment(**earlier["environment"])
    known = {} if earlier is None else {
        each["case"]: {way["kernel"]: way["microseconds"] for way in each["ways"]} for each in earlier["cases"]}
    profile, start = resolve_profile(target or where.gpu or "H100"), time.perf_counter()
    found = []
    for case in cases([int(length) for length in lengths.split(",")]):
        if case.name.startswith(tuple(names.split(","))):
            result = measure(case, profile, dry_run or earlier is not None)
            found.append(result if earlier is None else timed(result, known.get(result.case, {})))
            click.echo(f"  {time.perf_counter() - start:4.0f} s  {case.name}", err=True)
    text, passes = show(found)
    if earlier is not None:
        text += f"\nTimes are those of the run above; what is taken is by the rule at commit {environment().commit}."
    click.echo(text)
    if not dry_run:
        path = write_results(out, "spills", where, {"cases": [asdict(each) for each in found]}, text)
        click.echo(f"written: {path} and .json", err=True)
    sys.exit(not passes)


if __name__ == "__main__":
    main()
