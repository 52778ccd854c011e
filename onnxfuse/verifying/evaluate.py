"""Running small models on the CPU: ONNX Runtime with its optimisations off, so that it computes what is written.

An operator that its CPU provider lacks in float64 (Erf, Softplus and some more) is computed in float32 between two
casts; what float32 would spoil is spelled out instead (``spelling``).  What the CPU provider makes of NaN, infinity and
integers at their limits is not always what is owed: such operators are spelled out too (``decompositions``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxfuse.errors import VerificationError
from onnxfuse.processors import threads
from onnxfuse.rewriting import value_types
from onnxfuse.verifying.decompositions import decomposed
from onnxfuse.verifying.spelling import INEXACT, SINGLE, SPELLED, Spelling

Array = NDArray[Any]

CPU = ["CPUExecutionProvider"]

Kind = tuple[bytes, tuple[int, ...], tuple[int, ...], tuple[tuple[str, int], ...]]
"""What decides whether a provider has a node's operator: the node, its values numbered, the types of what it reads and
writes, and the opsets."""

_FATAL_ONLY = 4
_SUFFIX = ".plain"


def exact_options(count: int | None = None) -> onnxruntime.SessionOptions:
    """Options that keep the graph as it is and print nothing.

    Threads sleep when they have nothing to do: each session has a pool of its own, most run a few small nodes, and with
    threads that spin for the next one they took twice the processor's time.

    Args:
        count: of threads; as many as there are processors where None.  What a GPU computes wants one: a pool is made
            and ended with each session.
    """
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.intra_op_num_threads = threads() if count is None else count
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = _FATAL_ONLY
    return options


class Evaluator:
    """A small model ready to run on the CPU; takes and gives NumPy arrays of the model's types.

    Attributes:
        runnable: the model as it is run, but for bfloat16 among its inputs and outputs.
        downgraded: operators that are computed in float32 although the model says float64.
    """

    def __init__(self, model: onnx.ModelProto, declared: Mapping[str, int] | None = None) -> None:
        """Create the session.

        Args:
            declared: for a model that computes in a wider type than the original says, the type of the first operand of
                the original's nodes by their first output.

        Raises:
            VerificationError: ONNX Runtime cannot run the model.
        """
        self.runnable, self.downgraded = runnable_in_double(decomposed(model, value_types(model), declared or {}))
        self.inputs = {info.name: info.type.tensor_type.elem_type for info in model.graph.input}
        self.outputs = [info.type.tensor_type.elem_type for info in model.graph.output]
        try:
            self._session = onnxruntime.InferenceSession(
                with_plain_borders(self.runnable).SerializeToString(), exact_options(), providers=CPU)
        except Exception as error:  # ONNX Runtime has an exception type per status
            raise VerificationError(f"A reference cannot be computed: {error}") from error

    def converted(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Arrays for several runs, in the types of the inputs, so that no run converts them again."""
        return {name: feeds[name].astype(array_type(kind), copy=False) for name, kind in self.inputs.items()
                if name in feeds}

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """The outputs; inputs of another type are converted.

        Raises:
            VerificationError: the run fails.
        """
        try:
            results = self._session.run(None, plain_feeds(feeds, self.inputs))
        except Exception as error:
            raise VerificationError(f"A reference cannot be computed: {error}") from error
        return [np.asarray(array).astype(array_type(kind), copy=False)
                for array, kind in zip(results, self.outputs, strict=True)]


def array_type(kind: int) -> np.dtype[Any]:
    """NumPy's type for an element type; ``ml_dtypes.bfloat16`` for bfloat16."""
    return np.dtype(ml_dtypes.bfloat16 if kind == TensorProto.BFLOAT16 else helper.tensor_dtype_to_np_dtype(kind))


def plain_feeds(feeds: Mapping[str, Array], kinds: Mapping[str, int]) -> dict[str, Array]:
    """Arrays for the inputs of ``with_plain_borders`` of a model whose inputs have these types."""
    result = {}
    for name, kind in kinds.items():
        array = feeds[name].astype(array_type(kind), copy=False)
        if kind == TensorProto.BFLOAT16:
            result[name + _SUFFIX] = array.astype(np.float32)
        else:
            result[name] = array
    return result


