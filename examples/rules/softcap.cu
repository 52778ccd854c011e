// y = cap * tanh(x / cap), element by element; any number of blocks and threads.
extern "C" __global__ void softcap(const float* x, const float* cap, float* y, long long count) {
  const float limit = *cap;
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step)
    y[i] = limit * tanhf(x[i] / limit);
}
