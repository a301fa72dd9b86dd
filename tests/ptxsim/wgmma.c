// The tensor cores that work on registers: wgmma (a warpgroup, asynchronous, sm_90a) and mma.sync (a warp). PTX ISA,
// "Asynchronous Warpgroup Level Matrix Instructions", "Warp Level Matrix Instructions". Fragment layouts and the
// descriptors' address model measured on an H200.
#include "matmul.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WARPGROUP = 4, ROWS = 16 /* of a warp */, MAX_N = 256, MAX_K = 32, REMEMBERED = 64 };

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

// --------------------------------------------------------------------------------------------------- fragments

// A register of an operand's fragment holds 4 / element_bytes neighbours along K, for A of row lane / 4 (+ 8 for odd
// registers) and for B of column lane / 4. Lanes of a quad follow each other along K, then come further registers.
static int fragment_k(int lane, int step, int element_bytes)
{
    return (lane % 4 + 4 * step) * (4 / element_bytes);
}

typedef struct {
    float a[ROWS * MAX_K], d[ROWS * MAX_N]; // a[m][k], d[m][n]
    uint8_t a_poison[ROWS], d_poison[ROWS * MAX_N];
    bool a_any;
} tile;
typedef struct {
    const float *values; // [k][n]
    const uint8_t *poison;
    bool any;
} b_operand;

static uint32_t register_value(const warp *w, const operand *o, int lane, uint8_t *poison)
{
    if (o->kind != OP_REG) return (uint32_t)o->imm;
    size_t at = (size_t)o->reg * LANES + (size_t)lane;
    *poison = w->poison[at] & 0xf;
    return (uint32_t)w->regs[at];
}

static void read_a(warp *w, const operand *v, type t, int k, bool negate, tile *x)
{
    int bytes = format_bytes(t), per_word = 4 / bytes;
    memset(x->a_poison, 0, sizeof x->a_poison);
    for (int j = 0; j < v->count; j++)
        for (int lane = 0; lane < LANES; lane++) {
            int row = lane / 4 + 8 * (j & 1);
            uint8_t poison = 0;
            uint32_t word = register_value(w, &v->items[j], lane, &poison);
            x->a_poison[row] |=
                format_unpack(t, &word, &poison, per_word, negate, x->a + row * k + fragment_k(lane, j >> 1, bytes));
        }
    x->a_any = false;
    for (int i = 0; i < ROWS; i++) x->a_any |= x->a_poison[i];
}

static bool read_b(warp *w, const operand *v, type t, int n, float *b, uint8_t *b_poison)
{
    int bytes = format_bytes(t), per_word = 4 / bytes, count = v->kind == OP_VECTOR ? v->count : 1;
    memset(b_poison, 0, (size_t)n);
    for (int j = 0; j < count; j++)
        for (int lane = 0; lane < LANES; lane++) {
            float values[4];
            uint8_t poison = 0;
            uint32_t word = register_value(w, v->kind == OP_VECTOR ? &v->items[j] : v, lane, &poison);
            b_poison[lane / 4] |= format_unpack(t, &word, &poison, per_word, false, values);
            for (int e = 0; e < per_word; e++) b[(fragment_k(lane, j, bytes) + e) * n + lane / 4] = values[e];
        }
    bool any = false;
    for (int i = 0; i < n; i++) any |= b_poison[i];
    return any;
}

// Accumulators: f32 register i has row lane / 4 + 8 * (i / 2 % 2), column 8 * (i / 4) + 2 * (lane % 4) + i % 2; f16
// register i has row lane / 4 + 8 * (i % 2), columns 8 * (i / 2) + 2 * (lane % 4) and the next.
static void read_d(warp *w, const operand *v, bool half, int n, tile *x)
{
    for (int i = 0; i < v->count; i++)
        for (int lane = 0; lane < LANES; lane++) {
            uint8_t poison = 0;
            uint32_t value = register_value(w, &v->items[i], lane, &poison);
            if (half) {
                int at = (lane / 4 + 8 * (i & 1)) * n + 8 * (i >> 1) + 2 * (lane % 4);
                for (int e = 0; e < 2; e++) {
                    x->d[at + e] = format_to_float(T_F16, value >> 16 * e & 0xffff);
                    x->d_poison[at + e] = poison >> 2 * e & 3;
                }
            } else {
                int at = (lane / 4 + 8 * (i >> 1 & 1)) * n + 8 * (i >> 2) + 2 * (lane % 4) + (i & 1);
                memcpy(&x->d[at], &value, sizeof value);
                x->d_poison[at] = poison;
            }
        }
}

