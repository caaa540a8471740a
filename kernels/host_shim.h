// Runs CUDA kernels on a CPU, so that their own source is what the tests test: blocks one after the other, a block's threads as fibres.
//
// A fibre runs until it waits, at __syncthreads or at a warp shuffle, or ends. Which one runs next is drawn from a seed: threads of
// one block run far ahead of each other, so a missing barrier gives wrong numbers and not, by luck, right ones. Shared memory is a
// heap allocation of exactly the bytes that the launch asked for, poisoned before each block. Threads that wait at different lines,
// or for one that has ended, are divergent: the launch fails and says where each of them is. Not shown: races within one instruction,
// weak memory order. One launch at a time in a process.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) uint2 { u32 x, y; };

namespace kv_shim {
struct Index { unsigned x, y, z; };

enum class Waits { RUNS, SYNC, SHUFFLE, ENDED };

struct Thread {
  void* stack_pointer;
  char* stack;
  void* fake_stack;  // AddressSanitizer's
  Waits waits;
  int line;          // where it waits
  const char* file;
  int lane_mask;
  u32 given, taken;  // what it gave to a shuffle, and what came back
  Index at;
};

extern Thread* current;
extern Index block_at, block_size, grid_size;
extern unsigned char* shared;
extern u64 loaded_bytes;  // by load_once, since the start of the launch

void sync_threads(const char* file, int line);
u32 shuffle_xor(unsigned mask, u32 value, int lane_mask, const char* file, int line);

inline float shuffle_xor(unsigned mask, float value, int lane_mask, const char* file, int line) {
  u32 bits;
  memcpy(&bits, &value, 4);
  bits = shuffle_xor(mask, bits, lane_mask, file, line);
  memcpy(&value, &bits, 4);
  return value;
}
}  // namespace kv_shim

#define threadIdx (kv_shim::current->at)
#define blockIdx (kv_shim::block_at)
#define blockDim (kv_shim::block_size)
#define gridDim (kv_shim::grid_size)
#define __syncthreads() kv_shim::sync_threads(__FILE__, __LINE__)
#define __shfl_xor_sync(mask, value, lane_mask) kv_shim::shuffle_xor(mask, value, lane_mask, __FILE__, __LINE__)
#define KV_SHARED_FLOATS(name) float* name = reinterpret_cast<float*>(kv_shim::shared)

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline u32 __umulhi(u32 a, u32 b) { return static_cast<u32>(static_cast<u64>(a) * b >> 32); }

inline float __uint_as_float(u32 bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
inline float __int_as_float(int bits) { return __uint_as_float(static_cast<u32>(bits)); }
inline u32 float_bits(float x) {
  u32 bits;
  memcpy(&bits, &x, 4);
  return bits;
}

inline uint4 load_once(const u8* from) {
  kv_shim::loaded_bytes += sizeof(uint4);
  return *reinterpret_cast<const uint4*>(from);
}
inline float exp2_of(float x) { return exp2f(x); }

inline float to_float(half_t x) {
  const u32 sign = (x.bits & 0x8000u) << 16, exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
  if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
  if (exponent == 0) return (sign ? -1.0f : 1.0f) * static_cast<float>(fraction) * 0x1p-24f;
  return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
}

// To nearest, ties to even, as the hardware rounds.
inline half_t to_half(float x) {
  const u16 sign = static_cast<u16>(float_bits(x) >> 16 & 0x8000u);
  const float size = fabsf(x);
  if (size != size) return half_t{0x7fff};
  if (size >= 65520.0f) return half_t{static_cast<u16>(sign | 0x7c00)};
  if (size < 0x1p-14f) return half_t{static_cast<u16>(sign | static_cast<u16>(nearbyintf(size * 0x1p24f)))};
  const u32 bits = float_bits(size);
  return half_t{static_cast<u16>(sign | ((bits + 0xfffu + (bits >> 13 & 1)) - (112u << 23)) >> 13)};
}

inline bf16_t to_bf16(float x) {
  const u32 bits = float_bits(x);
  if (x != x) return bf16_t{0x7fff};
  return bf16_t{static_cast<u16>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16)};
}

// ---- launches

namespace kv_shim {
int launch(void (*entry)(const void*), const unsigned* grid, const unsigned* block, unsigned shared_bytes, const void* args);
}

// One C function a kernel: kv_launch_NAME(grid[3], block[3], shared bytes, arguments). Returns 0, or -1 and kv_last_error() says why.
#define KV_HOST_LAUNCHER(name, Args)                                                                                 \
  extern "C" int kv_launch_##name(const unsigned* grid, const unsigned* block, unsigned shared_bytes, void** args) { \
    return kv_shim::launch([](const void* a) { name(*static_cast<const Args*>(a)); }, grid, block, shared_bytes, args[0]); \
  }
