// Sizes as expressions in reverse Polish notation: the language that onnxfuse/lowering/launch.py defines.
//
// A text is checked and turned into instructions once, when a kernel is created; evaluating it allocates nothing.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace onnxfuse {

constexpr int kHostInputs = 8;

// A tensor input in one run.  `sizes` is null where the plan reads no size of it.
struct TensorView {
  const int64_t* sizes = nullptr;
  size_t rank = 0;
  uint64_t address = 0;
  bool present = false;
};

// Number of its elements; throws Error where it leaves 64 bits.
int64_t elements(const TensorView& input);

// A host input in one run: `count` elements of 64 bits where `wide`, else of 32.
struct HostView {
  const void* data = nullptr;
  int64_t count = 0;
  bool wide = true;
  bool present = false;
};

// What atoms mean in one run.
struct Situation {
  const TensorView* inputs = nullptr;
  const HostView* hosts = nullptr;
  const int64_t* symbols = nullptr;
  const uint64_t* output_addresses = nullptr;  // null before the outputs exist
  int64_t capability = 0;                      // as 90
  int64_t multiprocessors = 0;
};

// What an expression may name; `outputs` is 0 where outputs do not exist yet.
struct Scope {
  size_t inputs = 0;
  size_t symbols = 0;
  size_t outputs = 0;
};

// What expressions read, for the caller to fetch no more than that.
struct Reads {
  std::vector<char> sizes;          // by tensor input
  int64_t hosts[kHostInputs] = {};  // how many leading elements of a host input
  bool host[kHostInputs] = {};
  bool addresses = false;
  bool places = false;  // whole addresses
};

// A condition on an address: none of the bits of `mask` is set.
struct Alignment {
  bool output;
  uint32_t index;
  uint64_t mask;
};

// An axis of a tensor input.
struct AxisOf {
  uint32_t input = 0;
  size_t axis = 0;
};

class Expression {
 public:
  Expression() = default;
  // Throws Error where the text is no expression in this scope.
  Expression(std::string_view text, const Scope& scope, Reads* reads);

  // Throws Error where a size does not exist in this run or a result leaves 64 bits.
  int64_t evaluate(const Situation& situation) const {
    return code_.size() == 1 && code_[0].op == Op::kConstant ? code_[0].value : run(situation);
  }

  // Whether the value depends on nothing but the GPU.
  bool fixed() const;
  // Whether it is a number, and which.
  bool constant(int64_t* out) const;
  // Whether it is the size of an axis of a tensor input, by itself or as one of the symbols, and of which.
  bool axis(const std::vector<Expression>& symbols, AxisOf* out) const;
  // Whether it says that an address is a multiple of a power of two, and which.
  bool alignment(Alignment* out) const;
  bool is_zero() const { return code_.size() == 1 && code_[0].op == Op::kConstant && code_[0].value == 0; }

 private:
  enum class Op : uint8_t {
    kConstant, kInputSize, kInputCount, kInputAddress, kOutputAddress, kInputPlace, kOutputPlace, kHostElement,
    kHostCount, kSymbol, kCapability, kMultiprocessors,
    kAdd, kSubtract, kMultiply, kFloorDivide, kModulo, kMinimum, kMaximum, kEqual, kUnequal, kLess, kLessEqual,
    kAnd, kOr, kNot, kCeilDivide, kBroadcast, kSelect,
  };
  struct Instruction {
    Op op;
    uint32_t index;
    int64_t value;
  };
  static Instruction atom(std::string_view token, const Scope& scope, Reads* reads);
  static int64_t apply(Op op, int64_t a, int64_t b);
  int64_t run(const Situation& situation) const;

  std::vector<Instruction> code_;
};

}  // namespace onnxfuse
