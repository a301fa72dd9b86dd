// Address spaces: what an address means, bounds, alignment, poison, and accesses by threads and by operations.
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "order.h"

// -------------------------------------------------------------------------------------------------- global memory

// Host memory that the device sees. Allocations are GUARD bytes apart, so that an access that misses one hits none.
typedef struct {
    uint64_t address; // same low 4 bits as the host pointer
    size_t size;
    unsigned char *host;
    uint8_t *poison;     // a byte a byte
    uint64_t first_page; // address of page 0
    history ***page;     // cells of each page, once it has been touched
    size_t pages;
    int users;
} allocation;

enum { STRIPES = 64 };
static const uint64_t GUARD = 1 << 20;

static struct {
    allocation **of; // by address
    size_t count, room;
    uint64_t next;
    pthread_mutex_t mutex; // of registration, which never happens during a launch
    struct {
        pthread_mutex_t mutex;
        history_pool pool;
    } stripe[STRIPES]; // of pages, by number
    pthread_once_t once;
} global = {.next = WINDOW_GLOBAL, .mutex = PTHREAD_MUTEX_INITIALIZER, .once = PTHREAD_ONCE_INIT};

static void start_stripes(void)
{
    for (int i = 0; i < STRIPES; i++) pthread_mutex_init(&global.stripe[i].mutex, NULL);
}

