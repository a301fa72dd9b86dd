// What memory.c, order.c, mbarrier.c and async.c share: happens-before and its shadow of memory.
//
// A component is a thread of the cluster, a stream of asynchronous operations of one thread or warp, or an mbarrier
// (its number counts phases). An access is known by (component, number), and a clock vector says up to which number of
// every component somebody knows. What somebody knows depends on how it looks:
//     generic        by loads and stores of threads (scopes obeyed)
//     lax            the same as if every scope were wide enough (only for P3, and to say "scope" instead of "race")
//     async shared,  by the async proxy: a thread's own accesses get in by its own fence.proxy.async and no other's
//     async global
//     tensor         by tcgen05 operations on tensor memory: moved over from the channel by fence::after_thread_sync
//     channel        what synchronisation carries for the tensor view, relaxed or not: filled by
//                    fence::before_thread_sync and commits; also inits of mbarriers after fence.mbarrier_init, and
//                    that a CTA of the cluster has started
#ifndef PTXSIM_ORDER_H
#define PTXSIM_ORDER_H

#include "sim.h"

enum { STREAMS = STREAM_MBARRIER + 1 };
typedef enum { K_GENERIC, K_LAX, K_ASYNC_SHARED, K_ASYNC_GLOBAL, K_TENSOR, K_CHANNEL, K_COUNT } view_kind;

struct clock_vector {
    int refs;
    uint32_t n, room; // components at and after n: 0
    uint32_t v[];
};

// What is known of other clusters, through global memory.
typedef struct foreign {
    int refs, count;
    struct {
        uint32_t serial;
        clock_vector *generic, *async;
    } of[];
} foreign;

// Immutable once shared, so that lanes, operations and signals may point to one.
typedef struct knowledge {
    int refs;
    bool grids_done; // what earlier grids did is known
    clock_vector *of[K_COUNT];
    foreign *foreign; // or NULL
} knowledge;

// Whose eyes an access is checked with: a thread's now, or its when it issued an operation.
typedef struct {
    knowledge *k;
    uint32_t self; // the thread's component; its accesses up to number epoch are before
    uint32_t epoch;
    uint32_t fenced[2];     // its generic accesses up to this are visible to the async proxy: shared, global
    uint32_t done[STREAMS]; // its own streams (and its warp's) are known complete up to this
    uint32_t cp_fenced[2];  // of STREAM_CP_ASYNC (generic proxy): fenced up to this
} view;

typedef struct {
    uint32_t owner; // threads: itself; streams: the thread, or the first of the warp
    int16_t stream; // -1: a thread
    bool warp_wide;
    uint32_t tensor; // index in the tensor and channel vectors, or UINT32_MAX; STREAM_TCGEN05_MMA: the next one is for
                     // what has been issued, complete or not
} component;

enum { FENCE_SCOPES = SCOPE_GPU + 1 }; // a fence of .sys acts as one of .gpu

typedef struct {
    view lane[LANES];
    uint32_t base;               // component of lane 0
    uint32_t epoch;              // of all lanes: grows at every release or fence of any
    uint32_t component[STREAMS]; // the warp's own streams, 0: none yet
    uint32_t issued[STREAMS];
    uint32_t lane_component[LANES][STREAMS];
    uint32_t lane_issued[LANES][STREAMS];
    uint32_t inits[LANES], init_component[LANES]; // mbarrier.init: index in the channel vector, 0: none
    knowledge *fence[LANES];                      // at the last fence: what a relaxed store after it releases
    scope fence_scope[LANES];
    knowledge *observed[LANES][FENCE_SCOPES]; // by relaxed loads: what a fence of that scope after them acquires
    // try_wait: the phase that a lane found incomplete, and where; the cluster's step at the last needless return
    uint64_t waits_for[LANES], spurious_step;
    const inst *waits_at[LANES];
} warp_order;

static inline warp_order *order_of(const warp *w)
{
    return (warp_order *)w->order;
}

// ------------------------------------------------------------------------------------------------------- shadows

// One access in the history of a cell. A cell is 16 bytes of memory, or one column of 16 lanes of TMEM.
// ASYNC: not by the generic proxy.
enum {
    ENTRY_WRITE = 1,
    ENTRY_OPERATION = 2,
    ENTRY_STRONG = 4,
    ENTRY_ATOMIC = 8,
    ENTRY_NONCOHERENT = 16,
    ENTRY_ASYNC = 32
};
typedef struct {
    const inst *in;
    uint32_t component; // of threads: that of lane 0 of the warp, with the lanes
    uint32_t number;
    uint32_t lanes;   // of operations: the component of the issuing thread
    uint32_t cluster; // global memory: the serial of the cluster; else 0
    uint16_t mask;    // bytes of the cell, or lanes
    uint8_t flags, scope;
    uint32_t tile; // tcgen05 operations: kind and accumulator
} entry;

