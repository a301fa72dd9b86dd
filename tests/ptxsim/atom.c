// atom and red (PTX ISA, "atom", "red"): every operation and type, scalar and vector.
#include <math.h>
#include <string.h>

#include "matmul.h"
#include "order.h"

typedef enum { A_AND, A_OR, A_XOR, A_ADD, A_INC, A_DEC, A_MIN, A_MAX, A_EXCH, A_CAS, A_OPS } atom_op;
static const char *const op_names[A_OPS] = {"and", "or", "xor", "add", "inc", "dec", "min", "max", "exch", "cas"};

// memory = memory op value, one element. *memory holds the old value on entry.
typedef void (*combine)(void *memory, const void *value);

#define COMBINE(name, T, expression)                  \
    static void name(void *memory, const void *value) \
    {                                                 \
        T a, b;                                       \
        memcpy(&a, memory, sizeof a);                 \
        memcpy(&b, value, sizeof b);                  \
        a = expression;                               \
        memcpy(memory, &a, sizeof a);                 \
    }
COMBINE(and_32, uint32_t, a &b)
COMBINE(and_64, uint64_t, a &b)
COMBINE(or_32, uint32_t, a | b)
COMBINE(or_64, uint64_t, a | b)
COMBINE(xor_32, uint32_t, a ^ b)
COMBINE(xor_64, uint64_t, a ^ b)
COMBINE(add_32, uint32_t, a + b)
COMBINE(add_64, uint64_t, a + b)
// Seen on an H200: the NaN that a sum gives is always this one.
static float canonical(float x)
{
    const uint32_t nan = 0x7fffffff;
    if (isnan(x)) memcpy(&x, &nan, sizeof x);
    return x;
}
COMBINE(add_f32, float, canonical(a + b))
COMBINE(add_f64, double, a + b)
COMBINE(inc_32, uint32_t, a >= b ? 0 : a + 1)
COMBINE(dec_32, uint32_t, a == 0 || a > b ? b : a - 1)
COMBINE(min_u32, uint32_t, a < b ? a : b)
COMBINE(min_u64, uint64_t, a < b ? a : b)
COMBINE(min_s32, int32_t, a < b ? a : b)
COMBINE(min_s64, int64_t, a < b ? a : b)
COMBINE(max_u32, uint32_t, a > b ? a : b)
COMBINE(max_u64, uint64_t, a > b ? a : b)
COMBINE(max_s32, int32_t, a > b ? a : b)
COMBINE(max_s64, int64_t, a > b ? a : b)

// On global memory atom.add.f32 flushes subnormal inputs and results to zero; on shared memory it does not.
static float flushed(float x)
{
    return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x;
}
COMBINE(add_f32_flushing, float, canonical(flushed(flushed(a) + flushed(b))))

static float least(float a, float b)
{
    if (isnan(a)) return b;
    if (isnan(b)) return a;
    return a < b || (a == b && signbit(a)) ? a : b;
}

static float greatest(float a, float b)
{
    return -least(-a, -b);
}

static float sum(float a, float b)
{
    return a + b;
}

// The sum of two 16-bit floats in f32, rounded again, is the rounded sum: f32 has more than twice their digits and two.
#define COMBINE_HALF(name, format, f)                                                                            \
    static void name(void *memory, const void *value)                                                            \
    {                                                                                                            \
        uint16_t a, b;                                                                                           \
        memcpy(&a, memory, 2);                                                                                   \
        memcpy(&b, value, 2);                                                                                    \
        a = (uint16_t)float_to_format(format, f(format_to_float(format, a), format_to_float(format, b)), false); \
        memcpy(memory, &a, 2);                                                                                   \
    }
COMBINE_HALF(add_f16, T_F16, sum)
COMBINE_HALF(add_bf16, T_BF16, sum)
COMBINE_HALF(min_f16, T_F16, least)
COMBINE_HALF(min_bf16, T_BF16, least)
COMBINE_HALF(max_f16, T_F16, greatest)
COMBINE_HALF(max_bf16, T_BF16, greatest)

