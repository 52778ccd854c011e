"""The float64 body of a fused node for the CUDA provider, whose results are a first look: what agrees with them passes.

It is the very model that the CPU provider runs (``evaluate``).  Beside its outputs it gives a number that is zero where
every float on the way to them is finite, and where it is not the results count for nothing: what the two providers make
of NaN and infinity differs (``decompositions``), and a kernel that is wrong in the CUDA provider's way must not pass.
Of finite numbers such a kernel passes by the original's own result on the GPU anyway (``nodes``).  For the CPU provider
alone are (``unsuited``):

    integer arithmetic       but on sizes, and what wraps around anywhere: the CUDA provider sums in float64
    indices that are given   a GPU reads past the end of a table and says nothing
    convolutions             their library takes longer to find an algorithm than the CPU to compute one
    other domains, and graphs of If, Loop and Scan
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from onnxfuse.operators import OPERATORS, OperatorClass
from onnxfuse.rewriting import value_types
from onnxfuse.verifying.spelling import Spelling
from onnxfuse.verifying.tolerances import WIDTHS

FINITE = "finite"
"""The last output: zero where every float is finite."""

_EXACT = ".exact"
_PRODUCTS = frozenset({"MatMul", "Gemm"})
_MOVES = frozenset({"Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Split", "Concat",
                    "Expand", "Tile"})
"""Operators whose results are elements of their operands."""
_CLEAR = frozenset({"Where", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"})
"""Operators of which nobody doubts what they make of infinity beside finite numbers."""
_ALIKE = _MOVES | _CLEAR | {"Constant", "Cast", "Add", "Sub", "Mul", "Neg", "And", "Or", "Xor", "Not"}
"""Operators of which both providers make the same of integers and booleans."""


def unsuited(model: onnx.ModelProto) -> str:
    """Why the CUDA provider is not to compute a float64 body, in a few words; "" where it may."""
    if any(info.type.tensor_type.elem_type != TensorProto.DOUBLE for info in model.graph.output):
        return "a result that is no float"
    types, constants = value_types(model), _constants(model)
    functions = {(function.domain, function.name) for function in model.functions}
    sizes = {*constants, *(info.name for info in model.graph.input if info.name.startswith("h"))}
    for node in model.graph.node:
        reads = [name for name in node.input if name]
        if node.domain not in ("", "ai.onnx") or (node.domain, node.op_type) in functions:
            return f"{node.domain}.{node.op_type}"
        if any(entry.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS) for entry in node.attribute):
            return f"the graphs of {node.op_type}"
        if not all(name in types for name in (*reads, *filter(None, node.output))):
            return f"types around {node.op_type} that are not known"
        endless = any(name in constants and not _is_finite(constants[name]) for name in reads)
        if endless and node.op_type not in _CLEAR:
            return f"{node.op_type} of a constant that is not finite"
        if node.op_type in ("Shape", "Size") or sizes.issuperset(reads):
            sizes.update(node.output)
        elif why := _unlike(node, types, constants):
            return why
    return ""


def _unlike(node: onnx.NodeProto, types: Mapping[str, int], constants: Collection[str]) -> str:
    """Why a node that computes with more than sizes is the CPU provider's; "" where it is not."""
    record = OPERATORS.get(("", node.op_type))
    if record is None or node.op_type == "Attention" or (
            record.kind is OperatorClass.HEAVY and node.op_type not in _PRODUCTS):
        return str(node.op_type)
    if node.op_type.startswith(("Gather", "Scatter")) and node.input[1] not in constants:
        return f"{node.op_type} of indices that are given"
    floats = any(types.get(name) in WIDTHS for name in (*node.input, *node.output))
    return "" if floats or node.op_type in _ALIKE else f"{node.op_type} of integers"


def device_body(model: onnx.ModelProto, declared: Mapping[str, int]) -> onnx.ModelProto:
    """The model that the GPU runs: it reads inputs in the types that they have, and gives ``FINITE`` last.

    Args:
        model: the body in float64; declared: the types of its inputs in the original.
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph, types = result.graph, value_types(model)
    before = []
    for info in graph.input:
        kind, given = info.type.tensor_type.elem_type, declared[info.name]
        if kind != given:
            before.append(helper.make_node("Cast", [info.name], [info.name + _EXACT], to=kind))
            info.type.tensor_type.elem_type = given
    renamed = {node.input[0]: node.output[0] for node in before}
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
    computed = {info.name for info in graph.input} | {
        name for node in graph.node if node.op_type not in _MOVES | {"Constant"} for name in node.output}
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1)
    after = _finite({renamed.get(name, name): types[name] for name in sorted(computed) if types.get(name) in WIDTHS},
                    opset)
    nodes = [*before, *graph.node, *after]
    del graph.node[:]
    graph.node.extend(nodes)
    graph.output.append(helper.make_tensor_value_info(FINITE, TensorProto.DOUBLE, []))
    return result


def _finite(floats: Mapping[str, int], opset: int) -> list[onnx.NodeProto]:
    """Nodes that give ``FINITE`` of these values: zero times what is not finite is no number, nor is a sum of that."""
    to = Spelling(FINITE, opset)
    zeros = {kind: to.number(0.0, kind) for kind in sorted(set(floats.values()))}
    sums = []
    for name, kind in floats.items():
        found = to.step("ReduceSum", to.step("Mul", name, zeros[kind]), keepdims=0)
        sums.append(found if kind == TensorProto.DOUBLE else to.step("Cast", found, to=TensorProto.DOUBLE))
    to.step("Sum", *sums, result=FINITE)
    return to.nodes


def _constants(model: onnx.ModelProto) -> dict[str, NDArray[Any]]:
    found = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant":
            value = helper.get_attribute_value(node.attribute[0])
            found[node.output[0]] = numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else (
                np.asarray(value))
    return found


def _is_finite(array: NDArray[Any]) -> bool:
    return array.dtype.kind in "biuSUO" or bool(np.isfinite(array.astype(np.float64)).all())
