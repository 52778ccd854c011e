"""ONNX Runtime on the CPU with its own optimisations off: what a model computes as it is written."""

from __future__ import annotations

import re

import onnx
import onnxruntime

State = onnxruntime.capi.onnxruntime_pybind11_state
ABSENT = (State.NotImplemented, State.Fail, State.InvalidGraph)
"""What the CPU provider says of a model with an operator, or a type of one, that it lacks."""


def session(model: onnx.ModelProto) -> onnxruntime.InferenceSession | None:
    """A session without optimisations; None where the CPU provider lacks an operator or a type of it."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except ABSENT:
        return None


STRICT = (1, 25)
"""Releases of ONNX Runtime before this one run some of the models that they should refuse, or end the process."""


def is_refused(model: onnx.ModelProto, words: str) -> bool:
    """Whether ONNX Runtime makes no session of a model, and says one of these words of it; old ones are not asked."""
    if tuple(map(int, onnxruntime.__version__.split(".")[:2])) < STRICT:
        return True
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    except Exception as error:  # of any of the runtime's kinds
        return re.search(words, str(error), re.IGNORECASE) is not None
    return False
