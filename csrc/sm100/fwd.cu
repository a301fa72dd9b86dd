// The forward on Blackwell. A persistent CTA takes tiles of two times 128 queries ("tile 0" and "tile 1"), against
// blocks of 128 keys from the last that any of them sees to the first. Scores, weights and output live in tensor
// memory; warps have roles:
//
//     warp 14     load        TMA: K(n) Q0 Q1 V(n) K(n-1) V(n-1) ...
//     warp 12     mma         S0(n) S1(n) | O0 += P0 V(n), S0(n-1), O1 += P1 V(n), S1(n-1) | ... | O0, O1
//     warps 0-3   softmax of tile 0: a thread has a row. S from tensor memory, maximum, weights, P over S
//     warps 4-7   softmax of tile 1
//     warps 8-11  correction: multiplies O where a row's maximum grew, at the end O / l, to shared memory; log-sum-exp
//     warp 13     store       TMA: O
//
// The two tiles take turns: while one is in softmax, the tensor cores work for the other. They run what the mma warp
// issues in order, so S(n-1) complete says that P V(n) is, and S(n-1) may overwrite the P that the product before read.
//
// Barriers (arrivals -> who waits; for each tile, or each place of the ring):
//
//     kv_full        load 1 + bytes                          -> mma          a block of K or V is there
//     kv_empty       mma 1 (commit)                          -> load         it has been read
//     q_full         load 1 + bytes                          -> mma
//     q_empty        mma 1 (commit)                          -> load         the tile's last S is complete (not tight)
//     s_full         mma 1 (commit)                          -> softmax      S, and all products before
//     p_full         softmax 4 warps + correction 4 warps    -> mma          three quarters of P, and O may be added to
//     p_last         softmax 4 warps                         -> mma          the last quarter
//     stats_empty    correction 4 warps                      -> softmax      what it told has been read
//     o_full         mma 1 (commit)                          -> correction   O is complete
//     out_full       correction 4 warps                      -> store        O is in shared memory
//     out_empty      store 1 (tight: and load 1)             -> correction   and its place is free (tight: load too)
//
// and named barriers STATS + 4 tile + warp, of 64 threads: a softmax warp tells its correction warp.
//
// In the pair form the two CTAs of a cluster share tiles of 256 queries, 128 each, and every block of keys: a CTA loads
// half of the keys of K and half of the columns of V. The mma warp of the first CTA issues products of M = 256, which
// read from and write to both. It waits for both, at barriers of the first CTA alone (kv_full, q_full, p_full, p_last)
// that count twice the arrivals; its commits arrive at the barriers of both.
//
// One compilation is one variant: FA4_KERNEL its name, FA4_BF16 1 or 0 for f16, FA4_SHAPE a line of shapes.def.
#include "../cuda/device.h"
#include "args.h"
#include "ptx.h"

#if FA4_BF16
#    define cvt_rn_16x2 cvt_rn_bf16x2
#else
#    define cvt_rn_16x2 cvt_rn_f16x2
#endif

#define FA4_SM100_SHAPE(name, ...) constexpr fa4_sm100_shape shape_##name = {__VA_ARGS__};
#include "shapes.def"
#define FA4_PASTE(a, b) a##b
#define FA4_SHAPE_NAMED(name) FA4_PASTE(shape_, name)
constexpr fa4_sm100_shape SHAPE = FA4_SHAPE_NAMED(FA4_SHAPE);

// B300 (code for 103f) makes exponentials twice as fast: none is emulated. Its loads from tensor memory find maxima.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1030
constexpr bool B300 = true;
#else
constexpr bool B300 = false;
#endif

// What -D may set instead of the shape's numbers, to tune a chip: benchmarks/sweep.py.
#ifndef FA4_EMULATED
#    define FA4_EMULATED (B300 ? 0 : SHAPE.emulated)
#endif
#ifndef FA4_REGISTERS_SOFTMAX
#    define FA4_REGISTERS_SOFTMAX SHAPE.registers_softmax
#endif
#ifndef FA4_REGISTERS_CORRECTION
#    define FA4_REGISTERS_CORRECTION SHAPE.registers_correction
#endif
static_assert(FA4_EMULATED % 2 == 0 && FA4_EMULATED <= 96, "pairs, of the first three quarters");

enum {
    D = SHAPE.dim,
    DV = SHAPE.dim_v,
    CTAS = SHAPE.ctas, // that work as one
    TILES = FA4_SM100_TILES,
    BLOCK_Q = FA4_SM100_BLOCK_Q,
    BLOCK_KV = FA4_SM100_BLOCK_KV,
    TILE_ROWS = CTAS * BLOCK_Q,
    K_ROWS = BLOCK_KV / CTAS, // of a block of K in this CTA
    V_COLUMNS = DV / CTAS,    // of a block of V in this CTA
    STAGES = FA4_SM100_STAGES(SHAPE),
    THREADS = 512,
    WARPS = 4, // of a warpgroup
    // Shared memory holds a tile as slabs of columns, one row of a slab 128 (or 64) bytes, swizzled: what a tensor copy
    // writes and the tensor cores read without bank conflicts.
    COLUMNS = FA4_COLUMNS(D),
    COLUMNS_V = FA4_COLUMNS(DV),
    ROW = 2 * COLUMNS,
    ROW_V = 2 * COLUMNS_V,
    FRAGMENT = 32, // columns of S that a warp loads at once
    FRAGMENTS = BLOCK_KV / FRAGMENT,
};
static_assert(D % COLUMNS == 0 && V_COLUMNS % COLUMNS_V == 0 && DV % 16 == 0, "whole slabs, and N of P V");

// Shared memory is short: O takes the place of Q, the places of the ring overlap.
constexpr bool TIGHT = SHAPE.o_places == 0;

