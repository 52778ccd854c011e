"""The Python functions."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from cli_models import CHAIN, PRODUCT, ROOT, encoder, parse

import onnxfuse
from onnxfuse.delivery import verified
from onnxfuse.optimised import Optimised, silent
from onnxfuse.pipeline import Options, optimise
from onnxfuse.rewriting import read_fused


def test_optimize_takes_a_model_and_leaves_it_alone() -> None:
    model = encoder()
    before = model.SerializeToString()
    result = onnxfuse.optimize(model, dims={"batch": 2, "sequence": 16})
    assert model.SerializeToString() == before
    assert len(read_fused(result.model)) == len(result.report.fusions) > 1
    assert result.report.model == "encoder"
    assert result.report.dims == {"batch": 2, "sequence": 16}
    assert result.report.verification["status"] in ("graph verified", "verified")


def test_the_fused_model_gives_the_originals_bits_in_a_session(tmp_path: Path) -> None:
    """float32, exact, on the CPU with the runtime's optimisations off: fused nodes run as their functions."""
    model = encoder(2)
    onnx.save(model, tmp_path / "model.onnx")
    path = onnxfuse.optimize(tmp_path / "model.onnx").save()
    assert path == tmp_path / "model.fused.onnx"
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    feeds = {"input_ids": np.arange(24).reshape(2, 12), "attention_mask": np.ones((2, 12), np.int64)}
    plain = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), options, providers=["CPUExecutionProvider"])
    fused = onnxfuse.session(path, providers=["CPUExecutionProvider"], session_options=options)
    np.testing.assert_array_equal(fused.run(None, feeds)[0], plain.run(None, feeds)[0])


def test_unfuse_gives_the_original_back() -> None:
    model = encoder()
    assert onnxfuse.unfuse(onnxfuse.optimize(model, verify=False).model).SerializeToString() == (
        model.SerializeToString())


def test_report_of_a_fused_model() -> None:
    result = onnxfuse.optimize(encoder(), verify=False)
    held = onnxfuse.report(result.model)
    assert [fusion.node for fusion in held.fusions] == [fusion.node for fusion in result.report.fusions]
    assert held.after == result.report.after


def test_saving_a_model_from_memory_needs_a_path() -> None:
    with pytest.raises(ValueError, match="a model that was not read from a file needs a path to be saved to"):
        onnxfuse.optimize(parse(PRODUCT), verify=False).save()


def test_embedded_images_are_in_the_model() -> None:
    result = onnxfuse.optimize(parse(CHAIN), embed=["sm_80", "sm_90"], verify=False)
    (node,) = read_fused(result.model)
    assert node.architectures == ("compute_90", "sm_80", "sm_90")
    assert result.report.fusions[0].architectures == ("compute_90", "sm_80", "sm_90")
    images = [attribute.t.raw_data for attribute in result.model.graph.node[0].attribute
              if attribute.name.startswith("image_")]
    assert [image[:4] for image in images] == [b"//\n/", b"\x7fELF", b"\x7fELF"]


def test_a_users_rule_is_used() -> None:
    model = parse("g (float[n, 64] x) => (float[n, 64] y) { c = Constant <value = float {9.0}> ()\n"
                  "s = Div(x, c)\n t = Tanh(s)\n y = Mul(t, c) }")
    report = onnxfuse.optimize(model, rules=[ROOT / "examples" / "rules"]).report
    assert [fusion.rule for fusion in report.fusions] == ["softcap"]


def test_progress_is_told() -> None:
    told: list[str] = []
    onnxfuse.optimize(parse(CHAIN), embed=["sm_90"], tell=lambda stage, done, of: told.append(stage))
    stages = list(dict.fromkeys(told))
    assert stages[:4] == ["reading", "planning", "compiling kernels", "rewriting"]