static void write_d(warp *w, const operand *v, bool half, int n, const tile *x)
{
    for (int i = 0; i < v->count; i++) {
        int reg = v->items[i].reg;
        if (v->items[i].kind != OP_REG) continue;
        uint32_t undefined = 0;
        for (int lane = 0; lane < LANES; lane++) {
            uint32_t value = 0;
            uint8_t poison = 0;
            if (half) {
                int at = (lane / 4 + 8 * (i & 1)) * n + 8 * (i >> 1) + 2 * (lane % 4);
                for (int e = 0; e < 2; e++) {
                    value |= float_to_format(T_F16, x->d[at + e], false) << 16 * e;
                    poison |= (uint8_t)((x->d_poison[at + e] ? 3 : 0) << 2 * e);
                }
            } else {
                int at = (lane / 4 + 8 * (i >> 1 & 1)) * n + 8 * (i >> 2) + 2 * (lane % 4) + (i & 1);
                memcpy(&value, &x->d[at], sizeof value);
                poison = x->d_poison[at] ? 0xf : 0;
            }
            w->regs[(size_t)reg * LANES + (size_t)lane] = value;
            w->poison[(size_t)reg * LANES + (size_t)lane] = poison;
            undefined |= (uint32_t)(poison != 0) << lane;
        }
        w->poisoned[reg] = undefined;
    }
}

// half: the sum is rounded to f16.
static void multiply(tile *x, const b_operand *b, int n, int k, bool half)
{
    matrix_multiply_add(ROWS, n, k, x->a, k, b->values, n, x->d, n);
    for (int i = 0; half && i < ROWS * n; i++) x->d[i] = format_to_float(T_F16, float_to_format(T_F16, x->d[i], false));
    if (!x->a_any && !b->any) return;
    for (int m = 0; m < ROWS; m++)
        for (int j = 0; j < n; j++)
            if (x->a_poison[m] || b->poison[j]) x->d_poison[m * n + j] = 0xf;
}

static void clear_d(tile *x, int n)
{
    memset(x->d, 0, (size_t)(ROWS * n) * sizeof *x->d);
    memset(x->d_poison, 0, (size_t)(ROWS * n));
}

// ---------------------------------------------------------------------------------------------------- mma.sync

enum { P_N, P_K, P_A_TYPE, P_B_TYPE, P_HALF, P_A_REGISTERS, P_TRANSPOSE_A, P_TRANSPOSE_B };

static outcome exec_mma(warp *w, const inst *in, uint32_t mask)
{
    if (mask != ~0u) {
        finding(w->cta->cluster, here(w, in, first_lane(mask)), "convergence",
                "mma.sync.aligned runs with the lanes %08x only", mask);
        return FAILED;
    }
    tile x;
    float b[MAX_K * 8];
    uint8_t b_poison[8];
    int n = in->p[P_N], k = in->p[P_K];
    read_a(w, &in->ops[1], (type)in->p[P_A_TYPE], k, false, &x);
    bool b_any = read_b(w, &in->ops[2], (type)in->p[P_B_TYPE], n, b, b_poison);
    read_d(w, &in->ops[3], in->p[P_HALF], n, &x);
    multiply(&x, &(b_operand){b, b_poison, b_any}, n, k, in->p[P_HALF]);
    write_d(w, &in->ops[0], in->p[P_HALF], n, &x);
    return RAN;
}

