"""The reference of the region IR against the kernels' oracle: every operator that kernels hold means the same in both.

Both compute in float64, one of them from the lowering alone: a fault of a lowering shows here without a kernel.  They
differ by what constants of a narrow type are rounded to: 1e-6 of the largest number, for float16 and bfloat16 the
kernels' own tolerance.
"""

from __future__ import annotations

import numpy as np
import pytest
from ir_reference import NUMPY, REDUCTIONS, evaluate_lowered
from kernel_harness import Region, arguments, parse, region_of
from onnx import TensorProto
from reference import FLOATS, Array, evaluate, tolerance
from test_lowering_operators import EVERY, Case, inputs_of

from onnxfuse.ir import scalars

LARGEST = 64
"""Sizes that are looked at: the others tell of kernels' loops."""


def differs(actual: Array, expected: Array, dtype: int) -> bool:
    """Whether two results in float64 differ by more than roundings of constants."""
    if actual.shape != expected.shape:
        return True
    if dtype not in FLOATS:
        return bool((actual != expected).any())
    allowed = tolerance(dtype) if dtype in (TensorProto.FLOAT16, TensorProto.BFLOAT16) else 1e-6
    largest = np.abs(expected[np.isfinite(expected)]).max(initial=0.0)
    return not np.allclose(actual, expected, rtol=allowed, atol=allowed * largest, equal_nan=True)


@pytest.mark.parametrize(("case", "kind"), EVERY, ids=[f"{case.name}-{kind}" for case, kind in EVERY])
def test_operator(case: Case, kind: str) -> None:
    region = region_of(parse(case.text_of(kind), case.opset))
    assert isinstance(region, Region), region
    outputs = [(info.name, info.type.tensor_type.elem_type) for info in region.model.graph.output]
    for seed, sizes in enumerate(case.sizes):
        if max(sizes.values(), default=0) > LARGEST:
            continue
        given = inputs_of(region, case, sizes, seed)
        expected = evaluate(region.model, given)
        actual = evaluate_lowered(region.lowered, arguments(region, given), sizes)
        wrong = [name for (name, dtype), array in zip(outputs, actual, strict=True)
                 if differs(array, expected[name], dtype)]
        assert not wrong, f"{wrong} at {sizes}"


def test_every_function_has_a_meaning() -> None:
    assert (NUMPY.keys(), REDUCTIONS.keys()) == (scalars.FUNCTIONS.keys(), scalars.REDUCTIONS.keys())