static const struct {
    atom_op op;
    type type;
    combine f;
} combines[] = {{A_AND, T_B32, and_32},    {A_AND, T_B64, and_64},  {A_OR, T_B32, or_32},     {A_OR, T_B64, or_64},
                {A_XOR, T_B32, xor_32},    {A_XOR, T_B64, xor_64},  {A_ADD, T_U32, add_32},   {A_ADD, T_S32, add_32},
                {A_ADD, T_U64, add_64},    {A_ADD, T_F32, add_f32}, {A_ADD, T_F64, add_f64},  {A_ADD, T_F16, add_f16},
                {A_ADD, T_BF16, add_bf16}, {A_INC, T_U32, inc_32},  {A_DEC, T_U32, dec_32},   {A_MIN, T_U32, min_u32},
                {A_MIN, T_U64, min_u64},   {A_MIN, T_S32, min_s32}, {A_MIN, T_S64, min_s64},  {A_MIN, T_F16, min_f16},
                {A_MIN, T_BF16, min_bf16}, {A_MAX, T_U32, max_u32}, {A_MAX, T_U64, max_u64},  {A_MAX, T_S32, max_s32},
                {A_MAX, T_S64, max_s64},   {A_MAX, T_F16, max_f16}, {A_MAX, T_BF16, max_bf16}};

// p: 0 space, 1 operation, 2 bytes in all, 3 order, 4 scope, 5 bytes of a register, 6 registers, 7 bytes of an element,
// 8 index of the combination, 9 has a result
static const operand *item_of(const operand *o, int i)
{
    return o->kind == OP_VECTOR ? &o->items[i] : o;
}

// The registers of an operand, side by side, as they lie in memory.
static uint32_t gather(warp *w, const operand *o, int lane, const inst *in, unsigned char *to)
{
    uint32_t poison = 0;
    int bytes = in->p[5];
    for (int i = 0; i < in->p[6]; i++) {
        const operand *item = item_of(o, i);
        uint8_t undefined = 0;
        uint64_t value = read_operand(w, item, lane, (type)in->p[10], &undefined);
        memcpy(to + i * bytes, &value, bytes > 8 ? 8 : (size_t)bytes);
        poison |= (uint32_t)(undefined & (bytes >= 8 ? 0xff : (1u << bytes) - 1)) << i * bytes;
        if (bytes < 16) continue;
        size_t at = (size_t)(item->reg + 1) * LANES + (size_t)lane;
        memcpy(to + 8, &w->regs[at], 8);
        poison |= (uint32_t)w->poison[at] << 8;
    }
    return poison;
}

static void scatter(warp *w, const operand *o, int lane, const inst *in, const unsigned char *from, uint32_t poison)
{
    int bytes = in->p[5];
    for (int i = 0; i < in->p[6]; i++) {
        const operand *item = item_of(o, i);
        if (item->kind != OP_REG) continue;
        uint64_t value = 0;
        memcpy(&value, from + i * bytes, bytes > 8 ? 8 : (size_t)bytes);
        uint8_t undefined = (uint8_t)(poison >> i * bytes & (bytes >= 8 ? 0xff : (1u << bytes) - 1));
        write_register(w, item->reg, lane, value, bytes > 8 ? T_B64 : (type)in->p[10], undefined);
        if (bytes < 16) continue;
        memcpy(&value, from + 8, 8);
        write_register(w, item->reg + 1, lane, value, T_B64, (uint8_t)(poison >> 8));
    }
}

static void apply(const inst *in, bool global, unsigned char *memory, const unsigned char *b, const unsigned char *c)
{
    int size = in->p[2];
    switch ((atom_op)in->p[1]) {
    case A_EXCH: memcpy(memory, b, (size_t)size); return;
    case A_CAS:
        if (!memcmp(memory, b, (size_t)size)) memcpy(memory, c, (size_t)size);
        return;
    default: break;
    }
    combine f = combines[in->p[8]].f;
    if (f == add_f32 && global) f = add_f32_flushing;
    for (int i = 0; i < size; i += in->p[7]) f(memory + i, b + i);
}

