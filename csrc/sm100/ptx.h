// tcgen05, the tensor cores and tensor memory of Blackwell (PTX ISA, "TensorCore 5th Generation Family Instructions").
// Tensor memory is 128 lanes of 512 columns of 32 bits; an address is lane << 16 | column. A warp reads and writes the
// lanes 32 (warp % 4) .. + 31 only; the tensor cores all of them.
//
// CTAS, the "cta_group" of most of these: 1, or 2 where two CTAs of a cluster work as a pair. One thread of the first
// then issues a product of both: each CTA holds half of the rows of a and d and half of the rows of b, all at the same
// addresses.
#ifndef FA4_SM100_PTX_H
#define FA4_SM100_PTX_H

#include "../cuda/ptx.h"

// ---- Tensor memory

// PTX ISA, "tcgen05.alloc": by one warp of each CTA; the address goes to shared memory. Waits until there are as many
// free columns.
template <int CTAS> FA4_DEVICE void tcgen05_alloc(uint32_t dst, uint32_t columns)
{
    asm volatile("tcgen05.alloc.cta_group::%2.sync.aligned.shared::cta.b32 [%0], %1;"
                 :
                 : "r"(dst), "r"(columns), "n"(CTAS)
                 : "memory");
}

// PTX ISA, "tcgen05.relinquish_alloc_permit": this CTA allocates no more.
template <int CTAS> FA4_DEVICE void tcgen05_relinquish_alloc_permit()
{
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::%0.sync.aligned;" : : "n"(CTAS) : "memory");
}

template <int CTAS> FA4_DEVICE void tcgen05_dealloc(uint32_t tmem, uint32_t columns)
{
    asm volatile("tcgen05.dealloc.cta_group::%2.sync.aligned.b32 %0, %1;"
                 :
                 : "r"(tmem), "r"(columns), "n"(CTAS)
                 : "memory");
}

// PTX ISA, "tcgen05.fence": tcgen05 operations before it come before what a synchronisation after it orders.
FA4_DEVICE void tcgen05_fence_before_thread_sync()
{
    asm volatile("tcgen05.fence::before_thread_sync;" : : : "memory");
}

// PTX ISA, "tcgen05.fence": tcgen05 operations after it come after what a synchronisation before it orders.
FA4_DEVICE void tcgen05_fence_after_thread_sync()
{
    asm volatile("tcgen05.fence::after_thread_sync;" : : : "memory");
}

FA4_DEVICE void tcgen05_wait_ld()
{
    asm volatile("tcgen05.wait::ld.sync.aligned;" : : : "memory");
}

FA4_DEVICE void tcgen05_wait_st()
{
    asm volatile("tcgen05.wait::st.sync.aligned;" : : : "memory");
}

#define FA4_16(f, i)                                                                                           \
    f(i), f(i + 1), f(i + 2), f(i + 3), f(i + 4), f(i + 5), f(i + 6), f(i + 7), f(i + 8), f(i + 9), f(i + 10), \
        f(i + 11), f(i + 12), f(i + 13), f(i + 14), f(i + 15)
#define FA4_OUT(i) "=f"(d[i])
#define FA4_IN(i) "r"(a[i])
#define FA4_IN_F(i) "f"(a[i])

// PTX ISA, "tcgen05.ld", 32x32b: the warp's thread t gets lane t, d[i] column i. The registers may be used at once;
// only tcgen05_wait_ld says that the columns may be overwritten.
FA4_DEVICE void tcgen05_ld_32x32b_x32(float *d, uint32_t tmem)
{
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x32.b32 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, [%32];"
                 : FA4_16(FA4_OUT, 0), FA4_16(FA4_OUT, 16)
                 : "r"(tmem)
                 : "memory");
}

// PTX ISA, "tcgen05.ld.red", of sm_103: also the largest of them; NaN when one is.
FA4_DEVICE void tcgen05_ld_red_32x32b_x32_max_nan(float *d, float *largest, uint32_t tmem)
{
    asm volatile("tcgen05.ld.red.sync.aligned.32x32b.x32.max.NaN.f32 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, [%33];"
                 : FA4_16(FA4_OUT, 0), FA4_16(FA4_OUT, 16), "=f"(*largest)
                 : "r"(tmem)
                 : "memory");
}

