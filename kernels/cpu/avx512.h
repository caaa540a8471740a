/* Vectors of sixteen floats: AVX-512 F, BW, DQ and VL. */

#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "attention.h"

#define LANES 16
#define DOTS 4    /* queries whose products with four tokens are summed at once */
#define PAIRS 2   /* of a value's vectors that are summed at once */
#ifdef DOT_BFLOAT16
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c")))
#else
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")))
#endif

typedef __m512 vf;
typedef struct {
    vf a, b;
} Pair;

TARGET static inline vf v_set(float x) { return _mm512_set1_ps(x); }
TARGET static inline vf v_load(const float *at) { return _mm512_loadu_ps(at); }
TARGET static inline void v_store(float *at, vf v) { _mm512_storeu_ps(at, v); }
TARGET static inline vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
TARGET static inline vf v_max(vf a, vf b) { return _mm512_max_ps(a, b); } /* b where one of them is not a number */
TARGET static inline vf v_floor(vf x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
TARGET static inline float v_first(vf v) { return _mm512_cvtss_f32(v); }
TARGET static inline int v_any_above(vf v, float x) { return _mm512_cmp_ps_mask(v, v_set(x), _CMP_GT_OQ) != 0; }
TARGET static inline float v_sum(vf v) { return _mm512_reduce_add_ps(v); }
TARGET static inline float v_greatest(vf v) { return _mm512_reduce_max_ps(v); }
TARGET static inline vf v_signed(vf size, vf sign) { return _mm512_or_ps(size, _mm512_and_ps(sign, v_set(-0.0f))); }
TARGET static inline vf v_power(vf whole) { return _mm512_scalef_ps(v_set(1), whole); }
TARGET static inline vf v_unless_below(vf v, vf x, float limit)
{
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, v_set(limit), _CMP_NLT_UQ), v);
}

/* Of four vectors, in each quarter the quarter's sums; and four such joined: the sums of sixteen vectors. */
TARGET static inline vf v_quad(const vf v[4])
{
    const vf a = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
    const vf b = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
    return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xEE));
}

TARGET static inline vf v_join(const vf *quads)
{
    const vf a = _mm512_add_ps(_mm512_shuffle_f32x4(quads[0], quads[1], 0x44), _mm512_shuffle_f32x4(quads[0], quads[1], 0xEE));
    const vf b = _mm512_add_ps(_mm512_shuffle_f32x4(quads[2], quads[3], 0x44), _mm512_shuffle_f32x4(quads[2], quads[3], 0xEE));
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
}

TARGET static inline Pair p_float32(const void *at, int64_t i)
{
    return (Pair){_mm512_loadu_ps((const float *)at + i), _mm512_loadu_ps((const float *)at + i + LANES)};
}

TARGET static inline Pair p_float16(const void *at, int64_t i)
{
    const __m256i *items = (const __m256i *)((const uint16_t *)at + i);
    return (Pair){_mm512_cvtph_ps(_mm256_loadu_si256(items)), _mm512_cvtph_ps(_mm256_loadu_si256(items + 1))};
}

/* Two items in each 32 bits: those with even numbers, those with odd ones. */
TARGET static inline Pair p_split(__m512i both)
{
    return (Pair){_mm512_castsi512_ps(_mm512_slli_epi32(both, 16)), _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(-65536)))};
}

TARGET static inline Pair p_bfloat16(const void *at, int64_t i) { return p_split(_mm512_loadu_si512((const uint16_t *)at + i)); }

/* The first `count` items, then zeros: nothing behind them is read. */
#define REST
TARGET static inline __m512i v_rest(const void *at, int64_t i, int count)
{
    return _mm512_maskz_loadu_epi16((__mmask32)((1ull << count) - 1), (const uint16_t *)at + i);
}

TARGET static inline Pair p_float32_rest(const void *at, int64_t i, int count)
{
    const __mmask32 mask = (__mmask32)((1ull << count) - 1);
    const float *items = (const float *)at + i;
    return (Pair){_mm512_maskz_loadu_ps((__mmask16)mask, items), _mm512_maskz_loadu_ps((__mmask16)(mask >> LANES), items + LANES)};
}

TARGET static inline Pair p_float16_rest(const void *at, int64_t i, int count)
{
    const __m512i items = v_rest(at, i, count);
    return (Pair){_mm512_cvtph_ps(_mm512_castsi512_si256(items)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64(items, 1))};
}

TARGET static inline Pair p_bfloat16_rest(const void *at, int64_t i, int count) { return p_split(v_rest(at, i, count)); }

#ifdef DOT_BFLOAT16
typedef __m512bh Key;

TARGET static inline Key k_load(const void *at, int64_t i) { return (Key)_mm512_loadu_si512((const uint16_t *)at + i); }
TARGET static inline Key k_rest(const void *at, int64_t i, int count) { return (Key)v_rest(at, i, count); }
TARGET static inline vf k_times(Key key, const uint16_t *query, vf sum) { return _mm512_dpbf16_ps(sum, key, k_load(query, 0)); }
static inline void k_prepare(int dtype, const void *from, uint16_t *to, int64_t count)
{
    (void)dtype;
    memcpy(to, from, (size_t)count * sizeof *to);
}
#endif
