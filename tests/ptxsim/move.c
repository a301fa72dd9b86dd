// Comparison and Selection Instructions; mov.
#include "float.h"
#include "lanes.h"

// ----------------------------------------------------------------------------------------------------------- mov

static outcome exec_mov(warp *w, const inst *in, uint32_t mask)
{
    READ1();
    uint64_t *d = DESTINATION(in);
    int reg = in->ops[0].reg;
    if ((a.poisoned | w->poisoned[reg]) & mask) {
        uint8_t poison[LANES];
        memcpy(poison, a.poison, LANES);
        EACH_LANE(mask, d[l] = a.v[l];);
        set_poison_bytes(w, reg, mask, poison);
        return RAN;
    }
    EACH_LANE(mask, d[l] = a.v[l];);
    return RAN;
}

EXEC1(exec_mov_low, uint64_t, uint16_t, x)

static outcome exec_mov_pred(warp *w, const inst *in, uint32_t mask)
{
    READ1();
    uint64_t *d = DESTINATION(in), negated = in->ops[1].negated;
    uint32_t bad = a.poisoned;
    EACH_LANE(mask, d[l] = (a.v[l] & 1) ^ negated;);
    set_poison(w, in->ops[0].reg, mask, bad, 1);
    return RAN;
}

// The words of a register or vector of registers: b128 takes two registers, and everything else one.
typedef struct {
    uint64_t v[2][LANES];
    uint8_t poison[2][LANES];
} words;

static void gather(words *to, warp *w, const operand *o, int total)
{
    memset(to, 0, sizeof *to);
    int count = o->kind == OP_VECTOR ? o->count : total == 16 ? 2 : 1, each = total / count;
    for (int i = 0; i < count; i++) {
        operand part = o->kind == OP_VECTOR ? o->items[i] : *o;
        if (o->kind != OP_VECTOR) part.reg += i;
        lanes s;
        read_lanes(&s, w, &part, each == 8 ? T_B64 : each == 4 ? T_B32 : each == 2 ? T_B16 : T_B8);
        int word = i * each / 8, byte = i * each % 8;
        for (int l = 0; l < LANES; l++) {
            to->v[word][l] |= s.v[l] << 8 * byte;
            to->poison[word][l] |= (uint8_t)(s.poison[l] << byte);
        }
    }
}

static void scatter(warp *w, const operand *o, uint32_t mask, const words *from, int total)
{
    int count = o->kind == OP_VECTOR ? o->count : total == 16 ? 2 : 1, each = total / count;
    uint64_t ones = each == 8 ? UINT64_MAX : ((uint64_t)1 << 8 * each) - 1;
    uint8_t bytes = (uint8_t)((1u << each) - 1);
    for (int i = 0; i < count; i++) {
        const operand *part = o->kind == OP_VECTOR ? &o->items[i] : o;
        if (part->kind == OP_SINK) continue;
        int reg = o->kind == OP_VECTOR ? part->reg : o->reg + i;
        int word = i * each / 8, byte = i * each % 8;
        uint64_t *d = w->regs + (size_t)reg * LANES;
        uint8_t poison[LANES];
        for (int l = 0; l < LANES; l++) poison[l] = (uint8_t)(from->poison[word][l] >> byte) & bytes;
        EACH_LANE(mask, d[l] = from->v[word][l] >> 8 * byte & ones;);
        set_poison_bytes(w, reg, mask, poison);
    }
}

// Packing and unpacking. p[5]: bytes in all.
static outcome exec_mov_vector(warp *w, const inst *in, uint32_t mask)
{
    words all;
    gather(&all, w, &in->ops[1], in->p[5]);
    scatter(w, &in->ops[0], mask, &all, in->p[5]);
    return RAN;
}

static const char *vector_parts(const kernel *k, const operand *o, int total, bool sink)
{
    static const type by_bytes[] = {[1] = T_B8, [2] = T_B16, [4] = T_B32, [8] = T_B64};
    if (o->count != 2 && o->count != 4) return "a vector of 2 or 4 is meant";
    int each = total / o->count;
    for (int i = 0; i < o->count; i++) {
        const operand *part = &o->items[i];
        if (part->kind == OP_SINK && sink) continue;
        const char *wrong = sink ? want_register(k, part, by_bytes[each]) : want_source(k, part, by_bytes[each]);
        if (wrong) return wrong;
    }
    return NULL;
}

