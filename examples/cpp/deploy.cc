// Runs a fused model with ONNX Runtime's C++ API: no Python, no compiler.
//
//   deploy MODEL INPUTS OUTPUTS [LIBRARY]
//
// Reads INPUTS/NAME.npy for every input of the model and writes OUTPUTS/NAME.npy for every output.  With LIBRARY, the
// path of libonnxfuse.so, fused nodes run as CUDA kernels, which the model must hold:
//
//   onnxfuse optimize model.onnx --embed sm_80,sm_90
//
// Without it the model runs on the CPU, and ONNX Runtime puts the original nodes in the fused nodes' places.
#include <onnxruntime_cxx_api.h>

#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "npy.h"

namespace {

// Kernels are loaded when the session is created; one that cannot be had for this GPU is an exception then.
Ort::Session session_of(Ort::Env& env, const char* model, const char* library) {
  Ort::SessionOptions options;
  if (library != nullptr) {
    options.RegisterCustomOpsLibrary(library);
    OrtCUDAProviderOptionsV2* cuda = nullptr;
    Ort::ThrowOnError(Ort::GetApi().CreateCUDAProviderOptions(&cuda));
    options.AppendExecutionProvider_CUDA_V2(*cuda);
    Ort::GetApi().ReleaseCUDAProviderOptions(cuda);
  }
  return Ort::Session(env, model, options);
}

std::vector<const char*> pointers(const std::vector<std::string>& names) {
  std::vector<const char*> found;
  for (const std::string& name : names) found.push_back(name.c_str());
  return found;
}

void run(const char* model, const std::string& inputs, const std::string& outputs, const char* library) {
  Ort::Env env(ORT_LOGGING_LEVEL_WARNING, "deploy");
  Ort::Session session = session_of(env, model, library);
  Ort::AllocatorWithDefaultOptions allocator;
  auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);

  std::vector<std::string> given, wanted;
  std::vector<npy::Array> arrays;
  std::vector<Ort::Value> values;
  for (std::size_t i = 0; i < session.GetInputCount(); ++i) {
    given.emplace_back(session.GetInputNameAllocated(i, allocator).get());
    arrays.push_back(npy::read(inputs + "/" + given.back() + ".npy"));
  }
  for (npy::Array& array : arrays)
    values.push_back(Ort::Value::CreateTensor(memory, array.bytes.data(), array.bytes.size(), array.shape.data(),
                                              array.shape.size(), array.type));
  for (std::size_t i = 0; i < session.GetOutputCount(); ++i)
    wanted.emplace_back(session.GetOutputNameAllocated(i, allocator).get());

  auto results = session.Run(Ort::RunOptions{}, pointers(given).data(), values.data(), values.size(),
                             pointers(wanted).data(), wanted.size());
  for (std::size_t i = 0; i < results.size(); ++i) {
    auto info = results[i].GetTensorTypeAndShapeInfo();
    npy::write(outputs + "/" + wanted[i] + ".npy", info.GetElementType(), info.GetShape(),
               results[i].GetTensorRawData());
    std::printf("%s", wanted[i].c_str());
    for (std::int64_t size : info.GetShape()) std::printf(" %lld", static_cast<long long>(size));
    std::printf("\n");
  }
}

}  // namespace

int main(int count, char** words) {
  if (count != 4 && count != 5) {
    std::fprintf(stderr, "usage: deploy MODEL INPUTS OUTPUTS [LIBRARY]\n");
    return 2;
  }
  try {
    run(words[1], words[2], words[3], count == 5 ? words[4] : nullptr);
  } catch (const std::exception& error) {  // ONNX Runtime's too
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
