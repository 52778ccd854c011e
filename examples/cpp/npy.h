// Arrays in NumPy's .npy files: those that np.save writes, in C's order.
#pragma once

#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace npy {

struct Array {
  ONNXTensorElementDataType type;
  std::vector<std::int64_t> shape;
  std::vector<char> bytes;
};

struct Type {
  const char* name;  // as NumPy spells it
  ONNXTensorElementDataType type;
  std::size_t size;
};

constexpr Type kTypes[] = {
    {"<f4", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, 4},   {"<f2", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, 2},
    {"<f8", ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE, 8},  {"<i8", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, 8},
    {"<i4", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, 4},   {"<i2", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16, 2},
    {"|i1", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, 1},    {"|u1", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8, 1},
    {"<u4", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT32, 4},  {"<u8", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT64, 8},
    {"<u2", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16, 2},  {"|b1", ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL, 1},
};

inline std::size_t elements(const std::vector<std::int64_t>& shape) {
  std::size_t count = 1;
  for (std::int64_t size : shape) count *= static_cast<std::size_t>(size);
  return count;
}

// What stands behind a key of the header, which is a Python dictionary: {'descr': '<f4', 'fortran_order': False,
// 'shape': (2, 3), }.
inline std::string behind(const std::string& header, const std::string& key, const char* end) {
  std::size_t start = header.find("'" + key + "': ");
  if (start == std::string::npos) throw std::runtime_error("no '" + key + "' in the header");
  start += key.size() + 4;
  return header.substr(start, header.find_first_of(end, start) - start);
}

inline Array read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string raw((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (!file || raw.size() < 12 || raw.compare(0, 6, "\x93NUMPY") != 0)
    throw std::runtime_error(path + ": missing, or no .npy file");
  const bool first = raw[6] == 1;  // the header's length has two bytes in the first version, four in later ones
  std::uint32_t length = 0;
  std::memcpy(&length, raw.data() + 8, first ? 2 : 4);
  const std::size_t start = (first ? 10 : 12) + std::size_t{length};
  const std::string header = raw.substr(first ? 10 : 12, length);
  if (behind(header, "fortran_order", ",}") != "False") throw std::runtime_error(path + ": not in C's order");

  Array array{};
  const std::string sizes = behind(header, "shape", ")");
  for (std::size_t at = 1; at < sizes.size();) {
    std::size_t used = 0;
    array.shape.push_back(std::stoll(sizes.substr(at), &used));
    at = sizes.find_first_of("0123456789", at + used);
  }
  const std::string name = behind(header, "descr", ",").substr(1, 3);
  for (const Type& type : kTypes) {
    if (name != type.name) continue;
    array.type = type.type;
    array.bytes.assign(raw.begin() + static_cast<std::ptrdiff_t>(std::min(start, raw.size())), raw.end());
    if (array.bytes.size() != elements(array.shape) * type.size) throw std::runtime_error(path + ": cut short");
    return array;
  }
  throw std::runtime_error(path + ": elements of type " + name);
}

inline void write(const std::string& path, ONNXTensorElementDataType type, const std::vector<std::int64_t>& shape,
                  const void* data) {
  for (const Type& known : kTypes) {
    if (known.type != type) continue;
    std::string sizes;
    for (std::int64_t size : shape) sizes += std::to_string(size) + ", ";
    std::string header =
        "{'descr': '" + std::string(known.name) + "', 'fortran_order': False, 'shape': (" + sizes + "), }";
    header.append(63 - (header.size() + 10) % 64, ' ');  // the data begins at a multiple of 64 bytes
    header += '\n';
    const char lengths[] = {static_cast<char>(header.size() & 255), static_cast<char>(header.size() >> 8)};
    std::ofstream file(path, std::ios::binary);
    file.write("\x93NUMPY\x01\x00", 8).write(lengths, 2) << header;
    file.write(static_cast<const char*>(data), static_cast<std::streamsize>(elements(shape) * known.size));
    if (!file.flush()) throw std::runtime_error(path + ": cannot be written");
    return;
  }
  throw std::runtime_error(path + ": no .npy file holds elements of type " + std::to_string(type));
}

}  // namespace npy
