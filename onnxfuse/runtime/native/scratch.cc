#include "scratch.h"

#include <algorithm>
#include <numeric>

#include "ort_api.h"

namespace onnxfuse {
namespace {

// Throws Error where the sum leaves 64 bits.
int64_t sum(int64_t a, int64_t b) {
  int64_t out;
  if (__builtin_add_overflow(a, b, &out)) throw Error("the scratch memory of a launch leaves 64 bits");
  return out;
}

}  // namespace

void ScratchLayout::arrange(const std::vector<Lifetime>& lives) {
  total = 0;
  std::iota(order_.begin(), order_.end(), 0);
  // The largest first: smaller ones fit into the gaps between them.
  std::sort(order_.begin(), order_.end(),
            [&](uint32_t a, uint32_t b) { return sizes[a] != sizes[b] ? sizes[a] > sizes[b] : a < b; });
  for (auto next = order_.begin(); next != order_.end(); ++next) {
    const uint32_t buffer = *next;
    // Those that are placed stand before it, by their offsets: the first gap that is long enough is its place.
    int64_t at = 0;
    for (auto placed = order_.begin(); placed != next && sizes[buffer] != 0; ++placed) {
      const Lifetime &a = lives[buffer], &b = lives[*placed];
      if (a.last < b.first || b.last < a.first || sizes[*placed] == 0) continue;
      if (sum(at, sizes[buffer]) <= offsets[*placed]) break;
      const int64_t end = sum(sum(offsets[*placed], sizes[*placed]), kAlignment - 1) / kAlignment * kAlignment;
      at = std::max(at, end);
    }
    offsets[buffer] = at;
    total = std::max(total, sum(at, sizes[buffer]));
    const auto place = std::upper_bound(order_.begin(), next, buffer,
                                        [&](uint32_t a, uint32_t b) { return offsets[a] < offsets[b]; });
    std::rotate(place, next, next + 1);
  }
}

}  // namespace onnxfuse