// ------------------------------------------------------------------------------------------------ a warp's state

typedef struct {
    int32_t accumulator, a; // pending wgmmas that use the register so
    uint32_t shape;         // of those that accumulate in it: n and type, and its place in the fragment
    uint32_t touched;       // state->fences when another instruction last used it
} register_use;

// Accumulators of pending wgmmas: nobody may look at their registers before the wait, which writes them.
typedef struct accumulator {
    struct accumulator *next;
    int reg; // the first
    tile tile;
} accumulator;

struct wgmma_state {
    register_use *registers;
    accumulator *accumulators;
    matrix_cache *operands; // of the warpgroup: in its first warp
    uint32_t fences;        // 1 + wgmma.fence instructions so far
    operation *last;        // they run in issue order
    // Operations by issue; [0, committed) belong to groups, group_end[i] is where group i ends.
    operation **ops;
    uint32_t *numbers; // in the stream
    int count, room;
    int *group_end;
    int groups, group_room;
    uint32_t issued;
    uint64_t remembered[REMEMBERED]; // what the warps of a warpgroup must agree on
};

static struct wgmma_state *state_of(warp *w)
{
    struct wgmma_state *s = w->wgmma;
    if (!s->registers) {
        s->registers = calloc((size_t)w->cta->cluster->grid->kernel->regs, sizeof *s->registers);
        for (int r = 0; r < w->cta->cluster->grid->kernel->regs; r++) s->registers[r].touched = s->fences;
    }
    return s;
}

void wgmma_warp_start(warp *w)
{
    w->wgmma = calloc(1, sizeof *w->wgmma);
    w->wgmma->fences = 1;
}

void wgmma_warp_end(warp *w)
{
    struct wgmma_state *s = w->wgmma;
    if (!s) return;
    for (int i = 0; i < s->count; i++) operation_release(s->ops[i]);
    for (accumulator *a = s->accumulators, *next; a; a = next) {
        next = a->next;
        free(a);
    }
    matrix_cache_free(s->operands);
    free(s->ops);
    free(s->numbers);
    free(s->group_end);
    free(s->registers);
    free(s);
    w->wgmma = NULL;
}

static void mark_operand(const operand *o, bool *set, bool add, bool *found)
{
    if ((o->kind == OP_REG || o->kind == OP_ADDRESS) && o->reg >= 0) {
        if (add) set[o->reg] = true;
        *found |= set[o->reg];
    }
    for (int i = 0; i < o->count; i++) mark_operand(&o->items[i], set, add, found);
}

void wgmma_mark(module *m)
{
    for (int i = 0; i < m->count; i++) {
        const kernel *k = &m->kernels[i];
        bool *set = calloc((size_t)k->regs + 1, sizeof *set), any = false;
        for (int j = 0; j < k->count; j++) {
            const inst *in = &k->insts[k->first + j];
            if (!in->opcode || strcmp(in->opcode, "wgmma.mma_async")) continue;
            for (int o = 0; o < 2; o++) // d, and a when it is in registers
                if (in->ops[o].kind == OP_VECTOR) mark_operand(&in->ops[o], set, true, &any);
        }
        for (int j = 0; any && j < k->count; j++) {
            inst *in = &k->insts[k->first + j];
            if (!in->opcode || !strncmp(in->opcode, "wgmma.", 6)) continue;
            bool found = false;
            for (int o = 0; o < in->nops; o++) mark_operand(&in->ops[o], set, false, &found);
            if (found) in->flags |= IN_TOUCHES_WGMMA;
        }
        free(set);
    }
}

static void touch_operand(struct wgmma_state *s, const operand *o)
{
    if ((o->kind == OP_REG || o->kind == OP_ADDRESS) && o->reg >= 0) s->registers[o->reg].touched = s->fences;
    for (int i = 0; i < o->count; i++) touch_operand(s, &o->items[i]);
}

void wgmma_registers_touched(warp *w, const inst *in)
{
    struct wgmma_state *s = state_of(w);
    for (int i = 0; i < in->nops; i++) touch_operand(s, &in->ops[i]);
}

