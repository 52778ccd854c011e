"""Operators that a reference spells out because ONNX Runtime's CPU provider lacks them in float64."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from cli_models import parse

from onnxfuse.pipeline import Options, optimise
from onnxfuse.rewriting import read_fused
from onnxfuse.verifying.evaluate import Evaluator
from onnxfuse.verifying.reference import Reference


@pytest.mark.parametrize("opset", [11, 17, 18, 22])
@pytest.mark.parametrize("shape", [(2, 3, 40), (2, 3, 5, 7), (1, 3, 2, 3, 4), (0, 3, 4)])
def test_instance_normalization_is_computed_in_float64(opset: int, shape: tuple[int, ...]) -> None:
    """float64, 1e-12 of the output's scale, against NumPy; float32 would be off by 1e-7."""
    sizes = ", ".join(map(str, shape))
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}]> g (double[{sizes}] x, double[3] w, double[3] b) => '
        f"(double[{sizes}] y) {{ y = InstanceNormalization <epsilon = 0.125> (x, w, b) }}")
    rng = np.random.default_rng(0)
    feeds = {"x": 50 + rng.standard_normal(shape), "w": rng.standard_normal(3), "b": rng.standard_normal(3)}
    evaluator = Evaluator(model)
    (found,) = evaluator.run(feeds)
    assert evaluator.downgraded == ()
    axes, column = tuple(range(2, len(shape))), (3, *[1] * (len(shape) - 2))
    x = feeds["x"]
    normal = (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 0.125)
    wanted = normal * feeds["w"].reshape(column) + feeds["b"].reshape(column)
    assert found.shape == shape
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12 * np.abs(wanted).max(initial=0.0))


@pytest.mark.parametrize("opset", [17, 18, 22])
@pytest.mark.parametrize(("axis", "bias"), [(-1, True), (1, False)])
def test_layer_normalization_of_rows_of_one_large_number(opset: int, axis: int, bias: bool) -> None:
    """A row of the lowest float32 in float64, as a mask makes one: its variance is 0, and its result the bias."""
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}]> g (double[n,2,32] x, double[32] w, double[32] b) => '
        f"(double[n,2,32] y) {{ y = LayerNormalization <axis = {axis}, epsilon = 0.125> (x, w{', b' * bias}) }}")
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((3, 2, 32)), "w": rng.standard_normal(32), "b": rng.standard_normal(32)}
    feeds["x"][1] = -3.4028234663852886e38
    axes = tuple(range(axis % 3, 3))
    centred = feeds["x"] - feeds["x"].mean(axes, keepdims=True)
    wanted = centred / np.sqrt((centred ** 2).mean(axes, keepdims=True) + 0.125) * feeds["w"] + bias * feeds["b"]
    (found,) = Evaluator(model).run(feeds)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12 * np.abs(wanted).max())


@pytest.mark.parametrize("kind", ["float", "double"])
def test_the_maximum_of_windows(kind: str) -> None:
    """NaN where one is in a window, -infinity where nothing else is; padding is neither."""
    model = parse(f"g ({kind}[1,1,4,4] x) => ({kind}[1,1,5,5] y) {{ "
                  "y = MaxPool <kernel_shape = [2,2], pads = [1,1,1,1]> (x) }")
    x = np.full((1, 1, 4, 4), -np.inf)
    x[0, 0, 0], x[0, 0, 3, 3] = [1, 2, np.nan, -3], -5
    wanted = np.full((1, 1, 5, 5), -np.inf)
    wanted[0, 0, :2] = [1, 2, np.nan, np.nan, -3]
    wanted[0, 0, 3:, 3:] = -5
    (found,) = Evaluator(model).run({"x": x.astype(np.float64 if kind == "double" else np.float32)})
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("kind", ["int8", "uint8", "int16", "uint16"])
@pytest.mark.parametrize("op", ["Max", "Min"])
def test_extrema_of_short_integers(op: str, kind: str) -> None:
    """Of three operands, at the limits of the type; no release of ONNX Runtime has them all."""
    model = parse(f"g ({kind}[5] x, {kind}[5] z, {kind}[1] c) => ({kind}[5] y) {{ y = {op}(x, z, c) }}")
    least, most = np.iinfo(kind).min, np.iinfo(kind).max
    feeds = {"x": np.array([least, most, 1, 3, 0], kind), "z": np.array([most, most, 2, least, 1], kind),
             "c": np.array([2], kind)}
    (found,) = Evaluator(model).run(feeds)
    wanted = {"Max": np.maximum, "Min": np.minimum}[op].reduce(list(np.broadcast_arrays(*feeds.values())))
    assert found.dtype == wanted.dtype and found.tolist() == wanted.tolist()


def exact(op: str, x: np.ndarray, alpha: float, gamma: float) -> np.ndarray:
    below = {"Elu": lambda: alpha * np.expm1(x), "Celu": lambda: alpha * np.expm1(x / alpha),
             "Selu": lambda: gamma * alpha * np.expm1(x)}[op]()
    return np.where(x < 0, below, gamma * x if op == "Selu" else x)


