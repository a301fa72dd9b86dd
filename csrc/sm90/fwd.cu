// The forward on Hopper. A persistent CTA takes tiles of WARPGROUPS x 64 queries; each of its first WARPGROUPS warpgroups
// computes 64 of them, against blocks of BLOCK_KV keys from the last that any of the tile's queries sees to the first. Of
// the last warpgroup one warp loads and one stores, both through tensor copies.
//
// A warpgroup keeps the tensor cores and its own arithmetic apart by one block: while they compute S of block n - 1 and
// add P V of block n to O, nothing waits; then the softmax of block n - 1 runs beside P V. The warpgroups take turns to
// start products, so that the products of one run under the softmax of another.
//
//     load warp   Q | K(n) K(n-1) V(n) K(n-2) V(n-1) ... V(0)
//     warpgroup   S(n) softmax | S(n-1) O(n) softmax | S(n-2) O(n-1) softmax | ... | O(0), O / l over Q in shared memory
//     store warp  O, then the place is free for another Q
//
// One compilation is one variant: FA4_KERNEL its name, FA4_BF16 1 or 0 for f16, FA4_SHAPE a line of shapes.def.
#if FA4_BF16
#    define FA4_PTX_TYPE "bf16"
#    define cvt_rn_16x2 cvt_rn_bf16x2
#else
#    define FA4_PTX_TYPE "f16"
#    define cvt_rn_16x2 cvt_rn_f16x2
#endif

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
    THREADS = 128 * (WARPGROUPS + 1),
    WARPS_OF_WARPGROUP = 4,
    // Shared memory holds a tile as slabs of columns, one row of a slab 128 (or 64) bytes, swizzled: what a tensor copy
    // writes and wgmma reads without bank conflicts.
    COLUMNS = FA4_SM90_COLUMNS(D),
    COLUMNS_V = FA4_SM90_COLUMNS(DV),
    ROW = 2 * COLUMNS,
    ROW_V = 2 * COLUMNS_V,
};
static_assert(D % COLUMNS == 0 && DV % COLUMNS_V == 0 && DV <= D, "O takes the place of Q");
static_assert(BLOCK_KV % 16 == 0 && BLOCK_KV <= 256, "P V steps by 16 keys, a copy's box has at most 256 rows");

struct smem {
    alignas(1024) uint16_t q[STAGES_Q][WARPGROUPS][ROWS * D]; // then O
    alignas(1024) uint16_t k[STAGES][BLOCK_KV * D];
    alignas(1024) uint16_t v[STAGES][BLOCK_KV * DV];
    uint64_t q_full[STAGES_Q][WARPGROUPS];  // load -> warpgroup: 1 + bytes
    uint64_t o_full[STAGES_Q][WARPGROUPS];  // warpgroup -> store: one a warp
    uint64_t q_empty[STAGES_Q][WARPGROUPS]; // store -> load: 1
    uint64_t k_full[STAGES];                // load -> warpgroups: 1 + bytes
    uint64_t v_full[STAGES];
    uint64_t k_empty[STAGES]; // warpgroups -> load: one a warp
    uint64_t v_empty[STAGES];
    uint64_t v_end; // copy -> load warp: bytes of a block whose end it must clear
};
static_assert(sizeof(smem) == FA4_SM90_SHARED_BYTES(SHAPE), "plan.c asks for this");
static_assert(sizeof(smem) <= 227 * 1024, "one CTA may use 227 KiB");

// Named barriers, after __syncthreads' 0: one of a warpgroup's own, and one that says that it is its turn.
enum { BARRIER_OWN = 1, BARRIER_TURN = BARRIER_OWN + WARPGROUPS };

// Registers of a thread before and after the warpgroups have told each other what they need.
enum { REGISTERS_COMPUTE = WARPGROUPS == 3 ? 160 : 240, REGISTERS_COPY = WARPGROUPS == 3 ? 32 : 24 };
static_assert(WARPGROUPS * REGISTERS_COMPUTE + REGISTERS_COPY <= 512, "65536 registers");

