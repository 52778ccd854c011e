#include "json.h"

#include <cstdio>

#include "ort_api.h"
#include "texts.h"

namespace onnxfuse {

class JsonReader {
 public:
  explicit JsonReader(std::string_view text) : text_(text) {}

  Json document() {
    Json value = read(0);
    skip();
    if (at_ != text_.size()) fail("unexpected text after the value");
    return value;
  }

 private:
  [[noreturn]] void fail(const char* what) const {
    throw Error("not JSON: " + std::string(what) + " at byte " + std::to_string(at_));
  }
  int peek() const { return at_ < text_.size() ? static_cast<unsigned char>(text_[at_]) : -1; }
  void skip() {
    while (peek() == ' ' || peek() == '\t' || peek() == '\n' || peek() == '\r') ++at_;
  }
  bool take(char wanted) {
    skip();
    if (peek() != wanted) return false;
    ++at_;
    return true;
  }
  void need(char wanted, const char* what) {
    if (!take(wanted)) fail(what);
  }
  bool word(std::string_view wanted) {
    if (text_.substr(at_, wanted.size()) != wanted) return false;
    at_ += wanted.size();
    return true;
  }

  Json read(int depth) {
    if (depth > Json::kMostDepth) fail("nested too deep");
    if (++values_ > Json::kMostValues) fail("too many values");
    skip();
    Json value;
    switch (peek()) {
      case '"':
        value.kind_ = Json::Kind::kText;
        value.text_ = string();
        return value;
      case '[':
        ++at_;
        value.kind_ = Json::Kind::kList;
        if (take(']')) return value;
        do value.list_.push_back(read(depth + 1));
        while (take(','));
        need(']', "',' or ']' expected");
        return value;
      case '{':
        ++at_;
        value.kind_ = Json::Kind::kObject;
        if (take('}')) return value;
        do {
          skip();
          if (peek() != '"') fail("a key expected");
          std::string key = string();
          if (value.members_.size() == Json::kMostKeys) fail("too many keys in an object");
          if (value.find(key) != nullptr) fail("a key is repeated");
          need(':', "':' expected");
          value.members_.emplace_back(std::move(key), read(depth + 1));
        } while (take(','));
        need('}', "',' or '}' expected");
        return value;
      default:
        break;
    }
    if (word("null")) return value;
    if (word("true") || word("false")) {
      value.kind_ = Json::Kind::kBoolean;
      value.integer_ = text_[at_ - 2] == 'u';  // "true" and "false" differ there
      return value;
    }
    value.kind_ = Json::Kind::kInteger;
    value.integer_ = number();
    return value;
  }

  int64_t number() {
    const bool negative = peek() == '-';
    if (negative) ++at_;
    if (peek() < '0' || peek() > '9') fail("a value expected");
    const bool zero = peek() == '0';
    int64_t value = 0;
    for (int digits = 0; peek() >= '0' && peek() <= '9'; ++at_, ++digits) {
      if (zero && digits == 1) fail("a number starts with zero");
      const int digit = peek() - '0';
      if (__builtin_mul_overflow(value, 10, &value) ||
          __builtin_sub_overflow(value, digit, &value)) {  // downwards, so that the smallest integer fits
        fail("an integer past 64 bits");
      }
    }
    if (peek() == '.' || peek() == 'e' || peek() == 'E') fail("a number that is no integer");
    if (!negative && __builtin_sub_overflow(int64_t{0}, value, &value)) fail("an integer past 64 bits");
    return value;
  }

  unsigned hex() {
    unsigned code = 0;
    for (int i = 0; i < 4; ++i, ++at_) {
      const int c = peek();
      if (c >= '0' && c <= '9') code = code * 16 + (c - '0');
      else if (c >= 'a' && c <= 'f') code = code * 16 + (c - 'a' + 10);
      else if (c >= 'A' && c <= 'F') code = code * 16 + (c - 'A' + 10);
      else fail("four hexadecimal digits expected");
    }
    return code;
  }

