// float16 and bfloat16: bit-exact conversions, and CUDA's names for them.  Arithmetic is done in float and rounded,
// which for one operation gives the correctly rounded result.
#pragma once
#include "numbers.h"
#include "vectors.h"

namespace onnxfuse_emulator {

// The bits of `value` as a float of 1 sign, E exponent and M mantissa bits, rounded to nearest, ties to even, or
// towards zero.  NaN becomes 0x7fff, as on the device.
template <int E, int M>
unsigned short encode(double value, bool to_zero = false) {
  const uint64_t raw = bits<uint64_t>(value);
  const unsigned sign = static_cast<unsigned>(raw >> 63) << 15;
  const unsigned infinity = ((1u << E) - 1u) << M;
  const int exponent = static_cast<int>(raw >> 52 & 0x7ff) - 1023 + (1 << (E - 1)) - 1;
  const uint64_t fraction = raw & ((1ull << 52) - 1);
  if ((raw >> 52 & 0x7ff) == 0x7ff) return static_cast<unsigned short>(fraction ? 0x7fffu : sign | infinity);
  if (exponent < -M) return static_cast<unsigned short>(sign);  // under half of the smallest subnormal, or zero
  const int shift = 52 - M + (exponent > 0 ? 0 : 1 - exponent);
  const uint64_t whole = fraction | 1ull << 52;
  const uint64_t rest = whole & ((1ull << shift) - 1), half = 1ull << (shift - 1);
  uint64_t kept = whole >> shift;
  if (!to_zero && (rest > half || (rest == half && (kept & 1)))) ++kept;
  const uint64_t result = exponent > 0 ? (static_cast<uint64_t>(exponent - 1) << M) + kept : kept;
  const unsigned largest = to_zero ? infinity - 1 : infinity;
  return static_cast<unsigned short>(sign | (result > largest ? largest : static_cast<unsigned>(result)));
}

template <int E, int M>
float decode(unsigned short raw) {
  const unsigned sign = (raw & 0x8000u) << 16, rest = raw & 0x7fffu;
  if (rest >= ((1u << E) - 1u) << M) return bits<float>(sign | 0x7f800000u | rest << (23 - M));
  // As a float's bits this is the value scaled by 2^(bias - 127), subnormals included; the product is exact.
  return bits<float>(sign | bits<unsigned>(bits<float>(rest << (23 - M)) * bits<float>((254u - ((1u << (E - 1)) - 1u)) << 23)));
}

}  // namespace onnxfuse_emulator

namespace onnxfuse_emulator {

// An integer as a double whose lowest bit tells of what was cut off, so that a second rounding comes out right.
template <class I>
double odd(I value) {
  const bool negative = value < I(0);
  uint64_t size = negative ? ~static_cast<uint64_t>(value) + 1 : static_cast<uint64_t>(value);
  if (size >> 52) size = (size & ~0xfffull) | (size & 0xfffull ? 0x1000ull : 0);
  return negative ? -static_cast<double>(size) : static_cast<double>(size);
}

// a * b + c of 16-bit operands, to be rounded once: the product is exact, and the sum is rounded to odd.
inline double fused(float a, float b, float c) {
  const double product = static_cast<double>(a) * b, addend = c, sum = product + addend;
  if (!std::isfinite(sum)) return sum;
  const double part = sum - product, error = (product - (sum - part)) + (addend - part);
  if (error == 0.0 || (bits<uint64_t>(sum) & 1)) return sum;
  return std::nextafter(sum, error > 0.0 ? HUGE_VAL : -HUGE_VAL);
}

}  // namespace onnxfuse_emulator

struct __half_raw { unsigned short x; };
struct __nv_bfloat16_raw { unsigned short x; };

