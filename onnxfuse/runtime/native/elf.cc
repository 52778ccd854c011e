#include "elf.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace onnxfuse {
namespace {

// ELF64: sizes of the header, of an entry of the section table, of the program table and of a symbol table.
constexpr uint64_t kHeader = 64, kSection = 64, kSegment = 56, kSymbol = 24;
constexpr unsigned kBits64 = 2, kLittleEndian = 1, kCuda = 190;
constexpr uint32_t kSymbolTable = 2, kStringTable = 3, kNoBits = 8;

template <class Number>
Number read(std::string_view bytes, uint64_t at) {
  Number out;
  std::memcpy(&out, bytes.data() + at, sizeof out);
  return out;
}

// A file whose header lies within the bytes.
class Elf {
 public:
  explicit Elf(std::string_view bytes) : bytes_(bytes), size_(bytes.size() + 1) {}

  std::string fault() const {
    if (!table(section_table_, sections_, kSection, section_size_)) return "its section table does not lie within it";
    if (!table(segment_table_, segments_, kSegment, segment_size_)) return "its program table does not lie within it";
    if (names_ >= sections_) return "its section table has no names";
    for (uint64_t index = 0; index < sections_; ++index) {
      if (std::string fault = section_fault(index); !fault.empty()) return "section " + std::to_string(index) + fault;
    }
    for (uint64_t index = 0; index < segments_; ++index) {
      const uint64_t at = segment_table_ + index * kSegment;
      if (!within(number<uint64_t>(at + 8), number<uint64_t>(at + 32))) {
        return "segment " + std::to_string(index) + " does not lie within it";
      }
    }
    return "";
  }

 private:
  struct Section {
    uint32_t name, type, link;
    uint64_t offset, size;
  };

  // Number at a place that is known to lie within; the byte that may be missing is a zero.
  template <class Number>
  Number number(uint64_t at) const {
    if (at + sizeof(Number) <= bytes_.size()) return read<Number>(bytes_, at);
    std::string last(bytes_.substr(at));
    last += '\0';
    return read<Number>(last, 0);
  }
  bool within(uint64_t offset, uint64_t size) const { return offset <= size_ && size <= size_ - offset; }
  bool table(uint64_t offset, uint64_t count, uint64_t wanted, uint64_t size) const {
    return within(offset, count * wanted) && (count == 0 || size == wanted);
  }
  Section section(uint64_t index) const {
    const uint64_t at = section_table_ + index * kSection;
    return {number<uint32_t>(at), number<uint32_t>(at + 4), number<uint32_t>(at + 40), number<uint64_t>(at + 24),
            number<uint64_t>(at + 32)};
  }
  // Whether a name starts in a table of names and ends there.
  bool named(const Section& names, uint64_t name) const { return name < names.size; }

  std::string section_fault(uint64_t index) const {
    const Section found = section(index);
    if (index == names_ && found.type != kStringTable) return " should hold the names of sections";
    if (found.type == 0) return "";  // unused; the first one always is
    if (found.type != kNoBits && !within(found.offset, found.size)) return " does not lie within it";
    if (found.link >= sections_) return " refers to a section that it does not have";
    if (!named(section(names_), found.name)) return " has its name outside the table of names";
    if (found.type == kStringTable && found.size > 0 && number<char>(found.offset + found.size - 1) != '\0') {
      return " has a name without end";
    }
    return found.type == kSymbolTable ? symbols_fault(found) : "";
  }

  std::string symbols_fault(const Section& symbols) const {
    const Section names = section(symbols.link);
    if (names.type != kStringTable || symbols.size % kSymbol != 0) return " is no table of symbols";
    for (uint64_t at = 0; at < symbols.size; at += kSymbol) {
      if (!named(names, number<uint32_t>(symbols.offset + at))) return " has a symbol without a name";
    }
    return "";
  }

  const std::string_view bytes_;
  const uint64_t size_;  // with the zero that follows
  const uint64_t segment_table_ = read<uint64_t>(bytes_, 32), section_table_ = read<uint64_t>(bytes_, 40);
  const uint64_t segment_size_ = read<uint16_t>(bytes_, 54), segments_ = read<uint16_t>(bytes_, 56);
  const uint64_t section_size_ = read<uint16_t>(bytes_, 58), sections_ = read<uint16_t>(bytes_, 60);
  const uint64_t names_ = read<uint16_t>(bytes_, 62);
};

}  // namespace

std::string image_fault(std::string_view bytes) {
  if (bytes.size() < kHeader) return "it has " + std::to_string(bytes.size()) + " bytes, fewer than a header";
  if (bytes.substr(0, 4) != "\x7f" "ELF") return "it is no ELF file";
  const auto bits = static_cast<unsigned char>(bytes[4]), order = static_cast<unsigned char>(bytes[5]);
  if (bits != kBits64 || order != kLittleEndian) return "it is no ELF file of 64 bits";
  const unsigned machine = read<uint16_t>(bytes, 18);
  if (machine != kCuda) return "it is for the machine " + std::to_string(machine) + ", not for NVIDIA GPUs";
  return Elf(bytes).fault();
}

std::string ptx_fault(std::string_view text) {
  if (text.find('\0') != std::string_view::npos) return "it has a zero byte";
  for (size_t at = 0; (at = text.find_first_not_of(" \t\r\n", at)) != std::string_view::npos;) {
    if (text.substr(at, 2) != "//") {
      if (text.substr(at, 9) == ".version ") return "";
      break;
    }
    at = std::min(text.find('\n', at), text.size());
  }
  return "it does not begin with the directive .version";
}

}  // namespace onnxfuse
