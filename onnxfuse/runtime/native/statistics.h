// Calls and GPU time of fused nodes, by variant and shapes, where ONNXFUSE_STATISTICS names a file for them.
//
// docs/statistics.md describes the file.  Time is what passes on the stream between two events around a node's
// launches.  Nobody waits for the events in a run: they are read back in later runs, once the GPU has reached them, and
// the last of them when the node's session ends.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "driver.h"

namespace onnxfuse {

// What is counted of one variant at one set of shapes.  `captured` calls went into a CUDA graph: they have no time, and
// the graph's replays are not seen.
struct RunTotals {
  static constexpr size_t kSamples = 31;
  uint64_t calls = 0, timed = 0, captured = 0;
  uint64_t total = 0, least = UINT64_MAX;  // nanoseconds of the timed calls
  std::vector<uint32_t> samples;           // the latest of them, at most kSamples, in no order

  void time(uint64_t nanoseconds);
  void add(const RunTotals& other);
  uint64_t median() const;
};

struct NodeFacts {
  std::string node, op, region;
  std::string kernel, plan;           // kernel_digest of its text and options; sha256 of its launch plan
  std::vector<std::string> variants;  // their names
  size_t inputs = 0;                  // tensors
  std::string runtime;                // ONNX Runtime's release
};

class StatisticsFile;
struct Timer;

// Sizes of a node's tensors in one run: for each input, then each output, its rank and sizes; -1 for an absent one.
using Shapes = std::vector<int64_t>;

// The statistics of one node of one session.
class NodeStatistics {
 public:
  // Null where no statistics are asked for.  Throws Error where their file cannot be written.
  static std::unique_ptr<NodeStatistics> wanted(NodeFacts facts, const Device& device);
  ~NodeStatistics();
  NodeStatistics(const NodeStatistics&) = delete;
  NodeStatistics& operator=(const NodeStatistics&) = delete;

  // One run of the node; the device's context is current.  No member throws: what the driver refuses ends the timing of
  // this node, and the file says so.
  class Call {
   public:
    Call(NodeStatistics& node, size_t variant, Shapes shapes, Stream stream);
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    void start();  // before each launch; the first one counts
    void stop();   // after the last launch

   private:
    NodeStatistics& node_;
    Stream stream_;
    Timer* timer_ = nullptr;
    bool started_ = false, stopped_ = false;
  };

 private:
  friend class StatisticsFile;
  NodeStatistics(NodeFacts facts, const Device& device, StatisticsFile* file);

  // The following want the mutex.
  RunTotals* find(size_t variant, Shapes shapes);
  Timer* take_timer();
  void read_back(bool wait);
  void give_up(const char* what, Result result);
  // What was counted since the last call, for the file.
  void hand_over();

  const NodeFacts facts_;
  const Device& device_;
  StatisticsFile* const file_;
  std::mutex mutex_;
  std::map<std::pair<size_t, Shapes>, RunTotals> runs_;
  uint64_t unrecorded_ = 0;  // calls at shapes past the most that are kept
  std::vector<std::unique_ptr<Timer>> timers_;
  std::vector<Timer*> free_;
  std::deque<Timer*> pending_;
  std::string fault_;  // why nothing is timed any more
};

// Writes all files now, with what is known; their paths, as a JSON list.  Throws Error.
std::string write_statistics();

}  // namespace onnxfuse
