"""Which of ONNX Runtime's errors say that the model is for another provider, library or release: asked of sessions."""

from __future__ import annotations

import onnx
import onnxruntime as ort
import pytest

from onnxfuse.pipeline import Options, optimise
from onnxfuse.provider.words import is_lacking

HEAD = '<ir_version: 8, opset_import: ["" : {opset}, "my.domain" : 1, "com.microsoft" : 1]>'
NEWER = onnx.defs.onnx_opset_version()
"""An opset that ONNX knows and the runtime does not yet."""


def model(text: str, opset: int = 17) -> onnx.ModelProto:
    return onnx.parser.parse_model(f"{HEAD.format(opset=opset)} {text}")


@pytest.mark.parametrize(
    ("found", "lacking"),
    [
        (model("g (bool[4] k, bool[4] x) => (bool[4] y) { y = Where(k, x, k) }"), True),
        (model("g (float[4] x) => (float[4] y) { y = my.domain.Own(x) }"), True),
        (model("g (float[4] x) => (float[4] y) { y = com.microsoft.NoSuch(x) }"), True),
        (model("g (float[4] x) => (float[4] y) { y = Relu(x) }", NEWER), True),
        (model("g (float[4] x, int32[4] z) => (float[4] y) { y = Add(x, z) }"), False),
        (model("g (float[4] x) => (float[4] y) { y = Transpose <perm = [3]> (x) }"), False),
    ],
    ids=["type", "library", "operator", "opset", "types differ", "no such axis"],
)
def test_what_a_session_lacks(found: onnx.ModelProto, lacking: bool) -> None:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    with pytest.raises(Exception) as caught:  # the runtime has a type of exception per status
        ort.InferenceSession(found.SerializeToString(), options, providers=["CPUExecutionProvider"])
    assert is_lacking(caught.value) is lacking


def test_a_model_for_a_newer_runtime_is_fused_and_not_run() -> None:
    chain = "g (float[1000,1000] x, float[1000,1000] z) => (float[1000,1000] y) {{ t = Tanh(x) y = Mul(z, t) }}"
    made = optimise(model(chain.format(), NEWER), Options(target="H200", database=False))
    assert made.plan.fusions and made.verification is not None
    assert made.verification.whole.identical is None
