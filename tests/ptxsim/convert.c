// cvt, cvt.pack. PTX ISA, "Data Movement and Conversion Instructions: cvt".
#include "float.h"
#include "lanes.h"

// in->p: [0] type of the source, [1] flags, [2] rounding, [3] type of the result, [4] the rounding is to an integer,
// [5] bytes of the destination register
enum { C_FTZ = 1, C_SAT = 2, C_RELU = 4, C_SATFINITE = 8 };

static bool is_signed(type t)
{
    return t >= T_S8 && t <= T_S64;
}

static bool is_integer(type t)
{
    return (t >= T_U8 && t <= T_U64) || is_signed(t);
}

// The low bytes of x as a value of an integer type, in 64 bits.
static inline uint64_t extended(uint64_t x, int bytes, bool sign)
{
    int shift = 64 - 8 * bytes;
    return sign ? (uint64_t)((int64_t)(x << shift) >> shift) : x << shift >> shift;
}

static inline uint64_t register_bits(uint64_t x, int bytes)
{
    return bytes == 8 ? x : x & (((uint64_t)1 << 8 * bytes) - 1);
}

// ------------------------------------------------------------------------------------------------- to an integer

static uint64_t clamp_integer(uint64_t x, bool from_signed, type to)
{
    int bits = 8 * type_bytes(to);
    if (is_signed(to)) {
        int64_t high = (int64_t)(UINT64_MAX >> (65 - bits)), low = -high - 1;
        if (!from_signed) return x > (uint64_t)high ? (uint64_t)high : x;
        int64_t v = (int64_t)x;
        return (uint64_t)(v > high ? high : v < low ? low : v);
    }
    uint64_t high = UINT64_MAX >> (64 - bits);
    if (from_signed && (int64_t)x < 0) return 0;
    return x > high ? high : x;
}

static outcome exec_integer_to_integer(warp *w, const inst *in, uint32_t mask)
{
    READ1();
    type from = (type)in->p[0], to = (type)in->p[3];
    int n = type_bytes(from), m = type_bytes(to), whole = in->p[5];
    bool s = is_signed(from), t = is_signed(to), sat = in->p[1] & C_SAT;
    uint64_t *d = DESTINATION(in);
    int reg = in->ops[0].reg;
    bool bad = ((a.poisoned | w->poisoned[reg]) & mask) != 0;
    uint8_t poison[LANES];
    for (int l = 0; l < LANES && bad; l++) {
        uint64_t undefined = 0;
        for (int i = 0; i < n; i++) undefined |= (uint64_t)(a.poison[l] >> i & 1 ? 0xff : 0) << 8 * i;
        undefined = extended(extended(undefined, n, s), m, t);
        poison[l] = 0;
        for (int i = 0; i < whole; i++) poison[l] |= (uint8_t)((undefined >> 8 * i & 0xff ? 1 : 0) << i);
        if (sat && undefined) poison[l] = (uint8_t)((1u << whole) - 1);
    }
    if (sat)
        EACH_LANE(mask, d[l] = register_bits(extended(clamp_integer(extended(a.v[l], n, s), s, to), m, t), whole););
    else
        EACH_LANE(mask, d[l] = register_bits(extended(extended(a.v[l], n, s), m, t), whole););
    if (bad) set_poison_bytes(w, reg, mask, poison);
    return RAN;
}

static inline double source_value(uint64_t bits, type t, bool ftz)
{
    switch (t) {
    case T_F16: return f16_value(bits);
    case T_BF16: return bf16_value(bits);
    case T_F32: return f32_of(ftz ? canonical_f32(flush_f32(f32_of(bits))) : bits);
    default: return f64_of(bits);
    }
}

static inline double rounded(double x, rounding r)
{
    switch (r) {
    case RZ: return trunc(x);
    case RM: return floor(x);
    case RP: return ceil(x);
    default: return rint(x);
    }
}

