"""Schedules told what to be: the first variant is that, everything else stays, and the results are right.

Results are compared with the body in float64: the tolerances are those of kernel_harness.
"""

from __future__ import annotations

from collections.abc import Mapping

import kernel_harness
import pytest
from emulator import variants_that_hold
from kernel_harness import Made, arguments, check, compile_all, make, random_inputs

from onnxfuse.schedules import Choice, Kernel, parse_choice, words

SOFTMAX = "g (float[n, m] x, float[m] b) => (float[n, m] y) { a = Add(x, b) y = Softmax <axis = -1> (a) }"
NORM = """g (float16[n, 200] x, float16[200] s) => (float16[n, 200] y) {
  y = LayerNormalization <axis = -1> (x, s) }"""
CHAIN = "g (float16[n, m] x, float16[m] w) => (float16[n, m] y) { a = Mul(x, w) b = Tanh(a) y = Add(b, x) }"
INTEGERS = "g (int64[n, m] x, int64[m] w) => (int64[n, m] y) { a = Mul(x, w) b = Abs(a) y = Sub(b, x) }"
COLUMNS = """g (float16[n, 48, m] x, float[m] b) => (float16[n, 48, m] y) {
  a = Cast <to = 1> (x) c = Add(a, b) d = Softmax <axis = 1> (c) y = Cast <to = 10> (d) }"""
TRANSPOSED = """g (float16[n, 48, m] x, float16[48] s, float16[48] b) => (float16[n, m, 48] y) {
  t = Transpose <perm = [0, 2, 1]> (x) y = LayerNormalization <axis = -1> (t, s, b) }"""
TILED = """g (float16[n, 48, m] x, float16[48] b) => (float16[n, m, 48] y) {
  t = Transpose <perm = [0, 2, 1]> (x) y = Add(t, b) }"""
ROW_SPLIT = "g (float[k, l] x) => (float[k, l] y) { y = Softmax <axis = -1> (x) }"
COLUMN_SPLIT = """g (float[l, m] x) => (float[1, m] y, float[l, m] z) {
  axes = Constant <value_ints = [0]> () y = ReduceMean (x, axes) z = Sub(x, y) }"""
SIZES = {"n": 40, "m": 96, "k": 2, "l": 70_000}
CASES = {
    "rows": (SOFTMAX, {"n": 3, "m": 31}),
    "norm": (NORM, {"n": 3}),
    "pointwise": (CHAIN, {"n": 3, "m": 31}),
    "integers": (INTEGERS, {"n": 3, "m": 31}),
    "columns": (COLUMNS, {"n": 3, "m": 31}),
    "transposed": (TRANSPOSED, {"n": 3, "m": 31}),
    "tiled": (TILED, {"n": 3, "m": 31}),
    "split": (ROW_SPLIT, {"k": 1, "l": 69_001}),
    "split-columns": (COLUMN_SPLIT, {"m": 5, "l": 4097}),
}
"""By name: a region, and sizes that nobody planned for."""


def made_of(case: str) -> Made:
    return make(CASES[case][0], planned=SIZES, schedule="tiled" if case == "tiled" else None)


def told(made: Made, choice: Choice | None, sizes: Mapping[str, int] = SIZES) -> Kernel:
    return kernel_harness.told(made, choice, sizes).kernel


@pytest.mark.parametrize("case", CASES)
def test_choices_are_distinct_and_run_at_the_planned_sizes(case: str) -> None:
    made = made_of(case)
    own = made.kernel
    assert own.schedule == {"norm": "rows", "integers": "pointwise", "split-columns": "split"}.get(case, case)
    assert own.choice is None
    assert len(set(own.choices)) == len(own.choices) == len({words(choice) for choice in own.choices}) >= 5
    given = arguments(made, random_inputs(made, SIZES))
    for choice in own.choices:
        kernel = told(made, choice)
        assert kernel.choice == choice and kernel.choices == own.choices
        assert parse_choice(str(choice)) == choice
        variants = kernel.plan.variants
        assert variants[-1].guards == () and variants[0].guards != ()
        assert variants_that_hold(kernel.plan, given, [])[0] == variants[0].name
        # What was measured is another kernel than the schedule's own.
        assert (variants[0].steps, kernel.source) != (own.plan.variants[0].steps, own.source)
        for variant in variants:
            assert all(kernel.source.count(f"\n{step.kernel}(") == 1 for step in variant.steps)
        if choice.schedule != "split":
            # What follows is what the schedule offers by itself.
            assert [each for each in own.plan.variants if each != variants[0]] == list(variants[1:])


