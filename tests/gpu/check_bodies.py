#!/usr/bin/env python3
"""Fused nodes in bodies of If, Loop and Scan on a GPU: each right by itself, all run there, the whole model right.

    python tests/gpu/check_bodies.py [--rows 4096] [--rehearse]

Each model is fused and its nodes are verified on inputs captured in their bodies.  Then it runs with kernels and its
outputs are compared with the original's on the CPU: float32, 1e-5 of the largest magnitude.  ONNX Runtime's profile of
that run must show every fused node on CUDA, as often as its body ran.  ``--rehearse`` runs all but the kernels.  Exits
with 1 where something is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]

import body_models  # noqa: E402
import numpy as np  # noqa: E402
import onnx  # noqa: E402
import onnxruntime  # noqa: E402

import onnxfuse  # noqa: E402
from onnxfuse.rewriting import read_fused  # noqa: E402

TOLERANCE = 1e-5
CUDA = "CUDAExecutionProvider"


def runs_of(name: str, given: dict[str, Any]) -> dict[str, int]:
    """How often each body runs, by the last part of its label."""
    flag = int(given.get("flag", np.array(0)))
    if name == "scan":
        return {"body": len(given["xs"])}
    if name in ("if", "nested"):
        return {"then_branch": flag, "else_branch": 1 - flag, "body": 4 * flag}
    return {"body": int(given.get("m", np.array(3)))}


def check(name: str, rows: int, kernels: bool, folder: Path) -> list[str]:
    """What is wrong with a model."""
    original = body_models.MODELS[name]()
    result = onnxfuse.optimize(original, dims={"n": rows}, database=False)
    nodes = read_fused(result.model)
    wrong = [] if nodes else ["nothing was fused"]
    found = result.report.verification
    if found["taken_back"] or (kernels and found["status"] != "verified"):
        wrong.append(f"verification: {found['summary']}")
    plain = onnxruntime.InferenceSession(original.SerializeToString(), providers=["CPUExecutionProvider"])
    options = onnxruntime.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / name)
    session = onnxfuse.session(result.model.SerializeToString(), [CUDA, "CPUExecutionProvider"] if kernels else
                               ["CPUExecutionProvider"], options)
    wanted: Counter[str] = Counter()
    for given in body_models.feeds(original, rows):
        for info, one, other in zip(original.graph.output, plain.run(None, given), session.run(None, given),
                                    strict=True):
            error = np.abs(one - other).max(initial=0.0) / max(np.abs(one).max(initial=0.0), 1e-30)
            if one.shape != other.shape or error > TOLERANCE:
                wrong.append(f"output {info.name} is off by {error:.1e}: {one.shape}, {other.shape}")
        runs = runs_of(name, given)
        wanted.update({node.name: runs[node.body.label.split("/")[-1]] for node in nodes if node.body is not None})
    if kernels:
        events = json.loads(Path(session.end_profiling()).read_text())
        seen = Counter(event["name"].removesuffix("_kernel_time") for event in events
                       if event.get("args", {}).get("provider") == CUDA and event["name"].endswith("_kernel_time"))
        wrong += [f"{node} ran {seen[node]} times on CUDA, not {count}" for node, count in wanted.items()
                  if seen[node] != count]
    return wrong


def main() -> int:
    """Check every model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=4096, help="rows of the inputs")
    parser.add_argument("--rehearse", action="store_true", help="run no kernels; no GPU is needed")
    arguments = parser.parse_args()
    if not arguments.rehearse:
        from building import build

        build()
    failed = False
    with TemporaryDirectory(prefix="onnxfuse-bodies-") as folder:
        for name in body_models.MODELS:
            wrong = check(name, arguments.rows, not arguments.rehearse, Path(folder))
            failed |= bool(wrong)
            print(f"{name}: {'; '.join(wrong) or 'right'}", flush=True)
    print(f"onnx {onnx.__version__}, onnxruntime {onnxruntime.__version__}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
