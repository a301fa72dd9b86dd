// Pending operations and when they happen; cp.async; groups (PTX ISA, "Asynchronous operations", "cp.async",
// "cp.async.bulk.commit_group"); registers that a pending operation still writes or reads.
#include <stdlib.h>
#include <string.h>

#include "order.h"

// ------------------------------------------------------------------------------------------------------ the queue

struct async_queue {
    operation **pending; // by age
    int count, room;
    uint64_t serial;
    bool running; // early: an operation that became possible is run by the loop that is already there
};

void async_cluster_start(cluster *c)
{
    c->queue = calloc(1, sizeof *c->queue);
    if (!c->queue) abort();
}

void async_cluster_end(cluster *c)
{
    struct async_queue *q = c->queue;
    if (!q) return;
    for (int i = 0; i < q->count; i++) operation_release(q->pending[i]);
    free(q->pending);
    free(q);
    c->queue = NULL;
}

operation *operation_new(warp *w, const inst *in, int lane, agent *a, void *payload)
{
    operation *op = calloc(1, sizeof *op);
    if (!op) abort();
    op->agent = a;
    op->payload = payload;
    op->w = w;
    op->in = in;
    op->lane = lane;
    op->references = 1;
    op->serial = ++w->cta->cluster->queue->serial;
    return op;
}

static void forget_predecessors(operation *op)
{
    for (int i = 0; i < op->nafter; i++) operation_release(op->after[i]);
    free(op->after);
    op->after = NULL;
    op->nafter = 0;
}

void operation_release(operation *op)
{
    if (!op || --op->references) return;
    forget_predecessors(op);
    if (op->destroy) op->destroy(op);
    agent_release(op->agent);
    free(op);
}

void operation_after(operation *op, operation *earlier)
{
    if (!earlier || earlier->done) return;
    operation **after = realloc(op->after, (size_t)(op->nafter + 1) * sizeof *after);
    if (!after) abort();
    op->after = after;
    op->after[op->nafter++] = earlier;
    earlier->references++;
}

static bool can_run(const operation *op)
{
    for (int i = 0; i < op->nafter; i++)
        if (!op->after[i]->done) return false;
    return true;
}

static void run_at(cluster *c, int index)
{
    struct async_queue *q = c->queue;
    operation *op = q->pending[index];
    memmove(&q->pending[index], &q->pending[index + 1], (size_t)(--q->count - index) * sizeof *q->pending);
    op->run(c, op);
    op->done = true;
    forget_predecessors(op);
    c->step++;
    operation_release(op);
}

static int oldest_that_can_run(const struct async_queue *q)
{
    for (int i = 0; i < q->count; i++)
        if (can_run(q->pending[i])) return i;
    return -1;
}

static int some_that_can_run(cluster *c)
{
    const struct async_queue *q = c->queue;
    if (!q->count) return -1;
    int start = (int)(next_random(c) % (uint64_t)q->count);
    for (int i = 0; i < q->count; i++)
        if (can_run(q->pending[(start + i) % q->count])) return (start + i) % q->count;
    return -1;
}

// Pipelined tcgen05 operations of different threads happen in the order of their issue, where the later one's thread
// knows of the earlier one.
static void after_other_threads(const struct async_queue *q, operation *op)
{
    for (int i = 0; i < q->count; i++) {
        const agent *earlier = q->pending[i]->agent;
        if (earlier && earlier->tensor && earlier->component != op->agent->component &&
            agent_knows_issue(op->agent, earlier->component, earlier->number))
            operation_after(op, q->pending[i]);
    }
}

void operation_submit(cluster *c, operation *op)
{
    struct async_queue *q = c->queue;
    if (op->agent && op->agent->tensor) after_other_threads(q, op);
    if (q->count == q->room) {
        int room = q->room ? q->room * 2 : 64;
        operation **pending = realloc(q->pending, (size_t)room * sizeof *pending);
        if (!pending) abort();
        q->pending = pending;
        q->room = room;
    }
    op->references++;
    q->pending[q->count++] = op;
    if (c->grid->schedule != SCHEDULE_EARLY || q->running) return;
    q->running = true;
    for (int i; (i = oldest_that_can_run(q)) >= 0;) run_at(c, i);
    q->running = false;
}

