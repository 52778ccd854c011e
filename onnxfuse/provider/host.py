"""Which values ONNX Runtime's CUDA provider keeps in host memory, and which nodes cost no kernel there.

The provider moves arithmetic on sizes to the CPU: downstream of a Shape or Size, a node runs on the host when each
operand is a host value, a graph input or a small constant, none is of a type that the host has no arithmetic for,
and no host value is one that the device kernel itself reads in host memory (the target of a Reshape).  It looks at each
body by itself: what a body reads from the graphs around it is no host value there, and a body's inputs are inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from onnx import TensorProto

from onnxfuse.graph.dims import product
from onnxfuse.graph.model import Graph, Node, Value
from onnxfuse.operators.record import operator_of
from onnxfuse.provider.constants import is_computed_once
from onnxfuse.provider.removed import same_memory

SMALL_CONSTANT = 100
"""Constants of at most so many elements count as readable on the host (a limit of ONNX Runtime's own)."""

_NOT_ON_HOST = frozenset({
    TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E4M3FNUZ,
    TensorProto.FLOAT8E5M2, TensorProto.FLOAT8E5M2FNUZ,
})


@dataclass(frozen=True)
class Host:
    """What runs and lies on the host.

    Attributes:
        nodes: nodes that the provider leaves to the CPU.
        values: values in host memory, constants left out.
        folded: nodes with constant operands alone, computed once when the session is created.
        constants: constants and what is folded from them.
    """

    nodes: frozenset[Node]
    values: frozenset[Value]
    folded: frozenset[Node]
    constants: frozenset[Value]


_known: WeakKeyDictionary[Graph, Host] = WeakKeyDictionary()

_folded: WeakKeyDictionary[Value, bool] = WeakKeyDictionary()
"""Of values that bodies read from outside: many bodies may read what one long chain computes."""


def host(graph: Graph) -> Host:
    """What runs and lies on the host, computed once a graph."""
    found = _known.get(graph)
    if found is None:
        found = _known[graph] = _find(graph)
    return found


def on_host(item: Node | Value, graph: Graph) -> bool:
    """Whether ONNX Runtime runs the node, or keeps the value, on the host."""
    found = host(graph)
    return item in (found.nodes if isinstance(item, Node) else found.values)


def _find(graph: Graph) -> Host:
    nodes: set[Node] = set()
    values: set[Value] = set()
    folded: set[Node] = set()
    constants = {value for value in graph.values.values() if value.is_constant or _is_folded(value.outer)}
    for node in graph.nodes:
        results = [value for value in node.outputs if value is not None]
        if is_computed_once(node) and all(value in constants for value in node.reads()):
            folded.add(node)
            constants.update(results)
        elif _runs_on_host(node, values, constants):
            nodes.add(node)
            values.update(results)
        elif same_memory(node) in values:
            values.update(results)
    return Host(frozenset(nodes), frozenset(values), frozenset(folded), frozenset(constants))


def _is_folded(value: Value | None) -> bool:
    """Whether a value that a body reads from outside is computed once, when the session is created."""
    if value is None:
        return False
    if value not in _folded:
        _folded[value] = _is_made_once(value)
    return _folded[value]


def _is_made_once(value: Value) -> bool:
    waiting: list[Value | None] = [value]
    seen: set[Value] = set()
    while waiting:
        here = waiting.pop()
        if here is None or _folded.get(here) is False:
            return False
        if here in seen or here.is_constant or here in _folded:
            continue
        seen.add(here)
        node = here.producer
        if node is None:
            waiting.append(here.outer)
        elif not is_computed_once(node):
            return False
        else:
            waiting += node.reads()
    return True


def _runs_on_host(node: Node, values: set[Value], constants: set[Value]) -> bool:
    if node.domain or node.has_subgraph:
        return False
    if node.op in ("Shape", "Size"):
        return True
    read_on_host = host_operands(node)
    some = False
    for place, value in enumerate(node.inputs):
        if value is None:
            continue
        if value.dtype in _NOT_ON_HOST:
            return False
        if value.is_input or (value in constants and _is_small(value)):
            continue
        if value not in values or place in read_on_host:
            return False
        some = True
    return some


def host_operands(node: Node) -> frozenset[int]:
    """Places of the operands that the provider's kernel reads in host memory."""
    found = operator_of(node)
    return frozenset() if found is None else found.host


def _is_small(value: Value) -> bool:
    count = None if value.shape is None else product(value.shape).value
    return count is not None and count <= SMALL_CONSTANT
