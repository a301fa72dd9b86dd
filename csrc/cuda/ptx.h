// PTX instructions that Hopper and Blackwell kernels share: one function each, named after the instruction, operands in
// its order. Addresses of shared memory are 32-bit shared-window addresses (shared_address). What reads, writes or
// orders memory clobbers "memory".
#ifndef FA4_CUDA_PTX_H
#define FA4_CUDA_PTX_H

#include <cuda.h>
#include <stdint.h>

#define FA4_DEVICE static __device__ __forceinline__

FA4_DEVICE uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

// The compiler no longer knows x: what follows from it is computed where it stands, not before a loop, where it would
// take registers.
template <typename T> FA4_DEVICE void forget(T &x)
{
    if constexpr (sizeof(T) == 8)
        asm volatile("" : "+l"(x));
    else
        asm volatile("" : "+r"(x));
}

// PTX ISA, "elect.sync": true in one lane of a full warp, always the same one.
FA4_DEVICE bool elect_sync()
{
    uint32_t elected;
    asm volatile("{\n\t"
                 ".reg .pred p;\n\t"
                 "elect.sync _|p, 0xffffffff;\n\t"
                 "selp.u32 %0, 1, 0, p;\n\t"
                 "}"
                 : "=r"(elected)
                 :
                 : "memory");
    return elected;
}

// ---- mbarrier

// PTX ISA, "mbarrier.init": a phase completes after this many arrivals and all bytes expected in it.
FA4_DEVICE void mbarrier_init(uint32_t mbar, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(mbar), "r"(arrivals) : "memory");
}

// PTX ISA, "membar / fence": makes mbarrier_init visible to the async proxy.
FA4_DEVICE void fence_mbarrier_init()
{
    asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
}

FA4_DEVICE void mbarrier_arrive(uint32_t mbar)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(mbar) : "memory");
}

// PTX ISA, "mbarrier.arrive": one arrival, and the phase also waits for this many bytes of copies.
FA4_DEVICE void mbarrier_arrive_expect_tx(uint32_t mbar, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(mbar), "r"(bytes) : "memory");
}

// PTX ISA, "mbarrier.try_wait": true once the phase with this parity is complete; may wait a while before it says no.
FA4_DEVICE bool mbarrier_try_wait_parity(uint32_t mbar, uint32_t parity)
{
    uint32_t done;
    asm volatile("{\n\t"
                 ".reg .pred p;\n\t"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, p;\n\t"
                 "}"
                 : "=r"(done)
                 : "r"(mbar), "r"(parity)
                 : "memory");
    return done;
}

#ifdef FA4_BOUNDED_WAITS
#    include "bounded.h"
#else
FA4_DEVICE void mbarrier_wait(uint32_t mbar, uint32_t parity)
{
    while (!mbarrier_try_wait_parity(mbar, parity)) {
    }
}
#endif

// ---- Barriers of warps, fences, registers

// PTX ISA, "bar": waits until this many threads have arrived at or wait for barrier id.
FA4_DEVICE void bar_sync(uint32_t id, uint32_t threads)
{
    asm volatile("bar.sync %0, %1;" : : "r"(id), "r"(threads) : "memory");
}

// PTX ISA, "bar": arrives without waiting.
FA4_DEVICE void bar_arrive(uint32_t id, uint32_t threads)
{
    asm volatile("bar.arrive %0, %1;" : : "r"(id), "r"(threads) : "memory");
}

// PTX ISA, "fence.proxy.async": this thread's accesses to shared memory before it come before those that the tensor
// cores and the copy engine make after the next synchronisation.
FA4_DEVICE void fence_proxy_async_shared()
{
    asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}

// PTX ISA, "setmaxnreg": registers that each thread of this warpgroup may use from now on.
#define setmaxnreg_inc(n) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"((int)(n)))
#define setmaxnreg_dec(n) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"((int)(n)))

// ---- Tensor copies

// L2 eviction priorities as createpolicy makes them for a whole range.
#define FA4_EVICT_FIRST UINT64_C(0x12F0000000000000)
#define FA4_EVICT_LAST UINT64_C(0x14F0000000000000)

FA4_DEVICE void prefetch_tensormap(const CUtensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" : : "l"(map) : "memory");
}

// PTX ISA, "cp.async.bulk.tensor": a box of a 4-D tensor into shared memory; its bytes count towards mbar. What lies
// outside the tensor arrives as zeros and counts too.
FA4_DEVICE void cp_async_bulk_tensor_4d_load(uint32_t dst, const CUtensorMap *map, int c0, int c1, int c2, int c3,
                                             uint32_t mbar, uint64_t l2_policy)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;"
                 :
                 : "r"(dst), "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(mbar), "l"(l2_policy)
                 : "memory");
}

// PTX ISA, "cp.async.bulk.tensor": a box from shared memory; what lies outside the tensor is not written.
FA4_DEVICE void cp_async_bulk_tensor_4d_store(const CUtensorMap *map, int c0, int c1, int c2, int c3, uint32_t src)
{
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];"
                 :
                 : "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(src)
                 : "memory");
}

FA4_DEVICE void cp_async_bulk_commit_group()
{
    asm volatile("cp.async.bulk.commit_group;" : : : "memory");
}

// PTX ISA, "cp.async.bulk.wait_group": this thread's stores have read their shared memory.
FA4_DEVICE void cp_async_bulk_wait_group_read_0()
{
    asm volatile("cp.async.bulk.wait_group.read 0;" : : : "memory");
}

// The same, and what they wrote is visible.
FA4_DEVICE void cp_async_bulk_wait_group_0()
{
    asm volatile("cp.async.bulk.wait_group 0;" : : : "memory");
}

// PTX ISA, "stmatrix": four 8x8 matrices of 16-bit elements. Lanes 8i..8i+7 give the addresses of matrix i's rows; of
// matrix i, register a[i] holds row lane / 4, columns 2 (lane % 4) and the next.
FA4_DEVICE void stmatrix_x4(uint32_t row, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(row), "r"(a0), "r"(a1), "r"(a2), "r"(a3)
                 : "memory");
}

FA4_DEVICE uint32_t ld_shared_32(uint32_t src)
{
    uint32_t d;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(d) : "r"(src) : "memory");
    return d;
}

// PTX ISA, "st": 16 bytes.
FA4_DEVICE void st_shared_v4(uint32_t dst, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3)
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(dst), "r"(a0), "r"(a1), "r"(a2), "r"(a3)
                 : "memory");
}

// ---- Arithmetic

// PTX ISA, "ex2": within 2 ulp; 2^-inf is +0.
FA4_DEVICE float ex2_approx_ftz(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

FA4_DEVICE float lg2_approx_ftz(float x)
{
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// PTX ISA, "rcp": within 1 ulp.
FA4_DEVICE float rcp_approx_ftz(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// PTX ISA, "max": NaN when one of them is.
FA4_DEVICE float max_nan(float a, float b)
{
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

// PTX ISA, "min": the number when one of them is NaN.
FA4_DEVICE float min_number(float a, float b)
{
    float y;
    asm("min.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

// PTX ISA, "cvt": two floats rounded to 16 bits, a in the low half.
FA4_DEVICE uint32_t cvt_rn_bf16x2(float a, float b)
{
    uint32_t y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a));
    return y;
}

FA4_DEVICE uint32_t cvt_rn_f16x2(float a, float b)
{
    uint32_t y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(b), "f"(a));
    return y;
}

#endif
