#include "cudnn.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <limits>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "cudnn_graph.h"
#include "ort_api.h"

namespace onnxfuse {
namespace {

using cudnn::Handle;
using cudnn::Library;
using cudnn::Object;

// cudnnDataType_t of float16, bfloat16 and tf32, in the order of the routine's types.
constexpr int kTypes[] = {2, 9, 0};
constexpr int kFloat32 = 0, kCrossCorrelation = 1, kModeA = 3;
// cudnnPointwiseMode_t: an addition; nothing, ReLU, GELU by tanh and SiLU, in the order of the routine's activations.
constexpr int kAdd = 0, kActivations[] = {-1, 100, 107, 106};
constexpr int kPropagatesNaN = 1;  // cudnnNanPropagation_t
// cudnnBackendNumericalNote_t: what engines do that a result must not hang on: sums in 16 bits, Fourier's or Winograd's
// transforms, and any order of what is added.
constexpr int kFirstRefused = 2, kLastRefused = 8;
constexpr int64_t kMostNotes = 16, kMostProposed = 64, kMostRank = 15;
constexpr size_t kMostKept = 64;  // plans of a call, by alignments and workspace
constexpr size_t kMostAxes = 3;
constexpr int64_t kMost = std::numeric_limits<int32_t>::max();

// Along one of the image's axes.
struct Axis {
  int64_t size, count, taps, step, apart, before;
  // Zeros behind the image: none where windows end before it does.
  int64_t after() const { return std::max<int64_t>(0, (count - 1) * step + (taps - 1) * apart + 1 - before - size); }
};

// The sizes of a call, in the order of the routine's.
struct Sizes {
  int64_t images, channels, results;
  std::array<Axis, kMostAxes> axes;  // the outermost first
  int64_t activation, algorithm;

  explicit Sizes(const std::vector<int64_t>& s)
      : images(s[0]), channels(s[1]), results(s[2]), activation(s[21]), algorithm(s[22]) {
    for (size_t axis = 0; axis < kMostAxes; ++axis) {
      const int64_t* const own = s.data() + 3 + axis * 6;
      axes[axis] = {own[0], own[1], own[2], own[3], own[4], own[5]};
    }
  }
  // Axes of more than one element, or with zeros around it; the library knows convolutions along two and three.
  size_t first() const {
    const Axis& outermost = axes[0];
    return outermost.size == 1 && outermost.count == 1 && outermost.taps == 1 && outermost.before == 0 ? 1 : 0;
  }
  // A size of each axis that counts.
  template <class Member>
  std::vector<int64_t> along(const Member& member) const {
    std::vector<int64_t> out;
    for (size_t axis = first(); axis < kMostAxes; ++axis) out.push_back(member(axes[axis]));
    return out;
  }
  std::string text() const {
    const auto list = [](const std::vector<int64_t>& sizes) {
      std::string out;
      for (const int64_t size : sizes) out += "x" + std::to_string(size);
      return out;
    };
    return std::to_string(images) + "x" + std::to_string(channels) + list(along([](const Axis& a) { return a.size; })) +
           " by " + std::to_string(results) + list(along([](const Axis& a) { return a.taps; }));
  }
};

// The library's handle on a GPU, made with the device's context current, and never destroyed: sessions that end with the
// process still use it.  A stream is set before each run, which the lock has to hold until the run was begun.
struct Shared {
  Handle handle = nullptr;
  std::mutex mutex;
};
Shared& shared_of(const Device& device) {
  static std::mutex mutex;
  static auto& all = *new std::unordered_map<int, Shared>;
  const Library& library = Library::get();
  const std::lock_guard<std::mutex> lock(mutex);
  Shared& found = all[device.ordinal];
  if (found.handle == nullptr) {
    const Current current(device.driver, device.context);
    const OutsideCaptures outside(device.driver);
    library.check(library.start(&found.handle), "start");
  }
  return found;
}

class Convolution : public PreparedCall {
 public:
  Convolution(Device& device, size_t type, const Sizes& sizes, bool biased, bool added)
      : driver_(device.driver), library_(Library::get()), shared_(shared_of(device)), type_(type), sizes_(sizes),
        running_("run the convolution " + sizes_.text()), biased_(biased), added_(added), operands_(3u + biased + added) {}

