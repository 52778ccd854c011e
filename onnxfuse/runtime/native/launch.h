// One kernel launch, plain or with attributes.
#pragma once

#include "driver.h"
#include "plan.h"

namespace onnxfuse {

// Launches a step on the stream; throws Error with the kernel's name and sizes where the driver refuses.
void launch_kernel(const Driver& driver, const Step& step, const Geometry& size, Function function, Stream stream,
                   void** arguments);

}  // namespace onnxfuse
