// Probes of the tensor cores: operands as descriptors say, in shared or tensor memory, and where the result lies.
#include "probe.h"

struct product_args {
    const uint32_t
        *in;       // of each CTA: units of 16 bytes of shared memory, then tensor memory [128 lanes][n + a_columns]
    uint32_t *out; // [CTAs][128 lanes][n]
    int32_t units, n, a_columns;
    uint32_t idesc;
    int32_t steps, accumulate;
    // Of A and B: where they begin in shared memory, their descriptor's other bits, and how many units of 16 bytes
    // step i is further: i / inner * slab + i % inner * step.
    int32_t a_start;
    uint32_t a_high, a_low;
    int32_t a_inner, a_step, a_slab;
    int32_t b_start;
    uint32_t b_high, b_low;
    int32_t b_inner, b_step, b_slab;
    uint32_t off[8]; // lanes that a masked product leaves out
};

enum form { SS, TS, TF32, COLLECTOR, MASKED };

// Tensor memory: D in columns [0, n), A of the form TS after it.
template <int GROUP, form FORM> FA4_DEVICE void product(const product_args &args)
{
    probe_smem &s = shared_memory();
    const int columns = args.n + args.a_columns;
    const uint32_t *in = args.in + blockIdx.x * (args.units * 4 + 128 * columns);
    copy_to_shared(s, in, args.units);
    begin<GROUP>(s);
    store_tmem(s.tmem, in + args.units * 4, columns);
    publish_tmem<GROUP>();
    if (threadIdx.x == 0 && blockIdx.x % GROUP == 0) {
        const uint32_t data = shared_address(s.data), d = s.tmem;
        const uint64_t a0 = descriptor_at(args.a_high, args.a_low, data + args.a_start);
        const uint64_t b0 = descriptor_at(args.b_high, args.b_low, data + args.b_start);
        for (int i = 0; i < args.steps; i++) {
            const uint64_t a = a0 + i / args.a_inner * args.a_slab + i % args.a_inner * args.a_step;
            const uint64_t b = b0 + i / args.b_inner * args.b_slab + i % args.b_inner * args.b_step;
            const uint32_t accumulate = i > 0 || args.accumulate;
            if constexpr (FORM == SS) tcgen05_mma_ss<GROUP>(d, a, b, args.idesc, accumulate);
            if constexpr (FORM == TS) tcgen05_mma_ts<GROUP>(d, d + args.n + 8 * i, b, args.idesc, accumulate);
            if constexpr (FORM == TF32) tcgen05_mma_tf32(d, a, b, args.idesc, accumulate);
            if constexpr (FORM == MASKED) tcgen05_mma_masked<GROUP>(d, a, b, args.idesc, args.off);
            if constexpr (FORM == COLLECTOR) { // twice with the same A
                tcgen05_mma_collector_fill(d, a, b, args.idesc, accumulate);
                tcgen05_mma_collector_lastuse(d, a, b + args.b_slab, args.idesc, 1);
            }
        }
        tcgen05_commit<GROUP>(shared_address(&s.done));
    }
    wait_done<GROUP>(s, 0);
    load_tmem(args.out + blockIdx.x * 128 * args.n, s.tmem, args.n);
    end<GROUP>(s);
}

FA4_PROBE(128) fa4_probe_product(const __grid_constant__ product_args args)
{
    product<1, SS>(args);
}

FA4_PROBE(128) fa4_probe_product_tmem(const __grid_constant__ product_args args)
{
    product<1, TS>(args);
}

FA4_PROBE(128) fa4_probe_product_tf32(const __grid_constant__ product_args args)
{
    product<1, TF32>(args);
}

FA4_PROBE(128) fa4_probe_product_collector(const __grid_constant__ product_args args)
{
    product<1, COLLECTOR>(args);
}

FA4_PROBE(128) fa4_probe_product_masked(const __grid_constant__ product_args args)
{
    product<1, MASKED>(args);
}

FA4_PROBE(128) fa4_probe_pair(const __grid_constant__ product_args args)
{
    product<2, SS>(args);
}

FA4_PROBE(128) fa4_probe_pair_tmem(const __grid_constant__ product_args args)
{
    product<2, TS>(args);
}

FA4_PROBE(128) fa4_probe_pair_masked(const __grid_constant__ product_args args)
{
    product<2, MASKED>(args);
}
