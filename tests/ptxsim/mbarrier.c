// mbarrier objects (PTX ISA, "mbarrier"): phases, pending and expected arrivals, tx-count; and their instructions.
#include <stdlib.h>
#include <string.h>

#include "order.h"

enum { COUNT_MAX = (1 << 20) - 1, BUCKETS = 64 };

// What a thread of the cluster has had to do with a barrier.
typedef struct {
    int32_t seen;    // the last phase that it saw complete, by a look or an arrival; -1: none
    uint32_t number; // its own when it last touched the barrier; 0: never
    bool knows_init;
} contact;

struct mbarrier {
    struct mbarrier *next;
    cta *owner;
    uint32_t offset;
    bool live;
    uint32_t component, clock; // clock: of phase 0; phase p completes as number clock + p + 1
    uint32_t generic;          // component of what st.async and red.async did, which needs a proxy fence; 0: none yet
    int32_t phase;             // the current one, counted from init
    int32_t expected, pending, tx;
    signal *current;   // of all arrivals so far
    signal *completed; // of those up to the last completed phase
    init_event init;
    contact *contact;      // by thread of the cluster
    uint32_t async_number; // of the last phase that an operation had a part in
    entry *remote;         // signals from other CTAs, the last of each component
    int remotes;
};
typedef struct mbarrier mbarrier;

void mbarrier_cta_start(cta *c)
{
    c->mbarriers = calloc(1, sizeof *c->mbarriers);
    if (!c->mbarriers) abort();
}

void mbarrier_cta_end(cta *c)
{
    if (!c->mbarriers) return;
    while (c->mbarriers->first) {
        mbarrier *m = c->mbarriers->first;
        c->mbarriers->first = m->next;
        signal_free(m->current);
        signal_free(m->completed);
        free(m->contact);
        free(m->remote);
        free(m);
    }
    free(c->mbarriers);
    c->mbarriers = NULL;
}

bool mbarrier_covers(const cta *c, uint32_t offset, size_t size)
{
    return mbarrier_in(c, offset, size);
}

// The object at the offset, alive or not.
static mbarrier *object_at(const cta *c, uint32_t offset)
{
    mbarrier *m = c->mbarriers->recent;
    if (m && m->offset == offset) return m;
    for (m = c->mbarriers->first; m && m->offset != offset; m = m->next) continue;
    if (m) c->mbarriers->recent = m;
    return m;
}

static mbarrier *live_at(const cta *c, uint32_t offset)
{
    if (offset % 8 || offset + 8 > c->shared_size) return NULL;
    mbarrier *m = object_at(c, offset);
    return m && m->live ? m : NULL;
}

bool mbarrier_clock(cta *owner, uint32_t offset, bool generic, uint32_t *component, uint32_t *number)
{
    mbarrier *m = live_at(owner, offset);
    if (!m) return false;
    if (generic && !m->generic) m->generic = component_new(owner->cluster, STREAM_CP_ASYNC, UINT32_MAX, false, false);
    *component = generic ? m->generic : m->component;
    *number = m->clock + (uint32_t)m->phase + 1;
    return true;
}

// ---------------------------------------------------------------------------------------------------------- phases

static void complete_if_due(mbarrier *m)
{
    if (m->pending || m->tx) return;
    m->phase++;
    m->pending = m->expected;
    signal_raise(m->current, m->owner, m->component, m->clock + (uint32_t)m->phase);
    if (m->generic) signal_raise(m->current, m->owner, m->generic, m->clock + (uint32_t)m->phase);
    signal_free(m->completed);
    m->completed = signal_copy(m->current);
    m->owner->cluster->step++;
}

static bool add_tx(mbarrier *m, int64_t bytes, place at)
{
    int64_t tx = m->tx + bytes;
    if (tx < -COUNT_MAX || tx > COUNT_MAX) {
        finding(m->owner->cluster, at, "mbarrier",
                "the tx-count of the mbarrier at 0x%x of CTA %d would be %lld: it goes "
                "from -1048575 to 1048575",
                m->offset, m->owner->rank, (long long)tx);
        return false;
    }
    m->tx = (int32_t)tx;
    return true;
}

