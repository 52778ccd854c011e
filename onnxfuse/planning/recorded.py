"""Predictions for shapes that were seen in a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from onnxfuse.graph.dims import Dim
from onnxfuse.graph.model import Value


def solved(seen: Iterable[tuple[Value, Sequence[int] | None]]) -> dict[str, int] | None:
    """Numbers for the symbols in values' shapes, so that each has the shape that was seen.

    A size with one symbol that is not known yet, of which it is a multiple plus a rest, gives that symbol.  A shape
    that is unknown, or was not seen (None), says nothing.  None where no numbers fit.
    """
    sizes: list[tuple[Dim, int]] = []
    for value, shape in seen:
        if shape is None or value.shape is None:
            continue
        if len(shape) != len(value.shape):
            return None
        sizes += zip(value.shape, shape, strict=True)
    found: dict[str, int] = {}
    while True:
        count = len(found)
        for size, number in sizes:
            symbol = _only(size.symbols - found.keys())
            if symbol is not None and (answer := _linear(size, symbol, number, found)) is not None:
                found[symbol] = answer
        if len(found) == count:
            break
    known = [(size, number) for size, number in sizes if size.symbols <= found.keys()]
    return found if all(_evaluated(size, found) == number for size, number in known) else None


def _only(symbols: frozenset[str]) -> str | None:
    return next(iter(symbols)) if len(symbols) == 1 else None


def _linear(size: Dim, symbol: str, number: int, known: Mapping[str, int]) -> int | None:
    """The value of the symbol at which the size is ``number``; None where it is no multiple of it plus a rest."""
    rest, one = (_evaluated(size, {**known, symbol: at}) for at in (0, 1))
    if rest is None or one is None or one == rest or (number - rest) % (one - rest):
        return None
    answer = (number - rest) // (one - rest)
    return answer if answer >= 0 and _evaluated(size, {**known, symbol: answer}) == number else None


def _evaluated(size: Dim, values: Mapping[str, int]) -> int | None:
    try:
        return size.evaluate(values)
    except ZeroDivisionError:
        return None
