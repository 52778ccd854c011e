"""Products of float32 whose operands are not rounded, as a session's own where use_tf32 is 0: as exact as float32."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from kernel_harness import Made, Region, check, fails, only, parse, random_inputs, region_of, told

from onnxfuse.ir.exact import exactly
from onnxfuse.ir.tensors import Program
from onnxfuse.lowering.routines import LibraryCall
from onnxfuse.refusal import Refusal
from onnxfuse.schedules import Kernel, Request, make_kernel

FORMS: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "bias and GELU": ("g (float[M,K] a, float[K,N] b, float[N] c) => (float[M,N] y) { p = MatMul(a, b) s = Add(p, c) y = Gelu(s) }",
                      {"M": 70, "K": 136, "N": 72}),
    "sizes that nothing divides": ("g (float[M,K] a, float[N,K] b, float[M,N] r) => (float[M,N] y) { p = Gemm<transB = 1>(a, b) y = Add(p, r) }",
                                   {"M": 33, "K": 31, "N": 17}),
    "across": ("g (float[2,K,M] a, float[2,N,K] b) => (float[2,M,N] y) { u = Transpose<perm = [0,2,1]>(a) v = Transpose<perm = [0,2,1]>(b) y = MatMul(u, v) }",
               {"M": 40, "K": 72, "N": 24}),
    "a gate": ("g (float[M,72] a, float[72,40] b, float[72,40] c) => (float[M,40] y) { u = MatMul(a, b) w = MatMul(a, c) s = Sigmoid(u) t = Mul(u, s) y = Mul(t, w) }",
               {"M": 65}),
    "a convolution": ("g (float[2,5,9,11] x, float[8,5,3,3] w, float[8] b) => (float[2,8,9,11] y) { c = Conv<pads = [1,1,1,1]>(x, w, b) y = Relu(c) }", {}),
    "one column": ("g (float[M,K] a, float[K,1] b) => (float[M,1] y) { p = MatMul(a, b) y = Neg(p) }", {"M": 5, "K": 257}),
    "attention": ("g (float[2,3,65,40] q, float[2,3,40,97] k, float[2,3,97,24] v, float[2,1,1,97] m) => (float[2,3,65,24] y) { s = MatMul(q, k) t = Add(s, m) p = Softmax(t) y = MatMul(p, v) }", {}),
    "attention, keys transposed, shares kept": ("g (float[1,2,33,16] q, float[1,2,49,16] k, float[1,2,49,16] v) => (float[1,2,33,16] y, float[1,2,33,49] p) { t = Transpose<perm = [0,1,3,2]>(k) s = MatMul(q, t) p = Softmax(s) y = MatMul(p, v) }", {}),
}


def made_of(form: str) -> Made:
    """A form's kernel, of exact products."""
    region = region_of(parse(FORMS[form][0], 20))
    assert not isinstance(region, Refusal)
    return with_kernel(region, exactly(region.lowered.program))


def with_kernel(region: Region, program: Program) -> Made:
    lowered = replace(region.lowered, program=program)
    kernel = make_kernel(Request(lowered, "test"))
    assert isinstance(kernel, Kernel)
    return Made(region.model, region.graph, lowered, kernel)


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    """Within what sums of float32 are, of numbers with all their digits; and nothing is said to be rounded."""
    made, sizes = made_of(form), FORMS[form][1]
    assert not made.kernel.rounds and made.kernel.pace is None
    inputs = digits(made, sizes)
    length = max((array.shape[-1] for array in inputs.values()), default=1)
    check(made, inputs, length=max(length, sizes.get("K", 0)))
    rounding = with_kernel(made, region_of(made.model).lowered.program)
    assert rounding.kernel.rounds and fails(rounding, inputs, length=max(length, sizes.get("K", 0)))


def test_other_tiles() -> None:
    """Also what tuning may choose: none that copies by tensor maps, and the library's products of float32."""
    made = made_of("bias and GELU")
    assert len(made.kernel.choices) > 3
    for choice in made.kernel.choices:
        way = told(made, choice, {})
        assert not way.kernel.plan.maps and "group" in dict(choice.settings) and choice["group"] == 1
        check(only(way, way.kernel.plan.variants[:1]), digits(made, {"M": 70, "K": 136, "N": 72}), length=136, misalign=False)
    library = made_of("sizes that nothing divides")
    found = [told(library, choice, {}) for choice in library.kernel.choices if "library" in dict(choice.settings)]
    calls = [step for way in found for step in way.kernel.plan.variants[0].steps if isinstance(step, LibraryCall)]
    assert calls and {call.dtype for call in calls} == {"float32"}


def test_numbers_of_any_size() -> None:
    """Large and small ones, of which what is left is none; infinity, and what is no number, show where they belong."""
    made = made_of("sizes that nothing divides")
    inputs = digits(made, {"M": 33, "K": 31, "N": 17})
    large = {**inputs, "a": inputs["a"] * np.float32(2.0**100), "b": inputs["b"] * np.float32(2.0**20)}
    small = {**inputs, "a": inputs["a"] * np.float32(2.0**-60), "b": inputs["b"] * np.float32(2.0**-20), "r": 0 * inputs["r"]}
    most = {name: array.copy() for name, array in inputs.items()}
    most["a"][3, :], most["b"][5, :] = np.finfo(np.float32).max / 64, 1.0
    odd = {name: array.copy() for name, array in inputs.items()}
    odd["a"][2, 4], odd["a"][7, 1], odd["b"][9, 30] = np.inf, np.nan, -np.inf
    for each in (large, small, most, odd):
        check(made, each, length=31, limit=1, misalign=False)


def digits(made: Made, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Inputs with all digits of float32."""
    generator = np.random.default_rng(7)
    return {name: (array * (1 + generator.random(array.shape) / 16)).astype(np.float32)
            for name, array in random_inputs(made, sizes).items()}