static bool take_arrivals(mbarrier *m, uint32_t count, place at)
{
    if (count > (uint32_t)m->pending) {
        finding(m->owner->cluster, at, "mbarrier",
                "%u arrivals at the mbarrier at 0x%x of CTA %d, of which phase %d "
                "expects %d more%s",
                count, m->offset, m->owner->rank, m->phase, m->pending, m->tx ? " (bytes are still to come)" : "");
        return false;
    }
    m->pending -= (int32_t)count;
    return true;
}

static void remember_remote(mbarrier *m, const entry *e)
{
    for (int i = 0; i < m->remotes; i++) {
        entry *r = &m->remote[i];
        if (r->component != e->component || r->lanes != e->lanes) continue;
        *r = *e;
        return;
    }
    entry *more = realloc(m->remote, (size_t)(m->remotes + 1) * sizeof *more);
    if (!more) abort();
    m->remote = more;
    m->remote[m->remotes++] = *e;
}

void mbarriers_exit(cta *c, const clock_vector *known, place at)
{
    for (const mbarrier *m = c->mbarriers->first; m; m = m->next)
        for (int i = 0; i < m->remotes; i++) {
            const entry *e = &m->remote[i];
            bool operation = e->flags & ENTRY_OPERATION;
            uint32_t component = e->component + (operation ? 0 : (uint32_t)__builtin_ctz(e->lanes));
            if (vector_has(known, component, e->number)) continue;
            finding_pair(c->cluster, at, component_place(c->cluster, e), "exit",
                         "CTA %d exits while %s signals its mbarrier at 0x%x: no thread of it knows that this is over",
                         c->rank, operation ? "an operation of another CTA" : "another CTA", m->offset);
        }
}

// ------------------------------------------------------------------------------------------------------- operations

static mbarrier *for_operation(cluster *c, cta *owner, uint32_t offset, agent *by)
{
    place at = agent_place(by);
    mbarrier *m = live_at(owner, offset);
    if (!m) {
        finding(c, at, "mbarrier", "the operation signals 0x%x of CTA %d, which is no live mbarrier", offset,
                owner->rank);
        return NULL;
    }
    if (owner->exited && owner != by->w->cta) {
        finding(c, at, "exit", "the operation signals the mbarrier at 0x%x of CTA %d, which has exited", offset,
                owner->rank);
        return NULL;
    }
    place init = component_place(c, &m->init.e);
    switch (order_knows_init(&by->v, &m->init, true)) {
    case INIT_KNOWN: break;
    case INIT_UNFENCED:
        practice_allows(c, P4, at, init,
                        "the mbarrier at 0x%x of CTA %d is signalled by an operation, and its init "
                        "was not followed by fence.mbarrier_init or fence.proxy.async",
                        offset, owner->rank);
        break;
    case INIT_UNKNOWN:
        finding_pair(c, at, init, "mbarrier", "the operation may signal the mbarrier at 0x%x of CTA %d before its init",
                     offset, owner->rank);
        return NULL;
    }
    return m;
}

static void operation_signals(mbarrier *m, agent *by)
{
    order_agent_done(by, m->current);
    m->async_number = m->clock + (uint32_t)m->phase + 1;
    if (by->w->cta == m->owner) return;
    bool on_barrier = by->s == STREAM_MBARRIER;
    entry e = {.in = by->in, .flags = ENTRY_OPERATION, .lanes = by->v.self};
    e.component = on_barrier ? m->component : by->component;
    e.number = on_barrier ? m->async_number : by->number;
    if (e.component) remember_remote(m, &e);
}

bool mbarrier_complete_tx(cluster *c, cta *owner, uint32_t offset, uint32_t bytes, agent *by)
{
    mbarrier *m = for_operation(c, owner, offset, by);
    if (!m || !add_tx(m, -(int64_t)bytes, agent_place(by))) return false;
    operation_signals(m, by);
    complete_if_due(m);
    return true;
}

bool mbarrier_arrive_async(cluster *c, cta *owner, uint32_t offset, agent *by)
{
    mbarrier *m = for_operation(c, owner, offset, by);
    if (!m || !take_arrivals(m, 1, agent_place(by))) return false;
    operation_signals(m, by);
    complete_if_due(m);
    return true;
}

bool mbarrier_increment(cta *owner, uint32_t offset, place at)
{
    mbarrier *m = live_at(owner, offset);
    if (!m || m->pending >= COUNT_MAX) {
        finding(owner->cluster, at, "mbarrier",
                m ? "the mbarrier at 0x%x of CTA %d has no room for another arrival"
                  : "0x%x of CTA %d is no live mbarrier",
                offset, owner->rank);
        return false;
    }
    m->pending++;
    return true;
}

