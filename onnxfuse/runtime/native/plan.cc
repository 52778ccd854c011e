#include "plan.h"

#include <algorithm>
#include <limits>

#include "json.h"
#include "ort_api.h"

namespace onnxfuse {
namespace {

constexpr int64_t kVersion = 1;

Argument parse_argument(const std::string& text, const Scope& scope, size_t scratch, Reads* reads) {
  Argument out{};
  if (text.rfind("i32:", 0) == 0 || text.rfind("i64:", 0) == 0) {
    out.kind = text[1] == '3' ? Argument::Kind::kInt32 : Argument::Kind::kInt64;
    out.value = Expression(std::string_view(text).substr(4), scope, reads);
    return out;
  }
  size_t limit = 0;
  switch (text.empty() ? ' ' : text[0]) {
    case 'i': out.kind = Argument::Kind::kInput, limit = scope.inputs; break;
    case 'o': out.kind = Argument::Kind::kOutput, limit = scope.outputs; break;
    case 't': out.kind = Argument::Kind::kScratch, limit = scratch; break;
    default: break;
  }
  size_t number = 0;
  bool digits = text.size() > 1 && text.size() < 8;
  for (size_t at = 1; digits && at < text.size(); ++at) {
    digits = text[at] >= '0' && text[at] <= '9';
    number = number * 10 + static_cast<size_t>(text[at] - '0');
  }
  if (!digits || number >= limit) throw Error("unknown argument '" + text + "' of a kernel in the launch plan");
  out.index = static_cast<uint32_t>(number);
  return out;
}

Step parse_step(const Json& json, const Scope& scope, size_t scratch, Reads* reads) {
  Step out;
  out.kernel = json.member("kernel").text("'kernel'");
  const auto three = [&](const char* key, Expression* sizes) {
    const auto texts = json.member(key).texts(key);
    if (texts.size() != 3) throw Error("'" + std::string(key) + "' of a step has " + std::to_string(texts.size()) +
                                       " sizes, not 3");
    for (int axis = 0; axis < 3; ++axis) sizes[axis] = Expression(texts[axis], scope, reads);
  };
  three("grid", out.grid);
  three("block", out.block);
  out.shared = Expression(json.member("shared").text("'shared'"), scope, reads);
  for (const std::string& text : json.member("args").texts("'args'")) {
    out.arguments.push_back(parse_argument(text, scope, scratch, reads));
  }
  return out;
}

uint32_t unsigned_size(int64_t size, const char* what) {
  if (size < 0 || size > std::numeric_limits<int32_t>::max()) {
    throw Error(std::string(what) + " of a launch is " + std::to_string(size));
  }
  return static_cast<uint32_t>(size);
}

}  // namespace

bool Step::geometry(const Situation& situation, Geometry* out) const {
  for (int axis = 0; axis < 3; ++axis) out->grid[axis] = unsigned_size(grid[axis].evaluate(situation), "the grid");
  if (out->grid[0] == 0 || out->grid[1] == 0 || out->grid[2] == 0) return false;
  for (int axis = 0; axis < 3; ++axis) out->block[axis] = unsigned_size(block[axis].evaluate(situation), "the block");
  out->shared = unsigned_size(shared.evaluate(situation), "the shared memory");
  return true;
}

uint64_t integer_argument(const Argument& argument, const Situation& situation) {
  const int64_t value = argument.value.evaluate(situation);
  if (argument.kind == Argument::Kind::kInt32 && value != static_cast<int32_t>(value)) {
    throw Error("a 32-bit argument of a kernel is " + std::to_string(value));
  }
  return static_cast<uint64_t>(value);
}

Plan Plan::parse(std::string_view text) {
  const Json json = Json::parse(text);
  const int64_t version = json.member("version").integer("'version'");
  if (version != kVersion) {
    throw Error("the launch plan has version " + std::to_string(version) + "; this library reads " +
                std::to_string(kVersion) + ": install the release of onnxfuse that wrote the model, or a newer one");
  }
  Plan plan;
  plan.region = json.member("region").text("'region'");
  const int64_t inputs = json.member("inputs").integer("'inputs'");
  if (inputs < 0 || inputs > 4096) throw Error("'inputs' is " + std::to_string(inputs));
  plan.inputs = static_cast<size_t>(inputs);
  plan.reads.sizes.assign(plan.inputs, false);
  plan.options = json.member("options").texts("'options'");

  Scope scope{plan.inputs, 0, 0};
  for (const std::string& symbol : json.member("symbols").texts("'symbols'")) {
    plan.symbols.emplace_back(symbol, scope, &plan.reads);
    ++scope.symbols;
  }
  for (const Json& check : json.member("checks").list("'checks'")) {
    const auto parts = check.texts("a check");
    if (parts.size() != 2) throw Error("a check of the launch plan has " + std::to_string(parts.size()) + " parts");
    plan.checks.push_back({Expression(parts[0], scope, &plan.reads), parts[1]});
  }
  for (const Json& output : json.member("outputs").list("'outputs'")) {
    Output out{output.member("dtype").integer("'dtype'"), {}};
    for (const std::string& size : output.member("shape").texts("'shape'")) {
      out.shape.emplace_back(size, scope, &plan.reads);
    }
    plan.most_axes = std::max(plan.most_axes, out.shape.size());
    plan.outputs.push_back(std::move(out));
  }
  scope.outputs = plan.outputs.size();
  for (const std::string& size : json.member("scratch").texts("'scratch'")) {
    plan.scratch.emplace_back(size, scope, &plan.reads);
  }
  for (const Json& json_variant : json.member("variants").list("'variants'")) {
    Variant variant;
    variant.name = json_variant.member("name").text("'name'");
    for (const std::string& guard : json_variant.member("guards").texts("'guards'")) {
      variant.guards.emplace_back(guard, scope, &plan.reads);
    }
    std::vector<bool> used(plan.scratch.size());
    for (const Json& json_step : json_variant.member("steps").list("'steps'")) {
      variant.steps.push_back(parse_step(json_step, scope, plan.scratch.size(), &plan.reads));
      const Step& step = variant.steps.back();
      plan.most_arguments = std::max(plan.most_arguments, step.arguments.size());
      for (const Argument& argument : step.arguments) {
        if (argument.kind == Argument::Kind::kScratch) used[argument.index] = true;
      }
    }
    for (uint32_t index = 0; index < used.size(); ++index) {
      if (used[index]) variant.scratch.push_back(index);
    }
    plan.variants.push_back(std::move(variant));
  }
  if (plan.variants.empty() || !plan.variants.back().guards.empty()) {
    throw Error("the last variant of the launch plan must have no guard");
  }
  return plan;
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
}

void Plan::bind(Situation* situation, int64_t* values) const {
  situation->symbols = values;
  for (size_t index = 0; index < symbols.size(); ++index) values[index] = symbols[index].evaluate(*situation);
  for (const Check& check : checks) {
    if (check.condition.evaluate(*situation) == 0) throw Error(check.message);
  }
}

const Variant& Plan::choose(const Situation& situation) const {
  const auto runs = [&](const Variant& variant) {
    return std::all_of(variant.guards.begin(), variant.guards.end(),
                       [&](const Expression& guard) { return guard.evaluate(situation) != 0; });
  };
  return *std::find_if(variants.begin(), variants.end() - 1, runs);
}

std::string evaluate_plan(std::string_view plan_text, std::string_view situation_text) {
  const Plan plan = Plan::parse(plan_text);
  const Json json = Json::parse(situation_text);
  const auto lists = [&](const char* key) {
    std::vector<std::vector<int64_t>> out;
    for (const Json& item : json.member(key).list(key)) out.push_back(item.integers(key));
    return out;
  };
  const auto addresses = [&](const char* key, size_t count) {
    auto out = json.member(key).integers(key);
    out.resize(count);
    return out;
  };
  const auto inputs = lists("inputs"), hosts = lists("hosts");
  const auto input_addresses = addresses("input_addresses", plan.inputs);
  const auto signed_addresses = addresses("output_addresses", plan.outputs.size());
  const std::vector<uint64_t> output_addresses(signed_addresses.begin(), signed_addresses.end());
  std::vector<TensorView> tensors(plan.inputs);
  for (size_t i = 0; i < tensors.size() && i < inputs.size(); ++i) {
    tensors[i] = {inputs[i].data(), inputs[i].size(), static_cast<uint64_t>(input_addresses[i]), true};
  }
  HostView views[kHostInputs];
  for (size_t i = 0; i < hosts.size() && i < kHostInputs; ++i) {
    views[i] = {hosts[i].data(), static_cast<int64_t>(hosts[i].size()), true, true};
  }
  Situation situation;
  situation.inputs = tensors.data();
  situation.hosts = views;
  situation.capability = json.member("sm").integer("'sm'");
  situation.multiprocessors = json.member("sms").integer("'sms'");
  std::vector<int64_t> symbols(plan.symbols.size());
  plan.bind(&situation, symbols.data());

  const auto list = [](const auto& items, const auto& text) {
    std::string out;
    for (const auto& item : items) out += (out.empty() ? "" : ",") + text(item);
    return "[" + out + "]";
  };
  const auto number = [](int64_t value) { return std::to_string(value); };
  const auto sized = [&](const Expression& size) { return number(size.evaluate(situation)); };
  std::string out = "{\"symbols\":" + list(symbols, number);
  out += ",\"outputs\":" + list(plan.outputs, [&](const Output& output) { return list(output.shape, sized); });
  situation.output_addresses = output_addresses.data();
  const Variant& variant = plan.choose(situation);
  out += ",\"variant\":" + number(&variant - plan.variants.data());
  out += ",\"scratch\":" + list(variant.scratch, [&](uint32_t index) { return sized(plan.scratch[index]); });
  out += ",\"steps\":" + list(variant.steps, [&](const Step& step) -> std::string {
    Geometry launch;
    if (!step.geometry(situation, &launch)) return "null";
    const auto argument = [&](const Argument& item) -> std::string {
      switch (item.kind) {
        case Argument::Kind::kInput: return "\"i" + number(item.index) + "\"";
        case Argument::Kind::kOutput: return "\"o" + number(item.index) + "\"";
        case Argument::Kind::kScratch: return "\"t" + number(item.index) + "\"";
        default: return number(static_cast<int64_t>(integer_argument(item, situation)));
      }
    };
    return "{\"kernel\":" + quoted(step.kernel) + ",\"grid\":" + list(launch.grid, number) +
           ",\"block\":" + list(launch.block, number) + ",\"shared\":" + number(launch.shared) +
           ",\"args\":" + list(step.arguments, argument) + "}";
  });
  return out + "}";
}

}  // namespace onnxfuse
