// ld, st, ldmatrix, stmatrix, movmatrix, and what turns addresses into others (PTX ISA, "Data Movement and Conversion
// Instructions").
#include <string.h>

#include "order.h"

// --------------------------------------------------------------------------------------- modifiers of ld, st, atom

typedef struct {
    space space;
    access_order order;
    scope scope;
    type type;
    int count; // of a vector, else 1
    bool policy, noncoherent, volatile_or_mmio;
} access_form;

static int scope_named(const char *m)
{
    static const char *const names[] = {"cta", "cluster", "gpu", "sys"};
    for (int i = 0; i < 4; i++)
        if (!strcmp(m, names[i])) return i;
    return -1;
}

static bool in_list(const char *m, const char *const *list)
{
    for (; *list; list++)
        if (!strcmp(m, *list)) return true;
    return false;
}

static bool space_named(const char *m, space *s)
{
    static const struct {
        const char *name;
        space space;
    } spaces[] = {{"global", SPACE_GLOBAL},      {"shared", SPACE_SHARED},
                  {"shared::cta", SPACE_SHARED}, {"shared::cluster", SPACE_SHARED_CLUSTER},
                  {"local", SPACE_LOCAL},        {"param", SPACE_PARAM},
                  {"param::entry", SPACE_PARAM}, {"param::func", SPACE_LOCAL},
                  {"const", SPACE_CONST}};
    for (size_t i = 0; i < sizeof spaces / sizeof *spaces; i++)
        if (!strcmp(m, spaces[i].name)) {
            *s = spaces[i].space;
            return true;
        }
    return false;
}

// L1::evict_... and L2::evict_..., L2::64B: hints that change nothing here.
static bool is_hint(const char *m)
{
    static const char *const hints[] = {"L1::evict_normal", "L1::evict_unchanged",
                                        "L1::evict_first",  "L1::evict_last",
                                        "L1::no_allocate",  "L2::evict_normal",
                                        "L2::evict_first",  "L2::evict_last",
                                        "L2::64B",          "L2::128B",
                                        "L2::256B",         NULL};
    return in_list(m, hints);
}

static const char *access_modifiers(const inst *in, const kernel *k, bool load, access_form *f)
{
    static const char *const load_cache[] = {"ca", "cg", "cs", "lu", "cv", NULL};
    static const char *const store_cache[] = {"wb", "cg", "cs", "wt", NULL};
    *f = (access_form){.space = SPACE_GENERIC, .order = ACCESS_WEAK, .scope = SCOPE_SYS, .count = 1};
    bool has_scope = false, mmio = false, cache = false, space_given = false;
    for (int i = 0; i < in->mods; i++) {
        const char *m = in->mod[i];
        if (i == in->mods - 1) {
            f->type = type_from(m);
            switch (f->type) {
            case T_B8:
            case T_B16:
            case T_B32:
            case T_B64:
            case T_B128:
            case T_U8:
            case T_U16:
            case T_U32:
            case T_U64:
            case T_S8:
            case T_S16:
            case T_S32:
            case T_S64:
            case T_F32:
            case T_F64: break;
            default: return m;
            }
        } else if (!space_given && space_named(m, &f->space)) {
            space_given = true;
        } else if (!strcmp(m, "weak") && i == 0) {
            continue;
        } else if (!strcmp(m, "volatile") && i == 0) {
            f->order = ACCESS_VOLATILE;
        } else if (!strcmp(m, "mmio") && i == 0) {
            mmio = true;
        } else if (!strcmp(m, "relaxed") && f->order == ACCESS_WEAK) {
            f->order = ACCESS_RELAXED;
        } else if (!strcmp(m, load ? "acquire" : "release") && f->order == ACCESS_WEAK && !mmio) {
            f->order = load ? ACCESS_ACQUIRE : ACCESS_RELEASE;
        } else if (scope_named(m) >= 0 && !has_scope) {
            f->scope = (scope)scope_named(m);
            has_scope = true;
        } else if (!strcmp(m, "nc") && load) {
            f->noncoherent = true;
        } else if (in_list(m, load ? load_cache : store_cache) && !cache) {
            cache = true;
        } else if (!strcmp(m, "L2::cache_hint")) {
            f->policy = true;
        } else if (!strcmp(m, "v2") || !strcmp(m, "v4") || !strcmp(m, "v8")) {
            f->count = m[1] - '0';
        } else if (!is_hint(m)) {
            return m;
        }
    }
    if (!f->type) return "a type is required";
    bool strong = f->order != ACCESS_WEAK && f->order != ACCESS_VOLATILE;
    if (strong != has_scope) return strong ? "a scope is required" : "a scope without .relaxed, .acquire or .release";
    if (mmio && (f->order != ACCESS_RELAXED || f->scope != SCOPE_SYS ||
                 (f->space != SPACE_GLOBAL && f->space != SPACE_GENERIC)))
        return ".mmio is .relaxed.sys.global";
    if (f->noncoherent && (f->space != SPACE_GLOBAL || f->order != ACCESS_WEAK)) return ".nc is for weak .global loads";
    if (cache && f->order != ACCESS_WEAK) return "a cache operator with .volatile, .relaxed, .acquire or .release";
    if (strong && (f->space == SPACE_LOCAL || f->space == SPACE_PARAM || f->space == SPACE_CONST))
        return "an order for private memory";
    int bytes = f->count * type_bytes(f->type);
    if (bytes > 16 || f->count == 8) {
        bool wide = (f->count == 8 && type_bytes(f->type) == 4) || (f->count == 4 && type_bytes(f->type) == 8);
        if (!wide || f->space != SPACE_GLOBAL || !target_has(k, FEATURE_SM100))
            return "a vector of more than 16 bytes: .v8 of 32 bits or .v4 of 64, .global, sm_100 and later";
    }
    return NULL;
}

