"""Which convolutions may be planned with their bias as a sum behind them, which a fused region can take in.

ONNX Runtime has cuDNN add a bias to what a convolution wrote, in a kernel of its own (``provider.kernels.biased``).
Only where no library is registered must the model compute what it did: there the runtime folds a constant sum behind a
convolution with constant weights into it again, so that these alone are taken apart.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from onnxfuse.graph.model import Graph, Node
from onnxfuse.provider.fusions import RuntimeFusion
from onnxfuse.provider.kernels import biased
from onnxfuse.provider.removed import source
from onnxfuse.refusal import Refusal

STAGE = "convolution-biases"
"""The id that leaves this stage out."""

CODE = "convolution-bias"
"""The code of refusals."""

KEPT = "the convolution keeps its bias"
"""What they begin with."""


class Bias(NamedTuple):
    """A convolution's bias: the initialiser that it is, and the number of axes of what the convolution computes."""

    stored: str
    rank: int


def separable(graph: Graph, groups: Sequence[RuntimeFusion]) -> tuple[dict[str, Bias], tuple[Refusal, ...]]:
    """Biases that may stand behind their convolutions in the main graph, by what these compute; why others do not.

    Args:
        groups: what the runtime fuses itself.
    """
    group = {node: each.nodes for each in groups for node in each.nodes}
    found: dict[str, Bias] = {}
    refusals: list[Refusal] = []
    for each in graph.walk():
        for node in each.nodes:
            result = node.outputs[0] if node.outputs else None
            if node.domain or node.op != "Conv" or node.broken or result is None or result.rank is None:
                continue
            if len(node.inputs) < 3 or node.inputs[2] is None:
                continue
            bias = source(node.inputs[2])
            why = _why_not(node, group.get(node, frozenset([node])))
            if why:
                refusals.append(Refusal(CODE, f"{KEPT}: {why}", node.label))
            else:
                found[result.name] = Bias(bias.name, result.rank)
    return found, tuple(refusals)


def _why_not(node: Node, beside: Collection[Node]) -> str:
    """Why a convolution keeps its bias, which the runtime runs with nodes ``beside`` it; "" where it need not."""
    if node.body is not None:
        return "it is in a body"
    weights, bias = (None if value is None else source(value) for value in node.inputs[1:3])
    if weights is None or not weights.is_constant:
        return "its weights are computed, and ONNX Runtime folds a sum into constant ones alone"
    if bias is None or not bias.is_constant or bias.producer is not None:
        return "it is no initialiser of the model"
    if biased(beside) is None:
        others = ", ".join(sorted({other.op for other in beside if other is not node}))
        return f"ONNX Runtime makes one call of the convolution and {others}, which adds it for nothing"
    return ""
