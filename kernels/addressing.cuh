// Where a row lies: the one place that knows how slots, block tables and an engine's paged tensors are addressed.
//
// A row is one head's keys, or values, of one token in one layer; for opaque blocks it is a run of bytes. A row's address is
//     the block's start + offset of the part (keys, values) + head * head_stride + token * token_stride
// and only the block's start differs: in a slot it is arena + unit * 4096 + layer * layer_stride, in an engine's tensors
// base of (layer, part) + block * block_stride. All strides and offsets are in bytes; layout.py makes them.
#pragma once
#include "device.cuh"

constexpr int PARTS = 2;        // keys and values; opaque bytes are one part
constexpr int ARENAS = 8;       // that one block table may point into
constexpr int ARENA_SHIFT = 29;  // a table entry's high bits: the arena; its low bits: the slot's offset in units of 4 KiB
constexpr u32 UNIT_MASK = (1u << ARENA_SHIFT) - 1;
constexpr int UNIT_SHIFT = 12;

// Division by a number known at the launch: n / divisor for n < 2^31 (Granlund & Montgomery 1994). layout.py makes the two.
struct Divisor {
  u32 divisor, magic, shift;
};

__device__ __forceinline__ u32 divide(u32 n, const Divisor& by) { return (__umulhi(n, by.magic) + n) >> by.shift; }

struct RowStrides {
  i64 part[PARTS];          // bytes from a block's start to the first row of each part
  i64 head_stride[PARTS];
  i64 token_stride[PARTS];
};

__device__ __forceinline__ i64 row_offset(const RowStrides& rows, int part, int head, int token) {
  return rows.part[part] + head * rows.head_stride[part] + token * rows.token_stride[part];
}

struct Slots {
  u8* arena[ARENAS];
  i64 layer_stride;
  RowStrides rows;
};

// The start of one layer of the slot that a table entry names.
__device__ __forceinline__ u8* slot_start(const Slots& slots, u32 entry, int layer) {
  const i64 inside = (static_cast<i64>(entry & UNIT_MASK) << UNIT_SHIFT) + layer * slots.layer_stride;
  return slots.arena[entry >> ARENA_SHIFT] + inside;
}

// One side of a copy: slots named by table entries, or an engine's tensors (one base a layer and part) named by block numbers.
struct Side {
  Slots slots;
  u8* const* bases;    // [layer][part]; null where the side is slots
  i64 block_stride;    // bytes, of an engine's tensors
};

__device__ __forceinline__ u8* block_start(const Side& side, u32 block, int layer, int part) {
  if (side.bases == nullptr) return slot_start(side.slots, block, layer);
  return side.bases[layer * PARTS + part] + block * side.block_stride;
}
