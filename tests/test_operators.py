"""Records of operators: whole, one each, and every operator of the standard has one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from onnx import defs

from onnxfuse.graph.model import Node
from onnxfuse.operators import OPERATORS, flops_of, lowered
from onnxfuse.operators.arithmetic import none, per_output, uncounted
from onnxfuse.operators.record import CANONICAL, HEAVY, MICROSOFT, OPAQUE, POINTWISE, VIEW, define
from onnxfuse.provider import kernels
from onnxfuse.rules.operators import CANONICAL_OPERATORS, input_counts, operator_key


def test_every_operator_of_the_standard_has_a_record() -> None:
    """A release of onnx with new operators fails here until somebody has said what they are."""
    known = {name for domain, name in OPERATORS if not domain}
    assert {schema.name for schema in defs.get_all_schemas() if schema.domain == ""} <= known


def test_rules_know_the_operators_that_have_records() -> None:
    assert all(operator_key(f"{domain}.{name}" if domain else name) == (domain, name) for domain, name in OPERATORS
               if (domain, name) != ("", "SimplifiedLayerNormalization"))  # which onnx does not have
    assert {"Silu", "QuickGelu", "SafeSoftmax"} == CANONICAL_OPERATORS
    # Without schemas nothing else says how many inputs a rule may give them.
    assert None not in {input_counts((CANONICAL, name)) for name in CANONICAL_OPERATORS}


def test_rules_know_an_operator_without_asking_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxfuse.rules.operators._runtime_names", frozenset)
    for name in ("BiasGelu", "FusedMatMul", "SimplifiedLayerNormalization", "QLinearAdd", "ComplexMul"):
        assert operator_key(f"{MICROSOFT}.{name}") == (MICROSOFT, name)
    assert operator_key(f"{MICROSOFT}.MurmurHash3") is None


@pytest.mark.parametrize("key", sorted(lowered()), ids=".".join)
def test_what_kernels_hold_is_counted(key: tuple[str, str]) -> None:
    record = OPERATORS[key]
    assert record.arithmetic is not uncounted
    assert record.kind is not OPAQUE


def test_views_take_no_arithmetic() -> None:
    assert {record.arithmetic for record in OPERATORS.values() if record.kind is VIEW} == {none}


@pytest.mark.parametrize("parts, message", [
    ({"kind": POINTWISE}, "does not say what arithmetic it takes"),
    ({"kind": HEAVY}, "does not say what arithmetic it takes"),
    ({"kind": VIEW, "lowering": lambda node, context: []}, "has a lowering and no types"),
])
def test_a_record_that_lacks_a_part_is_refused(parts: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"Unheard {message}"):
        define("Unheard", **parts)  # type: ignore[arg-type]
    assert ("", "Unheard") not in OPERATORS


def test_two_records_of_one_operator_are_refused() -> None:
    before = OPERATORS["", "Add"]
    with pytest.raises(ValueError, match="two records of Add"):
        define("Add", kind=POINTWISE, arithmetic=per_output(1))
    assert OPERATORS["", "Add"] is before


def test_how_good_the_runtime_is_hangs_on_records_alone() -> None:
    """An operator's name there would be a second record of it."""
    names = {name for _, name in OPERATORS}
    texts = [node.value for node in ast.walk(ast.parse(Path(kernels.__file__).read_text(encoding="utf-8")))
             if isinstance(node, ast.Constant)]
    assert not names.intersection(filter(lambda text: isinstance(text, str), texts))


def test_what_is_not_known_is_not_counted() -> None:
    assert flops_of(Node(0, "x", "Unheard", "", {}, (), (None,)), {}) is None
    assert flops_of(Node(0, "x", "Loop", "", {}, (), (None,)), {}) is None
