// Instructions of a whole warp: shuffles, votes, matches, reductions, elections, bar.warp.sync.
#include <math.h>
#include <string.h>

#include "lanes.h"
#include "sched.h"

// PTX ISA: ".sync will cause the executing thread to wait until all non-exited threads corresponding to membermask have
// executed [it] with the same qualifiers and same membermask value before resuming execution."
uint32_t members_ready(warp *w, const inst *in, uint32_t mask, bool *failed)
{
    const operand *o = &in->ops[in->p[11]];
    if (o->kind == OP_IMM && (uint32_t)o->imm == ~0u) return mask == w->live ? mask : 0;
    cluster *c = w->cta->cluster;
    lanes m;
    read_lanes(&m, w, o, T_B32);
    if (m.poisoned & mask) {
        finding(c, (place){w, in, __builtin_ctz(m.poisoned & mask)}, "poison", "the member mask is undefined");
        *failed = true;
        return 0;
    }
    uint32_t ready = 0;
    for (uint32_t left = mask; left;) {
        int first = __builtin_ctz(left);
        uint32_t members = (uint32_t)m.v[first], here = 0;
        for (uint32_t r = left; r; r &= r - 1)
            if ((uint32_t)m.v[__builtin_ctz(r)] == members) here |= 1u << __builtin_ctz(r);
        left &= ~here;
        if (here & ~members) {
            finding(c, (place){w, in, __builtin_ctz(here & ~members)}, "membermask",
                    "the lane is not in its member mask 0x%08x", members);
            *failed = true;
            return 0;
        }
        if (!(members & w->live & ~here)) ready |= here;
    }
    return ready;
}

// The lanes of *left with the first one's member mask, taken out of it.
static uint32_t next_group(warp *w, const inst *in, uint32_t *left, uint32_t *members)
{
    lanes m;
    read_lanes(&m, w, &in->ops[in->p[11]], T_B32);
    *members = (uint32_t)m.v[__builtin_ctz(*left)];
    uint32_t group = 0;
    for (uint32_t r = *left; r; r &= r - 1)
        if ((uint32_t)m.v[__builtin_ctz(r)] == *members) group |= 1u << __builtin_ctz(r);
    *left &= ~group;
    return group;
}

static void put(warp *w, const operand *o, uint32_t mask, const uint64_t value[LANES], const uint8_t poison[LANES])
{
    if (o->kind == OP_SINK) return;
    uint64_t *d = w->regs + (size_t)o->reg * LANES;
    EACH_LANE(mask, d[l] = value[l];);
    set_poison_bytes(w, o->reg, mask, poison);
}

// d|p, or d alone.
static const operand *destination(const inst *in, const operand **predicate)
{
    const operand *d = &in->ops[0];
    *predicate = NULL;
    if (d->kind != OP_PAIR) return d;
    *predicate = &d->items[1];
    return &d->items[0];
}

static const char *want_destination(const kernel *k, const operand *o, type t, bool pair)
{
    if (o->kind == OP_PAIR && pair) {
        const char *wrong = o->items[0].kind == OP_SINK ? NULL : want_register(k, &o->items[0], t);
        if (!wrong && o->items[1].kind != OP_SINK) wrong = want_register(k, &o->items[1], T_PRED);
        return wrong;
    }
    return o->kind == OP_SINK ? NULL : want_register(k, o, t);
}

static void is_warp_sync(inst *in, int members)
{
    in->p[11] = members;
    in->flags |= IN_WARPSYNC;
    in->klass = C_WARP;
}

// --------------------------------------------------------------------------------------------------------- shfl

enum { UP, DOWN, BFLY, IDX };

