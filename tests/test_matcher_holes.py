"""The pattern language's holes: what is pointwise between what a pattern names."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_matcher import bound, names, tried

from onnxfuse.rules import Match


def hole(found: Match, name: str = "s") -> set[str]:
    return {node.outputs[0].name for node in found.holes[name] if node.outputs[0] is not None}


def test_a_hole_takes_in_all_that_is_pointwise_and_private(tmp_path: Path) -> None:
    pattern = "s = pointwise(scores)\ny = Softmax(s, axis=-1)"
    model = """g (float[2, 8] p, float[8] mask, float[2, 8] q) => (float[2, 8] y, float[8] z) <float k = {2.0}> {
        a = Mul(p, k) n = Neg(mask) z = Exp(n) b = Add(a, n) e = Abs(q) c = Max(b, e) y = Softmax(c) }"""
    (found,) = tried(tmp_path, pattern, model).matches
    assert hole(found) == {"a", "b", "e", "c"}
    assert names(found) == {"a", "b", "e", "c", "y"}
    assert bound(found)["scores"] in ("p", "q")


def test_a_hole_may_be_empty_and_its_size_is_a_condition(tmp_path: Path) -> None:
    pattern = "s = pointwise(scores)\ny = Softmax(s, axis=-1)"
    model = "g (float[2, 8] p) => (float[2, 8] y) { y = Softmax(p) }"
    (found,) = tried(tmp_path, pattern, model).matches
    assert hole(found) == set()
    (miss,) = tried(tmp_path, pattern, model, where="[count(s) >= 1]").near_misses
    assert (miss.code, miss.message) == ("hole-size", "The rule needs count(s) >= 1; here count(s) is 0.")


ATTENTION = """g (float[2, 4, 8] q, float[2, 8, 4] k, float[2, 4, 8] v, float[4, 4] mask) => (float[2, 4, 8] y)
    <float c = {{0.5}}> {{ m = MatMul(q, k) {} p = Softmax(s) y = MatMul(p, v) }}"""


@pytest.mark.parametrize(("scores", "size"), [
    ("a = Mul(m, c) s = Add(a, mask)", 2), ("s = Add(mask, m)", 1), ("s = Identity(m)", 1),
    ("a = Tanh(m) b = Mul(a, c) d = Mul(b, a) s = Add(d, mask)", 4),
])
def test_attention_whatever_makes_its_scores(tmp_path: Path, scores: str, size: int) -> None:
    pattern = "s = pointwise(MatMul(q, k))\ny = MatMul(Softmax(s, axis=-1), v)"
    (found,) = tried(tmp_path, pattern, ATTENTION.format(scores)).matches
    assert {"q": "q", "k": "k", "v": "v"}.items() <= bound(found).items()
    assert len(found.holes["s"]) == size


def test_a_hole_without_what_it_must_read(tmp_path: Path) -> None:
    pattern = "s = pointwise(MatMul(q, k))\ny = MatMul(Softmax(s, axis=-1), v)"
    model = ATTENTION.format("s = Add(mask, mask)").replace("m = MatMul(q, k)", "")
    result = tried(tmp_path, pattern, model)
    assert result.matches == ()
    (miss,) = result.near_misses
    assert (miss.code, miss.message) == ("operator", "mask is an input of the model where the rule needs MatMul.")


def test_a_hole_ends_at_a_pointwise_argument(tmp_path: Path) -> None:
    pattern = "s = pointwise(Erf(x))\ny = Softmax(s, axis=-1)"
    model = "g (float[2, 8] p) => (float[2, 8] y) { n = Neg(p) e = Erf(n) a = Abs(e) y = Softmax(a) }"
    (found,) = tried(tmp_path, pattern, model).matches
    assert hole(found) == {"a"}
    assert bound(found)["x"] == "n"


@pytest.mark.parametrize("operator", ["BitCast <to = 1> (n)", "com.microsoft.QLinearLeakyRelu(n, k, k, k)"])
def test_a_hole_ends_at_what_no_kernel_holds(tmp_path: Path, operator: str) -> None:
    pattern = "s = pointwise(scores)\ny = Softmax(s, axis=-1)"
    model = f"""g (float[2, 8] p, float k) => (float[2, 8] y) {{
        n = Neg(p) e = {operator} a = Abs(e) y = Softmax(a) }}"""
    (found,) = tried(tmp_path, pattern, model, opset=26).matches
    assert hole(found) == {"a"}
    assert bound(found)["scores"] == "e"


def test_a_hole_leaves_alone_what_is_given_away(tmp_path: Path) -> None:
    pattern = "s = pointwise(scores)\ny = Softmax(s, axis=-1)"
    model = "g (float[2, 8] p) => (float[2, 8] y, float[2, 8] a) { a = Neg(p) b = Abs(a) y = Softmax(b) }"
    (found,) = tried(tmp_path, pattern, model).matches
    assert hole(found) == {"b"}
    assert bound(found)["scores"] == "a"
