"""Products that write parts of one result: in the emulator against float64."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from collections.abc import Mapping

import pytest
from kernel_harness import Made, attempt, check, make, parse, random_inputs, short_inputs

from onnxfuse.refusal import Refusal
from onnxfuse.schedules import sharing

LAST = "i = Transpose<perm = [0,3,1,2]>(x) k = Transpose<perm = [0,3,1,2]>(w) l = Transpose<perm = [0,3,1,2]>(v)"
BACK = "y = Transpose<perm = [0,2,3,1]>(z)"

REGIONS: Mapping[str, str] = {
    "SqueezeNet's": f"g (T[N,9,8,16] x, T[24,1,1,16] w, T[24] b, T[40,3,3,16] v, T[40] c) => (T[N,9,8,64] y) {{ {LAST} p = Conv(i, k, b) r = Relu(p) q = Conv<pads = [1,1,1,1]>(i, l, c) s = Relu(q) z = Concat<axis = 1>(r, s) {BACK} }}",
    "parts that no vector divides": f"g (T[N,9,8,16] x, T[7,1,1,16] w, T[5,3,3,16] v) => (T[N,9,8,12] y) {{ {LAST} p = Conv(i, k) q = Conv<pads = [1,1,1,1]>(i, l) z = Concat<axis = 1>(p, q) {BACK} }}",
    "channels first": "g (T[N,16,9,8] x, T[24,16,1,1] w, T[40,16,3,3] v) => (T[N,64,9,8] y) { p = Conv(x, w) q = Conv<pads = [1,1,1,1]>(x, v) y = Concat<axis = 1>(p, q) }",
    "products of two operands": "g (T[N,72] x, T[N,24] u, T[72,40] w, T[24,16] v) => (T[N,56] y) { p = MatMul(x, w) q = MatMul(u, v) g = Sigmoid(q) y = Concat<axis = 1>(p, g) }",
    "rows": "g (T[5,72] x, T[N,72] u, T[72,40] w) => (T[M,40] y) { p = MatMul(x, w) q = MatMul(u, w) y = Concat<axis = 0>(p, q) }",
    "three": "g (T[N,40] x, T[40,8] w, T[40,24] v, T[40,3] u) => (T[N,35] y) { p = MatMul(x, w) q = MatMul(x, v) r = MatMul(x, u) y = Concat<axis = 1>(p, q, r) }",
}
"""By what they are."""


def made_of(name: str, kind: str = "float16") -> Made:
    made = make(REGIONS[name].replace("T[", f"{kind}["))
    assert made.kernel.schedule == "sliced"
    return made


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float"])
@pytest.mark.parametrize("name", REGIONS)
def test_regions(name: str, kind: str) -> None:
    """Every variant writes all of the result, and no more, in a launch for each product."""
    made = made_of(name, kind)
    count = sum(REGIONS[name].count(f"= {product}") for product in ("Conv", "MatMul"))
    assert all(len(variant.steps) == count for variant in made.kernel.plan.variants)
    for seed, rows in enumerate((1, 3, 37) if "MatMul" in REGIONS[name] else (1, 3)):
        inputs = (short_inputs if kind == "float" else random_inputs)(made, {"N": rows}, seed)
        check(made, inputs, length=200)


def test_nothing_beside_something() -> None:
    check(made_of("products of two operands"), random_inputs(made_of("products of two operands"), {"N": 0}), length=72)
    check(made_of("rows"), random_inputs(made_of("rows"), {"N": 0}), length=72)


def test_it_shares_no_launch() -> None:
    assert not sharing(made_of("three").kernel)


LEFT: Mapping[str, str] = {
    "a part that is no product": "g (T[N,72] x, T[N,24] u, T[72,40] w) => (T[N,64] y) { p = MatMul(x, w) g = Sigmoid(u) y = Concat<axis = 1>(p, g) }",
    "two products in a part": "g (T[N,72] x, T[72,40] w, T[72,40] v, T[72,8] u) => (T[N,48] y) { p = MatMul(x, w) q = MatMul(x, v) r = Mul(p, q) s = MatMul(x, u) y = Concat<axis = 1>(r, s) }",
    "a norm in a part": "g (T[N,72] x, T[72,40] w, T[72,40] v, T[40] s) => (T[N,80] y) { p = MatMul(x, w) q = MatMul(x, v) n = LayerNormalization(q, s) y = Concat<axis = 1>(p, n) }",
    "something behind": "g (T[N,72] x, T[72,40] w, T[72,40] v) => (T[N,80] y) { p = MatMul(x, w) q = MatMul(x, v) z = Concat<axis = 1>(p, q) y = Relu(z) }",
}


@pytest.mark.parametrize("name", LEFT)
def test_what_has_no_such_kernel(name: str) -> None:
    made = attempt(parse(LEFT[name].replace("T[", "float16["), 20))
    assert isinstance(made, Refusal) or made.kernel.schedule != "sliced"
