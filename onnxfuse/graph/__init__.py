"""The first stage: a model file as a graph."""

from onnxfuse.graph.binding import bind
from onnxfuse.graph.build import build_graph
from onnxfuse.graph.load import LoadedModel, from_proto, load_model
from onnxfuse.graph.model import Assumption, Graph, Node, Value

__all__ = [
    "Assumption", "Graph", "LoadedModel", "Node", "Value", "bind", "build_graph", "from_proto", "load_model",
]
