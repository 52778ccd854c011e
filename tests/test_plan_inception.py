"""An inception block: branches of convolutions and a pooling of one image, whose results are put side by side.  What
else networks put there, as exporters spell it: a pooled image, halves of one, what earlier layers gave, an image that is
enlarged."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from emulated import EmulatedRunner
from kernel_harness import parse, with_constants

from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.costs.cost import kernel_time
from onnxfuse.region import Region
from onnxfuse.verifying import verify

BRANCHES = (
    "p = Conv(x, w1, b1) r = Relu(p) "
    "q = Conv(x, w3r, b3r) s = Relu(q) t = Conv<pads = [1,1,1,1]>(s, w3, b3) u = Relu(t) "
    "i = Conv(x, w5r, b5r) j = Relu(i) k = Conv<pads = [2,2,2,2]>(j, w5, b5) l = Relu(k) "
    "m = MaxPool<kernel_shape = [3,3], pads = [1,1,1,1]>(x) n = Conv(m, wp, bp) o = Relu(n) "
    "z = Concat<axis = 1>(r, u, l, o) ")
"""1x1; 1x1, 3x3; 1x1, 5x5; pooling, 1x1; side by side: GoogLeNet's first."""

WIDTH, RESULTS = 192, {"1": 64, "3r": 96, "3": 128, "5r": 16, "5": 32, "p": 32}
"""Channels of the image, and of what each convolution gives."""


def model_of(images: int, size: int, around: bool) -> onnx.ModelProto:
    """The block between two convolutions, or by itself, in float16."""
    generator = np.random.default_rng(7)
    shapes: dict[str, tuple[int, ...]] = {"first": (WIDTH, 64, 3, 3), "fb": (WIDTH,), "last": (64, 256, 1, 1)} if around else {}
    for name, count in RESULTS.items():
        before = {"3": RESULTS["3r"], "5": RESULTS["5r"]}.get(name, WIDTH)
        window = {"3": 3, "5": 5}.get(name, 1)
        shapes |= {f"w{name}": (count, before, window, window), f"b{name}": (count,)}
    arrays = {name: (generator.standard_normal(shape) / 16).astype(np.float16) for name, shape in shapes.items()}
    read = "".join(f", float16[{','.join(map(str, array.shape))}] {name}" for name, array in arrays.items())
    nodes, given, result = BRANCHES, f"float16[{images},{WIDTH},{size},{size}] x", f"float16[{images},256,{size},{size}] z"
    if around:
        nodes = f"g = Conv<pads = [1,1,1,1]>(v, first, fb) x = Relu(g) {BRANCHES} y = Conv(z, last)"
        given, result = f"float16[{images},64,{size},{size}] v", f"float16[{images},64,{size},{size}] y"
    return with_constants(parse(f"g ({given}{read}) => ({result}) {{ {nodes} }}", 20), arrays)


def fuse(around: bool, images: int = 32, size: int = 28, disable: Sequence[str] = ()) -> Optimised:
    return optimise(model_of(images, size, around), Options(target="H100", verify=False, database=False, disable=disable))


def operators(region: Region) -> tuple[str, ...]:
    return tuple(node.op for node in region.nodes if node.op not in ("Constant", "Transpose"))


def launches(region: Region) -> int:
    return len(region.kernel.plan.variants[0].steps)


@pytest.fixture(scope="module")
def between() -> Optimised:
    return fuse(around=True)


BRANCH = ("Conv", "Add", "Relu")


def test_a_launch_for_each_convolution_and_one_for_the_pooling(between: Optimised) -> None:
    """But those of the block's image, which are one.  Biases and activations take none, nor does a layout, nor what is put
    side by side: the last convolution of each branch writes its part.  Nothing but the first image and the last result is
    laid out anew."""
    found = Counter(map(operators, between.plan.fusions))
    block = {("MaxPool",): 1, (*BRANCH * 6, "Concat"): 1}
    assert found == {**block, BRANCH: 1, ("Conv",): 1}  # with the convolutions before and behind
    assert sum(map(launches, between.plan.fusions)) == 1 + (1 + 3) + 1 + 1
    left = [node.op_type for node in between.model.graph.node if node.domain != "onnxfuse"]
    laid = {"v", *(f"w{name}" for name in ("3", "5")), "first"}  # an image, and weights, which a session lays out once
    assert left == ["Transpose"] * len(laid)
    inside = [region for region in between.plan.fusions if operators(region) != ("Conv",)]
    assert all(value.shape is not None and value.shape[1] == 28 for region in inside for value in region.outputs)


