// Recurrent layers: all steps of an LSTM or a GRU in one launch.  The blocks of a cluster share the units of a direction,
// for some sequences; weights stay where they are, and after each step every block has the whole state.
namespace of {

__device__ __forceinline__ float gate(float x) { return quick_sigmoid(x); }
// Within 2e-7 of the hyperbolic tangent.
__device__ __forceinline__ float squashed(float x) {
  const float near = 1.0f - __fdividef(2.0f, 1.0f + __expf(2.0f * ::fabsf(x)));
  return x < 0.0f ? -near : near;
}

// A unit after its gates, in the order of the standard: of an LSTM input, output, forget and cell; of a GRU update, reset
// and what states add to the new one, and what inputs do.  `cell` is an LSTM's, or a GRU's state.
template <bool gru> __device__ __forceinline__ float next_state(const float (&gates)[4], float& cell) {
  if constexpr (gru) {
    const float update = gate(gates[0]), made = squashed(gates[3] + gate(gates[1]) * gates[2]);
    cell = made + update * (cell - made);
    return cell;
  } else {
    cell = gate(gates[2]) * cell + gate(gates[0]) * squashed(gates[3]);
    return gate(gates[1]) * squashed(cell);
  }
}

// Where a layer's tensors are: of each step, sequence and direction what inputs add to the gates; weights of states; and
// biases, those of inputs before those of states; all of one direction, whose first and last states and cells may lack.
template <typename T> struct Recurrent {
  const float* given;
  const T *weights, *bias, *first, *first_cell;
  T *steps, *last, *last_cell;
  int length, batch, directions, direction;
  bool backwards;
};

// What inputs and biases add to a unit's gates.
template <bool gru, int hidden, typename T>
__device__ __forceinline__ void gates_of(float (&out)[4], const Recurrent<T>& at, int step, int sequence, int unit) {
  constexpr int gates = gru ? 3 : 4;
  out[0] = out[1] = out[2] = out[3] = 0.0f;
  if (step >= at.length || sequence >= at.batch || unit >= hidden) return;
  const int time = at.backwards ? at.length - 1 - step : step;
  const float* const from =
      at.given + (((long long)time * at.batch + sequence) * at.directions + at.direction) * (gates * hidden) + unit;
#pragma unroll
  for (int i = 0; i < gates; ++i) out[gru && i == 2 ? 3 : i] = from[i * hidden];
}
template <bool gru, int hidden, typename T>
__device__ __forceinline__ void biases_of(float (&out)[4], const Recurrent<T>& at, int unit) {
  constexpr int gates = gru ? 3 : 4;
  out[0] = out[1] = out[2] = out[3] = 0.0f;
  if (at.bias == nullptr || unit >= hidden) return;
#pragma unroll
  for (int i = 0; i < gates; ++i) {
    const float input = value(at.bias[i * hidden + unit]), state = value(at.bias[(gates + i) * hidden + unit]);
    if (gru && i == 2)
      out[3] = input, out[2] = state;
    else
      out[i] = input + state;
  }
}
template <int hidden, typename T>
__device__ __forceinline__ float first_of(const T* from, const Recurrent<T>& at, int sequence, int unit) {
  return from == nullptr || sequence >= at.batch || unit >= hidden ? 0.0f : value(from[(long long)sequence * hidden + unit]);
}

// The state before the first step, of all units, in both places that states have, zeros behind its sequences and units.
template <int hidden, int rows, int pitch, typename T>
__device__ __forceinline__ void begin_states(T* states, const Recurrent<T>& at, int sequence) {
  for (int i = threadIdx.x; i < 2 * rows * pitch; i += blockDim.x)
    states[i] = Store<T>::from(first_of<hidden>(at.first, at, sequence + i / pitch % rows, i % pitch));
}
// A step's states of a block's own units, which lie in `made`, as results, and in the states of all blocks, behind which
// these meet; at the next step `made` is another place.
template <int hidden, int own, int rows, int pitch, int blocks, typename T>
__device__ __forceinline__ void share_states(T* states, const T* made, const Recurrent<T>& at, int step, int sequence,
                                             int rank) {
  constexpr int width = 16 / sizeof(T), pieces = rows * own / width;
  __syncthreads();
  for (int i = threadIdx.x; i < pieces * blocks; i += blockDim.x) {
    const int piece = i % pieces, row = piece / (own / width), unit = piece % (own / width) * width;
    if (rank * own + unit < pitch)
      store_to_block(states + row * pitch + rank * own + unit, i / pieces, load<width>(made + row * own + unit));
  }
  arrive_in_cluster<blocks>();
  // Results are on their way while blocks wait for one another.
  const int time = at.backwards ? at.length - 1 - step : step;
  for (int i = threadIdx.x; i < rows * own; i += blockDim.x) {
    const int row = i / own, unit = rank * own + i % own;
    if (sequence + row >= at.batch || unit >= hidden) continue;
    if (at.steps != nullptr)
      at.steps[(((long long)time * at.directions + at.direction) * at.batch + sequence + row) * hidden + unit] = made[i];
    if (at.last != nullptr && step + 1 == at.length) at.last[(long long)(sequence + row) * hidden + unit] = made[i];
  }
  wait_in_cluster<blocks>();
}
// Where there is no step the last state is the first.
template <int hidden, int own, int rows, typename T>
__device__ __forceinline__ void keep_states(const Recurrent<T>& at, int sequence, int rank) {
  for (int i = threadIdx.x; i < rows * own; i += blockDim.x) {
    const int row = i / own, unit = rank * own + i % own;
    if (sequence + row >= at.batch || unit >= hidden) continue;
    const long long to = (long long)(sequence + row) * hidden + unit;
    if (at.last != nullptr) at.last[to] = Store<T>::from(first_of<hidden>(at.first, at, sequence + row, unit));
    if (at.last_cell != nullptr) at.last_cell[to] = Store<T>::from(first_of<hidden>(at.first_cell, at, sequence + row, unit));
  }
}

// Two neighbours of a row of weights as a lane of of::mma has them, zeros past the ends.
template <int hidden, typename T> __device__ __forceinline__ unsigned weight_pair(const T* weights, int gate, int unit, int k) {
  T pair[2] = {Store<T>::from(0.0f), Store<T>::from(0.0f)};
  if (unit < hidden) {
    const T* const from = weights + ((long long)gate * hidden + unit) * hidden + k;
    if (k < hidden) pair[0] = from[0];
    if (k + 1 < hidden) pair[1] = from[1];
  }
  return *reinterpret_cast<unsigned*>(pair);
}
// The weights of two gates of eight units: rows g of the one, rows g + 8 of the other.
template <bool gru, int hidden, typename T>
__device__ __forceinline__ void weights_of(unsigned (&out)[4], const T* weights, int half, int unit, int step) {
  const int lane = threadIdx.x % 32, own = unit + lane / 4, k = step * 16 + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    out[i] = gru && half == 1 && i % 2 == 1 ? 0u : weight_pair<hidden>(weights, 2 * half + i % 2, own, k + i / 2 * 8);
}

// All steps of one direction for `8 * tiles` sequences, on tensor cores: a warp has eight units' gates as 32 rows, of which
// `held` times 16 weights stay in registers, `kept` in shared memory, and others are read at every step.
template <bool gru, int hidden, int own, int tiles, int blocks, int warps, int held, int kept, typename T>
__device__ __forceinline__ void recur_tiles(const Recurrent<T>& at, int sequence, int rank, unsigned char* shared) {
  constexpr int steps16 = (hidden + 15) / 16, pitch = steps16 * 16 + 8, rows = 8 * tiles;
  constexpr int groups = (own / 8 + warps - 1) / warps;
  // Products that wait for one another; there are two of each.
  constexpr int chains = groups > 1 || tiles > 2 ? 1 : 4 / tiles;
  uint4* const fragments = reinterpret_cast<uint4*>(shared);
  T* const states = reinterpret_cast<T*>(fragments + warps * kept * 2 * 32);
  T* const both = states + 2 * rows * pitch;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  unsigned mine[held > 0 ? held : 1][2][4];
  float cells[groups][tiles][2], ahead[groups][tiles][2][4], biases[groups][4];
  if constexpr (groups == 1) {
    if (warp < own / 8) {
#pragma unroll
      for (int step = 0; step < held; ++step)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          weights_of<gru, hidden>(mine[step][half], at.weights, half, rank * own + warp * 8, step);
      for (int step = 0; step < kept; ++step)
        for (int half = 0; half < 2; ++half) {
          unsigned four[4];
          weights_of<gru, hidden>(four, at.weights, half, rank * own + warp * 8, held + step);
          fragments[((warp * kept + step) * 2 + half) * 32 + lane] = make_uint4(four[0], four[1], four[2], four[3]);
        }
    }
  }
#pragma unroll
  for (int group = 0; group < groups; ++group) {
    const int unit = rank * own + (group * warps + warp) * 8 + g;
    biases_of<gru, hidden>(biases[group], at, unit);
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = sequence + tile * 8 + t * 2 + j;
        cells[group][tile][j] = first_of<hidden>(gru ? at.first : at.first_cell, at, row, unit);
        gates_of<gru, hidden>(ahead[group][tile][j], at, 0, row, unit);
      }
  }
  begin_states<hidden, rows, pitch>(states, at, sequence);
  arrive_in_cluster<blocks>();
  wait_in_cluster<blocks>();
  for (int step = 0; step < at.length; ++step) {
    const T* const now = states + step % 2 * rows * pitch;
    T* const made = both + step % 2 * rows * own;
#pragma unroll 1
    for (int group = 0; group < groups; ++group) {
      const int first = (group * warps + warp) * 8;
      if (first >= own) continue;
      float sums[tiles][2][4];
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile)
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            // A GRU's inputs add to a gate of their own, which no state adds to.
            sums[tile][i / 2][i % 2 * 2 + j] = ahead[group][tile][j][i] + biases[group][i];
            ahead[group][tile][j][i] = 0.0f;
          }
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          gates_of<gru, hidden>(ahead[group][tile][j], at, step + 1, sequence + tile * 8 + t * 2 + j, rank * own + first + g);
      float more[chains][tiles][2][4] = {};
#pragma unroll(groups == 1 ? steps16 : 1)
      for (int k = 0; k < steps16; ++k) {
        unsigned four[2][4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (groups == 1 && k < held) {
#pragma unroll
            for (int i = 0; i < 4; ++i) four[half][i] = mine[k < held ? k : 0][half][i];
          } else if (groups == 1 && k < held + kept) {
            const uint4 piece = fragments[((warp * kept + k - held) * 2 + half) * 32 + lane];
            four[half][0] = piece.x, four[half][1] = piece.y, four[half][2] = piece.z, four[half][3] = piece.w;
          } else {
            weights_of<gru, hidden>(four[half], at.weights, half, rank * own + first, k);
          }
        }
#pragma unroll
        for (int tile = 0; tile < tiles; ++tile) {
          const unsigned* const from = reinterpret_cast<const unsigned*>(now + (tile * 8 + g) * pitch + k * 16 + t * 2);
          const unsigned low = from[0], high = from[4];
          mma<T>(more[k % chains][tile][0], four[0], low, high);
          mma<T>(more[k % chains][tile][1], four[1], low, high);
        }
      }
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile)
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
          for (int chain = 0; chain < chains; ++chain) sums[tile][i / 4][i % 4] += more[chain][tile][i / 4][i % 4];
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float gates[4] = {sums[tile][0][j], sums[tile][0][2 + j], sums[tile][1][j], sums[tile][1][2 + j]};
          const T state = Store<T>::from(next_state<gru>(gates, cells[group][tile][j]));
          made[(tile * 8 + t * 2 + j) * own + first + g] = state;
          if (gru) cells[group][tile][j] = value(state);
        }
    }
    share_states<hidden, own, rows, pitch, blocks>(states + (step + 1) % 2 * rows * pitch, made, at, step, sequence, rank);
  }
  if (at.length == 0) keep_states<hidden, own, rows>(at, sequence, rank);
