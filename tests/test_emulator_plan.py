"""Launch plans in the emulator: sizes, variants, steps, scratch, and what is found wrong."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import launch_models
import ml_dtypes
import numpy as np
import pytest
from emulator import Buffer, EmulatorError, run_plan, variants_that_hold
from onnx import TensorProto

from onnxfuse.emulator.memory import CANARY
from onnxfuse.lowering.launch import Check, LaunchPlan, Output, Step, Variant
from onnxfuse.lowering.routines import ROUTINES

SOURCE = """
extern "C" __global__ void doubled4(const float4* __restrict__ x, float4* __restrict__ y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) {
    const float4 v = x[i];
    y[i] = make_float4(2 * v.x, 2 * v.y, 2 * v.z, 2 * v.w);
  }
}
extern "C" __global__ void doubled(const float* __restrict__ x, float* __restrict__ y, long long n) {
  const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2 * x[i];
}
"""
DOUBLED = LaunchPlan(
    region="doubled",
    inputs=1,
    symbols=("i0.0", "i0.1"),
    checks=(Check("s1 0 !=", "the rows have no elements"),),
    outputs=(Output(TensorProto.FLOAT, ("s0", "s1")),),
    variants=(
        Variant(
            "vector",
            (Step("doubled4", ("i0.n 4 // 32 ceil", "1", "1"), ("32", "1", "1"), ("i0", "o0", "i32:i0.n 4 //")),),
            ("i0.n 4 % not", "i0.addr 16 % not", "o0.addr 16 % not"),
        ),
        Variant("scalar", (Step("doubled", ("i0.n 32 ceil", "1", "1"), ("32", "1", "1"), ("i0", "o0", "i64:i0.n")),)),
    ),
)


@pytest.mark.parametrize(
    ("shape", "misalign", "holding"),
    [((3, 8), 0, ["vector", "scalar"]), ((3, 7), 0, ["scalar"]), ((3, 8), 1, ["scalar"]),
     ((3, 8), 4, ["vector", "scalar"]), ((0, 8), 0, ["vector", "scalar"])],
)
def test_every_variant_that_holds_gives_the_result(shape: tuple[int, int], misalign: int, holding: list[str]) -> None:
    """float32, exact."""
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    offsets = {0: misalign}
    assert variants_that_hold(DOUBLED, [x], misalign=offsets) == holding
    for variant in [None, *holding, 1]:
        (y,) = run_plan(DOUBLED, SOURCE, [x], variant=variant, misalign=offsets)
        assert (y.shape, y.dtype) == (shape, np.dtype(np.float32))
        np.testing.assert_array_equal(y, 2 * x)


def test_an_output_may_be_the_memory_of_an_input() -> None:
    """As a caller may bind it; a guard sees that, and what no launch writes is what was there."""
    kept = replace(DOUBLED, variants=(Variant("kept", (), ("i0.at o0.at ==",)), *DOUBLED.variants))
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    assert variants_that_hold(kept, [x]) == ["vector", "scalar"]
    np.testing.assert_array_equal(run_plan(kept, SOURCE, [x])[0], 2 * x)
    np.testing.assert_array_equal(run_plan(kept, SOURCE, [x], shared={0: 0})[0], x)
    np.testing.assert_array_equal(run_plan(kept, SOURCE, [x], variant="scalar", shared={0: 0})[0], 2 * x)
    with pytest.raises(EmulatorError, match="output 0 has not the bytes of input 0"):
        run_plan(DOUBLED, SOURCE, [x.astype(np.float64)], shared={0: 0})


def test_inputs_of_any_layout_arrive_in_c_order() -> None:
    x = np.arange(24, dtype=np.float32).reshape(8, 3).T
    np.testing.assert_array_equal(run_plan(DOUBLED, SOURCE, [x])[0], 2 * x)


MEANS = """
#include <cuda_bf16.h>
extern "C" __global__ void sums(const __nv_bfloat16* x, float* sum, int columns) {
  float total = 0;
  for (int i = threadIdx.x; i < columns; i += 32) total += __bfloat162float(x[blockIdx.x * columns + i]);
  for (int lanes = 16; lanes > 0; lanes /= 2) total += __shfl_xor_sync(~0u, total, lanes);
  if (threadIdx.x == 0) sum[blockIdx.x] = total;
}
extern "C" __global__ void divided(const float* sum, __nv_bfloat16* mean, bool* big, int rows, int columns, int least) {
  const int i = blockIdx.x * 32 + threadIdx.x;
  if (i >= rows) return;
  mean[i] = __float2bfloat16(sum[i] / columns);
  big[i] = sum[i] > least;
}
"""
MEAN = LaunchPlan(
    region="means",
    inputs=1,
    symbols=("i0.0", "i0.1", "h1.0"),
    checks=(),
    outputs=(Output(TensorProto.BFLOAT16, ("s0", "1")), Output(TensorProto.BOOL, ("s0", "h0.n"))),
    variants=(
        Variant(
            "two steps",
            (
                Step("sums", ("s0", "1", "1"), ("32", "1", "1"), ("i0", "t0", "i32:s1")),
                Step("divided", ("s0 32 ceil", "1", "1"), ("32", "1", "1"),
                     ("t0", "o0", "o1", "i32:s0", "i32:s1", "i32:s2")),
            ),
            ("80 sm <=",),
        ),
    ),
    scratch=("s0 4 *",),
)


def test_steps_share_scratch_and_host_inputs_reach_the_plan() -> None:
    """bfloat16 of small integers' means: float32 holds the sums, so the one rounding is ml_dtypes' own; exact."""
    x = np.random.default_rng(0).integers(-9, 9, (40, 100)).astype(ml_dtypes.bfloat16)
    for order in ("forward", "backward", 3):
        mean, big = run_plan(MEAN, MEANS, [x], [[5], np.array([20])], order=order)
        sums = x.astype(np.float32).sum(axis=1, keepdims=True)
        assert mean.dtype == ml_dtypes.bfloat16 and big.dtype == np.bool_
        np.testing.assert_array_equal(mean, (sums / np.float32(100)).astype(ml_dtypes.bfloat16))
        np.testing.assert_array_equal(big, sums > 20)


def failure(plan: LaunchPlan, source: str = SOURCE, shape: tuple[int, ...] = (3, 8), variant: str | None = None) -> str:
    with pytest.raises(EmulatorError) as error:
        run_plan(plan, source, [np.ones(shape, np.float32)], variant=variant)
    return str(error.value)


def test_a_plan_that_does_not_fit_says_so() -> None:
    assert failure(DOUBLED, shape=(3, 0)) == "region doubled: the rows have no elements"
    assert failure(DOUBLED, shape=(3, 7), variant="vector") == (
        "region doubled, variant vector: the guard 'i0.n 4 % not' does not hold"
    )
    assert failure(DOUBLED, variant="tiled") == "region doubled has no variant 'tiled'"
    assert failure(replace(DOUBLED, inputs=2)) == "region doubled has 2 tensor inputs, not 1"
    assert failure(replace(DOUBLED, variants=(replace(DOUBLED.variants[1], guards=("0",)),))) == (
        "region doubled: no variant's guards hold"
    )


def test_an_output_that_is_left_unwritten_is_found() -> None:
    source = SOURCE.replace("if (i < n) y[i] = 2", "if (i < n && i != 9) y[i] = 2")
    assert failure(DOUBLED, source, variant="scalar") == (
        "region doubled, variant scalar: 1 of 24 elements of output 0 were not written, the first at (1, 1)"
    )


def test_an_output_that_looks_like_the_poison_is_not_mistaken() -> None:
    """Bytes of 0xFB written on purpose."""
    poison = np.full((3, 8), 0xFBFBFBFB, np.uint32).view(np.float32) / 2
    np.testing.assert_array_equal(run_plan(DOUBLED, SOURCE, [poison])[0], 2 * poison)


def test_a_step_with_a_wrong_argument_is_found() -> None:
    (step,) = DOUBLED.variants[1].steps
    where = "kernel doubled, block (0, 0, 0), thread"
    for arguments, message in {
        ("i0", "o0", "i32:i0.n"): f"kernel doubled, argument 2: {np.int32(24)!r} given for an integer of 8 bytes",
        ("i0", "o0"): "kernel doubled has 3 parameters, not 2",
        ("o0", "i0", "i64:i0.n"): f"{where} (0, 0, 0): write at byte 0 of input i0 of 96 bytes, which is read-only",
        ("i0", "t0", "i64:i0.n"): "the plan passes 't0', which it does not have",
        ("i0", "o0", "i64:i0.n 1 +"): f"{where} (24, 0, 0): read 0 bytes past the end of input i0 of 96 bytes",
    }.items():
        plan = replace(DOUBLED, variants=(Variant("wrong", (replace(step, arguments=arguments),)),))
        assert failure(plan) == message


@pytest.mark.parametrize("before", [True, False], ids=["read only", "written"])
def test_a_mapping_that_is_used_again_is_as_new(before: bool) -> None:
    with Buffer("first", 100, None) as first:
        first.write(np.full(100, 7, np.uint8), read_only=before)
        address = first.address
    with Buffer("second", 100) as second:
        assert (second.address, second.read_only) == (address, False)
        assert (second.read(np.dtype(np.uint8), (100,)) == CANARY).all()
        second.check()
        second.write(np.zeros(100, np.uint8))
        ctypes.memset(second.address - 1, 0, 1)
        with pytest.raises(EmulatorError, match="a write 1 bytes before second of 100 bytes"):
            second.check()
    with Buffer("third", 100) as third:
        third.check()


def truth(product: launch_models.Product, a: np.ndarray, b: np.ndarray, *added: np.ndarray) -> np.ndarray:
    """What a product's node gives, in float64."""
    left, right = (x.astype(np.float64) for x in (a, b))
    out = (left.swapaxes(-1, -2) if product.transpose_a else left) @ (
        right.swapaxes(-1, -2) if product.transpose_b else right)
    out = sum((more.astype(np.float64) for more in added), out)
    if product.activation == "relu":
        return np.maximum(out, 0)
    inner = np.sqrt(2 / np.pi) * (out + 0.044715 * out**3)
    return 0.5 * out * (1 + np.tanh(inner)) if product.activation == "gelu_tanh" else out


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (3, 31, 33, 17), (2, 5, 1, 64), (1, 1, 33, 4097)], ids=str)
@pytest.mark.parametrize("name", launch_models.PRODUCTS)
def test_products_by_a_library(name: str, sizes: tuple[int, ...]) -> None:
    """To half a unit in the last place of the result's type and the order of sums; of TF32 to its own."""
    product, (batch, m, n, k) = launch_models.PRODUCTS[name], sizes
    dtype = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}.get(product.dtype, np.float32)
    random = np.random.default_rng(k)
    shapes = [(batch, k, m) if product.transpose_a else (batch, m, k), (n, k) if product.transpose_b else (k, n)]
    shapes[1] = shapes[1] if product.one_b else (batch, *shapes[1])
    shapes += [*([(n,)] if product.bias else []), *([(batch, m, n)] if product.added else [])]
    inputs = [random.standard_normal(shape).astype(dtype) for shape in shapes]
    (got,) = run_plan(product.fused().plan, "", inputs, variant=0)
    wanted = truth(product, *inputs)
    unit = {"float16": 2**-11, "bfloat16": 2**-8, "tf32": 2**-10, "float32": 2**-20}[product.dtype]
    assert got.dtype == dtype and np.abs(got.astype(np.float64) - wanted).max() <= unit * max(4.0, np.sqrt(k) * 4)


