"""Special values, small values, and what is refused."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from itertools import product

import ml_dtypes
import numpy as np
import onnxruntime
import pytest
from kernel_harness import FLOATING, NAMES, check, make, refused
from reference import FLOATS, Array, evaluate
from test_lowering_operators import CASES

POINTWISE = {case.name: case for case in CASES if case.name in (
    "unary", "activations", "contrib", "float tests", "arithmetic", "comparisons", "where")}


def special_values(kind: str) -> Array:
    """NaN, infinities, zeros of both signs, the largest, smallest and smallest normal numbers, and some between."""
    dtype = FLOATS[NAMES[kind]]
    info = ml_dtypes.finfo(dtype)
    ordinary = [0.0, 1e-3, 0.5, 1.0, 3.0, float(info.max), float(info.tiny), float(info.smallest_subnormal), np.inf]
    return np.array([np.nan, *ordinary, *(-value for value in ordinary)]).astype(dtype)


@pytest.mark.parametrize("kind", FLOATING)
@pytest.mark.parametrize("name", POINTWISE)
def test_special_values(name: str, kind: str) -> None:
    """Tolerance: of each element's own magnitude in float64, at least of 1."""
    made = POINTWISE[name].made(kind)
    values = special_values(kind)
    names = [value.name for value in made.graph.inputs if value.dtype == NAMES[kind]]
    combined = np.array(list(product(values, repeat=min(len(names), 2))))
    inputs = {name: combined[:, place % 2] for place, name in enumerate(names)}
    for value in made.graph.inputs:
        if value.name not in inputs:
            inputs[value.name] = np.arange(len(combined)) % 2 == 0
    expected = evaluate(made.model, inputs)
    with np.errstate(all="ignore"):
        scales = {output.name: np.maximum(np.abs(np.nan_to_num(expected[output.name].astype(np.float64))), 1)
                  for output in made.graph.outputs}
    check(made, inputs, scales=scales)


@pytest.mark.parametrize("kind", FLOATING)
@pytest.mark.parametrize("name", ["unary", "activations", "contrib"])
def test_small_values(name: str, kind: str) -> None:
    """Where all values are small the output's magnitude is small, and so is the allowed error."""
    made = POINTWISE[name].made(kind)
    rng = np.random.default_rng(5)
    check(made, {"x": (rng.standard_normal(65) * 1e-3).astype(FLOATS[NAMES[kind]])})


@pytest.mark.parametrize("kind", FLOATING)
@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
def test_special_values_that_are_scattered(reduction: str, kind: str) -> None:
    """Tolerance: of each element's own magnitude in float64, at least of 1; a largest or smallest of what cannot be
    compared is the update, as the runtime's kernels have it."""
    values = special_values(kind)
    count = len(values)
    places = ", ".join(str(place) for place in range(1, count + 1))
    made = make(f"g ({kind}[N, {count + 2}] x, {kind}[N, {count}] u) => ({kind}[N, {count + 2}] y) "
                f"<int64[{count}, 1] i = {{{places}}}> {{ r = Transpose(x) v = Transpose(u) "
                f"s = ScatterND<reduction=\"{reduction}\">(r, i, v) y = Transpose(s) }}", opset=18)
    x = np.broadcast_to(values[:, None], (count, count + 2))
    inputs = {"x": x.copy(), "u": np.broadcast_to(values, (count, count)).copy()}
    with np.errstate(all="ignore"):
        expected = evaluate(made.model, inputs)["y"]
        check(made, inputs, scales={"y": np.maximum(np.abs(np.nan_to_num(expected)), 1)})


def test_negative_zero_keeps_its_sign() -> None:
    made = make("g (float[N] x) => (float[N] a, float[N] b, float[N] c) "
                "{ n = Neg(x) a = Reciprocal(n) f = Ceil(x) b = Reciprocal(f) d = Identity(x) c = Reciprocal(d) }")
    check(made, {"x": np.array([0.0, -0.0, 0.0, -0.0], np.float32)})


