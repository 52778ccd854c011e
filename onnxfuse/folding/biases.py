"""Which convolutions and products may be planned with their bias as a sum behind them, which a fused region can take
in.

ONNX Runtime has a kernel of its own for such a bias (``provider.kernels.biased``).  Only where no library is registered
must the model compute what it did: there the runtime folds a constant sum behind a convolution with constant weights
into it again, and a sum of two behind a Gemm, so that these alone are taken apart.
"""

from __future__ import annotations

from typing import NamedTuple

from onnxfuse.graph.model import Graph, Node, Value
from onnxfuse.provider.removed import source
from onnxfuse.refusal import Refusal

STAGE = "biases"
"""The id that leaves this stage out."""

CODE = "bias"
"""The code of refusals."""

KEPT = "keeps its bias"
"""What they begin with, behind the operator."""


class Bias(NamedTuple):
    """A bias that may stand behind what it belongs to: the initialiser that it is, "" where it can be added as it is
    read, and the number of axes of the sum."""

    stored: str
    rank: int


def separable(graph: Graph, convolutions: bool = True) -> tuple[dict[str, Bias], tuple[Refusal, ...]]:
    """Biases that may stand behind their convolutions and products in the main graph, by what these compute; why others
    do not.

    Args:
        convolutions: whether theirs are looked at.
    """
    found: dict[str, Bias] = {}
    refusals: list[Refusal] = []
    looked_at = _WHY_NOT.keys() if convolutions else {"Gemm"}
    for each in graph.walk():
        for node in each.nodes:
            result = node.outputs[0] if node.outputs else None
            if node.domain or node.op not in looked_at or node.broken or result is None or result.rank is None:
                continue
            if len(node.inputs) < 3 or node.inputs[1] is None or node.inputs[2] is None:
                continue
            weights, bias = source(node.inputs[1]), node.inputs[2]
            why = "it is in a body" if node.body is not None else _WHY_NOT[node.op](node, weights, bias)
            if why:
                refusals.append(Refusal(CODE, f"{node.op} {KEPT}: {why}", node.label))
            else:
                found[result.name] = Bias(source(bias).name if node.op == "Conv" else "", result.rank)
    return found, tuple(refusals)


def _of_convolution(node: Node, weights: Value, bias: Value) -> str:
    """Why a convolution keeps its bias; "" where it need not."""
    if not weights.is_constant:
        return "its weights are computed, and ONNX Runtime folds a sum into constant ones alone"
    if not source(bias).is_constant or source(bias).producer is not None:
        return "it is no initialiser of the model"
    return ""


def _of_product(node: Node, weights: Value, bias: Value) -> str:
    """Why a Gemm keeps its bias; "" where it need not."""
    if node.attributes.get("beta", 1.0) != 1.0:
        return "it is scaled"
    result, shape = node.outputs[0], bias.shape
    if result is None or result.shape is None or shape is None or not shape or shape[-1] != result.shape[-1] or any(
            size != 1 for size in shape[:-1]):
        return "it is no row that is added to all"
    return ""


_WHY_NOT = {"Conv": _of_convolution, "Gemm": _of_product}
