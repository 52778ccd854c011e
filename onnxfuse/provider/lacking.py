"""Operators for which ONNX Runtime's CUDA provider has no kernel: the CPU runs them, between copies over the bus.

As measured (benchmarks/results, h200-edge-values: a session that may not fall back refuses them), and of quantised
operators and GridSample by the list of kernels that the runtime publishes.  An operator that the standard gives a
function, and the CPU has no kernel for either, runs as that function's nodes, and is not among them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from onnx import TensorProto

from onnxfuse.graph.model import Node, Value
from onnxfuse.graph.sizes import Sizes, bytes_of
from onnxfuse.operators.record import MICROSOFT
from onnxfuse.provider.host import host_operands

BUS, HOST = 25e9, 20e9
"""Bytes a second over the bus, and through an operator of the CPU: more than most machines reach, so that nothing is
gained by what is not so."""

COPY_SECONDS = 10e-6
"""Of a copy, however little it moves: the GPU's work before it ends first."""

SHOWN = 5
"""Operators that are named, at most."""

_BYTES = frozenset({TensorProto.INT8, TensorProto.UINT8})
_SHORT = frozenset({TensorProto.INT16, TensorProto.UINT16})

_EVERY = frozenset({
    *(("", name) for name in (
        "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cosh", "Sinh", "Tan", "BitShift", "Celu", "Mean",
        "GlobalLpPool", "DynamicQuantizeLinear", "ConvInteger", "QLinearConv", "QLinearMatMul")),
    *((MICROSOFT, name) for name in (
        "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "QGemm", "QLinearAdd", "QLinearMul", "QLinearSigmoid",
        "QLinearLeakyRelu", "QLinearSoftmax", "QLinearGlobalAveragePool")),
})
"""By domain and operator: those of every type."""

_OF: Mapping[tuple[str, str], frozenset[int]] = {
    ("", "GridSample"): frozenset({TensorProto.FLOAT16, TensorProto.DOUBLE}),
    ("", "Clip"): frozenset({TensorProto.INT32}), ("", "Relu"): _BYTES | {TensorProto.INT32},
    ("", "LpNormalization"): frozenset({TensorProto.DOUBLE}), ("", "ReduceProd"): frozenset({TensorProto.INT64}),
    ("", "Mod"): _BYTES | _SHORT, ("", "DequantizeLinear"): _SHORT,
    ("", "QuantizeLinear"): _SHORT,
    ("", "MatMulInteger"): frozenset({TensorProto.UINT8}),
    **{("", name): _BYTES for name in ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min")},
}
"""Those of certain types of their first operand, or of QuantizeLinear's result."""


def lacks_kernel(node: Node) -> bool:
    """Whether the CPU runs a node."""
    operator = "" if node.domain == "ai.onnx" else node.domain, node.op
    if operator in _EVERY:
        return True
    values = node.outputs if node.op == "QuantizeLinear" else node.inputs
    return any(value is not None and value.dtype in _OF.get(operator, ()) for value in values[:1])


def host_seconds(node: Node, sizes: Sizes) -> float:
    """What copies of such a node's tensors to the CPU and back take, and the CPU; not of what it leaves there for, or
    takes from, another such node, the model's inputs, or constants."""
    taken = [value for value in node.inputs if value is not None and value.producer is not None
             and value.constant is None and not lacks_kernel(value.producer)]
    given = [value for value in node.outputs if value is not None and _is_read(value)]
    there, moved = (sum(bytes_of(value, sizes) or 0 for value in values) for values in (
        [value for value in (*node.inputs, *node.outputs) if value is not None], [*taken, *given]))
    return moved / BUS + there / HOST + COPY_SECONDS * len([*taken, *given])


def left_to_the_cpu(nodes: Iterable[Node]) -> tuple[str, ...]:
    """What a user should know of nodes that the runtime runs, a sentence if anything."""
    counts = Counter(node.op for node in nodes if lacks_kernel(node))
    if not counts:
        return ()
    most = [f"{op} ({count})" for op, count in sorted(counts.items(), key=lambda each: (-each[1], each[0]))]
    named = ", ".join(most[:SHOWN]) + (f" and {len(most) - SHOWN} more" if len(most) > SHOWN else "")
    return (f"ONNX Runtime has no kernel on the GPU for nodes that are left to it: {named}. The CPU runs them, and "
            "their tensors are copied there and back.",)


def _is_read(value: Value) -> bool:
    """Whether a node on the GPU reads there what the CPU made."""
    return any(operand is value and place not in host_operands(reader) for reader in value.consumers
               if not lacks_kernel(reader) for place, operand in enumerate(reader.inputs))
