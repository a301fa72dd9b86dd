// Branches, calls, exit; named barriers, cluster barriers; setmaxnreg, griddepcontrol.
#include <stdlib.h>
#include <string.h>

#include "lanes.h"
#include "order.h"
#include "sched.h"

static const char *no_operands(const inst *in)
{
    return in->nops ? "takes no operands" : NULL;
}

static const char *only(inst *in, int nops, const char *const *mods)
{
    const char *m = mods_only(in, mods);
    if (m) return m;
    return in->nops == nops ? NULL : "wrong number of operands";
}
#define ONLY(in, nops, ...) only(in, nops, (const char *const[]){__VA_ARGS__, NULL})

// ----------------------------------------------------------------------------------------------------- branches

// PTX ISA, "bra". The scheduler does it itself; the function is its mark.
outcome exec_bra(warp *w, const inst *in, uint32_t mask)
{
    for (; mask; mask &= mask - 1) w->pc[__builtin_ctz(mask)] = (int32_t)in->ops[0].imm;
    return JUMPED;
}

static const char *decode_bra(inst *in, const kernel *k)
{
    (void)k;
    const char *wrong = ONLY(in, 1, "uni");
    if (wrong) return wrong;
    if (in->ops[0].kind != OP_LABEL) return "a label is missing";
    in->klass = C_BRANCH;
    in->exec = exec_bra;
    return NULL;
}

// PTX ISA, "brx.idx"
static outcome exec_brx(warp *w, const inst *in, uint32_t mask)
{
    lanes index;
    read_lanes(&index, w, &in->ops[0], T_U32);
    if (index.poisoned & mask) {
        finding(w->cta->cluster, (place){w, in, __builtin_ctz(index.poisoned & mask)}, "poison",
                "the index of a branch is undefined");
        return FAILED;
    }
    const operand *table = &in->ops[1];
    for (; mask; mask &= mask - 1) {
        int l = __builtin_ctz(mask);
        uint32_t i = (uint32_t)index.v[l];
        if (i >= (uint32_t)table->count) {
            finding(w->cta->cluster, (place){w, in, l}, "out-of-bounds", "branch %u of %d targets", i, table->count);
            return FAILED;
        }
        w->pc[l] = (int32_t)table->items[i].imm;
    }
    return JUMPED;
}

static const char *decode_brx(inst *in, const kernel *k)
{
    const char *wrong = ONLY(in, 2, "uni");
    if (!wrong) wrong = want_register(k, &in->ops[0], T_U32);
    if (!wrong && in->ops[1].kind != OP_VECTOR) wrong = "a list of .branchtargets is missing";
    in->klass = C_BRANCH;
    in->exec = exec_brx;
    return wrong;
}

// --------------------------------------------------------------------------------------------------------- calls

static bool copy_local(warp *w, const inst *in, int lane, size_t from, size_t to, size_t size)
{
    unsigned char bytes[16];
    while (size) {
        size_t n = size >= 16 && !(from % 16) && !(to % 16) ? 16
                   : size >= 8 && !(from % 8) && !(to % 8)  ? 8
                   : size >= 4 && !(from % 4) && !(to % 4)  ? 4
                                                            : 1;
        uint32_t poison = 0;
        if (!load_bytes(w, in, lane, SPACE_LOCAL, from, (int)n, bytes, &poison, ACCESS_WEAK, SCOPE_CTA) ||
            !store_bytes(w, in, lane, SPACE_LOCAL, to, (int)n, bytes, poison, ACCESS_WEAK, SCOPE_CTA))
            return false;
        from += n, to += n, size -= n;
    }
    return true;
}

static size_t frame_base(const warp *w, int lane)
{
    return w->frames[lane] ? w->frames[lane]->base : 0;
}

static const kernel *current_function(const warp *w, int lane)
{
    return w->frames[lane] ? w->frames[lane]->function : w->cta->cluster->grid->kernel;
}

// q[0]: the callee. ops: [(results)], function, [(arguments)].
static outcome exec_call(warp *w, const inst *in, uint32_t mask)
{
    const kernel *callee = (const kernel *)(uintptr_t)in->q[0];
    const operand *arguments = in->p[1] >= 0 ? &in->ops[in->p[1]] : NULL;
    for (; mask; mask &= mask - 1) {
        int l = __builtin_ctz(mask);
        const kernel *caller = current_function(w, l);
        call_frame *f = malloc(sizeof *f);
        if (!f) {
            finding(w->cta->cluster, (place){w, in, l}, "launch", "out of memory for a call");
            return FAILED;
        }
        *f = (call_frame){.caller = w->frames[l],
                          .from = caller,
                          .call = in,
                          .base = frame_base(w, l) + caller->frame_bytes,
                          .function = callee};
        for (int i = 0; arguments && i < arguments->count; i++) {
            const variable *from = &caller->variables[arguments->items[i].symbol];
            const variable *to = &callee->variables[callee->first_param + callee->returns + i];
            if (!copy_local(w, in, l, frame_base(w, l) + from->offset, f->base + to->offset, to->size)) {
                free(f);
                return FAILED;
            }
        }
        w->frames[l] = f;
        w->pc[l] = callee->first;
    }
    return JUMPED;
}

