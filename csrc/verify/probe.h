// What the probes share. A probe is one kernel that asks the chip one thing: it takes words in, does what is in
// question and writes the raw result out; flash_attn4/verify/probes.py says what must come out.
//
// Parameters: tensor maps, then one struct that begins with in and out, and goes on with 32-bit numbers.
#ifndef FA4_VERIFY_PROBE_H
#define FA4_VERIFY_PROBE_H

#include "ptx.h"

#ifdef FA4_BOUNDED_WAITS
#    define mbarrier_wait_cluster(mbar, parity) FA4_WAIT_BOUNDED(mbarrier_try_wait_parity_cluster, mbar, parity)
#else
FA4_DEVICE void mbarrier_wait_cluster(uint32_t mbar, uint32_t parity)
{
    while (!mbarrier_try_wait_parity_cluster(mbar, parity)) {
    }
}
#endif

#define FA4_PROBE(threads) extern "C" __global__ void __launch_bounds__(threads, 1)

// Shared memory of a probe, from a multiple of 1024.
enum { PROBE_BYTES = 128 * 1024 };
struct probe_smem {
    alignas(1024) unsigned char data[PROBE_BYTES];
    uint64_t full, empty, done;
    uint32_t tmem;
};

FA4_DEVICE probe_smem &shared_memory()
{
    extern __shared__ __align__(1024) unsigned char dynamic[];
    return *(probe_smem *)dynamic;
}

// in, 16 bytes at a time, to shared memory; then the tensor cores may read it.
FA4_DEVICE void copy_to_shared(probe_smem &s, const uint32_t *in, int units)
{
    for (int i = threadIdx.x; i < units; i += blockDim.x) ((uint4 *)s.data)[i] = ((const uint4 *)in)[i];
    fence_proxy_async_shared();
}

FA4_DEVICE void copy_from_shared(uint32_t *out, const probe_smem &s, int words)
{
    for (int i = threadIdx.x; i < words; i += blockDim.x) out[i] = ((const uint32_t *)s.data)[i];
}

// A matrix descriptor: its constant bits, and the address.
FA4_DEVICE uint64_t descriptor_at(uint32_t high, uint32_t low, uint32_t address)
{
    return (uint64_t)high << 32 | low | (address & 0x3FFFF) >> 4;
}

// The lanes of tensor memory that this warp may touch.
FA4_DEVICE uint32_t own_lanes()
{
    return (threadIdx.x / 32 % 4 * 32) << 16;
}

// columns (a multiple of 8) of this CTA's tensor memory, 128 lanes, by four warps: words[lane][column].
FA4_DEVICE void store_tmem(uint32_t tmem, const uint32_t *words, int columns)
{
    const uint32_t *row = words + threadIdx.x % 128 * columns;
    for (int c = 0; c < columns; c += 8) {
        uint32_t a[8];
#pragma unroll
        for (int i = 0; i < 8; i++) a[i] = row[c + i];
        tcgen05_st_32x32b_x8(tmem + own_lanes() + c, a);
    }
    tcgen05_wait_st();
}

FA4_DEVICE void load_tmem(uint32_t *words, uint32_t tmem, int columns)
{
    uint32_t *row = words + threadIdx.x % 128 * columns;
    for (int c = 0; c < columns; c += 8) {
        uint32_t d[8];
        tcgen05_ld_32x32b_x8(d, tmem + own_lanes() + c);
        tcgen05_wait_ld();
#pragma unroll
        for (int i = 0; i < 8; i++) row[c + i] = d[i];
    }
}

// All threads of the CTA, or of the pair.
template <int GROUP> FA4_DEVICE void group_sync()
{
    if constexpr (GROUP == 1)
        __syncthreads();
    else
        barrier_cluster();
}

// The barriers full and done, and all 512 columns of tensor memory. What threads wrote to shared memory before it is
// there after it.
template <int GROUP> FA4_DEVICE void begin(probe_smem &s, int full_arrivals = 1)
{
    if (threadIdx.x < 32) {
        tcgen05_alloc<GROUP>(shared_address(&s.tmem), 512);
        tcgen05_relinquish_alloc_permit<GROUP>();
    }
    if (threadIdx.x == 0) {
        mbarrier_init(shared_address(&s.full), full_arrivals);
        mbarrier_init(shared_address(&s.done), 1);
        fence_mbarrier_init();
    }
    __syncwarp();
    tcgen05_fence_before_thread_sync();
    group_sync<GROUP>();
    tcgen05_fence_after_thread_sync();
}

template <int GROUP> FA4_DEVICE void end(probe_smem &s)
{
    tcgen05_fence_before_thread_sync();
    group_sync<GROUP>();
    tcgen05_fence_after_thread_sync();
    if (threadIdx.x < 32) tcgen05_dealloc<GROUP>(s.tmem, 512);
}

// Until the commit of that phase; then tensor memory may be read. Every thread.
template <int GROUP> FA4_DEVICE void wait_done(probe_smem &s, uint32_t parity)
{
    if constexpr (GROUP == 1)
        mbarrier_wait(shared_address(&s.done), parity);
    else
        mbarrier_wait_cluster(shared_address(&s.done), parity);
    tcgen05_fence_after_thread_sync();
}

// After tensor memory was written by threads, before the tensor cores read it.
template <int GROUP> FA4_DEVICE void publish_tmem()
{
    tcgen05_fence_before_thread_sync();
    group_sync<GROUP>();
    tcgen05_fence_after_thread_sync();
}

#endif