// Tensor memory columns: S of both tiles (P goes over the right half of its S), then O of both.
enum { TMEM_S = 0, TMEM_P = BLOCK_KV / 2, TMEM_O = TILES * BLOCK_KV, TMEM_COLUMNS = 512 };
static_assert(TMEM_O + TILES * DV <= TMEM_COLUMNS, "S and O of two tiles must fit in tensor memory");

struct smem {
    alignas(1024) unsigned char queries[FA4_SM100_QUERY_BYTES(SHAPE)]; // Q of both tiles, then O, or O over Q
    alignas(1024) unsigned char ring[FA4_SM100_RING_BYTES(SHAPE)];     // K V K V ...
    float factor[TILES][BLOCK_Q]; // what O is multiplied by; after the last block l
    float row_max[TILES][BLOCK_Q];
    uint64_t kv_full[STAGES], kv_empty[STAGES];
    uint64_t q_full[TILES], q_empty[TILES], s_full[TILES], p_full[TILES], p_last[TILES], stats_empty[TILES],
        o_full[TILES], out_full[TILES], out_empty[TILES];
    uint64_t v_end; // copy -> load warp: bytes of a block whose end it must clear
    uint32_t tmem;  // address that tcgen05.alloc has given
};
static_assert(sizeof(smem) == FA4_SM100_SHARED_BYTES(SHAPE), "plan.c asks for this");
static_assert(sizeof(smem) <= 227 * 1024, "one CTA may use 227 KiB");

enum {
    Q_BYTES = BLOCK_Q * D * 2,
    O_BYTES = BLOCK_Q * DV * 2,
    K_BYTES = K_ROWS * D * 2,
    V_BYTES = BLOCK_KV * V_COLUMNS * 2,
    O_OFFSET = TIGHT ? 0 : TILES * Q_BYTES,
    O_STEP = TIGHT ? Q_BYTES : (SHAPE.o_places - 1) * O_BYTES,
};

FA4_DEVICE uint32_t q_offset(int t)
{
    return t * Q_BYTES;
}

FA4_DEVICE uint32_t o_offset(int t)
{
    return O_OFFSET + t * O_STEP;
}

// Where the block at a stage of the ring is. K and V alternate through three tight places of K + V + K bytes: a K
// begins at 0, V or K + V, a V at 0, K or K + V. Of what is there together only a K at 0 and the K at V before it
// overlap.
FA4_DEVICE uint32_t ring_offset(uint32_t stage, bool is_k)
{
    if (!TIGHT) return stage * (K_BYTES > V_BYTES ? K_BYTES : V_BYTES);
    return stage == 0 ? 0 : stage == 1 ? (is_k ? V_BYTES : K_BYTES) : K_BYTES + V_BYTES;
}
static_assert(!TIGHT || STAGES == 3 && DV <= D && CTAS == 1, "the places of a tight ring");

// Named barriers. BARRIER_TMEM: softmax, correction and mma warps, before tensor memory is given back.
enum { BARRIER_TMEM = 1, BARRIER_STATS = 2, TMEM_THREADS = 13 * 32 };
enum { WARP_CORRECTION = 8, WARP_MMA = 12, WARP_STORE = 13, WARP_LOAD = 14 };

enum {
    REGISTERS_SOFTMAX = FA4_REGISTERS_SOFTMAX,
    REGISTERS_CORRECTION = FA4_REGISTERS_CORRECTION,
    REGISTERS_OTHER = 512 - 2 * REGISTERS_SOFTMAX - REGISTERS_CORRECTION,
};
static_assert(REGISTERS_OTHER >= 24 && REGISTERS_OTHER % 8 == 0, "65536 registers");

// A place in a ring of stages and the parity of the phase that it waits for.
template <int N> struct ring {
    uint32_t stage = 0, parity = 0;
    __device__ __forceinline__ void next()
    {
        if (++stage == N) stage = 0, parity ^= 1;
    }
};

// Blocks [begin, end) of keys that some query of a tile sees.
struct blocks {
    int begin, end;
    __device__ __forceinline__ bool empty() const
    {
        return begin >= end;
    }
    __device__ __forceinline__ bool has(int block) const
    {
        return block >= begin && block < end;
    }
};

// The two tiles of a CTA or pair, and how many keys this batch has. A row is a query, or one of the heads packed with
// it.
struct work {
    fa4_tile tile;
    int len_kv;
    __device__ __forceinline__ int tile_row(int t) const
    {
        return (tile.block * TILES + t) * TILE_ROWS;
    }
    // Of the BLOCK_Q rows that are this CTA's.
    __device__ __forceinline__ int first_row(int t) const
    {
        return tile_row(t) + (CTAS == 1 ? 0 : cluster_ctarank() * BLOCK_Q);
    }
};

FA4_DEVICE work work_of(const fa4_fwd_args &args, int index)
{
    work w;
    w.tile = fa4_tile_at(&args.tiles, index);
    w.len_kv = len_kv_of(args, w.tile.batch);
    return w;
}

FA4_DEVICE blocks blocks_of(const fa4_fwd_args &args, const work &w, int t)
{
    const int first = w.tile_row(t) >> args.pack_log2; // queries
    const int last = min(w.tile_row(t) + TILE_ROWS - 1 >> args.pack_log2, args.len_q - 1);
    const int key_begin = max(0, first + args.lo), key_end = min(w.len_kv, last + args.hi + 1);
    if (first > last || key_begin >= key_end) return {0, 0};
    return {key_begin / BLOCK_KV, (key_end + BLOCK_KV - 1) / BLOCK_KV};
}

// What the warps that serve both tiles need to know: each one's blocks, and all of them.
struct both_blocks {
    blocks of[TILES], all;
};

FA4_DEVICE both_blocks both_blocks_of(const fa4_fwd_args &args, const work &w)
{
    const blocks a = blocks_of(args, w, 0), b = blocks_of(args, w, 1);
    const blocks all = a.empty() ? b : b.empty() ? a : blocks{min(a.begin, b.begin), max(a.end, b.end)};
    return {{a, b}, all};
}

