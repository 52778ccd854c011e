"""Damage to files: bytes, protobuf messages field by field, JSON value by value; the same for the same generator.

What is done knows the structure and not the meaning: every field of a message is set, emptied, doubled, exchanged for
another or given an odd value of its type, so that what comes out is still parsed and reaches what lies behind.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

NUMBERS = (0, 1, -1, 2, 3, 5, 7, -7, 15, 16, 99, 255, 4096, 2**31 - 1, -(2**31), 2**31, 2**32, 2**62, -(2**62),
           2**63 - 1, -(2**63))
SMALL = NUMBERS[:12]
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e-30, 1e30, 3.4e38, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", " ", "x", "n", "0", "-1", "a\0b", "a/b", "../a", "/", ".", "a b", "%s%n", "{0}", "é", "\u2028", "'\"`$",
         "x" * 5000, "NOTSET", "SAME_UPPER", "tanh", "onnxfuse", "com.microsoft", "ai.onnx", "ai.onnx.ml", "nan",
         "1e999", "n*m", "n**99", "(" * 200, "2*n+1", "99999999999999999999")
NOT_UTF8 = (b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\x80abc")

_LIMITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1), FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1), FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_DEEPEST = 12


def damage_bytes(data: bytes, rng: Random) -> bytes:
    """Bytes changed, cut out, doubled, put in, or the rest cut off."""
    result = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(result) + 1)
        span = rng.choice((1, 2, 4, 8, 64))
        match rng.randrange(6):
            case 0 | 1 if at < len(result):
                result[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, result[at] ^ (1 << rng.randrange(8))))
            case 2:
                del result[at:at + span]
            case 3:
                result[at:at] = result[at:at + span]
            case 4:
                result[at:at] = bytes(rng.randrange(256) for _ in range(span))
            case _ if rng.random() < 0.3:
                del result[at:]
    return bytes(result)


def damage_message(message: Message, rng: Random, words: Sequence[str] = ()) -> None:
    """One field somewhere in a message.

    Args:
        words: texts that stand elsewhere in it: a name put in another's place hurts more than noise.
    """
    for _ in range(_DEEPEST):
        fields = [field for field, _ in message.ListFields()]
        unset = [field for field in message.DESCRIPTOR.fields if field not in fields]
        if unset and (not fields or rng.random() < 0.12):
            _set(message, rng.choice(unset), rng, words)
            return
        if not fields:
            return
        field = rng.choice(fields)
        if field.is_repeated if hasattr(field, "is_repeated") else field.label == FieldDescriptor.LABEL_REPEATED:
            items = getattr(message, field.name)
            if field.cpp_type != FieldDescriptor.CPPTYPE_MESSAGE or rng.random() < 0.15:
                _damage_list(items, field, rng, words)
                return
            message = rng.choice(items)
        elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            if rng.random() < 0.08:
                message.ClearField(field.name)
                return
            message = getattr(message, field.name)
        else:
            _set(message, field, rng, words)
            return


def _set(message: Message, field: Any, rng: Random, words: Sequence[str]) -> None:
    """Give a field that is no list, or an empty one, an odd value; or none."""
    many = field.is_repeated if hasattr(field, "is_repeated") else field.label == FieldDescriptor.LABEL_REPEATED
    if many:
        _damage_list(getattr(message, field.name), field, rng, words)
    elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        getattr(message, field.name).SetInParent()
    elif message.HasField(field.name) and rng.random() < 0.2:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, value_of(field, rng, words))


def _damage_list(items: Any, field: Any, rng: Random, words: Sequence[str]) -> None:
    what = rng.randrange(6) if len(items) else 5
    at = rng.randrange(len(items)) if len(items) else 0
    if what == 0:
        del items[at]
    elif what == 1:
        del items[at:]
    elif what == 2:  # what stands there once more
        if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            items.add().CopyFrom(items[at])
        else:
            items.append(items[at])
    elif what == 3 and len(items) > 1:
        other = rng.randrange(len(items))
        if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            kept = type(items[at])()
            kept.CopyFrom(items[at])
            items[at].CopyFrom(items[other])
            items[other].CopyFrom(kept)
        else:
            items[at], items[other] = items[other], items[at]
    elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        items.add()
    elif len(items) and what < 5:
        items[at] = value_of(field, rng, words)
    else:
        items.append(value_of(field, rng, words))


def value_of(field: Any, rng: Random, words: Sequence[str] = ()) -> Any:
    """An odd value of a field's type."""
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        if field.type == FieldDescriptor.TYPE_BYTES:
            return rng.choice((*(text.encode() for text in TEXTS), *NOT_UTF8, b"\0" * rng.choice((1, 3, 4, 8, 4096))))
        return rng.choice(words) if words and rng.random() < 0.6 else rng.choice(TEXTS)
    if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return rng.choice(FLOATS)
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return rng.choice(field.enum_type.values).number
    low, high = _LIMITS.get(field.cpp_type, (0, 1))
    number = rng.choice(NUMBERS) if rng.random() < 0.5 else rng.choice(SMALL)
    return min(max(number, low), high)


def damage_json(text: str, rng: Random) -> str:
    """One value somewhere in a JSON text: gone, of another type, odd, doubled; or a letter of the text."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if found is None or rng.random() < 0.1:
        return damage_bytes(text.encode(), rng).decode(errors="replace")
    box = [found]
    where: Any = box
    key: Any = 0
    for _ in range(_DEEPEST):
        inner = where[key]
        if not isinstance(inner, (dict, list)) or not inner or rng.random() < 0.12:
            break
        where, key = inner, rng.choice(sorted(inner)) if isinstance(inner, dict) else rng.randrange(len(inner))
    match rng.randrange(5):
        case 0 if where is not box:
            del where[key]
        case 1 if isinstance(where, dict):
            where[rng.choice(TEXTS)] = where.pop(key)
        case 2 if isinstance(where, list):
            where.append(where[key])
        case 3 if isinstance(where[key], str):
            where[key] = damage_bytes(where[key].encode(), rng).decode(errors="replace")
        case _:
            where[key] = rng.choice((None, True, False, [], {}, [[]], {"x": 1}, rng.choice(NUMBERS), rng.choice(FLOATS),
                                     rng.choice(TEXTS)))
    return json.dumps(box[0])
