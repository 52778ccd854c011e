"""Records out of JSON that anybody may have changed: every field of the type that its dataclass gives it."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from math import isfinite
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

LARGEST = 1 << 31
"""Numbers in records are positions and counts of a protobuf file's parts: it has fewer than this."""


def typed(kind: type[T], value: Any) -> T:
    """A record of a dataclass, from its fields as JSON has them; those that are left out get their defaults, and what
    the dataclass does not have is refused.

    Raises:
        ValueError: a field is missing, unknown or of another type; the text says which and what it holds.
    """
    made: T = _read(kind, value, kind.__name__)
    return made


def _read(kind: Any, value: Any, place: str) -> Any:
    if kind is Any:
        return value
    if is_dataclass(kind):
        return _record(kind, value, place)
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in parts:
            return None
        (other,) = (part for part in parts if part is not type(None))
        return _read(other, value, place)
    if origin is tuple and isinstance(value, list):
        if len(parts) == 2 and parts[1] is Ellipsis:
            return tuple(_read(parts[0], entry, f"{place}[{number}]") for number, entry in enumerate(value))
        if len(parts) == len(value):
            return tuple(_read(part, entry, f"{place}[{number}]")
                         for number, (part, entry) in enumerate(zip(parts, value, strict=True)))
    if origin is Mapping and isinstance(value, dict):
        return {name: _read(parts[1], entry, f"{place}[{name!r}]") for name, entry in value.items()}
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LARGEST:
        return value
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value):
        return value
    if kind is str and isinstance(value, str) and _is_text(value):
        return value
    raise ValueError(f"{place} is {repr(value)[:60]}")


def _is_text(value: str) -> bool:
    """Whether a text can be written: JSON may hold halves of a character."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _record(kind: Any, value: Any, place: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{place} is {repr(value)[:60]}")
    hints = _hints(kind)
    unknown = sorted(set(value) - set(hints))
    if unknown:
        raise ValueError(f"{place} has no field {unknown[0]!r}")
    missing = [each.name for each in fields(kind)
               if each.name not in value and each.default is MISSING and each.default_factory is MISSING]
    if missing:
        raise ValueError(f"{place} has lost its field {missing[0]!r}")
    return kind(**{name: _read(hints[name], entry, f"{place}.{name}") for name, entry in value.items()})


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
