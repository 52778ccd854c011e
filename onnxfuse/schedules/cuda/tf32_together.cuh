// Products of float32 operands by four warps together, as TF32, of tiles that have a line for each row.
// Copies by tensor maps rounded the elements; what else they had is cut off.
namespace of {

#if defined(ONNXFUSE_EMULATOR)
__device__ __forceinline__ float cut_tf32(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }
#endif

// sums = left right', or added to them where there are some, as of::multiply_tiles; tiles as of::multiply_short.
template <typename Tensor, int others, int depth>
__device__ __forceinline__ void multiply_tiles_tf32(float (&sums)[others / 8][4], const float* left, const float* right,
                                                    int row, bool some) {
#if defined(OF_WARPGROUP)
  constexpr int bytes = depth * sizeof(float);
  const unsigned long long a = described_lines<bytes>(left + row / 64 * (64 * depth)), b = described_lines<bytes>(right);
#pragma unroll
  for (int step = 0; step < bytes / 32; ++step) Tensor::by_tile(sums, a + step * 2, b + step * 2, some || step > 0);
#elif defined(ONNXFUSE_EMULATOR)
  const auto work = [&sums, left, right, row, some] {
    const int lane = threadIdx.x % 32;
    for (int n = 0; n < others / 8; ++n)
      for (int j = 0; j < 4; ++j) {
        const int own = row + j / 2 * 8 + lane / 4, other = n * 8 + lane % 4 * 2 + j % 2;
        if (!some) sums[n][j] = 0.0f;
        for (int k = 0; k < depth; ++k)
          sums[n][j] += cut_tf32(left[place_short<float, depth>(own, k)]) *
                        cut_tf32(right[place_short<float, depth>(other, k)]);
      }
    __syncwarp();  // as after the instruction, no lane goes on before the others
  };
  ask_for(work);
#endif
}

}  // namespace of