// A place in a ring of stages and the parity of the phase that it waits for.
template <int N> struct ring {
    uint32_t stage = 0, parity = 0;
    __device__ __forceinline__ void next()
    {
        if (++stage == N) stage = 0, parity ^= 1;
    }
};

// Blocks [begin, end) of keys that some query of the tile sees, of len_kv keys in this batch.
struct blocks {
    int begin, end, len_kv;
};

FA4_DEVICE blocks blocks_of(const fa4_sm90_fwd_args &args, const fa4_tile &tile)
{
    const int first = tile.block * WARPGROUPS * ROWS, last = min(first + WARPGROUPS * ROWS, args.len_q) - 1;
    const int len_kv = args.len_kv_of ? max(0, min(args.len_kv_of[tile.batch], args.len_kv)) : args.len_kv;
    const int key_begin = max(0, first + args.lo), key_end = min(len_kv, last + args.hi + 1);
    if (key_begin >= key_end) return {0, 0, len_kv};
    return {key_begin / BLOCK_KV, (key_end + BLOCK_KV - 1) / BLOCK_KV, len_kv};
}

// Calls body(tile) for each tile of this CTA.
template <typename F> FA4_DEVICE void for_each_tile(const fa4_sm90_fwd_args &args, F body)
{
    for (int round = 0;; round++) {
        const int index = fa4_tile_index(round, blockIdx.x, gridDim.x);
        if (round * (int)gridDim.x >= args.tiles.count) return;
        if (index < args.tiles.count) body(fa4_tile_at(&args.tiles, index));
    }
}

// ---- Copies

// Clears the rows of a V block from row on. Their weights are 0, but 0 times what lies past a batch's last key may be NaN.
FA4_DEVICE void clear_rows(uint32_t v_smem, int row)
{
    const int lane = threadIdx.x % 32, chunks = (BLOCK_KV - row) * ROW_V / 16;
#pragma unroll 1
    for (int slab = 0; slab < DV / COLUMNS_V; slab++)
#pragma unroll 1
        for (int i = lane; i < chunks; i += 32)
            st_shared_v4(v_smem + (slab * BLOCK_KV + row) * ROW_V + i * 16, 0, 0, 0, 0);
    fence_proxy_async_shared();
    __syncwarp();
}

