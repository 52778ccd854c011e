"""A fused node's body as a model of its own, as it is or in higher precision: the reference for its kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnxfuse.errors import ModelError
from onnxfuse.graph.order import STANDARD_DOMAINS
from onnxfuse.lowering import launch
from onnxfuse.region import Region
from onnxfuse.rewriting.body import make_body
from onnxfuse.rewriting.index import ModelIndex
from onnxfuse.rewriting.metadata import IR_VERSION
from onnxfuse.rewriting.reading import FusedNode
from onnxfuse.rewriting.sites import resolve
from onnxfuse.rewriting.types import region_names, type_of

Precision = Literal["float32", "float64"]
Types = Mapping[str, tuple[str, tuple[str, ...] | None]]

_NARROW = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
_WIDE = {"float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE}
_LIFTED = {"float32": _NARROW, "float64": (*_NARROW, TensorProto.FLOAT)}
_FLOATS = (*_NARROW, TensorProto.FLOAT, TensorProto.DOUBLE)
_OPSET = 17
_DECIDING = frozenset(("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "IsNaN", "IsInf"))
"""Operators whose result is no number near another one: what they read is rounded to its declared type."""


def body_model(
    fused: Region | FusedNode, model: onnx.ModelProto, *, precision: Precision | None = None
) -> onnx.ModelProto:
    """The body of a region (``model`` is the original) or of a fused node (``model`` is the fused one).

    The inputs are the body's formal names: ``h0``.. for the host inputs that are there, ``x0``.. for the tensors; the
    outputs are ``y0``...  Regions of equal structure, types and sizes give equal models.

    Args:
        precision: "float32" or "float64" computes everything of a lower float type in this one: inputs, outputs and
            constants change their type.  Rounding remains where a kernel must round: an explicit Cast to float16 or
            bfloat16, and, before IsNaN, IsInf, a comparison or a cast to an integer, to the type that the value has
            in the body as it is.

    Raises:
        ModelError: the types of a fused node's inputs were dropped from the file.
    """
    if isinstance(fused, Region):
        function, types, functions = _of_region(fused, model)
    else:
        function = next(f for f in model.functions if f.domain == launch.DOMAIN and f.name == fused.op)
        types, functions = fused.types, model.functions
        if not {formal for formal in function.output if formal} <= types.keys():
            raise ModelError(
                "The file does not hold the types of a fused node's inputs and outputs any more.",
                place=f"node '{fused.name}'",
                remedy="Fuse the original model again.",
            )
    result = _model(function, types, functions)
    return result if precision is None else _lift(result, precision)


def _of_region(
    region: Region, model: onnx.ModelProto
) -> tuple[onnx.FunctionProto, Types, Sequence[onnx.FunctionProto]]:
    index = ModelIndex.of(model, region.place)
    body = make_body(index, resolve(index, region, region.rule))
    return body.function, {formal: type_of(value) for formal, value in region_names(region)}, model.functions


def _model(
    function: onnx.FunctionProto, types: Types, functions: Sequence[onnx.FunctionProto]
) -> onnx.ModelProto:
    calls = {(node.domain, node.op_type) for node in function.node}
    known = [f for f in functions if f.domain != launch.DOMAIN]
    called = known if any((f.domain, f.name) in calls for f in known) else []
    opsets = {entry.domain: entry for f in (*called, function) for entry in f.opset_import}
    if not any(domain in opsets for domain in STANDARD_DOMAINS):
        # A body of other domains' operators alone; who evaluates it adds casts to it.
        opsets[""] = helper.make_opsetid("", _OPSET)
    model = helper.make_model(
        helper.make_graph(
            list(function.node),
            "body",
            [_info(formal, types[formal]) for formal in function.input if formal in types],
            [_info(formal, types[formal]) for formal in function.output],
        ),
        opset_imports=list(opsets.values()),
        ir_version=IR_VERSION,
        functions=called,
    )
    return model


def _info(name: str, kind: tuple[str, tuple[str, ...] | None]) -> onnx.ValueInfoProto:
    element, sizes = kind
    shape: list[int | str | None] | None = None
    if sizes is not None:
        shape = [int(size) if size.isdecimal() else size if size.isidentifier() else None for size in sizes]
    return helper.make_tensor_value_info(name, TensorProto.DataType.Value(element), shape)


def _lift(model: onnx.ModelProto, precision: Precision) -> onnx.ModelProto:
    """The model with every lower float type raised, its roundings kept."""
    wide, lifted = _WIDE[precision], _LIFTED[precision]
    types = value_types(model)
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for info in (*result.graph.input, *result.graph.output):
        if info.type.tensor_type.elem_type in lifted:
            info.type.tensor_type.elem_type = wide
    del result.graph.node[:]
    for original in model.graph.node:
        node = onnx.NodeProto()
        node.CopyFrom(original)
        standard = node.domain in STANDARD_DOMAINS
        target = _cast_target(node, types) if standard else None
        integer = target is not None and target not in _FLOATS
        if standard and (node.op_type in _DECIDING or integer):
            for place, name in enumerate(node.input[: 1 if integer else None]):
                kind = types.get(name)
                if kind in lifted:
                    before, node.input[place] = _rounded(name, f"{node.output[0]}.r{place}", kind, wide)
                    result.graph.node.extend(before)
        if target in _NARROW:
            result.graph.node.append(helper.make_node("Cast", [node.input[0]], [f"{node.output[0]}.n"], to=target))
            result.graph.node.append(helper.make_node("Cast", [f"{node.output[0]}.n"], [node.output[0]], to=wide))
            continue
        if target is not None:
            node = helper.make_node("Cast", [node.input[0]], [node.output[0]], to=wide if target in lifted else target)
        elif standard:
            _lift_implied(node, precision)
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR and attribute.t.data_type in lifted:
                attribute.t.CopyFrom(_lifted_tensor(attribute.t, precision))
            if attribute.name in ("dtype", "output_dtype") and attribute.i in lifted:
                attribute.i = wide
        result.graph.node.append(node)
    _raise_fixed(result, types, wide, lifted)
    return result


def _raise_fixed(model: onnx.ModelProto, types: Mapping[str, int], wide: int, lifted: Sequence[int]) -> None:
    """Raise what the standard gives in a low type whatever the operands are in, as DequantizeLinear up to operator set
    18: what follows would be computed in that type.

    Args:
        types: of the model before it was lifted.
    """
    place = 0
    found = value_types(model)
    while place < len(model.graph.node):
        node = model.graph.node[place]
        place += 1
        low = [name for name in node.output if types.get(name) in lifted and found.get(name) in lifted]
        for name in low:
            node.output[list(node.output).index(name)] = f"{name}.low"
            model.graph.node.insert(place, helper.make_node("Cast", [f"{name}.low"], [name], to=wide))
            place += 1
        if low:
            found = value_types(model)


def _cast_target(node: onnx.NodeProto, types: Mapping[str, int]) -> int | None:
    if node.op_type == "Cast":
        return next((attribute.i for attribute in node.attribute if attribute.name == "to"), None)
    return types.get(node.input[1]) if node.op_type == "CastLike" else None


def _rounded(name: str, stem: str, kind: int | None, wide: int) -> tuple[list[onnx.NodeProto], str]:
    """Nodes that round a value to its declared type, and the name of the result."""
    there = helper.make_node("Cast", [name], [f"{stem}.n"], to=kind)
    back = helper.make_node("Cast", [f"{stem}.n"], [stem], to=wide)
    return [there, back], stem


def _lift_implied(node: onnx.NodeProto, precision: Precision) -> None:
    """Spell out a float32 that an operator implies, where float32 is to be raised."""
    if precision != "float64":
        return
    names = {attribute.name: attribute for attribute in node.attribute}
    if node.op_type == "Constant" and ("value_float" in names or "value_floats" in names):
        single = "value_float" in names
        content = np.array(names["value_float"].f if single else names["value_floats"].floats, np.float32)
        del node.attribute[:]
        node.attribute.append(helper.make_attribute("value", numpy_helper.from_array(content)))
    elif node.op_type == "ConstantOfShape" and "value" not in names:
        node.attribute.append(helper.make_attribute("value", numpy_helper.from_array(np.zeros(1, np.float32))))


def _lifted_tensor(tensor: TensorProto, precision: Precision) -> TensorProto:
    return numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.dtype(precision)), tensor.name)


def value_types(model: onnx.ModelProto) -> dict[str, int]:
    """Element types of a model's values.

    Where onnx infers none, that of the zero point for what is quantised, else of the first float operand, else of the
    first.
    """
    graph = onnx.shape_inference.infer_shapes(model).graph
    found = {info.name: info.type.tensor_type.elem_type for info in (*graph.value_info, *graph.input, *graph.output)}
    found |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    types = {name: kind for name, kind in found.items() if kind}
    for node in model.graph.node:
        kinds = [types[name] for name in node.input if name in types]
        first = next((kind for kind in kinds if kind in _FLOATS), kinds[0] if kinds else None)
        if node.op_type == "QuantizeLinear":
            first = types.get(node.input[2]) if len(node.input) > 2 else int(TensorProto.UINT8)
        for name in node.output:
            if name and first is not None:
                types.setdefault(name, first)
    return types
