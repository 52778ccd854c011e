"""Running small models on the CPU: ONNX Runtime with its optimisations off, so that it computes what is written.

A node that its CPU provider lacks in float64 (Erf, Softplus and some more) is computed in float32 between two casts;
``Evaluator.downgraded`` names these operators.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxfuse.errors import VerificationError

Array = NDArray[Any]

_CPU = ["CPUExecutionProvider"]
_MISSING = re.compile(r"Could not find an implementation for .* node with name '([^']*)'|\(([^()]+)\) (?:is invalid|of)")
_QUIET = 4


def quiet_options(threads: int | None = None) -> onnxruntime.SessionOptions:
    """Options that keep the graph as it is and print nothing."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = _QUIET
    if threads is not None:
        options.intra_op_num_threads = threads
    return options


class Evaluator:
    """A small model ready to run.

    bfloat16 arrays (``ml_dtypes``) go in and come out as float32 casts at the model's border: the Python binding of
    ONNX Runtime does not take them.

    Attributes:
        downgraded: operators that are computed in float32 although the model says float64.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        """Create the session.

        Raises:
            VerificationError: ONNX Runtime cannot run the model.
        """
        self.model = with_plain_borders(model)
        self.downgraded: tuple[str, ...] = ()
        for place, node in enumerate(self.model.graph.node):
            node.name = f"n{place}"
        while True:
            try:
                self.session = onnxruntime.InferenceSession(self.model.SerializeToString(), quiet_options(),
                                                            providers=_CPU)
                return
            except Exception as error:  # ONNX Runtime has an exception type per status
                if not self._downgrade(str(error)):
                    raise VerificationError(
                        f"A reference cannot be computed: {error}", remedy="Report it, with the model's operators.",
                    ) from error

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """The outputs.

        Raises:
            VerificationError: the run fails.
        """
        wanted = {info.name: info.type.tensor_type.elem_type for info in self.model.graph.input}
        arrays = {name: feeds[name].astype(_array_type(kind), copy=False) for name, kind in wanted.items()}
        try:
            results: list[Array] = self.session.run(None, arrays)
        except Exception as error:
            raise VerificationError(f"A reference cannot be computed: {error}") from error
        return [np.asarray(result) for result in results]

    def _downgrade(self, message: str) -> bool:
        """Put float32 around the node that a message blames; False where it blames none that is in float64."""
        match = _MISSING.search(message)
        names = {node.name: place for place, node in enumerate(self.model.graph.node)}
        if match is None:
            return False
        name = next((part for part in match.groups() if part in names), None)
        if name is None:
            # A function of the standard is inlined before it is looked for, and its nodes have no name of ours.
            name = next((node.name for node in self.model.graph.node if _is_function(node, self.model)
                         and node.op_type not in self.downgraded), None)
        if name is None:
            return False
        place = names[name]
        node = self.model.graph.node[place]
        if node.name.endswith(".single"):
            return False
        self.downgraded = tuple(dict.fromkeys((*self.downgraded, node.op_type)))
        replacement = _in_single(node, _double_values(self.model))
        nodes = [*self.model.graph.node[:place], *replacement, *self.model.graph.node[place + 1:]]
        del self.model.graph.node[:]
        self.model.graph.node.extend(nodes)
        return len(replacement) > 1


def with_plain_borders(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with float32 in place of bfloat16 among its inputs and outputs; inside nothing changes."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    before, after = [], []
    for infos, casts, inward in ((graph.input, before, True), (graph.output, after, False)):
        for info in infos:
            if info.type.tensor_type.elem_type != TensorProto.BFLOAT16:
                continue
            inner, info.name = info.name, f"{info.name}.plain"
            info.type.tensor_type.elem_type = TensorProto.FLOAT
            source, target, kind = (info.name, inner, TensorProto.BFLOAT16) if inward else (
                inner, info.name, TensorProto.FLOAT)
            casts.append(helper.make_node("Cast", [source], [target], to=kind))
    if before or after:
        nodes = [*before, *graph.node, *after]
        del graph.node[:]
        graph.node.extend(nodes)
    return result


def plain_name(model: onnx.ModelProto, name: str) -> str:
    """What ``with_plain_borders`` calls an input or output."""
    infos = (*model.graph.input, *model.graph.output)
    return f"{name}.plain" if any(i.name == name and i.type.tensor_type.elem_type == TensorProto.BFLOAT16 for i in infos
                                  ) else name


def value_types(model: onnx.ModelProto) -> dict[str, int]:
    """Element types of a model's values, as far as onnx infers them."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    found = {info.name: info.type.tensor_type.elem_type for info in (*graph.value_info, *graph.input, *graph.output)}
    found |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    return {name: kind for name, kind in found.items() if kind}


def _double_values(model: onnx.ModelProto) -> set[str]:
    return {name for name, kind in value_types(model).items() if kind == TensorProto.DOUBLE}


def _is_function(node: onnx.NodeProto, model: onnx.ModelProto) -> bool:
    versions = {entry.domain: entry.version for entry in model.opset_import}
    try:
        schema = onnx.defs.get_schema(node.op_type, versions.get(node.domain, 1), node.domain)
    except onnx.defs.SchemaError:
        return bool(node.domain)
    return bool(schema.has_function or schema.has_context_dependent_function)


def _in_single(node: onnx.NodeProto, doubles: set[str]) -> list[onnx.NodeProto]:
    """The node in float32 between casts from and to float64."""
    inner = onnx.NodeProto()
    inner.CopyFrom(node)
    inner.name = f"{node.name}.single"
    before, after = [], []
    for place, name in enumerate(node.input):
        if name and (name in doubles or node.domain):
            inner.input[place] = f"{inner.name}.i{place}"
            before.append(helper.make_node("Cast", [name], [inner.input[place]], to=TensorProto.FLOAT,
                                           name=f"{inner.name}.i{place}"))
    for place, name in enumerate(node.output):
        if name and (name in doubles or node.domain):
            inner.output[place] = f"{inner.name}.o{place}"
            after.append(helper.make_node("Cast", [inner.output[place]], [name], to=TensorProto.DOUBLE,
                                          name=f"{inner.name}.o{place}"))
    return [*before, inner, *after]


def _array_type(kind: int) -> np.dtype[Any]:
    return np.dtype(helper.tensor_dtype_to_np_dtype(kind))


def narrow(array: Array, kind: int) -> Array:
    """An array in the type that the model says, where the model's border had another (bfloat16)."""
    return array.astype(ml_dtypes.bfloat16 if kind == TensorProto.BFLOAT16 else _array_type(kind), copy=False)


def concatenated(parts: Sequence[Sequence[onnx.NodeProto]]) -> list[onnx.NodeProto]:
    """Nodes of several lists in one."""
    return [node for part in parts for node in part]
