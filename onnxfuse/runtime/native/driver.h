// The CUDA driver: its functions, found when first needed, and the GPUs that it shows.
//
// The library links no CUDA, so that it loads where no driver is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace onnxfuse {

using Result = int;
using Context = struct ContextTag*;
using Module = struct ModuleTag*;
using Function = struct FunctionTag*;
using Stream = struct StreamTag*;
using Pool = struct PoolTag*;
using Event = struct EventTag*;
using Address = uint64_t;

struct Driver {
  // The driver of this machine.  Throws Error where there is none or it does not start; `ONNXFUSE_LIBCUDA` names a
  // library to load in place of libcuda.so.1.
  static const Driver& get();

  // Throws Error with the driver's name and text of the result; `what` is what was tried.
  void check(Result result, const char* what) const {
    if (result != 0) fail(result, what);
  }
  [[noreturn]] void fail(Result result, const char* what) const;
  // "CUDA_ERROR_OUT_OF_MEMORY (out of memory)".
  std::string describe(Result result) const;
  // The newest CUDA that the driver runs, as 13000.
  int version() const;

  Result (*init)(unsigned flags);
  Result (*driver_version)(int* version);
  Result (*device_count)(int* count);
  Result (*device_get)(int* device, int ordinal);
  Result (*device_name)(char* name, int size, int device);
  Result (*device_attribute)(int* value, int attribute, int device);
  Result (*retain_primary)(Context* context, int device);
  Result (*get_current)(Context* context);
  Result (*set_current)(Context context);
  Result (*module_load)(Module* module, const void* image);
  Result (*module_unload)(Module module);
  Result (*module_function)(Function* function, Module module, const char* name);
  Result (*function_load)(Function function);  // null before CUDA 12.4
  Result (*parameter_info)(Function function, size_t index, size_t* offset, size_t* size);  // null before CUDA 12.4
  Result (*function_attribute)(int* value, int attribute, Function function);
  Result (*set_function_attribute)(Function function, int attribute, int value);
  Result (*launch)(Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared, Stream stream, void** arguments, void** extra);
  Result (*launch_extended)(const void* configuration, Function function, void** arguments,
                            void** extra);  // null before CUDA 11.8
  Result (*encode_tiled)(void* map, int type, uint32_t rank, void* address, const uint64_t* sizes,
                         const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides, int interleave,
                         int swizzle, int promotion, int fill);  // a tensor map; null before CUDA 12.0
  Result (*pool_create)(Pool* pool, const void* properties);
  Result (*pool_set)(Pool pool, int attribute, void* value);
  Result (*allocate)(Address* address, size_t size, Pool pool, Stream stream);
  Result (*free)(Address address, Stream stream);
  Result (*event_create)(Event* event, unsigned flags);
  Result (*event_destroy)(Event event);
  Result (*event_record)(Event event, Stream stream);
  Result (*event_query)(Event event);
  Result (*event_wait)(Event event);
  Result (*event_elapsed)(float* milliseconds, Event start, Event end);
  Result (*stream_capturing)(Stream stream, int* status);
  Result (*exchange_capture_mode)(int* mode);
  Result (*error_name)(Result result, const char** text);
  Result (*error_text)(Result result, const char** text);

  // Set where the addresses of this "driver" are host memory: a stand-in, which tests use without a GPU.
  bool host_memory = false;

 private:
  Driver();
};

// A compiled image on one GPU; unloaded with its last kernel.
class LoadedModule {
 public:
  LoadedModule(const Driver& driver, Context context, const std::string& image);
  ~LoadedModule();
  LoadedModule(const LoadedModule&) = delete;
  LoadedModule& operator=(const LoadedModule&) = delete;

  // Throws Error where the image has no such kernel.
  Function function(const std::string& name) const;

 private:
  const Driver& driver_;
  Context context_;
  Module module_ = nullptr;
};

// A GPU, shared by all sessions of the process.
class Device {
 public:
  struct Facts {
    int device = 0;  // the driver's handle
    std::string name;
    int major = 0, minor = 0, multiprocessors = 0;
    int largest_shared = 0;  // shared memory that a block can have, in bytes, where a kernel asks for it
  };
  // What the driver tells without opening a context.  Throws Error where it has no such GPU.
  static Facts facts(int ordinal);

  // Throws Error where the driver has no such GPU.
  static Device& at(int ordinal);
  // How many GPUs there are; throws Error where there is no driver.
  static int count();

  const Driver& driver;
  const int ordinal;
  const Facts gpu;
  Context context = nullptr;

  int capability() const { return gpu.major * 10 + gpu.minor; }

  // The architecture to compile for: that of this very GPU, with what only it has ("sm_90a") from Hopper on.
  std::string architecture() const;
  // The pool that scratch comes from.  Throws Error where the GPU has no memory pools.
  Pool scratch_pool();

  // The module that is loaded under `key`, or null.
  std::shared_ptr<const LoadedModule> find(const std::string& key);
  // Keeps a module under its key; where another thread was faster its module is returned.
  std::shared_ptr<const LoadedModule> keep(const std::string& key, std::shared_ptr<const LoadedModule> module);

 private:
  explicit Device(int ordinal);
  std::mutex mutex_;
  Pool pool_ = nullptr;
  std::unordered_map<std::string, std::weak_ptr<const LoadedModule>> modules_;
};

// Makes a context current on this thread and puts the former one back.
class Current {
 public:
  Current(const Driver& driver, Context context);
  ~Current();
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  const Driver& driver_;
  Context former_ = nullptr;
  bool changed_ = false;
};

// Some calls, such as one that creates an event or loads a kernel, would break the capture of a graph, also in another
// thread, unless this thread says that it has no part in it.
class OutsideCaptures {
 public:
  explicit OutsideCaptures(const Driver& driver) : driver_(driver) { driver_.exchange_capture_mode(&mode_); }
  ~OutsideCaptures() { driver_.exchange_capture_mode(&mode_); }
  OutsideCaptures(const OutsideCaptures&) = delete;
  OutsideCaptures& operator=(const OutsideCaptures&) = delete;

 private:
  const Driver& driver_;
  int mode_ = 2;  // CUstreamCaptureMode: relaxed
};

}  // namespace onnxfuse
