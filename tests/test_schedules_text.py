"""The texts of kernels: a planted error is found, NVRTC takes them, and they depend on nothing but the computation."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest
from element_loops import element_loops, same_for_all
from kernel_harness import Made, fails, failures, make, random_inputs
from onnx import TensorProto
from quick_compiler import quickly
from reference import difference, tolerance

from onnxfuse.lowering.launch import LaunchPlan
from onnxfuse.runtime.compile import compile_cubin
from onnxfuse.schedules import SCHEDULES
from onnxfuse.schedules.headers import header
from onnxfuse.schedules.kernel import INDEX_LIMIT
from onnxfuse.schedules.reductions.reduction import Reduction
from onnxfuse.schedules.source import Source

SAMPLES = {
    "bias": "g (float16[B,S,768] x, float16[768] b) => (float16[B,S,768] y) { y = Add(x, b) }",
    "norm": "g (float16[B,S,64] x, float16[B,S,64] r, float16[64] w, float16[64] b) => (float16[B,S,64] y, float16[B,S,64] s) "
            "{ s = Add(x, r) y = LayerNormalization(s, w, b) }",
    "softmax": "g (float[R,C] x) => (float[R,C] y) { y = Softmax(x) }",
    "heads": "g (bfloat16[B,S,96] x) => (bfloat16[B,12,S,8] y) <int64[4] t = {0,0,12,8}> "
             "{ r = Reshape(x, t) y = Transpose<perm=[0,2,1,3]>(r) }",
    "loss": "g (float[N,C] x, int64[N,1] l) => (float[N,1] y) { p = LogSoftmax(x) q = GatherElements<axis=1>(p, l) y = Neg(q) }",
    "integers": "g (int8[N] x, uint8[N] z) => (int32[N] y) { a = Cast<to=6>(x) b = Cast<to=6>(z) c = Mul(a, b) y = Mod(c, a) }",
    "short maximum": "g (int8[R,C] x) => (int8[R,1] y) <int64[1] a = {1}> { y = ReduceMax(x, a) }",
    "double": "g (double[N] x) => (double[N] y) { a = Erf(x) b = Gelu(a) y = Elu(b) }",
    "totals": "g (float16[R,C] x, float16[R,C] z) => (float16[R,C] y) <int64 a = {1}> "
              "{ p = Softmax(x) c = CumSum<exclusive=1>(p, a) y = Mul(c, z) }",
    "totals side by side": "g (bfloat16[R,C,8] x) => (bfloat16[R,C,8] y, int64[R,C,8] n) <int64 a = {1}> "
                           "{ y = CumSum<reverse=1>(x, a) i = Cast<to=7>(x) n = CumSum<reverse=1>(i, a) }",
    "grid": "g (float16[N,80,85] x, float16[N,80,4] u) => (float16[N,80,85] y) <int64[4,1] i = {3,5,7,9}, float16 h = {2}> "
            "{ r = Transpose<perm=[2,0,1]>(x) v = Transpose<perm=[2,0,1]>(u) w = Mul(v, h) s = ScatterND(r, i, w) "
            "y = Transpose<perm=[1,2,0]>(s) }",
    "parts": "g (float[R,8,1] x, float[R,128] z) => (float[R,256] y) <int64[3] e = {1,1,16}, int64[2] s = {-1,128}> "
             "{ a = Expand(x, e) b = Reshape(a, s) y = Concat<axis=1>(z, b) }",
    "row": "g (float16[R,C] x) => (float16[R,1] y) <int64[1] a = {1}> { s = Sigmoid(x) y = ReduceMean(s, a) }",
    "channels": "g (float16[N,64,H,W] x) => (float16[N,64,H,W] y) { y = Softmax<axis=1>(x) }",
    "product": "g (float16[R,C] x, float16[C,64] w, float16[64] b) => (float16[R,64] y) { p = MatMul(x, w) y = Add(p, b) }",
    "attention": "g (float16[B,S,64] q, float16[B,64,S] k, float16[B,S,64] v) => (float16[B,S,64] y) "
                 "{ s = MatMul(q, k) p = Softmax(s) y = MatMul(p, v) }",
    "stem": "g (float16[N,3,36,36] x, float16[24,3,3,3] w) => (float16[N,24,18,18] y) "
            "{ c = Conv<pads=[1,1,1,1],strides=[2,2]>(x, w) y = Relu(c) }",
    "depthwise": "g (float16[N,24,18,18] x, float16[24,1,3,3] w) => (float16[N,24,18,18] y) "
                 "{ c = Conv<pads=[1,1,1,1],group=24>(x, w) y = Relu(c) }",
}


@pytest.mark.parametrize("name", SAMPLES)
def test_nvrtc_compiles_it(name: str) -> None:
    """Compiled for sm_90; other architectures are compiled elsewhere."""
    kernel = make(SAMPLES[name]).kernel
    with quickly():
        assert compile_cubin(kernel.source, "sm_90", kernel.plan.options)[:4] == b"\x7fELF"


def inputs_of(made: Made) -> dict[str, np.ndarray]:
    return random_inputs(made, {"B": 1, "S": 4, "R": 3, "C": 40, "N": 64})


@pytest.mark.parametrize("name", ["bias", "norm", "softmax", "double", "parts", "totals"])
def test_an_error_of_one_percent_is_found(name: str) -> None:
    """Of every store in turn, in every variant."""
    made = make(SAMPLES[name])
    inputs = inputs_of(made)
    odd = random_inputs(made, {"B": 1, "S": 4, "R": 3, "C": 41, "N": 64})
    assert not failures(made, inputs, length=64) and not failures(made, odd, length=64)
    stores = list(re.finditer(r"\by\d+\[v\] = (\w+);", made.kernel.source))
    assert stores
    for store in stores:
        faulty = made.kernel.source[: store.start(1)] + f"1.01f * {store[1]}" + made.kernel.source[store.end(1):]
        assert fails(made, inputs, length=64, source=faulty) or fails(made, odd, length=64, source=faulty), store[0]


@pytest.mark.parametrize(("name", "right", "wrong"), [
    ("norm", "of::reduce<of::Sum", "of::reduce<of::Max"),
    ("softmax", "__syncthreads();", ""),
    ("softmax", "of::reduce<of::Sum", "of::reduce<of::Min"),
])
def test_other_errors_are_found(name: str, right: str, wrong: str) -> None:
    made = make(SAMPLES[name])
    assert right in made.kernel.source
    faulty = made.kernel.source.replace(right, wrong)
    assert faulty != made.kernel.source
    assert fails(made, random_inputs(made, {"B": 1, "S": 4, "R": 3, "C": 3000}), length=64, source=faulty,
                    orders=("forward", "backward", 3))


def test_tolerances_are_no_wider_than_stated() -> None:
    one = np.ones(3)
    for dtype, kind, step in ((TensorProto.FLOAT, np.float32, 1.1e-5), (TensorProto.FLOAT16, np.float16, 3 * 2.0**-10)):
        assert not difference(np.ones(3, kind), one, dtype)
        assert difference(np.array([1, 1 + step, 1], kind), one, dtype)
        assert difference(np.array([1, np.nan, 1], kind), one, dtype)
        assert difference(np.array([1, np.inf, 1], kind), one, dtype)
        assert not difference(np.array([1, np.nan, np.inf], kind), np.array([1, np.nan, np.inf]), dtype)
        assert difference(np.array([1, np.nan, np.inf], kind), np.array([1, np.nan, -np.inf]), dtype)
    assert tolerance(TensorProto.FLOAT) < 1.01e-5 and tolerance(TensorProto.FLOAT, 1024) < 8e-5
    assert difference(np.array([1, 2]), np.array([1, 3]), TensorProto.INT64) == (
        "1 of 2 elements differ, the first at (1,): np.int64(2) instead of np.int64(3)")


def test_texts_name_nothing_of_the_model() -> None:
    """Other names of values, nodes and sizes give the same text and the same plan but for its messages."""
    text = SAMPLES["norm"]
    other = re.sub(r"\b(x|r|w|b|s|y|B|S)\b", lambda match: f"other_{match[0]}", text)
    one, two = make(text).kernel, make(other).kernel
    assert one.source == two.source
    assert one.plan.variants == two.plan.variants and one.plan.symbols == two.plan.symbols
    # Names that sort the other way round.
    mixed = make("g (float[Z,A] x, float[A] b) => (float[Z,A] y) { a = Add(x, b) y = Softmax(a) }").kernel
    plain = make("g (float[A,Z] x, float[Z] b) => (float[A,Z] y) { a = Add(x, b) y = Softmax(a) }").kernel
    assert mixed.source == plain.source and mixed.plan.variants == plain.plan.variants


@pytest.mark.parametrize("name", SAMPLES)
def test_only_sizes_that_are_used_are_parameters(name: str) -> None:
    code = make(SAMPLES[name]).kernel.code
    assert isinstance(code, Source)
    text = "".join(function.body for function in code.functions)
    sizes = {each.name for function in code.functions for each in function.parameters if each.name.startswith("s")}
    assert sizes == set(re.findall(r"\bs\d+\b", text))


@pytest.mark.parametrize("name", SAMPLES)
def test_no_line_only_copies(name: str) -> None:
    """What a node only declares anew, as a cast that rounds later, has its operand's name; and no term does nothing."""
    code = make(SAMPLES[name]).kernel.code
    assert isinstance(code, Source)
    for function in code.functions:
        lines = function.body.splitlines()
        assert not [line for line in lines if re.fullmatch(r" *const [\w ]+ \w+ = [a-z]\w*;", line)]
        assert not [line for line in lines if re.search(r"[ (]0 [+*] | \* 1[ ;,)]| \+ 0[ ;,)]|\(\d+ > 0\)", line)]


