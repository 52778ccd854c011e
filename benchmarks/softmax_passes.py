"""Softmax over rows that do not stay in registers: its maximum and sum in one pass, and in two.

    python benchmarks/softmax_passes.py [--target GPU] [--dry-run]

The variants that stream, over rows and over columns, and those that split few long rows.  Of the three reads and a
write of two passes a read is saved, so that 1.3 times as quick is what memory would give.  ``--dry-run`` names the
kernels and times nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean

import click
from common import RESULTS, apart, entry, environment, table, timing, write_results
from onnx import parser

from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.hardware import Profile, resolve_profile
from onnxfuse.schedules import Kernel, make_kernel, phases
from onnxfuse.schedules.kernel import STREAM
from onnxfuse.tuning.subjects import Subject, subjects_of

SHAPES = (((4096, 50_257), 1), ((512, 131_072), 1), ((2, 8_388_608), 1), ((64, 4096, 256), 1), ((8, 65_536, 64), 1))
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


def measure(shape: tuple[int, ...], axis: int, kind: str, profile: Profile, dry_run: bool) -> tuple[str, float, float]:
    """The kernel's name, and microseconds in one pass and in two."""
    of = f"{kind}[{','.join(map(str, shape))}]"
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g ({of} x) => ({of} y) '
                               f"{{ s = Relu(x) y = Softmax <axis = {axis}> (s) }}")
    plan = optimise(model, Options(target=profile, least_gain=0.0, verify=False, database=False))
    (subject,), _ = subjects_of(plan)
    one = reading_again(subject, dict(plan.ledger.sizes))
    with two_passes():
        two = reading_again(subject, dict(plan.ledger.sizes))
    assert (one.phases, two.phases) == (2, 3)
    if dry_run:
        return entry(one), 0.0, 0.0
    with timing(subject, plan) as time_of:
        return entry(one), time_of(one), time_of(two)


@click.command(help=__doc__.split("\n")[0])
@click.option("--target", help="GPU to plan for; by default the one at hand.")
@click.option("--dry-run", is_flag=True, help="Only name the kernels; no GPU is needed.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=RESULTS,
              help="Folder for the results; benchmarks/results by default.")
def main(target: str | None, dry_run: bool, out: Path) -> None:
    where = apart(environment)
    profile, found = resolve_profile(target or where.gpu or "H100"), []
    for shape, axis in SHAPES:
        for kind in ("float16", "float"):
            kernel, one, two = measure(shape, axis, kind, profile, dry_run)
            found.append({"case": f"{kind} {' x '.join(map(str, shape))}", "kernel": kernel, "one": one, "two": two})
    rows = [[each["case"], each["kernel"], f"{each['one']:.1f}", f"{each['two']:.1f}",
             f"{each['two'] / each['one']:.2f}" if each["one"] else ""] for each in found]
    text = table(["case", "kernel", "one pass (µs)", "two passes (µs)", "two over one"], rows)
    click.echo(text)
    if not dry_run:
        text += f"\n\nGeometric mean: {geometric_mean(each['two'] / each['one'] for each in found):.2f}."
        path = write_results(out, "softmax-passes", where, {"cases": found}, text)
        click.echo(f"written: {path} and .json", err=True)


if __name__ == "__main__":
    main()
