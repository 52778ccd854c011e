"""What comes into a kernel with pooling, and what stays outside."""

from __future__ import annotations

import onnx
import pytest

from onnxfuse.pipeline import Options, optimise

WINDOW = "MaxPool <kernel_shape = [5, 5], pads = [2, 2, 2, 2]>"
HALVES = "MaxPool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]>"
MEAN = "AveragePool <kernel_shape = [56, 56]>"

CASES = {
    "little before, all behind": (f"a = Add(x, c) r = Relu(a) p = {HALVES} (r) s = Sigmoid(p) y = Mul(p, s)",
                                  [["Add", "Relu", "MaxPool", "Silu"]]),
    "curves stay before": (f"s = Sigmoid(x) g = Mul(x, s) p = {WINDOW} (g) y = Relu(p)",
                           [["Silu"], ["MaxPool", "Relu"]]),
    "curves of what is in one window alone": (
        "s = Tanh(x) g = Sigmoid(s) y = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (g)",
        [["Tanh", "Sigmoid", "MaxPool"]]),
    "a chain, the last of which its readers take": (
        f"p = {WINDOW} (x) q = {WINDOW} (p) r = {WINDOW} (q) y = Concat <axis = 1> (x, p, q, r)",
        [["MaxPool"], ["MaxPool"], ["MaxPool", "Concat"]]),
    "all of an image, with what computes it": (f"r = Relu(x) n = Neg(r) y = {MEAN} (n)",
                                               [["Relu", "Neg", "AveragePool"]]),
    "none with rows": (f"r = Softmax(x) y = {WINDOW} (r)", [["Softmax"], ["MaxPool"]]),
}


@pytest.mark.parametrize("case", CASES)
def test_what_comes_in(case: str) -> None:
    nodes, expected = CASES[case]
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]> g (float16[32, 64, 56, 56] x, float16[64, 1, 1] c) => '
        f"(float16[n, m, h, w] y) {{ {nodes} }}")
    made = optimise(model, Options(verify=False, target="H200", database=False))
    assert [[node.op for node in fusion.view] for fusion in made.plan.fusions] == expected


def test_why_it_stays_outside() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]> g (float16[32, 64, 56, 56] x) => (float16[n, m, h, w] y) '
        f"{{ s = Sigmoid(x) y = {WINDOW} (s) }}")
    made = optimise(model, Options(verify=False, target="H200", database=False))
    (why,) = [refusal for refusal in made.refusals if refusal.code == "pool-structure"]
    assert "25 times, for every window" in why.message and why.node == made.graph.nodes[0].label
