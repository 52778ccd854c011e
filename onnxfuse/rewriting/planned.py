"""The form of a model that is planned: its arithmetic on sizes folded, that on
16-bit constants of float32, values dequantised for each of their readers,
biases behind their convolutions, values laid out channels-last, weights that kernels read beside its own.

Fused nodes speak of the values of that form; ``unfuse`` leads back from it to the model as it was loaded.
"""

from __future__ import annotations

from dataclasses import replace

import onnx

from onnxfuse.graph import LoadedModel
from onnxfuse.rewriting.biases import bias_record, separated_again
from onnxfuse.rewriting.constants import constants_record, widened_again
from onnxfuse.rewriting.dequantised import dequantised_apart_again, dequantised_record
from onnxfuse.rewriting.layouts import laid_out_again, layout_record
from onnxfuse.rewriting.sizes import fold, sizes_record
from onnxfuse.rewriting.weights import weights_record, with_weights_again


def planned_form(original: LoadedModel, fused: onnx.ModelProto, *, whole: bool = False) -> LoadedModel:
    """The model whose values the fused nodes read: the original, or what became of it where Ifs went, biases are
    apart or values laid out.

    Args:
        whole: have arithmetic on sizes folded as it was too, whether or not that changes values that stay.

    Raises:
        ModelError: the fused model's record cannot be read.
    """
    record = sizes_record(fused)
    folds = record is not None and (whole or record.branches is not None)
    result = fold(original) if folds else original
    proto = widened_again(result.proto, fused)
    proto = separated_again(dequantised_apart_again(proto, fused), fused)
    proto = with_weights_again(laid_out_again(proto, fused), fused)
    return result if proto is result.proto else replace(result, proto=proto)


def exact_form(original: onnx.ModelProto, fused: onnx.ModelProto) -> onnx.ModelProto:
    """The model whose very bits a fused model gives where its functions run and ONNX Runtime optimises nothing: the
    original, but for biases of products, which come last in a sum then and not first, and for transposes, before which
    the CPU rounds to 16 bits.

    Raises:
        ModelError: the fused model's record cannot be read.
    """
    proto = dequantised_apart_again(widened_again(original, fused), fused)
    return laid_out_again(separated_again(proto, fused, products=True), fused)


def has_planned_form(model: onnx.ModelProto) -> bool:
    """Whether a model is in another form than it was loaded in.

    Raises:
        ModelError: a record cannot be read.
    """
    records = (sizes_record, constants_record, dequantised_record, bias_record, layout_record, weights_record)
    return any(record(model) is not None for record in records)
