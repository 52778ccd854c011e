"""What each operator means as tensors of the region IR; one file a family.

pointwise.py     elementwise operators of the standard
activations.py   those with a parameter or two
quantization.py  between floats and small integers
views.py         operators that only move elements
rows.py          reductions, softmax, norms
contrib.py       com.microsoft, and the canonical operators
"""

from onnxfuse.lowering.operators import activations, contrib, pointwise, quantization, rows, views
from onnxfuse.lowering.operators.registry import LOWERINGS, Lowering, lowering_of

__all__ = [
    "LOWERINGS", "Lowering", "activations", "contrib", "lowering_of", "pointwise", "quantization", "rows", "views",
]
