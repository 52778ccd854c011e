// Convolutions by cuDNN's graph interface, which ONNX Runtime's CUDA provider loads too.
#pragma once

#include "routines.h"

namespace onnxfuse {

// "conv": y = f(x * w) for images whose channels are last, along one to three axes, with an accumulator of 32 bits;
// "conv_bias" adds a number for each channel before f, "conv_add" an image, and "conv_bias_add" both.
const Routine& conv_routine(bool biased, bool added);

}  // namespace onnxfuse
