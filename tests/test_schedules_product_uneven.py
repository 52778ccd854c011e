"""Products of rows that no whole vector divides: by what does, or by vectors that begin anywhere, against float64."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

import numpy as np
import pytest
from kernel_harness import Made, check, random_inputs, short_inputs
from test_schedules_product import product

from onnxfuse.schedules.products.pace import RESULT_ALONE, SHORTER

PLAIN = "g (T[M,K] a, T[K,N] b) => (T[M,N] y) { y = MatMul(a, b) }"
TRANSPOSED = "g (T[M,K] a, T[N,K] b, T[N] c) => (T[M,N] y) { p = Gemm<transB = 1>(a, b, c) y = Relu(p) }"
BESIDE = "g (T[M,K] a, T[K,N] b, T[M,N] r) => (T[M,N] y) { p = MatMul(a, b) y = Add(p, r) }"

SIZES = {
    "half a vector": (70, 180, 84), "a quarter": (70, 90, 86), "one by one": (33, 63, 31), "longer": (130, 197, 257),
    "both whole": (65, 64, 72), "the depth alone": (70, 77, 72), "the columns alone": (70, 72, 77), "one column": (70, 72, 1),
    "one of both": (70, 77, 84), "one of all": (70, 1, 33), "short": (1, 5, 3), "two vectors less one": (40, 15, 9),
}


def made_for(text: str, kind: str, case: str) -> tuple[Made, dict[str, int]]:
    sizes = dict(zip("MKN", SIZES[case], strict=True))
    return product(text, kind, planned=sizes), sizes


def body(made: Made) -> str:
    """Of the block that is tried first, and that copies by what lies together."""
    return next(each.body for each in made.kernel.code.functions if "_v32" in each.name)


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float"])
@pytest.mark.parametrize("text", [PLAIN, TRANSPOSED, BESIDE], ids=["plain", "transposed", "beside"])
@pytest.mark.parametrize("case", SIZES)
def test_sizes(case: str, text: str, kind: str) -> None:
    """Also of a model that runs at other sizes than it was planned for."""
    made, sizes = made_for(text, kind, case)
    given = short_inputs if kind == "float" else random_inputs
    for at in (sizes, {"M": 34, "K": 36, "N": 35}):
        check(made, given(made, at), length=at["K"])


@pytest.mark.parametrize(("text", "case", "copies"), [
    (PLAIN, "half a vector", ["copy_async_of<8>", "copy_async_of<8>"]), (PLAIN, "a quarter", ["copy_async_of<4>", "copy_async_of<4>"]),
    (PLAIN, "one by one", ["copy_shifted", "copy_shifted"]), (PLAIN, "the depth alone", ["copy_shifted", "copy_async("]),
    (PLAIN, "the columns alone", ["copy_async(", "copy_shifted"]), (TRANSPOSED, "the depth alone", ["copy_shifted", "copy_shifted"]),
    (TRANSPOSED, "the columns alone", ["copy_async(", "copy_async("]),
])
def test_operands_are_copied_by_what_lies_together(text: str, case: str, copies: list[str]) -> None:
    made, _ = made_for(text, "float16", case)
    found = [part.split("to,")[0].strip("(") + ("(" if part.startswith("copy_async(") else "")
             for part in body(made).split("of::")[1:] if part.startswith("copy_")]
    assert found == copies


@pytest.mark.parametrize(("case", "width"), [("half a vector", 4), ("a quarter", 2), ("one by one", 1), ("both whole", 8)])
def test_results_are_stored_by_what_lies_together(case: str, width: int) -> None:
    made, _ = made_for(PLAIN, "float16", case)
    assert f"constexpr int width = {width}, lanes = " in body(made).split("// Everybody is done with the operands")[1]


@pytest.mark.parametrize(("text", "case", "share"), [
    (PLAIN, "half a vector", SHORTER), (PLAIN, "a quarter", SHORTER), (PLAIN, "one by one", None),
    (PLAIN, "one of both", None)])
def test_pace(text: str, case: str, share: float | None) -> None:
    """Of vectors that begin anywhere nothing is foretold: some took longer than the runtime's."""
    made, _ = made_for(text, "float16", case)
    assert (made.kernel.pace and made.kernel.pace.share) == share


def test_results_that_are_stored_by_themselves_take_longer() -> None:
    sizes = {"M": 256, "K": 256}
    one, other = (product(TRANSPOSED, planned=sizes | {"N": columns}).kernel for columns in (1024, 1023))
    assert "specialised" in one.plan.variants[0].steps[0].kernel and one.pace and other.pace
    assert (one.pace.ends, other.pace.ends) == (0.0, pytest.approx(RESULT_ALONE * 64 * 64))
    shorter = product(TRANSPOSED, planned=sizes | {"N": 1020}).kernel
    assert shorter.pace and shorter.pace.ends == 0.0  # by vectors of four
    for sizes_of, conv, kernel in (("28,28 14,14 1,1", "strides = [2,2]", "specialised2_2x2x14"),  # boxes of windows
                                   ("16,16 16,16 3,3", "pads = [1,1,1,1]", "shared")):
        image, result, window = sizes_of.split()
        text = (f"g (T[2,{image},64] t, T[25,{window},64] v) => (T[2,{result},25] y) {{ x = Transpose<perm = [0,3,1,2]>(t) "
                f"w = Transpose<perm = [0,3,1,2]>(v) c = Conv<{conv}>(x, w) y = Transpose<perm = [0,2,3,1]>(c) }}")
        convolution = product(text).kernel
        assert kernel in convolution.plan.variants[0].steps[0].kernel
        assert convolution.pace and convolution.pace.ends <= 0.0  # whose tiles were measured with what stores them


def test_vectors_that_begin_anywhere_ask_for_no_alignment() -> None:
    made, _ = made_for(PLAIN, "float16", "one by one")
    first = next(variant for variant in made.kernel.plan.variants if ", vectors" in variant.name)
    assert not any(".addr" in guard for guard in first.guards)


def test_what_is_read_before_a_row_counts_for_nothing() -> None:
    """A vector that begins between two of memory's own has what stands before and behind it in hand: of the row before
    and the next, which are no numbers here."""
    made, sizes = made_for(PLAIN, "float16", "one by one")
    inputs = random_inputs(made, sizes)
    left = next(array for name, array in inputs.items() if name == "a") if isinstance(inputs, dict) else inputs[0]
    left[1::2] = np.nan
    check(made, inputs, length=sizes["K"])
