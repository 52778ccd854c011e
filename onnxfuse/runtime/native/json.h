// A strict reader of JSON whose numbers are 64-bit integers, and the little that is needed to write it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace onnxfuse {

class Json {
 public:
  enum class Kind { kNull, kBoolean, kInteger, kText, kList, kObject };

  // Throws Error with the position where the text is no JSON: nesting past 64, a repeated key, a lone surrogate, a
  // number that is no 64-bit integer and bytes after the value are errors too.
  static Json parse(std::string_view text);

  // Each throws Error where the value is of another kind; `what` names the value in the message.
  int64_t integer(const char* what) const;
  const std::string& text(const char* what) const;
  const std::vector<Json>& list(const char* what) const;
  const Json& member(const char* key) const;
  const Json* find(std::string_view key) const;
  std::vector<std::string> texts(const char* what) const;
  std::vector<int64_t> integers(const char* what) const;

  std::string dump() const;

 private:
  friend class JsonReader;
  Kind kind_ = Kind::kNull;
  int64_t integer_ = 0;
  std::string text_;
  std::vector<Json> list_;
  std::vector<std::pair<std::string, Json>> members_;
};

// The text in quotes, with its quotes, backslashes and control characters escaped.
std::string quoted(std::string_view text);

}  // namespace onnxfuse