def test_the_collector_of_cycles_keeps_its_pace() -> None:
    """It is slow while a model is planned, and afterwards, also after an error, as it was; a slower one stays."""
    at: dict[str, int] = {}

    def tell(stage: str, _done: int, _of: int) -> None:
        at[stage] = gc.get_threshold()[0]

    before, pythons = gc.get_threshold(), (700, 10, 10)
    try:
        gc.set_threshold(*pythons)
        onnxfuse.optimize(parse(CHAIN), verify=False, tell=tell)
        assert at["planning"] > pythons[0] == at["reading"]
        with pytest.raises(onnxfuse.OnnxfuseError):
            onnxfuse.optimize(parse(CHAIN), dims={"nonesuch": 3})
        assert gc.get_threshold() == pythons
        gc.set_threshold(10 ** 6)
        onnxfuse.optimize(parse(CHAIN), verify=False, tell=tell)
        assert at["planning"] == 10 ** 6
    finally:
        gc.set_threshold(*before)


def test_a_node_that_fails_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verification that fails the first node once: the node goes back, the report says so, the rest stays."""
    from dataclasses import replace

    from onnxfuse import delivery

    optimised = optimise(encoder(), Options(verify=False))
    real, rounds = delivery.verify, []

    def once(subject: Optimised, *arguments: object) -> object:
        verification = real(subject, None, None, silent)
        rounds.append(len(verification.nodes))
        if len(rounds) == 1:
            bad = replace(verification.nodes[0], verdict="failed", message="off by 1% at (0, 3)")
            return replace(verification, nodes=(bad, *verification.nodes[1:]))
        return verification

    monkeypatch.setattr(delivery, "verify", once)
    first = optimised.rewritten.placed[0]
    result = verified(optimised, None, silent)
    assert rounds == [len(optimised.plan.fusions), len(optimised.plan.fusions) - 1]
    assert len(read_fused(result.model)) == len(read_fused(optimised.model)) - 1
    assert [(refusal.code, refusal.node, refusal.message) for refusal in result.taken_back] == [
        ("failed-verification", first.node, "off by 1% at (0, 3)")]
    assert result.taken_back[0] in result.refusals


def test_a_model_that_is_wrong_as_a_whole_is_not_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from onnxfuse import delivery
    from onnxfuse.verifying import OutputDifference

    optimised = optimise(parse(CHAIN), Options(verify=False))
    real = delivery.verify

    def wrong(subject: Optimised, *arguments: object) -> object:
        verification = real(subject, None, None, silent)
        whole = replace(verification.whole, identical=False, differences=(OutputDifference("y", 3, 0.5),))
        return replace(verification, whole=whole)

    monkeypatch.setattr(delivery, "verify", wrong)
    with pytest.raises(onnxfuse.VerificationError) as caught:
        verified(optimised, None, silent)
    assert str(caught.value) == (
        "The verification failed: without kernels the fused model differs from the original in 'y'.\n"
        "help: This is a fault of onnxfuse; please report it with the model."
    )


def test_a_report_shows_itself_as_data_as_text_and_as_a_page() -> None:
    result = onnxfuse.optimize(parse(CHAIN), target="H100", verify=False)
    report = result.report
    assert repr(report) == (f"<Report of 'g' for {report.target}: 1 fused node, {report.estimated_speedup:.2f}x "
                            "predicted, verification skipped>")
    assert repr(result) == repr(report).replace("Report", "Result")
    assert json.loads(json.dumps(report.to_json()))["estimated_speedup"] == round(report.estimated_speedup, 4)
    said = report.to_text(width=60)
    assert said.startswith("g  planned for H100") and max(map(len, said.splitlines())) <= 60
    assert "5 nodes into 1" in said and "\x1b" not in said
    assert report.to_html().startswith("<!doctype html>")


def test_names_are_curated() -> None:
    assert set(onnxfuse.__all__) <= set(dir(onnxfuse))
    for name in onnxfuse.__all__:
        assert getattr(onnxfuse, name) is not None
    with pytest.raises(AttributeError, match="module 'onnxfuse' has no attribute 'optimise'"):
        onnxfuse.optimise  # noqa: B018 - looking it up is the test
