"""Regions of odd sizes and reductions alone: every way to run them, and the schedule's own.

    python benchmarks/ways.py [--cases squeeze,mean] [--target GPU] [--dry-run]

Sizes that no vector divides (images of 7 x 7, rows of 31 or 197), operands that begin between two vectors, means over
rows of many lengths, results of different sizes, and time steps.  All ways that ``onnxfuse tune`` tries are timed.
Passes where the schedule's own way takes no longer than 1.15 times the best in the mean over the cases.  ``--dry-run``
names the ways and times nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import geometric_mean

import click
import region_times
from common import environment, measured_on, table, write_results
from processes import apart
from region_times import Prepared, chosen, figure, graph, options

from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.costs.hardware import Profile, resolve_profile
from onnxfuse.tuning.subjects import subjects_of

MEAN = 1.15
"""How many times as long as the best way the schedule's own may take, in the mean."""


class WaysResult(region_times.RegionResult[str]):
    """A case by its name."""

    @property
    def over(self) -> float | None:
        """How many times as long as the quickest the schedule's own takes."""
        own, best = self.ways[self.own], self.ways[self.best]
        return own / best if own and best else None


def cases() -> Iterator[tuple[str, str]]:
    """Names, and the texts of graphs."""
    yield from means()
    yield from odd_sizes()
    yield from totals()
    yield from pieces()
    yield from groups()


def means() -> Iterator[tuple[str, str]]:
    """Reductions with nothing beside them."""
    for rows, length in ((36_864, 49), (8192, 49), (15_360, 196), (2048, 197), (4608, 784), (8192, 768), (512, 1024),
                         (4608, 3136), (256, 3136), (1024, 12_544), (64, 12_544), (128, 4096)):
        yield f"mean of silu, {rows} x {length}", (
            f"(float16[{rows},{length}] x) => (float16[{rows},1] y) "
            "{ s = Sigmoid(x) p = Mul(x, s) y = ReduceMean <axes = [1]> (p) }")
    for rows, length in ((36_864, 49), (8192, 768), (1024, 12_544)):
        yield f"sum of squares, float, {rows} x {length}", (
            f"(float[{rows},{length}] x) => (float[{rows},1] y) <int64[1] a = {{1}}> "
            "{ p = Mul(x, x) y = ReduceSum(p, a) }")


def odd_sizes() -> Iterator[tuple[str, str]]:
    """What no vector divides, and what begins between two."""
    for batch in (1, 4, 32):
        yield f"squeeze and excite, {batch} x 1152 x 7 x 7", (
            f"(float16[{batch},1152,7,7] x, float16[{batch},1152,1,1] g) => (float16[{batch},1152,7,7] y) "
            "{ s = Sigmoid(g) y = Mul(x, s) }")
    for batch in (4, 32):
        yield f"scale, shift, add, {batch} x 256 x 7 x 7", (
            f"(float16[{batch},256,7,7] x, float16[256,1,1] g, float16[256,1,1] b, float16[{batch},256,7,7] r) => "
            f"(float16[{batch},256,7,7] y) {{ p = Mul(x, g) q = Add(p, b) t = Relu(q) y = Add(t, r) }}")
    for batch in (8, 64, 512):
        yield f"all but the first, {batch} x 128 x 129", (
            f"(float16[{batch},128,129] x, float16[{batch},128,128] r) => (float16[{batch},128,128] y) "
            "<int64[1] s = {1}, int64[1] e = {129}, int64[1] a = {2}> "
            "{ c = Slice(x, s, e, a) t = Relu(c) y = Add(t, r) }")
    for batch in (3, 33, 201):
        yield f"scale, {batch} x 4097 x 31", (
            f"(float16[{batch},4097,31] x, float16[31] g) => (float16[{batch},4097,31] y) "
            "{ p = Mul(x, g) y = Relu(p) }")
    for batch in (4, 32):
        yield f"pad, {batch} x 96 x 56 x 56", (
            f"(float16[{batch},96,56,56] x) => (float16[{batch},96,57,57] y) <int64[8] p = {{0,0,0,0,0,0,1,1}}> "
            "{ t = Relu(x) y = Pad(t, p) }")
    for batch, first, step in ((4, 0, 1), (32, 0, 1), (32, 3, 1), (32, 0, 2)):
        places = ", ".join(str(place) for place in range(first, first + 16 * step, step))
        yield f"every {step}th of 16 from {first} of 85 changed in place, {batch} x 3 x 80 x 80", (
            f"(float16[{batch},3,80,80,85] x, float16[{batch},3,80,80,16] u) => (float16[{batch},3,80,80,85] y) "
            f"<int64[16] p = {{{places}}}, int64[5] n = {{{batch},3,80,80,16}}> "
            "{ i = Expand(p, n) a = Sigmoid(x) b = Mul(u, u) t = ScatterElements <axis = 4> (a, i, b) y = Relu(t) }")


