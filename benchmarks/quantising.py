"""Quantises a model of 16-bit floats to 8 bits around its products and convolutions, as tools for deployment leave it.

What a product with a constant weight reads goes through QuantizeLinear and DequantizeLinear with one scale, from the
largest magnitude that one run on the CPU shows; the weight becomes a DequantizeLinear of integers with a scale for each
column (Jacob and others, 2018).  Everything else stays in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import helper, numpy_helper

LARGEST = 127
OPSET = 19
"""The first whose QuantizeLinear takes 16-bit floats."""


def quantised(model: onnx.ModelProto, inputs: Mapping[str, NDArray[Any]]) -> onnx.ModelProto:
    """The model with products of 8-bit integers; ``inputs`` are what the scales are taken from.

    Raises:
        ValueError: its operators are of an opset before 19.
    """
    if any(each.version < OPSET for each in model.opset_import if not each.domain):
        raise ValueError(f"to quantise floats of 16 bits takes opset {OPSET}")
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    products = [node for node in model.graph.node if _axis(node) is not None and node.input[1] in weights]
    largest = _largest(model, list(dict.fromkeys(node.input[0] for node in products)), inputs)
    made = onnx.ModelProto()
    made.CopyFrom(model)
    del made.graph.node[:], made.graph.initializer[:]
    constants: dict[str, onnx.TensorProto] = {}
    renamed: dict[str, str] = {}
    wanted = {id(node) for node in products}
    for node in model.graph.node:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        if id(node) in wanted:
            for place, pieces in ((0, _activation(node.input[0], largest, constants)),
                                  (1, _weight(node, weights[node.input[1]], constants))):
                name = node.input[place]
                if name not in renamed:
                    added = list(pieces)
                    made.graph.node.extend(added)
                    renamed[name] = added[-1].output[0]
                copy.input[place] = renamed[name]
        made.graph.node.append(copy)
    read = {name for node in made.graph.node for name in node.input}
    made.graph.initializer.extend(each for each in (*weights.values(), *constants.values()) if each.name in read)
    return made


def _axis(node: onnx.NodeProto) -> int | None:
    """The axis of the columns of a product's weight; None of any other node."""
    if node.op_type == "Gemm":
        return 0 if any(each.name == "transB" and each.i for each in node.attribute) else 1
    return {"Conv": 0, "MatMul": 1}.get(node.op_type)


def _largest(model: onnx.ModelProto, names: list[str], inputs: Mapping[str, NDArray[Any]]) -> dict[str, float]:
    """The largest magnitude of each tensor, in one run."""
    seen = onnx.ModelProto()
    seen.CopyFrom(model)
    outputs = {each.name for each in seen.graph.output}
    seen.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names
                             if name not in outputs and name not in inputs)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(seen.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found = dict(zip([each.name for each in session.get_outputs()], session.run(None, dict(inputs)), strict=True))
    return {name: float(np.abs({**inputs, **found}[name].astype(np.float32)).max()) for name in names}


def _activation(name: str, largest: Mapping[str, float], constants: dict[str, onnx.TensorProto]
                ) -> Iterator[onnx.NodeProto]:
    step = [_constant(constants, f"{name}_scale", np.float16(max(largest[name], 1e-3) / LARGEST)),
            _constant(constants, f"{name}_zero", np.int8(0))]
    yield helper.make_node("QuantizeLinear", [name, *step], [f"{name}_quantized"], f"{name}_QuantizeLinear")
    yield helper.make_node("DequantizeLinear", [f"{name}_quantized", *step], [f"{name}_dequantized"],
                           f"{name}_DequantizeLinear")


def _weight(node: onnx.NodeProto, tensor: onnx.TensorProto, constants: dict[str, onnx.TensorProto]
            ) -> Iterator[onnx.NodeProto]:
    axis = _axis(node)
    values = numpy_helper.to_array(tensor).astype(np.float32)
    others = tuple(each for each in range(values.ndim) if each != axis)
    scale = (np.abs(values).max(axis=others, keepdims=True) / LARGEST).clip(1e-6).astype(np.float16)
    whole = np.clip(np.rint(values / scale.astype(np.float32)), -LARGEST, LARGEST).astype(np.int8)
    inputs = [_constant(constants, f"{tensor.name}_quantized", whole),
              _constant(constants, f"{tensor.name}_scale", scale.reshape(-1)),
              _constant(constants, f"{tensor.name}_zero", np.zeros(scale.size, np.int8))]
    yield helper.make_node("DequantizeLinear", inputs, [f"{tensor.name}_dequantized"],
                           f"{tensor.name}_DequantizeLinear", axis=axis)


def _constant(constants: dict[str, onnx.TensorProto], name: str, values: Any) -> str:
    constants[name] = numpy_helper.from_array(np.asarray(values), name)
    return name
