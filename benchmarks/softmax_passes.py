"""Softmax over rows that do not stay in registers: kept in shared memory, its maximum and sum in one pass, and in two.

    python benchmarks/softmax_passes.py [--target GPU] [--dry-run]

The variants that stream, over rows and over columns, and those that split few long rows.  Of the three reads and a
write of two passes one pass saves a read, so that 1.3 times as quick is what memory would give; a row that shared
memory keeps saves two, twice as quick.  ``--dry-run`` names the kernels and times nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import geometric_mean

import click
from common import apart, entry, environment, measured_on, table, timing, write_results
from onnx import parser
from region_times import machine_options

from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.hardware import Profile, resolve_profile
from onnxfuse.schedules import Kernel, make_kernel, phases
from onnxfuse.schedules.kernel import STREAM
from onnxfuse.schedules.rows import IN_SHARED, SHARED
from onnxfuse.tuning.subjects import Subject, subjects_of

SHAPES = (((4096, 50_257), 1), ((2048, 100_352), 1), ((512, 131_072), 1), ((2, 8_388_608), 1), ((64, 4096, 256), 1),
          ((8, 65_536, 64), 1))
"""Shapes, and the axis that is normalised."""


@contextmanager
def two_passes() -> Iterator[None]:
    """Kernels that are made within find a row's maximum before they sum."""
    own = phases.online_sums
    phases.online_sums = lambda reductions: {}
    try:
        yield
    finally:
        phases.online_sums = own


def reading_again(subject: Subject, sizes: dict[str, int]) -> Kernel:
    """The kernel with its streaming or splitting variants alone."""
    kernel = make_kernel(subject.fusion.request(sizes, None), subject.fusion.kernel.schedule)
    assert isinstance(kernel, Kernel), kernel
    chosen = tuple(each for each in kernel.plan.variants if STREAM in each.name or each.name.startswith("split"))
    return replace(kernel, plan=replace(kernel.plan, variants=chosen))


def keeping(subject: Subject, sizes: dict[str, int]) -> Kernel | None:
    """The kernel that keeps a row in shared memory, or None where that holds none."""
    for schedule in ("rows", "split"):
        own = make_kernel(subject.fusion.request(sizes, None), schedule)
        if isinstance(own, Kernel) and SHARED in own.plan.variants[0].name:
            return own
        for choice in own.choices if isinstance(own, Kernel) else ():
            if dict(choice.settings).get("items") == IN_SHARED:
                made = make_kernel(subject.fusion.request(sizes, choice), schedule)
                assert isinstance(made, Kernel), made
                return made
    return None


@dataclass(frozen=True)
class Result:
    """A case: the kernel of one pass, and microseconds of the row kept, of one pass and of two."""

    case: str
    kernel: str
    kept: float | None = None
    one: float | None = None
    two: float | None = None

    @property
    def gain(self) -> float | None:
        """How many times as long two passes take as the quickest of the others."""
        return self.two / min(self.kept or self.one, self.one) if self.one and self.two else None


def measure(shape: tuple[int, ...], axis: int, kind: str, profile: Profile, dry_run: bool) -> Result:
    """A case, timed."""
    of = f"{kind}[{','.join(map(str, shape))}]"
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g ({of} x) => ({of} y) '
                               f"{{ s = Relu(x) y = Softmax <axis = {axis}> (s) }}")
    plan = optimise(model, Options(target=profile, least_gain=0.0, verify=False, database=False))
    (subject,), _ = subjects_of(plan)
    sizes, name = dict(plan.ledger.sizes), f"{kind} {' x '.join(map(str, shape))}"
    kept, one = keeping(subject, sizes), reading_again(subject, sizes)
    with two_passes():
        two = reading_again(subject, sizes)
    assert (one.phases, two.phases) == (2, 3)
    if dry_run:
        return Result(name, entry(kept or one))
    with timing(subject) as time_of:
        return Result(name, entry(kept or one), time_of(kept) if kept else None, time_of(one), time_of(two))


@click.command(help=__doc__.split("\n")[0])
@machine_options
def main(target: str | None, dry_run: bool, out: Path) -> None:
    where = apart(environment) if dry_run else measured_on("--dry-run")
    profile = resolve_profile(target or where.gpu or "H100")
    found = [measure(shape, axis, kind, profile, dry_run) for shape, axis in SHAPES for kind in ("float16", "float")]
    rows = [[each.case, each.kernel, *(f"{taken:.1f}" if taken else "" for taken in (each.kept, each.one, each.two)),
             f"{each.gain:.2f}" if each.gain else ""] for each in found]
    text = table(["case", "kernel", "kept (µs)", "one pass (µs)", "two passes (µs)", "two over the best"], rows)
    click.echo(text)
    if not dry_run:
        text += f"\n\nGeometric mean: {geometric_mean(each.gain for each in found if each.gain):.2f}."
        path = write_results(out, "softmax-passes", where, {"cases": [asdict(each) for each in found]}, text)
        click.echo(f"written: {path} and .json", err=True)


if __name__ == "__main__":
    main()
