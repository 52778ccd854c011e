#include "statistics.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <set>
#include <system_error>
#include <tuple>

#include "images.h"
#include "json.h"
#include "ort_api.h"
#include "texts.h"

namespace onnxfuse {
namespace {

constexpr size_t kMostTimers = 64;   // of a node; where the GPU is further behind, calls are counted and not timed
constexpr size_t kMostShapes = 256;  // of a node
constexpr size_t kMostRuns = 4096;   // of nodes of one name in a file, whatever sessions come and go
constexpr size_t kReadAtOnce = 8;    // timers that a call reads back
constexpr float kLongest = 1e9;      // milliseconds of a call: what is past any run, and fits as nanoseconds

constexpr Result kNotReady = 600;

std::string error_text(int error) { return std::generic_category().message(error); }

}  // namespace

// Two events around a node's launches.
struct Timer {
  Event start = nullptr, end = nullptr;
  RunTotals* totals = nullptr;
};

void RunTotals::time(uint64_t nanoseconds) {
  const auto sample = static_cast<uint32_t>(std::min<uint64_t>(nanoseconds, UINT32_MAX));
  if (samples.size() < kSamples) samples.push_back(sample);
  else samples[timed % kSamples] = sample;
  ++timed;
  total += nanoseconds;
  least = std::min(least, nanoseconds);
}

void RunTotals::add(const RunTotals& other) {
  calls += other.calls;
  captured += other.captured;
  timed += other.timed;
  total += other.total;
  least = std::min(least, other.least);
  samples.insert(samples.end(), other.samples.begin(), other.samples.end());
  if (samples.size() > kSamples) samples.erase(samples.begin(), samples.end() - kSamples);
}

uint64_t RunTotals::median() const {
  if (samples.empty()) return 0;
  std::vector<uint32_t> sorted = samples;
  const auto middle = sorted.begin() + sorted.size() / 2;
  std::nth_element(sorted.begin(), middle, sorted.end());
  return *middle;
}

// One file with the nodes that write to it; never destroyed, since later sessions add to it.
class StatisticsFile {
 public:
  // The file that the environment names, or null.  Throws Error where it cannot be written.
  static StatisticsFile* named();
  static std::vector<StatisticsFile*> all();

  const std::string& path() const { return path_; }
  void enter(NodeStatistics* node);
  void leave(NodeStatistics* node);
  void add(const NodeStatistics& node);  // called by the node, with the mutex held
  // With what the live nodes know, whether they want the file or not.  Throws Error.
  void write(bool only_where_live = false);

 private:
  struct Entry {
    NodeFacts facts;
    std::map<std::pair<std::string, Shapes>, RunTotals> runs;
    uint64_t unrecorded = 0;
  };
  // GPU, node, operator, kernel, plan
  using Name = std::tuple<int, std::string, std::string, std::string, std::string>;

  explicit StatisticsFile(std::string path) : path_(std::move(path)), started_(std::time(nullptr)) {}
  void replace() const;
  std::string text() const;
  std::string gpus() const;

