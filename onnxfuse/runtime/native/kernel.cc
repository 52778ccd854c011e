#include "kernel.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <set>
#include <utility>

#include "json.h"
#include "launch.h"
#include "ranges.h"
#include "sha256.h"
#include "texts.h"

namespace onnxfuse {

namespace {

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

Kernel::Kernel(const Runtime& runtime, const OrtKernelInfo* info, const std::string& op)
    : api(runtime.api), node_(api.node_name(info)), op_(op) {
  try {
    create(runtime, info);
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

std::string Kernel::label() const {
  return "node '" + excerpt(node_) + "' (" + op_ + (region_.empty() ? "" : ", " + excerpt(region_)) + ")";
}

void Kernel::create(const Runtime& runtime, const OrtKernelInfo* info) {
  std::string text, source;
  if (!api.string_attribute(info, "plan", &text)) throw Error("the node has no attribute 'plan'");
  if (!api.string_attribute(info, "source", &source)) throw Error("the node has no attribute 'source'");
  Device& device = Device::at(api.device(info));
  const auto attribute = [&](const char* name, std::string* bytes) { return api.bytes_attribute(info, name, bytes); };
  const char* origin = nullptr;
  try {
    program_ = Program::of(&device, text, source, attribute, &origin);
  } catch (const Error&) {
    region_ = Plan::region_of(text);
    throw;
  }
  const Plan& plan = program_->plan;
  region_ = plan.region;
  runs_.resize(plan.variants.size());
  // A node has as many inputs and outputs in every run as it has here.
  const size_t inputs = api.node_inputs(info), outputs = api.node_outputs(info);
  if (inputs != kHostInputs + plan.inputs) {
    throw Error("the node has " + std::to_string(inputs) + " inputs; its launch plan wants " +
                std::to_string(kHostInputs) + " host inputs and " + std::to_string(plan.inputs) + " tensors");
  }
  if (outputs != plan.outputs.size()) {
    throw Error("the node has " + std::to_string(outputs) + " outputs; its launch plan wants " +
                std::to_string(plan.outputs.size()));
  }
  if (verbose() && program_->kernels > 0) {
    say(label() + ": " + std::to_string(program_->kernels) + " kernels for " + device.architecture() + ", " + origin);
  }
  if (verbose() && !program_->missing.empty()) say(label() + ": a generated kernel runs, for there is " +
                                                   program_->missing);
  std::vector<std::string> variants;
  for (const Variant& variant : plan.variants) variants.push_back(variant.name);
  NodeFacts facts{node_, op_, region_, kernel_digest(source, plan.options), sha256(text), std::move(variants),
                  plan.inputs, runtime.release};
  statistics_ = NodeStatistics::wanted(std::move(facts), device);
  range_ = node_ + " (" + region_ + ")";
  watched_ = statistics_ != nullptr || ranges_wanted();
}

void Kernel::read_tensor(const OrtValue* value, size_t index, size_t* used, Prepared* now) const {
  TensorView& view = now->inputs[index];
  view = TensorView{};
  if (value == nullptr) return;
  view.present = true;
  view.address = reinterpret_cast<uint64_t>(api.data(value));
  if (!program_->plan.reads.sizes[index]) return;
  if (api.shape_reference()) {
    api.shape_of(value, &view.sizes, &view.rank);
    return;
  }
  const ShapeInfo info(api, api.shape_info(value));
  const size_t rank = info.rank();
  int64_t* sizes = now->input_sizes.data() + *used;
  if (rank > kMostAxes) throw Error("tensor input " + std::to_string(index) + " has " + std::to_string(rank) + " axes");
  info.sizes(sizes, rank);
  view.sizes = sizes;
  view.rank = rank;
  *used += rank;
}

void Kernel::read_host(OrtKernelContext* context, size_t index, HostView* out) const {
  const OrtValue* value = api.input(context, index);
  if (value == nullptr) return;
  int64_t copied[kMostAxes];
  const int64_t* sizes = copied;
  size_t rank = 0;
  int type = 0;
  if (api.shape_reference()) {
    type = api.shape_of(value, &sizes, &rank);
  } else {
    const ShapeInfo info(api, api.shape_info(value));
    type = info.element_type();
    rank = info.rank();
    if (rank > kMostAxes) throw Error("host input " + std::to_string(index) + " has " + std::to_string(rank) + " axes");
    info.sizes(copied, rank);
  }
  if (type != kInt64 && type != kInt32) {
    throw Error("host input " + std::to_string(index) + " has element type " + std::to_string(type) +
                "; the launch plan reads int64 and int32");
  }
  const int64_t count = elements({sizes, rank, 0, true});
  *out = {api.data(value), count, type == kInt64, true};
}

void Kernel::read_inputs(OrtKernelContext* context, Prepared* now) const {
  for (const uint32_t index : program_->plan.hosted) {
    now->hosts[index] = HostView{};
    read_host(context, index, &now->hosts[index]);
  }
  size_t used = 0;
  for (size_t index = 0; index < program_->plan.inputs; ++index) {
    read_tensor(api.input(context, kHostInputs + index), index, &used, now);
  }
}

void Kernel::run(OrtKernelContext* context) {
  Prepared& now = program_->prepared();
  read_inputs(context, &now);
  now.update();
  for (size_t index = 0; index < program_->plan.outputs.size(); ++index) {
    OrtValue* value = api.output(context, index, now.output_sizes(index), program_->plan.outputs[index].shape.size());
    if (value == nullptr) throw Error("output " + std::to_string(index) + " is absent");
    now.outputs[index] = reinterpret_cast<uint64_t>(api.data(value));
  }
  size_t variant = now.choose();
  while (program_->plan.variants[variant].calls && !choose_calls(variant, &now)) variant = now.choose();
  if (recording.load(std::memory_order_relaxed)) runs_[variant].fetch_add(1, std::memory_order_relaxed);
  if (program_->functions[variant].empty()) return;
  const auto stream = static_cast<Stream>(api.stream(context));
  if (watched_) launch_watched(context, variant, stream, &now);
  else launch(variant, stream, &now, nullptr);
}

void Kernel::launch_watched(OrtKernelContext* context, size_t variant, Stream stream, Prepared* now) const {
  const Range range(range_);
  if (statistics_ == nullptr) return launch(variant, stream, now, nullptr);
  const Current current(program_->device.driver, program_->device.context);
  NodeStatistics::Call call(*statistics_, variant, shapes(context, *now), stream);
  launch(variant, stream, now, &call);
}

Shapes Kernel::shapes(OrtKernelContext* context, const Prepared& now) const {
  Shapes out;
  for (size_t index = 0; index < program_->plan.inputs; ++index) {
    const OrtValue* value = api.input(context, kHostInputs + index);
    if (value == nullptr) {
      out.push_back(-1);
      continue;
    }
    const ShapeInfo info(api, api.shape_info(value));
    const size_t rank = info.rank(), first = out.size() + 1;
    out.push_back(static_cast<int64_t>(rank));
    out.resize(first + rank);
    info.sizes(out.data() + first, rank);
  }
  for (size_t index = 0; index < program_->plan.outputs.size(); ++index) {
    const size_t rank = program_->plan.outputs[index].shape.size();
    const int64_t* sizes = now.output_sizes(index);
    out.push_back(static_cast<int64_t>(rank));
    out.insert(out.end(), sizes, sizes + rank);
  }
  return out;
}

bool Kernel::choose_calls(size_t chosen, Prepared* now) const {
  const Variant& variant = program_->plan.variants[chosen];
  Prepared::Launches& launches = now->launches(chosen);
  const Current current(program_->device.driver, program_->device.context);
  const auto address = [&](const Argument& argument) -> uint64_t {
    switch (argument.kind) {
      case Argument::Kind::kInput: return now->inputs[argument.index].address;
      case Argument::Kind::kOutput: return now->outputs[argument.index];
      default: return ScratchLayout::kAlignment;  // so aligned it will be
    }
  };
  try {
    for (size_t s = 0; s < variant.steps.size(); ++s) {
      const Step& step = variant.steps[s];
      Prepared::Launch& launch = launches.steps[s];
      if (step.routine == nullptr || launch.empty) continue;
      if (launch.call == nullptr) launch.call = step.routine->prepare(program_->device, step.type, launch.sizes);
      for (const uint32_t a : step.addresses) launch.values[a] = address(step.arguments[a]);
      launch.room = launch.call->choose(launch.values, launch.workspace);
    }
  } catch (const Error&) {
    if (chosen + 1 == program_->plan.variants.size()) throw;
    launches.refused = true;
    return false;
  }
  // A workspace is as large as what was chosen takes, so that most runs allocate none.
  bool changed = false;
  for (const uint32_t place : variant.workspaces) {
    size_t room = 0;
    for (size_t s = 0; s < variant.steps.size(); ++s) {
      const Argument* const workspace = variant.steps[s].workspace();
      if (workspace == nullptr || workspace->index != variant.scratch[place] || launches.steps[s].empty) continue;
      room = std::max(room, launches.steps[s].room);
    }
    const auto size = static_cast<int64_t>(room);
    changed |= std::exchange(launches.scratch.sizes[place], size) != size;
  }
  if (changed) launches.scratch.arrange(variant.lives);
  return true;
}

void Kernel::launch(size_t chosen, Stream stream, Prepared* now, NodeStatistics::Call* call) const {
  const Driver& driver = program_->device.driver;
  const Variant& variant = program_->plan.variants[chosen];
  Prepared::Launches& launches = now->launches(chosen);
  // A worker of ONNX Runtime's parallel executor may never have seen this GPU.
  const Current current(driver, program_->device.context);

  // Scratch is ordered on the stream, so that runs on other streams never share it, and becomes part of a captured
  // graph like the launches themselves.
  struct Scratch {
    const Driver& driver;
    Stream stream;
    Address block = 0;
    ~Scratch() {
      if (block != 0) driver.free(block, stream);
    }
  } scratch{driver, stream};
  const ScratchLayout& layout = launches.scratch;
  if (layout.total != 0) {
    driver.check(driver.allocate(&scratch.block, static_cast<size_t>(layout.total), program_->pool, stream),
                 "allocate scratch memory");
  }
  for (size_t buffer = 0; buffer < layout.sizes.size(); ++buffer) {
    launches.buffers[variant.scratch[buffer]] =
        layout.sizes[buffer] == 0 ? 0 : scratch.block + static_cast<Address>(layout.offsets[buffer]);
  }

  const auto address = [&](const Argument& argument) {
    switch (argument.kind) {
      case Argument::Kind::kInput: return now->inputs[argument.index].address;
      case Argument::Kind::kOutput: return now->outputs[argument.index];
      default: return launches.buffers[argument.index];
    }
  };
  for (size_t s = 0; s < variant.steps.size(); ++s) {
    const Step& step = variant.steps[s];
    Prepared::Launch& launch = launches.steps[s];
    if (launch.empty) continue;
    for (const uint32_t a : step.addresses) launch.values[a] = address(step.arguments[a]);
    for (const uint32_t a : step.maps) {
      const uint32_t map = step.arguments[a].index;
      launch.arguments[a] = now->tensor_map(map, address(program_->plan.maps[map].base), driver);
    }
    if (call != nullptr) call->start();
    if (step.routine != nullptr) {
      const Argument* const workspace = step.workspace();
      const Address room = workspace == nullptr ? 0 : launches.buffers[workspace->index];
      launch.call->run({launch.values, room, launch.room, stream});
      continue;
    }
    launch_kernel(driver, step, launch.size, program_->functions[chosen][s], stream, launch.arguments.data());
  }
  if (call != nullptr) call->stop();
}

std::string Kernel::describe() const {
  std::string runs;
  for (const auto& count : runs_) runs += (runs.empty() ? "" : ",") + std::to_string(count.load());
  std::string variants;
  for (const Variant& variant : program_->plan.variants) {
    variants += (variants.empty() ? "" : ",") + quoted(variant.name);
  }
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
