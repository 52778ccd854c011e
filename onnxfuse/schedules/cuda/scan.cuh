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

// The same of columns: a thread has `items` neighbouring elements of `width` of them, threadIdx.x = place * across +
// column as in columns.cuh.  What the groups of places amount to is totalled a number a thread, neighbouring lanes of
// the same column.
template <typename Op, int deep, int across, bool reverse, bool exclusive, int width, int items, typename T, int count>
__device__ __forceinline__ void scan_columns(T (&values)[count], T (&carry)[width], T none, T* partial) {
  constexpr int places = within<deep, across>, warps = groups<deep, across>, room = line<deep, across>;
  const int column = threadIdx.x % across, place = threadIdx.x / across % places, warp = threadIdx.x / across / places;
  T before[width], whole[width];
#pragma unroll
  for (int v = 0; v < width; ++v) {
    T up_to = reverse ? values[(items - 1) * width + v] : values[v];
#pragma unroll
    for (int k = 1; k < items; ++k) up_to = Op::of(up_to, values[(reverse ? items - 1 - k : k) * width + v]);
#pragma unroll
    for (int offset = 1; offset < places; offset *= 2) {
      const int lanes = offset * across;
      const T other = (T)(reverse ? __shfl_down_sync(0xffffffffu, up_to, lanes) : __shfl_up_sync(0xffffffffu, up_to, lanes));
      if (reverse ? place + offset < places : place >= offset) up_to = Op::of(other, up_to);
    }
    const T passed = (T)(reverse ? __shfl_down_sync(0xffffffffu, up_to, across) : __shfl_up_sync(0xffffffffu, up_to, across));
    before[v] = place == (reverse ? places - 1 : 0) ? none : passed;
    whole[v] = (T)__shfl_sync(0xffffffffu, up_to, (threadIdx.x % 32 / across / places * places + (reverse ? 0 : places - 1)) * across + column);
  }
  if constexpr (warps > 1) {
    constexpr int numbers = across * width * warps;
    __syncthreads();  // an earlier call may still read
    if (place == 0)
#pragma unroll
      for (int v = 0; v < width; ++v) partial[(v * across + column) * room + warp] = whole[v];
    __syncthreads();
#pragma unroll
    for (int first = 0; first < numbers; first += deep * across) {
      const int number = first + threadIdx.x, at = (number < numbers ? number / warps : 0) * room + number % warps;
      const T up_to = scan_lanes<Op, warps, reverse>(partial[at], number % warps);
      if (number < numbers) partial[at] = up_to;
    }
    __syncthreads();
#pragma unroll
    for (int v = 0; v < width; ++v) {
      const T* mine = partial + (v * across + column) * room;
      const int last = reverse ? warp + 1 : warp - 1;
      if (last >= 0 && last < warps) before[v] = Op::of(mine[last], before[v]);
      whole[v] = mine[reverse ? 0 : warps - 1];
    }
  }
#pragma unroll
  for (int v = 0; v < width; ++v) {
    T total = Op::of(carry[v], before[v]);
#pragma unroll
    for (int k = 0; k < items; ++k) {
      T& mine = values[(reverse ? items - 1 - k : k) * width + v];
      const T next = Op::of(total, mine);
      mine = exclusive ? total : next;
      total = next;
    }
    carry[v] = Op::of(carry[v], whole[v]);
  }
}

}  // namespace of
