// Tensor memory and the 5th generation tensor core: tcgen05.alloc, dealloc, relinquish_alloc_permit, mma, commit, cp,
// ld, st, wait, fence. PTX ISA, "TensorCore 5th Generation Family Instructions". No sm_100 silicon was at hand: layouts
// are the manual's, as CUTLASS's layout algebra spells them out.
#include "matmul.h"

#include <stdlib.h>
#include <string.h>

enum {
    TMEM_LANES = 128,
    TMEM_COLUMNS = 512,
    BLOCK_COLUMNS = 32, // allocations are multiples of this
    BLOCKS = TMEM_COLUMNS / BLOCK_COLUMNS,
    MAX_N = 256,
    MAX_K = 32,
    PAIR_TICKETS = 16, // allocations of a CTA pair that one CTA may be ahead by
};

static place here(warp *w, const inst *in, int lane)
{
    return (place){w, in, lane};
}

static int first_lane(uint32_t mask)
{
    int lane = 0;
    while (!(mask >> lane & 1)) lane++;
    return lane;
}

// A CTA pair is two CTAs whose ranks differ in bit 0 ("CTA Pair"). NULL when the cluster has no such CTA.
static cta *peer_of(cta *c)
{
    int rank = c->rank ^ 1;
    return rank < c->cluster->ctas ? &c->cluster->cta[rank] : NULL;
}

// ------------------------------------------------------------------------------------------------ a warp's state

typedef struct {
    operation **items;
    int count, room;
} operation_list;

static void list_add(operation_list *l, operation *op)
{
    if (l->count == l->room) {
        l->room = l->room ? 2 * l->room : 8;
        l->items = realloc(l->items, (size_t)l->room * sizeof *l->items);
    }
    l->items[l->count++] = op;
}

static void list_clear(operation_list *l)
{
    for (int i = 0; i < l->count; i++) operation_release(l->items[i]);
    l->count = 0;
}

typedef struct {
    bool valid;
    uint64_t key; // of the A operand that the buffer holds
} collector;

struct tensor_state {
    operation_list loads, stores;     // not waited for yet
    uint32_t last_load, last_store;   // their last numbers in the stream
    operation *last[LANES];           // of mma, cp, commit: they run in issue order
    collector collector[LANES];       // collector::a of each thread
    int alloc_ticket, dealloc_ticket; // of the pair's alloc or dealloc that this warp is blocked in, or 0
};

void tcgen05_warp_start(warp *w)
{
    w->tensor = calloc(1, sizeof *w->tensor);
}

void tcgen05_warp_end(warp *w)
{
    struct tensor_state *s = w->tensor;
    if (!s) return;
    list_clear(&s->loads);
    list_clear(&s->stores);
    free(s->loads.items);
    free(s->stores.items);
    for (int lane = 0; lane < LANES; lane++)
        if (s->last[lane]) operation_release(s->last[lane]);
    free(s);
    w->tensor = NULL;
}

// --------------------------------------------------------------------------------------------------- allocation

struct tmem_allocator {
    int base[BLOCKS]; // 1 + first block of the allocation that holds the block, or 0
    int cta_group;    // of the instructions seen, or 0
    int last_columns; // of the last allocation, or 0
    bool relinquished;
    // cta_group::2: how many allocs and deallocs this CTA has come to, and how many are granted.
    int arrivals, grants, dealloc_arrivals;
    int wanted[PAIR_TICKETS], granted[PAIR_TICKETS]; // columns, base column by ticket
};

void tcgen05_cta_start(cta *c)
{
    if (c->cluster->grid->kernel->module->sm < 100) return;
    size_t words = (size_t)TMEM_LANES * TMEM_COLUMNS;
    c->tmem = calloc(words, sizeof *c->tmem);
    c->tmem_poison = malloc(words);
    memset(c->tmem_poison, 0xf, words);
    c->allocator = calloc(1, sizeof *c->allocator);
}

void tcgen05_cta_end(cta *c)
{
    free(c->tmem);
    free(c->tmem_poison);
    free(c->allocator);
    c->tmem = NULL;
    c->tmem_poison = NULL;
    c->allocator = NULL;
}

void tcgen05_cta_exit(cta *c)
{
    if (!c->allocator) return;
    for (int b = 0; b < BLOCKS; b++)
        if (c->allocator->base[b]) {
            finding(c->cluster, (place){NULL, NULL, -1}, "tcgen05",
                    "CTA %d exited with tensor memory allocated at column %d: every allocation must be deallocated",
                    c->rank, (c->allocator->base[b] - 1) * BLOCK_COLUMNS);
            return;
        }
}

static bool columns_allocated(const cta *c, int column, int count)
{
    for (int b = column / BLOCK_COLUMNS; b <= (column + count - 1) / BLOCK_COLUMNS; b++)
        if (!c->allocator->base[b]) return false;
    return true;
}

// Columns of an access: inside TMEM and allocated.
static bool columns_valid(cta *c, place at, const char *what, int column, int count)
{
    if (column + count > TMEM_COLUMNS) {
        finding(c->cluster, at, "tcgen05", "%s uses TMEM columns %d to %d: there are 512", what, column,
                column + count - 1);
        return false;
    }
    if (!columns_allocated(c, column, count)) {
        finding(c->cluster, at, "tcgen05", "%s uses TMEM columns %d to %d of CTA %d, which are not all allocated", what,
                column, column + count - 1, c->rank);
        return false;
    }
    return true;
}

// The first of the free places for this many columns in all of the allocators, or -1. Places are multiples of the size;
// which one a program gets is not promised, so the schedules differ: lowest (early), highest (late), any (random).
static int free_place(cluster *c, struct tmem_allocator *const *allocators, int count, int columns)
{
    int blocks = columns / BLOCK_COLUMNS, places[BLOCKS], found = 0;
    for (int first = 0; first + blocks <= BLOCKS; first += blocks) {
        bool free_here = true;
        for (int a = 0; a < count; a++)
            for (int b = 0; b < blocks; b++)
                if (allocators[a]->base[first + b]) free_here = false;
        if (free_here) places[found++] = first * BLOCK_COLUMNS;
    }
    if (!found) return -1;
    switch (c->grid->schedule) {
    case SCHEDULE_EARLY: return places[0];
    case SCHEDULE_LATE: return places[found - 1];
    default: return places[next_random(c) % (uint64_t)found];
    }
}

static void take_columns(struct tmem_allocator *a, int column, int columns)
{
    for (int b = 0; b < columns / BLOCK_COLUMNS; b++) a->base[column / BLOCK_COLUMNS + b] = 1 + column / BLOCK_COLUMNS;
    a->last_columns = columns;
}

// An operand that every lane of the warp must agree on.
static bool uniform_operand(warp *w, const inst *in, const operand *o, uint32_t mask, type t, const char *what,
                            uint64_t *value)
{
    int first = first_lane(mask);
    for (int lane = first; lane < LANES; lane++) {
        if (!(mask >> lane & 1)) continue;
        uint8_t poison = 0;
        uint64_t v;
        if (o->kind == OP_BRACKET || o->kind == OP_ADDRESS) {
            if (!read_address(w, in, o, lane, &v)) return false;
        } else {
            v = read_operand(w, o, lane, t, &poison);
        }
        if (poison) {
            finding(w->cta->cluster, here(w, in, lane), "poison", "%s is undefined", what);
            return false;
        }
        if (lane == first) *value = v;
        if (v != *value) {
            finding(w->cta->cluster, here(w, in, lane), "tcgen05", "%s differs between the lanes of the warp", what);
            return false;
        }
        if (o->kind == OP_IMM) break;
    }
    return true;
}

static bool whole_warp(warp *w, const inst *in, uint32_t mask)
{
    if (mask == ~0u) return true;
    finding(w->cta->cluster, here(w, in, first_lane(mask)), "tcgen05",
            "a .sync.aligned instruction of the whole warp runs with the lanes %08x only", mask);
    return false;
}

// "one kernel may not mix": every tcgen05 instruction of a CTA has the same cta_group. Checks the pair for 2.
static bool group_valid(warp *w, const inst *in, int lane, int group)
{
    cta *c = w->cta;
    struct tmem_allocator *a = c->allocator;
    if (a->cta_group && a->cta_group != group) {
        finding(c->cluster, here(w, in, lane), "tcgen05",
                "cta_group::%d in a CTA that has used cta_group::%d: one kernel may not mix them", group, a->cta_group);
        return false;
    }
    a->cta_group = group;
    if (group == 1) return true;
    cta *peer = peer_of(c);
    if (!peer) {
        finding(c->cluster, here(w, in, lane), "tcgen05", "cta_group::2 without a CTA pair: CTA %d has no peer",
                c->rank);
        return false;
    }
    return true;
}

static bool peer_alive(warp *w, const inst *in, int lane, int group)
{
    if (group == 1 || !peer_of(w->cta)->exited) return true;
    finding(w->cta->cluster, here(w, in, lane), "exit", "cta_group::2 needs both CTAs, and CTA %d has exited",
            peer_of(w->cta)->rank);
    return false;
}

enum { P_GROUP = 0 }; // inst.p[0] of every instruction with a cta_group

