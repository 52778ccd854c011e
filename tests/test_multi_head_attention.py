"""The runtime's own MultiHeadAttention, as its tools put it into models: as tensors beside ONNX Runtime, as a kernel in
the emulator, and in the planner."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from emulated import EmulatedRunner, FaultyRunner
from fake_timer import RUNTIME, FakeTimer
from ir_reference import evaluate_lowered
from kernel_harness import Region, arguments, check, make, parse, random_inputs, refused, region_of
from reference import Array
from test_attention_operator import planned

from onnxfuse.measuring.database import open_database
from onnxfuse.tuning import TuneOptions, tune
from onnxfuse.verifying import verify
from onnxfuse.verifying.evaluate import CPU, exact_options

QKV = "T[B,S,32] q, T[B,K,32] k, T[B,K,24] v"
SAME = "T[B,S,32] q, T[B,S,32] k, T[B,S,24] v"

FORMS = {
    "queries, keys and values": (QKV, "q, k, v", ""),
    "a scale": (QKV, "q, k, v", ", scale = 0.3"),
    "a bias": (QKV + ", T[88] b", "q, k, v, b", ""),
    "a bias of scores": (QKV + ", T[B,4,S,K] r", "q, k, v, , , r", ""),
    "one bias of scores for all": (QKV + ", T[88] b, T[1,1,S,K] r", "q, k, v, b, , r", ""),
    "a mask of keys": (QKV + ", T[88] b, int32[B,K] m", "q, k, v, b, m", ""),
    "a mask of keys, by a number of its own": (QKV + ", int32[B,K] m, T[1,4,S,K] r", "q, k, v, , m, r", ", mask_filter_value = -1.5"),
    "causal": (SAME + ", T[88] b", "q, k, v, b", ", unidirectional = 1"),
    "keys and values by heads": ("T[B,S,32] q, T[B,4,K,8] k, T[B,4,K,8] v", "q, k, v", ""),
}


def text(form: str, kind: str = "float") -> str:
    inputs, operands, attributes = FORMS[form]
    width = 24 if "24] v" in inputs else 32
    return f"g ({inputs}) => (T[B,S,{width}] y) {{ y = com.microsoft.MultiHeadAttention<num_heads = 4{attributes}>({operands}) }}".replace("T[", f"{kind}[")


def masked(inputs: dict[str, Array]) -> dict[str, Array]:
    """Some keys hidden, one query's all."""
    if "m" in inputs:
        inputs["m"][:] = np.random.default_rng(3).integers(0, 2, inputs["m"].shape)
        inputs["m"][-1] = 0
    return inputs


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    """What the lowering means is what ONNX Runtime gives."""
    made, sizes = region_of(parse(text(form))), {"B": 2, "S": 3, "K": 5}
    assert isinstance(made, Region), made
    model = parse(text(form))
    del model.opset_import[2:]
    session = onnxruntime.InferenceSession(model.SerializeToString(), exact_options(), providers=CPU)
    inputs = masked(random_inputs(made, sizes))
    (got,) = evaluate_lowered(made.lowered, arguments(made, inputs), sizes)
    (wanted,) = session.run(None, inputs)
    # A query that a mask hides all keys from has scores near -10,000, of which float32 has three digits behind the point.
    np.testing.assert_allclose(got, wanted, atol=2e-3 if "m" in inputs else 2e-6)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_kernels(form: str, kind: str) -> None:
    made = make(text(form, kind))
    assert made.kernel.schedule == "attention" and made.kernel.hides == (form == "causal")
    for sizes in ({"B": 2, "S": 70, "K": 50}, {"B": 1, "S": 1, "K": 1}):
        check(made, masked(random_inputs(made, sizes)), length=70, misalign=False, limit=2, slack=4)


