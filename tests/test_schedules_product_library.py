"""Products that a library runs: for which regions it is offered, and what its calls compute, against float64."""

# ruff: noqa: E501 (a model is one line)

from __future__ import annotations

from collections.abc import Mapping

import kernel_harness
import pytest
from emulator import variants_that_hold
from kernel_harness import Made, arguments, check, make, only, random_inputs, short_inputs

from onnxfuse.lowering.launch import EXTENDED, LaunchPlan
from onnxfuse.lowering.lower import Lowered
from onnxfuse.lowering.routines import LibraryCall
from onnxfuse.schedules import SCHEDULES, Choice, Kernel, parse_choice, sharing, words
from onnxfuse.schedules.products.library import RANKS
from onnxfuse.schedules.source import Source

REGIONS = {
    "plain": ("g (T[M,K] a, T[K,N] b) => (T[M,N] y) { y = MatMul(a, b) }", ("gemm",)),
    "both transposed": ("g (T[K,M] a, T[N,K] b) => (T[M,N] y) { y = Gemm<transA = 1, transB = 1>(a, b) }", ("gemm",)),
    "right transposed": ("g (T[M,K] a, T[N,K] b) => (T[M,N] y) { y = Gemm<transB = 1>(a, b) }", ("gemm",)),
    "a bias": ("g (T[M,K] a, T[K,N] b, T[N] c) => (T[M,N] y) { y = Gemm(a, b, c) }", ("gemm_bias",)),
    "rows of a batch": ("g (T[3,M,K] a, T[K,N] b, T[N] c) => (T[3,M,N] y) { p = MatMul(a, b) y = Add(c, p) }", ("gemm_bias",)),
    "a batch": ("g (T[3,M,K] a, T[3,N,K] b) => (T[3,M,N] y) { t = Transpose<perm = [0,2,1]>(b) y = MatMul(a, t) }", ("gemm",)),
    "a batch of a batch": ("g (T[2,3,M,K] a, T[2,3,K,N] b) => (T[2,3,M,N] y) { y = MatMul(a, b) }", ("gemm",)),
    "heads of a group": ("g (T[2,4,M,K] a, T[2,1,K,N] b) => (T[2,4,M,N] y) { y = MatMul(a, b) }", ("gemm",)),
    "a batch with a bias": ("g (T[3,M,K] a, T[3,K,N] b, T[N] c) => (T[3,M,N] y) { p = MatMul(a, b) y = Add(p, c) }", ("gemm_bias",)),
    "a bias and a residual of one row": ("g (T[1,K] a, T[K,N] b, T[N] c, T[1,N] r) => (T[1,N] y) { p = MatMul(a, b) s = Add(p, c) y = Add(s, r) }", ("gemm_bias_add",)),
    "a residual": ("g (T[M,K] a, T[K,N] b, T[M,N] c) => (T[M,N] y) { p = MatMul(a, b) y = Add(c, p) }", ("gemm_add",)),
    "a bias and a residual": ("g (T[3,M,K] a, T[K,N] b, T[N] c, T[3,M,N] r) => (T[3,M,N] y) { p = MatMul(a, b) s = Add(p, c) y = Add(s, r) }", ("gemm_bias_add",)),
    "a residual of a batch": ("g (T[3,M,K] a, T[3,K,N] b, T[N] c, T[3,M,N] r) => (T[3,M,N] y) { p = MatMul(a, b) s = Add(r, p) y = Add(c, s) }", ("gemm_bias_add",)),
    "GELU": ("g (T[M,K] a, T[K,N] b) => (T[M,N] y) { p = MatMul(a, b) y = Gelu<approximate = \"tanh\">(p) }", ("gemm",)),
    "a bias and GELU": ("g (T[M,K] a, T[K,N] b, T[N] c) => (T[M,N] y) { p = MatMul(a, b) y = com.microsoft.FastGelu(p, c) }", ("gemm_bias",)),
    "other sizes of the result": ("g (T[M,K] a, T[K,40] b) => (T[M,8,5] y) <int64[3] h = {-1,8,5}> { p = MatMul(a, b) y = Reshape(p, h) }", ("gemm",)),
    "a convolution of one place": ("g (T[2,9,M,K] t, T[N,K,1,1] w, T[N] c) => (T[2,9,M,N] y) { x = Transpose<perm = [0,3,1,2]>(t) p = Conv(x, w, c) y = Transpose<perm = [0,2,3,1]>(p) }", ("gemm_bias",)),
    "queries, keys and values": ("g (T[M,K] a, T[K,N] b, T[K,N] c, T[K,N] d, T[N] e) => (T[M,N] x, T[M,N] y, T[M,N] z) { x = MatMul(a, b) p = MatMul(a, c) y = Add(p, e) z = MatMul(a, d) }", ("gemm", "gemm_bias", "gemm")),
}

