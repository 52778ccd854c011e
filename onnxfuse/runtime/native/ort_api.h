// The part of ONNX Runtime's C interface that the library uses, by position in its function table.
//
// The table only ever grows, so a position means the same function in every release that has it.  No ONNX Runtime
// header is needed to build.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

struct OrtStatus;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtShapeInferContext;
struct OrtOpAttr;
struct OrtValue;
struct OrtTensorTypeAndShapeInfo;
struct OrtAllocator;
struct OrtMemoryInfo;

struct OrtApiBase {
  const void* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

// What a custom operator is to ONNX Runtime; version 18 is the lowest that has every field.
struct OrtCustomOp {
  uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp*, const void* api, const OrtKernelInfo*);
  const char* (*GetName)(const OrtCustomOp*);
  const char* (*GetExecutionProviderType)(const OrtCustomOp*);
  int (*GetInputType)(const OrtCustomOp*, size_t index);
  size_t (*GetInputTypeCount)(const OrtCustomOp*);
  int (*GetOutputType)(const OrtCustomOp*, size_t index);
  size_t (*GetOutputTypeCount)(const OrtCustomOp*);
  void (*KernelCompute)(void* kernel, OrtKernelContext*);
  void (*KernelDestroy)(void* kernel);
  int (*GetInputCharacteristic)(const OrtCustomOp*, size_t index);
  int (*GetOutputCharacteristic)(const OrtCustomOp*, size_t index);
  int (*GetInputMemoryType)(const OrtCustomOp*, size_t index);
  int (*GetVariadicInputMinArity)(const OrtCustomOp*);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp*);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp*);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp*);
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, const void* api, const OrtKernelInfo*, void** kernel);
  OrtStatus* (*KernelComputeV2)(void* kernel, OrtKernelContext*);
  OrtStatus* (*InferOutputShapeFn)(const OrtCustomOp*, OrtShapeInferContext*);
  int (*GetStartVersion)(const OrtCustomOp*);
  int (*GetEndVersion)(const OrtCustomOp*);
  size_t (*GetMayInplace)(int** input_index, int** output_index);
  void (*ReleaseMayInplace)(int* input_index, int* output_index);
  size_t (*GetAliasMap)(int** input_index, int** output_index);
  void (*ReleaseAliasMap)(int* input_index, int* output_index);
};
static_assert(offsetof(OrtCustomOp, KernelComputeV2) == 18 * 8);
static_assert(sizeof(OrtCustomOp) == 26 * 8);

namespace onnxfuse {

constexpr uint32_t kOldestApi = 20;              // ONNX Runtime 1.20
constexpr uint32_t kApiWithShapeReference = 24;  // reads a shape without a heap allocation
constexpr uint32_t kApiWithInference = 24;       // asks a node with absent inputs for its output types, and lives
constexpr uint32_t kCustomOpVersion = 18;
constexpr int kFail = 1;             // OrtErrorCode ORT_FAIL
constexpr const char* kNoMemory = "onnxfuse: not enough memory";
constexpr int kInvalidArgument = 2;  // OrtErrorCode ORT_INVALID_ARGUMENT
constexpr int kOptional = 1, kVariadic = 2;
constexpr int kHostMemory = -2, kDeviceMemory = 0;
constexpr int kUint8 = 2, kInt8 = 3, kInt32 = 6, kInt64 = 7;  // element types

// Every error of the library; its text reaches the user as the message of a status.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// ONNX Runtime's function table.  A call that fails throws Error with the runtime's own message.
class Api {
 public:
  Api() = default;
  // `shape_reference`: whether the runtime is new enough for that function.
  Api(const void* table, bool shape_reference)
      : slots_(static_cast<void* const*>(table)), shape_reference_(shape_reference) {}

  // The message is made visible first: see visible_lines.
  OrtStatus* status(int code, const char* message) const noexcept;
  OrtCustomOpDomain* create_domain(const char* name) const {
    OrtCustomOpDomain* domain = nullptr;
    check(at<OrtStatus* (*)(const char*, OrtCustomOpDomain**)>(26)(name, &domain));
    return domain;
  }
  void add_op(OrtCustomOpDomain* domain, const OrtCustomOp* op) const {
    check(at<OrtStatus* (*)(OrtCustomOpDomain*, const OrtCustomOp*)>(27)(domain, op));
  }
  void add_domain(OrtSessionOptions* options, OrtCustomOpDomain* domain) const {
    check(at<OrtStatus* (*)(OrtSessionOptions*, OrtCustomOpDomain*)>(28)(options, domain));
  }
  // Adds a name to those of the runtime's optimisations that sessions of these options leave out.
  void leave_out(OrtSessionOptions* options, const char* optimiser) const;
  void* data(const OrtValue* value) const {
    void* data = nullptr;
    check(at<OrtStatus* (*)(const OrtValue*, void**)>(51)(value, &data));
    return data;
  }

