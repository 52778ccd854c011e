// Launches of kernels that were compiled for the CPU: what their threads ask for, memory that faults at its ends, and what
// is told of faults.  A thread runs until it meets others (a barrier or a warp operation) or ends; then the first thread in
// the launch's order that can run goes on.  One launch at a time: the caller holds a lock.
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>

#include "checks.h"
#include "threads.h"
#include "warps.h"

namespace {

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
  live += thread_count;
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
    start(thread.context, stacks + slot * kStack + kPage, kStack - kPage - slot * 5 * kLine % kPage, thread_main);
  }
}

// The blocks of a cluster, from one on.
void run_cluster(size_t number) {
  memset(launch->static_begin, kPoison, launch->static_end - launch->static_begin);
  live = 0;
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
  release_early(*self.block);
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
  if (blocks[rank].live == 0) fail(line, "block %d of the cluster has ended", rank);
  return blocks[rank].dynamic + (place - block.dynamic);
}

void onnxfuse_emulator_later(Later kind, void (*run)(void*), const void* what, size_t size) {
  Queue& queue = current().queues[static_cast<int>(kind)];
  const char* const bytes = static_cast<const char*>(what);
  queue.works.push_back({run, {bytes, bytes + size}, queue.group});
}
void onnxfuse_emulator_copy_async(void* to, const void* from, size_t size) {
  memset(to, 0xff, size);
  onnxfuse_emulator_later(Later::copies, [=] { from ? memcpy(to, from, size) : memset(to, 0, size); });
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
void onnxfuse_emulator_store_counted(void* to, const void* from, size_t size, void* barrier, int line) {
  Arrivals& what = arrivals_at(barrier, line);
  memcpy(to, from, size);
  what.bytes -= static_cast<int64_t>(size);
  end_phase(what);
  wake(barrier);
}
void onnxfuse_emulator_copy_tile(void* to, const void* map, const int* at, int rank, void* barrier, int line) {
  Tile tile{static_cast<char*>(to), {}, {}};
  memcpy(&tile.map, map, sizeof(tile.map));
  if (tile.map.rank != rank) fail(line, "%d coordinates for a tensor map of rank %d", rank, tile.map.rank);
  const int whole = tile.map.swizzled ? 8 * tile.map.swizzled : 128;
  if (reinterpret_cast<uintptr_t>(to) % static_cast<uintptr_t>(whole)) {
    fail(line, "a tile at no multiple of %d bytes", whole);
  }
  memcpy(tile.at, at, static_cast<size_t>(rank) * sizeof(int));
  memset(to, kPoison, static_cast<size_t>(bytes_of(tile.map)));
  arrivals_at(barrier, line).coming.push_back(tile);
  wake(barrier);
}

void onnxfuse_emulator_register_dynamic(void** variable) {
  if (!dynamic_variables) dynamic_variables = new std::vector<void**>;
  dynamic_variables->push_back(variable);
}

void onnxfuse_emulator_fail(const char* message, int line) { fail(line, "%s", message); }

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
