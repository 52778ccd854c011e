"""Which values around convolutions may lie with their channels last.

    v ─▶ Transpose (channels last) ─▶ Transpose (channels first) ─▶ each reader

A pair of transposes changes nothing.  Where a region takes in the first of them with what computes a value, and others
the second with what reads it, the value lies channels-last between them, as kernels of convolutions read it best; where
none does, ONNX Runtime takes both out.  Pairs stand at values where one region may end and another begin: before
convolutions and whatever else is more than arithmetic on one such value, and before several readers.  Weights have one
too; the first half of it is computed once, when a session is created.  So have weights of float32 products, which
kernels of four warps together read where neighbours are those that are summed over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from onnxfuse.graph.dims import Dim
from onnxfuse.graph.model import Graph, Node, Value
from onnxfuse.operators import OperatorClass, lowering_of
from onnxfuse.operators.classes import (
    FLOAT,
    INT8,
    TYPES,
    UINT8,
    channels,
    is_convolution,
    is_narrow,
    is_transposed_convolution,
    multiplied,
    quantised,
    slides,
)
from onnxfuse.operators.record import operator_of

STAGE = "layouts"
"""The id that leaves this stage out."""

VECTOR = 16
"""Bytes of channels that a kernel reads at once: a value of which no such vectors make up all gains nothing."""

KEEPS = frozenset({"Concat", "Split", "Resize", "Upsample", "Pad", "MaxPool", "AveragePool", "BatchNormalization",
                   "GroupNormalization", "InstanceNormalization"})
"""Operators beside arithmetic whose results have their channels where their operands have them."""


@dataclass(frozen=True)
class Paired:
    """A value with a pair of transposes behind it.

    Attributes:
        value: its name; rank: its number of axes.
        readers: those who share the second transpose, by the names of their first results.
    """

    value: str
    rank: int
    readers: tuple[tuple[str, ...], ...]


def paired(graph: Graph, view: Graph, turns: bool = False) -> tuple[Paired, ...]:
    """The values of the main graph that may lie channels-last, and where it ``turns`` them weights of products of
    float32 that may lie transposed, in graph order; ``view`` is its canonical view."""
    found = [*_channels_last(graph, view), *(_turned(graph, view) if turns else ())]
    order = {name: place for place, name in enumerate(graph.values)}
    return tuple(sorted(found, key=lambda each: order[each.value]))


def is_turnable(node: Node) -> bool:
    """Whether a node is a product of float32 by constant weights whose neighbours are not those that it sums over."""
    if node.domain or node.op not in ("MatMul", "Gemm") or node.broken or node.attributes.get("transB", 0):
        return False
    weights = node.inputs[1]
    if weights is None or not weights.is_constant or weights.dtype != FLOAT or weights.rank != 2:
        return False
    return weights.shape is not None and weights.shape[0].multiple_of() * TYPES[FLOAT].size % VECTOR == 0


def _turned(graph: Graph, view: Graph) -> Iterator[Paired]:
    """Weights of such products, each of which reads them behind a transpose of its own."""
    readers: dict[str, list[tuple[str, ...]]] = {}
    for node in filter(is_turnable, view.nodes):
        weights = node.inputs[1]
        assert weights is not None
        for original in node.originals:
            if any(value is not None and value.name == weights.name for value in original.inputs):
                first = next((each.name for each in original.outputs if each is not None), "")
                readers.setdefault(weights.name, []).append((first,))
    for name, each in readers.items():
        if name in graph.values and graph.values[name].is_local:
            yield Paired(name, 2, tuple(each))


def _channels_last(graph: Graph, view: Graph) -> Iterator[Paired]:
    """The values around convolutions."""
    convolutions = [node for node in view.nodes if _is_read_so(node)]
    around = _around(convolutions)
    holder = {original: node for node in view.nodes for original in (*node.originals, *node.passed)}
    for name in {**around, **_weights(convolutions)}:
        value = graph.values.get(name)
        if value is None or value.rank is None or not value.is_local or _lies_as_numbers(value, around):
            continue
        groups: dict[Node, list[str]] = {}
        for reader in value.consumers:
            first = next((each.name for each in reader.outputs if each is not None), "")
            groups.setdefault(holder.get(reader, reader), []).append(first)
        if not groups or (name in around and (_goes_on(value, around, holder) or _turns(value, groups))):
            continue
        # What no fused node may hold the runtime alone reads.
        if any(lowering_of(node) is not None for node in groups):
            yield Paired(name, value.rank, tuple(map(tuple, groups.values())))


def _lies_as_numbers(value: Value, around: Mapping[str, Value]) -> bool:
    """Whether a value is dequantised, and its pair stands before that: kernels read and write the numbers."""
    numbers = quantised(value)
    return numbers is not None and numbers.name in around and numbers.is_local


def _is_read_so(node: Node) -> bool:
    """Whether kernels read a convolution's operand best with its channels last: whole vectors of them."""
    if not (is_convolution(node) or is_transposed_convolution(node)) or node.broken or slides(node):
        return False
    _, weights = multiplied(node)
    count = channels(node)
    if weights is None or weights.shape is None or len(weights.shape) <= 2 or count is None:
        return False
    return (is_narrow(weights) or weights.dtype in (FLOAT, INT8, UINT8)) and _are_vectors(count, weights)