// PTX ISA, "shfl.sync"
static outcome exec_shfl(warp *w, const inst *in, uint32_t mask)
{
    lanes a, b, c;
    read_lanes(&a, w, &in->ops[1], T_B32);
    read_lanes(&b, w, &in->ops[2], T_B32);
    read_lanes(&c, w, &in->ops[3], T_B32);
    uint32_t bad = (b.poisoned | c.poisoned) & mask;
    if (bad) {
        finding(w->cta->cluster, (place){w, in, __builtin_ctz(bad)}, "poison",
                "the source lane of a shuffle is undefined");
        return FAILED;
    }
    uint64_t value[LANES], in_range[LANES];
    uint8_t poison[LANES] = {0};
    for (uint32_t left = mask; left;) {
        uint32_t members, group = next_group(w, in, &left, &members);
        for (uint32_t m = group; m; m &= m - 1) {
            int lane = __builtin_ctz(m), j = lane;
            int step = (int)(b.v[lane] & 31), clamp = (int)(c.v[lane] & 31), segment = (int)(c.v[lane] >> 8 & 31);
            int max = (lane & segment) | (clamp & ~segment), min = lane & segment;
            bool p = false;
            switch (in->p[0]) {
            case UP: j = lane - step, p = j >= max; break;
            case DOWN: j = lane + step, p = j <= max; break;
            case BFLY: j = lane ^ step, p = j <= max; break;
            case IDX: j = min | (step & ~segment), p = j <= max; break;
            }
            if (!p) j = lane;
            in_range[lane] = p;
            value[lane] = (uint32_t)a.v[j];
            // "the result is undefined if the source lane is inactive or not in membermask"
            poison[lane] = group >> j & 1 ? a.poison[j] : 0xf;
        }
    }
    const operand *p, *d = destination(in, &p);
    put(w, d, mask, value, poison);
    if (p) put(w, p, mask, in_range, clean_lanes);
    return RAN;
}

static const char *decode_shfl(inst *in, const kernel *k)
{
    const char *m = mods_only(in, (const char *const[]){"up", "down", "bfly", "idx", "b32", NULL});
    if (m) return m;
    static const char *const modes[] = {"up", "down", "bfly", "idx"};
    if (in->mods != 2 || strcmp(in->mod[1], "b32") || in->nops != 5)
        return "shfl.sync.mode.b32 d|p, a, b, c, membermask is meant";
    for (int i = 0; i < 4; i++)
        if (!strcmp(modes[i], in->mod[0])) in->p[0] = i;
    const char *wrong = want_destination(k, &in->ops[0], T_B32, true);
    for (int i = 1; i < 5 && !wrong; i++) wrong = want_source(k, &in->ops[i], T_B32);
    is_warp_sync(in, 4);
    in->exec = exec_shfl;
    return wrong;
}

// --------------------------------------------------------------------------------------------------------- vote

enum { ALL, ANY, UNI, BALLOT };

// PTX ISA, "vote.sync"
static outcome exec_vote(warp *w, const inst *in, uint32_t mask)
{
    lanes a;
    read_lanes(&a, w, &in->ops[1], T_PRED);
    uint64_t value[LANES];
    uint8_t poison[LANES] = {0};
    for (uint32_t left = mask; left;) {
        uint32_t members, group = next_group(w, in, &left, &members), votes = 0;
        for (uint32_t m = group; m; m &= m - 1) votes |= (uint32_t)(a.v[__builtin_ctz(m)] & 1) << __builtin_ctz(m);
        if (in->ops[1].negated) votes = ~votes & group;
        uint64_t result = votes;
        switch (in->p[0]) {
        case ALL: result = votes == group; break;
        case ANY: result = votes != 0; break;
        case UNI: result = votes == group || !votes; break;
        }
        uint8_t undefined = !(a.poisoned & group) ? 0 : in->p[0] == BALLOT ? 0xf : 1;
        for (uint32_t m = group; m; m &= m - 1) value[__builtin_ctz(m)] = result, poison[__builtin_ctz(m)] = undefined;
    }
    put(w, &in->ops[0], mask, value, poison);
    return RAN;
}

