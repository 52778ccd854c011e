// Ranges around the work of fused nodes, for NVIDIA's profilers (Nsight Systems, Nsight Compute).
#pragma once

#include <string>

namespace onnxfuse {

// Whether ONNXFUSE_RANGES asks for ranges and a profiler that takes them is there.
bool ranges_wanted();

// Open on this thread as long as it lives; nothing where ranges are not wanted.
class Range {
 public:
  explicit Range(const std::string& name);
  ~Range();
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  int (*pop_)() = nullptr;
};

}  // namespace onnxfuse
