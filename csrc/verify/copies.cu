// Probes of tensor copies and bulk copies.
#include "probe.h"

struct copy_args {
    const uint32_t *in;
    uint32_t *out;
    int32_t c[5]; // coordinates
    int32_t bytes;
};

FA4_DEVICE void fill_shared(probe_smem &s, int bytes)
{
    for (int i = threadIdx.x; i < bytes / 4; i += blockDim.x) ((uint32_t *)s.data)[i] = 0xE0000000 + i;
    fence_proxy_async_shared();
}

FA4_DEVICE void begin_copies(probe_smem &s)
{
    if (threadIdx.x == 0) {
        mbarrier_init(shared_address(&s.full), 1);
        mbarrier_init(shared_address(&s.empty), blockDim.x);
        fence_mbarrier_init();
    }
    __syncthreads();
}

// A box of a 4-D tensor, as the forward loads K and V: all of shared memory goes to out.
FA4_PROBE(128) fa4_probe_load(const __grid_constant__ CUtensorMap map, const __grid_constant__ copy_args args)
{
    probe_smem &s = shared_memory();
    fill_shared(s, args.bytes);
    begin_copies(s);
    if (threadIdx.x == 0) {
        const uint32_t full = shared_address(&s.full);
        mbarrier_arrive_expect_tx(full, args.bytes);
        cp_async_bulk_tensor_4d_load(shared_address(s.data), &map, args.c[0], args.c[1], args.c[2], args.c[3], full,
                                     FA4_EVICT_LAST);
    }
    mbarrier_wait(shared_address(&s.full), 0);
    copy_from_shared(args.out, s, args.bytes / 4);
}

// A box to a 4-D tensor.
FA4_PROBE(128) fa4_probe_store(const __grid_constant__ CUtensorMap map, const __grid_constant__ copy_args args)
{
    probe_smem &s = shared_memory();
    copy_to_shared(s, args.in, args.bytes / 16);
    __syncthreads();
    if (threadIdx.x == 0) {
        cp_async_bulk_tensor_4d_store(&map, args.c[0], args.c[1], args.c[2], args.c[3], shared_address(s.data));
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group_0();
    }
}

// The same of five dimensions, there and back.
FA4_PROBE(128)
fa4_probe_five_dimensions(const __grid_constant__ CUtensorMap from, const __grid_constant__ CUtensorMap to,
                          const __grid_constant__ copy_args args)
{
    probe_smem &s = shared_memory();
    fill_shared(s, args.bytes);
    begin_copies(s);
    if (threadIdx.x == 0) {
        const uint32_t full = shared_address(&s.full), data = shared_address(s.data);
        mbarrier_arrive_expect_tx(full, args.bytes);
        asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];"
                     :
                     : "r"(data), "l"(&from), "r"(args.c[0]), "r"(args.c[1]), "r"(args.c[2]), "r"(args.c[3]),
                       "r"(args.c[4]), "r"(full)
                     : "memory");
        mbarrier_wait(full, 0);
        asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];"
                     :
                     : "l"(&to), "r"(args.c[0]), "r"(args.c[1]), "r"(args.c[2]), "r"(args.c[3]), "r"(args.c[4]),
                       "r"(data)
                     : "memory");
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group_0();
    }
}

struct reduce_args {
    const uint32_t *in; // [4] added to out
    uint32_t *out;      // [4]
};

FA4_PROBE(128) fa4_probe_reduce(const __grid_constant__ reduce_args args)
{
    probe_smem &s = shared_memory();
    copy_to_shared(s, args.in, 1);
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], 16;"
                     :
                     : "l"(args.out), "r"(shared_address(s.data))
                     : "memory");
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group_0();
    }
}

struct overwrite_args {
    const uint32_t *in; // [rounds][1024]
    uint32_t *out;      // [CTAs][rounds][128 threads]: sums of what a thread read
    int32_t rounds;
};

// Threads read what a copy wrote, arrive, and the next copy comes over it: no proxy fence between.
FA4_PROBE(128) fa4_probe_overwrite(const __grid_constant__ overwrite_args args)
{
    enum { WORDS = 1024 };
    probe_smem &s = shared_memory();
    begin_copies(s);
    for (int round = 0; round < args.rounds; round++) {
        if (threadIdx.x == 0) {
            if (round > 0) mbarrier_wait(shared_address(&s.empty), (round - 1) & 1);
            const uint32_t full = shared_address(&s.full);
            mbarrier_arrive_expect_tx(full, WORDS * 4);
            asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                         :
                         : "r"(shared_address(s.data)), "l"(args.in + round * WORDS), "r"(WORDS * 4), "r"(full)
                         : "memory");
        }
        mbarrier_wait(shared_address(&s.full), round & 1);
        uint32_t sum = 0;
#pragma unroll
        for (int i = 0; i < WORDS / 128; i++)
            sum += ((volatile uint32_t *)s.data)[(i * 128 + threadIdx.x * 37) % WORDS];
        args.out[(blockIdx.x * args.rounds + round) * 128 + threadIdx.x] = sum;
        mbarrier_arrive(shared_address(&s.empty));
    }
}
