// Runs the native library under sanitizers, over stand-ins for ONNX Runtime (fake_runtime.h) and the driver
// (fake_cuda.c), which ONNXFUSE_LIBCUDA names:
//
//     fuzz cases SEEDS FIRST COUNT THREADS   cases of these numbers; SEEDS holds what fuzz_seeds.py wrote
//     fuzz show SEEDS NUMBER FOLDER          writes the files of a case
//     fuzz races SEEDS SECONDS               sessions begin, run and end while others do
//
// A case may be refused with a message; anything else ends the process: a sanitizer's report, an exception, a message
// that is none, a result that is no JSON, 20 s.  "case NUMBER" on stderr says which.  The last line on stdout counts;
// with FUZZ_MESSAGES in the environment the messages stand before it.
#include <dlfcn.h>
#include <sanitizer/common_interface_defs.h>
#include <signal.h>
#include <sys/time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>

#include "elf.h"
#include "fake_runtime.h"
#include "fuzz_cases.h"
#include "json.h"
#include "op.h"
#include "prepared.h"
#include "texts.h"

extern "C" {
OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base);
void onnxfuse_expect_names(int names);
size_t onnxfuse_statistics(char* out, size_t size);
size_t onnxfuse_write_statistics(char* out, size_t size);
size_t onnxfuse_evaluate_plan(const char* plan, const char* situation, char* out, size_t size);
void onnxfuse_set_recording(int on);
void onnxfuse_set_cache(const char* folder, const char* compiler);
void onnxfuse_set_compile_callback(void (*callback)(const char*, const char*, const char*, const char*, int, void*));
void onnxfuse_reply_image(void* reply, const void* image, size_t size);
}

