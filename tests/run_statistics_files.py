"""Statistics files as the native library writes them, made up for a fused model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onnxfuse.rewriting import FusedNode
from onnxfuse.runtime.cache import digest

Shape = Sequence[int]


def run_of(inputs: Sequence[Shape | None], outputs: Sequence[Shape], calls: int, microseconds: int,
           **more: Any) -> dict[str, Any]:
    """Calls that all took the same."""
    return {
        "variant": "wide", "inputs": inputs, "outputs": outputs, "calls": calls, "timed": calls, "captured": 0,
        "total_ns": calls * microseconds * 1000, "least_ns": microseconds * 1000, "median_ns": microseconds * 1000,
        **more,
    }


def node_of(node: FusedNode, *runs: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A fused node with its calls."""
    return {
        "node": node.name, "op": node.op, "region": node.rule, "kernel": digest(node.source, node.plan.options),
        "plan": "0" * 64, "gpu": 0, "unrecorded": 0, "runs": list(runs), **more,
    }


def document(*nodes: dict[str, Any], gpu: str = "NVIDIA H200", **more: Any) -> dict[str, Any]:
    """What a process recorded."""
    return {
        "format": "onnxfuse statistics 1", "onnxfuse": "0.1.0", "onnxruntime": "1.31.1", "driver": 13000,
        "driver_release": "580.65.06", "compiler": "nvrtc-13.0.88", "process": 7, "started": 1_790_000_000,
        "written": 1_790_000_060,
        "gpus": [{"ordinal": 0, "name": gpu, "capability": 90, "multiprocessors": 132}],
        "notes": [], "nodes": list(nodes), **more,
    }


def write_document(path: Path, content: Any) -> Path:
    """The file."""
    path.write_text(json.dumps(content), encoding="utf-8")
    return path