typedef struct history {
    uint32_t refs;
    uint16_t count, log2_room;
    struct history *next; // in the free list
    entry e[];
} history;

typedef struct {
    history *free[16];
    void *blocks;
    char *bump;
    size_t left;
} history_pool;
void history_pool_free(history_pool *p);
void cells_forget(history_pool *p, history **cell, size_t n);

// The last change that an accessor made: cells that were alike stay alike.
typedef struct {
    history *old, *now;
    uint16_t mask;
} memo;

enum { MEMO_SHARED_READ, MEMO_SHARED_WRITE, MEMO_TMEM_READ, MEMO_TMEM_WRITE, MEMOS };
struct agent {
    int refs;
    cluster *c;
    warp *w;
    const inst *in;
    int lane;
    stream s;
    proxy p;
    view v;
    uint32_t component, number; // STREAM_MBARRIER: of the barrier and its phase, looked up when the operation runs
    cta *barrier_owner;
    uint32_t barrier;
    bool tensor;
    tensor_kind kind;
    uint32_t tile;
    memo memo[MEMOS][2]; // whole cells, parts: an operation comes piece by piece
};

typedef enum { D_GENERIC, D_ASYNC_SHARED, D_ASYNC_GLOBAL, D_TENSOR } domain;
typedef struct {
    const view *v;
    cluster *c;
    history_pool *pool;
    domain d;
    place at;
    entry e;     // to be recorded: without its mask
    bool single; // a thread's: one cell or a few, nothing to remember
    // A store by a thread: what it writes, and what is there, with its poison. unchanged: both are known to be the
    // same.
    const void *value, *data;
    const uint8_t *poison;
    int size;
    bool unchanged;
    const char *what; // "shared memory"
    const agent *agent;
    history **cells; // the array that the access is in, and the address of its first byte: for findings
    uint64_t base;
    memo memo[2]; // of whole cells, and of parts
} accessor;

// Checks the access against the histories of n neighbouring cells, and adds it to them. A race is a finding, after
// which the run goes on.
void cells_access(accessor *x, history **cell, size_t n, uint16_t mask);
// The cells of `size` bytes from byte `offset` of an array of cells.
void cells_access_bytes(accessor *x, history **cells, uint64_t offset, size_t size);
void accessor_lane(accessor *x, int lane); // a thread's accessor goes on to another lane
void accessor_end(accessor *x);
void thread_accessor(accessor *x, warp *w, const inst *in, int lane, bool write, access_order o, scope sc, bool atomic);
void agent_accessor(accessor *x, agent *a, domain d, bool write);
void memo_release(history_pool *p, memo m[2]);
// The barrier's phase as it is now, for an agent of STREAM_MBARRIER. false: a finding.
bool agent_clock(agent *a);
// Does the operation come after the issue of this one of another thread's STREAM_TCGEN05_MMA?
bool agent_knows_issue(const agent *a, uint32_t component, uint32_t number);

struct shadow {
    history **cell;
    size_t cells;
};

// ------------------------------------------------------------------------------------------- clusters and signals

enum { LOCATED = 64 };
struct cluster_order {
    component *component;
    uint32_t components, room, tensor_components;
    history_pool pool;
    uint32_t serial;    // of the cluster, all clusters of the process counted
    uint32_t *cp_async; // components of STREAM_CP_ASYNC
    int cp_asyncs, cp_async_room;
    int warps;                        // of a CTA
    struct located *located[LOCATED]; // signals of addresses in shared memory
    struct exits *exits;              // by CTA
};
uint32_t component_new(cluster *c, int stream, uint32_t owner, bool warp_wide, bool tensor);
place component_place(const cluster *c, const entry *e);