void mbarriers_print(const cta *c, FILE *to)
{
    for (const mbarrier *m = c->mbarriers->first; m; m = m->next)
        if (m->live)
            fprintf(to, "  CTA %d mbarrier 0x%x: phase %d (parity %d) waits for %d of %d arrivals, tx-count %d\n",
                    c->rank, m->offset, m->phase, m->phase & 1, m->pending, m->expected, m->tx);
}

// ----------------------------------------------------------------------------------------------------- instructions

// What decode found: p[0] space, p[1] flags, p[2] scope, p[3] operand of the address.
enum {
    M_RELAXED = 1,
    M_EXPECT_TX = 2,
    M_NO_COMPLETE = 4,
    M_DROP = 8,
    M_PARITY = 16,
    M_TRY = 32,
    M_RESULT = 64, // operand 0 is written
    M_COMPLETE_TX = 128
};

static bool operand_value(warp *w, const inst *in, int index, int lane, type t, const char *what, uint64_t *value)
{
    uint8_t poison = 0;
    *value = read_operand(w, &in->ops[index], lane, t, &poison);
    if (!poison) return true;
    finding(w->cta->cluster, (place){w, in, lane}, "poison", "%s of an mbarrier is a value that nobody wrote", what);
    return false;
}

static cta *barrier_address(warp *w, const inst *in, int lane, bool own_only, uint32_t *offset)
{
    uint64_t address;
    if (!read_address(w, in, &in->ops[in->p[3]], lane, &address)) return NULL;
    cluster *c = w->cta->cluster;
    place at = {w, in, lane};
    space s = (space)in->p[0];
    if (s == SPACE_GENERIC) {
        if ((address & WINDOW_MASK) != WINDOW_SHARED) {
            finding(c, at, "mbarrier", "the generic address 0x%llx is not in shared memory",
                    (unsigned long long)address);
            return NULL;
        }
        address &= ~WINDOW_MASK;
    }
    cta *owner = shared_owner(c, address, offset);
    if (!owner || *offset < SHARED_RESERVED || *offset + (uint64_t)8 > owner->shared_size) {
        finding(c, at, "out-of-bounds", "an mbarrier at shared address 0x%llx", (unsigned long long)address);
        return NULL;
    }
    if (*offset % 8) {
        finding(c, at, "misaligned", "an mbarrier at shared address 0x%llx", (unsigned long long)address);
        return NULL;
    }
    if (owner != w->cta && (own_only || s == SPACE_SHARED)) {
        finding(c, at, "mbarrier", "the mbarrier at 0x%x is CTA %d's: this needs one of the own CTA", *offset,
                owner->rank);
        return NULL;
    }
    if (owner->exited) {
        finding(c, at, "exit", "the mbarrier at 0x%x of CTA %d, which has exited", *offset, owner->rank);
        return NULL;
    }
    return owner;
}

// The live barrier that the lane means; and that the lane may know of it is checked once for each thread.
static mbarrier *barrier_of(warp *w, const inst *in, int lane, bool own_only, contact **touched)
{
    uint32_t offset;
    cta *owner = barrier_address(w, in, lane, own_only, &offset);
    if (!owner) return NULL;
    cluster *c = w->cta->cluster;
    place at = {w, in, lane};
    mbarrier *m = live_at(owner, offset);
    if (!m) {
        finding(c, at, "mbarrier", "0x%x of CTA %d is no live mbarrier", offset, owner->rank);
        return NULL;
    }
    const view *v = &order_of(w)->lane[lane];
    contact *t = *touched = &m->contact[v->self];
    t->number = v->epoch;
    if (t->knows_init) return m;
    if (order_knows_init(v, &m->init, false) == INIT_UNKNOWN) {
        finding_pair(c, at, component_place(c, &m->init.e), "mbarrier",
                     "the mbarrier at 0x%x of CTA %d may not be initialised yet: nothing orders its init before this",
                     offset, owner->rank);
        return NULL;
    }
    t->knows_init = true;
    return m;
}