  const std::string path_;
  const int64_t started_;
  std::mutex mutex_;
  std::set<NodeStatistics*> live_;
  std::map<Name, Entry> entries_;
  std::map<int, const Device*> devices_;
  std::string runtime_;  // ONNX Runtime's release, of the latest node
  std::set<std::string> notes_;
};

namespace {

std::mutex files_mutex;
auto& files = *new std::map<std::string, std::unique_ptr<StatisticsFile>>;

// "580.65.06"; "" where the driver's management library is missing.
std::string driver_release() {
  void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return "";
  const auto start = reinterpret_cast<int (*)()>(dlsym(library, "nvmlInit_v2"));
  const auto read = reinterpret_cast<int (*)(char*, unsigned)>(dlsym(library, "nvmlSystemGetDriverVersion"));
  char text[96] = {};
  if (start == nullptr || read == nullptr || start() != 0 || read(text, sizeof text - 1) != 0) return "";
  return text;
}

// The absolute path that a variable's text means: %p is the process, %% a percent sign.
std::string expanded(std::string_view pattern) {
  std::string out;
  for (size_t at = 0; at < pattern.size(); ++at) {
    const bool special = pattern[at] == '%' && at + 1 < pattern.size();
    if (special && pattern[at + 1] == 'p') out += std::to_string(getpid()), ++at;
    else if (special && pattern[at + 1] == '%') out += '%', ++at;
    else out += pattern[at];
  }
  if (out[0] == '/') return out;
  char folder[4096];
  if (getcwd(folder, sizeof folder) == nullptr) return out;
  return std::string(folder) + "/" + out;
}

// Sessions that are alive when the process ends would leave no file.
void write_at_exit() {
  for (StatisticsFile* file : StatisticsFile::all()) {
    try {
      file->write(true);
    } catch (const std::exception& error) {
      say(error.what());
    }
  }
}

}  // namespace

StatisticsFile* StatisticsFile::named() {
  const char* pattern = std::getenv("ONNXFUSE_STATISTICS");
  if (pattern == nullptr || *pattern == '\0') return nullptr;
  const std::string path = expanded(pattern);
  const std::lock_guard<std::mutex> lock(files_mutex);
  if (files.empty()) {
    // ONNX Runtime may unload the library with the last session; what was counted must outlive it.
    Dl_info self;
    if (dladdr(reinterpret_cast<void*>(&write_at_exit), &self) != 0) {
      dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
    }
    std::atexit(write_at_exit);
  }
  std::unique_ptr<StatisticsFile>& file = files[path];
  if (file == nullptr) {
    file.reset(new StatisticsFile(path));
    const std::string folder = path.substr(0, path.rfind('/') + 1);
    if (access(folder.c_str(), W_OK | X_OK) != 0) {
      const std::string reason = error_text(errno);
      files.erase(path);
      throw Error("the statistics that ONNXFUSE_STATISTICS asks for cannot be written to '" + excerpt(path) +
                  "': " + reason);
    }
  }
  return file.get();
}

std::vector<StatisticsFile*> StatisticsFile::all() {
  const std::lock_guard<std::mutex> lock(files_mutex);
  std::vector<StatisticsFile*> out;
  for (const auto& [path, file] : files) out.push_back(file.get());
  return out;
}

void StatisticsFile::enter(NodeStatistics* node) {
  const std::lock_guard<std::mutex> lock(mutex_);
  devices_[node->device_.ordinal] = &node->device_;
  runtime_ = node->facts_.runtime;
  live_.insert(node);
}

void StatisticsFile::leave(NodeStatistics* node) {
  const std::lock_guard<std::mutex> lock(mutex_);
  live_.erase(node);
  {
    const std::lock_guard<std::mutex> own(node->mutex_);
    node->hand_over();
  }
  if (!live_.empty()) return;
  try {
    replace();
  } catch (const std::exception& error) {
    say(error.what());
  }
}

void StatisticsFile::add(const NodeStatistics& node) {
  const NodeFacts& facts = node.facts_;
  Entry& entry = entries_[Name{node.device_.ordinal, facts.node, facts.op, facts.kernel, facts.plan}];
  entry.facts = facts;
  entry.unrecorded += node.unrecorded_;
  for (const auto& [key, totals] : node.runs_) {
    if (totals.calls > 0 || totals.timed > 0) {
      const std::pair<std::string, Shapes> run{facts.variants[key.first], key.second};
      if (entry.runs.size() < kMostRuns || entry.runs.count(run) > 0) entry.runs[run].add(totals);
      else entry.unrecorded += totals.calls;
    }
    if (totals.captured > 0) {
      notes_.insert("calls that went into a CUDA graph are counted as captured and not timed; the graph's replays are "
                    "not seen");
    }
  }
  if (!node.fault_.empty()) notes_.insert(node.fault_);
}

void StatisticsFile::write(bool only_where_live) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (only_where_live && live_.empty()) return;
  for (NodeStatistics* node : live_) {
    const std::lock_guard<std::mutex> own(node->mutex_);
    node->read_back(false);
    node->hand_over();
  }
  replace();
}

void StatisticsFile::replace() const {
  const std::string temporary = path_ + "." + std::to_string(getpid()) + ".part", content = text();
  const auto fail = [&](int error) {
    std::remove(temporary.c_str());
    throw Error("the statistics cannot be written to '" + excerpt(path_) + "': " + error_text(error));
  };
  std::FILE* file = std::fopen(temporary.c_str(), "wb");
  if (file == nullptr) fail(errno);
  const bool whole = std::fwrite(content.data(), 1, content.size(), file) == content.size();
  const int error = errno;
  if (std::fclose(file) != 0) fail(errno);
  if (!whole) fail(error);
  if (std::rename(temporary.c_str(), path_.c_str()) != 0) fail(errno);
}

