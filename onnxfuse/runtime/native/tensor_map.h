// Tensor maps: descriptors that the tensor memory accelerator (from sm_90 on) copies tiles by, built on the host.
//
// onnxfuse/lowering/tensor_map.py defines their members.  A map holds the tensor's address and sizes, so that it is
// built where one of them is new, and kept: a run with addresses of an earlier one builds none.
#pragma once

#include <cstdint>
#include <vector>

#include "argument.h"
#include "driver.h"
#include "json.h"

namespace onnxfuse {

struct TensorMap {
  static constexpr size_t kMostRank = 5;

  Argument base;  // an address
  int type = 0;
  uint32_t rank = 0;
  Expression sizes[kMostRank];        // from the innermost on
  Expression strides[kMostRank - 1];  // bytes, from the second axis on
  uint32_t box[kMostRank], element_strides[kMostRank];
  int interleave = 0, swizzle = 0, promotion = 0, fill = 0;
  uint32_t alignment = 16;  // of the address and the strides, in bytes

  // Throws Error where the driver would refuse it whatever the sizes are, or it names what the plan has not.
  static TensorMap parse(const Json& json, const Named& named, Reads* reads);
};

// Its sizes in one run.
struct TensorSizes {
  uint64_t sizes[TensorMap::kMostRank] = {};
  uint64_t strides[TensorMap::kMostRank - 1] = {};

  // Throws Error where the driver would refuse them.
  static TensorSizes of(const TensorMap& map, const Situation& situation);
};

// The maps of one tensor at these sizes, by its address.
class BuiltMaps {
 public:
  // Forgets what was built for other sizes.
  void resize(const TensorSizes& sizes);
  const TensorSizes& sizes() const { return sizes_; }
  // The map of the tensor at this address; it stays until the next call.  Throws Error.
  void* at(uint64_t address, const TensorMap& map, const Driver& driver);

 private:
  struct alignas(128) Bytes {  // CUtensorMap
    unsigned char bytes[128];
  };
  size_t place(uint64_t address) const;
  void grow();

  TensorSizes sizes_;
  size_t used_ = 0;
  std::vector<uint64_t> addresses_;  // 0: a free place; as many as a power of two, half of them free
  std::vector<Bytes> maps_;
};

}  // namespace onnxfuse
