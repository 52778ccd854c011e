"""Quicker functions for results of 16 bits: of every number that there is, as near as rounding alone would come."""

from __future__ import annotations

from math import erfc, exp, sqrt
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from emulator import run_plan
from kernel_harness import make

from onnxfuse.ir.scalars import FUNCTIONS

TYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

EXACT = {
    "exp": ("y = Exp(x)", lambda x: np.exp(x)),
    "sigmoid": ("y = Sigmoid(x)", lambda x: 1.0 / (1.0 + np.exp(-x))),
    "tanh": ("y = Tanh(x)", np.tanh),
    "gelu": ("y = Gelu(x)", np.vectorize(lambda x: x * erfc(-x / sqrt(2)) / 2)),
    "gelu_tanh": ('y = Gelu<approximate = "tanh">(x)', np.vectorize(
        lambda x: x / (1.0 + exp(min(-2.0 * sqrt(2 / np.pi) * (x + 0.044715 * x ** 3), 700.0))))),
}
"""By function, a node of it and the same in float64."""

NEAR = 0.75
"""Units in the last place that a result may be off; half of one is rounding alone."""

LEAST = {"gelu": 2.0 ** -20, "gelu_tanh": 2.0 ** -20}
"""What smaller numbers are measured as, of which one and an error function, summed up in float32, have few digits."""

LEAST_SCALE = 2.0 ** -120
"""The same of others: reciprocals of numbers near the largest there is are none."""


def test_these_are_all() -> None:
    assert set(EXACT) == {name for name, function in FUNCTIONS.items() if function.narrow is not None}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", EXACT)
def test_every_number(name: str, kind: str) -> None:
    node, exact = EXACT[name]
    x = np.arange(65536, dtype=np.uint16).view(TYPES[kind])
    made = make(f"g ({kind}[65536] x) => ({kind}[65536] y) {{ {node} }}")
    assert f"of::quick_{name}" in made.kernel.source
    (result,) = run_plan(made.kernel.plan, made.kernel.source, [x], [])
    with np.errstate(all="ignore"):
        wide, found = x.astype(np.float64), result.astype(np.float64)
        ends = ~np.isfinite(wide)
        wanted = np.where(ends, np.nan, 0.0)
        wanted[~ends] = exact(wide[~ends])
        whole = np.isfinite(wanted.astype(TYPES[kind]).astype(np.float64)) & ~ends
        off = np.abs(found - wanted)[whole] / unit(wanted[whole], kind, LEAST.get(name, LEAST_SCALE))
    assert off.max() < NEAR
    # Past all numbers: infinity; what is NaN and -infinity the edge values' tests compare with what was measured.
    assert (found[~whole & ~ends] == np.inf).all()


def test_gelu_of_float32() -> None:
    """Is as near as one and an error function summed up in float32 are, and where that sum is nothing nearer."""
    ends = [0.0, -0.0, 1e-30, -1e-38, 3e38, -3e38, np.inf]
    x = np.array([*np.linspace(-14, 14, 400_001), *ends], np.float32)
    made = make(f"g (float[{x.size}] x) => (float[{x.size}] y) {{ y = Gelu(x) }}")
    assert "of::gelu" in made.kernel.source
    (result,) = run_plan(made.kernel.plan, made.kernel.source, [x], [])
    wide, found = x[:-len(ends)].astype(np.float64), result[:-len(ends)]
    exact = np.array([each * erfc(-each / sqrt(2)) / 2 for each in wide])
    assert (np.abs(found - exact) <= 1.2e-7 * np.abs(wide)).all()
    tails = (wide < -1) & (wide > -5.8)
    assert (np.abs(found[tails] / exact[tails] - 1) < 2.5e-3).all()
    assert (result[-len(ends):] == np.float32([0, 0, 5e-31, -5e-39, 3e38, 0, np.inf])).all()


def unit(x: np.ndarray[Any, Any], kind: str, lowest: float) -> np.ndarray[Any, Any]:
    """The last place of numbers of a type, which is that of its least normal one, or the ``lowest``, for those that are
    less."""
    info = ml_dtypes.finfo(TYPES[kind])
    least = max(float(info.smallest_normal), lowest)
    return np.exp2(np.floor(np.log2(np.maximum(np.abs(x), least))) - info.nmant)
