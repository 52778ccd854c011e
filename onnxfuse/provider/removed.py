"""Nodes that run no kernel because their result is an operand's memory: views of sizes, and what ONNX Runtime takes out
when a session is created.

What it takes out was found by trying (tests/test_graph_removed.py asks it again): releases 1.20 to 1.31 agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from onnxfuse.graph.model import Node, Value, root
from onnxfuse.operators.classes import in_training

_RESIZED = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten"})
_VIEWS = _RESIZED | {"Identity"}
_NEUTRAL = {"Add": 0, "Sub": 0, "Mul": 1, "Div": 1}
"""Operators, and the number beside which their other operand is their result."""

_EITHER = frozenset({"Add", "Mul"})
"""Of these, which may have the number first."""

_COUNTED = frozenset({
    TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.INT32, TensorProto.INT64,
})
"""Types of such numbers that ONNX Runtime looks at."""

_END = np.iinfo(np.int64).max
"""Where a Slice ends that exporters write for all of an axis."""

_INTEGERS: dict[int | None, tuple[bool, int]] = {
    TensorProto.BOOL: (False, 1), TensorProto.UINT8: (False, 8), TensorProto.INT8: (True, 7),
    TensorProto.UINT16: (False, 16), TensorProto.INT16: (True, 15), TensorProto.UINT32: (False, 32),
    TensorProto.INT32: (True, 31), TensorProto.UINT64: (False, 64), TensorProto.INT64: (True, 63),
}
"""Whether a type has a sign, and its digits."""
_FLOATS: dict[int | None, tuple[int, int]] = {
    TensorProto.FLOAT16: (11, 5), TensorProto.BFLOAT16: (8, 8), TensorProto.FLOAT: (24, 8),
    TensorProto.DOUBLE: (53, 11),
}
"""Digits of a type's significand and of its exponent."""


def is_same_memory(node: Node) -> bool:
    """Whether the first result is an operand's memory under other sizes, so that no kernel runs."""
    return same_memory(node) is not None


def same_memory(node: Node) -> Value | None:
    """The operand whose memory the first result is, under other sizes; None where a kernel runs."""
    if node.domain or node.has_subgraph or not node.inputs or not node.outputs:
        return None
    first, result = node.inputs[0], node.outputs[0]
    if node.op in _VIEWS:
        return first
    if node.op == "Dropout":
        used = any(value is not None and _is_used(value) for value in node.outputs[1:])
        return None if in_training(node) or used else first
    if result is None or result.is_output:
        return None  # what gives an output of the graph stays
    if node.op in _NEUTRAL:
        return _unchanged(node)
    removed = _REMOVED.get(node.op)
    return first if removed is not None and removed(node) else None


def taken_out(node: Node) -> Value | None:
    """The operand that ONNX Runtime puts in the place of a node's result before it fuses anything; None where the node
    is still there.  Casts to another type and back are: they go last."""
    if node.op in _RESIZED or (node.op == "Cast" and not _keeps_type(node)):
        return None
    if node.op == "Dropout" and node.outputs and node.outputs[0] is not None and node.outputs[0].is_output:
        return None
    return same_memory(node)


def given_back(node: Node) -> Value | None:
    """The operand that is the first result, under its own sizes, as ONNX Runtime takes the node out sooner or later."""
    return None if node.op in _RESIZED else same_memory(node)


def source(value: Value) -> Value:
    """The value that a kernel reads in a value's place once ONNX Runtime has taken out what it does."""
    while value.producer is not None and value is value.producer.outputs[0]:
        operand = given_back(value.producer)
        if operand is None:
            break
        value = operand
    return value


def readers(value: Value) -> Iterator[Node]:
    """The nodes that read a value or one of which it is the ``source``; one may come several times."""
    for each in _names(value):
        yield from (node for node in each.consumers if given_back(node) is not each)


def is_given(value: Value) -> bool:
    """Whether a value, or one of which it is the ``source``, is an output of its graph."""
    return any(each.is_output for each in _names(value))


