// A library of CUDA's that routines call: the one that the process has loaded already, ONNX Runtime's, or else the newest.
#pragma once

#include <dlfcn.h>

#include <string>
#include <type_traits>

namespace onnxfuse {

class SharedLibrary {
 public:
  // `title` and `stem`: "cuBLASLt" and "libcublasLt.so."; `variable`: of the environment, which may name another file;
  // of the releases `newest` down to `oldest` the first that is there; `needed`: "a matrix product".
  // Throws Error, with the remedy, where there is none.
  SharedLibrary(const char* title, const char* stem, const char* variable, int newest, int oldest, const char* needed);

  // A function of it.  Throws Error where it has none of that name.
  template <class Function>
  void find(Function** function, const char* symbol) const {
    *function = reinterpret_cast<Function*>(look(symbol));
    if (*function == nullptr) fail_without(symbol);
  }
  // The same; null where it has none.
  void* look(const char* symbol) const { return dlsym(library_, symbol); }
  // Throws Error: it is too old, for it has no such function.
  [[noreturn]] void fail_without(const char* symbol) const;

 private:
  void load(const char* stem, const char* variable, int newest, int oldest);

  std::string title_, path_, remedy_;
  void* library_ = nullptr;
};

}  // namespace onnxfuse
