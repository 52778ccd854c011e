// An argument of a kernel: an address, an integer or a tensor map.
#pragma once

#include <cstdint>
#include <string>

#include "expression.h"

namespace onnxfuse {

struct Argument {
  enum class Kind { kInput, kOutput, kScratch, kMap, kInt32, kInt64 };
  Kind kind;
  uint32_t index = 0;
  Expression value;

  bool integer() const { return kind == Kind::kInt32 || kind == Kind::kInt64; }
  bool address() const { return kind == Kind::kInput || kind == Kind::kOutput || kind == Kind::kScratch; }
};

// What arguments may name.
struct Named {
  const Scope& scope;
  size_t scratch = 0, maps = 0;
};

// Throws Error where the text names nothing of these.
Argument parse_argument(const std::string& text, const Named& named, Reads* reads);

// The value of an integer.
uint64_t integer_argument(const Argument& argument, const Situation& situation);

}  // namespace onnxfuse