// Calls body(work) for each two tiles of this CTA or pair.
template <typename F> FA4_DEVICE void for_each_work(const fa4_fwd_args &args, F body)
{
#pragma unroll 1
    for (int round = 0; round * (int)(gridDim.x / CTAS) < args.tiles.count; round++) {
        const int index = fa4_tile_index(&args.tiles, round, blockIdx.x / CTAS, gridDim.x / CTAS);
        if (index < args.tiles.count) body(work_of(args, index));
    }
}

// One arrival of a warp whose lanes have all done what it says.
FA4_DEVICE void arrive_warp(uint64_t *mbar)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(mbar));
}

// Of a barrier that the mma warp waits for: where it does, in the first CTA of a pair.
FA4_DEVICE uint32_t mma_address(const uint64_t *mbar)
{
    return CTAS == 1 ? shared_address(mbar) : mapa(shared_address(mbar), 0);
}

// As arrive_warp, at the mma_address of a barrier. What it says is of tensor memory, behind
// tcgen05_fence_before_thread_sync.
FA4_DEVICE void tell_mma(uint32_t mbar)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0) CTAS == 1 ? mbarrier_arrive(mbar) : mbarrier_arrive_relaxed_cluster(mbar);
}

// Waits for a barrier at which the other CTA of a pair arrives too: for what is in tensor memory, before
// tcgen05_fence_after_thread_sync, or in shared memory. Macros, so that a bounded wait can name its barrier.
#define wait_tmem(mbar, parity)                              \
    (CTAS == 1 ? mbarrier_wait(shared_address(mbar), parity) \
               : mbarrier_wait_relaxed_cluster(shared_address(mbar), parity))
#define wait_smem(mbar, parity) (wait_tmem(mbar, parity), CTAS == 1 ? (void)0 : fence_acquire_shared_cluster())

// Softmax and correction warps: tensor memory is no longer theirs.
FA4_DEVICE void leave_tmem()
{
    tcgen05_fence_before_thread_sync();
    if (CTAS == 1) bar_arrive(BARRIER_TMEM, TMEM_THREADS);
}

// The lanes of tensor memory that a warp may read and write, as part of an address.
FA4_DEVICE uint32_t tmem_lanes(int warp)
{
    return (uint32_t)(32 * (warp % WARPS)) << 16;
}

// ---- Load

FA4_DEVICE void arrive_expect(uint32_t mbar, uint32_t bytes)
{
    if (CTAS == 1)
        mbarrier_arrive_expect_tx(mbar, bytes);
    else
        mbarrier_arrive_expect_tx_relaxed_cluster(mbar, bytes);
}

FA4_DEVICE void load_keys(uint32_t dst, const CUtensorMap *map, int column, int row, int head, int batch, uint32_t mbar)
{
    if (CTAS == 1)
        cp_async_bulk_tensor_4d_load(dst, map, column, row, head, batch, mbar, FA4_EVICT_LAST);
    else
        cp_async_bulk_tensor_4d_load_pair(dst, map, column, row, head, batch, mbar, FA4_EVICT_LAST);
}

FA4_DEVICE void load_queries(uint32_t dst, const CUtensorMap *map, int column, int query, int head, int batch,
                             uint32_t mbar)
{
    if (CTAS == 1)
        cp_async_bulk_tensor_5d_load(dst, map, column, 0, query, head, batch, mbar, FA4_EVICT_FIRST);
    else
        cp_async_bulk_tensor_5d_load_pair(dst, map, column, 0, query, head, batch, mbar, FA4_EVICT_FIRST);
}

