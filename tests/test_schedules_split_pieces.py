"""Long rows that lie in short pieces, cut into columns that blocks share: every variant that holds, and those that cut
rows although these are too short for it to pay, against float64 as in test_schedules_split.

Scratch and outputs are poisoned, threads run in several orders.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from emulator import EmulatorError, run_plan
from kernel_harness import Made, arguments, attempt, check, fails, make, parse, random_inputs, told
from test_schedules_split import forced
from zoo_models import compile_failures

from onnxfuse.lowering.launch import Situation
from onnxfuse.planning.costs.traffic import plan_cost
from onnxfuse.refusal import Refusal
from onnxfuse.schedules import SCHEDULES, Kernel, Request, make_kernel, parse_choice

GROUPS = """g (T[N,H,W,{channels}] x, T[{channels},1,1] w) => (T[N,H,W,{channels}] y)
<int64[3] s = {{0,{groups},-1}}> {{
 scale = Constant <value = T[{groups}] {{{twos}}}> () bias = Constant <value = T[{groups}] {{{ones}}}> ()
 f = Transpose <perm=[0,3,1,2]> (x) t = Shape(f) r = Reshape(f, s)
 i = InstanceNormalization <epsilon = 0.0000152587890625> (r, scale, bias) q = Reshape(i, t)
 m = Mul(q, w) p = Sigmoid(m) z = Mul(m, p) y = Transpose <perm=[0,2,3,1]> (z) }}"""

KINDS = ("ReduceMax", "ReduceMin", "ReduceSum", "ReduceMean", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare",
         "ReduceLogSum", "ReduceLogSumExp")
PAIRS = "g (T[N,H,C,3] x) => (T[N,1,C,1] y) <int64[2] a = {1,3}> { y = NAME(x, a) }"
BOTH = """g (T[N,H,C,3] x) => (T[N,H,C,3] y, T[N,C] m, T[N,1,C,1] v) <int64[2] a = {1,3}> {
 k = ReduceMean(x, a) m = Squeeze(k, a) d = Sub(x, k) q = Mul(d, d) v = ReduceMean(q, a) y = Div(d, v) }"""
SOFTMAX = """g (T[N,H,C,3] x) => (T[N,H,C,3] y, T[N,1,C,1] s) <int64[2] a = {1,3}> {
 m = ReduceMax(x, a) d = Sub(x, m) e = Exp(d) s = ReduceSum(e, a) y = Div(e, s) }"""

INSTANCE = """g (T[N,{height},{width},{channels}] x, T[{channels}] s, T[{channels}] b)
 => (T[N,{height},{width},{channels}] y) {{
 f = Transpose <perm=[0,3,1,2]> (x) i = InstanceNormalization <epsilon = 0.0000152587890625> (f, s, b)
 l = LeakyRelu <alpha = 0.125> (i) y = Transpose <perm=[0,2,3,1]> (l) }}"""

PLANNED = {"N": 4, "H": 256, "W": 256, "C": 32}
LONG = {"N": 4, "H": 100_000, "C": 32}


def groups(channels: int, count: int) -> str:
    """A norm over groups of the channels of images whose channels are last, with what follows it."""
    return GROUPS.format(channels=channels, groups=count, twos=",".join("2" * count), ones=",".join("1" * count))


def cut(text: str, kind: str = "float", **planned: int) -> Made:
    """A kernel, which must be the schedule's."""
    made = make(text.replace("T[", f"{kind}["), planned=planned or PLANNED)
    assert made.kernel.schedule == "pieces" and made.kernel.plan.variants[0].name.startswith("split, pieces")
    return made


@pytest.mark.parametrize("kind, channels, count, width", [
    ("float16", 128, 32, 8), ("float16", 40, 5, 8), ("float16", 24, 8, 8), ("float16", 20, 2, 4),
    ("float16", 33, 11, 1), ("bfloat16", 24, 12, 8), ("float", 24, 6, 4), ("float", 30, 2, 2), ("double", 12, 6, 2)])