@pytest.mark.parametrize(("kind", "limit"), [("float16", 65504.0), ("bfloat16", 3.3e38)])
def test_an_overflow_between_operators_disappears(kind: str, limit: float) -> None:
    """float16 between operators is float32, as float64 is in the reference; Casts and comparisons round."""
    made = make(f"g ({kind}[N] x) => ({kind}[N] y, bool[N] inf, {kind}[N] w) "
                f"{{ d = Add(x, x) y = Sub(d, x) inf = IsInf(d) c = Cast<to={NAMES[kind]}>(d) w = Sub(c, x) }}")
    x = np.array([limit, 1.0, -limit, 2.0] * 4).astype(FLOATS[NAMES[kind]])
    expected = evaluate(made.model, {"x": x})
    if kind == "float16":
        assert np.isfinite(expected["y"]).all() and expected["inf"].tolist() == [True, False, True, False] * 4
        assert np.isinf(expected["w"][0])
        check(made, {"x": x})


def test_roundings_that_a_kernel_must_make() -> None:
    """1 + 2**-11 is 1 in float16: floor, comparisons and casts see 1, further arithmetic the sum."""
    made = make("g (float16[N] x, float16[N] s) => (float16[N] f, bool[N] e, int32[N] i, float16[N] y, float[N] c) "
                "<float16 k = {2048}> { t = Sub(x, s) f = Floor(t) e = Equal(t, x) i = Cast<to=6>(t) d = Sub(t, x) "
                "  y = Mul(d, k) c = Cast<to=1>(t) }")
    x, s = np.array([1.0, 2.0, 4.0, 1.0], np.float16), np.array([2.0**-13, 2.0**-12, 2.0**-11, 0.5], np.float16)
    expected = evaluate(made.model, {"x": x, "s": s})
    assert expected["f"].tolist() == [1, 2, 4, 0] and expected["e"].tolist() == [True, True, True, False]
    assert expected["y"].tolist() == [-0.25, -0.5, -1.0, -1024.0]
    check(made, {"x": x, "s": s})


def test_integers_divide_towards_zero_and_by_zero_give_zero() -> None:
    made = make("g (int32[N] x, int32[N] z) => (int32[N] q, int32[N] m, int32[N] r) "
                "{ q = Div(x, z) m = Mod(x, z) r = Mod<fmod=1>(x, z) }")
    inputs = {"x": np.array([7, -7, 7, -7, 5, -2147483648], np.int32), "z": np.array([2, 2, -2, -2, 0, 3], np.int32)}
    expected = evaluate(made.model, inputs)
    assert expected["q"].tolist() == [3, -3, -3, 3, 0, -715827882]
    assert expected["m"].tolist() == [1, 1, -1, -1, 0, 1]
    assert expected["r"].tolist() == [1, -1, 1, -1, 0, -2]
    check(made, inputs)


def test_powers_of_integers() -> None:
    """A negative exponent gives 0 but for 1 and -1, as truncated division would."""
    made = make("g (int64[N] x, int64[N] p) => (int64[N] y) { y = Pow(x, p) }")
    x, p = [2, -2, 3, 0, 1, -1, -1, 5], [10, 3, 0, 0, -3, -3, -4, -1]
    from emulator import run_plan

    (found,) = run_plan(made.kernel.plan, made.kernel.source, [np.array(x), np.array(p)])
    assert found.tolist() == [1024, -8, 1, 1, 1, -1, 1, 0]


