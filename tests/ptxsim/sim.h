// The simulator's inner contract: what its parts know of each other. The public C API is ptxsim.h.
//
//     parse.c      PTX text -> module, kernel, inst (unknown instruction or modifier: an error that prints it)
//     decode.c     the table of instructions: who decodes what, for which target
//     sched.c      clusters, CTAs, warps; divergence; which warp or pending operation runs next; deadlock
//     scalar.c     operands; integer arithmetic, logic, shifts
//     float.c      floating point     move.c        comparison, selection, moves
//     convert.c    cvt                 special.c    special registers
//     warp.c       shfl, vote, match, redux, elect, bar.warp.sync, activemask
//     control.c    branches, call, exit, named and cluster barriers, setmaxnreg, griddepcontrol
//     memory.c     address spaces, bounds, poison of memory, accesses of threads and operations
//     ldst.c       ld, st, ldmatrix, stmatrix, cvta, mapa, prefetch
//     atom.c       atom, red         fence.c          membar, fence
//     order.c      happens-before: vector clocks, proxies, scopes, signals (order.h)
//     shadow.c     the history of every cell of memory, and what races with it
//     mbarrier.c   mbarrier objects and instructions
//     async.c      pending operations; cp.async, bulk groups
//     tma.c        tensor maps, cp.async.bulk*, cp.reduce.async.bulk*, st.async, clusterlaunchcontrol
//     wgmma.c      wgmma, mma.sync        matmul.c  the products themselves, descriptors, formats
//     tcgen05.c    tensor memory: alloc, mma, ld, st, cp, commit, fences
//     report.c     findings, counters, deadlock report
//     launch.c     kernel parameters, grids, worker threads, the public API
#ifndef PTXSIM_SIM_H
#define PTXSIM_SIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "ptxsim.h"

enum { LANES = 32 };

// ---------------------------------------------------------------------------------------------------- program

typedef enum {
    T_NONE,
    T_PRED,
    T_B8,
    T_B16,
    T_B32,
    T_B64,
    T_B128,
    T_U8,
    T_U16,
    T_U32,
    T_U64,
    T_S8,
    T_S16,
    T_S32,
    T_S64,
    T_F16,
    T_F16X2,
    T_BF16,
    T_BF16X2,
    T_F32,
    T_F32X2,
    T_F64,
    T_TF32,
    T_E4M3,
    T_E5M2,
    T_E4M3X2,
    T_E5M2X2,
    T_E2M3X2,
    T_E3M2X2,
    T_E2M1X2,
    T_UE8M0X2
} type; // a type modifier of an instruction, or of a declared register or variable
int type_bytes(type t);

typedef enum {
    SPACE_GENERIC,
    SPACE_GLOBAL,
    SPACE_SHARED,
    SPACE_SHARED_CLUSTER,
    SPACE_LOCAL,
    SPACE_PARAM,
    SPACE_CONST
} space;

typedef enum {
    OP_NONE,
    OP_REG,     // reg
    OP_IMM,     // imm: integer bits, or the bits of a float literal widened as written (0f: f32 bits, 0d: f64 bits)
    OP_SPECIAL, // special: index of a special register
    OP_ADDRESS, // the address of a variable or parameter: symbol + imm, or a register + imm inside [ ]
    OP_LABEL,   // imm: index of the instruction
    OP_VECTOR,  // {a, b, ...}: items
    OP_BRACKET, // [a] or [a, b, {c}]: items; [reg + imm] is one item of OP_ADDRESS
    OP_SINK,    // _
    OP_PAIR,    // d|p: items
    OP_FUNCTION // call target: symbol is the index in module->kernels
} operand_kind;

typedef struct operand operand;
struct operand {
    operand_kind kind;
    bool negated; // !p, -a
    int reg;      // OP_REG: register index; OP_ADDRESS: base register, or -1
    int special;
    int symbol; // OP_ADDRESS: index of a variable (kernel->variables), or -1
    int64_t imm;
    enum { LITERAL_INTEGER, LITERAL_F32, LITERAL_F64 } literal; // OP_IMM: as written (a decimal fraction is an f64)
    operand *items;
    int count;
};

