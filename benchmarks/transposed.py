"""Transposed convolutions as one kernel: every way to run them, the runtime's own nodes, and PyTorch's where that is
installed.

    python benchmarks/transposed.py [--cases unet,vocoder] [--type float32] [--target GPU] [--dry-run] [--no-torch]

Layers of U-Nets, decoders, generators and vocoders, of channels-last tensors, with bias and ReLU; PyTorch's time is of
the channels-last convolution without what follows.  Passes where the best way of each takes at most 1.10 times as long
as PyTorch's.  ``--dry-run`` names the ways and times nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from statistics import geometric_mean
from typing import Any

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

from onnxfuse.operators.classes import is_transposed_convolution
from onnxfuse.planning.costs.hardware import Profile

MOST = 1.10
"""How many times PyTorch's bare convolution the best way may take."""

SETS = 3
"""Sets of inputs of PyTorch's that take turns."""


@dataclass(frozen=True)
class TransposedCase:
    """``batch`` images of these ``sides`` and ``read`` channels; ``size``, ``stride``, ``pad`` and what is added at the
    end (``more``) along each axis; ``kind``: the type."""

    name: str
    batch: int
    sides: tuple[int, ...]
    read: int
    written: int
    size: int
    stride: int
    pad: int = 0
    more: int = 0
    kind: str = "float16"

    @property
    def flops(self) -> int:
        """Of the products."""
        window: int = self.size ** len(self.sides)
        return 2 * self.batch * prod(self.sides) * self.read * self.written * window

    @property
    def text(self) -> str:
        """The graph."""
        axes = len(self.sides)
        last, first = [0, *range(2, axes + 2), 1], [0, axes + 1, *range(1, axes + 1)]
        results = [self.stride * (side - 1) + self.size - 2 * self.pad + self.more for side in self.sides]
        shape, result, window = (",".join(map(str, each)) for each in (self.sides, results, [self.size] * axes))
        attributes = (f"strides = {[self.stride] * axes}, pads = {[self.pad] * (2 * axes)}, "
                      f"output_padding = {[self.more] * axes}")
        kind = self.kind
        return (f"({kind}[{self.batch},{shape},{self.read}] x, {kind}[{self.read},{window},{self.written}] w, "
                f"{kind}[{self.written}] c) => ({kind}[{self.batch},{result},{self.written}] y) {{ "
                f"t = Transpose <perm = {first}> (x) v = Transpose <perm = {first}> (w) "
                f"p = ConvTranspose <{attributes}> (t, v, c) q = Relu(p) y = Transpose <perm = {last}> (q) }}")


CASES = (
    *(TransposedCase(f"unet {side}, {read} to {read // 2}", 2, (side, side), read, read // 2, 2, 2)
      for side, read in ((32, 512), (64, 256), (128, 128))),
    TransposedCase("volume 32, 64 to 32", 1, (32, 32, 32), 64, 32, 2, 2),
    TransposedCase("generator 16, 512 to 256", 16, (16, 16), 512, 256, 4, 2, 1),
    TransposedCase("generator 32, 256 to 128", 16, (32, 32), 256, 128, 4, 2, 1),
    TransposedCase("generator 64, 128 to 64", 16, (64, 64), 128, 64, 4, 2, 1),
    TransposedCase("translator 64, 256 to 128", 1, (64, 64), 256, 128, 3, 2, 1, 1),
    TransposedCase("translator 128, 128 to 64", 1, (128, 128), 128, 64, 3, 2, 1, 1),
    TransposedCase("vocoder 200, 512 to 256", 1, (200,), 512, 256, 16, 8, 4),
    TransposedCase("vocoder 800, 256 to 128", 1, (800,), 256, 128, 8, 4, 2),
    TransposedCase("vocoder 3200, 128 to 64", 1, (3200,), 128, 64, 8, 4, 2),
    TransposedCase("vocoder 12800, 64 to 32", 1, (12_800,), 64, 32, 8, 4, 2),
    TransposedCase("separator 4000, 256 to 1", 2, (4000,), 256, 1, 16, 8),
)


def cases_of(kind: str) -> list[TransposedCase]:
    """Those of a type; none of bfloat16, which this operator has from opset 22 on."""
    return [] if kind == "bfloat16" else [replace(case, kind=kind) for case in CASES]


def prepare(case: TransposedCase, profile: Profile, most: int | None = None) -> Prepared[TransposedCase]:
    """Both ways to run a case."""
    return Prepared.fusion(case, lambda region: any(map(is_transposed_convolution, region.nodes)), profile, most)


def torch_times(cases: Sequence[TransposedCase], seconds: float) -> list[float | None]:
    """Microseconds of GPU time of PyTorch's; run in a process of its own."""
    import torch

    warnings.simplefilter("ignore")
    torch.backends.cudnn.benchmark = torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    return each_within(cases, _torch_time, seconds, None)


def _torch_time(case: TransposedCase) -> float | None:
    import torch

    axes = len(case.sides)
    kind: dict[str, Any] = {"dtype": getattr(torch, NAMED[case.kind]), "device": "cuda"}
    first = (0, axes + 1, *range(1, axes + 1))
    function = getattr(torch.nn.functional, f"conv_transpose{axes}d")
    sets = [(torch.randn(case.batch, *case.sides, case.read, **kind).permute(first),
             torch.randn(case.read, *[case.size] * axes, case.written, **kind).permute(first)) for _ in range(SETS)]
    return torch_microseconds(
        lambda turn: function(*sets[turn], stride=case.stride, padding=case.pad, output_padding=case.more), SETS)


def show(found: list[TorchResult[TransposedCase]]) -> tuple[str, bool]:
    """The table, and whether it passes."""
    text, shares = table(list(HEAD), list(map(compared, found))), [one.share for one in found if one.share]
    if shares:
        mean, most = geometric_mean(shares), max(shares)
        text += f"\n\nThe best ways take {mean:.2f} times as long as PyTorch's in the mean, {most:.2f} at most."
    return text, max(shares, default=0.0) <= MOST


main = typed_command(__doc__, "transposed", cases_of, prepare, partial(with_torch, times=torch_times), show)


if __name__ == "__main__":
    main()
