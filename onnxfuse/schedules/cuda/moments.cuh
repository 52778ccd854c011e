// Mean of a column's numbers, and the sum of squares of differences from it, where a warp has 16 rows of the column at a
// time: in shared memory a lane goes down two columns, and no lane need tell another; in registers they share them.
namespace of {

struct alignas(8) Moments {
  float mean, squares;
};

// Those of two columns of a piece of results as they are laid out to be stored, `wide` columns.
template <int wide, typename T>
__device__ __forceinline__ void find_moments(Moments (&found)[2], const T* laid, int lane) {
  const int column = lane * 2 % wide;
  float numbers[16][2];
#pragma unroll
  for (int row = 0; row < 16; ++row) {
    const auto pair = load<2>(laid + packed_at<wide, sizeof(T)>(row, column));
    numbers[row][0] = value(pair.at[0]), numbers[row][1] = value(pair.at[1]);
  }
#pragma unroll
  for (int v = 0; v < 2; ++v) {
    float mean = 0.0f, squares = 0.0f;
#pragma unroll
    for (int row = 0; row < 16; ++row) mean += numbers[row][v] * (1.0f / 16);
#pragma unroll
    for (int row = 0; row < 16; ++row) {
      const float difference = numbers[row][v] - mean;
      squares += difference * difference;
    }
    found[v] = {mean, squares};
  }
}
// The same of results that a lane has as vectors of `passes` rows, as have the lanes that are `lanes` apart: each pair of
// these halves the columns between them, until each lane has two.
template <int lanes, int passes, typename T, int width>
__device__ __forceinline__ void share_moments(Moments (&found)[2], const Vector<T, width> (&results)[passes], int lane) {
  float mean[width], squares[width];
#pragma unroll
  for (int v = 0; v < width; ++v) {
    mean[v] = squares[v] = 0.0f;
#pragma unroll
    for (int pass = 0; pass < passes; ++pass) mean[v] += value(results[pass].at[v]) * (1.0f / passes);
#pragma unroll
    for (int pass = 0; pass < passes; ++pass) {
      const float difference = value(results[pass].at[v]) - mean[v];
      squares[v] += difference * difference;
    }
  }
#pragma unroll
  for (int kept = width / 2; kept > 1; kept /= 2) {
    const int apart = lanes * (width / 2 / kept);
    const bool upper = lane & apart;
#pragma unroll
    for (int v = 0; v < kept; ++v) {
      const float own = upper ? mean[kept + v] : mean[v], given = upper ? mean[v] : mean[kept + v];
      const float own_squares = upper ? squares[kept + v] : squares[v];
      const float given_squares = upper ? squares[v] : squares[kept + v];
      const float difference = __shfl_xor_sync(0xffffffffu, given, apart) - own;
      mean[v] = own + difference * 0.5f;
      squares[v] = own_squares + __shfl_xor_sync(0xffffffffu, given_squares, apart) +
                   difference * difference * (passes * (width / 2 / kept) * 0.5f);
    }
  }
  found[0] = {mean[0], squares[0]}, found[1] = {mean[1], squares[1]};
}
// The first of these two, of a piece's columns.
template <int lanes, int width> __device__ __forceinline__ int shared_column(int lane) {
  int column = lane % lanes * width;
#pragma unroll
  for (int kept = width / 2; kept > 1; kept /= 2)
    if (lane & lanes * (width / 2 / kept)) column += kept;
  return column;
}
// What is known of so many strips, and of one more (Chan, Golub and LeVeque, 1979).
__device__ __forceinline__ void add_moments(Moments (&known)[2], const Moments (&more)[2], int strips) {
  const float share = __fdividef(1.0f, strips + 1.0f);
#pragma unroll
  for (int v = 0; v < 2; ++v) {
    const float difference = more[v].mean - known[v].mean;
    known[v].mean = strips == 0 ? more[v].mean : known[v].mean + difference * share;
    known[v].squares = strips == 0 ? more[v].squares
                                   : known[v].squares + more[v].squares + difference * difference * (16 * strips * share);
  }
}
// What four warps know of a column, each of so many rows, where they have laid it out.
__device__ __forceinline__ Moments of_four(const float* laid, int apart, int column, float rows) {
  Moments each[4];
  float mean = 0.0f, squares = 0.0f;
#pragma unroll
  for (int warp = 0; warp < 4; ++warp) {
    const auto known = load<2>(laid + warp * apart + column * 2);
    each[warp] = {known.at[0], known.at[1]};
    mean += known.at[0] * 0.25f, squares += known.at[1];
  }
#pragma unroll
  for (int warp = 0; warp < 4; ++warp) {
    const float difference = each[warp].mean - mean;
    squares += difference * difference * rows;
  }
  return {mean, squares};
}

}  // namespace of
