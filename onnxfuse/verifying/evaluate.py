"""Running small models on the CPU: ONNX Runtime with its optimisations off, so that it computes what is written.

An operator that its CPU provider lacks in float64 (Erf, Softplus and some more) is computed in float32 between two
casts; what float32 would spoil is spelled out instead: InstanceNormalization, a sum, and Elu and its kin, a difference
from one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxfuse.errors import VerificationError
from onnxfuse.lowering.operators.activations import SELU_ALPHA, SELU_GAMMA

Array = NDArray[Any]

CPU = ["CPUExecutionProvider"]
_FATAL_ONLY = 4
_SUFFIX = ".plain"


def exact_options() -> onnxruntime.SessionOptions:
    """Options that keep the graph as it is and print nothing."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = _FATAL_ONLY
    return options


class Evaluator:
    """A small model ready to run on the CPU; takes and gives NumPy arrays of the model's types.

    Attributes:
        downgraded: operators that are computed in float32 although the model says float64.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        """Create the session.

        Raises:
            VerificationError: ONNX Runtime cannot run the model.
        """
        runnable, self.downgraded = runnable_in_double(model)
        self.inputs = {info.name: info.type.tensor_type.elem_type for info in model.graph.input}
        self.outputs = [info.type.tensor_type.elem_type for info in model.graph.output]
        try:
            self._session = onnxruntime.InferenceSession(
                with_plain_borders(runnable).SerializeToString(), exact_options(), providers=CPU)
        except Exception as error:  # ONNX Runtime has an exception type per status
            raise VerificationError(f"A reference cannot be computed: {error}") from error

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """The outputs; inputs of another type are converted.

        Raises:
            VerificationError: the run fails.
        """
        try:
            results = self._session.run(None, plain_feeds(feeds, self.inputs))
        except Exception as error:
            raise VerificationError(f"A reference cannot be computed: {error}") from error
        return [np.asarray(array).astype(array_type(kind), copy=False)
                for array, kind in zip(results, self.outputs, strict=True)]


def array_type(kind: int) -> np.dtype[Any]:
    """NumPy's type for an element type; ``ml_dtypes.bfloat16`` for bfloat16."""
    return np.dtype(ml_dtypes.bfloat16 if kind == TensorProto.BFLOAT16 else helper.tensor_dtype_to_np_dtype(kind))


def plain_feeds(feeds: Mapping[str, Array], kinds: Mapping[str, int]) -> dict[str, Array]:
    """Arrays for the inputs of ``with_plain_borders`` of a model whose inputs have these types."""
    result = {}
    for name, kind in kinds.items():
        array = feeds[name].astype(array_type(kind), copy=False)
        if kind == TensorProto.BFLOAT16:
            result[name + _SUFFIX] = array.astype(np.float32)
        else:
            result[name] = array
    return result


