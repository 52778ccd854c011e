"""What the rules need to know of operators: which exist, their schemas, which commute, names of element types."""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from typing import Any

import onnx
from onnx import TensorProto, defs, helper

from onnxfuse.graph.model import Graph, Node
from onnxfuse.operators import OPERATORS
from onnxfuse.operators.record import CANONICAL, MICROSOFT

CANONICAL_OPERATORS = frozenset(name for domain, name in OPERATORS if domain == CANONICAL)
"""Operators of the internal view that are none of the standard's: Silu(x) = x * sigmoid(x),
QuickGelu(x, alpha) = x * sigmoid(alpha * x), SafeSoftmax(x, axis) = softmax with 0 where it is not a number."""

MICROSOFT_OPERATORS = frozenset(name for domain, name in OPERATORS if domain == MICROSOFT) | {
    "ComplexMul", "ComplexMulConj"}
"""Names of ONNX Runtime's own domain that are known without asking it: those with a record, and two that have none,
since nobody has said how they compute, and that rules could name all the same where no ONNX Runtime is installed."""

COMMUTATIVE = frozenset(
    {"Add", "Mul", "And", "Or", "Xor", "Equal", "Max", "Min", "Sum", "Mean", "BitwiseAnd", "BitwiseOr", "BitwiseXor"}
)

DTYPES: dict[str, int] = {
    name.lower(): number
    for name, number in TensorProto.DataType.items()
    if name not in ("UNDEFINED", "FLOAT", "DOUBLE")
} | {"float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE}
"""Numbers of ``onnx.TensorProto.DataType`` by the names that rules use: float16, bfloat16, int64, bool, ..."""

DTYPE_NAMES: dict[int, str] = {number: name for name, number in DTYPES.items()}

OperatorKey = tuple[str, str]
"""Domain ("" for the standard one) and operator type."""


@cache
def _standard_names() -> frozenset[str]:
    return frozenset(schema.name for schema in defs.get_all_schemas() if schema.domain == "")


@cache
def _runtime_names() -> frozenset[str]:
    """Every name of com.microsoft that the installed ONNX Runtime has; none where it cannot be asked."""
    try:
        from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema
    except ImportError:
        return frozenset()
    return frozenset(schema.name for schema in get_all_operator_schema() if schema.domain == MICROSOFT)


def operator_key(name: str) -> OperatorKey | None:
    """Domain and type of the operator that a rule calls ``name``; None where no such operator is known.

    Standard and canonical operators are written bare ("Add", "Silu"), others with their domain
    ("com.microsoft.BiasGelu").  A domain that is not ONNX Runtime's is taken on trust: it is the user's own.
    """
    domain, _, op = name.rpartition(".")
    if domain in ("", "ai.onnx"):
        if op in _standard_names():
            return "", op
        return (CANONICAL, op) if op in CANONICAL_OPERATORS and not domain else None
    if domain == MICROSOFT:
        return (domain, op) if op in MICROSOFT_OPERATORS or op in _runtime_names() else None
    if domain == CANONICAL:
        return (domain, op) if op in CANONICAL_OPERATORS else None
    return domain, op


def meant_domain(name: str) -> str | None:
    """The known domain that an operator's, as a rule writes it, is nearly; None where it is one, or another."""
    domain, _, _ = name.rpartition(".")
    known = (MICROSOFT, "ai.onnx", "ai.onnx.ml")
    close = [] if domain in ("", CANONICAL, *known) else get_close_matches(domain, known, 1, 0.8)
    return close[0] if close else None


def operator_names() -> list[str]:
    """Every known operator as a rule writes it, for suggestions."""
    return sorted(
        _standard_names() | CANONICAL_OPERATORS | {f"{MICROSOFT}.{op}" for op in MICROSOFT_OPERATORS | _runtime_names()}
    )


@cache
def schema(domain: str, op: str, version: int | None) -> defs.OpSchema | None:
    """The operator's schema at a version of its domain; the newest where it came later (a canonical node's), else
    None."""
    if version is not None:
        try:
            return defs.get_schema(op, version, domain)
        except onnx.onnx_cpp2py_export.defs.SchemaError:
            return schema(domain, op, None)
    return defs.get_schema(op, domain) if defs.has(op, domain) else None


@cache
def _defaults(domain: str, op: str, version: int | None) -> dict[str, Any]:
    found = schema(domain, op, version)
    if found is None:
        return {}
    defaults = {}
    for name, attribute in found.attributes.items():
        if attribute.default_value.name:
            value = helper.get_attribute_value(attribute.default_value)
            defaults[name] = value.decode() if isinstance(value, bytes) else value
    return defaults


@cache
def _input_positions(domain: str, op: str, version: int | None) -> dict[str, int]:
    found = schema(domain, op, version)
    return {} if found is None else {formal.name: position for position, formal in enumerate(found.inputs)}


@cache
def _keyword_names() -> dict[OperatorKey, set[str]]:
    names: dict[OperatorKey, set[str]] = {}
    for found in defs.get_all_schemas_with_history():
        known = names.setdefault((found.domain, found.name), set())
        known.update(found.attributes)
        known.update(formal.name for formal in found.inputs)
    return names


def keyword_names(key: OperatorKey) -> set[str] | None:
    """Names of the attributes and inputs that the operator has at any version; None where it has no schema."""
    return _keyword_names().get(key)


@cache
def _input_counts() -> dict[OperatorKey, tuple[int, int]]:
    counts: dict[OperatorKey, tuple[int, int]] = {
        (CANONICAL, "Silu"): (1, 1), (CANONICAL, "QuickGelu"): (1, 2), (CANONICAL, "SafeSoftmax"): (1, 2)}
    for found in defs.get_all_schemas_with_history():
        least, most = counts.get((found.domain, found.name), (found.min_input, found.max_input))
        counts[found.domain, found.name] = min(least, found.min_input), max(most, found.max_input)
    return counts


def input_counts(key: OperatorKey) -> tuple[int, int] | None:
    """The fewest and the most inputs that the operator has at any version; None where it has no schema."""
    return _input_counts().get(key)


def attribute(node: Node, name: str, graph: Graph) -> Any:
    """The attribute's value, or its default by the schema; None where it has neither."""
    if name in node.attributes:
        value = node.attributes[name]
        return value.decode(errors="replace") if isinstance(value, bytes) else value
    return _defaults(node.domain, node.op, graph.opsets.get(node.domain)).get(name)


def input_position(node: Node, name: str, graph: Graph) -> int | None:
    """Position of the input that the node's schema calls ``name``; None where that is no input of it."""
    return _input_positions(node.domain, node.op, graph.opsets.get(node.domain)).get(name)
