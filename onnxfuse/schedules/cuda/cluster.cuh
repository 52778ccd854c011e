// Blocks of a cluster, which run at one time and see each other's shared memory.  GPUs before Hopper have none.
namespace of {

// All threads of the cluster that have not ended meet; what they wrote before is there for all behind it.
__device__ __forceinline__ void meet_cluster() {
#if defined(ONNXFUSE_EMULATOR)
  onnxfuse_emulator_meet_cluster(__builtin_LINE());
#elif defined(OF_WARPGROUP)
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// The same in two parts, between which a thread does what others need not see; of one block alone its threads meet.
template <int blocks> __device__ __forceinline__ void arrive_in_cluster() {
#if defined(OF_WARPGROUP) && !defined(ONNXFUSE_EMULATOR)
  if constexpr (blocks > 1) asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
template <int blocks> __device__ __forceinline__ void wait_in_cluster() {
  if constexpr (blocks == 1) {
    __syncthreads();
  } else {
#if defined(ONNXFUSE_EMULATOR)
    onnxfuse_emulator_meet_cluster(__builtin_LINE());
#elif defined(OF_WARPGROUP)
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
  }
}

// A thread has begun; who waits for all others to may reach into their blocks.  Nothing is made known but barriers.
template <int blocks> __device__ __forceinline__ void begin_cluster() {
#if defined(OF_WARPGROUP) && !defined(ONNXFUSE_EMULATOR)
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}

// What lies in the shared memory of the block of this rank where this lies in the own one's.
__device__ __forceinline__ const float* of_block(const float* own, int rank) {
#if defined(ONNXFUSE_EMULATOR)
  return static_cast<const float*>(onnxfuse_emulator_of_block(own, rank, __builtin_LINE()));
#elif defined(OF_WARPGROUP)
  const float* there;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(own), "r"(rank));
  return there;
#else
  return own;
#endif
}

// As arrive, at the barrier of the block of this rank, which it has where this one has its own.
__device__ __forceinline__ void arrive_in_block(Arrivals* arrivals, int rank) {
#if defined(ONNXFUSE_EMULATOR)
  onnxfuse_emulator_arrive(const_cast<void*>(onnxfuse_emulator_of_block(arrivals, rank, __builtin_LINE())), 0, __builtin_LINE());
#elif defined(OF_WARPGROUP)
  asm volatile("{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;"
               " mbarrier.arrive.shared::cluster.b64 _, [there];}"
               :: "r"(shared_address(arrivals)), "r"(rank) : "memory");
#endif
}

// As copy_tile, to where this lies in the shared memory of all blocks of a cluster, whose barriers each get its bytes.
template <int blocks, int rank>
__device__ __forceinline__ void copy_tile_to_all(
    void* to, const TensorMap& map, Arrivals* arrivals, const int (&at)[rank]) {
#if defined(ONNXFUSE_EMULATOR)
  for (int block = 0; block < blocks; ++block) {
    onnxfuse_emulator_copy_tile(const_cast<void*>(onnxfuse_emulator_of_block(to, block, __builtin_LINE())), &map, at, rank,
                                const_cast<void*>(onnxfuse_emulator_of_block(arrivals, block, __builtin_LINE())),
                                __builtin_LINE());
  }
#elif defined(OF_WARPGROUP)
  const unsigned address = shared_address(to), barrier = shared_address(arrivals);
  const unsigned short all = (1 << blocks) - 1;
  if constexpr (rank == 2)
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4}], [%2], %5;"
                 :: "r"(address), "l"(&map), "r"(barrier), "r"(at[0]), "r"(at[1]), "h"(all)
                 : "memory");
  else if constexpr (rank == 3)
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4, %5}], [%2], %6;"
                 :: "r"(address), "l"(&map), "r"(barrier), "r"(at[0]), "r"(at[1]), "r"(at[2]), "h"(all)
                 : "memory");
  else if constexpr (rank == 4)
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
                 :: "r"(address), "l"(&map), "r"(barrier), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "h"(all)
                 : "memory");
  else
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;"
                 :: "r"(address), "l"(&map), "r"(barrier), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4]), "h"(all)
                 : "memory");
#endif
}

// A vector to where this lies in the shared memory of the block of this rank.
template <typename T, int width>
__device__ __forceinline__ void store_to_block(T* own, int rank, const Vector<T, width>& vector) {
  const float* const there = of_block(reinterpret_cast<const float*>(own), rank);
  store(const_cast<T*>(reinterpret_cast<const T*>(there)), vector);
}

// A number to where this lies in the shared memory of the block of this rank, whose barrier gets its bytes.
template <typename T> __device__ __forceinline__ void store_counted(T* own, int rank, T number, Arrivals* arrivals) {
  static_assert(sizeof(T) == 4, "numbers of four bytes");
#if defined(ONNXFUSE_EMULATOR)
  onnxfuse_emulator_store_counted(const_cast<void*>(onnxfuse_emulator_of_block(own, rank, __builtin_LINE())), &number,
                                  sizeof(T), const_cast<void*>(onnxfuse_emulator_of_block(arrivals, rank, __builtin_LINE())),
                                  __builtin_LINE());
#elif defined(OF_WARPGROUP)
  asm volatile("{.reg .b32 there, barrier; mapa.shared::cluster.u32 there, %0, %2;"
               " mapa.shared::cluster.u32 barrier, %1, %2;"
               " st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %3, [barrier];}"
               :: "r"(shared_address(own)), "r"(shared_address(arrivals)), "r"(rank),
                  "r"(*reinterpret_cast<const unsigned*>(&number))
               : "memory");
#endif
}