static outcome exec_alloc(warp *w, const inst *in, uint32_t mask)
{
    int group = in->p[P_GROUP], lane = first_lane(mask);
    cta *c = w->cta;
    struct tmem_allocator *a = c->allocator;
    uint64_t address, columns;
    if (!whole_warp(w, in, mask) || !group_valid(w, in, lane, group) ||
        !uniform_operand(w, in, &in->ops[0], mask, T_U32, "the address that receives the allocation", &address) ||
        !uniform_operand(w, in, &in->ops[1], mask, T_U32, "the number of columns", &columns))
        return FAILED;
    place at = here(w, in, lane);
    if (columns < 32 || columns > 512 || columns & (columns - 1)) {
        finding(c->cluster, at, "tcgen05", "an allocation of %llu columns: a power of two from 32 to 512 is allowed",
                (unsigned long long)columns);
        return FAILED;
    }
    if (a->relinquished) {
        finding(c->cluster, at, "tcgen05", "alloc after relinquish_alloc_permit");
        return FAILED;
    }
    struct tensor_state *s = w->tensor;
    int base;
    if (group == 1) {
        base = free_place(c->cluster, &a, 1, (int)columns);
        if (base < 0) return BLOCKED;
        if (a->last_columns && (int)columns > a->last_columns) {
            finding(c->cluster, at, "tcgen05", "an allocation of %d columns after one of %d: sizes may not grow",
                    (int)columns, a->last_columns);
            return FAILED;
        }
        take_columns(a, base, (int)columns);
    } else {
        struct tmem_allocator *pair[2] = {a, peer_of(c)->allocator};
        if (!s->alloc_ticket) {
            s->alloc_ticket = ++a->arrivals;
            a->wanted[s->alloc_ticket % PAIR_TICKETS] = (int)columns;
            c->cluster->step++;
        }
        int ticket = s->alloc_ticket, slot = ticket % PAIR_TICKETS;
        if (a->grants < ticket) {
            if (pair[1]->arrivals < ticket) {
                if (!peer_alive(w, in, lane, group)) return FAILED;
                return BLOCKED;
            }
            if (a->grants != ticket - 1) return BLOCKED;
            if (pair[1]->wanted[slot] != (int)columns) {
                finding(c->cluster, at, "tcgen05", "the CTAs of a pair allocate %d and %d columns", (int)columns,
                        pair[1]->wanted[slot]);
                return FAILED;
            }
            base = free_place(c->cluster, pair, 2, (int)columns);
            if (base < 0) return BLOCKED;
            for (int i = 0; i < 2; i++) {
                if (pair[i]->last_columns && (int)columns > pair[i]->last_columns) {
                    finding(c->cluster, at, "tcgen05",
                            "an allocation of %d columns after one of %d: sizes may not grow", (int)columns,
                            pair[i]->last_columns);
                    return FAILED;
                }
                take_columns(pair[i], base, (int)columns);
                pair[i]->grants = ticket;
                pair[i]->granted[slot] = base;
            }
        }
        base = a->granted[slot];
        s->alloc_ticket = 0;
    }
    c->cluster->step++;
    // A weak store of the warp: one lane makes it here, and the others may read the word at once, as the manual's
    // example does.
    uint32_t result = (uint32_t)base;
    space s_space = in->p[1] ? SPACE_SHARED : SPACE_GENERIC;
    if (!store_bytes(w, in, lane, s_space, address, 4, &result, 0, ACCESS_WEAK, SCOPE_CTA)) return FAILED;
    signal *stored = signal_new(c->cluster);
    order_release(w, lane, stored, SCOPE_CTA);
    order_acquire_lanes(w, mask, stored, SCOPE_CTA);
    signal_free(stored);
    return RAN;
}

static outcome exec_dealloc(warp *w, const inst *in, uint32_t mask)
{
    int group = in->p[P_GROUP], lane = first_lane(mask);
    cta *c = w->cta;
    struct tmem_allocator *a = c->allocator;
    uint64_t address, columns;
    if (!whole_warp(w, in, mask) || !group_valid(w, in, lane, group) ||
        !uniform_operand(w, in, &in->ops[0], mask, T_U32, "the TMEM address", &address) ||
        !uniform_operand(w, in, &in->ops[1], mask, T_U32, "the number of columns", &columns))
        return FAILED;
    place at = here(w, in, lane);
    int column = (int)(address & 0xffff), block = column / BLOCK_COLUMNS;
    bool whole = address >> 16 == 0 && column < TMEM_COLUMNS && column % BLOCK_COLUMNS == 0 && columns >= 32 &&
                 column + columns <= TMEM_COLUMNS && columns % BLOCK_COLUMNS == 0;
    for (int b = 0; whole && b < (int)columns / BLOCK_COLUMNS; b++) whole = a->base[block + b] == 1 + block;
    if (whole && block + (int)columns / BLOCK_COLUMNS < BLOCKS)
        whole = a->base[block + (int)columns / BLOCK_COLUMNS] != 1 + block;
    if (!whole) {
        finding(c->cluster, at, "tcgen05", "dealloc of %llu columns at %08llx, which no alloc gave",
                (unsigned long long)columns, (unsigned long long)address);
        return FAILED;
    }
    if (group == 2) { // both CTAs of the pair do it together
        struct tensor_state *s = w->tensor;
        if (!s->dealloc_ticket) {
            s->dealloc_ticket = ++a->dealloc_arrivals;
            c->cluster->step++;
        }
        if (peer_of(c)->allocator->dealloc_arrivals < s->dealloc_ticket)
            return peer_alive(w, in, lane, group) ? BLOCKED : FAILED;
        s->dealloc_ticket = 0;
    }
    if (!order_tmem_free(w, in, column, (int)columns)) return FAILED;
    for (int b = 0; b < (int)columns / BLOCK_COLUMNS; b++) a->base[block + b] = 0;
    c->cluster->step++;
    return RAN;
}

static outcome exec_relinquish(warp *w, const inst *in, uint32_t mask)
{
    if (!whole_warp(w, in, mask) || !group_valid(w, in, first_lane(mask), in->p[P_GROUP])) return FAILED;
    w->cta->allocator->relinquished = true;
    return RAN;
}

// ------------------------------------------------------------------------------------------------------- ld, st

typedef enum { SHAPE_32X32B, SHAPE_16X64B, SHAPE_16X128B, SHAPE_16X256B, SHAPE_16X32BX2 } shape;
static const struct {
    const char *name;
    int lanes, columns, registers, most; // of .x1; the largest count
} shapes[] = {
    [SHAPE_32X32B] = {"32x32b", 32, 1, 1, 128},     [SHAPE_16X64B] = {"16x64b", 16, 2, 1, 128},
    [SHAPE_16X128B] = {"16x128b", 16, 4, 2, 64},    [SHAPE_16X256B] = {"16x256b", 16, 8, 4, 32},
    [SHAPE_16X32BX2] = {"16x32bx2", 16, 1, 1, 128},
};
enum { MAX_REGISTERS = 128 };

// "Matrix fragments for shape ...": thread t's register j, relative to the address.
static void fragment(shape s, int t, int j, int *lane, int *column)
{
    switch (s) {
    case SHAPE_32X32B: *lane = t, *column = j; break;
    case SHAPE_16X64B: *lane = t / 4 + 8 * (t & 1), *column = 2 * j + (t >> 1 & 1); break;
    case SHAPE_16X128B: *lane = t / 4 + 8 * (j & 1), *column = 4 * (j >> 1) + t % 4; break;
    case SHAPE_16X256B: *lane = t / 4 + 8 * (j >> 1 & 1), *column = 8 * (j >> 2) + 2 * (t % 4) + (j & 1); break;
    case SHAPE_16X32BX2: *lane = t % 16, *column = j; break; // of half t / 16
    }
}

typedef struct {
    shape shape;
    int count; // registers of a thread
    bool pack; // .pack::16b, .unpack::16b: a register is the low halves of two columns
    int lane, column, columns;
    int halves, split;                        // .16x32bx2: two, and the second's distance; else one
    int regs[MAX_REGISTERS];                  // or -1
    int written[MAX_REGISTERS + 1], nwritten; // ld: all registers that it writes
    uint32_t *values;                         // st: [count][LANES]
    uint8_t *poison;
    int reduce;  // ld.red: REDUCE_*, or 0
    int reduced; // its register
} transfer;

enum { REDUCE_NONE, REDUCE_MIN, REDUCE_MAX, REDUCE_ABS = 4, REDUCE_NAN = 8 };
enum { P_SHAPE = 1, P_COUNT, P_PACK, P_REDUCE, P_TYPE, P_ADDRESS, P_REGS, P_SPLIT }; // inst.p of ld and st

static void transfer_destroy(operation *op)
{
    transfer *t = op->payload;
    free(t->values);
    free(t->poison);
    free(t);
}