def test_the_parts_move_each_number_once(between: Optimised) -> None:
    """What the branches' last convolutions write is not read again to be put side by side, and they are predicted to take
    what their tiles do."""
    (joined,) = [region for region in between.plan.fusions if "Concat" in operators(region)]
    assert joined.kernel.schedule == "sliced" and launches(joined) == 4
    counted = between.costs.ledger.region(joined)
    assert sum(counted.writes.values()) == 2 * 32 * 28 * 28 * 256
    assert counted.scratch == 2 * 2 * 32 * 28 * 28 * (RESULTS["3r"] + RESULTS["5r"])  # written and read
    apart = fuse(around=True, disable=["products"])
    assert not any("Conv" in operators(region) for region in apart.plan.fusions)
    assert between.costs.paced(joined) is not None


def test_by_itself_the_concat_adds_the_branches_biases() -> None:
    """Where the block's image is the model's, and convolutions are left to the runtime: the kernel that puts results side
    by side has the biases and activations of all branches, which cost none of their own."""
    made = fuse(around=False, disable=["layouts"])
    (concat,) = [region for region in made.plan.fusions if "Concat" in operators(region)]
    assert operators(concat) == ("Add", "Relu") * 4 + ("Concat",) and launches(concat) == 1
    reduced = [region for region in made.plan.fusions if operators(region) == ("Add", "Relu") * 2]
    assert [launches(region) for region in reduced] == [1], "both reductions' biases in one launch"


def test_it_is_right() -> None:
    """Every kernel of the block, on small images."""
    made = optimise(model_of(1, 8, around=True), Options(target="H100", verify=False, database=False, least_gain=0.0))
    found = verify(made, EmulatedRunner()).nodes
    assert found and {node.verdict for node in found} == {"passed"}, found


TWICE = 'mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor", cubic_coeff_a = -0.75'

NETWORKS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    # Inception v3's reduction block.
    "reduction": (
        "a = Conv<strides = [2,2]>(x, w0_128_64_3, b0_128) r = Relu(a) c = Conv(x, w1_64_64_1, b1_64) d = Relu(c) "
        "e = Conv<pads = [1,1,1,1]>(d, w2_96_64_3, b2_96) f = Relu(e) h = Conv<strides = [2,2]>(f, w3_96_96_3, b3_96) i = Relu(h) "
        "m = MaxPool<kernel_shape = [3,3], strides = [2,2]>(x) z = Concat<axis = 1>(r, i, m) ",
        288, ("Conv", "Add", "Relu", "Conv", "Add", "Relu", "MaxPool", "Concat")),
    # YOLO's C2f: halves of an image, of which one goes on through two convolutions, and is added to what they give.
    "C2f": (
        "h, l = Split<axis = 1>(x, halves) a = Conv<pads = [1,1,1,1]>(l, w0_32_32_3, b0_32) as = Sigmoid(a) am = Mul(a, as) "
        "c = Conv<pads = [1,1,1,1]>(am, w1_32_32_3, b1_32) cs = Sigmoid(c) cm = Mul(c, cs) q = Add(l, cm) "
        "z = Concat<axis = 1>(h, l, q) ",
        96, ("Conv", "Add", "Sigmoid", "Mul", "Add", "Concat")),
    # A U-Net's skip beside a convolution of an image that is enlarged.
    "U-Net": (
        f"d = MaxPool<kernel_shape = [2,2], strides = [2,2]>(x) e = Conv<pads = [1,1,1,1]>(d, w0_128_64_3, b0_128) f = Relu(e) "
        f"u = Resize<{TWICE}>(f, , scales) v = Conv<pads = [1,1,1,1]>(u, w1_64_128_3, b1_64) s = Relu(v) z = Concat<axis = 1>(s, x) ",
        128, ("Conv", "Add", "Relu", "Concat")),
    # A decoder that enlarges an image beside a convolution of the larger one.
    "neck": (
        f"d = MaxPool<kernel_shape = [2,2], strides = [2,2]>(x) e = Conv<pads = [1,1,1,1]>(d, w0_128_64_3, b0_128) f = Relu(e) "
        f"u = Resize<{TWICE}>(f, , scales) v = Conv(x, w1_256_64_1, b1_256) s = Relu(v) z = Concat<axis = 1>(u, s) ",
        384, ("Resize", "Conv", "Add", "Relu", "Concat")),
    # VoVNet's: what each layer gives goes on to the next, and all of it is put side by side.
    "one-shot aggregation": (
        "a = Conv<pads = [1,1,1,1]>(x, w0_64_64_3, b0_64) r = Relu(a) c = Conv<pads = [1,1,1,1]>(r, w1_64_64_3, b1_64) d = Relu(c) "
        "z = Concat<axis = 1>(x, r, d) ",
        192, ("Conv", "Add", "Relu", "Concat")),
    # Deep layer aggregation's: a residual block's result beside what it is added to.
    "aggregation": (
        "a = Conv<pads = [1,1,1,1]>(x, w0_64_64_3, b0_64) r = Relu(a) c = Conv<pads = [1,1,1,1]>(r, w1_64_64_3, b1_64) "
        "s = Add(c, x) d = Relu(s) z = Concat<axis = 1>(d, x) ",
        128, ("Conv", "Add", "Add", "Relu", "Concat")),
    # A depthwise convolution has a kernel of its own, which writes no part.
    "depthwise": (
        "a = Conv<group = 64, pads = [1,1,1,1]>(x, w0_64_1_3, b0_64) r = Relu(a) c = Conv(x, w1_64_64_1, b1_64) d = Relu(c) "
        "z = Concat<axis = 1>(d, r) ",
        128, ("Conv", "Add", "Relu", "Concat")),
}
"""Nodes of a block of 64 channels, how many it gives, and what becomes one region with its Concat; weights are called by
their shapes."""


