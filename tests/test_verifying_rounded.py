"""The original's own error where products of float32 round their operands to TF32."""

from __future__ import annotations

import numpy as np
from kernel_harness import parse
from test_schedules_tf32 import tf32

from onnxfuse.rewriting import value_types
from onnxfuse.verifying.evaluate import Evaluator
from onnxfuse.verifying.rounded_products import with_rounded_products

GEMM = "g (float[M,K] a, float[K,N] b, float[N] c) => (float[M,N] y) { p = Gemm<alpha = 0.5>(a, b, c) y = Tanh(p) }"


def test_operands_are_rounded_and_what_is_added_is_not() -> None:
    model = parse(GEMM)
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal(shape).astype(np.float32) for shape in ((9, 65), (65, 17), (17,)))
    a[2, 0], a[3, 0] = 3e38, np.inf  # those too large to be split stay
    rounded = with_rounded_products(model, [model.graph.node[0]], value_types(model))
    (got,) = Evaluator(rounded).run({"a": a, "b": b, "c": c})
    near = tf32(np.delete(a, [2, 3], 0)).astype(np.float64)
    np.testing.assert_allclose(np.delete(got, [2, 3], 0), np.tanh(0.5 * (near @ tf32(b)) + c), rtol=0, atol=1e-6)
    assert np.array_equal(got[2:4], np.sign(b[0]) * np.ones((2, 1)))


def test_products_of_other_types_stay() -> None:
    model = parse(GEMM.replace("float[", "float16["))
    assert with_rounded_products(model, [model.graph.node[0]], value_types(model)) == model
