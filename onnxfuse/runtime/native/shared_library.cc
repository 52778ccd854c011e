#include "shared_library.h"

#include <algorithm>
#include <cstdlib>

#include "ort_api.h"

namespace onnxfuse {

SharedLibrary::SharedLibrary(const char* title, const char* stem, const char* variable, int newest, int oldest,
                             const char* needed)
    : title_(title),
      remedy_("; " + std::string(needed) +
              " of this model needs it: install CUDA's libraries (pip install onnxfuse[cuda]), or put the folder that has "
              "them into LD_LIBRARY_PATH") {
  load(stem, variable, newest, oldest);
  if (library_ != nullptr) return;
  const char* const reason = dlerror();
  throw Error("no " + title_ + ": " + (reason == nullptr ? path_ : std::string(reason)) + remedy_);
}

void SharedLibrary::load(const char* stem, const char* variable, int newest, int oldest) {
  const auto open = [&](const std::string& path, int mode) {
    path_ = path;
    return library_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | mode);
  };
  const char* const named = std::getenv(variable);
  if (named != nullptr && *named != '\0') {
    open(named, 0);
    return;
  }
  for (const int mode : {RTLD_NOLOAD, 0}) {
    for (int release = newest; release >= oldest; --release) {
      if (open(stem + std::to_string(release), mode) != nullptr) return;
    }
  }
  open(stem + std::to_string(std::max(newest, oldest)), 0);  // for the message
}

void SharedLibrary::fail_without(const char* symbol) const {
  throw Error(title_ + " is too old: " + path_ + " has no " + symbol + remedy_);
}

}  // namespace onnxfuse