FA4_DEVICE void load_warp(smem &s, const fa4_sm90_fwd_args &args, const CUtensorMap *map_q, const CUtensorMap *map_k,
                          const CUtensorMap *map_v)
{
    const bool elected = elect_sync();
    ring<STAGES_Q> at_q;
    ring<STAGES> at_k, at_v;
    uint32_t end_parity = 0;
    for_each_tile(args, [&](const fa4_tile &tile) {
        const blocks n = blocks_of(args, tile);
        const int head_q = tile.head * args.step_head[0], batch_q = tile.batch * args.step_batch[0];
        const int head_k = tile.head_kv * args.step_head[1], batch_k = tile.batch * args.step_batch[1];
        const int head_v = tile.head_kv * args.step_head[2], batch_v = tile.batch * args.step_batch[2];

        auto load_k = [&](int block) {
            const uint32_t full = shared_address(&s.k_full[at_k.stage]), dst = shared_address(s.k[at_k.stage]);
            mbarrier_wait(shared_address(&s.k_empty[at_k.stage]), at_k.parity ^ 1);
            if (elected) {
                mbarrier_arrive_expect_tx(full, BLOCK_KV * D * 2);
                for (int slab = 0; slab < D / COLUMNS; slab++)
                    cp_async_bulk_tensor_4d_load(dst + slab * BLOCK_KV * ROW, map_k, slab * COLUMNS, block * BLOCK_KV,
                                                 head_k, batch_k, full, FA4_EVICT_LAST);
            }
            at_k.next();
        };
        auto load_v = [&](int block) {
            const uint32_t full = shared_address(&s.v_full[at_v.stage]), dst = shared_address(s.v[at_v.stage]);
            const uint32_t v_end = shared_address(&s.v_end);
            const int rows = n.len_kv - block * BLOCK_KV;
            // Past the tensor's end the copy writes zeros itself; a batch that ends earlier has something there.
            const bool clear = rows < BLOCK_KV && n.len_kv < args.len_kv;
            const uint32_t mbar = clear ? v_end : full;
            mbarrier_wait(shared_address(&s.v_empty[at_v.stage]), at_v.parity ^ 1);
            if (elected) {
                mbarrier_arrive_expect_tx(mbar, BLOCK_KV * DV * 2);
                for (int slab = 0; slab < DV / COLUMNS_V; slab++)
                    cp_async_bulk_tensor_4d_load(dst + slab * BLOCK_KV * ROW_V, map_v, slab * COLUMNS_V,
                                                 block * BLOCK_KV, head_v, batch_v, mbar, FA4_EVICT_LAST);
            }
            if (clear) {
                mbarrier_wait(v_end, end_parity);
                end_parity ^= 1;
                clear_rows(dst, rows);
                if (elected) mbarrier_arrive(full);
            }
            at_v.next();
        };

        if (n.begin < n.end) load_k(n.end - 1);
        for (int w = 0; w < WARPGROUPS; w++) {
            const uint32_t full = shared_address(&s.q_full[at_q.stage][w]), dst = shared_address(s.q[at_q.stage][w]);
            mbarrier_wait(shared_address(&s.q_empty[at_q.stage][w]), at_q.parity ^ 1);
            if (elected) {
                mbarrier_arrive_expect_tx(full, ROWS * D * 2);
                for (int slab = 0; slab < D / COLUMNS; slab++)
                    cp_async_bulk_tensor_4d_load(dst + slab * ROWS * ROW, map_q, slab * COLUMNS,
                                                 (tile.block * WARPGROUPS + w) * ROWS, head_q, batch_q, full,
                                                 FA4_EVICT_FIRST);
            }
        }
        at_q.next();
        for (int block = n.end - 2; block >= n.begin; block--) {
            load_k(block);
            load_v(block + 1);
        }
        if (n.begin < n.end) load_v(n.begin);
    });
}

FA4_DEVICE void store_warp(smem &s, const fa4_sm90_fwd_args &args, const CUtensorMap *map_o)
{
    const bool elected = elect_sync();
    ring<STAGES_Q> at;
    for_each_tile(args, [&](const fa4_tile &tile) {
        for (int w = 0; w < WARPGROUPS; w++) {
            const uint32_t src = shared_address(s.q[at.stage][w]);
            mbarrier_wait(shared_address(&s.o_full[at.stage][w]), at.parity);
            if (elected) {
                for (int slab = 0; slab < DV / COLUMNS_V; slab++)
                    cp_async_bulk_tensor_4d_store(map_o, slab * COLUMNS_V, (tile.block * WARPGROUPS + w) * ROWS, tile.head,
                                                  tile.batch, src + slab * ROWS * ROW_V);
                cp_async_bulk_commit_group();
                cp_async_bulk_wait_group_read_0();
                mbarrier_arrive(shared_address(&s.q_empty[at.stage][w]));
            }
        }
        at.next();
    });
    cp_async_bulk_wait_group_0();
}

// ---- Products

// S = Q Kᵀ of this warpgroup's queries and one block of keys.
FA4_DEVICE void start_scores(float (&s)[BLOCK_KV / 2], uint32_t q_smem, uint32_t k_smem)
{
    const uint64_t q = matrix_descriptor<ROW>(q_smem, 0), k = matrix_descriptor<ROW>(k_smem, 0);
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        const int slab = i / (COLUMNS / 16), inside = i % (COLUMNS / 16) * 32;
        wgmma_ss(s, q + (slab * ROWS * ROW + inside) / 16, k + (slab * BLOCK_KV * ROW + inside) / 16, i > 0);
    }
    wgmma_commit_group();
}

// O (+)= P V of one block of keys.
FA4_DEVICE void start_output(float (&o)[DV / 2], const uint32_t (&p)[BLOCK_KV / 4], uint32_t v_smem, int accumulate)
{
    const uint64_t v = matrix_descriptor<ROW_V>(v_smem, BLOCK_KV * ROW_V);
#pragma unroll
    for (int i = 0; i < BLOCK_KV / 16; i++) wgmma_rs(o, p + 4 * i, v + i * 16 * ROW_V / 16, i > 0 ? 1 : accumulate);
    wgmma_commit_group();
}

