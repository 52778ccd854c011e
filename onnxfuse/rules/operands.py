"""Values and keywords as the matcher compares them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from onnxfuse.graph.model import Graph, Node, Value, root
from onnxfuse.rules.operators import DTYPE_NAMES, attribute
from onnxfuse.rules.pattern import Given

# A constant equals a literal within this; bfloat16 keeps 8 bits and its rounding error is larger.
_TOLERANCE = 1e-3
_TOLERANCE_BFLOAT16 = 4e-3


def producer_of(value: Value | None) -> tuple[Node | None, int, tuple[Node, ...]]:
    """The node that computes a value, looked at through Identity nodes, which output of it, and those nodes."""
    skipped: list[Node] = []
    while value is not None and not value.is_constant:
        node = value.producer
        if node is None:
            return None, 0, ()
        if not is_identity(node) or not node.inputs:
            return node, position_of(value), tuple(skipped)
        skipped.append(node)
        value = node.inputs[0]
    return None, 0, ()


def is_identity(node: Node | None) -> bool:
    """Whether the node is the standard's Identity."""
    return node is not None and node.op == "Identity" and not node.domain


def position_of(value: Value) -> int:
    """Which output of its producer the value is."""
    producer = value.producer
    if producer is None:
        return 0
    return producer.outputs.index(value)


def common_source(bound: Any, value: Value | None) -> tuple[Any, tuple[Node, ...]]:
    """What two that are the ``same`` come from, and the Identity nodes between it and each of them."""
    if not isinstance(bound, Value) or value is None or bound is value or root(bound) is not root(value):
        return bound, ()  # equal constants: either will do
    first, second = _through(bound), _through(value)
    while len(first) > 1 and len(second) > 1 and first[-2] is second[-2]:
        first, second = first[:-1], second[:-1]
    producers = (each.producer for each in (*first[:-1], *second[:-1]))
    return first[-1], tuple(node for node in producers if node is not None)


def _through(value: Value) -> list[Value]:
    """The value, what the Identity node that computes it reads, and so on to its root."""
    found = [value]
    while found[-1] is not root(found[-1]):
        producer = found[-1].producer
        assert producer is not None and producer.inputs[0] is not None
        found.append(producer.inputs[0])
    return found


def same(bound: Any, value: Value | None) -> bool:
    """Whether a name that is bound already may stand for this value too."""
    if bound is None or value is None or not isinstance(bound, Value):
        return bound is value
    a, b = root(bound), root(value)
    if a is b:
        return True
    # exporters repeat small constants: equal contents are one value
    return (
        a.constant is not None and b.constant is not None and a.dtype == b.dtype
        and a.constant.shape == b.constant.shape and bool(np.array_equal(a.constant, b.constant))
    )


def close(a: Any, b: Any) -> bool:
    """Whether two contents agree; floating-point numbers within the tolerance of constants."""
    if isinstance(a, float) and isinstance(b, float):
        return a == b or abs(a - b) <= _TOLERANCE * abs(b)
    return bool(a == b)


def equals_literal(wanted: float, value: Value) -> bool:
    """Whether a constant of one element is this number, as its type rounds it."""
    assert value.constant is not None
    content = float(value.constant.reshape(-1)[0])
    tolerance = _TOLERANCE_BFLOAT16 if DTYPE_NAMES.get(value.dtype or 0) == "bfloat16" else _TOLERANCE
    return content == wanted or abs(content - wanted) <= tolerance * abs(wanted) < np.inf


def plain(value: Any) -> Any:
    """An attribute's or constant's content as Python numbers and lists; a single element as a number."""
    if isinstance(value, Value):
        constant = root(value).constant
        if constant is None:
            return value.name
        return constant.reshape(-1)[0].item() if constant.size == 1 else constant.tolist()
    if hasattr(value, "tolist"):
        value = value.tolist()
    return list(value) if isinstance(value, tuple) else value


def name_of(value: Any) -> str:
    """What messages call a bound value."""
    return value.name if isinstance(value, Value) else str(value)


def keyword_mismatch(
    node: Node, name: str, wanted: Given, found: Any, graph: Graph
) -> tuple[str, Callable[[], str]] | None:
    """Compare an attribute, or the contents of an input, with what a rule states.

    Axes compare by the axis that they mean: -1 is 2 at rank 3, and the order does not matter.

    Returns:
        None where they agree, else a refusal's code and message.
    """
    is_axis = name in ("axis", "axes")
    reduces = node.op.startswith("Reduce") or "ormaliz" in node.op or "oftmax" in node.op
    code = "reduction-axis" if is_axis and reduces else "axis" if is_axis else "type" if name == "to" else "attribute"
    content = found
    if isinstance(found, Value):
        content = root(found).constant
        if content is None:
            return code, lambda: (
                f"{name} of {node.label} is not known before the model runs; the rule needs {wanted.text}."
            )
    shown, need = plain(content), plain(wanted.value)
    got = shown
    rank = _axes_rank(node) if is_axis else None
    if is_axis:
        got, need = _axes(got, rank, node, graph), _axes(need, rank, node, graph)
    elif isinstance(got, list) and len(got) == 1 and not isinstance(need, list | str):
        got = got[0]
    elif isinstance(need, list) and not isinstance(got, list | str | None):
        got = [got]
    if close(got, need):
        return None

    def message() -> str:
        text = "all" if shown is None and is_axis else DTYPE_NAMES.get(shown, shown) if name == "to" else shown
        return (
            f"{node.qualified_op} has {name} {text}{'' if rank is None else f' of rank {rank}'}; "
            f"the rule needs {wanted.text}."
        )

    return code, message


def _axes_rank(node: Node) -> int | None:
    reference = node.outputs[0] if node.op == "Unsqueeze" else node.inputs[0] if node.inputs else None
    return reference.rank if reference is not None else None


def _axes(axes: Any, rank: int | None, node: Node, graph: Graph) -> Any:
    """Axes counted from the front and sorted where the rank is known; absent ones are all."""
    if axes is None or (isinstance(axes, list) and not axes and node.op.startswith("Reduce")):
        if attribute(node, "noop_with_empty_axes", graph):
            return []
        return None if rank is None else list(range(rank))
    given = axes if isinstance(axes, list) else [axes]
    if not all(isinstance(axis, int | float) and float(axis).is_integer() for axis in given):
        return axes  # no axes at all: a constant of other numbers, or of more than one dimension
    numbers = [int(axis) for axis in given]
    return sorted(axis + rank if axis < 0 and rank is not None else axis for axis in numbers)
