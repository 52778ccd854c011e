"""Few long rows in several steps: partial results in scratch, combined in an order that nothing but the sizes decides.

All variants that hold, aligned and not, over poisoned outputs and scratch; in several orders of threads.  The reference
is the region in float64: float32 within the tolerance of its reductions' length, float16 and bfloat16 within two units
in the last place of the largest output, integers exactly.
"""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from emulator import EmulatorError, run_plan, variants_that_hold
from kernel_harness import Made, arguments, check, fails, failures, make, random_inputs, refused
from zoo_models import compile_failures

from onnxfuse.lowering.launch import Situation
from onnxfuse.planning.costs.traffic import plan_cost
from onnxfuse.schedules.reductions.split import expected_steps

LENGTHS = (1, 31, 33, 4097, 100_001)
PLANNED = {"B": 2, "L": 1_000_000}

KINDS = ("ReduceMax", "ReduceMin", "ReduceSum", "ReduceMean", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare",
         "ReduceLogSum", "ReduceLogSumExp")
WHOLE = "g (T[L] x) => (T y) { y = NAME<keepdims=0>(x) }"
GUARD = ("g (float16[B,L,96] x, float16[B,L,96] r) => (float16[B,L,96] y, bool t) "
         "{ y = Add(x, r) c = Cast<to=1>(y) i = IsInf(c) k = Cast<to=7>(i) m = ReduceMax<keepdims=0>(k) t = Cast<to=9>(m) }")
BOTH = ("g (T[B,L] x) => (T[B,1] m, T[B,1] v) <int64[1] a = {1}> "
        "{ m = ReduceMean(x, a) d = Sub(x, m) q = Mul(d, d) v = ReduceMean(q, a) }")
PARTS = ("g (T[B,L] x) => (T[B,1] m, T[B,1] s, T[B,L] y) <int64[1] a = {1}> "
         "{ m = ReduceMax(x, a) d = Sub(x, m) e = Exp(d) s = ReduceSum(e, a) y = Div(e, s) }")
SOFTMAX = "g (T[B,L] x, T[B,L] b) => (T[B,L] y, T[B,L] s) { s = Add(x, b) y = Softmax(s) }"
NORM = "g (T[B,L] x, T[L] w, T[L] b) => (T[B,L] y) { n = LayerNormalization(x, w, b) y = Relu(n) }"
STATISTICS = ("g (T[N,16,H] x) => (T[1,16,1] m, T[1,16,1] v, T[N,16,H] y) <int64[2] a = {0,2}> "
              "{ m = ReduceMean(x, a) d = Sub(x, m) q = Mul(d, d) v = ReduceMean(q, a) y = Sub(x, m) }")
COLUMNS = "g (T[L,C] x, T[C] w) => (T[C] y) <int64[1] a = {0}> { p = Mul(x, w) y = ReduceSum<keepdims=0>(p, a) }"
COLUMN_SOFTMAX = "g (T[B,L,C] x) => (T[B,L,C] y) { y = Softmax<axis=1>(x) }"


def split(text: str, kind: str = "float", **planned: int) -> Made:
    """A kernel, which must offer variants that split rows."""
    made = make(text.replace("T[", f"{kind}[").replace("(T y)", f"({kind} y)"), planned=planned or PLANNED)
    assert any(variant.name.startswith("split") for variant in made.kernel.plan.variants), made.kernel.plan
    return made


def forced(made: Made, inputs: dict[str, np.ndarray], **options: object) -> None:
    """Check the variants that hold, and those that split rows although these are too short for it to pay."""
    check(made, inputs, **options)
    plan = made.kernel.plan
    loose = tuple(
        replace(variant, guards=tuple(guard for guard in variant.guards if "addr" in guard or "%" in guard))
        for variant in plan.variants if variant.name.startswith("split")
    )
    check(replace(made, kernel=replace(made.kernel, plan=replace(plan, variants=loose))), inputs, **options)


