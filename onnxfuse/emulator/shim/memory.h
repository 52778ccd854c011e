// Loads and stores with cache hints, and atomics.  Blocks and threads take turns, so plain accesses are atomic.
#pragma once
#include "floats16.h"
#include "machine.h"

#define ONNXFUSE_LOAD(name) \
  template <class T>        \
  inline T name(const T* address) { return *address; }
ONNXFUSE_LOAD(__ldg)
ONNXFUSE_LOAD(__ldca)
ONNXFUSE_LOAD(__ldcg)
ONNXFUSE_LOAD(__ldcs)
ONNXFUSE_LOAD(__ldlu)
ONNXFUSE_LOAD(__ldcv)
#undef ONNXFUSE_LOAD
#define ONNXFUSE_STORE(name) \
  template <class T>         \
  inline void name(T* address, T value) { *address = value; }
ONNXFUSE_STORE(__stwb)
ONNXFUSE_STORE(__stcg)
ONNXFUSE_STORE(__stcs)
ONNXFUSE_STORE(__stwt)
#undef ONNXFUSE_STORE

#define ONNXFUSE_ATOMIC(name, type, value)      \
  inline type name(type* address, type operand) { \
    const type old = *address;                  \
    *address = value;                           \
    return old;                                 \
  }
#define ONNXFUSE_ATOMICS(type)                                                \
  ONNXFUSE_ATOMIC(atomicAdd, type, old + operand)                             \
  ONNXFUSE_ATOMIC(atomicSub, type, old - operand)                             \
  ONNXFUSE_ATOMIC(atomicExch, type, operand)                                  \
  ONNXFUSE_ATOMIC(atomicMin, type, operand < old ? operand : old)             \
  ONNXFUSE_ATOMIC(atomicMax, type, old < operand ? operand : old)             \
  ONNXFUSE_ATOMIC(atomicAnd, type, old & operand)                             \
  ONNXFUSE_ATOMIC(atomicOr, type, old | operand)                              \
  ONNXFUSE_ATOMIC(atomicXor, type, old ^ operand)                             \
  inline type atomicCAS(type* address, type expected, type desired) {         \
    const type old = *address;                                                \
    if (old == expected) *address = desired;                                  \
    return old;                                                               \
  }
ONNXFUSE_ATOMICS(int)
ONNXFUSE_ATOMICS(unsigned)
ONNXFUSE_ATOMICS(long long)
ONNXFUSE_ATOMICS(unsigned long long)
ONNXFUSE_ATOMIC(atomicInc, unsigned, old >= operand ? 0u : old + 1u)
ONNXFUSE_ATOMIC(atomicDec, unsigned, old == 0u || old > operand ? operand : old - 1u)
ONNXFUSE_ATOMIC(atomicAdd, float, old + operand)
ONNXFUSE_ATOMIC(atomicAdd, double, old + operand)
ONNXFUSE_ATOMIC(atomicAdd, __half, old + operand)
ONNXFUSE_ATOMIC(atomicAdd, __nv_bfloat16, old + operand)
ONNXFUSE_ATOMIC(atomicExch, float, operand)
#undef ONNXFUSE_ATOMICS
#undef ONNXFUSE_ATOMIC
