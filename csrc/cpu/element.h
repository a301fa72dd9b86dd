// Numbers as tensors store them. Conversions in integer arithmetic: no _Float16, whose casts need libgcc helpers that
// old systems lack.
#ifndef FA4_CPU_ELEMENT_H
#define FA4_CPU_ELEMENT_H

#include "../fa4.h"

#include <string.h>

// The type of arithmetic in this file's compilation: fp64 for FA4_F64, fp32 for everything else.
#ifdef FA4_CPU_F64
typedef double real;
#else
typedef float real;
#endif

static inline uint32_t bits_of_float(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static inline float float_of_bits(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static inline float float_of_bf16(uint16_t h)
{
    return float_of_bits((uint32_t)h << 16);
}

// Rounds to nearest even; a NaN stays one.
static inline uint16_t bf16_of_float(float x)
{
    uint32_t u = bits_of_float(x);
    if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static inline float float_of_f16(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = h & 0x7fff;
    if (magnitude >= 0x7c00) return float_of_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13); // inf, NaN
    // The exponent's bias is 112 less; the product with 2^112 is exact and makes denormals normal.
    return float_of_bits(sign | bits_of_float(float_of_bits(magnitude << 13) * 0x1p112f));
}

// Rounds to nearest even; a NaN stays one.
static inline uint16_t f16_of_float(float x)
{
    uint32_t u = bits_of_float(x), sign = u >> 16 & 0x8000, magnitude = u & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x47800000) return (uint16_t)(sign | 0x7c00); // 2^16 and more
    if (magnitude < 0x38800000) {                                  // below 2^-14: denormal, a whole number of 2^-24
        float sum = float_of_bits(magnitude) + 0.5f;               // 2^-24 is the last place of a float in [0.5, 1)
        return (uint16_t)(sign | (bits_of_float(sum) - 0x3f000000));
    }
    uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return (uint16_t)(sign | ((rounded >> 13) - (112 << 10)));
}

static inline size_t element_size(fa4_dtype dtype)
{
    return dtype == FA4_F64 ? 8 : dtype == FA4_F32 ? 4 : 2;
}

static inline double element_load(const void *base, fa4_dtype dtype, int64_t offset)
{
    switch (dtype) {
    case FA4_F16: return float_of_f16(((const uint16_t *)base)[offset]);
    case FA4_BF16: return float_of_bf16(((const uint16_t *)base)[offset]);
    case FA4_F32: return ((const float *)base)[offset];
    default: return ((const double *)base)[offset];
    }
}

static inline void element_store(void *base, fa4_dtype dtype, int64_t offset, double x)
{
    switch (dtype) {
    case FA4_F16: ((uint16_t *)base)[offset] = f16_of_float((float)x); break;
    case FA4_BF16: ((uint16_t *)base)[offset] = bf16_of_float((float)x); break;
    case FA4_F32: ((float *)base)[offset] = (float)x; break;
    default: ((double *)base)[offset] = x;
    }
}

#endif
