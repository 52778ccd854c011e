"""Images that their means scale, as squeeze-and-excite does: which regions are offered, and when one is taken."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from emulated import EmulatedRunner, FaultyRunner
from fake_timer import RUNTIME, FakeTimer
from kernel_harness import parse, with_constants

from onnxfuse.measuring.database import open_database
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.regions import gated as planning
from onnxfuse.region import Region
from onnxfuse.rewriting import unfuse
from onnxfuse.tuning import TuneOptions, tune
from onnxfuse.verifying import verify

SPELLINGS: Mapping[str, str] = {
    "torchvision": "m = GlobalAveragePool(x) p = Conv(m, w, b) a = Relu(p) q = Conv(a, v, e) g = Sigmoid(q) y = Mul(g, x)",
    "timm": "m = ReduceMean<keepdims = 1>(x, o) p = Conv(m, w, b) s = Sigmoid(p) a = Mul(p, s) q = Conv(a, v, e) g = Sigmoid(q) y = Mul(x, g)",
    "MobileNet": "m = GlobalAveragePool(x) p = Conv(m, w, b) a = Relu(p) q = Conv(a, v, e) g = HardSigmoid(q) y = Mul(g, x)",
    "SENet": ("i = GlobalAveragePool(x) m = Flatten(i) p = Gemm<transB = 1>(m, wl, b) a = Relu(p) q = Gemm<transB = 1>(a, vl, e) "
              "h = Sigmoid(q) g = Reshape(h, f) y = Mul(x, g)"),
    "SENet, with the image's sizes": (
        "i = ReduceMean<keepdims = 0>(x, o) p = Gemm<transB = 1>(i, wl, b) a = Relu(p) q = Gemm<transB = 1>(a, vl, e) h = Sigmoid(q) "
        "g = Reshape(h, f) n = Shape(x) k = Expand(g, n) y = Mul(x, k)"),
}
"""As exporters spell it, from an image ``x`` to ``y``."""


def model_of(nodes: str, channels: int = 96, few: int = 24, kind: str = "float16", around: bool = False,
             size: int = 28) -> onnx.ModelProto:
    """A model of an image, or between two convolutions; with a residual ``z`` where the nodes read one."""
    generator = np.random.default_rng(5)
    shapes = {"w": (few, channels, 1, 1), "v": (channels, few, 1, 1), "b": (few,), "e": (channels,), "wl": (few, channels),
              "vl": (channels, few), "wt": (channels, few), "first": (channels, 64, 3, 3), "last": (64, channels, 1, 1), "c": (channels,), "sq": (channels, channels, 1, 1)}
    numbers = np.float32 if kind == "float" else np.float16
    arrays = {name: (generator.standard_normal(shape) / 8).astype(numbers) for name, shape in shapes.items()}
    arrays |= {"o": np.array([2, 3]), "f": np.array([0, -1, 1, 1])}
    given, result = ("u", "t") if around else ("x", "y")
    if around:
        nodes = f"d = Conv<pads = [1,1,1,1]>(u, first, c) x = Relu(d) {nodes} t = Conv(y, last)"
    arrays = {name: array for name, array in arrays.items() if name in nodes.replace(",", " ").replace(")", " ").replace("(", " ").split()}
    element = {np.dtype(np.int64): "int64"}
    read = "".join(f", {element.get(array.dtype, kind)}[{','.join(map(str, array.shape))}] {name}" for name, array in arrays.items())
    residual = f", {kind}[N,{channels},{size},{size}] z" if " z)" in nodes else ""
    text = (f"g ({kind}[N,{64 if around else channels},{size},{size}] {given}{residual}{read}) "
            f"=> ({kind}[N,{64 if around else channels},{size},{size}] {result}) {{ {nodes} }}")
    return with_constants(parse(text, 20), arrays)


def model_ahead(nodes: str, channels: int = 96, few: int = 24, kind: str = "float16", more: str = "", size: int = 28,
                outside: int = 28) -> onnx.ModelProto:
    """A model with a depthwise convolution between two others and ahead of the image ``x``; ``more``: another result, ``outside``: its
    size."""
    made = model_of(nodes, channels, few, kind, around=True, size=size)
    weights = (np.random.default_rng(3).standard_normal((channels, 1, 5, 5)) / 8).astype(np.float32 if kind == "float" else np.float16)
    made.graph.initializer.append(onnx.numpy_helper.from_array(weights, "deep"))
    (first,) = (node for node in made.graph.node if node.output[0] == "x")
    place = list(made.graph.node).index(first)
    first.input[0] = "lone"
    made.graph.node.insert(place, onnx.helper.make_node("Clip", ["d"], ["clipped"]))
    made.graph.node.insert(place + 1, onnx.helper.make_node("Conv", ["clipped", "deep"], ["lone"], group=channels, pads=[2, 2, 2, 2]))
    if more:
        made.graph.output.append(onnx.helper.make_tensor_value_info(more, made.graph.output[0].type.tensor_type.elem_type, ["N", channels, outside, outside]))
    return made


def fuse(model: onnx.ModelProto, **options: object) -> Optimised:
    wanted = {"dims": {"N": 8}, "target": "H100", "verify": False, "database": False, **options}
    return optimise(model, Options(**wanted))  # type: ignore[arg-type]


def gated(made: Optimised) -> list[Region]:
    return [region for region in made.plan.fusions if region.kernel.schedule == "gated"]


def summed(region: Region) -> bool:
    """Whether a convolution tells the sums that its means are of."""
    return "told[v]" in region.kernel.source


def operators(region: Region) -> list[str]:
    return [node.op for node in region.nodes if node.op not in ("Constant", "Transpose")]


@pytest.mark.parametrize("kind", ["float16", "float"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_it_is_one_node_of_three_launches(name: str, kind: str) -> None:
    """However it is spelled; and the file is right wherever it runs, and is taken apart again."""
    model = model_of(SPELLINGS[name], kind=kind)
    made = fuse(model)
    (region,) = made.plan.fusions
    assert region.kernel.schedule == "gated" and len(region.kernel.plan.variants[0].launches) == 3
    computed = [node.op_type for node in made.model.graph.node if node.op_type not in ("Constant", "Shape")]
    assert len(computed) == 1
    onnx.checker.check_model(made.model, full_check=True)
    assert [node.op_type for node in unfuse(made.model).graph.node] == [node.op_type for node in model.graph.node]


@pytest.mark.parametrize("kind", ["float16", "float"])
def test_between_convolutions_that_lie_channels_last(kind: str) -> None:
    """It reads and writes as they do."""
    made = fuse(model_of(SPELLINGS["timm"], channels=128, few=32, kind=kind, around=True))
    (region,) = gated(made)
    assert [[size.value for size in (value.shape or ())[1:]] for value in region.outputs] == [[28, 28, 128]]
    assert "Transpose" in {node.op for node in region.nodes} and len(region.kernel.plan.variants[0].launches) <= 4


def test_a_residual_and_an_activation_come_in() -> None:
    nodes = SPELLINGS["torchvision"].replace("y = Mul(g, x)", "s = Mul(g, x) d = Add(s, z) y = Relu(d)")
    (region,) = fuse(model_of(nodes)).plan.fusions
    assert region.kernel.schedule == "gated" and operators(region)[-2:] == ["Add", "Relu"]


def test_it_ends_where_others_read_what_is_scaled() -> None:
    nodes = SPELLINGS["torchvision"].replace("y = Mul(g, x)", "s = Mul(g, x) d = Conv(s, sq) r = Conv(s, sq) y = Mul(d, r)")
    (region,) = gated(fuse(model_of(nodes)))
    assert operators(region)[-1] == "Mul"


@pytest.mark.parametrize("ahead", [False, True])
def test_a_product_of_what_is_scaled_comes_in(ahead: bool) -> None:
    """With what is computed of its results; where its warps hold what they read."""
    nodes = SPELLINGS["torchvision"].replace("y = Mul(g, x)", "s = Mul(g, x) k = Conv(s, sq) y = Relu(k)")
    model = model_ahead(nodes) if ahead else model_of(nodes, around=True)
    (region,) = gated(fuse(model, dims={"N": 32}))
    assert operators(region)[-3:] == ["Mul", "Conv", "Relu"] and "tall" in region.kernel.source
    assert summed(region) == ahead
    (region,) = gated(fuse(model_of(nodes, channels=256, around=True), dims={"N": 32}))
    assert operators(region)[-1] == "Mul"


def test_a_product_is_apart_where_others_read_what_is_scaled() -> None:
    nodes = SPELLINGS["torchvision"].replace("y = Mul(g, x)", "s = Mul(g, x) h = Neg(s) k = Conv(s, sq) y = Add(k, h)")
    (region,) = gated(fuse(model_of(nodes, around=True), dims={"N": 32}))
    assert "tall" not in region.kernel.source


LEFT: Mapping[str, str] = {
    "another reads the mean": SPELLINGS["torchvision"].replace("y = Mul(g, x)", "s = Mul(g, x) y = Add(s, m)"),
    "the gate scales two images": SPELLINGS["torchvision"].replace("y = Mul(g, x)", "s = Mul(g, x) r = Neg(x) k = Mul(g, r) y = Concat<axis = 1>(s, k)"),
    "weights that lie across": "i = GlobalAveragePool(x) j = Flatten(i) p = MatMul(j, wt) a = Relu(p) q = Gemm<transB = 1>(a, vl, e) g = Reshape(q, f) y = Mul(x, g)",
    "no product": "m = GlobalAveragePool(x) g = Sigmoid(m) y = Mul(x, g)",
    "a softmax over channels": SPELLINGS["torchvision"].replace("Sigmoid(q)", "Softmax<axis = 1>(q)"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left(name: str) -> None:
    """What leads elsewhere too, and what has no kernel, has other regions."""
    text = LEFT[name]
    model = model_of(text)
    if name == "the gate scales two images":
        model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 192
    made = fuse(model)
    assert not gated(made) and made.plan.fusions


def test_large_weights_are_read_by_whole_batches() -> None:
    """By kernels that have all images; here every image's blocks would read them anew."""
    model = model_of(SPELLINGS["torchvision"], channels=1024, few=512, size=14)
    for images, taken in ((1, True), (64, False)):
        made = fuse(model, dims={"N": images})
        assert bool(gated(made)) is taken and made.plan.fusions


