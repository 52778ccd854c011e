"""Numbers for symbols, from the command line or by default."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from onnxfuse.errors import ModelError
from onnxfuse.graph.agreement import agreed, mended, told, unmet
from onnxfuse.graph.derived import Derived, derived, enlarged, least
from onnxfuse.graph.dims import Dim
from onnxfuse.graph.model import Demand, Graph
from onnxfuse.wording import option

BATCH, SEQUENCE, SIDE, OTHER = 1, 128, 224, 16
"""Default sizes: a batch, a sequence, a side of an image, anything else."""

_NAMED = (
    (re.compile(r"batch|(^|_)bs$", re.IGNORECASE), BATCH),
    (re.compile(r"seq|(^|_)(len|length|tokens?|time|frames?|t|s|l)$", re.IGNORECASE), SEQUENCE),
    (re.compile(r"height|width|(^|_)(h|w|size)$", re.IGNORECASE), SIDE),
)

_NAMELESS = re.compile(r"\.(\d+|trips)(\.either)?$")
"""Symbols that nobody named: they are called after a tensor, which tells nothing of a size."""


@dataclass(frozen=True)
class Bound:
    """A number for every symbol of a graph.

    Attributes:
        sizes: by symbol.
        notes: sizes that had to be assumed larger than by default, and why.
        assumed: symbols of the inputs' shapes whose size nobody gave.
    """

    sizes: dict[str, int]
    notes: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()


def bind(graph: Graph, dims: Mapping[str, int]) -> dict[str, int]:
    """The sizes of ``bound``."""
    return bound(graph, dims).sizes


def bound(graph: Graph, dims: Mapping[str, int]) -> Bound:
    """A number for every symbol of the graph.

    ``dims`` comes first.  By default a symbol whose name tells what it is gets that size (``batch`` 1, ``seq_len``
    128, ``height`` 224; ``N`` may count anything behind the first axis of an input); another one gets the size of its
    first place among the inputs: axis 0 is the batch, the axes from 2 on of a tensor of rank 4 or 5 are sides of an
    image, axis 1 of a tensor of rank 2 or 3 is a sequence; any other symbol is 16.  Where a graph input's size is an
    expression, its symbols are bound in the same way.  A size that changes from run to run of a body has the value
    that it has in the first.

    A default with which a size that follows from it is below 1 is doubled until none is, where that can be.

    Raises:
        ModelError: ``dims`` names no symbol of the graph, or a size below zero, or sizes with which a tensor would have
            one below zero, or two for symbols that are one.
    """
    symbols, dims = _symbols(graph), renamed(graph, dims)
    for name, size in dims.items():
        if name not in symbols:
            raise ModelError(
                f"The model has no dimension '{name}'.", place=_given(name, dims=dims), remedy=_known(name, graph),
                usage=True,
            )
        if size < 0:
            raise ModelError(
                f"Dimension '{name}' cannot be {size}.", place=_given(name, dims=dims),
                remedy="Give a size of zero or more.", usage=True,
            )
    first = {str(value.shape[0]) for value in graph.inputs if value.shape}
    batches = {size for name, size in dims.items() if name in first}
    shared = dict.fromkeys(first & symbols.keys(), batches.pop()) if len(batches) == 1 else {}
    sizes = {**symbols, **shared, **dims}
    follows = derived(graph)
    larger = enlarged(follows, sizes, symbols.keys() - shared.keys() - dims.keys()) if follows else {}
    notes = tuple(_raised(follows, sizes, name, size) for name, size in larger.items())
    sizes |= larger
    asked = asked_of(graph)
    other = agreed(asked, sizes, symbols.keys() - shared.keys() - dims.keys()) if asked else {}
    notes += tuple(_agreed(asked, sizes, name, size) for name, size in other.items())
    sizes |= other
    for each in follows if dims else ():
        if (each.at(sizes) or 0) < 0 and not each.size.symbols.isdisjoint(dims):
            raise _negative(each, sizes, dims)
    for body in graph.walk():
        for name, before in body.first.items():
            if name not in dims:
                sizes[name] = before.evaluate(sizes)
    return Bound(sizes, notes, tuple(name for name in _of_inputs(graph) if name not in dims and name not in shared))


def renamed(graph: Graph, dims: Mapping[str, int]) -> dict[str, int]:
    """Sizes by the graph's symbols, of which some stand for several of the file's.

    Raises:
        ModelError: two sizes for one symbol.
    """
    found: dict[str, int] = {}
    for name, size in dims.items():
        own = graph.same.get(name, name)
        if found.setdefault(own, size) != size:
            other = next(each for each in dims if graph.same.get(each, each) == own)
            raise ModelError(
                f"The model needs '{other}' and '{name}' to be equal, not {dims[other]} and {size}.",
                place=_given(other, name, dims=dims), remedy="Give both the same size, or one of them.", usage=True,
            )
    return found


def _raised(follows: tuple[Derived, ...], sizes: Mapping[str, int], name: str, size: int) -> str:
    """Why a default is larger than others."""
    small = next((each for each in follows if name in each.size.symbols and (each.at(sizes) or 0) < 1), None)
    why = "" if small is None else f": at {sizes[name]}, axis {small.axis} of {small}, would have {small.at(sizes)}"
    return _taken(name, size, why)


def asked_of(graph: Graph) -> tuple[Demand, ...]:
    """What the operators of the main graph ask of the inputs' sizes, of which alone something is known."""
    known = frozenset(_of_inputs(graph))
    return tuple(each for each in graph.demands if each.left.symbols | each.right.symbols <= known)


