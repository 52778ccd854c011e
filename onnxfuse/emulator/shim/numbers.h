// Bit casts, conversions, integer and floating-point intrinsics.  Approximate ones are the host's exact ones.
#pragma once
#include <limits.h>
#include <string.h>

#include <cmath>

#include "machine.h"

#undef INFINITY
#undef NAN
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define CUDART_INF_F INFINITY
#define CUDART_NAN_F NAN

namespace onnxfuse_emulator {
template <class To, class From>
inline To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}
// As on the device: what is out of range gives the nearest end of it; NaN gives 0 where a float becomes 32 bits, and the
// highest bit alone everywhere else.
template <class To, class From>
To saturate(From whole) {
  constexpr bool is_signed = To(-1) < To(0);
  constexpr int width = sizeof(To) * CHAR_BIT;
  const From upper = std::ldexp(From(1), is_signed ? width - 1 : width);
  const From lower = is_signed ? -upper : From(0);
  if (whole != whole) return sizeof(To) * 8 > 32 || sizeof(From) > 4 ? To(1ull << (width - 1)) : To(0);
  if (whole >= upper) return is_signed ? To(~(1ull << (width - 1))) : To(~0ull);
  if (whole < lower) return is_signed ? To(1ull << (width - 1)) : To(0);
  return static_cast<To>(whole);
}
}  // namespace onnxfuse_emulator

inline int __float_as_int(float x) { return onnxfuse_emulator::bits<int>(x); }
inline unsigned __float_as_uint(float x) { return onnxfuse_emulator::bits<unsigned>(x); }
inline float __int_as_float(int x) { return onnxfuse_emulator::bits<float>(x); }
inline float __uint_as_float(unsigned x) { return onnxfuse_emulator::bits<float>(x); }
inline long long __double_as_longlong(double x) { return onnxfuse_emulator::bits<long long>(x); }
inline double __longlong_as_double(long long x) { return onnxfuse_emulator::bits<double>(x); }

#define ONNXFUSE_TO_INTEGER(from, from_type, to, to_type)                                                          \
  inline to_type __##from##2##to##_rn(from_type x) { return onnxfuse_emulator::saturate<to_type>(std::rint(x)); }  \
  inline to_type __##from##2##to##_rz(from_type x) { return onnxfuse_emulator::saturate<to_type>(std::trunc(x)); } \
  inline to_type __##from##2##to##_rd(from_type x) { return onnxfuse_emulator::saturate<to_type>(std::floor(x)); } \
  inline to_type __##from##2##to##_ru(from_type x) { return onnxfuse_emulator::saturate<to_type>(std::ceil(x)); }
ONNXFUSE_TO_INTEGER(float, float, int, int)
ONNXFUSE_TO_INTEGER(float, float, uint, unsigned)
ONNXFUSE_TO_INTEGER(float, float, ll, long long)
ONNXFUSE_TO_INTEGER(float, float, ull, unsigned long long)
ONNXFUSE_TO_INTEGER(double, double, int, int)
ONNXFUSE_TO_INTEGER(double, double, uint, unsigned)
ONNXFUSE_TO_INTEGER(double, double, ll, long long)
ONNXFUSE_TO_INTEGER(double, double, ull, unsigned long long)
#undef ONNXFUSE_TO_INTEGER
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline float __ll2float_rn(long long x) { return static_cast<float>(x); }
inline float __ull2float_rn(unsigned long long x) { return static_cast<float>(x); }
inline double __int2double_rn(int x) { return x; }
inline double __ll2double_rn(long long x) { return static_cast<double>(x); }
inline float __double2float_rn(double x) { return static_cast<float>(x); }

