"""Names for bodies, from the pool that the native library registers, and names for fused nodes."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass

import onnx

from onnxfuse.graph.order import all_nodes, subgraphs
from onnxfuse.lowering import launch
from onnxfuse.rewriting.index import ModelIndex

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


class Names:
    """Names that are taken, and new ones that are unlike them and one another."""

    def __init__(self, *taken: Container[str]) -> None:
        self._taken = taken
        self._given: set[str] = set()
        self._following: dict[str, int] = {}

    def give(self, stem: str) -> str:
        """``stem``, or ``stem_2`` and so on where that is taken; it is from now on."""
        # What was taken stays so: the next one need not look at the numbers before again.
        name, number = stem, self._following.get(stem, 2)
        while name in self._given or any(name in taken for taken in self._taken):
            name, number = f"{stem}_{number}", number + 1
        self._following[stem] = number
        self._given.add(name)
        return name


def value_names(index: ModelIndex) -> set[str]:
    """Every name that a value of the model, or of a subgraph, has."""
    graph = index.model.graph
    names = {*index.inputs, *index.outputs, *index.initializers, *index.infos, *index.bound}
    names |= {sparse.values.name for sparse in graph.sparse_initializer}
    for node in all_nodes(iter(graph.node)):
        names.update(node.input)
        names.update(node.output)
        for inner in subgraphs(node):
            names.update(tensor.name for tensor in inner.initializer)
            names.update(info.name for info in (*inner.input, *inner.output))
    return names


def node_stem(replaced: Sequence[onnx.NodeProto], rule: str) -> str:
    """What the name of a node that replaces others begins with: the first one's name and the rule."""
    first = next((node.name for node in replaced if node.name), replaced[0].op_type)
    return f"{first}.{rule}" if rule else f"{first}.fused"


def _identity(body: onnx.FunctionProto) -> bytes:
    """What two functions of equal structure have in common."""
    plain = onnx.FunctionProto()
    plain.CopyFrom(body)
    for field in ("name", "doc_string", "metadata_props", "value_info"):
        plain.ClearField(field)
    return bytes(plain.SerializeToString(deterministic=True))
