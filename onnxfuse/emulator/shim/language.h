// CUDA's keywords and built-in variables as host g++ reads them.
#pragma once
#include <utility>

#include "machine.h"

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __grid_constant__
// All of the library's zero-initialised data is shared memory; the runtime poisons it before every block.
#define __shared__ static
// Not forced: calls take less to compile than copies do, by more than they take to run.
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

#define threadIdx (*reinterpret_cast<const uint3*>(&onnxfuse_emulator_thread_index))
#define blockIdx (*reinterpret_cast<const uint3*>(&onnxfuse_emulator_block_index))
#define blockDim (*reinterpret_cast<const dim3*>(&onnxfuse_emulator_block_size))
#define gridDim (*reinterpret_cast<const dim3*>(&onnxfuse_emulator_grid_size))
constexpr int warpSize = 32;

#undef assert
#define assert(condition) \
  ((condition) ? (void)0 : onnxfuse_emulator_fail("assertion failed: " #condition, __builtin_LINE()))
#define __builtin_assume(condition) \
  ((condition) ? (void)0 : onnxfuse_emulator_fail("assumption is false: " #condition, __builtin_LINE()))
inline void __trap(int line = __builtin_LINE()) { onnxfuse_emulator_fail("__trap", line); }

inline void __syncthreads(int line = __builtin_LINE()) {
  onnxfuse_emulator_barrier(onnxfuse_emulator::Barrier::plain, 0, line);
}
inline int __syncthreads_count(int predicate, int line = __builtin_LINE()) {
  return onnxfuse_emulator_barrier(onnxfuse_emulator::Barrier::count, predicate, line);
}
inline int __syncthreads_and(int predicate, int line = __builtin_LINE()) {
  return onnxfuse_emulator_barrier(onnxfuse_emulator::Barrier::all, predicate, line);
}
inline int __syncthreads_or(int predicate, int line = __builtin_LINE()) {
  return onnxfuse_emulator_barrier(onnxfuse_emulator::Barrier::any, predicate, line);
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}

namespace onnxfuse_emulator {

// A file-scope `extern __shared__ T name[];` becomes a pointer that every launch sets anew.
template <class T>
T* dynamic_shared_later(T** variable) {
  onnxfuse_emulator_register_dynamic(reinterpret_cast<void**>(variable));
  return nullptr;
}

template <class T, bool = std::is_class<T>::value>
struct Describe {
  static constexpr Parameter value{T(-1) < T(0) ? (T(0.5) == T(0) ? 'i' : 'f') : 'u', sizeof(T), false};
};
template <class T>
struct Describe<T, true> {
  static constexpr Parameter value{'s', sizeof(T), true};
};
template <class T>
struct Describe<T*, false> {
  static constexpr Parameter value{'p', sizeof(T*), false};
};
template <class T>
struct Describe<const T*, false> {
  static constexpr Parameter value{'p', sizeof(T*), true};
};

template <class T>
struct Plain { using type = T; };
template <class T>
struct Plain<T* __restrict__> { using type = T*; };

template <auto function>
struct Entry;
template <class... Arguments, void (*function)(Arguments...)>
struct Entry<function> {
  static constexpr Parameter parameters[sizeof...(Arguments) + 1] = {
      Describe<typename Plain<Arguments>::type>::value..., {'\0', 0, false}};
  // Forced: a function of its own takes as long to compile as what it does.
  template <size_t... I>
  __attribute__((always_inline, no_sanitize_undefined)) static inline void unpack(void** arguments, std::index_sequence<I...>) {
    function(*static_cast<typename Plain<Arguments>::type*>(arguments[I])...);
  }
  __attribute__((no_sanitize_undefined)) static void call(void** arguments) { unpack(arguments, std::make_index_sequence<sizeof...(Arguments)>{}); }
  static constexpr Kernel describe(int threads_bound) {
    return {call, parameters, int(sizeof...(Arguments)), threads_bound};
  }
};

}  // namespace onnxfuse_emulator
