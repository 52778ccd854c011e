// Where a variant's scratch buffers lie in the one block of memory that a run allocates for them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace onnxfuse {

// The first and the last of a variant's steps that use a buffer.
struct Lifetime {
  uint32_t first = 0, last = 0;
};

class ScratchLayout {
 public:
  // Of every buffer's first byte: enough for tensor maps, and for what libraries want of a workspace.
  static constexpr int64_t kAlignment = 256;

  // Room for so many buffers, so that arranging them allocates nothing.
  explicit ScratchLayout(size_t count = 0) : sizes(count), offsets(count), order_(count) {}

  // Gives the buffers of `sizes` their offsets: those that some step needs at once lie apart, others may share memory.
  // Throws Error where they leave 64 bits.
  void arrange(const std::vector<Lifetime>& lives);

  std::vector<int64_t> sizes, offsets;  // bytes
  int64_t total = 0;

 private:
  std::vector<uint32_t> order_;
};

}  // namespace onnxfuse