static inline bool vector_has(const clock_vector *v, uint32_t component, uint32_t number)
{
    return v && component < v->n && v->v[component] >= number;
}
// Raises one component in a signal, for everyone who acquires from it; for the async proxy too, unless it is one of
// STREAM_CP_ASYNC.
void signal_raise(signal *s, const cta *by, uint32_t component, uint32_t number);
// The same signal again: a snapshot that later releases do not change.
signal *signal_copy(const signal *s);
// Strong loads and stores of a thread to an address that others synchronise through. location: shared window address,
// or global address.
void order_strong_write(warp *w, int lane, bool global, uint64_t location, access_order o, scope sc, bool rmw);
void order_strong_read(warp *w, int lane, bool global, uint64_t location, access_order o, scope sc);
// An init of an mbarrier: known by the thread's number like its stores, and to relaxed synchronisation and operations
// by its number in the channel once it has been fenced.
typedef struct {
    entry e;
    uint32_t channel, number;
} init_event;
init_event order_init_event(warp *w, const inst *in, int lane);
typedef enum { INIT_KNOWN, INIT_UNFENCED, INIT_UNKNOWN } init_knowledge;
init_knowledge order_knows_init(const view *v, const init_event *i, bool asynchronously);
// Whether it is known that the CTA has started: its shared memory is nobody's before. The channel's components up to
// the number of CTAs say so.
bool order_knows_started(const view *v, const cta *c);
enum { FENCE_ACQUIRE = 1, FENCE_RELEASE = 2, FENCE_ACQ_REL = 3 };
void order_fence(warp *w, uint32_t mask, scope sc, int semantics);
void order_proxy_fence_lanes(warp *w, uint32_t mask, int spaces);

// -------------------------------------------------------------------------------------------------- address windows

// Generic addresses: shared = WINDOW_SHARED + shared window address (rank << 24 | offset), and so on. Global addresses
// are themselves.
#define WINDOW_SHARED 0x0001000000000000u
#define WINDOW_LOCAL 0x0002000000000000u
#define WINDOW_PARAM 0x0003000000000000u
#define WINDOW_GLOBAL 0x0000700000000000u
#define WINDOW_MASK 0xffff000000000000u

void operations_force_tensor(const cta *c); // async.c

// memory.c: the cells behind a global address range within one page; locks the page's stripe until unlocked.
typedef struct {
    unsigned char *data;
    uint8_t *poison;
    history **cells; // of the page
    history_pool *pool;
    uint64_t offset; // of the address in the page
    size_t size;     // up to the page's end
    uint64_t page_address;
    void *lock;
} global_piece;
enum { PAGE = 4096 };
bool global_lock(uint64_t address, size_t size, global_piece *p);
void global_unlock(global_piece *p);
// "misses ... by n bytes": where an address outside every allocation is.
const char *global_where(uint64_t address, char *text, size_t room);

// Where an address of a thread leads. data and poison (NULL: never) are valid between access_begin and access_end.
typedef struct {
    enum { LOCATION_SHARED, LOCATION_GLOBAL, LOCATION_PRIVATE, LOCATION_PARAM } kind;
    cta *owner;
    uint32_t offset;
    uint64_t address;
    unsigned char *data;
    uint8_t *poison;
    global_piece piece;
} location;
// Bounds and alignment; false: a finding.
bool locate(warp *w, const inst *in, int lane, space s, uint64_t address, int size, location *l);
// The check of an access of the accessor's kind, and the lock of global memory until access_end.
bool access_begin(accessor *x, location *l, int size);
void access_end(location *l);
uint64_t location_name(const location *l); // for order_strong_read and order_strong_write
bool load_with(accessor *x, space s, uint64_t address, int size, void *to, uint32_t *poison, access_order o, scope sc);
bool store_with(accessor *x, space s, uint64_t address, int size, const void *from, uint32_t poison, access_order o,
                scope sc);

// atom.c, for the table in ldst.c
const char *decode_atom(inst *in, const kernel *k);
const char *decode_red(inst *in, const kernel *k);

// Live mbarriers of a CTA: one bit for each 8 bytes of its shared window.
struct mbarriers {
    uint64_t live[(1 << 18) / 8 / 64];
    struct mbarrier *first, *recent; // also those that are no longer alive
    int count;                       // of the live ones
};
static inline bool mbarrier_in(const cta *c, uint32_t offset, size_t size)
{
    const struct mbarriers *m = c->mbarriers;
    if (!m->count) return false;
    uint32_t first = offset / 8, last = (uint32_t)(offset + size - 1) / 8;
    for (uint32_t i = first; i <= last; i++)
        if (m->live[i / 64] >> i % 64 & 1) return true;
    return false;
}
// The component and number that an operation (of the generic proxy: st.async) gets which completes on the barrier now.
// false: no live mbarrier there.
bool mbarrier_clock(cta *owner, uint32_t offset, bool generic, uint32_t *component, uint32_t *number);
// cp.async.mbarrier.arrive without .noinc: the arrival that it will make is one more that the phase waits for.
bool mbarrier_increment(cta *owner, uint32_t offset, place at);
// Exit of the CTA: every signal to its mbarriers from elsewhere must be known to have arrived.
void mbarriers_exit(cta *c, const clock_vector *known, place at);

#endif