#pragma unroll
  for (int group = 0; group < groups; ++group)
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int first = (group * warps + warp) * 8, row = sequence + tile * 8 + t * 2 + j, unit = rank * own + first + g;
        if (at.last_cell != nullptr && at.length > 0 && first < own && row < at.batch && unit < hidden)
          at.last_cell[(long long)row * hidden + unit] = Store<T>::from(cells[group][tile][j]);
      }
}

// The same of float32 for `rows` sequences, by the plain cores: a lane has a unit's gates, a warp every so-manieth four of
// what is summed over; all weights stay in shared memory, or are read at every step.
template <bool gru, int hidden, int own, int rows, int blocks, int warps, bool kept>
__device__ __forceinline__ void recur_lanes(const Recurrent<float>& at, int sequence, int rank, unsigned char* shared) {
  constexpr int gates = gru ? 3 : 4, fours = (hidden + 3) / 4, pitch = fours * 4, groups = (own + 31) / 32;
  constexpr int finals = (rows * own + 32 * warps - 1) / (32 * warps);
  float4* const weights = reinterpret_cast<float4*>(shared);
  float* const sums = reinterpret_cast<float*>(weights + (kept ? fours * gates * own : 0));
  float* const states = sums + warps * 4 * rows * own;
  float* const both = states + 2 * rows * pitch;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto weight = [&](int four, int i, int unit) {
    float out[4];
    for (int v = 0; v < 4; ++v) {
      const int k = four * 4 + v;
      out[v] = rank * own + unit < hidden && k < hidden
                   ? at.weights[((long long)i * hidden + rank * own + unit) * hidden + k] : 0.0f;
    }
    return make_float4(out[0], out[1], out[2], out[3]);
  };
  if constexpr (kept)
    for (int i = threadIdx.x; i < fours * gates * own; i += blockDim.x)
      weights[i] = weight(i / own / gates, i / own % gates, i % own);
  float cells[finals], ahead[finals][4], biases[finals][4];
#pragma unroll
  for (int i = 0; i < finals; ++i) {
    const int place = threadIdx.x + i * 32 * warps, row = sequence + place / own, unit = rank * own + place % own;
    const bool some = place < rows * own;
    cells[i] = some ? first_of<hidden>(gru ? at.first : at.first_cell, at, row, unit) : 0.0f;
    biases_of<gru, hidden>(biases[i], at, some ? unit : hidden);
    gates_of<gru, hidden>(ahead[i], at, 0, row, some ? unit : hidden);
  }
  begin_states<hidden, rows, pitch>(states, at, sequence);
  arrive_in_cluster<blocks>();
  wait_in_cluster<blocks>();
  for (int step = 0; step < at.length; ++step) {
    const float* const now = states + step % 2 * rows * pitch;
    float* const made = both + step % 2 * rows * own;
#pragma unroll
    for (int group = 0; group < groups; ++group) {
      const int unit = group * 32 + lane;
      if (unit >= own) continue;
      float own_sums[gates][rows] = {};
#pragma unroll 4
      for (int turn = 0; turn < (fours + warps - 1) / warps; ++turn) {
        const int four = turn * warps + warp;
        if (fours % warps && four >= fours) break;
        float4 state[rows];
#pragma unroll
        for (int row = 0; row < rows; ++row) state[row] = *reinterpret_cast<const float4*>(now + row * pitch + four * 4);
#pragma unroll
        for (int i = 0; i < gates; ++i) {
          const float4 by = kept ? weights[(four * gates + i) * own + unit] : weight(four, i, unit);
#pragma unroll
          for (int row = 0; row < rows; ++row)
            own_sums[i][row] += by.x * state[row].x + by.y * state[row].y + by.z * state[row].z + by.w * state[row].w;
        }
      }
#pragma unroll
      for (int i = 0; i < gates; ++i)
#pragma unroll
        for (int row = 0; row < rows; ++row) sums[((warp * 4 + i) * rows + row) * own + unit] = own_sums[i][row];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < finals; ++i) {
      const int place = threadIdx.x + i * 32 * warps, unit = rank * own + place % own;
      if (place >= rows * own) continue;
      float all[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        all[j] = ahead[i][j] + biases[i][j];
        if (j < gates)
#pragma unroll
          for (int of_warp = 0; of_warp < warps; ++of_warp) all[j] += sums[(of_warp * 4 + j) * rows * own + place];
      }
      gates_of<gru, hidden>(ahead[i], at, step + 1, sequence + place / own, unit);
      made[place] = next_state<gru>(all, cells[i]);
    }
    share_states<hidden, own, rows, pitch, blocks>(states + (step + 1) % 2 * rows * pitch, made, at, step, sequence, rank);
  }
  if (at.length == 0) keep_states<hidden, own, rows>(at, sequence, rank);
#pragma unroll
  for (int i = 0; i < finals; ++i) {
    const int place = threadIdx.x + i * 32 * warps, row = sequence + place / own, unit = rank * own + place % own;
    if (at.last_cell != nullptr && at.length > 0 && place < rows * own && row < at.batch && unit < hidden)
      at.last_cell[(long long)row * hidden + unit] = cells[i];
  }
}

}  // namespace of
