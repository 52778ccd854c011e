#include "program.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "ort_api.h"
#include "texts.h"

namespace onnxfuse {
namespace {

// CUfunction_attribute: dynamic and static shared memory of a block, in bytes.
constexpr int kStaticShared = 1, kLargestDynamicShared = 8;
constexpr Result kInvalidValue = 1;
constexpr int kExtendedCapability = 90;
constexpr size_t kMapBytes = 128;  // of a CUtensorMap

// These are never destroyed: sessions may end after the library's statics.
std::mutex& mutex = *new std::mutex;
auto& programs = *new std::unordered_map<std::string, std::weak_ptr<const Program>>;
size_t swept = 0;  // programs that were left when those of no live node were last taken out
auto& free_places = *new std::vector<uint32_t>;
uint32_t places = 0;
uint64_t generations = 0;

// What a thread has prepared, by the program's place.  The two variables that every run reads need no initialisation;
// the owner of the memory is touched where the table grows.
struct Entry {
  uint64_t generation = 0;
  std::unique_ptr<Prepared> prepared;
};
thread_local Entry* table = nullptr;
thread_local size_t table_size = 0;

struct TableOwner {
  std::vector<Entry> entries;
  ~TableOwner() {
    table = nullptr;
    table_size = 0;
  }
};
thread_local TableOwner owner;

// A launch gives the driver an address for each parameter of the kernel, and the driver reads there as much as the
// parameter is long: with fewer arguments, or behind a shorter one, it would read whatever comes next.
void check_arguments(const Driver& driver, Function function, const Step& step) {
  if (driver.parameter_info == nullptr) return;
  size_t count = 0;
  for (size_t offset = 0, size = 0;; ++count) {
    const Result result = driver.parameter_info(function, count, &offset, &size);
    if (result == kInvalidValue || count > step.arguments.size()) break;
    if (result != 0) return;  // the driver does not know
    if (count == step.arguments.size()) continue;
    const Argument& argument = step.arguments[count];
    const bool map = !argument.integer() && !argument.address();
    if (map ? size != kMapBytes : size > sizeof(uint64_t)) {
      throw Error("parameter " + std::to_string(count) + " of the kernel '" + excerpt(step.kernel) + "' has " +
                  std::to_string(size) + " bytes; a launch plan gives " +
                  (map ? "the " + std::to_string(kMapBytes) + " of a tensor map" : "8 at most"));
    }
  }
  if (count == step.arguments.size()) return;
  throw Error("the kernel '" + excerpt(step.kernel) + "' has " + (count > step.arguments.size() ? "more" : "fewer") +
              " parameters than the " + std::to_string(step.arguments.size()) + " arguments of the launch plan");
}

// Throws Error where a variant that may run on this GPU asks for what the GPU or its driver does not have.
void check_gpu(const Plan& plan, const Device& device) {
  const auto check = [&](const Variant& variant, const char* what, const char* entry, bool there) {
    const std::string which =
        "the variant '" + excerpt(variant.name) + "' of the launch plan asks for " + what;
    if (device.capability() < kExtendedCapability) {
      throw Error(which + ", which GPUs have from sm_" + std::to_string(kExtendedCapability) + " on, and " +
                  device.gpu.name + " is sm_" + std::to_string(device.capability()) +
                  ": use the model on a newer GPU, or fuse it again for this one");
    }
    if (!there) {
      throw Error("the NVIDIA driver is too old: " + which + ", and it has no " + entry +
                  "; CUDA 12 needs driver 525 or newer");
    }
  };
  for (const Variant& variant : plan.variants) {
    for (const Step& step : variant.steps) {
      if (step.extended()) {
        check(variant, step.clustered ? "clusters" : "a dependent launch", "cuLaunchKernelEx",
              device.driver.launch_extended != nullptr);
      }
      if (!step.maps.empty()) {
        check(variant, "tensor maps", "cuTensorMapEncodeTiled", device.driver.encode_tiled != nullptr);
      }
    }
  }
}

std::shared_ptr<const LoadedModule> load(const Device& device, const Image& image) {
  try {
    return std::make_shared<LoadedModule>(device.driver, device.context, image.bytes);
  } catch (const Error& error) {
    if (!image.ptx) throw;
    const std::string plain = "sm_" + std::to_string(device.capability());
    throw Error("the node embeds no machine code for " + device.gpu.name + " (" + plain +
                "), and the driver does not compile its PTX: " + error.what() +
                "; install a newer driver, or write the model with 'onnxfuse optimize --embed " + plain + "'");
  }
}

// Leaves out the variants that call a library which is not there, all but the last: those behind them run instead.
// Returns why, or "".
std::string leave_out_calls(Plan* plan, Device& device) {
  std::string missing;
  const auto opens = [&](const Variant& variant) {
    try {
      for (const Step& step : variant.steps) {
        if (step.routine != nullptr) step.routine->open(device);
      }
      return true;
    } catch (const Error& error) {
      missing = error.what();
      return false;
    }
  };
  for (size_t v = 0; v + 1 < plan->variants.size();) {
    if (opens(plan->variants[v])) ++v;
    else plan->variants.erase(plan->variants.begin() + static_cast<ptrdiff_t>(v));
  }
  return missing;
}

Plan read_plan(const std::string& text, Device& device, std::string* missing) {
  Plan plan = Plan::parse(text);
  plan.specialise(device.capability(), device.gpu.multiprocessors);
  check_gpu(plan, device);
  *missing = leave_out_calls(&plan, device);
  return plan;
}

}  // namespace

std::pair<uint32_t, uint64_t> Place::take() {
  const std::lock_guard<std::mutex> lock(mutex);
  if (free_places.empty()) return {places++, ++generations};
  const uint32_t index = free_places.back();
  free_places.pop_back();
  return {index, ++generations};
}

Place::~Place() {
  const std::lock_guard<std::mutex> lock(mutex);
  free_places.push_back(index);
}

std::shared_ptr<const Program> Program::of(Device* device, const std::string& plan, const std::string& source,
                                           const ImageAttribute& attribute, const char** origin) {
  const std::string key = std::to_string(device->ordinal) + ' ' + std::to_string(plan.size()) + ' ' + plan + source;
  std::shared_ptr<const Program> out;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = programs.find(key);
    if (found != programs.end()) out = found->second.lock();
  }
  *origin = "loaded before";
  if (out != nullptr) return out;
  out = std::make_shared<const Program>(device, plan, source, attribute, origin);
  std::shared_ptr<const Program> winner;  // outlives the lock, since the end of a program takes it
  const std::lock_guard<std::mutex> lock(mutex);
  if (programs.size() > 2 * swept + 16) {  // now and then, so that many nodes do not look at all others each
    for (auto entry = programs.begin(); entry != programs.end();) {
      entry = entry->second.expired() ? programs.erase(entry) : std::next(entry);
    }
    swept = programs.size();
  }
  std::weak_ptr<const Program>& slot = programs[key];
  winner = slot.lock();
  if (winner == nullptr) slot = winner = out;
  return winner;
}

