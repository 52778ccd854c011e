"""What a model is measured on: arrays that fit it, and what they tell of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from onnxfuse.graph.binding import batch_of, bound, check_sizes
from onnxfuse.measuring.inputs import make_inputs, sizes_of
from onnxfuse.operators import load_graph
from onnxfuse.operators.classes import caches


@dataclass(frozen=True)
class Feeds:
    """Inputs of a run.

    Attributes:
        arrays: by input name.
        dims: sizes of the inputs' symbolic dimensions; items: how many the run computes, None where that is not known.
        notes: on sizes that nobody gave.
        together: outputs that callers bind to the memory of an input, as caches are, with that.
    """

    arrays: Mapping[str, NDArray[Any]]
    dims: Mapping[str, int]
    items: int | None
    notes: tuple[str, ...]
    together: Mapping[str, str]


def make_feeds(
    path: str | Path, dims: Mapping[str, int], inputs: Mapping[str, NDArray[Any]] | None = None
) -> Feeds:
    """Inputs for a model at these sizes, made up where none are given.

    Raises:
        ModelError: the model cannot be read, ``inputs`` do not fit it, or it cannot run at the sizes that were given.
    """
    graph = load_graph(Path(path))
    arrays = make_inputs(graph, dims, inputs)
    known = sizes_of(graph, arrays)
    assumed = bound(graph, {**(sizes_of(graph, inputs) if inputs else {}), **dims})
    shown = ", ".join(f"{name}[{'x'.join(map(str, array.shape))}]" for name, array in (inputs or {}).items())
    given = sizes_of(graph, inputs) if inputs else dims
    notes = check_sizes(graph, {**assumed.sizes, **known}, given, shown)
    batch = batch_of(graph)
    together = {behind.name: before.name for behind, before in caches(graph.nodes, known).items()}
    return Feeds(arrays, known, known.get(batch or ""), (*assumed.notes, *notes), together)
