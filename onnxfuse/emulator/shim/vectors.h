// CUDA's vector types, aligned as on the device so that a misaligned access is one here too.
#pragma once
#include "machine.h"

#define ONNXFUSE_VECTORS(name, type, align2, align4)                                      \
  struct name##1 { type x; };                                                             \
  struct __align__(align2) name##2 { type x, y; };                                        \
  struct name##3 { type x, y, z; };                                                       \
  struct __align__(align4) name##4 { type x, y, z, w; };                                  \
  inline name##1 make_##name##1(type x) { return {x}; }                                   \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }                        \
  inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }             \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }

ONNXFUSE_VECTORS(uint, unsigned int, 8, 16)
ONNXFUSE_VECTORS(char, signed char, 2, 4)
ONNXFUSE_VECTORS(uchar, unsigned char, 2, 4)
ONNXFUSE_VECTORS(short, short, 4, 8)
ONNXFUSE_VECTORS(ushort, unsigned short, 4, 8)
ONNXFUSE_VECTORS(int, int, 8, 16)
ONNXFUSE_VECTORS(long, long, 16, 16)
ONNXFUSE_VECTORS(ulong, unsigned long, 16, 16)
ONNXFUSE_VECTORS(longlong, long long, 16, 16)
ONNXFUSE_VECTORS(ulonglong, unsigned long long, 16, 16)
ONNXFUSE_VECTORS(float, float, 8, 16)
ONNXFUSE_VECTORS(double, double, 16, 16)
#undef ONNXFUSE_VECTORS

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