  size_t choose(const std::vector<uint64_t>& addresses, size_t most) override {
    if (std::count(addresses.begin(), addresses.begin() + static_cast<ptrdiff_t>(operands_), 0) > 0) {
      throw Error("an operand of the convolution " + sizes_.text() + " is absent");
    }
    std::vector<int64_t> alignments;
    for (size_t index = 0; index < operands_; ++index) alignments.push_back(alignment(addresses[index]));
    for (const auto& kept : kept_) {
      if (kept->alignments != alignments || kept->most != most) continue;
      chosen_ = kept.get();
      return chosen_->workspace;
    }
    const OutsideCaptures outside(driver_);
    auto made = std::make_unique<Way>();
    made->alignments = std::move(alignments);
    made->most = most;
    propose(made.get());
    if (kept_.size() == kMostKept) kept_.clear();
    kept_.push_back(std::move(made));
    chosen_ = kept_.back().get();
    return chosen_->workspace;
  }

  void run(const Operands& operands) override {
    // A kernel of the library may be loaded at its first launch, also while a graph is captured.
    const OutsideCaptures outside(driver_);
    Object pack(cudnn::kPack, running_);
    std::vector<int64_t> numbers;
    std::vector<const void*> addresses;
    for (size_t index = 0; index < operands_; ++index) {
      numbers.push_back(static_cast<int64_t>(index) + 1);
      addresses.push_back(reinterpret_cast<const void*>(operands.addresses[index]));
    }
    const void* const workspace = reinterpret_cast<const void*>(operands.workspace);
    pack.set(cudnn::kNumbers, numbers)
        .set(cudnn::kAddresses, cudnn::kPointer, addresses.data(), static_cast<int64_t>(addresses.size()))
        .set(cudnn::kWorkspace, cudnn::kPointer, &workspace)
        .finish();
    const std::lock_guard<std::mutex> lock(shared_.mutex);
    library_.check(library_.set_stream(shared_.handle, operands.stream), running_);
    library_.check(library_.execute(shared_.handle, chosen_->plan->get(), pack.get()), running_);
  }

 private:
  // How the library runs it with operands that are so aligned, with `most` bytes of workspace at most, of which it takes
  // so many; and all that its plan is made of.
  struct Way {
    std::vector<int64_t> alignments;
    size_t most = 0, workspace = 0;
    std::vector<std::unique_ptr<Object>> parts;
    std::unique_ptr<Object> plan;
  };

  std::string making() const { return "describe the convolution " + sizes_.text(); }

  Object& part(Way* way, cudnn::Kind kind) const {
    way->parts.push_back(std::make_unique<Object>(kind, making()));
    return *way->parts.back();
  }

  // A tensor of so many images, or results, by channels along axes, channels last in memory; a virtual one is of float32 and
  // never in memory.
  const Object& tensor(Way* way, int64_t outer, int64_t channels, const std::vector<int64_t>& axes, size_t operand,
                       bool is_virtual = false) const {
    std::vector<int64_t> sizes = {outer, channels}, strides(2 + axes.size());
    sizes.insert(sizes.end(), axes.begin(), axes.end());
    strides[1] = 1;
    int64_t stride = channels;
    for (size_t axis = sizes.size(); axis-- > 2; stride *= sizes[axis]) strides[axis] = stride;
    strides[0] = stride;
    Object& out = part(way, cudnn::kTensor);
    const int64_t number = is_virtual ? static_cast<int64_t>(way->parts.size()) + 100 : static_cast<int64_t>(operand) + 1;
    const int64_t aligned = is_virtual ? 16 : way->alignments[operand];
    const bool not_stored = is_virtual;
    out.set(cudnn::kElements, cudnn::kDataType, is_virtual ? kFloat32 : kTypes[type_])
        .set(cudnn::kSizes, sizes)
        .set(cudnn::kStrides, strides)
        .set(cudnn::kNumber, cudnn::kInt64, &number)
        .set(cudnn::kAlignment, cudnn::kInt64, &aligned)
        .set(cudnn::kVirtual, cudnn::kBoolean, &not_stored);
    return out.finish();
  }

  // A function of one tensor, or two, computed in float32.
  const Object& pointwise(Way* way, int mode, const Object& of, const Object* other, const Object& into) const {
    Object& function = part(way, cudnn::kPointwise);
    function.set(cudnn::kMode, cudnn::kPointwiseMode, mode).set(cudnn::kMathType, cudnn::kDataType, kFloat32);
    if (mode == kActivations[1]) function.set(cudnn::kPropagates, cudnn::kPropagation, kPropagatesNaN);
    function.finish();
    Object& out = part(way, cudnn::kPointwiseOperation);
    out.set(cudnn::kFunction, function).set(cudnn::kOperand, of).set(cudnn::kComputedInto, into);
    if (other != nullptr) out.set(cudnn::kOther, *other);
    return out.finish();
  }

