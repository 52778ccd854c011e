"""The pattern language, one construct a test: small graphs in which a pattern stands or does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxfuse.graph.model import Graph, Value
from onnxfuse.operators import load_graph
from onnxfuse.rules import FuseRule, Match, MatchResult, RuleSet, load_rules, match
from onnxfuse.rules.attempt import MAX_STEPS
from onnxfuse.rules.conditions import Condition, check, verify
from onnxfuse.rules.functions import FUNCTIONS, Scope
from onnxfuse.rules.syntax import parse_condition


def graph(text: str, opset: int = 17) -> Graph:
    return load_graph(
        onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}, "com.microsoft" : 1]> {text}')
    )


def rules(folder: Path, pattern: str, **keys: Any) -> RuleSet:
    """A rule set of one fuse rule; ``keys`` are further keys of it as YAML."""
    body = "\n".join(f"  {line}" for line in pattern.strip().split("\n"))
    text = f"id: r\nkind: fuse\nsummary: s\nwhy: w\npattern: |\n{body}\n"
    text += "".join(f"{key}: {value}\n" for key, value in keys.items())
    file = folder / "r.yaml"
    file.write_text(text)
    return load_rules([file])


def tried(folder: Path, pattern: str, model: str, opset: int = 17, **keys: Any) -> MatchResult:
    (rule,) = rules(folder, pattern, **keys).fuse
    return match(rule, graph(model, opset))


def names(found: Match) -> set[str]:
    return {node.outputs[0].name for node in found.nodes if node.outputs[0] is not None}


def bound(found: Match) -> dict[str, str]:
    return {name: value.name for name, value in found.bindings.items() if isinstance(value, Value)}


def test_names_bind_values_and_results_are_the_last_statement(tmp_path: Path) -> None:
    result = tried(tmp_path, "s = a * b\ny = s + c", "g (float[4] p, float[4] q, float[4] r) => (float[4] y) "
                   "{ m = Mul(p, q) y = Add(m, r) }")
    (found,) = result.matches
    assert bound(found) == {"a": "p", "b": "q", "c": "r", "s": "m", "y": "y"}
    assert [value.name for value in found.results] == ["y"]
    assert [node.op for node in found.nodes] == ["Mul", "Add"]
    assert found.originals == found.nodes


def test_commutative_operators_match_either_way_round(tmp_path: Path) -> None:
    for inputs in ("t, q", "q, t"):
        result = tried(tmp_path, "y = Tanh(a) + b", f"g (float[4] p, float[4] q) => (float[4] y) "
                       f"{{ t = Tanh(p) y = Add({inputs}) }}")
        assert [bound(found) for found in result.matches] == [{"a": "p", "b": "q", "y": "y"}]


def test_other_operators_do_not(tmp_path: Path) -> None:
    model = "g (float[4] p, float[4] q) => (float[4] y) { t = Tanh(p) y = Sub(q, t) }"
    assert len(tried(tmp_path, "y = b - Tanh(a)", model).matches) == 1
    assert tried(tmp_path, "y = Tanh(a) - b", model).matches == ()


def test_a_name_that_comes_again_is_the_same_value(tmp_path: Path) -> None:
    pattern = "y = x * Sigmoid(x)"
    model = "g (float[4] p, float[4] q) => (float[4] y) {{ s = Sigmoid(p) y = Mul({}, s) }}"
    assert len(tried(tmp_path, pattern, model.format("p")).matches) == 1
    result = tried(tmp_path, pattern, model.format("q"))
    assert result.matches == ()
    (miss,) = result.near_misses
    assert (miss.code, miss.rule) == ("different-value", "r")
    assert miss.message == "x stands for q and for p; the rule needs one value."


def test_a_statement_that_is_read_twice_is_one_node(tmp_path: Path) -> None:
    pattern = "e = Exp(x)\ny = e / (e + c)"
    shared = "g (float[4] p, float[4] c) => (float[4] y) { e = Exp(p) f = Add(e, c) y = Div(e, f) }"
    apart = "g (float[4] p, float[4] c) => (float[4] y) { e = Exp(p) d = Exp(p) f = Add(d, c) y = Div(e, f) }"
    assert len(tried(tmp_path, pattern, shared).matches) == 1
    assert tried(tmp_path, pattern, apart).matches == ()


def test_a_number_matches_a_constant_as_its_type_rounds_it(tmp_path: Path) -> None:
    def count(number: str, kind: str, bits: str) -> int:
        model = f"g ({kind}[4] x) => ({kind}[4] y) <{kind} c = {{{bits}}}> {{ y = Mul(x, c) }}"
        return len(tried(tmp_path, f"y = x * {number}", model, opset=13).matches)

    assert count("0.7978845608", "float", "0.7978845608") == 1
    assert count("0.7978845608", "float16", str(np.float16(0.7978845608).view(np.uint16))) == 1
    assert count("0.7978845608", "bfloat16", str(int(np.float32(0.796875).view(np.uint32)) >> 16)) == 1
    assert count("0.7978845608", "float", "0.7999") == 0
    assert count("0.0", "float", "1e-9") == 0
    assert count("0.0", "float", "0.0") == 1
    assert count("-inf", "float", "-inf") == 1
    assert count("2", "int32", "2") == 1


def test_a_number_matches_no_other_tensor(tmp_path: Path) -> None:
    pattern = "y = x * 2.0"
    assert tried(tmp_path, pattern, "g (float[4] x, float c) => (float[4] y) { y = Mul(x, c) }").matches == ()
    assert tried(
        tmp_path, pattern, "g (float[2] x) => (float[2] y) <float[2] c = {2.0, 2.0}> { y = Mul(x, c) }"
    ).matches == ()


@pytest.mark.parametrize("pattern", ["y = Tanh(Exp(Neg(x))) * 2.0", "y = 2.0 * Tanh(Exp(Neg(x)))"])
@pytest.mark.parametrize("operands", ["t, k", "k, t"])
def test_a_number_that_alone_is_another_is_told(tmp_path: Path, pattern: str, operands: str) -> None:
    """However much of the pattern lies behind the other operand, and whichever way round both are."""
    model = ("g (float[4] p) => (float[4] y) <float k = {{3.0}}> "
             f"{{{{ n = Neg(p) e = {{}}(n) t = Tanh(e) y = Mul({operands}) }}}}")
    (miss,) = tried(tmp_path, pattern, model.format("Exp")).near_misses
    assert (miss.code, miss.message, miss.node) == ("constant-value", "k is 3; the rule needs 2.", "Mul -> y")
    assert tried(tmp_path, pattern, model.format("Abs")).near_misses == ()


def test_maybe_is_there_or_not(tmp_path: Path) -> None:
    pattern = "y = Relu(maybe(Cast(x, to=float32)))"
    with_cast = "g (float16[4] p) => (float[4] y) { c = Cast <to = 1> (p) y = Relu(c) }"
    without = "g (float[4] p) => (float[4] y) { y = Relu(p) }"
    other = "g (float[4] p) => (float16[4] y) { c = Cast <to = 10> (p) y = Relu(c) }"
    assert [bound(m)["x"] for m in tried(tmp_path, pattern, with_cast).matches] == ["p"]
    assert [bound(m)["x"] for m in tried(tmp_path, pattern, without).matches] == ["p"]
    assert [bound(m)["x"] for m in tried(tmp_path, pattern, other).matches] == ["c"]


def test_maybe_steps_aside_where_its_value_is_read_outside(tmp_path: Path) -> None:
    result = tried(tmp_path, "y = Relu(maybe(Cast(x)))", "g (float16[4] p) => (float[4] y, float[4] z) "
                   "{ c = Cast <to = 1> (p) y = Relu(c) z = Neg(c) }")
    assert [(bound(found)["x"], names(found)) for found in result.matches] == [("c", {"y"})]


def test_alternatives(tmp_path: Path) -> None:
    pattern = "y = any_of(Relu(x), Clip(x, 0.0, 6.0))"
    relu = "g (float[4] p) => (float[4] y) { y = Relu(p) }"
    clip = "g (float[4] p) => (float[4] y) <float a = {0.0}, float b = {6.0}> { y = Clip(p, a, b) }"
    low = "g (float[4] p) => (float[4] y) <float a = {0.5}, float b = {6.0}> { y = Clip(p, a, b) }"
    assert len(tried(tmp_path, pattern, relu).matches) == 1
    assert len(tried(tmp_path, pattern, clip).matches) == 1
    (miss,) = tried(tmp_path, pattern, low).near_misses
    assert (miss.code, miss.message) == ("constant-value", "a is 0.5; the rule needs 0.")


def test_a_product_in_any_order_and_bracketing(tmp_path: Path) -> None:
    head = "g (float[4] p, float[4] q) => (float[4] y) <float h = {0.5}> "
    for body in ("{ t = Tanh(q) a = Mul(p, h) y = Mul(a, t) }", "{ t = Tanh(q) a = Mul(t, p) y = Mul(h, a) }",
                 "{ t = Tanh(q) a = Mul(h, t) y = Mul(p, a) }"):
        assert len(tried(tmp_path, "y = product(x, 0.5, Tanh(z))", head + body).matches) == 1
    assert tried(tmp_path, "y = product(x, 0.5, Tanh(z))",
                 head + "{ t = Tanh(q) a = Add(h, t) y = Mul(p, a) }").matches == ()


@pytest.mark.parametrize("body", [
    "q = Sqrt(p) y = Reciprocal(q)", "q = Sqrt(p) y = Div(one, q)", "y = Pow(p, power)",
    "q = Reciprocal(p) y = Sqrt(q)",
])
def test_reciprocal_roots_are_one(tmp_path: Path, body: str) -> None:
    model = f"g (float[4] p) => (float[4] y) <float one = {{1.0}}, float power = {{-0.5}}> {{ {body} }}"
    assert len(tried(tmp_path, "y = rsqrt(x)", model).matches) == 1


def test_axes_are_an_attribute_or_an_input_and_count_from_either_end(tmp_path: Path) -> None:
    pattern = "y = ReduceMean(x, axes=[-1], keepdims=1)"
    for axes in ("-1", "2"):
        attribute = f"g (float[2, 3, 4] p) => (float[2, 3, 1] y) {{ y = ReduceMean <axes = [{axes}]> (p) }}"
        as_input = f"g (float[2, 3, 4] p) => (float[2, 3, 1] y) <int64[1] a = {{{axes}}}> {{ y = ReduceMean(p, a) }}"
        assert len(tried(tmp_path, pattern, attribute, opset=13).matches) == 1
        assert len(tried(tmp_path, pattern, as_input, opset=18).matches) == 1
    (miss,) = tried(tmp_path, pattern, attribute.replace("[2]", "[1]"), opset=13).near_misses
    assert (miss.code, miss.message) == (
        "reduction-axis", "ReduceMean has axes [1] of rank 3; the rule needs [-1]."
    )
    everything = "g (float[2, 3, 4] p) => (float[1, 1, 1] y) { y = ReduceMean(p) }"
    (miss,) = tried(tmp_path, pattern, everything, opset=13).near_misses
    assert miss.message == "ReduceMean has axes all of rank 3; the rule needs [-1]."


def test_attributes_have_their_schema_defaults(tmp_path: Path) -> None:
    model = "g (float[2, 4] p) => (float[2, 4] y) { y = Softmax(p) }"
    assert len(tried(tmp_path, "y = Softmax(x, axis=-1)", model, opset=17).matches) == 1
    model = "g (float[2, 3, 4] p) => (float[2, 3, 4] y) { y = Softmax(p) }"
    assert tried(tmp_path, "y = Softmax(x, axis=-1)", model, opset=12).matches == ()


def test_captured_attributes_and_inputs(tmp_path: Path) -> None:
    (found,) = tried(tmp_path, "y = Transpose(x, perm=order)", "g (float[2, 3] p) => (float[3, 2] y) "
                     "{ y = Transpose <perm = [1, 0]> (p) }").matches
    assert found.bindings["order"] == [1, 0]
    (found,) = tried(tmp_path, "y = Slice(x, starts=s, ends=e, axes=[0])", "g (float[4] p) => (float[2] y) "
                     "<int64[1] a = {0}, int64[1] b = {2}> { y = Slice(p, a, b, a) }").matches
    assert bound(found) == {"x": "p", "s": "a", "e": "b", "y": "y"}


def test_optional_and_further_inputs(tmp_path: Path) -> None:
    two = "g (float[2, 4] p, float[4] w) => (float[2, 4] y) { y = LayerNormalization(p, w) }"
    three = "g (float[2, 4] p, float[4] w, float[4] c) => (float[2, 4] y) { y = LayerNormalization(p, w, c) }"
    optional, exact, rest = ("y = LayerNormalization(x, s, b?)", "y = LayerNormalization(x, s)",
                             "y = LayerNormalization(x, ...)")
    assert [m.bindings["b"] for m in tried(tmp_path, optional, two).matches] == [None]
    assert [bound(m)["b"] for m in tried(tmp_path, optional, three).matches] == ["c"]
    assert len(tried(tmp_path, exact, two).matches) == 1
    (miss,) = tried(tmp_path, exact, three).near_misses
    assert (miss.code, miss.message) == ("inputs", "LayerNormalization -> y has 3 inputs; the rule needs 2.")
    assert len(tried(tmp_path, rest, three).matches) == 1


def test_sets_of_operators(tmp_path: Path) -> None:
    pattern = "y = act(x + b)"
    for op, count in (("Relu", 1), ("Tanh", 1), ("Neg", 0)):
        model = f"g (float[4] p, float[4] q) => (float[4] y) {{ s = Add(p, q) y = {op}(s) }}"
        assert len(tried(tmp_path, pattern, model, sets="{act: [Relu, Tanh]}").matches) == count


@pytest.mark.parametrize(("name", "call", "count"), [
    ("softmax", "Softmax(p)", 1), ("softmax", "LogSoftmax(p)", 0),
    ("norm", "LayerNormalization(p, q)", 1), ("norm", "InstanceNormalization(p, q, q)", 0),
    ("project", "MatMul(p, r)", 1), ("project", "Gemm(p, r)", 1), ("project", "com.microsoft.FusedMatMul(p, r)", 0),
    ("matmul", "MatMul(p, r)", 1), ("matmul", "com.microsoft.FusedMatMul(p, r)", 1), ("matmul", "Gemm(p, r)", 0),
    ("products", "com.microsoft.FusedMatMul(p, r)", 1), ("products", "Gemm(p, r)", 1), ("products", "Mul(p, p)", 0),
    ("light", "Reshape(p, n)", 1), ("light", "Expand(p, n)", 1), ("light", "Relu(p)", 1), ("light", "Softmax(p)", 0),
])
def test_sets_that_every_pattern_has(tmp_path: Path, name: str, call: str, count: int) -> None:
    model = f"g (float[4,4] p, float[4] q, float[4,4] r, int64[2] n) => (float[4,4] y) {{ y = {call} }}"
    assert len(tried(tmp_path, f"y = {name}(x, ...)", model).matches) == count


def test_a_set_of_a_rule_stands_in_the_place_of_one_of_that_name(tmp_path: Path) -> None:
    model = "g (float[4] p) => (float[4] y) { y = LogSoftmax(p) }"
    assert len(tried(tmp_path, "y = softmax(x)", model, sets="{softmax: [LogSoftmax]}").matches) == 1


def test_operators_of_other_domains_are_others(tmp_path: Path) -> None:
    own = "g (float[4] p) => (float[4] y) { y = com.microsoft.Gelu(p) }"
    assert tried(tmp_path, "y = Gelu(x)", own).matches == ()
    assert len(tried(tmp_path, "y = com.microsoft.Gelu(x)", own).matches) == 1


def test_identity_nodes_are_looked_through(tmp_path: Path) -> None:
    model = "g (float[4] p) => (float[4] y) { i = Identity(p) s = Sigmoid(i) j = Identity(s) y = Mul(p, j) }"
    (found,) = tried(tmp_path, "y = x * Sigmoid(x)", model).matches
    assert names(found) == {"i", "s", "j", "y"}


def test_what_another_domain_calls_identity_is_not_looked_through(tmp_path: Path) -> None:
    model = "g (float[4] p, float[4] q) => (float[4] y) {{ s = Add(p, q) i = {}Identity(s) y = Relu(i) }}"
    assert len(tried(tmp_path, "y = Relu(a + b)", model.format("")).matches) == 1
    assert tried(tmp_path, "y = Relu(a + b)", model.format("com.microsoft.")).matches == ()


@pytest.mark.parametrize("constant", ["", "c = Constant <value = float[4] {1, 2, 3, 4}> ()"])
def test_a_constant_in_the_place_of_a_node_is_told_at_what_matched(tmp_path: Path, constant: str) -> None:
    """Whether it is an initialiser or a node of its own."""
    held = "" if constant else "<float[4] c = {1, 2, 3, 4}>"
    model = f"g (float[4] p) => (float[4] y) {held} {{ e = Exp(p) {constant} y = Add(e, c) }}"
    (miss,) = tried(tmp_path, "y = Exp(a) + Tanh(b)", model).near_misses
    assert (miss.node, miss.message) == ("Exp -> e", "c is a constant where the rule needs Tanh.")


# -- values that escape, several outputs --------------------------------------------------------------------------

SHARED = "g (float[4] p, float[4] q) => (float[4] y, float[4] z) { s = Add(p, q) y = Relu(s) z = Neg(s) }"
GIVEN = "g (float[4] p, float[4] q) => (float[4] y, float[4] s) { s = Add(p, q) y = Relu(s) }"


def test_inner_values_may_not_escape(tmp_path: Path) -> None:
    (miss,) = tried(tmp_path, "s = a + b\ny = Relu(s)", SHARED).near_misses
    assert (miss.code, miss.message, miss.remedy) == (
        "inner-value-used-outside", "s, an inner value, is read by Neg -> z as well.",
        "Name the value among the rule's results, or remove the other use.",
    )
    (miss,) = tried(tmp_path, "s = a + b\ny = Relu(s)", GIVEN).near_misses
    assert (miss.code, miss.message, miss.remedy) == (
        "inner-value-is-output", "s, an inner value, is an output of the model.",
        "Remove it from the model's outputs, or name it among the rule's results.",
    )


def test_results_may_escape_and_optional_ones_need_not(tmp_path: Path) -> None:
    pattern = "s = a + b\ny = Relu(s)"
    for model in (SHARED, GIVEN):
        (found,) = tried(tmp_path, pattern, model, results="[y, 's?']").matches
        assert [value.name for value in found.results] == ["y", "s"]
    inner = "g (float[4] p, float[4] q) => (float[4] y) { s = Add(p, q) y = Relu(s) }"
    (found,) = tried(tmp_path, pattern, inner, results="[y, 's?']").matches
    assert [value.name for value in found.results] == ["y"]
    (found,) = tried(tmp_path, pattern, inner, results="[y, s]").matches
    assert [value.name for value in found.results] == ["y", "s"]


def test_a_forbidden_condition_speaks_and_without_it_the_value_is_a_result(tmp_path: Path) -> None:
    loaded = rules(tmp_path, "s = a + b\ny = Relu(s)")
    (rule,) = loaded.fuse
    (tmp_path / "f.yaml").write_text(
        "id: f\nkind: forbid\nsummary: s\nwhy: w\ncondition: inner-value-is-output\nreason: It must be written.\n"
    )
    forbidden = load_rules([tmp_path / "f.yaml"]).conditions
    (miss,) = match(rule, graph(GIVEN), forbidden=forbidden).near_misses
    assert miss.message == "s, an inner value, is an output of the model. It must be written."
    (found,) = match(rule, graph(GIVEN), forbidden={}).matches
    assert [value.name for value in found.results] == ["y", "s"]


def test_several_outputs_of_one_node(tmp_path: Path) -> None:
    pattern = "a, b = Split(x, axis=-1)\ny = Silu(a) * b".replace("Silu(a)", "Tanh(a)")
    model = "g (float[2, 8] p) => (float[2, 4] y) <int64[2] n = {4, 4}> " \
            "{ u, v = Split <axis = 1> (p, n) t = Tanh(u) y = Mul(v, t) }"
    pattern = pattern.replace("axis=-1", "split=n, axis=-1")
    (found,) = tried(tmp_path, pattern, model).matches
    assert {"a": "u", "b": "v"}.items() <= bound(found).items()
    swapped = model.replace("Tanh(u)", "Tanh(v)").replace("Mul(v, t)", "Mul(u, t)")
    assert tried(tmp_path, pattern, swapped).matches == ()


def test_several_results_that_nothing_joins_but_their_input(tmp_path: Path) -> None:
    pattern = "m = ReduceMean(x, axes=[-1])\nv = ReduceMax(x, axes=[-1])"
    model = "g (float[2, 8] p) => (float[2, 1] m, float[2, 1] v) " \
            "{ m = ReduceMean <axes = [1]> (p) v = ReduceMax <axes = [1]> (p) }"
    (found,) = tried(tmp_path, pattern, model, opset=13, results="[m, v]").matches
    assert [value.name for value in found.results] == ["m", "v"]
    apart = model.replace("float[2, 8] p", "float[2, 8] p, float[2, 8] q").replace("(p) v", "(q) v")
    assert tried(tmp_path, pattern, apart, opset=13, results="[m, v]").matches == ()


# -- conditions ---------------------------------------------------------------------------------------------------

MODEL = "g (float[b, 8] p, float[8] w) => (float[b, 8] y) <float e = {0.25}> { m = Sub(p, w) y = Add(m, e) }"
PATTERN = "m = x - w\ny = m + e"


@pytest.mark.parametrize("condition", [
    "is_scalar(e)", "is_constant(e)", "not is_constant(w)", "rank(w) == 1 and rank(x) == 2", "e < 1 or e > 2",
    "value(e) == 0.25", "dim(w, 0) == dim(x, -1)", "dtype(x) in [float16, float32]", "dtype(x) not in [int64]",
    "'same_shape(x, y)'", "not same_shape(x, w)", "'broadcastable(w, x)'", "shape(w) == [8]", "shape(x) != [4, 8]",
    "size(w) == 8", "size(x) == 8 * dim(x, 0)", "is_float(x)", "operator(m) == \"Sub\"", "uses(m) == 1",
    "not_output(m)", "is_output(y)", "e * 4 - 1 == 0", "-e < 0", "'last_axis(x, -1)'", "'last_axis(x, 1)'",
    "not last_axis(x, 0)", "dim(x, 1) // 3 == 2", "dim(x, 1) % 5 == 3", "min(e, 1) == 0.25", "abs(-e) == 0.25",
    "same_type(x, y)", 'read_by(m, ["Add", "Mul"])', 'read_by(m, ["pointwise"])', 'not read_by(m, ["products"])',
    'not read_by(y, ["light"])', 'made_by(m, ["Sub"])', 'made_by(m, ["matmul", "light"])',
    'not made_by(m, ["Add", "project"])', 'not made_by(x, ["Sub"])',
])
def test_conditions_that_hold(tmp_path: Path, condition: str) -> None:
    text = condition.strip("'").replace('"', "'")
    result = tried(tmp_path, PATTERN, MODEL, where=f'["{text}"]')
    assert len(result.matches) == 1, result.near_misses


@pytest.mark.parametrize(("condition", "code", "message"), [
    ("rank(w) == 2", "rank", "The rule needs rank(w) == 2; here rank(w) is 1."),
    ("is_constant(w)", "not-constant", "The rule needs is_constant(w); here w is float32 [8]."),
    ("is_scalar(w)", "not-scalar", "The rule needs is_scalar(w); here w is float32 [8]."),
    ("dtype(x) == float16", "type", "The rule needs dtype(x) == float16; here dtype(x) is float32."),
    ("dim(x, 0) == 4", "size", "The rule needs dim(x, 0) == 4; here dim(x, 0) is b."),
    ("dim(x, 0) > 4", "unknown-size",
     "The rule needs dim(x, 0) > 4, and the size b is not known before the model runs."),
    ("value(w) < 1", "not-constant",
     "The rule needs value(w) < 1, and the contents of w are not known before the model runs."),
    ("e > 1", "condition", "The rule needs e > 1; here e is 0.25."),
    ("same_shape(x, w)", "shape", "The rule needs same_shape(x, w); here x is float32 [b, 8], w is float32 [8]."),
    ("last_axis(x, 0)", "reduction-axis", "The rule needs last_axis(x, 0); here x is float32 [b, 8]."),
    ("read_by(m, ['matmul'])", "uses", "The rule needs read_by(m, ['matmul']); here m is float32 [b, 8]."),
    ("made_by(m, ['Add'])", "operator", "The rule needs made_by(m, ['Add']); here m is float32 [b, 8]."),
    ("1 // (rank(w) - 1) == 1", "condition",
     "The rule needs 1 // (rank(w) - 1) == 1, and it divides by zero."),
])
def test_conditions_that_do_not_hold(tmp_path: Path, condition: str, code: str, message: str) -> None:
    result = tried(tmp_path, PATTERN, MODEL, where=f'["{condition}"]')
    assert result.matches == ()
    (miss,) = result.near_misses
    assert (miss.code, miss.message) == (code, message)


def test_axes_that_are_several_are_not_the_last_one(tmp_path: Path) -> None:
    model = "g (float[2, 3, 4] p) => (float[2, 1, 1] y) <int64[2] a = {1, 2}> { y = ReduceSum(p, a) }"
    (miss,) = tried(tmp_path, "y = ReduceSum(x, a)", model, where="['last_axis(x, a)']").near_misses
    assert (miss.code, miss.message) == (
        "reduction-axis", "The rule needs last_axis(x, a); here x is float32 [2, 3, 4], a is int64 [2].")


def test_a_condition_in_its_author_s_words(tmp_path: Path) -> None:
    where = "[{test: rank(w) == 2, code: wide-weight, message: The weight is no matrix., remedy: Reshape it.}]"
    (miss,) = tried(tmp_path, PATTERN, MODEL, where=where).near_misses
    assert (miss.code, miss.message, miss.remedy) == ("wide-weight", "The weight is no matrix.", "Reshape it.")


def test_a_condition_that_fails_turns_to_the_next_alternative(tmp_path: Path) -> None:
    pattern = "y = any_of(a + b + c, a + b)"
    model = "g (float[2, 4] p, float[2, 4] q, float[2, 4] r) => (float[2, 4] y) { s = Add(p, q) y = Add(s, r) }"
    inner, outer = tried(tmp_path, pattern, model, where="[rank(c) == 1]").matches
    assert bound(inner) == {"a": "p", "b": "q", "y": "s"}
    assert bound(outer) == {"a": "s", "b": "r", "y": "y"}


def test_work_at_one_anchor_is_bounded(tmp_path: Path) -> None:
    pattern = "y = sum(sum(a, b, c, d), sum(e, f, g, h), sum(i, j, k, l), sum(m, n, o, p))"
    inputs = [f"x{i}" for i in range(16)]
    body: list[str] = []
    level = inputs
    while len(level) > 1:
        following = []
        for a, b in zip(level[::2], level[1::2], strict=True):
            following.append(f"s{len(body)}")
            body.append(f"{following[-1]} = Add({a}, {b})")
        level = following
    model = f"g ({', '.join(f'float[4] {x}' for x in inputs)}) => (float[4] {level[0]}) {{ {' '.join(body)} }}"
    (rule,) = rules(tmp_path, pattern, where="[rank(a) == 7]").fuse
    result = match(rule, graph(model))
    assert result.matches == ()
    assert [(miss.code, miss.message) for miss in result.near_misses][-1] == (
        "too-many-choices", f"The pattern leaves more than {MAX_STEPS} choices open here."
    )


def test_values_read_by_a_subgraph_escape(tmp_path: Path) -> None:
    model = """g (float[4] p, float[4] q, bool c) => (float[4] y, float[4] z) {
        s = Add(p, q) y = Relu(s)
        z = If (c) <then_branch = t () => (float[4] a) { a = Neg(s) },
                    else_branch = e () => (float[4] d) { d = Abs(q) }>
    }"""
    (miss,) = tried(tmp_path, "s = a + b\ny = Relu(s)", model).near_misses
    assert miss.code == "inner-value-used-outside"


def test_a_rule_is_its_kind(tmp_path: Path) -> None:
    (rule,) = rules(tmp_path, "y = Relu(x)", grow="{before: pointwise, x: [Transpose]}", schedule="row").fuse
    assert isinstance(rule, FuseRule)
    assert (rule.kind, rule.schedule) == ("fuse", "row")
    assert rule.growth.edges["x"] == {("", "Transpose")}
    assert ("", "Add") in rule.growth.edges["before"]


@st.composite
def expressions(draw: st.DrawFn, depth: int = 3) -> str:
    """Any expression that the language admits over the names of ``PATTERN``, sensible or not."""
    if depth == 0 or draw(st.booleans()):
        return draw(st.sampled_from(["x", "w", "m", "e", "y", "0", "1", "-1", "2.5", "'none'", "[1, 2]", "float16",
                                     "m.axis", "true"]))
    inner = expressions(depth=depth - 1)
    name = draw(st.sampled_from([*FUNCTIONS, "infix", "infix", "not"]))
    if name == "infix":
        operator = draw(st.sampled_from(
            ["+", "-", "*", "/", "//", "%", "==", "!=", "<", "<=", ">", ">=", "in", "not in", "and", "or"]
        ))
        return f"({draw(inner)} {operator} {draw(inner)})"
    if name == "not":
        return f"(not {draw(inner)})"
    if name in ("is_absent", "is_present", "count"):
        return f"{name}({draw(st.sampled_from(['x', 'w', 'm']))})"
    return f"{name}({', '.join(draw(inner) for _ in range(FUNCTIONS[name].arguments))})"


@settings(max_examples=400, deadline=None)
@given(expressions())
def test_any_condition_holds_or_says_why_not(text: str) -> None:
    searched = graph(MODEL)
    values = {"x": "p", "w": "w", "m": "m", "e": "e", "y": "y"}
    scope = Scope(searched, {name: searched.values[value] for name, value in values.items()})
    tree = parse_condition(text)
    verify(tree, values)
    failure = check(Condition(text, tree), scope)
    assert failure is None or (failure.code and failure.message.endswith("."))
