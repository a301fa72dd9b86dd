// The forward on Hopper. A persistent CTA takes tiles of WARPGROUPS x 64 queries; each of its first WARPGROUPS
// warpgroups computes 64 of them, against blocks of BLOCK_KV keys from the last that any of the tile's queries sees to
// the first. Of the last warpgroup one warp loads and one stores, both through tensor copies, and one finds out what
// the tiles are: divisions that would hold up the others between two tiles.
//
// A warpgroup keeps the tensor cores and its own arithmetic apart by one block: while they compute S of block n - 1 and
// add P V of block n to O, nothing waits; then the softmax of block n - 1 runs beside P V. The warpgroups take turns to
// start products, so that the products of one run under the softmax of another.
//
//     load warp    Q | K(n) K(n-1) V(n) K(n-2) V(n-1) ... V(0)
//     warpgroup    S(n) softmax | S(n-1) O(n) softmax | S(n-2) O(n-1) softmax | ... | O(0), O / l over Q
//     store warp   O from there, then the place is free for another Q
//
// One compilation is one variant: FA4_KERNEL its name, FA4_BF16 1 or 0 for f16, FA4_SHAPE a line of shapes.def.
#if FA4_BF16
#    define FA4_PTX_TYPE "bf16"
#    define cvt_rn_16x2 cvt_rn_bf16x2
#else
#    define FA4_PTX_TYPE "f16"
#    define cvt_rn_16x2 cvt_rn_f16x2
#endif

#include "../cuda/device.h"
#include "args.h"
#include "ptx.h"

#define FA4_SM90_SHAPE(name, ...) constexpr fa4_sm90_shape shape_##name = {__VA_ARGS__};
#include "shapes.def"
#define FA4_PASTE(a, b) a##b
#define FA4_SHAPE_NAMED(name) FA4_PASTE(shape_, name)
constexpr fa4_sm90_shape SHAPE = FA4_SHAPE_NAMED(FA4_SHAPE);

enum {
    D = SHAPE.dim,
    DV = SHAPE.dim_v,
    ROWS = FA4_SM90_ROWS,
    BLOCK_KV = SHAPE.block_kv,
    WARPGROUPS = SHAPE.warpgroups,
    STAGES = SHAPE.stages,
    STAGES_Q = SHAPE.stages_q,
    STAGES_TILE = 4,
    OVERLAP_TILES = STAGES_Q > 1, // the end of a tile runs beside the start of the next one
    THREADS = 128 * (WARPGROUPS + 1),
    WARPS_OF_WARPGROUP = 4,
    // Shared memory holds a tile as slabs of columns, one row of a slab 128 (or 64) bytes, swizzled: what a tensor copy
    // writes and wgmma reads without bank conflicts.
    COLUMNS = FA4_COLUMNS(D),
    COLUMNS_V = FA4_COLUMNS(DV),
    ROW = 2 * COLUMNS,
    ROW_V = 2 * COLUMNS_V,
};
static_assert(D % COLUMNS == 0 && DV % COLUMNS_V == 0 && DV <= D, "O takes the place of Q");
static_assert(!OVERLAP_TILES || (D == DV && BLOCK_KV >= ROWS), "a product to no use reads V for Q and K");
static_assert(BLOCK_KV % 16 == 0 && BLOCK_KV <= 256, "P V steps by 16 keys, a copy's box has at most 256 rows");

// Blocks [begin, end) of keys that some of a range of queries sees.
struct blocks {
    int begin, end;
};

// A tile of queries, the blocks of keys that some of them see, and how many keys this batch has. more: 0 after the
// last.
struct alignas(16) work {
    fa4_tile tile;
    blocks n;
    int len_kv, more;
};

// Barriers of a ring of N stages.
template <int N> struct channel {
    uint64_t full[N], empty[N];
};

struct smem {
    alignas(1024) uint16_t q[STAGES_Q][WARPGROUPS][ROWS * D]; // then O
    alignas(1024) uint16_t k[STAGES][BLOCK_KV * D];
    alignas(1024) uint16_t v[STAGES][BLOCK_KV * DV];
    work works[STAGES_TILE];
    channel<STAGES_Q> for_q[WARPGROUPS];   // full: load -> warpgroup, 1 + bytes; empty: store -> load, 1
    channel<STAGES> for_k, for_v;          // full: load -> warpgroups, 1 + bytes; empty: warpgroups -> load, one a warp
    channel<STAGES_TILE> for_tile;         // full: tile warp -> all, 1; empty: all -> tile warp, one a warp
    uint64_t o_full[WARPGROUPS][STAGES_Q]; // warpgroup -> store: one a warp
    uint64_t v_end;                        // copy -> load warp: bytes of a block whose end it must clear
};
static_assert(sizeof(smem) == FA4_SM90_SHARED_BYTES(SHAPE), "plan.c asks for this");
static_assert(sizeof(smem) <= 227 * 1024, "one CTA may use 227 KiB");

