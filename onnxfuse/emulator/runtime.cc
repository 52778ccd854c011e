// Runs the threads of a cluster's blocks, mostly one, as fibres.  A thread runs until it meets others (a barrier or a warp
// operation) or ends; then the first thread in the launch's order that can run goes on.  Faults and broken meetings end the launch with a
// message.  One launch at a time: the caller holds a lock.
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

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
constexpr size_t kStack = 64 * 1024;       // of one thread, its guard page included
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

struct Thread {
  Index index;
  unsigned lane;
  Context context;
  int number, rank;  // number: within its block
  struct Block* block;
  State state;
  Barrier barrier;
  Warp warp;
  unsigned mask;
  int operand, width, line;
  uint64_t value, result;
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
int stride, all_threads;                // from a block's first thread to the next one's, whole warps
int thread_at[kMostThreads];            // by rank
uint64_t ready[kMostThreads / 64];      // by rank
unsigned meeting[kMostThreads / 32];    // lanes of each warp that wait at a warp operation
std::vector<char> shared[kMostThreads / 32];  // what the lanes of each warp had when they met to share it
std::mt19937_64 shuffler;
char *stacks, *dynamic_begin, *dynamic_end, *signal_stack;
int guarded;  // stacks that have a page before them that faults
std::vector<void**>* dynamic_variables;
std::map<void*, Arrivals> arrivals;  // of the cluster

void set_ready(Thread& thread) {
  thread.state = State::ready;
  ready[thread.rank / 64] |= 1ull << thread.rank % 64;
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
  }
  memset(ready, 0, sizeof(ready));
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

int live() {
  int count = 0;
  for (int n = 0; n < block_count; ++n) count += blocks[n].live;
  return count;
}

Thread* first_ready() {
  for (int word = 0; word < (all_threads + 63) / 64; ++word) {
    if (ready[word]) return &threads[thread_at[word * 64 + __builtin_ctzll(ready[word])]];
  }
  return nullptr;
}

// Goes on with whichever thread is next; returns when this one is.
void yield() {
  Thread& self = current();
  if (live() == 0) change(self.context, outside);
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
  if (--block.live == 0) memset(block.dynamic, kPoison, launch->shared);
  yield();
  abort();
}

// Gives each lane what all of them have, each as many bytes as the last one.
void share(Thread* lanes, const Thread& last) {
  std::vector<char>& all = shared[(&last - threads) / 32];
  const size_t size = static_cast<size_t>(last.operand);
  all.resize(32 * size);
  for (int lane = 0; lane < 32; ++lane) {
    if (lanes[lane].operand != last.operand) fail(last.line, "lanes share different things");
    memcpy(all.data() + lane * size, reinterpret_cast<const void*>(lanes[lane].value), size);
    lanes[lane].result = reinterpret_cast<uint64_t>(all.data());
    set_ready(lanes[lane]);
  }
}

// Gives each lane of a complete warp operation its result.
void settle(Thread* lanes, const Thread& last) {
  const unsigned mask = last.mask;
  meeting[(&last - threads) / 32] &= ~mask;
  if (last.warp == Warp::share) return share(lanes, last);
  uint64_t all = 0;
  bool first = true;
  for (int lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    const uint64_t value = lanes[lane].value;
    const unsigned low = static_cast<unsigned>(value), sofar = static_cast<unsigned>(all);
    const int signed_low = static_cast<int>(low), signed_sofar = static_cast<int>(sofar);
    switch (last.warp) {
      case Warp::ballot: all |= static_cast<uint64_t>(low != 0) << lane; break;
      case Warp::any: all |= low != 0; break;
      case Warp::all: all = first ? low != 0 : all & (low != 0); break;
      case Warp::add_signed: all = sofar + low; break;
      case Warp::min_signed: all = static_cast<unsigned>(first || signed_low < signed_sofar ? signed_low : signed_sofar); break;
      case Warp::max_signed: all = static_cast<unsigned>(first || signed_low > signed_sofar ? signed_low : signed_sofar); break;
      case Warp::min_unsigned: all = first || low < sofar ? low : sofar; break;
      case Warp::max_unsigned: all = first || low > sofar ? low : sofar; break;
      case Warp::bit_and: all = first ? low : sofar & low; break;
      case Warp::bit_or: all = sofar | low; break;
      case Warp::bit_xor: all = sofar ^ low; break;
      default: break;
    }
    first = false;
  }
  for (int lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    Thread& thread = lanes[lane];
    const int width = thread.width, begin = lane & ~(width - 1), end = begin + width;
    int source = lane;
    switch (last.warp) {
      case Warp::shuffle: source = begin + (thread.operand & (width - 1)); break;
      case Warp::shuffle_up: source = lane - thread.operand < begin ? lane : lane - thread.operand; break;
      case Warp::shuffle_down: source = lane + thread.operand >= end ? lane : lane + thread.operand; break;
      case Warp::shuffle_xor: source = (lane ^ thread.operand) >= end ? lane : lane ^ thread.operand; break;
      default: thread.result = all; set_ready(thread); continue;
    }
    if (!(mask >> source & 1)) {
      fail(last.line, "lane %d shuffles from lane %d, which the mask %08x does not name", lane, source, mask);
    }
    thread.result = lanes[source].value;
    set_ready(thread);
  }
}

void on_signal(int number, siginfo_t* info, void* context) {
  if (!launch || static_cast<pid_t>(syscall(SYS_gettid)) != owner) {
    signal(number, SIG_DFL);  // not ours: let it happen again
    return;
  }
  fault->signal = number;
  fault->address = info->si_addr;
#if defined(__x86_64__)
  fault->write = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] >> 1 & 1;
#else
  (void)context;
  fault->write = -1;
#endif
  siglongjmp(escape, 1);
}