def _names(value: Value) -> Iterator[Value]:
    """A value, and those of which it is the ``source``."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        yield value
        waiting += [result for node in value.consumers for result in node.outputs[:1]
                    if result is not None and given_back(node) is value]


def passes_on(node: Node) -> bool:
    """Whether the first result is an operand in the same memory under the same sizes: nothing is left of the node."""
    operand = same_memory(node)
    return operand is not None and node.outputs[0] is not None and operand.shape == node.outputs[0].shape


def gives_back(node: Node) -> bool:
    """Whether a node of the canonical view only gives its operand back, and costs nothing where it stands: what reads
    its result may as well read the operand.

    What else its originals read is constant, so that whoever reads the operand may hold a copy of them.
    """
    if node.op != "Identity" or node.domain or len(node.inputs) != 1:
        return False
    operand, result = node.inputs[0], node.outputs[0]
    if operand is None or result is None or (operand.dtype, operand.shape) != (result.dtype, result.shape):
        return False
    inner = {value for original in node.originals for value in original.outputs}
    others = [value for original in node.originals for value in original.reads()
              if value not in inner and value is not same_memory(original)]
    return all(map(passes_on, node.originals)) and all(value.is_constant for value in others)


def _unchanged(node: Node) -> Value | None:
    """What a constant number adds nothing to, or multiplies by one."""
    for operand, number in ((0, 1), (1, 0)) if node.op in _EITHER else ((0, 1),):
        value, beside = node.inputs[operand], node.inputs[number]
        constant = _constant(beside)
        if value is None or value.shape is None or beside is None or beside.dtype not in _COUNTED or constant is None:
            continue
        if constant.ndim <= len(value.shape) and constant.size == 1 and constant.item() == _NEUTRAL[node.op]:
            return value if _is_computed(value) else None
    return None


def _is_computed(value: Value) -> bool:
    """Whether it is a node's result, or a constant: what would give back an input, or in a body a value from around it,
    ONNX Runtime leaves where it is."""
    while value.producer is not None and not value.is_constant:
        node = value.producer
        passes = node.op == "Identity" or _keeps_type(node) or (node.op == "Dropout" and same_memory(node) is not None)
        if node.domain or not passes or node.inputs[0] is None:
            return True
        value = node.inputs[0]
    return value.is_constant


def _constant(value: Value | None) -> NDArray[Any] | None:
    """What a constant holds, also one that is passed on: exporters keep equal weights once."""
    return None if value is None else root(value).constant


def _takes_all(node: Node) -> bool:
    """Whether a Slice takes all of every axis that it names, as exporters write it."""
    starts, ends = _numbers(node, 1), _numbers(node, 2)
    steps = _numbers(node, 4) if len(node.inputs) > 4 and node.inputs[4] is not None else np.ones(1)
    if starts is None or ends is None or steps is None:
        return False
    whole = not np.any(starts) and bool(np.all(ends == _END)) and bool(np.all(steps == 1))
    return whole and node.inputs[0] is not None and _is_computed(node.inputs[0])


def _spreads_nothing(node: Node) -> bool:
    """Whether an Expand to constant sizes keeps those that its operand has."""
    value, sizes = node.inputs[0], _numbers(node, 1)
    if value is None or value.shape is None or sizes is None or len(sizes) > len(value.shape):
        return False
    return _is_computed(value) and all(wanted == 1 or size == int(wanted)
               for size, wanted in zip(value.shape[len(value.shape) - len(sizes):], sizes, strict=True))


def _numbers(node: Node, place: int) -> NDArray[Any] | None:
    """A constant operand of integers, flat."""
    constant = _constant(node.inputs[place]) if len(node.inputs) > place else None
    return None if constant is None else constant.reshape(-1)


def _is_removed_cast(node: Node) -> bool:
    """Whether ONNX Runtime (1.20 to 1.31) takes a Cast out when a session is created: one to the type at hand, one that
    takes back an exact one before it, and an exact one that nothing but one other Cast reads, or those that take it
    back."""
    source, target = _cast_types(node)
    result = node.outputs[0]
    if source is None or target is None or result is None:
        return False
    return source == target or _takes_back(node) or (is_exact(source, target) and _is_read_by_casts(result))


def _keeps_type(node: Node) -> bool:
    """Whether a Cast is to the type at hand."""
    source, target = _cast_types(node)
    return source is not None and source == target


def _takes_back(node: Node) -> bool:
    """Whether a Cast gives back what an exact Cast before it had, and no output of the graph."""
    before = node.inputs[0].producer if node.inputs[0] is not None else None
    if before is None or node.outputs[0] is None or node.outputs[0].is_output:
        return False
    source, target = _cast_types(before)
    return is_exact(source, target) and _cast_types(node) == (target, source)


def _is_read_by_casts(value: Value) -> bool:
    """Whether Casts that take it back read a value and nothing else does, or one Cast to another type."""
    if not value.consumers:
        return False
    source, target = _cast_types(value.consumers[0])
    lone = len(value.consumers) == 1 and source is not None and source != target
    return lone or all(_cast_types(reader)[0] is not None and _takes_back(reader) for reader in value.consumers)


def is_exact(source: int | None, target: int | None) -> bool:
    """Whether every value of a type is one of another type too."""
    if source in _INTEGERS and target in _INTEGERS:
        return all(own <= other for own, other in zip(_INTEGERS[source], _INTEGERS[target], strict=True))
    if source in _INTEGERS and target in _FLOATS:
        return _INTEGERS[source][1] <= _FLOATS[target][0]
    return source in _FLOATS and target in _FLOATS and all(
        own <= other for own, other in zip(_FLOATS[source], _FLOATS[target], strict=True))


def _cast_types(node: Node) -> tuple[int | None, int | None]:
    """The types that a Cast takes and gives; None of other nodes."""
    if node.op != "Cast" or node.domain or not node.inputs or node.inputs[0] is None:
        return None, None
    target = node.attributes.get("to")
    return node.inputs[0].dtype, target if isinstance(target, int) else None


def _is_used(value: Value) -> bool:
    return value.is_output or bool(value.consumers)


_REMOVED: dict[str, Callable[[Node], bool]] = {
    "Cast": _is_removed_cast, "Slice": _takes_all, "Expand": _spreads_nothing,
}