// ------------------------------------------------------------------------------------------------------- registers

// An element of bytes (1 to 8) of a buffer, and its poison, to a register; sign_to: extended to so many bytes, or 0.
static inline void element_to_register(warp *w, int reg, int lane, const unsigned char *from, uint32_t poison,
                                       int bytes, int sign_to)
{
    uint64_t value = 0;
    switch (bytes) {
    case 4: memcpy(&value, from, 4); break;
    case 8: memcpy(&value, from, 8); break;
    default: memcpy(&value, from, (size_t)bytes);
    }
    size_t at = (size_t)reg * LANES + (size_t)lane;
    uint8_t undefined = (uint8_t)(poison & ((1u << bytes) - 1));
    if (sign_to) {
        int shift = 64 - 8 * bytes;
        value = (uint64_t)((int64_t)(value << shift) >> shift);
        if (sign_to < 8) value &= ((uint64_t)1 << 8 * sign_to) - 1;
        if (undefined >> (bytes - 1)) undefined |= (uint8_t)(((1u << sign_to) - 1) & ~((1u << bytes) - 1));
    }
    w->regs[at] = value;
    w->poison[at] = undefined;
    uint32_t bit = 1u << lane;
    w->poisoned[reg] = undefined ? w->poisoned[reg] | bit : w->poisoned[reg] & ~bit;
}

static inline uint32_t operand_to_element(warp *w, const operand *o, int lane, type t, int bytes, unsigned char *to)
{
    uint8_t poison = 0;
    uint64_t value;
    if (o->kind == OP_REG) {
        size_t at = (size_t)o->reg * LANES + (size_t)lane;
        value = w->regs[at];
        poison = w->poison[at];
        if (bytes == 16) {
            memcpy(to, &value, 8);
            memcpy(to + 8, &w->regs[at + LANES], 8);
            return poison | (uint32_t)w->poison[at + LANES] << 8;
        }
    } else {
        value = read_operand(w, o, lane, t, &poison);
        if (bytes == 16) memset(to + 8, 0, 8);
    }
    switch (bytes) {
    case 4: memcpy(to, &value, 4); break;
    case 8:
    case 16: memcpy(to, &value, 8); break;
    default: memcpy(to, &value, (size_t)bytes);
    }
    return poison & ((1u << bytes) - 1);
}

// read_address, at once where nothing is undefined and nothing wraps.
static inline bool address_of(warp *w, const inst *in, const operand *bracket, int lane, uint64_t *address)
{
    const operand *o = &bracket->items[0];
    if (o->reg < 0 || o->symbol >= 0 || w->poisoned[o->reg] || o->imm < 0)
        return read_address(w, in, bracket, lane, address);
    uint64_t base = w->regs[(size_t)o->reg * LANES + (size_t)lane];
    *address = base + (uint64_t)o->imm;
    // A 32-bit sum may wrap round.
    return base <= UINT32_MAX && *address > UINT32_MAX ? read_address(w, in, bracket, lane, address) : true;
}

