"""What convolutions in groups are predicted to take, by themselves and fused, beside what an H100 took."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import numpy as np
import pytest
from kernel_harness import make, parse, with_constants
from unmeasured import UNMEASURED

from onnxfuse.graph import build_graph
from onnxfuse.graph.load import from_proto
from onnxfuse.graph.model import Node
from onnxfuse.operators import infer
from onnxfuse.operators.classes import is_in_groups
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.costs.cost import CostModel
from onnxfuse.planning.costs.hardware import Profile, find_profile
from onnxfuse.planning.costs.library import convolution_seconds
from onnxfuse.planning.costs.traffic import Ledger
from onnxfuse.region import Region

H100 = find_profile("H100")
TYPES = {"float16": 0, "float": 1}


@dataclass(frozen=True)
class Case:
    """A convolution in groups: of images and their size, groups, places of a window and stride, in all directions; and
    what the runtime and the best of our kernels took, with a bias and Relu, in float16 and in float32."""

    image: tuple[int, ...]
    groups: int
    taps: int
    runtime: tuple[float, float]
    fused: tuple[float, float]
    stride: int = 1

    def text(self, kind: str) -> str:
        images, channels, *sizes = self.image
        results = [(size + self.taps // 2 * 2 - self.taps) // self.stride + 1 for size in sizes]
        own = [channels, channels // self.groups, *[self.taps] * len(sizes)]
        options = (f"group = {self.groups}, pads = {[self.taps // 2] * 2 * len(sizes)}, "
                   f"strides = {[self.stride] * len(sizes)}")
        return (f"g ({kind}{list(self.image)} x, {kind}{own} w, {kind}[{channels}] b) => "
                f"({kind}{[images, channels, *results]} y) {{ p = Conv<{options}>(x, w, b) y = Relu(p) }}")


MEASURED = (
    Case((16, 128, 56, 56), 32, 3, (78.2, 138.3), (304.0, 218.1)),
    Case((16, 256, 28, 28), 32, 3, (54.5, 69.0), (36.3, 84.9)),
    Case((16, 512, 14, 14), 32, 3, (33.6, 45.9), (23.6, 39.1)),
    Case((16, 1024, 7, 7), 32, 3, (25.4, 32.7), (10.8, 22.8)),
    Case((16, 256, 56, 56), 32, 3, (90.9, 132.5), (42.7, 87.5), 2),
    Case((16, 64, 56, 56), 8, 3, (58.6, 67.9), (36.4, 83.4)),
    Case((16, 128, 28, 28), 8, 3, (32.7, 42.4), (15.5, 33.8)),
    Case((16, 256, 14, 14), 4, 3, (27.5, 28.4), (14.7, 32.4)),
    Case((16, 512, 14, 14), 2, 3, (86.3, 65.1), (86.3, 180.8)),
    Case((16, 96, 27, 27), 2, 5, (50.6, 76.2), (68.8, 152.3)),
    Case((16, 48, 56, 56), 3, 3, (50.6, 60.4), (23.2, 50.0)),
    Case((16, 104, 28, 28), 13, 3, (33.4, 40.1), (16.8, 36.4)),
    Case((4, 768, 999), 16, 128, (642.7, 752.5), (886.1, 1244.5)),
    Case((4, 768, 999), 16, 3, (197.2, 75.1), (16.1, 31.8)),
    Case((4, 256, 1000), 4, 31, (115.4, 54.3), (67.2, 156.3)),
    Case((4, 768, 999), 16, 16, (80.4, 116.4), (58.9, 128.8)),
    Case((4, 512, 250), 8, 9, (22.2, 26.0), (12.2, 33.0)),
    Case((16, 512, 28, 28), 32, 1, (74.0, 109.2), (26.2, 28.9)),
    Case((16, 256, 28, 28), 4, 1, (43.1, 52.8), (5.2, 9.4)),
    Case((16, 240, 28, 28), 3, 1, (59.1, 511.6), (7.5, 10.7)),
    Case((1, 512, 14, 14), 32, 3, (15.0, 18.4), (3.4, 6.6)),
    Case((1, 256, 56, 56), 4, 3, (25.2, 29.1), (11.6, 31.1)),
)
"""Microseconds (benchmarks/results/2026-11-28-h100-float32.md)."""
FOUR_CHANNELS, LARGE_WINDOWS, SPEECH = MEASURED[0], MEASURED[12], MEASURED[13]


def planned(text: str, profile: Profile = H100, **options: object) -> Optimised:
    wanted = {"verify": False, "database": False, "compile": False, "disable": ["layouts"], **options}
    return optimise(parse(text), Options(target=profile, **wanted))  # type: ignore[arg-type]


def holding(made: Optimised) -> list[Region]:
    """Regions of a plan with a convolution."""
    return [each for each in made.plan.with_products if any(node.op == "Conv" for node in each.nodes)]


def is_fused(case: Case, kind: str, **options: object) -> bool:
    return any(node.op == "Conv" for region in planned(case.text(kind), **options).plan.fusions  # type: ignore[arg-type]
               for node in region.nodes)


@pytest.mark.parametrize(("kind", "least", "quarter"), [("float16", 0.87, 1.04), ("float", 0.69, 1.1)])
def test_the_runtime_took_what_is_predicted_and_more(kind: str, least: float, quarter: float) -> None:
    """The least are large ones whose bias and Relu alone are predicted to take as much."""
    ratios = []
    for case in MEASURED:
        costs = planned(case.text(kind)).costs
        ratios.append(case.runtime[TYPES[kind]] / (1e6 * costs.total(())))
    assert least < min(ratios) and quarter < sorted(ratios)[len(ratios) // 4] and median(ratios) < 1.3


@pytest.mark.parametrize(("kind", "middle"), [("float16", 0.89), ("float", 0.93)])
def test_kernels_took_no_longer_than_is_predicted(kind: str, middle: float) -> None:
    ratios = []
    for case in MEASURED:
        made = planned(case.text(kind), eager=True)
        seconds = made.costs.paced(max(holding(made), key=lambda region: len(region.nodes)))
        assert seconds is not None
        ratios.append(case.fused[TYPES[kind]] / (1e6 * seconds))
    assert min(ratios) > 0.5 and max(ratios) < 1.11 and median(ratios) > middle


@pytest.mark.parametrize("kind", TYPES)
def test_those_are_fused_that_were_measured_to_gain(kind: str) -> None:
    """Most of them, and none that was not: of float32 with windows hardly any."""
    gains = {case: case.runtime[TYPES[kind]] / case.fused[TYPES[kind]] for case in MEASURED}
    fused = {case for case in MEASURED if is_fused(case, kind)}
    assert min(gains[case] for case in fused) > 1.4
    assert len(fused) == {"float16": 16, "float": 5}[kind]
    assert SPEECH in fused and FOUR_CHANNELS not in fused and LARGE_WINDOWS not in fused


def test_where_nothing_was_measured_of_tiles_nothing_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_fused(SPEECH, "float16", profile=UNMEASURED)
    assert is_fused(SPEECH, "float16", profile=find_profile("H200"))
    bare = H100.model_copy(update={"peaks": H100.peaks.model_copy(update={"tf32_matrix": 0.0})})
    assert convolution_seconds(*alone("64,16,3,3", profile=bare)) is None
    own = planned(SPEECH.text("float16"))
    monkeypatch.setattr("onnxfuse.forms.converting_seconds", lambda *_: 1.0)  # no plan but that which leaves it
    nodes = planned(SPEECH.text("float16"), provider_options={"prefer_nhwc": "1"})
    assert nodes.costs.total(()) < 0.8 * own.costs.total(())  # the runtime lays it out, and has other kernels


def alone(weights: str, image: str = "16,64,32,32", options: str = "", kind: str = "float16", groups: int = 4,
          profile: Profile = H100) -> tuple[Node, CostModel]:
    """A convolution in groups and the costs of its model."""
    text = (f"g ({kind}[{image}] x, {kind}[{weights}] w) => (y) "
            f"{{ y = Conv<group = {groups}{options}>(x, w) }}")
    graph = infer(build_graph(from_proto(parse(text))))
    return graph.nodes[0], CostModel(Ledger(graph, {}), profile)


RATE = 1e12 * 820 * 494 / 989
PIXELS = 2 * 16 * 64 * 32 * 32


def test_elements_count_and_tiles_of_channels_filled_up() -> None:
    """Of 16 channels as of 32, of 48 as of 64, of 160 as of two tiles: of 128 rows each, in rounds; in either type."""
    pads = ", pads = [1,1,1,1]"
    for kind in TYPES:
        tiles = 0.9 * 4 * 2 * 128 * 32 * 144 * 132 / RATE  # 128 tiles for each group
        assert convolution_seconds(*alone("64,16,3,3", options=pads, kind=kind)) == pytest.approx(
            8e-6 + 3.7e-12 * PIXELS + tiles)
    wider = 0.9 * 4 * 2 * 128 * 64 * 144 * 132 / RATE
    assert convolution_seconds(*alone("192,16,3,3", options=pads)) == pytest.approx(
        8e-6 + 3.7e-12 * 2 * PIXELS + wider)
    widest = 0.9 * 8 * 2 * 128 * 128 * 144 * 132 / RATE
    assert convolution_seconds(*alone("640,16,3,3", options=pads)) == pytest.approx(
        8e-6 + 3.7e-12 * 5.5 * PIXELS + widest)


def test_without_windows_elements_take_less() -> None:
    tiles = 0.9 * 4 * 2 * 128 * 32 * 16 * 132 / RATE
    assert convolution_seconds(*alone("64,16,1,1")) == pytest.approx(8e-6 + 3.0e-12 * PIXELS + tiles)


def test_few_rows_are_not_known() -> None:
    assert convolution_seconds(*alone("64,16,1,1", "1,64,7,9")) is None
    assert convolution_seconds(*alone("64,16,1,1", "1,64,8,8")) is not None


@pytest.mark.parametrize(("weights", "groups", "kind", "found"), [
    ("64,16,3,3", 4, "float16", True), ("64,16,3,3", 4, "bfloat16", True), ("64,16,3,3", 4, "float", True),
    ("64,16,3,3", 4, "double", False), ("64,64,3,3", 1, "float16", False), ("64,1,3,3", 64, "float16", False),
    ("128,1,3,3", 64, "float16", False)])
def test_which_these_are(weights: str, groups: int, kind: str, found: bool) -> None:
    node, _ = alone(weights, groups=groups, kind=kind)
    assert is_in_groups(node) is found


def waits(text: str) -> tuple[int, float]:
    """Tiles of the busiest multiprocessor and the microseconds that each takes."""
    pace = make(text, schedule="product").kernel.pace
    assert pace is not None and pace.stages == 1 and not pace.flops
    return pace.tiles, 1e6 * pace.waits


@pytest.mark.parametrize(("case", "kind", "tiles", "microseconds"), [
    (MEASURED[1], "float16", 24, 128 * 72 * 0.08e-3 + 0.25),
    (MEASURED[3], "float16", 2, 128 * 288 * (0.08e-3 + 0.2e-3 * 32 / 1024) + 0.25 + 32 * 128 * 0.25e-3),
    (LARGE_WINDOWS, "float16", 4, 128 * 6144 * 0.28e-3 + 0.25),
    (LARGE_WINDOWS, "float", 4, 128 * 6144 * 0.6e-3 + 0.9),
    (MEASURED[16], "float16", 1, 9 * 0.95 + 0.25 + 64 * 64 * 0.25e-3),
    (FOUR_CHANNELS, "float16", 96, 128 * 36 * 0.08e-3 + 0.25 + 64 * 36 * 0.85e-3)],
    ids=["8 channels", "results one by one", "long sums", "of float32", "alone", "weights one by one"])
def test_tiles_take_what_their_threads_gather(case: Case, kind: str, tiles: int, microseconds: float) -> None:
    assert waits(case.text(kind)) == (tiles, pytest.approx(microseconds))


def test_channels_last_as_much_is_taken_for_granted() -> None:
    """Rows are places there; of few nothing is known."""
    text = ("g (float16[16,28,28,256] x, float16[256,3,3,8] w) => (float16[16,28,28,256] y) { "
            "t = Transpose<perm = [0,3,1,2]>(x) v = Transpose<perm = [0,3,1,2]>(w) "
            "p = Conv<group = 32, pads = [1,1,1,1]>(t, v) y = Transpose<perm = [0,2,3,1]>(p) }")
    assert waits(text) == (24, pytest.approx(2 * 0.95 / 2 + 0.25))  # two blocks at a time
    few = text.replace("16,28,28", "1,7,9")
    assert make(few, schedule="product").kernel.pace is None
    assert make(few.replace("1,7,9", "1,8,8"), schedule="product").kernel.pace is not None


def test_products_of_matrices_are_none_of_these() -> None:
    text = "g (float16[32,256,64] a, float16[32,64,256] b) => (float16[32,256,256] y) { y = MatMul(a, b) }"
    assert make(text, schedule="product").kernel.pace is not None  # by copies
    odd = text.replace("64", "63")
    assert make(odd, schedule="product").kernel.pace is None


def test_computed_weights_are_read_as_they_lie() -> None:
    """Beside dense convolutions between which values lie channels-last: no pair of transposes lays such weights out."""
    dense = " ".join(f"c{place} = Conv<pads = [1,1]>(x{place}, w{place}, b) x{place + 1} = Relu(c{place})"
                     for place in range(5))
    weights = ", ".join(f"float16[768,768,3] w{place}" for place in range(5))
    model = parse(f"g (float16[4,768,400] x0, float16[768,48,3] v, float16[768] b, {weights}) => "
                  f"(float16[4,768,400] y) {{ {dense} s = Sqrt(v) "
                  f"p = Conv<group = 16, pads = [1,1]>(x5, s, b) y = Relu(p) }}")
    constant = np.full((768, 768, 3), 0.1, np.float16)
    model = with_constants(model, {f"w{place}": constant for place in range(5)})
    made = optimise(model, Options(target=H100, verify=False, database=False, compile=False))
    (region,) = (each for each in made.plan.fusions if any(map(is_in_groups, each.nodes)))
    laid = [each for each in made.plan.fusions if any(node.op == "Transpose" for node in each.nodes)]
    assert laid and region not in laid
