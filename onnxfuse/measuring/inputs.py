"""Inputs for a model from what it declares, or from a user's file."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxfuse.errors import ModelError
from onnxfuse.graph import Graph, Node, Value, bind

Array = NDArray[Any]

INDICES = 900
"""Integers are drawn below this, or below the smallest table that they index."""

_PASSES_ON = frozenset({
    "Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Expand", "Slice", "Concat",
    "Split", "Tile", "Where",
})
"""Operators that move their operands' elements and do not change them."""


def make_inputs(
    graph: Graph,
    dims: Mapping[str, int],
    given: Mapping[str, Array] | None = None,
    seed: int = 0,
) -> dict[str, Array]:
    """An array for every input of a model, the same for the same seed.

    Floats are drawn from the standard normal distribution.  Integers are drawn from zero up to 900, or to the size
    of the smallest table that they index.  An input with "mask" in its name is all ones, and any other boolean one is
    drawn evenly.

    Args:
        graph: the model's graph.
        dims: sizes of symbolic dimensions; others get the defaults of ``graph.bind``.
        given: arrays to use; ``dims`` does not have to agree with their sizes.

    Raises:
        ModelError: ``dims`` or ``given`` does not fit the model, or an input is no tensor that can be made.
    """
    given = dict(given or {})
    _check_given(graph, given)
    sizes = bind(graph, {**_sizes_of(graph, given), **dims})
    generator = np.random.default_rng(seed)
    return {
        value.name: given[value.name] if value.name in given else _draw(value, sizes, generator)
        for value in graph.inputs
    }


def read_inputs(path: str | Path) -> dict[str, Array]:
    """The arrays of an .npz file, by name.

    Raises:
        ModelError: it is no .npz file, or holds Python objects.
    """
    try:
        arrays = np.load(path)
        if not isinstance(arrays, np.lib.npyio.NpzFile):
            raise ValueError("it holds one array without a name")
        with arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise ModelError(
            f"The inputs cannot be read: {error}.", place=str(path),
            remedy="Write them with numpy.savez(path, input_name=array, ...).",
        ) from error


def _check_given(graph: Graph, given: Mapping[str, Array]) -> None:
    inputs = {value.name: value for value in graph.inputs}
    for name, array in given.items():
        if name not in inputs:
            raise ModelError(
                f"The model has no input '{name}'.", place=name, remedy=f"Its inputs are: {', '.join(inputs)}.",
            )
        value = inputs[name]
        wanted = None if value.dtype is None else _numpy_type(value)
        if wanted is not None and array.dtype != wanted:
            raise ModelError(
                f"Input '{name}' has type {wanted}, and the array given is {array.dtype}.", place=name,
                remedy=f"Convert it: array.astype({str(wanted)!r}).",
            )
        if value.rank is not None and array.ndim != value.rank:
            raise ModelError(
                f"Input '{name}' has {value.rank} axes, and the array given has {array.ndim}.", place=name,
                remedy=f"Its shape is [{', '.join(map(str, value.shape or ()))}].",
            )


def _sizes_of(graph: Graph, given: Mapping[str, Array]) -> dict[str, int]:
    """Sizes of the symbols that stand alone in the shapes of the given arrays."""
    sizes: dict[str, int] = {}
    for value in graph.inputs:
        if value.name in given:
            for size, number in zip(value.shape or (), given[value.name].shape, strict=False):
                if str(size) in size.symbols:
                    sizes.setdefault(str(size), number)
    return sizes


def _draw(value: Value, sizes: Mapping[str, int], generator: np.random.Generator) -> Array:
    dtype = _numpy_type(value)
    if value.shape is None:
        raise _cannot_be_made(value, "its shape is not stated")
    shape = tuple(size.evaluate(sizes) for size in value.shape)
    if "mask" in value.name.lower():
        return np.ones(shape, dtype)
    if value.dtype == TensorProto.BOOL:
        return generator.integers(0, 2, shape).astype(dtype)
    if dtype.kind in "iu":
        return generator.integers(0, max(1, min(index_bound(value), int(np.iinfo(dtype).max))), shape).astype(dtype)
    return generator.standard_normal(shape, dtype=np.float32).astype(dtype)


def draw(value: Value, sizes: Mapping[str, int], generator: np.random.Generator) -> Array:
    """An array for one value of a graph, drawn as ``make_inputs`` draws.

    Raises:
        ModelError: its type or its sizes are not known.
    """
    try:
        return _draw(value, sizes, generator)
    except KeyError as error:
        raise _cannot_be_made(value, f"its size {error} is not known") from None


def _numpy_type(value: Value) -> np.dtype[Any]:
    if value.dtype in (None, TensorProto.STRING, TensorProto.UNDEFINED):
        raise _cannot_be_made(value, "it holds text" if value.dtype == TensorProto.STRING else "its type is not stated")
    return np.dtype(helper.tensor_dtype_to_np_dtype(value.dtype))


def _cannot_be_made(value: Value, reason: str) -> ModelError:
    return ModelError(
        f"Input '{value.name}' cannot be made up: {reason}.", place=value.name,
        remedy="Give it in a file: --inputs FILE.npz.",
    )


def index_bound(value: Value) -> int:
    """Size of the smallest table that the value indexes, at most ``INDICES``."""
    bound, waiting, seen = INDICES, [value], {value}
    while waiting:
        here = waiting.pop()
        new = [value for value in here.inner if value not in seen]
        seen.update(new)
        waiting += new
        for node in here.consumers:
            bound = min(bound, _table(node, here) or bound)
            if node.domain == "" and node.op in _PASSES_ON:
                new = [output for output in node.outputs if output is not None and output not in seen]
                seen.update(new)
                waiting += new
    return bound


def _table(node: Node, indices: Value) -> int | None:
    """How many entries of its data ``node`` can reach with these indices, where that is a known number."""
    if len(node.inputs) < 2 or node.inputs[1] is not indices:
        return None
    data = node.inputs[0]
    if data is None or not data.shape:
        return None
    if node.op in ("Gather", "GatherElements"):
        return data.shape[int(node.attributes.get("axis", 0))].value
    # Labels of a loss name a class, and classes lie along axis 1.
    labels = node.op in ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss") and len(data.shape) > 1
    return data.shape[1].value if labels else None