def _agreed(asked: Sequence[Demand], sizes: Mapping[str, int], name: str, size: int) -> str:
    """Why another size than the default is assumed."""
    bad = unmet(asked, sizes)
    why = next((each for each in bad if name in each.left.symbols | each.right.symbols), bad[0] if bad else None)
    reason = "" if why is None else f": at {sizes[name]}, {told(why, sizes)}"
    return _taken(name, size, reason)


def _taken(name: str, size: int, why: str) -> str:
    return (f"Dimension '{name}' is taken to be {size}{why}.  Give the size that you use: "
            f"{option('dim', f'{name}=SIZE')}.")


def _given(*names: str, dims: Mapping[str, int]) -> str:
    """Sizes as the user gives them."""
    return option("dim", *(f"{name}={dims[name]}" for name in names))


def check_sizes(graph: Graph, sizes: Mapping[str, int], dims: Mapping[str, int], arrays: str = "") -> tuple[str, ...]:
    """Notes on assumed sizes at which the model seems not to run.

    Args:
        sizes: that are planned for; dims: those of them that the user gave.
        arrays: what shows the user's arrays, where these have the sizes.

    Raises:
        ModelError: sizes that the user gave do not fit the model.
    """
    asked, dims = asked_of(graph), renamed(graph, dims)
    # What the file alone says of a size may be wrong, and what follows from it too.
    stated = {name for each in graph.assumptions if each.taken.symbols.isdisjoint(each.instead.symbols)
              for name in each.taken.symbols}
    bad = unmet(asked, sizes)
    for each in bad:
        own = [name for name in dims if name in each.left.symbols | each.right.symbols]
        if own and stated.isdisjoint(own):
            fits = mended(each, asked, sizes, own)
            shown = [f"{name}={size}" for name, size in (fits or {}).items()]
            better = " ".join(shown) if arrays or not shown else option("dim", *shown)
            raise ModelError(
                f"The model does not run at these sizes: {told(each, sizes)}.", place=arrays or _given(*own, dims=dims),
                remedy=f"Such a size fits: {better}." if better else "Give other sizes.", usage=True,
            )
    return tuple(f"The model seems not to run at the sizes that are assumed: {told(each, sizes)}.  Give the sizes that "
                 f"you use with {option('dim')}." for each in bad[:1])


def _negative(found: Derived, sizes: Mapping[str, int], dims: Mapping[str, int]) -> ModelError:
    own = [name for name in dims if name in found.size.symbols]
    needed = {name: size for name in own if (size := least(found, sizes, name)) is not None}
    enough = " or ".join(option("dim", f"{name}={size}") for name, size in needed.items())
    return ModelError(
        f"Axis {found.axis} of {found}, would have {found.at(sizes)} elements: {found.size}.",
        place=_given(*own, dims=dims),
        remedy=f"Give a size that is large enough, from {enough} on." if enough else "Give other sizes.", usage=True,
    )


def batch_of(graph: Graph) -> str | None:
    """The symbol that counts the items of a run: the only one that stands alone as the first size of an input, where
    neither its name nor its place tells of anything else than a batch."""
    first = {str(value.shape[0]): value.rank or 0 for value in graph.inputs
             if value.shape and str(value.shape[0]) in value.shape[0].symbols}
    name, rank = next(iter(first.items()), ("", 0))
    return name if len(first) == 1 and _default(name, 0, rank) == BATCH else None


def _symbols(graph: Graph) -> dict[str, int]:
    """Every symbol of the graph and its bodies with its default, those of the inputs first."""
    found: dict[str, int] = {}
    for value in graph.inputs:
        for axis, size in enumerate(value.shape or ()):
            for name in sorted(size.symbols):
                found.setdefault(name, _default(name, axis, len(value.shape or ())))
    for value in (value for each in graph.walk() for value in each.values.values()):
        for size in (*(value.shape or ()), *(value.elements or ())):
            if isinstance(size, Dim):
                for name in sorted(size.symbols):
                    found.setdefault(name, _default(name, None, 0))
    return found


_LETTER = re.compile(r"(^|_)(n|b)$", re.IGNORECASE)
"""Names of a batch, but for an axis behind the first of an input: there it may be a number of anything."""


def _default(name: str, axis: int | None, rank: int) -> int:
    for pattern, size in _NAMED:
        if pattern.search(name) and not _NAMELESS.search(name):
            return size
    if axis == 0 or (axis is None and _LETTER.search(name)):
        return BATCH
    if axis is not None and axis >= 2 and rank in (4, 5):
        return SIDE
    if axis == 1 and rank in (2, 3):
        return SEQUENCE
    return OTHER


def _of_inputs(graph: Graph) -> list[str]:
    """The symbols in the shapes of the graph's inputs."""
    return list(dict.fromkeys(n for value in graph.inputs for size in value.shape or () for n in sorted(size.symbols)))


def _known(name: str, graph: Graph) -> str:
    names = _of_inputs(graph)
    if not names:
        return f"The model's inputs have fixed sizes; leave {option('dim')} out."
    close = get_close_matches(name, names, n=1)
    if not close:
        close = [known for known in names if known.lower() == name.lower()]
    meant = f"Did you mean '{close[0]}'? " if close else ""
    return f"{meant}Its dimensions are: {', '.join(names)}."
