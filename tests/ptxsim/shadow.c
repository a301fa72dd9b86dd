// The history of every cell of memory, and whether an access is ordered after what it conflicts with.
//
// A cell points to a history: the last writes and the reads since. Cells that were touched alike share one, so that a
// copy of 16 KiB costs one check and a pass over a thousand pointers.
#include <stdlib.h>
#include <string.h>

#include "order.h"

// ------------------------------------------------------------------------------------------------------ histories

static history *history_new(history_pool *p, unsigned room)
{
    unsigned log2_room = 1;
    while (1u << log2_room < room) log2_room++;
    history *h = p->free[log2_room];
    if (h) {
        p->free[log2_room] = h->next;
    } else {
        size_t size = sizeof(history) + (sizeof(entry) << log2_room);
        if (p->left < size) {
            size_t block = size > 1 << 16 ? size + 64 : 1 << 16;
            void **b = malloc(block);
            if (!b) abort();
            *b = p->blocks;
            p->blocks = b;
            p->bump = (char *)b + 64;
            p->left = block - 64;
        }
        h = (history *)p->bump;
        p->bump += size;
        p->left -= size;
    }
    h->refs = 1;
    h->count = 0;
    h->log2_room = (uint16_t)log2_room;
    return h;
}

static void history_release(history_pool *p, history *h)
{
    if (!h || --h->refs) return;
    h->next = p->free[h->log2_room];
    p->free[h->log2_room] = h;
}

void history_pool_free(history_pool *p)
{
    for (void **b = p->blocks, **next; b; b = next) {
        next = *b;
        free(b);
    }
    memset(p, 0, sizeof *p);
}

void cells_forget(history_pool *p, history **cell, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        history_release(p, cell[i]);
        cell[i] = NULL;
    }
}

// ------------------------------------------------------------------------------------------------------ knowledge

static bool of_earlier_grid(const cluster *c, const entry *e)
{
    return e->cluster && e->cluster < c->grid->first_serial;
}

static bool knows_foreign(const view *v, view_kind k, const cluster *c, const entry *e)
{
    if (of_earlier_grid(c, e)) return v->k->grids_done;
    const foreign *f = v->k->foreign;
    for (int i = 0; f && i < f->count; i++) {
        if (f->of[i].serial != e->cluster) continue;
        const clock_vector *known = k == K_ASYNC_GLOBAL ? f->of[i].async : f->of[i].generic;
        if (e->flags & ENTRY_OPERATION) return vector_has(known, e->component, e->number);
        for (uint32_t lanes = e->lanes; lanes; lanes &= lanes - 1)
            if (!vector_has(known, e->component + (uint32_t)__builtin_ctz(lanes), e->number)) return false;
        return true;
    }
    return false;
}

static bool knows_operation(const view *v, view_kind k, const struct cluster_order *co, const entry *e)
{
    const component *stream = &co->component[e->component];
    bool own = stream->stream != STREAM_MBARRIER &&
               (stream->warp_wide ? stream->owner == (v->self & ~(LANES - 1u)) : stream->owner == v->self);
    if (k == K_TENSOR) {
        if (own && stream->warp_wide && e->number <= v->done[stream->stream]) return true;
        return stream->tensor != UINT32_MAX && vector_has(v->k->of[K_TENSOR], stream->tensor, e->number);
    }
    if (own) {
        bool async = k == K_ASYNC_SHARED || k == K_ASYNC_GLOBAL;
        uint32_t done = v->done[stream->stream];
        if (async && stream->stream == STREAM_CP_ASYNC) done = v->cp_fenced[k == K_ASYNC_GLOBAL];
        if (e->number <= done) return true;
    }
    return vector_has(v->k->of[k], e->component, e->number);
}

static bool of_another_cluster(const accessor *x, const entry *e)
{
    return e->cluster && e->cluster != x->c->order->serial;
}

