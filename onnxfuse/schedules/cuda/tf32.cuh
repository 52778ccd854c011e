// Matrix products of float32 operands on tensor cores, which read them as TF32: with eleven digits, those of float16,
// and the exponents of float32.  What mma.cuh calls matrices of 8 x 8 elements are ones of 8 x 4 here.
namespace of {

// GPUs that have none multiply float32.
#if !defined(ONNXFUSE_EMULATOR) && __CUDA_ARCH__ < 800
#define OF_NO_TF32 1
#endif

// The bits of the nearest number that TF32 has, of two the one farther from zero.  A tensor core cuts off what it does not
// read, which errs twice as far, and always towards zero: right only where the nearest number would be infinite.
__device__ __forceinline__ unsigned nearest_tf32(unsigned bits) {
#if defined(ONNXFUSE_EMULATOR)
  const unsigned size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return 0x7fffffffu;
  return (size < 0x7f7ff000u ? bits + 0x1000u : bits) & 0xffffe000u;
#elif defined(OF_NO_TF32)
  return bits;
#else
  unsigned near;
  asm("{\n.reg .pred large;\n.reg .f32 size;\nabs.f32 size, %1;\nsetp.gt.f32 large, size, 0f7f7fefff;\n"
      "mov.b32 %0, %1;\n@!large cvt.rna.tf32.f32 %0, %1;\n}" : "=r"(near) : "f"(__uint_as_float(bits)));
  return near;
#endif
}
template <int count> __device__ __forceinline__ void round_tf32(unsigned (&words)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) words[i] = nearest_tf32(words[i]);
}

// ---- 16 x 8 by 8 x 8 elements, added to 16 x 8 sums. ----

// With lane = 4 g + t, a lane holds of the left operand (g, t), (g + 8, t), (g, t + 4) and (g + 8, t + 4); of the right
// operand (t, g) and (t + 4, g); of the sums what of::mma has there.
// (No GPU is quick at it: a function of its own, as of::plain_mma.)
__device__ __noinline__ void plain_mma_tf32(float (&sums)[4], const unsigned (&left)[4], unsigned low,
                                               unsigned high) {
  float own[6];
#pragma unroll
  for (int i = 0; i < 4; ++i) own[i] = __uint_as_float(left[i]);
  own[4] = __uint_as_float(low), own[5] = __uint_as_float(high);
  const Lanes<float, 6> lanes(own);
  const int lane = threadIdx.x % 32, row = lane / 4 * 4, column = lane % 4 * 8;
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    float rows[4], columns[2][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) rows[i] = lanes.of(row + t, i);
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) columns[j][i] = lanes.of(column + 4 * j + t, 4 + i);
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) sums[i] += rows[i / 2 + 2 * half] * columns[i % 2][half];
  }
}

__device__ __forceinline__ void mma_tf32(float (&sums)[4], const unsigned (&left)[4], unsigned low, unsigned high) {
#if defined(ONNXFUSE_EMULATOR) || defined(OF_NO_TF32)
  plain_mma_tf32(sums, left, low, high);
#else
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(low), "r"(high));
#endif
}

