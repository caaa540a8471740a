/* Copies of blocks past the processor's caches: what is written is not read first, and pushes nothing out.
 *
 * As core.c a plain C library. Four streams at a time keep more reads of memory under way than one does.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>

#define LINE 64  /* bytes of a cache line */
#define STREAMS 4

static void copy_line(uint8_t *target, const uint8_t *source)
{
    const __m128i a = _mm_loadu_si128((const __m128i *)source), b = _mm_loadu_si128((const __m128i *)(source + 16));
    const __m128i c = _mm_loadu_si128((const __m128i *)(source + 32)), d = _mm_loadu_si128((const __m128i *)(source + 48));
    _mm_stream_si128((__m128i *)target, a);
    _mm_stream_si128((__m128i *)(target + 16), b);
    _mm_stream_si128((__m128i *)(target + 32), c);
    _mm_stream_si128((__m128i *)(target + 48), d);
}

/* Copy so many bytes between two places that do not overlap. */
void kvstore_copy(uint8_t *target, const uint8_t *source, uint64_t bytes)
{
    const uint64_t head = (LINE - (uintptr_t)target % LINE) % LINE;
    if (bytes < head + STREAMS * LINE) {
        memcpy(target, source, (size_t)bytes);
        return;
    }
    memcpy(target, source, (size_t)head);
    target += head;
    source += head;
    bytes -= head;
    const uint64_t each = bytes / STREAMS / LINE * LINE;
    for (uint64_t at = 0; at < each; at += LINE)
        for (int stream = 0; stream < STREAMS; stream++)
            copy_line(target + each * (uint64_t)stream + at, source + each * (uint64_t)stream + at);
    _mm_sfence(); /* such stores may be seen late: whoever is told of the block afterwards must see all of it */
    memcpy(target + STREAMS * each, source + STREAMS * each, (size_t)(bytes - STREAMS * each));
}
#else
void kvstore_copy(uint8_t *target, const uint8_t *source, uint64_t bytes)
{
    memcpy(target, source, (size_t)bytes);
}
#endif