static outcome exec_atom(warp *w, const inst *in, uint32_t mask)
{
    cluster *c = w->cta->cluster;
    access_order o = (access_order)in->p[3];
    scope sc = (scope)in->p[4];
    bool result = in->p[9];
    int size = in->p[2];
    accessor x;
    thread_accessor(&x, w, in, __builtin_ctz(mask), true, o, sc, true);
    for (uint32_t lanes = mask; lanes; lanes &= lanes - 1) {
        int lane = __builtin_ctz(lanes);
        unsigned char old[32], b[32], other[32];
        uint64_t address;
        location l;
        accessor_lane(&x, lane);
        uint32_t poison = gather(w, &in->ops[result + 1], lane, in, b);
        if (in->p[1] == A_CAS) poison |= gather(w, &in->ops[result + 2], lane, in, other);
        if (!read_address(w, in, &in->ops[result], lane, &address) ||
            !locate(w, in, lane, (space)in->p[0], address, size, &l) || !access_begin(&x, &l, size))
            return FAILED;
        if (l.kind == LOCATION_PARAM) {
            finding(c, x.at, "out-of-bounds", "kernel parameters are constant");
            return FAILED;
        }
        bool global = l.kind == LOCATION_GLOBAL;
        uint32_t old_poison = 0;
        for (int i = 0; i < size; i++) old_poison |= (uint32_t)l.poison[i] << i;
        memcpy(old, l.data, (size_t)size);
        apply(in, global, l.data, b, other);
        // What comes out is undefined where either side is, but for an exchange.
        uint32_t new_poison = in->p[1] == A_EXCH ? poison : poison | old_poison;
        for (int i = 0; i < size; i++) l.poison[i] = new_poison >> i & 1;
        if (global && new_poison) {
            finding(c, x.at, "poison", "an atomic on global memory at 0x%llx with a value that nobody wrote",
                    (unsigned long long)address);
            memset(l.poison, 0, (size_t)size);
        }
        if (l.kind != LOCATION_PRIVATE) {
            order_strong_read(w, lane, global, location_name(&l), o, sc);
            order_strong_write(w, lane, global, location_name(&l), o, sc, true);
        }
        access_end(&l);
        if (result) scatter(w, &in->ops[0], lane, in, old, old_poison);
    }
    accessor_end(&x);
    c->step++;
    return RAN;
}

static int scope_named(const char *m)
{
    static const char *const names[] = {"cta", "cluster", "gpu", "sys"};
    for (int i = 0; i < 4; i++)
        if (!strcmp(m, names[i])) return i;
    return -1;
}

static bool legal(atom_op op, type element, bool result)
{
    if (op == A_EXCH) return result && (element == T_B32 || element == T_B64 || element == T_B128);
    if (op == A_CAS) return result && (element == T_B16 || element == T_B32 || element == T_B64 || element == T_B128);
    return true;
}

