"""A node of any operator, from its schema: types by its constraints, attributes by their types, operands as
schema_operands.py draws them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import onnx
from plain_session import ENDING
from schema_builder import Builder, allowed
from schema_operands import OPERANDS, Operands, Option, Schema, by_schema
from schema_values import BOOL, FLOATS, INTEGERS, Known

LEFT_OUT = {"ImageDecoder", "RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit", "TfIdfVectorizer",
            "Bernoulli", "Multinomial", "SequenceMap"}
"""Strings and images, and what the standard's own schemas do not mark as random."""
ELSEWHERE = {"If", "Loop", "Scan", "Optional", "OptionalGetElement", "OptionalHasElement", "SequenceAt",
             "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceLength",
             "SplitToSequence", "ConcatFromSequence"}
"""Operators with bodies or on sequences, which schema_bodies.py draws."""


@cache
def operators(opset: int) -> tuple[str, ...]:
    """The deterministic operators of an opset that have tensors for inputs, by name."""
    names = sorted({schema.name for schema in onnx.defs.get_all_schemas_with_history() if not schema.domain})
    return tuple(name for name in names if name not in LEFT_OUT | ELSEWHERE | ENDING and _usable(name, opset))


def _usable(name: str, opset: int) -> bool:
    try:
        schema = onnx.defs.get_schema(name, opset)
    except onnx.defs.SchemaError:
        return False
    random = getattr(schema, "node_determinism", None) == getattr(
        getattr(Schema, "NodeDeterminism", None), "NonDeterministic", "?")
    return not schema.deprecated and not random and not name.startswith("Random")


def draw(b: Builder, name: str) -> object:
    """Add a node of an operator, or return None where nothing suits it."""
    schema = onnx.defs.get_schema(name, b.opset)
    types = allowed(schema)
    if any(not types.get(formal.type_str) for formal in schema.inputs if formal.option == Option.Single):
        return None
    drawn = OPERANDS.get(name, by_schema)(b, schema)
    if drawn is None:
        return None
    operands, named = drawn
    known = [value for value in operands if isinstance(value, Known)]
    attributes = _attributes(b, schema, known[0].rank if known else 0)
    reads: Operands = [b.through(value) if isinstance(value, Known) else value for value in operands]
    inputs = [formal.name for formal in schema.inputs]
    for key, value in named.items():
        if key in inputs and value is not None:
            read = value if isinstance(value, Known) else b.ints(*np.ravel(value).tolist())
            place = inputs.index(key)
            reads.extend([None] * (place + 1 - len(reads)))
            reads[place] = b.through(read)
        elif key in schema.attributes:
            attributes.pop(key, None)
            if value is not None:
                attributes[key] = value
    if reads and reads[-1] is not None and len(reads) < len(inputs) and b.flip(0.1) and (
            schema.inputs[len(reads)].option == Option.Optional):
        reads.append(None)  # absent at the end
    return b.emit(name, reads, _outputs(b, schema, named), **attributes)


def _outputs(b: Builder, schema: Schema, named: Mapping[str, object]) -> list[str]:
    count = named.get("outputs")
    if not isinstance(count, int):
        wanted = sum(formal.option == Option.Single for formal in schema.outputs)
        optional = sum(formal.option == Option.Optional for formal in schema.outputs)
        count = max(wanted, schema.min_output) + (b.rng.randint(0, optional) if b.flip(0.4) else 0)
    names = [b.fresh() for _ in range(max(count, 1))]
    for place, formal in enumerate(schema.outputs[:len(names) - 1]):
        if formal.option == Option.Optional and b.flip(0.3):
            names[place] = ""
    return names


# ---- Attributes. ----

STRINGS: Mapping[str, Sequence[str]] = {
    "auto_pad": ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"),
    "approximate": ("none", "tanh"),
    "reduction": ("none", "mean", "sum"),
    "equation": ("ij->ji",),
    "rnn": ("forward", "reverse", "bidirectional"),
    "activation": ("none", "silu", "swish"),
    "DepthToSpace.mode": ("DCR", "CRD"),
    "Pad.mode": ("constant", "reflect", "edge", "wrap"),
    "GridSample.mode": ("linear", "bilinear", "nearest", "cubic", "bicubic"),
    "GridSample.padding_mode": ("zeros", "border", "reflection"),
    "RoiAlign.mode": ("avg", "max"),
    "RoiAlign.coordinate_transformation_mode": ("half_pixel", "output_half_pixel"),
    "Resize.mode": ("nearest", "nearest", "linear", "cubic"),
    "Resize.coordinate_transformation_mode": ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel",
                                              "align_corners", "asymmetric"),
    "Resize.nearest_mode": ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"),
    "Resize.keep_aspect_ratio_policy": ("stretch", "not_larger", "not_smaller"),
    "BitShift.direction": ("LEFT", "RIGHT"),
    "ScatterND.reduction": ("none", "add", "mul", "min", "max"),
    "ScatterElements.reduction": ("none", "add", "mul", "min", "max"),
    "TensorScatter.mode": ("linear", "circular"),
    "direction": ("forward", "reverse", "bidirectional"),
}
FLAGS = ("keepdims", "select_last_index", "exclusive", "reverse", "sorted", "largest", "ceil_mode", "count_include_pad",
         "fmod", "upper", "align_corners", "detect_negative", "detect_positive", "noop_with_empty_axes",
         "exclude_outside", "onesided", "periodic", "center_point_box", "linear_before_reset", "interleaved",
         "is_causal", "allowzero", "input_forget", "saturate", "antialias")
AXES = ("axis", "batch_axis", "time_axis")


def _attributes(b: Builder, schema: Schema, rank: int) -> dict[str, object]:
    """Those that are required, and half of the others."""
    found = {}
    for name, attribute in sorted(schema.attributes.items()):
        if attribute.required or b.flip():
            value = _attribute(b, schema, attribute, rank)
            if value is not None:
                found[name] = value
    return found


def _attribute(b: Builder, schema: Schema, attribute: onnx.defs.OpSchema.Attribute, rank: int) -> object:
    kinds = onnx.defs.OpSchema.AttrType
    if attribute.name in ("to", "dtype", "output_dtype", "output_datatype"):
        return b.rng.choice([*FLOATS, *FLOATS, BOOL, *INTEGERS])
    if attribute.name in ("training_mode", "stash_type", "precision"):
        return None
    if attribute.type == kinds.INT:
        if attribute.name in AXES:
            return b.rng.randint(-rank, rank - 1) if rank else 0
        return b.rng.randint(0, 1) if attribute.name in FLAGS else b.rng.choice((0, 1, 1, 2, 3))
    if attribute.type == kinds.FLOAT:
        return 1e-3 if "epsilon" in attribute.name else b.rng.choice((0.25, 0.5, 1.0, 1.5, 2.0, -0.5))
    if attribute.type == kinds.STRING:
        names = STRINGS.get(f"{schema.name}.{attribute.name}") or STRINGS.get(attribute.name)
        return b.rng.choice(names) if names else None
    if attribute.type == kinds.INTS and attribute.required:
        return [b.rng.randint(1, 2) for _ in range(max(rank - 2, 1))]
    return None
