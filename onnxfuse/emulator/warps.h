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

// Gives each lane of a complete warp operation its result.
void settle(Thread* lanes, const Thread& last) {
  const unsigned mask = last.mask;
  meeting[(&last - threads) / 32] &= ~mask;
  if (last.warp == Warp::share) return share(lanes, last);
  uint64_t all = 0;
  bool first = true;
  const bool shuffles = last.warp <= Warp::shuffle_xor;  // and what only meets: nothing is made of all values
  for (int lane = shuffles ? 32 : 0; lane < 32; ++lane) {
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
