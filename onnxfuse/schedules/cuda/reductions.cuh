// Functors of reductions, sums of powers under a maximum that becomes known, and what threads reduce together.
namespace of {

// ---- Functors. ----

struct Sum { template <typename T> static __device__ __forceinline__ T of(T a, T b) { return a + b; } };
struct Prod { template <typename T> static __device__ __forceinline__ T of(T a, T b) { return a * b; } };
struct Max {
  template <typename T> static __device__ __forceinline__ T of(T a, T b) { return a > b || a != a ? a : b; }
#if !defined(ONNXFUSE_EMULATOR) && __CUDA_ARCH__ >= 800
  static __device__ __forceinline__ float of(float a, float b) {  // one instruction instead of three
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
  }
#endif
};
// The larger of two numbers, passing over NaN.
struct MaxNumber { template <typename T> static __device__ __forceinline__ T of(T a, T b) { return ::fmax(a, b); } };
struct Min {
  template <typename T> static __device__ __forceinline__ T of(T a, T b) { return a < b || a != a ? a : b; }
#if !defined(ONNXFUSE_EMULATOR) && __CUDA_ARCH__ >= 800
  static __device__ __forceinline__ float of(float a, float b) {
    float smaller;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(smaller) : "f"(a), "f"(b));
    return smaller;
  }
#endif
};

template <typename T, int count> __device__ __forceinline__ void fill(T (&values)[count], T value) {
#pragma unroll
  for (int i = 0; i < count; ++i) values[i] = value;
}

// The values of one thread, a power of two of them, in as few steps as there can be.
template <typename Op, typename T, int count> __device__ __forceinline__ T fold(T (&values)[count]) {
#pragma unroll
  for (int half = count / 2; half > 0; half /= 2)
#pragma unroll
    for (int i = 0; i < half; ++i) values[i] = Op::of(values[i], values[i + half]);
  return values[0];
}

// ---- Sums of exp(x - the maximum of x), as the maximum becomes known: Milakov and Gimelshein, Online normalizer
// calculation for softmax, 2018. ----

// What computes them.  While the largest number so far is `most`, sums are of differences from its `offset`; what was
// summed up under `before` is scaled to that of a larger one.  Before the first number, and after numbers that give
// nothing under any other, there is no maximum to take off.  `total`: the sum under the row's own maximum, which is no
// number where that is none.
template <bool quick> struct Exp {
  template <typename T> static __device__ __forceinline__ T of(T x) {
    if constexpr (quick) return quick_exp(x);
    else return exp(x);
  }
  template <typename T> static __device__ __forceinline__ T offset(T most) { return most == -(T)OF_INFINITY ? (T)0 : most; }
  template <typename T> static __device__ __forceinline__ T term(T x, T offset) { return of(x - offset); }
  template <typename T> static __device__ __forceinline__ T scale(T before, T offset) { return of(before - offset); }
  template <typename T> static __device__ __forceinline__ T total(T sum, T most) { return sum + (most - most); }
};
// The same of exp_difference: offsets are rounded products, so that what rounding takes off is one factor for all.
struct ExpDifference {
  static constexpr float log2_e = 1.44269504f, most_of_half = 1073741824.0f;
  static __device__ __forceinline__ float offset(float most) {
    return most > -most_of_half ? most < most_of_half ? __fmul_rn(most, log2_e) : OF_INFINITY * 0.0f : 0.0f;
  }
  static __device__ __forceinline__ float term(float x, float offset) {
    return exp2_approximate(::fmaf(x, log2_e, -offset));
  }
  static __device__ __forceinline__ float scale(float before, float offset) {
    return exp2_approximate(__fadd_rn(__fmul_rn(before, log2_e), -offset));
  }
  static __device__ __forceinline__ float total(float sum, float most) {
    return ::fabsf(most) < most_of_half ? sum : OF_INFINITY * 0.0f;
  }
};

// Some numbers more of one row, as many as `width` goes into, or fewer: a sum a lane, under one maximum.
template <typename E, typename Max, typename T, int width, int count>
__device__ __forceinline__ void add_exponentials(T& most, T (&sums)[width], const T (&x)[count]) {
  T larger = most;
#pragma unroll
  for (int i = 0; i < count; ++i) larger = Max::of(larger, x[i]);
  const T offset = E::offset(larger), scale = E::scale(most, offset);
#pragma unroll
  for (int v = 0; v < width; ++v) {
    T more = v < count ? E::term(x[v], offset) : (T)0;
#pragma unroll
    for (int i = v + width; i < count; i += width) more += E::term(x[i], offset);
    sums[v] = sums[v] * scale + more;
  }
  most = larger;
}
// A number more of each of `width` rows.
template <typename E, typename Max, typename T, int width>
__device__ __forceinline__ void add_exponentials(T (&most)[width], T (&sums)[width], const T (&x)[width]) {
#pragma unroll
  for (int v = 0; v < width; ++v) {
    const T larger = Max::of(most[v], x[v]), offset = E::offset(larger);
    sums[v] = sums[v] * E::scale(most[v], offset) + E::term(x[v], offset);
    most[v] = larger;
  }
}

// Over `threads` neighbouring lanes of a warp, a power of two; every lane gets the result.
template <typename Op, int threads, typename T> __device__ __forceinline__ T reduce_lanes(T x) {
#pragma unroll
  for (int offset = threads / 2; offset > 0; offset /= 2)
    x = Op::of(x, (T)__shfl_xor_sync(0xffffffffu, x, offset));  // an int where T is shorter
  return x;
}

// Over the threads that share a row.  Rows wider than a warp own the block; `partial` then has room for a number a
// warp, and two calls in a row must not be given the same one.
template <typename Op, int threads, typename T> __device__ __forceinline__ T reduce(T x, T* partial) {
  if constexpr (threads <= 32) {
    return reduce_lanes<Op, threads>(x);
  } else {
    x = reduce_lanes<Op, 32>(x);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
    __syncthreads();
    return reduce_lanes<Op, threads / 32>(partial[threadIdx.x % (threads / 32)]);
  }
}

}  // namespace of