FA4_DEVICE void load_warp(smem &s, const fa4_fwd_args &args, const CUtensorMap *map_q, const CUtensorMap *map_k,
                          const CUtensorMap *map_v)
{
    const bool elected = elect_sync();
    ring<STAGES> at;
    uint32_t q_parity = 3, end_parity = 0;
    const int rank = CTAS == 1 ? 0 : cluster_ctarank();
    for_each_work(args, [&](const work &w) {
        const int head_q = w.tile.head * args.step_head[0], batch_q = w.tile.batch * args.step_batch[0];
        const int head_k = w.tile.head_kv * args.step_head[1], batch_k = w.tile.batch * args.step_batch[1];
        const int head_v = w.tile.head_kv * args.step_head[2], batch_v = w.tile.batch * args.step_batch[2];

        auto load_k = [&](int block) {
            const uint32_t full = mma_address(&s.kv_full[at.stage]);
            const uint32_t dst = shared_address(s.ring) + ring_offset(at.stage, true);
            wait_smem(&s.kv_empty[at.stage], at.parity ^ 1);
            if (TIGHT && at.stage == 0) wait_smem(&s.kv_empty[1], at.parity ^ 1);
            if (elected) {
                arrive_expect(full, K_BYTES);
                for (int slab = 0; slab < D / COLUMNS; slab++)
                    load_keys(dst + slab * K_ROWS * ROW, map_k, slab * COLUMNS, block * BLOCK_KV + rank * K_ROWS,
                              head_k, batch_k, full);
            }
            at.next();
        };
        // last: the block may hold the batch's last key.
        auto load_v = [&](int block, bool last) {
            const uint32_t full = mma_address(&s.kv_full[at.stage]);
            const uint32_t dst = shared_address(s.ring) + ring_offset(at.stage, false);
            const uint32_t v_end = shared_address(&s.v_end);
            const int rows = w.len_kv - block * BLOCK_KV;
            // Past the tensor's end the copy writes zeros itself; a batch that ends earlier has something there.
            const bool clear = last && rows < BLOCK_KV && w.len_kv < args.len_kv;
            const uint32_t mbar = clear ? v_end : full;
            wait_smem(&s.kv_empty[at.stage], at.parity ^ 1);
            if (elected) {
                arrive_expect(mbar, V_BYTES);
                for (int slab = 0; slab < V_COLUMNS / COLUMNS_V; slab++)
                    load_keys(dst + slab * BLOCK_KV * ROW_V, map_v, rank * V_COLUMNS + slab * COLUMNS_V,
                              block * BLOCK_KV, head_v, batch_v, mbar);
            }
            if (clear) {
                mbarrier_wait(v_end, end_parity);
                end_parity ^= 1;
                clear_rows<BLOCK_KV, V_COLUMNS / COLUMNS_V, ROW_V>(dst, rows);
                if (elected) CTAS == 1 ? mbarrier_arrive(full) : mbarrier_arrive_release_cluster(full);
            }
            at.next();
        };

        const both_blocks n = both_blocks_of(args, w);
        if (!n.all.empty()) load_k(n.all.end - 1);
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            // The place of Q is free when the tile before has its last S, or where O takes it, when that has been
            // stored.
            uint64_t *free = TIGHT ? &s.out_empty[t] : &s.q_empty[t];
            if (TIGHT || !n.of[t].empty()) {
                wait_smem(free, q_parity >> t & 1);
                q_parity ^= 1u << t;
                // Nobody else waits for this warp where tiles see no key: it would fall two phases behind.
                if (TIGHT && elected) mbarrier_arrive(shared_address(free));
            }
            if (n.of[t].empty()) continue;
            const uint32_t full = mma_address(&s.q_full[t]), dst = shared_address(s.queries) + q_offset(t);
            if (elected) {
                arrive_expect(full, Q_BYTES);
                for (int slab = 0; slab < D / COLUMNS; slab++)
                    load_queries(dst + slab * BLOCK_Q * ROW, map_q, slab * COLUMNS, w.first_row(t) >> args.pack_log2,
                                 head_q, batch_q, full);
            }
        }
        if (n.all.empty()) return;
        load_v(n.all.end - 1, true);
        for (int block = n.all.end - 2; block >= n.all.begin; block--) {
            load_k(block);
            load_v(block, false);
        }
    });
    if (CTAS > 1) { // no product may read from this CTA, no commit arrive at it, when it is gone
        for (int i = 0; i < STAGES; i++, at.next()) wait_tmem(&s.kv_empty[at.stage], at.parity ^ 1);
        for (int t = 0; t < TILES; t++) wait_tmem(&s.q_empty[t], q_parity >> t & 1);
        fence_acquire_shared_cluster();
    }
}

// ---- Products

FA4_DEVICE void mma_warp(smem &s, const fa4_fwd_args &args)
{
    const uint32_t elected = elect_sync();
    const uint32_t qk = instruction_descriptor(TILE_ROWS, BLOCK_KV, FA4_BF16, false) | (args.negative ? NEGATE_A : 0);
    // The address that alloc gave: 0, all columns being ours. As the compiler does not know that, it keeps what it
    // makes of it in uniform registers; constants it would move there anew for every product.
    const uint32_t tmem = __shfl_sync(0xffffffff, s.tmem, 0);
    const uint32_t pv = instruction_descriptor(TILE_ROWS, DV, FA4_BF16, true) | tmem;
    const uint64_t q_smem = shared_descriptor<ROW>(shared_address(s.queries), 0);
    const uint64_t k_smem = shared_descriptor<ROW>(shared_address(s.ring), 0);
    const uint64_t v_smem = shared_descriptor<ROW_V>(shared_address(s.ring), BLOCK_KV * ROW_V);
    enum { UNIT = 16 }; // bytes that a descriptor counts in

    ring<STAGES> at;
    uint32_t q_parity = 0, p_parity = 0;
    for_each_work(args, [&](const work &w) {
        const both_blocks n = both_blocks_of(args, w);

        // S of a tile and the block of keys at this place of the ring.
        auto scores = [&](int t, uint32_t stage) {
            const uint64_t k = k_smem + ring_offset(stage, true) / UNIT;
            uint64_t q = q_smem + q_offset(t) / UNIT;
            if (D > 128) forget(q); // there are not enough uniform registers for all of Q's descriptors
#pragma unroll
            for (int i = 0; i < D / 16; i++) {
                const int slab = i / (COLUMNS / 16), inside = i % (COLUMNS / 16) * 32;
                tcgen05_mma_ss<CTAS>(tmem + TMEM_S + t * BLOCK_KV, q + (slab * BLOCK_Q * ROW + inside) / UNIT,
                                     k + (slab * K_ROWS * ROW + inside) / UNIT, qk, i > 0, elected);
            }
            tcgen05_commit<CTAS>(shared_address(&s.s_full[t]), elected);
        };
        // O of a tile plus its P times the block of values at this place. P comes in two parts.
        auto output = [&](int t, uint32_t stage, bool accumulate) {
            const uint64_t v = v_smem + ring_offset(stage, false) / UNIT;
            const uint32_t o = tmem + TMEM_O + t * DV;
            uint32_t p = tmem + TMEM_S + t * BLOCK_KV + TMEM_P;
            if (D > 64 && D <= 128) forget(p); // nor for Q's and all that point to P
            wait_tmem(&s.p_full[t], p_parity >> t & 1);
            tcgen05_fence_after_thread_sync();
#pragma unroll
            for (int i = 0; i < BLOCK_KV / 16; i++) {
                if (i == BLOCK_KV / 16 * 3 / 4) {
                    wait_tmem(&s.p_last[t], p_parity >> t & 1);
                    tcgen05_fence_after_thread_sync();
                }
                tcgen05_mma_ts<CTAS>(o, p + 8 * i, v + i * 16 * ROW_V / UNIT, pv, i > 0 ? 1 : accumulate, elected);
            }
            p_parity ^= 1u << t;
        };
        auto wait_kv = [&] { wait_smem(&s.kv_full[at.stage], at.parity); };

        if (n.all.empty()) return;
        wait_kv();
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            if (n.of[t].empty()) continue;
            wait_smem(&s.q_full[t], q_parity >> t & 1);
            q_parity ^= 1u << t;
            if (!n.of[t].has(n.all.end - 1)) continue;
            scores(t, at.stage);
            if (!TIGHT && n.of[t].begin == n.all.end - 1) tcgen05_commit<CTAS>(shared_address(&s.q_empty[t]), elected);
        }
        tcgen05_commit<CTAS>(shared_address(&s.kv_empty[at.stage]), elected);
        at.next();

        // O of a block, then S of the next, of both tiles in turn. inside: both tiles have both blocks, and they are
        // neither's first.
        auto step = [&](int block, bool inside) {
            wait_kv(); // V of this block
            const uint32_t v_stage = at.stage;
            at.next();
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                if (inside || n.of[t].has(block)) {
                    output(t, v_stage, inside || block != n.of[t].end - 1);
                    if (!inside && block == n.of[t].begin) tcgen05_commit<CTAS>(shared_address(&s.o_full[t]), elected);
                }
                if (t == TILES - 1) tcgen05_commit<CTAS>(shared_address(&s.kv_empty[v_stage]), elected);
                if (t == 0) wait_kv(); // K of the next
                if (inside || n.of[t].has(block - 1)) {
                    scores(t, at.stage);
                    if (!TIGHT && !inside && block - 1 == n.of[t].begin)
                        tcgen05_commit<CTAS>(shared_address(&s.q_empty[t]), elected);
                }
            }
            tcgen05_commit<CTAS>(shared_address(&s.kv_empty[at.stage]), elected);
            at.next();
        };
        const int inside_begin = max(n.of[0].begin, n.of[1].begin) + 2, inside_end = min(n.of[0].end, n.of[1].end) - 1;
        int block = n.all.end - 1;
#pragma unroll 1
        while (block > n.all.begin) {
#pragma unroll 1
            for (; block > n.all.begin && !(block >= inside_begin && block < inside_end); block--) step(block, false);
#pragma unroll 1
            for (; block >= inside_begin && block < inside_end; block--) step(block, true);
        }
        wait_kv();
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            if (!n.of[t].has(block)) continue;
            output(t, at.stage, block != n.of[t].end - 1);
            tcgen05_commit<CTAS>(shared_address(&s.o_full[t]), elected);
        }
        tcgen05_commit<CTAS>(shared_address(&s.kv_empty[at.stage]), elected);
        at.next();
    });
}

