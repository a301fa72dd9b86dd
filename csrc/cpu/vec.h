// A vector of `real`s and what one instruction, or a handful, does with it. The only file of the CPU kernels with
// intrinsics, and those behind guards: where there are none, the vector extension of gcc and clang does the same.
//
// Loads and stores take any alignment. Lanes are numbered as in memory.
#ifndef FA4_CPU_VEC_H
#define FA4_CPU_VEC_H

#include "element.h"

#include <math.h>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#    define VEC_AVX512
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#    define VEC_AVX2
#endif
#if defined(VEC_AVX512) && defined(__AVX512BF16__) && !defined(FA4_CPU_F64)
#    define VEC_BF16 // vec_dot_bf16 exists
#endif

#if defined(VEC_AVX512) || defined(VEC_AVX2)
#    include <immintrin.h>
#endif

#ifdef VEC_AVX512
enum { VEC_BYTES = 64, VEC_REGISTERS = 32 };
#elif defined(VEC_AVX2)
enum { VEC_BYTES = 32, VEC_REGISTERS = 16 };
#elif defined(__aarch64__)
enum { VEC_BYTES = 16, VEC_REGISTERS = 32 };
#else
enum { VEC_BYTES = 16, VEC_REGISTERS = 16 };
#endif
enum { VEC_LEN = VEC_BYTES / sizeof(real) };

#ifdef FA4_CPU_F64
typedef int64_t vec_int;
typedef uint64_t vec_bits;
#else
typedef int32_t vec_int;
typedef uint32_t vec_bits;
#endif
typedef real vec __attribute__((vector_size(VEC_BYTES), may_alias));
typedef vec_int veci __attribute__((vector_size(VEC_BYTES), may_alias)); // a lane of a comparison: 0 or -1
typedef vec_bits vecu __attribute__((vector_size(VEC_BYTES), may_alias));

// Intrinsics by name: VEC_X86(max) is _mm256_max_ps, say.
#if defined(VEC_AVX512) && defined(FA4_CPU_F64)
#    define VEC_X86(name) _mm512_##name##_pd
#    define VEC_CMP_MASK _mm512_cmp_pd_mask
#elif defined(VEC_AVX512)
#    define VEC_X86(name) _mm512_##name##_ps
#    define VEC_CMP_MASK _mm512_cmp_ps_mask
#elif defined(VEC_AVX2) && defined(FA4_CPU_F64)
#    define VEC_X86(name) _mm256_##name##_pd
#elif defined(VEC_AVX2)
#    define VEC_X86(name) _mm256_##name##_ps
#endif

// ---- Basics. Sums, differences and products are written a + b, a - b, a * b.

static inline vec vec_load(const real *p)
{
    vec x;
    memcpy(&x, p, sizeof x);
    return x;
}

static inline void vec_store(real *p, vec x)
{
    memcpy(p, &x, sizeof x);
}

static inline vec vec_set1(real x)
{
#ifdef VEC_X86
    return VEC_X86(set1)(x);
#else
    return x - (vec){0};
#endif
}

// *p in every lane, whatever it holds: a real, or a pair of bf16.
static inline vec vec_broadcast(const void *p)
{
    real x;
    memcpy(&x, p, sizeof x);
    return vec_set1(x);
}