typedef struct warp warp;
typedef struct inst inst;

// What running an instruction for a set of lanes says of them.
typedef enum {
    RAN,     // done, go on at the next instruction
    JUMPED,  // done, the instruction has set the lanes' pc itself (branch, call, ret, exit)
    BLOCKED, // nothing done: run it again later, when something has changed
    FAILED   // a finding ends the run
} outcome;

// Run for the lanes in mask (guard predicate already applied; never 0).
typedef outcome (*exec_fn)(warp *w, const inst *in, uint32_t mask);

struct inst {
    exec_fn exec;
    const char *opcode; // "mbarrier.try_wait": the family's name
    const char *text;   // the whole opcode with modifiers, as written
    const char **mod;   // modifiers after the family's name, in order, without dots: "parity", "shared::cta", "b64"
    int mods;
    operand *ops;
    int nops;
    int guard; // predicate register, or -1
    bool guard_negated;
    int32_t p[12]; // the decoder's own: what exec needs to know, looked up once
    uint64_t q[2];
    int line;                     // of the PTX text
    int source_file, source_line; // .loc, 0 without
    uint8_t klass;                // inst_class
    uint8_t flags;
};
enum {
    IN_ALIGNED = 1,  // .aligned: all of the warp's live lanes must run it together
    IN_WARPSYNC = 2, // has a member mask: waits for the lanes that it names (operand index in p[11])
    IN_TOUCHES_PENDING =
        4, // reads or writes registers while their async operation is pending and copes itself (wait::ld, wgmma)
    IN_TOUCHES_WGMMA = 8 // an operand is a register that some wgmma of the module has: wgmma_registers_touched after it
};
typedef enum {
    C_INTEGER,
    C_FLOAT,
    C_CONVERT,
    C_SPECIAL_FUNCTION,
    C_MOVE,
    C_CONTROL,
    C_BRANCH,
    C_BARRIER,
    C_MBARRIER,
    C_FENCE,
    C_LOAD,
    C_STORE,
    C_ATOMIC,
    C_WARP,
    C_ASYNC_COPY,
    C_TMA,
    C_WGMMA,
    C_TCGEN05_MMA,
    C_TCGEN05_LD,
    C_TCGEN05_ST,
    C_TCGEN05_OTHER,
    C_OTHER,
    C_COUNT
} inst_class;

typedef struct {
    const char *name;
    space space;
    type type;
    size_t size, align, offset;   // offset in its space (shared: from the CTA's window; param: in the parameter block;
                                  // global and const: the address; parameters of functions live in local space)
    const unsigned char *initial; // or NULL
    bool external;                // .extern .shared: dynamic shared memory
} variable;

typedef struct module module;
typedef struct kernel {
    module *module;
    const char *name;
    bool is_entry, has_body;
    inst *insts; // the whole module's, functions and entries: pc counts through it
    int first, count;
    type *reg_type; // by register index; the module's functions have the first ones, so that a call needs no copies
    int regs;
    variable *variables;                           // module scope first, then parameters, then the kernel's own
    int nvariables, nparams, first_param, returns; // returns: so many of the parameters are return values (functions)
    size_t param_bytes, shared_bytes /* static, after the reserved 1024 */;
    size_t frame_bytes, local_bytes; // a thread's local memory: this function's own, and with all that it may call
    int maxntid[3], reqntid[3], minnctapersm, reqnctapercluster[3], maxnreg; // 0: not given
    bool explicit_cluster;
} kernel;

enum { SHARED_RESERVED = 1024 }; // the shared window's first bytes, which belong to the system

struct module {
    int version;     // 10 * major + minor
    int sm;          // 90, 100, 103
    char sm_suffix;  // 'a', 'f' or 0
    kernel *kernels; // entries and functions
    int count;
    const char **files; // .file, by its number
    int nfiles;
    inst *insts;
    variable *globals; // module scope; the start of every kernel's variables
    int nglobals;
    struct arena *memory; // names, operands
};
// parse.c. NULL on failure, with the reason in error. unknown, when given: what decode refuses is written there, a line
// each, and the parse goes on.
module *module_parse(const char *text, char *error, size_t error_size, FILE *unknown);
void module_free(module *m);
int special_index(const char *name, size_t length); // special.c: "%tid.x", or -1
bool special_is_64bit(int special);
bool special_is_predicate(int special);