// Device-side printf returns the number of arguments it printed; nothing is printed here, for what a kernel prints is
// no part of its result.
static outcome exec_vprintf(warp *w, const inst *in, uint32_t mask)
{
    static const unsigned char zero[4];
    const variable *v = &w->cta->cluster->grid->kernel->variables[in->ops[0].items[0].symbol];
    for (; mask; mask &= mask - 1) {
        int l = __builtin_ctz(mask);
        v = &current_function(w, l)->variables[in->ops[0].items[0].symbol];
        if (!store_bytes(w, in, l, SPACE_LOCAL, frame_base(w, l) + v->offset, 4, zero, 0, ACCESS_WEAK, SCOPE_CTA))
            return FAILED;
    }
    return RAN;
}

static void read_string(warp *w, const inst *in, int lane, const operand *argument, char *text, size_t size)
{
    const variable *v = &current_function(w, lane)->variables[argument->symbol];
    uint64_t address = 0;
    uint32_t poison = 0;
    *text = 0;
    if (v->size < 8) return;
    if (!load_bytes(w, in, lane, SPACE_LOCAL, frame_base(w, lane) + v->offset, 8, &address, &poison, ACCESS_WEAK,
                    SCOPE_CTA))
        return;
    for (size_t i = 0; i + 1 < size && !poison; i++) {
        unsigned char *data;
        uint8_t *undefined;
        if (!global_range(w->cta->cluster, address + i, 1, &data, &undefined) || !*data) break;
        text[i] = (char)*data;
        text[i + 1] = 0;
    }
}

static outcome exec_assertfail(warp *w, const inst *in, uint32_t mask)
{
    int l = __builtin_ctz(mask);
    char text[256] = "";
    if (in->p[1] >= 0 && in->ops[in->p[1]].count) read_string(w, in, l, &in->ops[in->p[1]].items[0], text, sizeof text);
    finding(w->cta->cluster, (place){w, in, l}, "assertion", "assertion failed: %s", text);
    return FAILED;
}

static const char *call_arguments(const kernel *k, const operand *list, const kernel *callee, int first, int count)
{
    if (list->count != count) return "wrong number of arguments";
    for (int i = 0; i < count; i++) {
        const operand *o = &list->items[i];
        if (o->kind != OP_ADDRESS || o->symbol < 0 || k->variables[o->symbol].space != SPACE_LOCAL)
            return "arguments must be .param variables";
        if (k->variables[o->symbol].size != callee->variables[callee->first_param + first + i].size)
            return "an argument's size is not its parameter's";
    }
    return NULL;
}

static const char *decode_call(inst *in, const kernel *k)
{
    const char *m = mods_only(in, (const char *const[]){"uni", NULL});
    if (m) return m;
    int at = 0;
    const operand *results = NULL;
    if (in->nops > 1 && in->ops[0].kind == OP_VECTOR && in->ops[1].kind == OP_FUNCTION) results = &in->ops[at++];
    if (at >= in->nops || in->ops[at].kind != OP_FUNCTION) return "only calls of a function by its name are known";
    const kernel *callee = &k->module->kernels[in->ops[at].symbol];
    in->p[0] = results ? 0 : -1;
    in->p[1] = at + 1 < in->nops ? at + 1 : -1;
    if (at + 2 < in->nops || (in->p[1] >= 0 && in->ops[at + 1].kind != OP_VECTOR)) return "wrong operands";
    int count = callee->nparams - callee->returns;
    static const operand none;
    const char *wrong = call_arguments(k, in->p[1] >= 0 ? &in->ops[in->p[1]] : &none, callee, callee->returns, count);
    if (!wrong) wrong = call_arguments(k, results ? results : &none, callee, 0, callee->returns);
    if (wrong) return wrong;
    in->q[0] = (uintptr_t)callee;
    in->klass = C_CONTROL;
    if (callee->is_entry) return "a call of an entry";
    if (!strcmp(callee->name, "vprintf"))
        in->exec = exec_vprintf;
    else if (!strcmp(callee->name, "__assertfail"))
        in->exec = exec_assertfail;
    else if (callee->has_body)
        in->exec = exec_call;
    else
        return "the function has no body";
    if (in->exec == exec_vprintf && !results) return "vprintf without its result";
    return NULL;
}

