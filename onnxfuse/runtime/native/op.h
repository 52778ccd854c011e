// The fused operator as ONNX Runtime sees it.
#pragma once

#include <string>

#include "ort_api.h"

namespace onnxfuse {

// Names of the pool, and of the smallest domain: the others have powers of two of them.
constexpr int kRegionNames = 512;
constexpr int kLeastNames = 16;

// An operator of the pool, for the CUDA provider or for the CPU's.
struct RegionOp : OrtCustomOp {
  // `infers`: whether the runtime may be told how to ask a node for its output types.
  RegionOp(int number, bool cpu, bool infers);
  std::string name;
  bool cpu;
};

// The function table that kernels use; set before any operator is registered.
void set_api(const Api& api);

}  // namespace onnxfuse
