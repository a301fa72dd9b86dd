// Arithmetic, logic, comparison, selection, moves. PTX ISA, "Instructions": the sections named below.
//
// A decoder finds the function for the operation and type; the function runs over the lanes of a warp.
#include "float.h"
#include "lanes.h"
#include "sched.h"

__extension__ typedef __int128 int128;
__extension__ typedef unsigned __int128 uint128;

// ---------------------------------------------------------------------------------------------------- operands

const uint8_t clean_lanes[LANES];

uint64_t immediate_bits(const operand *o, type t)
{
    uint64_t bits = (uint64_t)o->imm;
    switch (t) {
    case T_F32:
    case T_TF32: return o->literal == LITERAL_F64 ? bits_of_f32((float)f64_of(bits)) : (uint32_t)bits;
    case T_F64: return o->literal == LITERAL_F32 ? bits_of_f64(f32_of(bits)) : bits;
    case T_PRED: return bits != 0;
    default: break;
    }
    int bytes = type_bytes(t);
    return bytes >= 8 || !bytes ? bits : bits & (((uint64_t)1 << 8 * bytes) - 1);
}

uint64_t symbol_address(warp *w, const operand *o, int lane)
{
    const call_frame *f = w->frames[lane];
    const variable *v = &(f ? f->function : w->cta->cluster->grid->kernel)->variables[o->symbol];
    uint64_t address = (uint64_t)o->imm;
    switch (v->space) {
    case SPACE_SHARED:
        return address + ((uint64_t)w->cta->rank << 24 | (v->external ? w->cta->dynamic_offset : v->offset));
    case SPACE_LOCAL: return address + (f ? f->base : 0) + v->offset;
    default: return address + v->offset;
    }
}

void read_lanes_slowly(lanes *s, warp *w, const operand *o, type t)
{
    s->v = s->buffer;
    s->poison = clean_lanes;
    s->poisoned = 0;
    uint64_t imm = o->kind == OP_IMM ? immediate_bits(o, t) : 0;
    for (int l = 0; l < LANES; l++) {
        if (o->kind == OP_SPECIAL)
            s->buffer[l] = special_register(w, o->special, l);
        else if (o->kind == OP_ADDRESS)
            s->buffer[l] = symbol_address(w, o, l);
        else
            s->buffer[l] = imm;
    }
}

uint64_t read_operand(warp *w, const operand *o, int lane, type t, uint8_t *poison)
{
    if (o->kind == OP_REG) {
        size_t at = (size_t)o->reg * LANES + (size_t)lane;
        if (poison) *poison = w->poison[at];
        return w->regs[at];
    }
    if (poison) *poison = 0;
    if (o->kind == OP_SPECIAL) return special_register(w, o->special, lane);
    if (o->kind == OP_ADDRESS) return symbol_address(w, o, lane);
    return immediate_bits(o, t);
}

void write_register(warp *w, int reg, int lane, uint64_t value, type t, uint8_t poison)
{
    int bytes = t == T_PRED ? 1 : type_bytes(t);
    if (t == T_PRED)
        value &= 1;
    else if (bytes < 8)
        value &= ((uint64_t)1 << 8 * bytes) - 1;
    size_t at = (size_t)reg * LANES + (size_t)lane;
    w->regs[at] = value;
    w->poison[at] = poison;
    uint32_t bit = 1u << lane;
    w->poisoned[reg] = poison ? w->poisoned[reg] | bit : w->poisoned[reg] & ~bit;
}

bool read_address(warp *w, const inst *in, const operand *o, int lane, uint64_t *address)
{
    if (o->kind == OP_BRACKET) o = &o->items[0];
    if (o->symbol >= 0) {
        *address = symbol_address(w, o, lane);
        return true;
    }
    if (o->reg < 0) {
        *address = (uint64_t)o->imm;
        return true;
    }
    size_t at = (size_t)o->reg * LANES + (size_t)lane;
    if (w->poison[at]) {
        finding(w->cta->cluster, (place){w, in, lane}, "poison", "the address is undefined");
        return false;
    }
    uint64_t base = w->regs[at] + (uint64_t)o->imm;
    const cluster *c = w->cta->cluster;
    *address = type_bytes(c->grid->kernel->reg_type[o->reg]) == 4 ? (uint32_t)base : base;
    return true;
}

// ------------------------------------------------------------------------------------------------- for decoders

static int register_bytes(const kernel *k, int reg)
{
    return k->reg_type[reg] == T_PRED ? 0 : type_bytes(k->reg_type[reg]);
}

const char *want_register(const kernel *k, const operand *o, type t)
{
    if (o->kind != OP_REG) return "a register is missing";
    if (o->negated) return "a negated operand";
    if (register_bytes(k, o->reg) != (t == T_PRED ? 0 : type_bytes(t)))
        return "a register of another size than the type";
    return NULL;
}

const char *want_source(const kernel *k, const operand *o, type t)
{
    if (o->kind == OP_IMM) return type_bytes(t) > 8 ? "an immediate of this type" : NULL;
    if (o->kind == OP_SPECIAL) return "a special register: only mov and cvt take one";
    return want_register(k, o, t);
}

const char *want_predicate(const kernel *k, const operand *o)
{
    if (o->kind == OP_IMM) return NULL;
    return o->kind == OP_REG && k->reg_type[o->reg] == T_PRED ? NULL : "a predicate is missing";
}

const char *same_types(const inst *in, const kernel *k, type t, int sources)
{
    if (in->nops != 1 + sources) return "wrong number of operands";
    const char *wrong = want_register(k, &in->ops[0], t);
    for (int i = 1; i <= sources && !wrong; i++) wrong = want_source(k, &in->ops[i], t);
    return wrong;
}

type last_type(const inst *in)
{
    return in->mods ? type_from(in->mod[in->mods - 1]) : T_NONE;
}

const char *flags_and_rounding(inst *in, int types, int allowed, const char *roundings)
{
    static const struct {
        const char *name;
        int flag;
    } flags[] = {{"ftz", FTZ},         {"sat", SAT},   {"NaN", PROPAGATE_NAN}, {"abs", ABS},
                 {"xorsign", XORSIGN}, {"relu", RELU}, {"approx", APPROX},     {"full", FULL}};
    static const char *const modes[] = {"rn", "rz", "rm", "rp"};
    in->p[1] = in->p[2] = 0;
    bool rounded = false;
    for (int i = 0; i < in->mods - types; i++) {
        bool known = false;
        for (size_t f = 0; f < sizeof flags / sizeof *flags; f++)
            if (!strcmp(in->mod[i], flags[f].name) && allowed & flags[f].flag && !(in->p[1] & flags[f].flag)) {
                in->p[1] |= flags[f].flag;
                known = true;
            }
        for (int r = 0; r < 4; r++)
            if (!strcmp(in->mod[i], modes[r]) && strstr(roundings, modes[r]) && !rounded) {
                in->p[2] = r;
                known = rounded = true;
            }
        if (!known) return in->mod[i];
    }
    in->p[4] = rounded;
    return NULL;
}

// ------------------------------------------------------------------------------- Integer Arithmetic Instructions

EXEC2(add_16, uint16_t, uint16_t, x + y)
EXEC2(add_32, uint32_t, uint32_t, x + y)
EXEC2(add_64, uint64_t, uint64_t, x + y)
EXEC2(sub_16, uint16_t, uint16_t, x - y)
EXEC2(sub_32, uint32_t, uint32_t, x - y)
EXEC2(sub_64, uint64_t, uint64_t, x - y)

static inline int32_t saturate(int64_t v)
{
    return v > INT32_MAX ? INT32_MAX : v < INT32_MIN ? INT32_MIN : (int32_t)v;
}
EXEC2(add_sat, int32_t, uint32_t, saturate((int64_t)x + y))
EXEC2(sub_sat, int32_t, uint32_t, saturate((int64_t)x - y))