// ------------------------------------------------------------------------------------------------------- wgmma

typedef struct {
    bool a_registers, accumulate, negate_a, negate_b;
    matrix_layout a, b;
} product;

static accumulator **find_accumulator(struct wgmma_state *s, int reg)
{
    accumulator **a = &s->accumulators;
    while (*a && (*a)->reg != reg) a = &(*a)->next;
    return a;
}

static bool run_wgmma(cluster *c, operation *op)
{
    (void)c;
    const product *p = op->payload;
    const inst *in = op->in;
    warp *w = op->w;
    int n = in->p[P_N], k = in->p[P_K];
    type a_type = (type)in->p[P_A_TYPE], b_type = (type)in->p[P_B_TYPE];
    struct wgmma_state *group = w->cta->warp[w->index / WARPGROUP * WARPGROUP].wgmma;
    if (!group->operands) group->operands = matrix_cache_new();

    accumulator **at = find_accumulator(w->wgmma, in->ops[0].items[0].reg);
    if (!*at) {
        *at = malloc(sizeof **at);
        (*at)->next = NULL;
        (*at)->reg = in->ops[0].items[0].reg;
        if (p->accumulate) read_d(w, &in->ops[0], in->p[P_HALF], n, &(*at)->tile);
    }
    tile *x = &(*at)->tile;
    if (!p->accumulate) clear_d(x, n);
    if (p->a_registers) {
        read_a(w, &in->ops[1], a_type, k, p->negate_a, x);
    } else {
        matrix_layout own = matrix_rows(&p->a, w->index % WARPGROUP * ROWS, ROWS);
        matrix_values to = {x->a, k, false, p->negate_a, x->a_poison, false};
        if (!matrix_gather(op->agent, w->cta, &own, a_type, &to)) return false;
        x->a_any = to.any;
    }
    matrix_values b = {.stride = n, .by_depth = true, .negate = p->negate_b};
    if (!matrix_gather_kept(op->agent, w->cta, &p->b, b_type, group->operands, &b)) return false;
    multiply(x, &(b_operand){b.values, b.row_poison, b.any}, n, k, in->p[P_HALF]);
    return true;
}

static void payload_free(operation *op)
{
    free(op->payload);
}

static bool uniform_value(warp *w, const inst *in, int index, uint32_t mask, type t, const char *what, uint64_t *value)
{
    int first = first_lane(mask);
    for (int lane = first; lane < LANES; lane++) {
        if (!(mask >> lane & 1)) continue;
        uint8_t poison = 0;
        uint64_t v = read_operand(w, &in->ops[index], lane, t, &poison);
        if (poison) {
            finding(w->cta->cluster, here(w, in, lane), "poison", "%s is undefined", what);
            return false;
        }
        if (lane == first) *value = v;
        if (v != *value) {
            finding(w->cta->cluster, here(w, in, lane), "wgmma", "%s differs between the lanes of the warp", what);
            return false;
        }
        if (in->ops[index].kind == OP_IMM) break;
    }
    return true;
}

static bool layout_operand(warp *w, const inst *in, int index, uint32_t mask, const char *what, bool transposed, type t,
                           int rows, matrix_layout *l, uint64_t *bits)
{
    if (!uniform_value(w, in, index, mask, T_B64, what, bits)) return false;
    const char *illegal = matrix_descriptor_parse(*bits, false, &l->descriptor);
    if (illegal) {
        finding(w->cta->cluster, here(w, in, first_lane(mask)), "descriptor", "%s %016llx: %s", what,
                (unsigned long long)*bits, illegal);
        return false;
    }
    l->mn_major = transposed;
    l->element_bytes = format_bytes(t);
    l->rows = rows;
    l->depth_bytes = 32;
    return true;
}

