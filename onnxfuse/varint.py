"""Integers and fields in the bytes of an ONNX model, as protobuf writes them: of integers seven bits a byte, the lowest
first, the top bit set in all but the last."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

Buffer = bytes | mmap.mmap

MOST_BITS = 70
"""Ten bytes of seven bits, the most that a number of 64 takes."""

_LENGTH_DELIMITED = 2


def read_varint(data: Buffer, at: int, end: int) -> tuple[int, int]:
    """A number that begins at a byte, and where it ends.

    Raises:
        ValueError: the data end within it, or it is no number of 64 bits.
    """
    value = shift = 0
    while at < end and shift < MOST_BITS:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise ValueError("not an ONNX model, or one cut short")


def varint(number: int) -> bytes:
    """A number that is not negative."""
    parts = bytearray()
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def tag(field: int, length: int) -> bytes:
    """What a length-delimited field of so many bytes begins with."""
    return varint(field << 3 | _LENGTH_DELIMITED) + varint(length)


def delimited(data: Buffer, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Each length-delimited field of a protobuf message: its number, where it begins, and where its contents begin and
    end.

    Raises:
        ValueError: these are no such fields, or the data end within one.
    """
    while at < end:
        begin = at
        number, at = read_varint(data, at, end)
        kind = number & 7
        if kind == 0:
            _, at = read_varint(data, at, end)
        elif kind == _LENGTH_DELIMITED:
            size, start = read_varint(data, at, end)
            at = start + size
            if at <= end:
                yield number >> 3, begin, start, at
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise ValueError(f"not an ONNX model: wire type {kind}")
        if at > end:
            raise ValueError("not an ONNX model, or one cut short")
