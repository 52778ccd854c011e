"""Fused nodes and their functions into the model and out of it again; saving; external data.

    fold ─▶ model without arithmetic on sizes that constants can stand for, and Ifs that sizes decide
    rewrite ─▶ model with fused nodes ─ save ─▶ file ─ read_fused ─▶ report
                        └─ unfuse ─▶ the original        └ body_model ─▶ reference of one kernel
"""

from onnxfuse.rewriting.fusing import Placed, Rewritten, rewrite
from onnxfuse.rewriting.invariants import InvariantError
from onnxfuse.rewriting.mark import is_optimised
from onnxfuse.rewriting.original import original
from onnxfuse.rewriting.reading import FusedNode, read_fused
from onnxfuse.rewriting.region import FusedRegion
from onnxfuse.rewriting.saving import Saved, save
from onnxfuse.rewriting.sizes import SizesRecord, fold, planned_form, sizes_record
from onnxfuse.rewriting.standalone import body_model, value_types
from onnxfuse.rewriting.unfusing import unfuse

__all__ = [
    "FusedNode",
    "FusedRegion",
    "InvariantError",
    "Placed",
    "Rewritten",
    "Saved",
    "SizesRecord",
    "body_model",
    "fold",
    "is_optimised",
    "original",
    "planned_form",
    "read_fused",
    "rewrite",
    "save",
    "sizes_record",
    "unfuse",
    "value_types",
]
