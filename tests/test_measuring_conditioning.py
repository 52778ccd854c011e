"""How far outputs move by rounding alone: the benchmark that says so."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from click.testing import CliRunner

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
conditioning = importlib.import_module("conditioning")


def model(kind: str, body: str) -> onnx.ModelProto:
    made = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["": 19]> g ({kind}[4,8] x) => ({kind}[4,N] y) {{ {body} }}')
    dtype = onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.DataType.Value(kind.upper()))
    made.graph.initializer.extend([onnx.numpy_helper.from_array(np.ones((8, 3), dtype), "w"),
                                   onnx.numpy_helper.from_array(np.array(1024, dtype), "b")])
    return made


def test_operands_of_products_are_rounded_to_eleven_digits() -> None:
    """Of one and a quarter of the last of these digits one is left, also as a weight; what is added to it is not."""
    x = np.full((4, 8), 1 + 2.0**-12, np.float32)
    what, error = conditioning.rounding(model("float", "p = MatMul(x, w) y = Mul(p, b)"), {"x": x})
    assert (what, error) == ("operands of products, to TF32", pytest.approx(2.0**-12, rel=1e-3))
    assert conditioning.rounding(model("float", "y = Add(x, b)"), {"x": x}) == (what, 0.0)


def test_results_of_sixteen_bits_are_rounded_each() -> None:
    """What cancels behind a sum shows how that was rounded: 1,024 and more have no digits behind the point."""
    x = np.full((4, 8), 0.25, np.float16)
    what, error = conditioning.rounding(model("float16", "s = Add(x, b) y = Sub(s, b)"), {"x": x})
    assert (what, error) == ("results, to 16 bits", 1.0)
    assert conditioning.rounding(model("float16", "y = MatMul(x, w)"), {"x": x}) == (what, 0.0)


def test_rows(tmp_path: Path) -> None:
    """Networks whose weights are drawn, in both types; a table and a file of them."""
    result = CliRunner().invoke(conditioning.main, [
        "--networks", str(BENCHMARKS / "convolutions"), "--rows", "squeezenet1_1", "--batch", "1",
        "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.glob("*-conditioning.json")
    rows = json.loads(path.read_text())["rows"]
    assert [row["row"] for row in rows] == ["squeezenet1_1_fp16:16", "squeezenet1_1_fp32:16"]
    assert all(1e-5 < row["error"] < 5e-3 and row["row"] in result.output for row in rows)
