// Floating Point, Half Precision and Mixed Precision Floating Point Instructions.
//
// The approximations (ex2, lg2, rcp, ...) are the C library's results, which lie within every bound that the manual
// gives; .approx instructions of a chip may differ in the last places.
#include <fenv.h>

#include "float.h"
#include "lanes.h"

// -------------------------------------------------------------------------------------------- single operations

static inline float operand_f32(uint64_t bits, int flags)
{
    float x = f32_of(bits);
    return flags & FTZ ? flush_f32(x) : x;
}

// The result of a single-precision operation: flushed, clamped to [0, 1], NaN made canonical.
static inline uint32_t result_f32(float r, int flags)
{
    if (flags & FTZ) r = flush_f32(r);
    if (flags & SAT) return r > 0 ? bits_of_f32(r < 1 ? r : 1) : 0; // a NaN becomes +0
    return canonical_f32(r);
}

static inline uint32_t directed_f32(double odd, rounding r, int flags)
{
    return result_f32(f32_of(to_f32(odd, r)), flags);
}

static inline uint32_t add_f32(uint64_t x, uint64_t y, int flags, rounding r)
{
    float a = operand_f32(x, flags), b = operand_f32(y, flags);
    if (r == RN) return result_f32(a + b, flags);
    if (a + b == 0 && signbit(a) != signbit(b)) return result_f32(r == RM ? -0.0f : 0.0f, flags);
    return directed_f32(sum_to_odd(a, b), r, flags);
}

static inline uint32_t mul_f32(uint64_t x, uint64_t y, int flags, rounding r)
{
    float a = operand_f32(x, flags), b = operand_f32(y, flags);
    return r == RN ? result_f32(a * b, flags) : directed_f32((double)a * b, r, flags);
}

static inline uint32_t fma_f32(uint64_t x, uint64_t y, uint64_t z, int flags, rounding r)
{
    float a = operand_f32(x, flags), b = operand_f32(y, flags), c = operand_f32(z, flags);
    if (r == RN) return result_f32(fmaf(a, b, c), flags);
    double product = (double)a * b;
    if (product + c == 0 && signbit(product) != signbit(c)) return result_f32(r == RM ? -0.0f : 0.0f, flags);
    return directed_f32(sum_to_odd(product, c), r, flags);
}

#define NEGATED_F32(y) ((y) ^ 0x80000000)

// PTX ISA, "min", "max": a NaN loses against a number, unless .NaN; -0 is less than +0.
static inline float least(float a, float b, bool max, int flags)
{
    if (a != a || b != b) return flags & PROPAGATE_NAN || (a != a && b != b) ? NAN : a != a ? b : a;
    if (a == b) return f32_of(max ? bits_of_f32(a) & bits_of_f32(b) : bits_of_f32(a) | bits_of_f32(b));
    return (a < b) != max ? a : b;
}

static inline uint32_t min_max_f32(uint64_t x, uint64_t y, bool max, int flags)
{
    float a = operand_f32(x, flags), b = operand_f32(y, flags);
    uint32_t sign = flags & XORSIGN ? (uint32_t)(x ^ y) & 0x80000000 : 0;
    if (flags & ABS) a = fabsf(a), b = fabsf(b);
    uint32_t r = canonical_f32(least(a, b, max, flags));
    return r == (uint32_t)NAN_F32 ? r : r | sign;
}

// ------------------------------------------------------------------------------------------------------- .f32

