"""The runtime's own Attention, as its optimiser puts it into models: as tensors beside ONNX Runtime, as two kernels in
the emulator, in the planner, verified and taken out again."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from emulated import EmulatedRunner, FaultyRunner
from fake_timer import RUNTIME, FakeTimer
from ir_reference import evaluate_lowered
from kernel_harness import (
    Region,
    arguments,
    check,
    make,
    parse,
    random_inputs,
    refused,
    region_of,
    told,
    with_constants,
)
from reference import Array
from test_attention_operator import planned

import onnxfuse
from onnxfuse.ir.exact import exactly
from onnxfuse.measuring.database import open_database
from onnxfuse.optimised import Optimised
from onnxfuse.planning.costs.cost import CostModel
from onnxfuse.rewriting import read_fused, unfuse
from onnxfuse.schedules import Kernel, Request, make_kernel, parse_choice, words
from onnxfuse.tuning import TuneOptions, tune
from onnxfuse.verifying import verify
from onnxfuse.verifying.evaluate import CPU, exact_options
from onnxfuse.verifying.given_biases import with_biases
from onnxfuse.verifying.reference import Reference, formal_names

ROWS = "T[B,S,24] x, T[24,96] w, T[96] b"

FORMS = {
    "plain": (ROWS, "x, w, b", ""),
    "no bias": ("T[B,S,24] x, T[24,96] w", "x, w", ""),
    "a scale": (ROWS, "x, w, b", ", scale = 0.3"),
    "a mask of keys": (ROWS + ", int32[B,S] m", "x, w, b, m", ""),
    "a mask of keys, by a number of its own": (ROWS + ", int32[B,S] m, T[1,4,S,S] r", "x, w, b, m, , r", ", mask_filter_value = -1.5"),
    "a mask of queries' keys": (ROWS + ", int32[B,S,S] m", "x, w, b, m", ""),
    "where keys end": (ROWS + ", int32[B] m", "x, w, b, m", ""),
    "where keys end and begin": (ROWS + ", int32[2*B] m", "x, w, b, m", ""),
    "a bias of scores": (ROWS + ", T[B,4,S,S] r", "x, w, b, , , r", ""),
    "causal": (ROWS, "x, w, b", ", unidirectional = 1"),
    "causal, with a mask": (ROWS + ", int32[B,S] m", "x, w, b, m", ", unidirectional = 1"),
    "values of another width": ("T[B,S,24] x, T[24,80] w, T[80] b", "x, w, b", ", qkv_hidden_sizes = [32, 32, 16]"),
}


def text(form: str, kind: str = "float") -> str:
    inputs, operands, attributes = FORMS[form]
    width = 16 if "qkv" in attributes else 32
    inputs = inputs.replace("2*B", '"2*B"')
    return f"g ({inputs}) => (T[B,S,{width}] y) {{ y = com.microsoft.Attention<num_heads = 4{attributes}>({operands}) }}".replace("T[", f"{kind}[")


def masked(inputs: dict[str, Array]) -> dict[str, Array]:
    """Some keys hidden, of the last batch all; weights as large as a model's."""
    inputs["w"] = (inputs["w"] / 5).astype(inputs["w"].dtype)
    if "m" in inputs:
        rng, mask = np.random.default_rng(3), inputs["m"]
        mask[:] = rng.integers(0, 2 if mask.ndim > 1 else inputs["x"].shape[1] + 1, mask.shape)
        mask[len(inputs["x"]) - 1] = 0
    return inputs


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    """What the lowering means is what ONNX Runtime gives."""
    model, sizes = parse(text(form)), {"B": 2, "S": 5}
    made = region_of(model)
    assert isinstance(made, Region), made
    del model.opset_import[2:]
    session = onnxruntime.InferenceSession(with_biases(model).SerializeToString(), exact_options(), providers=CPU)
    inputs = masked(random_inputs(made, sizes))
    (got,) = evaluate_lowered(made.lowered, arguments(made, inputs), sizes)
    (wanted,) = session.run(None, inputs)
    # A query that a mask hides all keys from has scores near -10,000, of which float32 has three digits behind the point.
    np.testing.assert_allclose(got, wanted, atol=2e-3 if "m" in inputs else 2e-6)


OF_EACH_KIND = ("a mask of keys, by a number of its own", "causal", "values of another width")


@pytest.mark.parametrize(("form", "kind"), [
    *((form, "float16") for form in FORMS), *((form, kind) for form in OF_EACH_KIND for kind in ("bfloat16", "float"))])
def test_kernels(form: str, kind: str) -> None:
    made = make(text(form, kind))
    assert made.kernel.schedule == "projected" and made.kernel.hides == ("causal" in form)
    slack = 64 if kind == "float" else 4  # which is multiplied as TF32
    for rows in (1, 17, 70):
        check(made, masked(random_inputs(made, {"B": 2, "S": rows})), length=70, misalign=False, limit=2, slack=slack)