// Lane numbers.
static inline veci vec_lanes(void)
{
#if defined(VEC_AVX512) && !defined(FA4_CPU_F64)
    return (veci){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif defined(VEC_AVX512) || (defined(VEC_AVX2) && !defined(FA4_CPU_F64))
    return (veci){0, 1, 2, 3, 4, 5, 6, 7};
#elif defined(VEC_AVX2) || !defined(FA4_CPU_F64)
    return (veci){0, 1, 2, 3};
#else
    return (veci){0, 1};
#endif
}

// Lanes of yes where the condition is -1, of no where it is 0.
static inline vec vec_select(veci condition, vec yes, vec no)
{
    return (vec)(((veci)yes & condition) | ((veci)no & ~condition));
}

// a * b + c, rounded once wherever the machine can.
static inline vec vec_fma(vec a, vec b, vec c)
{
#ifdef VEC_X86
    return VEC_X86(fmadd)(a, b, c);
#else
    return a * b + c;
#endif
}

// The larger; b where either is NaN.
static inline vec vec_max(vec a, vec b)
{
#ifdef VEC_X86
    return VEC_X86(max)(a, b);
#else
    return vec_select((veci)(a > b), a, b);
#endif
}

// Lanes first <= i < last of x, `other` elsewhere.
static inline vec vec_keep(vec x, int64_t first, int64_t last, real other)
{
    first = first < 0 ? 0 : first > VEC_LEN ? VEC_LEN : first;
    last = last < first ? first : last > VEC_LEN ? VEC_LEN : last;
#ifdef VEC_AVX512
    uint32_t below_last = (1u << last) - 1, below_first = (1u << first) - 1;
    return VEC_X86(mask_mov)(vec_set1(other), below_last & ~below_first, x);
#else
    veci lanes = vec_lanes();
    return vec_select((veci)(lanes >= (vec_int)first) & (veci)(lanes < (vec_int)last), x, vec_set1(other));
#endif
}

// The first n values, zeros in the other lanes; reads no more than n.
static inline vec vec_load_n(const real *p, int64_t n)
{
    if (n >= VEC_LEN) return vec_load(p);
#ifdef VEC_AVX512
    return VEC_X86(maskz_loadu)((1u << n) - 1, p);
#else
    real x[VEC_LEN] = {0};
    for (int64_t i = 0; i < n; i++) x[i] = p[i];
    return vec_load(x);
#endif
}

// Writes the first n lanes.
static inline void vec_store_n(real *p, int64_t n, vec x)
{
    if (n >= VEC_LEN) {
        vec_store(p, x);
        return;
    }
#ifdef VEC_AVX512
    VEC_X86(mask_storeu)(p, (1u << n) - 1, x);
#else
    for (int64_t i = 0; i < n; i++) p[i] = x[i];
#endif
}

// The sum of the lanes, always in the same order.
static inline real vec_reduce_add(vec x)
{
    real lane[VEC_LEN];
    vec_store(lane, x);
    for (int n = VEC_LEN / 2; n > 0; n /= 2)
        for (int i = 0; i < n; i++) lane[i] += lane[i + n];
    return lane[0];
}

// The largest lane; anything where one is NaN.
static inline real vec_reduce_max(vec x)
{
#if defined(VEC_AVX512)
    return VEC_X86(reduce_max)(x);
#elif defined(VEC_AVX2) && !defined(FA4_CPU_F64)
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
#else
    real max = x[0];
    for (int i = 1; i < VEC_LEN; i++) max = max > x[i] ? max : x[i];
    return max;
#endif
}

// Lanes of x where a byte is not 0, `other` where it is. Reads VEC_LEN bytes.
static inline vec vec_keep_bytes(vec x, const uint8_t *keep, real other)
{
#if defined(VEC_AVX512) && !defined(FA4_CPU_F64)
    __m128i bytes = _mm_loadu_si128((const void *)keep);
    return _mm512_mask_mov_ps(vec_set1(other), _mm_test_epi8_mask(bytes, bytes), x);
#elif defined(VEC_AVX2) && !defined(FA4_CPU_F64)
    veci lanes = (veci)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)keep));
    return vec_select((veci)(lanes != 0), x, vec_set1(other));
#else
    real lane[VEC_LEN];
    vec_store(lane, x);
    for (int i = 0; i < VEC_LEN; i++) lane[i] = keep[i] ? lane[i] : other;
    return vec_load(lane);
#endif
}

// ---- Attention's own