static bool knows(const accessor *x, view_kind k, const entry *e)
{
    const view *v = x->v;
    const struct cluster_order *co = x->c->order;
    if (of_another_cluster(x, e)) return knows_foreign(v, k, x->c, e);
    if (e->flags & ENTRY_OPERATION) return knows_operation(v, k, co, e);
    if (k == K_TENSOR) return false;
    for (uint32_t lanes = e->lanes; lanes; lanes &= lanes - 1) {
        uint32_t thread = e->component + (uint32_t)__builtin_ctz(lanes);
        if (thread == v->self) {
            uint32_t known = k == K_ASYNC_SHARED ? v->fenced[0] : k == K_ASYNC_GLOBAL ? v->fenced[1] : v->epoch;
            if (e->number > known) return false;
        } else if (!vector_has(v->k->of[k], thread, e->number)) {
            return false;
        }
    }
    return true;
}

static int cta_rank_of(const struct cluster_order *co, const entry *e)
{
    uint32_t thread = e->flags & ENTRY_OPERATION ? e->lanes : e->component;
    return (int)(thread / LANES) / co->warps;
}

// Two strong accesses by the same proxy whose scopes include each other ("morally strong") are no data race.
static bool morally_strong(const struct cluster_order *co, const entry *a, const entry *b)
{
    if (!(a->flags & b->flags & ENTRY_STRONG) || (a->flags ^ b->flags) & ENTRY_ASYNC) return false;
    int narrowest = a->scope < b->scope ? a->scope : b->scope;
    if (a->cluster != b->cluster) return narrowest >= SCOPE_GPU;
    return narrowest >= SCOPE_CLUSTER || cta_rank_of(co, a) == cta_rank_of(co, b);
}

place component_place(const cluster *c, const entry *e)
{
    const struct cluster_order *co = c->order;
    if (e->cluster && e->cluster != co->serial) return (place){NULL, e->in, -1};
    uint32_t thread =
        e->flags & ENTRY_OPERATION ? e->lanes : e->component + (uint32_t)__builtin_ctz(e->lanes | 1u << 31);
    int warp = (int)(thread / LANES);
    return (place){&c->cta[warp / co->warps].warp[warp % co->warps], e->in, (int)(thread % LANES)};
}

// ------------------------------------------------------------------------------------------------------- conflicts

// PTX ISA, "Pipelined tcgen05 instructions": pairs that happen in the order of their issue, without a wait for the
// first. Between threads the issue must be known, through both tcgen05 fences. Between the MMAs of one thread there is
// A1.
static bool tensor_pipeline(accessor *x, const entry *e)
{
    bool same_stream = e->component == x->e.component;
    if (same_stream ? e->number > x->e.number : !agent_knows_issue(x->agent, e->component, e->number)) return false;
    tensor_kind first = (tensor_kind)(e->tile >> 30), second = (tensor_kind)(x->e.tile >> 30);
    switch (second) {
    case TENSOR_MMA:
        if (first != TENSOR_MMA || e->tile == x->e.tile) return true;
        if (!same_stream || x->c->grid->strict_mma_order) return false;
        count_assumption(x->c, A1, x->at);
        return true;
    case TENSOR_CP: return first == TENSOR_SHIFT;
    case TENSOR_SHIFT: return first == TENSOR_MMA;
    }
    return false;
}

static const char *act(const entry *e)
{
    if (e->flags & ENTRY_ATOMIC) return "an atomic";
    return e->flags & ENTRY_WRITE ? "a write" : "a read";
}

#define WHERE_FORMAT "%s of %s at %s"
static const char *where(const accessor *x, size_t cell, char text[64])
{
    if (x->d == D_TENSOR)
        snprintf(text, 64, "lanes %d-%d, column %d", (int)(cell / 512) * 16, (int)(cell / 512) * 16 + 15,
                 (int)(cell % 512));
    else
        snprintf(text, 64, "0x%llx", (unsigned long long)(x->base + cell * 16));
    return text;
}

// A generic read after the write that is ordered before the access, if only by lax scopes.
static bool read_since(const accessor *x, const history *h, unsigned write)
{
    for (unsigned i = write + 1; i < h->count; i++) {
        const entry *r = &h->e[i];
        if (!(r->flags & (ENTRY_WRITE | ENTRY_OPERATION)) && r->mask & h->e[write].mask && knows(x, K_LAX, r))
            return true;
    }
    return false;
}

