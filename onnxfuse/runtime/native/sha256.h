// SHA-256 (FIPS 180-4), for the names and checksums of cached kernels.
#pragma once

#include <string>
#include <string_view>

namespace onnxfuse {

// 64 lower-case hexadecimal digits.
std::string sha256(std::string_view bytes);

}  // namespace onnxfuse
