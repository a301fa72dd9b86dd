// Happens-before: what every thread and operation knows of all others, and how that spreads (PTX ISA, "Memory
// Consistency Model"; "Async proxy"; "Memory Consistency Model for 5th generation of TensorCore operations").
//
// Every access has the number of its component at that time. A thread's number grows at each release and fence, so that
// what it does later is not covered by what others got to know. The lanes of a warp share the counter: then one
// instruction of a warp is one entry in a cell's history.
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "order.h"

// --------------------------------------------------------------------------------------------------------- vectors

// Vectors are worked on in blocks of BLOCK components; what is behind the n-th is 0.
enum { BLOCK = 4 };
typedef uint32_t block __attribute__((vector_size(BLOCK * sizeof(uint32_t))));

static block block_at(const clock_vector *v, uint32_t i)
{
    block b;
    memcpy(&b, v->v + i, sizeof b);
    return b;
}

static bool any(block b)
{
    uint64_t parts[sizeof b / sizeof(uint64_t)], all = 0;
    memcpy(parts, &b, sizeof b);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) all |= parts[i];
    return all != 0;
}

static clock_vector *vector_new(uint32_t n)
{
    uint32_t room = (n + 63) & ~63u;
    clock_vector *v = malloc(sizeof *v + room * sizeof *v->v);
    if (!v) abort();
    v->refs = 1;
    v->n = n;
    v->room = room;
    memset(v->v + n, 0, (room - n) * sizeof *v->v);
    return v;
}

static clock_vector *vector_retain(clock_vector *v)
{
    if (v) v->refs++;
    return v;
}

static void vector_release(clock_vector *v)
{
    if (v && --v->refs == 0) free(v);
}

// *to is about to change up to component n: gives it a vector of its own.
static clock_vector *vector_own(clock_vector **to, uint32_t n)
{
    clock_vector *v = *to;
    if (v && v->refs == 1 && v->room >= n) {
        if (v->n < n) v->n = n;
        return v;
    }
    uint32_t had = v ? v->n : 0;
    clock_vector *mine = vector_new(n > had ? n : had);
    if (v) memcpy(mine->v, v->v, had * sizeof *v->v);
    memset(mine->v + had, 0, (mine->n - had) * sizeof *v->v);
    vector_release(v);
    return *to = mine;
}

static void vector_raise(clock_vector **to, uint32_t component, uint32_t number)
{
    if (!number || vector_has(*to, component, number)) return;
    vector_own(to, component + 1)->v[component] = number;
}

static void vector_set(clock_vector **to, clock_vector *v)
{
    vector_retain(v);
    vector_release(*to);
    *to = v;
}

// *to becomes the greater of both, component by component; one that is all greater is shared.
static void vector_take(clock_vector **to, clock_vector *from)
{
    clock_vector *old = *to;
    if (!from || from == old) return;
    if (!old) {
        *to = vector_retain(from);
        return;
    }
    uint32_t both = old->n < from->n ? old->n : from->n, i = 0;
    block news = {0}, olds = {0};
    for (; i < both; i += BLOCK) {
        block a = block_at(old, i), b = block_at(from, i);
        news |= (block)(b > a);
        olds |= (block)(a > b);
    }
    for (uint32_t j = i; j < from->n; j += BLOCK) news |= block_at(from, j);
    if (!any(news)) return;
    for (uint32_t j = i; j < old->n; j += BLOCK) olds |= block_at(old, j);
    if (!any(olds)) {
        vector_set(to, from);
        return;
    }
    clock_vector *mine = vector_own(to, from->n > old->n ? from->n : old->n);
    for (uint32_t j = 0; j < from->n; j += BLOCK) {
        block a = block_at(mine, j), b = block_at(from, j), greater = (block)(b > a);
        a = (b & greater) | (a & ~greater);
        memcpy(mine->v + j, &a, sizeof a);
    }
}

static void vector_meet(clock_vector **to, const clock_vector *with)
{
    if (!*to || *to == with) return;
    clock_vector *mine = vector_own(to, (*to)->n);
    for (uint32_t i = 0; i < mine->n; i++) {
        uint32_t other = with && i < with->n ? with->v[i] : 0;
        if (mine->v[i] > other) mine->v[i] = other;
    }
}

// ------------------------------------------------------------------------------------------------- other clusters

static foreign *foreign_retain(foreign *f)
{
    if (f) f->refs++;
    return f;
}

static void foreign_release(foreign *f)
{
    if (!f || --f->refs) return;
    for (int i = 0; i < f->count; i++) {
        vector_release(f->of[i].generic);
        vector_release(f->of[i].async);
    }
    free(f);
}

static void foreign_take_one(foreign **to, uint32_t serial, clock_vector *generic, clock_vector *async)
{
    int count = *to ? (*to)->count : 0, at = 0;
    while (at < count && (*to)->of[at].serial != serial) at++;
    foreign *f = malloc(sizeof *f + (size_t)(count + 1) * sizeof f->of[0]);
    if (!f) abort();
    f->refs = 1;
    f->count = at == count ? count + 1 : count;
    for (int i = 0; i < count; i++) {
        f->of[i] = (*to)->of[i];
        vector_retain(f->of[i].generic);
        vector_retain(f->of[i].async);
    }
    if (at == count) {
        f->of[at].serial = serial;
        f->of[at].generic = f->of[at].async = NULL;
    }
    vector_take(&f->of[at].generic, generic);
    vector_take(&f->of[at].async, async);
    foreign_release(*to);
    *to = f;
}

static void foreign_take(foreign **to, foreign *from)
{
    if (!from || from == *to) return;
    if (!*to) {
        *to = foreign_retain(from);
        return;
    }
    for (int i = 0; i < from->count; i++)
        foreign_take_one(to, from->of[i].serial, from->of[i].generic, from->of[i].async);
}

// ------------------------------------------------------------------------------------------------------- knowledge

static void knowledge_release(knowledge *k)
{
    if (!k || --k->refs) return;
    for (int i = 0; i < K_COUNT; i++) vector_release(k->of[i]);
    foreign_release(k->foreign);
    free(k);
}

