/* Loops over many records of a disk, and over words seen so far. The arrays are numpy's, and belong to tiers/record_codec.py and
 * kvstore/native/records.py.
 *
 * Plain C, as core.c; called with the interpreter's lock held.
 */

#include <stdint.h>
#include <string.h>

#define AHEAD 32 /* words whose memory is fetched before any of them is looked at: enough to hide a cache miss */
#define SPREAD 0x9E3779B97F4A7C15u /* 2^64 / golden ratio, as in record_codec.py */
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
