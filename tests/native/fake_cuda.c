/* A stand-in for the CUDA driver whose device memory is host memory and whose kernels are the C functions below.
 * An image is a text: "FAKE", then the names of its kernels, each on a line of its own. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;
enum { kOk = 0, kInvalidValue = 1, kInvalidImage = 200, kNotFound = 500, kNotReady = 600, kUnsupported = 900 };

const int onnxfuse_host_memory = 1;

/* What tests set and read. */
int fake_major = 9, fake_minor = 0, fake_pools = 1, fake_launch_error = 0, fake_allocate_error = 0, fake_modules = 0;
long fake_launches = 0, fake_allocated = 0, fake_shared_attribute = 0;
unsigned fake_last[7];
int fake_reached = 1, fake_capturing = 0, fake_event_error = 0, fake_events = 0;
static __thread void* current = NULL;
static __thread int capture_mode = 0;
static __thread long clock_us = 0; /* every launch takes 5 */

Result cuInit(unsigned flags) { return flags == 0 ? kOk : kInvalidValue; }
Result cuDriverGetVersion(int* version) { *version = 13000; return kOk; }
Result cuDeviceGetCount(int* count) { *count = 1; return kOk; }
Result cuDeviceGet(int* device, int ordinal) { *device = 40 + ordinal; return ordinal == 0 ? kOk : 101; }
Result cuDeviceGetName(char* name, int size, int device) {
  snprintf(name, size, "Fake GPU \"%d\"", device);
  return kOk;
}
Result cuDeviceGetAttribute(int* value, int attribute, int device) {
  (void)device;
  switch (attribute) {
    case 16: *value = 132; return kOk;
    case 75: *value = fake_major; return kOk;
    case 76: *value = fake_minor; return kOk;
    case 97: *value = 227 * 1024; return kOk;
    case 115: *value = fake_pools; return kOk;
    default: return kInvalidValue;
  }
}
Result cuDevicePrimaryCtxRetain(void** context, int device) { *context = (void*)(intptr_t)device; return kOk; }
Result cuCtxGetCurrent(void** context) { *context = current; return kOk; }
Result cuCtxSetCurrent(void* context) { current = context; return kOk; }

typedef void (*Kernel)(void** arguments);
static void add_one(void** a) {
  const float* x = *(const float**)a[0];
  float* y = *(float**)a[1];
  for (int64_t i = 0; i < *(int64_t*)a[2]; ++i) y[i] = x[i] + 1;
}
static void add_more(void** a) {
  const float* x = *(const float**)a[0];
  float* y = *(float**)a[1];
  for (int64_t i = 0; i < *(int64_t*)a[3]; ++i) y[i] = x[i] + *(int32_t*)a[2];
}
static void nothing(void** a) { (void)a; }
static const struct { const char* name; Kernel run; } kernels[] = {
    {"add_one", add_one}, {"add_more", add_more}, {"nothing", nothing}};

