// Library calls: steps of a launch plan that are no kernels but a named routine of a library that the process loads.
//
// A plan may name these routines alone.  onnxfuse/lowering/routines.py defines what each computes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "driver.h"

namespace onnxfuse {

// What a call is given in one run, beside its sizes.
struct Operands {
  const std::vector<uint64_t>& addresses;  // in the routine's order
  Address workspace = 0;
  size_t workspace_bytes = 0;
  Stream stream = nullptr;
};

// The largest power of two, 256 at most, that divides an address: what libraries are told of how operands lie.
inline uint32_t alignment(uint64_t address) {
  return static_cast<uint32_t>(std::min<uint64_t>(address & (~address + 1), 256));
}

// A call at its sizes, with what the library made of them; one thread's.
class PreparedCall {
 public:
  virtual ~PreparedCall() = default;
  // Chooses how to run it with operands at addresses that are aligned like these, and tells how many bytes of workspace
  // that takes, `most` at most.  Throws Error where the library has no way.
  virtual size_t choose(const std::vector<uint64_t>& addresses, size_t most) = 0;
  // Runs it in the way that was chosen last.  Throws Error with the library's word.
  virtual void run(const Operands& operands) = 0;
};

class Device;

struct Routine {
  std::string_view name;
  std::vector<std::string_view> types;  // of its elements
  size_t operands;                      // before the workspace, which a call may leave out
  std::vector<std::string_view> sizes;

  // Whether there is something to compute; throws Error where the sizes are none of the routine's.
  bool (*fits)(const std::vector<int64_t>& sizes);
  // Loads the library; throws Error that names it and the remedy where it is not there.
  void (*open)(Device& device);
  std::unique_ptr<PreparedCall> (*prepare)(Device& device, size_t type, const std::vector<int64_t>& sizes);

  // The routine of this name.  Throws Error where there is none.
  static const Routine& named(std::string_view name);
};

}  // namespace onnxfuse
