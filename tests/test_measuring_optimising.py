"""What the benchmark of `onnxfuse optimize` says of its stages, and what it lets pass."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import onnx
import onnx.parser
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
import optimising


def test_what_optimising_takes_is_told_by_stage(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[8, 64] x) => (float[8, 64] y) '
        "{ a = Relu(x) b = Tanh(a) y = Mul(b, x) }"), path)
    (subject,) = optimising.subjects(None, tmp_path, str(tmp_path))
    assert (subject.name, subject.allowed) == ("model.onnx", 20.0)
    taken = optimising.optimised(subject, str(tmp_path / "cache"), "H200", False)
    assert taken.nodes == 1 and taken.summary == "skipped"
    assert {"reading", "planning", "rewriting", "writing"} == set(taken.stages), "as --no-verify has it"
    assert sum(taken.stages.values()) == pytest.approx(taken.seconds, abs=0.1)
    slow = replace(taken, seconds=20.1)
    text = optimising.show([(subject, dict.fromkeys(optimising.WAYS, each)) for each in (taken, slow)], [])
    assert text.count("| pass |") == text.count("| FAIL |") == 1
    assert "| pass |" in optimising.show([(subject, {optimising.WAYS[0]: taken})], [])
    lost = optimising.show([(subject, {optimising.WAYS[0]: replace(taken, nodes=0, taken_back=1)})], [])
    assert "| FAIL: 1 nodes taken back |" in lost
    row = replace(subject, allowed=optimising.ALLOWED)
    plain = {optimising.WAYS[0]: taken, optimising.WAYS[-1]: replace(taken, seconds=5.1)}
    assert "| FAIL: --no-verify |" in optimising.show([(row, plain)], [])
    assert "| pass |" in optimising.show([(subject, plain)], []), "a file of one's own may take longer"
