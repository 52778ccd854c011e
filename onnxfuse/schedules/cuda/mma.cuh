// Matrix products of 16-bit operands on tensor cores, as warps compute them together, and what brings operands there.
// Every operation has a plain twin, for GPUs without it and for reading: it says which lane holds what.
namespace of {

// Powers that a product sums up, of numbers times `by`, which includes the logarithm: like Exp<true>, but that those are
// zero which float32 has no normal number for.  2 ^ (x * by - offset) is one instruction before the power; the offset is a
// rounded product, so that what rounding takes off is one factor for all, the scaled sum too.  That is no more than a
// trifle for those that are `near`; under any other maximum differences come first.
struct ExpSummed : Exp<true> {
  static constexpr float log2_e = 1.44269504f;
  static constexpr float most = 8.0f;  // of an exponent, where a maximum is left: float16 has room for 256 of them
  static __device__ __forceinline__ bool near(float reduced) { return ::fabsf(reduced) < 8192.0f; }
  static __device__ __forceinline__ float term(float x, float by, float offset) {
    return exp2_approximate(::fmaf(x, by, -offset));
  }
  static __device__ __forceinline__ float far_term(float x, float by, float offset) {
    return exp2_approximate((x - offset) * by);
  }
  static __device__ __forceinline__ float share(float before, float offset) { return far_term(before, log2_e, offset); }
};

// What is added to products before `factor` multiplies them: finite where what is added behind it is, a T.
template <typename T> __device__ __forceinline__ float added_before(float added, float factor) {
  const float quotient = added * (1.0f / factor);
  if (is_half<T>) return quotient;  // of 65504 at most
  constexpr float largest = 3.40282347e+38f;
  return ::fabsf(added) <= largest && ::fabsf(quotient) > largest ? ::copysignf(largest, added) : quotient;
}

// ---- 16 x 16 by 16 x 8 elements, added to 16 x 8 sums. ----

// With lane = 4 g + t, a lane holds of the left operand the pairs, along the columns, that begin at (g, 2 t),
// (g + 8, 2 t), (g, 2 t + 8) and (g + 8, 2 t + 8); of the right operand the pairs, along the rows, that begin at (2 t, g)
// and (2 t + 8, g); of the sums (g, 2 t), (g, 2 t + 1), (g + 8, 2 t) and (g + 8, 2 t + 1).

template <typename T> __device__ __forceinline__ float first_of(unsigned pair) {
  return value(reinterpret_cast<const Vector<T, 2>&>(pair).at[0]);
}
template <typename T> __device__ __forceinline__ float second_of(unsigned pair) {
  return value(reinterpret_cast<const Vector<T, 2>&>(pair).at[1]);
}
template <typename T> __device__ __forceinline__ unsigned pair_of(float first, float second) {
  const float both[2] = {first, second};
  const Vector<T, 2> packed = pack<T>(both);
  return reinterpret_cast<const unsigned&>(packed);
}

// What each lane of a warp holds, for all of them to read.
template <typename T, int count> struct Lanes {
#if defined(ONNXFUSE_EMULATOR)
  const T* all;
  explicit Lanes(const T (&own)[count], int line = __builtin_LINE()) : all(onnxfuse_emulator_lanes(own, line)) {}
  T of(int lane, int i) const { return all[lane * count + i]; }
#else
  const T (&own)[count];
  __device__ __forceinline__ explicit Lanes(const T (&own)[count]) : own(own) {}
  __device__ __forceinline__ T of(int lane, int i) const { return __shfl_sync(0xffffffffu, own[i], lane); }
#endif
};

// Each lane's four sums from what the lanes have that hold its rows and its columns.
// (No GPU is quick at it, and in the place of each product it would be text that takes the compiler a minute.)
template <typename T>
__device__ __noinline__ void plain_mma(float (&sums)[4], const unsigned (&left)[4], unsigned low, unsigned high) {
  const unsigned pairs[6] = {left[0], left[1], left[2], left[3], low, high};
  float own[12];
#pragma unroll
  for (int i = 0; i < 6; ++i) own[2 * i] = first_of<T>(pairs[i]), own[2 * i + 1] = second_of<T>(pairs[i]);
  const Lanes<float, 12> lanes(own);
  const int lane = threadIdx.x % 32, row = lane / 4 * 4, column = lane % 4 * 8;
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    float rows[8], columns[2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) rows[i] = lanes.of(row + t, i);
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) columns[j][i] = lanes.of(column + 4 * j + t, 8 + i);
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* const a = rows + 2 * (i / 2 + 2 * half);
        const float* const b = columns[i % 2] + 2 * half;
        sums[i] += a[0] * b[0] + a[1] * b[1];
      }
  }
}

