// Everything that CUDA kernel text may use, for host g++.  Precompiled once; included before every kernel's text.
#pragma once
// Without the special functions of C++17, which make the C++ library's <math.h> twice as large to read.
#if __has_include(<bits/c++config.h>)
#include <bits/c++config.h>
#undef _GLIBCXX_USE_STD_SPEC_FUNCS
#define _GLIBCXX_USE_STD_SPEC_FUNCS 0
#endif
#include <float.h>
#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

#include "language.h"
#include "vectors.h"
// The order matters: vectors are used by all that follows.
#include "numbers.h"
#include "floats16.h"
#include "warp.h"
#include "memory.h"

namespace cuda {
namespace std {
using namespace ::std;
}
}  // namespace cuda

#define ONNXFUSE_EMULATOR 1
#define __CUDACC_RTC__ 1
#define __CUDA_ARCH__ 900

// PTX stands behind functions that have a plain twin for ONNXFUSE_EMULATOR.
#pragma GCC poison asm __asm__ __asm