static int items_of(const operand *o)
{
    return o->kind == OP_VECTOR ? o->count : 1;
}

static const operand *item_of(const operand *o, int i)
{
    return o->kind == OP_VECTOR ? &o->items[i] : o;
}

static bool destinations(const operand *o, int count)
{
    if (items_of(o) != count) return false;
    for (int i = 0; i < count; i++)
        if (item_of(o, i)->kind != OP_REG && item_of(o, i)->kind != OP_SINK) return false;
    return true;
}

static bool sources(const operand *o, int count, int bytes, const kernel *k)
{
    if (items_of(o) != count) return false;
    for (int i = 0; i < count; i++) {
        const operand *item = item_of(o, i);
        bool wide_register = item->kind == OP_REG && type_bytes(k->reg_type[item->reg]) >= bytes;
        if (!wide_register && item->kind != OP_IMM) return false;
    }
    return true;
}

// ----------------------------------------------------------------------------------------------------------- ld, st

// p: 0 space, 1 type, 2 count, 3 order, 4 scope, 5 bytes in all, 6 noncoherent, 7 bytes of the destination registers,
// 8 of an element
static outcome exec_ld(warp *w, const inst *in, uint32_t mask)
{
    accessor x;
    access_order o = (access_order)in->p[3];
    scope sc = (scope)in->p[4];
    type t = (type)in->p[1];
    const operand *to = &in->ops[0];
    int count = in->p[2], bytes = in->p[8];
    bool sign = t == T_S8 || t == T_S16 || t == T_S32;
    thread_accessor(&x, w, in, __builtin_ctz(mask), false, o, sc, false);
    if (in->p[6]) x.e.flags |= ENTRY_NONCOHERENT;
    bool fine = true;
    for (uint32_t lanes = mask; lanes && fine; lanes &= lanes - 1) {
        int lane = __builtin_ctz(lanes);
        uint64_t address;
        unsigned char data[32];
        uint32_t poison;
        accessor_lane(&x, lane);
        fine = address_of(w, in, &in->ops[1], lane, &address) &&
               load_with(&x, (space)in->p[0], address, in->p[5], data, &poison, o, sc);
        for (int i = 0; i < count && fine; i++) {
            const operand *item = item_of(to, i);
            if (item->kind != OP_REG) continue;
            const unsigned char *element = data + i * bytes;
            element_to_register(w, item->reg, lane, element, poison >> i * bytes, bytes < 8 ? bytes : 8,
                                sign ? in->p[7] : 0);
            if (bytes == 16) element_to_register(w, item->reg + 1, lane, element + 8, poison >> 8, 8, 0);
        }
    }
    accessor_end(&x);
    return fine ? RAN : FAILED;
}

static outcome exec_st(warp *w, const inst *in, uint32_t mask)
{
    accessor x;
    access_order o = (access_order)in->p[3];
    scope sc = (scope)in->p[4];
    type t = (type)in->p[1];
    const operand *from = &in->ops[1];
    int count = in->p[2], bytes = in->p[8];
    thread_accessor(&x, w, in, __builtin_ctz(mask), true, o, sc, false);
    bool fine = true;
    for (uint32_t lanes = mask; lanes && fine; lanes &= lanes - 1) {
        int lane = __builtin_ctz(lanes);
        uint64_t address;
        unsigned char data[32];
        uint32_t poison = 0;
        accessor_lane(&x, lane);
        for (int i = 0; i < count; i++)
            poison |= operand_to_element(w, item_of(from, i), lane, t, bytes, data + i * bytes) << i * bytes;
        fine = address_of(w, in, &in->ops[0], lane, &address) &&
               store_with(&x, (space)in->p[0], address, in->p[5], data, poison, o, sc);
    }
    accessor_end(&x);
    return fine ? RAN : FAILED;
}

static bool is_address(const operand *o)
{
    return o->kind == OP_BRACKET && o->count == 1;
}