void operation_force(cluster *c, operation *op)
{
    if (op->done) return;
    for (int i = 0; i < op->nafter; i++) operation_force(c, op->after[i]);
    struct async_queue *q = c->queue;
    for (int i = 0; i < q->count; i++)
        if (q->pending[i] == op) {
            run_at(c, i);
            return;
        }
}

// What may still access tensor memory of the CTA happens now. A pair's operations count as both CTAs'.
void operations_force_tensor(const cta *c)
{
    struct async_queue *q = c->cluster->queue;
    for (int i = 0; i < q->count;) {
        operation *op = q->pending[i];
        bool tensor = op->agent && op->agent->p == PROXY_TENSOR_CORE_05;
        if (tensor && (op->w->cta->rank ^ c->rank) < 2) {
            operation_force(c->cluster, op);
            i = 0;
        } else {
            i++;
        }
    }
}

bool operations_step(cluster *c, bool idle)
{
    bool random = c->grid->schedule == SCHEDULE_RANDOM;
    if (!idle && !(random && c->queue->count && next_random(c) % 4 == 0)) return false;
    int i = random ? some_that_can_run(c) : oldest_that_can_run(c->queue);
    if (i >= 0) run_at(c, i);
    return i >= 0;
}

void operations_print(cluster *c, FILE *to)
{
    for (int i = 0; i < c->queue->count; i++) {
        const operation *op = c->queue->pending[i];
        fprintf(to, "  pending: %s (PTX %d) of CTA %d, warp %d\n", op->in->text, op->in->line, op->w->cta->rank,
                op->w->index);
    }
}

// ----------------------------------------------------------------------------------------------------------- groups

// An operation of a lane, in the group that was open when it was issued. A bulk store has two: first is the reading of
// the source.
typedef struct {
    uint64_t group;
    operation *first, *second;
    uint32_t number[2];
} member;

typedef struct {
    member *of;
    int count, room;
    uint64_t committed;
} groups;

// One register of a pending operation.
typedef struct {
    int next; // of the same register, or in the free list
    bool wgmma;
    operation *op;
} pending_register;

// A tcgen05.ld whose registers have not all been used (model="practice").
typedef struct {
    operation *op;
    uint32_t number;
    int unused;
} unused_load;

struct warp_async {
    groups bulk[LANES], copies[LANES];
    int *head; // by register: 1 + the index of its oldest pending_register
    pending_register *pending;
    int room, free;
    unused_load *loads;
    int load_count, load_room;
};

static struct warp_async *async_of(const warp *w)
{
    return w->async_state;
}

void async_warp_start(warp *w)
{
    struct warp_async *a = calloc(1, sizeof *a);
    if (!a) abort();
    w->async_state = a;
    a->head = calloc((size_t)w->cta->cluster->grid->kernel->regs + 1, sizeof *a->head);
    if (!a->head) abort();
}

static void groups_end(groups *g)
{
    for (int i = 0; i < g->count; i++) {
        operation_release(g->of[i].first);
        operation_release(g->of[i].second);
    }
    free(g->of);
}

void async_warp_end(warp *w)
{
    struct warp_async *a = async_of(w);
    if (!a) return;
    for (int i = 0; i < LANES; i++) {
        groups_end(&a->bulk[i]);
        groups_end(&a->copies[i]);
    }
    for (int r = 0; r < w->cta->cluster->grid->kernel->regs; r++)
        for (int i = a->head[r]; i; i = a->pending[i - 1].next) operation_release(a->pending[i - 1].op);
    for (int i = 0; i < a->load_count; i++) operation_release(a->loads[i].op);
    free(a->loads);
    free(a->pending);
    free(a->head);
    free(a);
    w->async_state = NULL;
}

