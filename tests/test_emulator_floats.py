"""The emulator's float16 and bfloat16 are bit-exact, and its numeric functions are those of the device."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from emulator import Emulator

HALF, BFLOAT = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
TYPES = pytest.mark.parametrize(("name", "dtype"), [("half", HALF), ("bfloat16", BFLOAT)])

TEXT = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>
typedef __nv_bfloat16 bfloat16;
typedef __nv_bfloat162 bfloat162;
extern "C" __global__ void to_float(const T* x, float* y, int n) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i < n) y[i] = __T2float(x[i]);
}
extern "C" __global__ void from_float(const float* x, T* y, int n) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i < n) y[i] = __float2T_rn(x[i]);
}
extern "C" __global__ void truncated(const float* x, T* y, int n) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i < n) y[i] = __float2T_rz(x[i]);
}
extern "C" __global__ void from_long(const long long* x, T* y, int n) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i < n) y[i] = T(x[i]);
}
extern "C" __global__ void arithmetic(const T2* x, T2* y, int n) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= n) return;
  y[3 * i] = __hadd2(x[i], T2(x[i].y, x[i].x));
  y[3 * i + 1] = T2(x[i].x * x[i].y, __hfma(x[i].x, x[i].y, x[i].x));
  const float2 wide = __T22float2(x[i]);
  y[3 * i + 2] = __floats2T2_rn(fmaxf(wide.x, wide.y), -wide.y);
}
"""


def emulator(name: str) -> Emulator:
    """The kernels for ``half`` or ``bfloat16``."""
    return Emulator(re.sub(r"\bT(2?)\b|(?<=__)T(?=2)|(?<=2)T(?=_|2)", rf"{name}\1", TEXT))


def run(name: str, kernel: str, x: np.ndarray[Any, Any], dtype: Any) -> np.ndarray[Any, Any]:
    y = np.zeros(len(x), dtype)
    emulator(name).launch(kernel, -(-len(x) // 256), 256, [x, y, len(x)])
    return y


def same(actual: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    """Bit for bit, any NaN being equal to any other."""
    nan = np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(actual.astype(np.float32)), nan)
    unsigned = f"u{actual.itemsize}"
    np.testing.assert_array_equal(actual.view(unsigned)[~nan], expected.view(unsigned)[~nan])


@TYPES
def test_every_bit_pattern_becomes_the_right_float(name: str, dtype: np.dtype[Any]) -> None:
    x = np.arange(65536, dtype=np.uint16).view(dtype)
    same(run(name, "to_float", x, np.float32), x.astype(np.float32))


@TYPES
def test_every_bit_pattern_survives_the_round_trip(name: str, dtype: np.dtype[Any]) -> None:
    x = np.arange(65536, dtype=np.uint16).view(dtype)
    same(run(name, "from_float", x.astype(np.float32), dtype), x)


@TYPES
def test_floats_round_to_nearest_even(name: str, dtype: np.dtype[Any]) -> None:
    """Random bit patterns, all midpoints between neighbours and the floats next to them; exact, NumPy or ml_dtypes."""
    generator = np.random.default_rng(0)
    with np.errstate(invalid="ignore"):
        finite = np.arange(65536, dtype=np.uint16).view(dtype).astype(np.float64)
    finite = np.sort(finite[np.isfinite(finite)])
    middle = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
    x = np.concatenate([
        generator.integers(0, 2**32, 50000, dtype=np.uint32).view(np.float32),
        (generator.standard_normal(20000) * 10.0 ** generator.integers(-8, 6, 20000)).astype(np.float32),
        middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(-np.inf)),
        np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.996, 65520, 3.3895314e38, 3.4028235e38], np.float32),
    ])
    with np.errstate(over="ignore", invalid="ignore"):
        same(run(name, "from_float", x, dtype), x.astype(dtype))


@TYPES
def test_truncation_goes_to_the_neighbour_nearer_zero(name: str, dtype: np.dtype[Any]) -> None:
    """Random floats of all sizes; exact: no larger than the operand, and the next one out is larger."""
    generator = np.random.default_rng(1)
    x = (generator.standard_normal(20000) * 10.0 ** generator.integers(-8, 6, 20000)).astype(np.float32)
    got = run(name, "truncated", x, dtype)
    outer = (got.view(np.uint16) + np.uint16(1)).view(dtype)
    assert (np.signbit(got) == np.signbit(x)).all() and np.isfinite(got.astype(np.float32)).all()
    assert (np.abs(got.astype(np.float64)) <= np.abs(x)).all() and (np.abs(outer.astype(np.float64)) > np.abs(x)).all()


