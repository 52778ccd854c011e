"""Keys that a mask of places hides from all queries of a block: every variant against float64, and that they are left
out."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from emulator import run_plan, variants_that_hold
from kernel_harness import Made, arguments, check, make, random_inputs

from onnxfuse.ir.tensors import Contract, postorder
from onnxfuse.schedules.attentions.parts import AttentionParts, parts_of

PLACES = ("qs = Shape<start = -2, end = -1>(q) ks = Shape<start = -2, end = -1>(k) S = Squeeze(qs) K = Squeeze(ks) past = Sub(K, S) "
          "cols = Range(nought, K, once) row = Range(nought, S, once) rows = Unsqueeze(row, axis) own = Add(rows, past) ")
CONSTANTS = "int64 nought = {0}, int64 once = {1}, int64[1] axis = {1}, int64 near = {-40}, int64 far = {40}, T zero = {0}, T one = {1}, T low = {-10000}, T least = {-60000}"
CAUSAL = "see = LessOrEqual(cols, own) "
SLIDING = "edge = Add(own, near) young = Greater(cols, edge) "
NONE = "none = Constant<value_float = -inf>() deep = CastLike(none, q) "
WHERE, ADDED = "c = Where(see, s, deep) ", "z = Where(see, zero, deep) c = Add(s, z) "

MASKS = {
    "causal": PLACES + CAUSAL + NONE + WHERE,
    "causal, added": PLACES + CAUSAL + NONE + ADDED,
    "not later": PLACES + "later = Greater(cols, own) see = Not(later) " + NONE + WHERE,
    "later, the lowest": PLACES + "later = Less(own, cols) c = Where(later, least, s) ",
    "a sliding window": PLACES + CAUSAL.replace("see", "old") + SLIDING + "see = And(old, young) " + NONE + WHERE,
    "two masks": PLACES + CAUSAL.replace("see", "old") + SLIDING + NONE + "see = And(old, young) d = Where(old, s, deep) z = Where(young, zero, least) c = Add(d, z) ",
    "near places": PLACES + "d = Sub(cols, own) before = Less(d, far) after = GreaterOrEqual(d, near) see = And(before, after) " + NONE + WHERE,
    "the other way": PLACES + "sum = Add(cols, rows) see = Less(sum, K) " + NONE + WHERE,
    "a number times what is hidden": PLACES + CAUSAL + "f = CastLike(see, q) g = Sub(one, f) h = Mul(g, low) c = Add(s, h) ",
    "a triangle": PLACES + NONE + "size = Concat<axis = 0>(qs, ks) full = Expand(deep, size) up = Add(past, once) z = Trilu<upper = 1>(full, up) c = Add(s, z) ",
    "in float32": PLACES + CAUSAL + "w = Cast<to = 1>(s) none = Constant<value_float = -3.4028234663852886e38>() z = Constant<value_float = 0.0>() u = Where(see, z, none) x = Add(w, u) c = CastLike(x, q) ",
}
"""From the scores s to those that the softmax is of."""

OPEN = {
    "a mask that is read": "c = Where(pad, s, least) ",
    "either of two tests": PLACES + CAUSAL + "any = Or(see, pad) " + NONE + "c = Where(any, s, deep) ",
    "places that are equal": PLACES + "see = Equal(cols, own) " + NONE + WHERE,
    "a small number": PLACES + CAUSAL + "c = Where(see, s, one) ",
    "twice the place": PLACES + "double = Add(cols, cols) see = LessOrEqual(double, own) " + NONE + WHERE,
    "twice the place, up to a number": PLACES + "double = Add(cols, cols) see = LessOrEqual(double, far) " + NONE + WHERE,
    "places of queries alone": PLACES + "see = Greater(rows, far) " + NONE + WHERE,
}
"""Masks that hide no keys from whole blocks, as far as one can tell."""

LENGTHS = ((1, 1), (17, 17), (49, 49), (197, 197), (300, 300), (40, 197), (1, 300), (130, 49))
"""Of queries and keys; of more queries than keys the first see none where later ones see all."""

THOROUGH = ("causal", "a sliding window", "later, the lowest")
"""Masks for all of them."""


def model(mask: str, heads: int = 1, groups: int = 1, end: str = "y = MatMul(p, v)") -> str:
    """An attention of ``heads`` heads in each of the ``groups`` that share keys."""
    pad = ", bool[B,1,1,K] pad" if "pad" in mask else ""
    return (f"g (T[B,{groups},{heads},S,16] q, T[B,{groups},1,K,16] k, T[B,{groups},1,K,16] v{pad.replace('1,1,K', '1,1,1,K')}) => (T[B,{groups},{heads},S,16] y) "
            f"<{CONSTANTS}> {{ t = Transpose<perm = [0,1,2,4,3]>(k) s = MatMul(q, t) {mask}p = Softmax(c) {end} }}")


def attention(text: str, kind: str = "float16", planned: Mapping[str, int] | None = None) -> Made:
    made = make(text.replace("T[", f"{kind}[").replace("T ", f"{kind} "), planned=planned)
    assert made.kernel.schedule == "attention"
    return made


def parts(made: Made) -> AttentionParts:
    first, second = (each for each in postorder(made.lowered.program.outputs) if isinstance(each, Contract))
    found = parts_of(made.lowered, first, second)
    assert isinstance(found, AttentionParts)
    return found


@pytest.mark.parametrize("mask", MASKS)
def test_masks_of_places(mask: str) -> None:
    """Rows of which all or nothing is hidden too."""
    made = attention(model(MASKS[mask]), planned={"B": 1, "S": 300, "K": 300})
    assert parts(made).visible is not None
    for seed, (rows, keys) in enumerate(LENGTHS if mask in THOROUGH else ((130, 49), (150, 150))):
        check(made, random_inputs(made, {"B": 1, "S": rows, "K": keys}, seed), length=keys, misalign=False, limit=2,
              source=made.kernel.source)  # one text for all sizes


@pytest.mark.parametrize("mask", OPEN)
def test_masks_that_hide_nothing_for_certain(mask: str) -> None:
    assert parts(attention(model(OPEN[mask]))).visible is None


@pytest.mark.parametrize("mask", ["causal", "a sliding window", "later, the lowest"])
def test_heads_that_share_keys(mask: str) -> None:
    """The rows of a block are several heads' queries: it may begin in one and end in the next."""
    made = attention(model(MASKS[mask], heads=3, groups=2))
    assert str(parts(made).rows.substitute(made.lowered.binding.names)) == "3*S"
    for seed, (rows, keys) in enumerate(((7, 7), (49, 60), (70, 150), (120, 70))):
        check(made, random_inputs(made, {"B": 1, "S": rows, "K": keys}, seed), length=keys, misalign=False, limit=2,
              source=made.kernel.source)  # one text for all sizes


