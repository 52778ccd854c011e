// Cases for fuzz.cc: real launch plans, images and inputs with faults put where they are understood, each a function of
// its number alone.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace fuzz {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {}
  uint64_t next() {
    uint64_t out = state_ += 0x9E3779B97F4A7C15u;
    out = (out ^ out >> 30) * 0xBF58476D1CE4E5B9u;
    out = (out ^ out >> 27) * 0x94D049BB133111EBu;
    return out ^ out >> 31;
  }
  size_t below(size_t limit) { return limit == 0 ? 0 : next() % limit; }
  bool once_in(size_t times) { return below(times) == 0; }
  template <class Items>
  auto& of(Items& items) {
    return items[below(std::size(items))];
  }

 private:
  uint64_t state_;
};

// A JSON value as it is written: texts keep their escapes, numbers their digits.
struct Tree {
  enum class Kind { kWord, kText, kList, kObject };
  Kind kind = Kind::kWord;
  std::string text;
  std::vector<Tree> items;
  std::vector<std::string> keys;  // of an object, one for each item

  static Tree parse(const std::string& text);
  std::string write() const;
  const Tree& member(const std::string& key) const;
};

// A fused node as it is in a model, with sizes that it takes.
struct Seed {
  Tree plan;
  std::string image;
  std::vector<std::vector<int64_t>> inputs, hosts;
  size_t outputs = 0;
};

struct Input {
  bool present = true;
  int type = 1;
  std::vector<int64_t> sizes, values;  // values: of a host input
  uint64_t address = 256;
};

struct Case {
  std::string plan, image, situation;
  std::string image_name = "image_sm_90";
  int image_type = 2;
  size_t inputs = 0, outputs = 0;        // that the node has, host inputs not counted
  std::vector<std::vector<Input>> runs;  // host inputs first
  bool node = true;                      // a node of a session, or else a plan that is evaluated
  bool newer = true;                     // the runtime
  bool compiled = false;
  std::string name = "node", source = "text", statistics;  // the last: of ONNXFUSE_STATISTICS
  int launch_error = 0, allocate_error = 0, event_error = 0, capturing = 0, map_error = 0, product_error = 0,
      algorithms = 16;
  long failing = 0;  // the allocation that fails, of each call; 0 for none
};

Case make(const std::vector<Seed>& seeds, uint64_t number);

}  // namespace fuzz