  // The convolution and what follows it, as operations between tensors.
  const Object& graph(Way* way) const {
    const std::vector<int64_t> windows = sizes_.along([](const Axis& a) { return a.count; });
    const auto results = [&](size_t left) -> const Object& {
      return tensor(way, sizes_.images, sizes_.results, windows, operands_ - 1, left > 0);
    };
    size_t left = static_cast<size_t>(biased_) + added_ + (sizes_.activation != 0);
    const Object& image = tensor(way, sizes_.images, sizes_.channels, sizes_.along([](const Axis& a) { return a.size; }), 0);
    const Object& weights = tensor(way, sizes_.results, sizes_.channels, sizes_.along([](const Axis& a) { return a.taps; }), 1);
    const Object* last = &results(left);
    std::vector<cudnn::Descriptor> operations = {convolution(way, image, weights, *last).get()};
    const auto follow = [&](int mode, const Object* other) {
      const Object& next = results(--left);
      operations.push_back(pointwise(way, mode, *last, other, next).get());
      last = &next;
    };
    if (added_) follow(kAdd, &tensor(way, sizes_.images, sizes_.results, windows, operands_ - 2));
    if (biased_) follow(kAdd, &tensor(way, 1, sizes_.results, std::vector<int64_t>(windows.size(), 1), 2));
    if (sizes_.activation != 0) follow(kActivations[sizes_.activation], nullptr);
    Object& out = part(way, cudnn::kGraph);
    out.set(cudnn::kGraphHandle, cudnn::kHandle, &shared_.handle)
        .set(cudnn::kOperations, cudnn::kObject, operations.data(), static_cast<int64_t>(operations.size()));
    return out.finish();
  }

  const Object& convolution(Way* way, const Object& image, const Object& weights, const Object& into) const {
    Object& how = part(way, cudnn::kConvolution);
    const auto axes = static_cast<int64_t>(kMostAxes - sizes_.first());
    how.set(cudnn::kComputed, cudnn::kDataType, kFloat32)
        .set(cudnn::kDirection, cudnn::kConvolutionMode, kCrossCorrelation)
        .set(cudnn::kAxes, cudnn::kInt64, &axes)
        .set(cudnn::kBefore, sizes_.along([](const Axis& a) { return a.before; }))
        .set(cudnn::kAfter, sizes_.along([](const Axis& a) { return a.after(); }))
        .set(cudnn::kSteps, sizes_.along([](const Axis& a) { return a.step; }))
        .set(cudnn::kDilations, sizes_.along([](const Axis& a) { return a.apart; }))
        .finish();
    Object& out = part(way, cudnn::kConvolutionOperation);
    out.set(cudnn::kHow, how).set(cudnn::kImage, image).set(cudnn::kWeights, weights).set(cudnn::kResult, into)
        .set(cudnn::kAlpha, 1.0f).set(cudnn::kBeta, 0.0f);
    return out.finish();
  }

  // Whether an engine's results are those that are wanted: always the same, and summed in 32 bits.
  bool serves(const Object& configuration) const {
    std::vector<std::unique_ptr<Object>> engine;
    engine.push_back(std::make_unique<Object>(cudnn::kEngine, making()));
    int64_t count = 0;
    configuration.get(cudnn::kEngineOf, engine, &count);
    const std::vector<int> notes = engine.front()->get<int>(cudnn::kNotes, cudnn::kNote, kMostNotes);
    return std::none_of(notes.begin(), notes.end(), [](int note) { return note >= kFirstRefused && note <= kLastRefused; });
  }

  // The plan of the wanted rank among those that the library proposes and can make, the quickest as it takes them first; the
  // last one where there are fewer, as there may be at other sizes than those that the rank was measured at.
  void propose(Way* way) const {
    const Object& operations = graph(way);
    Object& heuristic = part(way, cudnn::kHeuristic);
    heuristic.set(cudnn::kOf, operations).set(cudnn::kAsked, cudnn::kHeuristicMode, kModeA).finish();
    std::vector<std::unique_ptr<Object>> proposed;
    while (proposed.size() < kMostProposed) proposed.push_back(std::make_unique<Object>(cudnn::kConfiguration, making()));
    int64_t count = 0;
    heuristic.get(cudnn::kResults, proposed, &count);
    proposed.resize(static_cast<size_t>(std::min(count, kMostProposed)));
    int64_t rank = -1;
    for (auto& configuration : proposed) {
      if (rank == sizes_.algorithm) break;
      if (!serves(*configuration)) continue;
      auto plan = std::make_unique<Object>(cudnn::kPlan, making());
      plan->set(cudnn::kPlanHandle, cudnn::kHandle, &shared_.handle).set(cudnn::kPlanOf, *configuration);
      if (!plan->finishes()) continue;
      const auto bytes = plan->get<int64_t>(cudnn::kWorkspaceSize, cudnn::kInt64, 1);
      if (bytes.empty() || bytes.front() < 0 || static_cast<uint64_t>(bytes.front()) > way->most) continue;
      way->parts.push_back(std::move(configuration));
      way->plan = std::move(plan);
      way->workspace = static_cast<size_t>(bytes.front());
      ++rank;
    }
    if (way->plan == nullptr) throw Error("cuDNN has no plan for the convolution " + sizes_.text());
  }

