"""Run pairs of models in a plain ONNX Runtime and compare them bit for bit; imports nothing of onnxfuse.

    python tests/oldest_runtime.py FOLDER

FOLDER holds NAME.onnx, NAME.fused.onnx and NAME.npz.  Exit code 1 where a pair differs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnxruntime


def run(path: Path, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Outputs on the CPU with the runtime's own optimisations off."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(None, inputs)


def compare(folder: Path) -> dict[str, bool]:
    """Whether the fused model gives the original's bits, by name."""
    same = {}
    for fused in sorted(folder.glob("*.fused.onnx")):
        name = fused.name.removesuffix(".fused.onnx")
        with np.load(folder / f"{name}.npz") as archive:
            inputs = dict(archive)
        wanted, found = run(folder / f"{name}.onnx", inputs), run(fused, inputs)
        same[name] = all(
            a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
            for a, b in zip(wanted, found, strict=True)
        )
    return same


if __name__ == "__main__":
    outcome = compare(Path(sys.argv[1]))
    for name, same in outcome.items():
        print(f"{onnxruntime.__version__} {name}: {'same' if same else 'DIFFERENT'}")
    sys.exit(not outcome or not all(outcome.values()))
