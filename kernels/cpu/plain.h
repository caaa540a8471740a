/* Vectors of four floats in the compiler's own terms: for any processor. */

#include <math.h>
#include <string.h>

#include "attention.h"

#define LANES 4
#define DOTS 2   /* queries whose products with four tokens are summed at once: what sixteen registers hold */
#define PAIRS 1  /* of a value's vectors that are summed at once */
#define TARGET

typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
typedef struct {
    vf a, b;
} Pair;

static inline vf v_set(float x) { return (vf){x, x, x, x}; }
static inline vf v_load(const float *at)
{
    vf v;
    memcpy(&v, at, sizeof v);
    return v;
}
static inline void v_store(float *at, vf v) { memcpy(at, &v, sizeof v); }
static inline vf v_fma(vf a, vf b, vf c) { return a * b + c; }
static inline vf v_choose(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }
static inline vf v_max(vf a, vf b) { return v_choose(a > b, a, b); } /* b where one of them is not a number */
static inline float v_sum(vf v) { return (v[0] + v[1]) + (v[2] + v[3]); }
static inline float v_first(vf v) { return v[0]; }
static inline float v_greatest(vf v)
{
    const float low = v[0] > v[1] ? v[0] : v[1], high = v[2] > v[3] ? v[2] : v[3];
    return low > high ? low : high;
}
static inline int v_any_above(vf v, float x)
{
    const vi above = v > v_set(x);
    return (above[0] | above[1] | above[2] | above[3]) != 0;
}
static inline vf v_quad(const vf v[4]) { return (vf){v_sum(v[0]), v_sum(v[1]), v_sum(v[2]), v_sum(v[3])}; }
static inline vf v_join(const vf *quads) { return quads[0]; }

static inline vf v_floor(vf x)
{
    const vf whole = __builtin_convertvector(__builtin_convertvector(x, vi), vf);
    return whole - v_choose(whole > x, v_set(1), v_set(0));
}

/* 2 to a whole number from -126 to 127. */
static inline vf v_power(vf whole) { return (vf)((__builtin_convertvector(whole, vi) + 127) << 23); }
static inline vf v_signed(vf size, vf sign) { return (vf)(((vi)sign & INT32_MIN) | (vi)size); }
static inline vf v_unless_below(vf v, vf x, float limit) { return (vf)(~(x < v_set(limit)) & (vi)v); }

static inline Pair p_float32(const void *at, int64_t i) { return (Pair){v_load((const float *)at + i), v_load((const float *)at + i + LANES)}; }

static inline vf v_half(const uint16_t *at)
{
    typedef uint16_t four __attribute__((vector_size(8)));
    four items;
    memcpy(&items, at, sizeof items);
    const vi wide = __builtin_convertvector(items, vi), sign = (wide & 0x8000) << 16, rest = (wide & 0x7FFF) << 13;
    const vf finite = (vf)rest * v_set(0x1p112f); /* the exponent's bias, 127 for 15 */
    return (vf)(sign | (vi)v_choose(rest >= 0x0F800000, (vf)(rest | 0x7F800000), finite));
}

static inline Pair p_float16(const void *at, int64_t i)
{
    return (Pair){v_half((const uint16_t *)at + i), v_half((const uint16_t *)at + i + LANES)};
}

/* Two items in each 32 bits: those with even numbers, those with odd ones. */
static inline Pair p_bfloat16(const void *at, int64_t i)
{
    vi both;
    memcpy(&both, (const uint16_t *)at + i, sizeof both);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    return (Pair){(vf)(both << 16), (vf)(both & -65536)};
#else
    return (Pair){(vf)(both & -65536), (vf)(both << 16)};
#endif
}
