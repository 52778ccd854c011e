"""Each convolution of the zoo inside its fused network, with all that its kernels take along, beside PyTorch's
channels-last convolution by itself.

    python benchmarks/in_networks.py --database benchmarks/zoo/measured-h200.sqlite.xz
    python benchmarks/in_networks.py --rows resnet50,unet --dry-run --target H200

Each fused row runs in a process of its own under CUPTI, as predictions.py has it, so that weights come from where a run
of the whole network leaves them.  PyTorch's convolutions have no bias, their images take turns so that the L2 holds
none, and so do their weights, as they would in a network of its own; cuDNN's fastest is found first; several of one
region count together.  A region's floor is its bytes, those of residuals and of what else it reads and writes included,
at the rate of a large copy; what it moves beside its convolutions' own images, weights and results, such as a residual,
is counted beside PyTorch's time at that rate.
Launches that compute no convolution, such as a norm's second pass, are a column of their own, and those that do are
what is compared.  Passes where none of these takes longer than PyTorch's convolution and what it moves beside, or than
1.25 times the region's floor.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Any

import click
from common import abreast_option, environment, measured_on, packed, row_options, table, write_results
from predictions import Compared, Predicted, compare, measure, regions_of
from processes import ApartError, Turn, Turns, apart
from region_times import copy_rate, torch_convolution, torch_microseconds
from zoo import fuse, prepare_all
from zoo_rows import Row, choose

from onnxfuse.graph.model import Node
from onnxfuse.graph.sizes import shapes_of
from onnxfuse.ir.scalars import TYPES
from onnxfuse.measuring import driver
from onnxfuse.measuring.database import VARIABLE
from onnxfuse.operators.classes import is_convolution
from onnxfuse.optimised import Optimised
from onnxfuse.tuning.timer import sets_of

FLOORS = 1.25
"""How many times its floor a region may take that is slower than PyTorch's convolution."""

MOST_WEIGHTS = 8192
"""Sets of a convolution's weights that take turns at most."""

LAPS = 10
"""Runs under the profiler."""

SIZES = {kind.name: kind.size for kind in TYPES.values()}
"""Bytes of an element, by the type as PyTorch calls it."""

OTHERS = ("_of_all_", "_of_each_", "_of_mean_", "_of_scale_")
"""In the names of launches that compute no convolution: of a norm behind one (``schedules.products.norms``), of means
and what is scaled around a squeeze (``schedules.composed.gated``)."""

SHORT = 1.0
"""Microseconds under which two times are the same: what a clock tells apart of a kernel in a network."""


@dataclass(frozen=True)
class Convolution:
    """What PyTorch needs to know of one: sizes of image, weights and result, strides, padding before and behind,
    dilations, groups, and the type as PyTorch calls it."""

    image: tuple[int, ...]
    weights: tuple[int, ...]
    result: tuple[int, ...]
    strides: tuple[int, ...]
    pads: tuple[int, ...]
    dilations: tuple[int, ...]
    groups: int
    kind: str

    @property
    def text(self) -> str:
        """In a few words."""
        batch, channels, *sides = self.image
        window, strides = self.weights[2:], set(self.strides) - {1}
        return (f"{batch} x {' x '.join(map(str, sides))} x {channels} to {self.weights[0]}"
                f"{', ' + ' x '.join(map(str, window)) if set(window) - {1} else ''}"
                f"{f', steps of {max(strides)}' if strides else ''}"
                f"{f', {self.groups} groups' if self.groups > 1 else ''}")

    @property
    def bytes(self) -> int:
        """Of its image, weights and result."""
        return self.read + prod(self.result) * SIZES[self.kind]

    @property
    def read(self) -> int:
        """Of its image and weights."""
        return (prod(self.image) + prod(self.weights)) * SIZES[self.kind]


@dataclass(frozen=True)
class PlannedNetwork(Predicted):
    """A row's files, and its regions with convolutions: ``convolutions`` of each; ``alone``: microseconds that the
    database has of it, if any."""

    convolutions: tuple[tuple[Convolution, ...], ...]
    alone: tuple[float | None, ...]


@dataclass(frozen=True)
class InNetwork:
    """Regions of a row that are alike: their convolutions, how many, their bytes, and microseconds of one's launches
    with convolutions, of PyTorch's convolutions, of what these launches move beside, and of its other launches."""

    row: str
    convolutions: tuple[Convolution, ...]
    count: int
    bytes: int
    floor: float
    measured: float | None
    torch: float
    beside: float
    others: float

    @property
    def share(self) -> float | None:
        """How many times as long as PyTorch's."""
        return self.measured / self.torch if self.measured else None

    @property
    def meets(self) -> bool:
        """Whether it takes as long as PyTorch's and what it moves beside at most, or its bytes do not allow it."""
        return self.measured is not None and self.measured <= max(
            self.torch + self.beside + SHORT, FLOORS * self.floor)


