// The new keys and values of one step into the slots of their sequences, for one layer. Sequences may have any number of new tokens.
#include "addressing.cuh"

constexpr int WRITE_THREADS = 128;

struct WriteArgs {
  Slots slots;
  const u8* source[PARTS];      // keys, values: [tokens, heads, dim]
  i64 token_stride[PARTS];      // bytes
  i64 head_stride[PARTS];
  const int* starts;            // [batch + 1]: the first new token of each sequence, and the end
  const int* context;           // [batch]: tokens of each sequence, the new ones included
  const u32* table;             // [batch, table_stride]
  Divisor block_tokens;
  int table_stride, layer, batch, heads;
  int row_vectors[PARTS];
};

// The sequence of a token: the last one that starts at or before it, so that sequences without new tokens are passed over.
__device__ __forceinline__ int sequence_of(const int* starts, int batch, int token) {
  int low = 0, high = batch;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (starts[middle] <= token) low = middle;
    else high = middle;
  }
  return low;
}

// Grid: [tokens]. Tokens past the last sequence's end, and of a sequence that has none (a padded batch), are left out.
template <class W>
__device__ __forceinline__ void kv_write(const WriteArgs& a) {
  const int token = blockIdx.x;
  if (token >= a.starts[a.batch]) return;
  const int sequence = sequence_of(a.starts, a.batch, token);
  const int position = a.context[sequence] - a.starts[sequence + 1] + token;
  if (position < 0) return;
  const u32 block = divide(position, a.block_tokens);
  const int inside = position - block * a.block_tokens.divisor;
  u8* start = slot_start(a.slots, a.table[static_cast<i64>(sequence) * a.table_stride + block], a.layer);
  for (int part = 0; part < PARTS; part++) {
    const int vectors = a.row_vectors[part];
    for (int i = threadIdx.x; i < a.heads * vectors; i += WRITE_THREADS) {
      const int head = i / vectors, vector = i - head * vectors;
      const u8* from = a.source[part] + token * a.token_stride[part] + head * a.head_stride[part];
      u8* to = start + row_offset(a.slots.rows, part, head, inside);
      reinterpret_cast<W*>(to)[vector] = reinterpret_cast<const W*>(from)[vector];
    }
  }
}