def results(made: Made, inputs: Mapping[str, np.ndarray], split: bool = True) -> list[np.ndarray]:
    """Of each variant that holds, those that split keys among them or not."""
    given = arguments(made, inputs)
    return [run_plan(made.kernel.plan, made.kernel.source, given, variant=variant)[0]
            for variant in variants_that_hold(made.kernel.plan, given, []) if split or "keys split" not in variant]


@pytest.mark.parametrize(("mask", "first", "last"), [("causal", 0, 128), ("causal, added", 0, 128), ("a triangle", 0, 128), ("a sliding window", 0, 128), ("later, the lowest", 0, 128), ("the other way", 172, 300)])
def test_hidden_tiles_are_not_read(mask: str, first: int, last: int) -> None:
    """A value that is no number shows only where a block has a query that sees it, or a neighbour in its tile."""
    made = attention(model(MASKS[mask]), planned={"B": 1, "S": 300, "K": 300})
    inputs = random_inputs(made, {"B": 1, "S": 300, "K": 300})
    inputs["v"][0, 0, 0, 299] = np.nan
    for got in results(made, inputs, split=mask != "later, the lowest"):  # which takes the maximum of all chunks
        assert np.isfinite(got[0, 0, 0, first:last]).all()
        assert np.isnan(got[0, 0, 0, 299 if last < 300 else 0]).all()


def test_keys_before_a_window_are_not_read() -> None:
    made = attention(model(MASKS["a sliding window"]), planned={"B": 1, "S": 300, "K": 300})
    inputs = random_inputs(made, {"B": 1, "S": 300, "K": 300})
    inputs["k"][0, 0, 0, :64] = np.nan
    for got in results(made, inputs):
        assert np.isfinite(got[0, 0, 0, 256:]).all() and np.isnan(got[0, 0, 0, :64]).all()


def test_a_chunk_of_which_nothing_is_seen() -> None:
    """Few queries of many keys: whole chunks lie before the window, and are not read."""
    made = attention(model(MASKS["a sliding window"]), planned={"B": 1, "S": 3, "K": 700})
    inputs = random_inputs(made, {"B": 1, "S": 3, "K": 700})
    (first, *_) = variants_that_hold(made.kernel.plan, arguments(made, inputs), [])
    assert "keys split" in first
    check(made, inputs, length=700, misalign=False)
    inputs["v"][0, 0, 0, :512] = np.nan
    assert all(np.isfinite(got).all() for got in results(made, inputs))


@pytest.mark.parametrize(("mask", "kind", "end"), [
    ("minus infinity", "float16", "y = MatMul(p, v)"), ("minus infinity", "bfloat16", "i = IsNaN(p) g = Where(i, zero, p) y = MatMul(g, v)"),
    ("the lowest number", "bfloat16", "y = MatMul(p, v)")])
def test_places_and_a_mask_that_is_read(mask: str, kind: str, end: str) -> None:
    """Rows that only both together mask everywhere give what the nodes give."""
    deep = NONE if mask == "minus infinity" else "least = Constant<value_float = -60000.0>() deep = CastLike(least, q) "
    text = PLACES + CAUSAL.replace("see", "old") + "see = And(old, pad) " + deep + WHERE
    made = attention(model(text, end=end).replace(", T least = {-60000}", ""), kind, planned={"B": 1, "S": 150, "K": 150})
    assert parts(made).visible is not None
    inputs = random_inputs(made, {"B": 1, "S": 150, "K": 150})
    inputs["pad"][:] = True
    inputs["pad"][..., :70] = False
    check(made, inputs, length=150, misalign=False, limit=3)


def test_scores_that_are_low_themselves() -> None:
    """Where all that a row sees is about as low as what a mask makes of the others, these count."""
    made = attention(model(MASKS["later, the lowest"]), planned={"B": 1, "S": 150, "K": 150})
    inputs = random_inputs(made, {"B": 1, "S": 150, "K": 150})
    inputs["q"][:], inputs["k"][:] = 0, 0
    inputs["q"][0, 0, 0, 20, 0], inputs["k"][..., 0] = -240, 250
    check(made, inputs, length=150, misalign=False, limit=3)
