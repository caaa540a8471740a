/* One pass over the tokens of a row, for one dtype and one instruction set. Included once for each.
 *
 * Before: NAME(x), ITEM (the dtype in memory), ROW(at, i) (LANES of them as floats, from item i on). For products of keys and queries:
 * QUERY (what a query is kept as), STEP (how many of them at once), KEY (that many), KEYS(at, i), TIMES(key, query, sum),
 * PREPARE(dtype, from, to, count).
 */

/* Fewer items than a vector has, the rest zeros: nothing is read behind a row. */
TARGET static inline void NAME(copy_part)(ITEM *to, const void *row, int64_t i, int count)
{
    memset(to, 0, PAD * sizeof(ITEM));
    memcpy(to, (const ITEM *)row + i, (size_t)count * sizeof(ITEM));
}

/* Scores of 4 tokens for `heads` queries: scores[head * TILE + token]. Fetches the rows of `ahead` [4] into the cache meanwhile. */
TARGET static inline __attribute__((always_inline)) void NAME(dots)(
    const int heads, const char *const *keys, const char *const *ahead, int64_t at, const QUERY *queries, int64_t stride, int dim, float *scores)
{
    vf sums[DOTS][4];
    for (int h = 0; h < heads; h++)
        for (int t = 0; t < 4; t++)
            sums[h][t] = v_set(0);
    if (ahead)
        for (int t = 0; t < 4; t++)
            fetch(ahead[t] + at, dim * (int)sizeof(ITEM));
    int i = 0;
    for (; i + STEP <= dim; i += STEP)
        for (int t = 0; t < 4; t++) {
            const KEY key = KEYS(keys[t] + at, i);
            for (int h = 0; h < heads; h++)
                sums[h][t] = TIMES(key, queries + h * stride + i, sums[h][t]);
        }
    if (i < dim)
        for (int t = 0; t < 4; t++) {
            ITEM part[PAD];
            NAME(copy_part)(part, keys[t] + at, i, dim - i);
            const KEY key = KEYS(part, 0);
            for (int h = 0; h < heads; h++)
                sums[h][t] = TIMES(key, queries + h * stride + i, sums[h][t]);
        }
    for (int h = 0; h < heads; h++)
        v_sums(sums[h], scores + h * TILE);
}

/* Adds `count` tokens' values, weighted, to `vectors` vectors of the sums of `heads` heads, from item i on. */
TARGET static inline __attribute__((always_inline)) void NAME(add)(
    const int heads, const int vectors, const char *const *values, const char *const *ahead, int64_t at, int i, int dim, int count,
    const float *weights, float *sums, int64_t stride)
{
    vf held[PART][VECTORS];
    for (int h = 0; h < heads; h++)
        for (int v = 0; v < vectors; v++)
            held[h][v] = v_load(sums + h * stride + i + v * LANES);
    for (int t = 0; t < count; t++) {
        const char *row = values[t] + at;
        int from = i;
        ITEM part[PAD];
        if (ahead)
            fetch(ahead[t] + at, dim * (int)sizeof(ITEM));
        if (vectors == 1 && i + LANES > dim) {
            NAME(copy_part)(part, row, i, dim - i);
            row = (const char *)part;
            from = 0;
        }
        for (int v = 0; v < vectors; v++) {
            const vf value = ROW(row, from + v * LANES);
            for (int h = 0; h < heads; h++)
                held[h][v] = v_fma(v_set(weights[h * TILE + t]), value, held[h][v]);
        }
    }
    for (int h = 0; h < heads; h++)
        for (int v = 0; v < vectors; v++)
            v_store(sums + h * stride + i + v * LANES, held[h][v]);
}

/* One tile for the queries of one part, `heads` of them, which share a KV head. */
TARGET static inline __attribute__((always_inline)) void NAME(part)(
    const int heads, const Pass *pass, const Tile *tile, const Tile *next, int kv_head, const QUERY *queries, int64_t stride, int first)
{
    const Layout *layout = pass->layout;
    const int64_t key_at = kv_head * layout->key_head_bytes, value_at = kv_head * layout->value_head_bytes;
    float scores[PART * TILE] __attribute__((aligned(64)));
    for (int t = 0; t < tile->count; t += 4)
        for (int h = 0; h < heads; h += DOTS)
            NAME(dots)(
                heads - h < DOTS ? heads - h : DOTS, tile->keys + t, next && !h ? next->keys + t : NULL, key_at, queries + h * stride,
                stride, layout->key_dim, scores + h * TILE + t);
    float *sums = pass->values + first * pass->values_stride;
    for (int h = 0; h < heads; h++) {
        const float factor = soften(scores + h * TILE, tile->count, pass->decode, pass->top + first + h, pass->sum + first + h);
        if (factor != 1)
            for (int64_t i = 0; i < pass->values_stride; i += LANES)
                v_store(sums + h * pass->values_stride + i, v_load(sums + h * pass->values_stride + i) * v_set(factor));
    }
    const int dim = layout->value_dim;
    int i = 0;
    for (; i + VECTORS * LANES <= dim; i += VECTORS * LANES)
        NAME(add)(
            heads, VECTORS, tile->values, next && !i ? next->values : NULL, value_at, i, dim, tile->count, scores, sums,
            pass->values_stride);
    for (; i < dim; i += LANES)
        NAME(add)(
            heads, 1, tile->values, next && !i ? next->values : NULL, value_at, i, dim, tile->count, scores, sums, pass->values_stride);
}

TARGET static void NAME(pass)(const Pass *pass)
{
    const Layout *layout = pass->layout;
    const int group = group_of(layout), parts = parts_of(layout);
    const int64_t stride = padded(layout->key_dim);
    QUERY queries[ROOM] __attribute__((aligned(64)));
    const int heads = start(pass);
    for (int h = 0; h < heads; h++) {
        memset(queries + h * stride, 0, (size_t)stride * sizeof(QUERY));
        PREPARE(layout->dtype, pass->q + h * pass->decode->q_head_bytes, queries + h * stride, layout->key_dim);
    }
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
            case 1: NAME(part)(1, pass, tile, ahead, p / parts, own, stride, first); break;
            case 2: NAME(part)(2, pass, tile, ahead, p / parts, own, stride, first); break;
            case 3: NAME(part)(3, pass, tile, ahead, p / parts, own, stride, first); break;
            default: NAME(part)(4, pass, tile, ahead, p / parts, own, stride, first);
            }
            first += here;
        }
        if (next->first >= pass->last)
            break;
        if (next->first + next->count > pass->last)
            next->count = pass->last - next->first;
        Tile *swap = tile;
        tile = next, next = swap;
    }
}

#undef NAME
#undef ITEM
#undef ROW
#undef QUERY
#undef STEP
#undef KEY
#undef KEYS
#undef TIMES
#undef PREPARE