def test_it_is_no_near_miss_that_its_products_were_not_measured() -> None:
    made = fuse(model_of(SPELLINGS["torchvision"], around=True))
    assert gated(made) and not [each for each in made.refusals if each.code == "unmeasured"]
    alone = fuse(model_of("m = GlobalAveragePool(x) p = Conv(m, w, b) a = Relu(p) q = Conv(a, v, e) y = Add(x, q)", around=True),
                 disable=["products"])
    assert not gated(alone)


@pytest.mark.parametrize("options", [{"target": "A100"}, {"disable": ["products"]}])
def test_where_it_is_not_offered(options: dict[str, object]) -> None:
    """On GPUs of which no times are known, and where convolutions are left alone."""
    assert not gated(fuse(model_of(SPELLINGS["timm"], around=True), **options))


@pytest.mark.parametrize(("microseconds", "count"), [(8.0, 1), (500.0, 0)])
def test_what_was_measured_decides(tmp_path: Path, microseconds: float, count: int) -> None:
    model, database = model_of(SPELLINGS["torchvision"]), tmp_path / "measurements.sqlite"
    timer = FakeTimer(lambda name: 60.0 if name == RUNTIME else microseconds if name.startswith("of_mean") else 30.0)
    with open_database(database) as kept:
        found = tune(model, timer, kept, TuneOptions(dims={"N": 8}))
    assert "gated" in [region.schedule for region in found.regions]
    assert len(gated(fuse(model, database=database))) == count


