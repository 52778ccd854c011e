"""Fused models in plain ONNX Runtime with no onnxfuse: the newest, and the oldest that is supported.

``ONNXFUSE_OLDEST_PYTHON`` is a Python with ONNX Runtime 1.20 and nothing of onnxfuse; ``make test`` sets it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from cli_models import CHAIN, ROOT, encoder, parse

import onnxfuse
from onnxfuse.checking import example_inputs
from onnxfuse.measuring.inputs import make_inputs
from onnxfuse.operators import load_graph
from onnxfuse.resources import rules_folder
from onnxfuse.rewriting import exact_form
from onnxfuse.rules import example_model, load_rules

pytestmark = pytest.mark.xdist_group("pairs")
"""The pairs are made once."""

OLDEST = os.environ.get("ONNXFUSE_OLDEST_PYTHON")
NEWEST_OPSET = 21
"""Of ONNX Runtime 1.20; its newest IR version is 10."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models, fused and not, with inputs: encoders, and an example of every rule that fuses."""
    folder = tmp_path_factory.mktemp("pairs")
    for dtype in ("float32", "float16"):
        model = encoder(2, dtype=dtype)
        write(folder, f"encoder-{dtype}", model, make_inputs(load_graph(model), {"batch": 3, "sequence": 17}))
    write(folder, "chain", parse(CHAIN), make_inputs(load_graph(parse(CHAIN)), {"batch": 5}))
    shipped = load_rules([rules_folder()])
    for rule in (*shipped.canonical, *shipped.fuse, *shipped.grow, *shipped.forbid):
        for number, example in enumerate(rule.examples):
            model = example_model(example)
            versions = {entry.domain: entry.version for entry in model.opset_import}
            if (example.refused is None and versions.get("", 0) <= NEWEST_OPSET and model.ir_version <= 10
                    and write(folder, f"{rule.id}-{number}", model, example_inputs(load_graph(model), example))):
                break
    return folder


def write(folder: Path, name: str, model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> bool:
    """Write a pair, biases of products last where fused nodes add them; False where nothing is fused, or NumPy has no
    such type to write."""
    fused = onnxfuse.optimize(model, verify=False).model
    if all(node.domain != "onnxfuse" for node in fused.graph.node) or any(
            array.dtype.kind not in "fiub" for array in inputs.values()):
        return False
    onnx.save(exact_form(model, fused), folder / f"{name}.onnx")
    onnx.save(fused, folder / f"{name}.fused.onnx")
    np.savez(folder / f"{name}.npz", **inputs)
    return True


def run_plain(python: str, folder: Path) -> list[str]:
    """Lines that tests/oldest_runtime.py prints, in a process that cannot import onnxfuse."""
    done = subprocess.run(
        [python, "-I", str(ROOT / "tests" / "oldest_runtime.py"), str(folder)], text=True, capture_output=True,
        cwd=folder, check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_newest_runtime(pairs: Path) -> None:
    lines = run_plain(sys.executable, pairs)
    assert len(lines) == len(list(pairs.glob("*.fused.onnx"))) >= 20
    assert all(line.endswith(": same") for line in lines)


@pytest.mark.skipif(OLDEST is None, reason="ONNXFUSE_OLDEST_PYTHON is not set")
def test_oldest_runtime(pairs: Path) -> None:
    lines = run_plain(str(OLDEST), pairs)
    assert all(line.startswith("1.20.") and line.endswith(": same") for line in lines)
    assert len(lines) >= 20
