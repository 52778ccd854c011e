"""Constants, and products, that are folded into weights: which, what a kernel computes then, and the way back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from emulated import EmulatedRunner, FaultyRunner
from onnx import numpy_helper
from weight_models import CASES, KINDS, MATRIX, NORMS, WeightTimer, case, folding, fused, image, model_of, rows

from onnxfuse.graph import load_model
from onnxfuse.graph.constants import numpy_type, read
from onnxfuse.measuring.database import open_database
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.weights import linear
from onnxfuse.planning.weights.linear import Linear, are_powers, typed
from onnxfuse.region import Region
from onnxfuse.reporting import explain
from onnxfuse.rewriting import read_fused, weights_record
from onnxfuse.tuning import TuneOptions, tune
from onnxfuse.verifying import verify
from onnxfuse.verifying.nodes import NodeVerifier
from onnxfuse.verifying.reference import formal_names

Array = np.ndarray

pytestmark = pytest.mark.usefixtures("few_ways")


def refused(made: Optimised) -> list[str]:
    return [each.message for each in made.refusals if each.code == "weights"]


def operators(region: Region) -> list[str]:
    return [node.op for node in region.nodes if node.op not in ("Constant", "Transpose")]


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_reads_other_weights(name: str, tmp_path: Path) -> None:
    """It is right against the nodes as they are, and a hundredth more is not."""
    made = fused(case(name), tmp_path)
    (region,) = folding(made)
    wanted = [op for op in CASES[name][2] if op != "Transpose"]
    assert [op for op in operators(region) if op != "Sum"] == wanted
    inputs = {value.name for value in region.tensors}
    assert inputs.isdisjoint(CASES[name][1]) and {value.name for value in region.folded} <= inputs
    assert {"w", "u"} & CASES[name][1].keys() <= {value.name for value in region.hosts}
    found = verify(made, EmulatedRunner())
    assert found.passed and found.whole.passed, found
    assert {each.verdict for each in verify(made, FaultyRunner()).nodes if each.rule == "products"} == {"failed"}


def test_a_bias_that_is_not_looked_at_may_be_infinite(tmp_path: Path) -> None:
    assert len(folding(fused(case("a bias that is not looked at", given={"b": np.inf}), tmp_path))) == 1


def judged(made: Optimised, runner: EmulatedRunner, rows: int = 33) -> str:
    """The verdict on the kernel of the one node with folded weights on inputs that are drawn: where the CPU provider
    lacks an operator in a type, no run of the model gives any."""
    (region,) = folding(made)
    node = next(each for each in read_fused(made.model) if len(each.tensors) == len(region.tensors)
                and set(each.tensors) >= {value.name for value in region.folded})
    held = {tensor.name: read(tensor, None) for tensor in made.model.graph.initializer}
    sizes, generator = {"M": rows}, np.random.default_rng(1)
    drawn = {value.name: generator.standard_normal([size.evaluate(sizes) for size in value.shape or ()]).astype(
        numpy_type(value.dtype or 0)) for value in region.tensors if not value.is_constant}
    arrays = held | drawn
    feeds = {formal: arrays[name] for formal, name in formal_names(node).items()}
    result = NodeVerifier(made.model, runner).verify(node, feeds, "drawn")
    return result.verdict


@pytest.mark.parametrize("kind", ["bfloat16", "float"])
@pytest.mark.parametrize("name", [
    "scale and shift before, and a bias", "a bias and a layer scale", "products with biases, and what follows",
    "a normalisation behind", "an order before", "alpha and beta"])
def test_other_types(name: str, kind: str, tmp_path: Path) -> None:
    made = fused(case(name, kind), tmp_path)
    assert judged(made, EmulatedRunner()) == "passed" and judged(made, FaultyRunner()) == "failed"


def test_a_convolution_of_float32(tmp_path: Path) -> None:
    made = fused(case("a convolution in groups and its normalisation", "float"), tmp_path)
    assert verify(made, EmulatedRunner()).passed and not verify(made, FaultyRunner()).passed


@pytest.mark.parametrize(("k", "n"), [(1, 1), (31, 33), (33, 31), (4097, 3)])
@pytest.mark.parametrize("rows", [0, 1, 31, 4097])
def test_odd_sizes(k: int, n: int, rows: int, tmp_path: Path) -> None:
    """Against float64, also of no rows at all."""
    if rows * k > 1 << 18:
        pytest.skip("what that shows others do")
    model = model_of(f"g (T[M,{k}] x) => (T[M,{n}] y) {{ a = Mul(x, s) p = MatMul(a, w) q = Add(p, b) y = Mul(q, g) }}",
                     {"s": (k,), "w": (k, n), "b": (n,), "g": (n,)})
    made = fused(model, tmp_path, rows=max(rows, 1))
    (node,) = read_fused(made.model)
    generator = np.random.default_rng(rows)
    x = generator.standard_normal((rows, k)).astype(np.float16)
    given, held = ({tensor.name: numpy_helper.to_array(tensor) for tensor in each.graph.initializer}
                   for each in (model, made.model))
    feeds = {f"x{place}": x if name == "x" else held[name] for place, name in enumerate(node.tensors)}
    feeds |= {f"h{place}": held[name] for place, name in enumerate(node.hosts)}
    (got,) = EmulatedRunner().kernel(node, made.model, feeds, None)
    s, w, b, g = (given[name].astype(np.float64) for name in "swbg")
    want = ((x * s) @ w + b) * g
    assert got.shape == (rows, n)
    scale = np.abs(x * s) @ np.abs(w) + np.abs(b)
    assert (np.abs(got - want) <= 2**-9 * scale * g).all()


EXACT: dict[str, tuple[str, dict[str, tuple[int, ...]], dict[str, Any]]] = {
    "a power of two": (rows("p = MatMul(x, w) y = Mul(p, g)"), {**MATRIX, "g": ()}, {"g": 0.125}),
    "powers of two by channel, less than zero too": (
        rows("p = MatMul(x, w) a = Add(p, b) y = Div(a, g)"), {**MATRIX, "b": (72,), "g": (72,)},
        {"g": np.resize([2.0, -0.5, 4.0], 72)}),
    "powers of two before": (rows("a = Mul(x, s) y = MatMul(a, w)"), {**MATRIX, "s": (64,)},
                             {"s": np.resize([0.5, 2.0], 64)}),
    "an order": (CASES["an order behind"][0], MATRIX, {}),
    "alpha": (rows("y = Gemm<alpha = 0.25>(x, w)"), MATRIX, {}),
    "a sum of biases": (rows("p = MatMul(x, w) a = Add(p, b) q = Neg(a) y = Add(q, d)"),
                        {**MATRIX, "b": (72,), "d": (72,)}, {"b": 0.5, "d": 0.25}),
}


@pytest.mark.parametrize("kind", ["bfloat16", "float"])
@pytest.mark.parametrize("name", EXACT)
def test_what_changes_no_digit_needs_no_option(name: str, kind: str, tmp_path: Path) -> None:
    text, shapes, given = EXACT[name]
    model = model_of(text, shapes, kind, given)
    if name == "an order":
        model.graph.initializer.append(numpy_helper.from_array(np.arange(72)[::-1].copy(), "order"))
    made = fused(model, tmp_path, fold_weights=False)
    assert len(folding(made)) == 1 and not refused(made)
    assert judged(made, EmulatedRunner()) == "passed" and judged(made, FaultyRunner()) == "failed"


NEARLY: dict[str, tuple[str, dict[str, tuple[int, ...]], dict[str, Any]]] = {
    "three": (EXACT["a power of two"][0], {**MATRIX, "g": ()}, {"g": 3.0}),
    "a sum that rounds": (EXACT["a sum of biases"][0], {**MATRIX, "b": (72,), "d": (72,)}, {"b": 1.0, "d": 2.0**-60}),
    "powers of two that leave the type in float16": (
        rows("p = MatMul(x, w) y = Mul(p, g)"), {**MATRIX, "g": ()}, {"g": 2.0**-20}),
    "powers of two that take a digit of a few in float16": (
        rows("p = MatMul(x, w) y = Mul(p, g)"), {**MATRIX, "g": ()},
        {"g": 0.125, "w": np.resize([1.0, 1.0, 1.0, 0.5, 1037 * 2.0**-23], (64, 72))}),
    "a normalisation": (CASES["a normalisation behind"][0], {**MATRIX, **NORMS}, {}),
    "two products": (CASES["a product before"][0], {"w": (40, 96), "u": (96, 31)}, {}),
    "a shift before": (CASES["a shift before"][0], {**MATRIX, "d": (64,)}, {}),
}


@pytest.mark.parametrize("name", NEARLY)
def test_without_the_option_no_weight_is_rounded_anew(name: str, tmp_path: Path) -> None:
    text, shapes, given = NEARLY[name]
    kind = "float16" if name.endswith("in float16") else "float"
    why = "a channel's weights would be too small for their type" if "leave" in name else (
        "its weights would be rounded anew, which fold_weights allows")
    made = fused(model_of(text, shapes, kind, given), tmp_path, fold_weights=False)
    assert not folding(made)
    told = [each for each in made.refusals if each.code == "weights"]
    if name == "two products":
        assert not told  # nobody looks for what only the option allows
    else:
        assert {each.message.partition(" is not folded: ")[2] for each in told} == {why}
        assert not any(each.remedy for each in told)  # the report would advise to do what is measured in vain, mostly


# ---- What stays. ----

SCALED = rows("p = MatMul(x, w) y = Mul(p, g)")
SHAPES: dict[str, tuple[int, ...]] = {**MATRIX, "g": (72,)}

KEPT: dict[str, tuple[str, dict[str, tuple[int, ...]], dict[str, Any], str]] = {
    "zero": (SCALED, SHAPES, {"g": np.resize([1.5, 0.0], 72)},
             "Mul -> y multiplies by zero, which infinite numbers are not to become"),
    "infinity": (SCALED, SHAPES, {"g": np.resize([1.5, np.inf], 72)},
                 "a constant of Mul -> y is infinite or no number"),
    "no number": (rows("p = MatMul(x, w) a = Add(p, b) y = Mul(a, g)"), {**SHAPES, "b": (72,)},
                  {"b": np.resize([np.nan, 1.0], 72)}, "a constant of Add -> a is infinite or no number"),
    "a division by zero": (rows("p = MatMul(x, w) y = Div(p, g)"), SHAPES, {"g": 0.0},
                           "a constant of Div -> y is infinite or no number"),
    "weights that are infinite": (SCALED, SHAPES, {"w": np.resize([1.0, -np.inf], (64, 72))},
                                  "a constant of MatMul -> p is infinite or no number"),
    "a bias of its own that is infinite": (
        rows("p = Gemm(x, w, b) y = Mul(p, g)"), {**SHAPES, "b": (72,)}, {"b": np.resize([1.0, np.inf], 72)},
        "a constant of Gemm -> p is infinite or no number"),
    "overflow": (SCALED, SHAPES, {"g": 6e4, "w": 2.0}, "a weight would be past the largest number of its type"),
    "a bias past the largest number": (
        rows("p = MatMul(x, w) a = Add(p, b) y = Mul(a, g)"), {**SHAPES, "b": (72,)},
        {"w": 1e-3, "b": 6e4, "g": 3.0}, "a bias would be past the largest number of its type"),
    "nothing left": (SCALED, SHAPES, {"g": 3e-6}, "a channel's weights would be too small for their type"),
    "one channel with too little left": (SCALED, SHAPES, {"g": np.where(np.arange(72) == 31, 3e-6, 1.5)},
                                         "a channel's weights would be too small for their type"),
    "a bias with nothing left": (
        rows("p = MatMul(x, w) a = Add(p, b) y = Mul(a, g)"), {**SHAPES, "b": (72,)}, {"w": 0.0, "b": 0.01, "g": 4e-6},
        "a bias would be too small for its type"),
    "weights that another product reads": (
        rows("p = MatMul(x, w) q = Mul(p, g) r = MatMul(x, w) e = Softmax(r) y = Add(q, e)"), SHAPES, {},
        "'w' is read by others too"),
    "weights that are given out": (SCALED.replace("y) {", "y, T[64,72] w) {"), SHAPES, {}, "'w' is read by others too"),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_not_folded(name: str, tmp_path: Path) -> None:
    """Says why, and ``explain`` does."""
    text, shapes, given, why = KEPT[name]
    made = fused(model_of(text, shapes, "float16", given), tmp_path)
    assert not folding(made) and weights_record(made.model) is None
    assert {message.partition(" is not folded: ")[2] for message in refused(made)} == {why}
    assert why in explain(made, "p").to_text(400)


SILENT: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    "a bias alone": (rows("p = MatMul(x, w) a = Add(p, b) y = Relu(a)"), {**MATRIX, "b": (72,)}),
    "a scale of each row": (
        "g (T[72,64] x) => (T[72,72] y) { p = MatMul(x, w) y = Mul(p, s) }", {**MATRIX, "s": (72, 1)}),
    "a number over the result": (rows("p = MatMul(x, w) y = Div(g, p)"), SHAPES),
    "a scaled operand that others read": (
        "g (T[M,64] x) => (T[M,72] y, T[M,64] z) { a = Mul(x, s) y = MatMul(a, w) z = Softmax(a) }",
        {**MATRIX, "s": (64,)}),
    "an order of channels in groups": (
        image("c = Conv<group = 2>(x, w) y = Gather<axis = 1>(c, order)"), {"w": (24, 8, 1, 1)}),
    "a scale that is computed": (
        "g (T[M,64] x, T[72] z) => (T[M,72] y) { p = MatMul(x, w) y = Mul(p, z) }", MATRIX),
    "weights that are given": (
        "g (T[M,64] x, T[64,72] z) => (T[M,72] y) { p = MatMul(x, z) y = Mul(p, g) }", {"g": (72,)}),
    "a result that others read": (
        "g (T[M,64] x) => (T[M,72] y, T[M,72] z) { p = MatMul(x, w) y = Mul(p, g) z = Softmax(p) }", SHAPES),
    "a scale behind heads": (
        "g (T[2,M,64] x) => (T[2,6,M,16] y) <int64[4] h = {0,0,6,16}> { p = MatMul(x, w) r = Reshape(p, h) "
        "t = Transpose<perm = [0,2,1,3]>(r) y = Mul(t, g) }", {"w": (64, 96), "g": (16,)}),
    "the square of a result": (rows("p = MatMul(x, w) y = Mul(p, p)"), MATRIX),
    "a shift before padding": (
        image("a = Add(x, d) y = Conv<pads = [1,1,1,1]>(a, w)"), {"w": (24, 16, 3, 3), "d": (16, 1, 1)}),
    "a curve between products": (
        rows("p = MatMul(x, w) a = Relu(p) y = MatMul(a, u)", k=40, n=96, out=31), {"w": (40, 96), "u": (96, 31)}),
    "a product that would take more": (
        rows("p = MatMul(x, w) y = MatMul(p, u)", k=96, n=31, out=96), {"w": (96, 31), "u": (31, 96)}),
    "windows of a convolution's result": (
        image("c = Conv(x, w) y = Conv(c, u)", m=8), {"w": (24, 16, 1, 1), "u": (8, 24, 3, 3)}),
    "an order of channels twice": (
        rows("p = MatMul(x, w) y = Gather<axis = 1>(p, order)"), MATRIX),
}


@pytest.mark.parametrize("name", SILENT)
def test_what_is_nothing_to_fold(name: str, tmp_path: Path) -> None:
    text, shapes = SILENT[name]
    model = model_of(text, shapes)
    if "order" in text:
        order = np.arange(24)[::-1].copy() if "groups" in name else np.zeros(72, np.int64)
        model.graph.initializer.append(numpy_helper.from_array(order, "order"))
    made = fused(model, tmp_path)
    assert not folding(made) and not refused(made)
    assert made.plan.with_products and not any(region.folded for region in made.plan.with_products)
    assert verify(made, EmulatedRunner()).passed


@pytest.mark.parametrize(("k", "n"), [(0, 72), (64, 0)])
def test_weights_without_elements(k: int, n: int, tmp_path: Path) -> None:
    made = fused(model_of(rows("p = MatMul(x, w) y = Mul(p, g)", k=k, n=n), {"w": (k, n), "g": ()}), tmp_path)
    assert not folding(made) and not refused(made)


def test_a_body_keeps_its_weights(tmp_path: Path) -> None:
    text = ("g (T[M,64] x, bool k) => (T[M,72] y) { y = If(k) <then_branch = t () => (T[M,72] a) { p = MatMul(x, w) "
            "a = Mul(p, g) }, else_branch = e () => (T[M,72] b) { b = MatMul(x, u) }> }")
    model = model_of(text, {**SHAPES, "u": (64, 72)})
    own = [tensor for tensor in model.graph.initializer if tensor.name in ("w", "g")]
    model.graph.node[0].attribute[0].g.initializer.extend(own)
    for tensor in own:
        model.graph.initializer.remove(tensor)
    made = fused(model, tmp_path)
    assert not folding(made)
    assert any(message.endswith("is in a body") for message in refused(made))


def test_weights_in_files_are_not_read(tmp_path: Path) -> None:
    model = model_of(SCALED, SHAPES)
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="weights", size_threshold=1000)
    loaded = load_model(tmp_path / "model.onnx")
    with open_database(tmp_path / "m.sqlite") as kept:
        tune(loaded, WeightTimer(), kept, TuneOptions(dims={"M": 33}, fold_weights=True))
    made = optimise(loaded, Options(dims={"M": 33}, target="H100", verify=False, database=tmp_path / "m.sqlite",
                                    fold_weights=True))
    assert not folding(made)
    assert set(refused(made)) == {
        "Mul into MatMul -> p is not folded: 'w' lies in a file of its own, which is not read"}


# ---- The arithmetic. ----


@pytest.mark.parametrize(("factors", "powers"), [
    (1.0, True), (-0.25, True), (2.0**100, True), (3.0, False), (0.0, False), (np.inf, False), (np.nan, False),
    ([1.0, 0.5, -8.0], True), ([1.0, 0.75], False)])
def test_powers_of_two(factors: Any, powers: bool) -> None:
    assert are_powers(np.array(factors)) is powers


def test_a_linear_map_is_what_its_parts_are() -> None:
    """In groups and windows, each operation against the definition."""
    generator = np.random.default_rng(3)
    weights, x = generator.standard_normal((2, 3, 4, 5)), generator.standard_normal((2, 4, 5))

    def of(made: Linear, operand: Array) -> Array:
        sums = np.einsum("goik,gik->go", made.weights, operand).reshape(-1)
        return sums if made.bias is None else sums + made.bias

    own = Linear(weights).shifted(generator.standard_normal(6))
    s, t, u, v = (generator.standard_normal(size) for size in (8, 8, 6, 6))
    shaped = x * s.reshape(2, 4, 1) + t.reshape(2, 4, 1)
    made = own.of_shifted(t).of_scaled(s).scaled(u).shifted(v)
    assert np.allclose(of(made, x), of(own, shaped) * u + v) and not made.exact


@pytest.mark.parametrize("kind", linear.UNITS)
def test_what_was_not_zero_stays_so(kind: int) -> None:
    """Infinity times it is infinite, and infinity times zero no number."""
    wide = np.full((1, 1, 2, 1), [[[[1.0], [-1e-60]]]])
    made, why = typed(Linear(wide), kind)
    assert not why and made.weights[0, 0, 1, 0] < 0 and not made.exact
    assert made.weights.dtype == numpy_type(kind)
    assert ml_dtypes.finfo(made.weights.dtype).smallest_subnormal == -made.weights[0, 0, 1, 0]


@pytest.mark.parametrize(("kind", "least"), [("float", 126), ("float16", 24), ("bfloat16", 133)])
def test_numbers_that_a_kernel_holds(kind: str, least: int) -> None:
    """Kernels round float32 to TF32, of which less is left below the least normal number."""
    for power, holds in ((least, True), (least + 1, False)):
        _, why = typed(Linear(np.full((1, 1, 2, 1), 1.0 * 2.0**-power)), KINDS[kind])
        assert (not why) is holds, (power, why)
