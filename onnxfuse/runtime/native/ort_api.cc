#include "ort_api.h"

#include <new>

#include "texts.h"

namespace onnxfuse {

OrtStatus* Api::status(int code, const char* message) const noexcept {
  const auto make = at<OrtStatus* (*)(int, const char*)>(0);
  try {
    return make(code, visible_lines(message).c_str());
  } catch (const std::bad_alloc&) {
    return make(code, kNoMemory);
  }
}

void Api::fail(OrtStatus* status) const {
  std::string message = at<const char* (*)(const OrtStatus*)>(2)(status);
  forget(status);
  throw Error(message);
}

std::string Api::node_name(const OrtKernelInfo* info) const {
  using Function = OrtStatus* (*)(const OrtKernelInfo*, char*, size_t*);
  size_t size = 0;
  check(at<Function>(244)(info, nullptr, &size));
  std::string name(size, '\0');
  check(at<Function>(244)(info, name.data(), &size));
  name.resize(size > 0 ? size - 1 : 0);  // the size counts the closing zero
  return name.c_str();                   // messages would end at a zero within
}

bool Api::string_attribute(const OrtKernelInfo* info, const char* name, std::string* out) const {
  using Function = OrtStatus* (*)(const OrtKernelInfo*, const char*, char*, size_t*);
  size_t size = 0;
  if (OrtStatus* status = at<Function>(87)(info, name, nullptr, &size)) {
    forget(status);
    return false;
  }
  out->assign(size, '\0');
  check(at<Function>(87)(info, name, out->data(), &size));
  out->resize(size > 0 ? size - 1 : 0);
  return true;
}

bool Api::string_attribute(const OrtShapeInferContext* context, const char* name, std::string* out) const {
  constexpr int kString = 5;  // OrtOpAttrType ORT_OP_ATTR_STRING
  const OrtOpAttr* attribute = nullptr;
  if (OrtStatus* status = at<OrtStatus* (*)(const OrtShapeInferContext*, const char*, const OrtOpAttr**)>(269)(
          context, name, &attribute)) {
    forget(status);
    return false;
  }
  using Function = OrtStatus* (*)(const OrtOpAttr*, int, void*, size_t, size_t*);
  size_t size = 0;
  // No room at all is an error that says how much is needed.
  if (OrtStatus* status = at<Function>(272)(attribute, kString, nullptr, 0, &size)) forget(status);
  out->assign(size, '\0');
  check(at<Function>(272)(attribute, kString, out->data(), size, &size));
  out->resize(size);
  if (!out->empty() && out->back() == '\0') out->pop_back();  // some releases count a closing zero
  return true;
}

void Api::infer_output(OrtShapeInferContext* context, size_t index, int type, const std::vector<int64_t>& sizes,
                       std::vector<const char*>& names) const {
  OrtTensorTypeAndShapeInfo* info = nullptr;
  check(at<OrtStatus* (*)(OrtTensorTypeAndShapeInfo**)>(57)(&info));
  struct Release {
    const Api& api;
    OrtTensorTypeAndShapeInfo* info;
    ~Release() { api.release(info); }
  } release{*this, info};
  check(at<OrtStatus* (*)(OrtTensorTypeAndShapeInfo*, int)>(58)(info, type));
  check(at<OrtStatus* (*)(OrtTensorTypeAndShapeInfo*, const int64_t*, size_t)>(59)(info, sizes.data(), sizes.size()));
  check(at<OrtStatus* (*)(OrtTensorTypeAndShapeInfo*, const char**, size_t)>(271)(info, names.data(), names.size()));
  check(at<OrtStatus* (*)(const OrtShapeInferContext*, size_t, const OrtTensorTypeAndShapeInfo*)>(270)(
      context, index, info));
}

void Api::leave_out(OrtSessionOptions* options, const char* optimiser) const {
  constexpr const char* kKey = "optimization.disable_specified_optimizers";  // names with ';' between them
  int present = 0;
  check(at<OrtStatus* (*)(const OrtSessionOptions*, const char*, int*)>(237)(options, kKey, &present));
  std::string names;
  if (present != 0) {
    using Function = OrtStatus* (*)(const OrtSessionOptions*, const char*, char*, size_t*);
    size_t size = 0;
    check(at<Function>(238)(options, kKey, nullptr, &size));
    names.assign(size, '\0');
    check(at<Function>(238)(options, kKey, names.data(), &size));
    names.resize(size > 0 ? size - 1 : 0);
  }
  names += (names.empty() ? "" : ";") + std::string(optimiser);
  check(at<OrtStatus* (*)(OrtSessionOptions*, const char*, const char*)>(130)(options, kKey, names.c_str()));
}

bool Api::bytes_attribute(const OrtKernelInfo* info, const char* name, std::string* out) const {
  OrtAllocator* allocator = nullptr;
  check(at<OrtStatus* (*)(OrtAllocator**)>(78)(&allocator));
  OrtValue* value = nullptr;
  if (OrtStatus* status = at<OrtStatus* (*)(const OrtKernelInfo*, const char*, OrtAllocator*, OrtValue**)>(236)(
          info, name, allocator, &value)) {
    forget(status);
    return false;
  }
  struct Release {
    const Api& api;
    OrtValue* value;
    ~Release() { api.at<void (*)(OrtValue*)>(96)(value); }
  } release{*this, value};
  const ShapeInfo shape(*this, shape_info(value));
  // Of other types an element may be less than a byte.
  if (const int type = shape.element_type(); type != kUint8 && type != kInt8) {
    throw Error("the attribute '" + std::string(name) + "' has element type " + std::to_string(type) +
                "; an image is a tensor of uint8");
  }
  const size_t count = shape.elements();
  if (count > 0) out->assign(static_cast<const char*>(data(value)), count);
  return true;
}

int Api::device(const OrtKernelInfo* info) const {
  OrtAllocator* allocator = nullptr;
  check(at<OrtStatus* (*)(const OrtKernelInfo*, int, OrtAllocator**)>(278)(info, kDeviceMemory, &allocator));
  const OrtMemoryInfo* memory = nullptr;
  int device = 0;
  OrtStatus* status = at<OrtStatus* (*)(const OrtAllocator*, const OrtMemoryInfo**)>(77)(allocator, &memory);
  if (status == nullptr) status = at<OrtStatus* (*)(const OrtMemoryInfo*, int*)>(72)(memory, &device);
  at<void (*)(OrtAllocator*)>(132)(allocator);
  check(status);
  return device;
}

}  // namespace onnxfuse
