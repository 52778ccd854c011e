"""Quantised models from end to end: fused, right in the emulator, and loaded by ONNX Runtime with its own passes."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import quantized_models
from cli_models import parse
from emulated import EmulatedRunner
from emulator import Emulator
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from quantized_models import Writer
from rewriting_models import run, same_bits

from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.rewriting import read_fused
from onnxfuse.runtime import library
from onnxfuse.schedules.headers import linked, used_in
from onnxfuse.verifying import verify
from onnxfuse.verifying.reference import Reference

OLDEST = os.environ.get("ONNXFUSE_OLDEST_PYTHON")

LOAD = """
import sys, onnxruntime
library, path, level = sys.argv[1:]
options = onnxruntime.SessionOptions()
options.log_severity_level = 4
options.graph_optimization_level = onnxruntime.GraphOptimizationLevel(int(level))
options.register_custom_ops_library(library)
try:
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"], enable_fallback=0)
except Exception as error:
    print(error)
"""


@cache
def optimised(name: str) -> Optimised:
    return optimise(quantized_models.MODELS[name](), Options(verify=False, target="H100", dims={"batch": 2}))


@pytest.mark.parametrize("name", quantized_models.MODELS)
def test_kernels_and_functions(name: str) -> None:
    """Kernels in the emulator by the tolerances of ``verifying.tolerances``, functions bit for bit."""
    made = optimised(name)
    assert len(made.plan.fusions) >= 3
    left = {(node.domain, node.op_type) for node in made.model.graph.node}
    assert not left & {("com.microsoft", "QuantizeLinear"), ("com.microsoft", "DequantizeLinear")}
    result = verify(made, EmulatedRunner())
    # Of a NaN the runtime's CPU kernel, which is the reference here, makes another 8-bit number than its CUDA kernel.
    wrong = [node for node in result.nodes if node.verdict != "passed" and " on not-a-number: " not in node.message]
    assert result.whole.identical and result.kernels_run and not wrong, result.text()
    for batch in (0, 1, 3):
        feeds = quantized_models.inputs(batch)
        same_bits(run(quantized_models.MODELS[name](), feeds), run(made.model, feeds))


@pytest.mark.parametrize("domain", ["", "com.microsoft"])
def test_rounding_decides_in_either_domain(domain: str) -> None:
    """Verification allows for computed numbers on the edge of a step, whosever operator rounds."""
    w = Writer()
    model = w.model(w.there_and_back(w.swish("x"), domain=domain), [5, 7, 16])
    made = optimise(model, Options(verify=False, target="H100", dims={"batch": 2}))
    (node,) = read_fused(made.model)
    assert [output.decides for output in Reference(node, made.model).precision] == [True]


@pytest.mark.parametrize("level", [0, 1, 2, 99])
@pytest.mark.parametrize("python", [
    sys.executable,
    pytest.param(OLDEST, marks=pytest.mark.skipif(OLDEST is None, reason="ONNXFUSE_OLDEST_PYTHON is not set")),
], ids=["newest", "oldest"])
@pytest.mark.parametrize("name", quantized_models.MODELS)
def test_sessions_get_as_far_as_the_kernels(name: str, python: str, level: int, tmp_path: Path) -> None:
    """Every pass over the graph comes before the kernels are made, which the CPU refuses."""
    path = tmp_path / "model.onnx"
    onnx.save(optimised(name).model, path)
    done = subprocess.run([python, "-c", LOAD, str(library.library_path()), str(path), str(level)],
                          capture_output=True, text=True)
    assert "was given to the CPU, and its kernel runs on a GPU" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(("operator", "kinds", "attributes", "says"), [
    ("QuantizeLinear", (TensorProto.FLOAT, TensorProto.FLOAT, TensorProto.FLOAT8E4M3FN), {}, "which kernels do not"),
    ("QuantizeLinear", (TensorProto.FLOAT, TensorProto.FLOAT, TensorProto.INT4), {}, "which kernels do not"),
    ("QuantizeLinear", (TensorProto.INT32, TensorProto.FLOAT, TensorProto.INT8), {}, "of int32 has no kernel"),
    ("QuantizeLinear", (TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.INT8), {}, "a scale of another type"),
    ("QuantizeLinear", (TensorProto.FLOAT16, TensorProto.FLOAT16, TensorProto.INT8), {"precision": 10}, "precision"),
    ("QuantizeLinear", (TensorProto.FLOAT, TensorProto.FLOAT, TensorProto.INT8), {"block_size": 2}, "in blocks"),
    ("DequantizeLinear", (TensorProto.INT8, TensorProto.FLOAT, TensorProto.INT8), {"block_size": 2}, "in blocks"),
    ("DequantizeLinear", (TensorProto.FLOAT8E5M2, TensorProto.FLOAT, TensorProto.FLOAT8E5M2), {},
     "which kernels do not"),
])
def test_what_has_no_kernel_is_refused(
    operator: str, kinds: tuple[int, int, int], attributes: dict[str, int], says: str
) -> None:
    first, scale, zero = kinds
    sizes = [2, 4] if "block_size" in attributes else []
    nodes = [helper.make_node(operator, ["x", "s", "z"], ["q"], **attributes),
             helper.make_node("DequantizeLinear" if operator == "QuantizeLinear" else "Neg",
                              ["q", "s", "z"][: 3 if operator == "QuantizeLinear" else 1], ["y"])]
    if operator == "QuantizeLinear" and attributes:
        nodes[1].attribute.extend(attribute for attribute in nodes[0].attribute if attribute.name == "block_size")
    graph = helper.make_graph(
        nodes, "refused",
        [helper.make_tensor_value_info("x", first, [4, 4]), helper.make_tensor_value_info("s", scale, sizes),
         helper.make_tensor_value_info("z", zero, sizes)], [helper.make_tensor_value_info("y", scale, [4, 4])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    made = optimise(model, Options(verify=False, target="H100"))
    assert not made.plan.fusions
    assert any(says in refusal.message for refusal in made.plan.refusals), made.plan.refusals


STEPS = """
extern "C" __global__ void k(const float* x, const float* step, float* quotients, float* numbers, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  quotients[i] = of::steps(x[i], step[i]);
  numbers[2 * i] = (signed char)of::nearest_byte(quotients[i], 3, -128.0f, 127.0f);
  numbers[2 * i + 1] = of::nearest(quotients[i], 3.0f, 0.0f, 65535.0f);
}
"""


VECTORS = """
extern "C" __global__ void k(const float* x, const float* step, signed char* low, unsigned char* high,
                             signed char* pairs, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float four[4];
  for (int v = 0; v < 4; ++v) four[v] = x[4 * i + v];
  of::store(low + 4 * i, of::quantised<signed char>(four, step[i], 3));
  float two[2] = {four[0], four[3]};
  of::store(pairs + 2 * i, of::quantised<signed char>(two, step[i], 3));
  of::store(high + 4 * i, of::quantised<unsigned char>(four, step[i], 250));
}
"""


def near_ties(every: int = 1) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Numbers on ties and a unit beside them and what they are divided by, so many one after the other by the same, of
    reciprocals that are exact and hard; and those that are none, endless, or past both ends."""
    random = np.random.default_rng(5)
    count = 1 << 16
    digits, exponents = random.integers(1 << 23, 1 << 24, count), random.integers(-43, -3, count)
    step = np.ldexp(digits.astype(np.float32), exponents)
    step[::4] = np.nextafter(np.exp2(random.integers(-9, 9, count // 4)).astype(np.float32), np.float32(0))
    step[1::8] = np.exp2(random.integers(-9, 9, count // 8))
    step = np.repeat(step[::every], every)
    x = ((random.integers(-70000, 70000, count) + 0.5) * step.astype(np.float64)).astype(np.float32)
    x = np.nextafter(x, random.choice([-np.inf, 0, np.inf], count).astype(np.float32), dtype=np.float32)
    edges = np.array([0, -0.0, 1, -1, 1e-40, 3e38, -3e38, np.inf, -np.inf, np.nan, 1e-20, 0.4, 70000], np.float32)
    odd = np.stack(np.meshgrid(edges, np.append(edges, np.float32([2**-126, 2**127])))).reshape(2, -1)
    return np.append(x, np.repeat(odd[0], every)), np.append(step, np.repeat(odd[1], every))


def test_quotients_are_those_of_division() -> None:
    """Where they decide; and all come to what division and rint give."""
    x, step = near_ties()
    quotients, numbers = np.empty(x.size, np.float32), np.empty((x.size, 2), np.float32)
    Emulator(linked(("onnxfuse",), used_in(STEPS)) + STEPS).launch(
        "k", -(-x.size // 256), 256, [x, step, quotients, numbers, x.size])
    with np.errstate(all="ignore"):
        wanted = x / step
    decisive = (np.abs(wanted) > 0.25) & (np.abs(wanted) < 1 << 24)
    np.testing.assert_array_equal(quotients[decisive], wanted[decisive])
    for place, (least, most, instead) in enumerate(((-128, 127, 0), (0, 65535, -np.inf))):
        whole = np.rint(np.where(np.isnan(wanted), instead, wanted)) + 3
        np.testing.assert_array_equal(numbers[:, place], np.clip(whole, least, most))


def test_vectors_are_what_their_quotients_are() -> None:
    """With one of four on a tie or none, and with numbers far from any."""
    x, step = near_ties(4)
    with np.errstate(over="ignore", invalid="ignore"):
        x[1::4] = np.random.default_rng(6).uniform(-200, 200, x.size // 4).astype(np.float32) * step[1::4]
        x[2::8], x[3::8] = x[1::8], np.float32(2**17) * -x[1::8]
        ties = ((np.rint(x[1::4] / step[1::4]) + 0.5) * step[::4].astype(np.float64)).astype(np.float32)
        x[::4] = np.nextafter(ties, x[::4])
        x[::8] = ties[::2]
        x[::16] = np.rint(x[1::16] / step[1::16]) * np.float32(2**17) * step[1::16]
    numbers = np.empty((2, x.size), np.int8)
    high, pairs = numbers[1].view(np.uint8), np.empty((x.size // 4, 2), np.int8)
    Emulator(linked(("onnxfuse",), used_in(VECTORS)) + VECTORS).launch(
        "k", -(-x.size // 1024), 256, [x, step[::4].copy(), numbers[0], high, pairs, x.size // 4])
    with np.errstate(all="ignore"):
        wanted = np.rint(np.nan_to_num(x / step, nan=0.0, posinf=np.inf, neginf=-np.inf))
    np.testing.assert_array_equal(numbers[0], np.clip(wanted + 3, -128, 127))
    np.testing.assert_array_equal(high, np.clip(wanted + 250, 0, 255))
    np.testing.assert_array_equal(pairs, numbers[0].reshape(-1, 4)[:, [0, 3]])


DYNAMIC = """g (float[n, 64] x) => (float[n, 32] y, float s) {
  t = Tanh(x) q, s, z = DynamicQuantizeLinear(t) p = MatMulInteger(q, w, z) f = Cast <to = 1> (p) r = Mul(s, step)
  d = Mul(f, r) e = Add(d, b) y = Relu(e) }"""
"""As ONNX Runtime's dynamic quantisation leaves a layer."""


def dynamic() -> onnx.ModelProto:
    model = parse(DYNAMIC)
    random = np.random.default_rng(0)
    for name, array in (("w", random.integers(-127, 128, (64, 32)).astype(np.int8)), ("step", np.float32(0.01)),
                        ("b", random.standard_normal(32).astype(np.float32))):
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    return model


@pytest.mark.parametrize("rows", [1, 33, 4097])
def test_layers_that_quantise_what_comes(rows: int) -> None:
    """The runtime has no kernel on the GPU that finds a range and quantises by it; here is one, with what is before."""
    made = optimise(dynamic(), Options(verify=False, target="H100", dims={"n": rows}, database=False))
    fused = [[node.op for node in region.nodes] for region in made.regions]
    assert fused == [["Tanh", "DynamicQuantizeLinear", "Mul"], ["Cast", "Mul", "Add", "Relu"]]
    result = verify(made, EmulatedRunner())
    assert result.passed and result.kernels_run, result.text()


@pytest.mark.parametrize("values, wanted", [
    ([0.0, -0.0, 0.0], ([0, 0, 0], 1.0, 0)),
    ([1.0, 255.0, 128.5], ([1, 255, 128], 1.0, 0)),
    ([-255.0, -1.0, -128.0], ([0, 254, 127], 1.0, 255)),
    ([-1.0, 254.0, 0.5], ([0, 255, 1], 1.0, 1)),
    ([float("nan"), 1.0, -1.0], ([0, 0, 0], float("nan"), 0)),
    ([float("inf"), 1.0, -1.0], ([0, 0, 0], float("inf"), 0)),
    ([3e38, -3e38, 0.0], ([0, 0, 0], float("inf"), 0)),
])
def test_what_quantising_by_the_range_owes(values: list[float], wanted: tuple[list[int], float, int]) -> None:
    """The standard's function of what is no number; a scale of 1 of zeros, as the CPU provider has it."""
    text = "g (float[n] x) => (uint8[n] y, float s, uint8 z) { y, s, z = DynamicQuantizeLinear(x) }"
    made = optimise(parse(text), Options(verify=False, target="H100", dims={"n": 3}, database=False, least_gain=0.0))
    (node,) = read_fused(made.model)
    found = EmulatedRunner().kernel(node, made.model, {"x0": np.array(values, np.float32)}, None)
    for array, right in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(array, right)
    for array, right in zip(Reference(node, made.model).outputs({"x0": np.array(values, np.float32)}), wanted,
                            strict=True):
        np.testing.assert_array_equal(array, right)


def test_what_a_providers_own_result_makes_of_no_numbers_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one element that is no number the CPU provider's range hangs on the place where it stands."""
    def own(*_: Any) -> list[NDArray[Any]]:
        asked.append(1)
        return [np.array([255] * 40, np.uint8), np.array(np.inf, np.float32), np.array(255, np.uint8)]

    asked: list[int] = []
    monkeypatch.setattr(EmulatedRunner, "own", own)
    text = "g (float[n] x) => (uint8[n] y, float s, uint8 z) { t = Neg(x) y, s, z = DynamicQuantizeLinear(t) }"
    made = optimise(parse(text), Options(verify=False, target="H100", dims={"n": 40}, database=False, least_gain=0.0))
    result = verify(made, EmulatedRunner())
    assert [node.verdict for node in result.nodes] == ["passed"] and not asked, result.text()
