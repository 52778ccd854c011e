// Scalars and vectors that generated kernels are made of.  A kernel's text begins with what it uses of them (headers.py).
namespace of {

#define OF_INFINITY __int_as_float(0x7f800000)
#define OF_NAN __int_as_float(0x7fffffff)

// ---- Values in memory and in registers: half and bfloat16 are computed in float. ----

__device__ __forceinline__ float value(__half x) { return __half2float(x); }
__device__ __forceinline__ float value(__nv_bfloat16 x) { return __bfloat162float(x); }
template <typename T> __device__ __forceinline__ T value(T x) { return x; }

template <typename T> struct Store {
  template <typename U> static __device__ __forceinline__ T from(U x) { return (T)x; }
  template <typename U> static __device__ __forceinline__ void pair(T* to, U first, U second) {
    to[0] = from(first), to[1] = from(second);
  }
};
template <> struct Store<__half> {
  static __device__ __forceinline__ __half from(float x) { return __float2half_rn(x); }
  static __device__ __forceinline__ void pair(__half* to, float first, float second) {
    *reinterpret_cast<__half2*>(to) = __floats2half2_rn(first, second);
  }
};
template <> struct Store<__nv_bfloat16> {
  static __device__ __forceinline__ __nv_bfloat16 from(float x) { return __float2bfloat16_rn(x); }
  static __device__ __forceinline__ void pair(__nv_bfloat16* to, float first, float second) {
    *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(first, second);
  }
};
template <typename T> __device__ __forceinline__ float round_to(float x) { return value(Store<T>::from(x)); }

// As the GPU converts: what is out of range of 32 or 64 bits gives the nearest limit; shorter integers keep the lowest
// bits of the 32-bit one.  NaN gives 0 where a float becomes 32 bits, else the highest bit alone.  A C++ cast would be
// the same instruction, but leaves such values undefined.
#define OF_TRUNCATE(truncate, type, name)                                                              \
  __device__ __forceinline__ type truncate(float x, type) { return __float2##name##_rz(x); }           \
  __device__ __forceinline__ type truncate(double x, type) { return __double2##name##_rz(x); }
OF_TRUNCATE(truncate, int, int)
OF_TRUNCATE(truncate, unsigned int, uint)
OF_TRUNCATE(truncate, long long, ll)
OF_TRUNCATE(truncate, unsigned long long, ull)
template <typename T, typename U> __device__ __forceinline__ T to_integer(U x) {
  if constexpr (sizeof(T) >= 4) return truncate(x, T());
  else if constexpr ((T)-1 < (T)0) return (T)truncate(x, int());
  else return (T)truncate(x, 0u);
}

template <typename T> constexpr bool is_half = false;
template <> constexpr bool is_half<__half> = true;

// ---- Vectors: `width` neighbouring elements, moved 16 bytes at a time where they are that long. ----

template <typename T, int width> struct alignas(sizeof(T) * width < 16 ? sizeof(T) * width : 16) Vector {
  T at[width];
};

template <int width, typename T> __device__ __forceinline__ Vector<T, width> load(const T* from) {
  return *reinterpret_cast<const Vector<T, width>*>(from);
}
template <int width, typename T> __device__ __forceinline__ void store(T* to, const Vector<T, width>& vector) {
  *reinterpret_cast<Vector<T, width>*>(to) = vector;
}

// Computed values as a vector in memory; halves and bfloat16 are converted in pairs.
template <typename T, int width, typename U> __device__ __forceinline__ Vector<T, width> pack(const U (&values)[width]) {
  Vector<T, width> vector;
  if constexpr (width % 2 == 0) {
#pragma unroll
    for (int v = 0; v < width; v += 2) Store<T>::pair(vector.at + v, values[v], values[v + 1]);
  } else {
#pragma unroll
    for (int v = 0; v < width; ++v) vector.at[v] = Store<T>::from(values[v]);
  }
  return vector;
}

// ---- Scalar functions, for float and double. ----

#define OF_FUNCTION(name, single_text, double_text)                                    \
  __device__ __forceinline__ float name(float x) { return single_text; }               \
  __device__ __forceinline__ double name(double x) { return double_text; }

OF_FUNCTION(exp, ::expf(x), ::exp(x))
OF_FUNCTION(expm1, ::expm1f(x), ::expm1(x))
OF_FUNCTION(log, ::logf(x), ::log(x))
OF_FUNCTION(log1p, ::log1pf(x), ::log1p(x))
OF_FUNCTION(sqrt, ::sqrtf(x), ::sqrt(x))
OF_FUNCTION(rsqrt, ::rsqrtf(x), ::rsqrt(x))
OF_FUNCTION(reciprocal, 1.0f / x, 1.0 / x)
OF_FUNCTION(sin, ::sinf(x), ::sin(x))
OF_FUNCTION(cos, ::cosf(x), ::cos(x))
OF_FUNCTION(tan, ::tanf(x), ::tan(x))
OF_FUNCTION(asin, ::asinf(x), ::asin(x))
OF_FUNCTION(acos, ::acosf(x), ::acos(x))
OF_FUNCTION(atan, ::atanf(x), ::atan(x))
OF_FUNCTION(sinh, ::sinhf(x), ::sinh(x))
OF_FUNCTION(cosh, ::coshf(x), ::cosh(x))
OF_FUNCTION(tanh, ::tanhf(x), ::tanh(x))
OF_FUNCTION(asinh, ::asinhf(x), ::asinh(x))
OF_FUNCTION(acosh, ::acoshf(x), ::acosh(x))
OF_FUNCTION(atanh, ::atanhf(x), ::atanh(x))
OF_FUNCTION(erf, ::erff(x), ::erf(x))
OF_FUNCTION(sigmoid, 1.0f / (1.0f + ::expf(-x)), 1.0 / (1.0 + ::exp(-x)))
OF_FUNCTION(floor, ::floorf(x), ::floor(x))
OF_FUNCTION(ceil, ::ceilf(x), ::ceil(x))
OF_FUNCTION(round, ::rintf(x), ::rint(x))
OF_FUNCTION(abs, ::fabsf(x), ::fabs(x))
// max(x, 0) + log1p(exp(-|x|)): neither overflows nor loses small results.
OF_FUNCTION(softplus, (x > 0.0f ? x : x != x ? x : 0.0f) + ::log1pf(::expf(-::fabsf(x))),
            (x > 0.0 ? x : x != x ? x : 0.0) + ::log1p(::exp(-::fabs(x))))
// NaN has no sign: 0, as ONNX Runtime's CUDA kernel has it.
OF_FUNCTION(sign, x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : 0.0f, x > 0.0 ? 1.0 : x < 0.0 ? -1.0 : 0.0)
// pow(x, 0.5), which is no square root of -infinity and -0.
OF_FUNCTION(power_half, x == -OF_INFINITY ? OF_INFINITY : ::sqrtf(x + 0.0f),
            x == -(double)OF_INFINITY ? (double)OF_INFINITY : ::sqrt(x + 0.0))
// x times about the distribution function of the normal distribution at x: (1 + tanh u) / 2 is sigmoid(2u).
OF_FUNCTION(gelu_tanh, x * sigmoid((x + x * x * x * 0.044715f) * 1.59576912f),
            x * sigmoid((x + x * x * x * 0.044715) * 1.5957691216057308))
// exp where results far under one need no relative accuracy: the error grows with |x|, to 1e-6 at -20.
OF_FUNCTION(quick_exp, ::__expf(x), ::exp(x))
#undef OF_FUNCTION

__device__ __forceinline__ float exp2_approximate(float x) {
#ifdef ONNXFUSE_EMULATOR
  return ::exp2f(x);
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}
// exp(a - b) in two instructions.  What the product with b rounds off is the same factor for every a: a softmax, which
// divides by the sum, loses it.  From 2^30 on it would overflow; half has no such numbers, and gives none here either.
__device__ __forceinline__ float exp_difference(float a, float b) {
  constexpr float log2_e = 1.44269504f;
  const float most = ::fabsf(b) < 1073741824.0f ? b * log2_e : OF_INFINITY * 0.0f;
  return exp2_approximate(::fmaf(a, log2_e, -most));
}

// c0 + c1 * x + c2 * x * x + ...
__device__ __forceinline__ float polynomial(float, float c) { return c; }
template <typename... More> __device__ __forceinline__ float polynomial(float x, float c, More... more) {
  return ::fmaf(x, polynomial(x, more...), c);
}
// x times a share of it, of which 2 ^ exponent is what is left at -|x| (and, to one, at |x|): a tail is accurate relative
// to itself.  The exponents are polynomials that minimise the largest error up to 5.6, where what is left is 1e-8.  Past
// that they fall for ever.
__device__ __forceinline__ float weighed(float x, float exponent) {
  const float tail = exp2_approximate(exponent);
  return x * (x < 0.0f ? tail : 1.0f - tail);
}
// x times the distribution function of the normal distribution at x.  Of one, 1e-7 is off, as one and the error function
// summed up in float32 are; of tails, which these lose, 2e-3 at most.
__device__ __forceinline__ float gelu(float x) {
  return weighed(x, polynomial(::fabsf(x), -0.99999994f, -1.15110826f, -0.459180027f, -0.0525944047f, 0.00722545618f,
                               -0.00027631555f, -0.000122428057f, 2.47960561e-05f, -1.53310316e-06f));
}
__device__ __forceinline__ double gelu(double x) { return x * (0.5 * (1.0 + ::erf(x * 0.70710678118654752))); }

// x * tanh(log(1 + exp(x))): with n = e * (e + 2), e = exp(x), the hyperbolic tangent is n / (n + 2).  From 20 (in
// double, 40) on it rounds to one.
__device__ __forceinline__ float mish(float x) {
  const float e = ::expf(::fminf(x, 20.0f)), n = e * (e + 2.0f);
  return x * (n / (n + 2.0f));
}
__device__ __forceinline__ double mish(double x) {
  const double e = ::exp(::fmin(x, 40.0)), n = e * (e + 2.0);
  return x * (n / (n + 2.0));
}

// ---- Quicker forms for results that are rounded to half or bfloat16. ----

__device__ __forceinline__ float reciprocal_approximate(float x) {
#ifdef ONNXFUSE_EMULATOR
  return 1.0f / x;
#else
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}
__device__ __forceinline__ float quick_sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
// x / (1 + exp(-x)), rounded to half, of two numbers by one reciprocal, that of both divisors' product: what waits here is
// the unit for special functions.  From -41 down exp(-x) counts as 2 ^ 60, so that no divisor spoils the other one's
// result: the quotient is nothing that half holds.  That of -infinity alone would be no number, and is its own negative.
template <int width> __device__ __forceinline__ Vector<__half, width> pack_silu(const float (&x)[width]) {
  Vector<__half, width> vector;
  if constexpr (width % 2) vector.at[width - 1] = __float2half_rn(x[width - 1] * quick_sigmoid(x[width - 1]));
#pragma unroll
  for (int v = 0; v + 1 < width; v += 2) {
#if !defined(ONNXFUSE_EMULATOR) && __CUDA_ARCH__ < 800
    Store<__half>::pair(vector.at + v, x[v] * quick_sigmoid(x[v]), x[v + 1] * quick_sigmoid(x[v + 1]));
#else
    constexpr float log2_e = 1.44269504f, most = 60.0f;
    const float one = 1.0f + exp2_approximate(::fminf(x[v] * -log2_e, most));
    const float other = 1.0f + exp2_approximate(::fminf(x[v + 1] * -log2_e, most));
    const float both = reciprocal_approximate(one * other);
    const float first = x[v] * (other * both), second = x[v + 1] * (one * both);
#ifdef ONNXFUSE_EMULATOR
    Store<__half>::pair(vector.at + v, first + ::fminf(first, 0.0f) * 0.0f, second + ::fminf(second, 0.0f) * 0.0f);
#else
    const __half2 pair = __floats2half2_rn(first, second), zero = __float2half2_rn(0.0f);
    *reinterpret_cast<__half2*>(vector.at + v) = __hfma2(__hmin2(pair, zero), zero, pair);
#endif
#endif
  }
  return vector;
}
// Of both functions' tails 1.1e-4 is off up to 4, and less than 1e-8 of x from there on.
__device__ __forceinline__ float quick_gelu(float x) {
  return weighed(x, polynomial(::fabsf(x), -1.0001558f, -1.1487031f, -0.46511379f, -0.047522351f, 0.0056205131f,
                               -0.00029983831f));
}
__device__ __forceinline__ float quick_gelu_tanh(float x) {
  return weighed(x, polynomial(::fabsf(x), -0.99988556f, -1.1544566f, -0.44320041f, -0.080074877f, 0.031619135f,
                               -0.0098007098f, 0.0011826999f, -5.2876429e-05f));
}

// x times a quotient of polynomials of its square that minimises the largest relative error up to 7, 1.3e-6, where the
// hyperbolic tangent is one but for 1.7e-6; one use of the unit for special functions, and no branch.
__device__ __forceinline__ float quick_tanh(float x) {
  const float square = x * x;
  const float above = polynomial(square, 0.999999f, 0.12321625f, 0.0022927285f, 3.9943416e-6f);
  const float below = polynomial(square, 1.0f, 0.45654178f, 0.021149868f, 0.00014394721f);
  const float share = x * above * reciprocal_approximate(below);
  return ::fabsf(x) > 7.0f ? ::copysignf(1.0f, x) : share;
}

// One instruction, whose error is up to 2^-11 of the result (emulated: results cut off to that): for what 16-bit nodes
// round several times around it.
__device__ __forceinline__ float tanh_approximate(float x) {
#ifdef ONNXFUSE_EMULATOR
  return __int_as_float(__float_as_int(::tanhf(x)) & ~0xfff);
#else
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

template <typename T> __device__ __forceinline__ bool isnan(T x) { return x != x; }
template <typename T> __device__ __forceinline__ bool isinf(T x) { return x == (T)OF_INFINITY || x == -(T)OF_INFINITY; }
template <typename T> __device__ __forceinline__ T divide(T a, T b) { return a / b; }
// x / step where many x are divided by one step, to be rounded to whole numbers: its reciprocal is computed once for all,
// and two corrections round the quotient as division does (Markstein, Computation of elementary functions on the IBM RISC
// System/6000 processor, 1990), which takes another, long way for each zero that it meets.  No step is so small that its
// reciprocal is infinite: both are larger by a power of two then.  Quotients of endless steps are nothing, and those that
// are more than 16 bits hold need no correction.  Nothing here branches, so that quotients are computed side by side.
__device__ __forceinline__ float steps(float x, float step) {
  const float by = ::fabsf(step) < 1e-30f ? 1.20892582e+24f : 1.0f;
  const float inverse = 1.0f / (step * by), exact = inverse == 0.0f ? 0.0f : step * by;
  const float larger = x * by;
  const float first = larger * inverse;
  const float second = ::fmaf(::fmaf(-first, exact, larger), inverse, first);
  const float third = ::fmaf(::fmaf(-second, exact, larger), inverse, second);
  return ::fabsf(first) < 16777216.0f ? third : first;
}
// The whole number nearest to x, ties to even, plus another, from `least` to `most`, which 16 bits hold.  It is bounded
// first, so that a sum with 1.5 * 2 ^ 23, which has no digits behind the point, rounds it: one instruction of the quick
// kind, where rint is one of the slow.  No number gives the least.
__device__ __forceinline__ float nearest(float x, float zero, float least, float most) {
  const float bounded = ::fminf(::fmaxf(x, least - zero), most - zero);
  return __fadd_rn(__fadd_rn(bounded, 12582912.0f), -12582912.0f) + zero;
}
// The same as the lowest byte of what it returns, where that sum's bits have it.  No number gives `zero`.
__device__ __forceinline__ int nearest_byte(float x, int zero, float least, float most) {
  const float bounded = ::fminf(::fmaxf(x != x ? 0.0f : x, least - (float)zero), most - (float)zero);
  return __float_as_int(__fadd_rn(bounded, 12582912.0f)) + zero;
}
__device__ __forceinline__ float fmod(float a, float b) { return ::fmodf(a, b); }
__device__ __forceinline__ double fmod(double a, double b) { return ::fmod(a, b); }
__device__ __forceinline__ float pow(float a, float b) { return ::powf(a, b); }
__device__ __forceinline__ double pow(double a, double b) { return ::pow(a, b); }

// The larger and the smaller number; NaN where either is NaN.
template <typename T, typename U> __device__ __forceinline__ T max(T a, U b) { return a > (T)b || a != a ? a : (T)b; }
template <typename T, typename U> __device__ __forceinline__ T min(T a, U b) { return a < (T)b || a != a ? a : (T)b; }

// ---- Integers. ----

// Their limits, which are the neutral elements of Max and Min too.
template <typename T> __device__ __forceinline__ T lowest() {
  return (T)-1 < (T)0 ? (T)(1ULL << (sizeof(T) * 8 - 1)) : (T)0;
}
template <typename T> __device__ __forceinline__ T highest() {
  return (T)((T)-1 < (T)0 ? (1ULL << (sizeof(T) * 8 - 1)) - 1 : ~0ULL);
}
template <typename T> __device__ __forceinline__ T iabs(T x) { return x < 0 ? -x : x; }
template <typename T> __device__ __forceinline__ T imin(T a, T b) { return a < b ? a : b; }
template <typename T> __device__ __forceinline__ T imax(T a, T b) { return a > b ? a : b; }
// Whole numbers as four bytes, those past the ends of their type as its ends.
template <typename T> __device__ __forceinline__ unsigned four_bytes(const int* x) {
  unsigned bytes = 0;
#if defined(ONNXFUSE_EMULATOR) || __CUDA_ARCH__ < 800
#pragma unroll
  for (int i = 0; i < 4; ++i)
    bytes |= (unsigned)(unsigned char)(T)imin(imax(x[i], (int)lowest<T>()), (int)highest<T>()) << 8 * i;
#else
  if constexpr ((T)-1 < (T)0) {
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %0;" : "+r"(bytes) : "r"(x[3]), "r"(x[2]));
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %0;" : "+r"(bytes) : "r"(x[1]), "r"(x[0]));
  } else {
    asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %0;" : "+r"(bytes) : "r"(x[3]), "r"(x[2]));
    asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %0;" : "+r"(bytes) : "r"(x[1]), "r"(x[0]));
  }
#endif
  return bytes;
}
// A vector of bytes as the words that these are in: the compiler would take it apart where it is copied.
template <typename T, int width> struct Bytes {
  unsigned words[width / 4];
  __device__ __forceinline__ operator Vector<T, width>() const {
    Vector<T, width> vector;
#pragma unroll
    for (int v = 0; v < width; ++v) vector.at[v] = (T)(words[v / 4] >> v % 4 * 8);
    return vector;
  }
};
template <typename T, int width> __device__ __forceinline__ void store(T* to, const Bytes<T, width>& bytes) {
  Vector<unsigned, width / 4> words;
#pragma unroll
  for (int word = 0; word < width / 4; ++word) words.at[word] = bytes.words[word];
  store(reinterpret_cast<unsigned*>(to), words);
}
// Two of them, from one with an even number on.
template <typename T, int width> __device__ __forceinline__ void store_two(T* to, const Bytes<T, width>& bytes, int first) {
  *reinterpret_cast<unsigned short*>(to) = (unsigned short)(bytes.words[first / 4] >> first % 4 * 8);
}
// What `steps` and `nearest_byte` make of a vector by one step; where only `positive` numbers are wanted, of none in place
// of others.  The reciprocal, a little less and a little more, gives two products between which the quotient is, and so is
// what it is when it is rounded, to float32 and then, by a sum, to a whole number: if both are the same number, that is it.
// Those of more than 2 ^ 22 steps never are, nor those of no number; endless ones are, and past the ends of any type.
template <typename T, bool positive = false, int width>
__device__ __forceinline__ auto quantised(const float (&x)[width], float step, int zero) {
  const float size = positive ? step : ::fabsf(step), inverse = 1.0f / step;
  const float less = inverse * (1.0f - 2.38418579e-07f), more = inverse * (1.0f + 2.38418579e-07f);
  bool clear = size > 1e-30f && size < 1e30f;
  int y[width];
#pragma unroll
  for (int v = 0; v < width; ++v) {
    const float sum = ::fmaf(x[v], less, 12582912.0f);
    clear &= sum == ::fmaf(x[v], more, 12582912.0f);
    y[v] = __float_as_int(sum) + (zero - 0x4b400000);
    if constexpr (positive) y[v] = imax(y[v], zero);
  }
  if (!clear) {
    const float least = (float)lowest<T>(), most = (float)highest<T>();
#pragma unroll
    for (int v = 0; v < width; ++v) {
      const float number = positive ? max(x[v], 0.0f) : x[v];
      y[v] = (int)(T)nearest_byte(steps(number, step), zero, least, most);
    }
  }
  if constexpr (width % 4 == 0) {
    Bytes<T, width> bytes;
#pragma unroll
    for (int v = 0; v < width; v += 4) bytes.words[v / 4] = four_bytes<T>(y + v);
    return bytes;
  } else {
    Vector<T, width> vector;
#pragma unroll
    for (int v = 0; v < width; ++v) vector.at[v] = (T)imin(imax(y[v], (int)lowest<T>()), (int)highest<T>());
    return vector;
  }
}
template <typename T> __device__ __forceinline__ T bcast(T a, T b) { return a == 1 ? b : a; }
// Of indices: a division by zero gives 0 rather than whatever the hardware gives.
template <typename T, typename U> __device__ __forceinline__ T quotient(T a, U b) { return b == 0 ? 0 : a / (T)b; }
template <typename T, typename U> __device__ __forceinline__ T remainder(T a, U b) { return b == 0 ? 0 : a % (T)b; }
// Of elements, which may be anything: the lowest number by -1 is itself again, which C++ leaves undefined.
template <typename T> __device__ __forceinline__ bool negates(T by) { return (T)-1 < (T)0 && by == (T)-1; }
template <typename T> __device__ __forceinline__ T divide_integers(T a, T by) {
  return negates(by) ? (T)(0ULL - (unsigned long long)a) : quotient(a, by);
}
template <typename T> __device__ __forceinline__ T remainder_of_integers(T a, T by) {
  return negates(by) ? (T)0 : remainder(a, by);
}
// The remainder with the sign of the divisor.
template <typename T> __device__ __forceinline__ T modulo(T a, T by) {
  const T r = remainder_of_integers(a, by);
  return r != 0 && (r < 0) != (by < 0) ? (T)(r + by) : r;
}
// A shift by less than nothing, or by all bits, leaves what the sign bit alone would.
template <typename T, typename U> __device__ __forceinline__ bool shifts_out(U by) {
  return by < 0 || (unsigned long long)by >= 8 * sizeof(T);
}
template <typename T, typename U> __device__ __forceinline__ T shift_left(T a, U by) {
  return shifts_out<T>(by) ? (T)0 : (T)((unsigned long long)a << by);
}
template <typename T, typename U> __device__ __forceinline__ T shift_right(T a, U by) {
  return shifts_out<T>(by) ? (T)(a < 0 ? -1 : 0) : (T)(a >> by);
}
// A power past the type's limits gives the nearest of them; so does 0 to a negative one, which is infinite.
template <typename T, typename U> __device__ __forceinline__ T ipow(T a, U b) {
  if (b == 1) return a;
  if (b < 0) return a == 0 ? highest<T>() : a == 1 || (negates(a) && b % 2 == 0) ? (T)1 : negates(a) ? a : (T)0;
  T result = 1;
  double size = 1.0, factor = (double)a;
  for (unsigned long long n = (unsigned long long)b; n; n >>= 1, a = (T)((unsigned long long)a * a), factor *= factor)
    if (n & 1) result = (T)((unsigned long long)result * a), size *= factor;
  return size >= (double)highest<T>() ? highest<T>() : size <= (double)lowest<T>() ? lowest<T>() : result;
}

}  // namespace of
