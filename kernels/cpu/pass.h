/* One pass over the tokens of a row, for one dtype and one instruction set. Included once for each.
 *
 * Before: NAME(x), ITEM (the dtype in memory), ROWS(at, i) and ROWS_REST(at, i, count) (a pair of vectors of items from i on, all or
 * the first `count`), SETTLE(sums, count) (puts sums of such pairs into the items' order). For products of keys and queries: QUERY (what
 * a query is kept as), KEY, KEYS(at, i), KEYS_REST(at, i, count) (STEP items of a key), TIMES(key, query, sum), PREPARE(dtype, from, to,
 * count).
 */

#define INSIDE TARGET static inline __attribute__((always_inline))

/* Products of 4 tokens' keys with `heads` queries, as quads. Fetches the rows of `ahead` [4] into the cache meanwhile. */
INSIDE void NAME(dots)(
    const int heads, const char *const *keys, const char *const *ahead, int64_t at, const QUERY *queries, int64_t stride, int dim,
    vf (*quads)[LANES / 4])
{
    vf sums[DOTS][4];
    UNROLL
    for (int h = 0; h < heads; h++)
        UNROLL
        for (int t = 0; t < 4; t++)
            sums[h][t] = v_set(0);
    if (ahead)
        UNROLL
        for (int t = 0; t < 4; t++)
            fetch(ahead[t] + at, dim * (int)sizeof(ITEM));
    int i = 0;
    for (; i + STEP <= dim; i += STEP)
        UNROLL
        for (int t = 0; t < 4; t++) {
            const KEY key = KEYS(keys[t] + at, i);
            UNROLL
            for (int h = 0; h < heads; h++)
                sums[h][t] = TIMES(key, queries + h * stride + i, sums[h][t]);
        }
    if (i < dim)
        UNROLL
        for (int t = 0; t < 4; t++) {
            const KEY key = KEYS_REST(keys[t] + at, i, dim - i);
            UNROLL
            for (int h = 0; h < heads; h++)
                sums[h][t] = TIMES(key, queries + h * stride + i, sums[h][t]);
        }
    UNROLL
    for (int h = 0; h < heads; h++)
        quads[h][0] = v_quad(sums[h]);
}

/* Adds the tile's values, weighted, to `pairs` pairs of the sums of `heads` heads, from item i on. A `rest` ends before the pair does. */
INSIDE void NAME(add)(
    const int heads, const int pairs, const int rest, const Tile *tile, const Tile *next, int64_t at, int i, int dim, const float *weights,
    float *sums, int64_t stride)
{
    Pair held[PART][PAIRS];
    UNROLL
    for (int h = 0; h < heads; h++)
        UNROLL
        for (int p = 0; p < pairs; p++) {
            held[h][p].a = v_load(sums + h * stride + i + p * STEP);
            held[h][p].b = v_load(sums + h * stride + i + p * STEP + LANES);
        }
    for (int t = 0; t < tile->count; t++) {
        const char *row = tile->values[t] + at;
        if (next)
            fetch(next->values[t] + at, dim * (int)sizeof(ITEM));
        UNROLL
        for (int p = 0; p < pairs; p++) {
            const Pair value = rest ? ROWS_REST(row, i, dim - i) : ROWS(row, i + p * STEP);
            UNROLL
            for (int h = 0; h < heads; h++) {
                const vf weight = v_set(weights[h * TILE + t]);
                held[h][p].a = v_fma(weight, value.a, held[h][p].a);
                held[h][p].b = v_fma(weight, value.b, held[h][p].b);
            }
        }
    }
    UNROLL
    for (int h = 0; h < heads; h++)
        UNROLL
        for (int p = 0; p < pairs; p++) {
            v_store(sums + h * stride + i + p * STEP, held[h][p].a);
            v_store(sums + h * stride + i + p * STEP + LANES, held[h][p].b);
        }
}