static bool write_object(warp *w, const inst *in, int lane, cta *owner, uint32_t offset)
{
    location l;
    accessor x;
    thread_accessor(&x, w, in, lane, true, ACCESS_WEAK, SCOPE_CTA, false);
    bool fine =
        locate(w, in, lane, SPACE_SHARED, (uint64_t)owner->rank << 24 | offset, 8, &l) && access_begin(&x, &l, 8);
    accessor_end(&x);
    if (fine) memset(owner->shared_poison + offset, 1, 8);
    return fine;
}

static outcome exec_init(warp *w, const inst *in, uint32_t mask)
{
    cluster *c = w->cta->cluster;
    for (uint32_t lanes = mask; lanes; lanes &= lanes - 1) {
        int lane = __builtin_ctz(lanes);
        place at = {w, in, lane};
        uint32_t offset;
        uint64_t count;
        cta *owner = barrier_address(w, in, lane, true, &offset);
        if (!owner || !operand_value(w, in, 1, lane, T_U32, "the count", &count)) return FAILED;
        if (count < 1 || count > COUNT_MAX) {
            finding(c, at, "mbarrier", "an mbarrier with a count of %llu: 1 to 1048575", (unsigned long long)count);
            return FAILED;
        }
        if (live_at(owner, offset)) {
            finding(c, at, "mbarrier", "the mbarrier at 0x%x is alive: mbarrier.inval comes before another init",
                    offset);
            return FAILED;
        }
        if (!write_object(w, in, lane, owner, offset)) return FAILED;
        mbarrier *m = object_at(owner, offset);
        if (!m) {
            m = calloc(1, sizeof *m);
            if (!m) abort();
            m->owner = owner;
            m->offset = offset;
            m->component = component_new(c, STREAM_MBARRIER, 0, false, false);
            m->contact = malloc((size_t)(c->ctas * c->order->warps * LANES) * sizeof *m->contact);
            if (!m->contact) abort();
            m->next = owner->mbarriers->first;
            owner->mbarriers->first = m;
        }
        for (int t = 0; t < c->ctas * c->order->warps * LANES; t++) m->contact[t] = (contact){.seen = -1};
        m->live = true;
        m->phase = 0;
        m->expected = m->pending = (int32_t)count;
        m->tx = 0;
        m->current = signal_new(c);
        m->completed = signal_new(c);
        m->remotes = 0;
        m->async_number = 0;
        m->init = order_init_event(w, in, lane);
        owner->mbarriers->live[offset / 8 / 64] |= 1ull << offset / 8 % 64;
        owner->mbarriers->count++;
    }
    return RAN;
}

static outcome exec_inval(warp *w, const inst *in, uint32_t mask)
{
    cluster *c = w->cta->cluster;
    for (uint32_t lanes = mask; lanes; lanes &= lanes - 1) {
        int lane = __builtin_ctz(lanes);
        place at = {w, in, lane};
        contact *mine;
        mbarrier *m = barrier_of(w, in, lane, true, &mine);
        if (!m) return FAILED;
        const view *v = &order_of(w)->lane[lane];
        for (int t = 0; t < c->ctas * c->order->warps * LANES; t++) {
            const contact *other = &m->contact[t];
            if (!other->number || other == mine || vector_has(v->k->of[K_GENERIC], (uint32_t)t, other->number))
                continue;
            entry e = {.component = (uint32_t)t / LANES * LANES, .lanes = 1u << t % LANES};
            finding_pair(c, at, component_place(c, &e), "mbarrier",
                         "the mbarrier at 0x%x is invalidated, and nothing says that another thread has done with it",
                         m->offset);
            return FAILED;
        }
        if (m->async_number && !vector_has(v->k->of[K_GENERIC], m->component, m->async_number)) {
            finding(c, at, "mbarrier",
                    "the mbarrier at 0x%x is invalidated, and the thread does not know that the phase "
                    "is over to which an operation belongs",
                    m->offset);
            return FAILED;
        }
        m->live = false;
        m->owner->mbarriers->live[m->offset / 8 / 64] &= ~(1ull << m->offset / 8 % 64);
        m->owner->mbarriers->count--;
        m->clock += (uint32_t)m->phase + 1;
        signal_free(m->current);
        signal_free(m->completed);
        m->current = m->completed = NULL;
        if (!write_object(w, in, lane, m->owner, m->offset)) return FAILED;
    }
    return RAN;
}