// The registers may be used when no other instruction has touched them since the last wgmma.fence, and pending wgmmas
// only accumulate in them, in the same shape.
static bool registers_usable(warp *w, const inst *in, const operand *v, bool accumulator, uint32_t shape)
{
    struct wgmma_state *s = state_of(w);
    cluster *c = w->cta->cluster;
    for (int i = 0; i < v->count; i++) {
        if (v->items[i].kind != OP_REG) continue;
        const register_use *r = &s->registers[v->items[i].reg];
        const char *role = accumulator ? "accumulator" : "A";
        if (r->touched == s->fences) {
            finding(c, here(w, in, 0), "wgmma", "register %d of %s was accessed after the last wgmma.fence", i, role);
            return false;
        }
        if (accumulator ? r->a || (r->accumulator && r->shape != shape + (uint32_t)i) : r->accumulator) {
            finding(c, here(w, in, 0), "wgmma", "register %d of %s is in use by a wgmma that was not waited for", i,
                    role);
            return false;
        }
    }
    return true;
}

static void registers_use(warp *w, const operand *v, bool accumulator, uint32_t shape, int by)
{
    struct wgmma_state *s = state_of(w);
    for (int i = 0; i < v->count; i++) {
        if (v->items[i].kind != OP_REG) continue;
        register_use *r = &s->registers[v->items[i].reg];
        if (accumulator)
            r->accumulator += by;
        else
            r->a += by;
        if (accumulator && by > 0) r->shape = shape + (uint32_t)i;
    }
}

static int vector_registers(const operand *v, int *regs)
{
    int count = 0;
    for (int i = 0; i < v->count; i++)
        if (v->items[i].kind == OP_REG) regs[count++] = v->items[i].reg;
    return count;
}

// The warps of a warpgroup run the same wgmma with the same operands.
static bool warpgroup_agrees(warp *w, const inst *in, uint64_t hash)
{
    struct wgmma_state *s = w->wgmma;
    int first = w->index / WARPGROUP * WARPGROUP;
    if (first + WARPGROUP > w->cta->warps) {
        finding(w->cta->cluster, here(w, in, 0), "wgmma", "wgmma needs a warpgroup of 4 whole warps");
        return false;
    }
    for (int i = 0; i < WARPGROUP; i++) {
        const struct wgmma_state *other = w->cta->warp[first + i].wgmma;
        if (other == s || other->issued <= s->issued || other->issued - s->issued > REMEMBERED) continue;
        if (other->remembered[s->issued % REMEMBERED] != hash) {
            finding(w->cta->cluster, here(w, in, 0), "wgmma",
                    "warps %d and %d of a warpgroup run different wgmmas, or the same with different operands",
                    first + i, w->index);
            return false;
        }
    }
    s->remembered[s->issued++ % REMEMBERED] = hash;
    return true;
}