  const Driver& driver_;
  const Library& library_;
  Shared& shared_;
  const size_t type_;
  const Sizes sizes_;
  const std::string running_;  // what fails where a run does: made once, runs are many
  const bool biased_, added_;
  const size_t operands_;  // x, w, the bias where there is one, what is added where it is, y
  std::vector<std::unique_ptr<Way>> kept_;
  const Way* chosen_ = nullptr;
};

const std::vector<std::string_view> kSizes = {
    "images", "channels", "results", "size_z", "count_z", "taps_z", "step_z", "apart_z", "before_z", "size_y", "count_y",
    "taps_y", "step_y", "apart_y", "before_y", "size_x", "count_x", "taps_x", "step_x", "apart_x", "before_x", "activation",
    "algorithm"};

// Throws Error where tensors of so many elements have more than 2^48.
void check_elements(int64_t first, int64_t second, const std::vector<int64_t>& axes) {
  int64_t product = first;
  const auto times = [&](int64_t size) {
    constexpr int64_t kMostElements = int64_t{1} << 48;
    if (size != 0 && product > kMostElements / size) throw Error("a conv of the launch plan has more than 2^48 elements");
    product *= size;
  };
  times(second);
  for (const int64_t size : axes) times(size);
}

bool fits(const std::vector<int64_t>& values) {
  const Sizes sizes(values);
  const auto check = [&](size_t index, int64_t least, int64_t most) {
    if (values[index] >= least && values[index] <= most) return;
    throw Error("a conv of the launch plan has the " + std::string(kSizes[index]) + " " + std::to_string(values[index]) +
                "; it is " + std::to_string(least) + " to " + std::to_string(most));
  };
  for (size_t index = 0; index < 3; ++index) check(index, 0, kMost);
  for (size_t axis = 0; axis < kMostAxes; ++axis) {
    const size_t own = 3 + axis * 6;
    for (size_t index = own; index < own + 2; ++index) check(index, 0, kMost);
    for (size_t index = own + 2; index < own + 5; ++index) check(index, 1, kMost);
    check(own + 5, 0, kMost);
  }
  check(21, 0, static_cast<int64_t>(std::size(kActivations)) - 1);
  check(22, 0, kMostRank);
  const auto none = [](const Axis& axis) { return axis.count == 0; };
  if (sizes.images == 0 || sizes.results == 0 || std::any_of(sizes.axes.begin(), sizes.axes.end(), none)) return false;
  check(1, 1, kMost);  // an empty sum would have to be written as zeros
  for (size_t axis = 0; axis < kMostAxes; ++axis) {
    check(3 + axis * 6, 1, kMost);
    const Axis& own = sizes.axes[axis];
    // So many windows, and no more, lie in the image with its zeros.
    const int64_t span = (own.taps - 1) * own.apart + 1, held = own.size + own.before + own.after();
    if (held < span || (held - span) / own.step + 1 != own.count) {
      throw Error("a conv of the launch plan has " + std::to_string(own.count) + " windows along an axis that has other ones");
    }
  }
  check_elements(sizes.images, sizes.channels, sizes.along([](const Axis& a) { return a.size; }));
  check_elements(sizes.images, sizes.results, sizes.along([](const Axis& a) { return a.count; }));
  check_elements(sizes.results, sizes.channels, sizes.along([](const Axis& a) { return a.taps; }));
  return true;
}

template <bool biased, bool added>
Routine routine(const char* name) {
  return {
      name,
      {"float16", "bfloat16", "tf32"},
      3u + biased + added,
      kSizes,
      fits,
      [](Device& device) { shared_of(device); },
      [](Device& device, size_t type, const std::vector<int64_t>& sizes) -> std::unique_ptr<PreparedCall> {
        return std::make_unique<Convolution>(device, type, Sizes(sizes), biased, added);
      },
  };
}

}  // namespace

const Routine& conv_routine(bool biased, bool added) {
  static const Routine made[2][2] = {{routine<false, false>("conv"), routine<false, true>("conv_add")},
                                     {routine<true, false>("conv_bias"), routine<true, true>("conv_bias_add")}};
  return made[biased][added];
}

}  // namespace onnxfuse
