"""Copies of a model without what is largest in it."""

from __future__ import annotations

from typing import Any

import onnx
from google.protobuf.unknown_fields import UnknownFieldSet


def has_unknown(model: onnx.ModelProto) -> bool:
    """Whether a model has fields that this release of onnx does not know, which nothing but a whole copy keeps."""
    return bool(len(UnknownFieldSet(model)) or len(UnknownFieldSet(model.graph)))


def without_initializers(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a model without the initialisers of its main graph, made without copying them."""
    result = onnx.ModelProto()
    copy_fields(model, result, "graph")
    copy_fields(model.graph, result.graph, "initializer")
    return result


def copy_fields(source: Any, target: Any, skip: str) -> None:
    """Copy every field of a message that is set, but for one, which is not touched."""
    for descriptor, value in source.ListFields():
        if descriptor.name == skip:
            continue
        if hasattr(value, "extend"):
            getattr(target, descriptor.name).extend(value)
        elif descriptor.message_type is not None:
            getattr(target, descriptor.name).CopyFrom(value)
        else:
            setattr(target, descriptor.name, value)
