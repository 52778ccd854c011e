"""The emulator runs right kernels right and finds what is wrong with wrong ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from emulator import Emulator, EmulatorError, Order

ORDERS: tuple[Order, ...] = ("forward", "backward", 1, 2)


def test_vector_add_is_exact() -> None:
    """float32, exact, NumPy as reference; the last block is partial."""
    emulator = Emulator(
        """
        extern "C" __global__ void __launch_bounds__(128) add(const float* __restrict__ a, const float* __restrict__ b,
                                                              float* __restrict__ c, int n) {
          const int i = blockIdx.x * blockDim.x + threadIdx.x;
          if (i < n) c[i] = __ldg(a + i) + b[i];
        }
        """
    )
    generator = np.random.default_rng(0)
    a, b = generator.standard_normal((2, 1000)).astype(np.float32)
    c = np.zeros_like(a)
    emulator.launch("add", 8, 128, [a, b, c, 1000])
    np.testing.assert_array_equal(c, a + b)


REDUCE = """
extern "C" __global__ void in_shared(const int* x, int* y) {
  __shared__ int part[256];
  const int t = threadIdx.x;
  part[t] = x[blockIdx.x * 256 + t];
  __syncthreads();
  for (int half = 128; half > 0; half /= 2) {
    if (t < half) part[t] += part[t + half];
    BARRIER;
  }
  if (t == 0) y[blockIdx.x] = part[0];
}
template <class T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes >>= 1) value += __shfl_xor_sync(0xffffffffu, value, lanes);
  return value;
}
template <class T>
__device__ T block_sum(T value) {
  __shared__ T part[32];
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = value;
  __syncthreads();
  value = threadIdx.x < blockDim.x / 32 ? part[threadIdx.x] : T(0);
  if (threadIdx.x < 32) {
    value = warp_sum(value);
    if (threadIdx.x == 0) part[0] = value;
  }
  __syncthreads();
  return part[0];
}
extern "C" __global__ void by_shuffles(const int* x, int* y) {
  const int sum = block_sum(x[blockIdx.x * 256 + threadIdx.x]);
  if (threadIdx.x == 77) y[blockIdx.x] = sum;
}
extern "C" __global__ void in_double(const int* x, double* y) {
  const double sum = block_sum(double(x[blockIdx.x * 256 + threadIdx.x]));
  if (threadIdx.x == 77) y[blockIdx.x] = sum;
}
"""


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("kernel", "kind"), [("in_shared", "i4"), ("by_shuffles", "i4"), ("in_double", "f8")])
def test_block_reduction(kernel: str, kind: str, order: Order) -> None:
    """int32 and float64 of integers, exact, in every order."""
    x = np.arange(4 * 256, dtype=np.int32).reshape(4, 256)
    y = np.zeros(4, kind)
    Emulator(REDUCE.replace("BARRIER", "__syncthreads()")).launch(kernel, 4, 256, [x, y], order=order)
    np.testing.assert_array_equal(y, x.sum(axis=1))


def test_missing_barrier_changes_the_result_with_the_order() -> None:
    x = np.arange(256, dtype=np.int32)
    results = []
    for order in ORDERS:
        y = np.zeros(1, np.int32)
        Emulator(REDUCE.replace("BARRIER", "(void)0")).launch("in_shared", 1, 256, [x, y], order=order)
        results.append(int(y[0]))
    assert any(result != x.sum() for result in results)


def test_missing_barrier_between_two_reductions_is_seen() -> None:
    """The second reduction writes what slower warps still read; each warp alone is in order."""
    source = """
    __device__ int block_sum(int value) {
      __shared__ int part[4];
      for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(0xffffffffu, value, lanes);
      if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = value;
      __syncthreads();
      return part[0] + part[1] + part[2] + part[3];
    }
    extern "C" __global__ void twice(int* y) {
      const int first = block_sum(1);
      BARRIER;
      y[threadIdx.x] = block_sum(first);
    }
    """
    seen = {}
    for barrier in ("__syncthreads()", "(void)0"):
        right = []
        for order in ORDERS:
            y = np.zeros(128, np.int32)
            Emulator(source.replace("BARRIER", barrier)).launch("twice", 1, 128, [y], order=order)
            right.append(bool((y == 128 * 128).all()))
        seen[barrier] = right
    assert all(seen["__syncthreads()"])
    assert not all(seen["(void)0"])


def fails(source: str, args: list[object], *, block: int = 32, shared: int = 0, kernel: str = "k") -> str:
    with pytest.raises(EmulatorError) as error:
        Emulator(source, seconds=0.5).launch(kernel, 1, block, args, shared)  # type: ignore[arg-type]
    return str(error.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("y[threadIdx.x] = x[threadIdx.x + 4096]", "read 16256 bytes past the end of argument 0 of 128 bytes"),
        ("y[threadIdx.x] = x[threadIdx.x + 1]", "thread (31, 0, 0): read 0 bytes past the end of argument 0"),
        ("y[threadIdx.x + 1] = 1.f", "thread (31, 0, 0): write 0 bytes past the end of argument 1 of 128 bytes"),
        ("y[-1 - int(threadIdx.x)] = 1.f", "kernel k: a write 1 bytes before argument 1 of 128 bytes"),
        ("y[1000000] = 1.f", "write 3999872 bytes past the end of argument 1 of 128 bytes"),
        ("const_cast<float*>(x)[threadIdx.x] = 1.f", "write at byte 0 of argument 0 of 128 bytes, which is read-only"),
        ("y[threadIdx.x] = *(const float*)nullptr", "read at address 0x0, which belongs to no argument"),
        ("y[0] = 7 / (int)x[threadIdx.x]", "an integer division by zero"),
        ("y[0] = (int)(x[0] + 3e9f)", "thread (0, 0, 0), line 1: a cast of a float that 'int' cannot hold"),
        ("while (y[0] == y[0]) y[1] = y[0]", "the launch did not end within 0.5 s of CPU time"),
        ("volatile char big[70000]; big[threadIdx.x] = 1; y[0] = big[3]", "the thread's stack overflows"),
        ("assert(threadIdx.x < 7)", "thread (7, 0, 0), line 1: assertion failed: threadIdx.x < 7"),
        ("float v[3]; for (int i = 0; i < 4; ++i) v[i] = x[i]; y[0] = v[2]", "index 3 is out of bounds for type"),
    ],
)
def test_a_fault_is_an_error_that_says_where(body: str, message: str) -> None:
    source = f'extern "C" __global__ void k(const float* x, float* y) {{ {body}; }}'
    assert message in fails(source, [np.zeros(32, np.float32), np.zeros(32, np.float32)])


@pytest.mark.parametrize("size", [1, 3, 5, 30])
def test_a_write_just_past_a_buffer_of_any_size_is_found(size: int) -> None:
    """Sizes that are no multiple of 16 bytes end before the page that faults."""
    source = 'extern "C" __global__ void k(float* y, int n) { y[n] = 1.f; }'
    assert "a write 0 bytes after argument 0" in fails(source, [np.zeros(size, np.float32), size], block=1)


def test_the_portable_switch_between_fibres_works_too() -> None:
    """On machines other than x86-64 the runtime uses ucontext; here in a process of its own."""
    program = f"""
