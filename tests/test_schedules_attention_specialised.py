"""Attention with a warp that copies keys and values: heads, lengths, masks, layouts, in the emulator against float64."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import test_schedules_attention_visible as visible
from emulator import run_plan, variants_that_hold
from kernel_harness import Made, arguments, attempt, check, parse, random_inputs, told
from onnx import TensorProto, helper
from test_schedules_attention import MASKED, PLAIN, SPELLINGS, attention

from onnxfuse.graph.dims import dim, symbol
from onnxfuse.schedules import Choice
from onnxfuse.schedules.products.maps import Mapped

PLANNED = {"B": 1, "H": 2, "N": 2, "G": 1, "S": 200, "K": 300}


def ways(made: Made) -> list[Choice]:
    """Those with a warp that copies: one of each number of groups, with few keys so that there are several tiles."""
    found: dict[int, Choice] = {}
    for choice in made.kernel.choices:
        if "stages" in dict(choice.settings):
            known = found.setdefault(choice["warps"], choice)
            found[choice["warps"]] = min(known, choice, key=lambda each: each["keys"])
    return list(found.values())


def checked(
    made: Made, inputs: Mapping[str, np.ndarray], choices: Sequence[Choice] = (), planned: Mapping[str, int] = PLANNED,
    **how: Any,
) -> None:
    """Each way, or those, gives what float64 does, and is what runs."""
    for choice in choices or ways(made):
        other = told(made, choice, planned)
        assert other.kernel.choice == choice
        first = variants_that_hold(other.kernel.plan, arguments(other, inputs), [], 90)[0]
        assert "one copies" in first
        check(other, inputs, limit=1, misalign=False, **how)


@pytest.mark.parametrize(("depth", "columns", "kind"), [
    (16, 64, "float16"), (40, 24, "bfloat16"), (64, 64, "float16"), (64, 64, "bfloat16"), (72, 72, "float16"),
    (128, 128, "bfloat16"), (256, 256, "float16"), (64, 200, "float16")])
def test_head_sizes(depth: int, columns: int, kind: str) -> None:
    text = PLAIN.replace("S,64] y", f"S,{columns}] y").replace("K,64] v", f"K,{columns}] v").replace("64", str(depth))
    made = attention(text, kind, planned=PLANNED)
    assert ways(made)
    checked(made, random_inputs(made, PLANNED), length=300)


@pytest.mark.parametrize(("rows", "keys"), [(33, 1), (64, 64), (65, 63), (197, 197), (129, 321), (40, 1000)])
def test_lengths(rows: int, keys: int) -> None:
    """Tiles of which a part is there, one alone, and many: stages are used again."""
    made = attention(PLAIN, planned=PLANNED)
    checked(made, random_inputs(made, {"B": 2, "H": 1, "S": rows, "K": keys}), length=keys)


def test_every_tile() -> None:
    """Of all that may be tried."""
    made = attention(PLAIN, planned=PLANNED)
    every = [choice for choice in made.kernel.choices if "stages" in dict(choice.settings)]
    assert len({choice["keys"] for choice in every}) > 4
    checked(made, random_inputs(made, {"B": 1, "H": 1, "S": 70, "K": 400}), every, length=400)


@pytest.mark.parametrize("order", ["backward", 3, 11])
def test_threads_in_any_order(order: str | int) -> None:
    """Nobody reads a tile that is not there, or fills one that another still reads."""
    made = attention(PLAIN, planned=PLANNED)
    checked(made, random_inputs(made, {"B": 1, "H": 1, "S": 130, "K": 500}), length=500, orders=[order])


FROM = {
    "the last keys": "{-40}, int64[1] e = {9223372036854775807}, int64[1] a = {1}, int64[1] d = {1}",
    "every second key": "{1}, int64[1] e = {9223372036854775807}, int64[1] a = {1}, int64[1] d = {2}",
    "from the last key to the first": "{-1}, int64[1] e = {-9223372036854775807}, int64[1] a = {1}, int64[1] d = {-1}",
    "from the last batch to the first": "{-1}, int64[1] e = {-9223372036854775807}, int64[1] a = {0}, int64[1] d = {-1}",
}


@pytest.mark.parametrize("case", FROM)
def test_keys_that_begin_inside_a_tensor(case: str) -> None:
    """Whatever their number; no map goes backward."""
    made = attention(f"g (T[B,S,64] q, T[B,K,64] k, T[B,K,64] v) => (T[B,S,64] y) <int64[1] s = {FROM[case]}> {{ l = Slice(k, s, e, a, d) "
                     "w = Slice(v, s, e, a, d) t = Transpose<perm = [0,2,1]>(l) c = MatMul(q, t) p = Softmax(c) y = MatMul(p, w) }", planned=PLANNED)
    assert bool(ways(made)) is ("from" not in case)
    for length in (1, 39, 40, 41, 150):
        inputs = random_inputs(made, {"B": 2, "S": 40, "K": length})
        for choice in ways(made):
            check(told(made, choice, PLANNED), inputs, limit=1, misalign=False, length=length)
        check(made, inputs, misalign=False, length=length)


def test_a_stride_that_may_be_below_zero() -> None:
    """It is asked when it runs."""
    length = symbol("K")
    operand = Mapped(1, TensorProto.FLOAT16, ("@d", "@k"), (length * 64 - 192,), (dim(64), length), across=False)
    assert operand.guards({"K": "s0"}) == ("0 s0 <", "0 s0 64 * -192 + <=", "i1.addr 16 % 0 ==")


HEADS = ("groups of heads that share keys", "a softmax in float32",
         "heads of a joint projection", "an Einstein sum", "what follows", "a soft cap and a bias of the heads")


@pytest.mark.parametrize("case", HEADS)
def test_spellings(case: str) -> None:
    """Wherever keys and values lie so that tensor maps copy them: under the strides of heads, a part of a joint
    projection, heads in common; whatever is done to scores."""
    text = SPELLINGS[case].replace("T[N,16,K] k", "T[N,K,16] kt").replace("T[B,2,16,K] k", "T[B,2,K,16] kt")
    for wide, perm in (("T[N,K,16] kt", "0,2,1"), ("T[B,2,K,16] kt", "0,1,3,2")):
        if wide in text:
            text = text.replace("{ s = MatMul", f"{{ k = Transpose<perm = [{perm}]>(kt) s = MatMul")
    made = attention(text, planned=PLANNED)
    assert ways(made), case
    checked(made, random_inputs(made, {"B": 2, "H": 1, "N": 2, "S": 70, "K": 150}), length=150)


@pytest.mark.parametrize("case", ["one head of keys for all", "segments of queries and keys"])
def test_keys_that_lie_across_are_brought_by_threads(case: str) -> None:
    assert not ways(attention(SPELLINGS[case], planned=PLANNED))


def test_values_that_are_computed_are_brought_by_threads() -> None:
    text = PLAIN.replace("y = MatMul(p, v)", "w = Mul(v, v) y = MatMul(p, w)")
    assert ways(attention(PLAIN, planned=PLANNED)) and not ways(attention(text, planned=PLANNED))


@pytest.mark.parametrize("mask", ["causal", "causal, added", "a sliding window", "near places", "the other way"])
@pytest.mark.parametrize("lengths", [(197, 197), (70, 300), (300, 70)])
def test_keys_that_are_hidden(mask: str, lengths: tuple[int, int]) -> None:
    """Are not copied; of more queries than keys the first see none."""
    made = visible.attention(visible.model(visible.MASKS[mask]), planned=PLANNED)
    assert ways(made) and made.kernel.hides
    checked(made, random_inputs(made, {"B": 2, "S": lengths[0], "K": lengths[1]}), length=lengths[1])


@pytest.mark.parametrize("order", ["forward", "backward", 5])
@pytest.mark.parametrize("mask", ["later, the lowest", "a number times what is hidden", "two masks", "in float32"])
@pytest.mark.parametrize("lengths", [(197, 197), (300, 70), (70, 300)])
def test_finite_masks(mask: str, lengths: tuple[int, int], order: str | int) -> None:
    """Rows that see nothing but masked scores are uniform, as far as scores do not lift them: their block goes over all
    keys again."""
    made = visible.attention(visible.model(visible.MASKS[mask]), planned=PLANNED)
    assert ways(made) and made.kernel.hides
    inputs = random_inputs(made, {"B": 1, "S": lengths[0], "K": lengths[1]})
    checked(made, inputs, length=lengths[1], orders=[order])


@pytest.mark.parametrize("case", MASKED)
def test_rows_that_are_masked_everywhere(case: str) -> None:
    made = attention("g (T[2,S,16] q, T[2,K,16] k, T[2,K,16] v, T[S,K] m) => (T[2,S,16] y) <T zero = {0}> "
                     f"{{ t = Transpose<perm = [0,2,1]>(k) s = MatMul(q, t) c = Add(s, m) p = Softmax(c) {MASKED[case]} }}", planned=PLANNED)
    inputs = random_inputs(made, {"S": 70, "K": 150})
    inputs["m"][:] = 0
    inputs["m"][3], inputs["m"][4, :140], inputs["m"][5, 10:] = -np.inf, -np.inf, -np.inf
    checked(made, inputs, length=150)
    other = told(made, ways(made)[0], PLANNED)
    (got,) = run_plan(other.kernel.plan, other.kernel.source, arguments(other, inputs), sm=90)
    assert np.isnan(got[:, 3]).all() if case == "no number" else not got[:, 3].any()


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_the_lowest_number_as_a_mask(kind: str) -> None:
    """A row that is masked so everywhere is uniform; products of such scores with the logarithm are finite."""
    made = attention("g (T[2,S,16] q, T[2,K,16] k, T[2,K,16] v, T[S,K] m) => (T[2,S,16] y) { t = Transpose<perm = [0,2,1]>(k) "
                     "s = MatMul(q, t) c = Add(s, m) p = Softmax(c) y = MatMul(p, v) }", kind, planned=PLANNED)
    inputs = random_inputs(made, {"S": 65, "K": 200})
    inputs["m"][:] = 0
    lowest = ml_dtypes.finfo(inputs["m"].dtype).min
    inputs["m"][1], inputs["m"][2, 3:], inputs["m"][3], inputs["m"][4, :150] = lowest, lowest, -np.inf, lowest
    inputs["q"][:, 1] = 0
    inputs["q"][1, 4] *= 3000
    checked(made, inputs, length=200)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 60000.0])
def test_numbers_at_the_edge(number: float) -> None:
    """Scores are not scaled before their maximum is found: it may be any number."""
    made = attention(PLAIN, planned=PLANNED)
    inputs = random_inputs(made, {"B": 1, "H": 1, "S": 65, "K": 140})
    inputs["q"][0, 0, 1, 3] = number
    checked(made, inputs, length=140)
    inputs = random_inputs(made, {"B": 1, "H": 1, "S": 33, "K": 140})
    inputs["q"] *= np.float16(0.1)  # so that all powers are numbers of 16 bits
    inputs["v"][0, 0, 130, 2] = number
    checked(made, inputs, length=140, slack=2)


@pytest.mark.parametrize(("operator", "factor"), [("Mul", -2), ("Mul", 0), ("Div", 1000), ("Mul", 3000), ("Div", -1)])
def test_factors(operator: str, factor: int) -> None:
    """Of scores: one below zero turns their order, and is not left to the powers."""
    made = attention(PLAIN.replace("Div(s, f)", f"{operator}(s, f)").replace("{2}", f"{{{factor}}}"), planned=PLANNED)
    inputs = random_inputs(made, {"B": 1, "H": 1, "S": 40, "K": 140})
    if factor == 3000:
        inputs["q"] *= np.float16(0.002)
    checked(made, inputs, length=140)


def test_a_factor_under_a_finite_mask() -> None:
    """Is not left to the powers either: masked scores, which are not multiplied, may count."""
    text = visible.model(visible.MASKS["later, the lowest"]).replace(
        "s = MatMul(q, t)", "w = MatMul(q, t) s = Div(w, third)").replace("T zero = {0}", "T zero = {0}, T third = {3}")
    sizes = {"B": 1, "S": 300, "K": 70}
    made = visible.attention(text, planned=sizes)
    checked(made, random_inputs(made, sizes), planned=sizes, length=70)


@pytest.mark.parametrize(("keys", "scores"), [(1e-30, 1e-30), (1e-38, 1e-38), (1e-19, 1e-19), (1e20, 1e-20), (-0.5, -2), (0.5, -2)])
def test_factors_of_keys_and_scores(keys: float, scores: float) -> None:
    """Together they may be no number of float32, or none that is not zero."""
    text = ("g (bfloat16[2,S,64] q, bfloat16[2,K,64] k, bfloat16[2,K,64] v) => (bfloat16[2,S,64] y) { t = Transpose<perm = [0,2,1]>(k) u = Mul(t, f) "
            "s = MatMul(q, u) c = Mul(s, g) p = Softmax(c) y = MatMul(p, v) }")
    model = parse(text)
    for name, factor in (("f", keys), ("g", scores)):
        model.graph.initializer.append(helper.make_tensor(name, TensorProto.BFLOAT16, (), [factor]))
    made = attempt(model, PLANNED)
    assert isinstance(made, Made) and ways(made)
    checked(made, random_inputs(made, {"S": 40, "K": 140}), ways(made)[:1], length=140)


@pytest.mark.parametrize("sizes", [{"S": 40, "K": 0}, {"B": 0, "S": 40, "K": 5}, {"S": 0, "K": 5}])
def test_nothing(sizes: Mapping[str, int]) -> None:
    """Of no keys there is no tensor map: others run."""
    made = attention(PLAIN, planned=PLANNED)
    for choice in ways(made):
        other = told(made, choice, PLANNED)
        check(other, random_inputs(other, {"B": 1, "H": 1} | dict(sizes)))


def test_tiles_that_divide_few_keys() -> None:
    """Evenly: of 197 keys two tiles have 112 each, not four 64."""
    sizes = {"B": 2, "H": 1, "S": 197, "K": 197}
    made = attention(PLAIN, planned=sizes)
    even = [choice for choice in made.kernel.choices if choice["keys"] == 112]
    assert [choice["warps"] for choice in even] == [8, 4]
    checked(made, random_inputs(made, sizes), even, sizes, length=197)


MASK = PLAIN.replace("T[B,H,K,64] v)", "T[B,H,K,64] v, T[S,K] m)").replace("p = Softmax(c)", "a = Add(c, m) p = Softmax(a)")


@pytest.mark.parametrize(("text", "head", "warps", "keys"), [
    (PLAIN, 40, 12, 128), (PLAIN, 64, 12, 128), (PLAIN, 80, 12, 96), (PLAIN, 128, 12, 64), (PLAIN, 256, 8, 64),
    (MASK, 64, 4, 64), (MASK, 128, 8, 128), (MASK, 256, 8, 64)])
def test_long_sequences_run_so_unmeasured(text: str, head: int, warps: int, keys: int) -> None:
    """Shorter ones as others were quickest: where a mask is read these are longer.  They are predicted to be quicker."""
    own, least = text.replace("64", str(head)), 2048 if text == MASK else 1024
    long = attention(own, planned={"B": 8, "H": 16, "S": least, "K": least}).kernel
    assert long.plan.variants[0].name.startswith(
        f"{warps} warps with 1 x 16 queries, 4 multiply together, tiles of {keys} keys, width 8, one copies, 2 tiles ahead")
    assert all((choice["keys"], choice["warps"]) != (keys, warps) or "stages" not in dict(choice.settings)
               for choice in long.choices)
    for rows, count in ((least - 1, least), (least, least - 8)):
        short = attention(own, planned={"B": 8, "H": 16, "S": rows, "K": count}).kernel
        assert "one copies" not in short.plan.variants[0].name
        assert long.pace is not None and short.pace is not None and long.pace.share > short.pace.share


@pytest.mark.parametrize(("heads", "warps", "keys"), [(8, 8, 128), (22, 12, 128), (33, 8, 128), (44, 12, 128)])
def test_a_last_turn_that_leaves_multiprocessors_idle(heads: int, warps: int, keys: int) -> None:
    """Smaller blocks that fill it take its place: six of three groups a head and eight of two, on 132 of them."""
    made = attention(PLAIN, planned={"B": 1, "H": heads, "S": 1024, "K": 1024}).kernel
    assert made.plan.variants[0].name.startswith(
        f"{warps} warps with 1 x 16 queries, 4 multiply together, tiles of {keys} keys, width 8, one copies")


@pytest.mark.parametrize("mask", ["", "causal", "keys times a number"])
def test_a_soft_cap_takes_one_factor_and_leaves_the_other_to_the_powers(mask: str) -> None:
    """The scale and the cap's quotient are one multiplication, and the cap is the exponent's."""
    keys, mask = mask == "keys times a number", mask.removeprefix("keys times a number")
    cap = "c0 = Div(s, f) d = Div(c0, cap) w = Tanh(d) s1 = Mul(w, cap) "
    if mask:
        text = visible.model(visible.MASKS[mask]).replace("s = MatMul(q, t) ", "s0 = MatMul(q, t) d = Div(s0, cap) w = Tanh(d) s = Mul(w, cap) ")
        made = visible.attention(text.replace("<", "<T cap = {32}, ", 1), planned={"B": 1, "S": 200, "K": 300})
        sizes = {"B": 1, "S": 70, "K": 150}
    else:
        text = PLAIN.replace("<T f", "<T cap = {32}, T f").replace("c = Div(s, f) p = Softmax(c)", f"{cap}p = Softmax(s1)")
        text = text.replace("t = Transpose<perm = [0,1,3,2]>(k) ", "k2 = Mul(k, f) t = Transpose<perm = [0,1,3,2]>(k2) ") if keys else text
        made, sizes = attention(text, planned=PLANNED), {"B": 1, "H": 2, "S": 70, "K": 150}
    for choice in ways(made):
        source = told(made, choice, PLANNED).kernel.source
        assert "of::tanh_approximate(mul" in source and "reciprocal" not in source.partition("tanh_approximate(mul")[2][:200]
        assert "by = 32.0f * Powers::log2_e" in source
    checked(made, random_inputs(made, sizes), planned=PLANNED if not mask else {"B": 1, "S": 200, "K": 300}, length=150)