static void groups_join(groups *g, operation *first, operation *second, uint32_t number0, uint32_t number1)
{
    if (g->count == g->room) {
        g->room = g->room ? g->room * 2 : 8;
        g->of = realloc(g->of, (size_t)g->room * sizeof *g->of);
        if (!g->of) abort();
    }
    first->references++;
    if (second) second->references++;
    g->of[g->count++] = (member){g->committed, first, second, {number0, number1}};
}

void bulk_group_join(warp *w, int lane, operation *read, operation *write)
{
    groups_join(&async_of(w)->bulk[lane], read, write, agent_number(read->agent), agent_number(write->agent));
}

// Are the operations of all groups before `limit` done? Then what they were is forgotten, and the numbers say up to
// where the thread knows.
static bool groups_done(groups *g, uint64_t limit, bool second_too, bool keep, uint32_t number[2])
{
    int n = 0;
    while (n < g->count && g->of[n].group < limit) {
        const member *m = &g->of[n++];
        if (m->first && (!m->first->done || (second_too && m->second && !m->second->done))) return false;
    }
    if (!n) return true;
    number[0] = g->of[n - 1].number[0];
    number[1] = g->of[n - 1].number[1];
    for (int i = 0; i < n; i++) {
        member *m = &g->of[i];
        if (!m->first || (!second_too && m->second && !m->second->done)) continue;
        operation_release(m->first);
        operation_release(m->second);
        m->first = m->second = NULL;
    }
    if (keep) return true; // the writes may still be waited for, by their numbers
    g->count -= n;
    memmove(g->of, g->of + n, (size_t)g->count * sizeof *g->of);
    return true;
}

static outcome exec_bulk_commit(warp *w, const inst *in, uint32_t mask)
{
    (void)in;
    for (uint32_t lanes = mask; lanes; lanes &= lanes - 1) async_of(w)->bulk[__builtin_ctz(lanes)].committed++;
    return RAN;
}

static outcome exec_bulk_wait(warp *w, const inst *in, uint32_t mask)
{
    bool read = in->p[0];
    uint64_t left = (uint64_t)in->ops[0].imm;
    for (uint32_t lanes = mask; lanes; lanes &= lanes - 1) {
        int lane = __builtin_ctz(lanes);
        groups *g = &async_of(w)->bulk[lane];
        uint32_t number[2] = {0, 0};
        if (!groups_done(g, g->committed > left ? g->committed - left : 0, !read, read, number)) return BLOCKED;
        order_stream_done(w, lane, STREAM_BULK_READ, number[0]);
        if (!read) order_stream_done(w, lane, STREAM_BULK_WRITE, number[1]);
    }
    return RAN;
}

// --------------------------------------------------------------------------------------------------------- cp.async

// The copies of one instruction: one for each lane, done together.
typedef struct {
    int bytes;
    uint32_t mask;
    struct {
        agent *agent;
        uint64_t source;
        uint32_t offset;
        int source_bytes; // the rest is zero
    } lane[LANES];
} copies;

static bool run_copies(cluster *c, operation *op)
{
    (void)c;
    copies *p = op->payload;
    bool fine = true;
    for (uint32_t lanes = p->mask; lanes && fine; lanes &= lanes - 1) {
        int i = __builtin_ctz(lanes);
        unsigned char data[16] = {0};
        uint8_t poison[16] = {0};
        fine = agent_read_global(p->lane[i].agent, p->lane[i].source, (size_t)p->lane[i].source_bytes, data, poison) &&
               agent_write_shared(p->lane[i].agent, op->w->cta, p->lane[i].offset, (size_t)p->bytes, data, poison);
    }
    return fine;
}

static void copies_destroy(operation *op)
{
    copies *p = op->payload;
    for (uint32_t lanes = p->mask; lanes; lanes &= lanes - 1) agent_release(p->lane[__builtin_ctz(lanes)].agent);
    free(p);
}

enum { CP_SOURCE_SIZE = 1, CP_IGNORE = 2 };

