// What a driver can be given as kernels, as far as it can be told without running it.
#pragma once

#include <string>
#include <string_view>

namespace onnxfuse {

// Why the bytes are no ELF file for GPUs whose tables, sections and names all lie within it; "" where they are.  The
// driver is given an address and no size, and follows what stands in the file.
//
// The last byte may be missing where a zero stands there: CuPy drops it, and what the driver is given ends with one.
std::string image_fault(std::string_view bytes);

// Why the bytes are no PTX, the text that a driver compiles for its GPU, as far as its first directive tells; "" where
// they are.  The driver is given an address and reads to the first zero, which here is the one behind the text.
std::string ptx_fault(std::string_view text);

}  // namespace onnxfuse
