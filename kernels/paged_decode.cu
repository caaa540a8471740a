// One decode step of attention over paged KV, for one layer: each sequence has one new token, whose K and V are in its slots already.
//
// A thread block takes one sequence, one KV head, up to G of the query heads that share it, and one split of the visible tokens.
// A row of K or V is read by as many lanes as it has vectors of 16 bytes, so a warp reads whole rows, ROUND of them a lane before it
// computes. Each lane keeps a running softmax (Milakov & Gimelshein 2018) for its rows; rows, then warps, then splits
// (Flash-Decoding, 2023) are merged at the end. Scores are kept times log2(e), so that a power of two is all that is needed.
#include "addressing.cuh"

constexpr int DECODE_WARPS = 4;
constexpr int DECODE_THREADS = DECODE_WARPS * WARP;

struct DecodeArgs {
  Slots slots;
  const u8* q;              // [batch, q_heads, D]
  u8* out;                  // [batch, q_heads, D]
  i64 q_stride[2];          // bytes from one sequence, and one head, to the next
  i64 out_stride[2];
  const u32* table;         // [batch, table_stride]: entries of the blocks of each sequence, in order
  const int* context;       // [batch]: tokens to attend to, the new one included; 0 gives zeros
  const float* sink_logits; // [q_heads], or null: one more score a head that takes weight and gives nothing
  float* partial;           // [batch, q_heads, splits, D]: of each split its weighted values, and below its top score and sum
  float* partial_top;       // [batch, q_heads, splits]
  float* partial_sum;
  Divisor block_tokens;
  int table_stride, layer, q_heads, group;
  int splits, split_tokens;
  int window, sink_tokens;  // window 0: all tokens; else the last `window`, and the first `sink_tokens`
  float scale_log2;         // the scores' scale times log2(e)
};

// Which tokens a sequence attends to: the first `sinks`, and from `sinks + gap` on.
struct Visible {
  int sinks, gap, count;
  __device__ __forceinline__ Visible(const DecodeArgs& a, int context) {
    const int first = a.window > 0 && context > a.window ? context - a.window : 0;
    sinks = min(a.sink_tokens, first);
    gap = first - sinks;
    count = context - gap;
  }
  __device__ __forceinline__ int position(int i) const { return i < sinks ? i : i + gap; }
};

// How a warp shares rows of D elements.
template <class T, int D> struct Rows {
  static constexpr int ITEMS = Vector<T>::ITEMS;
  static constexpr int VECTORS = D / ITEMS;
  static constexpr int LANES = VECTORS > 16 ? 32 : VECTORS > 8 ? 16 : 8;  // that share a row
  static constexpr int HELD = (VECTORS + LANES - 1) / LANES;               // vectors of a row that one lane has
  static constexpr int COUNT = WARP / LANES;                               // rows that a warp reads at once
  static constexpr int VALUES = HELD * ITEMS;
  static_assert(D % ITEMS == 0, "a row is whole vectors");
};

// A lane's part of the softmax so far: of its vectors' elements, for each query head.
template <int G, int VALUES> struct Running {
  float top[G], sum[G], out[G][VALUES];
};

// Where the lane's next rows lie: found one round ahead, since the rows' addresses wait for the table.
template <int ROUND> struct Ahead {
  u32 entry[ROUND];
  int token[ROUND];
  __device__ __forceinline__ void find(const DecodeArgs& a, const u32* table, const Visible& visible, int first, int step, int end) {
#pragma unroll
    for (int u = 0; u < ROUND; u++) {
      const int i = first + u * step;
      token[u] = -1;
      if (i < end) {
        const int position = visible.position(i);
        const u32 block = divide(position, a.block_tokens);
        entry[u] = table[block];
        token[u] = position - block * a.block_tokens.divisor;
      }
    }
  }
};

// This lane's vectors of one row; zeros for tokens that are not there, whatever lies in their place.
template <class T, int D>
__device__ __forceinline__ void load_row(const u8* start, const RowStrides& rows, int part, int head, int token, int lane, uint4* to) {
  using R = Rows<T, D>;
#pragma unroll
  for (int j = 0; j < R::HELD; j++) {
    const int vector = lane + j * R::LANES;
    to[j] = uint4{0, 0, 0, 0};
    if (token >= 0 && vector < R::VECTORS) to[j] = load_once(start + row_offset(rows, part, head, token) + vector * 16);
  }
}

template <class T, int D>
__device__ __forceinline__ void unpack_row(const uint4* from, float* to) {
#pragma unroll
  for (int j = 0; j < Rows<T, D>::HELD; j++) Vector<T>::unpack(from[j], to + j * Rows<T, D>::ITEMS);
}