static knowledge *knowledge_retain(knowledge *k)
{
    if (k) k->refs++;
    return k;
}

static knowledge *knowledge_copy(const knowledge *k)
{
    knowledge *n = malloc(sizeof *n);
    if (!n) abort();
    *n = *k;
    n->refs = 1;
    for (int i = 0; i < K_COUNT; i++) vector_retain(n->of[i]);
    foreign_retain(n->foreign);
    return n;
}

// The generic and the lax view are mostly one vector: then taking it once is enough.
static void take_generic(clock_vector *to[K_COUNT], clock_vector *const from[K_COUNT])
{
    bool one = to[K_GENERIC] == to[K_LAX] && from[K_GENERIC] == from[K_LAX];
    if (one) vector_set(&to[K_LAX], NULL);
    vector_take(&to[K_GENERIC], from[K_GENERIC]);
    if (one)
        vector_set(&to[K_LAX], to[K_GENERIC]);
    else
        vector_take(&to[K_LAX], from[K_LAX]);
}

static void take_all(clock_vector *to[K_COUNT], clock_vector *const from[K_COUNT])
{
    take_generic(to, from);
    vector_take(&to[K_ASYNC_SHARED], from[K_ASYNC_SHARED]);
    if (to[K_ASYNC_GLOBAL] != to[K_ASYNC_SHARED] || from[K_ASYNC_GLOBAL] != from[K_ASYNC_SHARED])
        vector_take(&to[K_ASYNC_GLOBAL], from[K_ASYNC_GLOBAL]);
    vector_take(&to[K_CHANNEL], from[K_CHANNEL]);
}

// For lanes that share knowledge: change() is applied once to a copy, and they share the result.
typedef void (*change_fn)(knowledge *k, void *with);
static void change_lanes(warp *w, uint32_t mask, change_fn change, void *with)
{
    warp_order *wo = order_of(w);
    knowledge *before = NULL, *after = NULL;
    for (uint32_t lanes = mask; lanes; lanes &= lanes - 1) {
        view *v = &wo->lane[__builtin_ctz(lanes)];
        if (v->k != before) {
            knowledge_release(before);
            knowledge_release(after);
            before = knowledge_retain(v->k);
            after = knowledge_copy(before);
            change(after, with);
        }
        knowledge_release(v->k);
        v->k = knowledge_retain(after);
    }
    knowledge_release(before);
    knowledge_release(after);
}

static void step(warp_order *wo)
{
    wo->epoch++;
    for (int i = 0; i < LANES; i++) wo->lane[i].epoch = wo->epoch;
}

void order_program_step(warp *w, uint32_t mask)
{
    (void)mask;
    step(order_of(w));
}

// What lanes know of themselves and their own streams, into vectors that others will take.
static void fold_own(const warp *w, uint32_t mask, clock_vector *of[K_COUNT])
{
    const warp_order *wo = order_of(w);
    uint32_t n = wo->base + LANES;
    bool lax = of[K_LAX] != of[K_GENERIC];
    if (!lax) vector_set(&of[K_LAX], NULL);
    clock_vector *generic = vector_own(&of[K_GENERIC], n), *lax_vector = lax ? vector_own(&of[K_LAX], n) : NULL;
    for (uint32_t lanes = mask; lanes; lanes &= lanes - 1) {
        const view *v = &wo->lane[__builtin_ctz(lanes)];
        if (generic->v[v->self] < v->epoch) generic->v[v->self] = v->epoch;
        if (lax_vector && lax_vector->v[v->self] < v->epoch) lax_vector->v[v->self] = v->epoch;
    }
    for (uint32_t lanes = mask; lanes; lanes &= lanes - 1) {
        const view *v = &wo->lane[__builtin_ctz(lanes)];
        vector_raise(&of[K_ASYNC_SHARED], v->self, v->fenced[0]);
        vector_raise(&of[K_ASYNC_GLOBAL], v->self, v->fenced[1]);
        for (int s = 0; s < STREAM_MBARRIER; s++) {
            uint32_t c = wo->component[s] ? wo->component[s] : wo->lane_component[v->self - wo->base][s];
            if (!c || !v->done[s]) continue;
            bool cp = s == STREAM_CP_ASYNC;
            vector_raise(&of[K_GENERIC], c, v->done[s]);
            if (lax) vector_raise(&of[K_LAX], c, v->done[s]);
            vector_raise(&of[K_ASYNC_SHARED], c, cp ? v->cp_fenced[0] : v->done[s]);
            vector_raise(&of[K_ASYNC_GLOBAL], c, cp ? v->cp_fenced[1] : v->done[s]);
        }
    }
    if (!lax) vector_set(&of[K_LAX], of[K_GENERIC]);
}

static knowledge *folded(const warp *w, int lane)
{
    knowledge *k = knowledge_copy(order_of(w)->lane[lane].k);
    fold_own(w, 1u << lane, k->of);
    return k;
}

// --------------------------------------------------------------------------------------------------------- signals

// Releases at .cta scope and at wider ones, kept apart by the CTA that made them.
typedef struct {
    clock_vector *of[K_COUNT];
    bool grids_done;
    foreign *foreign;
} slot;

struct signal {
    int ctas;
    slot slot[][2];
};

signal *signal_new(cluster *c)
{
    signal *s = calloc(1, sizeof *s + (size_t)c->ctas * sizeof s->slot[0]);
    if (!s) abort();
    s->ctas = c->ctas;
    return s;
}

static void slot_clear(slot *l)
{
    for (int i = 0; i < K_COUNT; i++) vector_release(l->of[i]);
    foreign_release(l->foreign);
    memset(l, 0, sizeof *l);
}

void signal_free(signal *s)
{
    for (int i = 0; s && i < s->ctas * 2; i++) slot_clear(&s->slot[i / 2][i % 2]);
    free(s);
}

