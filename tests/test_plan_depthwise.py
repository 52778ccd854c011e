"""Depthwise convolutions in the planner: what comes in with them, and when they are taken."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path

import onnx
import pytest
from conv_models import conv_model
from emulated import EmulatedRunner, FaultyRunner
from fake_timer import RUNTIME, FakeTimer
from kernel_harness import parse

from onnxfuse import forms
from onnxfuse.graph.model import Node
from onnxfuse.measuring.database import open_database
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.costs.cost import CostModel
from onnxfuse.rewriting import unfuse
from onnxfuse.tuning import TuneOptions, tune
from onnxfuse.verifying import verify

pytestmark = pytest.mark.usefixtures("few_ways")

DIMS = {"N": 32, "H": 112, "W": 112}

Z = "T[N, 16, H, W] z, T[N, 16, 1, 1] q"

CONV = "Conv <group = 16, pads = [1, 1, 1, 1]>"

TAKEN = {
    "alone": (f"y = {CONV} (z, d)", ["Conv"]),
    "a bias and an activation": (f"c = {CONV} (z, d, b) y = Relu(c)", ["Conv", "Add", "Relu"]),
    "SiLU, which reads it twice": (f"c = {CONV} (z, d, b) g = Sigmoid(c) y = Mul(c, g)",
                                   ["Conv", "Add", "Sigmoid", "Mul"]),
    "a normalisation": (f"c = {CONV} (z, d) n = BatchNormalization(c, s, b, s, s) y = HardSwish(n)",
                        ["Conv", "BatchNormalization", "HardSwish"]),
    "a residual of the image": (f"c = {CONV} (z, d, b) y = Add(c, z)", ["Conv", "Add", "Add"]),
    "a sum of two": (f"c = {CONV} (z, d) e = Relu(c) f = Neg(c) y = Sub(e, f)", ["Conv", "Relu", "Neg", "Sub"]),
    "an activation before": (f"r = HardSwish(z) c = {CONV} (r, d) y = Relu(c)", ["HardSwish", "Conv", "Relu"]),
    "SiLU before": (f"g = Sigmoid(z) r = Mul(z, g) y = {CONV} (r, d)", ["Sigmoid", "Mul", "Conv"]),
    "no gate before it": (f"g = Sigmoid(q) r = Mul(z, g) y = {CONV} (r, d)", ["Mul", "Conv"]),
    "what another reads too": (f"r = Relu(z) c = {CONV} (r, d) t = Tanh(c) m = MaxPool <kernel_shape = [1, 1]> (r) "
                               "y = Add(t, m)", ["Conv", "Tanh", "Add"]),
    "no transpose behind it": (f"c = {CONV} (z, d, b) t = Transpose <perm = [0, 2, 3, 1]> (c) e = Relu(t) "
                               "y = Transpose <perm = [0, 3, 1, 2]> (e)", ["Conv"]),
    "no path through another": (f"c = {CONV} (z, d) m = MaxPool <kernel_shape = [1, 1]> (c) y = Add(c, m)", ["Conv"]),
    "no second result": (f"c = {CONV} (z, d) e = Relu(c) m = MaxPool <kernel_shape = [1, 1]> (c) "
                         "o = MaxPool <kernel_shape = [1, 1]> (e) y = Add(m, o)", ["Conv"]),
    "no reduction": (f"c = {CONV} (z, d) e = Relu(c) y = GlobalAveragePool(e)", ["Conv"]),
}


def fuse(model: onnx.ModelProto, **options: object) -> Optimised:
    wanted = {"dims": DIMS, "target": "H200", "verify": False, "database": False, **options}
    return optimise(model, Options(**wanted))  # type: ignore[arg-type]


def model_of(body: str, kind: str = "float16", inputs: str = Z) -> onnx.ModelProto:
    return conv_model(body, kind=kind, inputs=inputs, opset=18)


def taken(made: Optimised) -> list[list[str]]:
    return [[node.op for node in region.nodes if node.op != "Constant"]
            for region in made.plan.fusions if region.rule == "depthwise"]


@pytest.mark.parametrize("name", TAKEN)
def test_what_comes_in(name: str) -> None:
    """And the file is right wherever it runs, and is taken apart again."""
    body, inside = TAKEN[name]
    model = model_of(body)
    made = fuse(model)
    assert taken(made) == [inside]
    (region,) = [each for each in made.plan.fusions if each.rule == "depthwise"]
    assert region.kernel.schedule == "stencil" and region.cost.seconds_after < 0.8 * region.cost.seconds_before
    onnx.checker.check_model(made.model, full_check=True)
    assert [node.op_type for node in unfuse(made.model).graph.node] == [node.op_type for node in model.graph.node]


@pytest.mark.parametrize(("text", "because"), [
    ("y = Conv <group = 8, pads = [1, 1, 1, 1]> (z, e)", ""),
    ("y = Conv <pads = [1, 1, 1, 1]> (z, f)", ""),
])
def test_other_convolutions_are_not_spoken_of(text: str, because: str) -> None:
    """Two channels a group, and all of them."""
    made = fuse(conv_model(text, inputs=Z, weights={"e": (16, 2, 3, 3), "f": (16, 16, 3, 3)}))
    assert not taken(made) and not [each for each in made.refusals if each.rule == "depthwise"]


def test_the_stage_can_be_left_out() -> None:
    body, _ = TAKEN["an activation before"]
    made = fuse(model_of(body), disable=["depthwise"])
    assert not taken(made) and not made.plan.with_products


def test_what_has_no_kernel_says_why() -> None:
    made = fuse(model_of(f"y = {CONV} (z, d)", "double"))
    (refusal,) = [each for each in made.refusals if each.rule == "depthwise"]
    assert refusal.code == "stencil-structure" and "float32" in refusal.message


def test_where_the_runtime_lays_images_out_itself_it_is_weighed_against_a_plan_that_holds_them(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plan leaves of convolutions has a conversion on either side then."""
    model, given = model_of(TAKEN["alone"][0]), {"prefer_nhwc": "1"}
    made, usual = fuse(model, provider_options=given), fuse(model)
    assert taken(made) == taken(usual) and not made.objective.channels_last and made.provider_options == given
    assert [note for note in made.notes if note not in usual.notes] == [
        "Fused nodes hold the convolutions, and images lie channels-last between them: that is predicted to take less "
        "than what the runtime makes of prefer_nhwc=1, with which the model runs all the same."]
    asked: list[list[str]] = []

    def converting(nodes: Iterable[Node], costs: CostModel) -> float:
        asked.append([node.op for node in nodes])
        return 1.0

    monkeypatch.setattr(forms, "converting_seconds", converting)
    left = fuse(model, provider_options=given)
    assert not taken(left) and left.objective.channels_last and left.keeps_biases and asked and "Conv" not in asked[0]
    assert not [note for note in left.notes if note not in usual.notes]


