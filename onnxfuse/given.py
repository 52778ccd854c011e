"""What Python code gives, as the stages take it: one where several are meant, mappings for objects, clear refusals."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypedDict, TypeVar

from onnxfuse.measurements import Place
from onnxfuse.planning.objective import Hints, Strategy, read_hints

T = TypeVar("T")

Paths = str | Path | Iterable[str | Path]
"""A path, or several."""

Names = str | Iterable[str]
"""A name, or several."""


class Wanted(TypedDict, total=False):
    """Further arguments of ``optimize``, with its meanings, that decide a plan."""

    embed: Names
    strategy: Strategy
    hints: Hints | Mapping[str, float] | None
    least_gain: float | None
    provider_options: Mapping[str, str] | None
    database: Place
    run_profile: str | Path | None
    fold_weights: bool


def paths(name: str, given: Paths) -> tuple[str | Path, ...]:
    """The paths of an argument; one alone stands for itself, and is not read letter by letter.

    Raises:
        TypeError: it holds what is no path.
    """
    found = (given,) if isinstance(given, str | Path) else tuple(_each(name, given))
    for each in found:
        if not isinstance(each, str | Path):
            raise TypeError(f"{name} holds {each!r}; it takes a path, or several")
    return found


def names(name: str, given: Names) -> tuple[str, ...]:
    """The names of an argument; one alone stands for itself.

    Raises:
        TypeError: it holds what is no name.
    """
    found = (given,) if isinstance(given, str) else tuple(_each(name, given))
    for each in found:
        if not isinstance(each, str):
            raise TypeError(f"{name} holds {each!r}; it takes a name, or several")
    return found


def _each(name: str, given: Iterable[T]) -> Iterable[T]:
    if not isinstance(given, Iterable) or isinstance(given, bytes):
        raise TypeError(f"{name} is {given!r}; it takes one, or a list of several")
    return given


def sizes(given: Mapping[str, int] | None) -> dict[str, int]:
    """Sizes by dimension.

    Raises:
        TypeError: it is no mapping of names to whole numbers.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f'dims is {given!r}; it takes a mapping, such as {{"batch": 8}}')
    found = {}
    for name, size in given.items():
        try:
            found[name] = operator.index(size)
        except TypeError:
            raise TypeError(f"dims has {size!r} for {name!r}; it takes whole numbers") from None
    return found


def hints(given: Hints | Mapping[str, float] | None) -> Hints:
    """Hints, from a mapping of their names too.

    Raises:
        TypeError: they are neither.
        ValueError: there is no such hint, or its value is out of range.
    """
    if given is None or isinstance(given, Hints):
        return given or Hints()
    if not isinstance(given, Mapping):
        raise TypeError(f'hints is {given!r}; it takes Hints or a mapping, such as {{"memory-pressure": 0.9}}')
    return read_hints(given)
