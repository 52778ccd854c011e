"""Schedules told what to be: the first variant is that, everything else stays, and the results are right.

Results are compared with the body in float64: the tolerances are those of kernel_harness.
"""

from __future__ import annotations

import pytest
from emulator import variants_that_hold
from kernel_harness import Made, arguments, check, compile_all, make, random_inputs

from onnxfuse.lowering.ir import Reduce, postorder
from onnxfuse.schedules import Choice, Kernel, make_kernel, parse_choice

SOFTMAX = "g (float[n, m] x, float[m] b) => (float[n, m] y) { a = Add(x, b) y = Softmax <axis = -1> (a) }"
NORM = """g (float16[n, 200] x, float16[200] s) => (float16[n, 200] y) {
  y = LayerNormalization <axis = -1> (x, s) }"""
CHAIN = "g (float16[n, m] x, float16[m] w) => (float16[n, m] y) { a = Mul(x, w) b = Tanh(a) y = Add(b, x) }"
SIZES = {"n": 40, "m": 96}


def told(made: Made, choice: Choice | None, sizes: dict[str, int] = SIZES) -> Kernel:
    reduces = any(isinstance(tensor, Reduce) for tensor in postorder(made.lowered.program.outputs))
    kernel = make_kernel(made.lowered, "test", "rows" if reduces else "pointwise", sizes, choice)
    assert isinstance(kernel, Kernel)
    return kernel


@pytest.mark.parametrize("text", [SOFTMAX, NORM, CHAIN])
def test_choices_are_distinct_and_become_the_first_variant(text: str) -> None:
    made = make(text, planned=SIZES)
    own = told(made, None)
    assert own.choice is None and own.choices == made.kernel.choices
    assert len(set(own.choices)) == len(own.choices) >= 5
    for choice in own.choices:
        kernel = told(made, choice)
        assert kernel.choice == choice and kernel.choices == own.choices
        first, rest = kernel.plan.variants[0], kernel.plan.variants[1:]
        (step,) = first.steps
        assert step.block[0] == str(choice.block)
        # What follows is what the schedule offers by itself, down to the variant without a guard.
        assert [each for each in own.plan.variants if each != first] == list(rest)
        assert rest[-1].guards == () and first.guards != ()
        assert kernel.source.count(f"\n{step.kernel}(") == 1


def test_a_choice_that_the_region_does_not_admit_changes_nothing() -> None:
    made = make(CHAIN, planned=SIZES)
    kernel = told(made, Choice("pointwise", 256, 3, 1, 256))
    assert kernel.choice is None and kernel.source == made.kernel.source and kernel.plan == made.kernel.plan
    rows = make(NORM, planned=SIZES)
    assert told(rows, Choice("rows", 2048, 8, 1, 2048)).source == rows.kernel.source


def test_a_choice_made_for_another_length_keeps_what_the_row_needs() -> None:
    made = make(SOFTMAX, planned=SIZES)
    choice = next(each for each in made.kernel.choices if (each.threads, each.width, each.block) == (16, 4, 64))
    assert choice.items == 2
    longer = told(made, choice, {"n": 40, "m": 160})
    assert longer.choice == Choice("rows", 16, 4, 3, 64)


def test_choices_need_planned_sizes() -> None:
    assert make(SOFTMAX).kernel.choices == ()
    assert make(CHAIN).kernel.choices == ()


def test_text_and_words() -> None:
    choice = Choice("rows", 32, 8, 4, 128)
    assert parse_choice(str(choice)) == choice
    assert choice.words == "32 threads a row, width 8, 4 vectors, blocks of 128"
    assert Choice("rows", 256, 8, 0, 256).words == "256 threads a row, width 8, streaming, blocks of 256"
    assert Choice("pointwise", 512, 4, 2, 512).words == "blocks of 512, width 4, 2 vectors a thread"
    for text in ("default", "{}", "[1]", '{"schedule":"rows","threads":"32","width":8,"items":4,"block":128}'):
        assert parse_choice(text) is None


@pytest.mark.parametrize("text", [SOFTMAX, NORM, CHAIN])
def test_results_are_right(text: str) -> None:
    """float32 and float16 against float64; a choice of each kind, the planned sizes and others, aligned and not."""
    made = make(text, planned=SIZES)
    chosen: dict[tuple[bool, bool, int], Choice] = {}
    for choice in made.kernel.choices:
        chosen.setdefault((choice.items > 1, choice.items == 0, choice.width), choice)
    kernels = [Made(made.model, made.graph, made.lowered, told(made, choice)) for choice in list(chosen.values())[:4]]
    compile_all(kernels)
    for kernel in kernels:
        inputs = random_inputs(kernel, SIZES)
        held = variants_that_hold(kernel.kernel.plan, arguments(kernel, inputs), [])
        assert held[0] == kernel.kernel.plan.variants[0].name
        for sizes in (SIZES, {"n": 3, "m": 31}):
            check(kernel, random_inputs(kernel, sizes), length=200, limit=1)