signal *signal_copy(const signal *s)
{
    size_t size = sizeof *s + (size_t)s->ctas * sizeof s->slot[0];
    signal *n = malloc(size);
    if (!n) abort();
    memcpy(n, s, size);
    for (int i = 0; i < s->ctas * 2; i++) {
        slot *l = &n->slot[i / 2][i % 2];
        for (int j = 0; j < K_COUNT; j++) vector_retain(l->of[j]);
        foreign_retain(l->foreign);
    }
    return n;
}

static void slot_release(slot *l, const warp *w, uint32_t mask)
{
    const warp_order *wo = order_of(w);
    const knowledge *last = NULL;
    for (uint32_t lanes = mask; lanes; lanes &= lanes - 1) {
        const knowledge *k = wo->lane[__builtin_ctz(lanes)].k;
        if (k == last) continue;
        last = k;
        take_all(l->of, k->of);
        foreign_take(&l->foreign, k->foreign);
        l->grids_done |= k->grids_done;
    }
    fold_own(w, mask, l->of);
}

void order_release_lanes(warp *w, uint32_t mask, signal *s, scope sc)
{
    slot_release(&s->slot[w->cta->rank][sc >= SCOPE_CLUSTER], w, mask);
    step(order_of(w));
}

void order_release(warp *w, int lane, signal *s, scope sc)
{
    order_release_lanes(w, 1u << lane, s, sc);
}

// A fence before it makes a relaxed arrival a release of what was before the fence.
static void slot_take_knowledge(slot *l, const knowledge *k)
{
    take_all(l->of, k->of);
    foreign_take(&l->foreign, k->foreign);
    l->grids_done |= k->grids_done;
}

void order_release_relaxed(warp *w, uint32_t mask, signal *s, scope sc)
{
    warp_order *wo = order_of(w);
    for (uint32_t lanes = mask; lanes; lanes &= lanes - 1) {
        int i = __builtin_ctz(lanes);
        vector_take(&s->slot[w->cta->rank][sc >= SCOPE_CLUSTER].of[K_CHANNEL], wo->lane[i].k->of[K_CHANNEL]);
        if (!wo->fence[i]) continue;
        scope both = sc < wo->fence_scope[i] ? sc : wo->fence_scope[i];
        slot_take_knowledge(&s->slot[w->cta->rank][both >= SCOPE_CLUSTER], wo->fence[i]);
    }
}

typedef struct {
    const signal *s;
    int rank;
    bool wide, practice;
} acquisition;

static void acquire(knowledge *k, void *with)
{
    const acquisition *a = with;
    for (int r = 0; r < a->s->ctas; r++)
        for (int wide = 0; wide < 2; wide++) {
            const slot *l = &a->s->slot[r][wide];
            if (r == a->rank || (wide && a->wide)) {
                take_all(k->of, l->of);
                foreign_take(&k->foreign, l->foreign);
                k->grids_done |= l->grids_done;
                continue;
            }
            // The scopes do not reach: the lax view alone takes it; under practice also those that have no lax twin.
            vector_take(&k->of[K_LAX], l->of[K_LAX]);
            if (!a->practice) continue;
            vector_take(&k->of[K_ASYNC_SHARED], l->of[K_ASYNC_SHARED]);
            vector_take(&k->of[K_ASYNC_GLOBAL], l->of[K_ASYNC_GLOBAL]);
            vector_take(&k->of[K_CHANNEL], l->of[K_CHANNEL]);
        }
}

static void acquire_channel(knowledge *k, void *with)
{
    const acquisition *a = with;
    for (int r = 0; r < a->s->ctas; r++)
        for (int wide = 0; wide < 2; wide++)
            if (r == a->rank || (wide && a->wide) || a->practice)
                vector_take(&k->of[K_CHANNEL], a->s->slot[r][wide].of[K_CHANNEL]);
}

static acquisition acquisition_of(const warp *w, const signal *s, scope sc)
{
    return (acquisition){s, w->cta->rank, sc >= SCOPE_CLUSTER, w->cta->cluster->grid->practice};
}

void order_acquire_lanes(warp *w, uint32_t mask, const signal *s, scope sc)
{
    acquisition a = acquisition_of(w, s, sc);
    change_lanes(w, mask, acquire, &a);
}

void order_acquire(warp *w, int lane, const signal *s, scope sc)
{
    order_acquire_lanes(w, 1u << lane, s, sc);
}

static knowledge *knowledge_empty(void)
{
    knowledge *k = calloc(1, sizeof *k);
    if (!k) abort();
    k->refs = 1;
    return k;
}

static knowledge *observed_by(warp_order *wo, int lane, scope fence)
{
    knowledge **k = &wo->observed[lane][fence];
    return *k ? *k : (*k = knowledge_empty());
}

void order_acquire_relaxed(warp *w, uint32_t mask, const signal *s, scope sc)
{
    warp_order *wo = order_of(w);
    acquisition a = acquisition_of(w, s, sc);
    change_lanes(w, mask, acquire_channel, &a);
    for (scope fence = SCOPE_CTA; fence < FENCE_SCOPES; fence++) {
        acquisition both = acquisition_of(w, s, fence < sc ? fence : sc);
        for (uint32_t lanes = mask; lanes; lanes &= lanes - 1)
            acquire(observed_by(wo, __builtin_ctz(lanes), fence), &both);
    }
}

static void slot_raise(slot *l, uint32_t component, uint32_t number, bool async, uint32_t tensor)
{
    bool one = l->of[K_LAX] == l->of[K_GENERIC];
    if (one) vector_set(&l->of[K_LAX], NULL);
    vector_raise(&l->of[K_GENERIC], component, number);
    if (one)
        vector_set(&l->of[K_LAX], l->of[K_GENERIC]);
    else
        vector_raise(&l->of[K_LAX], component, number);
    if (async) {
        vector_raise(&l->of[K_ASYNC_SHARED], component, number);
        vector_raise(&l->of[K_ASYNC_GLOBAL], component, number);
    }
    if (tensor != UINT32_MAX) vector_raise(&l->of[K_CHANNEL], tensor, number);
}

