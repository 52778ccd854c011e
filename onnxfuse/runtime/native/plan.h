// The launch plan of a fused node, as onnxfuse/lowering/launch.py writes it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "expression.h"

namespace onnxfuse {

struct Argument {
  enum class Kind { kInput, kOutput, kScratch, kInt32, kInt64 };
  Kind kind;
  uint32_t index = 0;
  Expression value;
};

// Sizes of one launch.
struct Geometry {
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t shared;
};

struct Step {
  std::string kernel;
  Expression grid[3];
  Expression block[3];
  Expression shared;
  std::vector<Argument> arguments;

  // False where the grid is empty and nothing is to be launched.
  bool geometry(const Situation& situation, Geometry* out) const;
};

struct Variant {
  std::string name;
  std::vector<Expression> guards;
  std::vector<Step> steps;
  std::vector<uint32_t> scratch;  // buffers that its steps use, ascending
};

struct Check {
  Expression condition;
  std::string message;
};

struct Output {
  int64_t type;
  std::vector<Expression> shape;
};

struct Plan {
  std::string region;
  size_t inputs = 0;
  std::vector<Expression> symbols;
  std::vector<Check> checks;
  std::vector<Output> outputs;
  std::vector<Expression> scratch;
  std::vector<std::string> options;
  std::vector<Variant> variants;
  Reads reads;
  size_t most_arguments = 0;
  size_t most_axes = 0;

  // Throws Error where the text is no launch plan of this version.
  static Plan parse(std::string_view text);

  // Drops the variants that this GPU never runs.
  void specialise(int capability, int multiprocessors);

  // Gives the symbols their values and holds the checks; `symbols` has room for all of them.
  void bind(Situation* situation, int64_t* symbols) const;

  // The first variant whose guards all hold.
  const Variant& choose(const Situation& situation) const;
};

// The value of an argument that is no address.
uint64_t integer_argument(const Argument& argument, const Situation& situation);

// What the plan does for given sizes, as JSON: for tests, without a GPU.  `situation` has "inputs" and "hosts" (lists
// of integers), "input_addresses", "output_addresses", "sm" and "sms".
std::string evaluate_plan(std::string_view plan, std::string_view situation);

}  // namespace onnxfuse