namespace {

std::string number(uint64_t value) { return std::to_string(value); }

template <class Items, class Text>
std::string list(const Items& items, const Text& text, const char* separator = ",") {
  std::string out;
  for (const auto& item : items) out += (out.empty() ? "" : separator) + text(item);
  return "[" + out + "]";
}

// The shapes of some tensors that start at `at`; moves it past them.
std::string shapes_text(const Shapes& shapes, size_t tensors, size_t* at) {
  std::string out;
  for (size_t tensor = 0; tensor < tensors && *at < shapes.size(); ++tensor) {
    const int64_t rank = shapes[(*at)++];
    if (tensor > 0) out += ",";
    if (rank < 0) {
      out += "null";
      continue;
    }
    std::string sizes;
    for (int64_t axis = 0; axis < rank; ++axis) sizes += (axis > 0 ? "," : "") + std::to_string(shapes[(*at)++]);
    out += "[" + sizes + "]";
  }
  return "[" + out + "]";
}

std::string run_text(const std::string& variant, const Shapes& shapes, size_t inputs, const RunTotals& totals) {
  size_t at = 0;
  const std::string read = shapes_text(shapes, inputs, &at), written = shapes_text(shapes, SIZE_MAX, &at);
  return "{\"variant\":" + quoted(variant) + ",\"inputs\":" + read + ",\"outputs\":" + written +
         ",\"calls\":" + number(totals.calls) + ",\"timed\":" + number(totals.timed) +
         ",\"captured\":" + number(totals.captured) + ",\"total_ns\":" + number(totals.total) +
         ",\"least_ns\":" + number(totals.timed > 0 ? totals.least : 0) + ",\"median_ns\":" + number(totals.median()) +
         "}";
}

}  // namespace

std::string StatisticsFile::gpus() const {
  return list(devices_, [](const auto& item) {
    const Device& device = *item.second;
    return "{\"ordinal\":" + std::to_string(device.ordinal) + ",\"name\":" + quoted(device.gpu.name) +
           ",\"capability\":" + std::to_string(device.capability()) +
           ",\"multiprocessors\":" + std::to_string(device.gpu.multiprocessors) + "}";
  });
}

std::string StatisticsFile::text() const {
  const auto entry = [](const auto& item) {
    const auto& [name, found] = item;
    const size_t inputs = found.facts.inputs;
    const auto run = [&](const auto& each) { return run_text(each.first.first, each.first.second, inputs, each.second); };
    return "{\"node\":" + quoted(found.facts.node) + ",\"op\":" + quoted(found.facts.op) +
           ",\"region\":" + quoted(found.facts.region) + ",\"kernel\":" + quoted(found.facts.kernel) +
           ",\"plan\":" + quoted(found.facts.plan) + ",\"gpu\":" + std::to_string(std::get<0>(name)) + ",\"unrecorded\":" + number(found.unrecorded) +
           ",\"runs\":" + list(found.runs, run, ",\n    ") + "}";
  };
  int driver = 0;
  if (!devices_.empty()) devices_.begin()->second->driver.driver_version(&driver);
  return "{\"format\":\"onnxfuse statistics 1\",\"onnxfuse\":" + quoted(ONNXFUSE_VERSION) +
         ",\"onnxruntime\":" + quoted(runtime_) + ",\"driver\":" + std::to_string(driver) +
         ",\"driver_release\":" + quoted(driver_release()) + ",\"compiler\":" + quoted(compiler_name()) +
         ",\"process\":" + std::to_string(getpid()) + ",\"started\":" + std::to_string(started_) +
         ",\"written\":" + std::to_string(std::time(nullptr)) + ",\n \"gpus\":" + gpus() +
         ",\n \"notes\":" + list(notes_, [](const std::string& note) { return quoted(note); }) + ",\n \"nodes\":" +
         list(entries_, entry, ",\n  ") + "}\n";
}

std::unique_ptr<NodeStatistics> NodeStatistics::wanted(NodeFacts facts, const Device& device) {
  StatisticsFile* const file = StatisticsFile::named();
  if (file == nullptr) return nullptr;
  return std::unique_ptr<NodeStatistics>(new NodeStatistics(std::move(facts), device, file));
}

NodeStatistics::NodeStatistics(NodeFacts facts, const Device& device, StatisticsFile* file)
    : facts_(std::move(facts)), device_(device), file_(file) {
  file_->enter(this);
}

