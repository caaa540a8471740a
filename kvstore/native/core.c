/* The index's inner loops: finding, adding and dropping rows. The arrays are numpy's, and belong to kvstore/cache/index.py.
 *
 * A plain C library: nothing of Python's is used, so it needs no header of it and serves every version. Called with the interpreter's
 * lock held. Row 0 and slot 0 mean "none".
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Rises whenever something here or in the files beside it changes: an installation may have kept the library of an earlier version. As in library.py. */
int32_t kvstore_version(void)
{
    return 5;
}

#define MAX_TIERS 4
#define AHEAD 32 /* keys whose memory is fetched before any of them is looked at: enough to hide a cache miss */
#define SPREAD 0x9E3779B97F4A7C15u /* 2^64 / golden ratio, as in index.py */

typedef struct {
    int32_t *table;
    uint64_t *hash; /* [rows][4] */
    int32_t *namespace_of;
    int32_t *parent, *first_child, *next_sibling, *previous_sibling;
    uint8_t *flags;
    int32_t *slot[MAX_TIERS];
    int32_t *freed;
    uint64_t mix, mask;
    int32_t shift, tiers;
    uint8_t in_flight; /* a flag: such a row stays */
} Index;

static uint64_t home_of(const Index *ix, int32_t namespace_id, uint64_t word)
{
    return ((word ^ (uint64_t)namespace_id * SPREAD) * ix->mix) >> ix->shift;
}

static int is_key(const Index *ix, int32_t row, int32_t namespace_id, const uint64_t *key)
{
    const uint64_t *at = ix->hash + 4 * (size_t)row;
    return ix->namespace_of[row] == namespace_id && at[0] == key[0] && at[1] == key[1] && at[2] == key[2] && at[3] == key[3];
}

/* found[i] becomes the row of keys[i], 0 where unknown. */
void kvstore_find(const Index *ix, int32_t namespace_id, const uint64_t *keys, int64_t count, int32_t *found)
{
    uint64_t home[AHEAD];
    for (int64_t start = 0; start < count; start += AHEAD) {
        const int64_t here = count - start < AHEAD ? count - start : AHEAD;
        for (int64_t i = 0; i < here; i++) {
            home[i] = home_of(ix, namespace_id, keys[4 * (start + i)]);
            __builtin_prefetch(ix->table + home[i]);
        }
        for (int64_t i = 0; i < here; i++) {
            const int32_t row = ix->table[home[i]];
            __builtin_prefetch(ix->hash + 4 * (size_t)row);
            __builtin_prefetch(ix->namespace_of + row);
        }
        for (int64_t i = 0; i < here; i++) {
            uint64_t at = home[i];
            int32_t row;
            while ((row = ix->table[at]) != 0 && !is_key(ix, row, namespace_id, keys + 4 * (start + i)))
                at = (at + 1) & ix->mask;
            found[start + i] = row;
        }
    }
}

/* Enter rows, whose hash and namespace are set and which are not in the table yet. */
void kvstore_enter(const Index *ix, const int32_t *rows, int64_t count)
{
    uint64_t home[AHEAD];
    for (int64_t start = 0; start < count; start += AHEAD) {
        const int64_t here = count - start < AHEAD ? count - start : AHEAD;
        for (int64_t i = 0; i < here; i++) {
            const int32_t row = rows[start + i];
            home[i] = home_of(ix, ix->namespace_of[row], ix->hash[4 * (size_t)row]);
            __builtin_prefetch(ix->table + home[i], 1);
        }
        for (int64_t i = 0; i < here; i++) {
            uint64_t at = home[i];
            while (ix->table[at] != 0)
                at = (at + 1) & ix->mask;
            ix->table[at] = rows[start + i];
        }
    }
}

static void leave_table(const Index *ix, int32_t row)
{
    uint64_t gap = home_of(ix, ix->namespace_of[row], ix->hash[4 * (size_t)row]), at;
    while (ix->table[gap] != row)
        gap = (gap + 1) & ix->mask;
    for (at = (gap + 1) & ix->mask; ix->table[at] != 0; at = (at + 1) & ix->mask) {
        const int32_t other = ix->table[at];
        const uint64_t home = home_of(ix, ix->namespace_of[other], ix->hash[4 * (size_t)other]);
        /* A row may move back into the gap if its home is not between the gap and where it is. */
        if (((at - home) & ix->mask) >= ((at - gap) & ix->mask)) {
            ix->table[gap] = other;
            gap = at;
        }
    }
    ix->table[gap] = 0;
}

