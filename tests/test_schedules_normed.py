"""Products and attentions whose operands norms of their rows scale: in the emulator against float64."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from kernel_harness import Made, attempt, check, make, parse, random_inputs

from onnxfuse.ir.exact import exactly
from onnxfuse.refusal import Refusal
from onnxfuse.schedules import SCHEDULES, Kernel, Request, make_kernel, sharing

RMS = "h = Cast<to = 1>(x) z = Mul(h, h) m = ReduceMean<keepdims = 1>(z, a) l = Constant<value_float = 0.01>() f = Add(m, l) r = Sqrt(f) d = Div(h, r) i = CastLike(d, x) n = Mul(i, s)"

REGIONS: Mapping[str, tuple[str, int]] = {
    "layer norm, bias": ("g (T[M,72] x, T[72] s, T[72] b, T[72,40] w, T[40] c) => (T[M,40] y) { n = LayerNormalization(x, s, b) p = MatMul(n, w) y = Add(p, c) }", 2),
    "layer norm, three projections": ("g (T[2,M,40] x, T[40] s, T[40,24] w, T[40,24] v, T[40,24] u) => (T[2,M,24] q, T[2,M,24] k, T[2,M,24] l) { n = LayerNormalization(x, s) q = MatMul(n, w) k = MatMul(n, v) l = MatMul(n, u) }", 2),
    "root mean square, a gate": (f"g (T[2,M,72] x, T[72] s, T[72,40] w, T[72,40] v) => (T[2,M,40] y) <int64[1] a = {{2}}> {{ {RMS} u = MatMul(n, w) k = MatMul(n, v) g = Sigmoid(u) j = Mul(u, g) y = Mul(j, k) }}", 1),
    "no vectors": ("g (T[M,31] x, T[31] s, T[31] b, T[17,31] w) => (T[M,17] y) { n = LayerNormalization(x, s, b) y = Gemm<transB = 1>(n, w) }", 2),
    "rows less their largest": ("g (T[M,64] x, T[64,16] w) => (T[M,16] y) <int64[1] a = {1}> { m = ReduceMax(x, a) d = Sub(x, m) e = Exp(d) y = MatMul(e, w) }", 1),
    "norms of queries and keys": ("g (T[1,2,M,32] q, T[1,2,M,32] k, T[1,2,M,24] v, T[32] s) => (T[1,2,M,24] y) { a = LayerNormalization(q, s) b = LayerNormalization(k, s) t = Transpose<perm = [0,1,3,2]>(b) u = MatMul(a, t) p = Softmax(u) y = MatMul(p, v) }", 4),
}
"""By what they are, a graph and the numbers that are known of each row."""


def made_of(name: str, kind: str = "float16") -> Made:
    made = make(REGIONS[name][0].replace("T[", f"{kind}["))
    assert made.kernel.schedule == "normed"
    return made


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", REGIONS)
def test_regions(name: str, kind: str) -> None:
    """Every variant, of odd numbers of rows."""
    made, (_, known) = made_of(name, kind), REGIONS[name]
    assert len(made.kernel.plan.scratch) >= known and all(len(each.steps) >= 2 for each in made.kernel.plan.variants)
    slack = 2.0 if known == 4 else 1.0  # powers of scores that are sums of rounded numbers
    for seed, rows in enumerate((1, 33, 70)):
        check(made, random_inputs(made, {"M": rows}, seed), length=130, limit=3, slack=slack)


@pytest.mark.parametrize("name", ["layer norm, bias", "no vectors"])
def test_float32(name: str) -> None:
    """What is scaled is rounded to TF32, as other operands are, unless these are not to be."""
    made = made_of(name, "float")
    assert made.kernel.rounds and SCHEDULES["normed"].leeway(made.kernel) > 0
    lowered = replace(made.lowered, program=exactly(made.lowered.program))
    kernel = make_kernel(Request(lowered, "test"))
    assert isinstance(kernel, Kernel) and kernel.schedule == "normed" and not kernel.rounds
    exact = Made(made.model, made.graph, lowered, kernel)
    check(exact, random_inputs(exact, {"M": 37}), length=72)


def test_no_rows_and_numbers_that_are_none() -> None:
    made = made_of("layer norm, bias")
    check(made, random_inputs(made, {"M": 0}), length=72)
    inputs = random_inputs(made, {"M": 9})
    inputs["x"][3, 5], inputs["x"][7, 0] = np.nan, np.inf
    check(made, inputs, length=130, limit=3)


def test_few_queries_of_many_keys() -> None:
    """Keys are split, and what each part found lies in scratch memory behind what is known of rows."""
    text = "g (T[1,2,5,32] q, T[1,2,600,32] k, T[1,2,600,32] v, T[32] s) => (T[1,2,5,32] y) { a = LayerNormalization(q, s) t = Transpose<perm = [0,1,3,2]>(k) u = MatMul(a, t) p = Softmax(u) y = MatMul(p, v) }"
    made = make(text.replace("T[", "float16["))
    assert made.kernel.schedule == "normed" and len(made.kernel.plan.scratch) == 3
    assert len(made.kernel.plan.variants[0].steps) == 3
    check(made, random_inputs(made, {}), length=600)


def test_it_shares_no_launch() -> None:
    assert not sharing(made_of("layer norm, bias").kernel)


LEFT: Mapping[str, str] = {
    "a norm behind, too": "g (T[M,72] x, T[72] s, T[72,40] w, T[40] c) => (T[M,40] y) { n = LayerNormalization(x, s) p = MatMul(n, w) y = LayerNormalization(p, c) }",
    "the norm is a result": "g (T[M,72] x, T[72] s, T[72,40] w) => (T[M,40] y, T[M,72] n) { n = LayerNormalization(x, s) y = MatMul(n, w) }",
    "rows of another length": "g (T[M,72] x, T[72,40] w) => (T[M,40] y) <int64[1] a = {0}> { m = ReduceMean(x, a) d = Sub(x, m) y = MatMul(d, w) }",
}


@pytest.mark.parametrize("name", LEFT)
def test_what_has_no_such_kernel(name: str) -> None:
    made = attempt(parse(LEFT[name].replace("T[", "float16["), 20))
    assert isinstance(made, Refusal) or made.kernel.schedule == "normed"
    assert isinstance(made, Refusal) or name == "rows of another length"


ROTARY = "a{n}, b{n} = Split<axis = 3, num_outputs = 2>({n}) m{n} = Neg(b{n}) r{n} = Concat<axis = 3>(m{n}, a{n}) c{n} = Mul({n}, cos) s{n} = Mul(r{n}, sin) {n}r = Add(c{n}, s{n})"


def test_rotary_embeddings_are_computed_as_queries_and_keys_are_loaded() -> None:
    text = (f"g (T[2,3,M,32] q, T[2,3,M,32] k, T[2,3,M,32] v, T[1,1,M,32] cos, T[1,1,M,32] sin) => (T[2,3,M,32] y) <float f = {{0.17}}> {{ {ROTARY.format(n='q')} "
            f"{ROTARY.format(n='k')} t = Transpose<perm = [0,1,3,2]>(kr) u = MatMul(qr, t) o = CastLike(f, u) e = Mul(u, o) p = Softmax(e) y = MatMul(p, v) }}")
    made = make(text.replace("T[", "float16["))
    assert made.kernel.schedule == "attention"
    for seed, rows in enumerate((1, 37, 70)):
        check(made, random_inputs(made, {"M": rows}, seed), length=130, limit=3)