Result cuModuleLoadData(void** module, const void* image) {
  if (strncmp(image, "FAKE\n", 5) != 0) return kInvalidImage;
  if (current == NULL) return 201;
  *module = strdup(image);
  __atomic_add_fetch(&fake_modules, 1, __ATOMIC_SEQ_CST);
  return kOk;
}
Result cuModuleUnload(void* module) {
  free(module);
  __atomic_sub_fetch(&fake_modules, 1, __ATOMIC_SEQ_CST);
  return kOk;
}
Result cuModuleGetFunction(void** function, void* module, const char* name) {
  char line[256];
  snprintf(line, sizeof line, "\n%s\n", name);
  if (strstr(module, line) == NULL) return kNotFound;
  for (size_t i = 0; i < sizeof kernels / sizeof *kernels; ++i) {
    if (strcmp(kernels[i].name, name) == 0) {
      *function = (void*)kernels[i].run;
      return kOk;
    }
  }
  return kNotFound;
}
Result cuFuncGetAttribute(int* value, int attribute, void* function) {
  (void)function;
  *value = attribute == 1 ? 512 : 32;
  return kOk;
}
Result cuFuncSetAttribute(void* function, int attribute, int value) {
  (void)function;
  fake_shared_attribute = attribute == 8 ? value : -1;
  return kOk;
}
Result cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                      unsigned shared, void* stream, void** arguments, void** extra) {
  (void)stream;
  if (extra != NULL || current == NULL || gx * gy * gz == 0 || bx * by * bz == 0) return kInvalidValue;
  if (fake_launch_error != 0) return fake_launch_error;
  const unsigned sizes[7] = {gx, gy, gz, bx, by, bz, shared};
  memcpy(fake_last, sizes, sizeof sizes);
  ((Kernel)function)(arguments);
  clock_us += 5;
  __atomic_add_fetch(&fake_launches, 1, __ATOMIC_SEQ_CST);
  return kOk;
}
Result cuMemPoolCreate(void** pool, const void* properties) {
  const int* fields = properties;
  *pool = (void*)1;
  return fields[0] == 1 && fields[1] == 0 && fields[2] == 1 && fields[3] == 0 ? kOk : kInvalidValue;
}
Result cuMemPoolSetAttribute(void* pool, int attribute, void* value) {
  return pool == (void*)1 && attribute == 4 && *(uint64_t*)value == UINT64_MAX ? kOk : kInvalidValue;
}
Result cuMemAllocFromPoolAsync(uint64_t* address, size_t size, void* pool, void* stream) {
  (void)stream;
  if (fake_allocate_error != 0) return fake_allocate_error;
  if (pool != (void*)1 || size == 0) return kInvalidValue;
  *address = (uint64_t)malloc(size);
  __atomic_add_fetch(&fake_allocated, 1, __ATOMIC_SEQ_CST);
  return kOk;
}
Result cuMemFreeAsync(uint64_t address, void* stream) {
  (void)stream;
  free((void*)address);
  __atomic_sub_fetch(&fake_allocated, 1, __ATOMIC_SEQ_CST);
  return kOk;
}

/* An event holds the time at which it was recorded; one that was not, or was not reached, is not ready. */
typedef struct { long time; } Event;
Result cuThreadExchangeStreamCaptureMode(int* mode) {
  const int former = capture_mode;
  capture_mode = *mode;
  *mode = former;
  return kOk;
}
Result cuStreamIsCapturing(void* stream, int* status) {
  (void)stream;
  *status = fake_capturing;
  return kOk;
}
Result cuEventCreate(Event** event, unsigned flags) {
  if (current == NULL || flags != 0) return kInvalidValue;
  if (capture_mode != 2) return kUnsupported;
  if (fake_event_error != 0) return fake_event_error;
  *event = malloc(sizeof(Event));
  (*event)->time = -1;
  __atomic_add_fetch(&fake_events, 1, __ATOMIC_SEQ_CST);
  return kOk;
}
Result cuEventDestroy_v2(Event* event) {
  free(event);
  __atomic_sub_fetch(&fake_events, 1, __ATOMIC_SEQ_CST);
  return kOk;
}
Result cuEventRecord(Event* event, void* stream) {
  (void)stream;
  if (fake_capturing != 0) return kUnsupported;
  event->time = clock_us;
  return kOk;
}
Result cuEventQuery(Event* event) {
  if (capture_mode != 2) return kUnsupported;
  return event->time < 0 || !fake_reached ? kNotReady : kOk;
}
Result cuEventSynchronize(Event* event) { return event->time < 0 ? kInvalidValue : kOk; }
Result cuEventElapsedTime(float* milliseconds, Event* start, Event* end) {
  *milliseconds = (float)(end->time - start->time) * 1e-3f;
  return kOk;
}
Result cuGetErrorName(Result result, const char** text) {
  *text = result == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : result == kInvalidImage ? "CUDA_ERROR_INVALID_IMAGE"
          : result == kNotFound ? "CUDA_ERROR_NOT_FOUND" : NULL;
  return *text == NULL ? kInvalidValue : kOk;
}
Result cuGetErrorString(Result result, const char** text) {
  *text = result == 2 ? "out of memory" : result == kInvalidImage ? "device kernel image is invalid"
          : result == kNotFound ? "named symbol not found" : NULL;
  return *text == NULL ? kInvalidValue : kOk;
}