static void set_form(inst *in, const access_form *f)
{
    in->p[0] = (int32_t)f->space;
    in->p[1] = (int32_t)f->type;
    in->p[2] = f->count;
    in->p[3] = (int32_t)f->order;
    in->p[4] = (int32_t)f->scope;
    in->p[5] = f->count * type_bytes(f->type);
    in->p[6] = f->noncoherent;
    in->p[8] = type_bytes(f->type);
}

static const char *decode_ld(inst *in, const kernel *k)
{
    access_form f;
    const char *wrong = access_modifiers(in, k, true, &f);
    if (wrong) return wrong;
    if (in->nops != 2 + f.policy || !is_address(&in->ops[1]) || !destinations(&in->ops[0], f.count))
        return "operands: destination, [address]{, policy}";
    set_form(in, &f);
    in->p[7] = 8;
    for (int i = 0; i < f.count; i++) {
        const operand *o = item_of(&in->ops[0], i);
        if (o->kind != OP_REG) continue;
        in->p[7] = type_bytes(k->reg_type[o->reg]);
        if (in->p[7] < type_bytes(f.type)) return "a destination register narrower than the type";
    }
    in->exec = exec_ld;
    in->klass = C_LOAD;
    return NULL;
}

// ldu: the memory is read-only while the kernel runs, as for .nc.
static const char *decode_ldu(inst *in, const kernel *k)
{
    const char *wrong = decode_ld(in, k);
    if (wrong) return wrong;
    if ((in->p[0] != SPACE_GLOBAL && in->p[0] != SPACE_GENERIC) || in->p[3] != ACCESS_WEAK || in->p[6])
        return "ldu is for weak .global loads";
    in->p[6] = 1;
    return NULL;
}

static const char *decode_st(inst *in, const kernel *k)
{
    access_form f;
    const char *wrong = access_modifiers(in, k, false, &f);
    if (wrong) return wrong;
    if (f.space == SPACE_CONST || f.space == SPACE_PARAM) return "a store to constant memory";
    if (in->nops != 2 + f.policy || !is_address(&in->ops[0]) || !sources(&in->ops[1], f.count, type_bytes(f.type), k))
        return "operands: [address], value as wide as the type{, policy}";
    set_form(in, &f);
    in->exec = exec_st;
    in->klass = C_STORE;
    return NULL;
}

// ---------------------------------------------------------------------------------------- ldmatrix, stmatrix,
// movmatrix

// p: 0 matrices, 1 transposed, 2 space. Lane 8 * m + r has the address of row r (16 bytes) of matrix m.
typedef struct {
    uint16_t of[4][8][8];
    uint8_t poison[4][8][8]; // bit i = byte i of the element
} matrices;

// Where a lane's half h of the register of a matrix is: row and column.
static void fragment_place(int lane, int h, bool transposed, int *row, int *column)
{
    int along = 2 * (lane % 4) + h, across = lane / 4;
    *row = transposed ? along : across;
    *column = transposed ? across : along;
}

static outcome exec_ldmatrix(warp *w, const inst *in, uint32_t mask)
{
    matrices m;
    int count = in->p[0];
    accessor x;
    thread_accessor(&x, w, in, 0, false, ACCESS_WEAK, SCOPE_CTA, false);
    for (int i = 0; i < 8 * count; i++) {
        uint64_t address;
        uint32_t poison;
        accessor_lane(&x, i);
        if (!read_address(w, in, &in->ops[1], i, &address) ||
            !load_with(&x, (space)in->p[2], address, 16, m.of[i / 8][i % 8], &poison, ACCESS_WEAK, SCOPE_CTA))
            return FAILED;
        for (int j = 0; j < 8; j++) m.poison[i / 8][i % 8][j] = poison >> 2 * j & 3;
    }
    accessor_end(&x);
    for (int i = 0; i < count; i++)
        for (uint32_t lanes = mask; lanes; lanes &= lanes - 1) {
            int lane = __builtin_ctz(lanes), row, column;
            uint32_t value = 0;
            uint8_t poison = 0;
            for (int h = 0; h < 2; h++) {
                fragment_place(lane, h, in->p[1], &row, &column);
                value |= (uint32_t)m.of[i][row][column] << 16 * h;
                poison |= (uint8_t)(m.poison[i][row][column] << 2 * h);
            }
            write_register(w, item_of(&in->ops[0], i)->reg, lane, value, T_B32, poison);
        }
    return RAN;
}

