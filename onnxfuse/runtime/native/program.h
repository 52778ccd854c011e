// A launch plan with its loaded kernels: what all nodes of one plan and one kernel text share, in all sessions.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "driver.h"
#include "images.h"
#include "plan.h"
#include "prepared.h"

namespace onnxfuse {

// A place in every thread's table of prepared launches.
class Place {
 public:
  Place() : Place(take()) {}
  ~Place();
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;

  const uint32_t index;       // used again once it is free
  const uint64_t generation;  // used once

 private:
  static std::pair<uint32_t, uint64_t> take();
  explicit Place(std::pair<uint32_t, uint64_t> taken) : index(taken.first), generation(taken.second) {}
};

// Nodes of one structure (the layers of a model) share one, so that its memory is in the processor's cache when the
// next of them runs.  Never changes once it is made.
class Program {
 public:
  // The program of a plan and a kernel text on a GPU, made where no live node has it; `origin` tells where its image
  // came from, `attribute` reads the images that the node embeds.  Throws Error.
  static std::shared_ptr<const Program> of(Device* device, const std::string& plan, const std::string& source,
                                           const ImageAttribute& attribute, const char** origin);

  Program(Device* device, const std::string& plan, const std::string& source, const ImageAttribute& attribute,
          const char** origin);
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // What this thread has prepared; made at its first run.
  Prepared& prepared() const;

  Device& device;
  std::string missing;  // why variants that call a library were left out of the plan, or ""
  const Plan plan;
  std::vector<std::vector<Function>> functions;  // by variant, then step; null of a call
  size_t kernels = 0;                            // distinct ones
  Pool pool = nullptr;                           // where the plan has scratch

 private:
  std::shared_ptr<const LoadedModule> module_;
  Place place_;
};

}  // namespace onnxfuse
