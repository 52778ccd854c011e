// Matrix products of 8-bit integers on tensor cores, either operand signed or not, with int32 sums that wrap around.
// Four bytes along what is summed over stand where mma.cuh has a pair of 16 bits.
namespace of {

template <typename T> constexpr bool is_signed = (T)-1 < (T)0;

// ---- 16 x 32 by 32 x 8 elements, added to 16 x 8 sums. ----

// With lane = 4 g + t, a lane holds of the left operand the four along the columns that begin at (g, 4 t), (g + 8, 4 t),
// (g, 4 t + 16) and (g + 8, 4 t + 16); of the right operand the four along the rows that begin at (4 t, g) and
// (4 t + 16, g); of the sums what of::mma has there.
template <typename T> __device__ __forceinline__ int byte_of(unsigned four, int place) {
  return (int)(T)(four >> 8 * place);
}
// (No GPU is quick at it: a function of its own, as of::plain_mma.)
template <typename A, typename B>
__device__ __noinline__ void plain_mma_bytes(int (&sums)[4], const unsigned (&left)[4], unsigned low, unsigned high) {
  const unsigned own[6] = {left[0], left[1], left[2], left[3], low, high};
  const Lanes<unsigned, 6> lanes(own);
  const int lane = threadIdx.x % 32, row = lane / 4 * 4, column = lane % 4 * 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    unsigned sum = (unsigned)sums[i];
#pragma unroll
    for (int t = 0; t < 4; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const unsigned a = lanes.of(row + t, i / 2 + 2 * half), b = lanes.of(column + 4 * (i % 2) + t, 4 + half);
#pragma unroll
        for (int k = 0; k < 4; ++k) sum += (unsigned)(byte_of<A>(a, k) * byte_of<B>(b, k));
      }
    sums[i] = (int)sum;
  }
}

#if !defined(ONNXFUSE_EMULATOR)
#define OF_MMA_BYTES(types)                                                                        \
  asm("mma.sync.aligned.m16n8k32.row.col.s32." types ".s32 "                                       \
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                            \
      : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])                                 \
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(low), "r"(high))
#define OF_MMA_HALF_BYTES(types, i, own, other)                                                    \
  asm("mma.sync.aligned.m8n8k16.row.col.s32." types ".s32 {%0, %1}, {%2}, {%3}, {%0, %1};"         \
      : "+r"(sums[i]), "+r"(sums[i + 1]) : "r"(own), "r"(other))
#define OF_MMA_QUARTERS(types)                                                                     \
  OF_MMA_HALF_BYTES(types, 0, left[0], low);                                                       \
  OF_MMA_HALF_BYTES(types, 2, left[1], low);                                                       \
  OF_MMA_HALF_BYTES(types, 0, left[2], high);                                                      \
  OF_MMA_HALF_BYTES(types, 2, left[3], high)
#endif

template <typename A, typename B>
__device__ __forceinline__ void mma_bytes(int (&sums)[4], const unsigned (&left)[4], unsigned low, unsigned high) {
#if defined(ONNXFUSE_EMULATOR) || __CUDA_ARCH__ < 750
  plain_mma_bytes<A, B>(sums, left, low, high);
#elif __CUDA_ARCH__ < 800
  if constexpr (is_signed<A> && is_signed<B>) { OF_MMA_QUARTERS("s8.s8"); }
  else if constexpr (is_signed<A>) { OF_MMA_QUARTERS("s8.u8"); }
  else if constexpr (is_signed<B>) { OF_MMA_QUARTERS("u8.s8"); }
  else { OF_MMA_QUARTERS("u8.u8"); }
#else
  if constexpr (is_signed<A> && is_signed<B>) OF_MMA_BYTES("s8.s8");
  else if constexpr (is_signed<A>) OF_MMA_BYTES("s8.u8");
  else if constexpr (is_signed<B>) OF_MMA_BYTES("u8.s8");
  else OF_MMA_BYTES("u8.u8");
#endif
}

// A sum and four bytes more.
template <typename T> __device__ __forceinline__ int total_bytes(unsigned four, int before) {
#if defined(ONNXFUSE_EMULATOR)
  unsigned sum = (unsigned)before;
  for (int k = 0; k < 4; ++k) sum += (unsigned)byte_of<T>(four, k);
  return (int)sum;
#else
  if constexpr (is_signed<T>) return __dp4a((int)four, 0x01010101, before);
  else return (int)__dp4a(four, 0x01010101u, (unsigned)before);
#endif
}

// ---- Tiles in shared memory. ----