static outcome exec_stmatrix(warp *w, const inst *in, uint32_t mask)
{
    matrices m;
    int count = in->p[0];
    for (int i = 0; i < count; i++)
        for (uint32_t lanes = mask; lanes; lanes &= lanes - 1) {
            int lane = __builtin_ctz(lanes), row, column;
            unsigned char data[4];
            uint32_t poison = operand_to_element(w, item_of(&in->ops[1], i), lane, T_B32, 4, data);
            for (int h = 0; h < 2; h++) {
                fragment_place(lane, h, in->p[1], &row, &column);
                memcpy(&m.of[i][row][column], data + 2 * h, 2);
                m.poison[i][row][column] = poison >> 2 * h & 3;
            }
        }
    accessor x;
    thread_accessor(&x, w, in, 0, true, ACCESS_WEAK, SCOPE_CTA, false);
    for (int i = 0; i < 8 * count; i++) {
        uint64_t address;
        uint32_t poison = 0;
        accessor_lane(&x, i);
        for (int j = 0; j < 8; j++) poison |= (uint32_t)m.poison[i / 8][i % 8][j] << 2 * j;
        if (!read_address(w, in, &in->ops[0], i, &address) ||
            !store_with(&x, (space)in->p[2], address, 16, m.of[i / 8][i % 8], poison, ACCESS_WEAK, SCOPE_CTA))
            return FAILED;
    }
    accessor_end(&x);
    return RAN;
}

static outcome exec_movmatrix(warp *w, const inst *in, uint32_t mask)
{
    uint16_t of[8][8];
    uint8_t poison_of[8][8];
    for (int lane = 0; lane < LANES; lane++) {
        unsigned char data[4];
        uint32_t poison = operand_to_element(w, &in->ops[1], lane, T_B32, 4, data);
        for (int h = 0; h < 2; h++) {
            memcpy(&of[lane / 4][2 * (lane % 4) + h], data + 2 * h, 2);
            poison_of[lane / 4][2 * (lane % 4) + h] = poison >> 2 * h & 3;
        }
    }
    for (uint32_t lanes = mask; lanes; lanes &= lanes - 1) {
        int lane = __builtin_ctz(lanes), c = lane / 4, r = 2 * (lane % 4);
        write_register(w, in->ops[0].reg, lane, of[r][c] | (uint32_t)of[r + 1][c] << 16, T_B32,
                       (uint8_t)(poison_of[r][c] | poison_of[r + 1][c] << 2));
    }
    return RAN;
}

static const char *decode_matrix(inst *in, bool load)
{
    static const char *const allowed[] = {"sync",  "aligned", "m8n8",        "x1",  "x2", "x4",
                                          "trans", "shared",  "shared::cta", "b16", NULL};
    const char *wrong = mods_only(in, allowed);
    if (wrong) return wrong;
    if (mod_index(in, "sync") < 0 || mod_index(in, "aligned") < 0 || mod_index(in, "m8n8") < 0 ||
        mod_index(in, "b16") < 0)
        return ".sync.aligned.m8n8.b16 are required";
    int count = mod_index(in, "x4") >= 0 ? 4 : mod_index(in, "x2") >= 0 ? 2 : mod_index(in, "x1") >= 0 ? 1 : 0;
    if (!count) return ".x1, .x2 or .x4 is required";
    in->p[0] = count;
    in->p[1] = mod_index(in, "trans") >= 0;
    in->p[2] = mod_index(in, "shared") >= 0 || mod_index(in, "shared::cta") >= 0 ? SPACE_SHARED : SPACE_GENERIC;
    in->flags |= IN_ALIGNED;
    in->klass = load ? C_LOAD : C_STORE;
    const operand *registers = &in->ops[load ? 0 : 1], *address = &in->ops[load ? 1 : 0];
    if (in->nops != 2 || !is_address(address) || items_of(registers) != count)
        return "operands: as many registers as matrices, [address]";
    for (int i = 0; i < count; i++)
        if (item_of(registers, i)->kind != OP_REG) return "operands: as many registers as matrices, [address]";
    in->exec = load ? exec_ldmatrix : exec_stmatrix;
    return NULL;
}

static const char *decode_ldmatrix(inst *in, const kernel *k)
{
    (void)k;
    return decode_matrix(in, true);
}

