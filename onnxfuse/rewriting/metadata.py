"""What a fused node keeps of the nodes it replaced, as JSON, and what the model keeps of its own old form.

The node's ``onnxfuse`` attribute holds a ``FusedRecord``; the model's metadata property of the same name holds a
``ModelRecord``, and so does that of a body with fused nodes.  Together they let ``unfuse`` restore the original;
positions are those in the original model.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

import onnx
from google.protobuf.message import DecodeError

from onnxfuse.bounded import parse_json
from onnxfuse.errors import ModelError
from onnxfuse.graph.store import resolved
from onnxfuse.graph.texts import is_text
from onnxfuse.typed import typed

T = TypeVar("T")

VERSION = 1
KEY = "onnxfuse"
"""Name of the node attribute and of the model's metadata property."""
METADATA = "the model's metadata"
IR_VERSION = 8
"""The first version whose models hold functions, and the least that a fused model has."""


@dataclass(frozen=True)
class NodeRecord:
    """What the body does not say of a node: its place, name, notes; ``tensors`` holds, by attribute, names and
    notes of tensors in its attributes; ``devices`` its device configurations, and properties that are no mapping; both
    as base64 protobuf.  An absent name is None, an empty one "".  ``domain``: "ai.onnx" where it was spelled so.
    ``twins``: others had the name too.  ``stands``: another fused node that held it too was put back, and it with
    that."""

    name: str | None = None
    position: int | None = None
    doc_string: str | None = None
    metadata_props: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    devices: str = ""
    domain: str = ""
    twins: bool = False
    stands: bool = False


@dataclass(frozen=True)
class ValueRecord:
    """The original name of a value inside the body, and its ``value_info`` entry as base64 protobuf."""

    name: str
    position: int | None = None
    info: str = ""


@dataclass(frozen=True)
class ConstantRecord:
    """A constant of the model that the body holds.

    ``node`` is set where it was a Constant node; ``tensor`` holds notes of an initialiser as base64 protobuf.
    ``position`` is its place among the initialisers (a node has its own), None where it stayed in the model.
    """

    name: str
    position: int | None = None
    node: NodeRecord | None = None
    tensor: str = ""


@dataclass(frozen=True)
class FusedRecord:
    """What a fused node knows of its origin.

    Attributes:
        rule, schedule, figures: as the ``Region`` had them.
        rounds: whether its kernel rounds operands of products from float32 to TF32.
        nodes: the replaced nodes, in the order of the body.
        values: inner values by their formal name.
        constants: constants of the body by their formal name.
        types: element type (its name in ``TensorProto.DataType``) and sizes, as text, of inputs and outputs by
            formal name; sizes None where unknown.
        added: outputs whose ``value_info`` entry did not exist before.
        again: inner values, by formal name, that other fused nodes compute too.
        collapses: as the ``Region`` had it.
    """

    rule: str
    schedule: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    nodes: tuple[NodeRecord, ...] = ()
    values: Mapping[str, ValueRecord] = field(default_factory=dict)
    constants: Mapping[str, ConstantRecord] = field(default_factory=dict)
    types: Mapping[str, tuple[str, tuple[str, ...] | None]] = field(default_factory=dict)
    added: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    rounds: bool = False
    collapses: bool = False


@dataclass(frozen=True)
class IdleRecord:
    """A constant that left a graph because nothing in it, nor in its bodies, reads it any more.

    Attributes:
        name: of the value.
        position: of the initialiser, or of the Constant node.
        tensor, node: the one that it was, as base64 protobuf; the other "".
        info, place: its ``value_info`` entry, if it had one, and where that stood.
    """

    name: str
    position: int
    tensor: str = ""
    node: str = ""
    info: str = ""
    place: int | None = None