// Named barriers, after __syncthreads' 0: one of a warpgroup's own, and one that says that it is its turn.
enum { BARRIER_OWN = 1, BARRIER_TURN = BARRIER_OWN + WARPGROUPS };

// Registers of a thread before and after the warpgroups have told each other what they need.
enum { REGISTERS_COMPUTE = WARPGROUPS == 3 ? 160 : 240, REGISTERS_COPY = WARPGROUPS == 3 ? 32 : 24 };
static_assert(WARPGROUPS * REGISTERS_COMPUTE + REGISTERS_COPY <= 512, "65536 registers");

// A place in a ring of N stages: the address of its tile of BYTES in shared memory, that of its "full" barrier (its
// "empty" one is N further), and the parity of the phase to wait for. Addresses are carried along, not made of a
// stage's number: the compiler would make them anew each time, and the base of shared memory takes it 25 cycles.
template <int N, int BYTES> struct ring {
    uint32_t tile, full, parity = 0, stage = 0;

    __device__ __forceinline__ ring(const void *tiles, const channel<N> &barriers)
        : tile(shared_address(tiles)), full(shared_address(barriers.full))
    {
    }
    __device__ __forceinline__ uint32_t empty() const
    {
        return full + N * (uint32_t)sizeof(uint64_t);
    }
    __device__ __forceinline__ void next()
    {
        const bool last = stage == N - 1;
        tile += last ? -(N - 1) * BYTES : BYTES;
        full += last ? -(N - 1) * (int)sizeof(uint64_t) : (int)sizeof(uint64_t);
        parity ^= last;
        stage = last ? 0 : stage + 1;
    }
};

enum { Q_BYTES = ROWS * D * 2, K_BYTES = BLOCK_KV * D * 2, V_BYTES = BLOCK_KV * DV * 2 };
using q_ring = ring<STAGES_Q, WARPGROUPS * Q_BYTES>; // tiles of one warpgroup
using k_ring = ring<STAGES, K_BYTES>;
using v_ring = ring<STAGES, V_BYTES>;
using work_ring = ring<STAGES_TILE, sizeof(work)>;

FA4_DEVICE blocks blocks_of(const fa4_fwd_args &args, int len_kv, int first_row, int rows)
{
    const int last_row = min(first_row + rows, args.len_q) - 1;
    const int key_begin = max(0, first_row + args.lo), key_end = min(len_kv, last_row + args.hi + 1);
    if (first_row > last_row || key_begin >= key_end) return {0, 0};
    return {key_begin / BLOCK_KV, (key_end + BLOCK_KV - 1) / BLOCK_KV};
}

// Finds out what this CTA's tiles are, for all other warps.
FA4_DEVICE void tile_warp(smem &s, const fa4_fwd_args &args)
{
    work_ring at(s.works, s.for_tile);
    auto tell = [&](const work &w) {
        mbarrier_wait(at.empty(), at.parity ^ 1);
        if (threadIdx.x % 32 == 0) {
            st_shared_v4(at.tile, w.tile.block, w.tile.head, w.tile.head_kv, w.tile.batch);
            st_shared_v4(at.tile + 16, w.n.begin, w.n.end, w.len_kv, w.more);
            mbarrier_arrive(at.full);
        }
        __syncwarp();
        at.next();
    };
#pragma unroll 1
    for (int round = 0; round * (int)gridDim.x < args.tiles.count; round++) {
        const int index = fa4_tile_index(&args.tiles, round, blockIdx.x, gridDim.x);
        if (index >= args.tiles.count) continue;
        work w;
        w.tile = fa4_tile_at(&args.tiles, index);
        w.len_kv = len_kv_of(args, w.tile.batch);
        w.n = blocks_of(args, w.len_kv, w.tile.block * WARPGROUPS * ROWS, WARPGROUPS * ROWS);
        w.more = 1;
        tell(w);
    }
    tell({});
}