EXEC2(mul_lo_16, uint32_t, uint16_t, x *y)
EXEC2(mul_lo_32, uint32_t, uint32_t, x *y)
EXEC2(mul_lo_64, uint64_t, uint64_t, x *y)
EXEC2(mul_hi_u16, uint16_t, uint16_t, (uint32_t)x *y >> 16)
EXEC2(mul_hi_s16, int16_t, uint16_t, (int32_t)x *y >> 16)
EXEC2(mul_hi_u32, uint32_t, uint32_t, (uint64_t)x *y >> 32)
EXEC2(mul_hi_s32, int32_t, uint32_t, (int64_t)x *y >> 32)
EXEC2(mul_hi_u64, uint64_t, uint64_t, (uint128)x *y >> 64)
EXEC2(mul_hi_s64, int64_t, uint64_t, (int128)x *y >> 64)
EXEC2(mul_wide_u16, uint16_t, uint32_t, (uint32_t)x *y)
EXEC2(mul_wide_s16, int16_t, uint32_t, (int32_t)x *y)
EXEC2(mul_wide_u32, uint32_t, uint64_t, (uint64_t)x *y)
EXEC2(mul_wide_s32, int32_t, uint64_t, (int64_t)x *y)

EXEC3(mad_lo_16, uint32_t, uint32_t, uint16_t, x *y + z)
EXEC3(mad_lo_32, uint32_t, uint32_t, uint32_t, x *y + z)
EXEC3(mad_lo_64, uint64_t, uint64_t, uint64_t, x *y + z)
EXEC3(mad_hi_u16, uint16_t, uint16_t, uint16_t, ((uint32_t)x * y >> 16) + z)
EXEC3(mad_hi_s16, int16_t, uint16_t, uint16_t, (uint32_t)((int32_t)x * y >> 16) + z)
EXEC3(mad_hi_u32, uint32_t, uint32_t, uint32_t, ((uint64_t)x * y >> 32) + z)
EXEC3(mad_hi_s32, int32_t, uint32_t, uint32_t, (uint32_t)((int64_t)x * y >> 32) + z)
EXEC3(mad_hi_sat, int32_t, int32_t, uint32_t, saturate(((int64_t)x * y >> 32) + z))
EXEC3(mad_hi_u64, uint64_t, uint64_t, uint64_t, (uint64_t)((uint128)x * y >> 64) + z)
EXEC3(mad_hi_s64, int64_t, uint64_t, uint64_t, (uint64_t)((int128)x * y >> 64) + z)
EXEC3(mad_wide_u16, uint16_t, uint32_t, uint32_t, (uint32_t)x *y + z)
EXEC3(mad_wide_s16, int16_t, uint32_t, uint32_t, (uint32_t)((int32_t)x * y) + z)
EXEC3(mad_wide_u32, uint32_t, uint64_t, uint64_t, (uint64_t)x *y + z)
EXEC3(mad_wide_s32, int32_t, uint64_t, uint64_t, (uint64_t)((int64_t)x * y) + z)

static inline uint32_t low24(uint32_t x, bool is_signed)
{
    return is_signed ? (uint32_t)((int32_t)(x << 8) >> 8) : x & 0xffffff;
}
static inline uint64_t product24(uint32_t x, uint32_t y, bool is_signed)
{
    return is_signed ? (uint64_t)((int64_t)(int32_t)low24(x, true) * (int32_t)low24(y, true))
                     : (uint64_t)low24(x, false) * low24(y, false);
}
EXEC2(mul24_lo_u, uint32_t, uint32_t, product24(x, y, false))
EXEC2(mul24_lo_s, uint32_t, uint32_t, product24(x, y, true))
EXEC2(mul24_hi_u, uint32_t, uint32_t, product24(x, y, false) >> 16)
EXEC2(mul24_hi_s, uint32_t, uint32_t, product24(x, y, true) >> 16)
EXEC3(mad24_lo_u, uint32_t, uint32_t, uint32_t, product24(x, y, false) + z)
EXEC3(mad24_lo_s, uint32_t, uint32_t, uint32_t, product24(x, y, true) + z)
EXEC3(mad24_hi_u, uint32_t, uint32_t, uint32_t, (product24(x, y, false) >> 16) + z)
EXEC3(mad24_hi_s, uint32_t, uint32_t, uint32_t, (product24(x, y, true) >> 16) + z)

// "Division by zero yields an unspecified, machine-specific value": undefined here.
#define EXEC_DIVIDE(name, T, R, ...)                              \
    static outcome name(warp *w, const inst *in, uint32_t mask)   \
    {                                                             \
        READ2();                                                  \
        uint64_t *d = DESTINATION(in);                            \
        uint32_t bad = a.poisoned | b.poisoned;                   \
        EACH_LANE(                                                \
            mask, T x = (T)a.v[l]; T y = (T)b.v[l]; if (y == 0) { \
                bad |= 1u << l;                                   \
                d[l] = (uint64_t)(R) - 1;                         \
            } else d[l] = (uint64_t)(R)(__VA_ARGS__););           \
        DONE(bad);                                                \
    }
EXEC_DIVIDE(div_u16, uint16_t, uint16_t, x / y)
EXEC_DIVIDE(div_s16, int16_t, uint16_t, x / y)
EXEC_DIVIDE(div_u32, uint32_t, uint32_t, x / y)
EXEC_DIVIDE(div_s32, int32_t, uint32_t, (int64_t)x / y)
EXEC_DIVIDE(div_u64, uint64_t, uint64_t, x / y)
EXEC_DIVIDE(div_s64, int64_t, uint64_t, y == -1 ? (int64_t)(0 - (uint64_t)x) : x / y)
EXEC_DIVIDE(rem_u16, uint16_t, uint16_t, x % y)
EXEC_DIVIDE(rem_s16, int16_t, uint16_t, x % y)
EXEC_DIVIDE(rem_u32, uint32_t, uint32_t, x % y)
EXEC_DIVIDE(rem_s32, int32_t, uint32_t, (int64_t)x % y)
EXEC_DIVIDE(rem_u64, uint64_t, uint64_t, x % y)
EXEC_DIVIDE(rem_s64, int64_t, uint64_t, y == -1 ? 0 : x % y)

EXEC3(sad_u16, uint16_t, uint16_t, uint16_t, z + (x < y ? y - x : x - y))
EXEC3(sad_s16, int16_t, uint16_t, uint16_t, z + (x < y ? y - x : x - y))
EXEC3(sad_u32, uint32_t, uint32_t, uint32_t, z + (x < y ? y - x : x - y))
EXEC3(sad_s32, int32_t, uint32_t, uint32_t, z + (x < y ? (uint32_t)y - (uint32_t)x : (uint32_t)x - (uint32_t)y))
EXEC3(sad_u64, uint64_t, uint64_t, uint64_t, z + (x < y ? y - x : x - y))
EXEC3(sad_s64, int64_t, uint64_t, uint64_t, z + (x < y ? (uint64_t)y - (uint64_t)x : (uint64_t)x - (uint64_t)y))

EXEC1(abs_s16, int16_t, uint16_t, x < 0 ? -x : x)
EXEC1(abs_s32, int32_t, uint32_t, x < 0 ? 0 - (uint32_t)x : (uint32_t)x)
EXEC1(abs_s64, int64_t, uint64_t, x < 0 ? 0 - (uint64_t)x : (uint64_t)x)
EXEC1(neg_s16, uint16_t, uint16_t, 0 - x)
EXEC1(neg_s32, uint32_t, uint32_t, 0 - x)
EXEC1(neg_s64, uint64_t, uint64_t, 0 - x)

#define MIN(x, y) ((x) < (y) ? (x) : (y))
#define MAX(x, y) ((x) < (y) ? (y) : (x))
EXEC2(min_u16, uint16_t, uint16_t, MIN(x, y))
EXEC2(min_s16, int16_t, uint16_t, MIN(x, y))
EXEC2(min_u32, uint32_t, uint32_t, MIN(x, y))
EXEC2(min_s32, int32_t, uint32_t, MIN(x, y))
EXEC2(min_u64, uint64_t, uint64_t, MIN(x, y))
EXEC2(min_s64, int64_t, uint64_t, MIN(x, y))
EXEC2(max_u16, uint16_t, uint16_t, MAX(x, y))
EXEC2(max_s16, int16_t, uint16_t, MAX(x, y))
EXEC2(max_u32, uint32_t, uint32_t, MAX(x, y))
EXEC2(max_s32, int32_t, uint32_t, MAX(x, y))
EXEC2(max_u64, uint64_t, uint64_t, MAX(x, y))
EXEC2(max_s64, int64_t, uint64_t, MAX(x, y))
EXEC2(min_relu_s32, int32_t, uint32_t, MAX(MIN(x, y), 0))
EXEC2(max_relu_s32, int32_t, uint32_t, MAX(MAX(x, y), 0))