// PTX ISA, "tcgen05.st", 32x32b: thread t writes lane t, a[i] to column i.
FA4_DEVICE void tcgen05_st_32x32b_x16(uint32_t tmem, const uint32_t *a)
{
    asm volatile("tcgen05.st.sync.aligned.32x32b.x16.b32 [%0], "
                 "{%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16};"
                 :
                 : "r"(tmem), FA4_16(FA4_IN, 0)
                 : "memory");
}

FA4_DEVICE void tcgen05_st_32x32b_x32(uint32_t tmem, const float *a)
{
    asm volatile("tcgen05.st.sync.aligned.32x32b.x32.b32 [%0], "
                 "{%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,"
                 "%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32};"
                 :
                 : "r"(tmem), FA4_16(FA4_IN_F, 0), FA4_16(FA4_IN_F, 16)
                 : "memory");
}

// ---- Products

// PTX ISA, "Instruction descriptor", kind f16 with f32 results: d[m][n] (+)= a[m][k] b[n][k].
FA4_DEVICE constexpr uint32_t instruction_descriptor(int m, int n, bool bf16, bool b_n_major)
{
    return 1u << 4                     // d: f32
           | (uint32_t)bf16 << 7       // a
           | (uint32_t)bf16 << 10      // b
           | (uint32_t)b_n_major << 16 // b: n is the contiguous dimension
           | (uint32_t)(n / 8) << 17   //
           | (uint32_t)(m / 16) << 24;
}

// Of an instruction descriptor: the product is that of -a.
enum { NEGATE_A = 1 << 13 };

// PTX ISA, "Shared memory descriptor": a tile whose rows of SWIZZLE bytes lie in groups of 8, as a tensor copy writes
// them. leading: bytes between neighbouring slabs along the row (only read for an N-major operand wider than a slab).
template <int SWIZZLE> FA4_DEVICE uint64_t shared_descriptor(uint32_t address, uint32_t leading)
{
    static_assert(SWIZZLE == 64 || SWIZZLE == 128, "rows of 64 or 128 bytes");
    const uint64_t stride = 8 * SWIZZLE; // bytes between groups of 8 rows
    const uint64_t mode = SWIZZLE == 128 ? 2 : 4;
    return mode << 61 | UINT64_C(1) << 46 | stride >> 4 << 32 | (uint64_t)(leading >> 4) << 16 |
           (address & 0x3FFFF) >> 4;
}

// PTX ISA, "tcgen05.mma": the whole warp comes here, the elected thread issues. d in tensor memory is added to unless
// accumulate is 0. a in shared memory (ss) or tensor memory (ts), b in shared memory.
template <int CTAS>
FA4_DEVICE void tcgen05_mma_ss(uint32_t d, uint64_t a, uint64_t b, uint32_t descriptor, uint32_t accumulate,
                               uint32_t elected)
{
    asm volatile("{\n\t"
                 ".reg .pred p, e;\n\t"
                 "setp.ne.b32 p, %4, 0;\n\t"
                 "setp.ne.b32 e, %5, 0;\n\t"
                 "@e tcgen05.mma.cta_group::%6.kind::f16 [%0], %1, %2, %3, p;\n\t"
                 "}"
                 :
                 : "r"(d), "l"(a), "l"(b), "r"(descriptor), "r"(accumulate), "r"(elected), "n"(CTAS)
                 : "memory");
}

template <int CTAS>
FA4_DEVICE void tcgen05_mma_ts(uint32_t d, uint32_t a, uint64_t b, uint32_t descriptor, uint32_t accumulate,
                               uint32_t elected)
{
    asm volatile("{\n\t"
                 ".reg .pred p, e;\n\t"
                 "setp.ne.b32 p, %4, 0;\n\t"
                 "setp.ne.b32 e, %5, 0;\n\t"
                 "@e tcgen05.mma.cta_group::%6.kind::f16 [%0], [%1], %2, %3, p;\n\t"
                 "}"
                 :
                 : "r"(d), "r"(a), "l"(b), "r"(descriptor), "r"(accumulate), "r"(elected), "n"(CTAS)
                 : "memory");
}

