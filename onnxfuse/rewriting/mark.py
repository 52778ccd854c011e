"""Whether a model is as an optimisation left it: then there is nothing more to decide, whatever the settings.

A property of the model holds a digest of its nodes, functions, inputs and outputs; weights may move between files.  An
edit, or ``unfuse``, makes the model one like any other.
"""

from __future__ import annotations

from hashlib import sha256

import onnx

KEY = "onnxfuse.optimised"
"""Name of the model's metadata property."""


def note_optimised(model: onnx.ModelProto) -> None:
    """Note, in place, that an optimisation left the model so."""
    forget_optimised(model)
    model.metadata_props.add(key=KEY, value=_digest(model))


def forget_optimised(model: onnx.ModelProto) -> None:
    """Forget that, in place."""
    kept = [entry for entry in model.metadata_props if entry.key != KEY]
    if len(kept) < len(model.metadata_props):
        del model.metadata_props[:]
        model.metadata_props.extend(kept)


def is_optimised(model: onnx.ModelProto) -> bool:
    """Whether nothing changed since an optimisation left the model."""
    noted = next((entry.value for entry in model.metadata_props if entry.key == KEY), None)
    return noted is not None and noted == _digest(model)


def _digest(model: onnx.ModelProto) -> str:
    digest = sha256()
    for part in (*model.graph.input, *model.graph.output, *model.graph.node, *model.functions):
        text = part.SerializeToString(deterministic=True)
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text)
    return digest.hexdigest()[:32]