// ---- Softmax

// 2^x of both, x at most 127, on the FMA pipe: x = n + f, 2^f by a cubic (Cody and Waite's reduction; the coefficients
// are those of arXiv 2603.05451: relative error 9e-5, a third of a bfloat16's rounding), n added to the exponent. NaN
// stays.
FA4_DEVICE void exp2_emulated(float &x, float &y)
{
    const float round = 12582912; // 2^23 + 2^22: adding it leaves floor(x) in the low bits
    const pair p = pack(max_nan(x, -127), max_nan(y, -127));
    const pair n = add_rm_ftz_f32x2(p, pack(round, round));
    const pair f = fma_rn_ftz_f32x2(add_rn_ftz_f32x2(n, pack(-round, -round)), pack(-1, -1), p);
    pair z = fma_rn_ftz_f32x2(f, pack(0.077119089663028717f, 0.077119089663028717f),
                              pack(0.227564394474029541f, 0.227564394474029541f));
    z = fma_rn_ftz_f32x2(z, f, pack(0.695146143436431885f, 0.695146143436431885f));
    z = fma_rn_ftz_f32x2(z, f, pack(1, 1));
    float n0, n1, z0, z1;
    unpack(n0, n1, n);
    unpack(z0, z1, z);
    x = __int_as_float((int)(__float_as_uint(n0) << 23) + __float_as_int(z0));
    y = __int_as_float((int)(__float_as_uint(n1) << 23) + __float_as_int(z1));
}

// Whether pair i of a row's 64 is emulated: FA4_EMULATED / 2 of the first 48, as even as may be. The last quarter
// runs on the MUFU: its end is what the tensor cores wait for.
FA4_DEVICE constexpr bool emulated(int i)
{
    return i < 48 && (i + 1) * (FA4_EMULATED / 2) / 48 != i * (FA4_EMULATED / 2) / 48;
}

// Of a fragment of a row's scores hides keys outside [begin, end), counted from the fragment's first.
FA4_DEVICE void hide(float *s, int begin, int end)
{
    const uint32_t visible = shr(0xffffffff, max(FRAGMENT - end, 0)) & shl(0xffffffff, max(begin, 0));
#pragma unroll
    for (int i = 0; i < FRAGMENT; i++) s[i] = visible >> i & 1 ? s[i] : -INFINITY;
}