void signal_raise(signal *s, const cta *by, uint32_t component, uint32_t number)
{
    bool async = by->cluster->order->component[component].stream != STREAM_CP_ASYNC;
    for (int wide = 0; wide < 2; wide++) slot_raise(&s->slot[by->rank][wide], component, number, async, UINT32_MAX);
}

// ------------------------------------------------------------------------------------------- streams and operations

uint32_t component_new(cluster *c, int stream, uint32_t owner, bool warp_wide, bool tensor)
{
    struct cluster_order *co = c->order;
    if (co->components == co->room) {
        co->room = co->room ? co->room * 2 : 1024;
        co->component = realloc(co->component, co->room * sizeof *co->component);
        if (!co->component) abort();
    }
    uint32_t n = co->components++;
    co->component[n] = (component){owner, (int16_t)stream, warp_wide, tensor ? co->tensor_components : UINT32_MAX};
    co->tensor_components += !tensor ? 0 : stream == STREAM_TCGEN05_MMA ? 2 : 1;
    c->clocks = (int)co->components;
    if (stream == STREAM_CP_ASYNC) {
        if (co->cp_asyncs == co->cp_async_room) {
            co->cp_async_room = co->cp_async_room ? co->cp_async_room * 2 : 128;
            co->cp_async = realloc(co->cp_async, (size_t)co->cp_async_room * sizeof *co->cp_async);
            if (!co->cp_async) abort();
        }
        co->cp_async[co->cp_asyncs++] = n;
    }
    return n;
}

// What all of the lanes know: an operation of a whole warp is after only that.
static knowledge *known_to_all(const warp *w, uint32_t mask)
{
    const warp_order *wo = order_of(w);
    const knowledge *first = wo->lane[__builtin_ctz(mask)].k;
    knowledge *all = NULL;
    for (uint32_t lanes = mask; lanes; lanes &= lanes - 1) {
        const knowledge *k = wo->lane[__builtin_ctz(lanes)].k;
        if (k == first) continue;
        if (!all) all = knowledge_copy(first);
        for (int i = 0; i < K_COUNT; i++) vector_meet(&all->of[i], k->of[i]);
        all->grids_done &= k->grids_done;
    }
    return all;
}

agent *agent_issue(warp *w, const inst *in, int lane, stream s, proxy p)
{
    warp_order *wo = order_of(w);
    cluster *c = w->cta->cluster;
    if (lane < 0) lane = __builtin_ctz(w->current | 1u << 31);
    agent *a = calloc(1, sizeof *a);
    if (!a) abort();
    a->refs = 1;
    a->c = c;
    a->w = w;
    a->in = in;
    a->lane = lane;
    a->s = s;
    a->p = p;
    a->v = wo->lane[lane];
    bool whole_warp = s == STREAM_TCGEN05_LD || s == STREAM_TCGEN05_ST || s == STREAM_WGMMA;
    knowledge *all = whole_warp && w->current ? known_to_all(w, w->current) : NULL;
    a->v.k = all ? all : knowledge_retain(a->v.k);
    bool tensor = s == STREAM_TCGEN05_MMA || s == STREAM_TCGEN05_LD || s == STREAM_TCGEN05_ST;
    if (whole_warp) {
        if (!wo->component[s]) wo->component[s] = component_new(c, s, wo->base, true, tensor);
        a->component = wo->component[s];
        a->number = ++wo->issued[s];
    } else if (s != STREAM_MBARRIER) {
        if (!wo->lane_component[lane][s])
            wo->lane_component[lane][s] = component_new(c, s, wo->base + (uint32_t)lane, false, tensor);
        a->component = wo->lane_component[lane][s];
        a->number = ++wo->lane_issued[lane][s];
    }
    // What the thread does after this is not before the operation.
    step(wo);
    return a;
}

agent *agent_retain(agent *a)
{
    a->refs++;
    return a;
}

static void agent_forget(agent *a)
{
    for (int i = 0; i < MEMOS; i++) memo_release(&a->c->order->pool, a->memo[i]);
}

void agent_release(agent *a)
{
    if (!a || --a->refs) return;
    agent_forget(a);
    knowledge_release(a->v.k);
    free(a);
}

place agent_place(const agent *a)
{
    return (place){a->w, a->in, a->lane};
}

uint32_t agent_number(const agent *a)
{
    return a->number;
}

void agent_tensor(agent *a, tensor_kind kind, uint64_t tile)
{
    a->tensor = true;
    a->kind = kind;
    a->tile = (uint32_t)(tile * 0x9e3779b97f4a7c15u >> 34);
}

bool agent_knows_issue(const agent *a, uint32_t component, uint32_t number)
{
    const struct cluster_order *co = a->c->order;
    return co->component[component].stream == STREAM_TCGEN05_MMA &&
           vector_has(a->v.k->of[K_TENSOR], co->component[component].tensor + 1, number);
}

void agent_completes_on(agent *a, cta *owner, uint32_t offset)
{
    a->barrier_owner = owner;
    a->barrier = offset;
}

bool agent_clock(agent *a)
{
    if (a->s != STREAM_MBARRIER || !a->barrier_owner) return true;
    uint32_t component, number;
    if (!mbarrier_clock(a->barrier_owner, a->barrier, a->p == PROXY_GENERIC, &component, &number)) {
        finding(a->c, agent_place(a), "mbarrier",
                "the operation completes on 0x%x of CTA %d, which is no live mbarrier", a->barrier,
                a->barrier_owner->rank);
        return false;
    }
    if (component != a->component || number != a->number) {
        agent_forget(a);
        a->component = component;
        a->number = number;
    }
    return true;
}

