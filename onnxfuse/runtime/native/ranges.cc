// NVTX, spoken to the profiler directly.
//
// NVTX is a set of headers: what they compile into a program looks for a library that the profiler names in
// NVTX_INJECTION64_PATH, and hands it tables of function pointers to fill in.  Those tables are the interface that is
// kept compatible, and two of their entries are all that is needed here.  So the library does that much itself: it
// builds with a compiler and nothing else, and in a deployment no library need be found at run time (libnvToolsExt,
// which older CUDA has, is gone from CUDA 13).
#include "ranges.h"

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "texts.h"

namespace onnxfuse {
namespace {

using Pointer = void (*)();
using Push = int (*)(const char* name);
using Pop = int (*)();

// Modules of functions, and the functions of the first that are used.
constexpr int kCore = 1, kCore2 = 5;
constexpr size_t kFunctions = 16;  // of either module, the unused first one counted
constexpr size_t kRangePush = 9, kRangePop = 11;

// Where the profiler writes its functions, and the tables of pointers to these places that it is given; a null ends
// each table.
Pointer core[kFunctions], core2[kFunctions];
Pointer* core_table[kFunctions + 1];
Pointer* core2_table[kFunctions + 1];

int module_functions(int module, Pointer*** table, unsigned* size) {
  if (module != kCore && module != kCore2) return 0;
  if (table != nullptr) *table = module == kCore ? core_table : core2_table;
  if (size != nullptr) *size = kFunctions;
  return 1;
}

struct Callbacks {
  size_t size = sizeof(Callbacks);
  int (*module_functions)(int module, Pointer*** table, unsigned* size) = onnxfuse::module_functions;
};
struct Version {
  size_t size = sizeof(Version);
  uint32_t version = 3;
  uint32_t reserved = 0;
  void (*profiler)(uint32_t version) = [](uint32_t) {};
};

const void* export_table(uint32_t number) {
  static const Callbacks callbacks;
  static const Version version;
  return number == 1 ? static_cast<const void*>(&callbacks) : number == 3 ? &version : nullptr;
}

struct Profiler {
  Push push = nullptr;
  Pop pop = nullptr;
};

Profiler attach() {
  const char* wanted = std::getenv("ONNXFUSE_RANGES");
  if (wanted == nullptr || *wanted == '\0' || (*wanted == '0' && wanted[1] == '\0')) return {};
  const char* path = std::getenv("NVTX_INJECTION64_PATH");
  if (path == nullptr || *path == '\0') return {};
  void* library = dlopen(path, RTLD_LAZY);
  using Initialise = int (*)(const void* (*export_table)(uint32_t));
  const auto initialise =
      library == nullptr ? nullptr : reinterpret_cast<Initialise>(dlsym(library, "InitializeInjectionNvtx2"));
  if (initialise == nullptr) {
    const char* const reason = dlerror();
    say(std::string("no ranges for the profiler: ") + (reason == nullptr ? "it is none" : reason));
    return {};
  }
  for (size_t index = 1; index < kFunctions; ++index) {
    core_table[index] = &core[index];
    core2_table[index] = &core2[index];
  }
  if (initialise(export_table) == 0) return {};
  const Profiler out{reinterpret_cast<Push>(core[kRangePush]), reinterpret_cast<Pop>(core[kRangePop])};
  return out.push != nullptr && out.pop != nullptr ? out : Profiler{};
}

const Profiler& profiler() {
  static const Profiler profiler = attach();
  return profiler;
}

}  // namespace

bool ranges_wanted() { return profiler().push != nullptr; }

Range::Range(const std::string& name) {
  const Profiler& to = profiler();
  if (to.push == nullptr) return;
  to.push(name.c_str());
  pop_ = to.pop;
}

Range::~Range() {
  if (pop_ != nullptr) pop_();
}

}  // namespace onnxfuse