namespace {

using fuzz::Case;
using fuzz::Input;
using fuzz::Seed;

thread_local uint64_t current = 0;
std::atomic<uint64_t> nodes{0}, plans{0}, made{0}, refused{0}, runs{0}, failed{0};

[[noreturn]] void wrong(const std::string& what) { throw std::logic_error(what); }

// A message is there, is not endless, and steers no terminal that it is shown on.
void check_message(const std::string& text) {
  if (text.empty() || text.size() > 32768) wrong("a message of " + std::to_string(text.size()) + " bytes");
  if (onnxfuse::visible_lines(text) != text) wrong("a message that is not visible");
  static const bool shown = std::getenv("FUZZ_MESSAGES") != nullptr;
  if (shown) std::printf("%s\n", text.c_str());
}

template <class Function>
std::string whole(Function function) {
  std::string out;
  for (size_t needed = 4096; needed > out.size();) {  // in another thread the text may become longer, or shorter
    out.resize(needed);
    needed = function(out.data(), out.size());
  }
  return out.c_str();
}

void check_json(const std::string& text) {
  if (text.rfind("ok:", 0) == 0) (void)onnxfuse::Json::parse(std::string_view(text).substr(3));
  else if (text.rfind("error:", 0) == 0) check_message(text.substr(6));
  else wrong("a result that is neither");
}

std::vector<const OrtCustomOp*> registered(bool newer, int names = 16) {
  OrtSessionOptions options;
  onnxfuse_expect_names(names);
  const std::string message = fake::message(RegisterCustomOps(&options, fake::base(newer)));
  if (!message.empty()) wrong(message);
  return options.domains.at(0)->ops;
}

// The node of a case, and the contexts of its runs.
OrtKernelInfo node_of(const Case& each) {
  OrtKernelInfo node;
  node.name = each.name;
  node.texts = {{"plan", each.plan}, {"source", each.source}};
  OrtValue image;
  image.shape.type = each.image_type;
  image.shape.sizes = {static_cast<int64_t>(each.image.size() / (each.image_type == 7 ? 8 : 1))};
  image.bytes.assign(each.image.begin(), each.image.end());
  if (!each.compiled) node.tensors[each.image_name] = image;
  node.inputs = 8 + each.inputs;
  node.outputs = each.outputs;
  return node;
}

OrtKernelContext context_of(const Case& each, const std::vector<Input>& run) {
  OrtKernelContext out;
  for (size_t index = 0; index < 8 + each.inputs; ++index) {
    out.inputs.emplace_back();
    if (index >= run.size() || !run[index].present) continue;
    const Input& input = run[index];
    auto value = std::make_unique<OrtValue>();
    value->shape.type = input.type;
    value->shape.sizes = input.sizes;
    const size_t size = input.type == 6 ? 4 : 8;
    value->bytes.resize(size * input.values.size());
    for (size_t at = 0; at < input.values.size(); ++at) {
      std::memcpy(value->bytes.data() + size * at, &input.values[at], size);  // little-endian: 32 bits lie first
    }
    if (index >= 8) value->address = reinterpret_cast<void*>(input.address);
    out.inputs.back() = std::move(value);
  }
  out.outputs.resize(each.outputs);
  return out;
}

// A call of the library with the allocation failing that the case says.
template <class Call>
std::string called(const Case& each, Call call) {
  fake::failing = each.failing;
  OrtStatus* const status = call();
  fake::failing = 0;
  return fake::message(status);
}

thread_local const Case* compiling = nullptr;

void compile(const char*, const char*, const char*, const char*, int, void* reply) {
  if (compiling->compiled) onnxfuse_reply_image(reply, compiling->image.data(), compiling->image.size());
}

void attempt_node(const Case& each) {
  static const std::vector<const OrtCustomOp*> sides[2] = {registered(false), registered(true)};
  const OrtCustomOp* const op = sides[each.newer][each.plan.size() % 2];
  const OrtKernelInfo node = node_of(each);
  ++nodes;
  if (op->InferOutputShapeFn != nullptr) {
    OrtShapeInferContext inferring;
    inferring.node = &node;
    for (const Input& input : each.runs[0]) inferring.inputs.push_back({input.type, input.sizes, {}});
    called(each, [&] { return op->InferOutputShapeFn(op, &inferring); });
  }
  compiling = &each;
  void* kernel = nullptr;
  const std::string message = called(each, [&] { return op->CreateKernelV2(op, nullptr, &node, &kernel); });
  if (!message.empty()) {
    ++refused;
    return check_message(message);
  }
  ++made;
  for (const std::vector<Input>& run : each.runs) {
    OrtKernelContext context = context_of(each, run);
    const std::string problem = called(each, [&] { return op->KernelComputeV2(kernel, &context); });
    ++runs;
    if (problem.empty()) continue;
    ++failed;
    check_message(problem);
  }
  if (!each.statistics.empty()) {
    check_json(whole(onnxfuse_statistics));
    check_json(whole(onnxfuse_write_statistics));
  }
  op->KernelDestroy(kernel);
}

void attempt_plan(const Case& each) {
  ++plans;
  check_json(whole([&](char* out, size_t size) {
    return onnxfuse_evaluate_plan(each.plan.c_str(), each.situation.c_str(), out, size);
  }));
}

// What the stand-ins for the driver, cuBLASLt and cuDNN do.
int& setting(const char* variable, const char* name) {
  return *static_cast<int*>(dlsym(dlopen(std::getenv(variable), RTLD_NOW), name));
}
int& driver_setting(const char* name) { return setting("ONNXFUSE_LIBCUDA", name); }

void attempt(const Case& each, bool alone) {
  if (!each.node) return attempt_plan(each);
  if (alone) {
    driver_setting("fake_launch_error") = each.launch_error;
    driver_setting("fake_allocate_error") = each.allocate_error;
    driver_setting("fake_event_error") = each.event_error;
    driver_setting("fake_capturing") = each.capturing;
    driver_setting("fake_map_error") = each.map_error;
    setting("ONNXFUSE_LIBCUBLASLT", "fake_lt_error") = each.product_error;
    setting("ONNXFUSE_LIBCUBLASLT", "fake_lt_found") = each.algorithms;
    setting("ONNXFUSE_LIBCUDNN", "fake_dnn_error") = each.product_error == 0 ? 0 : 3000;
    setting("ONNXFUSE_LIBCUDNN", "fake_dnn_found") = each.algorithms;
    setenv("ONNXFUSE_STATISTICS", each.statistics.c_str(), 1);
  }
  attempt_node(each);
}

void tell() {
  char text[32];
  const int size = std::snprintf(text, sizeof text, "\ncase %llu\n", static_cast<unsigned long long>(current));
  if (write(2, text, static_cast<size_t>(size)) != size) _exit(4);
}

void hang(int) {
  constexpr char kText[] = "\na case takes longer than 20 s\n";
  if (write(2, kText, sizeof kText - 1) < 0) _exit(4);
  tell();
  _exit(3);
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) wrong("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::vector<std::vector<int64_t>> shapes(const fuzz::Tree& tree) {
  std::vector<std::vector<int64_t>> out;
  for (const fuzz::Tree& shape : tree.items) {
    out.emplace_back();
    for (const fuzz::Tree& size : shape.items) out.back().push_back(std::stoll(size.text));
  }
  return out;
}

std::vector<Seed> read_seeds(const std::string& folder) {
  std::vector<Seed> out;
  for (const fuzz::Tree& each : fuzz::Tree::parse(read_file(folder + "/seeds.json")).items) {
    Seed seed;
    seed.plan = each.member("plan");
    seed.image = read_file(folder + "/" + each.member("image").text);
    seed.inputs = shapes(each.member("inputs"));
    seed.hosts = shapes(each.member("hosts"));
    seed.outputs = seed.plan.member("outputs").items.size();
    out.push_back(std::move(seed));
  }
  return out;
}

void run_cases(const std::vector<Seed>& seeds, uint64_t first, uint64_t count, unsigned threads) {
  std::atomic<uint64_t> next{first};
  const auto work = [&] {
    while ((current = next++) < first + count) {
      if (threads == 1) {
        const itimerval limit{{0, 0}, {20, 0}};
        setitimer(ITIMER_REAL, &limit, nullptr);
      }
      try {
        attempt(fuzz::make(seeds, current), threads == 1);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        tell();
        _exit(5);
      }
    }
  };
  std::vector<std::thread> pool;
  for (unsigned number = 1; number < threads; ++number) pool.emplace_back(work);
  work();
  for (std::thread& thread : pool) thread.join();
}

// A node: y = x + 1 + 1, through scratch memory.
const char* const kAddTwo =
    R"({"version":1,"region":"add-two","inputs":1,"symbols":["i0.0"],"checks":[],)"
    R"("outputs":[{"dtype":1,"shape":["s0"]}],"scratch":["s0 4 *"],"options":[],)"
    R"("variants":[{"name":"plain","guards":[],"steps":[)"
    R"({"kernel":"add_one","grid":["i0.n","1","1"],"block":["128","1","1"],"shared":"16","args":["i0","t0","i64:s0"]},)"
    R"({"kernel":"add_one","grid":["i0.n","1","1"],"block":["128","1","1"],"shared":"0","args":["t0","o0","i64:s0"]})"
    R"(]}]})";

void session(const Case& each, const OrtCustomOp* op, size_t turns) {
  const OrtKernelInfo node = node_of(each);
  void* kernel = nullptr;
  const std::string refusal = fake::message(op->CreateKernelV2(op, nullptr, &node, &kernel));
  if (!refusal.empty()) wrong(refusal);
  for (size_t turn = 0; turn < turns; ++turn) {
    std::vector<float> x(1 + turn % 5, static_cast<float>(turn));
    OrtKernelContext context;
    context.inputs.resize(9);
    context.inputs[8] = std::make_unique<OrtValue>();
    context.inputs[8]->shape.sizes = {static_cast<int64_t>(x.size())};
    context.inputs[8]->address = x.data();
    context.outputs.resize(1);
    if (const std::string text = fake::message(op->KernelComputeV2(kernel, &context)); !text.empty()) wrong(text);
    float y = 0;
    std::memcpy(&y, context.outputs[0].bytes.data(), sizeof y);
    if (y != x[0] + 2) wrong("a wrong result");
    ++runs;
  }
  op->KernelDestroy(kernel);
  ++made;
}

void run_races(const std::string& folder, double seconds) {
  Case each;
  each.plan = kAddTwo;
  each.image = read_file(folder + "/stand_in.image");
  each.inputs = each.outputs = 1;
  setenv("ONNXFUSE_STATISTICS", "statistics.%p.json", 1);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  const auto going = [&] { return std::chrono::steady_clock::now() < end; };
  const auto sessions = [&](unsigned number) {
    for (unsigned turn = number; going(); ++turn) {
      // Other sizes of the pool and another runtime than those of the sessions that run meanwhile.
      const auto ops = registered(turn % 2 != 0, 16 << turn % 6);
      session(each, ops[turn % 16], turn % 7);
    }
  };
  const auto looking = [&] {
    for (int turn = 0; going(); ++turn) {
      onnxfuse_set_recording(turn % 2);
      onnxfuse_set_cache("", turn % 2 != 0 ? "nvrtc-13.0" : "");
      check_json(whole(onnxfuse_statistics));
      check_json(whole(onnxfuse_write_statistics));
      check_json(whole([&](char* out, size_t size) {
        const char* const situation =
            R"({"sm":90,"sms":1,"runs":[{"inputs":[[3]],"hosts":[],"input_addresses":[],"output_addresses":[]},)"
            R"({"inputs":[],"hosts":[],"input_addresses":[],"output_addresses":[]}]})";
        return onnxfuse_evaluate_plan(kAddTwo, situation, out, size);
      }));
    }
  };
  const auto kept = registered(true);
  std::vector<std::thread> pool;
  for (unsigned number = 0; number < 3; ++number) pool.emplace_back(sessions, number);
  pool.emplace_back(looking);
  pool.emplace_back([&] {
    while (going()) session(each, kept[0], 100);
  });
  for (std::thread& thread : pool) thread.join();
}

}  // namespace