static const char *decode_mov(inst *in, const kernel *k)
{
    if (in->mods != 1) return in->mods ? in->mod[0] : "the type is missing";
    type t = last_type(in);
    if (!t || t == T_U8 || t == T_S8 || t == T_B8 || (t >= T_F16 && t != T_F32 && t != T_F64))
        return "a type that the operation does not have";
    if (in->nops != 2) return "wrong number of operands";
    operand *d = &in->ops[0], *a = &in->ops[1];
    in->p[0] = in->p[3] = t;
    in->p[5] = type_bytes(t);
    in->klass = C_MOVE;
    if (d->kind == OP_VECTOR || a->kind == OP_VECTOR || t == T_B128) {
        if (t != T_B16 && t != T_B32 && t != T_B64 && t != T_B128) return "packing is for .b types";
        if (d->kind == OP_VECTOR && a->kind == OP_VECTOR) return "two vectors";
        const char *wrong = d->kind == OP_VECTOR ? vector_parts(k, d, in->p[5], true) : want_register(k, d, t);
        if (!wrong) wrong = a->kind == OP_VECTOR ? vector_parts(k, a, in->p[5], false) : want_register(k, a, t);
        in->exec = exec_mov_vector;
        return wrong;
    }
    if (d->kind == OP_SINK) return "a register is missing";
    const char *wrong = want_register(k, d, t);
    if (wrong) return wrong;
    if (t == T_PRED) {
        in->exec = exec_mov_pred;
        return a->kind == OP_SPECIAL && special_is_predicate(a->special) ? NULL : want_predicate(k, a);
    }
    in->exec = exec_mov;
    if (a->kind == OP_ADDRESS)
        return a->symbol >= 0 && (type_bytes(t) == 8 || type_bytes(t) == 4) ? NULL : "an address in such a register";
    if (a->kind == OP_SPECIAL) {
        if (special_is_predicate(a->special) || t >= T_F16) return "a special register of another type";
        if (type_bytes(t) == 2 && !special_is_64bit(a->special)) { // cut off
            in->exec = exec_mov_low;
            return NULL;
        }
        return type_bytes(t) == (special_is_64bit(a->special) ? 8 : 4) ? NULL : "a special register of another size";
    }
    return want_source(k, a, t);
}

// ---------------------------------------------------------------------------------------------------- comparison

typedef enum { EQ, NE, LT, LE, GT, GE, EQU, NEU, LTU, LEU, GTU, GEU, NUM, NANS, COMPARISONS } comparison;
static const char *const comparison_names[COMPARISONS] = {"eq",  "ne",  "lt",  "le",  "gt",  "ge",  "equ",
                                                          "neu", "ltu", "leu", "gtu", "geu", "num", "nan"};

#define COMPARE(T, X, Y, which)           \
    do {                                  \
        uint32_t r = 0;                   \
        for (int l = 0; l < LANES; l++) { \
            T x = X;                      \
            T y = Y;                      \
            r |= (uint32_t)(which) << l;  \
        }                                 \
        return r;                         \
    } while (0)
#define COMPARE_INTEGERS(name, T)                                            \
    static uint32_t name(const uint64_t *a, const uint64_t *b, comparison c) \
    {                                                                        \
        switch (c) {                                                         \
        case EQ: COMPARE(T, (T)a[l], (T)b[l], x == y);                       \
        case NE: COMPARE(T, (T)a[l], (T)b[l], x != y);                       \
        case LT: COMPARE(T, (T)a[l], (T)b[l], x < y);                        \
        case LE: COMPARE(T, (T)a[l], (T)b[l], x <= y);                       \
        case GT: COMPARE(T, (T)a[l], (T)b[l], x > y);                        \
        default: COMPARE(T, (T)a[l], (T)b[l], x >= y);                       \
        }                                                                    \
    }
COMPARE_INTEGERS(compare_u16, uint16_t)
COMPARE_INTEGERS(compare_s16, int16_t)
COMPARE_INTEGERS(compare_u32, uint32_t)
COMPARE_INTEGERS(compare_s32, int32_t)
COMPARE_INTEGERS(compare_u64, uint64_t)
COMPARE_INTEGERS(compare_s64, int64_t)

// The u forms are true when an operand is NaN, the others false.
static uint32_t compare_doubles(const double *a, const double *b, comparison c)
{
    switch (c) {
    case EQ: COMPARE(double, a[l], b[l], x == y);
    case NE: COMPARE(double, a[l], b[l], x<y || x> y);
    case LT: COMPARE(double, a[l], b[l], x < y);
    case LE: COMPARE(double, a[l], b[l], x <= y);
    case GT: COMPARE(double, a[l], b[l], x > y);
    case GE: COMPARE(double, a[l], b[l], x >= y);
    case EQU: COMPARE(double, a[l], b[l], !(x < y || x > y));
    case NEU: COMPARE(double, a[l], b[l], !(x == y));
    case LTU: COMPARE(double, a[l], b[l], !(x >= y));
    case LEU: COMPARE(double, a[l], b[l], !(x > y));
    case GTU: COMPARE(double, a[l], b[l], !(x <= y));
    case GEU: COMPARE(double, a[l], b[l], !(x < y));
    case NUM: COMPARE(double, a[l], b[l], x == x && y == y);
    default: COMPARE(double, a[l], b[l], x != x || y != y);
    }
}