template <typename T>
__device__ __forceinline__ void mma(float (&sums)[4], const unsigned (&left)[4], unsigned low, unsigned high) {
#if defined(ONNXFUSE_EMULATOR) || __CUDA_ARCH__ < 750
  plain_mma<T>(sums, left, low, high);
#elif __CUDA_ARCH__ < 800
  if constexpr (is_half<T>) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) : "r"(left[0]), "r"(left[1]), "r"(low));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) : "r"(left[2]), "r"(left[3]), "r"(high));
  } else {
    plain_mma<T>(sums, left, low, high);
  }
#else
  if constexpr (is_half<T>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(low), "r"(high));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(low), "r"(high));
#endif
}

// ---- Four matrices of 8 x 8 elements from shared memory. ----

// Lanes 8 i to 8 i + 7 name the rows, 16 bytes each, of matrix i.  Lane 4 g + t gets of each matrix the pair that begins
// at (g, 2 t); of the transposed ones that of column g, rows 2 t and 2 t + 1.
template <bool transposed, typename T>
__device__ __forceinline__ void load_matrices(unsigned (&pairs)[4], const T* row) {
#if defined(ONNXFUSE_EMULATOR) || __CUDA_ARCH__ < 750
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const unsigned long long own[1] = {reinterpret_cast<unsigned long long>(row)};
  const Lanes<unsigned long long, 1> lanes(own);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (transposed) {
      const T* const first = reinterpret_cast<const T*>(lanes.of(8 * i + 2 * t, 0));
      const T* const second = reinterpret_cast<const T*>(lanes.of(8 * i + 2 * t + 1, 0));
      Vector<T, 2> both;
      both.at[0] = first[g], both.at[1] = second[g];
      pairs[i] = reinterpret_cast<const unsigned&>(both);
    } else {
      const T* const from = reinterpret_cast<const T*>(lanes.of(8 * i + g, 0));
      pairs[i] = *reinterpret_cast<const unsigned*>(from + 2 * t);
    }
  }
#else
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(row));
  if constexpr (transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3]) : "r"(address) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3]) : "r"(address) : "memory");
#endif
}

// Lanes that fill a row of so many vectors side by side: a power of two, so that a lane's column is the same in each row.
constexpr __host__ __device__ int lanes_of(int vectors, int most) {
  int lanes = 1;
  while (lanes < vectors && lanes < most) lanes *= 2;
  return lanes;
}

// ---- Products of tiles in shared memory. ----

// A tile lies in panels of 64 columns, rows of 128 bytes; each row's eight pieces of 16 bytes change places by the row's
// number, so that eight rows' pieces of one column lie in different banks.
constexpr int panel = 64;
template <int rows> __device__ __forceinline__ int place(int row, int column) {
  return (column / panel * rows + row) * panel + ((column / 8 % 8) ^ (row % 8)) * 8 + column % 8;
}
// sums += left right': a warp's `rows16` times 16 rows from `row` on by `columns8` times 8 columns from `column` on, of
// tiles of so many rows and others.  A tile has a line for each of its rows; or, across, for each of what is summed over.
template <typename T, int rows, int others, int depth, bool left_across, bool right_across, int rows16, int columns8>
__device__ __forceinline__ void multiply_own(float (&sums)[rows16][columns8][4], const T* left, const T* right, int row,
                                             int column) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < depth / 16; ++step) {
    unsigned own[rows16][4];
#pragma unroll
    for (int i = 0; i < rows16; ++i)
      if constexpr (left_across)
        load_matrices<true>(own[i], left + place<depth>(step * 16 + lane % 8 + lane / 16 * 8,
                                                        row + i * 16 + lane / 8 % 2 * 8));
      else
        load_matrices<false>(own[i], left + place<rows>(row + i * 16 + lane % 16, step * 16 + lane / 16 * 8));
#pragma unroll
    for (int n = 0; n < columns8; n += 2) {
      unsigned other[4];
      if constexpr (right_across)
        load_matrices<true>(other, right + place<depth>(step * 16 + lane % 16, column + n * 8 + lane / 16 * 8));
      else
        load_matrices<false>(other, right + place<others>(column + n * 8 + lane / 16 * 8 + lane % 8,
                                                          step * 16 + lane / 8 % 2 * 8));
#pragma unroll
      for (int i = 0; i < rows16; ++i) {
        mma<T>(sums[i][n], own[i], other[0], other[1]);
        mma<T>(sums[i][n + 1], own[i], other[2], other[3]);
      }
    }
  }
}

