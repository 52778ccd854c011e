// A stand-in for ONNX Runtime: the functions of its table that the library calls, over nodes and tensors in plain
// structs.  What a caller may read of a tensor is as long as the tensor, so that sanitizers see a step past it.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ort_api.h"

struct OrtStatus {
  std::string message;
};
struct OrtTensorTypeAndShapeInfo {
  int type = 1;
  std::vector<int64_t> sizes;
  std::vector<const char*> names;
};
struct OrtValue {
  OrtTensorTypeAndShapeInfo shape;
  std::vector<char> bytes;
  void* address = nullptr;  // in place of that of the bytes
};
struct OrtKernelInfo {
  std::string name;
  std::map<std::string, std::string> texts;
  std::map<std::string, OrtValue> tensors;
  size_t inputs = 0, outputs = 0;
};
struct OrtKernelContext {
  std::vector<std::unique_ptr<OrtValue>> inputs;  // null where absent
  std::vector<OrtValue> outputs;
};
struct OrtOpAttr {
  const std::string* text;
};
struct OrtShapeInferContext {
  const OrtKernelInfo* node = nullptr;
  std::vector<OrtTensorTypeAndShapeInfo> inputs;
  std::vector<OrtOpAttr> read;
  std::map<size_t, OrtTensorTypeAndShapeInfo> told;
};
struct OrtCustomOpDomain {
  std::vector<const OrtCustomOp*> ops;
};
struct OrtSessionOptions {
  std::vector<const OrtCustomOpDomain*> domains;
  std::map<std::string, std::string> settings;
};
struct OrtMemoryInfo {
  int device = 0;
};
struct OrtAllocator {
  OrtMemoryInfo memory;
};

namespace fake {

// Allocations until one fails; 0 for none.  The stand-in's own never fail: the real one's do not throw into a caller.
inline thread_local long failing = 0;

class Own {
 public:
  Own() : left_(std::exchange(failing, 0)) {}
  ~Own() { failing = left_; }

