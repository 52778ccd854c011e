"""Say what a file is that could not be read as an ONNX model."""

from __future__ import annotations

import onnx
from google.protobuf.message import DecodeError

from onnxfuse.varint import read_varint

__all__ = ["DecodeError", "diagnose"]

_SIGNATURES = (
    (b"version https://git-lfs", "The file is a Git LFS pointer, not the model itself.", "Fetch it: git lfs pull."),
    (b"PK\x03\x04", "The file is an archive (zip or PyTorch), not an ONNX model.",
     "Unpack it, or export the model with torch.onnx.export."),
    (b"\x1f\x8b", "The file is compressed (gzip), not an ONNX model.", "Unpack it: gunzip."),
    (b"\xfd7zXZ", "The file is compressed (xz), not an ONNX model.", "Unpack it: unxz."),
    (b"\x89HDF", "The file is an HDF5 (Keras) model, not an ONNX model.", "Convert it with tf2onnx."),
)
_EXPORT = "Give a file that onnx.save or an exporter wrote."

# Number and wire type of ModelProto's fields: 0 a varint, 2 bytes with their length before them.
_MODEL_FIELDS = {1: 0, 2: 2, 3: 2, 4: 2, 5: 0, 6: 2, 7: 2, 8: 2, 14: 2, 20: 2, 25: 2, 26: 2}
_FIELD_NAMES = {field.number: field.name for field in onnx.ModelProto.DESCRIPTOR.fields}


def diagnose(data: bytes) -> tuple[str, str]:
    """What is wrong with a file's contents that are no ONNX model, and a remedy."""
    if not data:
        return "The file is empty.", _EXPORT
    for signature, message, remedy in _SIGNATURES:
        if data.startswith(signature):
            return message, remedy
    if data[4:8] == b"ORTM":
        return "The file is in ONNX Runtime's ORT format.", "Give the .onnx file that it was made from."
    if b"ir_version" in data[:4096] and b"\0" not in data[:4096]:
        return (
            "The file holds a model as text, not in ONNX's binary form.",
            "Convert it: onnx.save(onnx.parser.parse_model(open(path).read()), 'model.onnx').",
        )
    cut = _cut_short(data)
    if cut is not None:
        return cut, "Copy or download the file again, in full."
    if _is_graph(data):
        return (
            "The file holds a graph (GraphProto) without the model around it.",
            "Wrap it: onnx.save(onnx.helper.make_model(graph), 'model.onnx').",
        )
    return "The file is no ONNX model.", _EXPORT


def _is_graph(data: bytes) -> bool:
    graph = onnx.GraphProto()
    try:
        graph.ParseFromString(data)
    except DecodeError:
        return False
    return len(graph.node) > 0 and all(node.op_type for node in graph.node)


def _cut_short(data: bytes) -> str | None:
    """A message if the bytes begin as a model does and end too early, else None."""
    at, seen = 0, set()
    while at < len(data):
        try:
            tag, start = read_varint(data, at, len(data))
            number, kind = tag >> 3, tag & 7
            if _MODEL_FIELDS.get(number) != kind:
                return None
            value, at = read_varint(data, start, len(data))
        except ValueError:
            break
        if kind == 2:
            at += value
            if at > len(data):
                # The first field of a model is its IR version; without it, this is chance.
                if 1 not in seen:
                    return None
                name = _FIELD_NAMES[number]
                return f"The file is cut short: its {name} ends at byte {at}, and the file at {len(data)}."
        seen.add(number)
    if 1 in seen and 7 not in seen:
        return "The file is cut short: it ends before the graph."
    return None