// ---- 16 bytes from global to shared memory, which arrive when they are waited for. ----

// Zeros where there is nothing to copy.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool some) {
#if defined(ONNXFUSE_EMULATOR)
  onnxfuse_emulator_copy_async(to, some ? from : nullptr, 16);
#elif __CUDA_ARCH__ < 800
  *reinterpret_cast<uint4*>(to) = some ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
#else
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"(address), "l"(from), "r"(some ? 16 : 0) : "memory");
#endif
}
// As of::copy_async, of fewer bytes, which divide both addresses.
template <int bytes> __device__ __forceinline__ void copy_async_of(void* to, const void* from, bool some) {
#if defined(ONNXFUSE_EMULATOR)
  onnxfuse_emulator_copy_async(to, some ? from : nullptr, bytes);
#elif __CUDA_ARCH__ < 800
#pragma unroll
  for (int word = 0; word < bytes / 4; ++word)
    reinterpret_cast<unsigned*>(to)[word] = some ? reinterpret_cast<const unsigned*>(from)[word] : 0;
#else
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
               :: "r"(address), "l"(from), "n"(bytes), "r"(some ? bytes : 0) : "memory");
#endif
}
// 16 bytes that begin anywhere, of which `some` elements are there, and zeros behind these.  They come in the 16 or 32
// bytes that divide addresses around them, or, where these are not all from `base` on and before `end`, one by one.
template <typename T>
__device__ __forceinline__ void copy_shifted(T* to, const T* from, const T* base, const T* end, int some) {
  const unsigned long long begin = reinterpret_cast<unsigned long long>(from);
  const int shift = begin % 16;
  const uint4* const pieces = reinterpret_cast<const uint4*>(begin - shift);
  const int count = some <= 0 ? 0 : shift + some * (int)sizeof(T) > 16 ? 2 : 1;
  if (reinterpret_cast<const T*>(pieces) < base || reinterpret_cast<const T*>(pieces + count) > end) {
#pragma unroll 1
    for (int i = 0; i < 16 / (int)sizeof(T); ++i) to[i] = i < some ? from[i] : T(0.0f);
    return;
  }
  uint4 low = make_uint4(0, 0, 0, 0), high = low;
  if (count > 0) low = pieces[0];
  if (count > 1) high = pieces[1];
  unsigned words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < 6; ++i) words[i] = shift & 8 ? words[i + 2] : words[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) words[i] = shift & 4 ? words[i + 1] : words[i];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int left = some * (int)sizeof(T) - 4 * i;
    if constexpr (sizeof(T) < 4) words[i] = __funnelshift_r(words[i], words[i + 1], shift % 4 * 8);
    if (left < 4) words[i] = left <= 0 ? 0 : words[i] & 0xffff;
  }
  *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
}
// What a thread asked for since its last call is a group.
__device__ __forceinline__ void copies_asked() {
#if defined(ONNXFUSE_EMULATOR)
  onnxfuse_emulator_asked(onnxfuse_emulator::Later::copies);
#elif __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// A thread waits for its own groups, but for the last `left`; others' take a barrier behind it.
template <int left> __device__ __forceinline__ void copies_here() {
#if defined(ONNXFUSE_EMULATOR)
  onnxfuse_emulator_done(onnxfuse_emulator::Later::copies, left);
#elif __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" :: "n"(left) : "memory");
#endif
}

// Where results of so many bytes lie in rows of ``wide``, at most 128 bytes: vectors of 16 bytes change places so that
// neither pairs of eight rows (of four where a pair is eight bytes) nor eight of these vectors meet in a bank.
template <int wide, int size> __device__ __forceinline__ int packed_at(int row, int column) {
  constexpr int vector = 16 / size, vectors = wide < vector ? 1 : wide / vector, rows = 128 / (wide * size);
  constexpr int pairs = size < 4 ? 1 : size / 2;  // vectors that four lanes' are in
  return row * wide + (column / vector ^ row / rows * pairs % vectors) * vector + column % vector;
}

}  // namespace of
