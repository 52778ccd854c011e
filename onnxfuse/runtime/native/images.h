// Where compiled kernels come from: the node itself, the cache on disk, or the compile callback.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "driver.h"

namespace onnxfuse {

// Asked for an image where neither the node nor the cache has one.  All texts are UTF-8; `options` and `kernels` have
// one entry a line.  The callback answers through onnxfuse_reply_image or onnxfuse_reply_error before it returns; it
// may be called from several threads at once.
using CompileCallback = void (*)(const char* source, const char* options, const char* kernels,
                                 const char* architecture, int device, void* reply);

struct Reply {
  std::string image;
  std::string error;
};

// Reads an attribute of the node; false where it has none of that name.
using ImageAttribute = std::function<bool(const char* name, std::string* bytes)>;

struct ImageRequest {
  const std::string& source;
  const std::vector<std::string>& options;
  const std::vector<std::string>& kernels;
  const ImageAttribute& attribute;
};

// Names a kernel text with its options: 64 hexadecimal digits.  onnxfuse/runtime/cache.py computes the same.
std::string kernel_digest(const std::string& source, const std::vector<std::string>& options);

// Name of the cache entry, without folders.  onnxfuse/runtime/cache.py computes the same.
std::string cache_key(const std::string& source, const std::vector<std::string>& options,
                      const std::string& architecture);

// The bytes of a cache entry without its header; empty where the file is missing, torn or changed.
std::string read_cache_entry(const std::string& folder, const std::string& key);

// `folder`: root of the cache, "" for none; `compiler`: the subfolder of the compiler in use, "" to look in all.
void set_cache(const std::string& folder, const std::string& compiler);
std::string cache_folder();
// The compiler in use, as "nvrtc-13.0.88"; "" where none was set.
std::string compiler_name();
void set_compile_callback(CompileCallback callback);

// How often each source gave an image, for statistics; `ptx`: embedded PTX, which the driver compiled.
struct ImageCounts {
  uint64_t embedded, cached, compiled, ptx;
};
ImageCounts image_counts();

struct Image {
  std::string bytes;
  const char* origin;  // "embedded", "cached", "compiled" or "embedded PTX"
  bool ptx = false;    // whether the driver has to compile it
};

// An image that runs on the device: machine code that is embedded, cached or compiled, in this order, and else PTX that
// is embedded for an earlier architecture, which the driver compiles: code for this very GPU is no worse, and a driver
// may be older than the compiler that wrote the PTX.  While kernels are dumped (ONNXFUSE_DUMP) the compiler is asked
// first, since only what it makes then has line information.  Throws Error where none can be had.
Image find_image(const Device& device, const ImageRequest& request);

}  // namespace onnxfuse
