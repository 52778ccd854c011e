// The fused operator as ONNX Runtime sees it.
#pragma once

#include <string>

#include "ort_api.h"

namespace onnxfuse {

// Names of the pool, and of the smallest domain: the others have powers of two of them.
constexpr int kRegionNames = 512;
constexpr int kLeastNames = 16;

// An operator of a pool, for the CUDA provider or for the CPU's.  Nothing of it changes once it is registered, and it
// lives as long as the process: sessions run while others are created.
struct RegionOp : OrtCustomOp {
  // `infers`: whether the runtime may be told how to ask a node for its output types.
  RegionOp(const Runtime& runtime, int number, bool cpu, bool infers);
  const Runtime& runtime;
  const std::string name;
  const bool cpu;
};

}  // namespace onnxfuse
