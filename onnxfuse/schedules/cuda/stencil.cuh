// What depthwise convolutions are made of: a thread sums up windows over a tile of float numbers in shared memory.

namespace of {

// A window: taps along three axes, its step along the two inner ones, the distance of its taps.
template <int depth, int height, int width, int down, int across, int apart_z, int apart_y, int apart_x> struct Window {
  static constexpr int z = depth, y = height, x = width, taps = depth * height * width;
  static constexpr int stride_y = down, stride_x = across;
  static constexpr int dilation_z = apart_z, dilation_y = apart_y, dilation_x = apart_x;
};

// A vector on its way, as words where it has any: a load under a condition writes them at once, and half a word would be
// put together with the other half.
template <typename T, int width, bool whole = sizeof(T) * width % 4 == 0> struct HeldAs {
  using type = Vector<unsigned, sizeof(T) * width / 4>;
};
template <typename T, int width> struct HeldAs<T, width, false> { using type = Vector<T, width>; };
template <typename T, int width> using Held = typename HeldAs<T, width>::type;

template <typename T, int width> __device__ __forceinline__ Held<T, width> hold(const T* from) {
  return *reinterpret_cast<const Held<T, width>*>(from);
}
// The elements of a vector that is held.
template <typename T, int width> __device__ __forceinline__ Vector<T, width>& held(Held<T, width>& words) {
  return reinterpret_cast<Vector<T, width>&>(words);
}
template <typename T, int width> __device__ __forceinline__ const Vector<T, width>& held(const Held<T, width>& words) {
  return reinterpret_cast<const Vector<T, width>&>(words);
}
// The same in float.  Both halves of a word come from the word, which the compiler would part too soon by itself.
template <typename T, int width> __device__ __forceinline__ Vector<float, width> floats(const Held<T, width>& words) {
  Vector<float, width> to;
#ifndef ONNXFUSE_EMULATOR
  if constexpr (is_half<T> && width % 2 == 0) {
#pragma unroll
    for (int v = 0; v < width; v += 2)
      asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
          : "=f"(to.at[v]), "=f"(to.at[v + 1]) : "r"(words.at[v / 2]));
    return to;
  }
#endif
#pragma unroll
  for (int v = 0; v < width; ++v) to.at[v] = value(held<T, width>(words).at[v]);
  return to;
}

// `count` neighbours from `from + first` on; four at once where `from` is aligned and they are.
template <int first, bool aligned, int count> __device__ __forceinline__ void neighbours(float (&to)[count], const float* from) {
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const int start = (first + i) / 4 * 4;  // of the four that it is among
    if (aligned && start >= first && start + 4 <= first + count) {
      if (start == first + i) {
        const Vector<float, 4> four = load<4>(from + start);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (i + j < count) to[i + j] = four.at[j];
      }
    } else {
      to[i] = from[first + i];
    }
  }
}

// Sums of `tall` x `broad` neighbouring windows over one layer of taps, all of which are in registers: each row of the
// tile is read once.
template <typename W, int pitch, int lead, int tall, int broad>
__device__ __forceinline__ void sum_rows(float (&sums)[tall][broad], const float* tile, const float* weights) {
  constexpr bool aligned = broad * W::stride_x % 4 == 0;
  constexpr int reach = (broad - 1) * W::stride_x + (W::x - 1) * W::dilation_x + 1;
  float taps[W::y * W::x];
#pragma unroll
  for (int i = 0; i < W::y * W::x; ++i) taps[i] = weights[i];
#pragma unroll
  for (int line = 0; line <= (tall - 1) * W::stride_y + (W::y - 1) * W::dilation_y; ++line) {
    float row[reach];
    neighbours<lead, aligned>(row, tile + line * pitch);
#pragma unroll
    for (int t = 0; t < tall; ++t)
#pragma unroll
      for (int y = 0; y < W::y; ++y)
        if (t * W::stride_y + y * W::dilation_y == line)
#pragma unroll
          for (int x = 0; x < W::x; ++x)
#pragma unroll
            for (int b = 0; b < broad; ++b)
              sums[t][b] = ::fmaf(row[b * W::stride_x + x * W::dilation_x], taps[y * W::x + x], sums[t][b]);
  }
}

// The same over `count` neighbouring taps of one line of the window.
template <typename W, int pitch, int lead, int count, int tall, int broad>
__device__ __forceinline__ void sum_part(float (&sums)[tall][broad], const float* tile, const float* weights) {
  constexpr bool aligned = broad * W::stride_x % 4 == 0;
  constexpr int reach = (broad - 1) * W::stride_x + (count - 1) * W::dilation_x + 1;
  float taps[count];
#pragma unroll
  for (int i = 0; i < count; ++i) taps[i] = weights[i];
#pragma unroll
  for (int t = 0; t < tall; ++t) {
    float row[reach];
    neighbours<lead, aligned>(row, tile + t * W::stride_y * pitch);
#pragma unroll
    for (int x = 0; x < count; ++x)
#pragma unroll
      for (int b = 0; b < broad; ++b)
        sums[t][b] = ::fmaf(row[b * W::stride_x + x * W::dilation_x], taps[x], sums[t][b]);
  }
}