def test_names_say_what_they_hold_and_phases_what_they_are_for() -> None:
    source = make(SAMPLES["norm"], planned={"B": 8, "S": 128}).kernel.source
    for line in ("// Phase 1 of 3: the row's sum, output 1.", "// Phase 2 of 3: the row's sum.", "// Phase 3 of 3: output 0.",
                 "const float add0 = x0 + x1;", "kept_add0[item * width + v] = add0;",
                 "my_sum0[v] = of::Sum::of(my_sum0[v], mul0);", "of::reduce<of::Sum, threads>(of::fold<of::Sum>(my_sum1),"):
        assert line in source, line
    # A name that a phase no longer needs is another's in the next.
    assert source.count("const float x0 = of::value(vector0.at[v]);") == 4


def test_results_of_rows_are_a_phase_too() -> None:
    source = make(SAMPLES["row"], planned={"R": 4096, "C": 256}).kernel.source
    (row,) = set(re.findall(r"// Phase 2 of 2: .*", source))
    assert row == "// Phase 2 of 2: output 0." and source.count("// Phase 1 of 2") == source.count(row)


def test_a_value_kept_under_two_types_is_kept_once() -> None:
    """The difference is kept as it is; that it is declared as float16 changes nothing before it is stored."""
    source = make("g (float16[R,64] x) => (float16[R,64] y, float16[R,64] z) <int64[1] a = {1}> "
                  "{ m = ReduceMean(x, a) z = Sub(x, m) p = Softmax(z) y = Mul(p, z) }", planned={"R": 4096}).kernel.source
    assert len(re.findall(r"float (kept_\w+)\[items \* width\];", source)) == 3