// e^x to about one unit in the last place for x <= 88 (709 in fp64); 0 for x < -87 (-708), and so never a denormal,
// which would slow the products that follow; NaN for NaN.
static inline vec vec_exp(vec x)
{
    // e^x = 2^n 2^f: n the whole number nearest to x log2(e), from adding and subtracting 1.5 * 2^(mantissa bits),
    // whose sum has n in its low bits; 2^f by a polynomial of least relative error on [-1/2, 1/2].
#ifdef FA4_CPU_F64
    enum { MANTISSA = 52, BIAS = 1023 };
    const real least = -708, round = 0x1.8p52, log2e = 0x1.71547652b82fep0;
    static const real c[] = {0.69314718055994569675,     0.24022650695910098007,   0.055504108664790394552,
                             0.0096181291076070023796,   0.0013333558153439964747, 0.0001540353044157213033,
                             0.000015252727385193868197, 1.3215442675329822143e-6, 1.0180647659234138888e-7,
                             7.0725704128144235096e-9,   4.078071929588336665e-10};
#else
    enum { MANTISSA = 23, BIAS = 127 };
    const real least = -87, round = 0x1.8p23f, log2e = 0x1.715476p0f;
    static const real c[] = {0.6931472149680278995f,    0.2402265278288773743f,    0.055503105510137971734f,
                             0.0096176929729930623181f, 0.0013406643902351759246f, 0.00015594678161326619324f};
#endif
    vec shifted = vec_fma(x, vec_set1(log2e), vec_set1(round));
    vec n = shifted - round;
#ifdef VEC_X86
    const real log2e_rest = sizeof(real) == 8 ? (real)0x1.777d0ffda0d24p-56 : (real)0x1.4ae0cp-26;
    vec f = vec_fma(x, vec_set1(log2e_rest), vec_fma(x, vec_set1(log2e), -n));
#else // without a fused multiply-add: ln2 in two parts, the first short enough for an exact product with n
    const real ln2 = sizeof(real) == 8 ? (real)0x1.62e4p-1 : (real)0x1.63p-1;
    const real ln2_rest = sizeof(real) == 8 ? (real)1.42860682030941723212e-6 : (real)-2.12194440054690583e-4;
    vec f = ((x - n * ln2) - n * ln2_rest) * log2e;
#endif
    vec y = vec_set1(c[sizeof c / sizeof *c - 1]);
    for (int i = sizeof c / sizeof *c - 2; i >= 0; i--) y = vec_fma(y, f, vec_set1(c[i]));
    y = vec_fma(y, f, vec_set1(1));
#ifdef VEC_AVX512
    return VEC_X86(maskz_scalef)(VEC_CMP_MASK(x, vec_set1(least), _CMP_NLT_UQ), y, n);
#else
    y = y * (vec)(((vecu)shifted + BIAS) << MANTISSA);
    return (vec)((veci)y & ~(veci)(x < least));
#endif
}

// Transposes VEC_LEN vectors in place: lane j of r[i] changes places with lane i of r[j].
static inline void vec_transpose(vec r[VEC_LEN])
{
#if defined(VEC_AVX512) && !defined(FA4_CPU_F64)
    // 4 x 4 blocks inside 128-bit quarters, then the quarters themselves.
    vec t[16];
    for (int i = 0; i < 16; i += 4) {
        __m512d a = (__m512d)_mm512_unpacklo_ps(r[i], r[i + 1]), b = (__m512d)_mm512_unpackhi_ps(r[i], r[i + 1]);
        __m512d c = (__m512d)_mm512_unpacklo_ps(r[i + 2], r[i + 3]),
                d = (__m512d)_mm512_unpackhi_ps(r[i + 2], r[i + 3]);
        t[i] = (vec)_mm512_unpacklo_pd(a, c), t[i + 1] = (vec)_mm512_unpackhi_pd(a, c);
        t[i + 2] = (vec)_mm512_unpacklo_pd(b, d), t[i + 3] = (vec)_mm512_unpackhi_pd(b, d);
    }
    for (int i = 0; i < 4; i++) {
        vec a = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88), b = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd);
        vec c = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x88), d = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xdd);
        r[i] = _mm512_shuffle_f32x4(a, c, 0x88), r[i + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);
        r[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88), r[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
    }
