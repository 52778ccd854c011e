"""Biases of convolutions and products as sums behind them in a copy of the model, and back.

    y = Conv(x, w, b) ─ separate ─▶ c = Conv(x, w), y = Add(c, b spread over pixels) ─▶ fused as if it were loaded
    y = Gemm(x, w, b)               c = Gemm(x, w), y = Sum(c, b)                             │
          ▲                                                                                   │
          └────── rejoin: what the model's record says was there ◀──── unfuse ────────────────┘

The record is a metadata property of its own, so that the records of fused nodes speak of the model with its biases
apart.  Where no library is registered ONNX Runtime folds the sums in again, behind a Gemm those of that operator alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import onnx
from onnx import helper

from onnxfuse.folding import Bias
from onnxfuse.rewriting.form_record import form_record, may_change, note_form
from onnxfuse.rewriting.index import ModelIndex, reads_of
from onnxfuse.rewriting.names import Names, value_names
from onnxfuse.rewriting.order import put_back
from onnxfuse.rewriting.origin import first_output
from onnxfuse.rewriting.properties import forget_property
from onnxfuse.rewriting.readers import links_of

VERSION = 1
KEY = "onnxfuse.biases"
"""Name of the model's metadata property."""


_SUMS = {"Conv": "Add", "Gemm": "Sum"}
"""The operator that ONNX Runtime folds into each."""


@dataclass(frozen=True)
class Separated:
    """A convolution or a product whose bias stands behind it, in names of values.

    Attributes:
        result: what it computed, and the sum computes now; bare: what it computes now.
        operand: the bias as it read it; stored: the initialiser that is; spread: the one that the sum reads, with as
            many axes of one element as are ``behind`` the channels.  A product's sum reads the ``operand``.
    """

    result: str
    bare: str
    operand: str
    stored: str = ""
    spread: str = ""
    behind: int = 0

    @property
    def addend(self) -> str:
        """What the sum reads."""
        return self.spread or self.operand


@dataclass(frozen=True)
class BiasRecord:
    """What a model had before biases stood behind their convolutions.

    Attributes:
        separated: those that gave theirs up.
        initializers: number of initialisers; gone: place and name of those that nothing read any more.
    """

    separated: tuple[Separated, ...]
    initializers: int
    gone: tuple[tuple[int, str], ...] = ()


def separate(model: onnx.ModelProto, biases: Mapping[str, Bias]) -> onnx.ModelProto:
    """A copy of a model in which some biases stand behind their convolutions and products, with a record of what was
    there; the model itself where there are none or onnxfuse has been over it.

    Args:
        biases: by what the convolutions and products compute.
    """
    if not may_change(model) or bias_record(model) is not None:
        return model
    index = ModelIndex.of(model)
    names = Names(value_names(index))
    spreads: dict[Bias, str] = {}
    found = []
    for node in index.nodes:
        result = first_output(node)
        if result not in biases or index.bound & {result, biases[result].stored, *node.input}:
            continue
        bias, bare = biases[result], names.give(f"{result}_without_bias")
        if not bias.stored:
            found.append(Separated(result, bare, node.input[2]))
            continue
        if bias not in spreads:
            spreads[bias] = names.give(f"{bias.stored}_spread")
        found.append(Separated(result, bare, node.input[2], bias.stored, spreads[bias], bias.rank - 2))
    return _separated(model, found) if found else model


def separated_again(model: onnx.ModelProto, fused: onnx.ModelProto, *, products: bool = False) -> onnx.ModelProto:
    """A model with biases apart where those of a fused model of it are; the model itself where none are.

    Args:
        products: leave those of convolutions.

    Raises:
        ModelError: the fused model's record cannot be read.
    """
    record = bias_record(fused)
    found = [] if record is None else [each for each in record.separated if not (products and each.stored)]
    return _separated(model, found) if found else model


def _separated(model: onnx.ModelProto, found: Sequence[Separated]) -> onnx.ModelProto:
    """A copy of the model with these biases apart, as far as it has them, and the record."""
    index = ModelIndex.of(model)
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    known = {each.result: each for each in found if not each.stored or each.stored in index.initializers}
    names = Names({node.name for node in index.nodes})
    del graph.node[:]
    for node in index.nodes:
        graph.node.append(node)
        each = known.get(first_output(node))
        if each is not None:
            bare = graph.node[-1]
            del bare.input[2:]
            bare.output[0] = each.bare
            name = names.give(f"{node.name}_bias") if node.name else ""
            graph.node.append(helper.make_node(_SUMS[node.op_type], [each.bare, each.addend], [each.result], name=name))
    for spread, each in {each.spread: each for each in known.values() if each.stored}.items():
        tensor = graph.initializer.add()
        tensor.CopyFrom(index.graph.initializer[index.initializers[each.stored]])
        tensor.name = spread
        tensor.dims.extend([1] * each.behind)
    read = {name for node in graph.node for name in reads_of(node)}
    kept = read.union(index.inputs, index.outputs, index.bound, index.infos)
    gone = sorted((index.initializers[name], name) for name in {each.stored for each in known.values()} - {"", *kept})
    for place, _ in reversed(gone):
        del graph.initializer[place]
    record = BiasRecord(tuple(known.values()), len(index.initializers), tuple(gone))
    note_form(result, KEY, VERSION, asdict(record))
    return result


def separated_sums(model: onnx.ModelProto) -> frozenset[str]:
    """What the sums compute that add biases.

    Raises:
        ModelError: the model's record cannot be read.
    """
    record = bias_record(model)
    return frozenset() if record is None else frozenset(each.result for each in record.separated)


def rejoin(model: onnx.ModelProto) -> None:
    """Give convolutions and products their biases back, in a model without fused nodes; nothing where none gave one up.

    In a model that was edited since, what the edit left of the old names is put back.

    Raises:
        ModelError: the model's record cannot be read.
    """
    record = bias_record(model)
    if record is None:
        return
    forget_property(model, KEY)
    graph = model.graph
    producer, readers = links_of(graph)
    sums = []
    for each in record.separated:
        if each.bare not in producer or each.result not in producer:
            continue
        bare, behind = graph.node[producer[each.bare]], graph.node[producer[each.result]]
        as_left = list(behind.input) == [each.bare, each.addend] and readers[each.bare] == 1
        if as_left and behind.op_type == _SUMS.get(bare.op_type) and len(bare.input) == 2:
            bare.input.append(each.operand)
            bare.output[0] = each.result
            sums.append(producer[each.result])
    for place in sorted(sums, reverse=True):
        del graph.node[place]
    _restore_weights(graph, record)


def _restore_weights(graph: onnx.GraphProto, record: BiasRecord) -> None:
    """Put the biases themselves back in the place of what was spread over channels."""
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    spreads = {each.stored: each.spread for each in record.separated if each.spread in tensors}
    entries = []
    for place, name in record.gone:
        if name in spreads and name not in tensors:
            tensor = onnx.TensorProto()
            tensor.CopyFrom(tensors[spreads[name]])
            tensor.name = name
            del tensor.dims[1:]
            entries.append((place, tensor))
    read = {name for node in graph.node for name in reads_of(node)}
    left = {each.spread for each in record.separated} - read
    for place in reversed([place for place, tensor in enumerate(graph.initializer) if tensor.name in left]):
        del graph.initializer[place]
    put_back(graph.initializer, entries, record.initializers)


def bias_record(model: onnx.ModelProto) -> BiasRecord | None:
    """The record of a model whose convolutions gave up biases, or None.

    Raises:
        ModelError: it is no record that this release can read.
    """
    return form_record(model, BiasRecord, KEY, VERSION, "Biases were taken apart")
