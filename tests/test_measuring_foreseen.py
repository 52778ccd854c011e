"""What a plan by predictions takes in, beside what the same regions were measured to take (benchmarks/foreseen.py)."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from fake_timer import RUNTIME, FakeTimer
from kernel_harness import parse

from onnxfuse.measuring.database import open_database
from onnxfuse.tuning import TuneOptions, tune

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
foreseen = importlib.import_module("foreseen")

LAYERS = ("g (float16[M,1024] a, float16[1024,1024] b, float16[1024,512] c) => (float16[M,512] y) "
          "{ p = MatMul(a, b) q = Relu(p) r = Gelu(q) s = MatMul(r, c) t = Relu(s) y = Gelu(t) }")


@pytest.mark.usefixtures("few_ways")
def test_regions_are_looked_up_and_the_slow_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All that is fused was measured, at what the timer says; what no region gains all miss."""
    row = SimpleNamespace(name="layers:4096", model="layers", dims={"M": 4096}, hydrated=lambda: parse(LAYERS))
    monkeypatch.setattr(foreseen, "choose", lambda names: [row])
    database = tmp_path / "measured.sqlite"
    asked = ["--database", str(database)]
    with open_database(database) as kept:
        tune(parse(LAYERS), FakeTimer(lambda name: 60.0 if name == RUNTIME else 40.0), kept, TuneOptions(dims=row.dims))
    made = CliRunner().invoke(foreseen.main, asked)
    (line,) = (line for line in made.stdout.splitlines() if "layers" in line)
    assert made.exit_code == 0 and "2 of 2" in line and "120 → 80" in line and line.count("1.50") == 2
    missed = CliRunner().invoke(foreseen.main, [*asked, "--least", "1.6"])
    assert missed.exit_code == 1 and missed.stderr.count("60.0 µs, 40.0 fused") == 2
    row.dims = {"M": 4097}
    unknown = CliRunner().invoke(foreseen.main, asked)
    assert unknown.exit_code == 1 and "0 of 2" in unknown.stdout