def test_groups_of_channels(kind: str, channels: int, count: int, width: int) -> None:
    """4, 8, 3, 10, 3, 2, 4, 15 and 2 channels: vectors over two groups, a part of one, and over parts of two."""
    made = cut(groups(channels, count), kind)
    assert made.kernel.plan.variants[0].name == f"split, pieces, width {width}, 32-bit"
    for batch, height, breadth in ((1, 1, 1), (3, 1, 31), (2, 33, 1), (2, 17, 241)):
        inputs = random_inputs(made, {"N": batch, "H": height, "W": breadth}, batch)
        forced(made, inputs, length=height * breadth * channels // count, orders=("forward", 7), misalign=batch == 3)


@pytest.mark.parametrize("kind, channels, height, width", [
    ("float16", 32, 17, 31), ("float16", 40, 64, 65), ("bfloat16", 8, 33, 64), ("float", 12, 33, 31),
    ("float16", 7, 29, 31), ("double", 6, 23, 23)])
def test_columns_by_themselves(kind: str, channels: int, height: int, width: int) -> None:
    """Instance norms, whose mean and variance are one pass."""
    made = cut(INSTANCE.format(channels=channels, height=height, width=width), kind)
    assert len(made.kernel.plan.variants[0].steps) == 2
    expected = SCHEDULES["pieces"].expected(made.lowered, PLANNED, 132)
    assert expected is not None and expected.steps == 2
    for batch in (1, 3):
        inputs = random_inputs(made, {"N": batch}, batch)
        inputs["x"] = (inputs["x"] * 2 + 5).astype(inputs["x"].dtype)
        check(made, inputs, length=height * width, orders=("forward", 7), misalign=batch == 3)


@pytest.mark.parametrize("text", [
    INSTANCE.format(channels=32, height=16, width=32), INSTANCE.format(channels=32, height="H", width="W")])
def test_columns_that_gain_nothing_by_themselves(text: str) -> None:
    """Short ones, and those whose length nobody knows."""
    assert make(text.replace("T[", "float16["), planned=PLANNED).kernel.schedule != "pieces"


def test_columns_whose_mean_alone_is_wanted_are_split() -> None:
    text = "g (float16[N,64,64,32] x) => (float16[N,32] y) <int64[2] a = {1,2}> { y = ReduceMean<keepdims = 0>(x, a) }"
    assert make(text, planned={"N": 4}).kernel.schedule == "split"


def test_many_columns_have_blocks_of_their_own() -> None:
    text = INSTANCE.format(channels=32, height=64, width=64).replace("T[", "float16[")
    assert make(text, planned={"N": 4}).kernel.schedule == "pieces" != make(text, planned={"N": 4096}).kernel.schedule


@pytest.mark.parametrize("name", KINDS)
def test_kinds(name: str) -> None:
    """Axes of which the innermost is short, with one kept between."""
    made = cut(PAIRS.replace("NAME", name), **LONG)
    for seed, sizes in enumerate(({"N": 1, "H": 1, "C": 1}, {"N": 2, "H": 33, "C": 31}, {"N": 1, "H": 4097, "C": 40})):
        (array,) = random_inputs(made, sizes, seed).values()
        if name in ("ReduceLogSum", "ReduceProd"):
            array = np.abs(array) * np.float32(0.1) + np.float32(0.95 if name == "ReduceProd" else 0.5)
            array[:, 300:] = np.minimum(array[:, 300:], np.float32(1.0))
        forced(made, {"x": array}, length=3 * sizes["H"], misalign=sizes["H"] < 100)


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "double", "int8", "int32", "uint64"])
@pytest.mark.parametrize("name", ["ReduceMax", "ReduceMin", "ReduceSum"])
def test_types(name: str, kind: str) -> None:
    made = cut(PAIRS.replace("NAME", name), kind, **LONG)
    for sizes in ({"N": 1, "H": 1, "C": 1}, {"N": 3, "H": 257, "C": 32}):
        forced(made, random_inputs(made, sizes), length=3 * sizes["H"], misalign=sizes["H"] < 100)