def with_plain_borders(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with float32 in place of bfloat16 among its inputs and outputs, which ONNX Runtime's Python binding
    does not take; the casts are exact."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    before, after = [], []
    for info in graph.input:
        if info.type.tensor_type.elem_type == TensorProto.BFLOAT16:
            before.append(helper.make_node("Cast", [info.name + _SUFFIX], [info.name], to=TensorProto.BFLOAT16))
            info.name, info.type.tensor_type.elem_type = info.name + _SUFFIX, TensorProto.FLOAT
    for info in graph.output:
        if info.type.tensor_type.elem_type == TensorProto.BFLOAT16:
            after.append(helper.make_node("Cast", [info.name], [info.name + _SUFFIX], to=TensorProto.FLOAT))
            # Inside the graph now, and a fused node's outputs have their types from nowhere else.
            graph.value_info.add().CopyFrom(info)
            info.name, info.type.tensor_type.elem_type = info.name + _SUFFIX, TensorProto.FLOAT
    nodes = [*before, *graph.node, *after]
    del graph.node[:]
    graph.node.extend(nodes)
    return result


def runnable_in_double(model: onnx.ModelProto) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """The model with float32 around nodes that the CPU provider has not in float64, and the types of these nodes."""
    types = value_types(model)
    doubles = {name for name, kind in types.items() if kind == TensorProto.DOUBLE}
    if not doubles:
        return model, ()
    opsets = opsets_of(model)
    own = {(function.domain, function.name) for function in model.functions}
    nodes: list[onnx.NodeProto] = []
    downgraded: dict[str, None] = {}
    for place, node in enumerate(model.graph.node):
        plain = doubles.isdisjoint((*node.input, *node.output)) or (node.domain, node.op_type) in own
        spelled = node.op_type in SPELLED and not node.domain
        known = node.op_type in (INEXACT if spelled else SINGLE) and not node.domain
        if plain or (not known and _runs(kind_of(node, types, opsets))):
            nodes.append(node)
        elif spelled:
            spelling = Spelling(f"spelled{place}", dict(opsets).get("", 1))
            SPELLED[node.op_type](_widened(node, types, spelling), spelling)
            nodes.extend(spelling.nodes)
        else:
            nodes.extend(_in_single(node, doubles, f"single{place}"))
            downgraded[node.op_type] = None
    result = onnx.ModelProto()
    result.CopyFrom(model)
    del result.graph.node[:]
    result.graph.node.extend(nodes)
    return result, tuple(downgraded)


def _widened(node: onnx.NodeProto, types: Mapping[str, int], to: Spelling) -> onnx.NodeProto:
    """The node with its operands in float64: the standard may have one in float32, as DequantizeLinear's result was."""
    result = onnx.NodeProto()
    result.CopyFrom(node)
    for operand, name in enumerate(node.input):
        if name and types.get(name) != TensorProto.DOUBLE:
            result.input[operand] = to.step("Cast", name, to=TensorProto.DOUBLE)
    return result


def opsets_of(model: onnx.ModelProto) -> tuple[tuple[str, int], ...]:
    """Domains and versions of a model's operators."""
    return tuple(sorted((entry.domain, entry.version) for entry in model.opset_import))


def kind_of(node: onnx.NodeProto, types: Mapping[str, int], opsets: tuple[tuple[str, int], ...]) -> Kind:
    """A node's kind: its values are numbered, so that equal ones are tried once."""
    plain = onnx.NodeProto()
    plain.CopyFrom(node)
    plain.name = ""
    plain.input[:] = [f"i{place}" if name else "" for place, name in enumerate(node.input)]
    plain.output[:] = [f"o{place}" if name else "" for place, name in enumerate(node.output)]
    reads, writes = (tuple(types.get(name, 0) for name in names) for names in (node.input, node.output))
    return bytes(plain.SerializeToString(deterministic=True)), reads, writes, opsets


@lru_cache(maxsize=4096)
def _runs(kind: Kind) -> bool:
    """Whether the CPU provider has the operator for these types."""
    try:
        onnxruntime.InferenceSession(probe_model([kind]).SerializeToString(), exact_options(), providers=CPU)
    except Exception:  # an operator that is missing is known by nothing else
        return False
    return True


def probe_model(kinds: Sequence[Kind]) -> onnx.ModelProto:
    """Nodes of some kinds of the same opsets beside one another, for who asks whether a session of them starts."""
    nodes: list[onnx.NodeProto] = []
    inputs: list[onnx.ValueInfoProto] = []
    outputs: list[onnx.ValueInfoProto] = []
    for place, (raw, reads, writes, _) in enumerate(kinds):
        node = onnx.NodeProto.FromString(raw)
        for names, types, to in ((node.input, reads, inputs), (node.output, writes, outputs)):
            names[:] = [f"{name}.{place}" if name else "" for name in names]
            to += [helper.make_tensor_value_info(name, kind, None)
                   for name, kind in zip(names, types, strict=True) if name]
        nodes.append(node)
    opsets = [helper.make_opsetid(*entry) for entry in kinds[0][-1]]
    return helper.make_model(helper.make_graph(nodes, "probe", inputs, outputs), opset_imports=opsets, ir_version=8)


def _in_single(node: onnx.NodeProto, doubles: set[str], stem: str) -> list[onnx.NodeProto]:
    """The node in float32 between casts from and to float64."""
    inner = onnx.NodeProto()
    inner.CopyFrom(node)
    before, after = [], []
    for place, name in enumerate(node.input):
        if name in doubles:
            inner.input[place] = f"{stem}.i{place}"
            before.append(helper.make_node("Cast", [name], [inner.input[place]], to=TensorProto.FLOAT))
    for place, name in enumerate(node.output):
        if name in doubles:
            inner.output[place] = f"{stem}.o{place}"
            after.append(helper.make_node("Cast", [inner.output[place]], [name], to=TensorProto.DOUBLE))
    return [*before, inner, *after]