static transfer *transfer_new(warp *w, const inst *in, uint32_t mask, const char *what)
{
    uint64_t address, split = 0;
    if (!whole_warp(w, in, mask) ||
        !uniform_operand(w, in, &in->ops[in->p[P_ADDRESS]], mask, T_U32, "the TMEM address", &address))
        return NULL;
    shape s = (shape)in->p[P_SHAPE];
    if (s == SHAPE_16X32BX2) split = (uint64_t)in->ops[in->p[P_SPLIT]].imm;
    int lane = (int)(address >> 16 & 0xffff), column = (int)(address & 0xffff), quarter = w->index % 4 * 32;
    place at = here(w, in, 0);
    bool lane_valid = lane == quarter || (shapes[s].lanes == 16 && lane == quarter + 16);
    if (!lane_valid) {
        finding(w->cta->cluster, at, "tcgen05",
                "%s at TMEM lane %d: warp %d may access only lanes %d to %d, and must name the first%s", what, lane,
                w->index, quarter, quarter + 31, shapes[s].lanes == 16 ? " or the seventeenth" : "");
        return NULL;
    }
    transfer *t = calloc(1, sizeof *t);
    t->shape = s;
    t->pack = in->p[P_PACK];
    t->count = in->p[P_COUNT] * shapes[s].registers;
    t->lane = lane;
    t->column = column;
    t->columns = in->p[P_COUNT] * shapes[s].columns * (t->pack ? 2 : 1);
    t->halves = s == SHAPE_16X32BX2 ? 2 : 1;
    t->split = (int)split;
    t->reduce = in->p[P_REDUCE];
    for (int h = 0; h < t->halves; h++)
        if (!columns_valid(w->cta, at, what, column + h * t->split, t->columns)) {
            free(t);
            return NULL;
        }
    const operand *v = &in->ops[in->p[P_REGS]];
    for (int j = 0; j < t->count; j++) {
        const operand *o = v->kind == OP_VECTOR ? &v->items[j] : v;
        t->regs[j] = o->kind == OP_REG ? o->reg : -1;
    }
    return t;
}

static uint32_t reduce_values(int op, type t, uint32_t x, uint32_t y)
{
    bool max = op & REDUCE_MAX;
    if (t == T_U32) return (x > y) == max ? x : y;
    if (t == T_S32) return ((int32_t)x > (int32_t)y) == max ? x : y;
    bool x_nan = (x & 0x7fffffff) > 0x7f800000, y_nan = (y & 0x7fffffff) > 0x7f800000;
    if (x_nan || y_nan) return op & REDUCE_NAN || (x_nan && y_nan) ? 0x7fffffff : x_nan ? y : x;
    float fx = format_to_float(T_F32, x), fy = format_to_float(T_F32, y);
    if (fx == fy) return max ? x & y : x | y; // -0 < +0
    return (fx > fy) == max ? x : y;
}

static void store_register(warp *w, int reg, int lane, uint32_t value, uint8_t poison)
{
    size_t at = (size_t)reg * LANES + (size_t)lane;
    w->regs[at] = value;
    w->poison[at] = poison;
    if (poison)
        w->poisoned[reg] |= 1u << lane;
    else
        w->poisoned[reg] &= ~(1u << lane);
}

static bool any_set(const uint8_t *bytes, size_t count)
{
    uint64_t seen = 0, some;
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        memcpy(&some, bytes + i, 8);
        seen |= some;
    }
    for (; i < count; i++) seen |= bytes[i];
    return seen != 0;
}

static bool run_ld(cluster *c, operation *op)
{
    (void)c;
    transfer *t = op->payload;
    warp *w = op->w;
    int lanes = shapes[t->shape].lanes;
    uint32_t words[2][32 * 256];
    uint8_t poison[2][32 * 256];
    for (int h = 0; h < t->halves; h++) {
        int column = t->column + h * t->split;
        if (!columns_valid(w->cta, agent_place(op->agent), "tcgen05.ld", column, t->columns) ||
            !agent_read_tmem(op->agent, w->cta, t->lane, lanes, column, t->columns, words[h], poison[h]))
            return false;
    }
    bool plain = t->shape == SHAPE_32X32B && !t->pack && !any_set(poison[0], (size_t)(lanes * t->columns));
    for (int j = 0; j < t->count; j++) {
        if (t->regs[j] < 0) continue;
        if (plain) { // by far the most common
            uint64_t *to = w->regs + (size_t)t->regs[j] * LANES;
            for (int lane = 0; lane < LANES; lane++) to[lane] = words[0][lane * t->columns + j];
            memset(w->poison + (size_t)t->regs[j] * LANES, 0, LANES);
            w->poisoned[t->regs[j]] = 0;
            continue;
        }
        for (int lane = 0; lane < LANES; lane++) {
            int row, column, half = t->halves == 2 ? lane / 16 : 0;
            fragment(t->shape, lane, j, &row, &column);
            uint32_t value;
            uint8_t undefined;
            if (t->pack) {
                size_t at = (size_t)row * (size_t)t->columns + 2 * (size_t)column;
                value = (words[half][at] & 0xffff) | words[half][at + 1] << 16;
                undefined = (uint8_t)((poison[half][at] & 3) | (poison[half][at + 1] & 3) << 2);
            } else {
                size_t at = (size_t)row * (size_t)t->columns + (size_t)column;
                value = words[half][at];
                undefined = poison[half][at];
            }
            store_register(w, t->regs[j], lane, value, undefined);
        }
    }
    if (t->reduce)
        for (int lane = 0; lane < LANES; lane++) {
            uint32_t result = 0;
            uint8_t undefined = 0;
            for (int j = 0; j < t->count; j++) {
                int row, column, half = t->halves == 2 ? lane / 16 : 0;
                fragment(t->shape, lane, j, &row, &column);
                size_t at = (size_t)row * (size_t)t->columns + (size_t)column;
                uint32_t value = words[half][at] & (t->reduce & REDUCE_ABS ? 0x7fffffff : ~0u);
                result = j ? reduce_values(t->reduce, (type)op->in->p[P_TYPE], result, value) : value;
                undefined |= poison[half][at];
            }
            store_register(w, t->reduced, lane, result, undefined ? 0xf : 0);
        }
    registers_ready(w, t->written, t->nwritten);
    return true;
}

static outcome exec_ld(warp *w, const inst *in, uint32_t mask)
{
    transfer *t = transfer_new(w, in, mask, "tcgen05.ld");
    if (!t) return FAILED;
    struct tensor_state *s = w->tensor;
    agent *a = agent_issue(w, in, 0, STREAM_TCGEN05_LD, PROXY_TENSOR_CORE_05);
    operation *op = operation_new(w, in, 0, a, t);
    op->run = run_ld;
    op->destroy = transfer_destroy;
    s->last_load = agent_number(a);
    for (int j = 0; j < t->count; j++)
        if (t->regs[j] >= 0) t->written[t->nwritten++] = t->regs[j];
    if (t->reduce) t->written[t->nwritten++] = t->reduced = in->ops[in->p[P_REGS] + 1].reg;
    registers_pending(w, t->written, t->nwritten, op, false);
    list_add(&s->loads, op);
    operation_submit(w->cta->cluster, op);
    return RAN;
}

static bool run_st(cluster *c, operation *op)
{
    (void)c;
    transfer *t = op->payload;
    warp *w = op->w;
    int lanes = shapes[t->shape].lanes;
    uint32_t words[32 * 256];
    uint8_t poison[32 * 256];
    for (int h = 0; h < t->halves; h++) {
        int column = t->column + h * t->split;
        for (int j = 0; j < t->count; j++)
            for (int lane = 0; lane < LANES; lane++) {
                if (t->shape == SHAPE_32X32B && !t->pack) { // by far the most common
                    words[lane * t->columns + j] = t->values[j * LANES + lane];
                    poison[lane * t->columns + j] = t->poison[j * LANES + lane];
                    continue;
                }
                if (t->halves == 2 && lane / 16 != h) continue;
                int row, at_column, from = j * LANES + lane;
                fragment(t->shape, lane, j, &row, &at_column);
                if (t->pack) { // the upper halves of the columns are undefined afterwards
                    size_t at = (size_t)row * (size_t)t->columns + 2 * (size_t)at_column;
                    words[at] = t->values[from] & 0xffff;
                    words[at + 1] = t->values[from] >> 16;
                    poison[at] = (uint8_t)((t->poison[from] & 3) | 0xc);
                    poison[at + 1] = (uint8_t)(t->poison[from] >> 2 | 0xc);
                } else {
                    size_t at = (size_t)row * (size_t)t->columns + (size_t)at_column;
                    words[at] = t->values[from];
                    poison[at] = t->poison[from];
                }
            }
        if (!columns_valid(w->cta, agent_place(op->agent), "tcgen05.st", column, t->columns) ||
            !agent_write_tmem(op->agent, w->cta, t->lane, lanes, column, t->columns, words, poison))
            return false;
    }
    return true;
}

static outcome exec_st(warp *w, const inst *in, uint32_t mask)
{
    transfer *t = transfer_new(w, in, mask, "tcgen05.st");
    if (!t) return FAILED;
    struct tensor_state *s = w->tensor;
    size_t values = (size_t)t->count * LANES;
    t->values = malloc(values * sizeof *t->values);
    t->poison = malloc(values);
    const operand *v = &in->ops[in->p[P_REGS]];
    for (int j = 0; j < t->count; j++) {
        size_t from = (size_t)(t->regs[j] < 0 ? 0 : t->regs[j]) * LANES;
        for (int lane = 0; lane < LANES; lane++) {
            size_t at = (size_t)j * LANES + (size_t)lane;
            if (t->regs[j] >= 0) {
                t->values[at] = (uint32_t)w->regs[from + (size_t)lane];
                t->poison[at] = w->poison[from + (size_t)lane] & 0xf;
                continue;
            }
            uint8_t poison = 0;
            t->values[at] = (uint32_t)read_operand(w, v->kind == OP_VECTOR ? &v->items[j] : v, lane, T_B32, &poison);
            t->poison[at] = poison & 0xf;
        }
    }
    agent *a = agent_issue(w, in, 0, STREAM_TCGEN05_ST, PROXY_TENSOR_CORE_05);
    operation *op = operation_new(w, in, 0, a, t);
    op->run = run_st;
    op->destroy = transfer_destroy;
    s->last_store = agent_number(a);
    list_add(&s->stores, op);
    operation_submit(w->cta->cluster, op);
    return RAN;
}

