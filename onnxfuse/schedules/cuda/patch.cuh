// Products of windows that lie in shared memory as a piece of the image: each element of the left operand is read where
// the window has it.
namespace of {

// The pairs of a left operand's 32 rows by 16 columns that `mma` has a lane hold, of windows that begin at `first`; from
// `most` on, counted from the first column, zeros.
template <bool all, typename T>
__device__ __forceinline__ void pairs_of(unsigned (&own)[2][4], const T* const (&first)[4], const int* offsets, int most) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int column = half * 8 + t * 2;
    const Vector<int, 2> behind = load<2>(offsets + column);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Vector<T, 2> pair = {};
      if (all || column < most) pair.at[0] = first[i][behind.at[0]];
      if (all || column + 1 < most) pair.at[1] = first[i][behind.at[1]];
      own[i / 2][i % 2 + half * 2] = reinterpret_cast<const unsigned&>(pair);
    }
  }
}

// What tensor cores multiply of 16-bit elements at once: two vectors of 16 bytes of what is summed over.
template <typename T> struct Multiplied {
  static constexpr int vector = 8;
  static __device__ __forceinline__ void load(unsigned (&pairs)[4], const T* row) { load_matrices<false>(pairs, row); }
  static __device__ __forceinline__ void add(float (&sums)[4], const unsigned (&left)[4], unsigned low, unsigned high) {
    mma<T>(sums, left, low, high);
  }
};

// sums += what so many elements of a warp's 32 windows, of which a lane has its `own`, make with those of 8 times
// `columns8` columns, whose first elements begin at `weights`.
template <typename T, int pitch, int columns8>
__device__ __forceinline__ void multiply_windows(float (&sums)[2][columns8][4], const unsigned (&own)[2][4],
                                                 const T* weights) {
  const int lane = threadIdx.x % 32;
  const T* const from = weights + (lane / 16 * 8 + lane % 8) * pitch + lane / 8 % 2 * Multiplied<T>::vector;
#pragma unroll
  for (int n = 0; n < columns8; n += 2) {
    unsigned columns[4];
    Multiplied<T>::load(columns, from + n * 8 * pitch);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Multiplied<T>::add(sums[i][n], own[i], columns[0], columns[1]);
      Multiplied<T>::add(sums[i][n + 1], own[i], columns[2], columns[3]);
    }
  }
}

// sums += windows weights': a warp's 32 windows from `row` on by 8 times `columns8` columns.  A tile of windows is `wide`
// windows broad, these are `across` elements apart and `down` lines; the piece has `line` elements a line.  The `depth`
// elements of a window lie `offsets` behind its first one.  Rows of weights are `pitch` elements apart, zeros behind a
// window's elements.
template <typename T, int wide, int down, int across, int line, int depth, int pitch, int columns8>
__device__ __forceinline__ void multiply_patch(float (&sums)[2][columns8][4], const T* patch, const int* offsets,
                                               const T* weights, int row) {
  const int lane = threadIdx.x % 32;
  const T* first[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int window = row + lane / 4 + i * 8;
    first[i] = patch + window / wide * down * line + window % wide * across;
  }
  constexpr int left = depth % 16, at_once = columns8 > 4 ? 1 : 2;  // as registers hold
  unsigned own[2][4];
#pragma unroll at_once
  for (int start = 0; start + 16 <= depth; start += 16) {
    pairs_of<true>(own, first, offsets + start, 16);
    multiply_windows<T, pitch>(sums, own, weights + start);
  }
  if constexpr (left > 0) {
    pairs_of<false>(own, first, offsets + depth - left, left);
    multiply_windows<T, pitch>(sums, own, weights + depth - left);
  }
}

// The same of windows whose elements come in vectors of channels of a `pixel`, which is so many elements: the piece has
// `line` pixels a line, and vector number i of a window lies offsets[i] behind its first.
template <typename T, int wide, int down, int across, int line, int pixel, int depth, int pitch, int columns8>
__device__ __forceinline__ void multiply_pixels(float (&sums)[2][columns8][4], const T* patch, const int* offsets,
                                                const T* weights, int row) {
  constexpr int vector = Multiplied<T>::vector, both = 2 * vector;
  const int lane = threadIdx.x % 32;
  const T* first[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int window = row + i * 16 + lane % 16;
    first[i] = patch + (window / wide * down * line + window % wide * across) * pixel;
  }
  unsigned own[2][4];
#pragma unroll 2
  for (int start = 0; start + both <= depth; start += both) {
    const int behind = offsets[start / vector + lane / 16];
#pragma unroll
    for (int i = 0; i < 2; ++i) Multiplied<T>::load(own[i], first[i] + behind);
    multiply_windows<T, pitch>(sums, own, weights + start);
  }
  if constexpr (depth % both > 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Multiplied<T>::load(own[i], first[i] + offsets[depth / vector - 1]);
      own[i][2] = own[i][3] = 0;
    }
    multiply_windows<T, pitch>(sums, own, weights + depth - vector);
  }
}

}  // namespace of