HEADS = ("g (float16[B,S,768] x, float16[768] b) => (float16[B,12,S,64] y) <int64[4] s = {0,0,12,64}> "
         "{ a = Add(x, b) r = Reshape(a, s) y = Transpose<perm=[0,2,1,3]>(r) }")


def test_one_division_by_a_size_of_the_run_gives_all_digits() -> None:
    """Of the place in the output: quotients are taken one from the other, and of a quotient and a remainder of the same
    numbers the compiler makes one division."""
    made = make(HEADS, planned={"B": 8, "S": 128})
    body = made.kernel.source.partition("pointwise_at(")[2].partition("pointwise(")[0]
    assert re.findall(r"(\w+) [/%] (s\d+);", body) == [("quotient0", "s1")] * 2 and not re.findall(r"[/%] \(", body)
    for sizes in ({"B": 3, "S": 5}, {"B": 1, "S": 1}, {"B": 2, "S": 64}):
        assert not failures(made, random_inputs(made, sizes), orders=("forward",))


GROUPS = ("g (T[N,64,H,W] x, T[32] s, T[32] z, T[64,1,1] u) => (T[N,64,H,W] y) <int64[3] a = {0,32,-1}> "
          "{ h = Shape(x) r = Reshape(x, a) n = InstanceNormalization(r, s, z) k = Reshape(n, h) y = Mul(k, u) }")