static void thread_signals(warp *w, const inst *in, uint32_t lanes, mbarrier *m)
{
    scope sc = (scope)in->p[2];
    if (m->owner != w->cta)
        for (uint32_t l = lanes; l; l &= l - 1) {
            entry e = {.in = in, .component = order_of(w)->base, .lanes = l & -l, .number = order_of(w)->epoch};
            remember_remote(m, &e);
        }
    if (in->p[1] & M_RELAXED)
        order_release_relaxed(w, lanes, m->current, sc);
    else
        order_release_lanes(w, lanes, m->current, sc);
}

static uint64_t state_of(const mbarrier *m)
{
    return (uint64_t)m->phase << 20 | (uint64_t)m->pending;
}

// The lanes of the mask that mean the same barrier arrive together, as long as the phase does not end among them.
static outcome exec_arrive(warp *w, const inst *in, uint32_t mask)
{
    int flags = in->p[1], count_operand = in->p[3] + 1;
    for (uint32_t left = mask; left;) {
        mbarrier *m = NULL;
        uint32_t group = 0;
        uint64_t count = 1, bytes = 0;
        for (uint32_t lanes = left; lanes; lanes &= lanes - 1) {
            int lane = __builtin_ctz(lanes);
            place at = {w, in, lane};
            contact *t;
            mbarrier *other = barrier_of(w, in, lane, false, &t);
            uint64_t operand = flags & M_EXPECT_TX ? 0 : 1;
            if (!other ||
                (in->nops > count_operand && !operand_value(w, in, count_operand, lane, T_U32, "the count", &operand)))
                return FAILED;
            if (flags & M_RESULT && other->owner != w->cta) {
                finding(w->cta->cluster, at, "mbarrier",
                        "an arrival at CTA %d's mbarrier gives no state: the destination "
                        "is _",
                        other->owner->rank);
                return FAILED;
            }
            uint64_t n = flags & M_EXPECT_TX ? 1 : operand, b = flags & M_EXPECT_TX ? operand : 0;
            if (n < 1 || n > COUNT_MAX || b > COUNT_MAX) {
                finding(w->cta->cluster, at, "mbarrier", "%s of %llu",
                        flags & M_EXPECT_TX ? "an expect_tx" : "an arrival", (unsigned long long)operand);
                return FAILED;
            }
            bool joins = !m || (other == m && n == count && b == bytes);
            if (!joins ||
                (m && !(flags & M_EXPECT_TX) && (uint64_t)(__builtin_popcount(group) + 1) * n > (uint64_t)m->pending))
                continue;
            m = other;
            count = n;
            bytes = b;
            group |= 1u << lane;
            t->seen = t->seen > m->phase - 1 ? t->seen : m->phase - 1;
            if (flags & (M_EXPECT_TX | M_RESULT)) break; // one by one
        }
        left &= ~group;
        int lane = __builtin_ctz(group);
        place at = {w, in, lane};
        uint32_t n = (uint32_t)(count * (uint64_t)__builtin_popcount(group));
        if (flags & M_RESULT) write_register(w, in->ops[0].reg, lane, state_of(m), T_B64, 0);
        if (flags & M_EXPECT_TX && !add_tx(m, (int64_t)bytes, at)) return FAILED;
        thread_signals(w, in, group, m);
        if (!take_arrivals(m, n, at)) return FAILED;
        if (flags & M_DROP) {
            m->expected -= (int32_t)n;
            if (m->expected < 0) {
                finding(w->cta->cluster, at, "mbarrier",
                        "arrive_drop takes the expected arrivals of the mbarrier at 0x%x "
                        "below 0",
                        m->offset);
                return FAILED;
            }
        }
        if (flags & M_NO_COMPLETE && !m->pending && !m->tx) {
            finding(w->cta->cluster, at, "mbarrier",
                    "a .noComplete arrival completes the phase of the mbarrier at 0x%x", m->offset);
            return FAILED;
        }
        complete_if_due(m);
    }
    w->cta->cluster->step++;
    return RAN;
}

