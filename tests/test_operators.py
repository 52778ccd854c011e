"""Records of operators: whole, one each, and every operator of the standard has one."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from onnx import defs

from onnxfuse.graph.context import same
from onnxfuse.graph.model import Node
from onnxfuse.ir.context import LoweringContext
from onnxfuse.ir.tensors import Tensor
from onnxfuse.operators import OPERATORS, flops_of, record
from onnxfuse.operators.arithmetic import none, per_output, uncounted
from onnxfuse.operators.record import CANONICAL, HEAVY, MICROSOFT, OPAQUE, PLAIN, POINTWISE, SHAPE, VIEW, define, opaque
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


def test_views_that_only_move_elements_take_no_arithmetic() -> None:
    """Of those that do not (tests/test_traffic.py counts them) what they take hangs on their attributes."""
    views = [record for record in OPERATORS.values() if record.kind in (VIEW, SHAPE)]
    assert {record.name for record in views if record.arithmetic is not none} == {
        "GridSample", "Resize", "ScatterElements", "ScatterND"}
    assert not any(record.arithmetic is uncounted for record in views)


def lowering(node: Node, context: LoweringContext) -> list[Tensor | None]:
    raise AssertionError(node, context)


WHOLE: dict[str, Any] = {
    "kind": POINTWISE, "types": same, "lowering": lowering, "arithmetic": per_output(1), "host": (), "runtime": PLAIN,
    "activation": False,
}


@pytest.fixture()
def own_records(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], record.Operator]:
    """Records that a test may enter more into."""
    monkeypatch.setattr(record, "OPERATORS", dict(OPERATORS))
    return record.OPERATORS


def test_a_record_that_is_whole_is_entered(own_records: dict[tuple[str, str], record.Operator]) -> None:
    define("Unheard", **WHOLE)
    assert own_records["", "Unheard"] == record.Operator(
        "Unheard", "", POINTWISE, same, lowering, WHOLE["arithmetic"], frozenset(), PLAIN, False, False)


@pytest.mark.parametrize("part", [name for name in WHOLE if name != "activation"])
def test_no_part_of_a_record_has_a_default(part: str) -> None:
    with pytest.raises(TypeError, match=f"missing 1 required keyword-only argument: '{part}'"):
        define("Unheard", **{name: value for name, value in WHOLE.items() if name != part})
    assert ("", "Unheard") not in OPERATORS


@pytest.mark.parametrize("part", ["types", "host", "random"])
def test_no_part_of_an_opaque_record_has_a_default(part: str) -> None:
    parts: dict[str, Any] = {"types": same, "host": (), "random": False}
    del parts[part]
    with pytest.raises(TypeError, match=f"missing 1 required keyword-only argument: '{part}'"):
        opaque("Unheard", **parts)


OPAQUE_PARTS = {"kind": OPAQUE, "activation": None, "lowering": None}


@pytest.mark.parametrize("parts, message", [
    ({"activation": None}, "must say whether it is an activation"),
    ({"kind": HEAVY}, "must say whether it is an activation if it is pointwise, and only then"),
    ({"random": True}, "must say whether it is random if it is opaque, and only then"),
    (OPAQUE_PARTS, "must say whether it is random"),
    ({**OPAQUE_PARTS, "random": False, "lowering": lowering}, "has a lowering and is opaque"),
    ({"types": None}, "has a lowering and no types"),
    ({"arithmetic": uncounted}, "has a lowering and no arithmetic"),
])
def test_a_record_that_lacks_a_part_is_refused(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"Unheard {message}"):
        define("Unheard", **(WHOLE | parts))
    assert ("", "Unheard") not in OPERATORS


def test_two_records_of_one_operator_are_refused() -> None:
    before = OPERATORS["", "Add"]
    with pytest.raises(ValueError, match="two records of Add"):
        define("Add", **WHOLE)
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
