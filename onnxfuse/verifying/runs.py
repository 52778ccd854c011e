"""Which inputs a model is verified on: sizes small enough, contents that are valid for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, islice, tee
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxfuse.errors import VerificationError
from onnxfuse.graph import Graph
from onnxfuse.graph.constants import numpy_type
from onnxfuse.measuring.fitting import misfit
from onnxfuse.measuring.inputs import make_inputs
from onnxfuse.measuring.sets import InputSet
from onnxfuse.planning.costs.traffic import Ledger
from onnxfuse.verifying.results import RunInputs

Array = NDArray[Any]

FLOPS, BYTES = 2 * 10**9, 5 * 10**8
"""Work of one run of the original past which symbolic sizes are halved: a second or two on two cores."""

_SLIGHT = 8
"""Share of that work, as its inverse, up to which a third run is made where only sizes of batches are free."""

_LEAST, _LEAST_BATCH = 16, 2
"""Nothing is halved to less than this; nor is what is only ever the first axis of an input."""

_PRIMES = (3, 5, 7, 11, 13, 17, 19, 23)
_STEPS = (8, 32)
"""What sizes may have to be a multiple of: a network that halves an image and joins it with what it was."""
_GROWTH = (2, 4, 8, 16, 32, 64, 128)
_TELLING = (4, 32)
"""How much larger sizes are tried where a model makes what is no number: each is a run, and some models always do."""
_EQUAL = (64, 16, 2, 1, 256)
_FEW = (64, 8, 2)
"""What integers are drawn below where the model does not take those that it seems to demand."""
_MOST_SUMMED = 4
"""Symbols among which sums are looked for at most."""
_TRIED = 28
"""Inputs that are tried at most until a model runs."""


@dataclass(frozen=True)
class Run:
    """Model inputs by name."""

    about: RunInputs
    feeds: Mapping[str, Array]


@dataclass(frozen=True)
class Recipe:
    """How the inputs of a run are made: sizes of symbols and a seed; what all integers are where that is not drawn,
    what they are drawn below, what those are of which there is one for each of a batch; whether floats are drawn
    between zero and one."""

    sizes: Mapping[str, int]
    seed: int = 0
    integers: int | None = None
    below: int | None = None
    lengths: int | None = None
    gentle: bool = False

    def make(self, graph: Graph) -> Run:
        """The inputs.  With an odd seed the last entry of every mask of integers or booleans has its last quarter
        masked.

        Raises:
            ModelError: an input cannot be made up.
            VerificationError: no model runs at these sizes.
        """
        label = f"generated, seed {self.seed}"
        label = label if self.integers is None else f"{label}, integers {self.integers}"
        label = label if self.below is None else f"{label}, integers below {self.below}"
        label = label if self.lengths is None else f"{label}, lengths {self.lengths}"
        label = f"{label}, floats between 0 and 1" if self.gentle else label
        free = {name: self.sizes[name] for name in sorted(_free(graph))}
        about = RunInputs(label, free)
        reason = misfit(graph, free)
        if reason:
            raise VerificationError(f"The model cannot run on {about}: {reason}")
        feeds = make_inputs(graph, free, None, self.seed, self.integers, below=self.below, lengths=self.lengths,
                            gentle=self.gentle)
        if self.seed % 2:
            feeds = {name: _padded(array) if _is_mask(name) else array for name, array in feeds.items()}
        return Run(about, feeds)


Inputs = Mapping[str, Array] | Sequence[InputSet] | None
"""A user's inputs: one set of them, several, or none."""


def input_sets(inputs: Inputs) -> tuple[InputSet, ...]:
    """The sets of a user's inputs."""
    if isinstance(inputs, Mapping):
        return (InputSet(inputs),) if inputs else ()
    return tuple(inputs or ())


def users_run(graph: Graph, inputs: Mapping[str, Array], label: str = InputSet.label) -> Run:
    """The user's inputs, those that are missing made.

    Raises:
        ModelError: they do not fit the model.
    """
    return Run(RunInputs(label), make_inputs(graph, {}, inputs))


