"""Networks of convolutions beside the zoo: what is listed is there, and is planned as other models are."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any

import onnx
import pytest
from cli_models import ROOT

from onnxfuse.pipeline import Options, optimise

sys.path.append(str(ROOT / "benchmarks"))

FOLDER = ROOT / "benchmarks" / "convolutions"
LISTED: dict[str, Any] = json.loads((FOLDER / "zoo.json").read_text())

FEW = ("shufflenet_v2_x1_0_fp16", "r3d_18_fp16", "mobilenet_v2_fp16_dynamo")
"""Those that are planned without --slow: groups and shuffled channels, three axes, another exporter."""


def test_there_are_sixty_of_more_than_fifty_architectures() -> None:
    assert len(LISTED) >= 60 and len({entry["spec"] for entry in LISTED.values()}) > 50
    assert {path.name.removesuffix(".onnx.xz") for path in FOLDER.glob("*.onnx.xz")} == LISTED.keys()
    assert LISTED.keys().isdisjoint(json.loads((ROOT / "benchmarks" / "zoo" / "zoo.json").read_text()))


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name in FEW else pytest.mark.slow) for name in LISTED])
def test_each_is_planned(name: str) -> None:
    zoo, rows = map(import_module, ("zoo", "zoo_rows"))
    (row,) = [row for row in rows.all_rows(FOLDER) if row.model == name]
    model = zoo.hydrate().hydrate(row.skeleton)
    onnx.checker.check_model(model)
    made = optimise(model, Options(dims=row.dims, target="H100", verify=False, database=False))
    assert made.plan.fusions and any(node.op_type == "Conv" for node in model.graph.node)
