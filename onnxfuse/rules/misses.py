"""How far an attempt came: the deepest failure, if it came far enough to be worth telling."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from onnxfuse.graph.model import Node, Value, root
from onnxfuse.refusal import Refusal
from onnxfuse.rules.operands import producer_of
from onnxfuse.rules.operators import OperatorKey

NOT_CONSTANT, OTHER_OPERATOR, OTHER_VALUE, WHOLE = range(4)
"""Severity of a failure: a value that is no constant; another operator; the operators agreed and an attribute or a
value did not; the whole pattern matched and a condition or an escaping value stood in the way."""


@dataclass(frozen=True)
class Miss:
    depth: int
    severity: int
    code: str
    message: str
    node: Node | None
    remedy: str


class Misses:
    """Keeps the deepest failure of an attempt at a pattern of ``size`` nodes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.best: Miss | None = None

    def record(
        self, depth: int, severity: int, code: str, message: Callable[[], str], node: Node | None, remedy: str = ""
    ) -> None:
        """Note a failure after ``depth`` nodes had matched.  The message is made at once, where it is kept: what it
        speaks of is undone later."""
        if severity == WHOLE:
            depth = max(depth, self.size) + 1
        if self.best is not None and (self.best.depth, self.best.severity) >= (depth, severity):
            return
        if self._worth_telling(depth, severity):
            self.best = Miss(depth, severity, code, message(), node, remedy)

    def _worth_telling(self, depth: int, severity: int) -> bool:
        """Two thirds of the pattern's nodes for a value that is no constant, more than half for another operator, a
        third where the operators agreed."""
        size = self.size
        return (depth * 3 >= size * 2, depth * 2 > size, depth * 3 >= size, True)[severity]

    def refusal(self, rule: str, anchor: Node) -> Refusal | None:
        """The failure that was kept, or None."""
        best = self.best
        if best is None:
            return None
        return Refusal(best.code, best.message, (best.node or anchor).label, rule, best.remedy)


def operator_message(value: Value | None, keys: Collection[OperatorKey] | None) -> str:
    """What stands where one of ``keys`` was expected to compute ``value``."""
    names = sorted(f"{domain}.{op}" if domain else op for domain, op in keys or ())
    wanted = ", ".join(names) or "another operator"
    if value is None:
        return f"An input is absent where the rule needs {wanted}."
    node, _, _ = producer_of(value)
    if node is None or value.is_constant:
        source = "a constant" if root(value).is_constant else "an input of the model"
        return f"{value.name} is {source} where the rule needs {wanted}."
    return f"{value.name} comes from {node.qualified_op} where the rule needs {wanted}."