NodeStatistics::~NodeStatistics() {
  {
    // Until it has left, the file may be written in another thread and ask this node.
    const std::lock_guard<std::mutex> lock(mutex_);
    const Driver& driver = device_.driver;
    try {
      // When a process ends the driver may be gone before the sessions are: what it did not say by then stays untimed.
      const Current current(driver, device_.context);
      read_back(true);
      for (const auto& timer : timers_) {
        driver.event_destroy(timer->start);
        driver.event_destroy(timer->end);
      }
    } catch (const Error&) {
      fault_ = "the driver had ended before the last times were read";
    }
    pending_.clear();
  }
  file_->leave(this);
}

RunTotals* NodeStatistics::find(size_t variant, Shapes shapes) {
  std::pair<size_t, Shapes> key{variant, std::move(shapes)};
  const auto found = runs_.find(key);
  if (found != runs_.end()) return &found->second;
  if (runs_.size() >= kMostShapes) return nullptr;
  return &runs_[std::move(key)];
}

Timer* NodeStatistics::take_timer() {
  if (!free_.empty()) {
    Timer* const timer = free_.back();
    free_.pop_back();
    return timer;
  }
  if (timers_.size() >= kMostTimers) return nullptr;
  auto timer = std::make_unique<Timer>();
  const Driver& driver = device_.driver;
  if (const Result result = driver.event_create(&timer->start, 0)) return give_up("create an event", result), nullptr;
  if (const Result result = driver.event_create(&timer->end, 0)) {
    driver.event_destroy(timer->start);
    return give_up("create an event", result), nullptr;
  }
  timers_.push_back(std::move(timer));
  return timers_.back().get();
}

void NodeStatistics::read_back(bool wait) {
  const Driver& driver = device_.driver;
  const OutsideCaptures outside(driver);
  for (size_t read = 0; !pending_.empty() && (wait || read < kReadAtOnce); ++read) {
    Timer* const timer = pending_.front();
    const Result reached = wait ? driver.event_wait(timer->end) : driver.event_query(timer->end);
    if (reached == kNotReady) return;
    float milliseconds = 0;
    const Result result = reached != 0 ? reached : driver.event_elapsed(&milliseconds, timer->start, timer->end);
    pending_.pop_front();
    free_.push_back(timer);
    if (result != 0) give_up("read an event", result);
    else timer->totals->time(static_cast<uint64_t>((milliseconds > 0 ? std::min(milliseconds, kLongest) : 0) * 1e6));
  }
}

void NodeStatistics::give_up(const char* what, Result result) {
  if (fault_.empty()) {
    fault_ = std::string("calls of ") + facts_.node + " were not timed: could not " + what + ": " +
             device_.driver.describe(result);
  }
}

void NodeStatistics::hand_over() {
  file_->add(*this);
  unrecorded_ = 0;
  for (auto& [key, totals] : runs_) totals = RunTotals{};  // in place: timers point to them
}

NodeStatistics::Call::Call(NodeStatistics& node, size_t variant, Shapes shapes, Stream stream)
    : node_(node), stream_(stream) {
  const Driver& driver = node.device_.driver;
  int capturing = 0;
  const Result result = driver.stream_capturing(stream, &capturing);
  const std::lock_guard<std::mutex> lock(node.mutex_);
  RunTotals* const totals = node.find(variant, std::move(shapes));
  if (totals == nullptr) {
    ++node.unrecorded_;
    return;
  }
  ++totals->calls;
  if (capturing != 0) ++totals->captured;
  if (capturing != 0 || result != 0 || !node.fault_.empty()) return;
  node.read_back(false);
  const OutsideCaptures outside(driver);
  timer_ = node.take_timer();
  if (timer_ != nullptr) timer_->totals = totals;
}

void NodeStatistics::Call::start() {
  if (timer_ == nullptr || started_) return;
  started_ = node_.device_.driver.event_record(timer_->start, stream_) == 0;
}

void NodeStatistics::Call::stop() {
  if (started_) stopped_ = node_.device_.driver.event_record(timer_->end, stream_) == 0;
}

NodeStatistics::Call::~Call() {
  if (timer_ == nullptr) return;
  const std::lock_guard<std::mutex> lock(node_.mutex_);
  if (stopped_) node_.pending_.push_back(timer_);
  else node_.free_.push_back(timer_);
}

std::string write_statistics() {
  return list(StatisticsFile::all(), [](StatisticsFile* file) {
    file->write();
    return quoted(file->path());
  });
}

}  // namespace onnxfuse