static outcome exec_exit(warp *w, const inst *in, uint32_t mask)
{
    return lanes_exited(w, in, mask) ? JUMPED : FAILED;
}

static outcome exec_ret(warp *w, const inst *in, uint32_t mask)
{
    uint32_t exits = 0;
    for (uint32_t m = mask; m; m &= m - 1) {
        int l = __builtin_ctz(m);
        call_frame *f = w->frames[l];
        if (!f) {
            exits |= 1u << l;
            continue;
        }
        const operand *results = f->call->p[0] >= 0 ? &f->call->ops[f->call->p[0]] : NULL;
        size_t base = f->caller ? f->caller->base : 0;
        for (int i = 0; results && i < results->count; i++) {
            const variable *from = &f->function->variables[f->function->first_param + i];
            const variable *to = &f->from->variables[results->items[i].symbol];
            if (!copy_local(w, in, l, f->base + from->offset, base + to->offset, from->size)) return FAILED;
        }
        w->pc[l] = (int32_t)(f->call - w->cta->cluster->grid->kernel->insts) + 1;
        w->frames[l] = f->caller;
        free(f);
    }
    return exits && !lanes_exited(w, in, exits) ? FAILED : JUMPED;
}

void free_frames(warp *w)
{
    for (int l = 0; l < LANES; l++)
        while (w->frames[l]) {
            call_frame *f = w->frames[l];
            w->frames[l] = f->caller;
            free(f);
        }
}

static const char *decode_ret(inst *in, const kernel *k)
{
    (void)k;
    const char *wrong = ONLY(in, 0, "uni");
    in->klass = C_CONTROL;
    in->exec = exec_ret;
    return wrong;
}

static const char *decode_exit(inst *in, const kernel *k)
{
    (void)k;
    in->klass = C_CONTROL;
    in->exec = exec_exit;
    return in->mods ? in->mod[0] : no_operands(in);
}

static outcome exec_trap(warp *w, const inst *in, uint32_t mask)
{
    finding(w->cta->cluster, (place){w, in, __builtin_ctz(mask)}, "trap", "the program ran into %s", in->opcode);
    return FAILED;
}

static const char *decode_trap(inst *in, const kernel *k)
{
    (void)k;
    in->klass = C_CONTROL;
    in->exec = exec_trap;
    return in->mods ? in->mod[0] : no_operands(in);
}

static outcome exec_nothing(warp *w, const inst *in, uint32_t mask)
{
    (void)w, (void)in, (void)mask;
    return RAN;
}

static const char *decode_pmevent(inst *in, const kernel *k)
{
    (void)k;
    bool mask = in->mods == 1 && !strcmp(in->mod[0], "mask");
    in->klass = C_OTHER;
    in->exec = exec_nothing;
    if (in->mods != mask || in->nops != 1 || in->ops[0].kind != OP_IMM || in->ops[0].imm < 0 ||
        in->ops[0].imm > (mask ? 0xffff : 15))
        return "pmevent a, with an immediate in 0..15, or pmevent.mask is meant";
    return NULL;
}

// A hint; the value may be anything.
static const char *decode_nanosleep(inst *in, const kernel *k)
{
    const char *wrong = ONLY(in, 1, "u32");
    in->klass = C_CONTROL;
    in->exec = exec_nothing;
    if (in->mods != 1) return "the type is missing";
    return wrong ? wrong : want_source(k, &in->ops[0], T_U32);
}

// ------------------------------------------------------------------------------------------------ named barriers

// PTX ISA, "bar, barrier". One generation at a time; who waits is noted in the lanes (sched_state).
struct named_barrier {
    int expected, arrived; // threads; expected 0: no one has come yet
    bool all;              // no thread count: all threads of the CTA that have not exited
    bool reduces;
    int operation;
    bool all_true, any_true;
    uint32_t count_true;
    signal *gathered;
    place first;        // who came first
    place last;         // who completed the generation before
    uint32_t component; // of clock vectors: generations completed
    uint32_t generation;
    uint32_t here[32]; // lanes by warp that have arrived in this generation
};
enum { RED_POPC, RED_AND, RED_OR };

void control_cta_start(cta *c)
{
    c->named = calloc(NAMED_BARRIERS, sizeof *c->named);
    c->reg_pool = 0;
}

void control_cta_end(cta *c)
{
    for (int i = 0; c->named && i < NAMED_BARRIERS; i++)
        if (c->named[i].gathered) signal_free(c->named[i].gathered);
    free(c->named);
}

static int threads_alive(const cta *c)
{
    int n = 0;
    for (int i = 0; i < c->warps; i++)
        if (c->warp[i].live) n += LANES;
    return n;
}

