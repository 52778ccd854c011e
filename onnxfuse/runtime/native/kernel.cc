#include "kernel.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>

#include "images.h"
#include "json.h"

namespace onnxfuse {

// Buffers of one thread that grow to what the largest node needs; a run allocates nothing once they have.
struct Workspace {
  std::vector<TensorView> inputs;
  std::vector<int64_t> input_sizes, symbols, output_sizes;
  std::vector<uint64_t> outputs, scratch, values;
  std::vector<void*> arguments;

  template <class T>
  static T* room(std::vector<T>* buffer, size_t count) {
    if (buffer->size() < count) buffer->resize(count);
    return buffer->data();
  }
};

namespace {

// CUfunction_attribute: dynamic and static shared memory of a block, in bytes.
constexpr int kStaticShared = 1, kLargestDynamicShared = 8;

std::atomic<bool> recording{false};

// Whether each node says on stderr where its kernels came from.
bool verbose() {
  static const bool on = std::getenv("ONNXFUSE_VERBOSE") != nullptr;
  return on;
}

std::mutex live_mutex;
// Never destroyed: sessions may end after the library's statics.
std::set<const Kernel*>& live = *new std::set<const Kernel*>;

}  // namespace

Kernel::Kernel(const Api& api, const OrtKernelInfo* info, const std::string& op)
    : api(api), node_(api.node_name(info)), op_(op) {
  try {
    create(info);
  } catch (const Error& error) {
    throw Error("onnxfuse: " + label() + ": " + error.what());
  }
  const std::lock_guard<std::mutex> lock(live_mutex);
  live.insert(this);
}

Kernel::~Kernel() {
  const std::lock_guard<std::mutex> lock(live_mutex);
  live.erase(this);
}

void Kernel::create(const OrtKernelInfo* info) {
  std::string text, source;
  if (!api.string_attribute(info, "plan", &text)) throw Error("the node has no attribute 'plan'");
  if (!api.string_attribute(info, "source", &source)) throw Error("the node has no attribute 'source'");
  plan_ = Plan::parse(text);
  region_ = plan_.region;
  device_ = &Device::at(api.device(info));
  const Driver& driver = device_->driver;
  plan_.specialise(device_->capability(), device_->gpu.multiprocessors);
  if (!plan_.scratch.empty()) pool_.push_back(device_->scratch_pool());
  runs_.resize(plan_.variants.size());

  std::vector<std::string> names;
  for (const Variant& variant : plan_.variants) {
    for (const Step& step : variant.steps) names.push_back(step.kernel);
  }
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  functions_.resize(plan_.variants.size());
  if (names.empty()) return;

  const std::string key = cache_key(source, plan_.options, device_->architecture());
  module_ = device_->find(key);
  const char* origin = "loaded before";
  if (module_ == nullptr) {
    const auto attribute = [&](const char* name, std::string* bytes) { return api.bytes_attribute(info, name, bytes); };
    const Image image = find_image(*device_, {source, plan_.options, names, attribute});
    module_ = device_->keep(key, std::make_shared<LoadedModule>(driver, device_->context, image.bytes));
    origin = image.origin;
  }
  if (verbose()) {
    std::fprintf(stderr, "onnxfuse: %s: %zu kernels for %s, %s\n", label().c_str(), names.size(),
                 device_->architecture().c_str(), origin);
  }
  Current current(driver, device_->context);
  for (size_t v = 0; v < plan_.variants.size(); ++v) {
    for (const Step& step : plan_.variants[v].steps) {
      const Function function = module_->function(step.kernel);
      if (!step.shared.is_zero()) {
        int fixed = 0;
        driver.check(driver.function_attribute(&fixed, kStaticShared, function), "read a kernel's shared memory");
        driver.check(
            driver.set_function_attribute(function, kLargestDynamicShared, device_->gpu.largest_shared - fixed),
            "set a kernel's shared memory");
      }
      functions_[v].push_back(function);
    }
  }
}

void Kernel::read_tensor(const OrtValue* value, size_t index, size_t* used, Workspace* work) const {
  TensorView& view = work->inputs[index];
  view = TensorView{};
  if (value == nullptr) return;
  view.present = true;
  view.address = reinterpret_cast<uint64_t>(api.data(value));
  if (!plan_.reads.sizes[index]) return;
  if (api.shape_reference()) {
    api.shape_of(value, &view.sizes, &view.rank);
    return;
  }
  OrtTensorTypeAndShapeInfo* info = api.shape_info(value);
  view.rank = api.rank(info);
  // Room for all axes was made before: growing here would move the sizes of the inputs already read.
  if (*used + view.rank > work->input_sizes.size()) {
    api.release(info);
    throw Error("an input has " + std::to_string(view.rank) + " axes");
  }
  int64_t* sizes = work->input_sizes.data() + *used;
  api.sizes(info, sizes, view.rank);
  api.release(info);
  view.sizes = sizes;
  *used += view.rank;
}

void Kernel::read_host(OrtKernelContext* context, size_t index, HostView* out) const {
  const OrtValue* value = api.input(context, index);
  if (value == nullptr) return;
  OrtTensorTypeAndShapeInfo* info = nullptr;
  int64_t copied[16];
  const int64_t* sizes = copied;
  size_t rank = 0;
  int type = 0;
  if (api.shape_reference()) {
    type = api.shape_of(value, &sizes, &rank);
  } else {
    info = api.shape_info(value);
    type = api.element_type(info);
    rank = api.rank(info);
    if (rank <= 16) api.sizes(info, copied, rank);
    api.release(info);
    if (rank > 16) throw Error("host input " + std::to_string(index) + " has " + std::to_string(rank) + " axes");
  }
  if (type != kInt64 && type != kInt32) {
    throw Error("host input " + std::to_string(index) + " has element type " + std::to_string(type) +
                "; the launch plan reads int64 and int32");
  }
  int64_t count = 1;
  for (size_t axis = 0; axis < rank; ++axis) count *= sizes[axis];
  *out = {api.data(value), count, type == kInt64, true};
}

void Kernel::read_inputs(OrtKernelContext* context, Workspace* work, HostView* hosts) const {
  const size_t count = api.input_count(context);
  if (count != kHostInputs + plan_.inputs) {
    throw Error("the node has " + std::to_string(count) + " inputs; its launch plan wants " +
                std::to_string(kHostInputs) + " host inputs and " + std::to_string(plan_.inputs) + " tensors");
  }
  for (size_t index = 0; index < kHostInputs; ++index) {
    if (plan_.reads.hosts[index]) read_host(context, index, &hosts[index]);
  }
  Workspace::room(&work->inputs, plan_.inputs);
  if (!api.shape_reference()) Workspace::room(&work->input_sizes, plan_.inputs * 32);
  size_t used = 0;
  for (size_t index = 0; index < plan_.inputs; ++index) {
    read_tensor(api.input(context, kHostInputs + index), index, &used, work);
  }
}

void Kernel::run(OrtKernelContext* context) {
  static thread_local Workspace work;
  HostView hosts[kHostInputs];
  read_inputs(context, &work, hosts);
  Situation situation;
  situation.inputs = work.inputs.data();
  situation.hosts = hosts;
  situation.capability = device_->capability();
  situation.multiprocessors = device_->gpu.multiprocessors;
  plan_.bind(&situation, Workspace::room(&work.symbols, plan_.symbols.size()));

  uint64_t* outputs = Workspace::room(&work.outputs, plan_.outputs.size());
  int64_t* sizes = Workspace::room(&work.output_sizes, plan_.most_axes);
  if (api.output_count(context) != plan_.outputs.size()) {
    throw Error("the node has " + std::to_string(api.output_count(context)) + " outputs; its launch plan wants " +
                std::to_string(plan_.outputs.size()));
  }
  for (size_t index = 0; index < plan_.outputs.size(); ++index) {
    const std::vector<Expression>& shape = plan_.outputs[index].shape;
    for (size_t axis = 0; axis < shape.size(); ++axis) {
      sizes[axis] = shape[axis].evaluate(situation);
      if (sizes[axis] < 0) {
        throw Error("axis " + std::to_string(axis) + " of output " + std::to_string(index) + " would have size " +
                    std::to_string(sizes[axis]));
      }
    }
    OrtValue* value = api.output(context, index, sizes, shape.size());
    if (value == nullptr) throw Error("output " + std::to_string(index) + " is absent");
    outputs[index] = reinterpret_cast<uint64_t>(api.data(value));
  }
  situation.output_addresses = outputs;
  const Variant& variant = plan_.choose(situation);
  if (recording.load(std::memory_order_relaxed)) {
    runs_[&variant - plan_.variants.data()].fetch_add(1, std::memory_order_relaxed);
  }
  if (!variant.steps.empty()) launch(variant, situation, static_cast<Stream>(api.stream(context)), &work);
}

void Kernel::launch(const Variant& variant, const Situation& situation, Stream stream, Workspace* work) const {
  const Driver& driver = device_->driver;
  // A worker of ONNX Runtime's parallel executor may never have seen this GPU.
  const Current current(driver, device_->context);

  // Scratch is ordered on the stream, so that runs on other streams never share it, and becomes part of a captured
  // graph like the launches themselves.
  struct Scratch {
    const Driver& driver;
    const Variant& variant;
    Stream stream;
    uint64_t* addresses;
    ~Scratch() {
      for (const uint32_t index : variant.scratch) {
        if (addresses[index] != 0) driver.free(addresses[index], stream);
      }
    }
  } scratch{driver, variant, stream, Workspace::room(&work->scratch, plan_.scratch.size())};
  for (const uint32_t index : variant.scratch) scratch.addresses[index] = 0;
  for (const uint32_t index : variant.scratch) {
    const int64_t size = plan_.scratch[index].evaluate(situation);
    if (size < 0) throw Error("scratch buffer " + std::to_string(index) + " would have size " + std::to_string(size));
    if (size == 0) continue;
    driver.check(driver.allocate(&scratch.addresses[index], static_cast<size_t>(size), pool_[0], stream),
                 "allocate scratch memory");
  }

  uint64_t* values = Workspace::room(&work->values, plan_.most_arguments);
  void** arguments = Workspace::room(&work->arguments, plan_.most_arguments);
  const std::vector<Function>& functions = functions_[&variant - plan_.variants.data()];
  for (size_t s = 0; s < variant.steps.size(); ++s) {
    const Step& step = variant.steps[s];
    Geometry size;
    if (!step.geometry(situation, &size)) continue;
    for (size_t a = 0; a < step.arguments.size(); ++a) {
      const Argument& argument = step.arguments[a];
      switch (argument.kind) {
        case Argument::Kind::kInput: values[a] = situation.inputs[argument.index].address; break;
        case Argument::Kind::kOutput: values[a] = situation.output_addresses[argument.index]; break;
        case Argument::Kind::kScratch: values[a] = scratch.addresses[argument.index]; break;
        default: values[a] = integer_argument(argument, situation); break;  // little-endian: 32 bits lie first
      }
      arguments[a] = &values[a];
    }
    const Result result =
        driver.launch(functions[s], size.grid[0], size.grid[1], size.grid[2], size.block[0], size.block[1],
                      size.block[2], size.shared, stream, arguments, nullptr);
    if (result != 0) {
      const auto three = [](const uint32_t* n) {
        return std::to_string(n[0]) + "x" + std::to_string(n[1]) + "x" + std::to_string(n[2]);
      };
      driver.fail(result, ("launch the kernel '" + step.kernel + "' with grid " + three(size.grid) + ", block " +
                           three(size.block) + " and " + std::to_string(size.shared) + " bytes of shared memory")
                              .c_str());
    }
  }
}

std::string Kernel::describe() const {
  std::string runs;
  for (const auto& count : runs_) runs += (runs.empty() ? "" : ",") + std::to_string(count.load());
  std::string variants;
  for (const Variant& variant : plan_.variants) variants += (variants.empty() ? "" : ",") + quoted(variant.name);
  return "{\"node\":" + quoted(node_) + ",\"op\":" + quoted(op_) + ",\"region\":" + quoted(region_) +
         ",\"variants\":[" + variants + "],\"runs\":[" + runs + "]}";
}

void set_recording(bool on) { recording = on; }

std::string live_kernels() {
  const std::lock_guard<std::mutex> lock(live_mutex);
  std::string out;
  for (const Kernel* kernel : live) out += (out.empty() ? "" : ",") + kernel->describe();
  return "[" + out + "]";
}

}  // namespace onnxfuse
