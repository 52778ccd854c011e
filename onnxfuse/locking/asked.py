"""What a session of the installed ONNX Runtime makes of a model: whether it fuses by itself what the rules say.

A session on the CPU is made and never run.  It fuses as one on CUDA does, but for what the CPU has no kernel for.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnxruntime

from onnxfuse.graph.constants import tensor_bytes, tensors
from onnxfuse.graph.load import LoadedModel
from onnxfuse.graph.order import graphs_of
from onnxfuse.graph.store import whole
from onnxfuse.verifying.sharing import FOLDER

MOST_BYTES = 1 << 30
"""Bytes of weights up to which a session is made: what it makes of the model holds them once more."""

_FATAL_ONLY = 4

Seen = Callable[[Collection[str]], bool]
"""Whether values are all given by one node of a session, or by none."""


def ask(model: LoadedModel) -> Seen | None:
    """What a session makes of a model; None where none can be made here."""
    if sum(map(tensor_bytes, tensors(model.proto.graph))) > MOST_BYTES:
        return None
    model = replace(model, proto=whole(model.proto))
    try:
        made = _made(model)
    except Exception:  # ONNX Runtime has an exception type per status; what it does not take, it does not show
        return None
    return lambda values: len({made[value] for value in values if value in made}) <= 1


def session(model: bytes, options: onnxruntime.SessionOptions) -> Any:
    """A session on the CPU."""
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _made(model: LoadedModel) -> Mapping[str, int]:
    """Which node of what a session makes of a model gives a value, by the value's name."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.log_severity_level = _FATAL_ONLY
    options.add_session_config_entry("session.disable_prepacking", "1")
    if model.folder is not None:
        options.add_session_config_entry(FOLDER, str(model.folder))
    with tempfile.TemporaryDirectory(prefix="onnxfuse-") as folder:
        path = Path(folder, "model.onnx")
        options.optimized_model_filepath = str(path)
        session(model.proto.SerializeToString(), options)
        graphs = [graph for _, graph in graphs_of(onnx.load(path, load_external_data=False))]
    nodes = [node for graph in graphs for node in graph.node]
    return {name: place for place, node in enumerate(nodes) for name in node.output if name}