@pytest.mark.parametrize("name", KINDS)
def test_one_number_of_a_whole_tensor(name: str) -> None:
    made = split(WHOLE.replace("NAME", name))
    for seed, length in enumerate(LENGTHS):
        (array,) = random_inputs(made, {"L": length}, seed).values()
        if name in ("ReduceLogSum", "ReduceProd"):
            array = np.abs(array) * np.float32(0.1) + np.float32(0.95 if name == "ReduceProd" else 0.5)
        forced(made, {"x": array}, length=length, misalign=length < 5000)


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "double", "int32", "int64", "uint64"])
@pytest.mark.parametrize("name", ["ReduceMax", "ReduceMin", "ReduceSum"])
def test_types(name: str, kind: str) -> None:
    made = split(WHOLE.replace("NAME", name), kind)
    for length in (1, 33, 4097, 70_000):
        forced(made, random_inputs(made, {"L": length}), length=length, misalign=length < 5000)


@pytest.mark.parametrize("text", [BOTH, PARTS, SOFTMAX, NORM], ids=["both", "parts", "softmax", "norm"])
@pytest.mark.parametrize("kind", ["float", "float16"])
def test_phases(text: str, kind: str) -> None:
    """A mean and a variance; whole outputs of the first and of the last step; parameters along the row.  The planner
    expects as many steps; a softmax's maximum and sum are one."""
    made = split(text, kind)
    steps = {len(variant.steps) for variant in made.kernel.plan.variants if variant.name.startswith("split")}
    assert steps == {2 if text in (PARTS, SOFTMAX) else 3} == {expected_steps(made.lowered, PLANNED, 132)}
    for seed, length in enumerate(LENGTHS):
        forced(made, random_inputs(made, {"B": 3, "L": length}, seed), length=length, misalign=length < 5000)


def test_the_overflow_guard_of_an_encoder() -> None:
    """The flag of a whole tensor, beside the sum that it guards: two kernels, the second of one block."""
    made = split(GUARD, B=8, L=2000)
    assert made.kernel.schedule == "split"
    first = made.kernel.plan.variants[0]
    assert len(first.steps) == 2 and first.steps[1].grid == ("1", "1", "1")
    for flagged in (False, True):
        inputs = random_inputs(made, {"B": 8, "L": 100})
        if flagged:
            inputs["x"][7, 99, 95] = np.inf
        forced(made, inputs)


@pytest.mark.parametrize("sizes", [{"N": 3, "H": 3001}, {"N": 40, "H": 64}, {"N": 1, "H": 1}, {"N": 7, "H": 31}], ids=str)
@pytest.mark.parametrize("kind", ["float", "float16"])
def test_axes_with_one_kept_between(kind: str, sizes: dict[str, int]) -> None:
    """What a batch norm needs: the mean and the variance of each channel."""
    made = split(STATISTICS, kind, N=64, H=3136)
    forced(made, random_inputs(made, sizes), length=sizes["N"] * sizes["H"])


@pytest.mark.parametrize("columns", [1, 3, 8, 33, 96, 768])
def test_sums_over_the_batch(columns: int) -> None:
    made = split(COLUMNS, "float16", L=1_000_000, C=columns)
    for length in (1, 31, 33, 300, 4097):
        forced(made, random_inputs(made, {"L": length, "C": columns}), length=length)


@pytest.mark.parametrize("kind", ["float", "float16", "double"])
def test_softmax_of_long_columns(kind: str) -> None:
    made = split(COLUMN_SOFTMAX, kind, B=2, L=100_000, C=16)
    for sizes in ({"B": 2, "L": 4097, "C": 16}, {"B": 3, "L": 33, "C": 5}, {"B": 1, "L": 1, "C": 1}):
        forced(made, random_inputs(made, sizes), length=sizes["L"])