def network(name: str, images: int, size: int) -> onnx.ModelProto:
    """The block between two convolutions, in float16."""
    nodes, given, _ = NETWORKS[name]
    nodes = f"g = Conv<pads = [1,1,1,1]>(v0, w9_64_64_3, b9_64) x = Relu(g) {nodes} y = Conv(z, w8_64_{given}_1)"
    generator, arrays = np.random.default_rng(7), {}
    for each in sorted(set(re.findall(r"\b[wb]\d_[\d_]+", nodes))):
        shape = tuple(map(int, each.split("_")[1:]))
        arrays[each] = (generator.standard_normal(shape + shape[-1:] * (len(shape) == 3)) / 16).astype(np.float16)
    shapes = {each: f"float16[{','.join(map(str, array.shape))}]" for each, array in arrays.items()}
    arrays |= {each: array for each, array in CONSTANTS.items() if each in nodes}
    shapes |= {each: kind for each, kind in (("halves", "int64[2]"), ("scales", "float[4]")) if each in nodes}
    read = "".join(f", {kind} {each}" for each, kind in shapes.items())
    after = (size - 3) // 2 + 1 if name == "reduction" else size
    return with_constants(parse(f"g (float16[{images},64,{size},{size}] v0{read}) => (float16[{images},64,{after},{after}] y) {{ {nodes} }}"), arrays)


CONSTANTS = {"halves": np.array([32, 32]), "scales": np.array([1, 1, 2, 2], np.float32)}


@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_put_beside_a_convolution(name: str) -> None:
    """The convolution writes its part, and one launch has all that is copied; of small images every variant is right."""
    made = optimise(network(name, 32, 56), Options(target="H200", verify=False, database=False))
    (joined,) = [region for region in made.plan.fusions if "Concat" in operators(region)]
    assert (joined.kernel.schedule, Counter(operators(joined))) == ("sliced", Counter(NETWORKS[name][2]))
    assert launches(joined) == operators(joined).count("Conv") + 1
    assert joined.kernel.pace is not None
    (copy,) = [launch for pace in joined.kernel.pace.parts for launch in pace.launches]
    seconds = kernel_time(copy.bytes, 0, copy.flops, made.costs.profile, efficiency=copy.share)
    written = made.costs.ledger.region(joined).bytes - copy.bytes
    assert (made.costs.paced(joined) or 0) > seconds + max(written, 0) / made.costs.profile.bandwidth
    small = optimise(network(name, 1, 8), Options(target="H200", verify=False, database=False, least_gain=0.0))
    found = verify(small, EmulatedRunner()).nodes
    assert found and {node.verdict for node in found} == {"passed"}, found
