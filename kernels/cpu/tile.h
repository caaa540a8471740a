/* A tile: up to TILE tokens of a row, and where the first KV head's key and value of each lie. */

#include <stddef.h>
#include <string.h>

typedef struct {
    int32_t first, count;
    const char *keys[TILE], *values[TILE];
} Tile;

/* Find the tokens from `first` to before `last`, as many as there is room for. Places behind the last one repeat it. */
TARGET static void locate(const Pass *pass, int32_t first, int32_t last, Tile *tile)
{
    const Layout *layout = pass->layout;
    const int32_t count = last - first < TILE ? last - first : TILE;
    tile->first = first;
    tile->count = count > 0 ? count : 0;
    if (count <= 0)
        return;
    int32_t block = first / layout->block_tokens, place = first % layout->block_tokens;
    const int64_t layer_at = pass->decode->layer * layout->layer_bytes;
    for (int32_t t = 0; t < count; block++, place = 0) {
        const char *base = (const char *)(uintptr_t)pass->table[block] + layer_at;
        const char *key = base + layout->key_at + place * layout->key_token_bytes;
        const char *value = base + layout->value_at + place * layout->value_token_bytes;
        for (; place < layout->block_tokens && t < count; place++, t++) {
            tile->keys[t] = key;
            tile->values[t] = value;
            key += layout->key_token_bytes;
            value += layout->value_token_bytes;
        }
    }
    for (int32_t t = count; t < TILE; t++) {
        tile->keys[t] = tile->keys[count - 1];
        tile->values[t] = tile->values[count - 1];
    }
}

/* Bring a row into the second-level cache, from where it is used one tile later. Into the first level, calls take twice as long. */
TARGET static inline void fetch(const char *row, int bytes)
{
    for (int i = 0; i < bytes; i += 64)
        __builtin_prefetch(row + i, 0, 2);
}

/* Clears the results of a pass; returns how many query heads it has. */
TARGET static int start(const Pass *pass)
{
    const Layout *layout = pass->layout;
    const int group = group_of(layout), parts = parts_of(layout);
    int heads = 0;
    for (int p = pass->part; p < pass->part_end; p++)
        heads += group - p % parts * PART < PART ? group - p % parts * PART : PART;
    for (int h = 0; h < heads; h++) {
        pass->top[h] = LOWEST;
        pass->sum[h] = 0;
    }
    memset(pass->values, 0, (size_t)(heads * pass->values_stride) * sizeof(float));
    return heads;
}