def test_no_barrier_is_missing_and_every_run_gives_the_same_bits() -> None:
    for text, sizes in ((SOFTMAX, {"B": 2, "L": 70_000}), (COLUMN_SOFTMAX, {"B": 2, "L": 5000, "C": 16})):
        made = split(text, B=2, L=100_000, C=16)
        inputs = random_inputs(made, sizes)
        name = next(variant.name for variant in made.kernel.plan.variants if variant.name.startswith("split"))
        runs = [
            run_plan(made.kernel.plan, made.kernel.source, arguments(made, inputs), variant=name, order=order)
            for order in ("forward", "backward", 7)
        ]
        for other in runs[1:]:
            assert all(a.tobytes() == b.tobytes() for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize(("right", "wrong"), [
    ("__syncthreads();", ""), ("c < chunks", "c < chunks - 1"), ("part * chunk;", "part * chunk + 1;"),
    ("[row * chunks + part]", "[row * chunks]"),
])
def test_faults_are_found(right: str, wrong: str) -> None:
    made = split("g (T[B,L] x) => (T[B,L] y, T[B,1] m) <int64[1] a = {1}> { m = ReduceMean(x, a) y = Sub(x, m) }")
    inputs = random_inputs(made, {"B": 2, "L": 70_000})
    faulty = made.kernel.source.replace(right, wrong)
    options = {"length": 1, "misalign": False, "limit": 1, "orders": ("forward", "backward")}
    assert faulty != made.kernel.source and not failures(made, inputs, **options)
    try:
        assert fails(made, inputs, source=faulty, **options)
    except EmulatorError as error:
        assert "were not written" in str(error) or "read" in str(error)


@pytest.mark.parametrize("name", ["ReduceMax", "ReduceMin", "ReduceSum", "Softmax"])
@pytest.mark.parametrize("place", [0, 2047, 2048, 69_999])
def test_nan_and_infinities(name: str, place: int) -> None:
    """NaN anywhere gives NaN, of whichever block it is; infinities are numbers like others."""
    made = split("g (T[B,L] x) => (T[B,L] y) { y = Softmax(x) }" if name == "Softmax" else
                 f"g (T[B,L] x) => (T[B,1] y) <int64[1] a = {{1}}> {{ y = {name}(x, a) }}")
    x = np.random.default_rng(0).standard_normal((4, 70_000)).astype(np.float32)
    x[1, place], x[2, place], x[3, place] = np.nan, np.inf, -np.inf
    check(made, {"x": x}, length=70_000, misalign=False, limit=1)


def test_a_row_of_infinities() -> None:
    """The largest of -infinity alone is -infinity; its softmax NaN, as the standard's."""
    made = split("g (T[B,L] x) => (T[B,L] y, T[B,1] m) <int64[1] a = {1}> { y = Softmax(x) m = ReduceMax(x, a) }")
    check(made, {"x": np.full((2, 70_000), -np.inf, np.float32)}, length=70_000, misalign=False, limit=1)


@pytest.mark.parametrize("sizes", [{"B": 0, "L": 100_000}, {"B": 3, "L": 0}, {"B": 0, "L": 0}], ids=str)
def test_empty_tensors(sizes: dict[str, int]) -> None:
    """The sum of nothing is 0, and there may be no rows."""
    made = split("g (T[B,L] x) => (T[B,L] y, T[B,1] s) <int64[1] a = {1}> { s = ReduceSum(x, a) y = Sub(x, s) }")
    forced(made, random_inputs(made, sizes))


def taken(made: Made, shape: tuple[int, ...], multiprocessors: int = 132) -> str:
    situation = Situation([shape], multiprocessors=multiprocessors)
    situation.bind(made.kernel.plan)
    return next(v.name for v in made.kernel.plan.variants if all(situation.evaluate(guard) for guard in v.guards))


def test_the_way_is_chosen_when_the_kernel_runs() -> None:
    made = split("g (T[B,L] x) => (T[B,1] y) <int64[1] a = {1}> { y = ReduceSum(x, a) }", B=2, L=1_000_000)
    assert taken(made, (2, 1_000_000)) == "split, width 4, peeled, 32-bit"
    assert taken(made, (2, 1_000_001)) == "split, width 4, peeled, 32-bit"
    assert taken(made, (2, 2**31)) == "split, width 1, 64-bit"
    assert taken(made, (200, 1_000_000)).startswith("rows") and taken(made, (2, 1000)).startswith("rows")
    # A GPU with fewer multiprocessors is busy with fewer rows.
    assert taken(made, (60, 1_000_000)).startswith("split")
    assert taken(made, (60, 1_000_000), multiprocessors=40).startswith("rows")


def test_chunks_fill_the_gpu_and_no_more() -> None:
    made = split(WHOLE.replace("NAME", "ReduceMax"), "float16")
    step, last = made.kernel.plan.variants[0].steps

    def blocks(length: int, multiprocessors: int = 132) -> int:
        situation = Situation([(length,)], multiprocessors=multiprocessors)
        situation.bind(made.kernel.plan)
        (scratch,) = made.kernel.plan.scratch
        grid = situation.evaluate(step.grid[0])
        assert situation.evaluate(scratch) == 4 * grid and last.grid[0] == "1"
        chunk, chunks = (situation.evaluate(text.partition(":")[2]) for text in step.arguments[-2:])
        assert chunks == grid and (chunks - 1) * chunk < max(length, 1) <= chunks * chunk
        return grid

    assert [blocks(length) for length in (0, 1, 2048, 2049, 100_000)] == [1, 1, 1, 2, 49]
    assert 450 < blocks(10**7) <= 528 and 450 < blocks(2**31 + 5) <= 528
    assert 130 < blocks(10**7, multiprocessors=40) <= 160
    kernels, scratch = plan_cost(made.kernel.plan, [(10**6,)], 90, 132)
    assert kernels == 2 and scratch == 2 * 4 * blocks(10**6)


def test_short_rows_are_not_split() -> None:
    for text in ("g (float[B,768] x) => (float[B,768] y) { y = Softmax(x) }",
                 "g (float[B,L] x) => (float[B,L] y) { y = Softmax(x) }",
                 "g (float[N,64,H,W] x) => (float[N,64,H,W] y) { y = Softmax<axis=1>(x) }"):
        made = make(text, planned={"B": 4096, "L": 512, "N": 32, "H": 56, "W": 56})
        assert not any("split" in variant.name for variant in made.kernel.plan.variants)


def test_rows_that_differ_do_not_meet() -> None:
    found = refused("g (float[B,L] x) => (float[B,L] y) <int64[1] a = {0}> "
                    "{ m = ReduceMax<keepdims=1>(x) s = ReduceSum(x, a) t = Sub(x, m) y = Sub(t, s) }")
    assert (found.code, found.message) == ("reduction-structure", "reductions over different rows meet in one region")


def test_nvrtc_compiles_it() -> None:
    texts = [(WHOLE.replace("NAME", "ReduceMax"), "int8"), (BOTH, "bfloat16"), (COLUMN_SOFTMAX, "double")]
    made = {split(text, kind, B=2, L=1_000_000, C=96, N=64, H=3136).kernel.source: f"{kind} {text}" for text, kind in texts}
    found = compile_failures({source: (name, ()) for source, name in made.items()})
    assert not found, "\n".join(found)
    assert all("atomic" not in source for source in made)


def test_variants_have_names_of_their_own() -> None:
    made = split(SOFTMAX)
    names = [variant.name for variant in made.kernel.plan.variants]
    assert len(names) == len(set(names))
    held = variants_that_hold(made.kernel.plan, arguments(made, random_inputs(made, {"B": 1, "L": 70_000})))
    assert held[0] == names[0]
