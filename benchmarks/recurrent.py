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
from dataclasses import dataclass, replace
from functools import partial
from statistics import geometric_mean

from common import table
from region_times import (
    HEAD,
    NAMED,
    Prepared,
    TorchResult,
    compared,
    each_within,
    torch_microseconds,
    typed_command,
    with_torch,
)

from onnxfuse.operators.classes import recurs
from onnxfuse.planning.costs.hardware import Profile

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


def cases_of(kind: str) -> list[RecurrentCase]:
    """Those of a type; none of bfloat16, which these operators have from opset 22 on."""
    longest = {"float16": 512, "float": 256}.get(kind, 0)
    return [replace(case, kind=kind) for case in CASES if case.units <= longest]


def prepare(case: RecurrentCase, profile: Profile, most: int | None = None) -> Prepared[RecurrentCase]:
    """Both ways to run a case."""
    return Prepared.fusion(case, lambda region: any(map(recurs, region.nodes)), profile, most)


def torch_times(cases: Sequence[RecurrentCase], seconds: float) -> list[float | None]:
    """Microseconds of GPU time of PyTorch's; run in a process of its own."""
    import torch

    warnings.simplefilter("ignore")
    torch.backends.cudnn.allow_tf32 = True

    def time(case: RecurrentCase) -> float | None:
        kind = {"dtype": getattr(torch, NAMED[case.kind]), "device": "cuda"}
        layer = getattr(torch.nn, case.op)(case.inputs, case.units, bidirectional=case.both, **kind)
        x = torch.randn(case.steps, case.batch, case.inputs, **kind)
        with torch.no_grad():
            return torch_microseconds(lambda turn: layer(x), 1)

    return each_within(cases, time, seconds, None)


def show(found: list[TorchResult[RecurrentCase]]) -> tuple[str, bool]:
    """The table, and whether it passes."""
    text = table(list(HEAD), list(map(compared, found)))
    shares = [best / one.runtime for one in found if one.runtime and (best := one.ways[one.best])]
    if shares:
        mean, most = geometric_mean(shares), max(shares)
        text += f"\n\nThey take {mean:.2f} times as long as the runtime's in the mean, {most:.2f} at most."
    return text, max(shares, default=0.0) <= 1


main = typed_command(__doc__, "recurrent", cases_of, prepare, partial(with_torch, times=torch_times), show)


if __name__ == "__main__":
    main()