// One row of the instruction table (decode.c collects the rows of all parts). decode checks modifiers, operands and
// target, fills exec, p, q, klass, flags; it returns NULL, or what is wrong ("modifier .foo").
typedef struct {
    const char *opcode; // "add", "cp.async.bulk.tensor", "tcgen05.ld": the longest row that is a prefix of the text, at
                        // a dot, wins
    const char *(*decode)(inst *in, const kernel *k);
} inst_row;
extern const inst_row scalar_rows[], float_rows[], move_rows[], convert_rows[], warp_rows[], control_rows[],
    memory_rows[], order_rows[], mbarrier_rows[], async_rows[], tma_rows[], wgmma_rows[],
    tcgen05_rows[]; // each ends with {NULL, NULL}

// Helpers for decoders. mod_index: position of a modifier or -1. mods_only: NULL when every modifier is in the list
// (NULL-terminated), else the first that is not. target_has: kernel's target is at least this, by family and suffix:
// FEATURE_* below.
// Finds the row and has it decode. NULL, or what is wrong; *unknown: no row takes this opcode.
const char *decode(inst *in, const kernel *k, bool *unknown);
int mod_index(const inst *in, const char *name);
const char *mods_only(const inst *in, const char *const *allowed);
type type_from(const char *modifier); // T_NONE when it is no type
enum { FEATURE_SM90, FEATURE_SM90A, FEATURE_SM100, FEATURE_SM100AF /* a or f of the sm_100 family */, FEATURE_SM103AF };
bool target_has(const kernel *k, int feature);

// ------------------------------------------------------------------------------------------------ machine state

typedef struct cluster cluster;
typedef struct cta cta;
typedef struct grid grid;
typedef struct clock_vector clock_vector; // order.c: reference-counted, copied on write

// Registers: regs[reg * LANES + lane], 64 bits each whatever the type (narrow values zero-extended, predicates 0 or 1,
// b128 in two neighbouring registers). poison: the same shape, bit i = byte i is undefined (a predicate uses bit 0);
// poisoned[reg]: lanes with any such bit, so that clean code pays one test.
struct warp {
    cta *cta;
    int index; // in the CTA
    uint64_t *regs;
    uint8_t *poison;
    uint32_t *poisoned;
    int32_t *pending_reg; // per register: number of pending async operations that will write or still read it
    int pending_regs;     // sum of them: 0 in nearly all code
    int32_t pc[LANES];
    uint32_t live;    // lanes that have not exited
    uint32_t current; // lanes that the running instruction was given before its guard
    struct call_frame *frames[LANES];
    uint64_t executed[C_COUNT];  // lane-instructions
    int reg_limit;               // setmaxnreg
    struct tensor_state *tensor; // tcgen05.c: pending loads and stores, each lane's last MMA
    struct wgmma_state *wgmma;   // wgmma.c
    struct thread_order *order;  // order.c
    struct local_memory *local;  // memory.c
    void *async_state;           // async.c: groups per lane and per warp
    struct sched_state *sched;
};

struct cta {
    cluster *cluster;
    int rank; // %cluster_ctarank
    int ctaid[3];
    int warps, threads;
    warp *warp;
    unsigned char
        *shared; // shared_size bytes from the window's start (the first 1024 are reserved: poison, never valid)
    uint8_t *shared_poison; // a byte a byte: 0 or 1
    size_t shared_size, dynamic_offset;
    struct shadow *shared_shadow; // order.c
    uint32_t *tmem;               // [128 lanes][512 columns]; NULL before sm_100
    uint8_t *tmem_poison;         // [128][512], bit i = byte i
    struct shadow *tmem_shadow;
    struct tmem_allocator *allocator;
    struct mbarriers *mbarriers; // mbarrier.c: live objects by address
    struct named_barrier *named; // [16]
    int reg_pool;
    bool exited;
};