// Out-of-range values are clamped. "In float-to-integer conversions, NaN inputs are converted to 0", unless the source
// is .f64 or the result has 64 bits: then to the top bit alone.
static uint64_t float_to_integer(double x, rounding r, type from, type to)
{
    int bits = 8 * type_bytes(to);
    if (x != x) return from == T_F64 || bits == 64 ? (uint64_t)1 << (bits - 1) : 0;
    x = rounded(x, r);
    if (is_signed(to)) {
        double limit = ldexp(1, bits - 1);
        if (x >= limit) return UINT64_MAX >> (65 - bits);
        if (x <= -limit) return (uint64_t)(INT64_MIN >> (64 - bits));
        return (uint64_t)(int64_t)x;
    }
    if (x <= 0) return 0;
    return x >= ldexp(1, bits) ? UINT64_MAX >> (64 - bits) : (uint64_t)x;
}

static outcome exec_float_to_integer(warp *w, const inst *in, uint32_t mask)
{
    READ1();
    type from = (type)in->p[0], to = (type)in->p[3];
    uint64_t *d = DESTINATION(in);
    uint32_t bad = a.poisoned;
    int m = type_bytes(to), whole = in->p[5];
    EACH_LANE(mask, {
        uint64_t v = float_to_integer(source_value(a.v[l], from, in->p[1] & C_FTZ), (rounding)in->p[2], from, to);
        d[l] = register_bits(extended(v, m, is_signed(to)), whole);
    });
    set_poison(w, in->ops[0].reg, mask, bad, (uint8_t)((1u << whole) - 1));
    return RAN;
}

// --------------------------------------------------------------------------------------------------- to a float

// x, perhaps rounded to odd, as the bits of the type.
static uint64_t float_result(double x, type to, rounding r, int flags)
{
    if (flags & C_SAT) x = x > 0 ? x < 1 ? x : 1 : 0;
    if (flags & C_RELU && x <= 0) x = 0;
    if (to == T_F64) return bits_of_f64(x);
    uint64_t bits;
    float_format f = to == T_F16 ? FORMAT_F16 : to == T_BF16 ? FORMAT_BF16 : to == T_TF32 ? FORMAT_TF32 : FORMAT_F32;
    if (flags & C_SATFINITE && x == x) {
        bool overflow = isinf(x);
        uint32_t sign = signbit(x) ? 1u << (f.exponent + f.mantissa) : 0, infinity = ((1u << f.exponent) - 1)
                                                                                     << f.mantissa;
        uint32_t magnitude = overflow ? 0 : narrow(x, f, r, &overflow);
        bits = sign | (overflow ? infinity - 1 : magnitude);
    } else {
        bits = round_to(x, f, r,
                        to == T_TF32  ? NAN_F32 >> 13
                        : to == T_F32 ? NAN_F32
                        : to == T_F16 ? NAN_F16
                                      : NAN_BF16);
    }
    if (to == T_TF32) bits <<= 13;
    if (to == T_F32 && flags & C_FTZ && !(bits & 0x7f800000)) bits &= 0x80000000;
    return bits;
}

static outcome exec_float_to_float(warp *w, const inst *in, uint32_t mask)
{
    READ1();
    type from = (type)in->p[0], to = (type)in->p[3];
    uint64_t *d = DESTINATION(in);
    uint32_t bad = a.poisoned;
    bool to_integer = in->p[4];
    EACH_LANE(mask, {
        double x = source_value(a.v[l], from, in->p[1] & C_FTZ);
        if (to_integer) x = rounded(x, (rounding)in->p[2]);
        if (x != x && in->p[2] == RNA)
            d[l] = a.v[l] & 0xffffe000; // .rna.tf32 only cuts a NaN (H200)
        else
            d[l] = float_result(x, to, (rounding)in->p[2], in->p[1]);
    });
    DONE(bad);
}

// The commonest widenings and narrowings.
static inline uint32_t bf16_nearest(uint64_t x)
{
    uint32_t b = (uint32_t)x;
    return (b & 0x7fffffff) > 0x7f800000 ? NAN_BF16 : (b + 0x7fff + (b >> 16 & 1)) >> 16;
}