// tcgen05.wait::ld, wait::st: blocks until all of the warp's earlier ones are done; the warp knows then.
static outcome exec_wait(warp *w, const inst *in, uint32_t mask)
{
    if (!whole_warp(w, in, mask)) return FAILED;
    struct tensor_state *s = w->tensor;
    bool loads = in->p[0];
    operation_list *l = loads ? &s->loads : &s->stores;
    for (int i = 0; i < l->count; i++)
        if (!l->items[i]->done) return BLOCKED;
    if (l->count) {
        list_clear(l);
        for (int lane = 0; lane < LANES; lane++)
            order_stream_done(w, lane, loads ? STREAM_TCGEN05_LD : STREAM_TCGEN05_ST,
                              loads ? s->last_load : s->last_store);
    }
    return RAN;
}

static outcome exec_fence_before(warp *w, const inst *in, uint32_t mask)
{
    (void)in;
    order_tcgen05_before(w, mask);
    return RAN;
}

static outcome exec_fence_after(warp *w, const inst *in, uint32_t mask)
{
    (void)in;
    order_tcgen05_after(w, mask);
    return RAN;
}

// ---------------------------------------------------------------------------------------------------------- mma

typedef enum { KIND_F16, KIND_TF32, KIND_F8F6F4 } kind;
typedef enum { COLLECT_DISCARD, COLLECT_FILL, COLLECT_USE, COLLECT_LASTUSE } collect;
enum { P_KIND = 1, P_COLLECT, P_MASK, P_ENABLE, P_SCALE, P_A_TMEM }; // inst.p of mma; -1: no such operand

typedef struct {
    int group, m, n, k;
    type a_type, b_type;
    bool half_d; // D is f16
    bool negate_a, negate_b, a_mn, b_mn;
    bool a_tmem, accumulate;
    int d_lane, d_column, a_column;
    matrix_descriptor a, b;
    float scale; // of the old D
    uint32_t disabled[8];
} product;

static uint32_t field(uint32_t word, int low, int count)
{
    return word >> low & ((1u << count) - 1);
}

// "Instruction descriptor". NULL or what is illegal. Where the manual and CUTLASS's assertions differ on N, the
// stricter holds: a multiple of 16 for M = 128 of one CTA, of 32 for A in TMEM of a pair.
static const char *idesc_parse(uint32_t bits, kind k, product *p)
{
    static const type f16_types[8] = {T_F16, T_BF16}, tf32_types[8] = {T_NONE, T_NONE, T_TF32},
                      f8_types[8] = {T_E4M3, T_E5M2, T_NONE, T_E2M3X2, T_E3M2X2, T_E2M1X2};
    const type *types = k == KIND_F16 ? f16_types : k == KIND_TF32 ? tf32_types : f8_types;
    if (field(bits, 0, 2)) return "a sparsity selector (bits 0-1) without .sp";
    if (field(bits, 2, 1)) return "the sparsity bit (2) without .sp";
    if (field(bits, 3, 1)) return "the saturate bit (3), which is for kind::i8";
    if (field(bits, 6, 1) || field(bits, 23, 1) || field(bits, 29, 1)) return "a reserved bit (6, 23 or 29)";
    if (field(bits, 30, 2)) return "a maximum shift (bits 30-31), which is for .ws";
    uint32_t d = field(bits, 4, 2);
    if (d > 1) return "a D format (bits 4-5) that is neither F16 nor F32";
    p->half_d = d == 0;
    p->a_type = types[field(bits, 7, 3)];
    p->b_type = types[field(bits, 10, 3)];
    if (!p->a_type) return "an A format (bits 7-9) that the kind does not have";
    if (!p->b_type) return "a B format (bits 10-12) that the kind does not have";
    if (k == KIND_F16 && p->a_type != p->b_type) return "different formats of A and B with kind::f16";
    if (p->half_d && (p->a_type == T_BF16 || p->a_type == T_TF32)) return "an F16 D with BF16 or TF32 inputs";
    p->k = format_depth(p->a_type);
    p->negate_a = field(bits, 13, 1);
    p->negate_b = field(bits, 14, 1);
    p->a_mn = field(bits, 15, 1);
    p->b_mn = field(bits, 16, 1);
    if (p->a_tmem && p->a_mn) return "an MN-major A (bit 15) in TMEM, where A is K-major";
    bool a_small = p->a_type >= T_E2M3X2 && p->a_type <= T_E2M1X2,
         b_small = p->b_type >= T_E2M3X2 && p->b_type <= T_E2M1X2;
    if ((a_small && p->a_mn) || (b_small && p->b_mn)) return "an MN-major operand of a 4- or 6-bit format";
    p->n = (int)field(bits, 17, 6) * 8;
    p->m = (int)field(bits, 24, 5) * 16;
    int step;
    if (p->group == 1) {
        if (p->m != 64 && p->m != 128) return "M (bits 24-28) other than 64 or 128";
        step = p->m == 128 ? 16 : 8;
    } else {
        if (p->m != 128 && p->m != 256) return "M (bits 24-28) other than 128 or 256";
        step = p->a_tmem ? 32 : 16;
    }
    if (p->b_mn && format_bytes(p->b_type) == 1) step = p->group == 1 ? 16 : 32;
    if (p->n < step || p->n > MAX_N || p->n % step)
        return "N (bits 17-22) outside the steps that this M, kind and form allow";
    return NULL;
}

static bool swizzle_fits(const matrix_descriptor *d, type t, bool mn)
{
    return (d->swizzle == SWIZZLE_128_ATOM_32) == (mn && t == T_TF32);
}

// A rectangle of TMEM that holds a part of D (or of A): rows row.. of the CTA's part of the product, columns column..
// of it. "Data Path Layout Organization": layouts A and D one, F four of 16 lanes, B two that split N.
typedef struct {
    int lane, lanes, row, column, columns;
} tile;

static int d_tiles(const product *p, tile *t)
{
    if (p->m / p->group == TMEM_LANES) {
        t[0] = (tile){0, 128, 0, 0, p->n};
        return 1;
    }
    if (p->group == 2) {
        t[0] = (tile){0, 64, 0, 0, p->n / 2};
        t[1] = (tile){64, 64, 0, p->n / 2, p->n / 2};
        return 2;
    }
    for (int i = 0; i < 4; i++) t[i] = (tile){32 * i + p->d_lane, 16, 16 * i, 0, p->n};
    return 4;
}

typedef struct {
    union {
        float values[TMEM_LANES * MAX_N];
        uint32_t words[TMEM_LANES * MAX_N];
    } d;
    uint8_t poison[TMEM_LANES * MAX_N];
    float a[2][TMEM_LANES * MAX_K], b[MAX_K * MAX_N];
    uint8_t a_poison[2][TMEM_LANES], b_poison[MAX_N];
} scratch;

// A's rows of one CTA from TMEM, 8 words a row. In layout B both halves of the lanes hold the same 64 rows.
static bool gather_a_tmem(operation *op, const product *p, cta *c, float *a, uint8_t *row_poison, bool *any)
{
    enum { WORDS = 8 };
    uint32_t words[TMEM_LANES * WORDS];
    uint8_t poison[TMEM_LANES * WORDS];
    place at = agent_place(op->agent);
    if (!columns_valid(c, at, "A of tcgen05.mma", p->a_column, WORDS)) return false;
    tile tiles[4];
    int count = d_tiles(p, tiles), rows = p->m / p->group, lanes = 0;
    for (int i = 0; i < count; i++) {
        if (!agent_read_tmem(op->agent, c, tiles[i].lane, tiles[i].lanes, p->a_column, WORDS, words + lanes * WORDS,
                             poison + lanes * WORDS))
            return false;
        lanes += tiles[i].lanes;
    }
    if (lanes > rows && (memcmp(words, words + rows * WORDS, (size_t)rows * WORDS * sizeof *words) ||
                         memcmp(poison, poison + rows * WORDS, (size_t)rows * WORDS))) {
        finding(c->cluster, at, "tcgen05",
                "A in TMEM for M = 128 of a CTA pair: lanes 64 to 127 must hold a copy of lanes 0 to 63");
        return false;
    }
    for (int r = 0; r < rows; r++) {
        row_poison[r] =
            format_unpack(p->a_type, words + r * WORDS, poison + r * WORDS, p->k, p->negate_a, a + r * p->k);
        *any |= row_poison[r];
    }
    return true;
}

static bool read_d(operation *op, const product *p, cta *c, scratch *s)
{
    tile tiles[4];
    int count = d_tiles(p, tiles);
    for (int i = 0; i < count; i++) {
        tile t = tiles[i];
        if (t.columns == p->n) {
            if (!agent_read_tmem(op->agent, c, t.lane, t.lanes, p->d_column, t.columns, s->d.words + t.row * p->n,
                                 s->poison + t.row * p->n))
                return false;
            continue;
        }
        uint32_t words[64 * MAX_N / 2];
        uint8_t poison[64 * MAX_N / 2];
        if (!agent_read_tmem(op->agent, c, t.lane, t.lanes, p->d_column, t.columns, words, poison)) return false;
        for (int r = 0; r < t.lanes; r++) {
            int to = (t.row + r) * p->n + t.column, from = r * t.columns;
            memcpy(s->d.words + to, words + from, (size_t)t.columns * sizeof *words);
            memcpy(s->poison + to, poison + from, (size_t)t.columns);
        }
    }
    return true;
}

