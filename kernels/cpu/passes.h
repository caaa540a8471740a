/* The passes of one instruction set: its header has been included before this one. It sets REST where it reads parts of vectors, and
 * DOT_BFLOAT16 where it multiplies bfloat16, ONLY_BFLOAT16 where it does no more.
 */

#include "softmax.h"
#include "tile.h"

#define STEP (2 * LANES) /* items of a pair */

#ifndef REST
/* Parts of vectors: the first `count` items, then zeros. Copied in pieces of fixed sizes, since a call would spill all registers. */
#define PARTLY(name, item)                                                             \
    TARGET static inline Pair name##_rest(const void *at, int64_t i, int count)        \
    {                                                                                  \
        const item *from = (const item *)at + i;                                       \
        item items[STEP] = {0}, *to = items;                                           \
        for (int piece = STEP / 2; piece; piece /= 2)                                  \
            if (count & piece) {                                                       \
                for (int j = 0; j < piece; j++)                                        \
                    to[j] = from[j];                                                   \
                to += piece, from += piece;                                            \
            }                                                                          \
        return name(items, 0);                                                         \
    }
PARTLY(p_float32, float)
PARTLY(p_float16, uint16_t)
PARTLY(p_bfloat16, uint16_t)
#endif

TARGET static inline vf p_times(Pair key, const float *query, vf sum)
{
    return v_fma(key.b, v_load(query + LANES), v_fma(key.a, v_load(query), sum));
}

/* Queries as bfloat16 pairs are read: of each 2 * LANES items, those with even numbers come first. */
static inline void p_prepare_split(int dtype, const void *from, float *to, int64_t count)
{
    float plain[2 * LANES];
    for (int64_t i = 0; i < count; i += 2 * LANES) {
        const int64_t here = count - i < 2 * LANES ? count - i : 2 * LANES;
        memset(plain, 0, sizeof plain);
        to_floats(dtype, (const uint16_t *)from + i, plain, here);
        for (int j = 0; j < LANES; j++) {
            to[i + j] = plain[2 * j];
            to[i + LANES + j] = plain[2 * j + 1];
        }
    }
}

/* The way back, for sums. */
static inline void p_settle_split(float *sums, int64_t count)
{
    float split[2 * LANES];
    for (int64_t i = 0; i < count; i += 2 * LANES) {
        memcpy(split, sums + i, sizeof split);
        for (int j = 0; j < LANES; j++) {
            sums[i + 2 * j] = split[j];
            sums[i + 2 * j + 1] = split[LANES + j];
        }
    }
}

static inline void p_settle(float *sums, int64_t count) { (void)sums, (void)count; }

#ifndef ONLY_BFLOAT16
#define NAME(x) x##_float32
#define ITEM float
#define ROWS p_float32
#define ROWS_REST p_float32_rest
#define SETTLE p_settle
#define QUERY float
#define KEY Pair
#define KEYS p_float32
#define KEYS_REST p_float32_rest
#define TIMES p_times
#define PREPARE to_floats
#include "pass.h"

#define NAME(x) x##_float16
#define ITEM uint16_t
#define ROWS p_float16
#define ROWS_REST p_float16_rest
#define SETTLE p_settle
#define QUERY float
#define KEY Pair
#define KEYS p_float16
#define KEYS_REST p_float16_rest
#define TIMES p_times
#define PREPARE to_floats
#include "pass.h"

#endif /* ONLY_BFLOAT16 */

#define NAME(x) x##_bfloat16
#define ITEM uint16_t
#define ROWS p_bfloat16
#define ROWS_REST p_bfloat16_rest
#define SETTLE p_settle_split
#ifdef DOT_BFLOAT16
#define QUERY uint16_t
#define KEY Key
#define KEYS k_load
#define KEYS_REST k_rest
#define TIMES k_times
#define PREPARE k_prepare
#else
#define QUERY float
#define KEY Pair
#define KEYS p_bfloat16
#define KEYS_REST p_bfloat16_rest
#define TIMES p_times
#define PREPARE p_prepare_split
#endif
#include "pass.h"
