"""Names for bodies, from the pool that the native library registers, and names for fused nodes."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import onnx

from onnxfuse.graph.order import all_nodes
from onnxfuse.lowering import launch

POOLED = re.compile(r"Region(\d+)")
"""What names of the pool look like."""


@dataclass
class NamePool:
    """Operator types in use by what they stand for, and the first number that is free."""

    names: dict[tuple[bytes, bytes, bytes], str]
    following: int

    @staticmethod
    def of(model: onnx.ModelProto) -> NamePool:
        """The pool as a model leaves it: past every pooled name that it holds, its own bodies known."""
        functions = {entry.name: entry for entry in model.functions if entry.domain == launch.DOMAIN}
        used = set(functions)
        known: dict[tuple[bytes, bytes, bytes], str] = {}
        for node in all_nodes(iter(model.graph.node)):
            if node.domain != launch.DOMAIN:
                continue
            used.add(node.op_type)
            strings = {entry.name: entry.s for entry in node.attribute if entry.type == onnx.AttributeProto.STRING}
            if node.op_type in functions and {"plan", "source"} <= strings.keys():
                known[_identity(functions[node.op_type]), strings["plan"], strings["source"]] = node.op_type
        numbers = [int(match[1]) for name in used if (match := POOLED.fullmatch(name))]
        return NamePool(known, max(numbers, default=-1) + 1)

    def name(self, body: onnx.FunctionProto, plan: str, source: str) -> tuple[str | None, bool]:
        """The operator type for a body and its kernel, and whether its function must be added.

        None where the pool has run out.
        """
        key = (_identity(body), plan.encode(), source.encode())
        if key in self.names:
            return self.names[key], False
        if self.following >= launch.REGION_NAMES:
            return None, False
        self.names[key] = f"Region{self.following}"
        self.following += 1
        return self.names[key], True


def node_name(replaced: Sequence[onnx.NodeProto], rule: str, used: Collection[str]) -> str:
    """A name for the node that replaces others: the first one's name and the rule; unlike every name in ``used``."""
    first = next((node.name for node in replaced if node.name), replaced[0].op_type)
    stem = f"{first}.{rule}" if rule else f"{first}.fused"
    return unlike(stem, used)


def unlike(stem: str, used: Collection[str]) -> str:
    """``stem``, or ``stem_2`` and so on where that is taken."""
    name, number = stem, 2
    while name in used:
        name, number = f"{stem}_{number}", number + 1
    return name


def _identity(body: onnx.FunctionProto) -> bytes:
    """What two functions of equal structure have in common."""
    plain = onnx.FunctionProto()
    plain.CopyFrom(body)
    for field in ("name", "doc_string", "metadata_props", "value_info"):
        plain.ClearField(field)
    return bytes(plain.SerializeToString(deterministic=True))