static void unlink_row(const Index *ix, int32_t row)
{
    const int32_t parent = ix->parent[row], after = ix->next_sibling[row], before = ix->previous_sibling[row];
    if (before)
        ix->next_sibling[before] = after;
    else
        ix->first_child[parent] = after;
    if (after)
        ix->previous_sibling[after] = before;
    ix->parent[row] = 0;
}

static int is_empty(const Index *ix, int32_t row)
{
    if (ix->first_child[row] || (ix->flags[row] & ix->in_flight))
        return 0;
    for (int32_t tier = 0; tier < ix->tiers; tier++)
        if (ix->slot[tier][row])
            return 0;
    return 1;
}

/* Forget those of the rows, in this order, that have no bytes, no writer and no children; each time their parents likewise.
 * Rows that were forgotten before are passed over. Answers the new length of `freed`. */
int32_t kvstore_drop_empty(const Index *ix, const int32_t *rows, int64_t count, int32_t freed_count)
{
    for (int64_t i = 0; i < count; i++) {
        int32_t row = rows[i];
        if (i + 8 < count) {
            const int32_t later = rows[i + 8];
            __builtin_prefetch(ix->table + home_of(ix, ix->namespace_of[later], ix->hash[4 * (size_t)later]), 1);
        }
        while (row && ix->namespace_of[row] && is_empty(ix, row)) {
            const int32_t parent = ix->parent[row];
            if (parent)
                unlink_row(ix, row);
            leave_table(ix, row);
            ix->namespace_of[row] = 0;
            ix->flags[row] = 0;
            ix->freed[freed_count++] = row;
            row = parent;
        }
    }
    return freed_count;
}

#define RECORD_WORDS 16 /* of 8 bytes; the last is the check */

static uint64_t mixed(uint64_t word)
{
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u; /* SplitMix64's finaliser, as in tiers/record_codec.py */
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
    return word ^ (word >> 31);
}

/* checks[i] becomes what the last word of record i must be. */
void kvstore_record_checks(const uint64_t *records, int64_t count, uint64_t *checks)
{
    for (int64_t i = 0; i < count; i++) {
        const uint64_t *words = records + RECORD_WORDS * i;
        uint64_t sum = 0;
        for (uint64_t place = 1; place < RECORD_WORDS; place++)
            sum += mixed(words[place - 1] + place * SPREAD);
        checks[i] = mixed(sum);
    }
}

/* Enter words into a table of mask + 1 places, at most half full, of which zeros are empty. first[i] says whether a word was not there
 * before. `seed` is secret: words may come from clients. Answers how many were new. */
int64_t kvstore_note_words(const uint64_t *words, int64_t count, uint64_t *table, uint64_t mask, uint64_t seed, uint8_t *first)
{
    uint64_t home[AHEAD];
    int64_t added = 0;
    for (int64_t start = 0; start < count; start += AHEAD) {
        const int64_t here = count - start < AHEAD ? count - start : AHEAD;
        for (int64_t i = 0; i < here; i++) {
            home[i] = mixed(words[start + i] ^ seed) & mask;
            __builtin_prefetch(table + home[i], 1);
        }
        for (int64_t i = 0; i < here; i++) {
            const uint64_t word = words[start + i] ? words[start + i] : seed; /* none is 0 in the table */
            uint64_t at = home[i];
            while (table[at] != 0 && table[at] != word)
                at = (at + 1) & mask;
            first[start + i] = table[at] == 0;
            added += table[at] == 0;
            table[at] = word;
        }
    }
    return added;
}

typedef struct { /* as in tiers/record_codec.py */
    uint32_t magic, state, namespace_number, slot_units;
    uint64_t hash[4], parent[4];
    uint32_t units, generation;
    uint64_t block_bytes, checksum[2], sequence, check;
} Record;

/* The fields of those records that `order` names, each into an array of its own. */
void kvstore_take_records(
    const Record *records, const int64_t *order, int64_t count, uint32_t *namespaces, uint64_t *hashes, uint64_t *parents, uint32_t *units,
    uint32_t *generations, uint64_t *block_bytes, uint64_t *checksums)
{
    for (int64_t i = 0; i < count; i++) {
        const Record *record = records + order[i];
        if (i + 8 < count) {
            __builtin_prefetch(records + order[i + 8]);
            __builtin_prefetch((const char *)(records + order[i + 8]) + 64);
        }
        namespaces[i] = record->namespace_number;
        memcpy(hashes + 4 * i, record->hash, sizeof record->hash);
        memcpy(parents + 4 * i, record->parent, sizeof record->parent);
        units[i] = record->units;
        generations[i] = record->generation;
        block_bytes[i] = record->block_bytes;
        memcpy(checksums + 2 * i, record->checksum, sizeof record->checksum);
    }
}