static double value_of(uint64_t bits, type t, bool ftz)
{
    float f;
    switch (t) {
    case T_F64: return f64_of(bits);
    case T_F32: f = f32_of(bits); return ftz ? flush_f32(f) : f;
    case T_F16:
    case T_F16X2:
        if (ftz && !(bits & 0x7c00)) bits &= 0x8000;
        return f16_value(bits);
    default: return bf16_value(bits);
    }
}

static uint32_t compare(const uint64_t *a, const uint64_t *b, type t, comparison c, bool ftz, int element)
{
    switch (t) {
    case T_B16:
    case T_U16: return compare_u16(a, b, c);
    case T_S16: return compare_s16(a, b, c);
    case T_B32:
    case T_U32: return compare_u32(a, b, c);
    case T_S32: return compare_s32(a, b, c);
    case T_B64:
    case T_U64: return compare_u64(a, b, c);
    case T_S64: return compare_s64(a, b, c);
    default: {
        double x[LANES], y[LANES];
        for (int l = 0; l < LANES; l++) {
            x[l] = value_of(a[l] >> 16 * element, t, ftz);
            y[l] = value_of(b[l] >> 16 * element, t, ftz);
        }
        return compare_doubles(x, y, c);
    }
    }
}

enum { NO_BOOL, BOOL_AND, BOOL_OR, BOOL_XOR };

static uint32_t combine(uint32_t a, uint32_t b, int how)
{
    return how == BOOL_AND ? a & b : how == BOOL_OR ? a | b : how == BOOL_XOR ? a ^ b : a;
}

static void put_predicate(warp *w, const operand *o, uint32_t mask, uint32_t value, uint32_t bad)
{
    if (o->kind == OP_SINK) return;
    uint64_t *d = w->regs + (size_t)o->reg * LANES;
    EACH_LANE(mask, d[l] = value >> l & 1;);
    set_poison(w, o->reg, mask, bad, 1);
}

// p[0]: type, p[1]: ftz, p[5]: comparison, p[6]: boolean operation, operand 3 its predicate
static outcome exec_setp(warp *w, const inst *in, uint32_t mask)
{
    READ2();
    type t = (type)in->p[0];
    uint32_t bad = (a.poisoned | b.poisoned) & mask, other = 0;
    if (in->p[6]) {
        lanes c;
        read_lanes(&c, w, &in->ops[3], T_PRED);
        bad |= c.poisoned & mask;
        for (int l = 0; l < LANES; l++) other |= (uint32_t)(c.v[l] & 1) << l;
        if (in->ops[3].negated) other = ~other;
    }
    comparison c = (comparison)in->p[5];
    uint32_t first = compare(a.v, b.v, t, c, in->p[1], 0);
    bool packed = t == T_F16X2 || t == T_BF16X2;
    uint32_t second = packed ? compare(a.v, b.v, t, c, in->p[1], 1) : ~first;
    const operand *d = &in->ops[0], *p = d->kind == OP_PAIR ? &d->items[0] : d;
    put_predicate(w, p, mask, combine(first, other, in->p[6]), bad);
    if (d->kind == OP_PAIR) put_predicate(w, &d->items[1], mask, combine(second, other, in->p[6]), bad);
    return RAN;
}

// The result is all ones or 1.0; p[3]: its type
static outcome exec_set(warp *w, const inst *in, uint32_t mask)
{
    READ2();
    type t = (type)in->p[0], to = (type)in->p[3];
    uint32_t bad = (a.poisoned | b.poisoned) & mask, other = 0;
    if (in->p[6]) {
        lanes c;
        read_lanes(&c, w, &in->ops[3], T_PRED);
        bad |= c.poisoned & mask;
        for (int l = 0; l < LANES; l++) other |= (uint32_t)(c.v[l] & 1) << l;
        if (in->ops[3].negated) other = ~other;
    }
    comparison c = (comparison)in->p[5];
    bool packed = t == T_F16X2 || t == T_BF16X2;
    uint32_t low = combine(compare(a.v, b.v, t, c, in->p[1], 0), other, in->p[6]), high = 0;
    if (packed) high = combine(compare(a.v, b.v, t, c, in->p[1], 1), other, in->p[6]);
    uint64_t one = to == T_F32                      ? 0x3f800000
                   : to == T_F16 || to == T_F16X2   ? 0x3c00
                   : to == T_BF16 || to == T_BF16X2 ? 0x3f80
                   : packed || type_bytes(to) == 2  ? 0xffff
                                                    : 0xffffffff;
    uint64_t *d = DESTINATION(in);
    EACH_LANE(mask, d[l] = (low >> l & 1 ? one : 0) | (high >> l & 1 ? one << 16 : 0););
    DONE(bad);
}