// What the tile warp has told, one tile after another.
struct work_reader {
    work_ring at;
    __device__ __forceinline__ work_reader(smem &s) : at(s.works, s.for_tile) {}
    __device__ __forceinline__ work next()
    {
        mbarrier_wait(at.full, at.parity);
        const int lane = threadIdx.x % 32, x = ld_shared_32(at.tile + lane % 8 * 4);
        // Out of one lane, so that the compiler knows that all have the same.
        auto word = [&](int i) { return __shfl_sync(0xffffffff, x, i); };
        const work w = {{word(0), word(1), word(2), word(3)}, {word(4), word(5)}, word(6), word(7)};
        __syncwarp();
        if (lane == 0) mbarrier_arrive(at.empty());
        at.next();
        return w;
    }
};

// ---- Copies

FA4_DEVICE void load_warp(smem &s, const fa4_fwd_args &args, const CUtensorMap *map_q, const CUtensorMap *map_k,
                          const CUtensorMap *map_v)
{
    const bool elected = elect_sync();
    q_ring at_q(s.q, s.for_q[0]);
    k_ring at_k(s.k, s.for_k);
    v_ring at_v(s.v, s.for_v);
    uint32_t end_parity = 0;
    work_reader works(s);
    for (work w = works.next(); w.more; w = works.next()) {
        const fa4_tile &tile = w.tile;
        const blocks &n = w.n;
        const int head_q = tile.head * args.step_head[0], batch_q = tile.batch * args.step_batch[0];
        const int head_k = tile.head_kv * args.step_head[1], batch_k = tile.batch * args.step_batch[1];
        const int head_v = tile.head_kv * args.step_head[2], batch_v = tile.batch * args.step_batch[2];

        auto load_k = [&](int block) {
            mbarrier_wait(at_k.empty(), at_k.parity ^ 1);
            if (elected) {
                mbarrier_arrive_expect_tx(at_k.full, K_BYTES);
                for (int slab = 0; slab < D / COLUMNS; slab++)
                    cp_async_bulk_tensor_4d_load(at_k.tile + slab * BLOCK_KV * ROW, map_k, slab * COLUMNS,
                                                 block * BLOCK_KV, head_k, batch_k, at_k.full, FA4_EVICT_LAST);
            }
            at_k.next();
        };
        auto load_v = [&](int block) {
            const uint32_t v_end = shared_address(&s.v_end);
            const int rows = w.len_kv - block * BLOCK_KV;
            // Past the tensor's end the copy writes zeros itself; a batch that ends earlier has something there.
            const bool clear = rows < BLOCK_KV && w.len_kv < args.len_kv;
            const uint32_t mbar = clear ? v_end : at_v.full;
            mbarrier_wait(at_v.empty(), at_v.parity ^ 1);
            if (elected) {
                mbarrier_arrive_expect_tx(mbar, V_BYTES);
                for (int slab = 0; slab < DV / COLUMNS_V; slab++)
                    cp_async_bulk_tensor_4d_load(at_v.tile + slab * BLOCK_KV * ROW_V, map_v, slab * COLUMNS_V,
                                                 block * BLOCK_KV, head_v, batch_v, mbar, FA4_EVICT_LAST);
            }
            if (clear) {
                mbarrier_wait(v_end, end_parity);
                end_parity ^= 1;
                clear_rows<BLOCK_KV, DV / COLUMNS_V, ROW_V>(at_v.tile, rows);
                if (elected) mbarrier_arrive(at_v.full);
            }
            at_v.next();
        };

        if (n.begin < n.end) load_k(n.end - 1);
        for (int i = 0; i < WARPGROUPS; i++) {
            const uint32_t dst = at_q.tile + i * Q_BYTES, full = at_q.full + i * (uint32_t)sizeof s.for_q[0];
            mbarrier_wait(at_q.empty() + i * (uint32_t)sizeof s.for_q[0], at_q.parity ^ 1);
            if (elected) {
                mbarrier_arrive_expect_tx(full, Q_BYTES);
                for (int slab = 0; slab < D / COLUMNS; slab++)
                    cp_async_bulk_tensor_4d_load(dst + slab * ROWS * ROW, map_q, slab * COLUMNS,
                                                 (tile.block * WARPGROUPS + i) * ROWS, head_q, batch_q, full,
                                                 FA4_EVICT_FIRST);
            }
        }
        at_q.next();
        for (int block = n.end - 2; block >= n.begin; block--) {
            load_k(block);
            load_v(block + 1);
        }
        if (n.begin < n.end) load_v(n.begin);
    }
}

