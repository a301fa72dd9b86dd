// Instructions of Blackwell that the forward has not, or not with every option open, so that what is assumed of each
// can be asked one by one. GROUP: 1, or 2 for the tensor cores of a CTA pair. Sections of the PTX ISA as in
// csrc/sm100/ptx.h.
#ifndef FA4_VERIFY_PTX_H
#define FA4_VERIFY_PTX_H

#include "../sm100/ptx.h"

// PTX ISA, "mbarrier.try_wait", for arrivals of any CTA of the cluster, and all that these have done.
FA4_DEVICE bool mbarrier_try_wait_parity_cluster(uint32_t mbar, uint32_t parity)
{
    uint32_t done;
    asm volatile("{\n\t"
                 ".reg .pred p;\n\t"
                 "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, p;\n\t"
                 "}"
                 : "=r"(done)
                 : "r"(mbar), "r"(parity)
                 : "memory");
    return done;
}

#define FA4_R8(d, i)                                                                                            \
    "=r"(d[i]), "=r"(d[i + 1]), "=r"(d[i + 2]), "=r"(d[i + 3]), "=r"(d[i + 4]), "=r"(d[i + 5]), "=r"(d[i + 6]), \
        "=r"(d[i + 7])
#define FA4_A8(a, i) \
    "r"(a[i]), "r"(a[i + 1]), "r"(a[i + 2]), "r"(a[i + 3]), "r"(a[i + 4]), "r"(a[i + 5]), "r"(a[i + 6]), "r"(a[i + 7])

// The warp's thread t has lane t, word i column i.
FA4_DEVICE void tcgen05_ld_32x32b_x8(uint32_t *d, uint32_t tmem)
{
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x8.b32 {%0,%1,%2,%3,%4,%5,%6,%7}, [%8];"
                 : FA4_R8(d, 0)
                 : "r"(tmem)
                 : "memory");
}

FA4_DEVICE void tcgen05_st_32x32b_x8(uint32_t tmem, const uint32_t *a)
{
    asm volatile("tcgen05.st.sync.aligned.32x32b.x8.b32 [%0], {%1,%2,%3,%4,%5,%6,%7,%8};"
                 :
                 : "r"(tmem), FA4_A8(a, 0)
                 : "memory");
}

FA4_DEVICE void tcgen05_ld_16x64b_x8(uint32_t *d, uint32_t tmem)
{
    asm volatile("tcgen05.ld.sync.aligned.16x64b.x8.b32 {%0,%1,%2,%3,%4,%5,%6,%7}, [%8];"
                 : FA4_R8(d, 0)
                 : "r"(tmem)
                 : "memory");
}

FA4_DEVICE void tcgen05_ld_16x128b_x4(uint32_t *d, uint32_t tmem)
{
    asm volatile("tcgen05.ld.sync.aligned.16x128b.x4.b32 {%0,%1,%2,%3,%4,%5,%6,%7}, [%8];"
                 : FA4_R8(d, 0)
                 : "r"(tmem)
                 : "memory");
}

FA4_DEVICE void tcgen05_ld_16x256b_x2(uint32_t *d, uint32_t tmem)
{
    asm volatile("tcgen05.ld.sync.aligned.16x256b.x2.b32 {%0,%1,%2,%3,%4,%5,%6,%7}, [%8];"
                 : FA4_R8(d, 0)
                 : "r"(tmem)
                 : "memory");
}

// Threads 16..31 read 64 columns further.
FA4_DEVICE void tcgen05_ld_16x32bx2_x8(uint32_t *d, uint32_t tmem)
{
    asm volatile("tcgen05.ld.sync.aligned.16x32bx2.x8.b32 {%0,%1,%2,%3,%4,%5,%6,%7}, [%8], 64;"
                 : FA4_R8(d, 0)
                 : "r"(tmem)
                 : "memory");
}

// Products, from the one thread that calls: d (+)= a b.
template <int GROUP>
FA4_DEVICE void tcgen05_mma_ss(uint32_t d, uint64_t a, uint64_t b, uint32_t descriptor, uint32_t accumulate)
{
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %4, 0;\n\t"
                 "tcgen05.mma.cta_group::%5.kind::f16 [%0], %1, %2, %3, p;\n\t}"
                 :
                 : "r"(d), "l"(a), "l"(b), "r"(descriptor), "r"(accumulate), "n"(GROUP)
                 : "memory");
}