import numpy as np
from emulator import Emulator, EmulatorError
emulator = Emulator({REDUCE.replace("BARRIER", "__syncthreads()")!r})
y = np.zeros(2, np.int32)
for order in ("forward", "backward", 5):
    emulator.launch("by_shuffles", 2, 256, [np.arange(512, dtype=np.int32), y], order=order)
    print(*y)
try:
    emulator.launch("by_shuffles", 3, 256, [np.arange(512, dtype=np.int32), y])
except EmulatorError as error:
    print(error)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "ONNXFUSE_EMULATOR_UCONTEXT": "1"}, text=True,
        cwd=Path(__file__).parent, capture_output=True, check=True,
    )
    assert ran.stdout.splitlines() == ["32640 98176"] * 3 + [
        "kernel by_shuffles, block (2, 0, 0), thread (0, 0, 0): read 0 bytes past the end of argument 0 of 2048 bytes"
    ]


def test_after_a_fault_the_next_launch_works() -> None:
    source = 'extern "C" __global__ void k(int* y) { y[threadIdx.x] = threadIdx.x; }'
    for _ in range(3):
        fails(source, [np.zeros(16, np.int32)])
        y = np.zeros(32, np.int32)
        Emulator(source).launch("k", 1, 32, [y])
        np.testing.assert_array_equal(y, np.arange(32))


