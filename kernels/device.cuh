// What the kernels need of their platform: element types, vectors, and a few instructions. No header of the CUDA toolkit is included,
// so that NVRTC alone compiles them. On a CPU host_shim.h stands in for what the compiler or the hardware gives here.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr float LOWEST = -3.402823466e38f;  // where a maximum starts: finite, so that no difference of two maxima is NaN
constexpr int WARP = 32;

struct half_t { u16 bits; };
struct bf16_t { u16 bits; };

#ifdef KV_HOST_SHIM
#include "host_shim.h"
#else

// A block's shared memory: as many bytes as the launch asked for.
#define KV_SHARED_FLOATS(name)                                  \
  extern __shared__ __align__(16) unsigned char kv_shared_bytes[]; \
  float* name = reinterpret_cast<float*>(kv_shared_bytes)

// Read once and by nobody else: kept out of L1, so that block tables stay there.
__device__ __forceinline__ uint4 load_once(const u8* from) {
  uint4 w;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "l"(from));
  return w;
}

__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float to_float(half_t x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

__device__ __forceinline__ half_t to_half(float x) {
  half_t y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}

__device__ __forceinline__ bf16_t to_bf16(float x) {
  bf16_t y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
#endif

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16_t x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }

__device__ __forceinline__ void store(float x, float* to) { *to = x; }
__device__ __forceinline__ void store(float x, half_t* to) { *to = to_half(x); }
__device__ __forceinline__ void store(float x, bf16_t* to) { *to = to_bf16(x); }

// 16 bytes as the elements that they hold.
template <class T> struct Vector;

template <> struct Vector<float> {
  static constexpr int ITEMS = 4;
  static __device__ __forceinline__ void unpack(uint4 w, float* x) {
    x[0] = __uint_as_float(w.x), x[1] = __uint_as_float(w.y), x[2] = __uint_as_float(w.z), x[3] = __uint_as_float(w.w);
  }
};

template <> struct Vector<bf16_t> {
  static constexpr int ITEMS = 8;
  static __device__ __forceinline__ void unpack(uint4 w, float* x) {
    const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      x[2 * i] = __uint_as_float(words[i] << 16);
      x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
};

template <> struct Vector<half_t> {
  static constexpr int ITEMS = 8;
  static __device__ __forceinline__ void unpack(uint4 w, float* x) {
    const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      x[2 * i] = to_float(half_t{static_cast<u16>(words[i] & 0xffffu)});
      x[2 * i + 1] = to_float(half_t{static_cast<u16>(words[i] >> 16)});
    }
  }
};
