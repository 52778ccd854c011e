"""Operators with which nothing is fused: sequences, texts, control flow, transforms, and what else computes in a way of
its own."""

from __future__ import annotations

import onnx

from onnxfuse.graph.context import INT64, Type, TypeContext, same
from onnxfuse.operators.record import MICROSOFT, opaque


def det_types(context: TypeContext) -> list[Type]:
    shape = context.shape()
    return [Type(context.dtype(), None if shape is None else shape[:-2])]


def has_element_types(context: TypeContext) -> list[Type]:
    return [Type(int(onnx.TensorProto.BOOL), ())]


def sequence_length_types(context: TypeContext) -> list[Type]:
    return [Type(INT64, ())]


opaque("Det", types=det_types, host=(), random=False)
opaque("OptionalHasElement", types=has_element_types, host=(), random=False)
opaque("SequenceLength", types=sequence_length_types, host=(), random=False)
opaque("SequenceAt", types=None, host=(1,), random=False)
opaque("RotaryEmbedding", types=same, host=(), random=False)
opaque("RotaryEmbedding", "Inverse", domain=MICROSOFT, types=same, host=(), random=False)
opaque("CenterCropPad", "Col2Im", "ConcatFromSequence", "DFT", "If", "ImageDecoder", "Loop", "MaxUnpool", "Optional",
       "OptionalGetElement", "RegexFullMatch", "Scan", "SequenceConstruct", "SequenceEmpty", "SequenceErase",
       "SequenceInsert", "SequenceMap", "SplitToSequence", "StringConcat", "StringNormalizer", "StringSplit", "SwiGLU",
       "TfIdfVectorizer", types=None, host=(), random=False)
