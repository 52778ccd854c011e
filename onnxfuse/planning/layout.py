"""What must be left alone where ONNX Runtime lays out images channels-last itself (``prefer_nhwc=1``).

The runtime puts a layout conversion around each convolution and pooling, and moves it through the pointwise nodes
between them until it meets another one and both go away.  A fused node is a wall to it: the conversions stay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from onnxfuse.graph.model import Graph, Node, Value
from onnxfuse.planning.facts import Facts
from onnxfuse.refusal import Refusal

CONVERTED = frozenset({
    "AveragePool", "BatchNormalization", "Conv", "ConvTranspose", "DepthToSpace", "GlobalAveragePool", "GlobalMaxPool",
    "GridSample", "LRN", "MaxPool", "SpaceToDepth",
})
"""Operators that the CUDA provider runs channels-last."""

SETTING = "prefer_nhwc"


def prefers_channels_last(provider_options: Mapping[str, str]) -> bool:
    """Whether options of the CUDA provider ask for channels-last convolutions."""
    return str(provider_options.get(SETTING, "0")).strip().lower() in ("1", "true")


def beside_convolutions(graph: Graph, facts: Mapping[Node, Facts]) -> list[tuple[Refusal, Node]]:
    """Nodes that could be fused but that the runtime moves layout conversions through, and why they are left.

    These are the pointwise nodes that a convolution or pooling feeds or that feed one, and so on from those.
    """
    found: dict[Node, Node] = {}
    waiting = deque((node, node) for node in graph.nodes if node.domain == "" and node.op in CONVERTED)
    while waiting:
        node, source = waiting.popleft()
        values: list[Value] = [value for value in (*node.reads(), *node.outputs) if value is not None]
        for value in values:
            if value.is_constant or (value.rank is not None and value.rank < 3):
                continue
            for other in ([value.producer] if value.producer is not None else []) + value.consumers:
                known = facts.get(other)
                if known is not None and known.rows is None and not known.view and other not in found:
                    found[other] = source
                    waiting.append((other, source))
    return [
        (
            Refusal(
                "channels-last",
                f"{node.qualified_op} lies beside {source.label} ({source.op}): with prefer_nhwc=1 the runtime moves "
                "its layout conversions through it, and a fused node would stop them",
                node.label, remedy="plan without --provider-option prefer_nhwc=1",
            ),
            node,
        )
        for node, source in sorted(found.items(), key=lambda pair: pair[0].index)
    ]
