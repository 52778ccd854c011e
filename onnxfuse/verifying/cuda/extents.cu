// What extents.py's Extent holds of each block of elements, and whether all of them are finite: one thread block a block.
//
//   got, reference, own ──▶ values of a thread ──▶ values of the block: FIELDS doubles
//
// Sums are of squares as they are; where these may overflow or vanish, as where something is not finite, the host goes
// through the block itself.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

constexpr int THREADS = 256;
// In the order of device_extents.py.
enum Field { ENDLESS, SCALE, ERROR, OWN, UNITS, UNIT, ERROR_SQUARES, UNIT_SQUARES, OWN_SQUARES, FIELDS };
constexpr double LARGEST = 1.7976931348623157e308;

__device__ double wide(double x) { return x; }
__device__ double wide(float x) { return x; }
__device__ double wide(__half x) { return __half2float(x); }
__device__ double wide(__nv_bfloat16 x) { return __bfloat162float(x); }

// Digits of a type's significand, and the exponent of its smallest number above zero.
struct Type {
  int digits, least;
};

// The unit in the last place of a type at a number.
__device__ double unit_at(double x, Type type) {
  const int exponent = max(static_cast<int>(__double_as_longlong(x) >> 52 & 0x7ff) - 1023 + 1 - type.digits, type.least);
  return exponent < -1022 ? ldexp(1.0, exponent) : __longlong_as_double(static_cast<long long>(exponent + 1023) << 52);
}

// What an element may err by itself: so many units of the type that is computed in, and no less than one of the
// output's where that is asked for.
struct Limit {
  Type computed, output;
  double units;
  bool rounds;
};

template <class T>
__device__ void extents(const T* got, const double* reference, const T* own, long long count, int block, Limit limit,
                        double* result) {
  __shared__ double values[FIELDS][THREADS];
  double mine[FIELDS] = {};
  const long long first = static_cast<long long>(blockIdx.x) * block;
  const long long end = min(first + block, count);
  for (long long at = first + threadIdx.x; at < end; at += THREADS) {
    const double exact = reference[at];
    const double error = fabs(wide(got[at]) - exact);
    const double theirs = own == nullptr ? 0.0 : fabs(wide(own[at]) - exact);
    if (!(error <= LARGEST && theirs <= LARGEST)) {
      mine[ENDLESS] = 1.0;
      continue;
    }
    const double unit = unit_at(exact, limit.computed);
    const double allowed = fmax(limit.units * unit, limit.rounds ? unit_at(exact, limit.output) : 0.0);
    mine[SCALE] = fmax(mine[SCALE], fabs(exact));
    mine[ERROR] = fmax(mine[ERROR], error);
    mine[OWN] = fmax(mine[OWN], theirs);
    mine[UNITS] = fmax(mine[UNITS], error / allowed);
    mine[UNIT] = fmax(mine[UNIT], unit);
    mine[ERROR_SQUARES] += error * error;
    mine[UNIT_SQUARES] += unit * unit;
    mine[OWN_SQUARES] += theirs * theirs;
  }
  for (int field = 0; field < FIELDS; ++field) values[field][threadIdx.x] = mine[field];
  for (int half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) {
      for (int field = 0; field < FIELDS; ++field) {
        const double other = values[field][threadIdx.x + half];
        double& value = values[field][threadIdx.x];
        value = field < ERROR_SQUARES ? fmax(value, other) : value + other;
      }
    }
  }
  __syncthreads();
  if (threadIdx.x < FIELDS) result[blockIdx.x * FIELDS + threadIdx.x] = values[threadIdx.x][0];
}
