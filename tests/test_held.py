"""A fused file knows how it was made, and its report shows that and counts nothing anew unless it is asked to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from cli_models import CHAIN, encoder, parse, run, write

from onnxfuse.errors import ModelError, OnnxfuseError
from onnxfuse.planning.costs.cost import CostModel
from onnxfuse.reporting import keep_measured
from onnxfuse.rewriting import plan_record
from onnxfuse.rewriting.provenance import KEY, today

EPOCH = "1767225600"  # the first second of 2026

MEASURED = {"speedup": 1.5, "low": 1.4, "high": 1.6, "of": "GPU time", "device": "a GPU", "before": 3.0, "after": 2.0}


def fused(folder: Path, *options: object, **environment: str) -> tuple[Path, dict[str, Any]]:
    """A fused file, and the report of the run that wrote it."""
    result = run("optimize", write(folder, CHAIN), "--json", *options, **environment)
    assert result.exit_code == 0, result.output
    return folder / "model.fused.onnx", json.loads(result.output)


def report(path: Path, *options: object) -> dict[str, Any]:
    result = run("report", path, "--json", *options)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


def test_the_file_says_for_what_and_how_it_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, did = fused(tmp_path, "--target", "L4", "--dim", "batch=64", "--strategy", "memory", "--hint",
                      "memory-pressure=0.5", SOURCE_DATE_EPOCH=EPOCH)

    def refuse(*_: object) -> None:
        raise AssertionError("something was counted anew")

    monkeypatch.setattr(CostModel, "region", refuse)
    monkeypatch.setattr(CostModel, "total", refuse)
    held = report(path)
    for name in ("target", "dims", "assumed", "candidates", "fusions", "canonical", "bytes_after", "kernels_after",
                 "estimated_seconds_before", "estimated_speedup", "peak_bytes_after", "unknown"):
        assert held[name] == did[name], name
    assert (held["target"], held["dims"], held["assumed"]) == ("L4", {"batch": 64}, {"target": False, "dims": []})
    assert held["made"]["strategy"] == "memory" and held["made"]["hints"]["memory_pressure"] == 0.5
    assert held["made"]["onnxfuse"] == did["onnxfuse"] and held["made"]["onnx"] == onnx.__version__
    assert held["verification"]["status"] == did["verification"]["status"] == "graph verified"
    assert held["verification"]["date"] == "2026-01-01" and held["verification"]["onnxruntime"]
    assert held["verification"]["inputs"] and held["notes"] == []
    output = run("report", path).output
    assert output.splitlines()[0].endswith("planned for L4, batch=64")
    assert "strategy memory\n" in output and "kernels not run (2026-01-01, ONNX Runtime " in output


def test_what_was_assumed_is_marked_here_and_there(tmp_path: Path) -> None:
    path, did = fused(tmp_path, "--target", "L4")
    assert did["assumed"] == report(path)["assumed"] == {"target": False, "dims": ["batch"]}
    for shown in (run("report", path).output, run("report", tmp_path / "model.onnx", "--target", "L4").output,
                  run("explain", tmp_path / "model.onnx", "--target", "L4").output):
        assert shown.splitlines()[1] == "batch=1: assumed; --dim"


@pytest.mark.parametrize(("options", "target", "size", "assumed"), [
    (["--dim", "batch=9"], "L4", 9, []), (["--target", "T4"], "T4", 1, ["batch"])])
def test_other_sizes_and_gpus_are_counted_anew_and_said_so(
        tmp_path: Path, options: list[str], target: str, size: int, assumed: list[str]) -> None:
    path, did = fused(tmp_path, "--target", "L4")
    held = report(path, *options)
    assert (held["target"], held["dims"]["batch"], held["assumed"]["dims"]) == (target, size, assumed)
    assert held["notes"] == [
        "The figures are counted anew for what you asked for; the file was planned for L4, batch=1."]
    assert held["estimated_seconds_after"] != did["estimated_seconds_after"]
    assert report(path, "--target", "L4", "--dim", "batch=1")["notes"] == []


def test_a_file_that_was_changed_is_counted_anew(tmp_path: Path) -> None:
    path, _ = fused(tmp_path)
    model = onnx.load(path)
    model.graph.node[0].doc_string = "changed"
    onnx.save(model, path)
    assert report(path)["notes"] == ["The file was changed since it was fused: the figures are counted anew."]
    del model.metadata_props[[entry.key for entry in model.metadata_props].index(KEY)]
    onnx.save(model, path)
    assert report(path)["notes"] == ["The file does not say what it was planned for: the figures are counted anew."]
    assert report(path)["verification"]["status"] == "not recorded"


def test_a_measurement_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", EPOCH)
    path, _ = fused(tmp_path)
    keep_measured(path, MEASURED)
    assert report(path)["measured"] == {**MEASURED, "date": "2026-01-01"}
    assert "measured 1.50x of the GPU time on a GPU (1.40 to 1.60)" in run("report", path).output


@pytest.mark.parametrize("options", [["--no-verify"], []])
def test_the_same_input_gives_the_same_bytes(tmp_path: Path, options: list[str]) -> None:
    """A date is there only where something was run, and SOURCE_DATE_EPOCH decides it."""
    found = [fused(tmp_path, *options, SOURCE_DATE_EPOCH=EPOCH)[0].read_bytes() for _ in range(2)]
    assert found[0] == found[1]
    record = plan_record(onnx.load_from_string(found[0]))
    assert record is not None and (record.verification is None) == bool(options)


def test_nothing_of_it_is_left_in_the_original(tmp_path: Path) -> None:
    onnx.save(encoder(), tmp_path / "m.onnx")
    run("optimize", tmp_path / "m.onnx", "--no-verify", "-q")
    path = tmp_path / "m.fused.onnx"
    assert plan_record(onnx.load(path)) is not None
    run("unfuse", path, "-o", tmp_path / "back.onnx")
    assert (tmp_path / "back.onnx").read_bytes() == (tmp_path / "m.onnx").read_bytes()


def test_what_was_not_fused_has_no_record(tmp_path: Path) -> None:
    write(tmp_path, CHAIN)
    run("optimize", tmp_path / "model.onnx", "--no-verify", "--least-gain", "50")
    assert plan_record(onnx.load(tmp_path / "model.fused.onnx")) is None


@pytest.mark.parametrize(("text", "reason"), [
    ("{", "cannot be read"), ("[]", "cannot be read"), ('{"version":9}', "its version is 9, and this release reads 1"),
    ('{"version":1,"target":3}', "cannot be read"),
])
def test_a_damaged_record_is_an_error(text: str, reason: str) -> None:
    model = parse(CHAIN)
    model.metadata_props.add(key=KEY, value=text)
    with pytest.raises(ModelError) as caught:
        plan_record(model)
    assert reason in caught.value.message and "onnxfuse.plan" in str(caught.value.place)


@pytest.mark.parametrize("name", ["nodes", "before"])
def test_damaged_figures_are_an_error(tmp_path: Path, name: str) -> None:
    path, _ = fused(tmp_path)
    model = onnx.load(path)
    (entry,) = [entry for entry in model.metadata_props if entry.key == KEY]
    content = json.loads(entry.value)
    part = content[name] if name == "before" else next(iter(content[name].values()))
    part["strange"] = part.popitem()[1]
    entry.value = json.dumps(content)
    onnx.save(model, path)
    result = run("report", path)
    assert result.exit_code == 1
    assert result.output.startswith("error: The record of the figures of the ") and "is damaged." in result.output


def test_a_date_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    assert today() == "1970-01-01"
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    with pytest.raises(OnnxfuseError, match="which is no date"):
        today()
    monkeypatch.delenv("SOURCE_DATE_EPOCH")
    assert today() > "2026-01-01"