// Bring one round of values into the running softmax. A score of -inf is a token that is not there.
template <class T, int D, int G, int ROUND>
__device__ __forceinline__ void absorb(Running<G, Rows<T, D>::VALUES>& state, float (*score)[G], const uint4 (*v)[Rows<T, D>::HELD]) {
  using R = Rows<T, D>;
#pragma unroll
  for (int g = 0; g < G; g++) {
    float top = state.top[g];
#pragma unroll
    for (int u = 0; u < ROUND; u++) top = fmaxf(top, score[u][g]);
    const float shrink = exp2_of(state.top[g] - top);
    state.top[g] = top;
    state.sum[g] *= shrink;
#pragma unroll
    for (int i = 0; i < R::VALUES; i++) state.out[g][i] *= shrink;
#pragma unroll
    for (int u = 0; u < ROUND; u++) {
      score[u][g] = exp2_of(score[u][g] - top);
      state.sum[g] += score[u][g];
    }
  }
#pragma unroll
  for (int u = 0; u < ROUND; u++) {
    float x[R::VALUES];
    unpack_row<T, D>(v[u], x);
#pragma unroll
    for (int g = 0; g < G; g++) {
#pragma unroll
      for (int i = 0; i < R::VALUES; i++) state.out[g][i] += score[u][g] * x[i];
    }
  }
}

// Scores of one round: each lane multiplies its part, then the lanes of a row add up.
template <class T, int D, int G, int ROUND>
__device__ __forceinline__ void scores(const float (*q)[Rows<T, D>::VALUES], const uint4 (*k)[Rows<T, D>::HELD], const int* token,
                                       float (*score)[G]) {
  using R = Rows<T, D>;
#pragma unroll
  for (int u = 0; u < ROUND; u++) {
    float x[R::VALUES];
    unpack_row<T, D>(k[u], x);
#pragma unroll
    for (int g = 0; g < G; g++) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < R::VALUES; i++) sum += q[g][i] * x[i];
#pragma unroll
      for (int step = R::LANES / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
      score[u][g] = token[u] >= 0 ? sum : -__int_as_float(0x7f800000);
    }
  }
}

