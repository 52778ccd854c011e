// What a fused node tells ONNX Runtime of its outputs before it has a kernel: InferOutputShapeFn of the operator.
#pragma once

#include "ort_api.h"

namespace onnxfuse {

// Gives the outputs of a node the element types and axes of its launch plan: the runtime forgets what the model declares
// of a value that one of its optimisations gives a new name.  A size is told where the plan has a number, or where it is
// a size of an input, with what the runtime knows of that; any other gets a name that nothing else has, because the
// runtime takes a size without a name for a number.  Throws Error.
void infer_outputs(const Api& api, OrtShapeInferContext* context);

}  // namespace onnxfuse
