// What the undefined-behaviour checks that kernels are compiled with call.
#pragma once
#include "threads.h"

extern "C" {

struct SourceLocation {
  const char* file;
  uint32_t line, column;
};
struct TypeDescriptor {
  uint16_t kind, info;
  char name[1];
};
struct TypeMismatch {
  SourceLocation location;
  const TypeDescriptor* type;
  unsigned char log_alignment, kind;
};
struct OutOfBounds {
  SourceLocation location;
  const TypeDescriptor *array, *index;
};
struct FloatCast {
  SourceLocation location;
  const TypeDescriptor *from, *to;
};
void __ubsan_handle_float_cast_overflow_abort(FloatCast* data, uintptr_t) {
  fail(data->location.line, "a cast of a float that %s cannot hold, which C++ leaves undefined; an intrinsic such as "
       "__float2int_rz saturates", data->to->name);
}
void __ubsan_handle_type_mismatch_v1_abort(TypeMismatch* data, uintptr_t pointer) {
  fail(data->location.line, "misaligned access: address %#lx for type %s, which needs a multiple of %lu",
       static_cast<unsigned long>(pointer), data->type->name, 1ul << data->log_alignment);
}
void __ubsan_handle_out_of_bounds_abort(OutOfBounds* data, uintptr_t index) {
  fail(data->location.line, "index %ld is out of bounds for type %s", static_cast<long>(index), data->array->name);
}
}
