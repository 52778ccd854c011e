"""Pairs of transposes behind values in a copy of the model, and back.

    v ─ lay_out ─▶ v, Transpose (channels last), Transpose (channels first) for each who read v ─▶ fused as if loaded
    ▲                                                                                               │
    └────── put_straight: the readers read v again, as the model's record says it is called ◀─ unfuse ─┘

The record is a metadata property of its own.  Where no library is registered ONNX Runtime takes the pairs out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import onnx
from onnx import helper

from onnxfuse.folding import Paired
from onnxfuse.rewriting.biases import bias_record
from onnxfuse.rewriting.form_record import form_record, may_change, note_form
from onnxfuse.rewriting.index import ModelIndex
from onnxfuse.rewriting.names import Names, value_names
from onnxfuse.rewriting.origin import first_output
from onnxfuse.rewriting.properties import forget_property
from onnxfuse.rewriting.readers import drop_unread, reread, with_nodes

VERSION = 1
KEY = "onnxfuse.layouts"
"""Name of the model's metadata property."""


@dataclass(frozen=True)
class Laid:
    """A value with pairs of transposes behind it, in names of values.

    Attributes:
        value: its own; rank: its number of axes; last: of the same with its channels last.
        first: of what its readers read in its place; readers: of their first results, beside ``first``.
    """

    value: str
    rank: int
    last: str
    first: tuple[str, ...]
    readers: tuple[tuple[str, ...], ...]

    @property
    def to_last(self) -> list[int]:
        """Order of axes of the first transpose; matrices are transposed."""
        return [1, 0] if self.rank == 2 else [0, *range(2, self.rank), 1]

    @property
    def to_first(self) -> list[int]:
        """Order of axes of the second one."""
        return [1, 0] if self.rank == 2 else [0, self.rank - 1, *range(1, self.rank - 1)]


@dataclass(frozen=True)
class LayoutRecord:
    """The pairs that a model was given."""

    laid: tuple[Laid, ...]


def lay_out(model: onnx.ModelProto, paired: Sequence[Paired]) -> onnx.ModelProto:
    """A copy of a model with pairs of transposes behind some values, and a record of them; the model itself where there
    are none or onnxfuse has been over it."""
    if not may_change(model) or layout_record(model) is not None:
        return model
    index = ModelIndex.of(model)
    names = Names(value_names(index))
    found = [
        Laid(each.value, each.rank, names.give(f"{each.value}_channels_last"),
             tuple(names.give(f"{each.value}_channels_first") for _ in each.readers), each.readers)
        for each in paired if each.value not in index.bound
    ]
    return _laid_out(model, found) if found else model


def laid_out_again(model: onnx.ModelProto, fused: onnx.ModelProto) -> onnx.ModelProto:
    """A model with the pairs that a fused model of it has; the model itself where it has none.

    Raises:
        ModelError: a record of the fused model cannot be read.
    """
    record, biases = layout_record(fused), bias_record(fused)
    # Where biases stay with their convolutions, these compute what their sums would.
    bare = {} if biases is None else {each.bare: each.result for each in biases.separated}
    return model if record is None else _laid_out(model, record.laid, bare)


def _laid_out(
    model: onnx.ModelProto, laid: Sequence[Laid], bare: Mapping[str, str] | None = None
) -> onnx.ModelProto:
    """A copy of the model with these pairs, as far as it has the values, and the record; ``bare``: other names of
    readers' results, where the model has not their own."""
    index = ModelIndex.of(model)
    known = {each.value: each for each in laid if index.defines(each.value)}
    other = {name: result for name, result in (bare or {}).items() if name not in index.producer}
    instead = {(each.value, other.get(reader, reader)): first for each in known.values()
               for first, readers in zip(each.first, each.readers, strict=True) for reader in readers}
    names = Names({node.name for node in index.nodes})
    first = [pair for each in known.values() if each.value not in index.producer for pair in _pairs(each, "", names)]
    result = with_nodes(model, index, instead, lambda node: (
        pair for name in node.output if name in known for pair in _pairs(known[name], node.name, names)), first)
    note_form(result, KEY, VERSION, asdict(LayoutRecord(tuple(known.values()))))
    return result


def _pairs(each: Laid, owner: str, names: Names) -> Iterator[onnx.NodeProto]:
    """The transposes behind a value; ``owner``: the name of the node that computes it."""

    def named(what: str) -> str:
        return names.give(f"{owner}_{what}") if owner else ""

    yield helper.make_node("Transpose", [each.value], [each.last], name=named("channels_last"), perm=each.to_last)
    for first in each.first:
        yield helper.make_node("Transpose", [each.last], [first], name=named("channels_first"), perm=each.to_first)


def put_straight(model: onnx.ModelProto) -> None:
    """Take the pairs out of a model without fused nodes; nothing where it has none.

    In a model that was edited since, what the edit left of them is taken out.

    Raises:
        ModelError: the model's record cannot be read.
    """
    record = layout_record(model)
    if record is None:
        return
    forget_property(model, KEY)
    graph = model.graph
    producer = {name: node for node in graph.node for name in node.output}
    instead: dict[str, str] = {}
    for each in record.laid:
        one = producer.get(each.last)
        for name in each.first if one is not None and _is(one, each.value, each.to_last) else ():
            other = producer.get(name)
            if other is not None and _is(other, each.last, each.to_first):
                instead[name] = each.value
    reread(graph, instead)
    transposes = {first_output(node) for node in graph.node if node.op_type == "Transpose"}
    for wanted in (instead.keys(), {each.last for each in record.laid}):
        drop_unread(graph, wanted & transposes)


def _is(node: onnx.NodeProto, operand: str, order: Sequence[int]) -> bool:
    """Whether a node is the transpose of a value that it was."""
    return node.op_type == "Transpose" and list(node.input) == [operand] and [
        list(helper.get_attribute_value(each)) for each in node.attribute if each.name == "perm"] == [list(order)]


def layout_record(model: onnx.ModelProto) -> LayoutRecord | None:
    """The record of a model with pairs of transposes, or None.

    Raises:
        ModelError: it is no record that this release can read.
    """
    return form_record(model, LayoutRecord, KEY, VERSION, "Values were laid out")