// PTX ISA, "tcgen05.commit": one arrival at mbar when all products that the elected thread has issued are complete; of
// a pair's products one in each CTA.
template <int CTAS> FA4_DEVICE void tcgen05_commit(uint32_t mbar, uint32_t elected)
{
    if constexpr (CTAS == 1)
        asm volatile("{\n\t"
                     ".reg .pred e;\n\t"
                     "setp.ne.b32 e, %1, 0;\n\t"
                     "@e tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];\n\t"
                     "}"
                     :
                     : "r"(mbar), "r"(elected)
                     : "memory");
    else
        asm volatile("{\n\t"
                     ".reg .pred e;\n\t"
                     "setp.ne.b32 e, %1, 0;\n\t"
                     "@e tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 "
                     "[%0], %2;\n\t"
                     "}"
                     :
                     : "r"(mbar), "r"(elected), "h"((uint16_t)3)
                     : "memory");
}

// ---- Tensor copies of queries and output: [batch, unit, query, head, column], innermost last

FA4_DEVICE void cp_async_bulk_tensor_5d_load(uint32_t dst, const CUtensorMap *map, int c0, int c1, int c2, int c3,
                                             int c4, uint32_t mbar, uint64_t l2_policy)
{
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;"
                 :
                 : "r"(dst), "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(mbar), "l"(l2_policy)
                 : "memory");
}

// As those without _pair, but mbar may be in the other CTA of the pair.
FA4_DEVICE void cp_async_bulk_tensor_4d_load_pair(uint32_t dst, const CUtensorMap *map, int c0, int c1, int c2, int c3,
                                                  uint32_t mbar, uint64_t l2_policy)
{
    asm volatile("cp.async.bulk.tensor.4d.cta_group::2.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7;"
                 :
                 : "r"(dst), "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(mbar), "l"(l2_policy)
                 : "memory");
}

FA4_DEVICE void cp_async_bulk_tensor_5d_load_pair(uint32_t dst, const CUtensorMap *map, int c0, int c1, int c2, int c3,
                                                  int c4, uint32_t mbar, uint64_t l2_policy)
{
    asm volatile("cp.async.bulk.tensor.5d.cta_group::2.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;"
                 :
                 : "r"(dst), "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(mbar), "l"(l2_policy)
                 : "memory");
}

FA4_DEVICE void cp_async_bulk_tensor_5d_store(const CUtensorMap *map, int c0, int c1, int c2, int c3, int c4,
                                              uint32_t src)
{
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];"
                 :
                 : "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(src)
                 : "memory");
}

// ---- Clusters

FA4_DEVICE uint32_t cluster_ctarank()
{
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// PTX ISA, "mapa": the address of the same place in the shared memory of another CTA of the cluster.
FA4_DEVICE uint32_t mapa(uint32_t address, uint32_t rank)
{
    uint32_t mapped;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}

// PTX ISA, "barrier.cluster": all threads of all CTAs of the cluster.
FA4_DEVICE void barrier_cluster()
{
    asm volatile("barrier.cluster.arrive.release.aligned;\n\t"
                 "barrier.cluster.wait.acquire.aligned;"
                 :
                 :
                 : "memory");
}

// PTX ISA, "mbarrier.arrive": at a barrier of any CTA of the cluster. Release costs a fence of the whole GPU's memory;
// relaxed none, and orders nothing but what tcgen05_fence_before_thread_sync stands before.
FA4_DEVICE void mbarrier_arrive_release_cluster(uint32_t mbar)
{
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" : : "r"(mbar) : "memory");
}

FA4_DEVICE void mbarrier_arrive_relaxed_cluster(uint32_t mbar)
{
    asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" : : "r"(mbar) : "memory");
}

FA4_DEVICE void mbarrier_arrive_expect_tx_relaxed_cluster(uint32_t mbar, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.relaxed.cluster.shared::cluster.b64 _, [%0], %1;"
                 :
                 : "r"(mbar), "r"(bytes)
                 : "memory");
}