 private:
  const long left_;
};

using Status = OrtStatus*;
using Info = OrtTensorTypeAndShapeInfo;
constexpr size_t kMostOutput = 1 << 16;  // bytes

inline Status fail(const std::string& message) {
  const Own own;
  return new OrtStatus{message};
}

inline size_t count(const Info* info) {
  size_t count = 1;
  for (const int64_t size : info->sizes) count *= static_cast<size_t>(size);
  return count;
}

// A text into a buffer with room for `*size` bytes, as the runtime's functions do it.
inline Status give(const std::string& text, char* out, size_t* size) {
  const size_t room = *size;
  *size = text.size() + 1;
  if (out == nullptr) return nullptr;
  if (room < *size) return fail("the buffer is too small");
  std::memcpy(out, text.c_str(), *size);
  return nullptr;
}

inline Status output(OrtKernelContext* context, size_t index, const int64_t* sizes, size_t rank, OrtValue** out) {
  const Own own;
  if (index >= context->outputs.size()) return fail("no such output");
  uint64_t bytes = 4;
  for (size_t axis = 0; axis < rank; ++axis) {
    if (sizes[axis] < 0) return fail("a size below zero");
    if (__builtin_mul_overflow(bytes, static_cast<uint64_t>(sizes[axis]), &bytes)) return fail("sizes past 64 bits");
  }
  if (bytes > kMostOutput) return fail("not enough memory");
  OrtValue& value = context->outputs[index];
  value.shape.sizes.assign(sizes, sizes + rank);
  value.bytes.resize(bytes);
  *out = &value;
  return nullptr;
}

template <class Function>
void set(std::vector<void*>& table, size_t slot, Function function) {
  table[slot] = reinterpret_cast<void*>(+function);
}

inline std::vector<void*> make_table() {
  std::vector<void*> table(420, nullptr);
  using Node = const OrtKernelInfo*;
  using Infer = const OrtShapeInferContext*;
  set(table, 0, [](int, const char* message) -> Status { return fail(message); });
  set(table, 2, [](const OrtStatus* status) -> const char* { return status->message.c_str(); });
  set(table, 93, [](Status status) { delete status; });
  // Registration.
  set(table, 26, [](const char*, OrtCustomOpDomain** out) -> Status {
    const Own own;
    *out = new OrtCustomOpDomain;
    return nullptr;
  });
  set(table, 27, [](OrtCustomOpDomain* domain, const OrtCustomOp* op) -> Status {
    const Own own;
    domain->ops.push_back(op);
    return nullptr;
  });
  set(table, 28, [](OrtSessionOptions* options, OrtCustomOpDomain* domain) -> Status {
    const Own own;
    options->domains.push_back(domain);
    return nullptr;
  });
  set(table, 130, [](OrtSessionOptions* options, const char* key, const char* value) -> Status {
    const Own own;
    options->settings[key] = value;
    return nullptr;
  });
  set(table, 237, [](const OrtSessionOptions* options, const char* key, int* there) -> Status {
    const Own own;
    *there = options->settings.count(key) > 0;
    return nullptr;
  });
  set(table, 238, [](const OrtSessionOptions* options, const char* key, char* out, size_t* size) -> Status {
    const Own own;
    return give(options->settings.at(key), out, size);
  });
  // Values and their shapes.
  set(table, 51, [](OrtValue* value, void** out) -> Status {
    *out = value->address != nullptr ? value->address : value->bytes.data();
    return nullptr;
  });
  set(table, 414, [](const OrtValue* value, int* type, const int64_t** sizes, size_t* rank) -> Status {
    *type = value->shape.type, *sizes = value->shape.sizes.data(), *rank = value->shape.sizes.size();
    return nullptr;
  });
  set(table, 65, [](const OrtValue* value, Info** out) -> Status {
    const Own own;
    *out = new Info(value->shape);
    return nullptr;
  });
  set(table, 57, [](Info** out) -> Status { const Own own; *out = new Info; return nullptr; });
  set(table, 58, [](Info* info, int type) -> Status { info->type = type; return nullptr; });
  set(table, 59, [](Info* info, const int64_t* sizes, size_t rank) -> Status {
    const Own own;
    info->sizes.assign(sizes, sizes + rank);
    return nullptr;
  });
  set(table, 60, [](const Info* info, int* type) -> Status { *type = info->type; return nullptr; });
  set(table, 61, [](const Info* info, size_t* rank) -> Status { *rank = info->sizes.size(); return nullptr; });
  set(table, 62, [](const Info* info, int64_t* sizes, size_t rank) -> Status {
    std::copy_n(info->sizes.begin(), rank, sizes);
    return nullptr;
  });
  set(table, 63, [](const Info* info, const char** names, size_t rank) -> Status {
    for (size_t axis = 0; axis < rank; ++axis) names[axis] = axis < info->names.size() ? info->names[axis] : "";
    return nullptr;
  });
  set(table, 64, [](const Info* info, size_t* out) -> Status { *out = count(info); return nullptr; });
  set(table, 96, [](OrtValue* value) { delete value; });
  set(table, 99, [](Info* info) { delete info; });
  set(table, 271, [](Info* info, const char** names, size_t rank) -> Status {
    for (size_t axis = 0; axis < rank; ++axis) (void)std::strlen(names[axis]);
    return rank == info->sizes.size() ? nullptr : fail("as many names as sizes are wanted");
  });
  // A run.
  set(table, 90, [](const OrtKernelContext* context, size_t index, const OrtValue** out) -> Status {
    if (index >= context->inputs.size()) return fail("no such input");
    *out = context->inputs[index].get();
    return nullptr;
  });
  set(table, 91, output);
  set(table, 193, [](const OrtKernelContext*, void** out) -> Status { *out = nullptr; return nullptr; });
  // A node.
  set(table, 230, [](Node node, size_t* out) -> Status { *out = node->inputs; return nullptr; });
  set(table, 231, [](Node node, size_t* out) -> Status { *out = node->outputs; return nullptr; });
  set(table, 244, [](Node node, char* out, size_t* size) -> Status { return give(node->name, out, size); });
  set(table, 87, [](Node node, const char* name, char* out, size_t* size) -> Status {
    const Own own;
    const auto found = node->texts.find(name);
    return found == node->texts.end() ? fail("no such attribute") : give(found->second, out, size);
  });
  set(table, 78, [](OrtAllocator** out) -> Status {
    static OrtAllocator allocator;
    *out = &allocator;
    return nullptr;
  });
  set(table, 236, [](Node node, const char* name, OrtAllocator*, OrtValue** out) -> Status {
    const Own own;
    const auto found = node->tensors.find(name);
    if (found == node->tensors.end()) return fail("no such attribute");
    *out = new OrtValue(found->second);
    return nullptr;
  });
  set(table, 278, [](Node, int, OrtAllocator** out) -> Status {
    static OrtAllocator allocator;
    *out = &allocator;
    return nullptr;
  });
  set(table, 77, [](const OrtAllocator* allocator, const OrtMemoryInfo** out) -> Status {
    *out = &allocator->memory;
    return nullptr;
  });
  set(table, 72, [](const OrtMemoryInfo* memory, int* out) -> Status { *out = memory->device; return nullptr; });
  set(table, 132, [](OrtAllocator*) {});
  // What is known of a node before it runs.
  set(table, 268, [](Infer context, size_t index, const Info** out) -> Status {
    if (index >= context->inputs.size()) return fail("no such input");
    *out = &context->inputs[index];
    return nullptr;
  });
  set(table, 269, [](Infer context, const char* name, const OrtOpAttr** out) -> Status {
    const Own own;
    const auto found = context->node->texts.find(name);
    if (found == context->node->texts.end()) return fail("no such attribute");
    auto& read = const_cast<OrtShapeInferContext*>(context)->read;
    read.reserve(16);  // whose addresses stay
    read.push_back({&found->second});
    *out = &read.back();
    return nullptr;
  });
  set(table, 272, [](const OrtOpAttr* attribute, int, void* out, size_t room, size_t* size) -> Status {
    *size = attribute->text->size();
    if (room < *size) return fail("the buffer is too small");
    if (room > 0) std::memcpy(out, attribute->text->data(), *size);
    return nullptr;
  });
  set(table, 270, [](OrtShapeInferContext* context, size_t index, const Info* info) -> Status {
    const Own own;
    if (index >= context->node->outputs) return fail("no such output");
    context->told[index] = *info;
    return nullptr;
  });
  return table;
}

// A runtime that shows shapes without a copy and asks for types, and one that does neither.
inline const OrtApiBase* base(bool newer) {
  static const std::vector<void*> tables[2] = {make_table(), make_table()};
  static const OrtApiBase bases[2] = {
      {[](uint32_t) -> const void* { return tables[0].data(); }, [] { return "1.20.1"; }},
      {[](uint32_t) -> const void* { return tables[1].data(); }, [] { return "1.31.1"; }},
  };
  return &bases[newer];
}

// What a call of the library came to: "" where it went well.
inline std::string message(OrtStatus* status) {
  if (status == nullptr) return "";
  const std::unique_ptr<OrtStatus> owned(status);
  return owned->message.empty() ? "an empty message" : owned->message;
}

}  // namespace fake
