"""Arithmetic on 16-bit constants as float32 between casts, in a copy of a model, and back.

    r = Mul(v, g) ─ widen ─▶ v_wide = Cast(v), g_wide = Cast(g), r_wide = Mul(v_wide, g_wide), r = Cast(r_wide)
          ▲                                                   │
          └─── narrow: what the model's record says ◀─ unfuse ┘

ONNX Runtime computes all that once, when a session is created, on a GPU or not, and nothing of it before.  The record
is a metadata property of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import onnx
from onnx import TensorProto, helper

from onnxfuse.graph.model import Node
from onnxfuse.operators.classes import is_narrow
from onnxfuse.rewriting.form_record import form_record, may_change, note_form
from onnxfuse.rewriting.index import ModelIndex
from onnxfuse.rewriting.names import Names, value_names
from onnxfuse.rewriting.origin import first_output
from onnxfuse.rewriting.properties import forget_property
from onnxfuse.rewriting.readers import drop_unread, links_of, rename

VERSION = 1
KEY = "onnxfuse.constants"
"""Name of the model's metadata property."""


@dataclass(frozen=True)
class Wide:
    """A value and what stands for it in float32, by name; dtype: its own type."""

    value: str
    wide: str
    dtype: int


@dataclass(frozen=True)
class Widened:
    """A node that computes in float32: what it reads of those that are cast, and what it computed."""

    operands: tuple[Wide, ...]
    results: tuple[Wide, ...]


@dataclass(frozen=True)
class ConstantsRecord:
    """The nodes of a model that compute in float32, by the first of what they computed."""

    widened: Mapping[str, Widened]


def widen(model: onnx.ModelProto, nodes: Sequence[Node]) -> onnx.ModelProto:
    """A copy of a model in which these nodes of its main graph compute in float32, with a record of them; the model
    itself where there are none or onnxfuse has been over it."""
    if not may_change(model) or constants_record(model) is not None:
        return model
    index = ModelIndex.of(model)
    names = Names(value_names(index))
    read: dict[str, Wide] = {}
    found = {}
    for node in nodes:
        made = [value for value in node.outputs if value is not None]
        if index.bound.intersection(value.name for value in made):
            continue
        operands = [value for value in dict.fromkeys(node.inputs) if value is not None and is_narrow(value)]
        for value in operands:
            if value.name not in read:
                read[value.name] = Wide(value.name, names.give(f"{value.name}_as_float"), value.dtype or 0)
        results = (Wide(value.name, names.give(f"{value.name}_wide"), value.dtype or 0)
                   for value in made if is_narrow(value))
        found[made[0].name] = Widened(tuple(read[value.name] for value in operands), tuple(results))
    return _widened(model, found) if found else model


def widened_again(model: onnx.ModelProto, fused: onnx.ModelProto) -> onnx.ModelProto:
    """A model with the nodes of float32 that a fused model of it has so; the model itself where it has none.

    Raises:
        ModelError: the fused model's record cannot be read.
    """
    record = constants_record(fused)
    return model if record is None else _widened(model, record.widened)


def _widened(model: onnx.ModelProto, found: Mapping[str, Widened]) -> onnx.ModelProto:
    """A copy of the model with these nodes of float32, as far as it has them, and the record."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    nodes = result.graph.node
    del nodes[:]
    cast: set[str] = set()
    for node in model.graph.node:
        each = found.get(first_output(node), _AS_IT_IS)
        for operand in each.operands:
            if operand.wide not in cast:
                nodes.append(helper.make_node("Cast", [operand.value], [operand.wide], to=TensorProto.FLOAT))
                cast.add(operand.wide)
        nodes.append(node)
        rename(nodes[-1].input, {operand.value: operand.wide for operand in each.operands})
        rename(nodes[-1].output, {made.value: made.wide for made in each.results})
        for made in each.results:
            nodes.append(helper.make_node("Cast", [made.wide], [made.value], to=made.dtype))
    note_form(result, KEY, VERSION, asdict(ConstantsRecord(found)))
    return result


_AS_IT_IS = Widened((), ())


def narrow(model: onnx.ModelProto) -> None:
    """Have nodes compute in their own types again, in a model without fused nodes; nothing where all do.

    In a model that was edited since, nodes whose casts are not what they were keep them.

    Raises:
        ModelError: the model's record cannot be read.
    """
    record = constants_record(model)
    if record is None:
        return
    forget_property(model, KEY)
    graph = model.graph
    producer, readers = links_of(graph)

    def is_cast(name: str, value: str) -> bool:
        node = graph.node[producer[name]] if name in producer else None
        return node is not None and node.op_type == "Cast" and list(node.input) == [value]

    gone = []
    for name, each in record.widened.items():
        place = producer.get(each.results[0].wide if each.results else name)
        operands = all(is_cast(part.wide, part.value) for part in each.operands)
        results = all(is_cast(part.value, part.wide) and readers[part.wide] == 1 for part in each.results)
        if place is None or not operands or not results:
            continue
        node = graph.node[place]
        if {part.wide for part in each.operands} <= set(node.input):
            gone += [producer[part.value] for part in each.results]
            rename(node.input, {part.wide: part.value for part in each.operands})
            rename(node.output, {part.wide: part.value for part in each.results})
    for place in sorted(gone, reverse=True):
        del graph.node[place]
    drop_unread(graph, {part.wide for each in record.widened.values() for part in each.operands})


def constants_record(model: onnx.ModelProto) -> ConstantsRecord | None:
    """The record of a model whose constants are computed in float32, or None.

    Raises:
        ModelError: it is no record that this release can read.
    """
    return form_record(model, ConstantsRecord, KEY, VERSION, "Arithmetic on constants was widened")
