// What tiled kernels add: a tile in shared memory through which a block turns rows into columns.

namespace of {

// `rows` rows of `columns` elements, reached along a row by vectors of `wide` elements and down a column by vectors of
// `tall`.  A thread turns `wide` of the latter into `tall` of the former in its registers.  After every `tall` rows lies
// one vector that nobody uses, of four bytes at least: without it the lanes of a warp, which stand below one another
// when they write, would all meet in a few of the 32 banks.
template <typename T, int rows, int columns, int tall, int wide> struct Tile {
  static constexpr int pad = wide * sizeof(T) < 4 ? 4 / sizeof(T) : wide;
  alignas(16) T at[rows * columns + rows / tall * pad];

  __device__ __forceinline__ T* place(int row, int column) {
    return at + row * columns + row / tall * pad + column;
  }
  __device__ __forceinline__ void put(int row, int column, const Vector<T, tall> (&down)[wide]) {
#pragma unroll
    for (int k = 0; k < tall; ++k) {
      Vector<T, wide> along;
#pragma unroll
      for (int j = 0; j < wide; ++j) along.at[j] = down[j].at[k];
      store(place(row + k, column), along);
    }
  }
  __device__ __forceinline__ void take(int row, int column, Vector<T, tall> (&down)[wide]) {
#pragma unroll
    for (int k = 0; k < tall; ++k) {
      const Vector<T, wide> along = load<wide>(place(row + k, column));
#pragma unroll
      for (int j = 0; j < wide; ++j) down[j].at[k] = along.at[j];
    }
  }
};

}  // namespace of
