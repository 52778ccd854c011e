"""What a model and its fused form are run on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from numpy.typing import NDArray

from onnxfuse.errors import VerificationError
from onnxfuse.verifying.capture import run_model
from onnxfuse.verifying.pair import Pair
from onnxfuse.verifying.runs import Run, first_recipes, users_run
from onnxfuse.verifying.sharing import Slim

Inputs = Mapping[str, NDArray[Any]]
Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is; 0 where that is not known."""


def first_that_runs(original: Slim, pair: Pair, inputs: Inputs | None, choices: Sequence[Any]) -> Any:
    """The first providers that run the original; the last where none does."""
    for providers in choices[:-1]:
        try:
            with_results(original, pair, inputs, providers)
        except VerificationError:
            continue
        return providers
    return choices[-1]


def with_results(original: Slim, pair: Pair, inputs: Inputs | None,
                  providers: Sequence[Any]) -> list[tuple[Run, Sequence[Any]]]:
    """Inputs with what the original gives for them, bit for bit the same for the same providers.

    Raises:
        VerificationError: it does not run on any of them.
    """
    session = original.session(providers)
    error: VerificationError | None = None
    for make in _ways(pair, inputs):
        try:
            run = make()
            return [(run, run_model(session, original.model, run))]
        except VerificationError as problem:
            error = error or problem
    assert error is not None
    raise error


def _ways(pair: Pair, inputs: Inputs | None) -> Iterator[Callable[[], Run]]:
    """The user's inputs; else made ones, as verification tries them."""
    if inputs:
        yield partial(users_run, pair.graph, inputs)
        return
    for recipe in first_recipes(pair.ledger):
        yield partial(recipe.make, pair.graph)
