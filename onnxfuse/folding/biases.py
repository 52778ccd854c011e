"""Which convolutions may be planned with their bias as a sum behind them, which a fused region can take in.

ONNX Runtime has cuDNN add a bias to what a convolution wrote, in a kernel of its own (``provider.kernels.biased``).
Only where no library is registered must the model compute what it did: there the runtime folds a constant sum behind a
convolution with constant weights into it again, so that these alone are taken apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnxfuse.graph.model import Graph, Node, root
from onnxfuse.provider.fusions import RuntimeFusion
from onnxfuse.provider.kernels import biased
from onnxfuse.refusal import Refusal

STAGE = "convolution-biases"
"""The id that leaves this stage out."""

CODE = "convolution-bias"
"""The code of refusals."""

KEPT = "the convolution keeps its bias"
"""What they begin with."""


def separable(graph: Graph, groups: Sequence[RuntimeFusion]) -> tuple[dict[str, int], tuple[Refusal, ...]]:
    """Convolutions of the main graph whose bias may stand behind them: numbers of axes of what they compute, by its
    name; and why others keep theirs.

    Args:
        groups: what the runtime fuses itself.
    """
    group = {node: each for each in groups for node in each.nodes}
    found: dict[str, int] = {}
    refusals: list[Refusal] = []
    for each in graph.walk():
        for node in each.nodes:
            if node.domain or node.op != "Conv" or node.broken or len(node.inputs) < 3 or node.inputs[2] is None:
                continue
            why, result = _why_not(node, group), node.outputs[0]
            if why:
                refusals.append(Refusal(CODE, f"{KEPT}: {why}", node.label))
            elif result is not None and result.rank is not None:
                found[result.name] = result.rank
    return found, tuple(refusals)


def _why_not(node: Node, group: Mapping[Node, RuntimeFusion]) -> str:
    """Why a convolution keeps its bias; "" where it need not."""
    if node.body is not None:
        return "it is in a body"
    weights, bias = (None if value is None else root(value) for value in node.inputs[1:3])
    if weights is None or not weights.is_constant:
        return "its weights are computed, and ONNX Runtime folds a sum into constant ones alone"
    if bias is None or not bias.is_constant or bias.producer is not None:
        return "it is no initialiser of the model"
    beside = group[node].nodes if node in group else frozenset([node])
    if biased(beside) is None:
        others = ", ".join(sorted({other.op for other in beside if other is not node}))
        return f"ONNX Runtime makes one call of the convolution and {others}, which adds it for nothing"
    return ""