// Writes the lanes that the mask leaves enabled.
static bool write_d(operation *op, const product *p, cta *c, scratch *s, const uint32_t *disabled)
{
    tile tiles[4];
    int count = d_tiles(p, tiles);
    for (int i = 0; i < count; i++) {
        tile t = tiles[i];
        for (int r = 0; r < t.lanes;) {
            int end = r;
            while (end < t.lanes && !(disabled[(t.lane + end) / 32] >> (t.lane + end) % 32 & 1)) end++;
            if (end == r) {
                r++;
                continue;
            }
            const uint32_t *words = s->d.words + (t.row + r) * p->n;
            const uint8_t *poison = s->poison + (t.row + r) * p->n;
            uint32_t part[64 * MAX_N / 2];
            uint8_t part_poison[64 * MAX_N / 2];
            if (t.columns != p->n) {
                for (int j = 0; j < end - r; j++) {
                    memcpy(part + j * t.columns, words + j * p->n + t.column, (size_t)t.columns * sizeof *part);
                    memcpy(part_poison + j * t.columns, poison + j * p->n + t.column, (size_t)t.columns);
                }
                words = part;
                poison = part_poison;
            }
            if (!agent_write_tmem(op->agent, c, t.lane + r, end - r, p->d_column, t.columns, words, poison))
                return false;
            r = end;
        }
    }
    return true;
}

// Marks what depends on an undefined row of A or column of B.
static void spread_poison(int rows, int columns, const uint8_t *a, const uint8_t *b, uint8_t *poison, int stride)
{
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < columns; j++)
            if (a[r] || b[j] || poison[r * stride + j]) poison[r * stride + j] = 0xf;
}

static bool rows_poisoned(const uint8_t *poison, int rows, int columns)
{
    for (int r = 0; r < rows; r++)
        if (any_set(poison + r * TMEM_COLUMNS, (size_t)columns)) return true;
    return false;
}

// The common case, an f32 D with all lanes enabled: computed in TMEM itself.
static void multiply_in_place(operation *op, const product *p, cta *c, scratch *s, int half, bool poisoned)
{
    tile tiles[4];
    int count = d_tiles(p, tiles);
    for (int i = 0; i < count; i++) {
        tile t = tiles[i];
        size_t at = (size_t)t.lane * TMEM_COLUMNS + (size_t)p->d_column;
        float *d = (float *)(c->tmem + at);
        uint8_t *poison = c->tmem_poison + at;
        if (p->accumulate) agent_access_tmem(op->agent, c, t.lane, t.lanes, p->d_column, t.columns, false);
        agent_access_tmem(op->agent, c, t.lane, t.lanes, p->d_column, t.columns, true);
        for (int r = 0; r < t.lanes && !p->accumulate; r++) {
            memset(c->tmem + at + (size_t)r * TMEM_COLUMNS, 0, (size_t)t.columns * sizeof *d);
            memset(poison + r * TMEM_COLUMNS, 0, (size_t)t.columns);
        }
        matrix_scale(t.lanes, t.columns, d, TMEM_COLUMNS, p->scale);
        matrix_multiply_add(t.lanes, t.columns, p->k, s->a[half] + t.row * p->k, p->k, s->b + t.column, p->n, d,
                            TMEM_COLUMNS);
        // An old element whose bytes are partly undefined stays so in the sum, but as a whole.
        if (poisoned || (p->accumulate && rows_poisoned(poison, t.lanes, t.columns)))
            spread_poison(t.lanes, t.columns, s->a_poison[half] + t.row, s->b_poison + t.column, poison, TMEM_COLUMNS);
    }
}

// D of one CTA: old D, scaled, plus the product of its rows of A with all of B.
static bool multiply(operation *op, const product *p, cta *c, scratch *s, int half, bool poisoned)
{
    const uint32_t *disabled = p->disabled + 4 * (p->group == 2 ? c->rank & 1 : 0);
    if (!p->half_d && !(disabled[0] | disabled[1] | disabled[2] | disabled[3])) {
        multiply_in_place(op, p, c, s, half, poisoned);
        return true;
    }
    int rows = p->m / p->group, n = p->n, count = rows * n;
    if (p->accumulate) {
        if (!read_d(op, p, c, s)) return false;
        if (p->half_d)
            for (int i = 0; i < count; i++) {
                s->d.values[i] = format_to_float(T_F16, s->d.words[i] & 0xffff);
                s->poison[i] = s->poison[i] & 3 ? 0xf : 0;
            }
        matrix_scale(rows, n, s->d.values, n, p->scale);
    } else {
        memset(s->d.values, 0, (size_t)count * sizeof *s->d.values);
        memset(s->poison, 0, (size_t)count);
    }
    matrix_multiply_add(rows, n, p->k, s->a[half], p->k, s->b, n, s->d.values, n);
    spread_poison(rows, n, s->a_poison[half], s->b_poison, s->poison, n);
    if (p->half_d) // one element in the low half of each column; the upper half is not defined
        for (int i = 0; i < count; i++) {
            s->d.words[i] = float_to_format(T_F16, s->d.values[i], false);
            s->poison[i] |= 0xc;
        }
    return write_d(op, p, c, s, disabled);
}

static bool run_mma(cluster *cl, operation *op)
{
    const product *p = op->payload;
    cta *own = op->w->cta, *pair[2] = {own, NULL};
    place at = agent_place(op->agent);
    if (p->group == 2) pair[0] = &cl->cta[own->rank & ~1], pair[1] = &cl->cta[own->rank | 1];
    scratch *s = malloc(sizeof *s);
    bool fine = true, a_any = false, b_any = false;
    int rows = p->m / p->group, n = p->n / p->group, d_columns = rows == 64 && p->group == 2 ? p->n / 2 : p->n;
    for (int h = 0; h < p->group && fine; h++) {
        cta *c = pair[h];
        if (c->exited) {
            finding(cl, at, "exit", "tcgen05.mma uses the memory of CTA %d, which has exited", c->rank);
            fine = false;
            break;
        }
        if (p->a_tmem) {
            fine = gather_a_tmem(op, p, c, s->a[h], s->a_poison[h], &a_any);
        } else {
            matrix_layout l = {p->a, p->a_mn, format_bytes(p->a_type), rows, 32};
            matrix_values to = {s->a[h], p->k, false, p->negate_a, s->a_poison[h], false};
            fine = matrix_gather(op->agent, c, &l, p->a_type, &to);
            a_any |= to.any;
        }
        // B: each CTA of a pair has half of its N rows.
        matrix_layout l = {p->b, p->b_mn, format_bytes(p->b_type), n, 32};
        matrix_values to = {s->b + h * n, p->n, true, p->negate_b, s->b_poison + h * n, false};
        fine = fine && matrix_gather(op->agent, c, &l, p->b_type, &to) &&
               columns_valid(c, at, "D of tcgen05.mma", p->d_column, d_columns);
        b_any |= to.any;
    }
    for (int h = 0; h < p->group && fine; h++) fine = multiply(op, p, pair[h], s, h, a_any || b_any);
    free(s);
    return fine;
}

static void payload_free(operation *op)
{
    free(op->payload);
}

// An operation of the thread's tcgen05 stream: it runs after those before it.
static void submit_in_order(warp *w, int lane, operation *op)
{
    operation **last = &w->tensor->last[lane];
    if (*last) {
        operation_after(op, *last);
        operation_release(*last);
    }
    *last = op;
    operation_submit(w->cta->cluster, op);
}

// One thread's operand that must be defined.
static bool defined_operand(warp *w, const inst *in, int index, int lane, type t, const char *what, uint64_t *value)
{
    uint8_t poison = 0;
    *value = read_operand(w, &in->ops[index], lane, t, &poison);
    if (!poison) return true;
    finding(w->cta->cluster, here(w, in, lane), "poison", "%s is undefined", what);
    return false;
}

static bool descriptor_operand(warp *w, const inst *in, int index, int lane, const char *what, matrix_descriptor *d,
                               uint64_t *bits)
{
    if (!defined_operand(w, in, index, lane, T_B64, what, bits)) return false;
    const char *illegal = matrix_descriptor_parse(*bits, true, d);
    if (!illegal) return true;
    finding(w->cta->cluster, here(w, in, lane), "descriptor", "%s %016llx: %s", what, (unsigned long long)*bits,
            illegal);
    return false;
}

// collector::a is a hint about a buffer for A: use and lastuse promise that the thread's last fill had the same A.
static bool collector_valid(warp *w, const inst *in, int lane, uint64_t key)
{
    collector *c = &w->tensor->collector[lane];
    collect how = (collect)in->p[P_COLLECT];
    if ((how == COLLECT_USE || how == COLLECT_LASTUSE) && !(c->valid && c->key == key)) {
        finding(w->cta->cluster, here(w, in, lane), "tcgen05",
                "collector::a::%s, but the buffer was not filled with this A by this thread's MMAs before",
                how == COLLECT_USE ? "use" : "lastuse");
        return false;
    }
    c->valid = how == COLLECT_FILL || how == COLLECT_USE;
    c->key = key;
    return true;
}

