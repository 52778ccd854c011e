"""Subject ``records``: what runs leave behind as JSON, damaged: the native library's statistics of fused nodes, and
ONNX Runtime's profile of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import cli_models
import run_statistics_files as statistics
from damage import damage_json

import rules as rule_files
from onnxfuse import api, pipeline
from onnxfuse.measuring.production import statistics_of
from onnxfuse.reporting import as_json, profile
from onnxfuse.rewriting import read_fused
from onnxfuse.runtime.run_statistics import read_statistics

CUDA = "CUDAExecutionProvider"
ODD = ("[" * 100_000, '{"a":' * 100_000, "1" + "0" * 400, "-1e400", "NaN", "Infinity", "1" * 5000,
       '"\\ud800"', '"\\u0000"', "9223372036854775808", "1e-400", "[[],[],[]]", "\ufeff", "true", "null",
       '"' + "x" * 100_000 + '"', "1e308", "0.5")
pipeline.load_rules = lambda *_: rule_files.SHIPPED


@cache
def models() -> tuple[Any, Any]:
    """A model, and its fused form."""
    model = cli_models.parse(cli_models.CHAIN)
    return model, api.optimize(model, verify=False, database=False, target="H200").model


@cache
def texts() -> tuple[str, str]:
    """Statistics, and a profile."""
    (node,) = read_fused(models()[1])
    recorded = statistics.document(
        statistics.node_of(node, statistics.run_of([[2, 4096], [4096]], [[2, 4096]], 3, 7),
                           statistics.run_of([[8, 4096], None], [[8, 4096]], 5, 9)))
    events: list[dict[str, Any]] = []
    for run in range(3):
        for name, op in zip("abcdy", ("Mul", "Tanh", "Add", "Sigmoid", "Mul"), strict=True):
            events.append({"cat": "Node", "pid": 1, "tid": 1, "dur": 7 + run, "ts": len(events), "ph": "X",
                           "name": f"{op}_{name}_kernel_time",
                           "args": {"op_name": op, "provider": CUDA, "node_index": "1"}})
            events.append({"cat": "Kernel", "dur": 3, "ts": len(events), "ph": "X", "name": "k",
                           "args": {"op_name": op}})
        events.append({"cat": "Session", "name": "model_run", "dur": 99, "ts": len(events), "ph": "X", "args": {}})
    return json.dumps(recorded), json.dumps(events)


def make(seed: int, folder: Path) -> list[Path]:
    """Statistics or a profile."""
    rng = Random(seed)
    which = rng.randrange(2)
    text = texts()[which]
    for _ in range(rng.choice((1, 1, 2, 4))):
        if rng.random() < 0.3:
            at = rng.choice([at for at, letter in enumerate(text) if letter in ":,["] or [0]) + 1
            end = min((text.find(mark, at) for mark in ",]}" if text.find(mark, at) >= 0), default=len(text))
            text = text[:at] + rng.choice(ODD) + text[end:]
        else:
            with suppress(RecursionError):  # it is nested deep by now
                text = damage_json(text, rng)
    path = folder / ("statistics.json", "profile.json")[which]
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    return [path]


def attempt(files: Sequence[Path]) -> str:
    """Set statistics beside the fused model, or plan with a profile."""
    model, fused = models()
    if files[0].name.startswith("statistics"):
        found = profile.profile_of_run(fused, files[0], target="H200")
        json.dumps(profile.as_json(found), allow_nan=False)
        statistics_of(read_statistics(files[0]))
        return f"{len(found.runs)} rows"
    result = api.optimize(model, verify=False, database=False, run_profile=files[0], target="H200")
    json.dumps(as_json(result.report), allow_nan=False)
    return "fused" if result.report.fusions else "nothing"