static const char *decode_stmatrix(inst *in, const kernel *k)
{
    (void)k;
    return decode_matrix(in, false);
}

static const char *decode_movmatrix(inst *in, const kernel *k)
{
    (void)k;
    static const char *const allowed[] = {"sync", "aligned", "m8n8", "trans", "b16", NULL};
    const char *wrong = mods_only(in, allowed);
    if (wrong) return wrong;
    if (in->mods != 5) return ".sync.aligned.m8n8.trans.b16 are required";
    if (in->nops != 2 || in->ops[0].kind != OP_REG || in->ops[1].kind != OP_REG) return "operands: d, a";
    in->flags |= IN_ALIGNED;
    in->klass = C_WARP;
    in->exec = exec_movmatrix;
    return NULL;
}

// ------------------------------------------------------------------------------------------- addresses and policies

static uint64_t window_of(space s)
{
    switch (s) {
    case SPACE_SHARED:
    case SPACE_SHARED_CLUSTER: return WINDOW_SHARED;
    case SPACE_LOCAL: return WINDOW_LOCAL;
    case SPACE_PARAM: return WINDOW_PARAM;
    default: return 0; // global and const addresses are generic ones
    }
}

static void put(warp *w, const inst *in, int lane, uint64_t value, type t, uint8_t poison)
{
    write_register(w, in->ops[0].reg, lane, value, t, poison);
}

static bool operand_of(warp *w, const inst *in, int index, int lane, type t, const char *what, uint64_t *value)
{
    uint8_t poison = 0;
    *value = read_operand(w, &in->ops[index], lane, t, &poison);
    if (!poison) return true;
    finding(w->cta->cluster, (place){w, in, lane}, "poison", "%s is a value that nobody wrote", what);
    return false;
}

// p: 0 space, 1 type, 2 to a space
static outcome exec_cvta(warp *w, const inst *in, uint32_t mask)
{
    type t = (type)in->p[1];
    uint64_t window = window_of((space)in->p[0]);
    for (uint32_t lanes = mask; lanes; lanes &= lanes - 1) {
        int lane = __builtin_ctz(lanes);
        uint8_t poison = 0;
        uint64_t address = read_operand(w, &in->ops[1], lane, t, &poison);
        if (in->p[2] && window && !poison && (address & WINDOW_MASK) != window) {
            finding(w->cta->cluster, (place){w, in, lane}, "out-of-bounds",
                    "the generic address 0x%llx is not in that space", (unsigned long long)address);
            return FAILED;
        }
        if (window) address = in->p[2] ? address & ~WINDOW_MASK : (address & ~WINDOW_MASK) | window;
        put(w, in, lane, address, t, poison);
    }
    return RAN;
}

static outcome exec_isspacep(warp *w, const inst *in, uint32_t mask)
{
    space s = (space)in->p[0];
    for (uint32_t lanes = mask; lanes; lanes &= lanes - 1) {
        int lane = __builtin_ctz(lanes);
        uint64_t address;
        if (!operand_of(w, in, 1, lane, T_U64, "the address", &address)) return FAILED;
        uint64_t window = address & WINDOW_MASK;
        bool in_window = window_of(s) ? window == window_of(s)
                                      : window != WINDOW_SHARED && window != WINDOW_LOCAL && window != WINDOW_PARAM;
        if (s == SPACE_SHARED) in_window &= (address >> 24 & 0xff) == (uint64_t)w->cta->rank;
        put(w, in, lane, in_window && s != SPACE_CONST, T_PRED, 0);
    }
    return RAN;
}

static outcome exec_mapa(warp *w, const inst *in, uint32_t mask)
{
    type t = (type)in->p[1];
    for (uint32_t lanes = mask; lanes; lanes &= lanes - 1) {
        int lane = __builtin_ctz(lanes);
        uint64_t address, rank;
        if (!operand_of(w, in, 1, lane, t, "the address", &address) ||
            !operand_of(w, in, 2, lane, T_U32, "the CTA's rank", &rank))
            return FAILED;
        bool generic = in->p[0] == SPACE_GENERIC;
        if (rank >= (uint64_t)w->cta->cluster->ctas || (generic && (address & WINDOW_MASK) != WINDOW_SHARED)) {
            finding(w->cta->cluster, (place){w, in, lane}, "out-of-bounds",
                    "mapa of 0x%llx to CTA %llu of a cluster of %d", (unsigned long long)address,
                    (unsigned long long)rank, w->cta->cluster->ctas);
            return FAILED;
        }
        put(w, in, lane, (address & ~(uint64_t)0xff000000) | rank << 24, t, 0);
    }
    return RAN;
}

