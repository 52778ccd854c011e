"""The first stage: a model file as a graph with types, symbolic sizes and operator classes."""

from __future__ import annotations

from pathlib import Path

import onnx

from onnxfuse.graph.binding import bind
from onnxfuse.graph.build import build_graph
from onnxfuse.graph.classes import OperatorClass, classify, is_deterministic
from onnxfuse.graph.host import is_free, on_host
from onnxfuse.graph.load import LoadedModel, from_proto, load_model
from onnxfuse.graph.model import Assumption, Graph, Node, Value
from onnxfuse.graph.shapes import infer, output_types

__all__ = [
    "Assumption", "Graph", "LoadedModel", "Node", "OperatorClass", "Value", "bind", "build_graph", "classify",
    "from_proto", "infer", "is_deterministic", "is_free", "load_graph", "load_model", "on_host", "output_types",
]


def load_graph(model: str | Path | onnx.ModelProto | LoadedModel) -> Graph:
    """Load, build and infer: the graph of a model file, or of a model in memory.

    Raises:
        ModelError: the file holds no valid ONNX model.
        ExternalDataError: its weights are missing, too short or outside its folder.
    """
    if isinstance(model, onnx.ModelProto):
        model = from_proto(model)
    elif not isinstance(model, LoadedModel):
        model = load_model(model)
    return infer(build_graph(model))
