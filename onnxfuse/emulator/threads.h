// The threads of a cluster's blocks as fibres: which can run, what others wait for, and what is said where none can.
#pragma once
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "arrivals.h"
#include "fibre.h"
#include "shim/machine.h"

using onnxfuse_emulator::Arrivals;
using onnxfuse_emulator::Barrier;
using onnxfuse_emulator::Index;
using onnxfuse_emulator::Kernel;
using onnxfuse_emulator::Later;
using onnxfuse_emulator::Tile;
using onnxfuse_emulator::Warp;
using onnxfuse_emulator::token;

namespace {

constexpr int kMostBlocks = 8;              // of a cluster
constexpr int kMostThreads = kMostBlocks * 1024;
constexpr size_t kPage = 4096;
// Of one thread, its guard page included.  Threads are at the same place of their stacks most of the time: there these
// are no power of two apart, and begin up to a page lower, so that caches hold those of all threads.
constexpr size_t kStack = 64 * 1024 + kPage;
constexpr size_t kLine = 64;
constexpr size_t kDynamic = 256 * 1024;    // more than any GPU has
constexpr unsigned char kPoison = 0xff;    // NaN in every floating-point type
constexpr unsigned char kCanary = 0xa5;

enum class State { ready, barrier, cluster, warp, arrivals, ended };

struct Work {
  void (*run)(void*);
  std::vector<char> what;
  unsigned group;
};
struct Queue {
  std::vector<Work> works;  // asynchronous ones that nobody waited for yet
  unsigned group;           // that is being asked for
};

// What meetings of threads read and write stands together, in one line of the caches.
struct alignas(kLine) Thread {
  Index index;
  unsigned lane;
  Context context;
  State state;
  Warp warp;
  unsigned mask;
  int operand, width, line;
  uint64_t value, result;
  int number, rank;  // number: within its block
  struct Block* block;
  Barrier barrier;
  const void* awaited;
  Queue queues[2];
};

struct Block {
  Index index;
  int first, live;  // of its threads
  char *dynamic, *dynamic_end;
  std::vector<char> statics;  // while another block runs
};

// Read by Python as a ctypes.Structure: keep memory.py's Fault and machine.py's Launch the same.
struct Launch {
  const Kernel* kernel;
  void** arguments;
  unsigned grid[3], block[3], cluster;
  uint64_t shared, shared_alignment;
  char *static_begin, *static_end;
  int order;  // 0 forward, 1 backward, 2 shuffled by seed
  uint64_t seed;
  double seconds;
};
struct Fault {
  int signal;  // 0 where the message says all
  int write, line, in_thread;
  void* address;
  unsigned block[3], thread[3];
  char message[1024];
};

const Launch* launch;
Fault* fault;
sigjmp_buf escape;
pid_t owner;
Context outside;
Thread threads[kMostThreads];
Thread* running;
Block blocks[kMostBlocks];
Block* entered;
int thread_count, block_count;          // of a block, of the cluster
int live;                               // threads of the cluster that have not ended
int stride, all_threads;                // from a block's first thread to the next one's, whole warps
int thread_at[kMostThreads];            // by rank
uint64_t ready[kMostThreads / 64];      // by rank
int first_word;                         // of these, before which none has a thread
unsigned meeting[kMostThreads / 32];    // lanes of each warp that wait at a warp operation
std::vector<char> shared[kMostThreads / 32];  // what the lanes of each warp had when they met to share it
std::mt19937_64 shuffler;
char *stacks, *dynamic_begin, *dynamic_end, *signal_stack;
int guarded;  // stacks that have a page before them that faults
std::vector<void**>* dynamic_variables;
std::map<void*, Arrivals> arrivals;  // of the cluster

void set_ready(Thread& thread) {
  const int word = thread.rank / 64;
  thread.state = State::ready;
  ready[word] |= 1ull << thread.rank % 64;
  if (word < first_word) first_word = word;
}
void stop(Thread& thread, State state) {
  thread.state = state;
  ready[thread.rank / 64] &= ~(1ull << thread.rank % 64);
}
// What is there once for each block, where there are several.
void enter(Block* block) {
  const size_t size = static_cast<size_t>(launch->static_end - launch->static_begin);
  if (block_count > 1) {
    if (entered) memcpy(entered->statics.data(), launch->static_begin, size);
    memcpy(launch->static_begin, block->statics.data(), size);
  }
  entered = block;
  onnxfuse_emulator_block_index = block->index;
  onnxfuse_emulator_dynamic_shared = block->dynamic;
  if (!dynamic_variables) return;
  for (void** variable : *dynamic_variables) *variable = block->dynamic;
}
void enter(Thread* thread) {
  running = thread;
  onnxfuse_emulator_thread_index = thread->index;
  if (thread->block != entered) enter(thread->block);
}
Thread& current() { return *running; }

[[noreturn]] void fail(int line, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(fault->message, sizeof(fault->message), format, arguments);
  va_end(arguments);
  fault->signal = 0;
  fault->line = line;
  siglongjmp(escape, 1);
}

void describe(const Thread& thread, char* text, size_t size) {
  switch (thread.state) {
    case State::barrier: snprintf(text, size, "waits at the __syncthreads of line %d", thread.line); break;
    case State::cluster: snprintf(text, size, "waits for its cluster at line %d", thread.line); break;
    case State::warp:
      snprintf(text, size, "waits at the warp operation of line %d for lanes %08x", thread.line, thread.mask);
      break;
    case State::arrivals: snprintf(text, size, "waits at the arrivals of line %d", thread.line); break;
    case State::ended: snprintf(text, size, "has ended"); break;
    case State::ready: snprintf(text, size, "can run"); break;
  }
}

// Nothing can run and the barrier is not complete: says who waits for whom.
[[noreturn]] void stuck() {
  char first[128], second[128];
  for (int n = 0; n < all_threads; ++n) {
    if (threads[n].state != State::arrivals) continue;
    describe(threads[n], first, sizeof(first));
    const Arrivals& barrier = arrivals[const_cast<void*>(threads[n].awaited)];
    fail(threads[n].line, "thread %d %s, but %d of %d arrivals and %ld bytes do not come", threads[n].number, first,
         barrier.left, barrier.count, static_cast<long>(barrier.bytes));
  }
  for (int n = 0; n < all_threads; ++n) {
    Thread& a = threads[n];
    if (a.state != State::warp) continue;
    describe(a, first, sizeof(first));
    for (int lane = 0; lane < 32; ++lane) {
      if (!(a.mask >> lane & 1)) continue;
      const int other = a.number / 32 * 32 + lane;
      if (other >= thread_count) fail(a.line, "thread %d %s, but there is no lane %d", a.number, first, lane);
      Thread& b = threads[a.block->first + other];
      if (b.state == State::warp && b.line == a.line && b.mask == a.mask) continue;
      describe(b, second, sizeof(second));
      fail(a.line, "divergent warp operation: thread %d %s, but thread %d %s", a.number, first, other, second);
    }
  }
  const Thread* a = nullptr;
  for (int n = 0; n < all_threads; ++n) {
    const Thread& b = threads[n];
    if (b.state != State::barrier && b.state != State::cluster) continue;
    if (!a) a = &b;
    if (b.line == a->line && b.state == a->state && b.barrier == a->barrier) continue;
    describe(*a, first, sizeof(first));
    describe(b, second, sizeof(second));
    fail(a->line, "divergent barrier: thread %d %s, but thread %d %s", a->number, first, b.number, second);
  }
  fail(0, "no thread can run");
}

void shuffle_ranks() {
  const int order = launch->order;
  for (int i = 0; i < all_threads; ++i) thread_at[i] = order == 1 ? all_threads - 1 - i : i;
  if (order == 2) {
    for (int i = all_threads - 1; i > 0; --i) std::swap(thread_at[i], thread_at[shuffler() % (i + 1)]);
    // Or one block of a cluster goes as far as it can before the next one does anything.
    const unsigned first = static_cast<unsigned>(shuffler());
    if (block_count > 1 && first % 2) {
      const int turned = static_cast<int>(first / 2 % block_count);
      std::stable_sort(thread_at, thread_at + all_threads, [turned](int a, int b) {
        return (a / stride + turned) % block_count < (b / stride + turned) % block_count;
      });
    }
  }
  memset(ready, 0, sizeof(ready));
  first_word = kMostThreads / 64;
  for (int i = 0; i < all_threads; ++i) {
    Thread& thread = threads[thread_at[i]];
    thread.rank = i;
    if (thread.state == State::ready) set_ready(thread);
  }
}

// Whether all threads of a block that have not ended are at a barrier, or wait for the cluster.
bool meets(const Block& block, State state) {
  for (int n = block.first; n < block.first + thread_count; ++n) {
    if (threads[n].state != State::ended && threads[n].state != state) return false;
  }
  return true;
}

void release_barrier(const Block& block) {
  const Thread* first = nullptr;
  int counted = 0;
  for (int n = block.first; n < block.first + thread_count; ++n) {
    const Thread& thread = threads[n];
    if (thread.state == State::ended) continue;
    if (!first) first = &thread;
    if (thread.line != first->line || thread.barrier != first->barrier) stuck();
    counted += thread.operand != 0;
  }
  const uint64_t result =
      first->barrier == Barrier::all ? counted == block.live : first->barrier == Barrier::any ? counted > 0 : counted;
  for (int n = block.first; n < block.first + thread_count; ++n) {
    if (threads[n].state == State::ended) continue;
    threads[n].result = result;
    threads[n].state = State::ready;
  }
}

// In a shuffled order a cluster's block does not wait for the others where all of its threads have come to a barrier.
void release_early(const Block& block) {
  if (block_count == 1 || launch->order != 2 || !meets(block, State::barrier)) return;
  release_barrier(block);
  for (int n = block.first; n < block.first + thread_count; ++n) {
    if (threads[n].state == State::ready) set_ready(threads[n]);
  }
}

// Goes on behind barriers that all have come to.
void release() {
  bool released = false, together = true;
  for (Block* block = blocks; block < blocks + block_count; ++block) {
    together = together && meets(*block, State::cluster);
    if (block->live == 0 || !meets(*block, State::barrier)) continue;
    release_barrier(*block);
    released = true;
  }
  if (!released && !together) stuck();
  for (int n = 0; n < all_threads && !released; ++n) {
    if (threads[n].state == State::cluster) threads[n].state = State::ready;
  }
  shuffle_ranks();
}

Thread* first_ready() {
  for (const int end = (all_threads + 63) / 64; first_word < end; ++first_word) {
    if (const uint64_t word = ready[first_word]) return &threads[thread_at[first_word * 64 + __builtin_ctzll(word)]];
  }
  return nullptr;
}

// Goes on with whichever thread is next; returns when this one is.
void yield() {
  Thread& self = current();
  if (live == 0) change(self.context, outside);
  Thread* next = first_ready();
  if (!next) {
    release();
    next = first_ready();
  }
  if (next == &self) return;
  enter(next);
  change(self.context, next->context);
}

void thread_main() {
  launch->kernel->call(launch->arguments);
  stop(current(), State::ended);
  Block& block = *current().block;
  // What a block that has ended had is nobody's any more.
  --live;
  if (--block.live == 0) memset(block.dynamic, kPoison, launch->shared);
  yield();
  abort();
}

}  // namespace