// Nothing that this view needs says that e is before the access. The run goes on: the report says what was found.
static void unordered(accessor *x, const history *h, unsigned i, size_t cell)
{
    const entry *e = &h->e[i];
    char text[64];
    place other = component_place(x->c, e);
    const char *at = where(x, cell, text);
    bool generic = knows(x, K_GENERIC, e), lax = generic || knows(x, K_LAX, e);
    bool by_async = x->d == D_ASYNC_SHARED || x->d == D_ASYNC_GLOBAL;
    if (!lax) {
        finding_pair(x->c, x->at, other, "race", WHERE_FORMAT " and %s: nothing orders them", act(&x->e), x->what, at,
                     act(e));
        return;
    }
    if (!generic)
        practice_allows(x->c, P3, x->at, other, WHERE_FORMAT ", after %s in another CTA: ordered at .cta scope only",
                        act(&x->e), x->what, at, act(e));
    // A dealloc is no asynchronous operation: to know that what it must come after is complete is enough.
    if (x->d == D_TENSOR && x->agent)
        practice_allows(x->c, P1, x->at, other, WHERE_FORMAT ", after %s: ordered without tcgen05.fence", act(&x->e),
                        x->what, at, act(e));
    if (!by_async || e->flags & ENTRY_ASYNC) return;
    // P5 is about memory that has been read: then what was written there before is as far as the read.
    if (e->flags & ENTRY_WRITE && !(x->e.flags & ENTRY_WRITE && read_since(x, h, i)))
        finding_pair(x->c, x->at, other, "proxy",
                     WHERE_FORMAT " by the async proxy, after %s by the generic proxy: its thread has made no "
                                  "fence.proxy.async between it and the synchronisation",
                     act(&x->e), x->what, at, act(e));
    else
        practice_allows(x->c, P5, x->at, other,
                        WHERE_FORMAT " by the async proxy, after %s by the generic proxy without fence.proxy.async",
                        act(&x->e), x->what, at, act(e));
}

// Causality order: who has seen a strong write by a strong read, or knows somebody who has, comes after it. The async
// proxy has not seen it.
static bool observed(const accessor *x, const history *h, unsigned write)
{
    const entry *e = &h->e[write];
    if (x->d != D_GENERIC || !(e->flags & ENTRY_WRITE)) return false;
    for (unsigned i = write + 1; i < h->count; i++) {
        const entry *r = &h->e[i];
        bool reads = !(r->flags & ENTRY_WRITE) || r->flags & ENTRY_ATOMIC;
        if (reads && morally_strong(x->c->order, e, r) && (e->mask & ~r->mask) == 0 && knows(x, K_GENERIC, r))
            return true;
    }
    return false;
}

// Threads that write the same value to the same place do not race, whoever comes last.
static bool writes_what_is_there(accessor *x)
{
    if (!x->value || x->unchanged) return x->unchanged;
    for (int i = 0; i < x->size; i++)
        if (x->poison[i]) return false;
    return x->unchanged = !memcmp(x->data, x->value, (size_t)x->size);
}

static void check(accessor *x, const history *h, uint16_t mask, size_t cell)
{
    static const view_kind seen_as[] = {K_GENERIC, K_ASYNC_SHARED, K_ASYNC_GLOBAL, K_TENSOR};
    for (unsigned i = 0; h && i < h->count; i++) {
        const entry *e = &h->e[i];
        if (!(e->mask & mask) || !((e->flags | x->e.flags) & ENTRY_WRITE)) continue;
        if (e->cluster && e->cluster < x->c->grid->run_serial) continue;
        if (x->e.flags & ENTRY_NONCOHERENT && !of_earlier_grid(x->c, e)) {
            char text[64];
            finding_pair(x->c, x->at, component_place(x->c, e), "race",
                         "a non-coherent load of %s at %s, which the same grid writes", x->what, where(x, cell, text));
            continue;
        }
        if (knows(x, seen_as[x->d], e)) {
            // The async and tensor views follow every scope under practice: say where that was needed.
            if (x->d != D_GENERIC && x->c->grid->practice && x->c->ctas > 1 && !knows(x, K_GENERIC, e) &&
                knows(x, K_LAX, e)) {
                char text[64];
                practice_allows(x->c, P3, x->at, component_place(x->c, e),
                                WHERE_FORMAT ", after %s in another CTA: ordered at .cta scope only", act(&x->e),
                                x->what, where(x, cell, text), act(e));
            }
            continue;
        }
        if (morally_strong(x->c->order, &x->e, e) || observed(x, h, i)) continue;
        bool stored = (e->flags & (ENTRY_WRITE | ENTRY_OPERATION | ENTRY_ATOMIC)) == ENTRY_WRITE;
        if (stored && writes_what_is_there(x)) continue;
        if (x->d == D_TENSOR && x->agent && x->agent->tensor && tensor_pipeline(x, e)) continue;
        unordered(x, h, i, cell);
    }
}

