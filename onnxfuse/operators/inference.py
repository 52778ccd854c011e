"""Types and symbolic sizes of every value, in one pass over the graph.

Results follow from what operators do, in this order: the operator's own shape function; onnx's inference for that
node; what the model file states.  Where broadcasting leaves open which of two symbolic sizes is 1, or an operator's
result depends on contents, a size that the file states is used and recorded in ``Graph.assumptions``; kernels check
sizes when they run, so that a wrong statement ends in a message and never in a wrong answer.

A size that grows past what can be followed in bounded time (``Dim.is_followed``) is unknown from there on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnxfuse.graph.bodies import enter, results
from onnxfuse.graph.build import build_graph
from onnxfuse.graph.context import INTEGERS, MAX_ELEMENTS, MOST_AXES, Type, TypeContext, elements_of
from onnxfuse.graph.dims import MOST_PRODUCTS, Dim, dim
from onnxfuse.graph.inference import left_out
from onnxfuse.graph.load import LoadedModel, from_proto, load_model
from onnxfuse.graph.model import Assumption, Demand, Graph, Node, Value
from onnxfuse.graph.unify import equal_symbols, unify
from onnxfuse.operators.fused import DOMAIN, fused_node
from onnxfuse.operators.numbers import follow
from onnxfuse.operators.record import operator_of


def infer(graph: Graph) -> Graph:
    """The graph with dtype, shape and elements of all its values filled in (the values are shared with the given one).

    Where nothing is known of a value's element type or even of its rank, it stays None.  Bodies are inferred where
    their node stands, and give it its results.
    """
    assumptions: list[Assumption] = []
    demands: list[Demand] = []
    owned: dict[Node, list[Graph]] = {}
    for body in graph.bodies:
        assert body.owner is not None, "a body has an owner"
        owned.setdefault(body.owner, []).append(body)
    bodies: list[Graph] = []
    for value in graph.values.values():
        if value.producer is None and value.is_constant and value.dtype in INTEGERS:
            value.elements = elements_of(value)
    for node in graph.nodes:
        inside = enter(owned[node], infer) if node in owned else []
        bodies += inside
        for output, found in zip(node.outputs, _types(node, graph, (assumptions, demands), inside), strict=True):
            if output is not None:
                output.dtype, output.shape, output.elements = found
        follow(node)
    once = {(each.left, each.right, each.kind): each for each in reversed(demands)}
    return replace(graph, assumptions=tuple(assumptions), demands=tuple(once.values())[::-1], bodies=tuple(bodies))


def load_graph(model: str | Path | onnx.ModelProto | LoadedModel) -> Graph:
    """Load, build and infer: the graph of a model file, or of a model in memory.  Symbols that operators need to be
    equal are one.

    Raises:
        ModelError: the file holds no valid ONNX model.
        ExternalDataError: its weights are missing, too short or outside its folder.
    """
    if isinstance(model, onnx.ModelProto):
        model = from_proto(model)
    elif not isinstance(model, LoadedModel):
        model = load_model(model)
    graph, same = infer(build_graph(model)), dict[str, str]()
    while found := equal_symbols(graph):
        same = {name: found.get(other, other) for name, other in same.items()} | found
        built = build_graph(model)
        unify(built, same)
        graph = infer(built)
    return replace(graph, same=same)


def output_types(node: Node, graph: Graph) -> list[Type]:
    """Element type, sizes and contents as sizes of each of a node's outputs, from its inputs as they stand.

    The node need not be of the graph, which gives the operators' versions.
    """
    return _types(node, graph, ([], []))


def _types(
    node: Node, graph: Graph, notes: tuple[list[Assumption], list[Demand]], bodies: Sequence[Graph] = ()
) -> list[Type]:
    context = TypeContext(node, graph.opsets.get(node.domain, 1), *notes)
    record = operator_of(node)
    function = None if record is None else record.types
    found: list[Type] = []
    if (node.domain, node.op) in graph.functions:
        function = fused_node if node.domain == DOMAIN and "plan" in node.attributes else None
    if bodies:
        function = partial(results, bodies=bodies)
    if function is not None:
        try:
            found, node.broken = list(function(context)), False
        except (IndexError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RuntimeError):
            # The node breaks its operator's rules (a missing input, ranks that do not fit).  ONNX Runtime will say
            # so; here its outputs are unknown, and nothing is fused with them.
            found, node.broken = [], True
    elif not node.has_subgraph and (node.domain, node.op) not in graph.functions:
        found = _from_onnx(node, graph, context)
    result = []
    for index, value in enumerate(node.outputs):
        kind = found[index] if index < len(found) else Type()
        result.append(_bounded(_completed(kind, value), context, index))
    return result


def _bounded(found: Type, context: TypeContext, output: int) -> Type:
    """What was found, without sizes that are not followed: those of one value multiply to a bounded number of terms."""
    shape, elements = found.shape, found.elements
    if shape is not None and len(shape) > MOST_AXES:
        shape = None
    if shape is not None:
        terms, sizes = 1, []
        for axis, size in enumerate(shape):
            terms *= max(len(size.terms), 1)
            if (len(size.terms) > 1 and terms > MOST_PRODUCTS) or not size.is_followed():
                terms //= max(len(size.terms), 1)
                size = context.unknown(axis, len(shape), output)
            sizes.append(size)
        shape = tuple(sizes)
    if elements is not None and not all(size.is_followed() for size in elements):
        elements = None
    return Type(found.dtype, shape, elements)


def _completed(found: Type, value: Value | None) -> Type:
    """What was found, with what the model file states where nothing was."""
    if value is None:
        return found
    dtype = value.dtype if found.dtype is None else found.dtype
    shape = value.declared if found.shape is None else found.shape
    elements = found.elements
    if elements is not None and (len(elements) > MAX_ELEMENTS or dtype not in INTEGERS):
        elements = None
    return Type(dtype, shape, elements)


def _from_onnx(node: Node, graph: Graph, context: TypeContext) -> list[Type]:
    """What onnx's own inference tells of a single node."""
    version = graph.opsets.get(node.domain)
    if version is None or not onnx.defs.has(node.op, version, node.domain):
        return []
    sizes: dict[str, Dim] = {}
    try:
        types = {value.name: _to_proto(value, sizes) for value in node.inputs if value is not None}
        data = {
            value.name: numpy_helper.from_array(value.constant, value.name)
            for value in node.inputs if value is not None and value.constant is not None
        }
        proto = helper.make_node(
            node.op, [value.name if value else "" for value in node.inputs],
            [f"output{index}" for index in range(len(node.outputs))], domain=node.domain,
            **{name: _attribute(content) for name, content in node.attributes.items()},
        )
        if left_out(proto, typed=all(value is None or value.dtype is not None for value in node.inputs)):
            return []
        schema = onnx.defs.get_schema(node.op, version, node.domain)
        imports = [helper.make_opsetid(domain, number) for domain, number in graph.opsets.items()]
        inferred = onnx.shape_inference.infer_node_outputs(schema, proto, types, data, opset_imports=imports)
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError, RuntimeError, ValueError, TypeError):
        # No inference for this operator, a missing input, a size past 64 bits, or an attribute too large to have been
        # read: its types stay unknown.
        return []
    return [_from_proto(inferred.get(f"output{index}"), sizes, context, index) for index in range(len(node.outputs))]


