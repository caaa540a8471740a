/* The chain of block hashes: SHA-256 (FIPS 180-4) of parent ‖ LE32(n) ‖ tokens ‖ extra, block after block; see kvstore/hashing.py.
 *
 * As core.c a plain C library. Each hash needs the one before it, so nothing here runs side by side: what counts is the time of one
 * compression, for which processors of x86 have instructions. Whether this one has them is asked at run time.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define X86 1
#include <cpuid.h>
#include <immintrin.h>
#endif

#define STEP 64 /* bytes that one compression takes in */
#define HASH 32 /* bytes of a hash */

typedef void (*Compress)(uint32_t state[8], const uint8_t *data, size_t steps);

static const uint32_t START[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

static const uint32_t K[64] __attribute__((aligned(16))) = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
    0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
    0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
    0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
    0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
    0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t turned(uint32_t word, int by)
{
    return (word >> by) | (word << (32 - by));
}

static uint32_t read_word(const uint8_t *at)
{
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static void write_word(uint8_t *at, uint32_t word)
{
    for (int i = 0; i < 4; i++)
        at[i] = (uint8_t)(word >> (24 - 8 * i));
}

static void compress_plainly(uint32_t state[8], const uint8_t *data, size_t steps)
{
    for (; steps; steps--, data += STEP) {
        uint32_t w[64], s[8];
        for (int t = 0; t < 16; t++)
            w[t] = read_word(data + 4 * t);
        for (int t = 16; t < 64; t++) {
            const uint32_t early = turned(w[t - 15], 7) ^ turned(w[t - 15], 18) ^ (w[t - 15] >> 3);
            const uint32_t late = turned(w[t - 2], 17) ^ turned(w[t - 2], 19) ^ (w[t - 2] >> 10);
            w[t] = w[t - 16] + early + w[t - 7] + late;
        }
        memcpy(s, state, sizeof s);
        for (int t = 0; t < 64; t++) {
            const uint32_t choice = (s[4] & s[5]) ^ (~s[4] & s[6]), most = (s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]);
            const uint32_t one = s[7] + (turned(s[4], 6) ^ turned(s[4], 11) ^ turned(s[4], 25)) + choice + K[t] + w[t];
            const uint32_t two = (turned(s[0], 2) ^ turned(s[0], 13) ^ turned(s[0], 22)) + most;
            memmove(s + 1, s, 7 * sizeof *s);
            s[4] += one;
            s[0] = one + two;
        }
        for (int i = 0; i < 8; i++)
            state[i] += s[i];
    }
}

#ifdef X86
/* The instructions keep the state as (a, b, e, f) and (c, d, g, h), and do two rounds at a time; a word w[t] is made four at a time. */
__attribute__((target("sha,sse4.1,ssse3"))) static void compress_by_instructions(uint32_t state[8], const uint8_t *data, size_t steps)
{
    const __m128i swap = _mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3);
    __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)state), 0xB1);
    __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(state + 4)), 0x1B);
    __m128i abef = _mm_alignr_epi8(cdab, efgh, 8), cdgh = _mm_blend_epi16(efgh, cdab, 0xF0);
    for (; steps; steps--, data += STEP) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i w[4];
#pragma GCC unroll 16
        for (int t = 0; t < 16; t++) {
            __m128i *now = w + t % 4;
            if (t < 4) {
                *now = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(data + 16 * t)), swap);
            } else {
                const __m128i last = w[(t + 3) % 4];
                const __m128i sevenths = _mm_alignr_epi8(last, w[(t + 2) % 4], 4);
                *now = _mm_sha256msg2_epu32(_mm_add_epi32(_mm_sha256msg1_epu32(*now, w[(t + 1) % 4]), sevenths), last);
            }
            const __m128i sum = _mm_add_epi32(*now, _mm_load_si128((const __m128i *)(K + 4 * t)));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0E));
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    const __m128i feba = _mm_shuffle_epi32(abef, 0x1B), dchg = _mm_shuffle_epi32(cdgh, 0xB1);
    _mm_storeu_si128((__m128i *)state, _mm_blend_epi16(feba, dchg, 0xF0));
    _mm_storeu_si128((__m128i *)(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

static int has_instructions(void)
{
    static int known = -1; /* asked once: on a virtual machine each question leaves it */
    unsigned a, b, c, d;
    if (known < 0)
        known = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_SSSE3) && (c & bit_SSE4_1)
                && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & (1u << 29)); /* SHA */
    return known;
}
#else
#define compress_by_instructions compress_plainly
static int has_instructions(void)
{
    return 0;
}
#endif

/* Whether this processor has instructions for SHA-256. */
int32_t kvstore_sha256_instructions(void)
{
    return has_instructions();
}

typedef struct {
    uint32_t state[8];
    uint8_t rest[STEP]; /* bytes that do not fill a step yet */
    uint64_t bytes;     /* taken in so far */
    Compress compress;
} Sha256;

static void take(Sha256 *sha, const uint8_t *data, uint64_t bytes)
{
    const size_t kept = sha->bytes % STEP;
    sha->bytes += bytes;
    if (kept) {
        const size_t missing = STEP - kept, now = bytes < missing ? (size_t)bytes : missing;
        memcpy(sha->rest + kept, data, now);
        if (now < missing)
            return;
        sha->compress(sha->state, sha->rest, 1);
        data += now;
        bytes -= now;
    }
    if (bytes >= STEP)
        sha->compress(sha->state, data, (size_t)(bytes / STEP));
    if (bytes % STEP)
        memcpy(sha->rest, data + bytes - bytes % STEP, (size_t)(bytes % STEP));
}

static void finish(Sha256 *sha, uint8_t *hash)
{
    const uint64_t bits = 8 * sha->bytes;
    uint8_t end[2 * STEP] = {0x80};
    const size_t kept = sha->bytes % STEP, size = (kept < STEP - 8 ? STEP : 2 * STEP) - kept;
    write_word(end + size - 8, (uint32_t)(bits >> 32));
    write_word(end + size - 4, (uint32_t)bits);
    take(sha, end, size);
    for (int i = 0; i < 8; i++)
        write_word(hash + 4 * i, sha->state[i]);
}

/* hashes [blocks][32]: each block's hash under the one before, the first under `root`.
 * tokens [blocks][4 * block_tokens] bytes; extras: the bytes of block i lie from starts[i] to starts[i + 1], starts is null where no
 * block has any. With `plain` the processor's instructions are left unused. */
void kvstore_chain(
    const uint8_t *root, const uint8_t *tokens, int64_t blocks, uint32_t block_tokens, const uint8_t *extras, const int64_t *starts,
    int32_t plain, uint8_t *hashes)
{
    const Compress compress = has_instructions() && !plain ? compress_by_instructions : compress_plainly;
    const uint64_t block_bytes = 4 * (uint64_t)block_tokens;
    for (int64_t block = 0; block < blocks; block++) {
        Sha256 sha = {.compress = compress};
        uint8_t head[HASH + 4];
        memcpy(sha.state, START, sizeof START);
        memcpy(head, block ? hashes + HASH * (block - 1) : root, HASH);
        for (int i = 0; i < 4; i++)
            head[HASH + i] = (uint8_t)(block_tokens >> 8 * i);
        take(&sha, head, sizeof head);
        take(&sha, tokens + block_bytes * (uint64_t)block, block_bytes);
        if (starts)
            take(&sha, extras + starts[block], (uint64_t)(starts[block + 1] - starts[block]));
        finish(&sha, hashes + HASH * block);
    }
}