@pytest.mark.parametrize("access", ["reinterpret_cast<const float4*>(x + OFFSET)[0].w",
                                    "__ldg(reinterpret_cast<const float4*>(x + OFFSET)).w",
                                    "((const Pack*)(x + OFFSET))->v[3]"])
def test_misaligned_vector_access_is_found(access: str) -> None:
    source = f"""
    struct alignas(16) Pack {{ float v[4]; }};
    extern "C" __global__ void k(const float* x, float* y) {{ y[0] = {access}; }}
    """
    x = np.arange(32, dtype=np.float32)
    y = np.zeros(1, np.float32)
    Emulator(source.replace("OFFSET", "4")).launch("k", 1, 1, [x, y])
    assert y[0] == 7
    message = fails(source.replace("OFFSET", "1"), [x, y], block=1)
    assert "misaligned access" in message
    assert "which needs a multiple of 16" in message



@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "if (threadIdx.x < 32) __syncthreads();\nelse __syncthreads();",
            "thread 0 waits at the __syncthreads of line 1, but thread 32 waits at the __syncthreads of line 2",
        ),
        (
            "if (threadIdx.x < 48) __syncthreads();\nelse __syncwarp();\n__syncthreads();",
            "of line 2 for lanes ffffffff, but thread 32 waits at the __syncthreads of line 1",
        ),
        (
            "if (threadIdx.x % 32 < 31) y[threadIdx.x] = __shfl_xor_sync(~0u, x[threadIdx.x], 1);",
            "thread 0 waits at the warp operation of line 1 for lanes ffffffff, but thread 31 has ended",
        ),
        (
            "y[threadIdx.x] = __shfl_down_sync(0xffffu, x[threadIdx.x], 1);",
            "lane 15 shuffles from lane 16, which the mask 0000ffff does not name",
        ),
        (
            "if (threadIdx.x > 30) y[threadIdx.x] = __shfl_sync(0xffffu, x[threadIdx.x], 1);",
            "lane 31 takes part in a warp operation whose mask 0000ffff does not name it",
        ),
        (
            "const float one[1] = {0}, two[2] = {0, 0}; "
            "y[threadIdx.x] = *(threadIdx.x % 2 ? onnxfuse_emulator_lanes(one, 1) : onnxfuse_emulator_lanes(two, 1));",
            "line 1: lanes share different things",
        ),
    ],
)
def test_a_meeting_that_not_all_reach_is_an_error(body: str, message: str) -> None:
    first = "if (threadIdx.x % 32 >= 16) return; " if "down" in body else ""
    source = f'extern "C" __global__ void k(const float* x, float* y) {{ {first}{body} }}'
    text = fails(source, [np.zeros(64, np.float32), np.zeros(64, np.float32)], block=64)
    assert text.startswith("kernel k, block (0, 0, 0)")
    assert message in text


def test_a_warp_with_too_few_lanes_for_its_mask_is_an_error() -> None:
    source = 'extern "C" __global__ void k(int* y) { y[threadIdx.x] = __shfl_xor_sync(~0u, 1, 1); }'
    assert "thread 32 waits at the warp operation of line 1 for lanes ffffffff, but there is no lane 16" in fails(
        source, [np.zeros(48, np.int32)], block=48
    )


