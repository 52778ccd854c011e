"""What a region computes, in float64, and how far a kernel may be from it.

``evaluate`` runs a model node by node.  Every value of a floating type is held in float64 and rounded to its declared
type only where a kernel must do so: by a Cast (of what it reads and to what it gives), and before an operator whose
result jumps (comparisons, IsNaN, floor and their like).  Integers are what they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import prod

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator
from reference_operators import OWN, Array, clipped, truncated

FLOATS: dict[int, np.dtype] = {
    TensorProto.FLOAT16: np.dtype(np.float16),
    TensorProto.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    TensorProto.FLOAT: np.dtype(np.float32),
    TensorProto.DOUBLE: np.dtype(np.float64),
}

TOLERANCES: dict[int, float] = {
    TensorProto.FLOAT: 1e-5,
    TensorProto.DOUBLE: 1e-12,
    TensorProto.FLOAT16: 2 * 2.0**-10,
    TensorProto.BFLOAT16: 2 * 2.0**-7,
}
"""Largest error against float64, relative to the largest magnitude of the output: for float32 and float64 some
hundreds of roundings, for float16 and bfloat16 two units in the last place."""

REDUCTION_ROUNDINGS = 2.0**-24
"""What each further element of a long sum may add to a float32's tolerance (a tenth of the worst case)."""

JUMPING = frozenset(
    (
        "Equal",
        "Less",
        "LessOrEqual",
        "Greater",
        "GreaterOrEqual",
        "IsNaN",
        "IsInf",
        "Floor",
        "Ceil",
        "Round",
        "Sign",
        "Mod",
    )
)

GELUS = ("Gelu", "BiasGelu", "FastGelu")
"""x / 2 (1 + erf x): the sum inside cancels, and what is left of it rounds by x."""

EXACT = JUMPING | {
    "Identity",
    "Neg",
    "Abs",
    "Relu",
    "Max",
    "Min",
    "Clip",
    "Where",
    "Cast",
    "CastLike",
    "Reshape",
    "Transpose",
    "Squeeze",
    "Unsqueeze",
    "Flatten",
    "Expand",
    "Tile",
    "Slice",
    "Split",
    "Concat",
    "Trilu",
    "GatherElements",
    "GatherND",
    "Gather",
    "Pad",
    "Resize",
    "OneHot",
    "GlobalMaxPool",
    "MaxPool",
    "DepthToSpace",
    "SpaceToDepth",
    "ConstantOfShape",
    "Dropout",
    "ReduceMax",
    "ReduceMin",
}
"""Operators whose result is as exact as what they read."""


def numpy_type(dtype: int) -> np.dtype:
    """The NumPy type of an element type; ``ml_dtypes.bfloat16`` for bfloat16."""
    return FLOATS.get(dtype) or np.dtype(onnx.helper.tensor_dtype_to_np_dtype(dtype))


