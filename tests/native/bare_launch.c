/* What launching costs with nothing around it: kernels one after the other on one stream, then a wait for them. */
#include <stddef.h>
#include <time.h>

typedef int (*Launch)(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned shared,
                      void* stream, void** arguments, void** extra);
typedef int (*Synchronize)(void* stream);

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1e6 + time.tv_nsec * 1e-3;
}

/* Microseconds of `count` launches of one block and the wait; negative where a call fails.  The arguments come as
 * pointers, or, where `size` is not 0, as one block of `size` bytes. */
double bare_launches(Launch launch, Synchronize synchronize, void* function, void* stream, int count, unsigned threads,
                     void** arguments, void* block, size_t size) {
  void* extra[] = {(void*)1, block, (void*)2, &size, NULL}; /* CU_LAUNCH_PARAM_BUFFER_POINTER, _SIZE, _END */
  const double start = now();
  for (int i = 0; i < count; ++i) {
    const int result = launch(function, 1, 1, 1, threads, 1, 1, 0, stream, size ? NULL : arguments,
                              size ? extra : NULL);
    if (result != 0) return -result;
  }
  return synchronize(stream) == 0 ? now() - start : -1;
}
