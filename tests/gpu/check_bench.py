#!/usr/bin/env python3
"""Whether `onnxfuse bench` repeats: the same model and its fused form, measured in processes of their own.

    python tests/gpu/check_bench.py [--times 3] [--layers 6] [--rehearse]

GPU time and the median latency of each model, and the ratios, may lie 3% apart between the processes.  ``--rehearse``
measures a small encoder on the CPU, twice, where nothing has to repeat.  Exits with 1 where something is further apart.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import onnx  # noqa: E402
from cli_models import encoder  # noqa: E402

import onnxfuse  # noqa: E402

APART = 0.03
"""How far the largest of a figure may be above the smallest, as a share of it."""


def figures(found: dict[str, Any]) -> dict[str, float]:
    """What has to repeat, of one measurement's JSON; GPU times where these were measured."""
    told: dict[str, float] = {}
    for name in ("original", "fused"):
        told[f"{name}, median latency, ms"] = found[name]["latency"]["median"]
        if found[name]["gpu"] is not None:
            told[f"{name}, GPU time, ms"] = found[name]["gpu"]["median"]
    for name in ("latency_ratio", "gpu_ratio"):
        if found[name] is not None:
            told[name.replace("_", " ")] = found[name]["value"]
    return told


def measured(folder: Path, dims: dict[str, int], times: int) -> list[dict[str, float]]:
    """The figures of as many processes."""
    sizes = [word for name, size in dims.items() for word in ("--dim", f"{name}={size}")]
    command = [sys.executable, "-m", "onnxfuse", "bench", str(folder / "model.onnx"), *sizes, "--json"]
    return [figures(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT).stdout))
            for _ in range(times)]


def main() -> int:
    """Measure, print a line for each figure, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3, help="processes; 3 by default")
    parser.add_argument("--layers", type=int, default=6, help="of the encoder; 6 by default")
    parser.add_argument("--rehearse", action="store_true", help="measure on the CPU, where nothing has to repeat")
    arguments = parser.parse_args()
    gpu, times = not arguments.rehearse, arguments.times if not arguments.rehearse else 2
    dims = {"batch": 16, "sequence": 256} if gpu else {"batch": 1, "sequence": 8}
    with TemporaryDirectory() as place:
        folder = Path(place)
        model = encoder(arguments.layers, hidden=768, dtype="float16") if gpu else encoder(1, hidden=64)
        onnx.save(model, folder / "model.onnx")
        onnxfuse.optimize(model, dims=dims, verify=False, database=False).save(folder / "model.fused.onnx")
        found = measured(folder, dims, times)
    wrong = gpu and "gpu ratio" not in found[0]
    if wrong:
        print("WRONG: GPU time was not measured")
    for name in found[0]:
        values = [each[name] for each in found]
        apart = max(values) / min(values) - 1
        wrong |= gpu and apart > APART
        print(f"{name}: {', '.join(f'{value:.4g}' for value in values)}: {apart:.1%} apart"
              f"{', WRONG' if gpu and apart > APART else ''}")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
