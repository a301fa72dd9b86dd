// Operands of a whole warp at once, for the parts that compute lane by lane.
#ifndef PTXSIM_LANES_H
#define PTXSIM_LANES_H

#include <string.h>

#include "sim.h"

// One source operand: 32 values and what of them is undefined.
typedef struct {
    const uint64_t *v;
    const uint8_t *poison; // by lane, bit i = byte i
    uint32_t poisoned;     // lanes with any
    uint64_t buffer[LANES];
} lanes;

extern const uint8_t clean_lanes[LANES];

// The bits of an immediate in an instruction of this type.
uint64_t immediate_bits(const operand *o, type t);
uint64_t symbol_address(warp *w, const operand *o, int lane);
void read_lanes_slowly(lanes *s, warp *w, const operand *o, type t);

static inline void read_lanes(lanes *s, warp *w, const operand *o, type t)
{
    if (o->kind == OP_REG) {
        s->v = w->regs + (size_t)o->reg * LANES;
        s->poison = w->poison + (size_t)o->reg * LANES;
        s->poisoned = w->poisoned[o->reg];
    } else {
        read_lanes_slowly(s, w, o, t);
    }
}

#define EACH_LANE(mask, ...)                                           \
    do {                                                               \
        if ((mask) == ~0u)                                             \
            for (int l = 0; l < LANES; l++) {                          \
                __VA_ARGS__                                            \
            }                                                          \
        else                                                           \
            for (uint32_t left_ = (mask); left_; left_ &= left_ - 1) { \
                int l = __builtin_ctz(left_);                          \
                __VA_ARGS__                                            \
            }                                                          \
    } while (0)

// The lanes of mask have written reg: those of bad are undefined in the bytes of `undefined`, the others clean.
static inline void set_poison(warp *w, int reg, uint32_t mask, uint32_t bad, uint8_t undefined)
{
    bad &= mask;
    if (!((w->poisoned[reg] & mask) | bad)) return;
    uint8_t *p = w->poison + (size_t)reg * LANES;
    for (uint32_t m = mask; m; m &= m - 1) {
        int l = __builtin_ctz(m);
        p[l] = bad >> l & 1 ? undefined : 0;
    }
    w->poisoned[reg] = (w->poisoned[reg] & ~mask) | bad;
}

// The same with poison of its own for every lane.
static inline void set_poison_bytes(warp *w, int reg, uint32_t mask, const uint8_t bytes[LANES])
{
    uint8_t *p = w->poison + (size_t)reg * LANES;
    uint32_t bad = 0;
    for (uint32_t m = mask; m; m &= m - 1) {
        int l = __builtin_ctz(m);
        p[l] = bytes[l];
        bad |= (uint32_t)(bytes[l] != 0) << l;
    }
    w->poisoned[reg] = (w->poisoned[reg] & ~mask) | bad;
}

static inline uint8_t all_bytes(type t)
{
    int n = type_bytes(t);
    return n >= 8 ? 0xff : (uint8_t)((1u << n) - 1);
}

// Checks for decoders: NULL, or what is wrong.
const char *want_register(const kernel *k, const operand *o, type t);         // a register as wide as t
const char *want_source(const kernel *k, const operand *o, type t);           // that, or an immediate
const char *want_predicate(const kernel *k, const operand *o);                // possibly negated
const char *same_types(const inst *in, const kernel *k, type t, int sources); // d, then n sources, all of type t
type last_type(const inst *in);                                               // the last modifier's
// The modifiers before the last `types` ones are all known and allowed: flags into p[1], rounding (RN...) into p[2],
// whether one was given into p[4].
const char *flags_and_rounding(inst *in, int types, int allowed, const char *roundings);

typedef struct {
    type t;
    exec_fn exec;
} by_type;

static inline exec_fn find_exec(const by_type *table, type t)
{
    for (; table->exec; table++)
        if (table->t == t) return table->exec;
    return NULL;
}

// in->p[0]: type of sources, [1]: flags, [2]: rounding, [3]: type of the result
enum {
    FTZ = 1,
    SAT = 2,
    PROPAGATE_NAN = 4,
    ABS = 8,
    XORSIGN = 16,
    RELU = 32,
    APPROX = 64,
    FULL = 128,
    RESULT_ONE = 256
};

#define DESTINATION(in) (w->regs + (size_t)(in)->ops[0].reg * LANES)
#define READ1() \
    lanes a;    \
    read_lanes(&a, w, &in->ops[1], (type)in->p[0])
#define READ2() \
    READ1();    \
    lanes b;    \
    read_lanes(&b, w, &in->ops[2], (type)in->p[0])