  const void* table() const { return slots_; }
  bool shape_reference() const { return shape_reference_; }
  // Element type and sizes, which belong to the value; only where shape_reference().
  int shape_of(const OrtValue* value, const int64_t** sizes, size_t* rank) const {
    int type = 0;
    check(at<OrtStatus* (*)(const OrtValue*, int*, const int64_t**, size_t*)>(414)(value, &type, sizes, rank));
    return type;
  }
  OrtTensorTypeAndShapeInfo* shape_info(const OrtValue* value) const {
    OrtTensorTypeAndShapeInfo* info = nullptr;
    check(at<OrtStatus* (*)(const OrtValue*, OrtTensorTypeAndShapeInfo**)>(65)(value, &info));
    return info;
  }
  int element_type(const OrtTensorTypeAndShapeInfo* info) const {
    int type = 0;
    check(at<OrtStatus* (*)(const OrtTensorTypeAndShapeInfo*, int*)>(60)(info, &type));
    return type;
  }
  size_t elements(const OrtTensorTypeAndShapeInfo* info) const {
    size_t count = 0;
    check(at<OrtStatus* (*)(const OrtTensorTypeAndShapeInfo*, size_t*)>(64)(info, &count));
    return count;
  }
  size_t rank(const OrtTensorTypeAndShapeInfo* info) const {
    size_t rank = 0;
    check(at<OrtStatus* (*)(const OrtTensorTypeAndShapeInfo*, size_t*)>(61)(info, &rank));
    return rank;
  }
  void sizes(const OrtTensorTypeAndShapeInfo* info, int64_t* sizes, size_t rank) const {
    check(at<OrtStatus* (*)(const OrtTensorTypeAndShapeInfo*, int64_t*, size_t)>(62)(info, sizes, rank));
  }
  // A name for each axis; empty, or null, for one that has none.
  void size_names(const OrtTensorTypeAndShapeInfo* info, const char** names, size_t rank) const {
    check(at<OrtStatus* (*)(const OrtTensorTypeAndShapeInfo*, const char**, size_t)>(63)(info, names, rank));
  }
  void release(OrtTensorTypeAndShapeInfo* info) const { at<void (*)(OrtTensorTypeAndShapeInfo*)>(99)(info); }

  // What is known of an input before the session runs; it belongs to the context.
  const OrtTensorTypeAndShapeInfo* inferred_input(const OrtShapeInferContext* context, size_t index) const {
    OrtTensorTypeAndShapeInfo* info = nullptr;
    check(at<OrtStatus* (*)(const OrtShapeInferContext*, size_t, OrtTensorTypeAndShapeInfo**)>(268)(
        context, index, &info));
    return info;
  }
  // Tells the type and sizes of an output: a size is a number where its name is empty.
  void infer_output(OrtShapeInferContext* context, size_t index, int type, const std::vector<int64_t>& sizes,
                    std::vector<const char*>& names) const;

  // Null where an optional input is absent.
  const OrtValue* input(const OrtKernelContext* context, size_t index) const {
    const OrtValue* value = nullptr;
    check(at<OrtStatus* (*)(const OrtKernelContext*, size_t, const OrtValue**)>(90)(context, index, &value));
    return value;
  }
  OrtValue* output(OrtKernelContext* context, size_t index, const int64_t* sizes, size_t rank) const {
    OrtValue* value = nullptr;
    check(at<OrtStatus* (*)(OrtKernelContext*, size_t, const int64_t*, size_t, OrtValue**)>(91)(
        context, index, sizes, rank, &value));
    return value;
  }
  void* stream(const OrtKernelContext* context) const {
    void* stream = nullptr;
    check(at<OrtStatus* (*)(const OrtKernelContext*, void**)>(193)(context, &stream));
    return stream;
  }

  // Absent optional inputs count.
  size_t node_inputs(const OrtKernelInfo* info) const {
    size_t count = 0;
    check(at<OrtStatus* (*)(const OrtKernelInfo*, size_t*)>(230)(info, &count));
    return count;
  }
  size_t node_outputs(const OrtKernelInfo* info) const {
    size_t count = 0;
    check(at<OrtStatus* (*)(const OrtKernelInfo*, size_t*)>(231)(info, &count));
    return count;
  }
  std::string node_name(const OrtKernelInfo* info) const;
  // False where the node has no such attribute.  Bytes are those of a tensor of uint8 or int8; throws Error where the
  // tensor has another type, whose elements are no bytes.
  bool string_attribute(const OrtKernelInfo* info, const char* name, std::string* out) const;
  bool string_attribute(const OrtShapeInferContext* context, const char* name, std::string* out) const;
  bool bytes_attribute(const OrtKernelInfo* info, const char* name, std::string* out) const;
  // Ordinal of the device that the node was given to.
  int device(const OrtKernelInfo* info) const;

 private:
  template <class Function>
  Function at(int slot) const {
    return reinterpret_cast<Function>(slots_[slot]);
  }
  void check(OrtStatus* status) const {
    if (status != nullptr) fail(status);
  }
  [[noreturn]] void fail(OrtStatus* status) const;
  void forget(OrtStatus* status) const { at<void (*)(OrtStatus*)>(93)(status); }

  void* const* slots_ = nullptr;
  bool shape_reference_ = false;
};

// Type and sizes of a value, released with it.
class ShapeInfo {
 public:
  ShapeInfo(const Api& api, OrtTensorTypeAndShapeInfo* info) : api_(api), info_(info) {}
  ~ShapeInfo() { api_.release(info_); }
  ShapeInfo(const ShapeInfo&) = delete;
  ShapeInfo& operator=(const ShapeInfo&) = delete;
  int element_type() const { return api_.element_type(info_); }
  size_t rank() const { return api_.rank(info_); }
  size_t elements() const { return api_.elements(info_); }
  void sizes(int64_t* out, size_t rank) const { api_.sizes(info_, out, rank); }

 private:
  const Api& api_;
  OrtTensorTypeAndShapeInfo* const info_;
};

// An ONNX Runtime: its functions and its release, as "1.31.1".
struct Runtime {
  Api api;
  std::string release;
};

}  // namespace onnxfuse
