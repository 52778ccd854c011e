"""Results of products that lanes store where they have the sums, and those that are quantised all at once: ties, steps
of either sign, what is no number, residuals, in every block that a product may have."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from emulator import run_plan
from kernel_harness import Made, arguments, check, make, random_inputs, told
from numpy.typing import NDArray

from onnxfuse.schedules.products.integers import IntegerShape

PLANNED = {"M": 4096, "N": 4096}
SCALED = "x = DequantizeLinear(a, s) w = DequantizeLinear<axis = 0>(b, s) p = Gemm<transB = 1>(x, w) q = Add(p, c) "
INTEGERS = f"g (int8[M,64] a, int8[N,64] b, float s, float[N] c, float o, int8 f) => (int8[M,N] y) {{ {SCALED} y = QuantizeLinear(q, o, f) }}"
POSITIVE = INTEGERS.replace("y = QuantizeLinear(q, o, f)", "r = Relu(q) y = QuantizeLinear(r, o, f)")
ZEROS = INTEGERS.replace("float s,", "float s, int8 z,").replace("(a, s)", "(a, s, z)").replace("<axis = 0>(b, s)", "<axis = 0>(b, s, z)")
FLOATS = "g (float16[M,64] a, float16[N,64] b, float16[N] c, float16 o, int8 f) => (int8[M,N] y) { p = Gemm<transB = 1>(a, b) q = Add(p, c) y = QuantizeLinear(q, o, f) }"
RESIDUAL = ("g (int8[M,64] a, int8[N,64] b, float16 s, float16[N] c, float16[M,N] d, float16 o, int8 f) => (int8[M,N] y, float16[M,N] r) "
            f"{{ {SCALED} e = Add(q, d) r = Relu(e) y = QuantizeLinear(r, o, f) }}")
TEXTS = {"integers": INTEGERS, "positive": POSITIVE, "zero points": ZEROS, "floats": FLOATS}


def inputs_of(made: Made, sizes: Mapping[str, int], step: float, seed: int = 0) -> dict[str, NDArray]:
    """Whole numbers, so that sums and results are exact, and many quotients are ties."""
    random, found = np.random.default_rng(seed), random_inputs(made, sizes, seed)
    for name, array in found.items():
        most = {"a": 4, "b": 4, "c": 20, "d": 20}.get(name, 9)
        found[name] = random.integers(-most, most + 1, array.shape).astype(array.dtype)
    return found | {"o": np.asarray(step, found["o"].dtype), **({"s": np.ones_like(found["s"])} if "s" in found else {})}


def wanted(inputs: Mapping[str, NDArray], *, positive: bool = False) -> tuple[NDArray, NDArray]:
    """Results, and what they are quantised to: by division, ties to even, as ONNX has it; no number is zero steps."""
    a, b = (inputs[name].astype(np.float64) - float(inputs.get("z", 0)) for name in "ab")
    sums = a @ b.T + inputs["c"].astype(np.float64) + inputs.get("d", np.zeros(())).astype(np.float64)
    results = np.where(np.isnan(sums), sums, np.maximum(sums, 0)) if positive else sums
    steps = np.rint(np.nan_to_num(results / float(inputs["o"]), nan=0.0, posinf=1e9, neginf=-1e9))
    return results, np.clip(steps + int(inputs["f"]), -128, 127).astype(np.int8)


def got(made: Made, inputs: Mapping[str, NDArray]) -> list[NDArray]:
    return run_plan(made.kernel.plan, made.kernel.source, arguments(made, inputs))


def ways(made: Made, text: str) -> list[Made]:
    """The schedule's own, and every other that does not lay sums out."""
    return [made, *(told(made, choice, PLANNED) for choice in made.kernel.choices)]


@pytest.mark.parametrize("case", TEXTS)
@pytest.mark.parametrize("step", [6.0, -6.0, 0.75, 50.0])
def test_ties_go_to_the_even_number(case: str, step: float) -> None:
    """A product with a reciprocal would take half of them to the other one: that of six is too large, that of fifty too
    small."""
    made = make(TEXTS[case], planned=PLANNED)
    assert "of::quantised<signed char" in made.kernel.source
    for each in ways(made, case):
        inputs = inputs_of(each, {"M": 70, "N": 144}, step)
        _, numbers = wanted(inputs, positive=case == "positive")
        np.testing.assert_array_equal(got(each, inputs)[0], numbers)