REFUSALS = [
    ("g (float[N] x, float[N] z) => (float[N] y) { y = Mod(x, z) }", "unsupported-type", "Mod of float32 has no kernel"),
    ("g (int32[N] x) => (int32 y) { y = ReduceL1<keepdims=0>(x) }", "unsupported-type", "ReduceL1 of int32 has no kernel"),
    ("g (string[N] x) => (string[N] y) { y = Identity(x) }", "unsupported-type",
     "'x' has element type 8, which kernels do not hold"),
    ("g (float[N] x) => (int64[K] y) { y = NonZero(x) }", "no-lowering", "NonZero has no lowering"),
    ("g (float[N] x) => (bool[N] y) { y = IsInf<detect_positive=0,detect_negative=0>(x) }", "constant-result",
     "IsInf that detects neither sign is always false"),
    ("g (float[N,5] x, int64[1] a) => (float[N,1] y) { y = ReduceSum(x, a) }", "unknown-sizes",
     "the contents of 'a' are not known before the model runs"),
    ("g (float[N,5,5] x) => (float[N,5,5] y) <int64[1] a = {1}, int64[1] b = {2}> { m = ReduceMax(x, a) n = ReduceMax(x, b) "
     "s = Sub(x, m) y = Sub(s, n) }", "reduction-structure", "reductions over different rows meet in one region"),
    ("g (float[N,5] x, float[N,7] z) => (float[N,5] a, float[N,7] b) { a = Softmax(x) b = Softmax(z) }",
     "iteration-shape", "an output of 7*N elements fits neither the rows nor their elements"),
    ("g (float[N,5] x, float[5,N] z) => (float[N,5] y) <int64[1] a = {-1}> { m = ReduceMax(z, a) t = Transpose(m) "
     "n = ReduceMax(x, a) s = Sub(x, n) y = Add(s, t) }", "reduction-structure", "reductions over different rows meet in one region"),
    ("g (float[N,5] x, float[2,5] u) => (float[N,5] y) <int64[2,1] i = {3,3}> { y = ScatterND(x, i, u) }",
     "repeated-places", "ScatterND writes a place more than once"),
    ("g (float[8,5] x, float[2,5] u) => (float[8,5] y) <int64[2,1] i = {-8,0}> { y = ScatterND(x, i, u) }",
     "repeated-places", "ScatterND writes a place more than once"),
    ("g (float[N,5] x, float[3,5] u) => (float[N,5] y) <int64[3,1] i = {0,1,3}> { y = ScatterND(x, i, u) }",
     "scattered-places", "ScatterND writes places that are no grid of equal steps along the axes"),
    ("g (float[N,5] x, float[3,5] u) => (float[N,5] y) <int64[3,1] i = {-1,0,1}> { y = ScatterND(x, i, u) }",
     "scattered-places", "ScatterND writes places that are no grid of equal steps along the axes"),
    ("g (float[3,5] x, float[4] u) => (float[3,5] y) <int64[4,2] i = {0,0, 0,1, 1,0, 2,1}> { y = ScatterND(x, i, u) }",
     "scattered-places", "ScatterND writes places that are no grid of equal steps along the axes"),
    ("g (float[3,5] x, float[4] u) => (float[3,5] y) <int64[4,2] i = {0,0, 1,0, 0,1, 1,1}> { y = ScatterND(x, i, u) }",
     "scattered-places", "ScatterND writes places that are no grid of equal steps along the axes"),
    ("g (float[3,5] x, float[2,5] u) => (float[3,5] y) <int64[2,1] i = {2,3}> { y = ScatterND(x, i, u) }",
     "unknown-places", "ScatterND writes outside of an axis of 3 elements"),
    ("g (float[N,5] x, int64[2,1] i, float[2,5] u) => (float[N,5] y) { y = ScatterND(x, i, u) }",
     "unknown-places", "ScatterND has indices that are not known before the model runs"),
    *((f"g ({given}) => (float[N,{wide}] y) <int64[1] last = {{-1}}, int64 o = {{0}}, int64 one = {{1}}> "
       f"{{ s = Shape(u) n = Gather(s, o) p = Range(o, n, one) q = Unsqueeze(p, last) i = Concat<axis = -1>({parts}) "
       "y = ScatterND(x, i, u) }", "unknown-places", "ScatterND has indices that are not known before the model runs")
      for given, wide, parts in (
          ("float[N,9] x, float[L,9] u", "9", "q"),  # of more rows, perhaps
          ("float[N,N] x, float[N] u", "N", "q, q"))),  # along a diagonal
    ("g (float[3,5] x, float[2,2] u) => (float[3,5] y) <int64[2,2] i = {0,1, 1,0}> { y = ScatterElements<axis=1>(x, i, u) }",
     "scattered-places", "ScatterElements writes places that are no grid of equal steps along the axes"),
    ("g (float[N,5] x, float[N,2] u) => (float[N,5] y) <int64[1] p = {1}, int64[1] c = {2}> { s = Shape<start=0,end=1>(x) "
     "t = Concat<axis=0>(s, c) i = Expand(p, t) y = ScatterElements<axis=1>(x, i, u) }",
     "repeated-places", "ScatterElements writes a place more than once"),
    ("g (bool[N,5] x, bool[1,5] u) => (bool[N,5] y) <int64[1,1] i = {1}> { y = ScatterND<reduction=\"mul\">(x, i, u) }",
     "unsupported-mode", "a ScatterND of this type with the reduction 'mul' has no kernel"),
    ("g (float[1,2,4,4] x, float[1,3,3,2] p) => (float[1,2,3,3] y) { y = GridSample<mode=\"cubic\">(x, p) }",
     "unsupported-mode", "a GridSample in mode 'cubic', padded by 'zeros', has no kernel"),
    ("g (float[1,2,2,2,2,2] x, float[1,3,1,1,1,4] p) => (float[1,2,3,1,1,1] y) { y = GridSample(x, p) }",
     "unsupported-mode", "a GridSample along 4 axes has no kernel"),
    ("g (int32[1,2,4,4] x, float[1,3,3,2] p) => (int32[1,2,3,3] y) { y = GridSample<mode=\"nearest\">(x, p) }",
     "unsupported-type", "a GridSample of what are no floats has no kernel"),
    ("g (float[1,2,4,4] x, float[1,3,3,2] p) => (float[1,2,3,3] y) { e = Exp(x) y = GridSample(e, p) }",
     "computed-again", "what a GridSample reads would be computed again for each element that is made of it"),
    ("g (float[\"@L\"] x) => (float[\"@L\"] y) { y = Neg(x) }", "reserved-name",
     "a size of 'x' has a name that begins with '@', as only loop variables of kernels may"),
    ("g (float[N] x) => (float[N] y) { " + " ".join(
        f"{'y' if place == 250 else f't{place}'} = Neg({f't{place - 1}' if place > 1 else 'x'})" for place in range(1, 251))
     + " }", "region-depth", "the region has a chain of more than 200 operations; kernels hold no longer ones"),
]