static outcome exec_tx(warp *w, const inst *in, uint32_t mask)
{
    for (uint32_t lanes = mask; lanes; lanes &= lanes - 1) {
        int lane = __builtin_ctz(lanes);
        contact *t;
        uint64_t bytes;
        mbarrier *m = barrier_of(w, in, lane, false, &t);
        if (!m || !operand_value(w, in, 1, lane, T_U32, "the tx-count", &bytes)) return FAILED;
        place at = {w, in, lane};
        if (bytes > COUNT_MAX) {
            finding(w->cta->cluster, at, "mbarrier", "a tx-count of %llu", (unsigned long long)bytes);
            return FAILED;
        }
        if (!add_tx(m, in->p[1] & M_COMPLETE_TX ? -(int64_t)bytes : (int64_t)bytes, at)) return FAILED;
        thread_signals(w, in, 1u << lane, m);
        complete_if_due(m);
    }
    w->cta->cluster->step++;
    return RAN;
}

typedef enum { NOT_YET, DONE, WRONG } look_result;
static look_result look(warp *w, const inst *in, int lane, mbarrier *m, contact *t)
{
    cluster *c = w->cta->cluster;
    place at = {w, in, lane};
    uint64_t value;
    int operand = in->p[3] + 1;
    bool parity = in->p[1] & M_PARITY;
    if (!operand_value(w, in, operand, lane, parity ? T_U32 : T_B64, parity ? "the parity" : "the state", &value))
        return WRONG;
    if (!parity) {
        uint64_t phase = value >> 20;
        if (phase == (uint64_t)m->phase) return NOT_YET;
        if (phase + 1 == (uint64_t)m->phase) return DONE;
        finding(c, at, "mbarrier",
                "a wait for phase %llu of the mbarrier at 0x%x, which is in phase %d: the state must be "
                "of the current phase or the one before",
                (unsigned long long)phase, m->offset, m->phase);
        return WRONG;
    }
    if (value > 1) {
        finding(c, at, "mbarrier", "a phase parity of %llu", (unsigned long long)value);
        return WRONG;
    }
    // What others have told the thread counts as having looked.
    const clock_vector *known = order_of(w)->lane[lane].k->of[K_LAX];
    if (known && m->component < known->n && known->v[m->component] > m->clock) {
        int32_t told = (int32_t)(known->v[m->component] - m->clock) - 1;
        if (told > t->seen) t->seen = told;
    }
    if (m->phase - 1 >= t->seen + 2) {
        finding(c, at, "mbarrier",
                "the mbarrier at 0x%x has completed phases %d to %d since this thread last saw it: a "
                "parity cannot tell them apart",
                m->offset, t->seen + 1, m->phase - 1);
        return WRONG;
    }
    t->seen = m->phase - 1 > t->seen ? m->phase - 1 : t->seen;
    return (uint64_t)(m->phase & 1) != value ? DONE : NOT_YET;
}

// A try_wait for a phase that is not complete fails at the first try, mostly, and suspends the warp at the next ones;
// now and then it comes back without success.
static bool suspends(warp *w, const inst *in, uint32_t mask, mbarrier *const of[LANES])
{
    warp_order *wo = order_of(w);
    cluster *c = w->cta->cluster;
    bool again = true;
    for (uint32_t lanes = mask; lanes; lanes &= lanes - 1) {
        int lane = __builtin_ctz(lanes);
        const mbarrier *m = of[lane];
        uint64_t key = (uint64_t)m->component << 32 | (uint32_t)(m->phase + 1);
        if (wo->waits_for[lane] != key || wo->waits_at[lane] != in) again = false;
        wo->waits_for[lane] = key;
        wo->waits_at[lane] = in;
    }
    if (!again) return next_random(c) % 4 == 0;
    if (wo->spurious_step == c->step || next_random(c) % 8) return true;
    wo->spurious_step = c->step;
    return false;
}

