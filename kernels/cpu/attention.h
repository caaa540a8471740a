/* What the launcher (launch.py) hands over, field by field, and what the files here share. */

#ifndef KV_CPU_ATTENTION_H
#define KV_CPU_ATTENTION_H

#include <stdint.h>

#define VERSION 3 /* rises whenever something here changes; as in library.py */

enum { FLOAT32, FLOAT16, BFLOAT16, DTYPES };
enum { ANY, PLAIN, AVX2, AVX512, AVX512_BF16, ISAS }; /* instruction sets, the later the better */

#define TILE 32       /* tokens whose scores are taken at once: their sums are rescaled once for all of them */
#define PART 4        /* query heads that share each load of K and V: what the registers of AVX-512 hold */
#define ROOM 8192     /* floats of queries, or of sums, that one pass may hold: 32 KiB, so that they stay in the nearest cache */
#define PAD 32        /* values: rows of queries and sums are padded to this, the longest vector of any instruction set */
#define LOG2E 1.44269504088896340736f
#define LOWEST -3.0e38f /* below every score: the greatest so far, before there is one */

#if defined(__x86_64__) && !defined(PLAIN_ONLY)
#define X86
#endif

/* Short loops over variables that are to lie in registers. */
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

/* What only the files here call stays inside the library: other libraries of the process may have the same names. */
#define EXPORTED __attribute__((visibility("default")))
#pragma GCC visibility push(hidden)

/* Where K and V lie in a slot, in bytes. */
typedef struct {
    int32_t dtype, q_heads, kv_heads, key_dim, value_dim, block_tokens, layers, chunk_tokens;
    int64_t layer_bytes, key_at, value_at, key_head_bytes, value_head_bytes, key_token_bytes, value_token_bytes;
} Layout;

/* The rows of a step: for each, the addresses of its blocks' slots in order, and how many tokens it attends to. */
typedef struct {
    int32_t rows, threads, isa, unused;
    const uint64_t *const *tables;
    const int32_t *lengths;
    float *scratch;
    int64_t scratch_floats;
} Rows;

/* One layer's attention. Strides are those of a row and of a head. */
typedef struct {
    const void *q;
    void *out;
    int64_t q_row_bytes, q_head_bytes, out_row_bytes, out_head_bytes;
    const float *sinks; /* a logit for each query head, or NULL */
    int32_t layer, window;
    float scale, softcap;
} Decode;

/* One layer's attention of `count` new tokens of one sequence, whose K and V are in its slots; `start` tokens come before them. */
typedef struct {
    const uint64_t *table; /* addresses of the sequence's slots */
    const void *q;
    void *out;
    int64_t q_row_bytes, q_head_bytes, out_row_bytes, out_head_bytes;
    const float *sinks; /* a logit for each query head, or NULL */
    int32_t layer, window, start, count;
    float scale, softcap;
} Prefill;

/* One layer's new K or V of `count` tokens: token i is number i % inner of sequence i / inner. */
typedef struct {
    const uint64_t *slots;
    const int32_t *places;
    const void *source[2];
    int64_t outer_bytes[2], inner_bytes[2], head_bytes[2];
    int32_t layer, count, inner, unused;
} Write;

/* A pass over tokens [first, last) of one row, for the query heads of parts [part, part_end). Its results: the greatest score, the sum of
 * the weights and the weighted sum of the values, one after the other for each query head. Scores are in powers of two. */
typedef struct {
    const Layout *layout;
    const Decode *decode;
    const uint64_t *table;
    const char *q; /* of the row */
    int32_t first, last, until, part, part_end;
    float *top, *sum, *values;
    int64_t values_stride;
} Pass;

typedef void (*PassFunction)(const Pass *);

/* The passes of an instruction set, by dtype. */
extern const PassFunction plain_passes[DTYPES], avx2_passes[DTYPES], avx512_passes[DTYPES], avx512_bf16_pass;

/* Answers -1 for what it does not do: other types than bfloat16, wider heads. */
int32_t avx512_bf16_prefill(const Layout *layout, const Prefill *prefill, int32_t threads);

/* Query heads of one part, and how many parts a KV head's queries make. */
static inline int group_of(const Layout *layout) { return layout->q_heads / layout->kv_heads; }
static inline int parts_of(const Layout *layout) { return (group_of(layout) + PART - 1) / PART; }
static inline int64_t padded(int64_t dim) { return (dim + PAD - 1) / PAD * PAD; }

/* Runs act(work, i) for each i < count on up to `threads` threads, the caller's among them; returns when all have ended. */
void pool_run(void (*act)(void *work, int64_t i), void *work, int64_t count, int threads);

/* numbers.c: conversions of `count` items, a dtype's to floats and back; rounds to the nearest, ties to even. */
void to_floats(int dtype, const void *from, float *to, int64_t count);
void from_floats(int dtype, const float *from, void *to, int64_t count);

#pragma GCC visibility pop

#endif
