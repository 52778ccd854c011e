// Products of float32 operands by four warps together, as TF32, of tiles that have a line for each row.
// Copies by tensor maps rounded the elements; what else they had is cut off.
namespace of {

#if defined(ONNXFUSE_EMULATOR)
__device__ __forceinline__ float cut_tf32(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }
#endif

// sums = left right', or added to them where there are some, as of::multiply_lines.
template <typename Tensor, int others, int depth>
__device__ __forceinline__ void multiply_lines_tf32(float (&sums)[others / 8][4], const float* left, int first, int apart,
                                                    const float* right, int row, bool some) {
#if defined(OF_WARPGROUP)
  constexpr int bytes = depth * sizeof(float);
  const unsigned long long a = described_lines<bytes>(left + first * depth, apart * bytes);
  const unsigned long long b = described_lines<bytes>(right, 8 * bytes);
#pragma unroll
  for (int step = 0; step < bytes / 32; ++step) Tensor::by_tile(sums, a + step * 2, b + step * 2, some || step > 0);
#elif defined(ONNXFUSE_EMULATOR)
  const auto work = [&sums, left, first, apart, right, row, some] {
    const int lane = threadIdx.x % 32;
    for (int n = 0; n < others / 8; ++n)
      for (int j = 0; j < 4; ++j) {
        const int own = row % 64 + j / 2 * 8 + lane / 4, line = first + own / 8 * apart + own % 8;
        const int other = n * 8 + lane % 4 * 2 + j % 2;
        if (!some) sums[n][j] = 0.0f;
        for (int k = 0; k < depth; ++k)
          sums[n][j] += cut_tf32(left[place_short<float, depth>(line, k)]) *
                        cut_tf32(right[place_short<float, depth>(other, k)]);
      }
    __syncwarp();  // as after the instruction, no lane goes on before the others
  };
  ask_for(work);
#endif
}
// The same of rows that follow one another.
template <typename Tensor, int others, int depth>
__device__ __forceinline__ void multiply_tiles_tf32(float (&sums)[others / 8][4], const float* left, const float* right,
                                                    int row, bool some) {
  multiply_lines_tf32<Tensor, others, depth>(sums, left, row / 64 * 64, 8, right, row, some);
}

}  // namespace of