void order_agent_done(agent *a, signal *s)
{
    slot *l = &s->slot[a->w->cta->rank][1];
    vector_raise(&l->of[K_CHANNEL], (uint32_t)a->w->cta->rank, 1);
    if (a->component) {
        uint32_t tensor = a->c->order->component[a->component].tensor;
        slot_raise(l, a->component, a->number, a->p != PROXY_GENERIC, tensor);
    }
    if (a->p == PROXY_GENERIC) return;
    // What was ordered before the operation in its own proxy is before its end too.
    const knowledge *k = a->v.k;
    clock_vector *of[K_COUNT] = {NULL};
    vector_take(&of[K_ASYNC_SHARED], k->of[K_ASYNC_SHARED]);
    vector_raise(&of[K_ASYNC_SHARED], a->v.self, a->v.fenced[0]);
    vector_take(&of[K_ASYNC_GLOBAL], k->of[K_ASYNC_GLOBAL]);
    vector_raise(&of[K_ASYNC_GLOBAL], a->v.self, a->v.fenced[1]);
    vector_take(&of[K_GENERIC], of[K_ASYNC_SHARED]);
    vector_take(&of[K_GENERIC], of[K_ASYNC_GLOBAL]);
    vector_set(&of[K_LAX], of[K_GENERIC]);
    if (a->component && a->c->order->component[a->component].tensor != UINT32_MAX)
        vector_set(&of[K_CHANNEL], k->of[K_TENSOR]);
    take_all(l->of, of);
    l->grids_done |= k->grids_done;
    for (int i = 0; i < K_COUNT; i++) vector_release(of[i]);
}

void order_stream_done(warp *w, int lane, stream st, uint32_t number)
{
    warp_order *wo = order_of(w);
    bool warp_wide = wo->component[st] != 0;
    for (int i = 0; i < LANES; i++) {
        view *v = &wo->lane[i];
        if ((warp_wide || i == lane) && v->done[st] < number) v->done[st] = number;
    }
}

// ---------------------------------------------------------------------------------------------------------- fences

static void fence_cp_async(knowledge *k, void *with)
{
    const struct {
        struct cluster_order *co;
        int spaces;
    } *f = with;
    for (int i = 0; i < f->co->cp_asyncs; i++) {
        uint32_t c = f->co->cp_async[i];
        uint32_t known = k->of[K_GENERIC] && c < k->of[K_GENERIC]->n ? k->of[K_GENERIC]->v[c] : 0;
        if (f->spaces & FENCE_SHARED) vector_raise(&k->of[K_ASYNC_SHARED], c, known);
        if (f->spaces & FENCE_GLOBAL) vector_raise(&k->of[K_ASYNC_GLOBAL], c, known);
    }
}

// fence.proxy.async: the thread's own accesses so far, and cp.async operations that it knows complete, are before
// whatever the async proxy does after the synchronisation that follows.
void order_proxy_fence_lanes(warp *w, uint32_t mask, int spaces)
{
    warp_order *wo = order_of(w);
    struct {
        struct cluster_order *co;
        int spaces;
    } f = {w->cta->cluster->order, spaces};
    for (uint32_t lanes = mask; lanes; lanes &= lanes - 1) {
        view *v = &wo->lane[__builtin_ctz(lanes)];
        for (int space = 0; space < 2; space++) {
            if (!(spaces & (space ? FENCE_GLOBAL : FENCE_SHARED))) continue;
            v->fenced[space] = v->epoch;
            v->cp_fenced[space] = v->done[STREAM_CP_ASYNC];
        }
    }
    if (f.co->cp_asyncs) change_lanes(w, mask, fence_cp_async, &f);
    step(wo);
}

void order_proxy_fence(warp *w, int lane, int spaces)
{
    order_proxy_fence_lanes(w, 1u << lane, spaces);
}

// The warp's own loads and stores of TMEM that its wait::ld and wait::st have seen complete.
typedef struct {
    uint32_t tensor[2], number[2];
} own_tensor;

static void publish_tensor(knowledge *k, void *with)
{
    const own_tensor *own = with;
    vector_take(&k->of[K_CHANNEL], k->of[K_TENSOR]);
    for (int i = 0; i < 2; i++)
        if (own->number[i]) vector_raise(&k->of[K_CHANNEL], own->tensor[i], own->number[i]);
}

static void raise_channel(knowledge *k, void *with)
{
    const uint32_t *i = with;
    vector_raise(&k->of[K_CHANNEL], i[0], i[1]);
}

void order_tcgen05_before(warp *w, uint32_t mask)
{
    warp_order *wo = order_of(w);
    const struct cluster_order *co = w->cta->cluster->order;
    own_tensor own = {{0}, {0}};
    static const int streams[2] = {STREAM_TCGEN05_LD, STREAM_TCGEN05_ST};
    for (int i = 0; i < 2; i++) {
        uint32_t c = wo->component[streams[i]];
        if (!c) continue;
        own.tensor[i] = co->component[c].tensor;
        own.number[i] = wo->lane[__builtin_ctz(mask)].done[streams[i]];
    }
    change_lanes(w, mask, publish_tensor, &own);
    // What a thread has issued, for those whose operations are pipelined after it.
    for (uint32_t lanes = mask; lanes; lanes &= lanes - 1) {
        int i = __builtin_ctz(lanes);
        uint32_t c = wo->lane_component[i][STREAM_TCGEN05_MMA];
        uint32_t issued[2] = {c ? co->component[c].tensor + 1 : 0, wo->lane_issued[i][STREAM_TCGEN05_MMA]};
        if (c) change_lanes(w, 1u << i, raise_channel, issued);
    }
}

static void take_channel(knowledge *k, void *with)
{
    (void)with;
    vector_take(&k->of[K_TENSOR], k->of[K_CHANNEL]);
}

void order_tcgen05_after(warp *w, uint32_t mask)
{
    change_lanes(w, mask, take_channel, NULL);
}

static void grids_done(knowledge *k, void *with)
{
    (void)with;
    k->grids_done = true;
}

void order_grids_done(warp *w, uint32_t mask)
{
    change_lanes(w, mask, grids_done, NULL);
}

