"""Results that are cut from one product's columns: in the emulator against float64."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from collections.abc import Mapping

import pytest
from kernel_harness import Made, check, make, random_inputs, short_inputs

from onnxfuse.graph.dims import dim, symbol
from onnxfuse.ir.scalars import FLOAT
from onnxfuse.lowering.pull import Apply, Condition, Load, Scalar, Select
from onnxfuse.schedules.products.cut import in_one

LAST = "i = Transpose<perm = [0,3,1,2]>(x) k = Transpose<perm = [0,3,1,2]>(w)"

REGIONS: Mapping[str, str] = {
    "an inception block's reductions": "g (T[N,72] x, T[72,176] w, T[64] b, T[96] c) => (T[N,64] r, T[N,96] s, T[N,16] u) <int64[3] z = {64,96,16}> { p = MatMul(x, w) i, j, u = Split<axis = 1>(p, z) k = Add(i, b) r = Relu(k) l = Add(j, c) s = Relu(l) }",
    "channels last, and another layout": f"g (T[N,5,3,16] x, T[32,1,1,16] w, T[8] b) => (T[N,5,3,8] r, T[N,24,5,3] s) <int64[2] z = {{8,24}}, int64[2] one = {{1,2}}> {{ {LAST} p = Conv(i, k) d, s = Split<axis = 1>(p, z) e = Unsqueeze(b, one) q = Add(d, e) t = Sigmoid(q) r = Transpose<perm = [0,2,3,1]>(t) }}",
    "channels first": "g (T[N,16,5,3] x, T[32,16,1,1] w) => (T[N,8,5,3] r, T[N,24,5,3] s) <int64[2] z = {8,24}> { p = Conv(x, w) d, s = Split<axis = 1>(p, z) r = Relu(d) }",
    "windows": f"g (T[N,5,4,16] x, T[40,3,3,16] w) => (T[N,5,4,32] r, T[N,5,4,8] s) <int64[2] z = {{32,8}}> {{ {LAST} p = Conv<pads = [1,1,1,1]>(i, k) d, e = Split<axis = 1>(p, z) f = Relu(e) r = Transpose<perm = [0,2,3,1]>(d) s = Transpose<perm = [0,2,3,1]>(f) }}",
    "grouped queries": "g (T[2,N,40] x, T[40,64] w) => (T[2,4,N,8] q, T[2,2,N,8] k, T[2,2,8,N] v) <int64[3] z = {32,16,16}, int64[4] h = {0,0,4,8}, int64[4] l = {0,0,2,8}> { p = MatMul(x, w) i, j, m = Split<axis = 2>(p, z) a = Reshape(i, h) q = Transpose<perm = [0,2,1,3]>(a) b = Reshape(j, l) k = Transpose<perm = [0,2,1,3]>(b) c = Reshape(m, l) v = Transpose<perm = [0,2,3,1]>(c) }",
    "parts that no vector divides": "g (T[N,24] x, T[24,12] w) => (T[N,7] r, T[N,5] s) <int64[2] z = {7,5}> { p = MatMul(x, w) i, s = Split<axis = 1>(p, z) r = Tanh(i) }",
    "a residual of one": "g (T[N,24] x, T[24,40] w, T[N,24] v) => (T[N,16] r, T[N,24] s) <int64[2] z = {16,24}> { p = MatMul(x, w) r, j = Split<axis = 1>(p, z) s = Add(j, v) }",
}
"""By what they are."""


def made_of(name: str, kind: str = "float16") -> Made:
    return make(REGIONS[name].replace("T[", f"{kind}["))


@pytest.mark.parametrize(("name", "kind"), [
    *((name, "float16") for name in REGIONS), ("windows", "bfloat16"), ("windows", "float"), ("grouped queries", "float")])
def test_regions(name: str, kind: str) -> None:
    """Each result has its columns, whatever becomes of them."""
    made = made_of(name, kind)
    assert made.kernel.schedule == "product"
    for seed, rows in enumerate((0, 37) if "MatMul" in REGIONS[name] else (0, 3)):
        inputs = (short_inputs if kind == "float" else random_inputs)(made, {"N": rows}, seed)
        check(made, inputs, length=200, limit=3)


def laid(name: str) -> list[int]:
    """How many results are laid out, by kernels that lay them out where sums are."""
    texts = [function.body for function in made_of(name).kernel.code.functions]  # type: ignore[union-attr]
    return [sum(f"const at{number} =" in text for number in range(4)) for text in texts if "piece_wide" in text]


def test_results_are_computed_once() -> None:
    """As one, of which each element belongs to one; their elements are stored by as wide vectors as one result's are."""
    assert set(laid("an inception block's reductions")) == {1}
    assert "constexpr int piece_wide = 64" in made_of("an inception block's reductions").kernel.source


@pytest.mark.parametrize("more", ["t = Neg(i)", "t = Cast<to = 1>(j)"], ids=["of the same columns", "of another type"])
def test_others_are_results_of_their_own(more: str) -> None:
    kind, wide = ("float", 24) if "Cast" in more else ("float16", 16)
    made = make(f"g (float16[N,24] x, float16[24,40] w) => (float16[N,16] i, float16[N,24] j, {kind}[N,{wide}] t) <int64[2] z = {{16,24}}> {{ p = MatMul(x, w) i, j = Split<axis = 1>(p, z) {more} }}")
    check(made, random_inputs(made, {"N": 37}), length=30, limit=4)


N = symbol("@n")


def load(place: int) -> Load:
    return Load(FLOAT, True, place, N, ())


def of(function: str, *operands: Scalar) -> Apply:
    return Apply(FLOAT, True, function, operands)


def test_what_is_computed_alike_is_computed_once() -> None:
    """Of one operand or the other; where it is not alike, one of both results is taken."""
    below, behind = (Condition(N, None, dim(8)),), (Condition(N - 8, dim(0), None),)
    one, other = in_one([of("relu", load(0)), of("relu", load(1))], [below, behind])
    assert one is other and isinstance(one, Apply) and one.function == "relu"
    (chosen,) = one.operands
    assert isinstance(chosen, Select) and chosen.condition == below[0]
    assert [each.input for each in chosen.operands if isinstance(each, Load)] == [0, 1]
    one, other = in_one([of("relu", load(0)), of("tanh", load(0))], [below, behind])
    assert one is other and isinstance(one, Select)


@pytest.mark.parametrize("kept", [
    [(), ()], [(Condition(N, None, dim(9)),), (Condition(N - 8, dim(0), None),)],
    [(Condition(N, None, dim(8)),), (Condition(symbol("@m") - 8, dim(0), None),)],
], ids=["all places", "a place in common", "other loops"])
def test_what_may_have_places_in_common_stays(kept: list[tuple[Condition, ...]]) -> None:
    results = [of("relu", load(0)), of("tanh", load(0))]
    assert list(in_one(results, kept)) == results
