"""Masks and biases of scores that are copied, by tensor maps or by warps: shapes, groups, types, lengths, in the emulator.
"""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import test_schedules_attention_visible as visible
from emulator import variants_that_hold
from kernel_harness import Made, arguments, check, random_inputs, told
from test_schedules_attention import attention
from test_schedules_attention_specialised import checked, ways

from onnxfuse.schedules.choice import Choice

PLANNED = {"B": 2, "H": 2, "S": 192, "K": 304}

MASKED = ("g (T[B,H,S,64] q, T[B,H,K,64] k, T[B,H,K,64] v, {mask} m) => (T[B,H,S,64] y) <T f = {{2}}> "
          "{{ t = Transpose<perm = [0,1,3,2]>(k) s = MatMul(q, t) c = Div(s, f) a = Add(c, m) p = Softmax(a) y = MatMul(p, v) }}")

GROUPED = ("g (T[B,4,S,32] q, T[B,2,K,32] k, T[B,2,K,32] v, {mask} m) => (T[B,4,S,32] y) "
           "<int64[5] e = {{1,2,2,1,1}}, int64[3] o = {{0,4,32}}, int64[1] two = {{2}}, int64[4] h = {{0,4,-1,32}}> "
           "{{ k1 = Unsqueeze(k, two) k2 = Expand(k1, e) k3 = Reshape(k2, h) v1 = Unsqueeze(v, two) v2 = Expand(v1, e) v3 = Reshape(v2, h) "
           "t = Transpose<perm = [0,1,3,2]>(k3) s = MatMul(q, t) a = Add(s, m) p = Softmax(a) y = MatMul(p, v3) }}")


def maps(made: Made, planned: Mapping[str, int] = PLANNED) -> set[int]:
    """How many tensors the ways with a warp that copies have maps of."""
    return {len({tensor.base for tensor in told(made, choice, planned).kernel.plan.maps}) for choice in ways(made)}


def together(made: Made) -> list[Choice]:
    """Ways without a warp that copies, whose warps multiply together: they copy for themselves."""
    return [choice for choice in made.kernel.choices if choice["group"] == 4 and "stages" not in dict(choice.settings)]


def by_warps(made: Made, inputs: Mapping[str, np.ndarray], planned: Mapping[str, int], **how: Any) -> None:
    """Each of them copies the mask, and gives what float64 does."""
    assert together(made)
    for choice in together(made):
        other = told(made, choice, planned)
        first = variants_that_hold(other.kernel.plan, arguments(other, inputs), [], 90)[0]
        assert "mask copied" in first and "one copies" not in first
        check(other, inputs, limit=1, misalign=False, **how)


def both(text: str, sizes: Mapping[str, int], kind: str = "float16", planned: Mapping[str, int] = PLANNED, **how: Any) -> Made:
    """A mask that is copied, with rows that see nothing and hidden keys, in every way."""
    made = attention(text, kind, planned=planned)
    assert maps(made, planned) == {3}
    inputs = random_inputs(made, sizes)
    inputs["m"][..., 1, :] = -np.inf
    inputs["m"][..., 2:, :5] = -np.inf
    checked(made, inputs, planned=planned, length=sizes["K"], **how)
    by_warps(made, inputs, planned, length=sizes["K"], **how)
    return made


@pytest.mark.parametrize("mask", ["T[S,K]", "T[B,1,S,K]", "T[1,H,S,K]", "T[B,H,S,K]"])
@pytest.mark.parametrize(("kind", "rows", "keys"), [
    ("float16", 192, 304), ("bfloat16", 65, 40), ("float16", 33, 8), ("bfloat16", 300, 136)])
def test_shapes_and_lengths(mask: str, kind: str, rows: int, keys: int) -> None:
    """Whatever of it is broadcast; tiles of which a part is there, in both directions."""
    both(MASKED.format(mask=mask), {"B": 2, "H": 2, "S": rows, "K": keys}, kind)


@pytest.mark.parametrize("mask", ["T[1,1,S,K]", "T[B,1,S,K]", "T[1,4,S,K]", "T[B,4,S,K]"])
def test_heads_that_share_keys(mask: str) -> None:
    """Their queries are rows of one tile: the mask begins anew between tiles, or goes on with another head."""
    made = both(GROUPED.format(mask=mask), {"B": 2, "S": 128, "K": 72})
    # Inside of a tile it must not begin anew: such lengths run otherwise.
    inputs = random_inputs(made, {"B": 1, "S": 70, "K": 72})
    other = told(made, ways(made)[0], PLANNED)
    first = variants_that_hold(other.kernel.plan, arguments(other, inputs), [], 90)[0]
    assert ("one copies" in first) is (",4,S" in mask)
    check(other, inputs, misalign=False, length=72)


