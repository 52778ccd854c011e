// Matrix products of four warps together, of tiles in shared memory, which go on while the warps do other things.
// GPUs that have no such instruction compute the same at once, warp by warp.
namespace of {

// A tile has to begin at a multiple of 1024 bytes.
__device__ __forceinline__ unsigned char* tiles_from(unsigned char* shared) {
#if defined(ONNXFUSE_EMULATOR)
  return shared;
#else
  return shared + (-static_cast<unsigned>(__cvta_generic_to_shared(shared)) & 1023u);
#endif
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(ONNXFUSE_EMULATOR)
#define OF_WARPGROUP 1
#endif

// What the instruction reads a tile by: its address, bytes from panel to panel, 1024 from eight rows to the next eight.
#ifdef OF_WARPGROUP
__device__ __forceinline__ unsigned long long described(const void* tile, int panels_apart) {
  const unsigned long long address = static_cast<unsigned long long>(__cvta_generic_to_shared(tile));
  return (address & 0x3ffff) >> 4 | static_cast<unsigned long long>(panels_apart >> 4) << 16 | 64ull << 32 | 1ull << 62;
}
#endif

// What threads wrote to shared memory, or asked to be copied there and waited for, is there for products too, behind
// a barrier.
__device__ __forceinline__ void tiles_written() {
#ifdef OF_WARPGROUP
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
// Registers that products read or add to are as the warps left them.
__device__ __forceinline__ void products_begin() {
#ifdef OF_WARPGROUP
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
// What was asked for since the last call is a group.
__device__ __forceinline__ void products_asked() {
#ifdef OF_WARPGROUP
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#elif defined(ONNXFUSE_EMULATOR)
  onnxfuse_emulator_asked(onnxfuse_emulator::Later::products);
#endif
}
// Waits for all groups but the last `left`.
template <int left> __device__ __forceinline__ void products_done() {
#ifdef OF_WARPGROUP
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(left) : "memory");
#elif defined(ONNXFUSE_EMULATOR)
  onnxfuse_emulator_done(onnxfuse_emulator::Later::products, left);
#endif
}
// Keeps the compiler from moving what is done with these registers over what stands here.
#ifdef OF_WARPGROUP
__device__ __forceinline__ void keep(float& x) { asm volatile("" : "+f"(x) :: "memory"); }
__device__ __forceinline__ void keep(unsigned& x) { asm volatile("" : "+r"(x) :: "memory"); }
#endif
template <typename T, int count> __device__ __forceinline__ void hold(T (&registers)[count][4]) {
#ifdef OF_WARPGROUP
#pragma unroll
  for (int i = 0; i < count; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      keep(registers[i][j]);
#endif
}

// Products without the instruction: at once, or, for the emulator, when they are waited for.
template <typename Work> __device__ __forceinline__ void ask_for(const Work& work) {
#if defined(ONNXFUSE_EMULATOR)
  onnxfuse_emulator_later(onnxfuse_emulator::Later::products, work);
#else
  work();
#endif
}

// sums = left right', or added to them where there are some: `sums` are a warp's 16 rows from `row` on, by all `others`
// rows of the right tile; fragments as of::mma has them, tiles as of::multiply_own.  Tensor::by_tile and
// Tensor::by_fragments are the instruction for so many columns.
template <typename Tensor, typename T, int rows, int others, int depth, bool left_across = false,
          bool right_across = false>
__device__ __forceinline__ void multiply_tiles(float (&sums)[others / 8][4], const T* left, const T* right, int row,
                                               bool some = false) {
#ifdef OF_WARPGROUP
  const unsigned long long a = described(left + row / 64 * (64 * (left_across ? depth : panel)), depth * 128);
  const unsigned long long b = described(right, right_across ? depth * 128 : 16);
#pragma unroll
  for (int step = 0; step < depth / 16; ++step)
    Tensor::by_tile(sums, a + (left_across ? step * 128 : step / 4 * (rows * 8) + step % 4 * 2),
                    b + (right_across ? step * 128 : step / 4 * (others * 8) + step % 4 * 2), some || step > 0);
#else
  const auto work = [&sums, left, right, row, some] {
    if (!some)
#pragma unroll
      for (int n = 0; n < others / 8; ++n) sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0.0f;
    multiply_own<T, rows, others, depth, left_across, right_across>(
        reinterpret_cast<float (&)[1][others / 8][4]>(sums), left, right, row, 0);
  };
  ask_for(work);
#endif
}

// ---- Tiles whose lines are of 128 bytes, 64 or 32, and may begin at any line. ----

// Where an element lies: pieces of 16 bytes change places by the number of the 128 bytes that a line is in.
template <typename T, int depth> __device__ __forceinline__ int place_short(int row, int column) {
  constexpr int piece = 16 / sizeof(T), pieces = depth / piece, lines = 8 / pieces;
  return row * depth + (column / piece ^ row / lines % pieces) * piece + column % piece;
}
// As of::described, with so many bytes from eight lines to the next eight.
#ifdef OF_WARPGROUP
template <int bytes> __device__ __forceinline__ unsigned long long described_lines(const void* tile, int apart) {
  const unsigned long long address = static_cast<unsigned long long>(__cvta_generic_to_shared(tile));
  return (address & 0x3ffff) >> 4 | 1ull << 16 | static_cast<unsigned long long>(apart >> 4) << 32 |
         (bytes == 128 ? 1ull : bytes == 64 ? 2ull : 3ull) << 62;
}
#endif
// As of::multiply_tiles: the left operand's 64 rows are eight times eight lines of a tile, from a `first` one on, so many
// lines `apart`; of these a warp has the 16 that `row` is the first of.
template <typename Tensor, typename T, int others, int depth>
__device__ __forceinline__ void multiply_lines(float (&sums)[others / 8][4], const T* left, int first, int apart,
                                               const T* right, int row, bool some) {
#ifdef OF_WARPGROUP
  constexpr int bytes = depth * sizeof(T);
  const unsigned long long a = described_lines<bytes>(left + first * depth, apart * bytes);
  const unsigned long long b = described_lines<bytes>(right, 8 * bytes);
#pragma unroll
  for (int step = 0; step < bytes / 32; ++step)
    Tensor::by_tile(sums, a + step * 2, b + step * 2, some || step > 0);
#else
  const auto work = [&sums, left, first, apart, right, row, some] {
    const int lane = threadIdx.x % 32, own_row = row % 64 + lane % 16, line = first + own_row / 8 * apart + own_row % 8;
    if (!some)
#pragma unroll
      for (int n = 0; n < others / 8; ++n) sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0.0f;
#pragma unroll
    for (int step = 0; step < depth / 16; ++step) {
      unsigned own[4];
      load_matrices<false>(own, left + place_short<T, depth>(line, step * 16 + lane / 16 * 8));
#pragma unroll
      for (int n = 0; n < others / 8; n += 2) {
        unsigned other[4];
        load_matrices<false>(other, right + place_short<T, depth>(n * 8 + lane / 16 * 8 + lane % 8,
                                                                  step * 16 + lane / 8 % 2 * 8));
        mma<T>(sums[n], own, other[0], other[1]);
        mma<T>(sums[n + 1], own, other[2], other[3]);
      }
    }
  };
  ask_for(work);
#endif
}
// The same of rows that follow one another.
template <typename Tensor, typename T, int others, int depth>
__device__ __forceinline__ void multiply_short(float (&sums)[others / 8][4], const T* left, const T* right, int row,
                                               bool some) {
  multiply_lines<Tensor, T, others, depth>(sums, left, row / 64 * 64, 8, right, row, some);
}

// sums += left right: `left` are fragments of a warp's 16 rows, the right tile has `rows` rows.
template <typename Tensor, typename T, int rows, int columns>
__device__ __forceinline__ void multiply_fragments(float (&sums)[columns / 8][4], const unsigned (&left)[rows / 16][4],
                                                   const T* right) {
#ifdef OF_WARPGROUP
  const unsigned long long b = described(right, rows * 128);
#pragma unroll
  for (int step = 0; step < rows / 16; ++step) Tensor::by_fragments(sums, left[step], b + step * 128);
#else
  const auto work = [&sums, &left, right] {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < rows / 16; ++step)
#pragma unroll
      for (int c = 0; c < columns / 8; c += 2) {
        unsigned other[4];
        load_matrices<true>(other, right + place<rows>(step * 16 + lane % 16, c * 8 + lane / 16 * 8));
        mma<T>(sums[c], left[step], other[0], other[1]);
        mma<T>(sums[c + 1], left[step], other[2], other[3]);
      }
  };
  ask_for(work);
#endif
}

}  // namespace of