def evaluate(model: onnx.ModelProto, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Every value of a model; those of floating types in float64.

    Args:
        inputs: by name, in their declared types.
    """
    given = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    return evaluate_nodes(model, model.graph.node, {**given, **inputs})


def evaluate_nodes(
    model: onnx.ModelProto,
    nodes: Iterable[onnx.NodeProto],
    given: Mapping[str, Array],
    noise: np.random.Generator | None = None,
    by: float = 1e-7,
) -> dict[str, Array]:
    """The same for some nodes of a model.

    Args:
        given: what they read, and more.
        noise: where given, every result of a floating type is disturbed by a few roundings, of float32 by default, or
            ``by`` this share of it, and so is what it is computed of.
    """
    types = element_types(model)
    opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    values = {name: raised(array) for name, array in given.items()}
    with np.errstate(all="ignore"):
        for node in nodes:
            read = values
            if noise is not None and node.op_type not in EXACT:
                # A sum that cancels rounds by what it sums, not by what is left of it.
                read = values | {name: values[name] * (1 + by * noise.standard_normal(values[name].shape))
                                 for name in node.input if name in values and types.get(name) in FLOATS}
            for name, array in zip(node.output, _node(node, opset, types, read), strict=False):
                if name:
                    values[name] = raised(np.asarray(array))
                    if noise is not None and types[name] in FLOATS and node.op_type not in EXACT:
                        values[name] = values[name] * (1 + by * noise.standard_normal(values[name].shape))
                        if node.op_type in GELUS:
                            size = sum(np.abs(read[each]) for each in node.input)
                            values[name] = values[name] + by * size * noise.standard_normal(values[name].shape)
    return values


def element_types(model: onnx.ModelProto) -> dict[str, int]:
    """Element types by value; behind an operator that it does not know, onnx infers few: the others are the type of the
    input that decides in most operators."""
    inferred = onnx.shape_inference.infer_shapes(model)
    graph = inferred.graph
    types = {info.name: info.type.tensor_type.elem_type for info in (*graph.input, *graph.value_info, *graph.output)}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in model.graph.node:
        for name in node.output:
            if not types.get(name) and node.input:
                types[name] = types.get(node.input[node.op_type in ("Where", "CastLike", "DequantizeLinear")], 0)
    return types


def raised(array: Array) -> Array:
    """A floating array in float64, another as it is."""
    return array.astype(np.float64) if array.dtype in FLOATS.values() else array


def rounded(array: Array, dtype: int) -> Array:
    """Values of a floating type rounded to it, still in float64."""
    return array.astype(FLOATS[dtype]).astype(np.float64) if dtype in FLOATS else array


def _node(node: onnx.NodeProto, opset: int, types: Mapping[str, int], values: Mapping[str, Array]) -> list[Array]:
    read = [values[name] if name else None for name in node.input]
    if node.op_type in ("Cast", "CastLike"):
        target = (
            types[node.input[1]] if node.op_type == "CastLike" else next(a.i for a in node.attribute if a.name == "to")
        )
        source = rounded(read[0], types[node.input[0]])
        if target in FLOATS:
            return [rounded(source.astype(np.float64), target)]
        if types[node.input[0]] in FLOATS and target != TensorProto.BOOL:
            return [truncated(source, numpy_type(target), 8 * FLOATS[types[node.input[0]]].itemsize)]
        return [source.astype(numpy_type(target))]
    if node.op_type in JUMPING:
        read = [rounded(array, types[name]) for array, name in zip(read, node.input, strict=True)]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    if node.op_type == "Clip":
        given = [*read[1:], None, None][:2] if opset >= 11 else [attributes.get("min"), attributes.get("max")]
        return [clipped(read[0], *given, _limits(types[node.input[0]]))]
    own = OWN.get((node.domain, node.op_type))
    if own is not None:
        result = own(attributes, opset, *read)
        return list(result) if isinstance(result, tuple) else [result]
    feeds = {name: array for name, array in zip(node.input, read, strict=True) if name}
    return list(_evaluator(node.SerializeToString(), opset).run(None, feeds))


def _limits(dtype: int) -> tuple[float, float]:
    info = ml_dtypes.finfo(FLOATS[dtype]) if dtype in FLOATS else np.iinfo(numpy_type(dtype))
    return (float(info.min), float(info.max)) if dtype in FLOATS else (int(info.min), int(info.max))


@lru_cache(maxsize=4096)
def _evaluator(node: bytes, opset: int) -> ReferenceEvaluator:
    proto = onnx.NodeProto()
    proto.ParseFromString(node)
    return ReferenceEvaluator(proto, opsets={"": opset})


def tolerance(dtype: int, length: int = 1) -> float:
    """Largest error relative to the output's largest magnitude; ``length`` is that of the longest reduction."""
    return TOLERANCES[dtype] + (length * REDUCTION_ROUNDINGS if dtype == TensorProto.FLOAT else 0.0)


def difference(
    actual: Array,
    expected: Array,
    dtype: int,
    *,
    length: int = 1,
    scale: float | Array | None = None,
    slack: float = 1.0,
    original: Array | None = None,
) -> str:
    """What is wrong with an output, or "".

    Args:
        actual: in its declared type; expected: in float64 where that is a float.
        length: of the longest reduction behind it.
        scale: magnitude that the error is measured by, of the output or of each element; the largest finite one of
            ``expected`` where not given.
        slack: factor on the tolerance, for functions that are not well conditioned.
        original: the unfused model's output in its declared type: an error of 1.1 times its own is allowed for
            float16 and bfloat16.
    """
    if actual.shape != expected.shape:
        return f"shape {actual.shape} instead of {expected.shape}"
    if actual.dtype != numpy_type(dtype):
        return f"type {actual.dtype} instead of {numpy_type(dtype)}"
    if dtype not in FLOATS:
        wrong = actual != expected
        return _first(wrong, actual, expected) if np.any(wrong) else ""
    if original is None and _is_near(actual, expected, dtype, tolerance(dtype, length) * slack, scale):
        return ""
    with np.errstate(all="ignore"):
        declared = expected.astype(FLOATS[dtype]).astype(np.float64)
        found = actual.astype(np.float64)
        ordinary = np.isfinite(declared)
        largest = np.max(np.abs(declared), initial=0.0, where=ordinary) if scale is None else np.asarray(scale)
        # The last place of a number near zero is that of the smallest normal number.
        largest = np.maximum(largest, float(ml_dtypes.finfo(FLOATS[dtype]).tiny))
        allowed = largest * tolerance(dtype, length) * slack
        if original is not None and dtype in (TensorProto.FLOAT16, TensorProto.BFLOAT16):
            own = np.abs(original.astype(np.float64) - expected)
            allowed = np.maximum(allowed, 1.1 * np.max(own, initial=0.0, where=np.isfinite(own)))
        same = (found == declared) | (np.isnan(found) & np.isnan(declared))
        wrong = ~same & ~(ordinary & (np.abs(found - expected) <= allowed))
        # What rounds to infinity may stay just below it, and the other way round.
        edge = float(ml_dtypes.finfo(FLOATS[dtype]).max)
        near = np.minimum(np.abs(expected), edge) - np.minimum(np.abs(found), edge)
        wrong &= ~(
            ~np.isnan(found)
            & ~np.isnan(declared)
            & (np.sign(found) == np.sign(expected))
            & (np.abs(expected) > 0.99 * edge)
            & (np.abs(near) <= allowed)
        )
    return _first(wrong, actual, expected, f", allowed {np.max(allowed):.3g}") if np.any(wrong) else ""


def _is_near(actual: Array, expected: Array, dtype: int, relative: float, scale: float | Array | None) -> bool:
    """Whether nothing is wrong, found in a tenth of the time where everything is finite, as nearly always."""
    with np.errstate(all="ignore"):
        peak = float(np.asarray(np.max(np.abs(expected), initial=0.0)).astype(FLOATS[dtype]))
        if not np.isfinite(peak):
            return False
        largest = np.maximum(peak if scale is None else np.asarray(scale), float(ml_dtypes.finfo(FLOATS[dtype]).tiny))
        apart = np.subtract(actual, expected, dtype=np.float64)
        return bool(np.all(np.abs(apart) <= largest * relative))


def _first(wrong: Array, actual: Array, expected: Array, note: str = "") -> str:
    place = tuple(int(index) for index in np.argwhere(wrong)[0])
    return (
        f"{int(np.count_nonzero(wrong))} of {prod(wrong.shape)} elements differ, the first at {place}: "
        f"{actual[place]!r} instead of {expected[place]!r}{note}"
    )