@pytest.mark.parametrize("mask", ["T[B,1,S,K]", "T[1,4,S,K]"])
@pytest.mark.parametrize(("rows", "keys"), [(70, 72), (130, 130), (128, 136)])
def test_long_attentions_at_other_sizes(mask: str, rows: int, keys: int) -> None:
    """One warp copies keys there too where no map copies the mask, which threads read then."""
    planned = {"B": 2, "S": 2048, "K": 2048}
    made = attention(GROUPED.format(mask=mask), planned=planned)
    first, second = (variant.name for variant in made.kernel.plan.variants[:2])
    assert "one copies" in first and first.replace(", mask copied", "") == second != first
    inputs = random_inputs(made, {"B": 2, "S": rows, "K": keys})
    runs = variants_that_hold(made.kernel.plan, arguments(made, inputs), [], 90)[0]
    is_copied = keys % 8 == 0 and (rows % 64 == 0 or mask == "T[1,4,S,K]")
    assert runs == (first if is_copied else second)
    check(made, inputs, misalign=False, length=keys)


def test_a_mask_of_more_axes_than_maps_have() -> None:
    """Is read by threads."""
    text = ("g (T[A,C,E,4,S,64] q, T[A,C,E,4,K,64] k, T[A,C,E,4,K,64] v, T[4,E,C,A,S,K] m) => (T[A,C,E,4,S,64] y) { "
            "t = Transpose<perm = [0,1,2,3,5,4]>(k) s = MatMul(q, t) n = Transpose<perm = [3,2,1,0,4,5]>(m) a = Add(s, n) "
            "p = Softmax(a) y = MatMul(p, v) }")
    planned = {"A": 2, "C": 2, "E": 2, "S": 2048, "K": 2048}
    made = attention(text, planned=planned)
    assert ways(made) and 3 not in maps(made, planned)
    checked(made, random_inputs(made, {"A": 2, "C": 2, "E": 2, "S": 40, "K": 72}), ways(made)[:1], planned, length=72)


def test_heads_of_256_columns() -> None:
    """A block of four warps copies four of their rows at once, which lie otherwise in each half of eight."""
    made = attention(MASKED.format(mask="T[S,K]").replace("64", "256"), planned=PLANNED)
    assert {choice["warps"] for choice in together(made)} == {4}
    by_warps(made, random_inputs(made, {"B": 1, "H": 1, "S": 70, "K": 136}), PLANNED, length=136)


def test_heads_behind_queries() -> None:
    """Of a mask that lies so: queries of a tile are of one head, whose place is another axis of the map."""
    text = GROUPED.format(mask="T[B,S,4,K]").replace("a = Add(s, m)", "h4 = Transpose<perm = [0,2,1,3]>(m) a = Add(s, h4)")
    both(text, {"B": 2, "S": 128, "K": 72})


@pytest.mark.parametrize("order", ["backward", 3, 11])
def test_threads_in_any_order(order: str | int) -> None:
    """Nobody reads a mask that is not there, or has it filled that is still read."""
    both(MASKED.format(mask="T[S,K]"), {"B": 1, "H": 1, "S": 130, "K": 504}, orders=[order])


def test_every_tile() -> None:
    """Of all that may be tried, those that are no whole panels too."""
    made = attention(MASKED.format(mask="T[1,H,S,K]"), planned=PLANNED)
    every = [choice for choice in made.kernel.choices if "stages" in dict(choice.settings)]
    assert {choice["keys"] % 64 for choice in every} > {0}
    checked(made, random_inputs(made, {"B": 1, "H": 2, "S": 70, "K": 400}), every, planned=PLANNED, length=400)


@pytest.mark.parametrize(("keys", "address"), [(300, 0), (304, 2)])
def test_rows_that_no_map_copies(keys: int, address: int) -> None:
    """Of a length, or from an address, that is no multiple of 16 bytes: the guards know."""
    made = attention(MASKED.format(mask="T[S,K]"), planned=PLANNED)
    inputs = random_inputs(made, {"B": 1, "H": 1, "S": 70, "K": keys})
    if address:
        whole = np.empty(inputs["m"].size + 1, inputs["m"].dtype)
        whole[1:] = inputs["m"].ravel()
        inputs["m"] = whole[1:].reshape(inputs["m"].shape)
    for choice in (ways(made)[0], together(made)[0]):
        other = told(made, choice, PLANNED)
        check(other, inputs, length=keys)
        assert address or "mask copied" not in variants_that_hold(other.kernel.plan, arguments(other, inputs), [], 90)[0]


