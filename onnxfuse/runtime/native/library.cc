// What the library exports: RegisterCustomOps for every host language, and what onnxfuse/runtime calls from Python.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <new>
#include <utility>

#include "driver.h"
#include "elf.h"
#include "images.h"
#include "json.h"
#include "kernel.h"
#include "op.h"
#include "ort_api.h"
#include "prepared.h"
#include "statistics.h"
#include "texts.h"

#ifndef ONNXFUSE_VERSION
#error "the build passes -DONNXFUSE_VERSION"
#endif

#define ONNXFUSE_EXPORT extern "C" __attribute__((visibility("default")))

namespace onnxfuse {
namespace {

// The second number of "1.31.1": ONNX Runtime 1.N has API version N.
uint32_t api_version(const char* release) {
  unsigned first = 0, second = 0;
  if (release == nullptr || std::sscanf(release, "%u.%u", &first, &second) != 2) return 0;
  return first > 1 ? UINT32_MAX : second;
}

// Whether a node can tell the types of its outputs.
bool infers(const char* release) { return api_version(release) >= kApiWithInference; }

// How many names the next registration on this thread needs: ONNX Runtime makes a schema of each for every session.
thread_local int names_needed = kRegionNames;

// What one ONNX Runtime is given.  It lives as long as the process, since sessions keep pointers to all of it, and they
// run while further ones are registered: what is there never changes, operators and domains are only added.
struct Pool {
  Pool(const Api& api, const char* release) : runtime{api, release} {}
  // The domain with the first so many names, rounded up to a power of two.
  OrtCustomOpDomain* domain(int names);

  const Runtime runtime;
  std::deque<RegionOp> ops;
  std::map<int, OrtCustomOpDomain*> domains;
};

OrtCustomOpDomain* Pool::domain(int names) {
  int count = kLeastNames;
  while (count < names && count < kRegionNames) count *= 2;
  OrtCustomOpDomain*& out = domains[count];
  if (out != nullptr) return out;
  const Api& api = runtime.api;
  for (int place = static_cast<int>(ops.size()); place < 2 * count; ++place) {
    ops.emplace_back(runtime, place / 2, place % 2 != 0, infers(runtime.release.c_str()));
  }
  OrtCustomOpDomain* const made = api.create_domain("onnxfuse");
  for (int place = 0; place < 2 * count; ++place) api.add_op(made, &ops[place]);
  return out = made;
}

// That of a runtime, by its function table: a process may hold several.  The caller holds a lock.
Pool& pool(const Api& api, const char* release) {
  static auto& pools = *new std::map<const void*, Pool>;
  return pools.try_emplace(api.table(), api, release).first->second;
}

// Copies a text into the caller's buffer and returns the size that it needs, with the closing zero.
size_t give(const std::string& text, char* out, size_t size) {
  if (out != nullptr && size > 0) {
    const size_t taken = std::min(text.size(), size - 1);
    std::memcpy(out, text.data(), taken);
    out[taken] = '\0';
  }
  return text.size() + 1;
}

// The same for a text that may fail to come about: "ok:" or "error:" goes before it.  None of these throws: the caller
// may be written in any language.
template <class Make>
size_t give_checked(Make make, char* out, size_t size) noexcept {
  std::string text;
  try {
    text = "ok:" + make();
  } catch (const std::bad_alloc&) {
    text = "error:no memory";  // short enough to need none
  } catch (const std::exception& error) {
    text = "error:" + visible_lines(error.what());
  }
  return give(text, out, size);
}

}  // namespace
}  // namespace onnxfuse

using namespace onnxfuse;

// Called by ONNX Runtime for session options; the only entry that C++, C# and Triton Inference Server need.
ONNXFUSE_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  const Api oldest(base->GetApi(1), false);
  try {
    const char* const release = base->GetVersionString();
    const uint32_t version = api_version(release);
    if (version < kOldestApi) {
      throw Error("onnxfuse needs ONNX Runtime 1." + std::to_string(kOldestApi) + " or newer; this is " +
                  (release == nullptr ? "an unknown release" : release) + ": pip install --upgrade onnxruntime-gpu");
    }
    const bool newer = version >= kApiWithShapeReference;
    const Api api(base->GetApi(newer ? kApiWithShapeReference : kOldestApi), newer);
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    api.add_domain(options, pool(api, release).domain(std::exchange(names_needed, kRegionNames)));
    // What the model declares is all that such a runtime knows of our outputs, and this alone gives them new names.
    if (!infers(release)) api.leave_out(options, "QDQPropagationTransformer");
    return nullptr;
  } catch (const std::exception& error) {
    return oldest.status(kFail, error.what());
  }
}