// Every thread that is counted has come: those that wait learn what all of them did, and the barrier is as new.
static void complete(cta *c, int id)
{
    struct named_barrier *b = &c->named[id];
    if (!b->generation++) b->component = component_new(c->cluster, STREAM_MBARRIER, 0, false, false);
    signal_raise(b->gathered, c, b->component, b->generation);
    for (int i = 0; i < c->warps; i++) {
        warp *w = &c->warp[i];
        sched_state *s = w->sched;
        uint32_t waiting = 0;
        for (uint32_t m = b->here[i] & w->live; m; m &= m - 1) {
            int l = __builtin_ctz(m);
            if (s->barrier_state[l] != WAITING || s->barrier_id[l] != id) continue;
            waiting |= 1u << l;
            s->barrier_state[l] = RELEASED;
            s->barrier_result[l] = b->operation == RED_AND ? b->all_true : b->any_true;
        }
        s->barrier_popcount = waiting ? b->count_true : s->barrier_popcount;
        if (waiting) order_acquire_lanes(w, waiting, b->gathered, SCOPE_CTA);
        wake_warp(w);
    }
    signal_free(b->gathered);
    *b = (struct named_barrier){.component = b->component, .generation = b->generation, .last = b->last};
    c->cluster->step++;
}

static bool full(const cta *c, const struct named_barrier *b)
{
    return b->gathered && b->arrived >= (b->all ? threads_alive(c) : b->expected);
}

// in->p: [0] kind below, [1] operand of the barrier's number, [2] of the thread count or -1, [3] destination or -1,
// [4] predicate operand or -1, [5] reduction.
enum { BARRIER_SYNC, BARRIER_ARRIVE, BARRIER_RED };

static bool barrier_operands(warp *w, const inst *in, uint32_t mask, int *id, int *count)
{
    cluster *c = w->cta->cluster;
    for (int i = 1; i <= 2; i++) {
        if (in->p[i] < 0) continue;
        lanes v;
        read_lanes(&v, w, &in->ops[in->p[i]], T_U32);
        int first = __builtin_ctz(mask);
        if (v.poisoned & mask) {
            finding(c, (place){w, in, __builtin_ctz(v.poisoned & mask)}, "poison",
                    "an operand of the barrier is undefined");
            return false;
        }
        for (uint32_t m = mask; m; m &= m - 1)
            if ((uint32_t)v.v[__builtin_ctz(m)] != (uint32_t)v.v[first]) {
                finding(c, (place){w, in, __builtin_ctz(m)}, "barrier",
                        "the lanes of a warp name different barriers or counts");
                return false;
            }
        uint32_t value = (uint32_t)v.v[first];
        if (i == 1 && value >= NAMED_BARRIERS) {
            finding(c, (place){w, in, first}, "barrier", "barrier %u: there are 16", value);
            return false;
        }
        if (i == 2 && (!value || value % LANES || value > 1024)) {
            finding(c, (place){w, in, first}, "barrier",
                    "%u threads: no multiple of the warp size, or none, or too many", value);
            return false;
        }
        *(i == 1 ? id : count) = (int)value;
    }
    return true;
}

// The lanes that come to the barrier now. In a warp of which all living lanes have come, those that do not exist or
// have exited count as well: barriers count whole warps.
static bool arrive(warp *w, const inst *in, uint32_t mask, int id, int count)
{
    cta *a = w->cta;
    struct named_barrier *b = &a->named[id];
    place at = {w, in, __builtin_ctz(mask)};
    bool reduces = in->p[0] == BARRIER_RED;
    if (!b->gathered) {
        b->expected = count;
        b->all = in->p[2] < 0;
        b->reduces = reduces;
        b->operation = in->p[5];
        b->all_true = true;
        b->first = at;
        b->gathered = signal_new(a->cluster);
    } else if (b->all != (in->p[2] < 0) || b->expected != count) {
        finding_pair(a->cluster, at, b->first, "barrier",
                     "barrier %d is used with %d threads while others wait at it with %d", id,
                     count ? count : a->threads, b->expected ? b->expected : a->threads);
        return false;
    } else if (b->reduces != reduces || (reduces && b->operation != in->p[5])) {
        finding_pair(a->cluster, at, b->first, "barrier", "barrier %d is used for different operations at once", id);
        return false;
    }
    if (b->here[w->index] & mask) {
        finding_pair(a->cluster, at, b->first, "barrier", "a thread comes to barrier %d twice before it completes", id);
        return false;
    }
    for (uint32_t m = b->generation ? mask : 0; m; m &= m - 1) {
        int l = __builtin_ctz(m);
        if (vector_has(order_of(w)->lane[l].k->of[K_GENERIC], b->component, b->generation)) continue;
        finding_pair(a->cluster, (place){w, in, l}, b->last, "barrier",
                     "a thread comes to barrier %d and need not know that its last use is over, so it could have been "
                     "counted there: two groups use it at once",
                     id);
        return false;
    }
    b->last = at;
    b->here[w->index] |= mask;
    int n = __builtin_popcount(mask);
    if ((b->here[w->index] & w->live) == w->live) n += LANES - __builtin_popcount(w->live);
    if (!b->all && b->arrived + n > b->expected) {
        finding_pair(a->cluster, at, b->first, "barrier",
                     "%d threads have come to barrier %d, which expects %d: two groups use it at once", b->arrived + n,
                     id, b->expected);
        return false;
    }
    b->arrived += n;
    if (in->p[4] >= 0) {
        lanes p;
        read_lanes(&p, w, &in->ops[in->p[4]], T_PRED);
        bool negated = in->ops[in->p[4]].negated;
        if (p.poisoned & mask) {
            finding(a->cluster, (place){w, in, __builtin_ctz(p.poisoned & mask)}, "poison",
                    "the predicate of the barrier's reduction is undefined");
            return false;
        }
        for (uint32_t m = mask; m; m &= m - 1) {
            bool value = (p.v[__builtin_ctz(m)] & 1) != negated;
            b->all_true &= value;
            b->any_true |= value;
            b->count_true += value;
        }
    }
    order_release_lanes(w, mask, b->gathered, SCOPE_CTA);
    a->cluster->step++;
    if (full(a, b)) complete(a, id);
    return true;
}