FA4_DEVICE void store_warp(smem &s, const fa4_fwd_args &args, const CUtensorMap *map_o)
{
    const bool elected = elect_sync();
    q_ring at_q(s.q, s.for_q[0]);
    work_reader works(s);
    for (work w = works.next(); w.more; w = works.next()) {
        for (int i = 0; i < WARPGROUPS; i++) {
            const uint32_t src = at_q.tile + i * Q_BYTES;
            mbarrier_wait(shared_address(&s.o_full[i][at_q.stage]), at_q.parity);
            if (elected) {
                for (int slab = 0; slab < DV / COLUMNS_V; slab++)
                    cp_async_bulk_tensor_4d_store(map_o, slab * COLUMNS_V, (w.tile.block * WARPGROUPS + i) * ROWS,
                                                  w.tile.head, w.tile.batch, src + slab * ROWS * ROW_V);
                cp_async_bulk_commit_group();
                cp_async_bulk_wait_group_read_0();
                mbarrier_arrive(at_q.empty() + i * (uint32_t)sizeof s.for_q[0]);
            }
        }
        at_q.next();
    }
    cp_async_bulk_wait_group_0();
}

// ---- Products

// S = Q Kᵀ of this warpgroup's queries and one block of keys.
FA4_DEVICE void start_scores(float (&s)[BLOCK_KV / 2], uint32_t q_smem, uint32_t k_smem)
{
    const uint32_t q = matrix_descriptor(q_smem, 0), k = matrix_descriptor(k_smem, 0);
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        const int slab = i / (COLUMNS / 16), inside = i % (COLUMNS / 16) * 32;
        wgmma_ss<ROW>(s, q + (slab * ROWS * ROW + inside) / 16, k + (slab * BLOCK_KV * ROW + inside) / 16, i > 0);
    }
}

// O (+)= P V of one block of keys.
FA4_DEVICE void start_output(float (&o)[DV / 2], const uint32_t (&p)[BLOCK_KV / 4], uint32_t v_smem, int accumulate)
{
    const uint32_t v = matrix_descriptor(v_smem, BLOCK_KV * ROW_V);
#pragma unroll
    for (int i = 0; i < BLOCK_KV / 16; i++)
        wgmma_rs<ROW_V>(o, p + 4 * i, v + i * 16 * ROW_V / 16, i > 0 ? 1 : accumulate);
}

// ---- Softmax. A thread has two rows, lane / 4 and 8 more, of which it holds elements [i] with i / 2 % 2 = 0 and 1.

// Keys [begin, end) that a query sees.
struct keys {
    int begin, end;
};

FA4_DEVICE keys keys_of(const fa4_fwd_args &args, int i, int len_kv)
{
    return {max(0, i + args.lo), min(len_kv, i + args.hi + 1)};
}

// Hides the keys that queries i and i + 8 do not see, in a block that starts at key j. Also applies a prescale.
FA4_DEVICE void mask_scores(float (&s)[BLOCK_KV / 2], const fa4_fwd_args &args, int i, int j, int len_kv)
{
    if (args.has_prescale) {
#pragma unroll
        for (int e = 0; e < BLOCK_KV / 2; e++) s[e] *= args.prescale;
    }
    const int column = threadIdx.x % 4 * 2; // of this thread's first element
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const keys seen = keys_of(args, i + 8 * r, len_kv);
#pragma unroll
        for (int part = 0; part < BLOCK_KV; part += 128) {
            // Bit 2 k + c stands for key j + part + 8 k + column + c. Elements before a key: 2 for each whole 8, and up
            // to 2.
            auto bits_before = [&](int key) {
                const int x = key - j - part - column;
                const int elements = 2 * (x >> 3) + min(x & 7, 2);
                return x <= 0 ? 0u : elements >= 32 ? ~0u : (1u << elements) - 1;
            };
            const uint32_t visible = bits_before(seen.end) & ~bits_before(seen.begin);
#pragma unroll
            for (int e = 0; e < 32 && part / 2 + e / 2 * 4 < BLOCK_KV / 2; e++) {
                float &x = s[part / 2 + e / 2 * 4 + 2 * r + e % 2];
                x = visible >> e & 1 ? x : -INFINITY;
            }
        }
    }
}

FA4_DEVICE float quad_max(float x)
{
    x = max_nan(x, __shfl_xor_sync(0xffffffff, x, 1));
    return max_nan(x, __shfl_xor_sync(0xffffffff, x, 2));
}