static bool copy_of_lane(warp *w, const inst *in, int lane, copies *p)
{
    cluster *c = w->cta->cluster;
    place at = {w, in, lane};
    uint64_t to, from;
    if (!read_address(w, in, &in->ops[0], lane, &to) || !read_address(w, in, &in->ops[1], lane, &from)) return false;
    location l;
    if (!locate(w, in, lane, SPACE_SHARED, to, p->bytes, &l)) return false;
    int source_bytes = p->bytes;
    if (in->p[1]) {
        uint8_t poison = 0;
        uint64_t value = read_operand(w, &in->ops[3], lane, in->p[1] == CP_IGNORE ? T_PRED : T_U32, &poison);
        if (poison) {
            finding(c, at, "poison", "the size of a cp.async is a value that nobody wrote");
            return false;
        }
        if (in->p[1] == CP_SOURCE_SIZE && value > (uint64_t)p->bytes) {
            finding(c, at, "out-of-bounds", "cp.async of %llu source bytes to %d", (unsigned long long)value, p->bytes);
            return false;
        }
        source_bytes = in->p[1] == CP_IGNORE ? (value ? 0 : p->bytes) : (int)value;
    }
    if (from % (uint64_t)p->bytes) {
        finding(c, at, "misaligned", "cp.async of %d bytes from 0x%llx", p->bytes, (unsigned long long)from);
        return false;
    }
    p->lane[lane].agent = agent_issue(w, in, lane, STREAM_CP_ASYNC, PROXY_GENERIC);
    p->mask |= 1u << lane;
    p->lane[lane].source = from;
    p->lane[lane].offset = l.offset;
    p->lane[lane].source_bytes = source_bytes;
    return true;
}

static outcome exec_cp_async(warp *w, const inst *in, uint32_t mask)
{
    copies *p = malloc(sizeof *p);
    if (!p) abort();
    p->bytes = in->p[0];
    p->mask = 0;
    operation *op = operation_new(w, in, __builtin_ctz(mask), NULL, p);
    op->run = run_copies;
    op->destroy = copies_destroy;
    bool fine = true;
    for (uint32_t lanes = mask; lanes && fine; lanes &= lanes - 1) fine = copy_of_lane(w, in, __builtin_ctz(lanes), p);
    if (fine) {
        for (uint32_t lanes = mask; lanes; lanes &= lanes - 1) {
            int lane = __builtin_ctz(lanes);
            groups_join(&async_of(w)->copies[lane], op, NULL, agent_number(p->lane[lane].agent), 0);
        }
        operation_submit(w->cta->cluster, op);
    }
    operation_release(op);
    return fine ? RAN : FAILED;
}

static outcome exec_copies_commit(warp *w, const inst *in, uint32_t mask)
{
    (void)in;
    for (uint32_t lanes = mask; lanes; lanes &= lanes - 1) async_of(w)->copies[__builtin_ctz(lanes)].committed++;
    return RAN;
}

// wait_group N, and wait_all: also those that no group has.
static outcome exec_copies_wait(warp *w, const inst *in, uint32_t mask)
{
    bool all = in->p[0];
    uint64_t left = all ? 0 : (uint64_t)in->ops[0].imm;
    for (uint32_t lanes = mask; lanes; lanes &= lanes - 1) {
        int lane = __builtin_ctz(lanes);
        groups *g = &async_of(w)->copies[lane];
        uint64_t limit = all ? g->committed + 1 : g->committed > left ? g->committed - left : 0;
        uint32_t number[2] = {0, 0};
        if (!groups_done(g, limit, true, false, number)) return BLOCKED;
        order_stream_done(w, lane, STREAM_CP_ASYNC, number[0]);
    }
    return RAN;
}

typedef struct {
    cta *owner;
    uint32_t offset;
} arrival;

static bool run_arrival(cluster *c, operation *op)
{
    const arrival *a = op->payload;
    return mbarrier_arrive_async(c, a->owner, a->offset, op->agent);
}

static void payload_destroy(operation *op)
{
    free(op->payload);
}