static outcome exec_getctarank(warp *w, const inst *in, uint32_t mask)
{
    for (uint32_t lanes = mask; lanes; lanes &= lanes - 1) {
        int lane = __builtin_ctz(lanes);
        uint64_t address;
        if (!operand_of(w, in, 1, lane, (type)in->p[1], "the address", &address)) return FAILED;
        put(w, in, lane, address >> 24 & 0xff, T_U32, 0);
    }
    return RAN;
}

// Caches are not simulated: a policy is a value, a prefetch an address that must not be undefined.
static outcome exec_createpolicy(warp *w, const inst *in, uint32_t mask)
{
    for (uint32_t lanes = mask; lanes; lanes &= lanes - 1)
        put(w, in, __builtin_ctz(lanes), 0x12f0000000000000u, T_B64, 0);
    return RAN;
}

static outcome exec_prefetch(warp *w, const inst *in, uint32_t mask)
{
    for (uint32_t lanes = mask; lanes; lanes &= lanes - 1) {
        uint64_t address;
        if (!read_address(w, in, &in->ops[0], __builtin_ctz(lanes), &address)) return FAILED;
    }
    return RAN;
}

// discard.global.L2: what the 128 bytes held is lost.
static outcome exec_discard(warp *w, const inst *in, uint32_t mask)
{
    accessor x;
    thread_accessor(&x, w, in, __builtin_ctz(mask), true, ACCESS_WEAK, SCOPE_CTA, false);
    for (uint32_t lanes = mask; lanes; lanes &= lanes - 1) {
        int lane = __builtin_ctz(lanes);
        uint64_t address;
        location l;
        accessor_lane(&x, lane);
        if (!read_address(w, in, &in->ops[0], lane, &address) ||
            !locate(w, in, lane, (space)in->p[0], address, 128, &l) || !access_begin(&x, &l, 128))
            return FAILED;
        memset(l.poison, 1, 128);
        access_end(&l);
    }
    accessor_end(&x);
    return RAN;
}

static const char *decode_cvta(inst *in, const kernel *k)
{
    (void)k;
    bool to = in->mods && !strcmp(in->mod[0], "to");
    space s;
    if (in->mods != 2 + to || !space_named(in->mod[to], &s) || s == SPACE_GENERIC) return "cvta{.to}.space.size";
    in->p[0] = (int32_t)s;
    in->p[1] = (int32_t)type_from(in->mod[in->mods - 1]);
    in->p[2] = to;
    if (in->p[1] != T_U64) return in->mod[in->mods - 1];
    if (in->nops != 2 || in->ops[0].kind != OP_REG) return "operands: d, a";
    in->exec = exec_cvta;
    in->klass = C_CONVERT;
    return NULL;
}

static const char *decode_isspacep(inst *in, const kernel *k)
{
    (void)k;
    space s;
    if (in->mods != 1 || !space_named(in->mod[0], &s)) return in->mods ? in->mod[0] : "a space is required";
    in->p[0] = (int32_t)s;
    if (in->nops != 2 || in->ops[0].kind != OP_REG) return "operands: p, a";
    in->exec = exec_isspacep;
    in->klass = C_OTHER;
    return NULL;
}

static const char *decode_window(inst *in, outcome (*exec)(warp *, const inst *, uint32_t), int operands)
{
    bool shared = in->mods == 2 && !strcmp(in->mod[0], "shared::cluster");
    if (!shared && in->mods != 1) return in->mods ? in->mod[0] : "a type is required";
    in->p[0] = shared ? SPACE_SHARED_CLUSTER : SPACE_GENERIC;
    in->p[1] = (int32_t)type_from(in->mod[in->mods - 1]);
    if (in->p[1] != T_U32 && in->p[1] != T_U64) return in->mod[in->mods - 1];
    if (in->nops != operands || in->ops[0].kind != OP_REG)
        return operands == 3 ? "operands: d, a, rank" : "operands: d, a";
    in->exec = exec;
    in->klass = C_OTHER;
    return NULL;
}