OTHERS = {
    "a convolution": "g (T[2,16,9,9] x, T[24,16,3,3] w) => (T[2,24,7,7] y) { y = Conv(x, w) }",
    "GELU by the error function": "g (T[M,K] a, T[K,N] b) => (T[M,N] y) { p = MatMul(a, b) y = Gelu(p) }",
    "two results of one product": "g (T[M,K] a, T[K,N] b, T[N] c) => (T[M,N] x, T[M,N] y) { x = MatMul(a, b) y = Add(x, c) }",
    "two residuals": "g (T[M,K] a, T[K,N] b, T[M,N] c, T[M,N] r) => (T[M,N] y) { p = MatMul(a, b) s = Add(p, c) y = Add(s, r) }",
    "a residual for all of a batch": "g (T[3,M,K] a, T[3,K,N] b, T[M,N] c) => (T[3,M,N] y) { p = MatMul(a, b) y = Add(p, c) }",
    "two biases": "g (T[M,K] a, T[K,N] b, T[N] c, T[N] d) => (T[M,N] y) { p = MatMul(a, b) s = Add(p, c) y = Add(s, d) }",
    "one bias for all": "g (T[M,K] a, T[K,N] b, T[1] c) => (T[M,N] y) { p = MatMul(a, b) y = Add(p, c) }",
    "a bias of rows": "g (T[M,K] a, T[K,N] b, T[M,1] c) => (T[M,N] y) { p = MatMul(a, b) y = Add(p, c) }",
    "a bias that is padded": "g (T[M,K] a, T[K,40] b, T[30] c) => (T[M,40] y) <int64[2] o = {0,10}> { s = Pad(c, o) p = MatMul(a, b) y = Add(p, s) }",
    "a bias that is computed": "g (T[M,K] a, T[K,N] b, T[N] c) => (T[M,N] y) { s = Neg(c) p = MatMul(a, b) y = Add(p, s) }",
    "an operand that is computed": "g (T[M,K] a, T[K,N] b) => (T[M,N] y) { s = Relu(a) y = MatMul(s, b) }",
    "an operand that is cut out": "g (T[M,96] a, T[64,N] b) => (T[M,N] y) <int64[1] s = {16}, int64[1] e = {80}, int64[1] x = {1}> { c = Slice(a, s, e, x) y = MatMul(c, b) }",
    "results as heads": "g (T[2,M,K] a, T[K,96] b) => (T[2,6,M,16] y) <int64[4] h = {2,-1,6,16}> { p = MatMul(a, b) r = Reshape(p, h) y = Transpose<perm = [0,2,1,3]>(r) }",
    "operands as heads": "g (T[2,M,4,16] a, T[2,4,16,N] b) => (T[2,4,M,N] y) { t = Transpose<perm = [0,2,1,3]>(a) y = MatMul(t, b) }",
    "one for all of a batch": "g (T[N,K] a, T[3,K,M] b) => (T[3,N,M] y) { y = MatMul(a, b) }",
    "a result of another type": "g (T[M,K] a, T[K,N] b) => (double[M,N] y) { p = MatMul(a, b) y = Cast<to = 11>(p) }",
    "a sum that is rounded before": "g (float16[M,K] a, float16[K,N] b, float[N] c) => (float16[M,N] y) { p = MatMul(a, b) q = Cast<to = 1>(p) s = Add(q, c) y = Cast<to = 10>(s) }",
    "what is no number": "g (T[M,K] a, T[K,N] b, T[N] c) => (T[M,N] y) { p = MatMul(a, b) s = Add(p, c) y = Relu(s) }",
    "two results of a product": "g (T[M,K] a, T[K,N] b) => (T[M,N] x, T[M,N] y) { x = MatMul(a, b) y = Relu(x) }",
    "a gate": "g (T[M,K] a, T[K,N] b, T[K,N] c) => (T[M,N] y) { u = MatMul(a, b) w = MatMul(a, c) y = Mul(u, w) }",
}

SIZES = ({"M": 1, "K": 1, "N": 1}, {"M": 31, "K": 33, "N": 17}, {"M": 3, "K": 4097, "N": 5}, {"M": 0, "K": 5, "N": 5})
PLANNED = {"M": 256, "K": 256, "N": 256}


def offered(kernel: Kernel) -> list[Choice]:
    """Choices that are the library's."""
    return [choice for choice in kernel.choices if "library" in dict(choice.settings)]