// The mbarrier gets an arrival when all earlier cp.async of the thread are complete.
static outcome exec_copies_arrive(warp *w, const inst *in, uint32_t mask)
{
    for (uint32_t lanes = mask; lanes; lanes &= lanes - 1) {
        int lane = __builtin_ctz(lanes);
        uint64_t address;
        location l;
        if (!read_address(w, in, &in->ops[0], lane, &address)) return FAILED;
        if (!locate(w, in, lane, (space)in->p[0], address, 8, &l)) return FAILED;
        place at = {w, in, lane};
        if (l.kind != LOCATION_SHARED || l.owner != w->cta) {
            finding(w->cta->cluster, at, "mbarrier", "cp.async.mbarrier.arrive is for an mbarrier of the own CTA");
            return FAILED;
        }
        if (!in->p[1] && !mbarrier_increment(l.owner, l.offset, at)) return FAILED;
        arrival *a = malloc(sizeof *a);
        if (!a) abort();
        *a = (arrival){l.owner, l.offset};
        operation *op = operation_new(w, in, lane, agent_issue(w, in, lane, STREAM_CP_ASYNC, PROXY_GENERIC), a);
        op->run = run_arrival;
        op->destroy = payload_destroy;
        const groups *g = &async_of(w)->copies[lane];
        for (int i = 0; i < g->count; i++) operation_after(op, g->of[i].first);
        operation_submit(w->cta->cluster, op);
        operation_release(op);
    }
    return RAN;
}

// -------------------------------------------------------------------------------------------------------- registers

void registers_pending(warp *w, const int *regs, int count, operation *op, bool wgmma)
{
    struct warp_async *a = async_of(w);
    cluster *c = w->cta->cluster;
    if (!wgmma && c->grid->practice) {
        if (a->load_count && a->loads[a->load_count - 1].op == op) {
            a->loads[a->load_count - 1].unused += count;
        } else {
            if (a->load_count == a->load_room) {
                a->load_room = a->load_room ? a->load_room * 2 : 8;
                a->loads = realloc(a->loads, (size_t)a->load_room * sizeof *a->loads);
                if (!a->loads) abort();
            }
            op->references++;
            a->loads[a->load_count++] = (unused_load){op, agent_number(op->agent), count};
        }
    }
    for (int i = 0; i < count; i++) {
        // Two loads to one register write it in the order of the program; one load may name a register twice.
        while (!wgmma && w->pending_reg[regs[i]] && a->pending[a->head[regs[i]] - 1].op != op)
            registers_touch(w, op->in, regs[i], ~0u);
        if (!a->free) {
            int room = a->room ? a->room * 2 : 64;
            a->pending = realloc(a->pending, (size_t)room * sizeof *a->pending);
            if (!a->pending) abort();
            for (int j = a->room; j < room; j++) a->pending[j].next = j + 1 < room ? j + 2 : 0;
            a->free = a->room + 1;
            a->room = room;
        }
        int index = a->free;
        pending_register *p = &a->pending[index - 1];
        a->free = p->next;
        *p = (pending_register){0, wgmma, op};
        op->references++;
        int *at = &a->head[regs[i]];
        while (*at) at = &a->pending[*at - 1].next;
        *at = index;
        w->pending_reg[regs[i]]++;
        w->pending_regs++;
    }
}

static void register_ready(warp *w, int reg)
{
    struct warp_async *a = async_of(w);
    int index = a->head[reg];
    if (!index) return;
    pending_register *p = &a->pending[index - 1];
    a->head[reg] = p->next;
    operation *op = p->op;
    p->next = a->free;
    a->free = index;
    w->pending_reg[reg]--;
    w->pending_regs--;
    operation_release(op);
}

void registers_ready(warp *w, const int *regs, int count)
{
    struct warp_async *a = async_of(w);
    for (int i = 0; i < count; i++) {
        int head = a->head[regs[i]];
        // Under practice a loaded register stays marked until it is used.
        if (head && !a->pending[head - 1].wgmma && w->cta->cluster->grid->practice) continue;
        register_ready(w, regs[i]);
    }
}

