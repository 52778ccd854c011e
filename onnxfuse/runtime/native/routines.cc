#include "routines.h"

#include "cublaslt.h"
#include "ort_api.h"
#include "texts.h"

namespace onnxfuse {

const Routine& Routine::named(std::string_view name) {
  static const Routine* const routines[] = {
      &gemm_routine(false, false), &gemm_routine(true, false), &gemm_routine(false, true), &gemm_routine(true, true)};
  for (const Routine* routine : routines) {
    if (routine->name == name) return *routine;
  }
  throw Error("the launch plan calls '" + excerpt(name) + "', which is no routine that this library knows");
}

}  // namespace onnxfuse
