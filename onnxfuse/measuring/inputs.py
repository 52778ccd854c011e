"""Inputs for a model from what it declares, or from a user's file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxfuse.errors import ModelError
from onnxfuse.graph import Graph, Value, bind
from onnxfuse.measuring.archive import read_arrays, reason
from onnxfuse.measuring.demands import POSITIVE
from onnxfuse.measuring.intervals import interval_of, is_whole
from onnxfuse.measuring.ranges import Ranges, find_ranges
from onnxfuse.wording import option

Array = NDArray[Any]

SETTINGS = 4
"""Floats that an input has at most that looks like a setting."""


def make_inputs(
    graph: Graph,
    dims: Mapping[str, int],
    given: Mapping[str, Array] | None = None,
    seed: int = 0,
    integers: int | None = None,
    *,
    below: int | None = None,
    lengths: int | None = None,
    gentle: bool = False,
) -> dict[str, Array]:
    """An array for every input of a model, the same for the same seed.

    Floats are drawn from the standard normal distribution, settings (a few floats for the whole batch) between zero and
    one, integers from zero up to 900, truths evenly; each from
    within what the operators demand that it reaches, such as the sizes of tables (``ranges.find_ranges``).  An input
    that masks, by its name or by what becomes of it, is all ones.  One that gives lengths, by its name, gives the whole
    length of each sequence; with an odd seed, of the first alone.

    Args:
        graph: the model's graph; where types and sizes were inferred, more is known of what operators demand.
        dims: sizes of symbolic dimensions; others get the defaults of ``graph.bind``.
        given: arrays to use; ``dims`` does not have to agree with their sizes.
        integers: what every integer that is no mask is in place of numbers drawn.
        below: what integers that are no masks and no lengths are drawn below.
        lengths: what integers that are no masks are of which there is one, or one for each of a batch.
        gentle: whether floats that may be anything are drawn between zero and one: logarithms, roots and quotients of
            what is computed from these are more often numbers.

    Raises:
        ModelError: ``dims`` or ``given`` does not fit the model, or an input is no tensor that can be made.
    """
    given = dict(given or {})
    _check_given(graph, given)
    sizes = bind(graph, {**sizes_of(graph, given), **dims})
    generator = np.random.default_rng(seed)
    free = [value for value in graph.inputs if value.name not in given]
    known = {value: interval for value in graph.inputs if value.name in given
             and (interval := interval_of(given[value.name])) is not None}
    ranges = find_ranges(free, sizes, known)
    way = _Way(bool(seed % 2), below, gentle)
    made = {value.name: _draw(value, sizes, generator, ranges, way) for value in free}
    for number, most in ((integers, np.inf), (lengths, 1)):
        whole = {value.name for value in free if value not in ranges.masks and made[value.name].dtype.kind in "iu"
                 and made[value.name].ndim <= most and number is not None}
        made |= {name: np.full_like(made[name], min(number or 0, np.iinfo(made[name].dtype).max)) for name in whole}
    return {value.name: given[value.name] if value.name in given else made[value.name] for value in graph.inputs}


def read_inputs(path: str | Path) -> dict[str, Array]:
    """The arrays of an .npz file, by name.

    Raises:
        ModelError: it is no .npz file, holds Python objects, or too much.
    """
    try:
        return read_arrays(Path(path))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"The inputs cannot be read: {reason(error)}.", place=str(path),
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
        for axis, (size, number) in enumerate(zip(value.shape or (), array.shape, strict=False)):
            if size.value not in (None, number):
                raise ModelError(
                    f"Axis {axis} of input '{name}' has the fixed size {size}, and the array given has {number}.",
                    place=name, remedy=f"Its shape is [{', '.join(map(str, value.shape or ()))}].",
                )


def sizes_of(graph: Graph, given: Mapping[str, Array]) -> dict[str, int]:
    """Sizes of the symbols that stand alone in the shapes of the given arrays."""
    sizes: dict[str, int] = {}
    for value in graph.inputs:
        if value.name in given:
            for size, number in zip(value.shape or (), given[value.name].shape, strict=False):
                if str(size) in size.symbols:
                    sizes.setdefault(str(size), number)
    return sizes


@dataclass(frozen=True)
class _Way:
    """How inputs are drawn: whether sequences are of several lengths; ``below`` and ``gentle`` as ``make_inputs``."""

    lengths: bool = False
    below: int | None = None
    gentle: bool = False


def _draw(value: Value, sizes: Mapping[str, int], generator: np.random.Generator, ranges: Ranges,
          way: _Way | None = None) -> Array:
    way = way or _Way()
    dtype = _numpy_type(value)
    if value.shape is None:
        raise _cannot_be_made(value, "its shape is not stated")
    shape = tuple(size.evaluate(sizes) for size in value.shape)
    if value in ranges.masks:
        return np.ones(shape, dtype)
    low, high = ranges.intervals[value]
    if value in ranges.lengths:
        lengths = generator.integers(int(low), int(high), shape, endpoint=True)
        lengths[slice(1) if way.lengths else slice(None)] = ranges.lengths[value]
        return lengths.astype(dtype)
    if is_whole(value.dtype):
        high = high if way.below is None else min(high, max(low, way.below - 1))
        return generator.integers(int(low), int(high), shape, endpoint=True).astype(dtype)
    if high < inf and low > -inf:
        return generator.uniform(low, high, shape).astype(dtype)
    if way.gentle:
        return (max(low, 0.0) + generator.uniform(POSITIVE, 1 - POSITIVE, shape)).astype(dtype)
    if low == -inf and _is_setting(value):
        return generator.uniform(POSITIVE, 1, shape).astype(dtype)
    drawn = generator.standard_normal(shape, dtype=np.float32)
    return (drawn if low == -inf else low + np.abs(drawn)).astype(dtype)


def _is_setting(value: Value) -> bool:
    """Whether an input looks like a setting, as a temperature or three scales: a few floats, of which there is one set
    for the whole batch."""
    shape = value.shape
    return value.is_input and shape is not None and len(shape) <= 1 and all(not size.symbols for size in shape) and (
        int(np.prod([size.evaluate({}) for size in shape])) <= SETTINGS)


def draw(value: Value, sizes: Mapping[str, int], generator: np.random.Generator) -> Array:
    """An array for one value of a graph, drawn as ``make_inputs`` draws.

    Raises:
        ModelError: its type or its sizes are not known.
    """
    try:
        return _draw(value, sizes, generator, find_ranges([value], sizes))
    except KeyError as error:
        raise _cannot_be_made(value, f"its size {error} is not known") from None


def _numpy_type(value: Value) -> np.dtype[Any]:
    if value.dtype in (None, TensorProto.STRING, TensorProto.UNDEFINED):
        raise _cannot_be_made(value, "it holds text" if value.dtype == TensorProto.STRING else "its type is not stated")
    return np.dtype(helper.tensor_dtype_to_np_dtype(value.dtype))


def _cannot_be_made(value: Value, reason: str) -> ModelError:
    return ModelError(
        f"Input '{value.name}' cannot be made up: {reason}.", place=value.name,
        remedy=f"Give it: {option('inputs', 'FILE.npz')}.",
    )
