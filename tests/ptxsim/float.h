// Floating point as PTX defines it: rounding modes, flushed subnormals, canonical NaNs, on bits.
#ifndef PTXSIM_FLOAT_H
#define PTXSIM_FLOAT_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

typedef enum { RN, RZ, RM, RP, RNA } rounding; // to nearest even, to zero, down, up, to nearest with ties away

enum { NAN_F32 = 0x7fffffff, NAN_F16 = 0x7fff, NAN_BF16 = 0x7fff };

static inline float f32_of(uint64_t bits)
{
    uint32_t b = (uint32_t)bits;
    float f;
    memcpy(&f, &b, 4);
    return f;
}

static inline uint32_t bits_of_f32(float f)
{
    uint32_t b;
    memcpy(&b, &f, 4);
    return b;
}

static inline double f64_of(uint64_t bits)
{
    double d;
    memcpy(&d, &bits, 8);
    return d;
}

static inline uint64_t bits_of_f64(double d)
{
    uint64_t b;
    memcpy(&b, &d, 8);
    return b;
}

static inline float flush_f32(float x)
{
    uint32_t b = bits_of_f32(x);
    return b & 0x7f800000 ? x : f32_of(b & 0x80000000);
}

static inline uint32_t canonical_f32(float x)
{
    return x != x ? (uint32_t)NAN_F32 : bits_of_f32(x);
}

typedef struct {
    int exponent, mantissa; // bits
} float_format;
#define FORMAT_F16 ((float_format){5, 10})
#define FORMAT_BF16 ((float_format){8, 7})
#define FORMAT_TF32 ((float_format){8, 10})
#define FORMAT_F32 ((float_format){8, 23})

// A finite x to a format with IEEE encodings, without its sign. *overflow: the rounded value is beyond the largest
// finite one; then the result is what the rounding mode makes of it (infinity or the largest).
static inline uint32_t narrow(double x, float_format f, rounding r, bool *overflow)
{
    uint64_t b = bits_of_f64(x), m = b & 0xfffffffffffff;
    bool negative = b >> 63;
    int e = (int)(b >> 52 & 0x7ff) - 1023, bias = (1 << (f.exponent - 1)) - 1, least = 1 - bias;
    *overflow = false;
    if (e == -1023) {
        if (!m) return 0;
        e = -1022; // a subnormal double is below every format's least
    } else {
        m |= (uint64_t)1 << 52;
    }
    int shift = 52 - f.mantissa + (e < least ? least - e : 0);
    uint64_t q = shift > 54 ? 0 : m >> shift, rest = shift > 54 ? 1 : m & (((uint64_t)1 << shift) - 1);
    uint64_t half = shift > 54 ? 2 : (uint64_t)1 << (shift - 1);
    bool up = false;
    switch (r) {
    case RN: up = rest > half || (rest == half && q & 1); break;
    case RNA: up = rest >= half; break;
    case RM: up = negative && rest; break;
    case RP: up = !negative && rest; break;
    case RZ: break;
    }
    q += up;
    uint64_t bits = e < least ? q : ((uint64_t)(e + bias) << f.mantissa) + q - ((uint64_t)1 << f.mantissa);
    uint64_t infinity = (((uint64_t)1 << f.exponent) - 1) << f.mantissa;
    if (bits < infinity) return (uint32_t)bits;
    *overflow = true;
    bool to_infinity = r == RN || r == RNA || (r == RM && negative) || (r == RP && !negative);
    return (uint32_t)(to_infinity ? infinity : infinity - 1);
}

// Any x to a format with infinities; nan is its canonical NaN.
static inline uint32_t round_to(double x, float_format f, rounding r, uint32_t nan)
{
    if (x != x) return nan;
    uint32_t sign = (uint32_t)(bits_of_f64(x) >> 63) << (f.exponent + f.mantissa);
    if (isinf(x)) return sign | ((1u << f.exponent) - 1) << f.mantissa;
    bool overflow;
    return sign | narrow(x, f, r, &overflow);
}

// Towards the exact value that x was rounded from, when the error is known to have the sign of `error`: the last bit is
// made odd, so that a second rounding to fewer bits comes out as if from the exact value.
static inline double to_odd(double x, double error)
{
    uint64_t b = bits_of_f64(x);
    if (error == 0 || error != error || b & 1 || isinf(x)) return x;
    if (x == 0) return error > 0 ? 0x1p-1074 : -0x1p-1074;
    return f64_of((error > 0) == (x > 0) ? b + 1 : b - 1);
}

// a + b, rounded to odd. (Knuth's two-sum; the operands come from narrower formats, so nothing overflows.)
static inline double sum_to_odd(double a, double b)
{
    double s = a + b, bb = s - a;
    return isinf(s) ? s : to_odd(s, (a - (s - bb)) + (b - bb));
}

static inline float f16_value(uint64_t bits)
{
    uint32_t h = (uint32_t)bits & 0xffff, sign = (h & 0x8000) << 16, e = h >> 10 & 31, m = h & 0x3ff;
    if (e == 31) return f32_of(sign | 0x7f800000 | m << 13);
    if (e) return f32_of(sign | (e + 112) << 23 | m << 13);
    float f = (float)m * 0x1p-24f;
    return sign ? -f : f;
}

static inline float bf16_value(uint64_t bits)
{
    return f32_of((uint32_t)(bits & 0xffff) << 16);
}

static inline uint32_t to_f16(double x, rounding r)
{
    return round_to(x, FORMAT_F16, r, NAN_F16);
}

static inline uint32_t to_bf16(double x, rounding r)
{
    return round_to(x, FORMAT_BF16, r, NAN_BF16);
}

static inline uint32_t to_f32(double x, rounding r)
{
    return r == RN ? canonical_f32((float)x) : round_to(x, FORMAT_F32, r, NAN_F32);
}

#endif
