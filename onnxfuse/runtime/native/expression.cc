#include "expression.h"

#include <algorithm>
#include <charconv>

#include "ort_api.h"
#include "texts.h"

namespace onnxfuse {
namespace {

constexpr int kStack = 64;
constexpr size_t kMostLetters = 1 << 16;  // of an expression
// Elements of a host input, and axes of a tensor, that an expression may name.
constexpr size_t kMostElements = 1 << 16, kMostNamedAxes = 1 << 10;

[[noreturn]] void overflow() { throw Error("a size of the launch plan leaves 64 bits"); }

int64_t add(int64_t a, int64_t b) {
  int64_t out;
  if (__builtin_add_overflow(a, b, &out)) overflow();
  return out;
}

int64_t subtract(int64_t a, int64_t b) {
  int64_t out;
  if (__builtin_sub_overflow(a, b, &out)) overflow();
  return out;
}

int64_t multiply(int64_t a, int64_t b) {
  int64_t out;
  if (__builtin_mul_overflow(a, b, &out)) overflow();
  return out;
}

// Quotient rounded down, and what is left; a division by zero gives 0.
int64_t floor_divide(int64_t a, int64_t b) {
  if (b == 0) return 0;
  if (b == -1) return subtract(0, a);
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}

int64_t floor_modulo(int64_t a, int64_t b) {
  if (b == 0 || b == -1) return 0;
  const int64_t rest = a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

int64_t ceil_divide(int64_t a, int64_t b) {
  if (b == 0) return 0;
  return floor_divide(a, b) + (floor_modulo(a, b) != 0);
}

bool integer(std::string_view text, int64_t* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  if (error == std::errc::result_out_of_range) overflow();
  return error == std::errc() && end == text.data() + text.size();
}

bool index(std::string_view text, size_t limit, uint32_t* value) {
  int64_t number = -1;
  if (text.empty() || text[0] == '-' || !integer(text, &number) || static_cast<uint64_t>(number) >= limit) return false;
  *value = static_cast<uint32_t>(number);
  return true;
}

}  // namespace

int64_t elements(const TensorView& input) {
  if (std::find(input.sizes, input.sizes + input.rank, 0) != input.sizes + input.rank) return 0;
  int64_t count = 1;
  for (size_t axis = 0; axis < input.rank; ++axis) count = multiply(count, input.sizes[axis]);
  return count;
}

Expression::Instruction Expression::atom(std::string_view token, const Scope& scope, Reads* reads) {
  Instruction out{Op::kConstant, 0, 0};
  const auto bad = [&]() -> Instruction {
    throw Error("unknown atom '" + excerpt(token) + "' in an expression of the launch plan");
  };
  if (integer(token, &out.value)) return out;
  if (token == "sm") return {Op::kCapability, 0, 0};
  if (token == "sms") return {Op::kMultiprocessors, 0, 0};
  const size_t dot = token.find('.');
  const std::string_view number = token.substr(1, dot == token.npos ? token.npos : dot - 1);
  if (dot == token.npos) {
    if (token[0] != 's' || !index(number, scope.symbols, &out.index)) return bad();
    out.op = Op::kSymbol;
    return out;
  }
  const std::string_view part = token.substr(dot + 1);
  uint32_t axis = 0;
  if (token[0] == 'o') {
    const bool whole = part == "at";
    if ((part != "addr" && !whole) || !index(number, scope.outputs, &out.index)) return bad();
    out.op = whole ? Op::kOutputPlace : Op::kOutputAddress;
    reads->addresses = true;
    reads->places |= whole;
    return out;
  }
  if (token[0] == 'h') {
    if (!index(number, kHostInputs, &out.index)) return bad();
    if (part == "n") out.op = Op::kHostCount;
    else if (index(part, kMostElements, &axis)) out.op = Op::kHostElement;
    else return bad();
    out.value = axis;
    reads->host[out.index] = true;
    if (part != "n") reads->hosts[out.index] = std::max<int64_t>(reads->hosts[out.index], int64_t{axis} + 1);
    return out;
  }
  if (token[0] != 'i' || !index(number, scope.inputs, &out.index)) return bad();
  if (part == "addr" || part == "at") {
    const bool whole = part == "at";
    out.op = whole ? Op::kInputPlace : Op::kInputAddress;
    reads->addresses = true;
    reads->places |= whole;
    return out;
  }
  if (part == "n") out.op = Op::kInputCount;
  else if (index(part, kMostNamedAxes, &axis)) out.op = Op::kInputSize;
  else return bad();
  out.value = axis;
  reads->sizes[out.index] = true;
  return out;
}

Expression::Expression(std::string_view text, const Scope& scope, Reads* reads) {
  static constexpr struct {
    std::string_view name;
    Op op;
  } kOperators[] = {
      {"+", Op::kAdd}, {"-", Op::kSubtract}, {"*", Op::kMultiply}, {"//", Op::kFloorDivide}, {"%", Op::kModulo},
      {"min", Op::kMinimum}, {"max", Op::kMaximum}, {"==", Op::kEqual}, {"!=", Op::kUnequal}, {"<", Op::kLess},
      {"<=", Op::kLessEqual}, {"and", Op::kAnd}, {"or", Op::kOr}, {"not", Op::kNot}, {"ceil", Op::kCeilDivide},
      {"bcast", Op::kBroadcast}, {"sel", Op::kSelect},
  };
  const auto bad = [&](const char* why) {
    throw Error("the expression '" + excerpt(text) + "' of the launch plan " + why);
  };
  if (text.size() > kMostLetters) bad("is too long");
  int depth = 0;
  for (size_t at = 0; (at = text.find_first_not_of(' ', at)) != text.npos;) {
    const size_t end = std::min(text.find(' ', at), text.size());
    const std::string_view token = text.substr(at, end - at);
    at = end;
    const auto* found = std::find_if(std::begin(kOperators), std::end(kOperators),
                                     [&](const auto& entry) { return entry.name == token; });
    int taken = 0;
    if (found == std::end(kOperators)) {
      code_.push_back(atom(token, scope, reads));
    } else {
      code_.push_back({found->op, 0, 0});
      taken = found->op == Op::kNot ? 1 : found->op == Op::kSelect ? 3 : 2;
    }
    if (depth < taken) bad("lacks an operand");
    depth += 1 - taken;
    if (depth > kStack) bad("is nested too deep");
    // Constant operands fold at once, so that most sizes are one instruction when they run.
    if (taken == 2 && code_[code_.size() - 2].op == Op::kConstant && code_[code_.size() - 3].op == Op::kConstant) {
      const int64_t value = apply(found->op, code_[code_.size() - 3].value, code_[code_.size() - 2].value);
      code_.resize(code_.size() - 2);
      code_.back() = {Op::kConstant, 0, value};
    }
  }
  if (depth != 1) bad("leaves no single value");
}

bool Expression::fixed() const {
  return std::all_of(code_.begin(), code_.end(), [](const Instruction& instruction) {
    return instruction.op == Op::kConstant || instruction.op >= Op::kCapability;
  });
}

bool Expression::constant(int64_t* out) const {
  if (code_.size() != 1 || code_[0].op != Op::kConstant) return false;
  *out = code_[0].value;
  return true;
}

bool Expression::axis(const std::vector<Expression>& symbols, AxisOf* out) const {
  const Expression* named = this;  // a symbol may name the one before, and so on: no recursion
  while (named->code_.size() == 1 && named->code_[0].op == Op::kSymbol) named = &symbols[named->code_[0].index];
  if (named->code_.size() != 1 || named->code_[0].op != Op::kInputSize) return false;
  *out = {named->code_[0].index, static_cast<size_t>(named->code_[0].value)};
  return true;
}

bool Expression::alignment(Alignment* out) const {
  if (code_.size() != 5 || code_[1].op != Op::kConstant || code_[2].op != Op::kModulo ||
      code_[3].op != Op::kConstant || code_[3].value != 0 || code_[4].op != Op::kEqual) {
    return false;
  }
  const Op address = code_[0].op;
  const int64_t size = code_[1].value;  // addresses are known modulo 256
  if ((address != Op::kInputAddress && address != Op::kOutputAddress) || size < 1 || size > 256 ||
      (size & (size - 1)) != 0) {
    return false;
  }
  *out = {address == Op::kOutputAddress, code_[0].index, static_cast<uint64_t>(size - 1)};
  return true;
}

int64_t Expression::apply(Op op, int64_t a, int64_t b) {
  switch (op) {
    case Op::kAdd: return add(a, b);
    case Op::kSubtract: return subtract(a, b);
    case Op::kMultiply: return multiply(a, b);
    case Op::kFloorDivide: return floor_divide(a, b);
    case Op::kModulo: return floor_modulo(a, b);
    case Op::kCeilDivide: return ceil_divide(a, b);
    case Op::kMinimum: return std::min(a, b);
    case Op::kMaximum: return std::max(a, b);
    case Op::kEqual: return a == b;
    case Op::kUnequal: return a != b;
    case Op::kLess: return a < b;
    case Op::kLessEqual: return a <= b;
    case Op::kAnd: return a != 0 && b != 0;
    case Op::kOr: return a != 0 || b != 0;
    case Op::kBroadcast: return a == 1 ? b : a;
    default: throw Error("an operator of the launch plan takes no two operands");
  }
}

int64_t Expression::run(const Situation& situation) const {
  int64_t stack[kStack];
  int64_t* top = stack;  // one past the last value; the constructor checked the depth
  for (const Instruction& instruction : code_) {
    const uint32_t index = instruction.index;
    switch (instruction.op) {
      case Op::kConstant: *top++ = instruction.value; break;
      case Op::kSymbol: *top++ = situation.symbols[index]; break;
      case Op::kCapability: *top++ = situation.capability; break;
      case Op::kMultiprocessors: *top++ = situation.multiprocessors; break;
      case Op::kInputAddress: *top++ = static_cast<int64_t>(situation.inputs[index].address % 256); break;
      case Op::kOutputAddress:
        *top++ = situation.output_addresses ? static_cast<int64_t>(situation.output_addresses[index] % 256) : 0;
        break;
      case Op::kInputPlace: *top++ = static_cast<int64_t>(situation.inputs[index].address); break;
      case Op::kOutputPlace:
        *top++ = situation.output_addresses ? static_cast<int64_t>(situation.output_addresses[index]) : 0;
        break;
      case Op::kInputSize: {
        const TensorView& input = situation.inputs[index];
        if (!input.present) throw Error("tensor input " + std::to_string(index) + " is absent");
        if (static_cast<uint64_t>(instruction.value) >= input.rank) {
          throw Error("tensor input " + std::to_string(index) + " has " + std::to_string(input.rank) +
                      " axes; the launch plan reads axis " + std::to_string(instruction.value));
        }
        *top++ = input.sizes[instruction.value];
        break;
      }
      case Op::kInputCount: {
        const TensorView& input = situation.inputs[index];
        if (!input.present) throw Error("tensor input " + std::to_string(index) + " is absent");
        *top++ = elements(input);
        break;
      }
      case Op::kHostCount: *top++ = situation.hosts[index].count; break;
      case Op::kHostElement: {
        const HostView& host = situation.hosts[index];
        if (!host.present || instruction.value >= host.count) {
          throw Error("host input " + std::to_string(index) + " has " + std::to_string(host.count) +
                      " elements; the launch plan reads element " + std::to_string(instruction.value));
        }
        *top++ = host.wide ? static_cast<const int64_t*>(host.data)[instruction.value]
                           : static_cast<const int32_t*>(host.data)[instruction.value];
        break;
      }
      case Op::kNot: top[-1] = top[-1] == 0; break;
      case Op::kSelect:
        top -= 2;
        top[-1] = top[-1] != 0 ? top[0] : top[1];
        break;
      default:
        --top;
        top[-1] = apply(instruction.op, top[-1], top[0]);
        break;
    }
  }
  return stack[0];
}

}  // namespace onnxfuse
