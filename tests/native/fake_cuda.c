/* A stand-in for the CUDA driver whose device memory is host memory and whose kernels are the C functions below.
 * An image is an ELF file that has a section ".text.NAME" for each of its kernels.  As the real driver does, it is read
 * by what stands in it, whole and with no size given, and launches read the arguments that a kernel has.  PTX is a text
 * with ".version", ".target" and a line ".visible .entry NAME(" for each of its kernels; it is compiled for any GPU that
 * is not older than its target, by a driver that is not older than its version. */
#include <elf.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;
enum {
  kOk = 0, kInvalidValue = 1, kInvalidImage = 200, kNoBinary = 209, kOldPtx = 222, kNotFound = 500, kNotReady = 600,
  kUnsupported = 900
};

const int onnxfuse_host_memory = 1;

/* What tests set and read. */
int fake_major = 9, fake_minor = 0, fake_pools = 1, fake_launch_error = 0, fake_allocate_error = 0, fake_modules = 0;
long fake_launches = 0, fake_allocated = 0, fake_last_allocated = 0, fake_shared_attribute = 0;
unsigned fake_last[7], fake_last_cluster[3], fake_last_dependent = 0;
static pthread_mutex_t last_mutex = PTHREAD_MUTEX_INITIALIZER;
int fake_dry = 0; /* launches read the arguments and compute nothing */
int fake_maps = 0, fake_map_error = 0; /* tensor maps that were built */
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
/* A tensor map of the stand-in; the real one's 128 bytes are the driver's own. */
typedef struct { char mark[8]; char* address; unsigned type, rank, sizes[5]; uint64_t strides[4]; char rest[48]; } Map;
_Static_assert(sizeof(Map) == 128, "a tensor map");
static void add_tiles(void** a) {
  Map x, y;
  memcpy(&x, a[0], sizeof x);
  memcpy(&y, a[1], sizeof y);
  if (memcmp(x.mark, "the map", 8) != 0 || memcmp(y.mark, "the map", 8) != 0) abort();
  const unsigned rows = x.rank < 2 ? 1 : x.sizes[1];
  for (unsigned row = 0; row < rows; ++row) {
    for (unsigned i = 0; i < x.sizes[0]; ++i) {
      ((float*)(y.address + row * y.strides[0]))[i] = ((const float*)(x.address + row * x.strides[0]))[i] + 1;
    }
  }
}
static void nothing(void** a) { (void)a; }
/* Kernels with the bytes of their parameters; the last stands for all others, which take anything. */
static const struct Function { const char* name; Kernel run; size_t parameters[5]; } kernels[] = {
    {"add_one", add_one, {8, 8, 8}}, {"add_more", add_more, {8, 8, 4, 8}},
    {"add_tiles", add_tiles, {128, 128}}, {"add_rows", add_tiles, {128, 128}}, {"", nothing, {0}}};
typedef const struct Function* Function;
enum { kKernels = sizeof kernels / sizeof *kernels };

static size_t largest(size_t a, size_t b) { return a > b ? a : b; }

/* How long an image is, by what stands in it. */
static size_t image_size(const char* image) {
  Elf64_Ehdr head;
  memcpy(&head, image, sizeof head);
  size_t size = largest(head.e_shoff + head.e_shnum * sizeof(Elf64_Shdr),
                        head.e_phoff + head.e_phnum * sizeof(Elf64_Phdr));
  for (size_t i = 1; i < head.e_shnum; ++i) {
    Elf64_Shdr section;
    memcpy(&section, image + head.e_shoff + i * sizeof section, sizeof section);
    if (section.sh_type == SHT_NULL || section.sh_type == SHT_NOBITS) continue;
    size = largest(size, section.sh_offset + section.sh_size);
  }
  for (size_t i = 0; i < head.e_phnum; ++i) {
    Elf64_Phdr segment;
    memcpy(&segment, image + head.e_phoff + i * sizeof segment, sizeof segment);
    size = largest(size, segment.p_offset + segment.p_filesz);
  }
  return size;
}
static int has_kernel(const char* image, const char* name) {
  if (memcmp(image, ELFMAG, SELFMAG) != 0) {
    char entry[200];
    snprintf(entry, sizeof entry, ".visible .entry %s(", name);
    return strstr(image, entry) != NULL;
  }
  Elf64_Ehdr head;
  Elf64_Shdr section, names;
  memcpy(&head, image, sizeof head);
  memcpy(&names, image + head.e_shoff + head.e_shstrndx * sizeof names, sizeof names);
  for (size_t i = 1; i < head.e_shnum; ++i) {
    memcpy(&section, image + head.e_shoff + i * sizeof section, sizeof section);
    if (section.sh_type == SHT_NULL) continue;
    const char* found = image + names.sh_offset + section.sh_name;
    if (strncmp(found, ".text.", 6) == 0 && strcmp(found + 6, name) == 0) return 1;
  }
  return 0;
}

