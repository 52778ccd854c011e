"""Rows that a block keeps in its shared memory: read once, and in every phase as they are in memory."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from emulator import run_plan, variants_that_hold
from kernel_harness import Made, arguments, check, failures, make, only, parse, random_inputs
from reference import FLOATS
from test_schedules_online import rows_of_edges

from onnxfuse.lowering.launch import Situation
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.costs.hardware import Limits, resolve_profile
from onnxfuse.schedules import SCHEDULES, Kernel, Request, make_kernel, parse_choice
from onnxfuse.schedules.reductions.rows import IN_SHARED, SHARED
from onnxfuse.schedules.reductions.streaming import BLOCK_SHARED

TEXTS = {
    "softmax": "g (T[B,L] x) => (T[B,L] y) { s = Relu(x) y = Softmax(s) }",
    "norm": "g (T[B,L] x, T[L] w, T[L] b) => (T[B,L] y) { y = LayerNormalization(x, w, b) }",
    "norm of a sum": "g (float16[B,L] x, float16[B,L] r, float16[L] w) => (float16[B,L] y, float16[B,L] s) { s = Add(x, r) y = LayerNormalization(s, w) }",
    "a mask that rows share": "g (T[B,L] x, bool[1,L] k, T[B,1] c) => (T[B,L] y, T[B,1] m) <int64[1] a = {1}, T none = {-4}> "
                              "{ s = Where(k, x, none) t = Mul(s, c) y = Softmax(t) m = ReduceMax(t, a) }",
    "integers beside halves": "g (float16[B,L] x, int32[B,L] i) => (float16[B,L] y) { f = Cast<to=10>(i) s = Add(x, f) y = Softmax(s) }",
    "a norm of a softmax": "g (T[B,L] x, T[L] w) => (T[B,L] y) { p = Softmax(x) t = Add(p, x) y = LayerNormalization(t, w) }",
}
CASES = [(name, kind) for name, text in TEXTS.items() for kind in ("float", "float16", "bfloat16") if "T[" in text or kind == "float16"]
PLANNED = {"B": 64, "L": 36_000}


def kept(text: str, kind: str, planned: Mapping[str, int] = PLANNED) -> Made:
    """The kernel with the variants alone that keep rows in shared memory: its own, else what tuning may tell it."""
    made = make(text.replace("T[", f"{kind}[").replace(", T none", f", {kind} none"), planned=planned)
    kernel, told = made.kernel, [each for each in made.kernel.choices if dict(each.settings).get("items") == IN_SHARED]
    if not any(SHARED in each.name for each in kernel.plan.variants):
        found = make_kernel(Request(made.lowered, "test", planned, told[0]))
        assert isinstance(found, Kernel) and found.choice == told[0]
        kernel = found
    variants = tuple(each for each in kernel.plan.variants if SHARED in each.name)
    return only(replace(made, kernel=kernel), variants)


def run(made: Made, *lengths: int) -> None:
    """Each variant at these lengths, of which there must be one."""
    for length in lengths:
        inputs = random_inputs(made, {"B": 2, "L": length})
        assert variants_that_hold(made.kernel.plan, arguments(made, inputs), [])
        check(made, inputs, length=max(length, 1), slack=4.0)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_rows_that_vectors_divide(name: str, kind: str) -> None:
    """Fewer elements than threads, a group of vectors and one more."""
    made = kept(TEXTS[name], kind)
    assert not all("w1" in each.name for each in made.kernel.plan.variants)
    run(made, 8, 32, 4104, 16_384, 16_392, *([0] if name == "softmax" else []))


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_rows_that_no_vector_divides(name: str, kind: str) -> None:
    made = kept(TEXTS[name].replace("L]", "36001]"), kind)
    assert all("peeled" in each.name for each in made.kernel.plan.variants)
    run(made, 36_001)


@pytest.mark.parametrize("name", ["softmax", "norm"])
def test_short_rows_that_no_vector_divides(name: str) -> None:
    """Of a length known only when running."""
    run(kept(TEXTS[name], "float16", {"B": 4096, "L": 100_001}), 1, 31, 33, 4097, 8193)


@pytest.mark.parametrize("kind", ["float", "float16"])
def test_a_vocabulary(kind: str) -> None:
    """Threads in other orders give the same bits."""
    made = kept(TEXTS["softmax"].replace("L]", "50257]"), kind)
    inputs = random_inputs(made, {"B": 2})
    check(made, inputs, length=50_257)
    given, (variant,) = arguments(made, inputs), made.kernel.plan.variants
    runs = [run_plan(made.kernel.plan, made.kernel.source, given, variant=variant.name, order=order)[0]
            for order in ("forward", "backward", 3)]
    assert all(np.array_equal(runs[0], other) for other in runs[1:])


@pytest.mark.parametrize("kind", ["float", "float16", "bfloat16"])
def test_edges(kind: str) -> None:
    """NaN, infinities and numbers that no exponential spans."""
    made = kept("g (T[B,L] x) => (T[B,L] y) { y = Softmax(x) }", kind)
    rows = rows_of_edges(4096, kind)
    x = rows.astype({"float": np.float32, "float16": np.float16}.get(kind) or FLOATS[16])
    assert not failures(made, {"x": x}, length=4096, slack=4.0)


def test_each_row_is_read_once() -> None:
    """What several phases need of it; a text that reads it again in the last phase is told from that."""
    made = kept(TEXTS["norm of a sum"], "float16")
    body = made.kernel.source.partition("rows_in_shared_memory(")[2].partition("\ntemplate")[0]
    phases = body.split("// Phase ")[1:]
    assert len(phases) == 3 and all("of::load<width>(i0 " in phase for phase in phases[:1])
    assert not any(f"of::load<width>(i{place} " in phase for phase in phases[1:] for place in (0, 1))
    # Weights, which all rows have in common, are the caches'.
    assert "of::load<width>(i2 " in phases[2] and "kept2" not in body


def test_rows_that_do_not_fit_on_the_gpu_at_hand_stream() -> None:
    made = make(TEXTS["softmax"].replace("T[B,L]", "float16[B,100352]"), planned={"B": 4096})
    plan = made.kernel.plan
    assert [SHARED in each.name for each in plan.variants[:2]] == [True, False]
    shapes = [(4096, 100_352)]
    for sm, fits in ((75, False), (80, False), (86, False), (89, False), (90, True), (100, True), (103, True), (120, False)):
        situation = Situation(shapes, sm=sm)
        situation.bind(plan)
        assert bool(all(map(situation.evaluate, plan.variants[0].guards))) is fits
    (step,) = plan.variants[0].steps
    assert Situation(shapes).evaluate(step.shared) == 200_704


@pytest.mark.parametrize(("sm", "kib"), [(75, 64), (80, 163), (86, 99), (87, 163), (89, 99), (90, 227), (100, 227), (120, 99), (121, 99)])
def test_shared_memory_of_a_block(sm: int, kib: int) -> None:
    assert Situation([], sm=sm).evaluate(BLOCK_SHARED) == kib * 1024


def test_choices_are_told_and_read() -> None:
    made = make(TEXTS["softmax"].replace("T[", "float16["), planned=PLANNED)
    told = [each for each in made.kernel.choices if dict(each.settings).get("items") == IN_SHARED]
    assert [SCHEDULES["rows"].words(each) for each in told if each["width"] == 8] == [
        "512 threads a row, width 8, in shared memory, blocks of 512", "1024 threads a row, width 8, in shared memory, blocks of 1024"]
    assert all(parse_choice(str(each)) == each for each in told)
    streaming = replace(told[0], settings=tuple((name, max(number, 0)) for name, number in told[0].settings))
    assert streaming.kind != told[0].kind


def test_a_profile_that_gives_a_block_less_leaves_it_to_stream() -> None:
    model = parse(TEXTS["softmax"].replace("T[B,L]", "float16[4096,100352]"))
    profile = resolve_profile("H200")
    for limit, word in ((None, SHARED), (100, "stream")):
        target = profile.model_copy(update={"limits": Limits(on_chip_kb=limit)})
        made = optimise(model, Options(target=target, least_gain=0.0, verify=False, database=False))
        (fusion,) = made.plan.fusions
        assert word in fusion.kernel.plan.variants[0].name


def test_guards_let_in_what_fits() -> None:
    """A length known only when running: the longest row that fits, and one more element."""
    made = kept("g (T[B,L] x) => (T[B,L] y) { y = Softmax(x) }", "float16", {"B": 64, "L": 100_000})
    for length, fits in ((100_000, True), (115_968, True), (115_976, False)):
        x = np.zeros((1, length), np.float16)
        held = variants_that_hold(made.kernel.plan, [x], [])
        assert any("w8" in name for name in held) is fits
