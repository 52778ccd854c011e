"""ONNX Runtime on the CPU with its own optimisations off: what a model computes as it is written."""

from __future__ import annotations

import ctypes
import math
import re
from functools import cache

import onnx
import onnxruntime
from onnx import TensorProto, helper
from reference import numpy_type

State = onnxruntime.capi.onnxruntime_pybind11_state
RELEASE = tuple(map(int, onnxruntime.__version__.split(".")[:2]))
"""Of ONNX Runtime, as (1, 31)."""

ABSENT = (State.NotImplemented, State.Fail, State.InvalidGraph)
"""What the CPU provider says of a model with an operator, or a type of one, that it lacks."""

_FIRST = {"ConvInteger": 22, "Einsum": 25, "MaxUnpool": 25, "OneHot": 27, "LpNormalization": 30, "TopK": 31}
ENDING = {name for name, first in _FIRST.items() if (1, first) > RELEASE}
"""Operators with which the CPU provider ended the process before 1.22, 1.25 and so on: of a tensor without elements,
for an absent zero point, at a place past the end."""


def session(model: onnx.ModelProto) -> onnxruntime.InferenceSession | None:
    """A session without optimisations; None where the CPU provider lacks an operator or a type of it, or this
    release the opset or the IR version."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except ABSENT:
        return None
    except State.InvalidArgument as error:
        if not re.search("till opset|max supported IR version", str(error)):
            raise
        return None


@cache
def takes(opset: int) -> bool:
    """Whether this release of ONNX Runtime has an opset."""
    values = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, None)] for name in "xy"]
    node = helper.make_node("Identity", ["x"], ["y"])
    return session(helper.make_model(helper.make_graph([node], "opset", *values), ir_version=8,
                                     opset_imports=[helper.make_opsetid("", opset)])) is not None


def bytes_of(value: onnxruntime.OrtValue) -> bytes:
    """The memory of a tensor of numbers; ONNX Runtime 1.21 has no ``tensor_size_in_bytes``."""
    size = math.prod(value.shape()) * numpy_type(value.element_type()).itemsize
    return ctypes.string_at(value.data_ptr(), size) if size else b""


STRICT = (1, 25)
"""Releases of ONNX Runtime before this one run some of the models that they should refuse, or end the process."""


def is_refused(model: onnx.ModelProto, words: str) -> bool:
    """Whether ONNX Runtime makes no session of a model, and says one of these words of it; old ones are not asked."""
    if RELEASE < STRICT:
        return True
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    except Exception as error:  # of any of the runtime's kinds
        return re.search(words, str(error), re.IGNORECASE) is not None
    return False