def test_threads_that_ended_need_not_reach_a_barrier() -> None:
    source = """
    extern "C" __global__ void k(int* y) {
      __shared__ int part[64];
      if (threadIdx.x >= 40) return;
      part[threadIdx.x] = threadIdx.x;
      __syncthreads();
      y[threadIdx.x] = part[39 - threadIdx.x];
    }
    """
    y = np.full(64, -1, np.int32)
    Emulator(source).launch("k", 1, 64, [y])
    np.testing.assert_array_equal(y, [*range(39, -1, -1), *[-1] * 24])


def test_uninitialised_shared_memory_shows_in_every_block() -> None:
    source = """
    template <int N> __device__ float peek(int t, float v) {
      __shared__ float kept[N];
      const float found = kept[t];
      kept[t] = v;
      return found;
    }
    extern "C" __global__ void k(float* y, float* z) {
      extern __shared__ float more[];
      const int at = blockIdx.x * 32 + threadIdx.x;
      y[at] = peek<32>(threadIdx.x, 1.f);
      z[at] = more[threadIdx.x];
      more[threadIdx.x] = 1.f;
    }
    """
    y, z = np.zeros((2, 96), np.float32)
    Emulator(source).launch("k", 3, 32, [y, z], shared=128)
    assert np.isnan(y).all() and np.isnan(z).all()


def test_uninitialised_register_does_not_look_like_zero() -> None:
    source = 'extern "C" __global__ void k(float* y, int n) { float v[4]; if (n > 9) v[1] = 0; y[0] = v[n]; }'
    y = np.zeros(1, np.float32)
    Emulator(source).launch("k", 1, 1, [y, 1])
    assert abs(y[0]) > 1e30


DYNAMIC = """
// extern __shared__ float in_a_comment[];
extern __shared__ __align__(16) unsigned char at_file_scope[];
namespace tools {
extern __shared__ float in_namespace[];
__device__ float get(int i) { return in_namespace[i]; }
}
extern "C" __global__ void k(const float* x, float* y, int n) {
  extern __shared__ alignas(16) float4 part[];
  reinterpret_cast<float*>(at_file_scope)[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  if (threadIdx.x < n / 4) {
    const float4 v = part[threadIdx.x];
    y[threadIdx.x] = v.x + v.y + v.z + tools::get(4 * threadIdx.x + 3);
  }
}
"""


def test_dynamic_shared_memory_has_its_size() -> None:
    """float32 sums of small integers, exact."""
    x = np.arange(64, dtype=np.float32)
    y = np.zeros(16, np.float32)
    emulator = Emulator(DYNAMIC)
    for _ in range(2):
        emulator.launch("k", 1, 64, [x, y, 64], shared=256)
        np.testing.assert_array_equal(y, x.reshape(16, 4).sum(axis=1))
    assert "write outside of dynamic shared memory" in fails(DYNAMIC, [x, y, 64], block=64, shared=240)
    assert "a write past the end of the 248 bytes of dynamic shared memory" in fails(
        DYNAMIC, [x, y, 64], block=64, shared=248
    )


def test_two_dimensional_grid_and_block() -> None:
    source = """
    extern "C" __global__ void k(int* y) {
      const dim3 size(gridDim.x * blockDim.x, gridDim.y * blockDim.y, gridDim.z * blockDim.z);
      const int x = blockIdx.x * blockDim.x + threadIdx.x, r = blockIdx.y * blockDim.y + threadIdx.y;
      const int z = blockIdx.z * blockDim.z + threadIdx.z;
      y[(z * size.y + r) * size.x + x] += 10000 * z + 100 * r + x;
    }
    """
    for order in ORDERS:
        y = np.zeros((6, 10, 12), np.int32)
        Emulator(source).launch("k", (3, 2, 3), (4, 5, 2), [y], order=order)
        z, r, x = np.indices(y.shape)
        np.testing.assert_array_equal(y, 10000 * z + 100 * r + x)


