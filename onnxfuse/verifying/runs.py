"""Which inputs a model is verified on: sizes small enough, contents that are valid for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxfuse.graph import Graph
from onnxfuse.measuring.inputs import make_inputs
from onnxfuse.planning.traffic import Ledger
from onnxfuse.verifying.results import RunInputs

Array = NDArray[Any]

FLOPS, BYTES = 4 * 10**9, 10**9
"""Work of one run of the original past which symbolic sizes are halved: some seconds on two cores."""

_LEAST, _LEAST_BATCH = 16, 2
"""Nothing is halved to less than this; nor is what is only ever the first axis of an input."""


@dataclass(frozen=True)
class Run:
    """Model inputs by name."""

    about: RunInputs
    feeds: Mapping[str, Array]


def shrunk(ledger: Ledger, sizes: Mapping[str, int], flops: int | None = None,
           traffic: int | None = None) -> list[dict[str, int]]:
    """Sizes for a run, the wanted ones first and each after it smaller: the last is below both limits, or as small as
    halving makes it.  Symbols of one size are halved together: they may have to be equal."""
    flops, traffic = FLOPS if flops is None else flops, BYTES if traffic is None else traffic
    least = _least(ledger.graph)
    current = dict(sizes)
    found = [dict(current)]
    while True:
        total = Ledger(ledger.graph, current, ledger.placement).total()
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


def make_run(graph: Graph, sizes: Mapping[str, int], seed: int) -> Run:
    """Inputs of these sizes.  With an odd seed the last entry of every mask of integers or booleans has its last
    quarter masked.

    Raises:
        ModelError: an input cannot be made up.
    """
    free = {name: sizes[name] for name in sorted(_free(graph))}
    feeds = make_inputs(graph, free, seed=seed)
    if seed % 2:
        feeds = {name: _padded(array) if "mask" in name.lower() else array for name, array in feeds.items()}
    return Run(RunInputs(f"generated, seed {seed}", free), feeds)


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
    return {name: _LEAST if name in inner else _LEAST_BATCH for name in _free(graph)}


def _free(graph: Graph) -> frozenset[str]:
    """Symbols in the shapes of the inputs."""
    return frozenset(name for value in graph.inputs for size in value.shape or () for name in size.symbols)