static outcome exec_wgmma(warp *w, const inst *in, uint32_t mask)
{
    cluster *c = w->cta->cluster;
    if (mask != ~0u) {
        finding(c, here(w, in, first_lane(mask)), "convergence", "wgmma.sync.aligned runs with the lanes %08x only",
                mask);
        return FAILED;
    }
    struct wgmma_state *s = state_of(w);
    product p = {.a_registers = in->ops[1].kind == OP_VECTOR};
    uint64_t a_bits = 0, b_bits, scale;
    uint32_t shape = (uint32_t)in->p[P_N] << 16 | (uint32_t)in->p[P_HALF] << 15;
    if (!p.a_registers && !layout_operand(w, in, 1, mask, "the descriptor of A", in->p[P_TRANSPOSE_A],
                                          (type)in->p[P_A_TYPE], WARPGROUP * ROWS, &p.a, &a_bits))
        return FAILED;
    if (!layout_operand(w, in, 2, mask, "the descriptor of B", in->p[P_TRANSPOSE_B], (type)in->p[P_B_TYPE], in->p[P_N],
                        &p.b, &b_bits) ||
        !uniform_value(w, in, 3, mask, T_PRED, "scale-d", &scale) ||
        !warpgroup_agrees(w, in, (uint64_t)(uintptr_t)in * 31 + a_bits * 7 + b_bits * 13 + (scale & 1)) ||
        !registers_usable(w, in, &in->ops[0], true, shape) ||
        (p.a_registers && !registers_usable(w, in, &in->ops[1], false, 0)))
        return FAILED;
    p.accumulate = scale & 1;
    p.negate_a = in->ops[4].imm < 0;
    p.negate_b = in->ops[5].imm < 0;

    product *payload = malloc(sizeof *payload);
    *payload = p;
    operation *op = operation_new(w, in, 0, agent_issue(w, in, 0, STREAM_WGMMA, PROXY_ASYNC), payload);
    op->run = run_wgmma;
    op->destroy = payload_free;
    int regs[MAX_N + 4], count = vector_registers(&in->ops[0], regs);
    if (p.a_registers) count += vector_registers(&in->ops[1], regs + count);
    registers_pending(w, regs, count, op, true);
    registers_use(w, &in->ops[0], true, shape, 1);
    if (p.a_registers) registers_use(w, &in->ops[1], false, 0, 1);
    if (s->last) operation_after(op, s->last);
    if (s->count == s->room) {
        s->room = s->room ? 2 * s->room : 16;
        s->ops = realloc(s->ops, (size_t)s->room * sizeof *s->ops);
        s->numbers = realloc(s->numbers, (size_t)s->room * sizeof *s->numbers);
    }
    s->numbers[s->count] = agent_number(op->agent);
    s->ops[s->count++] = op;
    s->last = op;
    operation_submit(c, op);
    return RAN;
}

static outcome exec_fence(warp *w, const inst *in, uint32_t mask)
{
    (void)in, (void)mask;
    state_of(w)->fences++;
    return RAN;
}

static outcome exec_commit(warp *w, const inst *in, uint32_t mask)
{
    (void)in, (void)mask;
    struct wgmma_state *s = w->wgmma;
    if (s->groups == s->group_room) {
        s->group_room = s->group_room ? 2 * s->group_room : 8;
        s->group_end = realloc(s->group_end, (size_t)s->group_room * sizeof *s->group_end);
    }
    s->group_end[s->groups++] = s->count;
    return RAN;
}

// Blocks until at most N groups are pending; their registers and everything they read are the program's again.
static outcome exec_wait(warp *w, const inst *in, uint32_t mask)
{
    (void)mask;
    struct wgmma_state *s = w->wgmma;
    int finished = s->groups - (int)in->ops[0].imm;
    if (finished <= 0) return RAN;
    int end = s->group_end[finished - 1];
    for (int i = 0; i < end; i++)
        if (!s->ops[i]->done) return BLOCKED;
    if (end)
        for (int lane = 0; lane < LANES; lane++) order_stream_done(w, lane, STREAM_WGMMA, s->numbers[end - 1]);
    for (int i = 0; i < end; i++) {
        const inst *done = s->ops[i]->in;
        int regs[MAX_N + 4], count = vector_registers(&done->ops[0], regs);
        registers_use(w, &done->ops[0], true, 0, -1);
        if (!s->registers[regs[0]].accumulator) {
            accumulator **at = find_accumulator(s, regs[0]), *last = *at;
            if (last) { // else a finding kept the operations from running
                write_d(w, &done->ops[0], done->p[P_HALF], done->p[P_N], &last->tile);
                *at = last->next;
                free(last);
            }
        }
        if (done->ops[1].kind == OP_VECTOR) {
            count += vector_registers(&done->ops[1], regs + count);
            registers_use(w, &done->ops[1], false, 0, -1);
        }
        registers_ready(w, regs, count);
        if (s->ops[i] == s->last) s->last = NULL;
        operation_release(s->ops[i]);
    }
    s->count -= end;
    memmove(s->ops, s->ops + end, (size_t)s->count * sizeof *s->ops);
    memmove(s->numbers, s->numbers + end, (size_t)s->count * sizeof *s->numbers);
    s->groups -= finished;
    memmove(s->group_end, s->group_end + finished, (size_t)s->groups * sizeof *s->group_end);
    for (int i = 0; i < s->groups; i++) s->group_end[i] -= end;
    return RAN;
}