static void write_reduction(warp *w, const inst *in, uint32_t mask)
{
    if (in->p[3] < 0 || in->ops[0].kind == OP_SINK) return;
    const sched_state *s = w->sched;
    int reg = in->ops[0].reg;
    for (uint32_t m = mask; m; m &= m - 1) {
        int l = __builtin_ctz(m);
        w->regs[(size_t)reg * LANES + (size_t)l] = in->p[5] == RED_POPC ? s->barrier_popcount : s->barrier_result[l];
    }
    set_poison(w, reg, mask, 0, 0);
}

static outcome exec_barrier(warp *w, const inst *in, uint32_t mask)
{
    sched_state *s = w->sched;
    int id = 0, count = 0;
    uint32_t come = 0, done = 0;
    for (uint32_t m = mask; m; m &= m - 1)
        if (s->barrier_state[__builtin_ctz(m)] == NOT_WAITING) come |= 1u << __builtin_ctz(m);
    if (come) {
        if (!barrier_operands(w, in, come, &id, &count)) return FAILED;
        if (in->p[0] == BARRIER_ARRIVE) return arrive(w, in, come, id, count) ? RAN : FAILED;
        for (uint32_t m = come; m; m &= m - 1) {
            int l = __builtin_ctz(m);
            s->barrier_state[l] = WAITING;
            s->barrier_id[l] = (uint8_t)id;
        }
        if (!arrive(w, in, come, id, count)) return FAILED;
    }
    for (uint32_t m = mask; m; m &= m - 1) {
        int l = __builtin_ctz(m);
        if (s->barrier_state[l] != RELEASED) continue;
        s->barrier_state[l] = NOT_WAITING;
        done |= 1u << l;
    }
    if (!done) return BLOCKED;
    write_reduction(w, in, done);
    if (done == mask) return RAN;
    int pc = (int)(in - w->cta->cluster->grid->kernel->insts);
    for (uint32_t m = mask; m; m &= m - 1) w->pc[__builtin_ctz(m)] = pc + (int)(done >> __builtin_ctz(m) & 1);
    return JUMPED;
}