// PTX ISA, "mbarrier.try_wait", for arrivals of any CTA of the cluster. Acquire would empty the L1 cache; relaxed needs
// a fence after it: tcgen05_fence_after_thread_sync for tensor memory, fence_acquire_shared_cluster for shared memory.
FA4_DEVICE bool mbarrier_try_wait_parity_relaxed_cluster(uint32_t mbar, uint32_t parity)
{
    uint32_t done;
    asm volatile("{\n\t"
                 ".reg .pred p;\n\t"
                 "mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 p, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, p;\n\t"
                 "}"
                 : "=r"(done)
                 : "r"(mbar), "r"(parity)
                 : "memory");
    return done;
}

#ifdef FA4_BOUNDED_WAITS
#    define mbarrier_wait_relaxed_cluster(mbar, parity) \
        FA4_WAIT_BOUNDED(mbarrier_try_wait_parity_relaxed_cluster, mbar, parity)
#else
FA4_DEVICE void mbarrier_wait_relaxed_cluster(uint32_t mbar, uint32_t parity)
{
    while (!mbarrier_try_wait_parity_relaxed_cluster(mbar, parity)) {
    }
}
#endif

// PTX ISA, "membar / fence": what was done to shared memory before arrivals that this thread has seen by relaxed waits
// comes before what it does from here on.
FA4_DEVICE void fence_acquire_shared_cluster()
{
    asm volatile("fence.acquire.sync_restrict::shared::cluster.cluster;" : : : "memory");
}

// ---- Arithmetic on pairs of floats

typedef uint64_t pair; // element 0 in the low half

FA4_DEVICE pair pack(float x, float y)
{
    pair p;
    asm("mov.b64 %0, {%1, %2};" : "=l"(p) : "f"(x), "f"(y));
    return p;
}

FA4_DEVICE void unpack(float &x, float &y, pair p)
{
    asm("mov.b64 {%0, %1}, %2;" : "=f"(x), "=f"(y) : "l"(p));
}

FA4_DEVICE pair fma_rn_ftz_f32x2(pair a, pair b, pair c)
{
    pair d;
    asm("fma.rn.ftz.f32x2 %0, %1, %2, %3;" : "=l"(d) : "l"(a), "l"(b), "l"(c));
    return d;
}

FA4_DEVICE pair add_rn_ftz_f32x2(pair a, pair b)
{
    pair d;
    asm("add.rn.ftz.f32x2 %0, %1, %2;" : "=l"(d) : "l"(a), "l"(b));
    return d;
}

FA4_DEVICE pair add_rm_ftz_f32x2(pair a, pair b)
{
    pair d;
    asm("add.rm.ftz.f32x2 %0, %1, %2;" : "=l"(d) : "l"(a), "l"(b));
    return d;
}

FA4_DEVICE pair mul_rn_ftz_f32x2(pair a, pair b)
{
    pair d;
    asm("mul.rn.ftz.f32x2 %0, %1, %2;" : "=l"(d) : "l"(a), "l"(b));
    return d;
}

// PTX ISA, "shl", "shr": by 32 and more too, which gives 0.
FA4_DEVICE uint32_t shl(uint32_t a, uint32_t b)
{
    uint32_t d;
    asm("shl.b32 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

FA4_DEVICE uint32_t shr(uint32_t a, uint32_t b)
{
    uint32_t d;
    asm("shr.u32 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

// PTX ISA, "max": of three; NaN when one of them is.
FA4_DEVICE float max3_nan(float a, float b, float c)
{
    float y;
    asm("max.NaN.f32 %0, %1, %2, %3;" : "=f"(y) : "f"(a), "f"(b), "f"(c));
    return y;
}

#endif
