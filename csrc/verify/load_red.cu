// Probe of loads from tensor memory that find maxima, which B300 has.
#include "probe.h"

struct load_red_args {
    const uint32_t *in; // [128 lanes][128 columns]
    uint32_t *out;      // [128 lanes][4 loads][33]: 32 columns, and the largest of them
};

// A row in four loads and one wait, as softmax has its scores.
FA4_PROBE(128) fa4_probe_load_red(const __grid_constant__ load_red_args args)
{
    enum { LOADS = 4, WIDTH = 32 };
    probe_smem &s = shared_memory();
    begin<1>(s);
    store_tmem(s.tmem, args.in, LOADS * WIDTH);
    float d[LOADS][WIDTH], largest[LOADS];
#pragma unroll
    for (int f = 0; f < LOADS; f++)
        tcgen05_ld_red_32x32b_x32_max_nan(d[f], &largest[f], s.tmem + own_lanes() + f * WIDTH);
    tcgen05_wait_ld();
    uint32_t *out = args.out + threadIdx.x * LOADS * (WIDTH + 1);
#pragma unroll
    for (int f = 0; f < LOADS; f++) {
#pragma unroll
        for (int i = 0; i < WIDTH; i++) *out++ = __float_as_uint(d[f][i]);
        *out++ = __float_as_uint(largest[f]);
    }
    end<1>(s);
}