// ----------------------------------------------------------------------------------------------------- decoding

static bool is_value(const inst *in, int index)
{
    return index < in->nops && (in->ops[index].kind == OP_REG || in->ops[index].kind == OP_IMM);
}

static bool all_registers(const operand *v)
{
    if (v->kind != OP_VECTOR) return false;
    for (int i = 0; i < v->count; i++)
        if (v->items[i].kind != OP_REG) return false;
    return true;
}

// "m64n128k16"
static bool read_shape(const char *text, int *m, int *n, int *k)
{
    int used = 0;
    return sscanf(text, "m%3dn%3dk%3d%n", m, n, k, &used) == 3 && !text[used];
}

static bool input_type(type t)
{
    return t == T_F16 || t == T_BF16 || t == T_TF32 || t == T_E4M3 || t == T_E5M2;
}

static const char *decode_wgmma(inst *in, const kernel *k)
{
    int m, n, depth;
    if (!target_has(k, FEATURE_SM90A)) return "wgmma needs the target sm_90a";
    if (in->mods != 6 || strcmp(in->mod[0], "sync") || strcmp(in->mod[1], "aligned") ||
        !read_shape(in->mod[2], &m, &n, &depth))
        return "it must be .sync.aligned.SHAPE.dtype.atype.btype";
    type d = type_from(in->mod[3]), a = type_from(in->mod[4]), b = type_from(in->mod[5]);
    if (d == T_S32) return "integer wgmma is not supported";
    if (!input_type(a) || !input_type(b)) return "the input types must be .f16, .bf16, .tf32, .e4m3 or .e5m2";
    bool eight = format_bytes(a) == 1 && format_bytes(b) == 1;
    if (a != b && !eight) return "the input types differ";
    if (d != T_F32 && (d != T_F16 || !(a == T_F16 || eight))) return "no such accumulator type for these inputs";
    if (m != 64 || n < 8 || n > 256 || n % 8 || depth != format_depth(a)) return "no such shape for these types";
    bool half = d == T_F16, sixteen = format_bytes(a) == 2;
    if (in->nops < 6 || !all_registers(&in->ops[0]) || in->ops[0].count != (half ? n / 4 : n / 2))
        return "the number of accumulator registers does not fit the shape";
    bool registers = in->ops[1].kind == OP_VECTOR;
    if (registers ? !all_registers(&in->ops[1]) || in->ops[1].count != 4 : in->ops[1].kind != OP_REG)
        return "A must be a descriptor or 4 registers";
    if (in->nops != 6 + (sixteen ? registers ? 1 : 2 : 0)) return "the number of operands does not fit the types";
    if (!is_value(in, 2) || !is_value(in, 3)) return "the descriptor of B and scale-d are missing";
    for (int i = 4; i < in->nops; i++) {
        if (in->ops[i].kind != OP_IMM) return "scales and transposes must be immediates";
        int64_t v = in->ops[i].imm;
        if (i < 6 ? v != 1 && v != -1 : v != 0 && v != 1) return "scales must be 1 or -1, transposes 0 or 1";
    }
    in->p[P_N] = n;
    in->p[P_K] = depth;
    in->p[P_A_TYPE] = (int32_t)a;
    in->p[P_B_TYPE] = (int32_t)b;
    in->p[P_HALF] = half;
    in->p[P_TRANSPOSE_A] = sixteen && !registers ? (int32_t)in->ops[6].imm : 0;
    in->p[P_TRANSPOSE_B] = sixteen ? (int32_t)in->ops[registers ? 6 : 7].imm : 0;
    in->flags |= IN_ALIGNED | IN_TOUCHES_PENDING;
    in->klass = C_WGMMA;
    in->exec = exec_wgmma;
    return NULL;
}

