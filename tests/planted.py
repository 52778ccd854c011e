"""Faults of one percent planted in the kernel text of fused models."""

from __future__ import annotations

import re
from dataclasses import replace

import onnx

from onnxfuse.lowering.launch import DOMAIN
from onnxfuse.rewriting import Rewritten, read_fused

_STORE = re.compile(r"of::Store<((?:[^<>]|<[^<>]*>)*)>::from\(")
_FLOATS = ("float", "double", "__half", "__nv_bfloat16")
_BODY = "\n}\n// "
"""End of the shared header and start of the kernel's own text."""


def with_fault(source: str, factor: str = "1.01f") -> str:
    """The text with every float result a hundredth too large and every other one wrong by one or inverted.

    Raises:
        AssertionError: nothing is stored as far as can be seen.
    """
    start = source.rindex(_BODY)
    head, body = source[:start], source[start:]
    parts, at, planted = [], 0, 0
    for match in _STORE.finditer(body):
        end = _closing(body, match.end())
        inner = body[match.end():end]
        wrong = f"({inner}) * ({factor})" if match[1] in _FLOATS else f"!({inner})" if match[1] == "bool" else (
            f"({inner}) + 1")
        parts += [body[at:match.end()], wrong]
        at, planted = end, planted + 1
    assert planted, body
    return head + "".join(parts) + body[at:]


def plant(rewritten: Rewritten, op: str, factor: str = "1.01f") -> Rewritten:
    """The fused model with a fault in the kernel of an operator type, in every node that has it."""
    model = onnx.ModelProto()
    model.CopyFrom(rewritten.model)
    for node in model.graph.node:
        if node.domain == DOMAIN and node.op_type == op:
            for attribute in node.attribute:
                if attribute.name == "source":
                    attribute.s = with_fault(attribute.s.decode(), factor).encode()
    return replace(rewritten, model=model)


def kernels(rewritten: Rewritten) -> list[str]:
    """Operator types of the fused nodes, each once."""
    return list(dict.fromkeys(node.op for node in read_fused(rewritten.model)))


def _closing(text: str, start: int) -> int:
    depth = 1
    for place in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place
    raise AssertionError(f"no closing bracket after {text[start:start + 40]!r}")