Arrivals& arrivals_at(void* barrier, int line) {
  const auto found = arrivals.find(barrier);
  if (found == arrivals.end()) fail(line, "no arrivals are counted at this address");
  const uint64_t mark = token(barrier);
  if (memcmp(barrier, &mark, sizeof(mark))) fail(line, "arrivals that something was written over");
  return found->second;
}

void wake(const void* barrier) {
  for (int n = 0; n < all_threads; ++n) {
    if (threads[n].state == State::arrivals && threads[n].awaited == barrier) set_ready(threads[n]);
  }
}

char* reserve(size_t size) {
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<char*>(memory);
}

// Memory for so many threads, and for the dynamic shared memory of all blocks, with pages between that fault.
bool prepare(int count) {
  if (!stacks) {
    const size_t size = kMostBlocks * (kDynamic + kPage);
    char* dynamic = reserve(kPage + size);
    signal_stack = reserve(16 * kPage);
    char* memory = reserve(kMostThreads * kStack);
    if (!dynamic || !signal_stack || !memory) return false;
    dynamic_begin = dynamic, dynamic_end = dynamic + kPage + size;
    mprotect(dynamic, kPage, PROT_NONE);
    for (int n = 0; n < kMostBlocks; ++n) {
      blocks[n].dynamic_end = dynamic + kPage + n * (kDynamic + kPage) + kDynamic;
      mprotect(blocks[n].dynamic_end, kPage, PROT_NONE);
    }
    stacks = memory;
  }
  for (; guarded < count; ++guarded) mprotect(stacks + guarded * kStack, kPage, PROT_NONE);
  return true;
}

void start_block(Block& block, size_t number) {
  const Index grid = onnxfuse_emulator_grid_size, size = onnxfuse_emulator_block_size;
  block.index = {static_cast<unsigned>(number % grid.x), static_cast<unsigned>(number / grid.x % grid.y),
                 static_cast<unsigned>(number / grid.x / grid.y)};
  block.live = thread_count;
  if (block_count > 1) block.statics.assign(launch->static_end - launch->static_begin, static_cast<char>(kPoison));
  memset(block.dynamic, kPoison, launch->shared);
  for (int n = 0; n < stride; ++n) {
    const int slot = block.first + n;
    Thread& thread = threads[slot];
    thread.state = State::ended;
    if (n >= thread_count) continue;  // what fills up the last warp
    thread.index = {n % size.x, n / size.x % size.y, n / size.x / size.y};
    thread.lane = n % 32;
    thread.number = n;
    thread.block = &block;
    thread.state = State::ready;
    for (Queue& queue : thread.queues) queue.works.clear(), queue.group = 0;
    start(thread.context, stacks + slot * kStack + kPage, kStack - kPage, thread_main);
  }
}

