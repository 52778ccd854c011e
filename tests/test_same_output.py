"""The same model gives the same words: under every seed of Python's hashes, and however its nodes are sorted."""

from __future__ import annotations

import hashlib
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import body_models
import onnx
import pytest
import quantized_models
import sizes_models
from cli_models import ROOT, encoder, environment
from graph_strategies import seeded
from reordered import rewritten, tagger

from onnxfuse.pipeline import Options, optimise
from onnxfuse.reporting import as_json, explain, explanation_json, report_of

sys.path.insert(0, str(ROOT / "benchmarks"))
planning = importlib.import_module("planning")

MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "encoder": encoder,
    "tagger": lambda: tagger(steps=2),
    "transformer": lambda: planning.transformer(20),
    "sizes": sizes_models.attention,
    "nested": body_models.nested,
    "integers": quantized_models.integers,
    "random": lambda: seeded(29, 40).model,
}

SEEDED = ("encoder", "nested", "integers", "random")
"""Models whose words are compared under several seeds of hashes."""

ORDERS = 10

SEEDS = """
import json, sys
from pathlib import Path
from click.testing import CliRunner
from onnxfuse.cli import main

def printed(*arguments):
    done = CliRunner().invoke(main, [*arguments, "--target", "H100"], env={"COLUMNS": "100", "SOURCE_DATE_EPOCH": "0"})
    assert done.exit_code == 0, done.output
    return done.output

for path in map(Path, sys.argv[2:]):
    out = Path(sys.argv[1]) / path.name
    print(printed("optimize", str(path), "-o", str(out), "--no-verify", "--explain", "-v"))
    print(printed("report", str(path), "--json"))
    print(printed("report", str(out), "--json"))
"""


def described(model: onnx.ModelProto) -> dict[str, object]:
    """All that is planned and said of a model."""
    made = optimise(model, Options(target="H100", verify=False, database=False))
    return {
        "report": as_json(report_of(made)), "explanation": explanation_json(explain(made)),
        "kernels": [[region.rule, region.kernel.schedule, region.kernel.plan.to_json(), region.kernel.source]
                    for region in made.regions],
    }


@pytest.mark.parametrize("name", MODELS)
def test_ten_orders_of_the_same_nodes_give_the_same_words(name: str) -> None:
    model = MODELS[name]()
    expected = json.dumps(described(model), indent=1)
    for seed in range(ORDERS):
        other = rewritten(model, seed, rename=False).model
        assert json.dumps(described(other), indent=1) == expected, f"order {seed}"


def test_three_seeds_of_hashes_give_the_same_words_and_bytes(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.onnx" for name in SEEDED]
    for path in paths:
        onnx.save(MODELS[path.stem](), path)
    out = tmp_path / "out"
    out.mkdir()
    found = []
    for seed in ("0", "1", "4242"):
        done = subprocess.run(
            [sys.executable, "-c", SEEDS, str(out), *map(str, paths)], text=True, capture_output=True, check=False,
            env=environment(PYTHONHASHSEED=seed))
        assert done.returncode == 0, done.stderr
        files = [hashlib.sha256((out / path.name).read_bytes()).hexdigest() for path in paths]
        found.append((done.stdout, files))
    assert found[0] == found[1] == found[2]
