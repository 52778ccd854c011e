#include "launch.h"

namespace onnxfuse {
namespace {

// CUlaunchAttributeID
constexpr int kClusterDimension = 4, kProgrammaticStreamSerialization = 6;

// CUlaunchAttribute: an identifier, and 64 bytes for the value of any.
struct Attribute {
  int id = 0;
  char unused[4] = {};
  uint32_t value[16] = {};
};
static_assert(sizeof(Attribute) == 72);

// CUlaunchConfig
struct Configuration {
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t shared;
  Stream stream;
  const Attribute* attributes;
  uint32_t count;
};
static_assert(sizeof(Configuration) == 56 && offsetof(Configuration, stream) == 32);

Result launch_extended(const Driver& driver, const Step& step, const Geometry& size, Function function, Stream stream,
                       void** arguments) {
  Attribute attributes[2];
  uint32_t count = 0;
  if (step.clustered) {
    Attribute& attribute = attributes[count++];
    attribute.id = kClusterDimension;
    for (int axis = 0; axis < 3; ++axis) attribute.value[axis] = size.cluster[axis];
  }
  if (step.dependent) {
    Attribute& attribute = attributes[count++];
    attribute.id = kProgrammaticStreamSerialization;
    attribute.value[0] = 1;
  }
  const Configuration configuration{{size.grid[0], size.grid[1], size.grid[2]},
                                    {size.block[0], size.block[1], size.block[2]},
                                    size.shared, stream, attributes, count};
  return driver.launch_extended(&configuration, function, arguments, nullptr);
}

}  // namespace

void launch_kernel(const Driver& driver, const Step& step, const Geometry& size, Function function, Stream stream,
                   void** arguments) {
  const Result result =
      step.extended() ? launch_extended(driver, step, size, function, stream, arguments)
                      : driver.launch(function, size.grid[0], size.grid[1], size.grid[2], size.block[0], size.block[1],
                                      size.block[2], size.shared, stream, arguments, nullptr);
  if (result == 0) return;
  driver.fail(result, ("launch the kernel '" + step.kernel + "' with grid " + dimensions(size.grid) + ", block " +
                       dimensions(size.block) + (step.clustered ? ", clusters of " + dimensions(size.cluster) : "") +
                       " and " + std::to_string(size.shared) + " bytes of shared memory")
                          .c_str());
}

}  // namespace onnxfuse