#elif defined(VEC_AVX2) && !defined(FA4_CPU_F64)
    vec t[8];
    for (int i = 0; i < 8; i += 4) {
        __m256d a = (__m256d)_mm256_unpacklo_ps(r[i], r[i + 1]), b = (__m256d)_mm256_unpackhi_ps(r[i], r[i + 1]);
        __m256d c = (__m256d)_mm256_unpacklo_ps(r[i + 2], r[i + 3]),
                d = (__m256d)_mm256_unpackhi_ps(r[i + 2], r[i + 3]);
        t[i] = (vec)_mm256_unpacklo_pd(a, c), t[i + 1] = (vec)_mm256_unpackhi_pd(a, c);
        t[i + 2] = (vec)_mm256_unpacklo_pd(b, d), t[i + 3] = (vec)_mm256_unpackhi_pd(b, d);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x20);
        r[i + 4] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x31);
    }
#else
    real t[VEC_LEN][VEC_LEN];
    for (int i = 0; i < VEC_LEN; i++)
        for (int j = 0; j < VEC_LEN; j++) t[j][i] = r[i][j];
    for (int i = 0; i < VEC_LEN; i++) r[i] = vec_load(t[i]);
#endif
}

#ifndef FA4_CPU_F64

// ---- 16-bit numbers, VEC_LEN of them

static inline vec vec_load_bf16(const uint16_t *p)
{
#    ifdef VEC_AVX512
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16);
#    elif defined(VEC_AVX2)
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p)), 16);
#    else
    real x[VEC_LEN];
    for (int i = 0; i < VEC_LEN; i++) x[i] = float_of_bf16(p[i]);
    return vec_load(x);
#    endif
}

static inline vec vec_load_f16(const uint16_t *p)
{
#    ifdef VEC_AVX512
    return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p));
#    elif defined(VEC_AVX2)
    return _mm256_cvtph_ps(_mm_loadu_si128((const void *)p));
#    else
    real x[VEC_LEN];
    for (int i = 0; i < VEC_LEN; i++) x[i] = float_of_f16(p[i]);
    return vec_load(x);
#    endif
}

static inline void vec_store_f16(uint16_t *p, vec x)
{
#    ifdef VEC_AVX512
    _mm256_storeu_si256((void *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#    elif defined(VEC_AVX2)
    _mm_storeu_si128((void *)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#    else
    for (int i = 0; i < VEC_LEN; i++) p[i] = f16_of_float(x[i]);
#    endif
}

static inline void vec_store_bf16(uint16_t *p, vec x)
{
#    if defined(VEC_AVX512) || defined(VEC_AVX2)
    vecu u = (vecu)x, rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
    vecu bits = (vecu)vec_select((veci)(x == x), (vec)rounded, (vec)(u >> 16 | 0x40));
#        ifdef VEC_AVX512
    _mm256_storeu_si256((void *)p, _mm512_cvtepi32_epi16((__m512i)bits));
#        else
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)bits, (__m256i)bits), 0x08);
    _mm_storeu_si128((void *)p, _mm256_castsi256_si128(packed));
#        endif
#    else
    for (int i = 0; i < VEC_LEN; i++) p[i] = bf16_of_float(x[i]);
#    endif
}

// Two rows of bf16 to pairs: lane i has low[i] in its low half, high[i] in its high half.
static inline vec vec_pairs(const uint16_t *low, const uint16_t *high)
{
#    ifdef VEC_AVX512
    __m512i lows = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)low));
    return (vec)_mm512_or_si512(lows, (__m512i)vec_load_bf16(high));
#    else
    return (vec)((vecu)vec_load_bf16(high) | (vecu)vec_load_bf16(low) >> 16);
#    endif
}

#    ifdef VEC_BF16
// Lanes hold pairs of bf16: c + a.low * b.low + a.high * b.high. Denormals count as 0.
static inline vec vec_dot_bf16(vec c, vec a, vec b)
{
    return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
}
#    endif

#endif // FA4_CPU_F64

#endif
