"""Depthwise convolutions as one kernel: every way to run them, the runtime's own nodes, and PyTorch's where that is
installed.

    python benchmarks/depthwise.py [--cases convnext,mobile] [--target GPU] [--dry-run] [--no-torch]

Convolutions of ConvNeXt, EfficientNet, MobileNet, a Conformer and Mamba with a bias and what follows it there; some
of them over images with channels last too (--cases last), which the runtime runs between transposes.  The floor of a
case is the longer of its bytes at the rate of a large copy and its multiplications at the GPU's float32
rate.  Of every way the results are compared with the runtime's.  PyTorch's time is of channels-last tensors, bias
included, what follows left out.  Passes where from 8 MB on the best way of each case takes at most 1.25 times its floor
and no result is wrong.  ``--dry-run`` names the ways and times nothing.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import click
import numpy as np
import region_times
from common import environment, measured_on, table
from processes import apart
from region_times import (
    chosen,
    conclude,
    copy_rate,
    each_within,
    figure,
    graph,
    options,
    torch_beside,
    torch_convolution,
    torch_microseconds,
)

from onnxfuse.compiling import source_of
from onnxfuse.errors import OnnxfuseError
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.candidates import makers_of
from onnxfuse.planning.costs.hardware import Profile, resolve_profile
from onnxfuse.planning.identity import Identities
from onnxfuse.planning.known import KnownKernels
from onnxfuse.refusal import Refusal
from onnxfuse.tuning import find_timer
from onnxfuse.tuning.models import feeds_of, kernel_model, runtime_model, weights_of
from onnxfuse.tuning.subjects import Subject

SHARE, LARGE = 1.25, 8 << 20
"""How many times its floor a case may take, from so many bytes on."""

WRONG = 2e-2
"""Share of the largest result by which a float16 one may differ from the runtime's, which may round products too."""

SETS = 6
"""Sets of inputs of PyTorch's that take turns."""

BEFORE = {"": "i = Identity(x)", "silu": "t = Sigmoid(x) i = Mul(x, t)"}

FOLLOWS = {"": "y = Identity(c)", "relu": "y = Relu(c)", "silu": "s = Sigmoid(c) y = Mul(c, s)"}