Result cuModuleLoadData(void** module, const void* image) {
  const int elf = memcmp(image, ELFMAG, SELFMAG) == 0;
  int version = 0, target = 0;
  const char* const text = elf ? NULL : strstr(image, ".version ");
  if (!elf && (text == NULL || sscanf(text, ".version %d.%*d .target sm_%d", &version, &target) != 2)) {
    return kInvalidImage;
  }
  if (version > 9) return kOldPtx;
  if (target > 10 * fake_major + fake_minor) return kNoBinary;
  if (current == NULL) return 201;
  const size_t size = elf ? image_size(image) : strlen(image) + 1;
  *module = memcpy(malloc(size), image, size);
  __atomic_add_fetch(&fake_modules, 1, __ATOMIC_SEQ_CST);
  return kOk;
}
Result cuModuleUnload(void* module) {
  free(module);
  __atomic_sub_fetch(&fake_modules, 1, __ATOMIC_SEQ_CST);
  return kOk;
}
Result cuModuleGetFunction(void** function, void* module, const char* name) {
  if (!has_kernel(module, name)) return kNotFound;
  size_t i = 0;
  while (i + 1 < kKernels && strcmp(kernels[i].name, name) != 0) ++i;
  *function = (void*)&kernels[i];
  return kOk;
}
Result cuFuncGetParamInfo(Function function, size_t index, size_t* offset, size_t* size) {
  if (function->run == nothing) return kUnsupported;
  if (index >= 5 || function->parameters[index] == 0) return kInvalidValue;
  *offset = 8 * index;
  *size = function->parameters[index];
  return kOk;
}
Result cuFuncGetAttribute(int* value, int attribute, void* function) {
  (void)function;
  *value = attribute == 1 ? 512 : 32;
  return kOk;
}
Result cuFuncSetAttribute(void* function, int attribute, int value) {
  (void)function;
  __atomic_store_n(&fake_shared_attribute, attribute == 8 ? value : -1, __ATOMIC_SEQ_CST);
  return kOk;
}
/* The sizes of a launch: grid, block, shared memory. */
static Result launch(void* function, const unsigned* sizes, void** arguments) {
  if (current == NULL) return kInvalidValue;
  for (int i = 0; i < 6; ++i) {
    if (sizes[i] == 0) return kInvalidValue;
  }
  if (fake_launch_error != 0) return fake_launch_error;
  pthread_mutex_lock(&last_mutex);
  memcpy(fake_last, sizes, sizeof fake_last);
  pthread_mutex_unlock(&last_mutex);
  char value[128];
  for (size_t i = 0; ((Function)function)->parameters[i] != 0; ++i) {
    memcpy(value, arguments[i], ((Function)function)->parameters[i]);
  }
  if (!fake_dry) ((Function)function)->run(arguments);
  clock_us += 5;
  __atomic_add_fetch(&fake_launches, 1, __ATOMIC_SEQ_CST);
  return kOk;
}
Result cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                      unsigned shared, void* stream, void** arguments, void** extra) {
  (void)stream;
  const unsigned sizes[7] = {gx, gy, gz, bx, by, bz, shared};
  return extra != NULL ? kInvalidValue : launch(function, sizes, arguments);
}
#ifndef OLD_DRIVER
typedef struct { int id; char unused[4]; unsigned value[16]; } Attribute;
typedef struct { unsigned sizes[7]; void* stream; const Attribute* attributes; unsigned count; } Configuration;
Result cuLaunchKernelEx(const Configuration* asked, void* function, void** arguments, void** extra) {
  if (extra != NULL || fake_major < 9) return kInvalidValue;
  unsigned cluster[3] = {1, 1, 1}, dependent = 0;
  for (unsigned i = 0; i < asked->count; ++i) {
    const Attribute* attribute = &asked->attributes[i];
    if (attribute->id == 4) memcpy(cluster, attribute->value, sizeof cluster);
    else if (attribute->id == 6 && attribute->value[0] == 1) dependent = 1;
    else return kInvalidValue;
  }
  for (int axis = 0; axis < 3; ++axis) {
    if (cluster[axis] == 0 || asked->sizes[axis] % cluster[axis] != 0) return kInvalidValue;
  }
  if (cluster[0] * cluster[1] * cluster[2] > 8) return kInvalidValue;
  pthread_mutex_lock(&last_mutex);
  memcpy(fake_last_cluster, cluster, sizeof cluster);
  fake_last_dependent = dependent;
  pthread_mutex_unlock(&last_mutex);
  return launch(function, asked->sizes, arguments);
}
/* Refuses what the real one does, as far as its documentation says. */
Result cuTensorMapEncodeTiled(Map* map, int type, unsigned rank, char* address, const uint64_t* sizes,
                              const uint64_t* strides, const unsigned* box, const unsigned* element_strides,
                              int interleave, int swizzle, int promotion, int fill) {
  static const unsigned bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4}, widths[] = {0, 32, 64, 128};
  if (fake_map_error != 0) return fake_map_error;
  if ((uintptr_t)map % 64 != 0 || type < 0 || type > 12 || rank < 1 || rank > 5 || fake_major < 9) return kInvalidValue;
  if (interleave < 0 || interleave > 2 || swizzle < 0 || swizzle > 3 || promotion < 0 || promotion > 3 ||
      fill < 0 || fill > 1 || (fill == 1 && type < 6) || (interleave != 0 && rank < 3) ||
      (interleave == 2 && swizzle != 1)) return kInvalidValue;
  const unsigned aligned = interleave == 2 ? 32 : 16, row = bytes[type] * box[0];
  if (address == NULL || (uintptr_t)address % aligned != 0) return kInvalidValue;
  if (interleave == 0 && (row % 16 != 0 || (swizzle != 0 && row > widths[swizzle]))) return kInvalidValue;
  Map made = {"the map", address, (unsigned)type, rank, {0}, {0}, {0}};
  for (unsigned axis = 0; axis < rank; ++axis) {
    if (sizes[axis] < 1 || sizes[axis] > 1u << 31 || box[axis] < 1 || box[axis] > 256 || element_strides[axis] < 1 ||
        element_strides[axis] > 8) return kInvalidValue;
    made.sizes[axis] = (unsigned)sizes[axis];
    if (axis == 0) continue;
    if (strides[axis - 1] % aligned != 0 || strides[axis - 1] >> 40 != 0) return kInvalidValue;
    made.strides[axis - 1] = strides[axis - 1];
  }
  memcpy(map, &made, sizeof made);
  __atomic_add_fetch(&fake_maps, 1, __ATOMIC_SEQ_CST);
  return kOk;
}
#endif
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
  *address = size >> 30 ? 0 : (uint64_t)aligned_alloc(256, (size + 255) / 256 * 256);
  __atomic_store_n(&fake_last_allocated, (long)size, __ATOMIC_SEQ_CST);
  if (*address == 0) return 2;
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
          : result == kNotFound ? "CUDA_ERROR_NOT_FOUND"
          : result == kOldPtx ? "CUDA_ERROR_UNSUPPORTED_PTX_VERSION" : NULL;
  return *text == NULL ? kInvalidValue : kOk;
}
Result cuGetErrorString(Result result, const char** text) {
  *text = result == 2 ? "out of memory" : result == kInvalidImage ? "device kernel image is invalid"
          : result == kNotFound ? "named symbol not found"
          : result == kOldPtx ? "the provided PTX was compiled with an unsupported toolchain." : NULL;
  return *text == NULL ? kInvalidValue : kOk;
}
