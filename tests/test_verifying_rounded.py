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


def test_operands_that_are_cut_off_are_no_larger() -> None:
    """What is off adds up, where what rounds to the nearest happens to cancel."""
    model = parse("g (float[M,K] a, float[K,N] b) => (float[M,N] y) { y = MatMul(a, b) }")
    rng = np.random.default_rng(3)
    a, b = (np.abs(rng.standard_normal(shape)).astype(np.float32) for shape in ((40, 1), (1, 50)))
    wanted = a.astype(np.float64) @ b
    made = [with_rounded_products(model, [model.graph.node[0]], value_types(model), cut) for cut in (False, True)]
    near, cut = ((Evaluator(each).run({"a": a, "b": b})[0] - wanted) / wanted for each in made)
    assert np.abs(near).max() < 1.01 * 2**-10 and abs(near.mean()) < 2**-13  # half a unit of each operand's last digit
    assert cut.max() < 1e-6 and cut.min() > -3 * 2**-10 and cut.mean() < -(2**-11)
    assert np.array_equal(tf32(b * np.float32(1 - 2.0**-11)), Evaluator(made[1]).run({
        "a": np.full((1, 1), 1 / (1 - 2.0**-11), np.float32), "b": b})[0])


def test_products_of_other_types_stay() -> None:
    model = parse(GEMM.replace("float[", "float16["))
    assert with_rounded_products(model, [model.graph.node[0]], value_types(model)) == model