// warp: of the tile's.
FA4_DEVICE void softmax_warps(smem &sm, const fa4_fwd_args &args, int t, int warp)
{
    const int row = threadIdx.x % BLOCK_Q;
    const uint32_t s_tmem = tmem_lanes(warp) + TMEM_S + t * BLOCK_KV, p_tmem = s_tmem + TMEM_P;
    const uint32_t stats = BARRIER_STATS + WARPS * t + warp;
    const uint32_t p_full = mma_address(&sm.p_full[t]), p_last = mma_address(&sm.p_last[t]);
    const float scale_log2 = args.scale_log2;
    // A row's maximum before its first key: finite, so that -inf minus it is -inf and hidden keys have a weight of 0.
    const float lowest = -1e38f * rcp_approx_ftz(fmaxf(1, scale_log2));
    // Of both barriers: each has a phase a block, and stats_empty is waited for from the second block of a tile to
    // after the last, one phase late.
    uint32_t parity = 0;

    for_each_work(args, [&](const work &w) {
        const blocks n = blocks_of(args, w, t);
        if (n.empty()) return;
        const int i = w.first_row(t) + row >> args.pack_log2;
        const int key_begin = max(0, i + args.lo), key_end = min(w.len_kv, i + args.hi + 1);
        // Blocks in [plain_begin, plain_end) need no mask: all of the tile's rows see all of their keys.
        const int first = w.first_row(t) >> args.pack_log2, last = w.first_row(t) + BLOCK_Q - 1 >> args.pack_log2;
        const int plain_begin = (max(0, last + args.lo) + BLOCK_KV - 1) / BLOCK_KV;
        const int plain_end = max(0, min(w.len_kv, first + args.hi + 1)) / BLOCK_KV;
        // The same of the warp's rows: some of them sees keys in [some_begin, some_end), all of them see all fragments
        // that begin in whole_keys keys from all_begin.
        const int first_of_warp = w.first_row(t) + 32 * warp >> args.pack_log2,
                  last_of_warp = w.first_row(t) + 32 * warp + 31 >> args.pack_log2;
        const int some_begin = first_of_warp + args.lo, some_end = min(w.len_kv, last_of_warp + args.hi + 1);
        const int all_begin = last_of_warp + args.lo, all_end = min(w.len_kv, first_of_warp + args.hi + 1);
        const uint32_t whole_keys = max(0, all_end - FRAGMENT + 1 - all_begin);

        float m = lowest;
        pair l; // of even and odd keys
        auto tell = [&](float x) {
            mbarrier_wait(shared_address(&sm.stats_empty[t]), parity);
            sm.factor[t][row] = x;
        };
        auto step = [&](int block, bool first, bool masked) {
            float s[BLOCK_KV], loaded[FRAGMENTS]; // the maximum of a fragment
            wait_tmem(&sm.s_full[t], parity);
            tcgen05_fence_after_thread_sync();
#pragma unroll
            for (int f = 0; f < FRAGMENTS; f++)
                if (B300)
                    tcgen05_ld_red_32x32b_x32_max_nan(s + f * FRAGMENT, &loaded[f], s_tmem + f * FRAGMENT);
                else
                    tcgen05_ld_32x32b_x32(s + f * FRAGMENT, s_tmem + f * FRAGMENT);
            tcgen05_wait_ld();

            // Whether some row of the warp sees a key of the fragment.
            bool seen[FRAGMENTS];
            float largest[4] = {m, m, m, m};
            static_assert(FRAGMENTS == 4, "or largest[f] is none");
#pragma unroll
            for (int f = 0; f < FRAGMENTS; f++) {
                const int key = block * BLOCK_KV + f * FRAGMENT;
                seen[f] = !masked || (key < some_end) & (key > some_begin - FRAGMENT);
                if (!seen[f]) continue;
                const bool whole = !masked || (uint32_t)(key - all_begin) < whole_keys;
                if (B300 && whole) {
                    largest[f] = max_nan(largest[f], loaded[f]);
                    continue;
                }
                if (!whole) hide(s + f * FRAGMENT, key_begin - key, key_end - key);
#pragma unroll
                for (int i = f * FRAGMENT; i < (f + 1) * FRAGMENT; i += 8)
#pragma unroll
                    for (int a = 0; a < 4; a++) largest[a] = max3_nan(largest[a], s[i + a], s[i + 4 + a]);
            }

            // m follows the true maximum only when that has grown by more than 8, in powers of two: until then the
            // factor is 1 and O can stay as it is, weights stay under 2^8, and the last division makes up for it.
            const float m_block = max3_nan(max_nan(largest[0], largest[1]), largest[2], largest[3]);
            float factor = 1;
            if (first) {
                m = m_block;
            } else {
                const float grown = (m - m_block) * scale_log2;
                const bool keep = grown >= -8;
                factor = keep ? 1 : ex2_approx_ftz(grown);
                m = keep ? m : m_block;
                tell(factor);
                __syncwarp();
                bar_arrive(stats, 64);
            }
            parity ^= 1;
            const float minus = -m * scale_log2;
            const pair scale2 = pack(scale_log2, scale_log2), minus_m = pack(minus, minus);
#pragma unroll
            for (int f = 0; f < FRAGMENTS; f++) {
                uint32_t p[FRAGMENT / 2] = {};
                if (seen[f]) {
#pragma unroll
                    for (int j = 0; j < FRAGMENT / 2; j++) {
                        float &x = s[f * FRAGMENT + 2 * j], &y = s[f * FRAGMENT + 2 * j + 1];
                        unpack(x, y, fma_rn_ftz_f32x2(pack(x, y), scale2, minus_m));
                        if (emulated(f * FRAGMENT / 2 + j))
                            exp2_emulated(x, y);
                        else
                            x = ex2_approx_ftz(x), y = ex2_approx_ftz(y);
                        p[j] = cvt_rn_16x2(x, y);
                    }
                    tcgen05_st_32x32b_x16(p_tmem + f * FRAGMENT / 2, p);
                } else {
                    tcgen05_st_32x32b_x16(p_tmem + f * FRAGMENT / 2, p);
                }
                if (f == FRAGMENTS - 2 || f == FRAGMENTS - 1) {
                    tcgen05_wait_st();
                    tcgen05_fence_before_thread_sync();
                    tell_mma(f == FRAGMENTS - 2 ? p_full : p_last);
                }
            }
            pair sums[4] = {};
#pragma unroll
            for (int f = 0; f < FRAGMENTS; f++) {
                if (!seen[f]) continue;
#pragma unroll
                for (int j = 0; j < FRAGMENT / 2; j++) {
                    const pair x = pack(s[f * FRAGMENT + 2 * j], s[f * FRAGMENT + 2 * j + 1]);
                    sums[j % 4] = !masked && f == 0 && j < 4 ? x : add_rn_ftz_f32x2(sums[j % 4], x);
                }
            }
            const pair of_block =
                add_rn_ftz_f32x2(add_rn_ftz_f32x2(sums[0], sums[1]), add_rn_ftz_f32x2(sums[2], sums[3]));
            l = first ? of_block : fma_rn_ftz_f32x2(l, pack(factor, factor), of_block);
        };

        step(n.end - 1, true, true);
        int block = n.end - 2;
#pragma unroll 1
        while (block >= n.begin) {
            const bool plain_below = block >= plain_begin && plain_begin < plain_end;
            const int masked_end = plain_below ? max(n.begin, plain_end) : n.begin;
#pragma unroll 1
            for (; block >= masked_end; block--) step(block, false, true);
#pragma unroll 1
            for (; block >= max(n.begin, plain_begin); block--) step(block, false, false);
        }

        float l_even, l_odd;
        unpack(l_even, l_odd, l);
        tell(l_even + l_odd);
        sm.row_max[t][row] = m;
        __syncwarp();
        bar_arrive(stats, 64);
    });
    leave_tmem();
}

