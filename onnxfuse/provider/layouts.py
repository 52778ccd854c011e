"""What ONNX Runtime's CUDA provider lays out channels-last by itself, with its option ``prefer_nhwc=1``."""

from __future__ import annotations

from onnxfuse.graph.model import Node

_CONVERTED = frozenset({
    "AveragePool", "BatchNormalization", "Conv", "ConvTranspose", "DepthToSpace", "GlobalAveragePool", "GlobalMaxPool",
    "GridSample", "LRN", "MaxPool", "SpaceToDepth",
})
"""Operators that it has kernels for that read and write images so."""


def is_converted(node: Node) -> bool:
    """Whether the provider runs a node channels-last, with a layout conversion around it where that is asked for."""
    return not node.domain and node.op in _CONVERTED