#define READ3() \
    READ2();    \
    lanes c;    \
    read_lanes(&c, w, &in->ops[3], (type)in->p[3])
// Any undefined input makes the whole result undefined.
#define DONE(bad)                                                              \
    do {                                                                       \
        set_poison(w, in->ops[0].reg, mask, (bad), all_bytes((type)in->p[3])); \
        return RAN;                                                            \
    } while (0)

#define EXEC1(name, T, R, ...)                                                \
    static outcome name(warp *w, const inst *in, uint32_t mask)               \
    {                                                                         \
        READ1();                                                              \
        uint64_t *d = DESTINATION(in);                                        \
        uint32_t bad = a.poisoned;                                            \
        EACH_LANE(mask, T x = (T)a.v[l]; d[l] = (uint64_t)(R)(__VA_ARGS__);); \
        DONE(bad);                                                            \
    }
#define EXEC2(name, T, R, ...)                                                                 \
    static outcome name(warp *w, const inst *in, uint32_t mask)                                \
    {                                                                                          \
        READ2();                                                                               \
        uint64_t *d = DESTINATION(in);                                                         \
        uint32_t bad = a.poisoned | b.poisoned;                                                \
        EACH_LANE(mask, T x = (T)a.v[l]; T y = (T)b.v[l]; d[l] = (uint64_t)(R)(__VA_ARGS__);); \
        DONE(bad);                                                                             \
    }
#define EXEC3(name, T, TZ, R, ...)                                                                                \
    static outcome name(warp *w, const inst *in, uint32_t mask)                                                   \
    {                                                                                                             \
        READ3();                                                                                                  \
        uint64_t *d = DESTINATION(in);                                                                            \
        uint32_t bad = a.poisoned | b.poisoned | c.poisoned;                                                      \
        EACH_LANE(mask, T x = (T)a.v[l]; T y = (T)b.v[l]; TZ z = (TZ)c.v[l]; d[l] = (uint64_t)(R)(__VA_ARGS__);); \
        DONE(bad);                                                                                                \
    }

// Packed operations: an undefined element makes that element of the result undefined.
static inline uint8_t spread_elements(uint8_t poison, int element_bytes)
{
    uint8_t ones = (uint8_t)((1u << element_bytes) - 1), r = 0;
    for (int i = 0; i < 8; i += element_bytes)
        if (poison & (uint8_t)(ones << i)) r |= (uint8_t)(ones << i);
    return r;
}

static inline outcome packed_done(warp *w, const inst *in, uint32_t mask, const lanes *const *sources, int count,
                                  int element_bytes)
{
    uint32_t bad = 0;
    for (int i = 0; i < count; i++) bad |= sources[i]->poisoned;
    int reg = in->ops[0].reg;
    if (!((bad | w->poisoned[reg]) & mask)) return RAN;
    uint8_t poison[LANES];
    for (int l = 0; l < LANES; l++) {
        uint8_t p = 0;
        for (int i = 0; i < count; i++) p |= sources[i]->poison[l];
        poison[l] = spread_elements(p, element_bytes);
    }
    set_poison_bytes(w, reg, mask, poison);
    return RAN;
}

#define PACKED2(name, element, ...)                                                       \
    static outcome name(warp *w, const inst *in, uint32_t mask)                           \
    {                                                                                     \
        READ2();                                                                          \
        uint64_t *d = DESTINATION(in);                                                    \
        EACH_LANE(mask, uint64_t x = a.v[l]; uint64_t y = b.v[l]; d[l] = (__VA_ARGS__);); \
        return packed_done(w, in, mask, (const lanes *const[]){&a, &b}, 2, element);      \
    }
#define PACKED3(name, element, ...)                                                                            \
    static outcome name(warp *w, const inst *in, uint32_t mask)                                                \
    {                                                                                                          \
        READ3();                                                                                               \
        uint64_t *d = DESTINATION(in);                                                                         \
        EACH_LANE(mask, uint64_t x = a.v[l]; uint64_t y = b.v[l]; uint64_t z = c.v[l]; d[l] = (__VA_ARGS__);); \
        return packed_done(w, in, mask, (const lanes *const[]){&a, &b, &c}, 3, element);                       \
    }
#define PACKED1(name, element, ...)                                              \
    static outcome name(warp *w, const inst *in, uint32_t mask)                  \
    {                                                                            \
        READ1();                                                                 \
        uint64_t *d = DESTINATION(in);                                           \
        EACH_LANE(mask, uint64_t x = a.v[l]; d[l] = (__VA_ARGS__););             \
        return packed_done(w, in, mask, (const lanes *const[]){&a}, 1, element); \
    }

const char *decode_float(inst *in, const kernel *k); // float.c: add, mul, ... of a floating-point type

#endif
