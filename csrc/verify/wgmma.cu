// Probe of Hopper's tensor cores: operands in shared memory as descriptors say, which Blackwell's are taken to be too.
#include "probe.h"

struct wgmma_args {
    const uint32_t *in; // units of 16 bytes of shared memory, then A as [64][depth / 2] where it is in registers
    uint32_t *out;      // [128 threads][32 registers]
    int32_t units, steps;
    int32_t a_start;
    uint32_t a_high, a_low;
    int32_t a_inner, a_step, a_slab;
    int32_t b_start;
    uint32_t b_high, b_low;
    int32_t b_inner, b_step, b_slab;
};

#define FA4_D8(d, i)                                                                                            \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define FA4_D32 FA4_D8(d, 0), FA4_D8(d, 8), FA4_D8(d, 16), FA4_D8(d, 24)
#define FA4_D32_NAMES                                                                                                 \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29," \
    "%30,%31}"

// d[64][64] += a[64][16] b[16][64]. B_N_MAJOR: 1 where n is b's contiguous dimension.
template <int B_N_MAJOR> FA4_DEVICE void wgmma_ss(float (&d)[32], uint64_t a, uint64_t b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " FA4_D32_NAMES ", %32, %33, 1, 1, 1, 0, %34;"
                 : FA4_D32
                 : "l"(a), "l"(b), "n"(B_N_MAJOR)
                 : "memory");
}

template <int B_N_MAJOR> FA4_DEVICE void wgmma_rs(float (&d)[32], const uint32_t (&a)[4], uint64_t b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " FA4_D32_NAMES
                 ", {%32, %33, %34, %35}, %36, 1, 1, 1, %37;"
                 : FA4_D32
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(B_N_MAJOR)
                 : "memory");
}

template <bool A_IN_REGISTERS, int B_N_MAJOR> FA4_DEVICE void product(const wgmma_args &args)
{
    probe_smem &s = shared_memory();
    copy_to_shared(s, args.in, args.units);
    __syncthreads();
    const uint32_t data = shared_address(s.data);
    const uint64_t a0 = descriptor_at(args.a_high, args.a_low, data + args.a_start);
    const uint64_t b0 = descriptor_at(args.b_high, args.b_low, data + args.b_start);
    float d[32] = {};
    for (int i = 0; i < args.steps; i++) {
        const uint64_t b = b0 + i / args.b_inner * args.b_slab + i % args.b_inner * args.b_step;
        uint32_t a[4] = {};
        if (A_IN_REGISTERS) {
            const uint32_t *words =
                args.in + args.units * 4; // row 16 warp + lane / 4, columns 2 (lane % 4) and the next
            const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, pair = 8 * i + threadIdx.x % 4;
#pragma unroll
            for (int j = 0; j < 4; j++) a[j] = words[(row + 8 * (j & 1)) * args.steps * 8 + pair + 4 * (j >> 1)];
        }
        asm volatile("wgmma.fence.sync.aligned;" : : : "memory");
        if (A_IN_REGISTERS)
            wgmma_rs<B_N_MAJOR>(d, a, b);
        else
            wgmma_ss<B_N_MAJOR>(d, a0 + i / args.a_inner * args.a_slab + i % args.a_inner * args.a_step, b);
        asm volatile("wgmma.commit_group.sync.aligned;\n\twgmma.wait_group.sync.aligned 0;" : : : "memory");
        asm volatile("" : FA4_D32 : : "memory"); // d is read after the wait, not before
        if (A_IN_REGISTERS)
            asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3]) : : "memory"); // and a is kept
    }
#pragma unroll
    for (int i = 0; i < 32; i++) args.out[threadIdx.x * 32 + i] = __float_as_uint(d[i]);
}

FA4_PROBE(128) fa4_probe_wgmma(const __grid_constant__ wgmma_args args)
{
    product<false, 0>(args);
}

FA4_PROBE(128) fa4_probe_wgmma_registers(const __grid_constant__ wgmma_args args)
{
    product<true, 1>(args);
}