// The same of eight bytes.
template <typename T> __device__ __forceinline__ void store_counted_wide(T* own, int rank, T number, Arrivals* arrivals) {
  static_assert(sizeof(T) == 8, "numbers of eight bytes");
#if defined(ONNXFUSE_EMULATOR)
  onnxfuse_emulator_store_counted(const_cast<void*>(onnxfuse_emulator_of_block(own, rank, __builtin_LINE())), &number,
                                  sizeof(T), const_cast<void*>(onnxfuse_emulator_of_block(arrivals, rank, __builtin_LINE())),
                                  __builtin_LINE());
#elif defined(OF_WARPGROUP)
  asm volatile("{.reg .b32 there, barrier; mapa.shared::cluster.u32 there, %0, %2;"
               " mapa.shared::cluster.u32 barrier, %1, %2;"
               " st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [there], %3, [barrier];}"
               :: "r"(shared_address(own)), "r"(shared_address(arrivals)), "r"(rank),
                  "l"(*reinterpret_cast<const unsigned long long*>(&number))
               : "memory");
#endif
}

// Over the threads of all blocks of a cluster, in the order of their ranks; as `reduce`.  `kept` has room for a number of
// each block; the barrier, which counts one arrival, is used once.
template <typename Op, int threads, int blocks, typename T>
__device__ __forceinline__ T reduce_blocks(T x, T* partial, T* kept, Arrivals* told) {
  x = reduce<Op, threads>(x, partial);
  if (threadIdx.x == 0) arrive_before(told, blocks * (int)sizeof(T));
  if (threadIdx.x < blocks) {
    if constexpr (sizeof(T) == 4) store_counted(kept + blockIdx.x % blocks, (int)threadIdx.x, x, told);
    else store_counted_wide(kept + blockIdx.x % blocks, (int)threadIdx.x, x, told);
  }
  wait_for(told, 0);
  x = kept[0];
#pragma unroll
  for (int rank = 1; rank < blocks; ++rank) x = Op::of(x, kept[rank]);
  return x;
}

// What the lanes of rows found of their block's part of these, to all blocks of the cluster, of which each keeps a line of
// so many rows for each.  A lane has a row in each pass, which it shares with `lanes` neighbours.
template <int blocks, int rows, int lanes, typename T, int passes>
__device__ __forceinline__ void give_rows(
    const T (&mine)[passes], T* kept, int row, int lane, int rank, Arrivals* arrivals) {
#pragma unroll
  for (int pass = 0; pass < passes; ++pass)
#pragma unroll
    for (int first = 0; first < blocks; first += lanes) {
      const int to = first + lane % lanes;
      if (to < blocks) store_counted(kept + rank * rows + row + pass * (32 / lanes), to, mine[pass], arrivals);
    }
}

// What all blocks gave of a lane's rows, in the order of their ranks.
template <typename Op, int blocks, int rows, int lanes, typename T, int passes>
__device__ __forceinline__ void take_rows(T (&mine)[passes], const T* kept, int row) {
#pragma unroll
  for (int pass = 0; pass < passes; ++pass) {
    const T* const from = kept + row + pass * (32 / lanes);
    mine[pass] = from[0];
#pragma unroll
    for (int rank = 1; rank < blocks; ++rank) mine[pass] = Op::of(mine[pass], from[rank * rows]);
  }
}

// The same of squares of differences from the mean, each block's from that of its own columns: brought to the mean of all
// (Chan, Golub and LeVeque, 1979).  A total is of elements, or of their shares in the mean.
template <int blocks, int rows, int lanes, int columns, int length, bool shares, typename T, int passes>
__device__ __forceinline__ void take_squares(
    T (&mine)[passes], const T* kept, const T (&totals)[passes], const T* kept_totals, int row) {
#pragma unroll
  for (int pass = 0; pass < passes; ++pass) {
    const int from = row + pass * (32 / lanes);
    const T mean = shares ? totals[pass] : totals[pass] / (T)length;
    mine[pass] = (T)0;
#pragma unroll
    for (int rank = 0; rank < blocks; ++rank) {
      const T count = (T)(rank + 1 < blocks ? columns : length - rank * columns);
      const T off = kept_totals[rank * rows + from] * ((shares ? (T)length : (T)1) / count) - mean;
      mine[pass] += kept[rank * rows + from] + count * off * off;
    }
  }
}

// As load_laid, of what the blocks of a cluster have there together.
template <int blocks, int width>
__device__ __forceinline__ Vector<float, width> load_shares(const float* sums, int row, int column) {
  Vector<float, width> out = load_laid<width>(of_block(sums, 0), row, column);
#pragma unroll
  for (int rank = 1; rank < blocks; ++rank) {
    const auto more = load_laid<width>(of_block(sums, rank), row, column);
#pragma unroll
    for (int v = 0; v < width; ++v) out.at[v] += more.at[v];
  }
  return out;
}

}  // namespace of