inline int __mulhi(int a, int b) { return static_cast<int>((static_cast<long long>(a) * b) >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>((1ull * a * b) >> 32); }
inline long long __mul64hi(long long a, long long b) { return static_cast<long long>((__int128(a) * b) >> 64); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}
inline int __mul24(int a, int b) { return (a << 8 >> 8) * (b << 8 >> 8); }
inline unsigned __umul24(unsigned a, unsigned b) { return (a & 0xffffffu) * (b & 0xffffffu); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
  unsigned r = 0;
  for (int i = 0; i < 32; ++i) r |= (x >> i & 1u) << (31 - i);
  return r;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long both = a | static_cast<unsigned long long>(b) << 32;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned pick = selector >> (4 * i);
    unsigned byte = static_cast<unsigned>(both >> (8 * (pick & 7))) & 0xffu;
    if (pick & 8) byte = byte & 0x80u ? 0xffu : 0u;
    r |= byte << (8 * i);
  }
  return r;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((((1ull * high) << 32 | low) << (shift & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>(((1ull * high) << 32 | low) >> (shift & 31));
}

#define ONNXFUSE_MIN_MAX(a, b, both)                 \
  inline both min(a x, b y) {                        \
    const both first = x, second = y;                \
    return second < first ? second : first;          \
  }                                                  \
  inline both max(a x, b y) {                        \
    const both first = x, second = y;                \
    return first < second ? second : first;          \
  }
ONNXFUSE_MIN_MAX(int, int, int)
ONNXFUSE_MIN_MAX(unsigned, unsigned, unsigned)
ONNXFUSE_MIN_MAX(int, unsigned, unsigned)
ONNXFUSE_MIN_MAX(unsigned, int, unsigned)
ONNXFUSE_MIN_MAX(long, long, long)
ONNXFUSE_MIN_MAX(unsigned long, unsigned long, unsigned long)
ONNXFUSE_MIN_MAX(long, unsigned long, unsigned long)
ONNXFUSE_MIN_MAX(unsigned long, long, unsigned long)
ONNXFUSE_MIN_MAX(long long, long long, long long)
ONNXFUSE_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
ONNXFUSE_MIN_MAX(long long, unsigned long long, unsigned long long)
ONNXFUSE_MIN_MAX(unsigned long long, long long, unsigned long long)
#undef ONNXFUSE_MIN_MAX
inline float min(float x, float y) { return fminf(x, y); }
inline float max(float x, float y) { return fmaxf(x, y); }
inline double min(double x, double y) { return fmin(x, y); }
inline double max(double x, double y) { return fmax(x, y); }
inline double min(float x, double y) { return fmin(double(x), y); }
inline double max(float x, double y) { return fmax(double(x), y); }
inline double min(double x, float y) { return fmin(x, double(y)); }
inline double max(double x, float y) { return fmax(x, double(y)); }

using std::abs;
using std::acos, std::acosh, std::asin, std::asinh, std::atan, std::atan2, std::atanh, std::cbrt, std::ceil;
using std::copysign, std::cos, std::cosh, std::erf, std::erfc, std::exp, std::exp2, std::expm1, std::fabs, std::floor;
using std::fma, std::fmax, std::fmin, std::fmod, std::hypot, std::isfinite, std::isinf, std::isnan, std::ldexp;
using std::lgamma, std::llrint, std::log, std::log10, std::log1p, std::log2, std::lrint, std::nearbyint, std::pow;
using std::remainder, std::rint, std::round, std::signbit, std::sin, std::sinh, std::sqrt, std::tan, std::tanh;
using std::tgamma, std::trunc;

inline float rsqrtf(float x) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float rsqrt(float x) { return rsqrtf(x); }
inline float rcbrtf(float x) { return static_cast<float>(1.0 / std::cbrt(static_cast<double>(x))); }
inline float normcdff(float x) { return static_cast<float>(0.5 * std::erfc(-x * 0.70710678118654752440)); }
inline double normcdf(double x) { return 0.5 * std::erfc(-x * 0.70710678118654752440); }
inline float sinpif(float x) { return static_cast<float>(std::sin(std::fmod(double(x), 2.0) * 3.14159265358979323846)); }
inline float cospif(float x) { return static_cast<float>(std::cos(std::fmod(double(x), 2.0) * 3.14159265358979323846)); }

// float on one, two or three operands: the intrinsic is the host function, correctly rounded where its name says so.
#define ONNXFUSE_UNARY(name, value) inline float name(float x) { return value; }
#define ONNXFUSE_BINARY(name, value) inline float name(float x, float y) { return value; }
ONNXFUSE_UNARY(__expf, expf(x))
ONNXFUSE_UNARY(__exp10f, static_cast<float>(std::pow(10.0, double(x))))
ONNXFUSE_UNARY(__logf, logf(x))
ONNXFUSE_UNARY(__log2f, log2f(x))
ONNXFUSE_UNARY(__log10f, log10f(x))
ONNXFUSE_UNARY(__sinf, sinf(x))
ONNXFUSE_UNARY(__cosf, cosf(x))
ONNXFUSE_UNARY(__tanf, tanf(x))
ONNXFUSE_UNARY(__tanhf, tanhf(x))
ONNXFUSE_UNARY(__saturatef, x > 0.f ? (x < 1.f ? x : 1.f) : 0.f)
ONNXFUSE_UNARY(__frcp_rn, 1.f / x)
ONNXFUSE_UNARY(__fsqrt_rn, sqrtf(x))
ONNXFUSE_UNARY(__frsqrt_rn, rsqrtf(x))
ONNXFUSE_BINARY(__powf, powf(x, y))
ONNXFUSE_BINARY(__fdividef, x / y)
ONNXFUSE_BINARY(fdividef, x / y)
ONNXFUSE_BINARY(__fadd_rn, x + y)
ONNXFUSE_BINARY(__fsub_rn, x - y)
ONNXFUSE_BINARY(__fmul_rn, x * y)
ONNXFUSE_BINARY(__fdiv_rn, x / y)
#undef ONNXFUSE_UNARY
#undef ONNXFUSE_BINARY
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline double __fma_rn(double x, double y, double z) { return fma(x, y, z); }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __ddiv_rn(double x, double y) { return x / y; }
inline void __sincosf(float x, float* s, float* c) { *s = sinf(x), *c = cosf(x); }
