// Machine code of a GPU, as far as it can be told without running it.
#pragma once

#include <string>
#include <string_view>

namespace onnxfuse {

// Why the bytes are no ELF file for GPUs whose tables, sections and names all lie within it; "" where they are.  The
// driver is given an address and no size, and follows what stands in the file.
//
// The last byte may be missing where a zero stands there: CuPy drops it, and what the driver is given ends with one.
std::string image_fault(std::string_view bytes);

}  // namespace onnxfuse
