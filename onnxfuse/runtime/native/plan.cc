#include "plan.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "json.h"
#include "ort_api.h"
#include "reading.h"
#include "texts.h"

namespace onnxfuse {
namespace {

// What every release reads, and the version that asks for what onnxfuse/lowering/launch.py tells of it.
constexpr int64_t kVersion = 1, kExtended = 2;
// Blocks of a cluster that every GPU with clusters takes; more need a kernel that is set up for it.
constexpr uint64_t kMostCluster = 8;
constexpr Lifetime kNever{UINT32_MAX, 0};
constexpr int64_t kMostType = 63, kStringType = 8;  // of onnx.TensorProto.DataType; kernels write no strings

Step parse_step(const Json& json, const Named& named, Reads* reads) {
  const Scope& scope = named.scope;
  Step out;
  out.kernel = words(json.member("kernel"), "'kernel'");
  const auto three = [&](const char* key, Expression* sizes) {
    const std::vector<Json>& texts = json.member(key).list(key);
    if (texts.size() != 3) throw Error("'" + std::string(key) + "' of a step has " + std::to_string(texts.size()) +
                                       " sizes, not 3");
    for (int axis = 0; axis < 3; ++axis) sizes[axis] = Expression(texts[axis].text(key), scope, reads);
  };
  three("grid", out.grid);
  three("block", out.block);
  out.shared = Expression(json.member("shared").text("'shared'"), scope, reads);
  out.clustered = json.find("cluster") != nullptr;
  if (out.clustered) three("cluster", out.cluster);
  if (const Json* dependent = json.find("dependent")) out.dependent = dependent->boolean("'dependent'");
  for (const Json& text : items(json, "args", Most::kArguments, "arguments of a kernel")) {
    const uint32_t place = static_cast<uint32_t>(out.arguments.size());
    out.arguments.push_back(parse_argument(text.text("'args'"), named, reads));
    if (out.arguments.back().address()) out.addresses.push_back(place);
    else if (!out.arguments.back().integer()) out.maps.push_back(place);
  }
  return out;
}

Step parse_call(const Json& json, const Named& named, Reads* reads) {
  Step out;
  out.routine = &Routine::named(words(json.member("call"), "'call'"));
  const Routine& routine = *out.routine;
  const std::string which = "a call of '" + std::string(routine.name) + "' in the launch plan ";
  const std::string& type = words(json.member("type"), "'type'");
  out.type = static_cast<size_t>(std::find(routine.types.begin(), routine.types.end(), type) - routine.types.begin());
  if (out.type == routine.types.size()) throw Error(which + "is of '" + excerpt(type) + "', which it does not take");
  for (const Json& text : items(json, "args", routine.operands + 1, "arguments of a call")) {
    out.addresses.push_back(static_cast<uint32_t>(out.arguments.size()));
    out.arguments.push_back(parse_argument(text.text("'args'"), named, reads));
    if (!out.arguments.back().address()) throw Error(which + "has an argument that is no address");
  }
  if (out.arguments.size() < routine.operands) {
    throw Error(which + "has " + std::to_string(out.arguments.size()) + " arguments, not " +
                std::to_string(routine.operands));
  }
  if (out.arguments[routine.operands - 1].kind == Argument::Kind::kInput) throw Error(which + "writes an input");
  if (out.workspace() != nullptr && out.workspace()->kind != Argument::Kind::kScratch) {
    throw Error(which + "has a workspace that is no scratch buffer");
  }
  const Json& sizes = json.member("sizes");
  for (const std::string_view name : routine.sizes) {
    const Json* size = sizes.find(name);
    if (size == nullptr) throw Error(which + "has no size '" + std::string(name) + "'");
    out.sizes.emplace_back(size->text("'sizes'"), named.scope, reads);
  }
  if (sizes.members() != routine.sizes.size()) throw Error(which + "has sizes that it does not take");
  return out;
}

// Puts a guard where it belongs; only those that read an address are evaluated at every run.
void add_guard(const std::string& text, const Scope& scope, Reads* reads, Variant* variant) {
  const bool before = std::exchange(reads->addresses, false), other = std::exchange(reads->places, false);
  Expression guard(text, scope, reads);
  const bool reads_address = std::exchange(reads->addresses, before);
  variant->places |= std::exchange(reads->places, other);
  Alignment alignment;
  if (!reads_address) variant->guards.push_back(std::move(guard));
  else if (guard.alignment(&alignment)) variant->alignments.push_back(alignment);
  else variant->address_guards.push_back(std::move(guard));
}

uint32_t unsigned_size(int64_t size, const char* what) {
  if (size < 0 || size > std::numeric_limits<int32_t>::max()) {
    throw Error(std::string(what) + " of a launch is " + std::to_string(size));
  }
  return static_cast<uint32_t>(size);
}

// What the driver would refuse with no word on why.
void check_cluster(const Geometry& size) {
  uint64_t blocks = 1;
  for (const uint32_t along : size.cluster) {
    blocks = std::min(blocks, kMostCluster + 1) * along;  // stays in 64 bits
  }
  if (blocks == 0 || blocks > kMostCluster) {
    throw Error("a cluster of " + dimensions(size.cluster) + " blocks; it has 1 to " + std::to_string(kMostCluster));
  }
  for (int axis = 0; axis < 3; ++axis) {
    if (size.grid[axis] % size.cluster[axis] == 0) continue;
    throw Error("the grid " + dimensions(size.grid) + " of a launch is no multiple of its cluster " +
                dimensions(size.cluster));
  }
}

}  // namespace

std::string dimensions(const uint32_t (&sizes)[3]) {
  return std::to_string(sizes[0]) + "x" + std::to_string(sizes[1]) + "x" + std::to_string(sizes[2]);
}

bool Step::geometry(const Situation& situation, Geometry* out) const {
  for (int axis = 0; axis < 3; ++axis) out->grid[axis] = unsigned_size(grid[axis].evaluate(situation), "the grid");
  if (out->grid[0] == 0 || out->grid[1] == 0 || out->grid[2] == 0) return false;
  for (int axis = 0; axis < 3; ++axis) out->block[axis] = unsigned_size(block[axis].evaluate(situation), "the block");
  out->shared = unsigned_size(shared.evaluate(situation), "the shared memory");
  if (clustered) {
    for (int axis = 0; axis < 3; ++axis) {
      out->cluster[axis] = unsigned_size(cluster[axis].evaluate(situation), "the cluster");
    }
    check_cluster(*out);
  }
  return true;
}

Plan Plan::parse(std::string_view text) {
  limit(text.size(), Most::kBytes, "bytes");
  const Json json = Json::parse(text);
  const int64_t version = json.member("version").integer("'version'");
  if (version != kVersion && version != kExtended) {
    throw Error("the launch plan has version " + std::to_string(version) + "; this library reads " +
                std::to_string(kVersion) + " and " + std::to_string(kExtended) +
                ": install the release of onnxfuse that wrote the model, or a newer one");
  }
  Plan plan;
  plan.region = words(json.member("region"), "'region'");
  const int64_t inputs = json.member("inputs").integer("'inputs'");
  if (inputs < 0 || inputs > int64_t{Most::kInputs}) throw Error("'inputs' is " + std::to_string(inputs));
  plan.inputs = static_cast<size_t>(inputs);
  plan.reads.sizes.assign(plan.inputs, false);
  for (const Json& option : items(json, "options", Most::kOptions, "options")) {
    plan.options.push_back(words(option, "an option of the launch plan"));
  }

  Scope scope{plan.inputs, 0, 0};
  for (const Json& symbol : items(json, "symbols", Most::kSymbols, "symbols")) {
    plan.symbols.emplace_back(symbol.text("'symbols'"), scope, &plan.reads);
    ++scope.symbols;
  }
  for (const Json& check : items(json, "checks", Most::kChecks, "checks")) {
    const std::vector<Json>& parts = check.list("a check");
    if (parts.size() != 2) throw Error("a check of the launch plan has " + std::to_string(parts.size()) + " parts");
    Expression condition(parts[0].text("a check"), scope, &plan.reads);
    plan.checks.push_back({std::move(condition), words(parts[1], "a check's message")});
  }
  for (const Json& output : items(json, "outputs", Most::kOutputs, "outputs")) {
    Output out{output.member("dtype").integer("'dtype'"), {}};
    if (out.type < 1 || out.type > kMostType || out.type == kStringType) {
      throw Error("'dtype' of an output is " + std::to_string(out.type));
    }
    for (const Json& size : items(output, "shape", Most::kAxes, "axes of an output")) {
      out.shape.emplace_back(size.text("'shape'"), scope, &plan.reads);
    }
    plan.outputs.push_back(std::move(out));
  }
  scope.outputs = plan.outputs.size();
  for (const Json& size : items(json, "scratch", Most::kScratch, "scratch buffers")) {
    plan.scratch.emplace_back(size.text("'scratch'"), scope, &plan.reads);
  }
  Named named{scope, plan.scratch.size(), 0};
  if (json.find("maps") != nullptr) {
    for (const Json& map : items(json, "maps", Most::kMaps, "tensor maps")) {
      plan.maps.push_back(TensorMap::parse(map, named, &plan.reads));
    }
  }
  named.maps = plan.maps.size();
  bool extended = !plan.maps.empty();
  size_t steps = 0;
  for (const Json& json_variant : items(json, "variants", Most::kVariants, "variants")) {
    Variant variant;
    variant.name = words(json_variant.member("name"), "a variant's name");
    for (const Json& guard : items(json_variant, "guards", Most::kGuards, "guards of a variant")) {
      add_guard(guard.text("'guards'"), scope, &plan.reads, &variant);
    }
    std::vector<Lifetime> lives(plan.scratch.size(), kNever);
    std::vector<bool> holds(plan.scratch.size(), false);  // more than a workspace
    const std::vector<Json>& json_steps = json_variant.member("steps").list("'steps'");
    limit(steps += json_steps.size(), Most::kSteps, "steps");
    for (const Json& json_step : json_steps) {
      const uint32_t number = static_cast<uint32_t>(variant.steps.size());
      const bool calls = json_step.find("call") != nullptr;
      variant.steps.push_back(calls ? parse_call(json_step, named, &plan.reads)
                                    : parse_step(json_step, named, &plan.reads));
      const Step& step = variant.steps.back();
      extended |= calls || step.extended();
      variant.calls |= calls;
      for (const Argument& argument : step.arguments) {
        const Argument& at = argument.kind == Argument::Kind::kMap ? plan.maps[argument.index].base : argument;
        if (at.kind != Argument::Kind::kScratch) continue;
        Lifetime& life = lives[at.index];
        life = {std::min(life.first, number), number};
        if (&argument != step.workspace()) holds[at.index] = true;
      }
    }
    for (uint32_t index = 0; index < lives.size(); ++index) {
      if (lives[index].first == kNever.first) continue;
      if (!holds[index]) variant.workspaces.push_back(static_cast<uint32_t>(variant.scratch.size()));
      variant.scratch.push_back(index);
      variant.lives.push_back(lives[index]);
    }
    extended |= variant.places;
    plan.variants.push_back(std::move(variant));
  }
  if (plan.reads.places) throw Error("the launch plan names a whole address outside of a guard");
  if (extended && version < kExtended) {
    throw Error("a launch plan of version " + std::to_string(version) + " that asks for what version " +
                std::to_string(kExtended) + " has");
  }
  plan.repeats = !plan.reads.addresses;
  for (uint32_t index = 0; index < plan.inputs; ++index) {
    if (plan.reads.sizes[index]) plan.sized.push_back(index);
  }
  for (uint32_t index = 0; index < kHostInputs; ++index) {
    if (plan.reads.host[index]) plan.hosted.push_back(index);
  }
  const auto unguarded = [](const Variant& variant) {
    return variant.guards.empty() && variant.alignments.empty() && variant.address_guards.empty();
  };
  if (plan.variants.empty() || !unguarded(plan.variants.back())) {
    throw Error("the last variant of the launch plan must have no guard");
  }
  return plan;
}

std::string Plan::region_of(std::string_view text) {
  try {
    return parse(text).region;
  } catch (const Error&) {
    return "";
  }
}

void Plan::specialise(int capability, int multiprocessors) {
  Situation gpu;
  gpu.capability = capability;
  gpu.multiprocessors = multiprocessors;
  const auto never = [&](const Variant& variant) {
    return std::any_of(variant.guards.begin(), variant.guards.end(), [&](const Expression& guard) {
      return guard.fixed() && guard.evaluate(gpu) == 0;
    });
  };
  variants.erase(std::remove_if(variants.begin(), variants.end(), never), variants.end());
  for (Variant& variant : variants) {
    std::vector<Expression>& guards = variant.guards;
    guards.erase(std::remove_if(guards.begin(), guards.end(), [](const Expression& guard) { return guard.fixed(); }),
                 guards.end());
  }
}

}  // namespace onnxfuse
