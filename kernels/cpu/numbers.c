/* Conversions between the dtypes of models and float, for the few numbers that are no K and no V. */

#include <string.h>

#include "attention.h"

static uint32_t bits_of(float number)
{
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits)
{
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static float from_half(uint16_t half)
{
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = (uint32_t)(half & 0x7FFF) << 13;
    if (rest >= 0x0F800000) /* infinity, not a number */
        return float_of(sign | 0x7F800000 | (rest & 0x007FFFFF));
    return float_of(sign | bits_of(float_of(rest) * 0x1p112f)); /* the exponent's bias, 127 for 15; exact, below the normal ones too */
}

static uint16_t to_half(float number)
{
    const uint32_t bits = bits_of(number), size = bits & 0x7FFFFFFF;
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    if (size > 0x7F800000)
        return sign | 0x7E00;
    if (size >= 0x477FF000) /* 65,520: rounds to infinity */
        return sign | 0x7C00;
    if (size < 0x38800000) /* 2^-14: below, all have one step, which adding 0.5 rounds to */
        return sign | (uint16_t)(bits_of(float_of(size) + 0.5f) - 0x3F000000);
    return sign | (uint16_t)((size - 0x38000000 + 0xFFF + (size >> 13 & 1)) >> 13);
}

static uint16_t to_bfloat(float number)
{
    const uint32_t bits = bits_of(number);
    if ((bits & 0x7FFFFFFF) > 0x7F800000)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

void to_floats(int dtype, const void *from, float *to, int64_t count)
{
    const uint16_t *items = from;
    if (dtype == FLOAT32)
        memcpy(to, from, (size_t)count * sizeof *to);
    else if (dtype == FLOAT16)
        for (int64_t i = 0; i < count; i++)
            to[i] = from_half(items[i]);
    else
        for (int64_t i = 0; i < count; i++)
            to[i] = float_of((uint32_t)items[i] << 16);
}

void from_floats(int dtype, const float *from, void *to, int64_t count)
{
    uint16_t *items = to;
    if (dtype == FLOAT32)
        memcpy(to, from, (size_t)count * sizeof *from);
    else if (dtype == FLOAT16)
        for (int64_t i = 0; i < count; i++)
            items[i] = to_half(from[i]);
    else
        for (int64_t i = 0; i < count; i++)
            items[i] = to_bfloat(from[i]);
}
