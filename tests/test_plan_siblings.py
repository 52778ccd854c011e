"""Products of one operand and of different widths: one product by weights that lie side by side."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from emulated import EmulatedRunner, FaultyRunner
from sizes_models import packed
from test_collapsing import judged
from weight_models import WeightTimer, model_of

from onnxfuse.measuring.database import open_database
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.region import Region
from onnxfuse.reporting import report_of
from onnxfuse.rewriting import unfuse
from onnxfuse.tuning import TuneOptions, tune
from onnxfuse.verifying import verify

Shapes = Mapping[str, tuple[int, ...]]

CASES: dict[str, tuple[str, Shapes, list[str]]] = {
    "three widths, of which two have biases and one has an activation": (
        "g (T[M,64] x) => (T[M,64] q, T[M,96] k, T[M,16] v) { a = MatMul(x, w) b = Add(a, c) q = Relu(b) d = MatMul(x, u) k = Add(d, e) v = MatMul(x, t) }",
        {"w": (64, 64), "c": (64,), "u": (64, 96), "e": (96,), "t": (64, 16)}, ["w", "u", "t"]),
    "Gemms with their own biases, and without": (
        "g (T[M,40] x) => (T[M,8] q, T[M,24] k) { q = Gemm<transB = 1>(x, w, c) a = Gemm<transB = 1>(x, u) k = Sigmoid(a) }",
        {"w": (8, 40), "c": (8,), "u": (24, 40)}, ["w", "u"]),
    "grouped queries": (
        "g (T[2,M,64] x) => (T[2,8,M,16] q, T[2,2,M,16] k, T[2,2,M,16] v) <int64[4] h = {0,0,8,16}, int64[4] l = {0,0,2,16}> { a = MatMul(x, w) b = Reshape(a, h) q = Transpose<perm = [0,2,1,3]>(b) c = MatMul(x, u) d = Reshape(c, l) k = Transpose<perm = [0,2,1,3]>(d) e = MatMul(x, t) f = Reshape(e, l) v = Transpose<perm = [0,2,1,3]>(f) }",
        {"w": (64, 128), "u": (64, 32), "t": (64, 32)}, ["w", "u", "t"]),
    "convolutions": (
        "g (T[2,16,9,7] x) => (T[2,24,9,7] q, T[2,8,9,7] k) { a = Conv(x, w, c) q = Relu(a) k = Conv(x, u) }",
        {"w": (24, 16, 1, 1), "c": (24,), "u": (8, 16, 1, 1)}, ["w", "u"]),
    "larger windows that lie alike": (
        "g (T[2,16,9,7] x) => (T[2,16,5,4] q, T[2,8,5,4] k) { q = Conv<pads = [1,1,1,1], strides = [2,2]>(x, w) k = Conv<pads = [1,1,1,1], strides = [2,2], kernel_shape = [3,3]>(x, u) }",
        {"w": (16, 16, 3, 3), "u": (8, 16, 3, 3)}, ["w", "u"]),
}
"""Models, shapes of their constants, and which of these are weights side by side."""


def fused(model: onnx.ModelProto, folder: Path, *, rows: int = 33, **options: Any) -> Optimised:
    """Planned by measurements that say that kernels take the same time all, and back."""
    wanted = {"disable": ("layouts", "biases"), **options}
    database, dims = folder / "measurements.sqlite", {"M": rows} if "M" in str(model.graph.input) else {}
    with open_database(database) as kept:
        tune(model, WeightTimer(), kept, TuneOptions(dims=dims, disable=wanted["disable"]))
    before = packed(model)
    made = optimise(model, Options(dims=dims, target="H100", verify=False, database=database, least_gain=1.0, **wanted))
    assert packed(model) == before and packed(unfuse(made.model)) == before
    onnx.checker.check_model(made.model, full_check=True)
    return made


def joined(made: Optimised) -> list[Region]:
    return [region for region in made.regions if region.folded]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("few_ways")
def test_one_product(name: str, tmp_path: Path) -> None:
    """Right against the nodes as they are, which the function holds; it reads no weights but those side by side."""
    text, shapes, weights = CASES[name]
    made = fused(model_of(text, shapes), tmp_path)
    (region,) = joined(made)
    assert set(weights) <= {value.name for value in region.hosts}
    assert set(weights).isdisjoint(value.name for value in region.tensors)
    found = verify(made, EmulatedRunner())
    assert found.passed and found.whole.passed, found
    assert not verify(made, FaultyRunner()).passed
    (told,) = {each.what for each in report_of(made).folded}
    assert f"{len(weights)} products of one operand" in told and "columns" in told


@pytest.mark.parametrize("kind", ["bfloat16", "float"])
@pytest.mark.usefixtures("few_ways")
def test_other_types(kind: str, tmp_path: Path) -> None:
    text, shapes, _ = CASES["three widths, of which two have biases and one has an activation"]
    made = fused(model_of(text, shapes, kind), tmp_path)
    for rows in (0, 1, 37):
        assert judged(made, EmulatedRunner(), rows) == "passed"
        assert not rows or judged(made, FaultyRunner(), rows) == "failed"


def test_columns_lie_in_order(tmp_path: Path) -> None:
    """The new constants are the model's own numbers."""
    text, shapes, _ = CASES["Gemms with their own biases, and without"]
    model = model_of(text, shapes)
    (region,) = joined(fused(model, tmp_path))
    given = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    weights, bias = (value.contents() for value in region.folded if value.contents is not None)
    assert np.array_equal(weights, np.concatenate([given["w"], given["u"]]))
    assert np.array_equal(bias, np.concatenate([given["c"], np.zeros(24, np.float16)]))


