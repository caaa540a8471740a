// Copies of blocks between an engine's paged tensors and slots, either way, or from slot to slot; all layers and blocks in one launch.
//
// The rows of one layer of a block are a small nest, [part][head][token][vector], with strides of its own on each side. layout.py has
// merged what is contiguous on both sides, so that opaque bytes, or two equal layouts, are one long row.
#include "addressing.cuh"

constexpr int COPY_THREADS = 256;
constexpr int COPY_ROUND = 4;  // vectors of a thread, all in flight at once

struct CopyArgs {
  Side from, to;
  const u32* from_blocks;    // [blocks]: table entries of slots, or block numbers of an engine
  const u32* to_blocks;
  int layers, pieces;        // pieces: thread blocks that share one layer of one block, COPY_THREADS * COPY_ROUND vectors each
  Divisor row_vectors, tokens, heads;
  u32 vectors;               // of one layer of one block: parts * heads * tokens * row_vectors
};

// Grid: [pieces * layers * blocks]. A vector W is as wide as every address and stride allows.
template <class W>
__device__ __forceinline__ void block_copy(const CopyArgs& a) {
  const u32 piece = blockIdx.x % a.pieces, rest = blockIdx.x / a.pieces;
  const int layer = rest % a.layers;
  const u32 from_block = a.from_blocks[rest / a.layers], to_block = a.to_blocks[rest / a.layers];
  const u32 first = piece * COPY_THREADS * COPY_ROUND + threadIdx.x;
  W held[COPY_ROUND];
  u8* to[COPY_ROUND];
#pragma unroll
  for (int u = 0; u < COPY_ROUND; u++) {
    const u32 i = first + u * COPY_THREADS;
    if (i < a.vectors) {
      const u32 row = divide(i, a.row_vectors), vector = i - row * a.row_vectors.divisor;
      const u32 line = divide(row, a.tokens), token = row - line * a.tokens.divisor;
      const u32 part = divide(line, a.heads), head = line - part * a.heads.divisor;
      const u8* from = block_start(a.from, from_block, layer, part) + row_offset(a.from.slots.rows, part, head, token);
      held[u] = reinterpret_cast<const W*>(from)[vector];
      to[u] = block_start(a.to, to_block, layer, part) + row_offset(a.to.slots.rows, part, head, token) + vector * sizeof(W);
    }
  }
#pragma unroll
  for (int u = 0; u < COPY_ROUND; u++) {
    if (first + u * COPY_THREADS < a.vectors) *reinterpret_cast<W*>(to[u]) = held[u];
  }
}