// ---- Correction

FA4_DEVICE void correction_warps(smem &sm, const fa4_fwd_args &args, int warp)
{
    const int row = threadIdx.x % BLOCK_Q;
    const uint32_t lanes = tmem_lanes(warp);
    const uint32_t first_p_full = mma_address(&sm.p_full[0]);
    auto p_full = [&](int t) { return first_p_full + t * (uint32_t)sizeof sm.p_full[0]; };
    // Where both tiles have one place, tile 0's turn is first.
    uint32_t o_parity = 0, out_parity = SHAPE.o_places == 1 ? 1 : 3;

    // O of both tiles is free before the first product.
    for (int t = 0; t < TILES; t++) tell_mma(p_full(t));

    for_each_work(args, [&](const work &w) {
        const both_blocks n = both_blocks_of(args, w);
        // A block but the first of a tile.
        auto step = [&](int t) {
            bar_sync(BARRIER_STATS + WARPS * t + warp, 64);
            const float factor = sm.factor[t][row];
            arrive_warp(&sm.stats_empty[t]);
            // S of this block is complete, so is all that was added to O before.
            if (__any_sync(0xffffffff, factor != 1)) {
                tcgen05_fence_after_thread_sync();
                uint32_t o_tmem = lanes + TMEM_O + t * DV;
                forget(o_tmem);
                const pair factor2 = pack(factor, factor);
#pragma unroll
                for (int c = 0; c < DV; c += FRAGMENT) {
                    float o[FRAGMENT];
                    tcgen05_ld_32x32b_x32(o, o_tmem + c);
                    tcgen05_wait_ld();
#pragma unroll
                    for (int i = 0; i < FRAGMENT; i += 2)
                        unpack(o[i], o[i + 1], mul_rn_ftz_f32x2(pack(o[i], o[i + 1]), factor2));
                    tcgen05_st_32x32b_x32(o_tmem + c, o);
                }
                tcgen05_wait_st();
                tcgen05_fence_before_thread_sync();
            }
            tell_mma(p_full(t));
        };
        // Blocks that both tiles have, and neither first.
        const int both_begin = max(n.of[0].begin, n.of[1].begin), both_end = min(n.of[0].end, n.of[1].end) - 1;
        int block = n.all.end - 2;
#pragma unroll 1
        while (block >= n.all.begin) {
            const bool both_below = block >= both_begin && both_begin < both_end;
            const int single_end = both_below ? max(n.all.begin, both_end) : n.all.begin;
#pragma unroll 1
            for (; block >= single_end; block--)
#pragma unroll 1
                for (int t = 0; t < TILES; t++) {
                    const blocks of = t == 0 ? n.of[0] : n.of[1];
                    if (of.has(block) && block != of.end - 1) step(t);
                }
#pragma unroll 1
            for (; block >= max(n.all.begin, both_begin); block--)
#pragma unroll
                for (int t = 0; t < TILES; t++) step(t);
        }
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            const int i = w.first_row(t) + row >> args.pack_log2;
            const int head = (w.tile.head << args.pack_log2) + (row & (1 << args.pack_log2) - 1);
            const bool empty = n.of[t].empty();
            float l = 0, m = -INFINITY;
            if (!empty) {
                bar_sync(BARRIER_STATS + WARPS * t + warp, 64);
                l = sm.factor[t][row];
                m = sm.row_max[t][row];
                arrive_warp(&sm.stats_empty[t]);
            }
            // A row that sees no key is 0 by definition, whatever 0 times its values would be.
            const bool sees = max(0, i + args.lo) < min(w.len_kv, i + args.hi + 1);
            const float inverse = rcp_approx_ftz(l);
            if (i < args.len_q)
                args.lse[w.tile.batch * args.stride_lse[0] + head * args.stride_lse[1] + i * args.stride_lse[2]] =
                    l == 0 ? -INFINITY : (m * args.scale_log2 + lg2_approx_ftz(l)) * 0.693147180559945309f;

            if (!empty) {
                wait_tmem(&sm.o_full[t], o_parity >> t & 1);
                o_parity ^= 1u << t;
                tcgen05_fence_after_thread_sync();
            }
            mbarrier_wait(shared_address(&sm.out_empty[t]), out_parity >> t & 1);
            out_parity ^= 1u << t;
            // The swizzle of a slab: the 16-byte unit of a row, XOR the row (of 128 bytes) modulo 8.
            const uint32_t swizzle = ROW_V == 128 ? row % 8 : row / 2 % 4;
            uint32_t out = shared_address(sm.queries) + o_offset(t) + row * ROW_V;
            auto put = [&](int c, uint32_t x0, uint32_t x1, uint32_t x2, uint32_t x3) {
                const uint32_t unit = c % COLUMNS_V / 8;
                st_shared_v4(out + c / COLUMNS_V * BLOCK_Q * ROW_V + (unit ^ swizzle) * 16, x0, x1, x2, x3);
            };
            forget(out); // the addresses of all slabs at once would be spilled
            if (empty) {
#pragma unroll
                for (int c = 0; c < DV; c += 8) put(c, 0, 0, 0, 0);
            } else {
                uint32_t o_tmem = lanes + TMEM_O + t * DV;
                forget(o_tmem);
#pragma unroll
                for (int c = 0; c < DV; c += FRAGMENT) {
                    float o[FRAGMENT];
                    tcgen05_ld_32x32b_x32(o, o_tmem + c);
                    uint32_t x[FRAGMENT / 2];
#pragma unroll
                    for (int e = 0; e < FRAGMENT / 2; e++)
                        x[e] = sees ? cvt_rn_16x2(o[2 * e] * inverse, o[2 * e + 1] * inverse) : 0;
#pragma unroll
                    for (int e = 0; e < FRAGMENT / 2; e += 4) put(c + 2 * e, x[e], x[e + 1], x[e + 2], x[e + 3]);
                }
            }
            fence_proxy_async_shared();
            if (!empty) {
                tcgen05_wait_ld();
                tcgen05_fence_before_thread_sync();
                tell_mma(p_full(t)); // O is free
            }
            arrive_warp(&sm.out_full[t]);
        }
    });
    leave_tmem();
}