LEFT: dict[str, tuple[str, Shapes]] = {
    "the same width": ("g (T[M,64] x) => (T[M,64] q, T[M,64] k) { q = MatMul(x, w) k = MatMul(x, u) }",
                       {"w": (64, 64), "u": (64, 64)}),
    "columns that no vector divides": ("g (T[M,64] x) => (T[M,60] q, T[M,64] k) { q = MatMul(x, w) k = MatMul(x, u) }",
                                       {"w": (64, 60), "u": (64, 64)}),
    "weights that others read": ("g (T[M,64] x) => (T[M,16] q, T[M,64] k, T[64,16] z) { q = MatMul(x, w) k = MatMul(x, u) z = Neg(w) }",
                                 {"w": (64, 16), "u": (64, 64)}),
    "results that meet": ("g (T[M,64] x) => (T[M,80] y) { q = MatMul(x, w) k = MatMul(x, u) y = Concat<axis = 1>(q, k) }",
                          {"w": (64, 16), "u": (64, 64)}),
    "other windows": ("g (T[2,16,9,7] x) => (T[2,24,9,7] q, T[2,8,9,7] k) { q = Conv<pads = [1,1,1,1]>(x, w) k = Conv(x, u) }",
                      {"w": (24, 16, 3, 3), "u": (8, 16, 1, 1)}),
    "windows that are wider apart": (
        "g (T[2,16,9,7] x) => (T[2,24,9,7] q, T[2,8,9,7] k) { q = Conv<pads = [1,1,1,1]>(x, w) k = Conv<pads = [2,2,2,2], dilations = [2,2]>(x, u) }",
        {"w": (24, 16, 3, 3), "u": (8, 16, 3, 3)}),
    "groups": ("g (T[2,16,9,7] x) => (T[2,24,9,7] q, T[2,8,9,7] k) { q = Conv<group = 2>(x, w) k = Conv<group = 2>(x, u) }",
               {"w": (24, 8, 1, 1), "u": (8, 8, 1, 1)}),
    "another operand": ("g (T[M,64] x) => (T[M,16] q, T[M,64] k) { z = Relu(x) q = MatMul(z, w) k = MatMul(x, u) }",
                        {"w": (64, 16), "u": (64, 64)}),
    "few rows, which share a launch": ("g (T[2,64] x) => (T[2,16] q, T[2,64] k) { q = MatMul(x, w) k = MatMul(x, u) }",
                                       {"w": (64, 16), "u": (64, 64)}),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_stays_apart(name: str) -> None:
    text, shapes = LEFT[name]
    made = optimise(model_of(text, shapes), Options(
        dims={"M": 33} if "[M" in text else {}, target="H100", verify=False, database=False, eager=True))
    assert made.plan.with_products and not any(region.folded for region in made.plan.with_products)


def test_as_few_groups_as_hold_them() -> None:
    """Of much the same size: a fused node has room for the weights of so many."""
    products = " ".join(f"y{place} = MatMul(x, w{place})" for place in range(6))
    results = ", ".join(f"T[M,{8 + 8 * place}] y{place}" for place in range(6))
    model = model_of(f"g (T[M,64] x) => ({results}) {{ {products} }}", {f"w{place}": (64, 8 + 8 * place) for place in range(6)})
    made = optimise(model, Options(dims={"M": 33}, target="H100", verify=False, database=False, eager=True))
    found = {len(region.nodes) for region in made.plan.with_products if region.folded}
    assert found == {3}


def test_predictions_decide_too(tmp_path: Path) -> None:
    """Where it is known how fast such tiles are, on a GPU of which nothing else was measured."""
    text, shapes, _ = CASES["grouped queries"]
    wide = {name: (1024, 8 * size) for name, (_, size) in shapes.items()}
    text = text.replace("{0,0,8,16}", "{0,0,8,128}").replace("{0,0,2,16}", "{0,0,2,128}").replace(
        "M,16]", "M,128]").replace("[2,M,64]", "[2,M,1024]")
    made = optimise(model_of(text, wide), Options(dims={"M": 512}, target="H200", verify=False, database=False))
    (region,) = joined(made)
    assert made.costs.paced(region) is not None and region.kernel.schedule == "product"


LAID: dict[str, tuple[str, str, Shapes]] = {
    "the heads of a detector": (
        "float16", "g (T[2,64,7,6] x) => (T[2,64,7,6] q, T[2,64,7,6] k) { g = Conv<pads = [1,1,1,1]>(x, v) r = Relu(g) a = Conv<pads = [1,1,1,1]>(r, w) b = Conv<pads = [1,1,1,1]>(r, u) c = Relu(a) q = Conv<pads = [1,1,1,1]>(c, t) k = Conv(b, s) }",
        {"v": (64, 64, 3, 3), "w": (96, 64, 3, 3), "u": (24, 64, 3, 3), "t": (64, 96, 3, 3), "s": (64, 24, 1, 1)}),
    "matrices of float32": (
        "float", "g (T[256,64] x) => (T[256,64] q, T[256,32] k) { a = MatMul(x, w) q = Relu(a) b = MatMul(x, u) k = Tanh(b) }",
        {"w": (64, 64), "u": (64, 32)}),
}


@pytest.mark.parametrize("name", LAID)
def test_weights_that_a_layout_turns_round(name: str) -> None:
    """They lie side by side as a session would lay each of them out, which does nothing more for them."""
    kind, text, shapes = LAID[name]
    model = model_of(text, shapes, kind, seed=3)
    before = packed(model)
    made = optimise(model, Options(target="H200", verify=False, database=False, least_gain=0.0))
    (region,) = joined(made)
    (weights,) = region.folded
    assert {"w", "u"} <= {value.name for value in region.hosts} and weights.shape is not None
    summed = shapes["w"][:1] if kind == "float" else (3, 3, 64)
    assert tuple(size.value for size in weights.shape) == (shapes["w"][kind == "float"] + shapes["u"][kind == "float"], *summed)
    read = {name for node in made.model.graph.node if node.op_type == "Transpose" for name in node.input}
    assert read.isdisjoint({"w", "u"}) and packed(unfuse(made.model)) == before
    onnx.checker.check_model(made.model, full_check=True)
    found = verify(made, EmulatedRunner())
    assert found.passed and found.whole.passed, found


def test_what_goes_around_a_block_ends_before_it() -> None:
    """A residual's convolution is one with the block's first; the sum behind both is for whoever comes later."""
    text = ("g (T[16,64,28,28] x) => (T[16,64,28,28] z) { g = Conv<pads = [1,1,1,1]>(x, v) r = Relu(g) a = Conv(r, w) b = Relu(a) "
            "c = Conv<pads = [1,1,1,1]>(b, t) d = Conv(c, s) k = Conv(r, u) e = Add(d, k) y = Relu(e) z = Conv(y, q) }")
    shapes = {"v": (64, 64, 3, 3), "w": (64, 64, 1, 1), "t": (64, 64, 3, 3), "s": (128, 64, 1, 1), "u": (128, 64, 1, 1), "q": (64, 128, 1, 1)}
    made = optimise(model_of(text, shapes), Options(target="H200", verify=False, database=False))
    (region,) = joined(made)
    assert [node.op for node in region.nodes if node.op != "Transpose"] == ["Conv", "Relu", "Conv"]
    assert all(value.shape is not None and value.shape[1] == 28 for value in region.outputs)