static const char *decode_vote(inst *in, const kernel *k)
{
    static const char *const modes[] = {"all", "any", "uni", "ballot"};
    int mode = -1;
    for (int i = 0; i < 4 && in->mods; i++)
        if (!strcmp(modes[i], in->mod[0])) mode = i;
    if (in->mods != 2 || mode < 0 || strcmp(in->mod[1], mode == BALLOT ? "b32" : "pred") || in->nops != 3)
        return "vote.sync.{all,any,uni}.pred or vote.sync.ballot.b32 d, a, membermask is meant";
    in->p[0] = mode;
    const char *wrong = want_destination(k, &in->ops[0], mode == BALLOT ? T_B32 : T_PRED, false);
    if (!wrong) wrong = want_predicate(k, &in->ops[1]);
    if (!wrong) wrong = want_source(k, &in->ops[2], T_B32);
    is_warp_sync(in, 2);
    in->exec = exec_vote;
    return wrong;
}

// -------------------------------------------------------------------------------------------------------- match

// PTX ISA, "match.sync"
static outcome exec_match(warp *w, const inst *in, uint32_t mask)
{
    lanes a;
    read_lanes(&a, w, &in->ops[1], (type)in->p[1]);
    uint64_t value[LANES], all[LANES];
    uint8_t poison[LANES] = {0}, undefined[LANES] = {0};
    for (uint32_t left = mask; left;) {
        uint32_t members, group = next_group(w, in, &left, &members);
        for (uint32_t m = group; m; m &= m - 1) {
            int lane = __builtin_ctz(m);
            uint32_t same = 0;
            for (uint32_t o = group; o; o &= o - 1)
                if (a.v[__builtin_ctz(o)] == a.v[lane]) same |= 1u << __builtin_ctz(o);
            all[lane] = same == group;
            value[lane] = in->p[0] && same != group ? 0 : same;
            if (a.poisoned & group) poison[lane] = 0xf, undefined[lane] = 1;
        }
    }
    const operand *p, *d = destination(in, &p);
    put(w, d, mask, value, poison);
    if (p) put(w, p, mask, all, undefined);
    return RAN;
}

static const char *decode_match(inst *in, const kernel *k)
{
    bool all = in->mods == 3 && !strcmp(in->mod[0], "all"), any = in->mods == 3 && !strcmp(in->mod[0], "any");
    type t = in->mods == 3 ? type_from(in->mod[2]) : T_NONE;
    if (all == any || strcmp(in->mod[1], "sync") || (t != T_B32 && t != T_B64) || in->nops != 3)
        return "match.{any,all}.sync.{b32,b64} d, a, membermask is meant";
    in->p[0] = all;
    in->p[1] = t;
    const char *wrong = want_destination(k, &in->ops[0], T_B32, all);
    if (!wrong) wrong = want_source(k, &in->ops[1], t);
    if (!wrong) wrong = want_source(k, &in->ops[2], T_B32);
    is_warp_sync(in, 2);
    in->exec = exec_match;
    return wrong;
}

// -------------------------------------------------------------------------------------------------------- redux

enum { ADD, MIN, MAX, AND, OR, XOR };

static uint32_t reduce_integers(int op, bool is_signed, uint32_t a, uint32_t b)
{
    bool less = is_signed ? (int32_t)a < (int32_t)b : a < b;
    switch (op) {
    case ADD: return a + b;
    case MIN: return less ? a : b;
    case MAX: return less ? b : a;
    case AND: return a & b;
    case OR: return a | b;
    default: return a ^ b;
    }
}

// min and max of floats: a NaN loses, unless .NaN; -0 is less than +0.
static uint32_t reduce_floats(int op, bool propagate, uint32_t a, uint32_t b)
{
    float x, y;
    memcpy(&x, &a, 4);
    memcpy(&y, &b, 4);
    if (isnan(x) || isnan(y)) {
        if (propagate || (isnan(x) && isnan(y))) return 0x7fffffff;
        return isnan(x) ? b : a;
    }
    if (x == y) return op == MIN ? a | b : a & b; // equal but for the sign of a zero
    return (x < y) == (op == MIN) ? a : b;
}

