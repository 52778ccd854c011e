#include "ort_api.h"

namespace onnxfuse {

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
  return name;
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
  OrtTensorTypeAndShapeInfo* shape = shape_info(value);
  size_t count = 0;
  OrtStatus* status = at<OrtStatus* (*)(const OrtTensorTypeAndShapeInfo*, size_t*)>(64)(shape, &count);
  this->release(shape);
  check(status);
  out->assign(static_cast<const char*>(data(value)), count);
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
