"""Whether a model is as an optimisation left it: then there is nothing more to decide, whatever the settings.

A property of the model holds a digest of its nodes, functions, inputs and outputs; weights may move between files.  An
edit, or ``unfuse``, makes the model one like any other.
"""

from __future__ import annotations

from hashlib import sha256

import onnx

from onnxfuse.rewriting.properties import forget_property, note_property, property_of

KEY = "onnxfuse.optimised"
"""Name of the model's metadata property."""


def note_optimised(model: onnx.ModelProto) -> None:
    """Note, in place, that an optimisation left the model so."""
    note_property(model, KEY, _digest(model))


def forget_optimised(model: onnx.ModelProto) -> None:
    """Forget that, in place."""
    forget_property(model, KEY)


def is_optimised(model: onnx.ModelProto) -> bool:
    """Whether nothing changed since an optimisation left the model."""
    noted = property_of(model, KEY)
    return noted is not None and noted == _digest(model)


def _digest(model: onnx.ModelProto) -> str:
    digest = sha256()
    for part in (*model.graph.input, *model.graph.output, *model.graph.node, *model.functions):
        text = part.SerializeToString(deterministic=True)
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text)
    return digest.hexdigest()[:32]
