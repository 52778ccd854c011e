// The fused operator: its kernel is made when a session is created and launched when it runs.
#pragma once

#include <string>

#include "ort_api.h"

namespace onnxfuse {

constexpr int kRegionNames = 512;

// An operator of the pool, for the CUDA provider or for the CPU's.
struct RegionOp : OrtCustomOp {
  RegionOp(int number, bool cpu);
  std::string name;
  bool cpu;
};

// The function table that kernels use; set before any operator is registered.
void set_api(const Api& api);

// Whether runs are counted per node (off at first), and the live kernels with their counts, as JSON.
void set_recording(bool on);
std::string live_kernels();

}  // namespace onnxfuse
