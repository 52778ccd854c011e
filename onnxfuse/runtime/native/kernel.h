// A fused node of one session: made when the session is created, launched when it runs.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <string>

#include "ort_api.h"
#include "program.h"
#include "statistics.h"

namespace onnxfuse {

class Kernel {
 public:
  // Reads the node's plan and finds its kernels; throws Error with the node's name.
  Kernel(const Runtime& runtime, const OrtKernelInfo* info, const std::string& op);
  ~Kernel();
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  // Launches the node on the stream of the context; throws Error.  Safe from many threads at once: it takes no lock,
  // shares nothing that changes, and allocates nothing on the heap but what its first runs in a thread need.  Where
  // statistics are kept it does all of that, for its own node.
  void run(OrtKernelContext* context);

  // The node, its operator and its runs per variant, as JSON.
  std::string describe() const;
  // What messages call the node.
  std::string label() const;

  const Api& api;

 private:
  void create(const Runtime& runtime, const OrtKernelInfo* info);
  void read_inputs(OrtKernelContext* context, Prepared* now) const;
  void read_tensor(const OrtValue* value, size_t index, size_t* used, Prepared* now) const;
  void read_host(OrtKernelContext* context, size_t index, HostView* out) const;
  // Has the libraries that a variant calls choose how to run it, and gives their workspaces the room that this takes;
  // false where one has no way, so that another variant is to run.  Throws Error where that was the last one.
  bool choose_calls(size_t variant, Prepared* now) const;
  void launch(size_t variant, Stream stream, Prepared* now, NodeStatistics::Call* call) const;
  // The same with a range for profilers and with statistics.
  void launch_watched(OrtKernelContext* context, size_t variant, Stream stream, Prepared* now) const;
  Shapes shapes(OrtKernelContext* context, const Prepared& now) const;

  std::string node_, op_, region_;
  std::shared_ptr<const Program> program_;
  std::deque<std::atomic<uint64_t>> runs_;  // by variant
  bool watched_ = false;                    // whether there is a range or there are statistics
  std::string range_;
  std::unique_ptr<NodeStatistics> statistics_;
};

// Whether runs are counted per node and variant (off at first), and all live kernels with their counts, as JSON.
void set_recording(bool on);
std::string live_kernels();

}  // namespace onnxfuse