BOTH = GROUPS.replace("T[64,1,1] u)", "T[64,1,1] u, T[H,1] v)").replace("y = Mul(k, u)", "l = Mul(k, u) y = Mul(l, v)")
BATCHES = "g (T[N,8,H,W] x) => (T[1,8,1,1] m) <int64[3] a = {0,2,3}> { m = ReduceMean(x, a) }"
LINES = ("g (T[N,4,H,W] x) => (T[N,H,4,W] y) <int64[3] a = {1,2,3}> "
         "{ m = ReduceMean(x, a) d = Sub(x, m) y = Transpose<perm=[0,2,1,3]>(d) }")


@pytest.mark.parametrize(("text", "divisions"), [
    # The channel of a pixel; that and its line; the image, and the place in it, the remainder by the same size.
    (GROUPS, {"e / (s1 * s2)"}), (BOTH, {"e / s2", "quotient0 / s1", "quotient0 % s1"}), (BATCHES, {"e / (s1 * s2)", "e % (s1 * s2)"}),
    # All digits, of which the output alone has most.
    (LINES, {"e / s2", "e % s2", "quotient0 / s1", "quotient0 % s1"}),
])
def test_a_quotient_that_needs_no_other_is_not_taken_from_one(text: str, divisions: set[str]) -> None:
    """A place is divided by an image's columns where something asks for its row, and not on the way to what it has of
    images."""
    made = make(text.replace("T[", "float16["), planned={"N": 2, "H": 64, "W": 64})
    assert isinstance(made.kernel.code, Source)
    loops = [line for function in made.kernel.code.functions for loop in element_loops(function.body) for line in loop]
    found = {match[0] for line in loops for match in re.finditer(r"\w+ [/%] (\w+|\(.*?\))(?=;)", line)}
    assert found == divisions
    for sizes in ({"N": 2, "H": 3, "W": 5}, {"N": 1, "H": 1, "W": 1}, {"N": 3, "H": 8, "W": 4}):
        assert not failures(made, random_inputs(made, sizes), length=256)


DEVIATIONS = ("g (T[N,24,H,W] x, T[24,1,1] w, T[N,1,1,1] b) => (T[N,24,H,W] y, T[N,24,H,W] z) <int64[1] a = {1}> "
              "{ q = Mul(x, x) m = ReduceMean(q, a) r = Sqrt(m) y = Div(x, r) s = Mul(r, w) z = Add(s, b) }")


