#include "images.h"

#include <dirent.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>

#include "ort_api.h"
#include "sha256.h"

namespace onnxfuse {
namespace {

constexpr char kEntryMagic[] = "onnxfuse image 1\n";

struct Settings {
  std::mutex mutex;
  bool cache_set = false;
  std::string folder;
  std::string compiler;
  std::atomic<CompileCallback> callback{nullptr};
  std::atomic<uint64_t> embedded{0}, cached{0}, compiled{0};
};

Settings& settings() {
  static Settings& settings = *new Settings;
  return settings;
}

// Where the cache lies unless set_cache said otherwise; the same rule as onnxfuse/runtime/cache.py.
std::string default_folder() {
  const auto variable = [](const char* name) -> std::string {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
  };
  if (const std::string folder = variable("ONNXFUSE_CACHE_DIR"); !folder.empty()) return folder;
  if (const std::string folder = variable("XDG_CACHE_HOME"); !folder.empty()) return folder + "/onnxfuse";
  if (const std::string home = variable("HOME"); !home.empty()) return home + "/.cache/onnxfuse";
  return "";
}

std::vector<std::string> subfolders(const std::string& folder) {
  std::vector<std::string> out;
  if (DIR* entries = opendir(folder.c_str())) {
    while (const dirent* entry = readdir(entries)) {
      if (entry->d_name[0] != '.') out.push_back(entry->d_name);
    }
    closedir(entries);
  }
  std::sort(out.rbegin(), out.rend());
  return out;
}

std::string lines(const std::vector<std::string>& items) {
  std::string out;
  for (const std::string& item : items) out += (out.empty() ? "" : "\n") + item;
  return out;
}

std::string embedded_image(const Device& device, const ImageRequest& request) {
  std::string image;
  const int capability = device.capability();
  const auto has = [&](const std::string& architecture) {
    return request.attribute(("image_" + architecture).c_str(), &image);
  };
  if (has("sm_" + std::to_string(capability) + "a")) return image;
  // Machine code runs on later GPUs of the same major architecture.
  for (int lower = capability; lower >= device.gpu.major * 10; --lower) {
    if (has("sm_" + std::to_string(lower))) return image;
  }
  return "";
}

std::string cached_image(const std::string& key) {
  std::string folder, compiler;
  {
    const std::lock_guard<std::mutex> lock(settings().mutex);
    folder = settings().cache_set ? settings().folder : default_folder();
    compiler = settings().compiler;
  }
  if (folder.empty()) return "";
  const auto compilers = compiler.empty() ? subfolders(folder) : std::vector<std::string>{compiler};
  for (const std::string& name : compilers) {
    std::string image = read_cache_entry(folder + "/" + name + "/" + key);
    if (!image.empty()) return image;
  }
  return "";
}

// Whether the compiler keeps kernels for a look at them, with line information.
bool dumps() {
  const char* folder = std::getenv("ONNXFUSE_DUMP");
  return folder != nullptr && *folder != '\0';
}

Image compiled_image(const Device& device, const ImageRequest& request, CompileCallback callback) {
  // No lock is held here: the callback may take Python's.
  Reply reply;
  callback(request.source.c_str(), lines(request.options).c_str(), lines(request.kernels).c_str(),
           device.architecture().c_str(), device.ordinal, &reply);
  if (!reply.error.empty()) throw Error(reply.error);
  if (reply.image.empty()) throw Error("the compile callback gave no image");
  ++settings().compiled;
  return {reply.image, "compiled"};
}

}  // namespace

std::string kernel_digest(const std::string& source, const std::vector<std::string>& options) {
  return sha256(lines(options) + '\0' + source);
}

std::string cache_key(const std::string& source, const std::vector<std::string>& options,
                      const std::string& architecture) {
  return architecture + "-" + kernel_digest(source, options) + ".cubin";
}

std::string read_cache_entry(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return "";
  std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const size_t magic = sizeof kEntryMagic - 1, header = magic + 65;  // a checksum and a line end
  if (bytes.size() <= header || bytes.compare(0, magic, kEntryMagic) != 0) return "";
  if (bytes.compare(magic, 64, sha256(std::string_view(bytes).substr(header))) != 0) return "";
  return bytes.substr(header);
}

void set_cache(const std::string& folder, const std::string& compiler) {
  const std::lock_guard<std::mutex> lock(settings().mutex);
  settings().cache_set = true;
  settings().folder = folder;
  settings().compiler = compiler;
}

std::string cache_folder() {
  const std::lock_guard<std::mutex> lock(settings().mutex);
  return settings().cache_set ? settings().folder : default_folder();
}

std::string compiler_name() {
  const std::lock_guard<std::mutex> lock(settings().mutex);
  return settings().compiler;
}

void set_compile_callback(CompileCallback callback) { settings().callback = callback; }

ImageCounts image_counts() { return {settings().embedded, settings().cached, settings().compiled}; }

Image find_image(const Device& device, const ImageRequest& request) {
  const CompileCallback callback = settings().callback;
  if (callback != nullptr && dumps()) return compiled_image(device, request, callback);
  std::string image = embedded_image(device, request);
  if (!image.empty()) {
    ++settings().embedded;
    return {image, "embedded"};
  }
  image = cached_image(cache_key(request.source, request.options, device.architecture()));
  if (!image.empty()) {
    ++settings().cached;
    return {image, "cached"};
  }
  if (callback != nullptr) return compiled_image(device, request, callback);
  const std::string plain = "sm_" + std::to_string(device.capability());
  throw Error("no kernel for " + device.gpu.name + " (" + plain + "): the node embeds none, the cache " +
              (cache_folder().empty() ? "is off" : "'" + cache_folder() + "' has none") +
              " and no compiler is registered; write the model with 'onnxfuse optimize --embed " + plain +
              "', or call onnxfuse.register(session_options) from Python");
}

}  // namespace onnxfuse