@dataclass(frozen=True)
class DepthwiseCase:
    """A convolution with a bias in float16: ``spatial`` sizes of the image, ``kernel`` and ``stride`` along each axis;
    ``causal``: padded before alone; ``follows``, ``before``: an activation behind it, and of its image; ``last``:
    whether images and results have their channels last."""

    name: str
    batch: int
    channels: int
    spatial: tuple[int, ...]
    kernel: int
    stride: int = 1
    causal: bool = False
    follows: str = ""
    before: str = ""
    last: bool = False

    @property
    def pads(self) -> tuple[int, int]:
        """Before and behind an axis."""
        return (self.kernel - 1, 0) if self.causal else (self.kernel // 2, (self.kernel - 1) // 2)

    @property
    def results(self) -> tuple[int, ...]:
        """Sizes of the result."""
        return tuple((size + sum(self.pads) - self.kernel) // self.stride + 1 for size in self.spatial)

    @property
    def bytes(self) -> int:
        """Of the image, the weights and the result, once each."""
        window: int = self.kernel ** len(self.spatial) + 1
        return 2 * self.channels * (self.batch * (prod(self.spatial) + prod(self.results)) + window)

    @property
    def flops(self) -> int:
        """Of all products."""
        window: int = self.kernel ** len(self.spatial)
        return 2 * self.batch * self.channels * prod(self.results) * window

    @property
    def text(self) -> str:
        """The graph."""
        rank, channels = len(self.spatial), self.channels

        def sizes(*numbers: int) -> str:
            return f"float16[{', '.join(map(str, numbers))}]"

        def images(places: tuple[int, ...]) -> str:
            return sizes(self.batch, *places, channels) if self.last else sizes(self.batch, channels, *places)

        pads = [self.pads[0]] * rank + [self.pads[1]] * rank
        inside = (f"{BEFORE[self.before]} c = Conv <group = {channels}, pads = {pads}, "
                  f"strides = {[self.stride] * rank}> (i, w, b) {FOLLOWS[self.follows]}")
        given, made = "x", "y"
        if self.last:
            first, last = [0, rank + 1, *range(1, rank + 1)], [0, *range(2, rank + 2), 1]
            given, made = "n", "l"
            inside = f"x = Transpose <perm = {first}> (n) {inside} l = Transpose <perm = {last}> (y)"
        return (
            f"({images(self.spatial)} {given}, {sizes(channels, 1, *[self.kernel] * rank)} w, "
            f"{sizes(channels)} b) => ({images(self.results)} {made}) {{ {inside} }}")

    def floor(self, copy: float, flops: float) -> float:
        """Microseconds that its bytes or its multiplications take, at so many a second."""
        return 1e6 * max(self.bytes / copy, self.flops / flops)


def _square(name: str, channels: int, size: int, kernel: int, stride: int = 1, follows: str = "") -> DepthwiseCase:
    return DepthwiseCase(f"{name} {channels} x {size}, {kernel}" + (" by twos" if stride > 1 else ""), 32, channels,
                         (size, size), kernel, stride, follows=follows)


FIRST = (
    *(_square("convnext", *sizes, kernel=7) for sizes in ((96, 56), (192, 28), (384, 14), (768, 7))),
    _square("mobile", 32, 112, 3, follows="relu"), _square("mobile", 96, 112, 3, 2, "relu"),
    _square("mobile", 144, 56, 3, follows="relu"), _square("mobile", 144, 56, 3, 2, "relu"),
    _square("mobile", 192, 28, 3, follows="relu"), _square("mobile", 576, 14, 3, follows="relu"),
    _square("mobile", 576, 14, 3, 2, "relu"), _square("mobile", 960, 7, 3, follows="relu"),
    _square("efficientnet", 144, 56, 5, 2, "silu"), _square("efficientnet", 240, 28, 5, follows="silu"),
    _square("efficientnet", 480, 14, 5, follows="silu"), _square("efficientnet", 672, 14, 5, follows="silu"),
    _square("efficientnet", 672, 14, 5, 2, "silu"), _square("efficientnet", 1152, 7, 5, follows="silu"),
    _square("efficientnet", 1152, 7, 3, follows="silu"),
)

CASES = (
    *FIRST,
    *(replace(case, name=f"last {case.name}", last=True) for case in FIRST),
    *(replace(_square("silu", channels, side, kernel, follows="silu"), before="silu")
      for channels, side, kernel in ((144, 56, 3), (240, 28, 5), (672, 14, 5), (1152, 7, 3))),
    DepthwiseCase("conformer 1024", 16, 512, (1024,), 31, follows="silu"),
    DepthwiseCase("conformer 375", 32, 512, (375,), 31, follows="silu"),
    DepthwiseCase("mamba 4096", 2, 5120, (4096,), 4, causal=True, follows="silu"),
    DepthwiseCase("mamba 512", 16, 2048, (512,), 4, causal=True, follows="silu"),
    DepthwiseCase("mamba 64", 64, 2048, (64,), 4, causal=True, follows="silu"),
    DepthwiseCase("mamba 1", 64, 2048, (1,), 4, causal=True, follows="silu"),
    DepthwiseCase("video", 4, 96, (16, 28, 28), 3, follows="relu"),
    DepthwiseCase("large", 4, 64, (512, 512), 3, follows="relu"),
)


@dataclass(frozen=True)
class DepthwiseResult(region_times.RegionResult[DepthwiseCase]):
    """A case: how far from the runtime's results those of each way are, as a share of the largest, or what went wrong;
    the floor and PyTorch's time in microseconds."""

    errors: Mapping[str, float | str]
    floor: float | None = None
    torch: float | None = None

    @property
    def right(self) -> bool:
        """Whether all ways ran and gave the runtime's results."""
        return all(isinstance(error, float) and error <= WRONG for error in self.errors.values())


def subject_of(plan: Optimised) -> Subject:
    """All of a graph as one region.

    Raises:
        click.ClickException: there is no kernel of it.
    """
    maker = makers_of(plan.canonical.graph, plan.costs, plan.rules, KnownKernels())[plan.graph.place]
    region = maker.fusion([node for node in maker.view.nodes if node.op != "Constant"], "depthwise")
    if isinstance(region, Refusal):
        raise click.ClickException(region.message)
    what = Identities(plan.graph, plan.ledger.sizes).of(region)
    assert what is not None
    return Subject(what, region, 1, plan)


def measure(case: DepthwiseCase, profile: Profile, dry_run: bool) -> DepthwiseResult:
    """All ways to run a case, timed."""
    plan = optimise(graph(case.text), Options(target=profile, verify=False, database=False, disable=("biases",)))
    subject = subject_of(plan)
    kernels = {kernel.entry: kernel for kernel in subject.kernels.values()}
    predicted = 1e6 * plan.costs.kernel_seconds(subject.fusion)
    times: dict[str, float | None] = dict.fromkeys(kernels)
    errors: dict[str, float | str] = {}
    if dry_run:
        return DepthwiseResult(case, predicted, None, times, errors)
    timer = find_timer()
    timer.compile([source_of(kernel.source, kernel.plan) for kernel in kernels.values()])
    body = runtime_model(subject)
    with timer.bench(feeds_of(body, subject), weights_of(body)) as bench:
        own = bench.time(body, fused=False)
        largest = {name: max(float(np.abs(array.astype(np.float32)).max()), 1e-6)
                   for name, array in own.outputs.items()}
        for name, kernel in kernels.items():
            try:
                found = bench.time(kernel_model(body, subject, kernel), fused=True)
            except OnnxfuseError as error:
                errors[name] = str(error)
                continue
            times[name] = found.microseconds
            errors[name] = max(
                float(np.abs(found.outputs[key].astype(np.float32) - array.astype(np.float32)).max()) / largest[key]
                for key, array in own.outputs.items())
    return DepthwiseResult(case, predicted, own.microseconds, times, errors)


def torch_times(cases: Sequence[DepthwiseCase], seconds: float) -> list[float | None]:
    """Microseconds of GPU time of PyTorch's convolutions, channels-last; run in a process of its own."""
    warnings.simplefilter("ignore")
    return each_within(cases, _torch_time, seconds, None)


def _torch_time(case: DepthwiseCase) -> float | None:
    import torch

    torch.backends.cudnn.benchmark = True
    rank = len(case.spatial)
    kind: dict[str, Any] = {"dtype": torch.float16, "device": "cuda"}
    convolve, form = torch_convolution(rank)
    sets = [torch.randn(case.batch, case.channels, *case.spatial, **kind).to(**form) for _ in range(SETS)]
    weight = torch.randn(case.channels, 1, *[case.kernel] * rank, **kind).to(**form)
    bias = torch.randn(case.channels, **kind)

    def run(turn: int) -> None:
        convolve(sets[turn], weight, bias, stride=case.stride, padding=max(case.pads), groups=case.channels)

    try:
        return torch_microseconds(run, SETS)
    except RuntimeError as error:
        print(f"  {case.name}: {str(error).splitlines()[0]}", file=sys.stderr)
        return None


def show(found: list[DepthwiseResult]) -> tuple[str, bool]:
    """The table, and whether it passes."""
    rows, shares, gains, passes = [], [], [], all(one.right for one in found)
    for one in found:
        best = one.ways[one.best]
        share = best / one.floor if best and one.floor else None
        gain = one.runtime / best if best and one.runtime else None
        if share and one.case.bytes >= LARGE:
            shares.append(share)
        gains += [gain] if gain else []
        worst = max((error for error in one.errors.values() if isinstance(error, float)), default=0.0)
        rows.append([
            one.case.name, f"{one.case.bytes / 1e6:.1f}", str(len(one.ways)), figure(one.runtime),
            figure(one.predicted), figure(one.ways[one.own]), figure(best), one.best if best else one.own,
            figure(one.floor), f"{share:.2f}" if share else "", f"{gain:.2f}" if gain else "", figure(one.torch),
            ("" if one.right else "WRONG ") + f"{worst:.0e}" if one.errors else ""])
    head = ["case", "MB", "ways", "ONNX Runtime µs", "predicted µs", "own µs", "best µs", "best way", "floor µs",
            "best / floor", "gain", "PyTorch µs", "error"]
    text = table(head, rows)
    if shares:
        text += (f"\n\nFrom {LARGE >> 20} MB on the best way takes {geometric_mean(shares):.2f} times its floor in the "
                 f"mean, {max(shares):.2f} at most; {geometric_mean(gains):.2f} times less than ONNX Runtime's nodes.")
    text += "".join(f"\n\n{one.case.name}, {name}: {error}" for one in found
                    for name, error in one.errors.items() if isinstance(error, str))
    return text, passes and all(share <= SHARE for share in shares)


@click.command(help=__doc__.split("\n\n")[0])
@options
@click.option("--torch/--no-torch", "compare", default=True, help="Whether to time PyTorch's convolutions too.")
def main(names: str | None, target: str | None, dry_run: bool, compare: bool, out: Path) -> None:
    where = apart(environment) if dry_run else measured_on("--dry-run")
    profile = resolve_profile(target or where.gpu or "H100")
    rate = None if dry_run else apart(copy_rate)
    found = chosen(names, CASES, lambda case: case.name, lambda case: measure(case, profile, dry_run))
    if rate is not None:
        found = [replace(one, floor=one.case.floor(rate, 1e12 * profile.peaks.float32)) for one in found]
        times = (torch_beside(found, torch_times) if compare else None) or [None for _ in found]
        found = [replace(one, torch=time) for one, time in zip(found, times, strict=True)]
    content = {"copy_bytes_per_second": rate, "cases": [asdict(each) for each in found]}
    conclude(show(found), "depthwise", where, content, None if dry_run else out)


if __name__ == "__main__":
    main()
