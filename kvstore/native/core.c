/* The index's inner loops: finding, adding and dropping rows, and publishing blocks. The arrays are numpy's, and belong to
 * kvstore/cache/index.py and kvstore/cache/slots.py.
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
    return 8;
}

#define MAX_TIERS 4
#define SEEN 0x80u /* a flag that no row has but inside one call */
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
    uint8_t codes[MAX_TIERS]; /* what the tiers are called, the fastest first */
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

/* found[i] becomes the row of keys[i], 0 where unknown; of AHEAD keys at most. */
static void find_some(const Index *ix, int32_t namespace_id, const uint64_t *keys, int64_t count, int32_t *found)
{
    uint64_t home[AHEAD];
    for (int64_t i = 0; i < count; i++) {
        home[i] = home_of(ix, namespace_id, keys[4 * i]);
        __builtin_prefetch(ix->table + home[i]);
    }
    for (int64_t i = 0; i < count; i++) {
        const int32_t row = ix->table[home[i]];
        __builtin_prefetch(ix->hash + 4 * (size_t)row);
        __builtin_prefetch(ix->namespace_of + row);
        __builtin_prefetch(ix->slot[0] + row);
    }
    for (int64_t i = 0; i < count; i++) {
        uint64_t at = home[i];
        int32_t row;
        while ((row = ix->table[at]) != 0 && !is_key(ix, row, namespace_id, keys + 4 * i))
            at = (at + 1) & ix->mask;
        found[i] = row;
    }
}

/* The same of any number. */
void kvstore_find(const Index *ix, int32_t namespace_id, const uint64_t *keys, int64_t count, int32_t *found)
{
    for (int64_t start = 0; start < count; start += AHEAD)
        find_some(ix, namespace_id, keys + 4 * start, count - start < AHEAD ? count - start : AHEAD, found + start);
}