@pytest.mark.parametrize("case", TEXTS)
def test_what_is_no_number_or_far_out(case: str) -> None:
    """In bias, and steps that a reciprocal has no number for."""
    made = make(TEXTS[case], planned=PLANNED)
    floats = case == "floats"
    for step in (1.0, 6e-8, 60_000.0) if floats else (1.0, 1e-38, 1e35):
        for each in ways(made, case):
            inputs = inputs_of(each, {"M": 33, "N": 48}, step)
            inputs["c"][:6] = [np.nan, np.inf, -np.inf, 6e4, -6e4, 0.0] if floats else [np.nan, np.inf, -np.inf, 3e38, -3e38, 0.0]
            with np.errstate(invalid="ignore", over="ignore"):
                _, numbers = wanted(inputs, positive=case == "positive")
            np.testing.assert_array_equal(got(each, inputs)[0], numbers)


@pytest.mark.parametrize("sizes", [{"M": 1, "N": 8}, {"M": 31, "N": 33}, {"M": 130, "N": 4104}, {"M": 257, "N": 72}])
@pytest.mark.parametrize("case", TEXTS)
def test_odd_sizes(case: str, sizes: Mapping[str, int]) -> None:
    """Rows and columns that fill no tile, and no vector."""
    made = make(TEXTS[case], planned=PLANNED)
    inputs = inputs_of(made, sizes, 2.5)
    _, numbers = wanted(inputs, positive=case == "positive")
    np.testing.assert_array_equal(got(made, inputs)[0], numbers)


def test_residuals_are_read_where_sums_are() -> None:
    """And what they are added to is stored twice, as half precision too."""
    made = make(RESIDUAL, planned=PLANNED)
    assert "of::Vector<__half, width> read0[2 * " in made.kernel.source
    for each in ways(made, RESIDUAL):
        for sizes in ({"M": 70, "N": 144}, {"M": 33, "N": 40}):
            inputs = inputs_of(each, sizes, 6.0)
            results, numbers = wanted(inputs, positive=True)
            bytes_, halves = got(each, inputs)
            np.testing.assert_array_equal(bytes_, numbers)
            np.testing.assert_array_equal(halves, results.astype(np.float16))


@pytest.mark.parametrize("wide", [128, 1024, 4224])
def test_tiles_beside_one_another(wide: int) -> None:
    """Few follow one another by rows, of which the compiler knows how many there are; many by strips of rows."""
    made = make(INTEGERS.replace("N", f"{wide}"), planned={"M": 4096})
    assert ("tile / beyond" in made.kernel.source) == (wide <= 1024)
    inputs = inputs_of(made, {"M": 300}, 2.5)
    np.testing.assert_array_equal(got(made, inputs)[0], wanted(inputs)[1])


def test_every_column_is_computed_once_for_two_rows() -> None:
    """What is known of it stands before the loop over rows, as does what a kernel knows."""
    source = make(INTEGERS, planned=PLANNED).kernel.source
    once = source.index("const float of_column_x"), source.index("float known0[width];")
    assert once[0] < once[1] < source.index("of::own_sums<width>(")
    assert "of::Bytes<signed char, width> results0[" in source and "of::store_two(" in source


@pytest.mark.parametrize("order", ["backward", 5])
def test_threads_in_any_order(order: str | int) -> None:
    """Totals are there when they are read."""
    made = make(ZEROS, planned=PLANNED)
    check(made, inputs_of(made, {"M": 70, "N": 144}, 2.5), orders=[order], limit=1)


def test_shared_memory_is_that_of_stages() -> None:
    """Sums that lanes store need none; 264 of 128 rows would take 132 KiB."""
    direct, laid = (IntegerShape(128, 256, 2, together=True, width=width) for width in (8, 0))
    assert direct.is_direct and not laid.is_direct and direct.shared < 100 * 1024 < 132 * 1024 < laid.shared
    assert not IntegerShape(64, 64, 2, width=16).is_direct  # a warp has 32 columns