MASK = "an Attention whose mask is not known to have its scores' sizes, or one, has no kernel"
REFUSED = [
    (ROWS + ", T[2,B,4,P,8] p", "x, w, b, , p", "", "an Attention with keys of the past, or more results, has no kernel"),
    (ROWS + ", int32[1] n", "x, w, b, , , , n", "", "an Attention with keys of the past, or more results, has no kernel"),
    (ROWS, "x, w, b", ", do_rotary = 1", "an Attention with rotary embeddings has no kernel"),
    ("T[B,S,24] x, T[24,96] w, T[Z] b", "x, w, b", "", "an Attention of 96 columns whose bias is not known to have as many has no kernel"),
    ("T[B,S,24] x, T[24,Z] w, T[Z] b", "x, w, b", "", "an Attention whose Z columns are not known to be those of queries, keys and values has no kernel"),
    (ROWS, "x, w, b", ", qkv_hidden_sizes = [32, 32, 16]", "an Attention whose 96 columns are not known to be those of queries, keys and values has no kernel"),
    (ROWS, "x, w, b", ", qkv_hidden_sizes = [32, 16, 48]", "an Attention whose 96 columns are not known to be those of queries, keys and values has no kernel"),
    (ROWS + ", int32[Z] m", "x, w, b, m", "", MASK),
    (ROWS + ", int32[B,1] m", "x, w, b, m", "", MASK),
    (ROWS + ", int32[B,1,S,S] m", "x, w, b, m", "", MASK),
    (ROWS + ", T[B,3,S,S] r", "x, w, b, , , r", "", MASK),
]


@pytest.mark.parametrize(("inputs", "operands", "attributes", "message"), REFUSED)
def test_what_has_no_kernel(inputs: str, operands: str, attributes: str, message: str) -> None:
    found = refused(f"g ({inputs}) => (T[B,S,32] y) {{ y = com.microsoft.Attention<num_heads = 4{attributes}>({operands}) }}".replace("T[", "float16["))
    assert found.message == message and found.remedy


def test_keys_that_are_written_are_refused() -> None:
    found = refused(text("plain", "float16").replace("[B,S,32] y)", "[B,S,32] y, float16[2,B,4,S,8] p)").replace("y = com", "y, p = com"))
    assert found.message == REFUSED[0][3]


def test_a_kernel_is_told_what_either_part_is_to_be() -> None:
    sizes = {"B": 2, "S": 70}
    made = make(text("plain", "float16"), planned=sizes)
    assert made.kernel.pace is not None and len(made.kernel.pace.parts) == 2
    kinds = ["rows" in dict(choice.settings) for choice in made.kernel.choices]
    assert len(set(kinds)) == 2 and all(parse_choice(str(choice)) == choice for choice in made.kernel.choices)
    for choice in (made.kernel.choices[kinds.index(True)], made.kernel.choices[kinds.index(False)]):
        other = told(made, choice, sizes)
        assert other.kernel.choice == choice and other.kernel.source != made.kernel.source
        assert words(choice) in other.kernel.plan.variants[0].name
        check(other, masked(random_inputs(other, sizes)), length=70, misalign=False, limit=1, slack=4)


def test_keys_are_copied_from_between() -> None:
    """By tensor maps of scratch memory, where many queries meet many keys."""
    made = make(text("plain", "float16"), planned={"B": 1, "S": 1024})
    plan = made.kernel.plan
    assert [each.base for each in plan.maps] == ["i0", "i1", "t0", "t0"] and plan.scratch[0] == "s0 s1 * 192 *"
    # Few blocks: a part of the keys each, in the attention's own memory, before what is launched of many.
    assert [len(each.launches) for each in plan.variants[:3]] == [3, 2, 2]
    assert all(name in plan.variants[1].launches[1].arguments for name in ("m2", "m3"))
    check(made, masked(random_inputs(made, {"B": 1, "S": 257})), length=257, misalign=False, limit=2, slack=4)


def test_float32_that_is_not_rounded() -> None:
    made = make(text("plain"), planned={"B": 2, "S": 17})
    assert made.kernel.rounds
    lowered = replace(made.lowered, program=exactly(made.lowered.program))
    kernel = make_kernel(Request(lowered, "test", {"B": 2, "S": 17}))
    assert isinstance(kernel, Kernel) and kernel.schedule == "projected" and not kernel.rounds
    check(replace(made, kernel=kernel), masked(random_inputs(made, {"B": 2, "S": 17})), length=70, misalign=False, limit=1, slack=4)


LAYER = ("g (float16[B,S,32] x, float16[32,96] w, float16[96] b, int32[B,S] m, float16[32,32] o) => (float16[B,S,32] y) "
         "{ a = com.microsoft.Attention<num_heads = 2>(x, w, b, m) y = MatMul(a, o) }")


def measured(layer: onnx.ModelProto, folder: Path, rows: int = 80) -> Optimised:
    """As it is planned where its kernels were measured to be faster."""
    timer, dims = FakeTimer(lambda name: 50.0 if name == RUNTIME else 5.0), {"B": 1, "S": rows}
    with open_database(folder / "measurements.sqlite") as kept:
        tune(layer, timer, kept, TuneOptions(dims=dims))
        return planned(layer, database=Path(kept.name), target="H100", dims=dims)


