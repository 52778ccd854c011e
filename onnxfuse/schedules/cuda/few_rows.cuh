// Products of few rows, bound by reading the other operand once: lanes read that in the order in which it lies, as 16 by
// 16 tiles of the left operand of a product on tensor cores, whose right one are the few rows.  What is summed over may
// come in any order, as long as both operands have the same.
namespace of {

// Neighbours that are read once: they take no room in the first-level cache.
template <int width, typename T> __device__ __forceinline__ Vector<T, width> load_once(const T* from) {
#if !defined(ONNXFUSE_EMULATOR)
  if constexpr (width * sizeof(T) == 16) {
    uint4 words;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w) : "l"(from));
    return reinterpret_cast<const Vector<T, width>&>(words);
  }
#endif
  return load<width>(from);
}

// Two neighbours of a vector as one word.
template <typename T, int width> __device__ __forceinline__ unsigned pair_at(const Vector<T, width>& vector, int i) {
  return reinterpret_cast<const unsigned*>(vector.at)[i];
}

// sums += weights few', a step of 16 elements of what is summed over.  With lane = 4 g + t, a lane has of `width`
// columns from g width on the elements 4 t to 4 t + 3, and of row 8 i + g of the few the same.
template <typename T, int width, int rows8>
__device__ __forceinline__ void multiply_across(float (&sums)[width / 2][rows8][4], const Vector<T, width> (&weights)[4],
                                                const Vector<T, 4> (&few)[rows8]) {
#pragma unroll
  for (int c = 0; c < width / 2; ++c) {
    unsigned left[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned one = pair_at(weights[2 * i], c), other = pair_at(weights[2 * i + 1], c);
      left[2 * i] = (one & 0xffffu) | other << 16;
      left[2 * i + 1] = one >> 16 | (other & 0xffff0000u);
    }
#pragma unroll
    for (int i = 0; i < rows8; ++i) mma<T>(sums[c][i], left, pair_at(few[i], 0), pair_at(few[i], 1));
  }
}

// The same, a step of 32 elements: a lane has of columns 8 c + g the elements 8 t to 8 t + 7, and of row 8 i + g too.
template <typename T, int columns8, int rows8>
__device__ __forceinline__ void multiply_along(float (&sums)[columns8 / 2][rows8][4],
                                               const Vector<T, 8> (&weights)[columns8],
                                               const Vector<T, 8> (&few)[rows8]) {
#pragma unroll
  for (int c = 0; c < columns8 / 2; ++c)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned left[4] = {pair_at(weights[2 * c], 2 * half), pair_at(weights[2 * c + 1], 2 * half),
                                pair_at(weights[2 * c], 2 * half + 1), pair_at(weights[2 * c + 1], 2 * half + 1)};
#pragma unroll
      for (int i = 0; i < rows8; ++i)
        mma<T>(sums[c][i], left, pair_at(few[i], 2 * half), pair_at(few[i], 2 * half + 1));
    }
}

// sums += weights few' without tensor cores, a step of one element of what is summed over: a lane has eight columns.
template <typename T, int rows>
__device__ __forceinline__ void add_across(float (&sums)[rows][8], const Vector<T, 8> (&weights)[1],
                                           const Vector<T, 1> (&few)[rows]) {
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const float weight = value(weights[0].at[e]);
#pragma unroll
    for (int i = 0; i < rows; ++i) sums[i][e] += value(few[i].at[0]) * weight;
  }
}

// The same, a step of eight elements: a lane has these of all columns.
template <typename T, int rows, int columns>
__device__ __forceinline__ void add_along(float (&sums)[rows][columns], const Vector<T, 8> (&weights)[columns],
                                          const Vector<T, 8> (&few)[rows]) {
#pragma unroll
  for (int c = 0; c < columns; ++c)
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float weight = value(weights[c].at[e]);
#pragma unroll
      for (int i = 0; i < rows; ++i) sums[i][c] += value(few[i].at[e]) * weight;
    }
}

// A warp's sums as rows of floats.  Across, every `lanes`-th lane has the same eight columns, and others of what is summed
// over; along, all have all columns.
template <int lanes, bool across, int rows, int own>
__device__ __forceinline__ void lay_out_sums(float* laid, int long_row, int, float (&sums)[rows][own]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < rows; ++i)
#pragma unroll
    for (int c = 0; c < own; ++c) {
#pragma unroll
      for (int apart = across ? lanes : 1; apart < 32; apart *= 2)
        sums[i][c] += __shfl_xor_sync(0xffffffffu, sums[i][c], apart);
      if (lane < (across ? lanes : 1)) laid[i * long_row + lane * own + c] = sums[i][c];
    }
}

// A warp's sums as rows of floats, those of so many rows.  Of tile c a lane has columns g and g + 8, where those are
// columns 2 c and 2 c + 1 of its own `width` in a product across, and of the c-th 16 in one along.
template <bool across, int tiles, int rows8>
__device__ __forceinline__ void lay_out(float* laid, int long_row, int rows, const float (&sums)[tiles][rows8][4]) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < rows8; ++i)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = i * 8 + t * 2 + j;
      if (row >= rows) continue;
#pragma unroll
      for (int c = 0; c < tiles; ++c) {
        float* const to = laid + row * long_row + (across ? (g * tiles + c) * 2 : c * 16 + g);
        to[0] = sums[c][i][j], to[across ? 1 : 8] = sums[c][i][2 + j];
      }
    }
}

// The first of so many pieces of shared memory, `size` floats each, becomes the sum of all, in their order.  A thread has
// four neighbours of a row at a time; it alone reads and writes them.
template <int columns, int threads>
__device__ __forceinline__ void add_up(float* laid, int long_row, int size, int rows, int pieces) {
  for (int item = threadIdx.x; item < rows * (columns / 4); item += threads) {
    float* const own = laid + item / (columns / 4) * long_row + item % (columns / 4) * 4;
    Vector<float, 4> total = load<4>(own);
#pragma unroll 8
    for (int piece = 1; piece < pieces; ++piece) {
      const Vector<float, 4> more = load<4>(own + piece * size);
#pragma unroll
      for (int v = 0; v < 4; ++v) total.at[v] += more.at[v];
    }
    store(own, total);
  }
}

}  // namespace of
