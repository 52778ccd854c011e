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

// Over the threads of all blocks of a cluster, in the order of their ranks; as `reduce`.  `own` is a place of its own in
// the dynamic shared memory, which no block may leave before all have read it.
template <typename Op, int threads, int blocks, typename T>
__device__ __forceinline__ T reduce_blocks(T x, T* partial, T* own) {
  x = reduce<Op, threads>(x, partial);
  if (threadIdx.x == 0) *own = x;
  meet_cluster();
  const float* const place = reinterpret_cast<const float*>(own);
  x = *reinterpret_cast<const T*>(of_block(place, 0));
#pragma unroll
  for (int rank = 1; rank < blocks; ++rank) x = Op::of(x, *reinterpret_cast<const T*>(of_block(place, rank)));
  return x;
}

// A vector to where this lies in the shared memory of the block of this rank.
template <typename T, int width>
__device__ __forceinline__ void store_to_block(T* own, int rank, const Vector<T, width>& vector) {
  const float* const there = of_block(reinterpret_cast<const float*>(own), rank);
  store(const_cast<T*>(reinterpret_cast<const T*>(there)), vector);
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