@dataclass(frozen=True)
class ModelRecord:
    """What a fused model knows of its original; of a body, what that knows.

    Attributes:
        ir_version: of the original.
        opset_added: whether the import of the domain is ours; False in a body.
        nodes, initializers, value_infos: their numbers in the original; None where no longer known.
        moved: original positions, by first output, of nodes that had to change places.
        inputs: initialisers that were also inputs of the graph (IR versions below 4): place and base64 protobuf.
        idle: constants that only fused nodes in bodies held a copy of, and that left the graph.
        functions: number of functions of the original.
    """

    ir_version: int
    opset_added: bool = False
    nodes: int | None = None
    initializers: int | None = None
    value_infos: int | None = None
    moved: Mapping[str, int] = field(default_factory=dict)
    inputs: tuple[tuple[int, str], ...] = ()
    idle: tuple[IdleRecord, ...] = ()
    functions: int = 0


def to_json(record: FusedRecord | ModelRecord) -> str:
    """The record as one line of JSON; fields that hold nothing are left out."""
    return json.dumps({"version": VERSION, **_fields(record)}, separators=(",", ":"), ensure_ascii=False)


def fused_record(text: str, place: str) -> FusedRecord:
    """The record in a fused node's attribute.

    Raises:
        ModelError: it is no record that this release can read; ``place`` names the node.
    """
    return _typed(FusedRecord, _parse(text, place), place)


def model_record(notes: Iterable[Any]) -> ModelRecord | None:
    """The record of a fused graph among its notes (``index.notes_of``), or None where it has none.

    Raises:
        ModelError: it is no record that this release can read.
    """
    for entry in notes:
        if entry.key == KEY:
            return _typed(ModelRecord, _parse(entry.value, METADATA), METADATA)
    return None


def _typed(kind: type[T], raw: dict[str, Any], place: str) -> T:
    try:
        return typed(kind, raw)
    except ValueError as error:
        raise unreadable(place, str(error)) from error


def packed(proto: Any) -> str:
    """A protobuf message as text; "" for an empty one.  Of a tensor in a store, with its contents."""
    if isinstance(proto, onnx.TensorProto):
        proto = resolved(proto)
    return b64encode(proto.SerializeToString(deterministic=True)).decode()


def unpacked(text: str, proto: Any) -> Any:
    """Merge what ``packed`` wrote into a message and return it.

    Raises:
        ModelError: the text is nothing that ``packed`` wrote.
    """
    try:
        proto.MergeFromString(b64decode(text, validate=True))
    except (ValueError, DecodeError) as error:
        raise unreadable("a part of the model that it holds", str(error)) from error
    if not is_text(proto):
        raise unreadable("a part of the model that it holds", "a name in it is no UTF-8 text")
    return proto


def _fields(record: Any) -> dict[str, Any]:
    """The record's fields by name, those at their default left out."""
    result = {}
    for entry in fields(record):
        part = getattr(record, entry.name)
        default = entry.default if entry.default_factory is MISSING else entry.default_factory()
        if part != default:
            result[entry.name] = _plain(part)
    return result


def _plain(part: Any) -> Any:
    if is_dataclass(part):
        return _fields(part)
    if isinstance(part, Mapping):
        return {name: _plain(item) for name, item in part.items()}
    return [_plain(item) for item in part] if isinstance(part, (list, tuple)) else part


def _parse(text: str, place: str) -> dict[str, Any]:
    try:
        raw = dict(parse_json(text))
        version = raw.pop("version")
    except (ValueError, KeyError, TypeError) as error:
        raise unreadable(place, repr(error)) from error
    if version != VERSION:
        raise ModelError(
            f"The model was fused by another release of onnxfuse (its records have version {version!r}, this one reads "
            f"{VERSION}).",
            place=place,
            remedy="Use the release that fused the model, or fuse the original again.",
        )
    return raw


def unreadable(place: str, detail: str) -> ModelError:
    """The error for a record that is damaged; ``detail`` says how."""
    return ModelError(
        f"The record that onnxfuse left in the model cannot be read: {detail}.",
        place=place,
        remedy="Fuse the original model again.",
    )