static outcome exec_wait(warp *w, const inst *in, uint32_t mask)
{
    mbarrier *of[LANES];
    uint32_t done = 0;
    for (uint32_t lanes = mask; lanes; lanes &= lanes - 1) {
        int lane = __builtin_ctz(lanes);
        contact *t;
        of[lane] = barrier_of(w, in, lane, true, &t);
        look_result r = of[lane] ? look(w, in, lane, of[lane], t) : WRONG;
        if (r == WRONG) return FAILED;
        done |= (uint32_t)(r == DONE) << lane;
    }
    if (!done && in->p[1] & M_TRY && suspends(w, in, mask, of)) return BLOCKED;
    for (uint32_t left = done; left;) {
        const mbarrier *m = of[__builtin_ctz(left)];
        uint32_t group = 0;
        for (uint32_t lanes = left; lanes; lanes &= lanes - 1)
            if (of[__builtin_ctz(lanes)] == m) group |= lanes & -lanes;
        left &= ~group;
        if (in->p[1] & M_RELAXED)
            order_acquire_relaxed(w, group, m->completed, (scope)in->p[2]);
        else
            order_acquire_lanes(w, group, m->completed, (scope)in->p[2]);
    }
    if (in->ops[0].kind == OP_REG)
        for (uint32_t lanes = mask; lanes; lanes &= lanes - 1) {
            int lane = __builtin_ctz(lanes);
            write_register(w, in->ops[0].reg, lane, done >> lane & 1, T_PRED, 0);
        }
    return RAN;
}

static outcome exec_pending_count(warp *w, const inst *in, uint32_t mask)
{
    for (uint32_t lanes = mask; lanes; lanes &= lanes - 1) {
        int lane = __builtin_ctz(lanes);
        uint8_t poison = 0;
        uint64_t state = read_operand(w, &in->ops[1], lane, T_B64, &poison);
        write_register(w, in->ops[0].reg, lane, state & COUNT_MAX, T_U32, poison ? 0xf : 0);
    }
    return RAN;
}

// ----------------------------------------------------------------------------------------------------------- decode

static const char *common(inst *in, const kernel *k, const char *const *allowed, int address, bool cluster_space)
{
    const char *wrong = mods_only(in, allowed);
    if (wrong) return wrong;
    if (!in->mods || strcmp(in->mod[in->mods - 1], "b64")) return ".b64 is required, last";
    in->klass = C_MBARRIER;
    in->p[0] = SPACE_GENERIC;
    if (mod_index(in, "shared") >= 0 || mod_index(in, "shared::cta") >= 0) in->p[0] = SPACE_SHARED;
    if (mod_index(in, "shared::cluster") >= 0) {
        if (!cluster_space) return ".shared::cluster: only the own CTA's mbarrier";
        in->p[0] = SPACE_SHARED_CLUSTER;
    }
    bool cluster = mod_index(in, "cluster") >= 0;
    in->p[2] = cluster ? SCOPE_CLUSTER : SCOPE_CTA;
    if (mod_index(in, "relaxed") >= 0) {
        in->p[1] |= M_RELAXED;
        if (!cluster && mod_index(in, "cta") < 0) return ".relaxed needs a scope";
    }
    int semantics = (mod_index(in, "relaxed") >= 0) + (mod_index(in, "release") >= 0) + (mod_index(in, "acquire") >= 0);
    if (semantics > 1) return "one of .release, .acquire and .relaxed";
    if (cluster && mod_index(in, "cta") >= 0) return "one scope";
    if ((cluster || mod_index(in, "cta") >= 0) && !semantics) return "a scope needs .release, .acquire or .relaxed";
    in->p[3] = address;
    if (in->nops <= address || in->ops[address].kind != OP_BRACKET || in->ops[address].count != 1)
        return "operands: the mbarrier's address in brackets";
    (void)k;
    return NULL;
}

static const char *decode_init(inst *in, const kernel *k)
{
    static const char *const allowed[] = {"shared", "shared::cta", "b64", NULL};
    in->exec = exec_init;
    const char *wrong = common(in, k, allowed, 0, false);
    return wrong ? wrong : in->nops != 2 ? "operands: [mbarrier], count" : NULL;
}

static const char *decode_inval(inst *in, const kernel *k)
{
    static const char *const allowed[] = {"shared", "shared::cta", "b64", NULL};
    in->exec = exec_inval;
    const char *wrong = common(in, k, allowed, 0, false);
    return wrong ? wrong : in->nops != 1 ? "operands: [mbarrier]" : NULL;
}

static const char *decode_tx(inst *in, const kernel *k, bool complete)
{
    static const char *const allowed[] = {"relaxed",         "cta", "cluster", "shared", "shared::cta",
                                          "shared::cluster", "b64", NULL};
    in->exec = exec_tx;
    // The only semantics it has, whether written or not.
    in->p[1] = M_RELAXED | (complete ? M_COMPLETE_TX : 0);
    const char *wrong = common(in, k, allowed, 0, true);
    return wrong ? wrong : in->nops != 2 ? "operands: [mbarrier], bytes" : NULL;
}

