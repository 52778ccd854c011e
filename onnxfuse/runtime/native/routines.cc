#include "routines.h"

#include "cublaslt.h"
#include "cudnn.h"
#include "ort_api.h"
#include "texts.h"

namespace onnxfuse {

const Routine& Routine::named(std::string_view name) {
  for (const bool biased : {false, true}) {
    for (const bool added : {false, true}) {
      for (const Routine* routine : {&gemm_routine(biased, added), &conv_routine(biased, added)}) {
        if (routine->name == name) return *routine;
      }
    }
  }
  throw Error("the launch plan calls '" + excerpt(name) + "', which is no routine that this library knows");
}

}  // namespace onnxfuse
