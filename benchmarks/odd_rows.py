"""Rows whose length no vector divides: by vectors from each row's first whole one on, and element by element.

    python benchmarks/odd_rows.py [--target GPU] [--dry-run]

Each case: by vectors, the schedule's own way and, where it has others, those in shared memory, for short rows all that
tuning may choose; with the variants that stream or split alone; element by element, the schedule's own way before
vectors began anywhere in a row; and with rows as long as the next length that vectors divide, which is what the first
can come to.  The quickest kernel by vectors is named; the JSON file has all of them.

Expected, of one H200 at 4.31 TB/s: a softmax of 4,096 rows of 50,257 float16 moves 823 MB, 191 µs; it took 316 to
320 µs element by element, and is to take about as long as rows of 50,264, 250 µs or less: 1.3 times less.  Of float,
1.65 GB, 382 µs; 529 before, 430 or less.  What streams is read once more, 1.24 GB and 287 µs of float16 at most.
Rows of 1,025 and 4,097 are to gain as much or nothing; where one takes longer, ``LONG_ODD_ROW`` is to be raised.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from statistics import geometric_mean

import click
from common import environment, measured_on, table, timing, write_results
from onnx import parser
from processes import apart
from region_times import machine_options
from softmax_passes import reading_again

from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.costs.hardware import Profile, resolve_profile
from onnxfuse.schedules import Kernel, make_kernel
from onnxfuse.schedules.reductions import reduction
from onnxfuse.schedules.reductions.peel import LONG_ODD_ROW
from onnxfuse.schedules.reductions.rows import IN_SHARED
from onnxfuse.tuning.subjects import Subject, subjects_of

SHAPES = ((4096, 50_257), (2048, 100_353), (4096, 16_385), (16_384, 4097), (65_536, 1025), (262_144, 197),
          (2, 8_388_609))

NORMS = {
    "softmax": ("", "y = Softmax(s)"),
    "layer-norm": (", T[L] w, T[L] b", "y = LayerNormalization(s, w, b)"),
}


@contextmanager
def element_by_element() -> Iterator[None]:
    """Kernels that are made within have vectors only where these divide the rows."""
    own = reduction._peeled
    reduction._peeled = lambda *_: None
    try:
        yield
    finally:
        reduction._peeled = own


@dataclass(frozen=True)
class OddRowsResult:
    """A case: its quickest kernel by vectors, the bytes that it must move and their microseconds at the rate of a copy,
    and microseconds of that kernel, streaming or split, element by element, and of rows that vectors divide; and of all
    kernels by vectors, by name."""

    case: str
    kernel: str
    nbytes: int
    least: float
    own: float | None = None
    again: float | None = None
    elements: float | None = None
    divided: float | None = None
    ways: dict[str, float] = field(default_factory=dict)

    @property
    def gain(self) -> float | None:
        """How many times as long it takes element by element."""
        return self.elements / self.own if self.own and self.elements else None


def planned(norm: str, kind: str, shape: tuple[int, int], profile: Profile) -> tuple[Optimised, Subject]:
    """A case's plan, and its region."""
    inputs, text = NORMS[norm]
    rows, length = shape
    graph = f"g (T[{rows},{length}] x{inputs}) => (T[{rows},{length}] y) {{ s = Relu(x) {text} }}"
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> '
                               f"{graph.replace('T[', f'{kind}[').replace('[L]', f'[{length}]')}")
    plan = optimise(model, Options(target=profile, least_gain=0.0, verify=False, database=False))
    (subject,), _ = subjects_of(plan)
    return plan, subject


def ways(subject: Subject, sizes: dict[str, int]) -> list[Kernel]:
    """The schedule's own way and those in shared memory where that peels, else all that peel."""
    own = make_kernel(subject.fusion.request(sizes, None), subject.fusion.kernel.schedule)
    assert isinstance(own, Kernel), own
    told = [make_kernel(subject.fusion.request(sizes, choice), own.schedule) for choice in own.choices
            if not peels(own) or dict(choice.settings).get("items") == IN_SHARED]
    found = [kernel for kernel in (own, *told) if isinstance(kernel, Kernel) and peels(kernel)]
    assert found, own.plan.variants[0].name
    return found


def peels(kernel: Kernel) -> bool:
    """Whether vectors begin anywhere in the rows of a kernel's first variant."""
    return "peeled" in kernel.plan.variants[0].name


def measure(norm: str, kind: str, shape: tuple[int, int], profile: Profile, dry_run: bool) -> OddRowsResult:
    """A case, timed."""
    with element_by_element():
        plan, subject = planned(norm, kind, shape, profile)
        sizes = dict(plan.ledger.sizes)
        elements = make_kernel(subject.fusion.request(sizes, None), subject.fusion.kernel.schedule)
    assert isinstance(elements, Kernel) and not peels(elements)
    found = ways(subject, sizes)
    nbytes = 2 * prod(shape) * (2 if kind == "float16" else 4)
    result = OddRowsResult(f"{norm}, {kind} {' x '.join(map(str, shape))}", found[0].entry, nbytes,
                           1e6 * nbytes / profile.bandwidth)
    if dry_run:
        return result
    with timing(subject) as time_of:
        times = {kernel.entry: time_of(kernel) for kernel in found}
        best = min(times, key=times.__getitem__)
        again = time_of(reading_again(subject, sizes)) if shape[1] >= LONG_ODD_ROW else None
        result = replace(
            result, kernel=best, own=times[best], again=again, elements=time_of(elements), ways=times)
    _, whole = planned(norm, kind, (shape[0], -(-shape[1] // 8) * 8), profile)
    with timing(whole) as time_of:
        divided = make_kernel(whole.fusion.request(whole.sizes, None), whole.fusion.kernel.schedule)
        assert isinstance(divided, Kernel), divided
        return replace(result, divided=time_of(divided))


@click.command(help=__doc__.split("\n")[0])
@machine_options
def main(target: str | None, dry_run: bool, out: Path) -> None:
    where = apart(environment) if dry_run else measured_on("--dry-run")
    profile = resolve_profile(target or where.gpu or "H100")
    found = [measure(norm, kind, shape, profile, dry_run)
             for norm in NORMS for shape in SHAPES for kind in ("float16", "float")]
    head = ["case", "kernel", "MB", "at a copy's rate (µs)", "by vectors (µs)", "streaming or split (µs)",
            "by elements (µs)", "next length that vectors divide (µs)", "by elements over by vectors"]
    rows = [[each.case, each.kernel, f"{each.nbytes / 1e6:.0f}",
             *(f"{taken:.1f}" if taken else "" for taken in (
                 each.least, each.own, each.again, each.elements, each.divided)),
             f"{each.gain:.2f}" if each.gain else ""] for each in found]
    text = table(head, rows)
    click.echo(text)
    if not dry_run:
        text += f"\n\nGeometric mean: {geometric_mean(each.gain for each in found if each.gain):.2f}."
        path = write_results(out, "odd-rows", where, {"cases": [asdict(each) for each in found]}, text)
        click.echo(f"written: {path} and .json", err=True)


if __name__ == "__main__":
    main()