@pytest.mark.parametrize("runner", [EmulatedRunner, FaultyRunner])
def test_verification(runner: type[EmulatedRunner]) -> None:
    """The kernel is right, and a hundredth more is not."""
    made = fuse(model_of(SPELLINGS["timm"], channels=64, few=16, around=True, size=10), least_gain=0.0, dims={"N": 2})
    (result,) = [node for node in verify(made, runner()).nodes if "an image" in str(node.variants)]
    assert result.verdict == ("passed" if runner is EmulatedRunner else "failed"), result


def test_the_image_is_read_twice() -> None:
    """What is predicted of it counts that."""
    made = fuse(model_of(SPELLINGS["torchvision"], channels=64))
    (region,) = gated(made)
    assert made.costs.read_again(region) == 2 * 8 * 64 * 28 * 28


@pytest.mark.parametrize("kind", ["float16", "float"])
@pytest.mark.parametrize("name", [name for name, nodes in SPELLINGS.items() if "Shape(x)" not in nodes])
def test_a_depthwise_convolution_ahead_comes_in(name: str, kind: str) -> None:
    """Whose kernel tells the sums: the mean has none.  The file is right wherever it runs, and is taken apart again."""
    model = model_ahead(SPELLINGS[name], kind=kind)
    made = fuse(model)
    (region,) = gated(made)
    assert summed(region)
    assert len(region.kernel.plan.variants[0].launches) == 3 and operators(region)[0] == "Conv"
    onnx.checker.check_model(made.model, full_check=True)
    assert [node.op_type for node in unfuse(made.model).graph.node] == [node.op_type for node in model.graph.node]