@pytest.mark.parametrize("mask", ["bool[S,K]", "T[K]", "T[B,1,1,K]", "float[S,K]"])
def test_what_threads_read_themselves(mask: str) -> None:
    """Another type, or one that is the same for all queries."""
    text = MASKED.format(mask=mask)
    if mask.startswith("bool"):
        text = text.replace("<T f = {2}>", "<T f = {2}, T low = {-1000}>").replace("Add(c, m)", "Where(m, c, low)")
    if mask.startswith("float"):
        text = text.replace("a = Add(c, m)", "w = Cast<to = 1>(c) a = Add(w, m)").replace("p = Softmax(a)", "b = Softmax(a) p = CastLike(b, q)")
    made = attention(text, planned=PLANNED)
    assert maps(made) == {2}
    checked(made, random_inputs(made, {"B": 1, "H": 2, "S": 70, "K": 136}), planned=PLANNED, length=136)


KEYS_ALONE = {
    "by sequence": ("T[B,1,1,K] m", "a = Add(c, m)"),
    "for all": ("T[K] m", "a = Add(c, m)"),
    "keys by sequences": ("T[K,B] m", "mb = Transpose(m) mk = Unsqueeze(mb, both) a = Add(c, mk)"),
    "two": ("T[B,1,1,K] n, T[B,1,1,K] m", "b = Add(c, n) a = Add(b, m)"),
}


@pytest.mark.parametrize("case", KEYS_ALONE)
def test_masks_of_keys_are_those_of_the_tile_at_hand(case: str) -> None:
    """Which is read while the tile before is made powers of; one whose keys do not lie side by side, and the second of
    two, are read where scores are made."""
    mask, added = KEYS_ALONE[case]
    text = MASKED.format(mask=mask.removesuffix(" m")).replace("a = Add(c, m)", added).replace("<T f", "<int64[2] both = {1,2}, T f")
    made = attention(text, planned=PLANNED)
    assert together(made) and maps(made) == {2}
    inputs = random_inputs(made, {"B": 2, "H": 1, "S": 70, "K": 200})
    for choice in (*together(made), *ways(made)):
        other = told(made, choice, PLANNED)
        first = variants_that_hold(other.kernel.plan, arguments(other, inputs), [], 90)[0]
        assert "4 multiply together" in first
        check(other, inputs, limit=1, misalign=False, length=200)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_masks_of_keys_that_are_added_to_sums(kind: str) -> None:
    """Divided by the scores' factor, where a tile has some: the lowest number stays one, and so do the infinite and what is
    none."""
    text = MASKED.format(mask="T[B,1,1,K]").replace("{2}", "{8}")
    if kind == "bfloat16":  # the keys are scaled too, by as much
        text = text.replace("(k) s", "(k1) s").replace("{ t =", "{ k1 = Div(k, f) t =")
    made = attention(text, kind, planned=PLANNED)
    inputs = random_inputs(made, {"B": 6, "H": 1, "S": 70, "K": 200})
    lowest = ml_dtypes.finfo(inputs["m"].dtype).min
    inputs["m"][0] = lowest
    inputs["m"][1, ..., 3:150] = lowest
    inputs["m"][2] = -np.inf
    inputs["m"][3, ..., :9], inputs["m"][3, ..., 60] = -np.inf, np.nan
    inputs["m"][4] = 0
    inputs["m"][5, ..., :199], inputs["m"][5, ..., 70] = 0, -3
    for choice in together(made):
        other = told(made, choice, PLANNED)
        assert "__syncthreads_or(some)" in other.kernel.source and "of::added_before<" in other.kernel.source
        check(other, inputs, limit=1, misalign=False, length=200)


def test_the_lowest_number_of_bfloat16() -> None:
    """As a mask of whole rows leaves these uniform; a multiple of it would be infinite."""
    made = attention(MASKED.format(mask="T[B,1,S,K]").replace("{2}", "{8}"), "bfloat16", planned=PLANNED)
    inputs = random_inputs(made, {"B": 1, "H": 1, "S": 70, "K": 136})
    inputs["m"][..., 3:9, :] = ml_dtypes.finfo(inputs["m"].dtype).min
    by_warps(made, inputs, PLANNED, length=136)
    checked(made, inputs, planned=PLANNED, length=136)