// P2: when every register of a load has been used, the load is known complete, and so are those before it when theirs
// have been.
static void load_used(warp *w, operation *op, const inst *by)
{
    struct warp_async *a = async_of(w);
    cluster *c = w->cta->cluster;
    for (int i = 0; i < a->load_count; i++)
        if (a->loads[i].op == op) a->loads[i].unused--;
    int n = 0;
    while (n < a->load_count && a->loads[n].unused <= 0) {
        const unused_load *l = &a->loads[n++];
        int lane = __builtin_ctz(w->live | 1u << 31);
        if (order_of(w)->lane[lane].done[STREAM_TCGEN05_LD] < l->number) {
            practice_allows(c, P2, (place){w, by, lane}, agent_place(l->op->agent),
                            "every register of the load is used, which stands in for tcgen05.wait::ld");
            order_stream_done(w, lane, STREAM_TCGEN05_LD, l->number);
        }
        operation_release(l->op);
    }
    a->load_count -= n;
    memmove(a->loads, a->loads + n, (size_t)a->load_count * sizeof *a->loads);
}

static bool names(const operand *o, int reg)
{
    if (o->kind == OP_REG && o->reg == reg) return true;
    for (int i = 0; i < o->count; i++)
        if (names(&o->items[i], reg)) return true;
    return false;
}

static bool writes(const inst *in, int reg)
{
    if (!in->nops || in->klass == C_STORE || in->klass == C_BRANCH || in->klass == C_BARRIER) return false;
    return in->ops[0].kind != OP_BRACKET && names(&in->ops[0], reg);
}

outcome registers_touch(warp *w, const inst *in, int reg, uint32_t mask)
{
    struct warp_async *a = async_of(w);
    int index = a->head[reg];
    if (!index) return RAN;
    operation *op = a->pending[index - 1].op;
    if (!a->pending[index - 1].wgmma) {
        op->references++;
        operation_force(w->cta->cluster, op);
        // Without practice the load's end has cleared the mark.
        if (w->cta->cluster->grid->practice) {
            register_ready(w, reg);
            load_used(w, op, in);
        }
        operation_release(op);
        return RAN;
    }
    // The registers of A are only read: who reads them too does no harm.
    for (int i = index; i; i = a->pending[i - 1].next) {
        const operation *user = a->pending[i - 1].op;
        bool accumulator = user->in->nops && names(&user->in->ops[0], reg);
        if (!accumulator && !writes(in, reg)) continue;
        finding_pair(w->cta->cluster, (place){w, in, __builtin_ctz(mask)}, agent_place(user->agent), "wgmma",
                     "%s a register that a wgmma still %s: wgmma.wait_group comes first",
                     writes(in, reg) ? "writes" : "reads", accumulator ? "accumulates in" : "reads");
        return FAILED;
    }
    return RAN;
}

// ----------------------------------------------------------------------------------------------------------- decode

static const char *no_modifiers(inst *in, outcome (*exec)(warp *, const inst *, uint32_t), inst_class klass)
{
    in->exec = exec;
    in->klass = (uint8_t)klass;
    return in->mods ? in->mod[0] : NULL;
}

static const char *decode_copies_commit(inst *in, const kernel *k)
{
    (void)k;
    const char *wrong = no_modifiers(in, exec_copies_commit, C_ASYNC_COPY);
    return wrong ? wrong : in->nops ? "operands: none" : NULL;
}

static bool is_count(const inst *in)
{
    return in->nops == 1 && in->ops[0].kind == OP_IMM && in->ops[0].imm >= 0;
}

static const char *decode_copies_wait(inst *in, const kernel *k)
{
    (void)k;
    const char *wrong = no_modifiers(in, exec_copies_wait, C_ASYNC_COPY);
    return wrong ? wrong : is_count(in) ? NULL : "operands: a constant number of groups";
}

static const char *decode_copies_wait_all(inst *in, const kernel *k)
{
    (void)k;
    in->p[0] = 1;
    const char *wrong = no_modifiers(in, exec_copies_wait, C_ASYNC_COPY);
    return wrong ? wrong : in->nops ? "operands: none" : NULL;
}