def test_a_product_of_a_sum_through_scratch() -> None:
    """A kernel and a call one after the other, and one workspace beside what the kernel writes."""
    product = launch_models.PRODUCTS["product"]
    a, b = (np.random.default_rng(0).integers(-2, 3, shape).astype(np.float32) for shape in ((2, 5, 3), (2, 3, 7)))
    fused = replace(product, workspace=64).of_sum()
    (got,) = run_plan(fused.plan, fused.source, [a, b])
    np.testing.assert_array_equal(got, (a + 1) @ b)


def test_operands_are_rounded_to_tf32_to_the_nearest() -> None:
    product = replace(launch_models.PRODUCTS["product_tf32"], activation="", one_b=False)
    a = np.array([1 + 2**-11, 1 + 2**-11 - 2**-20, -1 - 3 * 2**-11, np.inf, np.nan, 2**-130], np.float32)
    (got,) = run_plan(product.fused().plan, "", [a.reshape(6, 1, 1), np.ones((6, 1, 1), np.float32)])
    np.testing.assert_array_equal(got.reshape(-1), [1 + 2**-10, 1, -1 - 2**-9, np.inf, np.nan, 2**-130])


@pytest.mark.parametrize(("sizes", "fault"), [
    ({"k": "0"}, "has sizes that are none"), ({"stride_c": "s1 s3 * 1 -"}, "has sizes that are none"),
    ({"transpose_b": "2"}, "has sizes that are none"), ({"m": "-1"}, "has sizes that are none"),
    ({"algorithm": "16"}, "has sizes that are none"),
    ({"stride_a": "s1 s2 * 1 +"}, "takes 31 elements of float32 of input i0, which has 120 bytes"),
    ({"stride_b": "s2 s3 * 1 +"}, "takes 43 elements of float32 of input i1"),
    ({"stride_c": "s1 s3 * 1 +"}, "takes 71 elements of float32 of output o0"),
])
def test_calls_that_would_leave_their_operands(sizes: dict[str, str], fault: str) -> None:
    plan = launch_models.PRODUCTS["product"].fused().plan
    ((call,),) = (variant.steps for variant in plan.variants)
    names = ROUTINES[call.routine].sizes
    changed = replace(call, sizes=tuple(sizes.get(name, size) for name, size in zip(names, call.sizes, strict=True)))
    plan = replace(plan, variants=(replace(plan.variants[0], steps=(changed,)),))
    with pytest.raises(EmulatorError, match=fault):
        run_plan(plan, "", [np.ones((2, 5, 3), np.float32), np.ones((2, 3, 7), np.float32)])