static const char *decode_sync(inst *in, const kernel *k)
{
    if (!target_has(k, FEATURE_SM90A)) return "wgmma needs the target sm_90a";
    if (in->mods != 2 || strcmp(in->mod[0], "sync") || strcmp(in->mod[1], "aligned"))
        return ".sync.aligned is required";
    bool wait = !strcmp(in->opcode, "wgmma.wait_group");
    if (in->nops != wait) return "the operands do not fit";
    if (wait && (in->ops[0].kind != OP_IMM || in->ops[0].imm < 0)) return "the number of groups must be an immediate";
    in->exec = wait ? exec_wait : !strcmp(in->opcode, "wgmma.fence") ? exec_fence : exec_commit;
    in->flags |= IN_ALIGNED | IN_TOUCHES_PENDING;
    in->klass = C_WGMMA;
    return NULL;
}

static const char *refuse_sparse(inst *in, const kernel *k)
{
    (void)in, (void)k;
    return "sparse MMAs (.sp) are not supported";
}

static const char *decode_mma(inst *in, const kernel *k)
{
    (void)k;
    int m, n, depth, last = in->mods - 1;
    if (in->mods < 9 || strcmp(in->mod[0], "sync") || strcmp(in->mod[1], "aligned") ||
        !read_shape(in->mod[2], &m, &n, &depth) || strcmp(in->mod[3], "row") || strcmp(in->mod[4], "col"))
        return "it must be .sync.aligned.SHAPE.row.col.dtype.atype.btype.ctype";
    if (in->mods != 9 && !(in->mods == 10 && !strcmp(in->mod[5], "kind::f8f6f4"))) return in->mod[5];
    type d = type_from(in->mod[last - 3]), a = type_from(in->mod[last - 2]), b = type_from(in->mod[last - 1]),
         c = type_from(in->mod[last]);
    if (a == T_S8 || a == T_U8 || a == T_F64) return "mma.sync of integers and f64 is not supported";
    if (!input_type(a) || !input_type(b)) return "the input types must be .f16, .bf16, .tf32, .e4m3 or .e5m2";
    bool eight = format_bytes(a) == 1 && format_bytes(b) == 1;
    if (in->mods == 10 && (!eight || !target_has(k, FEATURE_SM100))) return in->mod[5];
    if (a != b && !eight) return "the input types differ";
    if (d != c || (d != T_F32 && (d != T_F16 || !(a == T_F16 || eight))))
        return "no such accumulator type for these inputs";
    bool half_depth = depth * 2 == format_depth(a);
    if (m != ROWS || n != 8 || (depth != format_depth(a) && !half_depth)) return "no such shape for these types";
    int a_registers = half_depth ? 2 : 4, b_registers = a_registers / 2, d_registers = d == T_F16 ? 2 : 4;
    if (in->nops != 4 || !all_registers(&in->ops[0]) || in->ops[0].count != d_registers ||
        in->ops[1].kind != OP_VECTOR || in->ops[1].count != a_registers || in->ops[3].kind != OP_VECTOR ||
        in->ops[3].count != d_registers ||
        (in->ops[2].kind == OP_VECTOR ? in->ops[2].count != b_registers : b_registers != 1 || !is_value(in, 2)))
        return "the numbers of registers do not fit the shape";
    in->p[P_N] = n;
    in->p[P_K] = depth;
    in->p[P_A_TYPE] = (int32_t)a;
    in->p[P_B_TYPE] = (int32_t)b;
    in->p[P_HALF] = d == T_F16;
    in->flags |= IN_ALIGNED;
    in->klass = C_WGMMA;
    in->exec = exec_mma;
    return NULL;
}

const inst_row wgmma_rows[] = {
    {"wgmma.mma_async", decode_wgmma}, {"wgmma.mma_async.sp", refuse_sparse},
    {"wgmma.fence", decode_sync},      {"wgmma.commit_group", decode_sync},
    {"wgmma.wait_group", decode_sync}, {"mma", decode_mma},
    {"mma.sp", refuse_sparse},         {NULL, NULL},
};
