// Runs a fused model with ONNX Runtime's C++ API; no Python, no compiler.
//
//   onnxfuse optimize encoder.onnx --embed sm_80,sm_90
//   g++ -std=c++17 deploy.cc -I$ORT/include -L$ORT/lib -lonnxruntime -o deploy
//   ./deploy encoder.fused.onnx libonnxfuse.so
//
// $ORT is ONNX Runtime's GPU release, 1.20 or newer.  libonnxfuse.so lies where
// python -c 'import onnxfuse; print(onnxfuse.library_path())' says.
#include <onnxruntime_cxx_api.h>

#include <cstdint>
#include <cstdio>
#include <vector>

int main(int count, char** words) {
  if (count != 3) {
    std::fprintf(stderr, "usage: deploy MODEL LIBRARY\n");
    return 2;
  }
  try {
    Ort::Env env(ORT_LOGGING_LEVEL_WARNING, "deploy");
    Ort::SessionOptions options;
    options.RegisterCustomOpsLibrary(words[2]);

    OrtCUDAProviderOptionsV2* cuda = nullptr;
    Ort::ThrowOnError(Ort::GetApi().CreateCUDAProviderOptions(&cuda));
    options.AppendExecutionProvider_CUDA_V2(*cuda);
    Ort::GetApi().ReleaseCUDAProviderOptions(cuda);

    // Kernels are loaded here; a kernel that cannot be had for this GPU is an exception here.
    Ort::Session session(env, words[1], options);

    const std::int64_t shape[] = {8, 128};  // batch, sequence
    std::vector<std::int64_t> ids(8 * 128, 1), mask(8 * 128, 1);
    auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
    const Ort::Value inputs[] = {
        Ort::Value::CreateTensor<std::int64_t>(memory, ids.data(), ids.size(), shape, 2),
        Ort::Value::CreateTensor<std::int64_t>(memory, mask.data(), mask.size(), shape, 2),
    };
    const char* names[] = {"input_ids", "attention_mask"};
    const char* results[] = {"last_hidden_state"};
    auto outputs = session.Run(Ort::RunOptions{}, names, inputs, 2, results, 1);
    for (std::int64_t size : outputs[0].GetTensorTypeAndShapeInfo().GetShape())
      std::printf("%lld ", static_cast<long long>(size));
    std::printf("\n");
  } catch (const Ort::Exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
