"""The second stage: arithmetic on sizes that constants can stand for, or that is done more than once, and what hangs on
it: Ifs that sizes decide; and biases that may stand behind their convolutions.

    graph ─ decide ─▶ Folding: constants for operands, values shared by equal chains, nodes that nothing reads any more
          ─ kept_for_their_type ─▶ nodes of constants that compute in float32, and so once
          ─ separable ─▶ convolutions that may give up their bias
          ─ shared ─▶ values that are dequantised for each of their readers
          ─ paired ─▶ values that may lie channels-last
"""

from onnxfuse.folding.biases import CODE as BIAS_CODE
from onnxfuse.folding.biases import KEPT as BIAS_KEPT
from onnxfuse.folding.biases import STAGE as BIASES
from onnxfuse.folding.biases import Bias, separable
from onnxfuse.folding.branches import Taken, decided
from onnxfuse.folding.constants import STAGE as CONSTANTS
from onnxfuse.folding.constants import kept_for_their_type
from onnxfuse.folding.decide import STAGE, Folding, decide
from onnxfuse.folding.dequantised import STAGE as DEQUANTISED
from onnxfuse.folding.dequantised import Shared, shared
from onnxfuse.folding.layouts import STAGE as LAYOUTS
from onnxfuse.folding.layouts import Paired, is_turnable, paired
from onnxfuse.folding.operands import Constant, constant_operand

__all__ = [
    "BIASES", "BIAS_CODE", "BIAS_KEPT", "CONSTANTS", "DEQUANTISED", "LAYOUTS", "STAGE", "Bias", "Constant", "Folding",
    "Paired", "Shared", "Taken", "constant_operand", "decide", "decided", "is_turnable", "kept_for_their_type",
    "paired", "separable", "shared",
]