int main(int count, char** arguments) {
  const std::vector<std::string> given(arguments + 1, arguments + count);
  __sanitizer_set_death_callback(tell);
  signal(SIGALRM, hang);
  try {
    if (given.size() == 5 && given[0] == "cases") {
      const std::vector<Seed> seeds = read_seeds(given[1]);
      driver_setting("fake_dry") = 1;
      onnxfuse_set_cache("", "");
      onnxfuse_set_compile_callback(compile);
      run_cases(seeds, std::stoull(given[2]), std::stoull(given[3]), static_cast<unsigned>(std::stoul(given[4])));
    } else if (given.size() == 4 && given[0] == "show") {
      const Case each = fuzz::make(read_seeds(given[1]), std::stoull(given[2]));
      for (const auto& [name, text] : {std::pair{"plan.json", each.plan}, {"image", each.image},
                                       {"situation.json", each.situation}}) {
        if (!text.empty()) std::ofstream(given[3] + "/" + given[2] + "." + name, std::ios::binary) << text;
      }
    } else if (given.size() == 3 && given[0] == "races") {
      run_races(given[1], std::stod(given[2]));
    } else {
      std::fprintf(stderr, "usage: see the start of fuzz.cc\n");
      return 2;
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 5;
  }
  std::printf("{\"nodes\":%llu,\"plans\":%llu,\"made\":%llu,\"refused\":%llu,\"runs\":%llu,\"failed\":%llu}\n",
              static_cast<unsigned long long>(nodes), static_cast<unsigned long long>(plans),
              static_cast<unsigned long long>(made), static_cast<unsigned long long>(refused),
              static_cast<unsigned long long>(runs), static_cast<unsigned long long>(failed));
}