@pytest.mark.parametrize(("text", "code", "message"), REFUSALS, ids=[f"{r[1]}-{place}" for place, r in enumerate(REFUSALS)])
def test_refusals(text: str, code: str, message: str) -> None:
    refusal = refused(text)
    assert (refusal.code, refusal.message) == (code, message)


@pytest.mark.parametrize("way", ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"])
@pytest.mark.parametrize("sizes", [(4, 8), (8, 4), (5, 7)])
def test_a_linear_resize_of_what_is_no_number(way: str, sizes: tuple[int, int]) -> None:
    """Infinity, and what is no number, come out where ONNX Runtime has them: at the end an infinite element stays so."""
    from emulator import run_plan

    made = make(f"g (float[1,1,{sizes[0]},{sizes[0]}] x) => (float[1,1,{sizes[1]},{sizes[1]}] y) "
                f"<int64[4] s = {{1,1,{sizes[1]},{sizes[1]}}}> {{ y = Resize<mode = \"linear\", coordinate_transformation_mode = \"{way}\">(x, , , s) }}")
    x = np.random.default_rng(0).standard_normal((1, 1, sizes[0], sizes[0])).astype(np.float32)
    x[0, 0, :, -1], x[0, 0, 0, 0], x[0, 0, 2, 1] = np.inf, -np.inf, np.nan
    session = onnxruntime.InferenceSession(made.model.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x": x})
    (found,) = run_plan(made.kernel.plan, made.kernel.source, [x])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["linear", "nearest"])
def test_a_grid_sample_at_the_edge(mode: str, padding: str) -> None:
    """Elements and what is past the border weigh as ONNX Runtime has it, those too that are no number; a place that is
    none, or lies nowhere near, reads nothing outside."""
    from emulator import run_plan

    made = make("g (float[1,1,3,4] x, float[1,1,P,2] p) => (float[1,1,1,P] y) "
                f"{{ y = GridSample<mode = \"{mode}\", padding_mode = \"{padding}\">(x, p) }}")
    x = np.random.default_rng(0).standard_normal((1, 1, 3, 4)).astype(np.float32)
    x[0, 0, 0, 0], x[0, 0, 1, 2], x[0, 0, 2, 3] = np.inf, np.nan, -np.inf
    along = [-3.0, -1.5, -1.25, -1.0, -0.75, -0.5, -0.3, 0.0, 0.25, 0.75, 0.9999999, 1.0, 1.0000001, 1.25, 2.5]
    grid = np.array([(one, other) for one in along for other in along], np.float32)[None, None]
    session = onnxruntime.InferenceSession(made.model.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x": x, "p": grid})
    (found,) = run_plan(made.kernel.plan, made.kernel.source, [x, grid])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    grid[0, 0, :4] = [(np.nan, 0), (0, np.inf), (-1e30, 1e30), (-np.inf, np.nan)]
    run_plan(made.kernel.plan, made.kernel.source, [x, grid])  # the emulator sees what is read outside