static const char *decode_bulk_commit(inst *in, const kernel *k)
{
    (void)k;
    const char *wrong = no_modifiers(in, exec_bulk_commit, C_TMA);
    return wrong ? wrong : in->nops ? "operands: none" : NULL;
}

static const char *decode_bulk_wait(inst *in, const kernel *k)
{
    (void)k;
    static const char *const allowed[] = {"read", NULL};
    const char *wrong = mods_only(in, allowed);
    if (wrong) return wrong;
    in->exec = exec_bulk_wait;
    in->klass = C_TMA;
    in->p[0] = mod_index(in, "read") >= 0;
    return is_count(in) ? NULL : "operands: a constant number of groups";
}

static bool is_address(const operand *o)
{
    return o->kind == OP_BRACKET && o->count == 1;
}

static const char *decode_copies_arrive(inst *in, const kernel *k)
{
    (void)k;
    static const char *const allowed[] = {"noinc", "shared", "shared::cta", "b64", NULL};
    const char *wrong = mods_only(in, allowed);
    if (wrong) return wrong;
    if (mod_index(in, "b64") < 0) return ".b64 is required";
    in->exec = exec_copies_arrive;
    in->klass = C_ASYNC_COPY;
    in->p[0] = mod_index(in, "shared") >= 0 || mod_index(in, "shared::cta") >= 0 ? SPACE_SHARED : SPACE_GENERIC;
    in->p[1] = mod_index(in, "noinc") >= 0;
    return in->nops == 1 && is_address(&in->ops[0]) ? NULL : "operands: [mbarrier]";
}

// cp.async.{ca|cg}.shared{::cta}.global{.L2::cache_hint}{.L2::64B ...} [to], [from], size{, source size | ignore}{,
// policy}
static const char *decode_cp_async(inst *in, const kernel *k)
{
    static const char *const allowed[] = {"ca",      "cg",       "shared",   "shared::cta", "global", "L2::cache_hint",
                                          "L2::64B", "L2::128B", "L2::256B", NULL};
    const char *wrong = mods_only(in, allowed);
    if (wrong) return wrong;
    bool ca = in->mods && !strcmp(in->mod[0], "ca"), cg = in->mods && !strcmp(in->mod[0], "cg");
    if (!ca && !cg) return ".ca or .cg is required";
    if (in->mods < 3 || strncmp(in->mod[1], "shared", 6) || strcmp(in->mod[2], "global"))
        return ".shared.global is required";
    bool policy = mod_index(in, "L2::cache_hint") >= 0;
    int given = in->nops - policy;
    if (given < 3 || given > 4 || !is_address(&in->ops[0]) || !is_address(&in->ops[1]) || in->ops[2].kind != OP_IMM)
        return "operands: [to], [from], size{, source size or predicate}{, policy}";
    int64_t bytes = in->ops[2].imm;
    if (bytes != 16 && (cg || (bytes != 4 && bytes != 8))) return "a size of 4, 8 or 16 with .ca, 16 with .cg";
    in->p[0] = (int32_t)bytes;
    if (given == 4) {
        const operand *o = &in->ops[3];
        bool predicate = o->kind == OP_REG && k->reg_type[o->reg] == T_PRED;
        in->p[1] = predicate ? CP_IGNORE : CP_SOURCE_SIZE;
    }
    in->exec = exec_cp_async;
    in->klass = C_ASYNC_COPY;
    return NULL;
}

const inst_row async_rows[] = {{"cp.async", decode_cp_async},
                               {"cp.async.commit_group", decode_copies_commit},
                               {"cp.async.wait_group", decode_copies_wait},
                               {"cp.async.wait_all", decode_copies_wait_all},
                               {"cp.async.mbarrier.arrive", decode_copies_arrive},
                               {"cp.async.bulk.commit_group", decode_bulk_commit},
                               {"cp.async.bulk.wait_group", decode_bulk_wait},
                               {NULL, NULL}};