// The last allocation at or before the address.
static size_t allocation_before(uint64_t address)
{
    size_t low = 0, high = global.count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (global.of[middle]->address <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low; // count of those at or before
}

static allocation *allocation_at(uint64_t address, size_t size)
{
    size_t n = allocation_before(address);
    if (!n) return NULL;
    allocation *a = global.of[n - 1];
    return address - a->address <= a->size && a->size - (address - a->address) >= size ? a : NULL;
}

uint64_t ptxsim_register(void *data, size_t bytes, bool poisoned)
{
    if (!data || !bytes || bytes > (uint64_t)1 << 40) return 0;
    pthread_once(&global.once, start_stripes);
    pthread_mutex_lock(&global.mutex);
    uint64_t result = 0;
    unsigned char *host = data;
    for (size_t i = 0; i < global.count; i++) {
        allocation *a = global.of[i];
        if (host >= a->host + a->size || host + bytes <= a->host) continue;
        bool inside = host >= a->host && host + bytes <= a->host + a->size;
        if (inside) {
            a->users++;
            result = a->address + (uint64_t)(host - a->host);
            if (poisoned) memset(a->poison + (host - a->host), 1, bytes);
        }
        pthread_mutex_unlock(&global.mutex);
        return result; // one byte has one address: what overlaps in part is refused
    }
    allocation *a = calloc(1, sizeof *a);
    if (global.count == global.room) {
        size_t room = global.room ? global.room * 2 : 64;
        allocation **of = realloc(global.of, room * sizeof *of);
        if (of) {
            global.of = of;
            global.room = room;
        }
    }
    if (a && global.count < global.room) {
        a->first_page = global.next;
        a->address = global.next + ((uintptr_t)host & 15);
        a->size = bytes;
        a->host = host;
        a->pages = (bytes + 15 + PAGE) / PAGE;
        a->page = calloc(a->pages, sizeof *a->page);
        a->poison = calloc(bytes, 1);
        a->users = 1;
    }
    if (a && a->page && a->poison) {
        if (poisoned) memset(a->poison, 1, bytes);
        global.of[global.count++] = a; // addresses only grow
        global.next += (bytes + 2 * GUARD) / GUARD * GUARD + GUARD;
        result = a->address;
    } else if (a) {
        free(a->page);
        free(a->poison);
        free(a);
    }
    pthread_mutex_unlock(&global.mutex);
    return result;
}

void ptxsim_unregister(uint64_t address)
{
    pthread_mutex_lock(&global.mutex);
    size_t n = allocation_before(address);
    allocation *a = n ? global.of[n - 1] : NULL;
    if (a && address - a->address < a->size && --a->users == 0) {
        memmove(&global.of[n - 1], &global.of[n], (global.count - n) * sizeof *global.of);
        global.count--;
        for (size_t i = 0; i < a->pages; i++) {
            if (!a->page[i]) continue;
            size_t stripe = (a->first_page / PAGE + i) % STRIPES;
            cells_forget(&global.stripe[stripe].pool, a->page[i], PAGE / 16);
            free(a->page[i]);
        }
        free(a->page);
        free(a->poison);
        free(a);
        if (!global.count) {
            for (int i = 0; i < STRIPES; i++) history_pool_free(&global.stripe[i].pool);
            free(global.of);
            global.of = NULL;
            global.room = 0;
        }
    }
    pthread_mutex_unlock(&global.mutex);
}

size_t ptxsim_poisoned(uint64_t address, size_t bytes)
{
    const allocation *a = allocation_at(address, bytes);
    size_t n = 0;
    for (size_t i = 0; a && i < bytes; i++) n += a->poison[address - a->address + i];
    return n;
}

void *ptxsim_host(uint64_t address, size_t bytes)
{
    const allocation *a = allocation_at(address, bytes);
    return a ? a->host + (address - a->address) : NULL;
}

bool global_range(cluster *c, uint64_t address, size_t size, unsigned char **data, uint8_t **poison)
{
    (void)c;
    const allocation *a = allocation_at(address, size);
    if (!a) return false;
    *data = a->host + (address - a->address);
    *poison = a->poison + (address - a->address);
    return true;
}

const char *global_where(uint64_t address, char *text, size_t room)
{
    size_t n = allocation_before(address);
    const allocation *a = n ? global.of[n - 1] : NULL, *next = n < global.count ? global.of[n] : NULL;
    if (a && address - a->address < a->size)
        snprintf(text, room, "the last %llu bytes of an allocation of %zu",
                 (unsigned long long)(a->size - (address - a->address)), a->size);
    else if (a && address - a->address - a->size < GUARD)
        snprintf(text, room, "%llu bytes after the end of an allocation of %zu",
                 (unsigned long long)(address - a->address - a->size), a->size);
    else if (next && next->address - address < GUARD)
        snprintf(text, room, "%llu bytes before an allocation of %zu", (unsigned long long)(next->address - address),
                 next->size);
    else
        snprintf(text, room, "nowhere near an allocation");
    return text;
}

bool global_lock(uint64_t address, size_t size, global_piece *p)
{
    allocation *a = allocation_at(address, size);
    if (!a) return false;
    uint64_t in = address - a->first_page, number = in / PAGE;
    size_t stripe = (a->first_page / PAGE + number) % STRIPES;
    p->offset = in % PAGE;
    p->size = PAGE - p->offset < size ? PAGE - p->offset : size;
    p->data = a->host + (address - a->address);
    p->poison = a->poison + (address - a->address);
    p->pool = &global.stripe[stripe].pool;
    p->lock = &global.stripe[stripe].mutex;
    p->page_address = a->first_page + number * PAGE;
    pthread_mutex_lock(p->lock);
    if (!a->page[number]) {
        a->page[number] = calloc(PAGE / 16, sizeof *a->page[number]);
        if (!a->page[number]) abort();
    }
    p->cells = a->page[number];
    return true;
}

void global_unlock(global_piece *p)
{
    pthread_mutex_unlock(p->lock);
}

// --------------------------------------------------------------------------------------------------- life of a CTA

void memory_cta_start(cta *c)
{
    c->shared = calloc(1, c->shared_size + 16);
    c->shared_poison = malloc(c->shared_size + 16);
    if (!c->shared || !c->shared_poison) abort();
    memset(c->shared_poison, 1, c->shared_size + 16);
}

void memory_cta_end(cta *c)
{
    free(c->shared);
    free(c->shared_poison);
    c->shared = NULL;
    c->shared_poison = NULL;
}

struct local_memory {
    size_t size; // of a thread
    unsigned char *data;
    uint8_t *poison;
};

void memory_warp_start(warp *w)
{
    w->local = calloc(1, sizeof *w->local);
    if (!w->local) abort();
    size_t size = w->cta->cluster->grid->kernel->local_bytes;
    w->local->size = size;
    if (!size) return;
    w->local->data = calloc(LANES, size);
    w->local->poison = malloc(LANES * size);
    if (!w->local->data || !w->local->poison) abort();
    memset(w->local->poison, 1, LANES * size);
}

void memory_warp_end(warp *w)
{
    if (w->local) {
        free(w->local->data);
        free(w->local->poison);
    }
    free(w->local);
    w->local = NULL;
}

cta *shared_owner(cluster *c, uint64_t address, uint32_t *offset)
{
    uint64_t rank = address >> 24;
    *offset = address & 0xffffff;
    return rank < (uint64_t)c->ctas ? &c->cta[rank] : NULL;
}

// ------------------------------------------------------------------------------------------------------- locations

static bool outside(warp *w, const inst *in, int lane, const char *what, uint64_t address, int size)
{
    finding(w->cta->cluster, (place){w, in, lane}, "out-of-bounds", "%d bytes at 0x%llx: %s", size,
            (unsigned long long)address, what);
    return false;
}

static bool locate_shared(warp *w, const inst *in, int lane, uint64_t address, int size, bool own_only, location *l)
{
    l->owner = shared_owner(w->cta->cluster, address, &l->offset);
    if (!l->owner) return outside(w, in, lane, "not in the shared memory of this cluster", address, size);
    if (own_only && l->owner != w->cta)
        return outside(w, in, lane, "shared memory of another CTA, which .shared::cta does not reach", address, size);
    if (l->offset < SHARED_RESERVED)
        return outside(w, in, lane, "in the first 1024 bytes of shared memory, which belong to the system", address,
                       size);
    if (l->offset + (uint64_t)size > l->owner->shared_size)
        return outside(w, in, lane, "past the end of shared memory", address, size);
    if (l->owner->exited) {
        finding(w->cta->cluster, (place){w, in, lane}, "exit", "shared memory of CTA %d, which has exited",
                l->owner->rank);
        return false;
    }
    if (l->owner != w->cta && !order_knows_started(&order_of(w)->lane[lane], l->owner))
        finding(w->cta->cluster, (place){w, in, lane}, "race",
                "shared memory of CTA %d: nothing says that this CTA has started", l->owner->rank);
    l->kind = LOCATION_SHARED;
    l->data = l->owner->shared + l->offset;
    l->poison = l->owner->shared_poison + l->offset;
    return true;
}

bool locate(warp *w, const inst *in, int lane, space s, uint64_t address, int size, location *l)
{
    uint64_t window = address & WINDOW_MASK, low = address & ~WINDOW_MASK;
    if (address % (uint64_t)size) {
        finding(w->cta->cluster, (place){w, in, lane}, "misaligned", "%d bytes at 0x%llx", size,
                (unsigned long long)address);
        return false;
    }
    if (s == SPACE_GENERIC) {
        if (window == WINDOW_SHARED) return locate_shared(w, in, lane, low, size, false, l);
        s = window == WINDOW_LOCAL ? SPACE_LOCAL : window == WINDOW_PARAM ? SPACE_PARAM : SPACE_GLOBAL;
    }
    switch (s) {
    case SPACE_SHARED: return locate_shared(w, in, lane, address, size, true, l);
    case SPACE_SHARED_CLUSTER: return locate_shared(w, in, lane, address, size, false, l);
    case SPACE_LOCAL:
        if (low + (uint64_t)size > w->local->size)
            return outside(w, in, lane, "past the end of the thread's local memory", address, size);
        l->kind = LOCATION_PRIVATE;
        l->data = w->local->data + (size_t)lane * w->local->size + low;
        l->poison = w->local->poison + (size_t)lane * w->local->size + low;
        return true;
    case SPACE_PARAM:
        if (low + (uint64_t)size > w->cta->cluster->grid->kernel->param_bytes)
            return outside(w, in, lane, "past the kernel's parameters", address, size);
        l->kind = LOCATION_PARAM;
        l->data = w->cta->cluster->grid->params + low;
        l->poison = NULL;
        return true;
    default:
        l->kind = LOCATION_GLOBAL;
        l->address = address;
        if (allocation_at(address, (size_t)size)) return true;
        char text[128];
        return outside(w, in, lane, global_where(address, text, sizeof text), address, size);
    }
}

// ------------------------------------------------------------------------------------------- accesses by threads

static uint32_t poison_bits(const uint8_t *bytes, int size)
{
    uint32_t bits = 0;
    for (int i = 0; i < size; i += 8) {
        uint64_t eight = 0;
        int n = size - i < 8 ? size - i : 8;
        memcpy(&eight, bytes + i, (size_t)n);
        if (!eight) continue;
        for (int j = 0; j < n; j++) bits |= (uint32_t)(eight >> 8 * j & 1) << (i + j);
    }
    return bits;
}

static void poison_spread(uint8_t *bytes, int size, uint32_t bits)
{
    if (!bits) {
        memset(bytes, 0, (size_t)size);
        return;
    }
    for (int i = 0; i < size; i++) bytes[i] = bits >> i & 1;
}

static bool live_mbarrier(accessor *x, const location *l, int size)
{
    if (!mbarrier_in(l->owner, l->offset, (size_t)size)) return false;
    finding(x->c, x->at, "mbarrier",
            "%d bytes at 0x%x of CTA %d are in a live mbarrier, which only mbarrier "
            "instructions may touch",
            size, l->offset, l->owner->rank);
    return true;
}

static void there(accessor *x, const location *l, int size)
{
    x->data = l->data;
    x->poison = l->poison;
    x->size = size;
}

bool access_begin(accessor *x, location *l, int size)
{
    if (l->kind == LOCATION_SHARED) {
        if (live_mbarrier(x, l, size)) return false;
        x->what = "shared memory";
        x->base = (uint64_t)l->owner->rank << 24;
        there(x, l, size);
        cells_access_bytes(x, l->owner->shared_shadow->cell, l->offset, (size_t)size);
        return true;
    }
    if (l->kind != LOCATION_GLOBAL) return true;
    global_lock(l->address, (size_t)size, &l->piece);
    l->data = l->piece.data;
    l->poison = l->piece.poison;
    history_pool *own = x->pool;
    x->pool = l->piece.pool;
    x->what = "global memory";
    x->base = l->piece.page_address;
    x->e.cluster = x->c->order->serial;
    there(x, l, size);
    cells_access_bytes(x, l->piece.cells, l->piece.offset, (size_t)size);
    accessor_end(x);
    x->pool = own;
    return true;
}

void access_end(location *l)
{
    if (l->kind == LOCATION_GLOBAL) global_unlock(&l->piece);
}

uint64_t location_name(const location *l)
{
    return l->kind == LOCATION_SHARED ? (uint64_t)l->owner->rank << 24 | l->offset : l->address;
}

static bool orders(const location *l, access_order o)
{
    return o != ACCESS_WEAK && (l->kind == LOCATION_SHARED || l->kind == LOCATION_GLOBAL);
}

bool load_with(accessor *x, space s, uint64_t address, int size, void *to, uint32_t *poison, access_order o, scope sc)
{
    warp *w = (warp *)x->at.w;
    location l;
    if (!locate(w, x->at.in, x->at.lane, s, address, size, &l) || !access_begin(x, &l, size)) return false;
    memcpy(to, l.data, (size_t)size);
    *poison = l.poison ? poison_bits(l.poison, size) : 0;
    // Before another cluster may write here: what is acquired belongs to the value.
    if (orders(&l, o)) order_strong_read(w, x->at.lane, l.kind == LOCATION_GLOBAL, location_name(&l), o, sc);
    access_end(&l);
    return true;
}

bool store_with(accessor *x, space s, uint64_t address, int size, const void *from, uint32_t poison, access_order o,
                scope sc)
{
    warp *w = (warp *)x->at.w;
    location l;
    if (!locate(w, x->at.in, x->at.lane, s, address, size, &l)) return false;
    if (l.kind == LOCATION_PARAM)
        return outside(w, x->at.in, x->at.lane, "kernel parameters are constant", address, size);
    if (poison && l.kind == LOCATION_GLOBAL)
        finding(x->c, x->at, "poison", "a value that nobody wrote is stored to global memory at 0x%llx",
                (unsigned long long)address);
    x->value = poison ? NULL : from;
    if (!access_begin(x, &l, size)) return false;
    memcpy(l.data, from, (size_t)size);
    poison_spread(l.poison, size, poison);
    // Before another cluster may read here: what is released belongs to the value.
    if (orders(&l, o)) order_strong_write(w, x->at.lane, l.kind == LOCATION_GLOBAL, location_name(&l), o, sc, false);
    access_end(&l);
    return true;
}

bool load_bytes(warp *w, const inst *in, int lane, space s, uint64_t address, int size, void *to, uint32_t *poison,
                access_order o, scope sc)
{
    accessor x;
    thread_accessor(&x, w, in, lane, false, o, sc, false);
    bool fine = load_with(&x, s, address, size, to, poison, o, sc);
    accessor_end(&x);
    return fine;
}

bool store_bytes(warp *w, const inst *in, int lane, space s, uint64_t address, int size, const void *from,
                 uint32_t poison, access_order o, scope sc)
{
    accessor x;
    thread_accessor(&x, w, in, lane, true, o, sc, false);
    bool fine = store_with(&x, s, address, size, from, poison, o, sc);
    accessor_end(&x);
    return fine;
}

// ----------------------------------------------------------------------------------------- accesses by operations

static bool agent_bounds(agent *a, const cta *c, uint32_t offset, size_t size)
{
    if (offset < SHARED_RESERVED || offset + size > c->shared_size) {
        finding(a->c, agent_place(a), "out-of-bounds",
                "%zu bytes at 0x%x of CTA %d, whose shared memory is 0x400 to 0x%zx", size, offset, c->rank,
                c->shared_size);
        return false;
    }
    if (c->exited) {
        finding(a->c, agent_place(a), "exit", "shared memory of CTA %d, which has exited", c->rank);
        return false;
    }
    if (c != a->w->cta && !order_knows_started(&a->v, c))
        finding(a->c, agent_place(a), "race", "shared memory of CTA %d: nothing says that this CTA has started",
                c->rank);
    if (mbarrier_in(c, offset, size)) {
        finding(a->c, agent_place(a), "mbarrier", "%zu bytes at 0x%x of CTA %d hold a live mbarrier", size, offset,
                c->rank);
        return false;
    }
    return true;
}

static domain agent_domain(const agent *a, domain async)
{
    return a->p == PROXY_GENERIC ? D_GENERIC : async;
}

static void begin(accessor *x, agent *a, domain d, bool write, int memo_index, const char *what, uint64_t base)
{
    agent_accessor(x, a, d, write);
    memcpy(x->memo, a->memo[memo_index], sizeof x->memo);
    x->what = what;
    x->base = base;
}

static void end(accessor *x, agent *a, int memo_index)
{
    memcpy(a->memo[memo_index], x->memo, sizeof x->memo);
}

static bool agent_shared(agent *a, cta *c, uint32_t offset, size_t size, bool write, bool atomic)
{
    if (!size) return true;
    if (!agent_bounds(a, c, offset, size) || !agent_clock(a)) return false;
    accessor x;
    int memo_index = write ? MEMO_SHARED_WRITE : MEMO_SHARED_READ;
    begin(&x, a, agent_domain(a, D_ASYNC_SHARED), write, memo_index, "shared memory", (uint64_t)c->rank << 24);
    if (atomic) {
        x.e.flags |= ENTRY_STRONG | ENTRY_ATOMIC;
        x.e.scope = SCOPE_CLUSTER;
    }
    cells_access_bytes(&x, c->shared_shadow->cell, offset, size);
    end(&x, a, memo_index);
    return true;
}

bool agent_read_shared(agent *a, cta *c, uint32_t offset, size_t size, void *to, uint8_t *poison)
{
    if (!agent_shared(a, c, offset, size, false, false)) return false;
    memcpy(to, c->shared + offset, size);
    memcpy(poison, c->shared_poison + offset, size);
    return true;
}

bool agent_write_shared(agent *a, cta *c, uint32_t offset, size_t size, const void *from, const uint8_t *poison)
{
    if (!agent_shared(a, c, offset, size, true, false)) return false;
    memcpy(c->shared + offset, from, size);
    if (poison)
        memcpy(c->shared_poison + offset, poison, size);
    else
        memset(c->shared_poison + offset, 0, size);
    return true;
}

bool agent_read_shared_runs(agent *a, cta *c, const shared_run *runs, int count, void *to, uint8_t *poison)
{
    if (!agent_clock(a)) return false;
    accessor x;
    begin(&x, a, agent_domain(a, D_ASYNC_SHARED), false, MEMO_SHARED_READ, "shared memory", (uint64_t)c->rank << 24);
    unsigned char *data = to;
    bool fine = true;
    for (int i = 0; i < count && fine; i++) {
        shared_run r = runs[i];
        if (!r.size) continue;
        fine = agent_bounds(a, c, r.offset, r.size);
        if (!fine) break;
        cells_access_bytes(&x, c->shared_shadow->cell, r.offset, r.size);
        memcpy(data, c->shared + r.offset, r.size);
        memcpy(poison, c->shared_poison + r.offset, r.size);
        data += r.size;
        poison += r.size;
    }
    end(&x, a, MEMO_SHARED_READ);
    return fine;
}

bool agent_reduce_shared(agent *a, cta *c, uint32_t offset, size_t size, const void *from, const uint8_t *poison,
                         combine_fn f)
{
    if (!agent_shared(a, c, offset, size, true, true)) return false;
    f(c->shared + offset, from, size);
    for (size_t i = 0; poison && i < size; i++) c->shared_poison[offset + i] |= poison[i];
    return true;
}

static bool any_poison(const uint8_t *poison, size_t size)
{
    static const uint8_t none[256];
    for (; size > sizeof none; poison += sizeof none, size -= sizeof none)
        if (memcmp(poison, none, sizeof none)) return true;
    return memcmp(poison, none, size) != 0;
}

typedef enum { GLOBAL_READ, GLOBAL_WRITE, GLOBAL_REDUCE } global_act;
static bool agent_global(agent *a, uint64_t address, size_t size, global_act act, void *to, const void *from,
                         uint8_t *poison_out, const uint8_t *poison_in, combine_fn f)
{
    if (!size) return true;
    if (!allocation_at(address, size)) {
        char text[128];
        finding(a->c, agent_place(a), "out-of-bounds", "%zu bytes of global memory at 0x%llx: %s", size,
                (unsigned long long)address, global_where(address, text, sizeof text));
        return false;
    }
    if (poison_in && any_poison(poison_in, size))
        finding(a->c, agent_place(a), "poison", "bytes that nobody wrote reach global memory at 0x%llx",
                (unsigned long long)address);
    if (!agent_clock(a)) return false;
    for (size_t done = 0; done < size;) {
        global_piece p;
        global_lock(address + done, size - done, &p);
        accessor x;
        agent_accessor(&x, a, agent_domain(a, D_ASYNC_GLOBAL), act != GLOBAL_READ);
        x.pool = p.pool;
        x.what = "global memory";
        x.base = p.page_address;
        x.e.cluster = a->c->order->serial;
        if (act == GLOBAL_REDUCE) {
            x.e.flags |= ENTRY_STRONG | ENTRY_ATOMIC;
            x.e.scope = SCOPE_GPU;
        }
        cells_access_bytes(&x, p.cells, p.offset, p.size);
        accessor_end(&x);
        if (act == GLOBAL_READ) {
            memcpy((char *)to + done, p.data, p.size);
            memcpy(poison_out + done, p.poison, p.size);
        } else if (act == GLOBAL_WRITE) {
            memcpy(p.data, (const char *)from + done, p.size);
            memset(p.poison, 0, p.size);
        } else {
            if (any_poison(p.poison, p.size))
                finding(a->c, agent_place(a), "poison",
                        "a reduction into bytes of global memory at 0x%llx that nobody wrote",
                        (unsigned long long)(address + done));
            f(p.data, (const char *)from + done, p.size);
            memset(p.poison, 0, p.size);
        }
        global_unlock(&p);
        done += p.size;
    }
    return true;
}

bool agent_read_global(agent *a, uint64_t address, size_t size, void *to, uint8_t *poison)
{
    return agent_global(a, address, size, GLOBAL_READ, to, NULL, poison, NULL, NULL);
}

bool agent_write_global(agent *a, uint64_t address, size_t size, const void *from, const uint8_t *poison)
{
    return agent_global(a, address, size, GLOBAL_WRITE, NULL, from, NULL, poison, NULL);
}

bool agent_reduce_global(agent *a, uint64_t address, size_t size, const void *from, const uint8_t *poison, combine_fn f)
{
    return agent_global(a, address, size, GLOBAL_REDUCE, NULL, from, NULL, poison, f);
}

// ----------------------------------------------------------------------------------------------------------- TMEM

// Cells of TMEM: 8 groups of 16 lanes, each with 512 columns.
static void tmem_cells(accessor *x, cta *c, int lane0, int lanes, int column0, int columns)
{
    x->cells = c->tmem_shadow->cell;
    for (int group = lane0 / 16; group * 16 < lane0 + lanes; group++) {
        int first = lane0 > group * 16 ? lane0 - group * 16 : 0;
        int last = lane0 + lanes < group * 16 + 16 ? lane0 + lanes - group * 16 : 16;
        uint16_t mask = (uint16_t)(((1u << (last - first)) - 1) << first);
        cells_access(x, c->tmem_shadow->cell + group * 512 + column0, (size_t)columns, mask);
    }
}

void agent_access_tmem(agent *a, cta *c, int lane0, int lanes, int column0, int columns, bool write)
{
    accessor x;
    int memo_index = write ? MEMO_TMEM_WRITE : MEMO_TMEM_READ;
    begin(&x, a, D_TENSOR, write, memo_index, "tensor memory", 0);
    tmem_cells(&x, c, lane0, lanes, column0, columns);
    end(&x, a, memo_index);
}

bool agent_read_tmem(agent *a, cta *c, int lane0, int lanes, int column0, int columns, uint32_t *to, uint8_t *poison)
{
    agent_access_tmem(a, c, lane0, lanes, column0, columns, false);
    for (int i = 0; i < lanes; i++) {
        size_t at = (size_t)(lane0 + i) * 512 + (size_t)column0;
        memcpy(to + (size_t)i * (size_t)columns, c->tmem + at, (size_t)columns * 4);
        memcpy(poison + (size_t)i * (size_t)columns, c->tmem_poison + at, (size_t)columns);
    }
    return true;
}

bool agent_write_tmem(agent *a, cta *c, int lane0, int lanes, int column0, int columns, const uint32_t *from,
                      const uint8_t *poison)
{
    agent_access_tmem(a, c, lane0, lanes, column0, columns, true);
    for (int i = 0; i < lanes; i++) {
        size_t at = (size_t)(lane0 + i) * 512 + (size_t)column0;
        memcpy(c->tmem + at, from + (size_t)i * (size_t)columns, (size_t)columns * 4);
        if (poison)
            memcpy(c->tmem_poison + at, poison + (size_t)i * (size_t)columns, (size_t)columns);
        else
            memset(c->tmem_poison + at, 0, (size_t)columns);
    }
    return true;
}

bool order_tmem_free(warp *w, const inst *in, int column0, int columns)
{
    cta *c = w->cta;
    operations_force_tensor(c);
    accessor x;
    thread_accessor(&x, w, in, __builtin_ctz(w->current | 1u << 31), true, ACCESS_WEAK, SCOPE_CTA, false);
    x.d = D_TENSOR;
    x.what = "tensor memory, which is given back,";
    tmem_cells(&x, c, 0, 128, column0, columns);
    accessor_end(&x);
    for (int group = 0; group < 8; group++)
        cells_forget(x.pool, c->tmem_shadow->cell + group * 512 + column0, (size_t)columns);
    for (int lane = 0; lane < 128; lane++) memset(c->tmem_poison + lane * 512 + column0, 0xf, (size_t)columns);
    return true;
}
