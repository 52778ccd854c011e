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

template <> struct Multiplied<float> {
  static constexpr int vector = 4;
  static __device__ __forceinline__ void load(unsigned (&words)[4], const float* row) { load_words(words, row); }
  static __device__ __forceinline__ void add(float (&sums)[4], const unsigned (&left)[4], unsigned low, unsigned high) {
    mma_tf32(sums, left, low, high);
  }
};

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
    multiply_windows<float, pitch>(sums, own, weights + start);
  }
}

}  // namespace of
