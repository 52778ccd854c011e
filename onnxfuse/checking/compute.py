"""Examples at work: their inputs, and two models compared on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from onnxfuse.graph import Graph, bind
from onnxfuse.graph.sizes import shape_of
from onnxfuse.measuring.inputs import make_inputs
from onnxfuse.provider.words import is_lacking
from onnxfuse.rules import Example
from onnxfuse.verifying.bounds import Bounds
from onnxfuse.verifying.given_biases import with_biases

SEED = 0
SECONDS = 8.0
"""For one run of an example, which may hold a loop without an end."""
MEMORY = 1 << 30
"""Bytes that a run of an example may hold."""
INDICES = 8
"""Integers are drawn below this where an example gives no bounds."""


class CannotRun(Exception):  # noqa: N818 - not an error of the user's
    """ONNX Runtime's CPU provider does not run a model; ``missing`` where it has no such operator, type or
    opset."""

    def __init__(self, reason: str, missing: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.missing = missing


def example_inputs(graph: Graph, example: Example) -> dict[str, NDArray[Any]]:
    """Random inputs of an example: uniform between the bounds that it gives; other integers are small indices, and
    all else is drawn by ``make_inputs``.

    Raises:
        CannotRun: its bounds are none of an input's type.
    """
    try:
        return _drawn(graph, example)
    except (ValueError, OverflowError) as error:
        raise CannotRun(f"no inputs can be drawn: {error}", missing=False) from error


def _drawn(graph: Graph, example: Example) -> dict[str, NDArray[Any]]:
    sizes = bind(graph, example.dims)
    generator = np.random.default_rng(SEED)
    given = {}
    for value in graph.inputs:
        shape = shape_of(value, sizes)
        if value.name in example.inputs and shape is not None and value.dtype is not None:
            low, high = example.inputs[value.name]
            dtype = np.dtype(helper.tensor_dtype_to_np_dtype(value.dtype))
            whole = dtype.kind in "iu"
            made = generator.integers(int(low), int(high), shape, endpoint=True) if whole else generator.uniform(
                low, high, shape)
            given[value.name] = np.asarray(made).astype(dtype)
        elif value.dtype in (onnx.TensorProto.INT32, onnx.TensorProto.INT64) and shape is not None:
            whole_type = helper.tensor_dtype_to_np_dtype(value.dtype)
            given[value.name] = generator.integers(0, INDICES, shape).astype(whole_type)
    return make_inputs(graph, example.dims, given, SEED)


def run(model: onnx.ModelProto, inputs: Mapping[str, NDArray[Any]], names: Sequence[str]) -> list[NDArray[Any]]:
    """Outputs on the CPU provider with the runtime's optimisations off.

    Raises:
        CannotRun: ONNX Runtime refuses the model or the run.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(
            with_biases(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
        bounds = Bounds(SECONDS, MEMORY)
        with bounds.within_memory():
            found: list[NDArray[Any]] = bounds.run(lambda options: session.run(list(names), dict(inputs), options))
    except Exception as error:  # ONNX Runtime has an exception type per status
        raise CannotRun(str(error).splitlines()[0], is_lacking(error)) from error
    return found


def compare(original: onnx.ModelProto, fused: onnx.ModelProto, inputs: Mapping[str, NDArray[Any]]) -> str | None:
    """Whether two models give the same bits: a sentence where they differ, None where they agree.

    Raises:
        CannotRun: the original does not run.
    """
    names = [output.name for output in original.graph.output]
    wanted = run(original, inputs, names)
    for name, left, right in zip(names, wanted, run(fused, inputs, names), strict=True):
        if left.shape != right.shape or left.tobytes() != right.tobytes():
            return f"The output {name} of the fused model differs from the original's on the CPU."
    return None
