#include "argument.h"

#include "ort_api.h"
#include "texts.h"

namespace onnxfuse {

Argument parse_argument(const std::string& text, const Named& named, Reads* reads) {
  Argument out{};
  if (text.rfind("i32:", 0) == 0 || text.rfind("i64:", 0) == 0) {
    out.kind = text[1] == '3' ? Argument::Kind::kInt32 : Argument::Kind::kInt64;
    out.value = Expression(std::string_view(text).substr(4), named.scope, reads);
    return out;
  }
  size_t limit = 0;
  switch (text.empty() ? ' ' : text[0]) {
    case 'i': out.kind = Argument::Kind::kInput, limit = named.scope.inputs; break;
    case 'o': out.kind = Argument::Kind::kOutput, limit = named.scope.outputs; break;
    case 't': out.kind = Argument::Kind::kScratch, limit = named.scratch; break;
    case 'm': out.kind = Argument::Kind::kMap, limit = named.maps; break;
    default: break;
  }
  size_t number = 0;
  bool digits = text.size() > 1 && text.size() < 8;
  for (size_t at = 1; digits && at < text.size(); ++at) {
    digits = text[at] >= '0' && text[at] <= '9';
    number = number * 10 + static_cast<size_t>(text[at] - '0');
  }
  if (!digits || number >= limit) {
    throw Error("unknown argument '" + excerpt(text) + "' of a kernel in the launch plan");
  }
  out.index = static_cast<uint32_t>(number);
  return out;
}

uint64_t integer_argument(const Argument& argument, const Situation& situation) {
  const int64_t value = argument.value.evaluate(situation);
  if (argument.kind == Argument::Kind::kInt32 && value != static_cast<int32_t>(value)) {
    throw Error("a 32-bit argument of a kernel is " + std::to_string(value));
  }
  return static_cast<uint64_t>(value);
}

}  // namespace onnxfuse