def first_recipes(ledger: Ledger) -> Iterator[Recipe]:
    """Ways to make inputs of the planned sizes, halved while a run would take long; then what a model may run on that
    does not run on these: larger ones of these sizes, lengths that are a size, floats between zero and one, smaller
    integers, other sizes."""
    graph, planned = ledger.graph, shrunk(ledger, ledger.sizes)[::-1]
    usual = planned[0]
    integers = any(value.dtype is not None and numpy_type(value.dtype).kind in "iu" for value in graph.inputs)
    few = [Recipe(usual, below=number) for number in _FEW if integers]
    sides = dict.fromkeys(usual[name] for name, least in _least(graph).items() if least == _LEAST and integers)
    lengths = [Recipe(usual, lengths=number) for number in sides] if _has_lengths(graph) else []
    calm = [Recipe(usual, 0, number) for number in (1, 0) if integers]
    gentle = [Recipe(usual, gentle=True)]
    # Counted where they are asked for: most models run on the first.
    others, again = tee(map(Recipe, _fitting(_others(graph, usual), ledger)))
    ones = (replace(recipe, integers=1) for recipe in again if integers)
    return _once(islice(chain(map(Recipe, planned), lengths, gentle, few, calm, others, ones), _TRIED))


def _has_lengths(graph: Graph) -> bool:
    """Whether there are integers of which there is one, or one for each of a batch."""
    return any(value.dtype is not None and numpy_type(value.dtype).kind in "iu" and value.rank is not None
               and value.rank <= 1 for value in graph.inputs)


def telling_recipes(ledger: Ledger, first: Recipe) -> Iterator[Recipe]:
    """Ways to make inputs where a model makes of the first what is no number: floats between zero and one, of which
    logarithms, roots and quotients more often are, then more of everything, as means of no elements need."""
    sizes = _grown(ledger.graph, first.sizes, _TELLING)
    return _once(chain([replace(first, gentle=True)],
                       (replace(first, sizes=larger) for larger in _fitting(sizes, ledger))))


def second_recipes(ledger: Ledger, first: Recipe) -> Iterator[Recipe]:
    """Sizes that no vector divides, near those that ran; those that ran, where there are no others, but for runs that
    take long and have no masks that another seed would pad."""
    graph, sizes = ledger.graph, first.sizes
    near = [*uneven(sizes, graph), *(_moved(sizes, graph, step) for step in _STEPS)]
    masked = any(_is_mask(value.name) for value in graph.inputs)
    again = [sizes] if masked else _fitting([sizes], ledger)
    return _once(replace(first, sizes=chosen, seed=1) for chosen in chain(_fitting(near, ledger), again))


