/* Attention of many new tokens of one sequence, by the processor's products of bfloat16 pairs; K and V are read from their slots.
 *
 * The new tokens of one KV head are cut into stretches; each is one unit of work. A unit goes over the context in tiles at fixed tokens.
 * A tile's K and V are packed once, so that its products with all rows (a query head's new token each) run from registers: scores of some
 * rows with the whole tile, the online softmax, and the weighted values. So a row's result depends on neither how the prompt is cut into
 * steps, nor the other rows, nor the threads. FlashAttention, 2022.
 */

#include "attention.h"

#ifdef X86

#define DOT_BFLOAT16
#include "avx512.h"

#include "softmax.h"

#define SPAN 64           /* tokens of a tile: four vectors of scores */
#define VECTORS (SPAN / LANES)
#define BATCH 6           /* rows whose sums are in registers together: six times four of them */
#define MOST_ROWS 192     /* of a unit */
#define MOST_DIM 256      /* of keys and of values */

typedef struct {
    const Layout *layout;
    const Prefill *prefill;
    int32_t stretch, stretches; /* new tokens of a unit, units of a KV head */
} Work;

/* What a unit works with. Rows lie head after head, in each the new tokens in order. */
typedef struct {
    uint32_t keys[MOST_DIM / 2 * SPAN];   /* [pair of dims][token] */
    uint32_t values[SPAN / 2 * MOST_DIM]; /* [pair of tokens][dim] */
    float sums[MOST_ROWS * MOST_DIM];     /* [row][dim] of the values */
    float top[MOST_ROWS], total[MOST_ROWS];
} Unit;

static inline const char *slot_of(const Work *work, int32_t token)
{
    const Layout *layout = work->layout;
    return (const char *)(uintptr_t)work->prefill->table[token / layout->block_tokens] + work->prefill->layer * layout->layer_bytes;
}

/* A tile's K and V, of tokens from `seen` up to first + count; zeros before and behind them. */
TARGET static void pack(const Work *work, int32_t head, int32_t first, int32_t seen, int32_t count, Unit *unit)
{
    const Layout *layout = work->layout;
    const int32_t pairs = layout->key_dim / 2, dims = layout->value_dim;
    const int32_t before = seen > first ? seen - first : 0;
    if (count < SPAN || before) {
        memset(unit->keys, 0, sizeof(uint32_t) * (size_t)pairs * SPAN);
        memset(unit->values, 0, sizeof(uint32_t) * (size_t)dims * (SPAN / 2));
    }
    for (int32_t t = before; t < count; t++) {
        const int32_t token = first + t, place = token % layout->block_tokens;
        const char *slot = slot_of(work, token);
        const char *key = slot + layout->key_at + head * layout->key_head_bytes + place * layout->key_token_bytes;
        const char *value = slot + layout->value_at + head * layout->value_head_bytes + place * layout->value_token_bytes;
        for (int32_t p = 0; p < pairs; p++)
            memcpy(unit->keys + p * SPAN + t, key + 4 * p, 4);
        uint32_t *to = unit->values + t / 2 * dims;
        for (int32_t d = 0; d < dims; d += LANES) {
            __m512i items = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(value + 2 * d)));
            if (t % 2)
                items = _mm512_or_si512(_mm512_slli_epi32(items, 16), _mm512_loadu_si512(to + d));
            _mm512_storeu_si512(to + d, items);
        }
    }
}

/* The products of BATCH rows' pairs with `vectors` vectors of packed ones, `count` of them, are added to `sums`. A row's pairs follow each
 * other in memory; packed vectors of one pair are `stride` apart from the next pair's. */
TARGET static inline __attribute__((always_inline)) void multiply(
    const uint32_t *const rows[BATCH], const uint32_t *packed, int64_t stride, int32_t count, int vectors, vf sums[BATCH][VECTORS])
{
    for (int32_t i = 0; i < count; i++, packed += stride) {
        __m512bh columns[VECTORS];
        UNROLL for (int v = 0; v < vectors; v++) columns[v] = (__m512bh)_mm512_loadu_si512(packed + v * LANES);
        UNROLL for (int r = 0; r < BATCH; r++) {
            const __m512bh pair = (__m512bh)_mm512_set1_epi32((int32_t)rows[r][i]);
            UNROLL for (int v = 0; v < vectors; v++) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], columns[v], pair);
        }
    }
}

/* One row's scores with a tile become weights in `weights`, its sums so far are to be multiplied by what is returned.
 * The row sees the tile's tokens from `low` up to `high`. */
