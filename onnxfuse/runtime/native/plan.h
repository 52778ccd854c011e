// The launch plan of a fused node, as onnxfuse/lowering/launch.py writes it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "argument.h"
#include "expression.h"
#include "routines.h"
#include "scratch.h"
#include "tensor_map.h"

namespace onnxfuse {

// Sizes of one launch.
struct Geometry {
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t shared;
  uint32_t cluster[3];  // where the step has one
};

// "2x1x1"
std::string dimensions(const uint32_t (&sizes)[3]);

// A kernel's launch, or a call of a library's routine.
struct Step {
  std::string kernel;
  Expression grid[3];
  Expression block[3];
  Expression shared;
  bool clustered = false;
  Expression cluster[3];  // where `clustered`
  const Routine* routine = nullptr;  // of a call, which has no kernel and none of the sizes above
  size_t type = 0;                   // among the routine's
  std::vector<Expression> sizes;     // the routine's
  bool dependent = false;  // it may begin before the kernel before it on the stream ends
  std::vector<Argument> arguments;
  std::vector<uint32_t> addresses, maps;  // which of the arguments are addresses, and which are tensor maps

  // The scratch buffer that a call has as its workspace, or null.
  const Argument* workspace() const {
    return routine != nullptr && arguments.size() > routine->operands ? &arguments.back() : nullptr;
  }
  // Whether its launch has attributes, which GPUs before sm_90 do not take.
  bool extended() const { return clustered || dependent; }
  // False where the grid is empty and nothing is to be launched.
  bool geometry(const Situation& situation, Geometry* out) const;
};

struct Variant {
  std::string name;
  std::vector<Expression> guards;          // which read no address
  std::vector<Alignment> alignments;       // further guards
  std::vector<Expression> address_guards;  // further guards that are no alignments
  bool places = false;                     // whether one of them names a whole address
  std::vector<Step> steps;
  bool calls = false;                // whether some step calls a library
  std::vector<uint32_t> scratch;     // buffers that its steps use, ascending
  std::vector<Lifetime> lives;       // when they do
  std::vector<uint32_t> workspaces;  // places among `scratch` of those that are nothing but workspaces of calls
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
  std::vector<TensorMap> maps;
  std::vector<std::string> options;
  std::vector<Variant> variants;
  Reads reads;
  std::vector<uint32_t> sized, hosted;  // tensor inputs and host inputs whose sizes or contents are read
  bool repeats = true;  // equal sizes and host inputs give equal launches: only guards read addresses

  // Throws Error where the text is no launch plan of this version.
  static Plan parse(std::string_view text);

  // What the text calls its region; empty where it is no launch plan.
  static std::string region_of(std::string_view text);

  // Drops the variants that this GPU never runs, and the guards that always hold on it.
  void specialise(int capability, int multiprocessors);
};

}  // namespace onnxfuse
