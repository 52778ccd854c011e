// Every allocation of the library and of the stand-ins; those of the library fail where a case says so.
#include <cstdlib>
#include <new>

#include "fake_runtime.h"

void* operator new(size_t size) {
  if (fake::failing > 0 && --fake::failing == 0) throw std::bad_alloc();
  void* const out = std::malloc(size == 0 ? 1 : size);
  if (out == nullptr) throw std::bad_alloc();
  return out;
}
void operator delete(void* address) noexcept { std::free(address); }
void operator delete(void* address, size_t) noexcept { std::free(address); }