// PTX ISA, "redux.sync"
static outcome exec_redux(warp *w, const inst *in, uint32_t mask)
{
    lanes a;
    read_lanes(&a, w, &in->ops[1], (type)in->p[1]);
    bool is_float = in->p[1] == T_F32;
    uint64_t value[LANES];
    uint8_t poison[LANES] = {0};
    for (uint32_t left = mask; left;) {
        uint32_t members, group = next_group(w, in, &left, &members), result = 0;
        bool started = false;
        for (uint32_t m = group; m; m &= m - 1) {
            uint32_t x = (uint32_t)a.v[__builtin_ctz(m)];
            if (in->p[2]) x &= 0x7fffffff;
            if (!started)
                result = is_float ? reduce_floats(in->p[0], in->p[3], x, x) : x;
            else if (is_float)
                result = reduce_floats(in->p[0], in->p[3], result, x);
            else
                result = reduce_integers(in->p[0], in->p[1] == T_S32, result, x);
            started = true;
        }
        for (uint32_t m = group; m; m &= m - 1) {
            value[__builtin_ctz(m)] = result;
            if (a.poisoned & group) poison[__builtin_ctz(m)] = 0xf;
        }
    }
    put(w, &in->ops[0], mask, value, poison);
    return RAN;
}

static const char *decode_redux(inst *in, const kernel *k)
{
    static const char *const names[] = {"add", "min", "max", "and", "or", "xor"};
    int op = -1;
    for (int i = 0; i < 6 && in->mods; i++)
        if (!strcmp(names[i], in->mod[0])) op = i;
    type t = in->mods ? type_from(in->mod[in->mods - 1]) : T_NONE;
    if (op < 0 || in->nops != 3) return "redux.sync.op.type d, a, membermask is meant";
    in->p[2] = mod_index(in, "abs") > 0;
    in->p[3] = mod_index(in, "NaN") > 0;
    if (in->mods != 2 + in->p[2] + in->p[3]) return "wrong modifiers";
    if (t == T_F32) {
        if (!target_has(k, FEATURE_SM100AF)) return ".f32 needs sm_100a";
        if (op != MIN && op != MAX) return "only min and max of .f32";
    } else if (in->p[2] || in->p[3] || (op >= AND ? t != T_B32 : t != T_U32 && t != T_S32)) {
        return "a type that the operation does not have";
    }
    in->p[0] = op;
    in->p[1] = t;
    const char *wrong = want_destination(k, &in->ops[0], t, false);
    if (!wrong) wrong = want_source(k, &in->ops[1], t);
    if (!wrong) wrong = want_source(k, &in->ops[2], T_B32);
    is_warp_sync(in, 2);
    in->exec = exec_redux;
    return wrong;
}

// ---------------------------------------------------------------------------------------------- elect, activemask

// PTX ISA, "elect.sync": which lane is the machine's choice, but the same for the same mask. Here the seed's.
static outcome exec_elect(warp *w, const inst *in, uint32_t mask)
{
    uint64_t value[LANES], leads[LANES];
    for (uint32_t left = mask; left;) {
        uint32_t members, group = next_group(w, in, &left, &members);
        int leader = -1;
        uint64_t best = 0;
        for (uint32_t m = group; m; m &= m - 1) {
            int l = __builtin_ctz(m);
            uint64_t z = (w->cta->cluster->grid->seed + 1) * 0x9e3779b97f4a7c15u ^
                         ((uint64_t)members << 5 | (uint64_t)l) * 0xbf58476d1ce4e5b9u;
            z = (z ^ (z >> 29)) * 0x94d049bb133111ebu;
            z ^= z >> 32;
            if (leader < 0 || z > best) leader = l, best = z;
        }
        for (uint32_t m = group; m; m &= m - 1) {
            int l = __builtin_ctz(m);
            value[l] = (uint64_t)leader;
            leads[l] = l == leader;
        }
    }
    const operand *p, *d = destination(in, &p);
    put(w, d, mask, value, clean_lanes);
    put(w, p, mask, leads, clean_lanes);
    return RAN;
}

static const char *decode_elect(inst *in, const kernel *k)
{
    if (!target_has(k, FEATURE_SM90)) return "needs sm_90";
    if (in->mods || in->nops != 2 || in->ops[0].kind != OP_PAIR) return "elect.sync d|p, membermask is meant";
    const char *wrong = want_destination(k, &in->ops[0], T_B32, true);
    if (!wrong) wrong = want_source(k, &in->ops[1], T_B32);
    is_warp_sync(in, 1);
    in->exec = exec_elect;
    return wrong;
}