def test_few_elements_are_left() -> None:
    """Nothing is gained where the launch takes the time."""
    assert not taken(fuse(model_of(TAKEN["alone"][0]), dims={"N": 1, "H": 8, "W": 8}))


def test_in_float32_what_the_runtime_does_is_not_known_to_be_bad_enough() -> None:
    """Alone it stays; what is saved beside it decides."""
    assert fuse(model_of(f"c = {CONV} (z, d, b) g = Sigmoid(c) y = Mul(c, g)", "float")).plan.fusions


@pytest.mark.parametrize("runner", [EmulatedRunner, FaultyRunner])
def test_verification(runner: type[EmulatedRunner]) -> None:
    """The kernel is right, and a hundredth more is not."""
    made = fuse(model_of(TAKEN["an activation before"][0]), least_gain=0.0, dims={"N": 1, "H": 9, "W": 8})
    (result,) = [node for node in verify(made, runner()).nodes if node.rule == "depthwise"]
    assert result.verdict == ("passed" if runner is EmulatedRunner else "failed"), result


@pytest.mark.parametrize(("microseconds", "count"), [(20.0, 1), (60.0, 0)])
def test_what_was_measured_decides(tmp_path: Path, microseconds: float, count: int) -> None:
    """Of a part that nobody measured too."""
    model, database = model_of(TAKEN["a normalisation"][0]), tmp_path / "measurements.sqlite"
    timer = FakeTimer(
        lambda name: 50.0 if name == RUNTIME else microseconds if name.startswith("stencil") else 10.0)
    with open_database(database) as kept:
        found = tune(model, timer, kept, TuneOptions(dims=DIMS))
    assert "stencil" in [region.schedule for region in found.regions]
    assert len(taken(fuse(model, database=database, target="H100"))) == count


BOTH: list[tuple[str, ...]] = [(), ("depthwise",)]


@pytest.mark.parametrize(("budget", "plans"), [(None, BOTH), (0.0, BOTH), (1e-9, [()])])
def test_what_could_stand_in_its_place_is_measured_behind_the_plan_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: float | None, plans: list[tuple[str, ...]]
) -> None:
    """And planned only where time is left for it; regions of both are measured once, also where that is forced."""
    done: list[tuple[str, ...]] = []
    timer, module = FakeTimer(lambda name: 50.0), importlib.import_module("onnxfuse.tuning.tune")

    def recorded(*arguments: object, **options: object) -> Optimised:
        wanted = arguments[1]
        assert isinstance(wanted, Options)
        assert timer.timed or budget is not None or not done
        done.append(tuple(stage for stage in wanted.disable if stage != "horizontal-joins"))
        return optimise(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "optimise", recorded)
    for force in (False, True):
        done.clear()
        timer.timed.clear()
        with open_database(tmp_path / "measurements.sqlite") as kept:
            found = tune(model_of(TAKEN["a normalisation"][0]), timer, kept,
                         TuneOptions(dims=DIMS, budget=budget, force=force))
            assert kept.counts()[0] == len(timer.timed)
        assert done == plans
        assert found.measured == len(timer.timed) and found.known == 0 and (found.left == 0) == (budget is None)


