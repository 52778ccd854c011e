// Matrix products by cuBLASLt, which ONNX Runtime's CUDA provider loads too.
#pragma once

#include "routines.h"

namespace onnxfuse {

// "gemm": C = f(A B) for row-major matrices, a batch of them or one, with an accumulator of 32 bits; "gemm_bias" adds a
// vector to each row before f, "gemm_add" matrices, and "gemm_bias_add" both.
const Routine& gemm_routine(bool biased, bool added);

}  // namespace onnxfuse
