"""Faults in text that begins with the headers of generated kernels, which is compiled after what these declare."""

from __future__ import annotations

import numpy as np
import pytest
from emulator import Emulator
from test_emulator import fails

from onnxfuse.emulator.kernel_text import for_host
from onnxfuse.emulator.toolchain import parts
from onnxfuse.schedules.headers import linked


@pytest.mark.parametrize("access", [
    "y[0] = of::load<4>(x + OFFSET).at[3]", "of::store(y + OFFSET, of::Vector<float, 4>{7, 7, 7, 7})",
    "y[0] = reinterpret_cast<const of::Vector<float, 4>&>(x[OFFSET]).at[3]",
    "y[0] = __ldcs((const float4*)(x + OFFSET)).w", "y[0] = __ldcs((const of::Vector<float, 4>*)(x + OFFSET)).at[3]",
    "y[0] = ((const float4*)(x + OFFSET))->w", "float4 v = *(const float4*)(x + OFFSET); y[0] = v.w",
    "__stcs((float4*)(y + OFFSET), make_float4(7, 7, 7, 7))",
])
def test_misaligned_vectors_of_generated_text_are_found(access: str) -> None:
    """In what is compiled after the headers' definitions, with their functions and without."""
    source = linked(("onnxfuse",), frozenset({"load", "store", "Vector"})) + f"""
    extern "C" __global__ void k(const float* x, float* y) {{ {access}; }}
    """
    assert parts(for_host(source).text)[2], "it is compiled as generated text is"
    x = np.arange(32, dtype=np.float32)
    y = np.zeros(32, np.float32)
    Emulator(source.replace("OFFSET", "4")).launch("k", 1, 1, [x, y])
    assert 7 in y
    assert "misaligned access" in fails(source.replace("OFFSET", "1"), [x, y], block=1)
