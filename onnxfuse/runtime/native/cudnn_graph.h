// cuDNN's objects ("backend descriptors") and the functions that make them: no more than a convolution needs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "driver.h"

namespace onnxfuse {
namespace cudnn {

using Status = int;
using Handle = struct HandleTag*;
using Descriptor = void*;

// cudnnBackendDescriptorType_t
enum Kind {
  kPointwise = 0, kConvolution = 1, kEngine = 2, kConfiguration = 3, kHeuristic = 4, kPlan = 5,
  kConvolutionOperation = 10, kPointwiseOperation = 13, kGraph = 15, kPack = 16, kTensor = 17
};
// cudnnBackendAttributeType_t
enum Type {
  kHandle = 0, kDataType = 1, kBoolean = 2, kInt64 = 3, kFloat = 4, kPointer = 6, kConvolutionMode = 7,
  kHeuristicMode = 8, kPropagation = 10, kNote = 11, kPointwiseMode = 14, kObject = 15
};
// cudnnBackendAttributeName_t
enum Attribute {
  kMode = 0, kMathType = 1, kPropagates = 2,
  kComputed = 100, kDirection = 101, kDilations = 102, kSteps = 103, kAfter = 104, kBefore = 105, kAxes = 106,
  kAsked = 200, kOf = 201, kResults = 202,
  kEngineOf = 300,
  kPlanHandle = 400, kPlanOf = 401, kWorkspaceSize = 402,
  kAlpha = 700, kBeta = 701, kHow = 702, kWeights = 703, kImage = 704, kResult = 705,
  kFunction = 750, kOperand = 751, kOther = 752, kComputedInto = 753,
  kGraphHandle = 800, kOperations = 801,
  kAlignment = 900, kElements = 901, kSizes = 902, kStrides = 903, kNumber = 906, kVirtual = 907,
  kNumbers = 1000, kAddresses = 1001, kWorkspace = 1003,
  kNotes = 1303
};

// The functions of the library, found once in the process.
struct Library {
  // Throws Error where it is not there, or is older than 9.
  static const Library& get();

  // Throws Error with the library's word.
  void check(Status status, const std::string& what) const;

  Status (*start)(Handle* handle);
  Status (*set_stream)(Handle handle, Stream stream);
  Status (*create)(int kind, Descriptor* out);
  Status (*destroy)(Descriptor object);
  Status (*set)(Descriptor object, int attribute, int type, int64_t count, const void* values);
  Status (*get_attribute)(Descriptor object, int attribute, int type, int64_t room, int64_t* count, void* values);
  Status (*finalize)(Descriptor object);
  Status (*execute)(Handle handle, Descriptor plan, Descriptor pack);
  const char* (*status_text)(Status status);

 private:
  Library();
};

// One of the library's objects, destroyed with its owner; `what` is what is being done, for messages.
class Object {
 public:
  Object(Kind kind, std::string what);
  ~Object();
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;

  Descriptor get() const { return object_; }

  Object& set(Attribute attribute, Type type, const void* values, int64_t count = 1);
  Object& set(Attribute attribute, const Object& object) { return set(attribute, kObject, &object.object_); }
  Object& set(Attribute attribute, const std::vector<int64_t>& values) {
    return set(attribute, kInt64, values.data(), static_cast<int64_t>(values.size()));
  }
  Object& set(Attribute attribute, Type type, int value) { return set(attribute, type, &value); }
  Object& set(Attribute attribute, float value) { return set(attribute, kFloat, &value); }
  // Throws Error where the library refuses what was set.
  Object& finish();
  // Whether it does not.
  bool finishes();

  // As many values of an attribute as there are, `room` at most.  Throws Error where the library tells none.
  template <class Value>
  std::vector<Value> get(Attribute attribute, Type type, int64_t room) const {
    std::vector<Value> out(static_cast<size_t>(room));
    int64_t count = 0;
    library_.check(library_.get_attribute(object_, attribute, type, room, &count, out.data()), what_);
    out.resize(static_cast<size_t>(std::min(std::max<int64_t>(count, 0), room)));
    return out;
  }
  // The same of objects, into those that were made for them.
  void get(Attribute attribute, const std::vector<std::unique_ptr<Object>>& into, int64_t* count) const;

 private:
  const Library& library_;
  const std::string what_;
  Descriptor object_ = nullptr;
};

}  // namespace cudnn
}  // namespace onnxfuse