/* One tile for the queries of one part, `heads` of them, which share a KV head. `next` is what to fetch, or NULL. */
INSIDE void NAME(part)(
    const int heads, const Pass *pass, const Tile *tile, const Tile *next, int kv_head, const QUERY *queries, int64_t stride, int first,
    float *totals)
{
    const Layout *layout = pass->layout;
    const int64_t key_at = kv_head * layout->key_head_bytes, value_at = kv_head * layout->value_head_bytes;
    float scores[PART * TILE] __attribute__((aligned(64)));
    for (int t = 0; t < tile->count; t += LANES)
        UNROLL
        for (int h = 0; h < heads; h += DOTS) {
            const int here = heads - h < DOTS ? heads - h : DOTS;
            vf quads[DOTS][LANES / 4];
            for (int q = 0; q < LANES / 4; q++)
                NAME(dots)(
                    here, tile->keys + t + 4 * q, next && !h ? next->keys + t + 4 * q : NULL, key_at, queries + h * stride, stride,
                    layout->key_dim, (vf(*)[LANES / 4]) & quads[0][q]);
            UNROLL
            for (int j = 0; j < here; j++)
                v_store(scores + (h + j) * TILE + t, v_join(quads[j]));
        }
    float *sums = pass->values + first * pass->values_stride;
    UNROLL
    for (int h = 0; h < heads; h++) {
        const float factor = soften(scores + h * TILE, tile->count, pass->decode, pass->top + first + h, totals + (first + h) * LANES);
        if (factor != 1)
            for (int64_t i = 0; i < pass->values_stride; i += LANES)
                v_store(sums + h * pass->values_stride + i, v_load(sums + h * pass->values_stride + i) * v_set(factor));
    }
    const int dim = layout->value_dim;
    int i = 0;
    for (; i + PAIRS * STEP <= dim; i += PAIRS * STEP)
        NAME(add)(heads, PAIRS, 0, tile, i ? NULL : next, value_at, i, dim, scores, sums, pass->values_stride);
    for (; i + STEP <= dim; i += STEP)
        NAME(add)(heads, 1, 0, tile, i ? NULL : next, value_at, i, dim, scores, sums, pass->values_stride);
    if (i < dim)
        NAME(add)(heads, 1, 1, tile, i ? NULL : next, value_at, i, dim, scores, sums, pass->values_stride);
}

TARGET static void NAME(pass)(const Pass *pass)
{
    const Layout *layout = pass->layout;
    const int group = group_of(layout), parts = parts_of(layout);
    const int64_t stride = padded(layout->key_dim);
    QUERY queries[ROOM] __attribute__((aligned(64)));
    float totals[ROOM / PAD * LANES] __attribute__((aligned(64))); /* for each query head, the weights' sums */
    const int heads = start(pass);
    memset(totals, 0, (size_t)(heads * LANES) * sizeof *totals);
    memset(queries, 0, (size_t)(heads * stride) * sizeof *queries);
    for (int h = 0; h < heads; h++)
        PREPARE(layout->dtype, pass->q + h * pass->decode->q_head_bytes, queries + h * stride, layout->key_dim);
    Tile tiles[2], *tile = tiles, *next = tiles + 1;
    locate(pass, pass->first, pass->last, tile);
    while (tile->count) {
        locate(pass, tile->first + tile->count, pass->until, next);
        int first = 0;
        for (int p = pass->part; p < pass->part_end; p++) {
            const int begun = p % parts * PART, here = group - begun < PART ? group - begun : PART;
            const QUERY *own = queries + first * stride;
            const Tile *ahead = next->count && (begun == 0 || p == pass->part) ? next : NULL;
            switch (here) {
            case 1: NAME(part)(1, pass, tile, ahead, p / parts, own, stride, first, totals); break;
            case 2: NAME(part)(2, pass, tile, ahead, p / parts, own, stride, first, totals); break;
            case 3: NAME(part)(3, pass, tile, ahead, p / parts, own, stride, first, totals); break;
            default: NAME(part)(4, pass, tile, ahead, p / parts, own, stride, first, totals);
            }
            first += here;
        }
        if (next->first >= pass->last)
            break;
        if (next->first + next->count > pass->last)
            locate(pass, next->first, pass->last, next);
        Tile *swap = tile;
        tile = next, next = swap;
    }
    for (int h = 0; h < heads; h++) {
        pass->sum[h] = v_sum(v_load(totals + h * LANES));
        SETTLE(pass->values + h * pass->values_stride, pass->values_stride);
    }
}

#undef NAME
#undef ITEM
#undef ROWS
#undef ROWS_REST
#undef SETTLE
#undef QUERY
#undef KEY
#undef KEYS
#undef KEYS_REST
#undef TIMES
#undef PREPARE
#undef INSIDE