struct cluster {
    grid *grid;
    int id, ctas;
    cta *cta;
    uint64_t rng; // the schedule's own random numbers: next_random(cluster)
    struct async_queue *queue;
    struct cluster_barrier *barrier;
    int clocks;         // components of clock vectors handed out so far
    uint64_t step;      // progress counter: any visible change increments it
    bool cancel_failed; // a try_cancel was seen to fail: another is undefined
    struct cluster_order *order;
    struct report_buffer *report;
};

typedef enum { SCHEDULE_EARLY, SCHEDULE_LATE, SCHEDULE_RANDOM } schedule;
struct grid {
    const kernel *kernel;
    int nctaid[3], ntid[3], cluster_dim[3];
    size_t dynamic_shared;
    bool explicit_cluster;
    unsigned char *params; // the parameter block
    schedule schedule;
    uint64_t seed;
    bool practice;         // model="practice"
    bool strict_mma_order; // A1 off
    int index;             // in the stream
    bool dependent;        // launched programmatically: earlier grids are known complete only after griddepcontrol.wait
    uint32_t first_serial, run_serial; // order.c: of the first cluster of this grid, and of the stream's first grid
    struct launch *launch;             // launch.c
};

uint64_t next_random(cluster *c);
static inline int lane_thread(const warp *w, int lane)
{
    return w->index * LANES + lane;
}

// Operand access. Values are 64-bit containers, as registers. An immediate takes the instruction's type t into account
// (a decimal or hexadecimal integer for an integer type, 0f/0d literals for floats; f64 literals are rounded to f32
// when t is T_F32).
uint64_t read_operand(warp *w, const operand *o, int lane, type t, uint8_t *poison);
void write_register(warp *w, int reg, int lane, uint64_t value, type t, uint8_t poison);
// The address an OP_ADDRESS or the first item of an OP_BRACKET stands for. Reports poison in it.
bool read_address(warp *w, const inst *in, const operand *o, int lane, uint64_t *address);
uint64_t special_register(warp *w, int special, int lane);

// ------------------------------------------------------------------------------------------ life of the machine

// sched.c makes clusters, CTAs and warps with the plain fields filled in, and calls these for each part's private
// state, cluster first, then CTAs, then warps; ends in the reverse order. Ends also run after findings, with operations
// pending.
void order_cluster_start(cluster *c);
void order_cluster_end(cluster *c);
void async_cluster_start(cluster *c);
void async_cluster_end(cluster *c);
void memory_cta_start(cta *c); // shared, shared_poison, initial values (shared_size and dynamic_offset are set)
void memory_cta_end(cta *c);
void order_cta_start(cta *c); // shadows of shared memory and TMEM
void order_cta_end(cta *c);
void mbarrier_cta_start(cta *c);
void mbarrier_cta_end(cta *c);
void tcgen05_cta_start(cta *c); // tmem, tmem_poison, allocator (before order_cta_start)
void tcgen05_cta_end(cta *c);
void tcgen05_warp_start(warp *w);
void tcgen05_warp_end(warp *w);
void wgmma_warp_start(warp *w);
void wgmma_warp_end(warp *w);
void memory_warp_start(warp *w); // local memory: kernel->local_bytes a thread
void memory_warp_end(warp *w);
void order_warp_start(warp *w);
void order_warp_end(warp *w);
void async_warp_start(warp *w);
void async_warp_end(warp *w);
// The last thread of a CTA has exited: TMEM that was never freed is a finding. exited is set before.
void tcgen05_cta_exit(cta *c);
// The scheduler's questions to async.c. operations_step: the random schedule may run some; idle: nothing else can run,
// so run one (late: the oldest; random: any). true when one ran.
bool operations_step(cluster *c, bool idle);
// A register with pending_reg > 0 is an operand of in, which has no IN_TOUCHES_PENDING. RAN: go on (a tcgen05.ld was
// waited for), FAILED: a finding (wgmma).
outcome registers_touch(warp *w, const inst *in, int reg, uint32_t mask);
// The parser's last step: sets IN_TOUCHES_WGMMA. The scheduler calls the other after running such an instruction.
void wgmma_mark(module *m);
void wgmma_registers_touched(warp *w, const inst *in);
// griddepcontrol.wait, and the start of every warp of a grid that is not dependent: what earlier grids did is known.
void order_grids_done(warp *w, uint32_t mask);
// clusterlaunchcontrol: takes the next cluster that has not started away from the launch; false when none is left.
bool launch_cancel_next(grid *g, int first_ctaid[3]);
// For the deadlock report: one line per live object.
void mbarriers_print(const cta *c, FILE *to);
void operations_print(cluster *c, FILE *to);
// ptxsim_register, _unregister, _poisoned, _host are memory.c's; ptxsim_tensor_map is tma.c's.