static bool comparable(type t)
{
    return (t >= T_B16 && t <= T_B64) || (t >= T_U16 && t <= T_U64) || (t >= T_S16 && t <= T_S64) || t == T_F16 ||
           t == T_F16X2 || t == T_BF16 || t == T_BF16X2 || t == T_F32 || t == T_F64;
}

// CmpOp{.BoolOp}{.ftz} before `types` types
static const char *comparison_modifiers(inst *in, int types)
{
    int at = 0;
    type t = last_type(in);
    if (in->mods < 1 + types || !comparable(t)) return "a comparison and a type are meant";
    in->p[0] = t;
    in->p[5] = -1;
    bool is_float = t >= T_F16;
    for (int i = 0; i < COMPARISONS; i++)
        if (!strcmp(comparison_names[i], in->mod[0])) in->p[5] = i;
    static const struct {
        const char *name;
        comparison c;
    } unsigned_names[] = {{"lo", LT}, {"ls", LE}, {"hi", GT}, {"hs", GE}};
    for (int i = 0; i < 4 && t >= T_U16 && t <= T_U64; i++)
        if (!strcmp(unsigned_names[i].name, in->mod[0])) in->p[5] = (int32_t)unsigned_names[i].c;
    if (in->p[5] < 0 || (!is_float && in->p[5] > GE) || (t >= T_B16 && t <= T_B64 && in->p[5] > NE)) return in->mod[0];
    at = 1;
    static const char *const booleans[] = {"", "and", "or", "xor"};
    in->p[6] = NO_BOOL;
    for (int i = 1; i < 4 && in->mods > at + types; i++)
        if (!strcmp(booleans[i], in->mod[1])) in->p[6] = i;
    at += in->p[6] != NO_BOOL;
    in->p[1] = 0;
    if (in->mods > at + types && !strcmp(in->mod[at], "ftz") && (t == T_F32 || t == T_F16 || t == T_F16X2))
        in->p[1] = 1, at++;
    return in->mods == at + types ? NULL : in->mod[at];
}

static const char *compared_operands(const inst *in, const kernel *k)
{
    if (in->nops != 3 + (in->p[6] != NO_BOOL)) return "wrong number of operands";
    const char *wrong = NULL;
    for (int i = 1; i < 3 && !wrong; i++) wrong = want_source(k, &in->ops[i], (type)in->p[0]);
    return wrong || !in->p[6] ? wrong : want_predicate(k, &in->ops[3]);
}

static const char *decode_setp(inst *in, const kernel *k)
{
    const char *wrong = comparison_modifiers(in, 1);
    if (wrong) return wrong;
    in->klass = in->p[0] >= T_F16 ? C_FLOAT : C_INTEGER;
    in->exec = exec_setp;
    if (!in->nops) return "wrong number of operands";
    const operand *d = &in->ops[0];
    if (d->kind == OP_PAIR) {
        if (in->p[0] == T_F16 || in->p[0] == T_BF16) return "p|q of a 16-bit comparison";
        for (int i = 0; i < 2 && !wrong; i++)
            if (d->items[i].kind != OP_SINK) wrong = want_register(k, &d->items[i], T_PRED);
    } else if (d->kind != OP_SINK) {
        wrong = want_register(k, d, T_PRED);
    }
    return wrong ? wrong : compared_operands(in, k);
}

static const char *decode_set(inst *in, const kernel *k)
{
    const char *wrong = comparison_modifiers(in, 2);
    if (wrong) return wrong;
    type to = type_from(in->mod[in->mods - 2]), t = (type)in->p[0];
    bool packed = t == T_F16X2 || t == T_BF16X2, half = t == T_F16 || t == T_BF16;
    if (t < T_F16 && to == T_F32) return "a .f32 result of an integer comparison: ptxas 13.0 makes it 1, not 1.0";
    bool ok = to == T_U32 || to == T_S32 || (!packed && !half && to == T_F32);
    if (packed) ok |= to == t;
    if (half) ok |= to == t || to == T_U16 || to == T_S16;
    if (!ok) return "a type that the operation does not have";
    in->p[3] = to;
    in->klass = t >= T_F16 ? C_FLOAT : C_INTEGER;
    in->exec = exec_set;
    if (!in->nops) return "wrong number of operands";
    wrong = want_register(k, &in->ops[0], to);
    return wrong ? wrong : compared_operands(in, k);
}

