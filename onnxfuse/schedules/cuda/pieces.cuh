// Rows of which `pieces` neighbouring columns are parts: reductions across the threads of a block as in columns.cuh,
// and numbers of rows in memory.  A block's columns begin with a row.
namespace of {

// Numbers of shared memory that `combine_pieces` needs for vectors of `width`: what columns have, then what rows have.
template <int deep, int across, int width, int pieces>
constexpr int room_of_pieces = room<deep, across, width> > across * width + across * width / pieces
                                   ? room<deep, across, width> : across * width + across * width / pieces;

// The values of a vector's columns, of which those of a row have the same: where vectors are parts of rows, or whole
// ones, the compiler sees that, and keeps what follows from them once a row.
template <int pieces, typename T, int width> __device__ __forceinline__ void share_rows(T (&values)[width]) {
  constexpr int alike = pieces % width == 0 ? width : width % pieces == 0 ? pieces : 1;
#pragma unroll
  for (int v = 0; v < width; ++v) values[v] = values[v - v % alike];
}

// The values of the threads that share a column, then of the columns of a row, one after the other; each thread gets
// the results of its columns' rows.  Columns past the last whole row go along, and get what nobody asks for.
template <typename Op, int deep, int across, int pieces, typename T, int width>
__device__ __forceinline__ void combine_pieces(T (&values)[width], T* partial) {
  constexpr int columns = across * width, rows = columns / pieces;
  const int column = threadIdx.x % across, place = threadIdx.x / across;
  T* results = partial + columns;
  combine<Op, deep, across>(values, partial);
  __syncthreads();  // others may still read theirs
  if (place == 0)
#pragma unroll
    for (int v = 0; v < width; ++v) partial[column * width + v] = values[v];
  __syncthreads();
  for (int row = threadIdx.x; row < rows; row += deep * across) {
    T value = partial[row * pieces];
#pragma unroll
    for (int piece = 1; piece < pieces; ++piece) value = Op::of(value, partial[row * pieces + piece]);
    results[row] = value;
  }
  __syncthreads();
#pragma unroll
  for (int v = 0; v < width; ++v) {
    const int row = (column * width + v) / pieces;
    values[v] = results[row < rows ? row : 0];
  }
  share_rows<pieces>(values);
}

// The same of maxima and of the sums of exponentials under them.
template <typename E, typename Max, int deep, int across, int pieces, typename T, int width>
__device__ __forceinline__ void combine_exponentials_of_pieces(T (&most)[width], T (&sums)[width], T* partial) {
  T mine[width];
#pragma unroll
  for (int v = 0; v < width; ++v) mine[v] = most[v];
  combine_pieces<Max, deep, across, pieces>(most, partial);
#pragma unroll
  for (int v = 0; v < width; ++v) sums[v] = sums[v] * E::scale(mine[v], E::offset(most[v]));
  combine_pieces<Sum, deep, across, pieces>(sums, partial);
}

// The values of the threads that share a column, where the columns of a row have the same.
template <typename Op, int deep, int across, int pieces, typename T, int width>
__device__ __forceinline__ void combine_alike(T (&values)[width], T* partial) {
  combine<Op, deep, across>(values, partial);
  share_rows<pieces>(values);
}

// One of so many.  Of float32 nearly: what a mean is off by the squares about it are off by squared, and a division that
// is exact has a branch, which keeps the next loads behind it.
__device__ __forceinline__ float share_of(float count) { return __fdividef(1.0f, count); }
__device__ __forceinline__ double share_of(double count) { return 1 / count; }
// A number more of those of which a thread has the mean and the squares of differences from it; `share` is one of as many
// as it has then.
template <typename T> __device__ __forceinline__ void add_moment(T& mean, T& squares, T x, T share) {
  const T difference = x - mean;
  mean += difference * share;
  squares += difference * (x - mean);
}
// The squares of differences from another centre than the mean of `count` numbers.
template <typename T> __device__ __forceinline__ T about(T squares, T mean, T count, T centre) {
  const T difference = mean - centre;
  return count > (T)0 ? squares + count * difference * difference : squares;
}

// What rows have in memory, for `width` columns from the `first` one on.
template <int width, int pieces, typename T, typename idx>
__device__ __forceinline__ Vector<T, width> load_pieces(const T* from, idx first) {
  Vector<T, width> vector;
#pragma unroll
  for (int v = 0; v < width; ++v) vector.at[v] = from[(first + v) / pieces];
  return vector;
}
// The other way round: the first column of a row writes.
template <int pieces, typename T, typename U, int width, typename idx>
__device__ __forceinline__ void store_pieces(T* to, idx first, const U (&values)[width]) {
#pragma unroll
  for (int v = 0; v < width; ++v)
    if ((first + v) % pieces == 0) to[(first + v) / pieces] = Store<T>::from(values[v]);
}

}  // namespace of
