#include "op.h"

#include <exception>
#include <new>

#include "driver.h"
#include "inference.h"
#include "kernel.h"
#include "texts.h"

namespace onnxfuse {
namespace {

// Why the CPU cannot run a node; nothing where the driver is a stand-in whose kernels do run there.
void refuse_cpu(const std::string& node, const std::string& op) {
  std::string driver;
  try {
    if (Driver::get().host_memory) return;
  } catch (const Error& error) {
    driver = std::string(" (") + error.what() + ")";
  }
  throw Error("onnxfuse: node '" + excerpt(node) + "' (" + op +
              ") was given to the CPU, and its kernel runs on a GPU: this session has no working "
              "CUDAExecutionProvider" + driver + ", or all inputs of the node lie in host memory; put "
              "CUDAExecutionProvider into the session's providers and install what it needs (pip install "
              "onnxfuse[cuda]), or open the model without the onnxfuse library, as onnxfuse.session does where there "
              "is no GPU");
}

// No exception may reach the runtime; the only ones that are no Error say that there is no memory, also for a message.
OrtStatus* create_kernel(const OrtCustomOp* op, const void*, const OrtKernelInfo* info, void** kernel) {
  const auto& region = static_cast<const RegionOp&>(*op);
  const Api& api = region.runtime.api;
  try {
    if (region.cpu) refuse_cpu(api.node_name(info), region.name);
    *kernel = new Kernel(region.runtime, info, region.name);
    return nullptr;
  } catch (const std::bad_alloc&) {
    return api.status(kFail, kNoMemory);
  } catch (const std::exception& error) {
    return api.status(kFail, error.what());
  }
}

OrtStatus* compute(void* kernel, OrtKernelContext* context) {
  auto* self = static_cast<Kernel*>(kernel);
  try {
    try {
      self->run(context);
      return nullptr;
    } catch (const Error& error) {
      return self->api.status(kFail, ("onnxfuse: " + self->label() + ": " + error.what()).c_str());
    }
  } catch (const std::exception&) {
    return self->api.status(kFail, kNoMemory);
  }
}

OrtStatus* infer(const OrtCustomOp* op, OrtShapeInferContext* context) {
  try {
    infer_outputs(static_cast<const RegionOp*>(op)->runtime.api, context);
  } catch (const std::exception&) {
    // The runtime drops a status, and leaks it; where the model does not declare the types it says so, and else creating
    // the kernel finds the same fault.
  }
  return nullptr;
}

}  // namespace

RegionOp::RegionOp(const Runtime& runtime, int number, bool cpu, bool infers)
    : OrtCustomOp{}, runtime(runtime), name("Region" + std::to_string(number)), cpu(cpu) {
  version = kCustomOpVersion;
  GetName = [](const OrtCustomOp* op) { return static_cast<const RegionOp*>(op)->name.c_str(); };
  GetExecutionProviderType = [](const OrtCustomOp* op) {
    return static_cast<const RegionOp*>(op)->cpu ? "CPUExecutionProvider" : "CUDAExecutionProvider";
  };
  GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return kHostInputs + 1; };
  GetInputType = [](const OrtCustomOp*, size_t) { return 0; };  // any
  GetInputCharacteristic = [](const OrtCustomOp*, size_t index) { return index < kHostInputs ? kOptional : kVariadic; };
  GetInputMemoryType = [](const OrtCustomOp*, size_t index) {
    return index < kHostInputs ? kHostMemory : kDeviceMemory;
  };
  GetVariadicInputMinArity = [](const OrtCustomOp*) { return 1; };
  GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 0; };
  GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return 1; };
  GetOutputType = [](const OrtCustomOp*, size_t) { return 0; };
  GetOutputCharacteristic = [](const OrtCustomOp*, size_t) { return kVariadic; };
  GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
  GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 0; };
  if (infers) InferOutputShapeFn = infer;
  CreateKernelV2 = create_kernel;
  KernelComputeV2 = compute;
  KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
}

}  // namespace onnxfuse
