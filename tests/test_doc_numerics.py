"""The tolerances that docs/numerics.md states are those that kernels are judged by."""

from __future__ import annotations

import re

from cli_models import ROOT
from onnx import TensorProto

from onnxfuse.verifying.tolerances import TABLE, WIDTHS, reduction_factor

PAGE = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
NAMES = {"float64": TensorProto.DOUBLE, "float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16,
         "bfloat16": TensorProto.BFLOAT16}


def test_the_table_is_the_codes() -> None:
    rows = re.findall(r"^\| (\w+) \| ([\d.e-]+) \| ([\d.]*) ?\| ([\d.]+) \|$", PAGE, re.MULTILINE)
    stated = {NAMES[name]: (float(scale), float(ulps or 0), float(own)) for name, scale, ulps, own in rows}
    assert stated == {dtype: (each.scale, each.ulps, each.own) for dtype, each in TABLE.items()}
    assert set(stated) == set(WIDTHS)


def test_the_rest_of_the_limits() -> None:
    (length,) = re.findall(r"Sums of more than ([\d,]+) terms", PAGE)
    terms = int(length.replace(",", ""))
    assert reduction_factor(terms) == 1.0 < reduction_factor(terms + 100)
    (spread, own) = re.findall(r"to ([\d.]+) units in the last place or ([\d.]+) times the original's;", PAGE)[0]
    for dtype in (TensorProto.FLOAT16, TensorProto.BFLOAT16):
        assert (TABLE[dtype].spread, TABLE[dtype].own) == (float(spread), float(own))
