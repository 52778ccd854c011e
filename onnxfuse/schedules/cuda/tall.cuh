// Products of many rows by few columns, of which little is summed up: a lane reads its share of the left operand's rows
// from memory as vectors, and right operands lie in shared memory in an order that goes with that.
namespace of {

// `mma` has lane t of four hold words t and t + 4 of each step's eight.  As it sums them in any order, these are here
// words 4 t + 2 i and 4 t + 2 i + 1 of step i of two, which are one vector of 16 bytes; and of a last step alone, words
// 2 t and 2 t + 1.  Says where word `q` of a row of the right operand goes, of which `paired` words are of such pairs.
template <int paired> __device__ __forceinline__ int word_at(int q) {
  const int t = q % 16 / 4, w = q % 4;
  return q < paired ? q / 16 * 16 + w / 2 * 8 + w % 2 * 4 + t : paired + (q - paired) % 2 * 4 + (q - paired) / 2;
}

// Puts the words of a vector, which begin at word `q` of a row, where they go.
template <int paired, typename T, int width>
__device__ __forceinline__ void place_words(unsigned* row, int q, const Vector<T, width>& vector) {
  const unsigned* const words = reinterpret_cast<const unsigned*>(&vector);
#pragma unroll
  for (int w = 0; w < width * (int)sizeof(T) / 4; ++w) row[word_at<paired>(q + w)] = words[w];
}

// What a lane holds of a step from vectors of rows g and g + 8, of which word `w` is of step `first` + w / 2.
template <typename T, int width, int steps>
__device__ __forceinline__ void hold_words(unsigned (&own)[steps][4], const Vector<T, width> (&vectors)[2], int first) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const unsigned (&words)[width * sizeof(T) / 4] = reinterpret_cast<const unsigned (&)[width * sizeof(T) / 4]>(vectors[half]);
#pragma unroll
    for (int w = 0; w < width * (int)sizeof(T) / 4; ++w) own[first + w / 2][half + w % 2 * 2] = words[w];
  }
}

// sums = a warp's 16 rows by the 16 columns of the right operand from `columns` on, rows of which are `pitch` elements
// apart.
template <typename T, int pitch, int steps>
__device__ __forceinline__ void multiply_tall(float (&sums)[2][4], const unsigned (&own)[steps][4], const T* columns) {
  constexpr int vector = 16 / sizeof(T);
  const int lane = threadIdx.x % 32;
  const T* const from = columns + (lane / 16 * 8 + lane % 8) * pitch + lane / 8 % 2 * vector;
#pragma unroll
  for (int step = 0; step < steps; ++step) {
    unsigned right[4];
    Multiplied<T>::load(right, from + step * 2 * vector);
    Multiplied<T>::add(sums[0], own[step], right[0], right[1]);
    Multiplied<T>::add(sums[1], own[step], right[2], right[3]);
  }
}

}  // namespace of