@TYPES
def test_long_integers_are_rounded_once(name: str, dtype: np.dtype[Any]) -> None:
    """Exact integers just off a midpoint, where going through float32 or float64 first would round wrongly."""
    bits = 11 if dtype == HALF else 8
    top = 15 if dtype == HALF else 62
    middle = (1 << top) + (1 << (top - bits))
    x = np.array([middle - 1, middle, middle + 1, -middle - 1, 0, 1, -1, 2**63 - 1, -(2**63), 2049, 2051], np.int64)
    step = 1 << (top - bits + 1)
    expected = [1 << top, 1 << top, (1 << top) + step, -(1 << top) - step, 0, 1, -1,
                np.inf if dtype == HALF else 2.0**63, -np.inf if dtype == HALF else -(2.0**63), 2048,
                2052 if dtype == HALF else 2048]
    same(run(name, "from_long", x, dtype), np.array(expected, np.float64).astype(dtype))


@TYPES
def test_arithmetic_rounds_once(name: str, dtype: np.dtype[Any]) -> None:
    """Sums, products and fused multiply-adds against float64, which holds them exactly before the one rounding."""
    generator = np.random.default_rng(3)
    x = (generator.standard_normal((4096, 2)) * 2.0 ** generator.integers(-4, 4, (4096, 2))).astype(dtype)
    a, b = x.astype(np.float64).T
    y = np.zeros((len(x), 3, 2), dtype)
    emulator(name).launch("arithmetic", 16, 256, [x, y, len(x)])
    expected = np.stack([np.stack([a + b, b + a], 1), np.stack([a * b, a * b + a], 1),
                         np.stack([np.maximum(a, b), -b], 1)], 1)
    same(y.reshape(-1), rounded(expected, dtype).reshape(-1))


def rounded(exact: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Finite float64 rounded once to a type of fewer bits, subnormals included."""
    bits, smallest = (11, -13) if dtype == HALF else (8, -125)
    _, exponent = np.frexp(exact)
    last_place = np.maximum(exponent, smallest) - bits
    return np.asarray(np.ldexp(np.rint(np.ldexp(exact, -last_place)), last_place), dtype)


MATHS = """
extern "C" __global__ void k(const float* x, float* y, int* z, int n) {
  const int i = threadIdx.x;
  if (i >= n) return;
  y[6 * i] = max(x[i], 0.f);
  y[6 * i + 1] = fminf(x[i], NAN);
  y[6 * i + 2] = __int_as_float(__float_as_int(x[i]) & 0x7fffffff);
  y[6 * i + 3] = __saturatef(x[i]);
  y[6 * i + 4] = x[i] == INFINITY;
  y[6 * i + 5] = rsqrtf(x[i]);
  z[6 * i] = __float2int_rn(x[i]);
  z[6 * i + 1] = __float2int_rz(x[i]);
  z[6 * i + 2] = (int)min(__float2ll_rd(x[i]), 5ll);
  z[6 * i + 3] = (int)__float2uint_rz(x[i]);
  z[6 * i + 4] = __umulhi(0x80000001u, (unsigned)i * 2u) + __popc(i) + __clz(i);
  z[6 * i + 5] = max(i - 3, 0) + __ffs(i);
}
"""


def test_numeric_functions_on_edges() -> None:
    """float32, exact; conversions to integers saturate and NaN gives 0, maxima drop a NaN."""
    x = np.array([0.5, 1.5, -2.5, 3e9, -3e9, np.nan, np.inf, 0.25], np.float32)
    y, z = np.zeros((8, 6), np.float32), np.zeros((8, 6), np.int32)
    Emulator(MATHS).launch("k", 1, 32, [x, y, z, 8])
    np.testing.assert_array_equal(y[:, 0], [0.5, 1.5, 0, 3e9, 0, 0, np.inf, 0.25])
    np.testing.assert_array_equal(y[:, 1], x)
    np.testing.assert_array_equal(y[:, 2], np.abs(x))
    np.testing.assert_array_equal(y[:, 3], [0.5, 1, 0, 1, 0, 0, 1, 0.25])
    np.testing.assert_array_equal(y[:, 4], x == np.inf)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(y[:, 5], (1 / np.sqrt(x.astype(np.float64))).astype(np.float32))
    big = 2**31 - 1
    np.testing.assert_array_equal(z[:, 0], [0, 2, -2, big, -big - 1, 0, big, 0])
    np.testing.assert_array_equal(z[:, 1], [0, 1, -2, big, -big - 1, 0, big, 0])
    np.testing.assert_array_equal(z[:, 2], [0, 1, -3, 5, np.int64(-3e9).astype(np.int32), 0, 5, 0])
    np.testing.assert_array_equal(z[:, 3].view(np.uint32), [0, 1, 0, 3000000000, 0, 0, 2**32 - 1, 0])
    i = np.arange(8)
    count, zeros = [int(n).bit_count() for n in i], [32 - int(n).bit_length() for n in i]
    np.testing.assert_array_equal(z[:, 4], (0x80000001 * i * 2 >> 32) + count + zeros)
    np.testing.assert_array_equal(z[:, 5], np.maximum(i - 3, 0) + [(int(n) & -int(n)).bit_length() for n in i])