// What stays of an older entry once the new access is in: its mask.
static uint16_t remaining(const accessor *x, const entry *e, uint16_t mask)
{
    if (!(e->mask & mask)) return e->mask;
    if (e->cluster && e->cluster < x->c->grid->run_serial) return 0;
    bool same_component = e->component == x->e.component && e->cluster == x->e.cluster &&
                          (e->flags & ENTRY_OPERATION) == (x->e.flags & ENTRY_OPERATION);
    if (x->e.flags & ENTRY_WRITE) {
        // A strong write, or one of the same value, does not stand for another that it is not ordered after.
        if ((x->e.flags & e->flags & ENTRY_STRONG || x->unchanged) && !knows(x, K_GENERIC, e)) return e->mask;
        return e->mask & (uint16_t)~mask;
    }
    // An older read by the same threads, or earlier in the same stream: whoever knows of this one knows of that one.
    bool covered = same_component && !(e->flags & ENTRY_WRITE) && (e->mask & ~mask) == 0 && e->number <= x->e.number &&
                   (x->e.flags & ENTRY_OPERATION || (e->lanes & ~x->e.lanes) == 0);
    return covered ? 0 : e->mask;
}

static bool merges(const entry *a, const entry *b)
{
    return a->component == b->component && a->number == b->number && a->in == b->in && a->flags == b->flags &&
           a->cluster == b->cluster && !(a->flags & ENTRY_OPERATION);
}

// A cell that thousands of warps touch (a length, a counter) forgets the oldest accesses, of other clusters first: what
// races with all of them still meets the rest.
enum { MOST_ENTRIES = 512, MOST_OWN_ENTRIES = 16384 };

// Adds the access to a history that is this cell's alone (in place), or to a copy. Returns the cell's history.
static history *successor(accessor *x, history *h, uint16_t mask)
{
    unsigned old = h ? h->count : 0;
    bool alone = h && h->refs == 1;
    history *n = alone ? h : history_new(x->pool, old + 1);
    unsigned count = 0;
    bool merged = false;
    for (unsigned i = 0; i < old; i++) {
        entry e = h->e[i];
        if (old - i + count >= (e.cluster == x->e.cluster ? MOST_OWN_ENTRIES : MOST_ENTRIES)) continue;
        e.mask = remaining(x, &e, mask);
        if (!e.mask) continue;
        // One instruction of a warp: lanes that touch the same bytes, or the same lanes at more bytes.
        if (!merged && merges(&e, &x->e)) {
            if (e.mask == mask) {
                e.lanes |= x->e.lanes;
                merged = true;
            } else if (e.lanes == x->e.lanes) {
                e.mask |= mask;
                merged = true;
            }
        }
        n->e[count++] = e;
    }
    n->count = (uint16_t)count;
    if (merged) return n;
    if (count == 1u << n->log2_room) {
        history *bigger = history_new(x->pool, count + 1);
        memcpy(bigger->e, n->e, count * sizeof(entry));
        bigger->count = (uint16_t)count;
        history_release(x->pool, n);
        n = bigger;
    }
    n->e[n->count] = x->e;
    n->e[n->count++].mask = mask;
    return n;
}

