/* Vectors of eight floats: AVX2 with FMA and F16C. */

#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "attention.h"

#define LANES 8
#define DOTS 2    /* queries whose products with four tokens are summed at once: what sixteen registers hold */
#define PAIRS 1   /* of a value's vectors that are summed at once */
#define TARGET __attribute__((target("avx2,fma,f16c")))

typedef __m256 vf;
typedef struct {
    vf a, b;
} Pair;

TARGET static inline vf v_set(float x) { return _mm256_set1_ps(x); }
TARGET static inline vf v_load(const float *at) { return _mm256_loadu_ps(at); }
TARGET static inline void v_store(float *at, vf v) { _mm256_storeu_ps(at, v); }
TARGET static inline vf v_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
TARGET static inline vf v_max(vf a, vf b) { return _mm256_max_ps(a, b); } /* b where one of them is not a number */
TARGET static inline vf v_floor(vf x) { return _mm256_floor_ps(x); }
TARGET static inline float v_first(vf v) { return _mm256_cvtss_f32(v); }
TARGET static inline int v_any_above(vf v, float x) { return _mm256_movemask_ps(_mm256_cmp_ps(v, v_set(x), _CMP_GT_OQ)) != 0; }
TARGET static inline vf v_unless_below(vf v, vf x, float limit) { return _mm256_and_ps(v, _mm256_cmp_ps(x, v_set(limit), _CMP_NLT_UQ)); }

TARGET static inline float v_sum(vf v)
{
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

TARGET static inline float v_greatest(vf v)
{
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

/* Of four vectors, in each half the half's sums; and two such joined: the sums of eight vectors. */
TARGET static inline vf v_quad(const vf v[4]) { return _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3])); }
TARGET static inline vf v_join(const vf *quads)
{
    return _mm256_add_ps(_mm256_permute2f128_ps(quads[0], quads[1], 0x20), _mm256_permute2f128_ps(quads[0], quads[1], 0x31));
}

TARGET static inline vf v_signed(vf size, vf sign)
{
    return _mm256_or_ps(size, _mm256_and_ps(sign, v_set(-0.0f)));
}

/* 2 to a whole number from -126 to 127. */
TARGET static inline vf v_power(vf whole)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23));
}

TARGET static inline Pair p_float32(const void *at, int64_t i)
{
    return (Pair){_mm256_loadu_ps((const float *)at + i), _mm256_loadu_ps((const float *)at + i + LANES)};
}

TARGET static inline Pair p_float16(const void *at, int64_t i)
{
    const __m128i *items = (const __m128i *)((const uint16_t *)at + i);
    return (Pair){_mm256_cvtph_ps(_mm_loadu_si128(items)), _mm256_cvtph_ps(_mm_loadu_si128(items + 1))};
}

/* Two items in each 32 bits: those with even numbers, those with odd ones. */
TARGET static inline Pair p_bfloat16(const void *at, int64_t i)
{
    const __m256i both = _mm256_loadu_si256((const __m256i *)((const uint16_t *)at + i));
    return (Pair){_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)), _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(-65536)))};
}