@pytest.mark.parametrize(("kind", "divides"), [("float16", False), ("bfloat16", True), ("float", True), ("double", True)])
@pytest.mark.parametrize("function", ["columns_in_registers", "columns_streaming"])
def test_what_is_known_of_a_column_is_computed_before_the_loop(function: str, kind: str, divides: bool) -> None:
    """Digits of the column, what images have in common, the root, and in float16, which does not show it, the root's
    reciprocal."""
    made = make(DEVIATIONS.replace("T[", f"{kind}["), planned={"N": 2, "H": 8, "W": 8})
    phase = made.kernel.source.partition(f"{function}(")[2].partition("// Phase 2")[2]
    before, inside = re.split(r"for \((?:int item|idx e) =", phase, maxsplit=1)
    inside = inside.partition("of::store")[0]
    assert "of::sqrt" in before and "= of::value(i2[quotient" in before and not re.findall(r"of::(sqrt|reciprocal)| [/%] ", inside)
    assert ("of::divide" in inside) is divides
    inputs = random_inputs(made, {"N": 3, "H": 5, "W": 3})
    inputs["x"][0, :, 0, 0], inputs["x"][1, 3, 1, 1], inputs["x"][2, 3, 1, 1] = 0, np.inf, np.nan
    assert not failures(made, inputs, length=24)


OF_ROWS = {
    "rows": ("g (T[N,P,64] x, T[64] w, T[N,1,64] c) => (T[N,P,64] y) { n = LayerNormalization(x, w) y = Mul(n, c) }", {"N": 8, "P": 256}),
    "columns": ("g (T[N,24,P] x, T[N,24,1] w) => (T[N,24,P] y) { n = LpNormalization<axis=1>(x) y = Mul(n, w) }", {"N": 8, "P": 256}),
    "transposed": ("g (T[N,C,P] x, T[C] w) => (T[N,P,C] y) { t = Transpose<perm=[0,2,1]>(x) y = LayerNormalization(t, w) }",
                   {"N": 32, "C": 96, "P": 3136}),
    "split": ("g (T[N,P] x, T[P] w) => (T[N,P] y) { y = LayerNormalization(x, w) }", {"N": 2, "P": 1_000_000}),
    "split columns": ("g (T[N,P,8] x) => (T[N,P,8] y) <int64[1] a = {1}> { l = ReduceL2(x, a) y = Div(x, l) }", {"N": 1, "P": 1_000_000}),
    "pieces": ("g (T[N,P,C,3] x) => (T[N,P,C,3] y) <int64[2] a = {1,3}> { l = ReduceL2(x, a) y = Div(x, l) }", {"N": 4, "P": 100_000, "C": 32}),
    "pieces of variances": ("g (T[N,P,C,3] x) => (T[N,P,C,3] y) <int64[2] a = {1,3}> { m = ReduceMean(x, a) d = Sub(x, m) q = Mul(d, d) "
                            "v = ReduceMean(q, a) r = Sqrt(v) y = Div(d, r) }", {"N": 4, "P": 100_000, "C": 32}),
    "scans": ("g (T[N,P,M] x, T[N,1,M] w) => (T[N,P,M] y) <int64 a = {2}> { s = Mul(x, w) p = Softmax(s) c = CumSum(p, a) y = Mul(c, w) }",
              {"N": 1, "P": 2, "M": 300_000}),
    "scans across": ("g (T[N,M,P,8] x, T[N,M,1,8] w) => (T[N,M,P,8] y) <int64 a = {1}> { s = Mul(x, w) p = Softmax<axis=1>(s) "
                     "c = CumSum(p, a) y = Mul(c, w) }", {"N": 8, "P": 64, "M": 9}),
}
"""Regions for all schedules with reductions, whose names theirs begin with: each computes from a row's results what all
of its elements take, and some read by vectors what depends on a part of the row's number."""

COMPUTES = re.compile(r"of::(?!value\(|load<)\w+| (?:[-+*/%<>?]|[=!<>]=) ")


