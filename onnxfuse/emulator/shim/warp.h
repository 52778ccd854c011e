// Warp-wide operations.  Each is a meeting point: the lanes that the mask names stop there until all have come.
#pragma once
#include "floats16.h"
#include "machine.h"
#include "numbers.h"

namespace onnxfuse_emulator {
template <class T>
T exchange(Warp kind, unsigned mask, T value, int operand, int width, int line) {
  uint64_t raw = 0;
  memcpy(&raw, &value, sizeof(T));
  raw = onnxfuse_emulator_warp(kind, mask, raw, operand, width, line);
  memcpy(&value, &raw, sizeof(T));
  return value;
}
}  // namespace onnxfuse_emulator

#define ONNXFUSE_SHUFFLE(type)                                                                                     \
  inline type __shfl_sync(unsigned mask, type value, int lane, int width = 32, int line = __builtin_LINE()) {      \
    return onnxfuse_emulator::exchange(onnxfuse_emulator::Warp::shuffle, mask, value, lane, width, line);          \
  }                                                                                                                \
  inline type __shfl_up_sync(unsigned mask, type value, unsigned delta, int width = 32,                            \
                             int line = __builtin_LINE()) {                                                        \
    return onnxfuse_emulator::exchange(onnxfuse_emulator::Warp::shuffle_up, mask, value, delta, width, line);      \
  }                                                                                                                \
  inline type __shfl_down_sync(unsigned mask, type value, unsigned delta, int width = 32,                          \
                               int line = __builtin_LINE()) {                                                      \
    return onnxfuse_emulator::exchange(onnxfuse_emulator::Warp::shuffle_down, mask, value, delta, width, line);    \
  }                                                                                                                \
  inline type __shfl_xor_sync(unsigned mask, type value, int lanes, int width = 32, int line = __builtin_LINE()) { \
    return onnxfuse_emulator::exchange(onnxfuse_emulator::Warp::shuffle_xor, mask, value, lanes, width, line);     \
  }
ONNXFUSE_SHUFFLE(int)
ONNXFUSE_SHUFFLE(unsigned)
ONNXFUSE_SHUFFLE(long)
ONNXFUSE_SHUFFLE(unsigned long)
ONNXFUSE_SHUFFLE(long long)
ONNXFUSE_SHUFFLE(unsigned long long)
ONNXFUSE_SHUFFLE(float)
ONNXFUSE_SHUFFLE(double)
ONNXFUSE_SHUFFLE(__half)
ONNXFUSE_SHUFFLE(__half2)
ONNXFUSE_SHUFFLE(__nv_bfloat16)
ONNXFUSE_SHUFFLE(__nv_bfloat162)
#undef ONNXFUSE_SHUFFLE

#define ONNXFUSE_VOTE(result, name, kind, type)                                                             \
  inline result name(unsigned mask, type value, int line = __builtin_LINE()) {                              \
    return static_cast<result>(onnxfuse_emulator_warp(onnxfuse_emulator::Warp::kind, mask, uint64_t(value), 0, 32, line)); \
  }
ONNXFUSE_VOTE(unsigned, __ballot_sync, ballot, int)
ONNXFUSE_VOTE(int, __any_sync, any, int)
ONNXFUSE_VOTE(int, __all_sync, all, int)
ONNXFUSE_VOTE(int, __reduce_add_sync, add_signed, int)
ONNXFUSE_VOTE(unsigned, __reduce_add_sync, add_signed, unsigned)
ONNXFUSE_VOTE(int, __reduce_min_sync, min_signed, int)
ONNXFUSE_VOTE(unsigned, __reduce_min_sync, min_unsigned, unsigned)
ONNXFUSE_VOTE(int, __reduce_max_sync, max_signed, int)
ONNXFUSE_VOTE(unsigned, __reduce_max_sync, max_unsigned, unsigned)
ONNXFUSE_VOTE(unsigned, __reduce_and_sync, bit_and, unsigned)
ONNXFUSE_VOTE(unsigned, __reduce_or_sync, bit_or, unsigned)
ONNXFUSE_VOTE(unsigned, __reduce_xor_sync, bit_xor, unsigned)
#undef ONNXFUSE_VOTE

inline void __syncwarp(unsigned mask = 0xffffffffu, int line = __builtin_LINE()) {
  onnxfuse_emulator_warp(onnxfuse_emulator::Warp::sync, mask, 0, 0, 32, line);
}
inline unsigned __activemask() { return onnxfuse_emulator_live_lanes(); }

// What all lanes have, lane by lane, until they meet so again: what takes a shuffle for each number meets once.
template <typename T, int count>
const T* onnxfuse_emulator_lanes(const T (&own)[count], int line) {
  return reinterpret_cast<const T*>(onnxfuse_emulator_warp(
      onnxfuse_emulator::Warp::share, 0xffffffffu, reinterpret_cast<uint64_t>(own), sizeof(own), 32, line));
}