// The rows of a warp become one: afterwards every group of lanes has the warp's sums.
template <class T, int D, int G>
__device__ __forceinline__ void merge_rows(Running<G, Rows<T, D>::VALUES>& state) {
  using R = Rows<T, D>;
#pragma unroll
  for (int g = 0; g < G; g++) {
    float top = state.top[g];
#pragma unroll
    for (int step = R::LANES; step < WARP; step *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
    const float shrink = exp2_of(state.top[g] - top);
    state.top[g] = top;
    state.sum[g] *= shrink;
#pragma unroll
    for (int i = 0; i < R::VALUES; i++) state.out[g][i] *= shrink;
#pragma unroll
    for (int step = R::LANES; step < WARP; step *= 2) {
      state.sum[g] += __shfl_xor_sync(0xffffffffu, state.sum[g], step);
#pragma unroll
      for (int i = 0; i < R::VALUES; i++) state.out[g][i] += __shfl_xor_sync(0xffffffffu, state.out[g][i], step);
    }
  }
}

// One element of a head's result, once all tokens are in: with the sink's share of the weight, and zero where there was no token.
template <class T>
__device__ __forceinline__ void finish(const DecodeArgs& a, int batch, int head, int at, float top, float sum, float value) {
  if (a.sink_logits != nullptr) {
    const float sink = a.sink_logits[head] * 1.44269504f;  // log2(e)
    const float higher = fmaxf(top, sink);
    const float shrink = exp2_of(top - higher);
    sum = sum * shrink + exp2_of(sink - higher);
    value *= shrink;
  }
  T* out = reinterpret_cast<T*>(a.out + batch * a.out_stride[0] + head * a.out_stride[1]);
  store(sum > 0.0f ? value / sum : 0.0f, out + at);
}

// The warps become one, through shared memory: [warp][G] tops, then sums, then [warp][G][D] values.
template <class T, int D, int G>
__device__ __forceinline__ void merge_warps(const DecodeArgs& a, const Running<G, Rows<T, D>::VALUES>& state, int first_head, int heads) {
  using R = Rows<T, D>;
  KV_SHARED_FLOATS(tops);
  float* sums = tops + DECODE_WARPS * G;
  float* values = sums + DECODE_WARPS * G;
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll
  for (int g = 0; g < G; g++) {
    if (lane == 0) tops[warp * G + g] = state.top[g], sums[warp * G + g] = state.sum[g];
#pragma unroll
    for (int i = 0; i < R::VALUES; i++) {
      const int at = (lane + i / R::ITEMS * R::LANES) * R::ITEMS + i % R::ITEMS;
      if (lane < R::LANES && at < D) values[(warp * G + g) * D + at] = state.out[g][i];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < heads * D; i += DECODE_THREADS) {
    const int g = i / D, at = i % D, head = first_head + g;
    float top = LOWEST, sum = 0.0f, value = 0.0f;
    for (int w = 0; w < DECODE_WARPS; w++) top = fmaxf(top, tops[w * G + g]);
    for (int w = 0; w < DECODE_WARPS; w++) {
      const float shrink = exp2_of(tops[w * G + g] - top);
      sum += sums[w * G + g] * shrink;
      value += values[(w * G + g) * D + at] * shrink;
    }
    if (a.splits == 1) {
      finish<T>(a, blockIdx.z, head, at, top, sum, value);
    } else {
      const i64 split = (static_cast<i64>(blockIdx.z) * a.q_heads + head) * a.splits + blockIdx.x;
      a.partial[split * D + at] = value;
      if (at == 0) a.partial_top[split] = top, a.partial_sum[split] = sum;
    }
  }
}

template <class T, int D, int G>
__device__ __forceinline__ void load_queries(const DecodeArgs& a, int first_head, int heads, int lane, float (*q)[Rows<T, D>::VALUES]) {
  using R = Rows<T, D>;
#pragma unroll
  for (int g = 0; g < G; g++) {
    const u8* row = a.q + blockIdx.z * a.q_stride[0] + (first_head + g) * a.q_stride[1];
    uint4 packed[R::HELD];
#pragma unroll
    for (int j = 0; j < R::HELD; j++) {
      const int vector = lane + j * R::LANES;
      packed[j] = uint4{0, 0, 0, 0};
      if (g < heads && vector < R::VECTORS) packed[j] = *reinterpret_cast<const uint4*>(row + vector * 16);
    }
    unpack_row<T, D>(packed, q[g]);
#pragma unroll
    for (int i = 0; i < R::VALUES; i++) q[g][i] *= a.scale_log2;
  }
}

// Grid: [splits, kv_heads * ceil(group / G), batch]. Shared memory: DECODE_WARPS * G * (D + 2) floats.
template <class T, int D, int G>
__device__ __forceinline__ void paged_decode(const DecodeArgs& a) {
  using R = Rows<T, D>;
  constexpr int ROUND = G * R::VALUES > 32 || R::HELD > 1 ? 2 : 4;  // rows in flight a lane, of K and of V: what registers hold
  const int parts = (a.group + G - 1) / G;
  const int kv_head = blockIdx.y / parts, part = blockIdx.y % parts;
  const int heads = min(G, a.group - part * G), first_head = kv_head * a.group + part * G;
  const Visible visible(a, a.context[blockIdx.z]);
  const int begin = blockIdx.x * a.split_tokens, end = min(begin + a.split_tokens, visible.count);
  if (begin >= end && blockIdx.x > 0) return;  // the whole block: the second pass knows which splits there are

  const int warp = threadIdx.x / WARP, row = threadIdx.x % WARP / R::LANES, lane = threadIdx.x % R::LANES;
  const u32* table = a.table + static_cast<i64>(blockIdx.z) * a.table_stride;
  float q[G][R::VALUES];
  load_queries<T, D, G>(a, first_head, heads, lane, q);
  Running<G, R::VALUES> state;
#pragma unroll
  for (int g = 0; g < G; g++) {
    state.top[g] = LOWEST, state.sum[g] = 0.0f;
#pragma unroll
    for (int i = 0; i < R::VALUES; i++) state.out[g][i] = 0.0f;
  }

  Ahead<ROUND> ahead;
  ahead.find(a, table, visible, begin + warp * ROUND * R::COUNT + row, R::COUNT, end);
  for (int at = begin + warp * ROUND * R::COUNT; at < end; at += DECODE_WARPS * ROUND * R::COUNT) {
    uint4 k[ROUND][R::HELD], v[ROUND][R::HELD];
    int token[ROUND];
#pragma unroll
    for (int u = 0; u < ROUND; u++) {
      token[u] = ahead.token[u];
      const u8* start = token[u] >= 0 ? slot_start(a.slots, ahead.entry[u], a.layer) : nullptr;
      load_row<T, D>(start, a.slots.rows, 0, kv_head, token[u], lane, k[u]);
      load_row<T, D>(start, a.slots.rows, 1, kv_head, token[u], lane, v[u]);
    }
    ahead.find(a, table, visible, at + DECODE_WARPS * ROUND * R::COUNT + row, R::COUNT, end);
    float score[ROUND][G];
    scores<T, D, G, ROUND>(q, k, token, score);
    absorb<T, D, G, ROUND>(state, score, v);
  }
  merge_rows<T, D, G>(state);
  merge_warps<T, D, G>(a, state, first_head, heads);
}

// The second pass, where there are several splits. Grid: [q_heads, batch].
template <class T, int D>
__device__ __forceinline__ void decode_reduce(const DecodeArgs& a) {
  const int head = blockIdx.x, batch = blockIdx.y;
  const Visible visible(a, a.context[batch]);
  const int splits = max(1, (visible.count + a.split_tokens - 1) / a.split_tokens);
  const i64 first = (static_cast<i64>(batch) * a.q_heads + head) * a.splits;
  float top = LOWEST;
  for (int s = 0; s < splits; s++) top = fmaxf(top, a.partial_top[first + s]);
  for (int at = threadIdx.x; at < D; at += DECODE_THREADS) {
    float sum = 0.0f, value = 0.0f;
    for (int s = 0; s < splits; s++) {
      const float shrink = exp2_of(a.partial_top[first + s] - top);
      sum += a.partial_sum[first + s] * shrink;
      value += a.partial[(first + s) * D + at] * shrink;
    }
    finish<T>(a, batch, head, at, top, sum, value);
  }
}