// Sums of `tall` x `broad` neighbouring windows; the first one's first element lies at `tile + lead`, `pitch` numbers
// are from one row of the tile to the next and `slab` from one layer.  Windows of many taps go in parts.
template <typename W, int pitch, int slab, int lead, int tall, int broad>
__device__ __forceinline__ void sum_windows(float (&sums)[tall][broad], const float* tile, const float* weights) {
#pragma unroll 1
  for (int z = 0; z < W::z; ++z) {
    const float* const layer = tile + z * W::dilation_z * slab;
    const float* const own = weights + z * W::y * W::x;
    if constexpr (W::y * W::x <= 64 && W::y * W::x * tall * broad <= 2048) {
      sum_rows<W, pitch, lead>(sums, layer, own);
    } else {
      constexpr int part = 16, left = W::x % part;
#pragma unroll 1
      for (int y = 0; y < W::y; ++y) {
        const float* const line = layer + y * W::dilation_y * pitch;
#pragma unroll 1
        for (int x = 0; x + part <= W::x; x += part)
          sum_part<W, pitch, lead, part>(sums, line + x * W::dilation_x, own + y * W::x + x);
        if constexpr (left > 0)
          sum_part<W, pitch, lead, left>(sums, line + (W::x - left) * W::dilation_x, own + (y + 1) * W::x - left);
      }
    }
  }
}

// Sums to shared memory: `rows` and `columns` of them, four at once where that is asked for.
template <bool fours, int tall, int broad>
__device__ __forceinline__ void keep_sums(const float (&sums)[tall][broad], float* to, int pitch, int rows, int columns) {
#pragma unroll
  for (int t = 0; t < tall; ++t) {
    if (t >= rows) continue;
    if constexpr (fours) {
#pragma unroll
      for (int b = 0; b < broad; b += 4)
        if (b < columns) store(to + t * pitch + b, Vector<float, 4>{sums[t][b], sums[t][b + 1], sums[t][b + 2], sums[t][b + 3]});
    } else {
#pragma unroll
      for (int b = 0; b < broad; ++b)
        if (b < columns) to[t * pitch + b] = sums[t][b];
    }
  }
}

// Sums of a strip of `tall` x `broad` windows, kept as `keep_sums` does.  A row of the tile comes after the other, each
// is read once and multiplied by all rows of taps, so that the loop is short however tall the strip is: its
// instructions stay where they are run from.
template <typename W, int pitch, int lead, bool fours, int tall, int broad>
__device__ __forceinline__ void sum_strip(const float* tile, const float* weights, float* to, int step, int rows,
                                          int columns) {
  static_assert(W::z == 1 && W::stride_y == 1 && W::dilation_y == 1, "rows of windows follow one on another");
  constexpr bool aligned = broad * W::stride_x % 4 == 0;
  constexpr int reach = (broad - 1) * W::stride_x + (W::x - 1) * W::dilation_x + 1;
  float taps[W::y * W::x], sums[W::y][broad] = {};  // of the windows that a row is in, the topmost first
#pragma unroll
  for (int i = 0; i < W::y * W::x; ++i) taps[i] = weights[i];
#pragma unroll 2
  for (int line = 0; line < tall + W::y - 1; ++line) {
    float row[reach];
    neighbours<lead, aligned>(row, tile + line * pitch);
#pragma unroll
    for (int y = 0; y < W::y; ++y)
#pragma unroll
      for (int x = 0; x < W::x; ++x)
#pragma unroll
        for (int b = 0; b < broad; ++b)
          sums[W::y - 1 - y][b] =
              ::fmaf(row[b * W::stride_x + x * W::dilation_x], taps[y * W::x + x], sums[W::y - 1 - y][b]);
    float whole[1][broad];
#pragma unroll
    for (int b = 0; b < broad; ++b) whole[0][b] = sums[0][b];
    const int own = line - (W::y - 1);
    if (own >= 0 && own < rows) keep_sums<fours>(whole, to + own * step, step, 1, columns);
#pragma unroll
    for (int y = 0; y < W::y; ++y)
#pragma unroll
      for (int b = 0; b < broad; ++b) sums[y][b] = y + 1 < W::y ? sums[y + 1 < W::y ? y + 1 : y][b] : 0.0f;
  }
}

}  // namespace of