static const char *decode_expect_tx(inst *in, const kernel *k)
{
    return decode_tx(in, k, false);
}

static const char *decode_complete_tx(inst *in, const kernel *k)
{
    return decode_tx(in, k, true);
}

static const char *decode_any_arrive(inst *in, const kernel *k, bool drop)
{
    static const char *const allowed[] = {"expect_tx", "noComplete",  "release",         "relaxed", "cta", "cluster",
                                          "shared",    "shared::cta", "shared::cluster", "b64",     NULL};
    in->exec = exec_arrive;
    in->p[1] = drop ? M_DROP : 0;
    bool expect = mod_index(in, "expect_tx") >= 0, no_complete = mod_index(in, "noComplete") >= 0;
    bool state = in->nops && in->ops[0].kind != OP_BRACKET;
    if (expect) in->p[1] |= M_EXPECT_TX;
    if (no_complete) in->p[1] |= M_NO_COMPLETE;
    if (expect && no_complete) return ".expect_tx with .noComplete";
    const char *wrong = common(in, k, allowed, state, true);
    if (wrong) return wrong;
    if (!state && in->p[0] != SPACE_SHARED_CLUSTER) return "operands: state or _, [mbarrier], ...";
    if (state) {
        if (in->ops[0].kind == OP_REG) {
            if (in->p[0] == SPACE_SHARED_CLUSTER) return "an arrival at .shared::cluster gives no state: _";
            in->p[1] |= M_RESULT;
        } else if (in->ops[0].kind != OP_SINK) {
            return "operands: state or _, [mbarrier], ...";
        }
    }
    if (no_complete && (in->p[1] & M_RELAXED || mod_index(in, "cluster") >= 0 || in->p[0] == SPACE_SHARED_CLUSTER))
        return ".noComplete is .release.cta in the own CTA";
    int rest = in->nops - in->p[3] - 1;
    if (expect || no_complete ? rest != 1 : rest > 1) return "operands: state or _, [mbarrier], count";
    return NULL;
}

static const char *decode_arrive(inst *in, const kernel *k)
{
    return decode_any_arrive(in, k, false);
}

static const char *decode_arrive_drop(inst *in, const kernel *k)
{
    return decode_any_arrive(in, k, true);
}

static const char *decode_wait(inst *in, const kernel *k, bool try)
{
    static const char *const allowed[] = {"parity", "acquire",     "relaxed", "cta", "cluster",
                                          "shared", "shared::cta", "b64",     NULL};
    in->exec = exec_wait;
    in->p[1] = try ? M_TRY : 0;
    if (mod_index(in, "parity") >= 0) in->p[1] |= M_PARITY;
    const char *wrong = common(in, k, allowed, 1, false);
    if (wrong) return wrong;
    if (in->nops != 3 && !(try && in->nops == 4)) return "operands: p, [mbarrier], phase";
    if (in->ops[0].kind != OP_REG && in->ops[0].kind != OP_SINK) return "operands: p, [mbarrier], phase";
    return NULL;
}

static const char *decode_test_wait(inst *in, const kernel *k)
{
    return decode_wait(in, k, false);
}

static const char *decode_try_wait(inst *in, const kernel *k)
{
    return decode_wait(in, k, true);
}

static const char *decode_pending_count(inst *in, const kernel *k)
{
    static const char *const allowed[] = {"b64", NULL};
    (void)k;
    in->exec = exec_pending_count;
    in->klass = C_MBARRIER;
    const char *wrong = mods_only(in, allowed);
    if (wrong) return wrong;
    return in->nops != 2 || in->ops[0].kind != OP_REG ? "operands: count, state" : NULL;
}

const inst_row mbarrier_rows[] = {{"mbarrier.init", decode_init},
                                  {"mbarrier.inval", decode_inval},
                                  {"mbarrier.expect_tx", decode_expect_tx},
                                  {"mbarrier.complete_tx", decode_complete_tx},
                                  {"mbarrier.arrive", decode_arrive},
                                  {"mbarrier.arrive_drop", decode_arrive_drop},
                                  {"mbarrier.test_wait", decode_test_wait},
                                  {"mbarrier.try_wait", decode_try_wait},
                                  {"mbarrier.pending_count", decode_pending_count},
                                  {NULL, NULL}};