#define ONNXFUSE_FLOAT16(T, E, M)                                                                         \
  struct T {                                                                                              \
    unsigned short __x;                                                                                   \
    T() = default;                                                                                        \
    T(float value) : __x(onnxfuse_emulator::encode<E, M>(value)) {}                                       \
    T(double value) : __x(onnxfuse_emulator::encode<E, M>(value)) {}                                      \
    T(int value) : T(static_cast<double>(value)) {}                                                       \
    T(unsigned value) : T(static_cast<double>(value)) {}                                                  \
    T(long value) : T(onnxfuse_emulator::odd(value)) {}                                                   \
    T(unsigned long value) : T(onnxfuse_emulator::odd(value)) {}                                          \
    T(long long value) : T(onnxfuse_emulator::odd(value)) {}                                              \
    T(unsigned long long value) : T(onnxfuse_emulator::odd(value)) {}                                     \
    T(T##_raw raw) : __x(raw.x) {}                                                                        \
    operator T##_raw() const { return {__x}; }                                                            \
    operator float() const { return onnxfuse_emulator::decode<E, M>(__x); }                               \
    explicit operator bool() const { return (__x & 0x7fffu) != 0; }                                       \
    T& operator+=(T other) { return *this = T(float(*this) + float(other)); }                             \
    T& operator-=(T other) { return *this = T(float(*this) - float(other)); }                             \
    T& operator*=(T other) { return *this = T(float(*this) * float(other)); }                             \
    T& operator/=(T other) { return *this = T(float(*this) / float(other)); }                             \
  };                                                                                                      \
  inline T operator+(T a, T b) { return T(float(a) + float(b)); }                                         \
  inline T operator-(T a, T b) { return T(float(a) - float(b)); }                                         \
  inline T operator*(T a, T b) { return T(float(a) * float(b)); }                                         \
  inline T operator/(T a, T b) { return T(float(a) / float(b)); }                                         \
  inline T operator+(T a) { return a; }                                                                   \
  inline T operator-(T a) { return T(T##_raw{static_cast<unsigned short>(a.__x ^ 0x8000u)}); }            \
  inline bool operator==(T a, T b) { return float(a) == float(b); }                                       \
  inline bool operator!=(T a, T b) { return float(a) != float(b); }                                       \
  inline bool operator<(T a, T b) { return float(a) < float(b); }                                         \
  inline bool operator>(T a, T b) { return float(a) > float(b); }                                         \
  inline bool operator<=(T a, T b) { return float(a) <= float(b); }                                       \
  inline bool operator>=(T a, T b) { return float(a) >= float(b); }                                       \
  inline T __hadd(T a, T b) { return a + b; }                                                             \
  inline T __hsub(T a, T b) { return a - b; }                                                             \
  inline T __hmul(T a, T b) { return a * b; }                                                             \
  inline T __hdiv(T a, T b) { return a / b; }                                                             \
  inline T __hneg(T a) { return -a; }                                                                     \
  inline T __habs(T a) { return T(T##_raw{static_cast<unsigned short>(a.__x & 0x7fffu)}); }               \
  inline T __hfma(T a, T b, T c) { return T(onnxfuse_emulator::fused(float(a), float(b), float(c))); }    \
  inline T __hmax(T a, T b) { return T(fmaxf(a, b)); }                                                    \
  inline T __hmin(T a, T b) { return T(fminf(a, b)); }                                                    \
  inline bool __heq(T a, T b) { return a == b; }                                                          \
  inline bool __hne(T a, T b) { return float(a) < float(b) || float(a) > float(b); }                      \
  inline bool __hlt(T a, T b) { return a < b; }                                                           \
  inline bool __hle(T a, T b) { return a <= b; }                                                          \
  inline bool __hgt(T a, T b) { return a > b; }                                                           \
  inline bool __hge(T a, T b) { return a >= b; }                                                          \
  inline bool __hisnan(T a) { return a != a; }                                                            \
  inline int __hisinf(T a) { return std::isinf(float(a)) ? (a.__x >> 15 ? -1 : 1) : 0; }                  \
  inline T hexp(T a) { return T(std::exp(double(float(a)))); }                                            \
  inline T hexp2(T a) { return T(std::exp2(double(float(a)))); }                                          \
  inline T hlog(T a) { return T(std::log(double(float(a)))); }                                            \
  inline T hlog2(T a) { return T(std::log2(double(float(a)))); }                                          \
  inline T hsqrt(T a) { return T(std::sqrt(double(float(a)))); }                                          \
  inline T hrsqrt(T a) { return T(1.0 / std::sqrt(double(float(a)))); }                                   \
  inline T hrcp(T a) { return T(1.0 / double(float(a))); }                                                \
  inline T hsin(T a) { return T(std::sin(double(float(a)))); }                                            \
  inline T hcos(T a) { return T(std::cos(double(float(a)))); }                                            \
  inline T htanh(T a) { return T(std::tanh(double(float(a)))); }                                          \
  inline T hfloor(T a) { return T(floorf(a)); }                                                           \
  inline T hceil(T a) { return T(ceilf(a)); }                                                             \
  inline T hrint(T a) { return T(rintf(a)); }                                                             \
  inline T htrunc(T a) { return T(truncf(a)); }

ONNXFUSE_FLOAT16(__half, 5, 10)
ONNXFUSE_FLOAT16(__nv_bfloat16, 8, 7)
#undef ONNXFUSE_FLOAT16
typedef __half half;
typedef __nv_bfloat16 nv_bfloat16;

// Names that differ between the two types: `name` is half or bfloat16, P the pair type.
#define ONNXFUSE_NAMED(T, P, name, short_name, E, M)                                                         \
  inline T __float2##name(float x) { return T(x); }                                                          \
  inline T __float2##name##_rn(float x) { return T(x); }                                                     \
  inline T __float2##name##_rz(float x) { return T(T##_raw{onnxfuse_emulator::encode<E, M>(x, true)}); }     \
  inline T __double2##name(double x) { return T(x); }                                                        \
  inline float __##name##2float(T x) { return float(x); }                                                    \
  inline T __int2##name##_rn(int x) { return T(x); }                                                         \
  inline T __uint2##name##_rn(unsigned x) { return T(x); }                                                   \
  inline T __short2##name##_rn(short x) { return T(int(x)); }                                                \
  inline T __ushort2##name##_rn(unsigned short x) { return T(int(x)); }                                      \
  inline T __ll2##name##_rn(long long x) { return T(x); }                                                    \
  inline T __ull2##name##_rn(unsigned long long x) { return T(x); }                                          \
  inline int __##name##2int_rz(T x) { return __float2int_rz(x); }                                            \
  inline int __##name##2int_rn(T x) { return __float2int_rn(x); }                                            \
  inline unsigned __##name##2uint_rz(T x) { return __float2uint_rz(x); }                                     \
  inline long long __##name##2ll_rz(T x) { return __float2ll_rz(x); }                                        \
  inline unsigned long long __##name##2ull_rz(T x) { return __float2ull_rz(x); }                             \
  inline short __##name##_as_short(T x) { return static_cast<short>(x.__x); }                                \
  inline unsigned short __##name##_as_ushort(T x) { return x.__x; }                                          \
  inline T __short_as_##name(short x) { return T(T##_raw{static_cast<unsigned short>(x)}); }                 \
  inline T __ushort_as_##name(unsigned short x) { return T(T##_raw{x}); }                                    \
  struct __align__(4) P {                                                                                    \
    T x, y;                                                                                                  \
    P() = default;                                                                                           \
    P(T x, T y) : x(x), y(y) {}                                                                              \
  };                                                                                                         \
  inline P make_##short_name##2(T x, T y) { return P(x, y); }                                                \
  inline P __halves2##short_name##2(T x, T y) { return P(x, y); }                                            \
  inline P __##short_name##2##short_name##2(T x) { return P(x, x); }                                         \
  inline P __float2##short_name##2_rn(float x) { return P(T(x), T(x)); }                                     \
  inline P __floats2##short_name##2_rn(float x, float y) { return P(T(x), T(y)); }                           \
  inline P __float22##short_name##2_rn(float2 x) { return P(T(x.x), T(x.y)); }                               \
  inline float2 __##short_name##22float2(P x) { return make_float2(x.x, x.y); }                              \
  inline float __low2float(P x) { return x.x; }                                                              \
  inline float __high2float(P x) { return x.y; }                                                             \
  inline T __low2##name(P x) { return x.x; }                                                                 \
  inline T __high2##name(P x) { return x.y; }                                                                \
  inline P __lowhigh2highlow(P x) { return P(x.y, x.x); }                                                    \
  inline P __hadd2(P a, P b) { return P(a.x + b.x, a.y + b.y); }                                             \
  inline P __hsub2(P a, P b) { return P(a.x - b.x, a.y - b.y); }                                             \
  inline P __hmul2(P a, P b) { return P(a.x * b.x, a.y * b.y); }                                             \
  inline P __h2div(P a, P b) { return P(a.x / b.x, a.y / b.y); }                                             \
  inline P __hneg2(P a) { return P(-a.x, -a.y); }                                                            \
  inline P __habs2(P a) { return P(__habs(a.x), __habs(a.y)); }                                              \
  inline P __hfma2(P a, P b, P c) { return P(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)); }                \
  inline P __hmax2(P a, P b) { return P(__hmax(a.x, b.x), __hmax(a.y, b.y)); }                               \
  inline P __hmin2(P a, P b) { return P(__hmin(a.x, b.x), __hmin(a.y, b.y)); }                               \
  inline P operator+(P a, P b) { return __hadd2(a, b); }                                                     \
  inline P operator-(P a, P b) { return __hsub2(a, b); }                                                     \
  inline P operator*(P a, P b) { return __hmul2(a, b); }                                                     \
  inline P operator/(P a, P b) { return __h2div(a, b); }                                                     \
  inline P operator-(P a) { return __hneg2(a); }                                                             \
  inline P h2exp(P a) { return P(hexp(a.x), hexp(a.y)); }                                                    \
  inline P h2rcp(P a) { return P(hrcp(a.x), hrcp(a.y)); }                                                    \
  inline P h2sqrt(P a) { return P(hsqrt(a.x), hsqrt(a.y)); }                                                 \
  inline P h2rsqrt(P a) { return P(hrsqrt(a.x), hrsqrt(a.y)); }
ONNXFUSE_NAMED(__half, __half2, half, half, 5, 10)
ONNXFUSE_NAMED(__nv_bfloat16, __nv_bfloat162, bfloat16, bfloat16, 8, 7)
#undef ONNXFUSE_NAMED
typedef __half2 half2;
typedef __nv_bfloat162 nv_bfloat162;