static outcome exec_activemask(warp *w, const inst *in, uint32_t mask)
{
    uint64_t value[LANES];
    for (int l = 0; l < LANES; l++) value[l] = mask;
    put(w, &in->ops[0], mask, value, clean_lanes);
    return RAN;
}

static const char *decode_activemask(inst *in, const kernel *k)
{
    if (in->mods != 1 || strcmp(in->mod[0], "b32") || in->nops != 1) return "activemask.b32 d is meant";
    in->klass = C_WARP;
    in->exec = exec_activemask;
    return want_register(k, &in->ops[0], T_B32);
}

// ------------------------------------------------------------------------------------------------- bar.warp.sync

// PTX ISA, "bar.warp.sync". The members may come from different places in the program.
static outcome exec_warp_barrier(warp *w, const inst *in, uint32_t mask)
{
    sched_state *s = w->sched;
    cluster *c = w->cta->cluster;
    lanes v;
    read_lanes(&v, w, &in->ops[0], T_B32);
    uint32_t done = 0;
    for (uint32_t m = mask; m; m &= m - 1) {
        int l = __builtin_ctz(m);
        if (s->warp_barrier[l] != NOT_WAITING) continue;
        uint32_t members = (uint32_t)v.v[l];
        if (v.poisoned >> l & 1) {
            finding(c, (place){w, in, l}, "poison", "the member mask is undefined");
            return FAILED;
        }
        if (!(members >> l & 1)) {
            finding(c, (place){w, in, l}, "membermask", "the lane is not in its member mask 0x%08x", members);
            return FAILED;
        }
        s->warp_barrier[l] = WAITING;
        s->warp_barrier_mask[l] = members;
    }
    for (uint32_t left = mask; left;) {
        int first = __builtin_ctz(left);
        uint32_t members = s->warp_barrier_mask[first] & w->live, come = 0;
        left &= left - 1;
        if (s->warp_barrier[first] == RELEASED) continue;
        for (uint32_t m = members; m; m &= m - 1) {
            int l = __builtin_ctz(m);
            if (s->warp_barrier[l] == WAITING && s->warp_barrier_mask[l] == s->warp_barrier_mask[first])
                come |= 1u << l;
        }
        if (come != members) continue;
        signal *signal = signal_new(c);
        order_release_lanes(w, members, signal, SCOPE_CTA);
        order_acquire_lanes(w, members, signal, SCOPE_CTA);
        signal_free(signal);
        for (uint32_t m = members; m; m &= m - 1) s->warp_barrier[__builtin_ctz(m)] = RELEASED;
        s->blocked = 0;
    }
    for (uint32_t m = mask; m; m &= m - 1) {
        int l = __builtin_ctz(m);
        if (s->warp_barrier[l] != RELEASED) continue;
        s->warp_barrier[l] = NOT_WAITING;
        done |= 1u << l;
    }
    if (!done) return BLOCKED;
    if (done == mask) return RAN;
    int pc = (int)(in - c->grid->kernel->insts);
    for (uint32_t m = mask; m; m &= m - 1) w->pc[__builtin_ctz(m)] = pc + (int)(done >> __builtin_ctz(m) & 1);
    return JUMPED;
}

static const char *decode_warp_barrier(inst *in, const kernel *k)
{
    if (in->mods || in->nops != 1) return "bar.warp.sync membermask is meant";
    in->klass = C_BARRIER;
    in->exec = exec_warp_barrier;
    return want_source(k, &in->ops[0], T_B32);
}

const inst_row warp_rows[] = {
    {"shfl.sync", decode_shfl},
    {"vote.sync", decode_vote},
    {"match", decode_match},
    {"redux.sync", decode_redux},
    {"elect.sync", decode_elect},
    {"activemask", decode_activemask},
    {"bar.warp.sync", decode_warp_barrier},
    {NULL, NULL},
};