FA4_DEVICE float quad_sum(float x)
{
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// What a row's weights are relative to, m, is not the maximum of its scores so far, but one that moves when a score
// exceeds it by more than GROWTH, as a power of two. Until then weights stay under 2^GROWTH, O and the sum can stay as
// they are, and the last division makes up for it. Both ways of softmax_step decide for a row by its own scores alone.
constexpr float GROWTH = 8;

// One block. s: scores on entry, weights on return, 2^(scale_log2 (s - m)). m: -inf before a row's first key. l: the
// sum of the weights, of this thread's elements. rescale: what O so far must be multiplied by, 1 of a row that has not
// moved.
//
// First each row's maximum. The special function unit sets the pace after it: the rest hides beside the exponentials.
FA4_DEVICE void softmax_step_by_maximum(float (&s)[BLOCK_KV / 2], float (&m)[2], float (&l)[2], float (&rescale)[2],
                                        float scale_log2)
{
    float largest = -INFINITY;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        // The second row's maximum starts from -inf made of the first row's: so the compiler leaves it after that,
        // beside the shuffles and the first exponentials, and these need not wait for both rows.
        const float start = min_number(largest, -INFINITY);
        float part[4] = {start, start, start, start};
#pragma unroll
        for (int i = 0; i < BLOCK_KV / 2; i += 4) {
            part[i / 4 % 2 * 2] = max_nan(part[i / 4 % 2 * 2], s[i + 2 * r]);
            part[i / 4 % 2 * 2 + 1] = max_nan(part[i / 4 % 2 * 2 + 1], s[i + 2 * r + 1]);
        }
        largest = max_nan(max_nan(part[0], part[1]), max_nan(part[2], part[3]));
        const float m_block = quad_max(largest), m_grown = max_nan(m[r], m_block);
        const bool keep = (m_block - m[r]) * scale_log2 <= GROWTH;
        const float m_new = keep ? m[r] : m_grown;
        const float m_used = m_new == -INFINITY ? 0 : m_new * scale_log2; // no key so far: -inf - -inf is NaN
        const float factor = ex2_approx_ftz(m[r] * scale_log2 - m_used);
        rescale[r] = keep ? 1 : factor;
        m[r] = m_new;
        float sum[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < BLOCK_KV / 2; i += 4) {
            s[i + 2 * r] = ex2_approx_ftz(s[i + 2 * r] * scale_log2 - m_used);
            s[i + 2 * r + 1] = ex2_approx_ftz(s[i + 2 * r + 1] * scale_log2 - m_used);
            sum[0] += s[i + 2 * r];
            sum[1] += s[i + 2 * r + 1];
        }
        l[r] = l[r] * rescale[r] + (sum[0] + sum[1]);
    }
}

// Moves the rows that a block makes move. s, relative to the old m on entry, becomes relative to the new one.
FA4_DEVICE void move_rows(float (&s)[BLOCK_KV / 2], float (&m)[2], float (&l)[2], float (&rescale)[2])
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float largest = s[2 * r];
#pragma unroll
        for (int i = 0; i < BLOCK_KV / 2; i += 4) largest = max_nan(largest, max_nan(s[i + 2 * r], s[i + 2 * r + 1]));
        largest = quad_max(largest);
        const bool first = m[r] == -INFINITY;
        const float growth = (!first && largest <= GROWTH) || largest == -INFINITY ? 0 : largest;
        rescale[r] = first ? 1 : ex2_approx_ftz(-growth);
        l[r] *= rescale[r];
        if (largest != -INFINITY) m[r] = (first ? 0 : m[r]) + growth;
#pragma unroll
        for (int i = 0; i < BLOCK_KV / 2; i += 4) {
            s[i + 2 * r] -= growth;
            s[i + 2 * r + 1] -= growth;
        }
    }
}