static const char *decode_barrier(inst *in, const kernel *k)
{
    bool bar = !strncmp(in->opcode, "bar.", 4) || !strcmp(in->opcode, "bar");
    if (in->mods && !strcmp(in->mod[0], "cta")) in->mod++, in->mods--;
    if (!in->mods) return "sync, arrive or red is missing";
    const char *kind = in->mod[0];
    in->klass = C_BARRIER;
    in->exec = exec_barrier;
    in->flags |= bar || mod_index(in, "aligned") >= 0 ? IN_ALIGNED : 0;
    if (bar && mod_index(in, "aligned") >= 0) return "modifier .aligned";
    in->p[3] = in->p[4] = -1;
    int at = 0, most = 2, least = 1;
    if (!strcmp(kind, "sync") || !strcmp(kind, "arrive")) {
        in->p[0] = kind[0] == 's' ? BARRIER_SYNC : BARRIER_ARRIVE;
        const char *m = mods_only(in, (const char *const[]){kind, "aligned", NULL});
        if (m) return m;
        if (in->p[0] == BARRIER_ARRIVE) least = 2;
    } else if (!strcmp(kind, "red")) {
        in->p[0] = BARRIER_RED;
        const char *m =
            mods_only(in, (const char *const[]){"red", "popc", "and", "or", "aligned", "u32", "pred", NULL});
        if (m) return m;
        bool popc = mod_index(in, "popc") >= 0, and = mod_index(in, "and") >= 0, or = mod_index(in, "or") >= 0;
        if (popc + and + or != 1) return "one of popc, and, or";
        if (mod_index(in, popc ? "u32" : "pred") < 0) return "the type is missing or wrong";
        in->p[5] = popc ? RED_POPC : and ? RED_AND : RED_OR;
        in->p[3] = 0;
        at = 1, least = 3, most = 4;
        if (in->nops < least) return "wrong number of operands";
        const char *wrong = want_register(k, &in->ops[0], popc ? T_U32 : T_PRED);
        in->p[4] = in->nops - 1;
        if (!wrong) wrong = want_predicate(k, &in->ops[in->p[4]]);
        if (wrong) return wrong;
    } else {
        return kind;
    }
    if (in->nops < least || in->nops > most) return "wrong number of operands";
    in->p[1] = at;
    in->p[2] = in->nops - (in->p[4] >= 0) > at + 1 ? at + 1 : -1;
    if (in->ops[at].kind == OP_IMM && (in->ops[at].imm < 0 || in->ops[at].imm >= NAMED_BARRIERS))
        return "there are 16 barriers";
    for (int i = at; i <= at + (in->p[2] >= 0); i++) {
        const char *wrong = want_source(k, &in->ops[i], T_U32);
        if (wrong) return wrong;
    }
    return NULL;
}

// ---------------------------------------------------------------------------------------------- cluster barrier

// PTX ISA, "barrier.cluster". The current phase counts lanes; a lane's own phases are in its sched_state. Exited lanes
// count as having arrived.
struct cluster_barrier {
    uint64_t phase; // completed phases
    int arrived;
    signal *gathered, *completed; // of the current phase, of the last one
};

void control_cluster_start(cluster *c)
{
    c->barrier = calloc(1, sizeof *c->barrier);
    if (!c->barrier) return;
    c->barrier->gathered = signal_new(c);
}

void control_cluster_end(cluster *c)
{
    if (!c->barrier) return;
    if (c->barrier->gathered) signal_free(c->barrier->gathered);
    if (c->barrier->completed) signal_free(c->barrier->completed);
    free(c->barrier);
}

static void complete_cluster_phase(cluster *c)
{
    struct cluster_barrier *b = c->barrier;
    int living = 0, arrived = 0;
    for (int r = 0; r < c->ctas; r++)
        for (int i = 0; i < c->cta[r].warps; i++) {
            const warp *w = &c->cta[r].warp[i];
            for (uint32_t m = w->live; m; m &= m - 1) {
                living++;
                arrived += w->sched->cluster_arrivals[__builtin_ctz(m)] > b->phase;
            }
        }
    if (!living || arrived < living) return;
    b->phase++;
    if (b->completed) signal_free(b->completed);
    b->completed = b->gathered;
    b->gathered = signal_new(c);
    b->arrived = 0;
    c->step++;
}

static outcome exec_cluster_arrive(warp *w, const inst *in, uint32_t mask)
{
    cluster *c = w->cta->cluster;
    sched_state *s = w->sched;
    for (uint32_t m = mask; m; m &= m - 1) {
        int l = __builtin_ctz(m);
        if (s->cluster_arrivals[l] != s->cluster_waits[l]) {
            finding_pair(c, (place){w, in, l}, (place){w, s->cluster_arrive_at[l], l}, "barrier",
                         "barrier.cluster.arrive twice without barrier.cluster.wait between them");
            return FAILED;
        }
        s->cluster_arrivals[l]++;
        s->cluster_arrive_at[l] = in;
    }
    if (in->p[0])
        order_release_relaxed(w, mask, c->barrier->gathered, SCOPE_CLUSTER);
    else
        order_release_lanes(w, mask, c->barrier->gathered, SCOPE_CLUSTER);
    c->barrier->arrived += __builtin_popcount(mask);
    c->step++;
    complete_cluster_phase(c);
    return RAN;
}