@pytest.mark.parametrize("kind", ["float16", "float"])
@pytest.mark.parametrize("name", OF_ROWS)
def test_nothing_of_a_row_is_computed_for_each_of_its_elements(name: str, kind: str) -> None:
    """Where registers hold a row, where it is read again, and where blocks share it."""
    text, planned = OF_ROWS[name]
    made = make(text.replace("T[", f"{kind}["), opset=18, planned=planned)
    code = made.kernel.code
    assert isinstance(code, Source) and made.kernel.schedule == name.split()[0]
    for function in code.functions:
        for loop in element_loops(function.body):
            assert not [line for line in same_for_all(loop) if COMPUTES.search(line.partition(" = ")[2])], function.name
    for sizes in ({"N": 2, "P": 33, "M": 5, "C": 31}, {"N": 1, "P": 1, "M": 1, "C": 1}):
        assert not failures(made, random_inputs(made, sizes), length=64)


def test_all_schedules_with_reductions_are_read() -> None:
    assert {name.split()[0] for name in OF_ROWS} == {each.name for each in SCHEDULES.values() if isinstance(each, Reduction)}


def test_texts_are_the_same_each_time() -> None:
    for text in SAMPLES.values():
        assert make(text).kernel == make(text).kernel


def test_plans_survive_being_written_down() -> None:
    for text in SAMPLES.values():
        plan = make(text).kernel.plan.to_json()
        assert LaunchPlan.from_json(plan).to_json() == plan


def test_long_chains_of_shared_values_are_quick() -> None:
    """40 doublings are 40 lines, not 2**40 visits."""
    steps = " ".join(f"t{place} = Add(t{place - 1}, t{place - 1})" for place in range(1, 40))
    made = make(f"g (float[N] x) => (float[N] y) {{ t0 = Neg(x) {steps} y = Mul(t39, t39) }}")
    assert made.kernel.source.count("+ v") < 100
    made = make(f"g (float[N,8] x) => (float[N,8] y) {{ t0 = Softmax(x) {steps.replace('[N]', '[N,8]')} y = Softmax(t39) }}")
    assert len(made.kernel.source) < 40_000


@pytest.mark.parametrize("text", [
    "g (float[N,1] x, float[1,M] z) => (float[N,1] y) <int64[1] a = {1}> { s = Add(x, z) y = ReduceMax(s, a) }",
    "g (float[N,1] x, float[1,M] z) => (float y) { s = Add(x, z) y = ReduceMax<keepdims=0>(s) }",
])
def test_what_is_only_counted_must_fit_32_bits_too(text: str) -> None:
    """65,536 + 65,536 numbers are read, but 2**32 sums are counted through: not with 32-bit indices."""
    plan = make(text).kernel.plan
    counted = {guard for variant in plan.variants if variant.name.endswith("_32") for guard in variant.guards
               if guard.endswith(f"{INDEX_LIMIT} <")}
    assert any("*" in guard for guard in counted)
    assert not plan.variants[-1].guards


def test_the_gpus_own_maximum_and_minimum_give_nan() -> None:
    """The emulator has another text for them: without ``.NaN`` these instructions pass over it."""
    assert re.findall(r'asm\("(max|min)(\S*) %0, %1, %2', header("reductions")) == [("max", ".NaN.f32"), ("min", ".NaN.f32")]


def test_what_is_read_must_fit_32_bits() -> None:
    """A row of a table: places in the table count, however few elements there are in the result."""
    plan = make("g (float[V,64] table) => (float[1,64] y) <int64[1] a = {-1}, int64[1] e = {9223372036854775807}> "
                "{ s = Slice(table, a, e) y = Neg(s) }").kernel.plan
    assert plan.variants[0].steps[0].kernel.endswith("_32") and f"i0.n {INDEX_LIMIT} <" in plan.variants[0].guards
    assert plan.variants[-1].steps[0].kernel.endswith("_64")


def test_variants_end_with_one_that_runs_anything() -> None:
    for text in SAMPLES.values():
        plan = make(text).kernel.plan
        assert not plan.variants[-1].guards
        assert all(one.name != two.name for one, two in pairwise(plan.variants))
