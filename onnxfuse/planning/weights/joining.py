"""Products of one operand as one, by weights that lie side by side: each result is a part of its columns.

    x ─┬─ Conv w ─ Add b ─ Relu ─▶           the kernel computes
       ├─ Conv v ─ Add c ─ Relu ─▶           x (w beside v beside u), each result of columns of its own
       └─ Conv u ─▶

The operand is read once, and there are as many tiles as of all of them.  It is a fold as others are
(``collapsing``): the function holds the nodes as they are, and their own weights are operands in host memory.  No
number of any weight is another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxfuse.graph.constants import numpy_type
from onnxfuse.graph.dims import dim
from onnxfuse.graph.model import Node, Value
from onnxfuse.ir.scalars import TYPES
from onnxfuse.operators.classes import weights_axis
from onnxfuse.planning.weights.collapsing import Fold, Folds, features, is_product

MOST_JOINED = 4
"""Products that are joined: a fused node has room for the weights and biases of so many."""

VECTOR = 16
"""Bytes of columns that are stored at once: each result begins with such."""


@dataclass
class Joins:
    """Weights side by side in one graph; ``folds``: what else is folded there, with which their names and bytes
    count."""

    folds: Folds
    _known: dict[tuple[Node, ...], Fold | None] = field(default_factory=dict, repr=False)

    def joinable(self, node: Node) -> bool:
        """Whether a product's weights may lie beside others: they are its own, and its columns whole vectors."""
        node = _straight(node)
        if not is_product(node) or node.body is not None or node.attributes.get("group", 1) != 1:
            return False
        weights = _weights(node)
        assert weights.dtype is not None
        own = self.folds.graph.values.get(weights.name)
        if own is None or own.external or len(own.consumers) != 1 or own.is_output or own.inner:
            return False
        return features(node) * TYPES[weights.dtype].size % VECTOR == 0 and _has_known_bias(node)

    def siblings(
        self, products: Sequence[Node], operand: Callable[[Node], object], meet: Callable[[Node, Node], bool]
    ) -> Iterator[list[Node]]:
        """Products of one ``operand`` that may be one, as few groups as hold them of much the same size; not those of
        which results ``meet``, nor those that read the same value and have the same width all, which need no other
        weights to be one kernel."""
        found: dict[object, list[Node]] = {}
        for node in filter(self.joinable, products):
            found.setdefault((node.op, operand(node), _window(node)), []).append(node)
        for same in found.values():
            lone = [node for node in same if not any(meet(node, other) for other in same if other is not node)]
            groups = -(-len(lone) // MOST_JOINED)
            for place in range(groups):
                group = lone[place::groups]
                if len({(node.inputs[0], features(node)) for node in group}) > 1:
                    yield group

    def of(self, products: Sequence[Node]) -> Fold | None:
        """Such products as one; None where the file would grow too large."""
        key = tuple(sorted(products, key=lambda node: node.index))
        if key not in self._known:
            grown = sum(_bytes(node) for node in key)
            self._known[key] = self._joined(key) if self.folds.admits(key[0], grown) else None
        return self._known[key]

    def _joined(self, products: tuple[Node, ...]) -> Fold:
        first, turned = products[0], _turned(products[0])
        made = [self._beside(products, weights_axis(first), lambda node: _weights(_straight(node)))]
        read, back = made, tuple[Node, ...]()
        if turned is not None:
            # They lie as a session would lay them out, and are read back as each product's are.
            straight, order = made[0], tuple(turned[0].attributes["perm"])
            made = [self._turned_round(first, straight, order)]
            back = (replace(turned[1], inputs=(made[0],), outputs=(straight,)),)
        if any(_bias(node) is not None for node in products):
            bias = self._beside(products, 0, lambda node: _bias(node) or _nothing(node))
            made, read = [*made, bias], [*read, bias]
        result, columns = first.outputs[0], dim(sum(map(features, products)))
        assert result is not None and result.shape is not None
        channel = len(result.shape) - 1 if first.op == "MatMul" else 1
        whole = Value(f"{result.name}_joined", result.dtype,
                      (*result.shape[:channel], columns, *result.shape[channel + 1:]))
        attributes = {name: value for name, value in first.attributes.items() if name != "kernel_shape"}
        one = replace(first, inputs=(first.inputs[0], *read), outputs=(whole,), attributes=attributes)
        # Its parts have the sizes that the results have.
        parts = replace(first, op="Split", domain="", inputs=(whole,), attributes={"axis": channel},
                        outputs=tuple(node.outputs[0] for node in products))
        turns = [pair for node in products if (pair := _turned(node)) is not None]
        instead: dict[Node, tuple[Node, ...]] = dict.fromkeys((*products, *(each for _, each in turns)), ())
        instead[first] = (*back, one, parts)
        words = f"{len(products)} products of one operand into one of {columns} columns, {first.label}"
        return Fold(frozenset(instead), instead, tuple(made), words, collapses=False,
                    beneath=frozenset(each for each, _ in turns))

    def _turned_round(self, first: Node, straight: Value, order: tuple[int, ...]) -> Value:
        """Weights with their axes in another order."""
        shape = tuple(size.value or 0 for size in straight.shape or ())
        return self.folds.constant(first, f"{straight.name}_turned", tuple(shape[axis] for axis in order), lambda: (
            np.ascontiguousarray(_contents(straight).transpose(order))))

    def _beside(self, products: Sequence[Node], axis: int, read: Callable[[Node], Value]) -> Value:
        """Constants of products side by side along an axis, which are read when they are written."""
        values = [read(node) for node in products]
        shapes = [tuple(size.value or 0 for size in value.shape or ()) for value in values]
        shape = (*shapes[0][:axis], sum(each[axis] for each in shapes), *shapes[0][axis + 1:])
        return self.folds.constant(products[0], f"{values[0].name}_joined", shape, lambda: np.concatenate(
            [_contents(value) for value in values], axis))


def _window(node: Node) -> object:
    """What products of one operand have to have in common to be columns of one: types, sizes, how windows lie."""
    weights, axis, turned = _weights(node), weights_axis(node), _turned(node)
    order = None if turned is None else tuple(turned[0].attributes["perm"])
    others = tuple(size for place, size in enumerate(weights.shape or ()) if place != axis)
    attributes = {name: repr(value) for name, value in node.attributes.items() if name != "kernel_shape"}
    return weights.dtype, others, order, tuple(sorted(attributes.items()))


def _turned(node: Node) -> tuple[Node, Node] | None:
    """What turns a product's constant weights round when a session is created, and what takes them back for it."""
    value = node.inputs[1] if len(node.inputs) > 1 else None
    back = None if value is None or value.is_output or value.consumers != [node] else value.producer
    between = None if back is None or not _transposes(back) else back.inputs[0]
    turn = None if between is None or between.is_output or between.consumers != [back] else between.producer
    if back is None or turn is None or not _transposes(turn) or turn.inputs[0] is None:
        return None
    first, second = (tuple(each.attributes["perm"]) for each in (turn, back))
    undone = tuple(first[axis] for axis in second) == tuple(range(len(first)))
    return (turn, back) if undone and turn.inputs[0].is_constant else None


def _transposes(node: Node) -> bool:
    """Whether a node is a transpose that says how."""
    return node.op == "Transpose" and not node.domain and "perm" in node.attributes


def _straight(node: Node) -> Node:
    """A product with the weights that the model has, where these are turned round and back for it."""
    turned = _turned(node)
    return node if turned is None else replace(node, inputs=(node.inputs[0], turned[0].inputs[0], *node.inputs[2:]))


def _bias(node: Node) -> Value | None:
    """A product's own bias."""
    return node.inputs[2] if len(node.inputs) > 2 else None


def _has_known_bias(node: Node) -> bool:
    """Whether a product has no bias of its own, or one constant for each column."""
    bias = _bias(node)
    if bias is None:
        return True
    known = bias.is_constant and bias.producer is None and not bias.external and (
        bias.constant is not None or bias.contents is not None)
    return known and node.attributes.get("beta", 1.0) == 1.0 and bias.shape == (dim(features(node)),)


def _nothing(node: Node) -> Value:
    """A bias that adds nothing."""
    dtype = _weights(node).dtype
    assert dtype is not None
    zeros = np.zeros(features(node), numpy_type(dtype))
    return Value(f"{_weights(node).name}_bias", dtype, (dim(features(node)),), zeros, is_constant=True)


def _weights(node: Node) -> Value:
    """A product's weights."""
    weights = node.inputs[1]
    assert weights is not None
    return weights


def _contents(value: Value) -> NDArray[Any]:
    """A constant's, however large."""
    read = value.constant if value.contents is None else value.contents()
    assert read is not None
    return read


def _bytes(node: Node) -> int:
    """Of a product's weights."""
    weights = _weights(node)
    assert weights.dtype is not None
    return TYPES[weights.dtype].size * prod(size.value or 0 for size in weights.shape or ())