// The same with m in powers of two, times scale_log2, and without the rows' maxima where no row moves: that no thread
// sees one of its own scores exceed GROWTH is enough, and saves the shuffles. Faster where warpgroups wait for each
// other rather than for the special function unit.
FA4_DEVICE void softmax_step_by_growth(float (&s)[BLOCK_KV / 2], float (&m)[2], float (&l)[2], float (&rescale)[2],
                                       float scale_log2)
{
    const float from[2] = {m[0] == -INFINITY ? 0 : m[0], m[1] == -INFINITY ? 0 : m[1]};
    float largest[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < BLOCK_KV / 2; i++) {
        s[i] = s[i] * scale_log2 - from[i / 2 % 2];
        largest[i % 4] = max_nan(largest[i % 4], s[i]);
    }
    const bool stays = max_nan(max_nan(largest[0], largest[1]), max_nan(largest[2], largest[3])) <= GROWTH;
    const bool moved = __any_sync(0xffffffff, !stays || m[0] == -INFINITY || m[1] == -INFINITY);
    rescale[0] = rescale[1] = 1;
    if (moved) move_rows(s, m, l, rescale);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < BLOCK_KV / 2; i += 4) {
            s[i + 2 * r] = ex2_approx_ftz(s[i + 2 * r]);
            s[i + 2 * r + 1] = ex2_approx_ftz(s[i + 2 * r + 1]);
            sum[0] += s[i + 2 * r];
            sum[1] += s[i + 2 * r + 1];
        }
        l[r] += sum[0] + sum[1];
    }
}

FA4_DEVICE void round_weights(uint32_t (&p)[BLOCK_KV / 4], const float (&s)[BLOCK_KV / 2])
{
#pragma unroll
    for (int i = 0; i < BLOCK_KV / 4; i++) p[i] = cvt_rn_16x2(s[2 * i], s[2 * i + 1]);
}

FA4_DEVICE void scale_rows(float (&o)[DV / 2], const float (&factor)[2])
{
#pragma unroll
    for (int i = 0; i < DV / 2; i++) o[i] *= factor[i / 2 % 2];
}

// ---- A warpgroup's 64 queries

// O times each row's factor, rounded, over this warpgroup's Q, as the tensor copy reads it.
FA4_DEVICE void write_output(const float (&o)[DV / 2], const float (&factor)[2], uint32_t o_smem)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int row = 16 * warp + lane % 16; // whose address this lane gives, of 8 columns out of 16
    const int swizzle = ROW_V == 128 ? row % 8 : row / 2 % 4;
    const uint32_t row_smem = o_smem + row * ROW_V;
#pragma unroll
    for (int i = 0; i < DV / 16; i++) {
        const int slab = i / (COLUMNS_V / 16), chunk = i % (COLUMNS_V / 16) * 2 + lane / 16;
        float x[8];
#pragma unroll
        for (int e = 0; e < 8; e++) x[e] = o[8 * i + e] * factor[e / 2 % 2];
        stmatrix_x4(row_smem + slab * ROWS * ROW_V + (chunk ^ swizzle) * 16, cvt_rn_16x2(x[0], x[1]),
                    cvt_rn_16x2(x[2], x[3]), cvt_rn_16x2(x[4], x[5]), cvt_rn_16x2(x[6], x[7]));
    }
}