def small_recipes(ledger: Ledger, first: Recipe, used: Sequence[Mapping[str, int]]) -> Iterator[Recipe]:
    """Small odd sizes, each another prime where the model can have that: kernels choose and cut other ways there than
    at the planned ones.  None where sizes of batches alone are free and runs take long: one more or less of these is
    what the second run had.

    Args:
        used: sizes that need not be tried again.
    """
    graph, sizes = ledger.graph, first.sizes
    if set(_least(graph).values()) == {_LEAST_BATCH}:
        total = ledger.at(sizes).total()
        if total.flops > FLOPS // _SLIGHT:
            return iter(())
    free = sorted(_free(graph))
    primes = {name: _PRIMES[place % len(_PRIMES)] for place, name in enumerate(free)}
    inner = {name for name in free if sizes[name] > 1}
    kept = {name: prime for name, prime in primes.items() if name in inner}
    tried = [
        {**sizes, **primes}, {**sizes, **kept}, {**sizes, **dict.fromkeys(inner, _PRIMES[0])},
        *({**sizes, **{name: step * prime for name, prime in kept.items()}} for step in _STEPS),
        *({**sizes, name: prime} for name, prime in kept.items()),
    ]
    known = [{name: each[name] for name in free} for each in used]
    fresh = [each for each in tried if {name: each[name] for name in free} not in known]
    return _once(replace(first, sizes=chosen, seed=2) for chosen in islice(_fitting(fresh, ledger), _TRIED // 2))


def _once(recipes: Iterator[Recipe]) -> Iterator[Recipe]:
    seen: set[tuple[Any, ...]] = set()
    for recipe in recipes:
        key = (*sorted(recipe.sizes.items()), recipe.seed, recipe.integers, recipe.below, recipe.lengths,
               recipe.gentle)
        if key not in seen:
            seen.add(key)
            yield recipe


def _others(graph: Graph, sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Sizes to try where the usual ones do not do: larger, as convolutions and windows may need them; all the same, as
    inputs may have to be that are not said to be."""
    least = _least(graph)
    inner = {name for name, size in least.items() if size == _LEAST}
    yield from _sums(sizes, sorted(inner))
    yield from _grown(graph, sizes)
    for one in sorted(inner) if len(inner) > 1 else ():
        # A state of a recurrence has its batch behind its layers.
        for factor in _GROWTH[:2]:
            yield {name: 1 if name == one else size * factor if name in inner else size
                   for name, size in sizes.items()}
    for equal in _EQUAL:
        yield {name: equal if name in inner else size for name, size in sizes.items()}
    for equal in (1, 2):
        yield {name: equal if name in least else size for name, size in sizes.items()}


def _grown(graph: Graph, sizes: Mapping[str, int], factors: Sequence[int] = _GROWTH) -> Iterator[dict[str, int]]:
    """Sizes that are larger, but for those of batches."""
    inner = {name for name, size in _least(graph).items() if size == _LEAST}
    for factor in factors:
        yield {name: max(size, _LEAST) * factor if name in inner else size for name, size in sizes.items()}


def _sums(sizes: Mapping[str, int], inner: Sequence[str]) -> Iterator[dict[str, int]]:
    """Sizes of which one is the sum of two others, as what was and what is new make all; the last named first."""
    for total in reversed(inner) if len(inner) <= _MOST_SUMMED else ():
        for first, second in combinations([name for name in inner if name != total], 2):
            yield {**sizes, total: sizes[first] + sizes[second]}


def _fitting(candidates: Iterable[Mapping[str, int]], ledger: Ledger) -> Iterator[Mapping[str, int]]:
    """Those at which a model can run, and does not run long; each once."""
    seen: set[tuple[tuple[str, int], ...]] = set()
    for sizes in candidates:
        key = tuple(sorted(sizes.items()))
        if key not in seen and not misfit(ledger.graph, sizes):
            seen.add(key)
            total = ledger.at(sizes).total()
            if total.flops <= 2 * FLOPS and total.bytes_products + total.bytes_other <= 2 * BYTES:
                yield sizes


def _moved(sizes: Mapping[str, int], graph: Graph, step: int) -> dict[str, int]:
    free = _free(graph)
    return {name: size + step if name in free and size > 1 else size for name, size in sizes.items()}


def shrunk(ledger: Ledger, sizes: Mapping[str, int], flops: int | None = None,
           traffic: int | None = None) -> list[dict[str, int]]:
    """Sizes for a run, the wanted ones first and each after it smaller: the last is below both limits, or as small as
    halving makes it.  Symbols of one size are halved together: they may have to be equal."""
    flops, traffic = FLOPS if flops is None else flops, BYTES if traffic is None else traffic
    least = _least(ledger.graph)
    current = dict(sizes)
    found = [dict(current)]
    while True:
        total = ledger.at(current).total()
        free = {name for name in least if current[name] >= 2 * least[name]}
        if not free or (total.flops <= flops and total.bytes_products + total.bytes_other <= traffic):
            return found
        largest = max(current[name] for name in free)
        current = {name: size // 2 if name in free and size == largest else size for name, size in current.items()}
        found.append(dict(current))


def uneven(sizes: Mapping[str, int], graph: Graph) -> list[dict[str, int]]:
    """Symbolic sizes of the inputs one larger, so that no vector divides them: all, then all but those that are 1
    (exporters fix a batch of 1 without saying so)."""
    free = _free(graph)
    return [{name: size + 1 if name in free and size > least else size for name, size in sizes.items()}
            for least in (0, 1)]


def _is_mask(name: str) -> bool:
    return "mask" in name.lower()


def _padded(array: Array) -> Array:
    if array.dtype.kind not in "iub" or array.ndim < 2 or not array.size:
        return array
    result = array.copy()
    row = result.reshape(-1, array.shape[-1])[-1]
    row[row.size - row.size // 4 :] = np.zeros((), array.dtype)
    return result


def _least(graph: Graph) -> dict[str, int]:
    """How small each symbol of the inputs may become."""
    inner = {name for value in graph.inputs for size in (value.shape or ())[1:] for name in size.symbols}
    return {name: _LEAST if name in inner else _LEAST_BATCH for name in sorted(_free(graph))}


def _free(graph: Graph) -> frozenset[str]:
    """Symbols in the shapes of the inputs."""
    return frozenset(name for value in graph.inputs for size in value.shape or () for name in size.symbols)
