/* Decode attention over paged K and V, read where they lie, and the writing of new K and V: what the launcher calls.
 *
 * A row's context is cut into chunks at fixed tokens, and a chunk's query heads into ranges whose sums fit the nearest cache. Each such
 * unit is one pass; the last to end of a row adds them up in order. So a row's result depends on neither the other rows nor the threads.
 * Split-KV: Flash-Decoding, 2023.
 */

#include "attention.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "plain.h"

#define WORTH_BYTES (256 << 10) /* of K and V for each thread: waking one takes as long as reading some tens of KiB */

static PassFunction pass_of(int32_t isa, int32_t dtype)
{
#ifdef X86
    if (isa == AVX512_BF16 && dtype == BFLOAT16)
        return avx512_bf16_pass;
    if (isa >= AVX512)
        return avx512_passes[dtype];
    if (isa == AVX2)
        return avx2_passes[dtype];
#endif
    (void)isa;
    return plain_passes[dtype];
}

EXPORTED int32_t kv_cpu_version(void) { return VERSION; }

/* The sizes of the structures that the launcher fills, to be compared with its own. */
EXPORTED void kv_cpu_sizes(int32_t sizes[5])
{
    sizes[0] = sizeof(Layout), sizes[1] = sizeof(Rows), sizes[2] = sizeof(Decode), sizes[3] = sizeof(Write), sizes[4] = sizeof(Prefill);
}

/* Whether this processor has an instruction set. */
EXPORTED int32_t kv_cpu_has(int32_t isa)
{
#ifdef X86
    __builtin_cpu_init();
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (isa == AVX2)
        return avx2;
    if (isa == AVX512)
        return avx512;
    if (isa == AVX512_BF16)
        return avx512 && __builtin_cpu_supports("avx512bf16");
#endif
    return isa == PLAIN;
}

typedef struct {
    const Layout *layout;
    const Rows *rows;
    const Decode *decode;
    PassFunction pass;
    int64_t ranges, range_parts, stride, state; /* ranges of parts, floats of a head's values, of a chunk's results */
    int64_t *first;                             /* [rows + 1] the number of a row's first unit */
    atomic_int *left;                           /* [rows] units that have not ended */
    float *results;                             /* [chunks][state]: tops, sums, values */
} Work;

static int64_t chunks_of(const Work *work, int64_t row) { return (work->first[row + 1] - work->first[row]) / work->ranges; }
static float *results_of(const Work *work, int64_t row) { return work->results + work->first[row] / work->ranges * work->state; }

static int32_t begin_of(const Decode *decode, int32_t length)
{
    return decode->window > 0 && length > decode->window ? length - decode->window : 0;
}

/* The query heads before a part. */
static int64_t heads_before(const Layout *layout, int64_t part)
{
    const int64_t parts = parts_of(layout), begun = part % parts * PART;
    return part / parts * group_of(layout) + begun;
}

static void plan_ranges(Work *work)
{
    const Layout *layout = work->layout;
    const int64_t parts = (int64_t)layout->kv_heads * parts_of(layout), widest = padded(layout->key_dim) > work->stride
        ? padded(layout->key_dim) : work->stride;
    const int64_t fit = ROOM / (widest * PART);
    work->ranges = (parts + fit - 1) / fit;
    work->range_parts = (parts + work->ranges - 1) / work->ranges;
    work->ranges = (parts + work->range_parts - 1) / work->range_parts;
}

/* Adds up a row's chunks. */
static void finish(const Work *work, int64_t row)
{
    const Layout *layout = work->layout;
    const Decode *decode = work->decode;
    const int64_t chunks = chunks_of(work, row), heads = layout->q_heads;
    float *results = results_of(work, row);
    char *out = (char *)decode->out + row * decode->out_row_bytes;
    float total[ROOM / PART];
    for (int64_t h = 0; h < heads; h++) {
        float top = decode->sinks ? decode->sinks[h] * LOG2E : LOWEST, sum;
        for (int64_t c = 0; c < chunks; c++)
            top = results[c * work->state + h] > top ? results[c * work->state + h] : top;
        sum = decode->sinks ? exp2f(decode->sinks[h] * LOG2E - top) : 0;
        memset(total, 0, (size_t)work->stride * sizeof *total);
        for (int64_t c = 0; c < chunks; c++) {
            const float *chunk = results + c * work->state, *values = chunk + 2 * heads + h * work->stride;
            const float weight = exp2f(chunk[h] - top);
            sum += chunk[heads + h] * weight;
            for (int64_t i = 0; i < work->stride; i += LANES)
                v_store(total + i, v_fma(v_load(values + i), v_set(weight), v_load(total + i)));
        }
        const float share = chunks ? 1 / sum : 0;
        for (int64_t i = 0; i < work->stride; i += LANES)
            v_store(total + i, v_load(total + i) * v_set(share));
        from_floats(layout->dtype, total, out + h * decode->out_head_bytes, layout->value_dim);
    }
}

