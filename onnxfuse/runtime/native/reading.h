// What the parts of a launch plan are read with.
#pragma once

#include <string>
#include <vector>

#include "json.h"

namespace onnxfuse {

// What a launch plan may have.  Rules make plans far below; past it a plan is refused before it costs memory or time.
struct Most {
  static constexpr size_t kBytes = 16 << 20;
  static constexpr size_t kInputs = 4096, kOutputs = 4096, kAxes = 1024;  // axes of an output
  static constexpr size_t kSymbols = 4096, kChecks = 4096, kGuards = 4096, kOptions = 256, kMaps = 256;
  static constexpr size_t kScratch = 1024, kVariants = 256, kSteps = 1 << 16;  // steps of all variants
  static constexpr size_t kArguments = 4096;                                   // of a kernel
  static constexpr size_t kLetters = 4096;  // of the name of a kernel, a variant or a region, and of a message
};

// Throws Error where there are more than a launch plan may have.
void limit(size_t count, size_t most, const char* what);

// The list of a member, which may have so many items.
const std::vector<Json>& items(const Json& json, const char* key, size_t most, const char* what);

// A name or a message.
const std::string& words(const Json& json, const char* what);

}  // namespace onnxfuse