// ---- Store

FA4_DEVICE void store_warp(smem &s, const fa4_fwd_args &args, const CUtensorMap *map_o)
{
    const bool elected = elect_sync();
    uint32_t parity = 0;
    for_each_work(args, [&](const work &w) {
        for (int t = 0; t < TILES; t++) {
            const uint32_t src = shared_address(s.queries) + o_offset(t);
            mbarrier_wait(shared_address(&s.out_full[t]), parity);
            const int first = w.first_row(t) >> args.pack_log2;
            if (elected && first < args.len_q) {
                for (int slab = 0; slab < DV / COLUMNS_V; slab++)
                    cp_async_bulk_tensor_5d_store(map_o, slab * COLUMNS_V, 0, first, w.tile.head, w.tile.batch,
                                                  src + slab * BLOCK_Q * ROW_V);
                cp_async_bulk_commit_group();
            }
            if (elected && SHAPE.o_places == 1) { // the place of both
                cp_async_bulk_wait_group_read_0();
                mbarrier_arrive(shared_address(&s.out_empty[t ^ 1]));
            }
        }
        if (elected && SHAPE.o_places != 1) {
            cp_async_bulk_wait_group_read_0();
            for (int t = 0; t < TILES; t++) mbarrier_arrive(shared_address(&s.out_empty[t]));
        }
        parity ^= 1;
    });
}

FA4_DEVICE void give_back_tmem(const smem &s)
{
    tcgen05_fence_after_thread_sync();
    tcgen05_dealloc<CTAS>(s.tmem, TMEM_COLUMNS);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    FA4_KERNEL(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
               const __grid_constant__ CUtensorMap map_v, const __grid_constant__ CUtensorMap map_o,
               const __grid_constant__ fa4_fwd_args args)
{
    extern __shared__ __align__(1024) unsigned char dynamic[];
    smem &s = *(smem *)dynamic;
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);

    if (warp == WARP_MMA) {
        tcgen05_alloc<CTAS>(shared_address(&s.tmem), TMEM_COLUMNS);
        tcgen05_relinquish_alloc_permit<CTAS>();
    }
    if (threadIdx.x == 0) {
        prefetch_tensormap(&map_q);
        prefetch_tensormap(&map_k);
        prefetch_tensormap(&map_v);
        prefetch_tensormap(&map_o);
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(shared_address(&s.kv_full[i]), CTAS);
            mbarrier_init(shared_address(&s.kv_empty[i]), 1);
        }
        for (int t = 0; t < TILES; t++) {
            mbarrier_init(shared_address(&s.q_full[t]), CTAS);
            mbarrier_init(shared_address(&s.q_empty[t]), 1);
            mbarrier_init(shared_address(&s.s_full[t]), 1);
            mbarrier_init(shared_address(&s.p_full[t]), CTAS * 2 * WARPS);
            mbarrier_init(shared_address(&s.p_last[t]), CTAS * WARPS);
            mbarrier_init(shared_address(&s.stats_empty[t]), WARPS);
            mbarrier_init(shared_address(&s.o_full[t]), 1);
            mbarrier_init(shared_address(&s.out_full[t]), WARPS);
            mbarrier_init(shared_address(&s.out_empty[t]), 1 + TIGHT);
        }
        mbarrier_init(shared_address(&s.v_end), 1);
        fence_mbarrier_init();
    }
    __syncwarp();
    tcgen05_fence_before_thread_sync();
    if (CTAS == 1)
        __syncthreads();
    else
        barrier_cluster();
    tcgen05_fence_after_thread_sync();

    if (warp >= WARP_MMA) {
        setmaxnreg_dec(REGISTERS_OTHER);
        if (warp == WARP_MMA) {
            if (CTAS == 1 || cluster_ctarank() == 0) mma_warp(s, args);
            if (CTAS == 1) {
                bar_sync(BARRIER_TMEM, TMEM_THREADS);
                give_back_tmem(s);
            }
        } else if (warp == WARP_STORE) {
            store_warp(s, args, &map_o);
        } else if (warp == WARP_LOAD) {
            load_warp(s, args, &map_q, &map_k, &map_v);
        }
    } else if (warp >= WARP_CORRECTION) {
        setmaxnreg_dec(REGISTERS_CORRECTION);
        correction_warps(s, args, warp % WARPS);
    } else {
        setmaxnreg_inc(REGISTERS_SOFTMAX);
        softmax_warps(s, args, warp / WARPS, warp % WARPS);
    }
    if (CTAS == 1) return;
    // Neither CTA ends, or gives tensor memory back, before both have done all that signals the other.
    __syncwarp();
    barrier_cluster();
    if (threadIdx.x / 32 == WARP_MMA) give_back_tmem(s); // not warp, which would take a register all the time
}