def test_the_runtimes_own_kernel_is_replaced_where_that_was_measured_alone(tmp_path: Path) -> None:
    """Numbers that are infinite between the product and the attention, as the runtime's are, are no fault; one of a
    hundredth is.  The node stands in the body, and comes back."""
    layer = parse(LAYER)
    del layer.opset_import[2:]
    made = planned(layer)
    (refusal,) = [refusal for refusal in made.refusals if refusal.code == "unmeasured"]
    assert not made.plan.fusions and "the product of an attention's operands and the attention" in refusal.message
    made = measured(layer, tmp_path)
    (fusion,) = made.plan.fusions
    assert fusion.kernel.schedule == "projected" and [node.op for node in fusion.view] == ["Attention"]
    for runner, verdict in ((EmulatedRunner(), "passed"), (FaultyRunner(), "failed")):
        (result,) = verify(made, runner).nodes
        assert result.verdict == verdict, result
    fused = made.rewritten.model
    assert {entry.domain for entry in fused.opset_import} >= {"", "com.microsoft"}
    back = unfuse(fused)
    assert back.graph == layer.graph and list(back.opset_import) == list(layer.opset_import)


def test_what_a_causal_mask_hides_need_not_show(tmp_path: Path) -> None:
    """Of a sum that cancels no share says how near it is: the original's own rounding does, where there are numbers."""
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(shape).astype(np.float16) for name, shape in {"w": (32, 96), "b": (96,)}.items()}
    layer = LAYER.replace("num_heads = 2>", "num_heads = 2, unidirectional = 1>").replace("int32[B,S] m", "int32[B,S,S] m")
    layer = with_constants(parse(layer), weights)  # which are what they are
    made = measured(layer, tmp_path, 130)
    (result,) = verify(made, EmulatedRunner()).nodes
    assert result.verdict == "passed" and "not-a-number" in result.inputs, result
    # What a mask that is read leaves of keys where it hides all of them stays as it is.
    (node,) = read_fused(made.rewritten.model)
    rows = rng.standard_normal((1, 8, 32)).astype(np.float16)
    rows[0, 7] = np.nan
    given = {"x": rows, "m": np.zeros((1, 8, 8), np.int32), **weights}
    feeds = {formal: given[name] for formal, name in formal_names(node).items()}
    lower, clean = (np.abs(each[0][0, 6]) for each in Reference(node, made.rewritten.model).hidden(feeds))
    assert np.isfinite(clean).all() and np.abs(lower - clean).max() > 0.1


def test_roundings_that_happen_to_cancel_bound_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of float32: the original's errors of shares and of values, where the kernel's have the same sign."""
    layer = parse("g (float[B,S,24] x, float[24,24] w, float[24] b, float[B,1,S,S] r) => (float[B,S,8] y) "
                  "{ y = com.microsoft.Attention<num_heads = 1, scale = 0.25>(x, w, b, , , r) }")
    del layer.opset_import[2:]
    weights = (np.random.default_rng(56).standard_normal((24, 24)) * 0.1).astype(np.float32)
    made = measured(with_constants(layer, {"w": weights}), tmp_path, 2)
    assert [result.verdict for result in verify(made, EmulatedRunner()).nodes] == ["passed"]
    assert [result.verdict for result in verify(made, FaultyRunner()).nodes] == ["failed"]
    monkeypatch.setattr(Reference, "cut", lambda self, feeds: None)
    (result,) = verify(made, EmulatedRunner()).nodes
    assert result.verdict == "failed" and "on tiny" in result.message


def test_no_bias_ends_no_process(tmp_path: Path) -> None:
    """ONNX Runtime's CPU provider, which verification runs the whole model on, reads where there is none."""
    layer = parse(LAYER.replace("float16[96] b, ", "").replace("(x, w, b, m)", "(x, w, , m)"))
    made = measured(layer, tmp_path)
    verification = verify(made, EmulatedRunner())
    assert [result.verdict for result in verification.nodes] == ["passed"] and verification.passed
    given = with_biases(made.rewritten.model)
    assert [node.op_type for node in given.functions[0].node] == ["Constant", "Gather", "Sub", "Attention"]
    assert with_biases(given) is given


def test_what_the_runtime_takes_is_foreseen_as_its_kernels_are() -> None:
    """A product, what lays out its results, and an attention, where it would be one launch."""
    made = planned(parse(LAYER), target="H100", dims={"B": 8, "S": 128})
    node = next(node for node in made.ledger.graph.nodes if node.op == "Attention")
    foreseen = made.costs.group_seconds(frozenset([node]))
    alone = CostModel(made.ledger, made.profile).group_seconds(frozenset([node]))
    assert foreseen - alone > 2e-6 * made.profile.floor_us and not made.costs.is_learned(node)


def test_what_would_give_a_node_a_kernel_is_told() -> None:
    layer = parse(LAYER.replace("num_heads = 2>", "num_heads = 2, do_rotary = 1>"))
    found = onnxfuse.explain(layer, "a", dims={"B": 1, "S": 80}, target="H100", database=False).to_text()
    assert "an Attention with rotary embeddings has no kernel" in found and "RotaryEmbedding" in found
