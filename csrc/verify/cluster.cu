// Probe of how the CTAs of a cluster address each other's shared memory.
#include "probe.h"

struct addresses_args {
    const uint32_t *in;
    uint32_t *out; // [CTAs][8]
};

// Cluster of four. Through addresses that are made by hand, each CTA writes its rank to a place of its own in the even
// CTA of its pair.
FA4_PROBE(128) fa4_probe_addresses(const __grid_constant__ addresses_args args)
{
    probe_smem &s = shared_memory();
    const uint32_t rank = cluster_ctarank();
    const uint32_t own = shared_address(s.data);
    uint32_t *out = args.out + blockIdx.x * 8;
    if (threadIdx.x < 2) ((uint32_t *)s.data)[threadIdx.x] = 99;
    barrier_cluster();
    if (threadIdx.x == 0) {
        out[0] = own >> 24;
        for (uint32_t r = 0; r < 4; r++) out[1 + r] = mapa(own, r) == (r << 24 | (own & 0xFFFFFF));
        const uint32_t even = (own & 0xFEFFFFFF) + 4 * (rank & 1);
        asm volatile("st.shared::cluster.u32 [%0], %1;" : : "r"(even), "r"(100 + rank) : "memory");
    }
    barrier_cluster();
    if (threadIdx.x == 0) {
        out[5] = ((volatile uint32_t *)s.data)[0];
        out[6] = ((volatile uint32_t *)s.data)[1];
        out[7] = rank;
    }
}
