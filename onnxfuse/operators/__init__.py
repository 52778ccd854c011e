"""What is known of each operator: its record (``record``), one file a family, and what follows from records.

elementwise.py    one scalar function an element       activations.py   those made of several
quantization.py   between floats and small integers    reductions.py    sums, maxima, means
norms.py          softmax and norms                    views.py         another shape or order
pieces.py         cut, joined, padded, repeated        indexing.py      picked by index or value
resizing.py       enlarged and shrunk                  sampling.py      at places that are computed
making.py         from sizes, numbers or chance        products.py      matrix products, attention
recurrent.py      LSTM, GRU and plain layers
convolutions.py   and pooling                          opaque.py        what nothing is fused with
multiplying.py    what products mean as tensors        convolving.py    what convolutions mean
attending.py      what attention means as tensors      grouped.py       over keys of the past
microsoft.py      ONNX Runtime's own domain, and the canonical view's

inference.py   types, sizes and contents of every value     classes.py   how freely a node fuses
contents.py    integer arithmetic on sizes                  fused.py     outputs of fused nodes
numbers.py     floats that sizes are computed by            operands.py  what lowerings ask of their node
arithmetic.py  floating-point operations
"""

from onnxfuse.operators import (
    activations,
    convolutions,
    elementwise,
    grouped,
    indexing,
    making,
    microsoft,
    norms,
    opaque,
    pieces,
    products,
    quantization,
    recurrent,
    reductions,
    resizing,
    sampling,
    views,
)
from onnxfuse.operators.classes import classify, is_deterministic
from onnxfuse.operators.inference import infer, load_graph, output_types
from onnxfuse.operators.record import (
    OPERATORS,
    OperatorClass,
    flops_of,
    is_contraction,
    lowered,
    lowering_of,
    operator_of,
)

__all__ = [
    "OPERATORS", "OperatorClass", "activations", "classify", "convolutions", "elementwise", "flops_of", "grouped",
    "indexing", "infer", "is_contraction", "is_deterministic", "load_graph", "lowered", "lowering_of", "making",
    "microsoft", "norms", "opaque", "operator_of", "output_types", "pieces", "products", "quantization",
    "recurrent", "reductions", "resizing", "sampling", "views",
]