static outcome exec_cluster_wait(warp *w, const inst *in, uint32_t mask)
{
    cluster *c = w->cta->cluster;
    sched_state *s = w->sched;
    uint32_t done = 0;
    for (uint32_t m = mask; m; m &= m - 1) {
        int l = __builtin_ctz(m);
        if (s->cluster_arrivals[l] == s->cluster_waits[l]) {
            finding(c, (place){w, in, l}, "barrier", "barrier.cluster.wait without barrier.cluster.arrive before it");
            return FAILED;
        }
        if (c->barrier->phase >= s->cluster_arrivals[l]) done |= 1u << l;
    }
    if (!done) return BLOCKED;
    // A lane that has not waited yet keeps the next phase open, so the last completed phase is the one it waits for.
    if (in->p[0])
        order_acquire_relaxed(w, done, c->barrier->completed, SCOPE_CLUSTER);
    else
        order_acquire_lanes(w, done, c->barrier->completed, SCOPE_CLUSTER);
    for (uint32_t m = done; m; m &= m - 1) s->cluster_waits[__builtin_ctz(m)]++;
    if (done == mask) return RAN;
    int pc = (int)(in - c->grid->kernel->insts);
    for (uint32_t m = mask; m; m &= m - 1) w->pc[__builtin_ctz(m)] = pc + (int)(done >> __builtin_ctz(m) & 1);
    return JUMPED;
}

static const char *decode_cluster_barrier(inst *in, const kernel *k)
{
    if (!target_has(k, FEATURE_SM90)) return "needs sm_90";
    if (!in->mods) return "arrive or wait is missing";
    bool wait = !strcmp(in->mod[0], "wait");
    if (!wait && strcmp(in->mod[0], "arrive")) return in->mod[0];
    const char *wrong =
        wait ? ONLY(in, 0, "wait", "acquire", "aligned") : ONLY(in, 0, "arrive", "release", "relaxed", "aligned");
    if (wrong) return wrong;
    if (mod_index(in, "release") >= 0 && mod_index(in, "relaxed") >= 0) return "release and relaxed";
    in->p[0] = mod_index(in, "relaxed") >= 0;
    in->klass = C_BARRIER;
    in->exec = wait ? exec_cluster_wait : exec_cluster_arrive;
    if (mod_index(in, "aligned") >= 0) in->flags |= IN_ALIGNED;
    return NULL;
}

// ------------------------------------------------------------------------------------ what exits and who waits

void control_lanes_exited(warp *w, uint32_t mask)
{
    cta *c = w->cta;
    for (int id = 0; id < NAMED_BARRIERS; id++) {
        struct named_barrier *b = &c->named[id];
        if (!b->gathered) continue;
        // The lanes that had come are counted already; a warp whose other lanes have all come is now whole.
        uint32_t here = b->here[w->index];
        if (here && w->live && (here & w->live) == w->live && (here & (w->live | mask)) != (w->live | mask))
            b->arrived += LANES - __builtin_popcount(here);
        if (full(c, b)) complete(c, id);
    }
    complete_cluster_phase(c->cluster);
}

static void check_setmaxnreg(cta *c)
{
    for (int g = 0; g < c->warps; g += 4)
        for (int i = g + 1; i < g + 4 && i < c->warps; i++) {
            const sched_state *a = c->warp[g].sched, *b = c->warp[i].sched;
            if (a->setmaxnreg_hash == b->setmaxnreg_hash) continue;
            const warp *w = b->setmaxnreg_at ? &c->warp[i] : &c->warp[g];
            finding(c->cluster, (place){w, w->sched->setmaxnreg_at, -1}, "setmaxnreg",
                    "not all four warps of warpgroup %d ran the same setmaxnreg instructions", g / 4);
        }
}

void control_cta_exit(cta *c)
{
    check_setmaxnreg(c);
}

void barriers_print(const cluster *c, FILE *to)
{
    for (int r = 0; r < c->ctas; r++)
        for (int id = 0; id < NAMED_BARRIERS; id++) {
            const struct named_barrier *b = &c->cta[r].named[id];
            if (!b->gathered) continue;
            fprintf(to, "  CTA %d, barrier %d: %d of %d threads have come, warps", r, id, b->arrived,
                    b->all ? threads_alive(&c->cta[r]) : b->expected);
            for (int w = 0; w < c->cta[r].warps; w++)
                if (b->here[w]) fprintf(to, " %d", w);
            fprintf(to, "\n");
        }
    if (c->ctas > 1 || c->barrier->arrived)
        fprintf(to, "  cluster barrier: phase %llu, %d threads have arrived\n", (unsigned long long)c->barrier->phase,
                c->barrier->arrived);
}

// --------------------------------------------------------------------------------------------------- setmaxnreg

