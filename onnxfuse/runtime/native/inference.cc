#include "inference.h"

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "plan.h"

namespace onnxfuse {
namespace {

// The runtime asks for every node anew after each of its optimisations, and most nodes share a plan with others.
std::shared_ptr<const Plan> plan_of(std::string text) {
  static constexpr size_t kMost = 1024, kMostBytes = 64 << 20;  // of their texts
  static std::mutex mutex;
  static auto& known = *new std::map<std::string, std::shared_ptr<const Plan>>;
  static size_t bytes = 0;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(text);
  if (found != known.end()) return found->second;
  auto plan = std::make_shared<const Plan>(Plan::parse(text));
  if (known.size() >= kMost || bytes + text.size() > kMostBytes) known.clear(), bytes = 0;
  bytes += text.size();
  return known.emplace(std::move(text), std::move(plan)).first->second;
}

// One size of an output: a number, or a name.
struct Size {
  int64_t value = -1;
  std::string name;
};

Size own_name() {
  static std::atomic<uint64_t> count{0};
  return {-1, "onnxfuse_size_" + std::to_string(count++)};
}

// What the runtime knows of an axis of a tensor input; it shows an unknown shape as one without axes.
Size size_of(const Api& api, const OrtShapeInferContext* context, const AxisOf& axis) {
  const OrtTensorTypeAndShapeInfo* const info = api.inferred_input(context, kHostInputs + axis.input);
  const size_t rank = api.rank(info);
  if (axis.axis >= rank) return own_name();
  std::vector<int64_t> sizes(rank);
  std::vector<const char*> names(rank);
  api.sizes(info, sizes.data(), rank);
  api.size_names(info, names.data(), rank);
  const char* const name = names[axis.axis];
  if (name != nullptr && *name != '\0') return {-1, name};
  return sizes[axis.axis] >= 0 ? Size{sizes[axis.axis], ""} : own_name();
}

Size size_of(const Api& api, const OrtShapeInferContext* context, const Plan& plan, const Expression& size) {
  int64_t value = 0;
  if (size.constant(&value)) return value >= 0 ? Size{value, ""} : own_name();  // a run will say that it is wrong
  AxisOf axis;
  return size.axis(plan.symbols, &axis) ? size_of(api, context, axis) : own_name();
}

}  // namespace

void infer_outputs(const Api& api, OrtShapeInferContext* context) {
  std::string text;
  if (!api.string_attribute(context, "plan", &text)) throw Error("the node has no attribute 'plan'");
  const std::shared_ptr<const Plan> plan = plan_of(std::move(text));
  for (size_t index = 0; index < plan->outputs.size(); ++index) {
    const Output& output = plan->outputs[index];
    std::vector<Size> sizes;
    for (const Expression& size : output.shape) sizes.push_back(size_of(api, context, *plan, size));
    std::vector<int64_t> values;
    std::vector<const char*> names;
    for (const Size& size : sizes) values.push_back(size.value), names.push_back(size.name.c_str());
    api.infer_output(context, index, static_cast<int>(output.type), values, names);
  }
}

}  // namespace onnxfuse
