#include "images.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "elf.h"
#include "ort_api.h"
#include "sha256.h"
#include "texts.h"

namespace onnxfuse {
namespace {

constexpr char kEntryMagic[] = "onnxfuse image 2\n";
constexpr off_t kMostBytes = 64 << 20;  // of an entry and of an image; what is longer is none
constexpr int kLeastCapability = 75;    // onnxfuse/runtime/compile.py: architectures

struct Settings {
  std::mutex mutex;
  bool cache_set = false;
  std::string folder;
  std::string compiler;
  std::atomic<CompileCallback> callback{nullptr};
  std::atomic<uint64_t> embedded{0}, cached{0}, compiled{0}, ptx{0};
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

// The folder of the newest compiler ("nvrtc-13.0"), where nobody says which one is meant.
std::string newest_compiler(const std::string& folder) {
  std::string newest;
  int most_major = -1, most_minor = -1;
  if (DIR* entries = opendir(folder.c_str())) {
    while (const dirent* entry = readdir(entries)) {
      int major = 0, minor = 0, end = 0;
      if (std::sscanf(entry->d_name, "nvrtc-%4d.%4d%n", &major, &minor, &end) != 2 || entry->d_name[end] != '\0') continue;
      if (major > most_major || (major == most_major && minor > most_minor)) {
        most_major = major, most_minor = minor, newest = entry->d_name;
      }
    }
    closedir(entries);
  }
  return newest;
}

// Why entries of a folder may be somebody else's, or ""; the same rule as onnxfuse/runtime/cache.py.
std::string distrusted(const std::string& folder) {
  struct stat found;
  if (stat(folder.c_str(), &found) != 0) return "";  // nothing is read there
  if (found.st_uid != 0 && found.st_uid != geteuid()) return "it belongs to another user";
  if (found.st_mode & (S_IWGRP | S_IWOTH)) return "others may write to it";
  return "";
}

// The folder whose entries count, or ""; `reason` says why one that is there does not.
std::string entries_folder(std::string* reason) {
  std::string folder, compiler;
  {
    const std::lock_guard<std::mutex> lock(settings().mutex);
    folder = settings().cache_set ? settings().folder : default_folder();
    compiler = settings().compiler;
  }
  if (folder.empty()) return "";
  if (compiler.empty()) compiler = newest_compiler(folder);
  if (compiler.empty()) return "";
  const std::string inner = folder + "/" + compiler;
  for (const std::string& each : {folder, inner}) {
    if (*reason = distrusted(each); !reason->empty()) return "";
  }
  return inner;
}

// The contents of a plain file that is not too long; nothing for a folder, a pipe, a device or a link.
std::string plain_bytes(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (file < 0) return "";
  std::string bytes;
  struct stat found;
  if (fstat(file, &found) == 0 && S_ISREG(found.st_mode) && found.st_size <= kMostBytes) {
    bytes.resize(static_cast<size_t>(found.st_size));
    size_t have = 0;
    while (have < bytes.size()) {
      const ssize_t got = read(file, &bytes[have], bytes.size() - have);
      if (got <= 0) break;
      have += static_cast<size_t>(got);
    }
    bytes.resize(have);
  }
  close(file);
  return bytes;
}

std::string lines(const std::vector<std::string>& items) {
  std::string out;
  for (const std::string& item : items) out += (out.empty() ? "" : "\n") + item;
  return out;
}

// `which`: the image, in words; `kind`: what it should be, which `fault_of` knows.  Throws Error where the driver could
// not read it without leaving it.
void check(const std::string& image, const std::string& which, const char* kind,
           std::string (*fault_of)(std::string_view)) {
  std::string fault;
  if (image.size() <= kMostBytes) fault = fault_of(image);
  else fault = "it has more than " + std::to_string(kMostBytes) + " bytes";
  if (fault.empty()) return;
  throw Error(which + " is no " + kind + " that the GPU's driver can be given: " + fault + " (" +
              std::to_string(image.size()) + " bytes)");
}

void check_image(const std::string& image, const std::string& which) {
  check(image, which, "machine code", image_fault);
}

std::string embedded_image(const Device& device, const ImageRequest& request) {
  std::string image;
  const int capability = device.capability();
  const auto has = [&](const std::string& architecture) {
    const std::string name = "image_" + architecture;
    if (!request.attribute(name.c_str(), &image)) return false;
    check_image(image, "the embedded image '" + name + "'");
    return true;
  };
  if (has("sm_" + std::to_string(capability) + "a")) return image;
  // Machine code runs on later GPUs of the same major architecture.
  for (int lower = capability; lower >= device.gpu.major * 10; --lower) {
    if (has("sm_" + std::to_string(lower))) return image;
  }
  return "";
}

// The PTX for the newest architecture that is not after the device's, or "": any later GPU runs what it says.
std::string embedded_ptx(const Device& device, const ImageRequest& request) {
  std::string text;
  for (int lower = device.capability(); lower >= kLeastCapability; --lower) {
    const std::string name = "image_compute_" + std::to_string(lower);
    if (!request.attribute(name.c_str(), &text)) continue;
    check(text, "the embedded image '" + name + "'", "PTX", ptx_fault);
    return text;
  }
  return "";
}

std::string cached_image(const std::string& key, std::string* reason) {
  const std::string folder = entries_folder(reason);
  return folder.empty() ? "" : read_cache_entry(folder, key);
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
  check_image(reply.image, "what the compile callback gave");
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

std::string read_cache_entry(const std::string& folder, const std::string& key) {
  const std::string bytes = plain_bytes(folder + "/" + key);
  const size_t magic = sizeof kEntryMagic - 1, header = magic + 65;  // a checksum and a line end
  if (bytes.size() <= header || bytes.compare(0, magic, kEntryMagic) != 0 || bytes[header - 1] != '\n') return "";
  const std::string image = bytes.substr(header);
  return bytes.compare(magic, 64, sha256(key + '\0' + image)) == 0 ? image : "";
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

ImageCounts image_counts() {
  return {settings().embedded, settings().cached, settings().compiled, settings().ptx};
}

Image find_image(const Device& device, const ImageRequest& request) {
  const CompileCallback callback = settings().callback;
  if (callback != nullptr && dumps()) return compiled_image(device, request, callback);
  std::string image = embedded_image(device, request);
  if (!image.empty()) {
    ++settings().embedded;
    return {image, "embedded"};
  }
  std::string reason;
  image = cached_image(cache_key(request.source, request.options, device.architecture()), &reason);
  if (!image.empty()) {
    check_image(image, "the cached image");
    ++settings().cached;
    return {image, "cached"};
  }
  image = embedded_ptx(device, request);
  if (callback != nullptr) {
    try {
      return compiled_image(device, request, callback);
    } catch (const Error&) {
      if (image.empty()) throw;  // else the driver does it, of a GPU perhaps that the compiler does not know yet
    }
  }
  if (!image.empty()) {
    ++settings().ptx;
    return {image, "embedded PTX", true};
  }
  const std::string plain = "sm_" + std::to_string(device.capability());
  throw Error("no kernel for " + device.gpu.name + " (" + plain + "): the node embeds none, the cache " +
              (cache_folder().empty() ? "is off" : "'" + visible(cache_folder()) + "' " + (reason.empty() ? "has none" :
               "is not used (" + reason + ")")) +
              " and no compiler is registered; write the model with 'onnxfuse optimize --embed " + plain +
              "', or call onnxfuse.register(session_options) from Python");
}

}  // namespace onnxfuse
