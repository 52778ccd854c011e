// Reductions across the threads of a block that share columns: threadIdx.x = place * across + column, both powers of
// two, 32 threads at least.
namespace of {

// Places of a column within one warp, and warps (or parts of one) that share it.
template <int deep, int across> constexpr int within = across >= 32 ? 1 : 32 / across < deep ? 32 / across : deep;
template <int deep, int across> constexpr int groups = deep / within<deep, across>;

// Numbers of shared memory that `combine` needs for vectors of `width`.
template <int deep, int across, int width> constexpr int room = groups<deep, across> > 1 ? groups<deep, across> * across * width : 1;

// The values of the threads that share a column; each of them gets the result.
template <typename Op, int deep, int across, typename T, int width>
__device__ __forceinline__ void combine(T (&values)[width], T* partial) {
#pragma unroll
  for (int offset = 1; offset < within<deep, across>; offset *= 2)
#pragma unroll
    for (int v = 0; v < width; ++v)
      values[v] = Op::of(values[v], (T)__shfl_xor_sync(0xffffffffu, values[v], offset * across));
  if constexpr (groups<deep, across> > 1) {
    const int column = threadIdx.x % across, place = threadIdx.x / across;
    __syncthreads();  // an earlier call may still read
    if (place % within<deep, across> == 0)
#pragma unroll
      for (int v = 0; v < width; ++v) partial[(place / within<deep, across> * width + v) * across + column] = values[v];
    __syncthreads();
#pragma unroll
    for (int v = 0; v < width; ++v) values[v] = partial[v * across + column];
    for (int group = 1; group < groups<deep, across>; ++group)
#pragma unroll
      for (int v = 0; v < width; ++v)
        values[v] = Op::of(values[v], partial[(group * width + v) * across + column]);
  }
}

}  // namespace of