@pytest.mark.parametrize(("op", "attributes"), [
    ("Elu", {}), ("Elu", {"alpha": 0.5}), ("Celu", {}), ("Celu", {"alpha": 2.0}),
    ("Selu", {}), ("Selu", {"alpha": 1.25, "gamma": 1.5}),
])
def test_the_kin_of_elu_is_computed_in_float64(op: str, attributes: dict[str, float]) -> None:
    """float64, a relative 1e-10 against NumPy's expm1, near zero too, where float32 has four digits."""
    node = onnx.helper.make_node(op, ["x"], ["y"], **attributes)
    infos = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.DOUBLE, ["n"]) for name in "xy"]
    graph = onnx.helper.make_graph([node], "g", infos[:1], infos[1:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    sizes = np.array([1e-300, 1e-12, 1e-6, 9.99e-6, 1.01e-5, 2e-4, 0.1, 1.0, 30.0, 1e30, np.inf])
    x = np.concatenate([-sizes, [0.0, np.nan], sizes])
    evaluator = Evaluator(model)
    with np.errstate(over="ignore"):
        (found,) = evaluator.run({"x": x})
        usual = {"Elu": (1.0, 1.0), "Celu": (1.0, 1.0), "Selu": (1.67326319217681884765625, 1.05070102214813232421875)}
        alpha, gamma = (attributes.get(name, of) for name, of in zip(("alpha", "gamma"), usual[op], strict=True))
        wanted = exact(op, x, alpha, gamma)
    assert evaluator.downgraded == ()
    np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=0)


def test_a_sigmoid_has_all_its_digits() -> None:
    """float64, a relative 1e-13 of the definition; the CPU provider's has ten digits at -15 and none at -512."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (double[n] x) => (double[n] y) { y = Sigmoid(x) }')
    x = np.array([-np.inf, -700.0, -512.0, -40.0, -1.0, -1e-300, 0.0, 1e-9, 1.0, 40.0, 700.0, np.inf, np.nan])
    (found,) = Evaluator(model).run({"x": x})
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-x)), rtol=1e-13, atol=0)


@pytest.mark.parametrize(("step", "kind"), [
    ("Cast <to = 6> (a)", "int32"), ("Cast <to = 7> (a)", "int64"), ("Floor(a)", "float"), ("Less(a, three)", "bool"),
])
def test_what_decides_is_nudged_to_either_side(step: str, kind: str) -> None:
    """Twice 1.5 is 3, and a kernel's 3 may be a little more or less."""
    made = optimise(parse(f"""
        g (float[n, 4096] x, float[4096] z) => ({kind}[n, 4096] y) <float three = {{3}}> {{
          a = Mul(x, z) y = {step} }}"""), Options(verify=False, dims={"n": 4096}))
    (node,) = read_fused(made.model)
    names = [name for name in made.model.functions[0].input if name.startswith("x")]
    feeds = dict(zip(names, (np.full((1, 4096), 2, np.float32), np.full(4096, 1.5, np.float32)), strict=True))
    reference = Reference(node, made.model)
    found = {float(array.reshape(-1)[0]) for (array,) in reference.nudged(feeds)}
    assert found == ({0, 1} if kind == "bool" else {2, 3})


def test_what_is_only_computed_is_not_nudged() -> None:
    made = optimise(parse("g (float[n, 4096] x, float[4096] z) => (double[n, 4096] y) { a = Mul(x, z) "
                          "y = Cast <to = 11> (a) }"), Options(verify=False, dims={"n": 4096}))
    reference = Reference(read_fused(made.model)[0], made.model)
    assert not reference.nudged({"x0": np.ones((1, 4096), np.float32), "x1": np.ones(4096, np.float32)})


def test_what_the_standard_has_in_float32_is_widened() -> None:
    """DequantizeLinear gives float32 up to operator set 18, in a body that is raised to float64 too."""
    model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["" : 13]>
        g (double[n] x) => (double[n] y) <double s = {0.0625}, uint8 z = {128}> {
            q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) y = Sigmoid(d)
        }''')
    x = np.array([-3.0, 0.0, 0.5, 4.25])
    (found,) = Evaluator(model).run({"x": x})
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-x)), rtol=1e-13)


@pytest.mark.parametrize("opset", [13, 19, 22])
def test_what_follows_a_dequantisation_is_computed_in_float64(opset: int) -> None:
    """float64, a relative 1e-13; a reference in float32 misses by 1e-7, and tells nothing of rows of 400."""
    model = parse("""g (uint8[n, 400] q) => (float[n, 400] y) <float s = {0.0625}, uint8 z = {128}> {
        d = DequantizeLinear(q, s, z) e = Softmax(d) y = Neg(e) }""", opset=opset)
    fused = optimise(model, Options(verify=False, least_gain=0.0))
    (node,) = read_fused(fused.model)
    q = np.random.default_rng(0).integers(0, 256, (3, 400)).astype(np.uint8)
    (found,) = Reference(node, fused.model).outputs({"x0": q, "x1": np.array(0.0625, np.float32)})
    scores = (q.astype(np.float64) - 128) * 0.0625
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    np.testing.assert_allclose(found, -powers / powers.sum(axis=1, keepdims=True), rtol=1e-13)
