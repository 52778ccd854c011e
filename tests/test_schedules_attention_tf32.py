"""Attention of float32, whose products tensor cores compute through TF32.

Queries, keys and values have as many digits as these keep; powers are rounded, each by up to 2^-11 of itself, which a
result shows up to 16 times what float32 sums would.
"""



from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np
import pytest
from emulator import run_plan
from kernel_harness import Made, arguments, check, short_inputs, variants_that_hold
from quick_compiler import quickly
from test_schedules_attention import ACROSS, MASKED, PLAIN, SIZES, SPELLINGS, attention, attention_of

from onnxfuse.compiling import default_compiler, source_of
from onnxfuse.runtime.compile import architectures, compile_cubin

SLACK = 32.0


def float_attention(text: str, planned: Mapping[str, int] | None = None) -> Made:
    made = attention(text, "float", planned)
    assert made.kernel.rounds and "4 multiply together" not in str(made.kernel.plan.variants)
    return made


def verify(made: Made, sizes: Mapping[str, int], seed: int = 0, **options: object) -> None:
    check(made, short_inputs(made, sizes, seed), length=130, slack=SLACK, **options)


@pytest.mark.parametrize("case", SPELLINGS)
def test_spellings(case: str) -> None:
    made = float_attention(SPELLINGS[case])
    for seed, sizes in enumerate(SIZES):
        verify(made, sizes, seed, limit=2)


@pytest.mark.parametrize(("depth", "columns"), [(1, 8), (16, 16), (40, 24), (64, 64), (128, 120)])
def test_head_sizes(depth: int, columns: int) -> None:
    text = PLAIN.replace("S,64] y", f"S,{columns}] y").replace("K,64] v", f"K,{columns}] v").replace("64", str(depth))
    made = float_attention(text)
    for seed, (rows, keys) in enumerate(((1, 49), (49, 17))):
        verify(made, {"B": 1, "H": 1, "S": rows, "K": keys}, seed)


@pytest.mark.parametrize("order", ["backward", 3])
def test_threads_in_any_order(order: str | int) -> None:
    verify(float_attention(PLAIN), {"B": 1, "H": 2, "S": 65, "K": 150}, orders=[order], limit=2)


def test_few_queries_of_many_keys() -> None:
    made = float_attention(PLAIN, {"B": 1, "H": 2, "S": 3, "K": 1057})
    inputs = short_inputs(made, {"B": 1, "H": 2, "S": 3, "K": 1057})
    assert "keys split" in variants_that_hold(made.kernel.plan, arguments(made, inputs), [])[0]
    check(made, inputs, length=1057, slack=SLACK, limit=1, orders=["forward", "backward"])


def test_keys_that_lie_side_by_side() -> None:
    planned = {"B": 1, "S": 70, "K": 136}
    made = float_attention(ACROSS, planned)
    assert "const T* const origin = i1 + " in made.kernel.code.functions[0].body
    verify(made, planned)
    verify(made, {"B": 2, "S": 5, "K": 49}, limit=1)


@pytest.mark.parametrize("case", MASKED)
def test_rows_that_are_masked_everywhere(case: str) -> None:
    made = float_attention(
        "g (T[B,2,S,16] q, T[B,2,K,16] k, T[B,2,K,16] v, T[B,1,S,K] m) => (T[B,2,S,16] y) <T zero = {0}> "
        f"{{ t = Transpose<perm = [0,1,3,2]>(k) s = MatMul(q, t) c = Add(s, m) p = Softmax(c) {MASKED[case]} }}")
    inputs = short_inputs(made, {"B": 1, "S": 33, "K": 70})
    inputs["m"][:] = 0
    inputs["m"][0, 0, 1], inputs["m"][0, 0, 2, 3:] = -np.inf, -np.inf
    check(made, inputs, length=70, slack=SLACK)


def test_the_lowest_number_as_a_mask() -> None:
    made = float_attention("g (T[2,S,16] q, T[2,16,K] k, T[2,K,16] v, T[S,K] m) => (T[2,S,16] y) "
                           "{ s = MatMul(q, k) c = Add(s, m) p = Softmax(c) y = MatMul(p, v) }")
    inputs = short_inputs(made, {"S": 33, "K": 70})
    inputs["m"][:] = 0
    inputs["m"][1], inputs["m"][2, 3:], inputs["m"][3] = ml_dtypes.finfo(np.float32).min, -1e38, -np.inf
    inputs["q"][:, 1] = 0
    check(made, inputs, length=70, slack=SLACK)


@pytest.mark.parametrize("number", [np.nan, np.inf, 1e38])
def test_numbers_at_the_edge(number: float) -> None:
    """Of other rows nothing shows."""
    made = float_attention(PLAIN)
    inputs = short_inputs(made, {"B": 1, "H": 1, "S": 33, "K": 70})
    inputs["q"][0, 0, 1, 3] = number
    (got,) = run_plan(made.kernel.plan, made.kernel.source, arguments(made, inputs))
    assert np.isfinite(np.delete(got, 1, 2)).all()
    assert number == 1e38 or np.isnan(got[0, 0, 1]).all()


def test_what_tuning_may_try() -> None:
    made = float_attention(PLAIN)
    assert len(made.kernel.choices) > 3
    for choice in made.kernel.choices:
        verify(attention_of(made, choice), {"B": 1, "H": 1, "S": 70, "K": 140}, limit=1, misalign=False)


@pytest.mark.parametrize("architecture", architectures())
def test_it_compiles(architecture: int) -> None:
    """Without tensor cores for it float32 is multiplied, in a function that stands once."""
    kernel = float_attention(PLAIN).kernel
    with quickly():
        assert compile_cubin(kernel.source, f"sm_{architecture}")[:4] == b"\x7fELF"


def test_nothing_spills() -> None:
    kernel = float_attention(PLAIN, {"B": 8, "H": 12, "S": 512, "K": 512}).kernel
    figures = default_compiler().figures(source_of(kernel.source, kernel.plan), "sm_90")
    assert figures is not None and not any(each.spilled_bytes for each in figures.values())


@pytest.mark.parametrize(("score", "kind", "predicted"), [
    ("c = Mul(s, f)", "float", True), ("u = Mul(s, f) c = Add(u, f)", "float", True),
    ("u = Mul(s, f) b1 = Less(u, f) b2 = Greater(u, f) b3 = And(b1, b2) b4 = Or(b3, b1) w1 = Where(b4, u, f) "
     "w2 = Add(w1, f) w3 = Where(b3, w2, f) w4 = Mul(w3, f) w5 = Add(w4, u) w6 = Sub(w5, f) c = Add(w6, f)", "float",
     True),
    ("u = Div(s, f) w = Tanh(u) c = Mul(w, f)", "float", False),
    ("u = Div(s, f) w = Tanh(u) c = Mul(w, f)", "float16", True),
])
def test_costly_scores_of_float32_are_measured_first(score: str, kind: str, predicted: bool) -> None:
    """A soft cap of a vision transformer's took three times as long as its attention without, and longer than the
    runtime's nodes; of 16 bits half as long again."""
    text = PLAIN.replace("c = Div(s, f)", score)
    made = attention(text, kind, planned={"B": 32, "H": 12, "S": 197, "K": 197})
    assert (made.kernel.pace is not None) is predicted