static int64_t row_of(const Work *work, int64_t unit)
{
    int64_t low = 0, high = work->rows->rows;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (work->first[middle] <= unit)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static void run_unit(void *given, int64_t unit)
{
    const Work *work = given;
    const Layout *layout = work->layout;
    const int64_t row = row_of(work, unit), inside = unit - work->first[row], chunk = inside / work->ranges;
    const int32_t length = work->rows->lengths[row], begin = begin_of(work->decode, length);
    const int64_t start = (begin / layout->chunk_tokens + chunk) * (int64_t)layout->chunk_tokens, end = start + layout->chunk_tokens;
    const int64_t part = inside % work->ranges * work->range_parts, parts = (int64_t)layout->kv_heads * parts_of(layout);
    const int64_t before = heads_before(layout, part);
    float *results = results_of(work, row) + chunk * work->state;
    const Pass pass = {
        .layout = layout, .decode = work->decode, .table = work->rows->tables[row],
        .q = (const char *)work->decode->q + row * work->decode->q_row_bytes + before * work->decode->q_head_bytes,
        .first = start < begin ? begin : (int32_t)start, .last = end < length ? (int32_t)end : length, .until = length,
        .part = (int32_t)part, .part_end = (int32_t)(part + work->range_parts < parts ? part + work->range_parts : parts),
        .top = results + before, .sum = results + layout->q_heads + before,
        .values = results + 2 * layout->q_heads + before * work->stride, .values_stride = work->stride,
    };
    work->pass(&pass);
    if (atomic_fetch_sub_explicit(&work->left[row], 1, memory_order_acq_rel) == 1)
        finish(work, row);
}

/* Floats of scratch that decode needs for these rows, whatever the window. */
EXPORTED int64_t kv_cpu_scratch(const Layout *layout, const Rows *rows)
{
    int64_t chunks = 0;
    for (int64_t row = 0; row < rows->rows; row++)
        chunks += (rows->lengths[row] + (int64_t)layout->chunk_tokens - 1) / layout->chunk_tokens;
    return 2 * (rows->rows + 1) + rows->rows + chunks * layout->q_heads * (2 + padded(layout->value_dim)) + 16;
}

/* Attention of every row over its tokens, those of `layer`. Returns 0, or -1 for an instruction set that is not here. */
EXPORTED int32_t kv_cpu_decode(const Layout *layout, const Rows *rows, const Decode *decode)
{
    int32_t isa = rows->isa;
    if (isa == ANY)
        for (isa = ISAS - 1; !kv_cpu_has(isa); isa--)
            ;
    if (isa < 0 || isa >= ISAS || !kv_cpu_has(isa))
        return -1;
    Work work = {.layout = layout, .rows = rows, .decode = decode, .pass = pass_of(isa, layout->dtype), .stride = padded(layout->value_dim)};
    plan_ranges(&work);
    work.state = layout->q_heads * (2 + work.stride);
    work.first = (int64_t *)rows->scratch;
    work.left = (atomic_int *)(work.first + rows->rows + 1);
    work.results = (float *)(work.left + rows->rows);
    int64_t units = 0, tokens = 0;
    for (int64_t row = 0; row < rows->rows; row++) {
        const int32_t length = rows->lengths[row], begin = begin_of(decode, length);
        const int64_t chunk = layout->chunk_tokens, chunks = length ? (length - 1) / chunk - begin / chunk + 1 : 0;
        work.first[row] = units;
        atomic_init(&work.left[row], (int)(chunks * work.ranges));
        units += chunks * work.ranges;
        tokens += length - begin;
    }
    work.first[rows->rows] = units;
    for (int64_t row = 0; row < rows->rows; row++)
        if (work.first[row] == work.first[row + 1])
            finish(&work, row);
    const int64_t worth = tokens * layout->kv_heads * (layout->key_token_bytes + layout->value_token_bytes) / WORTH_BYTES;
    pool_run(run_unit, &work, units, worth < rows->threads ? (int)worth : rows->threads);
    return 0;
}

/* Attention of the new tokens of one sequence. Returns 0, or -1 where this processor or this layout is not served. */
EXPORTED int32_t kv_cpu_prefill(const Layout *layout, const Prefill *prefill, int32_t threads)
{
    return kv_cpu_has(AVX512_BF16) ? avx512_bf16_prefill(layout, prefill, threads) : -1;
}

/* Copies new tokens' K and V into their slots. */
EXPORTED void kv_cpu_write(const Layout *layout, const Write *write)
{
    const int64_t item = layout->dtype == FLOAT32 ? 4 : 2, at[2] = {layout->key_at, layout->value_at};
    const int64_t head_bytes[2] = {layout->key_head_bytes, layout->value_head_bytes};
    const int64_t token_bytes[2] = {layout->key_token_bytes, layout->value_token_bytes};
    const size_t bytes[2] = {(size_t)(layout->key_dim * item), (size_t)(layout->value_dim * item)};
    for (int side = 0; side < 2; side++) {
        if (!write->source[side])
            continue;
        for (int64_t i = 0; i < write->count; i++) {
            char *to = (char *)(uintptr_t)write->slots[i] + write->layer * layout->layer_bytes + at[side] + write->places[i] * token_bytes[side];
            const char *from = (const char *)write->source[side] + i / write->inner * write->outer_bytes[side]
                + i % write->inner * write->inner_bytes[side];
            for (int64_t head = 0; head < layout->kv_heads; head++)
                memcpy(to + head * head_bytes[side], from + head * write->head_bytes[side], bytes[side]);
        }
    }
}
