// Matrix products by cuBLASLt, which ONNX Runtime's CUDA provider loads too.
#pragma once

#include "routines.h"

namespace onnxfuse {

// "gemm": C = A B for row-major matrices, a batch of them or one, with an accumulator of 32 bits.
const Routine& gemm_routine();

}  // namespace onnxfuse