FA4_DEVICE void compute_warpgroup(smem &sm, const fa4_fwd_args &args)
{
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int row = 16 * warp + lane / 4; // of the thread's first row in the warpgroup's tile
    const uint32_t turn = BARRIER_TURN + warpgroup;
    const uint32_t next_turn = BARRIER_TURN + (warpgroup + 1 == WARPGROUPS ? 0 : warpgroup + 1);
    const float scale_log2 = args.scale_log2;

    auto release = [&](uint32_t mbar) {
        if (lane == 0) mbarrier_arrive(mbar);
    };
    auto wait_turn = [&] {
        if (SHAPE.turns) bar_sync(turn, 256);
    };
    auto pass_turn = [&] {
        if (SHAPE.turns) bar_arrive(next_turn, 256);
    };

    q_ring at_q(sm.q[0][warpgroup], sm.for_q[warpgroup]);
    k_ring at_k(sm.k, sm.for_k);
    v_ring at_v(sm.v, sm.for_v);
    float s[BLOCK_KV / 2];

    auto own_blocks_of = [&](const work &w) {
        return blocks_of(args, w.len_kv, (w.tile.block * WARPGROUPS + warpgroup) * ROWS, ROWS);
    };
    // A block that none of this warpgroup's rows sees, but others of the tile do.
    auto skip_block = [&] {
        wait_turn();
        pass_turn();
        mbarrier_wait(at_k.full, at_k.parity);
        release(at_k.empty());
        at_k.next();
        mbarrier_wait(at_v.full, at_v.parity);
        release(at_v.empty());
        at_v.next();
    };

    if (warpgroup == WARPGROUPS - 1) pass_turn(); // the first turn is the first warpgroup's

    work_reader works(sm);
    work at = works.next(), following; // following: read beside the products of the tile before
    following.more = 0;
    if (at.more) following = works.next();
    bool started = false; // S of the tile's first block, beside the end of the tile before
    while (at.more) {
        const fa4_tile tile = at.tile;
        const blocks n = at.n;
        const int len_kv = at.len_kv;
        const int first_row = (tile.block * WARPGROUPS + warpgroup) * ROWS;
        const blocks own = own_blocks_of(at);
        const int own_begin = own.begin < own.end ? own.begin : n.begin, own_end = max(own.end, n.begin);
        const uint32_t q_smem = at_q.tile;

        // Blocks in [plain_begin, plain_end) need no mask: all of the warpgroup's rows see all of their keys.
        const int plain_begin = (max(0, first_row + ROWS - 1 + args.lo) + BLOCK_KV - 1) / BLOCK_KV;
        const int plain_end = args.has_prescale ? 0 : max(0, min(len_kv, first_row + args.hi + 1)) / BLOCK_KV;

        float o[DV / 2];
        uint32_t p[BLOCK_KV / 4];
        float m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0}, rescale[2];

        // S of a block has arrived: gives its keys' place in shared memory back, and turns s into weights.
        auto finish_scores = [&](int block) {
            wgmma_results(s);
            release(at_k.empty());
            at_k.next();
            if (block < plain_begin || block >= plain_end)
                mask_scores(s, args, first_row + row, block * BLOCK_KV, len_kv);
            if (SHAPE.by_growth)
                softmax_step_by_growth(s, m, l, rescale, scale_log2);
            else
                softmax_step_by_maximum(s, m, l, rescale, scale_log2);
        };
        // Waits for the products that add to O (the first block has none before it); then P of the weights in s, and O
        // relative to their maximum.
        auto finish_output = [&](bool first) {
            wgmma_wait_group<0>();
            wgmma_results(o);
            wgmma_results(s); // P has been read until here: round_weights may not move up
            round_weights(p, s);
            if (first) return;
            release(at_v.empty());
            at_v.next();
            if (__any_sync(0xffffffff, rescale[0] != 1 || rescale[1] != 1)) scale_rows(o, rescale);
        };
        // LSE of the thread's rows, and what their O must be multiplied by.
        float inverse[2];
        auto finish_rows = [&] {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int i = first_row + row + 8 * r;
                const keys seen = keys_of(args, i, len_kv);
                const float sum = quad_sum(l[r]), m_log2 = SHAPE.by_growth ? m[r] : m[r] * scale_log2;
                // No weight: 0 / 0, but a row that sees no key is 0 by definition.
                inverse[r] = seen.begin < seen.end ? rcp_approx_ftz(sum) : 0;
                if (lane % 4 == 0 && i < args.len_q)
                    args.lse[tile.batch * args.stride_lse[0] + tile.head * args.stride_lse[1] +
                             i * args.stride_lse[2]] =
                        sum == 0 ? -INFINITY : (m_log2 + lg2_approx_ftz(sum)) * 0.693147180559945309f;
            }
        };
        auto hand_over_output = [&](const float (&x)[DV / 2]) {
            bar_sync(BARRIER_OWN + warpgroup, 128); // all four warps' products have read Q
            write_output(x, inverse, q_smem);
            fence_proxy_async_shared();
            __syncwarp();
            release(shared_address(&sm.o_full[warpgroup][at_q.stage]));
        };

        if (!started) mbarrier_wait(at_q.full, at_q.parity);
        for (int block = n.end; block > own_end; block--) skip_block();
        q_ring next_q = at_q;
        next_q.next();
        if (own_begin < own_end) {
            if (!started) {
                mbarrier_wait(at_k.full, at_k.parity);
                wgmma_results(s); // what the fence orders, and not copies of it
                wgmma_fence();
                start_scores(s, q_smem, at_k.tile);
                wgmma_commit_group();
                wgmma_wait_group<0>();
                wgmma_results(s);
            }
            finish_scores(own_end - 1);

            for (int block = own_end - 2; block >= own_begin; block--) {
                // The end of the step before stands at the start of this one: across the loop's edge the compiler
                // cannot move the wait above the softmax.
                mbarrier_wait(at_k.full, at_k.parity);
                finish_output(block == own_end - 2);
                wait_turn();
                wgmma_fence();
                start_scores(s, q_smem, at_k.tile);
                wgmma_commit_group();
                pass_turn();
                mbarrier_wait(at_v.full, at_v.parity);
                wgmma_fence();
                start_output(o, p, at_v.tile, block != own_end - 2);
                wgmma_commit_group();
                wgmma_wait_group<1>();
                finish_scores(block);
            }
            finish_output(own_end - own_begin == 1);

            // The last product; and beside it and what is left of this tile, the first of the next one, if its Q has a
            // place of its own and its keys are the next to come. If not, a product of what lies there anyway, to no
            // use: a branch would make the compiler wait for each product.
            started = OVERLAP_TILES && following.more && own_begin == n.begin && following.n.begin < following.n.end &&
                      following.n.end == own_blocks_of(following).end;
            const uint32_t v_empty = at_v.empty();
            const uint32_t v_smem = at_v.tile;
            wait_turn();
            mbarrier_wait(at_v.full, at_v.parity);
            at_v.next();
            wgmma_fence();
            start_output(o, p, v_smem, own_end - own_begin > 1);
            wgmma_commit_group();
            if (OVERLAP_TILES) {
                if (started) {
                    mbarrier_wait(next_q.full, next_q.parity);
                    mbarrier_wait(at_k.full, at_k.parity);
                }
                wgmma_fence();
                start_scores(s, started ? next_q.tile : v_smem, started ? at_k.tile : v_smem);
                wgmma_commit_group();
            }
            pass_turn();
            finish_rows();
            at = following;
            if (at.more) following = works.next();
            wgmma_wait_group<OVERLAP_TILES>();
            wgmma_results(o);
            if (started) release(v_empty);
            hand_over_output(o);
            if (OVERLAP_TILES) {
                wgmma_wait_group<0>();
                wgmma_results(s);
            }
            if (!started) release(v_empty);
        } else {
            started = false;
            finish_rows();
            at = following;
            if (at.more) following = works.next();
            const float nothing[DV / 2] = {};
            hand_over_output(nothing);
        }
        for (int block = own_begin; block > n.begin; block--) skip_block();
        at_q = next_q;
    }
    if (warpgroup == 0) wait_turn(); // the turn that nobody takes
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    FA4_KERNEL(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
               const __grid_constant__ CUtensorMap map_v, const __grid_constant__ CUtensorMap map_o,
               const __grid_constant__ fa4_fwd_args args)
{
    extern __shared__ __align__(1024) unsigned char dynamic[];
    smem &s = *(smem *)dynamic;
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);

    if (threadIdx.x == 0) {
        prefetch_tensormap(&map_q);
        prefetch_tensormap(&map_k);
        prefetch_tensormap(&map_v);
        prefetch_tensormap(&map_o);
        for (int i = 0; i < STAGES_Q; i++)
            for (int w = 0; w < WARPGROUPS; w++) {
                mbarrier_init(shared_address(&s.for_q[w].full[i]), 1);
                mbarrier_init(shared_address(&s.for_q[w].empty[i]), 1);
                mbarrier_init(shared_address(&s.o_full[w][i]), WARPS_OF_WARPGROUP);
            }
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(shared_address(&s.for_k.full[i]), 1);
            mbarrier_init(shared_address(&s.for_v.full[i]), 1);
            mbarrier_init(shared_address(&s.for_k.empty[i]), WARPS_OF_WARPGROUP * WARPGROUPS);
            mbarrier_init(shared_address(&s.for_v.empty[i]), WARPS_OF_WARPGROUP * WARPGROUPS);
        }
        for (int i = 0; i < STAGES_TILE; i++) {
            mbarrier_init(shared_address(&s.for_tile.full[i]), 1);
            mbarrier_init(shared_address(&s.for_tile.empty[i]), WARPS_OF_WARPGROUP * WARPGROUPS + 2);
        }
        mbarrier_init(shared_address(&s.v_end), 1);
        fence_mbarrier_init();
    }
    __syncthreads();

    if (warp >= WARPS_OF_WARPGROUP * WARPGROUPS) {
        setmaxnreg_dec(REGISTERS_COPY);
        if (warp == WARPS_OF_WARPGROUP * WARPGROUPS) load_warp(s, args, &map_q, &map_k, &map_v);
        if (warp == WARPS_OF_WARPGROUP * WARPGROUPS + 1) store_warp(s, args, &map_o);
        if (warp == WARPS_OF_WARPGROUP * WARPGROUPS + 2) tile_warp(s, args);
    } else {
        setmaxnreg_inc(REGISTERS_COMPUTE);
        compute_warpgroup(s, args);
    }
}