static inline uint32_t f16_nearest(uint64_t x)
{
    uint32_t b = (uint32_t)x, magnitude = b & 0x7fffffff;
    if (magnitude < 0x38800000 || magnitude >= 0x477ff000) return to_f16(f32_of(b), RN);
    return (b >> 16 & 0x8000) | (magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
}

EXEC1(exec_bf16_to_f32, uint64_t, uint32_t, x << 16)
EXEC1(exec_f16_to_f32, uint64_t, uint32_t, canonical_f32(f16_value(x)))
EXEC1(exec_f32_to_bf16, uint64_t, uint16_t, bf16_nearest(x))
EXEC1(exec_f32_to_f16, uint64_t, uint16_t, f16_nearest(x))
EXEC1(exec_s32_to_f32, int32_t, uint32_t, bits_of_f32((float)x))
EXEC1(exec_u32_to_f32, uint32_t, uint32_t, bits_of_f32((float)x))

static double integer_to_odd(uint64_t x, bool sign)
{
    bool negative = sign && (int64_t)x < 0;
    uint64_t m = negative ? 0 - x : x;
    double d;
    if (m >> 53) {
        d = (double)(m & ~(uint64_t)0x7ff);
        if (m & 0x7ff) d = f64_of(bits_of_f64(d) | 1);
    } else {
        d = (double)m;
    }
    return negative ? -d : d;
}

static double integer_to_f64(uint64_t x, bool sign, rounding r)
{
    bool negative = sign && (int64_t)x < 0;
    uint64_t m = negative ? 0 - x : x;
    double d = (double)m;
    if (m >> 53 && r != RN) {
        int shift = 11 - __builtin_clzll(m);
        bool rest = m & (((uint64_t)1 << shift) - 1), up = r == RP ? !negative : r == RM && negative;
        d = ldexp((double)((m >> shift) + (rest && up)), shift);
    }
    return negative ? -d : d;
}

static outcome exec_integer_to_float(warp *w, const inst *in, uint32_t mask)
{
    READ1();
    type from = (type)in->p[0], to = (type)in->p[3];
    int n = type_bytes(from);
    bool s = is_signed(from);
    uint64_t *d = DESTINATION(in);
    uint32_t bad = a.poisoned;
    EACH_LANE(mask, {
        uint64_t x = extended(a.v[l], n, s);
        if (to == T_F64)
            d[l] = bits_of_f64(integer_to_f64(x, s, (rounding)in->p[2]));
        else
            d[l] = float_result(integer_to_odd(x, s), to, (rounding)in->p[2], in->p[1]);
    });
    DONE(bad);
}

// ------------------------------------------------------------------------------------------------- packed results

// d, a, b: a becomes the upper element, b the lower one.
static outcome exec_pair(warp *w, const inst *in, uint32_t mask)
{
    READ2();
    uint64_t *d = DESTINATION(in);
    int reg = in->ops[0].reg;
    type to = in->p[3] == T_F16X2 ? T_F16 : T_BF16;
    bool plain = in->p[2] == RN && !in->p[1];
    bool bad = ((a.poisoned | b.poisoned | w->poisoned[reg]) & mask) != 0;
    uint8_t poison[LANES];
    for (int l = 0; l < LANES && bad; l++) poison[l] = (a.poison[l] ? 0xc : 0) | (b.poison[l] ? 3 : 0);
    if (plain && to == T_BF16)
        EACH_LANE(mask, d[l] = bf16_nearest(b.v[l]) | bf16_nearest(a.v[l]) << 16;);
    else if (plain)
        EACH_LANE(mask, d[l] = f16_nearest(b.v[l]) | f16_nearest(a.v[l]) << 16;);
    else
        EACH_LANE(mask, d[l] = float_result(f32_of(b.v[l]), to, (rounding)in->p[2], in->p[1]) |
                               float_result(f32_of(a.v[l]), to, (rounding)in->p[2], in->p[1]) << 16;);
    if (bad) set_poison_bytes(w, reg, mask, poison);
    return RAN;
}

// The formats of 8, 6 and 4 bits: no infinities but e5m2's; the last code is NaN in e4m3.
typedef struct {
    int exponent, mantissa, bias;
    uint32_t largest, nan; // nan 0: none
    int bits;              // of its container
} small_format;

static const small_format *small(type t)
{
    static const small_format e4m3 = {4, 3, 7, 0x7e, 0x7f, 8}, e5m2 = {5, 2, 15, 0x7b, 0x7f, 8},
                              e2m3 = {2, 3, 1, 0x1f, 0, 8}, e3m2 = {3, 2, 3, 0x1f, 0, 8}, e2m1 = {2, 1, 1, 7, 0, 4};
    switch (t) {
    case T_E4M3X2: return &e4m3;
    case T_E5M2X2: return &e5m2;
    case T_E2M3X2: return &e2m3;
    case T_E3M2X2: return &e3m2;
    case T_E2M1X2: return &e2m1;
    default: return NULL;
    }
}

// Round to nearest even, .satfinite.
static uint32_t encode_small(double x, const small_format *f, bool relu)
{
    if (x != x) return f->nan ? f->nan : f->largest;
    if (relu && x <= 0) return 0;
    uint32_t sign = signbit(x) ? 1u << (f->exponent + f->mantissa) : 0;
    double m = fabs(x);
    if (m == 0) return sign;
    int e = isinf(m) ? 1000 : ilogb(m);
    if (e > 100) return sign | f->largest;
    if (e < 1 - f->bias) e = 1 - f->bias;
    uint32_t q = (uint32_t)rint(ldexp(m, f->mantissa - e)), hidden = 1u << f->mantissa;
    uint32_t code = q < hidden ? q : ((uint32_t)(e + f->bias) << f->mantissa) + q - hidden;
    return sign | (code > f->largest ? f->largest : code);
}

static double decode_small(uint32_t code, const small_format *f)
{
    uint32_t magnitude = code & ((1u << (f->exponent + f->mantissa)) - 1), hidden = 1u << f->mantissa;
    bool negative = code >> (f->exponent + f->mantissa) & 1;
    if (f->nan && magnitude > f->largest)
        return f->bias == 15 && magnitude == 0x7c ? (negative ? -INFINITY : INFINITY) : NAN;
    int e = (int)(magnitude >> f->mantissa);
    double m = e ? ldexp(hidden | (magnitude & (hidden - 1)), e - f->bias - f->mantissa)
                 : ldexp(magnitude, 1 - f->bias - f->mantissa);
    return negative ? -m : m;
}

// .e4m3x2.f32 d, a, b and its kin: a to the upper element; or from one .f16x2.
static outcome exec_to_small(warp *w, const inst *in, uint32_t mask)
{
    READ1();
    lanes b = {.poisoned = 0};
    bool from_f32 = in->p[0] == T_F32, relu = in->p[1] & C_RELU;
    if (from_f32) read_lanes(&b, w, &in->ops[2], T_F32);
    const small_format *f = small((type)in->p[3]);
    uint64_t *d = DESTINATION(in);
    uint8_t poison[LANES] = {0};
    for (uint32_t m = mask; m; m &= m - 1) {
        int l = __builtin_ctz(m);
        double high = from_f32 ? f32_of(a.v[l]) : f16_value(a.v[l] >> 16),
               low = from_f32 ? f32_of(b.v[l]) : f16_value(a.v[l]);
        bool bad_high = from_f32 ? a.poison[l] : a.poison[l] & 0xc,
             bad_low = from_f32 ? b.poisoned >> l & 1 : a.poison[l] & 3;
        poison[l] = f->bits == 8 ? (uint8_t)(bad_high << 1 | bad_low) : bad_high | bad_low;
        d[l] = encode_small(low, f, relu) | encode_small(high, f, relu) << f->bits;
    }
    set_poison_bytes(w, in->ops[0].reg, mask, poison);
    return RAN;
}

static outcome exec_from_small(warp *w, const inst *in, uint32_t mask)
{
    READ1();
    const small_format *f = small((type)in->p[0]);
    uint64_t *d = DESTINATION(in);
    uint8_t poison[LANES] = {0};
    int flags = in->p[1];
    for (uint32_t m = mask; m; m &= m - 1) {
        int l = __builtin_ctz(m);
        uint32_t code = (uint32_t)a.v[l], ones = (1u << f->bits) - 1;
        uint8_t p = a.poison[l];
        poison[l] = f->bits == 8 ? (p & 2 ? 0xc : 0) | (p & 1 ? 3 : 0) : p & 1 ? 0xf : 0;
        d[l] = float_result(decode_small(code & ones, f), T_F16, RN, flags) |
               float_result(decode_small(code >> f->bits & ones, f), T_F16, RN, flags) << 16;
    }
    set_poison_bytes(w, in->ops[0].reg, mask, poison);
    return RAN;
}

// .ue8m0x2.f32 d, a, b: powers of two, 2^(code - 127), of values that are not negative.
static uint32_t encode_exponent(uint64_t x, bool up, bool *bad)
{
    uint32_t b = (uint32_t)x;
    if ((b & 0x7fffffff) > 0x7f800000) return 0xff;
    *bad = b >> 31 && b << 1;
    uint32_t m = b & 0x7fffffff, code = m >> 23;
    if (up && (code ? (m & 0x7fffff) != 0 : m > 0x400000)) code++;
    return code > 0xfe ? 0xfe : code;
}

static outcome exec_to_exponents(warp *w, const inst *in, uint32_t mask)
{
    READ2();
    uint64_t *d = DESTINATION(in);
    uint8_t poison[LANES] = {0};
    for (uint32_t m = mask; m; m &= m - 1) {
        int l = __builtin_ctz(m);
        bool high = false, low = false, up = in->p[2] == RP;
        d[l] = encode_exponent(b.v[l], up, &low) | encode_exponent(a.v[l], up, &high) << 8;
        poison[l] = (uint8_t)((high || a.poison[l]) << 1 | (low || b.poison[l]));
    }
    set_poison_bytes(w, in->ops[0].reg, mask, poison);
    return RAN;
}

static outcome exec_from_exponents(warp *w, const inst *in, uint32_t mask)
{
    READ1();
    uint64_t *d = DESTINATION(in);
    uint8_t poison[LANES] = {0};
    for (uint32_t m = mask; m; m &= m - 1) {
        int l = __builtin_ctz(m);
        uint32_t low = (uint32_t)a.v[l] & 0xff, high = (uint32_t)a.v[l] >> 8 & 0xff;
        low = low == 0xff ? NAN_BF16 : low ? low << 7 : 0x40; // 2^-127 is a subnormal
        high = high == 0xff ? NAN_BF16 : high ? high << 7 : 0x40;
        d[l] = low | high << 16;
        poison[l] = (a.poison[l] & 2 ? 0xc : 0) | (a.poison[l] & 1 ? 3 : 0);
    }
    set_poison_bytes(w, in->ops[0].reg, mask, poison);
    return RAN;
}

// PTX ISA, "cvt.pack": saturated a and b side by side; the 8-bit ones below the low half of c.
static outcome exec_pack(warp *w, const inst *in, uint32_t mask)
{
    READ2();
    lanes c = {.poisoned = 0};
    type to = (type)in->p[5];
    int bits = 8 * type_bytes(to);
    if (bits == 8) read_lanes(&c, w, &in->ops[3], T_B32);
    uint64_t *d = DESTINATION(in);
    uint32_t bad = a.poisoned | b.poisoned | c.poisoned, ones = (1u << bits) - 1;
    bool s = in->p[0] == T_S32;
    EACH_LANE(mask, {
        uint32_t high = (uint32_t)clamp_integer(extended(a.v[l], 4, s), s, to) & ones,
                 low = (uint32_t)clamp_integer(extended(b.v[l], 4, s), s, to) & ones;
        d[l] = low | (uint64_t)high << bits | (bits == 8 ? (c.v[l] & 0xffff) << 16 : 0);
    });
    DONE(bad);
}

// ----------------------------------------------------------------------------------------------------- decoders

// A register at least as wide as the type: narrow values live in wider registers.
static const char *wide_enough(const kernel *k, const operand *o, type t)
{
    if (o->kind == OP_SPECIAL)
        return type_bytes(t) == (special_is_64bit(o->special) ? 8 : 4) ? NULL : "a special register of another size";
    if (o->kind != OP_REG) return want_source(k, o, t);
    type r = k->reg_type[o->reg];
    return r != T_PRED && type_bytes(r) >= type_bytes(t) && !o->negated ? NULL
                                                                        : "a register of another size than the type";
}

static const char *same_kind(const kernel *k, const operand *o, type t, bool destination)
{
    if (destination && o->kind != OP_REG) return "a register is missing";
    if (t == T_E2M1X2 && o->kind == OP_REG && type_bytes(k->reg_type[o->reg]) != 1) return "a .b8 register is meant";
    return is_integer(t) || type_bytes(t) == 1 ? wide_enough(k, o, t)
           : destination                       ? want_register(k, o, t)
                                               : want_source(k, o, t);
}

static const char *packed_conversion(inst *in, const kernel *k, bool rounded_given)
{
    type to = (type)in->p[3], from = (type)in->p[0];
    int sources = from == T_F32 ? 2 : 1, flags = in->p[1];
    bool half_pair = to == T_F16X2 || to == T_BF16X2;
    in->klass = C_CONVERT;
    if (half_pair && from == T_F32) {
        if (!rounded_given || in->p[2] > RZ || flags & ~(C_RELU | C_SATFINITE)) return "modifiers";
        in->exec = exec_pair;
    } else if (small(to) && (from == T_F32 || (from == T_F16X2 && (to == T_E4M3X2 || to == T_E5M2X2)))) {
        if (!rounded_given || in->p[2] != RN || !(flags & C_SATFINITE) || flags & ~(C_RELU | C_SATFINITE))
            return "rn.satfinite is meant";
        if (to != T_E4M3X2 && to != T_E5M2X2 && !target_has(k, FEATURE_SM100AF)) return "needs sm_100a";
        in->exec = exec_to_small;
    } else if (to == T_F16X2 && small(from)) {
        if (!rounded_given || in->p[2] != RN || flags & ~C_RELU) return "rn is meant";
        if (from != T_E4M3X2 && from != T_E5M2X2 && !target_has(k, FEATURE_SM100AF)) return "needs sm_100a";
        in->exec = exec_from_small;
    } else if (to == T_UE8M0X2 && from == T_F32) {
        if (!target_has(k, FEATURE_SM100AF)) return "needs sm_100a";
        if (!rounded_given || (in->p[2] != RZ && in->p[2] != RP) || flags != C_SATFINITE)
            return "rz or rp and satfinite are meant";
        in->exec = exec_to_exponents;
    } else if (to == T_BF16X2 && from == T_UE8M0X2) {
        if (!target_has(k, FEATURE_SM100AF)) return "needs sm_100a";
        if (!rounded_given || in->p[2] != RN || flags) return "rn is meant";
        in->exec = exec_from_exponents;
    } else {
        return "types that the operation does not have";
    }
    if (in->nops != 1 + sources) return "wrong number of operands";
    const char *wrong = same_kind(k, &in->ops[0], to, true);
    for (int i = 1; i <= sources && !wrong; i++) wrong = same_kind(k, &in->ops[i], from, false);
    return wrong;
}

static int significant_bits(type t)
{
    switch (t) {
    case T_BF16: return 8;
    case T_F16: return 11;
    case T_F32: return 24;
    default: return 53;
    }
}

static bool is_float(type t)
{
    return t == T_F16 || t == T_BF16 || t == T_F32 || t == T_F64;
}

static const char *decode_cvt(inst *in, const kernel *k)
{
    static const char *const roundings[] = {"rn", "rz", "rm", "rp", "rna"}, *const integers[] = {"rni", "rzi", "rmi",
                                                                                                 "rpi"};
    static const char *const flags[] = {"ftz", "sat", "relu", "satfinite"};
    if (in->mods < 2) return "two types are meant";
    type from = last_type(in), to = type_from(in->mod[in->mods - 2]);
    bool floating = false, integral = false;
    for (int i = 0; i < in->mods - 2; i++) {
        bool known = false;
        for (int r = 0; r < 5; r++)
            if (!strcmp(in->mod[i], roundings[r]) && !floating && !integral) in->p[2] = r, known = floating = true;
        for (int r = 0; r < 4; r++)
            if (!strcmp(in->mod[i], integers[r]) && !floating && !integral) in->p[2] = r, known = integral = true;
        for (int f = 0; f < 4; f++)
            if (!strcmp(in->mod[i], flags[f]) && !(in->p[1] & 1 << f)) in->p[1] |= 1 << f, known = true;
        if (!known) return in->mod[i];
    }
    in->p[0] = from;
    in->p[3] = to;
    in->p[4] = integral;
    in->klass = C_CONVERT;
    if (to == T_F16X2 || to == T_BF16X2 || small(to) || to == T_UE8M0X2)
        return integral ? "modifiers" : packed_conversion(in, k, floating);
    if ((floating && in->p[2] == RNA) != (to == T_TF32 && in->p[2] == RNA && floating)) return "rna";
    int f = in->p[1];
    bool from_float = is_float(from), to_float = is_float(to) || to == T_TF32;
    if (!(from_float || is_integer(from)) || !(to_float || is_integer(to)))
        return "types that the operation does not have";
    if (f & (C_RELU | C_SATFINITE)) {
        bool ok = from == T_F32 && (to == T_F16 || to == T_BF16 || to == T_TF32) && floating &&
                  (in->p[2] <= RZ || (to == T_TF32 && !(f & C_RELU)));
        if (!ok || f & (C_FTZ | C_SAT)) return "relu or satfinite here";
    }
    if (f & C_FTZ && from != T_F32 && to != T_F32) return "ftz";
    bool bf16 = from == T_BF16 || to == T_BF16;
    if (bf16 && f & C_SAT) return "sat with bf16";
    if (bf16 && (type_bytes(from) == 1 || type_bytes(to) == 1)) return "types that the operation does not have";
    if (to == T_TF32) {
        if (from != T_F32 || !floating || (in->p[2] != RNA && in->p[2] > RZ) || f & (C_FTZ | C_SAT))
            return "modifiers of tf32";
        if (f & C_SATFINITE && in->p[2] != RNA && !target_has(k, FEATURE_SM100)) return "satfinite needs sm_100";
        in->exec = exec_float_to_float;
    } else if (!from_float && !to_float) {
        if (floating || integral || f & ~C_SAT) return "a rounding between integers";
        bool fits = type_bytes(to) > type_bytes(from) ? is_signed(to) || !is_signed(from) : to == from;
        if (f & C_SAT && fits) return "sat where every value fits";
        in->exec = exec_integer_to_integer;
    } else if (from_float && !to_float) {
        if (!integral) return "an integer rounding is missing";
        in->exec = exec_float_to_integer;
    } else if (!from_float) {
        if (!floating) return "a rounding is missing";
        in->exec = exec_integer_to_float;
        if (to == T_F32 && in->p[2] == RN && !f && from == T_S32) in->exec = exec_s32_to_f32;
        if (to == T_F32 && in->p[2] == RN && !f && from == T_U32) in->exec = exec_u32_to_f32;
    } else {
        bool narrows = significant_bits(to) < significant_bits(from) || (to == T_F16 && from == T_BF16);
        if (narrows && !floating) return "a rounding is missing";
        if (integral && to != from) return "an integer rounding between different types";
        if (floating && !narrows && (from != T_BF16 || to == T_BF16)) return "a rounding where nothing is rounded";
        in->exec = exec_float_to_float;
        if (!f && from == T_BF16 && to == T_F32) in->exec = exec_bf16_to_f32;
        if (!f && from == T_F16 && to == T_F32) in->exec = exec_f16_to_f32;
        if (!f && from == T_F32 && to == T_BF16 && in->p[2] == RN) in->exec = exec_f32_to_bf16;
        if (!f && from == T_F32 && to == T_F16 && in->p[2] == RN) in->exec = exec_f32_to_f16;
    }
    if (in->nops != 2) return "wrong number of operands";
    const char *wrong = same_kind(k, &in->ops[0], to, true);
    if (!wrong) wrong = same_kind(k, &in->ops[1], from, false);
    if (wrong) return wrong;
    in->p[5] = type_bytes(k->reg_type[in->ops[0].reg]);
    return NULL;
}

static const char *decode_pack(inst *in, const kernel *k)
{
    static const char *const meant =
        "cvt.pack.sat.{u16,s16}.s32 d, a, b or cvt.pack.sat.{u8,s8}.s32.b32 d, a, b, c is meant";
    if (in->mods < 3 || strcmp(in->mod[0], "sat")) return meant;
    type to = type_from(in->mod[1]), from = type_from(in->mod[2]);
    bool wide = to == T_U16 || to == T_S16, narrow = to == T_U8 || to == T_S8;
    if ((!wide && !narrow) || from != T_S32 || in->mods != 3 + narrow || (narrow && strcmp(in->mod[3], "b32")) ||
        in->nops != 3 + narrow)
        return meant;
    in->p[0] = from;
    in->p[3] = T_B32;
    in->p[5] = to;
    in->klass = C_CONVERT;
    in->exec = exec_pack;
    return same_types(in, k, T_B32, 2 + narrow);
}

const inst_row convert_rows[] = {
    {"cvt", decode_cvt},
    {"cvt.pack", decode_pack},
    {NULL, NULL},
};