def test_a_mean_behind_it_is_a_kernel_of_its_own() -> None:
    """Of a squeeze: SiLU is written where the convolution is, and not computed again for the mean and for the scale."""
    made = fuse(parse(
        "g (float16[32,480,14,14] x, float16[480,1,5,5] w, float16[480,480,1,1] v) => (float16[32,480,14,14] y) "
        "<int64[2] pixels = {2, 3}> { p = Sigmoid(x) q = Mul(x, p) c = Conv<group = 480, pads = [2, 2, 2, 2]>(q, w) "
        "s = Sigmoid(c) a = Mul(c, s) m = ReduceMean(a, pixels) e = Conv(m, v) g = Sigmoid(e) "
        "y = Mul(a, g) }"), dims={})
    assert [[node.op for node in region.nodes if node.op != "Constant"] for region in made.plan.fusions] == [
        ["Sigmoid", "Mul", "Conv", "Sigmoid", "Mul"], ["ReduceMean"], ["Sigmoid", "Mul"]]


def test_a_sequence() -> None:
    """Of a state space model, with the padding before it alone."""
    made = fuse(parse("g (float16[N,512,L] x, float16[512,1,4] w) => (float16[N,512,L] y) "
                      "{ c = Conv<group = 512, pads = [3, 0]>(x, w) s = Sigmoid(c) y = Mul(c, s) }"),
                dims={"N": 32, "L": 1024})
    assert taken(made) == [["Conv", "Sigmoid", "Mul"]]


MEASURED = {
    "ConvNeXt": (888, [(96, 56, 7, 1, 3), (192, 28, 7, 1, 3), (384, 14, 7, 1, 9), (768, 7, 7, 1, 3)]),
    "EfficientNet": (464, [
        (32, 112, 3, 1, 1), (96, 112, 3, 2, 1), (144, 56, 3, 1, 1), (144, 56, 5, 2, 1), (240, 28, 5, 1, 1),
        (240, 28, 3, 2, 1), (480, 14, 3, 1, 2), (480, 14, 5, 1, 1), (672, 14, 5, 1, 2), (672, 14, 5, 2, 1),
        (1152, 7, 5, 1, 3), (1152, 7, 3, 1, 1)]),
}
"""Microseconds of a run's depthwise convolutions on the H200 (benchmarks/results, zoo-quick): channels, side, window,
stride, and how many there are, of 32 images."""


@pytest.mark.parametrize("network", MEASURED)
def test_what_the_runtime_takes_is_predicted(network: str) -> None:
    """Within a fifth, and without any tensor core."""
    measured, convolutions = MEASURED[network]
    total = 0.0
    for channels, side, window, stride, count in convolutions:
        text = (f"g (float16[32,{channels},{side},{side}] x, float16[{channels},1,{window},{window}] w) => "
                f"(float16[32,{channels},A,B] y) {{ y = Conv<group = {channels}, strides = [{stride}, {stride}], "
                f"pads = {[window // 2] * 4}>(x, w) }}")
        made = fuse(parse(text), dims={})
        total += 1e6 * count * made.costs.total()
    assert 0.8 * measured < total < 1.2 * measured, total


@pytest.mark.parametrize(("last", "schedules"), [
    (5.0, ["product", "stencil_last", "product"]), (300.0, ["product", "stencil", "product"])])
def test_images_lie_channels_last_between_convolutions(tmp_path: Path, last: float, schedules: list[str]) -> None:
    """Where that was measured faster, the depthwise one reads and writes what those around it do; else none does."""
    body = f"a = Conv (z, v) r = Relu(a) c = {CONV} (r, d, b) g = Sigmoid(c) m = Mul(c, g) y = Conv (m, v)"
    model, path = model_of(body, inputs=f"{Z}, T[16, 16, 1, 1] v"), tmp_path / "measurements.sqlite"
    timer = FakeTimer(lambda name: last if name.startswith("stencil_last") else 60.0 if name == RUNTIME else
                      40.0 if name.startswith("stencil") else 5.0)
    with open_database(path) as kept:
        tune(model, timer, kept, TuneOptions(dims=DIMS))
    found = [region.kernel.schedule for region in fuse(model, database=path, target="H100").plan.fusions]
    assert [each for each in found if each not in ("pointwise", "tiled")] == schedules