// ---- Softmax. A thread has two rows, lane / 4 and 8 more, of which it holds elements [i] with i / 2 % 2 = 0 and 1.

// Hides keys: of a row, those outside [begin, end), counted from the block's first. Also applies a prescale.
FA4_DEVICE void mask_scores(float (&s)[BLOCK_KV / 2], const fa4_sm90_fwd_args &args, const int (&begin)[2],
                            const int (&end)[2])
{
    if (args.has_prescale) {
#pragma unroll
        for (int i = 0; i < BLOCK_KV / 2; i++) s[i] *= args.prescale;
    }
    const int column = threadIdx.x % 4 * 2; // of this thread's first element
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int part = 0; part < BLOCK_KV; part += 128) {
            // Bit 2 k + c stands for key part + 8 k + column + c. Elements before key j: 2 for each whole 8, and up to 2.
            auto bits_before = [&](int j) {
                const int x = j - part - column;
                const int elements = 2 * (x >> 3) + min(x & 7, 2);
                return x <= 0 ? 0u : elements >= 32 ? ~0u : (1u << elements) - 1;
            };
            const uint32_t visible = bits_before(end[r]) & ~bits_before(begin[r]);
#pragma unroll
            for (int e = 0; e < 32 && part / 2 + e / 2 * 4 < BLOCK_KV / 2; e++) {
                const int i = part / 2 + e / 2 * 4 + 2 * r + e % 2;
                s[i] = visible >> e & 1 ? s[i] : -INFINITY;
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

// One block. s: scores on entry, weights on return. m: the maximum that weights are relative to, of the whole row. l: the
// sum of the weights, of this thread's elements. rescale: what O so far must be multiplied by.
//
// m follows the true maximum only when that has grown by more than 2^8: until then the factor is exactly 1 and O can stay
// as it is, weights stay under 2^8, and the last division makes up for it.
FA4_DEVICE void softmax_step(float (&s)[BLOCK_KV / 2], float (&m)[2], float (&l)[2], float (&rescale)[2], float scale_log2)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float largest[2] = {s[2 * r], s[2 * r + 1]};
#pragma unroll
        for (int i = 4; i < BLOCK_KV / 2; i += 4) {
            largest[0] = max_nan(largest[0], s[i + 2 * r]);
            largest[1] = max_nan(largest[1], s[i + 2 * r + 1]);
        }
        const float m_block = quad_max(max_nan(largest[0], largest[1]));
        const bool keep = (m_block - m[r]) * scale_log2 <= 8;
        const float m_new = keep ? m[r] : max_nan(m[r], m_block);
        const float m_used = m_new == -INFINITY ? 0 : m_new * scale_log2; // no key so far: -inf - -inf is NaN
        rescale[r] = keep ? 1 : ex2_approx_ftz(m[r] * scale_log2 - m_used);
        m[r] = m_new;
#pragma unroll
        for (int i = 0; i < BLOCK_KV / 2; i += 4) {
            s[i + 2 * r] = ex2_approx_ftz(s[i + 2 * r] * scale_log2 - m_used);
            s[i + 2 * r + 1] = ex2_approx_ftz(s[i + 2 * r + 1] * scale_log2 - m_used);
        }
        float sum[2] = {s[2 * r], s[2 * r + 1]};
#pragma unroll
        for (int i = 4; i < BLOCK_KV / 2; i += 4) {
            sum[0] += s[i + 2 * r];
            sum[1] += s[i + 2 * r + 1];
        }
        l[r] = l[r] * rescale[r] + (sum[0] + sum[1]);
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

// O, rounded, over this warpgroup's Q, as the tensor copy reads it.
FA4_DEVICE void write_output(const float (&o)[DV / 2], uint32_t o_smem)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int row = 16 * warp + lane % 16; // whose address this lane gives, of 8 columns out of 16
    const int swizzle = ROW_V == 128 ? row % 8 : row / 2 % 4;
    const uint32_t row_smem = o_smem + row * ROW_V;
#pragma unroll
    for (int i = 0; i < DV / 16; i++) {
        const int slab = i / (COLUMNS_V / 16), chunk = i % (COLUMNS_V / 16) * 2 + lane / 16;
        const float *x = o + 8 * i;
        stmatrix_x4(row_smem + slab * ROWS * ROW_V + (chunk ^ swizzle) * 16, cvt_rn_16x2(x[0], x[1]),
                    cvt_rn_16x2(x[2], x[3]), cvt_rn_16x2(x[4], x[5]), cvt_rn_16x2(x[6], x[7]));
    }
}

FA4_DEVICE void compute_warpgroup(smem &sm, const fa4_sm90_fwd_args &args)
{
    const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int row = 16 * warp + lane / 4; // of the thread's first row in the warpgroup's tile
    const uint32_t turn = BARRIER_TURN + warpgroup;
    const uint32_t next_turn = BARRIER_TURN + (warpgroup + 1 == WARPGROUPS ? 0 : warpgroup + 1);
    const float scale_log2 = args.scale_log2;

    auto release = [&](uint64_t *mbar) {
        if (lane == 0) mbarrier_arrive(shared_address(mbar));
    };
    auto wait_turn = [&] {
        if (SHAPE.turns) bar_sync(turn, 256);
    };
    auto pass_turn = [&] {
        if (SHAPE.turns) bar_arrive(next_turn, 256);
    };

    ring<STAGES_Q> at_q;
    ring<STAGES> at_k, at_v;
    if (warpgroup == WARPGROUPS - 1) pass_turn(); // the first turn is the first warpgroup's

    for_each_tile(args, [&](const fa4_tile &tile) {
        const blocks n = blocks_of(args, tile);
        const int first_row = (tile.block * WARPGROUPS + warpgroup) * ROWS;
        const uint32_t q_smem = shared_address(sm.q[at_q.stage][warpgroup]);

        // Keys that each of the thread's rows sees: [key_begin, key_end).
        int key_begin[2], key_end[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            key_begin[r] = max(0, first_row + row + 8 * r + args.lo);
            key_end[r] = min(n.len_kv, first_row + row + 8 * r + args.hi + 1);
        }
        // Blocks in [plain_begin, plain_end) need no mask: all of the warpgroup's rows see all of their keys.
        const int plain_begin = (max(0, first_row + ROWS - 1 + args.lo) + BLOCK_KV - 1) / BLOCK_KV;
        const int plain_end = args.has_prescale ? 0 : max(0, min(n.len_kv, first_row + args.hi + 1)) / BLOCK_KV;

        float s[BLOCK_KV / 2], o[DV / 2];
        uint32_t p[BLOCK_KV / 4];
        float m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0}, rescale[2];

        // S of a block: its products to the end, its keys' place in shared memory given back, its weights into s.
        auto finish_scores = [&](int block) {
            wgmma_results(s);
            release(&sm.k_empty[at_k.stage]);
            at_k.next();
            if (block < plain_begin || block >= plain_end) {
                const int j = block * BLOCK_KV;
                mask_scores(s, args, {key_begin[0] - j, key_begin[1] - j}, {key_end[0] - j, key_end[1] - j});
            }
            softmax_step(s, m, l, rescale, scale_log2);
        };
        // The products that add to O to the end (none have been started before the second block), then P of the weights
        // in s, and O relative to their maximum.
        auto finish_output = [&](int block) {
            wgmma_wait_group<0>();
            wgmma_results(o);
            wgmma_results(s); // P has been read until here: round_weights may not move up
            round_weights(p, s);
            if (block == n.end - 1) return;
            release(&sm.v_empty[at_v.stage]);
            at_v.next();
            if (__any_sync(0xffffffff, rescale[0] != 1 || rescale[1] != 1)) scale_rows(o, rescale);
        };

        mbarrier_wait(shared_address(&sm.q_full[at_q.stage][warpgroup]), at_q.parity);
        if (n.begin < n.end) {
            mbarrier_wait(shared_address(&sm.k_full[at_k.stage]), at_k.parity);
            wgmma_fence();
            start_scores(s, q_smem, shared_address(sm.k[at_k.stage]));
            wgmma_wait_group<0>();
            finish_scores(n.end - 1);

            for (int block = n.end - 2; block >= n.begin; block--) {
                // The end of the step before stands at the start of this one: across the loop's edge the compiler cannot
                // move the wait above the softmax.
                mbarrier_wait(shared_address(&sm.k_full[at_k.stage]), at_k.parity);
                finish_output(block + 1);
                wait_turn();
                wgmma_fence();
                start_scores(s, q_smem, shared_address(sm.k[at_k.stage]));
                mbarrier_wait(shared_address(&sm.v_full[at_v.stage]), at_v.parity);
                wgmma_fence();
                start_output(o, p, shared_address(sm.v[at_v.stage]), block != n.end - 2);
                pass_turn();
                wgmma_wait_group<1>();
                finish_scores(block);
            }

            finish_output(n.begin);
            mbarrier_wait(shared_address(&sm.v_full[at_v.stage]), at_v.parity);
            wgmma_fence();
            start_output(o, p, shared_address(sm.v[at_v.stage]), n.end - n.begin > 1);
            wgmma_wait_group<0>();
            wgmma_results(o);
            release(&sm.v_empty[at_v.stage]);
            at_v.next();
        } else {
#pragma unroll
            for (int i = 0; i < DV / 2; i++) o[i] = 0;
        }

        float inverse[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int i = first_row + row + 8 * r;
            const float sum = quad_sum(l[r]);
            // No weight: 0 / 0, but a row that sees no key is 0 by definition.
            inverse[r] = key_begin[r] < key_end[r] ? 1 / sum : 0;
            if (lane % 4 == 0 && i < args.len_q)
                args.lse[tile.batch * args.stride_lse[0] + tile.head * args.stride_lse[1] + i * args.stride_lse[2]] =
                    sum == 0 ? -INFINITY : (m[r] * scale_log2 + lg2_approx_ftz(sum)) * 0.693147180559945309f;
        }
        scale_rows(o, inverse);
        bar_sync(BARRIER_OWN + warpgroup, 128); // all four warps' products have read Q
        write_output(o, q_smem);
        fence_proxy_async_shared();
        __syncwarp();
        release(&sm.o_full[at_q.stage][warpgroup]);
        at_q.next();
    });
    if (warpgroup == 0) wait_turn(); // the turn that nobody takes
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    FA4_KERNEL(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
               const __grid_constant__ CUtensorMap map_v, const __grid_constant__ CUtensorMap map_o,
               const __grid_constant__ fa4_sm90_fwd_args args)
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
                mbarrier_init(shared_address(&s.q_full[i][w]), 1);
                mbarrier_init(shared_address(&s.o_full[i][w]), WARPS_OF_WARPGROUP);
                mbarrier_init(shared_address(&s.q_empty[i][w]), 1);
            }
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(shared_address(&s.k_full[i]), 1);
            mbarrier_init(shared_address(&s.v_full[i]), 1);
            mbarrier_init(shared_address(&s.k_empty[i]), WARPS_OF_WARPGROUP * WARPGROUPS);
            mbarrier_init(shared_address(&s.v_empty[i]), WARPS_OF_WARPGROUP * WARPGROUPS);
        }
        mbarrier_init(shared_address(&s.v_end), 1);
        fence_mbarrier_init();
    }
    __syncthreads();

    if (warp >= WARPS_OF_WARPGROUP * WARPGROUPS) {
        setmaxnreg_dec(REGISTERS_COPY);
        if (warp == WARPS_OF_WARPGROUP * WARPGROUPS) load_warp(s, args, &map_q, &map_k, &map_v);
        if (warp == WARPS_OF_WARPGROUP * WARPGROUPS + 1) store_warp(s, args, &map_o);
    } else {
        setmaxnreg_inc(REGISTERS_COMPUTE);
        compute_warpgroup(s, args);
    }
}