static outcome issue_mma(warp *w, const inst *in, int lane)
{
    cluster *c = w->cta->cluster;
    place at = here(w, in, lane);
    product p = {.group = in->p[P_GROUP], .a_tmem = in->p[P_A_TMEM], .scale = 1};
    kind k = (kind)in->p[P_KIND];
    uint64_t d_address, a_bits, b_bits, idesc, value;
    if (!group_valid(w, in, lane, p.group) || !peer_alive(w, in, lane, p.group) ||
        !read_address(w, in, &in->ops[0], lane, &d_address) ||
        !defined_operand(w, in, 3, lane, T_B32, "the instruction descriptor", &idesc))
        return FAILED;
    const char *illegal = idesc_parse((uint32_t)idesc, k, &p);
    if (illegal) {
        finding(c, at, "descriptor", "instruction descriptor %08x: %s", (unsigned)idesc, illegal);
        return FAILED;
    }
    p.d_lane = (int)(d_address >> 16 & 0xffff);
    p.d_column = (int)(d_address & 0xffff);
    bool interleaved = p.group == 1 && p.m == 64;
    if (p.d_lane != 0 && !(interleaved && p.d_lane == 16)) {
        finding(c, at, "tcgen05", "D of tcgen05.mma at TMEM lane %d: it must be 0%s", p.d_lane,
                interleaved ? " or 16" : "");
        return FAILED;
    }
    if (p.a_tmem) {
        if (!read_address(w, in, &in->ops[1], lane, &a_bits)) return FAILED;
        p.a_column = (int)(a_bits & 0xffff);
        if ((int)(a_bits >> 16 & 0xffff) != p.d_lane) {
            finding(c, at, "tcgen05", "A of tcgen05.mma at TMEM lane %d, D at lane %d: they must be the same",
                    (int)(a_bits >> 16 & 0xffff), p.d_lane);
            return FAILED;
        }
    } else if (!descriptor_operand(w, in, 1, lane, "the descriptor of A", &p.a, &a_bits)) {
        return FAILED;
    }
    if (!descriptor_operand(w, in, 2, lane, "the descriptor of B", &p.b, &b_bits)) return FAILED;
    if ((!p.a_tmem && !swizzle_fits(&p.a, p.a_type, p.a_mn)) || !swizzle_fits(&p.b, p.b_type, p.b_mn)) {
        finding(c, at, "descriptor", "128-byte swizzle with 32-byte atoms is for MN-major tf32, which needs it");
        return FAILED;
    }
    if (in->p[P_MASK] >= 0) {
        const operand *mask = &in->ops[in->p[P_MASK]];
        for (int i = 0; i < mask->count; i++) { // words 4 to 7 are the odd CTA's. UNVERIFIED on silicon
            uint8_t poison = 0;
            p.disabled[i] = (uint32_t)read_operand(w, &mask->items[i], lane, T_B32, &poison);
            if (poison) {
                finding(c, at, "poison", "the mask of disabled lanes is undefined");
                return FAILED;
            }
        }
    }
    if (!defined_operand(w, in, in->p[P_ENABLE], lane, T_PRED, "enable-input-d", &value)) return FAILED;
    p.accumulate = value & 1;
    if (in->p[P_SCALE] >= 0)
        for (int64_t i = in->ops[in->p[P_SCALE]].imm; i > 0; i--) p.scale /= 2;
    if (!collector_valid(w, in, lane, a_bits ^ (uint64_t)p.m << 56 ^ (uint64_t)p.a_type << 48)) return FAILED;

    agent *a = agent_issue(w, in, lane, STREAM_TCGEN05_MMA, PROXY_TENSOR_CORE_05);
    agent_tensor(a, TENSOR_MMA, d_address << 32 | (uint64_t)p.m << 16 | (uint64_t)p.n);
    product *payload = malloc(sizeof *payload);
    *payload = p;
    operation *op = operation_new(w, in, lane, a, payload);
    op->run = run_mma;
    op->destroy = payload_free;
    submit_in_order(w, lane, op);
    return RAN;
}

static outcome exec_mma(warp *w, const inst *in, uint32_t mask)
{
    for (int lane = 0; lane < LANES; lane++)
        if (mask >> lane & 1 && issue_mma(w, in, lane) == FAILED) return FAILED;
    return RAN;
}

// ----------------------------------------------------------------------------------------------------------- cp

typedef struct {
    const char *shape, *multicast;
    int rows, bytes;
} copy_shape;
static const copy_shape copy_shapes[] = {
    {"128x256b", NULL, 128, 32},          {"128x128b", NULL, 128, 16},          {"4x256b", NULL, 4, 32},
    {"64x128b", "warpx2::02_13", 64, 16}, {"64x128b", "warpx2::01_23", 64, 16}, {"32x128b", "warpx4", 32, 16},
};
enum { COPY_128X256, COPY_128X128, COPY_4X256, COPY_64_02_13, COPY_64_01_23, COPY_32_X4, COPY_SHAPES };
enum { P_COPY = 1 };

// Where the rows of the source go: runs of rows to runs of lanes.
static int copy_tiles(int shape, tile *t)
{
    switch (shape) {
    case COPY_4X256: // one row a quarter of the lanes, as the manual's shape says. UNVERIFIED on silicon
        for (int i = 0; i < 4; i++) t[i] = (tile){32 * i, 1, i, 0, 0};
        return 4;
    case COPY_64_02_13:
        t[0] = (tile){0, 64, 0, 0, 0};
        t[1] = (tile){64, 64, 0, 0, 0};
        return 2;
    case COPY_64_01_23:
        for (int i = 0; i < 4; i++) t[i] = (tile){32 * i, 32, i / 2 * 32, 0, 0};
        return 4;
    case COPY_32_X4:
        for (int i = 0; i < 4; i++) t[i] = (tile){32 * i, 32, 0, 0, 0};
        return 4;
    default: t[0] = (tile){0, 128, 0, 0, 0}; return 1;
    }
}

typedef struct {
    int group, shape, column;
    matrix_descriptor source;
} tensor_copy;

static bool run_cp(cluster *cl, operation *op)
{
    const tensor_copy *p = op->payload;
    const copy_shape *shape = &copy_shapes[p->shape];
    int words = shape->bytes / 4;
    place at = agent_place(op->agent);
    // cta_group::2: each CTA from its own shared memory at the same offset. UNVERIFIED on silicon.
    for (int h = 0; h < p->group; h++) {
        cta *c = p->group == 2 ? &cl->cta[(op->w->cta->rank & ~1) + h] : op->w->cta;
        unsigned char data[128 * 32];
        uint8_t poison[128 * 32], word_poison[128 * 8];
        uint32_t row_words[128 * 8];
        if (c->exited) {
            finding(cl, at, "exit", "tcgen05.cp uses the memory of CTA %d, which has exited", c->rank);
            return false;
        }
        matrix_layout l = {p->source, false, 1, shape->rows, shape->bytes};
        if (!columns_valid(c, at, "tcgen05.cp", p->column, words) || !matrix_copy(op->agent, c, &l, data, poison))
            return false;
        memcpy(row_words, data, (size_t)shape->rows * (size_t)shape->bytes);
        for (int i = 0; i < shape->rows * words; i++)
            word_poison[i] =
                (uint8_t)(poison[4 * i] | poison[4 * i + 1] << 1 | poison[4 * i + 2] << 2 | poison[4 * i + 3] << 3);
        tile tiles[4];
        int count = copy_tiles(p->shape, tiles);
        for (int i = 0; i < count; i++)
            if (!agent_write_tmem(op->agent, c, tiles[i].lane, tiles[i].lanes, p->column, words,
                                  row_words + tiles[i].row * words, word_poison + tiles[i].row * words))
                return false;
    }
    return true;
}

static outcome exec_cp(warp *w, const inst *in, uint32_t mask)
{
    for (int lane = 0; lane < LANES; lane++) {
        if (!(mask >> lane & 1)) continue;
        tensor_copy p = {.group = in->p[P_GROUP], .shape = in->p[P_COPY]};
        uint64_t address, bits;
        if (!group_valid(w, in, lane, p.group) || !peer_alive(w, in, lane, p.group) ||
            !read_address(w, in, &in->ops[0], lane, &address) ||
            !descriptor_operand(w, in, 1, lane, "the descriptor of the source", &p.source, &bits))
            return FAILED;
        p.column = (int)(address & 0xffff);
        if (address >> 16 & 0xffff) {
            finding(w->cta->cluster, here(w, in, lane), "tcgen05", "tcgen05.cp to TMEM lane %d: it must be 0",
                    (int)(address >> 16 & 0xffff));
            return FAILED;
        }
        agent *a = agent_issue(w, in, lane, STREAM_TCGEN05_MMA, PROXY_TENSOR_CORE_05);
        agent_tensor(a, TENSOR_CP, address << 32 | (uint64_t)p.shape);
        tensor_copy *payload = malloc(sizeof *payload);
        *payload = p;
        operation *op = operation_new(w, in, lane, a, payload);
        op->run = run_cp;
        op->destroy = payload_free;
        submit_in_order(w, lane, op);
    }
    return RAN;
}

// ------------------------------------------------------------------------------------------------------- commit

typedef struct {
    cta *owner;
    uint32_t offset;
} arrival;

static bool run_commit(cluster *c, operation *op)
{
    const arrival *to = op->payload;
    return mbarrier_arrive_async(c, to->owner, to->offset, op->agent);
}

enum { P_MULTICAST = 1, P_GENERIC };