def convolutions_of(nodes: Iterable[Node], made: Optimised) -> tuple[Convolution, ...]:
    """Those among the nodes whose sizes are known."""
    found = []
    for node in filter(is_convolution, nodes):
        image, weights, result = *node.inputs[:2], node.outputs[0]
        if image is None or weights is None or result is None or image.dtype is None:
            continue
        shapes = shapes_of([image, weights, result], made.ledger.sizes)
        if shapes is None:
            continue
        rank, given = len(shapes[0]) - 2, node.attributes
        (first, second, third) = shapes
        found.append(Convolution(
            first, second, third, tuple(given.get("strides") or [1] * rank), tuple(given.get("pads") or [0] * 2 * rank),
            tuple(given.get("dilations") or [1] * rank), given.get("group", 1), TYPES[image.dtype].name))
    return tuple(found)


def plan(rows: Sequence[Row], folder: str, target: str | None) -> list[PlannedNetwork]:
    """Fuse a model for each of its rows, and list its regions with convolutions."""
    found = []
    for row, original, path, made, _ in fuse(rows, folder, target):
        regions = [made.regions[placed.region] for placed in made.rewritten.placed]
        chosen = [(each, inside, None if region.measured is None else region.measured.fused)
                  for each, region in zip(regions_of(made), regions, strict=True)
                  if (inside := convolutions_of(region.nodes, made))]
        found.append(PlannedNetwork(row, original, path, made.profile.name, *(
            zip(*chosen, strict=True) if chosen else ((), (), ()))))
    return found


def torch_times(cases: Sequence[Convolution]) -> list[float]:
    """Microseconds of GPU time of PyTorch's convolutions; run in a process of its own."""
    warnings.simplefilter("ignore")
    return [_torch_time(case) for case in cases]


