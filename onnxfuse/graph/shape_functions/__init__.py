"""How each operator's result types and sizes follow from its inputs: one table, ``FUNCTIONS``."""

from onnxfuse.graph.model import Assumption
from onnxfuse.graph.shape_functions import contrib, indexing, pointwise, products, reductions, signal, views
from onnxfuse.graph.shape_functions.context import FUNCTIONS, Context, ShapeFunction, Type

__all__ = [
    "FUNCTIONS", "Assumption", "Context", "ShapeFunction", "Type",
    "contrib", "indexing", "pointwise", "products", "reductions", "signal", "views",
]
