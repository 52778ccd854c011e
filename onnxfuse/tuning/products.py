"""What a plan takes only where it was measured, measured on the way to the plan where the GPU is at hand.

`onnxfuse tune` measures everything; this measures regions with products, and what stands in their place, so that
`onnxfuse optimize` on the machine that a model will run on need not be told to.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import onnx

from onnxfuse.errors import KernelError, MeasurementError, RuntimeLibraryError
from onnxfuse.graph import LoadedModel
from onnxfuse.graph.order import all_nodes
from onnxfuse.measuring.database import open_database
from onnxfuse.operators import OPERATORS, OperatorClass
from onnxfuse.operators.classes import FLOAT, NARROW
from onnxfuse.optimised import Tell, silent
from onnxfuse.pipeline import Options, profile_of
from onnxfuse.planning.regions.contractions import STAGE as ATTENTION
from onnxfuse.planning.regions.products import STAGE as PRODUCTS
from onnxfuse.presence import present_profile
from onnxfuse.tuning.timer import find_timer
from onnxfuse.tuning.tune import Tuned, TuneOptions, tune

_STAGES = (ATTENTION, PRODUCTS)


def measure_products(
    loaded: LoadedModel, options: Options, seconds: float, tell: Tell = silent
) -> Tuned | None:
    """Measure a model's regions with products into the database that ``options`` names; what it holds is not measured
    again.

    Args:
        seconds: after which no further measurement begins; 0 for none at all.

    Returns:
        What was found; None where nothing was to be measured: there is no such region, no GPU here or another than the
        one to plan for, no database to keep it in, or the stages are left out.  A GPU that cannot be measured on is a
        warning.

    Raises:
        ModelError, RuleError: as ``pipeline.optimise``.
        KernelError: the GPU stopped answering.
    """
    left_out = set(_STAGES) <= set(options.disable)
    if seconds <= 0 or options.database is False or left_out:
        return None
    if not _is_here(options):
        return None
    path = None if options.database is None else Path(options.database)
    tf32 = options.objective.tf32
    if not _may_hold(loaded.proto) or not (path is None or path.exists()):  # which planning says better
        return None
    try:
        timer = find_timer()
    except (KernelError, RuntimeLibraryError) as error:
        warnings.warn(f"nothing was measured: {error.message}", stacklevel=2)
        return None
    wanted = TuneOptions(options.rules, options.disable, options.dims, seconds, stages=_STAGES, tf32=tf32,
                         fold_weights=options.fold_weights, kernels=options.kernels)
    try:
        with open_database(path) as kept:
            return tune(loaded, timer, kept, wanted, tell)
    except MeasurementError as error:
        warnings.warn(f"nothing was measured: {error.message}", stacklevel=2)
        return None


def _is_here(options: Options) -> bool:
    """Whether the GPU to plan for is the one of this machine."""
    present = present_profile()
    return present is not None and (
        options.target is None or profile_of(options.target, options.rules).name == present.name)


def _may_hold(model: onnx.ModelProto) -> bool:
    """Whether there are products at all, and floats that kernels multiply, by a look at names and types alone."""
    functions = [node for function in model.functions for node in function.node]
    nodes = list(all_nodes((*model.graph.node, *functions)))
    records = (OPERATORS.get((node.domain, node.op_type)) for node in nodes)
    types = {tensor.data_type for tensor in model.graph.initializer}
    types |= {value.type.tensor_type.elem_type for value in model.graph.input}
    types |= {attribute.i for node in nodes for attribute in node.attribute if attribute.name == "to"}
    return not types.isdisjoint({*NARROW, FLOAT}) and any(
        record is not None and record.kind is OperatorClass.HEAVY for record in records)
