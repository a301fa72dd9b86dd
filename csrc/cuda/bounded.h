// Debug builds, compiled with -DFA4_BOUNDED_WAITS=<nanoseconds, at most 3e9>: a wait at an mbarrier that takes longer
// is written down and stops the kernel. ptx.h includes this in place of its own mbarrier_wait. Named and cluster
// barriers have no wait that gives up; who waits there waits in the end for a warp that is at an mbarrier.
#ifndef FA4_CUDA_BOUNDED_H
#define FA4_CUDA_BOUNDED_H

#include <cuda_runtime_api.h>

// One warp's wait. 64 bytes.
typedef struct {
    uint32_t block, thread, line, parity;
    char barrier[48]; // the source's words for it, cut
} fa4_stuck_wait;
static_assert(sizeof(fa4_stuck_wait) == 64, "flash_attn4/verify/device.py reads it");

enum { FA4_STUCK_WAITS = 255 };

// In host memory, so that it outlives the context that a trap destroys.
typedef struct {
    uint32_t count; // may be more than there is room for
    uint32_t unused[15];
    fa4_stuck_wait wait[FA4_STUCK_WAITS];
} fa4_stuck_waits;

static __device__ fa4_stuck_waits *stuck_waits;

// Where this file's kernels write: <FA4_KERNEL>_stuck_waits(list), from the host.
#define FA4_JOIN(a, b) a##b
#define FA4_JOINED(a, b) FA4_JOIN(a, b)
extern "C"
    __attribute__((visibility("default"))) cudaError_t FA4_JOINED(FA4_KERNEL, _stuck_waits)(fa4_stuck_waits *list)
{
    return cudaMemcpyToSymbol(stuck_waits, &list, sizeof list);
}

// Nanoseconds, the low 32 bits.
FA4_DEVICE uint32_t globaltimer_lo()
{
    uint32_t t;
    asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(t) : : "memory");
    return t;
}

FA4_DEVICE void write_down(const char *barrier, int line, uint32_t parity)
{
    if (!stuck_waits || (int)(threadIdx.x % 32) != __ffs(__activemask()) - 1) return;
    const uint32_t place = atomicAdd_system(&stuck_waits->count, 1);
    if (place >= FA4_STUCK_WAITS) return;
    fa4_stuck_wait *wait = &stuck_waits->wait[place];
    wait->block = blockIdx.x;
    wait->thread = threadIdx.x;
    wait->line = (uint32_t)line;
    wait->parity = parity;
#pragma unroll 1
    for (int i = 0; i < (int)sizeof wait->barrier - 1 && barrier[i]; i++) wait->barrier[i] = barrier[i];
    __threadfence_system();
}

// done(): whether the phase of that parity is complete. Past the limit nothing is kept for later, so that a kernel's
// registers are those of its own.
template <typename F> FA4_DEVICE void wait_bounded(F done, uint32_t parity, const char *barrier, int line)
{
    if (done()) return;
    const uint32_t start = globaltimer_lo(), limit = FA4_BOUNDED_WAITS;
    while (!done()) {
        if (globaltimer_lo() - start < limit) continue;
        write_down(barrier, line, parity);
        while (globaltimer_lo() - start < limit + limit / 4) { // until all that wait for each other have written
        }
        __trap();
        __builtin_unreachable();
    }
}

#define FA4_WAIT_BOUNDED(try_wait, mbar, parity)                                                                   \
    wait_bounded([&, fa4_mbar = (mbar), fa4_parity = (parity)] { return try_wait(fa4_mbar, fa4_parity); }, parity, \
                 #mbar, __LINE__)
#define mbarrier_wait(mbar, parity) FA4_WAIT_BOUNDED(mbarrier_try_wait_parity, mbar, parity)

#endif