def totals() -> Iterator[tuple[str, str]]:
    """Running totals, along rows and along columns."""
    for count, length in ((8, 128), (4096, 128), (4096, 1000), (1024, 4096), (64, 50_257), (1, 1_000_000)):
        yield f"total of a softmax from the end, {count} x {length}", (
            f"(float16[{count},{length}] x, float16[{count},{length}] z) => (float16[{count},{length}] y) "
            "<int64 a = {1}> { p = Softmax(x) c = CumSum <reverse = 1> (p, a) y = Mul(c, z) }")
        yield f"places of a mask, {count} x {length}", (
            f"(int64[{count},{length}] m) => (int64[{count},{length}] y) <int64 a = {{1}}, int64 one = {{1}}> "
            "{ c = CumSum(m, a) y = Sub(c, one) }")
    for batch, length in ((8, 128), (64, 1000), (2, 8000)):
        yield f"total over time, {batch} x {length} x 512", (
            f"(float16[{batch},{length},512] x, float16[512] w) => (float16[{batch},{length},512] y) "
            "<int64 a = {1}> { m = Mul(x, w) c = CumSum(m, a) y = Tanh(c) }")


def pieces() -> Iterator[tuple[str, str]]:
    """Results of different sizes, and time steps."""
    for batch, side in ((1, 20), (8, 40), (32, 80)):
        yield f"silu in unequal halves, {batch} x 96 x {side} x {side}", (
            f"(float16[{batch},96,{side},{side}] x) => "
            f"(float16[{batch},64,{side},{side}] y, float16[{batch},32,{side},{side}] z) <int64[2] n = {{64,32}}> "
            "{ s = Sigmoid(x) p = Mul(x, s) y, z = Split <axis = 1> (p, n) }")
    for batch in (8, 512):
        steps = range(8)
        outputs = ", ".join(f"float16[{batch},256] y{step}" for step in steps)
        names = ", ".join(f"p{step}" for step in steps)
        softmax = " ".join(f"q{step} = Squeeze(p{step}, a) y{step} = Softmax(q{step})" for step in steps)
        yield f"softmax of 8 time steps, {batch} x 256", (
            f"(float16[8,{batch},256] x) => ({outputs}) <int64[1] a = {{0}}> "
            f"{{ t = Tanh(x) {names} = Split <axis = 0> (t) {softmax} }}")


def groups() -> Iterator[tuple[str, str]]:
    """Norms over 32 groups of the channels of images whose channels are last, as those of the decoders of diffusion
    models: a scale, a bias and a SiLU behind each."""
    ones, zeros = ",".join(["1"] * 32), ",".join(["0"] * 32)
    for batch, side, channels in ((2, 64, 128), (4, 64, 512), (4, 128, 128), (4, 128, 256), (4, 128, 512),
                                  (4, 256, 128), (4, 256, 256)):
        image = f"float16[{batch},{side},{side},{channels}]"
        yield f"norm over groups, {batch} x {side} x {side} x {channels}", (
            f"({image} x, float16[{channels},1,1] w, float16[{channels},1,1] b) => ({image} y) "
            f"<int64[3] s = {{0,32,-1}}, int64[4] n = {{0,{channels},{side},{side}}}, "
            f"float[32] u = {{{ones}}}, float[32] z = {{{zeros}}}> "
            "{ g = Cast <to = 10> (u) h = Cast <to = 10> (z) f = Transpose <perm = [0,3,1,2]> (x) r = Reshape(f, s) "
            "i = InstanceNormalization(r, g, h) q = Reshape(i, n) m = Mul(q, w) a = Add(m, b) p = Sigmoid(a) "
            "v = Mul(a, p) y = Transpose <perm = [0,2,3,1]> (v) }")


def measure(case: str, text: str, profile: Profile, dry_run: bool) -> WaysResult:
    """All ways to run a case, timed."""
    plan = optimise(graph(text), Options(target=profile, least_gain=0.0, verify=False, database=False))
    (subject,), _ = subjects_of(plan)
    return WaysResult(**vars(Prepared.of(case, subject, subject.fusion.cost.seconds_after).timed(dry_run)))


def show(found: list[WaysResult]) -> tuple[str, bool]:
    """The table, and whether it passes."""
    rows = [[one.case, one.own, str(len(one.ways)), figure(one.runtime), figure(one.predicted),
             figure(one.ways[one.own]), figure(one.ways[one.best]), one.best if one.over else "",
             f"{one.over:.2f}" if one.over else ""] for one in found]
    head = ["case", "own way", "ways", "ONNX Runtime µs", "predicted µs", "own µs", "best µs", "best way", "own / best"]
    text, shares = table(head, rows), [one.over for one in found if one.over]
    if not shares:
        return text, True
    mean = geometric_mean(shares)
    return f"{text}\n\nThe schedule's own way takes {mean:.3f} times as long as the best in the mean.", mean <= MEAN


@click.command(help=__doc__.split("\n")[0])
@options
def main(names: str | None, target: str | None, dry_run: bool, out: Path) -> None:
    where = apart(environment) if dry_run else measured_on("--dry-run")
    profile = resolve_profile(target or where.gpu or "H100")
    found = chosen(names, cases(), lambda case: case[0], lambda case: measure(*case, profile, dry_run))
    text, passes = show(found)
    click.echo(text)
    if not dry_run:
        path = write_results(out, "ways", where, {"cases": [asdict(each) for each in found]}, text)
        click.echo(f"written: {path} and .json", err=True)
    sys.exit(not passes)


if __name__ == "__main__":
    main()