Program::Program(Device* on, const std::string& text, const std::string& source, const ImageAttribute& attribute,
                 const char** origin)
    : device(*on), plan(read_plan(text, *on, &missing)), functions(plan.variants.size()) {
  const Driver& driver = device.driver;
  if (!plan.scratch.empty()) pool = device.scratch_pool();
  std::vector<std::string> names;
  for (const Variant& variant : plan.variants) {
    for (const Step& step : variant.steps) {
      if (step.routine == nullptr) names.push_back(step.kernel);
    }
  }
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  kernels = names.size();
  if (!names.empty()) {
    const std::string key = cache_key(source, plan.options, device.architecture());
    module_ = device.find(key);
    if (module_ == nullptr) {
      const Image image = find_image(device, {source, plan.options, names, attribute});
      module_ = device.keep(key, load(device, image));
      *origin = image.origin;
    }
  }
  Current current(driver, device.context);
  for (size_t v = 0; v < plan.variants.size(); ++v) {
    for (const Step& step : plan.variants[v].steps) {
      if (step.routine != nullptr) {
        step.routine->open(device);
        functions[v].push_back(nullptr);
        continue;
      }
      const Function function = module_->function(step.kernel);
      check_arguments(driver, function, step);
      if (!step.shared.is_zero()) {
        int fixed = 0;
        driver.check(driver.function_attribute(&fixed, kStaticShared, function), "read a kernel's shared memory");
        driver.check(driver.set_function_attribute(function, kLargestDynamicShared, device.gpu.largest_shared - fixed),
                     "set a kernel's shared memory");
      }
      functions[v].push_back(function);
    }
  }
}

Prepared& Program::prepared() const {
  const size_t index = place_.index;
  if (index >= table_size) {
    owner.entries.resize(index + 1);
    table = owner.entries.data();
    table_size = owner.entries.size();
  }
  Entry& entry = table[index];
  if (entry.generation != place_.generation) {
    entry.prepared = std::make_unique<Prepared>(plan, device.capability(), device.gpu.multiprocessors);
    entry.generation = place_.generation;
  }
  return *entry.prepared;
}

}  // namespace onnxfuse
