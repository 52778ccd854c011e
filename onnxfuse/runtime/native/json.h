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

  // What a text may have.  A value takes some hundred bytes of memory, however short it is.
  static constexpr int kMostDepth = 64;
  static constexpr size_t kMostKeys = 64;  // of an object, which are looked through one by one
  static constexpr size_t kMostValues = 1 << 20;

  // Throws Error with the position where the text is no JSON, in time linear in its length: what is past the limits
  // above, a repeated key, a lone surrogate, bytes that are no UTF-8, a number that is no 64-bit integer and bytes
  // after the value are errors too.
  static Json parse(std::string_view text);

  // Each throws Error where the value is of another kind; `what` names the value in the message.
  int64_t integer(const char* what) const;
  bool boolean(const char* what) const;
  const std::string& text(const char* what) const;
  const std::vector<Json>& list(const char* what) const;
  const Json& member(const char* key) const;
  size_t members() const { return members_.size(); }
  const Json* find(std::string_view key) const;
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

// The text in quotes, with its quotes, backslashes and control characters escaped, and U+FFFD for what is no UTF-8.
std::string quoted(std::string_view text);

}  // namespace onnxfuse
