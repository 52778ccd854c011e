"""Operators that a reference spells out because ONNX Runtime's CPU provider lacks them in float64."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnxfuse.verifying.evaluate import Evaluator


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