EXEC1(popc_32, uint32_t, uint32_t, __builtin_popcount(x))
EXEC1(popc_64, uint64_t, uint32_t, __builtin_popcountll(x))
EXEC1(clz_32, uint32_t, uint32_t, x ? __builtin_clz(x) : 32)
EXEC1(clz_64, uint64_t, uint32_t, x ? __builtin_clzll(x) : 64)

static inline uint32_t find_bit(uint64_t x, int width, bool shift_amount)
{
    if (!x) return ~0u;
    int at = 63 - __builtin_clzll(x);
    return (uint32_t)(shift_amount ? width - 1 - at : at);
}
EXEC1(bfind_u32, uint32_t, uint32_t, find_bit(x, 32, in->p[5]))
EXEC1(bfind_s32, int32_t, uint32_t, find_bit((uint32_t)(x < 0 ? ~x : x), 32, in->p[5]))
EXEC1(bfind_u64, uint64_t, uint32_t, find_bit(x, 64, in->p[5]))
EXEC1(bfind_s64, int64_t, uint32_t, find_bit((uint64_t)(x < 0 ? ~x : x), 64, in->p[5]))

static inline uint64_t reverse_bits(uint64_t x)
{
    x = (x >> 1 & 0x5555555555555555) | (x & 0x5555555555555555) << 1;
    x = (x >> 2 & 0x3333333333333333) | (x & 0x3333333333333333) << 2;
    x = (x >> 4 & 0x0f0f0f0f0f0f0f0f) | (x & 0x0f0f0f0f0f0f0f0f) << 4;
    return __builtin_bswap64(x);
}
EXEC1(brev_32, uint32_t, uint32_t, reverse_bits(x) >> 32)
EXEC1(brev_64, uint64_t, uint64_t, reverse_bits(x))

// PTX ISA, "fns": the n-th set bit from base, downwards when n is negative; n = 0 asks about base itself.
static inline uint32_t nth_set(uint32_t m, uint32_t base, int32_t n)
{
    if (base > 31) return ~0u;
    if (n == 0) return m >> base & 1 ? base : ~0u;
    int step = n > 0 ? 1 : -1, left = n > 0 ? n : -n;
    for (int at = (int)base; at >= 0 && at < 32; at += step)
        if (m >> at & 1 && --left == 0) return (uint32_t)at;
    return ~0u;
}
EXEC3(fns_32, uint32_t, int32_t, uint32_t, nth_set(x, y, z))

// PTX ISA, "bmsk" and "szext": clamp takes large values as they are, wrap modulo 32.
static inline uint32_t bit_mask(uint32_t at, uint32_t width, bool wrap)
{
    if (wrap) at &= 31, width &= 31;
    if (at > 31 || !width) return 0;
    uint64_t m = width > 31 ? 0xffffffff : ((uint64_t)1 << width) - 1;
    return (uint32_t)(m << at);
}
EXEC2(bmsk_32, uint32_t, uint32_t, bit_mask(x, y, in->p[5]))

static inline uint32_t extend(uint32_t x, uint32_t n, bool wrap, bool is_signed)
{
    if (wrap) n &= 31;
    if (n > 31) return x;
    if (!n) return 0;
    return is_signed ? (uint32_t)((int32_t)(x << (32 - n)) >> (32 - n)) : x & ((1u << n) - 1);
}
EXEC2(szext_u32, uint32_t, uint32_t, extend(x, y, in->p[5], false))
EXEC2(szext_s32, uint32_t, uint32_t, extend(x, y, in->p[5], true))

// PTX ISA, "dp4a" and "dp2a". p[5]: bit 0 a signed, bit 1 b signed, bit 2 the upper half of b (dp2a).
static inline uint32_t dot4(uint32_t x, uint32_t y, uint32_t z, int how)
{
    for (int i = 0; i < 32; i += 8) {
        uint32_t a = x >> i & 0xff, b = y >> i & 0xff;
        if (how & 1) a = (uint32_t)(int8_t)a;
        if (how & 2) b = (uint32_t)(int8_t)b;
        z += a * b;
    }
    return z;
}
static inline uint32_t dot2(uint32_t x, uint32_t y, uint32_t z, int how)
{
    if (how & 4) y >>= 16;
    for (int i = 0; i < 2; i++) {
        uint32_t a = x >> 16 * i & 0xffff, b = y >> 8 * i & 0xff;
        if (how & 1) a = (uint32_t)(int16_t)a;
        if (how & 2) b = (uint32_t)(int8_t)b;
        z += a * b;
    }
    return z;
}
EXEC3(dp4a, uint32_t, uint32_t, uint32_t, dot4(x, y, z, in->p[5]))
EXEC3(dp2a, uint32_t, uint32_t, uint32_t, dot2(x, y, z, in->p[5]))

#define HALVES(F) ((uint64_t)(uint16_t)(F(x, y)) | (uint64_t)(uint16_t)(F(x >> 16, y >> 16)) << 16)
#define ADD16(x, y) ((x) + (y))
#define MINU16(x, y) MIN((uint16_t)(x), (uint16_t)(y))
#define MAXU16(x, y) MAX((uint16_t)(x), (uint16_t)(y))
#define MINS16(x, y) MIN((int16_t)(x), (int16_t)(y))
#define MAXS16(x, y) MAX((int16_t)(x), (int16_t)(y))
#define MINS16_RELU(x, y) MAX(MINS16(x, y), 0)
#define MAXS16_RELU(x, y) MAX(MAXS16(x, y), 0)
PACKED2(add_16x2, 2, HALVES(ADD16))
PACKED2(min_u16x2, 2, HALVES(MINU16))
PACKED2(max_u16x2, 2, HALVES(MAXU16))
PACKED2(min_s16x2, 2, HALVES(MINS16))
PACKED2(max_s16x2, 2, HALVES(MAXS16))
PACKED2(min_relu_s16x2, 2, HALVES(MINS16_RELU))
PACKED2(max_relu_s16x2, 2, HALVES(MAXS16_RELU))

// ------------------------------------------------------------------- Extended-Precision Integer Arithmetic
// Instructions

// add.cc, addc, sub.cc, subc, mad.cc, madc: the carry is a lane's CC.CF. p[5]: what to do with it.
enum { WRITES_CARRY = 1, READS_CARRY = 2, SUBTRACTS = 4, HIGH = 8, MULTIPLIES = 16 };

static uint64_t high_product(uint64_t x, uint64_t y, type t)
{
    switch (t) {
    case T_U32: return (x * y) >> 32;
    case T_S32: return (uint32_t)((uint64_t)((int64_t)(int32_t)x * (int32_t)y) >> 32);
    case T_U64: return (uint64_t)((uint128)x * y >> 64);
    default: return (uint64_t)((int128)(int64_t)x * (int64_t)y >> 64);
    }
}

static outcome exec_carry(warp *w, const inst *in, uint32_t mask)
{
    sched_state *s = w->sched;
    READ2();
    lanes c = {.v = a.v, .poisoned = 0};
    int how = in->p[5];
    if (how & MULTIPLIES) read_lanes(&c, w, &in->ops[3], (type)in->p[0]);
    uint64_t *d = DESTINATION(in), width = (uint64_t)type_bytes((type)in->p[0]) * 8;
    uint64_t ones = width == 64 ? UINT64_MAX : ((uint64_t)1 << width) - 1;
    uint32_t bad = (a.poisoned | b.poisoned | c.poisoned) & mask;
    if (how & READS_CARRY) bad |= s->carry_poisoned & mask;
    for (uint32_t m = mask; m; m &= m - 1) {
        int l = __builtin_ctz(m);
        uint64_t x = a.v[l], y = b.v[l], carry = how & READS_CARRY ? s->carry >> l & 1 : 0;
        if (how & MULTIPLIES) {
            x = how & HIGH ? high_product(x, y, (type)in->p[0]) : (x * y) & ones;
            y = c.v[l];
        }
        // Subtraction borrows: the flag is the borrow.
        uint128 r = how & SUBTRACTS ? (uint128)x - y - carry : (uint128)x + y + carry;
        d[l] = (uint64_t)r & ones;
        if (how & WRITES_CARRY) {
            uint32_t out = (uint32_t)(r >> width) & 1;
            s->carry = (s->carry & ~(1u << l)) | out << l;
        }
    }
    if (how & WRITES_CARRY) s->carry_poisoned = (s->carry_poisoned & ~mask) | bad;
    DONE(bad);
}