def test_atomics_and_the_last_block_pattern() -> None:
    source = """
    extern "C" __global__ void k(const int* x, int* sums, unsigned* count, float* total, int* most) {
      __shared__ bool last;
      atomicAdd(&sums[blockIdx.x], x[blockIdx.x * blockDim.x + threadIdx.x]);
      atomicMax(most, x[blockIdx.x * blockDim.x + threadIdx.x]);
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) last = atomicInc(count, gridDim.x - 1) == gridDim.x - 1;
      __syncthreads();
      if (last && threadIdx.x < gridDim.x) atomicAdd(total, float(sums[threadIdx.x]));
    }
    """
    x = np.arange(7 * 64, dtype=np.int32)
    for order in ORDERS:
        sums, count, total, most = np.zeros(7, "i4"), np.zeros(1, "u4"), np.zeros(1, "f4"), np.zeros(1, "i4")
        Emulator(source).launch("k", 7, 64, [x, sums, count, total, most], order=order)
        assert (total[0], count[0], most[0]) == (x.sum(), 0, 7 * 64 - 1)


def test_warp_operations() -> None:
    source = """
    extern "C" __global__ void k(const int* x, int* y) {
      const int t = threadIdx.x, v = x[t];
      int* out = y + 13 * t;
      out[0] = __shfl_sync(~0u, v, t + 3, 8);
      out[1] = __shfl_up_sync(~0u, v, 2, 8);
      out[2] = __shfl_down_sync(~0u, v, 2, 8);
      out[3] = __shfl_xor_sync(~0u, v, 5);
      out[4] = __ballot_sync(~0u, v % 3 == 0);
      out[5] = __any_sync(~0u, v == 7);
      out[6] = __all_sync(~0u, v >= 0);
      out[7] = __reduce_add_sync(~0u, v);
      out[8] = __reduce_min_sync(~0u, -v);
      out[9] = __reduce_max_sync(~0u, unsigned(v));
      out[10] = __syncthreads_count(v % 2);
      out[11] = int(__shfl_sync(~0u, (long long)v << 40, 9) >> 40);
      const int both[2] = {v, -v};
      const int* const all = onnxfuse_emulator_lanes(both, 0);
      out[12] = all[(t + 5) % 32 * 2 + 1];
    }
    """
    x = np.random.default_rng(1).permutation(32).astype(np.int32)
    y = np.zeros((32, 13), np.int32)
    t = np.arange(32)
    in_eight = t % 8
    expected = [
        x[t // 8 * 8 + (t + 3) % 8], np.where(in_eight >= 2, x[t - 2], x), np.where(in_eight < 6, x[(t + 2) % 32], x),
        x[t ^ 5], np.full(32, sum(1 << i for i in t if x[i] % 3 == 0), np.uint32).view(np.int32), 1, 1, x.sum(), -31,
        31, 16, x[9], -x[(t + 5) % 32],
    ]
    for order in ORDERS:
        Emulator(source).launch("k", 1, 32, [x, y], order=order)
        for column, want in enumerate(expected):
            np.testing.assert_array_equal(y[:, column], want, err_msg=f"column {column}")


@pytest.mark.parametrize(
    ("args", "block", "message"),
    [
        ([np.zeros(4, "f4")], 32, "kernel k has 3 parameters, not 1"),
        ([np.zeros(4, "f4"), np.int64(1), 1.0], 32, "kernel k, argument 1: np.int64(1) given for an integer of 4"),
        ([np.zeros(4, "f4"), 2**31, 1.0], 32, "kernel k, argument 1: 2147483648 given for an integer of 4 bytes"),
        ([1, 1, 1.0], 32, "kernel k, argument 0: 1 given for a pointer"),
        ([np.zeros(4, "f4"), 1, 1.0], 65, "kernel k is bound to 64 threads, not 65"),
        ([np.zeros(4, "f4"), 1, 1.0], 2048, "kernel k cannot have block (2048, 1, 1)"),
    ],
)
def test_arguments_and_sizes_that_do_not_fit(args: list[object], block: int, message: str) -> None:
    source = (
        "#define THREADS (2 * 32)\n"
        'extern "C" __global__ void __launch_bounds__(THREADS, 2) k(float* y, int n, float v) { y[n] = v; }'
    )
    assert fails(source, args, block=block).startswith(message.replace("np.int64(1)", repr(np.int64(1))))


def test_text_that_does_not_compile_shows_the_compilers_message() -> None:
    with pytest.raises(EmulatorError, match=r"kernel:2:\d+: error: .*undeclared_thing"):
        Emulator('extern "C" __global__ void k(float* y) {\n  y[0] = undeclared_thing;\n}')


def test_ptx_needs_a_plain_twin() -> None:
    source = """
    __device__ unsigned lane() {
    #ifdef ONNXFUSE_EMULATOR
      return threadIdx.x % 32;
    #else
      unsigned r; asm volatile("mov.u32 %0, %laneid;" : "=r"(r)); return r;
    #endif
    }
    extern "C" __global__ void k(unsigned* y) { y[threadIdx.x] = lane(); }
    """
    y = np.zeros(64, np.uint32)
    Emulator(source).launch("k", 1, 64, [y])
    np.testing.assert_array_equal(y, np.arange(64) % 32)
    with pytest.raises(EmulatorError, match="poisoned"):
        Emulator(source.replace("ifdef", "ifndef"))


def test_compilers_say_the_same_in_every_character_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    with pytest.raises(EmulatorError, match="'missing' was not declared"):
        Emulator('extern "C" __global__ void k(float* y) { y[0] = missing; }')


def test_the_language_around_kernels() -> None:
    """Alignments before and after the qualifier, constants, qualifiers, device headers, vector and 16-bit types."""
    source = """
    #include <cuda_fp16.h>
    #include <cuda_bf16.h>
    #include <cuda/std/cstdint>
    #include <cuda/std/limits>
    namespace {
    __constant__ const float scale[2] = {2.f, 3.f};
    template <class T, int N> struct __align__(sizeof(T) * N) Pack { T v[N]; };
    template <class T> __device__ __noinline__ T twice(const T value) { return value + value; }
    }
    extern "C"
    __global__ void
    __launch_bounds__(/* threads ( */ (64), 1)
    k(const uint4* __restrict__ x, Pack<__half, 8>* __restrict__ y, ::cuda::std::uint32_t n, bool flag) {
      __shared__ alignas(16) __half first[64 * 8];
      alignas(16) __shared__ __half second[64 * 8];
      __shared__ __align__(16) Pack<__nv_bfloat16, 4> third[2];
      const unsigned t = threadIdx.x;
      if (t < 2) third[t].v[1] = __float2bfloat16(scale[t]);
      reinterpret_cast<uint4*>(first)[t] = __ldcs(&x[t]);
      __syncthreads();
      union { uint4 raw; __half2 pairs[4]; } both;
      both.raw = reinterpret_cast<const uint4*>(first)[63 - t];
      #pragma unroll 4
      for (int i = 0; i < 4; ++i) both.pairs[i] = __hmul2(both.pairs[i], __float2half2_rn(third[1].v[1]));
      reinterpret_cast<uint4*>(second)[t] = both.raw;
      __syncwarp();
      __builtin_assume(n == 64);
      Pack<__half, 8> out = *reinterpret_cast<Pack<__half, 8>*>(&second[8 * t]);
      out.v[0] = twice(out.v[0]) + __half(flag ? 1.f : cuda::std::numeric_limits<float>::infinity());
      if (t < n) __stcs(&y[t], out);
    }
    """
    x = np.random.default_rng(0).integers(-99, 99, (64, 8)).astype(np.float16)
    y = np.zeros_like(x)
    Emulator(source).launch("k", 1, 64, [x, y, np.uint32(64), np.bool_(True)])
    expected = 3 * x[::-1]
    expected[:, 0] = 2 * expected[:, 0] + 1
    np.testing.assert_array_equal(y, expected)
