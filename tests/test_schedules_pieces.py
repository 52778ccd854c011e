"""Rows that lie in pieces: norms of groups of channels where the channels are last.

Threads read neighbours in memory, and all else is as in test_schedules_rows: every variant that holds, poisoned
outputs, threads in several orders, against float64.
"""

from __future__ import annotations

import numpy as np
import pytest
from kernel_harness import check, make, random_inputs, told

BETWEEN = """g (T[N,H,W,{channels}] x, T[{channels},1,1] w) => ({result} y)
<int64[3] s = {{0,{groups},-1}}, int64[4] t = {{0,{channels},H,W}}> {{
 one = Constant <value = T[{groups}] {{{ones}}}> () zero = Constant <value = T[{groups}] {{{zeros}}}> ()
 f = Transpose <perm=[0,3,1,2]> (x) r = Reshape(f, s) i = InstanceNormalization(r, one, zero) q = Reshape(i, t)
 m = Mul(q, w) p = Sigmoid(m) z = Mul(m, p) {last} }}"""

LAST = "y = Transpose <perm=[0,2,3,1]> (z)"


def norm(kind: str, channels: int, groups: int, height: int, width: int, last: str = LAST) -> str:
    result = f"T[N,H,W,{channels}]" if last == LAST else f"T[N,{channels},H,W]"
    text = BETWEEN.format(channels=channels, groups=groups, result=result, last=last,
                          ones=",".join("1" * groups), zeros=",".join("0" * groups))
    return text.replace("T[", f"{kind}[").replace(",H,W", f",{height},{width}")


@pytest.mark.parametrize("kind, channels, groups, name", [
    ("float16", 64, 4, "_w8_"), ("float16", 64, 8, "_w8_"), ("float16", 128, 32, "_w4_"), ("float16", 20, 2, "_w2_"),
    ("float16", 33, 11, "_w1_"), ("bfloat16", 24, 6, "_w4_"), ("float", 24, 6, "_w4_"), ("double", 12, 6, "_w2_")])
def test_pieces(kind: str, channels: int, groups: int, name: str) -> None:
    """Runs of 16, 8, 4, 10, 3, 4, 4 and 2 channels."""
    for height, width in ((5, 7), (3, 1), (29, 27)):
        made = make(norm(kind, channels, groups, height, width), planned={"N": 3})
        assert made.kernel.schedule == "rows"
        if (height, width) == (5, 7):
            assert name in made.kernel.plan.variants[0].name
        for batch in (1, 3):
            inputs = random_inputs(made, {"N": batch}, batch)
            check(made, inputs, length=height * width * channels // groups, orders=("forward", 7))


def test_long_rows() -> None:
    """Pieces of whole lines are read across however long rows are; shorter ones of rows that registers hold."""
    made = make(norm("float16", 128, 2, 97, 131), planned={"N": 37})
    assert any("_w8_stream_32" in variant.name for variant in made.kernel.plan.variants)
    check(made, random_inputs(made, {"N": 1}, 0), length=97 * 131 * 64, orders=("forward", 7))
    for channels, count, longest in ((32, 2, 45), (12, 3, 22)):
        for height, schedule in ((longest, "rows"), (longest + 10, "pieces")):
            made = make(norm("float16", channels, count, height, 90), planned={"N": 37})
            assert made.kernel.schedule == schedule


def test_every_way_that_tuning_may_choose() -> None:
    made = make(norm("float16", 64, 8, 14, 14), planned={"N": 4})
    assert len(made.kernel.choices) > 4
    for choice in made.kernel.choices:
        other = told(made, choice, {"N": 4})
        assert other.kernel.choice == choice
        check(other, random_inputs(other, {"N": 2}, 1), length=8 * 14 * 14, orders=("forward",))


def test_one_side_alone() -> None:
    """What comes channels-last and leaves channels-first, or the other way round, is right all the same."""
    made = make(norm("float16", 16, 4, 6, 5, "y = Identity(z)"), planned={"N": 2})
    check(made, random_inputs(made, {"N": 2}, 0), length=4 * 30, orders=("forward", 7))
    text = norm("float", 16, 4, 6, 5).replace("float[N,6,5,16] x", "float[N,16,6,5] x").replace(
        "f = Transpose <perm=[0,3,1,2]> (x)", "f = Identity(x)")
    made = make(text, planned={"N": 2})
    check(made, random_inputs(made, {"N": 2}, 0), length=4 * 30, orders=("forward", 7))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_in_its_row(value: float) -> None:
    made = make(norm("float16", 16, 4, 3, 3), planned={"N": 2})
    inputs = random_inputs(made, {"N": 2}, 0)
    inputs["x"][1, 2, 2, 5] = value
    check(made, inputs, length=36, orders=("forward",))