static const char *decode_any(inst *in, const kernel *k, bool result)
{
    space s = SPACE_GENERIC;
    int op = -1, vector = 1;
    bool order = false, has_scope = false, noftz = false, policy = false, space_given = false;
    in->p[3] = ACCESS_RELAXED;
    in->p[4] = SCOPE_GPU;
    type t = T_NONE;
    for (int i = 0; i < in->mods; i++) {
        const char *m = in->mod[i];
        int found = -1;
        for (int j = 0; j < A_OPS; j++)
            if (!strcmp(m, op_names[j])) found = j;
        bool acquires = !strcmp(m, "acquire"), releases = !strcmp(m, "release"), both = !strcmp(m, "acq_rel");
        // The operation and the type come in either order in vector forms.
        if (t == T_NONE && type_from(m) != T_NONE) {
            t = type_from(m);
        } else if (!order && (!strcmp(m, "relaxed") || releases || (result && (acquires || both)))) {
            in->p[3] = acquires ? ACCESS_ACQUIRE : releases ? ACCESS_RELEASE : both ? ACCESS_ACQ_REL : ACCESS_RELAXED;
            order = true;
        } else if (!has_scope && scope_named(m) >= 0) {
            in->p[4] = scope_named(m);
            has_scope = true;
        } else if (!space_given && (!strcmp(m, "global") || !strcmp(m, "shared") || !strcmp(m, "shared::cta") ||
                                    !strcmp(m, "shared::cluster"))) {
            s = !strcmp(m, "global")            ? SPACE_GLOBAL
                : !strcmp(m, "shared::cluster") ? SPACE_SHARED_CLUSTER
                                                : SPACE_SHARED;
            space_given = true;
        } else if (op < 0 && found >= 0) {
            op = found;
        } else if (!strcmp(m, "noftz")) {
            noftz = true;
        } else if (!strcmp(m, "L2::cache_hint")) {
            policy = true;
        } else if (!strcmp(m, "v2") || !strcmp(m, "v4") || !strcmp(m, "v8")) {
            vector = m[1] - '0';
        } else {
            return m;
        }
    }
    if (op < 0 || t == T_NONE) return "an operation and a type are required";
    if (op == A_CAS && !result) return ".cas";
    type element = t == T_F16X2 ? T_F16 : t == T_BF16X2 ? T_BF16 : t;
    bool half = element == T_F16 || element == T_BF16;
    if (half != noftz) return half ? ".noftz is required" : ".noftz is for 16-bit floats";
    if (!legal((atom_op)op, element, result)) return "no such operation on that type";
    in->p[8] = -1;
    for (size_t i = 0; i < sizeof combines / sizeof *combines; i++)
        if ((int)combines[i].op == op && combines[i].type == element) in->p[8] = (int32_t)i;
    if (op != A_EXCH && op != A_CAS && in->p[8] < 0) return "no such operation on that type";
    if (half && op != A_ADD && vector == 1) return ".min and .max of 16-bit floats are for vectors";
    int bytes = type_bytes(t);
    if (vector > 1) {
        bool legal_vector = (t == T_F32 && op == A_ADD && vector <= 4) || ((t == T_F16 || t == T_BF16)) ||
                            ((t == T_F16X2 || t == T_BF16X2) && vector <= 4);
        if (!legal_vector || (s != SPACE_GLOBAL && s != SPACE_GENERIC))
            return "a vector of that type, or not in global memory";
    }
    in->p[0] = (int32_t)s;
    in->p[1] = op;
    in->p[2] = bytes * vector;
    in->p[5] = bytes;
    in->p[6] = vector;
    in->p[7] = type_bytes(element);
    in->p[9] = result;
    in->p[10] = (int32_t)t;
    int operands = 2 + result + (op == A_CAS);
    if (in->nops != operands + policy || in->ops[result].kind != OP_BRACKET) return "operands of atom or red";
    for (int i = 0; i < operands; i++) {
        if (i == result) continue;
        const operand *o = &in->ops[i];
        bool destination = result && i == 0;
        int count = o->kind == OP_VECTOR ? o->count : 1;
        if (destination && o->kind == OP_SINK) continue;
        if (count != vector) return "as many registers as the vector has elements";
        for (int j = 0; j < count; j++) {
            const operand *item = item_of(o, j);
            bool constant = destination ? item->kind == OP_SINK : item->kind == OP_IMM && bytes < 16;
            if (item->kind != OP_REG && !constant) return "operands of atom or red";
            if (item->kind == OP_REG && type_bytes(k->reg_type[item->reg]) < bytes)
                return "a register narrower than the type";
        }
    }
    in->exec = exec_atom;
    in->klass = C_ATOMIC;
    return NULL;
}

const char *decode_atom(inst *in, const kernel *k)
{
    return decode_any(in, k, true);
}

const char *decode_red(inst *in, const kernel *k)
{
    return decode_any(in, k, false);
}
