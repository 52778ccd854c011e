"""Sums that are computed again from their terms, where they are read."""

from __future__ import annotations

import pytest
from emulated import EmulatedRunner
from recomputing import again, feeds, fuse, model, peak, regions, run

from onnxfuse.optimised import Optimised
from onnxfuse.verifying import verify

pytestmark = pytest.mark.usefixtures("few_ways")

BROADCAST = """g (float16[N, 256, 512] u, float16[1, 256, 512] x, float16[N, 1, 512] k,
             float16[512, 512] w) => (float16[N, 256, 512] y) {
    p0 = Tanh(x) STEPS q = Abs(k) s = Add(p7, q) m = MatMul(u, w) c = Mul(m, s) d = Tanh(c) n = MatMul(d, w)
    e = Mul(n, s) f = Tanh(e) y = MatMul(f, w)
}""".replace("STEPS", " ".join(f"p{place} = Pow(p{place - 1}, x)" for place in range(1, 8)))
"""A sum of two terms that each are far smaller, one of which takes too much to be computed again, as the relative bias
and the mask of an encoder's attentions are."""


@pytest.mark.parametrize("text", [BROADCAST, BROADCAST.replace("MatMul(u, w)", "MatMul(q, w)")],
                         ids=["terms that nothing else reads", "a term that is written anyway"])
def test_a_sum_is_computed_again_from_its_terms(text: str) -> None:
    made, plain = fuse(text, dims={"N": 64}), fuse(text, dims={"N": 64}, disable=["recompute"])
    assert written(plain) == [["s", "d"], ["f"]]
    assert sorted(written(made)[0]) == ["p7", "q"] and written(made)[1:] == [["d"], ["f"]]
    assert again(made) == [[], [], ["Add"]] and regions(made)[1:] == [["Add", "Mul", "Tanh"]] * 2
    assert moved(made) < 0.75 * moved(plain) and peak(made) <= peak(plain)


def test_terms_that_are_as_large_as_their_sum_are_not_written_in_its_place() -> None:
    text = BROADCAST.replace("float16[1, 256, 512] x", "float16[N, 256, 512] x")
    made = fuse(text, dims={"N": 64})
    assert not any(again(made)) and written(made)[0] == ["s", "d"]
    assert not any("'s'" in record.reason for record in made.plan.considered)


def test_nothing_is_computed_again_for_hardly_fewer_bytes() -> None:
    """One of two numbers for each row, beside a number for each column that takes too much: reading it is nothing."""
    made = fuse(BROADCAST.replace("float16[1, 256, 512] x", "float16[1, 256, 1] x"), dims={"N": 64})
    assert sorted(written(made)[0]) == ["p7", "q"] and again(made) == [[], [], ["Add"]]


def test_what_is_largest_is_computed_from_less_first() -> None:
    """A product of a row and a column, and a long computation of one number a matrix."""
    text = BROADCAST.replace("s = Add(p7, q)", "o = Mul(k, l) s = Add(p7, o)").replace("q = Abs(k)", "")
    text = text.replace("float16[1, 256, 512] x", "float16[N, 1, 1] x, float16[1, 256, 1] l")
    made = fuse(text.replace("[N, 1, 512] k", "[1, 1, 512] k").replace("512", "4096"), dims={"N": 8})
    assert written(made) == [["p7"], ["d"], ["f"]] and again(made) == [[], [], ["Mul", "Add"]]


@pytest.mark.parametrize("rows", [1, 3])
def test_what_is_computed_from_terms_is_right(rows: int) -> None:
    original, made = model(BROADCAST), fuse(BROADCAST, dims={"N": 64})
    given = feeds(original, {"N": rows})
    for wanted, got in zip(run(original, given), run(made.model, given), strict=True):
        assert wanted.tobytes() == got.tobytes()
    assert [result.verdict for result in verify(made, EmulatedRunner(), given).nodes] == ["passed"] * 3


def written(optimised: Optimised) -> list[list[str]]:
    return [[value.name for value in fusion.outputs] for fusion in optimised.plan.fusions]


def moved(optimised: Optimised) -> int:
    return sum(fusion.cost.bytes_after for fusion in optimised.plan.fusions)
