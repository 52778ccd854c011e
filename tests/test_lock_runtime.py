"""A lock of what ONNX Runtime fuses by itself, and later models beside it."""

from __future__ import annotations

import re
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest
from cli_models import encoder, parse, write
from lock_models import layers, lines, optimised
from test_lock import checked, modelled

import onnxfuse
from onnxfuse.locking import asked, lock_text, read_lock

SCALED = """
g (float[batch, 128, 64] x, float[64, 64] w, float[{sizes}] c) => (float[batch, 128, 64] y) {{
  m = MatMul(x, w)
  y = Div(m, {divisor})
}}
"""
"""ONNX Runtime takes a scalar constant into the product, and nothing else."""


def test_a_fusion_of_the_runtimes_that_fires_no_more(tmp_path: Path) -> None:
    scalar, vector = (SCALED.format(sizes="64", divisor=divisor) for divisor in ("eight", "c"))
    model = parse(scalar.replace("{\n", "{\n eight = Constant <value = float {8.0}> ()\n", 1))
    path = tmp_path / "m.lock.yaml"
    path.write_text(lock_text(optimised(model).lock()))
    assert [entry.rule for entry in read_lock(path).runtime] == ["ort-matmul-scale"]
    assert lines(tmp_path, model, path)[0] == 0
    code, told = lines(tmp_path, parse(vector), path)
    assert code == 1 and told[1] == "lost: 1 of 1 of ONNX Runtime's own"
    assert told[3:6] == ["lost  1 x ort-matmul-scale of ONNX Runtime's own: MatMul, Div", "MatMul -> m",
                         "between 'MatMul -> m' and 'Div -> y': its nodes are left to ONNX Runtime"]
    assert re.match(r"[a-z-]+ \(ort-matmul-scale\) at Div -> y: ", told[6])
    code, told = lines(tmp_path, model, path, "--disable", "ort-matmul-scale")
    assert code == 1 and "disabled (ort-matmul-scale): the rule ort-matmul-scale is left out" in told


def test_a_fusion_of_ours_that_costs_one_of_the_runtimes(tmp_path: Path) -> None:
    """Found, with what it is predicted to cost."""
    from test_broken_fusions import GELU, NO_ERF

    rules = tmp_path / "no-erf.yaml"
    rules.write_text(NO_ERF)
    model, options = write(tmp_path, GELU), {"rules": [rules], "disable": ["gelu-erf"], "dims": {"B": 8}}
    made = optimised(model, **options).lock()
    assert [(entry.rule, entry.after) for entry in made.runtime] == [("ort-gelu", 1)] and not made.fusions
    (lost,) = onnxfuse.check(model, made, rules=[rules], database=False, strategy="memory", least_gain=0.0).lost
    (why, *_) = lost.stopped.because
    assert (lost.kind, why.code, why.rule) == ("runtime", "taken", "grow-pointwise")
    assert re.fullmatch(r"the fused node of Add -> a \(grow-pointwise\) takes Add -> a, Mul -> m, Mul -> t; what ONNX "
                        r"Runtime keeps takes \d\.\d+ µs predicted", why.message)
    broken = optimised(model, **options, strategy="memory", least_gain=0.0).lock()
    (spot,) = broken.runtime[0].at
    assert spot.after == "broken" and 1 < spot.costs_us < 100
    assert onnxfuse.check(model, broken, rules=[rules], database=False).holds


def forgetful(model: bytes, options: ort.SessionOptions) -> object:
    """A session of a runtime that has lost its GELUs."""
    lost = ["BiasGeluFusion", "GeluFusionL1", "GeluFusionL2"]
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"], disabled_optimizers=lost)


def refusing(model: bytes, options: ort.SessionOptions) -> object:
    raise RuntimeError("no such operator here")


@modelled
def test_a_runtime_that_fuses_no_more_what_it_did(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The rules still say so, and a session shows otherwise."""
    path = optimised(encoder(2), dims={"batch": 8}, target="B200").save_lock(tmp_path / "m.lock.yaml")
    seen = {entry.rule: {spot.seen for spot in entry.at} for entry in read_lock(path).runtime}
    assert seen["ort-gelu+ort-bias-gelu"] == seen["ort-matmul-scale"] == {True} and seen["ort-bias-softmax"] == {False}
    monkeypatch.setattr(asked, "session", forgetful)
    code, told = lines(tmp_path, encoder(2), path)
    release = ort.__version__
    assert code == 1 and told[1] == "lost: 2 of 6 of ONNX Runtime's own" and told[3:] == [
        "lost  2 x ort-gelu+ort-bias-gelu of ONNX Runtime's own: Add, Div, Erf, Add, 2 Mul",
        "/encoder/layer.*/Add_6 (2 nodes, from /encoder/layer.0/Add_6)",
        f"at /encoder/layer.0/Add_6: a session of ONNX Runtime {release} keeps its nodes apart, and one of {release} "
        "ran them as one",
        "help: onnxfuse optimize FOLDER/m.onnx --lock FOLDER/m.lock.yaml  writes the lock anew, where this is meant"]
    monkeypatch.setattr(asked, "session", refusing)
    code, told = lines(tmp_path, encoder(2), path)
    assert code == 0 and told[-1] == ("note: No session of ONNX Runtime could be made here to see what it fuses by "
                                      "itself: the rules alone say so.")


def test_large_models_are_not_loaded_to_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked, "session", refusing)
    monkeypatch.setattr(asked, "MOST_BYTES", 100)
    assert {spot.seen for entry in optimised(layers()).lock().runtime for spot in entry.at} == {None}


@modelled
def test_weights_in_files_are_found(tmp_path: Path) -> None:
    onnx.save(layers(), tmp_path / "m.onnx", save_as_external_data=True, location="weights", size_threshold=256)
    assert {spot.seen for entry in optimised(tmp_path / "m.onnx").lock().runtime for spot in entry.at} == {True}


def test_what_ours_takes_of_the_runtimes_for_nothing_holds() -> None:
    made = optimised(encoder(2), dims={"batch": 8}, target="B200").lock()
    result = checked(encoder(2), made, disable=["gelu-erf"], dims={"batch": 64})
    assert not [each for each in result.lost if each.kind == "runtime"]
    assert {each.to.rule for each in result.otherwise if each.kind == "runtime"} >= {"scaled-masked-softmax"}