// -------------------------------------------------------------------------------------------------- findings

// Kinds are short constant words that tests compare: "race", "poison", "deadlock", "misaligned", "proxy",
// "out-of-bounds", ... (report.c has the list with a sentence each). A finding ends the run of its cluster when fatal,
// else the run goes on.
typedef struct {
    const warp *w;  // or NULL for an asynchronous operation without one
    const inst *in; // or NULL
    int lane;       // or -1
} place;
void finding(cluster *c, place at, const char *kind, const char *format, ...) __attribute__((format(printf, 4, 5)));
void finding_pair(cluster *c, place at, place other, const char *kind, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
typedef enum { P1, P2, P3, P4, P5, A1, PRACTICES } practice;
// A thing that model="ptx" forbids and model="practice" allows: counted there (true), a finding here (false), of kind
// "tcgen05-fence", "tcgen05-wait", "scope", "mbarrier-init" and "proxy" for P1 to P5.
bool practice_allows(cluster *c, practice p, place at, place other, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
void count_assumption(cluster *c, practice p, place at); // A1

// ----------------------------------------------------------------------------------------- memory and its order

// Generic-proxy accesses by a thread of `size` bytes (1..32), checked for bounds, alignment, order; poison is a bit a
// byte. They resolve generic addresses. false: a finding was made, stop.
typedef enum {
    ACCESS_WEAK,
    ACCESS_VOLATILE,
    ACCESS_RELAXED,
    ACCESS_ACQUIRE,
    ACCESS_RELEASE,
    ACCESS_ACQ_REL
} access_order;
typedef enum { SCOPE_CTA, SCOPE_CLUSTER, SCOPE_GPU, SCOPE_SYS } scope;
bool load_bytes(warp *w, const inst *in, int lane, space s, uint64_t address, int size, void *to, uint32_t *poison,
                access_order o, scope sc);
bool store_bytes(warp *w, const inst *in, int lane, space s, uint64_t address, int size, const void *from,
                 uint32_t poison, access_order o, scope sc);
// Shared window addresses are rank << 24 | offset, own ones too. NULL when the address is none of this cluster.
cta *shared_owner(cluster *c, uint64_t address, uint32_t *offset);
// The same for the operand of an instruction: a shared window address, or (generic) a generic one. tma.c.
cta *shared_target(cluster *c, uint64_t address, bool generic, uint32_t *offset);
// Device memory behind a global address range: host pointer, and its poison (a byte a byte); false when outside every
// allocation.
bool global_range(cluster *c, uint64_t address, size_t size, unsigned char **data, uint8_t **poison);

// An agent makes accesses: a thread by its instructions, or an asynchronous operation that a thread has issued. An
// operation starts with what its issuer knows in the operation's proxy; others learn of its end only through the signal
// that it completes on.
typedef enum { PROXY_GENERIC, PROXY_ASYNC, PROXY_TENSOR_CORE_05 /* tcgen05 accesses to TMEM */ } proxy;
typedef struct agent agent; // order.c; reference-counted

// A new operation of the thread, in a stream: operations of one stream complete so that knowing number n complete means
// that all before n are complete. STREAM_MBARRIER: complete with a phase of an mbarrier (set by agent_completes_on).
typedef enum {
    STREAM_TCGEN05_MMA, // mma, cp, shift of one thread and cta_group
    STREAM_TCGEN05_LD,  // of a warp
    STREAM_TCGEN05_ST,
    STREAM_WGMMA,      // of a warp
    STREAM_BULK_READ,  // bulk groups of a thread: source read
    STREAM_BULK_WRITE, //                          written
    STREAM_CP_ASYNC,
    STREAM_MBARRIER
} stream;
agent *agent_issue(warp *w, const inst *in, int lane, stream s, proxy p);
// Of STREAM_MBARRIER: the barrier that it completes on. Said before its first access, and again when it goes on to a
// part that completes on another barrier. The phase is the one that is current when the access happens.
void agent_completes_on(agent *a, cta *owner, uint32_t offset);
agent *agent_retain(agent *a);
void agent_release(agent *a);
place agent_place(const agent *a);
uint32_t agent_number(const agent *a); // its number in its stream

// Accesses of an agent, checked against everything that is not ordered before it, and recorded. Offsets are into that
// CTA's shared window; size may be large. poison: a byte a byte, may be NULL when writing clean data. false: a finding.
bool agent_read_shared(agent *a, cta *c, uint32_t offset, size_t size, void *to, uint8_t *poison);
bool agent_write_shared(agent *a, cta *c, uint32_t offset, size_t size, const void *from, const uint8_t *poison);
bool agent_read_global(agent *a, uint64_t address, size_t size, void *to, uint8_t *poison);
bool agent_write_global(agent *a, uint64_t address, size_t size, const void *from, const uint8_t *poison);
// TMEM: one 32-bit column of one lane at a time would be slow: a rectangle of lanes x columns, row-major in to/from
// (columns words a lane); poison a byte a word, bit i = byte i.
bool agent_read_tmem(agent *a, cta *c, int lane0, int lanes, int column0, int columns, uint32_t *to, uint8_t *poison);
bool agent_write_tmem(agent *a, cta *c, int lane0, int lanes, int column0, int columns, const uint32_t *from,
                      const uint8_t *poison);
// The check and the record alone, for an operation that works in place in c->tmem and c->tmem_poison.
void agent_access_tmem(agent *a, cta *c, int lane0, int lanes, int column0, int columns, bool write);
// Many runs of one operand at once (a matrix behind a descriptor is up to 512 pieces of 16 bytes): to and poison are
// filled run after run.
typedef struct {
    uint32_t offset, size;
} shared_run;
bool agent_read_shared_runs(agent *a, cta *c, const shared_run *runs, int count, void *to, uint8_t *poison);
// A reduction: relaxed at gpu scope, so no race with other atomics. combine(memory, from, size) runs while the memory
// is nobody else's. For shared memory the scope is the cluster.
typedef void (*combine_fn)(void *memory, const void *from, size_t size);
bool agent_reduce_global(agent *a, uint64_t address, size_t size, const void *from, const uint8_t *poison,
                         combine_fn f);
bool agent_reduce_shared(agent *a, cta *c, uint32_t offset, size_t size, const void *from, const uint8_t *poison,
                         combine_fn f);
// What a tcgen05 operation of STREAM_TCGEN05_MMA is, for the order that the manual promises inside the stream
// ("Pipelined tcgen05 instructions"): mma -> mma with the same accumulator and shape (equal tiles), cp -> mma, shift ->
// mma or cp, mma -> shift. Other pairs of MMAs are ordered by assumption A1, the rest is not. An agent of any other
// stream accesses shared memory in its own proxy; this one's accesses to shared memory are the async proxy's, to TMEM
// tcgen05's.
typedef enum { TENSOR_MMA, TENSOR_CP, TENSOR_SHIFT } tensor_kind;
void agent_tensor(agent *a, tensor_kind kind, uint64_t tile);
// tcgen05.dealloc: every access to these columns must be known complete to the warp; then they are poison again and all
// accesses are forgotten. false: a finding.
bool order_tmem_free(warp *w, const inst *in, int column0, int columns);

// Knowledge of threads. A signal is where releases are left and acquires taken: one in each mbarrier phase, named
// barrier, cluster barrier, warp barrier, and atomic location.
typedef struct signal signal;
signal *signal_new(cluster *c);
void signal_free(signal *s);
void order_release(warp *w, int lane, signal *s, scope sc); // the thread's past, as seen at that scope
void order_acquire(warp *w, int lane, const signal *s, scope sc);
void order_release_lanes(warp *w, uint32_t mask, signal *s,
                         scope sc); // the same for many lanes at once: cheap when they agree
void order_acquire_lanes(warp *w, uint32_t mask, const signal *s, scope sc);
void order_agent_done(agent *a, signal *s); // complete_tx, commit: all of the stream up to a
void order_stream_done(warp *w, int lane, stream st,
                       uint32_t number);               // wait_group, wait::ld, ...: this thread knows now
void order_proxy_fence(warp *w, int lane, int spaces); // fence.proxy.async: FENCE_* below
enum { FENCE_SHARED = 1, FENCE_GLOBAL = 2 };
void order_tcgen05_before(warp *w, uint32_t mask);
void order_tcgen05_after(warp *w, uint32_t mask);
void order_mbarrier_init(warp *w, int lane);     // fence.mbarrier_init
void order_program_step(warp *w, uint32_t mask); // new epoch of these lanes, after a release (which does it itself)
// barrier.cluster.arrive.relaxed and the like: carries what tcgen05.fence::before_thread_sync, commits and
// fence.mbarrier_init have published, and no ordinary memory.
void order_release_relaxed(warp *w, uint32_t mask, signal *s, scope sc);
void order_acquire_relaxed(warp *w, uint32_t mask, const signal *s, scope sc);
// These lanes exit. When they are the last of the CTA: a peer or an operation that may still touch its shared memory or
// signal its mbarriers is a finding (false). The scheduler sets exited after it.
bool order_exit(warp *w, const inst *in, uint32_t mask);

// ------------------------------------------------------------------------------------------ pending operations

// An asynchronous operation waits here until the schedule lets it happen: at once (early), when nothing else can run
// (late), or in between (random). run does the whole effect and the signal; it may return false when a finding ended
// it.
typedef struct operation operation;
struct operation {
    bool (*run)(cluster *c, operation *op);
    void (*destroy)(operation *op); // frees payload
    agent *agent;                   // owned
    void *payload;
    operation **after; // must run before this one: order inside streams (commit after its MMAs; MMAs of one thread)
    int nafter;
    warp *w; // issuer
    const inst *in;
    int lane;
    uint64_t serial;
    bool done;
    int references;
};
operation *operation_new(warp *w, const inst *in, int lane, agent *a, void *payload);
void operation_after(operation *op, operation *earlier); // keeps a reference
void operation_submit(cluster *c, operation *op);        // may run it at once
void operation_force(cluster *c, operation *op);         // runs it, and what must come before it, now
void operation_release(operation *op);
// Bulk groups of a thread: the operation joins the group that its lane has open. read ends with the source read
// (STREAM_BULK_READ), write with the result visible (STREAM_BULK_WRITE); read runs first. The queue has both already.
void bulk_group_join(warp *w, int lane, operation *read, operation *write);
// Registers that a pending operation will write (or reads, wgmma RS): instructions that touch them wait or fail.
void registers_pending(warp *w, const int *regs, int count, operation *op, bool wgmma);
void registers_ready(warp *w, const int *regs, int count);

// -------------------------------------------------------------------------------------------------- mbarriers

// Used by async completions: complete_tx bytes, or one arrival (commit), on the barrier at offset in that CTA.
bool mbarrier_complete_tx(cluster *c, cta *owner, uint32_t offset, uint32_t bytes, agent *by);
bool mbarrier_arrive_async(cluster *c, cta *owner, uint32_t offset, agent *by);
// memory.c asks: is any byte of the range inside a live mbarrier? (a plain access to one is a finding)
bool mbarrier_covers(const cta *c, uint32_t offset, size_t size);

// Tensor products, descriptors and element formats (wgmma.c, tcgen05.c, tma.c): matmul.h.

#endif
