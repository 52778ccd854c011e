"""A model's metadata properties, by key."""

from __future__ import annotations

import onnx


def property_of(model: onnx.ModelProto, key: str) -> str | None:
    """What a property says; None where there is none."""
    return next((entry.value for entry in model.metadata_props if entry.key == key), None)


def forget_property(model: onnx.ModelProto, key: str) -> None:
    """Take a property out, in place."""
    for place in reversed([place for place, entry in enumerate(model.metadata_props) if entry.key == key]):
        del model.metadata_props[place]


def note_property(model: onnx.ModelProto, key: str, value: str) -> None:
    """Keep a property in place of what was there."""
    forget_property(model, key)
    model.metadata_props.add(key=key, value=value)
