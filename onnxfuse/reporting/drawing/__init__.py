"""A fused model as a picture: each fused node with the nodes that its function holds, and what ONNX Runtime keeps.

    model ─ boxes ─▶ boxes and edges ─ joined, folded ─▶ few enough ─ layout ─▶ places ─ svg ─▶ text
"""

from onnxfuse.reporting.drawing.svg import picture

__all__ = ["picture"]