def _around(convolutions: Iterable[Node]) -> dict[str, Value]:
    """By name, what convolutions read and compute, and what arithmetic and ``KEEPS`` lead from there to, either way."""
    found: dict[str, Value] = {}
    waiting = [value for node in convolutions for value in (node.inputs[0], node.outputs[0])]
    known = set(convolutions)
    while waiting:
        value = waiting.pop()
        if value is None or value.name in found or not _has_pixels(value):
            continue
        found[value.name] = value
        for node in (*value.consumers, *([] if value.producer is None else [value.producer])):
            if node not in known and _keeps(node, value):
                known.add(node)
                waiting += [each for each in (*node.inputs, *node.outputs)
                            if each is not None and each.rank == value.rank and not each.is_constant]
    return found


def _has_pixels(value: Value) -> bool:
    """Whether a value has channels, in whole vectors, and more than one pixel."""
    if value.shape is None or len(value.shape) < 3 or value.is_constant:
        return False
    return _in_vectors(value) and any(size != 1 for size in value.shape[2:])


def _in_vectors(value: Value) -> bool:
    """Whether whole vectors make up a value's channels, which its second axis counts."""
    return value.shape is not None and _are_vectors(value.shape[1], value)


def _are_vectors(count: Dim, value: Value) -> bool:
    """Whether so many elements of a value are whole vectors."""
    return count.multiple_of() * TYPES[value.dtype or FLOAT].size % VECTOR == 0


def _keeps(node: Node, value: Value) -> bool:
    """Whether a node's results have their channels where a value that it has to do with has them."""
    if node.has_subgraph or any(each is not None and each.rank != value.rank for each in node.outputs):
        return False
    return node.op in KEEPS or _slides_alone(node) or _computes(node)


def _slides_alone(node: Node) -> bool:
    """Whether a node is a depthwise convolution of which each channel gives one."""
    weights = node.inputs[1] if slides(node) else None
    return weights is not None and weights.shape is not None and weights.shape[0] == node.attributes.get("group", 1)


def _computes(node: Node) -> bool:
    """Whether a node computes element by element."""
    found = operator_of(node)
    return found is not None and found.kind is OperatorClass.POINTWISE


def _weights(convolutions: Iterable[Node]) -> dict[str, Value]:
    """By name, the constant weights of convolutions over more than one pixel, or the numbers that they are dequantised
    from; those of others lie so already."""
    read = (multiplied(node)[1] for node in convolutions)
    kept = (quantised(weights) or weights for weights in read)
    return {weights.name: weights for weights in kept if weights is not None and weights.is_constant
            and _in_vectors(weights) and any(size != 1 for size in (weights.shape or ())[2:])}


def _turns(value: Value, readers: Iterable[Node]) -> bool:
    """Whether nobody but the model's own transposes read what is computed of a depthwise convolution, as ahead of a
    norm over channels: its region may take these in."""
    node = value.producer
    while node is not None and _computes(node):
        node = next((each.producer for each in node.reads() if not each.is_constant), None)
    return node is not None and slides(node) and all(each.op == "Transpose" and not each.domain for each in readers)


def _goes_on(value: Value, around: Mapping[str, Value], holder: Mapping[Node, Node]) -> bool:
    """Whether one node reads a value, and computes on it alone: a region that ends before it may as well end after, but
    for numbers that are dequantised, which whoever reads them reads as they are."""
    readers = {holder.get(reader, reader) for reader in value.consumers}
    first = next(iter(readers), None)
    if first is None or len(readers) > 1 or first.op in KEEPS or not _computes(first):
        return first is None
    result = first.outputs[0]
    if result is not None and quantised(result) is not None and not _goes_on(result, around, holder):
        return False
    return sum(each is not None and each.name in around for each in first.inputs) < 2
