"""A node that dequantises for each of a value's readers, in a copy of the model, and back.

    x = DequantizeLinear(q) ─ apart ─▶ x, x_1 = DequantizeLinear(q) twice ─▶ fused as if it were loaded
          ▲                                                                      │
          └────────── rejoined: who read x_1 reads x again ◀──── unfuse ─────────┘

The record is a metadata property of its own.  Where no library is registered ONNX Runtime does the same by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import onnx

from onnxfuse.folding import Shared
from onnxfuse.rewriting.form_record import form_record, may_change, note_form
from onnxfuse.rewriting.index import ModelIndex
from onnxfuse.rewriting.names import Names, value_names
from onnxfuse.rewriting.origin import first_output
from onnxfuse.rewriting.properties import forget_property
from onnxfuse.rewriting.readers import drop_unread, reread, with_nodes

VERSION = 1
KEY = "onnxfuse.dequantised"
"""Name of the model's metadata property."""


@dataclass(frozen=True)
class Dequantised:
    """A value that is computed several times, in names of values.

    Attributes:
        value: its own; copies: of what some readers read in its place; readers: of their first results, by copy.
    """

    value: str
    copies: tuple[str, ...]
    readers: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class DequantisedRecord:
    """The values that a model computes several times."""

    dequantised: tuple[Dequantised, ...]


def dequantise_apart(model: onnx.ModelProto, shared: Sequence[Shared]) -> onnx.ModelProto:
    """A copy of a model in which groups of readers have a node of their own, and a record of them; the model itself
    where there are none or onnxfuse has been over it."""
    if not may_change(model) or dequantised_record(model) is not None:
        return model
    index = ModelIndex.of(model)
    names = Names(value_names(index))
    found = [Dequantised(each.value, tuple(names.give(f"{each.value}_again") for _ in each.readers), each.readers)
             for each in shared if each.value in index.producer and each.value not in index.bound]
    return _apart(model, found) if found else model


def dequantised_apart_again(model: onnx.ModelProto, fused: onnx.ModelProto) -> onnx.ModelProto:
    """A model with the nodes apart that a fused model of it has so; the model itself where it has none.

    Raises:
        ModelError: the fused model's record cannot be read.
    """
    record = dequantised_record(fused)
    return model if record is None else _apart(model, record.dequantised)


def _apart(model: onnx.ModelProto, found: Sequence[Dequantised]) -> onnx.ModelProto:
    """A copy of the model with these nodes, as far as it has the values, and the record."""
    index = ModelIndex.of(model)
    known = {each.value: each for each in found if each.value in index.producer}
    instead = {(each.value, reader): copy for each in known.values()
               for copy, readers in zip(each.copies, each.readers, strict=True) for reader in readers}
    names = Names({node.name for node in index.nodes})

    def copies(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        for copy in known[first_output(node)].copies if first_output(node) in known else ():
            another = onnx.NodeProto()
            another.CopyFrom(node)
            another.name = names.give(f"{node.name}_again") if node.name else ""
            another.output[0] = copy
            yield another

    result = with_nodes(model, index, instead, copies)
    note_form(result, KEY, VERSION, asdict(DequantisedRecord(tuple(known.values()))))
    return result


def rejoin_dequantised(model: onnx.ModelProto) -> None:
    """Have one node dequantise for all readers again, in a model without fused nodes; nothing where none did.

    In a model that was edited since, what the edit left of them is put together.

    Raises:
        ModelError: the model's record cannot be read.
    """
    record = dequantised_record(model)
    if record is None:
        return
    forget_property(model, KEY)
    graph = model.graph
    producer = {name: node for node in graph.node for name in node.output}
    instead = {copy: each.value for each in record.dequantised for copy in each.copies
               if each.value in producer and copy in producer and _alike(producer[each.value], producer[copy])}
    reread(graph, instead)
    drop_unread(graph, instead)


def _alike(node: onnx.NodeProto, copy: onnx.NodeProto) -> bool:
    """Whether nodes compute the same."""
    return node.op_type == copy.op_type and list(node.input) == list(copy.input) and list(node.attribute) == list(
        copy.attribute)


def dequantised_record(model: onnx.ModelProto) -> DequantisedRecord | None:
    """The record of a model with such nodes, or None.

    Raises:
        ModelError: it is no record that this release can read.
    """
    return form_record(model, DequantisedRecord, KEY, VERSION, "Nodes that dequantise were repeated")