@pytest.mark.parametrize("kind", ["float", "float16"])
@pytest.mark.parametrize("text, steps", [(BOTH, 2), (SOFTMAX, 2)], ids=["both", "softmax"])
def test_phases(text: str, steps: int, kind: str) -> None:
    """What there is once a row is written once, wherever its axes lie; the planner expects as many steps."""
    made = cut(text, kind, **LONG)
    (first, *_) = made.kernel.plan.variants
    assert len(first.steps) == steps and f"width {8 if kind == 'float16' else 4}, " in first.name
    expected = SCHEDULES["pieces"].expected(made.lowered, LONG, 132)
    assert expected is not None and expected.steps == steps
    assert SCHEDULES["pieces"].expected(made.lowered, {**LONG, "H": 100}, 132) is None
    for seed, sizes in enumerate(({"N": 1, "H": 1, "C": 1}, {"N": 3, "H": 31, "C": 33}, {"N": 2, "H": 1500, "C": 32})):
        inputs = random_inputs(made, sizes, seed)
        inputs["x"][..., 0] += inputs["x"].dtype.type(2)  # no row is without variance
        forced(made, inputs, length=3 * sizes["H"], orders=("forward", "backward"), misalign=sizes["H"] < 100)


@pytest.mark.parametrize("kind", ["float16", "float"])
def test_little_variance_about_a_large_mean(kind: str) -> None:
    """What numbers differ by from their mean is as exact as they are, in every variant."""
    made = cut(groups(24, 6), kind)
    for sizes in ({"N": 2, "H": 3, "W": 11}, {"N": 1, "H": 64, "W": 65}):
        inputs = random_inputs(made, sizes)
        inputs["x"] = (1000 + np.round(inputs["x"].astype(np.float64) * 2)).astype(inputs["x"].dtype)
        # The mean of numbers of 1000 is that of float32 to six digits or so, and a variance of 4 knows of no more.
        forced(made, inputs, length=4 * sizes["H"] * sizes["W"], slack=1.0 if kind == "float16" else 200.0)


@pytest.mark.parametrize("sizes", [
    {"N": 0, "H": 5, "C": 5}, {"N": 2, "H": 0, "C": 5}, {"N": 2, "H": 5, "C": 0}], ids=str)
def test_empty_tensors(sizes: dict[str, int]) -> None:
    """The sum of nothing is 0, and there may be no rows."""
    made = cut("g (T[N,H,C,3] x) => (T[N,H,C,3] y, T[N,1,C,1] s) <int64[2] a = {1,3}> "
               "{ s = ReduceSum(x, a) y = Sub(x, s) }", **LONG)
    forced(made, random_inputs(made, sizes))