/* Answers how many leading keys have bytes in a tier; codes[i] becomes what the fastest one is called. */
int64_t kvstore_leading(const Index *ix, int32_t namespace_id, const uint64_t *keys, int64_t count, uint8_t *codes)
{
    int32_t rows[AHEAD];
    for (int64_t start = 0; start < count; start += AHEAD) {
        const int64_t here = count - start < AHEAD ? count - start : AHEAD;
        find_some(ix, namespace_id, keys + 4 * start, here, rows);
        for (int64_t i = 0; i < here; i++) {
            int32_t tier = 0;
            while (tier < ix->tiers && !(rows[i] && ix->slot[tier][rows[i]]))
                tier++;
            if (tier == ix->tiers)
                return start + i;
            codes[start + i] = ix->codes[tier];
        }
    }
    return count;
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

/* ---- publishing blocks */

typedef struct { /* a tier: what the index has of it by row, and its slots */
    int32_t *slot_of, *children;
    int32_t *row, *holds;
    const uint32_t *generation;
    uint8_t *state;
    const int16_t *transfers;
    const int32_t *extent_slot_units, *extent_first;
    uint32_t extent_units, extent_count;
    uint8_t reserved, live;
} Tier;

/* The reserved slot of this size that begins at a unit, in this tenure; 0 where there is none. */
static int32_t reserved_at(const Tier *tier, uint32_t unit, uint32_t generation, uint32_t slot_units)
{
    const uint32_t extent = unit / tier->extent_units, within = unit % tier->extent_units;
    if (extent >= tier->extent_count || (uint32_t)tier->extent_slot_units[extent] != slot_units)
        return 0;
    if (within % slot_units || within + slot_units > tier->extent_units)
        return 0;
    const int32_t slot = tier->extent_first[extent] + (int32_t)(within / slot_units);
    return tier->generation[slot] == generation && tier->state[slot] == tier->reserved ? slot : 0;
}

static void link_row(const Index *ix, int32_t row, int32_t parent)
{
    const int32_t head = ix->first_child[parent];
    ix->parent[row] = parent;
    ix->next_sibling[row] = head;
    ix->previous_sibling[row] = 0;
    if (head)
        ix->previous_sibling[head] = row;
    ix->first_child[parent] = row;
}

static void publish(const Index *ix, const Tier *tier, int32_t row, int32_t slot)
{
    tier->slot_of[row] = slot;
    tier->children[ix->parent[row]]++;
    tier->row[slot] = row;
    tier->holds[slot]++; /* held before, as reserved, and held now */
    tier->state[slot] = tier->live;
}

/* Whether blocks are new, below known parents, and in anonymous reserved slots. slots[i] and above[i] become what they are to be in and
 * below. Whether a key or a slot is named twice is not looked at. */
int32_t kvstore_look_each(
    const Index *ix, const Tier *tier, int32_t namespace_id, uint32_t slot_units, const uint64_t *keys, const uint64_t *parents,
    const uint32_t *units, const uint32_t *generations, int64_t count, int32_t *slots, int32_t *above)
{
    kvstore_find(ix, namespace_id, keys, count, slots);
    kvstore_find(ix, namespace_id, parents, count, above);
    for (int64_t i = 0; i < count; i++) {
        if (slots[i] || !above[i])
            return 0;
        slots[i] = reserved_at(tier, units[i], generations[i], slot_units);
        if (!slots[i] || tier->row[slots[i]])
            return 0;
    }
    return 1;
}

/* After it: rows, which nothing uses, are the blocks' from now on. */
void kvstore_publish_each(
    const Index *ix, const Tier *tier, int32_t namespace_id, const uint64_t *keys, int64_t count, const int32_t *rows, const int32_t *slots,
    const int32_t *above)
{
    for (int64_t i = 0; i < count; i++) {
        memcpy(ix->hash + 4 * (size_t)rows[i], keys + 4 * i, 4 * sizeof *keys);
        ix->namespace_of[rows[i]] = namespace_id;
    }
    kvstore_enter(ix, rows, count);
    for (int64_t i = 0; i < count; i++) {
        link_row(ix, rows[i], above[i]);
        publish(ix, tier, rows[i], slots[i]);
    }
}

/* Whether the blocks of a chain are those that distinct reserved slots were reserved for by name, none of them linked to others yet, and
 * the hash before the first none of theirs; and whether one session has them all: `counts` says how often it holds each slot, and one that
 * is reserved counts for nobody else. slots[i] and rows[i] become theirs. */
int32_t kvstore_look_chain(
    const Index *ix, const Tier *tier, int32_t namespace_id, uint32_t slot_units, const uint64_t *keys, const uint64_t *before,
    const uint32_t *units, const uint32_t *generations, const uint16_t *counts, int64_t count, int32_t *slots, int32_t *rows)
{
    int64_t marked = 0;
    kvstore_find(ix, namespace_id, keys, count, rows);
    for (; marked < count; marked++) {
        const int32_t row = rows[marked], slot = reserved_at(tier, units[marked], generations[marked], slot_units);
        if (!row || !slot || !counts[slot] || tier->row[slot] != row || ix->parent[row] || ix->first_child[row])
            break;
        if (!(ix->flags[row] & ix->in_flight) || !memcmp(keys + 4 * marked, before, 4 * sizeof *keys))
            break;
        ix->flags[row] &= (uint8_t)~ix->in_flight; /* so that one that comes again is seen */
        slots[marked] = slot;
    }
    for (int64_t i = 0; i < marked; i++)
        ix->flags[rows[i]] |= ix->in_flight;
    return marked == count;
}

/* After it: the blocks are there from now on, below the row above. `clears` are flags that they lose. */
void kvstore_publish_chain(
    const Index *ix, const Tier *tier, uint8_t clears, int64_t count, const int32_t *rows, const int32_t *slots, int32_t above)
{
    for (int64_t i = 0; i < count; i++) {
        ix->flags[rows[i]] &= (uint8_t)~clears;
        link_row(ix, rows[i], i ? rows[i - 1] : above);
        publish(ix, tier, rows[i], slots[i]);
    }
}

/* ---- leases */

/* Whether all blocks of a chain are in slots of a tier, each named once, none of which a session holds `most` times. slots[i] and rows[i]
 * become theirs; sums[0] how many of them the session does not hold yet, sums[1] how many nobody does. */
int32_t kvstore_look_ready(
    const Index *ix, const Tier *tier, int32_t namespace_id, const uint64_t *keys, const uint16_t *counts, int32_t most, int64_t count,
    int32_t *slots, int32_t *rows, int64_t *sums)
{
    int64_t marked = 0;
    sums[0] = sums[1] = 0;
    for (; marked < count; marked++) {
        if (marked % AHEAD == 0) /* no further than it reaches */
            find_some(ix, namespace_id, keys + 4 * marked, count - marked < AHEAD ? count - marked : AHEAD, rows + marked);
        const int32_t row = rows[marked], slot = tier->slot_of[row];
        if (!row || !slot || (ix->flags[row] & SEEN) || counts[slot] >= most)
            break;
        ix->flags[row] |= SEEN;
        slots[marked] = slot;
        sums[0] += counts[slot] == 0;
        sums[1] += tier->holds[slot] == 0 && tier->transfers[slot] == 0;
    }
    for (int64_t i = 0; i < marked; i++)
        ix->flags[rows[i]] &= (uint8_t)~SEEN;
    return marked == count;
}

/* After it: the session holds them once more. generations[i] become theirs; `turned` those that it did not hold before. Answers how many
 * these are. */
int64_t kvstore_hold(
    const Tier *tier, uint16_t *counts, const int32_t *slots, int64_t count, uint32_t *generations, int32_t *turned)
{
    int64_t first = 0;
    for (int64_t i = 0; i < count; i++) {
        const int32_t slot = slots[i];
        generations[i] = tier->generation[slot];
        tier->holds[slot]++;
        turned[first] = slot;
        first += counts[slot]++ == 0;
    }
    return first;
}

/* Set or clear the bits of these numbers. */
void kvstore_mark(uint8_t *bits, const uint32_t *numbers, int64_t count, int32_t on)
{
    for (int64_t i = 0; i < count; i++) {
        const uint8_t bit = (uint8_t)(1u << (numbers[i] & 7));
        bits[numbers[i] >> 3] = on ? bits[numbers[i] >> 3] | bit : bits[numbers[i] >> 3] & (uint8_t)~bit;
    }
}
