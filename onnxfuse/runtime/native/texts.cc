#include "texts.h"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <new>

#include "ort_api.h"

namespace onnxfuse {
namespace {

// First and last of each range of characters that show nothing, in order: Unicode's controls, formats (bidirectional
// overrides among them), separators of lines and paragraphs, and those for private use.
constexpr unsigned kHidden[][2] = {
    {0x0, 0x1F}, {0x7F, 0x9F}, {0xAD, 0xAD}, {0x600, 0x605}, {0x61C, 0x61C}, {0x6DD, 0x6DD}, {0x70F, 0x70F},
    {0x890, 0x891}, {0x8E2, 0x8E2}, {0x180E, 0x180E}, {0x200B, 0x200F}, {0x2028, 0x202E}, {0x2060, 0x206F},
    {0xE000, 0xF8FF}, {0xFEFF, 0xFEFF}, {0xFFF9, 0xFFFB}, {0x110BD, 0x110BD}, {0x110CD, 0x110CD}, {0x13430, 0x1343F},
    {0x1BCA0, 0x1BCA3}, {0x1D173, 0x1D17A}, {0xE0001, 0xE0001}, {0xE0020, 0xE007F}, {0xF0000, 0x10FFFF},
};

bool hidden(unsigned code) {
  const auto* const found = std::lower_bound(std::begin(kHidden), std::end(kHidden), code,
                                             [](const unsigned(&range)[2], unsigned wanted) { return range[1] < wanted; });
  return found != std::end(kHidden) && (*found)[0] <= code;
}

std::string escaped(unsigned code) {
  switch (code) {
    case '\n': return "\\n";
    case '\r': return "\\r";
    case '\t': return "\\t";
  }
  char out[16];
  std::snprintf(out, sizeof out, code < 0x100 ? "\\x%02x" : code < 0x10000 ? "\\u%04x" : "\\U%08x", code);
  return out;
}

std::string shown(std::string_view text, bool lines) {
  std::string out;
  for (size_t at = 0, size = 0; at < text.size(); at += size) {
    unsigned code = 0;
    size = character(text, at, &code);
    if (size == 0) {
      size = 1;
      out += escaped(static_cast<unsigned char>(text[at]));
    } else if (hidden(code) && !(lines && (code == '\n' || code == '\t'))) {
      out += escaped(code);
    } else {
      out += text.substr(at, size);
    }
  }
  return out;
}

}  // namespace

size_t character(std::string_view text, size_t at, unsigned* code) {
  const auto byte = [&](size_t offset) -> unsigned {
    return at + offset < text.size() ? static_cast<unsigned char>(text[at + offset]) : 0;
  };
  const unsigned first = byte(0);
  if (first < 0x80) return *code = first, 1;
  const size_t size = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  *code = first & (0x7F >> size);
  for (size_t offset = 1; offset < size; ++offset) {
    if ((byte(offset) & 0xC0) != 0x80) return 0;
    *code = *code << 6 | (byte(offset) & 0x3F);
  }
  const unsigned least[] = {0, 0, 0x80, 0x800, 0x10000};  // what fewer bytes could not say
  const bool surrogate = *code >= 0xD800 && *code < 0xE000;
  return first < 0xC0 || first > 0xF4 || *code < least[size] || *code > 0x10FFFF || surrogate ? 0 : size;
}

std::string readable(std::string_view text) {
  std::string out;
  unsigned code = 0;
  for (size_t at = 0, size = 0; at < text.size(); at += std::max<size_t>(size, 1)) {
    size = character(text, at, &code);
    if (size > 0) out += text.substr(at, size);
    else out += "\xEF\xBF\xBD";
  }
  return out;
}

std::string visible(std::string_view text) { return shown(text, false); }

std::string visible_lines(std::string_view text) { return shown(text, true); }

std::string excerpt(std::string_view text) {
  constexpr size_t kMost = 200;
  size_t end = text.size();
  if (end <= kMost) return visible(text);
  for (end = kMost; end > 0 && (text[end] & 0xC0) == 0x80; --end) {
  }
  return visible(text.substr(0, end)) + "...";
}

void say(std::string_view message) noexcept {
  try {
    std::fprintf(stderr, "onnxfuse: %s\n", visible_lines(message).c_str());
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "%s\n", kNoMemory);
  }
}

}  // namespace onnxfuse