// ---------------------------------------------------------------------- Logic and Shift Instructions, bit fields

// An undefined byte of a bit mask, and back: any undefined bit makes its byte undefined.
static inline uint64_t expand(uint8_t p)
{
    uint64_t m = 0;
    for (int i = 0; i < 8; i++)
        if (p >> i & 1) m |= (uint64_t)0xff << 8 * i;
    return m;
}
static inline uint8_t collapse(uint64_t m)
{
    uint8_t p = 0;
    for (int i = 0; i < 8; i++)
        if (m >> 8 * i & 0xff) p |= (uint8_t)(1u << i);
    return p;
}

// The value by one expression, and the undefined bits, when there are any, by another: ux, uy, uz are the undefined
// bits of x, y, z.
#define BITS2(name, T, value, undefined)                                                                  \
    static outcome name(warp *w, const inst *in, uint32_t mask)                                           \
    {                                                                                                     \
        READ2();                                                                                          \
        uint64_t *d = DESTINATION(in);                                                                    \
        uint8_t poison[LANES];                                                                            \
        bool bad = ((a.poisoned | b.poisoned | w->poisoned[in->ops[0].reg]) & mask) != 0;                 \
        if (bad)                                                                                          \
            for (int l = 0; l < LANES; l++) {                                                             \
                T x = (T)a.v[l], y = (T)b.v[l], ux = (T)expand(a.poison[l]), uy = (T)expand(b.poison[l]); \
                (void)x, (void)y, (void)uy;                                                               \
                poison[l] = collapse((T)(undefined));                                                     \
            }                                                                                             \
        EACH_LANE(mask, T x = (T)a.v[l]; T y = (T)b.v[l]; d[l] = (T)(value););                            \
        if (bad) set_poison_bytes(w, in->ops[0].reg, mask, poison);                                       \
        return RAN;                                                                                       \
    }