def told(text: str, kind: str, rank: int = 0, planned: Mapping[str, int] | None = None) -> Made:
    """A region whose first variant is the library's."""
    made = make(text.replace("T[", f"{kind}["), planned=planned)
    return kernel_harness.told(made, Choice.of("product", library=rank), planned or {})


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float"])
@pytest.mark.parametrize("case", REGIONS)
def test_calls(case: str, kind: str) -> None:
    text, routines = REGIONS[case]
    made = told(text, kind)
    call, *_ = made.kernel.plan.variants
    assert tuple(step.routine for step in call.calls) == routines and call.steps == call.calls
    assert {step.dtype for step in call.calls} == {"tf32" if kind == "float" else kind}
    for seed, sizes in enumerate(SIZES):
        inputs = (short_inputs if kind == "float" else random_inputs)(made, sizes, seed)
        check(only(made, [call]), inputs, length=2 * sizes["K"])


@pytest.mark.parametrize("case", OTHERS)
def test_what_a_library_does_not_do_is_not_offered(case: str) -> None:
    made = make(OTHERS[case].replace("T[", "float16["), planned=PLANNED)
    assert made.kernel.schedule == "product" and not offered(made.kernel)
    first = Choice.of("product", library=0)
    assert kernel_harness.told(made, first, PLANNED).kernel == made.kernel


def test_an_empty_sum_is_left_to_a_kernel() -> None:
    made = told(REGIONS["a bias"][0], "float16")
    inputs = random_inputs(made, {"M": 5, "K": 0, "N": 5})
    assert made.kernel.plan.variants[0].name not in variants_that_hold(made.kernel.plan, arguments(made, inputs))
    check(made, inputs)


def test_nothing_runs_unmeasured() -> None:
    """The schedule's own choice calls no library; of what tuning may try the library's first comes first."""
    kernel = make(REGIONS["plain"][0].replace("T[", "float16["), planned=PLANNED).kernel
    assert not any(variant.calls for variant in kernel.plan.variants) and not kernel.plan.scratch
    assert [choice["library"] for choice in offered(kernel)] == list(range(RANKS))
    assert kernel.choices[0] == offered(kernel)[0] and kernel.choices[1 - RANKS:] == tuple(offered(kernel)[1:])


@pytest.mark.parametrize("rank", [0, RANKS - 1])
def test_what_is_generated_stands_behind(rank: int) -> None:
    """All of it, so that it runs where there is no library; and the plan says that it wants one.  The text tells that it
    stands behind, so that nobody takes the library's times in production for the kernels'."""
    own = make(REGIONS["plain"][0].replace("T[", "float16["), planned=PLANNED).kernel
    kernel = told(REGIONS["plain"][0], "float16", rank, PLANNED).kernel
    assert kernel.choice == Choice.of("product", library=rank)
    assert kernel.plan.variants[1:] == own.plan.variants
    assert isinstance(kernel.code, Source) and isinstance(own.code, Source) and kernel.source != own.source
    assert (kernel.code.functions, kernel.code.entries) == (own.code.functions, own.code.entries)
    (call,) = kernel.plan.variants[0].steps
    assert isinstance(call, LibraryCall) and call.sizes[-1] == str(rank)
    assert kernel.plan.version == EXTENDED and LaunchPlan.from_json(kernel.plan.to_json()).variants == kernel.plan.variants


def test_words() -> None:
    choice = Choice.of("product", library=3)
    assert words(choice) == "by cuBLASLt, algorithm 3 of those that it proposes"
    assert parse_choice(str(choice)) == choice
    assert parse_choice('{"schedule":"product","library":3,"rows":64}') is None


def test_a_call_shares_no_launch() -> None:
    """Also where what stands behind it could: that one would run in its place."""
    planned = {"M": 1, "K": 256, "N": 256}
    made = make(REGIONS["plain"][0].replace("T[", "float16["), planned=planned)
    called = kernel_harness.told(made, Choice.of("product", library=0), planned).kernel
    assert sharing(made.kernel) and not sharing(called)


@pytest.mark.parametrize(("name", "kind", "rank", "exact"), [
    ("plain", "float", 0, False), ("plain", "float16", 0, True), ("plain", "float", None, True),
    ("right transposed", "float", None, False), ("right transposed", "float16", None, True)])
def test_a_library_may_round_operands_otherwise(name: str, kind: str, rank: int | None, exact: bool) -> None:
    """Of float32 to TF32, and nothing else; so may blocks whose tiles a warp copies."""
    made = make(REGIONS[name][0].replace("T[", f"{kind}["), planned=PLANNED)
    choice = None if rank is None else Choice.of("product", library=rank)
    leeway = SCHEDULES["product"].leeway(kernel_harness.told(made, choice, PLANNED).kernel)
    assert leeway == 0.0 if exact else 2.0**-11 < leeway < 2.0**-8


def test_a_rank_that_is_not_offered_is_the_own_choice() -> None:
    made = make(REGIONS["plain"][0].replace("T[", "float16["), planned=PLANNED)
    assert isinstance(made.lowered, Lowered) and SCHEDULES["product"].words(Choice.of("product", library=99))
    assert kernel_harness.told(made, Choice.of("product", library=99), PLANNED).kernel == made.kernel