def _attribute(content: Any) -> Any:
    return numpy_helper.from_array(content) if isinstance(content, np.ndarray) else content


def _to_proto(value: Value, sizes: dict[str, Dim]) -> onnx.TypeProto:
    if value.dtype is None:
        return onnx.TypeProto()
    if value.shape is None:
        return helper.make_tensor_type_proto(value.dtype, None)
    entries: list[int | str] = []
    for size in value.shape:
        if size.value is None:
            sizes[str(size)] = size
        entries.append(str(size) if size.value is None else size.value)
    return helper.make_tensor_type_proto(value.dtype, entries)


def _from_proto(kind: onnx.TypeProto | None, sizes: Mapping[str, Dim], context: TypeContext, output: int) -> Type:
    if kind is None or not kind.HasField("tensor_type"):
        return Type()
    dtype = kind.tensor_type.elem_type or None
    if not kind.tensor_type.HasField("shape"):
        return Type(dtype)
    entries = kind.tensor_type.shape.dim
    shape = []
    for axis, entry in enumerate(entries):
        if entry.HasField("dim_value"):
            shape.append(dim(entry.dim_value))
        elif entry.dim_param in sizes:
            shape.append(sizes[entry.dim_param])
        else:
            shape.append(context.unknown(axis, len(entries), output))
    return Type(dtype, tuple(shape))