def test_a_region_that_is_split_can_be_told_not_to_be() -> None:
    for text, schedule in ((ROW_SPLIT, "rows"), (COLUMN_SPLIT, "columns")):
        made = make(text, planned=SIZES)
        (whole,) = (choice for choice in made.kernel.choices if choice.schedule == schedule)
        kernel = told(made, whole)
        assert whole["items"] == 0 and kernel.schedule == schedule
        assert len(kernel.plan.variants[0].steps) == 1 < len(kernel.plan.variants[1].steps)


def test_a_choice_that_the_region_does_not_admit_changes_nothing() -> None:
    made = make(CHAIN, planned=SIZES)
    kernel = told(made, Choice.of("pointwise", block=256, width=3, vectors=1))
    assert kernel.choice is None and kernel.source == made.kernel.source and kernel.plan == made.kernel.plan
    rows = make(NORM, planned=SIZES)
    assert told(rows, Choice.of("rows", threads=2048, width=8, items=1, block=2048)).source == rows.kernel.source
    for case in CASES:
        made = made_of(case)
        for other in CASES:
            given = made_of(other).kernel
            if made.kernel.schedule != given.schedule:
                assert told(made, given.choices[0]).plan == made.kernel.plan


def test_a_choice_made_for_another_length_keeps_what_the_row_needs() -> None:
    made = make(SOFTMAX, planned=SIZES)
    choice = Choice.of("rows", threads=16, width=4, items=2, block=64)
    assert choice in made.kernel.choices
    longer = told(made, choice, {"n": 40, "m": 160})
    assert longer.choice == Choice.of("rows", threads=16, width=4, items=3, block=64)


def test_choices_need_planned_sizes() -> None:
    """All of the region's, and no others."""
    for text, schedule in ((SOFTMAX, "rows"), (CHAIN, "pointwise"), (TILED, "tiled")):
        assert make(text, schedule=schedule).kernel.choices == ()
        whole, own = (make(text, planned=sizes, schedule=schedule).kernel.choices
                      for sizes in (SIZES, {"n": SIZES["n"], "m": SIZES["m"]}))
        assert whole == own != ()


WORDS = {
    "32 threads a row, width 8, 4 vectors, blocks of 128": Choice.of("rows", threads=32, width=8, items=4, block=128),
    "256 threads a row, width 8, streaming, blocks of 256": Choice.of("rows", threads=256, width=8, items=0, block=256),
    "blocks of 512, width 4, 2 vectors a thread": Choice.of("pointwise", block=512, width=4, vectors=2),
    "16 threads a column, 8 side by side, width 2, 1 element": Choice.of(
        "columns", deep=16, across=8, width=2, items=1),
    "16 threads a column, 8 side by side, width 2, streaming, chunks of 32, width 4 along them": Choice.of(
        "transposed", deep=16, across=8, width=2, items=0, chunk=32, wide=4),
    "blocks of 128, 8 a multiprocessor": Choice.of("split", threads=128, blocks=8),
    "tiles of 64 x 32, 1 a block, vectors of 4 x 2": Choice.of("tiled", batch=1, rows=64, columns=32, tall=4, width=2),
}


@pytest.mark.parametrize("text", WORDS)
def test_text_and_words(text: str) -> None:
    choice = WORDS[text]
    assert words(choice) == text
    assert parse_choice(str(choice)) == choice


@pytest.mark.parametrize("text", [
    "default", "{}", "[1]", '{"schedule":"rows"}', '{"schedule":"split","threads":128,"blocks":true}',
    '{"schedule":"rows","threads":"32","width":8,"items":4,"block":128}',
    '{"schedule":"split","threads":128,"blocks":8,"color":1}', '{"schedule":"spread","threads":128,"blocks":8}',
    '{"schedule":"pointwise","threads":256,"width":4,"items":1,"block":256}',
])
def test_text_of_no_choice(text: str) -> None:
    assert parse_choice(text) is None


@pytest.mark.parametrize("case", CASES)
def test_results_are_right(case: str) -> None:
    """Against float64; a choice of each kind, the planned sizes and others, aligned and not."""
    made, other = made_of(case), CASES[case][1]
    chosen: dict[tuple[object, ...], Choice] = {}
    for choice in made.kernel.choices:
        settings = dict(choice.settings)
        items = settings.get("items", 1)
        chosen.setdefault((choice.schedule, items > 1, items == 0, settings.get("width")), choice)
    kernels = [Made(made.model, made.graph, made.lowered, told(made, choice)) for choice in list(chosen.values())[:4]]
    compile_all(kernels)
    for kernel in kernels:
        small = {**SIZES, "n": 3, "l": 66_000}
        for sizes in (small, other):
            check(kernel, random_inputs(kernel, sizes), length=200, limit=1)