init_event order_init_event(warp *w, const inst *in, int lane)
{
    warp_order *wo = order_of(w);
    struct cluster_order *co = w->cta->cluster->order;
    if (!wo->init_component[lane]) wo->init_component[lane] = co->tensor_components++;
    init_event i = {.channel = wo->init_component[lane], .number = ++wo->inits[lane]};
    i.e = (entry){.in = in, .component = wo->base, .number = wo->epoch, .lanes = 1u << lane, .mask = 0xffff};
    i.e.flags = ENTRY_WRITE;
    return i;
}

// fence.mbarrier_init.release.cluster
void order_mbarrier_init(warp *w, int lane)
{
    warp_order *wo = order_of(w);
    if (!wo->inits[lane]) return;
    uint32_t i[2] = {wo->init_component[lane], wo->inits[lane]};
    change_lanes(w, 1u << lane, raise_channel, i);
}

static bool knows_access(const view *v, const entry *e)
{
    uint32_t thread = e->component + (uint32_t)__builtin_ctz(e->lanes);
    return thread == v->self ? e->number <= v->epoch : vector_has(v->k->of[K_GENERIC], thread, e->number);
}

bool order_knows_started(const view *v, const cta *c)
{
    return vector_has(v->k->of[K_CHANNEL], (uint32_t)c->rank, 1);
}

init_knowledge order_knows_init(const view *v, const init_event *i, bool asynchronously)
{
    if (vector_has(v->k->of[K_CHANNEL], i->channel, i->number)) return INIT_KNOWN;
    uint32_t thread = i->e.component + (uint32_t)__builtin_ctz(i->e.lanes);
    bool fenced =
        thread == v->self ? i->e.number <= v->fenced[0] : vector_has(v->k->of[K_ASYNC_SHARED], thread, i->e.number);
    if (fenced) return INIT_KNOWN;
    if (!knows_access(v, &i->e)) return INIT_UNKNOWN;
    return asynchronously ? INIT_UNFENCED : INIT_KNOWN;
}

// ------------------------------------------------------------------------------------- synchronisation by locations

// Signals of addresses in shared memory, that atomics and strong accesses release to and acquire from.
struct located {
    struct located *next;
    uint64_t location;
    signal *s;
};

// The same in global memory, for all clusters: raw copies, since clusters run on different threads.
typedef struct {
    uint32_t serial, n[2]; // generic, async
    uint32_t *of[2];
} other_release;

typedef struct global_release {
    struct global_release *next;
    uint32_t cluster;
    int rank, scope;
    bool grids_done;
    uint32_t n[3]; // generic, async shared, async global
    uint32_t *of[3];
    // What the releasing thread knew of other clusters.
    int others;
    other_release *other;
} global_release;

typedef struct global_location {
    struct global_location *next;
    uint64_t address;
    global_release *releases;
} global_location;

enum { LOCATIONS = 1024 };
static struct {
    pthread_mutex_t mutex;
    global_location *at[LOCATIONS];
    uint32_t last_serial, run_serial;
} shared_order = {.mutex = PTHREAD_MUTEX_INITIALIZER};

static void release_free(global_release *r)
{
    for (int i = 0; i < 3; i++) free(r->of[i]);
    for (int i = 0; i < r->others; i++)
        for (int j = 0; j < 2; j++) free(r->other[i].of[j]);
    free(r->other);
    free(r);
}

static void releases_free(global_release **list)
{
    while (*list) {
        global_release *r = *list;
        *list = r->next;
        release_free(r);
    }
}

static void locations_free(void)
{
    for (int i = 0; i < LOCATIONS; i++)
        while (shared_order.at[i]) {
            global_location *l = shared_order.at[i];
            shared_order.at[i] = l->next;
            releases_free(&l->releases);
            free(l);
        }
}

static void raw_take(uint32_t **to, uint32_t *n, const clock_vector *from)
{
    if (!from) return;
    if (*n < from->n) {
        *to = realloc(*to, from->n * sizeof **to);
        if (!*to) abort();
        memset(*to + *n, 0, (from->n - *n) * sizeof **to);
        *n = from->n;
    }
    for (uint32_t i = 0; i < from->n; i++)
        if ((*to)[i] < from->v[i]) (*to)[i] = from->v[i];
}

static global_release *release_of(global_location *l, uint32_t cluster, int rank, scope sc)
{
    for (global_release *r = l->releases; r; r = r->next)
        if (r->cluster == cluster && r->rank == rank && r->scope == (int)sc) return r;
    global_release *r = calloc(1, sizeof *r);
    if (!r) abort();
    r->cluster = cluster;
    r->rank = rank;
    r->scope = (int)sc;
    r->next = l->releases;
    return l->releases = r;
}

static other_release *other_of(global_release *r, uint32_t serial)
{
    for (int i = 0; i < r->others; i++)
        if (r->other[i].serial == serial) return &r->other[i];
    r->other = realloc(r->other, (size_t)(r->others + 1) * sizeof *r->other);
    if (!r->other) abort();
    r->other[r->others] = (other_release){.serial = serial};
    return &r->other[r->others++];
}

static clock_vector *from_raw(const uint32_t *raw, uint32_t n)
{
    if (!n) return NULL;
    clock_vector *v = vector_new(n);
    memcpy(v->v, raw, n * sizeof *raw);
    return v;
}

static const view_kind global_views[3] = {K_GENERIC, K_ASYNC_SHARED, K_ASYNC_GLOBAL};

static void global_write(uint64_t address, const cluster *c, int rank, const knowledge *k, scope sc, bool rmw)
{
    pthread_mutex_lock(&shared_order.mutex);
    global_location **at = &shared_order.at[address / 4 % LOCATIONS];
    while (*at && (*at)->address != address) at = &(*at)->next;
    if (!*at && k) {
        *at = calloc(1, sizeof **at);
        if (!*at) abort();
        (*at)->address = address;
    }
    // A plain strong store heads a new release sequence: who reads it knows nothing of what was stored before.
    if (*at && !rmw) releases_free(&(*at)->releases);
    if (k) {
        global_release *r = release_of(*at, c->order->serial, rank, sc);
        r->grids_done |= k->grids_done;
        for (int i = 0; i < 3; i++) raw_take(&r->of[i], &r->n[i], k->of[global_views[i]]);
        for (int i = 0; k->foreign && i < k->foreign->count; i++) {
            other_release *o = other_of(r, k->foreign->of[i].serial);
            raw_take(&o->of[0], &o->n[0], k->foreign->of[i].generic);
            raw_take(&o->of[1], &o->n[1], k->foreign->of[i].async);
        }
    }
    pthread_mutex_unlock(&shared_order.mutex);
}

