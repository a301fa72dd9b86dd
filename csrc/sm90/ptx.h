// wgmma, the tensor cores of Hopper (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions"). A warpgroup computes
// d[64][N] (+)= a[64][16] b[16][N]; d is in registers. Thread t, with warp w = t / 32 % 4 and lane = t % 32, holds in
// d[i]
//     row    16 w + lane / 4 + 8 (i / 2 % 2)
//     column 8 (i / 4) + 2 (lane % 4) + i % 2
// and in a[j], two 16-bit elements each, row 16 w + lane / 4 + 8 (j % 2), columns 2 (lane % 4) + 8 (j / 2) and the
// next: pairs of neighbours in d, rounded, are the a of a following product.
#ifndef FA4_SM90_PTX_H
#define FA4_SM90_PTX_H

#include "../cuda/ptx.h"

// PTX ISA, "wgmma.fence": registers written before it may be operands of the wgmma after it.
FA4_DEVICE void wgmma_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" : : : "memory");
}

FA4_DEVICE void wgmma_commit_group()
{
    asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
}

// PTX ISA, "wgmma.wait_group": at most PENDING of the youngest groups are still running.
template <int PENDING> FA4_DEVICE void wgmma_wait_group()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(PENDING) : "memory");
}

// Not an instruction. The compiler does not know that a wgmma writes its registers until the wait; this keeps what
// reads or writes them after the wait from moving before it.
template <int N> FA4_DEVICE void wgmma_results(float (&d)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i]) : : "memory");
}

// PTX ISA, "Matrix Descriptor": a tile whose rows of SWIZZLE bytes lie in groups of 8, as a tensor copy writes them.
// leading: bytes between neighbouring tiles along the row (only read for an N-major operand wider than a tile). The
// lower half; adding n to it moves the start by 16 n bytes. The upper half is the same for all such tiles.
FA4_DEVICE uint32_t matrix_descriptor(uint32_t address, uint32_t leading)
{
    return leading >> 4 << 16 | address >> 4;
}

// Its mode, and the bytes between groups of 8 rows.
template <int SWIZZLE> constexpr uint32_t matrix_descriptor_high = (SWIZZLE == 128 ? 1u : 2u) << 30 | 8 * SWIZZLE >> 4;

// "%<t>0, ... %<t>9" and the same ten registers as operands.
#define FA4_TEN(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9"
#define FA4_TWO(t) "%" #t "0,%" #t "1"
#define FA4_FOUR(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3"
#define FA4_SIX(t) FA4_FOUR(t) ",%" #t "4,%" #t "5"
#define FA4_EIGHT(t) FA4_SIX(t) ",%" #t "6,%" #t "7"
#define FA4_TENS_3 FA4_TEN() "," FA4_TEN(1) "," FA4_TEN(2)
#define FA4_TENS_6 FA4_TENS_3 "," FA4_TEN(3) "," FA4_TEN(4) "," FA4_TEN(5)
#define FA4_TENS_9 FA4_TENS_6 "," FA4_TEN(6) "," FA4_TEN(7) "," FA4_TEN(8)
#define FA4_D32 FA4_TENS_3 "," FA4_TWO(3)
#define FA4_D40 FA4_TENS_3 "," FA4_TEN(3)
#define FA4_D48 FA4_TENS_3 "," FA4_TEN(3) "," FA4_EIGHT(4)
#define FA4_D56 FA4_TENS_3 "," FA4_TEN(3) "," FA4_TEN(4) "," FA4_SIX(5)
#define FA4_D64 FA4_TENS_6 "," FA4_FOUR(6)
#define FA4_D128 FA4_TENS_9 "," FA4_TEN(9) "," FA4_TEN(10) "," FA4_TEN(11) "," FA4_EIGHT(12)

#define FA4_F8(d, i)                                                                                            \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define FA4_F16(d, i) FA4_F8(d, i), FA4_F8(d, i + 8)
#define FA4_F32(d, i) FA4_F16(d, i), FA4_F16(d, i + 16)
#define FA4_O32(d) FA4_F32(d, 0)
#define FA4_O40(d) FA4_F32(d, 0), FA4_F8(d, 32)
#define FA4_O48(d) FA4_F32(d, 0), FA4_F16(d, 32)
#define FA4_O56(d) FA4_F32(d, 0), FA4_F16(d, 32), FA4_F8(d, 48)
#define FA4_O64(d) FA4_F32(d, 0), FA4_F32(d, 32)
#define FA4_O128(d) FA4_O64(d), FA4_F32(d, 64), FA4_F32(d, 96)

// wgmma.mma_async.m64nNk16 with f32 results, by the number R = N / 2 of registers of d; i0..i5 are the six numbers that
// follow R - 1. d is added to unless accumulate is 0. FA4_PTX_TYPE, of a and b, is "bf16" or "f16".
//     wgmma_ss: a and b are K-major tiles in shared memory.
//     wgmma_rs: a in registers, b an N-major tile in shared memory.
#define FA4_WGMMA(N, R, i0, i1, i2, i3, i4, i5, i6)                                                                   \
    template <int SWIZZLE> FA4_DEVICE void wgmma_ss(float (&d)[R], uint32_t a, uint32_t b, int accumulate)            \
    {                                                                                                                 \
        asm volatile("{\n\t.reg .pred p;\n\t.reg .b64 a, b;\n\tmov.b64 a, {%" #i0 ", %" #i3 "};\n\tmov.b64 b, {%" #i1 \
                     ", %" #i3 "};\n\tsetp.ne.b32 p, %" #i2 ", 0;\n\t"                                                \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." FA4_PTX_TYPE "." FA4_PTX_TYPE " "              \
                     "{" FA4_D##R "}, a, b, p, 1, 1, 0, 0;\n\t}"                                                      \
                     : FA4_O##R(d)                                                                                    \
                     : "r"(a), "r"(b), "r"(accumulate), "n"(matrix_descriptor_high<SWIZZLE>)                          \
                     : "memory");                                                                                     \
    }                                                                                                                 \
    template <int SWIZZLE> FA4_DEVICE void wgmma_rs(float (&d)[R], const uint32_t *a, uint32_t b, int accumulate)     \
    {                                                                                                                 \
        asm volatile("{\n\t.reg .pred p;\n\t.reg .b64 b;\n\tmov.b64 b, {%" #i4 ", %" #i6 "};\n\tsetp.ne.b32 p, %" #i5 \
                     ", 0;\n\t"                                                                                       \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." FA4_PTX_TYPE "." FA4_PTX_TYPE " "              \
                     "{" FA4_D##R "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, b, p, 1, 1, 1;\n\t}"                  \
                     : FA4_O##R(d)                                                                                    \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate),                           \
                       "n"(matrix_descriptor_high<SWIZZLE>)                                                           \
                     : "memory");                                                                                     \
    }

FA4_WGMMA(64, 32, 32, 33, 34, 35, 36, 37, 38)
FA4_WGMMA(80, 40, 40, 41, 42, 43, 44, 45, 46)
FA4_WGMMA(96, 48, 48, 49, 50, 51, 52, 53, 54)
FA4_WGMMA(112, 56, 56, 57, 58, 59, 60, 61, 62)
FA4_WGMMA(128, 64, 64, 65, 66, 67, 68, 69, 70)
FA4_WGMMA(256, 128, 128, 129, 130, 131, 132, 133, 134)

#endif