// The same of operands as they are: each is the nearest that TF32 has and what is left of it, and of the four products of
// these the least is left out (Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores while surpassing
// the FP32 theoretical peak performance", 2022).  What is infinite, or no number, has nothing beside it, and is no factor of
// what is left of others: that may be zero.
struct SplitWord {
  unsigned near, factor, rest;
};
__device__ __forceinline__ SplitWord split_word(unsigned word) {
  const unsigned near = nearest_tf32(word) & 0xffffe000u;  // of the largest numbers what a tensor core reads
  const float rest = __uint_as_float(word) - __uint_as_float(near);
  const bool finite = (near & 0x7f800000u) != 0x7f800000u;
  return {near, finite ? near : 0u, finite ? nearest_tf32(__float_as_uint(rest)) : 0u};
}
__device__ __noinline__ float4 mma_float(float4 sums, uint4 left, unsigned low, unsigned high) {
  const unsigned words[4] = {left.x, left.y, left.z, left.w};
  float own[4] = {sums.x, sums.y, sums.z, sums.w};
  unsigned near[4], factors[4], rest[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const SplitWord split = split_word(words[i]);
    near[i] = split.near, factors[i] = split.factor, rest[i] = split.rest;
  }
  const SplitWord first = split_word(low), second = split_word(high);
  mma_tf32(own, rest, first.factor, second.factor);
  mma_tf32(own, factors, first.rest, second.rest);
  mma_tf32(own, near, first.near, second.near);
  return make_float4(own[0], own[1], own[2], own[3]);
}
// The nearest numbers that TF32 has and what tensor cores read of what is left, in five operations a word; `odd` becomes no
// number where a word is none, is infinite, or its nearest number would be.
template <int count>
__device__ __forceinline__ void split_words(const unsigned (&words)[count], unsigned (&near)[count],
                                            unsigned (&rest)[count], float& odd) {
#pragma unroll
  for (int i = 0; i < count; ++i) {
    near[i] = (words[i] + 0x1000u) & 0xffffe000u;
    const float left = __uint_as_float(words[i]) - __uint_as_float(near[i]);
    odd = fmaf(left, 0.0f, odd);
    rest[i] = __float_as_uint(left) & 0xffffe000u;
  }
}
// sums += left right for `count` of the sums' columns, from `first` on.  What is large or no number anywhere in a warp's
// operands is rare, and has a function of its own.
template <int rows16, int columns8, int count>
__device__ __forceinline__ void multiply_words(float (&sums)[rows16][columns8][4], int first,
                                               const unsigned (&left)[rows16][4], const unsigned (&right)[count][2]) {
#if defined(OF_NO_TF32)
#pragma unroll
  for (int n = 0; n < count; ++n)
#pragma unroll
    for (int i = 0; i < rows16; ++i) mma_tf32(sums[i][first + n], left[i], right[n][0], right[n][1]);
#else
  unsigned near[rows16][4], rest[rows16][4], right_near[count][2], right_rest[count][2];
  float odd = 0.0f;
#pragma unroll
  for (int i = 0; i < rows16; ++i) split_words(left[i], near[i], rest[i], odd);
#pragma unroll
  for (int n = 0; n < count; ++n) split_words(right[n], right_near[n], right_rest[n], odd);
  if (__any_sync(0xffffffffu, odd != odd)) {
#pragma unroll
    for (int n = 0; n < count; ++n)
#pragma unroll
      for (int i = 0; i < rows16; ++i) {
        float (&own)[4] = sums[i][first + n];
        const float4 found = mma_float(make_float4(own[0], own[1], own[2], own[3]),
                                       make_uint4(left[i][0], left[i][1], left[i][2], left[i][3]), right[n][0], right[n][1]);
        own[0] = found.x, own[1] = found.y, own[2] = found.z, own[3] = found.w;
      }
    return;
  }
  // No product waits for the one before that adds to the same sums.
#pragma unroll
  for (int n = 0; n < count; ++n)
#pragma unroll
    for (int i = 0; i < rows16; ++i) mma_tf32(sums[i][first + n], rest[i], right_near[n][0], right_near[n][1]);
#pragma unroll
  for (int n = 0; n < count; ++n)
#pragma unroll
    for (int i = 0; i < rows16; ++i) mma_tf32(sums[i][first + n], near[i], right_rest[n][0], right_rest[n][1]);
#pragma unroll
  for (int n = 0; n < count; ++n)
#pragma unroll
    for (int i = 0; i < rows16; ++i) mma_tf32(sums[i][first + n], near[i], right_near[n][0], right_near[n][1]);
#endif
}

// ---- Tiles in shared memory. ----

// A tile lies in panels of 32 columns, rows of 128 bytes.  With a line for each of its rows, the eight pieces of a line
// change places as in of::place.  Across, a warp reads words of four lines, eight of each: there they change places so
// that two pieces of each of the four lie in banks of their own.
template <bool across, int lines> __device__ __forceinline__ int place_tf32(int line, int column) {
  const int moved = across ? 2 * (line % 4) : line % 8;
  return (column / 32 * lines + line) * 32 + ((column / 4 % 8) ^ moved) * 4 + column % 4;
}
// Four matrices of 8 x 4 from lines of 16 bytes, as of::load_matrices does it: a lane gets of each the word (g, t).
__device__ __forceinline__ void load_words(unsigned (&words)[4], const float* row) {
#if defined(ONNXFUSE_EMULATOR)
  const int lane = threadIdx.x % 32;
  const unsigned long long own[1] = {reinterpret_cast<unsigned long long>(row)};
  const Lanes<unsigned long long, 1> lanes(own);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    words[i] = __float_as_uint(reinterpret_cast<const float*>(lanes.of(8 * i + lane / 4, 0))[lane % 4]);
#else
  load_matrices<false>(words, row);
#endif
}
// An element of a tile, by its row and by what is summed over.
template <bool across, int rows, int depth>
__device__ __forceinline__ float word_of(const float* tile, int row, int k) {
  return tile[across ? place_tf32<true, depth>(k, row) : place_tf32<false, rows>(row, k)];
}
// sums += left right': as of::multiply_own.
template <int rows, int others, int depth, bool left_across, bool right_across, int rows16, int columns8>
__device__ __forceinline__ void multiply_own_tf32(float (&sums)[rows16][columns8][4], const float* left,
                                                  const float* right, int row, int column) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#ifdef OF_NO_TF32