@pytest.mark.parametrize("factor", [1, 8])
def test_tiles_that_have_nothing_of_a_mask(factor: int) -> None:
    """Zeros of either sign, in whole tiles, in some rows of one or at the ends of some: in float16 these are looked for."""
    made = attention(MASKED.format(mask="T[B,1,S,K]").replace("{2}", f"{{{factor}}}"), planned=PLANNED)
    inputs = random_inputs(made, {"B": 6, "H": 1, "S": 130, "K": 304})
    inputs["m"][0] = 0
    inputs["m"][5], inputs["m"][5, ..., 17] = 0, 3
    inputs["m"][1] = -0.0
    inputs["m"][2, ..., :300] = 0
    inputs["m"][3] = np.where(np.arange(304) > 100, -np.inf, -0.0)
    inputs["m"][4, ..., :90, 10:] = 0
    for choice in (*together(made), *ways(made)):
        other = told(made, choice, PLANNED)
        assert "is_masked = __any_sync" in other.kernel.source
        check(other, inputs, limit=1, misalign=False, length=304)


@pytest.mark.parametrize("mask", ["T[B,1,S,K]", "T[B,1,1,K]"])
def test_tiles_without_a_mask_under_a_softmax_of_float32(mask: str) -> None:
    """Casts to wider floats hide neither a mask nor the sums."""
    text = MASKED.format(mask=mask).replace("T f = {2}", "float f = {8}").replace("c = Div(s, f) a = Add(c, m) p = Softmax(a)", (
        "d = Cast<to = 1>(s) c = Div(d, f) n = Cast<to = 1>(m) a = Add(c, n) l = Softmax(a) p = Cast<to = 10>(l)"))
    made = attention(text, planned=PLANNED)
    inputs = random_inputs(made, {"B": 2, "H": 1, "S": 70, "K": 200})
    inputs["m"][0, ..., :100], inputs["m"][1] = 0, 0
    for choice in together(made):
        other = told(made, choice, PLANNED)
        assert "if (is_masked) {" in other.kernel.source
        check(other, inputs, limit=1, misalign=False, length=200)


def test_a_mask_that_is_made_narrower_is_rounded() -> None:
    """So that what float16 has no room for is infinite: tiles that have some of it are scored as their nodes say."""
    text = MASKED.format(mask="float[B,1,1,K]").replace("a = Add(c, m)", "n = Cast<to = 10>(m) a = Add(c, n)")
    made = attention(text, planned=PLANNED)
    inputs = random_inputs(made, {"B": 2, "H": 1, "S": 70, "K": 136})
    inputs["m"][0, ..., 9:60] = -1e5
    inputs["m"][1] = -1e5
    for choice in together(made):
        check(told(made, choice, PLANNED), inputs, limit=1, misalign=False, length=136)


def test_one_of_two_is_copied() -> None:
    text = MASKED.format(mask="T[S,K] r, T[B,1,S,K]").replace("a = Add(c, m)", "b = Add(c, r) a = Add(b, m)")
    both(text, {"B": 2, "H": 1, "S": 70, "K": 136})


def test_what_is_read_twice_is_copied_once() -> None:
    text = MASKED.format(mask="T[S,K]").replace("a = Add(c, m)", "n = Sigmoid(m) b = Mul(c, n) a = Add(b, m)")
    both(text, {"B": 1, "H": 1, "S": 70, "K": 136})


@pytest.mark.parametrize("mask", ["causal", "later, the lowest", "a sliding window"])
def test_a_bias_beside_keys_that_are_hidden(mask: str) -> None:
    """Tiles that a block does not see are not copied; those of a row that sees nothing are, the second time."""
    text = visible.model(visible.MASKS[mask]).replace("T[B,1,1,K,16] v", "T[B,1,1,K,16] v, T[S,K] m")
    text = text.replace("s = MatMul(q, t)", "s0 = MatMul(q, t) s = Add(s0, m)")
    made = visible.attention(text, planned={"B": 1, "S": 192, "K": 304})
    assert maps(made, {"B": 1, "S": 192, "K": 304}) == {3} and made.kernel.hides
    for rows, keys in ((192, 200), (70, 304), (300, 72)):
        inputs = random_inputs(made, {"B": 2, "S": rows, "K": keys})
        checked(made, inputs, planned={"B": 1, "S": 192, "K": 304}, length=keys)
