"""Models whose sizes are computed, and what folding that arithmetic must keep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, RuntimeException
from rewriting_models import run, same_bits

from onnxfuse.graph import from_proto
from onnxfuse.rewriting import fold, unfuse

REFUSED = (Fail, RuntimeException)
"""What ONNX Runtime raises where a Reshape cannot be; 1.21 and earlier the second."""


def model(body: str, inputs: str, outputs: str, *, opset: int = 17, held: str = "", ir: int = 8) -> onnx.ModelProto:
    """A model in ONNX's text form; nodes are named after their first outputs."""
    text = f'<ir_version: {ir}, opset_import: ["" : {opset}]>\nsizes ({inputs}) => ({outputs})\n{held}{{\n{body}\n}}'
    made = onnx.parser.parse_model(text)
    for node in made.graph.node:
        node.name = f"node_{node.output[0]}"
    onnx.checker.check_model(made, full_check=True)
    return made


def packed(proto: onnx.ModelProto) -> bytes:
    return bytes(proto.SerializeToString(deterministic=True))


def folded(original: onnx.ModelProto) -> onnx.ModelProto:
    """The folded model: it passes the checker, unfolds to the original's bytes, and is not folded again."""
    before = packed(original)
    result = fold(from_proto(original)).proto
    assert packed(original) == before, "the input was changed"
    onnx.checker.check_model(result, full_check=True)
    assert packed(unfuse(result)) == before
    assert packed(fold(from_proto(result)).proto) == packed(result)
    return result


def operators(proto: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in proto.graph.node if node.op_type != "Constant")


def operand(proto: onnx.ModelProto, output: str, place: int = 1) -> list[int] | None:
    """The initialiser that a node reads at a place, or None where it reads none."""
    (name,) = (node.input[place] for node in proto.graph.node if output in node.output)
    found = [tensor for tensor in proto.graph.initializer if tensor.name == name]
    return numpy_helper.to_array(found[0]).reshape(-1).tolist() if found else None


def same_at(original: onnx.ModelProto, result: onnx.ModelProto, *sizes: Mapping[str, int]) -> None:
    """Bit for bit the same in ONNX Runtime at each of the sizes (float32 and integers, no tolerance).

    Left out are empty tensors that the original itself refuses: a size of zero in the target of a Reshape copies.
    """
    generator = np.random.default_rng(0)
    for chosen in sizes:
        feeds = {}
        for info in original.graph.input:
            kind = info.type.tensor_type
            shape = [chosen[entry.dim_param] if entry.dim_param else entry.dim_value for entry in kind.shape.dim]
            dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
            feeds[info.name] = generator.integers(0, 5, shape).astype(dtype)
        try:
            wanted = run(original, feeds)
        except REFUSED:
            assert 0 in chosen.values()
            continue
        assert same_bits(run(result, feeds), wanted), chosen


B_S = ({"b": 2, "s": 5}, {"b": 1, "s": 1}, {"b": 3, "s": 0}, {"b": 0, "s": 4}, {"b": 0, "s": 0})
"""Batches and sequences, empty ones among them."""

SIZES_OF_X = """
  shape = Shape (x)
  zero = Constant <value = int64 {0}> ()
  one = Constant <value = int64 {1}> ()
  b0 = Gather <axis = 0> (shape, zero)
  s0 = Gather <axis = 0> (shape, one)
  front = Constant <value = int64[1] {0}> ()
  b = Unsqueeze (b0, front)
  s = Unsqueeze (s0, front)
"""

SIZES_OF_HEADS = SIZES_OF_X + """
  heads = Constant <value = int64[1] {3}> ()
  width = Constant <value = int64[1] {4}> ()
  whole = Constant <value = int64[1] {12}> ()
  split = Concat <axis = 0> (b, s, heads, width)
"""


def attention(opset: int = 17) -> onnx.ModelProto:
    """What an exporter writes around attention: heads taken apart and put together."""
    return model(
        SIZES_OF_HEADS + """
  apart = Reshape (x, split)
  turned = Transpose <perm = [0, 2, 1, 3]> (apart)
  squared = Mul (turned, turned)
  back = Transpose <perm = [0, 2, 1, 3]> (squared)
  join = Concat <axis = 0> (b, s, whole)
  y = Reshape (back, join)
""", "float[b, s, 12] x", "float[b, s, 12] y", opset=opset)
