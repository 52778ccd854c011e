"""How another form of a model that is planned (``sizes``, ``biases``, ``layouts``) is written down in it, and read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

import onnx

from onnxfuse.bounded import parse_json
from onnxfuse.errors import ModelError
from onnxfuse.graph.build import OVERRIDABLE
from onnxfuse.lowering import launch
from onnxfuse.rewriting.metadata import unreadable
from onnxfuse.rewriting.properties import note_property, property_of
from onnxfuse.typed import typed

T = TypeVar("T")


def may_change(model: onnx.ModelProto) -> bool:
    """Whether a model has no fused nodes, and its initialisers are constants unless they are inputs."""
    return model.ir_version >= OVERRIDABLE and all(entry.domain != launch.DOMAIN for entry in model.opset_import)


def note_form(model: onnx.ModelProto, key: str, version: int, fields: Mapping[str, Any]) -> None:
    """Keep a record's fields, in place, as the metadata property ``key``."""
    text = json.dumps({"version": version, **fields}, separators=(",", ":"), ensure_ascii=False)
    note_property(model, key, text)


def form_record(model: onnx.ModelProto, kind: type[T], key: str, version: int, done: str) -> T | None:
    """The record that the metadata property ``key`` holds, or None where there is none; ``done``: what it says was
    done, as in "Sizes were folded".

    Raises:
        ModelError: it is no record that this release can read.
    """
    text = property_of(model, key)
    if text is None:
        return None
    place = f"metadata property '{key}'"
    try:
        raw = dict(parse_json(text))
        found = raw.pop("version")
        record = typed(kind, raw) if found == version else None
    except (ValueError, KeyError, TypeError) as error:
        raise unreadable(place, repr(error)) from error
    if record is None:
        raise ModelError(
            f"{done} by another release of onnxfuse (the record has version {found!r}, this one reads {version}).",
            place=place, remedy="Fuse the original model again.",
        )
    return record
