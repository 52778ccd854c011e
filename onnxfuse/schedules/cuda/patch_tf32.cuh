// Products of windows over pieces of an image of float32, which tensor cores read as TF32: as patch.cuh has them, eight
// elements at a time.  Pieces and weights are rounded where they lie.
namespace of {

template <int width> __device__ __forceinline__ Vector<float, width> rounded_tf32(Vector<float, width> vector) {
#pragma unroll
  for (int i = 0; i < width; ++i) vector.at[i] = __uint_as_float(nearest_tf32(__float_as_uint(vector.at[i])));
  return vector;
}
template <int width> __device__ __forceinline__ Vector<float, width> pack_tf32(const float (&values)[width]) {
  return rounded_tf32(pack<float>(values));
}

// As of::multiply_windows, with eight elements of 32 windows.
template <int pitch, int columns8>
__device__ __forceinline__ void multiply_windows_tf32(float (&sums)[2][columns8][4], const unsigned (&own)[2][4],
                                                      const float* weights) {
  const int lane = threadIdx.x % 32;
  const float* const from = weights + (lane / 16 * 8 + lane % 8) * pitch + lane / 8 % 2 * 4;
#pragma unroll
  for (int n = 0; n < columns8; n += 2) {
    unsigned columns[4];
    load_words(columns, from + n * 8 * pitch);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      mma_tf32(sums[i][n], own[i], columns[0], columns[1]);
      mma_tf32(sums[i][n + 1], own[i], columns[2], columns[3]);
    }
  }
}

// As of::multiply_patch.
template <int wide, int down, int across, int line, int depth, int pitch, int columns8>
__device__ __forceinline__ void multiply_patch_tf32(float (&sums)[2][columns8][4], const float* patch,
                                                    const int* offsets, const float* weights, int row) {
  const int lane = threadIdx.x % 32;
  const float* first[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int window = row + lane / 4 + i * 8;
    first[i] = patch + window / wide * down * line + window % wide * across;
  }
  constexpr int at_once = columns8 > 4 ? 1 : 2;  // as registers hold
  unsigned own[2][4];
#pragma unroll at_once
  for (int start = 0; start < depth; start += 8) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = start + half * 4 + lane % 4, behind = offsets[column];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        own[i / 2][i % 2 + half * 2] = column < depth ? __float_as_uint(first[i][behind]) : 0;
    }
    multiply_windows_tf32<pitch>(sums, own, weights + start);
  }
}

// As of::multiply_pixels, with vectors of four channels.
template <int wide, int down, int across, int line, int pixel, int depth, int pitch, int columns8>
__device__ __forceinline__ void multiply_pixels_tf32(float (&sums)[2][columns8][4], const float* patch,
                                                     const int* offsets, const float* weights, int row) {
  const int lane = threadIdx.x % 32;
  const float* first[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int window = row + i * 16 + lane % 16;
    first[i] = patch + (window / wide * down * line + window % wide * across) * pixel;
  }
  unsigned own[2][4];
#pragma unroll 2
  for (int start = 0; start + 8 <= depth; start += 8) {
    const int behind = offsets[start / 4 + lane / 16];
#pragma unroll
    for (int i = 0; i < 2; ++i) load_words(own[i], first[i] + behind);
    multiply_windows_tf32<pitch>(sums, own, weights + start);
  }
  if constexpr (depth % 8 > 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_words(own[i], first[i] + offsets[depth / 4 - 1]);
      own[i][2] = own[i][3] = 0;
    }
    multiply_windows_tf32<pitch>(sums, own, weights + depth - 4);
  }
}

}  // namespace of
