"""Fusions of ours that take nodes out of one of ONNX Runtime's own: which, and what that is predicted to cost."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import pytest
from cli_models import run, write
from unmeasured import measured

from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.reporting import report_of
from onnxfuse.reporting.html import page

GELU = """
g (float[B, 512, 64] x) => (float[B, 512, 64] y) <float half = {0.5}, float one = {1.0}, float root = {1.4142135}> {
  d = Div(x, root)
  e = Erf(d)
  a = Add(e, one)
  m = Mul(x, a)
  t = Mul(m, half)
  y = Tanh(t)
}
"""
"""The runtime runs all but the last as one Gelu."""

PRODUCT = """
g (float[B, 12, 512, 64] q, float[B, 12, 512, 64] k) => (float[B, 12, 512, 512] y)
<float c = {8.0}, float half = {0.5}> {
  t = Transpose <perm = [0, 1, 3, 2]> (k)
  m = MatMul(q, t)
  d = Div(m, c)
  e = Sigmoid(d)
  f = Mul(e, half)
  y = Add(f, d)
}
"""
"""The runtime runs the product with its transpose and its scale, and runs it without the scale as well."""

NO_ERF = """
id: no-erf
kind: forbid
summary: The error function stays the runtime's.
why: A region that takes the rest of a GELU leaves the runtime more kernels than it takes.
reason: the error function stays the runtime's
pattern: y = Erf(x)
leave: [y]
"""

WAYS = ("--strategy", "memory", "--least-gain", "0", "--disable", "gelu-erf", "--dim", "B=8", "--target", "H100")
"""With which memory is saved although it costs time."""


@pytest.fixture
def rule(tmp_path: Path) -> Path:
    path = tmp_path / "rules" / "no-erf.yaml"
    path.parent.mkdir()
    path.write_text(NO_ERF)
    return path


def planned(text: str, folder: Path, **options: Any) -> Optimised:
    return optimise(write(folder, text), Options(**{
        "verify": False, "dims": {"B": 8}, "target": "H100", "database": False, **options}))


def test_what_is_left_of_a_fusion_of_the_runtimes_is_priced(tmp_path: Path, rule: Path) -> None:
    found = planned(GELU, tmp_path, rules=[rule], disable=["gelu-erf"], strategy="memory", least_gain=0.0)
    (fusion,), (broken,) = found.plan.fusions, found.costs.broken(found.plan.fusions)
    assert broken.fusion.rules == ("ort-gelu",)
    assert [node.op for node in broken.left] == ["Div", "Erf"]
    alone = sum(found.costs.group_seconds(frozenset([node])) for node in broken.left)
    assert broken.seconds == pytest.approx(alone)
    # It is what the region's own count has beside its kernel.
    assert fusion.cost.seconds_after == pytest.approx(broken.seconds + found.costs.kernel_seconds(fusion))


def test_what_the_runtimes_kernel_does_without_costs_nothing(tmp_path: Path) -> None:
    found = planned(PRODUCT, tmp_path, target=measured("H100", tile_tflops=None))
    (broken,) = found.costs.broken(found.plan.fusions)
    assert broken.fusion.rules == ("ort-matmul-transpose", "ort-matmul-scale")
    assert [node.op for node in broken.left] == ["Transpose", "MatMul"] and broken.seconds == 0
    assert [entry.seconds for entry in report_of(found).broken] == [0]


def test_what_is_taken_whole_or_not_at_all_is_not_broken(tmp_path: Path) -> None:
    whole = planned(GELU, tmp_path)
    assert len(whole.plan.fusions) == 1 and whole.costs.groups and not whole.costs.broken(whole.plan.fusions)
    assert not whole.costs.broken(())


def test_the_report_names_it_now_and_from_the_fused_file(tmp_path: Path, rule: Path) -> None:
    model = write(tmp_path, GELU)
    shown = run("optimize", model, "--rules", rule, *WAYS, "--no-verify", "--report", tmp_path / "report.json")
    (entry,) = json.loads((tmp_path / "report.json").read_text())["broken"]
    (node,) = entry.pop("fused_nodes")
    microseconds = entry.pop("seconds") * 1e6
    assert entry == {"rule": "ort-gelu", "left": ["Div -> d", "Erf -> e"]} and 1 < microseconds < 100
    line = ("taken apart: 1 x ort-gelu of ONNX Runtime's own fusions; what it keeps of it takes "
            f"{microseconds:.3g} µs predicted, counted above: Div -> d")
    assert line in shown.output.splitlines()
    fused = tmp_path / "model.fused.onnx"
    held, anew = run("report", fused), run("report", fused, "--dim", "B=16")
    assert line in held.output.splitlines() and "taken apart: 1 x ort-gelu of " in anew.output
    assert json.loads(run("report", fused, "--json").output)["broken"][0]["fused_nodes"] == [node]


def test_the_page_names_it(tmp_path: Path, rule: Path) -> None:
    found = planned(GELU, tmp_path, rules=[rule], disable=["gelu-erf"], strategy="memory", least_gain=0.0)
    told = html.unescape(page(report_of(found)))
    assert "Taken apart: 1 × ort-gelu of ONNX Runtime's own fusions; what it keeps takes " in told
    assert " predicted, counted above: Div -> d.</p>" in told
