// Operations of a warp: what its lanes get when those that a mask names have come.
#pragma once
#include "threads.h"

namespace {

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

// What an operation that is the same for all lanes makes of their values.
uint64_t combined(Warp kind, const Thread* lanes, unsigned mask) {
  uint64_t all = 0;
  bool first = true;
  for (int lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    const uint64_t value = lanes[lane].value;
    const unsigned low = static_cast<unsigned>(value), sofar = static_cast<unsigned>(all);
    const int signed_low = static_cast<int>(low), signed_sofar = static_cast<int>(sofar);
    switch (kind) {
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
  return all;
}

// Gives each lane the value of another: ``source`` says which, by the lane, its operand, and the first of the lanes
// that it shuffles among and the first behind them.
template <class Source>
void shuffle(Thread* lanes, const Thread& last, Source source) {
  for (int lane = 0; lane < 32; ++lane) {
    Thread& thread = lanes[lane];
    if (!(last.mask >> lane & 1)) continue;
    const int begin = lane & ~(thread.width - 1), from = source(lane, thread.operand, begin, begin + thread.width);
    if (!(last.mask >> from & 1)) {
      fail(last.line, "lane %d shuffles from lane %d, which the mask %08x does not name", lane, from, last.mask);
    }
    thread.result = lanes[from].value;
    set_ready(thread);
  }
}

// Gives each lane of a complete warp operation its result.
void settle(Thread* lanes, const Thread& last) {
  const unsigned mask = last.mask;
  meeting[(&last - threads) / 32] &= ~mask;
  switch (last.warp) {
    case Warp::share: return share(lanes, last);
    case Warp::shuffle:
      return shuffle(lanes, last, [](int, int by, int begin, int end) { return begin + (by & (end - begin - 1)); });
    case Warp::shuffle_up:
      return shuffle(lanes, last, [](int lane, int by, int begin, int) { return lane - by < begin ? lane : lane - by; });
    case Warp::shuffle_down:
      return shuffle(lanes, last, [](int lane, int by, int, int end) { return lane + by >= end ? lane : lane + by; });
    case Warp::shuffle_xor:
      return shuffle(lanes, last, [](int lane, int by, int, int end) { return (lane ^ by) >= end ? lane : lane ^ by; });
    default: break;
  }
  const uint64_t all = last.warp == Warp::sync ? 0 : combined(last.warp, lanes, mask);
  for (int lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    lanes[lane].result = all;
    set_ready(lanes[lane]);
  }
}

}  // namespace

extern "C" {

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

unsigned onnxfuse_emulator_live_lanes() {
  const Thread* lanes = &current() - current().lane;
  unsigned mask = 0;
  for (int lane = 0; lane < 32; ++lane) mask |= static_cast<unsigned>(lanes[lane].state != State::ended) << lane;
  return mask;
}
}