def with_plain_borders(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with float32 in place of bfloat16 among its inputs and outputs, which ONNX Runtime's Python binding
    does not take; the casts are exact."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    before, after = [], []
    for info in graph.input:
        if info.type.tensor_type.elem_type == TensorProto.BFLOAT16:
            before.append(helper.make_node("Cast", [info.name + _SUFFIX], [info.name], to=TensorProto.BFLOAT16))
            info.name, info.type.tensor_type.elem_type = info.name + _SUFFIX, TensorProto.FLOAT
    for info in graph.output:
        if info.type.tensor_type.elem_type == TensorProto.BFLOAT16:
            after.append(helper.make_node("Cast", [info.name], [info.name + _SUFFIX], to=TensorProto.FLOAT))
            # Inside the graph now, and a fused node's outputs have their types from nowhere else.
            graph.value_info.add().CopyFrom(info)
            info.name, info.type.tensor_type.elem_type = info.name + _SUFFIX, TensorProto.FLOAT
    nodes = [*before, *graph.node, *after]
    del graph.node[:]
    graph.node.extend(nodes)
    return result


def value_types(model: onnx.ModelProto) -> dict[str, int]:
    """Element types of a model's values; where onnx infers none, that of the first float operand, else of the first."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    found = {info.name: info.type.tensor_type.elem_type for info in (*graph.value_info, *graph.input, *graph.output)}
    found |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    types = {name: kind for name, kind in found.items() if kind}
    floats = (TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE)
    for node in model.graph.node:
        kinds = [types[name] for name in node.input if name in types]
        first = next((kind for kind in kinds if kind in floats), kinds[0] if kinds else None)
        for name in node.output:
            if name and first is not None:
                types.setdefault(name, first)
    return types


def runnable_in_double(model: onnx.ModelProto) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """The model with float32 around nodes that the CPU provider has not in float64, and the types of these nodes."""
    types = value_types(model)
    doubles = {name for name, kind in types.items() if kind == TensorProto.DOUBLE}
    if not doubles:
        return model, ()
    opsets = tuple(sorted((entry.domain, entry.version) for entry in model.opset_import))
    own = {(function.domain, function.name) for function in model.functions}
    nodes: list[onnx.NodeProto] = []
    downgraded: dict[str, None] = {}
    for place, node in enumerate(model.graph.node):
        if doubles.isdisjoint((*node.input, *node.output)) or (node.domain, node.op_type) in own or _runs(
            _anonymous(node), tuple(types.get(name, 0) for name in node.input),
            tuple(types.get(name, 0) for name in node.output), opsets,
        ):
            nodes.append(node)
        elif node.op_type in _SPELLED and not node.domain:
            spelling = _Spelling(f"spelled{place}", dict(opsets).get("", 1))
            _SPELLED[node.op_type](node, spelling)
            nodes.extend(spelling.nodes)
        else:
            nodes.extend(_in_single(node, doubles, f"single{place}"))
            downgraded[node.op_type] = None
    result = onnx.ModelProto()
    result.CopyFrom(model)
    del result.graph.node[:]
    result.graph.node.extend(nodes)
    return result, tuple(downgraded)


def _anonymous(node: onnx.NodeProto) -> bytes:
    """A node with its values numbered, so that equal ones are tried once."""
    plain = onnx.NodeProto()
    plain.CopyFrom(node)
    plain.name = ""
    plain.input[:] = [f"i{place}" if name else "" for place, name in enumerate(node.input)]
    plain.output[:] = [f"o{place}" if name else "" for place, name in enumerate(node.output)]
    return bytes(plain.SerializeToString(deterministic=True))


@lru_cache(maxsize=4096)
def _runs(raw: bytes, inputs: tuple[int, ...], outputs: tuple[int, ...], opsets: tuple[tuple[str, int], ...]) -> bool:
    """Whether the CPU provider has the operator for these types."""
    node = onnx.NodeProto.FromString(raw)
    graph = helper.make_graph(
        [node], "probe",
        _infos(node.input, inputs), _infos(node.output, outputs),
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid(*entry) for entry in opsets], ir_version=8)
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), exact_options(), providers=CPU)
    except Exception:  # an operator that is missing is known by nothing else
        return False
    return True


def _infos(names: Iterable[str], kinds: Iterable[int]) -> list[onnx.ValueInfoProto]:
    return [helper.make_tensor_value_info(name, kind, None) for name, kind in zip(names, kinds, strict=True) if name]


def _in_single(node: onnx.NodeProto, doubles: set[str], stem: str) -> list[onnx.NodeProto]:
    """The node in float32 between casts from and to float64."""
    inner = onnx.NodeProto()
    inner.CopyFrom(node)
    before, after = [], []
    for place, name in enumerate(node.input):
        if name in doubles:
            inner.input[place] = f"{stem}.i{place}"
            before.append(helper.make_node("Cast", [name], [inner.input[place]], to=TensorProto.FLOAT))
    for place, name in enumerate(node.output):
        if name in doubles:
            inner.output[place] = f"{stem}.o{place}"
            after.append(helper.make_node("Cast", [inner.output[place]], [name], to=TensorProto.DOUBLE))
    return [*before, inner, *after]


class _Spelling:
    """Nodes in place of one; ``stem`` begins the names of what they compute."""

    def __init__(self, stem: str, opset: int) -> None:
        self.stem, self.opset = stem, opset
        self.nodes: list[onnx.NodeProto] = []

    def step(self, op: str, *inputs: str, result: str = "", **attributes: Any) -> str:
        """One more node; the name of what it computes."""
        self.nodes.append(helper.make_node(op, inputs, [result or f"{self.stem}.{len(self.nodes)}"], **attributes))
        return str(self.nodes[-1].output[0])

    def number(self, value: float) -> str:
        """A scalar."""
        return self.step("Constant", value=helper.make_tensor("value", TensorProto.DOUBLE, [], [value]))

    def integers(self, *values: int) -> str:
        """A list of integers."""
        return self.step("Constant", value=helper.make_tensor("value", TensorProto.INT64, [len(values)], values))


def _instance_normalization(node: onnx.NodeProto, to: _Spelling) -> None:
    """The node as the standard defines it: scale * (x - mean) / sqrt(variance + epsilon) + bias."""
    step = to.step

    def mean(of: str) -> str:
        if to.opset >= 18:
            return step("ReduceMean", of, to.integers(-1), keepdims=1)
        return step("ReduceMean", of, axes=[-1], keepdims=1)

    x, scale, bias = node.input
    shape = step("Shape", x)
    rows = step("Gather", shape, to.integers(0, 1))
    # Sizes are multiplied: -1 cannot stand for the length of rows of an empty tensor.
    inner = step("Slice", shape, to.integers(2), to.integers(1 << 30))
    length = step("ReduceProd", inner, keepdims=1)
    apart = step("Reshape", x, step("Concat", rows, length, axis=0))
    centred = step("Sub", apart, mean(apart))
    variance = step("Add", mean(step("Mul", centred, centred)), to.number(_attribute(node, "epsilon", 1e-5)))
    normal = step("Div", centred, step("Sqrt", variance))
    column = to.integers(-1, 1)
    scaled = step("Mul", normal, step("Reshape", scale, column))
    shifted = step("Add", scaled, step("Reshape", bias, column))
    step("Reshape", shifted, shape, result=node.output[0])


def _elu(node: onnx.NodeProto, to: _Spelling) -> None:
    """Elu, Selu or Celu: ``scale * (alpha * (exp(x / divisor) - 1))`` below zero, ``scale * x`` above."""
    step, op, x = to.step, node.op_type, node.input[0]
    alpha = _attribute(node, "alpha", SELU_ALPHA if op == "Selu" else 1.0)
    small = step("Div", x, to.number(alpha if op == "Celu" else 1.0))
    # Near zero the difference from one has no digits left; two terms of the series have them all.
    series = step("Add", small, step("Mul", step("Mul", small, small), to.number(0.5)))
    difference = step("Sub", step("Exp", small), to.number(1.0))
    curve = step("Where", step("Less", step("Abs", small), to.number(1e-5)), series, difference)
    below = step("Mul", curve, to.number(alpha))
    whole = step("Where", step("Less", x, to.number(0.0)), below, x)
    scale = _attribute(node, "gamma", SELU_GAMMA) if op == "Selu" else 1.0
    step("Mul", whole, to.number(scale), result=node.output[0])


_SPELLED: Mapping[str, Callable[[onnx.NodeProto, _Spelling], None]] = {
    "InstanceNormalization": _instance_normalization, "Elu": _elu, "Selu": _elu, "Celu": _elu,
}
"""By operator: its nodes in float64."""


def _attribute(node: onnx.NodeProto, name: str, default: float) -> float:
    return float(next((attribute.f for attribute in node.attribute if attribute.name == name), default))
