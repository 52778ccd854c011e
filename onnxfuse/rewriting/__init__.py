"""Fused nodes and their functions into the model and out of it again; saving; external data.

    fold ─▶ model without arithmetic on sizes that constants can stand for, and Ifs that sizes decide
    widen ─▶ model whose arithmetic on 16-bit constants is of float32
    dequantise_apart ─▶ model in which each reader of a dequantised value has a node for that
    separate ─▶ model with biases as sums behind what they belong to
    with_weights ─▶ model with weights that kernels read in the place of its own
    rewrite ─▶ model with fused nodes ─ save ─▶ file ─ read_fused ─▶ report
                        └─ unfuse ─▶ the original        └ body_model ─▶ reference of one kernel
"""

from onnxfuse.rewriting.biases import bias_record, separate, separated_sums
from onnxfuse.rewriting.constants import constants_record, widen
from onnxfuse.rewriting.dequantised import dequantise_apart, dequantised_record
from onnxfuse.rewriting.fusing import Placed, Rewritten, rewrite
from onnxfuse.rewriting.invariants import InvariantError
from onnxfuse.rewriting.layouts import lay_out, layout_record
from onnxfuse.rewriting.mark import is_optimised
from onnxfuse.rewriting.original import original
from onnxfuse.rewriting.planned import exact_form, has_planned_form, planned_form
from onnxfuse.rewriting.provenance import (
    FUSED,
    BrokenRecord,
    MeasuredRecord,
    NamedRecord,
    OperatorRecord,
    PlanRecord,
    RemainingRecord,
    VerificationRecord,
    forget_plan,
    note_plan,
    plan_record,
    today,
)
from onnxfuse.rewriting.reading import FusedNode, read_fused
from onnxfuse.rewriting.saving import Saved, annotate, save
from onnxfuse.rewriting.sizes import SizesRecord, fold, sizes_record
from onnxfuse.rewriting.standalone import body_model, value_types
from onnxfuse.rewriting.unfusing import unfuse
from onnxfuse.rewriting.weights import Folded, bytes_of_weights, only_weights, weights_record, with_weights

__all__ = [
    "FUSED",
    "BrokenRecord",
    "Folded",
    "FusedNode",
    "InvariantError",
    "MeasuredRecord",
    "NamedRecord",
    "OperatorRecord",
    "Placed",
    "PlanRecord",
    "RemainingRecord",
    "Rewritten",
    "Saved",
    "SizesRecord",
    "VerificationRecord",
    "annotate",
    "bias_record",
    "body_model",
    "bytes_of_weights",
    "constants_record",
    "dequantise_apart",
    "dequantised_record",
    "exact_form",
    "fold",
    "forget_plan",
    "has_planned_form",
    "is_optimised",
    "lay_out",
    "layout_record",
    "note_plan",
    "only_weights",
    "original",
    "plan_record",
    "planned_form",
    "read_fused",
    "rewrite",
    "save",
    "separate",
    "separated_sums",
    "sizes_record",
    "today",
    "unfuse",
    "value_types",
    "weights_record",
    "widen",
    "with_weights",
]
