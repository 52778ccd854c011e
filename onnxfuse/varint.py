"""Integers in the bytes of an ONNX model, as protobuf writes them: seven bits a byte, the lowest first, the
top bit set in all but the last."""

from __future__ import annotations

import mmap

MOST_BITS = 70
"""Ten bytes of seven bits, the most that a number of 64 takes."""


def read_varint(data: bytes | mmap.mmap, at: int, end: int) -> tuple[int, int]:
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