#pragma unroll 1
  for (int k = 0; k < depth; ++k) {
    float own[2 * rows16], other[2 * columns8];
#pragma unroll
    for (int i = 0; i < 2 * rows16; ++i) own[i] = word_of<left_across, rows, depth>(left, row + i * 8 + g, k);
#pragma unroll
    for (int n = 0; n < 2 * columns8; ++n)
      other[n] = word_of<right_across, others, depth>(right, column + n / 2 * 8 + t * 2 + n % 2, k);
#pragma unroll
    for (int i = 0; i < rows16; ++i)
#pragma unroll
      for (int n = 0; n < columns8; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i][n][j] += own[2 * i + j / 2] * other[2 * n + j % 2];
  }
#else
#pragma unroll
  for (int step = 0; step < depth / 8; ++step) {
    unsigned own[rows16][4];
#pragma unroll
    for (int i = 0; i < rows16; ++i) {
      if constexpr (left_across)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          own[i][j] = __float_as_uint(
              word_of<true, rows, depth>(left, row + i * 16 + g + j % 2 * 8, step * 8 + t + j / 2 * 4));
      else
        load_words(own[i], left + place_tf32<false, rows>(row + i * 16 + lane % 16, step * 8 + lane / 16 * 4));
      round_tf32(own[i]);
    }
#pragma unroll
    for (int n = 0; n < columns8; n += 2) {
      unsigned other[4];
      if constexpr (right_across)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          other[j] = __float_as_uint(
              word_of<true, others, depth>(right, column + n * 8 + g + j / 2 * 8, step * 8 + t + j % 2 * 4));
      else
        load_words(other, right + place_tf32<false, others>(column + n * 8 + lane / 16 * 8 + lane % 8,
                                                            step * 8 + lane / 8 % 2 * 4));
      round_tf32(other);
#pragma unroll
      for (int i = 0; i < rows16; ++i) {
        mma_tf32(sums[i][n], own[i], other[0], other[1]);
        mma_tf32(sums[i][n + 1], own[i], other[2], other[3]);
      }
    }
  }
#endif
}
// The same of operands as they are.
template <int rows, int others, int depth, bool left_across, bool right_across, int rows16, int columns8>
__device__ __forceinline__ void multiply_own_float(float (&sums)[rows16][columns8][4], const float* left,
                                                   const float* right, int row, int column) {
#ifdef OF_NO_TF32
  multiply_own_tf32<rows, others, depth, left_across, right_across>(sums, left, right, row, column);
#else
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int step = 0; step < depth / 8; ++step) {
    const int at = step * 8;
    unsigned own[rows16][4], other[columns8][2];
#pragma unroll
    for (int i = 0; i < rows16; ++i) {
      if constexpr (left_across)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          own[i][j] = __float_as_uint(word_of<true, rows, depth>(left, row + i * 16 + g + j % 2 * 8, at + t + j / 2 * 4));
      else
        load_words(own[i], left + place_tf32<false, rows>(row + i * 16 + lane % 16, at + lane / 16 * 4));
    }
#pragma unroll
    for (int n = 0; n < columns8; n += 2) {
      unsigned two[4];
      if constexpr (right_across)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          two[j] = __float_as_uint(word_of<true, others, depth>(right, column + n * 8 + g + j / 2 * 8, at + t + j % 2 * 4));
      else
        load_words(two, right + place_tf32<false, others>(column + n * 8 + lane / 16 * 8 + lane % 8, at + lane / 8 % 2 * 4));
#pragma unroll
      for (int j = 0; j < 4; ++j) other[n + j / 2][j % 2] = two[j];
    }
    multiply_words(sums, 0, own, other);
  }
#endif
}

}  // namespace of