// ----------------------------------------------------------------------------------------------------- selection

// The chosen side's bytes, undefined ones among them; an undefined predicate makes everything so.
static outcome choose(warp *w, const inst *in, uint32_t mask, const lanes *a, const lanes *b, uint32_t take_a,
                      uint32_t bad)
{
    uint64_t *d = DESTINATION(in);
    int reg = in->ops[0].reg;
    if ((a->poisoned | b->poisoned | bad | w->poisoned[reg]) & mask) {
        uint8_t poison[LANES];
        for (int l = 0; l < LANES; l++)
            poison[l] = bad >> l & 1 ? all_bytes((type)in->p[3]) : take_a >> l & 1 ? a->poison[l] : b->poison[l];
        EACH_LANE(mask, d[l] = take_a >> l & 1 ? a->v[l] : b->v[l];);
        set_poison_bytes(w, reg, mask, poison);
        return RAN;
    }
    EACH_LANE(mask, d[l] = take_a >> l & 1 ? a->v[l] : b->v[l];);
    return RAN;
}

static outcome exec_selp(warp *w, const inst *in, uint32_t mask)
{
    READ2();
    lanes p;
    read_lanes(&p, w, &in->ops[3], T_PRED);
    uint32_t take_a = 0;
    for (int l = 0; l < LANES; l++) take_a |= (uint32_t)(p.v[l] & 1) << l;
    if (in->ops[3].negated) take_a = ~take_a;
    return choose(w, in, mask, &a, &b, take_a, p.poisoned);
}

// p[5]: type of the selecting operand, p[1]: ftz
static outcome exec_slct(warp *w, const inst *in, uint32_t mask)
{
    READ2();
    lanes c;
    read_lanes(&c, w, &in->ops[3], (type)in->p[5]);
    uint32_t take_a = 0;
    for (int l = 0; l < LANES; l++) {
        bool yes = in->p[5] == T_S32 ? (int32_t)c.v[l] >= 0 : value_of(c.v[l], T_F32, in->p[1]) >= 0;
        take_a |= (uint32_t)yes << l;
    }
    return choose(w, in, mask, &a, &b, take_a, c.poisoned);
}

static bool selectable(type t)
{
    return (t >= T_B16 && t <= T_B64) || (t >= T_U16 && t <= T_U64) || (t >= T_S16 && t <= T_S64) || t == T_F32 ||
           t == T_F64;
}

static const char *decode_selp(inst *in, const kernel *k)
{
    type t = last_type(in);
    if (in->mods != 1 || !selectable(t) || in->nops != 4) return "selp.type d, a, b, c is meant";
    in->p[0] = in->p[3] = t;
    in->klass = C_MOVE;
    in->exec = exec_selp;
    const char *wrong = want_register(k, &in->ops[0], t);
    for (int i = 1; i < 3 && !wrong; i++) wrong = want_source(k, &in->ops[i], t);
    return wrong ? wrong : want_predicate(k, &in->ops[3]);
}

static const char *decode_slct(inst *in, const kernel *k)
{
    type by = last_type(in), t = in->mods >= 2 ? type_from(in->mod[in->mods - 2]) : T_NONE;
    in->p[1] = in->mods == 3 && !strcmp(in->mod[0], "ftz");
    if (in->mods != 2 + in->p[1] || !selectable(t) || in->nops != 4 || (by != T_S32 && by != T_F32) ||
        (in->p[1] && by != T_F32))
        return "slct{.ftz}.type.{s32,f32} d, a, b, c is meant";
    in->p[0] = in->p[3] = t;
    in->p[5] = by;
    in->klass = C_MOVE;
    in->exec = exec_slct;
    const char *wrong = want_register(k, &in->ops[0], t);
    for (int i = 1; i < 3 && !wrong; i++) wrong = want_source(k, &in->ops[i], t);
    return wrong ? wrong : want_source(k, &in->ops[3], by);
}

const inst_row move_rows[] = {
    {"mov", decode_mov},   {"setp", decode_setp}, {"set", decode_set},
    {"selp", decode_selp}, {"slct", decode_slct}, {NULL, NULL},
};
