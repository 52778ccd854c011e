#include "driver.h"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>

#include "ort_api.h"

namespace onnxfuse {
namespace {

// CUdevice_attribute
constexpr int kMultiprocessors = 16, kMajor = 75, kMinor = 76, kSharedOptIn = 97, kPools = 115;
// CUfunction_attribute
constexpr int kRegisters = 4;

// CUmemPoolProps: pinned memory of one device, no handles to share, no limit.
struct PoolProperties {
  int allocation = 1;
  int handles = 0;
  int location_kind = 1;
  int location = 0;
  void* security = nullptr;
  unsigned char reserved[64] = {};
};
static_assert(sizeof(PoolProperties) == 88);
constexpr int kReleaseThreshold = 4;

}  // namespace

Driver::Driver() {
  const char* named = std::getenv("ONNXFUSE_LIBCUDA");
  const char* path = named != nullptr && *named != '\0' ? named : "libcuda.so.1";
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw Error(std::string("no NVIDIA driver: ") + dlerror() +
                "; install the driver, or run the model without the onnxfuse library");
  }
  const auto find = [&](auto* function, const char* symbol) {
    *function = reinterpret_cast<std::decay_t<decltype(*function)>>(dlsym(library, symbol));
    if (*function == nullptr) {
      throw Error(std::string("the NVIDIA driver is too old: ") + path + " has no " + symbol +
                  "; CUDA 12 needs driver 525 or newer");
    }
  };
  find(&init, "cuInit");
  find(&driver_version, "cuDriverGetVersion");
  find(&device_count, "cuDeviceGetCount");
  find(&device_get, "cuDeviceGet");
  find(&device_name, "cuDeviceGetName");
  find(&device_attribute, "cuDeviceGetAttribute");
  find(&retain_primary, "cuDevicePrimaryCtxRetain");
  find(&get_current, "cuCtxGetCurrent");
  find(&set_current, "cuCtxSetCurrent");
  find(&module_load, "cuModuleLoadData");
  find(&module_unload, "cuModuleUnload");
  find(&module_function, "cuModuleGetFunction");
  find(&function_attribute, "cuFuncGetAttribute");
  find(&set_function_attribute, "cuFuncSetAttribute");
  find(&launch, "cuLaunchKernel");
  find(&pool_create, "cuMemPoolCreate");
  find(&pool_set, "cuMemPoolSetAttribute");
  find(&allocate, "cuMemAllocFromPoolAsync");
  find(&free, "cuMemFreeAsync");
  find(&event_create, "cuEventCreate");
  find(&event_destroy, "cuEventDestroy_v2");
  find(&event_record, "cuEventRecord");
  find(&event_query, "cuEventQuery");
  find(&event_wait, "cuEventSynchronize");
  find(&event_elapsed, "cuEventElapsedTime");
  find(&stream_capturing, "cuStreamIsCapturing");
  find(&exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
  find(&error_name, "cuGetErrorName");
  find(&error_text, "cuGetErrorString");
  function_load = reinterpret_cast<decltype(function_load)>(dlsym(library, "cuFuncLoad"));
  parameter_info = reinterpret_cast<decltype(parameter_info)>(dlsym(library, "cuFuncGetParamInfo"));
  launch_extended = reinterpret_cast<decltype(launch_extended)>(dlsym(library, "cuLaunchKernelEx"));
  encode_tiled = reinterpret_cast<decltype(encode_tiled)>(dlsym(library, "cuTensorMapEncodeTiled"));
  host_memory = dlsym(library, "onnxfuse_host_memory") != nullptr;
  check(init(0), "start the NVIDIA driver");
}

const Driver& Driver::get() {
  static const Driver driver;  // a constructor that throws is tried again at the next call
  return driver;
}

std::string Driver::describe(Result result) const {
  const char* name = nullptr;
  const char* text = nullptr;
  std::string out;
  if (error_name(result, &name) == 0 && name != nullptr) out = name;
  else out = "CUDA error " + std::to_string(result);
  if (error_text(result, &text) == 0 && text != nullptr) out += std::string(" (") + text + ")";
  return out;
}

void Driver::fail(Result result, const char* what) const {
  throw Error(std::string("could not ") + what + ": " + describe(result));
}

LoadedModule::LoadedModule(const Driver& driver, Context context, const std::string& image)
    : driver_(driver), context_(context) {
  Current current(driver_, context_);
  driver_.check(driver_.module_load(&module_, image.data()), "load a compiled kernel");
}

LoadedModule::~LoadedModule() {
  // When a process ends the driver may be gone before the sessions are; there is nobody to tell.
  Context former = nullptr;
  if (driver_.get_current(&former) != 0 || driver_.set_current(context_) != 0) return;
  driver_.module_unload(module_);
  driver_.set_current(former);
}

Function LoadedModule::function(const std::string& name) const {
  Current current(driver_, context_);
  Function function = nullptr;
  driver_.check(driver_.module_function(&function, module_, name.c_str()), ("find the kernel '" + name + "'").c_str());
  // Under lazy loading a kernel would else be loaded at its first launch, which may happen inside a graph capture.
  if (driver_.function_load != nullptr) driver_.check(driver_.function_load(function), "load a kernel");
  int registers = 0;
  driver_.check(driver_.function_attribute(&registers, kRegisters, function), "read a kernel's attributes");
  return function;
}

int Driver::version() const {
  int version = 0;
  check(driver_version(&version), "ask for the driver's version");
  return version;
}

int Device::count() {
  const Driver& driver = Driver::get();
  int count = 0;
  driver.check(driver.device_count(&count), "count the GPUs");
  return count;
}

Device& Device::at(int ordinal) {
  static std::mutex mutex;
  // Never destroyed: sessions that end with the process still use them.
  static auto& devices = *new std::unordered_map<int, std::unique_ptr<Device>>;
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Device>& device = devices[ordinal];
  if (device == nullptr) device.reset(new Device(ordinal));
  return *device;
}

Device::Facts Device::facts(int ordinal) {
  const Driver& driver = Driver::get();
  Facts facts;
  driver.check(driver.device_get(&facts.device, ordinal), "find the GPU");
  char text[256] = {};
  driver.check(driver.device_name(text, sizeof text - 1, facts.device), "read the GPU's name");
  facts.name = text;
  const auto read = [&](int* value, int attribute) {
    driver.check(driver.device_attribute(value, attribute, facts.device), "read the GPU's attributes");
  };
  read(&facts.major, kMajor);
  read(&facts.minor, kMinor);
  read(&facts.multiprocessors, kMultiprocessors);
  read(&facts.largest_shared, kSharedOptIn);
  return facts;
}

Device::Device(int ordinal) : driver(Driver::get()), ordinal(ordinal), gpu(facts(ordinal)) {
  // The context that the CUDA runtime uses too, and so ONNX Runtime and CuPy.
  driver.check(driver.retain_primary(&context, gpu.device), "open the GPU's context");
}

std::string Device::architecture() const {
  return "sm_" + std::to_string(capability()) + (gpu.major >= 9 ? "a" : "");
}

Pool Device::scratch_pool() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (pool_ != nullptr) return pool_;
  Current current(driver, context);
  int supported = 0;
  driver.check(driver.device_attribute(&supported, kPools, gpu.device), "ask for memory pools");
  if (supported == 0) throw Error("the GPU " + gpu.name + " has no memory pools, which this kernel's scratch memory needs");
  PoolProperties properties;
  properties.location = ordinal;
  Pool pool = nullptr;
  driver.check(driver.pool_create(&pool, &properties), "create a memory pool");
  // Memory stays with the pool, else each synchronisation would give it back and the next run fetch it again.
  uint64_t everything = UINT64_MAX;
  driver.check(driver.pool_set(pool, kReleaseThreshold, &everything), "set up a memory pool");
  return pool_ = pool;
}

std::shared_ptr<const LoadedModule> Device::find(const std::string& key) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = modules_.find(key);
  return found == modules_.end() ? nullptr : found->second.lock();
}

std::shared_ptr<const LoadedModule> Device::keep(const std::string& key, std::shared_ptr<const LoadedModule> module) {
  std::shared_ptr<const LoadedModule> winner;  // outlives the lock, since letting a module go unloads it
  const std::lock_guard<std::mutex> lock(mutex_);
  std::weak_ptr<const LoadedModule>& slot = modules_[key];
  winner = slot.lock();
  if (winner == nullptr) slot = winner = std::move(module);
  return winner;
}

Current::Current(const Driver& driver, Context context) : driver_(driver) {
  driver_.check(driver_.get_current(&former_), "ask for the current context");
  if (former_ == context) return;
  driver_.check(driver_.set_current(context), "enter the GPU's context");
  changed_ = true;
}

Current::~Current() {
  if (changed_) driver_.set_current(former_);
}

}  // namespace onnxfuse
