"""Convolutions with norms of windows behind them: which regions are offered, and when one is taken."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

import numpy as np
import pytest
from kernel_harness import parse, with_constants
from onnx import ModelProto

from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.region import Region

HEAD = "g (float16[1,64,{size},{size}] x, float16[1,128,{size},{size}] z) => (float16[1,128,{size},{size}] y) "
SIZES = "<int64[3] d = {{0,32,-1}}, int64[4] e = {{1,128,{size},{size}}}> "
NORM = "r = Reshape({of}, d) i = InstanceNormalization(r, o, u) j = Reshape(i, e) m = Mul(j, s) a = Add(m, t) h = Sigmoid(a) n = Mul(a, h) "

MODELS = {
    "a norm": "c = Conv<pads = [1,1,1,1]>(x, w, b) " + NORM.format(of="c") + "y = Conv<pads = [1,1,1,1]>(n, v)",
    "the norm of a sum that the next layer adds to": (
        "c = Conv<pads = [1,1,1,1]>(x, w, b) q = Add(c, z) " + NORM.format(of="q") + "k = Conv<pads = [1,1,1,1]>(n, v) y = Add(k, q)"),
    "what another convolution reads of them": (
        "c = Conv<pads = [1,1,1,1]>(x, w, b) f = Conv<pads = [1,1,1,1]>(c, v) " + NORM.format(of="c")
        + "k = Conv<pads = [1,1,1,1]>(n, v) y = Add(k, f)"),
    "what another reads of the results": (
        "c = Conv<pads = [1,1,1,1]>(x, w, b) " + NORM.format(of="c") + "k = Conv<pads = [1,1,1,1]>(n, v) f = Tanh(c) y = Add(k, f)"),
}


def model_of(nodes: str, size: int) -> ModelProto:
    generator = np.random.default_rng(3)
    shapes = {"w": (128, 64, 3, 3), "b": (128,), "v": (128, 128, 3, 3), "s": (128, 1, 1), "t": (128, 1, 1)}
    arrays = {name: generator.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
    arrays |= {"o": np.ones(32, np.float16), "u": np.zeros(32, np.float16)}
    inputs = "".join(f", float16[{','.join(map(str, array.shape))}] {name}" for name, array in arrays.items())
    text = (HEAD.replace("] z)", "] z" + inputs + ")") + SIZES).format(size=size) + f"{{ {nodes} }}"
    return with_constants(parse(text, 20), arrays)


def fuse(nodes: str, size: int, eager: bool = True) -> Optimised:
    return optimise(model_of(nodes, size), Options(target="H200", verify=False, database=False, eager=eager))


def offered(made: Optimised) -> list[Region]:
    return [region for region in made.plan.with_products if region.made is not None
            and region.kernel.schedule == "product_norms"]


@pytest.mark.parametrize("name", MODELS)
def test_what_comes_in(name: str) -> None:
    """The convolution with all that leads to the norm's activation, and nothing that only others read, which lies as the
    convolution writes it."""
    region, *_ = offered(fuse(MODELS[name], 512))
    operators = [node.op for node in region.view if node.op != "Transpose"]
    residual = ["Add"] if "sum" in name else []
    assert operators == ["Conv", "Add", *residual, "Reshape", "InstanceNormalization", "Reshape", "Mul", "Add", "Silu"]
    shapes = [[size.value for size in value.shape or ()] for value in region.outputs]
    assert shapes == [[1, 512, 512, 128]] * (1 if name == "a norm" else 2)
    assert len(region.kernel.plan.scratch) == (6 if name == "a norm" else 5)


def test_weights_that_change_nothing_are_not_read() -> None:
    """Ones and zeros with which an exporter spells a norm of groups; those of the group norm itself are."""
    region, *_ = offered(fuse(MODELS["a norm"], 512))
    read = {value.name for value in region.tensors}
    assert {"s", "t"} <= read and not {"o", "u"} & read and {"o", "u"} <= {value.name for value in region.inlined}


def test_it_is_taken_where_it_is_predicted_to_be_quicker() -> None:
    """Where rows are read twice otherwise; small images' are not."""
    for size, taken in ((512, True), (32, False)):
        made = fuse(MODELS["the norm of a sum that the next layer adds to"], size, eager=False)
        assert any(region.kernel.schedule == "product_norms" for region in made.plan.fusions) is taken


def test_rows_in_pieces_are_read_twice() -> None:
    """What a norm in two launches is predicted to take counts that."""
    text = ("g (float16[4,256,256,128] x, float16[32] o, float16[32] u) => (float16[4,256,256,128] y) "
            "<int64[3] d = {0,32,-1}, int64[4] e = {0,128,256,256}> { c = Transpose<perm = [0,3,1,2]>(x) r = Reshape(c, d) "
            "i = InstanceNormalization(r, o, u) j = Reshape(i, e) n = Relu(j) y = Transpose<perm = [0,2,3,1]>(n) }")
    made = optimise(parse(text, 20), Options(target="H200", verify=False, database=False))
    (region,) = made.plan.fusions
    assert region.kernel.schedule == "pieces" and made.costs.read_again(region) == 2 * 4 * 128 * 256 * 256
