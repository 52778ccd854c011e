#include "tensor_map.h"

#include <cstring>
#include <string>
#include <utility>

#include "ort_api.h"
#include "reading.h"
#include "texts.h"

namespace onnxfuse {
namespace {

constexpr int64_t kMostBox = 256, kMostElementStride = 8;
constexpr int64_t kMostSize = int64_t{1} << 31, kPastStride = int64_t{1} << 40;
constexpr size_t kFirstPlaces = 8, kMostPlaces = 1024;

// By their numbers, as the driver counts them (CUtensorMapDataType).
constexpr struct {
  std::string_view name;
  uint32_t bytes;
  bool floating;
} kTypes[] = {
    {"uint8", 1, false}, {"uint16", 2, false}, {"uint32", 4, false}, {"int32", 4, false}, {"uint64", 8, false},
    {"int64", 8, false}, {"float16", 2, true}, {"float32", 4, true}, {"float64", 8, true}, {"bfloat16", 2, true},
    {"float32_ftz", 4, true}, {"tfloat32", 4, true}, {"tfloat32_ftz", 4, true},
};
// Bytes that stand for the driver's numbers 0, 1 and so on.
constexpr int64_t kInterleaves[] = {0, 16, 32}, kSwizzles[] = {0, 32, 64, 128}, kPromotions[] = {0, 64, 128, 256};
constexpr std::string_view kFills[] = {"zero", "nan"};

[[noreturn]] void wrong(const std::string& what) { throw Error("a tensor map of the launch plan " + what); }

template <class Values, class Value>
int number_of(const Values& values, const Value& value, const std::string& shown, const char* key) {
  int number = 0;
  for (const auto& each : values) {
    if (each == value) return number;
    ++number;
  }
  wrong("has '" + std::string(key) + "' " + shown);
}

int bytes_of(const Json& json, const char* key, const int64_t* first, size_t count) {
  const int64_t value = json.member(key).integer(key);
  const std::vector<int64_t> values(first, first + count);
  return number_of(values, value, std::to_string(value), key);
}

void integers(const Json& json, const char* key, uint32_t rank, int64_t most, uint32_t* out) {
  const std::vector<int64_t> values = json.member(key).integers(key);
  if (values.size() != rank) {
    wrong("has " + std::to_string(values.size()) + " of '" + key + "' for " + std::to_string(rank) + " sizes");
  }
  for (size_t axis = 0; axis < rank; ++axis) {
    if (values[axis] < 1 || values[axis] > most) {
      wrong("has " + std::to_string(values[axis]) + " in '" + key + "'; it is 1 to " + std::to_string(most));
    }
    out[axis] = static_cast<uint32_t>(values[axis]);
  }
}

void check_layout(const TensorMap& map, int64_t interleave, int64_t swizzle) {
  if (interleave != 0 && map.rank < 3) wrong("with 'interleave' has fewer than 3 sizes");
  if (interleave == 32 && swizzle != 32) wrong("with 'interleave' 32 has no 'swizzle' 32");
  const uint32_t row = map.box[0] * kTypes[map.type].bytes;
  if (interleave == 0 && row % 16 != 0) {
    wrong("has a box of " + std::to_string(row) + " bytes along its first axis, no multiple of 16");
  }
  if (interleave == 0 && swizzle != 0 && row > swizzle) {
    wrong("has a box of " + std::to_string(row) + " bytes along its first axis, more than its 'swizzle' " +
          std::to_string(swizzle));
  }
  if (map.fill != 0 && !kTypes[map.type].floating) wrong("of integers has 'fill' nan");
}

}  // namespace

TensorMap TensorMap::parse(const Json& json, const Named& named, Reads* reads) {
  TensorMap out;
  const std::string& base = words(json.member("base"), "'base'");
  out.base = parse_argument(base, named, reads);
  if (!out.base.address()) wrong("has the base '" + excerpt(base) + "', which is no address");
  const std::string& type = words(json.member("type"), "'type'");
  std::vector<std::string_view> types;
  for (const auto& each : kTypes) types.push_back(each.name);
  out.type = number_of(types, type, excerpt(type), "type");
  const std::vector<Json>& sizes = json.member("sizes").list("'sizes'");
  if (sizes.empty() || sizes.size() > kMostRank) wrong("has " + std::to_string(sizes.size()) + " sizes; 1 to 5");
  out.rank = static_cast<uint32_t>(sizes.size());
  const std::vector<Json>& strides = json.member("strides").list("'strides'");
  if (strides.size() != out.rank - 1) {
    wrong("has " + std::to_string(strides.size()) + " strides for " + std::to_string(out.rank) + " sizes");
  }
  for (size_t axis = 0; axis < out.rank; ++axis) {
    out.sizes[axis] = Expression(sizes[axis].text("'sizes'"), named.scope, reads);
    if (axis > 0) out.strides[axis - 1] = Expression(strides[axis - 1].text("'strides'"), named.scope, reads);
  }
  integers(json, "box", out.rank, kMostBox, out.box);
  integers(json, "element_strides", out.rank, kMostElementStride, out.element_strides);
  out.interleave = bytes_of(json, "interleave", kInterleaves, std::size(kInterleaves));
  out.swizzle = bytes_of(json, "swizzle", kSwizzles, std::size(kSwizzles));
  out.promotion = bytes_of(json, "promotion", kPromotions, std::size(kPromotions));
  const std::string& fill = words(json.member("fill"), "'fill'");
  out.fill = number_of(kFills, fill, excerpt(fill), "fill");
  check_layout(out, kInterleaves[out.interleave], kSwizzles[out.swizzle]);
  out.alignment = kInterleaves[out.interleave] == 32 ? 32 : 16;
  return out;
}

TensorSizes TensorSizes::of(const TensorMap& map, const Situation& situation) {
  TensorSizes out;
  for (size_t axis = 0; axis < map.rank; ++axis) {
    const int64_t size = map.sizes[axis].evaluate(situation);
    if (size < 1 || size > kMostSize) {
      wrong("has the size " + std::to_string(size) + " along axis " + std::to_string(axis));
    }
    out.sizes[axis] = static_cast<uint64_t>(size);
    if (axis == 0) continue;
    const int64_t stride = map.strides[axis - 1].evaluate(situation);
    if (stride < 0 || stride >= kPastStride || stride % map.alignment != 0) {
      wrong("has a stride of " + std::to_string(stride) + " bytes along axis " + std::to_string(axis) +
            ", no multiple of " + std::to_string(map.alignment) + " below 2^40");
    }
    out.strides[axis - 1] = static_cast<uint64_t>(stride);
  }
  return out;
}

void BuiltMaps::resize(const TensorSizes& sizes) {
  if (std::memcmp(&sizes, &sizes_, sizeof sizes) == 0) return;
  sizes_ = sizes;
  addresses_.assign(addresses_.size(), 0);
  used_ = 0;
}

// Where the address is, or the free place that it would have.
size_t BuiltMaps::place(uint64_t address) const {
  const size_t mask = addresses_.size() - 1;
  size_t at = (address * 0x9E3779B97F4A7C15u) >> 32 & mask;
  while (addresses_[at] != 0 && addresses_[at] != address) at = (at + 1) & mask;
  return at;
}

void BuiltMaps::grow() {
  if (addresses_.size() >= kMostPlaces) {  // addresses that no run has again
    addresses_.assign(addresses_.size(), 0);
    used_ = 0;
    return;
  }
  const size_t count = addresses_.empty() ? kFirstPlaces : 2 * addresses_.size();
  std::vector<Bytes> more_maps(count);
  std::vector<uint64_t> more(count);
  more.swap(addresses_);
  more_maps.swap(maps_);
  for (size_t at = 0; at < more.size(); ++at) {
    if (more[at] == 0) continue;
    const size_t to = place(more[at]);
    addresses_[to] = more[at];
    maps_[to] = more_maps[at];
  }
}

void* BuiltMaps::at(uint64_t address, const TensorMap& map, const Driver& driver) {
  if (!addresses_.empty()) {
    const size_t known = place(address);
    if (addresses_[known] == address && address != 0) return &maps_[known];
  }
  if (address == 0) wrong("is of a tensor that is absent");
  if (address % map.alignment != 0) {
    wrong("is of a tensor whose address is no multiple of " + std::to_string(map.alignment));
  }
  if (2 * (used_ + 1) > addresses_.size()) grow();
  const size_t free = place(address);
  driver.check(driver.encode_tiled(&maps_[free], map.type, map.rank, reinterpret_cast<void*>(address), sizes_.sizes,
                                   sizes_.strides, map.box, map.element_strides, map.interleave, map.swizzle,
                                   map.promotion, map.fill),
               "build a tensor map of the launch plan");
  addresses_[free] = address;
  ++used_;
  return &maps_[free];
}

}  // namespace onnxfuse