  std::string string() {
    std::string out;
    ++at_;
    for (;;) {
      const int c = peek();
      if (c < 0) fail("a string without end");
      if (c < 0x20) fail("a control character in a string");
      if (c == '"') return ++at_, out;
      if (c != '\\') {
        unsigned code = 0;
        const size_t size = character(text_, at_, &code);
        if (size == 0) fail("a byte that is no UTF-8");
        out += text_.substr(at_, size);
        at_ += size;
        continue;
      }
      ++at_;
      const int escape = peek();
      ++at_;
      switch (escape) {
        case '"': case '\\': case '/': out += static_cast<char>(escape); break;
        case 'b': out += '\b'; break;
        case 'f': out += '\f'; break;
        case 'n': out += '\n'; break;
        case 'r': out += '\r'; break;
        case 't': out += '\t'; break;
        case 'u': {
          unsigned code = hex();
          if (code >= 0xDC00 && code < 0xE000) fail("a lone surrogate");
          if (code >= 0xD800 && code < 0xDC00) {
            if (!word("\\u")) fail("a lone surrogate");
            const unsigned low = hex();
            if (low < 0xDC00 || low > 0xDFFF) fail("a lone surrogate");
            code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
          }
          utf8(code, &out);
          break;
        }
        default: fail("an unknown escape");
      }
    }
  }

  static void utf8(unsigned code, std::string* out) {
    const auto tail = [&](int shift) { *out += static_cast<char>(0x80 | ((code >> shift) & 0x3F)); };
    if (code < 0x80) {
      *out += static_cast<char>(code);
    } else if (code < 0x800) {
      *out += static_cast<char>(0xC0 | (code >> 6));
      tail(0);
    } else if (code < 0x10000) {
      *out += static_cast<char>(0xE0 | (code >> 12));
      tail(6), tail(0);
    } else {
      *out += static_cast<char>(0xF0 | (code >> 18));
      tail(12), tail(6), tail(0);
    }
  }

  std::string_view text_;
  size_t at_ = 0, values_ = 0;
};

Json Json::parse(std::string_view text) { return JsonReader(text).document(); }

int64_t Json::integer(const char* what) const {
  if (kind_ != Kind::kInteger) throw Error(std::string(what) + " is no integer");
  return integer_;
}

const std::string& Json::text(const char* what) const {
  if (kind_ != Kind::kText) throw Error(std::string(what) + " is no string");
  return text_;
}

bool Json::boolean(const char* what) const {
  if (kind_ != Kind::kBoolean) throw Error(std::string(what) + " is neither true nor false");
  return integer_ != 0;
}

const std::vector<Json>& Json::list(const char* what) const {
  if (kind_ != Kind::kList) throw Error(std::string(what) + " is no list");
  return list_;
}

const Json* Json::find(std::string_view key) const {
  for (const auto& [name, value] : members_) {
    if (name == key) return &value;
  }
  return nullptr;
}

const Json& Json::member(const char* key) const {
  const Json* value = find(key);
  if (value == nullptr) throw Error(std::string("'") + key + "' is missing");
  return *value;
}

std::vector<int64_t> Json::integers(const char* what) const {
  std::vector<int64_t> out;
  for (const Json& item : list(what)) out.push_back(item.integer(what));
  return out;
}

std::string Json::dump() const {
  std::string out;
  switch (kind_) {
    case Kind::kNull: return "null";
    case Kind::kBoolean: return integer_ ? "true" : "false";
    case Kind::kInteger: return std::to_string(integer_);
    case Kind::kText: return quoted(text_);
    case Kind::kList:
      for (const Json& item : list_) out += (out.empty() ? "" : ",") + item.dump();
      return "[" + out + "]";
    case Kind::kObject:
      for (const auto& [key, value] : members_) out += (out.empty() ? "" : ",") + quoted(key) + ":" + value.dump();
      return "{" + out + "}";
  }
  return out;
}

std::string quoted(std::string_view text) {
  std::string out = "\"";
  for (const char c : readable(text)) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", c);
      out += escape;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

}  // namespace onnxfuse
