"""Linear layers of quantised transformers and convolutions of quantised networks: products of 8-bit integers, beside
those of float16 of the same sizes, the runtime's own QuantizeLinear and DequantizeLinear nodes, and the least that
either could take.

    python benchmarks/int8.py [--cases bert,llama,resnet] [--target GPU] [--dry-run] [--ways 4]

Weights lie as a Gemm with ``transB`` has them, and as those of a MatMul are laid out that are constants; some lie as
MatMul has them, which only weights do that are computed.  Activations have a zero point or none.  Results are float16,
or int8 for the next layer behind bias and ReLU or GELU.  Images of convolutions, those of ResNet-50, lie channels-last,
and so do weights and results, which are int8 behind bias and ReLU.  float16 is the same without rounding, from the same
checkout, in its quickest way too.  The floor is that of the bytes, or of the operations at the data sheet's rate.
Passes where int8 takes less time than float16 in every case of the former weights.  ``--dry-run`` names the ways and
times nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import geometric_mean

import click
import numpy as np
from common import environment, measured_on, table
from processes import apart
from region_times import (
    SCALE,
    Prepared,
    RegionResult,
    chosen,
    compile_all,
    conclude,
    figure,
    graph,
    meant,
    options,
    ways_option,
)

from onnxfuse.folding import LAYOUTS
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.costs.hardware import Profile, resolve_profile
from onnxfuse.schedules.products.product import Product
from onnxfuse.tuning.subjects import Subject, subjects_of

OPSET = 20
"""The first that has Gelu; DequantizeLinear gives float16 from 19 on."""


MEAN = 63**2
"""Of products of two numbers as tuning draws them, from none to 127."""


@dataclass(frozen=True)
class LayerCase:
    """A layer of ``rows`` by ``columns`` over ``depth``; ``last``: whether what is summed over is last in the weights,
    as those that are constants are laid out; ``zero``: whether activations have a zero point; ``rounded``: whether it
    writes int8, behind bias and its ``activation``; ``kind``: "int8", or "float16" for the same without quantised
    numbers.  With a ``side`` a convolution of ``rows`` images of as many pixels each way, by a ``window`` and a
    ``stride``."""

    name: str
    rows: int
    columns: int
    depth: int
    last: bool = True
    zero: bool = False
    rounded: bool = False
    activation: str = "Relu"
    kind: str = "int8"
    side: int = 0
    window: int = 1
    stride: int = 1

    @property
    def text(self) -> str:
        """The graph."""
        return self._convolution if self.side else self._layer

    @property
    def _convolution(self) -> str:
        """Channels last, with bias and ReLU."""
        m, n, k, side, window, after = self.rows, self.columns, self.depth, self.side, self.window, self.after
        image, result = f"[{m},{side},{side},{k}]", f"[{m},{after},{after},{n}]"
        weights = f"[{n},{window},{window},{k}]"
        pads = ",".join([str(window // 2)] * 4)
        conv = f"p = Conv<pads = [{pads}], strides = [{self.stride},{self.stride}]>(x, w, c) r = Relu(p)"
        first, last = "Transpose<perm = [0,3,1,2]>", "Transpose<perm = [0,2,3,1]>"
        if self.kind == "float16":
            return (f"(float16{image} a, float16{weights} b, float16[{n}] c) => (float16{result} y) "
                    f"{{ x = {first}(a) w = {first}(b) {conv} y = {last}(r) }}")
        return (f"(int8{image} a, int8{weights} b, float16[{n}] t, float16[{n}] c) => (int8{result} y) {{ "
                f"{self._constants} i = {first}(a) x = DequantizeLinear(i, s{', z' if self.zero else ''}) "
                f"j = {first}(b) w = DequantizeLinear<axis = 0>(j, t) {conv} q = QuantizeLinear(r, o, f) "
                f"y = {last}(q) }}")

    @property
    def _layer(self) -> str:
        """Of matrices."""
        m, n, k = self.rows, self.columns, self.depth
        weights = f"[{n},{k}] b" if self.last else f"[{k},{n}] b"
        product = "p = Gemm<transB = 1>(x, w)" if self.last else "p = MatMul(x, w)"
        end, result = (f"u = Add(p, c) v = {self.activation}(u) ", "v") if self.rounded else ("", "p")
        bias = f", float16[{n}] c" if self.rounded else ""
        if self.kind == "float16":
            return (f"(float16[{m},{k}] x, float16{weights.replace(' b', ' w')}{bias}) => (float16[{m},{n}] y) "
                    f"{{ {product} {end} y = Identity({result}) }}")
        last = f"y = QuantizeLinear({result}, o, f)" if self.rounded else f"y = Identity({result})"
        out = ("int8" if self.rounded else "float16") + f"[{m},{n}] y"
        return (f"(int8[{m},{k}] a, int8{weights}, float16[{n}] t{bias}) => ({out}) {{ {self._constants} "
                f"x = DequantizeLinear(a, s{', z' if self.zero else ''}) "
                f"w = DequantizeLinear<axis = {0 if self.last else 1}>(b, t) {product} {end} {last} }}")

    @property
    def _constants(self) -> str:
        """Scales and zero points, as a network's are: nearly all results are within what int8 holds."""
        largest = 3 * MEAN * SCALE**2 * self.depth * self.window**2
        steps = {name: int(np.float16(number).view(np.uint16)) for name, number in (("s", SCALE), ("o", largest / 127))}
        kinds = {name: f"float16 {{{bits}}}" for name, bits in steps.items()} | {"z": "int8 {3}", "f": "int8 {0}"}
        return " ".join(f"{name} = Constant<value = {value}>()" for name, value in kinds.items()
                        if (name not in "of" or self.rounded) and (name != "z" or self.zero))

    @property
    def after(self) -> int:
        """Pixels of a convolution's result each way."""
        return -(-self.side // self.stride)

    @property
    def operations(self) -> int:
        """Products and sums."""
        return 2 * self.rows * max(self.after, 1)**2 * self.columns * self.depth * self.window**2

    def floor(self, profile: Profile) -> float:
        """The least microseconds that it can take on a GPU."""
        size = 1 if self.kind == "int8" else 2
        out = 1 if self.kind == "int8" and self.rounded else 2
        read = self.depth * (self.rows * max(self.side, 1)**2 + self.columns * self.window**2)
        moved = size * read + out * self.rows * max(self.after, 1)**2 * self.columns
        peak = profile.peaks.int8_matrix if self.kind == "int8" else profile.peaks.float16_matrix
        return 1e6 * max(moved / profile.bandwidth, self.operations / (peak * 1e12))


def _layers(name: str, rows: int, sizes: Sequence[tuple[str, int, int]]) -> list[LayerCase]:
    return [LayerCase(f"{name} {what}", rows, columns, depth) for what, columns, depth in sizes]


BERT = (("projection", 768, 768), ("up", 3072, 768), ("down", 768, 3072))
LLAMA = (("projection", 4096, 4096), ("up", 11008, 4096), ("down", 4096, 11008))

PLAIN = (
    *_layers("bert 1:128", 128, BERT), *_layers("bert 8:128", 1024, BERT), *_layers("bert 32:384", 12_288, BERT),
    *_layers("vit 32", 6304, BERT), *_layers("llama 16", 16, LLAMA), *_layers("llama 512", 512, LLAMA),
    *_layers("llama 2048", 2048, LLAMA), LayerCase("large", 8192, 8192, 8192))

RESNET = (
    (56, 64, 64, 1, 1), (56, 64, 256, 1, 1), (56, 256, 64, 1, 1), (56, 64, 64, 3, 1), (56, 128, 128, 3, 2),
    (56, 256, 512, 1, 2), (28, 512, 128, 1, 1), (28, 128, 512, 1, 1), (28, 128, 128, 3, 1), (28, 256, 256, 3, 2),
    (14, 1024, 256, 1, 1), (14, 256, 1024, 1, 1), (14, 256, 256, 3, 1), (14, 512, 512, 3, 2),
    (7, 2048, 512, 1, 1), (7, 512, 2048, 1, 1), (7, 512, 512, 3, 1))
"""Pixels each way, channels before and after, the window and the stride of ResNet-50's convolutions."""

IMAGES = tuple(
    LayerCase(f"resnet 32 {side}x{side} {depth}:{columns} {window}x{window}/{stride}", 32, columns, depth, rounded=True,
              side=side, window=window, stride=stride)
    for side, depth, columns, window, stride in RESNET)

CASES = (
    *PLAIN, *IMAGES, *(replace(each, name=f"{each.name}, zero point", zero=True) for each in IMAGES if each.window > 1),
    *(replace(each, name=f"{each.name}, to int8", rounded=True) for each in PLAIN if "32" in each.name),
    *(replace(each, name=f"{each.name}, GELU to int8", rounded=True, activation="Gelu")
      for each in PLAIN if each.name in ("bert 8:128 up", "bert 32:384 up", "vit 32 up")),
    *(replace(each, name=f"{each.name}, zero point", zero=True) for each in PLAIN if "bert 32" in each.name),
    *(replace(each, name=f"{each.name}, columns last", last=False) for each in PLAIN if "32" in each.name))


@dataclass(frozen=True)
class LayerResult(RegionResult[LayerCase]):
    """A case in int8, the quickest microseconds in float16, and the floors of both."""

    float16: float | None = None
    floors: tuple[float, float] = (0.0, 0.0)


def subject_of(case: LayerCase, profile: Profile) -> tuple[Subject, float]:
    """The region of a case that holds all of its nodes, and the seconds that are predicted for it."""
    # Values lie as the case says.
    options = Options(disable=(LAYOUTS,), target=profile, verify=False, database=False, eager=True)
    plan = optimise(graph(case.text, OPSET, ("t", "c")), options)
    subjects = [each for each in subjects_of(plan)[0] if each.fusion.kernel.schedule == Product.name]
    subject = max(subjects, key=lambda subject: len(subject.fusion.nodes))
    return subject, plan.costs.kernel_seconds(subject.fusion)


def prepare(case: LayerCase, profile: Profile, most: int | None) -> tuple[Prepared[LayerCase], ...]:
    """The ways to run a case in both types."""
    both = (case, replace(case, kind="float16"))
    return tuple(Prepared.of(each, *subject_of(each, profile), most) for each in both)


def measure(both: Sequence[Prepared[LayerCase]], profile: Profile, dry_run: bool) -> LayerResult:
    """All of them timed."""
    found, beside = (prepared.timed(dry_run) for prepared in both)
    return LayerResult(**vars(found), float16=beside.ways[beside.best],
                       floors=(found.case.floor(profile), beside.case.floor(profile)))


def show(found: list[LayerResult]) -> tuple[str, bool]:
    """The table, and whether it passes."""
    rows, shares = [], []
    for one in found:
        best = one.ways[one.best]
        if best and one.float16:
            shares += [one.float16 / best] if one.case.last else []
        rows.append([
            one.case.name, str(len(one.ways)), figure(one.runtime), figure(one.predicted), figure(one.ways[one.own]),
            figure(best), one.best if best else one.own, f"{one.case.operations / best / 1e6:.0f}" if best else "",
            figure(one.floors[0]), figure(one.float16), figure(one.floors[1]),
            f"{one.float16 / best:.2f}" if best and one.float16 else ""])
    head = ["case", "ways", "ONNX Runtime µs", "predicted µs", "own µs", "best µs", "best way", "TOP/s", "floor µs",
            "float16 µs", "its floor µs", "float16 / int8"]
    text = table(head, rows)
    if shares:
        text += f"\n\nfloat16 takes {geometric_mean(shares):.2f} times as long in the mean, {min(shares):.2f} at least."
    return text, min(shares, default=2.0) > 1.0


@click.command(help=__doc__.split("\n\n")[0])
@options
@ways_option
def main(names: str | None, target: str | None, dry_run: bool, ways: int | None, out: Path) -> None:
    where = apart(environment) if dry_run else measured_on("--dry-run")
    profile = resolve_profile(target or where.gpu or "H100")
    prepared = [prepare(case, profile, ways) for case in meant(names, CASES, lambda case: case.name)]
    if not dry_run:
        compile_all(each for both in prepared for each in both)
    found = chosen(None, prepared, lambda both: both[0].case.name, lambda both: measure(both, profile, dry_run))
    conclude(show(found), "int8", where, {"cases": [asdict(each) for each in found]}, None if dry_run else out)


if __name__ == "__main__":
    main()