static const char *decode_mapa(inst *in, const kernel *k)
{
    (void)k;
    return decode_window(in, exec_mapa, 3);
}

static const char *decode_getctarank(inst *in, const kernel *k)
{
    (void)k;
    return decode_window(in, exec_getctarank, 2);
}

static const char *decode_createpolicy(inst *in, const kernel *k)
{
    (void)k;
    static const char *const allowed[] = {
        "fractional",          "range", "cvt", "L2", "global", "L2::evict_last", "L2::evict_normal", "L2::evict_first",
        "L2::evict_unchanged", "b64",   NULL};
    const char *wrong = mods_only(in, allowed);
    if (wrong) return wrong;
    if (in->mods < 2 || strcmp(in->mod[in->mods - 1], "b64")) return ".b64 is required, last";
    const char *form = in->mod[0];
    int least = !strcmp(form, "fractional") ? 1 : !strcmp(form, "range") ? 4 : !strcmp(form, "cvt") ? 2 : 99;
    int most = least == 1 ? 2 : least;
    if (in->nops < least || in->nops > most || in->ops[0].kind != OP_REG) return "operands of createpolicy";
    in->exec = exec_createpolicy;
    in->klass = C_OTHER;
    return NULL;
}

static const char *decode_prefetch(inst *in, const kernel *k)
{
    (void)k;
    static const char *const allowed[] = {"global", "local", "param",          "param::entry",     "const",
                                          "L1",     "L2",    "L2::evict_last", "L2::evict_normal", "tensormap",
                                          NULL};
    const char *wrong = mods_only(in, allowed);
    if (wrong) return wrong;
    if (!in->mods) return "a cache level is required";
    if (in->nops != 1 || !is_address(&in->ops[0])) return "operands: [address]";
    in->exec = exec_prefetch;
    in->klass = C_OTHER;
    return NULL;
}

static const char *decode_prefetchu(inst *in, const kernel *k)
{
    if (in->mods != 1 || strcmp(in->mod[0], "L1")) return in->mods ? in->mod[0] : ".L1 is required";
    return decode_prefetch(in, k);
}

static const char *decode_applypriority(inst *in, const kernel *k)
{
    (void)k;
    static const char *const allowed[] = {"global", "L2::evict_normal", NULL};
    const char *wrong = mods_only(in, allowed);
    if (wrong) return wrong;
    if (mod_index(in, "L2::evict_normal") < 0) return ".L2::evict_normal is required";
    if (in->nops != 2 || !is_address(&in->ops[0]) || in->ops[1].kind != OP_IMM || in->ops[1].imm != 128)
        return "operands: [address], 128";
    in->exec = exec_prefetch;
    in->klass = C_OTHER;
    return NULL;
}

static const char *decode_discard(inst *in, const kernel *k)
{
    (void)k;
    static const char *const allowed[] = {"global", "L2", NULL};
    const char *wrong = mods_only(in, allowed);
    if (wrong) return wrong;
    if (mod_index(in, "L2") < 0) return ".L2 is required";
    if (in->nops != 2 || !is_address(&in->ops[0]) || in->ops[1].kind != OP_IMM || in->ops[1].imm != 128)
        return "operands: [address], 128";
    in->p[0] = mod_index(in, "global") >= 0 ? SPACE_GLOBAL : SPACE_GENERIC;
    in->exec = exec_discard;
    in->klass = C_OTHER;
    return NULL;
}

const inst_row memory_rows[] = {{"ld", decode_ld},
                                {"ldu", decode_ldu},
                                {"st", decode_st},
                                {"atom", decode_atom},
                                {"red", decode_red},
                                {"ldmatrix", decode_ldmatrix},
                                {"stmatrix", decode_stmatrix},
                                {"movmatrix", decode_movmatrix},
                                {"cvta", decode_cvta},
                                {"isspacep", decode_isspacep},
                                {"mapa", decode_mapa},
                                {"getctarank", decode_getctarank},
                                {"createpolicy", decode_createpolicy},
                                {"prefetch", decode_prefetch},
                                {"prefetchu", decode_prefetchu},
                                {"applypriority", decode_applypriority},
                                {"discard", decode_discard},
                                {NULL, NULL}};