template <int GROUP>
FA4_DEVICE void tcgen05_mma_ts(uint32_t d, uint32_t a, uint64_t b, uint32_t descriptor, uint32_t accumulate)
{
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %4, 0;\n\t"
                 "tcgen05.mma.cta_group::%5.kind::f16 [%0], [%1], %2, %3, p;\n\t}"
                 :
                 : "r"(d), "r"(a), "l"(b), "r"(descriptor), "r"(accumulate), "n"(GROUP)
                 : "memory");
}

FA4_DEVICE void tcgen05_mma_tf32(uint32_t d, uint64_t a, uint64_t b, uint32_t descriptor, uint32_t accumulate)
{
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %4, 0;\n\t"
                 "tcgen05.mma.cta_group::1.kind::tf32 [%0], %1, %2, %3, p;\n\t}"
                 :
                 : "r"(d), "l"(a), "l"(b), "r"(descriptor), "r"(accumulate)
                 : "memory");
}

// Keeps a for the next product, which is the last that uses it.
FA4_DEVICE void tcgen05_mma_collector_fill(uint32_t d, uint64_t a, uint64_t b, uint32_t descriptor, uint32_t accumulate)
{
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %4, 0;\n\t"
                 "tcgen05.mma.cta_group::1.kind::f16.collector::a::fill [%0], %1, %2, %3, p;\n\t}"
                 :
                 : "r"(d), "l"(a), "l"(b), "r"(descriptor), "r"(accumulate)
                 : "memory");
}

FA4_DEVICE void tcgen05_mma_collector_lastuse(uint32_t d, uint64_t a, uint64_t b, uint32_t descriptor,
                                              uint32_t accumulate)
{
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %4, 0;\n\t"
                 "tcgen05.mma.cta_group::1.kind::f16.collector::a::lastuse [%0], %1, %2, %3, p;\n\t}"
                 :
                 : "r"(d), "l"(a), "l"(b), "r"(descriptor), "r"(accumulate)
                 : "memory");
}

// Lanes whose bit is 1 stay as they are: 4 words, or 8 of a CTA pair.
template <int GROUP>
FA4_DEVICE void tcgen05_mma_masked(uint32_t d, uint64_t a, uint64_t b, uint32_t descriptor, const uint32_t *off)
{
    if constexpr (GROUP == 1)
        asm volatile("tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, {%4, %5, %6, %7}, 0;"
                     :
                     : "r"(d), "l"(a), "l"(b), "r"(descriptor), "r"(off[0]), "r"(off[1]), "r"(off[2]), "r"(off[3])
                     : "memory");
    else
        asm volatile("tcgen05.mma.cta_group::2.kind::f16 [%0], %1, %2, %3, {%4, %5, %6, %7, %8, %9, %10, %11}, 0;"
                     :
                     : "r"(d), "l"(a), "l"(b), "r"(descriptor), FA4_A8(off, 0)
                     : "memory");
}

// One arrival at mbar, of a pair at both CTAs' mbar, when this thread's products and copies so far are complete.
template <int GROUP> FA4_DEVICE void tcgen05_commit(uint32_t mbar)
{
    if constexpr (GROUP == 1)
        asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];"
                     :
                     : "r"(mbar)
                     : "memory");
    else
        asm volatile("{\n\t.reg .b16 both;\n\tmov.b16 both, 3;\n\t"
                     "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 "
                     "[%0], both;\n\t}"
                     :
                     : "r"(mbar)
                     : "memory");
}

// From shared to tensor memory; kind: 0 128x256b, 1 4x256b, 2 32x128b.warpx4.
template <int GROUP> FA4_DEVICE void tcgen05_cp(int kind, uint32_t tmem, uint64_t descriptor)
{
    if (kind == 0)
        asm volatile("tcgen05.cp.cta_group::%2.128x256b [%0], %1;"
                     :
                     : "r"(tmem), "l"(descriptor), "n"(GROUP)
                     : "memory");
    if (kind == 1)
        asm volatile("tcgen05.cp.cta_group::%2.4x256b [%0], %1;" : : "r"(tmem), "l"(descriptor), "n"(GROUP) : "memory");
    if (kind == 2)
        asm volatile("tcgen05.cp.cta_group::%2.32x128b.warpx4 [%0], %1;"
                     :
                     : "r"(tmem), "l"(descriptor), "n"(GROUP)
                     : "memory");
}

#endif
