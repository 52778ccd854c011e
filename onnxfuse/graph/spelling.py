"""Contents of constants and attributes as texts, to tell alike ones by."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from onnxfuse.graph.model import Node


def attributes_of(node: Node) -> str:
    """A node's attributes; equal where they are."""
    return ";".join(f"{name}={spelled(content)}" for name, content in sorted(node.attributes.items()))


def spelled(content: Any) -> str:
    """An array's type, shape and digest; anything else as it prints."""
    if isinstance(content, np.ndarray):
        return f"{content.dtype}{content.shape}{hashlib.sha256(np.ascontiguousarray(content).tobytes()).hexdigest()}"
    return repr(content)
