// Tiles that the GPU copies by tensor maps while its threads do other things, and barriers that count what is there.
// GPUs that have no such copies run nothing of this.
namespace of {

struct alignas(64) TensorMap {  // what onnxfuse/lowering/tensor_map.py describes
  unsigned char bytes[128];
};

// A barrier in shared memory.  Its phase is over, and the next one begins, when as many arrived as it counts and the bytes
// that were expected are there.
using Arrivals = unsigned long long;

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
#if defined(ONNXFUSE_EMULATOR)
  return 0;
#else
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
#endif
}

__device__ __forceinline__ void count_arrivals(Arrivals* arrivals, int count) {
#if defined(ONNXFUSE_EMULATOR)
  onnxfuse_emulator_arrivals(arrivals, count, __builtin_LINE());
#elif defined(OF_WARPGROUP)
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(arrivals)), "r"(count) : "memory");
#endif
}
// Makes them known to copies, and behind a barrier to all threads.
__device__ __forceinline__ void arrivals_counted() {
#ifdef OF_WARPGROUP
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
__device__ __forceinline__ void arrive(Arrivals* arrivals) {
#if defined(ONNXFUSE_EMULATOR)
  onnxfuse_emulator_arrive(arrivals, 0, __builtin_LINE());
#elif defined(OF_WARPGROUP)
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(arrivals)) : "memory");
#endif
}
// The same, and so many bytes are to come.
__device__ __forceinline__ void arrive_before(Arrivals* arrivals, int bytes) {
#if defined(ONNXFUSE_EMULATOR)
  onnxfuse_emulator_arrive(arrivals, bytes, __builtin_LINE());
#elif defined(OF_WARPGROUP)
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(shared_address(arrivals)), "r"(bytes) : "memory");
#endif
}
// Waits until a phase is over: the first one is 0, the one after it 1, then 0 again.  The phase before the first is 1.
__device__ __forceinline__ void wait_for(Arrivals* arrivals, int phase) {
#if defined(ONNXFUSE_EMULATOR)
  onnxfuse_emulator_arrived(arrivals, phase, __builtin_LINE());
#elif defined(OF_WARPGROUP)
  unsigned over;
  do {
    asm volatile("{.reg .pred over; mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2; selp.u32 %0, 1, 0, over;}"
                 : "=r"(over) : "r"(shared_address(arrivals)), "r"(phase) : "memory");
  } while (!over);
#endif
}

// Brings the map before it is used.
__device__ __forceinline__ void fetch_map(const TensorMap& map) {
#ifdef OF_WARPGROUP
  asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory");
#endif
}
// Asks for what lies there, to be in the second-level cache when it is read.
__device__ __forceinline__ void prefetch(const void* pointer) {
#ifdef OF_WARPGROUP
  asm volatile("prefetch.global.L2 [%0];" :: "l"(pointer));
#endif
}
// Asks for the tile of a map that begins at these coordinates, the innermost first; zeros outside of the tensor.  Its
// bytes arrive at `arrivals`.
template <int rank>
__device__ __forceinline__ void copy_tile(void* to, const TensorMap& map, Arrivals* arrivals, const int (&at)[rank]) {
#if defined(ONNXFUSE_EMULATOR)
  onnxfuse_emulator_copy_tile(to, &map, at, rank, arrivals, __builtin_LINE());
#elif defined(OF_WARPGROUP)
  const unsigned address = shared_address(to), barrier = shared_address(arrivals);
  if constexpr (rank == 2)
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                 :: "r"(address), "l"(&map), "r"(barrier), "r"(at[0]), "r"(at[1]) : "memory");
  else if constexpr (rank == 3)
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5}], [%2];"
                 :: "r"(address), "l"(&map), "r"(barrier), "r"(at[0]), "r"(at[1]), "r"(at[2]) : "memory");
  else if constexpr (rank == 4)
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];"
                 :: "r"(address), "l"(&map), "r"(barrier), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]) : "memory");
  else
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
                 :: "r"(address), "l"(&map), "r"(barrier), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4])
                 : "memory");
#endif
}

// Four warps together go on with so many registers a thread, fewer or more than they have; more wait for what others give.
template <int count> __device__ __forceinline__ void give_registers() {
#ifdef OF_WARPGROUP
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(count));
#endif
}
template <int count> __device__ __forceinline__ void take_registers() {
#ifdef OF_WARPGROUP
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(count));
#endif
}

// ---- A warp's sums in shared memory: 16 rows of 64. ----

// Neighbours stay side by side by four.  The two halves of eight are apart, and pieces change places by the row's number:
// so neither a warp that stores pairs as products leave them nor one that loads eights meets itself in a bank.
__device__ __forceinline__ int laid_at(int row, int column) {
  const int half = column & 4;
  return row * 64 + half * 8 + (column / 8 ^ row % 8 ^ half) * 4 + column % 4;
}
template <int width> __device__ __forceinline__ Vector<float, width> load_laid(const float* sums, int row, int column) {
  constexpr int piece = width < 4 ? width : 4;
  Vector<float, width> out;
#pragma unroll
  for (int first = 0; first < width; first += piece) {
    const auto found = load<piece>(sums + laid_at(row, column + first));
#pragma unroll
    for (int v = 0; v < piece; ++v) out.at[first + v] = found.at[v];
  }
  return out;
}

}  // namespace of
