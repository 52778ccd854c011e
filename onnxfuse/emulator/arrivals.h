// Barriers in shared memory that count arrivals, and the tiles of tensors whose bytes come to them.
#pragma once
#include <stdint.h>
#include <string.h>

#include <vector>

#include "shim/machine.h"

namespace onnxfuse_emulator {

struct Tile {  // that a copy brings
  char* to;
  TensorMap map;
  int at[5];
};
struct Arrivals {
  int count, left;
  int64_t bytes;  // that are expected and have not come
  unsigned phase;
  std::vector<Tile> coming;
};

// What stands where a barrier is, so that whoever writes over it is found.
inline uint64_t token(const void* barrier) { return reinterpret_cast<uint64_t>(barrier) ^ 0x5bd1e9955bd1e995; }

inline void end_phase(Arrivals& what) {
  if (what.left != 0 || what.bytes != 0) return;
  what.left = what.count;
  ++what.phase;
}

inline int64_t bytes_of(const TensorMap& map) {
  int64_t bytes = static_cast<int64_t>(map.strides[0]);
  for (int axis = 0; axis < map.rank; ++axis) bytes *= map.box[axis];
  return bytes;
}

// As the GPU rounds float32 to TF32 on the way: to the nearest, of two to the even one, infinity among them (H100).
inline void round_tf32(char* element) {
  uint32_t bits;
  memcpy(&bits, element, sizeof bits);
  const bool none = (bits & 0x7fffffffu) > 0x7f800000u;
  bits = none ? 0x7fffffffu : (bits + 0xfffu + (bits >> 13 & 1u)) & 0xffffe000u;
  memcpy(element, &bits, sizeof bits);
}

// Zeros where the tile is outside of the tensor.
inline void bring(const Tile& tile) {
  const TensorMap& map = tile.map;
  const size_t element = map.strides[0], row = map.box[0] * element, rows = bytes_of(map) / row;
  for (size_t line = 0; line < rows; ++line) {
    const char* from = map.base;
    bool inside = true;
    size_t rest = line;
    for (int axis = 1; axis < map.rank; ++axis) {
      const int64_t at = tile.at[axis] + static_cast<int64_t>(rest % map.box[axis] * map.steps[axis]);
      rest /= map.box[axis];
      inside = inside && at >= 0 && at < static_cast<int64_t>(map.sizes[axis]);
      from += at * static_cast<int64_t>(map.strides[axis]);
    }
    for (size_t column = 0; column < map.box[0]; ++column) {
      const int64_t at = tile.at[0] + static_cast<int64_t>(column);
      size_t place = line * row + column * element;
      if (map.swizzled) place ^= (place >> 7 & (map.swizzled / 16 - 1)) << 4;
      if (inside && at >= 0 && at < static_cast<int64_t>(map.sizes[0])) {
        memcpy(tile.to + place, from + at * static_cast<int64_t>(element), element);
        if (map.rounds) round_tf32(tile.to + place);
      } else {
        memset(tile.to + place, 0, element);
      }
    }
  }
}

}  // namespace onnxfuse_emulator
