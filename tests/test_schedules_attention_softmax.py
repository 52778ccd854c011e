"""Running maxima of an attention, which are left as they are until a score is far above them: every kernel, in the
emulator against float64."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from kernel_harness import Made, check, short, short_inputs, told
from test_schedules_attention import PLAIN, SPELLINGS, attention
from test_schedules_attention_tf32 import SLACK, float_attention

from onnxfuse.schedules import Choice

KEYS = 600
PLANNED = {"B": 1, "H": 1, "S": 70, "K": KEYS}

PATTERNS = {
    "a little at each key": np.arange(KEYS) / 25.0,
    "far above, at once": np.where(np.arange(KEYS) < 333, 0.0, 40.0),
    "less and less": np.arange(KEYS) / -25.0,
    "back and forth": 12.0 * np.sin(np.arange(KEYS) / 70.0),
    "from far below zero": np.arange(KEYS) / 25.0 - 6000.0,
    "to where differences come first": np.arange(KEYS) * 20.0,
    "all the same, far from zero": np.full(KEYS, 60000.0),
    "one far above": np.where(np.arange(KEYS) == 500, 15.0, 0.0),
}


def ways(made: Made) -> list[Choice]:
    """One of each kind: warps that multiply alone, together, and with one that copies; with few keys, so that there are
    several tiles."""
    found: dict[object, Choice] = {}
    for choice in made.kernel.choices:
        kind = (choice["group"], "stages" in dict(choice.settings))
        known = found.setdefault(kind, choice)
        found[kind] = min(known, choice, key=lambda each: each["keys"])
    return list(found.values())


def growing(made: Made, pattern: str, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Scores of the first column of the head, which differ from row to row: of some they fall where others grow.  What
    the first tile of keys weighs shows in the first column of the values."""
    inputs = short_inputs(made, sizes)
    kind = inputs["q"].dtype
    signs = np.where(np.arange(sizes["S"]) % 5 == 3, -1.0, 1.0) * (8.0 - np.arange(sizes["S"]) % 7)
    for name, column in (("q", signs), ("k", short(PATTERNS[pattern].astype(np.float32)))):
        inputs[name] = np.zeros(inputs[name].shape, kind)
        inputs[name][..., 0] = column.astype(kind)
    inputs["v"][..., 0] = 8.0 * (np.arange(sizes["K"]) < 32)
    return inputs


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_maxima_that_grow(pattern: str, kind: str) -> None:
    made = attention(PLAIN, kind, planned=PLANNED)
    chosen = ways(made)
    assert len(chosen) == 3
    for choice in chosen:
        check(told(made, choice, PLANNED), growing(made, pattern, PLANNED), limit=1, misalign=False, length=KEYS)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_chunks_of_keys(pattern: str) -> None:
    """Each has maxima of its own."""
    sizes = {**PLANNED, "S": 2}
    made = attention(PLAIN, planned=sizes)
    assert "split" in made.kernel.plan.variants[0].name
    check(made, growing(made, pattern, sizes), limit=1, misalign=False, length=KEYS)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_float32(pattern: str) -> None:
    made = float_attention(PLAIN)
    check(made, growing(made, pattern, PLANNED), limit=1, misalign=False, length=KEYS, slack=SLACK)


def test_scores_are_not_rounded_where_their_softmax_is_of_float32() -> None:
    """They would be to float16, one by one."""
    made = attention(SPELLINGS["a softmax in float32"])
    assert "round_to" not in made.kernel.source


def test_scores_are_rounded_before_what_jumps() -> None:
    text = SPELLINGS["a softmax in float32"].replace("e = Mul(f, part)", "h = Floor(f) e = Mul(h, part)")
    assert "round_to" in attention(text).kernel.source
