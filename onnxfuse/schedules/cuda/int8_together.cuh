// Products of 8-bit integers by four warps together, of tiles that have a line for each row, of 128 bytes.
namespace of {

// sums = left right', or added to them where there are some, as of::multiply_tiles; tiles as of::multiply_own_bytes.
template <typename Tensor, typename A, typename B, int rows, int others>
__device__ __forceinline__ void multiply_tiles_bytes(ByteSums<1, others / 8>& sums, const A* left, const B* right, int row,
                                                     bool some) {
#ifdef OF_WARPGROUP
  const unsigned long long a = described(left + row / 64 * (64 * 128), 16), b = described(right, 16);
#pragma unroll
  for (int step = 0; step < 4; ++step) Tensor::by_tile(sums.of[0], a + step * 2, b + step * 2, some || step > 0);
#else
  const auto work = [&sums, left, right, row, some] {
    if (!some)
#pragma unroll
      for (int n = 0; n < others / 8; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) sums.of[0][n][j] = 0;
    multiply_own_bytes<A, B, rows, others, 128, false, false, false, false>(sums, left, right, row, 0);
  };
  ask_for(work);
#endif
}
// Keeps the compiler from moving what is done with sums over what stands here.
template <int columns8> __device__ __forceinline__ void hold_bytes(ByteSums<1, columns8>& sums) {
#ifdef OF_WARPGROUP
#pragma unroll
  for (int n = 0; n < columns8; ++n)
#pragma unroll
    for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(sums.of[0][n][j]) :: "memory");
#endif
}

// The totals of a tile's lines: each thread has those of lines of its own, in whatever order pieces lie.
template <typename T, int lines, int threads, int count>
__device__ __forceinline__ void add_lines(int (&totals)[count], const T* tile) {
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const int line = threadIdx.x + i * threads;
    if (line >= lines) break;
#pragma unroll
    for (int piece = 0; piece < 8; ++piece) {
      // Those of neighbours lie in banks of their own.
      const auto words = load<4>(reinterpret_cast<const unsigned*>(tile + line * 128 + (piece + line) % 8 * 16));
#pragma unroll
      for (int word = 0; word < 4; ++word) totals[i] = total_bytes<T>(words.at[word], totals[i]);
    }
  }
}
template <int lines, int threads, int width, int count>
__device__ __forceinline__ void lay_lines(int* totals, const int (&own)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const int line = threadIdx.x + i * threads;
    if (line < lines) totals[column_of<width>(line)] = own[i];
  }
}

}  // namespace of
