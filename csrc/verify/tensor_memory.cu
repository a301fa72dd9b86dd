// Probes of tensor memory: what alloc returns, which lane and column a thread's registers are.
#include "probe.h"

struct alloc_args {
    const uint32_t *in;
    uint32_t *out; // [CTAs]: the address that a sole allocation of all columns has
};

FA4_PROBE(128) fa4_probe_alloc(const __grid_constant__ alloc_args args)
{
    probe_smem &s = shared_memory();
    begin<1>(s);
    if (threadIdx.x == 0) args.out[blockIdx.x] = s.tmem;
    end<1>(s);
}

struct words_args {
    const uint32_t *in; // [128 lanes][columns]
    uint32_t *out;      // as in
    int32_t columns;
};

// Through tensor memory and back.
FA4_PROBE(128) fa4_probe_words(const __grid_constant__ words_args args)
{
    probe_smem &s = shared_memory();
    begin<1>(s);
    store_tmem(s.tmem, args.in, args.columns);
    load_tmem(args.out, s.tmem, args.columns);
    end<1>(s);
}

struct shapes_args {
    const uint32_t *in; // [128 lanes][128 columns]
    uint32_t *out;      // [128 threads][8 registers]
    int32_t shape;      // 0: 16x64b, 1: 16x128b, 2: 16x256b, 3: 16x32bx2
};

// The other shapes of a load.
FA4_PROBE(128) fa4_probe_shapes(const __grid_constant__ shapes_args args)
{
    probe_smem &s = shared_memory();
    begin<1>(s);
    store_tmem(s.tmem, args.in, 128);
    const uint32_t tmem = s.tmem + own_lanes();
    uint32_t d[8];
    if (args.shape == 0) tcgen05_ld_16x64b_x8(d, tmem);
    if (args.shape == 1) tcgen05_ld_16x128b_x4(d, tmem);
    if (args.shape == 2) tcgen05_ld_16x256b_x2(d, tmem);
    if (args.shape == 3) tcgen05_ld_16x32bx2_x8(d, tmem);
    tcgen05_wait_ld();
#pragma unroll
    for (int i = 0; i < 8; i++) args.out[threadIdx.x * 8 + i] = d[i];
    end<1>(s);
}

struct cp_args {
    const uint32_t *in; // [CTAs][units * 4]: shared memory; [128 lanes][8 columns]: tensor memory before
    uint32_t *out;      // [CTAs][128 lanes][8 columns]
    int32_t kind, units;
    uint32_t high, low; // of the matrix descriptor
};

template <int GROUP> FA4_DEVICE void cp(const cp_args &args)
{
    probe_smem &s = shared_memory();
    copy_to_shared(s, args.in + blockIdx.x * args.units * 4, args.units);
    begin<GROUP>(s);
    store_tmem(s.tmem, args.in + gridDim.x * args.units * 4, 8);
    publish_tmem<GROUP>();
    if (threadIdx.x == 0 && blockIdx.x % GROUP == 0) {
        tcgen05_cp<GROUP>(args.kind, s.tmem, descriptor_at(args.high, args.low, shared_address(s.data)));
        tcgen05_commit<GROUP>(shared_address(&s.done));
    }
    wait_done<GROUP>(s, 0);
    load_tmem(args.out + blockIdx.x * 128 * 8, s.tmem, 8);
    end<GROUP>(s);
}

FA4_PROBE(128) fa4_probe_cp(const __grid_constant__ cp_args args)
{
    cp<1>(args);
}

FA4_PROBE(128) fa4_probe_cp_pair(const __grid_constant__ cp_args args)
{
    cp<2>(args);
}
