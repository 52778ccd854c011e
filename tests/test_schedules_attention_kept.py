"""Scores, and their shares of a softmax, that an attention writes for others: against float64 in every variant."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

import numpy as np
import pytest
from kernel_harness import check, make, random_inputs, refused, short_inputs, told

QKV = "T[B,H,S,24] q, T[B,H,24,K] k, T[B,H,K,24] v"
ROWS = "s = MatMul(q, k) c = Div(s, f) p = Softmax(c) y = MatMul(p, v)"

KEPT = {
    "shares": (QKV, "T[B,H,S,K] p", ROWS),
    "scores": (QKV, "T[B,H,S,K] s", ROWS),
    "scores that are scaled": (QKV, "T[B,H,S,K] c", ROWS),
    "scores of keys that are scaled": (QKV, "T[B,H,S,K] s", "a = Div(q, f) d = Div(k, f) s = MatMul(a, d) p = Softmax(s) y = MatMul(p, v)"),
    "all of them": (QKV, "T[B,H,S,K] c, T[B,H,S,K] p, T[B,H,S,K] s", ROWS),
    "shares as float32": (QKV, "float[B,H,S,K] w", ROWS + " w = Cast <to = 1> (p)"),
    "shares of a float32 softmax": (QKV, "float[B,H,S,K] p", "s = MatMul(q, k) c = Cast <to = 1> (s) p = Softmax(c) w = CastLike(p, v) y = MatMul(w, v)"),
    "shares, transposed": (QKV, "T[B,S,K,H] w", ROWS + " w = Transpose <perm = [0,2,3,1]> (p)"),
    "shares that are weighed": (QKV + ", T[H,1,1] u", "T[B,H,S,K] w", ROWS + " w = Mul(p, u)"),
    "keys by queries": (QKV, "T[B,H,K,S] w", ROWS + " w = Transpose <perm = [0,1,3,2]> (p)"),
    "a mask": (QKV + ", T[S,K] m", "T[B,H,S,K] p, T[B,H,S,K] c", "s = MatMul(q, k) c = Add(s, m) p = Softmax(c) y = MatMul(p, v)"),
    "a guard": (QKV + ", T[S,K] m", "T[B,H,S,K] p", "s = MatMul(q, k) c = Add(s, m) o = Softmax(c) i = IsNaN(o) p = Where(i, zero, o) y = MatMul(p, v)"),
    "groups": ("T[B,6,S,16] q, T[B,2,16,K] k, T[B,2,K,16] v", "T[B,6,S,K] p",
               "k1 = Unsqueeze(k, two) k2 = Expand(k1, e) k3 = Reshape(k2, g) v1 = Unsqueeze(v, two) v2 = Expand(v1, e) v3 = Reshape(v2, h) s = MatMul(q, k3) p = Softmax(s) y = MatMul(p, v3)"),
    "hidden keys": ("T[B,H,S,24] q, T[B,H,24,S] k, T[B,H,S,24] v", "T[B,H,S,S] p",
                    "s = MatMul(q, k) n = Shape <start = 2, end = 3> (q) l = Squeeze(n) r = Range(nought, l, once) t = Unsqueeze(r, last) i = LessOrEqual(r, t) c = Where(i, s, low) p = Softmax(c) y = MatMul(p, v)"),
    "hidden keys, by a finite number": ("T[B,H,S,24] q, T[B,H,24,S] k, T[B,H,S,24] v", "T[B,H,S,S] p, T[B,H,S,S] c",
                                        "s = MatMul(q, k) n = Shape <start = 2, end = 3> (q) l = Squeeze(n) r = Range(nought, l, once) t = Unsqueeze(r, last) i = Less(r, t) c = Where(i, s, far) p = Softmax(c) y = MatMul(p, v)"),
    "hidden keys, a softmax of float32": ("T[B,H,S,24] q, T[B,H,24,S] k, T[B,H,S,24] v", "float[B,H,S,S] p",
                                          "s = MatMul(q, k) n = Shape <start = 2, end = 3> (q) l = Squeeze(n) r = Range(nought, l, once) t = Unsqueeze(r, last) i = LessOrEqual(r, t) c = Where(i, s, low) w = Cast <to = 1> (c) p = Softmax(w) a = CastLike(p, v) y = MatMul(a, v)"),
}
"""By what is kept, inputs, results beside y, and nodes."""

SIZES = ({"B": 2, "H": 1, "S": 1, "K": 1}, {"B": 1, "H": 2, "S": 70, "K": 33}, {"B": 1, "H": 2, "S": 17, "K": 136}, {"B": 1, "H": 1, "S": 5, "K": 0})


def text(case: str, kind: str) -> str:
    inputs, kept, nodes = KEPT[case]
    heads = "6" if "T[B,6" in inputs else "H"
    columns = "16" if heads == "6" else "24"
    return (f"g ({inputs}) => (T[B,{heads},S,{columns}] y, {kept}) <T f = {{2}}, T zero = {{0}}, T far = {{-60000}}, int64 nought = {{0}}, int64 once = {{1}}, "
            "int64[1] last = {1}, int64[1] two = {2}, int64[5] e = {1,1,3,1,1}, int64[4] g = {0,6,16,-1}, int64[4] h = {0,6,-1,16}> "
            f"{{ lowest = Constant <value_float = -inf> () low = CastLike(lowest, q) {nodes} }}").replace("T[", f"{kind}[").replace("T ", f"{kind} ")


def results(case: str) -> int:
    """How many a case has."""
    return KEPT[case][1].count("[B,") + 1


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", KEPT)
def test_what_is_kept(case: str, kind: str) -> None:
    made = make(text(case, kind))
    assert made.kernel.schedule == "attention" and len(made.lowered.program.outputs) == results(case)
    assert made.kernel.hides is ("hidden" in case)
    for seed, sizes in enumerate(SIZES):
        check(made, random_inputs(made, sizes, seed), length=130)


@pytest.mark.parametrize("case", KEPT)
def test_through_tf32(case: str) -> None:
    """Numbers of as many digits as that has; powers are rounded for the second product alone."""
    made = make(text(case, "float"))
    assert made.kernel.schedule == "attention" and made.kernel.rounds
    for seed, sizes in enumerate(SIZES):
        check(made, short_inputs(made, sizes, seed), length=130, slack=32, limit=2)


@pytest.mark.parametrize("case", ["a mask", "a guard"])
def test_rows_that_are_masked_everywhere(case: str) -> None:
    """Shares are no number there, or zeros behind a guard; scores are what they are."""
    made = make(text(case, "float16"))
    inputs = random_inputs(made, {"B": 1, "H": 1, "S": 20, "K": 150})
    inputs["m"][:] = 0
    inputs["m"][3], inputs["m"][4, :140], inputs["m"][5, 10:] = -np.inf, -np.inf, -np.inf
    inputs["q"][0, 0, 6, 2], inputs["q"][0, 0, 7, 3] = np.nan, np.inf
    check(made, inputs, length=150)


@pytest.mark.parametrize("order", ["backward", 5])
def test_threads_in_any_order(order: str | int) -> None:
    made = make(text("all of them", "float16"))
    check(made, random_inputs(made, {"B": 1, "H": 1, "S": 65, "K": 136}), length=136, orders=[order], limit=2)


def test_what_tuning_may_try() -> None:
    """Blocks whose warps multiply by themselves, of any size."""
    made = make(text("all of them", "float16"), planned={"B": 2, "H": 4, "S": 200, "K": 200})
    assert made.kernel.choices and not any("4 multiply" in each.name for each in made.kernel.plan.variants)
    inputs = random_inputs(made, {"B": 1, "H": 1, "S": 70, "K": 136})
    for choice in made.kernel.choices:
        check(told(made, choice, {}), inputs, length=136, limit=1, misalign=False)


REFUSED = {
    "rows' maxima": ("T[B,H,S,1] w", ROWS + " w = ReduceMax <axes = [3]> (c)", "what is made of scores and used outside changes the number of its elements"),
    "several results": ("T[B,H,S,24] w", ROWS + " w = Relu(y)", "what follows its second product has several results"),
    "a score with its share": ("T[B,H,S,K] w", ROWS + " w = Mul(c, p)", "what is made of its scores and used outside is neither of scores alone nor of the softmax"),
    "scores less the largest": ("T[B,H,S,K] w", ROWS + " x = ReduceMax <axes = [3]> (c) w = Sub(c, x)", "what is made of its scores and used outside is neither of scores alone nor of the softmax"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_kept(case: str) -> None:
    kept, nodes, message = REFUSED[case]
    graph = f"g ({QKV}) => (T[B,H,S,24] y, {kept}) <T f = {{2}}> {{ {nodes} }}".replace("T[", "float16[").replace("T ", "float16 ")
    found = refused(graph.replace("<axes = [3]> (c)", "(c, a)").replace("f = {2}", "f = {2}, int64[1] a = {3}"))
    assert (found.code, found.message) == ("attention-structure", message)