// With a line for each of its rows, a tile's lines are 128 bytes long, and pieces of 16 change places as in of::place.
// Across, it lies in panels of 64 columns.  A warp reads pieces of eight lines at a time there, those of the form 4 i and
// 4 i + 1, or the two behind: they change places so that each lies in banks of its own.  So do the lines of every other
// panel, which one line is written into at once with those beside it.
template <bool across, int lines> __device__ __forceinline__ int place_bytes(int line, int column) {
  if (!across) return (column / 128 * lines + line) * 128 + ((column / 16 % 8) ^ (line % 8)) * 16 + column % 16;
  const int block = column / 64;
  return (block * lines + (line ^ (block % 2))) * 64 + ((column / 16 % 4) ^ (line / 4 % 4)) * 16 + column % 16;
}
// 32 x 16 elements of a tile that lies across, from a line and a column on: four along the lines from 4 t and from
// 4 t + 16 on, of the column 2 g (`even`) and of the one behind it (`odd`).
template <int lines>
__device__ __forceinline__ void load_columns(unsigned (&even)[2], unsigned (&odd)[2], const void* tile, int line,
                                             int column) {
  const int lane = threadIdx.x % 32, j = lane % 8, i = lane / 8;
  const int own = place_bytes<true, lines>(line + i / 2 * 16 + i % 2 * 2 + j / 2 * 4 + j % 2, column);
  unsigned pairs[4];
  load_matrices<true>(pairs, reinterpret_cast<const unsigned short*>(static_cast<const unsigned char*>(tile) + own));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    even[half] = __byte_perm(pairs[2 * half], pairs[2 * half + 1], 0x6420);
    odd[half] = __byte_perm(pairs[2 * half], pairs[2 * half + 1], 0x7531);
  }
}
// Four matrices of 8 x 16 bytes of a tile with a line for each row, from each lane's line on.
template <int lines>
__device__ __forceinline__ void load_lines(unsigned (&fours)[4], const void* tile, int line, int column) {
  const int own = place_bytes<false, lines>(line, column);
  load_matrices<false>(fours, reinterpret_cast<const unsigned short*>(static_cast<const unsigned char*>(tile) + own));
}

// 16 numbers as of::copy_async; what has no place in a padded image, but in what is summed over, is the number around it.
template <typename T>
__device__ __forceinline__ void copy_padded(T* to, const T* from, bool some, bool summed, T number) {
  if (some || !summed) return copy_async(to, from, some);
  Vector<unsigned, 4> words;
#pragma unroll
  for (int word = 0; word < 4; ++word) words.at[word] = (unsigned char)number * 0x01010101u;
  store(reinterpret_cast<unsigned*>(to), words);
}

// Sums of a warp's rows and columns: of the products, and of each operand's elements where these are asked for.
template <int rows16, int columns8> struct ByteSums {
  int of[rows16][columns8][4];
  int rows[rows16][2], columns[columns8];
};
// sums += left right', as of::multiply_own, with the totals of either operand.  Where an operand lies across, a lane's
// rows, or columns, are those that of::sums_row and of::sums_column name.
template <typename A, typename B, int rows, int others, int depth, bool left_across, bool right_across, bool row_totals,
          bool column_totals, int rows16, int columns8>
__device__ __forceinline__ void multiply_own_bytes(ByteSums<rows16, columns8>& sums, const A* left, const B* right,
                                                   int row, int column) {
  const int lane = threadIdx.x % 32;
#pragma unroll 2
  for (int step = 0; step < depth / 32; ++step) {
    unsigned own[rows16][4];
#pragma unroll
    for (int i = 0; i < rows16; ++i) {
      if constexpr (left_across) {
        unsigned even[2], odd[2];
        load_columns<depth>(even, odd, left, step * 32, row + i * 16);
        own[i][0] = even[0], own[i][1] = odd[0], own[i][2] = even[1], own[i][3] = odd[1];
      } else {
        load_lines<rows>(own[i], left, row + i * 16 + lane % 16, step * 32 + lane / 16 * 16);
      }
      if constexpr (row_totals)
#pragma unroll
        for (int j = 0; j < 4; ++j) sums.rows[i][j % 2] = total_bytes<A>(own[i][j], sums.rows[i][j % 2]);
    }
#pragma unroll
    for (int n = 0; n < columns8; n += 2) {
      unsigned other[2][2];
      if constexpr (right_across) {
        load_columns<depth>(other[0], other[1], right, step * 32, column + n * 8);
      } else {
        unsigned fours[4];
        load_lines<others>(fours, right, column + n * 8 + lane / 16 * 8 + lane % 8, step * 32 + lane / 8 % 2 * 16);
        other[0][0] = fours[0], other[0][1] = fours[1], other[1][0] = fours[2], other[1][1] = fours[3];
      }
#pragma unroll
      for (int beside = 0; beside < 2; ++beside) {
        if constexpr (column_totals)
#pragma unroll
          for (int j = 0; j < 2; ++j)
            sums.columns[n + beside] = total_bytes<B>(other[beside][j], sums.columns[n + beside]);
#pragma unroll
        for (int i = 0; i < rows16; ++i) mma_bytes<A, B>(sums.of[i][n + beside], own[i], other[beside][0], other[beside][1]);
      }
    }
  }
}

// ---- Sums where lanes have them. ----

