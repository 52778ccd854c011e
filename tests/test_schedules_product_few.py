"""Products of few rows: weights either way round, what surrounds them, every choice, sizes that nothing divides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from kernel_harness import Made, check, make, only, random_inputs, told

from onnxfuse.compiling import source_of
from onnxfuse.runtime.compile import default_compiler
from onnxfuse.schedules import Kernel, Request, make_kernel

CASES: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "one row": ("g (T[1,520] a, T[520,136] b) => (T[1,136] y) { y = MatMul(a, b) }", {}),
    "along, a bias and a residual": (
        "g (T[M,328] a, T[200,328] b, T[200] c, T[M,200] r) => (T[M,200] y) "
        "{ p = Gemm<transB = 1>(a, b, c) y = Add(p, r) }", {"M": 7}),
    "a gate": (
        "g (T[M,264] a, T[264,104] b, T[264,104] c) => (T[M,104] y) { u = MatMul(a, b) w = MatMul(a, c) "
        "s = Sigmoid(u) t = Mul(u, s) y = Mul(t, w) }", {"M": 16}),
    "a gate, along": (
        "g (T[M,264] a, T[104,264] b, T[104,264] c) => (T[M,104] y) { u = Gemm<transB = 1>(a, b) "
        "w = Gemm<transB = 1>(a, c) s = Sigmoid(u) t = Mul(u, s) y = Mul(t, w) }", {"M": 2}),
    "batches, no vectors of results": (
        "g (T[3,M,72] a, T[3,72,36] b) => (T[3,M,36] y) { y = MatMul(a, b) }", {"M": 9}),
    "two rows, a bias, along": (
        "g (T[M,328] a, T[200,328] b, T[200] c) => (T[M,200] y) { p = Gemm<transB = 1>(a, b, c) y = Relu(p) }",
        {"M": 2}),
    "one row, batches": ("g (T[5,1,100] a, T[5,100,48] b) => (T[5,1,48] y) { y = MatMul(a, b) }", {}),
    "fewer than one step": ("g (T[M,8] a, T[8,24] b) => (T[M,24] y) { y = MatMul(a, b) }", {"M": 3}),
    "odd sizes": ("g (T[M,33] a, T[33,31] b) => (T[M,31] y) { y = MatMul(a, b) }", {"M": 1}),
    "windows that reach over the border": (
        "g (T[M,8,1,2] x, T[64,8,3,2] w, T[64] b) => (T[M,64,1,1] y) "
        "{ c = Conv<pads = [1,0,1,1], strides = [2,2]>(x, w, b) y = Relu(c) }", {"M": 2}),
    "windows that reach over the border, on tensor cores": (
        "g (T[M,8,3,3] x, T[3,3,8,72] t) => (T[M,72,1,1] y) { w = Transpose<perm = [3,2,0,1]>(t) "
        "y = Conv<pads = [1,1,1,1], strides = [3,3], dilations = [2,2]>(x, w) }", {"M": 9}),
    "heads": (
        "g (T[M,1,128] a, T[128,96] b, T[96] c) => (T[M,6,1,16] y) <int64[4] h = {0,0,6,16}> { p = MatMul(a, b) "
        "q = Add(p, c) r = Reshape(q, h) y = Transpose<perm = [0,2,1,3]>(r) }", {"M": 4}),
}

EVERY = ("one row", "two rows, a bias, along", "heads", "along, a bias and a residual")
"""Cases of which each way is run."""


def ways(text: str, kind: str, planned: Mapping[str, int]) -> list[Made]:
    """The kernel in each of these ways, with the variant alone that is one."""
    made = make(text.replace("T[", f"{kind}["), planned=planned)
    found = []
    for choice in (None, *made.kernel.choices):
        one = told(made, choice, planned)
        assert one.kernel.choice == choice
        if "warps share what is summed over" in one.kernel.plan.variants[0].name:
            found.append(only(one, one.kernel.plan.variants[:1]))
    return found


@pytest.mark.parametrize("case", CASES)
def test_right(case: str) -> None:
    """With as many rows as planned, and with fewer."""
    text, planned = CASES[case]
    found = ways(text, "bfloat16" if case == "heads" else "float16", planned)
    assert found and {"tensor cores" if made.kernel.plan.variants[0].name.startswith(("tiles of 8", "tiles of 16")) else
                      "lanes" for made in found} == {"lanes" if planned.get("M", 1) <= 4 else "tensor cores"}
    for made in found if case in EVERY else found[:1]:
        for rows in {planned.get("M", 1), 1}:
            check(made, random_inputs(made, {"M": rows}), length=520, misalign=False)


def test_no_more_rows_than_it_has() -> None:
    """A variant for few rows is not launched for more, for which there is the tile that is expected to take least."""
    text, planned = CASES["fewer than one step"]
    (made, *_) = ways(text, "float16", planned)
    assert any("4 <=" in guard for guard in made.kernel.plan.variants[0].guards)
    every, larger = (make(text.replace("T[", "float16["), planned=sizes).kernel for sizes in (planned, {"M": 4096}))
    assert every.plan.variants[0] == make_kernel(Request(made.lowered, "test", planned), "product").plan.variants[0]  # type: ignore[union-attr]
    named = [variant.name for variant in every.plan.variants[1:]]
    assert len(named) > 2 and named[-2:] == [variant.name for variant in larger.plan.variants[-2:]]


def test_what_is_infinite_shows_in_its_row_and_column_alone() -> None:
    (made, *_) = ways(CASES["one row"][0].replace("[1,", "[3,"), "float16", {})
    inputs = random_inputs(made, {})
    inputs["a"][1, 17], inputs["b"][519, 5], inputs["b"][3, 100] = np.inf, np.nan, -np.inf
    check(made, inputs, length=520, misalign=False)


@pytest.mark.parametrize(("kind", "rows"), [("float16", 17), ("float", 1)])
def test_where_there_is_none(kind: str, rows: int) -> None:
    assert not ways("g (T[M,520] a, T[520,136] b) => (T[M,136] y) { y = MatMul(a, b) }", kind, {"M": rows})


@pytest.mark.parametrize(("architecture", "case"), [
    ("sm_75", "a gate"), ("sm_90", "a gate"), ("sm_90", "a gate, along")])
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_it_fits_registers(architecture: str, case: str, rows: int) -> None:
    """As many as leave room for the blocks that are to be beside one another."""
    text = CASES[case][0].replace("264", "2048").replace("104", "5632")
    for made in ways(text, "float16", {"M": rows}):
        kernel = make_kernel(Request(made.lowered, "test", {"M": rows}, made.kernel.choice), "product")
        assert isinstance(kernel, Kernel)
        code = kernel.code.keeping({name for name in kernel.plan.kernels if "few" in name})  # type: ignore[union-attr]
        figures = default_compiler().figures(source_of(replace(kernel, code=code).source, kernel.plan), architecture)
        assert figures and {each.spilled_bytes for each in figures.values()} == {0}


@pytest.mark.parametrize(("width", "own"), [(3, "tiles of 64 x 64"), (1, "tiles of 4 x")])
def test_what_windows_share_is_not_read_by_lanes(width: int, own: str) -> None:
    """Of three channels of a result, which are rows: a tile reads a pixel once for all of its windows that see it."""
    made = make(f"g (float16[2,64,64,64] i, float16[3,{width},{width},64] v) => (float16[2,3,Y,X] y) "
                "{ x = Transpose<perm = [0,3,1,2]>(i) w = Transpose<perm = [0,3,1,2]>(v) y = Conv(x, w) }")
    assert made.kernel.plan.variants[0].name.startswith(own)
    assert any("sharers" in str(choice) for choice in made.kernel.choices) or width == 1