// The mbarrier gets one arrival when all earlier mma, cp and shift of this thread are complete. Each CTA of a multicast
// gets its own at its own moment.
static outcome exec_commit(warp *w, const inst *in, uint32_t mask)
{
    cluster *c = w->cta->cluster;
    for (int lane = 0; lane < LANES; lane++) {
        if (!(mask >> lane & 1)) continue;
        uint64_t address, ctas = 0;
        uint32_t offset;
        if (!group_valid(w, in, lane, in->p[P_GROUP]) || !read_address(w, in, &in->ops[0], lane, &address))
            return FAILED;
        cta *owner = shared_target(c, address, in->p[P_GENERIC], &offset);
        if (!owner) {
            finding(c, here(w, in, lane), "out-of-bounds",
                    "tcgen05.commit on %llx, which is not shared memory of the cluster", (unsigned long long)address);
            return FAILED;
        }
        if (in->p[P_MULTICAST]) {
            if (!defined_operand(w, in, 1, lane, T_B16, "the mask of CTAs", &ctas)) return FAILED;
            ctas &= 0xffff;
            if (!ctas || ctas >> c->ctas) {
                finding(c, here(w, in, lane), "tcgen05", "tcgen05.commit to the CTAs %04x of a cluster of %d",
                        (unsigned)ctas, c->ctas);
                return FAILED;
            }
        } else {
            ctas = 1u << owner->rank;
        }
        agent *a = agent_issue(w, in, lane, STREAM_TCGEN05_MMA, PROXY_TENSOR_CORE_05);
        operation *before = w->tensor->last[lane];
        for (int rank = 0; rank < c->ctas; rank++) {
            if (!(ctas >> rank & 1)) continue;
            arrival *payload = malloc(sizeof *payload);
            *payload = (arrival){&c->cta[rank], offset};
            operation *op = operation_new(w, in, lane, agent_retain(a), payload);
            op->run = run_commit;
            op->destroy = payload_free;
            if (before) operation_after(op, before);
            operation_submit(c, op);
            operation_release(op);
        }
        agent_release(a);
    }
    return RAN;
}

// ----------------------------------------------------------------------------------------------------- decoding

static const char *needs_tcgen05(const kernel *k)
{
    return target_has(k, FEATURE_SM100AF) ? NULL : "tcgen05 needs a target sm_100a, sm_100f or of their family";
}

// cta_group::1 or ::2 as the first modifier, and the rest from the list.
static const char *decode_group(inst *in, const kernel *k, const char *const *allowed)
{
    const char *wrong = needs_tcgen05(k);
    if (wrong) return wrong;
    if (in->mods < 1 || strncmp(in->mod[0], "cta_group::", 11)) return "a .cta_group is missing";
    in->p[P_GROUP] = in->mod[0][11] == '2' ? 2 : 1;
    in->klass = C_TCGEN05_OTHER;
    return mods_only(in, allowed);
}

static bool is_address(const inst *in, int index)
{
    return index < in->nops && (in->ops[index].kind == OP_BRACKET || in->ops[index].kind == OP_ADDRESS);
}

static bool is_value(const inst *in, int index)
{
    return index < in->nops && (in->ops[index].kind == OP_REG || in->ops[index].kind == OP_IMM);
}

static const char *decode_alloc(inst *in, const kernel *k)
{
    static const char *const allowed[] = {"cta_group::1", "cta_group::2", "sync", "aligned",
                                          "shared::cta",  "b32",          NULL};
    const char *wrong = decode_group(in, k, allowed);
    if (wrong) return wrong;
    if (mod_index(in, "sync") < 0 || mod_index(in, "aligned") < 0 || mod_index(in, "b32") < 0)
        return ".sync.aligned and .b32 are required";
    if (in->nops != 2 || !is_address(in, 0) || !is_value(in, 1)) return "operands: [address], columns";
    in->p[1] = mod_index(in, "shared::cta") >= 0;
    in->flags |= IN_ALIGNED;
    in->exec = exec_alloc;
    return NULL;
}

static const char *decode_dealloc(inst *in, const kernel *k)
{
    static const char *const allowed[] = {"cta_group::1", "cta_group::2", "sync", "aligned", "b32", NULL};
    const char *wrong = decode_group(in, k, allowed);
    if (wrong) return wrong;
    if (mod_index(in, "sync") < 0 || mod_index(in, "aligned") < 0 || mod_index(in, "b32") < 0)
        return ".sync.aligned and .b32 are required";
    if (in->nops != 2 || !is_value(in, 0) || !is_value(in, 1)) return "operands: TMEM address, columns";
    in->flags |= IN_ALIGNED;
    in->exec = exec_dealloc;
    return NULL;
}

static const char *decode_relinquish(inst *in, const kernel *k)
{
    static const char *const allowed[] = {"cta_group::1", "cta_group::2", "sync", "aligned", NULL};
    const char *wrong = decode_group(in, k, allowed);
    if (wrong) return wrong;
    if (mod_index(in, "sync") < 0 || mod_index(in, "aligned") < 0) return ".sync.aligned is required";
    if (in->nops) return "operands: none";
    in->flags |= IN_ALIGNED;
    in->exec = exec_relinquish;
    return NULL;
}

static int count_from(const char *modifier)
{
    int count = 0;
    if (*modifier != 'x') return 0;
    for (const char *s = modifier + 1; *s; s++) {
        if (*s < '0' || *s > '9' || count > 1000) return 0;
        count = 10 * count + (*s - '0');
    }
    return count;
}

// What ld, ld.red and st share: .sync.aligned.SHAPE.xN, the registers and the address.
static const char *decode_transfer(inst *in, const kernel *k, int address, int regs, const char *const *more)
{
    const char *wrong = needs_tcgen05(k);
    if (wrong) return wrong;
    if (in->mods < 4 || strcmp(in->mod[0], "sync") || strcmp(in->mod[1], "aligned")) return ".sync.aligned is required";
    int s = 0, count = count_from(in->mod[3]);
    while (s <= SHAPE_16X32BX2 && strcmp(shapes[s].name, in->mod[2])) s++;
    if (s > SHAPE_16X32BX2) return in->mod[2];
    if (count < 1 || count > shapes[s].most || count & (count - 1)) return in->mod[3];
    for (int i = 4; i < in->mods; i++) {
        const char *const *m = more;
        while (*m && strcmp(*m, in->mod[i])) m++;
        if (!*m) return in->mod[i];
    }
    in->p[P_SHAPE] = s;
    in->p[P_COUNT] = count;
    in->p[P_ADDRESS] = address;
    in->p[P_REGS] = regs;
    if (!is_address(in, address)) return "the TMEM address is missing";
    if (regs >= in->nops) return "the registers are missing";
    const operand *v = &in->ops[regs];
    int registers = count * shapes[s].registers;
    if (v->kind == OP_VECTOR ? v->count != registers : registers != 1 || v->kind != OP_REG)
        return "the number of registers does not fit the shape and count";
    in->flags |= IN_ALIGNED;
    return NULL;
}

static const char *decode_split(inst *in, int index)
{
    if (in->p[P_SHAPE] != SHAPE_16X32BX2) return in->nops == index ? NULL : "too many operands";
    if (in->nops != index + 1 || in->ops[index].kind != OP_IMM) return "the immediate half-split offset is missing";
    if (in->ops[index].imm < 0 || in->ops[index].imm >= TMEM_COLUMNS) return "the half-split offset is outside TMEM";
    in->p[P_SPLIT] = index;
    return NULL;
}

static const char *decode_ld(inst *in, const kernel *k)
{
    static const char *const more[] = {"pack::16b", "b32", NULL};
    const char *wrong = decode_transfer(in, k, 1, 0, more);
    if (!wrong) wrong = decode_split(in, 2);
    if (wrong) return wrong;
    if (strcmp(in->mod[in->mods - 1], "b32")) return "the type .b32 is missing";
    in->p[P_PACK] = mod_index(in, "pack::16b") >= 0;
    in->klass = C_TCGEN05_LD;
    in->exec = exec_ld;
    return NULL;
}

static const char *decode_ld_red(inst *in, const kernel *k)
{
    static const char *const more[] = {"min", "max", "abs", "NaN", "f32", "u32", "s32", NULL};
    if (!target_has(k, FEATURE_SM103AF)) return "tcgen05.ld.red needs a target sm_103a or sm_103f";
    const char *wrong = decode_transfer(in, k, 2, 0, more);
    if (!wrong) wrong = decode_split(in, 3);
    if (wrong) return wrong;
    if (in->p[P_SHAPE] != SHAPE_32X32B && in->p[P_SHAPE] != SHAPE_16X32BX2)
        return "the shape must be 32x32b or 16x32bx2";
    if (in->p[P_COUNT] < 2) return ".x1 has nothing to reduce";
    operand *reduced = &in->ops[1]; // ptxas takes it in braces too
    if (reduced->kind == OP_VECTOR && reduced->count == 1) *reduced = reduced->items[0];
    if (reduced->kind != OP_REG) return "the register for the reduced value is missing";
    type t = type_from(in->mod[in->mods - 1]);
    if (t != T_F32 && t != T_U32 && t != T_S32) return "the type must be .f32, .u32 or .s32";
    bool min = mod_index(in, "min") >= 0, max = mod_index(in, "max") >= 0;
    if (min == max) return "one of .min and .max is required";
    bool abs = mod_index(in, "abs") >= 0, nan = mod_index(in, "NaN") >= 0;
    if ((abs || nan) && t != T_F32) return ".abs and .NaN are for .f32";
    in->p[P_REDUCE] = (min ? REDUCE_MIN : REDUCE_MAX) | (abs ? REDUCE_ABS : 0) | (nan ? REDUCE_NAN : 0);
    in->p[P_TYPE] = (int32_t)t;
    in->klass = C_TCGEN05_LD;
    in->exec = exec_ld;
    return NULL;
}