TARGET static inline __attribute__((always_inline)) float weigh(
    const Prefill *prefill, vf scores[VECTORS], int32_t low, int32_t high, float *top, float *total, uint16_t *weights)
{
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __mmask16 seen[VECTORS];
    vf greatest = v_set(LOWEST);
    UNROLL for (int v = 0; v < VECTORS; v++) {
        const __m512i token = _mm512_add_epi32(lanes, _mm512_set1_epi32(v * LANES));
        seen[v] = _mm512_cmple_epi32_mask(token, _mm512_set1_epi32(high)) & _mm512_cmpge_epi32_mask(token, _mm512_set1_epi32(low));
        if (prefill->softcap > 0)
            scores[v] = v_tanh(scores[v] * v_set(prefill->scale / prefill->softcap)) * v_set(prefill->softcap * LOG2E);
        else
            scores[v] = scores[v] * v_set(prefill->scale * LOG2E);
        greatest = _mm512_mask_max_ps(greatest, seen[v], greatest, scores[v]);
    }
    const float before = *top, most = v_greatest(greatest);
    float factor = 1;
    if (most > before) {
        *top = most;
        factor = v_first(v_exp2(v_set(before - most)));
    }
    vf sum = v_set(0);
    UNROLL for (int v = 0; v < VECTORS; v++) {
        const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_mov_ps(seen[v], v_exp2(scores[v] - v_set(*top))));
        _mm256_storeu_si256((__m256i *)(weights + v * LANES), rounded);
        sum = sum + _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16)); /* of what the values are weighted with */
    }
    *total = *total * factor + v_sum(sum);
    return factor;
}

/* The weighted values of BATCH rows over a tile are added to their sums, for `vectors` vectors of dims. */
TARGET static inline __attribute__((always_inline)) void add_values(
    const uint32_t *const weights[BATCH], const uint32_t *values, int32_t dims, int vectors, const float factors[BATCH], float *const sums[BATCH])
{
    vf held[BATCH][VECTORS];
    UNROLL for (int r = 0; r < BATCH; r++)
        UNROLL for (int v = 0; v < vectors; v++) held[r][v] = v_load(sums[r] + v * LANES) * v_set(factors[r]);
    multiply(weights, values, dims, SPAN / 2, vectors, held);
    UNROLL for (int r = 0; r < BATCH; r++)
        UNROLL for (int v = 0; v < vectors; v++) v_store(sums[r] + v * LANES, held[r][v]);
}

/* BATCH rows of one query head against the tile that begins at token `first`. `numbers` are the rows' in the unit; places those of their
 * new tokens in the context. Rows may be named twice, where there are not so many: each time the same is computed from the same. */
TARGET static void attend(const Work *work, Unit *unit, const uint32_t *const queries[BATCH], const int32_t numbers[BATCH],
    const int32_t places[BATCH], int32_t first)
{
    const Layout *layout = work->layout;
    const Prefill *prefill = work->prefill;
    uint16_t weights[BATCH][SPAN] __attribute__((aligned(64)));
    const uint32_t *weighted[BATCH];
    float factors[BATCH], *sums[BATCH];
    vf scores[BATCH][VECTORS];
    UNROLL for (int r = 0; r < BATCH; r++)
        UNROLL for (int v = 0; v < VECTORS; v++) scores[r][v] = v_set(0);
    multiply(queries, unit->keys, SPAN, layout->key_dim / 2, VECTORS, scores);
    for (int r = 0; r < BATCH; r++) {
        weighted[r] = (const uint32_t *)(const void *)weights[r];
        sums[r] = unit->sums + (int64_t)numbers[r] * layout->value_dim;
        if (r && numbers[r] == numbers[r - 1]) {
            memcpy(weights[r], weights[r - 1], sizeof weights[r]);
            factors[r] = factors[r - 1];
            continue;
        }
        const int32_t low = prefill->window > 0 ? places[r] - prefill->window + 1 - first : 0;
        factors[r] = weigh(prefill, scores[r], low, places[r] - first, unit->top + numbers[r], unit->total + numbers[r], weights[r]);
    }
    for (int32_t d = 0; d < layout->value_dim; d += VECTORS * LANES) {
        const int vectors = (layout->value_dim - d) / LANES;
        float *at[BATCH];
        for (int r = 0; r < BATCH; r++)
            at[r] = sums[r] + d;
        if (vectors >= VECTORS)
            add_values(weighted, unit->values + d, layout->value_dim, VECTORS, factors, at);
        else if (vectors == 3)
            add_values(weighted, unit->values + d, layout->value_dim, 3, factors, at);
        else if (vectors == 2)
            add_values(weighted, unit->values + d, layout->value_dim, 2, factors, at);
        else
            add_values(weighted, unit->values + d, layout->value_dim, 1, factors, at);
    }
}

