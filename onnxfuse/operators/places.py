"""Places along axes that a Scatter writes, as exporters spell a slice that is assigned to: one counted range an axis.

    Range ─ Reshape ─ Expand ─ Unsqueeze ─┐
    ...                                   ├─ Concat ─▶ indices
    number ─ Expand ─ Unsqueeze ──────────┘

So they are known where sizes are, though the indices are not numbers before the model runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from onnxfuse.graph.context import elements_of
from onnxfuse.graph.dims import Dim, dim
from onnxfuse.graph.model import Node, Value, root

COUNTING = frozenset({"Cast", "Expand", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators that pass indices on as they are."""


@dataclass(frozen=True)
class Places:
    """Places of an axis in the order in which they are written: ``start``, and on by ``step``, ``count`` of them."""

    start: Dim
    step: int
    count: Dim

    @property
    def first(self) -> Dim:
        """The one nearest to the front."""
        return self.start if self.step > 0 else self.start + (self.count - 1) * self.step

    @property
    def end(self) -> Dim:
        """Behind the one farthest from the front."""
        return self.first + (self.count - 1) * abs(self.step) + 1

    def renamed(self, rename: Callable[[Dim], Dim]) -> Places:
        """The same in other symbols."""
        return Places(rename(self.start), self.step, rename(self.count))

    def within(self, size: Dim) -> bool:
        """Whether all lie on an axis of so many elements, whatever the sizes are."""
        return self.first.non_negative() and (size - self.end).non_negative()


def counting(value: Value | None) -> Node | None:
    """The Range whose numbers a value passes on, or None."""
    maker = None if value is None else value.producer
    while maker is not None and maker.domain == "" and maker.op in COUNTING and maker.inputs[0] is not None:
        maker = maker.inputs[0].producer
    return maker if maker is not None and maker.op == "Range" and len(maker.inputs) == 3 else None


def spelled(indices: Value) -> list[Places] | None:
    """The places along each of the axes that a ScatterND's indices count through, the last one fastest; None where they
    are spelled otherwise, or not known."""
    maker, shape = root(indices).producer, indices.shape
    if maker is None or maker.domain or maker.op != "Concat" or not shape:
        return None
    if maker.attributes.get("axis") not in (-1, len(shape) - 1):
        return None
    found: list[Places] = []
    varied: list[int] = []
    for part in maker.inputs:
        along = None if part is None else _along(part, len(shape) - 1)
        if along is None:
            return None
        axis, places = along
        found.append(places)
        varied += [] if axis is None else [axis]
    counted = [axis for axis, size in enumerate(shape[:-1]) if size != 1]
    return found if varied == counted else None


def _along(part: Value, rank: int) -> tuple[int | None, Places] | None:
    """The axis of the grid that one part of the indices varies along, None where along none, and its places."""
    last, shape = root(part).producer, part.shape
    if last is None or last.domain or last.op != "Unsqueeze" or shape is None or len(shape) != rank + 1:
        return None
    source = last.inputs[0]
    if source is None or source.shape != shape[:-1]:  # the new axis is another one
        return None
    while source is not None and source.producer is not None and source.producer.domain == "" and (
            source.producer.op in ("Expand", "Identity")):
        source = source.producer.inputs[0]
    if source is None or source.shape is None or len(source.shape) > rank:
        return None
    wide = [axis for axis, size in enumerate(source.shape) if size != 1]
    places = _numbers(source) or _range(source)
    if len(wide) > 1 or places is None:
        return None
    axis = rank - len(source.shape) + wide[0] if wide else None
    # What is repeated along an axis writes there as often.
    return (axis, places) if places.count == (source.shape[wide[0]] if wide else dim(1)) else None


def _numbers(value: Value) -> Places | None:
    """Numbers that are known, where they are equal steps apart."""
    numbers = elements_of(value)
    if not numbers:
        return None
    steps = {after - before for before, after in pairwise(numbers)} or {dim(1)}
    step = steps.pop().value
    return Places(numbers[0], step, dim(len(numbers))) if not steps and step else None


def _range(value: Value) -> Places | None:
    """What a Range counts."""
    maker = counting(value)
    bounds = [] if maker is None else [None if bound is None else elements_of(bound) for bound in maker.inputs]
    result = None if maker is None else maker.outputs[0]
    if result is None or result.shape is None or any(not bound or len(bound) != 1 for bound in bounds):
        return None
    start, _, step = (bound[0] for bound in bounds if bound)
    return Places(start, step.value, result.shape[0]) if step.value else None
