// What a launch plan comes to for the sizes of a run, kept for later runs that have the same.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "plan.h"

namespace onnxfuse {

// Room for the axes of an input, where the runtime is too old to show its shape without a copy.
constexpr size_t kMostAxes = 32;

// One thread's; the plan must outlive it.  Order of use in a run: fill `inputs` and `hosts`, update(), fill `outputs`,
// choose(), launches().
class Prepared {
 public:
  Prepared(const Plan& plan, int capability, int multiprocessors);
  Prepared(const Prepared&) = delete;
  Prepared& operator=(const Prepared&) = delete;

  struct Launch {
    bool empty = true;  // nothing is to be launched
    Geometry size;
    std::vector<uint64_t> values;  // those of addresses are the caller's to fill in
    std::vector<void*> arguments;  // one pointer for each value
    // Of a call:
    std::vector<int64_t> sizes;
    size_t workspace = 0, room = 0;      // bytes that it may take at most, and that it takes as it was chosen to run
    std::unique_ptr<PreparedCall> call;  // null until it is made for these sizes
  };
  struct Launches {
    bool ready = false;
    bool refused = false;  // a library has no way to run it at these sizes
    std::vector<Launch> steps;
    ScratchLayout scratch;          // of the variant's buffers, in their order
    std::vector<uint64_t> buffers;  // room for the addresses of all buffers of the plan
  };

  std::vector<TensorView> inputs;
  HostView hosts[kHostInputs];
  std::vector<uint64_t> outputs;       // addresses
  std::vector<int64_t> input_sizes;    // room for kMostAxes of each input whose sizes are read

  // Evaluates symbols, checks, output sizes and guards where this run's sizes and host inputs are those of none of the
  // runs that are kept.  Throws Error where a check does not hold.
  void update();

  const std::vector<int64_t>& symbols() const { return now_->symbols; }
  const int64_t* output_sizes(size_t index) const { return now_->output_sizes.data() + first_size_[index]; }

  // The first variant whose guards all hold and that was not refused; else the last.
  size_t choose() const;
  // Its launches.
  Launches& launches(size_t variant) {
    Launches& out = now_->launches[variant];
    if (!out.ready || !plan_.repeats) fill(variant, &out);
    return out;
  }
  // The map, of the tensor at this address, at the sizes of the launches that were asked for; it stays until the next
  // call for the same.  Throws Error.
  void* tensor_map(uint32_t index, uint64_t address, const Driver& driver) {
    return now_->maps[index].at(address, plan_.maps[index], driver);
  }
  const TensorSizes& map_sizes(uint32_t index) const { return now_->maps[index].sizes(); }

 private:
  // Nodes that share a plan may each see sizes of their own.
  static constexpr int kKept = 4;

  struct State {
    bool valid = false;  // the rest belongs to the sizes and host inputs in `key`
    std::vector<int64_t> key, symbols, output_sizes;
    std::vector<uint32_t> eligible;  // variants whose guards on sizes hold, up to the first with no further guard
    std::vector<Launches> launches;
    std::vector<BuiltMaps> maps;
  };

  bool matches(const State& state) const;
  void enter(State* state);
  void make(State* state) const;
  void remember(State* state) const;
  void evaluate(State* state) const;
  void fill(size_t variant, Launches* out);
  void fill_kernel(const Step& step, Launch* launch);
  void fill_call(const Variant& variant, const Step& step, const ScratchLayout& scratch, Launch* launch) const;

  const Plan& plan_;
  Situation situation_;
  std::vector<size_t> first_size_;  // of an output among all output sizes
  size_t axes_ = 0;                 // of all outputs
  State states_[kKept];
  State* now_ = states_;
};

// What the plan does in runs one after the other, as a JSON list: for tests, without a GPU.  `situation` has "sm", "sms"
// and "runs"; a run has "inputs" and "hosts" (lists of integers), "input_addresses" and "output_addresses".  A run that
// fails gives {"error"}.
std::string evaluate_plan(std::string_view plan, std::string_view situation);

}  // namespace onnxfuse