/* Each row's sums become its result. */
TARGET static void finish(const Work *work, const Unit *unit, int32_t head, int32_t from, int32_t count)
{
    const Layout *layout = work->layout;
    const Prefill *prefill = work->prefill;
    const int32_t group = group_of(layout);
    for (int32_t row = 0; row < group * count; row++) {
        const int32_t query_head = head * group + row / count, token = from + row % count;
        char *out = (char *)prefill->out + token * prefill->out_row_bytes + query_head * prefill->out_head_bytes;
        const vf share = v_set(1 / unit->total[row]);
        for (int32_t d = 0; d < layout->value_dim; d += LANES) {
            const vf whole = v_load(unit->sums + (int64_t)row * layout->value_dim + d) * share;
            _mm256_storeu_si256((__m256i *)(out + 2 * d), (__m256i)_mm512_cvtneps_pbh(whole));
        }
    }
}

TARGET static void run_unit(void *given, int64_t number)
{
    const Work *work = given;
    const Layout *layout = work->layout;
    const Prefill *prefill = work->prefill;
    const int32_t group = group_of(layout), head = (int32_t)(number / work->stretches);
    const int32_t from = (work->stretches - 1 - (int32_t)(number % work->stretches)) * work->stretch; /* the longest first */
    const int32_t count = prefill->count - from < work->stretch ? prefill->count - from : work->stretch;
    const int32_t begin = prefill->start + from, end = begin + count;
    Unit unit;
    memset(unit.sums, 0, sizeof(float) * (size_t)(group * count) * (size_t)layout->value_dim);
    for (int32_t row = 0; row < group * count; row++) {
        const float sink = prefill->sinks ? prefill->sinks[head * group + row / count] * LOG2E : LOWEST;
        unit.top[row] = sink;
        unit.total[row] = prefill->sinks ? 1 : 0;
    }
    const int32_t seen = prefill->window > 0 && begin >= prefill->window ? begin - prefill->window + 1 : 0;
    for (int32_t first = seen / SPAN * SPAN; first < end; first += SPAN) {
        pack(work, head, first, seen, end - first < SPAN ? end - first : SPAN, &unit);
        for (int32_t h = 0; h < group; h++) {
            const char *query = (const char *)prefill->q + (head * group + h) * prefill->q_head_bytes;
            for (int32_t at = first > begin ? first - begin : 0; at < count; at += BATCH) {
                const uint32_t *queries[BATCH];
                int32_t numbers[BATCH], places[BATCH];
                if (prefill->window > 0 && begin + at - prefill->window >= first + SPAN)
                    break; /* these and all after them are past the tile */
                for (int32_t r = 0; r < BATCH; r++) {
                    const int32_t token = at + r < count ? at + r : count - 1;
                    queries[r] = (const uint32_t *)(const void *)(query + (from + token) * prefill->q_row_bytes);
                    numbers[r] = h * count + token;
                    places[r] = begin + token;
                }
                attend(work, &unit, queries, numbers, places, first);
            }
        }
    }
    finish(work, &unit, head, from, count);
}

int32_t avx512_bf16_prefill(const Layout *layout, const Prefill *prefill, int32_t threads)
{
    const int32_t group = group_of(layout);
    if (layout->dtype != BFLOAT16 || group > MOST_ROWS || layout->key_dim % 2 || layout->key_dim > MOST_DIM || layout->value_dim % LANES
        || layout->value_dim > MOST_DIM)
        return -1;
    Work work = {.layout = layout, .prefill = prefill, .stretch = MOST_ROWS / group};
    work.stretch = work.stretch > BATCH ? work.stretch / BATCH * BATCH : work.stretch;
    work.stretches = (prefill->count + work.stretch - 1) / work.stretch;
    pool_run(run_unit, &work, (int64_t)work.stretches * layout->kv_heads, threads);
    return 0;
}

#else

int32_t avx512_bf16_prefill(const Layout *layout, const Prefill *prefill, int32_t threads)
{
    (void)layout, (void)prefill, (void)threads;
    return -1;
}

#endif