// The next registration on this thread is for a model whose fused operators are among the first `names`.
ONNXFUSE_EXPORT void onnxfuse_expect_names(int names) { names_needed = names; }

ONNXFUSE_EXPORT const char* onnxfuse_version() { return ONNXFUSE_VERSION; }

// See CompileCallback; null for none.
ONNXFUSE_EXPORT void onnxfuse_set_compile_callback(CompileCallback callback) { set_compile_callback(callback); }

ONNXFUSE_EXPORT void onnxfuse_reply_image(void* reply, const void* image, size_t size) {
  Reply& to = *static_cast<Reply*>(reply);
  try {
    to.image.assign(static_cast<const char*>(image), size);
  } catch (const std::exception&) {
    to.error = "no memory";  // short enough to need none
  }
}

ONNXFUSE_EXPORT void onnxfuse_reply_error(void* reply, const char* message) {
  static_cast<Reply*>(reply)->error = message;
}

// See set_cache.
ONNXFUSE_EXPORT void onnxfuse_set_cache(const char* folder, const char* compiler) { set_cache(folder, compiler); }

ONNXFUSE_EXPORT size_t onnxfuse_get_cache(char* out, size_t size) { return give(cache_folder(), out, size); }

// Name of the cache entry; `options` has one a line.
ONNXFUSE_EXPORT size_t onnxfuse_cache_key(const char* source, const char* options, const char* architecture, char* out,
                                          size_t size) {
  return give(cache_key(source, {options}, architecture), out, size);
}

// The GPUs as a JSON list of {"name", "major", "minor", "multiprocessors", "driver"}, by ordinal, where the last is the
// newest CUDA that the driver runs (13000); an error without a driver.
ONNXFUSE_EXPORT size_t onnxfuse_devices(char* out, size_t size) {
  return give_checked(
      [] {
        std::string text;
        for (int ordinal = 0; ordinal < Device::count(); ++ordinal) {
          const Device::Facts facts = Device::facts(ordinal);
          text += std::string(text.empty() ? "" : ",") + "{\"name\":" + quoted(facts.name) +
                  ",\"major\":" + std::to_string(facts.major) + ",\"minor\":" + std::to_string(facts.minor) +
                  ",\"multiprocessors\":" + std::to_string(facts.multiprocessors) +
                  ",\"driver\":" + std::to_string(Driver::get().version()) + "}";
        }
        return "[" + text + "]";
      },
      out, size);
}

// Whether runs are counted per node and variant; off at first.
ONNXFUSE_EXPORT void onnxfuse_set_recording(int on) { set_recording(on != 0); }

// {"images": {"embedded", "cached", "compiled", "ptx"}, "kernels": [{"node", "op", "region", "variants", "runs"}]} of
// the live sessions.
ONNXFUSE_EXPORT size_t onnxfuse_statistics(char* out, size_t size) {
  return give_checked(
      [] {
        const ImageCounts counts = image_counts();
        return "{\"images\":{\"embedded\":" + std::to_string(counts.embedded) +
               ",\"cached\":" + std::to_string(counts.cached) + ",\"compiled\":" + std::to_string(counts.compiled) +
               ",\"ptx\":" + std::to_string(counts.ptx) + "},\"kernels\":" + live_kernels() + "}";
      },
      out, size);
}

// See write_statistics.
ONNXFUSE_EXPORT size_t onnxfuse_write_statistics(char* out, size_t size) {
  return give_checked([] { return write_statistics(); }, out, size);
}

// See evaluate_plan.
ONNXFUSE_EXPORT size_t onnxfuse_evaluate_plan(const char* plan, const char* situation, char* out, size_t size) {
  return give_checked([&] { return evaluate_plan(plan, situation); }, out, size);
}

// Why machine code would not be given to the driver, "" where it would: see image_fault.  For tests.
ONNXFUSE_EXPORT size_t onnxfuse_image_fault(const char* image, size_t length, char* out, size_t size) {
  return give_checked([&] { return image_fault({image, length}); }, out, size);
}

// The same of PTX: see ptx_fault.
ONNXFUSE_EXPORT size_t onnxfuse_ptx_fault(const char* text, size_t length, char* out, size_t size) {
  return give_checked([&] { return ptx_fault({text, length}); }, out, size);
}

// A JSON text as the library reads it, for tests.
ONNXFUSE_EXPORT size_t onnxfuse_read_json(const char* text, size_t length, char* out, size_t size) {
  return give_checked([&] { return Json::parse({text, length}).dump(); }, out, size);
}
