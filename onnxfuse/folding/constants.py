"""Which nodes of constants run every time because they are of 16-bit floats: in float32 they run once.

    w ─ Mul ─▶ weights (float16, in every run)      w ─ Cast ─ Mul (float32) ─ Cast ─▶ weights (once)

Each result is rounded where it was rounded, so that sums, products, quotients and roots are the same bits: float32
holds more than twice as many as float16 and bfloat16 (Figueroa, When is double rounding innocuous?, 1995).
"""

from __future__ import annotations

from collections.abc import Iterable

from onnxfuse.graph.model import Graph, Node, Value
from onnxfuse.graph.sizes import bytes_of
from onnxfuse.provider.constants import is_computed_once, is_kept_for_its_type

STAGE = "constants"
"""The id that leaves this stage out."""

MOST_GROWN = 16 << 20
"""Bytes by which results may be larger than operands: a session keeps them."""


def kept_for_their_type(graph: Graph) -> tuple[Node, ...]:
    """The nodes of the main graph that are to be of float32, in graph order."""
    constants = {value for value in graph.values.values() if value.is_constant}
    found = []
    for node in graph.nodes:
        if not all(value in constants for value in node.reads()):
            continue
        wide = is_kept_for_its_type(node) and _grows_little(node)
        if wide:
            found.append(node)
        if wide or is_computed_once(node):
            constants.update(value for value in node.outputs if value is not None)
    return tuple(found)


def _grows_little(node: Node) -> bool:
    """Whether the results of a node of constants take hardly more memory than what it reads."""
    results, operands = _bytes(node.outputs), _bytes(node.inputs)
    return results is not None and operands is not None and results <= operands + MOST_GROWN


def _bytes(values: Iterable[Value | None]) -> int | None:
    """Of values that have a size each; None where one has none that is known."""
    sizes = [bytes_of(value, {}) for value in values if value is not None]
    return None if None in sizes else sum(size for size in sizes if size is not None)
