// Reductions across the threads of a block that share columns: threadIdx.x = place * across + column, both powers of
// two, 32 threads at least.
namespace of {

// Places of a column within one warp, and warps (or parts of one) that share it.
template <int deep, int across> constexpr int within = across >= 32 ? 1 : 32 / across < deep ? 32 / across : deep;
template <int deep, int across> constexpr int groups = deep / within<deep, across>;

// What a column has of shared memory: a number a group, and one that keeps columns out of each other's banks.
template <int deep, int across> constexpr int line = groups<deep, across> + 1;

// Numbers of shared memory that `combine` needs for vectors of `width`.
template <int deep, int across, int width> constexpr int room = groups<deep, across> > 1 ? (line<deep, across> + 1) * across * width : 1;

// The values of the threads that share a column; each of them gets the result.  What the groups found is spread over the
// block once more, a number a thread, neighbouring lanes of the same column: nobody reads all groups.
template <typename Op, int deep, int across, typename T, int width>
__device__ __forceinline__ void combine(T (&values)[width], T* partial) {
#pragma unroll
  for (int offset = 1; offset < within<deep, across>; offset *= 2)
#pragma unroll
    for (int v = 0; v < width; ++v)
      values[v] = Op::of(values[v], (T)__shfl_xor_sync(0xffffffffu, values[v], offset * across));
  if constexpr (groups<deep, across> > 1) {
    constexpr int columns = across * width, numbers = columns * groups<deep, across>;
    const int column = threadIdx.x % across, place = threadIdx.x / across;
    T* results = partial + columns * line<deep, across>;
    __syncthreads();  // an earlier call may still read
    if (place % within<deep, across> == 0)
#pragma unroll
      for (int v = 0; v < width; ++v)
        partial[(v * across + column) * line<deep, across> + place / within<deep, across>] = values[v];
    __syncthreads();
#pragma unroll
    for (int first = 0; first < numbers; first += deep * across) {
      const int number = first + threadIdx.x, of_column = number / groups<deep, across>;
      const bool inside = numbers % (deep * across) == 0 || number < numbers;
      T value = partial[(inside ? of_column : 0) * line<deep, across> + number % groups<deep, across>];
#pragma unroll
      for (int offset = 1; offset < groups<deep, across>; offset *= 2)
        value = Op::of(value, (T)__shfl_xor_sync(0xffffffffu, value, offset));
      if (inside && number % groups<deep, across> == 0) results[of_column] = value;
    }
    __syncthreads();
#pragma unroll
    for (int v = 0; v < width; ++v) values[v] = results[v * across + column];
  }
}

// The same of maxima and of the sums of exponentials under them.
template <typename E, typename Max, int deep, int across, typename T, int width>
__device__ __forceinline__ void combine_exponentials(T (&most)[width], T (&sums)[width], T* partial) {
  T mine[width];
#pragma unroll
  for (int v = 0; v < width; ++v) mine[v] = most[v];
  combine<Max, deep, across>(most, partial);
#pragma unroll
  for (int v = 0; v < width; ++v) sums[v] = sums[v] * E::scale(mine[v], E::offset(most[v]));
  combine<Sum, deep, across>(sums, partial);
}

}  // namespace of
