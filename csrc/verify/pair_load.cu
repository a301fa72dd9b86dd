// Probe of a CTA pair that loads together: each CTA copies its half of the operands into its own shared memory, and
// both arrive and count at the even CTA's barrier.
#include "probe.h"

struct pair_load_args {
    const uint32_t *in;
    uint32_t *out; // [2 CTAs][128 lanes][64]
    uint32_t high, low, idesc;
};

// A: 256 rows of 64 bf16, B: 64 rows, both K-major with swizzle of 128 bytes. D: 256 x 64.
FA4_PROBE(128)
fa4_probe_pair_load(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                    const __grid_constant__ pair_load_args args)
{
    enum { A_BYTES = 128 * 128, B_BYTES = 32 * 128 };
    probe_smem &s = shared_memory();
    begin<2>(s, 2);
    const uint32_t data = shared_address(s.data), full = shared_address(&s.full), full_of_first = mapa(full, 0);
    const int rank = (int)cluster_ctarank();
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx_relaxed_cluster(full_of_first, A_BYTES + B_BYTES);
        auto load = [&](uint32_t dst, const CUtensorMap *map, int row) {
            asm volatile(
                "cp.async.bulk.tensor.4d.cta_group::2.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                "[%0], [%1, {%2, %3, %2, %2}], [%4];"
                :
                : "r"(dst), "l"(map), "r"(0), "r"(row), "r"(full_of_first)
                : "memory");
        };
        load(data, &map_a, rank * 128);
        load(data + A_BYTES, &map_b, rank * 32);
        if (rank == 0) {
            mbarrier_wait_relaxed_cluster(full, 0);
            fence_acquire_shared_cluster();
            const uint64_t a = descriptor_at(args.high, args.low, data);
            const uint64_t b = descriptor_at(args.high, args.low, data + A_BYTES);
            for (int i = 0; i < 4; i++) tcgen05_mma_ss<2>(s.tmem, a + 2 * i, b + 2 * i, args.idesc, i > 0);
            tcgen05_commit<2>(shared_address(&s.done));
        }
    }
    wait_done<2>(s, 0);
    load_tmem(args.out + blockIdx.x * 128 * 64, s.tmem, 64);
    end<2>(s);
}