def _torch_time(case: Convolution) -> float:
    import torch

    torch.backends.cudnn.benchmark = torch.backends.cudnn.allow_tf32 = True
    rank = len(case.image) - 2
    kind: dict[str, Any] = {"dtype": getattr(torch, case.kind), "device": "cuda"}
    convolve, form = torch_convolution(rank)
    before, behind = case.pads[:rank], case.pads[rank:]
    # What is padded unevenly is padded ahead, which no kernel is timed for.
    even = before == behind
    image = case.image if even else (*case.image[:2], *(
        side + first + last for side, first, last in zip(case.image[2:], before, behind, strict=True)))
    size, l2_bytes = torch.finfo(kind["dtype"]).bits // 8, driver.device().l2_bytes
    images = [torch.randn(*image, **kind).to(**form) for _ in range(sets_of(prod(image) * size, l2_bytes))]
    # Channels last, each where the one before ends.
    rows, channels, *window = case.weights
    turns = min(MOST_WEIGHTS, -(-2 * l2_bytes // (prod(case.weights) * size)))
    weights = torch.randn(turns, rows, *window, channels, **kind).movedim(-1, 2)
    return torch_microseconds(lambda turn: convolve(
        images[turn % len(images)], weights[turn % turns], None, case.strides, before if even else 0, case.dilations,
        case.groups), max(turns, len(images)))


def beside(planned: PlannedNetwork, compared: Sequence[Compared], copy: float, torch: Mapping[Convolution, float]
           ) -> list[InNetwork]:
    """A row's regions beside PyTorch's convolutions, those that are alike as one."""
    groups: dict[tuple[Any, ...], list[Compared]] = defaultdict(list)
    alone: dict[str, float | None] = {}
    for one, inside, time in zip(compared, planned.convolutions, planned.alone, strict=True):
        groups[inside, one.region.launches, one.region.bytes].append(one)
        alone[one.region.node] = time
    found = []
    for (inside, _, size), same in groups.items():
        # Those of a library have kernels of any name: the database tells what they take by themselves.
        known = [alone[one.region.node] if one.measured is None else one.measured for one in same]
        times = [time for time in known if time is not None]
        others = fmean(map(_others, same))
        region = same[0].region
        read = sum(each.read for each in inside)
        beside = max(0, region.reads - read if others else size - sum(each.bytes for each in inside))
        found.append(InNetwork(
            planned.row.name, inside, len(same), size, 1e6 * size / copy, fmean(times) - others if times else None,
            sum(torch[each] for each in inside), 1e6 * beside / copy, others))
    return found


def _others(one: Compared) -> float:
    """Microseconds of launches that compute no convolution."""
    return sum(time for (name, _), time in zip(one.region.launches, one.launches, strict=False)
               if any(other in name for other in OTHERS))


def show(found: Sequence[InNetwork]) -> tuple[str, bool]:
    """The tables, and whether it passes."""
    lines = []
    for row in dict.fromkeys(one.row for one in found):
        chosen = [one for one in found if one.row == row]
        told = [one for one in chosen if one.measured]
        ours, theirs, others = (sum(one.count * time for one, time in times) for times in (
            [(one, one.measured or 0.0) for one in told], [(one, one.torch) for one in told],
            [(one, one.others) for one in told]))
        lines.append([row, str(sum(one.count for one in chosen)), f"{ours:.0f}", f"{others:.0f}", f"{theirs:.0f}",
                      f"{ours / theirs:.2f}" if theirs else "", str(sum(
                          one.count for one in told if one.measured and one.measured <= one.torch + SHORT)),
                      str(sum(one.count for one in chosen if one.meets))])
    text = table(["row", "regions", "µs", "other launches µs", "PyTorch's convolutions µs", "share", "no longer",
                  "or with their bytes"], lines)
    slow = sorted((one for one in found if not one.measured or one.measured > one.torch + SHORT),
                  key=lambda one: (one.meets, -(one.share or 0.0)))
    text += "\n\n" + table(
        ["longer than PyTorch's", "", "regions", "MB", "floor µs", "µs", "others µs", "PyTorch µs", "beside µs",
         "share", "allowed"],
        [[one.row, " and ".join(each.text for each in one.convolutions), str(one.count), f"{one.bytes / 1e6:.1f}",
          f"{one.floor:.1f}", f"{one.measured:.1f}" if one.measured else "-", f"{one.others:.1f}",
          f"{one.torch:.1f}", f"{one.beside:.1f}",
          f"{one.share:.2f}" if one.share else "-", "yes" if one.meets else "no"] for one in slow])
    return text, all(one.meets for one in found)


@click.command(help=__doc__.split("\n\n")[0])
@row_options(dry_run="Only plan; no GPU is needed.", seconds=180)
@click.option("--database", type=click.Path(path_type=Path, exists=True, dir_okay=False),
              help="Measurements to plan by, packed where it ends in .xz; by default those of `onnxfuse tune`.")
@abreast_option
def main(names: str | None, target: str | None, database: Path | None, dry_run: bool, jobs: int, seconds: float,
         abreast: int, out: Path) -> None:
    rows = choose(names)
    where = apart(environment) if dry_run else measured_on("--dry-run")
    found: list[InNetwork] = []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="onnxfuse-in-networks-"))
        if database is not None:
            os.environ[VARIABLE] = str(stack.enter_context(packed(database)))
        made = prepare_all(rows, folder, target or where.gpu, jobs, plan)
        planned = [each for each in made.values() if isinstance(each, PlannedNetwork) and each.regions]
        errors = [f"{name}: {each}" for name, each in made.items() if isinstance(each, str)]
        for error in errors:
            click.echo(f"  {error}", err=True)
        if dry_run:
            for each in planned:
                for region, inside in zip(each.regions, each.convolutions, strict=True):
                    click.echo(f"{each.row.name}  {region.schedule}  {' and '.join(one.text for one in inside)}  "
                               f"{region.predicted:.1f} µs, {region.bytes / 1e6:.1f} MB")
            sys.exit(bool(errors))
        cases = list(dict.fromkeys(one for each in planned for inside in each.convolutions for one in inside))
        torch = dict(zip(cases, apart(torch_times, cases), strict=True))
        copy = apart(copy_rate)
        for turn, seen, _ in Turns(abreast, seconds).taken([Turn(measure, (each, LAPS)) for each in planned]):
            each = turn.arguments[0]
            if isinstance(seen, ApartError):
                errors.append(f"{each.row.name}: {seen}")
                continue
            found += beside(each, compare(each, seen), copy, torch)
            click.echo(f"  {each.row.name}: {len(each.regions)} regions", err=True)
    found.sort(key=lambda one: [row.name for row in rows].index(one.row))
    text, passes = show(found)
    text = "\n".join([text, *(f"- {error}" for error in errors)])
    click.echo(text)
    path = write_results(out, "in-networks", where, {"regions": [asdict(one) for one in found]}, text)
    click.echo(f"written: {path} and .json", err=True)
    sys.exit(bool(errors) or not passes)


if __name__ == "__main__":
    main()