static const char *decode_st(inst *in, const kernel *k)
{
    static const char *const more[] = {"unpack::16b", "b32", NULL};
    bool split = in->mods > 2 && !strcmp(in->mod[2], "16x32bx2");
    const char *wrong = decode_transfer(in, k, 0, split ? 2 : 1, more);
    if (wrong) return wrong;
    if (split) {
        if (in->nops != 3 || in->ops[1].kind != OP_IMM) return "the immediate half-split offset is missing";
        if (in->ops[1].imm < 0 || in->ops[1].imm >= TMEM_COLUMNS) return "the half-split offset is outside TMEM";
        in->p[P_SPLIT] = 1;
    } else if (in->nops != 2) {
        return "operands: [address], {registers}";
    }
    if (strcmp(in->mod[in->mods - 1], "b32")) return "the type .b32 is missing";
    in->p[P_PACK] = mod_index(in, "unpack::16b") >= 0;
    in->klass = C_TCGEN05_ST;
    in->exec = exec_st;
    return NULL;
}

static const char *decode_wait(inst *in, const kernel *k)
{
    static const char *const allowed[] = {"sync", "aligned", NULL};
    const char *wrong = needs_tcgen05(k);
    if (!wrong) wrong = mods_only(in, allowed);
    if (wrong) return wrong;
    if (in->mods != 2 || in->nops) return ".sync.aligned and no operands are required";
    in->p[0] = !strcmp(in->opcode, "tcgen05.wait::ld");
    in->flags |= IN_ALIGNED | IN_TOUCHES_PENDING;
    in->klass = in->p[0] ? C_TCGEN05_LD : C_TCGEN05_ST;
    in->exec = exec_wait;
    return NULL;
}

static const char *decode_fence(inst *in, const kernel *k)
{
    const char *wrong = needs_tcgen05(k);
    if (wrong) return wrong;
    if (in->mods) return in->mod[0];
    if (in->nops) return "operands: none";
    in->klass = C_FENCE;
    in->exec = strcmp(in->opcode, "tcgen05.fence::before_thread_sync") ? exec_fence_after : exec_fence_before;
    return NULL;
}

static const char *decode_mma(inst *in, const kernel *k)
{
    static const char *const allowed[] = {"cta_group::1",
                                          "cta_group::2",
                                          "kind::f16",
                                          "kind::tf32",
                                          "kind::f8f6f4",
                                          "collector::a::fill",
                                          "collector::a::use",
                                          "collector::a::lastuse",
                                          "collector::a::discard",
                                          NULL};
    static const char *const refused[][2] = {
        {"kind::i8", "kind::i8 is not supported"},
        {"kind::mxf8f6f4", "block-scaled kind::mxf8f6f4 is not supported"},
        {"kind::mxf4", "block-scaled kind::mxf4 is not supported"},
        {"kind::mxf4nvf4", "block-scaled kind::mxf4nvf4 is not supported"},
        {"block_scale", ".block_scale is not supported"},
        {"ashift", ".ashift is not supported"},
    };
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        if (mod_index(in, refused[i][0]) >= 0) return refused[i][1];
    const char *wrong = decode_group(in, k, allowed);
    if (wrong) return wrong;
    if (in->mods < 2 || strncmp(in->mod[1], "kind::", 6)) return "a .kind is missing";
    in->p[P_KIND] = mod_index(in, "kind::f16") >= 0    ? KIND_F16
                    : mod_index(in, "kind::tf32") >= 0 ? KIND_TF32
                                                       : KIND_F8F6F4;
    in->p[P_COLLECT] = mod_index(in, "collector::a::fill") >= 0      ? COLLECT_FILL
                       : mod_index(in, "collector::a::use") >= 0     ? COLLECT_USE
                       : mod_index(in, "collector::a::lastuse") >= 0 ? COLLECT_LASTUSE
                                                                     : COLLECT_DISCARD;
    if (in->mods > 2 && strncmp(in->mod[2], "collector::", 11)) return in->mod[2];
    if (in->mods > 3) return in->mod[3];
    if (in->nops < 5 || !is_address(in, 0) || !(is_address(in, 1) || in->ops[1].kind == OP_REG) || !is_value(in, 2) ||
        !is_value(in, 3))
        return "operands: [d], a, b, idesc, {mask}, enable-input-d, scale-input-d";
    in->p[P_A_TMEM] = is_address(in, 1);
    int next = 4;
    in->p[P_MASK] = in->p[P_SCALE] = -1;
    if (in->ops[next].kind == OP_VECTOR) {
        if (in->ops[next].count != 4 * in->p[P_GROUP])
            return "the mask of disabled lanes has the wrong number of words";
        for (int i = 0; i < in->ops[next].count; i++)
            if (in->ops[next].items[i].kind != OP_REG) return "the mask of disabled lanes must be registers";
        in->p[P_MASK] = next++;
    }
    if (!is_value(in, next)) return "enable-input-d is missing";
    in->p[P_ENABLE] = next++;
    if (next < in->nops) {
        if (in->p[P_KIND] == KIND_F8F6F4) return "scale-input-d is for kind::f16 and kind::tf32";
        if (in->ops[next].kind != OP_IMM || in->ops[next].imm < 0 || in->ops[next].imm > 15)
            return "scale-input-d must be an immediate of 0 to 15";
        in->p[P_SCALE] = next++;
    }
    if (next != in->nops) return "too many operands";
    in->klass = C_TCGEN05_MMA;
    in->exec = exec_mma;
    return NULL;
}

static const char *refuse_sparse(inst *in, const kernel *k)
{
    (void)in, (void)k;
    return "sparse MMAs (.sp) are not supported";
}

static const char *refuse_stationary(inst *in, const kernel *k)
{
    (void)in, (void)k;
    return "weight-stationary MMAs (.ws) are not supported";
}

static const char *refuse_shift(inst *in, const kernel *k)
{
    (void)in, (void)k;
    return "tcgen05.shift is not supported";
}

static const char *decode_cp(inst *in, const kernel *k)
{
    const char *wrong = needs_tcgen05(k);
    if (wrong) return wrong;
    if (in->mods < 2 || (strcmp(in->mod[0], "cta_group::1") && strcmp(in->mod[0], "cta_group::2")))
        return "a .cta_group is missing";
    in->p[P_GROUP] = in->mod[0][11] == '2' ? 2 : 1;
    int shape = -1, next = 2;
    for (int i = 0; i < COPY_SHAPES && shape < 0; i++) {
        const copy_shape *s = &copy_shapes[i];
        if (strcmp(s->shape, in->mod[1])) continue;
        if (s->multicast && (in->mods < 3 || strcmp(s->multicast, in->mod[2]))) continue;
        shape = i;
        next += s->multicast != NULL;
    }
    if (shape < 0) return "no such shape and multicast of tcgen05.cp";
    if (next < in->mods && !strncmp(in->mod[next], "b8x16", 5)) return "decompression in tcgen05.cp is not supported";
    if (next < in->mods) return in->mod[next];
    if (in->nops != 2 || !is_address(in, 0) || !is_value(in, 1)) return "operands: [address], descriptor";
    in->p[P_COPY] = shape;
    in->klass = C_TCGEN05_OTHER;
    in->exec = exec_cp;
    return NULL;
}

static const char *decode_commit(inst *in, const kernel *k)
{
    static const char *const allowed[] = {
        "cta_group::1", "cta_group::2", "mbarrier::arrive::one", "shared::cluster", "multicast::cluster", "b64", NULL};
    const char *wrong = decode_group(in, k, allowed);
    if (wrong) return wrong;
    if (mod_index(in, "mbarrier::arrive::one") < 0 || mod_index(in, "b64") < 0)
        return ".mbarrier::arrive::one and .b64 are required";
    in->p[P_MULTICAST] = mod_index(in, "multicast::cluster") >= 0;
    in->p[P_GENERIC] = mod_index(in, "shared::cluster") < 0;
    if (in->nops != 1 + in->p[P_MULTICAST] || !is_address(in, 0) || (in->p[P_MULTICAST] && !is_value(in, 1)))
        return "operands: [mbarrier], and with .multicast::cluster a mask of CTAs";
    in->exec = exec_commit;
    return NULL;
}

const inst_row tcgen05_rows[] = {
    {"tcgen05.alloc", decode_alloc},
    {"tcgen05.dealloc", decode_dealloc},
    {"tcgen05.relinquish_alloc_permit", decode_relinquish},
    {"tcgen05.ld", decode_ld},
    {"tcgen05.ld.red", decode_ld_red},
    {"tcgen05.st", decode_st},
    {"tcgen05.wait::ld", decode_wait},
    {"tcgen05.wait::st", decode_wait},
    {"tcgen05.fence::before_thread_sync", decode_fence},
    {"tcgen05.fence::after_thread_sync", decode_fence},
    {"tcgen05.mma", decode_mma},
    {"tcgen05.mma.sp", refuse_sparse},
    {"tcgen05.mma.ws", refuse_stationary},
    {"tcgen05.mma.ws.sp", refuse_stationary},
    {"tcgen05.cp", decode_cp},
    {"tcgen05.shift", refuse_shift},
    {"tcgen05.commit", decode_commit},
    {NULL, NULL},
};