// Cells that are alike, from cell on, get the history that the memo has for them. Returns how many.
static size_t repeat(const memo *m, history **cell, size_t n)
{
    size_t run = 0;
    while (run < n && cell[run] == m->old) cell[run++] = m->now;
    m->now->refs += (uint32_t)run;
    // The memo has a reference to the old one, so that it does not end here.
    if (m->old) m->old->refs -= (uint32_t)run;
    return run;
}

void cells_access(accessor *x, history **cell, size_t n, uint16_t mask)
{
    memo *m = &x->memo[mask != 0xffff];
    for (size_t i = 0; i < n;) {
        history *h = cell[i];
        if (m->now && h == m->old && mask == m->mask) {
            i += repeat(m, cell + i, n - i);
            continue;
        }
        if (h) check(x, h, mask, (size_t)(&cell[i] - x->cells));
        bool alone = h && h->refs == 1;
        history *now = cell[i++] = successor(x, h, mask);
        if (alone) continue;
        if (x->single) {
            history_release(x->pool, h);
            continue;
        }
        // The cell's reference to the old history becomes the memo's.
        history_release(x->pool, m->old);
        history_release(x->pool, m->now);
        *m = (memo){h, now, mask};
        now->refs++;
    }
}

void cells_access_bytes(accessor *x, history **cells, uint64_t offset, size_t size)
{
    x->cells = cells;
    uint64_t end = offset + size, first = offset / 16, last = (end - 1) / 16;
    uint16_t head = (uint16_t)(0xffffu << offset % 16), tail = (uint16_t)(0xffffu >> (15 - (end - 1) % 16));
    if (first == last) {
        cells_access(x, cells + first, 1, head & tail);
        return;
    }
    cells_access(x, cells + first, 1, head);
    cells_access(x, cells + first + 1, last - first - 1, 0xffff);
    cells_access(x, cells + last, 1, tail);
}

void memo_release(history_pool *p, memo m[2])
{
    for (int i = 0; i < 2; i++) {
        history_release(p, m[i].old);
        history_release(p, m[i].now);
        m[i] = (memo){0};
    }
}

void accessor_end(accessor *x)
{
    memo_release(x->pool, x->memo);
}

void thread_accessor(accessor *x, warp *w, const inst *in, int lane, bool write, access_order o, scope sc, bool atomic)
{
    warp_order *wo = order_of(w);
    cluster *c = w->cta->cluster;
    *x = (accessor){.v = &wo->lane[lane], .c = c, .pool = &c->order->pool, .d = D_GENERIC, .at = {w, in, lane}};
    x->e.in = in;
    x->single = true;
    x->e.component = wo->base;
    x->e.number = wo->lane[lane].epoch;
    x->e.lanes = 1u << lane;
    x->e.flags =
        (uint8_t)((write ? ENTRY_WRITE : 0) | (o != ACCESS_WEAK ? ENTRY_STRONG : 0) | (atomic ? ENTRY_ATOMIC : 0));
    x->e.scope = (uint8_t)(o == ACCESS_VOLATILE ? SCOPE_SYS : sc);
}

void accessor_lane(accessor *x, int lane)
{
    x->v = &order_of(x->at.w)->lane[lane];
    x->at.lane = lane;
    x->e.lanes = 1u << lane;
    x->e.number = x->v->epoch;
    x->e.cluster = 0;
    x->value = NULL;
    x->unchanged = false;
}

void agent_accessor(accessor *x, agent *a, domain d, bool write)
{
    *x = (accessor){.v = &a->v, .c = a->c, .pool = &a->c->order->pool, .d = d, .at = agent_place(a), .agent = a};
    x->e.in = a->in;
    x->e.component = a->component;
    x->e.number = a->number;
    x->e.lanes = a->v.self;
    x->e.flags = (uint8_t)(ENTRY_OPERATION | (write ? ENTRY_WRITE : 0) | (a->p == PROXY_GENERIC ? 0 : ENTRY_ASYNC));
    x->e.tile = a->tensor ? (uint32_t)a->kind << 30 | (a->tile & 0x3fffffff) : 0;
}