@pytest.mark.parametrize(("name", "more"), [
    ("timm", "x"), ("timm", "lone"), ("timm", "g"), ("SENet, with the image's sizes", "")])
def test_it_stays_apart_where_others_read_what_is_inside(name: str, more: str) -> None:
    """Which has to be there for them."""
    made = fuse(model_ahead(SPELLINGS[name], more=more, outside=1 if more == "g" else 28))
    assert made.plan.fusions and not any(map(summed, made.plan.fusions))


def test_what_is_predicted_of_it_has_no_launch_for_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """And reads the image once less."""
    model = model_ahead(SPELLINGS["torchvision"], channels=256, size=56)
    made = fuse(model, dims={"N": 32})
    (region,) = gated(made)
    assert summed(region)
    monkeypatch.setattr(planning._Gate, "ahead", lambda self, members: frozenset())
    other = fuse(model, dims={"N": 32})
    apart = [each for each in other.plan.fusions if each.kernel.schedule in ("gated", "stencil_last")]
    assert len(apart) == 2
    one, two = made.costs.kernel_seconds(region), sum(map(other.costs.kernel_seconds, apart))
    assert 0.7 * two < one < 0.95 * two


@pytest.mark.parametrize("runner", [EmulatedRunner, FaultyRunner])
def test_verification_with_a_convolution_ahead(runner: type[EmulatedRunner]) -> None:
    made = fuse(model_ahead(SPELLINGS["timm"], channels=64, few=16, size=10), least_gain=0.0, dims={"N": 2})
    (result,) = [node for node in verify(made, runner()).nodes if "an image" in str(node.variants)]
    assert result.verdict == ("passed" if runner is EmulatedRunner else "failed"), result


@pytest.mark.parametrize("runner", [EmulatedRunner, FaultyRunner])
def test_verification_with_a_product_behind(runner: type[EmulatedRunner], monkeypatch: pytest.MonkeyPatch) -> None:
    """However few rows there are."""
    monkeypatch.setattr("onnxfuse.schedules.products.tall.LEAST_ROWS", 0)
    nodes = SPELLINGS["timm"].replace("y = Mul(x, g)", "z = Mul(x, g) k = Conv(z, sq) y = Relu(k)")
    made = fuse(model_ahead(nodes, channels=24, few=8, size=12), least_gain=0.0, dims={"N": 2})
    (region,) = gated(made)
    assert "tall" in region.kernel.source and operators(region)[-2:] == ["Conv", "Relu"]
    (result,) = [node for node in verify(made, runner()).nodes if "an image" in str(node.variants)]
    assert result.verdict == ("passed" if runner is EmulatedRunner else "failed"), result
