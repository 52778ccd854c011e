"""The pointwise schedule: vectors that are cut short, operands that fall apart into elements, sizes of a run that admit
no vectors; and reductions alone, whose elements are all asked for at once."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

import re

import numpy as np
import pytest
from emulator import variants_that_hold
from kernel_harness import Made, arguments, check, make, random_inputs, sweep

from onnxfuse.schedules.pointwise import read_again

KINDS = ["float", "float16", "bfloat16", "double", "int8", "int64", "bool"]
WIDTHS = {"float": 4, "float16": 8, "bfloat16": 8, "double": 2, "int8": 8, "int64": 2, "bool": 8}


def first(made: Made) -> str:
    """The kernel that is meant to run."""
    return made.kernel.plan.variants[0].steps[0].kernel


def runs(made: Made, **sizes: int) -> str:
    """What runs first at sizes."""
    name = variants_that_hold(made.kernel.plan, arguments(made, random_inputs(made, sizes)))[0]
    return next(variant.steps[0].kernel for variant in made.kernel.plan.variants if variant.name == name)


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_vector_may_be_cut_short(kind: str) -> None:
    text = f"g ({kind}[N] x, {kind}[N] z) => ({kind}[N] y) {{ y = {'And' if kind == 'bool' else 'Add'}(x, z) }}"
    made = sweep(text, *({"N": size} for size in (0, 1, 2, 3, 7, 8, 9, 15, 17, 255, 4097)))
    assert first(made) == f"pointwise_w{WIDTHS[kind]}_32"
    assert runs(made, N=4097) == first(made)
    known = sweep(text.replace("[N]", "[33]"), {})
    assert first(known) == first(made)


def test_no_vector_is_cut_short_where_sizes_divide() -> None:
    for shape, cut in (("[N,24]", False), ("[3,7,40]", False), ("[N,31]", True), ("[3,7]", True)):
        source = make(f"g (float{shape} x) => (float{shape} y) {{ y = Neg(x) }}").kernel.source
        assert ("pointwise_at<1, idx>" in source) is cut


@pytest.mark.parametrize("size", ["40", "S", "33"])
def test_what_lanes_have_in_common_is_divided_once(size: str) -> None:
    """A bias of heads by distance: places that are read, of each lane its own, and heads that all lanes share, where
    their sizes divide, and where not."""
    made = make(f"g (float16[B,12,{size}] x, float16[32,12] w, int64[{size}] i) => (float16[B,12,{size}] y) "
                "{ g = Gather <axis = 0> (w, i) t = Transpose <perm = [1,0]> (g) y = Add(x, t) }")
    source = made.kernel.source
    assert ("(L + v) /" in source) is (size == "33")
    for seed, one in enumerate(({"B": 2, "S": 40}, {"B": 3, "S": 33}, {"B": 1, "S": 8})):
        inputs = random_inputs(made, one, seed)
        inputs["i"][:] = np.random.default_rng(seed).integers(-32, 32, inputs["i"].shape)
        check(made, inputs)


@pytest.mark.parametrize("kind", ["float", "float16"])
@pytest.mark.parametrize(("text", "sizes"), [
    ("g (T[2,6,7,7] x, T[2,6,1,1] s) => (T[2,6,7,7] y) { y = Mul(x, s) }", {}),
    ("g (T[2,6,7,7] x, T[6,1,1] s, T[6,1,1] b) => (T[2,6,7,7] y) { a = Mul(x, s) y = Add(a, b) }", {}),
    ("g (T[N,5,31] x, T[31] s) => (T[N,5,31] y) { y = Mul(x, s) }", {"N": 3}),
    ("g (T[4,3,33] x, T[4,3,32] r) => (T[4,3,32] y) <int64[1] s = {1}, int64[1] e = {33}, int64[1] a = {2}> { c = Slice(x, s, e, a) y = Add(c, r) }", {}),
    ("g (T[2,3,8,8] x) => (T[2,3,9,9] y) <int64[8] p = {0,0,0,0,0,0,1,1}> { y = Pad(x, p) }", {}),
    ("g (T[N,9] x, T[N,7] z) => (T[N,16] y) { y = Concat<axis = 1>(x, z) }", {"N": 5}),
    ("g (T[40] x) => (T[40] y) <int64[1] s = {-1}, int64[1] e = {-41}, int64[1] a = {0}, int64[1] d = {-1}> { y = Slice(x, s, e, a, d) }", {}),
    ("g (T[30,5] x, int64[N] i) => (T[N,5] y) { y = Gather(x, i) }", {"N": 7}),
], ids=["images", "channels", "bias", "slice", "pad", "concat", "reverse", "gather"])
def test_what_falls_apart_leaves_the_rest_in_vectors(text: str, sizes: dict[str, int], kind: str) -> None:
    made = make(text.replace("T[", f"{kind}["))
    assert re.match(rf"pointwise_w{WIDTHS[kind]}_", first(made))
    inputs = random_inputs(made, sizes)
    if "i" in inputs:
        inputs["i"] %= 30
    check(made, inputs)


def test_sizes_of_a_run_that_admit_no_vectors() -> None:
    """A mask is broadcast over heads and queries; where a row of it is no whole number of vectors, elements are read
    one by one, several a thread, with indices as short as else."""
    made = make("g (float16[B,3,S,S] x, float16[B,1,1,S] m) => (float16[B,3,S,S] y) { y = Add(x, m) }")
    assert runs(made, B=2, S=16) == first(made) == "pointwise_w8_32"
    assert runs(made, B=2, S=15) == "pointwise_w1_x4_32"
    assert [variant.steps[0].kernel for variant in made.kernel.plan.variants][1:] == [
        "pointwise_w1_x4_32", "pointwise_w1_64"]
    for size in (1, 3, 8, 15, 16, 37):
        check(made, random_inputs(made, {"B": 2, "S": size}))


REDUCTIONS = {
    "mean": ("g (T[R,C] x) => (T[R,1] y) <int64[1] a = {1}> { y = ReduceMean(x, a) }"),
    "norm": ("g (T[R,C] x) => (T[R] y) <int64[1] a = {1}> { y = ReduceL2<keepdims = 0>(x, a) }"),
    "silu": ("g (T[R,C] x) => (T[R,C] z, T[R,1] y) <int64[1] a = {1}> { s = Sigmoid(x) z = Mul(x, s) y = ReduceMean(z, a) }"),
}


@pytest.mark.parametrize("kind", ["float", "float16"])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_alone(name: str, kind: str) -> None:
    for length in (1, 7, 32, 49, 196, 197, 784, 3136, 5000):
        text = REDUCTIONS[name].replace("T[", f"{kind}[")
        known = make(text.replace("C]", f"{length}]"), planned={"R": 64})
        assert re.match(r"rows_\d+_w\d_x\d+_32$", first(known))
        check(known, random_inputs(known, {"R": 5}), length=length, orders=("forward", 7))
    planned = make(text, planned={"R": 64, "C": 197})
    for length in (0, 1, 196, 197, 198, 4097):
        check(planned, random_inputs(planned, {"R": 3, "C": length}), length=max(length, 1))
    assert runs(planned, R=3, C=197) == "rows_256_w1_x1_32"
    assert runs(planned, R=3, C=4097) == f"rows_32_w{8 if kind == 'float16' else 4}_stream_peeled_32"


@pytest.mark.parametrize(("rows", "length", "threads"), [
    (36_864, 49, 8), (2048, 197, 32), (8192, 768, 32), (512, 1024, 128), (128, 4096, 512), (64, 12_544, 1024),
])
def test_few_rows_have_more_threads(rows: int, length: int, threads: int) -> None:
    """The choices that were quickest, or within a tenth of it, where they were measured."""
    made = make(REDUCTIONS["silu"].replace("T[", "float16[").replace("C]", f"{length}]"), planned={"R": rows})
    assert first(made).startswith(f"rows_{threads}_")


SILU = "s = Sigmoid(x) p = Mul(x, s) "
PIECES = {
    "halves": ("g (T[N,13] x) => (T[N,9] y, T[N,4] z) <int64[2] n = {9, 4}> { SILU y, z = Split<axis = 1>(p, n) }", "N"),
    "channels": ("g (T[N,6,5] x, T[N,4,5] r) => (T[N,4,5] y, T[N,2,5] z) <int64[2] n = {4, 2}> "
                 "{ SILU a, z = Split<axis = 1>(p, n) y = Add(a, r) }", "N"),
    "whole and slice": ("g (T[N,12] x) => (T[N,12] p, T[N,3] y) <int64[1] b = {8}, int64[1] e = {11}, int64[1] d = {1}> "
                        "{ SILU c = Slice(p, b, e, d) y = Abs(c) }", "N"),
    "three": ("g (T[N,11] x) => (T[N,8] y, T[N,2] z, T[N,1] w, T[N,8] v) <int64[3] n = {8, 2, 1}> "
              "{ SILU y, z, w = Split<axis = 1>(p, n) v = Neg(y) }", "N"),
    "rows": ("g (T[N,3] x) => (T[K,3] y, T[M,3] z) <int64[1] f = {0}, int64[1] h = {2}, int64[1] e = {9999}, int64[1] d = {0}> "
             "{ SILU y = Slice(p, f, h, d) z = Slice(p, h, e, d) }", "N"),
    "two inputs": ("g (T[N,5] x, T[M,7] u) => (T[N,5] p, T[M,7] y) { SILU y = Abs(u) }", "NM"),
    "gathered": ("g (T[6,5] x, int64[N] i, int64[M] j) => (T[N,5] y, T[M,5] z) { SILU y = Gather(p, i) z = Gather(p, j) }", "NM"),
}
"""Outputs of different sizes, and the names of sizes."""


def pieces(name: str, kind: str) -> Made:
    return make(PIECES[name][0].replace("SILU ", SILU).replace("T[", f"{kind}["))


@pytest.mark.parametrize("kind", ["float", "float16", "bfloat16", "double"])
@pytest.mark.parametrize("name", PIECES)
def test_outputs_of_different_sizes(name: str, kind: str) -> None:
    """Each is right at empty, odd and whole sizes, in any order of threads, aligned or not."""
    made = pieces(name, kind)
    for seed, (rows, others) in enumerate(((0, 0), (0, 3), (1, 0), (1, 1), (7, 2), (8, 300))):
        sizes = dict(zip(PIECES[name][1], (rows, others), strict=False))
        inputs = random_inputs(made, sizes, seed)
        for index in {"i", "j"} & set(inputs):
            inputs[index] %= 6
        check(made, inputs, orders=("forward", "backward"))


@pytest.mark.parametrize("kind", ["int8", "int32", "int64", "uint16", "bool"])
def test_pieces_of_integers(kind: str) -> None:
    change = "p = Not(x)" if kind == "bool" else "p = Add(x, x)"
    text = PIECES["halves"][0].replace("SILU", change).replace("T[", f"{kind}[")
    made = sweep(text, *({"N": size} for size in (0, 1, 3, 64)))
    assert first(made).startswith("pointwise_w")


def test_pieces_have_blocks_of_their_own() -> None:
    """No block, and so no vector, writes to two pieces of different sizes; what a piece needs is all that it reads."""
    made = pieces("halves", "float16")
    grid = made.kernel.plan.variants[0].steps[0].grid
    assert grid == ("s0 9 * 2048 ceil s0 4 * 2048 ceil +", "1", "1")
    assert [guard for guard in made.kernel.plan.variants[0].guards if "o1.addr" in guard] == ["o1.addr 16 % 0 =="]
    for body in re.findall(r"pointwise_at\d*\([^{]*\{(.*?)\n\}", made.kernel.source, re.DOTALL):
        assert len(re.findall(r"of::store\(o\d", body)) == 1
        assert len(re.findall(r"of::load<", body)) <= 1


def test_pieces_of_equal_sizes_share_a_loop() -> None:
    text = "g (float[N,12] x) => (float[N,6] y, float[N,6] z) { s = Sigmoid(x) p = Mul(x, s) y, z = Split<axis = 1, num_outputs = 2>(p) }"
    assert "pointwise_at1" not in make(text).kernel.source
    assert "pointwise_at1" in pieces("halves", "float").kernel.source


def test_pieces_past_the_reach_of_32_bits_have_indices_of_64() -> None:
    """Only the large one needs them; all run under them."""
    text = "g (float[N,3] x, float[M] z) => (float[N,3] y, float[M] w) { y = Neg(x) w = Abs(z) }"
    plan = make(text).kernel.plan
    assert {"s0 3 * 2143289344 <", "s1 2143289344 <"} <= set(plan.variants[0].guards)
    assert plan.variants[-1].guards == () and plan.variants[-1].steps[0].kernel.endswith("_64")
    check(make(text), random_inputs(make(text), {"N": 5, "M": 700}))
    huge = make("g (float[3,1000000000] x) => (float[2,1000000000] y, float[1,1000000000] z) <int64[2] n = {2, 1}> "
                "{ p = Neg(x) y, z = Split<axis = 0>(p, n) }")
    assert [variant.steps[0].kernel for variant in huge.kernel.plan.variants] == ["pointwise_w1_64"]


def test_what_is_read_again_is_known() -> None:
    """Bytes beyond each input's own: nothing for pieces, the slice beside the whole."""
    assert read_again(pieces("halves", "float").lowered) == 0
    assert read_again(pieces("channels", "float").lowered) == 0
    assert read_again(pieces("whole and slice", "float").lowered).evaluate({"N": 10}) == 10 * 3 * 4
    assert read_again(pieces("three", "float16").lowered) == 0
