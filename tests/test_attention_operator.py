"""The standard's Attention: as tensors beside ONNX Runtime, as a kernel in the emulator, and in the planner."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from emulated import EmulatedRunner
from emulator import run_plan, variants_that_hold
from fake_timer import RUNTIME, FakeTimer, attentive
from ir_reference import evaluate_lowered
from kernel_harness import Region, arguments, check, make, parse, random_inputs, refused, region_of, short_inputs
from plain_session import RELEASE
from reference import Array

from onnxfuse.measuring.database import open_database
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.tuning import TuneOptions, tune
from onnxfuse.verifying import verify
from onnxfuse.verifying.evaluate import CPU, exact_options

HEADS = "T[2,4,S,8] q, T[2,4,K,8] k, T[2,4,K,6] v"
GROUPED = "T[2,6,S,8] q, T[2,2,K,8] k, T[2,2,K,8] v"
PACKED = "T[2,S,32] q, T[2,K,32] k, T[2,K,24] v"
SHARED = "T[2,S,48] q, T[2,K,16] k, T[2,K,16] v"

FORMS = {
    "heads": (HEADS, "2,4,S,6", "Attention(q, k, v)"),
    "a scale": (HEADS, "2,4,S,6", "Attention<scale = 0.3>(q, k, v)"),
    "a soft cap": (HEADS, "2,4,S,6", "Attention<softcap = 1.5>(q, k, v)"),
    "causal": (HEADS.replace("K", "S"), "2,4,S,6", "Attention<is_causal = 1>(q, k, v)"),
    "groups": (GROUPED, "2,6,S,8", "Attention(q, k, v)"),
    "packed": (PACKED, "2,S,24", "Attention<q_num_heads = 4, kv_num_heads = 4>(q, k, v)"),
    "packed groups, causal": (SHARED.replace("K", "S"), "2,S,48", "Attention<q_num_heads = 6, kv_num_heads = 2, is_causal = 1>(q, k, v)"),
    "a mask": (HEADS + ", bool[S,K] m", "2,4,S,6", "Attention(q, k, v, m)"),
    "a mask of batches": (GROUPED + ", bool[2,1,S,K] m", "2,6,S,8", "Attention(q, k, v, m)"),
    "a mask of heads": (GROUPED + ", T[6,S,K] m", "2,6,S,8", "Attention(q, k, v, m)"),
    "a mask of all": (GROUPED + ", T[2,6,S,K] m", "2,6,S,8", "Attention(q, k, v, m)"),
    "a mask, causal": (GROUPED.replace("K", "S") + ", bool[S,S] m", "2,6,S,8", "Attention<is_causal = 1>(q, k, v, m)"),
    "a mask, packed": (SHARED + ", T[S,K] m", "2,S,48", "Attention<q_num_heads = 6, kv_num_heads = 2>(q, k, v, m)"),
}


def text(form: str, kind: str = "float") -> str:
    inputs, result, call = FORMS[form]
    return f"g ({inputs}) => (T[{result}] y) {{ y = {call} }}".replace("T[", f"{kind}[")


def hidden(made: Region, inputs: dict[str, Array]) -> dict[str, Array]:
    """With a query that sees nothing."""
    if "m" in inputs:
        inputs["m"][..., 1, :] = False if inputs["m"].dtype == bool else -np.inf
    return inputs


@pytest.mark.skipif(RELEASE < (1, 31), reason="older releases have other answers where a query sees nothing")
@pytest.mark.parametrize("opset", [23, 24])
@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, opset: int) -> None:
    """What the lowering means is what ONNX Runtime gives."""
    made = region_of(parse(text(form), opset))
    assert isinstance(made, Region), made
    model = parse(text(form), opset)
    del model.opset_import[1:]
    session = onnxruntime.InferenceSession(model.SerializeToString(), exact_options(), providers=CPU)
    inputs = hidden(made, random_inputs(made, {"S": 3, "K": 5}))
    (got,) = evaluate_lowered(made.lowered, arguments(made, inputs), {"S": 3, "K": 5})
    (wanted,) = session.run(None, inputs)
    np.testing.assert_allclose(got, wanted, atol=2e-6)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("form", ["causal", "groups", "packed groups, causal", "a mask of batches", "a mask, packed"])
def test_kernels(form: str, kind: str) -> None:
    """Heads of 8 columns, of which products are wider."""
    made = make(text(form, kind), opset=23)
    assert made.kernel.schedule == "attention" and made.kernel.hides == ("causal" in form)
    check(made, hidden(made, random_inputs(made, {"S": 70, "K": 50})), length=70, misalign=False, limit=2)


def test_a_query_that_sees_nothing_gives_zeros_and_one_without_a_number_none() -> None:
    made = make(text("a mask", "float16"), opset=23)
    inputs = hidden(made, random_inputs(made, {"S": 5, "K": 7}))
    inputs["q"][0, 0, 2, 3] = np.nan
    (got,) = run_plan(made.kernel.plan, made.kernel.source, arguments(made, inputs))
    assert not got[:, :, 1].any() and np.isnan(got[0, 0, 2]).all() and np.isfinite(got[1]).all()


KEPT = ("a mask of all", "a soft cap", "groups", "packed groups, causal", "a mask")
"""Forms whose scores are written too, in each of the ways that have one meaning."""


@pytest.mark.skipif(RELEASE < (1, 31), reason="older releases have other ways")
@pytest.mark.parametrize("mode", range(4))
@pytest.mark.parametrize("form", KEPT)
def test_scores_as_a_result(form: str, mode: int) -> None:
    """What the lowering means is what ONNX Runtime gives, and so does a kernel."""
    inputs, result, call = FORMS[form]
    heads, keys = "6" if "groups" in form or form == "a mask of all" else "4", "S" if "causal" in form else "K"
    attributes = f"Attention<qk_matmul_output_mode = {mode}" + (", " if "<" in call else ">") + call.removeprefix("Attention").removeprefix("<")
    graph = f"g ({inputs}) => (T[{result}] y, T[2,{heads},S,{keys}] p) {{ y, _, _, p = {attributes} }}"
    hides = mode == 2 and form in ("packed groups, causal", "a mask")
    for kind in ("float", "float16"):
        if hides:
            assert "hidden keys" in refused(graph.replace("T[", f"{kind}["), opset=23).message
            continue
        made, sizes = make(graph.replace("T[", f"{kind}["), opset=23), {"S": 3, "K": 5}
        assert made.kernel.schedule == "attention"
        model = parse(graph.replace("T[", "float["), 23)
        del model.opset_import[1:]
        given = hidden(made, short_inputs(made, sizes))
        session = onnxruntime.InferenceSession(model.SerializeToString(), exact_options(), providers=CPU)
        wide = {name: array.astype(np.float32) if array.dtype != bool else array for name, array in given.items()}
        for variant in variants_that_hold(made.kernel.plan, arguments(made, given), []):
            got = run_plan(made.kernel.plan, made.kernel.source, arguments(made, given), variant=variant)
            for one, other in zip(got, session.run(None, wide), strict=True):
                np.testing.assert_allclose(one.astype(np.float32), other, rtol=4e-3, atol=4e-3)


REFUSED = [
    ("g (T[2,4,S,8] q, T[2,4,K,8] k, T[2,4,K,8] v, T[2,4,P,8] pk, T[2,4,P,8] pv) => (T[2,4,S,8] y) { y, a, b = Attention(q, k, v, , pk, pv) }", "an Attention with keys of the past, or their number, has no kernel"),
    ("g (T[2,4,S,8] q, T[2,4,K,8] k, T[2,4,K,8] v) => (T[2,4,S,8] y, T[2,4,K,8] p) { y, p = Attention(q, k, v) }", "an Attention that also writes its keys or values has no kernel"),
    ("g (T[2,4,S,8] q, T[2,4,K,8] k, T[2,4,K,8] v, bool[S,K] m) => (T[2,4,S,8] y, T[2,4,S,K] p) { y, _, _, p = Attention<qk_matmul_output_mode = 2>(q, k, v, m) }", "an Attention that also writes scores of hidden keys has no kernel: which number stands for these differs"),
    ("g (T[2,4,S,8] q, T[2,4,K,8] k, T[2,4,K,8] v) => (T[2,4,S,8] y) { y = Attention<is_causal = 1>(q, k, v) }", "a causal Attention of S queries over K keys has no kernel: ONNX Runtime's providers differ in which of them it hides"),
    ("g (T[2,4,S,8] q, T[2,4,K,8] k, T[2,4,K,8] v, bool[S,M] m) => (T[2,4,S,8] y) { y = Attention(q, k, v, m) }", "an Attention whose mask is not known to have its scores' sizes, or one, has no kernel"),
    ("g (T[2,4,S,8] q, T[2,3,K,8] k, T[2,3,K,8] v) => (T[2,4,S,8] y) { y = Attention(q, k, v) }", "an Attention of 4 heads over 3 of keys has no kernel"),
]


@pytest.mark.parametrize(("model", "message"), REFUSED)
def test_what_has_no_kernel(model: str, message: str) -> None:
    found = refused(model.replace("T[", "float16["), opset=23)
    assert found.message == message


LAYER = ("g (float16[B,S,96] x, float16[32,32] w, bool[S,S] m) => (float16[B,S,32] y) "
         "{ q, k, v = Split<axis = 2, num_outputs = 3>(x) o = Attention<q_num_heads = 2, kv_num_heads = 2, is_causal = 1>(q, k, v, m) y = MatMul(o, w) }")


def planned(layer: onnx.ModelProto, **options: object) -> Optimised:
    wanted = {"dims": {"B": 1, "S": 80}, "target": attentive(), "verify": False, "database": False, "disable": ["products"], **options}
    return optimise(layer, Options(**wanted))  # type: ignore[arg-type]


def test_the_runtimes_own_kernel_is_replaced_where_that_was_measured_alone() -> None:
    """Whatever rate is known of attentions of nodes: the runtime has kernels for the operator."""
    made = planned(parse(LAYER, 23))
    assert not made.plan.fusions and "unmeasured" in {refusal.code for refusal in made.refusals}
    (core, *_) = made.plan.with_products
    assert [node.op for node in core.view] == ["Attention"]


@pytest.mark.skipif(RELEASE < (1, 31), reason="older releases have other answers where a query sees nothing")
def test_verification(tmp_path: Path) -> None:
    """Of a region with the operator in its body, with what a mask hides and queries that see nothing."""
    timer = FakeTimer(lambda name: 50.0 if name == RUNTIME else 5.0)
    with open_database(tmp_path / "measurements.sqlite") as kept:
        tune(parse(LAYER, 23), timer, kept, TuneOptions(dims={"B": 1, "S": 80}))
        made = planned(parse(LAYER, 23), database=Path(kept.name), target="H100")
    assert [fusion.kernel.schedule for fusion in made.plan.fusions] == ["attention"]
    (result,) = verify(made, EmulatedRunner()).nodes
    assert result.verdict == "passed", result
    assert {"false", "not-a-number"} <= set(result.inputs)