REFUSED = [
    ("T[B,S,32] q, T[B,K,32] k, T[B,K,32] v, T[B,4,P,8] a, T[B,4,P,8] c", "q, k, v, , , , a, c", "a MultiHeadAttention with keys of the past, or more results, has no kernel"),
    ("T[B,S,4,3,8] q", "q", "a MultiHeadAttention whose keys or values are packed has no kernel"),
    ("T[B,S,32] q, T[B,K,4,2,8] k", "q, k", "a MultiHeadAttention whose keys or values are packed has no kernel"),
    ("T[B,S,32] q, T[B,4,K,8] k, T[B,4,K,8] v, T[96] b", "q, k, v, b", "a MultiHeadAttention whose operands are not known to lie in one of the ways that it has, with biases for all of them or none, has no kernel"),
    ("T[B,S,32] q, T[B,1,K,8] k, T[B,1,K,8] v", "q, k, v", "a MultiHeadAttention whose operands are not known to lie in one of the ways that it has, with biases for all of them or none, has no kernel"),
    ("T[B,S,32] q, T[B,4,K,8] k, T[B,K,32] v", "q, k, v", "a MultiHeadAttention whose operands are not known to lie in one of the ways that it has, with biases for all of them or none, has no kernel"),
    ("T[B,S,32] q, T[B,K,32] k, T[B,K,32] v, T[90] b", "q, k, v, b", "a MultiHeadAttention whose operands are not known to lie in one of the ways that it has, with biases for all of them or none, has no kernel"),
    ("T[B,S,32] q, T[B,K,32] k, T[B,K,32] v, T[Z] b", "q, k, v, b", "a MultiHeadAttention whose operands are not known to lie in one of the ways that it has, with biases for all of them or none, has no kernel"),
    ("T[B,S,32] q, T[B,K,32] k, T[B,K,32] v, int32[B] m", "q, k, v, , m", "a MultiHeadAttention whose mask is not known to have its scores' sizes, or one, has no kernel"),
    ("T[B,S,32] q, T[B,K,32] k, T[B,K,32] v, int32[B,M] m", "q, k, v, , m", "a MultiHeadAttention whose mask is not known to have its scores' sizes, or one, has no kernel"),
    ("T[B,S,32] q, T[B,K,32] k, T[B,K,32] v, T[B,4,S,M] r", "q, k, v, , , r", "a MultiHeadAttention whose mask is not known to have its scores' sizes, or one, has no kernel"),
]


@pytest.mark.parametrize(("inputs", "operands", "message"), REFUSED)
def test_what_has_no_kernel(inputs: str, operands: str, message: str) -> None:
    found = refused(f"g ({inputs}) => (T[B,S,32] y) {{ y = com.microsoft.MultiHeadAttention<num_heads = 4>({operands}) }}".replace("T[", "float16["))
    assert found.message == message


def test_causal_queries_of_other_keys_are_refused() -> None:
    found = refused(text("causal", "float16").replace("[B,S,32] k, float16[B,S,24] v", "[B,K,32] k, float16[B,K,24] v"))
    assert found.message.startswith("a causal MultiHeadAttention of S queries over K keys has no kernel")


LAYER = ("g (float16[B,S,96] x, float16[32,32] w, float16[96] b, int32[B,S] m) => (float16[B,S,32] y) "
         "{ q, k, v = Split<axis = 2, num_outputs = 3>(x) o = com.microsoft.MultiHeadAttention<num_heads = 2>(q, k, v, b, m) y = MatMul(o, w) }")


def test_the_runtimes_own_kernel_is_replaced_where_that_was_measured_alone(tmp_path: Path) -> None:
    """A fault of a hundredth is found."""
    layer = parse(LAYER)
    made = planned(layer)
    assert not made.plan.fusions and "unmeasured" in {refusal.code for refusal in made.refusals}
    timer = FakeTimer(lambda name: 50.0 if name == RUNTIME else 5.0)
    with open_database(tmp_path / "measurements.sqlite") as kept:
        tune(layer, timer, kept, TuneOptions(dims={"B": 1, "S": 80}))
        made = planned(layer, database=Path(kept.name), target="H100")
    (fusion,) = made.plan.fusions
    assert fusion.kernel.schedule == "attention" and [node.op for node in fusion.view] == ["MultiHeadAttention"]
    for runner, verdict in ((EmulatedRunner(), "passed"), (FaultyRunner(), "failed")):
        (result,) = verify(made, runner).nodes
        assert result.verdict == verdict, result
