// Probes of the order in which the tensor cores run what one thread issues: as the forward's mma warp does, O += P V
// and right after it, with nothing in between, S = Q Kᵀ over the columns that hold P.
#include "probe.h"

struct order_args {
    const uint32_t *in; // of each CTA: units of 16 bytes of shared memory: Q, K, V; then P as [rounds][128 lanes][64]
    uint32_t *out;      // [CTAs][128 lanes][256]: the last S, and O
    int32_t units, rounds;
    int32_t k_start, v_start;          // Q starts at 0
    uint32_t high, low, v_high, v_low; // of the matrix descriptors
    uint32_t qk, pv;                   // instruction descriptors
};

enum { S_COLUMN = 0, P_COLUMN = 64, O_COLUMN = 128 };

// RELAXED: the two CTAs of a pair are not synchronised before the products; relaxed arrivals at the first one's
// barrier, between tcgen05 fences, say that P is there.
template <int GROUP, bool RELAXED> FA4_DEVICE void order(const order_args &args)
{
    probe_smem &s = shared_memory();
    const uint32_t *in = args.in + blockIdx.x % GROUP * (args.units * 4 + args.rounds * 128 * 64);
    copy_to_shared(s, in, args.units);
    begin<GROUP>(s, RELAXED ? GROUP * 4 : 1);
    const uint32_t full = shared_address(&s.full), full_of_first = RELAXED ? mapa(full, 0) : full;
    for (int round = 0; round < args.rounds; round++) {
        const uint32_t *row = in + args.units * 4 + (round * 128 + threadIdx.x) * 64;
        for (int c = 0; c < 64; c += 8) {
            uint32_t a[8];
#pragma unroll
            for (int i = 0; i < 8; i++) a[i] = row[c + i];
            tcgen05_st_32x32b_x8(s.tmem + own_lanes() + P_COLUMN + c, a);
        }
        tcgen05_wait_st();
        if (RELAXED) {
            tcgen05_fence_before_thread_sync();
            __syncwarp();
            if (threadIdx.x % 32 == 0) mbarrier_arrive_relaxed_cluster(full_of_first);
        } else {
            publish_tmem<GROUP>();
        }
        if (threadIdx.x == 0 && blockIdx.x % GROUP == 0) {
            if (RELAXED) {
                mbarrier_wait_relaxed_cluster(full, round & 1);
                tcgen05_fence_after_thread_sync();
            }
            const uint32_t data = shared_address(s.data), tmem = s.tmem;
            const uint64_t q = descriptor_at(args.high, args.low, data);
            const uint64_t k = descriptor_at(args.high, args.low, data + args.k_start);
            const uint64_t v = descriptor_at(args.v_high, args.v_low, data + args.v_start);
#pragma unroll
            for (int i = 0; i < 8; i++)
                tcgen05_mma_ts<GROUP>(tmem + O_COLUMN, tmem + P_COLUMN + 8 * i, v + 128 * i, args.pv,
                                      round > 0 || i > 0);
#pragma unroll
            for (int i = 0; i < 4; i++) tcgen05_mma_ss<GROUP>(tmem + S_COLUMN, q + 2 * i, k + 2 * i, args.qk, i > 0);
            tcgen05_commit<GROUP>(shared_address(&s.done));
        }
        wait_done<GROUP>(s, round & 1);
    }
    load_tmem(args.out + blockIdx.x * 128 * 256, s.tmem, 256);
    end<GROUP>(s);
}

FA4_PROBE(128) fa4_probe_order(const __grid_constant__ order_args args)
{
    order<1, false>(args);
}

FA4_PROBE(128) fa4_probe_order_pair(const __grid_constant__ order_args args)
{
    order<2, false>(args);
}

FA4_PROBE(128) fa4_probe_relaxed(const __grid_constant__ order_args args)
{
    order<2, true>(args);
}
