"""Operators with which nothing is fused: sequences, texts, control flow, transforms, and what else computes in a way of
its own."""

from __future__ import annotations

import onnx

from onnxfuse.graph.context import INT64, Type, TypeContext, same
from onnxfuse.operators.record import MICROSOFT, OPAQUE, define


def det_types(context: TypeContext) -> list[Type]:
    shape = context.shape()
    return [Type(context.dtype(), None if shape is None else shape[:-2])]


def has_element_types(context: TypeContext) -> list[Type]:
    return [Type(int(onnx.TensorProto.BOOL), ())]


def sequence_length_types(context: TypeContext) -> list[Type]:
    return [Type(INT64, ())]


define("Det", kind=OPAQUE, types=det_types)
define("OptionalHasElement", kind=OPAQUE, types=has_element_types)
define("SequenceLength", kind=OPAQUE, types=sequence_length_types)
define("SequenceAt", kind=OPAQUE, host=(1,))
define("RotaryEmbedding", kind=OPAQUE, types=same)
define("RotaryEmbedding", "Inverse", domain=MICROSOFT, kind=OPAQUE, types=same)
define(
    "CenterCropPad", "Col2Im", "ConcatFromSequence", "DFT", "If", "ImageDecoder", "Loop", "MaxUnpool", "Optional",
    "OptionalGetElement", "RegexFullMatch", "Scan", "SequenceConstruct", "SequenceEmpty", "SequenceErase",
    "SequenceInsert", "SequenceMap", "SplitToSequence", "StringConcat", "StringNormalizer", "StringSplit", "SwiGLU",
    "TfIdfVectorizer", kind=OPAQUE,
)