// PTX ISA, "setmaxnreg". The CTA's pool holds what warps have given back.
static outcome exec_setmaxnreg(warp *w, const inst *in, uint32_t mask)
{
    (void)mask;
    cta *a = w->cta;
    cluster *c = a->cluster;
    sched_state *s = w->sched;
    int n = in->p[0], now = w->reg_limit;
    place at = {w, in, __builtin_ctz(mask)};
    bool inc = in->p[1];
    if (!c->grid->kernel->minnctapersm && !c->grid->kernel->maxnreg) {
        finding(c, at, "setmaxnreg", "the kernel has no .minnctapersm: ptxas ignores its setmaxnreg instructions");
        return FAILED;
    }
    if (a->warps % 4) {
        finding(c, at, "setmaxnreg", "the CTA has %d warps, not whole warpgroups", a->warps);
        return FAILED;
    }
    if (inc ? n < now : n > now) {
        finding(c, at, "setmaxnreg", "setmaxnreg.%s to %d registers, but the warp has %d", inc ? "inc" : "dec", n, now);
        return FAILED;
    }
    if (inc && (n - now) * LANES > a->reg_pool) return BLOCKED;
    a->reg_pool -= (n - now) * LANES;
    w->reg_limit = n;
    s->setmaxnreg_count++;
    s->setmaxnreg_hash = s->setmaxnreg_hash * 1000003u + (uint64_t)(2 * n + inc);
    s->setmaxnreg_at = in;
    c->step++;
    for (int i = w->index / 4 * 4; i < w->index / 4 * 4 + 4; i++) {
        const sched_state *o = a->warp[i].sched;
        if (o->setmaxnreg_count == s->setmaxnreg_count && o->setmaxnreg_hash != s->setmaxnreg_hash) {
            finding_pair(c, at, (place){&a->warp[i], o->setmaxnreg_at, -1}, "setmaxnreg",
                         "the warps of warpgroup %d run different setmaxnreg", w->index / 4);
            return FAILED;
        }
    }
    return RAN;
}

static const char *decode_setmaxnreg(inst *in, const kernel *k)
{
    if (!target_has(k, FEATURE_SM90A) && !target_has(k, FEATURE_SM100AF)) return "needs sm_90a or sm_100a";
    const char *wrong = ONLY(in, 1, "inc", "dec", "sync", "aligned", "u32");
    if (wrong) return wrong;
    if (in->mods != 4) return "setmaxnreg.{inc,dec}.sync.aligned.u32 is meant";
    bool inc = mod_index(in, "inc") >= 0;
    if (inc == (mod_index(in, "dec") >= 0) || mod_index(in, "sync") < 0 || mod_index(in, "aligned") < 0 ||
        mod_index(in, "u32") < 0)
        return "setmaxnreg.{inc,dec}.sync.aligned.u32 is meant";
    const operand *o = &in->ops[0];
    if (o->kind != OP_IMM || o->imm < 24 || o->imm > 256 || o->imm % 8)
        return "the count must be an immediate multiple of 8 in 24..256";
    in->p[0] = (int32_t)o->imm;
    in->p[1] = inc;
    in->klass = C_CONTROL;
    in->flags |= IN_ALIGNED;
    in->exec = exec_setmaxnreg;
    return NULL;
}

// ----------------------------------------------------------------------------------------------- griddepcontrol

static outcome exec_launch_dependents(warp *w, const inst *in, uint32_t mask)
{
    (void)in, (void)mask;
    cta_triggered(w->cta);
    return RAN;
}

static outcome exec_grid_wait(warp *w, const inst *in, uint32_t mask)
{
    (void)in;
    const grid *g = w->cta->cluster->grid;
    if (g->dependent && !launch_earlier_grids_done(g)) return BLOCKED;
    if (g->dependent) order_grids_done(w, mask);
    return RAN;
}

bool waits_for_grid(const warp *w)
{
    const inst *insts = w->cta->cluster->grid->kernel->insts;
    for (uint32_t m = w->live; m; m &= m - 1)
        if (insts[w->pc[__builtin_ctz(m)]].exec == exec_grid_wait) return true;
    return false;
}

static const char *decode_griddepcontrol(inst *in, const kernel *k)
{
    if (!target_has(k, FEATURE_SM90)) return "needs sm_90";
    if (in->mods != 1 || in->nops) return "griddepcontrol.wait or .launch_dependents is meant";
    in->klass = C_CONTROL;
    if (!strcmp(in->mod[0], "wait"))
        in->exec = exec_grid_wait;
    else if (!strcmp(in->mod[0], "launch_dependents"))
        in->exec = exec_launch_dependents;
    else
        return in->mod[0];
    return NULL;
}

const inst_row control_rows[] = {
    {"bra", decode_bra},
    {"brx.idx", decode_brx},
    {"call", decode_call},
    {"ret", decode_ret},
    {"exit", decode_exit},
    {"trap", decode_trap},
    {"brkpt", decode_trap},
    {"pmevent", decode_pmevent},
    {"nanosleep", decode_nanosleep},
    {"bar", decode_barrier},
    {"barrier", decode_barrier},
    {"barrier.cluster", decode_cluster_barrier},
    {"setmaxnreg", decode_setmaxnreg},
    {"griddepcontrol", decode_griddepcontrol},
    {NULL, NULL},
};
