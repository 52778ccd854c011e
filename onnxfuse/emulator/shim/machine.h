// What a kernel compiled for the CPU asks of the emulator's runtime (runtime.cc).
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

namespace onnxfuse_emulator {

struct Index {
  unsigned x, y, z;
};

enum class Barrier : int { plain, count, all, any };

enum class Warp : int {
  sync, shuffle, shuffle_up, shuffle_down, shuffle_xor, ballot, any, all,
  add_signed, min_signed, max_signed, min_unsigned, max_unsigned, bit_and, bit_or, bit_xor, share,
};

enum class Later : int { copies, products };

// A tensor in device memory and the tile of it that one copy takes, from the innermost axis on, as plan.py builds it.
struct TensorMap {
  const char* base;
  uint64_t sizes[5], strides[5];  // bytes, an element's first
  uint32_t box[5];                // elements that come
  unsigned char rank, swizzled;   // in how many bytes pieces of 16 change places by the number of their 128 bytes; or 0
  unsigned char rounds;           // whether elements are float32 and come as the nearest number of TF32
  unsigned char steps[5];         // from one to the next along each axis
};

// One parameter of a kernel: kind is 'p' pointer, 'i' signed, 'u' unsigned, 'f' floating, 's' a structure; size in bytes.
struct Parameter {
  char kind;
  unsigned char size;
  bool read_only;
};

struct Kernel {
  void (*call)(void** arguments);
  const Parameter* parameters;
  int count;
  int threads_bound;  // of __launch_bounds__; 0 where there is none
};

}  // namespace onnxfuse_emulator

extern "C" {
// Of the thread that runs; the runtime changes them with it.
extern onnxfuse_emulator::Index onnxfuse_emulator_thread_index;
extern onnxfuse_emulator::Index onnxfuse_emulator_block_index;
extern onnxfuse_emulator::Index onnxfuse_emulator_block_size;
extern onnxfuse_emulator::Index onnxfuse_emulator_grid_size;
extern void* onnxfuse_emulator_dynamic_shared;

int onnxfuse_emulator_barrier(onnxfuse_emulator::Barrier kind, int predicate, int line);
// All threads of a cluster's blocks that have not ended meet.
void onnxfuse_emulator_meet_cluster(int line);
// What lies in the shared memory of the cluster's block of this rank where this lies in the own one's.
const void* onnxfuse_emulator_of_block(const void* own, int rank, int line);
uint64_t onnxfuse_emulator_warp(onnxfuse_emulator::Warp kind, unsigned mask, uint64_t value, int operand, int width,
                                int line);
unsigned onnxfuse_emulator_live_lanes();
// Work that is done when it is waited for, in groups: what is asked for since the last call of `asked` is one, and `done`
// does all but the last `left` of them.
void onnxfuse_emulator_later(onnxfuse_emulator::Later kind, void (*run)(void*), const void* what, size_t size);
// Of what is poison until it is there; zeros where `from` is NULL.
void onnxfuse_emulator_copy_async(void* to, const void* from, size_t size);
void onnxfuse_emulator_asked(onnxfuse_emulator::Later kind);
void onnxfuse_emulator_done(onnxfuse_emulator::Later kind, int left);
void onnxfuse_emulator_register_dynamic(void** variable);
// A barrier in shared memory: a phase is over when `count` arrivals and all bytes that are expected have come.
void onnxfuse_emulator_arrivals(void* barrier, int count, int line);
void onnxfuse_emulator_arrive(void* barrier, int bytes, int line);
// Until the phase of this parity is over.
void onnxfuse_emulator_arrived(void* barrier, int parity, int line);
// Asks for a tile, which is poison until the barrier that its bytes come to is waited for.
void onnxfuse_emulator_store_counted(void* to, const void* from, size_t size, void* barrier, int line);
void onnxfuse_emulator_copy_tile(void* to, const void* map, const int* at, int rank, void* barrier, int line);
[[noreturn]] void onnxfuse_emulator_fail(const char* message, int line);
}

template <typename Function> void onnxfuse_emulator_later(onnxfuse_emulator::Later kind, const Function& work) {
  onnxfuse_emulator_later(kind, [](void* what) { (*static_cast<Function*>(what))(); }, &work, sizeof(work));
}
