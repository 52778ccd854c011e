#include "prepared.h"

#include <algorithm>
#include <utility>

#include "json.h"
#include "ort_api.h"
#include "texts.h"

namespace onnxfuse {
namespace {

// An absent input in the key, where a rank or a count stands else.
constexpr int64_t kAbsent = -1;

int64_t element(const HostView& host, int64_t index) {
  return host.wide ? static_cast<const int64_t*>(host.data)[index] : static_cast<const int32_t*>(host.data)[index];
}

}  // namespace

Prepared::Prepared(const Plan& plan, int capability, int multiprocessors)
    : inputs(plan.inputs), outputs(plan.outputs.size()), input_sizes(plan.sized.size() * kMostAxes), plan_(plan) {
  for (const Output& output : plan.outputs) {
    first_size_.push_back(axes_);
    axes_ += output.shape.size();
  }
  situation_.inputs = inputs.data();
  situation_.hosts = hosts;
  situation_.output_addresses = outputs.data();
  situation_.capability = capability;
  situation_.multiprocessors = multiprocessors;
}

void Prepared::make(State* state) const {
  state->symbols.resize(plan_.symbols.size());
  state->output_sizes.resize(axes_ + 1);  // never empty: a scalar's sizes have an address too
  std::vector<Launches> made(plan_.variants.size());  // kept whole or, where memory runs out, not at all
  for (size_t v = 0; v < plan_.variants.size(); ++v) {
    const Variant& variant = plan_.variants[v];
    Launches& launches = made[v];
    launches.scratch = ScratchLayout(variant.scratch.size());
    launches.buffers.resize(plan_.scratch.size());
    launches.steps.resize(variant.steps.size());
    for (size_t s = 0; s < variant.steps.size(); ++s) {
      Launch& launch = launches.steps[s];
      launch.values.resize(variant.steps[s].arguments.size());
      for (uint64_t& value : launch.values) launch.arguments.push_back(&value);
      launch.sizes.resize(variant.steps[s].sizes.size());
    }
  }
  state->maps.resize(plan_.maps.size());
  state->launches = std::move(made);
}

bool Prepared::matches(const State& state) const {
  const int64_t* known = state.key.data();
  for (const uint32_t index : plan_.sized) {
    const TensorView& input = inputs[index];
    if (*known++ != (input.present ? static_cast<int64_t>(input.rank) : kAbsent)) return false;
    for (size_t axis = 0; axis < input.rank; ++axis) {
      if (*known++ != input.sizes[axis]) return false;
    }
  }
  for (const uint32_t index : plan_.hosted) {
    const HostView& host = hosts[index];
    if (*known++ != (host.present ? host.count : kAbsent)) return false;
    const int64_t read = std::min(host.count, plan_.reads.hosts[index]);
    for (int64_t at = 0; at < read; ++at) {
      if (*known++ != element(host, at)) return false;
    }
  }
  return true;
}

void Prepared::remember(State* state) const {
  std::vector<int64_t>& key = state->key;
  key.clear();
  for (const uint32_t index : plan_.sized) {
    const TensorView& input = inputs[index];
    key.push_back(input.present ? static_cast<int64_t>(input.rank) : kAbsent);
    key.insert(key.end(), input.sizes, input.sizes + input.rank);
  }
  for (const uint32_t index : plan_.hosted) {
    const HostView& host = hosts[index];
    key.push_back(host.present ? host.count : kAbsent);
    const int64_t read = std::min(host.count, plan_.reads.hosts[index]);
    for (int64_t at = 0; at < read; ++at) key.push_back(element(host, at));
  }
}

void Prepared::enter(State* state) {
  now_ = state;
  situation_.symbols = state->symbols.data();
}

void Prepared::update() {
  if (plan_.repeats) {
    if (now_->valid && matches(*now_)) return;
    for (State& state : states_) {
      if (&state != now_ && state.valid && matches(state)) return enter(&state);
    }
  }
  State* const next = plan_.repeats && now_->valid ? &states_[(now_ - states_ + 1) % kKept] : now_;
  next->valid = false;
  if (next->launches.empty()) make(next);
  for (Launches& launches : next->launches) launches.ready = launches.refused = false;
  enter(next);
  evaluate(next);
  remember(next);
  next->valid = true;
}

void Prepared::evaluate(State* state) const {
  for (size_t index = 0; index < state->symbols.size(); ++index) {
    state->symbols[index] = plan_.symbols[index].evaluate(situation_);
  }
  for (const Check& check : plan_.checks) {
    if (check.condition.evaluate(situation_) == 0) throw Error(visible(check.message));
  }
  for (size_t index = 0; index < plan_.outputs.size(); ++index) {
    const std::vector<Expression>& shape = plan_.outputs[index].shape;
    int64_t* sizes = state->output_sizes.data() + first_size_[index];
    for (size_t axis = 0; axis < shape.size(); ++axis) {
      sizes[axis] = shape[axis].evaluate(situation_);
      if (sizes[axis] < 0) {
        throw Error("axis " + std::to_string(axis) + " of output " + std::to_string(index) + " would have size " +
                    std::to_string(sizes[axis]));
      }
    }
  }
  state->eligible.clear();
  for (size_t v = 0; v < plan_.variants.size(); ++v) {
    const Variant& variant = plan_.variants[v];
    const auto holds = [&](const Expression& guard) { return guard.evaluate(situation_) != 0; };
    if (!std::all_of(variant.guards.begin(), variant.guards.end(), holds)) continue;
    state->eligible.push_back(static_cast<uint32_t>(v));
    if (variant.alignments.empty() && variant.address_guards.empty() && !variant.calls) break;
  }
}

size_t Prepared::choose() const {
  for (const uint32_t index : now_->eligible) {
    if (now_->launches[index].refused) continue;
    const Variant& variant = plan_.variants[index];
    const auto aligned = [&](const Alignment& alignment) {
      const uint64_t address = alignment.output ? outputs[alignment.index] : inputs[alignment.index].address;
      return (address & alignment.mask) == 0;
    };
    const auto holds = [&](const Expression& guard) { return guard.evaluate(situation_) != 0; };
    if (std::all_of(variant.alignments.begin(), variant.alignments.end(), aligned) &&
        std::all_of(variant.address_guards.begin(), variant.address_guards.end(), holds)) {
      return index;
    }
  }
  return plan_.variants.size() - 1;
}

void Prepared::fill(size_t index, Launches* out) {
  const Variant& variant = plan_.variants[index];
  for (size_t buffer = 0; buffer < variant.scratch.size(); ++buffer) {
    const int64_t size = plan_.scratch[variant.scratch[buffer]].evaluate(situation_);
    if (size < 0) {
      throw Error("scratch buffer " + std::to_string(variant.scratch[buffer]) + " would have size " +
                  std::to_string(size));
    }
    out->scratch.sizes[buffer] = size;
  }
  out->scratch.arrange(variant.lives);
  for (size_t s = 0; s < variant.steps.size(); ++s) {
    const Step& step = variant.steps[s];
    Launch& launch = out->steps[s];
    if (step.routine != nullptr) fill_call(variant, step, out->scratch, &launch);
    else fill_kernel(step, &launch);
  }
  out->ready = true;
}

void Prepared::fill_kernel(const Step& step, Launch* launch) {
  launch->empty = !step.geometry(situation_, &launch->size);
  if (launch->empty) return;
  for (size_t a = 0; a < step.arguments.size(); ++a) {
    const Argument& argument = step.arguments[a];
    if (argument.integer()) {
      launch->values[a] = integer_argument(argument, situation_);  // little-endian: 32 bits lie first
    } else if (!argument.address()) {
      now_->maps[argument.index].resize(TensorSizes::of(plan_.maps[argument.index], situation_));
    }
  }
}

void Prepared::fill_call(const Variant& variant, const Step& step, const ScratchLayout& scratch,
                         Launch* launch) const {
  bool changed = false;
  for (size_t index = 0; index < step.sizes.size(); ++index) {
    const int64_t size = step.sizes[index].evaluate(situation_);
    changed |= std::exchange(launch->sizes[index], size) != size;
  }
  if (changed) launch->call.reset();
  launch->empty = !step.routine->fits(launch->sizes);
  if (const Argument* workspace = step.workspace()) {
    const auto buffer = std::lower_bound(variant.scratch.begin(), variant.scratch.end(), workspace->index);
    launch->workspace = static_cast<size_t>(scratch.sizes[static_cast<size_t>(buffer - variant.scratch.begin())]);
  }
}

namespace {

std::string number(int64_t value) { return std::to_string(value); }

template <class Items, class Text>
std::string list(const Items& items, const Text& text) {
  std::string out;
  for (const auto& item : items) out += (out.empty() ? "" : ",") + text(item);
  return "[" + out + "]";
}

std::string name(const Argument& item) {
  const char* const kinds = "iot";  // in the order of Argument::Kind
  return std::string("\"") + kinds[static_cast<int>(item.kind)] + number(item.index) + '"';
}

// A tensor map as its tensor and its sizes.
std::string describe(const TensorMap& map, const TensorSizes& sizes) {
  const auto first = [](const uint64_t* values, size_t count) {
    return list(std::vector<uint64_t>(values, values + count), number);
  };
  return "{\"base\":" + name(map.base) + ",\"sizes\":" + first(sizes.sizes, map.rank) +
         ",\"strides\":" + first(sizes.strides, map.rank - 1) + "}";
}

std::string describe(const Plan& plan, const Step& step, const Prepared::Launch& launch, const Prepared& prepared) {
  if (launch.empty) return "null";
  size_t position = 0;
  const auto argument = [&](const Argument& item) -> std::string {
    const int64_t value = static_cast<int64_t>(launch.values[position++]);
    if (item.integer()) return number(value);
    return item.address() ? name(item) : describe(plan.maps[item.index], prepared.map_sizes(item.index));
  };
  if (step.routine != nullptr) {
    return "{\"call\":" + quoted(step.routine->name) + ",\"type\":" + quoted(step.routine->types[step.type]) +
           ",\"args\":" + list(step.arguments, argument) + ",\"sizes\":" + list(launch.sizes, number) + "}";
  }
  return "{\"kernel\":" + quoted(step.kernel) + ",\"grid\":" + list(launch.size.grid, number) +
         ",\"block\":" + list(launch.size.block, number) + ",\"shared\":" + number(launch.size.shared) +
         ",\"args\":" + list(step.arguments, argument) +
         (step.clustered ? ",\"cluster\":" + list(launch.size.cluster, number) : "") +
         (step.dependent ? ",\"dependent\":true" : "") + "}";
}

std::string evaluate_run(const Plan& plan, const Json& run, Prepared* prepared) {
  const auto lists = [&](const char* key) {
    std::vector<std::vector<int64_t>> out;
    for (const Json& item : run.member(key).list(key)) out.push_back(item.integers(key));
    return out;
  };
  const auto addresses = [&](const char* key, size_t count) {
    auto out = run.member(key).integers(key);
    out.resize(count);
    return out;
  };
  const auto inputs = lists("inputs"), hosts = lists("hosts");
  const auto input_addresses = addresses("input_addresses", plan.inputs);
  const auto output_addresses = addresses("output_addresses", plan.outputs.size());
  // All of them: what a run does not give is absent, and never the memory of the run before, which has ended.
  for (size_t i = 0; i < plan.inputs; ++i) {
    prepared->inputs[i] = TensorView{};
    if (i >= inputs.size()) continue;
    prepared->inputs[i] = {inputs[i].data(), inputs[i].size(), static_cast<uint64_t>(input_addresses[i]), true};
  }
  for (size_t i = 0; i < kHostInputs; ++i) {
    prepared->hosts[i] = HostView{};
    if (i >= hosts.size()) continue;
    prepared->hosts[i] = {hosts[i].data(), static_cast<int64_t>(hosts[i].size()), true, true};
  }
  prepared->update();
  std::copy(output_addresses.begin(), output_addresses.end(), prepared->outputs.begin());
  const size_t chosen = prepared->choose();
  const Prepared::Launches& launches = prepared->launches(chosen);
  size_t index = 0, step = 0;
  const auto shape = [&](const Output& output) {
    const int64_t* sizes = prepared->output_sizes(index++);
    return list(std::vector<int64_t>(sizes, sizes + output.shape.size()), number);
  };
  const auto launch = [&](const Step& item) { return describe(plan, item, launches.steps[step++], *prepared); };
  return "{\"symbols\":" + list(prepared->symbols(), number) + ",\"outputs\":" + list(plan.outputs, shape) +
         ",\"variant\":" + std::to_string(chosen) + ",\"scratch\":" + list(launches.scratch.sizes, number) +
         ",\"places\":" + list(launches.scratch.offsets, number) +
         ",\"memory\":" + number(launches.scratch.total) +
         ",\"steps\":" + list(plan.variants[chosen].steps, launch) + "}";
}

}  // namespace

std::string evaluate_plan(std::string_view plan_text, std::string_view situation_text) {
  const Plan plan = Plan::parse(plan_text);
  const Json json = Json::parse(situation_text);
  Prepared prepared(plan, static_cast<int>(json.member("sm").integer("'sm'")),
                    static_cast<int>(json.member("sms").integer("'sms'")));
  return list(json.member("runs").list("'runs'"), [&](const Json& run) {
    try {
      return evaluate_run(plan, run, &prepared);
    } catch (const Error& error) {
      return "{\"error\":" + quoted(error.what()) + "}";
    }
  });
}

}  // namespace onnxfuse
