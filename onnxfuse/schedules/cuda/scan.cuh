// Running totals over the threads that share a row.
namespace of {

// Over `threads` neighbouring lanes of a warp, a power of two: what comes of those before a lane and of itself, or behind
// it where `reverse`.
template <typename Op, int threads, bool reverse, typename T> __device__ __forceinline__ T scan_lanes(T x, int lane) {
#pragma unroll
  for (int offset = 1; offset < threads; offset *= 2) {
    const T other = (T)(reverse ? __shfl_down_sync(0xffffffffu, x, offset) : __shfl_up_sync(0xffffffffu, x, offset));
    if (reverse ? lane + offset < threads : lane >= offset) x = Op::of(other, x);
  }
  return x;
}

// Makes totals of values: `items` vectors of `width` a thread, of which neighbouring threads have neighbouring ones, all
// of an item before those of the next.  `carry` is the total of what comes before all of these, and then with them;
// `none` is what nothing amounts to.  Rows wider than a warp own the block; `partial` then has room for a number a warp
// and item.
template <typename Op, int threads, bool reverse, bool exclusive, int width, int items, typename T, int count>
__device__ __forceinline__ void scan(T (&values)[count], T& carry, T none, T* partial) {
  constexpr int lanes = threads < 32 ? threads : 32, warps = threads / lanes;
  const int lane = threadIdx.x % lanes, warp = threadIdx.x % threads / lanes;
  T before[items], whole[items];
#pragma unroll
  for (int item = 0; item < items; ++item) {
    T* mine = values + item * width;
    T total = reverse ? mine[width - 1] : mine[0];
#pragma unroll
    for (int k = 1; k < width; ++k) total = Op::of(total, mine[reverse ? width - 1 - k : k]);
    const T up_to = scan_lanes<Op, lanes, reverse>(total, lane);
    const T passed = (T)(reverse ? __shfl_down_sync(0xffffffffu, up_to, 1) : __shfl_up_sync(0xffffffffu, up_to, 1));
    before[item] = lane == (reverse ? lanes - 1 : 0) ? none : passed;
    whole[item] = (T)__shfl_sync(0xffffffffu, up_to, (threadIdx.x % 32 / lanes) * lanes + (reverse ? 0 : lanes - 1));
  }
  if constexpr (warps > 1) {
    __syncthreads();  // an earlier call may still read
#pragma unroll
    for (int item = 0; item < items; ++item)
      if (lane == 0) partial[item * warps + warp] = whole[item];
    __syncthreads();
#pragma unroll
    for (int item = 0; item < items; ++item) {
      const int place = lane % warps;
      const T up_to = scan_lanes<Op, warps, reverse>(partial[item * warps + place], place);
      const int last = reverse ? warp + 1 : warp - 1;
      const T others = (T)__shfl_sync(0xffffffffu, up_to, last < 0 || last >= warps ? 0 : last);
      if (last >= 0 && last < warps) before[item] = Op::of(others, before[item]);
      whole[item] = (T)__shfl_sync(0xffffffffu, up_to, reverse ? 0 : warps - 1);
    }
  }
#pragma unroll
  for (int turn = 0; turn < items; ++turn) {
    const int item = reverse ? items - 1 - turn : turn;
    T* mine = values + item * width;
    T total = Op::of(carry, before[item]);
#pragma unroll
    for (int k = 0; k < width; ++k) {
      const int v = reverse ? width - 1 - k : k;
      const T next = Op::of(total, mine[v]);
      mine[v] = exclusive ? total : next;
      total = next;
    }
    carry = Op::of(carry, whole[item]);
  }
}

}  // namespace of