// The line of a tile in which a column's elements lie, and the column of a line, where each of four lanes is to have
// `width` neighbours: pairs of two columns of every eight.
template <int width> __device__ __forceinline__ int line_of(int column) {
  const int own = column % (4 * width);
  return column - own + own % width / 2 * 8 + own / width * 2 + own % 2;
}
template <int width> __device__ __forceinline__ int column_of(int line) {
  const int own = line % (4 * width);
  return line - own + own % 8 / 2 * width + own / 8 * 2 + own % 2;
}
// A lane's neighbours, in one of its two rows, from a number of eight columns on.
template <int width, int columns8>
__device__ __forceinline__ Vector<int, width> own_sums(const int (&sums)[columns8][4], int n, int half) {
  Vector<int, width> own;
#pragma unroll
  for (int v = 0; v < width; ++v) own.at[v] = sums[n + v / 2][half * 2 + v % 2];
  return own;
}

// Asks for what lies there, to be in the second-level cache when it is read.
__device__ __forceinline__ void bring_near(const void* pointer) {
#if !defined(ONNXFUSE_EMULATOR)
  asm volatile("prefetch.global.L2 [%0];" :: "l"(pointer));
#endif
}
// A vector of 16 bytes, or 8, that is asked for where this stands: as one that nobody writes the compiler would ask for it
// behind the barrier that is next, when it has registers to spare.
template <int width, typename T> __device__ __forceinline__ Vector<T, width> load_now(const T* from) {
#if defined(ONNXFUSE_EMULATOR)
  return load<width>(from);
#else
  union { Vector<T, width> vector; unsigned words[4]; } got;
  if constexpr (sizeof(T) * width == 16) {
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(got.words[0]), "=r"(got.words[1]), "=r"(got.words[2]), "=r"(got.words[3]) : "l"(from));
  } else if constexpr (sizeof(T) * width == 8) {
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(got.words[0]), "=r"(got.words[1]) : "l"(from));
  } else {
    got.vector = load<width>(from);
  }
  return got.vector;
#endif
}

// ---- The sums as rows in shared memory. ----

// The row, from a warp's 16 on, of a lane's sums in each half, and the column of number j of the 8 with number n.
template <bool across> __device__ __forceinline__ int sums_row(int lane, int half) {
  return across ? lane / 4 * 2 + half : lane / 4 + half * 8;
}
template <bool across> __device__ __forceinline__ int sums_column(int lane, int n, int j) {
  return across ? n / 2 * 16 + lane % 4 * 4 + j * 2 + n % 2 : n * 8 + lane % 4 * 2 + j;
}
template <bool left_across, bool right_across, int rows16, int columns8>
__device__ __forceinline__ void lay_bytes_out(int* laid, int long_row, const ByteSums<rows16, columns8>& sums, int row,
                                              int column) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < rows16; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int* const line = laid + (row + i * 16 + sums_row<left_across>(lane, half)) * long_row + column;
#pragma unroll
      for (int n = 0; n < columns8; n += 2) {
        const int (&first)[4] = sums.of[i][n], (&second)[4] = sums.of[i][n + 1];
        if constexpr (right_across) {
          Vector<int, 4> four;
          four.at[0] = first[half * 2], four.at[1] = second[half * 2];
          four.at[2] = first[half * 2 + 1], four.at[3] = second[half * 2 + 1];
          store(line + sums_column<true>(lane, n, 0), four);
        } else {
#pragma unroll
          for (int beside = 0; beside < 2; ++beside) {
            const int (&own)[4] = beside ? second : first;
            Vector<int, 2> pair;
            pair.at[0] = own[half * 2], pair.at[1] = own[half * 2 + 1];
            store(line + sums_column<false>(lane, n + beside, 0), pair);
          }
        }
      }
    }
}
// The totals of an operand's rows, or columns: each lane of four has a share of them.
__device__ __forceinline__ int total_of_four(int own) {
  own += __shfl_xor_sync(0xffffffffu, own, 1);
  return own + __shfl_xor_sync(0xffffffffu, own, 2);
}
template <bool across, int rows16, int columns8>
__device__ __forceinline__ void lay_row_totals(int* totals, const ByteSums<rows16, columns8>& sums, int row) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < rows16; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int total = total_of_four(sums.rows[i][half]);
      if (lane % 4 == 0) totals[row + i * 16 + sums_row<across>(lane, half)] = total;
    }
}
template <bool across, int width, int rows16, int columns8>
__device__ __forceinline__ void lay_column_totals(int* totals, const ByteSums<rows16, columns8>& sums, int column) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < columns8; ++n) {
    const int total = total_of_four(sums.columns[n]);
    const int line = sums_column<across>(lane / 8, n, lane / 4 % 2);
    if (lane % 4 == 0) totals[column + column_of<width>(line)] = total;
  }
}
// The sum of products of numbers less their zero points, from that of the numbers: wrapped around, as it is.
__device__ __forceinline__ int less_zeros(int sum, int zero, int other_zero, int row_total, int column_total, int count) {
  const unsigned taken = (unsigned)zero * (unsigned)column_total + (unsigned)other_zero * (unsigned)row_total;
  return (int)((unsigned)sum - taken + (unsigned)zero * (unsigned)other_zero * (unsigned)count);
}

}  // namespace of
