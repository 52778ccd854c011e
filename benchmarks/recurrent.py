"""Recurrent layers as one launch for all steps: our kernels, the runtime's own node, and PyTorch's where that is
installed.

    python benchmarks/recurrent.py [--cases lstm,gru] [--type float32] [--target GPU] [--dry-run] [--no-torch]

LSTMs and GRUs of readers of text, codecs, detectors of speech and recommenders.  PyTorch's time is cuDNN's, which may
keep a layer on the chip as well; the runtime's calls of it do not.  Passes where each layer takes at most as long as
the runtime's node.  ``--dry-run`` names the ways and times nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import geometric_mean

import click
from common import apart, environment, measured_on, table
from region_times import (
    HEAD,
    TorchResult,
    chosen,
    compared,
    conclude,
    graph,
    options,
    timed,
    torch_microseconds,
    with_torch,
)

from onnxfuse.operators.classes import recurs
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.hardware import Profile, resolve_profile
from onnxfuse.tuning.subjects import subjects_of

NAMED = {"float16": "float16", "float": "float32"}
"""What PyTorch calls the types of the graphs."""

GATES = {"LSTM": 4, "GRU": 3}


@dataclass(frozen=True)
class RecurrentCase:
    """So many steps of so many sequences; ``both``: in both directions; ``kind``: the type."""

    op: str
    steps: int
    batch: int
    inputs: int
    units: int
    both: bool = False
    kind: str = "float16"

    @property
    def name(self) -> str:
        """As "lstm 80 x 16, 512 to 256 both ways"."""
        return f"{self.op.lower()} {self.steps} x {self.batch}, {self.inputs} to {self.units}{' both ways' * self.both}"

    @property
    def directions(self) -> int:
        """One or two."""
        return 1 + self.both

    @property
    def flops(self) -> int:
        """Of the products."""
        rows = self.directions * GATES[self.op] * self.units
        return 2 * self.steps * self.batch * rows * (self.inputs + self.units)

    @property
    def text(self) -> str:
        """The graph."""
        count, rows, units = self.directions, GATES[self.op] * self.units, self.units
        reset = ", linear_before_reset = 1" * (self.op == "GRU")
        direction = "bidirectional" if self.both else "forward"
        text = (f"(T[{self.steps},{self.batch},{self.inputs}] x, T[{count},{rows},{self.inputs}] w, "
                f"T[{count},{rows},{units}] r, T[{count},{2 * rows}] b) => "
                f"(T[{self.steps},{count},{self.batch},{units}] y) {{ "
                f'y = {self.op}<hidden_size = {units}, direction = "{direction}"{reset}>(x, w, r, b) }}')
        return text.replace("T[", f"{self.kind}[")


CASES = (
    RecurrentCase("LSTM", 80, 16, 512, 256, True), RecurrentCase("LSTM", 80, 64, 512, 256, True),
    RecurrentCase("LSTM", 75, 2, 512, 512), RecurrentCase("LSTM", 300, 1, 128, 128),
    RecurrentCase("LSTM", 50, 256, 64, 64), RecurrentCase("GRU", 100, 16, 256, 256, True),
    RecurrentCase("GRU", 100, 4, 80, 384), RecurrentCase("GRU", 20, 1024, 64, 128),
)


def measure(case: RecurrentCase, profile: Profile, dry_run: bool) -> TorchResult[RecurrentCase]:
    """Both ways to run a case, timed."""
    plan = optimise(graph(case.text), Options(target=profile, verify=False, database=False, eager=True))
    subject = next(each for each in subjects_of(plan)[0] if any(map(recurs, each.fusion.nodes)))
    return TorchResult(**vars(timed(case, subject, plan.costs.kernel_seconds(subject.fusion), dry_run)))


def torch_times(cases: Sequence[RecurrentCase]) -> list[float]:
    """Microseconds of GPU time of PyTorch's; run in a process of its own."""
    import torch

    warnings.simplefilter("ignore")
    torch.backends.cudnn.allow_tf32 = True

    def time(case: RecurrentCase) -> float:
        kind = {"dtype": getattr(torch, NAMED[case.kind]), "device": "cuda"}
        layer = getattr(torch.nn, case.op)(case.inputs, case.units, bidirectional=case.both, **kind)
        x = torch.randn(case.steps, case.batch, case.inputs, **kind)
        with torch.no_grad():
            return torch_microseconds(lambda turn: layer(x), 1)

    return [time(case) for case in cases]


def show(found: list[TorchResult[RecurrentCase]]) -> tuple[str, bool]:
    """The table, and whether it passes."""
    text = table(list(HEAD), list(map(compared, found)))
    shares = [best / one.runtime for one in found if one.runtime and (best := one.ways[one.best])]
    if shares:
        mean, most = geometric_mean(shares), max(shares)
        text += f"\n\nThey take {mean:.2f} times as long as the runtime's in the mean, {most:.2f} at most."
    return text, max(shares, default=0.0) <= 1


@click.command(help=__doc__.split("\n\n")[0])
@options
@click.option("--torch/--no-torch", "compare", default=True, help="Whether to time PyTorch's too.")
@click.option("--type", "named", type=click.Choice(list(NAMED.values())), default="float16", show_default=True,
              help="Of inputs, weights and states.")
def main(names: str | None, target: str | None, dry_run: bool, compare: bool, named: str, out: Path) -> None:
    kind = next(kind for kind, each in NAMED.items() if each == named)
    where = apart(environment) if dry_run else measured_on("--dry-run")
    profile = resolve_profile(target or where.gpu or "H100")
    cases = [replace(case, kind=kind) for case in CASES if named == "float16" or case.units <= 256]
    found = chosen(names, cases, lambda case: case.name, lambda case: measure(case, profile, dry_run))
    found = with_torch(found, torch_times) if compare and not dry_run else found
    content = {"cases": [asdict(each) for each in found]}
    what = "recurrent" if named == "float16" else f"recurrent-{named}"
    conclude(show(found), what, where, content, None if dry_run else out)


if __name__ == "__main__":
    main()