#define LOGIC(width, T)                                            \
    BITS2(and_##width, T, x &y, (ux | uy) & (ux | x) & (uy | y))   \
    BITS2(or_##width, T, x | y, (ux | uy) & (ux | ~x) & (uy | ~y)) \
    BITS2(xor_##width, T, x ^ y, ux | uy)
LOGIC(16, uint16_t)
LOGIC(32, uint32_t)
LOGIC(64, uint64_t)
PACKED1(not_16, 1, ~x & 0xffff)
PACKED1(not_32, 1, ~x & 0xffffffff)
PACKED1(not_64, 1, ~x)
EXEC1(cnot_16, uint16_t, uint16_t, x == 0)
EXEC1(cnot_32, uint32_t, uint32_t, x == 0)
EXEC1(cnot_64, uint64_t, uint64_t, x == 0)

// Predicates: false & anything is false, however undefined.
#define LOGIC_PRED(name, value, decides)                                                              \
    static outcome name(warp *w, const inst *in, uint32_t mask)                                       \
    {                                                                                                 \
        READ2();                                                                                      \
        uint64_t *d = DESTINATION(in), na = in->ops[1].negated, nb = in->ops[2].negated;              \
        uint32_t bad = (a.poisoned | b.poisoned) & mask;                                              \
        for (uint32_t m = bad; m; m &= m - 1) {                                                       \
            int l = __builtin_ctz(m);                                                                 \
            uint64_t x = a.v[l] ^ na, y = b.v[l] ^ nb;                                                \
            if ((!(a.poisoned >> l & 1) && (decides(x))) || (!(b.poisoned >> l & 1) && (decides(y)))) \
                bad &= ~(1u << l);                                                                    \
        }                                                                                             \
        EACH_LANE(mask, uint64_t x = a.v[l] ^ na; uint64_t y = b.v[l] ^ nb; d[l] = (value););         \
        set_poison(w, in->ops[0].reg, mask, bad, 1);                                                  \
        return RAN;                                                                                   \
    }
#define IF_FALSE(x) ((x) == 0)
#define IF_TRUE(x) ((x) == 1)
#define NEVER(x) ((void)(x), false)
LOGIC_PRED(and_pred, x &y, IF_FALSE)
LOGIC_PRED(or_pred, x | y, IF_TRUE)
LOGIC_PRED(xor_pred, x ^ y, NEVER)
EXEC1(not_pred, uint64_t, uint64_t, (x & 1) ^ 1 ^ (uint64_t)in->ops[1].negated)

// PTX ISA, "lop3"
static inline uint32_t lookup3(uint32_t x, uint32_t y, uint32_t z, int table)
{
    uint32_t r = 0;
    for (int i = 0; i < 8; i++)
        if (table >> i & 1) r |= (i & 4 ? x : ~x) & (i & 2 ? y : ~y) & (i & 1 ? z : ~z);
    return r;
}

static outcome exec_lop3(warp *w, const inst *in, uint32_t mask)
{
    READ3();
    const operand *to = in->ops[0].kind == OP_PAIR ? &in->ops[0].items[0] : &in->ops[0];
    uint64_t value[LANES];
    uint8_t poison[LANES];
    for (int l = 0; l < LANES; l++) {
        value[l] = lookup3((uint32_t)a.v[l], (uint32_t)b.v[l], (uint32_t)c.v[l], in->p[5]);
        poison[l] = a.poison[l] | b.poison[l] | c.poison[l];
    }
    if (in->ops[0].kind == OP_PAIR) { // p = (d != 0) BoolOp q
        const operand *p = &in->ops[0].items[1];
        lanes q;
        read_lanes(&q, w, &in->ops[5], T_PRED);
        uint8_t undefined[LANES];
        uint64_t result[LANES];
        for (int l = 0; l < LANES; l++) {
            uint64_t other = (q.v[l] & 1) ^ in->ops[5].negated, any = value[l] != 0;
            result[l] = in->p[6] ? any | other : any & other;
            undefined[l] = poison[l] || q.poison[l];
        }
        if (p->kind == OP_REG) {
            EACH_LANE(mask, w->regs[(size_t)p->reg * LANES + (size_t)l] = result[l];);
            set_poison_bytes(w, p->reg, mask, undefined);
        }
    }
    if (to->kind == OP_REG) {
        EACH_LANE(mask, w->regs[(size_t)to->reg * LANES + (size_t)l] = value[l];);
        set_poison_bytes(w, to->reg, mask, poison);
    }
    return RAN;
}

// Shifts: the amount is unsigned 32 bits and clamped.
#define SHIFT(name, T, U, width, value, filled)                                                                       \
    static outcome name(warp *w, const inst *in, uint32_t mask)                                                       \
    {                                                                                                                 \
        READ1();                                                                                                      \
        lanes b;                                                                                                      \
        read_lanes(&b, w, &in->ops[2], T_U32);                                                                        \
        uint64_t *d = DESTINATION(in);                                                                                \
        uint8_t poison[LANES];                                                                                        \
        bool bad = ((a.poisoned | b.poisoned | w->poisoned[in->ops[0].reg]) & mask) != 0;                             \
        if (bad)                                                                                                      \
            for (int l = 0; l < LANES; l++) {                                                                         \
                T x = (T)expand(a.poison[l]);                                                                         \
                uint32_t n = (uint32_t)b.v[l];                                                                        \
                poison[l] =                                                                                           \
                    b.poison[l] ? (uint8_t)((1u << width / 8) - 1) : collapse((U)(n < width ? (value) : (filled)));   \
            }                                                                                                         \
        EACH_LANE(mask, T x = (T)a.v[l]; uint32_t n = (uint32_t)b.v[l]; d[l] = (U)(n < width ? (value) : (filled));); \
        if (bad) set_poison_bytes(w, in->ops[0].reg, mask, poison);                                                   \
        return RAN;                                                                                                   \
    }
SHIFT(shl_16, uint16_t, uint16_t, 16, x << n, 0)
SHIFT(shl_32, uint32_t, uint32_t, 32, x << n, 0)
SHIFT(shl_64, uint64_t, uint64_t, 64, x << n, 0)
SHIFT(shr_u16, uint16_t, uint16_t, 16, x >> n, 0)
SHIFT(shr_u32, uint32_t, uint32_t, 32, x >> n, 0)
SHIFT(shr_u64, uint64_t, uint64_t, 64, x >> n, 0)
SHIFT(shr_s16, int16_t, uint16_t, 16, x >> n, x >> 15)
SHIFT(shr_s32, int32_t, uint32_t, 32, x >> n, x >> 31)
SHIFT(shr_s64, int64_t, uint64_t, 64, x >> n, x >> 63)

// Three sources, the last one of 32 bits; x, y and their undefined bits go through the same function.
#define FIELD3(name, T, undefined_if, ...)                                                                       \
    static outcome name(warp *w, const inst *in, uint32_t mask)                                                  \
    {                                                                                                            \
        READ3();                                                                                                 \
        uint64_t *d = DESTINATION(in);                                                                           \
        uint8_t poison[LANES], whole = (uint8_t)((1u << (sizeof(T) - 1)) * 2 - 1);                               \
        bool bad = ((a.poisoned | b.poisoned | c.poisoned | w->poisoned[in->ops[0].reg]) & mask) != 0;           \
        if (bad)                                                                                                 \
            for (int l = 0; l < LANES; l++) {                                                                    \
                T x = (T)expand(a.poison[l]), y = (T)undefined_if;                                               \
                uint32_t z = (uint32_t)c.v[l];                                                                   \
                bool all = c.poison[l] || (in->p[6] && b.poison[l]);                                             \
                poison[l] = all ? whole : collapse(__VA_ARGS__);                                                 \
            }                                                                                                    \
        EACH_LANE(mask, T x = (T)a.v[l]; T y = (T)b.v[l]; uint32_t z = (uint32_t)c.v[l]; d[l] = (__VA_ARGS__);); \
        if (bad) set_poison_bytes(w, in->ops[0].reg, mask, poison);                                              \
        return RAN;                                                                                              \
    }

// PTX ISA, "shf": the 64 bits y:x shifted by z, clamped or modulo 32. p[5]: wrap.
static inline uint32_t funnel(uint32_t x, uint32_t y, uint32_t z, bool left, bool wrap)
{
    uint32_t n = wrap ? z & 31 : z > 32 ? 32 : z;
    uint64_t both = (uint64_t)y << 32 | x;
    return (uint32_t)(left ? both << n >> 32 : n == 32 ? both >> 32 : both >> n);
}
FIELD3(shf_left, uint32_t, expand(b.poison[l]), funnel(x, y, z, true, in->p[5]))
FIELD3(shf_right, uint32_t, expand(b.poison[l]), funnel(x, y, z, false, in->p[5]))

// PTX ISA, "bfe": z bits of x from bit y on; the sign is that of the field's top bit, or of x beyond it. p[6]: an
// undefined position makes all undefined.
static inline uint64_t extract(uint64_t x, uint32_t at, uint32_t length, int width, bool is_signed)
{
    if (width == 32) at &= 0xff, length &= 0xff; // only 0..255 are allowed; beyond it a chip does this
    uint32_t msb = (uint32_t)width - 1, top = (uint64_t)at + length > msb ? msb : at + length - 1;
    uint32_t n = at > msb ? 0 : length < msb + 1 - at ? length : msb + 1 - at; // bits that come from x
    bool sign = is_signed && length && x >> top & 1;
    uint64_t r = n == 64 ? x : n ? x >> at & (((uint64_t)1 << n) - 1) : 0;
    if (sign && n < 64) r |= UINT64_MAX << n;
    return width == 64 ? r : (uint32_t)r;
}
FIELD3(bfe_u32, uint32_t, b.v[l], extract(x, (uint32_t)y, z, 32, false))
FIELD3(bfe_s32, uint32_t, b.v[l], extract(x, (uint32_t)y, z, 32, true))
FIELD3(bfe_u64, uint64_t, b.v[l], extract(x, (uint32_t)y, z, 64, false))
FIELD3(bfe_s64, uint64_t, b.v[l], extract(x, (uint32_t)y, z, 64, true))

// PTX ISA, "bfi": the low `length` bits of x over those of y from bit `at` on.
static inline uint64_t insert(uint64_t x, uint64_t y, uint32_t at, uint32_t length, int width)
{
    if (width == 32) at &= 0xff, length &= 0xff;
    if (at >= (uint32_t)width) return y;
    uint64_t m = (length >= 64 ? UINT64_MAX : ((uint64_t)1 << length) - 1) << at;
    uint64_t r = (y & ~m) | (x << at & m);
    return width == 64 ? r : (uint32_t)r;
}

static outcome exec_bfi(warp *w, const inst *in, uint32_t mask)
{
    READ2();
    lanes at, length;
    read_lanes(&at, w, &in->ops[3], T_U32);
    read_lanes(&length, w, &in->ops[4], T_U32);
    uint64_t *d = DESTINATION(in);
    int width = type_bytes((type)in->p[0]) * 8;
    uint8_t poison[LANES];
    for (int l = 0; l < LANES; l++) {
        uint32_t p = (uint32_t)at.v[l], n = (uint32_t)length.v[l];
        poison[l] = at.poison[l] || length.poison[l]
                        ? all_bytes((type)in->p[0])
                        : collapse(insert(expand(a.poison[l]), expand(b.poison[l]), p, n, width));
        if (width == 32) poison[l] &= 0xf;
    }
    EACH_LANE(mask, d[l] = insert(a.v[l], b.v[l], (uint32_t)at.v[l], (uint32_t)length.v[l], width););
    set_poison_bytes(w, in->ops[0].reg, mask, poison);
    return RAN;
}

// PTX ISA, "prmt": byte i of the result is byte sel of {b, a}; with the top bit of the selector its sign, eight times.
// p[5]: mode.
enum { PRMT_GENERIC, PRMT_F4E, PRMT_B4E, PRMT_RC8, PRMT_ECL, PRMT_ECR, PRMT_RC16 };

static inline uint32_t selector(uint32_t c, int mode, int i)
{
    uint32_t n = c & 3;
    switch (mode) {
    case PRMT_GENERIC: return c >> 4 * i & 0xf;
    case PRMT_F4E: return n + (uint32_t)i;
    case PRMT_B4E: return (n - (uint32_t)i) & 7;
    case PRMT_RC8: return n;
    case PRMT_ECL: return (uint32_t)i < n ? n : (uint32_t)i;
    case PRMT_ECR: return (uint32_t)i > n ? n : (uint32_t)i;
    default: return (n & 1) * 2 + ((uint32_t)i & 1);
    }
}

static outcome exec_prmt(warp *w, const inst *in, uint32_t mask)
{
    READ3();
    uint64_t *d = DESTINATION(in);
    uint8_t poison[LANES];
    bool bad = ((a.poisoned | b.poisoned | c.poisoned | w->poisoned[in->ops[0].reg]) & mask) != 0;
    if (bad)
        for (int l = 0; l < LANES; l++) {
            uint32_t p = a.poison[l] | (uint32_t)b.poison[l] << 4;
            poison[l] = 0;
            for (int i = 0; i < 4; i++)
                poison[l] |= (uint8_t)((p >> (selector((uint32_t)c.v[l], in->p[5], i) & 7) & 1) << i);
            if (c.poison[l]) poison[l] = 0xf;
        }
    for (uint32_t m = mask; m; m &= m - 1) {
        int l = __builtin_ctz(m);
        uint64_t both = a.v[l] | b.v[l] << 32;
        uint32_t r = 0;
        for (int i = 0; i < 4; i++) {
            uint32_t s = selector((uint32_t)c.v[l], in->p[5], i), byte = (uint32_t)(both >> 8 * (s & 7)) & 0xff;
            if (s & 8) byte = byte & 0x80 ? 0xff : 0;
            r |= byte << 8 * i;
        }
        d[l] = r;
    }
    if (bad) set_poison_bytes(w, in->ops[0].reg, mask, poison);
    return RAN;
}

// ----------------------------------------------------------------------------------------------------- decoders

// op{.sat}.type d, a, b
static const char *integer2(inst *in, const kernel *k, const by_type *table, const by_type *saturated)
{
    type t = last_type(in);
    const char *wrong = flags_and_rounding(in, 1, saturated ? SAT : 0, "");
    if (wrong) return wrong;
    in->p[0] = in->p[3] = t;
    in->klass = C_INTEGER;
    in->exec = find_exec(in->p[1] & SAT ? saturated : table, t);
    return in->exec ? same_types(in, k, t, 2) : "a type that the operation does not have";
}

// add, min, max also have .u16x2 and .s16x2 (sm_90).
static const char *integer_or_packed(inst *in, const kernel *k, const by_type *table, const by_type *special, int flag,
                                     exec_fn u16x2, exec_fn s16x2, exec_fn s16x2_special)
{
    const char *last = in->mods ? in->mod[in->mods - 1] : "";
    bool u = !strcmp(last, "u16x2"), s = !strcmp(last, "s16x2");
    type t = u || s ? T_B32 : last_type(in);
    const char *wrong = flags_and_rounding(in, 1, flag, "");
    if (wrong) return wrong;
    in->p[0] = in->p[3] = t;
    in->klass = C_INTEGER;
    bool is_special = in->p[1] != 0;
    if (u || s)
        in->exec = u ? (is_special ? NULL : u16x2) : is_special ? s16x2_special : s16x2;
    else
        in->exec = find_exec(is_special ? special : table, t);
    return in->exec ? same_types(in, k, t, 2) : "a type that the operation does not have";
}

static const char *decode_add_integer(inst *in, const kernel *k)
{
    static const by_type table[] = {{T_U16, add_16}, {T_S16, add_16}, {T_U32, add_32}, {T_S32, add_32},
                                    {T_U64, add_64}, {T_S64, add_64}, {T_NONE, NULL}};
    static const by_type saturated[] = {{T_S32, add_sat}, {T_NONE, NULL}};
    return integer_or_packed(in, k, table, saturated, SAT, add_16x2, add_16x2, NULL);
}

static const char *decode_sub_integer(inst *in, const kernel *k)
{
    static const by_type table[] = {{T_U16, sub_16}, {T_S16, sub_16}, {T_U32, sub_32}, {T_S32, sub_32},
                                    {T_U64, sub_64}, {T_S64, sub_64}, {T_NONE, NULL}};
    static const by_type saturated[] = {{T_S32, sub_sat}, {T_NONE, NULL}};
    return integer_or_packed(in, k, table, saturated, SAT, NULL, NULL, NULL);
}

static const char *decode_min_integer(inst *in, const kernel *k)
{
    static const by_type table[] = {{T_U16, min_u16}, {T_S16, min_s16}, {T_U32, min_u32}, {T_S32, min_s32},
                                    {T_U64, min_u64}, {T_S64, min_s64}, {T_NONE, NULL}};
    static const by_type relu[] = {{T_S32, min_relu_s32}, {T_NONE, NULL}};
    return integer_or_packed(in, k, table, relu, RELU, min_u16x2, min_s16x2, min_relu_s16x2);
}

static const char *decode_max_integer(inst *in, const kernel *k)
{
    static const by_type table[] = {{T_U16, max_u16}, {T_S16, max_s16}, {T_U32, max_u32}, {T_S32, max_s32},
                                    {T_U64, max_u64}, {T_S64, max_s64}, {T_NONE, NULL}};
    static const by_type relu[] = {{T_S32, max_relu_s32}, {T_NONE, NULL}};
    return integer_or_packed(in, k, table, relu, RELU, max_u16x2, max_s16x2, max_relu_s16x2);
}

static type wider(type t)
{
    switch (t) {
    case T_U16: return T_U32;
    case T_S16: return T_S32;
    case T_U32: return T_U64;
    default: return T_S64;
    }
}

static const by_type mul_lo[] = {{T_U16, mul_lo_16}, {T_S16, mul_lo_16}, {T_U32, mul_lo_32}, {T_S32, mul_lo_32},
                                 {T_U64, mul_lo_64}, {T_S64, mul_lo_64}, {T_NONE, NULL}};
static const by_type mul_hi[] = {{T_U16, mul_hi_u16}, {T_S16, mul_hi_s16}, {T_U32, mul_hi_u32}, {T_S32, mul_hi_s32},
                                 {T_U64, mul_hi_u64}, {T_S64, mul_hi_s64}, {T_NONE, NULL}};
static const by_type mul_wide[] = {
    {T_U16, mul_wide_u16}, {T_S16, mul_wide_s16}, {T_U32, mul_wide_u32}, {T_S32, mul_wide_s32}, {T_NONE, NULL}};
static const by_type mad_lo[] = {{T_U16, mad_lo_16}, {T_S16, mad_lo_16}, {T_U32, mad_lo_32}, {T_S32, mad_lo_32},
                                 {T_U64, mad_lo_64}, {T_S64, mad_lo_64}, {T_NONE, NULL}};
static const by_type mad_hi[] = {{T_U16, mad_hi_u16}, {T_S16, mad_hi_s16}, {T_U32, mad_hi_u32}, {T_S32, mad_hi_s32},
                                 {T_U64, mad_hi_u64}, {T_S64, mad_hi_s64}, {T_NONE, NULL}};
static const by_type mad_wide[] = {
    {T_U16, mad_wide_u16}, {T_S16, mad_wide_s16}, {T_U32, mad_wide_u32}, {T_S32, mad_wide_s32}, {T_NONE, NULL}};

static bool is_integer_type(const char *modifier)
{
    type t = type_from(modifier);
    return (t >= T_U8 && t <= T_S64) || !strcmp(modifier, "u16x2") || !strcmp(modifier, "s16x2");
}

// mul.{lo,hi,wide}.type and mad.{lo,hi,wide}{.sat}.type: the destination of wide, and mad's c, are twice as wide.
static const char *decode_product_integer(inst *in, const kernel *k)
{
    bool mad = !strcmp(in->opcode, "mad");
    int sources = mad ? 3 : 2;
    if (in->mods < 2) return "lo, hi or wide is missing";
    const char *part = in->mod[0];
    type t = last_type(in), result = t;
    bool hi = !strcmp(part, "hi"), wide = !strcmp(part, "wide"), sat = in->mods == 3 && !strcmp(in->mod[1], "sat");
    if ((!hi && !wide && strcmp(part, "lo")) || in->mods != 2 + sat) return "modifiers";
    in->exec = find_exec(hi ? (mad ? mad_hi : mul_hi) : wide ? (mad ? mad_wide : mul_wide) : mad ? mad_lo : mul_lo, t);
    if (sat) in->exec = mad && hi && t == T_S32 ? mad_hi_sat : NULL;
    if (!in->exec) return "a type that the operation does not have";
    if (wide) result = wider(t);
    in->p[0] = t;
    in->p[3] = result;
    in->klass = C_INTEGER;
    if (in->nops != 1 + sources) return "wrong number of operands";
    const char *wrong = want_register(k, &in->ops[0], result);
    for (int i = 1; i <= 2 && !wrong; i++) wrong = want_source(k, &in->ops[i], t);
    return wrong || !mad ? wrong : want_source(k, &in->ops[3], result);
}

static const char *decode_24(inst *in, const kernel *k)
{
    bool mad = !strcmp(in->opcode, "mad24");
    if (in->mods != 2) return "lo or hi and a type are meant";
    bool hi = !strcmp(in->mod[0], "hi"), lo = !strcmp(in->mod[0], "lo");
    type t = last_type(in);
    if (hi == lo || (t != T_U32 && t != T_S32)) return "lo or hi and a type are meant";
    bool s = t == T_S32;
    in->p[0] = in->p[3] = t;
    in->klass = C_INTEGER;
    if (mad)
        in->exec = hi ? (s ? mad24_hi_s : mad24_hi_u) : s ? mad24_lo_s : mad24_lo_u;
    else
        in->exec = hi ? (s ? mul24_hi_s : mul24_hi_u) : s ? mul24_lo_s : mul24_lo_u;
    return same_types(in, k, t, mad ? 3 : 2);
}

static const char *decode_div_integer(inst *in, const kernel *k)
{
    static const by_type table[] = {{T_U16, div_u16}, {T_S16, div_s16}, {T_U32, div_u32}, {T_S32, div_s32},
                                    {T_U64, div_u64}, {T_S64, div_s64}, {T_NONE, NULL}};
    return integer2(in, k, table, NULL);
}

static const char *decode_rem(inst *in, const kernel *k)
{
    static const by_type table[] = {{T_U16, rem_u16}, {T_S16, rem_s16}, {T_U32, rem_u32}, {T_S32, rem_s32},
                                    {T_U64, rem_u64}, {T_S64, rem_s64}, {T_NONE, NULL}};
    return integer2(in, k, table, NULL);
}

// op.type d, a, with another type for d; the one modifier that may come before the type sets p[5].
static const char *one_type(inst *in, const kernel *k, const by_type *table, int sources, const char *option)
{
    type t = last_type(in);
    in->p[0] = in->p[3] = t;
    in->klass = C_INTEGER;
    in->p[5] = option && in->mods == 2 && !strcmp(in->mod[0], option);
    if (in->mods != 1 + in->p[5]) return in->mods ? in->mod[0] : "the type is missing";
    in->exec = find_exec(table, t);
    return in->exec ? same_types(in, k, t, sources) : "a type that the operation does not have";
}

static const char *decode_sad(inst *in, const kernel *k)
{
    static const by_type table[] = {{T_U16, sad_u16}, {T_S16, sad_s16}, {T_U32, sad_u32}, {T_S32, sad_s32},
                                    {T_U64, sad_u64}, {T_S64, sad_s64}, {T_NONE, NULL}};
    return one_type(in, k, table, 3, NULL);
}

static const char *decode_abs_integer(inst *in, const kernel *k)
{
    static const by_type table[] = {{T_S16, abs_s16}, {T_S32, abs_s32}, {T_S64, abs_s64}, {T_NONE, NULL}};
    return one_type(in, k, table, 1, NULL);
}

static const char *decode_neg_integer(inst *in, const kernel *k)
{
    static const by_type table[] = {{T_S16, neg_s16}, {T_S32, neg_s32}, {T_S64, neg_s64}, {T_NONE, NULL}};
    return one_type(in, k, table, 1, NULL);
}

// A count or position: always 32 bits.
static const char *counts(inst *in, const kernel *k, const by_type *table, const char *option)
{
    const char *wrong = one_type(in, k, table, 0, option);
    if (wrong && strcmp(wrong, "wrong number of operands")) return wrong;
    in->p[3] = T_U32;
    if (in->nops != 2) return "wrong number of operands";
    wrong = want_register(k, &in->ops[0], T_U32);
    return wrong ? wrong : want_source(k, &in->ops[1], (type)in->p[0]);
}

static const char *decode_popc(inst *in, const kernel *k)
{
    static const by_type table[] = {{T_B32, popc_32}, {T_B64, popc_64}, {T_NONE, NULL}};
    return counts(in, k, table, NULL);
}

static const char *decode_clz(inst *in, const kernel *k)
{
    static const by_type table[] = {{T_B32, clz_32}, {T_B64, clz_64}, {T_NONE, NULL}};
    return counts(in, k, table, NULL);
}

static const char *decode_bfind(inst *in, const kernel *k)
{
    static const by_type table[] = {
        {T_U32, bfind_u32}, {T_S32, bfind_s32}, {T_U64, bfind_u64}, {T_S64, bfind_s64}, {T_NONE, NULL}};
    return counts(in, k, table, "shiftamt");
}

static const char *decode_brev(inst *in, const kernel *k)
{
    static const by_type table[] = {{T_B32, brev_32}, {T_B64, brev_64}, {T_NONE, NULL}};
    return one_type(in, k, table, 1, NULL);
}

static const char *decode_fns(inst *in, const kernel *k)
{
    static const by_type table[] = {{T_B32, fns_32}, {T_NONE, NULL}};
    return one_type(in, k, table, 3, NULL);
}

static const char *clamp_or_wrap(inst *in, const kernel *k, const by_type *table, int sources)
{
    if (in->mods != 2 || (strcmp(in->mod[0], "clamp") && strcmp(in->mod[0], "wrap")))
        return "clamp or wrap and a type are meant";
    in->p[0] = in->p[3] = last_type(in);
    in->p[5] = !strcmp(in->mod[0], "wrap");
    in->klass = C_INTEGER;
    in->exec = find_exec(table, last_type(in));
    return in->exec ? same_types(in, k, last_type(in), sources) : "a type that the operation does not have";
}

static const char *decode_bmsk(inst *in, const kernel *k)
{
    static const by_type table[] = {{T_B32, bmsk_32}, {T_NONE, NULL}};
    return clamp_or_wrap(in, k, table, 2);
}

static const char *decode_szext(inst *in, const kernel *k)
{
    static const by_type table[] = {{T_U32, szext_u32}, {T_S32, szext_s32}, {T_NONE, NULL}};
    return clamp_or_wrap(in, k, table, 2);
}

static const char *decode_shf(inst *in, const kernel *k)
{
    static const by_type left[] = {{T_B32, shf_left}, {T_NONE, NULL}}, right[] = {{T_B32, shf_right}, {T_NONE, NULL}};
    return clamp_or_wrap(in, k, !strcmp(in->opcode, "shf.l") ? left : right, 3);
}

static const char *decode_dot(inst *in, const kernel *k)
{
    bool two = !strcmp(in->opcode, "dp2a");
    if (in->mods != 2 + two) return "the types of a and b are meant";
    const char *const *mod = in->mod;
    bool high = two && !strcmp(mod[0], "hi");
    if (two && !high && strcmp(mod[0], "lo")) return mod[0];
    type a = type_from(mod[two]), b = type_from(mod[1 + two]);
    if ((a != T_U32 && a != T_S32) || (b != T_U32 && b != T_S32)) return "u32 or s32 are meant";
    in->p[0] = in->p[3] = T_B32;
    in->p[5] = (a == T_S32) | (b == T_S32) << 1 | high << 2;
    in->klass = C_INTEGER;
    in->exec = two ? dp2a : dp4a;
    return same_types(in, k, T_B32, 3);
}

// add.cc, addc{.cc}, sub.cc, subc{.cc}, mad.{lo,hi}.cc, madc.{lo,hi}{.cc}
static const char *decode_carry(inst *in, const kernel *k)
{
    const char *op = in->opcode;
    bool mad = !strncmp(op, "mad", 3), reads = op[3] == 'c';
    int how = (reads ? READS_CARRY : 0) | (!strncmp(op, "sub", 3) ? SUBTRACTS : 0) | (mad ? MULTIPLIES : 0);
    if (mad) {
        bool hi = mod_index(in, "hi") == 0 || !strcmp(op, "mad.hi.cc");
        if (reads && !hi && mod_index(in, "lo") != 0) return "lo or hi is missing";
        how |= hi ? HIGH : 0;
    }
    bool writes = mod_index(in, "cc") >= 0;
    if (writes || strstr(op, ".cc")) how |= WRITES_CARRY;
    type t = last_type(in);
    if (in->mods != 1 + writes + (mad && reads) || (t != T_U32 && t != T_S32 && t != T_U64 && t != T_S64))
        return "modifiers or a type that the operation does not have";
    in->p[0] = in->p[3] = t;
    in->p[5] = how;
    in->klass = C_INTEGER;
    in->exec = exec_carry;
    return same_types(in, k, t, mad ? 3 : 2);
}

// and, or, xor, not: bits or predicates
static const char *decode_logic(inst *in, const kernel *k)
{
    static const by_type and[] = {
        {T_PRED, and_pred}, {T_B16, and_16}, {T_B32, and_32}, {T_B64, and_64}, {T_NONE, NULL}};
    static const by_type or[] = {{T_PRED, or_pred}, {T_B16, or_16}, {T_B32, or_32}, {T_B64, or_64}, {T_NONE, NULL}};
    static const by_type xor[] = {
        {T_PRED, xor_pred}, {T_B16, xor_16}, {T_B32, xor_32}, {T_B64, xor_64}, {T_NONE, NULL}};
    static const by_type not[] = {
        {T_PRED, not_pred}, {T_B16, not_16}, {T_B32, not_32}, {T_B64, not_64}, {T_NONE, NULL}};
    const by_type *table = in->opcode[0] == 'a' ? and : in->opcode[0] == 'o' ? or : in->opcode[0] == 'x' ? xor : not;
    int sources = table == not ? 1 : 2;
    type t = last_type(in);
    if (in->mods != 1) return in->mods ? in->mod[0] : "the type is missing";
    in->p[0] = in->p[3] = t;
    in->klass = C_INTEGER;
    in->exec = find_exec(table, t);
    if (!in->exec) return "a type that the operation does not have";
    if (t != T_PRED) return same_types(in, k, t, sources);
    if (in->nops != 1 + sources) return "wrong number of operands";
    const char *wrong = want_register(k, &in->ops[0], T_PRED);
    for (int i = 1; i <= sources && !wrong; i++) wrong = want_predicate(k, &in->ops[i]);
    return wrong;
}

static const char *decode_cnot(inst *in, const kernel *k)
{
    static const by_type table[] = {{T_B16, cnot_16}, {T_B32, cnot_32}, {T_B64, cnot_64}, {T_NONE, NULL}};
    return one_type(in, k, table, 1, NULL);
}

static const char *decode_shift(inst *in, const kernel *k)
{
    static const by_type left[] = {{T_B16, shl_16}, {T_B32, shl_32}, {T_B64, shl_64}, {T_NONE, NULL}};
    static const by_type right[] = {{T_B16, shr_u16}, {T_U16, shr_u16}, {T_S16, shr_s16}, {T_B32, shr_u32},
                                    {T_U32, shr_u32}, {T_S32, shr_s32}, {T_B64, shr_u64}, {T_U64, shr_u64},
                                    {T_S64, shr_s64}, {T_NONE, NULL}};
    const char *wrong = one_type(in, k, in->opcode[2] == 'l' ? left : right, 0, NULL);
    if (wrong && strcmp(wrong, "wrong number of operands")) return wrong;
    if (in->nops != 3) return "wrong number of operands";
    wrong = want_register(k, &in->ops[0], (type)in->p[0]);
    if (!wrong) wrong = want_source(k, &in->ops[1], (type)in->p[0]);
    return wrong ? wrong : want_source(k, &in->ops[2], T_U32);
}

static const char *decode_bfe(inst *in, const kernel *k)
{
    static const by_type table[] = {
        {T_U32, bfe_u32}, {T_S32, bfe_s32}, {T_U64, bfe_u64}, {T_S64, bfe_s64}, {T_NONE, NULL}};
    const char *wrong = one_type(in, k, table, 0, NULL);
    if (wrong && strcmp(wrong, "wrong number of operands")) return wrong;
    if (in->nops != 4) return "wrong number of operands";
    in->p[6] = 1;
    wrong = want_register(k, &in->ops[0], (type)in->p[0]);
    if (!wrong) wrong = want_source(k, &in->ops[1], (type)in->p[0]);
    for (int i = 2; i < 4 && !wrong; i++) wrong = want_source(k, &in->ops[i], T_U32);
    return wrong;
}

static const char *decode_bfi(inst *in, const kernel *k)
{
    static const by_type table[] = {{T_B32, exec_bfi}, {T_B64, exec_bfi}, {T_NONE, NULL}};
    const char *wrong = one_type(in, k, table, 0, NULL);
    if (wrong && strcmp(wrong, "wrong number of operands")) return wrong;
    if (in->nops != 5) return "wrong number of operands";
    wrong = want_register(k, &in->ops[0], (type)in->p[0]);
    for (int i = 1; i < 3 && !wrong; i++) wrong = want_source(k, &in->ops[i], (type)in->p[0]);
    for (int i = 3; i < 5 && !wrong; i++) wrong = want_source(k, &in->ops[i], T_U32);
    return wrong;
}

static const char *decode_lop3(inst *in, const kernel *k)
{
    bool boolean = in->mods == 2 && (!strcmp(in->mod[0], "or") || !strcmp(in->mod[0], "and"));
    if (in->mods != 1 + boolean || last_type(in) != T_B32) return "lop3{.or,.and}.b32 is meant";
    if (in->nops != 5 + boolean) return "wrong number of operands";
    const operand *d = &in->ops[0];
    in->p[0] = in->p[3] = T_B32;
    const char *wrong = NULL;
    if (boolean) {
        if (d->kind != OP_PAIR) return "d|p is missing";
        for (int i = 0; i < 2 && !wrong; i++)
            if (d->items[i].kind != OP_SINK) wrong = want_register(k, &d->items[i], i ? T_PRED : T_B32);
        if (!wrong) wrong = want_predicate(k, &in->ops[5]);
        in->p[6] = in->mod[0][0] == 'o';
    } else {
        wrong = want_register(k, d, T_B32);
    }
    for (int i = 1; i <= 3 && !wrong; i++) wrong = want_source(k, &in->ops[i], T_B32);
    if (wrong) return wrong;
    const operand *table = &in->ops[4];
    if (table->kind != OP_IMM || table->imm < 0 || table->imm > 255) return "the table must be an immediate in 0..255";
    in->p[5] = (int32_t)table->imm;
    in->klass = C_INTEGER;
    in->exec = exec_lop3;
    return NULL;
}

static const char *decode_prmt(inst *in, const kernel *k)
{
    static const char *const modes[] = {"", "f4e", "b4e", "rc8", "ecl", "ecr", "rc16"};
    if (!in->mods || strcmp(in->mod[0], "b32") || in->mods > 2) return "prmt.b32{.mode} is meant";
    for (int i = 1; i < 7 && in->mods == 2; i++)
        if (!strcmp(modes[i], in->mod[1])) in->p[5] = i;
    if (in->mods == 2 && !in->p[5]) return in->mod[1];
    in->p[0] = in->p[3] = T_B32;
    in->klass = C_INTEGER;
    in->exec = exec_prmt;
    return same_types(in, k, T_B32, 3);
}

// Operations that integers and floats share by name.
static bool ends_in_integer(const inst *in)
{
    return in->mods && is_integer_type(in->mod[in->mods - 1]);
}
static const char *decode_add(inst *in, const kernel *k)
{
    return ends_in_integer(in) ? decode_add_integer(in, k) : decode_float(in, k);
}
static const char *decode_sub(inst *in, const kernel *k)
{
    return ends_in_integer(in) ? decode_sub_integer(in, k) : decode_float(in, k);
}
static const char *decode_min(inst *in, const kernel *k)
{
    return ends_in_integer(in) ? decode_min_integer(in, k) : decode_float(in, k);
}
static const char *decode_max(inst *in, const kernel *k)
{
    return ends_in_integer(in) ? decode_max_integer(in, k) : decode_float(in, k);
}
static const char *decode_product(inst *in, const kernel *k)
{
    return ends_in_integer(in) ? decode_product_integer(in, k) : decode_float(in, k);
}
static const char *decode_div(inst *in, const kernel *k)
{
    return ends_in_integer(in) ? decode_div_integer(in, k) : decode_float(in, k);
}
static const char *decode_abs(inst *in, const kernel *k)
{
    return ends_in_integer(in) ? decode_abs_integer(in, k) : decode_float(in, k);
}
static const char *decode_neg(inst *in, const kernel *k)
{
    return ends_in_integer(in) ? decode_neg_integer(in, k) : decode_float(in, k);
}

const inst_row scalar_rows[] = {
    {"add", decode_add},
    {"sub", decode_sub},
    {"mul", decode_product},
    {"mad", decode_product},
    {"mul24", decode_24},
    {"mad24", decode_24},
    {"sad", decode_sad},
    {"div", decode_div},
    {"rem", decode_rem},
    {"abs", decode_abs},
    {"neg", decode_neg},
    {"min", decode_min},
    {"max", decode_max},
    {"popc", decode_popc},
    {"clz", decode_clz},
    {"bfind", decode_bfind},
    {"fns", decode_fns},
    {"brev", decode_brev},
    {"bfe", decode_bfe},
    {"bfi", decode_bfi},
    {"szext", decode_szext},
    {"bmsk", decode_bmsk},
    {"dp4a", decode_dot},
    {"dp2a", decode_dot},
    {"add.cc", decode_carry},
    {"addc", decode_carry},
    {"sub.cc", decode_carry},
    {"subc", decode_carry},
    {"mad.lo.cc", decode_carry},
    {"mad.hi.cc", decode_carry},
    {"madc", decode_carry},
    {"and", decode_logic},
    {"or", decode_logic},
    {"xor", decode_logic},
    {"not", decode_logic},
    {"cnot", decode_cnot},
    {"lop3", decode_lop3},
    {"shf.l", decode_shf},
    {"shf.r", decode_shf},
    {"shl", decode_shift},
    {"shr", decode_shift},
    {"prmt", decode_prmt},
    {NULL, NULL},
};
