"""Canonical nodes against the nodes that they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx.parser
from numpy.typing import NDArray
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from onnxfuse.checking.compute import CannotRun, run
from onnxfuse.graph.model import Node, Value
from onnxfuse.operators.record import CANONICAL
from onnxfuse.rules import CanonicalGraph

TOLERANCE: dict[int, float] = {TensorProto.FLOAT16: 1e-2, TensorProto.BFLOAT16: 5e-2}
"""Largest difference as a share of the output's largest magnitude, or of one where that is less; 1e-3 in other types.
Exporters' constants are only right to three digits, so that the spellings differ by that much among themselves."""

_OWN = {
    "Silu": "s = Sigmoid(x)\n y = Mul(x, s)",
    "QuickGelu": "a = Constant <value_float: float = {alpha}> ()\n b = CastLike(a, x)\n c = Mul(x, b)\n"
                 "s = Sigmoid(c)\n y = Mul(x, s)",
    "SafeSoftmax": "s = Softmax <axis: int = {axis}> (x)\n n = IsNaN(s)\n o = Constant <value_float: float = 0.0> ()\n"
                   "z = CastLike(o, x)\n y = Where(n, z, s)",
}
"""The view's own operators in the standard's, as ONNX text with places for their attributes."""

_SCALED = frozenset({"LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"})


def check_view(model: onnx.ModelProto, view: CanonicalGraph, rule: str,
               inputs: Mapping[str, NDArray[Any]]) -> tuple[str | None, bool]:
    """Compute each canonical node of a rule, and compare it with the values of the model itself.

    Returns a sentence where they differ, or None; and whether anything could be computed.

    Raises:
        CannotRun: the model does not run.
    """
    nodes = [node for node in view.made if node.rule == rule]
    outputs = [value for node in nodes for value in node.outputs if value is not None]
    reads = [value for node in nodes for value in node.reads() if value.constant is None]
    seen = _values(model, [*reads, *outputs], inputs)
    for node in nodes:
        found = _compute(node, {**{value.name: value.constant for value in node.reads()
                                   if value.constant is not None}, **seen}, view.graph.opset)
        if found is None:
            return None, False
        for value, array in zip((value for value in node.outputs if value is not None), found, strict=True):
            fault = _difference(value, array, seen[value.name], node)
            if fault is not None:
                return fault, True
    return None, bool(nodes)


def _values(model: onnx.ModelProto, wanted: list[Value], inputs: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Values of the model in a run, inner ones too."""
    known = dict(inputs)
    known |= {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    names = [name for name in dict.fromkeys(value.name for value in wanted) if name not in known]
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    given = {output.name for output in wide.graph.output}
    kinds = {value.name: value.dtype or TensorProto.FLOAT for value in wanted}
    wide.graph.output.extend(
        helper.make_tensor_value_info(name, kinds[name], None) for name in names if name not in given)
    return {**known, **dict(zip(names, run(wide, inputs, names), strict=True))}


def _compute(node: Node, values: Mapping[str, NDArray[Any]], opset: int) -> list[NDArray[Any]] | None:
    """A node's outputs, from the standard's own reference; from ONNX Runtime for operators of its own."""
    inputs = [value.name if value is not None else "" for value in node.inputs]
    if node.op in _SCALED and inputs[1:2] in ([], [""]):
        # The view leaves a scale of one out; the standard does not.
        axis = int(node.attributes.get("axis", -1))
        inputs[1:2] = ["scale of one"]
        values = {**values, inputs[1]: np.ones(values[inputs[0]].shape[axis:], values[inputs[0]].dtype)}
    reads = [name for name in dict.fromkeys(inputs) if name]
    names = [value.name for value in node.outputs if value is not None]
    # An operator that the model's own opset has means what it means there.
    newest = onnx.defs.onnx_opset_version()
    version = opset if onnx.defs.has(node.op, opset, "") else newest
    graph = helper.make_graph(
        [helper.make_node(node.op, inputs, [value.name if value is not None else "" for value in node.outputs],
                          domain=node.domain, **node.attributes)],
        "one",
        [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(values[name].dtype), values[name].shape)
         for name in reads],
        [helper.make_tensor_value_info(value.name, value.dtype or TensorProto.FLOAT, None)
         for value in node.outputs if value is not None],
    )
    imports = [helper.make_opsetid("", version)]
    if node.domain:
        imports.append(helper.make_opsetid(node.domain, 1))
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    if node.domain == CANONICAL:
        # onnx's reference evaluator takes functions, but no attributes of theirs.
        body = _OWN[node.op].format(**{name: repr(value) for name, value in node.attributes.items()})
        model.functions.append(onnx.parser.parse_function(
            f'<domain: "{node.domain}", opset_import: ["": {version}]> {node.op} (x) => (y) {{ {body} }}'))
        del model.graph.node[0].attribute[:]
    feeds = {name: values[name] for name in reads}
    if node.domain not in ("", CANONICAL):
        try:
            return run(model, feeds, names)
        except CannotRun:
            return None
    with np.errstate(all="ignore"):
        return [np.asarray(array) for array in ReferenceEvaluator(model).run(names, feeds)]


def _difference(value: Value, found: NDArray[Any], wanted: NDArray[Any], node: Node) -> str | None:
    says = f"The rule makes {node.qualified_op} of what computes {value.name}"
    if found.shape != wanted.shape:
        return f"{says}, and its shape is {list(found.shape)}, not {list(wanted.shape)}."
    left, right = found.astype(np.float64), wanted.astype(np.float64)
    same = (left == right) | (np.isnan(left) & np.isnan(right))
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.abs(left - right))
    scale = max(1.0, float(np.abs(right[np.isfinite(right)]).max(initial=0.0)))
    worst = float(np.nan_to_num(error, nan=np.inf).max(initial=0.0)) / scale
    if worst <= TOLERANCE.get(value.dtype or 0, 1e-3):
        return None
    return f"{says}, and the two differ by {worst:.2g} of the largest magnitude."