// The blocks of a cluster, from one on.
void run_cluster(size_t number) {
  memset(launch->static_begin, kPoison, launch->static_end - launch->static_begin);
  for (int n = 0; n < block_count; ++n) start_block(blocks[n], number + n);
  entered = nullptr;
  memset(meeting, 0, sizeof(meeting));
  arrivals.clear();
  shuffle_ranks();
  Thread* first = first_ready();
  fault->in_thread = 1;
  enter(first);
  change(outside, first->context);
  fault->in_thread = 0;
  for (const auto& [barrier, what] : arrivals) {
    if (!what.coming.empty()) fail(0, "a tile is still coming when the block ends");
  }
  for (int n = 0; n < block_count; ++n) {
    for (char* end = blocks[n].dynamic + launch->shared; end < blocks[n].dynamic_end; ++end) {
      if (static_cast<unsigned char>(*end) != kCanary) fail(0, "a write past the end of the %lu bytes of dynamic shared memory", static_cast<unsigned long>(launch->shared));
    }
  }
}

}  // namespace

extern "C" {

Index onnxfuse_emulator_thread_index, onnxfuse_emulator_block_index;
Index onnxfuse_emulator_block_size, onnxfuse_emulator_grid_size;
void* onnxfuse_emulator_dynamic_shared;

int onnxfuse_emulator_barrier(Barrier kind, int predicate, int line) {
  Thread& self = current();
  self.barrier = kind;
  self.operand = predicate;
  self.line = line;
  stop(self, State::barrier);
  yield();
  return static_cast<int>(self.result);
}

void onnxfuse_emulator_meet_cluster(int line) {
  Thread& self = current();
  self.line = line;
  stop(self, State::cluster);
  yield();
}

const void* onnxfuse_emulator_of_block(const void* own, int rank, int line) {
  const Block& block = *current().block;
  const char* const place = static_cast<const char*>(own);
  if (place < block.dynamic || place >= block.dynamic + launch->shared) fail(line, "no address of the block's shared memory");
  if (rank < 0 || rank >= block_count) fail(line, "block %d of a cluster of %d", rank, block_count);
  return blocks[rank].dynamic + (place - block.dynamic);
}

uint64_t onnxfuse_emulator_warp(Warp kind, unsigned mask, uint64_t value, int operand, int width, int line) {
  Thread& self = current();
  if (!(mask >> self.lane & 1)) {
    fail(line, "lane %u takes part in a warp operation whose mask %08x does not name it", self.lane, mask);
  }
  if (width < 1 || width > 32 || (width & (width - 1))) fail(line, "a shuffle of width %d", width);
  self.warp = kind;
  self.mask = mask;
  self.value = value;
  self.operand = operand;
  self.width = width;
  self.line = line;
  stop(self, State::warp);
  Thread* lanes = &self - self.lane;
  unsigned& met = meeting[(&self - threads) / 32];
  met |= 1u << self.lane;
  bool complete = (met & mask) == mask;
  for (int lane = 0; lane < 32 && complete; ++lane) {
    if (!(mask >> lane & 1)) continue;
    const Thread& other = lanes[lane];
    complete = other.state == State::warp && other.warp == kind &&
               other.mask == mask && other.line == line;
  }
  if (complete) settle(lanes, self);
  yield();
  return self.result;
}

void onnxfuse_emulator_later(Later kind, void (*run)(void*), const void* what, size_t size) {
  Queue& queue = current().queues[static_cast<int>(kind)];
  const char* const bytes = static_cast<const char*>(what);
  queue.works.push_back({run, {bytes, bytes + size}, queue.group});
}
void onnxfuse_emulator_asked(Later kind) { ++current().queues[static_cast<int>(kind)].group; }
void onnxfuse_emulator_done(Later kind, int left) {
  Queue& queue = current().queues[static_cast<int>(kind)];
  size_t done = 0;
  for (; done < queue.works.size() && queue.works[done].group + static_cast<unsigned>(left) < queue.group; ++done) {
    queue.works[done].run(queue.works[done].what.data());
  }
  queue.works.erase(queue.works.begin(), queue.works.begin() + static_cast<long>(done));
}

void onnxfuse_emulator_arrivals(void* barrier, int count, int line) {
  if (count < 1) fail(line, "%d arrivals", count);
  if (reinterpret_cast<uintptr_t>(barrier) % 8) fail(line, "arrivals that are counted at no multiple of 8 bytes");
  const uint64_t mark = token(barrier);
  memcpy(barrier, &mark, sizeof(mark));
  arrivals[barrier] = {count, count, 0, 0, {}};
}
void onnxfuse_emulator_arrive(void* barrier, int bytes, int line) {
  Arrivals& what = arrivals_at(barrier, line);
  if (what.left == 0) fail(line, "more than %d arrivals in a phase", what.count);
  --what.left;
  what.bytes += bytes;
  end_phase(what);
  wake(barrier);
}
void onnxfuse_emulator_arrived(void* barrier, int parity, int line) {
  Thread& self = current();
  for (;;) {
    Arrivals& what = arrivals_at(barrier, line);
    if ((what.phase & 1) != static_cast<unsigned>(parity)) return;
    for (const Tile& tile : what.coming) {
      bring(tile);
      what.bytes -= bytes_of(tile.map);
    }
    what.coming.clear();
    const unsigned before = what.phase;
    end_phase(what);
    if (what.phase != before) {
      wake(barrier);
      return;
    }
    self.awaited = barrier;
    self.line = line;
    stop(self, State::arrivals);
    yield();
  }
}
void onnxfuse_emulator_copy_tile(void* to, const void* map, const int* at, int rank, void* barrier, int line) {
  Tile tile{static_cast<char*>(to), {}, {}};
  memcpy(&tile.map, map, sizeof(tile.map));
  if (tile.map.rank != rank) fail(line, "%d coordinates for a tensor map of rank %d", rank, tile.map.rank);
  if (reinterpret_cast<uintptr_t>(to) % (tile.map.swizzled ? 1024 : 128)) {
    fail(line, "a tile at no multiple of %d bytes", tile.map.swizzled ? 1024 : 128);
  }
  memcpy(tile.at, at, static_cast<size_t>(rank) * sizeof(int));
  memset(to, kPoison, static_cast<size_t>(bytes_of(tile.map)));
  arrivals_at(barrier, line).coming.push_back(tile);
  wake(barrier);
}

unsigned onnxfuse_emulator_live_lanes() {
  const Thread* lanes = &current() - current().lane;
  unsigned mask = 0;
  for (int lane = 0; lane < 32; ++lane) mask |= static_cast<unsigned>(lanes[lane].state != State::ended) << lane;
  return mask;
}

void onnxfuse_emulator_register_dynamic(void** variable) {
  if (!dynamic_variables) dynamic_variables = new std::vector<void**>;
  dynamic_variables->push_back(variable);
}

void onnxfuse_emulator_fail(const char* message, int line) { fail(line, "%s", message); }

// Undefined-behaviour checks that the kernels are compiled with call these.
struct SourceLocation {
  const char* file;
  uint32_t line, column;
};
struct TypeDescriptor {
  uint16_t kind, info;
  char name[1];
};
struct TypeMismatch {
  SourceLocation location;
  const TypeDescriptor* type;
  unsigned char log_alignment, kind;
};
struct OutOfBounds {
  SourceLocation location;
  const TypeDescriptor *array, *index;
};
struct FloatCast {
  SourceLocation location;
  const TypeDescriptor *from, *to;
};
void __ubsan_handle_float_cast_overflow_abort(FloatCast* data, uintptr_t) {
  fail(data->location.line, "a cast of a float that %s cannot hold, which C++ leaves undefined; an intrinsic such as "
       "__float2int_rz saturates", data->to->name);
}
void __ubsan_handle_type_mismatch_v1_abort(TypeMismatch* data, uintptr_t pointer) {
  fail(data->location.line, "misaligned access: address %#lx for type %s, which needs a multiple of %lu",
       static_cast<unsigned long>(pointer), data->type->name, 1ul << data->log_alignment);
}
void __ubsan_handle_out_of_bounds_abort(OutOfBounds* data, uintptr_t index) {
  fail(data->location.line, "index %ld is out of bounds for type %s", static_cast<long>(index), data->array->name);
}

// 0, or 1 with `result` filled.
int onnxfuse_emulator_launch(const Launch* what, Fault* result) {
  fault = result;
  memset(fault, 0, sizeof(*fault));
  thread_count = static_cast<int>(what->block[0] * what->block[1] * what->block[2]);
  block_count = static_cast<int>(what->cluster);
  stride = (thread_count + 31) / 32 * 32, all_threads = stride * block_count;
  if (!prepare(all_threads)) {
    snprintf(fault->message, sizeof(fault->message), "no memory for the threads' stacks");
    return 1;
  }
  launch = what;
  owner = static_cast<pid_t>(syscall(SYS_gettid));
  onnxfuse_emulator_grid_size = {what->grid[0], what->grid[1], what->grid[2]};
  onnxfuse_emulator_block_size = {what->block[0], what->block[1], what->block[2]};
  const size_t rounded = (what->shared + what->shared_alignment - 1) / what->shared_alignment * what->shared_alignment;
  for (int n = 0; n < block_count; ++n) {
    blocks[n].first = n * stride;
    blocks[n].dynamic = blocks[n].dynamic_end - rounded;
    memset(blocks[n].dynamic, kCanary, rounded);
  }

  const int signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGVTALRM};
  struct sigaction action = {}, before[5];
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  stack_t stack = {}, stack_before;
  stack.ss_sp = signal_stack;
  stack.ss_size = 16 * kPage;
  sigaltstack(&stack, &stack_before);
  for (int i = 0; i < 5; ++i) sigaction(signals[i], &action, &before[i]);
  timer_t timer;
  struct sigevent event = {};
  event.sigev_notify = SIGEV_THREAD_ID;
  event.sigev_signo = SIGVTALRM;
  event._sigev_un._tid = owner;
  const bool timed = timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer) == 0;
  if (timed) {
    struct itimerspec limit = {};
    limit.it_value.tv_sec = static_cast<time_t>(what->seconds);
    limit.it_value.tv_nsec = static_cast<long>((what->seconds - static_cast<double>(limit.it_value.tv_sec)) * 1e9);
    timer_settime(timer, 0, &limit, nullptr);
  }

  const int failed = sigsetjmp(escape, 1);
  if (!failed) {
    const size_t clusters = static_cast<size_t>(what->grid[0]) * what->grid[1] * what->grid[2] / what->cluster;
    shuffler.seed(what->seed);
    // A step that shares no factor with the number of clusters visits each once.
    size_t step = what->order == 1 ? clusters - 1 : 1, cluster = what->order == 1 ? clusters - 1 : 0;
    if (what->order == 2 && clusters > 2) {
      const auto divisor = [](size_t a, size_t b) { while (b) { const size_t r = a % b; a = b; b = r; } return a; };
      do step = 1 + shuffler() % (clusters - 1); while (divisor(step, clusters) != 1);
      cluster = shuffler() % clusters;
    }
    for (size_t done = 0; done < clusters; ++done) {
      run_cluster(cluster * what->cluster);
      cluster = (cluster + step) % clusters;
    }
  } else {
    const Index where = onnxfuse_emulator_block_index;
    fault->block[0] = where.x, fault->block[1] = where.y, fault->block[2] = where.z;
    if (fault->in_thread) {
      const Index who = running->index;
      fault->thread[0] = who.x, fault->thread[1] = who.y, fault->thread[2] = who.z;
    }
  }
  if (timed) timer_delete(timer);
  launch = nullptr;
  for (int i = 0; i < 5; ++i) sigaction(signals[i], &before[i], nullptr);
  sigaltstack(&stack_before, nullptr);
  return failed ? 1 : 0;
}

// Where an address lies that a fault names: 's' a stack's guard page, 'd' around dynamic shared memory, 0 elsewhere.
char onnxfuse_emulator_place(const char* address) {
  if (stacks && address >= stacks && address < stacks + kMostThreads * kStack) return 's';
  if (dynamic_end && address >= dynamic_begin && address < dynamic_end) return 'd';
  return '\0';
}

// A mapping of `size` bytes, whole pages, with `guard` bytes on either side that fault; NULL where there is no memory.
char* onnxfuse_emulator_map(size_t size, size_t guard) {
  void* memory = mmap(nullptr, size + 2 * guard, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  char* start = static_cast<char*>(memory) + guard;
  return mprotect(start, size, PROT_READ | PROT_WRITE) == 0 ? start : nullptr;
}
int onnxfuse_emulator_protect(char* memory, size_t size, bool read_only) {
  return mprotect(memory, size, read_only ? PROT_READ : PROT_READ | PROT_WRITE);
}
int onnxfuse_emulator_unmap(char* memory, size_t size, size_t guard) { return munmap(memory - guard, size + 2 * guard); }
}
