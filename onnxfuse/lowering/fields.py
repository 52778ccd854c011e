"""Members of a launch plan as JSON data, each of the type that it has to have."""

from __future__ import annotations


def text(value: object) -> str:
    """A text.

    Raises:
        TypeError: it is none; so do the others.
    """
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def number(value: object) -> int:
    """An integer from 0 on that fits 31 bits."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
        raise TypeError(f"{value!r} is no number")
    return value


def truth(value: object) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is neither true nor false")
    return value


def texts(values: object) -> tuple[str, ...]:
    """A list of texts."""
    if not isinstance(values, list):
        raise TypeError(f"{values!r} is no list")
    return tuple(map(text, values))


def numbers(values: object) -> tuple[int, ...]:
    """A list of such integers."""
    if not isinstance(values, list):
        raise TypeError(f"{values!r} is no list")
    return tuple(map(number, values))


def two(values: object) -> tuple[str, str]:
    """Two texts.

    Raises:
        ValueError: there are more or fewer.
    """
    one, other = texts(values)
    return one, other


def three(sizes: object) -> tuple[str, str, str]:
    """Three texts.

    Raises:
        ValueError: there are more or fewer.
    """
    x, y, z = texts(sizes)
    return x, y, z