static void take_release(knowledge *k, const cluster *c, int rank, const global_release *r, scope sc)
{
    bool own = r->cluster == c->order->serial;
    int narrowest = r->scope < (int)sc ? r->scope : (int)sc;
    bool reaches = own ? r->rank == rank || narrowest >= SCOPE_CLUSTER : narrowest >= SCOPE_GPU;
    clock_vector *v[3];
    for (int i = 0; i < 3; i++) v[i] = from_raw(r->of[i], r->n[i]);
    if (own) {
        if (reaches)
            for (int i = 0; i < 3; i++) vector_take(&k->of[global_views[i]], v[i]);
        vector_take(&k->of[K_LAX], v[0]);
    } else if (reaches) {
        foreign_take_one(&k->foreign, r->cluster, v[0], v[2]);
    }
    for (int i = 0; i < 3; i++) vector_release(v[i]);
    if (!reaches) return;
    k->grids_done |= r->grids_done;
    for (int i = 0; i < r->others; i++) {
        clock_vector *generic = from_raw(r->other[i].of[0], r->other[i].n[0]);
        clock_vector *async = from_raw(r->other[i].of[1], r->other[i].n[1]);
        if (r->other[i].serial == c->order->serial) {
            vector_take(&k->of[K_GENERIC], generic);
            vector_take(&k->of[K_LAX], generic);
            vector_take(&k->of[K_ASYNC_GLOBAL], async);
        } else {
            foreign_take_one(&k->foreign, r->other[i].serial, generic, async);
        }
        vector_release(generic);
        vector_release(async);
    }
}

static signal *located_signal(cluster *c, uint64_t location, bool create)
{
    struct located **at = &c->order->located[location / 4 % LOCATED];
    while (*at && (*at)->location != location) at = &(*at)->next;
    if (!*at && create) {
        *at = calloc(1, sizeof **at);
        if (!*at) abort();
        (*at)->location = location;
        (*at)->s = signal_new(c);
    }
    return *at ? (*at)->s : NULL;
}

void order_strong_write(warp *w, int lane, bool global, uint64_t location, access_order o, scope sc, bool rmw)
{
    warp_order *wo = order_of(w);
    cluster *c = w->cta->cluster;
    bool releases = o == ACCESS_RELEASE || o == ACCESS_ACQ_REL;
    if (o == ACCESS_VOLATILE) sc = SCOPE_SYS;
    knowledge *k = releases ? folded(w, lane) : knowledge_retain(wo->fence[lane]);
    if (!releases && k && wo->fence_scope[lane] < sc) sc = wo->fence_scope[lane];
    if (global) {
        global_write(location, c, w->cta->rank, k, sc, rmw);
    } else {
        signal *s = located_signal(c, location, k != NULL);
        for (int i = 0; s && !rmw && i < s->ctas * 2; i++) slot_clear(&s->slot[i / 2][i % 2]);
        if (k) slot_take_knowledge(&s->slot[w->cta->rank][sc >= SCOPE_CLUSTER], k);
    }
    knowledge_release(k);
    if (releases) step(wo);
}

typedef struct {
    uint64_t address;
    const cluster *c;
    int rank;
    scope sc;
} global_acquisition;

static void acquire_global(knowledge *k, void *with)
{
    const global_acquisition *a = with;
    pthread_mutex_lock(&shared_order.mutex);
    const global_location *at = shared_order.at[a->address / 4 % LOCATIONS];
    while (at && at->address != a->address) at = at->next;
    for (const global_release *r = at ? at->releases : NULL; r; r = r->next) take_release(k, a->c, a->rank, r, a->sc);
    pthread_mutex_unlock(&shared_order.mutex);
}

void order_strong_read(warp *w, int lane, bool global, uint64_t location, access_order o, scope sc)
{
    warp_order *wo = order_of(w);
    cluster *c = w->cta->cluster;
    bool acquires = o == ACCESS_ACQUIRE || o == ACCESS_ACQ_REL;
    if (o == ACCESS_VOLATILE) sc = SCOPE_SYS;
    const signal *s = global ? NULL : located_signal(c, location, false);
    if (!global && !s) return;
    change_fn change = global ? acquire_global : acquire;
    for (scope fence = SCOPE_CTA; fence < FENCE_SCOPES; fence++) {
        scope both = !acquires && fence < sc ? fence : sc;
        global_acquisition ga = {location, c, w->cta->rank, both};
        acquisition sa = acquisition_of(w, s, both);
        void *with = global ? (void *)&ga : (void *)&sa;
        if (acquires) {
            change_lanes(w, 1u << lane, change, with);
            return;
        }
        change(observed_by(wo, lane, fence), with);
    }
}

static void take_observed(knowledge *k, void *with)
{
    const knowledge *from = with;
    take_all(k->of, from->of);
    foreign_take(&k->foreign, from->foreign);
    k->grids_done |= from->grids_done;
}

// fence.acq_rel, fence.sc, membar: acquires what relaxed reads before it have seen, and lets relaxed writes after it
// release what is before it. fence.acquire and fence.release do half of that.
void order_fence(warp *w, uint32_t mask, scope sc, int semantics)
{
    warp_order *wo = order_of(w);
    for (uint32_t lanes = mask; lanes; lanes &= lanes - 1) {
        int i = __builtin_ctz(lanes);
        for (scope s = SCOPE_CTA; semantics & FENCE_ACQUIRE && s < FENCE_SCOPES && s <= sc; s++) {
            if (!wo->observed[i][s]) continue;
            change_lanes(w, 1u << i, take_observed, wo->observed[i][s]);
            knowledge_release(wo->observed[i][s]);
            wo->observed[i][s] = NULL;
        }
        if (!(semantics & FENCE_RELEASE)) continue;
        knowledge_release(wo->fence[i]);
        wo->fence[i] = folded(w, i);
        wo->fence_scope[i] = sc;
    }
    step(wo);
}

