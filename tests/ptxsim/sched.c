// Clusters, CTAs and warps: their making and ending, divergence, and which warp or pending operation runs next.
#define _POSIX_C_SOURCE 200809L
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "sched.h"

// What only this file needs of a cluster.
typedef struct {
    cluster c;               // first: a cluster pointer is a pointer to this
    uint64_t last_operation; // instructions executed when one was last made to run
    uint64_t turn, instructions;
    uint64_t quiet_step, changed_at, paused_at; // instructions when the step last changed, and at the last pause for it
    int next_warp, nwarps, live_warps;
    warp **warps; // of all CTAs
    bool failed;
    uint64_t last_freeze;
    uint16_t triggered_ctas; // by rank: launch_dependents called, or exited
    bool pause_on_trigger;
} scheduled;

static scheduled *scheduled_of(cluster *c)
{
    return (scheduled *)c;
}

// splitmix64
uint64_t next_random(cluster *c)
{
    uint64_t z = c->rng += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

uint64_t simulated_clock(const warp *w)
{
    return 1000 + 4 * scheduled_of(w->cta->cluster)->instructions;
}

uint64_t cluster_instructions(const cluster *c)
{
    return ((const scheduled *)c)->instructions;
}

void cluster_pause_on_trigger(cluster *c)
{
    scheduled_of(c)->pause_on_trigger = true;
}

bool cluster_triggered(const cluster *c)
{
    return ((const scheduled *)c)->triggered_ctas == (1u << c->ctas) - 1;
}

void cta_triggered(cta *c)
{
    scheduled_of(c->cluster)->triggered_ctas |= (uint16_t)(1u << c->rank);
}

// ------------------------------------------------------------------------------------------ making and ending

static uint8_t undefined_bytes(type t)
{
    int bytes = type_bytes(t);
    return bytes >= 8 ? 0xff : (uint8_t)((1u << bytes) - 1);
}

static bool warp_start(warp *w, cta *c, int index)
{
    const grid *g = c->cluster->grid;
    const kernel *k = g->kernel;
    size_t regs = (size_t)k->regs;
    int threads = c->threads - index * LANES;
    w->cta = c;
    w->index = index;
    w->regs = aligned_alloc(64, (regs + 1) * LANES * sizeof *w->regs);
    w->poison = aligned_alloc(64, (regs + 2) / 2 * 2 * LANES);
    w->poisoned = malloc((regs + 1) * sizeof *w->poisoned);
    w->pending_reg = calloc(regs + 1, sizeof *w->pending_reg);
    w->sched = calloc(1, sizeof *w->sched);
    if (!w->regs || !w->poison || !w->poisoned || !w->pending_reg || !w->sched) return false;
    memset(w->regs, 0xa5, regs * LANES * sizeof *w->regs);
    for (size_t r = 0; r < regs; r++) {
        uint8_t undefined = undefined_bytes(k->reg_type[r]);
        memset(w->poison + r * LANES, undefined, LANES);
        w->poisoned[r] = ~0u;
        if (k->reg_type[r] == T_PRED)
            memset(w->regs + r * LANES, 0, LANES * sizeof *w->regs);
        else if (undefined != 0xff)
            for (int l = 0; l < LANES; l++) w->regs[r * LANES + l] &= (1ull << 8 * type_bytes(k->reg_type[r])) - 1;
    }
    w->live = threads >= LANES ? ~0u : (1u << threads) - 1;
    for (int l = 0; l < LANES; l++) w->pc[l] = k->first;
    w->sched->rotate_after = -1;
    w->sched->blocked_step = UINT64_MAX;
    memory_warp_start(w);
    order_warp_start(w);
    async_warp_start(w);
    tcgen05_warp_start(w);
    wgmma_warp_start(w);
    if (!g->dependent) order_grids_done(w, w->live);
    return true;
}

static void warp_end(warp *w)
{
    if (w->sched && w->pending_reg && w->poisoned && w->poison && w->regs) {
        wgmma_warp_end(w);
        tcgen05_warp_end(w);
        async_warp_end(w);
        order_warp_end(w);
        memory_warp_end(w);
        free_frames(w);
    }
    free(w->regs);
    free(w->poison);
    free(w->poisoned);
    free(w->pending_reg);
    free(w->sched);
}

// Where dynamic shared memory starts: after the static part, as aligned as its declarations ask.
static size_t dynamic_offset(const kernel *k)
{
    size_t align = 16;
    for (int i = 0; i < k->nvariables; i++)
        if (k->variables[i].external && k->variables[i].align > align) align = k->variables[i].align;
    return (SHARED_RESERVED + k->shared_bytes + align - 1) / align * align;
}

static int entry_registers(const kernel *k, int threads)
{
    int n = 65536 / threads / 8 * 8;
    if (k->maxnreg && (k->maxnreg + 7) / 8 * 8 < n) n = (k->maxnreg + 7) / 8 * 8;
    return n > 256 ? 256 : n; // 255 can be named; they are given in eights
}

cluster *cluster_new(grid *g, int id, const int first_ctaid[3])
{
    const kernel *k = g->kernel;
    scheduled *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    cluster *c = &s->c;
    c->grid = g;
    c->id = id;
    c->ctas = g->cluster_dim[0] * g->cluster_dim[1] * g->cluster_dim[2];
    c->rng =
        g->seed * 0x9e3779b97f4a7c15u + (uint64_t)id * 0xd1342543de82ef95u + (uint64_t)g->index * 0x2545f4914f6cdd1du;
    c->step = 1;
    c->report = report_buffer_new();
    c->cta = calloc((size_t)c->ctas, sizeof *c->cta);
    int threads = g->ntid[0] * g->ntid[1] * g->ntid[2], warps = (threads + LANES - 1) / LANES;
    s->warps = calloc((size_t)(c->ctas * warps), sizeof *s->warps);
    if (!c->report || !c->cta || !s->warps) {
        report_buffer_free(c->report);
        free(c->cta);
        free(s->warps);
        free(s);
        return NULL;
    }
    order_cluster_start(c);
    async_cluster_start(c);
    control_cluster_start(c);
    bool ok = true;
    for (int r = 0; r < c->ctas; r++) {
        cta *a = &c->cta[r];
        const int *d = g->cluster_dim;
        a->cluster = c;
        a->rank = r;
        a->ctaid[0] = first_ctaid[0] + r % d[0];
        a->ctaid[1] = first_ctaid[1] + r / d[0] % d[1];
        a->ctaid[2] = first_ctaid[2] + r / d[0] / d[1];
        a->threads = threads;
        a->dynamic_offset = dynamic_offset(k);
        a->shared_size = a->dynamic_offset + g->dynamic_shared;
        memory_cta_start(a);
        tcgen05_cta_start(a);
        order_cta_start(a);
        mbarrier_cta_start(a);
        control_cta_start(a);
        a->warp = calloc((size_t)warps, sizeof *a->warp);
        ok &= a->warp != NULL;
        for (int i = 0; i < warps && ok; i++) {
            a->warps = i + 1;
            ok = warp_start(&a->warp[i], a, i);
            a->warp[i].reg_limit = entry_registers(k, threads);
            s->warps[s->nwarps++] = &a->warp[i];
        }
    }
    s->live_warps = s->nwarps;
    if (ok) return c;
    cluster_free(c);
    return NULL;
}

void cluster_free(cluster *c)
{
    if (!c) return;
    scheduled *s = scheduled_of(c);
    for (int r = c->ctas - 1; r >= 0; r--) {
        cta *a = &c->cta[r];
        for (int i = a->warps - 1; i >= 0; i--) warp_end(&a->warp[i]);
    }
    for (int r = c->ctas - 1; r >= 0; r--) {
        cta *a = &c->cta[r];
        control_cta_end(a);
        mbarrier_cta_end(a);
        order_cta_end(a);
        tcgen05_cta_end(a);
        memory_cta_end(a);
        free(a->warp);
    }
    control_cluster_end(c);
    async_cluster_end(c);
    order_cluster_end(c);
    report_buffer_free(c->report);
    free(c->cta);
    free(s->warps);
    free(s);
}

// ------------------------------------------------------------------------------------------------- divergence

void wake_warp(warp *w)
{
    w->sched->blocked = 0;
}

bool lanes_exited(warp *w, const inst *in, uint32_t mask)
{
    cta *c = w->cta;
    scheduled *s = scheduled_of(c->cluster);
    if (!order_exit(w, in, mask)) return false;
    w->live &= ~mask;
    c->cluster->step++;
    w->sched->blocked = 0;
    control_lanes_exited(w, mask);
    if (w->live) return true;
    s->live_warps--;
    for (int i = 0; i < c->warps; i++)
        if (c->warp[i].live) return true;
    c->exited = true;
    cta_triggered(c);
    control_cta_exit(c);
    tcgen05_cta_exit(c);
    return true;
}

// Registers of pending asynchronous operations among the operands: each is waited for, or is a finding.
static outcome touch_operand(warp *w, const inst *in, const operand *o, uint32_t mask)
{
    if ((o->kind == OP_REG || o->kind == OP_ADDRESS) && o->reg >= 0 && w->pending_reg[o->reg])
        return registers_touch(w, in, o->reg, mask);
    for (int i = 0; i < o->count; i++) {
        outcome r = touch_operand(w, in, &o->items[i], mask);
        if (r != RAN) return r;
    }
    return RAN;
}

static outcome touch_pending(warp *w, const inst *in, uint32_t mask)
{
    if (in->guard >= 0 && w->pending_reg[in->guard]) {
        outcome r = registers_touch(w, in, in->guard, mask);
        if (r != RAN) return r;
    }
    for (int i = 0; i < in->nops; i++) {
        outcome r = touch_operand(w, in, &in->ops[i], mask);
        if (r != RAN) return r;
    }
    return RAN;
}

static uint32_t guarded(const warp *w, const inst *in, uint32_t group)
{
    const uint64_t *p = w->regs + (size_t)in->guard * LANES;
    uint32_t m = 0;
    for (int l = 0; l < LANES; l++) m |= (uint32_t)p[l] << l;
    return group & (in->guard_negated ? ~m : m);
}

typedef struct {
    int pc;
    uint32_t lanes;
    int stop; // the next pc at which other lanes stand: the groups merge there
} group;

// The group of lanes to run: the lowest pc that can, so that those behind catch up and lanes meet again; after a
// group has used up its turn the next one, so that a lane that spins cannot starve the one it waits for.
static group pick_group(warp *w)
{
    sched_state *s = w->sched;
    uint32_t can = w->live & ~s->blocked;
    int lowest = INT_MAX, next = INT_MAX;
    for (uint32_t m = can; m; m &= m - 1) {
        int pc = w->pc[__builtin_ctz(m)];
        if (pc < lowest) lowest = pc;
        if (pc > s->rotate_after && pc < next) next = pc;
    }
    group g = {.pc = s->rotate_after >= 0 && next != INT_MAX ? next : lowest, .stop = INT_MAX};
    s->rotate_after = -1;
    for (uint32_t m = w->live; m; m &= m - 1) {
        int l = __builtin_ctz(m), pc = w->pc[l];
        if (pc == g.pc)
            g.lanes |= 1u << l;
        else if (pc > g.pc && pc < g.stop)
            g.stop = pc;
    }
    return g;
}

static void set_pc(warp *w, uint32_t lanes, int pc)
{
    if (lanes == ~0u)
        for (int l = 0; l < LANES; l++) w->pc[l] = pc;
    else
        for (; lanes; lanes &= lanes - 1) w->pc[__builtin_ctz(lanes)] = pc;
}

static void block(warp *w, uint32_t lanes)
{
    sched_state *s = w->sched;
    uint64_t step = w->cta->cluster->step;
    s->blocked = (s->blocked_step == step ? s->blocked : 0) | lanes;
    s->blocked_step = step;
}

// Runs one warp for at most quantum instructions. Says how many it ran; *failed: a finding ends the run.
static int run_warp(scheduled *sc, warp *w, int quantum, bool *failed)
{
    sched_state *s = w->sched;
    cluster *c = &sc->c;
    const inst *insts = c->grid->kernel->insts;
    int ran = 0;
    while (ran < quantum) {
        if (c->step != s->blocked_step) s->blocked = 0;
        if (!(w->live & ~s->blocked)) break;
        group g = pick_group(w);
        bool whole = g.lanes == w->live;
        int pc = g.pc;
        for (;;) {
            const inst *in = &insts[pc];
            uint32_t mask = g.lanes;
            if (in->guard >= 0) {
                uint32_t undefined = w->poisoned[in->guard] & mask;
                if (undefined) {
                    finding(c, (place){w, in, __builtin_ctz(undefined)}, "poison",
                            "the predicate that guards this instruction is undefined");
                    goto failed;
                }
                mask = guarded(w, in, mask);
            }
            outcome o = RAN;
            uint32_t left = 0; // lanes that have not run it yet though their predicate says so
            if (mask) {
                w->current = g.lanes;
                if (w->pending_regs && !(in->flags & IN_TOUCHES_PENDING)) o = touch_pending(w, in, mask);
                if (in->flags & (IN_ALIGNED | IN_WARPSYNC) && o == RAN) {
                    bool wrong = false;
                    if (in->flags & IN_ALIGNED && mask != w->live) {
                        left = mask;
                        o = BLOCKED;
                    } else if (in->flags & IN_WARPSYNC) {
                        uint32_t ready = members_ready(w, in, mask, &wrong);
                        if (wrong) goto failed;
                        left = mask & ~ready;
                        mask = ready;
                        if (!ready) o = BLOCKED;
                    }
                }
                if (o == RAN && in->exec == exec_bra) { // the commonest: without a detour over w->pc
                    int to = (int)in->ops[0].imm;
                    w->executed[C_BRANCH] += (uint64_t)__builtin_popcount(mask);
                    ran++;
                    if (mask == g.lanes && whole) {
                        pc = to;
                        if (ran >= quantum) break;
                        continue;
                    }
                    set_pc(w, g.lanes & ~mask, pc + 1);
                    set_pc(w, mask, to);
                    goto regroup;
                }
                if (o == RAN) {
                    o = in->exec(w, in, mask);
                    if (o != BLOCKED)
                        w->executed[in->klass] += (uint64_t)__builtin_popcount(mask);
                    else
                        left |= mask;
                }
            }
            switch (o) {
            case FAILED: goto failed;
            case BLOCKED:
                set_pc(w, g.lanes, pc + 1);
                set_pc(w, left | mask, pc);
                block(w, left | mask);
                if (g.lanes & ~(left | mask)) ran++; // those whose predicate was false have moved
                goto regroup;
            case JUMPED:
                ran++;
                set_pc(w, left, pc);
                set_pc(w, g.lanes & ~(mask | left), pc + 1);
                s->blocked = left & w->live;
                goto regroup;
            case RAN: break;
            }
            if (in->flags & IN_TOUCHES_WGMMA && mask) wgmma_registers_touched(w, in);
            ran++;
            pc++;
            if (left) {
                set_pc(w, g.lanes & ~left, pc);
                set_pc(w, left, pc - 1);
                block(w, left);
                goto regroup;
            }
            if (pc == g.stop || ran >= quantum) break;
        }
        set_pc(w, g.lanes, pc);
        if (!whole) {
            s->blocked = 0; // lanes may wait for these
            if (ran >= quantum) s->rotate_after = pc;
        }
    regroup:
        continue;
    failed:
        set_pc(w, g.lanes, pc);
        *failed = true;
        return ran;
    }
    return ran;
}

// ---------------------------------------------------------------------------------------------------- deadlock

static void print_lanes(FILE *to, uint32_t mask)
{
    const char *comma = "";
    for (int l = 0; l < LANES; l++) {
        if (!(mask >> l & 1)) continue;
        int e = l;
        while (e + 1 < LANES && mask >> (e + 1) & 1) e++;
        fprintf(to, e > l ? "%s%d-%d" : "%s%d", comma, l, e);
        comma = ",";
        l = e;
    }
}

static void print_warp(FILE *to, const warp *w)
{
    const module *m = w->cta->cluster->grid->kernel->module;
    if (!w->live) {
        fprintf(to, "  CTA %d, warp %d: exited\n", w->cta->rank, w->index);
        return;
    }
    uint32_t left = w->live;
    while (left) {
        int pc = w->pc[__builtin_ctz(left)];
        uint32_t here = 0;
        for (uint32_t r = left; r; r &= r - 1)
            if (w->pc[__builtin_ctz(r)] == pc) here |= 1u << __builtin_ctz(r);
        left &= ~here;
        const inst *in = &w->cta->cluster->grid->kernel->insts[pc];
        fprintf(to, "  CTA %d, warp %d, lanes ", w->cta->rank, w->index);
        print_lanes(to, here);
        if (in->source_line && in->source_file < m->nfiles)
            fprintf(to, ": %s:%d", m->files[in->source_file], in->source_line);
        fprintf(to, ": PTX line %d: %s\n", in->line, in->text);
    }
}

// An .aligned instruction that some lanes of a warp have reached while the others stand elsewhere for good.
static const warp *half_aligned(scheduled *s, int *at, uint32_t *here)
{
    for (int i = 0; i < s->nwarps; i++) {
        warp *w = s->warps[i];
        for (uint32_t m = w->live; m; m &= m - 1) {
            int pc = w->pc[__builtin_ctz(m)];
            if (!(s->c.grid->kernel->insts[pc].flags & IN_ALIGNED)) continue;
            *here = 0;
            for (uint32_t r = w->live; r; r &= r - 1)
                if (w->pc[__builtin_ctz(r)] == pc) *here |= 1u << __builtin_ctz(r);
            *at = pc;
            if (*here != w->live) return w;
        }
    }
    return NULL;
}

// Every warp's line and every barrier's state; to be freed.
static char *state_text(scheduled *s)
{
    cluster *c = &s->c;
    char *text = NULL;
    size_t size = 0;
    FILE *to = open_memstream(&text, &size);
    if (!to) return NULL;
    for (int i = 0; i < s->nwarps; i++) print_warp(to, s->warps[i]);
    barriers_print(c, to);
    for (int r = 0; r < c->ctas; r++) mbarriers_print(&c->cta[r], to);
    operations_print(c, to);
    fclose(to);
    return text;
}

static place first_living(const scheduled *s)
{
    for (int i = 0; i < s->nwarps; i++) {
        const warp *w = s->warps[i];
        if (!w->live) continue;
        int lane = __builtin_ctz(w->live);
        return (place){w, &s->c.grid->kernel->insts[w->pc[lane]], lane};
    }
    return (place){NULL, NULL, -1};
}

uint64_t cluster_quiet(const cluster *c)
{
    const scheduled *s = (const scheduled *)c;
    return s->instructions - s->changed_at;
}

void report_livelock(cluster *c, uint64_t instructions)
{
    char *text = state_text(scheduled_of(c));
    finding(c, first_living(scheduled_of(c)), "livelock", "no end after %llu warp-instructions\n%s",
            (unsigned long long)instructions, text ? text : "");
    free(text);
}

static void report_deadlock(scheduled *s)
{
    cluster *c = &s->c;
    const inst *insts = c->grid->kernel->insts;
    char *text = state_text(s);
    int at = 0;
    uint32_t here;
    const warp *half = half_aligned(s, &at, &here);
    if (half && half->live & ~here) {
        int other = __builtin_ctz(half->live & ~here);
        finding_pair(c, (place){half, &insts[at], __builtin_ctz(here)}, (place){half, &insts[half->pc[other]], other},
                     "divergence", "%s is .aligned, but only part of the warp runs it, and the rest never comes\n%s",
                     insts[at].text, text ? text : "");
    } else {
        finding(c, first_living(s), "deadlock", "no warp can run and no operation is pending\n%s", text ? text : "");
    }
    free(text);
}

// --------------------------------------------------------------------------------------------------- schedules

// Random: now and then a warp or a whole CTA falls behind, for long enough that what it forgot to wait for has
// happened, or that what others forgot to wait for it has not.
static void maybe_freeze(scheduled *s)
{
    cluster *c = &s->c;
    uint64_t r = next_random(c);
    if (s->turn < s->last_freeze + 64 || r % 32) return;
    s->last_freeze = s->turn;
    uint64_t until = s->turn + (16ull << (r >> 8) % 8);
    const warp *w = s->warps[(r >> 16) % (uint64_t)s->nwarps];
    if ((r >> 40) % 2)
        w->sched->frozen_until = until;
    else
        for (int i = 0; i < w->cta->warps; i++) w->cta->warp[i].sched->frozen_until = until;
}

static bool can_run(const scheduled *s, const warp *w)
{
    return w->live && (w->sched->blocked_step != s->c.step || w->live & ~w->sched->blocked);
}

// The warp whose turn it is, or NULL when every one waits.
static warp *pick_warp(scheduled *s, bool random)
{
    int n = s->nwarps, start = s->next_warp;
    if (random) {
        maybe_freeze(s);
        start = (int)(next_random(&s->c) % (uint64_t)n);
    }
    warp *frozen = NULL;
    for (int i = 0; i < n; i++) {
        int at = start + i < n ? start + i : start + i - n;
        warp *w = s->warps[at];
        if (!can_run(s, w)) continue;
        if (random && w->sched->frozen_until > s->turn) {
            if (!frozen) frozen = w;
            continue;
        }
        s->next_warp = at + 1 < n ? at + 1 : 0;
        return w;
    }
    return frozen;
}

slice cluster_run(cluster *c, uint64_t budget)
{
    scheduled *s = scheduled_of(c);
    bool random = c->grid->schedule == SCHEDULE_RANDOM;
    uint64_t end = s->instructions + budget;
    bool tried_all = false; // every blocked warp has been tried since anything changed
    while (s->live_warps && !s->failed) {
        if (s->instructions >= end) return SLICE_PAUSED;
        if (c->step != s->quiet_step) {
            s->quiet_step = c->step;
            s->changed_at = s->paused_at = s->instructions;
        } else if (s->instructions - s->paused_at > 20000) { // it may wait for another cluster
            s->paused_at = s->instructions;
            return SLICE_PAUSED;
        }
        if (s->pause_on_trigger && cluster_triggered(c)) {
            s->pause_on_trigger = false;
            return SLICE_PAUSED;
        }
        s->turn++;
        bool overdue = s->instructions - s->last_operation > 50000; // someone may be polling for its effect
        if ((random || overdue) && operations_step(c, overdue)) tried_all = false;
        if (overdue) s->last_operation = s->instructions;
        if (report_is_fatal(c->report)) break;
        warp *w = pick_warp(s, random);
        if (!w) {
            if (operations_step(c, true)) {
                tried_all = false;
                continue;
            }
            if (!tried_all) { // a change that moved no step counter must not look like a deadlock
                tried_all = true;
                for (int i = 0; i < s->nwarps; i++) wake_warp(s->warps[i]);
                continue;
            }
            for (int i = 0; i < s->nwarps; i++)
                if (waits_for_grid(s->warps[i])) {
                    tried_all = false;
                    for (int j = 0; j < s->nwarps; j++) wake_warp(s->warps[j]);
                    return SLICE_WAITS;
                }
            report_deadlock(s);
            s->failed = true;
            break;
        }
        int quantum = random ? 1 << next_random(c) % 8 : 256;
        int ran = run_warp(s, w, quantum, &s->failed);
        s->instructions += (uint64_t)ran;
        if (ran) tried_all = false;
    }
    if (s->failed || report_is_fatal(c->report)) return SLICE_FAILED;
    // What the program left pending happens all the same, and may be wrong.
    while (operations_step(c, true))
        if (report_is_fatal(c->report)) return SLICE_FAILED;
    return SLICE_DONE;
}
