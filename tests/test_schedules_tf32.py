"""Products of float32 through TF32: the same forms as in 16 bits, rounding, and GPUs that have no such tensor cores.

Where operands are numbers of TF32 already, products are exact and the bound is that of sums in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from emulator import Emulator, run_plan, variants_that_hold
from kernel_harness import Made, arguments, check, compile_all, make, random_inputs
from reference import Array
from test_schedules_product import APART, CONVOLUTIONS, FORMS, PLAIN, SIZES, specialised, told

from onnxfuse.compiling import source_of
from onnxfuse.runtime.compile import architectures, default_compiler
from onnxfuse.schedules import Kernel
from onnxfuse.schedules.headers import linked, used_in
from onnxfuse.schedules.source import Source

FLOAT32 = PLAIN.replace("T[", "float[")


def tf32(array: Array) -> Array:
    """The nearest numbers of eleven digits, ties away from zero, by splitting (Dekker); these are far from the largest.
    """
    if array.dtype != np.float32:
        return array
    mantissa, exponent = np.frexp(array.astype(np.float64))
    away = np.trunc(np.abs(mantissa) * 2.0**11 + 0.5)
    return np.ldexp(np.copysign(away, mantissa) / 2.0**11, exponent).astype(np.float32)


def copied(array: Array) -> Array:
    """The nearest numbers of eleven digits as copies by tensor maps round to them, of two the even one, in float64."""
    mantissa, exponent = np.frexp(array.astype(np.float64))
    return np.ldexp(np.rint(mantissa * 2.0**11) / 2.0**11, exponent)


def product(text: str, planned: Mapping[str, int] | None = None) -> Made:
    made = make(text.replace("T[", "float["), planned=planned)
    assert made.kernel.schedule == "product" and made.kernel.rounds
    return made


def exact_inputs(made: Made, sizes: Mapping[str, int], seed: int = 0) -> dict[str, Array]:
    return {name: tf32(array) for name, array in random_inputs(made, sizes, seed).items()}


def test_sizes() -> None:
    """Whole tiles and parts of them, with vectors and without."""
    made = product(PLAIN)
    for seed, sizes in enumerate(SIZES):
        check(made, exact_inputs(made, sizes, seed), length=sizes["K"])


@pytest.mark.parametrize(("case", "pieces"), [
    ("both transposed", 2), ("the right one transposed", 2), ("heads", 2), ("results that lie transposed", 2),
    ("a gate", 3), ("a gate with other weights", 1), ("one column", 2), ("channels first", 1), ("channels last", 2),
    ("groups", 1), ("one axis, dilated", 1)])
def test_forms(case: str, pieces: int) -> None:
    """Operands are copied as they lie, by vectors of four, wherever neighbours lie side by side."""
    text, sizes = (FORMS | CONVOLUTIONS)[case]
    made = product(text, planned=sizes)
    general = next(each for each in made.kernel.code.functions if "_v32" in each.name)
    assert general.body.count("of::copy_async") == pieces
    check(made, exact_inputs(made, sizes), length=200)


def test_what_tuning_may_try() -> None:
    """Each warp multiplies by itself, in the tiles that may be quickest, with few stages and with many."""
    large = {"M": 4096, "K": 4096, "N": 4096}
    made = product(PLAIN, planned=large)
    choices = [choice for choice in made.kernel.choices if "library" not in dict(choice.settings)]
    assert len(choices) == 5 and {choice["group"] for choice in choices} == {1}
    others = [told(made, choice, large) for choice in choices]
    compile_all(others)
    for other in others:
        check(other, exact_inputs(made, {"M": 72, "K": 136, "N": 264}), length=136, limit=1, misalign=False)


@pytest.mark.parametrize("order", ["backward", 3])
def test_threads_in_any_order(order: str | int) -> None:
    made = product(PLAIN, planned={"M": 4096, "K": 4096, "N": 4096})
    check(made, exact_inputs(made, {"M": 72, "K": 268, "N": 136}), length=268, orders=[order], limit=2)


def run(made: Made, inputs: Mapping[str, Array], source: str | None = None) -> Array:
    plan = made.kernel.plan
    (result,) = run_plan(plan, made.kernel.source if source is None else source, arguments(made, inputs))
    return result


def test_operands_are_rounded_to_the_nearest() -> None:
    """Also those that are computed; what is cut off instead would err twice as far, all to one side."""
    made = product(FORMS["an operand that is computed"][0])
    inputs = random_inputs(made, {"M": 70})
    left = tf32(np.maximum(inputs["a"] * inputs["s"], 0)).astype(np.float64)
    np.testing.assert_allclose(run(made, inputs), left @ tf32(inputs["b"]), rtol=0, atol=2e-5)
    assert np.abs(left @ tf32(inputs["b"]) - left @ inputs["b"]).max() > 1e-3


LARGEST = float(np.finfo(np.float32).max)


@pytest.mark.parametrize(("number", "weight", "expected"), [
    (np.nan, 1.0, np.nan), (np.inf, 1.0, np.inf), (-np.inf, 0.0, np.nan), (LARGEST, 2.0**-40, 2.0**88),
    (-LARGEST, 2.0**-40, -(2.0**88)), (1 + 2.0**-11, 1.0, 1 + 2.0**-10), (-1 - 2.0**-11, 1.0, -1 - 2.0**-10),
    (2.0**-130, 2.0**40, 2.0**-90)])
def test_numbers_at_the_edge(number: float, weight: float, expected: float) -> None:
    """Of numbers whose nearest one would be infinite the digits are cut off; of other rows nothing shows."""
    made = product(PLAIN)
    inputs = {name: np.zeros_like(array) for name, array in random_inputs(made, {"M": 9, "K": 36, "N": 40}).items()}
    inputs["a"][3, 7], inputs["b"][7] = number, weight
    got = run(made, inputs)
    np.testing.assert_allclose(got[3], np.full(40, expected), rtol=2.0**-11 if abs(expected) > 1e9 else 0)
    assert not np.delete(got, 3, 0).any()


def test_no_number_whose_bits_would_be_cut_off_stays_none() -> None:
    made = product(PLAIN)
    inputs = random_inputs(made, {"M": 9, "K": 36, "N": 40})
    inputs["a"].view(np.uint32)[3, 7] = 0x7F800001
    assert np.isnan(run(made, inputs)).any(axis=1).nonzero()[0].tolist() == [3]


ALONG = "g (T[M,K] a, T[N,K] b) => (T[M,N] y) { y = Gemm<transB = 1>(a, b) }"
LARGE = {"M": 4096, "K": 4096, "N": 4096}


@pytest.mark.parametrize("block", [(128, 128, 2), (128, 256, 1), (256, 128, 1), (128, 64, 1), (192, 192, 1)])
def test_tiles_that_a_warp_copies(monkeypatch: pytest.MonkeyPatch, block: tuple[int, int, int]) -> None:
    """Parts of tiles, several of them a block and many stages of each, in any order of the threads; a copy rounds."""
    monkeypatch.setattr("onnxfuse.schedules.products.blocks.ROUNDED", {block: 1.0})
    (made,) = specialised(product(ALONG, LARGE), LARGE)
    for sizes, multiprocessors, order in (
            ({"M": 1, "K": 4, "N": 4}, 132, "forward"), ({"M": 197, "K": 100, "N": 136}, 1, "backward"),
            ({"M": 49, "K": 324, "N": 264}, 1, 3)):
        inputs = random_inputs(made, sizes)
        assert "one copies" in variants_that_hold(made.kernel.plan, arguments(made, inputs))[0]
        expected = copied(inputs["a"]) @ copied(inputs["b"]).T
        np.testing.assert_allclose(run(made, inputs), expected, rtol=0, atol=2e-7 * sizes["K"])
        check(made, exact_inputs(made, sizes), length=sizes["K"], limit=1, misalign=False, orders=[order],
              multiprocessors=multiprocessors)


@pytest.mark.parametrize(("number", "weight", "expected"), [
    (np.nan, 1.0, np.nan), (-np.inf, 0.0, np.nan), (LARGEST, 2.0**-40, np.inf),
    (2.0**128 - 2.0**117 - 2.0**116 + 2.0**104, 2.0**-40, 2.0**88 - 2.0**77),
    (1 + 2.0**-11, 1.0, 1.0), (-1 - 3 * 2.0**-11, 1.0, -1 - 2.0**-9), (1 + 1.5 * 2.0**-11, 1.0, 1 + 2.0**-10)])
def test_numbers_at_the_edge_that_a_warp_copies(number: float, weight: float, expected: float) -> None:
    """As cuBLAS multiplies them (H100): of two the even one, infinity among these; of other rows nothing shows."""
    made = specialised(product(ALONG, LARGE), LARGE)[0]
    inputs = {name: np.zeros_like(array) for name, array in random_inputs(made, {"M": 9, "K": 36, "N": 40}).items()}
    inputs["a"][3, 7], inputs["b"][:, 7] = number, weight
    got = run(made, inputs)
    assert np.array_equal(got[3], np.full(40, expected, np.float32), equal_nan=True)
    assert not np.delete(got, 3, 0).any()


@pytest.mark.parametrize("case", ["the right one transposed", "four", "a gate"])
def test_forms_of_tiles_that_a_warp_copies(case: str) -> None:
    """With a batch, side by side, and whatever is computed of the sums."""
    text, sizes = {**FORMS, "four": (APART["four"], {"M": 70, "K": 72, "N": 136})}[case]
    if case == "a gate":
        text = text.replace("T[72,N]", "T[N,72]").replace("{ u", (
            "{ bt = Transpose<perm = [1,0]>(b) ct = Transpose<perm = [1,0]>(c) u")).replace(
            "(a, b)", "(a, bt)").replace("(a, c)", "(a, ct)")
    made = specialised(product(text, sizes), sizes)[0]
    check(made, exact_inputs(made, sizes), length=200, limit=1, misalign=False, multiprocessors=1)


@pytest.mark.parametrize("case", ["both transposed", "heads", "results that lie transposed", "a gate"])
def test_what_no_warp_copies(case: str) -> None:
    """An operand whose neighbours are not those that are summed over: the instruction takes none."""
    text, sizes = FORMS[case]
    assert not specialised(product(text, planned=sizes), sizes)


def test_without_tensor_cores() -> None:
    """Operands are multiplied as they are, as GPUs do that have no TF32."""
    for case in ("both transposed", "a gate"):
        text, sizes = FORMS[case]
        made = product(text, planned=sizes)
        source = f"#define OF_NO_TF32 1\n{made.kernel.source}"
        check(made, random_inputs(made, sizes), length=200, source=source, misalign=False)


@pytest.mark.parametrize("architecture", architectures())
def test_every_architecture_compiles(architecture: int) -> None:
    """Without a spilled register."""
    for kernel in (product(PLAIN).kernel, product(ALONG, LARGE).kernel):
        _compiles(kernel, architecture)


def _compiles(kernel: Kernel, architecture: int) -> None:
    assert isinstance(kernel.code, Source)
    code = kernel.code.keeping({kernel.plan.variants[0].launches[0].kernel})
    source = source_of(replace(kernel, code=code).source, kernel.plan)
    figures = default_compiler().figures(source, f"sm_{architecture}")
    assert figures is not None and [each.spilled_bytes for each in figures.values()] == [0]


BANKS = """
extern "C" __global__ void banks(int* y) {
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  for (int half = 0; half < 2; ++half)
    for (int column = 0; column < 64; column += 8)
      y[(half * 8 + column / 8) * 32 + lane] = of::place_tf32<true, 32>(half * 4 + t, column + g) % 32;
}
"""


def test_lanes_read_words_of_different_banks() -> None:
    banks = np.zeros((16, 32), np.int32)
    text = linked(("onnxfuse", "mma", "tf32"), used_in(BANKS)) + BANKS
    Emulator(text).launch("banks", 1, 32, [banks])
    assert (np.sort(banks, axis=1) == np.arange(32)).all()