#define FLOAT2(name, f)                                     \
    EXEC2(name, uint64_t, uint32_t, f(x, y, 0, RN))         \
    EXEC2(name##_ftz, uint64_t, uint32_t, f(x, y, FTZ, RN)) \
    EXEC2(name##_any, uint64_t, uint32_t, f(x, y, in->p[1], (rounding)in->p[2]))
#define SUB_F32(x, y, flags, r) add_f32(x, NEGATED_F32(y), flags, r)
FLOAT2(exec_add_f32, add_f32)
FLOAT2(exec_sub_f32, SUB_F32)
FLOAT2(exec_mul_f32, mul_f32)
EXEC3(exec_fma_f32, uint64_t, uint64_t, uint32_t, fma_f32(x, y, z, 0, RN))
EXEC3(exec_fma_f32_ftz, uint64_t, uint64_t, uint32_t, fma_f32(x, y, z, FTZ, RN))
EXEC3(exec_fma_f32_any, uint64_t, uint64_t, uint32_t, fma_f32(x, y, z, in->p[1], (rounding)in->p[2]))
EXEC2(exec_min_f32, uint64_t, uint32_t, min_max_f32(x, y, false, in->p[1]))
EXEC2(exec_max_f32, uint64_t, uint32_t, min_max_f32(x, y, true, in->p[1]))
EXEC3(exec_min3_f32, uint64_t, uint64_t, uint32_t, min_max_f32(min_max_f32(x, y, false, in->p[1]), z, false, in->p[1]))
EXEC3(exec_max3_f32, uint64_t, uint64_t, uint32_t, min_max_f32(min_max_f32(x, y, true, in->p[1]), z, true, in->p[1]))
EXEC1(exec_neg_f32, uint64_t, uint32_t, canonical_f32(-operand_f32(x, in->p[1])))
EXEC1(exec_abs_f32, uint64_t, uint32_t, canonical_f32(fabsf(operand_f32(x, in->p[1]))))

// Two .f32 in 64 bits.
#define BOTH2(f, ...) (f((uint32_t)x, (uint32_t)y, __VA_ARGS__) | (uint64_t)f(x >> 32, y >> 32, __VA_ARGS__) << 32)
#define BOTH3(f, ...) \
    (f((uint32_t)x, (uint32_t)y, (uint32_t)z, __VA_ARGS__) | (uint64_t)f(x >> 32, y >> 32, z >> 32, __VA_ARGS__) << 32)
PACKED2(exec_add_f32x2, 4, BOTH2(add_f32, 0, RN))
PACKED2(exec_add_f32x2_any, 4, BOTH2(add_f32, in->p[1], (rounding)in->p[2]))
PACKED2(exec_sub_f32x2_any, 4, BOTH2(SUB_F32, in->p[1], (rounding)in->p[2]))
PACKED2(exec_mul_f32x2, 4, BOTH2(mul_f32, 0, RN))
PACKED2(exec_mul_f32x2_any, 4, BOTH2(mul_f32, in->p[1], (rounding)in->p[2]))
PACKED3(exec_fma_f32x2, 4, BOTH3(fma_f32, 0, RN))
PACKED3(exec_fma_f32x2_any, 4, BOTH3(fma_f32, in->p[1], (rounding)in->p[2]))

// Division and square roots in another rounding than to nearest: the quotient as a double, made odd by the sign of what
// is left over.
static inline uint32_t div_f32(uint64_t x, uint64_t y, int flags, rounding r)
{
    float a = operand_f32(x, flags), b = operand_f32(y, flags);
    if (flags & APPROX) { // "for 2^126 < |b| < 2^128, if a is infinity, NaN, otherwise 0"
        float m = fabsf(b);
        if (m > 0x1p126f && m < INFINITY) return isinf(a) || a != a ? NAN_F32 : ((uint32_t)(x ^ y) & 0x80000000);
    }
    if (r == RN) return result_f32(a / b, flags);
    double q = (double)a / b;
    if (q == 0 || isinf(q) || q != q) return result_f32((float)q, flags);
    double rest = fma(-q, b, a);
    return directed_f32(to_odd(q, b > 0 ? rest : -rest), r, flags);
}

static inline uint32_t rcp_f32(uint64_t x, int flags, rounding r)
{
    return div_f32(0x3f800000, x, flags & ~APPROX, r);
}

static inline uint32_t sqrt_f32(uint64_t x, int flags, rounding r)
{
    float a = operand_f32(x, flags);
    if (r == RN || !(a > 0) || isinf(a)) return result_f32(sqrtf(a), flags);
    double s = sqrt((double)a);
    return directed_f32(to_odd(s, fma(-s, s, a)), r, flags);
}

static inline uint32_t rsqrt_f32(uint64_t x, int flags)
{
    return result_f32((float)(1 / sqrt((double)operand_f32(x, flags))), flags);
}

EXEC2(exec_div_f32, uint64_t, uint32_t, div_f32(x, y, in->p[1], (rounding)in->p[2]))
EXEC1(exec_rcp_f32, uint64_t, uint32_t, rcp_f32(x, in->p[1], (rounding)in->p[2]))
EXEC1(exec_sqrt_f32, uint64_t, uint32_t, sqrt_f32(x, in->p[1], (rounding)in->p[2]))
EXEC1(exec_rsqrt_f32, uint64_t, uint32_t, rsqrt_f32(x, in->p[1]))
EXEC1(exec_ex2_f32, uint64_t, uint32_t, result_f32(exp2f(operand_f32(x, in->p[1])), in->p[1]))
EXEC1(exec_lg2_f32, uint64_t, uint32_t, result_f32(log2f(operand_f32(x, in->p[1])), in->p[1]))
EXEC1(exec_sin_f32, uint64_t, uint32_t, result_f32(sinf(operand_f32(x, in->p[1])), in->p[1]))
EXEC1(exec_cos_f32, uint64_t, uint32_t, result_f32(cosf(operand_f32(x, in->p[1])), in->p[1]))
EXEC1(exec_tanh_f32, uint64_t, uint32_t, result_f32(tanhf(operand_f32(x, in->p[1])), in->p[1]))

// ------------------------------------------------------------------------------------------------------- .f64

typedef enum { ADD, SUB, MUL, DIV, FMA, SQRT } operation_f64;

// In the rounding mode of the host; volatile keeps the compiler from moving the operation out of it.
static uint64_t compute_f64(operation_f64 o, uint64_t x, uint64_t y, uint64_t z, rounding r)
{
    static const int modes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
    volatile double a = f64_of(x), b = f64_of(y), c = f64_of(z), d = 0;
    if (r != RN) fesetround(modes[r]);
    switch (o) {
    case ADD: d = a + b; break;
    case SUB: d = a - b; break;
    case MUL: d = a * b; break;
    case DIV: d = a / b; break;
    case FMA: d = fma(a, b, c); break;
    case SQRT: d = sqrt(a); break;
    }
    if (r != RN) fesetround(FE_TONEAREST);
    return bits_of_f64(d);
}

EXEC2(exec_add_f64, uint64_t, uint64_t, compute_f64(ADD, x, y, 0, (rounding)in->p[2]))
EXEC2(exec_sub_f64, uint64_t, uint64_t, compute_f64(SUB, x, y, 0, (rounding)in->p[2]))
EXEC2(exec_mul_f64, uint64_t, uint64_t, compute_f64(MUL, x, y, 0, (rounding)in->p[2]))
EXEC2(exec_div_f64, uint64_t, uint64_t, compute_f64(DIV, x, y, 0, (rounding)in->p[2]))
EXEC3(exec_fma_f64, uint64_t, uint64_t, uint64_t, compute_f64(FMA, x, y, z, (rounding)in->p[2]))
EXEC1(exec_rcp_f64, uint64_t, uint64_t, compute_f64(DIV, bits_of_f64(1), x, 0, (rounding)in->p[2]))
EXEC1(exec_sqrt_f64, uint64_t, uint64_t, compute_f64(SQRT, x, 0, 0, (rounding)in->p[2]))
EXEC1(exec_neg_f64, uint64_t, uint64_t, x ^ (uint64_t)1 << 63)
EXEC1(exec_abs_f64, uint64_t, uint64_t, x & ~((uint64_t)1 << 63))

static inline uint64_t min_max_f64(uint64_t x, uint64_t y, bool max)
{
    double a = f64_of(x), b = f64_of(y);
    if (a != a) return b != b ? 0x7fffffffffffffff : y;
    if (b != b) return x;
    if (a == b) return max ? x & y : x | y;
    return (a < b) != max ? x : y;
}
EXEC2(exec_min_f64, uint64_t, uint64_t, min_max_f64(x, y, false))
EXEC2(exec_max_f64, uint64_t, uint64_t, min_max_f64(x, y, true))

// PTX ISA, "rcp.approx.ftz.f64", "rsqrt.approx.ftz.f64": only the upper 32 bits of the operand count, and only those of
// the result are given.
static inline uint64_t coarse_f64(uint64_t x, bool root)
{
    x &= 0xffffffff00000000;
    if (!(x & 0x7ff0000000000000)) x &= (uint64_t)1 << 63;
    double r = root ? 1 / sqrt(f64_of(x)) : 1 / f64_of(x);
    if (r != r) return 0x7fffffff00000000;
    uint64_t bits = bits_of_f64(r) & 0xffffffff00000000;
    return bits & 0x7ff0000000000000 ? bits : bits & (uint64_t)1 << 63;
}
EXEC1(exec_rcp_coarse, uint64_t, uint64_t, coarse_f64(x, false))
EXEC1(exec_rsqrt_f64, uint64_t, uint64_t, bits_of_f64(1 / sqrt(f64_of(x))))
EXEC1(exec_rsqrt_coarse, uint64_t, uint64_t, coarse_f64(x, true))

// ---------------------------------------------------------------------------------- .f16 .f16x2 .bf16 .bf16x2

enum { HALF_ADD, HALF_SUB, HALF_MUL, HALF_FMA, HALF_MIN, HALF_MAX, HALF_NEG, HALF_ABS, HALF_EX2, HALF_TANH };

static inline float half_value(uint32_t h, bool bf16, int flags)
{
    uint32_t exponent = bf16 ? 0x7f80 : 0x7c00;
    if (flags & FTZ && !(h & exponent)) h &= 0x8000;
    return bf16 ? bf16_value(h) : f16_value(h);
}

static uint32_t half_result(double odd, bool bf16, int flags)
{
    if (flags & SAT) odd = odd > 0 ? odd < 1 ? odd : 1 : 0;
    if (flags & RELU && odd <= 0) odd = 0; // a NaN stays
    uint32_t h = bf16 ? to_bf16(odd, RN) : to_f16(odd, RN);
    return flags & FTZ && !(h & (bf16 ? 0x7f80 : 0x7c00)) ? h & 0x8000 : h;
}

static uint32_t compute_half(int o, uint32_t x, uint32_t y, uint32_t z, bool bf16, int flags)
{
    x &= 0xffff, y &= 0xffff, z &= 0xffff;
    float a = half_value(x, bf16, flags), b = half_value(y, bf16, flags), c = half_value(z, bf16, flags);
    switch (o) {
    case HALF_ADD: return half_result(sum_to_odd(a, b), bf16, flags);
    case HALF_SUB: return half_result(sum_to_odd(a, -b), bf16, flags);
    case HALF_MUL: return half_result((double)a * b, bf16, flags);
    case HALF_FMA: return half_result(sum_to_odd((double)a * b, c), bf16, flags);
    case HALF_MIN:
    case HALF_MAX: {
        uint32_t sign = flags & XORSIGN ? (x ^ y) & 0x8000 : 0;
        if (flags & ABS) a = fabsf(a), b = fabsf(b);
        float r = least(a, b, o == HALF_MAX, flags);
        return r != r ? 0x7fff : half_result(r, bf16, 0) | sign;
    }
    case HALF_NEG: return a != a ? 0x7fff : half_result(a, bf16, flags) ^ 0x8000;
    case HALF_ABS: return half_result(fabsf(a), bf16, flags);
    case HALF_EX2: return half_result(exp2(a), bf16, flags);
    default: return half_result(tanh(a), bf16, flags);
    }
}

// p[5]: the operation, p[6]: bf16
#define HALF(x, y, z) compute_half(in->p[5], (uint32_t)(x), (uint32_t)(y), (uint32_t)(z), in->p[6], in->p[1])
EXEC1(exec_half1, uint64_t, uint16_t, HALF(x, 0, 0))
EXEC2(exec_half2, uint64_t, uint16_t, HALF(x, y, 0))
EXEC3(exec_half3, uint64_t, uint64_t, uint16_t, HALF(x, y, z))
PACKED1(exec_halves1, 2, HALF(x, 0, 0) | HALF(x >> 16, 0, 0) << 16)
PACKED2(exec_halves2, 2, HALF(x, y, 0) | HALF(x >> 16, y >> 16, 0) << 16)
PACKED3(exec_halves3, 2, HALF(x, y, z) | HALF(x >> 16, y >> 16, z >> 16) << 16)

// Mixed precision: 16-bit operands, widened, and a .f32.
static inline uint32_t widened(uint64_t x, bool bf16)
{
    return bits_of_f32(bf16 ? bf16_value(x) : f16_value(x));
}
#define MIXED(name, f)                                                                                           \
    static outcome name(warp *w, const inst *in, uint32_t mask)                                                  \
    {                                                                                                            \
        lanes a, b, c = {.poisoned = 0};                                                                         \
        bool three = in->nops == 4, bf16 = in->p[6];                                                             \
        read_lanes(&a, w, &in->ops[1], (type)in->p[0]);                                                          \
        read_lanes(&b, w, &in->ops[2], three ? (type)in->p[0] : T_F32);                                          \
        if (three)                                                                                               \
            read_lanes(&c, w, &in->ops[3], T_F32);                                                               \
        else                                                                                                     \
            c.v = b.v;                                                                                           \
        uint64_t *d = DESTINATION(in);                                                                           \
        uint32_t bad = a.poisoned | b.poisoned | c.poisoned;                                                     \
        int flags = in->p[1];                                                                                    \
        rounding r = (rounding)in->p[2];                                                                         \
        EACH_LANE(mask, uint64_t x = widened(a.v[l], bf16); uint64_t y = three ? widened(b.v[l], bf16) : b.v[l]; \
                  uint64_t z = c.v[l]; (void)z; d[l] = f;);                                                      \
        DONE(bad);                                                                                               \
    }
MIXED(exec_mixed_add, add_f32(x, y, flags, r))
MIXED(exec_mixed_sub, SUB_F32(x, y, flags, r))
MIXED(exec_mixed_fma, fma_f32(x, y, z, flags, r))

// ----------------------------------------------------------------------------------------------- testp, copysign

enum { FINITE, INFINITE, NUMBER, NOTANUMBER, NORMAL, SUBNORMAL };

static outcome exec_testp(warp *w, const inst *in, uint32_t mask)
{
    READ1();
    uint64_t *d = DESTINATION(in);
    uint32_t bad = a.poisoned;
    bool f64 = in->p[0] == T_F64;
    EACH_LANE(mask, {
        int c = f64 ? fpclassify(f64_of(a.v[l])) : fpclassify(f32_of(a.v[l]));
        bool r = false;
        switch (in->p[5]) {
        case FINITE: r = c != FP_INFINITE && c != FP_NAN; break;
        case INFINITE: r = c == FP_INFINITE; break;
        case NUMBER: r = c != FP_NAN; break;
        case NOTANUMBER: r = c == FP_NAN; break;
        case NORMAL: r = c == FP_NORMAL || c == FP_ZERO; break;
        case SUBNORMAL: r = c == FP_SUBNORMAL; break;
        }
        d[l] = r;
    });
    set_poison(w, in->ops[0].reg, mask, bad, 1);
    return RAN;
}

static const char *decode_testp(inst *in, const kernel *k)
{
    static const char *const names[] = {"finite", "infinite", "number", "notanumber", "normal", "subnormal"};
    type t = last_type(in);
    in->p[5] = -1;
    for (int i = 0; i < 6 && in->mods == 2; i++)
        if (!strcmp(names[i], in->mod[0])) in->p[5] = i;
    if (in->p[5] < 0 || (t != T_F32 && t != T_F64) || in->nops != 2) return "testp.op.{f32,f64} p, a is meant";
    in->p[0] = t;
    in->klass = C_FLOAT;
    in->exec = exec_testp;
    const char *wrong = want_register(k, &in->ops[0], T_PRED);
    return wrong ? wrong : want_source(k, &in->ops[1], t);
}

EXEC2(exec_copysign_f32, uint32_t, uint32_t, (x & 0x80000000) | (y & 0x7fffffff))
EXEC2(exec_copysign_f64, uint64_t, uint64_t, (x & (uint64_t)1 << 63) | (y & ~((uint64_t)1 << 63)))

static const char *decode_copysign(inst *in, const kernel *k)
{
    static const by_type table[] = {{T_F32, exec_copysign_f32}, {T_F64, exec_copysign_f64}, {T_NONE, NULL}};
    type t = last_type(in);
    in->p[0] = in->p[3] = t;
    in->klass = C_FLOAT;
    in->exec = find_exec(table, t);
    return in->mods == 1 && in->exec ? same_types(in, k, t, 2) : "copysign.{f32,f64} d, a, b is meant";
}

// ----------------------------------------------------------------------------------------------------- decoders

static bool is_half(type t)
{
    return t == T_F16 || t == T_F16X2 || t == T_BF16 || t == T_BF16X2;
}

// add, sub, fma with .f32 before the type of the 16-bit operands (sm_100).
static const char *decode_mixed(inst *in, const kernel *k, char op)
{
    type t = last_type(in);
    if (!target_has(k, FEATURE_SM100AF)) return "needs sm_100a";
    const char *wrong = flags_and_rounding(in, 2, SAT, "rn rz rm rp");
    if (wrong) return wrong;
    int sources = op == 'f' ? 3 : 2;
    if (op == 'f' && !in->p[4]) return "the rounding is missing";
    if (in->nops != 1 + sources) return "wrong number of operands";
    in->p[0] = t;
    in->p[3] = T_F32;
    in->p[6] = t == T_BF16;
    in->klass = C_FLOAT;
    in->exec = op == 'f' ? exec_mixed_fma : op == 'a' ? exec_mixed_add : exec_mixed_sub;
    wrong = want_register(k, &in->ops[0], T_F32);
    for (int i = 1; i < sources && !wrong; i++) wrong = want_source(k, &in->ops[i], t);
    return wrong ? wrong : want_source(k, &in->ops[sources], T_F32);
}

static const char *decode_half(inst *in, const kernel *k, int operation, int sources)
{
    type t = last_type(in);
    bool bf16 = t == T_BF16 || t == T_BF16X2, packed = t == T_F16X2 || t == T_BF16X2;
    int allowed = 0;
    const char *roundings = "";
    switch (operation) {
    case HALF_ADD:
    case HALF_SUB:
    case HALF_MUL:
        allowed = bf16 ? 0 : FTZ | SAT;
        roundings = "rn";
        break;
    case HALF_FMA:
        allowed = bf16 ? RELU : FTZ | SAT | RELU;
        roundings = "rn";
        break;
    case HALF_MIN:
    case HALF_MAX: allowed = (bf16 ? 0 : FTZ) | PROPAGATE_NAN | ABS | XORSIGN; break;
    case HALF_NEG:
    case HALF_ABS: allowed = bf16 ? 0 : FTZ; break;
    case HALF_EX2: allowed = APPROX | (bf16 ? FTZ : 0); break;
    case HALF_TANH: allowed = APPROX; break;
    }
    const char *wrong = flags_and_rounding(in, 1, allowed, roundings);
    if (wrong) return wrong;
    if (in->p[1] & SAT && in->p[1] & RELU) return "sat and relu";
    if (operation == HALF_FMA && !in->p[4]) return "the rounding is missing";
    if (allowed & APPROX && !(in->p[1] & APPROX)) return "approx is missing";
    if (operation == HALF_EX2 && bf16 && !(in->p[1] & FTZ)) return "ftz is missing";
    if (!(in->p[1] & XORSIGN) != !(in->p[1] & ABS)) return "xorsign and abs go together";
    in->p[0] = in->p[3] = t;
    in->p[5] = operation;
    in->p[6] = bf16;
    in->klass = allowed & APPROX ? C_SPECIAL_FUNCTION : C_FLOAT;
    static const exec_fn one[] = {exec_half1, exec_half2, exec_half3},
                         two[] = {exec_halves1, exec_halves2, exec_halves3};
    in->exec = packed ? two[sources - 1] : one[sources - 1];
    return same_types(in, k, t, sources);
}

static const char *decode_min_max(inst *in, const kernel *k, bool max)
{
    type t = last_type(in);
    in->klass = C_FLOAT;
    in->p[0] = in->p[3] = t;
    if (t == T_F64) {
        in->exec = max ? exec_max_f64 : exec_min_f64;
        const char *wrong = flags_and_rounding(in, 1, 0, "");
        return wrong ? wrong : same_types(in, k, t, 2);
    }
    if (is_half(t)) return decode_half(in, k, max ? HALF_MAX : HALF_MIN, 2);
    if (t != T_F32) return "a type that the operation does not have";
    bool three = in->nops == 4;
    const char *wrong = flags_and_rounding(in, 1, FTZ | PROPAGATE_NAN | ABS | (three ? 0 : XORSIGN), "");
    if (wrong) return wrong;
    if (three && !target_has(k, FEATURE_SM100)) return "three inputs need sm_100";
    if (!three && !(in->p[1] & XORSIGN) != !(in->p[1] & ABS)) return "xorsign and abs go together";
    in->exec = three ? max ? exec_max3_f32 : exec_min3_f32 : max ? exec_max_f32 : exec_min_f32;
    return same_types(in, k, t, three ? 3 : 2);
}

static const char *decode_arithmetic(inst *in, const kernel *k, char op)
{
    type t = last_type(in);
    int sources = op == 'f' ? 3 : 2;
    in->klass = C_FLOAT;
    if ((t == T_F16 || t == T_BF16) && in->mods >= 2 && !strcmp(in->mod[in->mods - 2], "f32") && op != 'm')
        return decode_mixed(in, k, op);
    if (is_half(t))
        return decode_half(in, k,
                           op == 'a'   ? HALF_ADD
                           : op == 's' ? HALF_SUB
                           : op == 'm' ? HALF_MUL
                                       : HALF_FMA,
                           sources);
    const char *wrong = flags_and_rounding(in, 1, t == T_F32 ? FTZ | SAT : t == T_F32X2 ? FTZ : 0, "rn rz rm rp");
    if (wrong) return wrong;
    if (op == 'f' && !in->p[4]) return "the rounding is missing";
    in->p[0] = in->p[3] = t;
    bool plain = in->p[2] == RN && !in->p[1], ftz = in->p[2] == RN && in->p[1] == FTZ;
    switch (t) {
    case T_F32: {
        static const exec_fn add[] = {exec_add_f32, exec_add_f32_ftz, exec_add_f32_any},
                             sub[] = {exec_sub_f32, exec_sub_f32_ftz, exec_sub_f32_any},
                             mul[] = {exec_mul_f32, exec_mul_f32_ftz, exec_mul_f32_any},
                             fma[] = {exec_fma_f32, exec_fma_f32_ftz, exec_fma_f32_any};
        in->exec = (op == 'a' ? add : op == 's' ? sub : op == 'm' ? mul : fma)[plain ? 0 : ftz ? 1 : 2];
        break;
    }
    case T_F32X2:
        if (!target_has(k, FEATURE_SM100)) return "f32x2 needs sm_100";
        if (op == 'a')
            in->exec = plain ? exec_add_f32x2 : exec_add_f32x2_any;
        else if (op == 's')
            in->exec = exec_sub_f32x2_any;
        else if (op == 'm')
            in->exec = plain ? exec_mul_f32x2 : exec_mul_f32x2_any;
        else
            in->exec = plain ? exec_fma_f32x2 : exec_fma_f32x2_any;
        break;
    case T_F64:
        in->exec = op == 'a' ? exec_add_f64 : op == 's' ? exec_sub_f64 : op == 'm' ? exec_mul_f64 : exec_fma_f64;
        break;
    default: return "a type that the operation does not have";
    }
    return same_types(in, k, t, sources);
}

// neg, abs
static const char *decode_sign(inst *in, const kernel *k, bool abs)
{
    type t = last_type(in);
    in->klass = C_FLOAT;
    if (is_half(t)) return decode_half(in, k, abs ? HALF_ABS : HALF_NEG, 1);
    const char *wrong = flags_and_rounding(in, 1, t == T_F32 ? FTZ : 0, "");
    if (wrong) return wrong;
    in->p[0] = in->p[3] = t;
    if (t == T_F32)
        in->exec = abs ? exec_abs_f32 : exec_neg_f32;
    else if (t == T_F64)
        in->exec = abs ? exec_abs_f64 : exec_neg_f64;
    else
        return "a type that the operation does not have";
    return same_types(in, k, t, 1);
}

// div, rcp, sqrt: .approx, .full (div) or a rounding.
static const char *decode_quotient(inst *in, const kernel *k)
{
    type t = last_type(in);
    bool div = in->opcode[0] == 'd', root = in->opcode[0] == 's';
    const char *wrong = flags_and_rounding(in, 1,
                                           t == T_F32                    ? FTZ | APPROX | (div ? FULL : 0)
                                           : t == T_F64 && !div && !root ? FTZ | APPROX
                                                                         : 0,
                                           "rn rz rm rp");
    if (wrong) return wrong;
    bool approx = in->p[1] & (APPROX | FULL);
    if (approx == in->p[4]) return "one of approx and a rounding is meant";
    in->p[0] = in->p[3] = t;
    in->klass = approx ? C_SPECIAL_FUNCTION : C_FLOAT;
    if (t == T_F32)
        in->exec = div ? exec_div_f32 : root ? exec_sqrt_f32 : exec_rcp_f32;
    else if (t == T_F64 && approx)
        in->exec = in->p[1] & FTZ ? exec_rcp_coarse : NULL;
    else if (t == T_F64)
        in->exec = div ? exec_div_f64 : root ? exec_sqrt_f64 : exec_rcp_f64;
    return in->exec ? same_types(in, k, t, div ? 2 : 1) : "a type that the operation does not have";
}

// rsqrt, sin, cos, lg2, ex2, tanh
static const char *decode_approximation(inst *in, const kernel *k)
{
    type t = last_type(in);
    const char *op = in->opcode;
    bool tanh = op[0] == 't', ex2 = op[0] == 'e', rsqrt = op[0] == 'r';
    if (is_half(t) && (tanh || ex2)) return decode_half(in, k, tanh ? HALF_TANH : HALF_EX2, 1);
    const char *wrong = flags_and_rounding(in, 1, APPROX | (tanh ? 0 : FTZ), "");
    if (wrong) return wrong;
    if (!(in->p[1] & APPROX)) return "approx is missing";
    in->p[0] = in->p[3] = t;
    in->klass = C_SPECIAL_FUNCTION;
    if (t == T_F64 && rsqrt)
        in->exec = in->p[1] & FTZ ? exec_rsqrt_coarse : exec_rsqrt_f64;
    else if (t == T_F32)
        in->exec = tanh           ? exec_tanh_f32
                   : ex2          ? exec_ex2_f32
                   : rsqrt        ? exec_rsqrt_f32
                   : op[0] == 'l' ? exec_lg2_f32
                   : op[0] == 's' ? exec_sin_f32
                                  : exec_cos_f32;
    return in->exec ? same_types(in, k, t, 1) : "a type that the operation does not have";
}

const char *decode_float(inst *in, const kernel *k)
{
    const char *op = in->opcode;
    if (!strcmp(op, "min") || !strcmp(op, "max")) return decode_min_max(in, k, op[1] == 'a');
    if (!strcmp(op, "neg") || !strcmp(op, "abs")) return decode_sign(in, k, op[0] == 'a');
    if (!strcmp(op, "div")) return decode_quotient(in, k);
    bool mad = !strcmp(op, "mad");
    if (mad && last_type(in) != T_F32 && last_type(in) != T_F64) return "a type that the operation does not have";
    return decode_arithmetic(in, k, mad ? 'f' : op[0]);
}

const inst_row float_rows[] = {
    {"fma", decode_float},           {"rcp", decode_quotient},      {"sqrt", decode_quotient},
    {"rsqrt", decode_approximation}, {"sin", decode_approximation}, {"cos", decode_approximation},
    {"lg2", decode_approximation},   {"ex2", decode_approximation}, {"tanh", decode_approximation},
    {"testp", decode_testp},         {"copysign", decode_copysign}, {NULL, NULL},
};