@pytest.mark.parametrize("kind", ["ReduceMax", "ReduceMin", "ReduceSum"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_in_its_row(kind: str, value: float) -> None:
    """At the first and the last element of a chunk, and of a piece."""
    made = cut(PAIRS.replace("NAME", kind), **LONG)
    inputs = random_inputs(made, {"N": 1, "H": 4097, "C": 40})
    for place in ((0, 0, 0, 0), (0, 127, 7, 2), (0, 128, 39, 1), (0, 4096, 21, 2)):
        inputs["x"][place] = value
    forced(made, inputs, length=3 * 4097, misalign=False)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_norm_with_what_is_no_number(value: float) -> None:
    made = cut(groups(24, 8), "float16")
    inputs = random_inputs(made, {"N": 2, "H": 9, "W": 31})
    inputs["x"][1, 8, 30, 5] = value
    forced(made, inputs, length=3 * 9 * 31, misalign=False)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_mean_of_infinite_numbers_is_infinite(value: float) -> None:
    """And their variance is no number; other rows' are theirs."""
    made = cut(BOTH, **LONG)
    inputs = random_inputs(made, {"N": 2, "H": 300, "C": 8})
    inputs["x"][1, 17, 3, 1] = inputs["x"][1, 299, 7, 0] = value
    forced(made, inputs, length=900, misalign=False)


@pytest.mark.parametrize("first, other", [(30_000.0, 0.0), (-1000.0, 1000.0)])
def test_a_first_number_far_from_the_others(first: float, other: float) -> None:
    """Of each chunk: no number that a thread met stands for the mean."""
    made = cut("g (T[N,H,C,3] x) => (T[N,1,C,1] v) <int64[2] a = {1,3}> "
               "{ m = ReduceMean(x, a) d = Sub(x, m) q = Mul(d, d) v = ReduceMean(q, a) }", **LONG)
    inputs = random_inputs(made, {"N": 1, "H": 4096, "C": 8})
    inputs["x"] += np.float32(other)
    inputs["x"][0, 0] = first
    forced(made, inputs, length=3 * 4096, misalign=False)


@pytest.mark.parametrize("text, steps", [
    ("m = ReduceMean(x, a) d = Sub(x, m) q = Mul(d, d) y = ReduceSum(q, a)", 2),
    ("s = ReduceSum(x, a) m = Div(s, n) d = Sub(x, m) q = Mul(d, d) y = ReduceSum(q, a)", 2),
    ("s = ReduceSum(x, a) m = Div(s, o) d = Sub(x, m) q = Mul(d, d) y = ReduceSum(q, a)", 3),
    ("s = ReduceSum(x, a) d = Sub(x, s) q = Mul(d, d) y = ReduceSum(q, a)", 3),
    ("w = Mul(x, x) m = ReduceMean(w, a) d = Sub(x, m) q = Mul(d, d) y = ReduceSum(q, a)", 3),
    ("m = ReduceMean(x, a) d = Sub(x, m) e = Abs(d) q = Mul(d, e) y = ReduceSum(q, a)", 3),
    ("m = ReduceMax(x, a) d = Sub(x, m) q = Mul(d, d) y = ReduceSum(q, a)", 3),
    ("p = Mul(x, h) m = ReduceSum(p, a) d = Sub(x, m) q = Mul(d, d) y = ReduceSum(q, a)", 2),
    ("p = Mul(x, h) m = ReduceMax(p, a) d = Sub(x, m) q = Mul(d, d) y = ReduceSum(q, a)", 3),
    ("p = Mul(x, o) m = ReduceSum(p, a) d = Sub(x, m) q = Mul(d, d) y = ReduceSum(q, a)", 3),
])
def test_squares_about_the_mean_alone_are_found_with_it(text: str, steps: int) -> None:
    """However the mean is spelled; about anything else they are a step of their own."""
    made = make("g (float[N,12000,C,3] x) => (float[N,1,C,1] y) <int64[2] a = {1,3}, float n = {36000.0}, "
                f"float o = {{35999.0}}, float h = {{0.00002777777777}}> {{ {text} }}", planned={"N": 2, "C": 32})
    (first, *_) = made.kernel.plan.variants
    assert made.kernel.schedule == "pieces" and len(first.steps) == steps
    check(made, random_inputs(made, {"N": 1, "C": 4}), length=36_000, misalign=False, slack=2.0)


def test_what_the_mean_is_of_is_what_it_is_taken_from() -> None:
    """Squares of differences of one tensor from the mean of another are no moments."""
    made = make("g (float[N,12000,C,3] x, float[N,12000,C,3] z) => (float[N,1,C,1] y) <int64[2] a = {1,3}, "
                "float n = {36000.0}> { s = ReduceSum(z, a) m = Div(s, n) d = Sub(x, m) q = Mul(d, d) "
                "y = ReduceSum(q, a) }", planned={"N": 2, "C": 32})
    assert len(made.kernel.plan.variants[0].steps) == 3
    check(made, random_inputs(made, {"N": 1, "C": 4}), length=36_000, misalign=False)


def test_empty_rows_have_no_squares() -> None:
    made = cut("g (T[N,H,C,3] x) => (T[N,1,C,1] y) <int64[2] a = {1,3}> "
               "{ m = ReduceMean(x, a) d = Sub(x, m) q = Mul(d, d) y = ReduceSum(q, a) }", **LONG)
    assert len(made.kernel.plan.variants[0].steps) == 2
    forced(made, random_inputs(made, {"N": 2, "H": 0, "C": 5}))
    forced(made, random_inputs(made, {"N": 2, "H": 1, "C": 5}), length=3)


def test_no_barrier_is_missing_and_every_run_gives_the_same_bits() -> None:
    for text, kind, sizes in ((groups(128, 32), "float16", {"N": 2, "H": 60, "W": 41}),
                              (SOFTMAX, "float", {"N": 2, "H": 1100, "C": 36})):
        made = cut(text, kind, **PLANNED if "W" in sizes else LONG)
        given = arguments(made, random_inputs(made, sizes))
        (name, *_) = (variant.name for variant in made.kernel.plan.variants if "32-bit" in variant.name)
        plan = replace(made.kernel.plan, variants=tuple(
            replace(variant, guards=()) for variant in made.kernel.plan.variants if variant.name == name))
        runs = [run_plan(plan, made.kernel.source, given, (), variant=name, order=order)
                for order in ("forward", "backward", 7)]
        assert all(a.tobytes() == b.tobytes() for other in runs[1:] for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize(("right", "wrong"), [
    ("__syncthreads();", ""), ("row * pieces + piece", "row * pieces"), ("c < chunks", "c < chunks - 1"),
    ("part * chunk;", "part * chunk + 1;"), ("end - 1 - turn", "end - 2 - turn"),
    ("(first + v) / pieces]", "first / pieces]"), ("* columns + column", "* across + column"),
])
def test_faults_are_found(right: str, wrong: str) -> None:
    made = cut("g (T[N,H,C,3] x) => (T[N,H,C,3] y, T[N,1,C,1] v) <int64[2] a = {1,3}> { m = ReduceMean(x, a) "
               "d = Sub(x, m) q = Mul(d, d) v = ReduceMean(q, a) y = Div(d, v) }", "float16", **LONG)
    inputs = random_inputs(made, {"N": 1, "H": 20_000, "C": 104})
    faulty = made.kernel.source.replace(right, wrong)
    options = {"length": 60_000, "misalign": False, "limit": 1, "orders": ("forward", "backward")}
    assert faulty != made.kernel.source
    try:
        assert fails(made, inputs, source=faulty, **options)
    except EmulatorError as error:
        assert "were not written" in str(error) or "read" in str(error)


def shapes_of(shape: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
    """Of the inputs of a norm over so many groups."""
    return [shape, (count,), (count,), (shape[-1], 1, 1)]


def taken(made: Made, shape: tuple[int, ...]) -> str:
    situation = Situation(shapes_of(shape, 32), multiprocessors=132)
    situation.bind(made.kernel.plan)
    return next(v.name for v in made.kernel.plan.variants if all(situation.evaluate(guard) for guard in v.guards))


def test_the_way_is_chosen_when_the_kernel_runs() -> None:
    """By the length of rows, whatever was planned; where pieces fill sectors, registers hold longer ones."""
    made = cut(groups(128, 32), "float16")
    assert taken(made, (4, 256, 256, 128)) == "split, pieces, width 8, 32-bit"
    assert taken(made, (4, 45, 46, 128)).startswith("split") and taken(made, (4, 45, 45, 128)).startswith("rows")
    short = make(groups(128, 32).replace("T[", "float16["), planned={"N": 2, "H": 32, "W": 32})
    assert short.kernel.schedule == "rows"
    near = make_kernel(Request(short.lowered, "test", {"N": 2, "H": 32, "W": 32}, nearby=[PLANNED]))
    assert isinstance(near, Kernel) and near.schedule == "rows"
    assert taken(replace(made, kernel=near), (4, 256, 256, 128)) == "split, pieces, width 8, 32-bit"
    assert taken(replace(made, kernel=near), (4, 32, 32, 128)).startswith("rows")
    wide = make(groups(512, 32).replace("T[", "float16["), planned={"N": 4, "H": 128, "W": 128})
    assert taken(wide, (4, 128, 128, 512)).startswith("split") and taken(wide, (4, 64, 64, 512)).startswith("rows")


def test_what_the_cache_holds_has_fewer_blocks() -> None:
    """Of tensors that are read again from the second-level cache, and of places of one line, blocks have a line side by
    side, two a multiprocessor; of larger ones two lines, three a multiprocessor."""
    for shape, expected in (((8, 64, 64, 128), 264), ((4, 256, 256, 128), 396), ((1, 512, 512, 64), 264)):
        planned = dict(zip("NHW", shape[:3], strict=True))
        made = make(groups(shape[3], 32).replace("T[", "float16["), planned=planned)
        situation = Situation(shapes_of(shape, 32), multiprocessors=132)
        situation.bind(made.kernel.plan)
        totals = {situation.evaluate(step.grid[0]) for step in made.kernel.plan.variants[0].steps}
        assert all(0.9 * expected < total <= expected for total in totals), (shape, totals)


@pytest.mark.parametrize("channels, count, blocks", [
    (128, 32, 4), (512, 32, 16), (320, 32, 11), (96, 32, 4), (96, 2, 4)])
def test_blocks_have_whole_rows(channels: int, count: int, blocks: int) -> None:
    """Three blocks a multiprocessor have a chunk each, of as many channels as make 256 bytes or more; scratch has two
    numbers a group and chunk."""
    made = cut(groups(channels, count), "float16")
    shapes = shapes_of((4, 256, 256, channels), count)
    situation = Situation(shapes, multiprocessors=132)
    situation.bind(made.kernel.plan)
    variant = made.kernel.plan.variants[0]
    grids = {situation.evaluate(step.grid[0]) for step in variant.steps}
    (total,) = grids
    assert total % blocks == 0 and 0.93 * 396 < total <= 396
    steps, scratch = plan_cost(made.kernel.plan, shapes, 90, 132)
    assert steps == 2 and scratch == 2 * 8 * 4 * count * total // blocks


def test_every_way_that_tuning_may_choose() -> None:
    """Those of blocks of one row too."""
    made = cut(groups(40, 8), "float16")
    assert {choice.schedule for choice in made.kernel.choices} == {"pieces", "rows"}
    for choice in made.kernel.choices:
        assert parse_choice(str(choice)) == choice
        other = told(made, choice, PLANNED)
        assert other.kernel.choice == choice and other.kernel.schedule == choice.schedule
        forced(other, random_inputs(other, {"N": 2, "H": 20, "W": 9}), length=5 * 180, misalign=False)
    static = make(groups(40, 8).replace("T[", "float16[").replace(",H,W", ",128,64"), planned={"N": 2})
    names = [variant.name for variant in static.kernel.plan.variants]
    assert all(name.startswith("split") for name in names)
    (rows,) = (choice for choice in static.kernel.choices if choice.schedule == "rows")
    assert told(static, rows, {"N": 2}).kernel.schedule == "rows"


@pytest.mark.parametrize("last, shape", [("Identity", "N,24,H,W"), ("Transpose <perm=[0,1,3,2]>", "N,24,W,H")])
def test_what_comes_channels_last_and_leaves_otherwise_is_refused(last: str, shape: str) -> None:
    """Columns cannot write it in whole sectors, and a block of one row does not read it so."""
    text = groups(24, 6).replace("y = Transpose <perm=[0,2,3,1]> (z)", f"y = {last} (z)")
    found = attempt(parse(text.replace("(T[N,H,W,24] y)", f"(T[{shape}] y)").replace("T[", "float16[")), PLANNED)
    assert isinstance(found, Refusal) and found.code == "scattered-access"


def test_nvrtc_compiles_it() -> None:
    made = {cut(text, kind, **sizes).kernel.source: kind for text, kind, sizes in (
        (groups(128, 32), "float16", PLANNED), (groups(33, 11), "bfloat16", PLANNED), (SOFTMAX, "double", LONG),
        (PAIRS.replace("NAME", "ReduceMax"), "int8", LONG))}
    found = compile_failures({source: (name, ()) for source, name in made.items()})
    assert not found, "\n".join(found)
    assert all("atomic" not in source for source in made)