// ------------------------------------------------------------------------------------------------------------ life

struct exits {
    clock_vector *known; // generically, by the CTA's threads when they exited
    int threads;
};

void order_cluster_start(cluster *c)
{
    struct cluster_order *co = calloc(1, sizeof *co);
    if (!co) abort();
    c->order = co;
    const int *ntid = c->grid->ntid;
    co->warps = (ntid[0] * ntid[1] * ntid[2] + LANES - 1) / LANES;
    co->exits = calloc((size_t)c->ctas, sizeof *co->exits);
    if (!co->exits) abort();
    co->tensor_components = (uint32_t)c->ctas;
    for (uint32_t t = 0; t < (uint32_t)(c->ctas * co->warps * LANES); t++) component_new(c, -1, t, false, false);
    pthread_mutex_lock(&shared_order.mutex);
    co->serial = ++shared_order.last_serial;
    if (!c->grid->first_serial) {
        c->grid->first_serial = co->serial;
        if (c->grid->index == 0) {
            shared_order.run_serial = co->serial;
            locations_free();
        }
        c->grid->run_serial = shared_order.run_serial;
    }
    pthread_mutex_unlock(&shared_order.mutex);
}

void order_cluster_end(cluster *c)
{
    struct cluster_order *co = c->order;
    for (int i = 0; i < LOCATED; i++)
        while (co->located[i]) {
            struct located *l = co->located[i];
            co->located[i] = l->next;
            signal_free(l->s);
            free(l);
        }
    for (int i = 0; i < c->ctas; i++) vector_release(co->exits[i].known);
    history_pool_free(&co->pool);
    free(co->exits);
    free(co->component);
    free(co->cp_async);
    free(co);
    c->order = NULL;
}

static struct shadow *shadow_new(size_t cells)
{
    struct shadow *s = malloc(sizeof *s);
    if (!s) abort();
    s->cells = cells;
    s->cell = calloc(cells, sizeof *s->cell);
    if (!s->cell) abort();
    return s;
}

static void shadow_free(struct shadow *s)
{
    if (s) free(s->cell);
    free(s);
}

void order_cta_start(cta *c)
{
    c->shared_shadow = shadow_new((c->shared_size + 15) / 16);
    c->tmem_shadow = c->tmem ? shadow_new(8 * 512) : NULL;
}

void order_cta_end(cta *c)
{
    shadow_free(c->shared_shadow);
    shadow_free(c->tmem_shadow);
    c->shared_shadow = c->tmem_shadow = NULL;
}

void order_warp_start(warp *w)
{
    warp_order *wo = calloc(1, sizeof *wo);
    if (!wo) abort();
    w->order = (struct thread_order *)wo;
    struct cluster_order *co = w->cta->cluster->order;
    wo->base = (uint32_t)((w->cta->rank * co->warps + w->index) * LANES);
    knowledge *k = knowledge_empty();
    vector_raise(&k->of[K_CHANNEL], (uint32_t)w->cta->rank, 1);
    for (int i = 0; i < LANES; i++) {
        wo->lane[i].k = knowledge_retain(k);
        wo->lane[i].self = wo->base + (uint32_t)i;
    }
    knowledge_release(k);
    step(wo);
}

void order_warp_end(warp *w)
{
    warp_order *wo = order_of(w);
    for (int i = 0; i < LANES; i++) {
        knowledge_release(wo->lane[i].k);
        knowledge_release(wo->fence[i]);
        for (int s = 0; s < FENCE_SCOPES; s++) knowledge_release(wo->observed[i][s]);
    }
    free(wo);
    w->order = NULL;
}

// What another CTA or an operation did to this CTA's shared memory must be known to be over by some thread of it.
static void exit_allows(cta *c, const history *h, const clock_vector *known, size_t cell, place at)
{
    cluster *cl = c->cluster;
    const struct cluster_order *co = cl->order;
    uint32_t first = (uint32_t)(c->rank * co->warps * LANES), end = first + (uint32_t)(co->warps * LANES);
    for (unsigned i = 0; i < h->count; i++) {
        const entry *e = &h->e[i];
        bool operation = e->flags & ENTRY_OPERATION, own = e->component >= first && e->component < end;
        if (!operation && own) continue;
        uint32_t thread = e->component + (operation ? 0 : (uint32_t)__builtin_ctz(e->lanes));
        if (vector_has(known, thread, e->number)) continue;
        finding_pair(cl, at, component_place(cl, e), "exit",
                     "CTA %d exits while %s %s its shared memory at 0x%x: no thread of it knows that this is over",
                     c->rank, operation ? "an asynchronous operation" : "another CTA",
                     e->flags & ENTRY_WRITE ? "writes" : "reads", (unsigned)(cell * 16));
    }
}

bool order_exit(warp *w, const inst *in, uint32_t mask)
{
    cta *c = w->cta;
    struct exits *x = &c->cluster->order->exits[c->rank];
    slot known = {.of = {vector_retain(x->known), vector_retain(x->known)}};
    slot_release(&known, w, mask);
    vector_set(&x->known, known.of[K_GENERIC]);
    slot_clear(&known);
    x->threads += __builtin_popcount(mask);
    if (x->threads < c->threads) return true;
    place at = {w, in, __builtin_ctz(mask)};
    const history *last = NULL;
    for (size_t i = 0; i < c->shared_shadow->cells; i++) {
        const history *h = c->shared_shadow->cell[i];
        if (!h || h == last) continue;
        last = h;
        exit_allows(c, h, x->known, i, at);
    }
    mbarriers_exit(c, x->known, at);
    return true;
}
